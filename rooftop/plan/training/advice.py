"""Advice on a plan: changes to the job or the chip that would make it faster, and what is missing to run them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rooftop.capabilities import TRAINING, UNHIDDEN, TrainingSpec, obstacles
from rooftop.core.records import Record
from rooftop.hardware import Slice
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import Sweep, best_of, plan_of
from rooftop.plan.training.strategies import Strategies
from rooftop.plan.training.workload import MOST_TOKENS
from rooftop.roofline.overlap import overlap

#: Layouts (the best ones of the search) among which a changed job looks again.
LOOK_AGAIN = 32
#: A change that gains less is not worth a line.
WORTH_SAYING = 0.005


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


def what_if(searched: Sweep, best: TrainingPlan) -> list[WhatIf]:
    """Changes to the job, one at a time, that would give more tokens/s.

    Those that programs run come first, then the others; the most helpful of both first.
    """
    score = np.where(searched.fits, searched.expected_s, np.inf).min(axis=1)
    near = np.argsort(score, kind="stable")[:LOOK_AGAIN]
    within = Strategies(searched.strategies.layouts[near], searched.strategies.choices)
    answers = []
    for change in _changes(searched.problem):
        seconds, candidate = best_of(change.problem, within)
        if np.isfinite(seconds):
            rate = change.problem.workload.batch_tokens / seconds
            gain = rate / best.tokens_per_s - 1
            if gain >= WORTH_SAYING:
                spec = plan_of(change.problem, within, candidate).spec
                obstacle = change.obstacle or next(_new_obstacles(best.spec, spec), None)
                answers.append(
                    WhatIf(change=change.text, step_s=seconds, tokens_per_s=rate, gain=gain, obstacle=obstacle)
                )
    return sorted(answers, key=lambda answer: (answer.obstacle is not None, -answer.gain))


@dataclass(frozen=True, kw_only=True)
class JobChange:
    """A job with one change, and why no program runs the change yet."""

    text: str
    problem: Problem
    obstacle: str | None = None


def _changes(problem: Problem) -> Iterator[JobChange]:
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
        yield JobChange(text="int8 matmuls in the layers", problem=narrow)
    faster = _chip(problem, lambda figures: {"ici_bytes_per_s": 2 * figures.ici_bytes_per_s})
    yield JobChange(text="ICI twice as fast", problem=faster)
    larger_hbm = _chip(problem, lambda figures: {"hbm_usable_bytes": 2 * figures.hbm_usable_bytes})
    yield JobChange(text="HBM twice as large", problem=larger_hbm)


def _new_obstacles(before: TrainingSpec, after: TrainingSpec) -> Iterator[str]:
    """Obstacles that ``after`` has and ``before`` has not."""
    known = set(obstacles(TRAINING, before))
    return (obstacle for obstacle in obstacles(TRAINING, after) if obstacle not in known)


def _chip(problem: Problem, change: Callable[[Any], dict[str, float]]) -> Problem:
    chip = problem.slice.chip.replace(**change(problem.slice.chip))
    return replace(problem, slice=Slice(chip, problem.slice.shape, problem.slice.num_slices))
