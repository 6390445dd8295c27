"""A compiled program as a report: the compiler's result and, next to a plan, the differences from the plan."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rooftop import __version__
from rooftop.compiler.compiling import Compiled
from rooftop.compiler.machine.schedule import Scheduled, ScheduleTimeline
from rooftop.compiler.memory import PeakMemory
from rooftop.compiler.timed import TimedLedger, compiled_ledger
from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.explain.compiled.findings import IN_STEPS, SMALL, Findings, find
from rooftop.explain.compiled.rooflines import OperationRoofline, operations, slowest
from rooftop.explain.join import JoinedRow, join
from rooftop.plan.training.plan import TrainingPlan
from rooftop.roofline.rates import Rates

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class CompiledReport:
    """A compiled program, timed; ``plan`` is what it is set next to (None: any other program)."""

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
    def flops(self) -> float:
        """Matmul FLOPs per device and step, hand-written kernels apart."""
        return float(self.ledger.flops(kernels=False))

    @property
    def kernel_flops(self) -> float:
        """FLOPs per device and step within hand-written kernels, as declared next to each of them."""
        return float(self.ledger.flops()) - self.flops

    def slowest(self, count: int) -> list[OperationRoofline]:
        """The instructions that take the most time."""
        return slowest(self.operations, count)

    def to_json(self, *, top: int = 20) -> dict[str, Any]:
        """The report as plain JSON values; ``top`` operations."""
        compiled, plan, mesh = self.compiled, self.plan, self.compiled.mesh
        planned = None if plan is None else plan.ledger
        flops = 0.0 if planned is None else float(planned.flops(kernels=False))
        findings = self.findings
        return {
            "kind": "compiled",
            "schema": SCHEMA,
            "rooftop_version": __version__,
            "versions": dict(compiled.versions),
            "slice": {"name": mesh.slice.name, "chips": mesh.slice.chips, "devices": mesh.slice.devices},
            "mesh": mesh.to_json(),
            "fits": True,
            "compile_s": compiled.compile_s,
            "peak_bytes": self.peak_bytes,
            "planned_peak_bytes": None if plan is None else plan.memory_bytes,
            "capacity_bytes": mesh.slice.device_hbm_usable_bytes,
            "memory": None if compiled.at_peak is None else compiled.at_peak.by_class,
            "planned_memory": None if plan is None else plan.memory,
            "buffers": largest(compiled.at_peak, top),
            "flops": self.flops,
            "planned_flops": None if planned is None else flops,
            "kernel_flops": self.kernel_flops,
            "planned_kernel_flops": None if planned is None else float(planned.flops()) - flops,
            "kernels": list(self.timeline.kernels),
            "step": self.timed.step.to_json(),
            "planned_step": None if planned is None else _planned_step(planned),
            "collectives": [_entry(collective) for collective in self.timeline.collectives],
            "unexpected": [finding.to_json() for finding in findings.unexpected],
            "missing": [finding.to_json() for finding in findings.missing],
            "recomputed": [finding.to_json() for finding in findings.recomputed],
            "spelled": [finding.to_json() for finding in findings.spelled],
            "checks": [check.to_json() for check in self.checks],
            "agrees": self.agrees,
            "verdict": self.verdict,
            "joined": [item.to_json() for item in self.joined],
            "operations": [item.to_json() for item in self.slowest(top)],
            "ledger": self.ledger.to_json(),
        }


def report(plan: TrainingPlan | None, compiled: Compiled) -> CompiledReport:
    """Report on a compiled program, next to its plan if there is one."""
    return CompiledReport(plan=plan, compiled=compiled)


def largest(at_peak: PeakMemory | None, count: int) -> list[dict[str, Any]]:
    """The largest arrays that are alive at the peak, as plain JSON values."""
    return [] if at_peak is None else [asdict(buffer) for buffer in at_peak.buffers[:count]]


def _planned_step(ledger: Ledger) -> dict[str, float]:
    """The figures of ``rooftop.compiler.timed.CompiledTimes`` for a planned ledger."""
    exposed = {"ici": 0.0, "dcn": 0.0}
    for row in ledger:
        for collective in row.collectives:
            bound = sum(float(seconds) for seconds in collective.time_s.values())
            for name, seconds in collective.time_s.items():
                exposed[name] += (
                    float(row.count) * float(collective.exposed_s) * float(seconds) / bound if bound else 0.0
                )
    busy = {f"{name}_s": float(ledger.total(name)) for name in ("mxu", "vpu", "hbm")}
    shown = {f"exposed_{name}_s": seconds for name, seconds in exposed.items()}
    return busy | shown | {"expected_s": float(ledger.expected_s), "serial_s": float(ledger.serial_s)}


def _entry(item: Scheduled) -> dict[str, Any]:
    collective = item.collective
    return {
        "scope": collective.scope,
        "phase": collective.phase,
        "kind": collective.kind,
        "axes": list(collective.axes),
        "bytes": collective.bytes,
        "wire_bytes": collective.wire_bytes,
        "count": collective.executions,
        "expected_s": item.price_s,
        "exposed_s": item.exposed_s,
        "synchronous": collective.synchronous,
        "ring": collective.hops > 0,
        "source": collective.source,
    }


def _alone(compiled_report: CompiledReport) -> str:
    """The verdict on a program that nobody planned."""
    total_s, usable = compiled_report.timeline.total_s, compiled_report.compiled.mesh.slice.device_hbm_usable_bytes
    share = compiled_report.timeline.exposed_s / total_s if total_s else 0.0
    return (
        f"{format_seconds(total_s)} expected, {share:.0%} of it waiting for collectives; "
        f"peak {format_bytes(compiled_report.peak_bytes)} of {format_bytes(usable)} a device"
    )


#: Largest share by which planned figures may differ from compiled ones. Planned memory may be too high by the first and
#: too low by the second: a plan that is too low ends in an OOM.
FLOPS = 0.01
PEAK = (0.10, 0.03)
COLLECTIVES = 0.05
TIME = 0.20


@dataclass(frozen=True, kw_only=True)
class Check:
    """One figure on both sides, with the shares by which the planned one may exceed and fall short of the other."""

    name: str
    unit: str
    planned: float
    compiled: float
    above: float
    below: float
    slack: float = 0.0

    @property
    def ratio(self) -> float | None:
        """Planned over compiled (None where the compiled figure is 0)."""
        return self.planned / self.compiled if self.compiled else None

    @property
    def holds(self) -> bool:
        """True if both agree within the tolerance, or within ``slack`` of the unit."""
        excess = self.planned - self.compiled
        within = -self.below * self.compiled <= excess <= self.above * self.compiled
        return within or abs(excess) <= self.slack

    def __str__(self) -> str:
        write = {"B": format_bytes, "s": format_seconds}.get(self.unit, format_count)
        return f"{self.name} {write(self.compiled)} for {write(self.planned)} planned"

    def to_json(self) -> dict[str, Any]:
        """The check as plain JSON values."""
        return {
            "name": self.name,
            "unit": self.unit,
            "planned": self.planned,
            "compiled": self.compiled,
            "ratio": self.ratio,
            "above": self.above,
            "below": self.below,
            "holds": self.holds,
        }


def checks(
    plan: TrainingPlan,
    compiled: Ledger,
    peak_bytes: float,
    joined: Iterable[JoinedRow],
    findings: Findings,
) -> tuple[Check, ...]:
    """Matmul FLOPs, peak memory, collective bytes by axes, expected time, and collectives without a reason."""
    planned, flops = float(plan.ledger.flops(kernels=False)), float(compiled.flops(kernels=False))
    over, under = PEAK
    result = [
        Check(name="matmul FLOPs", unit="", planned=planned, compiled=flops, above=FLOPS, below=FLOPS),
        Check(
            name="peak memory", unit="B", planned=plan.memory_bytes, compiled=peak_bytes,
            above=over, below=under,
        ),
    ]  # fmt: skip
    for axes, (ours, theirs) in bytes_by_axes(joined, findings).items():
        name = f"collectives over {axes}"
        result.append(
            Check(name=name, unit="B", planned=ours, compiled=theirs, above=COLLECTIVES, below=COLLECTIVES, slack=SMALL)
        )
    result.append(
        Check(
            name="expected time",
            unit="s",
            planned=plan.expected_s,
            compiled=float(compiled.expected_s),
            above=TIME,
            below=TIME,
        )
    )
    stray = sum(item.bytes for item in findings.unexplained)
    result.append(
        Check(name="unexplained collectives", unit="B", planned=0.0, compiled=stray, above=0.0, below=0.0, slack=SMALL)
    )
    return tuple(result)


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
