"""Parameters of every model type that rooftop reads, as transformers builds it: type_counts.json.

Two models of each type: the published sizes that its configuration class has as defaults, and a tiny one that turns on
what the type can do. What is stored: of the first all keys of its config.json, less those that are null and those of
every class, and the number of parameters; of the second also the few keys that it is made from.

    .venv-oracles/bin/python tests/oracles/make_type_counts.py [TYPE ...]

Modules are built on the meta device: no weights, no download. Nothing of rooftop is imported.
"""

from __future__ import annotations

import copy
import datetime
import json
import sys
from pathlib import Path
from typing import Any

OUTPUT = Path(__file__).with_name("type_counts.json")

#: Keys of every configuration class, which say nothing of a model.
COMMON = frozenset(
    """
    _name_or_path architectures attention_dropout bos_token_id chunk_size_feed_forward cross_attention_hidden_size
    decoder_start_token_id dtype eos_token_id id2label initializer_range is_encoder_decoder label2id
    output_attentions output_hidden_states pad_token_id problem_type return_dict sep_token_id tokenizer_class
    transformers_version use_cache
    """.split()  # noqa: SIM905
)
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "max_position_embeddings": 64,
}
HEAD = {"head_dim": 16}
FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LOCAL_EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_shared_experts": 2}
LATENT = {"q_lora_rank": 20, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 10}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2}
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
}
#: What tiny models have beyond SIZES; a key of None takes the class's own default.
TINY: dict[str, dict[str, Any]] = {
    "apertus": {"attention_bias": True},
    "arcee": {"attention_bias": True, "mlp_bias": True, **HEAD},
    "bamba": {"attn_layer_indices": [1, 3], **MAMBA, "mamba_proj_bias": False},
    "bloom": {
        "hidden_size": 32, "n_layer": 3, "n_head": 4,
        **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
                         "max_position_embeddings")),
    },
    "cohere": {"attention_bias": True, "use_qk_norm": True},
    "cohere2": {"layer_types": [SLIDING, SLIDING, SLIDING, FULL], "sliding_window": 8, **HEAD},
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 3,
        "vocab_size": 96,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 32},
    },
    "deepseek_v2": {**ROUTED, **LATENT, "first_k_dense_replace": 1, "num_key_value_heads": 4},
    "deepseek_v3": {**ROUTED, **LATENT, "first_k_dense_replace": 2, "num_key_value_heads": 4, "n_group": 2,
                    "topk_group": 1},
    "deepseek_v32": {
        **ROUTED, **LATENT, "num_key_value_heads": 4, "n_group": 2, "topk_group": 1, "index_n_heads": 2,
        "index_head_dim": 16, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "first_k_dense_replace": 1,
    },
    "dots1": {**ROUTED, "first_k_dense_replace": 1, "attention_bias": True, **HEAD},
    "ernie4_5": {"use_bias": True, **HEAD},
    "ernie4_5_moe": {"moe_intermediate_size": 24, "moe_k": 2, "moe_num_experts": 6, "moe_num_shared_experts": 2,
                     "moe_layer_start_index": 1, "moe_layer_end_index": 3},
    "exaone4": {"sliding_window": 8, "sliding_window_pattern": 4},
    "falcon": {"num_attention_heads": 4, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True,
               "ffn_hidden_size": 48, "num_key_value_heads": None, "intermediate_size": None},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "attention_bias": True},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4, "num_key_value_heads": None, "intermediate_size": 64,
                     "num_attention_heads": None, "max_position_embeddings": None},
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 2, "pad_token_id": 0},
    "gemma": HEAD,
    "gemma2": {"sliding_window": 8, **HEAD},
    "gemma3_text": {"sliding_window": 8, "attention_bias": True, **HEAD},
    "gemma3n_text": {
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 80, "laurel_rank": 4, "num_kv_shared_layers": 1,
        "layer_types": [SLIDING, FULL, SLIDING, FULL], "activation_sparsity_pattern": [0.0] * 4, "sliding_window": 8,
        "altup_num_inputs": 2, **HEAD,
    },
    "glm": {**HEAD, "attention_bias": True, "pad_token_id": 0},
    "glm4": {**HEAD, "attention_bias": True, "pad_token_id": 0},
    "glm4_moe": {**ROUTED, "first_k_dense_replace": 1, "attention_bias": True, "use_qk_norm": True, **HEAD},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96},
    "gpt_neox": {"num_key_value_heads": None},
    "gpt_oss": {**LOCAL_EXPERTS, **HEAD},
    "gptj": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "vocab_size": 96, "rotary_dim": 4},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 4.0, "residual_multiplier": 0.5,
                "attention_multiplier": 0.2, "attention_bias": True, "mlp_bias": True},
    "granitemoe": {**LOCAL_EXPERTS, "embedding_multiplier": 3.0, "attention_bias": True},
    "granitemoehybrid": {**LOCAL_EXPERTS, **MAMBA, "shared_intermediate_size": 40,
                         "layer_types": ["mamba", "mamba", "attention", "mamba"]},
    "granitemoeshared": {**LOCAL_EXPERTS, "shared_intermediate_size": 40},
    "helium": {**HEAD, "hidden_size": 64, "attention_bias": True, "mlp_bias": True},
    "hunyuan_v1_dense": {"attention_bias": True, **HEAD},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, **HEAD},
    "jamba": {"num_experts": 4, "attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 4, "mamba_d_state": 8},
    "llama": {"attention_bias": True, "mlp_bias": True, **HEAD},
    "llama4_text": {"intermediate_size_mlp": 64, "num_local_experts": 4, "interleave_moe_layer_step": 2,
                    "attention_chunk_size": 8, "attention_bias": True, **HEAD},
    "mamba": {"state_size": 8, "time_step_rank": 4, "num_key_value_heads": None, "intermediate_size": 64,
              "num_attention_heads": None, "max_position_embeddings": None, "use_bias": True},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "num_key_value_heads": None,
               "intermediate_size": None, "num_attention_heads": None, "max_position_embeddings": None,
               "use_bias": True},
    "minimax": {**LOCAL_EXPERTS, **HEAD, "layer_types": [LINEAR, LINEAR, FULL, LINEAR]},
    "minimax_m2": {**LOCAL_EXPERTS, **HEAD, "rotary_dim": 8},
    "ministral": {"sliding_window": 8, "layer_types": [SLIDING, FULL, SLIDING, FULL], **HEAD},
    "mistral": {"sliding_window": 8, **HEAD},
    "mixtral": {**LOCAL_EXPERTS, **HEAD},
    "nemotron": {"attention_bias": True, "mlp_bias": True, **HEAD},
    "olmo": {"attention_bias": True},
    "olmo2": {"attention_bias": True},
    "olmo3": {"sliding_window": 8},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 2},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "num_key_value_heads": None, "intermediate_size": None},
    "phi": {},
    "phi3": {"pad_token_id": 0},
    "phimoe": {**LOCAL_EXPERTS, "attention_bias": True, "lm_head_bias": True},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2},
    "qwen3": {"attention_bias": True, **HEAD},
    "qwen3_5_moe_text": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40, **HEAD},
    "qwen3_5_text": {**DELTA, **HEAD},
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [0], **HEAD},
    "qwen3_next": {**EXPERTS, **DELTA, "shared_expert_intermediate_size": 40, "mlp_only_layers": [0], **HEAD},
    "seed_oss": {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True, **HEAD},
    "smollm3": {"attention_bias": True, "pad_token_id": 0},
    "stablelm": {"use_qkv_bias": True, "qk_layernorm": True},
    "starcoder2": {"sliding_window": 8},
    "vaultgemma": {"sliding_window": 8, **HEAD},
}  # fmt: skip
#: Types whose keys of SIZES have other names, so that they take none of them.
OWN_SIZES = {"gpt2", "gptj", "dbrx"}
#: Types whose defaults describe no model, or one that transformers cannot build.
NO_DEFAULT = {"bloom", "dbrx", "deepseek_v2", "dots1", "glm4_moe", "hunyuan_v1_moe"}
#: What the defaults of a class leave out.
MISSING = {
    "hunyuan_v1_dense": {"head_dim": 128},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
}
#: A choosing bias is a weight, but kept as a buffer.
BIAS = "e_score_correction_bias"


