"""Recurrent mixers, in place of attention or beside it."""

from __future__ import annotations

from functools import partial

from rooftop.arrays.rules import SEQUENCE_AXES
from rooftop.core.ledger import Number
from rooftop.core.scopes import Phase
from rooftop.models.mixers import STATE_BYTES, Recurrence
from rooftop.plan.pricing import Transfer, Work
from rooftop.plan.shapes import MixerMatmuls
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.work.elements import norm
from rooftop.plan.training.work.matmuls.block import MatmulBlock
from rooftop.plan.training.work.matmuls.work import matmul_work


def mixer_work(step: TrainingStep, kind: Recurrence, shapes: MixerMatmuls, count: Number) -> list[Work]:
    """A recurrent mixer: its projections, and its recurrence in chunks (``rooftop.models.mixers``)."""
    recomputed, tokens, element = step.strategies.recomputed, step.tokens, step.element_bytes
    stream = tokens * step.model.d_model * element
    width = sum((shape.n for shape in shapes.into), 0.0) + sum((shape.k for shape in shapes.out), 0.0)
    flops = kind.chunked_flops / step.tensor * tokens
    # With a context axis, the state after a device's part of a sequence goes on to the device of the next part.
    sequences = tokens * step.strategies.devices(*SEQUENCE_AXES) / step.positions
    state = Transfer("permute", SEQUENCE_AXES, kind.state / step.tensor * STATE_BYTES * sequences, "tensor")

    def core(phase: Phase, passes: float, factor: Number = 1.0) -> Work:
        return Work(
            scope="layers/attn/core", phase=phase, count=count * factor, flops={step.numerics.compute: passes * flops},
            matmul_s=passes * flops / step.rates.flops_per_s[step.numerics.compute],
            hbm_bytes=passes * tokens * width * element, collectives=(state,),
            formula="T tokens through the recurrence in chunks, and through the convolution before it",
        )  # fmt: skip

    again = recomputed("attn_core")
    block = partial(MatmulBlock, count=count, tokens=tokens)
    into = block(scope="layers/attn/qkv", shapes=shapes.into, gathered=stream, again=recomputed("qkv"))
    inside = block(scope="layers/attn/core", shapes=shapes.inside, again=again)
    out = block(scope="layers/attn/out", shapes=shapes.out, scattered=stream, again=0.0, residual=True)
    return [
        *([] if kind.beside_attention else norm(step, "layers/attn/norm", count, recomputed("attn_normed"))),
        *matmul_work(step, into),
        *matmul_work(step, inside),
        core("forward", 1.0),
        core("recompute", 1.0, again),
        core("backward", 2.0),
        *matmul_work(step, out),
    ]
