"""Host preprocessing: against a literal reading of the rules, against jax-tpu-embedding, and what is refused."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import warnings
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.embed.host import reference
from rooftop.embed.host.inputs import Ragged
from rooftop.embed.host.lookups import table_layouts
from rooftop.embed.host.preprocess import Preprocessed, Preprocessor
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, SparseCoreConfig, TableOptimizer, Tables
from tests.support.examples import examples

ORACLES = Path(__file__).parents[1] / "oracles"
KERNELS = [False, True] if importlib.util.find_spec("numba") else [False]
NO_ID = 2**31 - 1


@cache
def cases() -> ModuleType:
    spec = importlib.util.spec_from_file_location("embed_host_cases", ORACLES / "embed_host_cases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


# Literally: dictionaries and loops.


def literal(stacking: Stacking, inputs: dict[str, Ragged], batch: int) -> dict[str, dict[tuple[int, ...], float]]:
    """By stack: (source, destination, local row, sample) -> gain."""
    sources = stacking.cores
    entries: dict[str, dict[tuple[int, ...], float]] = {}
    for stack in stacking.stacks:
        gains: dict[tuple[int, ...], float] = defaultdict(float)
        offset = 0
        for place in stack.places:
            for feature in place.features:
                ids = inputs[feature.name]
                rows = batch * feature.rows_per_sample // sources
                for row in range(rows * sources):
                    span = slice(int(ids.row_splits[row]), int(ids.row_splits[row + 1]))
                    values = ids.values[span].tolist()
                    weights = [1.0] * len(values) if ids.weights is None else ids.weights[span].tolist()
                    divisor = {
                        "sum": 1.0,
                        "mean": sum(weights),
                        "sqrtn": math.sqrt(sum(weight * weight for weight in weights)),
                    }[stack.combiner]
                    for value, weight in zip(values, weights, strict=True):
                        core = (value + place.rotation) % stacking.cores
                        local = place.offset + value // stacking.cores
                        gains[row // rows, core, local, offset + row % rows] += weight / divisor if divisor else 0.0
                offset += rows
        entries[stack.name] = gains
    return entries


def read(preprocessed: Preprocessed, stacking: Stacking, stack: str) -> dict[tuple[int, ...], float]:
    """The same out of the buffers, whose padding is checked."""
    buffers, cores = preprocessed.buffers[stack], stacking.cores
    segment = max(cores, 8)
    pointers = buffers.row_pointers.reshape(stacking.cores, segment)
    ids, samples, gains = (
        array.reshape(stacking.cores, -1) for array in (buffers.embedding_ids, buffers.sample_ids, buffers.gains)
    )
    read: dict[tuple[int, ...], float] = {}
    for source in range(stacking.cores):
        begin = 0
        for core in range(cores):
            end = int(pointers[source, core])
            entries = list(zip(ids[source, begin:end].tolist(), samples[source, begin:end].tolist(), strict=True))
            assert entries == sorted(set(entries)), "rows and then samples rise, none twice"
            for at, (row, sample) in enumerate(entries, begin):
                read[source, core, row, sample] = float(gains[source, at])
            begin = -(-end // 8) * 8
            assert (ids[source, end:begin] == NO_ID).all() and (samples[source, end:begin] == NO_ID).all()
            assert np.isnan(gains[source, end:begin]).all()
        assert (pointers[source, cores:] == begin).all()
        assert (ids[source, begin:] == NO_ID).all() and (samples[source, begin:] == NO_ID).all()
        assert np.isnan(gains[source, begin:]).all()
    return read


@st.composite
def models(draw: st.DrawFn) -> tuple[Stacking, int, dict[str, Ragged]]:
    """Any number of SparseCores, tables that stack or do not, weights, sequences, and a batch."""
    devices, per_device = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    combiner = draw(st.sampled_from(["sum", "mean", "sqrtn"]))
    tables, features = [], []
    for index in range(draw(st.integers(1, 3))):
        tables.append(
            EmbeddingTable(
                name=f"t{index}",
                vocabulary=draw(st.sampled_from([1, 2, 7, 50, 1000, 2**24])),
                width=8,
                combiner=combiner,
                optimizer=TableOptimizer(kind="sgd"),
            )
        )
        for feature in range(draw(st.integers(1, 2))):
            length = draw(st.sampled_from([None, None, None, 3]))
            weighted = draw(st.booleans())
            features.append(Feature(name=f"f{index}{feature}", table=f"t{index}", weighted=weighted, length=length))
    config = SparseCoreConfig(max_ids_per_chip_per_sample=10**6, disable_table_stacking=draw(st.booleans()))
    model = Tables(tables=tuple(tables), features=tuple(features), config=config)
    cores = devices * per_device
    batch = cores * draw(st.integers(1, 5))
    stacking = stack_tables(model, cores=cores, cores_per_device=per_device, batch=batch)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    inputs = {}
    for one in features:
        rows = batch * one.rows_per_sample
        lengths = rng.integers(0, 2 if one.length else 9, rows)
        splits = np.concatenate([[0], np.cumsum(lengths)])
        vocabulary = model.table(one.table).vocabulary
        values = rng.integers(0, min(vocabulary, int(rng.choice([3, 2**24]))), splits[-1])
        weights = rng.uniform(-1, 2, splits[-1]).astype(np.float32) if one.weighted else None
        inputs[one.name] = Ragged(
            values=values.astype(rng.choice([np.int32, np.uint64])), row_splits=splits, weights=weights
        )
    return stacking, batch, inputs


def roomy(stacking: Stacking, most: int = 4096) -> dict[str, StackLimits]:
    one = StackLimits(max_ids=most, max_unique_ids=most, buffer=full_buffer(most, stacking.cores))
    return {stack.name: one for stack in stacking.stacks}


def as_given(stacking: Stacking, inputs: dict[str, Ragged]) -> dict[str, Any]:
    """Sequences with the rows of their samples: as dense arrays, -1 where a position is empty."""
    features: dict[str, Any] = {}
    for feature in stacking.tables.features:
        ids = inputs[feature.name]
        features[feature.name] = ids
        if feature.length is not None:
            there = np.diff(ids.row_splits) > 0
            dense = np.full(len(there), -1, np.int64)
            dense[there] = ids.values
            features[feature.name] = dense.reshape(-1, feature.length)
            if ids.weights is not None:
                weights = np.ones(len(there), np.float32)
                weights[there] = ids.weights
                features[feature.name] = (features[feature.name], weights.reshape(-1, feature.length))
    return features


@pytest.mark.parametrize("accelerate", KERNELS)
@settings(max_examples=examples(60))
@given(models(), st.integers(1, 3))
def test_buffers_hold_what_the_rules_say(
    accelerate: bool, model: tuple[Stacking, int, dict[str, Ragged]], threads: int
) -> None:
    stacking, batch, inputs = model
    preprocessor = Preprocessor(
        stacking, batch=batch, limits=roomy(stacking, 512), threads=threads, accelerate=accelerate
    )
    preprocessed = preprocessor.preprocess(as_given(stacking, inputs))
    assert preprocessed.minibatches == 1
    for name, expected in literal(stacking, inputs, batch).items():
        ours = read(preprocessed, stacking, name)
        assert ours.keys() == expected.keys()
        np.testing.assert_allclose(list(ours.values()), [expected[key] for key in ours], rtol=1e-5, atol=1e-6)
        partitions, rows = defaultdict[Any, int](int), defaultdict[Any, set[int]](set)
        for source, core, row, _ in expected:
            partitions[source, core] += 1
            rows[source, core].add(row)
        seen, per_device = preprocessed.statistics.stacks[name], stacking.cores_per_device
        for device in range(stacking.devices):
            mine = range(device * per_device, (device + 1) * per_device)
            for core in range(stacking.cores):
                assert seen.max_ids[device, core] == max(partitions[source, core] for source in mine)
                assert seen.max_unique_ids[device, core] == max(len(rows[source, core]) for source in mine)
            for at, source in enumerate(mine):
                padded = sum(-(-partitions[source, core] // 8) * 8 for core in range(stacking.cores))
                assert seen.buffer[device, at] == padded
        assert seen.ids == len(expected) and seen.dropped == 0
    observed = Preprocessor(stacking, batch=batch, accelerate=accelerate).observe(as_given(stacking, inputs))
    for name, one in observed.stacks.items():
        np.testing.assert_array_equal(one.max_ids, preprocessed.statistics.stacks[name].max_ids)


@pytest.mark.parametrize("accelerate", KERNELS)
@settings(max_examples=examples(30))
@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_buffers_written_again_are_as_fresh_ones(accelerate: bool, first: int, second: int) -> None:
    """Whatever they held before, and however many threads write: minibatched, dropped, cut off."""
    case = cases().draw(first)
    case = replace(case, dropping=True)
    stacking = case.stacking()
    options = {"batch": case.batch, "limits": case.limits(stacking), "minibatching": case.minibatching}
    one = Preprocessor(stacking, **options, accelerate=accelerate)
    three = Preprocessor(stacking, **options, accelerate=accelerate, threads=3)
    inputs, others = (replace(case, seed=seed).inputs(stacking.tables) for seed in (case.seed, second))
    fresh = one.preprocess(inputs)
    again = three.preprocess(inputs, out=three.preprocess(others).buffers)
    assert again.minibatches == fresh.minibatches
    for name, buffers in fresh.buffers.items():
        used = buffers.row_pointers.size
        np.testing.assert_array_equal(
            again.buffers[name].row_pointers.reshape(-1)[:used], buffers.row_pointers.reshape(-1)
        )
        np.testing.assert_array_equal(again.buffers[name].embedding_ids, buffers.embedding_ids)
        np.testing.assert_array_equal(again.buffers[name].sample_ids, buffers.sample_ids)
        np.testing.assert_array_equal(again.buffers[name].gains, buffers.gains)


@pytest.mark.parametrize("accelerate", KERNELS)
def test_as_jax_tpu_embedding_made_them(accelerate: bool) -> None:
    """Committed results of tests/oracles/compare_embed_host.py: every way to overflow, every combiner."""
    with np.load(ORACLES / "embed_host.npz") as file:
        golden = dict(file)
    stacks = defaultdict[int, dict[str, dict[str, Any]]](dict)
    for key in golden:
        seed, *rest = key.split("/")
        if len(rest) == 2:
            stacks[int(seed)].setdefault(rest[0], {})[rest[1]] = golden[key]
    kinds = set()
    for seed, fields in stacks.items():
        case = cases().draw(seed)
        ours = case.run(accelerate=accelerate)
        expected = {name: cases().Expected(**values) for name, values in fields.items()}
        kinds.add(cases().check(case, ours, int(golden[f"{seed}/minibatches"]), expected))
    assert kinds == {"minibatches", "minibatches, dropped", "one pass", "one pass, dropped"}


DIGESTED, PARTS = 4000, 32


@pytest.mark.parametrize("accelerate", KERNELS)
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.slow) for part in range(1, PARTS))])
def test_as_jax_tpu_embedding_made_thousands(part: int, accelerate: bool) -> None:
    """Committed digests of what it made of random cases; those that we refuse end its process."""
    # Read once: each look into the file decompresses a whole array.
    with np.load(ORACLES / "embed_host_digests.npz") as file:
        golden = dict(file)
    assert len(golden["refused"]) == DIGESTED and golden["refused"].mean() < 0.15
    kinds = set()
    for seed in range(part, DIGESTED, PARTS):
        case = cases().draw(seed)
        ours = case.run(accelerate=accelerate)
        assert isinstance(ours, RooftopError) == bool(golden["refused"][seed]), seed
        if isinstance(ours, RooftopError):
            continue
        mine = cases().Digest.of(ours.minibatches, cases().as_expected(case, ours))
        assert (mine.whole, mine.dropped) == (int(golden["whole"][seed]), int(golden["dropped"][seed])), seed
        sizes = golden["sizes"][seed]
        assert abs(mine.along - golden["along"][seed]) <= 3e-6 * sizes + 1e-12, seed
        assert abs(mine.sizes - sizes) <= 3e-6 * sizes + 1e-12, seed
        kinds |= {("passes", ours.minibatches > 1), ("dropped", mine.dropped > 0), ("combiner", case.combiner)}
        kinds |= {("weighted", case.weighted), ("stacked", case.stacked)}
    assert len(kinds) == 11


@pytest.mark.oracle
@pytest.mark.skipif("ROOFTOP_EMBED_ORACLE" not in os.environ, reason="ROOFTOP_EMBED_ORACLE names no Python")
def test_beside_jax_tpu_embedding() -> None:
    """ROOFTOP_EMBED_ORACLE: a Python with jax-tpu-embedding, hypothesis, numba and click."""
    command = [os.environ["ROOFTOP_EMBED_ORACLE"], str(ORACLES / "compare_embed_host.py"), "300"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("weighted", [False, True])
def test_keys_of_64_bits_give_the_same_buffers(weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and batches that are too large for keys of 32 bits."""
    case = replace(cases().draw(3), weighted=weighted, max_ids=512, max_unique_ids=512, buffer=1.0, minibatching=False)
    narrow = case.run(accelerate=False)
    monkeypatch.setattr(reference, "_NARROW", -1)
    fields = reference.KeyFields.of([cases_layouts(case)], case.cores, case.cores)
    assert fields.bits < 32 and reference.key_dtype(fields) is np.uint64
    for accelerate in KERNELS:
        wide = case.run(accelerate=accelerate)
        for name, buffers in narrow.buffers.items():
            for field in ("row_pointers", "embedding_ids", "sample_ids", "gains"):
                np.testing.assert_array_equal(getattr(wide.buffers[name], field), getattr(buffers, field))


