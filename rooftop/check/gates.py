"""Limits of a checked program: more time or memory than an earlier ledger, and findings that are worth too much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rooftop.check.rules import ProgramFinding
from rooftop.core.amounts import Amount
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.core.records import Record
from rooftop.explain.compiled.report import CompiledRecord


@dataclass(frozen=True, kw_only=True)
class GateLimits:
    """Shares by which time and peak memory may grow, and the seconds that one finding may be worth (None: no limit)."""

    time: float | None = None
    memory: float | None = None
    finding_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Gate(Record):
    """A limit: the figure ``after`` may be ``limit`` at most. ``before`` is that of the earlier ledger (0: none)."""

    name: str
    unit: Literal["s", "B"]
    before: Amount
    after: Amount
    limit: Amount
    holds: bool

    def __str__(self) -> str:
        write = format_seconds if self.unit == "s" else format_bytes
        was = f", {write(self.before)} before ({self.after / self.before - 1:+.1%})" if self.before else ""
        return f"{self.name} {write(self.after)} of {write(self.limit)} at most{was}"


def gates(
    limits: GateLimits,
    before: CompiledRecord | None,
    expected_s: float,
    peak_bytes: float,
    findings: Sequence[ProgramFinding],
) -> tuple[Gate, ...]:
    """Every limit that is set; ``before`` is the earlier ledger."""
    result = []
    if before is not None:
        old_s, old_bytes = float(before.step.expected_s), float(before.peak_bytes)
        for name, unit, share, old, new in (
            ("time", "s", limits.time, old_s, expected_s),
            ("memory", "B", limits.memory, old_bytes, peak_bytes),
        ):
            if share is not None:
                limit = old * (1 + share)
                unit_: Literal["s", "B"] = "s" if unit == "s" else "B"
                # Text keeps every digit: only rounding may exceed an unchanged figure.
                holds = new <= limit * (1 + 1e-9)
                result.append(Gate(name=name, unit=unit_, before=old, after=new, limit=limit, holds=holds))
    if limits.finding_s is not None:
        for finding in findings:
            over = finding.seconds > limits.finding_s
            name = f"{finding.rule} at {finding.source.rpartition('/')[2] or finding.scope}"
            if over:
                result.append(
                    Gate(name=name, unit="s", before=0.0, after=finding.seconds, limit=limits.finding_s, holds=False)
                )
    return tuple(result)
