"""A trace explained: measured next to compiled next to planned, the verdict, the worst rows, and what to try."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

from rooftop import __version__
from rooftop.core.amounts import Amount, Positive, Share
from rooftop.core.errors import RooftopError
from rooftop.core.files import open_file, parse_json, read_json_object, read_text
from rooftop.core.records import Record, field_values, read_record
from rooftop.explain.join import SPELLED_AS
from rooftop.explain.measured.advice import Advice, advise, origin_of
from rooftop.explain.measured.columns import ExplainedRow, columns
from rooftop.explain.measured.modules import TracedProgram, all_facts, programs_of, read_module
from rooftop.explain.measured.roofs import Achieved, Roof, Roofs, achieved, chip_of_trace, doubts, roofs
from rooftop.explain.measured.stragglers import ProcessTime, process_times, straggling
from rooftop.hardware import Chip, chip_of_kind
from rooftop.plan.training.plan import TrainingPlan
from rooftop.profile.facts import COLLECTIVE, Category, Facts
from rooftop.profile.idle import INSIDE, UNKNOWN, Waiting
from rooftop.profile.measured import (
    DeviceTime,
    Measured,
    MeasuredCollective,
    MeasuredOp,
    MemoryOverTime,
    SparseWork,
    StepTime,
    measure,
)
from rooftop.profile.planes import read_trace
from rooftop.profile.trace import DeviceKind, Trace
from rooftop.runs.folder import MODULE_FILE, RunFolder
from rooftop.runs.records import read_records

SCHEMA: Literal[1] = 1
RUN_FILE = "run.json"


@dataclass(frozen=True, kw_only=True)
class TracedDevices(Record):
    """The devices of a trace; ``emulated`` ones share one CPU."""

    kind: DeviceKind
    count: Positive
    hosts: Positive
    emulated: bool


@dataclass(frozen=True, kw_only=True)
class ExplainedStep(Record):
    """A step: means over devices, and the longest of any. Other figures leave out a step that is not ``counted``."""

    number: int
    seconds: Amount
    slowest_s: Amount
    busy_s: Amount | None
    exposed_s: Amount | None
    counted: bool

    @classmethod
    def of(cls, step: StepTime) -> ExplainedStep:
        """The record of a measured step."""
        return cls(**field_values(step, cls))


@dataclass(frozen=True, kw_only=True)
class ExplainedCollective(Record):
    """A measured collective, with its ``count`` executions a step; bytes are of one execution (None: not known).

    ``of_roof`` is its rate over that of the links of one axis.
    """

    op: str
    program: str
    kind: str
    axes: tuple[str, ...]
    scope: str
    phase: str
    count: Amount
    bytes: Amount | None
    wire_bytes: Amount | None
    in_flight_s: Amount
    exposed_s: Amount
    hidden_s: float
    wire_bytes_per_s: Amount | None
    of_roof: Amount | None
    source: str

    @classmethod
    def of(cls, collective: MeasuredCollective, roof: Roofs | None) -> ExplainedCollective:
        """The record of a measured collective."""
        facts, rate = collective.facts, collective.wire_bytes_per_s
        peak = None if roof is None else roof.ici_bytes_per_s
        return cls(
            op=collective.name,
            program=collective.program,
            kind=facts.kind,
            axes=facts.axes,
            scope=facts.place.scope,
            phase=facts.place.phase,
            count=collective.count,
            bytes=facts.bytes,
            wire_bytes=facts.wire_bytes,
            in_flight_s=collective.in_flight_s,
            exposed_s=collective.exposed_s,
            hidden_s=collective.hidden_s,
            wire_bytes_per_s=rate,
            of_roof=rate / peak if rate and peak else None,
            source=facts.source,
        )


@dataclass(frozen=True, kw_only=True)
class ExplainedOperation(Record):
    """A measured op: ``time_s`` of a step in ``count`` executions; FLOPs and bytes are of one (None: not known).

    ``bound`` is the resource that it needs longest at peak, in the share ``of_roof`` of its time.
    """

    op: str
    program: str
    category: Category
    scope: str
    phase: str
    count: Amount
    time_s: Amount
    flops: Amount | None
    hbm_bytes: Amount | None
    flops_per_s: Amount | None
    hbm_bytes_per_s: Amount | None
    bound: Roof | Literal[""]
    of_roof: Amount | None
    source: str

    @classmethod
    def of(cls, op: MeasuredOp, roof: Roofs | None) -> ExplainedOperation:
        """The record of a measured op."""
        facts = op.facts
        # What only begins or ends a copy or a collective is over before that is: it has no rate.
        ends = facts.opcode.endswith(("-start", "-done"))
        bound = {} if roof is None or ends else roof.bound_s(facts)
        busiest = max(bound, key=lambda name: bound[name], default=None)
        return cls(
            op=op.name,
            program=op.program,
            category=facts.category,
            scope=facts.place.scope,
            phase=facts.place.phase,
            count=op.count,
            time_s=op.time_s,
            flops=facts.flops,
            hbm_bytes=facts.hbm_bytes,
            flops_per_s=None if ends else op.per_second(facts.flops),
            hbm_bytes_per_s=None if ends else op.per_second(facts.hbm_bytes),
            bound=busiest if busiest is not None and bound[busiest] else "",
            of_roof=op.count * bound[busiest] / op.time_s if busiest is not None and op.time_s else None,
            source=facts.source,
        )


@dataclass(frozen=True, kw_only=True)
class Loss(Record):
    """Seconds of a step that the roofline does not need: ``what`` they go into, and what that waits for."""

    what: str
    waits_for: str
    source: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ExplainedRecord(Record):
    """A trace: measured next to compiled next to planned. None: a side does not have the figure.

    Figures are per device and step, means over devices and counted steps, in seconds, bytes and FLOPs. ``step_s`` is
    ``busy_s`` and ``idle_s``; busy are ``compute_s``, ``exposed_s`` in collectives and ``held_s`` in loops and calls.
    ``roofline`` is the share of the step that the busiest resource, ``bound``, needs at peak; ``attributed`` is the
    share of the busy time with a scope. ``by_device`` has the devices that compute longest, and ``processes`` those of
    a run that the others waited for. ``idle`` lists the waits, and ``empty`` why a table has no entries.
    """

    kind: Literal["explained"]
    schema: Literal[1]
    rooftop_version: str
    trace: str
    devices: TracedDevices
    mesh: Mapping[str, Positive]
    programs: tuple[str, ...]
    missing: Mapping[str, str]
    verdict: str
    roofline: Amount | None
    bound: Roof | Literal[""]
    achieved: tuple[Achieved, ...]
    roofs: Roofs | None
    step_s: Amount
    busy_s: Amount
    compute_s: Amount
    exposed_s: Amount
    held_s: Amount
    idle_s: Amount
    attributed: Share
    marked: str
    steps: Annotated[tuple[ExplainedStep, ...], Meta(min_length=1)]
    by_device: tuple[DeviceTime, ...] = ()
    processes: tuple[ProcessTime, ...] = ()
    rows: tuple[ExplainedRow, ...]
    collectives: tuple[ExplainedCollective, ...]
    idle: tuple[Waiting, ...]
    memory: tuple[MemoryOverTime, ...]
    sparse_cores: SparseWork
    operations: tuple[ExplainedOperation, ...]
    losses: tuple[Loss, ...]
    advice: tuple[Advice, ...]
    notes: tuple[str, ...]
    empty: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Explained:
    """A trace with its programs and its plan (None: no plan).

    ``missing`` has the reason for each program without a module. ``chip`` is that of the devices (None: unknown).
    ``compute_dtype`` is the compute dtype of a run ('' for other traces), and ``processes`` are those of a run that the
    others waited for.
    """

    name: str
    trace: Trace
    programs: Mapping[int, TracedProgram]
    missing: Mapping[str, str]
    plan: TrainingPlan | None
    chip: Chip | None
    compute_dtype: str = ""
    processes: tuple[ProcessTime, ...] = ()

    @cached_property
    def facts(self) -> Sequence[Facts]:
        """Facts about each of the trace's ops."""
        return all_facts(self.trace.ops, self.programs)

    @cached_property
    def measured(self) -> Measured:
        """The measured ledger."""
        files = frozenset[str]().union(*(program.files for program in self.programs.values()))
        return measure(self.trace, self.facts, files)

    @cached_property
    def roofs(self) -> Roofs | None:
        """The roofs of the devices; None where there are none, or none is known."""
        return roofs(self.trace, self.chip)

    @cached_property
    def rows(self) -> tuple[ExplainedRow, ...]:
        """Measured, compiled and planned by scope and phase."""
        return columns(self.measured, self.programs, None if self.plan is None else self.plan.ledger, self.roofs)

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the trace."""
        return verdict(self.measured, self.programs, self.rows, self.roofs)

    @cached_property
    def advice(self) -> tuple[Advice, ...]:
        """Advice on the trace."""
        planned = self.plan is not None
        return advise(self.measured, self.programs, self.rows, self.roofs, chip=self.chip, planned=planned)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Caveats: an emulation, another mesh than planned, impossible rates."""
        result = [*self.trace.problems]
        if self.programs:
            result += [f"{name}: {why}" for name, why in self.missing.items()]
        if self.emulated:
            result.append(
                f"{self.measured.devices} devices that one CPU emulates: they share its cores, so that times are "
                "waits for "
                "each other and say nothing about an accelerator"
            )
        if self.plan is not None:
            own = {name: size for name, size in self.plan.mesh.shape.items() if size > 1}
            here = {
                name: size
                for program in self.programs.values()
                if program.given
                for name, size in program.mesh.items()
                if size > 1
            }
            if self.emulated or here != own:
                planned = f"{self.plan.problem.slice.name}, {_sizes(own)}"
                result.append(f"the plan is for {planned}; measured on {self._devices}, {_sizes(here)}")
            result += _dtypes(self.plan, self.compute_dtype, self.rows)
        devices = () if self.emulated else self.measured.by_device
        result += straggling(devices, self.processes, self.measured.step_s)
        return (*result, *doubts(self.measured, self.roofs, self.chip))

    @property
    def emulated(self) -> bool:
        """True if a CPU emulates the devices."""
        return self.trace.kind == "cpu" and self.measured.devices > 1

    @property
    def _devices(self) -> str:
        return f"{self.measured.devices} x {self.trace.kind}"

    @property
    def empty(self) -> dict[str, str]:
        """The reason for each table without entries."""
        empty = dict(self.measured.empty)
        if not self.programs:
            names = "; ".join(f"{name}: {why}" for name, why in self.missing.items())
            empty["compiled"] = names or "no op of the trace belongs to a program"
        if self.plan is None:
            empty["planned"] = "no plan was given (--plan), and the run has none"
        if self.roofs is None:
            empty["roofline"] = (
                "a CPU has no roofs in the catalogue"
                if self.trace.kind == "cpu"
                else "no roof of these devices is known; --on CHIP"
            )
        return empty

    def record(self, *, top: int = 20) -> ExplainedRecord:
        """The report as it is written; ``top`` ops, collectives, waits and losses."""
        result, roof = self.measured, self.roofs
        return ExplainedRecord(
            kind="explained",
            schema=SCHEMA,
            rooftop_version=__version__,
            trace=self.name,
            devices=TracedDevices(
                kind=self.trace.devices[0].kind,
                count=result.devices,
                hosts=len(self.trace.hosts),
                emulated=self.emulated,
            ),
            mesh={name: size for program in self.programs.values() for name, size in program.mesh.items()},
            programs=tuple(sorted({self.trace.programs.get(number, "") for number in self.programs})),
            missing=self.missing,
            verdict=self.verdict.line,
            roofline=self.verdict.roofline,
            bound=self.verdict.bound,
            achieved=achieved(result, roof),
            roofs=roof,
            step_s=result.step_s,
            busy_s=result.busy_s,
            compute_s=result.compute_s,
            exposed_s=result.exposed_s,
            held_s=result.held_s,
            idle_s=result.idle.seconds,
            attributed=result.attributed,
            marked=result.marked,
            steps=tuple(ExplainedStep.of(step) for step in result.steps),
            by_device=result.by_device[:top],
            processes=self.processes[:top],
            rows=self.rows,
            collectives=tuple(ExplainedCollective.of(item, roof) for item in result.collectives[:top]),
            idle=result.idle.waits[:top],
            memory=result.memory,
            sparse_cores=result.sparse,
            operations=tuple(ExplainedOperation.of(op, roof) for op in result.ops[:top]),
            losses=self.verdict.losses[:top],
            advice=self.advice,
            notes=self.notes,
            empty=self.empty,
        )

    def to_json(self, *, top: int = 20) -> dict[str, Any]:
        """The report as plain JSON values; ``top`` ops, collectives, waits and losses."""
        return self.record(top=top).to_json()


