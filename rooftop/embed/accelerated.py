"""The kernels in numba: all tables of a stack are sorted in one call and written in another (``loops``).

A key says, from the highest bits on, source, destination, table, local row and row of activations: sorted keys have
the buffer's order. Ids come in the order of their samples, so that only what is above the row of activations is
sorted, digit by digit from the lowest (each a stable counting sort). A part of the work is in the interpreter only
before and after two calls: other threads wait for its lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import Buffers, Space
from rooftop.embed.kernels import Found, NumpyKernels
from rooftop.embed.keys import bits
from rooftop.embed.lookups import TableBatch
from rooftop.embed.loops import DIGIT, sort_ids, write_ids

#: Ids that are sorted at once, as far as there is a choice: they stay in a core's cache.
_SORTED_AT_ONCE = 16_000


@dataclass(frozen=True, kw_only=True)
class _Fields:
    """Where the fields of a key begin, the bits of a key, and how many sources are sorted at once."""

    row: int
    table: int
    core: int
    source: int
    used: int
    sources: int

    @classmethod
    def of(cls, tables: Sequence[TableBatch], sources: int, ids: int) -> _Fields | None:
        """For ``ids`` ids of so many sources; None if 62 bits cannot tell those of one source apart."""
        layouts = [one.table.layout for one in tables]
        row = max(layout.sample_bits for layout in layouts)
        table = row + max(layout.row_bits for layout in layouts)
        core = table + bits(len(tables))
        source = core + bits(layouts[0].cores)
        if source > 62:
            return None
        most = min(max(_SORTED_AT_ONCE * sources // max(ids, 1), 1), 1 << max(32 - source, 0), sources)
        # As few sorts, each of as many sources.
        at_once = -(-sources // -(-sources // most))
        return cls(row=row, table=table, core=core, source=source, used=source + bits(at_once), sources=at_once)


@dataclass(frozen=True, kw_only=True)
class _Joined:
    """Sorted and merged ids of a stack, as the buffers have them; see ``kernels.Found``.

    Dims: N at least the merged ids; keys, gains [N]; in_stack [T, 2], each table's first local row and first row of
    activations.
    """

    fields: _Fields
    keys: NDArray[Any]
    gains: NDArray[np.float32]
    in_stack: NDArray[np.int64]
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
        if not hasattr(self._spaces, "own"):
            self._spaces.own = Space()
        weighted = any(feature.ids.weights is not None for one in tables for feature in one.features)
        found = None if weighted else _sort(tables, first, last, masked, self._spaces.own)
        return self._numpy.sort(tables, first, last, masked) if found is None else found

    def emit(self, found: Found, buffers: Buffers, first: int, per_row: int) -> None:
        """See ``kernels.Kernels``."""
        if isinstance(found, _Joined):
            _emit(found, buffers, first, per_row)
        else:
            self._numpy.emit(found, buffers, first, per_row)


def _sort(tables: Sequence[TableBatch], first: int, last: int, masked: bool, space: Space) -> _Joined | None:
    sources, cores = last - first, tables[0].table.layout.cores
    described, all_splits, held, at, total = list[tuple[int, ...]](), [], [], 0, 0
    for index, one in enumerate(tables):
        layout = one.table.layout
        for feature in one.features:
            splits = feature.ids.row_splits[first * feature.rows : last * feature.rows + 1]
            values = _words(feature.ids.values)
            row_mask = (1 << (layout.row_bits if masked else 32)) - 1
            address, words = values.__array_interface__["data"][0], values.itemsize // 4
            described.append((address, words, at, feature.rows, feature.offset, index, layout.place.rotation, row_mask))
            all_splits.append(splits)
            # An address keeps nothing alive.
            held.append(values)
            at += len(splits)
            total += int(splits[-1]) - int(splits[0])
    fields = _Fields.of(tables, sources, total)
    if fields is None:
        return None
    dtype, name = (np.uint32, "32") if fields.used <= 32 else (np.uint64, "64")
    keys, gains = space.take("keys" + name, total, dtype), space.take("gains", total, np.float32)
    scale, in_scale = np.empty(0, np.float32), np.zeros(len(tables) + 1, np.int64)
    if any(one.gains is not None for one in tables):
        scales = [scale if one.gains is None else one.gains[first:last].reshape(-1) for one in tables]
        scale, in_scale = np.concatenate(scales), np.cumsum([0, *(len(own) for own in scales)])
    counts = np.zeros((2, len(tables), sources, cores), np.int64)
    splits = all_splits[0] if len(all_splits) == 1 else np.concatenate(all_splits)
    sort_ids(
        np.array(described),
        splits.astype(np.int64, copy=False),
        np.array([fields.row, fields.table, fields.core, fields.source, fields.used, fields.sources]),
        bits(cores) if cores & (cores - 1) == 0 else -1,
        # What is sorted at once may be all.
        space.take("sorted" + name, 2 * total, dtype),
        space.take("digits", 1 << DIGIT, np.uint32),
        space.take("ends", total, np.int32),
        scale,
        in_scale,
        keys,
        gains,
        counts,
    )
    del held
    return _Joined(
        fields=fields,
        keys=keys,
        gains=gains,
        in_stack=np.array([(one.table.layout.place.offset, one.table.first_sample) for one in tables]),
        sizes=counts[0],
        uniques=counts[1, 0] if len(tables) == 1 else counts[1].sum(axis=0),
        table_uniques=counts[1].sum(axis=2),
    )


def _words(values: NDArray[Any]) -> NDArray[Any]:
    """Ids of one or two words of 32 bits each, the lower first, one behind the other."""
    if values.itemsize >= 4 and values.dtype.isnative and values.flags.c_contiguous:
        return values
    return np.ascontiguousarray(values, np.int64)


def _emit(found: _Joined, buffers: Buffers, first: int, per_row: int) -> None:
    tables, sources, cores = found.sizes.shape
    capacity = buffers.embedding_ids.size // len(buffers.filled)
    write_ids(
        found.keys,
        found.gains,
        np.array([found.fields.row, found.fields.table]),
        found.in_stack,
        found.sizes.reshape(tables, -1),
        per_row * cores,
        buffers.filled[first // per_row : (first + sources) // per_row],
        (first // per_row) * capacity,
        capacity,
        buffers.embedding_ids.reshape(-1),
        buffers.sample_ids.reshape(-1),
        buffers.gains.reshape(-1),
    )
