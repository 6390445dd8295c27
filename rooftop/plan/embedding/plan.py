"""The plan of embedding tables on SparseCores: memory, traffic and time of a step, and the unit that binds.

Sources: the SparseCore deep dive, sections 5, 7, 9 and 10; peaks from the hardware catalogue, achievable shares from
``rooftop.roofline``; the others are in ``embed.toml``. Figures are of one device unless said otherwise.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from rooftop import __version__
from rooftop.capabilities import embedding_obstacles
from rooftop.core.errors import Infeasible
from rooftop.core.ledger import Collective, Ledger, Row
from rooftop.core.quantities import format_bytes
from rooftop.core.records import Record, read_record
from rooftop.core.scopes import Phase
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.files import tables_from_json
from rooftop.models.embedding_tables.limits import Limits, StackLimits, pointers_of_device
from rooftop.models.embedding_tables.stacking import Stack, report
from rooftop.plan.documents import PlannedSlice
from rooftop.plan.embedding.exchange import exchanged_bytes
from rooftop.plan.embedding.limits import (
    in_fewest_passes,
    limits_in_passes,
    limits_of_stacks_text,
    limits_text,
    share_that,
)
from rooftop.plan.embedding.memory import (
    document_stack_bytes,
    figure,
    least_tile_bytes,
    slot_floats,
    sources,
    stack_bytes,
    tile_capacity,
    tile_room,
)
from rooftop.plan.embedding.problem import EmbedProblem, per_device

#: Bytes of a buffer's entry (id, sample, gain), of a row pointer, of a float.
_PLACE, _POINTER, _FLOAT = 12, 4, 4


def vector_flops_per_s(slice_: Slice) -> float:
    """Elementwise operations per second of a device's SparseCores: tiles x lanes x clock of the chip."""
    lanes = figure("tiles", "count") * figure("tiles", "lanes")
    return per_device(slice_) * lanes * slice_.chip.clock_hz


def table_rows(problem: EmbedProblem, stack: Stack) -> tuple[Row, Row]:
    """Lookup and update of one stack on one device: one execution is one pass over samples."""
    own, width = per_device(problem.slice), stack.width
    ids = problem.ids(stack) * own / problem.sample_passes
    unique = problem.uniques(stack) * problem.cores * own
    samples = problem.samples / problem.sample_passes
    row, activations = width * _FLOAT, own * samples * stack.rows_per_sample * width * _FLOAT
    payload = exchanged_bytes(
        "rows",
        width=width,
        max_ids=0,
        max_unique_ids=problem.uniques(stack),
        samples=0,
        cores=problem.cores,
        per_device=own,
    )
    row_bytes = row + slot_floats(stack.optimizer, width) * _FLOAT
    # What a loop over the passes changes of each row: where there are several, first the sums of the row's gradients.
    loops = (row, row_bytes + row) if problem.summed(stack) else (row_bytes,)
    # Lookup: holders read rows and write them to be sent; samples' cores write the rows that come, and read one an id.
    forward = _PLACE * ids + 3 * row * unique + row * ids + activations
    # Update: samples' cores read a gradient an id and write sums by row; holders read these, and change rows.
    backward = [_PLACE * ids + row * ids + 3 * row * unique + 2 * changed * unique + activations for changed in loops]
    merged = 2 * ids * width
    return (
        _row(problem, stack, "lookup", "forward", merged, forward, [float(payload["forward"])]),
        _row(
            problem,
            stack,
            "update",
            "update",
            merged * len(loops) + 8 * unique * width,
            sum(backward),
            [float(payload["backward"])] * len(loops),
        ),
    )


