"""Which experts a token goes to, and how evenly tokens go to experts.

Dims: n tokens of one device, E experts, k active ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from rooftop import models


def route(logits: jax.Array, correction_bias: jax.Array | None, moe: models.MoE) -> tuple[jax.Array, jax.Array]:
    """Weights [n, k] (float32) and ids [n, k] of the experts chosen by ``logits`` [n, E] (float32), best first.

    The rules are ``rooftop.models.MoE``'s (DeepSeek-V3 paper, equations 13 to 16, for groups and correction).
    """
    scores = jax.nn.softmax(logits) if moe.scoring == "softmax" else jax.nn.sigmoid(logits)
    choice = lax.stop_gradient(scores)
    if correction_bias is not None:
        choice = choice + lax.stop_gradient(correction_bias.astype(jnp.float32))
    if moe.groups > 1:
        groups = choice.reshape(len(choice), moe.groups, -1)
        best = lax.top_k(groups, 1 if moe.group_score == "max" else 2)[0].sum(-1)
        active = one_hot(lax.top_k(best, moe.active_groups)[1], moe.groups).any(1)
        choice = jnp.where(active[..., None], groups, -jnp.inf).reshape(choice.shape)
    chosen = lax.top_k(choice, moe.active)[1]
    # Picked by comparison: the gradient of an index would be a scatter.
    weights = jnp.sum(jnp.where(one_hot(chosen, moe.experts), scores[:, None, :], 0.0), axis=-1)
    if moe.normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights * moe.routed_scaling, chosen


def load(logits: jax.Array, chosen: jax.Array, segments: jax.Array | None, moe: models.MoE) -> jax.Array:
    """What experts get of n tokens, [3, E] float32: how many chose each, their probabilities of each, and n (E times).

    Probabilities are the router's scores, of ``logits`` [n, E], divided by their sum (a softmax's is 1); they alone
    have a gradient. Tokens of segment 0 (``segments`` [n]), which are padding, do not count. Loads of layers and
    devices add up.
    """
    scores = jax.nn.softmax(logits) if moe.scoring == "softmax" else jax.nn.sigmoid(logits)
    probabilities = scores / jnp.sum(scores, axis=-1, keepdims=True) if moe.scoring == "sigmoid" else scores
    choices = jnp.sum(one_hot(chosen, moe.experts), axis=1, dtype=jnp.float32)
    found = jnp.stack([choices, probabilities, jnp.ones_like(probabilities)])
    return jnp.sum(found if segments is None else jnp.where((segments > 0)[:, None], found, 0.0), axis=1)


def balance(load: jax.Array) -> jax.Array:
    """The load-balancing loss of a ``load`` [3, E]: E sum over e of f_e P_e, k where all experts get the same.

    f_e is the number of choices of e for a token and P_e its mean probability (Switch Transformer paper, equations 4 to
    6; over the tokens of all layers together, as the Mixtral models of transformers).
    """
    choices, probabilities, tokens = load
    tokens = jnp.maximum(tokens, 1.0)
    return load.shape[1] * jnp.sum(choices / tokens * (probabilities / tokens))


def one_hot(ids: jax.Array, size: int) -> jax.Array:
    """Whether an id is e, for every e: [..., size] booleans."""
    return ids[..., None] == jnp.arange(size, dtype=ids.dtype)
