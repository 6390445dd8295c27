"""A compiled program as a report: what the compiler made of it and, beside a plan, whether that is what was planned."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from rooftop import __version__
from rooftop.explain.checks import Check, checks, verdict
from rooftop.explain.findings import Findings, find
from rooftop.explain.join import Joined, join
from rooftop.explain.rooflines import Operation, operations, slowest
from rooftop.ledger import Ledger
from rooftop.plan import TrainingPlan
from rooftop.quantities import format_bytes, format_seconds
from rooftop.roofline.rates import Rates
from rooftop.xla.compiling import Compiled
from rooftop.xla.memory import PeakMemory
from rooftop.xla.schedule import Scheduled, Timeline
from rooftop.xla.timed import TimedLedger, compiled_ledger

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """A compiled program, timed; ``plan`` is what it is set beside (None: any other program)."""

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
    def timeline(self) -> Timeline:
        """The compiled schedule, run on one device."""
        return self.timed.timeline

    @property
    def ledger(self) -> Ledger:
        """The compiled ledger; its expected seconds add up to those of the timeline."""
        return self.timed.ledger

    @cached_property
    def operations(self) -> tuple[Operation, ...]:
        """Every instruction that computes, with its roofline."""
        return operations(self.compiled.module, self.timeline, self.rates)

    @cached_property
    def joined(self) -> tuple[Joined, ...]:
        """Planned beside compiled by scope and phase; empty without a plan."""
        return () if self.plan is None else tuple(join(self.plan.ledger, self.ledger))

    @cached_property
    def findings(self) -> Findings:
        """What was compiled and not planned, planned and not compiled, and done twice."""
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
        """Whether every check holds."""
        return all(check.holds for check in self.checks)

    @property
    def verdict(self) -> str:
        """One line."""
        if self.plan is None:
            return _alone(self)
        return verdict(self.plan, self.peak_bytes, self.checks)

    @property
    def peak_bytes(self) -> float:
        """What is alive in HBM at the peak; XLA's own figure where it left no report of what that is."""
        at_peak = self.compiled.at_peak
        return float(self.compiled.peak_bytes if at_peak is None else at_peak.peak_bytes)

    @property
    def flops(self) -> float:
        """Matmul FLOPs per device and step, hand-written kernels apart."""
        return float(self.ledger.flops(kernels=False))

    @property
    def kernel_flops(self) -> float:
        """FLOPs per device and step within hand-written kernels, as declared beside each of them."""
        return float(self.ledger.flops()) - self.flops

    def slowest(self, count: int) -> list[Operation]:
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
            "collectives": [_entry(each) for each in self.timeline.collectives],
            "unexpected": [each.to_json() for each in findings.unexpected],
            "missing": [each.to_json() for each in findings.missing],
            "recomputed": [each.to_json() for each in findings.recomputed],
            "spelled": [each.to_json() for each in findings.spelled],
            "checks": [each.to_json() for each in self.checks],
            "agrees": self.agrees,
            "verdict": self.verdict,
            "joined": [each.to_json() for each in self.joined],
            "operations": [each.to_json() for each in self.slowest(top)],
            "ledger": self.ledger.to_json(),
        }


def report(plan: TrainingPlan | None, compiled: Compiled) -> Report:
    """What the compiler made of a program, beside its plan if there is one."""
    return Report(plan=plan, compiled=compiled)


def largest(at_peak: PeakMemory | None, count: int) -> list[dict[str, Any]]:
    """The largest arrays that are alive at the peak, as plain JSON values."""
    return [] if at_peak is None else [asdict(each) for each in at_peak.buffers[:count]]


def _planned_step(ledger: Ledger) -> dict[str, float]:
    """The figures of ``rooftop.xla.timed.StepTimes`` for a planned ledger."""
    exposed = {"ici": 0.0, "dcn": 0.0}
    for row in ledger:
        for each in row.collectives:
            bound = sum(float(seconds) for seconds in each.time_s.values())
            for name, seconds in each.time_s.items():
                exposed[name] += float(row.count) * float(each.exposed_s) * float(seconds) / bound if bound else 0.0
    busy = {f"{name}_s": float(ledger.total(name)) for name in ("mxu", "vpu", "hbm")}
    shown = {f"exposed_{name}_s": seconds for name, seconds in exposed.items()}
    return busy | shown | {"expected_s": float(ledger.expected_s), "serial_s": float(ledger.serial_s)}


def _entry(item: Scheduled) -> dict[str, Any]:
    each = item.collective
    return {
        "scope": each.scope,
        "phase": each.phase,
        "kind": each.kind,
        "axes": list(each.axes),
        "bytes": each.bytes,
        "wire_bytes": each.wire_bytes,
        "count": each.executions,
        "expected_s": item.price_s,
        "exposed_s": item.exposed_s,
        "synchronous": each.synchronous,
        "ring": each.hops > 0,
        "source": each.source,
    }


def _alone(found: Report) -> str:
    """The verdict on a program that nobody planned."""
    total_s, usable = found.timeline.total_s, found.compiled.mesh.slice.device_hbm_usable_bytes
    share = found.timeline.exposed_s / total_s if total_s else 0.0
    return (
        f"{format_seconds(total_s)} expected, {share:.0%} of it waiting for collectives; "
        f"peak {format_bytes(found.peak_bytes)} of {format_bytes(usable)} a device"
    )
