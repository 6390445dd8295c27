"""A compiled program as a report: the compiler's result and, next to a plan, the differences from the plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, Literal

from msgspec import Meta

from rooftop import __version__
from rooftop.arrays.mesh import MeshLayout
from rooftop.compiler.compiling import Compiled
from rooftop.compiler.hlo.text import Module
from rooftop.compiler.ledger import CompiledTimes, TimedLedger, compiled_ledger
from rooftop.compiler.machine.schedule import Scheduled, ScheduleTimeline
from rooftop.compiler.memory import HbmBuffer, PeakMemory
from rooftop.compiler.sparsecore import embedding_calls
from rooftop.core.amounts import Amount, Count
from rooftop.core.ledger import CollectiveKind, Ledger, Row
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.core.records import AtLeast, Record, read_record
from rooftop.explain.compiled.findings import IN_STEPS, SMALL, Finding, Findings, find
from rooftop.explain.compiled.rooflines import CalledKernel, OperationRoofline, called_kernels, operations
from rooftop.explain.join import JoinedRow, join
from rooftop.plan.documents import PlannedSlice
from rooftop.plan.training.plan import PlanSummary, TrainingPlan, TrainingPlanDocument
from rooftop.roofline.rates import Rates

SCHEMA: Literal[1] = 1
#: Versions of jax, jaxlib and the compiler; empty for a module alone.
Versions = Mapping[str, str]
#: A number that an option of the compiler is set to. It may be negative.
OptionNumber = Annotated[int, AtLeast(ge=-(2**63))]


@dataclass(frozen=True, kw_only=True)
class CompilationRecord(Record):
    """A program given to the compiler. Bytes are of one device; planned figures are None without a plan.

    ``plan`` is the whole plan.json. ``peak_bytes`` are alive at the peak (or needed, if the program does not fit),
    ``capacity_bytes`` usable. ``memory`` and ``planned_memory`` have the bytes at the peak by class, and ``buffers``
    the largest arrays.
    """

    kind: Literal["compiled"]
    schema: Literal[1]
    rooftop_version: str
    plan: TrainingPlanDocument | None = None
    slice: PlannedSlice
    mesh: MeshLayout
    peak_bytes: Amount
    planned_peak_bytes: Amount | None
    capacity_bytes: Amount
    memory: Mapping[str, Amount] | None
    planned_memory: Mapping[str, Amount] | None
    buffers: tuple[HbmBuffer, ...]
    verdict: str


@dataclass(frozen=True, kw_only=True)
class CompiledCollective(Record):
    """A logical collective of the program: it runs ``count`` times, and its figures are of one execution.

    ``bytes`` is the payload as in ``rooftop.core.ledger.Collective``, ``wire_bytes`` are sent by one device. The device
    waits for the transfer in ``exposed_s`` of ``expected_s``; for a ``synchronous`` one, in all of it. ``ring``: XLA
    writes it as permutes. ``source`` is 'file:line', and ``frames`` the whole stack, innermost first.
    """

    scope: str
    phase: str
    kind: CollectiveKind
    axes: Annotated[tuple[str, ...], Meta(min_length=1)]
    bytes: Amount
    wire_bytes: Amount
    count: Amount
    expected_s: Amount
    exposed_s: Amount
    synchronous: bool
    ring: bool
    source: str
    frames: tuple[str, ...] = ()

    @classmethod
    def of(cls, scheduled: Scheduled, module: Module) -> CompiledCollective:
        """The record of a collective on the timeline."""
        collective = scheduled.collective
        own = (module.computations[inside].instructions[name] for inside, name in collective.instructions)
        return cls(
            scope=collective.scope,
            phase=collective.phase,
            kind=collective.kind,
            axes=collective.axes,
            bytes=collective.bytes,
            wire_bytes=collective.wire_bytes,
            count=collective.executions,
            expected_s=scheduled.price_s,
            exposed_s=scheduled.exposed_s,
            synchronous=collective.synchronous,
            ring=collective.hops > 0,
            source=collective.source,
            # The parts of a combined collective have lines of their own.
            frames=next((module.frames(item) for item in own if module.source(item) == collective.source), ()),
        )

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for collectives that do the same at the same line."""
        return (
            self.scope, self.phase, self.kind, self.axes, self.bytes, self.wire_bytes, self.synchronous, self.ring,
            self.source,
        )  # fmt: skip


