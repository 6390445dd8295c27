"""The numba kernel and the NumPy reference give the same buffers, however threads and sorts share the work."""

from __future__ import annotations

import importlib.util
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.embed.host import preprocess, reference
from rooftop.embed.host.inputs import Ragged
from rooftop.embed.host.lookups import table_layouts
from rooftop.embed.host.preprocess import Preprocessor, Threads, split_work
from rooftop.embed.host.reference import KeyFields
from rooftop.models.embedding_tables.limits import StackLimits
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, SparseCoreConfig, Tables
from tests.support.embedding_stacks import assert_same, made, stacks
from tests.support.examples import examples

KERNELS = [False, True] if importlib.util.find_spec("numba") else [False]
Model = tuple[Stacking, int, dict[str, Ragged]]


def with_weights(model: Model) -> Model:
    """Weights for every other feature."""
    stacking, batch, inputs = model
    weighted = set(sorted(inputs)[::2])
    tables = stacking.tables
    features = tuple(replace(one, weighted=one.name in weighted) for one in tables.features)
    other = stack_tables(
        replace(tables, features=features),
        cores=stacking.cores,
        cores_per_device=stacking.cores_per_device,
        batch=batch,
    )
    rng = np.random.default_rng(3)
    for name in weighted:
        weights = rng.uniform(-1, 2, len(inputs[name].values)).astype(np.float32)
        inputs = inputs | {name: replace(inputs[name], weights=weights)}
    return other, batch, inputs


@settings(max_examples=examples(100))
@given(
    stacks(), st.booleans(), st.integers(1, 3), st.sampled_from([1, 30, 16_000]), st.booleans(), st.booleans(),
    st.booleans(),
)  # fmt: skip
def test_numba_gives_the_bits_of_numpy(
    model: Model, minibatching: bool, threads: int, at_once: int, strided: bool, apart: bool, weighted: bool
) -> None:
    """For any number of sources sorted at once, ids anywhere in memory, tables in one stack and apart, and weights."""
    kernel = pytest.importorskip("rooftop.embed.host.kernel")
    if strided:
        stacking, batch, inputs = model
        spread = {name: replace(ids, values=np.repeat(ids.values, 2)[::2]) for name, ids in inputs.items()}
        model = stacking, batch, spread
    if weighted:
        model = with_weights(model)
    if apart:
        model = unstacked(model)
    expected = made(model, minibatching=minibatching)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "_SORTED_AT_ONCE", at_once)
        assert_same(made(model, minibatching=minibatching, threads=threads, accelerate=True), expected)


def unstacked(model: Model) -> Model:
    """Every table in a stack of its own."""
    stacking, batch, inputs = model
    tables = replace(stacking.tables, config=replace(stacking.tables.config, disable_table_stacking=True))
    apart = stack_tables(tables, cores=stacking.cores, cores_per_device=stacking.cores_per_device, batch=batch)
    return apart, batch, inputs


