"""The router: which experts each token uses, how much of each, and how evenly they are used."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import P, lax
from jaxtyping import Array, Bool, Float, Float32, Int

from rooftop.models import ModelConfig, MoE
from rooftop.programs.model.moe.axes import MoEAxes, devices_along
from rooftop.programs.sharding import Specs


def route(
    logits: Float32[Array, "n E"], correction_bias: Float[Array, " E"] | None, moe: MoE
) -> tuple[Float32[Array, "n k"], Int[Array, "n k"]]:
    """Weights and ids of the experts chosen by ``logits``, best first.

    The rules are those of ``rooftop.models.MoE`` (DeepSeek-V3 paper, equations 13 to 16, for groups and correction).
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
    # Selected by comparison: the gradient of an index would be a scatter.
    weights = jnp.sum(jnp.where(one_hot(chosen, moe.experts), scores[:, None, :], 0.0), axis=-1)
    if moe.normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights * moe.routed_scaling, chosen


def load(
    logits: Float32[Array, "n E"], chosen: Int[Array, "n k"], real: Bool[Array, " n"] | None, moe: MoE
) -> Float32[Array, "3 E"]:
    """Load of the experts: for each, the choices of n tokens, the sum of their probabilities, and n.

    Probabilities are the router's scores of ``logits`` divided by their sum (1 for a softmax); only they have a
    gradient. Tokens of padding, False in ``real``, do not count. Loads of layers and devices add up.
    """
    scores = jax.nn.softmax(logits) if moe.scoring == "softmax" else jax.nn.sigmoid(logits)
    probabilities = scores / jnp.sum(scores, axis=-1, keepdims=True) if moe.scoring == "sigmoid" else scores
    choices = jnp.sum(one_hot(chosen, moe.experts), axis=1, dtype=jnp.float32)
    counts = jnp.stack([choices, probabilities, jnp.ones_like(probabilities)])
    return jnp.sum(counts if real is None else jnp.where(real[:, None], counts, 0.0), axis=1)


def balance(load: Float32[Array, "3 E"]) -> Float32[Array, ""]:
    """The load-balancing loss: E sum over e of f_e P_e, which is k if all experts get the same.

    f_e is the number of choices of e per token and P_e its mean probability (Switch Transformer paper, equations 4 to
    6; over the tokens of all layers together, as the Mixtral models of transformers).
    """
    choices, probabilities, tokens = load
    tokens = jnp.maximum(tokens, 1.0)
    return load.shape[1] * jnp.sum(choices / tokens * (probabilities / tokens))


def no_load(model: ModelConfig, specs: Specs) -> Float32[Array, "devices 3 E"]:
    """The load before any layer, in the form in which ``moe_mlp`` returns it."""
    assert model.moe is not None
    axes = MoEAxes.of(specs).residual
    return jnp.zeros((devices_along(axes), 3, model.moe.experts), jnp.float32, out_sharding=P(axes or None))


def one_hot(ids: Int[Array, "*dims"], size: int) -> Bool[Array, "*dims size"]:
    """Booleans [..., size]: true at each id."""
    return ids[..., None] == jnp.arange(size, dtype=ids.dtype)
