"""Lookups of a batch: ids checked, samples placed on source SparseCores, and the combiner's gain of each sample."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float32, Integer

from rooftop.core.errors import RooftopError, unknown
from rooftop.embed.host.inputs import Ragged, as_ragged
from rooftop.models.embedding_tables.stacking import Stack, Stacking, StackPlace

#: Ways to treat an id outside [0, vocabulary).
POLICIES: tuple[str, ...] = ("error", "warn", "clamp", "off")
#: Invalid ids that a message names.
_NAMED = 3


@dataclass(frozen=True, kw_only=True)
class TableLayout:
    """Rows of activations of one table on a source SparseCore: ``samples`` of them, from ``first_sample`` of its stack.

    ``spans`` gives for each feature its first row of activations of the table and their number.
    """

    place: StackPlace
    samples: int
    first_sample: int
    spans: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class FeatureIds:
    """Ids of one feature. Each source has ``rows`` rows of activations of it, from ``offset`` of its table."""

    ids: Ragged
    offset: int
    rows: int

    @cached_property
    def arrays(self) -> tuple[Integer[np.ndarray, " N"], Integer[np.ndarray, " splits"]]:
        """Ids and row splits, contiguous and of 32 or 64 bits."""
        ids, splits = (
            values
            if values.itemsize >= 4 and values.dtype.isnative and values.flags.c_contiguous
            else np.ascontiguousarray(values, np.int64)
            for values in (self.ids.values, self.ids.row_splits)
        )
        return ids, splits

    @cached_property
    def addresses(self) -> tuple[int, int, int, int, int]:
        """Addresses of ``arrays`` and weights (0: none), and 32-bit words of an id and of a split."""
        ids, splits = self.arrays
        arrays = (ids, splits) if self.ids.weights is None else (ids, splits, self.ids.weights)
        addresses = [array.__array_interface__["data"][0] for array in arrays]
        return addresses[0], addresses[1], sum(addresses[2:]), ids.itemsize // 4, splits.itemsize // 4

    def splits(self, first: int, last: int) -> Integer[np.ndarray, " splits"]:
        """Row splits of sources ``first`` to ``last`` (exclusive)."""
        return self.ids.row_splits[first * self.rows : last * self.rows + 1]

    def span(self, first: int, last: int) -> tuple[int, int]:
        """Begin and end of the ids of sources ``first`` to ``last`` (exclusive)."""
        return int(self.ids.row_splits[first * self.rows]), int(self.ids.row_splits[last * self.rows])


@dataclass(frozen=True, kw_only=True)
class TableIds:
    """Ids that a batch looks up in a table, and the combiner's gains [sources, samples] (None: all are 1)."""

    layout: TableLayout
    features: tuple[FeatureIds, ...]
    gains: Float32[np.ndarray, "sources samples"] | None


@dataclass(frozen=True, kw_only=True)
class StackIds:
    """Ids that a batch looks up in a stack on ``cores`` SparseCores; ``gains`` [sources, samples of the stack] or None.

    Local rows of ``unchecked`` ids are cut to the bits that a row of their table needs.
    """

    tables: Sequence[TableIds]
    cores: int
    gains: Float32[np.ndarray, "sources samples"] | None
    unchecked: bool

    @classmethod
    def of(cls, tables: Sequence[TableIds], cores: int, *, unchecked: bool) -> StackIds:
        """Join the tables of a stack, which share one combiner."""
        gains = [table.gains for table in tables if table.gains is not None]
        joined = None if not gains else gains[0] if len(gains) == 1 else np.concatenate(gains, axis=1)
        return cls(tables=tables, cores=cores, gains=joined, unchecked=unchecked)

    @cached_property
    def layouts(self) -> list[TableLayout]:
        """Layout of each table."""
        return [table.layout for table in self.tables]

    @cached_property
    def features(self) -> list[tuple[int, FeatureIds]]:
        """Features, in the order of their rows of activations, each with the index of its table."""
        return [(index, feature) for index, table in enumerate(self.tables) for feature in table.features]

    @cached_property
    def count(self) -> int:
        """Ids, before merging."""
        return sum(len(feature.ids.values) for _, feature in self.features)

    @cached_property
    def weighted(self) -> bool:
        """True if any feature has weights."""
        return any(feature.ids.weights is not None for _, feature in self.features)


def table_layouts(stack: Stack, samples: int) -> tuple[TableLayout, ...]:
    """Layouts of a stack's tables when each source has ``samples`` samples. Activations are feature by feature."""
    layouts, first = list[TableLayout](), 0
    for place in stack.places:
        spans, offset = dict[str, tuple[int, int]](), 0
        for feature in place.features:
            spans[feature.name] = (offset, samples * feature.rows_per_sample)
            offset += samples * feature.rows_per_sample
        layouts.append(TableLayout(place=place, samples=offset, first_sample=first, spans=spans))
        first += offset
    return tuple(layouts)


def check_policy(policy: str) -> None:
    """Raise RooftopError unless ``policy`` is one of POLICIES."""
    if policy not in POLICIES:
        raise unknown("out_of_range", str(policy), POLICIES)


