"""A training plan compiled for its slice, next to the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rooftop import __version__
from rooftop.compiler.compiling import CompileRequest, Progress, compile_ahead_of_time
from rooftop.compiler.memory import OutOfMemory
from rooftop.compiler.options import train_options
from rooftop.core.errors import Infeasible
from rooftop.core.quantities import format_bytes
from rooftop.explain.compiled.report import (
    SCHEMA,
    CompiledReport,
    RefusedRecord,
    largest,
)
from rooftop.hardware import Slice
from rooftop.plan.documents import PlannedSlice
from rooftop.plan.training.compiled import nearest_text
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import plan_of, sweep
from rooftop.programs.training.program import TrainProgram

PROGRAM = "rooftop.programs.training.step:lower"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """A plan whose program does not fit in HBM by the compiler; ``nearest`` is the nearest plan that should."""

    plan: TrainingPlan
    answer: OutOfMemory
    nearest: TrainingPlan | None

    @property
    def verdict(self) -> str:
        """One line: by how much, and what the plan said."""
        answer, plan = self.answer, self.plan
        over = format_bytes(answer.needed_bytes - answer.available_bytes)
        said = "though it fits" if plan.fits else "and does not fit"
        return (
            f"does not fit: XLA needs {format_bytes(answer.needed_bytes)} of {format_bytes(answer.available_bytes)} a "
            f"device, {over} too many, {said} by the plan's arithmetic ({format_bytes(plan.memory_bytes)})"
        )

    @property
    def infeasible(self) -> Infeasible:
        """The answer as an exception, with the nearest plan that fits."""
        problem = self.plan.problem
        near = nearest_text(None if self.nearest is None else self.nearest.summary)
        return Infeasible(f"{problem.model.name} on {problem.slice.name} {self.verdict}", near)

    def record(self, *, top: int = 20) -> RefusedRecord:
        """The answer as it is written, with ``top`` buffers."""
        answer, at_peak = self.answer, self.answer.at_peak
        return RefusedRecord(
            kind="compiled",
            schema=SCHEMA,
            rooftop_version=__version__,
            plan=self.plan.document,
            slice=PlannedSlice.of(self.plan.problem.slice),
            mesh=self.plan.mesh.described,
            fits=False,
            peak_bytes=answer.needed_bytes,
            planned_peak_bytes=self.plan.memory_bytes,
            capacity_bytes=answer.available_bytes,
            over_bytes=answer.needed_bytes - answer.available_bytes,
            memory=None if at_peak is None else at_peak.by_class,
            planned_memory=self.plan.memory,
            buffers=largest(at_peak, top),
            nearest=None if self.nearest is None else self.nearest.summary,
            verdict=self.verdict,
        )

    def to_json(self, *, top: int = 20) -> dict[str, Any]:
        """The answer as plain JSON values; ``top`` buffers."""
        return self.record(top=top).to_json()


def compile_plan(
    plan: TrainingPlan,
    *,
    timeout_s: float | None = None,
    cache: bool = True,
    save: bool = False,
    on_progress: Progress | None = None,
) -> CompiledReport | Refusal:
    """Compile the program of a plan and compare it with the plan; a refusal if it does not fit in HBM.

    ``save`` keeps the executable. Raises RooftopError for a plan that no program can run, and for the reasons of
    ``rooftop.compiler.compiling.compile_ahead_of_time``.
    """
    compile_request = replace(request(plan), save=save)
    try:
        compiled = compile_ahead_of_time(compile_request, timeout_s=timeout_s, cache=cache, on_progress=on_progress)
    except OutOfMemory as answer:
        return Refusal(plan=plan, answer=answer, nearest=nearest_fit(plan, answer.needed_bytes))
    return CompiledReport(plan=plan, compiled=compiled)


def request(plan: TrainingPlan) -> CompileRequest:
    """Return the compile request of a plan. Raises RooftopError for a plan that no program can run."""
    program = TrainProgram.from_plan(plan)
    slice_ = plan.problem.slice
    defaults = train_options(plan.mesh.shape, slice_.chip.name, slices=slice_.num_slices)
    return CompileRequest(mesh=plan.mesh, program=PROGRAM, arguments=program.to_json(), defaults=defaults)


def nearest_fit(plan: TrainingPlan, needed_bytes: float) -> TrainingPlan | None:
    """The nearest plan that fits, by the ``needed_bytes`` of the compiler; None if there is none on this slice.

    Planned memory is scaled by what the compiler needed over what was planned. First the same mesh with another remat
    policy or more microbatches, then any mesh.
    """
    problem = plan.problem
    chip = problem.slice.chip
    margin = max(1.0, needed_bytes / plan.memory_bytes)
    smaller = chip.replace(hbm_usable_bytes=chip.hbm_usable_bytes / margin, hbm_bytes=chip.hbm_bytes / margin)
    slice_ = Slice(smaller, problem.slice.shape, problem.slice.num_slices)
    free = replace(problem, slice=slice_, axes=None, mesh=None, remat=None, microbatches=None)
    for candidate in (replace(free, mesh=plan.mesh), free):
        nearest_fit = _best(candidate, problem)
        if nearest_fit is not None:
            return nearest_fit
    return None


def _best(candidate: Problem, problem: Problem) -> TrainingPlan | None:
    result = sweep(candidate)
    if not result.fits.any():
        return None
    layouts = replace(result.strategies.layouts, slice=problem.slice)
    return plan_of(problem, replace(result.strategies, layouts=layouts), result.best)
