"""What sorts ids and writes them: NumPy, or numba where it is installed and wanted."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError
from rooftop.embed.emit import Buffers, Chunk, collect, emit
from rooftop.embed.keys import Merged, merge
from rooftop.embed.lookups import TableBatch
from rooftop.embed.space import Space
from rooftop.embed.stack_sort import SortedStacks, StackIds, prepare, sort_stacks
from rooftop.embed.stack_write import emit_stacks


class Found(Protocol):
    """Sorted and merged ids of stacks, which have equally many tables, for some sources.

    Dims: K stacks, T tables of each, G sources, C destinations. sizes [K, T, G, C] ids; uniques [K, G, C] and
    table_uniques [K, T, G] rows.
    """

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Ids."""

    @property
    def uniques(self) -> NDArray[np.int64]:
        """Different rows of partitions."""

    @property
    def table_uniques(self) -> NDArray[np.int64]:
        """Different rows of tables."""


@dataclass(frozen=True, kw_only=True)
class MergedTables:
    """``Found``, table by table; ``merged`` by stack."""

    stacks: Sequence[Sequence[TableBatch]]
    merged: Sequence[Sequence[Merged]]
    sizes: NDArray[np.int64]
    uniques: NDArray[np.int64]
    table_uniques: NDArray[np.int64]

    @classmethod
    def of(cls, stacks: Sequence[Sequence[TableBatch]], merged: Sequence[Sequence[Merged]]) -> MergedTables:
        """With the sizes of the tables side by side."""
        sizes = np.array([[one.sizes for one in own] for own in merged])
        uniques = np.array([[one.uniques for one in own] for own in merged])
        return cls(
            stacks=stacks,
            merged=merged,
            sizes=sizes,
            uniques=uniques.sum(axis=1),
            table_uniques=uniques.sum(axis=3),
        )


class Prepared(Protocol):
    """What a stack looks up, ready to be sorted."""

    @property
    def tables(self) -> Sequence[TableBatch]:
        """The stack's tables."""

    @property
    def ids(self) -> int:
        """How many it looks up."""

    @property
    def at_once(self) -> int:
        """How many ids, of all stacks that are sorted at once, are worth the calls that sort and write them."""

    @property
    def most_sources(self) -> int:
        """How many sources of it may be sorted at once."""


class Kernels(Protocol):
    """Sorting, and writing what was sorted."""

    def prepare(self, tables: Sequence[TableBatch], masked: bool) -> Prepared:
        """What a stack looks up, before parts of it are sorted. ``masked``: see ``keys.merge``."""

    def sort(self, stacks: Sequence[Any], first: int, last: int) -> Found:
        """The ids that sources ``first`` to ``last`` look up in the tables of each stack; see ``keys.merge``.

        The stacks are prepared, as many tables in each, by the same kernels. What is found is to be written before the
        thread sorts again.
        """

    def emit(self, found: Any, buffers: Sequence[Buffers | None], first: int, per_row: int) -> None:
        """Write them into the buffers of their stacks, or not where there are none; see ``emit.emit``."""


class NumpyKernels:
    """The kernels in NumPy."""

    def __init__(self) -> None:
        self._spaces = threading.local()

    def prepare(self, tables: Sequence[TableBatch], masked: bool) -> StackIds:
        """See ``Kernels``."""
        return prepare(tables, masked)

    def sort(self, stacks: Sequence[StackIds], first: int, last: int) -> Found:
        """See ``Kernels``."""
        together = sort_stacks(stacks, first, last, self._space())
        if together is None:
            masked = any(stack.masked for stack in stacks)
            return self._by_table([stack.tables for stack in stacks], first, last, masked)
        return together

    def emit(self, found: Found, buffers: Sequence[Buffers | None], first: int, per_row: int) -> None:
        """See ``Kernels``."""
        if isinstance(found, SortedStacks):
            emit_stacks(found, buffers, first, per_row, self._space())
        elif isinstance(found, MergedTables):
            for tables, merged, own in zip(found.stacks, found.merged, buffers, strict=True):
                if own is not None:
                    emit(self._collect(tables, merged, counted=False), own, first, per_row)

    def chunk(self, tables: Sequence[TableBatch], first: int, last: int, masked: bool) -> Chunk:
        """The ids that sources ``first`` to ``last`` look up in a stack with their counts, to choose from."""
        return self._collect(tables, self._by_table([tables], first, last, masked).merged[0], counted=True)

    def _by_table(self, stacks: Sequence[Sequence[TableBatch]], first: int, last: int, masked: bool) -> MergedTables:
        space = self._space()
        merged = [
            [merge(one.table.layout, one.features, one.gains, first, last, masked, space) for one in tables]
            for tables in stacks
        ]
        return MergedTables.of(stacks, merged)

    def _space(self) -> Space:
        """The thread's own."""
        if not hasattr(self._spaces, "own"):
            self._spaces.own = Space()
        found: Space = self._spaces.own
        return found

    def _collect(self, tables: Sequence[TableBatch], merged: Sequence[Merged], *, counted: bool) -> Chunk:
        parts = [(one.table.layout, own, one.table.first_sample) for one, own in zip(tables, merged, strict=True)]
        return collect(parts, self._space(), counted=counted)


def choose(accelerate: bool | None) -> Kernels:
    """numba's kernels (True), NumPy's (False), or numba's where numba is installed (None). Raises RooftopError."""
    installed = importlib.util.find_spec("numba") is not None
    if accelerate is None:
        accelerate = installed
    if not accelerate:
        return NumpyKernels()
    if not installed:
        raise RooftopError("accelerate", True, "numba to be installed (pip install numba), or NumPy's kernels")
    from rooftop.embed.accelerated import NumbaKernels

    return NumbaKernels()
