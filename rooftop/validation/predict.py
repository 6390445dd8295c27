"""Our prediction of a published run: the plan of its published strategy, or the best one where none was published."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rooftop.arrays.rules import BATCH_AXES, COLUMN_AXES, STAGE_AXES, ways
from rooftop.core.errors import RooftopError
from rooftop.models.numerics import Numerics
from rooftop.plan.training.assumptions import Assumptions, Framework
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import sweep
from rooftop.plan.training.workload import Workload
from rooftop.validation.names import readings
from rooftop.validation.runs import PublishedRun

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
    """Seconds per step: the lower bound and the uncalibrated expectation; ``notes`` say what was assumed."""

    bound_s: float
    uncalibrated_s: float
    notes: tuple[str, ...]
    plan: TrainingPlan


def predict(run: PublishedRun, assumptions: Assumptions | None = None) -> Prediction:
    """Plan ``run`` as published. Raises RooftopError if it has a strategy that cannot be planned."""
    notes: list[str] = []
    facts, hidden = run.facts, (assumptions or Assumptions()).hidden
    if facts.get("hides_exchange"):
        hidden = {"all_to_all": 1.0, **hidden}
    problem = Problem(
        model=run.model,
        slice=run.slice,
        workload=Workload(batch_tokens=run.batch_tokens, seq_len=run.seq_len),
        numerics=_numerics(run),
        # Stages of published runs go on as soon as they can.
        assumptions=replace(
            assumptions or Assumptions(),
            hidden=hidden,
            attention=facts.get("attention", "flash"),
            own_program=False,
            narrow_gradients=facts.get("narrow_gradients", False),
            fused_attention_gradients=facts.get("fused_attention_gradients", False),
            attention_kernels=facts.get("attention_kernels"),
        ),
        framework=_program(run),
        axes=run.mesh,
        # A policy that was not published is searched, as its user would.
        remat=None if run.remat.policy is None else _remat(run),
        microbatches=_microbatches(run, notes),
        collective_matmuls=facts.get("collective_matmuls"),
        experts_over_tensor=_deals_out_experts(run),
        schedule="interleaved" if (run.interleave or 1) > 1 else "1f1b",
        chunks=run.interleave or 1,
    )
    candidates = sweep(problem)
    plan = candidates.plan(candidates.best)
    if run.mesh is None:
        notes.append(f"no sharding published: searched, {plan.mesh.layout}")
    if run.remat.policy is None:
        notes.append(f"no remat policy published: searched, {plan.choice.remat}")
    if not plan.fits:
        notes.append(f"by our count it needs {plan.memory_bytes / problem.capacity:.2f} of the memory of a device")
    return Prediction(bound_s=max(plan.lower_s.values()), uncalibrated_s=plan.expected_s, notes=tuple(notes), plan=plan)


def _program(run: PublishedRun) -> Framework:
    """The program of the run's framework: an eager one where kernels are fused by a compiler that was not used."""
    program = dict(run.facts["program"])
    if program.get("kernels") == "compiled":
        program["kernels"] = "fused" if run.compiled else "eager"
    program["graphs"] = tuple(program.get("graphs", ()))
    if run.remat.capacity is not None:
        program["capacity"] = run.remat.capacity
    program["group_rows"] = tuple(map(tuple, program.get("group_rows", ())))
    return Framework(**program)


def _deals_out_experts(run: PublishedRun) -> bool | None:
    """True if tensor parallelism is known to leave experts whole; None: it is searched, or there is nothing to deal."""
    asked = run.model.moe is not None and ways(run.mesh or {}, *COLUMN_AXES) > 1
    return run.facts.get("experts_over_tensor") if asked else None


def _numerics(run: PublishedRun) -> Numerics:
    half = "f16" if run.dtype == "f16" else "bf16"
    return Numerics(compute=half, gradients=half, matmul=run.dtype)


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


def _microbatches(run: PublishedRun, notes: list[str]) -> int:
    mesh = run.mesh or {}
    replicas = ways(mesh, *BATCH_AXES)
    if run.microbatch_seqs is not None:
        return max(1, run.batch_seqs // (replicas * run.microbatch_seqs))
    if ways(mesh, *STAGE_AXES) > 1:
        notes.append("microbatch size not published: one sequence assumed")
        return max(1, run.batch_seqs // replicas)
    return 1
