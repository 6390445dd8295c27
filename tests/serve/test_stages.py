"""Pipeline stages of an engine: answers, what each stage has, and flights that take their steps at the same time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from rooftop.core.errors import RooftopError
from rooftop.models.segments import stage_layers
from rooftop.serve.engine.loading import load
from rooftop.serve.engine.requests import Sampling
from rooftop.serve.engine.steps import EngineServer, Sent
from tests.support.engines import CONFIGURATION, GREEDY, again, answers, engine, greedy
from tests.support.engines import checkpoint as saved


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", {"stage": 2, "tensor": 2}),
        # The first stage has the dense layer, and the last one layer less.
        ("deepseek_v3", {"stage": 2}),
        pytest.param("llama", {"data": 2, "stage": 3}, marks=pytest.mark.slow),
        pytest.param("gpt2", {"stage": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt_oss", {"stage": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("gemma3", {"stage": 4}, marks=pytest.mark.slow),
        pytest.param("gemma3", {"stage": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("mixtral", {"stage": 2, "expert": 2}, marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"stage": 3, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param("qwen2_moe", {"stage": 2, "context": 2}, marks=pytest.mark.slow),
    ],
)
def test_stages_answer_as_transformers_do(name: str, mesh: dict[str, int], tmp_path: Path) -> None:
    serving = engine(saved(name, tmp_path), replace(CONFIGURATION, mesh=tuple(mesh.items())))
    tokens, expected = greedy(name, serving)
    assert tokens == expected
    assert len(serving.replicas) == mesh["stage"] * mesh.get("data", 1)
    model, stages = serving.model, mesh["stage"]
    for replica in serving.replicas:
        devices = list[Any]()
        stage: Any = replica
        assert len(replica.pool_leaves) == model.layers
        for layers in stage_layers(model.layers, stages):
            # A stage has the cache of its layers, and no weights but theirs and its table.
            places = [replica.pool_leaves[layer].sharding for layer in layers]
            assert len(stage._pools) == len(layers)
            devices.append(frozenset().union(*(place.device_set for place in places if place is not None)))
            assert all(array.devices() == devices[-1] for array in (*stage._pools, *stage._weights))
            own = stage.decoder.described
            assert sum(stack is not None for stacks in own.layers for stack in stacks) <= len(layers)
            assert (own.final_norm is None) == (layers.stop < model.layers)
            ties = model.tied_embeddings and own.final_norm is not None
            assert (own.embed is None) == (layers.start > 0 and not ties)
            stage = stage.after
        assert stage is None
        assert len(frozenset().union(*devices)) == sum(map(len, devices)), "no two stages share a device"


@pytest.mark.parametrize(("layers", "stages", "sizes"), [(126, 4, [32, 32, 31, 31]), (3, 3, [1, 1, 1]), (5, 1, [5])])
def test_layers_are_dealt_out_evenly_and_in_order(layers: int, stages: int, sizes: list[int]) -> None:
    dealt = stage_layers(layers, stages)
    assert [len(own) for own in dealt] == sizes
    assert [layer for own in dealt for layer in own] == list(range(layers))


def test_flights_are_in_different_stages_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a flight's step is waited for, those of all others are in progress; outputs are those of one device."""
    mesh, prompts = (("stage", 2),), [case["prompt"] for case in GREEDY["llama"]][:4]
    folder, samplings = saved("llama", tmp_path), [Sampling(max_tokens=6, temperature=1.0, seed=5, logprobs=2)] * 4
    alone = engine(folder)
    alone.start()
    expected = answers(alone, prompts, samplings)
    serving, flying, most = engine(folder, replace(CONFIGURATION, mesh=mesh)), list[EngineServer](), list[int]()
    send, collect = EngineServer.send, EngineServer.collect

    def sent(server: EngineServer) -> Sent | None:
        assert server not in flying
        if (step := send(server)) is not None:
            flying.append(server)
        return step

    def collected(server: EngineServer, step: Sent, **how: Any) -> Any:
        assert flying[0] is server, "the step that began first ends first"
        most.append(len(flying))
        flying.pop(0)
        return collect(server, step, **how)

    monkeypatch.setattr(EngineServer, "send", sent)
    monkeypatch.setattr(EngineServer, "collect", collected)
    serving.start()
    outputs = answers(serving, prompts, samplings)
    assert [[token.token for token in output] for output in outputs] == [
        [token.token for token in output] for output in expected
    ]
    assert [token.logprob for output in outputs for token in output] == pytest.approx(
        [token.logprob for output in expected for token in output], abs=1e-4
    )
    # Only the first and the last steps are alone.
    assert max(most) == 2 and most.count(1) <= 4 < most.count(2)
    repeated = again(serving)
    assert repeated.configuration.own_policy.max_batch == CONFIGURATION.policy.max_batch // 2


def test_what_stages_do_not_go_with_is_named(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    with pytest.raises(RooftopError, match="mesh axis stage: got 4; accepted: at most one for each of 3 layers"):
        load(folder, replace(CONFIGURATION, mesh=(("stage", 4),)), devices=jax.devices())
    with pytest.raises(RooftopError, match=r"draft: .*none with mesh axis stage"):
        load(folder, replace(CONFIGURATION, mesh=(("stage", 2),), draft_length=2), draft=folder)
