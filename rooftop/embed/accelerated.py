"""The kernels in numba: keys, merging and writing in one pass each; NumPy sorts, which it does with wide vectors."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from rooftop.embed.emit import NO_GAIN, NO_ID, Buffers, Space
from rooftop.embed.kernels import Found, NumpyKernels
from rooftop.embed.keys import bits
from rooftop.embed.lookups import TableBatch
from rooftop.models.tables_stacking import ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class _Joined:
    """Sorted ids of a stack, one table behind another in ``keys`` and ``gains``; see ``kernels.Found``.

    Dims: parameters [T, 7] of the tables (``_parameters``); begins [T], where the ids of a table begin.
    """

    keys: NDArray[Any]
    gains: NDArray[np.float32]
    parameters: NDArray[np.int64]
    begins: NDArray[np.int64]
    sizes: NDArray[np.int64]
    uniques: NDArray[np.int64]
    table_uniques: NDArray[np.int64]


class NumbaKernels:
    """The kernels in numba, for stacks whose ids have no weights of their own; the others are NumPy's."""

    worth_a_call = 10_000

    def __init__(self) -> None:
        self._numpy = NumpyKernels()
        self._spaces = threading.local()

    def sort(self, tables: Sequence[TableBatch], first: int, last: int, masked: bool) -> Found:
        """See ``kernels.Kernels``. What is found is to be written before the thread sorts again."""
        if any(feature.ids.weights is not None for one in tables for feature in one.features):
            return self._numpy.sort(tables, first, last, masked)
        if not hasattr(self._spaces, "own"):
            self._spaces.own = Space()
        return _sort(tables, first, last, masked, self._spaces.own)

    def emit(self, found: Found, buffers: Buffers, first: int, per_row: int) -> None:
        """See ``kernels.Kernels``."""
        if isinstance(found, _Joined):
            _emit(found, buffers, first, per_row)
        else:
            self._numpy.emit(found, buffers, first, per_row)


def _parameters(one: TableBatch) -> list[int]:
    """What the loops know of a table."""
    layout = one.table.layout
    return [
        layout.sample_bits,
        (1 << layout.row_bits) - 1,
        layout.place.offset,
        one.table.first_sample,
        layout.core_shift,
        layout.source_shift,
        layout.samples,
    ]


def _sort(tables: Sequence[TableBatch], first: int, last: int, masked: bool, space: Space) -> _Joined:
    sources, cores = last - first, tables[0].table.layout.cores
    power = cores & (cores - 1) == 0
    spans = [
        (
            one,
            feature,
            int(feature.ids.row_splits[first * feature.rows]),
            int(feature.ids.row_splits[last * feature.rows]),
        )
        for one in tables
        for feature in one.features
    ]
    total = sum(end - begin for _, _, begin, end in spans)
    narrow = all(one.table.layout.dtype(sources) is np.uint32 for one in tables)
    keys = space.take("keys32", total, np.uint32) if narrow else space.take("keys64", total, np.uint64)
    bounds, at = [0], 0
    for index, (one, feature, begin, end) in enumerate(spans):
        layout = one.table.layout
        _fill(
            keys[at : at + end - begin],
            feature.ids.values[begin:end],
            feature.ids.row_splits[first * feature.rows : last * feature.rows + 1],
            feature.rows,
            feature.offset,
            cores,
            bits(cores) if power else -1,
            layout.place.rotation,
            layout.row_bits,
            layout.sample_bits,
            layout.source_shift,
            (1 << (layout.row_bits if masked else 32)) - 1,
        )
        at += end - begin
        if index + 1 == len(spans) or spans[index + 1][0] is not one:
            keys[bounds[-1] : at].sort()
            bounds.append(at)
    gains = space.take("gains", total, np.float32)
    parameters = np.array([_parameters(one) for one in tables])
    sizes = np.zeros((2, len(tables), sources, cores), np.int64)
    begins = np.array(bounds)
    # A table's gains of samples, flat, where it has any.
    scales = [one.gains[first:last].reshape(-1) for one in tables if one.gains is not None]
    scale = np.concatenate(scales) if scales else np.ones(0, np.float32)
    _join(keys, gains, scale, space.take("ends", total, np.int32), begins, parameters, sizes[0], sizes[1])
    return _Joined(
        keys=keys,
        gains=gains,
        parameters=parameters,
        begins=begins[:-1],
        sizes=sizes[0],
        uniques=sizes[1].sum(axis=0),
        table_uniques=sizes[1].sum(axis=2),
    )