def merged(collectives: Iterable[CompiledCollective]) -> tuple[CompiledCollective, ...]:
    """Equal collectives as one with their count, and means of their times."""
    groups: dict[tuple[object, ...], list[CompiledCollective]] = {}
    for collective in collectives:
        groups.setdefault(collective.key, []).append(collective)
    return tuple(
        replace(
            group[0],
            count=(count := sum(item.count for item in group)),
            expected_s=sum(item.count * item.expected_s for item in group) / count,
            exposed_s=sum(item.count * item.exposed_s for item in group) / count,
        )
        for group in groups.values()
    )


@dataclass(frozen=True, kw_only=True)
class RefusedRecord(CompilationRecord):
    """A program that needs ``over_bytes`` of HBM too many, and the ``nearest`` plan that should fit, if any."""

    fits: Literal[False]
    over_bytes: Amount
    nearest: PlanSummary | None


@dataclass(frozen=True, kw_only=True)
class CompiledRecord(CompilationRecord):
    """A compiled program, next to its plan if it has one. FLOPs and seconds are of one execution on one device.

    ``options`` are those of the compiler, ``left_out`` those of rooftop that it refused. ``kernel_flops`` are inside
    hand-written kernels, ``flops`` are all others. ``called`` lists the kernels; the FLOPs of ``kernels`` are unknown,
    so that times are lower bounds. Figures of a row of the ``ledger`` are of one execution, and its count multiplies;
    those of findings are of a step. Without a plan, equal ``collectives`` are one, and ``layers`` has the number of
    layers that a folded scope stands for: {'model/layers_*': 32}. Fields with defaults are not in files of earlier
    versions.
    """

    fits: Literal[True]
    versions: Versions
    options: Mapping[str, bool | OptionNumber | str] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()
    compile_s: Amount
    flops: Amount
    planned_flops: Amount | None
    kernel_flops: Amount
    planned_kernel_flops: Amount | None
    kernels: tuple[str, ...]
    called: tuple[CalledKernel, ...] = ()
    step: CompiledTimes
    planned_step: CompiledTimes | None
    collectives: tuple[CompiledCollective, ...]
    layers: Mapping[str, Count] = field(default_factory=dict)
    unexpected: tuple[Finding, ...]
    missing: tuple[Finding, ...]
    recomputed: tuple[Finding, ...]
    spelled: tuple[Finding, ...]
    checks: tuple[Check, ...]
    agrees: bool
    joined: tuple[JoinedRow, ...]
    operations: tuple[OperationRoofline, ...]
    ledger: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class SavedAnswer(Record):
    """An answer in plain JSON: its ``kind``, and what tells the programs in it that fit from others."""

    kind: object = ""
    fits: object = False
    compiled: object = None

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> SavedAnswer:
        """The head of an answer, of whatever types it is."""
        return read_record(cls, data, "answer")


def record_kind(data: Mapping[str, Any]) -> type[CompiledRecord] | type[RefusedRecord]:
    """The record of a compilation in plain JSON."""
    return CompiledRecord if SavedAnswer.of(data).fits else RefusedRecord


def saved_compilation(data: Mapping[str, Any], name: str) -> CompiledRecord | None:
    """The compilation in JSON of ``rooftop compile``, or of a check. None for other JSON, and for a refusal.

    Raises RooftopError, which calls the data ``name``, if a field is wrong.
    """
    answer = SavedAnswer.of(data)
    if answer.kind == "check" and isinstance(answer.compiled, Mapping):
        return saved_compilation(answer.compiled, name)
    if answer.kind != "compiled" or not answer.fits:
        return None
    return read_record(CompiledRecord, data, name, amounts=True)


