"""The best plan of each framework for one job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rooftop.core.errors import RooftopError
from rooftop.frameworks.answers import FrameworkOffer
from rooftop.frameworks.framework import FRAMEWORKS, FrameworkName, runs_on
from rooftop.plan.pricing import OnProgress
from rooftop.plan.training.answer import search_of, search_of_executable
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import Sweep


def offers_of(problem: Problem, on_progress: OnProgress | None = None) -> Iterator[tuple[FrameworkOffer, Sweep | None]]:
    """The best plan of each framework that runs on the chip, with its search."""
    for name in FRAMEWORKS:
        if not runs_on(name, problem.slice.chip):
            continue
        job = replace(problem, framework=FrameworkName(name=name))
        try:
            searched = search_of(job, on_progress)
        except RooftopError as error:
            yield FrameworkOffer(name=name, title=name, mesh={}, obstacle=f"{error.accepted}"), None
            continue
        yield _offer(searched), searched


def runnable_offers(problem: Problem, on_progress: OnProgress | None = None) -> Iterator[FrameworkOffer]:
    """The best plan of each other framework that runs the job on the chip."""
    for name in FRAMEWORKS:
        if name == problem.framework.name or not runs_on(name, problem.slice.chip):
            continue
        try:
            searched = search_of_executable(replace(problem, framework=FrameworkName(name=name)), on_progress)
        except RooftopError:
            continue
        if searched is not None:
            yield _offer(searched)


def _offer(searched: Sweep) -> FrameworkOffer:
    plan = searched.plan(searched.best)
    program, evidence = plan.problem.program, plan.evidence
    obstacle = None if plan.fits else "nothing fits"
    return FrameworkOffer(
        name=program.name,
        title=program.title,
        release=program.release,
        mesh={axis: size for axis, size in plan.mesh.shape.items() if size > 1},
        remat=plan.choice.remat,
        schedule=plan.choice.schedule,
        chunks=plan.choice.chunks,
        step_s=plan.expected_s,
        interval_s=plan.interval_s,
        mfu=plan.mfu,
        memory_bytes=plan.memory_bytes,
        days=plan.days,
        cost_usd=plan.cost_usd,
        runs=evidence.runs,
        obstacle=plan.obstacles[0] if plan.obstacles else obstacle,
    )
