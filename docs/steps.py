"""Steps of one layer for ``rooftop tune`` (docs/evidence/compiler.md): an MLP, and experts with AllToAlls."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import P

Weights = tuple[jax.Array, jax.Array]


def mlp(up: jax.Array, down: jax.Array, x: jax.Array) -> Weights:
    """The weights [D, F] and [F, D] after a step on x [T, D]."""

    def loss(weights: Weights) -> jax.Array:
        return jnp.mean((x + jax.nn.relu(x @ weights[0]) @ weights[1]).astype(jnp.float32) ** 2)

    gradients = jax.grad(loss)((up, down))
    return up - 0.1 * gradients[0], down - 0.1 * gradients[1]


def experts(up: jax.Array, down: jax.Array, x: jax.Array) -> Weights:
    """The weights [E, D, F] and [E, F, D] after a step on x [T, D]: a device sends as many tokens to every expert."""
    exchange = functools.partial(jax.lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=1, tiled=True)
    back = functools.partial(jax.lax.all_to_all, axis_name="expert", split_axis=1, concat_axis=0, tiled=True)
    devices = jax.sharding.get_abstract_mesh().shape["expert"]

    @functools.partial(jax.shard_map, in_specs=(P("expert"), P("expert"), P("expert")), out_specs=P("expert"))
    def layer(up: jax.Array, down: jax.Array, x: jax.Array) -> jax.Array:
        tokens = exchange(x.reshape(devices * up.shape[0], -1, x.shape[1]))
        hidden = jax.nn.relu(jnp.einsum("ecd,edf->ecf", tokens, up))
        return x + back(jnp.einsum("ecf,efd->ecd", hidden, down)).reshape(x.shape)

    def loss(weights: Weights) -> jax.Array:
        return jnp.mean(layer(*weights, x).astype(jnp.float32) ** 2)

    gradients = jax.grad(loss)((up, down))
    return up - 0.1 * gradients[0], down - 0.1 * gradients[1]