@dataclass(frozen=True, kw_only=True)
class CompiledReport:
    """A compiled program, timed, next to its ``plan`` (None: it has no plan)."""

    plan: TrainingPlan | None
    compiled: Compiled

    @cached_property
    def rates(self) -> Rates:
        """The rates that compute is priced with: those of the slice's chip."""
        return Rates.of(self.compiled.mesh.slice.chip)

    @cached_property
    def timed(self) -> TimedLedger:
        """The compiled ledger with its times, the timeline that they come from, and the step's."""
        return compiled_ledger(self.compiled, self.rates)

    @property
    def timeline(self) -> ScheduleTimeline:
        """The compiled schedule, run on one device."""
        return self.timed.timeline

    @property
    def ledger(self) -> Ledger:
        """The compiled ledger; its expected seconds add up to those of the timeline."""
        return self.timed.ledger

    @cached_property
    def operations(self) -> tuple[OperationRoofline, ...]:
        """Every instruction that computes, with its roofline."""
        return operations(self.compiled.module, self.timeline, self.rates)

    @cached_property
    def collectives(self) -> tuple[CompiledCollective, ...]:
        """The logical collectives; without a plan, equal ones are one."""
        module = self.compiled.module
        single = (CompiledCollective.of(collective, module) for collective in self.timeline.collectives)
        return tuple(single) if self.plan is not None else merged(single)

    @cached_property
    def called(self) -> tuple[CalledKernel, ...]:
        """Every call of a hand-written kernel."""
        return called_kernels(self.compiled.module)

    @cached_property
    def joined(self) -> tuple[JoinedRow, ...]:
        """Planned next to compiled by scope and phase; empty without a plan."""
        return () if self.plan is None else tuple(join(self.plan.ledger, self.ledger))

    @cached_property
    def findings(self) -> Findings:
        """Work compiled but not planned, planned but not compiled, and done twice."""
        planned = Ledger(()) if self.plan is None else self.plan.ledger
        return find(self.joined, planned, self.timeline.collectives, self.operations, self.compiled.mesh)

    @cached_property
    def checks(self) -> tuple[Check, ...]:
        """Each figure that plan and compiler must agree on; empty without a plan."""
        if self.plan is None:
            return ()
        return checks(self.plan, self.ledger, self.peak_bytes, self.joined, self.findings)

    @property
    def agrees(self) -> bool:
        """True if every check holds."""
        return all(check.holds for check in self.checks)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.plan is None:
            return _alone(self)
        return verdict(self.plan, self.peak_bytes, self.checks)

    @property
    def peak_bytes(self) -> float:
        """Bytes alive in HBM at the peak; XLA's own figure if it left no buffer report."""
        at_peak = self.compiled.at_peak
        return float(self.compiled.peak_bytes if at_peak is None else at_peak.peak_bytes)

    @property
    def knows_peak(self) -> bool:
        """False for a module alone, without the compiler's reports: ``peak_bytes`` are its arguments and results."""
        return self.compiled.at_peak is not None or bool(self.compiled.memory)

    @property
    def flops(self) -> float:
        """Matmul FLOPs per device and step, hand-written kernels apart."""
        return float(self.ledger.flops(kernels=False))

    @property
    def kernel_flops(self) -> float:
        """FLOPs per device and step within hand-written kernels, where they are known."""
        return float(self.ledger.flops()) - self.flops

    def slowest(self, count: int) -> list[OperationRoofline]:
        """The instructions that take the most time over all their executions."""
        return sorted(self.operations, key=lambda item: -item.total_s)[:count]

    def record(self, *, top: int = 20) -> CompiledRecord:
        """The report as it is written, with ``top`` operations and buffers."""
        compiled, plan, mesh, findings = self.compiled, self.plan, self.compiled.mesh, self.findings
        planned_flops = planned_kernel_flops = None
        if plan is not None:
            planned_flops = float(plan.ledger.flops(kernels=False))
            planned_kernel_flops = float(plan.ledger.flops()) - planned_flops
        return CompiledRecord(
            kind="compiled",
            schema=SCHEMA,
            rooftop_version=__version__,
            plan=None if plan is None else plan.document,
            slice=PlannedSlice.of(mesh.slice),
            mesh=mesh.described,
            fits=True,
            peak_bytes=self.peak_bytes,
            planned_peak_bytes=None if plan is None else plan.memory_bytes,
            capacity_bytes=mesh.slice.device_hbm_usable_bytes,
            memory=None if compiled.at_peak is None else compiled.at_peak.by_class,
            planned_memory=None if plan is None else plan.memory,
            buffers=largest(compiled.at_peak, top),
            verdict=self.verdict,
            versions=compiled.versions,
            options=compiled.options,
            left_out=compiled.left_out,
            compile_s=compiled.compile_s,
            flops=self.flops,
            planned_flops=planned_flops,
            kernel_flops=self.kernel_flops,
            planned_kernel_flops=planned_kernel_flops,
            kernels=self.timeline.kernels,
            called=self.called,
            step=self.timed.step,
            planned_step=None if plan is None else _planned_step(plan.ledger),
            collectives=self.collectives,
            layers=self.compiled.module.scopes.tree.layers,
            unexpected=findings.unexpected,
            missing=findings.missing,
            recomputed=findings.recomputed,
            spelled=findings.spelled,
            checks=self.checks,
            agrees=self.agrees,
            joined=self.joined,
            operations=tuple(self.slowest(top)),
            ledger=self.ledger.rows,
        )

    def to_json(self, *, top: int = 20) -> dict[str, Any]:
        """The report as plain JSON values; ``top`` operations and buffers."""
        return self.record(top=top).to_json()


