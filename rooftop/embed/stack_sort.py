"""Stacks in one sort, where keys of one source fit into 32 bits and no id has a weight (``fields``).

Table after table (``keys.merge``), each call works on the ids of one table alone: in a batch of few samples they are
so few that the calls cost more than the work, and threads wait for each other at every call. Here the tables of a
stack, or of several stacks, share each call. What is as long as the ids lies in arrays that are written over and
over: fresh ones cost more in page faults than in what is written to them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import Space
from rooftop.embed.fields import Fields
from rooftop.embed.keys import bits, gaps, set_up_to
from rooftop.embed.lookups import TableBatch
from rooftop.models.tables_stacking import ALIGNMENT

#: Keys are no wider.
_KEY_BITS = 32
#: Ids whose arrays stay in a core's caches, and are enough for each call to be worth its while.
_TOGETHER = 400_000
#: Ids of a table that are enough where each has calls of its own.
_WORTH_A_TABLE = 30_000
#: Ids of a partition, on average, from which on its padding is sorted along, and ids of padding that it can need.
_PADDED = 64
PADS = ALIGNMENT - 1
_WORDS = (np.dtype(np.int32), np.dtype(np.uint32))


@dataclass(frozen=True, kw_only=True)
class SortedStacks:
    """Sorted keys of stacks, with duplicates; see ``kernels.Found``.

    Dims: keys [N]; kept [N, up to a multiple of 8], whether an id is the last of its key; R runs of a stack, source,
    destination and table in the order of the keys: runs [R], their merged ids, lasts [R], their last keys, and
    in_table [R], the table of all stacks'. keys and kept are of the thread's space. ``padded``, the last run of every
    partition ends with PADS ids of padding.
    """

    stacks: Sequence[StackIds]
    fields: Fields
    first: int
    last: int
    keys: NDArray[np.uint32]
    kept: NDArray[np.bool_]
    padded: bool
    runs: NDArray[np.int64]
    lasts: NDArray[np.int64]
    in_table: NDArray[np.int64]
    sizes: NDArray[np.int64]
    uniques: NDArray[np.int64]
    table_uniques: NDArray[np.int64]


class _Part(NamedTuple):
    """A feature's ids of some sources: those of the g-th lie from bounds[g] on.

    lengths [sources x rows] are ids of its samples.
    """

    values: NDArray[Any]
    bounds: list[int]
    lengths: NDArray[np.int64]
    rows: int
    table: int
    offset: int
    rotation: int


@dataclass(frozen=True, kw_only=True)
class StackIds:
    """A stack's tables; see ``kernels.Prepared``. In all it has so many ``sources`` and ``cores``.

    ``by_table``, it takes ``keys.merge``: ids have weights or may be out of range (``masked``), or keys do not fit.
    """

    tables: Sequence[TableBatch]
    sources: int
    cores: int
    ids: int
    at_once: int
    most_sources: int
    masked: bool
    by_table: bool


def prepare(tables: Sequence[TableBatch], masked: bool) -> StackIds:
    """What is done once for a stack of a batch, while other threads wait for it."""
    features = [own for one in tables for own in one.features]
    weighted = any(own.ids.weights is not None for own in features)
    by_table = masked or weighted or Fields.of([tables], 1, _KEY_BITS) is None
    sources = features[0].ids.rows // features[0].rows
    return StackIds(
        tables=tables,
        sources=sources,
        cores=tables[0].table.layout.cores,
        ids=sum(len(own.ids.values) for own in features),
        at_once=max(_TOGETHER, _WORTH_A_TABLE * len(tables)) if by_table and len(tables) > 1 else _TOGETHER,
        most_sources=min(one.table.layout.most_sources() for one in tables) if by_table else sources,
        masked=masked,
        by_table=by_table,
    )


def _parts(stack: StackIds, first: int, last: int) -> list[_Part]:
    """The features' ids of sources ``first`` to ``last``."""
    found = []
    for index, one in enumerate(stack.tables):
        for own in one.features:
            splits, values = own.ids.row_splits[first * own.rows : last * own.rows + 1], own.ids.values
            found.append(
                _Part(
                    # Others become so when they are put side by side.
                    values=values.view(np.uint32) if values.dtype in _WORDS else values,
                    bounds=splits[:: own.rows].tolist(),
                    lengths=np.subtract(splits[1:], splits[:-1], dtype=np.int64),
                    rows=own.rows,
                    table=index,
                    offset=own.offset,
                    rotation=one.table.layout.place.rotation,
                )
            )
    return found


