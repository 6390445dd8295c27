"""Tensors and greedy tokens by transformers of checkpoints in published formats: writes formats.json.

    pip install torch transformers accelerate compressed-tensors; python tests/oracles/make_formats.py GPTQMODEL AUTOAWQ

FP8, MXFP4 and compressed-tensors are read by transformers itself, on a CPU, to bf16. GPTQ and AWQ ask for packages
whose kernels need a GPU: GPTQMODEL and AUTOAWQ are the unpacked sources of gptqmodel and autoawq, whose dequantisation
in torch is called tensor by tensor, and transformers continues with its result. Stored are a digest of every
dequantised tensor, logits, and greedy continuations in float32. Nothing of rooftop is imported.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import make_greedy
import make_logits
import numpy as np
import tiny_formats

HERE = Path(__file__).parent
_LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96, "max_position_embeddings": 256,
    "rms_norm_eps": 0.001, "rope_theta": 500.0, "tie_word_embeddings": False,
}  # fmt: skip
_GPT_OSS = {
    "model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96,
    "max_position_embeddings": 256, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
    "swiglu_limit": 0.8, "rms_norm_eps": 0.001, "rope_theta": 150.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0, "beta_slow": 1.0,
                     "original_max_position_embeddings": 64, "truncate": False},
}  # fmt: skip
_DEEPSEEK = {
    "model_type": "deepseek_v3", "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 256, "q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "n_routed_experts": 4, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "attention_bias": False, "rope_theta": 100.0,
}  # fmt: skip
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
_GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "checkpoint_format": "gptq",
}


def _compressed(strategy: str, format_: str = "float-quantized", **more: Any) -> dict[str, Any]:
    activations: dict[str, Any] | None = {
        "dynamic": True,
        "num_bits": 8,
        "strategy": "token",
        "symmetric": True,
        "type": "float",
    }
    weights = {"dynamic": False, "num_bits": 8, "strategy": strategy, "symmetric": True, "type": "float"} | more
    if format_ == "pack-quantized":
        activations = None
    return {
        "quant_method": "compressed-tensors",
        "format": format_,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}},
    }


#: The models, and how each is stored. Blocks of 8 x 16: kv_a_proj_with_mqa has 32 outputs, kv_b_proj 24 inputs.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gpt_oss_mxfp4": (_GPT_OSS, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}),
    "deepseek_v3_fp8": (_DEEPSEEK, _FP8 | {"weight_block_size": [16, 8]}),
    "llama_fp8": (_LLAMA, _FP8 | {"weight_block_size": None, "activation_scheme": "static"}),
    "llama_channels": (_LLAMA, _compressed("channel")),
    "llama_tensors": (_LLAMA, _compressed("tensor")),
    "llama_packed": (_LLAMA, _compressed("group", "pack-quantized", type="int", num_bits=4, group_size=32)),
    "llama_packed_channels": (_LLAMA, _compressed("channel", "pack-quantized", type="int")),
    "llama_gptq": (_LLAMA, _GPTQ),
    "llama_gptq_ordered": (_LLAMA, _GPTQ | {"desc_act": True, "sym": False, "group_size": 16}),
    "llama_gptq_v2": (_LLAMA, _GPTQ | {"bits": 8, "sym": False, "group_size": -1, "checkpoint_format": "gptq_v2"}),
    "llama_awq": (_LLAMA, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}),
}


def main() -> None:
    """Write formats.json."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    gptqmodel, autoawq = map(Path, sys.argv[1:])
    results = dict[str, Any]()
    for name, (keys, stored) in CASES.items():
        with tempfile.TemporaryDirectory() as plain, tempfile.TemporaryDirectory() as packed:
            shapes = make_logits._write_checkpoint(keys, 1.0, Path(plain))
            tensors = tiny_formats.tensors(shapes, stored)
            whole = {**keys, "quantization_config": stored}
            tiny_formats.write(Path(packed), whole, tensors)
            if stored["quant_method"] in ("gptq", "awq"):
                model, values = _unpacked(tensors, stored, keys, Path(plain), gptqmodel, autoawq)
            else:
                model, values = _read(Path(packed), keys)
        assert values.keys() == shapes.keys(), values.keys() ^ shapes.keys()
        tokens = np.random.RandomState(0).randint(1, 90, (1, 12))
        results[name] = {
            "config": whole,
            "weights": shapes,
            "digests": {name: _digest(value) for name, value in values.items() if name not in tensors
                        or tensors[name][1] == "F8_E4M3"},
            "tokens": tokens.tolist(),
            "logits": np.round(_logits(model, tokens)[0, -1].astype(float), 5).tolist(),
            "greedy": make_greedy._continued(model, name)[:3],
        }  # fmt: skip
        print(name, len(results[name]["digests"]))
    made_with = make_logits._made_with() | {"script": Path(__file__).name} | _versions(gptqmodel, autoawq)
    text = ",\n".join(f"{json.dumps(name)}: {{\n" + ",\n".join(
        f"  {json.dumps(key)}: {make_logits._json(value)}" for key, value in case.items()) + "\n}"
        for name, case in results.items())  # fmt: skip
    (HERE / "formats.json").write_text(f'{{\n"made_with": {json.dumps(made_with)},\n{text}\n}}\n', encoding="utf-8")


