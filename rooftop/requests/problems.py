"""Problems of plans: what a request asks for, read and checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rooftop.arrays import Mesh
from rooftop.arrays.rules import AXES
from rooftop.capabilities import AskedSwitches
from rooftop.core.errors import RooftopError, one_of
from rooftop.core.quantities import dtype_bytes, parse_count, parse_dtype
from rooftop.core.records import field_values
from rooftop.frameworks.framework import FRAMEWORKS, FrameworkName, parse_settings
from rooftop.frameworks.programs import matmul_dtypes
from rooftop.frameworks.remat import policy_of
from rooftop.hardware import Slice
from rooftop.models.adapters import BASE_BYTES, Adapters
from rooftop.models.numerics import Numerics
from rooftop.plan.pricing import BOUNDS
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import MOST_TOKENS, Workload
from rooftop.requests.inputs import axes_of, model_of
from rooftop.requests.planning import PlanTraining
from rooftop.scheduling.pipeline import SCHEDULES

if TYPE_CHECKING:
    from rooftop.models import ModelConfig
    from rooftop.requests.likes import CountLike

#: Tokens of a sequence by default.
_SEQ = 4096
#: Tokens of a step where slices are compared and no batch is given: LLaMA-2's 4 Mi, doubled until a run takes no more
#: than a million steps, as LLaMA-3's 15 T tokens at 16 Mi.
_LEAST_BATCH, _MOST_STEPS = 4 * 2**20, 1e6


def training_problem(request: PlanTraining, slice_: Slice, *, comparing: bool = False) -> Problem:
    """The problem on a slice, with everything read and checked. Raises RooftopError naming the field that is wrong."""
    if request.model is None:
        raise RooftopError("model", None, "a preset, or the path of a config.json: rooftop plan train llama3-70b")
    config, mesh, layout, microbatches = model_of(request.model), request.mesh, request.layout, request.microbatches
    seq = min(_SEQ, config.max_seq_len) if request.seq is None else parse_count(request.seq, "seq")
    batch_seqs = request.batch_seqs
    if comparing:
        for name, value in (("mesh", mesh), ("layout", layout)):
            if value is not None:
                raise RooftopError(name, value, "this with one slice, such as --on v5p:16x16x16, and no limits")
        if request.batch_tokens is None and batch_seqs is None:
            batch_seqs = max(1, round(_usual_batch(request.tokens) / seq))
    if mesh is not None and layout is not None:
        raise RooftopError("layout", layout, "--mesh or --layout, not both: a layout says the sizes too")
    if layout is not None:
        mesh = Mesh.from_layout(slice_, layout, of_model=True)
    name = one_of("framework", request.framework, FRAMEWORKS)
    matmul = parse_dtype(request.matmul_dtype, "matmul-dtype")
    problem = Problem(
        model=config,
        slice=slice_,
        workload=_workload(request.batch_tokens, batch_seqs, seq, request.tokens),
        numerics=Numerics(
            **_activations(matmul),
            matmul=matmul,
            weights=parse_dtype(request.weights_dtype, "weights-dtype"),
            moments=parse_dtype(request.moments_dtype, "moments-dtype"),
            optimizer=request.optimizer,
        ),
        assumptions=Assumptions() if request.assume is None else Assumptions().with_hidden(request.assume),
        axes=None if mesh is None or isinstance(mesh, Mesh) else axes_of(mesh, AXES),
        mesh=mesh if isinstance(mesh, Mesh) else None,
        remat=None if request.remat is None else policy_of(name, request.remat),
        microbatches=None if microbatches is None else parse_count(microbatches, "microbatches"),
        **field_values(request, AskedSwitches),
        framework=FrameworkName(
            name=name, release=request.release, settings=parse_settings(request.framework_settings)
        ),
        schedule=None if request.schedule is None else one_of("schedule", request.schedule, SCHEDULES),
        chunks=None if request.chunks is None else parse_count(request.chunks, "chunks"),
        bounds=one_of("bounds", request.bounds, BOUNDS),
        adapters=_adapters(request, config, comparing=comparing),
    )
    # A framework, release or setting that does not exist is refused here.
    program, known = problem.program, slice_.chip.flops_per_s
    if not comparing and problem.numerics.matmul not in known:
        accepted = ", ".join(matmul_dtypes(program.name, known))
        raise RooftopError(f"matmul dtype on {slice_.chip.name}", problem.numerics.matmul, accepted)
    return problem


def _adapters(request: PlanTraining, model: ModelConfig, *, comparing: bool) -> Adapters | None:
    """The adapters that are trained; None where all weights are."""
    if request.lora is None:
        if request.base_format is not None:
            raise RooftopError("base-format", request.base_format, "this with --lora, which freezes the weights")
        return None
    rank = parse_count(request.lora, "lora", largest=model.d_model)
    if request.framework != FRAMEWORKS[0]:
        accepted = f"this without --framework {request.framework}: plans of frameworks train all weights"
        raise RooftopError("lora", rank, accepted)
    if comparing:
        raise RooftopError("lora", rank, "this with one slice, such as --on h100:8, and no limits")
    asked = request.lora_targets
    targets = [target.strip() for target in (asked.split(",") if isinstance(asked, str) else asked) if target.strip()]
    base = "bf16" if request.base_format is None else one_of("base-format", request.base_format, tuple(BASE_BYTES))
    return Adapters(rank=rank, targets=tuple(dict.fromkeys(targets)), base=base)


def _activations(matmul: str) -> dict[str, str]:
    """Dtypes of activations and gradients if matmuls are wider than the usual ones: theirs."""
    usual = Numerics()
    return {
        name: matmul for name in ("compute", "gradients") if dtype_bytes(matmul) > dtype_bytes(getattr(usual, name))
    }


def _usual_batch(tokens: CountLike | None) -> int:
    """Tokens of a step of a run of ``tokens``, where none are given."""
    batch = _LEAST_BATCH
    while tokens is not None and parse_count(tokens, "tokens") > _MOST_STEPS * batch:
        batch *= 2
    return batch


def _workload(
    batch_tokens: CountLike | None, batch_seqs: CountLike | None, seq: CountLike, tokens: CountLike | None
) -> Workload:
    length = parse_count(seq, "seq")
    if batch_tokens is not None and batch_seqs is None:
        batch = parse_count(batch_tokens, "batch-tokens")
    elif batch_seqs is not None and batch_tokens is None:
        batch = parse_count(batch_seqs, "batch-seqs") * length
    else:
        both = None if batch_tokens is None else f"{batch_tokens} and {batch_seqs}"
        raise RooftopError("batch", both, "one of --batch-tokens and --batch-seqs")
    if length > MOST_TOKENS:
        raise RooftopError("seq", length, f"tokens from 1 to {MOST_TOKENS:,}")
    if batch > MOST_TOKENS:
        option, count = ("batch-tokens", batch) if batch_seqs is None else ("batch-seqs", batch // length)
        raise RooftopError(option, count, f"tokens of a step from 1 to {MOST_TOKENS:,}")
    total = None if tokens is None else float(parse_count(tokens, "tokens"))
    return Workload.nearest(batch_tokens=batch, seq_len=length, tokens=total)
