"""A stack's tables in one sort, where one source's keys of all of them fit into 32 bits and no id has a weight.

Table after table (``keys.merge``), each call works on the ids of one table alone: in a batch of few samples they are
so few that the calls cost more than the work. Here a key also says which table an id is of:

    source within the sort | destination | table | local row | row of activations of the source and table

so that sorted keys have the buffer's order, and only one array is gathered. Padding is sorted along: every partition
gets ids of one more table, behind all others, and those that it does not need are left out with the duplicates.
A table's rotation turns ids before they are divided into destination and row: rows at destinations that the rotation
wraps around to are one too high then, all of them alike, and put right when they are written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import NO_GAIN, NO_ID, Buffers, Space, padding
from rooftop.embed.keys import bits, flags, gaps, set_up_to
from rooftop.embed.lookups import TableBatch
from rooftop.models.tables_stacking import ALIGNMENT

#: Ids of padding that each partition has in the sort: as many as it can need.
_PADS = ALIGNMENT - 1
#: Keys are no wider.
_KEY_BITS = 32


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """Where the fields of a key begin, how many destinations and tables there are, and the sources of one sort."""

    row: int
    table: int
    core: int
    source: int
    cores: int
    tables: int
    at_once: int

    @classmethod
    def of(cls, tables: Sequence[TableBatch], sources: int) -> _Fields | None:
        """None if keys of 32 bits cannot tell the ids of one source apart."""
        layouts = [one.table.layout for one in tables]
        row = max(bits(ALIGNMENT), *(layout.sample_bits for layout in layouts))
        # One more row: see the module's rotation.
        table = row + max(bits(layout.place.rows + 1) for layout in layouts)
        core = table + bits(len(tables) + 1)
        source = core + bits(layouts[0].cores)
        # Every sort has as many.
        most = (1 << _KEY_BITS) >> source
        at_once = max((count for count in range(1, sources + 1) if not sources % count and count <= most), default=0)
        # Between two sorts the destination or the source has to change: that is how runs are told apart.
        if not at_once or (at_once == 1 and layouts[0].cores == 1):
            return None
        return cls(
            row=row, table=table, core=core, source=source, cores=layouts[0].cores, tables=len(tables), at_once=at_once
        )


@dataclass(frozen=True, kw_only=True)
class SortedStack:
    """Sorted keys of a stack, with duplicates and padding; see ``kernels.Found``.

    Dims: keys [N]; kept [N, up to a multiple of 8], whether an id is the last of its key; R runs of a partition and
    table, padding behind a partition's tables: lasts [R], their last places among the keys, and in_table [R].
    """

    tables: Sequence[TableBatch]
    fields: _Fields
    first: int
    last: int
    keys: NDArray[np.uint32]
    kept: NDArray[np.bool_]
    lasts: NDArray[np.int64]
    in_table: NDArray[np.intp]
    sizes: NDArray[np.int64]
    uniques: NDArray[np.int64]
    table_uniques: NDArray[np.int64]


def sort_stack(tables: Sequence[TableBatch], first: int, last: int, space: Space) -> SortedStack | None:
    """The ids, all in range, that sources ``first`` to ``last`` look up; None where that takes ``keys.merge``.

    One table alone, ids with weights, keys that do not fit and no ids at all take that. The keys are in ``space``.
    """
    fields = _Fields.of(tables, last - first) if len(tables) > 1 else None
    if fields is None or any(feature.ids.weights is not None for one in tables for feature in one.features):
        return None
    keys = _keys(tables, fields, first, last, space)
    if len(keys) == _PADS * (last - first) * fields.cores:
        return None
    differs = keys[1:] ^ keys[:-1]
    kept, ends_row = flags(len(keys)), flags(len(keys))
    np.not_equal(differs, 0, out=kept[: len(differs)])
    np.greater(differs, np.uint32((1 << fields.row) - 1), out=ends_row[: len(differs)])
    kept[len(differs)] = ends_row[len(differs)] = True
    behind = (differs > np.uint32((1 << fields.table) - 1)).nonzero()[0]
    lasts = np.empty(len(behind) + 1, np.int64)
    lasts[:-1], lasts[-1] = behind, len(keys) - 1
    in_table = (keys.take(lasts) >> np.uint32(fields.table)).astype(np.intp) & ((1 << bits(fields.tables + 1)) - 1)
    is_padding = in_table == fields.tables
    # Every partition ends with padding: that counts them.
    runs = (np.cumsum(is_padding) - is_padding) * (fields.tables + 1) + in_table
    shape = (last - first, fields.cores, fields.tables + 1)
    sizes, uniques = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for counts, ends in ((sizes, kept), (uniques, ends_row)):
        counts.reshape(-1)[runs] = gaps(set_up_to(ends, lasts) - 1)
    of_tables = uniques[:, :, :-1]
    return SortedStack(
        tables=tables,
        fields=fields,
        first=first,
        last=last,
        keys=keys,
        kept=kept,
        lasts=lasts,
        in_table=in_table,
        sizes=sizes[:, :, :-1].transpose(2, 0, 1),
        uniques=of_tables.sum(axis=2),
        table_uniques=of_tables.sum(axis=1).T,
    )


def _keys(tables: Sequence[TableBatch], fields: _Fields, first: int, last: int, space: Space) -> NDArray[np.uint32]:
    """Keys, sorted ``at_once`` sources at a time."""
    step, sorts = fields.at_once, (last - first) // fields.at_once
    features = [(index, one.table.layout.place, own) for index, one in enumerate(tables) for own in one.features]
    sources = np.arange(0, step << fields.source, 1 << fields.source, dtype=np.uint32)[:, None]
    parts, heads, lengths = [], [], []
    total = sum(
        int(own.ids.row_splits[last * own.rows] - own.ids.row_splits[first * own.rows]) for _, _, own in features
    )
    turned, at = space.take("turned", 2 * total, np.uint32).reshape(2, -1), 0
    for index, place, own in features:
        splits = own.ids.row_splits[first * own.rows : last * own.rows + 1]
        values = own.ids.values[splits[0] : splits[-1]]
        values = values if values.dtype.itemsize >= 4 else values.astype(np.uint32)
        # Ids of 64 bits are turned as they are, and cut off then.
        values = values.view(np.uint32) if values.dtype.itemsize == 4 else values
        ids = turned[0, at : at + len(values)]
        np.add(values, place.rotation, out=ids, casting="unsafe")
        bounds = (splits[:: step * own.rows] - splits[0]).tolist()
        parts.append([ids[begin:end] for begin, end in pairwise(bounds)])
        head = np.arange(own.offset, own.offset + own.rows, dtype=np.uint32) + np.uint32(index << fields.table)
        heads.append((sources | head).reshape(-1))
        lengths.append((splits[1:] - splits[:-1]).reshape(sorts, -1))
        at += len(values)
    head, length = np.concatenate(heads), np.concatenate(lengths, axis=1)
    corners = (sources + (np.arange(fields.cores, dtype=np.uint32) << np.uint32(fields.core))).reshape(-1, 1)
    pads = (corners + np.uint32(fields.tables << fields.table) + np.arange(_PADS, dtype=np.uint32)).reshape(-1)
    keys = space.take("sorted", total + len(pads) * sorts, np.uint32)
    begin = 0
    for sort in range(sorts):
        count = int(length[sort].sum())
        own_keys, ids = keys[begin : begin + count + len(pads)], turned[1, :count]
        np.concatenate([part[sort] for part in parts], out=ids)
        _divide(ids, fields, own_keys[:count])
        own_keys[:count] += head.repeat(length[sort])
        own_keys[count:] = pads
        own_keys.sort()
        begin += len(own_keys)
    return keys


def _divide(ids: NDArray[np.uint32], fields: _Fields, out: NDArray[np.uint32]) -> None:
    """The fields of destination and row. The ids are written over."""
    cores, core_bits = np.uint32(fields.cores), np.uint32(bits(fields.cores))
    if fields.cores & (fields.cores - 1) == 0:
        np.right_shift(ids, core_bits, out=out)
        ids &= cores - np.uint32(1)
    else:
        np.floor_divide(ids, cores, out=out)
        ids -= out * cores
    out <<= np.uint32(fields.row)
    ids <<= np.uint32(fields.core)
    out |= ids


def emit_stack(found: SortedStack, buffers: Buffers, first: int, per_row: int) -> None:
    """Write a sorted stack whose first source is ``first``; see ``emit.emit``. ``kept`` is used up."""
    fields, kept, places = found.fields, found.kept, [one.table.layout.place for one in found.tables]
    sizes = found.sizes.sum(axis=0).reshape(-1)
    pads = padding(sizes)
    ends_padding = (found.in_table == fields.tables).nonzero()[0]
    pad_lasts, each = found.lasts[ends_padding], np.arange(_PADS)
    kept[(pad_lasts[:, None] - each)[each < _PADS - pads[:, None]]] = False
    ends = kept.nonzero()[0]
    keys = found.keys.take(ends)

    # Duplicates of an id lie before it, and before a partition's first the padding that was left out.
    gains = gaps(ends).astype(np.float32)
    starts = np.cumsum(sizes + pads) - (sizes + pads)
    filled = sizes.nonzero()[0]
    before = np.concatenate([[-1], pad_lasts[:-1]])
    gains[starts[filled]] = ends[starts[filled]] - before[filled]

    partition = np.repeat(np.arange(len(ends_padding)), np.diff(ends_padding, prepend=-1))
    runs = found.sizes.transpose(1, 2, 0).reshape(len(sizes), -1)
    runs = np.concatenate([runs, pads[:, None]], axis=1)[partition, found.in_table]
    rotations, offsets, samples_before = (
        np.array([*of, 0])
        for of in (
            [place.rotation for place in places],
            [place.offset for place in places],
            [one.table.first_sample for one in found.tables],
        )
    )
    wrapped = partition % fields.cores < rotations[found.in_table]
    # What every run adds to its rows and samples, side by side: repeating keeps other threads from the interpreter.
    added = np.empty((len(partition), 2), np.uint32)
    added[:, 0], added[:, 1] = (offsets[found.in_table] - wrapped), samples_before[found.in_table]
    every = added.view(np.uint64).reshape(-1).repeat(runs).view(np.uint32).reshape(-1, 2)
    ids = (keys >> np.uint32(fields.row)) & np.uint32((1 << (fields.table - fields.row)) - 1)
    ids += every[:, 0]
    keys &= np.uint32((1 << fields.row) - 1)
    keys += every[:, 1]
    rows_ids, rows_samples = ids.view(np.int32), keys.view(np.int32)
    of_sources = np.cumsum((sizes + pads).reshape(-1, fields.cores).sum(axis=1)).tolist()
    scale = _scale(found.tables, found.first, found.last)
    if scale is not None:
        for own, begin, end in zip(scale, [0, *of_sources], of_sources, strict=False):
            gains[begin:end] *= own.take(rows_samples[begin:end], mode="clip")

    where = (starts + sizes)[:, None] + each
    empty = where[each < pads[:, None]]
    rows_ids[empty] = rows_samples[empty] = NO_ID
    gains[empty] = NO_GAIN
    begin = 0
    for row, end in enumerate(of_sources[per_row - 1 :: per_row], first // per_row):
        buffers.write(row, rows_ids[None, begin:end], rows_samples[None, begin:end], gains[None, begin:end])
        begin = end


def _scale(tables: Sequence[TableBatch], first: int, last: int) -> NDArray[np.float32] | None:
    """The gains of the samples of all tables side by side, [sources, rows of activations]; None where all are 1."""
    if all(one.gains is None for one in tables):
        return None
    shapes = [(last - first, one.table.layout.samples) for one in tables]
    parts = [
        np.ones(shape, np.float32) if one.gains is None else one.gains[first:last]
        for one, shape in zip(tables, shapes, strict=True)
    ]
    return np.concatenate(parts, axis=1)