def tiny(kind: str) -> dict[str, Any]:
    """Keys of the tiny model of a type."""
    sizes = {} if kind in OWN_SIZES else SIZES
    return {key: value for key, value in {**sizes, **TINY[kind]}.items() if value is not None}


def describe(kind: str, keys: dict[str, Any]) -> dict[str, Any]:
    """Keys of a config.json of type ``kind`` as transformers completes them, and its parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **copy.deepcopy(keys))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    weights = [*model.parameters(), *(buffer for name, buffer in model.named_buffers() if name.endswith(BIAS))]
    return {"config": _plain(config.to_dict()), "total": sum(weight.numel() for weight in weights)}


def _plain(keys: dict[str, Any]) -> dict[str, Any]:
    """Keys that say something; infinite bounds, which JSON does not have, are left out."""
    plain = {}
    for name, value in keys.items():
        if name in COMMON or value is None or (isinstance(value, list) and float("inf") in value):
            continue
        plain[name] = _plain(value) if isinstance(value, dict) else list(value) if isinstance(value, tuple) else value
    return plain


def main() -> None:
    """Write type_counts.json, of the named types or of all."""
    import torch
    import transformers

    models = json.loads(OUTPUT.read_text(encoding="utf-8"))["models"] if OUTPUT.exists() else {}
    for kind in sys.argv[1:] or TINY:
        keys = tiny(kind)
        models[kind] = {"tiny": describe(kind, keys)}
        models[kind]["tiny"]["keys"] = {"model_type": kind, **keys}
        if kind not in NO_DEFAULT:
            models[kind]["default"] = describe(kind, MISSING.get(kind, {}))
        print(kind, {size: model["total"] for size, model in models[kind].items()})
    lines = [
        f"    {json.dumps(kind)}: {{\n"
        + ",\n".join(f"      {json.dumps(size)}: {json.dumps(model)}" for size, model in sorted(sizes.items()))
        + "\n    }"
        for kind, sizes in sorted(models.items())
    ]
    made_with = {
        "script": Path(__file__).name,
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    body = ",\n".join(lines)
    OUTPUT.write_text(
        f'{{\n  "made_with": {json.dumps(made_with)},\n  "models": {{\n{body}\n  }}\n}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    main()
