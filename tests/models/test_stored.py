"""``quantization_config`` of published files: the format, its bytes, and the refusal of what is not read."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Any

import pytest

from rooftop.core.errors import RooftopError
from rooftop.models import ModelConfig, from_huggingface
from rooftop.models.stored import StoredWeights

MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
BLOCK_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
FBGEMM = {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8"}
GPTQ = {"bits": 4, "group_size": 128, "desc_act": True, "sym": True, "quant_method": "gptq", "damp_percent": 0.1}
AWQ = {"bits": 4, "group_size": 128, "version": "gemm", "zero_point": True, "quant_method": "awq"}


def compressed(**weights: Any) -> dict[str, Any]:
    """A config of compressed-tensors as llm-compressor writes it."""
    args = {"actorder": None, "dynamic": False, "group_size": None, "num_bits": 8, "observer": "minmax"}
    args |= {"strategy": "channel", "symmetric": True, "type": "float"}
    activations = {"dynamic": True, "num_bits": 8, "strategy": "token", "type": "float"}
    group = {"input_activations": activations, "targets": ["Linear"], "weights": args | weights}
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


INT4 = {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 128}
PACKED = compressed(**INT4) | {"format": "pack-quantized"}


def quantised(preset: str, config: dict[str, Any]) -> ModelConfig:
    """A preset with a quantization_config."""
    text = (resources.files("rooftop.models") / "presets" / f"{preset}.json").read_text()
    return from_huggingface(json.loads(text) | {"quantization_config": config}, preset)


def bytes_of(preset: str, config: dict[str, Any]) -> int:
    stored = StoredWeights.of(quantised(preset, config))
    assert stored is not None
    return stored.bytes


@pytest.mark.parametrize(("preset", "published"), [("gpt-oss-20b", 13_761_264_768), ("gpt-oss-120b", 65_248_815_744)])
def test_bytes_are_those_of_the_published_checkpoints(preset: str, published: int) -> None:
    """``metadata.total_size`` of the index of the repository's safetensors: all tensors, without headers."""
    assert bytes_of(preset, MXFP4) == published


#: Llama 3.1 8B: its matrices by outputs and inputs, each in 32 layers, and its other weights.
MATRICES = [*[(4096, 4096)] * 2, *[(1024, 4096)] * 2, *[(14336, 4096)] * 2, (4096, 14336)]
OTHERS = 2 * 128_256 * 4096 + 65 * 4096


