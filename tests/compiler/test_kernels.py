"""FLOPs of JAX's own Pallas kernels, compiled for a TPU you do not have, against counts of the executed blocks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention
from jax.experimental.pallas.ops.tpu.matmul import matmul
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from rooftop.arrays import Mesh
from rooftop.compiler.compiling import CompileRequest
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.hlo.kernels import Kernel, kernel
from rooftop.compiler.worker import compile_here
from rooftop.hardware import Slice

pytestmark = pytest.mark.skipif(find_spec("libtpu") is None, reason="the extra 'compile' is not installed")

HEADS, TOKENS, HEAD = 4, 1024, 128
BLOCK = 128
BF16 = jnp.bfloat16


def attention(mask: Any, **options: Any) -> Callable[..., Any]:
    """Value and gradients of splash attention under a mask."""
    attend = splash.make_splash_mha(mask=masks.MultiHeadMask([mask] * HEADS), head_shards=1, q_seq_shards=1, **options)
    return jax.value_and_grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum(), argnums=(0, 1, 2))


def in_a_loop(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """The kernel in a scan: the tables of its mask come through the carry."""
    mask = masks.MultiHeadMask([masks.CausalMask((TOKENS, TOKENS))] * HEADS)
    attend = splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1)
    return jax.lax.scan(lambda x, _: (attend(x, k, v), None), q, None, length=5)[0]


def triangle(x: jax.Array, w: jax.Array) -> jax.Array:
    """A kernel with a loop whose trips depend on its program id: i + 1 matmuls in step i."""

    def body(x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        def step(_: int, total: jax.Array) -> jax.Array:
            return total + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

        zero = jnp.zeros((128, 256), jnp.float32)
        out_ref[...] = jax.lax.fori_loop(0, pl.program_id(0) + 1, step, zero)

    return pl.pallas_call(
        body,
        grid=(8,),
        in_specs=[pl.BlockSpec((128, 128), lambda i: (i, 0)), pl.BlockSpec((128, 256), lambda i: (0, 0))],
        out_specs=pl.BlockSpec((128, 256), lambda i: (i, 0)),
        out_shape=jax.ShapeDtypeStruct((1024, 256), jnp.float32),
    )(x, w)


def on_data(count: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    """A kernel with a matmul in the steps below a number that it gets as data."""

    def body(count_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        @pl.when(pl.program_id(0) < count_ref[0])
        def _() -> None:
            out_ref[...] = jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(8,),
        in_specs=[pl.BlockSpec((128, 128), lambda i, _: (i, 0)), pl.BlockSpec((128, 256), lambda i, _: (0, 0))],
        out_specs=pl.BlockSpec((128, 256), lambda i, _: (i, 0)),
    )
    return pl.pallas_call(body, grid_spec=grid, out_shape=jax.ShapeDtypeStruct((1024, 256), jnp.float32))(count, x, w)


def untold(count: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
    """A kernel with as many matmuls as it gets as data."""

    def body(count_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any) -> None:
        def step(_: int, total: jax.Array) -> jax.Array:
            return total + jnp.dot(x_ref[...], w_ref[...], preferred_element_type=jnp.float32)

        out_ref[...] = jax.lax.fori_loop(0, count_ref[0], step, jnp.zeros((1024, 256), jnp.float32))

    grid = pltpu.PrefetchScalarGridSpec(num_scalar_prefetch=1, grid=())
    return pl.pallas_call(body, grid_spec=grid, out_shape=jax.ShapeDtypeStruct((1024, 256), jnp.float32))(count, x, w)


def shape(*dims: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


QKV = [shape(HEADS, TOKENS, HEAD)] * 3
XW = [shape(1024, 128), shape(128, 256)]
COUNT = shape(1, dtype=jnp.int32)
FUSED = splash.BlockSizes(
    block_q=256, block_kv=256, block_kv_compute=128, block_q_dkv=256, block_kv_dkv=256, block_kv_dkv_compute=128,
    use_fused_bwd_kernel=True,
)  # fmt: skip
LOWER = np.tril(np.ones((TOKENS, TOKENS), bool))
PROGRAMS: Mapping[str, tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]] = {
    "causal": (attention(masks.CausalMask((TOKENS, TOKENS))), QKV),
    # A window shortens the grid: the blocks that are left come from a table.
    "window": (attention(masks.LocalMask((TOKENS, TOKENS), (256, 0), 0)), QKV),
    # Without a formula, blocks of the mask are operands.
    "mask": (attention(masks.NumpyMask(LOWER)), QKV),
    "fused": (attention(masks.CausalMask((TOKENS, TOKENS)), block_sizes=FUSED), QKV),
    "loop": (in_a_loop, QKV),
    "flash": (
        functools.partial(flash_attention, causal=True),
        [shape(2, HEADS, TOKENS, HEAD)] * 3,
    ),
    "matmul": (functools.partial(matmul, block_shape=(256, 256), block_k=256), [shape(1024, 1024)] * 2),
    "gmm": (gmm, [shape(1024, 512), shape(8, 512, 256), shape(8, dtype=jnp.int32)]),
    "tgmm": (tgmm, [shape(512, 1024), shape(1024, 256), shape(8, dtype=jnp.int32)]),
    "paged": (
        functools.partial(paged_attention, pages_per_compute_block=4),
        [shape(8, 16, 128), *[shape(4, 256, 16, 128)] * 2, shape(8, dtype=jnp.int32), shape(8, 32, dtype=jnp.int32)],
    ),
    "ragged": (
        functools.partial(
            ragged_paged_attention, num_kv_pages_per_block=8, num_queries_per_block=32, vmem_limit_bytes=2**26
        ),
        [
            shape(64, 16, 128), shape(256, 16, 8, 128), shape(64, dtype=jnp.int32), shape(64, 32, dtype=jnp.int32),
            shape(65, dtype=jnp.int32), COUNT,
        ],
    ),
    "triangle": (triangle, XW),
    "on_data": (on_data, [COUNT, *XW]),
    "untold": (untold, [COUNT, *XW]),
}  # fmt: skip


def lower(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """One of the programs, for ``rooftop.compiler.compiling.CompileRequest``."""
    program, shapes = PROGRAMS[arguments["name"]]
    with jax.set_mesh(mesh):
        whole = jax.shard_map(program, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(whole).lower(*shapes)


@functools.cache
def compiled_text(name: str) -> str:
    mesh = Mesh.from_layout(Slice.parse("v5p:2x2x1"), "X=x+y")
    request = CompileRequest(mesh=mesh, program=f"{__name__}:lower", arguments={"name": name})
    return compile_here(request).hlo_text


def compiled(name: str) -> hlo.Module:
    return hlo.parse(compiled_text(name))


def kernels(module: hlo.Module) -> list[Kernel]:
    calls = (kernel(module, inside, call) for inside in module.computations.values() for call in inside)
    return [call for call in calls if call is not None]


def matmuls(blocks: int, count: int, block: int = BLOCK) -> float:
    """FLOPs of so many matmuls in each block of scores of every head."""
    return float(HEADS * blocks * count * 2 * block * block * HEAD)


#: Blocks of 128 of a causal triangle of 1024, and of a window of 256 keys before each query.
TRIANGLE, WINDOW = 36, 1 + 2 + 6 * 3


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("causal", [matmuls(TRIANGLE, 2), matmuls(TRIANGLE, 3), matmuls(TRIANGLE, 4)]),
        ("window", [matmuls(WINDOW, 2), matmuls(WINDOW, 3), matmuls(WINDOW, 4)]),
        ("mask", [matmuls(TRIANGLE, 2), matmuls(TRIANGLE, 3), matmuls(TRIANGLE, 4)]),
        ("fused", [matmuls(10, 2, 256), matmuls(10, 5, 256)]),
        ("loop", [matmuls(TRIANGLE, 2)]),
        ("flash", [2 * matmuls(TRIANGLE, 2)]),
        ("matmul", [2.0 * 1024**3]),
        ("triangle", [2.0 * 128 * 128 * 256 * 36]),
    ],
)
def test_the_body_over_the_grid(name: str, flops: list[float]) -> None:
    calls = kernels(compiled(name))
    # The compiler orders the kernels of the backward pass as it likes.
    assert sorted((call.flops or 0.0, call.evidence, call.limit) for call in calls) == [
        (one, "body", "") for one in flops
    ]


@pytest.mark.parametrize(
    ("name", "flops", "evidence", "limit"),
    [
        ("gmm", 2.0 * 1024 * 512 * 256, "estimate", ""),
        ("tgmm", 2.0 * 1024 * 512 * 256, "estimate", ""),
        ("paged", 4.0 * 8 * 16 * 128 * 32 * 16, "shapes", "at most"),
        ("ragged", 4.0 * 64 * 16 * 128 * 32 * 16, "shapes", "at most"),
        ("on_data", 2.0 * 1024 * 128 * 256, "body", "at most"),
        ("untold", None, "", ""),
    ],
)
def test_work_that_depends_on_data(name: str, flops: float | None, evidence: str, limit: str) -> None:
    (call,) = kernels(compiled(name))
    assert (call.flops, call.evidence, call.limit) == (flops, evidence, limit)


@pytest.mark.parametrize("name", ["gmm", "tgmm"])
def test_grouped_matmuls_without_an_estimate(name: str) -> None:
    """The shapes of the operands say the same as the estimate of the kernel's authors."""
    text = compiled_text(name)
    assert '"cost_estimate"' in text
    module = hlo.parse(text.replace('"cost_estimate"', '"none"'))
    (call,) = kernels(module)
    assert (call.flops, call.evidence) == (2.0 * 1024 * 512 * 256, "shapes")


