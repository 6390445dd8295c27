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

from rooftop.embed import runs
from rooftop.embed.fields import Fields
from rooftop.embed.keys import bits, gaps, set_up_to
from rooftop.embed.lookups import TableBatch
from rooftop.embed.space import Space

#: Keys are no wider.
_KEY_BITS = 32
#: Ids whose arrays stay in a core's caches, and are enough for each call to be worth its while.
_TOGETHER = 400_000
#: Ids of a table that are enough where each has calls of its own.
_WORTH_A_TABLE = 30_000
#: Gains beside those of the ids: for padding, which rarely needs more.
_SPARE = 100_000
#: Ids up to which the places of all, and of the padding behind them, are told by the 32 bits of SciPy's loops.
_MOST_IDS = 1 << 29
_WORDS = (np.dtype(np.int32), np.dtype(np.uint32))


@dataclass(frozen=True, kw_only=True)
class SortedStacks:
    """Sorted and merged keys of stacks; see ``kernels.Found``.

    Dims: keys [N]; gains, the first N of which are how many ids each was, and others free; R runs of a stack, source,
    destination and table in the order of the keys: runs [R], their ids, and in_table [R], the table of all stacks'.
    keys and gains are of the thread's space.
    """

    stacks: Sequence[StackIds]
    fields: Fields
    first: int
    last: int
    keys: NDArray[np.uint32]
    gains: NDArray[np.float32]
    runs: NDArray[np.int64]
    in_table: NDArray[np.int64]
    sizes: NDArray[np.int64]
    uniques: NDArray[np.int64]
    table_uniques: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class StackLookups:
    """What the F features of a stack look up, to be gone through at once: their calls would cost more than the work.

    Of each its ``values``. Row splits of all lie one behind the other in ``splits``, and ``lengths`` are their
    differences. ``features`` [F, 5] are where a feature's splits begin, its rows of activations of a source, the
    first of them, and its table and rotation.
    """

    values: Sequence[NDArray[Any]]
    splits: NDArray[Any]
    lengths: NDArray[Any]
    features: NDArray[np.int64]

    @classmethod
    def of(cls, tables: Sequence[TableBatch]) -> StackLookups:
        """Those of a stack of these tables."""
        splits, values, features, at = list[NDArray[Any]](), list[NDArray[Any]](), list[tuple[int, ...]](), 0
        for index, one in enumerate(tables):
            for own in one.features:
                given = own.ids.values
                # Others become so when they are put side by side.
                values.append(given.view(np.uint32) if given.dtype in _WORDS else given)
                splits.append(own.ids.row_splits)
                features.append((at, own.rows, own.offset, index, one.table.layout.place.rotation))
                at += len(splits[-1])
        joined = splits[0] if len(splits) == 1 else np.concatenate(splits)
        return cls(values=values, splits=joined, lengths=joined[1:] - joined[:-1], features=np.array(features))


@dataclass(frozen=True, kw_only=True)
class StackIds:
    """A stack's tables; see ``kernels.Prepared``.

    ``lookups``, or None where it takes ``keys.merge``: ids have weights or may be out of range (``masked``), or keys
    do not fit.
    """

    tables: Sequence[TableBatch]
    ids: int
    at_once: int
    most_sources: int
    masked: bool
    lookups: StackLookups | None


def prepare(tables: Sequence[TableBatch], masked: bool) -> StackIds:
    """What is done once for a stack of a batch, while other threads wait for it."""
    features = [own for one in tables for own in one.features]
    weighted = any(own.ids.weights is not None for own in features)
    by_table = masked or weighted or Fields.of([tables], 1, _KEY_BITS) is None
    sources = features[0].ids.rows // features[0].rows
    return StackIds(
        tables=tables,
        ids=sum(len(own.ids.values) for own in features),
        at_once=max(_TOGETHER, _WORTH_A_TABLE * len(tables)) if by_table and len(tables) > 1 else _TOGETHER,
        most_sources=min(one.table.layout.most_sources() for one in tables) if by_table else sources,
        masked=masked,
        lookups=None if by_table else StackLookups.of(tables),
    )


