"""What sorts ids and writes them: NumPy, or numba where it is installed and wanted."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import Buffers, Chunk, Space, collect, emit
from rooftop.embed.keys import Merged, merge
from rooftop.embed.lookups import TableBatch
from rooftop.embed.stack_sort import SortedStack, emit_stack, sort_stack
from rooftop.errors import RooftopError


class Found(Protocol):
    """Sorted and merged ids of a stack for some sources.

    Dims: T tables, G sources, C destinations. sizes [T, G, C] ids; uniques [G, C] and table_uniques [T, G] rows.
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
    """``Found``, table by table."""

    tables: Sequence[TableBatch]
    merged: Sequence[Merged]
    sizes: NDArray[np.int64]
    uniques: NDArray[np.int64]
    table_uniques: NDArray[np.int64]

    @classmethod
    def of(cls, tables: Sequence[TableBatch], merged: Sequence[Merged]) -> MergedTables:
        """With the sizes of the tables side by side; those of one alone are not copied."""
        if len(merged) == 1:
            own = merged[0].uniques
            sizes = merged[0].sizes[None]
            return cls(tables=tables, merged=merged, sizes=sizes, uniques=own, table_uniques=own.sum(axis=1)[None])
        uniques = np.stack([one.uniques for one in merged])
        return cls(
            tables=tables,
            merged=merged,
            sizes=np.stack([one.sizes for one in merged]),
            uniques=uniques.sum(axis=0),
            table_uniques=uniques.sum(axis=2),
        )


class Kernels(Protocol):
    """Sorting, and writing what was sorted.

    ``worth_a_call``: the fewest ids of a table that repay the calls, and of a part on average that repay a thread.
    """

    worth_a_call: int

    def sort(self, tables: Sequence[TableBatch], first: int, last: int, masked: bool) -> Found:
        """The ids that sources ``first`` to ``last`` look up; see ``keys.merge``."""

    def emit(self, found: Any, buffers: Buffers, first: int, per_row: int) -> None:
        """Write them into a stack's buffers; see ``emit.emit``."""


class NumpyKernels:
    """The kernels in NumPy."""

    worth_a_call = 30_000

    def __init__(self) -> None:
        self._spaces = threading.local()

    def sort(self, tables: Sequence[TableBatch], first: int, last: int, masked: bool) -> Found:
        """See ``Kernels``. What is found is to be written before the thread sorts again."""
        together = None if masked else sort_stack(tables, first, last, self._space())
        return self._by_table(tables, first, last, masked) if together is None else together

    def emit(self, found: Found, buffers: Buffers, first: int, per_row: int) -> None:
        """See ``Kernels``."""
        if isinstance(found, SortedStack):
            emit_stack(found, buffers, first, per_row)
        elif isinstance(found, MergedTables):
            emit(self._collect(found, counted=False), buffers, first, per_row)

    def chunk(self, tables: Sequence[TableBatch], first: int, last: int, masked: bool) -> Chunk:
        """The ids that sources ``first`` to ``last`` look up with their counts, to choose from."""
        return self._collect(self._by_table(tables, first, last, masked), counted=True)

    def _by_table(self, tables: Sequence[TableBatch], first: int, last: int, masked: bool) -> MergedTables:
        merged = [merge(one.table.layout, one.features, one.gains, first, last, masked) for one in tables]
        return MergedTables.of(tables, merged)

    def _space(self) -> Space:
        """The thread's own."""
        if not hasattr(self._spaces, "own"):
            self._spaces.own = Space()
        found: Space = self._spaces.own
        return found

    def _collect(self, found: MergedTables, *, counted: bool) -> Chunk:
        parts = [
            (one.table.layout, merged, one.table.first_sample)
            for one, merged in zip(found.tables, found.merged, strict=True)
        ]
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
