"""Preparation of a training run: from the request to program, mesh, data and run.json."""

from __future__ import annotations

import importlib.metadata
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax

from rooftop import __version__
from rooftop.arrays import AXES
from rooftop.arrays.rules import BATCH_AXES, GATHER_AXES, SEQUENCE_AXES, STAGE_AXES, ways
from rooftop.capabilities import MATMUL_DTYPES, TrainingSpec
from rooftop.compiler.devices import Local, local_devices, mesh_of, write_axes
from rooftop.core.errors import RooftopError
from rooftop.core.rounding import next_multiple
from rooftop.models import ModelConfig
from rooftop.plan.training.plan import TrainingPlan
from rooftop.programs.attention.scores import BLOCK
from rooftop.programs.model.layer import Computation
from rooftop.programs.training.program import TrainProgram, loss_chunks
from rooftop.runs.folder import require_same
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE
from rooftop.train.data.dataset import Dataset, DataSource, Progress, open_dataset
from rooftop.train.engine import TrainJob, require_room
from rooftop.train.metrics import TrainRates
from rooftop.train.request import SEQ_LEN, TrainRequest
from rooftop.train.schedule import ScheduledOptimizer

#: Fields of a program that depend on the devices, their mesh or a plan for them, and not the mathematics of a step: a
#: resumed run may have others.
_OF_DEVICES = (
    *(f"program.computation.{name}" for name in (
        "attention", "attention_block", "collective_matmuls", "both_ways", "context_attention", "context_order",
        "experts_gather", "remat", "ring_order", "rules", "weights_left",
    )),
    *(f"program.{name}" for name in ("chunks", "loss_chunks", "microbatches", "schedule")),
)  # fmt: skip
#: Fastest block of queries and keys on a CPU (bench/speed/train_cpu.py).
_CPU_BLOCK = 128
_SEQUENCES = 16
_BALANCE = 0.01


@dataclass(frozen=True, kw_only=True)
class ReadyRun:
    """A job with its data. ``note`` names the devices and the mesh; ``about`` is the content of run.json."""

    job: TrainJob
    data: Dataset
    rates: TrainRates
    note: str
    about: dict[str, Any]


def prepare(request: TrainRequest, recorded: Mapping[str, Any] | None, progress: Progress | None) -> ReadyRun:
    """Prepare a run up to its first step. ``recorded`` is the run.json of a run that is resumed.

    Raises RooftopError for a request that cannot be run here or is not that of the recorded run, and Infeasible if the
    state does not fit the devices.
    """
    here = local_devices()
    if request.planned is not None:
        program, mesh, note = _of_plan(request, request.planned, here)
    else:
        program, mesh, note = _of_model(request, here)
    program = _completed(request, program)
    require_room(program, mesh)
    data = open_dataset(
        _source(request, program.model),
        request.folder,
        vocab=program.model.vocab,
        batch=program.batch,
        seq_len=program.seq_len,
        seed=request.seed,
        held_share=request.hold_out,
        progress=progress,
    )
    init = None if request.init is None else Path(request.init)
    identity = {
        "program": program.to_json(),
        "seed": request.seed,
        "init": None if init is None else str(init.resolve()),
        "data": data.digest,
        "tokenizer": None if data.tokenizer is None else data.tokenizer.digest,
        "hold_out": data.held_share,
    }
    if recorded is not None:
        require_same(request.folder.path, recorded["job"], identity, ignored=_OF_DEVICES)
    peak = request.peak_flops or here.flops_per_s(program.compute_dtype)
    rates = TrainRates.of(program.model, program.seq_len, None if peak is None else peak * mesh.size)
    return ReadyRun(
        job=TrainJob(program=program, mesh=mesh, seed=request.seed, init=init),
        data=data,
        rates=rates,
        note=note,
        about={
            "job": identity,
            "rooftop_version": __version__,
            "versions": _versions(),
            "mesh": dict(mesh.shape),
            "devices": {
                "name": here.name,
                "used": mesh.size,
                "platform": here.devices[0].platform,
                "processes": jax.process_count(),
            },
            "tokens": data.store.tokens,
            "documents": data.store.documents,
            "unigram_entropy": data.unigram_entropy,
            "mfu_convention": rates.convention,
            "note": note,
        },
    )


