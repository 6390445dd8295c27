"""Quantised checkpoints, served: greedy tokens are those that transformers continues with."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rooftop import capabilities
from rooftop.capabilities import ENGINE_WEIGHTS
from rooftop.checkpoints.huggingface import ScaledDim, load_weights
from rooftop.models import from_huggingface
from rooftop.models.stored import KeptWeights
from rooftop.programs.parameters import Parameter
from rooftop.programs.quantised import Quantised
from rooftop.programs.serving.formats import FORMATS
from rooftop.programs.serving.quantised import Turned, in_full, scaled_by, summed_dim
from rooftop.serve import request
from rooftop.serve.engine import configuration
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.loading import load, parts
from rooftop.serve.engine.requests import Sampling
from rooftop.serve.request import ServeRequest
from tests.checkpoints.test_huggingface import blank, eight
from tests.checkpoints.test_quantised import CASES, NAMES, publish, tiny_formats
from tests.support.checkpoint_tensors import from_checkpoint
from tests.support.engines import CONFIGURATION, answers
from tests.support.quickly import QUICKLY
from tests.support.serving_process import ENGINE, ENVIRONMENT, ROOFTOP, started


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "llama_awq" else pytest.mark.slow) for name in NAMES]
)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    serving = load(publish(name, tmp_path / name), CONFIGURATION, options=QUICKLY)
    serving.stops = frozenset()
    continuations = CASES[name]["greedy"]
    prompts = [case["prompt"] for case in continuations]
    serving.start()
    samplings = [Sampling(max_tokens=len(case["output"]), temperature=0.0) for case in continuations]
    for tokens, case in zip(answers(serving, prompts, samplings), continuations, strict=True):
        assert [token.token for token in tokens] == case["output"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama_tensors", "llama_channels"])
def test_fp8_keeps_the_values_and_scales_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Over eight devices; f32 of FP8 times its scale, as the checkpoint has them. Other weights have no scales."""
    folder = publish(name, tmp_path / name)
    model = from_huggingface(folder, name)

    def placed(parameter: Parameter, array: jax.Array, scales: jax.Array | None) -> Any:
        dim = summed_dim(parameter)
        assert (scales is not None) == (dim is not None)
        return array if scales is None or dim is None else scaled_by(array, scales, dim, "f8_e4m3", "cpu")

    def scaled(parameter: Parameter) -> ScaledDim | None:
        dim = summed_dim(parameter)
        return None if dim is None else ScaledDim(dim=dim)

    weights = load_weights(folder, model, blank(model, **eight(model)), placed=placed, scaled=scaled)
    tensors = tiny_formats.tensors(CASES[name]["weights"], CASES[name]["config"]["quantization_config"])
    exact = dict[str, Any]()
    for tensor, (array, code) in tensors.items():
        if code == "F8_E4M3":
            scales = tensors[f"{tensor}_scale"][0].view(ml_dtypes.bfloat16).astype(np.float32)
            exact[tensor] = array.view(ml_dtypes.float8_e4m3fn).astype(np.float32) * scales
        elif not tensor.endswith("_scale"):
            exact[tensor] = array.view(ml_dtypes.bfloat16).astype(np.float32)
    expected = jax.tree.leaves(from_checkpoint(model, exact))
    leaves = jax.tree.leaves(weights, is_leaf=lambda leaf: isinstance(leaf, Quantised))
    for leaf, right in zip(leaves, expected, strict=True):
        if isinstance(leaf, Quantised):
            assert leaf.values.dtype == jnp.float8_e4m3fn and leaf.values.size == right.size
            leaf = np.asarray(leaf.values).astype(np.float32) * np.asarray(leaf.scales)
        assert np.array_equal(np.asarray(leaf), right)


@pytest.mark.slow
def test_fp8_is_served_as_it_is_stored(tmp_path: Path) -> None:
    configuration = replace(CONFIGURATION, weights_dtype="f8_e4m3")
    serving = load(publish("llama_channels", tmp_path / "in"), configuration, options=QUICKLY)
    serving.stops = frozenset()
    serving.start()
    case = CASES["llama_channels"]["greedy"][0]
    sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=3)
    ((token,),) = answers(serving, [case["prompt"]], [sampling])
    assert case["output"][0] in [likely for likely, _ in token.top]


