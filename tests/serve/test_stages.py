"""Pipeline stages of an engine: answers, what each stage has, and flights that take their steps at the same time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from rooftop.arrays import Mesh
from rooftop.arrays.rules import AXES
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.ledger import compiled_ledger
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Row
from rooftop.hardware import Slice
from rooftop.models.segments import stage_layers
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ServingWorkload
from rooftop.serve.engine.loading import load
from rooftop.serve.engine.requests import Sampling
from rooftop.serve.engine.steps import EngineServer, Sent
from tests.support.engines import CONFIGURATION, GREEDY, again, answers, engine, greedy
from tests.support.engines import checkpoint as saved
from tests.support.serving_steps import small


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "axes", "flight"),
    [
        ("llama3.1-70b", {"context": 2, "tensor": 8}, 32),
        ("mixtral-8x7b", {"expert": 4, "fsdp": 2, "tensor": 2}, 256),
    ],
)
def test_compiled_stages_do_what_is_planned(name: str, axes: dict[str, int], flight: int) -> None:
    """Stages of two layers each, compiled for a slice each: FLOPs and bytes of both together are those of the plan."""
    context, stages = 1024, 2
    arguments = {
        "model": name, "layers": 2 * stages, "batch": flight, "context": context, "kv_split": "batch", "axes": axes,
    }  # fmt: skip
    mesh = Mesh.lay(Slice.parse("v5e:4x4"), dict.fromkeys(AXES, 1) | axes)
    compiled = list[Row]()
    for stage in range(stages):
        request = CompileRequest(
            mesh=mesh,
            program="tests.support.serving_steps:lower",
            arguments=arguments | {"stages": stages, "stage": stage},
        )
        own = compiled_ledger(compile_ahead_of_time(request)).ledger
        scopes = {row.scope for row in own}
        assert ("embed" in scopes, "unembed" in scopes) == (stage == 0, stage == stages - 1)
        compiled += own
    slices = Slice.parse(f"v5e:4x4@{stages}")
    problem = ServingProblem(
        model=small(name, 2 * stages),
        slice=slices,
        workload=ServingWorkload(prompt=context - 16, generate=16, context=context),
    )
    placement = Placement(mesh=Mesh.lay(slices, dict.fromkeys(AXES, 1) | axes | {"stage": stages}), kv_split="batch")
    planned = problem.generate(placement, float(stages * flight))
    dense = problem.model.moe is None
    for scope in ("layers/attn/out", *(("layers/mlp/up", "layers/mlp/down") if dense else ()), "unembed"):
        assert _flops(compiled, scope) == pytest.approx(_flops(planned, scope), rel=1e-6), scope
    moved = ("layers/attn/out", "layers/mlp/down", "pipeline") if dense else ("layers/attn/out", "pipeline")
    for scope in moved:
        assert _bytes(compiled, scope) == pytest.approx(_bytes(planned, scope)), scope


def _flops(rows: Iterable[Row], scope: str) -> float:
    return sum(float(row.count) * sum(map(float, row.flops.values())) for row in rows if row.scope == scope)


def _bytes(rows: Iterable[Row], scope: str) -> dict[str, float]:
    """Bytes of the collectives of a scope inside a stage, by kind; what goes to the next stage is no program's."""
    moved = Counter[str]()
    for row in rows:
        for one in row.collectives:
            if row.scope == scope and "stage" not in one.axes and float(one.bytes) > 1000:
                moved[one.kind] += float(row.count * one.bytes)  # type: ignore[assignment]
    return dict(moved)


def test_what_stages_do_not_go_with_is_named(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path)
    with pytest.raises(RooftopError, match="mesh axis stage: got 4; accepted: at most one for each of 3 layers"):
        load(folder, replace(CONFIGURATION, mesh=(("stage", 4),)), devices=jax.devices())
    with pytest.raises(RooftopError, match=r"draft: .*none with mesh axis stage"):
        load(folder, replace(CONFIGURATION, mesh=(("stage", 2),), draft_length=2), draft=folder)
