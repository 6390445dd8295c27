"""NumPy reference of host preprocessing: ids of stacked tables become sorted, merged ids, and these become buffers.

A source is a SparseCore that holds samples; a destination is one that holds rows. Each id becomes a sort key with the
fields, from the highest bits down,

    source | destination | table of the stack | local row of the table | row of activations of the table

Sorted keys are in the order in which SparseCores read them, and duplicates of a sample are neighbours. The numba kernel
(``kernel``) has the same keys and gives the same buffers, bit for bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Int32, Int64, UInt

from rooftop.core.errors import RooftopError
from rooftop.embed.host.buffers import NO_GAIN, NO_ID, Buffers, padded
from rooftop.embed.host.lookups import StackIds, TableLayout
from rooftop.models.embedding_tables.stacking import ALIGNMENT

Keys = UInt[np.ndarray, " N"]

#: Bits of a key: 32 where one source fits (they sort faster), otherwise at most 63, so that shifts have no sign.
_NARROW, _WIDE = 32, 63


def bits(count: int) -> int:
    """Bits that distinguish ``count`` values."""
    return (count - 1).bit_length()


class KeyFields(NamedTuple):
    """First bit of each field of a key (samples begin at bit 0), and the bits of all together.

    ``sources`` sources of ``cores`` SparseCores are sorted at once.
    """

    row: int
    table: int
    core: int
    source: int
    bits: int
    cores: int
    sources: int

    @classmethod
    def of(cls, stacks: Sequence[Sequence[TableLayout]], cores: int, sources: int) -> KeyFields:
        """Fields for the tables of any of ``stacks`` and at most ``sources`` sources; fewer, so that keys are narrow.

        Raises RooftopError if one source does not fit into a key.
        """
        layouts = [layout for stack in stacks for layout in stack]
        samples = max(layout.samples for layout in layouts)
        row = bits(samples)
        table = row + bits(max(layout.place.rows for layout in layouts))
        core = table + bits(max(len(stack) for stack in stacks))
        source = core + bits(cores)
        most = _NARROW if source <= _NARROW else _WIDE
        if source > most:
            names = ", ".join(layout.place.table.name for layout in layouts)
            raise RooftopError("batch", f"{samples} lookups of a SparseCore", f"fewer: those in tables {names}")
        sources = min(sources, 1 << (most - source))
        return cls(row, table, core, source, source + bits(sources), cores, sources)


def key_dtype(fields: KeyFields) -> type[np.unsignedinteger]:
    """The narrower dtype that holds keys."""
    return np.uint32 if fields.bits <= _NARROW else np.uint64


@dataclass(frozen=True, kw_only=True)
class SortedIds:
    """Ids of one stack for some sources, sorted by source, destination, table, row and sample; duplicates merged.

    Dims: N merged ids, T tables, G sources, C destinations. keys [N]; counts [N], ids merged into one; weights [N], the
    sums of their weights, or None if all are 1; combiner [G, samples of the stack], gains of samples, or None if all
    are 1; sizes [T, G, C] merged ids; uniques [T, G, C] different rows.
    """

    layouts: Sequence[TableLayout]
    fields: KeyFields
    keys: Keys
    counts: Int32[np.ndarray, " N"]
    weights: Float32[np.ndarray, " N"] | None
    combiner: Float32[np.ndarray, "G samples"] | None
    sizes: Int64[np.ndarray, "T G C"]
    uniques: Int64[np.ndarray, "T G C"]


@dataclass(frozen=True, kw_only=True)
class SortedPart:
    """Sorted ids of several stacks, and the sizes and uniques [T, G, C] of all their tables together."""

    stacks: Sequence[SortedIds]
    sizes: Int64[np.ndarray, "T G C"]
    uniques: Int64[np.ndarray, "T G C"]


@dataclass(frozen=True, kw_only=True)
class Entries:
    """Ids in the order of the buffers.

    Dims [N] each: ``groups`` source and pass, source-major (in one pass: the source); ``cores`` the destination;
    ``tables`` the table's index in its stack; local ``rows``; ``samples``, rows of activations of the source;
    ``gains``; ``counts``, ids merged into one.
    """

    groups: Int64[np.ndarray, " N"]
    cores: Int64[np.ndarray, " N"]
    tables: Int64[np.ndarray, " N"]
    rows: Int32[np.ndarray, " N"]
    samples: Int32[np.ndarray, " N"]
    gains: Float32[np.ndarray, " N"]
    counts: Int32[np.ndarray, " N"]

    @cached_property
    def fresh(self) -> Bool[np.ndarray, " N"]:
        """True for the first id of a row in its partition."""
        fresh = np.ones(len(self.rows), np.bool_)
        fresh[1:] = False
        for field in (self.groups, self.cores, self.rows):
            fresh[1:] |= field[1:] != field[:-1]
        return fresh

    def taken(self, chosen: Bool[np.ndarray, " N"] | Int64[np.ndarray, " taken"]) -> Entries:
        """Entries picked by a mask or by indices. They must still be in the order of the buffers."""
        return Entries(**{field.name: getattr(self, field.name)[chosen] for field in dataclasses.fields(self)})

    def partitions(self, cores: int) -> Int64[np.ndarray, " N"]:
        """Index of each id's partition in [groups, C], flat; it never falls."""
        return self.groups * cores + self.cores

    def sizes(self, groups: int, cores: int) -> Int64[np.ndarray, "{groups} {cores}"]:
        """Ids of each partition: [groups, C]."""
        return np.bincount(self.partitions(cores), minlength=groups * cores).reshape(groups, cores)

    def uniques(self, groups: int, cores: int) -> Int64[np.ndarray, "{groups} {cores}"]:
        """Different rows of each partition: [groups, C]."""
        return np.bincount(self.partitions(cores)[self.fresh], minlength=groups * cores).reshape(groups, cores)