@pytest.mark.parametrize(
    ("config", "matrix"),
    [
        (BLOCK_FP8, lambda out, in_: out * in_ + 4 * (out // 128) * (in_ // 128)),
        (BLOCK_FP8 | {"weight_block_size": None}, lambda out, in_: out * in_ + 4),
        (FBGEMM, lambda out, in_: out * in_ + 4 * out),
        (compressed(), lambda out, in_: out * in_ + 2 * out),
        (compressed(strategy="tensor"), lambda out, in_: out * in_ + 2),
        # Packed values, scales in bf16, and the shape.
        (PACKED, lambda out, in_: out * in_ // 2 + in_ // 128 * out * 2 + 16),
        # Packed values, scales in f16, packed zero points, and the group of each input.
        (GPTQ, lambda out, in_: out * in_ // 2 + in_ // 128 * out * 2 + in_ // 128 * out // 2 + 4 * in_),
        (AWQ, lambda out, in_: out * in_ // 2 + in_ // 128 * out * 2 + in_ // 128 * out // 2),
        (GPTQ | {"bits": 8, "group_size": -1}, lambda out, in_: out * in_ + 2 * out + out + 4 * in_),
    ],
)
def test_bytes_of_each_format(config: dict[str, Any], matrix: Any) -> None:
    assert bytes_of("llama3.1-8b", config) == 32 * sum(matrix(*shape) for shape in MATRICES) + 2 * OTHERS


def test_modules_that_are_left_out_are_plain() -> None:
    patterns = ["model.layers.0.mlp", "lm_head", "o_proj", r"model.layers.\d+.self_attn.q_proj"]
    left_out = 3 * 14336 * 4096 + 32 * 2 * 4096 * 4096
    whole = bytes_of("llama3.1-8b", BLOCK_FP8)
    fewer = bytes_of("llama3.1-8b", BLOCK_FP8 | {"modules_to_not_convert": patterns})
    assert fewer - whole == left_out - left_out // (128 * 128) * 4
    ignored = compressed() | {"ignore": ["re:.*self_attn.*", "lm_head", "model.layers.1.mlp.up_proj"]}
    attention, up = 32 * sum(out * in_ - 2 * out for out, in_ in MATRICES[:4]), 14336 * 4096 - 2 * 14336
    assert bytes_of("llama3.1-8b", ignored) - bytes_of("llama3.1-8b", compressed()) == attention + up


def test_experts_and_latents_have_blocks_of_their_own() -> None:
    """DeepSeek-V3: 576 outputs of the latents are 5 blocks; routers, norms and tables are plain."""

    def fp8(out: int, in_: int) -> int:
        return out * in_ + 4 * -(-out // 128) * -(-in_ // 128)

    attention = fp8(1536, 7168) + fp8(24576, 1536) + fp8(576, 7168) + fp8(32768, 512) + fp8(7168, 16384)
    dense = 2 * fp8(18432, 7168) + fp8(7168, 18432)
    expert = 2 * fp8(2048, 7168) + fp8(7168, 2048)
    plain = 2 * 129_280 * 7168 + 58 * (7168 * 256 + 256) + 61 * (2 * 7168 + 1536 + 512) + 7168
    assert bytes_of("deepseek-v3", BLOCK_FP8) == 61 * attention + 3 * dense + 58 * 257 * expert + 2 * plain


def test_the_format_changes_no_model() -> None:
    model = quantised("llama3.1-8b", GPTQ)
    assert model == quantised("llama3.1-8b", AWQ) and hash(model) == hash(quantised("llama3.1-8b", AWQ))
    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))).stored == model.stored
    nested = {"model_type": "llava", "text_config": {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 1,
              "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}}  # fmt: skip
    assert from_huggingface(nested | {"quantization_config": AWQ}).stored == quantised("llama3.1-8b", AWQ).stored


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}, "quant_method: got 'bitsandbytes'"),
        (GPTQ | {"bits": 3}, "bits: got 3; accepted: 4 or 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: got 'marlin'"),
        (GPTQ | {"dynamic": {"-:.*down": {}}}, "dynamic: got"),
        (GPTQ | {"group_size": 0}, "group_size: got 0"),
        (AWQ | {"version": "gemv"}, "version: got 'gemv'; accepted: \"gemm\""),
        (BLOCK_FP8 | {"fmt": "e5m2"}, "fmt: got 'e5m2'"),
        (BLOCK_FP8 | {"expert_dtype": "fp4"}, "expert_dtype: got 'fp4'"),
        (BLOCK_FP8 | {"weight_block_size": [128]}, "weight_block_size: got [128]"),
        (BLOCK_FP8 | {"modules_to_convert": ["lm_head"]}, "modules_to_convert: got"),
        (compressed(type="int"), "config_groups.group_0.weights.type: got 'int'"),
        (PACKED | {"format": "int-quantized"}, "format: got 'int-quantized'; accepted: did you mean"),
        (compressed(**INT4, symmetric=False) | {"format": "pack-quantized"}, "symmetric: got False"),
        (compressed(**INT4, actorder="group") | {"format": "pack-quantized"}, "actorder: got 'group'"),
        (compressed(strategy="group"), "strategy: got 'group'"),
        (compressed() | {"format": "pack-quantized"}, "config_groups.group_0.weights.type: got 'float'"),
        (compressed() | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme: got"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format: got"),
    ],
)
def test_what_is_not_read_is_refused(config: dict[str, Any], words: str) -> None:
    with pytest.raises(RooftopError, match=re.escape(words)):
        quantised("llama3.1-8b", config)
