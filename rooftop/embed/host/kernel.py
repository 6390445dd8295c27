"""Numba kernel of host preprocessing: the sort keys and buffers of ``reference``, bit for bit, without Python's lock.

Two compiled loops do the work: ``sort_and_merge`` makes keys, sorts them digit by digit (stable counting sorts, lowest
digit first) and merges duplicates, ``write_rows`` writes buffers. Ids come in the order of their samples, so only the
bits above the sample are sorted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from ctypes import c_void_p
from typing import NamedTuple, Protocol, TypeVar, cast

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray
from numpy.typing import NDArray

from rooftop.core.rounding import ceil_div
from rooftop.embed.host.buffers import NO_GAIN, NO_ID, Buffers
from rooftop.embed.host.lookups import StackIds
from rooftop.embed.host.reference import KeyFields, Keys, SortedIds, SortedPart, bits, key_dtype
from rooftop.models.embedding_tables.stacking import ALIGNMENT

#: Most bits of a digit: its counts stay in a core's first cache.
_DIGIT_BITS = 13
#: Ids that are sorted at once, as far as there is a choice: they stay in a core's first caches.
_SORTED_AT_ONCE = 16_000

#: A feature: the addresses of its ids, row splits and weights (0: none), the 32-bit words of an id and of a split, and
#: its rows of activations on each source. ``head`` has the key's table and first row of activations, ``rotation`` is
#: the table's, and ``row_mask`` has the bits of a local row. Addresses, as numba takes no list of arrays.
_FEATURE = np.dtype(
    [(name, np.int64) for name in ("ids", "splits", "weights", "id_words", "split_words", "rows", "head")]
    + [(name, np.uint64) for name in ("rotation", "row_mask")]
)
#: Features and tables of a stack: where they begin and end among those of all stacks.
_STACK = np.dtype([(name, np.int64) for name in ("first_feature", "last_feature", "first_table", "last_table")])
#: Where a table begins in its stack: the first local row and the first row of activations.
_TABLE = np.dtype([("first_row", np.uint32), ("first_sample", np.uint32)])

_Number = TypeVar("_Number", bound=np.generic)


class Merged(NamedTuple):
    """Output of ``sort_and_merge``, see ``SortedIds``: ``sizes`` [2, T, G, C] has sizes and uniques of all tables.

    ``weights`` (or none) are sorted with their keys but not merged.
    """

    keys: Keys
    counts: NDArray[np.int32]
    weights: NDArray[np.float32]
    sizes: NDArray[np.int64]


class SortSpace(NamedTuple):
    """Arrays that ``sort_and_merge`` works in."""

    keys: Keys
    other_keys: Keys
    weights: NDArray[np.float32]
    other_weights: NDArray[np.float32]
    digit_counts: NDArray[np.uint32]
    ends: NDArray[np.int32]
    last_of_run: NDArray[np.int64]
    rows_of_run: NDArray[np.int64]


class Scratch(threading.local):
    """Arrays of one thread that are written over and over: fresh ones cost more in page faults than in the writes."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[np.uint64]] = {}

    def take(self, name: str, count: int, dtype: type[_Number]) -> NDArray[_Number]:
        """An array of ``count`` elements with any values, free until ``name`` is taken again."""
        words = count * np.dtype(dtype).itemsize // 8 + 1
        array = self._arrays.get(name)
        if array is None or len(array) < words:
            array = self._arrays[name] = np.empty(words + words // 4, np.uint64)
        return array.view(dtype)[:count]


class NumbaKernel:
    """Sort ids and write them with numba. Sorted ids must be written before their thread sorts again."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    def sort(self, stacks: Sequence[StackIds], first: int, last: int) -> SortedPart:
        """Sort and merge the ids that sources ``first`` to ``last`` (exclusive) look up in each stack."""
        take, cores, sources = self._scratch.take, stacks[0].cores, last - first
        spans = [feature.span(first, last) for stack in stacks for _, feature in stack.features]
        total = sum(end - begin for begin, end in spans)
        # As few sorts as keep their ids in a core's first caches, each of equally many sources of a stack.
        most = min(max(_SORTED_AT_ONCE * len(stacks) * sources // max(total, 1), 1), sources)
        fields = KeyFields.of([stack.layouts for stack in stacks], cores, ceil_div(sources, ceil_div(sources, most)))
        weighted = any(stack.weighted for stack in stacks)
        key = key_dtype(fields)
        weights_count, runs = total if weighted else 0, fields.sources << (fields.source - fields.table)
        space = SortSpace(
            keys=take("keys", total, key),
            other_keys=take("other keys", total, key),
            weights=take("weights", weights_count, np.float32),
            other_weights=take("other weights", weights_count, np.float32),
            digit_counts=take("digit counts", 2 << _DIGIT_BITS, np.uint32).reshape(2, -1),
            ends=take("ends", total, np.int32),
            last_of_run=take("last of run", runs, np.int64),
            rows_of_run=take("rows of run", runs, np.int64),
        )
        tables = sum(len(stack.tables) for stack in stacks)
        merged = Merged(
            keys=take("merged keys", total, key),
            counts=take("counts", total, np.int32),
            weights=take("sorted weights", weights_count, np.float32),
            sizes=np.zeros((2, tables, sources, cores), np.int64),
        )
        stack_ends = sort_and_merge(*_records(stacks, fields), first, fields, space, merged).tolist()
        weights = None
        if weighted:
            # NumPy adds up to eight partial sums of a long run: to give the reference's bits, it adds here too.
            begins = np.cumsum(merged.counts[: stack_ends[-1]])
            begins -= merged.counts[: stack_ends[-1]]
            weights = np.add.reduceat(merged.weights, begins) if total else merged.weights
        ids, begin, table = list[SortedIds](), 0, 0
        for stack, end in zip(stacks, stack_ends, strict=True):
            table_columns = slice(table, table + len(stack.tables))
            ids.append(
                SortedIds(
                    layouts=stack.layouts,
                    fields=fields,
                    keys=merged.keys[begin:end],
                    counts=merged.counts[begin:end],
                    weights=None if weights is None else weights[begin:end],
                    combiner=None if stack.gains is None else stack.gains[first:last],
                    sizes=merged.sizes[0, table_columns],
                    uniques=merged.sizes[1, table_columns],
                )
            )
            begin, table = end, table_columns.stop
        return SortedPart(stacks=ids, sizes=merged.sizes[0], uniques=merged.sizes[1])

    def write(self, ids: SortedIds, buffers: Buffers, first: int, per_row: int) -> None:
        """Write ids, whose first source is ``first``, where ``per_row`` sources share a row of the buffers."""
        rows = buffers.rows(first // per_row, (first + ids.sizes.shape[1]) // per_row)
        tables = np.array([(layout.place.offset, layout.first_sample) for layout in ids.layouts], _TABLE)
        combiner = np.empty((0, 0), np.float32) if ids.combiner is None else ids.combiner
        gains = ids.counts if ids.weights is None else ids.weights
        write_rows(ids.keys, gains, combiner, ids.sizes, tables, ids.fields, per_row, rows)


def _records(stacks: Sequence[StackIds], fields: KeyFields) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Records of _FEATURE and of _STACK."""
    features, of_stacks, tables = list[tuple[int, ...]](), list[tuple[int, ...]](), 0
    for stack in stacks:
        first_feature = len(features)
        for table, feature in stack.features:
            place = stack.tables[table].layout.place
            head = (table << fields.table) + feature.offset
            row_mask = (1 << (bits(place.rows) if stack.unchecked else 32)) - 1
            features.append((*feature.addresses, feature.rows, head, place.rotation, row_mask))
        of_stacks.append((first_feature, len(features), tables, tables + len(stack.tables)))
        tables += len(stack.tables)
    return np.array(features, _FEATURE), np.array(of_stacks, _STACK)


class _Builder(Protocol):
    """The method of llvmlite's IRBuilder that ``_to_pointer`` calls."""

    def inttoptr(self, value: object, kind: object) -> object:
        """Turn a number into a pointer."""


def _to_pointer(typing_context: object, address: object) -> tuple[object, Callable[..., object]]:
    """A pointer to an address, for ``carray``."""

    def generate(context: object, builder: _Builder, signature: object, arguments: Sequence[object]) -> object:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), generate