def session(step: int, command: str) -> dict[str, Any]:
    """Return the entry of run.json for one start of the run."""
    return {"step": step, "command": command, "date": datetime.now(UTC).isoformat(timespec="seconds")}


def _of_plan(request: TrainRequest, data: Mapping[str, Any], here: Local) -> tuple[TrainProgram, Any, str]:
    if request.model is not None and not isinstance(request.model, ModelConfig):
        raise RooftopError("model", str(request.model), "nothing with a plan, which names its model")
    plan = TrainingPlan.from_json(data)
    moved = request.shrink or request.axes is not None
    spec, note = map_plan(plan, here, as_is=request.as_is, shrink=moved)
    if request.axes is not None:
        spec, note = replace(spec, axes=request.axes), f"{note.split(':')[0]}: mesh {write_axes(request.axes)}"
    spec = replace(spec, seq_len=request.seq_len or spec.seq_len, sequences=request.batch_seqs or spec.sequences)
    layout = plan.mesh if here.is_slice(plan.problem.slice) and not moved else None
    if layout is None:
        kernel = here.attention(spec.numerics.compute, spec.model)
        spec = replace(spec, kernel=kernel, kind=here.devices[0].platform)
    accepted = "a plan that is executable, on a mesh and with a batch that divide"
    program = TrainProgram.from_spec(spec, accepted, mesh=layout)
    return program, mesh_of(spec.axes, here, layout=layout), note


def _of_model(request: TrainRequest, here: Local) -> tuple[TrainProgram, Any, str]:
    if request.as_is or request.shrink:
        raise RooftopError("as-is or shrink", "no plan", "a PLAN.json of rooftop plan train")
    axes = dict(request.axes) if request.axes is not None else {GATHER_AXES[0]: len(here.devices)}
    mesh = mesh_of(axes, here)
    model = request.model_without_plan
    stages = ways(axes, *STAGE_AXES)
    microbatches = request.microbatches or (1 if stages == 1 else 2 * stages)
    is_cpu = here.devices[0].platform == "cpu"
    compute = request.compute_dtype or ("f32" if is_cpu else "bf16")
    parts = ways(axes, *BATCH_AXES) * microbatches
    batch = request.batch_seqs or next_multiple(_SEQUENCES, parts)
    seq_len = request.seq_len or min(SEQ_LEN, model.max_seq_len)
    computation = Computation(
        model=model,
        # A pipeline stage has no ring.
        context_attention="all_gather" if stages > 1 else "ring",
        expert_matmul="grouped" if request.expert_capacity is None else "batched",
        attention=here.attention(compute, model),
        attention_block=_CPU_BLOCK if is_cpu else BLOCK,
    )
    program = TrainProgram(
        computation=computation,
        batch=batch,
        seq_len=seq_len,
        microbatches=microbatches,
        chunks=2 if request.schedule == "interleaved" else 1,
        schedule=request.schedule or DEFAULT_SCHEDULE,
        compute_dtype=compute,
    )
    sequences, positions = program.padded(mesh)
    chunks = loss_chunks(sequences // parts, positions // ways(axes, *SEQUENCE_AXES))
    return replace(program, loss_chunks=chunks), mesh, f"on {here.name}: mesh {write_axes(axes)}"


def _completed(request: TrainRequest, program: TrainProgram) -> TrainProgram:
    """The program with the values of the request, packed batches and a scheduled learning rate.

    Experts are kept in balance by default.
    """
    optimizer = ScheduledOptimizer(
        **vars(program.optimizer)
        | {
            "learning_rate": request.learning_rate,
            "weight_decay": request.weight_decay,
            "clip_norm": request.clip_norm or None,
            **_present(name=request.optimizer, moments=request.moments_dtype),
        },
        schedule=request.learning_rates,
    )
    compute, matmul = request.compute_dtype or program.compute_dtype, request.matmul_dtype
    if matmul not in (None, compute, *MATMUL_DTYPES):
        raise RooftopError("matmul-dtype", matmul, f"{', '.join(MATMUL_DTYPES)}, or {compute} as everything else")
    balance = _BALANCE if program.model.moe is not None and request.balance_loss is None else request.balance_loss
    computation = replace(
        program.computation,
        z_loss=request.z_loss,
        matmul=program.computation.matmul if matmul is None else None if matmul == compute else matmul,
        **_present(
            balance_loss=balance,
            expert_capacity=request.expert_capacity,
            remat=request.remat,
            context_attention=request.context_attention,
        ),
    )
    program = replace(
        program,
        packed=True,
        gradient_norm=True,
        optimizer=optimizer,
        computation=computation,
        **_present(
            microbatches=request.microbatches,
            schedule=request.schedule,
            chunks=request.chunks,
            compute_dtype=request.compute_dtype,
            weights_dtype=request.weights_dtype,
        ),
    )
    if program.model.positions == "learned" and program.seq_len > program.model.max_seq_len:
        most = program.model.max_seq_len
        raise RooftopError("seq", program.seq_len, f"at most {most}: the model has learned no more positions")
    return program


def _present(**values: str | float | None) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _source(request: TrainRequest, model: ModelConfig) -> DataSource:
    tokenizer = None if request.tokenizer is None else Path(request.tokenizer)
    if tokenizer is None and request.vocab is None:
        paths = [Path(str(path)) for path in (request.init, request.model) if isinstance(path, Path | str)]
        folders = [path if path.is_dir() else path.parent for path in paths if path.exists()]
        tokenizer = next((folder for folder in folders if (folder / "tokenizer.json").exists()), None)
    return DataSource(
        data=request.sources,
        field=request.field,
        tokenizer=tokenizer,
        vocab=min(request.vocab or model.vocab, model.vocab),
    )


def _versions() -> dict[str, str]:
    packages = ("jax", "jaxlib", "optax", "orbax-checkpoint", "numpy", "tokenizers")
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in packages}


