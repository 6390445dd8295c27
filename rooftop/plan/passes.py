"""The passes of one piece of work of a training step: forward, again where it is recomputed, and backward.

Chapter 4 of the book for FLOPs and bytes, chapter 5 for the collectives that each pass of a matmul brings with it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rooftop.ledger import Number
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.shapes import Matmul, parameters
from rooftop.quantities import dtype_bytes

if TYPE_CHECKING:
    from rooftop.plan.training import TrainingStep

#: HBM passes (a read or a write) of elementwise work that XLA:TPU does not fuse into matmuls, in one forward execution;
#: the backward pass has twice as many. Together 18 D + 38 (N + K) H bytes per token and layer in bf16, as counted in
#: compiled layers (docs/achievable.md): norms, and around attention the rotation, transposes and log-sum-exps. Gates
#: and residual sums are fused, and paid in the matmuls' fraction of peak.
_NORM_PASSES = 1.5
ROPE_PASSES = 38 / 6

#: Vector operations per element: RMSNorm, rotation, gate times activation, residual add, softmax with loss, AdamW.
VECTOR_OPS = {"norm": 4, "rope": 4, "act": 5, "add": 1, "loss": 6, "update": 14}


def matmuls(
    step: TrainingStep,
    scope: str,
    count: Number,
    each: Sequence[Matmul],
    tokens: Number,
    *,
    again: Number,
    gathered: Number | None = None,
    scattered: Number | None = None,
    residual: bool = False,
    copies: tuple[str, ...] = ("expert", "context"),
) -> list[Work]:
    """Forward, recompute and backward of ``each`` matmul of those that share an input or feed one output.

    ``gathered`` is the bytes of the input once gathered over tensor, ``scattered`` those of the partial sums that
    are scattered over it; ``again`` is 1 where the forward pass is recomputed; ``residual`` adds the sum into the
    residual stream. ``copies`` are the axes besides data that have copies of the weights: in pipeline stages their
    gradients are summed at once, elsewhere once a step.
    """
    if not each:
        return []
    element = step.element_bytes
    dtype = step.numerics.matmul if scope.startswith("layers") else step.numerics.compute
    operand = min(element, dtype_bytes(dtype))
    weights = parameters(each)
    inputs = sum((tokens * m.k for m in each), 0.0)
    outputs = sum((tokens * m.n for m in each), 0.0)
    flops = 2.0 * sum((tokens * m.parameters for m in each), 0.0)
    moved = (inputs + weights) * operand + outputs * element
    # A narrower dtype is made on the spot: each operand read for its scale, read again and written.
    passes = 2 * element + operand if operand < element else 0.0
    quantised = (inputs + weights) * passes
    quantised_again = (inputs + 2 * outputs + weights) * passes
    stream = tokens * step.model.d_model * element / step.tensor
    weights = weights * element

    forward_s = sum((step.rates.matmul_s(tokens, m.k, m.n, dtype) for m in each), 0.0)
    dx_s = sum((step.rates.matmul_s(tokens, m.n, m.k, dtype) for m in each), 0.0)
    dw_s = sum((step.rates.matmul_s(m.k, tokens, m.n, dtype) for m in each), 0.0)
    gather_weight = (Transfer("all_gather", ("fsdp",), weights, "weight_gather"),)
    scatter_weight: tuple[Transfer, ...] = (Transfer("reduce_scatter", ("fsdp",), weights, "gradient_scatter"),)
    if np.any(step.staged):
        own = weights / step.strategies.devices("fsdp")
        scatter_weight += (Transfer("all_reduce", copies, own, "gradient_scatter", step.staged),)
    gather_input = () if gathered is None else (Transfer("all_gather", ("tensor",), gathered, "tensor"),)
    scatter_output = () if scattered is None else (Transfer("reduce_scatter", ("tensor",), scattered, "tensor"),)
    gather_output = () if scattered is None else (Transfer("all_gather", ("tensor",), scattered, "tensor"),)
    scatter_input = () if gathered is None else (Transfer("reduce_scatter", ("tensor",), gathered, "tensor"),)
    shapes = " + ".join("2 T k n" for _ in each)
    once = scope == "unembed"  # Outside the layers nothing is recomputed and the gathered weight is still there.
    forward = Work(
        scope=scope, phase="forward", count=count, flops={dtype: flops}, matmul_s=forward_s,
        hbm_bytes=moved, elementwise_bytes=quantised,
        vector_flops=VECTOR_OPS["add"] * stream / element if residual else 0.0,
        collectives=gather_weight + gather_input + scatter_output, formula=shapes,
    )  # fmt: skip
    backward = Work(
        scope=scope, phase="backward", count=count, flops={dtype: 2 * flops},
        matmul_s=dx_s + dw_s, hbm_bytes=2 * moved, elementwise_bytes=quantised_again,
        collectives=scatter_weight + gather_output + scatter_input, formula=f"dX and dW: 2 x ({shapes})",
    )  # fmt: skip
    # In the backward pass weights, and inputs that are kept as shards, are gathered whether or not the matmul is
    # repeated; the matmul and its scattered output only if its result was not kept.
    regather = Work(
        scope=scope, phase="recompute", count=0 if once else count,
        flops={dtype: flops * again}, matmul_s=forward_s * again,
        hbm_bytes=moved * again, elementwise_bytes=quantised * again,
        collectives=gather_weight + gather_input + tuple(replace(t, payload=t.payload * again) for t in scatter_output),
        formula="weights and inputs gathered again; the matmul repeated where its output was not kept",
    )  # fmt: skip
    return [forward, backward] if once else [forward, regather, backward]


def norm(step: TrainingStep, scope: str, count: Number, again: Number) -> list[Work]:
    """A layer's norms of one scope, or the final one, on the residual stream; ``again`` 1 where they are recomputed."""
    stream = step.tokens * step.model.d_model * step.element_bytes / step.tensor
    times = step.model.norms_per_layer / 2 if scope.startswith("layers") else 1.0
    forward = Work(
        scope=scope, phase="forward", count=count, hbm_bytes=_NORM_PASSES * stream * times,
        vector_flops=VECTOR_OPS["norm"] * times * stream / step.element_bytes,
        formula="T D read, partly fused into what reads it: 1.5 passes",
    )  # fmt: skip
    return [forward, recompute(forward, again), backward(forward, 2.0)]