def _row(
    problem: EmbedProblem, stack: Stack, verb: str, phase: Phase, flops: float, hbm: float, payloads: list[float]
) -> Row:
    """One of the two rows; ``payloads`` are exchanged one after the other."""
    rates = problem.rates
    collectives = tuple(_all_to_all(problem, payload) for payload in payloads)
    expected = sum(float(collective.expected_s) for collective in collectives)
    bound = {name: sum(float(collective.time_s[name]) for collective in collectives) for name in collectives[0].time_s}
    vector_s = flops / vector_flops_per_s(problem.slice)
    hbm_s = float(rates.hbm_s(hbm))
    return Row(
        scope=f"tables/{stack.name}/{verb}",
        phase=phase,
        count=problem.sample_passes,
        vector_flops=flops,
        hbm_bytes=hbm,
        collectives=collectives if problem.slice.devices > 1 else (),
        time_s={"hbm": hbm / rates.hbm_bytes_per_s, "vpu": vector_s, **bound},
        expected_s=max(hbm_s, vector_s) + expected,
        serial_s=hbm_s + vector_s + expected,
        formula="rows and activations through HBM, different rows of each partition over the network",
    )


def _all_to_all(problem: EmbedProblem, payload: float) -> Collective:
    rates, price = problem.rates, problem.all_to_all
    expected = float(price.expected_s(payload, rates.network("all_to_all")))
    return Collective(
        kind="all_to_all",
        axes=("data",),
        bytes=payload,
        wire_bytes=payload * float(price.wire_per_byte),
        critical=True,
        time_s={name: float(seconds) for name, seconds in price.bound_s(payload).items() if float(seconds) > 0},
        expected_s=expected,
        exposed_s=expected,
    )


def dense_rows(problem: EmbedProblem) -> tuple[Row, ...]:
    """Forward and backward of the dense part; nothing where its FLOPs are not given."""
    if not problem.dense_flops:
        return ()
    return _dense(problem, "forward", 1), _dense(problem, "backward", 2)


def _dense(problem: EmbedProblem, phase: Phase, times: int) -> Row:
    flops = times * problem.dense_flops * problem.batch / problem.slice.devices
    seconds = flops / problem.rates.flops_per_s["bf16"]
    return Row(
        scope="loss",
        phase=phase,
        flops={"bf16": flops},
        time_s={"mxu": seconds},
        expected_s=seconds,
        serial_s=seconds,
        formula=f"{times} x FLOPs of a sample x samples of a device",
    )


#: Steps whose inputs and activations are on the device at once: one, or those that a pipeline has under way.
_UNDER_WAY: Mapping[str, int] = {"sequential": 1, "pipelined": 3}
#: What a step's time is counted on.
Unit = Literal["host", "sparsecore", "ici", "hbm", "tensorcore"]
UNITS: tuple[Unit, ...] = get_args(Unit)
#: A step with its parts one after another, or with those of three batches at once.
Pipelining = Literal["sequential", "pipelined"]


@dataclass(frozen=True, kw_only=True)
class SparseCoreSlice(PlannedSlice):
    """The slice of a plan with its SparseCores, in all and of a device."""

    sparse_cores: int
    sparse_cores_per_device: int


@dataclass(frozen=True, kw_only=True)
class EmbedWorkload(Record):
    """Samples of a step and the passes over them, FLOPs of a sample in the dense part, threads of a host."""

    batch: int
    dense_flops_per_sample: float
    host_threads: int
    #: Plans from before there were passes over samples do not say that theirs is one.
    sample_passes: int = 1


@dataclass(frozen=True, kw_only=True)
class StackMemory(Record):
    """Bytes of HBM of a device that a stack takes by class, and of the memory of its fullest tile.

    Those of a ``document`` are by the formulas of the SparseCore document.
    """

    tables: float
    slots: float
    sums: float = 0.0
    forward_stack: float
    backward_stack: float
    forward_stack_document: float = 0.0
    backward_stack_document: float = 0.0
    inputs: float = 0.0
    activations: float = 0.0
    tile: float


@dataclass(frozen=True, kw_only=True)
class PlannedStack(Record):
    """A stack of tables, its padding, and the bytes that it takes of a device by class."""

    name: str
    tables: tuple[str, ...]
    width: int
    rows: int
    padding_bytes: int
    waste: float
    memory: StackMemory


