"""Attention by every kernel, on one device and round a ring, equals a softmax written out here."""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import P

from rooftop.compiler.hlo import text as hlo
from rooftop.core.errors import RooftopError
from rooftop.core.rounding import next_multiple
from rooftop.core.scopes import scope_and_phase
from rooftop.hardware import chip
from rooftop.models.program_sizes import block_size
from rooftop.plan.shapes import attended_pairs
from rooftop.programs.attention import splash as splash_attention
from rooftop.programs.attention.attend import attend
from rooftop.programs.attention.context import CONTEXT_ATTENTIONS, context_attend, sequence_order
from rooftop.programs.attention.scores import (
    Scores,
    declared,
    executed_pairs,
    kernel_flops,
    kernel_scope,
    runs,
)
from rooftop.roofline import achievable

Arrays = tuple[jax.Array, ...]


def arrays(b: int, t: int, n: int, k: int, h: int, d_v: int) -> Arrays:
    """q, k, v, sinks and the weights of a sum of the outputs."""
    shapes = (b, t, n, h), (b, t, k, h), (b, t, k, d_v), (n,), (b, t, n, d_v)
    random = np.random.default_rng(0)
    return tuple(jnp.asarray(random.normal(size=shape), jnp.float32) for shape in shapes)


#: Segments [2, 12] of packed sequences: some of one token, and padding.
PACKED = np.array([[1, 1, 1, 2, 2, 3, 4, 4, 4, 4, 4, 0], [1, 1, 1, 1, 1, 1, 1, 2, 2, 0, 0, 0]], np.int32)


