"""Keys of a Hugging Face ``config.json`` as blocks of a ModelConfig, for each ``model_type``.

Each family is a function of the keys that it reads, with the defaults of transformers. A key that nothing here reads is
refused, unless it is known to change nothing, or switched off: it may ask for another computation.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.models.config import (
    LARGEST_SIZE,
    MLA,
    MOST_LAYERS,
    ROPE_SCALINGS,
    GatedDelta,
    Mamba,
    MoE,
    OtherWeight,
    RopeScaling,
)

#: The default of a key that has none.
REQUIRED: Any = object()

#: Keys that change no logits: of training (dropout, initial values, auxiliary losses), of generation, of files, and of
#: the classes of transformers.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _name_or_path add_cross_attention aliases architectures
    attention_dropout attention_probs_dropout_prob attn_implementation attn_pdrop auto_map aux_loss_alpha
    aux_loss_free_balance_coef bad_words_ids begin_suppress_tokens boi_token_index bos_token_id
    cache_implementation chunk_size chunk_size_feed_forward classifier_dropout cross_attention_hidden_size
    decoder_start_token_id diversity_penalty do_sample dropout dtype early_stopping emb_pdrop embd_pdrop
    embedding_dropout encoder_no_repeat_ngram_size eod_token_id eoi_token_index eos_token_id ep_size
    exponential_decay_length_penalty finetuning_task flash_attn forced_bos_token_id forced_eos_token_id fused_mlp
    gradient_checkpointing hidden_dropout hidden_dropout_prob hidden_dropout_rate id2label im_end_id im_start_id
    image_token_id image_token_index init_std initializer_factor initializer_range input_jitter_noise is_decoder
    is_encoder_decoder is_llama_config label2id layerdrop length_penalty mamba_chunk_size mask_token_id max_length
    min_length model_type moe_jitter_eps moe_loss_weight mtp_num_hidden_layers mtp_transformer_layers
    mtp_use_dedicated_embeddings name_or_path no_repeat_ngram_size num_beam_groups num_beams num_logits_to_keep
    num_mtp_modules num_nextn_predict_layers num_return_sequences org_vocab_size output_attentions
    output_hidden_states output_router_logits output_scores pad_id pad_token_id prefix pretraining_tp problem_type
    pruned_heads quantization_config remove_invalid_values repetition_penalty rescale_prenorm_residual resid_pdrop
    residual_dropout return_dict return_dict_in_generate rope_ratio router_aux_loss router_aux_loss_coef
    router_z_loss_coef sep_token_id seq_aux slow_but_exact source summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params temperature
    text_end_id text_start_id tf_legacy_loss tokenizer_class top_k top_p torch_dtype torchscript
    transformers_version typical_p unk_token_id unsloth_fixed unsloth_version use_associative_scan use_bfloat16
    use_cache use_flash_attn use_mamba_kernels use_mambapy use_mem_eff_path use_mtp use_mup video_token_id
    z_loss_coefficient
    """.split()  # noqa: SIM905
)


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
        self._read = set[str]()
        self._inner = dict[str, Keys]()

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
        return self._inner.setdefault(key, Keys(data, self.where, f"{self.prefix}{key}."))

    def has(self, key: str) -> bool:
        """Return True if ``key`` is present and neither null nor empty."""
        self._read.add(key)
        return bool(self.data.get(key))

    def first(self, *names: str) -> str:
        """The first of several spellings of a key that the file has; without any the first of all."""
        self._read.update(names)
        return next((name for name in names if self.data.get(name) is not None), names[0])

    def ignore(self, *names: str) -> None:
        """Accept keys that change nothing in this family."""
        self._read.update(names)

    @property
    def used(self) -> frozenset[str]:
        """Keys that have been read, whether or not the file has them."""
        return frozenset(self._read)

    def check(self) -> None:
        """Refuse keys that nothing has read, unless they are known to change nothing or are switched off."""
        for key, value in self.data.items():
            if key not in self._read and key not in HARMLESS and value not in (None, False, 0, "", [], {}):
                accepted = "no such key: its meaning is unknown here, and may change the computation"
                raise RooftopError(self.field(key), value if len(repr(value)) <= 80 else "...", accepted)
        for inner in self._inner.values():
            inner.check()

    def only(self, key: str, *accepted: Any) -> None:
        """Refuse a value other than ``accepted`` or null: it asks for something that nothing here can express."""
        self._read.add(key)
        value = self.data.get(key)
        if value is not None and value not in accepted:
            raise RooftopError(self.field(key), value, " or ".join(json.dumps(choice) for choice in accepted))

    def _get(self, key: str, default: Any, null: Any, kind: Any, accepted: str) -> Any:
        self._read.add(key)
        value = self.data.get(key)
        if value is None:
            meant = null if key in self.data and null is not REQUIRED else default
            if meant is REQUIRED:
                raise RooftopError(self.field(key), None, f"{accepted}; the key is required")
            return meant
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise RooftopError(self.field(key), value, accepted)
        return value


def read_family(keys: Keys) -> tuple[str, dict[str, Any]]:
    """The ``model_type`` of a file, and the fields of its ModelConfig, all but name and family.

    Of a multimodal file they are those of the language model in ``text_config``. Raises RooftopError on an unknown
    type, and on a key that may change the computation and that nothing reads.
    """
    family = keys.text("model_type")
    if family in FAMILIES:
        fields = FAMILIES[family](keys)
        keys.check()
        return family, fields
    if not keys.has("text_config"):
        accepted = f"one of {', '.join(sorted(FAMILIES))}; or a text_config of one of them"
        raise RooftopError(keys.field("model_type"), family, accepted)
    inner = keys.inner("text_config")
    if "tie_word_embeddings" in keys.data and "tie_word_embeddings" not in inner.data:
        inner.data = {**inner.data, "tie_word_embeddings": keys.data["tie_word_embeddings"]}
    return read_family(inner)


