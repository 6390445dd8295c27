"""GPT, Phi, Falcon, Cohere and others with layer norms."""

from __future__ import annotations

from collections.abc import Mapping

from rooftop.models.config import MOST_LAYERS
from rooftop.models.families.keys import Keys
from rooftop.models.families.parts import (
    ACTIVATIONS,
    Fields,
    Reader,
    all_biases,
    attention_bias,
    decoder,
    layer_norm,
    partial_rotary,
    rotary,
    same_window,
    use_bias,
    windows_of,
)


def _phi(keys: Keys) -> Fields:
    fields = decoder(keys, norm_eps=1e-5, eps="layer_norm_eps", activation=("hidden_act", "gelu_new"))
    keys.only("qk_layernorm", False)
    biases = dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias", "unembed_bias"), True)
    fields |= layer_norm() | {"parallel": "shared", "mlp_matrices": 2} | biases
    return fields | partial_rotary(keys, fields, 0.5)


def _starcoder2(keys: Keys) -> Fields:
    activation = ("hidden_act", "gelu_pytorch_tanh")
    fields = decoder(keys, max_seq_len=4096, norm_eps=1e-5, eps="norm_epsilon", tied=True, activation=activation)
    window = keys.whole("sliding_window", None)
    keys.only("mlp_type", "default")
    keys.only("norm_type", "layer_norm")
    fields |= same_window(keys, fields["layers"], window) | layer_norm() | {"mlp_matrices": 2}
    return fields | rotary(keys, fields["max_seq_len"]) | use_bias(keys, True)


def _stablelm(keys: Keys) -> Fields:
    fields = decoder(keys, max_seq_len=4096, norm_eps=1e-5, eps="layer_norm_eps")
    parallel = "shared" if keys.flag("use_parallel_residual", False) else None
    qk_norm = "heads" if keys.flag("qk_layernorm", False) else None
    fields |= layer_norm() | {"parallel": parallel, "qk_norm": qk_norm, "qkv_bias": keys.flag("use_qkv_bias", False)}
    return fields | partial_rotary(keys, fields, 0.25)


def _cohere(keys: Keys) -> Fields:
    fields = decoder(keys, max_seq_len=8192, norm_eps=1e-5, eps="layer_norm_eps", tied=True)
    qk_norm = "heads" if keys.flag("use_qk_norm", False) else None
    fields |= layer_norm(bias=False) | {"parallel": "shared", "rope_interleaved": True, "qk_norm": qk_norm}
    fields |= {"logits_scale": keys.number("logit_scale", 0.0625)}
    return fields | rotary(keys, fields["max_seq_len"], 5e5) | attention_bias(keys)


def _cohere2(keys: Keys) -> Fields:
    fields = _cohere(keys)
    every, window = keys.whole("sliding_window_pattern", 4), keys.whole("sliding_window", 4096, null=None)
    keys.ignore("order_of_interleaved_layers", "rotary_pct", "position_embedding_type", "layer_switch")
    keys.only("use_gated_activation", True)
    keys.only("use_parallel_block", True)
    keys.only("use_parallel_embedding", False)
    windows = windows_of(keys, fields["layers"], window, lambda layer: (layer + 1) % every != 0)
    fields |= {"layer_windows": windows, "rope_layers": tuple(window is not None for window in windows)}
    return fields | rotary(keys, fields["max_seq_len"])


def _nemotron(keys: Keys) -> Fields:
    activation = ("hidden_act", "relu2")
    fields = decoder(keys, max_seq_len=4096, norm_eps=1e-5, eps="norm_eps", activation=activation)
    fields |= layer_norm() | {"norm_offset": True, "mlp_matrices": 2} | all_biases(keys)
    return fields | partial_rotary(keys, fields, 0.5)


def _gpt_neox(keys: Keys) -> Fields:
    activation = ("hidden_act", "gelu")
    fields = decoder(keys, norm_eps=1e-5, eps="layer_norm_eps", activation=activation)
    parallel = "own" if keys.flag("use_parallel_residual", True) else None
    fields |= layer_norm() | {"mlp_matrices": 2, "mlp_bias": True, "parallel": parallel} | attention_bias(keys, True)
    return fields | partial_rotary(keys, fields, 0.25)


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
        "activation": keys.name("activation_function", ACTIVATIONS, "gelu_new"),
        "tied_embeddings": keys.flag("tie_word_embeddings", False),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "mlp_matrices": 2,
        "mlp_bias": True,
        "unembed_bias": True,
        "parallel": "shared",
        "rotary_dims": keys.whole("rotary_dim", 64),
        "rope_interleaved": True,
    } | layer_norm()  # fmt: skip


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
        "activation": keys.name("activation_function", ACTIVATIONS, "gelu_new"),
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
        "activation": keys.name("activation_function", ACTIVATIONS, "relu"),
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "norm_eps": 1e-5,
        "mlp_matrices": 2,
        "positions": "learned",
        "position_offset": 2,
        **dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), keys.flag("enable_bias", True)),
    } | layer_norm()  # fmt: skip


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
    } | layer_norm()  # fmt: skip


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
        "activation": keys.name("activation", ACTIVATIONS, "gelu"),
        "tied_embeddings": keys.flag("tie_word_embeddings", True),
        "norm_eps": keys.number("layer_norm_epsilon", 1e-5),
        "mlp_matrices": 2,
        "positions": positions,
        "parallel": ("own" if own else "shared") if new or parallel else None,
        **dict.fromkeys(("qkv_bias", "attn_out_bias", "mlp_bias"), keys.flag("bias", False)),
    }
    return fields | layer_norm() | rotary(keys, fields["max_seq_len"])


#: Readers by ``model_type``.
FAMILIES: Mapping[str, Reader] = {
    "bloom": _bloom,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "falcon": _falcon,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "nemotron": _nemotron,
    "opt": _opt,
    "phi": _phi,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}
