"""Train steps that each framework can run, as capabilities: what a plan of it may ask for, and the obstacles of others.

Limits of other frameworks are those that their sources check: Megatron-LM at d98e8a6 (megatron/training/arguments.py,
core/transformer/transformer_config.py, core/parallel_state.py), torchtitan at 73a0e69 (v0.2.2), MaxText at e591f30
(src/maxtext/configs/types.py). They do not pad: sizes have to divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rooftop.arrays.rules import BATCH_AXES, COLUMN_AXES, EXPERT_AXES, GATHER_AXES, SEQUENCE_AXES, STAGE_AXES
from rooftop.capabilities import MATMUL_DTYPES, STATE_DTYPES, TRAINING, Capability, TrainingSpec, obstacles
from rooftop.frameworks.remat import has_remat, remat_words
from rooftop.models import ModelConfig
from rooftop.models.numerics import Numerics

_Obstacle = Callable[[TrainingSpec], str | None]


def training_obstacles(framework: str, spec: TrainingSpec) -> Iterator[str]:
    """Reasons why the program of a framework cannot run ``spec`` as it is; nothing if it can."""
    return obstacles(PROGRAMS[framework], spec)


def _divides(title: str, names: str, sizes: Callable[[TrainingSpec], tuple[int, int]]) -> _Obstacle:
    """The obstacle of a size that its divisor does not divide: ``sizes`` returns the size and the divisor."""

    def obstacle(spec: TrainingSpec) -> str | None:
        size, by = sizes(spec)
        return None if size % by == 0 else f"{title} divides {names}: {size:,} by {by:,}"

    return obstacle


def _sequences(title: str) -> Capability[TrainingSpec]:
    return Capability(
        name="sequences of a step",
        accepted=f"a multiple of {' x '.join(BATCH_AXES)} x microbatches",
        obstacle=_divides(
            title, "sequences of a step by copies and microbatches",
            lambda spec: (spec.sequences, spec.ways(*BATCH_AXES) * spec.choice.microbatches),
        ),
    )  # fmt: skip


def _heads(title: str, *, kv: bool) -> Capability[TrainingSpec]:
    def obstacle(spec: TrainingSpec) -> str | None:
        tensor, model = spec.ways(*COLUMN_AXES), spec.model
        if model.heads % tensor:
            return f"{title} divides heads by tensor: {model.heads} by {tensor}"
        kv_fits = model.kv_heads % tensor == 0 or (not kv and tensor % model.kv_heads == 0)
        # Latents have no key/value heads of their own.
        return (
            None if model.mla or kv_fits else f"{title} divides key/value heads by tensor: {model.kv_heads} by {tensor}"
        )

    accepted = "multiples of tensor" + ("" if kv else "; or tensor a multiple of key/value heads")
    return Capability(name="heads and key/value heads", accepted=accepted, obstacle=obstacle)


def _context(title: str) -> Capability[TrainingSpec]:
    return Capability(
        name="context axis",
        accepted="sequences that are a multiple of 2 x context",
        obstacle=_divides(
            title, "tokens of a sequence by 2 x context",
            lambda spec: (spec.seq_len, 2 * spec.ways(*SEQUENCE_AXES) if spec.ways(*SEQUENCE_AXES) > 1 else 1),
        ),
    )  # fmt: skip


def _experts(title: str) -> Capability[TrainingSpec]:
    def obstacle(spec: TrainingSpec) -> str | None:
        moe = spec.model.moe
        if moe is None:
            alone = spec.ways(*EXPERT_AXES) == 1
            return None if alone else f"{title} has an expert axis for experts, which {spec.model.name} lacks"
        # Experts that are not split by columns are dealt out over tensor too.
        axes = spec.rules.parameters.get("expert", ())
        ways = spec.ways(*axes)
        return None if moe.experts % ways == 0 else f"{title} divides experts by {_by(axes)}: {moe.experts} by {ways}"

    return Capability(name="expert axis", accepted="a divisor of the experts", obstacle=obstacle)


def _widths(title: str, *names: str) -> Capability[TrainingSpec]:
    """Sizes of weights, which nothing pads: ``names`` of ``_WIDTHS``."""

    def obstacle(spec: TrainingSpec) -> str | None:
        for name in names:
            size, axes = _WIDTHS[name](spec)
            if size % (ways := spec.ways(*axes)):
                return f"{title} divides {name} by {_by(axes)}: {size:,} by {ways:,}"
        return None

    return Capability(
        name="widths", accepted=f"{', '.join(names)}: multiples of the axes that split them", obstacle=obstacle
    )


def _by(axes: Sequence[str]) -> str:
    return " x ".join(axes)


def _columns(spec: TrainingSpec, dim: str, size: int) -> tuple[int, tuple[str, ...]]:
    return size, spec.rules.parameters.get(dim, ())


def _expert_columns(spec: TrainingSpec) -> tuple[int, tuple[str, ...]]:
    return _columns(spec, "expert_mlp", 0 if spec.model.moe is None else spec.model.moe.d_ff)


#: Sizes of a model's weights, and the axes that split them.
_WIDTHS: Mapping[str, Callable[[TrainingSpec], tuple[int, Sequence[str]]]] = {
    # MaxText's rules for embed: everything that splits tokens but data splits D (src/maxtext/configs/base.yml).
    "D": lambda spec: (spec.model.d_model, (*GATHER_AXES, *SEQUENCE_AXES, *EXPERT_AXES)),
    "F": lambda spec: _columns(spec, "mlp", spec.model.d_ff if spec.model.dense_layers else 0),
    "columns of experts": _expert_columns,
    "vocabulary": lambda spec: _columns(spec, "vocab", spec.model.vocab),
}


def _layers(title: str, extra: Sequence[int]) -> Capability[TrainingSpec]:
    """Layers of stages, with ``extra`` places for embedding and loss."""

    def obstacle(spec: TrainingSpec) -> str | None:
        stages, layers = spec.ways(*STAGE_AXES), spec.model.layers
        parts = stages * spec.choice.chunks
        if stages == 1 or any((layers + more) % parts == 0 for more in extra):
            return None
        counted = " or ".join(str(layers + more) for more in extra)
        return f"{title} divides layers (with embedding and loss {counted}) by stages x chunks: {parts}"

    return Capability(
        name="layers",
        accepted="a multiple of stages x chunks, counted with embedding and loss or not",
        obstacle=obstacle,
    )


def _one_of(
    name: str, title: str, accepted: Sequence[str], value: Callable[[TrainingSpec], str]
) -> Capability[TrainingSpec]:
    def obstacle(spec: TrainingSpec) -> str | None:
        asked = value(spec)
        return None if asked in accepted else f"{title} has no {name} {asked}: {', '.join(accepted)}"

    return Capability(name=name, accepted=", ".join(accepted), obstacle=obstacle)


def _staged_schedule(title: str, *accepted: str) -> Capability[TrainingSpec]:
    """The schedule, where there are stages."""
    return _one_of(
        "schedule", title, accepted,
        lambda spec: spec.choice.schedule if spec.ways(*STAGE_AXES) > 1 else accepted[0],
    )  # fmt: skip


def _split_weights(spec: TrainingSpec) -> str | None:
    ways, copies = spec.ways(*GATHER_AXES), spec.ways("data")
    if ways == 1:
        return None
    if spec.ways(*STAGE_AXES) > 1:
        return f"Megatron splits weights over fsdp without stages alone: fsdp {ways}"
    if copies > 1:
        return f"Megatron splits weights over all copies of a batch or none: data {copies} x fsdp {ways}"
    optimizer = spec.numerics.optimizer
    # megatron/training/arguments.py: emerging optimizers.
    return f"Megatron splits weights over fsdp with adam alone: {optimizer}" if optimizer == "muon" else None


def _stage_layers(spec: TrainingSpec) -> str | None:
    parts, layers = spec.ways(*STAGE_AXES) * spec.choice.chunks, spec.model.layers
    too_many = spec.ways(*STAGE_AXES) > 1 and parts > layers + 2
    reason = f"Megatron has {layers} layers, embedding and loss for stages x chunks: {parts}"
    return reason if too_many else None


def _grouped(title: str) -> Capability[TrainingSpec]:
    def obstacle(spec: TrainingSpec) -> str | None:
        stages, count = spec.ways(*STAGE_AXES), spec.choice.microbatches
        uneven = stages > 1 and spec.choice.chunks > 1 and count % stages
        return f"{title} interleaves microbatches in groups of its stages: {count} in {stages}" if uneven else None

    return Capability(name="microbatches, interleaved", accepted="a multiple of the stages", obstacle=obstacle)


def _pipeline_copies(spec: TrainingSpec) -> str | None:
    tied = spec.model.tied_embeddings and spec.ways(*STAGE_AXES) > 1
    return "torchtitan ties no embeddings across pipeline stages" if tied else None


def _rounds(spec: TrainingSpec) -> str | None:
    stages = spec.ways(*STAGE_AXES)
    uneven = stages > 1 and spec.choice.microbatches % stages
    return (
        f"MaxText's microbatches are a multiple of its stages: {spec.choice.microbatches} of {stages}"
        if uneven
        else None
    )


def _remat(framework: str, title: str) -> Capability[TrainingSpec]:
    def obstacle(spec: TrainingSpec) -> str | None:
        remat = spec.choice.remat
        return None if has_remat(framework, remat, spec.model) else f"{title} has no remat policy {remat}"

    return Capability(name="remat policy", accepted=remat_words(framework), obstacle=obstacle)


def _formats(framework: str, title: str) -> Iterator[Capability[TrainingSpec]]:
    for name, (about, accepted) in _FORMATS[framework].items():
        yield _one_of(about, title, accepted, partial(_format, name))


def _format(name: str, spec: TrainingSpec) -> str:
    value: str = getattr(spec.numerics, name)
    return value


#: Number formats and optimizers of each framework, the usual one first, by the field of ``Numerics`` and its name.
_FORMATS: Mapping[str, Mapping[str, tuple[str, tuple[str, ...]]]] = {
    "maxtext": {
        "compute": ("dtype of activations", ("bf16", "f32")),
        "matmul": ("dtype of matmuls", ("bf16", "int8", "f8_e4m3", "f32")),
        "optimizer": ("optimizer", ("adamw", "adam", "sgd", "muon")),
    },
    "megatron": {
        "compute": ("dtype of activations", ("bf16", "f16", "f32")),
        "matmul": ("dtype of matmuls", ("bf16", "f16", "f8_e4m3", "f4_e2m1", "f32")),
        "optimizer": ("optimizer", ("adamw", "adam", "muon")),
    },
    "torchtitan": {
        "compute": ("dtype of activations", ("bf16", "f32")),
        "matmul": ("dtype of matmuls", ("bf16", "f8_e4m3", "f32")),
        "optimizer": ("optimizer", ("adamw", "adam")),
    },
}


def runnable_numerics(framework: str, spec: TrainingSpec) -> Numerics:
    """The number formats and the optimizer of ``spec``, with usual ones where the framework has not what is asked."""
    if framework not in _FORMATS:
        return spec.runnable_numerics
    formats = {name: accepted for name, (_, accepted) in _FORMATS[framework].items()}
    usual = {name: accepted[0] for name, accepted in formats.items() if getattr(spec.numerics, name) not in accepted}
    return replace(spec.numerics, **usual)


def matmul_dtypes(framework: str, dtypes: Iterable[str]) -> tuple[str, ...]:
    """Those of ``dtypes`` that matmuls of a framework's layers can have."""
    known = _FORMATS[framework]["matmul"][1] if framework in _FORMATS else (*STATE_DTYPES, *MATMUL_DTYPES)
    return tuple(dtype for dtype in dtypes if dtype in known)


