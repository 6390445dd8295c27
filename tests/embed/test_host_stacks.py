"""Tables and stacks in one sort beside table after table, and the threads that share the work."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.embed import kernels, preprocess, stack_sort
from rooftop.embed.fields import Fields
from rooftop.embed.inputs import Ragged
from rooftop.embed.keys import flags, set_up_to
from rooftop.embed.lookups import TableBatch, layouts
from rooftop.embed.preprocess import Preprocessor
from rooftop.embed.threads import Threads
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, Tables
from tests.support.embedding_stacks import assert_same, made, stacks


@settings(max_examples=100)
@given(stacks(), st.booleans(), st.integers(1, 3), st.sampled_from([1, 30, 16_000]), st.booleans())
def test_numbas_loops_make_what_numpy_makes(
    model: tuple[Stacking, int, dict[str, Ragged]], minibatching: bool, threads: int, at_once: int, strided: bool
) -> None:
    """However many sources are sorted at once, and wherever the ids lie."""
    accelerated = pytest.importorskip("rooftop.embed.accelerated")
    if strided:
        stacking, batch, inputs = model
        apart = {name: replace(ids, values=np.repeat(ids.values, 2)[::2]) for name, ids in inputs.items()}
        model = stacking, batch, apart
    wanted = made(model, minibatching=minibatching)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(accelerated, "_SORTED_AT_ONCE", at_once)
        assert_same(made(model, minibatching=minibatching, threads=threads, accelerate=True), wanted)


def test_numba_leaves_keys_beyond_its_own_to_numpy() -> None:
    accelerated = pytest.importorskip("rooftop.embed.accelerated")
    tables = tuple(EmbeddingTable(name=name, vocabulary=2**29, width=8) for name in "ab")
    features = tuple(Feature(name=name, table=name) for name in "ab")
    stacking = stack_tables(Tables(tables=tables, features=features), cores=1, cores_per_device=1, batch=2**30)
    found = layouts(stacking, stacking.stacks[0], 2**30)
    batches = [TableBatch(table=table, features=(), gains=None) for table in found]
    assert Fields.of([batches], 1, accelerated._KEY_BITS) is not None
    wide = [replace(one, table=replace(one.table, layout=replace(one.table.layout, samples=2**40))) for one in batches]
    assert Fields.of([wide], 1, accelerated._KEY_BITS) is None


def test_what_numba_does_not_sort_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys have so few bits that not one source fits."""
    accelerated = pytest.importorskip("rooftop.embed.accelerated")
    tables = tuple(EmbeddingTable(name=name, vocabulary=50, width=8) for name in "ab")
    features = tuple(Feature(name=name, table=name) for name in "ab")
    stacking = stack_tables(Tables(tables=tables, features=features), cores=4, cores_per_device=2, batch=64)
    splits = np.arange(0, 193, 3)
    model = stacking, 64, {name: Ragged(values=np.arange(192) * 7 % 50, row_splits=splits) for name in "ab"}
    wanted = made(model, minibatching=False)
    monkeypatch.setattr(accelerated, "_fields", lambda *_: None)
    assert_same(made(model, minibatching=False, accelerate=True), wanted)


@settings(max_examples=150)
@given(stacks(), st.booleans(), st.integers(0, 5), st.booleans(), st.sampled_from([0, 100_000]))
def test_in_one_sort_as_table_after_table(
    model: tuple[Stacking, int, dict[str, Ragged]], minibatching: bool, spare: int, apart: bool, room: int
) -> None:
    """However many sources the keys' bits leave room for in a sort: those of one and ``spare`` more bits.

    Tables in one stack and in stacks of their own; with room for padding beside the gains, and without.
    """
    if apart:
        stacking, batch, inputs = model
        tables = replace(stacking.tables, config=replace(stacking.tables.config, disable_table_stacking=True))
        alone = stack_tables(tables, cores=stacking.cores, cores_per_device=stacking.cores_per_device, batch=batch)
        model = alone, batch, inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "sort_stacks", lambda *_: None)
        by_table = made(model, minibatching=minibatching)
        patch.setattr(stack_sort, "_SPARE", room)
        found = []

        def sort(stacks: Any, *arguments: Any) -> stack_sort.SortedStacks | None:
            patch.setattr(stack_sort, "_KEY_BITS", 32)
            fields = Fields.of([stack.tables for stack in stacks], 1, 32)
            patch.setattr(stack_sort, "_KEY_BITS", 32 if fields is None else fields.source + spare)
            found.append(stack_sort.sort_stacks(stacks, *arguments))
            return found[-1]

        patch.setattr(kernels, "sort_stacks", sort)
        together = made(model, minibatching=minibatching)
    assert_same(together, by_table)
    if any(one.ids for one in by_table.statistics.stacks.values()):
        assert any(found)


