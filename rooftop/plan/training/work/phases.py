"""Work of the recompute and backward phases, from that of the forward pass."""

from __future__ import annotations

from dataclasses import replace

from rooftop.core.ledger import Number
from rooftop.plan.pricing import Work


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
