"""Elementwise work: norms, activations and the passes over HBM that they need.

Residual sums are in the matmuls that they are fused into, and in the passes of the norms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rooftop.arrays.rules import SEQUENCE_AXES
from rooftop.core.ledger import Number
from rooftop.plan.pricing import Work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.phases import backward, recompute

#: HBM passes (a read or a write) of elementwise work that XLA:TPU does not fuse into matmuls, in one forward execution;
#: the backward pass has twice as many. Together 18 D + 38 (N + K) H bytes per token and layer in bf16, as counted in
#: compiled layers (docs/evidence/achievable.md): norms, and around attention the rotation, transposes and log-sum-exps.
#: Gates and residual sums are fused, and paid in the matmuls' fraction of peak.
_NORM_PASSES = 1.5
_ROPE_PASSES = 38 / 6
#: Passes more where queries and keys are normalised before they are rotated: XLA writes them in float32 between, as
#: counted in the programs of Qwen3-0.6B (docs/evidence/accuracy.md).
_NORMED_HEADS_PASSES = 3.3


@dataclass(frozen=True, kw_only=True)
class ElementwisePasses:
    """HBM passes (a read or a write of bf16) of elementwise work in one execution, by scope.

    ``norm`` has the residual sum before it; ``normed_heads`` are those of rope where queries and keys are normalised
    first; ``act_more`` are those of an activation beyond one kernel that reads its
    inputs and writes its result, forward; backward there are twice as many. ``again``: an activation that is recomputed
    is a kernel of its own, not a second result of its gradient's.
    """

    norm: float
    norm_backward: float
    rope: float
    rope_backward: float
    normed_heads: float = 0.0
    act_more: float = 0.0
    again: bool = True


#: By ``Framework.kernels``. Fused kernels read their inputs and write their results once: a sum 3 passes, a norm 2, its
#: gradient 3, and 3 for the sum of two gradients; rotation 2. Eager PyTorch has a kernel for each operation, with
#: float32 between them: RMSNorm converts (3 passes), squares (4), averages (2), scales (4), converts (3) and multiplies
#: (2), about half as much again backward; rotation converts, multiplies and converts back (10); SwiGLU is two kernels.
#: XLA:GPU fuses nothing into cuBLAS's matmuls: as counted in compiled layers (docs/evidence/accuracy.md).
_ELEMENTWISE: Mapping[str | None, ElementwisePasses] = {
    None: ElementwisePasses(
        norm=_NORM_PASSES,
        norm_backward=3.0,
        rope=_ROPE_PASSES,
        rope_backward=2 * _ROPE_PASSES,
        normed_heads=_NORMED_HEADS_PASSES,
    ),
    "xla:gpu": ElementwisePasses(norm=3.5, norm_backward=5.5, rope=2.0, rope_backward=2.0, again=False),
    "fused": ElementwisePasses(norm=5.0, norm_backward=6.0, rope=2.0, rope_backward=2.0),
    "eager": ElementwisePasses(norm=21.0, norm_backward=30.0, rope=10.0, rope_backward=12.0, act_more=2.0),
}

#: Vector operations per element: RMSNorm, rotation, gate times activation, residual add, softmax with loss, AdamW.
VECTOR_OPS = {"norm": 4, "rope": 4, "act": 5, "add": 1, "loss": 6, "update": 14}


def elementwise_passes(step: TrainingStep) -> ElementwisePasses:
    """Passes of the kernels that the step's framework has."""
    xla = "xla:gpu" if step.slice.chip.kind == "gpu" else None
    return _ELEMENTWISE[step.habits.kernels or xla]


def norm(step: TrainingStep, scope: str, count: Number, again: Number) -> list[Work]:
    """A layer's norms of one scope, or the final one, on the residual stream; ``again`` 1 where they are recomputed."""
    stream = step.tokens * step.model.d_model * step.element_bytes / step.tensor
    times = step.model.norms_per_layer / 2 if scope.startswith("layers") else 1.0
    passes = elementwise_passes(step)
    forward = Work(
        scope=scope, phase="forward", count=count, hbm_bytes=passes.norm * stream * times,
        vector_flops=VECTOR_OPS["norm"] * times * stream / step.element_bytes,
        formula=f"T D read, partly fused into what reads it: {passes.norm:.2g} passes",
    )  # fmt: skip
    return [forward, recompute(forward, again), backward(forward, passes.norm_backward / passes.norm)]


def activation(
    step: TrainingStep, scope: str, count: Number, hidden: Number, *, dense: bool = False, again: Number | None = None
) -> list[Work]:
    """Vector work on T F elements; its traffic is that of the matmuls that it is fused into.

    A result of a ``dense`` layer that is kept, of several sequences, has passes of its own: its inputs are read and it
    is written; in the backward pass a copy has the layout of the gradient's matmul. A collective matmul writes its
    output piece by piece: the activation is then fused with nothing but the copy of kept inputs.
    """
    again = step.strategies.recomputed("mlp_act") if again is None else again
    if step.habits.kernels is not None or step.slice.chip.kind == "gpu":
        return _activation_kernels(step, scope, count, hidden, again=again)
    apart = dense * step.rings * hidden * step.element_bytes
    alone = apart * step.strategies.recomputed("mlp_up")
    sequences = step.tokens * step.strategies.devices(*SEQUENCE_AXES) / step.workload.seq_len
    passed = dense * (1 - again) * (sequences > 1) * hidden * step.element_bytes
    forward = Work(
        scope=scope, phase="forward", count=count, vector_flops=VECTOR_OPS["act"] * hidden,
        elementwise_bytes=step.model.mlp_matrices * (passed + alone),
        formula="T F elements, fused into the matmuls around them unless it is kept",
    )  # fmt: skip
    back = replace(backward(forward, 2.0), elementwise_bytes=2.0 * passed + (2 * step.model.mlp_matrices - 1) * apart)
    return [forward, recompute(replace(forward, elementwise_bytes=0.0), again), back]


def _activation_kernels(step: TrainingStep, scope: str, count: Number, hidden: Number, *, again: Number) -> list[Work]:
    """Vector work on T F elements in kernels of its own."""
    passes, matrices = elementwise_passes(step), step.model.mlp_matrices
    forward = Work(
        scope=scope, phase="forward", count=count, vector_flops=VECTOR_OPS["act"] * hidden,
        elementwise_bytes=(matrices + passes.act_more) * hidden * step.element_bytes,
        formula="T F elements, a kernel of its own: its inputs read, its result written",
    )  # fmt: skip
    # A kernel that gives the activation again, too, writes one array more.
    moved = (2 * matrices - passes.again + 2 * passes.act_more) * hidden * step.element_bytes
    once_more = recompute(forward if passes.again else replace(forward, elementwise_bytes=0.0), again)
    return [forward, once_more, replace(backward(forward, 2.0), elementwise_bytes=moved)]
