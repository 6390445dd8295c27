"""OLMo and EXAONE, which normalise the results of most layers, not their inputs."""

from __future__ import annotations

from collections.abc import Mapping

from rooftop.models.config import MoE
from rooftop.models.families.keys import Keys
from rooftop.models.families.parts import (
    Fields,
    Reader,
    attention_bias,
    decoder,
    joined_fields,
    layer_norm,
    local_rotary,
    rotary,
    unless,
    windows_of,
    with_keys,
)


def _olmo(keys: Keys) -> Fields:
    fields = decoder(keys, norm_eps=1e-5, eps="layer_norm_eps")
    clipped = unless(keys, "clip_qkv", None, "clipped queries, keys and values")
    return joined_fields(
        fields, rotary(keys, fields["max_seq_len"]), attention_bias(keys), layer_norm(scale=False), clipped
    )


def _olmo2(keys: Keys, theta: float = 1e4) -> Fields:
    fields = decoder(keys, norm_eps=1e-5) | {"norm_placement": "post", "qk_norm": "width"}
    return fields | rotary(keys, fields["max_seq_len"], theta) | attention_bias(keys)


def _olmo3(keys: Keys) -> Fields:
    fields = _olmo2(keys, 5e5)
    window = keys.whole("sliding_window", 4096, null=None)
    windows = windows_of(keys, fields["layers"], window, lambda layer: (layer + 1) % 4 != 0)
    local = local_rotary(with_keys(keys, rope_local_base_freq=fields["rope_theta"]))
    same = local["rope_local_theta"] == fields["rope_theta"] and "rope_scaling" not in fields
    return fields | {"layer_windows": windows} | ({} if same else local)


def _olmoe(keys: Keys, norm_eps: float = 1e-5, theta: float = 1e4) -> Fields:
    fields = decoder(keys, max_seq_len=4096, norm_eps=norm_eps) | {"qk_norm": "width"}
    clipped = unless(keys, "clip_qkv", None, "clipped queries, keys and values")
    experts, active = keys.whole("num_experts", 64), keys.whole("num_experts_per_tok", 8)
    normalise = keys.flag("norm_topk_prob", False)
    moe = MoE(experts=experts, active=active, d_ff=fields["d_ff"], normalise=normalise)
    return joined_fields(
        fields, rotary(keys, fields["max_seq_len"], theta), attention_bias(keys), clipped, {"moe": moe}
    )


def _flex_olmo(keys: Keys) -> Fields:
    return _olmoe(keys, 1e-6, 5e5) | {"norm_placement": "post"}


def _exaone4(keys: Keys) -> Fields:
    fields = decoder(keys, norm_eps=1e-5) | {"norm_placement": "post", "qk_norm": "head"}
    window = keys.whole("sliding_window", 4096, null=None)
    pattern = keys.data.get("sliding_window_pattern", 4)
    keys.ignore("sliding_window_pattern")
    if isinstance(pattern, str):  # one letter for each layer of a period: L with a window, G without
        rule = [letter == "L" for letter in pattern]
    else:
        rule = [(layer + 1) % pattern != 0 for layer in range(pattern)] if pattern else [False]
    layers = fields["layers"]
    windows = windows_of(keys, layers, window, lambda layer: rule[layer % len(rule)] and layer != layers - 1)
    if window is not None:
        fields["rope_layers"] = tuple(size is not None for size in windows)
    return fields | {"layer_windows": windows} | rotary(keys, fields["max_seq_len"])


#: Readers by ``model_type``.
FAMILIES: Mapping[str, Reader] = {
    "exaone4": _exaone4,
    "flex_olmo": _flex_olmo,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
}
