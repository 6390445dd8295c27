"""A data-parallel step with three faults, for ``rooftop check`` (docs/check.md)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import P


@functools.partial(jax.shard_map, in_specs=(P(), P("data"), P("data")), out_specs=P(), check_vma=False)
def step(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    """One step on weights that are whole on every device, with gradients that are summed twice."""

    def loss(w: jax.Array) -> jax.Array:
        return jnp.mean((x @ w - y) ** 2)

    gradient = jax.lax.psum(jax.grad(loss)(w), "data") / 4
    gradient = jax.lax.psum(gradient, "data") / 4
    return w - 0.1 * gradient
