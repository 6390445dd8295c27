"""A ModelConfig from a Hugging Face ``config.json``, and the models that ship with rooftop, which are such files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.models.config import LARGEST_SIZE, MLA, MOST_LAYERS, ROPE_SCALINGS, ModelConfig, MoE, RopeScaling

_PRESETS = resources.files("rooftop.models") / "presets"


def from_huggingface(source: Mapping[str, Any] | str | Path, name: str | None = None) -> ModelConfig:
    """The model that a ``config.json`` describes, given as its path, its directory or its content.

    ``name`` is by default that of the directory, or of the file if it is not called config.json. Raises RooftopError
    naming file and key on a file that cannot be read, a missing key, a wrong type or an unknown ``model_type``.
    """
    if isinstance(source, Mapping):
        data, where, source_name = source, "config", "config"
    else:
        path = Path(source, "config.json") if os.path.isdir(source) else Path(source)
        data, where = _read(path), str(path)
        source_name = path.resolve().parent.name if path.name == "config.json" else path.stem
    keys = Keys(data, where)
    family = keys.text("model_type")
    if family not in FAMILIES:
        raise unknown(keys.field("model_type"), family, FAMILIES)
    try:
        return ModelConfig(name=name or source_name or "config", family=family, **FAMILIES[family](keys))
    except RooftopError as error:
        if error.field.startswith(f"{where}:"):
            raise
        # The parts of a ModelConfig check themselves and do not know which file they came from.
        raise RooftopError(keys.field(error.field), error.given, error.accepted) from None


def presets() -> tuple[str, ...]:
    """The names of the models that ship with rooftop, sorted."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _PRESETS.iterdir() if file.name.endswith(".json")))


def preset_source(name: str) -> str | None:
    """Source of the preset with this name or alias; None if it has none."""
    preset = _preset_name(name)
    return None if preset is None else str(_preset(preset)["source"])


def load_model(name_or_path: str) -> ModelConfig:
    """A model by the name or alias of a preset, or by the path of a config.json or of a directory that holds one.

    Case does not matter in names. Raises RooftopError, with close matches, on what is neither.
    """
    preset = _preset_name(name_or_path)
    if preset is not None:
        return from_huggingface(_preset(preset), preset)
    if name_or_path.endswith(".json") or os.path.exists(name_or_path):
        return from_huggingface(name_or_path)
    raise RooftopError("model", name_or_path, f"{unknown('', name_or_path, presets()).accepted}; or a config.json")


def _preset_name(name: str) -> str | None:
    return _aliases().get(name.lower())


@cache
def _aliases() -> Mapping[str, str]:
    """Lower-case name or alias -> preset. The Hugging Face repository of a preset is an alias of it."""
    aliases = {}
    for name in presets():
        data = _preset(name)
        for alias in (name, data.get("_name_or_path", name), *data.get("aliases", ())):
            aliases[alias.lower()] = name
    return aliases