def megatron_lacks(model: ModelConfig) -> Iterator[str]:
    """Parts of a model for which Megatron-LM's arguments have no words."""
    if model.attn_softcap is not None or model.final_softcap is not None:
        yield "softcaps"
    if model.positions == "alibi":
        yield "ALiBi"
    if model.norm_placement != "pre":
        yield "norms of outputs"
    if model.parallel is not None:
        yield "parallel attention and MLP"
    if model.mixers or model.others or model.not_run:
        yield "other mixers than attention"
    if model.activation not in ("silu", "relu2", "gelu", "gelu_tanh"):
        yield model.activation
    if model.shared_kv_layers:
        yield "layers that share keys and values"


def _megatron_model(spec: TrainingSpec) -> str | None:
    lacks = next(megatron_lacks(spec.model), None)
    return None if lacks is None else f"Megatron-LM's arguments have no {lacks}, which {spec.model.name} has"


_MEGATRON: tuple[Capability[TrainingSpec], ...] = (
    Capability(
        name="fsdp axis",
        accepted="in place of data, without stages and muon (--use-megatron-fsdp)",
        obstacle=_split_weights,
    ),
    Capability(
        name="model",
        accepted="attention in all layers, without softcaps, ALiBi, norms of outputs or a parallel MLP",
        obstacle=_megatron_model,
    ),
    _heads("Megatron", kv=False),
    _context("Megatron"),
    _experts("Megatron"),
    # It pads the vocabulary itself.
    _widths("Megatron", "F", "columns of experts"),
    Capability(
        name="layers",
        accepted="stages x chunks up to layers, embedding and loss (--pipeline-model-parallel-layout)",
        obstacle=_stage_layers,
    ),
    # core/pipeline_parallel/schedules.py; a group of microbatches has as many as there are stages.
    _grouped("Megatron"),
    _sequences("Megatron"),
    _staged_schedule("Megatron", "1f1b", "interleaved"),
    _remat("megatron", "Megatron"),
    *_formats("megatron", "Megatron"),
)  # fmt: skip


