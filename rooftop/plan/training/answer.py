"""The answer to a training problem: the best plan, the runners-up, and the changes that would help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rooftop.core.errors import Infeasible
from rooftop.core.records import field_values
from rooftop.plan.training.advice import WhatIf, what_if
from rooftop.plan.training.nearest import NearestPlan, nearest_executable, refusal
from rooftop.plan.training.plan import PlanSummary, TrainingPlan, TrainingPlanDocument
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.reasons import shortfall
from rooftop.plan.training.search import OnProgress, Sweep, sweep


@dataclass(frozen=True, kw_only=True)
class TrainingAnswerDocument(TrainingPlanDocument):
    """plan.json of a training run."""

    alternatives: tuple[PlanSummary, ...]
    what_if: tuple[WhatIf, ...]
    nearest_executable: NearestPlan | None
    searched: int


@dataclass(frozen=True, kw_only=True)
class TrainingAnswer:
    """The best plan, the runners-up, and the changes that would help; ``searched`` is the number of candidates."""

    plan: TrainingPlan
    alternatives: list[PlanSummary]
    what_if: list[WhatIf]
    nearest_executable: NearestPlan | None
    searched: int

    @property
    def document(self) -> TrainingAnswerDocument:
        """plan.json."""
        plan = self.plan.document
        return TrainingAnswerDocument(
            **field_values(plan),
            alternatives=tuple(self.alternatives),
            what_if=tuple(self.what_if),
            nearest_executable=self.nearest_executable,
            searched=self.searched,
        )

    def to_json(self) -> dict[str, Any]:
        """plan.json as plain JSON values."""
        return self.document.to_json()

    def require_fit(self) -> None:
        """Raises Infeasible, saying by how many bytes and in which class, if even the smallest does not fit."""
        if not self.plan.fits:
            raise Infeasible(
                f"{self.plan.problem.model.name} does not fit {self.plan.problem.slice.name}",
                shortfall(self.plan.problem, self.plan.memory),
            )


def plan_training(problem: Problem, *, alternatives: int = 5, on_progress: OnProgress | None = None) -> TrainingAnswer:
    """Search and answer: the best plan that programs run, or else the best of all and the nearest that programs run.

    Raises RooftopError on sizes that cannot be.
    """
    return answer_of(search_of(problem, on_progress), alternatives=alternatives, on_progress=on_progress)


def search_of(problem: Problem, on_progress: OnProgress | None = None) -> Sweep:
    """The search among plans that programs run; among all if there is none, or if the mesh is not searched."""
    pinned = problem.axes is not None or problem.mesh is not None
    if not pinned and refusal(problem) is None:
        searched = sweep(problem, executable=True, on_progress=on_progress)
        if searched.fits.any():
            return searched
    return sweep(problem, on_progress=on_progress)


def answer_of(searched: Sweep, *, alternatives: int = 5, on_progress: OnProgress | None = None) -> TrainingAnswer:
    """The answer that follows from a search."""
    best = searched.plan(searched.best)
    near = nearest_executable(best, on_progress) if best.obstacles or not best.fits else None
    return TrainingAnswer(
        plan=best,
        alternatives=[
            searched.plan(candidate).summarised(
                float(searched.expected_s[candidate]), float(searched.memory_bytes[candidate])
            )
            for candidate in searched.alternatives(alternatives)
        ],
        what_if=what_if(searched, best),
        nearest_executable=None if near is None else NearestPlan.of(near),
        searched=searched.searched,
    )
