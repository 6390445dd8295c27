"""Elementwise work: norms, activations and the passes over HBM that they need.

Residual sums are in the matmuls that they are fused into, and in the passes of the norms.
"""

from __future__ import annotations

from dataclasses import replace

from rooftop.arrays.rules import SEQUENCE_AXES
from rooftop.core.ledger import Number
from rooftop.plan.pricing import Work
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.phases import backward, recompute

#: Vector operations per element: RMSNorm, rotation, gate times activation, residual add, softmax with loss, AdamW.
VECTOR_OPS = {"norm": 4, "rope": 4, "act": 5, "add": 1, "loss": 6, "update": 14}


def norm(step: TrainingStep, scope: str, count: Number, again: Number) -> list[Work]:
    """A layer's norms of one scope, or the final one, on the residual stream; ``again`` 1 where they are recomputed."""
    stream = step.tokens * step.model.d_model * step.element_bytes / step.tensor
    times = step.model.norms_per_layer / 2 if scope.startswith("layers") else 1.0
    passes = step.habits.passes
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
    if not step.habits.passes.fuses_act:
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
    passes, matrices = step.habits.passes, step.model.mlp_matrices
    forward = Work(
        scope=scope, phase="forward", count=count, vector_flops=VECTOR_OPS["act"] * hidden,
        elementwise_bytes=(matrices + passes.act_more) * hidden * step.element_bytes,
        formula="T F elements, a kernel of its own: its inputs read, its result written",
    )  # fmt: skip
    # A kernel that gives the activation again, too, writes one array more.
    moved = (2 * matrices - passes.act_with_gradient + 2 * passes.act_more) * hidden * step.element_bytes
    once_more = recompute(forward if passes.act_with_gradient else replace(forward, elementwise_bytes=0.0), again)
    return [forward, once_more, replace(backward(forward, 2.0), elementwise_bytes=moved)]