@dataclass(frozen=True, kw_only=True)
class EmbedMemory(Record):
    """HBM bytes of a device by class and in all, whether they fit, and the memory of the fullest tile."""

    tables: float
    slots: float
    sums: float = 0.0
    forward_stack: float
    backward_stack: float
    inputs: float
    activations: float
    total: Mapping[Pipelining, float]
    capacity: float
    fits: Mapping[Pipelining, bool]
    tile: float
    tile_capacity: float


@dataclass(frozen=True, kw_only=True)
class HostWork(Record):
    """The host's part of a step: ids that it prepares, bytes to each device, and seconds of either."""

    ids: float
    bytes_to_each_device: float
    preprocess_s: float
    transfer_s: float


@dataclass(frozen=True, kw_only=True)
class EmbedStep(Record):
    """Expected seconds of a step, and the unit that binds."""

    expected_s: float
    bound: Unit


@dataclass(frozen=True, kw_only=True)
class NearestEmbedPlan(Record):
    """The passes over samples, and the limits, with which a plan fits that does not."""

    sample_passes: int
    limits: Limits


@dataclass(frozen=True, kw_only=True)
class EmbedPlanDocument(Record):
    """plan.json of embedding tables. Bytes and seconds are of one device, ids of one host."""

    sparse = frozenset({"request"})

    kind: Literal["embed"]
    schema: Literal[1]
    rooftop_version: str
    tables: Mapping[str, Any]
    slice: SparseCoreSlice
    workload: EmbedWorkload
    limits: Limits
    stacks: tuple[PlannedStack, ...]
    memory: EmbedMemory
    host: HostWork
    units_s: Mapping[Unit, float]
    step: Mapping[Pipelining, EmbedStep]
    ledger: tuple[Row, ...]
    executable: bool
    obstacles: tuple[str, ...]
    nearest: NearestEmbedPlan | None = None
    sources: Mapping[str, str]
    request: Mapping[str, Any] | None = None

    @property
    def plan(self) -> EmbedPlan:
        """The plan, computed again. Raises RooftopError on tables, slices or limits that cannot be."""
        problem = EmbedProblem(
            tables=tables_from_json(self.tables),
            slice=self.slice.hardware,
            batch=self.workload.batch,
            limits=self.limits,
            dense_flops=self.workload.dense_flops_per_sample,
            host_threads=self.workload.host_threads,
            sample_passes=self.workload.sample_passes,
        )
        return EmbedPlan(problem=problem)


