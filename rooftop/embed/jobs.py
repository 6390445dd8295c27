"""The parts of a batch that are worked on at once, and what all of them together needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import padding
from rooftop.embed.kernels import Found
from rooftop.embed.lookups import TableBatch
from rooftop.embed.overflow import Ordered, sizes_of, uniques_of
from rooftop.embed.statistics import StackStatistics, Statistics
from rooftop.models.tables_stacking import Stacking


def _none(*dims: int) -> NDArray[np.int64]:
    return np.zeros(dims, np.int64)


@dataclass(kw_only=True)
class Job:
    """Sources ``first`` to ``last`` of a stack, and what is known of them once they are sorted.

    By table, ids table_ids and different rows table_uniques, [T, G] each. Of each partition's fullest pass, ids
    partitions [G, C] and different rows uniques [G, C]; ``whole`` [G, C] are the ids of all passes, each padded.
    ``ids`` are the ids themselves where they have been brought into passes over samples.
    """

    stack: int
    first: int
    last: int
    tables: Sequence[TableBatch]
    table_ids: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0))
    table_uniques: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0))
    partitions: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0))
    uniques: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0))
    whole: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0))
    ids: Ordered | None = None
    written: bool = False

    def sorted(self, found: Found) -> None:
        """Take down what one pass has."""
        self.table_ids, self.table_uniques = found.sizes.sum(axis=2), found.table_uniques
        self.uniques = found.uniques
        self.partitions = found.sizes[0] if len(found.sizes) == 1 else found.sizes.sum(axis=0)
        self.whole = self.partitions + padding(self.partitions)

    def in_passes(self, ids: Ordered, passes: int, cores: int) -> None:
        """Take down the ids in ``passes`` over samples, and what the fullest has."""
        groups = (self.last - self.first) * passes
        sizes, uniques = (of(ids, groups, cores).reshape(-1, passes, cores) for of in (sizes_of, uniques_of))
        self.ids, self.partitions, self.uniques = ids, sizes.max(axis=1), uniques.max(axis=1)
        self.whole = (sizes + padding(sizes)).sum(axis=1)


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
        ids = _joined([job.table_ids.T for job in mine])
        rows = _joined([job.table_uniques.T for job in mine]).max(axis=0)
        names = [place.table.name for place in stack.places]
        found[stack.name] = StackStatistics(
            max_ids=partitions.reshape(-1, per_device, stacking.cores).max(axis=1),
            max_unique_ids=uniques.reshape(-1, per_device, stacking.cores).max(axis=1),
            buffer=_joined([job.whole for job in mine]).sum(axis=1).reshape(-1, per_device),
            table_ids=dict(zip(names, ids.max(axis=0).tolist(), strict=True)),
            table_unique_ids=dict(zip(names, rows.tolist(), strict=True)),
            ids=int(ids.sum()),
            dropped=dropped[stack.name],
        )
    return Statistics(stacks=found, out_of_range=bad, minibatches=minibatches)


def _joined(arrays: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    """Arrays one behind the other; one alone is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
