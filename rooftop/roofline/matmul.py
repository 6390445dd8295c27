"""Matmuls as bytes and FLOPs (chapter 1 and 4), sharded or not."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from rooftop.arrays.notation import ShardedArray
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Number
from rooftop.core.quantities import dtype_bytes


def flops(m: Number, k: Number, n: Number) -> Number:
    """FLOPs of [m, k] x [k, n]: a multiplication and an addition each."""
    return 2 * m * k * n


def intensity(m: Number, k: Number, n: Number, *, dtype: str = "bf16") -> Number:
    """FLOPs per byte of [m, k] x [k, n], both operands read and the result written once in ``dtype``."""
    return flops(m, k, n) / ((m * k + k * n + m * n) * dtype_bytes(dtype))


def device_flops(a: ShardedArray, b: ShardedArray, dims: Mapping[str, int], mesh: Mapping[str, int]) -> float:
    """FLOPs of one device in the local matmul of ``a`` and ``b``: dims of the same name are contracted.

    The shards must agree on the dims that they share. Source: chapter 4.
    """
    left = dict(zip(a.dims, a.local_shape(dims, mesh), strict=True))
    right = dict(zip(b.dims, b.local_shape(dims, mesh), strict=True))
    for dim in left.keys() & right.keys():
        if left[dim] != right[dim]:
            raise RooftopError(f"dim {dim}", f"{a} x {b}", "the same sharding of a contracted dim on both sides")
    return 2.0 * prod((left | right).values())


def attainable(intensity: Number, flops_per_s: float, bytes_per_s: float) -> Number:
    """FLOP/s that an algorithm of so many FLOPs per byte can reach: the roofline, min(C, W x intensity) (chapter 1)."""
    reached: Number = np.minimum(flops_per_s, bytes_per_s * intensity)
    return reached
