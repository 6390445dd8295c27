"""The best plans of a search next to their compiled programs, as records: read without the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from rooftop.core.amounts import Amount, Count, Positive
from rooftop.core.quantities import counted, format_bytes, format_seconds
from rooftop.core.records import Record, derived
from rooftop.plan.training.plan import PlanSummary


@dataclass(frozen=True, kw_only=True)
class CompiledCandidate(Record):
    """A plan of a search and its compiled program. Seconds are of a step, bytes of one device.

    ``planned_rank`` is its rank by the planner, ``rank`` that by the compiled schedule: 1 is the fastest, None if it
    does not fit or was refused, for a ``reason``. ``peak_bytes`` are those that the compiler needs, None if it does not
    say. ``exposed_s`` of ``compiled_s`` are waits for collectives. ``cached``: compiled earlier. ``seconds`` are those
    of the compilation.
    """

    plan: PlanSummary
    planned_rank: Positive
    rank: Positive | None
    compiled_s: Amount | None
    exposed_s: Amount | None
    peak_bytes: Amount | None
    fits: bool
    reason: str = ""
    cached: bool
    seconds: Amount

    @property
    def name(self) -> str:
        """Mesh, remat policy, microbatches and switches, in words."""
        return ", ".join(_words(self.plan))

    @property
    def outcome(self) -> str:
        """Its times, or the reason why it has none, and how long it took to compile."""
        took = "compiled earlier" if self.cached else f"compiled in {self.seconds:.0f} s"
        if self.compiled_s is None:
            return f"{self.reason} ({took})"
        planned, compiled = format_seconds(self.plan.expected_s), format_seconds(self.compiled_s)
        return f"{compiled} compiled, {planned} planned ({took})"


#: Callback of a candidate that has ended: the number of those that have, the number of all, and the candidate.
OnCandidate: TypeAlias = Callable[[int, int, CompiledCandidate], None]


@dataclass(frozen=True, kw_only=True)
class CompiledPlans(Record):
    """The best plans of a search, by the planner, and the one of them whose compiled step is the fastest.

    ``candidates`` are in the planner's order. ``capacity_bytes`` are those of a device. If no candidate fits,
    ``nearest`` is a plan of the slice that should. ``seconds`` are those of this run.
    """

    versions: Mapping[str, str]
    candidates: tuple[CompiledCandidate, ...]
    capacity_bytes: Amount
    nearest: PlanSummary | None = None
    seconds: Amount

    @property
    def best(self) -> CompiledCandidate | None:
        """The candidate of rank 1; None if none fits."""
        return next((candidate for candidate in self.candidates if candidate.rank == 1), None)

    @derived
    def compiled(self) -> Count:
        """Compilations of this run."""
        return sum(not candidate.cached for candidate in self.candidates)

    @derived
    def verdict(self) -> str:
        """One line: does the compiler confirm the planner's first, or which plan it moved there."""
        best, first, total = self.best, self.candidates[0], len(self.candidates)
        if best is None or best.compiled_s is None:
            return f"none of {counted(total, 'compiled plan')} fits: {self._failure(first)}"
        seconds = format_seconds(best.compiled_s)
        if best is first:
            among = f"the fastest of {total} compiled plans" if total > 1 else "the only plan that was compiled"
            return f"compiling confirmed {best.name}: {seconds}, {among}"
        moved = f"compiling moved {best.name} from {_ordinal(best.planned_rank)} to 1st: {seconds}"
        if first.compiled_s is None:
            return f"{moved}; {self._failure(first)}"
        return f"{moved} instead of {format_seconds(first.compiled_s)}"

    def _failure(self, candidate: CompiledCandidate) -> str:
        """A candidate and the reason why it has no rank."""
        if candidate.peak_bytes is None:
            return f"{candidate.name}: {candidate.reason}"
        figures = f"{format_bytes(candidate.peak_bytes)} of {format_bytes(self.capacity_bytes)} a device"
        return f"{candidate.name} needs {figures}"

    @property
    def nearest_text(self) -> str:
        """The plan that should fit, as options."""
        return nearest_text(self.nearest)


def nearest_text(nearest: PlanSummary | None) -> str:
    """The options of a plan that should fit by what the compiler needed, or that there is none."""
    if nearest is None:
        return "no mesh, remat policy or number of microbatches fits on this slice"
    mesh = ",".join(f"{name}={size}" for name, size in nearest.mesh.items())
    return f"nearest that should fit: --mesh {mesh} --remat {nearest.remat} --microbatches {nearest.microbatches}"


def _words(plan: PlanSummary) -> Iterator[str]:
    yield ",".join(f"{name}={size}" for name, size in plan.mesh.items()) or "one device"
    yield f"remat {plan.remat}"
    if plan.microbatches > 1:
        yield f"{plan.microbatches} microbatches"
    if plan.collective_matmuls:
        yield "collective matmuls"
    if plan.experts_over_tensor:
        yield "whole experts over tensor"


def _ordinal(count: int) -> str:
    ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}"
