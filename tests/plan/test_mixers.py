"""Plans of models with recurrent mixers, which no program runs: their work, weights and states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import rooftop
from rooftop.models import ModelConfig, flops_per_token, from_huggingface, kv_cache_bytes
from rooftop.models.mixers import recurrences, state_bytes
from rooftop.models.segments import segments
from rooftop.plan.shapes import attended_pairs, mean_attended_pairs

COUNTS = json.loads((Path(__file__).parents[1] / "oracles" / "type_counts.json").read_text())["models"]
SEQ, SEQS, DEVICES = 4096, 512, 256


def _model(kind: str) -> ModelConfig:
    return from_huggingface(COUNTS[kind]["default"]["config"], kind)


def _flops(rows: list[dict[str, Any]], scope: str) -> float:
    return sum(row["count"] * sum(row["flops"].values()) for row in rows if row["scope"].startswith(scope))


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", pytest.param("minimax", marks=pytest.mark.slow)])
def test_a_training_plan_does_the_work_of_every_layer(kind: str) -> None:
    model = _model(kind)
    plan: dict[str, Any] = dict(rooftop.plan_training(model, on="v5p:4x8x8", batch_seqs=SEQS, seq=SEQ).to_json())
    rows = [row for row in plan["ledger"] if row["phase"] == "forward"]
    tokens = SEQ * SEQS / DEVICES
    core = _flops(rows, "layers/attn/core")
    # Attention itself is a kernel, whose FLOPs are counted apart; a gate of shared experts is too small for a row.
    assert _flops(rows, "") - core == pytest.approx(tokens * flops_per_token(model, SEQ).matmul, rel=1e-4)
    assert core == pytest.approx(tokens * sum(layers * mixer.chunked_flops for mixer, layers in recurrences(model)))
    kernel = sum(row["count"] * row["kernel_flops"] for row in rows)
    pairs = mean_attended_pairs(model, SEQ, 1) / SEQ
    attention = tokens * model.attention_layers * model.heads * 4 * model.d_head * pairs
    assert attention <= kernel <= 2 * attention
    assert plan["executable"] is False


def test_a_server_holds_the_states_of_its_sequences() -> None:
    model = _model("qwen3_next")
    lengths = (1024, 2048)
    plans = [
        rooftop.plan_serving(model, on="v6e:4x4", batch_seqs=32, prompt=length, generate=64).to_json()
        for length in lengths
    ]
    caches = [plan["memory"]["kv"] for plan in plans]  # type: ignore[index]
    assert all(cache > 0 for cache in caches)
    assert plans[0]["executable"] is False
    per_sequence = [kv_cache_bytes(model, "bf16", length) for length in lengths]
    assert per_sequence[1] - per_sequence[0] == pytest.approx(per_sequence[0] - state_bytes(model))


def test_chunked_attention_executes_whole_chunks() -> None:
    model = _model("llama4_text")
    pairs = 3 / 4 * 4 * attended_pairs(8192, None, 512) + 1 / 4 * attended_pairs(32_768, None, 512)
    assert mean_attended_pairs(model, 32_768, 512) == pytest.approx(pairs)


def test_layers_of_one_mixer_are_one_kind() -> None:
    (periods,) = segments(_model("qwen3_next"))
    assert (periods.repeats, [kind.mixer for kind in periods.kinds]) == (12, ["gated_delta"] * 3 + ["attention"])
