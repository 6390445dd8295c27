"""Quantised weights, with scales for their output channels: a step reads fewer bytes.

The channels of a weight are all dims except the one that a matmul sums over, so that scales could multiply the output
instead. In int4 each group of summed elements of a channel has its own scale. Weights are multiplied by their scales
where they are used; on TPU XLA fuses that into the matmul's operand.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import P
from jax.sharding import NamedSharding
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rooftop.core.errors import RooftopError, unknown
from rooftop.programs.parameters import Parameter
from rooftop.programs.serving.formats import FORMATS


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Quantised:
    """``values`` and float32 ``scales``, whose size in the summed dim is 1, or the number of groups.

    Values of 4 bits are stored as pairs, uint8, half as many in that dim: JAX's own int4 uses a byte per element on a
    CPU.
    """

    values: jax.Array
    scales: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Turned:
    """A weight [D, ...] stored as ``values`` [..., D]: see ``rooftop.programs.model.operations``."""

    values: jax.Array

    @classmethod
    def of(cls, weight: Float[Array, " D *rest"]) -> Turned:
        """A copy of ``weight``."""
        return cls(values=jnp.moveaxis(weight, 0, -1))


def summed_dim(parameter: Parameter) -> int | None:
    """The dim of a stacked weight [n, ...] that its matmul sums over; None for weights that are not quantised.

    These are norms, biases and sinks; tables, which are looked up; and routers, which are small and sensitive.
    """
    dims = parameter.dims
    if parameter.fan_in is None or len(dims) < 3 or (len(dims) == 3 and dims[-1] is None and dims[1] == "embed"):
        return None
    return 2 if dims[1] == "expert" else 1


def require_format(name: str, parameter: Parameter, shard: tuple[int, ...]) -> None:
    """Raise RooftopError for an unknown format, or if its groups do not divide a device's part of the weight.

    ``shard`` is the shape of that part.
    """
    if name not in FORMATS:
        raise unknown("weights", name, FORMATS)
    dim, group = summed_dim(parameter), FORMATS[name].group
    if dim is not None and group is not None and shard[dim] % group:
        raise RooftopError("weights", name, f"groups that divide the {shard[dim]} elements that a device sums over")


def quantise(weight: Float[Array, "*dims"], dim: int, name: str) -> Quantised:
    """Scale by the largest magnitude along ``dim``, or along each group of it, and round to the nearest value."""
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


def scaled_by(weight: Float[Array, "*dims"], scales: Float[Array, "*scales"]) -> Quantised:
    """FP8 values of a weight that is their product with ``scales``, rounded: rounding to FP8 finds the values again."""
    values = jnp.where(scales == 0, 0, weight.astype(jnp.float32) / scales)
    return Quantised(values=values.astype(FORMATS["f8_e4m3"].dtype), scales=scales)


def in_full(weights: Any, dtype: DTypeLike) -> Any:
    """A tree of weights with each ``Quantised`` one in ``dtype``, and each ``Turned`` one in its original order."""

    def array(leaf: Any) -> Any:
        if isinstance(leaf, Turned):
            return jnp.moveaxis(leaf.values, -1, 0)
        if not isinstance(leaf, Quantised):
            return leaf
        values, scales = leaf.values, leaf.scales
        if values.dtype != jnp.uint8:
            return (values.astype(jnp.float32) * scales).astype(dtype)
        (dim,) = (dim for dim in range(values.ndim) if values.shape[dim] != scales.shape[dim])
        pairs, scales = (_apart(x, dim, leaf.scales.shape[dim]) for x in (values, scales))
        signed = jnp.concatenate([(pairs << 4).astype(jnp.int8) >> 4, pairs.astype(jnp.int8) >> 4], axis=dim + 1)
        return _together(signed.astype(jnp.float32) * scales, dim).astype(dtype)

    return jax.tree.map(array, weights, is_leaf=lambda leaf: isinstance(leaf, Quantised | Turned))


def _apart(x: jax.Array, dim: int, groups: int) -> jax.Array:
    """[..., n, ...] -> [..., groups, n/groups, ...]; the dim of groups is split as n was."""
    mesh, spec = _placement(x)
    shape = (*x.shape[:dim], groups, x.shape[dim] // groups, *x.shape[dim + 1 :])
    return x.reshape(shape, out_sharding=NamedSharding(mesh, P(*spec[: dim + 1], None, *spec[dim + 1 :])))


def _together(x: jax.Array, dim: int) -> jax.Array:
    """The inverse of ``_apart``."""
    mesh, spec = _placement(x)
    shape = (*x.shape[:dim], math.prod(x.shape[dim : dim + 2]), *x.shape[dim + 2 :])
    return x.reshape(shape, out_sharding=NamedSharding(mesh, P(*spec[: dim + 1], *spec[dim + 2 :])))


def _placement(x: jax.Array) -> tuple[Any, tuple[Any, ...]]:
    """The mesh, and an entry of the spec for each dim."""
    sharding = jax.typeof(x).sharding
    partitions: tuple[Any, ...] = sharding.spec.partitions
    return sharding.mesh, (*partitions, *(None,) * (x.ndim - len(partitions)))