_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
Fields = dict[str, Any]


# -- parts that families share -----------------------------------------------------------------------------------------


def _decoder(
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
        "activation": keys.name(activation[0], _ACTIVATIONS, activation[1]),
        "norm_eps": keys.number(eps, norm_eps),
        "tied_embeddings": keys.flag("tie_word_embeddings", tied),
    }


def _bias(keys: Keys, default: bool = False) -> Fields:
    bias = keys.flag("attention_bias", default)
    return {"qkv_bias": bias, "attn_out_bias": bias}


def _biases(keys: Keys) -> Fields:
    return _bias(keys) | {"mlp_bias": keys.flag("mlp_bias", False)}


def _layer_norm(*, bias: bool = True, scale: bool = True) -> Fields:
    return {"norm": "layer", "norm_bias": bias, "norm_scale": scale}


def _rope_keys(keys: Keys, partial: bool = False) -> Keys:
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


def _rope(keys: Keys, max_seq_len: int, theta: float = 1e4, partial: bool = False) -> Fields:
    settings = _rope_keys(keys, partial)
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


def _partial_rope(keys: Keys, fields: Fields, share: float, theta: float = 1e4) -> Fields:
    """Rotary settings of a family that rotates the first part of a head, by default a ``share`` of it."""
    settings = _rope_keys(keys, partial=True)
    share = keys.number(keys.first("partial_rotary_factor", "rotary_pct", "rope_pct"), share)
    dims = int(fields["d_head"] * settings.number("partial_rotary_factor", share))
    whole = {"rotary_dims": dims} if dims != fields["d_head"] else {}
    return _rope(keys, fields["max_seq_len"], theta, partial=True) | whole


def _rope_scaling(keys: Keys, kind: str, max_seq_len: int) -> RopeScaling:
    fields: Fields = {"kind": kind, "factor": keys.number("factor")}
    keys.ignore("original_max_position_embeddings")
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


