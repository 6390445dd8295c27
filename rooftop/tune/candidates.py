"""The best plans of a search, compiled one after another, and the one whose compiled step is the fastest.

Compilations are kept by the compiler's cache, each when it ends: the same question compiles nothing again, and one that
was ended goes on with what is left.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rooftop.arrays.rules import COLUMN_AXES, STAGE_AXES
from rooftop.capabilities import SWITCHES
from rooftop.compiler.compiling import Compiled, Progress
from rooftop.core.errors import RooftopError
from rooftop.explain.compiled.training import nearest_fit
from rooftop.plan.pricing import OnProgress
from rooftop.plan.training.compiled import CompiledCandidate, CompiledPlans, OnCandidate
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.search import Sweep
from rooftop.tune.compilations import CompilerOutcome, CompilerPool, ended_trial
from rooftop.tune.records import SAME, Trial
from rooftop.tune.subjects import TunedPlan

#: A candidate of a sweep: its layout and its choice.
Candidate = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class CandidateCompiler:
    """The way in which candidates are compiled: ``jobs`` at a time, with the compiler of these ``versions``."""

    jobs: int
    versions: Mapping[str, str]
    on_progress: OnProgress | None = None
    on_candidate: OnCandidate | None = None

    def fastest(self, searched: Sweep, count: int) -> tuple[Sweep, CompiledPlans]:
        """Compile the ``count`` best plans of a search that programs run, and choose the fastest that fits.

        Equals stay in the planner's order. If no candidate fits, the search is returned as it is. Raises RooftopError
        if the compiler refuses all of them.
        """
        begin = time.monotonic()
        chosen = best_candidates(searched, count)
        plans = [searched.plan(candidate) for candidate in chosen]
        compiled = self.compile(plans)
        if all(candidate.peak_bytes is None for candidate in compiled):
            raise RooftopError("compile", count, f"plans that XLA compiles ({compiled[0].reason})")
        ranking = CompiledPlans(
            versions=self.versions,
            candidates=compiled,
            capacity_bytes=searched.problem.slice.device_hbm_usable_bytes,
            seconds=time.monotonic() - begin,
        )
        best = ranking.best
        if best is not None:
            return replace(searched, chosen=chosen[best.planned_rank - 1]), ranking
        first = next(candidate for candidate in compiled if candidate.peak_bytes is not None)
        nearest = nearest_fit(plans[first.planned_rank - 1], first.peak_bytes or 0.0)
        return searched, replace(ranking, nearest=None if nearest is None else nearest.summary)

    def compile(self, plans: Sequence[TrainingPlan]) -> tuple[CompiledCandidate, ...]:
        """The plans and their compiled programs, in the order of the plans, with ranks."""
        candidates = [_unranked(plan, at) for at, plan in enumerate(plans)]
        done = 0

        def compiled(at: int, on_progress: Progress) -> Compiled:
            return TunedPlan(plan=plans[at]).compile((), layers=None, cache=True, on_progress=on_progress)

        def tick(at: int, phase: str, elapsed_s: float) -> None:
            if self.on_progress is not None:
                self.on_progress(done, len(plans), f"{candidates[at].name}: {phase} {elapsed_s:.0f} s")

        def submit(at: int) -> Future[CompilerOutcome]:
            return pool.submit(partial(compiled, at), partial(tick, at))

        with CompilerPool(self.jobs) as pool:
            for at, outcome in pool.ended(range(len(plans)), submit):
                candidates[at] = _ended(candidates[at], outcome)
                done += 1
                if self.on_candidate is not None:
                    self.on_candidate(done, len(plans), candidates[at])
        return _ranked(candidates)


def best_candidates(searched: Sweep, count: int) -> list[Candidate]:
    """The fastest candidates of a search that fit, that programs run, and whose programs differ; fastest first.

    Programs differ in mesh, remat policy, microbatches and switches; of layouts of a mesh the fastest counts.
    """
    _, meshes = np.unique(searched.strategies.layouts.devices, axis=0, return_inverse=True)
    score = np.where(searched.fits, searched.expected_s, np.inf)
    rows, columns = np.nonzero(np.isfinite(score))
    order = np.lexsort((searched.memory_bytes[rows, columns], score[rows, columns]))
    fastest: list[Candidate] = []
    seen = set[tuple[object, ...]]()
    for layout, choice in (searched.best, *zip(rows[order].tolist(), columns[order].tolist(), strict=True)):
        if (mesh := (int(meshes.ravel()[layout]), choice)) in seen:
            continue
        seen.add(mesh)
        plan = searched.plan((layout, choice))
        if (program := _program(plan)) in seen or plan.obstacles:
            continue
        seen.add(program)
        fastest.append((layout, choice))
        if len(fastest) == count:
            break
    return fastest


def _program(plan: TrainingPlan) -> tuple[object, ...]:
    """Equal for plans with the same program: switches of axes that the mesh does not have change nothing."""
    choice, mesh = plan.choice, plan.mesh
    columns = mesh.size(*COLUMN_AXES) > 1
    stages = mesh.size(*STAGE_AXES) > 1
    sizes = tuple((name, size) for name, size in mesh.shape.items() if size > 1)
    policy = tuple(sorted(choice.policy.items()))
    switches = tuple(getattr(choice, name) for name in SWITCHES) if columns else ()
    return (sizes, policy, choice.microbatches, *((choice.schedule, choice.chunks) if stages else ()), switches)


def _unranked(plan: TrainingPlan, at: int) -> CompiledCandidate:
    """A candidate before it is compiled."""
    return CompiledCandidate(
        plan=plan.summary, planned_rank=at + 1, rank=None, compiled_s=None, exposed_s=None, peak_bytes=None, fits=False,
        cached=False, seconds=0.0,
    )  # fmt: skip


def _ended(candidate: CompiledCandidate, outcome: CompilerOutcome) -> CompiledCandidate:
    """A candidate with the outcome of its compilation."""
    begun = Trial(
        key=candidate.name, factors=(candidate.name,), options={}, change={}, layers=None, end="refused", seconds=0.0
    )
    trial, _ = ended_trial(begun, outcome)
    return replace(
        candidate,
        compiled_s=trial.expected_s,
        exposed_s=trial.exposed_s,
        peak_bytes=trial.needed_bytes if trial.peak_bytes is None else trial.peak_bytes,
        fits=trial.fits,
        reason=trial.reason,
        cached=outcome.cached,
        seconds=trial.seconds,
    )


def _ranked(candidates: Sequence[CompiledCandidate]) -> tuple[CompiledCandidate, ...]:
    """The candidates with their ranks by compiled time. The planner's first of those that are as fast is rank 1."""
    timed = [(candidate.compiled_s, candidate) for candidate in candidates if candidate.compiled_s is not None]
    if not timed:
        return tuple(candidates)
    fastest_s = min(seconds for seconds, _ in timed)
    order = sorted(timed, key=lambda entry: (entry[0] > fastest_s * (1 + SAME), max(entry[0], fastest_s * (1 + SAME))))
    ranks = {candidate.planned_rank: rank for rank, (_, candidate) in enumerate(order, start=1)}
    return tuple(replace(candidate, rank=ranks.get(candidate.planned_rank)) for candidate in candidates)
