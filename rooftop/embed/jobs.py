"""The parts of a batch that are worked on at once, and what all of them together needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import padding
from rooftop.embed.lookups import TableBatch
from rooftop.embed.statistics import StackStatistics, Statistics
from rooftop.models.tables_stacking import Stacking


@dataclass(kw_only=True)
class Job:
    """Sources ``first`` to ``last`` of a stack, and, once sorted, ids [T, G, C], different rows [G, C] and [T, G]."""

    stack: int
    first: int
    last: int
    tables: Sequence[TableBatch]
    sizes: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0, 0), np.int64))
    uniques: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    table_uniques: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    written: bool = False

    @cached_property
    def partitions(self) -> NDArray[np.int64]:
        """Ids of each partition: [G, C]."""
        found: NDArray[np.int64] = self.sizes.sum(axis=0)
        return found

    @cached_property
    def whole(self) -> NDArray[np.int64]:
        """Ids of each partition, padded: [G, C]."""
        return self.partitions + padding(self.partitions)


def needed(
    jobs: Sequence[Job], stacking: Stacking, bad: Mapping[str, int], dropped: Mapping[str, int], minibatches: int
) -> Statistics:
    """What a batch of these parts needed, before ids were dropped.

    ``bad`` are ids out of range by feature, ``dropped`` ids by stack.
    """
    found, per_device = {}, stacking.cores_per_device
    for index, stack in enumerate(stacking.stacks):
        mine = [job for job in jobs if job.stack == index]
        partitions = _joined([job.partitions for job in mine])
        uniques = _joined([job.uniques for job in mine])
        tables = _joined([job.sizes.sum(axis=2).T for job in mine]).max(axis=0)
        rows = _joined([job.table_uniques.T for job in mine]).max(axis=0)
        names = [place.table.name for place in stack.places]
        found[stack.name] = StackStatistics(
            max_ids=partitions.reshape(-1, per_device, stacking.cores).max(axis=1),
            max_unique_ids=uniques.reshape(-1, per_device, stacking.cores).max(axis=1),
            buffer=_joined([job.whole for job in mine]).sum(axis=1).reshape(-1, per_device),
            table_ids=dict(zip(names, tables.tolist(), strict=True)),
            table_unique_ids=dict(zip(names, rows.tolist(), strict=True)),
            ids=int(partitions.sum()),
            dropped=dropped[stack.name],
        )
    return Statistics(stacks=found, out_of_range=bad, minibatches=minibatches)


def _joined(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Arrays one behind the other; one alone is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
