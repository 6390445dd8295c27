"""DeepSeek, with latent attention, and families with the experts of DeepSeek-V3."""

from __future__ import annotations

from collections.abc import Mapping

from rooftop.core.errors import RooftopError
from rooftop.models.config import MLA, MoE, OtherWeight
from rooftop.models.families.keys import Keys
from rooftop.models.families.parts import (
    Fields,
    Reader,
    attention_bias,
    decoder,
    dense_first,
    mscale,
    partial_rotary,
    rope_keys,
    rotary,
    windows_of,
)


def _latent(keys: Keys, *, max_seq_len: int) -> Fields:
    """Fields that DeepSeek-V2 and V3 share: latent attention."""
    fields = decoder(keys, max_seq_len=max_seq_len)
    keys.ignore("pretraining_tp", "qk_head_dim")
    for key in ("attention_bias", "mlp_bias"):
        keys.only(key, False)
    mla = MLA(
        q_rank=keys.whole("q_lora_rank", null=None),
        kv_rank=keys.whole("kv_lora_rank"),
        d_nope=keys.whole("qk_nope_head_dim"),
        d_rope=keys.whole("qk_rope_head_dim"),
        d_v=keys.whole("v_head_dim"),
    )
    d_head = mla.d_nope + mla.d_rope
    fields |= rotary(keys, fields["max_seq_len"]) | {"d_head": d_head, "mla": mla, "kv_heads": fields["heads"]}
    weight = rope_keys(keys).number("mscale_all_dim", 0)
    if fields.get("rope_scaling") is not None and weight:
        fields["query_scale"] = d_head**-0.5 * mscale(fields["rope_scaling"].factor, weight) ** 2
    return fields


def _sigmoid_experts(
    keys: Keys, layers: int, dense: int, *, scaling: float, groups: tuple[int, int] = (1, 1), normalise: bool = True
) -> MoE:
    """Experts as in DeepSeek-V3: sigmoid scores, a choosing bias, groups by their two best, shared experts."""
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    keys.only("moe_layer_freq", 1)
    d_expert = keys.whole("moe_intermediate_size")
    return MoE(
        experts=keys.whole(keys.first("n_routed_experts", "num_local_experts", "num_experts")),
        active=keys.whole("num_experts_per_tok"),
        d_ff=d_expert,
        shared_d_ff=d_expert * keys.whole("n_shared_experts", 1, null=0, least=0),
        dense_layers=dense_first(keys, layers, keys.whole("first_k_dense_replace", dense, least=0)),
        scoring="sigmoid",
        normalise=keys.flag("norm_topk_prob", normalise),
        routed_scaling=keys.number("routed_scaling_factor", scaling),
        groups=keys.whole("n_group", groups[0]),
        active_groups=keys.whole("topk_group", groups[1]),
        group_score="top2_sum",
        correction_bias=True,
    )


def _deepseek_v2(keys: Keys) -> Fields:
    fields = _latent(keys, max_seq_len=2048)
    keys.only("moe_layer_freq", 1)
    keys.only("scoring_func", "softmax")
    keys.only("topk_method", "greedy", "group_limited_greedy")
    limited = keys.text("topk_method", "greedy") != "greedy"
    keys.ignore("n_group", "topk_group")
    d_expert = keys.whole("moe_intermediate_size")
    moe = MoE(
        experts=keys.whole("n_routed_experts"),
        active=keys.whole("num_experts_per_tok"),
        d_ff=d_expert,
        shared_d_ff=d_expert * keys.whole("n_shared_experts", 2, null=0, least=0),
        dense_layers=keys.whole("first_k_dense_replace", 0, least=0),
        normalise=keys.flag("norm_topk_prob", False),
        routed_scaling=keys.number("routed_scaling_factor", 1.0),
        groups=keys.whole("n_group") if limited else 1,
        active_groups=keys.whole("topk_group") if limited else 1,
    )
    return fields | {"rope_interleaved": True, "moe": moe}


def _deepseek_v3(keys: Keys) -> Fields:
    fields = _latent(keys, max_seq_len=4096)
    moe = _sigmoid_experts(keys, fields["layers"], 3, scaling=2.5, groups=(8, 4))
    return fields | {"rope_interleaved": keys.flag("rope_interleave", True), "moe": moe}


def _deepseek_v32(keys: Keys) -> Fields:
    """DeepSeek-V3.2: queries attend to the keys that a small indexer scores highest."""
    if set(keys.data.get("layer_types") or ()) <= {"indexed_attention"}:
        keys.ignore("layer_types")
    fields = _deepseek_v3(keys)
    heads, size = keys.whole("index_n_heads", 64), keys.whole("index_head_dim", 128)
    keys.ignore("index_topk", "indexer_types")
    if fields["mla"].q_rank is None:
        raise RooftopError(keys.field("q_lora_rank"), None, "a whole number: the indexer reads the queries' latent")
    layers, d = fields["layers"], fields["d_model"]
    matmuls = {"queries": (fields["mla"].q_rank, heads * size), "keys": (d, size), "weights": (d, heads)}
    others = [
        OtherWeight(name=f"indexer {key}", shape=shape, layers=layers, matmul=True) for key, shape in matmuls.items()
    ]
    others.append(OtherWeight(name="indexer norm", shape=(2 * size,), layers=layers))
    return fields | {"others": tuple(others)}


def _dots1(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=32)
    first = keys.whole("max_window_layers", 62, least=0)
    window = keys.whole("sliding_window", 4096, null=None)
    windows = windows_of(keys, fields["layers"], window, lambda layer: layer >= first)
    moe = _sigmoid_experts(keys, fields["layers"], 0, scaling=1.0, normalise=False)
    return (
        fields
        | rotary(keys, fields["max_seq_len"])
        | attention_bias(keys)
        | {"qk_norm": "head", "layer_windows": windows, "moe": moe}
    )


def _glm4_moe(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=131_072, norm_eps=1e-5)
    fields |= {"qkv_bias": keys.flag("attention_bias", False)}
    fields |= {"qk_norm": "head"} if keys.flag("use_qk_norm", False) else {}
    moe = _sigmoid_experts(keys, fields["layers"], 1, scaling=1.0)
    return fields | partial_rotary(keys, fields, 0.5) | {"moe": moe}


#: Readers by ``model_type``.
FAMILIES: Mapping[str, Reader] = {
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "dots1": _dots1,
    "glm4_moe": _glm4_moe,
    "kimi_k2": _deepseek_v3,
}
