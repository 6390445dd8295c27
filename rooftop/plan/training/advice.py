"""Advice on a plan: changes that would make it faster, and the nearest plan that programs can run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from rooftop.capabilities import TRAINING, UNHIDDEN, TrainingSpec, obstacles
from rooftop.core.errors import RooftopError
from rooftop.core.records import Record
from rooftop.hardware import Slice
from rooftop.plan.training.plan import PlanSummary, TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import Sweep, best_of, sweep
from rooftop.plan.training.strategies import Strategies
from rooftop.plan.training.workload import MOST_TOKENS, Numerics
from rooftop.roofline.overlap import overlap

#: Layouts (the best ones of the search) among which a changed job looks again.
LOOK_AGAIN = 32
#: A change that gains less is not worth a line.
WORTH_SAYING = 0.005
#: Mesh shapes of a slice, fastest first, among which an executable one is sought.
MOST_MESHES = 64


@dataclass(frozen=True, kw_only=True)
class WhatIf(Record):
    """A change to the job, with its step and rate. ``gain`` is the share of tokens/s that it adds.

    ``obstacle`` says why no program runs the change yet; None if it is not for a program to do.
    """

    change: str
    step_s: float
    tokens_per_s: float
    gain: float
    obstacle: str | None


@dataclass(frozen=True, kw_only=True)
class NearestPlan(PlanSummary):
    """An executable plan, and the slice and matmul dtype in which it may differ from the one asked for."""

    slice: str
    matmul: str


def what_if(searched: Sweep, best: TrainingPlan) -> list[WhatIf]:
    """Changes to the job, one at a time, that would give more tokens/s; the most helpful first."""
    score = np.where(searched.fits, searched.expected_s, np.inf).min(axis=1)
    near = np.argsort(score, kind="stable")[:LOOK_AGAIN]
    within = Strategies(searched.strategies.layouts[near], searched.strategies.choices)
    answers = []
    for change in _changes(searched.problem, best):
        seconds = best_of(change.problem, within)
        if np.isfinite(seconds):
            rate = change.problem.workload.batch_tokens / seconds
            gain = rate / best.tokens_per_s - 1
            if gain >= WORTH_SAYING:
                answers.append(
                    WhatIf(change=change.text, step_s=seconds, tokens_per_s=rate, gain=gain, obstacle=change.obstacle)
                )
    return sorted(answers, key=lambda answer: -answer.gain)


@dataclass(frozen=True, kw_only=True)
class JobChange:
    """A job with one change, and why no program runs the change yet."""

    text: str
    problem: Problem
    obstacle: str | None = None


def _changes(problem: Problem, best: TrainingPlan) -> Iterator[JobChange]:
    workload, assumptions, chip = problem.workload, problem.assumptions, problem.slice.chip
    if 2 * workload.batch_tokens <= MOST_TOKENS:
        larger = replace(workload, batch_tokens=2 * workload.batch_tokens)
        yield JobChange(text="twice the batch", problem=replace(problem, workload=larger))
    shares = assumptions.shares(overlap(chip.name))
    for name, text in (
        ("tensor", "tensor collectives overlapped (collective matmuls)"),
        ("weight_gather", "asynchronous weight AllGathers"),
        ("gradient_scatter", "asynchronous gradient ReduceScatters"),
    ):
        if shares[name] < 1:
            hidden = replace(assumptions, hidden={**assumptions.hidden, name: 1.0})
            yield JobChange(text=text, problem=replace(problem, assumptions=hidden), obstacle=UNHIDDEN.get(name))
    if (
        problem.numerics.matmul == "bf16"
        and "int8" in chip.flops_per_s
        and chip.flops_per_s["int8"] > chip.flops_per_s["bf16"]
    ):
        narrow = replace(problem, numerics=replace(problem.numerics, matmul="int8"))
        yield JobChange(
            text="int8 matmuls in the layers",
            problem=narrow,
            obstacle=next(new_obstacles(best.spec, narrow.spec(best.mesh.shape, best.choice)), None),
        )
    faster = _chip(problem, lambda figures: {"ici_bytes_per_s": 2 * figures.ici_bytes_per_s})
    yield JobChange(text="ICI twice as fast", problem=faster)
    larger_hbm = _chip(problem, lambda figures: {"hbm_usable_bytes": 2 * figures.hbm_usable_bytes})
    yield JobChange(text="HBM twice as large", problem=larger_hbm)


def new_obstacles(before: TrainingSpec, after: TrainingSpec) -> Iterator[str]:
    """Obstacles that ``after`` has and ``before`` has not."""
    known = set(obstacles(TRAINING, before))
    return (obstacle for obstacle in obstacles(TRAINING, after) if obstacle not in known)


def _chip(problem: Problem, change: Callable[[Any], dict[str, float]]) -> Problem:
    chip = problem.slice.chip.replace(**change(problem.slice.chip))
    return replace(problem, slice=Slice(chip, problem.slice.shape, problem.slice.num_slices))


def nearest_executable(plan: TrainingPlan) -> NearestPlan | None:
    """The summary of an executable plan that fits: on the same slice, or on the largest smaller one that has one.

    Meshes are searched again, and dtypes that no program has give way to those that are run. None if there is no such
    plan.
    """
    problem = _runnable(plan)
    for shape in [problem.slice.shape, *_smaller_shapes(problem.slice)]:
        try:
            candidate = Slice(problem.slice.chip, shape, problem.slice.num_slices)
            searched = sweep(replace(problem, slice=candidate, axes=None, mesh=None))
        except RooftopError:
            continue
        if not searched.even or not searched.fits.any():
            continue
        for near in [searched.best, *searched.alternatives(MOST_MESHES)]:
            answer = plan_of(searched, near)
            if not answer.obstacles:
                return NearestPlan(slice=candidate.name, matmul=problem.numerics.matmul, **vars(answer.summary))
    return None


def plan_of(searched: Sweep, candidate: tuple[int, int]) -> TrainingPlan:
    """The plan of one candidate of a sweep."""
    layout, choice = candidate
    strategies = searched.strategies
    return TrainingPlan(
        problem=searched.problem, mesh=strategies.layouts.mesh(layout), choice=strategies.choices[choice]
    )


def _runnable(plan: TrainingPlan) -> Problem:
    """The plan's problem in the dtypes, and with the optimizer, that programs have."""
    spec = plan.spec.runnable()
    numerics = Numerics(
        compute=spec.compute,
        matmul=spec.matmul,
        weights=spec.weights,
        moments=spec.moments,
        gradients=spec.gradients,
        optimizer=spec.optimizer,
    )
    return replace(plan.problem, numerics=numerics)


def _smaller_shapes(slice_: Slice) -> list[tuple[int, ...]]:
    """Shapes within the slice whose sides are powers of two, the largest first: they split evenly."""
    sides = [[2**power for power in range(side.bit_length()) if 2**power <= side] for side in slice_.shape]
    shapes = [shape for shape in product(*sides) if shape != slice_.shape]
    return sorted(shapes, key=lambda shape: -int(np.prod(shape)))[:8]
