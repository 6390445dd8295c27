"""The kernels for TPUs that read pages of one row per token and write tokens, interpreted on a CPU, against XLA's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from rooftop.programs.attention.scores import Scores
from rooftop.programs.serving import row_kernel
from rooftop.programs.serving.paged import Pages, Rows, attend_heads, attend_latents
from rooftop.programs.serving.write_kernel import write_tokens

PAGE, PAGES, LANES = 16, 11, 128
#: Earlier tokens of each row: none, a part of a page, a whole page, several blocks, all but one of the table's.
START = np.array([0, 3, 15, 100, 90, PAGE * PAGES - 1], np.int32)
#: The last but one row is padding: it writes nothing.
COUNT = np.array([1, 1, 1, 1, 0, 1], np.int32)


def rows_of(random: np.random.Generator, count: int) -> Rows:
    """Rows with tables of ``PAGES`` pages each, in random order."""
    tables = random.permutation(count * PAGES).reshape(count, PAGES)
    return Rows(
        tables=jnp.asarray(tables, jnp.int32),
        start=jnp.asarray(START[:count]),
        count=jnp.asarray(COUNT[:count]),
        width=1,
    )


def compare(outputs: list[tuple[jax.Array, Pages]], count: int) -> None:
    """Pools are equal, and outputs are close where there is a token."""
    (gathered, before), (read, after) = outputs
    np.testing.assert_array_equal(np.asarray(before.values[:-1]), np.asarray(after.values[:-1]))
    assert bool(jnp.isfinite(read).all())
    there = COUNT[:count] > 0
    np.testing.assert_allclose(np.asarray(read)[there], np.asarray(gathered)[there], atol=2e-5)
    assert float(jnp.abs(read[0] - read[1]).max()) > 0.01


@pytest.mark.parametrize(("pages", "count"), [(1, 5), (3, 6), (8, 5)])
def test_latents_are_those_that_gather_reads(pages: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so many ``pages`` of a block, some of which are begun together; an even number of rows is cut in two."""
    monkeypatch.setattr(row_kernel, "_BLOCK_BYTES", pages * PAGE * LANES * 4)
    monkeypatch.setattr(row_kernel, "_UNROLLED", 2)
    jax.clear_caches()
    random, heads, rank, rope = np.random.default_rng(pages), 3, 40, 8
    pool = Pages(values=jnp.asarray(random.normal(size=(count * PAGES + 1, 1, 1, PAGE, LANES)), jnp.float32))
    pool = Pages(values=pool.values.at[..., rank + rope :].set(0))
    q, latent, shared = (
        jnp.asarray(random.normal(size=shape), jnp.float32)
        for shape in ((count, heads, rank + rope), (count, rank), (count, rope))
    )
    rows, outputs = rows_of(random, count), []
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        for reader in ("gather", "rows"):
            attend = jax.jit(attend_latents, static_argnums=(0, 1))
            outputs.append(attend(reader, Scores(scale=0.3), q, latent, shared, pool, (rows,)))
    compare(outputs, count)


@pytest.mark.parametrize(
    ("scores", "sinks"),
    [(Scores(scale=0.3), False), (Scores(scale=0.3, window=37, softcap=1.5), True)],
    ids=["plain", "window, softcap and sinks"],
)
def test_keys_and_values_that_share_a_row_are_those_that_gather_reads(
    scores: Scores, sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_kernel, "_BLOCK_BYTES", 3 * 2 * PAGE * LANES * 4)
    jax.clear_caches()
    random, count, kv_heads, heads, size = np.random.default_rng(5), len(START), 2, 6, 48
    values = jnp.asarray(random.normal(size=(count * PAGES + 1, 1, kv_heads, PAGE, LANES)), jnp.float32)
    pool = Pages(values=values.at[..., 2 * size :].set(0))
    q, k, v = (jnp.asarray(random.normal(size=(count, n, size)), jnp.float32) for n in (heads, kv_heads, kv_heads))
    sink = jnp.asarray(random.normal(size=heads), jnp.float32) if sinks else None
    rows, outputs = rows_of(random, count), []
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        for reader in ("gather", "rows"):
            attend = jax.jit(attend_heads, static_argnums=(0, 1))
            outputs.append(attend(reader, scores, q, k, v, sink, pool, (rows,)))
    compare(outputs, count)


@pytest.mark.parametrize("count", [1, 7, 8, 29])
def test_tokens_are_written_where_a_scatter_writes_them(count: int) -> None:
    """A few tokens, whole groups of them, and some more; nothing else of the pool changes."""
    random, pages, heads = np.random.default_rng(count), 5, 4
    values, tokens = (
        jnp.asarray(random.normal(size=shape), jnp.bfloat16)
        for shape in ((pages, PAGE, heads, LANES), (count, heads, LANES))
    )
    page, offset = np.divmod(random.permutation(pages * PAGE)[:count].astype(np.int32), PAGE)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        written = jax.jit(write_tokens)(values, jnp.asarray(page), jnp.asarray(offset), tokens)
    np.testing.assert_array_equal(np.asarray(written), np.asarray(values.at[page, offset].set(tokens)))