def _windows(
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


def _same_window(keys: Keys, layers: int, window: int | None) -> Fields:
    _usual_layers(keys, "full_attention", "sliding_attention")
    return {"layer_windows": (window,) * layers}


def _usual_layers(keys: Keys, *kinds: str) -> None:
    """Refuse ``layer_types`` that differ from layer to layer, in families whose layers are alike."""
    types = keys.array("layer_types", None)
    if types is not None and (len({*types}) > 1 or types[0] not in kinds):
        raise RooftopError(keys.field("layer_types"), types[0] if types else [], f"all {' or all '.join(kinds)}")


def _dense_first(keys: Keys, layers: int, first: int) -> int:
    """Dense layers before those of experts: ``mlp_layer_types`` where a file has it, else ``first``."""
    types = keys.array("mlp_layer_types", None)
    if types is None:
        return first
    dense: int = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (layers - dense):
        raise RooftopError(keys.field("mlp_layer_types"), "...", f"{layers} entries: dense, then sparse")
    return dense


def _joined(*parts: Fields) -> Fields:
    """Fields of several parts; what no program runs adds up."""
    fields: Fields = {}
    for part in parts:
        both = (*fields.get("not_run", ()), *part.get("not_run", ()))
        fields |= part
        if both:
            fields["not_run"] = both
    return fields


def _unless(keys: Keys, key: str, usual: Any, name: str) -> Fields:
    """A part ``name`` of the computation that no program runs, unless a key has its usual value."""
    keys.ignore(key)
    return {} if keys.data.get(key, usual) in (usual, None) else {"not_run": (name,)}


# -- LLaMA and its kin -------------------------------------------------------------------------------------------------


def _llama(keys: Keys) -> Fields:
    fields = _decoder(keys)
    keys.only("layer_types")
    return fields | _rope(keys, fields["max_seq_len"]) | _biases(keys)


def _mistral(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072)
    window = keys.whole("sliding_window", 4096, null=None)
    keys.only("layer_types")
    return fields | _rope(keys, fields["max_seq_len"]) | {"layer_windows": (window,) * fields["layers"]}


def _ministral(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072)
    window = keys.whole("sliding_window", 4096, null=None)
    windows = _windows(keys, fields["layers"], window, lambda layer: True)
    return fields | _rope(keys, fields["max_seq_len"]) | {"layer_windows": windows}


def _mixtral(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072, norm_eps=1e-5)
    window = keys.whole("sliding_window", None)
    experts, active = keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")
    keys.ignore("router_jitter_noise")
    fields |= _rope(keys, fields["max_seq_len"], 1e6) | _same_window(keys, fields["layers"], window)
    return fields | {"moe": MoE(experts=experts, active=active, d_ff=fields["d_ff"])}


def _phi3(keys: Keys) -> Fields:
    fields = _decoder(keys, max_seq_len=4096, norm_eps=1e-5)
    window = keys.whole("sliding_window", None)
    keys.ignore("original_max_position_embeddings")
    keys.only("attention_bias", False)
    keys.only("mlp_bias", False)
    return fields | _partial_rope(keys, fields, 1.0) | _same_window(keys, fields["layers"], window)


def _phimoe(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072, norm_eps=1e-5)
    window = keys.whole("sliding_window", None)
    keys.ignore("router_jitter_noise", "original_max_position_embeddings")
    experts, active = keys.whole("num_local_experts", 16), keys.whole("num_experts_per_tok", 2)
    moe = MoE(experts=experts, active=active, d_ff=fields["d_ff"], scoring="sparsemixer", normalise=False)
    fields |= _rope(keys, fields["max_seq_len"], 1e6) | _same_window(keys, fields["layers"], window)
    return fields | _bias(keys) | _layer_norm() | {"moe": moe, "unembed_bias": keys.flag("lm_head_bias", False)}


def _smollm3(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=4, max_seq_len=32_768, tied=True)
    windows = _windows(keys, fields["layers"], _qwen_window(keys), lambda layer: False)
    fields |= {"layer_windows": windows, "rope_layers": _no_rope(keys, fields["layers"])}
    return fields | _rope(keys, fields["max_seq_len"], 2e6) | _biases(keys)


def _no_rope(keys: Keys, layers: int) -> tuple[bool, ...]:
    """Layers whose positions are rotated: ``no_rope_layers`` has a 1 for each, or every n-th is not."""
    every = keys.whole("no_rope_layer_interval", 4)
    rotated = keys.array("no_rope_layers", None) or [(layer + 1) % every != 0 for layer in range(layers)]
    return tuple(bool(entry) for entry in rotated)


def _arcee(keys: Keys) -> Fields:
    fields = _decoder(keys, max_seq_len=4096, norm_eps=1e-5, activation=("hidden_act", "relu2"))
    return fields | _rope(keys, fields["max_seq_len"]) | _biases(keys) | {"mlp_matrices": 2}


def _apertus(keys: Keys) -> Fields:
    keys.only("hidden_act", "xielu")
    fields = _decoder(_with(keys, hidden_act="relu2"), max_seq_len=65_536, norm_eps=1e-5)
    others = (OtherWeight(name="xIELU", shape=(2,), layers=fields["layers"]),)
    if not keys.has("rope_scaling") and not keys.has("rope_parameters"):
        keys = _with(keys, rope_scaling=_APERTUS_ROPE)
    rope = _rope(keys, fields["max_seq_len"], 1.2e7)
    keys.only("post_norm", False)
    keys.only("qk_norm", True)
    return fields | rope | _bias(keys) | {"mlp_matrices": 2, "qk_norm": "head", "others": others}


#: What transformers assumes of an Apertus file without rotary settings.
_APERTUS_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _seed_oss(keys: Keys) -> Fields:
    fields = _decoder(keys, max_seq_len=524_288, d_head=128)
    biases = {"qkv_bias": keys.flag("attention_bias", True), "attn_out_bias": keys.flag("attention_out_bias", False)}
    return fields | _rope(keys, fields["max_seq_len"]) | biases | {"mlp_bias": keys.flag("mlp_bias", False)}


def _helium(keys: Keys) -> Fields:
    fields = _decoder(keys, max_seq_len=4096, d_head=128, norm_eps=1e-8)
    biases = {"qkv_bias": keys.flag("attention_bias", False), "mlp_bias": keys.flag("mlp_bias", False)}
    return fields | _rope(keys, fields["max_seq_len"], 1e5) | biases | {"rope_interleaved": True}


def _hunyuan(keys: Keys) -> Fields:
    fields = _decoder(keys, norm_eps=1e-5)
    keys.only("use_qk_norm", True)
    keys.only("use_cla", False)
    keys.ignore("attention_head_dim")
    return fields | _rope(keys, fields["max_seq_len"]) | _bias(keys) | {"qk_norm": "head", "qk_norm_after_rope": True}


def _hunyuan_moe(keys: Keys) -> Fields:
    fields = _hunyuan(keys)
    experts, active, shared = (_one_of_layers(keys, key, 1) for key in ("num_experts", "moe_topk", "num_shared_expert"))
    d_ff = _one_of_layers(keys, "moe_intermediate_size", fields["d_ff"])
    keys.only("use_mixed_mlp_moe", True)
    moe = MoE(experts=experts, active=active, d_ff=d_ff, shared_d_ff=shared * fields["d_ff"])
    return fields | {"moe": moe}


def _one_of_layers(keys: Keys, key: str, default: int) -> int:
    """A whole number, or a list with the same one for each layer."""
    value = keys.data.get(key)
    keys.ignore(key)
    if isinstance(value, list) and value and value == value[:1] * len(value):
        keys = Keys({**keys.data, key: value[0]}, keys.where, keys.prefix)
    size: int = keys.whole(key, default)
    return size


def _ernie4_5(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=2, max_seq_len=131_072, d_head=128, norm_eps=1e-5, tied=True)
    return fields | _rope(keys, fields["max_seq_len"], 5e5) | _use_bias(keys, False) | {"rope_interleaved": True}


def _use_bias(keys: Keys, default: bool) -> Fields:
    return dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), keys.flag("use_bias", default))


def _ernie4_5_moe(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=4, max_seq_len=131_072, norm_eps=1e-5, tied=True)
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
    return fields | _rope(keys, fields["max_seq_len"], 5e5) | {"rope_interleaved": True, "moe": moe}


# -- Qwen --------------------------------------------------------------------------------------------------------------


def _qwen_window(keys: Keys) -> int | None:
    window: int | None = keys.whole("sliding_window", 4096, null=None, least=0)
    return window if keys.flag("use_sliding_window", False) else None


