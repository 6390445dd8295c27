"""Limits of a stack of tables: the sizes of its partitions and buffers, the same on host and devices.

SparseCores allot their memory when they are compiled (the SparseCore deep dive, section 7): a batch has to keep within
these limits. C counts all SparseCores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooftop.core.errors import RooftopError
from rooftop.core.records import Record
from rooftop.core.rounding import next_multiple
from rooftop.models.embedding_tables.stacking import ALIGNMENT, Stacking

#: Buckets of ids by which minibatches are made: a partition has a row pointer for each.
BUCKETS = 64


#: The largest limit: SparseCores count in 32 bits.
LARGEST_LIMIT = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class StackLimits(Record):
    """Limits that a stack's program is compiled for.

    A *partition* is what one SparseCore looks up on another: at most ``max_ids`` ids, a sample's duplicates counted
    once, and ``max_unique_ids`` different rows, in one pass over it. ``buffer`` counts the ids of one SparseCore, all
    partitions, each padded to a multiple of 8.
    """

    closed = True

    max_ids: int
    max_unique_ids: int
    buffer: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_LIMIT:
                raise RooftopError(f"limits.{name}", value, f"a whole number from 1 to {LARGEST_LIMIT}")
        if self.max_unique_ids > self.max_ids:
            raise RooftopError("limits.max_unique_ids", self.max_unique_ids, f"at most max_ids, {self.max_ids}")
        if self.buffer % ALIGNMENT:
            raise RooftopError("limits.buffer", self.buffer, f"a multiple of {ALIGNMENT}")

    def scaled(self, share: float) -> StackLimits:
        """A ``share`` of each limit, in whole eights, at least 8."""
        return StackLimits(
            **{name: max(ALIGNMENT, int(value * share) // ALIGNMENT * ALIGNMENT) for name, value in vars(self).items()}
        )


Limits = Mapping[str, StackLimits]


def full_buffer(max_ids: int, cores: int) -> int:
    """A buffer in which every one of ``cores`` partitions may be full."""
    return next_multiple(max_ids, ALIGNMENT) * cores


def pointers_of_device(cores: int, cores_per_device: int, *, minibatching: bool) -> int:
    """Row pointers in a device's buffers of one stack: one a partition (8 at least), and with passes one a bucket."""
    return max(cores, ALIGNMENT) * cores_per_device * (BUCKETS if minibatching else 1)


def check_limits(limits: Limits, stacking: Stacking) -> None:
    """Raises RooftopError unless there are limits for each stack and for nothing else."""
    names = [stack.name for stack in stacking.stacks]
    for name in names:
        if name not in limits:
            raise RooftopError("limits", f"none for stack {name}", f"limits for each stack: {', '.join(names)}")
    for name in limits:
        if name not in names:
            raise RooftopError("limits", f"limits for {name}", f"limits for the stacks {', '.join(names)}")