@dataclass(frozen=True, kw_only=True)
class EmbedPlan:
    """A problem with its answer."""

    problem: EmbedProblem

    @property
    def _per_device(self) -> int:
        return per_device(self.problem.slice)

    def stack_memory(self, stack: Stack) -> dict[str, float]:
        """HBM of one device that a stack takes, and the memory of a tile: bytes by name."""
        problem, limits = self.problem, self.problem.limits[stack.name]
        rows = stack.rows * self._per_device
        sizes: dict[str, Any] = {
            "width": stack.width,
            "max_unique_ids": limits.max_unique_ids,
            "cores": problem.cores,
        }
        slots, room = len(stack.optimizer.slots(1)), tile_room(problem.slice.chip)
        own, summed = self._per_device, problem.summed(stack)
        pointers = pointers_of_device(problem.cores, own, minibatching=True)
        return {
            "tables": rows * stack.width * _FLOAT,
            "slots": rows * slot_floats(stack.optimizer, stack.width) * _FLOAT,
            "sums": rows * stack.width * _FLOAT * summed,
            "forward_stack": own
            * float(stack_bytes("forward", max_ids=limits.max_ids, slots=slots, room=room, **sizes)),
            "backward_stack": own
            * float(stack_bytes("backward", max_ids=limits.max_ids, slots=slots, room=room, summed=summed, **sizes)),
            "forward_stack_document": own * float(document_stack_bytes("forward", **sizes)),
            "backward_stack_document": own * float(document_stack_bytes("backward", **sizes)),
            "inputs": own * limits.buffer * _PLACE + pointers * _POINTER,
            "activations": own * problem.samples * stack.rows_per_sample * stack.width * _FLOAT,
            "tile": tile_capacity(problem.slice.chip)
            - room
            + float(
                least_tile_bytes(max_ids=limits.max_ids, max_unique_ids=limits.max_unique_ids, cores=problem.cores)
            ),
        }

    @cached_property
    def memory(self) -> dict[str, Any]:
        """HBM bytes of one device by class and in all, whether they fit, and the memory of the worst tile.

        The compiler's stack holds all stacks of tables at once, forward or backward, whichever is more. Activations
        count twice, for their gradients; with pipelining inputs and activations of three steps are there.
        """
        every = [self.stack_memory(stack) for stack in self.problem.stacking.stacks]

        def total(name: str) -> float:
            return sum(stack[name] for stack in every)

        # Each stack's figure has the base of a program, which there is once.
        again = (len(every) - 1) * figure("compiler", "stack_base_bytes") * self._per_device
        stacks = {name: total(name) - again for name in ("forward_stack", "backward_stack")}
        resident = total("tables") + total("slots") + total("sums") + max(stacks.values())
        step = total("inputs") + 2 * total("activations")
        capacity = self.problem.slice.chip.hbm_usable_bytes
        totals = {mode: resident + step * steps for mode, steps in _UNDER_WAY.items()}
        return {
            "tables": total("tables"),
            "slots": total("slots"),
            "sums": total("sums"),
            **stacks,
            "inputs": total("inputs"),
            "activations": total("activations"),
            "total": totals,
            "capacity": capacity,
            "fits": {mode: needed <= capacity for mode, needed in totals.items()},
            "tile": max(stack["tile"] for stack in every),
            "tile_capacity": tile_capacity(self.problem.slice.chip),
        }

    @cached_property
    def ledger(self) -> Ledger:
        """Lookup and update of each stack, and the dense part (scope ``loss``), of one device."""
        rows = [row for stack in self.problem.stacking.stacks for row in table_rows(self.problem, stack)]
        return Ledger((*rows, *dense_rows(self.problem)))

    @cached_property
    def host(self) -> dict[str, float]:
        """The host's part of a step: ids that it prepares, bytes to its devices, and seconds of each."""
        problem = self.problem
        devices = problem.slice.devices / problem.slice.hosts
        ids = sum(problem.ids(stack) for stack in problem.stacking.stacks) * self._per_device * devices
        sent = self.memory["inputs"]
        return {
            "ids": ids,
            "bytes_to_each_device": sent,
            "preprocess_s": ids / (figure("host", "ids_per_s_per_thread") * problem.threads),
            "transfer_s": sent / problem.rates.pcie_bytes_per_s,
        }

    @cached_property
    def units_s(self) -> dict[Unit, float]:
        """Expected seconds of a step that each unit is busy; a SparseCore's include its waits for HBM and ICI."""
        tables = [row for row in self.ledger if row.scope.startswith("tables/")]
        passes = self.problem.sample_passes
        return {
            "host": max(self.host["preprocess_s"], self.host["transfer_s"]),
            "sparsecore": passes
            * sum(float(row.vector_flops) / vector_flops_per_s(self.problem.slice) for row in tables),
            "ici": passes * sum(float(collective.expected_s) for row in tables for collective in row.collectives),
            "hbm": passes * sum(float(self.problem.rates.hbm_s(row.hbm_bytes)) for row in tables),
            "tensorcore": sum(float(row.expected_s) for row in self.ledger if row.scope == "loss"),
        }

    @cached_property
    def step(self) -> dict[Pipelining, EmbedStep]:
        """Expected seconds of a step, sequential and pipelined, and the unit that binds each (one of UNITS).

        Sequential: lookups, the dense part and updates follow each other. Pipelined: SparseCores and TensorCores work
        side by side. The host prepares the next batch meanwhile, in both.
        """
        units = self.units_s
        tables = sum(float(row.count * row.expected_s) for row in self.ledger if row.scope.startswith("tables/"))
        device: dict[Pipelining, float] = {
            "sequential": tables + units["tensorcore"], "pipelined": max(tables, units["tensorcore"])
        }  # fmt: skip
        of_tables: tuple[Unit, ...] = ("sparsecore", "ici", "hbm")
        slowest = max(of_tables, key=lambda name: units[name])
        device_bound: Unit = "tensorcore" if units["tensorcore"] > tables else slowest
        return {
            mode: EmbedStep(
                expected_s=max(seconds, units["host"]), bound="host" if units["host"] > seconds else device_bound
            )
            for mode, seconds in device.items()
        }

    def require_fit(self) -> None:
        """Raises Infeasible where a tile or HBM is too small: with the largest limits, or the passes, that would do."""
        no, fitting = self._refusal, self.in_passes_that_fit
        if no is None:
            return
        if fitting is None:
            raise no
        passes = fitting.problem.sample_passes
        raise Infeasible(no.what, f"{no.by}, or --sample-passes {passes} (limits are then of one pass)")

    @property
    def fits(self) -> bool:
        """True if every tile and HBM are large enough."""
        most_rows = figure("compiler", "tensor_bytes")
        every = [self.stack_memory(stack) for stack in self.problem.stacking.stacks]
        tiles = all(stack["tile"] <= tile_capacity(self.problem.slice.chip) for stack in every)
        return tiles and all(stack["tables"] <= most_rows for stack in every) and self.memory["fits"]["sequential"]

    @cached_property
    def in_passes_that_fit(self) -> EmbedPlan | None:
        """The plan in the fewest passes over samples with which it fits; None if it fits as it is, or never.

        Its limits are as ``limits_in_passes`` has them.
        """
        if self.fits:
            return None
        own = self.problem
        return in_fewest_passes(own.sample_passes, own.samples, self.in_passes, lambda plan: plan.fits)

    def in_passes(self, passes: int) -> EmbedPlan:
        """The plan in more passes over samples than it has, with limits as ``limits_in_passes`` has them."""
        own = self.problem
        limits = {
            name: limits_in_passes(one, passes, own.cores, before=own.sample_passes) for name, one in own.limits.items()
        }
        return EmbedPlan(problem=dataclasses.replace(own, limits=limits, sample_passes=passes))

    @cached_property
    def _refusal(self) -> Infeasible | None:
        """The reason why the plan does not fit, with the largest limits that would; None if it fits."""
        room, most_rows = tile_capacity(self.problem.slice.chip), figure("compiler", "tensor_bytes")
        for stack in self.problem.stacking.stacks:
            memory = self.stack_memory(stack)
            if memory["tables"] > most_rows:
                what = f"stack {stack.name} has {format_bytes(memory['tables'])} of rows on a device"
                return Infeasible(what, f"SparseCores take {format_bytes(most_rows)}: more chips, or smaller tables")
            needed = memory["tile"]
            if needed > room:
                what = f"{needed:,.0f} bytes of a tile's {room:,.0f}"
                most = limits_text(self.largest_in_tile(stack))
                return Infeasible(f"limits of stack {stack.name}", f"{what}; at most {most}")
        if self.memory["fits"]["sequential"]:
            return None
        total, capacity = self.memory["total"]["sequential"], self.memory["capacity"]
        what = f"{format_bytes(total)} of HBM on a device, which has {format_bytes(capacity)}"
        largest = self.largest_in_hbm(capacity)
        if largest is None:
            return Infeasible(what, "too much even with the smallest buffers: more chips, or smaller tables")
        return Infeasible(what, f"limits at most {limits_of_stacks_text(largest)}")

    def largest_in_hbm(self, room: float, step: str = "sequential") -> Limits | None:
        """The largest limits in the proportion of the plan's with which a ``step`` takes at most ``room`` bytes.

        None if the smallest are too large.
        """
        share = self.share_in_hbm(room, step)
        return None if share is None else self.scaled(share).problem.limits

    def share_in_hbm(self, room: float, step: str = "sequential") -> float | None:
        """The share of the limits of ``largest_in_hbm``."""

        def fits(share: float) -> bool:
            return bool(self.scaled(share).memory["total"][step] <= room)

        return share_that(fits) if fits(0.0) else None

    def largest_in_tile(self, stack: Stack) -> StackLimits:
        """The largest limits in the proportion of the stack's own that fit in a tile; its own if they do."""
        share, limits = self.share_in_tile(stack), self.problem.limits[stack.name]
        return limits if share == 1 else limits.scaled(share)

    def share_in_tile(self, stack: Stack) -> float:
        """The share of the limits of ``largest_in_tile``: all fits in HBM with them, unless others fill it alone.

        Near a full tile each id is replicated so often that the stack in HBM may be what binds.
        """
        room = tile_capacity(self.problem.slice.chip)
        if self.stack_memory(stack)["tile"] <= room:
            return 1.0
        others_fit = self.scaled(0.0, (stack,)).memory["fits"]["sequential"]

        def fits(share: float) -> bool:
            plan = self.scaled(share, (stack,))
            in_hbm = plan.memory["fits"]["sequential"] or not others_fit
            return plan.stack_memory(stack)["tile"] <= room and in_hbm

        return share_that(fits)

    def scaled(self, share: float, stacks: Iterable[Stack] | None = None) -> EmbedPlan:
        """The plan with ``share`` of the limits of some stacks, or of all. A share of 1 leaves them as they are."""
        limits = dict(self.problem.limits)
        if share != 1:
            chosen = self.problem.stacking.stacks if stacks is None else stacks
            limits |= {stack.name: limits[stack.name].scaled(share) for stack in chosen}
        return EmbedPlan(problem=dataclasses.replace(self.problem, limits=limits))

    @property
    def obstacles(self) -> list[str]:
        """Reasons why no program runs the plan as it stands; empty if one does."""
        reasons = list(embedding_obstacles(self.problem.stacking.stacks))
        tables = self.problem.tables
        expected = sum(one.ids_per_sample * one.rows_per_sample for one in tables.features)
        if expected > (bound := tables.config.max_ids_per_chip_per_sample) and not tables.config.allow_id_dropping:
            reasons.append(
                f"{expected:g} ids are expected of a sample: host preprocessing refuses batches of more than"
                f" config.max_ids_per_chip_per_sample, {bound}, each"
            )
        try:
            self.require_fit()
        except Infeasible as no:
            reasons.append(str(no))
        return reasons

    @property
    def document(self) -> EmbedPlanDocument:
        """The plan as a record."""
        problem, fitting = self.problem, self.in_passes_that_fit
        return EmbedPlanDocument(
            kind="embed",
            schema=1,
            rooftop_version=__version__,
            tables=problem.tables.to_json(),
            slice=SparseCoreSlice(
                **vars(PlannedSlice.of(problem.slice)),
                sparse_cores=problem.cores,
                sparse_cores_per_device=self._per_device,
            ),
            workload=EmbedWorkload(
                batch=problem.batch,
                dense_flops_per_sample=problem.dense_flops,
                host_threads=problem.threads,
                sample_passes=problem.sample_passes,
            ),
            limits={stack.name: problem.limits[stack.name] for stack in problem.stacking.stacks},
            stacks=tuple(
                PlannedStack(
                    name=one.name,
                    tables=one.tables,
                    width=one.width,
                    rows=one.rows,
                    padding_bytes=one.padding_bytes,
                    waste=one.waste,
                    memory=StackMemory(**self.stack_memory(problem.stacking.stack(one.name))),
                )
                for one in report(problem.stacking, batch=problem.batch)
            ),
            memory=EmbedMemory(**self.memory),
            host=HostWork(**self.host),
            units_s=self.units_s,
            step=self.step,
            ledger=self.ledger.rows,
            executable=not self.obstacles,
            obstacles=tuple(self.obstacles),
            nearest=None if fitting is None else NearestEmbedPlan(
                sample_passes=fitting.problem.sample_passes, limits=fitting.problem.limits
            ),
            sources=sources(),
        )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        """The plan as plain JSON values."""
        return self.document.to_json()

    @classmethod
    def from_json(cls, data: object) -> EmbedPlan:
        """The inverse of ``to_json``: the problem is read, the answer is computed again. Raises RooftopError."""
        return read_record(EmbedPlanDocument, data, "plan", amounts=True).plan
