"""The parts of a batch that are worked on at once, and what all of them together needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from rooftop.embed.emit import padding
from rooftop.embed.kernels import Found, Prepared
from rooftop.embed.overflow import Ordered, sizes_of, uniques_of
from rooftop.embed.statistics import StackStatistics, Statistics
from rooftop.models.embedding_tables.stacking import Stacking


def _none(*dims: int) -> NDArray[np.int64]:
    return np.zeros(dims, np.int64)


@dataclass(kw_only=True)
class Job:
    """Sources ``first`` to ``last`` of stacks, and what is known of them once they are sorted.

    ``prepared`` are the stacks as the kernels want them. Of each of K stacks, which have T tables each: by table, ids
    table_ids and different rows table_uniques, [K, T, G] each. Of each partition's fullest pass, ids partitions
    [K, G, C] and different rows uniques [K, G, C]; ``whole`` [K, G, C] are the ids of all passes, each padded. ``ids``
    are those of each stack themselves where they have been brought into passes over samples. ``written`` are the
    stacks whose ids are in the buffers.
    """

    stacks: range
    first: int
    last: int
    prepared: Sequence[Prepared]
    table_ids: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0, 0))
    table_uniques: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0, 0))
    partitions: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0, 0))
    uniques: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0, 0))
    whole: NDArray[np.int64] = field(default_factory=lambda: _none(0, 0, 0))
    ids: list[Ordered] = field(default_factory=list)
    written: list[bool] = field(default_factory=list)

    @property
    def size(self) -> int:
        """What makes one longer than another: about as many ids, times all sources."""
        return sum(stack.ids for stack in self.prepared) * (self.last - self.first)

    def sorted(self, found: Found) -> None:
        """Take down what one pass has."""
        self.table_ids, self.table_uniques = found.sizes.sum(axis=3), found.table_uniques
        self.uniques = found.uniques
        self.partitions = found.sizes[:, 0] if found.sizes.shape[1] == 1 else found.sizes.sum(axis=1)
        self.whole = self.partitions + padding(self.partitions)
        self.written = [False] * len(self.stacks)

    def in_passes(self, ids: list[Ordered], passes: int, cores: int) -> None:
        """Take down the ids of each stack in ``passes`` over samples, and what the fullest has."""
        groups = (self.last - self.first) * passes
        sizes, uniques = (
            np.stack([of(own, groups, cores).reshape(-1, passes, cores) for own in ids])
            for of in (sizes_of, uniques_of)
        )
        self.ids, self.partitions, self.uniques = ids, sizes.max(axis=2), uniques.max(axis=2)
        self.whole = (sizes + padding(sizes)).sum(axis=2)


def jobs_of(stacks: Sequence[Prepared], sources: int, *, unit: int, threads: int) -> list[Job]:
    """All ``sources`` of a batch's stacks in jobs, in their order: small stacks together, a large one in parts.

    As many ids in each as are worth its calls, and as many jobs for each thread; always whole ``unit``s of sources.
    """
    counts = [stack.ids for stack in stacks]
    rounds = [-(-sum(counts) // (threads * stack.at_once)) for stack in stacks]
    wanted = [sum(counts) / (threads * max(most, 1)) for most in rounds]
    steps = list[int]()
    for stack, share in zip(stacks, wanted, strict=True):
        parts = max(-(-sources // stack.most_sources), round(stack.ids / max(share, 1)), 1)
        units = -(-sources // min(parts, sources) // unit)
        steps.append(units * unit)
    found, begin = list[Job](), 0
    for end in range(1, len(stacks) + 1):
        if end < len(stacks) and len(stacks[end].tables) == len(stacks[begin].tables):
            alike = type(stacks[end]) is type(stacks[begin]) and min(steps[begin : end + 1]) >= sources
            if alike and sum(counts[begin:end]) + counts[end] / 2 <= wanted[begin]:
                continue
        for first in range(0, sources, steps[begin]):
            last = min(first + steps[begin], sources)
            found.append(Job(stacks=range(begin, end), first=first, last=last, prepared=stacks[begin:end]))
        begin = end
    return found


def needed(
    jobs: Sequence[Job], stacking: Stacking, bad: Mapping[str, int], dropped: Mapping[str, int], minibatches: int
) -> Statistics:
    """What a batch of these parts needed, before ids were dropped.

    ``bad`` are ids out of range by feature, ``dropped`` ids by stack.
    """
    found, per_device, cores = dict[str, StackStatistics](), stacking.cores_per_device, stacking.cores
    # All stacks are gone through at once, as each call costs its time.
    sources, stacks = max(job.last for job in jobs), len(stacking.stacks)
    firsts = np.cumsum([0, *(len(stack.places) for stack in stacking.stacks)]).tolist()
    ids, rows = (np.empty((firsts[-1], sources), np.int64) for _ in range(2))
    of_partitions = np.empty((3, stacks, sources, cores), np.int64)
    for job in jobs:
        span, those = slice(job.first, job.last), slice(job.stacks.start, job.stacks.stop)
        for index, given in enumerate((job.partitions, job.uniques, job.whole)):
            of_partitions[index, those, span] = given
        own = slice(firsts[job.stacks.start], firsts[job.stacks.stop])
        for array, counts in ((ids, job.table_ids), (rows, job.table_uniques)):
            array[own, span] = counts.reshape(-1, job.last - job.first)
    by_device = of_partitions.reshape(3, stacks, -1, per_device, cores)
    partitions, uniques = by_device[:2].max(axis=3)
    buffer = by_device[2].sum(axis=3)
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
