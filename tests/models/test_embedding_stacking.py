"""Stacking: what is stacked, where it lies, and each table back exactly."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.core.rounding import next_multiple
from rooftop.models.embedding_tables.stacking import Stacking, pack, report, stack_tables, unpack
from rooftop.models.embedding_tables.tables import (
    EmbeddingTable,
    Feature,
    Quantization,
    SparseCoreConfig,
    TableOptimizer,
    Tables,
)


def model(*sizes: tuple[int, int], **config: bool) -> Tables:
    """Tables t0, t1, ... of (vocabulary, width), each with a feature."""
    return Tables(
        tables=tuple(EmbeddingTable(name=f"t{i}", vocabulary=v, width=w) for i, (v, w) in enumerate(sizes)),
        features=tuple(Feature(name=f"f{i}", table=f"t{i}") for i in range(len(sizes))),
        config=SparseCoreConfig(**config),
    )


def test_the_example_of_two_devices_of_four() -> None:
    stacking = stack_tables(model((100, 6), (50, 5)), cores=8, cores_per_device=4, batch=16)
    (stack,) = stacking.stacks
    assert (stack.name, stack.width, stack.rows) == ("t0+t1", 8, 24)
    assert [(place.rows * 8, place.offset, place.rotation) for place in stack.places] == [(128, 0, 0), (64, 16, 4)]
    assert stacking.devices == 2 and stacking.place("t1")[1] is stack.places[1]


MODELS = st.lists(
    st.tuples(
        st.integers(1, 300), st.integers(1, 20), st.sampled_from(["sum", "mean"]), st.sampled_from(["sgd", "adam"])
    ),
    min_size=1,
    max_size=6,
)


def drawn(sizes: list[tuple[int, int, str, str]], cores: int, cores_per_device: int, activation_bytes: int) -> Stacking:
    tables = tuple(
        EmbeddingTable(name=f"t{i}", vocabulary=v, width=w, combiner=c, optimizer=TableOptimizer(kind=o))
        for i, (v, w, c, o) in enumerate(sizes)
    )
    features = tuple(Feature(name=f"f{i}", table=f"t{i}") for i in range(len(sizes)))
    return stack_tables(
        Tables(tables=tables, features=features),
        cores=cores * cores_per_device,
        cores_per_device=cores_per_device,
        batch=64,
        activation_bytes=activation_bytes,
    )


@given(MODELS, st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 4000, 1 << 20]))
def test_each_table_comes_back(
    sizes: list[tuple[int, int, str, str]], devices: int, per_device: int, activation_bytes: int
) -> None:
    stacking = drawn(sizes, devices, per_device, activation_bytes)
    rng = np.random.default_rng(len(sizes))
    tables = {
        table.name: rng.normal(size=(table.vocabulary, table.width)).astype(np.float32)
        for table in stacking.tables.tables
    }
    packed = pack(stacking, tables, padding=np.nan)
    back = unpack(stacking, packed)
    assert list(back) == list(tables)
    for name, table in tables.items():
        np.testing.assert_array_equal(back[name], table)
    for stack in stacking.stacks:
        assert packed[stack.name].shape == (stacking.cores, stack.rows, stack.width)
        # Every row is where an id of its table looks for it, and everything else is padding.
        restored = np.full(packed[stack.name].shape, np.nan, np.float32)
        for place in stack.places:
            for row, values in enumerate(tables[place.table.name]):
                core = (row + place.rotation) % stacking.cores
                restored[core, place.offset + row // stacking.cores, : place.table.width] = values
        np.testing.assert_array_equal(restored, packed[stack.name])


@given(MODELS, st.integers(1, 5), st.integers(1, 4), st.sampled_from([1, 4000, 1 << 20]))
def test_stacks_are_alike_within_and_no_larger_than_allowed(
    sizes: list[tuple[int, int, str, str]], devices: int, per_device: int, activation_bytes: int
) -> None:
    stacking = drawn(sizes, devices, per_device, activation_bytes)
    names = [place.table.name for stack in stacking.stacks for place in stack.places]
    assert sorted(names) == sorted(table.name for table in stacking.tables.tables)
    for stack in stacking.stacks:
        assert len({(next_multiple(p.table.width, 8), p.table.combiner, p.table.optimizer) for p in stack.places}) == 1
        assert stack.width % 8 == 0
        activations = stack.width * 4 * (64 // stacking.cores) * len(stack.places)
        assert len(stack.places) == 1 or activations <= activation_bytes
        assert [p.offset for p in stack.places] == [
            sum(q.rows for q in stack.places[:i]) for i in range(len(stack.places))
        ]
        assert all(p.rows % 8 == 0 and p.rows * stacking.cores >= p.table.vocabulary for p in stack.places)
        assert all((b.rotation - a.rotation - per_device) % stacking.cores == 0 for a, b in pairwise(stack.places))


def test_what_keeps_tables_apart() -> None:
    tables = Tables(
        tables=(
            EmbeddingTable(name="a", vocabulary=8, width=8),
            EmbeddingTable(name="b", vocabulary=8, width=9),
            EmbeddingTable(name="c", vocabulary=8, width=8, combiner="mean"),
            EmbeddingTable(name="d", vocabulary=8, width=8, optimizer=TableOptimizer(kind="sgd")),
            EmbeddingTable(name="e", vocabulary=8, width=8, quantization=Quantization(low=0.0, high=1.0)),
            EmbeddingTable(name="f", vocabulary=8, width=3),
        ),
        features=tuple(Feature(name=f"of_{name}", table=name) for name in "abcdef"),
    )
    stacking = stack_tables(tables, cores=4, cores_per_device=4, batch=4)
    assert [stack.name for stack in stacking.stacks] == ["a+f", "b", "c", "d", "e"]
    apart = stack_tables(model((8, 8), (8, 8), disable_table_stacking=True), cores=4, cores_per_device=4, batch=4)
    assert [stack.name for stack in apart.stacks] == ["t0", "t1"]
    pairs = stack_tables(model(*[(8, 8)] * 5), cores=4, cores_per_device=4, batch=4, most_tables=2)
    assert [stack.name for stack in pairs.stacks] == ["t0+t1", "t2+t3", "t4"]


def test_a_sequence_counts_as_its_positions() -> None:
    tables = Tables(
        tables=(EmbeddingTable(name="a", vocabulary=8, width=8), EmbeddingTable(name="b", vocabulary=8, width=8)),
        features=(Feature(name="x", table="a", length=10), Feature(name="y", table="b"), Feature(name="z", table="b")),
    )
    together = stack_tables(tables, cores=2, cores_per_device=2, batch=4, activation_bytes=8 * 4 * 2 * 12)
    assert [stack.name for stack in together.stacks] == ["a+b"] and together.stacks[0].rows_per_sample == 12
    apart = stack_tables(tables, cores=2, cores_per_device=2, batch=4, activation_bytes=8 * 4 * 2 * 12 - 1)
    assert [stack.name for stack in apart.stacks] == ["a", "b"]


def test_names_of_many_tables_stay_short_and_differ() -> None:
    stacking = stack_tables(model(*[(8, 8)] * 60), cores=2, cores_per_device=2, batch=4, most_tables=30)
    names = [stack.name for stack in stacking.stacks]
    assert len(set(names)) == 2 and all(len(name) < 64 for name in names)


def test_the_report_counts_every_byte() -> None:
    tables = model((100, 6), (50, 5))
    stacking = stack_tables(tables, cores=8, cores_per_device=4, batch=16)
    (row,) = report(stacking, batch=16)
    assert row.tables == ("t0", "t1") and row.rows == 192
    assert row.table_bytes == 192 * 8 * 4 and row.slot_bytes == 192 * 8 * 4
    assert row.padding_bytes == 2 * (192 * 8 - 100 * 6 - 50 * 5) * 4
    assert row.waste == row.padding_bytes / (2 * 192 * 8 * 4)
    assert row.activation_bytes_per_core == 16 * 2 // 8 * 8 * 4


def test_what_is_refused() -> None:
    tables = model((100, 6))
    with pytest.raises(RooftopError, match="cores: got 6; accepted: a multiple of cores_per_device, 4"):
        stack_tables(tables, cores=6, cores_per_device=4, batch=8)
    with pytest.raises(RooftopError, match="batch: got 0"):
        stack_tables(tables, cores=4, cores_per_device=4, batch=0)
    with pytest.raises(RooftopError, match="ids have 32 bits"):
        stack_tables(model((2**31 - 1, 8)), cores=4, cores_per_device=4, batch=4)
    stacking = stack_tables(tables, cores=4, cores_per_device=4, batch=4)
    with pytest.raises(RooftopError, match=r"table t0: got \(100, 5\)"):
        pack(stacking, {"t0": np.zeros((100, 5))})
    with pytest.raises(RooftopError, match="no such table"):
        pack(stacking, {})
    with pytest.raises(RooftopError, match="did you mean t0"):
        pack(stacking, {"t0": np.zeros((100, 6)), "t": np.zeros(1)})
    with pytest.raises(RooftopError, match=r"stack t0: got \(4, 1, 8\)"):
        unpack(stacking, {"t0": np.zeros((4, 1, 8))})
    with pytest.raises(RooftopError, match="stacks: got 'no t0'"):
        unpack(stacking, {})
    with pytest.raises(RooftopError, match="stack: got 'x'"):
        stacking.stack("x")
    with pytest.raises(RooftopError, match="table: got 'x'"):
        stacking.place("x")
