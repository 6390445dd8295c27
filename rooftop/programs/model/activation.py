"""The activation between the matmuls of an MLP."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from rooftop.models import ModelConfig


def activate(
    gate: Float[Array, "*rows F"] | None, up: Float[Array, "*rows F"], model: ModelConfig
) -> Float[Array, "*rows F"]:
    """The hidden activations of an MLP from its projections, by the model's ``activation`` and ``swiglu_limit``."""
    if gate is None:
        return _ACTIVATIONS[model.activation](up)
    if (limit := model.swiglu_limit) is not None:
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit) + 1
        return gate * jax.nn.sigmoid(model.swiglu_alpha * gate) * up
    return _ACTIVATIONS[model.activation](gate) * up


@jax.custom_jvp
def _gelu(x: jax.Array) -> jax.Array:
    """x times the normal distribution's cumulative function of x."""
    return jax.nn.gelu(x, approximate=False)


@_gelu.defjvp
def _gelu_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # JAX 0.12.0 computes a float32 erfc inside a typed shard_map, but cannot differentiate it.
    (x,), (dx,) = primals, tangents
    cumulative = 0.5 * jax.lax.erfc(-x * 0.5**0.5)
    density = jnp.exp(-0.5 * jnp.square(x)) * (2 * math.pi) ** -0.5
    return _gelu(x), (cumulative + x * density) * dx


_ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": _gelu,
    "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True),
    "relu": jax.nn.relu,
    "relu2": lambda x: jnp.square(jax.nn.relu(x)),
}
