"""Settings that a configuration leaves unused, and what each of them gives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial

from rooftop.arrays.rules import STAGE_AXES
from rooftop.core.errors import RooftopError
from rooftop.frameworks.answers import UnusedSettings
from rooftop.frameworks.framework import FrameworkName
from rooftop.frameworks.words.configurations import usual_text, written_words
from rooftop.plan.training.answer import WORTH_SAYING, search_of
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem


def unused_settings(problem: Problem, plan: TrainingPlan) -> list[UnusedSettings]:
    """Changes of a configured plan, one at a time, that give more tokens/s, and the whole search; the best first."""
    said, usual = written_words(plan.configured), partial(usual_text, problem.program.name)
    gains = []
    for about, changed in _levers(problem, plan):
        # A release or a job may not have a setting.
        with suppress(RooftopError):
            searched = search_of(changed)
            best = searched.plan(searched.best)
            gain = plan.expected_s / best.expected_s - 1
            if not best.fits or best.obstacles or gain < WORTH_SAYING:
                continue
            words = written_words(best.configured)
            keys = [key for key in {**said, **words} if said.get(key) != words.get(key)]
            gains.append(
                UnusedSettings(
                    about=about,
                    settings={key: (words.get(key, usual(key)), said.get(key, usual(key))) for key in keys},
                    step_s=best.expected_s,
                    gain=gain,
                )
            )
    return sorted(gains, key=lambda change: -change.gain)


def _levers(problem: Problem, plan: TrainingPlan) -> Iterator[tuple[str, Problem]]:
    """Problems with a part of the strategy, or a setting, left open."""
    if plan.mesh.size(*STAGE_AXES) > 1:
        yield "schedule and model chunks of stages", replace(problem, schedule=None, chunks=None)
    yield "recomputation", replace(problem, remat=None)
    yield "microbatches", replace(problem, microbatches=None)
    named = problem.framework
    if isinstance(named, FrameworkName):
        usual = replace(problem, framework=FrameworkName(name=named.name, release=named.release)).program.settings
        for name, value in usual.items():
            if named.settings.get(name, value) != value:
                settings = {**named.settings, name: value}
                yield name.replace("_", " "), replace(problem, framework=replace(named, settings=settings))
        yield (
            "a search over all",
            replace(
                problem,
                framework=FrameworkName(name=named.name, release=named.release),
                axes=None,
                remat=None,
                microbatches=None,
                schedule="1f1b",
                chunks=1,
            ),
        )