@dataclass(frozen=True, kw_only=True)
class _RunDevices(Record):
    name: str = ""


@dataclass(frozen=True, kw_only=True)
class _RunProgram(Record):
    compute_dtype: str = ""


@dataclass(frozen=True, kw_only=True)
class _RunJob(Record):
    program: _RunProgram = _RunProgram()


@dataclass(frozen=True, kw_only=True)
class _TracedRun(Record):
    """The part of run.json that is about a run's trace."""

    mesh: Mapping[str, int] | None = None
    devices: _RunDevices = _RunDevices()
    job: _RunJob = _RunJob()


def explain(
    path: Path,
    *,
    plan: TrainingPlan | None = None,
    modules: Sequence[str] = (),
    mesh: Mapping[str, int] | None = None,
    chip: Chip | None = None,
) -> Explained:
    """Explain a run of ``rooftop train --profile``, or any trace of JAX's profiler.

    ``modules`` are texts of compiled modules, for traces without any. ``mesh`` has the axes and sizes that programs run
    on, in the order of device ids, and ``chip`` is that of the devices. A run has its own mesh and plan.
    Raises RooftopError for what is neither a run nor a trace, and for traces in which nothing ran.
    """
    about = _run(path)
    requested, saved_texts = mesh, list[str]()
    if about is not None:
        if not (path / "profile").is_dir():
            raise RooftopError("run", str(path), "a run with a trace: rooftop train ... --profile steps=A..B")
        mesh = mesh or about.mesh
        if chip is None:
            # '8 x TPU v5e': the number of devices, and their kind.
            chip = chip_of_kind(about.devices.name.partition(" x ")[2])
        if plan is None and (path / "plan.json").exists():
            plan = TrainingPlan.from_json(
                read_json_object(path / "plan.json", field="plan", accepted="the plan of a run")
            )
        if (module := path / "profile" / MODULE_FILE).exists():
            saved_texts.append(read_module(module))
    _refuse_others(path)
    trace = read_trace(path / "profile" if about is not None else path)
    programs, missing = programs_of(trace, mesh, modules, saved_texts)
    if requested and programs and not any(program.given for program in programs.values()):
        devices = max(prod(program.mesh.values()) for program in programs.values())
        raise RooftopError(
            "mesh", _sizes(requested), f"axes whose sizes multiply to the {devices} devices of the program"
        )
    # Devices that a CPU emulates have no figures.
    chip = None if trace.kind == "cpu" else chip or chip_of_trace(trace)
    ran = "" if about is None else about.job.program.compute_dtype
    processes = () if about is None else process_times(read_records(RunFolder(path=path).metrics))
    return Explained(
        name=str(path), trace=trace, programs=programs, missing=missing, plan=plan, chip=chip, compute_dtype=ran,
        processes=processes,
    )  # fmt: skip


