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
    found, per_device, cores = dict[str, StackStatistics](), stacking.cores_per_device, stacking.cores
    # Jobs are in the order of stacks and sources; all stacks are gone through at once, as each call costs its time.
    shape = (len(stacking.stacks), -1, per_device, cores)
    partitions = np.concatenate([job.partitions for job in jobs]).reshape(shape).max(axis=2)
    uniques = np.concatenate([job.uniques for job in jobs]).reshape(shape).max(axis=2)
    buffer = np.concatenate([job.whole for job in jobs]).reshape(shape).sum(axis=3)
    sources = max(job.last for job in jobs)
    firsts = np.cumsum([0, *(len(stack.places) for stack in stacking.stacks)]).tolist()
    ids, rows = (np.empty((firsts[-1], sources), np.int64) for _ in range(2))
    for job in jobs:
        span = slice(firsts[job.stack], firsts[job.stack + 1])
        ids[span, job.first : job.last], rows[span, job.first : job.last] = job.table_ids, job.table_uniques
    most_ids, most_rows, totals = (of.tolist() for of in (ids.max(axis=1), rows.max(axis=1), ids.sum(axis=1)))
    for index, stack in enumerate(stacking.stacks):
        span, names = slice(firsts[index], firsts[index + 1]), [place.table.name for place in stack.places]
        found[stack.name] = StackStatistics(
            max_ids=partitions[index],
            max_unique_ids=uniques[index],
            buffer=buffer[index],
            table_ids=dict(zip(names, most_ids[span], strict=True)),
            table_unique_ids=dict(zip(names, most_rows[span], strict=True)),
            ids=sum(totals[span]),
            dropped=dropped[stack.name],
        )
    return Statistics(stacks=found, out_of_range=bad, minibatches=minibatches)