def _versions(*sources: Path) -> dict[str, str]:
    import accelerate
    import compressed_tensors

    names = {source.name.rpartition("-")[0]: source.name.rpartition("-")[2] for source in sources}
    return {"accelerate": accelerate.__version__, "compressed-tensors": compressed_tensors.__version__, **names}


def _digest(value: Any) -> str:
    """A digest of a tensor's bytes."""
    import torch

    return hashlib.sha256(value.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _logits(model: Any, tokens: Any) -> Any:
    import torch

    with torch.no_grad():
        return model(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()


def _read(folder: Path, keys: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The model of a quantised checkpoint in float32, and its tensors in bf16 by their names in a plain checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import CompressedTensorsConfig

    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    if "config_groups" in (json.loads((folder / "config.json").read_text())["quantization_config"]):
        how["quantization_config"] = CompressedTensorsConfig(run_compressed=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **how).eval()
    values = dict[str, Any]()
    for name, value in model.state_dict().items():
        assert value.dtype in (torch.bfloat16, torch.float32), (name, value.dtype)
        if keys["model_type"] == "deepseek_v3" and ".experts." in name:
            prefix, _, kind = name.rpartition(".")
            for expert, matrix in enumerate(value):
                parts = dict(zip(("gate", "up"), matrix.chunk(2), strict=True)) if "gate" in kind else {"down": matrix}
                values |= {f"{prefix}.{expert}.{part}_proj.weight": array for part, array in parts.items()}
        else:
            values[name] = value
    return model.float(), {name: value.clone() for name, value in values.items()}


def _unpacked(
    tensors: Any, stored: dict[str, Any], keys: dict[str, Any], plain: Path, gptqmodel: Path, autoawq: Path
) -> tuple[Any, dict[str, Any]]:
    """The model with matrices that the packages dequantise, in float32, and its tensors in f16."""
    import safetensors.torch
    import torch

    values = dict[str, Any]()
    arrays = {name: torch.tensor(array) for name, (array, _) in tensors.items()}
    for name, array in arrays.items():
        module, _, kind = name.rpartition(".")
        if kind == "qweight":
            parts = {part: arrays[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales")}
            if stored["quant_method"] == "awq":
                packing = _module(autoawq / "awq" / "utils" / "packing_utils.py")
                matrix = packing.dequantize_gemm(**parts, bits=4, group_size=stored["group_size"])
            else:
                matrix = _gptq(gptqmodel, stored, **parts, g_idx=arrays[f"{module}.g_idx"])
            values[f"{module}.weight"] = matrix.T.contiguous()
        elif re.search(r"(weight|bias)$", name):
            values[name] = array
    assert all(value.dtype == torch.float16 for value in values.values())
    safetensors.torch.save_file(values, plain / "model.safetensors", {"format": "pt"})
    return make_logits._load(plain), values


def _gptq(source: Path, stored: dict[str, Any], qweight: Any, qzeros: Any, scales: Any, g_idx: Any) -> Any:
    """[in, out] by gptqmodel, with its conversion of the zero points of the first version of the format."""
    import torch

    sys.path.insert(0, str(source))
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    bits, inputs = stored["bits"], len(g_idx)
    layer = TorchLinear(
        bits=bits, group_size=stored["group_size"], sym=stored["sym"], desc_act=stored["desc_act"],
        in_features=inputs, out_features=qweight.shape[1], bias=False, pack_dtype=torch.int32, register_buffers=True,
    )  # fmt: skip
    layer.qweight, layer.qzeros, layer.scales, layer.g_idx = qweight, qzeros.clone(), scales, g_idx
    if stored["checkpoint_format"] == "gptq":
        convert_gptq_v1_to_v2_format_module(layer, bits=bits, pack_dtype=torch.int32)
    layer.post_init()
    return layer.dequantize_weight()


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
