"""Reading compiled programs: groups against brute force, FLOPs and collectives against arithmetic and XLA's own count.

No HLO is stored here: every text is what the installed compiler prints, for the CPU or for a TPU you do not have.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P, named_scope
from jax.experimental import pallas as pl

from rooftop.arrays import AXES, Mesh
from rooftop.compiler.compiling import Compiled, CompileRequest, compile_ahead_of_time
from rooftop.compiler.devices import topology_mesh
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.hlo.costs import is_matmul, matmul_batch, matmul_flops
from rooftop.compiler.hlo.groups import replica_groups, varying_axes
from rooftop.compiler.hlo.kernels import Kernel, kernel
from rooftop.compiler.hlo.places import before
from rooftop.compiler.hlo.scopes import StackFrame, source_of
from rooftop.compiler.ledger import read_ledger
from rooftop.compiler.targets import PLUGIN
from rooftop.compiler.worker import compile_here
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.ledger import Ledger
from rooftop.hardware import Slice
from tests.support.examples import examples

TRIPS = 3


def mesh_on(slice_: str, layout: str = "") -> Mesh:
    """A mesh with every axis that programs name; those not in ``layout`` have size one."""
    whole = Slice.parse(slice_)
    axes = Mesh.from_layout(whole, layout).axes if layout else {}
    return Mesh(whole, {name: axes.get(name, ()) for name in AXES})


# ---- replica groups -------------------------------------------------------------------------------------------------


@st.composite
def meshes(draw: st.DrawFn) -> tuple[dict[str, int], list[str]]:
    """Axis sizes, and some of the axes."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    names = [f"axis_{i}" for i in range(len(sizes))]
    return dict(zip(names, sizes, strict=True)), draw(st.lists(st.sampled_from(names), unique=True))


def brute_force(axes: Mapping[str, int], chosen: list[str], order: list[int]) -> set[frozenset[int]]:
    """Devices that agree on every axis that is not chosen; ``order`` lists device ids by place in the mesh."""
    groups: dict[tuple[int, ...], set[int]] = {}
    for place, coordinates in enumerate(itertools.product(*(range(size) for size in axes.values()))):
        key = tuple(c for name, c in zip(axes, coordinates, strict=True) if name not in chosen)
        groups.setdefault(key, set()).add(order[place])
    return {frozenset(group) for group in groups.values()}


def spelled(axes: Mapping[str, int]) -> str:
    return ",".join(f"'{name}'={size}" for name, size in axes.items())


def read(text: str, devices: int) -> set[frozenset[int]]:
    """Groups of an instruction's attributes, with others around them."""
    groups = replica_groups(f" channel_id=7, replica_groups={text}, use_global_device_ids=true", devices)
    assert sorted(member for group in groups for member in group) == list(range(devices))
    return {frozenset(group) for group in groups}


@given(meshes())
def test_every_spelling_of_the_same_groups(mesh: tuple[dict[str, int], list[str]]) -> None:
    axes, chosen = mesh
    devices, names = math.prod(axes.values()), list(axes)
    expected = brute_force(axes, chosen, list(range(devices)))
    lists = ",".join("{" + ",".join(map(str, sorted(group))) + "}" for group in expected)
    rest = [name for name in names if name not in chosen]
    permutation = [names.index(name) for name in [*rest, *(name for name in names if name in chosen)]]
    width = math.prod(axes[name] for name in chosen)
    iota = f"[{devices // width},{width}]<=[{','.join(map(str, axes.values()))}]T({','.join(map(str, permutation))})"
    along = ",".join(f"'{name}'" for name in chosen)
    assert read("{" + lists + "}", devices) == expected
    assert read(iota, devices) == expected
    assert read(f"mesh[{spelled(axes)}] {{{along}}}", devices) == expected
    assert read("{}", devices) == {frozenset(range(devices))}
    assert read(f"[{devices},1]<=[{devices}]", devices) == {frozenset({i}) for i in range(devices)}


@given(meshes(), st.randoms(use_true_random=False))
def test_mesh_with_its_own_device_order(mesh: tuple[dict[str, int], list[str]], random: Any) -> None:
    axes, chosen = mesh
    devices = math.prod(axes.values())
    along = ",".join(f"'{name}'" for name in chosen)
    order = list(range(devices))
    random.shuffle(order)
    listed = f"mesh[{spelled(axes)}], device_ids=({','.join(map(str, order))}) {{{along}}}"
    assert read(listed, devices) == brute_force(axes, chosen, order)
    sizes = list(axes.values())
    permutation = list(range(len(sizes)))
    random.shuffle(permutation)
    turned = np.arange(devices).reshape(sizes).transpose(permutation).reshape(-1)
    text = f"[{','.join(map(str, sizes))}]T({','.join(map(str, permutation))})"
    iota = f"mesh[{spelled(axes)}], device_ids=({text}) {{{along}}}"
    assert read(iota, devices) == brute_force(axes, chosen, turned.tolist())


@given(st.integers(1, 3), st.integers(2, 3), st.integers(1, 3), st.integers(1, 3))
def test_part_of_an_axis(before: int, part: int, after: int, other: int) -> None:
    """``'a':(before)part`` selects the middle factor of an axis of before x part x after devices."""
    size = before * part * after
    devices = size * other
    expected = brute_force({"major": before, "part": part, "minor": after, "b": other}, ["part"], list(range(devices)))
    assert read(f"mesh['a'={size},'b'={other}] {{'a':({before}){part}}}", devices) == expected


