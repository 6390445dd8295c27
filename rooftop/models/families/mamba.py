"""Mamba, and families with state spaces in some or all of their layers."""

from __future__ import annotations

from collections.abc import Mapping

from rooftop.core.errors import RooftopError
from rooftop.models.config import MOST_LAYERS, Mamba, MoE
from rooftop.models.families.keys import Keys
from rooftop.models.families.parts import (
    Fields,
    Reader,
    all_biases,
    decoder,
    joined_fields,
    partial_rotary,
    rotary,
    unless,
)


def mamba_layers(keys: Keys, fields: Fields, layers: list[bool], *, beside: bool = False) -> Fields:
    """Mamba-2 in some layers, in place of attention or ``beside`` it."""
    keys.ignore("time_step_limit", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank")
    d_inner = keys.whole("mamba_d_ssm", keys.whole("mamba_expand", 2) * fields["d_model"])
    heads = keys.whole("mamba_n_heads", 128)
    if keys.data.get("mamba_d_head") not in (None, "auto", d_inner // heads):
        raise RooftopError(keys.field("mamba_d_head"), keys.data["mamba_d_head"], f"{d_inner} channels / {heads} heads")
    keys.ignore("mamba_d_head")
    mamba = Mamba(
        d_inner=d_inner,
        d_state=keys.whole("mamba_d_state", 256),
        conv=keys.whole("mamba_d_conv", 4),
        heads=heads,
        groups=keys.whole("mamba_n_groups", 1),
        norms=keys.flag("mamba_rms_norm", False) if beside else True,
        conv_bias=keys.flag("mamba_conv_bias", True),
        proj_bias=keys.flag("mamba_proj_bias", False),
    )
    with_mamba = "attention+mamba" if beside else "mamba"
    mixers = tuple(with_mamba if here else "attention" for here in layers)
    return {"mixers": mixers} | ({"mamba": mamba} if any(layers) else {})


def _bamba(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=262_144, norm_eps=1e-5) | all_biases(keys)
    attention = keys.array("attn_layer_indices", [])
    keys.ignore("layer_types", "layers_block_type", "attn_rotary_emb")
    rope = partial_rotary(keys, fields, 0.5)
    return fields | rope | mamba_layers(keys, fields, [layer not in attention for layer in range(fields["layers"])])


def _falcon_h1(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=8192, norm_eps=1e-5) | all_biases(keys)
    fields |= {"attn_out_bias": fields["qkv_bias"]}
    keys.ignore("mamba_norm_before_gate", "mamba_use_mlp", "attn_layer_indices", "mlp_expansion_factor")
    keys.only("projectors_bias", False)
    names = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
    scales = {f"{name}_multiplier": 1.0 for name in names} | {
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }
    parts = [unless(keys, key, usual, key.replace("_", " ")) for key, usual in scales.items()]
    mixers = mamba_layers(keys, fields, [True] * fields["layers"], beside=True)
    return joined_fields(fields, mixers, rotary(keys, fields["max_seq_len"]), *parts)


def _jamba(keys: Keys) -> Fields:
    fields = decoder(keys, kv_heads=8, max_seq_len=262_144) | {"positions": "none"}
    period, offset = keys.whole("attn_layer_period", 8), keys.whole("attn_layer_offset", 4, least=0)
    keys.ignore("layer_types", "layers_block_type", "sliding_window", "calc_logits_for_entire_prompt")
    mamba = Mamba(
        d_inner=keys.whole("mamba_expand", 2) * fields["d_model"],
        d_state=keys.whole("mamba_d_state", 16),
        conv=keys.whole("mamba_d_conv", 4),
        step_rank=keys.whole("mamba_dt_rank", -(-fields["d_model"] // 16)),
        norms=True,
        conv_bias=keys.flag("mamba_conv_bias", True),
        proj_bias=keys.flag("mamba_proj_bias", False),
    )
    keys.only("mamba_inner_layernorms", True)
    mixers = tuple("attention" if layer % period == offset else "mamba" for layer in range(fields["layers"]))
    fields |= {"mixers": mixers} | ({"mamba": mamba} if "mamba" in mixers else {})
    experts, active = keys.whole("num_experts", 16), keys.whole("num_experts_per_tok", 2)
    every, first = keys.whole("expert_layer_period", 2), keys.whole("expert_layer_offset", 1, least=0)
    if experts == 1:
        return fields
    moe = MoE(experts=experts, active=active, d_ff=fields["d_ff"], normalise=False, dense_layers=first, every=every)
    return fields | {"moe": moe}


def _mamba1(keys: Keys) -> Fields:
    d_model, expand = keys.whole("hidden_size"), keys.whole("expand", 2)
    d_inner = keys.whole("intermediate_size", expand * d_model)
    mamba = Mamba(
        d_inner=d_inner,
        d_state=keys.whole("state_size", 16),
        conv=keys.whole("conv_kernel", 4),
        step_rank=_auto(keys, "time_step_rank", -(-d_model // 16)),
        conv_bias=keys.flag("use_conv_bias", True),
        proj_bias=keys.flag("use_bias", False),
    )
    keys.ignore("d_model", "d_inner", "ssm_cfg", "n_layer", "rms_norm", "fused_add_norm", "time_step_scale")
    keys.ignore("time_step_init_scheme", "pad_vocab_size_multiple")
    keys.ignore("time_step_rank")
    return _mixers_alone(keys, mamba, heads=1, d_head=2) | {"tied_embeddings": keys.flag("tie_word_embeddings", True)}


def _auto(keys: Keys, key: str, default: int) -> int:
    """A whole number, or the default where the file says auto."""
    return default if keys.data.get(key) == "auto" else int(keys.whole(key, default))


def _falcon_mamba(keys: Keys) -> Fields:
    eps = unless(keys, "mixer_rms_eps", None, "norms of steps and of state vectors")
    return _mamba1(keys) | {"not_run": eps.get("not_run", ("norms of steps and of state vectors",))}


def _mamba2(keys: Keys) -> Fields:
    heads, d_head = keys.whole("num_heads", 128), keys.whole("head_dim", 64)
    keys.only("expand", heads * d_head / keys.whole("hidden_size"))
    keys.only("rms_norm", True)
    mamba = Mamba(
        d_inner=heads * d_head,
        d_state=keys.whole("state_size", 128),
        conv=keys.whole("conv_kernel", 4),
        heads=heads,
        groups=keys.whole("n_groups", 8),
        norms=True,
        conv_bias=keys.flag("use_conv_bias", True),
        proj_bias=keys.flag("use_bias", False),
    )
    keys.ignore("norm_before_gate")
    return _mixers_alone(keys, mamba, heads=heads, d_head=d_head)


def _mixers_alone(keys: Keys, mamba: Mamba, *, heads: int, d_head: int) -> Fields:
    """Layers of one state space each, without attention or MLP; heads are sizes that nothing uses."""
    keys.ignore("time_step_limit", "time_step_floor", "time_step_max", "time_step_min", "time_step_rank")
    keys.ignore("residual_in_fp32", "hidden_act", "layer_types")
    layers = keys.whole("num_hidden_layers", most=MOST_LAYERS)
    return {
        "layers": layers,
        "d_model": keys.whole("hidden_size"),
        "d_ff": mamba.d_inner,
        "heads": heads,
        "kv_heads": heads,
        "d_head": d_head,
        "vocab": keys.whole("vocab_size"),
        "max_seq_len": keys.whole("max_position_embeddings", 2**20),
        "mlp_matrices": 0,
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        "positions": "none",
        "mixers": ("mamba",) * layers,
        "mamba": mamba,
    }


#: Readers by ``model_type``.
FAMILIES: Mapping[str, Reader] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _falcon_mamba,
    "jamba": _jamba,
    "mamba": _mamba1,
    "mamba2": _mamba2,
}