def shrink(axes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Return mesh axes for at most ``devices`` devices: the largest axis is divided by its smallest prime, repeatedly.

    Of equal axes the first in the order of ``AXES`` is divided, which leaves as many axes as possible.
    """
    sizes = {axis: axes.get(axis, 1) for axis in AXES}
    while math.prod(sizes.values()) > devices:
        largest = max(AXES, key=lambda axis: sizes[axis])
        size = sizes[largest]
        sizes[largest] = size // next(prime for prime in range(2, size + 1) if size % prime == 0)
    return sizes


def shrunk_plan(spec: TrainingSpec, devices: int) -> TrainingSpec:
    """Return the train step on fewer devices: axes by ``shrink``, and as many sequences on a device as before.

    A device has at least one sequence.
    """
    small = replace(spec, axes=shrink(spec.axes, devices))
    batch_axes = spec.rules.activations["batch"]
    return replace(small, sequences=spec.padded[0] // spec.ways(*batch_axes) * small.ways(*batch_axes))


def map_plan(plan: TrainingPlan, here: Local, *, as_is: bool, shrink: bool) -> tuple[TrainingSpec, str]:
    """Return the train step of the plan as it runs on ``here``, and a line that describes it.

    The plan is unchanged on its own slice. Elsewhere ``as_is`` keeps mesh and batch, and ``shrink`` is ``shrunk_plan``.
    Raises RooftopError, naming what would run, if the slice is not here and neither is requested.
    """
    planned_for, spec = plan.problem.slice, plan.spec
    if here.is_slice(planned_for) and not shrink:
        return spec, f"on {planned_for.name}, as planned"
    devices = math.prod(spec.axes.values())
    small = shrunk_plan(spec, len(here.devices))
    if shrink:
        return small, f"planned for {planned_for.name}; here, on {here.name}: {_described(small)}"
    slices = f"{planned_for.name}, and here are {here.name}"
    if as_is and devices <= len(here.devices):
        return spec, f"planned for {planned_for.name}; here, on {here.name}, as it is: {_described(spec)}"
    local = f"--shrink to run it with {_described(small)}"
    as_is_text = f"--as-is to keep {_described(spec)}"
    if devices <= len(here.devices):
        raise RooftopError("plan slice", slices, f"{local}; or {as_is_text}")
    emulate = f" --devices {devices}" if here.devices[0].platform == "cpu" else f" on {devices} devices"
    raise RooftopError("plan slice", slices, f"{local}; or {as_is_text},{emulate}")


def _described(spec: TrainingSpec) -> str:
    return f"mesh {write_axes(spec.axes)}, {spec.sequences} sequences of {spec.seq_len}"