@pytest.mark.parametrize(("weighted", "vocabulary", "count"), [(True, 8, 2), (False, 2**29, 2)])
def test_what_takes_table_after_table(
    weighted: bool, vocabulary: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids with weights, and keys that do not fit; ids that were not checked are kept within theirs."""
    tables = tuple(EmbeddingTable(name=f"t{index}", vocabulary=vocabulary, width=8) for index in range(count))
    features = tuple(Feature(name=f"f{table.name}", table=table.name, weighted=weighted) for table in tables)
    stacking = stack_tables(Tables(tables=tables, features=features), cores=64, cores_per_device=2, batch=512)
    weights = np.ones(512, np.float32) if weighted else None
    ids = Ragged(values=np.arange(512) % 8, row_splits=np.arange(513), weights=weights)
    seen: list[object] = []

    def sort(*arguments: Any) -> None:
        seen.append(stack_sort.sort_stacks(*arguments))

    monkeypatch.setattr(kernels, "sort_stacks", sort)
    inputs = {feature.name: ids for feature in features}
    observed = Preprocessor(stacking, batch=512, accelerate=False).observe(inputs)
    assert seen and not any(seen)
    assert sum(stack.ids for stack in observed.stacks.values()) == 512 * count
    unchecked = Preprocessor(stacking, batch=512, accelerate=False, out_of_range="off").observe(inputs)
    assert not any(seen) and unchecked.stacks.keys() == observed.stacks.keys()


def test_ids_that_are_not_checked_take_table_after_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """As their keys do not fit: they are cut to the bits of a row."""
    stacking = stack_tables(
        Tables(tables=(EmbeddingTable(name="t", vocabulary=8, width=8),), features=(Feature(name="f", table="t"),)),
        cores=2,
        cores_per_device=2,
        batch=8,
    )
    seen: list[stack_sort.SortedStacks | None] = []

    def sort(*arguments: Any) -> stack_sort.SortedStacks | None:
        seen.append(stack_sort.sort_stacks(*arguments))
        return seen[-1]

    monkeypatch.setattr(kernels, "sort_stacks", sort)
    inputs = {"f": Ragged(values=np.arange(8), row_splits=np.arange(9))}
    for policy, together in (("error", True), ("off", False)):
        seen.clear()
        Preprocessor(stacking, batch=8, accelerate=False, out_of_range=policy).observe(inputs)
        assert seen and all((one is not None) == together for one in seen)


@settings(max_examples=20)
@given(stacks(), st.integers(2, 4))
def test_threads_make_what_one_makes(model: tuple[Stacking, int, dict[str, Ragged]], threads: int) -> None:
    """Where parts so small are shared out as well."""
    alone = made(model, minibatching=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack_sort, "_TOGETHER", 1)
        patch.setattr(stack_sort, "_WORTH_A_TABLE", 0)
        patch.setattr(preprocess, "_LOOKED_ALONE", 0)
        assert_same(made(model, minibatching=False, threads=threads), alone)


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_flags_set_up_to_a_place(given_flags: list[bool]) -> None:
    of = flags(len(given_flags))
    of[: len(given_flags)] = given_flags
    places = np.arange(len(given_flags))
    np.testing.assert_array_equal(set_up_to(of, places), np.cumsum(given_flags))
    rows = np.stack([of, flags(len(given_flags))])
    np.testing.assert_array_equal(set_up_to(rows, places), [np.cumsum(given_flags), np.zeros(len(places))])


def test_threads_work_at_the_same_time_and_keep_the_order() -> None:
    both, threads = threading.Barrier(2), Threads(2)

    def meet(item: int) -> int:
        if item < 2:
            both.wait(timeout=60)
        return item * 10

    assert threads.each(range(5), meet) == [0, 10, 20, 30, 40]
    assert threads.each([], meet) == []
    assert threads.each([7], meet) == [70]
    assert threads.each([2, 3], lambda _: threading.get_ident(), alone=True) == [threading.get_ident()] * 2


def test_threads_begin_with_the_largest() -> None:
    begun: list[int] = []
    both = threading.Barrier(2)

    def begin(item: int) -> int:
        begun.append(item)
        if item > 5:
            both.wait(timeout=60)
        return -item

    assert Threads(2).each([3, 9, 1, 7], begin, size=lambda item: item) == [-3, -9, -1, -7]
    assert set(begun[:2]) == {9, 7}


@pytest.mark.parametrize("count", [1, 3])
def test_of_several_errors_the_first_items_is_raised(count: int) -> None:
    def fail(item: int) -> int:
        if item % 2:
            raise ValueError(item)
        return item

    with pytest.raises(ValueError, match=r"^1$"):
        Threads(count).each(range(6), fail)
