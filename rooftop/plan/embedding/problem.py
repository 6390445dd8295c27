"""The input of a plan of embedding tables: tables, slice, batch, limits, and the dense part of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from rooftop.arrays import Mesh
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.limits import BUCKETS, Limits, check_limits
from rooftop.models.embedding_tables.stacking import Stack, Stacking, stack_tables
from rooftop.models.embedding_tables.tables import Tables
from rooftop.plan.embedding.memory import figure
from rooftop.roofline.collectives import Price, price
from rooftop.roofline.rates import Rates

#: Most threads of a host that prepare batches: no host has so many.
MOST_THREADS = 4096


@dataclass(frozen=True, kw_only=True)
class EmbedProblem:
    """Tables on a slice. ``batch`` is B, samples of a step on all devices; ``limits`` are the stacks', of one pass.

    A batch is looked up and updated in ``sample_passes`` passes, each over an equal part of every SparseCore's samples.
    ``dense_flops`` are the matmul FLOPs of one sample in the dense part, forward. ``host_threads`` prepare the batches
    of one host (None: as ``embed.toml`` assumes). Raises RooftopError for a chip without SparseCores, for a batch that
    does not divide over them, and for more passes than there are buckets.
    """

    tables: Tables
    slice: Slice
    batch: int
    limits: Limits
    dense_flops: float = 0.0
    host_threads: int | None = None
    sample_passes: int = 1

    def __post_init__(self) -> None:
        per_device(self.slice)
        if self.batch % self.cores:
            raise RooftopError("batch", self.batch, f"a multiple of {self.cores}, the SparseCores of {self.slice.name}")
        check_passes(self.sample_passes)
        if self.host_threads is not None and not 1 <= self.host_threads <= MOST_THREADS:
            raise RooftopError("host_threads", self.host_threads, f"from 1 to {MOST_THREADS:,} threads of a host")
        check_limits(self.limits, self.stacking)

    @property
    def cores(self) -> int:
        """C, all SparseCores."""
        return self.slice.devices * per_device(self.slice)

    @property
    def samples(self) -> int:
        """Samples of one SparseCore."""
        return self.batch // self.cores

    @cached_property
    def stacking(self) -> Stacking:
        """The tables, stacked."""
        return stacking_on(self.tables, self.slice, self.batch)

    @cached_property
    def rates(self) -> Rates:
        """Rates of one device."""
        return Rates.of(self.slice.chip)

    @cached_property
    def all_to_all(self) -> Price:
        """The price of an AllToAll over all devices."""
        mesh = Mesh.lay(self.slice, {"data": self.slice.devices})
        return price("all_to_all", mesh.span("data"))

    @property
    def threads(self) -> int:
        """Threads of a host that prepare batches."""
        return self.host_threads or int(figure("host", "threads"))

    def ids(self, stack: Stack) -> float:
        """Ids that one SparseCore's samples are expected to look up in a stack."""
        return self.samples * sum(one.ids_per_sample * one.rows_per_sample for one in stack.features)

    def uniques(self, stack: Stack) -> float:
        """Different rows expected of one partition in a pass, if ids were spread evenly: hot rows make it fewer."""
        ids, rows = self.ids(stack) / self.cores / self.sample_passes, stack.rows
        return -rows * _expm1(ids, rows)

    def summed(self, stack: Stack) -> bool:
        """True if an update first adds up each row's gradients over all passes, in an array as large as the table."""
        return self.sample_passes > 1 and not stack.optimizer.additive


def check_passes(passes: object) -> None:
    """Raises RooftopError unless there may be so many passes over the samples of a batch."""
    if isinstance(passes, bool) or not isinstance(passes, int) or not 1 <= passes <= BUCKETS:
        raise RooftopError("sample_passes", passes, f"a whole number from 1 to {BUCKETS}")


def _expm1(ids: float, rows: int) -> float:
    """(1 - 1/rows)^ids - 1, with all its digits."""
    return math.expm1(ids * math.log1p(-1 / rows)) if rows > 1 else -float(ids > 0)


def per_device(slice_: Slice) -> int:
    """SparseCores of one device. Raises RooftopError for a chip without them."""
    chip = slice_.chip
    if not chip.sparse_cores:
        raise RooftopError("slice", slice_.name, "a chip with SparseCores: v4, v5p, v6e or tpu7x")
    return chip.sparse_cores // chip.devices


def stacking_on(tables: Tables, slice_: Slice, batch: int) -> Stacking:
    """The tables stacked for all SparseCores of a slice. Raises RooftopError."""
    own = per_device(slice_)
    return stack_tables(tables, cores=slice_.devices * own, cores_per_device=own, batch=batch)
