"""D split over fsdp, and sizes that a mesh does not divide: answers, and what compiled steps move next to the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooftop.arrays import Mesh
from rooftop.arrays.rules import AXES
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.ledger import compiled_ledger
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Row
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ServingNumerics, ServingWorkload
from rooftop.programs.serving.decode import Decoder
from rooftop.roofline.rates import Rates
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine import loading
from rooftop.serve.engine.configuration import Shapes
from rooftop.serve.engine.loading import load
from tests.support.engines import CONFIGURATION, engine, greedy
from tests.support.engines import checkpoint as saved
from tests.support.serving_steps import small

#: Batches and chunks of tokens that eight devices share.
SHAPES = Shapes(batches=(8,), widths=(8,), contexts=(32,), prefill_tokens=8)


@pytest.mark.slow
@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("llama", (("fsdp", 2), ("tensor", 2))),
        ("llama", (("fsdp", 2), ("tensor", 2), ("context", 2))),
        ("gpt2", (("fsdp", 4),)),
        ("gpt_oss", (("fsdp", 2), ("tensor", 2), ("expert", 2))),
        ("mixtral", (("fsdp", 2), ("expert", 4))),
        ("deepseek_v2", (("fsdp", 2), ("context", 2))),
        ("deepseek_v3", (("fsdp", 2), ("tensor", 2), ("expert", 2))),
        # Heads, columns and the vocabulary are padded, and key/value heads copied.
        ("llama", (("tensor", 3),)),
        ("gpt_oss", (("tensor", 3), ("expert", 2))),
        ("deepseek_v3", (("tensor", 3),)),
    ],
)
@pytest.mark.parametrize("weights", ["plain", "int8"])
def test_any_mesh_answers_as_transformers_do(
    name: str, mesh: tuple[tuple[str, int], ...], weights: str, tmp_path: Path
) -> None:
    """In int8, as one device does."""
    policy = Policy(max_batch=8, chunk_tokens=16)
    how = replace(CONFIGURATION, mesh=mesh, shapes=SHAPES, policy=policy, pages=64, weights_dtype=weights)
    folder = saved(name, tmp_path)
    if ("tensor", 3) in mesh and name != "llama":
        # Tokens of experts are split over all devices.
        with pytest.raises(RooftopError, match=r"batches: .*split the tokens of a step"):
            load(folder, how)
        how = replace(how, shapes=replace(SHAPES, batches=(12,), widths=(12,), prefill_tokens=12))
    tokens, expected = greedy(name, engine(folder, how))
    if weights != "plain":
        alone, _ = greedy(name, engine(folder, replace(how, mesh=())))
        assert tokens == alone
    else:
        assert tokens == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "on", "axes", "batch"),
    [
        ("llama3.1-70b", "v5e:4x4", {"fsdp": 4, "tensor": 4}, 32),
        ("llama3.1-405b", "v5e:8x8", {"fsdp": 8, "tensor": 8}, 64),
        ("qwen3-235b-a22b", "v6e:8x8", {"expert": 8, "fsdp": 2, "tensor": 4}, 256),
        ("deepseek-v3", "v5e:8x8", {"expert": 4, "fsdp": 4, "tensor": 4}, 256),
    ],
)
def test_a_compiled_step_moves_what_is_planned(name: str, on: str, axes: dict[str, int], batch: int) -> None:
    """In the layers matmuls have the planned FLOPs, and every collective of activations the planned bytes.

    XLA's schedule of a step takes the planned time.
    """
    context, model = 1024, load_model(name)
    # DeepSeek-V3 begins with three dense layers.
    layers = 2 if model.moe is None else model.moe.dense_layers + 1
    mesh = Mesh.lay(Slice.parse(on), dict.fromkeys(AXES, 1) | axes)
    arguments = {"model": name, "layers": layers, "batch": batch, "context": context, "kv_split": "batch", "axes": axes}
    request = CompileRequest(mesh=mesh, program="tests.support.serving_steps:lower", arguments=arguments)
    timed = compiled_ledger(compile_ahead_of_time(request))
    compiled = timed.ledger
    problem = ServingProblem(
        model=small(name, layers),
        slice=mesh.slice,
        workload=ServingWorkload(prompt=context - 16, generate=16, context=context),
    )
    planned = problem.generate(Placement(mesh=mesh, kv_split="batch"), float(batch))
    dense = ("layers/mlp/up", "layers/mlp/down") if model.dense_layers else ()
    for scope in ("layers/attn/out", *dense, "unembed"):
        assert _flops(compiled, scope) == pytest.approx(_flops(planned, scope), rel=1e-6)
    mixture = [f"layers/moe/{part}" for part in ("router", "dispatch", "experts", "combine", "shared")]
    for scope in ("layers/attn/out", *dense, *(mixture if model.moe else ())):
        assert _bytes(compiled, scope) == pytest.approx(_bytes(planned, scope))
    if model.mla is None:
        assert float(planned.expected_s) == pytest.approx(timed.step.expected_s, rel=0.12)
        # No pool is copied to VMEM and back.
        assert _read(compiled, "layers/attn/core") == pytest.approx(_read(planned, "layers/attn/core"), rel=0.05)
        assert _flops(compiled, "layers/attn/qkv") == pytest.approx(_flops(planned, "layers/attn/qkv"), rel=1e-6)
    # XLA:TPU adds up the sums of one narrow head with an AllReduce.
    both = _bytes(compiled, "layers/attn/qkv")
    assert sum(both.values()) == pytest.approx(sum(_bytes(planned, "layers/attn/qkv").values()))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "on", "axes", "batch", "weights", "layers"),
    [
        ("deepseek-v2-lite", "v6e:2x2", {"tensor": 4}, 64, "f8_e4m3", 3),
        ("deepseek-v3", "v5e:16x16", {"expert": 16, "context": 4, "tensor": 4}, 1024, "f8_e4m3-128", 4),
    ],
)
def test_a_quantised_step_reads_latents_and_experts_once(
    name: str, on: str, axes: dict[str, int], batch: int, weights: str, layers: int
) -> None:
    """With the rates of compiled schedules, and no start of a collective hidden, it takes the planned time."""
    context, slice_ = 2048, Slice.parse(on)
    mesh = Mesh.lay(slice_, dict.fromkeys(AXES, 1) | axes)
    arguments = {
        "model": name, "layers": layers, "batch": batch, "context": context, "kv_split": "batch", "axes": axes,
        "weights_dtype": weights,
    }  # fmt: skip
    request = CompileRequest(mesh=mesh, program="tests.support.serving_steps:lower", arguments=arguments)
    timed, rates = compiled_ledger(compile_ahead_of_time(request)), Rates.of(slice_.chip)
    dtype, _, group = weights.partition("-")
    shares = {"hbm_read": 1 / (float(rates.hbm_s(1.0)) * rates.hbm_bytes_per_s), "latency": 0.0, "latency_2d": 0.0}
    problem = ServingProblem(
        model=small(name, layers),
        slice=slice_,
        workload=ServingWorkload(prompt=context - 16, generate=16, context=context),
        numerics=ServingNumerics(weights=dtype, weight_group=int(group) if group else None),
        assumptions=ServingAssumptions(shares=shares),
    )
    planned = problem.generate(Placement(mesh=mesh, kv_split="batch"), float(batch))
    assert timed.step.expected_s == pytest.approx(float(planned.expected_s), rel=0.05)
    compiled = timed.ledger
    # No pool is copied to VMEM and back.
    assert _read(compiled, "layers/attn/core") == pytest.approx(_read(planned, "layers/attn/core"), rel=0.05)
    if not group:
        assert _read(compiled, "layers/moe/experts") == pytest.approx(_read(planned, "layers/moe/experts"), rel=0.05)
    for scope in ("layers/attn/core", "layers/attn/out", "layers/mlp/down"):
        assert _bytes(compiled, scope) == pytest.approx(_bytes(planned, scope)), scope


def _read(rows: Iterable[Row], scope: str) -> float:
    return sum(float(row.count * row.hbm_bytes) for row in rows if row.scope == scope)


def _flops(rows: Iterable[Row], scope: str) -> float:
    return sum(float(row.count) * sum(map(float, row.flops.values())) for row in rows if row.scope == scope)


def _bytes(rows: Iterable[Row], scope: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Bytes of the collectives of activations in a scope, by kind and axes; those of norms are a few numbers."""
    moved = Counter[tuple[str, tuple[str, ...]]]()
    for row in rows:
        for one in row.collectives:
            if row.scope == scope and float(one.bytes) > 1000:
                moved[one.kind, tuple(one.axes)] += float(row.count * one.bytes)  # type: ignore[assignment]
    return dict(moved)


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gpt_oss", ()),
        ("gpt2", ()),
        ("deepseek_v2", ()),
        pytest.param("gpt_oss", (("tensor", 2), ("expert", 2)), marks=pytest.mark.slow),
        pytest.param("deepseek_v3", (("context", 2), ("expert", 2)), marks=pytest.mark.slow),
        pytest.param("deepseek_v2", (("fsdp", 2), ("expert", 2)), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("reader", ["gather", "blocked"])
def test_rows_of_whole_lanes_answer_as_transformers_do(
    name: str, mesh: tuple[tuple[str, int], ...], reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the cache and of the embedding table are padded, and keys and values of narrow heads share a row."""
    original = loading._decoder

    def padded(*arguments: Any) -> Decoder:
        decoder = replace(original(*arguments), lanes=24, reader=reader)
        assert decoder.page_shape[-1] % 24 == 0 and decoder.page_shape[0] == 1
        assert "fsdp" in dict(mesh) or decoder.described.embed.padding
        return decoder

    monkeypatch.setattr(loading, "_decoder", padded)
    policy = Policy(max_batch=8, chunk_tokens=16)
    how = replace(CONFIGURATION, mesh=mesh, shapes=SHAPES, policy=policy, pages=64)
    tokens, expected = greedy(name, engine(saved(name, tmp_path), how))
    assert tokens == expected