def cases_layouts(case: Any) -> Any:
    return table_layouts(case.stacking().stacks[0], case.samples)


# Limits.


def one_table(vocabulary: int = 64, cores: int = 2, **config: Any) -> Stacking:
    model = Tables(
        tables=(EmbeddingTable(name="t", vocabulary=vocabulary, width=8),),
        features=(Feature(name="f", table="t"),),
        config=SparseCoreConfig(**config),
    )
    return stack_tables(model, cores=cores, cores_per_device=cores, batch=cores)


def limits(max_ids: int = 64, max_unique_ids: int = 64, buffer: int = 256) -> dict[str, StackLimits]:
    return {"t": StackLimits(max_ids=max_ids, max_unique_ids=max_unique_ids, buffer=buffer)}


TEN = [[0, 2, 4, 6, 8, 10, 12, 14, 16, 1], [3]]


@pytest.mark.parametrize(
    ("stack_limits", "config", "says"),
    [
        (limits(max_ids=8, max_unique_ids=8), {}, "limits of stack t: max_ids: got '9 ids from SparseCore 0 for 0'"),
        (limits(max_unique_ids=8), {}, "limits of stack t: max_unique_ids: got '9 different ids from SparseCore 0"),
        (limits(buffer=16), {}, "limits of stack t: buffer: got '24 ids, padded'; accepted: at most 16"),
        (limits(), {"max_ids_per_table": {"t": 9}}, "config.max_ids_per_table.t: got '10 ids of one SparseCore'"),
        (limits(), {"max_unique_ids_per_table": {"t": 9}}, "config.max_unique_ids_per_table.t: got '10 ids"),
        (
            limits(),
            {"max_ids_per_chip_per_sample": 5},
            "max_ids_per_chip_per_sample: got '11 ids on chip 0'.*5 a sample, 10",
        ),
    ],
)
def test_what_overflows_is_an_error_or_is_dropped(
    stack_limits: dict[str, StackLimits], config: dict[str, Any], says: str
) -> None:
    with pytest.raises(RooftopError, match=says):
        Preprocessor(one_table(**config), batch=2, limits=stack_limits).preprocess({"f": TEN})
    stacking = one_table(allow_id_dropping=True, **config)
    preprocessed = Preprocessor(stacking, batch=2, limits=stack_limits).preprocess({"f": TEN})
    entries = read(preprocessed, stacking, "t")
    # In sorted order: destination 0 with rows 0 to 8 first, then the odd id. A chip's bound is shared by its sources.
    first = [(0, 0, row, 0) for row in range(9)] + [(0, 1, 0, 0)]
    expected = {
        "max_ids": first[:8] + first[9:],
        "max_unique_ids": first[:8] + first[9:],
        "buffer": first[:9],
        "max_ids_per_table": first[:9],
        "max_unique_ids_per_table": first[:9],
        "max_ids_per_chip_per_sample": first[:5],
    }
    name = says.split(": got")[0].removeprefix("limits of stack t: ").removeprefix("config.").removesuffix(".t")
    assert list(entries) == [*expected[name], (1, 1, 1, 0)]
    assert preprocessed.statistics.stacks["t"].dropped == 11 - len(entries)


