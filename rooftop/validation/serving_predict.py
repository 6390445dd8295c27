"""What the plan says that a published run of serving takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rooftop.ledger import Ledger
from rooftop.plan.serving_assumptions import ServingAssumptions
from rooftop.plan.serving_placement import Placement
from rooftop.plan.serving_pricing import price_serving
from rooftop.plan.serving_problem import ServingProblem
from rooftop.plan.serving_rows import prefill_work
from rooftop.plan.serving_workload import ServingWorkload
from rooftop.validation.serving_runs import ServingRun


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds of a run's step: the longer of HBM and FLOPs at peak; that with the network; what is expected.

    ``of_context``: what is expected of a decode step by the tokens in each cache; None for other phases.
    """

    max_hbm_flops_s: float
    bound_s: float
    expected_s: float
    of_context: Callable[[float], float] | None


def predict(run: ServingRun, shares: Mapping[str, float]) -> Prediction:
    """A run as the plan prices it, with ``shares`` in the place of those that a plan assumes."""
    problem = ServingProblem(
        model=run.model,
        slice=run.slice,
        workload=ServingWorkload(
            prompt=run.prompt or run.context or 1,
            generate=run.generate or 1,
            batch_seqs=run.batch,
            context=run.context if run.phase == "decode" else None,
        ),
        numerics=run.numerics,
        assumptions=ServingAssumptions(shares=shares),
        mode="interleaved",
        axes=run.mesh,
        prefill_axes=run.mesh,
    )
    batch = float(run.batch)
    if run.phase == "prefill":
        ledgers = [_prefill_batch(problem, place, run) for place in problem.prefill_placements()]
        return _prediction(min(ledgers, key=lambda ledger: float(ledger.expected_s)), 0.0, 0.0, None)
    places = problem.generate_placements()
    place = min(places, key=lambda place: float(problem.generate(place, batch).expected_s))
    step = problem.generate(place, batch)
    if run.phase == "decode":
        return _prediction(step, 0.0, 0.0, lambda tokens: float(problem.generate(place, batch, tokens).expected_s))
    assert run.generate is not None
    assert run.prompt is not None
    prefill = problem.prefill(problem.shared_prefill(place), float(run.prompt))
    # While each sequence generates its answer, all others are prefilled once.
    each = batch / run.generate
    bound = max(float(prefill.total(name)) for name in ("hbm", "mxu", "ici"))
    return _prediction(step, each * bound, each * float(prefill.expected_s), None)


def _prediction(
    ledger: Ledger, more_bound_s: float, more_expected_s: float, of_context: Callable[[float], float] | None
) -> Prediction:
    busy = {name: float(ledger.total(name)) for name in ("hbm", "mxu", "ici", "dcn")}
    return Prediction(
        max_hbm_flops_s=max(busy["hbm"], busy["mxu"]) + more_bound_s,
        bound_s=max(busy.values()) + more_bound_s,
        expected_s=float(ledger.expected_s) + more_expected_s,
        of_context=of_context,
    )


def _prefill_batch(problem: ServingProblem, place: Placement, run: ServingRun) -> Ledger:
    """All prompts of the batch in one prefill."""
    assert run.prompt is not None
    phase = problem.phase("prefill", place, float(run.batch * run.prompt))
    return price_serving(prefill_work(phase, 0.0, run.batch), place, problem.rates, problem.assumptions)
