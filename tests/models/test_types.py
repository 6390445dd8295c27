"""Every model type that is read: parameters as transformers counts them, and what follows from a model's blocks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

import rooftop
from rooftop.capabilities import UNRUNNABLE, model_obstacle
from rooftop.core.errors import RooftopError
from rooftop.models import ModelConfig, count_params, flops_per_token, from_huggingface, kv_cache_bytes, weights
from rooftop.models.families import FAMILIES
from rooftop.models.mixers import DELTA_CHUNK, recurrences, state_bytes
from rooftop.programs.model.layer import Computation

ORACLE = Path(__file__).parents[1] / "oracles" / "type_counts.json"
COUNTS: dict[str, dict[str, dict[str, Any]]] = json.loads(ORACLE.read_text())["models"]
MODELS = [(kind, size) for kind, sizes in COUNTS.items() for size in sizes]
#: Types whose language model has the weights of another type: gemma3_text, deepseek_v3, qwen3 and qwen3_moe.
NOT_COUNTED = {"gemma3", "kimi_k2", "qwen3_vl_moe_text", "qwen3_vl_text"}


def _model(kind: str, size: str = "tiny") -> ModelConfig:
    return from_huggingface(COUNTS[kind][size]["config"], kind)


@pytest.mark.oracle
@pytest.mark.parametrize(("kind", "size"), MODELS)
def test_parameters_of_every_type_are_those_of_transformers(kind: str, size: str) -> None:
    model = _model(kind, size)
    counts = count_params(model)
    assert counts.total == COUNTS[kind][size]["total"]
    assert sum(counts.by_component.values()) == counts.total >= counts.active
    assert ModelConfig.from_json(json.loads(json.dumps(model.to_json()))) == model


@pytest.mark.oracle
@pytest.mark.parametrize("kind", COUNTS)
def test_absent_keys_mean_what_transformers_assumes(kind: str) -> None:
    few = from_huggingface(COUNTS[kind]["tiny"]["keys"], kind)
    if kind == "dbrx":  # transformers has its rotations' base in one place, published files in another
        few = dataclasses.replace(few, rope_theta=1e4)
    assert few == _model(kind)


def test_every_type_has_its_count() -> None:
    assert {*COUNTS} == {*FAMILIES} - NOT_COUNTED


def test_every_part_that_no_program_has_occurs_in_a_type() -> None:
    models = [_model(kind) for kind in COUNTS]
    for name, present in UNRUNNABLE.items():
        assert any(present(model) for model in models), name
    assert all(model_obstacle(_model(kind)) is None for kind in ("llama", "cohere2", "gemma3_text", "glm4_moe"))
    assert "AltUp" in (model_obstacle(_model("gemma3n_text")) or "")


def test_chunked_attention_sees_half_a_chunk_on_average() -> None:
    model = _model("llama4_text")
    assert model.windows == (8, 8, 8, None) and model.windows_chunked
    per_key = 2 * 2 * model.heads * model.d_head
    assert flops_per_token(model, 32, attention="causal").attention == per_key * (3 * 8 / 2 + 32 / 2)
    seen = [(position % 8) + 0.5 for position in range(32)]
    assert sum(seen) / 32 == 8 / 2


def test_experts_in_every_second_layer() -> None:
    model = _model("llama4_text")
    assert [model.has_experts(layer) for layer in range(4)] == [False, True, False, True]
    assert (model.moe_layers, model.dense_layers) == (2, 2)
    assert _model("qwen2_moe").moe_layers == 2


def test_a_delta_rule_costs_the_same_at_any_length() -> None:
    """Qwen3-Next: 36 of 48 layers keep a state of 32 heads of 128 x 128 in place of a cache."""
    model = _model("qwen3_next", "default")
    (rule, layers), *others = recurrences(model)
    assert (layers, others, model.attention_layers) == (36, [], 12)
    assert rule.state == 32 * 128 * 128
    channels = 2 * 16 * 128 + 32 * 128
    assert rule.flops == 2 * 4 * channels + 6 * 32 * 128 * 128
    # In chunks of C: two products with keys and one of the three with [C, C] are as wide as keys, two as values.
    in_chunks = DELTA_CHUNK * (3 * 2 * 128 + 2 * 2 * 128) + DELTA_CHUNK**2 / 3
    assert rule.chunked_flops - rule.flops == pytest.approx(32 * in_chunks)
    grown = kv_cache_bytes(model, "bf16", 2048) - kv_cache_bytes(model, "bf16", 1024)
    assert grown == 1024 * 12 * 2 * 2 * 256 * 2
    assert state_bytes(model) == 36 * (4 * rule.state + 2 * 3 * channels)
    attention = [flops_per_token(model, length).attention for length in (1024, 2048)]
    assert attention[1] - attention[0] == 12 * 2 * 512 * 16 * (256 + 256)


def test_a_state_space_counts_its_state_twice_per_token() -> None:
    """Mamba-2 2.7B: no attention, no MLP; each token goes into a state of d_inner x d_state and out of it."""
    model = _model("mamba2", "default")
    (space, layers) = recurrences(model)[0]
    assert (layers, model.attention_layers, model.dense_layers) == (model.layers, 0, 0)
    assert space.state == 8192 * 128
    assert space.flops == 4 * 8192 * 128 + 2 * 4 * (8192 + 2 * 8 * 128)
    assert kv_cache_bytes(model, "bf16", 1) == kv_cache_bytes(model, "bf16", 10**6) == state_bytes(model)
    assert flops_per_token(model, 10).attention == layers * space.flops
    assert not any(weight.component in ("attn", "mlp") for weight in weights(model))


def test_layers_that_share_a_cache_have_no_keys_of_their_own() -> None:
    model = _model("gemma3n_text", "default")
    keys = next(weight for weight in weights(model) if weight.name == "k")
    assert (keys.layers, model.shared_kv_layers) == (20, 15)
    assert kv_cache_bytes(model, "bf16", 10**5) == (16 * 512 + 4 * 10**5) * 2 * 2 * 256 * 2


@pytest.mark.parametrize("kind", ["llama4_text", pytest.param("gpt_neox", marks=pytest.mark.slow)])
def test_a_model_that_no_program_runs_is_planned_and_says_so(kind: str) -> None:
    model = _model(kind, "default")
    plan = rooftop.plan_training(model, on="v5p:4x4x4", batch_seqs=256, seq=2048).to_json()
    assert plan["executable"] is False
    assert any("no program has" in obstacle for obstacle in plan["obstacles"])  # type: ignore[attr-defined]
    with pytest.raises(RooftopError, match="no program has"):
        Computation(model=model)