def _torchtitan_model(spec: TrainingSpec) -> str | None:
    capped = spec.model.attn_softcap is not None or spec.model.final_softcap is not None
    return f"torchtitan has no softcaps, which {spec.model.name} has" if capped else None


_TORCHTITAN: tuple[Capability[TrainingSpec], ...] = (
    Capability(name="model", accepted="without softcaps", obstacle=_torchtitan_model),
    _heads("torchtitan", kv=True),
    _context("torchtitan"),
    _experts("torchtitan"),
    _layers("torchtitan", (0, 1, 2)),
    # torch.distributed.pipelining.schedules: rounds of as many microbatches as there are stages.
    _grouped("torchtitan"),
    _sequences("torchtitan"),
    Capability(name="tied embeddings", accepted="without stages", obstacle=_pipeline_copies),
    _staged_schedule("torchtitan", "1f1b", "interleaved", "gpipe", "zero_bubble"),
    _remat("torchtitan", "torchtitan"),
    *_formats("torchtitan", "torchtitan"),
)
_MAXTEXT: tuple[Capability[TrainingSpec], ...] = (
    # jit refuses weights whose dims its mesh does not divide.
    _heads("MaxText", kv=True),
    _experts("MaxText"),
    _widths("MaxText", "D", "F", "columns of experts", "vocabulary"),
    Capability(name="microbatches", accepted="a multiple of the stages", obstacle=_rounds),
    _layers("MaxText", (0,)),
    _sequences("MaxText"),
    _staged_schedule("MaxText", "gpipe", "1f1b", "interleaved"),
    _remat("maxtext", "MaxText"),
    *_formats("maxtext", "MaxText"),
)

#: What each framework can run, by its name.
PROGRAMS: Mapping[str, tuple[Capability[TrainingSpec], ...]] = {
    "rooftop": TRAINING,
    "maxtext": _MAXTEXT,
    "megatron": _MEGATRON,
    "torchtitan": _TORCHTITAN,
}
