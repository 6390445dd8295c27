"""Published checkpoints in and out: every family, every tensor bit for bit, on one device, eight, and two processes."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import tracemalloc
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax.sharding import AxisType, Mesh

from rooftop.arrays import AXES
from rooftop.arrays.rules import Rules
from rooftop.capabilities import model_obstacle
from rooftop.checkpoints.huggingface import load_weights, save_weights, to_huggingface
from rooftop.checkpoints.names import entries, region, tensor_shape
from rooftop.core.errors import RooftopError
from rooftop.models import ModelConfig, from_huggingface, load_model, presets
from rooftop.programs.parameters import Transformer, abstract, describe
from rooftop.programs.sharding import Specs
from tests.runs.test_checkpoints import together
from tests.support.checkpoint_tensors import from_checkpoint

ORACLES = Path(__file__).parents[1] / "oracles"
NAMES = sorted(json.loads((ORACLES / "tiny_models.json").read_text()))


def load_module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = load_module(ORACLES / "tiny_weights.py")


@cache
def facts(name: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((ORACLES / "logits" / f"{name}.json").read_text())
    return facts


def tensors_of(name: str) -> dict[str, np.ndarray]:
    tensors: dict[str, np.ndarray] = TINY.weights(facts(name)["weights"], facts(name)["norm_mean"])
    return tensors


def publish(name: str, folder: Path, files: int = 1, tensors: dict[str, np.ndarray] | None = None) -> Path:
    """A checkpoint of the tiny model, written by the library, in one file or several."""
    folder.mkdir()
    tensors = tensors_of(name) if tensors is None else tensors
    (folder / "config.json").write_text(json.dumps(facts(name)["config"], indent=1))
    if files == 1:
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    where = {tensor: f"part-{i % files}.safetensors" for i, tensor in enumerate(tensors)}
    for file in set(where.values()):
        part = {tensor: array for tensor, array in tensors.items() if where[tensor] == file}
        safetensors.numpy.save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def read(folder: Path) -> dict[str, np.ndarray]:
    """All tensors, by the library; an index must say where they are."""
    parts = {path.name: safetensors.numpy.load_file(path) for path in folder.glob("*.safetensors")}
    index = folder / "model.safetensors.index.json"
    if index.exists():
        said = json.loads(index.read_text())["weight_map"]
        assert said == {tensor: file for file, part in parts.items() for tensor in part}
    else:
        assert list(parts) == ["model.safetensors"]
    return {tensor: array for part in parts.values() for tensor, array in part.items()}


def assert_same(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype and actual[name].shape == array.shape, name
        assert actual[name].tobytes() == array.tobytes(), name


def blank(model: ModelConfig, dtype: Any = jnp.float32, **sizes: int) -> Transformer[jax.ShapeDtypeStruct]:
    shape = [sizes.get(axis, 1) for axis in AXES]
    devices = np.array(jax.devices()[: math.prod(shape)]).reshape(shape)
    mesh = Mesh(devices, AXES, axis_types=(AxisType.Explicit,) * len(AXES))
    return abstract(describe(model), mesh, Specs(Rules().only(sizes)), dtype)


def eight(model: ModelConfig) -> dict[str, int]:
    """A mesh of eight devices that splits everything that can be split, copies of weights included."""
    if model.moe is not None:
        return {"expert": 2, "fsdp": 2, "tensor": 2}
    return {"data": 2, "fsdp": 2, "tensor": 2} if model.kv_heads % 2 == 0 else {"data": 2, "fsdp": 4}


#: One of each way to name and lay out tensors: plain, joined and transposed, experts apart and joined, latents.
QUICK = {"llama", "gpt_oss", "deepseek_v3"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in NAMES]
)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    """From several files through eight devices to several files; each weight is where ``from_checkpoint`` puts it."""
    source = publish(name, tmp_path / "in", files=3)
    model = from_huggingface(source, name)
    template = blank(model, **eight(model))
    weights = load_weights(source, model, template)
    expected = from_checkpoint(model, tensors_of(name))
    for array, place, right in zip(*map(jax.tree.leaves, (weights, template, expected)), strict=True):
        assert array.sharding == place.sharding and array.dtype == place.dtype
        assert np.array_equal(np.asarray(array), right)
    largest = max(array.nbytes for array in tensors_of(name).values())
    save_weights(tmp_path / "out", model, weights, source=source, shard_bytes=2 * largest)
    assert_same(read(tmp_path / "out"), tensors_of(name))
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 1 and max(file.stat().st_size for file in files) < 2 * largest + 10_000
    assert (tmp_path / "out" / "config.json").read_bytes() == (source / "config.json").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_every_part_of_every_tensor_has_its_place(name: str) -> None:
    """The parts of our arrays, halved wherever something splits them, cover every tensor once."""
    model = from_huggingface(facts(name)["config"], name)
    parameters = {jax.tree_util.keystr(path): p for path, p in jax.tree_util.tree_leaves_with_path(describe(model))}
    covered = {tensor: np.zeros(array.shape, int) for tensor, array in tensors_of(name).items()}
    for entry in entries(model):
        parameter = parameters[entry.leaf]
        assert tensor_shape(parameter, entry) == covered[entry.name].shape
        halves = [
            [slice(0, size // 2), slice(size // 2, size)] if dim not in (None, "layers") and size > 1 else [slice(None)]
            for size, dim in zip(parameter.shape, parameter.dims, strict=True)
        ]
        for choice in np.ndindex(*map(len, halves)):
            index = tuple(options[i] for options, i in zip(halves, choice, strict=True))
            skipped = any(i for i in choice[: len(entry.index)])
            if not skipped:
                covered[entry.name][region(parameter, entry, index)] += 1
    assert all((times == 1).all() for times in covered.values())


def test_a_file_or_a_folder_of_one_file_and_numpy_weights(tmp_path: Path) -> None:
    source = publish("qwen3", tmp_path / "in")
    model = from_huggingface(source)
    weights = load_weights(source, model, blank(model))
    for number, tree in enumerate((weights, jax.tree.map(np.asarray, weights), jax.tree.map(jnp.asarray, weights))):
        save_weights(tmp_path / f"{number}", model, tree)
        assert_same(read(tmp_path / f"{number}"), tensors_of("qwen3"))
        assert from_huggingface(tmp_path / f"{number}", model.name) == model
        config = json.loads((tmp_path / f"{number}" / "config.json").read_text())
        assert config["torch_dtype"] == "float32"


def half(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Matrices in bfloat16, scales in float32."""
    return {name: array.astype(ml_dtypes.bfloat16) if array.ndim > 1 else array for name, array in tensors.items()}


