"""What would change the answer: the nearest changes that lift the binding resource, and the nearest runnable plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import Sweep, best_of, sweep
from rooftop.plan.training.strategies import Strategies
from rooftop.plan.training.workload import MOST_TOKENS
from rooftop.roofline.overlap import overlap

#: Layouts (the best ones of the search) among which a changed job looks again.
LOOK_AGAIN = 32
#: A change that gains less is not worth a line.
WORTH_SAYING = 0.005


def what_if(found: Sweep, best: TrainingPlan) -> list[dict[str, Any]]:
    """Changes to the job, one at a time, that would give more tokens/s; the most helpful first."""
    score = np.where(found.fits, found.expected_s, np.inf).min(axis=1)
    near = np.argsort(score, kind="stable")[:LOOK_AGAIN]
    within = Strategies(found.strategies.layouts[near], found.strategies.choices)
    answers = []
    for change, problem in _changes(found.problem):
        seconds = best_of(problem, within)
        if np.isfinite(seconds):
            rate = problem.workload.batch_tokens / seconds
            gain = rate / best.tokens_per_s - 1
            if gain >= WORTH_SAYING:
                answers.append({"change": change, "step_s": seconds, "tokens_per_s": rate, "gain": gain})
    return sorted(answers, key=lambda answer: -answer["gain"])


def _changes(problem: Problem) -> Iterator[tuple[str, Problem]]:
    workload, assumptions, chip = problem.workload, problem.assumptions, problem.slice.chip
    if 2 * workload.batch_tokens <= MOST_TOKENS:
        yield "twice the batch", replace(problem, workload=replace(workload, batch_tokens=2 * workload.batch_tokens))
    shares = assumptions.shares(overlap(chip.name))
    if shares["tensor"] < 1:
        yield (
            "tensor collectives overlapped (collective matmuls)",
            replace(problem, assumptions=_hide(assumptions, "tensor")),
        )
    for name, text in (
        ("weight_gather", "asynchronous weight AllGathers"),
        ("gradient_scatter", "asynchronous gradient ReduceScatters"),
    ):
        if shares[name] < 1:
            yield text, replace(problem, assumptions=_hide(assumptions, name))
    if (
        problem.numerics.matmul == "bf16"
        and "int8" in chip.flops_per_s
        and chip.flops_per_s["int8"] > chip.flops_per_s["bf16"]
    ):
        yield "int8 matmuls in the layers", replace(problem, numerics=replace(problem.numerics, matmul="int8"))
    faster = _chip(problem, lambda figures: {"ici_bytes_per_s": 2 * figures.ici_bytes_per_s})
    yield "ICI twice as fast", faster
    yield "HBM twice as large", _chip(problem, lambda figures: {"hbm_usable_bytes": 2 * figures.hbm_usable_bytes})


def _hide(assumptions: Assumptions, name: str) -> Assumptions:
    return replace(assumptions, hidden={**assumptions.hidden, name: 1.0})


def _chip(problem: Problem, change: Callable[[Any], dict[str, float]]) -> Problem:
    chip = problem.slice.chip.replace(**change(problem.slice.chip))
    return replace(problem, slice=Slice(chip, problem.slice.shape, problem.slice.num_slices))


def nearest_executable(plan: TrainingPlan) -> dict[str, Any] | None:
    """The largest smaller slice of the chip on which the job splits evenly and fits, with its plan's summary."""
    problem = plan.problem
    for shape in _smaller_shapes(problem.slice):
        try:
            candidate = Slice(problem.slice.chip, shape, problem.slice.num_slices)
            found = sweep(replace(problem, slice=candidate, axes=None, mesh=None))
        except RooftopError:
            continue
        if found.even and found.fits.any():
            only = found.only(found.best)
            answer = TrainingPlan(problem=found.problem, mesh=only.layouts.mesh(0), choice=only.choices[0])
            if not answer.obstacles:
                return {"slice": candidate.name, **answer.summary()}
    return None


def _smaller_shapes(slice_: Slice) -> list[tuple[int, ...]]:
    """Shapes within the slice whose sides are powers of two, the largest first: what even splits ask for."""
    sides = [[2**power for power in range(side.bit_length()) if 2**power <= side] for side in slice_.shape]
    shapes = [shape for shape in product(*sides) if shape != slice_.shape]
    return sorted(shapes, key=lambda shape: -int(np.prod(shape)))[:8]
