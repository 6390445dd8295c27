"""Limits of the buffers that SparseCores are compiled with, and what batches were seen to need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rooftop.errors import RooftopError
from rooftop.models.tables_stacking import ALIGNMENT, Stacking, padded


@dataclass(frozen=True, kw_only=True)
class StackLimits:
    """What the SparseCores are compiled for: ids, and different rows, of a *partition*; and ids of a buffer.

    A partition is what one SparseCore looks up on another. ``buffer`` counts the ids of one SparseCore, all
    partitions, each padded to a multiple of 8.
    """

    max_ids: int
    max_unique_ids: int
    buffer: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31:
                raise RooftopError(f"limits.{name}", value, "a whole number from 1 to 2147483647")
        if self.max_unique_ids > self.max_ids:
            raise RooftopError("limits.max_unique_ids", self.max_unique_ids, f"at most max_ids, {self.max_ids}")
        if self.buffer % ALIGNMENT:
            raise RooftopError("limits.buffer", self.buffer, f"a multiple of {ALIGNMENT}")


Limits = Mapping[str, StackLimits]


def full_buffer(max_ids: int, cores: int) -> int:
    """A buffer in which every one of ``cores`` partitions may be full."""
    return padded(max_ids, ALIGNMENT) * cores


def check_limits(limits: Limits, stacking: Stacking) -> None:
    """Raises RooftopError unless there are limits for each stack and for nothing else."""
    names = [stack.name for stack in stacking.stacks]
    for name in names:
        if name not in limits:
            raise RooftopError("limits", f"none for stack {name}", f"limits for each stack: {', '.join(names)}")
    for name in limits:
        if name not in names:
            raise RooftopError("limits", f"limits for {name}", f"limits for the stacks {', '.join(names)}")


@dataclass(frozen=True, kw_only=True)
class StackStatistics:
    """What a stack needs, of one batch or of many (then the most of any).

    Dims: D devices of the host, C SparseCores, P of a device. max_ids and max_unique_ids [D, C]: the fullest partition
    that a SparseCore of the device has for a destination, before anything is dropped; buffer [D, P], padded;
    table_ids and table_unique_ids: by table, the most of one SparseCore. ``ids`` merged ids and ``dropped`` ids in all.
    """

    max_ids: NDArray[np.int64]
    max_unique_ids: NDArray[np.int64]
    buffer: NDArray[np.int64]
    table_ids: Mapping[str, int]
    table_unique_ids: Mapping[str, int]
    ids: int
    dropped: int

    def merged(self, other: StackStatistics) -> StackStatistics:
        """Of both: the larger of each, and the sums of ids and dropped ids."""
        return StackStatistics(
            max_ids=np.maximum(self.max_ids, other.max_ids),
            max_unique_ids=np.maximum(self.max_unique_ids, other.max_unique_ids),
            buffer=np.maximum(self.buffer, other.buffer),
            table_ids={name: max(count, other.table_ids[name]) for name, count in self.table_ids.items()},
            table_unique_ids={
                name: max(count, other.table_unique_ids[name]) for name, count in self.table_unique_ids.items()
            },
            ids=self.ids + other.ids,
            dropped=self.dropped + other.dropped,
        )


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """What the stacks of a model need; ids out of range, by feature; the most minibatches; batches seen."""

    stacks: Mapping[str, StackStatistics]
    out_of_range: Mapping[str, int]
    minibatches: int = 1
    batches: int = 1

    def merged(self, other: Statistics) -> Statistics:
        """Of both: see ``StackStatistics.merged``."""
        return Statistics(
            stacks={name: one.merged(other.stacks[name]) for name, one in self.stacks.items()},
            out_of_range={name: count + other.out_of_range[name] for name, count in self.out_of_range.items()},
            minibatches=max(self.minibatches, other.minibatches),
            batches=self.batches + other.batches,
        )