def test_dropped_ids_are_counted_as_they_came() -> None:
    stacking = one_table(allow_id_dropping=True)
    preprocessed = Preprocessor(stacking, batch=2, limits=limits(max_ids=1, max_unique_ids=1)).preprocess(
        {"f": [[0, 2, 2, 2], []]}
    )
    assert read(preprocessed, stacking, "t") == {(0, 0, 0, 0): 1.0} and preprocessed.statistics.stacks["t"].dropped == 3


@pytest.mark.parametrize("accelerate", KERNELS)
def test_passes_keep_every_id(accelerate: bool) -> None:
    stacking = one_table(vocabulary=4096, cores=2, max_ids_per_chip_per_sample=1000)
    rng = np.random.default_rng(0)
    ids = [rng.choice(4096, 500, replace=False).tolist(), rng.choice(4096, 40, replace=False).tolist()]
    one = StackLimits(max_ids=40, max_unique_ids=40, buffer=4096)
    preprocessed = Preprocessor(
        stacking, batch=2, limits={"t": one}, minibatching=True, accelerate=accelerate
    ).preprocess({"f": ids})
    assert preprocessed.minibatches > 6
    pointers = preprocessed.buffers["t"].row_pointers.reshape(-1)[: 2 * preprocessed.minibatches * 8].reshape(2, -1, 8)
    begin, seen = 0, [[], []]
    for source in range(2):
        for ends in pointers[source]:
            for core in range(2):
                assert ends[core] - begin <= 40
                rows = preprocessed.buffers["t"].embedding_ids[0, begin : ends[core]]
                seen[source] += (rows * 2 + core).tolist()
                begin = -(-int(ends[core]) // 8) * 8
    assert [sorted(one) for one in seen] == [sorted(one) for one in ids]


def test_hosts_agree_on_the_passes() -> None:
    """A host that overflows makes another, that does not, take the same passes; the masks are ORed."""
    stacking = one_table(vocabulary=4096, cores=2, max_ids_per_chip_per_sample=1000)
    full, few = {"f": [list(range(0, 400, 2)), [1]]}, {"f": [[0], [1]]}
    one = {"t": StackLimits(max_ids=64, max_unique_ids=64, buffer=4096)}
    masks: list[int] = []

    def host(inputs: dict[str, Any], others: int) -> Preprocessed:
        def combine(mask: int) -> int:
            masks.append(mask)
            return mask | others

        return Preprocessor(stacking, batch=2, limits=one, minibatching=True, combine=combine).preprocess(inputs)

    host(full, 0), host(few, 0)
    assert masks[0] and not masks[1]
    assert host(few, masks[0]).minibatches == host(full, masks[1]).minibatches == masks[0].bit_count() + 1


def test_a_bucket_that_no_pass_can_hold() -> None:
    ids = {"f": [[7], [7]]}
    many = {"f": [[0] * 3 + [2] * 3, []]}
    stacking = one_table()
    assert Preprocessor(stacking, batch=2, limits=limits(max_ids=1, max_unique_ids=1), minibatching=True).preprocess(
        ids
    )
    assert (
        Preprocessor(stacking, batch=2, limits=limits(max_ids=1, max_unique_ids=1), minibatching=True)
        .preprocess(many)
        .minibatches
        == 2
    )
    model = Tables(
        tables=(EmbeddingTable(name="t", vocabulary=64, width=8),),
        features=(Feature(name="f", table="t", length=3),),
    )
    shared = stack_tables(model, cores=2, cores_per_device=2, batch=2)
    with pytest.raises(RooftopError, match="3 ids from SparseCore 0 for 0"):
        Preprocessor(shared, batch=2, limits=limits(max_ids=2, max_unique_ids=2), minibatching=True).preprocess(
            {"f": [[4, 4, 4], []]}
        )


# What is refused.


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({}, "features.f: got 'no ids'; accepted: ids for each feature"),
        ({"f": [[1], [2]], "g": [[1], [2]]}, "feature: got 'g'; accepted: one of f"),
        ({"f": [[1], [2], [3], [4]]}, "features.f: got '4 samples'; accepted: 2 samples"),
        ({"f": [[-1], [2]]}, "features.f: got '1 ids out of range, first -1 in row 0'; accepted: ids from 0 to 63"),
        ({"f": [[3, 64], [70, -5, 99]]}, "4 ids out of range, first 64 in row 0, 70 in row 1, -5 in row 1'"),
        ({"f": [[2**40], [2]]}, "first 1099511627776 in row 0"),
        ({"f": [[1.5], [2]]}, "features.f: got 'float64 ids'; accepted: whole-number ids"),
        ({"f": [["a"], [2]]}, "features.f: got 'no numbers ids'; accepted: whole-number ids"),
        ({"f": [[1], None]}, 'features.f: got "lists that are no lists'),
        ({"f": "ab"}, "features.f: got 'str'; accepted: Ragged"),
        ({"f": (np.arange(3), np.array([0, 2, 2]))}, "row_splits: got 'from 0 to 2'; accepted: from 0 to 3"),
        ({"f": (np.arange(3), np.array([1, 2, 3]))}, "row_splits: got 'from 1 to 3'"),
        ({"f": (np.arange(3), np.array([0, 4, 3]))}, "row_splits: got '4 and then 3 at 1'"),
        ({"f": (np.arange(3), np.array([0.0, 4, 3]))}, "row_splits: got 'float64'"),
        ({"f": (np.arange(3), np.array([0, 1, 3]), np.ones(3))}, "got 'ids and weights'; accepted: ids alone"),
        ({"f": np.zeros((2, 2, 2), int)}, "an array of 3 dims"),
    ],
)
def test_one_line_for_bad_input(inputs: dict[str, Any], says: str) -> None:
    with pytest.raises(RooftopError) as error:
        Preprocessor(one_table(), batch=2, limits=limits()).preprocess(inputs)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_what_may_be_done_about_ids_out_of_range() -> None:
    stacking, inputs = one_table(vocabulary=10), {"f": [[1, 12], [-3]]}
    clamped = Preprocessor(stacking, batch=2, limits=limits(), out_of_range="clamp").preprocess(inputs)
    assert list(read(clamped, stacking, "t")) == [(0, 1, 0, 0), (0, 1, 4, 0), (1, 0, 0, 0)]
    assert clamped.statistics.out_of_range == {"f": 2}
    with pytest.warns(UserWarning, match="2 ids out of range, first 12 in row 0, -3 in row 1; left out"):
        preprocessed = Preprocessor(stacking, batch=2, limits=limits(), out_of_range="warn").preprocess(inputs)
    assert list(read(preprocessed, stacking, "t")) == [(0, 1, 0, 0)]
    for accelerate in KERNELS:
        off = Preprocessor(stacking, batch=2, limits=limits(), out_of_range="off", accelerate=accelerate)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            wild = off.preprocess({"f": [[1, 2**31 - 1], [-(2**31)]]})
        assert len(read(wild, stacking, "t")) == 3 and wild.statistics.out_of_range == {"f": 0}
    with pytest.raises(RooftopError, match="out_of_range: got 'ignore'"):
        Preprocessor(stacking, batch=2, out_of_range="ignore")