def test_tables_that_the_text_leaves_out() -> None:
    """Every block counts, and it says so."""
    module = hlo.parse(re.sub(r"constant\(\{ .*?\}\)", "constant({...})", compiled_text("causal")))
    calls = sorted((call.flops or 0.0, call.limit) for call in kernels(module))
    assert calls == [(matmuls(64, count), "at most") for count in (2, 3, 4)]


def test_times_are_those_of_the_work_and_the_verdict_says_what_is_not_known() -> None:
    from rooftop.explain.compiled.report import kernels_text
    from rooftop.explain.compiled.rooflines import called_kernels
    from rooftop.roofline.rates import Rates

    rates = Rates.of(Slice.parse("v5p:2x2x1").chip)
    peak_s = sum(call.flops or 0.0 for call in kernels(compiled("causal"))) / rates.flops_per_s["bf16"]
    assert sum(call.expected_s(rates) for call in kernels(compiled("causal"))) > peak_s
    assert kernels_text(called_kernels(compiled("causal"))) == ""
    assert kernels_text(called_kernels(compiled("untold"))) == "; 1 kernel of unknown FLOPs: a lower bound"
    assert kernels_text([*called_kernels(compiled("paged"))] * 2) == (
        "; 2 kernels counted as if no block were skipped: at most"
    )
