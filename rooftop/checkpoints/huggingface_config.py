"""A Hugging Face config.json for a ModelConfig: the inverse of ``rooftop.models.huggingface.from_huggingface``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from rooftop.errors import RooftopError, unknown
from rooftop.models import ModelConfig, from_huggingface
from rooftop.models.config import MoE

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}


def to_huggingface(model: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json that describes ``model``; read again, they give it back.

    Raises RooftopError for an unknown family, and for a field that no config.json of the family can say.
    """
    if model.family not in _ARCHITECTURES:
        raise unknown("model family", model.family, _ARCHITECTURES)
    keys = _FAMILIES.get(model.family, _decoder)(model)
    head = {"architectures": [_ARCHITECTURES[model.family]], "model_type": model.family}
    keys = head | ({"text_config": keys} if model.family == "gemma3" else keys)
    back = from_huggingface(keys, model.name)
    for field in dataclasses.fields(ModelConfig):
        meant, said = getattr(model, field.name), getattr(back, field.name)
        if meant != said:
            raise RooftopError(f"model {field.name}", meant, f"{said}: a config.json of {model.family} says no other")
    return keys


def _decoder(model: ModelConfig) -> dict[str, Any]:
    """What all but GPT-2 spell alike. A family ignores the keys that it does not have."""
    activation = "hidden_activation" if model.family.startswith("gemma") else "hidden_act"
    return {
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.d_head,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_seq_len,
        activation: _ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        "attention_bias": model.attn_out_bias,
        "mlp_bias": model.mlp_bias,
    }


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    keys: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        keys["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        keys |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        keys |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.truncate,
        }
    return keys


def _windows(model: ModelConfig) -> dict[str, Any]:
    """The windows layer by layer; where no layer has one, the file says no size either."""
    sizes = {window for window in model.windows if window is not None}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in model.windows]
    return {"sliding_window": next(iter(sizes), None), "layer_types": kinds}


def _one_window(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.windows[0]}


def _mixtral(model: ModelConfig) -> dict[str, Any]:
    moe = _experts(model)
    counts = {"num_local_experts": moe.experts, "num_experts_per_tok": moe.active}
    return _decoder(model) | _one_window(model) | counts


def _experts(model: ModelConfig) -> MoE:
    if model.moe is None:
        raise RooftopError("model moe", None, f"experts: every {model.family} has some")
    return model.moe


def _qwen(model: ModelConfig) -> dict[str, Any]:
    windows = _windows(model)
    return _decoder(model) | windows | {"use_sliding_window": windows["sliding_window"] is not None}


def _qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    moe, window = _experts(model), model.windows[0]
    return (
        _decoder(model)
        | _one_window(model)
        | {
            "use_sliding_window": window is not None,
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.active,
            "moe_intermediate_size": moe.d_ff,
            "mlp_only_layers": list(range(moe.dense_layers)),
            "decoder_sparse_step": 1,
            "norm_topk_prob": moe.normalise,
        }
    )


def _gemma(model: ModelConfig) -> dict[str, Any]:
    scale = model.d_head**-0.5 if model.query_scale is None else model.query_scale
    return (
        _decoder(model)
        | _windows(model)
        | {
            "attn_logit_softcapping": model.attn_softcap,
            "final_logit_softcapping": model.final_softcap,
            "query_pre_attn_scalar": round(scale**-2),
        }
        | ({} if model.rope_local_theta is None else {"rope_local_base_freq": model.rope_local_theta})
    )


def _gpt_oss(model: ModelConfig) -> dict[str, Any]:
    moe = _experts(model)
    return (
        _decoder(model)
        | _windows(model)
        | {
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.active,
            "swiglu_limit": model.swiglu_limit,
            "swiglu_alpha": model.swiglu_alpha,
        }
    )


def _deepseek(model: ModelConfig) -> dict[str, Any]:
    moe, mla = _experts(model), model.mla
    if mla is None:
        raise RooftopError("model mla", None, f"latent attention: every {model.family} has it")
    keys = _decoder(model) | {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.d_nope,
        "qk_rope_head_dim": mla.d_rope,
        "v_head_dim": mla.d_v,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_d_ff // moe.d_ff or None,
        "num_experts_per_tok": moe.active,
        "moe_intermediate_size": moe.d_ff,
        "first_k_dense_replace": moe.dense_layers,
        "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.routed_scaling,
        "n_group": moe.groups,
        "topk_group": moe.active_groups,
    }
    # The size that turns by positions; the whole head's is the sum of two keys above.
    keys["head_dim"] = mla.d_rope
    if model.family == "deepseek_v2":
        keys |= {"scoring_func": "softmax", "topk_method": "greedy" if moe.groups == 1 else "group_limited_greedy"}
    else:
        keys |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": model.rope_interleaved}
    if model.query_scale is not None and model.rope_scaling is not None and model.rope_scaling.factor > 1:
        keys["rope_scaling"]["mscale_all_dim"] = _mscale_all_dim(model, model.query_scale, model.rope_scaling.factor)
    return keys


def _mscale_all_dim(model: ModelConfig, scale: float, factor: float) -> float:
    """The weight w by which YaRN's temperature enters: scale = H**-0.5 (0.1 w ln(factor) + 1)**2, solved for w."""
    weight = (math.sqrt(scale * math.sqrt(model.d_head)) - 1) / (0.1 * math.log(factor))
    return float(f"{weight:.10g}")


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.d_model,
        "n_head": model.heads,
        "n_layer": model.layers,
        "n_inner": model.d_ff,
        "n_positions": model.max_seq_len,
        "vocab_size": model.vocab,
        "activation_function": "gelu_new" if model.activation == "gelu_tanh" else _ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
    }


_FAMILIES: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "mistral": lambda model: _decoder(model) | _one_window(model),
    "mixtral": _mixtral,
    "qwen2": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma3_text": _gemma,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
}
