"""The kernels in numba: all tables of stacks are sorted in one call and written in another (``loops``).

Keys are those of ``fields``. Ids come in the order of their samples, so that only what is above the row of activations
is sorted, digit by digit from the lowest (each a stable counting sort). A part of the work is in the interpreter only
before and after two calls: other threads wait for its lock.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import Buffers
from rooftop.embed.fields import Fields
from rooftop.embed.kernels import Found, NumpyKernels, Prepared
from rooftop.embed.keys import bits
from rooftop.embed.lookups import TableBatch
from rooftop.embed.loops import DIGIT, sort_ids, write_ids
from rooftop.embed.space import Space

#: Keys are no wider.
_KEY_BITS = 62
#: Ids that are sorted at once, as far as there is a choice: they stay in a core's first caches.
_SORTED_AT_ONCE = 16_000
#: Ids whose arrays stay in a core's caches, and are enough for each call to be worth its while.
_TOGETHER = 400_000


@dataclass(frozen=True, kw_only=True)
class _Joined:
    """Sorted and merged ids of stacks; see ``kernels.Found``.

    Dims: N at least the merged ids; keys, gains [N]; in_stack [K, T, 2], each table's first local row and first row
    of activations.
    """

    fields: Fields
    keys: NDArray[Any]
    gains: NDArray[np.float32]
    in_stack: NDArray[np.int64]
    sizes: NDArray[np.int64]
    uniques: NDArray[np.int64]
    table_uniques: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Described:
    """A stack as the loops read it: see ``loops.sort_ids``. What is ``held`` are the arrays behind its addresses."""

    tables: Sequence[TableBatch]
    ids: int
    features: Sequence[tuple[int, ...]]
    held: Sequence[NDArray[Any]]
    at_once: int
    most_sources: int
    masked: bool


class NumbaKernels:
    """The kernels in numba, for ids that have no weights of their own; the others are NumPy's."""

    def __init__(self) -> None:
        self._numpy = NumpyKernels()
        self._spaces = threading.local()

    def prepare(self, tables: Sequence[TableBatch], masked: bool) -> Prepared:
        """See ``kernels.Kernels``."""
        if any(feature.ids.weights is not None for one in tables for feature in one.features):
            return self._numpy.prepare(tables, masked)
        described: list[tuple[int, ...]] = []
        held: list[NDArray[Any]] = []
        count = 0
        for index, one in enumerate(tables):
            for feature in one.features:
                values, splits = _words(feature.ids.values), _words(feature.ids.row_splits)
                held += [values, splits]
                count += len(values)
                described.append(
                    (
                        values.__array_interface__["data"][0],
                        values.itemsize // 4,
                        splits.__array_interface__["data"][0],
                        splits.itemsize // 4,
                        feature.rows,
                        feature.offset,
                        index,
                        one.table.layout.place.rotation,
                    )
                )
        return _Described(
            tables=tables,
            ids=count,
            features=described,
            held=held,
            at_once=_TOGETHER,
            most_sources=_most_sources(tables),
            masked=masked,
        )

    def sort(self, stacks: Sequence[Any], first: int, last: int) -> Found:
        """See ``kernels.Kernels``."""
        if not isinstance(stacks[0], _Described):
            return self._numpy.sort(stacks, first, last)
        if not hasattr(self._spaces, "own"):
            self._spaces.own = Space()
        found = _sort(stacks, first, last, self._spaces.own)
        if found is None:
            prepared = [self._numpy.prepare(stack.tables, stack.masked) for stack in stacks]
            return self._numpy.sort(prepared, first, last)
        return found

    def emit(self, found: Found, buffers: Sequence[Buffers | None], first: int, per_row: int) -> None:
        """See ``kernels.Kernels``."""
        if isinstance(found, _Joined):
            _emit(found, buffers, first, per_row)
        else:
            self._numpy.emit(found, buffers, first, per_row)