def test_dtypes_come_back(tmp_path: Path) -> None:
    """Trained in float32, each tensor is written in the dtype that it came in; without a source, in float32."""
    tensors = half(tensors_of("llama"))
    source = publish("llama", tmp_path / "in", tensors=tensors)
    model = from_huggingface(source)
    weights = load_weights(source, model, blank(model, fsdp=2))
    save_weights(tmp_path / "out", model, weights, source=source)
    assert_same(read(tmp_path / "out"), tensors)
    save_weights(tmp_path / "wide", model, weights)
    assert_same(read(tmp_path / "wide"), {name: array.astype(np.float32) for name, array in tensors.items()})
    narrow = load_weights(source, model, blank(model, jnp.bfloat16))
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(narrow))


def test_old_names_of_gpt2(tmp_path: Path) -> None:
    tensors = {name.removeprefix("transformer."): array for name, array in tensors_of("gpt2").items()}
    source = publish("gpt2", tmp_path / "in", tensors=tensors)
    model = from_huggingface(source)
    weights = load_weights(source, model, blank(model))
    save_weights(tmp_path / "out", model, weights, source=source)
    assert_same(read(tmp_path / "out"), tensors)
    save_weights(tmp_path / "new", model, weights)
    assert_same(read(tmp_path / "new"), tensors_of("gpt2"))


@pytest.mark.slow
def test_two_processes_read_and_write_together(tmp_path: Path) -> None:
    tensors = half(tensors_of("mixtral"))
    publish("mixtral", tmp_path / "in", files=2, tensors=tensors)
    together(2, tmp_path, "copy")
    assert_same(read(tmp_path / "out"), tensors)
    assert_same(read(tmp_path / "plain"), {name: array.astype(np.float32) for name, array in tensors.items()})


@pytest.mark.parametrize("name", [*(name for name in presets() if model_obstacle(load_model(name)) is None), *NAMES])
def test_a_config_for_every_model(name: str) -> None:
    model = from_huggingface(facts(name)["config"], name) if name in NAMES else load_model(name)
    assert from_huggingface(json.loads(json.dumps(to_huggingface(model))), model.name) == model


def test_what_no_config_can_say_is_refused() -> None:
    model = ModelConfig.from_json(load_model("llama3-8b").to_json() | {"qk_norm": "head"})
    with pytest.raises(RooftopError, match=r"qk_norm: got 'head'.*llama"):
        to_huggingface(model)
    with pytest.raises(RooftopError, match="llama"):
        to_huggingface(ModelConfig.from_json(load_model("llama3-8b").to_json() | {"family": "lama"}))
    with pytest.raises(RooftopError, match="moe"):
        to_huggingface(ModelConfig.from_json(load_model("llama3-8b").to_json() | {"family": "mixtral"}))