def _dtypes(plan: TrainingPlan, ran: str, rows: Sequence[ExplainedRow]) -> list[str]:
    """Note on bytes that differ because a dtype is wider or narrower than planned."""
    planned = plan.problem.numerics.compute
    if ran and ran != planned:
        return [f"the plan computes in {planned}, the run in {ran}: bytes, and rates, are those of another dtype"]
    both = [
        collective
        for row in rows
        for collective in row.collectives
        if collective.planned_bytes and collective.compiled_bytes
    ]
    twice = [pair for pair in both if pair.compiled_bytes == 2 * (pair.planned_bytes or 0.0)]
    if len(twice) * 2 > len(both):
        return [
            f"{len(twice)} of {len(both)} collectives carry twice the bytes that are planned: numbers planned as "
            f"{planned} are moved as f32, as XLA does on CPUs"
        ]
    return []


def _refuse_others(path: Path) -> None:
    """Raises RooftopError for files that belong elsewhere, and says where."""
    try:
        with open_file(path) as file:
            begins = file.read(64).lstrip()
    except OSError:
        return  # a folder, or an error that the reader of traces reports
    if begins.startswith(b"HloModule"):
        raise RooftopError("trace", str(path), "a trace or a run; modules go to --hlo beside it, lines of them to --op")
    if begins.startswith(b"{"):
        raise RooftopError("trace", str(path), "a trace or a run; plans and reports go to --diff, or to rooftop ui")


