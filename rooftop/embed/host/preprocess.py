"""Host preprocessing: make a batch of ids ready for the SparseCores of this host's devices.

For each stack and source SparseCore, ids become keys, keys are sorted, duplicates of a sample are merged, partitions
are padded, and gains carry weights and combiners (the SparseCore deep dive, sections 2, 3, 7 and 8). Ids over the
limits are an error, or dropped, or looked up in several passes (minibatching). The same batch always gives the same
buffers, for any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice
from operator import or_
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import RooftopError
from rooftop.core.extras import is_installed, require
from rooftop.embed.host.buffers import Buffers
from rooftop.embed.host.lookups import (
    StackIds,
    TableIds,
    TableLayout,
    check_names,
    check_policy,
    look_up,
    table_layouts,
)
from rooftop.embed.host.minibatching import bucketed, by_samples, into_passes, pass_of_rows, split_mask
from rooftop.embed.host.overflow import (
    buffer_excess,
    chip_excess,
    drop_from_buffers,
    drop_from_partitions,
    drop_from_sources,
    drop_from_tables,
    partition_excess,
    table_excess,
    table_limits,
)
from rooftop.embed.host.reference import Entries, KeyFields, Reference, SortedIds, SortedPart, entries_of, write_entries
from rooftop.embed.host.statistics import BatchCounts, Statistics
from rooftop.models.embedding_tables.limits import BUCKETS, Limits, StackLimits, check_limits, pointers_of_device
from rooftop.models.embedding_tables.stacking import Stack, Stacking

#: Rows of input of a batch below which a second thread's help in checking them costs more than it saves.
_CHECKED_ALONE = 200_000
#: Ids that are sorted and written by one call of a thread: their arrays stay in a core's caches.
_IDS_PER_PART = 400_000

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


@dataclass(frozen=True, kw_only=True)
class Preprocessed:
    """A batch as SparseCores read it: buffers by stack, the number of passes, and the statistics of the batch.

    The arrays of the buffers are the caller's until they are passed as ``out`` of another call.
    """

    buffers: Mapping[str, Buffers]
    minibatches: int
    statistics: Statistics


@runtime_checkable
class Sorter(Protocol):
    """Sorts ids and writes them: ``reference.Reference`` or ``kernel.NumbaKernel``."""

    def sort(self, stacks: Sequence[StackIds], first: int, last: int) -> SortedPart:
        """Sort and merge the ids that sources ``first`` to ``last`` (exclusive) look up in each stack.

        Sorted ids must be written or decoded before their thread sorts again.
        """

    def write(self, ids: SortedIds, buffers: Buffers, first: int, per_row: int) -> None:
        """Write ids, whose first source is ``first``, where ``per_row`` sources share a row of the buffers."""


def choose_sorter(accelerate: bool | None) -> Sorter:
    """The numba kernel (True), the NumPy reference (False), or numba if it is installed (None). Raises RooftopError."""
    if accelerate is None:
        accelerate = is_installed("numba")
    if not accelerate:
        return Reference()
    require("embed", "numba", purpose="for its kernels; NumPy's need none")
    from rooftop.embed.host.kernel import NumbaKernel

    return NumbaKernel()


class Threads:
    """``count`` threads, the caller's among them. Each takes the next item by itself: handing items over is slow."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._pool = ThreadPoolExecutor(count - 1) if count > 1 else None

    def map(
        self,
        work: Callable[[_Item], _Result],
        items: Sequence[_Item],
        *,
        alone: bool = False,
        size: Callable[[_Item], float] = lambda _: 0,
    ) -> list[_Result]:
        """Results of ``work`` in the order of ``items``; of several errors the first item's is raised.

        ``alone`` uses the caller's thread only. Items of the largest ``size`` are taken first, so that all threads end
        at about the same time.
        """
        if self._pool is None or alone:
            return [work(item) for item in items]
        results: dict[int, _Result] = {}
        errors: dict[int, Exception] = {}
        turns = iter(sorted(range(len(items)), key=lambda index: -size(items[index])))

        def run() -> None:
            for index in turns:
                try:
                    results[index] = work(items[index])
                except Exception as error:
                    errors[index] = error

        others = [self._pool.submit(run) for _ in range(min(self._count, len(items)) - 1)]
        run()
        for other in others:
            other.result()
        if errors:
            raise errors[min(errors)]
        return [results[index] for index in range(len(items))]


@dataclass(kw_only=True)
class Part:
    """Part of a batch that one thread works on: sources ``first`` to ``last`` (exclusive) of a range of stacks.

    ``written`` says for each stack if its ids are in the buffers. ``entries`` are the ids of each stack, if they are
    looked up in passes over samples.
    """

    stacks: range
    first: int
    last: int
    size: float
    written: list[bool] = field(default_factory=list)
    entries: list[Entries] = field(default_factory=list)

    @property
    def sources(self) -> slice:
        """Sources of the part."""
        return slice(self.first, self.last)


