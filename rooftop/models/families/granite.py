"""Granite: LLaMA with scaled residuals, its experts, and its layers of state spaces."""

from __future__ import annotations

from collections.abc import Mapping

from rooftop.models.config import MoE
from rooftop.models.families.keys import Keys
from rooftop.models.families.mamba import mamba_layers
from rooftop.models.families.parts import Fields, Reader, attention_bias, decoder, rotary, with_keys


def _granite(keys: Keys) -> Fields:
    fields = decoder(keys) | attention_bias(keys)
    fields |= {
        "embed_scale": keys.number("embedding_multiplier", 1.0),
        "residual_scale": keys.number("residual_multiplier", 1.0),
        "logits_scale": 1 / keys.number("logits_scaling", 1.0),
        "query_scale": keys.number("attention_multiplier", 1.0),
    }
    return fields | rotary(keys, fields["max_seq_len"]) | {"mlp_bias": keys.flag("mlp_bias", False)}


def _granitemoe(keys: Keys) -> Fields:
    fields = _granite(keys)
    experts, active = keys.whole("num_local_experts", 8, least=0), keys.whole("num_experts_per_tok", 2, least=0)
    shared = keys.whole("shared_intermediate_size", 0, least=0)
    if not experts:  # only the shared one is left
        return fields | {"d_ff": shared}
    return fields | {"moe": MoE(experts=experts, active=active, d_ff=fields["d_ff"], shared_d_ff=shared)}


def _granitehybrid(keys: Keys) -> Fields:
    fields = _granitemoe(with_keys(keys, shared_intermediate_size=keys.data.get("shared_intermediate_size", 1024)))
    types = keys.array(keys.first("layer_types", "layers_block_type"), ["mamba"] * fields["layers"])
    fields |= mamba_layers(keys, fields, [kind in ("mamba", "linear_attention") for kind in types])
    keys.only("normalization_function", "rmsnorm")
    keys.ignore("init_method", "position_embedding_type")
    rope = keys.data.get("position_embedding_type") == "rope"
    return fields | {"positions": "rope" if rope else "none"}


#: Readers by ``model_type``.
FAMILIES: Mapping[str, Reader] = {
    "granite": _granite,
    "granitemoe": _granitemoe,
    "granitemoehybrid": _granitehybrid,
    "granitemoeshared": _granitemoe,
}
