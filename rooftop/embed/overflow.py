"""Ids beyond a limit: dropped in the order in which SparseCores read them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import Chunk, arrange, padding, starts_of


@dataclass(frozen=True, kw_only=True)
class Ordered:
    """The ids of a chunk in the order of the buffers, with what they belong to.

    Dims [N] each: ``groups`` source and minibatch, source-major (without minibatching: the source); ``cores`` the
    destination; ``tables`` the table's place in its stack; rows, samples, gains as in the chunk; ``counts`` ids merged
    into one; ``fresh`` whether an id is the first of its row in its partition.
    """

    groups: NDArray[np.int64]
    cores: NDArray[np.int64]
    tables: NDArray[np.int64]
    rows: NDArray[np.int32]
    samples: NDArray[np.int32]
    gains: NDArray[np.float32]
    counts: NDArray[np.int64]
    fresh: NDArray[np.bool_]

    def taken(self, where: NDArray[np.bool_] | NDArray[np.int64]) -> Ordered:
        """Those ids that ``where`` picks. They must still be in the order of the buffers."""
        picked = {field.name: getattr(self, field.name)[where] for field in dataclasses.fields(self)}
        return dataclasses.replace(Ordered(**picked), fresh=_fresh(picked["groups"], picked["cores"], picked["rows"]))


def _fresh(groups: NDArray[np.int64], cores: NDArray[np.int64], rows: NDArray[np.int32]) -> NDArray[np.bool_]:
    found = np.ones(len(rows), np.bool_)
    found[1:] = (groups[1:] != groups[:-1]) | (cores[1:] != cores[:-1]) | (rows[1:] != rows[:-1])
    return found


def ordered(chunk: Chunk) -> Ordered:
    """The ids of a chunk in the order of the buffers, not padded."""
    tables, sources, cores = chunk.sizes.shape
    total = len(chunk.rows) - 1
    where = arrange(chunk.sizes, starts_of(chunk.sizes), total, 1)
    where = where[where < total]
    runs = chunk.sizes.transpose(1, 2, 0).reshape(-1)
    of_run = np.repeat(np.arange(runs.size), runs)
    groups, core, table = np.unravel_index(of_run, (sources, cores, tables))
    rows = chunk.rows[where]
    counts = np.ones(len(where), np.int64) if chunk.counts is None else chunk.counts[where]
    return Ordered(
        groups=groups,
        cores=core,
        tables=table,
        rows=rows,
        samples=chunk.samples[where],
        gains=chunk.gains[where],
        counts=counts,
        fresh=_fresh(groups, core, rows),
    )


def sizes_of(ids: Ordered, groups: int, cores: int) -> NDArray[np.int64]:
    """Ids of each group and destination: [groups, C]."""
    return np.bincount(ids.groups * cores + ids.cores, minlength=groups * cores).reshape(groups, cores)


def uniques_of(ids: Ordered, groups: int, cores: int) -> NDArray[np.int64]:
    """Different rows of each group and destination: [groups, C]."""
    keys = (ids.groups * cores + ids.cores)[ids.fresh]
    return np.bincount(keys, minlength=groups * cores).reshape(groups, cores)


def as_chunk(ids: Ordered, groups: int, cores: int) -> Chunk:
    """A chunk of one table of ids in the order of the buffers."""
    sizes = sizes_of(ids, groups, cores)
    return Chunk(
        rows=np.append(ids.rows, np.int32(2**31 - 1)),
        samples=np.append(ids.samples, np.int32(2**31 - 1)),
        gains=np.append(ids.gains, np.float32(np.nan)),
        counts=ids.counts,
        sizes=sizes[None],
        uniques=uniques_of(ids, groups, cores),
    )


def drop_from_partitions(ids: Ordered, max_ids: int, max_unique_ids: int, cores: int) -> Ordered:
    """The first ``max_ids`` ids of each partition that belong to its first ``max_unique_ids`` rows."""
    partitions = ids.groups * cores + ids.cores
    keep = _rank(partitions) < max_ids
    seen = np.cumsum(ids.fresh)
    firsts = np.searchsorted(partitions, partitions)
    keep &= seen - seen[firsts] < max_unique_ids
    return ids if keep.all() else ids.taken(keep)


def drop_from_tables(ids: Ordered, passes: int, max_ids: dict[int, int], max_unique_ids: dict[int, int]) -> Ordered:
    """The first ids of each source and table, as many as the limits of the table (by its place in the stack) allow."""
    keep = np.ones(len(ids.rows), np.bool_)
    for limits, unique in ((max_ids, False), (max_unique_ids, True)):
        for table, limit in limits.items():
            at = np.flatnonzero(ids.tables == table)
            sources = ids.groups[at] // passes
            if unique:
                seen = np.cumsum(ids.fresh[at])
                keep[at] &= seen - seen[np.searchsorted(sources, sources)] < limit
            else:
                keep[at] &= _rank(sources) < limit
    return ids if keep.all() else ids.taken(keep)


def drop_from_sources(ids: Ordered, passes: int, room: NDArray[np.int64]) -> Ordered:
    """The first ids of each source, as many as there is room for: [sources]."""
    sources = ids.groups // passes
    keep = _rank(sources) < room[sources]
    return ids if keep.all() else ids.taken(keep)


def drop_from_buffers(ids: Ordered, capacity: int, per_row: int, groups: int, cores: int) -> Ordered:
    """The ids that fit into rows of ``capacity`` ids, partitions padded; ``per_row`` groups share a row."""
    sizes = sizes_of(ids, groups, cores)
    whole = (sizes + padding(sizes)).reshape(groups // per_row, -1)
    starts = (np.cumsum(whole, axis=1) - whole).reshape(-1)
    partitions = ids.groups * cores + ids.cores
    keep = starts[partitions] + _rank(partitions) < capacity
    return ids if keep.all() else ids.taken(keep)


def _rank(groups: NDArray[np.int64]) -> NDArray[np.int64]:
    """How many of the same group come before; members of a group are side by side."""
    return np.arange(len(groups)) - np.searchsorted(groups, groups)
