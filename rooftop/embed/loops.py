"""Loops over ids that numba compiles: keys, their sort, merging, writing. They run without the interpreter's lock."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from rooftop.embed.emit import NO_GAIN, NO_ID
from rooftop.models.embedding_tables.stacking import ALIGNMENT

#: Bits of a digit at most: its counts stay in a core's first cache.
DIGIT = 13


def _of_address(typing_context: Any, address: Any) -> Any:
    """A pointer from an address: loops cannot be handed arrays of a number that is not known before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


_pointer: Any = intrinsic(_of_address)


@njit(nogil=True, cache=True)
def sort_ids(
    features: Any, of_stacks: Any, row_bits: Any, from_source: int, fields: Any, core_bits: int, scratch: Any,
    digits: Any, ends: Any, scale: Any, in_scale: Any, keys: Any, gains: Any, counts: Any,
) -> None:  # fmt: skip
    """Sort and merge ids of stacks, of sources from ``from_source`` on, into ``keys`` and ``gains``.

    ``counts`` are ids and rows by stack, table, source and destination. ``features``, those of a stack from
    ``of_stacks`` on, are the address of their ids, words of an id, the address of row splits, words of a split, rows
    of a source, the first of them, table and rotation each; ``row_bits`` are those that local rows of each table are
    cut to. ``core_bits`` is -1 where the SparseCores are no power of two.
    """
    merged, tables = 0, counts.shape[2]
    for stack in range(counts.shape[1]):
        merged = _sort_stack(
            features[of_stacks[stack] : of_stacks[stack + 1]], row_bits[stack * tables :], from_source, fields,
            core_bits, scratch, digits, ends, scale, in_scale[stack * tables : (stack + 1) * tables + 1], keys, gains,
            counts[:, stack], merged,
        )  # fmt: skip


@njit(nogil=True, cache=True)
def _sort_stack(
    features: Any, row_bits: Any, from_source: int, fields: Any, core_bits: int, scratch: Any, digits: Any, ends: Any,
    scale: Any, in_scale: Any, keys: Any, gains: Any, counts: Any, merged: int,
) -> Any:  # fmt: skip
    """Those of one stack from ``merged`` on; tells where they end."""
    sources, cores = counts.shape[2:]
    at_once, half = fields[5], len(scratch) // 2
    runs = at_once << (fields[3] - fields[1])
    last_of, rows_of = np.empty(runs, np.int64), np.empty(runs, np.int64)
    for first in range(0, sources, at_once):
        count, behind = 0, min(first + at_once, sources)
        ours, other = scratch[:half], scratch[half:]
        for source in range(first, behind):
            for index in range(len(features)):
                one = features[index]
                at, rows = (from_source + source) * one[4], one[4]
                # The lower word of a split is all of it. What lies behind the source's ids is never read.
                own = carray(_pointer(one[2]), ((at + rows + 1) * one[3],), np.uint32)[at * one[3] :: one[3]]
                words = carray(_pointer(one[0]), (np.int64(own[rows]) * one[1],), np.uint32)
                head = ((source - first) << fields[3]) | (one[6] << fields[1]) | one[5]
                row_mask = (1 << row_bits[one[6]]) - 1
                count += _fill(ours[count:], words, own, one, row_mask, fields, cores, core_bits, head)
        if count == 0:
            continue
        shift = fields[0]
        passes = (fields[4] - shift + DIGIT - 1) // DIGIT
        for index in range(passes):
            digit = (fields[4] - shift + passes - index - 1) // (passes - index)
            _by_digit(ours[:count], other, shift, digit, digits)
            ours, other = other, ours
            shift += digit
        last_of[:] = -1
        behind_all = _merge(ours[:count], fields, merged, keys, gains, ends, last_of, rows_of)
        before, rows_before = merged, 0
        for source in range(first, behind):
            for core in range(cores):
                run = ((source - first) << (fields[3] - fields[1])) | (core << (fields[2] - fields[1]))
                for table in range(len(counts[0])):
                    if last_of[run + table] >= 0:
                        end, rows = last_of[run + table] + 1, rows_of[run + table]
                        counts[0, table, source, core], counts[1, table, source, core] = (
                            end - before,
                            rows - rows_before,
                        )
                        if in_scale[table] < in_scale[table + 1]:
                            samples = (in_scale[table + 1] - in_scale[table]) // sources
                            _scale(
                                keys[before:end], gains[before:end], scale[in_scale[table] + source * samples :], fields
                            )
                        before, rows_before = end, rows
        merged = behind_all
    return merged


