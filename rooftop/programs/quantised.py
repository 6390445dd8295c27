"""Quantised weights in programs: values of few bits, and the scales that they are multiplied by where they are used.

XLA:TPU fuses the conversion, and scales that are broadcast and not reshaped with the values, into the operand of a
matmul of one matrix: HBM is read once, in few bits. It does not do so for a batch of matrices or a ragged matmul, which
is why experts are taken one by one (``rooftop.programs.model.grouped_matmul``). Compiled for v5e and v6e with jax
0.10.2 and libtpu 0.0.42.1. XLA:TPU keeps 4-bit dtypes in half a byte; XLA:CPU takes a byte.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P, lax
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Quantised:
    """``values`` and ``scales``, whose size in the dim that a matmul sums over is 1, or the number of groups.

    Scales of groups are best in the dtype of the matmul, in which they are used.
    """

    values: jax.Array
    scales: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the weight."""
        return self.values.shape

    def of_group(self, group: Int[Array, ""]) -> Quantised:
        """The part of a weight [G, ...] of one of its G groups or experts."""
        return jax.tree.map(lambda leaf: lax.dynamic_index_in_dim(leaf, group, keepdims=False), self)

    def in_full(self, dtype: DTypeLike) -> Float[Array, "*dims"]:
        """The weight in ``dtype``."""
        values, scales = self.values, self.scales
        dims = [dim for dim in range(values.ndim) if values.shape[dim] != scales.shape[dim]]
        if not dims or scales.shape[dims[0]] == 1:
            return (values.astype(jnp.float32) * scales).astype(dtype)
        (dim,) = dims
        # In this order XLA:TPU fuses all of it into the matmul. A scale has the precision of ``dtype``.
        spread = jnp.expand_dims(scales.astype(dtype), dim + 1)
        shape = (*scales.shape[: dim + 1], values.shape[dim] // scales.shape[dim], *scales.shape[dim + 1 :])
        return values.astype(dtype) * joined(jnp.broadcast_to(spread, shape), dim)


def in_full(weight: Any, dtype: DTypeLike) -> Any:
    """A weight in ``dtype`` if it is quantised; any other as it is."""
    return weight.in_full(dtype) if isinstance(weight, Quantised) else weight


def apart(x: jax.Array, dim: int, groups: int) -> jax.Array:
    """[..., n, ...] -> [..., groups, n/groups, ...]; the dim of groups is split as n was."""
    mesh, spec = _placement(x)
    shape = (*x.shape[:dim], groups, x.shape[dim] // groups, *x.shape[dim + 1 :])
    return x.reshape(shape, out_sharding=NamedSharding(mesh, P(*spec[: dim + 1], None, *spec[dim + 1 :])))


def joined(x: jax.Array, dim: int) -> jax.Array:
    """The inverse of ``apart``."""
    mesh, spec = _placement(x)
    shape = (*x.shape[:dim], math.prod(x.shape[dim : dim + 2]), *x.shape[dim + 2 :])
    return x.reshape(shape, out_sharding=NamedSharding(mesh, P(*spec[: dim + 1], *spec[dim + 2 :])))


def _placement(x: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    """The mesh, and an entry of the spec for each dim."""
    sharding = jax.typeof(x).sharding
    partitions: tuple[Any, ...] = sharding.spec.partitions
    return sharding.mesh, (*partitions, *(None,) * (x.ndim - len(partitions)))