def _run(path: Path) -> _TracedRun | None:
    """Description of a run; None if the path is no run's folder."""
    try:
        result = parse_json(read_text(path / RUN_FILE))
    except (OSError, ValueError, RecursionError):
        return None
    return read_record(_TracedRun, result, "run") if isinstance(result, dict) else None


def _sizes(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{name} {size}" for name, size in mesh.items()) or "one device"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """``roofline`` is the share of the step that the busiest resource needs at its peak (None without roofs).

    ``bound`` names that resource; ``losses`` come with the largest first.
    """

    line: str
    roofline: float | None
    bound: Roof | Literal[""]
    losses: tuple[Loss, ...]


def verdict(
    measured: Measured, programs: Mapping[int, TracedProgram], rows: tuple[ExplainedRow, ...], roof: Roofs | None
) -> Verdict:
    """Return the verdict on a trace."""
    share, bound = roofline_share(measured, roof)
    losses = tuple(sorted(_losses(measured, programs, rows, roof), key=lambda loss: -loss.seconds))
    parts = []
    if measured.trace.kind == "cpu":
        emulated = f"{measured.devices} devices emulated on one CPU: waits are real, speeds are not"
        parts.append(emulated if measured.devices > 1 else "a CPU, of which no roofs are known")
    elif share is None and roof is None:
        parts.append("no roofline: no roof of these devices is known (--on CHIP names one)")
    elif share is None:
        graphs = any(op.name.startswith("command_buffer") for op in measured.ops)
        why = " (XLA_FLAGS=--xla_gpu_enable_command_buffer= makes a GPU's trace name them)" if graphs else ""
        parts.append(f"no roofline: the trace names no instructions of a program{why}")
    else:
        parts.append(f"{share:.0%} of the roofline ({bound})")
    if losses and measured.step_s:
        first = losses[0]
        waits = f": it waits for {first.waits_for}" if first.waits_for else ""
        at = f" at {first.source.rpartition('/')[2]}" if first.source else ""
        parts.append(f"{first.seconds / measured.step_s:.0%} is {first.what}{waits}{at}")
    return Verdict(line="; ".join(parts), roofline=share, bound=bound, losses=losses)


def roofline_share(measured: Measured, roof: Roofs | None) -> tuple[float | None, Roof | Literal[""]]:
    """The share of a step that its busiest resource needs at peak, and which that is; (None, '') without roofs."""
    if roof is None or not measured.step_s:
        return None, ""
    totals: dict[Roof, float] = {}
    for op in measured.ops:
        for resource, seconds in roof.bound_s(op.facts).items() if op.facts.role != "done" else ():
            totals[resource] = totals.get(resource, 0.0) + op.count * seconds
    if not any(totals.values()):
        return None, ""
    bound = max(totals, key=lambda name: totals[name])
    return totals[bound] / measured.step_s, bound


def _losses(
    measured: Measured, programs: Mapping[int, TracedProgram], rows: tuple[ExplainedRow, ...], roof: Roofs | None
) -> Iterator[Loss]:
    hidden = _planned_hidden(rows)
    groups: dict[str, list[MeasuredCollective]] = {}
    for collective in measured.collectives:
        if collective.exposed_s:
            name = f"{collective.facts.kind} over {','.join(collective.facts.axes) or 'unknown axes'}"
            article = "an" if name[0] == "a" else "a"
            groups.setdefault(f"{article} {name}{_plan(collective, hidden)}", []).append(collective)
    for what, group in groups.items():
        # The one that is exposed longest comes first.
        many = f" ({len(group)} of them, most in {group[0].name})" if len(group) > 1 else ""
        yield Loss(
            what=f"{what}{many}",
            waits_for=_waits_for(group[0], programs),
            source=group[0].facts.source,
            seconds=sum(member.exposed_s for member in group),
        )
    for wait in measured.idle.waits:
        if wait.reason == INSIDE:
            yield Loss(what="idle inside programs, between ops", waits_for="", source="", seconds=wait.seconds)
        elif wait.reason == UNKNOWN:
            what = "idle between programs, for which the trace has no reason"
            yield Loss(what=what, waits_for="", source="", seconds=wait.seconds)
        else:
            inner = f" ({wait.what})" if wait.what else ""
            yield Loss(
                what="idle between programs", waits_for=f"the host, which {wait.reason}{inner}", source=wait.where,
                seconds=wait.seconds,
            )  # fmt: skip
    for op in measured.ops if roof is not None else ():
        if op.facts.category != COLLECTIVE and roof is not None:
            bound = op.count * max(roof.bound_s(op.facts).values())
            if 0 < bound < op.time_s:
                what = f"{op.name} ({op.facts.place.scope} {op.facts.place.phase}) above its roof"
                yield Loss(what=what, waits_for="", source=op.facts.source, seconds=op.time_s - bound)


def _planned_hidden(rows: tuple[ExplainedRow, ...]) -> dict[tuple[str, str, str, tuple[str, ...]], bool]:
    """True for the planned collectives that are hidden, by scope, phase, kind (as a compiler may spell it) and axes."""
    return {
        (row.scope, row.phase, kind, collective.axes): not collective.planned_exposed_s
        for row in rows
        for collective in row.collectives
        if collective.planned_bytes
        for kind in (SPELLED_AS.get(collective.kind, collective.kind), collective.kind)
    }


def _plan(collective: MeasuredCollective, hidden: Mapping[tuple[str, str, str, tuple[str, ...]], bool]) -> str:
    """The plan's statement on a collective, if there is a plan; for a combined one, on any part."""
    if not hidden:
        return ""
    axes = tuple(sorted(collective.facts.axes))
    planned = [hidden.get((place.scope, place.phase, collective.facts.kind, axes)) for place in collective.facts.places]
    known = [said for said in planned if said is not None]
    return " that nobody planned" if not known else " that the plan hides" if all(known) else ""


def _waits_for(collective: MeasuredCollective, programs: Mapping[int, TracedProgram]) -> str:
    """The input that a collective waits for, and the reason that nothing overlaps with it."""
    operand = origin_of(collective, programs)
    if operand is None:
        return ""
    if operand.argument:
        return f"nothing but the argument {operand.argument}, so that it could begin earlier"
    line = operand.source.rpartition("/")[2]
    return f"{operand.made_by}" + (f" ({line})" if line else "")