def _most_sources(tables: Sequence[TableBatch]) -> int:
    """All sources, unless not even NumPy's kernels could sort so many at once where keys do not fit here."""
    one, layouts = tables[0].features[0], [each.table.layout for each in tables]
    sources = one.ids.rows // one.rows
    if Fields.of([tables], 1, _KEY_BITS) is not None and all(sources << own.source_shift <= 1 << 64 for own in layouts):
        return sources
    return min(own.most_sources() for own in layouts)


def _fields(stacks: Sequence[_Described], sources: int, ids: int) -> Fields | None:
    """The fields of keys of ``ids`` ids of so many sources; None where one source's take more than _KEY_BITS."""
    tables = [stack.tables for stack in stacks]
    # As few sorts, each of as many sources of a stack, of ids that stay in a core's first caches.
    most = min(max(_SORTED_AT_ONCE * len(stacks) * sources // max(ids, 1), 1), sources)
    at_once = -(-sources // -(-sources // most))
    # Keys of 32 bits where they can be.
    return Fields.of(tables, at_once, 32) or Fields.of(tables, 1, _KEY_BITS)


def _sort(stacks: Sequence[_Described], first: int, last: int, space: Space) -> _Joined | None:
    tables = [one for stack in stacks for one in stack.tables]
    sources, cores = last - first, tables[0].table.layout.cores
    total = sum(
        int(own.ids.row_splits[last * own.rows] - own.ids.row_splits[first * own.rows])
        for one in tables
        for own in one.features
    )
    fields = _fields(stacks, sources, total)
    if fields is None:
        return None
    dtype, name = (np.uint32, "32") if fields.stack <= 32 else (np.uint64, "64")
    keys, gains = space.take("keys" + name, total, dtype), space.take("gains", total, np.float32)
    scale, in_scale = np.empty(0, np.float32), np.zeros(len(tables) + 1, np.int64)
    if any(one.gains is not None for one in tables):
        scales = [scale if one.gains is None else one.gains[first:last].reshape(-1) for one in tables]
        scale, in_scale = np.concatenate(scales), np.cumsum([0, *(len(own) for own in scales)])
    counts = np.zeros((2, len(stacks), len(stacks[0].tables), sources, cores), np.int64)
    sort_ids(
        np.array([feature for stack in stacks for feature in stack.features]),
        np.cumsum([0, *(len(stack.features) for stack in stacks)]),
        np.array([one.table.layout.row_bits if stack.masked else 32 for stack in stacks for one in stack.tables]),
        first,
        np.array([fields.row, fields.table, fields.core, fields.source, fields.stack, fields.sources]),
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
    sizes, uniques = counts
    in_stack = np.array([(one.table.layout.place.offset, one.table.first_sample) for one in tables])
    return _Joined(
        fields=fields,
        keys=keys,
        gains=gains,
        in_stack=in_stack.reshape(len(stacks), -1, 2),
        sizes=sizes,
        uniques=uniques[:, 0] if uniques.shape[1] == 1 else uniques.sum(axis=1),
        table_uniques=uniques.sum(axis=3),
    )


def _words(values: NDArray[Any]) -> NDArray[Any]:
    """Ids of one or two words of 32 bits each, the lower first, one behind the other."""
    if values.itemsize >= 4 and values.dtype.isnative and values.flags.c_contiguous:
        return values
    return np.ascontiguousarray(values, np.int64)


def _emit(found: _Joined, buffers: Sequence[Buffers | None], first: int, per_row: int) -> None:
    stacks, tables, _, cores = found.sizes.shape
    write_ids(
        found.keys,
        found.gains,
        np.array([found.fields.row, found.fields.table]),
        found.in_stack,
        found.sizes.reshape(stacks, tables, -1),
        per_row * cores,
        first // per_row,
        np.array(
            [
                (0,) * 5 if own is None else (*own.addresses, own.embedding_ids.size // len(own.filled))
                for own in buffers
            ]
        ),
    )
