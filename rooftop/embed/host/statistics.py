"""Statistics of batches: the sizes of partitions and buffers that they need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from jaxtyping import Int64

from rooftop.embed.host.buffers import padded
from rooftop.models.embedding_tables.stacking import Stacking


@dataclass(frozen=True, kw_only=True)
class StackStatistics:
    """Sizes that a stack needs for one batch, or the largest of many batches.

    Dims: D devices of the host, C SparseCores, P of a device. max_ids and max_unique_ids [D, C]: the fullest partition
    from a SparseCore of the device to a destination, before ids are dropped; buffer [D, P], padded; table_ids and
    table_unique_ids: by table, the most of one SparseCore. ``ids`` are all merged ids, ``dropped`` all dropped ids.
    """

    max_ids: Int64[np.ndarray, "D C"]
    max_unique_ids: Int64[np.ndarray, "D C"]
    buffer: Int64[np.ndarray, "D P"]
    table_ids: Mapping[str, int]
    table_unique_ids: Mapping[str, int]
    ids: int
    dropped: int

    def merged(self, other: StackStatistics) -> StackStatistics:
        """Combine two: the larger of each size, and the sums of ids and dropped ids."""
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
    """Statistics by stack; ids out of range by feature; the most minibatches of a batch; the number of batches."""

    stacks: Mapping[str, StackStatistics]
    out_of_range: Mapping[str, int]
    minibatches: int = 1
    batches: int = 1

    @property
    def dropped(self) -> int:
        """Dropped ids of all stacks."""
        return sum(stack.dropped for stack in self.stacks.values())

    def merged(self, other: Statistics) -> Statistics:
        """Combine two: see ``StackStatistics.merged``."""
        return Statistics(
            stacks={name: stack.merged(other.stacks[name]) for name, stack in self.stacks.items()},
            out_of_range={name: count + other.out_of_range[name] for name, count in self.out_of_range.items()},
            minibatches=max(self.minibatches, other.minibatches),
            batches=self.batches + other.batches,
        )


@dataclass(frozen=True, kw_only=True)
class BatchCounts:
    """Counts of one batch before ids are dropped, filled in part by part.

    Dims: K stacks, T tables of all stacks, S sources, C destinations. table_ids and table_uniques [T, S]: merged ids
    and different rows. partition_ids and partition_uniques [K, S, C]: the same of a partition's fullest pass;
    partition_sizes [K, S, C]: ids of all passes, each padded. Tables of stack k begin at ``first_tables[k]``.
    """

    stacking: Stacking
    first_tables: Sequence[int]
    table_ids: Int64[np.ndarray, "T S"]
    table_uniques: Int64[np.ndarray, "T S"]
    partition_ids: Int64[np.ndarray, "K S C"]
    partition_uniques: Int64[np.ndarray, "K S C"]
    partition_sizes: Int64[np.ndarray, "K S C"]

    @classmethod
    def empty(cls, stacking: Stacking, sources: int) -> BatchCounts:
        """Counts without values."""
        first_tables = list(accumulate((len(stack.places) for stack in stacking.stacks), initial=0))
        tables, partitions = (first_tables[-1], sources), (len(stacking.stacks), sources, stacking.cores)
        return cls(
            stacking=stacking,
            first_tables=first_tables,
            table_ids=np.empty(tables, np.int64),
            table_uniques=np.empty(tables, np.int64),
            partition_ids=np.empty(partitions, np.int64),
            partition_uniques=np.empty(partitions, np.int64),
            partition_sizes=np.empty(partitions, np.int64),
        )

    def tables(self, stack: int) -> slice:
        """Tables of a stack."""
        return slice(self.first_tables[stack], self.first_tables[stack + 1])

    def record(
        self, stacks: range, sources: slice, ids: Int64[np.ndarray, "T G C"], uniques: Int64[np.ndarray, "T G C"]
    ) -> None:
        """Record merged ids and different rows [tables of the stacks, sources, C] of one pass."""
        first = self.first_tables[stacks.start]
        tables, stack_rows = slice(first, self.first_tables[stacks.stop]), slice(stacks.start, stacks.stop)
        self.table_ids[tables, sources] = ids.sum(axis=2)
        self.table_uniques[tables, sources] = uniques.sum(axis=2)
        for stack in stacks:
            # Much faster than reduceat.
            of_stack = slice(self.first_tables[stack] - first, self.first_tables[stack + 1] - first)
            np.add.reduce(ids[of_stack], axis=0, out=self.partition_ids[stack, sources])
            np.add.reduce(uniques[of_stack], axis=0, out=self.partition_uniques[stack, sources])
        self.partition_sizes[stack_rows, sources] = padded(self.partition_ids[stack_rows, sources])

    def record_passes(
        self, stack: int, sources: slice, ids: Int64[np.ndarray, "G passes C"], uniques: Int64[np.ndarray, "G passes C"]
    ) -> None:
        """Record ids and different rows [sources, passes, C] of the partitions of one stack."""
        self.partition_ids[stack, sources] = ids.max(axis=1)
        self.partition_uniques[stack, sources] = uniques.max(axis=1)
        self.partition_sizes[stack, sources] = padded(ids).sum(axis=1)

    def statistics(
        self, *, out_of_range: Mapping[str, int], dropped: Mapping[str, int], minibatches: int
    ) -> Statistics:
        """Statistics of the batch; ids ``out_of_range`` are by feature, ``dropped`` ids by stack."""
        per_device, cores = self.stacking.cores_per_device, self.stacking.cores
        shape = (len(self.stacking.stacks), -1, per_device, cores)
        max_ids, max_uniques = (
            counts.reshape(shape).max(axis=2) for counts in (self.partition_ids, self.partition_uniques)
        )
        buffer = self.partition_sizes.reshape(shape).sum(axis=3)
        most_ids, most_rows = self.table_ids.max(axis=1).tolist(), self.table_uniques.max(axis=1).tolist()
        totals = self.table_ids.sum(axis=1).tolist()
        stacks = dict[str, StackStatistics]()
        for index, stack in enumerate(self.stacking.stacks):
            names, tables = [place.table.name for place in stack.places], self.tables(index)
            stacks[stack.name] = StackStatistics(
                max_ids=max_ids[index],
                max_unique_ids=max_uniques[index],
                buffer=buffer[index],
                table_ids=dict(zip(names, most_ids[tables], strict=True)),
                table_unique_ids=dict(zip(names, most_rows[tables], strict=True)),
                ids=sum(totals[tables]),
                dropped=dropped[stack.name],
            )
        return Statistics(stacks=stacks, out_of_range=out_of_range, minibatches=minibatches)
