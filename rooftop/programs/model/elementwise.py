"""Norms and biases: operations with small weights, on shards, without communication.

Scales and biases arrive ``reduced`` over the axes that split the tokens. In shard_map their gradients stay unreduced,
for one all-reduce after all layers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import P
from jaxtyping import Array, Float, Float32

from rooftop.models.config import ModelConfig
from rooftop.programs.parameters import Norm
from rooftop.programs.sharding import Specs, on_shards


def norm(x: Float[Array, "B T D"], weights: Norm[jax.Array], model: ModelConfig, specs: Specs) -> Float[Array, "B T D"]:
    """The model's norm over D, in float32; x is split as the residual stream, scale and bias are [D]."""

    def local(x: jax.Array, weights: Norm[jax.Array]) -> jax.Array:
        if weights.bias is None:
            return _rms(x, weights.scale, model)
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        return _unit(wide, model).astype(x.dtype) * weights.scale + weights.bias

    return _on_shards(local, specs.residual, x, weights)


def scale_norm(
    x: Float[Array, "*dims size"], scale: Float[Array, " size"], model: ModelConfig, spec: P
) -> Float[Array, "*dims size"]:
    """RMS norm over the last dim of x, a head or a latent; ``spec`` is the spec of x."""
    return _on_shards(lambda x, scale: _rms(x, scale, model), spec, x, scale)


def add_bias(x: Float[Array, "*dims"], bias: Float[Array, "*last"] | None, spec: P) -> Float[Array, "*dims"]:
    """x plus a bias over its last dims; x if ``bias`` is None. ``spec`` is the spec of x."""
    return x if bias is None else _on_shards(lambda x, bias: x + bias, spec, x, bias)


def _rms(x: Float[Array, "*dims size"], scale: Float[Array, " size"], model: ModelConfig) -> Float[Array, "*dims size"]:
    unit = _unit(x.astype(jnp.float32), model)
    if model.norm_offset:
        # 1 + scale would add an array that is not reduced to one that is.
        return (unit + unit * scale).astype(x.dtype)
    return unit.astype(x.dtype) * scale


def _unit(x: Float32[Array, "*dims"], model: ModelConfig) -> Float32[Array, "*dims"]:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + model.norm_eps)


def _on_shards(local: Callable[..., jax.Array], spec: P, x: Float[Array, "*dims"], weights: object) -> jax.Array:
    """``local`` of the shards of x, split by ``spec``, and of weights in their present sharding."""
    weight_specs = jax.tree.map(lambda weight: jax.typeof(weight).sharding.spec, weights)
    return on_shards(local, in_specs=(spec, weight_specs), out_specs=spec)(x, weights)
