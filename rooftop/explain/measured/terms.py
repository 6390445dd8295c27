"""The terms of a plan that are off: measured next to planned time of compute, HBM, collectives and host gaps.

A row of the plan is of the term of its busiest resource, and its measured time outside collectives is of the same term.
So a ratio says how much longer the work takes that the plan prices by one figure of the chip.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.core.quantities import format_seconds
from rooftop.explain.measured.report import Explained
from rooftop.hardware import Calibrated, CollectiveFit
from rooftop.plan.training.plan import TrainingPlan
from rooftop.roofline.calibration import MeasuredRun, RunTerm, Term
from rooftop.roofline.rates import Rates

#: Steps that a calibration needs.
LEAST_STEPS = 3
#: A ratio so near to 1 changes nothing.
_NEAR = 0.02
_OF_RESOURCE: Mapping[str, Term] = {"mxu": "compute", "host": "host gaps"}


def traced_terms(explained: Explained) -> MeasuredRun:
    """The terms of a run with a trace. Raises RooftopError without a plan, and with fewer than three counted steps."""
    plan, measured = explained.plan, explained.measured
    if plan is None:
        raise RooftopError("run", explained.name, "a run of a plan: rooftop train plan.json")
    steps = sum(step.counted for step in measured.steps)
    _require_steps(explained.name, steps)
    kinds, planned = _planned(plan)
    seconds = dict.fromkeys(planned, 0.0)
    for row in explained.rows:
        if row.measured is not None:
            work = row.compiled
            unplanned: Term = "compute" if work is not None and work.flops else "HBM"
            seconds[kinds.get((row.scope, row.phase), unplanned)] += row.measured.time_s - row.measured.exposed_s
    seconds["collectives"] = measured.exposed_s
    seconds["idle in programs"] = measured.idle.inside_s
    seconds["host gaps"] = measured.idle.between_s
    return _run(explained.name, steps, measured.step_s, plan, seconds, planned)


def timed_terms(name: str, plan: TrainingPlan, records: Sequence[Mapping[str, Any]]) -> MeasuredRun:
    """The terms of a run without a trace: the whole step, and waits for data; ``records`` are those of metrics.jsonl.

    The first step of a start compiles and is left out. Raises RooftopError with fewer than three others.
    """
    steps = [record for record in records if "seconds" in record][1:]
    _require_steps(name, len(steps))
    step_s = median(record["seconds"] for record in steps)
    waited_s = median(record["seconds"] * record["data_share"] for record in steps)
    gap_s = Rates.of(plan.problem.slice.chip).gap_s
    planned: dict[Term, float] = {"step": plan.expected_s - gap_s, "host gaps": gap_s}
    return _run(name, len(steps), step_s, plan, {"step": step_s - waited_s, "host gaps": waited_s}, planned)


def corrected(run: MeasuredRun, plan: TrainingPlan) -> Calibrated:
    """The fractions of the plan's chip, with those that ``run`` shows to be off changed."""
    chip = plan.problem.slice.chip
    rates = Rates.of(chip)
    result = chip.calibrated or Calibrated(chip=chip.name, by="")
    idle_s = 0.0
    for term in run.terms:
        if term.term == "host gaps":
            idle_s += term.measured_s
        elif term.term == "idle in programs":
            idle_s += max(0.0, term.measured_s - term.planned_s)
        elif term.ratio is None or abs(term.ratio - 1) < _NEAR:
            continue
        elif term.term == "compute":
            result = replace(result, compute=result.compute * term.ratio)
        elif term.term == "HBM":
            result = replace(result, hbm=min(1.0, rates.fractions.hbm / term.ratio))
        elif term.term == "collectives":
            slower = {kind: _slower(fit, term.ratio) for kind, fit in rates.fractions.ici.items()}
            result = replace(result, ici=slower)
        else:
            result = replace(result, step=result.step * term.ratio)
    return replace(result, gap_s=idle_s)


def _require_steps(name: str, steps: int) -> None:
    if steps < LEAST_STEPS:
        accepted = (
            f"a run with {LEAST_STEPS} measured steps or more: rooftop train --profile steps=A..B; this has {steps}"
        )
        raise RooftopError("run", name, accepted)


def _planned(plan: TrainingPlan) -> tuple[dict[tuple[str, str], Term], dict[Term, float]]:
    """The term of each (scope, phase), by its longest row, and the planned seconds of each term."""
    planned: dict[Term, float] = dict.fromkeys(("compute", "HBM", "collectives", "idle in programs", "host gaps"), 0.0)
    longest: dict[tuple[str, str], tuple[float, Term]] = {}
    for row in plan.ledger:
        exposed_s = sum(float(collective.exposed_s) for collective in row.collectives)
        alone_s = float(row.count) * (float(row.expected_s) - exposed_s)
        # Pipeline stages that wait for others do so inside a program.
        term: Term = "idle in programs" if row.is_idle and not row.collectives else _OF_RESOURCE.get(row.bound, "HBM")
        planned[term] += alone_s
        planned["collectives"] += float(row.count) * exposed_s
        longest[row.key] = max(longest.get(row.key, (-1.0, term)), (alone_s, term))
    return {key: term for key, (_, term) in longest.items()}, planned


def _run(
    name: str,
    steps: int,
    step_s: float,
    plan: TrainingPlan,
    seconds: Mapping[Term, float],
    planned: Mapping[Term, float],
) -> MeasuredRun:
    terms = tuple(_terms(plan, seconds, planned))
    return MeasuredRun(
        run=name,
        steps=steps,
        measured_s=step_s,
        planned_s=plan.expected_s,
        terms=terms,
        worst=max(terms, key=lambda term: term.off_s).term,
    )


def _terms(plan: TrainingPlan, seconds: Mapping[Term, float], planned: Mapping[Term, float]) -> Iterator[RunTerm]:
    for term, planned_s in planned.items():
        measured_s = max(0.0, seconds[term])
        ratio = measured_s / planned_s if planned_s > 0 and measured_s > 0 else None
        yield RunTerm(
            term=term,
            measured_s=measured_s,
            planned_s=planned_s,
            ratio=ratio,
            change=_change(plan, term, ratio, measured_s),
        )


def _change(plan: TrainingPlan, term: Term, ratio: float | None, measured_s: float) -> str:
    """The figure that the next plan changes, in words."""
    if term in ("host gaps", "idle in programs"):
        return f"{format_seconds(measured_s)} a step" if measured_s else "nothing"
    if ratio is None:
        return "nothing: not planned, so no figure prices it" if measured_s else "nothing"
    if abs(ratio - 1) < _NEAR:
        return "nothing: within 2 %"
    fractions, times = Rates.of(plan.problem.slice.chip).fractions, f"{ratio:,.{2 if ratio < 100 else 0}f}"
    if term == "HBM":
        return f"share of the HBM rate {fractions.hbm:.3g} -> {min(1.0, fractions.hbm / ratio):.3g}"
    if term == "collectives":
        return f"starts and hops of collectives x {times}, shares of link rates / {times}"
    if term == "compute":
        return f"times of matmuls and attention x {times}"
    return f"times of all work x {times}: a trace (rooftop train --profile) tells its parts apart"


def _slower(fit: CollectiveFit, ratio: float) -> CollectiveFit:
    """A collective that takes ``ratio`` times as long, and is not faster than its links."""
    return CollectiveFit(
        ranks=tuple(fit.ranks),
        start_s=tuple(ratio * start_s for start_s in fit.start_s),
        share=tuple(min(1.0, share / ratio) for share in fit.share),
        small=None if fit.small is None else _slower(fit.small, ratio),
        hops=ratio * fit.hops,
    )