_pointer = cast("Callable[[int], c_void_p]", intrinsic(_to_pointer))


@njit(nogil=True, cache=True)
def sort_and_merge(
    features: NDArray[np.void],
    stacks: NDArray[np.void],
    first_source: int,
    fields: KeyFields,
    space: SortSpace,
    merged: Merged,
) -> NDArray[np.int64]:
    """Sort and merge the ids of each stack into ``merged``; return where each stack's merged ids end [K].

    ``features`` and ``stacks`` are records of _FEATURE and _STACK. ``merged`` begins with ``first_source``.
    """
    sources, cores = merged.sizes.shape[2:]
    stack_ends = np.empty(len(stacks), np.int64)
    begin, done = 0, 0
    for stack in range(len(stacks)):
        tables = range(stacks[stack]["first_table"], stacks[stack]["last_table"])
        own_features = range(stacks[stack]["first_feature"], stacks[stack]["last_feature"])
        for first in range(0, sources, fields.sources):
            last, count = min(first + fields.sources, sources), 0
            for source in range(first, last):
                for index in own_features:
                    feature = features[index]
                    head = ((source - first) << fields.source) + feature["head"]
                    keys, weights = space.keys[count:], space.weights[count:]
                    count += _fill(feature, first_source + source, head, fields, keys, weights)
            if count == 0:
                continue
            _sort(count, fields, space)
            if len(merged.weights):
                merged.weights[done : done + count] = space.weights[:count]
            done += count
            end = _merge(space.keys[:count], fields, begin, space, merged)
            # Runs follow each other; each begins where the one before ended.
            run_begin, rows_before = begin, 0
            for source in range(first, last):
                for core in range(cores):
                    run = ((source - first) << (fields.source - fields.table)) | (core << (fields.core - fields.table))
                    for table in tables:
                        if space.last_of_run[run] >= 0:
                            run_end, rows = space.last_of_run[run] + 1, space.rows_of_run[run]
                            merged.sizes[0, table, source, core] = run_end - run_begin
                            merged.sizes[1, table, source, core] = rows - rows_before
                            run_begin, rows_before = run_end, rows
                        run += 1
            begin = end
        stack_ends[stack] = begin
    return stack_ends


