"""LLaMA, Mistral, Phi-3 and others of its kin: RMS norms before attention and a gated MLP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftop.models.config import MoE, OtherWeight
from rooftop.models.families.keys import Keys
from rooftop.models.families.parts import (
    Fields,
    Reader,
    all_biases,
    attention_bias,
    decoder,
    joined_fields,
    layer_norm,
    one_of_layers,
    partial_rotary,
    rotary,
    rotated_layers,
    same_window,
    switched_window,
    use_bias,
    windows_of,
    with_keys,
)


def _llama(keys: Keys) -> Fields:
    fields = decoder(keys)
    keys.only("layer_types")
    return fields | rotary(keys, fields["max_seq_len"]) | all_biases(keys)


def _mistral(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=131_072)
    window = keys.whole("sliding_window", 4096, null=None)
    keys.only("layer_types")
    return fields | rotary(keys, fields["max_seq_len"]) | {"layer_windows": (window,) * fields["layers"]}


def _ministral(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=131_072)
    window = keys.whole("sliding_window", 4096, null=None)
    windows = windows_of(keys, fields["layers"], window, lambda layer: True)
    return fields | rotary(keys, fields["max_seq_len"]) | {"layer_windows": windows}


def _mixtral(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=131_072, norm_eps=1e-5)
    window = keys.whole("sliding_window", None)
    experts, active = keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")
    keys.ignore("router_jitter_noise")
    fields |= rotary(keys, fields["max_seq_len"], 1e6) | same_window(keys, fields["layers"], window)
    return fields | {"moe": MoE(experts=experts, active=active, d_ff=fields["d_ff"])}


def _phi3(keys: Keys) -> Fields:
    fields = decoder(keys, max_seq_len=4096, norm_eps=1e-5)
    window = keys.whole("sliding_window", None)
    keys.ignore("original_max_position_embeddings")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    return fields | partial_rotary(keys, fields, 1.0) | same_window(keys, fields["layers"], window)


def _phimoe(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=131_072, norm_eps=1e-5)
    window = keys.whole("sliding_window", None)
    keys.ignore("router_jitter_noise", "original_max_position_embeddings")
    experts, active = keys.whole("num_local_experts", 16), keys.whole("num_experts_per_tok", 2)
    moe = MoE(experts=experts, active=active, d_ff=fields["d_ff"], scoring="sparsemixer", normalise=False)
    fields |= rotary(keys, fields["max_seq_len"], 1e6) | same_window(keys, fields["layers"], window)
    return fields | attention_bias(keys) | layer_norm() | {"moe": moe, "unembed_bias": keys.flag("lm_head_bias", False)}


def _smollm3(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=4, max_seq_len=32_768, tied=True)
    windows = windows_of(keys, fields["layers"], switched_window(keys), lambda layer: False)
    fields |= {"layer_windows": windows, "rope_layers": rotated_layers(keys, fields["layers"])}
    return fields | rotary(keys, fields["max_seq_len"], 2e6) | all_biases(keys)


def _arcee(keys: Keys) -> Fields:
    fields = decoder(keys, max_seq_len=4096, norm_eps=1e-5, activation=("hidden_act", "relu2"))
    return fields | rotary(keys, fields["max_seq_len"]) | all_biases(keys) | {"mlp_matrices": 2}


def _apertus(keys: Keys) -> Fields:
    keys.only("hidden_act", "xielu")
    fields = decoder(with_keys(keys, hidden_act="relu2"), max_seq_len=65_536, norm_eps=1e-5)
    others = (OtherWeight(name="xIELU", shape=(2,), layers=fields["layers"]),)
    if not keys.has("rope_scaling") and not keys.has("rope_parameters"):
        keys = with_keys(keys, rope_scaling=_APERTUS_ROPE)
    rope = rotary(keys, fields["max_seq_len"], 1.2e7)
    keys.only("post_norm", False)
    keys.only("qk_norm", True)
    return fields | rope | attention_bias(keys) | {"mlp_matrices": 2, "qk_norm": "head", "others": others}


#: What transformers assumes of an Apertus file without rotary settings.
_APERTUS_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _seed_oss(keys: Keys) -> Fields:
    fields = decoder(keys, max_seq_len=524_288, d_head=128)
    biases = {"qkv_bias": keys.flag("attention_bias", True), "attn_out_bias": keys.flag("attention_out_bias", False)}
    return fields | rotary(keys, fields["max_seq_len"]) | biases | {"mlp_bias": keys.flag("mlp_bias", False)}


def _helium(keys: Keys) -> Fields:
    fields = decoder(keys, max_seq_len=4096, d_head=128, norm_eps=1e-8)
    biases = {"qkv_bias": keys.flag("attention_bias", False), "mlp_bias": keys.flag("mlp_bias", False)}
    return fields | rotary(keys, fields["max_seq_len"], 1e5) | biases | {"rope_interleaved": True}


def _hunyuan(keys: Keys) -> Fields:
    fields = decoder(keys, norm_eps=1e-5)
    keys.only("use_qk_norm", True)
    keys.only("use_cla", False)
    keys.ignore("attention_head_dim")
    return (
        fields
        | rotary(keys, fields["max_seq_len"])
        | attention_bias(keys)
        | {"qk_norm": "head", "qk_norm_after_rope": True}
    )


def _hunyuan_moe(keys: Keys) -> Fields:
    fields = _hunyuan(keys)
    experts, active, shared = (one_of_layers(keys, key, 1) for key in ("num_experts", "moe_topk", "num_shared_expert"))
    d_ff = one_of_layers(keys, "moe_intermediate_size", fields["d_ff"])
    keys.only("use_mixed_mlp_moe", True)
    moe = MoE(experts=experts, active=active, d_ff=d_ff, shared_d_ff=shared * fields["d_ff"])
    return fields | {"moe": moe}


def _ernie4_5(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=2, max_seq_len=131_072, d_head=128, norm_eps=1e-5, tied=True)
    return fields | rotary(keys, fields["max_seq_len"], 5e5) | use_bias(keys, False) | {"rope_interleaved": True}


def _ernie4_5_moe(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=4, max_seq_len=131_072, norm_eps=1e-5, tied=True)
    keys.only("use_bias", False)
    keys.ignore("moe_norm_min", "moe_capacity", "moe_gate", "moe_use_aux_free")
    first, every = keys.whole("moe_layer_start_index", 1, least=0), keys.whole("moe_layer_interval", 1)
    keys.only("moe_layer_end_index", fields["layers"] - 1, -1)
    d_ff = keys.whole("moe_intermediate_size")
    moe = MoE(
        experts=keys.whole("moe_num_experts"),
        active=keys.whole("moe_k"),
        d_ff=d_ff,
        shared_d_ff=d_ff * keys.whole("moe_num_shared_experts", 2, null=0, least=0),
        dense_layers=next(layer for layer in range(first, first + every) if (layer + 1) % every == 0),
        every=every,
        correction_bias=True,
    )
    return fields | rotary(keys, fields["max_seq_len"], 5e5) | {"rope_interleaved": True, "moe": moe}


def _glm(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=2, max_seq_len=131_072, d_head=128, norm_eps=1.5625e-7)
    fields |= {"qkv_bias": keys.flag("attention_bias", True), "rope_interleaved": True}
    return fields | partial_rotary(keys, fields, 0.5)


def _glm4(keys: Keys) -> Fields:
    return _glm(keys) | {"norm_placement": "sandwich"}


def _llama4(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=131_072, d_head=128, norm_eps=1e-5)
    chunk = keys.whole("attention_chunk_size", 8192, null=None)
    layers, d_expert = fields["layers"], fields["d_ff"]
    rope = rotated_layers(keys, layers)
    every = keys.whole("interleave_moe_layer_step", 1)
    keys.only("moe_layers", list(range(every - 1, layers, every)))
    keys.ignore("router_jitter_noise", "floor_scale", "attn_scale", "for_llm_compressor")
    moe = MoE(
        experts=keys.whole("num_local_experts", 16),
        active=keys.whole("num_experts_per_tok", 1),
        d_ff=d_expert,
        shared_d_ff=d_expert,
        dense_layers=every - 1,
        every=every,
        scoring="sigmoid",
        normalise=False,
        weigh_input=True,
    )
    fields |= {
        "d_ff": keys.whole("intermediate_size_mlp", 16_384),
        "layer_windows": windows_of(keys, layers, chunk, lambda layer: rope[layer], "chunked_attention"),
        "windows_chunked": True,
        "rope_layers": rope,
        "rope_interleaved": True,
        "qk_norm": "unit" if keys.flag("use_qk_norm", True) else None,
        "qk_norm_after_rope": True,
        "moe": moe,
    }
    # Released files have false or null for 4, the length from which positions without rotation are scaled.
    tuned = keys.data.get("attn_temperature_tuning", True) not in (False, None, 0)
    keys.ignore("attn_temperature_tuning")
    scaled = {"not_run": ("temperatures of attention by position",)} if tuned else {}
    return joined_fields(fields, rotary(keys, fields["max_seq_len"], 5e5), attention_bias(keys), scaled)


#: Readers by ``model_type``.
FAMILIES: Mapping[str, Reader] = {
    "apertus": _apertus,
    "arcee": _arcee,
    "ernie4_5": _ernie4_5,
    "ernie4_5_moe": _ernie4_5_moe,
    "glm": _glm,
    "glm4": _glm4,
    "helium": _helium,
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan_moe,
    "llama": _llama,
    "llama4_text": _llama4,
    "ministral": _ministral,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "phi3": _phi3,
    "phimoe": _phimoe,
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
}