def test_a_preprocessor_that_cannot_be() -> None:
    stacking = one_table()
    for options, says in (
        ({"batch": 3}, "batch: got 3; accepted: a multiple of 2"),
        ({"batch": 2, "devices": 2}, "devices: got 2; accepted: a whole number from 1 to 1"),
        ({"batch": 2, "threads": 0}, "threads: got 0"),
        ({"batch": 2, "limits": {}}, "limits: got 'none for stack t'"),
        ({"batch": 2, "limits": limits() | {"u": limits()["t"]}}, "limits: got 'limits for u'"),
    ):
        with pytest.raises(RooftopError, match=says):
            Preprocessor(stacking, **options)
    with pytest.raises(RooftopError, match="without them batches can only be observed"):
        Preprocessor(stacking, batch=2).preprocess({"f": [[1], [2]]})
    for fields, says in (
        ((0, 1, 8), "limits.max_ids: got 0"),
        ((4, 5, 8), "max_unique_ids: got 5; accepted: at most max_ids, 4"),
        ((4, 4, 9), "limits.buffer: got 9; accepted: a multiple of 8"),
    ):
        with pytest.raises(RooftopError, match=says):
            StackLimits(max_ids=fields[0], max_unique_ids=fields[1], buffer=fields[2])


def test_kernels_that_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(RooftopError, match=r"numba: got 'not installed'; .* pip install 'rooftop\[embed\]'"):
        Preprocessor(one_table(), batch=2, accelerate=True)