@cache
def _preset(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((_PRESETS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def _read(path: Path) -> Any:
    accepted = "a Hugging Face config.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RooftopError(str(path), "no such file", accepted) from None
    except OSError as error:
        raise RooftopError(str(path), error.strerror or "unreadable", accepted) from None
    except (ValueError, RecursionError) as error:
        raise RooftopError(str(path), "malformed JSON", f"{accepted} ({error})") from None


#: The default of a key that has none.
REQUIRED: Any = object()


class Keys:
    """One JSON object of the file ``where``; ``prefix`` is the path to it inside the file ('text_config.').

    A key that is absent takes its default, and so does ``null``, unless the caller says what ``null`` means. Every
    method raises RooftopError on a value of another type or out of range, and on a required key that is absent.
    """

    def __init__(self, data: Any, where: str, prefix: str = "") -> None:
        self.where, self.prefix = where, prefix
        if not isinstance(data, Mapping):
            raise RooftopError(self.field(""), data, "a JSON object")
        self.data = data

    def field(self, key: str) -> str:
        """Name of ``key`` in errors."""
        return f"{self.where}: {self.prefix}{key}".rstrip(": .")

    def whole(
        self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED, least: int = 1, most: int = LARGEST_SIZE
    ) -> Any:
        """A whole number from ``least`` to ``most``."""
        accepted = f"a whole number from {least} to {most:,}"
        value = self._get(key, default, null, int, accepted)
        if key in self.data and value is not None and not least <= value <= most:
            raise RooftopError(self.field(key), value, accepted)
        return value

    def number(self, key: str, default: Any = REQUIRED, *, null: Any = REQUIRED) -> Any:
        """A finite number that is not negative."""
        value = self._get(key, default, null, (int, float), "a number")
        if value is not None and not 0 <= value < math.inf:
            raise RooftopError(self.field(key), value, "a number that is not negative")
        return value

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        return bool(self._get(key, default, REQUIRED, bool, "true or false"))

    def text(self, key: str, default: Any = REQUIRED) -> Any:
        """A text."""
        return self._get(key, default, REQUIRED, str, "a text")

    def name(self, key: str, known: Mapping[str, Any], default: Any = REQUIRED) -> Any:
        """Return the value of ``known`` for the text under ``key``."""
        text = self.text(key, default)
        if text not in known:
            raise unknown(self.field(key), text, known)
        return known[text]

    def array(self, key: str, default: Any = REQUIRED) -> Any:
        """A list."""
        return self._get(key, default, REQUIRED, list, "a list")

    def inner(self, key: str) -> Keys:
        """The JSON object under ``key``."""
        data = self._get(key, REQUIRED, REQUIRED, Mapping, "a JSON object")
        return Keys(data, self.where, f"{self.prefix}{key}.")

    def has(self, key: str) -> bool:
        """Return True if ``key`` is present and neither null nor empty."""
        return bool(self.data.get(key))

    def only(self, key: str, *accepted: Any) -> None:
        """Refuse a value other than ``accepted`` or null: it asks for something that nothing here can express."""
        value = self.data.get(key)
        if value is not None and value not in accepted:
            raise RooftopError(self.field(key), value, " or ".join(json.dumps(choice) for choice in accepted))

    def _get(self, key: str, default: Any, null: Any, kind: Any, accepted: str) -> Any:
        value = self.data.get(key)
        if value is None:
            meant = null if key in self.data and null is not REQUIRED else default
            if meant is REQUIRED:
                raise RooftopError(self.field(key), None, f"{accepted}; the key is required")
            return meant
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RooftopError(self.field(key), value, accepted)
        return value


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_LAYER_TYPES = {"full_attention": False, "sliding_attention": True}


def _decoder(
    keys: Keys,
    *,
    kv_heads: int | None,
    max_seq_len: int,
    d_head: int | None = None,
    heads: Any = REQUIRED,
    vocab: Any = REQUIRED,
    norm_eps: float = 1e-6,
    tied: bool = False,
    activation: tuple[str, str] = ("hidden_act", "silu"),
) -> dict[str, Any]:
    """The fields that all families but GPT-2 spell alike; the arguments are the family's defaults."""
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
        "activation": keys.name(activation[0], _ACTIVATIONS, activation[1]),
        "norm_eps": keys.number("rms_norm_eps", norm_eps),
        "tied_embeddings": keys.flag("tie_word_embeddings", tied),
    }


def _bias(keys: Keys, default: bool = False) -> dict[str, bool]:
    bias = keys.flag("attention_bias", default)
    return {"qkv_bias": bias, "attn_out_bias": bias}


def _rope_keys(keys: Keys) -> Keys:
    """Rotary settings: ``rope_scaling`` in files before 2025, ``rope_parameters`` since then, or an empty mapping."""
    keys.only("partial_rotary_factor", 1)
    for key in ("rope_scaling", "rope_parameters"):
        if keys.has(key):
            inner = keys.inner(key)
            inner = inner.inner("full_attention") if inner.has("full_attention") else inner
            inner.only("partial_rotary_factor", 1)
            return inner
    return Keys({}, keys.where)


def _rope(keys: Keys, max_seq_len: int, theta: float = 1e4) -> dict[str, Any]:
    settings = _rope_keys(keys)
    fields: dict[str, Any] = {"rope_theta": settings.number("rope_theta", keys.number("rope_theta", theta))}
    kind_key = "rope_type" if settings.has("rope_type") else "type"
    kind = settings.name(kind_key, {name: name for name in ("default", *ROPE_SCALINGS)}, "default")
    if kind != "default":
        fields["rope_scaling"] = _rope_scaling(settings, kind, max_seq_len)
    return fields


def _rope_scaling(keys: Keys, kind: str, max_seq_len: int) -> RopeScaling:
    fields: dict[str, Any] = {"kind": kind, "factor": keys.number("factor")}
    if kind in ("llama3", "yarn"):
        fields["original_max_seq_len"] = keys.whole("original_max_position_embeddings", max_seq_len)
    if kind == "llama3":
        fields |= {name: keys.number(name) for name in ("low_freq_factor", "high_freq_factor")}
    if kind == "yarn":
        some, all_dims = keys.number("mscale", 0), keys.number("mscale_all_dim", 0)
        attention = _mscale(fields["factor"], 1)
        if some and all_dims:
            attention = _mscale(fields["factor"], some) / _mscale(fields["factor"], all_dims)
        fields |= {
            "beta_fast": keys.number("beta_fast", 32.0),
            "beta_slow": keys.number("beta_slow", 1.0),
            "attention_factor": keys.number("attention_factor", attention),
            "truncate": keys.flag("truncate", True),
        }
    return RopeScaling(**fields)


def _mscale(factor: float, weight: float) -> float:
    """YaRN's temperature (Peng et al. 2023, equation 22), its logarithm weighted as DeepSeek does."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _windows(keys: Keys, layers: int, window: int | None, windowed: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer, from ``layer_types`` or else from the family's rule."""
    types = keys.array("layer_types", None)
    if types is None:
        return tuple(window if windowed(layer) else None for layer in range(layers))
    for kind in types:
        if kind not in _LAYER_TYPES:
            raise RooftopError(keys.field("layer_types"), kind, " or ".join(_LAYER_TYPES))
    if window is None and "sliding_attention" in types:
        raise RooftopError(keys.field("sliding_window"), None, "a whole number: layer_types has sliding_attention")
    return tuple(window if _LAYER_TYPES[kind] else None for kind in types)


def _same_window(keys: Keys, layers: int, window: int | None) -> dict[str, Any]:
    keys.only("layer_types")
    return {"layer_windows": (window,) * layers}


def _llama(keys: Keys) -> dict[str, Any]:
    fields = _decoder(keys, kv_heads=None, max_seq_len=2048)
    return fields | _rope(keys, fields["max_seq_len"]) | _bias(keys) | {"mlp_bias": keys.flag("mlp_bias", False)}


def _mistral(keys: Keys) -> dict[str, Any]:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072)
    window = keys.whole("sliding_window", 4096, null=None)
    return fields | _rope(keys, fields["max_seq_len"]) | _same_window(keys, fields["layers"], window)


def _mixtral(keys: Keys) -> dict[str, Any]:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072, norm_eps=1e-5)
    window = keys.whole("sliding_window", None)
    experts, active = keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")
    fields |= _rope(keys, fields["max_seq_len"], 1e6) | _same_window(keys, fields["layers"], window)
    return fields | {"moe": MoE(experts=experts, active=active, d_ff=fields["d_ff"])}