def sort_stacks(stacks: Sequence[StackIds], first: int, last: int, space: Space) -> SortedStacks | None:
    """The ids that sources ``first`` to ``last`` look up in stacks of equally many tables.

    None where that takes ``keys.merge``: see ``StackIds``; and where there are no ids at all.
    """
    sources, tables = last - first, len(stacks[0].tables)
    # Padding is sorted along where it is little beside the ids: else a place has to be found for every id.
    padded = sum(stack.ids for stack in stacks) >= _PADDED * len(stacks) * stacks[0].sources * stacks[0].cores
    of_stacks = [stack.tables for stack in stacks]
    fields = Fields.of(of_stacks, sources, _KEY_BITS, dividing=True, padded=padded)
    if fields is None or any(stack.by_table for stack in stacks):
        return None
    keys, ends = _keys(stacks, fields, first, last, space, padded=padded)
    count = len(keys)
    if count == (PADS * fields.cores * sources * len(stacks) if padded else 0):
        return None
    for begin, end in pairwise((0, *ends)):
        keys[begin:end].sort()

    # The highest bit in which a key differs from the one before says what begins with it. With a sort all does.
    differs = space.take("differs", count - 1, np.uint32)
    np.bitwise_xor(keys[1:], keys[:-1], out=differs)
    differs[[end - 1 for end in ends if 0 < end < count]] = -1 & 0xFFFFFFFF
    flags = space.flags("flags", 3, count)
    for own, low in zip(flags, (0, fields.row, fields.table), strict=True):
        np.greater(differs, np.uint32((1 << low) - 1), out=own[: count - 1])
    flags[:, count - 1] = True
    lasts = flags[2].nonzero()[0]
    run = (keys.take(lasts) >> np.uint32(fields.table)).astype(np.int64)
    shape = tuple(
        1 << (end - begin)
        for begin, end in pairwise((fields.table, fields.core, fields.source, fields.stack, fields.used))
    )
    if len(ends) > 1:
        of_sort = np.diff(np.searchsorted(lasts, ends), prepend=0)
        run += (np.arange(len(ends)) * math.prod(shape)).repeat(of_sort)

    def by_table(of_runs: NDArray[np.int64]) -> NDArray[np.int64]:
        """[K, T, G, C] of what has room to spare in all dims."""
        found = of_runs.reshape(-1, *shape[::-1])[:, : fields.stacks, : fields.sources, : fields.cores, :tables]
        return found.reshape(-1, sources, fields.cores, tables)[: len(stacks)].transpose(0, 3, 1, 2)

    runs, rows_in_runs = gaps(set_up_to(flags[:2], lasts) - 1)
    ids_of, rows_of = np.zeros((2, len(ends) * math.prod(shape)), np.int64)
    ids_of[run], rows_of[run] = runs, rows_in_runs
    in_table = run & (shape[0] - 1)
    if len(stacks) > 1:
        in_table += run // math.prod(shape[:3]) // (sources // fields.sources) * tables
    sizes, rows = by_table(ids_of), by_table(rows_of)
    if padded:
        sizes[:, -1] -= PADS
        rows[:, -1] -= 1
    return SortedStacks(
        stacks=stacks,
        fields=fields,
        first=first,
        last=last,
        keys=keys,
        kept=flags[0],
        padded=padded,
        runs=runs,
        lasts=lasts,
        in_table=in_table,
        sizes=sizes,
        uniques=rows[:, 0] if tables == 1 else rows.sum(axis=1),
        table_uniques=rows.sum(axis=3),
    )