@njit(nogil=True, cache=True)
def _fill(
    keys: Any, words: Any, splits: Any, feature: Any, most_row: int, fields: Any, cores: int, core_bits: int, head: int
) -> Any:  # fmt: skip
    """Keys of a source's ids of one feature; ``head`` is that of its first row. Tells how many there are."""
    single, rotation, row_mask = feature[1] == 1, np.uint64(feature[7]), np.uint64(most_row)
    row_shift, core_shift = np.uint64(fields[0]), np.uint64(fields[2])
    low, shift = np.uint64(cores - 1), np.uint64(max(core_bits, 0))
    for row in range(len(splits) - 1):
        # A place that cannot be negative is not looked at for that: only then are loops vectors.
        first, to, of_row = np.uint64(splits[row]), np.uint64(splits[row]) - np.uint64(splits[0]), np.uint64(head + row)
        for index in range(np.int64(splits[row + 1]) - np.int64(splits[row])):
            place = first + np.uint64(index)
            value = np.uint64(words[place] if single else words[place * np.uint64(2)])
            if core_bits >= 0:
                local = value >> shift
                core = (value + rotation) & low
            else:
                local = np.uint64(np.uint32(value) // np.uint32(cores))
                core = value - local * np.uint64(cores) + rotation
                if core >= np.uint64(cores):
                    core -= np.uint64(cores)
            local &= row_mask
            keys[to + np.uint64(index)] = (core << core_shift) | (local << row_shift) | of_row
    return np.int64(splits[len(splits) - 1]) - np.int64(splits[0])


@njit(nogil=True, cache=True)
def _by_digit(keys: Any, out: Any, shift: int, digit: int, counts: Any) -> None:
    """Keys by ``digit`` bits from ``shift`` on, in their order where these are equal."""
    mask, low = np.uint64((1 << digit) - 1), np.uint64(shift)
    counts[: 1 << digit] = 0
    for index in range(len(keys)):
        counts[(keys[index] >> low) & mask] += np.uint32(1)
    at = np.uint32(0)
    for value in range(1 << digit):
        own = counts[value]
        counts[value] = at
        at += own
    for index in range(len(keys)):
        key = keys[index]
        place = (key >> low) & mask
        to = counts[place]
        out[np.uint64(to)] = key
        counts[place] = to + np.uint32(1)


@njit(nogil=True, cache=True)
def _merge(
    sorted_keys: Any, fields: Any, begin: int, keys: Any, gains: Any, ends: Any, last_of: Any, rows_of: Any
) -> Any:
    """Merge equal keys into ``keys`` from ``begin`` on and tell where they end; gains are how many became one.

    Of each run (source, destination and table) ``last_of`` gets the last merged id, ``rows_of`` the rows so far:
    written with every id, and so without a branch. Whether an id repeats the one before is no branch that a core can
    foresee.
    """
    sample_mask, of_run = np.uint64((1 << fields[0]) - 1), np.uint64(fields[1])
    end, last = np.uint64(begin), sorted_keys[0]
    rows: Any = 1
    for index in range(len(sorted_keys)):
        key = sorted_keys[index]
        end += np.uint64(key != last)
        rows += np.uint64(key ^ last) > sample_mask
        keys[end] = key
        ends[end] = index
        run = np.uint64(key) >> of_run
        last_of[run] = end
        rows_of[run] = rows
        last = key
    behind = np.int64(end) + 1
    gains[begin] = ends[begin] + 1
    repeats, own_ends = gains[begin + 1 : behind], ends[begin:behind]
    for index in range(len(repeats)):
        repeats[index] = own_ends[index + 1] - own_ends[index]
    return behind


@njit(nogil=True, cache=True)
def _scale(keys: Any, gains: Any, of_samples: Any, fields: Any) -> None:
    """Multiply gains by those of their samples."""
    sample_mask = np.uint64((1 << fields[0]) - 1)
    for index in range(len(keys)):
        gains[index] *= of_samples[np.uint64(keys[index]) & sample_mask]


@njit(nogil=True, cache=True)
def write_ids(
    keys: Any, gains: Any, shifts: Any, in_stack: Any, sizes: Any, per_row: int, first_row: int, buffers: Any
) -> None:  # fmt: skip
    """Write stacks into rows of their buffers from ``first_row`` on.

    Dims: in_stack [K, T, 2] as in ``_Joined``, sizes [K, T, partitions]; ``buffers`` [K, 5] are the addresses of
    embedding ids, sample ids, gains and what is filled, and a row's capacity: 0 for a stack that is not written.
    """
    begin, rows = 0, sizes.shape[2] // per_row
    for stack in range(len(sizes)):
        end, capacity = begin + sizes[stack].sum(), buffers[stack, 4]
        if capacity > 0:
            behind = (first_row + rows) * capacity
            _write_stack(
                keys[begin:end], gains[begin:end], shifts, in_stack[stack], sizes[stack], per_row,
                carray(_pointer(buffers[stack, 3]), (first_row + rows,), np.int64)[first_row:],
                first_row * capacity, capacity,
                carray(_pointer(buffers[stack, 0]), (behind,), np.int32),
                carray(_pointer(buffers[stack, 1]), (behind,), np.int32),
                carray(_pointer(buffers[stack, 2]), (behind,), np.float32),
            )  # fmt: skip
        begin = end


@njit(nogil=True, cache=True)
def _write_stack(
    keys: Any, gains: Any, shifts: Any, in_stack: Any, sizes: Any, per_row: int, filled: Any, origin: int,
    capacity: int, ids_out: Any, samples_out: Any, gains_out: Any,
) -> None:  # fmt: skip
    """Write rows of ``per_row`` partitions one after the other, padding, and padding over what was there before."""
    shift, row_mask = np.uint32(shifts[0]), np.uint32((1 << (shifts[1] - shifts[0])) - 1)
    low = np.uint32((1 << shifts[0]) - 1)
    source: Any = 0
    for row in range(len(filled)):
        begin = origin + row * capacity
        to = begin
        for partition in range(row * per_row, (row + 1) * per_row):
            for table in range(len(in_stack)):
                count = sizes[table, partition]
                row_offset, first_sample = np.uint32(in_stack[table, 0]), np.uint32(in_stack[table, 1])
                from_, into = np.uint64(source), np.uint64(to)
                for step in range(count):
                    index = np.uint64(step)
                    key = keys[from_ + index]
                    ids_out[into + index] = (np.uint32(key >> shift) & row_mask) + row_offset
                    samples_out[into + index] = (np.uint32(key) & low) + first_sample
                    gains_out[into + index] = gains[from_ + index]
                to += count
                source += count
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
