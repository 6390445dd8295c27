"""Our prediction of a published run: the plan of its published strategy, or the best one where none was published."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from rooftop.arrays.rules import BATCH_AXES, STAGE_AXES, ways
from rooftop.core.errors import RooftopError
from rooftop.frameworks.framework import FRAMEWORKS
from rooftop.plan.training.answer import search_of
from rooftop.plan.training.plan import TrainingPlan
from rooftop.requests.inputs import slice_of
from rooftop.requests.planning import PlanTraining
from rooftop.requests.problems import training_problem
from rooftop.requests.request import NotInWords, Request
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE, PipelineSchedule
from rooftop.validation.names import readings
from rooftop.validation.runs import PublishedRun

if TYPE_CHECKING:
    from rooftop.requests.likes import SliceLike

#: Remat policies as published -> ours. Megatron's ``selective`` recomputes the attention core alone; torchtitan's
#: keeps the outputs of matmuls.
_POLICIES = {
    "none": "none",
    "full": "full",
    "minimal": "minimal",
    "matmuls": "matmuls",
    "selective": "none,attn_core=recompute,attn_normed=recompute,mlp_normed=recompute",
}
_TORCHTITAN_SELECTIVE = "matmuls"

#: Names of offloaded activations as published -> checkpoints.
_CHECKPOINTS = {"layer_input": "layer_input", "qkv": "qkv", "out_proj": "attn_out"}


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Seconds per step: the lower bound and the uncalibrated expectation; ``notes`` say what was assumed.

    ``request`` is what a user would ask for the same plan.
    """

    request: PlanTraining
    bound_s: float
    uncalibrated_s: float
    notes: tuple[str, ...]
    plan: TrainingPlan


def predict(run: PublishedRun, assume: str | None = None) -> Prediction:
    """Plan ``run`` as published, with the shares ``assume`` that hide.

    Raises RooftopError if it has a strategy that cannot be planned.
    """
    notes: list[str] = []
    request = replace(request_of(run, notes), assume=assume)
    plan = planned(request)
    if run.mesh is None:
        notes.append(f"no sharding published: searched, {plan.mesh.layout}")
    if run.remat.policy is None:
        notes.append(f"no remat policy published: searched, {plan.choice.remat}")
    if not plan.fits:
        needed = plan.memory_bytes / plan.problem.capacity
        notes.append(f"by our count it needs {needed:.2f} of the memory of a device")
    return Prediction(
        request=request,
        bound_s=max(plan.lower_s.values()),
        uncalibrated_s=plan.expected_s,
        notes=tuple(notes),
        plan=plan,
    )


def request_of(run: PublishedRun, notes: list[str] | None = None) -> PlanTraining:
    """The plan that somebody would ask for to run as ``run`` did. What it assumes is added to ``notes``."""
    facts, release = run.facts, run.facts.get("release", run.source.rpartition(" ")[2])
    settings = dict(facts.get("settings", {}))
    if facts.get("program") == "torchtitan":
        settings["compile"] = "yes" if run.compiled else "no"
    if run.remat.capacity is not None:
        settings["capacity"] = f"{run.remat.capacity:g}"
    framework, chunks = facts.get("program", "rooftop"), run.interleave or 1
    staged = ways(run.mesh or {}, *STAGE_AXES) > 1
    return PlanTraining(
        model=run.model,
        on=run.slice,
        batch_seqs=run.batch_seqs,
        seq=run.seq_len,
        framework=framework,
        release=release if "program" in facts else None,
        framework_settings=settings or None,
        mesh=run.mesh,
        # A policy that was not published is searched, as its user would.
        remat=None if run.remat.policy is None else _remat(run),
        microbatches=_microbatches(run, [] if notes is None else notes),
        # Without chunks the papers' schedule is 1F1B.
        schedule=_schedule_of(framework) if staged and chunks == 1 else None,
        chunks=chunks if chunks > 1 else None,
        matmul_dtype=run.dtype,
    )


def command_of(request: Request) -> str:
    """The command line of a request; one with ``--request FILE`` where a value is an object, not a text."""
    try:
        return shlex.join(request.command())
    except NotInWords:
        return f"rooftop {request.verb} --request FILE"


def as_ours(request: PlanTraining) -> PlanTraining:
    """The same job, asked of rooftop's own program."""
    ours = replace(request, framework="rooftop", release=None, framework_settings=None)
    return ours if request.schedule is None else replace(ours, schedule=_schedule_of(ours.framework))


def _schedule_of(framework: str) -> PipelineSchedule:
    """The schedule of a framework's pipelines without chunks: 1F1B, or what our program has in its place."""
    return DEFAULT_SCHEDULE if framework == FRAMEWORKS[0] else "1f1b"


def planned(request: PlanTraining) -> TrainingPlan:
    """The best plan of a request on one slice: that which ``plan_training`` answers."""
    problem = training_problem(request, slice_of(cast("SliceLike", request.on)))
    candidates = search_of(problem)
    return candidates.plan(candidates.best)


def _remat(run: PublishedRun) -> str:
    if run.remat.offloaded:
        names = {**readings()["checkpoint"], **_CHECKPOINTS}
        if any(name not in names for name in run.remat.offloaded):
            raise RooftopError("recompute", run.remat.published, f"offloaded names among {', '.join(names)}")
        return ",".join(["block", *(f"{names[name]}=offload" for name in run.remat.offloaded)])
    if run.source.startswith("torchtitan") and run.remat.policy == "selective":
        return _TORCHTITAN_SELECTIVE
    if run.remat.policy is not None and "=" in run.remat.policy:
        return run.remat.policy
    if run.remat.policy not in _POLICIES:
        raise RooftopError("recompute", run.remat.published, ", ".join(_POLICIES))
    return _POLICIES[run.remat.policy]


def _microbatches(run: PublishedRun, notes: list[str]) -> int | None:
    """Microbatches of a step; None, where they are searched as the mesh is."""
    if run.mesh is None and run.microbatch_seqs is None:
        return None
    mesh = run.mesh or {}
    replicas = ways(mesh, *BATCH_AXES)
    if run.microbatch_seqs is not None:
        return max(1, run.batch_seqs // (replicas * run.microbatch_seqs))
    if ways(mesh, *STAGE_AXES) > 1:
        notes.append("microbatch size not published: one sequence assumed")
        return max(1, run.batch_seqs // replicas)
    return 1