def packed(length: int) -> np.ndarray:
    """The same at another length, [2, length], so that segments begin and end within blocks and chunks."""
    return PACKED[:, np.arange(length) * 12 // length]


def plain(
    q: Any,
    k: Any,
    v: Any,
    sinks: Any,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    segments: np.ndarray | None = None,
) -> jax.Array:
    """Query by query, with the keys that it sees picked out."""
    rows, group = [], q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    for i in range(q.shape[1]):
        first = 0 if window is None else max(0, i - window + 1)
        scores = jnp.einsum("bnh,bsnh->bns", q[:, i], k[:, first : i + 1]) * scale
        weights = jnp.exp(scores if softcap is None else softcap * jnp.tanh(scores / softcap))
        if segments is not None:
            weights *= (segments[:, first : i + 1] == segments[:, i : i + 1])[:, None]
        total = weights.sum(-1) + (0 if sinks is None else jnp.exp(sinks))
        rows.append(jnp.einsum("bns,bsnh->bnh", weights, v[:, first : i + 1]) / total[..., None])
    return jnp.stack(rows, 1)


def attended(over: Any = attend, *, kernel: str, **options: Any) -> Any:
    """An attention of q, k and v, by a kernel and by settings of its scores and its own."""
    settings = {field.name for field in fields(Scores)}
    scores = Scores(**{name: options.pop(name) for name in settings & set(options)})
    arrays = {name: jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    return partial(over, kernel, scores, **arrays)


def derived(attention: Any, operands: Arrays, *, sinks: bool) -> Any:
    """Outputs, and derivatives of their weighted sum by q, k, v and sinks."""

    def weighed(q: jax.Array, k: jax.Array, v: jax.Array, s: jax.Array) -> tuple[jax.Array, jax.Array]:
        o = attention(q, k, v, sinks=s if sinks else None)
        return (o * operands[4]).sum(), o

    gradients, o = jax.jit(jax.grad(weighed, (0, 1, 2, 3), has_aux=True))(*operands[:4])
    return jax.tree.map(np.asarray, (o, *gradients))


def close(actual: Any, expected: Any, tolerance: float = 1e-5) -> None:
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance * max(1.0, np.abs(b).max()), rtol=0)


#: Windows, soft caps, sinks, key/value heads, size of value heads.
CASES = [
    (None, None, False, 2, 16), (5, 3.0, True, 1, 8), (1, None, True, 4, 16), (20, 5.0, False, 2, 24),
    (None, None, False, 4, 10),
]  # fmt: skip


@pytest.mark.parametrize(
    ("window", "softcap", "sinks", "kv_heads", "d_v", "segments"),
    [
        pytest.param(*case, segments, id=f"{name}-{index}", marks=() if index in quick else pytest.mark.slow)
        for name, segments, quick in (("whole", None, (1, 4)), ("packed", PACKED, (0, 3)))
        for index, case in enumerate(CASES)
    ],
)
def test_reference_and_chunked_equal_plain(
    window: int | None, softcap: float | None, sinks: bool, kv_heads: int, d_v: int, segments: np.ndarray | None
) -> None:
    operands = arrays(2, 12, 4, kv_heads, 16, d_v)
    how = {"scale": 0.3, "window": window, "softcap": softcap, "segments": segments}
    expected = derived(lambda q, k, v, sinks: plain(q, k, v, sinks, **how), operands, sinks=sinks)
    assert sinks == (np.abs(expected[-1]).max() > 0)
    for kernel, block in (("reference", 1024), ("chunked", 4), ("chunked", 1), ("chunked", 1024)):
        close(derived(attended(kernel=kernel, block=block, **how), operands, sinks=sinks), expected)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pallas kernels run on the CPU."""
    make = partial(splash_attention.splash.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention.splash, "make_splash_mha", make)


SPLASH = [
    (70, 5.0, True, 2, 8),
    pytest.param(None, None, False, 2, 16, marks=pytest.mark.slow),
    pytest.param(1, None, True, 4, 16, marks=pytest.mark.slow),
    pytest.param(300, None, False, 1, 24, marks=pytest.mark.slow),
]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("window", "softcap", "sinks", "kv_heads", "d_v"), SPLASH)
def test_splash_equals_reference(
    window: int | None, softcap: float | None, sinks: bool, kv_heads: int, d_v: int
) -> None:
    operands = arrays(2, 256, 4, kv_heads, 16, d_v)
    how = {"scale": 0.3, "window": window, "softcap": softcap}
    expected = derived(attended(kernel="reference", **how), operands, sinks=sinks)
    close(derived(attended(kernel="splash", block=128, **how), operands, sinks=sinks), expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("window", [None, pytest.param(70, marks=pytest.mark.slow)])
def test_splash_equals_reference_within_segments(window: int | None) -> None:
    operands = arrays(2, 256, 4, 2, 16, 8)
    how: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": 4.0, "segments": packed(256)}
    expected = derived(attended(kernel="reference", **how), operands, sinks=True)
    close(derived(attended(kernel="splash", block=128, **how), operands, sinks=True), expected)


def test_cudnn_is_asked_for_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arguments for JAX's function mean the same to its other implementation, which runs here."""
    on_cpu, asked = jax.nn.dot_product_attention, []

    def function(*operands: jax.Array, implementation: str, **settings: Any) -> jax.Array:
        asked.append(implementation)
        return on_cpu(*operands, implementation="xla", **settings)

    monkeypatch.setattr(jax.nn, "dot_product_attention", function)
    operands = arrays(2, 24, 4, 2, 16, 16)
    for window, segments in ((None, None), (7, None), (None, packed(24)), (7, packed(24))):
        how = {"scale": 0.3, "window": window, "segments": segments}
        expected = derived(attended(kernel="reference", **how), operands, sinks=False)
        close(derived(attended(kernel="cudnn", **how), operands, sinks=False), expected)
    assert set(asked) == {"cudnn"}


def test_output_has_the_dtype_of_the_queries() -> None:
    q, k, v = (x.astype(jnp.bfloat16) for x in arrays(1, 16, 2, 1, 8, 8)[:3])
    exact = attended(kernel="reference", scale=0.3)(*(x.astype(jnp.float32) for x in (q, k, v)))
    for kernel in ("reference", "chunked"):
        o = attended(kernel=kernel, scale=0.3, block=4)(q, k, v)
        assert o.dtype == jnp.bfloat16
        np.testing.assert_allclose(o.astype(jnp.float32), exact, atol=0.03)


def jaxpr(kernel: str, remat: Any = None) -> str:
    q, k, v, *_ = arrays(2, 40, 4, 2, 16, 16)

    def summed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attended(kernel=kernel, scale=0.3, block=8)(q, k, v).sum()

    policy = None if remat is None else jax.checkpoint_policies.save_only_these_names(*remat)
    function = summed if remat is None else jax.checkpoint(summed, policy=policy)
    return str(jax.make_jaxpr(jax.grad(function, (0, 1, 2)))(q, k, v))


def test_chunked_never_has_all_scores() -> None:
    assert "40,40]" in jaxpr("reference")
    assert "8,8]" in jaxpr("chunked")
    assert "40,40]" not in jaxpr("chunked")
    assert "8,40]" not in jaxpr("chunked")


def test_saved_attention_is_not_computed_again() -> None:
    """For each run of queries a scan over its keys forward, and one backward; a third if the policy keeps nothing."""
    blocks = len(runs(q_len=40, kv_len=40, window=None, offset=0, block=8))
    assert blocks == 5
    assert jaxpr("chunked").count(" scan[") == 2 * blocks
    assert jaxpr("chunked", remat=("attn_core",)).count(" scan[") == 2 * blocks
    assert jaxpr("chunked", remat=()).count(" scan[") == 3 * blocks


def by_counting(q_len: int, kv_len: int, window: int | None, offset: int, block: int) -> int:
    rows, columns = block_size(q_len, block), block_size(kv_len, block)
    behind = np.arange(q_len)[:, None] + offset - np.arange(kv_len)
    seen = (behind >= 0) & (behind < (window or kv_len + q_len + offset))
    blocks = seen.reshape(q_len // rows, rows, kv_len // columns, columns).any((1, 3))
    return int(blocks.sum()) * rows * columns


@given(st.integers(1, 40), st.integers(1, 40), st.none() | st.integers(1, 60), st.integers(0, 50), st.integers(1, 16))
def test_executed_pairs_are_those_of_blocks_with_a_pair_that_counts(
    q_len: int, kv_len: int, window: int | None, offset: int, block: int
) -> None:
    sizes = {"q_len": q_len, "kv_len": kv_len, "window": window, "offset": offset, "block": block}
    assert executed_pairs("splash", **sizes) == by_counting(**sizes)
    assert executed_pairs("reference", **sizes) == q_len * kv_len


@given(st.integers(1, 40), st.integers(1, 40), st.none() | st.integers(1, 60), st.integers(-20, 50), st.integers(1, 16))
def test_runs_hold_every_query_once_with_every_key_that_counts(
    q_len: int, kv_len: int, window: int | None, offset: int, block: int
) -> None:
    blocks = runs(q_len=q_len, kv_len=kv_len, window=window, offset=offset, block=block)
    assert [i for run in blocks for i in range(q_len)[run.queries]] == list(range(q_len))
    mask = np.array(
        Scores(scale=1.0, window=window, offset=offset).mask(jnp.arange(q_len), jnp.arange(kv_len), None, None)
    )
    for run in blocks:
        mask[run.queries, run.keys] = False
        assert (run.keys.stop - run.keys.start) % block_size(kv_len, block) == 0
        assert 0 <= run.keys.start < run.keys.stop <= kv_len
    assert not mask.any()


def test_chunked_skips_what_causality_masks() -> None:
    sizes = {"q_len": 4096, "kv_len": 4096, "block": 128, "offset": 0}
    assert executed_pairs("chunked", **sizes, window=None) == 4096**2 * 9 / 16
    assert executed_pairs("chunked", **sizes, window=512) < 4096**2 / 4
    # Whole chunks of other devices are one run.
    assert len(runs(**sizes | {"offset": 4096}, window=None)) == 1


@given(st.integers(1, 12), st.sampled_from([1, 4, 128]), st.none() | st.integers(1, 2000))
def test_planner_counts_the_same_pairs(blocks: int, block: int, window: int | None) -> None:
    length = blocks * block
    pairs = executed_pairs("splash", q_len=length, kv_len=length, window=window, offset=0, block=block)
    assert pairs == attended_pairs(length, window, block)


@given(st.integers(1, 6), st.sampled_from([1, 4, 128]), st.integers(2, 8), st.integers(1, 2000))
def test_planner_counts_the_window_before_each_chunk_of_a_split_sequence(
    blocks: int, block: int, chunks: int, window: int
) -> None:
    chunk = blocks * block
    window = min(window, chunks * chunk - 1)
    earlier = min(next_multiple(window - 1, block), (chunks - 1) * chunk)
    sizes = {"q_len": chunk, "kv_len": earlier + chunk, "offset": earlier}
    pairs = executed_pairs("splash", **sizes, window=window, block=block)
    assert chunks * pairs == attended_pairs(chunks * chunk, window, block, chunks=chunks)


@pytest.mark.parametrize(("kernel", "kind"), [("splash", "v5p"), ("cudnn", "h100")])
def test_flops_are_the_planners(kernel: str, kind: str) -> None:
    sizes = {"batch": 3, "q_len": 4096, "kv_len": 4096, "heads": 8, "d_qk": 128, "d_v": 128, "window": 1500}
    scores = 3 * 8 * attended_pairs(4096, 1500, 1024)
    for backward in (False, True):
        planned = achievable.kernel_flops(chip(kind), 128, 128, backward=backward) * scores
        assert kernel_flops(kernel, **sizes, backward=backward) == planned


def test_matmuls_are_counted_by_their_own_head_size() -> None:
    """Forward S = Q K and O = P V. dQ: S, dP = dO V, dS K. dK and dV: S, dP, dS Q, P dO."""
    sizes = {"batch": 1, "q_len": 128, "kv_len": 128, "heads": 1, "d_qk": 192, "d_v": 100}
    assert kernel_flops("splash", **sizes) == 2 * 128**2 * (192 + 100)
    assert kernel_flops("splash", **sizes, backward=True) == 2 * 128**2 * ((2 * 192 + 100) + (2 * 192 + 2 * 100))
    assert kernel_flops("chunked", **sizes, backward=True) == 2 * 128**2 * (3 * 192 + 2 * 100)


def test_declared_flops_stand_in_the_names_of_operations() -> None:
    q, _, v, *_ = arrays(2, 256, 4, 2, 16, 16)

    def scoped(q: jax.Array) -> jax.Array:
        with jax.named_scope("layers/attn/core"), declared("splash", Scores(scale=1.0, block=128), q, v):
            return jnp.sin(q)

    sizes = {"batch": 2, "q_len": 256, "kv_len": 256, "heads": 4, "d_qk": 16, "d_v": 16, "block": 128}
    text = jax.jit(scoped).lower(q).compile().as_text()
    forward, backward = (round(kernel_flops("splash", **sizes, backward=backward)) for backward in (False, True))
    name = f"layers/attn/core/kernel_flops[fwd={forward},dq={backward * 3 // 7},dkv={backward * 4 // 7}]/sin"
    assert name in text
    assert scope_and_phase(f"jit(f)/transpose(jvp(layers))/attn/core/{name.rpartition('core/')[2]}") == (
        "layers/attn/core",
        "backward",
    )


def test_kernel_scope_has_whole_numbers() -> None:
    def scoped(x: jax.Array) -> jax.Array:
        with kernel_scope({"each": 1e15}):
            return x + 1

    assert "kernel_flops[each=1000000000000000]/add" in jax.jit(scoped).lower(1.0).as_text(debug_info=True)


def ring(
    devices: int,
    order: str,
    kernel: str,
    operands: Arrays,
    *,
    sinks: bool,
    check_vma: bool,
    segments: np.ndarray | None = None,
    **how: Any,
) -> Any:
    """As ``derived``, for the sequence split over so many devices."""
    mesh = jax.make_mesh((devices,), ("context",), devices=jax.devices()[:devices])
    positions = sequence_order(operands[0].shape[1], devices, order)
    axis, split, whole = "context", P(None, "context", None, None), P(None)

    def sharded(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None) -> jax.Array:
        attention = attended(context_attend, axes=(axis,), kernel=kernel, order=order, **how)
        attend_with = jax.shard_map(
            lambda q, k, v, sinks, segments: attention(q, k, v, sinks=sinks, segments=segments),
            in_specs=(split, split, split, None if sinks is None else whole, None if ids is None else P(None, axis)),
            out_specs=split, check_vma=check_vma,
        )  # fmt: skip
        return attend_with(q, k, v, sinks, ids)

    with jax.set_mesh(mesh):
        ids = None
        if segments is not None:
            ids = jax.device_put(segments[:, positions], jax.NamedSharding(mesh, P(None, "context")))
        q, k, v, s, weights = operands
        places = [jax.NamedSharding(mesh, split), jax.NamedSharding(mesh, whole)]
        q, k, v, weights = (jax.device_put(x[:, positions], places[0]) for x in (q, k, v, weights))
        o, dq, dk, dv, ds = derived(sharded, (q, k, v, jax.device_put(s, places[1]), weights), sinks=sinks)
    back = np.argsort(positions)
    return *(x[:, back] for x in (o, dq, dk, dv)), ds


RINGS = [
    (2, "contiguous", None, 2, 2, True),
    (4, "zigzag", None, 1, 2, True),  # half of the sequences each way
    (4, "zigzag", 7, 2, 1, True),
    pytest.param(4, "contiguous", 7, 2, 1, False, marks=pytest.mark.slow),
    *(
        pytest.param(devices, order, window, kv_heads, batch, window is None, marks=pytest.mark.slow)
        for devices in (2, 3, 4, 8)
        for order in ("contiguous", "zigzag")
        for window, kv_heads, batch in ((None, 2, 1), (None, 1, 1), (1, 2, 1), (2, 2, 1), (9, 1, 2), (47, 2, 1))
    ),
]


@pytest.mark.parametrize(("devices", "order", "window", "kv_heads", "batch", "check_vma"), RINGS)
def test_ring_equals_one_device(
    devices: int, order: str, window: int | None, kv_heads: int, batch: int, check_vma: bool
) -> None:
    """Outputs and all gradients, at tolerance of float32; windows shorter and longer than a device's share."""
    operands = arrays(batch, 48, 4, kv_heads, 16, 8)
    how: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": 4.0}
    expected = derived(attended(kernel="reference", **how), operands, sinks=True)
    actual = ring(devices, order, "chunked", operands, sinks=True, check_vma=check_vma, block=4, **how)
    close(actual, expected)


WITHIN = [
    ("ring", 4, "zigzag", None, 1, 2),  # half of the sequences each way
    ("ring", 4, "contiguous", 7, 2, 2),
    ("all_gather", 4, "zigzag", None, 2, 2),
    *(
        pytest.param(over, devices, order, window, kv_heads, batch, marks=pytest.mark.slow)
        for over in ("ring", "all_gather")
        for devices in (2, 3, 8)
        for order in ("contiguous", "zigzag")
        for window, kv_heads, batch in ((None, 2, 1), (None, 1, 1), (9, 1, 2), (47, 2, 2))
    ),
]


@pytest.mark.parametrize(("over", "devices", "order", "window", "kv_heads", "batch"), WITHIN)
def test_split_sequences_attend_within_segments(
    over: str, devices: int, order: str, window: int | None, kv_heads: int, batch: int
) -> None:
    """Segments rotate, or are gathered, with their keys: they lie across devices, and begin and end inside chunks."""
    operands, segments = arrays(batch, 48, 4, kv_heads, 16, 8), packed(48)[-batch:]
    how: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": 4.0, "segments": segments}
    expected = derived(attended(kernel="reference", **how), operands, sinks=True)
    how["by"] = over
    close(ring(devices, order, "chunked", operands, sinks=True, check_vma=True, block=4, **how), expected)


GATHERED = [
    (4, "zigzag", None, True),
    (4, "contiguous", 7, False),
    *(
        pytest.param(devices, order, window, True, marks=pytest.mark.slow)
        for devices in (2, 3, 8)
        for order in ("contiguous", "zigzag")
        for window in (None, 1, 2, 47)
    ),
]


@pytest.mark.parametrize(("devices", "order", "window", "sinks"), GATHERED)
def test_gathered_keys_equal_one_device(devices: int, order: str, window: int | None, sinks: bool) -> None:
    operands = arrays(1, 48, 4, 2, 16, 8)
    how: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": 4.0}
    expected = derived(attended(kernel="reference", **how), operands, sinks=sinks)
    how["by"] = "all_gather"
    close(ring(devices, order, "chunked", operands, sinks=sinks, check_vma=True, block=4, **how), expected)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("by", CONTEXT_ATTENTIONS)
@pytest.mark.parametrize("window", [None, 200])
def test_split_splash_attends_within_segments(by: str, window: int | None) -> None:
    operands = arrays(2, 512, 2, 1, 16, 8)
    how: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": 4.0, "segments": packed(512)}
    expected = derived(attended(kernel="reference", **how), operands, sinks=True)
    actual = ring(2, "zigzag", "splash", operands, sinks=True, check_vma=False, block=128, by=by, **how)
    close(actual, expected)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("order", ["contiguous", "zigzag"])
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("devices", [2, 4])
def test_ring_of_splash_equals_one_device(devices: int, order: str, window: int | None) -> None:
    """Its backward pass calls a private function of JAX's: this is what notices when that changes."""
    operands = arrays(1, 256 * devices, 2, 1, 16, 8)
    how: dict[str, Any] = {"scale": 0.3, "window": window, "softcap": 4.0}
    expected = derived(attended(kernel="reference", **how), operands, sinks=True)
    close(ring(devices, order, "splash", operands, sinks=True, check_vma=False, block=128, **how), expected)


def permuted_bytes(devices: int, layers: int, *, backward: bool) -> float:
    """Bytes that a device sends in a scan over layers, by the permutes of a compiled program and trips of its loops."""
    mesh = jax.make_mesh((devices,), ("context",), devices=jax.devices()[:devices])
    split = P(None, "context", None, None)
    attention = attended(context_attend, axes=("context",), scale=1.0, kernel="chunked", order="zigzag")

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attn_core"))
    def layer(carry: Arrays, _: None) -> tuple[Arrays, None]:
        q, k, v = carry
        return (jax.shard_map(attention, in_specs=(split,) * 3, out_specs=split)(q, k, v), k / 2, v / 2), None

    def summed(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.scan(layer, (q, k, v), None, length=layers)[0][0].sum()

    with jax.set_mesh(mesh):
        shapes = [(1, 64 * devices, heads, 16) for heads in (4, 2, 2)]
        operands = [
            jax.ShapeDtypeStruct(shape, jnp.float32, sharding=jax.NamedSharding(mesh, split)) for shape in shapes
        ]
        function = jax.grad(summed, (0, 1, 2)) if backward else summed
        module = hlo.parse(jax.jit(function).lower(*operands).compile().as_text())
    return sum(
        module.executions[computation.name] * sum(tensor.nbytes for tensor in instruction.shape)
        for computation in module.computations.values()
        for instruction in computation
        if instruction.opcode == "collective-permute"
    )


def test_keys_and_values_go_round_once_and_twice_more_in_the_backward_pass() -> None:
    once = 3 * 2 * 64 * 2 * 16 * 4
    assert permuted_bytes(4, layers=5, backward=False) == 5 * once
    assert permuted_bytes(4, layers=5, backward=True) == 5 * (1 + 2) * once


@given(st.integers(1, 6), st.integers(1, 5), st.sampled_from(["contiguous", "zigzag"]))
def test_sequence_order_is_a_permutation_with_an_even_share_of_work(devices: int, chunk: int, order: str) -> None:
    length = 2 * devices * chunk
    positions = sequence_order(length, devices, order)
    assert sorted(positions) == list(range(length))
    work = positions.reshape(devices, -1).sum(1)
    if order == "zigzag":
        assert len(set(work.tolist())) == 1
    else:
        assert (positions == np.arange(length)).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kernel": "splsh"}, "did you mean splash"),
        ({"kernel": "splash"}, "a multiple of 128"),
        ({"kernel": "cudnn", "softcap": 3.0}, "softcap of the cudnn kernel"),
        ({"kernel": "cudnn", "sinks": np.zeros(4)}, "sinks of the cudnn kernel"),
        ({"kernel": "cudnn"}, "size of value heads of the cudnn kernel"),
        ({"kernel": "chunked", "heads": 3}, "a multiple of the 2 key/value heads"),
    ],
)
def test_what_a_kernel_does_not_do_is_refused(changes: dict[str, Any], message: str) -> None:
    q, k, v, *_ = arrays(1, 48, changes.get("heads", 4), 2, 16, 8)
    with pytest.raises(RooftopError, match=message):
        attended(scale=1.0, **{name: value for name, value in changes.items() if name != "heads"})(q, k, v)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "zigzig"}, "did you mean zigzag"),
        ({"kernel": "cudnn"}, "one of chunked, reference, splash"),
        ({"length": 6, "order": "zigzag"}, "a multiple of 2 for zigzag"),
    ],
)
@pytest.mark.parametrize("by", CONTEXT_ATTENTIONS)
def test_what_a_ring_does_not_do_is_refused(changes: dict[str, Any], message: str, by: str) -> None:
    mesh = jax.make_mesh((2,), ("context",), devices=jax.devices()[:2])
    split = P(None, "context", None, None)
    settings = {"kernel": "chunked", "length": 8} | changes
    operands = arrays(1, settings.pop("length"), 2, 2, 8, 8)[:3]
    attention = attended(context_attend, axes=("context",), by=by, scale=1.0, **settings)
    operands = jax.device_put(operands, jax.NamedSharding(mesh, split))
    with jax.set_mesh(mesh), pytest.raises(RooftopError, match=message):
        jax.eval_shape(jax.shard_map(attention, in_specs=(split,) * 3, out_specs=split), *operands)
    with pytest.raises(RooftopError, match="a multiple of 6 for 3 devices"):
        sequence_order(8, 3, "zigzag")
