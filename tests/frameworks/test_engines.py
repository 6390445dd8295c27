"""Engines: their files, and the settings that a user has."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from rooftop.core.errors import RooftopError
from rooftop.frameworks import framework as module
from rooftop.frameworks.engines import Overheads, engine_of
from rooftop.frameworks.framework import ENGINES, accepted_values
from rooftop.hardware import catalogue, chip
from rooftop.models import load_model
from rooftop.plan.serving.engines.kernels import engine_kernels
from rooftop.requests import words

DATA = Path(module.__file__).with_name("data")
OTHERS = ENGINES[1:]
MODELS = {"dense": load_model("llama3-8b"), "experts": load_model("minimax-m2.5")}


def facts(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", OTHERS)
def test_every_rule_and_setting_of_an_engine_says_where_it_comes_from(name: str) -> None:
    assert all(rule["source"] for rule in facts(name)["rule"])
    assert all(setting["about"] for setting in facts(name)["setting"].values())
    assert words.ENGINES == ENGINES


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("kind", MODELS)
def test_an_engine_has_kernels_wherever_it_runs(name: str, kind: str) -> None:
    for spec in catalogue().values():
        for release in (None, *facts(name)["releases"]):
            if spec.kind != "gpu":
                with pytest.raises(RooftopError, match="one that runs on"):
                    engine_of(name, chip=spec, model=MODELS[kind], release=release)
                continue
            for weights in set(spec.flops_per_s) & {"bf16", "f8_e4m3", "f4_e2m1"}:
                engine = engine_of(name, chip=spec, model=MODELS[kind], weights=weights, release=release)
                assert engine is not None
                kernels = engine_kernels(engine.habits.kernels, spec)
                assert weights in kernels.matmul
                assert engine.habits.kv in kernels.attention
                assert (engine.weight_group, engine.scale_bytes) == (
                    (16, 1.0) if weights == "f4_e2m1" else (None, None)
                )


@pytest.mark.parametrize("name", OTHERS)
def test_defaults_and_values_of_an_engine_are_settings_that_a_user_can_give(name: str) -> None:
    job: dict[str, Any] = {"chip": chip("b200"), "model": MODELS["experts"], "weights": "f8_e4m3"}
    plain = engine_of(name, **job)
    assert plain is not None
    named = engine_of(name, **job, settings=plain.settings)
    assert named is not None
    assert named.habits == plain.habits
    for key, setting in facts(name)["setting"].items():
        for value in setting.get("values", {}) or (["4096"] if "number" in setting else ["0.5"]):
            changed = engine_of(name, **job, settings={key: value})
            assert changed is not None
            assert (changed.habits != plain.habits) == (value != plain.settings[key])
            assert changed.overheads == plain.overheads
        assert accepted_values(setting)


def test_releases_have_kernels_and_caches_of_their_own() -> None:
    job: dict[str, Any] = {"chip": chip("b200"), "model": MODELS["experts"], "weights": "f8_e4m3"}
    before, since = (engine_of("vllm", **job, release=release) for release in ("0.17.0", "0.18.0"))
    assert before is not None
    assert since is not None
    assert (before.habits.kernels, before.habits.kv) == ("vllm-triton", "bf16")
    assert (since.habits.kernels, since.habits.kv) == ("vllm", "f8_e4m3")
    assert str(since) == "vLLM 0.18.0"


def test_our_own_engine_has_no_habits() -> None:
    assert engine_of("rooftop", chip=chip("v5e"), model=MODELS["dense"]) is None
    assert Overheads() == Overheads(gap_s=0.0, host_s=0.0, request_s=0.0, token_s=0.0)


def test_commands_of_engines_are_in_their_words() -> None:
    job: dict[str, Any] = {"chip": chip("b200"), "model": MODELS["experts"], "weights": "f8_e4m3"}
    engines = {name: engine_of(name, **job, settings={"cuda_graphs": "no"}) for name in OTHERS}
    commands = {
        name: engine.command({"expert": 4, "tensor": 1}, "f8_e4m3") for name, engine in engines.items() if engine
    }
    assert commands == {
        "vllm": "vllm serve MODEL --data-parallel-size 4 --enable-expert-parallel --kv-cache-dtype fp8 "
        "--max-num-batched-tokens 8192 --gpu-memory-utilization 0.9 --enforce-eager",
        "trtllm": "trtllm-serve MODEL --tp_size 4 --ep_size 4 --max_num_tokens 8192 "
        "--kv_cache_free_gpu_memory_fraction 0.9 # enable_attention_dp: true; kv_cache_config.dtype: fp8; "
        "cuda_graph_config: null",
        "sglang": "python -m sglang.launch_server --model-path MODEL --tp-size 4 --dp-size 4 --ep-size 4 "
        "--kv-cache-dtype fp8_e4m3 --chunked-prefill-size 8192 --mem-fraction-static 0.9 --disable-cuda-graph",
    }