def _qwen2(keys: Keys, d_head: int | None = None) -> Fields:
    fields = _decoder(keys, kv_heads=32, max_seq_len=32_768, d_head=d_head)
    first = keys.whole("max_window_layers", 28, least=0)
    windows = _windows(keys, fields["layers"], _qwen_window(keys), lambda layer: layer >= first)
    return fields | _rope(keys, fields["max_seq_len"]) | {"layer_windows": windows, "qkv_bias": True}


def _qwen3(keys: Keys) -> Fields:
    return _qwen2(keys, d_head=128) | _bias(keys) | {"qk_norm": "head"}


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
    fields = _decoder(keys, kv_heads=16, max_seq_len=32_768)
    first = keys.whole("max_window_layers", 28, least=0)
    windows = _windows(keys, fields["layers"], _qwen_window(keys), lambda layer: layer >= first)
    moe = _qwen_experts(keys, normalise=False, shared=True)
    bias = {"qkv_bias": keys.flag("qkv_bias", True)}
    return fields | _rope(keys, fields["max_seq_len"]) | bias | {"layer_windows": windows, "moe": moe}


def _qwen3_moe(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=4, max_seq_len=32_768)
    keys.ignore("max_window_layers")
    keys.only("use_qk_norm", True)
    keys.only("shared_expert_intermediate_size", 0)
    moe = _qwen_experts(keys, normalise=False, shared=False)
    fields |= _rope(keys, fields["max_seq_len"]) | _same_window(keys, fields["layers"], _qwen_window(keys))
    return fields | _bias(keys) | {"qk_norm": "head", "moe": moe}


def _qwen_delta(keys: Keys, d_ff: Any = REQUIRED) -> Fields:
    """Fields that Qwen3-Next and Qwen3.5 share: three layers of gated delta rules to one of gated attention."""
    if d_ff is not REQUIRED:
        keys = keys if keys.has("intermediate_size") else _with(keys, intermediate_size=d_ff)
    fields = _decoder(keys, kv_heads=2, max_seq_len=32_768, d_head=256)
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
    return _joined(fields, _bias(keys), _partial_rope(keys, fields, 0.25))


def _with(keys: Keys, **more: Any) -> Keys:
    """The same keys, and ``more`` that the file does not have."""
    keys.data = {**keys.data, **more}
    return keys


def _qwen3_next(keys: Keys) -> Fields:
    return _qwen_delta(keys, d_ff=5632) | {"moe": _qwen_experts(keys, normalise=True, shared=True)}


def _qwen3_5_moe(keys: Keys) -> Fields:
    return _qwen_delta(keys, d_ff=512) | {"moe": _qwen_experts(keys, normalise=True, shared=True)}


def _on_three_axes(read: Callable[[Keys], Fields]) -> Callable[[Keys], Fields]:
    """A reader of the language model of a multimodal one, whose rotations have three axes.

    Positions of text are the same along all three, whatever shares these have.
    """

    def fields_of(keys: Keys) -> Fields:
        for key in ("rope_parameters", "rope_scaling"):
            if keys.has(key):
                keys.inner(key).ignore("mrope_section", "mrope_interleaved")
        return read(keys)

    return fields_of


# -- Gemma -------------------------------------------------------------------------------------------------------------


def _gemma(keys: Keys) -> Fields:
    keys.ignore("hidden_activation")
    fields = _decoder(
        keys, kv_heads=16, max_seq_len=8192, d_head=256, tied=True, activation=("hidden_act", "gelu_pytorch_tanh")
    )
    # Published files say gelu where the approximation is meant.
    fields |= {"activation": "gelu_tanh"} if keys.data.get("hidden_activation") != "gelu" else {}
    fields |= {"embed_scale": fields["d_model"] ** 0.5, "norm_offset": True}
    keys.only("use_bidirectional_attention", False)
    return fields | _rope(keys, fields["max_seq_len"]) | _bias(keys)


def _gemma_windows(keys: Keys, every: int, softcaps: tuple[float | None, float | None], **defaults: Any) -> Fields:
    """Fields that Gemma 2 and 3 share: one layer in ``every`` is global, the others have a window."""
    activation = ("hidden_activation", "gelu_pytorch_tanh")
    keys.ignore("hidden_act")
    usual: Fields = {"kv_heads": 4, "d_head": 256, "tied": True, "activation": activation}
    fields = _decoder(keys, **(usual | defaults))
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
            "norm_placement": "sandwich",
        }
    )


def _gemma2(keys: Keys) -> Fields:
    fields = _gemma_windows(keys, 2, (50.0, 30.0), max_seq_len=8192)
    return fields | _rope(keys, fields["max_seq_len"])


def _vaultgemma(keys: Keys) -> Fields:
    return _gemma2(keys) | {"norm_placement": "pre"}


def _gemma3_text(keys: Keys) -> Fields:
    every = keys.whole(keys.first("sliding_window_pattern", "_sliding_window_pattern"), 6)
    fields = _gemma_windows(keys, every, (None, None), max_seq_len=131_072, heads=8, vocab=262_208)
    return fields | _rope(keys, fields["max_seq_len"], 1e6) | {"qk_norm": "head"} | _local_rope(keys)


def _local_rope(keys: Keys) -> Fields:
    """The base of windowed layers' rotations, which are not scaled."""
    local = keys.number("rope_local_base_freq", 1e4)
    if keys.has("rope_parameters") and keys.inner("rope_parameters").has("sliding_attention"):
        settings = keys.inner("rope_parameters").inner("sliding_attention")
        settings.only("rope_type", "default")
        local = settings.number("rope_theta", local)
    return {"rope_local_theta": local}


