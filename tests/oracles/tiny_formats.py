"""Tiny checkpoints in the formats in which weights are published, drawn by a rule, so that none is stored.

NumPy only: make_formats.py gives them to transformers, our tests to the program. Quantised matrices are random bits.
Tensors are pairs of an array and its dtype in safetensors, since NumPy has neither bf16 nor FP8.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiny_weights

Tensor = tuple[np.ndarray[Any, Any], str]
_MATRIX = re.compile(r"_proj(_with_mqa)?\.weight$")
_EXPERTS = re.compile(r"experts\.(gate_up|down)_proj$")
#: Root mean square of random e4m3, e2m1, and 4 and 8 bits around their middle.
_RMS = {"fp8": 130.0, "mxfp4": 2.9, 4: 6.5, 8: 105.0}


def tensors(shapes: Mapping[str, Sequence[int]], config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of a checkpoint whose plain ones would have ``shapes``, as the quantization_config says."""
    method = config["quant_method"]
    result = dict[str, Tensor]()
    for name, shape in shapes.items():
        plain = tiny_weights.weight(name, shape)
        random = np.random.RandomState(zlib.crc32(f"{method} {name}".encode()))
        if method == "mxfp4" and _EXPERTS.search(name):
            result |= _mxfp4(name, shape, random)
        elif method in ("gptq", "awq") and _MATRIX.search(name):
            result |= _words(name.removesuffix(".weight"), shape, config, random)
        elif config.get("format") == "pack-quantized" and _MATRIX.search(name):
            result |= _packed(name, shape, config["config_groups"]["group_0"]["weights"], random)
        elif method in ("fp8", "fbgemm_fp8", "compressed-tensors") and _MATRIX.search(name):
            result |= _fp8(name, shape, config, random)
        elif method in ("gptq", "awq"):
            result[name] = plain.astype(np.float16), "F16"
        else:
            result[name] = _bf16(plain), "BF16"
    return result


def write(folder: Path, keys: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """A folder with config.json and model.safetensors."""
    header, offset = dict[str, Any](), 0
    for name, (array, code) in tensors.items():
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": [offset, offset := offset + array.nbytes]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    body = b"".join(np.ascontiguousarray(array).tobytes() for array, _ in tensors.values())
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    (folder / "config.json").write_text(json.dumps(dict(keys)), encoding="utf-8")


def _bf16(values: Any) -> Any:
    """The upper halves of float32."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _scales(shape: Sequence[int], grid: Sequence[int], rms: float, random: Any) -> Any:
    """Scales with which the matrix is about as large as that of tiny_weights."""
    return ((shape[-1] * shape[-2]) ** -0.25 / rms * random.uniform(0.5, 1.5, grid)).astype(np.float32)


def _fp8(name: str, shape: Sequence[int], config: Mapping[str, Any], random: Any) -> dict[str, Tensor]:
    bits = random.randint(0, 256, shape).astype(np.uint8)
    bits = np.where(bits & 127 == 127, bits - 1, bits).astype(np.uint8)  # not NaN
    result = {name: (bits, "F8_E4M3")}
    if config["quant_method"] == "fp8":
        block = config["weight_block_size"]
        grid = [-(-size // part) for size, part in zip(shape, block, strict=True)] if block else []
        return result | {f"{name}_scale_inv": (_scales(shape, grid, _RMS["fp8"], random), "F32")}
    weights = config.get("config_groups", {}).get("group_0", {}).get("weights", {"strategy": "channel"})
    grid = [shape[0], 1] if weights["strategy"] == "channel" else [1]
    scales = _scales(shape, grid, _RMS["fp8"], random)
    plain = (scales, "F32") if config["quant_method"] == "fbgemm_fp8" else (_bf16(scales), "BF16")
    return result | {f"{name}_scale": plain}


def _mxfp4(name: str, shape: Sequence[int], random: Any) -> dict[str, Tensor]:
    experts, inputs, outputs = shape
    grid = (experts, outputs, inputs // 32)
    exponents = np.round(np.log2(_scales(shape, grid, _RMS["mxfp4"], random))) + 127
    return {
        f"{name}_blocks": (random.randint(0, 256, (*grid, 16)).astype(np.uint8), "U8"),
        f"{name}_scales": (exponents.astype(np.uint8), "U8"),
    }


def _packed(name: str, shape: Sequence[int], weights: Mapping[str, Any], random: Any) -> dict[str, Tensor]:
    (outputs, inputs), bits = shape, weights["num_bits"]
    grid = (outputs, inputs // weights["group_size"] if weights["strategy"] == "group" else 1)
    words = random.randint(-(2**31), 2**31, (outputs, inputs * bits // 32)).astype(np.int32)
    return {
        f"{name}_packed": (words, "I32"),
        f"{name}_scale": (_bf16(_scales(shape, grid, _RMS[bits], random)), "BF16"),
        f"{name}_shape": (np.array(shape, np.int64), "I64"),
    }


def _words(name: str, shape: Sequence[int], config: Mapping[str, Any], random: Any) -> dict[str, Tensor]:
    (outputs, inputs), bits = shape, config["bits"]
    per_word, group = 32 // bits, config["group_size"] if config["group_size"] > 0 else shape[1]
    groups = inputs // group

    def words(*grid: int) -> Tensor:
        return random.randint(-(2**31), 2**31, grid).astype(np.int32), "I32"

    result = {f"{name}.scales": (_scales(shape, (groups, outputs), _RMS[bits], random).astype(np.float16), "F16")}
    if config["quant_method"] == "awq":
        result[f"{name}.qweight"] = words(inputs, outputs // per_word)
        result[f"{name}.qzeros"] = words(groups, outputs // per_word)
        return result
    result[f"{name}.qweight"] = words(inputs // per_word, outputs)
    if config["sym"]:
        zero = 2 ** (bits - 1) - (config["checkpoint_format"] == "gptq")
        word = sum(zero << bits * place for place in range(per_word))
        zeros = np.full((groups, outputs // per_word), word, np.uint32).view(np.int32)
    else:
        zeros, _ = words(groups, outputs // per_word)
    result[f"{name}.qzeros"] = zeros, "I32"
    index = np.arange(inputs) // group
    result[f"{name}.g_idx"] = (random.permutation(index) if config["desc_act"] else index).astype(np.int32), "I32"
    return result