def refused(source: Path) -> str:
    model = from_huggingface(source)
    with pytest.raises(RooftopError) as error:
        load_weights(source, model, blank(model))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_damaged_checkpoints_are_refused_by_file(tmp_path: Path) -> None:
    tensors = tensors_of("llama")
    norm = "model.norm.weight"
    without = {name: array for name, array in tensors.items() if name != norm}
    assert norm in refused(publish("llama", tmp_path / "missing", tensors=without))
    other = publish("llama", tmp_path / "other", tensors=without | {norm: np.ones(7, np.float32)})
    assert norm in refused(other) and "(7,)" in refused(other) and "(32,)" in refused(other)
    eight_bits = without | {norm: np.ones(32, np.int8)}
    assert "I8" in refused(publish("llama", tmp_path / "quantised", tensors=eight_bits))
    several = publish("llama", tmp_path / "several", files=3)
    os.truncate(several / "part-1.safetensors", (several / "part-1.safetensors").stat().st_size - 1)
    assert "part-1.safetensors" in refused(several)
    (several / "part-1.safetensors").unlink()
    assert "part-1.safetensors" in refused(several)
    safetensors.numpy.save_file({"stray": np.ones(1)}, several / "part-1.safetensors")
    assert "part-1.safetensors" in refused(several)
    (several / "model.safetensors.index.json").write_text("[]")
    assert "index" in refused(several)


def test_an_export_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = publish("llama", tmp_path / "in")
    model = from_huggingface(source)
    weights = jax.tree.map(np.asarray, load_weights(source, model, blank(model)))
    with pytest.raises(RooftopError, match="in'"):
        save_weights(source, model, weights)
    with pytest.raises(RooftopError, match="source"):
        save_weights(tmp_path / "out", from_huggingface(facts("qwen3")["config"]), weights, source=source)

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RooftopError, match="No space left on device"):
        save_weights(tmp_path / "out", model, weights)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_every_file_of_an_export_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss may leave the rename of the folder and not the files in it."""
    source, synced, fsync = publish("llama", tmp_path / "in"), set[int](), os.fsync
    model = from_huggingface(source)
    weights = jax.tree.map(np.asarray, load_weights(source, model, blank(model)))

    def record(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    save_weights(tmp_path / "out", model, weights, shard_bytes=20_000)
    files = list((tmp_path / "out").iterdir())
    assert {"config.json", "model.safetensors.index.json"} < {path.name for path in files}
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / "out", *files)} <= synced


def test_a_host_holds_a_tensor_at_a_time(tmp_path: Path) -> None:
    """Python's own allocations, which are those of NumPy, while 32 layers go by; those of JAX are not among them."""
    keys = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 64,
        "max_position_embeddings": 64,
    }
    model = from_huggingface(keys)
    tensors = drawn(model)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "config.json").write_text(json.dumps(keys))
    safetensors.numpy.save_file(tensors, tmp_path / "in" / "model.safetensors")
    whole = sum(array.nbytes for array in tensors.values())
    weights: Any = None
    peaks = []
    for work in (
        lambda _: load_weights(tmp_path / "in", model, blank(model, fsdp=4)),
        lambda weights: save_weights(tmp_path / "out", model, weights),
    ):
        tracemalloc.start()
        weights = work(weights)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert_same(read(tmp_path / "out"), tensors)
    assert max(peaks) < whole / 4


def drawn(model: ModelConfig) -> dict[str, np.ndarray]:
    parameters = {jax.tree_util.keystr(path): p for path, p in jax.tree_util.tree_leaves_with_path(describe(model))}
    shapes = {entry.name: tensor_shape(parameters[entry.leaf], entry) for entry in entries(model)}
    return {name: TINY.weight(name, shape) for name, shape in shapes.items()}


@pytest.mark.oracle
@pytest.mark.parametrize("name", NAMES)
def test_transformers_reads_an_export(name: str, tmp_path: Path) -> None:
    """Its logits are those stored with the oracles, from our config.json and our files."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = from_huggingface(facts(name)["config"], name)
    save_weights(tmp_path / "out", model, from_checkpoint(model, tensors_of(name)), shard_bytes=40_000)
    assert_logits(torch, transformers, name, tmp_path / "out")


def assert_logits(torch: Any, transformers: Any, name: str, folder: Path) -> None:
    with np.load(ORACLES / "logits" / f"{name}.npz") as file:
        golden = dict(file)
    config = transformers.AutoConfig.from_pretrained(folder)
    auto = transformers.AutoModelForImageTextToText if hasattr(config, "vision_config") else None
    auto = auto or transformers.AutoModelForCausalLM
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    reader = auto.from_pretrained(folder, dtype=torch.float32, **eager).eval()
    with torch.no_grad():
        logits = reader(input_ids=torch.tensor(golden["tokens"]), use_cache=False).logits
    assert np.abs(logits.numpy() - golden["logits"]).max() < 1e-5