def loaded_weights(folder: Path, configuration: Configuration) -> Any:
    """The weights of an engine."""

    def weights_of(decoder: Any, mesh: Any, weights: Any, **_: Any) -> Any:
        return weights

    (weights,) = parts(folder, configuration, None, None, None, weights_of).replicas
    return weights


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("gpt_oss_mxfp4", KeptWeights(dtype="f4_e2m1", group=32, only_experts=True)),
        pytest.param("llama_packed", KeptWeights(dtype="int4", group=32), marks=pytest.mark.slow),
        pytest.param("deepseek_v3_fp8", KeptWeights(dtype="f8_e4m3", group=8), marks=pytest.mark.slow),
        pytest.param("llama_fp8", KeptWeights(dtype="f8_e4m3"), marks=pytest.mark.slow),
        pytest.param("llama_packed_channels", KeptWeights(dtype="int8"), marks=pytest.mark.slow),
        pytest.param("llama_awq", None, marks=pytest.mark.slow),
        pytest.param("llama_gptq", None, marks=pytest.mark.slow),
    ],
)
def test_the_published_format_is_kept(
    name: str, stays: KeptWeights | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By default; values and scales are bit for bit the checkpoint's, and greedy tokens those of transformers."""
    folder = publish(name, tmp_path / name)
    assert KeptWeights.of(from_huggingface(folder, name)) == stays
    # Blocks of this tiny checkpoint are smaller than any published one's.
    blocks = {("f8_e4m3", 8): "f8_e4m3-8"}
    for owner in (capabilities, request):
        monkeypatch.setattr(owner, "ENGINE_WEIGHTS", {**ENGINE_WEIGHTS, **blocks})
    monkeypatch.setattr(configuration, "WEIGHTS", (*configuration.WEIGHTS, *blocks.values()))
    monkeypatch.setitem(FORMATS, "f8_e4m3-8", replace(FORMATS["f8_e4m3-32"], group=8))
    asked = ServeRequest(checkpoint=folder).configuration(None, from_huggingface(folder, name))
    expected = "plain" if stays is None else {**ENGINE_WEIGHTS, **blocks}[stays.dtype, stays.group]
    assert asked.weights_dtype == expected
    small = replace(CONFIGURATION, weights_dtype=expected, only_experts=asked.only_experts)
    weights, plain = (
        jax.tree.leaves(loaded_weights(folder, of), is_leaf=lambda leaf: isinstance(leaf, Quantised | Turned))
        for of in (small, CONFIGURATION)
    )
    assert any(isinstance(leaf, Quantised) for leaf in weights) == (stays is not None)
    for left, right in zip(weights, plain, strict=True):
        # A plain engine has the checkpoint's products of values and scales, in the dtype of their published reading.
        exact, read = (np.asarray(in_full(leaf, jnp.float32)) for leaf in (left, right))
        np.testing.assert_array_equal(exact.astype(ml_dtypes.bfloat16), read.astype(ml_dtypes.bfloat16))
    serving = load(folder, small, options=QUICKLY)
    serving.stops = frozenset()
    serving.start()
    cases = CASES[name]["greedy"]
    samplings = [Sampling(max_tokens=len(case["output"]), temperature=0.0) for case in cases]
    for tokens, case in zip(answers(serving, [case["prompt"] for case in cases], samplings), cases, strict=True):
        assert [token.token for token in tokens] == case["output"]


@pytest.mark.slow
def test_served_from_the_command_line(tmp_path: Path) -> None:
    """`rooftop serve FOLDER` of a quantised checkpoint answers with the tokens that transformers continues with."""
    for name in ("gpt_oss_mxfp4", "llama_gptq"):
        folder = publish(name, tmp_path / name)
        words = tokenizers.Tokenizer(WordLevel({f"t{token}": token for token in range(96)}, unk_token="t0"))
        words.pre_tokenizer = Whitespace()
        words.save(str(folder / "tokenizer.json"))
        command = [ROOFTOP, "serve", str(folder), "--port", "0", "--json", *ENGINE]
        with started(command, tmp_path, env=ENVIRONMENT) as server:
            for case in CASES[name]["greedy"]:
                fields = {"prompt": case["prompt"], "max_tokens": len(case["output"]), "temperature": 0}
                text = server.complete(**fields).raise_for_status().json()["choices"][0]["text"]
                assert [int(word[1:]) for word in text.split()] == case["output"]


def test_what_is_not_read_ends_with_one_line(tmp_path: Path) -> None:
    folder = publish("llama_awq", tmp_path / "nf4", quant_method="bitsandbytes", bnb_4bit_quant_type="nf4")
    ended = subprocess.run([ROOFTOP, "serve", str(folder)], capture_output=True, text=True)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "quantization_config.quant_method: got 'bitsandbytes'; accepted: one of awq, " in ended.stderr