def rank(groups: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, " N"]:
    """Index of each element in its group; members of a group are neighbours."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)


class Reference:
    """Sort ids and write them with NumPy."""

    def sort(self, stacks: Sequence[StackIds], first: int, last: int) -> SortedPart:
        """Sort and merge the ids that sources ``first`` to ``last`` (exclusive) look up in each stack."""
        ids = [_sort_stack(stack, first, last) for stack in stacks]
        sizes, uniques = (np.concatenate(of) for of in ([part.sizes for part in ids], [part.uniques for part in ids]))
        return SortedPart(stacks=ids, sizes=sizes, uniques=uniques)

    def write(self, ids: SortedIds, buffers: Buffers, first: int, per_row: int) -> None:
        """Write ids, whose first source is ``first``, where ``per_row`` sources share a row of the buffers."""
        write_entries(entries_of(ids), buffers, first, ids.sizes.shape[1], per_row, ids.fields.cores)


def _sort_stack(stack: StackIds, first: int, last: int) -> SortedIds:
    fields = KeyFields.of([stack.layouts], stack.cores, last - first)
    starts = range(first, last, fields.sources)
    parts = [_sort_sources(stack, fields, start, min(start + fields.sources, last)) for start in starts]
    return SortedIds(
        layouts=stack.layouts,
        fields=fields,
        keys=np.concatenate([part.keys for part in parts]),
        counts=np.concatenate([part.counts for part in parts]),
        weights=np.concatenate([part.weights for part in parts]) if stack.weighted else None,
        combiner=None if stack.gains is None else stack.gains[first:last],
        sizes=np.concatenate([part.sizes for part in parts], axis=1),
        uniques=np.concatenate([part.uniques for part in parts], axis=1),
    )


class _SortedSources(NamedTuple):
    """Fields of ``SortedIds`` for sources that are sorted at once."""

    keys: Keys
    counts: Int32[np.ndarray, " N"]
    weights: Float32[np.ndarray, " weighted"]
    sizes: Int64[np.ndarray, "T G C"]
    uniques: Int64[np.ndarray, "T G C"]


def _sort_sources(stack: StackIds, fields: KeyFields, first: int, last: int) -> _SortedSources:
    keys, weights = _keys(stack, fields, first, last)
    if stack.weighted:
        order = np.argsort(keys, kind="stable")
        keys, weights = keys[order], weights[order]
    else:
        keys.sort()
    begins = np.flatnonzero(_differs(keys))
    counts = np.diff(begins, append=len(keys)).astype(np.int32)
    if len(weights):
        weights = np.add.reduceat(weights, begins)
    keys = keys[begins]

    # Each source, destination and table has a run of keys; the bits of a run's number may have room to spare.
    runs = (keys >> keys.dtype.type(fields.table)).astype(np.int64)
    fresh = _differs(keys >> keys.dtype.type(fields.row))
    shape = (last - first, 1 << (fields.source - fields.core), 1 << (fields.core - fields.table))

    def by_table(of_runs: Int64[np.ndarray, " N"]) -> Int64[np.ndarray, "T G C"]:
        counted = np.bincount(of_runs, minlength=shape[0] * shape[1] * shape[2]).reshape(shape)
        return counted[:, : fields.cores, : len(stack.tables)].transpose(2, 0, 1)

    return _SortedSources(keys, counts, weights, by_table(runs), by_table(runs[fresh]))


def _differs(values: Keys) -> Bool[np.ndarray, " N"]:
    """True for each element that differs from the one before, and for the first."""
    differs = np.ones(len(values), np.bool_)
    np.not_equal(values[1:], values[:-1], out=differs[1:])
    return differs


def _keys(stack: StackIds, fields: KeyFields, first: int, last: int) -> tuple[Keys, Float32[np.ndarray, " weighted"]]:
    """Keys in the order of the input, and weights (none if no feature has them)."""
    key = key_dtype(fields)
    keys, weights = list[Keys](), list[np.ndarray]()
    for table, feature in stack.features:
        place = stack.tables[table].layout.place
        splits, span = feature.splits(first, last), slice(*feature.span(first, last))
        # Unchecked ids of any value become some row: their lowest 32 bits count.
        ids = feature.ids.values[span].astype(np.uint32)
        cores = (ids % np.uint32(fields.cores) + np.uint32(place.rotation)) % np.uint32(fields.cores)
        rows = ids // np.uint32(fields.cores)
        if stack.unchecked:
            rows &= np.uint32((1 << bits(place.rows)) - 1)
        # The fields that all ids of a row of the input share.
        sources = np.arange(last - first, dtype=key) << key(fields.source)
        samples = np.arange(feature.offset, feature.offset + feature.rows, dtype=key)
        heads = (sources[:, None] + (samples + key(table << fields.table))).reshape(-1)
        feature_keys = heads.repeat(np.diff(splits))
        feature_keys += cores.astype(key) << key(fields.core)
        feature_keys += rows.astype(key) << key(fields.row)
        keys.append(feature_keys)
        if stack.weighted:
            own_weights = feature.ids.weights
            weights.append(np.ones(len(ids), np.float32) if own_weights is None else own_weights[span])
    return np.concatenate(keys), np.concatenate(weights or [np.empty(0, np.float32)])


def entries_of(ids: SortedIds) -> Entries:
    """Decode sorted ids; ``combiner`` gains are applied."""
    tables, sources, cores = ids.sizes.shape
    runs = ids.sizes.transpose(1, 2, 0).reshape(-1)
    groups, destinations, table = np.unravel_index(np.arange(runs.size).repeat(runs), (sources, cores, tables))
    fields, key = ids.fields, ids.keys.dtype.type
    row_offsets = np.array([layout.place.offset for layout in ids.layouts])
    first_samples = np.array([layout.first_sample for layout in ids.layouts])
    rows = (ids.keys >> key(fields.row)) & key((1 << (fields.table - fields.row)) - 1)
    samples = (ids.keys & key((1 << fields.row) - 1)).astype(np.int64) + first_samples[table]
    gains = ids.counts.astype(np.float32) if ids.weights is None else ids.weights
    if ids.combiner is not None:
        gains = gains * ids.combiner[groups, samples]
    return Entries(
        groups=groups,
        cores=destinations,
        tables=table,
        rows=(rows.astype(np.int64) + row_offsets[table]).astype(np.int32),
        samples=samples.astype(np.int32),
        gains=gains,
        # The numba kernel's arrays are written again by the next sort.
        counts=ids.counts.copy(),
    )


def write_entries(entries: Entries, buffers: Buffers, first_group: int, groups: int, per_row: int, cores: int) -> None:
    """Write ids of ``groups`` groups, the first of which is ``first_group``, with padding and row pointers.

    ``per_row`` groups share a row of the buffers. Every row must have room.
    """
    rows = buffers.rows(first_group // per_row, (first_group + groups) // per_row)
    sizes = entries.sizes(groups, cores)
    whole = padded(sizes)
    ends = np.cumsum(whole.reshape(len(rows.filled), -1), axis=1)
    starts = ends.reshape(groups, cores) - whole
    partitions = entries.partitions(cores)
    columns = starts.reshape(-1)[partitions] + rank(partitions)
    width = max(int(rows.filled.max(initial=0)), int(ends[:, -1].max(initial=0)))
    for array, values, padding in (
        (rows.embedding_ids, entries.rows, NO_ID),
        (rows.sample_ids, entries.samples, NO_ID),
        (rows.gains, entries.gains, NO_GAIN),
    ):
        array[:, :width] = padding
        array[entries.groups // per_row, columns] = values
    rows.filled[:] = ends[:, -1]

    # A group has at least ALIGNMENT pointers; those that belong to no partition point to where the padding ends.
    pointers = np.empty((groups, max(cores, ALIGNMENT)), np.int32)
    pointers[:, :cores] = starts + sizes
    pointers[:, cores:] = ends.reshape(groups, cores)[:, -1:]
    used = per_row * pointers.shape[1]
    rows.row_pointers[:, :used] = pointers.reshape(len(rows.filled), used)
    rows.row_pointers[:, used:] = ends[:, -1:]
