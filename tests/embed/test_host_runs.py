"""Runs joined and keys sorted, with SciPy's loops and without, and what host preprocessing makes of them."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rooftop.embed import kernels, runs, stack_sort
from rooftop.embed.emit import Buffers
from rooftop.embed.inputs import Ragged
from rooftop.embed.preprocess import Preprocessed, Preprocessor
from rooftop.embed.space import Space
from rooftop.models.embedding_tables.limits import StackLimits
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, SparseCoreConfig, Tables
from tests.support.embedding_stacks import assert_same, made, stacks


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted), max_size=12), st.booleans())
def test_runs_are_joined_in_their_order(bounds: list[list[int]], compiled: bool) -> None:
    """Empty ones, none at all, and such as overlap; as many dims as bounds have."""
    ints, floats = np.arange(100, 120, dtype=np.int32), np.arange(20, dtype=np.float32) / 3
    total = sum(end - begin for begin, end in bounds)
    out, also = np.full(total, -1, np.int32), np.full(total, -1, np.float32)
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(runs, "_loops", lambda: None)
        runs.join(np.array(bounds, np.int32).reshape(-1, 1, 2), ints, floats, out, also)
    assert out.tolist() == [100 + at for begin, end in bounds for at in range(begin, end)]
    np.testing.assert_array_equal(also * 3, out - 100)


@settings(max_examples=200)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9)), max_size=9), min_size=1, max_size=4),
    st.booleans(),
)
def test_equal_keys_are_merged_up_to_each_end(sorts: list[list[tuple[int, int]]], compiled: bool) -> None:
    """Keys of 32 bits; equal ones on both sides of an end stay two."""
    keys = np.array([key for own in sorts for key, _ in own], np.uint32) + np.uint32(2**31 - 2)
    gains = np.array([gain for own in sorts for _, gain in own], np.float32)
    ends, wanted, wanted_ends = np.cumsum([len(own) for own in sorts]).tolist(), list[tuple[int, float]](), list[int]()
    for own in sorts:
        for key, same in itertools.groupby(own, key=lambda one: one[0]):
            wanted.append((key + 2**31 - 2, sum(gain for _, gain in same)))
        wanted_ends.append(len(wanted))
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(runs, "_loops", lambda: None)
        assume(len(keys))
        assert runs.merge(keys, gains, ends) == wanted_ends
    left = len(wanted)
    assert list(zip(keys[:left].tolist(), gains[:left].tolist(), strict=True)) == wanted


@settings(max_examples=300)
@given(st.integers(0, 32), st.integers(0, 32), st.integers(0, 400), st.integers(0, 2**32), st.booleans())
def test_both_sorts_sort(low: int, used: int, count: int, seed: int, compiled: bool) -> None:
    """Keys of any bits, of which the lowest are in order already, up to all of them."""
    rng, below, space = np.random.default_rng(seed), min(low, used), Space()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_FEW", 0)
        patch.setattr(runs, "_digits_are_faster", lambda: True)
        if not compiled:
            patch.setattr(runs, "_loops", lambda: None)
        # The second finds what the first left in the space.
        for several in (1, 7):
            high = rng.integers(0, 1 << used - below, count) // several * several
            keys = ((high << below) + np.sort(rng.integers(0, 1 << below, count))).astype(np.uint32)
            wanted = np.sort(keys)
            runs.sort(keys, low, used, space)
            np.testing.assert_array_equal(keys, wanted)


@settings(max_examples=200)
@given(st.integers(0, 32), st.integers(0, 32), st.integers(0, 400), st.integers(0, 2**32), st.booleans())
def test_values_are_sorted_with_their_keys(low: int, used: int, count: int, seed: int, compiled: bool) -> None:
    """Those of equal keys stay in their order."""
    rng, below, space = np.random.default_rng(seed), min(low, used), Space()
    with pytest.MonkeyPatch.context() as patch:
        if not compiled:
            patch.setattr(runs, "_loops", lambda: None)
        for several in (1, 7):
            high = rng.integers(0, 1 << used - below, count) // several * several
            keys = ((high << below) + np.sort(rng.integers(0, 1 << below, count) // 3)).astype(np.uint32)
            values = np.arange(count, dtype=np.float32)
            wanted = sorted(zip(keys.tolist(), values.tolist(), strict=True))
            runs.sort_pairs(keys, values, low, used, space)
            assert list(zip(keys.tolist(), values.tolist(), strict=True)) == wanted


@pytest.mark.parametrize(
    ("compiled", "faster", "count", "counted"),
    [(True, True, 3_000, True), (True, True, 2_999, False), (True, False, 3_000, False), (False, True, 3_000, False)],
)
def test_keys_are_counted_where_that_is_faster(
    compiled: bool, faster: bool, count: int, counted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    monkeypatch.setattr(runs, "_by_digits", lambda keys, *_: seen.append(len(keys)))
    monkeypatch.setattr(runs, "_digits_are_faster", lambda: faster)
    monkeypatch.setattr(runs, "_loops", runs._loops if compiled else lambda: None)
    runs.sort(np.zeros(count, np.uint32), 3, 20, Space())
    assert seen == ([count] if counted else [])


def test_more_keys_than_the_loops_count_are_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[int] = []
    monkeypatch.setattr(runs, "_MANY", 5)
    monkeypatch.setattr(runs, "_FEW", 0)
    monkeypatch.setattr(runs, "_digits_are_faster", lambda: True)
    monkeypatch.setattr(runs, "_by_digits", lambda keys, *_: counted.append(len(keys)))
    for count in (5, 6):
        keys, values = np.arange(count, dtype=np.uint32)[::-1].copy(), np.arange(count, dtype=np.float32)
        runs.sort(keys.copy(), 0, 20, Space())
        runs.sort_pairs(keys, values, 0, 20, Space())
    assert counted == [5, 5] and keys.tolist() == [0, 1, 2, 3, 4, 5] and values.tolist() == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize(("seconds", "faster"), [(0.5, False), (-0.5, True)])
def test_the_faster_sort_is_told_by_a_trial(seconds: float, faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which NumPy's sort takes a second, and the other so many more."""
    clock = [0.0]

    def now() -> float:
        clock[0] += 1
        return clock[0]

    def by_digits(*_: Any) -> None:
        clock[0] += seconds

    monkeypatch.setattr(runs.time, "perf_counter", now)
    monkeypatch.setattr(runs, "_by_digits", by_digits)
    assert runs._digits_are_faster.__wrapped__() is faster


