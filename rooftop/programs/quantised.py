"""Weights in int8 with a scale for each output channel: half the bytes of bfloat16 for a step to read.

The channels of a weight are its dims but the one that a matmul sums over, so that scales could as well multiply the
output. They are multiplied into the weight where it is used; XLA fuses that into the matmul's operand on TPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from rooftop.programs.parameters import Parameter


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Quantised:
    """Int8 ``values`` and float32 ``scales``, of size 1 in the dim that matmuls sum over."""

    values: jax.Array
    scales: jax.Array


def summed_dim(parameter: Parameter) -> int | None:
    """The dim of a stacked weight [n, ...] that its matmul sums over; None for what stays as it is.

    That are norms, biases and sinks, tables, which are looked up, and routers, which are small and decide much.
    """
    dims = parameter.dims
    if parameter.fan_in is None or len(dims) < 3 or (len(dims) == 3 and dims[-1] is None and dims[1] == "embed"):
        return None
    return 2 if dims[1] == "expert" else 1


def quantise(weight: jax.Array, dim: int) -> Quantised:
    """Int8 by the largest magnitude along ``dim``, rounded to the nearest."""
    wide = weight.astype(jnp.float32)
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=dim, keepdims=True), 1e-30) / 127
    return Quantised(values=jnp.round(wide / scales).astype(jnp.int8), scales=scales)


def in_full(weights: Any, dtype: jnp.dtype) -> Any:
    """A tree of weights with each ``Quantised`` one as an array of ``dtype``."""

    def array(leaf: Any) -> Any:
        if isinstance(leaf, Quantised):
            return (leaf.values.astype(jnp.float32) * leaf.scales).astype(dtype)
        return leaf

    return jax.tree.map(array, weights, is_leaf=lambda leaf: isinstance(leaf, Quantised))
