"""Other mixtures of experts: gpt-oss, MiniMax, DBRX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.models.config import MOST_LAYERS, MoE
from rooftop.models.families.keys import Keys
from rooftop.models.families.parts import (
    ACTIVATIONS,
    Fields,
    Reader,
    attention_bias,
    decoder,
    joined_fields,
    layer_norm,
    partial_rotary,
    rotary,
    unless,
    windows_of,
    with_keys,
)


def _minimax_m2(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=196_608, d_head=128) | {"qk_norm": "width"}
    keys.only("scoring_func", "sigmoid")
    keys.only("use_qk_norm", True)
    keys.only("qk_norm_type", "per_layer")
    keys.only("use_routing_bias", True)
    keys.only("shared_intermediate_size", 0)
    keys.ignore("router_jitter_noise", "attn_type_list")
    if any(kind != 1 for kind in keys.array("attn_type_list", [])):
        raise RooftopError(keys.field("attn_type_list"), 0, "a 1 for each layer: attention with softmax")
    rotated = keys.whole("rotary_dim", fields["d_head"])
    moe = MoE(
        experts=keys.whole("num_local_experts", 256),
        active=keys.whole("num_experts_per_tok", 8),
        d_ff=fields["d_ff"],
        scoring="sigmoid",
        correction_bias=True,
    )
    return fields | {"moe": moe} | partial_rotary(keys, fields, rotated / fields["d_head"], 5e6)


def _minimax(keys: Keys) -> Fields:
    """MiniMax-Text-01: lightning attention in most layers; residuals are weighed sums of normalised streams."""
    fields = decoder(keys, kv_heads=8, max_seq_len=131_072, norm_eps=1e-5)
    fields |= {"layer_windows": (keys.whole("sliding_window", None),) * fields["layers"]}
    keys.ignore("router_jitter_noise", "block_size", "postnorm", "layernorm_mlp_alpha", "shared_intermediate_size")
    for key in ("full_attn", "linear_attn", "mlp"):
        keys.ignore(f"{key}_alpha_factor", f"{key}_beta_factor")
    kinds = {"full_attention": "attention", "linear_attention": "lightning"}
    default = ["full_attention" if layer % 2 == 0 else "linear_attention" for layer in range(fields["layers"])]
    mixers = tuple(kinds.get(kind, kind) for kind in keys.array("layer_types", default))
    experts, active = keys.whole("num_local_experts", 8), keys.whole("num_experts_per_tok", 2)
    fields |= {"mixers": mixers, "moe": MoE(experts=experts, active=active, d_ff=fields["d_ff"])}
    rotated = {"rotary_dims": keys.whole("rotary_dim", fields["d_head"])}
    return (
        fields | {"not_run": ("residuals of normalised streams",)} | rotated | rotary(keys, fields["max_seq_len"], 1e6)
    )


def _gpt_oss(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=131_072, d_head=64, norm_eps=1e-5)
    window = keys.whole("sliding_window", 128, null=None)
    keys.ignore("experts_per_token", "initial_context_length")
    experts, active = keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")
    if not keys.has("rope_scaling") and not keys.has("rope_parameters"):
        keys = with_keys(keys, rope_scaling=_GPT_OSS_ROPE)
    return (
        fields
        | rotary(keys, fields["max_seq_len"], 150_000.0)
        | attention_bias(keys, default=True)
        | {
            "attention_sinks": True,
            "layer_windows": windows_of(keys, fields["layers"], window, lambda layer: layer % 2 == 0),
            "swiglu_limit": keys.number("swiglu_limit", 7.0),
            "swiglu_alpha": keys.number("swiglu_alpha", 1.702),
            "moe": MoE(experts=experts, active=active, d_ff=fields["d_ff"], bias=True),
        }
    )


#: What transformers assumes of a gpt-oss file without rotary settings.
_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _dbrx(keys: Keys) -> Fields:
    attention, ffn = keys.inner("attn_config"), keys.inner("ffn_config")
    d_model, heads = keys.whole("d_model"), keys.whole("n_heads")
    keys.ignore("num_key_value_heads")
    moe = MoE(
        experts=ffn.whole("moe_num_experts", 4),
        active=ffn.whole("moe_top_k", 1),
        d_ff=ffn.whole("ffn_hidden_size", 3584),
    )
    ffn.ignore("hidden_size", "moe_normalize_expert_weights", "uniform_expert_assignment")
    activation = ffn.inner("ffn_act_fn").name("name", ACTIVATIONS) if ffn.has("ffn_act_fn") else "silu"
    fields: Fields = {
        "layers": keys.whole("n_layers", most=MOST_LAYERS),
        "d_model": d_model,
        "d_ff": moe.d_ff,
        "heads": heads,
        "kv_heads": attention.whole("kv_n_heads", 1),
        "d_head": d_model // heads,
        "vocab": keys.whole("vocab_size"),
        "max_seq_len": keys.whole("max_seq_len", 2048),
        "activation": activation,
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        "norm_eps": 1e-5,
        "moe": moe,
    }
    theta = attention.number("rope_theta", 1e4)
    clipped = unless(attention, "clip_qkv", None, "clipped queries, keys and values")
    return joined_fields(fields, layer_norm(bias=False), rotary(keys, fields["max_seq_len"], theta), clipped)


#: Readers by ``model_type``.
FAMILIES: Mapping[str, Reader] = {
    "dbrx": _dbrx,
    "gpt_oss": _gpt_oss,
    "minimax": _minimax,
    "minimax_m2": _minimax_m2,
}
