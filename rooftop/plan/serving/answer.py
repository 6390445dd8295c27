"""The answer of ``rooftop plan serve`` for one slice: the best plan, the smallest slice, and the front of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.core.records import field_values
from rooftop.hardware import Slice
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.plan import ServingPlan, ServingPlanDocument
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.search import (
    FrontPoint,
    batch_grid,
    best_prefill,
    most_sequences,
    pareto,
    smallest_slice,
    sweep_generate,
)


@dataclass(frozen=True, kw_only=True)
class ServingAnswerDocument(ServingPlanDocument):
    """plan.json of a server."""

    smallest_slice: str | None
    pareto: tuple[FrontPoint, ...]
    searched: int


@dataclass(frozen=True, kw_only=True)
class ServingAnswer:
    """A plan, the smallest slice that holds its batch, and the front of batches."""

    plan: ServingPlan
    smallest: Slice | None
    front: list[FrontPoint]
    searched: int

    @property
    def document(self) -> ServingAnswerDocument:
        """plan.json."""
        plan = self.plan.document
        return ServingAnswerDocument(
            **field_values(plan),
            smallest_slice=None if self.smallest is None else self.smallest.name,
            pareto=tuple(self.front),
            searched=self.searched,
        )

    def to_json(self) -> dict[str, Any]:
        """plan.json as plain JSON values."""
        return self.document.to_json()


def plan_serving(problem: ServingProblem, *, contexts: Sequence[int] | None = None) -> ServingAnswer:
    """Search placements and, if it is not given, the batch; ``contexts`` are those of the front.

    Without a batch it is the one with most tokens/s among those that meet the target of TPOT and fit, or one sequence
    if none does. Raises RooftopError on sizes that cannot be.
    """
    places = problem.generate_placements()
    plan = best_plan(problem, places, problem.prefill_placements())
    smallest = smallest_slice(problem, plan.batch)
    front = pareto(problem, places, contexts)
    return ServingAnswer(plan=plan, smallest=smallest, front=front, searched=len(places))


def best_plan(problem: ServingProblem, generate: Sequence[Placement], prefill: Sequence[Placement]) -> ServingPlan:
    """The best of the placements. Raises RooftopError if there are none to choose from."""
    if not generate or not prefill:
        raise RooftopError(
            "slice", problem.slice.name, f"a slice whose devices split the {problem.model.heads} heads and F evenly"
        )
    batch_seqs = problem.workload.batch_seqs
    if batch_seqs is not None:
        batches = np.array([float(batch_seqs)])
    else:
        most = max(most_sequences(problem, placement) for placement in generate)
        batches = batch_grid(max(most, 1))
    swept = sweep_generate(problem, generate, batches)
    shared = problem.mode == "interleaved"
    if not shared:
        prefill_on, _ = best_prefill(problem, prefill)
    best: ServingPlan | None = None
    for at in range(len(batches)):
        placement = swept.best(at)
        if batch_seqs is None and at and not np.isfinite(swept.fastest_s[at]):
            continue
        plan = ServingPlan(
            problem=problem,
            generate_on=placement,
            prefill_on=problem.shared_prefill(placement) if shared else prefill_on,
            batch=int(batches[at]),
        )
        target = problem.workload.tpot_s
        if best is None or ((target is None or plan.tpot_s <= target) and _rate(plan) > _rate(best)):
            best = plan
    assert best is not None
    return best


def _rate(plan: ServingPlan) -> float:
    """Tokens/s that users see: interleaved prefills count."""
    return plan.batch / plan.tpot_s