def activation(step: TrainingStep, scope: str, count: Number, hidden: Number) -> list[Work]:
    """Vector work on T F elements; its traffic is that of the matmuls that it is fused into."""
    forward = Work(
        scope=scope, phase="forward", count=count, vector_flops=VECTOR_OPS["act"] * hidden,
        formula="T F elements, fused into the matmuls around them",
    )  # fmt: skip
    return [forward, recompute(forward, step.strategies.recomputed("mlp_act")), backward(forward, 2.0)]


def offloads(step: TrainingStep, count: Number, made: Mapping[str, str], *, moe_layer: bool) -> list[Work]:
    """Offloaded checkpoints of a layer on their way to host memory, and back for the backward pass."""
    own = step.tokens / step.tensor * step.element_bytes
    work = []
    for name, scope in made.items():
        kept = step.strategies.kept("offload", step.model, moe_layer=moe_layer, names=(name,))
        if kept.any():
            formula = f"T elements of {name} to host memory and back"
            work += [
                Work(scope=scope, phase=phase, count=count, host_bytes=kept * own, formula=formula)
                for phase in ("forward", "backward")
            ]
    return work


def recompute(work: Work, repeated: Number) -> Work:
    """Forward work repeated in the backward pass, where ``repeated`` is 1."""
    return replace(work, phase="recompute", count=work.count * repeated)


def backward(work: Work, factor: float, *, collectives: bool = True) -> Work:
    """The backward pass of elementwise or moving work: ``factor`` times the traffic, the transposed collectives."""
    return replace(
        work,
        phase="backward",
        hbm_bytes=factor * work.hbm_bytes,
        vector_flops=factor * work.vector_flops,
        collectives=work.collectives if collectives else (),
        formula=f"backward of: {work.formula}",
    )
