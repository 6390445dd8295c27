"""Random small embedding models with a batch each, for comparing host preprocessing with other implementations."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.embed.host.inputs import Ragged
from rooftop.embed.host.preprocess import Preprocessed, Preprocessor
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, SparseCoreConfig, TableOptimizer, Tables


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its batch and its limits, all drawn from ``seed`` and the sizes."""

    seed: int
    devices: int
    cores_per_device: int
    samples: int
    tables: int
    most_ids: int
    combiner: str
    weighted: bool
    stacked: bool
    max_ids: int
    max_unique_ids: int
    buffer: float
    dropping: bool
    minibatching: bool

    @property
    def cores(self) -> int:
        return self.devices * self.cores_per_device

    @property
    def batch(self) -> int:
        return self.cores * self.samples

    def model(self) -> Tables:
        rng = np.random.default_rng(self.seed)
        tables, features = [], []
        for index in range(self.tables):
            tables.append(
                EmbeddingTable(
                    name=f"t{index}",
                    vocabulary=int(rng.integers(1, 400)),
                    width=int(rng.integers(1, 18)),
                    combiner=self.combiner,
                    optimizer=TableOptimizer(kind="sgd"),
                )
            )
            for feature in range(int(rng.integers(1, 4))):
                features.append(Feature(name=f"f{index}{feature}", table=f"t{index}", weighted=self.weighted))
        config = SparseCoreConfig(
            disable_table_stacking=not self.stacked,
            allow_id_dropping=self.dropping,
            max_ids_per_chip_per_sample=10**6,
        )
        return Tables(tables=tuple(tables), features=tuple(features), config=config)

    def stacking(self) -> Stacking:
        return stack_tables(self.model(), cores=self.cores, cores_per_device=self.cores_per_device, batch=self.batch)

    def limits(self, stacking: Stacking) -> dict[str, StackLimits]:
        full = full_buffer(self.max_ids, self.cores) * (64 if self.minibatching else 1)
        buffer = max(8, int(full * self.buffer) // 8 * 8)
        unique = min(self.max_unique_ids, self.max_ids)
        one = StackLimits(max_ids=self.max_ids, max_unique_ids=unique, buffer=buffer)
        return {stack.name: one for stack in stacking.stacks}

    def inputs(self, tables: Tables) -> dict[str, Ragged]:
        rng = np.random.default_rng(self.seed + 1)
        inputs = {}
        for feature in tables.features:
            lengths = rng.integers(0, self.most_ids + 1, self.batch)
            splits = np.concatenate([[0], np.cumsum(lengths)])
            vocabulary = tables.table(feature.table).vocabulary
            if rng.random() < 0.5:  # many duplicates
                vocabulary = min(vocabulary, 1 + int(rng.integers(1, 12)))
            values = rng.integers(0, vocabulary, splits[-1]).astype(rng.choice([np.int32, np.int64]))
            weights = rng.uniform(0.1, 2, splits[-1]).astype(np.float32) if feature.weighted else None
            inputs[feature.name] = Ragged(values=values, row_splits=splits, weights=weights)
        return inputs

    def run(self, **options: Any) -> Preprocessed | RooftopError:
        """Preprocess the case with our code."""
        stacking = self.stacking()
        preprocessor = Preprocessor(
            stacking, batch=self.batch, limits=self.limits(stacking), minibatching=self.minibatching, **options
        )
        try:
            return preprocessor.preprocess(self.inputs(stacking.tables))
        except RooftopError as error:
            return error


@dataclass(frozen=True, kw_only=True)
class Expected:
    """A stack of another implementation: statistics, and buffers up to where each row's padding begins.

    ``pointers`` has a line per row of the buffers; ids, samples and gains are those of all rows, one after the other.
    """

    size: int
    max_ids: np.ndarray
    max_unique_ids: np.ndarray
    buffer: np.ndarray
    dropped: int
    pointers: np.ndarray
    ids: np.ndarray
    samples: np.ndarray
    gains: np.ndarray

    @property
    def ends(self) -> np.ndarray:
        """Ids of each row, padded."""
        return -(-self.pointers.max(axis=1) // 8) * 8


def check(case: Case, ours: Preprocessed, minibatches: int, expected: dict[str, Expected]) -> str:
    """Raises AssertionError where the two differ; says what was compared."""
    assert ours.minibatches == minibatches
    assert list(ours.buffers) == list(expected)
    lost = 0
    for name, other in expected.items():
        mine, seen = ours.buffers[name], ours.statistics.stacks[name]
        np.testing.assert_array_equal(seen.max_ids.reshape(-1), other.max_ids)
        np.testing.assert_array_equal(seen.max_unique_ids.reshape(-1), other.max_unique_ids)
        np.testing.assert_array_equal(seen.buffer.reshape(-1), other.buffer)
        rows, used = other.pointers.shape
        assert mine.embedding_ids.size == mine.sample_ids.size == mine.gains.size == other.size
        np.testing.assert_array_equal(mine.row_pointers.reshape(rows, -1)[:, :used], other.pointers)
        there = np.arange(other.size // rows) < other.ends[:, None]
        np.testing.assert_array_equal(mine.embedding_ids.reshape(rows, -1)[there], other.ids)
        np.testing.assert_array_equal(mine.sample_ids.reshape(rows, -1)[there], other.samples)
        np.testing.assert_allclose(mine.gains.reshape(rows, -1)[there], other.gains, rtol=3e-6)
        assert (mine.embedding_ids.reshape(rows, -1)[~there] == 2**31 - 1).all()
        assert (mine.sample_ids.reshape(rows, -1)[~there] == 2**31 - 1).all()
        assert np.isnan(mine.gains.reshape(rows, -1)[~there]).all()
        # What a full buffer cuts off, the reference counts merged and we count as it came.
        assert seen.dropped == other.dropped or (other.ends == other.size // rows).any()
        lost += seen.dropped
    return ("minibatches" if minibatches > 1 else "one pass") + (", dropped" if lost else "")


def as_expected(case: Case, ours: Preprocessed) -> dict[str, Expected]:
    """Our buffers of a case, read like those of another implementation."""
    rows = case.devices if case.minibatching else case.cores
    used = max(case.cores, 8) * (case.cores_per_device * ours.minibatches if case.minibatching else 1)
    arrays = {}
    for name, mine in ours.buffers.items():
        pointers = mine.row_pointers.reshape(rows, -1)[:, :used]
        parts = [part.reshape(rows, -1) for part in (mine.embedding_ids, mine.sample_ids, mine.gains)]
        there = np.arange(parts[0].shape[1]) < -(-pointers.max(axis=1) // 8)[:, None] * 8
        seen = ours.statistics.stacks[name]
        arrays[name] = Expected(
            size=mine.embedding_ids.size,
            max_ids=seen.max_ids.reshape(-1),
            max_unique_ids=seen.max_unique_ids.reshape(-1),
            buffer=seen.buffer.reshape(-1),
            dropped=seen.dropped,
            pointers=pointers,
            ids=parts[0][there],
            samples=parts[1][there],
            gains=parts[2][there],
        )
    return arrays


@dataclass(frozen=True, kw_only=True)
class Digest:
    """A case in a few numbers: all that is whole as one, gains as their sum along a direction and of their sizes.

    ``dropped`` is -1 where a buffer is full: what is cut off then, the reference counts merged and we as it came.
    """

    whole: int
    along: float
    sizes: float
    dropped: int

    @classmethod
    def of(cls, minibatches: int, stacks: dict[str, Expected]) -> Digest:
        digest = hashlib.sha256(str(minibatches).encode())
        along = sizes = 0.0
        dropped, full = 0, False
        for name, one in stacks.items():
            digest.update(f"{name} {one.size}".encode())
            for part in (one.max_ids, one.max_unique_ids, one.buffer, one.pointers, one.ids, one.samples):
                digest.update(np.ascontiguousarray(part, dtype="<i8").tobytes())
            there = ~np.isnan(one.gains)
            digest.update(there.tobytes())
            gains = np.asarray(one.gains, np.float64)[there]
            along += float(gains @ np.cos(np.arange(len(gains))))
            sizes += float(np.abs(gains).sum())
            dropped += int(one.dropped)
            full |= bool((one.ends == one.size // len(one.pointers)).any())
        whole = int.from_bytes(digest.digest()[:8], "little")
        return cls(whole=whole, along=along, sizes=sizes, dropped=-1 if full else dropped)


def draw(seed: int) -> Case:
    """A case for each seed: of every combiner, stacked or not, with and without overflow."""
    rng = np.random.default_rng(1_000_003 * seed + 17)

    def one_of(*choices: Any) -> Any:
        return choices[int(rng.integers(len(choices)))]

    tight = one_of(True, False)
    return Case(
        seed=seed,
        devices=one_of(1, 2, 4),
        cores_per_device=one_of(2, 4),
        samples=int(rng.integers(1, 7)),
        tables=int(rng.integers(1, 5)),
        most_ids=one_of(1, 3, 8, 30),
        combiner=one_of("sum", "mean", "sqrtn"),
        weighted=one_of(False, True),
        stacked=one_of(False, True),
        max_ids=int(rng.integers(1, 12)) if tight else 512,
        max_unique_ids=int(rng.integers(1, 12)) if tight else 512,
        buffer=one_of(1.0, 1.0, 1.0, 0.3, 0.1),
        dropping=one_of(False, True, True),
        minibatching=one_of(False, True),
    )