def check_names(inputs: Mapping[str, object], stacking: Stacking) -> None:
    """Raise RooftopError unless there are ids for every feature and for nothing else."""
    names = [feature.name for feature in stacking.tables.features]
    if inputs.keys() == set(names):
        return
    for name in inputs:
        if name not in names:
            raise unknown("feature", str(name), names)
    for name in names:
        if name not in inputs:
            raise RooftopError(f"features.{name}", "no ids", "ids for each feature")


def look_up(
    layout: TableLayout, inputs: Mapping[str, object], *, batch: int, sources: int, out_of_range: str
) -> tuple[TableIds, dict[str, int]]:
    """Ids that a batch looks up in a table, and the number of ids out of range of each feature.

    ``batch`` samples lie on ``sources`` SparseCores in order, equally many on each. Raises RooftopError.
    """
    table = layout.place.table
    features: list[FeatureIds] = []
    invalid: dict[str, int] = {}
    for feature in layout.place.features:
        ids = as_ragged(inputs[feature.name], feature)
        if ids.rows != batch * feature.rows_per_sample:
            count = f"{ids.rows // feature.rows_per_sample} samples"
            raise RooftopError(f"features.{feature.name}", count, f"{batch} samples, the batch of this host")
        ids, invalid[feature.name] = check_ids(
            ids, table.vocabulary, feature=feature.name, table=table.name, policy=out_of_range
        )
        offset, rows = layout.spans[feature.name]
        features.append(FeatureIds(ids=ids, offset=offset, rows=rows))
    gains = None
    if table.combiner != "sum":
        parts = [sample_gains(member.ids, table.combiner).reshape(sources, member.rows) for member in features]
        gains = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
    return TableIds(layout=layout, features=tuple(features), gains=gains), invalid


def check_ids(ids: Ragged, vocabulary: int, *, feature: str, table: str, policy: str) -> tuple[Ragged, int]:
    """Ids within a table of ``vocabulary`` rows, and the number of ids that were not.

    ``error`` raises RooftopError for invalid ids, ``warn`` drops them with a warning, ``clamp`` takes the nearest row.
    ``off`` does not check: an invalid id then reads another row of its stack.
    """
    if policy == "off" or not ids.values.size or _within(ids, vocabulary):
        return ids, 0
    bad = (ids.values < 0) | (ids.values >= vocabulary)
    at = np.flatnonzero(bad)
    samples = np.searchsorted(ids.row_splits, at[:_NAMED], side="right") - 1
    named = ", ".join(
        f"{value} in row {sample}"
        for value, sample in zip(ids.values[at[:_NAMED]].tolist(), samples.tolist(), strict=True)
    )
    value = f"{len(at)} ids out of range, first {named}"
    accepted = f"ids from 0 to {vocabulary - 1}, the rows of table {table}"
    if policy == "error":
        raise RooftopError(f"features.{feature}", value, accepted)
    if policy == "clamp":
        clamped = np.clip(ids.values, 0, vocabulary - 1)
        return Ragged(values=clamped, row_splits=ids.row_splits, weights=ids.weights), len(at)
    warnings.warn(f"features.{feature}: {value}; left out: {accepted}", stacklevel=2)
    good = ~bad
    before = np.concatenate([[0], np.cumsum(good, dtype=np.int64)])
    weights = None if ids.weights is None else ids.weights[good]
    return Ragged(values=ids.values[good], row_splits=before[ids.row_splits], weights=weights), len(at)


def _within(ids: Ragged, vocabulary: int) -> bool:
    """True if all ids are rows. One pass: as an unsigned number a negative id is larger than any row."""
    values = ids.values
    if values.dtype.kind == "i":
        values = values.view(f"u{values.dtype.itemsize}")
    return bool(np.maximum.reduce(values) < vocabulary)


def sample_gains(ids: Ragged, combiner: str) -> Float32[np.ndarray, " B"]:
    """1 / sum(w) (mean) or 1 / sqrt(sum(w^2)) (sqrtn) of each sample's weights w; 0 where that is not finite.

    A sample without ids has no gain to apply; one whose weights sum to zero gets zeros, as if it had no ids.
    """
    lengths = np.diff(ids.row_splits)
    if ids.weights is None:
        sums = lengths if combiner == "mean" else np.sqrt(lengths)
        return np.divide(1, sums, out=np.zeros(len(sums), np.float32), where=lengths > 0, casting="same_kind")
    terms = ids.weights.astype(np.float64)
    if combiner == "sqrtn":
        terms *= terms
    filled = np.flatnonzero(lengths)
    sums = np.zeros(len(lengths))
    if len(filled):
        sums[filled] = np.add.reduceat(terms, ids.row_splits[:-1][filled])
    if combiner == "sqrtn":
        sums = np.sqrt(sums)
    gains = np.divide(1, sums, out=np.zeros(len(sums)), where=sums != 0)
    return np.where(np.abs(gains) < 1 / np.finfo(np.float32).tiny, gains, 0).astype(np.float32)
