"""What batches were seen to need of the buffers that SparseCores are compiled with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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

    @property
    def dropped(self) -> int:
        """Ids dropped, of all stacks."""
        return sum(one.dropped for one in self.stacks.values())

    def merged(self, other: Statistics) -> Statistics:
        """Of both: see ``StackStatistics.merged``."""
        return Statistics(
            stacks={name: one.merged(other.stacks[name]) for name, one in self.stacks.items()},
            out_of_range={name: count + other.out_of_range[name] for name, count in self.out_of_range.items()},
            minibatches=max(self.minibatches, other.minibatches),
            batches=self.batches + other.batches,
        )