@settings(max_examples=100)
@given(stacks(), st.booleans(), st.booleans(), st.booleans(), st.integers(1, 3))
def test_the_same_with_scipy_and_without_by_either_sort(
    model: tuple[Stacking, int, dict[str, Ragged]], minibatching: bool, compiled: bool, digits: bool, threads: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "_FEW", 0)
        patch.setattr(runs, "_digits_are_faster", lambda: digits)
        if not compiled:
            patch.setattr(runs, "_loops", lambda: None)
        ours = made(model, minibatching=minibatching, threads=threads)
        patch.setattr(kernels, "sort_stacks", lambda *_: None)
        assert_same(ours, made(model, minibatching=minibatching))


def ids_of(rng: np.random.Generator, samples: int, most: int, vocabulary: int) -> Ragged:
    splits = np.concatenate([[0], np.cumsum(rng.integers(most // 2, most + 1, samples))])
    return Ragged(values=rng.integers(0, vocabulary, splits[-1]), row_splits=splits)


def two_stacks(cores: int, per_device: int, batch: int, vocabulary: int = 600, **config: Any) -> Stacking:
    """Two tables, a and b, that are not stacked."""
    tables = tuple(EmbeddingTable(name=name, vocabulary=vocabulary, width=8) for name in "ab")
    features = tuple(Feature(name=name, table=name) for name in "ab")
    options = SparseCoreConfig(disable_table_stacking=True, max_ids_per_chip_per_sample=10**6, **config)
    model = Tables(tables=tables, features=features, config=options)
    return stack_tables(model, cores=cores, cores_per_device=per_device, batch=batch)


def by_table(preprocessor: Preprocessor, inputs: dict[str, Ragged]) -> Preprocessed:
    """In fresh buffers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "sort_stacks", lambda *_: None)
        return preprocessor.preprocess(inputs)


@pytest.mark.parametrize("minibatching", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_rows_written_to_their_end_and_roomy_ones_keep_no_earlier_ids(
    minibatching: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch after batch in the same buffers, each with other ids in a; b has none in some of them."""
    if not compiled:
        monkeypatch.setattr(runs, "_loops", lambda: None)
    rng, batch, stacking = np.random.default_rng(5), 64, two_stacks(4, 2, 64)
    batches = [{"a": ids_of(rng, batch, a, 600), "b": ids_of(rng, batch, b, 600)} for a, b in
               ((60, 9), (58, 0), (20, 3), (59, 9), (1, 0), (58, 1))]  # fmt: skip
    needed = Preprocessor(stacking, batch=batch, accelerate=False).observe(batches[0]).stacks["a"].buffer.max()
    room = int(needed) + 48
    limits = {stack.name: StackLimits(max_ids=room, max_unique_ids=room, buffer=room) for stack in stacking.stacks}
    preprocessor = Preprocessor(stacking, batch=batch, limits=limits, minibatching=minibatching, accelerate=False)
    copied: list[bool] = []
    write, buffers = Buffers.write, preprocessor.buffers()
    for inputs in batches:
        wanted = by_table(preprocessor, inputs)
        with pytest.MonkeyPatch.context() as patch:
            written: list[Buffers] = []
            patch.setattr(Buffers, "write", lambda self, *of, to=written: (to.append(self), write(self, *of))[1])
            assert_same(preprocessor.preprocess(inputs, out=buffers), wanted)
            copied.append(any(one is buffers["a"] for one in written))
    assert copied == [False, False, True, False, True, False]


@pytest.mark.parametrize("digits", [False, True])
def test_a_stack_that_does_not_fit_leaves_the_others_as_they_are(digits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_FEW", 0)
    monkeypatch.setattr(runs, "_digits_are_faster", lambda: digits)
    stacking, rng = two_stacks(4, 2, 32, allow_id_dropping=True), np.random.default_rng(2)
    inputs = {name: ids_of(rng, 32, 20, 600) for name in "ab"}
    for tight in "ab":
        limits = {
            stack.name: StackLimits(max_ids=8, max_unique_ids=8, buffer=32)
            if stack.places[0].table.name == tight
            else StackLimits(max_ids=200, max_unique_ids=200, buffer=800)
            for stack in stacking.stacks
        }
        preprocessor = Preprocessor(stacking, batch=32, limits=limits, accelerate=False)
        ours = preprocessor.preprocess(inputs)
        assert ours.statistics.stacks[tight].dropped
        assert_same(ours, by_table(preprocessor, inputs))


def test_keys_of_one_core_may_take_every_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is above the bits of a table, stacks still end where they do."""
    stacking, rng = two_stacks(1, 1, 8, 2**29), np.random.default_rng(3)
    limits = {stack.name: StackLimits(max_ids=64, max_unique_ids=64, buffer=64) for stack in stacking.stacks}
    preprocessor = Preprocessor(stacking, batch=8, limits=limits, accelerate=False)
    sorts: list[object] = []

    def sort(*arguments: Any) -> stack_sort.SortedStacks | None:
        sorts.append(stack_sort.sort_stacks(*arguments))
        return sorts[-1]

    monkeypatch.setattr(kernels, "sort_stacks", sort)
    inputs = {name: ids_of(rng, 8, 6, 2**29) for name in "ab"}
    assert_same(preprocessor.preprocess(inputs), by_table(preprocessor, inputs))
    assert len(sorts) == 1 and sorts[0] is not None


@settings(max_examples=20)
@given(stacks(), st.integers(1, 40))
def test_more_ids_than_32_bits_tell_are_taken_table_after_table(
    model: tuple[Stacking, int, dict[str, Ragged]], most: int
) -> None:
    seen: list[tuple[int, bool]] = []

    def sort(stacks: Any, *arguments: Any) -> stack_sort.SortedStacks | None:
        found = stack_sort.sort_stacks(stacks, *arguments)
        seen.append((sum(stack.ids for stack in stacks), found is not None))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack_sort, "_MOST_IDS", most)
        patch.setattr(kernels, "sort_stacks", sort)
        ours = made(model, minibatching=False)
        assert all(together == (0 < ids <= most) for ids, together in seen)
        patch.setattr(stack_sort, "_MOST_IDS", 1 << 29)
        assert_same(ours, made(model, minibatching=False))
