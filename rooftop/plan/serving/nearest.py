"""The nearest plans that fit and that an engine runs, for a serving plan that does not or is not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from rooftop.capabilities import ENGINE_CACHES, ENGINE_WEIGHTS
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import dtype_bytes
from rooftop.core.records import Record
from rooftop.plan.serving.batches import search_batches
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import Mode, ServingProblem
from rooftop.plan.serving.search import server_memory, slices_of
from rooftop.plan.serving.workload import ServingNumerics, ServingWorkload


@dataclass(frozen=True, kw_only=True)
class NearestServing(Record):
    """A plan that fits and that an engine runs: where it differs from the one asked for, and its speed."""

    slice: str
    mesh: Mapping[str, int]
    mode: Mode
    batch: int
    prompt: int
    generate: int
    weights: str
    weight_group: int | None
    kv: str
    matmul: str
    tpot_s: float
    tokens_per_s_per_chip: float

    @classmethod
    def of(cls, plan: ServingPlan) -> NearestServing:
        """The record of a plan."""
        problem = plan.problem
        return cls(
            slice=problem.slice.name,
            mesh={name: size for name, size in plan.generate_on.mesh.shape.items() if size > 1},
            mode=problem.mode,
            batch=plan.batch,
            prompt=problem.workload.prompt,
            generate=problem.workload.generate,
            weights=problem.numerics.weights,
            weight_group=problem.numerics.weight_group,
            kv=problem.numerics.kv,
            matmul=problem.numerics.flops,
            tpot_s=plan.tpot_s,
            tokens_per_s_per_chip=plan.tokens_per_s / problem.slice.chips,
        )


def nearest_plans(problem: ServingProblem) -> Iterator[ServingPlan]:
    """Plans that fit and that an engine runs: on the same slice with fewer sequences if need be, and on another one.

    The first has number formats, lengths and a mesh that engines have. The second is there if the first has another
    batch than was asked for, or does not exist: on the smallest slice that is larger, or else the largest other one.
    """
    runnable = _runnable(problem)
    asked = runnable.workload.batch_seqs
    here = _first(runnable, replace(runnable, axes=None, kv_split=None))
    if here is None and asked is not None:
        fewer = replace(runnable.workload, batch_seqs=None)
        here = _first(replace(runnable, axes=None, kv_split=None, workload=fewer), largest=True)
    if here is not None:
        yield here
        if asked is None or here.batch == asked:
            return
    slices, chips = slices_of(runnable.slice), runnable.slice.chips
    larger = [slice_ for slice_ in slices if slice_.chips > chips]
    smaller = [slice_ for slice_ in reversed(slices) if slice_.chips <= chips and slice_ != runnable.slice]
    for slice_ in (*larger, *smaller):
        other = replace(runnable, slice=slice_, prefill_slice=None, axes=None, kv_split=None)
        if _holds(other, asked or 1) and (there := _first(other)) is not None:
            yield there
            return


def _first(*problems: ServingProblem, largest: bool = False) -> ServingPlan | None:
    for problem in problems:
        try:
            batches = search_batches(problem)
        except RooftopError:
            continue
        plan = batches.plans[-1] if largest else batches.best
        if plan.fits and not plan.obstacles:
            return plan
    return None


def _holds(problem: ServingProblem, batch: int) -> bool:
    """True if an engine on the slice has room for the batch."""
    try:
        placements = problem.nearest_engines(problem.generate_placements())
    except RooftopError:
        return False
    return any(float(server_memory(problem, place, float(batch))) <= problem.capacity for place in placements)


def _runnable(problem: ServingProblem) -> ServingProblem:
    """The problem with formats, lengths, batching and memory that engines have, where it asks for others."""
    mode = "interleaved" if problem.draft is not None else problem.mode
    return replace(
        problem,
        assumptions=replace(problem.assumptions, engine=None),
        numerics=_numerics(problem.numerics),
        workload=_workload(problem.workload, problem.model.max_seq_len),
        mode=mode,
        bounds="usable",
        prefill_axes=None,
        prefill_slice=None if mode == "interleaved" else problem.prefill_slice,
    )


def _numerics(numerics: ServingNumerics) -> ServingNumerics:
    weights, group = numerics.weights, numerics.weight_group
    if weights == "bf16":
        group = None
    elif (weights, group) not in ENGINE_WEIGHTS:
        groups = [size for dtype, size in ENGINE_WEIGHTS if dtype == weights]
        weights, group = (weights, groups[-1]) if groups else ("bf16", None)
    kv = numerics.kv
    if kv not in ENGINE_CACHES:
        kv = "int8" if dtype_bytes(kv) < dtype_bytes("bf16") else "bf16"
    return replace(numerics, weights=weights, weight_group=group, embeddings="bf16", kv=kv, flops="bf16", kv_sharing=1)


def _workload(work: ServingWorkload, longest: int) -> ServingWorkload:
    if work.held_tokens <= longest:
        return work
    generate = min(work.generate, max(1, longest // 2))
    prompt = longest - generate
    context = None if work.context is None else min(work.context, longest)
    return replace(work, prompt=prompt, generate=generate, context=context)