def sort_stacks(stacks: Sequence[StackIds], first: int, last: int, space: Space) -> SortedStacks | None:
    """The ids that sources ``first`` to ``last`` look up in stacks of equally many tables.

    None where that takes ``keys.merge``: see ``StackIds``; and where there are no ids at all, or too many.
    """
    sources, tables = last - first, len(stacks[0].tables)
    of_stacks = [stack.tables for stack in stacks]
    fields = Fields.of(of_stacks, sources, _KEY_BITS, dividing=True)
    lookups = [stack.lookups for stack in stacks if stack.lookups is not None]
    if fields is None or len(lookups) < len(stacks):
        return None
    step = fields.stacks
    given = [_given(lookups[at : at + step], fields, first, last) for at in range(0, len(lookups), step)]
    ends = np.cumsum(np.concatenate([one.sizes.sum(axis=1) for one in given])).tolist()
    count = ends[-1]
    if not 0 < count <= _MOST_IDS:
        return None
    keys = _keys(given, fields, count, space)
    for begin, end in pairwise((0, *ends)):
        runs.sort(keys[begin:end], fields.row, fields.used, space)

    gains = space.take("gains", count + _SPARE, np.float32)
    gains[:count] = 1
    ends = runs.merge(keys, gains[:count], ends)
    count = ends[-1]
    keys = keys[:count]

    # The highest bit in which a key differs from the one before says what begins with it.
    differs = space.take("differs", count - 1, np.uint32)
    np.bitwise_xor(keys[1:], keys[:-1], out=differs)
    flags = space.flags("flags", 2, count)
    # One call for both: threads wait for each other at each.
    below = np.array([[(1 << low) - 1] for low in (fields.row, fields.table)], np.uint32)
    np.greater(differs, below, out=flags[:, : count - 1])
    # All ends with a sort.
    flags[:, [end - 1 for end in ends if end]] = True
    lasts = flags[1].nonzero()[0]
    run = (keys.take(lasts) >> np.uint32(fields.table)).astype(np.int64)
    shape = tuple(
        1 << (end - begin)
        for begin, end in pairwise((fields.table, fields.core, fields.source, fields.stack, fields.used))
    )
    if len(ends) > 1:
        behind = [0, *np.searchsorted(lasts, ends).tolist()]
        of_sort = [end - begin for begin, end in pairwise(behind)]
        run += (np.arange(len(ends)) * math.prod(shape)).repeat(of_sort)

    def by_table(of_runs: NDArray[np.int64]) -> NDArray[np.int64]:
        """[K, T, G, C] of what has room to spare in all dims."""
        found = of_runs.reshape(-1, *shape[::-1])[:, : fields.stacks, : fields.sources, : fields.cores, :tables]
        return found.reshape(-1, sources, fields.cores, tables)[: len(stacks)].transpose(0, 3, 1, 2)

    ids_in_runs, rows_in_runs = gaps(lasts), gaps(set_up_to(flags[0], lasts) - 1)
    ids_of, rows_of = np.zeros((2, len(ends) * math.prod(shape)), np.int64)
    ids_of[run], rows_of[run] = ids_in_runs, rows_in_runs
    in_table = run & (shape[0] - 1)
    if len(stacks) > 1:
        in_table += run // math.prod(shape[:3]) // (sources // fields.sources) * tables
    sizes, rows = by_table(ids_of), by_table(rows_of)
    return SortedStacks(
        stacks=stacks,
        fields=fields,
        first=first,
        last=last,
        keys=keys,
        gains=gains,
        runs=ids_in_runs,
        in_table=in_table,
        sizes=sizes,
        uniques=rows[:, 0] if tables == 1 else rows.sum(axis=1),
        table_uniques=rows.sum(axis=3),
    )