def _gemma3(keys: Keys) -> Fields:
    # Vision is another model, whose tokens come in place of some of the text's.
    keys.ignore(*keys.data)
    return _gemma3_text(keys.inner("text_config"))


def _gemma3n(keys: Keys) -> Fields:
    """Gemma 3n: four streams (AltUp), of which layers read one; low-rank shortcuts (LAuReL); embeddings per layer."""
    d_ff = _one_of_layers(keys, "intermediate_size", 16_384)
    keys = _with(keys, intermediate_size=d_ff)
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
    return fields | _rope(keys, fields["max_seq_len"], 1e6) | _local_rope(keys)


# -- Phi, GPT and others with layer norms ------------------------------------------------------------------------------


def _phi(keys: Keys) -> Fields:
    fields = _decoder(keys, norm_eps=1e-5, eps="layer_norm_eps", activation=("hidden_act", "gelu_new"))
    keys.only("qk_layernorm", False)
    biases = dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias", "unembed_bias"), True)
    fields |= _layer_norm() | {"parallel": "shared", "mlp_matrices": 2} | biases
    return fields | _partial_rope(keys, fields, 0.5)


def _starcoder2(keys: Keys) -> Fields:
    activation = ("hidden_act", "gelu_pytorch_tanh")
    fields = _decoder(keys, max_seq_len=4096, norm_eps=1e-5, eps="norm_epsilon", tied=True, activation=activation)
    window = keys.whole("sliding_window", None)
    keys.only("mlp_type", "default")
    keys.only("norm_type", "layer_norm")
    fields |= _same_window(keys, fields["layers"], window) | _layer_norm() | {"mlp_matrices": 2}
    return fields | _rope(keys, fields["max_seq_len"]) | _use_bias(keys, True)


def _stablelm(keys: Keys) -> Fields:
    fields = _decoder(keys, max_seq_len=4096, norm_eps=1e-5, eps="layer_norm_eps")
    parallel = "shared" if keys.flag("use_parallel_residual", False) else None
    qk_norm = "heads" if keys.flag("qk_layernorm", False) else None
    fields |= _layer_norm() | {"parallel": parallel, "qk_norm": qk_norm, "qkv_bias": keys.flag("use_qkv_bias", False)}
    return fields | _partial_rope(keys, fields, 0.25)


def _cohere(keys: Keys) -> Fields:
    fields = _decoder(keys, max_seq_len=8192, norm_eps=1e-5, eps="layer_norm_eps", tied=True)
    qk_norm = "heads" if keys.flag("use_qk_norm", False) else None
    fields |= _layer_norm(bias=False) | {"parallel": "shared", "rope_interleaved": True, "qk_norm": qk_norm}
    fields |= {"logits_scale": keys.number("logit_scale", 0.0625)}
    return fields | _rope(keys, fields["max_seq_len"], 5e5) | _bias(keys)


def _cohere2(keys: Keys) -> Fields:
    fields = _cohere(keys)
    every, window = keys.whole("sliding_window_pattern", 4), keys.whole("sliding_window", 4096, null=None)
    keys.ignore("order_of_interleaved_layers", "rotary_pct", "position_embedding_type", "layer_switch")
    keys.only("use_gated_activation", True)
    keys.only("use_parallel_block", True)
    keys.only("use_parallel_embedding", False)
    windows = _windows(keys, fields["layers"], window, lambda layer: (layer + 1) % every != 0)
    fields |= {"layer_windows": windows, "rope_layers": tuple(window is not None for window in windows)}
    return fields | _rope(keys, fields["max_seq_len"])


def _nemotron(keys: Keys) -> Fields:
    activation = ("hidden_act", "relu2")
    fields = _decoder(keys, max_seq_len=4096, norm_eps=1e-5, eps="norm_eps", activation=activation)
    fields |= _layer_norm() | {"norm_offset": True, "mlp_matrices": 2} | _biases(keys)
    return fields | _partial_rope(keys, fields, 0.5)


def _gpt_neox(keys: Keys) -> Fields:
    activation = ("hidden_act", "gelu")
    fields = _decoder(keys, norm_eps=1e-5, eps="layer_norm_eps", activation=activation)
    parallel = "own" if keys.flag("use_parallel_residual", True) else None
    fields |= _layer_norm() | {"mlp_matrices": 2, "mlp_bias": True, "parallel": parallel} | _bias(keys, True)
    return fields | _partial_rope(keys, fields, 0.25)


def _gptj(keys: Keys) -> Fields:
    d_model, heads = keys.whole("n_embd"), keys.whole("n_head")
    keys.ignore("n_ctx")
    return {
        "layers": keys.whole("n_layer", most=MOST_LAYERS),
        "d_model": d_model,
        "d_ff": keys.whole("n_inner", 4 * d_model),
        "heads": heads,
        "kv_heads": heads,
        "d_head": d_model // heads,
        "vocab": keys.whole("vocab_size"),
        "max_seq_len": keys.whole("n_positions", 2048),
        "activation": keys.name("activation_function", _ACTIVATIONS, "gelu_new"),
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "mlp_matrices": 2,
        "mlp_bias": True,
        "unembed_bias": True,
        "parallel": "shared",
        "rotary_dims": keys.whole("rotary_dim", 64),
        "rope_interleaved": True,
    } | _layer_norm()  # fmt: skip