def split_work(counts: Sequence[int], sources: int, *, unit: int, threads: int) -> list[Part]:
    """Parts of about equally many ids: small stacks together, a large one cut into whole ``unit`` s of its sources.

    ``counts`` are the ids of each stack. There are equally many parts for each of ``threads`` threads, as far as that
    goes.
    """
    rounds = -(-sum(counts) // (threads * _IDS_PER_PART))
    share = max(sum(counts) / (threads * max(rounds, 1)), 1)
    units = sources // unit
    steps = [-(-units // min(max(round(count / share), 1), units)) * unit for count in counts]
    parts, begin = list[Part](), 0
    for end in range(1, len(counts) + 1):
        small = end < len(counts) and min(steps[begin : end + 1]) == sources
        if small and sum(counts[begin:end]) + counts[end] / 2 <= share:
            continue
        for first in range(0, sources, steps[begin]):
            last = min(first + steps[begin], sources)
            size = sum(counts[begin:end]) * (last - first)
            parts.append(Part(stacks=range(begin, end), first=first, last=last, size=size))
        begin = end
    return parts


class Preprocessor:
    """Makes a host's batches ready for the SparseCores of its devices.

    ``batch`` is the host's samples per step. They lie on the SparseCores of its ``devices`` (default: all devices of
    the stacking) in order, equally many on each. ``limits`` are those that the program was compiled for; without them
    batches can only be observed. ``out_of_range`` is one of ``lookups.POLICIES``. With ``minibatching`` the buffers
    have the layout of passes, and a batch that overflows a partition is split into passes; ``combine`` then ORs the
    splits of all hosts. With ``sample_passes`` above 1 every batch is looked up in as many passes, each over a part of
    the samples. Otherwise, and if even a single bucket overflows, ids are dropped if the config allows it, and refused
    if not. ``accelerate`` uses the numba kernel (True), the NumPy reference (False), or numba if it is installed
    (None).
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
        for name, value, most in (
            ("devices", self.devices, stacking.devices),
            ("batch", batch, 2**31 - 1),
            ("threads", threads, 1024),
            ("sample_passes", sample_passes, BUCKETS if minibatching else 1),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise RooftopError(name, value, f"a whole number from 1 to {most}")
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
        self._sorter = choose_sorter(accelerate)
        self._thread_count = threads
        self._threads = Threads(threads)
        #: SparseCores that share a row of the buffers.
        self._per_row = stacking.cores_per_device if minibatching else 1
        rows = batch * sum(feature.rows_per_sample for feature in stacking.tables.features)
        self._checks_alone = rows < _CHECKED_ALONE
        self._layouts = [table_layouts(stack, batch // self.sources) for stack in stacking.stacks]
        # Raises if the ids of a source do not fit into keys.
        KeyFields.of(self._layouts, stacking.cores, 1)

    def buffers(self) -> dict[str, Buffers]:
        """Buffers without ids, of the sizes that the limits require."""
        cores, per_device = self.stacking.cores, self.stacking.cores_per_device
        return {
            stack.name: Buffers.empty(
                devices=self.devices,
                rows=per_device // self._per_row,
                capacity=self._limits(stack).buffer * self._per_row,
                pointers=pointers_of_device(cores, per_device, minibatching=self.minibatching),
            )
            for stack in self.stacking.stacks
        }

    def preprocess(self, inputs: Mapping[str, object], out: Mapping[str, Buffers] | None = None) -> Preprocessed:
        """Make one batch ready. ``inputs`` are ids by feature, in any form that ``inputs.as_ragged`` takes.

        ``out`` are buffers to write again (of ``buffers`` or of an earlier result). Raises RooftopError.
        """
        stacks, invalid = self._look_up(inputs)
        buffers = self.buffers() if out is None else out
        counts, parts = self._sort(stacks, buffers)
        minibatches, dropped = 1, {stack.name: 0 for stack in self.stacking.stacks}
        room = self._room(counts)
        if self._mask_is_shared or room is not None or not all(all(part.written) for part in parts):
            minibatches = self._overflow(parts, stacks, counts, buffers, room, dropped)
        statistics = counts.statistics(out_of_range=invalid, dropped=dropped, minibatches=minibatches)
        return Preprocessed(buffers=buffers, minibatches=minibatches, statistics=statistics)

    def observe(self, inputs: Mapping[str, object]) -> Statistics:
        """Statistics of one batch, without limits and without buffers. Raises RooftopError."""
        stacks, invalid = self._look_up(inputs)
        counts, _ = self._sort(stacks, None)
        dropped = {stack.name: 0 for stack in self.stacking.stacks}
        return counts.statistics(out_of_range=invalid, dropped=dropped, minibatches=self.sample_passes)

    @property
    def _splits_ids(self) -> bool:
        """True if overflowing partitions are split over the vocabulary."""
        return self.minibatching and self.sample_passes == 1

    @property
    def _mask_is_shared(self) -> bool:
        """True if hosts have to agree on the passes of every batch."""
        return self._splits_ids and self._combine is not None

    def _limits(self, stack: Stack) -> StackLimits:
        if self.limits is None:
            raise RooftopError("limits", None, "limits for each stack: without them batches can only be observed")
        return self.limits[stack.name]

    def _look_up(self, inputs: Mapping[str, object]) -> tuple[list[StackIds], dict[str, int]]:
        """Checked ids of the batch by stack, and ids out of range by feature."""
        check_names(inputs, self.stacking)

        def look(table: TableLayout) -> tuple[TableIds, dict[str, int]]:
            return look_up(table, inputs, batch=self.batch, sources=self.sources, out_of_range=self.out_of_range)

        layouts = [layout for layouts in self._layouts for layout in layouts]
        tables = self._threads.map(look, layouts, alone=self._checks_alone)
        remaining = (ids for ids, _ in tables)
        stacks = [
            StackIds.of(
                list(islice(remaining, len(layouts))),
                self.stacking.cores,
                unchecked=self.out_of_range == "off",
            )
            for layouts in self._layouts
        ]
        return stacks, {name: count for _, invalid in tables for name, count in invalid.items()}

    def _sort(self, stacks: list[StackIds], buffers: Mapping[str, Buffers] | None) -> tuple[BatchCounts, list[Part]]:
        """Sort, count and (if there are buffers) write the ids of a batch, part by part."""
        counts = BatchCounts.empty(self.stacking, self.sources)
        ids = [stack.count for stack in stacks]
        parts = split_work(ids, self.sources, unit=self._per_row, threads=self._thread_count)
        self._threads.map(lambda part: self._make(part, stacks, counts, buffers), parts, size=lambda part: part.size)
        return counts, parts

    def _make(
        self, part: Part, stacks: list[StackIds], counts: BatchCounts, buffers: Mapping[str, Buffers] | None
    ) -> None:
        """Sort and count the ids of a part, and write the stacks that keep within their limits in one pass."""
        sorted_part = self._sorter.sort(stacks[part.stacks.start : part.stacks.stop], part.first, part.last)
        counts.record(part.stacks, part.sources, sorted_part.sizes, sorted_part.uniques)
        part.written = [False] * len(part.stacks)
        if self.sample_passes > 1:
            groups, cores = (part.last - part.first) * self.sample_passes, self.stacking.cores
            for index, ids in zip(part.stacks, sorted_part.stacks, strict=True):
                passes = pass_of_rows(self._layouts[index], self.sample_passes)
                entries = by_samples(entries_of(ids), passes, self.sample_passes, cores)
                part.entries.append(entries)
                shape = (-1, self.sample_passes, cores)
                ids_of, rows_of = entries.sizes(groups, cores), entries.uniques(groups, cores)
                counts.record_passes(index, part.sources, ids_of.reshape(shape), rows_of.reshape(shape))
        elif buffers is not None:
            part.written = self._keeps_limits(part, counts)
            for index, ids, fits in zip(part.stacks, sorted_part.stacks, part.written, strict=True):
                if fits:
                    self._sorter.write(ids, buffers[self.stacking.stacks[index].name], part.first, self._per_row)

    def _keeps_limits(self, part: Part, counts: BatchCounts) -> list[bool]:
        """For each stack of a part, True if it keeps within its limits in one pass."""
        config, stacks = self.stacking.tables.config, slice(part.stacks.start, part.stacks.stop)
        count = len(part.stacks)
        sizes = counts.partition_sizes[stacks, part.sources].reshape(count, -1, self._per_row * self.stacking.cores)
        most_ids, most_uniques, most_filled = (
            values.reshape(count, -1).max(axis=1).tolist()
            for values in (
                counts.partition_ids[stacks, part.sources],
                counts.partition_uniques[stacks, part.sources],
                sizes.sum(axis=2),
            )
        )
        fits = []
        for index, ids, uniques, filled in zip(part.stacks, most_ids, most_uniques, most_filled, strict=True):
            stack, tables = self.stacking.stacks[index], counts.tables(index)
            limits = self._limits(stack)
            table_ids, table_uniques = (
                counts.table_ids[tables, part.sources],
                counts.table_uniques[tables, part.sources],
            )
            fits.append(
                ids <= limits.max_ids
                and uniques <= limits.max_unique_ids
                and filled <= limits.buffer * self._per_row
                and table_excess(stack, config, table_ids, table_uniques) is None
            )
        return fits

    def _room(self, counts: BatchCounts) -> NDArray[np.int64] | None:
        """Ids that each source may keep, if a chip has more than its bound; None if no chip has."""
        per_device = self.stacking.cores_per_device
        chips = counts.table_ids.sum(axis=0).reshape(self.devices, per_device).sum(axis=1)
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
        parts: list[Part],
        stacks: list[StackIds],
        counts: BatchCounts,
        buffers: Mapping[str, Buffers],
        room: NDArray[np.int64] | None,
        dropped: dict[str, int],
    ) -> int:
        """Write stacks that are not written as they are: in passes, or with ids dropped. Return the number of passes.

        ``room`` are the ids that each source may still keep, counted down in the order of the stacks.
        """
        cores = self.stacking.cores
        mask = self._mask(parts, stacks, counts) if self._splits_ids else 0
        passes = max(self.sample_passes, mask.bit_count() + 1)
        for part, position, index in [(some, *stack) for some in parts for stack in enumerate(some.stacks)]:
            stack, own_room = self.stacking.stacks[index], None if room is None else room[part.sources]
            ids_of_sources = counts.table_ids[counts.tables(index), part.sources].sum(axis=0)
            if part.written[position] and not mask and (own_room is None or (ids_of_sources <= own_room).all()):
                if own_room is not None:
                    own_room -= ids_of_sources
                continue
            ids = part.entries[position] if part.entries else self._entries(part, stacks[index])
            if mask:
                ids = into_passes(ids, bucketed(ids, cores), mask, cores)
            fitting = self._fit(part, index, ids, passes, counts, own_room)
            dropped[stack.name] += int(ids.counts.sum() - fitting.counts.sum())
            if own_room is not None:
                own_room -= np.bincount(fitting.groups // passes, minlength=len(own_room))
            groups = (part.last - part.first) * passes
            write_entries(fitting, buffers[stack.name], part.first * passes, groups, self._per_row * passes, cores)
        return passes

    def _entries(self, part: Part, stack: StackIds) -> Entries:
        """Ids of a stack for the sources of a part, sorted again."""
        return entries_of(self._sorter.sort([stack], part.first, part.last).stacks[0])

    def _mask(self, parts: list[Part], stacks: list[StackIds], counts: BatchCounts) -> int:
        """Joints of the buckets that stay open on any host. Only partitions that overflow open some."""
        cores = self.stacking.cores

        def mask_of(part: Part) -> int:
            mask = 0
            for index in part.stacks:
                limits = self._limits(self.stacking.stacks[index])
                most_ids = counts.partition_ids[index, part.sources].max(initial=0)
                most_uniques = counts.partition_uniques[index, part.sources].max(initial=0)
                if most_ids > limits.max_ids or most_uniques > limits.max_unique_ids:
                    ids = self._entries(part, stacks[index])
                    sources = part.last - part.first
                    mask |= split_mask(ids, bucketed(ids, cores), sources, cores, limits.max_ids, limits.max_unique_ids)
            return mask

        mask = reduce(or_, self._threads.map(mask_of, parts), 0)
        return mask if self._combine is None else self._combine(mask)

    def _fit(
        self, part: Part, index: int, ids: Entries, passes: int, counts: BatchCounts, room: NDArray[np.int64] | None
    ) -> Entries:
        """Ids of a part that keep within every limit. Raises RooftopError if some do not and none may be dropped."""
        stack, config, cores = self.stacking.stacks[index], self.stacking.tables.config, self.stacking.cores
        limits, groups = self._limits(stack), (part.last - part.first) * passes
        tables = counts.tables(index)

        def must_drop(error: RooftopError | None) -> bool:
            if error is not None and not self.dropping:
                raise error
            return error is not None

        sizes, uniques = ids.sizes(groups, cores), ids.uniques(groups, cores)
        if must_drop(partition_excess(stack.name, limits, sizes, uniques, part.first, passes)):
            ids = drop_from_partitions(ids, limits.max_ids, limits.max_unique_ids, cores)
        table_ids, table_uniques = counts.table_ids[tables, part.sources], counts.table_uniques[tables, part.sources]
        if must_drop(table_excess(stack, config, table_ids, table_uniques)):
            ids = drop_from_tables(ids, passes, *table_limits(stack, config))
        if room is not None:
            ids = drop_from_sources(ids, passes, room)
        per_row, capacity = self._per_row * passes, limits.buffer * self._per_row
        if must_drop(buffer_excess(stack.name, capacity, ids.sizes(groups, cores), per_row)):
            ids = drop_from_buffers(ids, capacity, per_row, groups, cores)
        return ids
