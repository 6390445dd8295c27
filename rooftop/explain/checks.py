"""Whether a compiled program is what was planned: each figure with its tolerance, and the verdict in one line."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from rooftop.explain.findings import IN_STEPS, SMALL, Findings
from rooftop.explain.join import Joined
from rooftop.ledger import Ledger
from rooftop.plan import TrainingPlan
from rooftop.quantities import format_bytes, format_count, format_seconds

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
        """Whether they agree to within the tolerance, or to within ``slack`` of the unit."""
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
    joined: Iterable[Joined],
    findings: Findings,
) -> tuple[Check, ...]:
    """Matmul FLOPs, peak memory, collective bytes by axes, expected time, and collectives without a reason."""
    planned, flops = float(plan.ledger.flops(kernels=False)), float(compiled.flops(kernels=False))
    over, under = PEAK
    found = [
        Check(name="matmul FLOPs", unit="", planned=planned, compiled=flops, above=FLOPS, below=FLOPS),
        Check(
            name="peak memory", unit="B", planned=plan.memory_bytes, compiled=peak_bytes,
            above=over, below=under,
        ),
    ]  # fmt: skip
    for axes, (ours, theirs) in bytes_by_axes(joined, findings).items():
        name = f"collectives over {axes}"
        found.append(
            Check(name=name, unit="B", planned=ours, compiled=theirs, above=COLLECTIVES, below=COLLECTIVES, slack=SMALL)
        )
    found.append(
        Check(
            name="expected time",
            unit="s",
            planned=plan.expected_s,
            compiled=float(compiled.expected_s),
            above=TIME,
            below=TIME,
        )
    )
    stray = sum(each.bytes for each in findings.unexplained)
    found.append(
        Check(name="unexplained collectives", unit="B", planned=0.0, compiled=stray, above=0.0, below=0.0, slack=SMALL)
    )
    return tuple(found)


def bytes_by_axes(joined: Iterable[Joined], findings: Findings) -> dict[str, tuple[float, float]]:
    """Collective bytes per device and step, planned and compiled, by the axes that each collective is over.

    A sum over slices that the compiler takes in steps, over other axes each, is left out on both sides.
    """
    totals: dict[str, list[float]] = {}

    def add(axes: Iterable[str], planned: float, compiled: float) -> None:
        sums = totals.setdefault("+".join(sorted(axes)), [0.0, 0.0])
        sums[0] += planned
        sums[1] += compiled

    for row in joined:
        for each in row.collectives:
            add(each.axes, each.planned_bytes or 0.0, each.compiled_bytes or 0.0)
    for finding in findings.missing:
        if finding.rule == IN_STEPS:
            add(finding.axes, -finding.bytes, 0.0)
    for finding in findings.unexpected:
        if finding.rule == IN_STEPS:
            add(finding.axes, 0.0, -finding.bytes)
    return {axes: (planned, compiled) for axes, (planned, compiled) in totals.items() if planned or compiled}


def verdict(plan: TrainingPlan, peak_bytes: float, found: Iterable[Check]) -> str:
    """One line: what holds, or what does not."""
    broken = [str(check) for check in found if not check.holds]
    line = f"differs: {'; '.join(broken)}" if broken else "as planned"
    capacity = format_bytes(plan.problem.capacity)
    if not plan.fits:
        fits = f"it fits ({format_bytes(peak_bytes)} of {capacity}), though not by the plan's arithmetic"
        return f"{line}; {fits} ({format_bytes(plan.memory_bytes)})"
    return f"{line}; {format_bytes(peak_bytes)} of {capacity} a device"