def _qwen_window(keys: Keys) -> int | None:
    window: int | None = keys.whole("sliding_window", 4096, null=None)
    return window if keys.flag("use_sliding_window", False) else None


def _qwen2(keys: Keys, d_head: int | None = None) -> dict[str, Any]:
    fields = _decoder(keys, kv_heads=32, max_seq_len=32_768, d_head=d_head)
    first = keys.whole("max_window_layers", 28, least=0)
    windows = _windows(keys, fields["layers"], _qwen_window(keys), lambda layer: layer >= first)
    return fields | _rope(keys, fields["max_seq_len"]) | {"layer_windows": windows, "qkv_bias": True}


def _qwen3(keys: Keys) -> dict[str, Any]:
    return _qwen2(keys, d_head=128) | _bias(keys) | {"qk_norm": True}


def _qwen3_moe(keys: Keys) -> dict[str, Any]:
    fields = _decoder(keys, kv_heads=4, max_seq_len=32_768)
    keys.only("decoder_sparse_step", 1)
    dense = keys.array("mlp_only_layers", [])
    if dense != list(range(len(dense))):
        raise RooftopError(keys.field("mlp_only_layers"), dense, "none, or the first layers from 0 on, in order")
    moe = MoE(
        experts=keys.whole("num_local_experts" if keys.has("num_local_experts") else "num_experts"),
        active=keys.whole("num_experts_per_tok"),
        d_ff=keys.whole("moe_intermediate_size"),
        dense_layers=len(dense),
        normalise=keys.flag("norm_topk_prob", False),
    )
    fields |= _rope(keys, fields["max_seq_len"]) | _same_window(keys, fields["layers"], _qwen_window(keys))
    return fields | _bias(keys) | {"qk_norm": True, "moe": moe}


