"""Random train steps that a table of capabilities says run, or do not, and what becomes of them.

    python -m tests.support.promise --seed 1 --count 500
    python -m tests.support.promise --seed 1 --count 4000 --refusals

The first draws so many specs, builds, compiles and runs one step of those without obstacles on emulated devices, and
compares each with one device. With ``--bypass`` those that are refused for one reason run as well: the table says of
each property how many of them fail. The second runs nothing, draws kernels that no CPU runs as well, and prints the
table of refusals in docs/evidence/promise.md. A draw has a number, and ``--start`` begins with it.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from random import Random
from typing import Any
from unittest import mock

from tests.support.quickly import QUICK_FLAGS, QUICKLY

if __name__ == "__main__":
    # JAX reads these when it is imported.
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK_FLAGS}"

import jax
import numpy as np
import optax

from rooftop.arrays.rules import (
    AXES,
    BATCH_AXES,
    COLUMN_AXES,
    EXPERT_AXES,
    RESIDUAL_AXES,
    SEQUENCE_AXES,
    STAGE_AXES,
    Rules,
    ways,
)
from rooftop.capabilities import KERNELS, MATMUL_DTYPES, TRAINING, AttentionKernel, Choice, TrainingSpec
from rooftop.core.errors import RooftopError
from rooftop.models import MLA, ModelConfig, MoE
from rooftop.models.activations import POLICIES
from rooftop.models.adapters import Adapters
from rooftop.models.numerics import Numerics
from rooftop.models.optimizers import OPTIMIZERS
from rooftop.models.program_sizes import CONTEXT_CHUNKS
from rooftop.programs.attention.context import sequence_order
from rooftop.programs.parameters import Parameter
from rooftop.programs.training import program as program_module
from rooftop.programs.training.adafactor import describe_moments
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import abstract_batch, init_state, train_step
from rooftop.scheduling.pipeline import SCHEDULES
from tests.support.curves import mesh_of

#: Largest error of the loss, and of an updated array relative to its largest change: in float32, with matmuls in 8 bits
#: between, where the last bit of a sum now and then decides how an operand is rounded, and with some dtype of 16 bits.
TOLERANCE = {"exact": (2e-5, 2e-3), "narrow": (1e-3, 0.2), "rounded": (3e-2, 0.2)}
#: Largest distance of neighbouring numbers, relative to them; that of float32 is within the tolerance.
SPACING = {"bf16": 2.0**-7, "f32": 0.0}
#: Kernels that run on a CPU.
CPU_KERNELS: tuple[AttentionKernel, ...] = ("reference", "chunked")
#: Tokens of a model's longest sequence. A step of a model without learned positions may have longer ones.
LONGEST = 64
#: One in so many random steps runs with dropped tokens as well.
DROPPING = 4
#: Fields of steps that no program runs.
UNSUPPORTED = (
    {"compute": "f16", "matmul": "f16"},
    {"matmul": "int4"},
    *({name: "f16"} for name in ("weights", "moments", "gradients")),
    {"weights": "int8"},
    {"schedule": "dual_pipe"},
)


def random_spec(seed: int, number: int, kernels: tuple[AttentionKernel, ...] = CPU_KERNELS) -> TrainingSpec:
    """Train step number ``number`` of a seed, on up to eight devices: half have a size that an axis may not divide.

    One in five has something that no program runs.
    """
    rng = Random(f"{seed}/{number}")
    axes = _mesh(rng)
    schedule = rng.choice(list(SCHEDULES)) if ways(axes, *STAGE_AXES) > 1 else "1f1b"
    chunks = rng.randint(2, 3) if schedule == "interleaved" else 1
    model = _model(rng, axes, chunks)
    microbatches = rng.choice((1, 2, 2, 3, 4))
    spread, pieces = ways(axes, *BATCH_AXES), ways(axes, *RESIDUAL_AXES)
    ring = CONTEXT_CHUNKS * ways(axes, *SEQUENCE_AXES)
    sizes = {
        "sequences": spread * microbatches * rng.randint(1, 2),
        "seq_len": int(np.lcm(pieces, ring)) * rng.randint(1, 2),
    }
    dtypes = {name: rng.choice(("f32", "f32", "bf16")) for name in ("compute", "gradients", "weights", "moments")}
    more: dict[str, Any] = dtypes | {"matmul": dtypes["compute"], "optimizer": rng.choice(list(OPTIMIZERS))}
    if rng.random() < 0.5:
        odd = rng.choice(("sequences", "seq_len", "layers", "d_model", "d_ff", "heads", "vocab", "experts"))
        if odd in sizes:
            sizes[odd] = rng.randint(1, 2 * sizes[odd] + 1)
        else:
            model = _odd(rng, model, odd)
    if rng.random() < 0.25:
        more["matmul"] = rng.choice(MATMUL_DTYPES)
    if rng.random() < 0.1:
        more |= rng.choice(UNSUPPORTED)
    if rng.random() < 0.4:
        model = _composed(rng, model)
    if model.positions == "learned" and rng.random() < 0.2:
        sizes["seq_len"] += LONGEST
    spec = TrainingSpec(
        model=model,
        axes=axes,
        kernel=rng.choice(kernels),
        attention_block=rng.choice((4, 8, 512)),
        choice=Choice(
            microbatches=microbatches,
            remat=rng.choice((*POLICIES, "block,qkv=offload", "full,mlp_up=save")),
            schedule=more.pop("schedule", schedule),
            chunks=chunks,
            collective_matmuls=_coin(rng),
            experts_over_tensor=(whole := _coin(rng)),
        ),
        numerics=Numerics(**more),
        rules=(Rules().with_whole_experts if whole else Rules()).only(
            {axis: size for axis, size in axes.items() if size > 1}
        ),
        **sizes,
    )
    if Random(f"{seed}/{number}/adapters").random() < 0.02:
        spec = replace(spec, adapters=Adapters(rank=4))
    keeps_exchanged = model.moe is not None and _coin(rng)
    if not keeps_exchanged:
        return spec
    return replace(spec, choice=replace(spec.choice, remat=f"{spec.choice.remat},mlp_normed=save"))


def _mesh(rng: Random) -> dict[str, int]:
    """Axes of up to eight devices: every factor of their number lies on an axis of its own choice."""
    axes = dict.fromkeys(AXES, 1)
    for factor in rng.choice(((2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2), (2, 2), (2,), (3, 2), (3,), (5,), (7,), ())):
        axes[rng.choice(AXES)] *= factor
    return axes


def _model(rng: Random, axes: dict[str, int], chunks: int) -> ModelConfig:
    """A model whose sizes divide over ``axes``."""
    tensor, stages = ways(axes, *COLUMN_AXES), ways(axes, *STAGE_AXES) * chunks
    latent = rng.random() < 0.2
    experts = rng.random() < (0.95 if ways(axes, *EXPERT_AXES) > 1 else 0.3)
    heads = rng.choice([n for n in (4, 8) if n % tensor == 0] or [tensor])
    kv_heads = heads if latent else rng.choice([n for n in (tensor, 2 * tensor, heads) if heads % n == 0])
    layers = stages * rng.randint(1, 2 if stages < 4 else 1)
    alone = rng.randint(0, 1) if experts and layers < 4 else 0
    moe = None
    if experts:
        groups = rng.choice((1, 2))
        moe = MoE(
            experts=8,
            active=rng.randint(1, 3),
            d_ff=rng.choice((8, 16)),
            shared_d_ff=rng.choice((0, 8, 16)),
            dense_layers=alone,
            bias=_coin(rng),
            scoring=rng.choice(("softmax", "sigmoid")),
            normalise=_coin(rng),
            groups=groups,
            active_groups=groups,
            correction_bias=_coin(rng),
        )
    mla = None
    if latent:
        mla = MLA(q_rank=rng.choice((None, 8, 16)), kv_rank=8, d_nope=4, d_rope=4, d_v=rng.choice((4, 8)))
    layers += alone
    pattern = rng.choice(((None,), (None,), (5,), (None, 5), (3, None)))
    plain = not latent
    return ModelConfig(
        name="the model",
        family="llama",
        layers=layers,
        d_model=rng.choice((16, 24, 32)),
        d_ff=rng.choice((16, 24)),
        heads=heads,
        kv_heads=kv_heads,
        d_head=8,
        vocab=rng.choice((32, 64)),
        max_seq_len=LONGEST,
        mlp_matrices=rng.choice((3, 3, 3, 2)),
        activation=rng.choice(("silu", "gelu_tanh")),
        tied_embeddings=_coin(rng),
        qkv_bias=plain and _coin(rng),
        attn_out_bias=plain and _coin(rng),
        mlp_bias=_coin(rng),
        norm=rng.choice(("rms", "rms", "layer")),
        norm_placement=rng.choice(("pre", "pre", "sandwich")),
        qk_norm="head" if plain and _coin(rng) else None,
        attention_sinks=plain and rng.random() < 0.25,
        attn_softcap=rng.choice((None, None, 20.0)),
        final_softcap=rng.choice((None, None, 10.0)),
        layer_windows=tuple(pattern[at % len(pattern)] for at in range(layers)),
        positions="learned" if plain and rng.random() < 0.2 else "rope",
        moe=moe,
        mla=mla,
    )


def _composed(rng: Random, model: ModelConfig) -> ModelConfig:
    """The model with some of the parts that only a few families have. One in ten has a part that no program has."""
    parts: list[dict[str, Any]] = [
        {"norm_placement": "post"}, {"norm_placement": "pre", "parallel": "shared"}, {"qk_norm": "width"},
        {"residual_scale": 0.5}, {"logits_scale": 0.5}, {"embed_scale": 2.0}, {"rotary_dims": 4},
        {"rope_interleaved": True}, {"norm_bias": False}, {"norm_scale": False, "norm_bias": False},
        {"norm_offset": True}, {"query_scale": 0.2},
        {"rope_layers": tuple(at % 2 == 0 for at in range(model.layers))},
    ]  # fmt: skip
    changes = rng.sample(parts, 2)
    if rng.random() < 0.1:
        changes.append(rng.choice(({"attn_gate": True}, {"embed_norm": True}, {"not_run": ("a part",)})))
    for change in changes:
        # Parts that a model of this kind cannot have.
        with suppress(RooftopError):
            model = replace(model, **change)
    return model


def _coin(rng: Random) -> bool:
    return rng.random() < 0.5


def _odd(rng: Random, model: ModelConfig, name: str) -> ModelConfig:
    """The model with another size of one dim."""
    if name == "experts":
        if model.moe is None:
            return replace(model, d_ff=rng.randint(5, 30))
        moe = replace(model.moe, experts=rng.randint(4, 9), d_ff=rng.randint(5, 17), groups=1, active_groups=1)
        return replace(model, moe=moe)
    if name == "heads":
        heads = rng.randint(1, 9)
        kv_heads = heads if model.mla else rng.choice([n for n in range(1, heads + 1) if heads % n == 0])
        return replace(model, heads=heads, kv_heads=kv_heads)
    if name == "layers":
        least = 1 if model.moe is None else model.moe.dense_layers + 1
        return replace(model, layers=rng.randint(least, 7), layer_windows=())
    return replace(model, **{name: rng.randint(9, 40)})


def refusals(spec: TrainingSpec) -> list[tuple[str, str]]:
    """Properties for which programs refuse a spec, each with the obstacle, its numbers folded to N."""
    return [
        (item.name, re.sub(r"\b\d[\d,]*\b", "N", obstacle))
        for item in TRAINING
        if (obstacle := item.obstacle(spec)) is not None
    ]


def refusal_table(drawn: Iterable[TrainingSpec]) -> str:
    """Number of executable specs, and a Markdown table of why the others are not, as in docs/evidence/promise.md."""
    reasons = [refusals(spec) for spec in drawn]
    counts = Counter(reason for several in reasons for reason in several)
    lines = [
        f"{sum(not several for several in reasons):,} of {len(reasons):,} random train steps are executable.",
        "",
        "| property | refusal | steps |",
        "|---|---|---|",
    ]
    lines += [f"| {name} | {text} | {count} |" for (name, text), count in sorted(counts.items(), key=_most_frequent)]
    return "\n".join(lines) + "\n"


def _most_frequent(row: tuple[tuple[str, str], int]) -> tuple[int, tuple[str, str]]:
    reason, count = row
    return -count, reason


@dataclass(frozen=True)
class Outcome:
    """Outcome of a spec: the properties that refuse it, or the reason why its step is not that of one device."""

    refused: tuple[str, ...] = ()
    failure: str | None = None


def outcome(spec: TrainingSpec, *, bypass: bool = False, drops: bool = False) -> Outcome:
    """Build, compile and run a spec without obstacles, or any if the check is to be bypassed.

    With ``drops`` also as it stands, where experts drop tokens.
    """
    refused = tuple(name for name, _ in refusals(spec))
    if refused and not bypass:
        return Outcome(refused)
    try:
        with mock.patch.object(program_module, "require") if refused else nullcontext():
            program = TrainProgram.from_spec(spec, "any")
        return Outcome(refused, difference(program, spec, drops=drops))
    except Exception as error:  # Whatever a program raises breaks the promise.
        # Some exceptions have no text.
        first, *_ = *str(error).strip().splitlines(), ""
        return Outcome(refused, f"{type(error).__name__}: {first[:200]}")


def difference(program: TrainProgram, spec: TrainingSpec, *, drops: bool) -> str | None:
    """The difference between a step of the program on its mesh and one of a plain program on one device, if any.

    No token is dropped in either; with ``drops`` a step that drops some must have a finite loss.
    """
    mesh = mesh_of(**spec.axes)
    moe = spec.model.moe is not None
    if moe and drops and not np.isfinite(stepped(program, mesh)[0]):
        return "the loss is not finite where experts drop tokens"
    loss, before, after = stepped(_comparable(program), mesh)
    numerics = spec.numerics
    expected_loss, _, expected = _one_device(
        spec.model,
        spec.sequences,
        spec.seq_len,
        replace(
            numerics,
            compute="f32",
            gradients="f32",
            matmul=numerics.matmul if numerics.matmul in MATMUL_DTYPES else "f32",
        ),
    )
    exact = {numerics.compute, numerics.weights, numerics.moments, numerics.gradients} == {"f32"}
    narrow = numerics.matmul in MATMUL_DTYPES
    of_loss, of_weights = TOLERANCE["narrow" if exact and narrow else "exact" if exact else "rounded"]
    if not abs(loss - expected_loss) <= of_loss * abs(expected_loss):
        return f"a loss of {loss}, not {expected_loss}"
    if (moe or narrow) and not exact:
        # Other operands are rounded. Rounded scores choose other experts now and then.
        return None
    spacing = SPACING[numerics.moments if numerics.optimizer in ("lion", "muon", "adafactor") else numerics.weights]
    if numerics.optimizer == "muon" and not exact:
        # Steps towards orthogonality make rounding of small singular values large.
        before, after, expected = (momenta for momenta, _ in (before, after, expected))
    # A gradient that is zero but for rounding, as that of a key's bias, is a sum of rounded terms.
    largest = max(np.abs(new - old).max() for new, old in zip(*map(jax.tree.leaves, (expected, before)), strict=True))
    least = 1e-3 if exact else max(1e-3, SPACING["bf16"] * largest)
    for path, ours, theirs, old in zip(
        jax.tree_util.tree_leaves_with_path(after),
        jax.tree.leaves(after),
        jax.tree.leaves(expected),
        jax.tree.leaves(before),
        strict=True,
    ):
        if ours.shape != theirs.shape:
            return f"{jax.tree_util.keystr(path[0])} of shape {ours.shape}, not {theirs.shape}"
        # Two results that are almost the same may be stored as neighbours.
        error = (np.abs(ours - theirs) - spacing * np.abs(theirs)).max() / max(np.abs(theirs - old).max(), least)
        if not error <= of_weights:
            return f"{jax.tree_util.keystr(path[0])} differs by {error:.2g} of its largest change"
    return None


@lru_cache(maxsize=64)
def _one_device(model: ModelConfig, sequences: int, seq_len: int, numerics: Numerics) -> tuple[float, Any, Any]:
    spec = TrainingSpec(
        model=model, axes={}, sequences=sequences, seq_len=seq_len, kernel="reference", attention_block=512,
        choice=Choice(remat="none"), numerics=numerics, rules=Rules().only({}),
    )  # fmt: skip
    return stepped(_comparable(TrainProgram.from_spec(spec, "any")), mesh_of())


def _comparable(program: TrainProgram) -> TrainProgram:
    """The program with no token dropped by experts, and an update that grows with the gradient."""
    return replace(
        program,
        computation=replace(program.computation, expert_capacity=None),
        optimizer=replace(program.optimizer, learning_rate=1.0, eps=1.0),
    )


def without_padding(array: jax.Array, parameter: Parameter) -> np.ndarray:
    """The array in float32 without padding. Raises ArithmeticError if padding is not zero."""
    stored = np.asarray(array, np.float32)
    true = stored
    for at, dim in enumerate(parameter.padding):
        if dim is not None:
            true = np.take(true, dim.positions, axis=at)
    if np.count_nonzero(true) != np.count_nonzero(stored):
        raise ArithmeticError(f"padding of a weight of shape {true.shape} is not zero")
    return true


def stepped(program: TrainProgram, mesh: jax.sharding.Mesh) -> tuple[float, Any, Any]:
    """The loss of one step, and float32 weights before and after it.

    Lion and Adafactor take steps of the same size for the smallest gradient: of them momenta, and roots of moments. Of
    Muon momenta and weights.
    """
    text = np.random.default_rng(0).integers(0, program.model.vocab, (program.batch, program.seq_len + 1))
    state, like = init_state(program, jax.random.key(0), mesh), abstract_batch(program, mesh)
    more = [
        (0, padded - size) for padded, size in zip(like.tokens.shape, (program.batch, program.seq_len), strict=True)
    ]
    ring = mesh.shape[SEQUENCE_AXES[0]]
    order = program.computation.context_order if ring > 1 else "contiguous"
    placed = sequence_order(like.tokens.shape[1], ring, order)
    ids = {
        name: jax.device_put(
            np.pad(part, more, constant_values=fill)[:, placed].astype(np.int32), getattr(like, name).sharding
        )
        for name, part, fill in (("tokens", text[:, :-1], 0), ("targets", text[:, 1:], -1))
    }

    described = program.described(mesh)

    def figures(state: Any) -> Any:
        match program.optimizer.name:
            case "lion":
                return jax.tree.map(without_padding, optax.tree_utils.tree_get(state.optimizer, "mu"), described)
            case "muon":
                momenta = jax.tree.map(without_padding, state.optimizer.momenta, described)
                return momenta, jax.tree.map(without_padding, state.weights, described)
            case "adafactor":
                # Of padding they are a tiny number that nothing is divided by.
                roots = jax.tree.map(lambda x: np.sqrt(np.asarray(x, np.float32)).round(12), state.optimizer.moments)
                return jax.tree.map(without_padding, roots, describe_moments(described))
        return jax.tree.map(without_padding, state.weights, described)

    before = figures(state)
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(program, program.specs(mesh)), donate_argnums=0, compiler_options=QUICKLY)
        state, metrics = jax.block_until_ready(step(state, dataclasses.replace(like, **ids)))
    return float(metrics.loss), before, figures(state)


def main() -> None:
    """Draw, run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first draw")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--refusals", action="store_true", help="run nothing: count refusals")
    parser.add_argument("--bypass", action="store_true", help="also run what is refused for one reason alone")
    chosen = parser.parse_args()
    numbers = range(chosen.start, chosen.start + chosen.count)
    if chosen.refusals:
        print(refusal_table(random_spec(chosen.seed, number, KERNELS) for number in numbers), end="")
        return
    executable, broken = 0, 0
    failing = Counter[str]()
    for drawn, number in enumerate(numbers, start=1):
        spec = random_spec(chosen.seed, number)
        reasons = refusals(spec)
        # On stderr before the step runs: XLA may end the process.
        print(f"{number}: {executable} ran, {broken} broke the promise", file=sys.stderr, flush=True)
        result = outcome(spec, bypass=chosen.bypass and len(reasons) == 1, drops=number % DROPPING == 0)
        if not reasons:
            executable += 1
            if result.failure is not None:
                broken += 1
                print(f"BROKEN {number}: {result.failure}\n  {spec}", flush=True)
        elif chosen.bypass and len(reasons) == 1:
            failing[f"{reasons[0][0]}: {'fails' if result.failure else 'RUNS'}"] += 1
            if result.failure is None:
                print(f"REFUSED {number}, but runs: {reasons[0][1]}\n  {spec}", flush=True)
        if drawn % 10 == 0:
            jax.clear_caches()
    print(
        f"{chosen.count} drawn, {executable} executable, {executable - broken} equal to one device, {broken} broke the "
        "promise"
    )
    for name, count in sorted(failing.items()):
        print(f"  {count:5d} bypassed: {name}")


if __name__ == "__main__":
    main()