def _gpt2(keys: Keys) -> Fields:
    keys.only("scale_attn_weights", True)
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        keys.only(key, False)
    keys.ignore("n_ctx", "reorder_and_upcast_attn")
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


def _opt(keys: Keys) -> Fields:
    d_model, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    for key, usual in (("do_layer_norm_before", True), ("layer_norm_elementwise_affine", True)):
        keys.only(key, usual)
    keys.only("_remove_final_layer_norm", False)
    keys.only("word_embed_proj_dim", d_model)
    return {
        "layers": keys.whole("num_hidden_layers", most=MOST_LAYERS),
        "d_model": d_model,
        "d_ff": keys.whole("ffn_dim"),
        "heads": heads,
        "kv_heads": heads,
        "d_head": d_model // heads,
        "vocab": keys.whole("vocab_size"),
        "max_seq_len": keys.whole("max_position_embeddings", 2048),
        "activation": keys.name("activation_function", _ACTIVATIONS, "relu"),
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "norm_eps": 1e-5,
        "mlp_matrices": 2,
        "positions": "learned",
        "position_offset": 2,
        **dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), keys.flag("enable_bias", True)),
    } | _layer_norm()  # fmt: skip


def _bloom(keys: Keys) -> Fields:
    d_model = keys.whole(keys.first("hidden_size", "n_embed"))
    heads = keys.whole(keys.first("n_head", "num_attention_heads"))
    keys.only("apply_residual_connection_post_layernorm", False)
    keys.ignore(
        "masked_softmax_fusion", "attention_softmax_in_fp32", "bias_dropout_fusion", "offset_alibi", "unk_token_id"
    )
    keys.ignore("skip_bias_add", "skip_bias_add_qkv")
    return {
        "layers": keys.whole(keys.first("n_layer", "num_hidden_layers"), most=MOST_LAYERS),
        "d_model": d_model,
        "d_ff": keys.whole("n_inner", 4 * d_model),
        "heads": heads,
        "kv_heads": heads,
        "d_head": d_model // heads,
        "vocab": keys.whole("vocab_size"),
        "max_seq_len": keys.whole("seq_length", 2048),
        "activation": "gelu_tanh",
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "mlp_matrices": 2,
        "positions": "alibi",
        "embed_norm": True,
        **dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), True),
    } | _layer_norm()  # fmt: skip


def _falcon(keys: Keys) -> Fields:
    d_model = keys.whole("hidden_size")
    heads = keys.whole(keys.first("num_attention_heads", "n_head"))
    new, parallel = keys.flag("new_decoder_architecture", False), keys.flag("parallel_attn", True)
    own = new and keys.whole("num_ln_in_parallel_attn", 2, null=2) == 2
    one_key = keys.flag("multi_query", True)
    kv_heads = keys.whole(keys.first("num_kv_heads", "n_head_kv"), heads)
    positions = "alibi" if keys.flag("alibi", False) else "rope"
    fields: Fields = {
        "layers": keys.whole(keys.first("num_hidden_layers", "n_layer"), most=MOST_LAYERS),
        "d_model": d_model,
        "d_ff": keys.whole("ffn_hidden_size", 4 * d_model),
        "heads": heads,
        "kv_heads": kv_heads if new else 1 if one_key else heads,
        "d_head": d_model // heads,
        "vocab": keys.whole("vocab_size"),
        "max_seq_len": keys.whole("max_position_embeddings", 2048),
        "activation": keys.name("activation", _ACTIVATIONS, "gelu"),
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "mlp_matrices": 2,
        "positions": positions,
        "parallel": ("own" if own else "shared") if new or parallel else None,
        **dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), keys.flag("bias", False)),
    }
    return fields | _layer_norm() | _rope(keys, fields["max_seq_len"])


def _olmo(keys: Keys) -> Fields:
    fields = _decoder(keys, norm_eps=1e-5, eps="layer_norm_eps")
    clipped = _unless(keys, "clip_qkv", None, "clipped queries, keys and values")
    return _joined(fields, _rope(keys, fields["max_seq_len"]), _bias(keys), _layer_norm(scale=False), clipped)


def _olmo2(keys: Keys, theta: float = 1e4) -> Fields:
    fields = _decoder(keys, norm_eps=1e-5) | {"norm_placement": "post", "qk_norm": "width"}
    return fields | _rope(keys, fields["max_seq_len"], theta) | _bias(keys)


def _olmo3(keys: Keys) -> Fields:
    fields = _olmo2(keys, 5e5)
    window = keys.whole("sliding_window", 4096, null=None)
    windows = _windows(keys, fields["layers"], window, lambda layer: (layer + 1) % 4 != 0)
    local = _local_rope(_with(keys, rope_local_base_freq=fields["rope_theta"]))
    same = local["rope_local_theta"] == fields["rope_theta"] and "rope_scaling" not in fields
    return fields | {"layer_windows": windows} | ({} if same else local)


def _olmoe(keys: Keys, norm_eps: float = 1e-5, theta: float = 1e4) -> Fields:
    fields = _decoder(keys, max_seq_len=4096, norm_eps=norm_eps) | {"qk_norm": "width"}
    clipped = _unless(keys, "clip_qkv", None, "clipped queries, keys and values")
    experts, active = keys.whole("num_experts", 64), keys.whole("num_experts_per_tok", 8)
    normalise = keys.flag("norm_topk_prob", False)
    moe = MoE(experts=experts, active=active, d_ff=fields["d_ff"], normalise=normalise)
    return _joined(fields, _rope(keys, fields["max_seq_len"], theta), _bias(keys), clipped, {"moe": moe})


