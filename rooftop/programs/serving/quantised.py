"""Weights as an engine keeps them: quantised, with scales for their output channels, so that a step reads fewer bytes.

The channels of a weight are all dims except the one that a matmul sums over, so that scales could multiply the output
instead. In formats with groups, each group of summed elements of a channel has its own scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rooftop.core.errors import RooftopError, unknown
from rooftop.programs.parameters import Layer, MoEWeights, Parameter
from rooftop.programs.quantised import Quantised, apart, joined
from rooftop.programs.serving.formats import FORMATS


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

    These are norms, biases and sinks; tables, which are looked up; and routers.
    """
    if parameter.fan_in is None or parameter.plain or not parameter.stacked:
        return None
    return 2 if parameter.dims[1] == "expert" else 1


def require_format(name: str, parameter: Parameter, shard: tuple[int, ...]) -> None:
    """Raise RooftopError for an unknown format, or if its groups do not divide a device's part of the weight.

    ``shard`` is the shape of that part.
    """
    if name not in FORMATS:
        raise unknown("weights", name, FORMATS)
    dim, group = summed_dim(parameter), FORMATS[name].group
    if dim is not None and group is not None and shard[dim] % group:
        raise RooftopError("weights", name, f"groups that divide the {shard[dim]} elements that a device sums over")


def quantise(weight: Float[Array, "*dims"], dim: int, name: str, platform: str, compute: str) -> Quantised:
    """Scale by the largest magnitude along ``dim``, or along each group of it, and round to the nearest value.

    For matmuls in ``compute`` on ``platform``.
    """
    format_, sizes = FORMATS[name], jnp.abs(weight.astype(jnp.float32))
    if format_.group is None:
        largest = jnp.max(sizes, axis=dim, keepdims=True)
    else:
        largest = jnp.max(apart(sizes, dim, weight.shape[dim] // format_.group), axis=dim + 1)
    scales = jnp.maximum(largest, 1e-30) / format_.largest
    if format_.powers:
        scales = jnp.exp2(jnp.ceil(jnp.log2(scales)))
    return scaled_by(weight, scales.astype(format_.scales(compute)), dim, name, platform)


def scaled_by(
    weight: Float[Array, "*dims"],
    scales: Float[Array, "*scales"],
    dim: int,
    name: str,
    platform: str,
) -> Quantised:
    """Values of a weight that is their product with ``scales``, rounded: rounding again finds the values of the format.

    ``scales`` have the size 1 in ``dim``, or that of the format's groups.
    """
    dtype, stored = (jnp.dtype(of) for of in (FORMATS[name].dtype, FORMATS[name].stored(platform)))
    factors, wide = scales.astype(jnp.float32), weight.astype(jnp.float32)
    grouped = FORMATS[name].group is not None
    if grouped:
        factors, wide = jnp.expand_dims(factors, dim + 1), apart(wide, dim, scales.shape[dim])
    values = jnp.where(factors == 0, 0, wide / factors)
    if jnp.issubdtype(dtype, jnp.integer):
        values = jnp.round(values)
    values = values.astype(dtype).astype(stored)
    return Quantised(values=joined(values, dim) if grouped else values, scales=scales)


def layer_in_full(layer: Layer[Any], dtype: DTypeLike) -> Layer[Any]:
    """A layer with weights as ``in_full`` returns them. Experts' weights stay quantised: see ``moe_mlp``."""
    if not isinstance(layer.mlp, MoEWeights):
        full: Layer[Any] = in_full(layer, dtype)
        return full
    names = ("gate", "up", "down")
    rest = replace(layer.mlp, **dict.fromkeys(names))
    experts = {name: getattr(layer.mlp, name) for name in names}
    full = in_full(replace(layer, mlp=rest), dtype)
    return replace(full, mlp=replace(full.mlp, **experts))


def in_full(weights: Any, dtype: DTypeLike) -> Any:
    """A tree of weights with each ``Quantised`` one in ``dtype``, and each ``Turned`` one in its original order."""

    def array(leaf: Any) -> Any:
        if isinstance(leaf, Turned):
            return jnp.moveaxis(leaf.values, -1, 0)
        return leaf.in_full(dtype) if isinstance(leaf, Quantised) else leaf

    return jax.tree.map(array, weights, is_leaf=lambda leaf: isinstance(leaf, Quantised | Turned))
