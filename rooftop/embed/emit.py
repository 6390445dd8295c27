"""Sorted ids into the buffers that SparseCores read.

A buffer has a row per source SparseCore (with minibatching: per device, its SparseCores one after the other). In it
the ids for destination 0 come first, then those for destination 1, ..., each such *partition* padded to a multiple of
8: a row pointer tells where the partition ends, before its padding. Tables of a stack follow each other in a partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.embed import runs
from rooftop.embed.keys import Layout, Merged
from rooftop.embed.space import Space
from rooftop.models.embedding_tables.stacking import ALIGNMENT

#: What padding holds: no row, no sample, no number.
NO_ID = np.int32(2**31 - 1)
NO_GAIN = np.float32(np.nan)
#: Ids of a row below which they are copied with the interpreter's lock held: to let it go takes longer.
_COPIED_HELD = 30_000
#: How much of a row is filled where all of it is written: its padding costs less than a copy of its ids.
_NEARLY_FULL = 0.8
#: Ids that are written at once: as many as stay, with their indices, in a core's cache.
_WRITTEN_AT_ONCE = 60_000


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What the SparseCores of the local devices read of one stack.

    Dims: row_pointers [devices, row pointers of a device] of int32, relative to the source's part of the buffer (with
    minibatching: to the device's); embedding_ids (local rows), sample_ids (rows of activations of the source) of int32
    and gains of float32, [devices, capacity]. Everything beyond the ids is padding, to the end.
    """

    row_pointers: NDArray[np.int32]
    embedding_ids: NDArray[np.int32]
    sample_ids: NDArray[np.int32]
    gains: NDArray[np.float32]
    #: Where the padding begins, per row of the buffer: what is beyond needs not be written again.
    filled: NDArray[np.int64]

    @classmethod
    def empty(cls, *, devices: int, rows: int, capacity: int, pointers: int) -> Buffers:
        """Buffers without ids: ``rows`` of ``capacity`` ids, and ``pointers`` row pointers, for each device."""
        return cls(
            row_pointers=np.zeros((devices, pointers), np.int32),
            embedding_ids=np.full((devices, rows * capacity), NO_ID),
            sample_ids=np.full((devices, rows * capacity), NO_ID),
            gains=np.full((devices, rows * capacity), NO_GAIN),
            filled=np.zeros(devices * rows, np.int64),
        )

    def __getstate__(self) -> dict[str, Any]:
        # Copies, and what another process has, lie elsewhere.
        return {name: value for name, value in vars(self).items() if name != "addresses"}

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """Where embedding_ids, sample_ids, gains and filled begin."""
        ids, samples, gains, filled = (
            array.__array_interface__["data"][0]
            for array in (self.embedding_ids, self.sample_ids, self.gains, self.filled)
        )
        return ids, samples, gains, filled

    def write(self, first: int, ids: NDArray[Any], samples: NDArray[Any], gains: NDArray[Any]) -> None:
        """Fill rows of the buffer from ``first`` on; the arguments have dims [rows, as far as any row reaches]."""
        rows, width = ids.shape
        last = first + rows
        stale = int(self.filled[first:last].max(initial=0))
        pads = (NO_ID, NO_ID, NO_GAIN)
        for own, given, pad in zip(self._rows(first, last), (ids, samples, gains), pads, strict=True):
            if rows == 1 and width < _COPIED_HELD:
                own[0].data[:width] = given[0].data
            else:
                own[:, :width] = given
            if stale > width:
                own[:, width:stale] = pad
        self.filled[first:last] = width

    def to_write(self, width: int) -> int:
        """How far to write rows of which the fullest holds ``width`` ids: to their end, where that is not far."""
        capacity = self.embedding_ids.size // len(self.filled)
        return capacity if width >= capacity * _NEARLY_FULL else width

    def write_runs(
        self,
        first: int,
        bounds: NDArray[np.int32],
        ids: NDArray[np.int32],
        samples: NDArray[np.int32],
        gains: NDArray[np.float32],
        filled: int,
        space: Space,
    ) -> None:
        """Fill rows from ``first`` on with what lies between ``bounds`` [rows, ..., 2] of the arrays, [N] each.

        That reaches as far as ``to_write`` says; from ``filled`` on all rows hold padding.
        """
        rows, last, width = len(bounds), first + len(bounds), self.to_write(filled)
        own = self._rows(first, last)
        whole = own[0].shape[1] == width
        if whole:
            out = [array.reshape(-1) for array in own]
        else:
            names = ("written ids", "written samples", "written gains")
            out = [space.take(name, rows * width, array.dtype.type) for name, array in zip(names, own, strict=True)]
        runs.join(bounds, ids, samples, out[0], out[1])
        # Two at a time are joined: the third goes along with itself.
        runs.join(bounds, gains.view(np.int32), gains, out[2].view(np.int32), out[2])
        if whole:
            self.filled[first:last] = filled
        else:
            self.write(first, *(array.reshape(rows, width) for array in out))

    def _rows(self, first: int, last: int) -> list[NDArray[Any]]:
        """Ids, samples and gains of these rows, [rows, capacity] each."""
        arrays = (self.embedding_ids, self.sample_ids, self.gains)
        return [array.reshape(len(self.filled), -1)[first:last] for array in arrays]


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The ids of one stack for some sources, table after table, each as in ``Merged``.

    Dims: T tables, G sources, C destinations, N ids. rows, samples, gains [N + 1], padding last; counts [N], how many
    ids each was merged of; sizes [T, G, C] ids; uniques [G, C] different rows.
    """

    rows: NDArray[np.int32]
    samples: NDArray[np.int32]
    gains: NDArray[np.float32]
    counts: NDArray[np.int64] | None
    sizes: NDArray[np.int64]
    uniques: NDArray[np.int64]


def collect(tables: Sequence[tuple[Layout, Merged, int]], space: Space, *, counted: bool) -> Chunk:
    """The merged ids of a stack's tables, of which the third member is the first row of activations.

    The chunk's arrays are those of ``space``.
    """
    total = sum(len(merged.keys) for _, merged, _ in tables)
    rows, samples = space.take("rows", total + 1, np.int32), space.take("samples", total + 1, np.int32)
    gains = space.take("gains", total + 1, np.float32)
    counts = np.ones(total, np.int64) if counted else None
    rows[-1] = samples[-1] = NO_ID
    gains[-1] = NO_GAIN
    at = 0
    for layout, merged, offset in tables:
        span = slice(at, at + len(merged.keys))
        dtype = merged.keys.dtype.type
        # 32-bit keys become rows and samples where those go; wider ones are cut at the end.
        own_rows, own_samples = (
            (array[span].view(dtype) if dtype is np.uint32 else np.empty_like(merged.keys)) for array in (rows, samples)
        )
        np.right_shift(merged.keys, dtype(layout.sample_bits), out=own_rows)
        own_rows &= dtype((1 << layout.row_bits) - 1)
        np.bitwise_and(merged.keys, dtype((1 << layout.sample_bits) - 1), out=own_samples)
        for array, own, first in ((rows, own_rows, layout.place.offset), (samples, own_samples, offset)):
            if first:
                own += dtype(first)
            if dtype is not np.uint32:
                array[span] = own
        gains[span] = merged.gains if merged.gains is not None else 1 if merged.counts is None else merged.counts
        if counts is not None and merged.counts is not None:
            counts[span] = merged.counts
        at = span.stop
    return Chunk(
        rows=rows,
        samples=samples,
        gains=gains,
        counts=counts,
        sizes=np.stack([merged.sizes for _, merged, _ in tables]),
        uniques=sum((merged.uniques for _, merged, _ in tables[1:]), tables[0][1].uniques),
    )


def padding(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Padding behind partitions of ``sizes`` ids."""
    # ALIGNMENT is a power of two.
    found: NDArray[np.int64] = -sizes & (ALIGNMENT - 1)
    return found


