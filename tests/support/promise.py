"""Random train steps that a table of capabilities says run, or do not, and what becomes of them.

    python -m tests.support.promise --count 500 --seed 0

Draws so many specs, builds, compiles and runs one step of those without obstacles on emulated devices, compares each
with one device, and prints how many ran and how many were refused for which reason. With ``--bypass`` those that are
refused run as well: the table says of each property how many of them fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
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
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

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
from rooftop.capabilities import CONTEXT_CHUNKS, OPTIMIZERS, STATE_DTYPES, TRAINING, TrainingSpec, obstacles
from rooftop.models import MLA, ModelConfig, MoE
from rooftop.models.activations import POLICIES
from rooftop.programs.attention.context import sequence_order
from rooftop.programs.parameters import Parameter
from rooftop.programs.training import program as program_module
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import abstract_batch, init_state, train_step
from rooftop.scheduling.pipeline import SCHEDULES
from tests.support.curves import mesh_of

#: Largest error of the loss, and of an updated array relative to its largest change, by whether all is in float32.
TOLERANCE = {True: (2e-5, 2e-3), False: (3e-2, 0.2)}
#: Kernels that run on a CPU.
KERNELS = ("reference", "chunked")


@st.composite
def models(draw: st.DrawFn, axes: dict[str, int], chunks: int) -> ModelConfig:
    """Models whose sizes divide over ``axes``."""
    tensor, stages = ways(axes, *COLUMN_AXES), ways(axes, *STAGE_AXES) * chunks
    latent = draw(st.integers(0, 4)) == 0
    experts = ways(axes, *EXPERT_AXES) > 1 or draw(st.integers(0, 2)) == 0
    heads = draw(st.sampled_from([n for n in (4, 8) if n % tensor == 0] or [tensor]))
    kv_heads = heads if latent else draw(st.sampled_from([n for n in (tensor, 2 * tensor, heads) if heads % n == 0]))
    layers = stages * draw(st.integers(1, 2 if stages < 4 else 1))
    alone = draw(st.integers(0, 1)) if experts and layers < 4 else 0
    moe = None
    if experts:
        groups = draw(st.sampled_from((1, 2)))
        moe = MoE(
            experts=8,
            active=draw(st.integers(1, 3)),
            d_ff=draw(st.sampled_from((8, 16))),
            shared_d_ff=draw(st.sampled_from((0, 8, 16))),
            dense_layers=alone,
            bias=draw(st.booleans()),
            scoring=draw(st.sampled_from(("softmax", "sigmoid"))),
            normalise=draw(st.booleans()),
            groups=groups,
            active_groups=groups,
            correction_bias=draw(st.booleans()),
        )
    mla = None
    if latent:
        mla = MLA(
            q_rank=draw(st.sampled_from((None, 8, 16))),
            kv_rank=8,
            d_nope=4,
            d_rope=4,
            d_v=draw(st.sampled_from((4, 8))),
        )
    layers += alone
    pattern = draw(st.sampled_from(((None,), (None,), (5,), (None, 5), (3, None))))
    windows = tuple(pattern[at % len(pattern)] for at in range(layers))
    plain = not latent
    learned = plain and draw(st.integers(0, 4)) == 0
    gated = draw(st.integers(0, 3)) > 0
    return ModelConfig(
        name="drawn",
        family="llama",
        layers=layers,
        d_model=draw(st.sampled_from((16, 24, 32))),
        d_ff=draw(st.sampled_from((16, 24))),
        heads=heads,
        kv_heads=kv_heads,
        d_head=8,
        vocab=draw(st.sampled_from((32, 64))),
        max_seq_len=64,
        mlp_matrices=3 if gated else 2,
        activation=draw(st.sampled_from(("silu", "gelu_tanh"))),
        tied_embeddings=draw(st.booleans()),
        qkv_bias=plain and draw(st.booleans()),
        attn_out_bias=plain and draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        norm=draw(st.sampled_from(("rms", "rms", "layer"))),
        norms_per_layer=draw(st.sampled_from((2, 2, 4))),
        qk_norm=plain and draw(st.booleans()),
        attention_sinks=plain and draw(st.integers(0, 3)) == 0,
        attn_softcap=draw(st.sampled_from((None, None, 20.0))),
        final_softcap=draw(st.sampled_from((None, None, 10.0))),
        layer_windows=windows,
        positions="learned" if learned else "rope",
        moe=moe,
        mla=mla,
    )


@st.composite
def meshes(draw: st.DrawFn) -> dict[str, int]:
    """Axes of up to eight devices: every factor of their number lies on an axis of its own choice."""
    axes = dict.fromkeys(AXES, 1)
    for factor in draw(st.sampled_from(((2, 2, 2), (2, 2, 2), (2, 2, 2), (2, 2), (2,), (3, 2), (3,), (5,), (7,), ()))):
        axes[draw(st.sampled_from(AXES))] *= factor
    return axes


@st.composite
def specs(draw: st.DrawFn) -> TrainingSpec:
    """Train steps on up to eight devices: half of them with a size that an axis may not divide."""
    axes = draw(meshes())
    schedule = draw(st.sampled_from(tuple(SCHEDULES))) if ways(axes, *STAGE_AXES) > 1 else "1f1b"
    chunks = draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    model = draw(models(axes, chunks))
    microbatches = draw(st.sampled_from((1, 2, 4)))
    spread, pieces = ways(axes, *BATCH_AXES), ways(axes, *RESIDUAL_AXES)
    ring = CONTEXT_CHUNKS * ways(axes, *SEQUENCE_AXES)
    sizes = {
        "sequences": spread * microbatches * draw(st.integers(1, 2)),
        "seq_len": int(np.lcm(pieces, ring)) * draw(st.integers(1, 2)),
    }
    # XLA's compiler for CPUs ends the process on some sums of bf16 over devices (its pass AllReducePromotion), so what
    # is sent is float32; tests of single programs have bf16 there.
    dtypes = {"compute": "f32", "gradients": "f32"}
    dtypes |= {name: draw(st.sampled_from(("f32", *STATE_DTYPES))) for name in ("weights", "moments")}
    if draw(st.booleans()):
        odd = draw(st.sampled_from(("sequences", "seq_len", "layers", "d_model", "d_ff", "heads", "vocab", "experts")))
        if odd in sizes:
            sizes[odd] = draw(st.integers(1, 2 * sizes[odd] + 1))
        else:
            model = draw(_odd(model, odd))
    return TrainingSpec(
        model=model,
        axes=axes,
        **sizes,
        kernel=draw(st.sampled_from(KERNELS)),
        attention_block=draw(st.sampled_from((4, 8, 512))),
        microbatches=microbatches,
        remat=draw(st.sampled_from((*POLICIES, "block,qkv=offload", "full,mlp_up=save"))),
        schedule=schedule,
        chunks=chunks,
        optimizer=draw(st.sampled_from(tuple(OPTIMIZERS))),
        matmul=dtypes["compute"] if draw(st.integers(0, 19)) else "int8",
        **dtypes,
        rules=Rules().only({axis: size for axis, size in axes.items() if size > 1}),
    )


@st.composite
def _odd(draw: st.DrawFn, model: ModelConfig, name: str) -> ModelConfig:
    """The model with another size of one dim."""
    if name == "experts":
        if model.moe is None:
            return replace(model, d_ff=draw(st.integers(5, 30)))
        moe = replace(
            model.moe, experts=draw(st.integers(4, 9)), d_ff=draw(st.integers(5, 17)), groups=1, active_groups=1
        )
        return replace(model, moe=moe)
    if name == "heads":
        heads = draw(st.integers(1, 9))
        kv_heads = heads if model.mla else draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
        return replace(model, heads=heads, kv_heads=kv_heads)
    if name == "layers":
        least = 1 if model.moe is None else model.moe.dense_layers + 1
        return replace(model, layers=draw(st.integers(least, 7)), layer_windows=())
    return replace(model, **{name: draw(st.integers(9, 40))})


@dataclass(frozen=True)
class Outcome:
    """Outcome of a spec: the properties that refuse it, or the reason why its step is not that of one device."""

    refused: tuple[str, ...] = ()
    failure: str | None = None


def outcome(spec: TrainingSpec, *, bypass: bool = False) -> Outcome:
    """Build, compile and run a spec without obstacles, or any if the check is to be bypassed."""
    refused = tuple(item.name for item in TRAINING if item.obstacle(spec) is not None)
    if refused and not bypass:
        return Outcome(refused)
    try:
        with mock.patch.object(program_module, "require") if refused else nullcontext():
            program = TrainProgram.from_spec(spec, "any")
        return Outcome(refused, difference(program, spec))
    except Exception as error:  # Whatever a program raises breaks the promise.
        return Outcome(refused, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}")


def difference(program: TrainProgram, spec: TrainingSpec) -> str | None:
    """The difference between a step of the program on its mesh and one of a plain program on one device, if any."""
    mesh = mesh_of(**spec.axes)
    moe = spec.model.moe is not None
    if moe and not np.isfinite(stepped(program, mesh)[0]):
        return "the loss is not finite where experts drop tokens"
    loss, before, after = stepped(_comparable(program), mesh)
    expected_loss, _, expected = _one_device(
        spec.model, spec.sequences, spec.seq_len, spec.optimizer, spec.weights, spec.moments
    )
    exact = {spec.compute, spec.weights, spec.moments, spec.gradients} == {"f32"}
    of_loss, of_weights = TOLERANCE[exact]
    if not abs(loss - expected_loss) <= of_loss * abs(expected_loss):
        return f"a loss of {loss}, not {expected_loss}"
    if moe and not exact:
        # Rounded scores choose other experts now and then.
        return None
    for path, ours, theirs, old in zip(
        jax.tree_util.tree_leaves_with_path(after),
        jax.tree.leaves(after),
        jax.tree.leaves(expected),
        jax.tree.leaves(before),
        strict=True,
    ):
        if ours.shape != theirs.shape:
            return f"{jax.tree_util.keystr(path[0])} of shape {ours.shape}, not {theirs.shape}"
        error = np.abs(ours - theirs).max() / max(np.abs(theirs - old).max(), 1e-3)
        if not error <= of_weights:
            return f"{jax.tree_util.keystr(path[0])} differs by {error:.2g} of its largest change"
    return None


@lru_cache(maxsize=64)
def _one_device(
    model: ModelConfig, sequences: int, seq_len: int, optimizer: str, weights: str, moments: str
) -> tuple[float, Any, Any]:
    spec = TrainingSpec(
        model=model, axes={}, sequences=sequences, seq_len=seq_len, kernel="reference", attention_block=512,
        remat="none", optimizer=optimizer, compute="f32", matmul="f32", weights=weights, moments=moments,
        gradients="f32", rules=Rules().only({}),
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
    """The loss of one step, and float32 weights before and after it (of Lion, whose steps are signs, momenta)."""
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
        weights = (
            optax.tree_utils.tree_get(state.optimizer, "mu") if program.optimizer.name == "lion" else state.weights
        )
        return jax.tree.map(without_padding, weights, described)

    before = figures(state)
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(program, program.specs(mesh)), donate_argnums=0, compiler_options=QUICKLY)
        state, metrics = jax.block_until_ready(step(state, dataclasses.replace(like, **ids)))
    return float(metrics.loss), before, figures(state)


def main() -> None:
    """Draw, run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bypass", action="store_true", help="also run what is refused for one reason alone")
    chosen = parser.parse_args()
    ran, broken, drawn = 0, 0, 0
    refused, failing = Counter[str](), Counter[str]()

    @seed(chosen.seed)
    @settings(
        max_examples=chosen.count, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(specs())
    def run(spec: TrainingSpec) -> None:
        nonlocal ran, broken, drawn
        drawn += 1
        if drawn % 10 == 0:
            jax.clear_caches()
            print(f"{drawn} drawn, {ran} ran, {broken} broke the promise", file=sys.stderr, flush=True)
        reasons = list(obstacles(TRAINING, spec))
        result = outcome(spec, bypass=chosen.bypass and len(reasons) == 1)
        refused.update(result.refused)
        if not result.refused:
            ran += 1
            if result.failure is not None:
                broken += 1
                print(f"BROKEN {result.failure}\n  {spec}", flush=True)
        elif chosen.bypass and len(result.refused) == 1:
            failing[f"{result.refused[0]}: {'fails' if result.failure else 'RUNS'}"] += 1
            if result.failure is None:
                print(f"REFUSED, but runs: {reasons[0]}\n  {spec}", flush=True)

    run()
    print(f"{drawn} drawn, {ran} ran, {broken} broke the promise")
    for name, count in refused.most_common():
        print(f"  {count:5d} refused for: {name}")
    for name, count in sorted(failing.items()):
        print(f"  {count:5d} bypassed: {name}")


if __name__ == "__main__":
    main()
