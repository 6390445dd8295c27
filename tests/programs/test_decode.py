"""Attention over pages beside attention over the sequence itself: blocks, windows, caps, sinks, int8, the kernel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from rooftop.core.errors import RooftopError
from rooftop.models import load_model
from rooftop.programs.attention.scores import Scores
from rooftop.programs.model.operations import project_left
from rooftop.programs.parameters import Parameter
from rooftop.programs.serving import paged
from rooftop.programs.serving.decode import ADJUSTED, DRAWN, HEAD, SLOT, TEMPERATURE, heads_of_each, only_likeliest
from rooftop.programs.serving.formats import FORMATS
from rooftop.programs.serving.paged import Pages, Rows, attend_heads, best_reader, require_reader
from rooftop.programs.serving.quantised import Turned, in_full, quantise, require_format

PAGES, KV_HEADS, HEADS = 32, 2, 4
#: Tokens before the new ones, and new ones, of each row; the third row is padding, and the last one generates.
START, COUNT, WIDTH = [13, 0, 26, 9], [3, 2, 0, 1], 4


def dense(
    scores: Scores, q: npt.NDArray[np.float64], k: npt.NDArray[np.float64], v: npt.NDArray[np.float64],
    first: int, sinks: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.float64]:  # fmt: skip
    """Query by query: q [C, n, H] at ``first`` and on; k and v [S, k, H]."""
    outputs = np.zeros((*q.shape[:2], v.shape[2]))
    for place in range(len(q)):
        for head in range(q.shape[1]):
            at = first + place
            least = 0 if scores.window is None else max(0, at - scores.window + 1)
            seen = slice(least, at + 1)
            x = k[seen, head // (HEADS // KV_HEADS)] @ q[place, head] * scores.scale
            if scores.softcap is not None:
                x = scores.softcap * np.tanh(x / scores.softcap)
            weights = np.exp(x)
            total = weights.sum() + (0 if sinks is None else np.exp(sinks[head]))
            outputs[place, head] = weights @ v[seen, head // (HEADS // KV_HEADS)] / total
    return outputs


def run(
    scores: Scores, *, size: int = 8, sinks: bool = False, int8: bool = False, reader: str = "gather", page: int = 4
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Actual and expected outputs of all rows [R, C, n, H], and the mask of real tokens."""
    random = np.random.default_rng(0)
    longest = max(START) + WIDTH
    k, v = (random.normal(size=(4, longest, KV_HEADS, size)) for _ in range(2))
    q = random.normal(size=(4, WIDTH, HEADS, size))
    logits = random.normal(size=HEADS) if sinks else None
    tables = random.permutation(PAGES).reshape(4, -1).astype(np.int32)
    ragged = reader == "ragged"
    shape = (PAGES + 1, page, 2 * KV_HEADS, size) if ragged else (PAGES + 1, 2, KV_HEADS, page, size)
    pool = Pages(
        values=jnp.zeros(shape, jnp.int8 if int8 else jnp.float32), scales=jnp.zeros(shape[:-1]) if int8 else None
    )
    for row, length in enumerate(START):
        at = np.arange(length)
        both = jnp.asarray(np.stack([k[row, :length], v[row, :length]], axis=2 if ragged else 1), jnp.float32)
        places = jnp.asarray(tables[row, at // page]), jnp.asarray(at % page)
        if length and ragged:
            pool = Pages(values=pool.values.at[places].set(both.reshape(length, *shape[2:])))
        elif length:
            pool = pool.write(*places, both)
    new = [np.stack([x[row, length : length + WIDTH] for row, length in enumerate(START)]) for x in (k, v)]
    # The last row is of another width: no room for more than its one token.
    rows = [
        Rows(tables=jnp.asarray(tables[some]), start=jnp.array(START[some]), count=jnp.array(COUNT[some]), width=width)
        for some, width in ((slice(3), WIDTH), (slice(3, 4), 1))
    ]
    packed_rows = [jnp.concatenate([x[:3].reshape(-1, *x.shape[2:]), x[3, :1]]).astype(jnp.float32) for x in (q, *new)]
    sink = None if logits is None else jnp.asarray(logits, jnp.float32)
    o, pool = jax.jit(attend_heads, static_argnums=(0, 1))(reader, scores, *packed_rows, sink, pool, rows)
    o = jnp.concatenate([o, jnp.zeros((WIDTH - 1, *o.shape[1:]))]).reshape(4, WIDTH, *o.shape[1:])
    assert bool(jnp.isfinite(o).all())
    expected = np.stack([dense(scores, q[row], k[row], v[row], length, logits) for row, length in enumerate(START)])
    there = np.arange(WIDTH) < np.array(COUNT)[:, None]
    return np.asarray(o, np.float64), expected, there


#: Attention scores and whether there are sinks, and what reads the cache, by how many tokens at a time.
SCORES = [
    (Scores(scale=0.3), False),
    (Scores(scale=0.3, window=5), False),
    (Scores(scale=0.3, softcap=1.5), True),
    (Scores(scale=0.3, window=9), True),
]
READERS = [("gather", 4), ("gather", 12), ("gather", 1024), ("blocked", 4), ("kernel", 4)]


@pytest.mark.parametrize(
    ("scores", "sinks", "reader", "block"),
    [
        # Quick: all scores in small blocks, by one reader or the other, and by the kernel.
        pytest.param(*scores, *reader, marks=() if quick else pytest.mark.slow)
        for index, scores in enumerate(SCORES)
        for reader in READERS
        for quick in [reader in (READERS[0 if index % 2 else 3], READERS[4])]
    ],
)
def test_pages_are_read_as_the_sequence_they_hold(
    scores: Scores, sinks: bool, reader: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocked, each row is a group of its own, and is read page by page as far as it goes."""
    monkeypatch.setattr(paged, "BLOCK", block)
    monkeypatch.setattr(paged, "SMALL_BLOCK", block)
    monkeypatch.setattr(paged, "GROUP", 2)
    jax.clear_caches()
    size, page = 16 if reader == "kernel" else 8, 16 if reader == "blocked" else 4
    actual, expected, there = run(scores, size=size, sinks=sinks, reader=reader, page=page)
    np.testing.assert_allclose(actual[there], expected[there], atol=1e-5)


@pytest.mark.parametrize("reader", ["gather", "blocked", "kernel"])
def test_an_int8_cache_is_near(reader: str) -> None:
    actual, expected, there = run(Scores(scale=0.3), size=16 if reader == "kernel" else 8, int8=True, reader=reader)
    error = np.abs(actual[there] - expected[there]).max()
    assert 1e-5 < error < 0.05


@pytest.mark.parametrize(
    "scores",
    [pytest.param(Scores(scale=0.1), marks=pytest.mark.slow), Scores(scale=0.1, window=7, softcap=2.0)],
)
def test_the_tpu_kernel_is_asked_for_what_is_gathered(scores: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plain function that JAX has beside its kernel: Pallas' interpreter cannot run that one (JAX 0.10.2)."""

    def plain(*arrays: jax.Array, num_kv_pages_per_block: int, num_queries_per_block: int, **named: Any) -> jax.Array:
        assert num_kv_pages_per_block >= 1 and num_queries_per_block >= 1
        return kernel.ref_ragged_paged_attention(*arrays, **named)

    monkeypatch.setattr(ragged_paged_attention, "ragged_paged_attention", plain)
    # Without a jit there is no memory to choose.
    monkeypatch.setattr(pltpu, "with_memory_space_constraint", lambda array, _: array)
    with jax.disable_jit(), pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        actual, expected, there = run(scores, size=128, reader="ragged")
    np.testing.assert_allclose(actual[there], expected[there], atol=1e-4)


def test_which_models_the_kernel_serves() -> None:
    assert best_reader(load_model("llama3-8b"), "tpu", quantised=False) == "ragged"
    assert best_reader(load_model("llama3-8b"), "gpu", quantised=True) == "kernel"
    odd_heads = replace(load_model("llama3-8b"), d_head=96)
    for model in (load_model("deepseek-v3"), odd_heads):
        assert best_reader(model, "gpu", quantised=False) == "gather"
    assert best_reader(load_model("llama3-8b"), "tpu", quantised=True) == "gather"
    for name in ("deepseek-v3", "gpt-oss-20b"):
        assert best_reader(load_model(name), "tpu", quantised=False) == "rows"
        assert best_reader(load_model(name), "tpu", quantised=True) == "gather"
        with pytest.raises(RooftopError, match="gather"):
            require_reader("ragged", load_model(name), quantised=False)
    with pytest.raises(RooftopError, match="heads of 128, a multiple of 128"):
        require_reader("rows", load_model("llama3-8b"), quantised=False)
    with pytest.raises(RooftopError, match="paged attention"):
        require_reader("cudnn", load_model("llama3-8b"), quantised=False)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dim", [1, 2])
def test_quantised_weights_are_within_half_a_step(name: str, dim: int) -> None:
    """Of the reference: each element by the largest of its channel, or of its group in it."""
    shape = (2, 256, 3, 5) if dim == 1 else (2, 3, 256, 5)
    weight = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    format_ = FORMATS[name]
    small = quantise(weight, dim, name, "cpu", "float32")
    groups = 256 // (format_.group or 256)
    assert small.scales.shape == (*shape[:dim], groups, *shape[dim + 1 :])
    assert small.values.nbytes + small.scales.nbytes == format_.weight_bytes(weight.size, 256, "cpu", "float32")
    apart = np.asarray(weight).reshape(*shape[:dim], groups, -1, *shape[dim + 1 :])
    largest = np.abs(apart).max(axis=dim + 1, keepdims=True)
    error = np.abs(np.asarray(in_full(small, jnp.dtype("float32"))).reshape(apart.shape) - apart)
    if name.startswith("f8"):
        # Three bits after the point; below the normal numbers, 2**-9 of what the largest is scaled to.
        step = np.maximum(np.abs(apart) / 8, largest / 448 / 512)
    elif name.startswith("f4"):
        # One bit after the point; below the normal numbers half of a scale, which is up to twice as large as needed.
        step = np.maximum(np.abs(apart) / 2, largest / 6)
    else:
        step = largest / format_.largest
    assert (error <= step / 2 * 1.001).all() and error.max() > 0


@pytest.mark.parametrize("shape", [(24, 40), (24, 6, 4)])
def test_weights_on_the_left_are_those_on_the_right(shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(0)
    x, weight = random.normal(size=(1, 5, 24)), random.normal(size=shape)
    turned = Turned.of(jnp.asarray(weight, jnp.float32))
    assert turned.values.shape == (*shape[1:], 24)
    back = in_full(turned, jnp.dtype("float32"))
    np.testing.assert_array_equal(back, weight.astype(np.float32))
    product = project_left(jnp.asarray(x, jnp.float32), back)
    np.testing.assert_allclose(product, np.tensordot(x, weight, axes=1), atol=1e-5)


def test_each_guess_is_checked_as_the_token_that_it_is() -> None:
    packed = np.zeros((2, HEAD + 3 + 1), np.int32)
    packed[:, DRAWN], packed[:, SLOT], packed[0, ADJUSTED] = (7, 20), (1, 0), 1
    heads = heads_of_each(packed, 3)
    assert heads[:, DRAWN].tolist() == [7, 8, 9, 20, 21, 22]
    assert heads[:, SLOT].tolist() == [1, 1, 1, 0, 0, 0]
    assert heads[:, ADJUSTED].tolist() == [1, 0, 0, 0, 0, 0]
    assert not only_likeliest(heads) and only_likeliest(heads[1:])
    heads.view(np.float32)[4, TEMPERATURE] = 0.5
    assert not only_likeliest(heads[1:])


def test_what_cannot_be_quantised_is_named() -> None:
    weight = Parameter(shape=(2, 192, 4, 8), dims=(None, "embed", "heads", None), fan_in=192, stacked=True)
    require_format("int4-64", weight, (2, 192, 2, 8))
    require_format("int4-128", replace(weight, fan_in=None), (2, 192, 2, 8))
    with pytest.raises(RooftopError, match=r"weights: got 'int4-128'.*192 elements"):
        require_format("int4-128", weight, (2, 192, 2, 8))
    with pytest.raises(RooftopError, match="weights"):
        require_format("int2", weight, (2, 192, 2, 8))
