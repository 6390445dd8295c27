"""Qwen: dense, experts, and layers of gated delta rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.models.config import GatedDelta, MoE
from rooftop.models.families.keys import REQUIRED, Keys
from rooftop.models.families.parts import (
    Fields,
    Reader,
    attention_bias,
    decoder,
    joined_fields,
    partial_rotary,
    rotary,
    same_window,
    switched_window,
    windows_of,
    with_keys,
)


def _qwen2(keys: Keys, d_head: int | None = None) -> Fields:
    fields = decoder(keys, kv_heads=32, max_seq_len=32_768, d_head=d_head)
    first = keys.whole("max_window_layers", 28, least=0)
    windows = windows_of(keys, fields["layers"], switched_window(keys), lambda layer: layer >= first)
    return fields | rotary(keys, fields["max_seq_len"]) | {"layer_windows": windows, "qkv_bias": True}


def _qwen3(keys: Keys) -> Fields:
    return _qwen2(keys, d_head=128) | attention_bias(keys) | {"qk_norm": "head"}


def _qwen_experts(keys: Keys, *, normalise: bool, shared: bool) -> MoE:
    """Experts of the Qwen families: in every n-th layer, after leading dense ones."""
    every, dense = keys.whole("decoder_sparse_step", 1), keys.array("mlp_only_layers", [])
    if dense != list(range(len(dense))):
        raise RooftopError(keys.field("mlp_only_layers"), dense, "none, or the first layers from 0 on, in order")
    if every > 1 and dense:
        raise RooftopError(keys.field("mlp_only_layers"), dense, f"none with a decoder_sparse_step of {every}")
    d_shared = keys.whole("shared_expert_intermediate_size", 0, least=0) if shared else 0
    return MoE(
        experts=keys.whole(keys.first("num_experts", "num_local_experts")),
        active=keys.whole("num_experts_per_tok"),
        d_ff=keys.whole("moe_intermediate_size"),
        shared_d_ff=d_shared,
        shared_gate=d_shared > 0,
        dense_layers=len(dense) or every - 1,
        every=every,
        normalise=keys.flag("norm_topk_prob", normalise),
    )


def _qwen2_moe(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=16, max_seq_len=32_768)
    first = keys.whole("max_window_layers", 28, least=0)
    windows = windows_of(keys, fields["layers"], switched_window(keys), lambda layer: layer >= first)
    moe = _qwen_experts(keys, normalise=False, shared=True)
    bias = {"qkv_bias": keys.flag("qkv_bias", True)}
    return fields | rotary(keys, fields["max_seq_len"]) | bias | {"layer_windows": windows, "moe": moe}


def _qwen3_moe(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=4, max_seq_len=32_768)
    keys.ignore("max_window_layers")
    keys.only("use_qk_norm", True)
    keys.only("shared_expert_intermediate_size", 0)
    moe = _qwen_experts(keys, normalise=False, shared=False)
    fields |= rotary(keys, fields["max_seq_len"]) | same_window(keys, fields["layers"], switched_window(keys))
    return fields | attention_bias(keys) | {"qk_norm": "head", "moe": moe}


def _qwen_delta(keys: Keys, d_ff: Any = REQUIRED) -> Fields:
    """Fields that Qwen3-Next and Qwen3.5 share: three layers of gated delta rules to one of gated attention."""
    if d_ff is not REQUIRED:
        keys = keys if keys.has("intermediate_size") else with_keys(keys, intermediate_size=d_ff)
    fields = decoder(keys, kv_heads=2, max_seq_len=32_768, d_head=256)
    every = keys.whole("full_attention_interval", 4)
    kinds = {"linear_attention": "gated_delta", "full_attention": "attention"}
    default = [
        "full_attention" if (layer + 1) % every == 0 else "linear_attention" for layer in range(fields["layers"])
    ]
    types = keys.array("layer_types", default)
    for kind in types:
        if kind not in kinds:
            raise RooftopError(keys.field("layer_types"), kind, " or ".join(kinds))
    delta = GatedDelta(
        key_heads=keys.whole("linear_num_key_heads", 16),
        value_heads=keys.whole("linear_num_value_heads", 32),
        d_key=keys.whole("linear_key_head_dim", 128),
        d_value=keys.whole("linear_value_head_dim", 128),
        conv=keys.whole("linear_conv_kernel_dim", 4),
    )
    keys.only("mamba_ssm_dtype", "float32")
    keys.only("attn_output_gate", True)
    mixers = tuple(kinds[kind] for kind in types)
    fields |= {"mixers": mixers} | ({"gated_delta": delta} if "gated_delta" in mixers else {})
    fields |= {"qk_norm": "head", "norm_offset": True, "attn_gate": True}
    return joined_fields(fields, attention_bias(keys), partial_rotary(keys, fields, 0.25))


def _qwen3_next(keys: Keys) -> Fields:
    return _qwen_delta(keys, d_ff=5632) | {"moe": _qwen_experts(keys, normalise=True, shared=True)}


def _qwen3_5_moe(keys: Keys) -> Fields:
    return _qwen_delta(keys, d_ff=512) | {"moe": _qwen_experts(keys, normalise=True, shared=True)}


def _on_three_axes(read: Reader) -> Reader:
    """A reader of the language model of a multimodal one, whose rotations have three axes.

    Positions of text are the same along all three, whatever shares these have.
    """

    def fields_of(keys: Keys) -> Fields:
        for key in ("rope_parameters", "rope_scaling"):
            if keys.has(key):
                keys.inner(key).ignore("mrope_section", "mrope_interleaved")
        return read(keys)

    return fields_of


#: Readers by ``model_type``.
FAMILIES: Mapping[str, Reader] = {
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_5_moe_text": _on_three_axes(_qwen3_5_moe),
    "qwen3_5_text": _on_three_axes(_qwen_delta),
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_vl_moe_text": _on_three_axes(_qwen3_moe),
    "qwen3_vl_text": _on_three_axes(_qwen3),
}