def _keys(given: Sequence[_Given], fields: Fields, count: int, space: Space) -> NDArray[np.uint32]:
    """Keys [count], sort after sort, to be sorted."""
    parts = [part for one in given for part in one.ids]
    sizes = np.concatenate([one.sizes for one in given], axis=None)
    keys = space.take("keys", count, np.uint32)
    if all(part.dtype == np.uint32 and part.flags.c_contiguous for part in parts):
        # Concatenating lets the interpreter's lock go and waits for it at every part.
        ids = np.frombuffer(bytearray().join(part.data for part in parts), np.uint32)
    else:
        ids = space.take("ids", count, np.uint32)
        np.concatenate(parts, out=ids, casting="unsafe")
    turns = np.concatenate([np.broadcast_to(one.turns, one.sizes.shape) for one in given], axis=None)
    _divide(ids, turns.repeat(sizes) if turns.any() else None, fields, keys)
    # Of each row of the input, that is of each row of activations in turn, the key less destination and row.
    heads, rows = (np.concatenate(of, axis=None) for of in zip(*(one.heads for one in given), strict=True))
    head = (heads - (np.cumsum(rows) - rows)).repeat(rows)
    head += np.arange(len(head))
    keys += head.astype(np.uint32).repeat(np.concatenate([own for one in given for own in one.lengths]))
    return keys


class _Given(NamedTuple):
    """What F features look up in S sorts of G sources each, one sort after the other.

    Dims: ids and lengths [S x F], the ids of each and how many each row of activations has; sizes [S, F] ids; turns
    [F], where tables' rows begin, as keys have destinations; heads, of keys, and rows of activations [S, F, G].
    """

    ids: list[NDArray[Any]]
    lengths: list[NDArray[Any]]
    sizes: NDArray[np.int64]
    turns: NDArray[np.uint32]
    heads: tuple[NDArray[np.int64], NDArray[np.int64]]


def _given(stacks: Sequence[StackLookups], fields: Fields, first: int, last: int) -> _Given:
    """What stacks that share each sort look up for sources ``first`` to ``last``."""
    begins, rows, offsets, tables, turns = np.concatenate([stack.features for stack in stacks]).T
    splits, lengths = stacks[0].splits, stacks[0].lengths
    if len(stacks) > 1:
        widths, each = [len(stack.splits) for stack in stacks], [len(stack.features) for stack in stacks]
        begins += (np.cumsum(widths) - widths).repeat(each)
        offsets += (np.arange(len(stacks)) << fields.stack).repeat(each)
        splits = np.concatenate([stack.splits for stack in stacks])
        lengths = splits[1:] - splits[:-1]
    step, values = fields.sources, [own for stack in stacks for own in stack.values]
    at = begins[:, None] + rows[:, None] * np.arange(first, last + 1, step)
    bounds = splits[at]
    sorts, places, ends = range(at.shape[1] - 1), at.T.tolist(), bounds.T.tolist()
    shape = (len(sorts), len(values), step)
    of_sources = np.arange(0, step << fields.source, 1 << fields.source)
    heads = (offsets + (tables << fields.table))[:, None] + of_sources
    return _Given(
        ids=[of[low:high] for turn in sorts for of, low, high in zip(values, ends[turn], ends[turn + 1], strict=True)],
        lengths=[lengths[low:high] for turn in sorts for low, high in zip(places[turn], places[turn + 1], strict=True)],
        sizes=(bounds[:, 1:] - bounds[:, :-1]).T,
        turns=(turns << fields.core).astype(np.uint32),
        heads=(np.broadcast_to(heads, shape), np.broadcast_to(rows[:, None], shape)),
    )


def _divide(ids: NDArray[np.uint32], turns: NDArray[np.uint32] | None, fields: Fields, out: NDArray[np.uint32]) -> None:
    """The fields of destination, ``turns`` as it has them added, and row. The ids are written over."""
    cores, above = np.uint32(fields.cores), fields.row - bits(fields.cores)
    if fields.cores & (fields.cores - 1) == 0 and above >= 0:
        # Both fields lie in one product, with ids' bits that belong to neither around them. Of one core the
        # destination has no bits, and may begin behind a key's last.
        np.multiply(ids, np.uint32((1 << fields.core) + (1 << above) & 0xFFFFFFFF), out=out)
        if turns is not None:
            out += turns
        out &= np.uint32((fields.cores - 1 << fields.core) + (1 << fields.table) - (1 << fields.row))
        return
    np.remainder(ids, cores, out=out)
    ids //= cores
    if turns is not None:
        out += turns >> np.uint32(fields.core)
        out %= cores
    out <<= np.uint32(fields.core)
    ids <<= np.uint32(fields.row)
    out |= ids