@njit(nogil=True, cache=True)
def _fill(feature: np.void, source: int, head: int, fields: KeyFields, keys: Keys, weights: NDArray[np.float32]) -> int:
    """Write keys, and weights if there is an array for them, of the ids of a feature and a source; return their number.

    ``head`` is the key of the first row of activations without destination and local row.
    """
    cores, rotation, row_mask = np.uint64(fields.cores), feature["rotation"], feature["row_mask"]
    row_shift, core_shift, core_mask = np.uint64(fields.row), np.uint64(fields.core), cores - np.uint64(1)
    power_of_two = cores & core_mask == 0
    core_bits = np.uint64(fields.source - fields.core)
    # The lower word of a split is all of it.
    first, rows, split_words, one_word = (
        source * feature["rows"],
        feature["rows"],
        feature["split_words"],
        feature["id_words"] == 1,
    )
    all_splits = carray(_pointer(feature["splits"]), ((first + rows + 1) * split_words,), np.uint32)
    splits = all_splits[first * split_words :: split_words]
    begin, end = np.int64(splits[0]), np.int64(splits[rows])
    ids = carray(_pointer(feature["ids"]), (end * feature["id_words"],), np.uint32)
    for row in range(rows):
        # Unsigned indices need no check for being negative; only then does LLVM vectorise.
        of_row, first_id = np.uint64(head + row), np.uint64(splits[row])
        to = first_id - np.uint64(begin)
        for step in range(np.int64(splits[row + 1]) - np.int64(splits[row])):
            index = first_id + np.uint64(step)
            value = np.uint64(ids[index] if one_word else ids[index * np.uint64(2)])
            if power_of_two:
                local = value >> core_bits
                core = (value + rotation) & core_mask
            else:
                local = np.uint64(np.uint32(value) // np.uint32(cores))
                core = value - local * cores + rotation
                if core >= cores:
                    core -= cores
            local &= row_mask
            keys[to + np.uint64(step)] = (core << core_shift) | (local << row_shift) | of_row
    if len(weights):
        part_weights = weights[: end - begin]
        if feature["weights"] == 0:
            part_weights[:] = 1
        else:
            part_weights[:] = carray(_pointer(feature["weights"]), (int(end),), np.float32)[begin:]
    return int(end - begin)


@njit(nogil=True, cache=True)
def _sort(count: int, fields: KeyFields, space: SortSpace) -> None:
    """Sort the first ``count`` keys of ``space``, and their weights, by the bits above the sample.

    Two digits at a time: one pass counts both, and two moves (the lower digit first) end in the array they began in.
    """
    keys, other_keys = space.keys[:count], space.other_keys[:count]
    weights, other_weights = space.weights[:count], space.other_weights[:count]
    low_counts, high_counts = space.digit_counts[0], space.digit_counts[1]
    shift = fields.row
    pairs = (fields.bits - shift + 2 * _DIGIT_BITS - 1) // (2 * _DIGIT_BITS)
    for pair in range(pairs):
        pair_bits = (fields.bits - shift + pairs - pair - 1) // (pairs - pair)
        low_bits = (pair_bits + 1) // 2
        high_bits = pair_bits - low_bits
        low, high = np.uint64(shift), np.uint64(shift + low_bits)
        low_mask, high_mask = np.uint64((1 << low_bits) - 1), np.uint64((1 << high_bits) - 1)
        low_counts[: 1 << low_bits] = 0
        high_counts[: 1 << high_bits] = 0
        for index in range(count):
            key = keys[index]
            low_counts[(key >> low) & low_mask] += np.uint32(1)
            high_counts[(key >> high) & high_mask] += np.uint32(1)
        _move(keys, weights, low, low_mask, low_counts, other_keys, other_weights)
        _move(other_keys, other_weights, high, high_mask, high_counts, keys, weights)
        shift += pair_bits


@njit(nogil=True, cache=True)
def _move(
    keys: Keys,
    weights: NDArray[np.float32],
    shift: np.uint64,
    mask: np.uint64,
    digit_counts: NDArray[np.uint32],
    sorted_keys: Keys,
    sorted_weights: NDArray[np.float32],
) -> None:
    """Move keys and weights into the order of a digit, which has been counted; equal digits keep their order."""
    start = np.uint32(0)
    for value in range(np.int64(mask) + 1):
        count = digit_counts[value]
        digit_counts[value] = start
        start += count
    weighted = len(weights) > 0
    for index in range(len(keys)):
        key = keys[index]
        digit = (key >> shift) & mask
        place = digit_counts[digit]
        sorted_keys[np.uint64(place)] = key
        if weighted:
            sorted_weights[np.uint64(place)] = weights[index]
        digit_counts[digit] = place + np.uint32(1)


@njit(nogil=True, cache=True)
def _merge(sorted_keys: Keys, fields: KeyFields, begin: int, space: SortSpace, merged: Merged) -> int:
    """Merge equal keys into ``merged`` from ``begin`` on; return where they end.

    For each run (source, destination and table) ``space`` gets the last merged id and the rows so far. They are written
    for every id: no core can predict a branch on whether an id repeats the one before.
    """
    sample_mask, of_run = np.uint64((1 << fields.row) - 1), np.uint64(fields.table)
    keys, ends, last_of_run, rows_of_run = merged.keys, space.ends, space.last_of_run, space.rows_of_run
    last_of_run[:] = -1
    end, last = np.uint64(begin), sorted_keys[0]
    rows = np.uint64(1)
    for index in range(len(sorted_keys)):
        key = sorted_keys[index]
        end += np.uint64(key != last)
        rows += np.uint64(np.uint64(key ^ last) > sample_mask)
        keys[end] = key
        ends[end] = index
        run = np.uint64(key) >> of_run
        last_of_run[run] = end
        rows_of_run[run] = rows
        last = key
    count = int(end) + 1 - begin
    own_counts, own_ends = merged.counts[begin : begin + count], ends[begin : begin + count]
    own_counts[0] = own_ends[0] + 1
    for index in range(1, count):
        own_counts[index] = own_ends[index] - own_ends[index - 1]
    return begin + count


@njit(nogil=True, cache=True)
def write_rows(
    keys: Keys,
    gains: NDArray[np.int32] | NDArray[np.float32],
    combiner: NDArray[np.float32],
    sizes: NDArray[np.int64],
    stack_tables: NDArray[np.void],
    fields: KeyFields,
    per_row: int,
    target: Buffers,
) -> None:
    """Write ids, padding and row pointers, and padding over older ids.

    ``combiner`` [G, samples] are gains of samples, or empty; ``sizes`` [T, G, C] ids; ``stack_tables`` [T] records of
    _TABLE. ``per_row`` sources share a row.
    """
    tables, _, cores = sizes.shape
    row_shift, row_mask = np.uint32(fields.row), np.uint32((1 << (fields.table - fields.row)) - 1)
    sample_mask = np.uint32((1 << fields.row) - 1)
    first_rows, first_samples = stack_tables["first_row"].copy(), stack_tables["first_sample"].copy()
    begin = 0
    for row in range(len(target.filled)):
        ids_out, samples_out, gains_out = target.embedding_ids[row], target.sample_ids[row], target.gains[row]
        pointers, pointer, end = target.row_pointers[row], 0, 0
        for source in range(row * per_row, (row + 1) * per_row):
            for core in range(cores):
                for table in range(tables):
                    count = sizes[table, source, core]
                    first_row, first_sample = first_rows[table], first_samples[table]
                    start, to = np.uint64(begin), np.uint64(end)
                    for step in range(count):
                        index = np.uint64(step)
                        key = keys[start + index]
                        ids_out[to + index] = (np.uint32(key >> row_shift) & row_mask) + first_row
                        samples_out[to + index] = (np.uint32(key) & sample_mask) + first_sample
                        gains_out[to + index] = gains[start + index]
                    if len(combiner):
                        of_samples = combiner[source]
                        for step in range(count):
                            index = to + np.uint64(step)
                            gains_out[index] *= of_samples[np.uint64(samples_out[index])]
                    begin += count
                    end += count
                pointers[pointer] = end
                pointer += 1
                last = end + -end % ALIGNMENT
                for pad in range(end, last):
                    ids_out[pad] = NO_ID
                    samples_out[pad] = NO_ID
                    gains_out[pad] = NO_GAIN
                end = last
            # At least ALIGNMENT pointers belong to a source; the rest point to where the padding ends.
            for _ in range(cores, ALIGNMENT):
                pointers[pointer] = end
                pointer += 1
        pointers[pointer:] = end
        stale = target.filled[row]
        ids_out[end:stale] = NO_ID
        samples_out[end:stale] = NO_ID
        gains_out[end:stale] = NO_GAIN
        target.filled[row] = end