def _flex_olmo(keys: Keys) -> Fields:
    return _olmoe(keys, 1e-6, 5e5) | {"norm_placement": "post"}


def _exaone4(keys: Keys) -> Fields:
    fields = _decoder(keys, norm_eps=1e-5) | {"norm_placement": "post", "qk_norm": "head"}
    window = keys.whole("sliding_window", 4096, null=None)
    pattern = keys.data.get("sliding_window_pattern", 4)
    keys.ignore("sliding_window_pattern")
    if isinstance(pattern, str):  # one letter for each layer of a period: L with a window, G without
        rule = [letter == "L" for letter in pattern]
    else:
        rule = [(layer + 1) % pattern != 0 for layer in range(pattern)] if pattern else [False]
    layers = fields["layers"]
    windows = _windows(keys, layers, window, lambda layer: rule[layer % len(rule)] and layer != layers - 1)
    if window is not None:
        fields["rope_layers"] = tuple(size is not None for size in windows)
    return fields | {"layer_windows": windows} | _rope(keys, fields["max_seq_len"])


# -- GLM, Granite, MiniMax ---------------------------------------------------------------------------------------------


def _glm(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=2, max_seq_len=131_072, d_head=128, norm_eps=1.5625e-7)
    fields |= {"qkv_bias": keys.flag("attention_bias", True), "rope_interleaved": True}
    return fields | _partial_rope(keys, fields, 0.5)


def _glm4(keys: Keys) -> Fields:
    return _glm(keys) | {"norm_placement": "sandwich"}


def _glm4_moe(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072, norm_eps=1e-5)
    fields |= {"qkv_bias": keys.flag("attention_bias", False)}
    fields |= {"qk_norm": "head"} if keys.flag("use_qk_norm", False) else {}
    return fields | _partial_rope(keys, fields, 0.5) | {"moe": _sigmoid_experts(keys, fields["layers"], 1, scaling=1.0)}


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
        dense_layers=_dense_first(keys, layers, keys.whole("first_k_dense_replace", dense, least=0)),
        scoring="sigmoid",
        normalise=keys.flag("norm_topk_prob", normalise),
        routed_scaling=keys.number("routed_scaling_factor", scaling),
        groups=keys.whole("n_group", groups[0]),
        active_groups=keys.whole("topk_group", groups[1]),
        group_score="top2_sum",
        correction_bias=True,
    )


def _dots1(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=32)
    first = keys.whole("max_window_layers", 62, least=0)
    window = keys.whole("sliding_window", 4096, null=None)
    windows = _windows(keys, fields["layers"], window, lambda layer: layer >= first)
    moe = _sigmoid_experts(keys, fields["layers"], 0, scaling=1.0, normalise=False)
    return (
        fields
        | _rope(keys, fields["max_seq_len"])
        | _bias(keys)
        | {"qk_norm": "head", "layer_windows": windows, "moe": moe}
    )


def _minimax_m2(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=196_608, d_head=128) | {"qk_norm": "width"}
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
    return fields | {"moe": moe} | _partial_rope(keys, fields, rotated / fields["d_head"], 5e6)


def _minimax(keys: Keys) -> Fields:
    """MiniMax-Text-01: lightning attention in most layers; residuals are weighed sums of normalised streams."""
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072, norm_eps=1e-5)
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
        fields | {"not_run": ("residuals of normalised streams",)} | rotated | _rope(keys, fields["max_seq_len"], 1e6)
    )


def _granite(keys: Keys) -> Fields:
    fields = _decoder(keys) | _bias(keys)
    fields |= {
        "embed_scale": keys.number("embedding_multiplier", 1.0),
        "residual_scale": keys.number("residual_multiplier", 1.0),
        "logits_scale": 1 / keys.number("logits_scaling", 1.0),
        "query_scale": keys.number("attention_multiplier", 1.0),
    }
    return fields | _rope(keys, fields["max_seq_len"]) | {"mlp_bias": keys.flag("mlp_bias", False)}


def _granitemoe(keys: Keys) -> Fields:
    fields = _granite(keys)
    experts, active = keys.whole("num_local_experts", 8, least=0), keys.whole("num_experts_per_tok", 2, least=0)
    shared = keys.whole("shared_intermediate_size", 0, least=0)
    if not experts:  # only the shared one is left
        return fields | {"d_ff": shared}
    return fields | {"moe": MoE(experts=experts, active=active, d_ff=fields["d_ff"], shared_d_ff=shared)}


def _granitehybrid(keys: Keys) -> Fields:
    fields = _granitemoe(_with(keys, shared_intermediate_size=keys.data.get("shared_intermediate_size", 1024)))
    types = keys.array(keys.first("layer_types", "layers_block_type"), ["mamba"] * fields["layers"])
    fields |= _mamba_layers(keys, fields, [kind in ("mamba", "linear_attention") for kind in types])
    keys.only("normalization_function", "rmsnorm")
    keys.ignore("init_method", "position_embedding_type")
    rope = keys.data.get("position_embedding_type") == "rope"
    return fields | {"positions": "rope" if rope else "none"}


def _mamba_layers(keys: Keys, fields: Fields, layers: list[bool], *, beside: bool = False) -> Fields:
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


# -- state spaces ------------------------------------------------------------------------------------------------------


def _bamba(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=262_144, norm_eps=1e-5) | _biases(keys)
    attention = keys.array("attn_layer_indices", [])
    keys.ignore("layer_types", "layers_block_type", "attn_rotary_emb")
    rope = _partial_rope(keys, fields, 0.5)
    return fields | rope | _mamba_layers(keys, fields, [layer not in attention for layer in range(fields["layers"])])