def largest(at_peak: PeakMemory | None, count: int) -> tuple[HbmBuffer, ...]:
    """The largest arrays that are alive at the peak."""
    return () if at_peak is None else at_peak.buffers[:count]


def _planned_step(ledger: Ledger) -> CompiledTimes:
    """The times of a planned ledger."""
    exposed = {"ici": 0.0, "dcn": 0.0}
    for row in ledger:
        for collective in row.collectives:
            bound = sum(float(seconds) for seconds in collective.time_s.values())
            for name, seconds in collective.time_s.items():
                exposed[name] += (
                    float(row.count) * float(collective.exposed_s) * float(seconds) / bound if bound else 0.0
                )
    return CompiledTimes(
        **{f"{name}_s": float(ledger.total(name)) for name in ("mxu", "vpu", "hbm")},
        **{f"exposed_{name}_s": seconds for name, seconds in exposed.items()},
        expected_s=float(ledger.expected_s),
        serial_s=float(ledger.serial_s),
    )


def _alone(compiled_report: CompiledReport) -> str:
    """The verdict on a program without a plan."""
    total_s, usable = compiled_report.timeline.total_s, compiled_report.compiled.mesh.slice.device_hbm_usable_bytes
    share = compiled_report.timeline.exposed_s / total_s if total_s else 0.0
    memory = "peak" if compiled_report.knows_peak else "arguments and results"
    embeds = embedding_calls(compiled_report.compiled.module)
    return (
        f"{format_seconds(total_s)} expected, {share:.0%} of it waiting for collectives; "
        f"{memory} {format_bytes(compiled_report.peak_bytes)} of {format_bytes(usable)} a device"
        f"{kernels_text(compiled_report.called)}"
        f"{f'; {embeds} calls of SparseCores count no time: a lower bound' if embeds else ''}"
    )


def kernels_text(called: Iterable[CalledKernel]) -> str:
    """The kernels whose FLOPs are unknown, and those that count with all work that may be done; '' without any."""
    calls = list(called)
    text = ""
    for count, says in (
        (sum(call.flops is None for call in calls), "of unknown FLOPs: a lower bound"),
        (sum(call.limit == "at most" for call in calls), "counted as if no block were skipped: at most"),
    ):
        if count:
            text += f"; {count} kernel{'s' if count > 1 else ''} {says}"
    return text


#: Largest share by which planned figures may differ from compiled ones. Planned memory may be too high by the first and
#: too low by the second: a plan that is too low ends in an OOM.
FLOPS = 0.01
PEAK = (0.10, 0.03)
COLLECTIVES = 0.05
TIME = 0.20