@given(meshes())
def test_axes_are_those_that_vary(mesh: tuple[dict[str, int], list[str]]) -> None:
    axes, chosen = mesh
    groups = tuple(tuple(sorted(group)) for group in brute_force(axes, chosen, list(range(math.prod(axes.values())))))
    assert varying_axes(groups, axes) == tuple(name for name in axes if name in chosen and axes[name] > 1)


def test_groups_that_are_none() -> None:
    pairs = 'source_target_pairs={{0,1},{1,0}}, metadata={op_name="a"}'
    assert replica_groups(pairs, 2) == ((0, 1), (1, 0))
    with pytest.raises(RooftopError, match="iota tile assignment"):
        replica_groups("replica_groups=all", 4)
    with pytest.raises(RooftopError, match="4 devices"):
        varying_axes(((0, 5),), {"a": 4})


# ---- FLOPs and loops, on the CPU's compiler -------------------------------------------------------------------------


def total_flops(module: hlo.Module) -> float:
    """Matmul FLOPs of one execution, loops multiplied out."""
    return sum(
        module.executions[computation.name] * matmul_flops(computation, instruction)
        for computation in module.computations.values()
        for instruction in computation
        if instruction.opcode in ("dot", "convolution")
    )


@settings(max_examples=examples(40))
@given(
    size=st.integers(1, 9),
    kernel=st.integers(1, 4),
    stride=st.integers(1, 3),
    padding=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    dilations=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.sampled_from([(1, 1), (2, 1), (1, 2)]),
)
def test_convolution_flops_equal_xlas_count(
    size: int, kernel: int, stride: int, padding: tuple[int, int], dilations: tuple[int, int], groups: tuple[int, int]
) -> None:
    """Whatever window a matmul is written with, against XLA's own cost analysis of the same instruction."""
    features, batches = groups
    if (size - 1) * dilations[0] + 1 + sum(padding) < (kernel - 1) * dilations[1] + 1:
        return  # the kernel is larger than its input: nothing is computed
    lowered = jax.jit(
        lambda x, w: jax.lax.conv_general_dilated(
            x, w, (stride,), [padding], lhs_dilation=dilations[:1], rhs_dilation=dilations[1:],
            dimension_numbers=("NWC", "WIO", "NWC"), feature_group_count=features, batch_group_count=batches,
        )
    ).lower(jnp.zeros((4, size, 6)), jnp.zeros((kernel, 6 // features, 4)))  # fmt: skip
    cost = lowered.cost_analysis()
    assert total_flops(hlo.parse(lowered.as_text("hlo"))) == cost.get("flops", 0.0)


@settings(max_examples=examples(20))
@given(st.tuples(*[st.integers(1, 5)] * 5))
def test_dot_flops_equal_xlas_count(sizes: tuple[int, ...]) -> None:
    b, m, k, h, n = sizes
    lowered = jax.jit(lambda x, w: jnp.einsum("bmkh,bkhn->bmn", x, w)).lower(
        jnp.zeros((b, m, k, h)), jnp.zeros((b, k, h, n))
    )
    assert total_flops(hlo.parse(lowered.as_text("hlo"))) == 2 * b * m * k * h * n == lowered.cost_analysis()["flops"]


def test_loops_multiply() -> None:
    """Nested scans, loops that count up and down from elsewhere; those that end with data or equality count once."""
    x, w = jnp.ones((128, 128)), jnp.ones((4, 128, 128))

    def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w)

    def nested(x: jax.Array) -> jax.Array:
        inner = lambda x, _: (jax.lax.scan(lambda x, w: (matmul(x, w), None), x, w)[0], None)  # noqa: E731
        return jax.lax.scan(inner, x, length=5)[0]

    def counted(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(2, 9, lambda i, x: matmul(x, w[0]), x)

    def down(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] > 3, lambda c: (c[0] - 2, matmul(c[1], w[0])), (10, x))[1]

    def unknown(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda x: x.sum() > 3, lambda x: matmul(x, w[0]), x)

    once = 2 * 128**3

    def until(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(lambda c: c[0] != 3, lambda c: (c[0] + 1, matmul(c[1], w[0])), (0, x))[1]

    uncounted = (unknown, until)
    for function, times in ((nested, 20), (counted, 7), (down, 4), (unknown, 1), (until, 1)):
        text = jax.jit(function).lower(x).compile().as_text()
        module = hlo.parse(text)
        assert total_flops(module) == times * once
        assert bool(module.uncounted_loops) == (function in uncounted)
        if function in uncounted:
            continue
        # The CPU's compiler prints the trip counts that it knows.
        printed = Counter(re.findall(r'known_trip_count":\{"n":"(\d+)"', text))
        derived = Counter(
            str(module.trip_count(computation, instruction))
            for computation in module.computations.values()
            for instruction in computation
            if instruction.opcode == "while"
        )
        assert derived == printed


def test_memory_spaces_and_source_lines() -> None:
    """A layout says where an array lies; the tables at the head of the text where an instruction comes from."""
    text = """HloModule m, is_scheduled=true

FileNames
1 "<frozen runpy>"
2 "/a/b.py"

FunctionNames
1 "f"

FileLocations
1 {file_name_id=1 function_name_id=1 line=3 end_line=3 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=45 end_line=46 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}


ENTRY %main (x: bf16[8,128]) -> bf16[8,128] {
  %x = bf16[8,128]{1,0:T(8,128)(2,1)} parameter(0)
  %start = (bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, bf16[8,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%x)
  ROOT %done = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} copy-done(%start), metadata={op_name="f/a" stack_frame_id=2}
}
"""
    module = hlo.parse(text)
    x, start, done = module.computations["main"]
    assert [tensor.space for tensor in (*x.shape, *start.shape, *done.shape)] == [0, 1, 0, 2, 1]
    assert (module.source(done), module.source(x)) == ("/a/b.py:45", "")


def kernel_text(op_name: str, name: str = "splash_mha_dq_no_residuals.1", target: str = "tpu_custom_call") -> str:
    """A module with one kernel, whose metadata XLA prints over three lines, and an instruction after it."""
    return f"""HloModule m, is_scheduled=true

ENTRY %main (x: bf16[8,256,128]) -> bf16[8,256,128] {{
  %x = bf16[8,256,128]{{2,1,0:T(8,128)(2,1)}} parameter(0)
  %{name} = bf16[8,256,128] custom-call(%x, %x, %x), custom_call_target="{target}", frontend_attributes={{metadata={{
"xprof_metadata":"{{\\"block_q\\": 1024}}"
}}}}, metadata={{op_name="{op_name}"}}, backend_config={{"custom_call_config":{{"body":"TUzvUg=="}}}}
  ROOT %copy = bf16[8,256,128] copy(%{name}), metadata={{op_name="{op_name}"}}
}}
"""


FLOPS = "kernel_flops[fwd=200,dq=300,dkv=400]"
CORE = f"jit(f)/transpose(jvp())/while/body/checkpoint/layers/attn/core/{FLOPS}/splash_mha_dq_no_residuals/pallas_call"


def test_instructions_over_several_lines() -> None:
    """A line that begins with a brace ends a computation only if nothing else stands there."""
    x, called, copy = hlo.parse(kernel_text(CORE)).computations["main"]
    assert (called.opcode, called.op_name, called.operands) == ("custom-call", CORE, (x.name,) * 3)
    assert (copy.opcode, copy.operands) == ("copy", (called.name,))


@pytest.mark.parametrize(
    ("op_name", "target", "flops"),
    [
        (CORE, "tpu_custom_call", 300.0),
        (CORE.replace("_dq_", "_dkv_"), "tpu_custom_call", 400.0),
        (CORE.replace("dq_no", "fwd"), "tpu_custom_call", 200.0),
        # What is declared innermost counts; 'each' stands for any name.
        (CORE.replace("body", "kernel_flops[dq=1]"), "tpu_custom_call", 300.0),
        (CORE.replace(FLOPS, "kernel_flops[each=7]"), "tpu_custom_call", 7.0),
        (CORE.replace(FLOPS, "kernel_flops[gmm=7]"), "tpu_custom_call", None),
        (CORE.replace(FLOPS, "kernel_flops[]"), "tpu_custom_call", None),
        (CORE.replace(FLOPS + "/", ""), "tpu_custom_call", None),
        (CORE.replace(FLOPS, "kernel_flops[fwd=5,bwd=6]"), "__cudnn$fmhaSoftmax", 5.0),
        (CORE.replace(FLOPS, "kernel_flops[fwd=5,bwd=6]"), "__cudnn$fmhaSoftmaxBackward", 6.0),
        (CORE, "ConcatBitcast", None),
    ],
)
def test_kernels_declare_their_flops(op_name: str, target: str, flops: float | None) -> None:
    module = hlo.parse(kernel_text(op_name, target=target))
    main = module.computations["main"]
    called, copied = (kernel(module, main, instruction) for instruction in list(main)[1:])
    assert copied is None
    assert called == (None if target == "ConcatBitcast" else Kernel() if flops is None else called)
    assert called is None or called.flops == flops
    rows = [(row.scope, row.phase, row.count, row.kernel_flops) for row in read_ledger(module, {"data": 1})]
    assert rows == ([] if flops is None else [("layers/attn/core", "backward", 1, flops)])


def test_text_that_is_not_hlo() -> None:
    with pytest.raises(RooftopError, match="ENTRY"):
        hlo.parse("MODULE {}")


# ---- XLA:TPU --------------------------------------------------------------------------------------------------------

#: Matmuls by scope: shapes as they are met in transformers, with batch dims, several contracted dims and transposes.
EINSUMS = {
    "layers/attn/qkv": ("btd,dnh->btnh", (2, 256, 512), (512, 4, 128)),
    "layers/attn/core": ("btnh,bsnh->bnts", (2, 256, 4, 128), (2, 256, 4, 128)),
    "layers/attn/out": ("btnh,nhd->btd", (2, 256, 4, 128), (4, 128, 512)),
    "layers/mlp/up": ("td,df->tf", (256, 512), (512, 1024)),
    "layers/mlp/down": ("tf,df->dt", (256, 1024), (512, 1024)),
}


def matmuls(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """Every einsum and its gradients, in a scan."""

    def loss(operands: dict[str, tuple[jax.Array, jax.Array]]) -> jax.Array:
        total = jnp.float32(0)
        for scope, (subscripts, _, _) in EINSUMS.items():
            with named_scope(scope):
                product = jnp.einsum(subscripts, *operands[scope])
            total += jnp.sum(jnp.sin(product.astype(jnp.float32)))
        return total

    def body(carry: jax.Array, operands: Any) -> tuple[jax.Array, Any]:
        value, gradients = jax.value_and_grad(loss)(operands)
        return carry + value, gradients

    shapes = {
        scope: tuple(jax.ShapeDtypeStruct((TRIPS, *shape), jnp.bfloat16) for shape in operands)
        for scope, (_, *operands) in EINSUMS.items()
    }
    with jax.set_mesh(mesh):
        return jax.jit(lambda xs: jax.lax.scan(body, jnp.float32(0), xs)).lower(shapes)


#: Payload of one device in every collective below: [ROWS, 512] bf16.
ROWS = 256


def collectives(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """One collective in each of several scopes, in a scan; the mesh is fsdp 4 x tensor 4."""

    def local(x: jax.Array) -> jax.Array:
        with named_scope("layers/attn/qkv"):
            x = jnp.tanh(jax.lax.all_gather(x[: ROWS // 4], "fsdp", tiled=True))
        with named_scope("layers/attn/out"):
            x = jnp.tile(jnp.tanh(jax.lax.psum_scatter(x, "tensor", tiled=True)), (4, 1))
        with named_scope("layers/attn/core"):
            x = jnp.tanh(jax.lax.ppermute(x, "tensor", [(i, (i + 1) % 4) for i in range(4)]))
        with named_scope("layers/moe/dispatch"):
            x = jnp.tanh(jax.lax.all_to_all(x, "fsdp", 0, 0, tiled=True))
        with named_scope("gradients"):
            return jnp.tanh(jax.lax.psum(x, ("fsdp", "tensor")))

    def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        spec = P(("fsdp", "tensor"), None)
        return jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)(x), None

    sharding = jax.sharding.NamedSharding(mesh, P(("fsdp", "tensor"), None))
    with jax.set_mesh(mesh):
        return jax.jit(lambda x: jax.lax.scan(body, x, length=TRIPS)[0]).lower(
            jax.ShapeDtypeStruct((16 * ROWS, 512), jnp.bfloat16, sharding=sharding)
        )


#: What a program does along axes of the mesh, each in a scope of its own.
STEPS = {
    "all_gather": ("layers/mlp/up", lambda x, axes, n: jax.lax.all_gather(x, axes, tiled=True)[: x.shape[0]]),
    "all_reduce": ("loss", lambda x, axes, n: jax.lax.psum(x, axes)),
    "reduce_scatter": (
        "layers/mlp/down",
        lambda x, axes, n: jnp.tile(jax.lax.psum_scatter(x, axes, tiled=True), (n, 1)),
    ),
    "all_to_all": ("layers/moe/dispatch", lambda x, axes, n: jax.lax.all_to_all(x, axes, 0, 0, tiled=True)),
    "permute": ("pipeline", lambda x, axes, n: jax.lax.ppermute(x, axes, [(i, (i + 1) % n) for i in range(n)])),
}


def steps(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """One collective of each kind over the axes that are asked for, on [ROWS, 512] bf16 of each device."""
    axes, everyone = tuple(arguments["axes"]), tuple(name for name, size in mesh.shape.items() if size > 1)

    def local(x: jax.Array) -> jax.Array:
        for scope, step in STEPS.values():
            with named_scope(scope):
                x = jnp.sin(step(jnp.tanh(x), axes, math.prod(mesh.shape[name] for name in axes)))
            # What stands in two scopes stays two instructions.
            x = jax.lax.optimization_barrier(x)
        return x

    spec = P(everyone, None)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    with jax.set_mesh(mesh):
        program = jax.shard_map(local, in_specs=spec, out_specs=spec, check_vma=False)
        return jax.jit(program).lower(jax.ShapeDtypeStruct((mesh.size * ROWS, 512), jnp.bfloat16, sharding=sharding))


def loops(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """4 matmuls in a scan of 5, then a Pallas kernel, then 7 matmuls in a loop that counts from 2."""

    def increment(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + 1

    def program(x: jax.Array, w: jax.Array) -> jax.Array:
        def outer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0], None

        x = jax.lax.scan(outer, x, length=5)[0]
        x = pl.pallas_call(increment, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))(x)
        return jax.lax.fori_loop(2, 9, lambda i, x: jnp.tanh(x @ w[i % 4]), x)

    with jax.set_mesh(mesh):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((256, 256), (4, 256, 256))]
        return jax.jit(program).lower(*shapes)


def too_large(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """Three arrays of the given number of elements on one device."""
    shape = jax.ShapeDtypeStruct((arguments["elements"] // 128, 128), jnp.float32)
    with jax.set_mesh(mesh):
        return jax.jit(lambda a, b: a @ b.T @ a + b).lower(shape, shape)


def compiled(program: str, slice_: str, layout: str = "", **arguments: Any) -> Compiled:
    """Compile a function of this file in this process: its environment is that of the worker (see conftest)."""
    request = CompileRequest(mesh=mesh_on(slice_, layout), program=f"{__name__}:{program}", arguments=arguments)
    return Compiled(mesh=request.mesh, **vars(compile_here(request)))


def ledger_of(program: Compiled) -> Ledger:
    return read_ledger(program.module, program.mesh.shape, program.mesh)


def flops_by_key(ledger: Ledger) -> dict[tuple[str, str], float]:
    return {
        key: sum(float(row.count) * sum(map(float, row.flops.values())) for row in rows)
        for key, rows in ledger.by_key().items()
    }


@pytest.mark.slow
def test_matmul_flops_on_tpu() -> None:
    """XLA:TPU writes matmuls as convolutions with windows: FLOPs are still 2 B M N K, in every scope and phase."""
    program = compiled("matmuls", "v5e:1x1")
    assert "convolution(" in program.hlo_text
    expected = {}
    for scope, (subscripts, left, right) in EINSUMS.items():
        names = dict(zip("".join(subscripts.split("->")[0].split(",")), (*left, *right), strict=True))
        expected[scope, "forward"] = 2.0 * TRIPS * math.prod(names.values())
        expected[scope, "backward"] = 2 * expected[scope, "forward"]
    assert {key: flops for key, flops in flops_by_key(ledger_of(program)).items() if flops} == expected
    assert {row.count for row in ledger_of(program) if row.flops} == {TRIPS}
    assert {dtype for row in ledger_of(program) for dtype in row.flops} == {"bf16"}
    batches = {
        (scope, matmul_batch(computation, instruction))
        for computation in program.module.computations.values()
        for instruction in computation
        if is_matmul(instruction)
        for scope in EINSUMS
        if scope in instruction.op_name
    }
    assert batches == {(scope, 8 if scope == "layers/attn/core" else 1) for scope in EINSUMS}
    assert not program.module.uncounted_loops
    assert 0 < program.peak_bytes < program.mesh.slice.device_hbm_usable_bytes
    assert set(program.versions) == {"jax", "jaxlib", "libtpu"}


def test_loops_on_tpu() -> None:
    """Trip counts follow from the conditions: the TPU's text prints none."""
    program = compiled("loops", "v5e:1x1")
    assert "known_trip_count" not in program.hlo_text
    assert "tpu_custom_call" in program.hlo_text
    assert program.module.uncounted_loops == ()
    assert total_flops(program.module) == (4 * 5 + 7) * 2 * 256**3


def test_collectives_on_tpu() -> None:
    """One logical collective per scope and trip, whatever instructions the compiler makes of it."""
    program = compiled("collectives", "v5e:4x4", "fsdp=x,tensor=y")
    payload = ROWS * 512 * 2.0
    moved = {
        (row.scope, collective.kind, collective.axes): (row.count, collective.bytes, collective.wire_bytes)
        for row in ledger_of(program)
        for collective in row.collectives
    }
    assert moved == {
        ("layers/attn/qkv", "all_gather", ("fsdp",)): (TRIPS, payload, payload * 3 / 4),
        ("layers/attn/out", "reduce_scatter", ("tensor",)): (TRIPS, payload, payload * 3 / 4),
        ("layers/attn/core", "permute", ("tensor",)): (TRIPS, payload, payload),
        ("layers/moe/dispatch", "all_to_all", ("fsdp",)): (TRIPS, payload, payload * 3 / 4),
        ("gradients", "all_reduce", ("fsdp", "tensor")): (TRIPS, payload, payload * 2 * 15 / 16),
    }


@pytest.mark.parametrize(
    ("slice_", "layout", "axes", "members"),
    [
        pytest.param("v5e:4x4@4", "data=dcn[2:2],stage=dcn[1:2],fsdp=x,tensor=y", ["data"], 2, marks=pytest.mark.slow),
        pytest.param("v5e:4x4@4", "data=dcn[2:2],stage=dcn[1:2],fsdp=x,tensor=y", ["stage"], 2, marks=pytest.mark.slow),
        # The slices are the inner axis of the mesh: within a slice XLA numbers partitions without it.
        pytest.param("v5e:4x4@2", "data=x,fsdp=dcn,tensor=y", ["fsdp"], 2, marks=pytest.mark.slow),
        pytest.param("v5e:4x4@2", "data=x,fsdp=dcn,tensor=y", ["data"], 4, marks=pytest.mark.slow),
        # Over both networks: what XLA takes apart is one collective again.
        ("v5e:4x4@2", "data=x,fsdp=y+dcn", ["fsdp"], 8),
        pytest.param("tpu7x:2x2x1@2", "data=dcn,fsdp=x+y,tensor=core", ["data"], 2, marks=pytest.mark.slow),
    ],
)
def test_collectives_between_slices(slice_: str, layout: str, axes: list[str], members: int) -> None:
    """XLA hands them to the hosts and drops their names: kind, axes, payload and scope are found again."""
    program = compiled("steps", slice_, layout, axes=axes)
    payload = ROWS * 512 * 2.0
    share = (members - 1) / members
    moved = {
        (row.scope, collective.kind): (row.count, collective.axes, collective.bytes, collective.wire_bytes)
        for row in ledger_of(program)
        for collective in row.collectives
    }
    expected = {
        "all_gather": (payload * members, share * payload * members),
        "all_reduce": (payload, 2 * share * payload),
        "reduce_scatter": (payload, share * payload),
        "all_to_all": (payload, share * payload),
        "permute": (payload, payload),
    }
    if "+dcn" in layout:
        # Within a slice XLA sums all of it, and then scatters between slices.
        expected["reduce_scatter"] = (payload, (2 * 3 / 4 + 1 / 2 / 4) * payload)
    assert moved == {(STEPS[kind][0], kind): (1, tuple(axes), *sizes) for kind, sizes in expected.items()}


#: Two sums over both slices as XLA:TPU writes them: within each slice at once, between slices and gathered one by one.
COMBINED_SUMS = """HloModule sums, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

ENTRY %main (x: bf16[64,512], y: bf16[256,512]) -> (bf16[64,512], bf16[256,512]) {
  %x = bf16[64,512]{1,0} parameter(0)
  %y = bf16[256,512]{1,0} parameter(1)
  %all-reduce.1 = (bf16[64,512]{1,0}, bf16[256,512]{1,0}) all-reduce(%x, %y), channel_id=1, GROUPS, to_apply=%add
  %x.1 = bf16[64,512]{1,0} get-tuple-element(%all-reduce.1), index=0
  %x.2 = bf16[8,512]{1,0} slice(%x.1), slice={[0:8], [0:512]}
  %token.1 = token[] after-all()
  %recv.1 = (bf16[8,512]{1,0}, u32[], token[]) recv(%token.1), channel_id=2, TRANSFER1
  %send.1 = (bf16[8,512]{1,0}, u32[], token[]) send(%x.2, %token.1), channel_id=3, TRANSFER1
  %y.1 = bf16[256,512]{1,0} get-tuple-element(%all-reduce.1), index=1
  %y.2 = bf16[32,512]{1,0} slice(%y.1), slice={[0:32], [0:512]}
  %recv.2 = (bf16[32,512]{1,0}, u32[], token[]) recv(%token.1), channel_id=4, TRANSFER2
  %send.2 = (bf16[32,512]{1,0}, u32[], token[]) send(%y.2, %token.1), channel_id=5, TRANSFER2
  %recv-done.1 = (bf16[8,512]{1,0}, token[]) recv-done(%recv.1), channel_id=2, is_host_transfer=true
  %x.3 = bf16[8,512]{1,0} get-tuple-element(%recv-done.1), index=0
  %x.4 = bf16[64,512]{1,0} all-gather(%x.3), channel_id=6, GROUPS, dimensions={0}
  %recv-done.2 = (bf16[32,512]{1,0}, token[]) recv-done(%recv.2), channel_id=4, is_host_transfer=true
  %y.3 = bf16[32,512]{1,0} get-tuple-element(%recv-done.2), index=0
  %y.4 = bf16[256,512]{1,0} all-gather(%y.3), channel_id=7, GROUPS, dimensions={0}
  ROOT %results = (bf16[64,512]{1,0}, bf16[256,512]{1,0}) tuple(%x.4, %y.4)
}
"""


def test_sums_that_are_combined_within_slices() -> None:
    """Two sums that XLA does in one instruction within each slice are two collectives, each with its own steps."""
    target = '_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"'
    text = COMBINED_SUMS.replace("GROUPS", "replica_groups={{0,1,2,3,4,5,6,7}}")
    for number in (1, 2):
        of = f'_xla_host_transfer_rendezvous="sum.{number}"'
        text = text.replace(f"TRANSFER{number}", f"is_host_transfer=true, frontend_attributes={{{of},{target}}}")
    mesh = mesh_on("v5p:2x2x2@2", "fsdp=x+y+z+dcn")
    moved = [
        (move.kind, move.axes, move.bytes)
        for row in read_ledger(hlo.parse(text), mesh.shape, mesh)
        for move in row.collectives
    ]
    assert sorted(moved) == [("all_reduce", ("fsdp",), rows * 512 * 2.0) for rows in (64, 256)]


PADDED_SUM = """HloModule jit_step, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

ENTRY %main (x: bf16[6,512]) -> bf16[6,512] {
  %x = bf16[6,512]{1,0} parameter(0)
  %zero = bf16[] constant(0)
  %start = u32[] constant(0)
  %all-reduce.1 = bf16[6,512]{1,0} all-reduce(%x), channel_id=1, GROUPS, to_apply=%add
  %x.1 = bf16[6,64]{1,0} slice(%all-reduce.1), slice={[0:6], [0:64]}
  %x.2 = bf16[8,128]{1,0} custom-call(%x.1), custom_call_target="ZeroCrop"
  %x.3 = bf16[1,8,128]{2,1,0} bitcast(%x.2)
  %token.1 = token[] after-all()
  %recv.1 = (bf16[1,8,128]{2,1,0}, u32[], token[]) recv(%token.1), channel_id=2, TRANSFER
  %send.1 = (bf16[1,8,128]{2,1,0}, u32[], token[]) send(%x.3, %token.1), channel_id=3, TRANSFER
  %recv-done.1 = (bf16[1,8,128]{2,1,0}, token[]) recv-done(%recv.1), channel_id=2, is_host_transfer=true
  %x.4 = bf16[1,8,128]{2,1,0} get-tuple-element(%recv-done.1), index=0
  %x.5 = bf16[6,64]{1,0} bitcast(%x.4)
  %zeros = bf16[6,512]{1,0} broadcast(%zero), dimensions={}
  %x.6 = bf16[6,512]{1,0} dynamic-update-slice(%zeros, %x.5, %start, %start)
  ROOT %all-reduce.2 = bf16[6,512]{1,0} all-reduce(%x.6), channel_id=4, GROUPS, to_apply=%add
}
"""


def test_a_sum_whose_parts_are_padded_between_slices_and_gathered_as_a_sum() -> None:
    """Parts that do not fill registers are sent with their padding, and gathered as a sum of parts among zeros."""
    of = '_xla_host_transfer_rendezvous="sum.1"'
    target = '_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"'
    text = PADDED_SUM.replace("GROUPS", "replica_groups={{0,1,2,3,4,5,6,7}}")
    text = text.replace("TRANSFER", f"is_host_transfer=true, frontend_attributes={{{of},{target}}}")
    mesh = mesh_on("v5p:2x2x2@2", "fsdp=x+y+z+dcn")
    rows = read_ledger(hlo.parse(text), mesh.shape, mesh)
    (sum_,) = (collective for row in rows for collective in row.collectives)
    assert (sum_.kind, sum_.axes, sum_.bytes) == ("all_reduce", ("fsdp",), 6 * 512 * 2.0)


@pytest.mark.parametrize(
    ("slice_", "layout"),
    [
        ("v5e:1x1", ""),
        ("v5e:4x4", "fsdp=y,tensor=x"),
        ("v4:2x2x1", "fsdp=x+y"),
        ("tpu7x:2x2x1", "data=x,fsdp=y,tensor=core"),
        ("v5p:4x4x4", "fsdp=x+y[1:2],context=y[2:2],tensor=z"),
        ("v5e:4x4@2", "data=dcn,fsdp=x,tensor=y"),
        ("v3:4x4", "fsdp=x+y,tensor=core"),
        ("v4:2x2x2@2", "data=dcn,fsdp=x+y,tensor=z"),
        ("v6e:16x16@4", "data=dcn,fsdp=x,tensor=y"),
        ("tpu7x:2x2x1@2", "data=dcn+x,fsdp=y,tensor=core"),
    ],
)
def test_devices_stand_where_the_layout_says(slice_: str, layout: str) -> None:
    mesh = mesh_on(slice_, layout)
    devices = topology_mesh(mesh)
    assert dict(devices.shape) == mesh.shape
    assert len({(*device.coords, device.core_on_chip, device.id) for device in devices.devices.flat}) == devices.size
    names = [axis.name for axis in mesh.slice.physical_axes]
    for index, place in zip(
        np.ndindex(devices.devices.shape), mesh.device_coordinates().reshape(-1, len(names)), strict=True
    ):
        device = devices.devices[index]
        actual = dict(zip("xyz", device.coords, strict=True)) | {"core": device.core_on_chip}
        actual["dcn"] = getattr(device, "slice_index", 0)
        assert [actual[name] for name in names] == place.tolist()


@pytest.mark.skipif(find_spec(PLUGIN) is not None, reason="the compiler for GPUs is here")
def test_gpus_are_described_by_their_own_compiler() -> None:
    slice_ = Slice.parse("h100:8x2")
    whole = Mesh.from_layout(slice_, "fsdp=node,data=network")
    with pytest.raises(RooftopError, match="a TPU slice, or a Python with the compiler for GPUs"):
        topology_mesh(whole)


def test_a_program_that_does_not_fit_is_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker process says so in one line, with by how much."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=":")
    request = CompileRequest(mesh=mesh_on("v5e:1x1"), program=f"{__name__}:too_large", arguments={"elements": 2**32})
    with pytest.raises(Infeasible, match=rf"{__name__}:too_large on v5e:1x1: needs [\d.]+GiB of the 15.75GiB of HBM"):
        compile_ahead_of_time(request)


def test_a_request_that_is_wrong() -> None:
    request = CompileRequest(mesh=mesh_on("v5e:1x1"), program="rooftop.programs.training.step:raise_it")
    with pytest.raises(RooftopError, match=r"program: got 'rooftop\.programs\.training\.step:raise_it'"):
        compile_ahead_of_time(request)
    assert CompileRequest.from_json(request.to_json()) == request
    lowers_not = CompileRequest(mesh=mesh_on("v5e:1x1"), program="math:atan2")
    with pytest.raises(RooftopError, match=r"one that lowers for this mesh \(TypeError"):
        compile_here(lowers_not)


def test_ledger_of_a_program_without_scopes() -> None:
    """Work outside every scope is shown by the function that it is in, and as such where there is none."""

    def squared(x: jax.Array) -> jax.Array:
        return x @ x

    text = jax.jit(lambda x: squared(x) + 1).lower(jnp.ones((8, 8))).compile().as_text()
    nameless = re.sub(r"stack_frame_id=\d+", "", text)
    for program, scope in ((text, "squared"), (nameless, "unscoped")):
        (row,) = read_ledger(hlo.parse(program), {"data": 1})
        assert (row.scope, row.phase, row.count) == (scope, "forward", 1)
        assert row.flops == {"f32": 2.0 * 8**3}


def test_scopes_of_other_programs_are_an_open_tree() -> None:
    """Named scopes of any name, layers folded; a scope that is called as one of rooftop's is none of them."""

    def loss(w: list[jax.Array], x: jax.Array) -> jax.Array:
        for at, weight in enumerate(w):
            with named_scope(f"model/block_{at}"), named_scope("ffn"):
                x = jnp.sin(jnp.einsum("bd,df->bf", x, weight))
        with named_scope("loss"):
            return (x @ w[0]).sum()

    step = jax.jit(jax.value_and_grad(loss))
    text = step.lower([jnp.ones((16, 16))] * 3, jnp.ones((8, 16))).compile().as_text()
    module = hlo.parse(text)
    rows = {(row.scope, row.phase): sum(row.flops.values()) for row in read_ledger(module, {"data": 1}) if row.flops}
    one = 2.0 * 8 * 16 * 16
    assert rows[("model/block_*/ffn", "forward")] == 3 * one
    assert {scope for scope, _ in rows} <= {"model/block_*/ffn", "loss"}
    # The gradient of the first block's input is not needed.
    assert rows[("model/block_*/ffn", "backward")] + rows.get(("loss", "backward"), 0.0) >= 5 * one
    assert module.scopes.tree.layers == {"model/block_*": 3}
    assert not module.scopes.own


def test_sources_are_the_first_frame_outside_of_libraries() -> None:
    text = jax.jit(lambda x: jax.nn.gelu(jnp.tensordot(x, x, 1))).lower(jnp.ones((8, 8))).compile().as_text()
    module = hlo.parse(text)
    entry = module.computations[module.entry]
    sources = {module.source(instruction) for instruction in entry if instruction.op_name.startswith("jit(")}
    assert {source.rpartition(":")[0] for source in sources} == {__file__}
    stacks = [module.stack(instruction) for instruction in entry if module.stack(instruction)]
    assert all(frame.line for stack in stacks for frame in stack)
    assert any("test_sources" in frame.function for stack in stacks for frame in stack)


@pytest.mark.parametrize(("scope", "matmuls", "size"), [("inner", 2, 64), ("taken[1:3]", 4 / 3, 32)])
def test_a_branch_runs_as_often_as_its_program_says(scope: str, matmuls: float, size: int) -> None:
    """A matmul that one of four trips does, then one in a further conditional, which declares its own share or none.

    Sizes differ, since a cache of compiled programs does not look at scopes.
    """

    def inner(x: jax.Array) -> jax.Array:
        with named_scope(scope):
            return jnp.sin(x) @ x

    def taken(x: jax.Array, op: jax.Array) -> jax.Array:
        with named_scope("taken[1:4]"):
            return jax.lax.cond(op > 5, inner, lambda x: x, x @ x)

    def step(x: jax.Array, ops: jax.Array) -> jax.Array:
        def slot(x: jax.Array, op: jax.Array) -> tuple[jax.Array, None]:
            return jax.lax.switch(jnp.minimum(op, 1), [lambda x, op: jnp.cos(x), taken], x, op), None

        return jax.lax.scan(slot, x, ops)[0]

    text = jax.jit(step).lower(jnp.ones((size, size)), jnp.zeros(4, jnp.int32)).compile().as_text()
    assert text.count("conditional(") == 2
    module = hlo.parse(text)
    flops = sum(
        module.executions[computation.name] * matmul_flops(computation, instruction)
        for computation in module.computations.values()
        for instruction in computation
        if instruction.opcode == "dot"
    )
    assert flops == pytest.approx(matmuls * 2 * size**3)


@pytest.mark.parametrize(("scope", "trips"), [("inner", 1), ("trips[2.5]", 2.5)])
def test_a_loop_that_data_ends_has_the_trips_that_its_program_says(scope: str, trips: float) -> None:
    """In a loop of four trips, one that counts as long as data say, and declares its mean or nothing."""

    def step(x: jax.Array, most: jax.Array) -> jax.Array:
        def inner(_: jax.Array, x: jax.Array) -> jax.Array:
            with named_scope(scope):
                return jnp.sin(x) @ x

        return jax.lax.fori_loop(0, 4, lambda _, x: jax.lax.fori_loop(0, most, inner, x), x)

    size = 16 * len(scope)
    text = jax.jit(step).lower(jnp.ones((size, size)), jnp.int32(3)).compile().as_text()
    module = hlo.parse(text)
    assert len(module.uncounted_loops) == (trips == 1)
    (row,) = read_ledger(module, {"data": 1})
    assert row.count * row.flops["f32"] == 4 * trips * 2 * size**3


def test_the_line_of_an_operation() -> None:
    """The user's own; of a program that is an installed package, its own: not those of JAX, nor of this package."""
    site = "/v/lib/python3.12/site-packages"
    start = (StackFrame("/src/rooftop/target/child.py", 124, "_execute"), StackFrame("<frozen runpy>", 198, "_run"))
    jax, flax = StackFrame(f"{site}/jax/_src/lax.py", 1, "dot"), StackFrame(f"{site}/flax/nnx/linear.py", 2, "call")
    layer = StackFrame(f"{site}/maxtext/layers.py", 3, "layer")
    train = StackFrame(f"{site}/maxtext/train.py", 4, "main")
    user = StackFrame("/home/me/train.py", 5, "step")
    call = StackFrame("/src/rooftop/target/session.py", 217, "call")
    assert source_of((jax, flax, user, call, *start)) == "/home/me/train.py:5"
    assert source_of((jax, flax, layer, call, train, *start)) == f"{site}/maxtext/layers.py:3"
    assert source_of((jax, *start)) == f"{site}/jax/_src/lax.py:1"
    assert source_of(()) == ""


def test_the_operand_of_a_sparsecore_collective_may_be_unnamed() -> None:
    """libtpu 0.0.50.1 calls an AllGather on a SparseCore without operands: nothing says where they come from."""
    module = hlo.parse(
        """HloModule jit_step, is_scheduled=true

%called (param: bf16[4,8]) -> bf16[8,8] {
  %param = bf16[4,8]{1,0} parameter(0)
  ROOT %all-gather = bf16[8,8]{1,0} all-gather(%param), channel_id=1, replica_groups={{0,1}}, dimensions={0}
}, execution_thread="sparsecore"

ENTRY %main (x: bf16[4,8]) -> bf16[4,8] {
  %start = ((), (), (s32[1])) call-start(), async_execution_thread="sparsecore", to_apply=%called
  %done = () call-done(%start)
  ROOT %x = bf16[4,8]{1,0} parameter(0)
}
"""
    )
    called = module.computations["called"]
    assert before(module, called, called.instructions["param"]) is None
