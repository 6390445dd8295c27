"""The answer of ``rooftop plan serve`` for one slice: the best plan, the smallest slice, and the front of batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rooftop.core.errors import Infeasible
from rooftop.core.records import Record, field_values
from rooftop.hardware import Slice
from rooftop.plan.serving.batches import BatchRule, search_batches
from rooftop.plan.serving.nearest import NearestServing, nearest_plans
from rooftop.plan.serving.plan import ServingPlan, ServingPlanDocument
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.search import FrontPoint, pareto, smallest_slice


@dataclass(frozen=True, kw_only=True)
class BatchPoint(Record):
    """One batch of a server: its latency and rate."""

    batch: int
    tpot_s: float
    tokens_per_s_per_chip: float

    @classmethod
    def of(cls, plan: ServingPlan) -> BatchPoint:
        """The point of a plan."""
        rate = plan.tokens_per_s / plan.problem.slice.chips
        return cls(batch=plan.batch, tpot_s=plan.tpot_s, tokens_per_s_per_chip=rate)


@dataclass(frozen=True, kw_only=True)
class ServingAnswerDocument(ServingPlanDocument):
    """plan.json of a server. ``smallest_batch`` and ``largest_batch`` are there if the batch was searched.

    ``nearest`` are plans that fit and that engines run, if this one is not.
    """

    batch_rule: BatchRule
    smallest_batch: BatchPoint | None
    largest_batch: BatchPoint | None
    nearest: tuple[NearestServing, ...]
    smallest_slice: str | None
    pareto: tuple[FrontPoint, ...]
    searched: int


@dataclass(frozen=True, kw_only=True)
class ServingAnswer:
    """A plan, the plans of the smallest and the largest batch, the smallest slice that holds it, and the front."""

    plan: ServingPlan
    rule: BatchRule
    extremes: tuple[ServingPlan, ServingPlan] | None
    smallest: Slice | None
    front: list[FrontPoint]
    searched: int

    @cached_property
    def nearest(self) -> tuple[NearestServing, ...]:
        """The nearest plans that fit and that our engine runs; empty if this one fits and is not refused."""
        if self.plan.fits and not self.plan.is_refused:
            return ()
        return tuple(NearestServing.of(plan) for plan in nearest_plans(self.plan.problem))

    def require_executable(self) -> None:
        """Raises Infeasible, with the nearest plan that runs, if our engine has to run the plan and cannot."""
        if self.plan.is_refused:
            problem, near = self.plan.problem, next(iter(self.nearest), None)
            raise Infeasible(
                f"rooftop serve does not run {problem.model.name} on {problem.slice.name} as it is planned",
                self.plan.obstacles[0],
                None if near is None else f"batch {near.batch} on {near.slice}",
            )

    @property
    def document(self) -> ServingAnswerDocument:
        """plan.json."""
        plan = self.plan.document
        smallest, largest = (None, None) if self.extremes is None else map(BatchPoint.of, self.extremes)
        return ServingAnswerDocument(
            **field_values(plan),
            batch_rule=self.rule,
            smallest_batch=smallest,
            largest_batch=largest,
            nearest=self.nearest,
            smallest_slice=None if self.smallest is None else self.smallest.name,
            pareto=tuple(self.front),
            searched=self.searched,
        )

    def to_json(self) -> dict[str, Any]:
        """plan.json as plain JSON values."""
        return self.document.to_json()


def plan_serving(problem: ServingProblem, *, contexts: Sequence[int] | None = None) -> ServingAnswer:
    """Search placements and, if it is not given, the batch; ``contexts`` are those of the front.

    The batch is chosen as ``rooftop.plan.serving.batches`` says. Raises RooftopError on sizes that cannot be.
    """
    batches = search_batches(problem)
    plan = batches.best
    return ServingAnswer(
        plan=plan,
        rule=batches.rule,
        extremes=None if batches.rule == "given" else (batches.plans[0], batches.plans[-1]),
        smallest=smallest_slice(problem, plan.batch),
        front=pareto(problem, batches.placements, contexts),
        searched=len(batches.placements),
    )