def _emit(found: _Joined, buffers: Buffers, first: int, per_row: int) -> None:
    _write(
        found.keys,
        found.gains,
        found.parameters,
        found.begins.copy(),
        found.sizes.reshape(len(found.sizes), -1),
        per_row * found.sizes.shape[2],
        buffers.filled[first // per_row : (first + found.sizes.shape[1]) // per_row],
        (first // per_row) * (buffers.embedding_ids.size // len(buffers.filled)),
        buffers.embedding_ids.size // len(buffers.filled),
        buffers.embedding_ids.reshape(-1),
        buffers.sample_ids.reshape(-1),
        buffers.gains.reshape(-1),
    )


@njit(nogil=True, cache=True)
def _fill(
    keys: Any,
    values: Any,
    splits: Any,
    rows: int,
    offset: int,
    cores: int,
    core_bits: int,
    rotation: int,
    row_bits: int,
    sample_bits: int,
    source_shift: int,
    row_mask: int,
) -> None:
    """Keys of one feature; ``core_bits`` is -1 where the SparseCores are no power of two."""
    begin = splits[0]
    low = np.uint64(cores - 1)
    shift = np.uint64(max(core_bits, 0))
    row = 0
    for source in range((len(splits) - 1) // rows):
        for sample in range(offset, offset + rows):
            head = (np.uint64(source) << np.uint64(source_shift)) | np.uint64(sample)
            at = np.uint64(splits[row] - begin)
            for step in range(splits[row + 1] - splits[row]):
                # A place that cannot be negative is not looked at for that: only then are loops vectors.
                index = at + np.uint64(step)
                value = np.uint64(np.uint32(values[index]))
                if core_bits >= 0:
                    local = value >> shift
                    core = (value + np.uint64(rotation)) & low
                else:
                    local = np.uint64(np.uint32(value) // np.uint32(cores))
                    core = value - local * np.uint64(cores) + np.uint64(rotation)
                    if core >= np.uint64(cores):
                        core -= np.uint64(cores)
                local &= np.uint64(row_mask)
                keys[index] = (((core << np.uint64(row_bits)) | local) << np.uint64(sample_bits)) | head
            row += 1


@njit(nogil=True, cache=True)
def _join(keys: Any, gains: Any, scale: Any, ends: Any, begins: Any, parameters: Any, sizes: Any, uniques: Any) -> None:
    """Merge each table's equal keys in place, with their gains, and count by table, source and destination."""
    sources = sizes.shape[1]
    scale_at = 0
    for table in range(len(begins) - 1):
        begin, behind_all = begins[table], begins[table + 1]
        core_shift, source_shift = parameters[table, 4], parameters[table, 5]
        samples = parameters[table, 6]
        if begin == behind_all:
            scale_at += samples * sources
            continue
        sample_mask = np.uint64((1 << parameters[table, 0]) - 1)
        bits_of_core = source_shift - core_shift
        # Of each partition the last merged id, and the rows so far: written with every id, and so without a branch.
        # Whether an id repeats its predecessor is no branch that a core can foresee.
        partitions = sources << bits_of_core
        last_of, rows_of = np.full(partitions, -1, np.int64), np.zeros(partitions, np.int64)
        end, last = np.uint64(begin), keys[begin]
        rows: Any = 1
        for index in range(begin, behind_all):
            key = keys[np.uint64(index)]
            end += np.uint64(key != last)
            rows += np.uint64(key ^ last) > sample_mask
            keys[end] = key
            ends[end] = index
            partition = np.uint64(key) >> np.uint64(core_shift)
            last_of[partition] = end
            rows_of[partition] = rows
            last = key
        count = np.int64(end) + 1
        gains[begin] = ends[begin] - begin + 1
        counts, ends_of = gains[begin + 1 : count], ends[begin:count]
        for index in range(len(counts)):
            counts[index] = ends_of[index + 1] - ends_of[index]
        if len(scale) > 0:
            for index in range(begin, count):
                key64 = np.uint64(keys[index])
                source = np.int64(key64 >> np.uint64(source_shift))
                gains[index] *= scale[scale_at + source * samples + np.int64(key64 & sample_mask)]
        scale_at += samples * sources
        at: Any = begin - 1
        rows_before: Any = 0
        for place in range(partitions):
            if last_of[place] >= 0:
                source, core = place >> bits_of_core, place & ((1 << bits_of_core) - 1)
                sizes[table, source, core] = last_of[place] - at
                uniques[table, source, core] = rows_of[place] - rows_before
                at, rows_before = last_of[place], rows_of[place]


@njit(nogil=True, cache=True)
def _write(
    keys: Any,
    gains: Any,
    parameters: Any,
    at: Any,
    sizes: Any,
    per_row: int,
    filled: Any,
    origin: int,
    capacity: int,
    ids_out: Any,
    samples_out: Any,
    gains_out: Any,
) -> None:
    """Write rows of ``per_row`` partitions one after the other, padding, and padding over what was there before."""
    for row in range(len(filled)):
        begin = origin + row * capacity
        to = begin
        for partition in range(row * per_row, (row + 1) * per_row):
            for table in range(len(at)):
                count, source = sizes[table, partition], at[table]
                shift, row_mask = np.uint32(parameters[table, 0]), np.uint32(parameters[table, 1])
                low = np.uint32((1 << parameters[table, 0]) - 1)
                row_offset, first_sample = np.uint32(parameters[table, 2]), np.uint32(parameters[table, 3])
                from_, into = np.uint64(source), np.uint64(to)
                for step in range(count):
                    index = np.uint64(step)
                    key = keys[from_ + index]
                    ids_out[into + index] = (np.uint32(key >> shift) & row_mask) + row_offset
                    samples_out[into + index] = (np.uint32(key) & low) + first_sample
                    gains_out[into + index] = gains[from_ + index]
                to += count
                at[table] = source + count
            end = to + -(to - begin) % ALIGNMENT
            for pad in range(to, end):
                ids_out[pad] = NO_ID
                samples_out[pad] = NO_ID
                gains_out[pad] = NO_GAIN
            to = end
        for pad in range(to, begin + filled[row]):
            ids_out[pad] = NO_ID
            samples_out[pad] = NO_ID
            gains_out[pad] = NO_GAIN
        filled[row] = to - begin
