"""A layer's mixture of experts: gather the weights, route the tokens, and sum the results of their experts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import P, named_scope
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import reshard
from jaxtyping import Array, Bool, Float, Float32

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import field_values
from rooftop.models import ModelConfig
from rooftop.programs.model.moe.axes import MoEAxes
from rooftop.programs.model.moe.experts import Experts
from rooftop.programs.model.moe.route import load, route
from rooftop.programs.model.moe.serving import gathered
from rooftop.programs.model.moe.training import exchanged
from rooftop.programs.model.narrow import narrowed
from rooftop.programs.parameters import MoEWeights
from rooftop.programs.quantised import Quantised
from rooftop.programs.sharding import Specs, on_shards

#: Matmuls of experts: slots of each expert in one batched einsum, or sorted rows in a grouped matmul.
EXPERT_MATMULS: tuple[str, ...] = ("batched", "grouped")
#: Weights of experts, and of shared ones, whose matmuls run in the dtype of the layers'.
_NARROWED = ("gate", "up", "down")


def moe_mlp(
    x: Float[Array, "B T D"],
    layer: MoEWeights[jax.Array],
    model: ModelConfig,
    specs: Specs,
    *,
    capacity_factor: float | None,
    matmul: str = "batched",
    dtype: str | None = None,
    measured: bool = False,
    real: Bool[Array, "B T"] | None = None,
    gathers: bool = False,
) -> tuple[Float[Array, "B T D"], Float32[Array, "devices 3 E"] | None]:
    """The experts and the shared experts of one layer, on the normalised residual stream.

    x and the result are split as the residual stream. ``layer`` has no leading dim of layers; the caller applies its
    norms. Its weights are at rest and are gathered here. Matmuls run in x's dtype, those of experts in ``dtype`` unless
    it is None (``rooftop.programs.model.narrow``); the router's scores are float32. For ``capacity_factor`` see
    ``slots.capacity``; ``matmul`` is one of EXPERT_MATMULS. If ``measured``, the second result is the ``route.load`` of
    each device that splits tokens, split over them. Tokens of padding, False in ``real``, go to no expert and do not
    count. With ``gathers`` all devices get all tokens; it drops none and measures nothing. Opens the scopes
    moe/{router,dispatch,experts,combine,shared}, with the checkpoint names mlp_normed (rows as experts get them),
    mlp_up, mlp_act and mlp_down.

    Raises RooftopError if the axes of experts or hidden columns do not split tokens, if the factor is not positive, and
    for an unknown ``matmul``.
    """
    if matmul not in EXPERT_MATMULS:
        raise unknown("expert_matmul", matmul, EXPERT_MATMULS)
    if (moe := model.moe) is None:
        raise RooftopError("model.moe", None, "a mixture of experts")
    axes = MoEAxes.of(specs)
    axes.check()
    every_token = x.shape[0] * x.shape[1]

    def local(x: jax.Array, weights: dict[str, Any], real: jax.Array | None) -> tuple[jax.Array, jax.Array | None]:
        experts = Experts(
            model=model, moe=moe, axes=axes, weights=weights, stored=layer.up.shape[0], every_token=every_token,
            grouped=matmul == "grouped", dtype=x.dtype,
        )  # fmt: skip
        tokens = x.reshape(-1, x.shape[-1])
        shares, chosen, measures = _routed(tokens, real, experts, measured)
        if gathers:
            return gathered(tokens, shares, chosen, experts).reshape(x.shape), None
        out = exchanged(tokens, shares, chosen, experts, capacity_factor=capacity_factor)
        return out.reshape(x.shape), measures

    with named_scope("moe"):
        weights = _gathered_weights(layer, axes, dtype)
        places = jax.tree.map(lambda weight: jax.typeof(weight).sharding.spec, weights)
        stream = specs.residual
        if real is not None:
            real = reshard(real, P(*stream.partitions[:2]))
        return on_shards(
            local,
            in_specs=(stream, places, None if real is None else P(*stream.partitions[:2])),
            out_specs=(stream, P(axes.residual or None) if measured else None),
        )(x, weights, real)


def _gathered_weights(layer: MoEWeights[jax.Array], axes: MoEAxes, dtype: str | None) -> dict[str, Any]:
    """The weights of a layer by name, gathered, those of experts in ``dtype`` if it is not None."""
    weights = {
        name: weight for name, weight in field_values(layer).items() if isinstance(weight, jax.Array | Quantised)
    }
    whole: dict[str, Any] = {}
    for name, weight in weights.items():
        with named_scope(_scope(name)):
            whole[name] = jax.tree.map(axes.gather_weight, weight)
            if dtype is not None and isinstance(weight, jax.Array) and name.removeprefix("shared_") in _NARROWED:
                whole[name] = narrowed(weight, whole[name], axes.gather_weight, dtype, batch=weight.ndim - 2)
    return whole


def _scope(weight: str) -> str:
    """The scope that uses a weight of ``MoEWeights``."""
    if weight in ("router", "router_bias", "correction_bias"):
        return "router"
    return "shared" if weight.startswith("shared_") else "experts"


def _routed(
    tokens: jax.Array, real: jax.Array | None, experts: Experts, measured: bool
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Shares and ids of the experts of a device's tokens [n, D], and their load [1, 3, E] if ``measured``.

    Tokens that are False in ``real`` [B, T] choose no expert.
    """
    moe, axes, weights = experts.moe, experts.axes, experts.weights
    with named_scope("router"):
        router = weights["router"][: tokens.shape[-1]]
        logits = axes.summed_width(jnp.einsum("nd,de->ne", tokens, router, preferred_element_type=jnp.float32))
        if "router_bias" in weights:
            logits = logits + weights["router_bias"]
        logits = checkpoint_name(logits, "mlp_up")
        shares, chosen = route(logits, weights.get("correction_bias"), moe)
        real = None if real is None else real.reshape(-1)
        measures = load(logits, chosen, real, moe)[None] if measured else None
        if real is not None:
            chosen = jnp.where(real[:, None], chosen, moe.experts)
    return shares, chosen, measures
