"""What a layer does between its matmuls with small weights: norms and biases; on shards, without communication.

Scales and biases come ``reduced`` over the axes that split the tokens. In shard_map their gradients stay unreduced, to
be all-reduced once for all layers.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import P

from rooftop.models.config import ModelConfig
from rooftop.programs.parameters import Norm
from rooftop.programs.sharding import Specs, on_shards


def norm(x: jax.Array, weights: Norm[jax.Array], model: ModelConfig, specs: Specs) -> jax.Array:
    """The model's norm over D, in float32; x [B, T, D] as the residual stream is split, scale and bias [D]."""

    def local(x: jax.Array, weights: Norm[jax.Array]) -> jax.Array:
        if weights.bias is None:
            return _rms(x, weights.scale, model)
        wide = x.astype(jnp.float32)
        wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
        return _unit(wide, model).astype(x.dtype) * weights.scale + weights.bias

    return _on_shards(local, specs.residual, x, weights)


def scale_norm(x: jax.Array, scale: jax.Array, model: ModelConfig, spec: P) -> jax.Array:
    """RMS norm over the last dim of x, a head or a latent; ``spec`` is that of x, scale [last dim]."""
    return _on_shards(lambda x, scale: _rms(x, scale, model), spec, x, scale)


def add_bias(x: jax.Array, bias: jax.Array | None, spec: P) -> jax.Array:
    """x plus a bias over its last dims, if there is one; ``spec`` is that of x."""
    return x if bias is None else _on_shards(lambda x, bias: x + bias, spec, x, bias)


def _rms(x: jax.Array, scale: jax.Array, model: ModelConfig) -> jax.Array:
    unit = _unit(x.astype(jnp.float32), model)
    if model.norm_offset:
        # 1 + scale would mix what is reduced with what is not.
        return (unit + unit * scale).astype(x.dtype)
    return unit.astype(x.dtype) * scale


def _unit(x: jax.Array, model: ModelConfig) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + model.norm_eps)


def _on_shards(local: Callable[..., jax.Array], spec: P, x: jax.Array, weights: object) -> jax.Array:
    """``local`` of the shards of x, split by ``spec``, and of weights that keep the splits they have."""
    kept = jax.tree.map(lambda weight: jax.typeof(weight).sharding.spec, weights)
    return on_shards(local, in_specs=(spec, kept), out_specs=spec)(x, weights)