def _falcon_h1(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=8192, norm_eps=1e-5) | _biases(keys)
    fields |= {"attn_out_bias": fields["qkv_bias"]}
    keys.ignore("mamba_norm_before_gate", "mamba_use_mlp", "attn_layer_indices", "mlp_expansion_factor")
    keys.only("projectors_bias", False)
    names = ("lm_head", "embedding", "key", "attention_out", "attention_in", "ssm_in", "ssm_out")
    scales = {f"{name}_multiplier": 1.0 for name in names} | {
        "mlp_multipliers": [1.0] * 2,
        "ssm_multipliers": [1.0] * 5,
    }
    parts = [_unless(keys, key, usual, key.replace("_", " ")) for key, usual in scales.items()]
    mixers = _mamba_layers(keys, fields, [True] * fields["layers"], beside=True)
    return _joined(fields, mixers, _rope(keys, fields["max_seq_len"]), *parts)


def _jamba(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=262_144) | {"positions": "none"}
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
    eps = _unless(keys, "mixer_rms_eps", None, "norms of steps and of state vectors")
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


# -- other mixtures of experts -----------------------------------------------------------------------------------------


def _gpt_oss(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072, d_head=64, norm_eps=1e-5)
    window = keys.whole("sliding_window", 128, null=None)
    keys.ignore("experts_per_token", "initial_context_length")
    experts, active = keys.whole("num_local_experts"), keys.whole("num_experts_per_tok")
    if not keys.has("rope_scaling") and not keys.has("rope_parameters"):
        keys = _with(keys, rope_scaling=_GPT_OSS_ROPE)
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


#: What transformers assumes of a gpt-oss file without rotary settings.
_GPT_OSS_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _llama4(keys: Keys) -> Fields:
    fields = _decoder(keys, kv_heads=8, max_seq_len=131_072, d_head=128, norm_eps=1e-5)
    chunk = keys.whole("attention_chunk_size", 8192, null=None)
    layers, d_expert = fields["layers"], fields["d_ff"]
    rope = _no_rope(keys, layers)
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
        "layer_windows": _windows(keys, layers, chunk, lambda layer: rope[layer], "chunked_attention"),
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
    return _joined(fields, _rope(keys, fields["max_seq_len"], 5e5), _bias(keys), scaled)


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
    activation = ffn.inner("ffn_act_fn").name("name", _ACTIVATIONS) if ffn.has("ffn_act_fn") else "silu"
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
    clipped = _unless(attention, "clip_qkv", None, "clipped queries, keys and values")
    return _joined(fields, _layer_norm(bias=False), _rope(keys, fields["max_seq_len"], theta), clipped)


# -- DeepSeek ----------------------------------------------------------------------------------------------------------


def _latent(keys: Keys, *, max_seq_len: int) -> Fields:
    """Fields that DeepSeek-V2 and V3 share: latent attention."""
    fields = _decoder(keys, max_seq_len=max_seq_len)
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
    fields |= _rope(keys, fields["max_seq_len"]) | {"d_head": d_head, "mla": mla, "kv_heads": fields["heads"]}
    weight = _rope_keys(keys).number("mscale_all_dim", 0)
    if fields.get("rope_scaling") is not None and weight:
        fields["query_scale"] = d_head**-0.5 * _mscale(fields["rope_scaling"].factor, weight) ** 2
    return fields


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


#: ``model_type`` -> the fields of a ModelConfig, all but name and family, from the keys of the file.
FAMILIES: Mapping[str, Callable[[Keys], Fields]] = {
    "apertus": _apertus,
    "arcee": _arcee,
    "bamba": _bamba,
    "bloom": _bloom,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "dbrx": _dbrx,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v32,
    "dots1": _dots1,
    "ernie4_5": _ernie4_5,
    "ernie4_5_moe": _ernie4_5_moe,
    "exaone4": _exaone4,
    "falcon": _falcon,
    "falcon_h1": _falcon_h1,
    "falcon_mamba": _falcon_mamba,
    "flex_olmo": _flex_olmo,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
    "gemma3n_text": _gemma3n,
    "glm": _glm,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "granite": _granite,
    "granitemoe": _granitemoe,
    "granitemoehybrid": _granitehybrid,
    "granitemoeshared": _granitemoe,
    "helium": _helium,
    "hunyuan_v1_dense": _hunyuan,
    "hunyuan_v1_moe": _hunyuan_moe,
    "jamba": _jamba,
    "kimi_k2": _deepseek_v3,
    "llama": _llama,
    "llama4_text": _llama4,
    "mamba": _mamba1,
    "mamba2": _mamba2,
    "minimax": _minimax,
    "minimax_m2": _minimax_m2,
    "ministral": _ministral,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "nemotron": _nemotron,
    "olmo": _olmo,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "olmoe": _olmoe,
    "opt": _opt,
    "phi": _phi,
    "phi3": _phi3,
    "phimoe": _phimoe,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_5_moe_text": _on_three_axes(_qwen3_5_moe),
    "qwen3_5_text": _on_three_axes(_qwen_delta),
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen3_next,
    "qwen3_vl_moe_text": _on_three_axes(_qwen3_moe),
    "qwen3_vl_text": _on_three_axes(_qwen3),
    "seed_oss": _seed_oss,
    "smollm3": _smollm3,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
    "vaultgemma": _vaultgemma,
}
