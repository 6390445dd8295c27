"""Matmuls as bytes and FLOPs (chapter 1 and 4), sharded or not."""

from __future__ import annotations

import numpy as np

from rooftop.core.ledger import Number
from rooftop.core.quantities import dtype_bytes


def flops(m: Number, k: Number, n: Number) -> Number:
    """FLOPs of [m, k] x [k, n]: a multiplication and an addition each."""
    return 2 * m * k * n


def intensity(m: Number, k: Number, n: Number, *, dtype: str = "bf16") -> Number:
    """FLOPs per byte of [m, k] x [k, n], both operands read and the result written once in ``dtype``."""
    return flops(m, k, n) / ((m * k + k * n + m * n) * dtype_bytes(dtype))


def attainable(intensity: Number, flops_per_s: float, bytes_per_s: float) -> Number:
    """FLOP/s that an algorithm of so many FLOPs per byte can reach: the roofline, min(C, W x intensity) (chapter 1)."""
    reached: Number = np.minimum(flops_per_s, bytes_per_s * intensity)
    return reached
