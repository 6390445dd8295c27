"""Limits: observed, estimated, kept in a file, and fed back with few programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.embed.host.limits import compare, estimate, expected, feed_back, observe, read_limits, rung, write_limits
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.embed.host.statistics import Statistics
from rooftop.models.embedding_tables.limits import StackLimits
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, SparseCoreConfig, Tables

BATCH = 64


def stacking(cores: int = 4, **config: Any) -> Stacking:
    tables = Tables(
        tables=(
            EmbeddingTable(name="a", vocabulary=5000, width=8),
            EmbeddingTable(name="b", vocabulary=900, width=8),
            EmbeddingTable(name="c", vocabulary=100, width=32),
        ),
        features=(
            Feature(name="fa", table="a", ids_per_sample=9),
            Feature(name="fb", table="b", ids_per_sample=4),
            Feature(name="fc", table="c", ids_per_sample=1),
        ),
        config=SparseCoreConfig(max_ids_per_chip_per_sample=10**6, **config),
    )
    return stack_tables(tables, cores=cores, cores_per_device=2, batch=BATCH)


def batches(count: int, mean: float = 1.0, seed: int = 0) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    for _ in range(count):
        yield {
            name: [rng.integers(0, vocabulary, rng.poisson(mean * ids)) for _ in range(BATCH)]
            for name, vocabulary, ids in (("fa", 5000, 9), ("fb", 900, 4), ("fc", 100, 1))
        }


def seen(count: int = 5, mean: float = 1.0, seed: int = 0) -> Statistics:
    return observe(Preprocessor(stacking(), batch=BATCH), batches(count, mean, seed))


def test_a_stream_needs_the_most_of_any_batch() -> None:
    preprocessor = Preprocessor(stacking(), batch=BATCH)
    ones = [preprocessor.observe(batch) for batch in batches(5)]
    together = seen()
    assert together.batches == 5
    for name, limits in together.stacks.items():
        for field in ("max_ids", "max_unique_ids", "buffer"):
            expected = np.max([getattr(one.stacks[name], field) for one in ones], axis=0)
            np.testing.assert_array_equal(getattr(limits, field), expected)
        assert limits.ids == sum(one.stacks[name].ids for one in ones)
        for table, count in limits.table_ids.items():
            assert count == max(one.stacks[name].table_ids[table] for one in ones)
    with pytest.raises(RooftopError, match="batches: got 'none'"):
        observe(preprocessor, [])


@given(st.floats(0, 3), st.integers(1, 4))
def test_what_was_observed_fits_its_limits(headroom: float, count: int) -> None:
    statistics = seen(count)
    limits = estimate(statistics, stacking(), headroom=headroom)
    preprocessor = Preprocessor(stacking(), batch=BATCH, limits=limits)
    for batch in batches(count):
        assert preprocessor.preprocess(batch).statistics.stacks["a+b"].dropped == 0
    for use in compare(limits, statistics):
        # At most a rung beyond the headroom, and never less: a full buffer bounds what a buffer needs.
        assert use.used <= 1
        assert use.compiled <= rung(use.observed * (1 + headroom))
        assert use.limit == "buffer" or use.compiled >= use.observed * (1 + headroom)


@given(st.floats(0, 1e9))
def test_rungs_are_a_quarter_apart(value: float) -> None:
    limit = rung(value)
    assert limit % 8 == 0 and limit >= value and rung(limit) == limit
    assert limit <= max(8, value * 1.25 + 9)


def test_limits_before_data_hold_even_data() -> None:
    limits = expected(stacking(), batch=BATCH)
    preprocessor = Preprocessor(stacking(), batch=BATCH, limits=limits)
    for batch in batches(30):
        preprocessor.preprocess(batch)
    observed = estimate(seen(30), stacking())
    assert all(limits[name].max_ids < 3 * observed[name].max_ids for name in limits)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    file, limits = tmp_path / "limits.json", estimate(seen(), stacking())
    write_limits(file, limits, stacking(), batch=BATCH, batches=5)
    assert read_limits(file, stacking(), batch=BATCH) == limits
    assert [one.name for one in tmp_path.iterdir()] == ["limits.json"]
    before = file.read_text()
    with pytest.raises(RooftopError, match="limits: got 'none for stack a"):
        write_limits(file, {}, stacking(), batch=BATCH)
    assert file.read_text() == before
    data = json.loads(before)
    for change, says in (
        ({"batch": 32}, "limits: batch: got 32; accepted: 64, as here"),
        ({"cores": 8}, "limits: cores: got 8; accepted: 4"),
        ({"kind": "plan"}, "accepted: a limits file that rooftop wrote, of schema 1"),
        ({"stacks": []}, r"limits: stacks: got \[\]"),
        ({"stacks": {"c": data["stacks"]["c"]}}, r"limits: got 'none for stack a\+b'"),
        ({"stacks": data["stacks"] | {"d": data["stacks"]["c"]}}, "limits: got 'limits for d'"),
        ({"stacks": {"c": {"max_ids": 8}}}, "limits: stack c: got .*accepted: the fields tables, max_ids"),
        ({"stacks": {"c": data["stacks"]["c"] | {"tables": ["x"]}}}, r"got \"tables \['x'\]\""),
        ({"stacks": {"c": data["stacks"]["c"] | {"max_ids": "8"}}}, "limits.max_ids: got '8'"),
    ):
        file.write_text(json.dumps(data | change))
        with pytest.raises(RooftopError, match=says):
            read_limits(file, stacking(), batch=BATCH)
    file.write_text("{")
    with pytest.raises(RooftopError, match="not JSON"):
        read_limits(file, stacking(), batch=BATCH)
    with pytest.raises(RooftopError, match="can be read"):
        read_limits(tmp_path / "none.json", stacking(), batch=BATCH)


def test_a_program_is_kept_while_it_fits_and_is_not_far_too_large() -> None:
    here, statistics = stacking(), seen()
    limits = estimate(statistics, here)
    assert feed_back(limits, statistics, here) is limits
    assert feed_back(limits, seen(5, mean=0.7), here) is limits
    more = feed_back(limits, seen(5, mean=3), here)
    assert more is not limits and feed_back(more, seen(5, mean=3), here) is more
    less = feed_back(more, statistics, here)
    assert less == limits
    with pytest.raises(RooftopError, match="limits: got 'none for stack"):
        feed_back({}, statistics, here)
    with pytest.raises(RooftopError, match="headroom: got -1"):
        feed_back(limits, statistics, here, headroom=-1)


def test_when_one_stack_overflows_the_others_keep_what_fits() -> None:
    here, statistics = stacking(), seen()
    needed = estimate(statistics, here)
    small = StackLimits(max_ids=8, max_unique_ids=8, buffer=8)
    raised = feed_back({"a+b": needed["a+b"], "c": small}, statistics, here)
    assert raised["a+b"] is needed["a+b"] and raised["c"] == needed["c"]


def test_drifting_data_compile_few_programs() -> None:
    """Ids a hundredfold, in 200 steps: a program for each rung at most, and none is compiled twice."""
    here, limits, programs = stacking(), estimate(seen(1, 0.05), stacking()), 1
    for step in range(200):
        statistics = seen(1, 0.05 * 100 ** (step / 199), seed=step)
        after = feed_back(limits, statistics, here)
        programs += after is not limits
        limits = after
    assert programs <= 22
