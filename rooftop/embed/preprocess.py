"""Host preprocessing: a batch of ids into what the SparseCores of this host's devices read.

Per stack and source SparseCore: ids become keys, keys are sorted, a sample's duplicates merge, partitions are padded,
and gains carry weights and combiners (the SparseCore deep dive, sections 2, 3, 7 and 8). What overflows its limits is
an error, dropped, or looked up in several passes (minibatching). The same batch always gives the same buffers,
whatever the number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from operator import or_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError
from rooftop.embed import kernels
from rooftop.embed.checks import check_policy
from rooftop.embed.emit import Buffers, emit, padding, row_pointers
from rooftop.embed.excess import buffer_excess, chip_excess, partition_excess, table_excess, table_limits
from rooftop.embed.jobs import Job, jobs_of, needed
from rooftop.embed.lookups import TableBatch, TableLayout, check_names, layouts, look
from rooftop.embed.minibatching import bucketed, by_samples, into_passes, pass_of_rows, split_mask
from rooftop.embed.overflow import (
    Ordered,
    as_chunk,
    drop_from_buffers,
    drop_from_partitions,
    drop_from_sources,
    drop_from_tables,
    ordered,
    sizes_of,
    uniques_of,
)
from rooftop.embed.statistics import Statistics
from rooftop.embed.threads import Threads
from rooftop.models.embedding_tables.limits import BUCKETS, Limits, StackLimits, check_limits, pointers_of_device
from rooftop.models.embedding_tables.stacking import Stack, Stacking

#: Rows of input of a batch below which another thread's help in looking at them costs more than it saves.
_LOOKED_ALONE = 200_000


@dataclass(frozen=True, kw_only=True)
class Preprocessed:
    """A batch as the SparseCores read it: buffers by stack, passes over them, and what the batch needed.

    The buffers' arrays are the caller's until they are given back as ``out`` of another call.
    """

    buffers: Mapping[str, Buffers]
    minibatches: int
    statistics: Statistics


class Preprocessor:
    """Makes a host's batches ready for the SparseCores of its devices.

    ``batch`` is the host's samples per step; they lie on the SparseCores of its ``devices`` (all devices of the
    stacking unless given) in order, equally many on each. ``limits`` are those the program was compiled for; without
    them batches can only be observed. ``out_of_range`` is one of ``checks.POLICIES``. With ``minibatching`` the
    buffers have the layout of passes, and a batch that overflows a partition is split into them; ``combine`` then
    ORs the splits of all hosts; with ``sample_passes`` above 1 every batch is looked up in so many passes, each over a
    part of the samples. Otherwise, and where even a single bucket overflows, ids are dropped if the config
    allows it and refused if not. ``accelerate`` uses the numba kernels (True), NumPy's (False), or numba's where
    numba is installed (None).
    """

    def __init__(
        self,
        stacking: Stacking,
        *,
        batch: int,
        limits: Limits | None = None,
        devices: int | None = None,
        threads: int = 1,
        out_of_range: str = "error",
        minibatching: bool = False,
        sample_passes: int = 1,
        combine: Callable[[int], int] | None = None,
        accelerate: bool | None = None,
    ) -> None:
        self.stacking = stacking
        self.devices = stacking.devices if devices is None else devices
        for name, given, most in (
            ("devices", self.devices, stacking.devices),
            ("batch", batch, 2**31 - 1),
            ("threads", threads, 1024),
            ("sample_passes", sample_passes, BUCKETS if minibatching else 1),
        ):
            if isinstance(given, bool) or not isinstance(given, int) or not 1 <= given <= most:
                raise RooftopError(name, given, f"a whole number from 1 to {most}")
        self.sources = self.devices * stacking.cores_per_device
        if batch % self.sources:
            raise RooftopError("batch", batch, f"a multiple of {self.sources}, the SparseCores of this host's devices")
        check_policy(out_of_range)
        if limits is not None:
            check_limits(limits, stacking)
        self.batch = batch
        self.limits = limits
        self.out_of_range = out_of_range
        self.minibatching = minibatching
        self.sample_passes = sample_passes
        self.dropping = stacking.tables.config.allow_id_dropping
        self._combine = combine
        self._kernels = kernels.choose(accelerate)
        self._counting = kernels.NumpyKernels()
        self._count = threads
        self._threads = Threads(threads)
        #: SparseCores that share a row of the buffers.
        self._per_row = stacking.cores_per_device if minibatching else 1
        samples = batch // self.sources
        self._looks_alone = batch * sum(one.rows_per_sample for one in stacking.tables.features) < _LOOKED_ALONE
        self._layouts = [layouts(stacking, stack, samples) for stack in stacking.stacks]

    def buffers(self) -> dict[str, Buffers]:
        """Buffers without ids, of the sizes that the limits ask for."""
        found = {}
        for stack in self.stacking.stacks:
            limits = self._limits(stack)
            per_device = self.stacking.cores_per_device
            found[stack.name] = Buffers.empty(
                devices=self.devices,
                rows=1 if self.minibatching else per_device,
                capacity=limits.buffer * (per_device if self.minibatching else 1),
                pointers=pointers_of_device(self.stacking.cores, per_device, minibatching=self.minibatching),
            )
        return found

    def preprocess(self, inputs: Mapping[str, Any], out: Mapping[str, Buffers] | None = None) -> Preprocessed:
        """Make one batch ready: ids by feature, in any form that ``inputs.as_ragged`` takes.

        ``out`` are buffers to write again (of ``buffers`` or of an earlier result). Raises RooftopError.
        """
        batches, bad = self._look(inputs)
        buffers = self.buffers() if out is None else out
        jobs = self._jobs(batches)
        self._threads.each(jobs, lambda job: self._make(job, buffers), size=lambda job: job.size)
        minibatches, dropped = 1, {stack.name: 0 for stack in self.stacking.stacks}
        left = self._room(jobs)
        if self._mask_is_shared or left is not None or not all(all(job.written) for job in jobs):
            minibatches = self._overflow(jobs, buffers, left, dropped)
        return Preprocessed(
            buffers=buffers,
            minibatches=minibatches,
            statistics=needed(jobs, self.stacking, bad, dropped, minibatches),
        )

    def observe(self, inputs: Mapping[str, Any]) -> Statistics:
        """What one batch needs, without limits and without making it ready. Raises RooftopError."""
        batches, bad = self._look(inputs)
        jobs = self._jobs(batches)
        self._threads.each(jobs, lambda job: self._make(job, None), size=lambda job: job.size)
        dropped = {stack.name: 0 for stack in self.stacking.stacks}
        return needed(jobs, self.stacking, bad, dropped, self.sample_passes)

    @property
    def _over_ids(self) -> bool:
        """Whether what overflows is split over the vocabulary."""
        return self.minibatching and self.sample_passes == 1

    @property
    def _mask_is_shared(self) -> bool:
        """Whether hosts have to agree on the passes of every batch."""
        return self._over_ids and self._combine is not None

    def _limits(self, stack: Stack) -> StackLimits:
        if self.limits is None:
            raise RooftopError("limits", None, "limits for each stack: without them batches can only be observed")
        return self.limits[stack.name]

    def _look(self, inputs: Mapping[str, Any]) -> tuple[list[list[TableBatch]], dict[str, int]]:
        """What the batch looks up, by stack and table, and ids out of range by feature."""
        check_names(inputs, self.stacking)
        flat = [table for tables in self._layouts for table in tables]

        def looked(table: TableLayout) -> tuple[TableBatch, dict[str, int]]:
            return look(table, inputs, batch=self.batch, sources=self.sources, out_of_range=self.out_of_range)

        found = self._threads.each(flat, looked, alone=self._looks_alone)
        given = (batch for batch, _ in found)
        batches = [list(islice(given, len(tables))) for tables in self._layouts]
        bad = {name: count for _, out in found for name, count in out.items()}
        return batches, bad

    def _jobs(self, batches: list[list[TableBatch]]) -> list[Job]:
        """The work in parts, in the order of stacks and sources."""
        prepared = [self._kernels.prepare(tables, self.out_of_range == "off") for tables in batches]
        return jobs_of(prepared, self.sources, unit=self._per_row, threads=self._count)

    def _make(self, job: Job, buffers: Mapping[str, Buffers] | None) -> None:
        """Sort and merge a part's ids, and write them if they are wanted and keep within the limits."""
        found = self._kernels.sort(job.prepared, job.first, job.last)
        job.sorted(found)
        if self.sample_passes > 1:
            ids, cores = list[Ordered](), self.stacking.cores
            for index, stack in enumerate(job.stacks):
                of_rows = pass_of_rows(self._layouts[stack], self.sample_passes)
                ids.append(by_samples(self._ordered(job, index), of_rows, self.sample_passes, cores))
            job.in_passes(ids, self.sample_passes, cores)
            return
        if buffers is None:
            return
        job.written = self._fits(job)
        those = [
            buffers[self.stacking.stacks[stack].name] if fits else None
            for stack, fits in zip(job.stacks, job.written, strict=True)
        ]
        self._kernels.emit(found, those, job.first, self._per_row)
        self._point(job, those, job.partitions, job.whole, 1)

    def _fits(self, job: Job) -> list[bool]:
        """Which of a part's stacks keep within their limits in one pass."""
        config, stacks = self.stacking.tables.config, len(job.stacks)
        limits = [self._limits(self.stacking.stacks[stack]) for stack in job.stacks]
        of_rows = job.whole.reshape(stacks, -1, self._per_row * self.stacking.cores).sum(axis=2)
        most = (counts.reshape(stacks, -1).max(axis=1).tolist() for counts in (job.partitions, job.uniques, of_rows))
        return [
            ids <= limit.max_ids
            and uniques <= limit.max_unique_ids
            and filled <= limit.buffer * self._per_row
            and table_excess(self.stacking.stacks[stack], config, job.table_ids[index], job.table_uniques[index])
            is None
            for index, (stack, limit, ids, uniques, filled) in enumerate(zip(job.stacks, limits, *most, strict=True))
        ]

    def _point(
        self,
        job: Job,
        buffers: Sequence[Buffers | None],
        partitions: NDArray[np.int64],
        whole: NDArray[np.int64],
        passes: int,
    ) -> None:
        """Write the row pointers of a part, stack by stack: ids by source and pass, and destination, and padded."""
        per_device, cores = self.stacking.cores_per_device, self.stacking.cores
        in_row = per_device * passes if self.minibatching else 1
        pointers = row_pointers(partitions.reshape(-1, cores), whole.reshape(-1, cores), in_row)
        unit = per_device if self.minibatching else 1
        pointers = pointers.reshape(len(buffers), (job.last - job.first) // unit, -1)
        for own, given in zip(buffers, pointers, strict=True):
            if own is not None:
                rows = own.row_pointers.reshape(self.sources // unit, -1)[job.first // unit : job.last // unit]
                rows[:, : given.shape[1]] = given
                if self.minibatching:
                    ends = given[:, -1:]
                    rows[:, given.shape[1] :] = ends + padding(ends.astype(np.int64))

    def _room(self, jobs: list[Job]) -> NDArray[np.int64] | None:
        """Ids that each source may keep where a chip has more than its bound; None if no chip has."""
        ids = np.zeros(self.sources, np.int64)
        for job in jobs:
            ids[job.first : job.last] += job.table_ids.sum(axis=(0, 1))
        per_device = self.stacking.cores_per_device
        chips = ids.reshape(self.devices, per_device).sum(axis=1)
        bound = self.stacking.tables.config.max_ids_per_chip_per_sample
        most = bound * self.batch // self.devices
        error = chip_excess(chips, most, bound)
        if error is None:
            return None
        if not self.dropping:
            raise error
        return np.where(np.repeat(chips > most, per_device), most // per_device, np.iinfo(np.int64).max)

    def _overflow(
        self,
        jobs: list[Job],
        buffers: Mapping[str, Buffers],
        left: NDArray[np.int64] | None,
        dropped: dict[str, int],
    ) -> int:
        """Write the parts that are not written as they are: in passes, or without what is dropped. Gives the passes.

        ``left`` are the ids that each source may still keep, counted down in the order of the stacks.
        """
        mask = self._mask(jobs) if self._over_ids else 0
        passes = max(self.sample_passes, mask.bit_count() + 1)
        for job, index in [(one, index) for one in jobs for index in range(len(one.stacks))]:
            span, asked = slice(job.first, job.last), job.table_ids[index].sum(axis=0)
            stack = self.stacking.stacks[job.stacks[index]]
            if job.written[index] and not mask and (left is None or (asked <= left[span]).all()):
                if left is not None:
                    left[span] -= asked
                continue
            ids = job.ids[index] if job.ids else self._ordered(job, index)
            if mask:
                ids = into_passes(ids, bucketed(ids, self.stacking.cores), mask, self.stacking.cores)
            kept = self._fit(job, index, ids, passes, None if left is None else left[span])
            dropped[stack.name] += int(ids.counts.sum() - kept.counts.sum())
            if left is not None:
                left[span] -= np.bincount(kept.groups // passes, minlength=job.last - job.first)
            chunk = as_chunk(kept, (job.last - job.first) * passes, self.stacking.cores)
            emit(chunk, buffers[stack.name], job.first * passes, self._per_row * passes)
            sizes = chunk.sizes[0]
            self._point(job, [buffers[stack.name]], sizes, sizes + padding(sizes), passes)
        return passes

    def _ordered(self, job: Job, index: int) -> Ordered:
        chunk = self._counting.chunk(job.prepared[index].tables, job.first, job.last, self.out_of_range == "off")
        return ordered(chunk)

    def _mask(self, jobs: list[Job]) -> int:
        """The joints of the buckets that stay open, those of other hosts included. Only what overflows has any."""

        def of(job: Job) -> int:
            cores, sources, mask = self.stacking.cores, job.last - job.first, 0
            for index, stack in enumerate(job.stacks):
                limits = self._limits(self.stacking.stacks[stack])
                most_ids, most_rows = job.partitions[index].max(initial=0), job.uniques[index].max(initial=0)
                if most_ids > limits.max_ids or most_rows > limits.max_unique_ids:
                    ids = self._ordered(job, index)
                    mask |= split_mask(ids, bucketed(ids, cores), sources, cores, limits.max_ids, limits.max_unique_ids)
            return mask

        mask = reduce(or_, self._threads.each(jobs, of), 0)
        return mask if self._combine is None else self._combine(mask)

    def _fit(self, job: Job, index: int, ids: Ordered, passes: int, left: NDArray[np.int64] | None) -> Ordered:
        """The ids of a part that keep within every limit. Raises RooftopError where not all do and none may go."""
        stack, config = self.stacking.stacks[job.stacks[index]], self.stacking.tables.config
        cores = self.stacking.cores
        limits, groups = self._limits(stack), (job.last - job.first) * passes

        def refuse(error: RooftopError | None) -> bool:
            if error is not None and not self.dropping:
                raise error
            return error is not None

        sizes, uniques = sizes_of(ids, groups, cores), uniques_of(ids, groups, cores)
        if refuse(partition_excess(stack.name, limits, sizes, uniques, job.first, passes)):
            ids = drop_from_partitions(ids, limits.max_ids, limits.max_unique_ids, cores)
        if refuse(table_excess(stack, config, job.table_ids[index], job.table_uniques[index])):
            ids = drop_from_tables(ids, passes, *table_limits(stack, config))
        if left is not None:
            ids = drop_from_sources(ids, passes, left)
        per_row, capacity = self._per_row * passes, limits.buffer * self._per_row
        sizes = sizes_of(ids, groups, cores)
        if refuse(buffer_excess(stack.name, capacity, sizes + padding(sizes), per_row)):
            ids = drop_from_buffers(ids, capacity, per_row, groups, cores)
        return ids
