"""Attention over pages beside attention over the sequence itself: blocks, windows, caps, sinks, int8, the kernel."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest
from jax.experimental.pallas.ops.tpu import ragged_paged_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from rooftop.errors import RooftopError
from rooftop.models import load_model
from rooftop.programs import paged
from rooftop.programs.attention_scores import Scores
from rooftop.programs.paged import Pages, Rows, attend_heads, best_reader, require_reader
from rooftop.programs.quantised import in_full, quantise

PAGE, PAGES, KV_HEADS, HEADS = 4, 24, 2, 4
#: Tokens before the new ones, and new ones, of each row; the last row is padding.
START, COUNT, WIDTH = [13, 0, 26], [3, 2, 0], 4


def dense(
    scores: Scores, q: npt.NDArray[np.float64], k: npt.NDArray[np.float64], v: npt.NDArray[np.float64],
    first: int, sinks: npt.NDArray[np.float64] | None,
) -> npt.NDArray[np.float64]:  # fmt: skip
    """Query by query: q [C, n, H] at ``first`` and on; k and v [S, k, H]."""
    found = np.zeros((*q.shape[:2], v.shape[2]))
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
            found[place, head] = weights @ v[seen, head // (HEADS // KV_HEADS)] / total
    return found


def run(
    scores: Scores, *, size: int = 8, sinks: bool = False, int8: bool = False, reader: str = "gather"
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """What is found and what should be, of all rows [R, C, n, H]; and which tokens there are."""
    random = np.random.default_rng(0)
    longest = max(START) + WIDTH
    k, v = (random.normal(size=(3, longest, KV_HEADS, size)) for _ in range(2))
    q = random.normal(size=(3, WIDTH, HEADS, size))
    logits = random.normal(size=HEADS) if sinks else None
    tables = random.permutation(PAGES).reshape(3, -1).astype(np.int32)
    shape = (PAGES + 1, PAGE, 2 * KV_HEADS, size)
    pool = Pages(
        values=jnp.zeros(shape, jnp.int8 if int8 else jnp.float32), scales=jnp.zeros(shape[:3]) if int8 else None
    )
    for row, held in enumerate(START):
        at = np.arange(held)
        both = np.stack([k[row, :held], v[row, :held]], axis=2).reshape(held, 2 * KV_HEADS, size)
        if held:
            pool = pool.write(
                jnp.asarray(tables[row, at // PAGE]), jnp.asarray(at % PAGE), jnp.asarray(both, jnp.float32)
            )
    new = [np.stack([x[row, held : held + WIDTH] for row, held in enumerate(START)]) for x in (k, v)]
    rows = Rows(tables=jnp.asarray(tables), start=jnp.array(START), count=jnp.array(COUNT))
    given = [jnp.asarray(x, jnp.float32) for x in (q, *new)]
    sink = None if logits is None else jnp.asarray(logits, jnp.float32)
    o, pool = jax.jit(attend_heads, static_argnums=(0, 1))(reader, scores, *given, sink, pool, rows)
    assert bool(jnp.isfinite(o).all())
    wanted = np.stack([dense(scores, q[row], k[row], v[row], held, logits) for row, held in enumerate(START)])
    there = np.arange(WIDTH) < np.array(COUNT)[:, None]
    return np.asarray(o, np.float64), wanted, there


@pytest.mark.parametrize("block", [4, 12, 1024])
@pytest.mark.parametrize(
    ("scores", "sinks"),
    [
        (Scores(scale=0.3), False),
        (Scores(scale=0.3, window=5), False),
        (Scores(scale=0.3, softcap=1.5), True),
        (Scores(scale=0.3, window=9), True),
    ],
)
def test_pages_are_read_as_the_sequence_they_hold(
    scores: Scores, sinks: bool, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged, "BLOCK", block)
    jax.clear_caches()
    found, wanted, there = run(scores, sinks=sinks)
    np.testing.assert_allclose(found[there], wanted[there], atol=1e-5)


def test_an_int8_cache_is_near() -> None:
    found, wanted, there = run(Scores(scale=0.3), int8=True)
    error = np.abs(found[there] - wanted[there]).max()
    assert 1e-5 < error < 0.05


@pytest.mark.parametrize("scores", [Scores(scale=0.1), Scores(scale=0.1, window=7, softcap=2.0)])
def test_the_tpu_kernel_is_asked_for_what_is_gathered(scores: Scores, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the plain function that JAX has beside its kernel: Pallas' interpreter cannot run that one (JAX 0.10.2)."""

    def plain(*arrays: jax.Array, num_kv_pages_per_block: int, num_queries_per_block: int, **named: Any) -> jax.Array:
        assert num_kv_pages_per_block >= 1 and num_queries_per_block >= 1
        return kernel.ref_ragged_paged_attention(*arrays, **named)

    monkeypatch.setattr(ragged_paged_attention, "ragged_paged_attention", plain)
    with jax.disable_jit():
        found, wanted, there = run(scores, size=128, reader="ragged")
    np.testing.assert_allclose(found[there], wanted[there], atol=1e-4)


def test_which_models_the_kernel_serves() -> None:
    assert best_reader(load_model("llama3-8b"), "tpu", quantised=False) == "ragged"
    assert best_reader(load_model("llama3-8b"), "gpu", quantised=False) == "gather"
    assert best_reader(load_model("llama3-8b"), "tpu", quantised=True) == "gather"
    for name in ("deepseek-v3", "gpt-oss-20b"):
        assert best_reader(load_model(name), "tpu", quantised=False) == "gather"
        with pytest.raises(RooftopError, match="gather"):
            require_reader("ragged", load_model(name), quantised=False)
    with pytest.raises(RooftopError, match="paged attention"):
        require_reader("cudnn", load_model("llama3-8b"), quantised=False)


def test_int8_weights_are_within_half_a_step() -> None:
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(2, 16, 3, 5)), jnp.float32)
    small = quantise(weight, 1)
    assert small.values.dtype == jnp.int8 and small.scales.shape == (2, 1, 3, 5)
    step = jnp.abs(weight).max(axis=1, keepdims=True) / 127
    assert bool((jnp.abs(in_full(small, jnp.dtype("float32")) - weight) <= step / 2 * 1.001).all())
