"""Parts of a ModelConfig that families share: sizes of a decoder, biases, rotations, windows, leading dense layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.models.config import MOST_LAYERS, ROPE_SCALINGS, RopeScaling
from rooftop.models.families.keys import REQUIRED, Keys

Fields = dict[str, Any]
#: Fields of a ModelConfig, all but name and family, from the keys of a file.
Reader = Callable[[Keys], Fields]

#: Activations by their names in files.
ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def decoder(
    keys: Keys,
    *,
    kv_heads: int | None = None,
    max_seq_len: int = 2048,
    d_head: int | None = None,
    heads: Any = REQUIRED,
    vocab: Any = REQUIRED,
    norm_eps: float = 1e-6,
    tied: bool = False,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    eps: str = "rms_norm_eps",
) -> Fields:
    """The fields that most families spell alike; the arguments are the family's defaults and spellings."""
    d_model, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads", heads)
    return {
        "layers": keys.whole("num_hidden_layers", most=MOST_LAYERS),
        "d_model": d_model,
        "d_ff": keys.whole("intermediate_size"),
        "heads": heads,
        "kv_heads": keys.whole("num_key_value_heads", kv_heads or heads),
        "d_head": keys.whole("head_dim", d_head or d_model // heads),
        "vocab": keys.whole("vocab_size", vocab),
        "max_seq_len": keys.whole("max_position_embeddings", max_seq_len),
        "activation": keys.name(activation[0], ACTIVATIONS, activation[1]),
        "norm_eps": keys.number(eps, norm_eps),
        "tied_embeddings": keys.flag("tie_word_embeddings", tied),
    }


def attention_bias(keys: Keys, default: bool = False) -> Fields:
    """Return the biases of attention: one key switches all of them."""
    bias = keys.flag("attention_bias", default)
    return {"qkv_bias": bias, "attn_out_bias": bias}


def all_biases(keys: Keys) -> Fields:
    """Return the biases of attention and of the MLP, each switched by a key."""
    return attention_bias(keys) | {"mlp_bias": keys.flag("mlp_bias", False)}


def layer_norm(*, bias: bool = True, scale: bool = True) -> Fields:
    """Return the fields of layer norms in place of RMS norms."""
    return {"norm": "layer", "norm_bias": bias, "norm_scale": scale}


def rope_keys(keys: Keys, partial: bool = False) -> Keys:
    """Rotary settings: ``rope_scaling`` in files before 2025, ``rope_parameters`` since then, or an empty mapping."""
    if not partial:
        keys.only("partial_rotary_factor", 1)
    for key in ("rope_scaling", "rope_parameters"):
        if keys.has(key):
            inner = keys.inner(key)
            inner = inner.inner("full_attention") if inner.has("full_attention") else inner
            if not partial:
                inner.only("partial_rotary_factor", 1)
            return inner
    return Keys({}, keys.where)


def rotary(keys: Keys, max_seq_len: int, theta: float = 1e4, partial: bool = False) -> Fields:
    """Return the base of rotations, by default ``theta``, and their scaling."""
    settings = rope_keys(keys, partial)
    base = keys.number(keys.first("rope_theta", "rotary_emb_base"), theta)
    fields: Fields = {"rope_theta": settings.number("rope_theta", base)}
    kind_key = "rope_type" if settings.has("rope_type") else "type"
    settings.ignore("type", "rope_type", "attn_factor")
    kind = settings.name(kind_key, {name: name for name in ("default", "longrope", *ROPE_SCALINGS)}, "default")
    if kind == "longrope":
        settings.ignore("short_factor", "long_factor", "short_mscale", "long_mscale", "factor", "attention_factor")
        settings.ignore("original_max_position_embeddings")
        fields["not_run"] = ("LongRoPE",)
    elif kind != "default":
        fields["rope_scaling"] = _rope_scaling(settings, kind, max_seq_len)
    return fields


def partial_rotary(keys: Keys, fields: Fields, share: float, theta: float = 1e4) -> Fields:
    """Rotary settings of a family that rotates the first part of a head, by default a ``share`` of it."""
    settings = rope_keys(keys, partial=True)
    share = keys.number(keys.first("partial_rotary_factor", "rotary_pct", "rope_pct"), share)
    dims = int(fields["d_head"] * settings.number("partial_rotary_factor", share))
    whole = {"rotary_dims": dims} if dims != fields["d_head"] else {}
    return rotary(keys, fields["max_seq_len"], theta, partial=True) | whole


def _rope_scaling(keys: Keys, kind: str, max_seq_len: int) -> RopeScaling:
    fields: Fields = {"kind": kind, "factor": keys.number("factor")}
    keys.ignore("original_max_position_embeddings")
    if kind in ("llama3", "yarn"):
        fields["original_max_seq_len"] = keys.whole("original_max_position_embeddings", max_seq_len)
    if kind == "llama3":
        fields |= {name: keys.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        some, all_dims = keys.number("mscale", 0), keys.number("mscale_all_dim", 0)
        attention = mscale(fields["factor"], 1)
        if some and all_dims:
            attention = mscale(fields["factor"], some) / mscale(fields["factor"], all_dims)
        fields |= {
            "beta_fast": keys.number("beta_fast", 32.0),
            "beta_slow": keys.number("beta_slow", 1.0),
            "attention_factor": keys.number("attention_factor", attention),
            "truncate": keys.flag("truncate", True),
        }
    return RopeScaling(**fields)


def mscale(factor: float, weight: float) -> float:
    """YaRN's temperature (Peng et al. 2023, equation 22), its logarithm weighted as DeepSeek does."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def windows_of(
    keys: Keys,
    layers: int,
    window: int | None,
    windowed: Callable[[int], bool],
    kind: str = "sliding_attention",
) -> tuple[int | None, ...]:
    """The window of each layer, from ``layer_types``, where ``kind`` has one, or else from the family's rule."""
    types = keys.array("layer_types", None)
    if types is None:
        return tuple(window if windowed(layer) else None for layer in range(layers))
    for named in types:
        if named not in ("full_attention", kind):
            raise RooftopError(keys.field("layer_types"), named, f"full_attention or {kind}")
    if window is None and kind in types:
        raise RooftopError(keys.field("sliding_window"), None, f"a whole number: layer_types has {kind}")
    return tuple(window if named == kind else None for named in types)


def same_window(keys: Keys, layers: int, window: int | None) -> Fields:
    """Return one window for all layers."""
    _usual_layers(keys, "full_attention", "sliding_attention")
    return {"layer_windows": (window,) * layers}


def _usual_layers(keys: Keys, *kinds: str) -> None:
    """Refuse ``layer_types`` that differ from layer to layer, in families whose layers are alike."""
    types = keys.array("layer_types", None)
    if types is not None and (len({*types}) > 1 or types[0] not in kinds):
        raise RooftopError(keys.field("layer_types"), types[0] if types else [], f"all {' or all '.join(kinds)}")


def dense_first(keys: Keys, layers: int, first: int) -> int:
    """Dense layers before those of experts: ``mlp_layer_types`` where a file has it, else ``first``."""
    types = keys.array("mlp_layer_types", None)
    if types is None:
        return first
    dense: int = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise RooftopError(keys.field("mlp_layer_types"), "...", f"{layers} entries: dense, then sparse")
    return dense


def joined_fields(*parts: Fields) -> Fields:
    """Fields of several parts; what no program runs adds up."""
    fields: Fields = {}
    for part in parts:
        both = (*fields.get("not_run", ()), *part.get("not_run", ()))
        fields |= part
        if both:
            fields["not_run"] = both
    return fields


def unless(keys: Keys, key: str, usual: Any, name: str) -> Fields:
    """A part ``name`` of the computation that no program runs, unless a key has its usual value."""
    keys.ignore(key)
    return {} if keys.data.get(key, usual) in (usual, None) else {"not_run": (name,)}


def rotated_layers(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Layers whose positions are rotated: ``no_rope_layers`` has a 1 for each, or every n-th is not."""
    every = keys.whole("no_rope_layer_interval", 4)
    rotated = keys.array("no_rope_layers", None) or [(layer + 1) % every != 0 for layer in range(layers)]
    return tuple(bool(entry) for entry in rotated)


def one_of_layers(keys: Keys, key: str, default: int) -> int:
    """A whole number, or a list with the same one for each layer."""
    value = keys.data.get(key)
    keys.ignore(key)
    if isinstance(value, list) and value and value == value[:1] * len(value):
        keys = Keys({**keys.data, key: value[0]}, keys.where, keys.prefix)
    size: int = keys.whole(key, default)
    return size


def use_bias(keys: Keys, default: bool) -> Fields:
    """Return all biases of layers, which one key switches."""
    return dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), keys.flag("use_bias", default))


def switched_window(keys: Keys) -> int | None:
    """The window of a file that says by another key if it is used."""
    window: int | None = keys.whole("sliding_window", 4096, null=None, least=0)
    return window if keys.flag("use_sliding_window", False) else None


def with_keys(keys: Keys, **more: Any) -> Keys:
    """The same keys, and ``more`` that the file does not have."""
    keys.data = {**keys.data, **more}
    return keys


def local_rotary(keys: Keys) -> Fields:
    """The base of windowed layers' rotations, which are not scaled."""
    local = keys.number("rope_local_base_freq", 1e4)
    if keys.has("rope_parameters") and keys.inner("rope_parameters").has("sliding_attention"):
        settings = keys.inner("rope_parameters").inner("sliding_attention")
        settings.only("rope_type", "default")
        local = settings.number("rope_theta", local)
    return {"rope_local_theta": local}
