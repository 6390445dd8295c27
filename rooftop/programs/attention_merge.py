"""Attention from its parts: outputs for several sets of keys by their log-sum-exps, and sinks.

Dims as in ``rooftop.programs.attention``.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def merge(o: jax.Array, lse: jax.Array, other: jax.Array, other_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention to two sets of keys from attention to each: o [b, T, n, d_v] float32 and lse [b, n, T], finite."""
    both = jnp.logaddexp(lse, other_lse)
    # A query without keys may come with any output.
    other = jnp.where(jnp.isneginf(_by_query(other_lse)), 0.0, other.astype(jnp.float32))
    return o * _by_query(jnp.exp(lse - both)) + other * _by_query(jnp.exp(other_lse - both)), both


def add_sinks(o: jax.Array, lse: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sinks [n] joined to the denominators of o [b, T, n, d_v], whose log-sum-exps are lse [b, n, T]."""
    both = jnp.logaddexp(lse, sinks.astype(jnp.float32)[:, None])
    return (o * _by_query(jnp.exp(lse - both))).astype(o.dtype), both


def sink_gradients(sinks: jax.Array, o: jax.Array, lse: jax.Array, do: jax.Array) -> jax.Array:
    """The derivative of sinks [n], from what ``add_sinks`` returned and the derivative of its output."""
    share = jnp.exp(sinks.astype(jnp.float32)[:, None] - lse)
    return -jnp.einsum("bnt,btnh,btnh->n", share, o.astype(jnp.float32), do.astype(jnp.float32)).astype(sinks.dtype)


def _by_query(lse: jax.Array) -> jax.Array:
    """[b, n, T] as a factor of outputs [b, T, n, d_v]."""
    return lse.swapaxes(1, 2)[..., None]