def _gemma(keys: Keys, every: int, softcaps: tuple[float | None, float | None], **defaults: Any) -> dict[str, Any]:
    """Fields that Gemma 2 and 3 share: one layer in ``every`` is global, the others have a window."""
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    fields = _decoder(keys, kv_heads=4, d_head=256, tied=True, activation=activation, **defaults)
    keys.only("use_bidirectional_attention", False)
    window = keys.whole("sliding_window", 4096, null=None)
    return (
        fields
        | _bias(keys)
        | {
            "layer_windows": _windows(keys, fields["layers"], window, lambda layer: (layer + 1) % every != 0),
            "attn_softcap": keys.number("attn_logit_softcapping", softcaps[0], null=None),
            "final_softcap": keys.number("final_logit_softcapping", softcaps[1], null=None),
            "query_scale": keys.whole("query_pre_attn_scalar", 256) ** -0.5,
            "embed_scale": fields["d_model"] ** 0.5,
            "norm_offset": True,
            "norms_per_layer": 4,
        }
    )


def _gemma2(keys: Keys) -> dict[str, Any]:
    fields = _gemma(keys, 2, (50.0, 30.0), max_seq_len=8192)
    return fields | _rope(keys, fields["max_seq_len"])


def _gemma3_text(keys: Keys) -> dict[str, Any]:
    every = keys.whole("sliding_window_pattern", 6)
    fields = _gemma(keys, every, (None, None), max_seq_len=131_072, heads=8, vocab=262_208)
    local = keys.number("rope_local_base_freq", 1e4)
    if keys.has("rope_parameters") and keys.inner("rope_parameters").has("sliding_attention"):
        settings = keys.inner("rope_parameters").inner("sliding_attention")
        settings.only("rope_type", "default")
        local = settings.number("rope_theta", local)
    return fields | _rope(keys, fields["max_seq_len"], 1e6) | {"qk_norm": True, "rope_local_theta": local}


def _gemma3(keys: Keys) -> dict[str, Any]:
    return _gemma3_text(keys.inner("text_config"))


def _gpt_oss(keys: Keys) -> dict[str, Any]:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072, d_head=64, norm_eps=1e-5)
    window = keys.whole("sliding_window", 128, null=None)
    experts, active = keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")
    if not keys.has("rope_scaling") and not keys.has("rope_parameters"):
        keys = Keys({**keys.data, "rope_scaling": _GPT_OSS_ROPE}, keys.where, keys.prefix)
    return (
        fields
        | _rope(keys, fields["max_seq_len"], 150_000.0)
        | _bias(keys, default=True)
        | {
            "attention_sinks": True,
            "layer_windows": _windows(keys, fields["layers"], window, lambda layer: layer % 2 == 0),
            "swiglu_limit": keys.number("swiglu_limit", 7.0),
            "swiglu_alpha": keys.number("swiglu_alpha", 1.702),
            "moe": MoE(experts=experts, active=active, d_ff=fields["d_ff"], bias=True),
        }
    )


