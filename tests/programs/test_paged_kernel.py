"""The kernel for GPUs that reads pages, interpreted on a CPU, against ``gather``; compiled for GPUs in test_targets."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rooftop.programs.attention.scores import Scores
from rooftop.programs.serving import paged_kernel
from rooftop.programs.serving.paged import Pages, Rows, attend_heads

PAGE, PAGES = 4, 24
#: Earlier tokens of each row: none, a part of a page, several blocks, all but one of the table's.
START = np.array([0, 3, 50, PAGE * PAGES - 1], np.int32)


@pytest.mark.parametrize("programs", [1, 64], ids=["whole rows", "split rows"])
@pytest.mark.parametrize(
    ("scores", "sinks", "int8", "heads"),
    [
        (Scores(scale=0.3), False, False, 6),
        (Scores(scale=0.3, window=21, softcap=1.5), True, False, 2),
        (Scores(scale=0.3, window=70), False, True, 4),
    ],
    ids=["plain", "window, softcap and sinks", "int8"],
)
def test_rows_that_generate_read_what_gather_reads(
    scores: Scores, sinks: bool, int8: bool, heads: int, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_kernel, "_BLOCK", 16)
    monkeypatch.setattr(paged_kernel, "_PROGRAMS", programs)
    jax.clear_caches()
    random, count, kv_heads, size = np.random.default_rng(3), len(START), 2, 16
    shape = (count * PAGES + 1, 2, kv_heads, PAGE, size)
    if int8:
        values = jnp.asarray(random.integers(-127, 128, shape), jnp.int8)
        pool = Pages(values=values, scales=jnp.asarray(random.uniform(0.001, 0.02, shape[:-1]), jnp.float32))
    else:
        pool = Pages(values=jnp.asarray(random.normal(size=shape), jnp.float32))
    q, k, v = (jnp.asarray(random.normal(size=(count, n, size)), jnp.float32) for n in (heads, kv_heads, kv_heads))
    rows = Rows(
        tables=jnp.asarray(random.permutation(count * PAGES).reshape(count, PAGES), jnp.int32),
        start=jnp.asarray(START),
        # The last row is padding: it writes nothing.
        count=jnp.array([1, 1, 1, 0], jnp.int32),
        width=1,
    )
    sink = jnp.asarray(random.normal(size=heads), jnp.float32) if sinks else None
    outputs = []
    for reader in ("gather", "kernel"):
        o, written = jax.jit(attend_heads, static_argnums=(0, 1))(reader, scores, q, k, v, sink, pool, (rows,))
        outputs.append((np.asarray(o), np.asarray(written.values[:-1])))
    np.testing.assert_array_equal(outputs[0][1], outputs[1][1])
    assert np.isfinite(outputs[1][0]).all()
    np.testing.assert_allclose(outputs[1][0][:3], outputs[0][0][:3], atol=2e-5)