def _keys(
    stacks: Sequence[StackIds], fields: Fields, first: int, last: int, space: Space, *, padded: bool
) -> tuple[NDArray[np.uint32], list[int]]:
    """Keys, sort after sort, to be sorted up to each of the ends."""
    step, count = fields.sources, 0
    parts: list[NDArray[Any]] = []
    lengths: list[NDArray[np.int64]] = []
    begins: list[NDArray[np.int64]] = []
    rows: list[NDArray[np.int64]] = []
    turns: list[int] = []
    ends: list[int] = []
    of_source = np.arange(0, step << fields.source, 1 << fields.source)
    sorts = (last - first) // step
    for begin in range(0, len(stacks), fields.stacks):
        own = stacks[begin : begin + fields.stacks]
        those = [(at, part) for at, stack in enumerate(own) for part in _parts(stack, first, last)]
        if padded:
            those += [(at, _pads(fields, len(stack.tables), last - first)) for at, stack in enumerate(own)]
        for low in range(0, last - first, step):
            for _, part in those:
                parts.append(part.values[part.bounds[low] : part.bounds[low + step]])
                lengths.append(part.lengths[low * part.rows : (low + step) * part.rows])
                count += len(parts[-1])
            ends.append(count)
        turns += [part.rotation for _, part in those] * sorts
        heads = [(at << fields.stack) + (part.table << fields.table) + part.offset for at, part in those]
        begins += [(np.array(heads)[:, None] + of_source).reshape(-1)] * sorts
        rows += [np.array([part.rows for _, part in those]).repeat(step)] * sorts
    keys = space.take("keys", count, np.uint32)
    if all(part.dtype == np.uint32 and part.flags.c_contiguous for part in parts):
        # Concatenating lets the interpreter's lock go and waits for it at every part.
        ids = np.frombuffer(bytearray().join(part.data for part in parts), np.uint32)
    else:
        ids = space.take("ids", count, np.uint32)
        np.concatenate(parts, out=ids, casting="unsafe")
    _divide(ids, np.array(turns, np.uint32).repeat([len(part) for part in parts]) if any(turns) else None, fields, keys)
    # Of each row of the input, that is of each row of activations in turn, the key less destination and row.
    each = np.concatenate(rows)
    head = (np.concatenate(begins) - (np.cumsum(each) - each)).repeat(each)
    head += np.arange(len(head))
    keys += head.astype(np.uint32).repeat(np.concatenate(lengths))
    return keys, ends


def _pads(fields: Fields, tables: int, sources: int) -> _Part:
    """Padding as ids: of every partition PADS rows of activations, of a row behind those of the last table."""
    beyond, per_source = (1 << (fields.table - fields.row)) - 1, PADS * fields.cores
    values = np.arange(beyond * fields.cores, (beyond + 1) * fields.cores, dtype=np.uint32)
    return _Part(
        values=np.tile(values, PADS * sources),
        bounds=list(range(0, (sources + 1) * per_source, per_source)),
        lengths=np.full(sources * PADS, fields.cores),
        rows=PADS,
        table=tables - 1,
        offset=0,
        rotation=0,
    )


def _divide(
    ids: NDArray[np.uint32], rotations: NDArray[np.uint32] | None, fields: Fields, out: NDArray[np.uint32]
) -> None:
    """The fields of destination and row. The ids are written over."""
    cores, above = np.uint32(fields.cores), fields.row - bits(fields.cores)
    if fields.cores & (fields.cores - 1) == 0 and above >= 0:
        # Both fields lie in one product, with ids' bits that belong to neither around them.
        np.multiply(ids, np.uint32((1 << fields.core) + (1 << above)), out=out)
        if rotations is not None:
            out += rotations << np.uint32(fields.core)
        out &= np.uint32((fields.cores - 1 << fields.core) + (1 << fields.table) - (1 << fields.row))
        return
    np.remainder(ids, cores, out=out)
    ids //= cores
    if rotations is not None:
        out += rotations
        out %= cores
    out <<= np.uint32(fields.core)
    ids <<= np.uint32(fields.row)
    out |= ids