def _deepseek(keys: Keys, *, shared: int, dense: int, max_seq_len: int, **router: Any) -> dict[str, Any]:
    """Fields that DeepSeek-V2 and V3 share: latent attention, leading dense layers, shared experts."""
    fields = _decoder(keys, kv_heads=None, max_seq_len=max_seq_len)
    for key in ("attention_bias", "mlp_bias"):
        keys.only(key, False)
    keys.only("moe_layer_freq", 1)
    mla = MLA(
        q_rank=keys.whole("q_lora_rank", null=None),
        kv_rank=keys.whole("kv_lora_rank"),
        d_nope=keys.whole("qk_nope_head_dim"),
        d_rope=keys.whole("qk_rope_head_dim"),
        d_v=keys.whole("v_head_dim"),
    )
    d_expert = keys.whole("moe_intermediate_size")
    moe = MoE(
        experts=keys.whole("n_routed_experts"),
        active=keys.whole("num_experts_per_tok"),
        d_ff=d_expert,
        shared_d_ff=d_expert * keys.whole("n_shared_experts", shared, null=0, least=0),
        dense_layers=keys.whole("first_k_dense_replace", dense, least=0),
        **router,
    )
    d_head = mla.d_nope + mla.d_rope
    fields |= _rope(keys, fields["max_seq_len"]) | {"d_head": d_head, "mla": mla, "moe": moe}
    weight = _rope_keys(keys).number("mscale_all_dim", 0)
    if fields.get("rope_scaling") is not None and weight:
        fields["query_scale"] = d_head**-0.5 * _mscale(fields["rope_scaling"].factor, weight) ** 2
    return fields


def _deepseek_v2(keys: Keys) -> dict[str, Any]:
    keys.only("scoring_func", "softmax")
    keys.only("topk_method", "greedy", "group_limited_greedy")
    limited = keys.text("topk_method", "greedy") != "greedy"
    fields = _deepseek(
        keys,
        shared=2,
        dense=0,
        max_seq_len=2048,
        normalise=keys.flag("norm_topk_prob", False),
        routed_scaling=keys.number("routed_scaling_factor", 1.0),
        groups=keys.whole("n_group") if limited else 1,
        active_groups=keys.whole("topk_group") if limited else 1,
    )
    return fields | {"rope_interleaved": True}


def _deepseek_v3(keys: Keys) -> dict[str, Any]:
    keys.only("scoring_func", "sigmoid")
    keys.only("topk_method", "noaux_tc")
    fields = _deepseek(
        keys,
        shared=1,
        dense=3,
        max_seq_len=4096,
        scoring="sigmoid",
        normalise=keys.flag("norm_topk_prob", True),
        routed_scaling=keys.number("routed_scaling_factor", 2.5),
        groups=keys.whole("n_group", 8),
        active_groups=keys.whole("topk_group", 4),
        group_score="top2_sum",
        correction_bias=True,
    )
    return fields | {"rope_interleaved": keys.flag("rope_interleave", True)}


def _gpt2(keys: Keys) -> dict[str, Any]:
    keys.only("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        keys.only(key, False)
    d_model, heads = keys.whole("n_embd"), keys.whole("n_head")
    return {
        "layers": keys.whole("n_layer", most=MOST_LAYERS),
        "d_model": d_model,
        "d_ff": keys.whole("n_inner", 4 * d_model),
        "heads": heads,
        "kv_heads": heads,
        "d_head": d_model // heads,
        "vocab": keys.whole("vocab_size"),
        "max_seq_len": keys.whole("n_positions"),
        "mlp_matrices": 2,
        "activation": keys.name("activation_function", _ACTIVATIONS, "gelu_new"),
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "qkv_bias": True,
        "attn_out_bias": True,
        "mlp_bias": True,
        "norm": "layer",
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "positions": "learned",
    }


#: What transformers assumes of a gpt-oss file without rotary settings.
_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}

#: ``model_type`` -> the fields of a ModelConfig, all but name and family, from the keys of the file.
FAMILIES: Mapping[str, Callable[[Keys], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "gpt2": _gpt2,
}
