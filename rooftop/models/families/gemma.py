"""Gemma: scaled embeddings, norms with an offset, and windows in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftop.models.config import OtherWeight
from rooftop.models.families.keys import Keys
from rooftop.models.families.parts import (
    Fields,
    Reader,
    attention_bias,
    decoder,
    local_rotary,
    one_of_layers,
    rotary,
    windows_of,
    with_keys,
)


def _gemma(keys: Keys) -> Fields:
    keys.ignore("hidden_activation")
    fields = decoder(
        keys, kv_heads=16, max_seq_len=8192, d_head=256, tied=True, activation=("hidden_act", "gelu_pytorch_tanh")
    )
    # Published files say gelu where the approximation is meant.
    fields |= {"activation": "gelu_tanh"} if keys.data.get("hidden_activation") != "gelu" else {}
    fields |= {"embed_scale": fields["d_model"] ** 0.5, "norm_offset": True}
    keys.only("use_bidirectional_attention", False)
    return fields | rotary(keys, fields["max_seq_len"]) | attention_bias(keys)


def _gemma_windows(keys: Keys, every: int, softcaps: tuple[float | None, float | None], **defaults: Any) -> Fields:
    """Fields that Gemma 2 and 3 share: one layer in ``every`` is global, the others have a window."""
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    keys.ignore("hidden_act")
    usual: Fields = {"kv_heads": 4, "d_head": 256, "tied": True, "activation": activation}
    fields = decoder(keys, **(usual | defaults))
    keys.only("use_bidirectional_attention", False)
    window = keys.whole("sliding_window", 4096, null=None)
    return (
        fields
        | attention_bias(keys)
        | {
            "layer_windows": windows_of(keys, fields["layers"], window, lambda layer: (layer + 1) % every != 0),
            "attn_softcap": keys.number("attn_logit_softcapping", softcaps[0], null=None),
            "final_softcap": keys.number("final_logit_softcapping", softcaps[1], null=None),
            "query_scale": keys.whole("query_pre_attn_scalar", 256) ** -0.5,
            "embed_scale": fields["d_model"] ** 0.5,
            "norm_offset": True,
            "norm_placement": "sandwich",
        }
    )


def _gemma2(keys: Keys) -> Fields:
    fields = _gemma_windows(keys, 2, (50.0, 30.0), max_seq_len=8192)
    return fields | rotary(keys, fields["max_seq_len"])


def _vaultgemma(keys: Keys) -> Fields:
    return _gemma2(keys) | {"norm_placement": "pre"}


def _gemma3_text(keys: Keys) -> Fields:
    every = keys.whole(keys.first("sliding_window_pattern", "_sliding_window_pattern"), 6)
    fields = _gemma_windows(keys, every, (None, None), max_seq_len=131_072, heads=8, vocab=262_208)
    return fields | rotary(keys, fields["max_seq_len"], 1e6) | {"qk_norm": "head"} | local_rotary(keys)


def _gemma3(keys: Keys) -> Fields:
    # Vision is another model, whose tokens come in place of some of the text's.
    keys.ignore(*keys.data)
    return _gemma3_text(keys.inner("text_config"))


def _gemma3n(keys: Keys) -> Fields:
    """Gemma 3n: four streams (AltUp), of which layers read one; low-rank shortcuts (LAuReL); embeddings per layer."""
    d_ff = one_of_layers(keys, "intermediate_size", 16_384)
    keys = with_keys(keys, intermediate_size=d_ff)
    keys.only("query_pre_attn_scalar", 256)
    fields = _gemma_windows(keys, 5, (None, 30.0), max_seq_len=32_768, kv_heads=2, heads=8, vocab=262_400)
    layers, d = fields["layers"], fields["d_model"]
    width, rank = keys.whole("hidden_size_per_layer_input", 256), keys.whole("laurel_rank", 64)
    streams = keys.whole("altup_num_inputs", 4)
    keys.ignore("altup_active_idx", "altup_coef_clip", "altup_correct_scale", "activation_sparsity_pattern")
    matmuls = {
        "layer gate": ((d, width), layers),
        "layer projection": ((width, d), layers),
        "LAuReL down": ((d, rank), layers),
        "LAuReL up": ((rank, d), layers),
        "AltUp router": ((d, streams), layers),
        "AltUp prediction": ((streams, streams**2), layers),
        "AltUp correction": ((streams, streams), layers),
        "streams in": ((d, d), streams - 1),
        "streams out": ((d, d), streams - 1),
        "layer inputs": ((d, layers * width), 1),
    }
    vectors = {"layer norm": (d, layers), "LAuReL norm": (d, layers), "AltUp norm": (d, layers)}
    vectors |= {"AltUp scale": (d, layers), "layer inputs norm": (width, 1)}
    table = (keys.whole("vocab_size_per_layer_input", 262_144), layers * width)
    others = (
        OtherWeight(name="embeddings per layer", shape=table),
        *(OtherWeight(name=name, shape=shape, layers=n, matmul=True) for name, (shape, n) in matmuls.items()),
        *(OtherWeight(name=name, shape=(size,), layers=n) for name, (size, n) in vectors.items()),
    )
    fields |= {"shared_kv_layers": keys.whole("num_kv_shared_layers", 15, least=0), "norm_offset": False}
    fields |= {"qk_norm": "head", "query_scale": 1.0, "others": others}
    return fields | rotary(keys, fields["max_seq_len"], 1e6) | local_rotary(keys)


#: Readers by ``model_type``.
FAMILIES: Mapping[str, Reader] = {
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "gemma3n_text": _gemma3n,
    "vaultgemma": _vaultgemma,
}