@pytest.mark.parametrize("accelerate", KERNELS)
def test_passes_over_samples_hold_what_one_pass_holds(accelerate: bool) -> None:
    tables = Tables(
        tables=(
            EmbeddingTable(name="a", vocabulary=90, width=8),
            EmbeddingTable(name="b", vocabulary=40, width=8, combiner="sum"),
        ),
        features=(
            Feature(name="x", table="a"), Feature(name="y", table="a"), Feature(name="s", table="b", length=3),
        ),
    )  # fmt: skip
    stacking = stack_tables(tables, cores=4, cores_per_device=2, batch=40)
    (stack,) = stacking.stacks
    random = np.random.default_rng(0)
    lengths = {"x": 9, "y": 4, "s": 4}
    inputs = {
        name: [random.integers(0, 40, random.integers(0, most)) for _ in range(40)] for name, most in lengths.items()
    }
    room = {stack.name: StackLimits(max_ids=400, max_unique_ids=400, buffer=8000)}
    by_passes = {
        passes: Preprocessor(
            stacking, batch=40, limits=room, minibatching=True, sample_passes=passes, accelerate=accelerate, threads=2
        ).preprocess(inputs)
        for passes in (1, 4)
    }
    assert by_passes[4].minibatches == 4 and by_passes[1].minibatches == 1
    seen = {passes: one.statistics.stacks[stack.name] for passes, one in by_passes.items()}
    assert seen[4].ids == seen[1].ids and (seen[4].max_ids < seen[1].max_ids).all()
    # Of each pass the samples that are its part of a feature's rows of activations.
    parts = np.concatenate([np.arange(rows) * 4 // rows for rows in (10, 10, 30)])
    fullest = np.zeros((2, 4), np.int64)
    for device in range(2):
        entries: dict[int, list[tuple[int, ...]]] = {1: [], 4: []}
        for passes, one in by_passes.items():
            buffers = one.buffers[stack.name]
            ends = buffers.row_pointers[device][: 2 * passes * 8].reshape(2, passes, 8)
            begin = 0
            for source, index, core in np.ndindex(2, passes, 4):
                end = ends[source, index, core]
                samples = buffers.sample_ids[device, begin:end]
                assert passes == 1 or (parts[samples] == index).all()
                rows = buffers.embedding_ids[device, begin:end]
                gains = buffers.gains[device, begin:end]
                entries[passes] += [
                    (source, core, *entry)
                    for entry in zip(rows.tolist(), samples.tolist(), gains.tolist(), strict=True)
                ]
                if passes == 4:
                    fullest[device, core] = max(fullest[device, core], end - begin)
                begin = -(-end // 8) * 8
        assert sorted(entries[1]) == sorted(entries[4])
    assert (seen[4].max_ids == fullest).all()
    observed = Preprocessor(stacking, batch=40, minibatching=True, sample_passes=4).observe(inputs)
    assert observed.minibatches == 4 and (observed.stacks[stack.name].buffer == seen[4].buffer).all()


def test_an_id_of_every_sample_fits_in_passes_over_samples_alone() -> None:
    tables = Tables(
        tables=(EmbeddingTable(name="t", vocabulary=64, width=8),), features=(Feature(name="f", table="t"),)
    )
    stacking = stack_tables(tables, cores=2, cores_per_device=2, batch=64)
    small = {"t": StackLimits(max_ids=8, max_unique_ids=8, buffer=64)}
    inputs = {"f": np.zeros(64, np.int64)}
    with pytest.raises(RooftopError, match="32 ids"):
        Preprocessor(stacking, batch=64, limits=small, minibatching=True).preprocess(inputs)
    options = {"batch": 64, "limits": small, "minibatching": True}
    preprocessed = Preprocessor(stacking, sample_passes=4, **options).preprocess(inputs)  # type: ignore[arg-type]
    assert preprocessed.minibatches == 4 and preprocessed.statistics.stacks["t"].dropped == 0
    with pytest.raises(RooftopError, match="16 ids"):
        Preprocessor(stacking, sample_passes=2, **options).preprocess(inputs)  # type: ignore[arg-type]
