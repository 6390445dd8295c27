"""Checkpoints in published formats: each tensor is bit for bit what transformers makes of it."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rooftop.checkpoints.huggingface import load_weights, save_weights
from rooftop.checkpoints.huggingface_files import Checkpoint
from rooftop.checkpoints.names import entries
from rooftop.checkpoints.quantised import open_weights
from rooftop.core.errors import RooftopError
from rooftop.models import from_huggingface
from rooftop.models.stored import StoredWeights
from tests.checkpoints.test_huggingface import blank, eight
from tests.support.tiny_models import ORACLES

sys.path.insert(0, str(ORACLES))
import tiny_formats

CASES: dict[str, Any] = json.loads((ORACLES / "formats.json").read_text())
NAMES = sorted(set(CASES) - {"made_with"})


def publish(name: str, folder: Path, **changes: Any) -> Path:
    """The quantised checkpoint of a case; ``changes`` of its quantization_config change no tensor."""
    case = CASES[name]
    stored = case["config"]["quantization_config"]
    folder.mkdir()
    config = case["config"] | {"quantization_config": stored | changes}
    tiny_formats.write(folder, config, tiny_formats.tensors(case["weights"], stored))
    return folder


def digest(array: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def everything(files: Checkpoint, name: str) -> Any:
    return files.read(name, tuple(slice(0, size) for size in files.shape(name)))


@pytest.mark.parametrize("name", NAMES)
def test_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    files = open_weights(publish(name, tmp_path / "in"))
    random = np.random.RandomState(0)
    for tensor, expected in CASES[name]["digests"].items():
        assert list(files.shape(tensor)) == CASES[name]["weights"][tensor]
        whole = everything(files, tensor)
        assert digest(whole) == expected, tensor
        for _ in range(4):
            bounds = [np.sort(random.choice(size + 1, 2, replace=False)) for size in whole.shape]
            region = tuple(slice(int(start), int(stop)) for start, stop in bounds)
            assert np.array_equal(files.read(tensor, region), whole[region]), (tensor, region)
    with np.testing.assert_raises(RooftopError):
        Checkpoint.open(tmp_path / "in").dtype(next(iter(CASES[name]["digests"])))


@pytest.mark.parametrize("name", NAMES)
def test_the_planned_bytes_are_those_of_the_file(name: str, tmp_path: Path) -> None:
    """All tensors of the file; a scale of a whole matrix may have another dtype than is assumed."""
    folder = publish(name, tmp_path / "in")
    model, files = from_huggingface(folder), Checkpoint.open(folder)
    sizes = {"F8_E4M3": 1, "U8": 1, "F16": 2, "BF16": 2, "F32": 4, "I32": 4, "I64": 8}
    assert {entry.name for entry in entries(model)} <= CASES[name]["weights"].keys()
    total = sum(int(np.prod(shape)) * sizes[code] for _, code, shape in files.tensors.values())
    stored = StoredWeights.of(model)
    assert stored is not None and stored.bytes == total


@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", pytest.param("llama_gptq_ordered", marks=pytest.mark.slow)])
def test_weights_are_loaded_over_eight_devices_and_exported_plain(name: str, tmp_path: Path) -> None:
    """Shards begin within blocks and words; the export has no quantization_config, and the same values."""
    source = publish(name, tmp_path / name)
    model, files = from_huggingface(source, name), open_weights(source)
    weights = load_weights(source, model, blank(model, **eight(model)))
    save_weights(tmp_path / "out", model, weights, source=source)
    plain = Checkpoint.open(tmp_path / "out")
    for entry in entries(model):
        assert plain.dtype(entry.name) == files.dtype(entry.name)
        assert np.array_equal(everything(plain, entry.name), everything(files, entry.name)), entry.name
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    exported = from_huggingface(tmp_path / "out", name)
    assert exported == model and exported.stored is None and model.stored is not None


def test_blocks_at_the_edge_are_smaller(tmp_path: Path) -> None:
    """DeepSeek-V3's latents have 576 outputs, 4.5 blocks: the scale of element [i, j] is [i // 128, j // 128]."""
    random = np.random.RandomState(0)
    bits, scales = random.randint(0, 127, (40, 24)).astype(np.uint8), random.rand(3, 2).astype(np.float32)
    config = CASES["deepseek_v3_fp8"]["config"] | {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [16, 16]}
    }
    tensors = {"x.weight": (bits, "F8_E4M3"), "x.weight_scale_inv": (scales, "F32")}
    tiny_formats.write(tmp_path, config, tensors)
    values = bits.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    expected = [[values[i, j] * scales[i // 16, j // 16] for j in range(24)] for i in range(40)]
    whole = everything(open_weights(tmp_path), "x.weight")
    assert np.array_equal(whole, np.array(expected, np.float32).astype(ml_dtypes.bfloat16))


def test_fbgemm_is_a_scale_for_each_output(tmp_path: Path) -> None:
    """The same bits and scales as of compressed-tensors, whose scales are f32 here."""
    shapes = CASES["llama_channels"]["weights"]
    stored = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    tensors = tiny_formats.tensors(shapes, stored)
    tiny_formats.write(tmp_path, CASES["llama_channels"]["config"] | {"quantization_config": stored}, tensors)
    files = open_weights(tmp_path)
    for name in (name for name, (_, code) in tensors.items() if code == "F8_E4M3"):
        values = tensors[name][0].view(ml_dtypes.float8_e4m3fn).astype(np.float32) * tensors[f"{name}_scale"][0]
        assert np.array_equal(everything(files, name), values.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("deepseek_v3_fp8", {"weight_block_size": [32, 8]}, "weight_scale_inv: got (2, 8); accepted: (1, 8)"),
        (
            "llama_channels",
            {"quant_method": "fp8", "weight_block_size": None},
            "quantization_config.format: got 'float-quantized'; accepted: no such key",
        ),
        ("llama_gptq", {"group_size": 16}, "q_proj.scales: got (2, 64); accepted: (4, 64)"),
        ("llama_gptq", {"bits": 8}, "q_proj.scales: got (2, 64); accepted: (1, 64)"),
        ("llama_awq", {"group_size": 64}, "q_proj.scales: got (2, 64); accepted: (1, 64)"),
        ("llama_awq", {"quant_method": "bitsandbytes"}, "quant_method: got 'bitsandbytes'; accepted: one of awq"),
    ],
)
def test_tensors_that_are_not_as_the_config_says_are_refused(
    name: str, change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folder, model = publish(name, tmp_path / "in", **change), from_huggingface(CASES[name]["config"], name)
    with pytest.raises(RooftopError, match=re.escape(words)):
        load_weights(folder, model, blank(model))


def test_missing_parts_are_refused(tmp_path: Path) -> None:
    case = CASES["llama_gptq_ordered"]
    stored = case["config"]["quantization_config"]
    for missing in ("g_idx", "qzeros", "scales"):
        folder = tmp_path / missing
        folder.mkdir()
        tensors = tiny_formats.tensors(case["weights"], stored)
        del tensors[f"model.layers.1.mlp.up_proj.{missing}"]
        tiny_formats.write(folder, case["config"], tensors)
        with pytest.raises(RooftopError, match=re.escape(f"got 'model.layers.1.mlp.up_proj.{missing}'")):
            load_weights(folder, from_huggingface(folder), blank(from_huggingface(folder)))
    # Tensors that the model does not have may be anything.
    folder = tmp_path / "more"
    folder.mkdir()
    more = {"vision.qweight": (np.zeros((2, 2, 2), np.int32), "I32")}
    tiny_formats.write(folder, case["config"], tiny_formats.tensors(case["weights"], stored) | more)
    model = from_huggingface(folder)
    assert load_weights(folder, model, blank(model)).embed.shape == (96, 64)
    # A tensor that it has may not.
    more = {"model.layers.0.mlp.up_proj.qweight": (np.zeros((2, 2, 2), np.int32), "I32")}
    tiny_formats.write(folder, case["config"], tiny_formats.tensors(case["weights"], stored) | more)
    with pytest.raises(RooftopError, match=re.escape("up_proj.qweight: got (2, 2, 2); accepted: [row, column]")):
        load_weights(folder, model, blank(model))
    # Without a quantization_config nothing is guessed.
    plain = publish("llama_fp8", tmp_path / "plain")
    keys = json.loads((plain / "config.json").read_text())
    del keys["quantization_config"]
    (plain / "config.json").write_text(json.dumps(keys))
    model = from_huggingface(plain)
    with pytest.raises(RooftopError, match=r"dtype of model\.layers\.0.* got 'F8_E4M3'"):
        load_weights(plain, model, blank(model))
