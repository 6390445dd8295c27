"""Train steps that each framework can run, as capabilities: what a plan of it may ask for, and the obstacles of others.

Limits of other frameworks are those that their sources check: Megatron-LM at d98e8a6 (megatron/training/arguments.py,
core/transformer/transformer_config.py, core/parallel_state.py), torchtitan at 73a0e69 (v0.2.2), MaxText at e591f30
(src/maxtext/configs/types.py). They do not pad: sizes have to divide.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from rooftop.arrays.rules import BATCH_AXES, COLUMN_AXES, EXPERT_AXES, GATHER_AXES, SEQUENCE_AXES, STAGE_AXES
from rooftop.capabilities import TRAINING, Capability, TrainingSpec, obstacles

#: Optimizers of published configurations.
_OPTIMIZERS = ("adamw", "adam")
_Obstacle = Callable[[TrainingSpec], str | None]


def training_obstacles(framework: str, spec: TrainingSpec) -> Iterator[str]:
    """Reasons why the program of a framework cannot run ``spec`` as it is; nothing if it can."""
    return obstacles(PROGRAMS[framework], spec)


def _divides(title: str, names: str, sizes: Callable[[TrainingSpec], tuple[int, int]]) -> _Obstacle:
    """The obstacle of a size that is no multiple: ``sizes`` has the size, and that which has to divide it."""

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
        ways, moe = spec.ways(*EXPERT_AXES), spec.model.moe
        if moe is None:
            return None if ways == 1 else f"{title} has an expert axis for experts, which {spec.model.name} lacks"
        return None if moe.experts % ways == 0 else f"{title} divides experts by expert: {moe.experts} by {ways}"

    return Capability(name="expert axis", accepted="a divisor of the experts", obstacle=obstacle)


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


def _whole_weights(spec: TrainingSpec) -> str | None:
    ways = spec.ways(*GATHER_AXES)
    return None if ways == 1 else f"Megatron splits optimizer state over data, and no weights over fsdp: {ways}"


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


def _compute(spec: TrainingSpec) -> str:
    return spec.numerics.compute


def _matmul(spec: TrainingSpec) -> str:
    return spec.numerics.matmul


def _optimizer(spec: TrainingSpec) -> str:
    return spec.numerics.optimizer


_MEGATRON: tuple[Capability[TrainingSpec], ...] = (
    Capability(name="fsdp axis", accepted="1: optimizer state is split over data (distributed optimizer)",
               obstacle=_whole_weights),
    _heads("Megatron", kv=False),
    _context("Megatron"),
    _experts("Megatron"),
    _layers("Megatron", (0, 1, 2)),
    _sequences("Megatron"),
    _staged_schedule("Megatron", "1f1b", "interleaved"),
    _one_of("dtype of activations", "Megatron", ("bf16", "f16", "f32"), _compute),
    _one_of("dtype of matmuls", "Megatron", ("bf16", "f16", "f8_e4m3", "f4_e2m1", "f32"), _matmul),
    _one_of("optimizer", "Megatron", _OPTIMIZERS, _optimizer),
)  # fmt: skip
_TORCHTITAN: tuple[Capability[TrainingSpec], ...] = (
    _heads("torchtitan", kv=True),
    _context("torchtitan"),
    _experts("torchtitan"),
    _layers("torchtitan", (0, 1, 2)),
    _sequences("torchtitan"),
    Capability(name="tied embeddings", accepted="without stages", obstacle=_pipeline_copies),
    _staged_schedule("torchtitan", "1f1b", "interleaved", "gpipe", "zero_bubble"),
    _one_of("dtype of activations", "torchtitan", ("bf16", "f32"), _compute),
    _one_of("dtype of matmuls", "torchtitan", ("bf16", "f8_e4m3", "f32"), _matmul),
    _one_of("optimizer", "torchtitan", _OPTIMIZERS, _optimizer),
)
_MAXTEXT: tuple[Capability[TrainingSpec], ...] = (
    _experts("MaxText"),
    Capability(name="microbatches", accepted="a multiple of the stages", obstacle=_rounds),
    _layers("MaxText", (0,)),
    _sequences("MaxText"),
    _staged_schedule("MaxText", "gpipe", "1f1b", "interleaved"),
    _one_of("dtype of activations", "MaxText", ("bf16", "f32"), _compute),
    _one_of("dtype of matmuls", "MaxText", ("bf16", "int8", "f8_e4m3", "f32"), _matmul),
    _one_of("optimizer", "MaxText", (*_OPTIMIZERS, "sgd", "muon"), _optimizer),
)

#: What each framework can run, by its name.
PROGRAMS: Mapping[str, tuple[Capability[TrainingSpec], ...]] = {
    "rooftop": TRAINING,
    "maxtext": _MAXTEXT,
    "megatron": _MEGATRON,
    "torchtitan": _TORCHTITAN,
}