@pytest.mark.parametrize("accelerate", KERNELS)
@settings(max_examples=examples(50))
@given(stacks(), st.booleans(), st.integers(0, 5), st.booleans())
def test_any_number_of_sources_in_a_sort_gives_the_same(
    accelerate: bool, model: Model, minibatching: bool, spare: int, apart: bool
) -> None:
    """Keys that hold one source, and those with ``spare`` more bits for others."""
    if apart:
        model = unstacked(model)
    stacking, batch, _ = model
    layouts = [table_layouts(stack, batch // stacking.cores) for stack in stacking.stacks]
    expected = made(model, minibatching=minibatching)
    with pytest.MonkeyPatch.context() as patch:
        source = KeyFields.of(layouts, stacking.cores, 1).source
        patch.setattr(reference, "_NARROW", source + spare)
        assert KeyFields.of(layouts, stacking.cores, 1000).sources == 1 << spare
        assert_same(made(model, minibatching=minibatching, accelerate=accelerate), expected)


@pytest.mark.parametrize("accelerate", KERNELS)
@settings(max_examples=examples(20))
@given(stacks(), st.integers(2, 4))
def test_threads_give_what_one_gives(accelerate: bool, model: Model, threads: int) -> None:
    """Parts of very few ids are shared out as well."""
    alone = made(model, minibatching=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preprocess, "_IDS_PER_PART", 1)
        patch.setattr(preprocess, "_CHECKED_ALONE", 0)
        assert_same(made(model, minibatching=False, threads=threads, accelerate=accelerate), alone)


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_parts_hold_every_source_of_every_stack_once(counts: list[int], units: int, unit: int, threads: int) -> None:
    sources = units * unit
    seen = np.zeros((len(counts), sources), np.int64)
    for part in split_work(counts, sources, unit=unit, threads=threads):
        assert part.first % unit == part.last % unit == 0 and part.first < part.last
        assert len(part.stacks) == 1 or (part.first, part.last) == (0, sources)
        seen[part.stacks.start : part.stacks.stop, part.sources] += 1
    assert (seen == 1).all()


def test_keys_that_hold_no_source_are_refused() -> None:
    """And those of a large table and a large batch fit."""
    tables = tuple(EmbeddingTable(name=name, vocabulary=2**29, width=8) for name in "ab")
    features = tuple(Feature(name=name, table=name) for name in "ab")
    stacking = stack_tables(Tables(tables=tables, features=features), cores=1, cores_per_device=1, batch=2**30)
    layouts = table_layouts(stacking.stacks[0], 2**30)
    assert KeyFields.of([layouts], 1, 1).bits == 59
    wide = [replace(layout, samples=2**40) for layout in layouts]
    with pytest.raises(RooftopError, match="batch: got '1099511627776 lookups of a SparseCore") as error:
        KeyFields.of([wide], 1, 1)
    assert "\n" not in str(error.value)


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


@pytest.mark.parametrize("accelerate", KERNELS)
@pytest.mark.parametrize("minibatching", [False, True])
def test_buffers_keep_no_ids_of_earlier_batches(minibatching: bool, accelerate: bool) -> None:
    """Batch after batch in the same buffers, nearly full and roomy rows; b has no ids in some of them."""
    rng, batch, stacking = np.random.default_rng(5), 64, two_stacks(4, 2, 64)
    batches = [{"a": ids_of(rng, batch, a, 600), "b": ids_of(rng, batch, b, 600)} for a, b in
               ((60, 9), (58, 0), (20, 3), (59, 9), (1, 0), (58, 1))]  # fmt: skip
    needed = Preprocessor(stacking, batch=batch, accelerate=False).observe(batches[0]).stacks["a"].buffer.max()
    room = int(needed) + 48
    limits = {stack.name: StackLimits(max_ids=room, max_unique_ids=room, buffer=room) for stack in stacking.stacks}
    preprocessor = Preprocessor(stacking, batch=batch, limits=limits, minibatching=minibatching, accelerate=accelerate)
    fresh = Preprocessor(stacking, batch=batch, limits=limits, minibatching=minibatching, accelerate=False)
    buffers = preprocessor.buffers()
    for inputs in batches:
        assert_same(preprocessor.preprocess(inputs, out=buffers), fresh.preprocess(inputs))


@pytest.mark.parametrize("accelerate", KERNELS)
@pytest.mark.parametrize("tight", ["a", "b"])
def test_a_stack_that_overflows_leaves_the_others_as_they_are(tight: str, accelerate: bool) -> None:
    stacking, rng = two_stacks(4, 2, 32, allow_id_dropping=True), np.random.default_rng(2)
    inputs = {name: ids_of(rng, 32, 20, 600) for name in "ab"}
    roomy = {stack.name: StackLimits(max_ids=200, max_unique_ids=200, buffer=800) for stack in stacking.stacks}
    (overflowing,) = [stack.name for stack in stacking.stacks if stack.places[0].table.name == tight]
    limits = roomy | {overflowing: StackLimits(max_ids=8, max_unique_ids=8, buffer=32)}
    ours, expected, whole = (
        Preprocessor(stacking, batch=32, limits=own, accelerate=kernel).preprocess(inputs)
        for own, kernel in ((limits, accelerate), (limits, False), (roomy, False))
    )
    assert ours.statistics.stacks[overflowing].dropped
    assert_same(ours, expected)
    (other,) = set(roomy) - {overflowing}
    np.testing.assert_array_equal(ours.buffers[other].embedding_ids, whole.buffers[other].embedding_ids)


@pytest.mark.parametrize("accelerate", KERNELS)
def test_keys_of_one_core_may_take_every_bit(accelerate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is above the bits of a table, and stacks still end where they do: as with keys of 64 bits."""
    stacking, rng = two_stacks(1, 1, 8, 2**29), np.random.default_rng(3)
    limits = {stack.name: StackLimits(max_ids=64, max_unique_ids=64, buffer=64) for stack in stacking.stacks}
    inputs = {name: ids_of(rng, 8, 6, 2**29) for name in "ab"}
    ours = Preprocessor(stacking, batch=8, limits=limits, accelerate=accelerate).preprocess(inputs)
    assert KeyFields.of([table_layouts(stack, 8) for stack in stacking.stacks], 1, 1).bits == 32
    monkeypatch.setattr(reference, "_NARROW", -1)
    assert_same(ours, Preprocessor(stacking, batch=8, limits=limits, accelerate=False).preprocess(inputs))


@pytest.mark.parametrize("accelerate", KERNELS)
def test_unchecked_ids_are_cut_to_the_bits_of_a_row(accelerate: bool) -> None:
    stacking = two_stacks(2, 2, 8, vocabulary=8)
    limits = {stack.name: StackLimits(max_ids=64, max_unique_ids=64, buffer=128) for stack in stacking.stacks}
    wild = Ragged(values=np.array([3, -1, 2**40 + 5, 77, 8, 9, 1, 2]), row_splits=np.arange(9))
    valid = Ragged(values=np.arange(8), row_splits=np.arange(9))
    options: dict[str, Any] = {"batch": 8, "limits": limits, "out_of_range": "off"}
    ours = Preprocessor(stacking, accelerate=accelerate, **options).preprocess({"a": wild, "b": valid})
    assert_same(ours, Preprocessor(stacking, accelerate=False, **options).preprocess({"a": wild, "b": valid}))
    rows = ours.buffers["a"].embedding_ids
    assert (rows[rows != 2**31 - 1] < 8).all() and ours.statistics.stacks["a"].ids == 8
    checked = Preprocessor(stacking, batch=8, limits=limits, accelerate=accelerate).preprocess({"a": valid, "b": valid})
    np.testing.assert_array_equal(ours.buffers["b"].embedding_ids, checked.buffers["b"].embedding_ids)


def test_threads_work_at_the_same_time_and_keep_the_order() -> None:
    both, threads = threading.Barrier(2), Threads(2)

    def meet(item: int) -> int:
        if item < 2:
            both.wait(timeout=60)
        return item * 10

    assert threads.map(meet, range(5)) == [0, 10, 20, 30, 40]
    assert threads.map(meet, []) == []
    assert threads.map(meet, [7]) == [70]
    assert threads.map(lambda _: threading.get_ident(), [2, 3], alone=True) == [threading.get_ident()] * 2


def test_threads_begin_with_the_largest() -> None:
    begun: list[int] = []
    both = threading.Barrier(2)

    def begin(item: int) -> int:
        begun.append(item)
        if item > 5:
            both.wait(timeout=60)
        return -item

    assert Threads(2).map(begin, [3, 9, 1, 7], size=lambda item: item) == [-3, -9, -1, -7]
    assert set(begun[:2]) == {9, 7}


@pytest.mark.parametrize("count", [1, 3])
def test_of_several_errors_the_first_items_is_raised(count: int) -> None:
    def fail(item: int) -> int:
        if item % 2:
            raise ValueError(item)
        return item

    with pytest.raises(ValueError, match=r"^1$"):
        Threads(count).map(fail, range(6))