def arrange(sizes: NDArray[np.int64], starts: NDArray[np.int64], total: int, per_row: int) -> NDArray[np.int64]:
    """Where each place of the buffer's rows gets its id from: indices [G / per_row, W], of padding ``total`` or more.

    ``sizes`` [T, G, C] are as in a Chunk, and ``starts`` [T, G, C] where those ids begin. ``per_row`` sources share
    a row.
    """
    tables, sources, cores = sizes.shape
    spans = np.empty((sources, cores, tables + 1), np.int64)
    spans[:, :, :tables] = sizes.transpose(1, 2, 0)
    spans[:, :, tables] = padding(sizes.sum(axis=0))
    in_row = spans.reshape(sources // per_row, -1)
    used = in_row.sum(axis=1)
    width = int(used.max(initial=0))
    in_row[:, -1] += width - used
    # From where each span's ids come, less where they go, so that adding the place gives the index.
    shifts = np.empty_like(spans)
    shifts[:, :, :tables] = starts.transpose(1, 2, 0)
    shifts -= (np.cumsum(spans.reshape(-1)) - spans.reshape(-1)).reshape(spans.shape)
    shifts[:, :, tables] = total
    found: NDArray[np.int64] = shifts.reshape(-1).repeat(spans.reshape(-1))
    found += np.arange(len(found))
    return found.reshape(sources // per_row, width)


def starts_of(sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where the ids of each table, source and destination begin in a Chunk: [T, G, C] as its sizes."""
    found: NDArray[np.int64] = np.cumsum(sizes.reshape(-1)) - sizes.reshape(-1)
    return found.reshape(sizes.shape)


def row_pointers(sizes: NDArray[np.int64], whole: NDArray[np.int64], per_row: int) -> NDArray[np.int32]:
    """Ends of partitions, relative to their row: [G, at least 8], the last repeated, padded.

    ``sizes`` [G, C] are their ids, ``whole`` the same padded. ``per_row`` groups share a row.
    """
    behind = np.cumsum(whole.reshape(len(sizes) // per_row, -1), axis=1).reshape(sizes.shape)
    found = np.empty((len(sizes), max(sizes.shape[1], ALIGNMENT)), np.int32)
    found[:, : sizes.shape[1]] = behind - (whole - sizes)
    found[:, sizes.shape[1] :] = behind[:, -1:]
    return found


def emit(chunk: Chunk, buffers: Buffers, first: int, per_row: int) -> None:
    """Write a chunk whose first source is ``first`` into the buffers. The row pointers are written by the caller."""
    starts, total = starts_of(chunk.sizes), len(chunk.rows) - 1
    sources = chunk.sizes.shape[1]
    step = max(1, _WRITTEN_AT_ONCE * sources // max(total, 1) // per_row) * per_row
    for at in range(0, sources, step):
        part = slice(at, at + step)
        where = arrange(chunk.sizes[:, part], starts[:, part], total, per_row)
        row = (first + at) // per_row
        # Clipped, an index of padding is that of the padding behind the ids.
        buffers.write(row, *(array.take(where, mode="clip") for array in (chunk.rows, chunk.samples, chunk.gains)))