@dataclass(frozen=True, kw_only=True)
class Check(Record):
    """One figure on both sides; ``above`` and ``below`` are the shares by which the planned one may be off.

    ``unit`` is 'B', 's' or '' (a count). ``ratio`` is planned over compiled (None if the compiled figure is 0), and
    ``holds`` says that both agree.
    """

    name: str
    unit: Literal["B", "s", ""]
    planned: Amount
    compiled: Amount
    ratio: float | None
    above: Amount
    below: Amount
    holds: bool

    @classmethod
    def of(
        cls, name: str, unit: Literal["B", "s", ""], planned: float, compiled: float, *,
        above: float, below: float, slack: float = 0.0,
    ) -> Check:  # fmt: skip
        """Compare two figures, which agree within the shares, or within ``slack`` of the unit."""
        excess = planned - compiled
        return cls(
            name=name,
            unit=unit,
            planned=planned,
            compiled=compiled,
            ratio=planned / compiled if compiled else None,
            above=above,
            below=below,
            holds=-below * compiled <= excess <= above * compiled or abs(excess) <= slack,
        )

    def __str__(self) -> str:
        write = {"B": format_bytes, "s": format_seconds}.get(self.unit, format_count)
        return f"{self.name} {write(self.compiled)} for {write(self.planned)} planned"


def checks(
    plan: TrainingPlan,
    compiled: Ledger,
    peak_bytes: float,
    joined: Iterable[JoinedRow],
    findings: Findings,
) -> tuple[Check, ...]:
    """Matmul FLOPs, peak memory, collective bytes by axes, expected time, and collectives without a reason."""
    planned_flops, flops = float(plan.ledger.flops(kernels=False)), float(compiled.flops(kernels=False))
    over, under = PEAK
    stray = sum(item.bytes for item in findings.unexplained)
    return (
        Check.of("matmul FLOPs", "", planned_flops, flops, above=FLOPS, below=FLOPS),
        Check.of("peak memory", "B", plan.memory_bytes, peak_bytes, above=over, below=under),
        *(
            Check.of(f"collectives over {axes}", "B", ours, theirs, above=COLLECTIVES, below=COLLECTIVES, slack=SMALL)
            for axes, (ours, theirs) in bytes_by_axes(joined, findings).items()
        ),
        Check.of("expected time", "s", plan.expected_s, float(compiled.expected_s), above=TIME, below=TIME),
        Check.of("unexplained collectives", "B", 0.0, stray, above=0.0, below=0.0, slack=SMALL),
    )


def bytes_by_axes(joined: Iterable[JoinedRow], findings: Findings) -> dict[str, tuple[float, float]]:
    """Collective bytes per device and step, planned and compiled, by the axes that each collective is over.

    A sum over slices that the compiler takes in steps, over other axes each, is left out on both sides.
    """
    totals: dict[str, list[float]] = {}

    def add(axes: Iterable[str], planned: float, compiled: float) -> None:
        sums = totals.setdefault("+".join(sorted(axes)), [0.0, 0.0])
        sums[0] += planned
        sums[1] += compiled

    for row in joined:
        for collective in row.collectives:
            add(collective.axes, collective.planned_bytes or 0.0, collective.compiled_bytes or 0.0)
    for finding in findings.missing:
        if finding.rule == IN_STEPS:
            add(finding.axes, -finding.bytes, 0.0)
    for finding in findings.unexpected:
        if finding.rule == IN_STEPS:
            add(finding.axes, 0.0, -finding.bytes)
    return {axes: (planned, compiled) for axes, (planned, compiled) in totals.items() if planned or compiled}


def verdict(plan: TrainingPlan, peak_bytes: float, checks: Iterable[Check]) -> str:
    """One line: what holds, or what does not."""
    broken = [str(check) for check in checks if not check.holds]
    line = f"differs: {'; '.join(broken)}" if broken else "as planned"
    capacity = format_bytes(plan.problem.capacity)
    if not plan.fits:
        fits = f"it fits ({format_bytes(peak_bytes)} of {capacity}), though not by the plan's arithmetic"
        return f"{line}; {fits} ({format_bytes(plan.memory_bytes)})"
    return f"{line}; {format_bytes(peak_bytes)} of {capacity} a device"
