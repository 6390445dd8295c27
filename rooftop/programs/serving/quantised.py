"""Weights in fewer bits, with scales for their output channels: fewer bytes for a step to read.

The channels of a weight are its dims but the one that a matmul sums over, so that scales could as well multiply the
output; in int4 each group of so many summed elements of a channel has a scale of its own. Scales are multiplied into
the weight where it is used; XLA fuses that into the matmul's operand on TPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import NamedSharding

from rooftop.core.errors import RooftopError, unknown
from rooftop.programs.parameters import Parameter
from rooftop.programs.serving.formats import FORMATS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Quantised:
    """``values`` and float32 ``scales``, which have a size of 1 or of groups in the dim that matmuls sum over.

    Values of 4 bits are pairs, uint8, half as many in that dim. JAX's own int4 takes a byte of a CPU's memory.
    """

    values: jax.Array
    scales: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Turned:
    """A weight [D, ...] as it is, that lies as ``values`` [..., D]: see ``rooftop.programs.model.projection``."""

    values: jax.Array

    @classmethod
    def of(cls, weight: jax.Array) -> Turned:
        """The ``weight`` [D, ...], copied."""
        return cls(values=jnp.moveaxis(weight, 0, -1))


def summed_dim(parameter: Parameter) -> int | None:
    """The dim of a stacked weight [n, ...] that its matmul sums over; None for what stays as it is.

    That are norms, biases and sinks, tables, which are looked up, and routers, which are small and decide much.
    """
    dims = parameter.dims
    if parameter.fan_in is None or len(dims) < 3 or (len(dims) == 3 and dims[-1] is None and dims[1] == "embed"):
        return None
    return 2 if dims[1] == "expert" else 1


def require_format(name: str, parameter: Parameter, shard: tuple[int, ...]) -> None:
    """Raises RooftopError for an unknown format, and where its groups do not divide a device's part of the weight.

    ``shard`` is the shape of that part.
    """
    if name not in FORMATS:
        raise unknown("weights", name, FORMATS)
    dim, group = summed_dim(parameter), FORMATS[name].group
    if dim is not None and group is not None and shard[dim] % group:
        raise RooftopError("weights", name, f"groups that divide the {shard[dim]} elements that a device sums over")


def quantise(weight: jax.Array, dim: int, name: str) -> Quantised:
    """By the largest magnitude along ``dim``, or along each group of it, rounded to the nearest."""
    format_ = FORMATS[name]
    wide = weight.astype(jnp.float32)
    if format_.group is not None:
        wide = _apart(wide, dim, weight.shape[dim] // format_.group)
    along = dim if format_.group is None else dim + 1
    scales = jnp.maximum(jnp.max(jnp.abs(wide), axis=along, keepdims=True), 1e-30) / format_.largest
    values = wide / scales
    if jnp.issubdtype(jnp.dtype(format_.dtype), jnp.integer):
        values = jnp.round(values)
    values = values.astype(format_.dtype)
    if format_.group is None:
        return Quantised(values=values, scales=scales)
    low, high = jnp.split(values, 2, axis=along)
    pairs = ((low & 15) | (high << 4)).astype(jnp.uint8)
    return Quantised(values=_together(pairs, dim), scales=_together(scales, dim))


def in_full(weights: Any, dtype: jnp.dtype) -> Any:
    """A tree of weights with each ``Quantised`` one as an array of ``dtype``, and each ``Turned`` one as it was."""

    def array(leaf: Any) -> Any:
        if isinstance(leaf, Turned):
            return jnp.moveaxis(leaf.values, -1, 0)
        if not isinstance(leaf, Quantised):
            return leaf
        values, scales = leaf.values, leaf.scales
        if values.dtype != jnp.uint8:
            return (values.astype(jnp.float32) * scales).astype(dtype)
        (dim,) = (dim for dim in range(values.ndim) if values.shape[dim] != scales.shape[dim])
        pairs, scales = (_apart(each, dim, leaf.scales.shape[dim]) for each in (values, scales))
        signed = jnp.concatenate([(pairs << 4).astype(jnp.int8) >> 4, pairs.astype(jnp.int8) >> 4], axis=dim + 1)
        return _together(signed.astype(jnp.float32) * scales, dim).astype(dtype)

    return jax.tree.map(array, weights, is_leaf=lambda leaf: isinstance(leaf, Quantised | Turned))


def _apart(x: jax.Array, dim: int, groups: int) -> jax.Array:
    """[..., n, ...] -> [..., groups, n/groups, ...]: the groups are split as n was."""
    mesh, spec = _placement(x)
    shape = (*x.shape[:dim], groups, x.shape[dim] // groups, *x.shape[dim + 1 :])
    return x.reshape(shape, out_sharding=NamedSharding(mesh, P(*spec[: dim + 1], None, *spec[dim + 1 :])))


def _together(x: jax.Array, dim: int) -> jax.Array:
    """The reverse."""
    mesh, spec = _placement(x)
    shape = (*x.shape[:dim], math.prod(x.shape[dim : dim + 2]), *x.shape[dim + 2 :])
    return x.reshape(shape, out_sharding=NamedSharding(mesh, P(*spec[: dim + 1], *spec[dim + 2 :])))


def _placement(x: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    """The mesh, and an entry of the spec for each dim."""
    sharding = jax.typeof(x).sharding
    partitions: tuple[Any, ...] = sharding.spec.partitions
    return sharding.mesh, (*partitions, *(None,) * (x.ndim - len(partitions)))
