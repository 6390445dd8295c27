"""Training plans: sums that must add up, orders that must hold, and refusals that must name what is wrong."""

from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import jsonschema
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import rooftop
from rooftop.arrays import AXES, Mesh, parse_axes
from rooftop.capabilities import KERNELS, AttentionKernel, Choice
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.ledger import Ledger
from rooftop.core.records import schema
from rooftop.explain.compiled.findings import Findings
from rooftop.explain.compiled.report import bytes_by_axes
from rooftop.explain.join import join
from rooftop.frameworks.framework import FrameworkName
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, MoE, flops_per_token, load_model
from rooftop.models.activations import CHECKPOINTS, SEARCHED
from rooftop.models.numerics import Numerics
from rooftop.models.program_sizes import CONTEXT_CHUNKS, LANES, block_size, padded_positions, runs
from rooftop.plan.layouts import enumerate_layouts, from_mesh
from rooftop.plan.pricing import RingSteps, scalar
from rooftop.plan.shapes import attended_pairs, run_pairs
from rooftop.plan.training.answer import TrainingAnswerDocument, levers, plan_training
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.plan import Padding, TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import Sweep, SweepOptions, searched_choices, sweep
from rooftop.plan.training.strategies import Strategies
from rooftop.plan.training.work.rows import training_ledger
from rooftop.plan.training.workload import Workload
from rooftop.present.documents.training import training_plan
from rooftop.roofline.collectives import price
from rooftop.scheduling.pipeline import PipelineSchedule
from tests.support.examples import examples

SLICES = [
    "v5e:4x4",
    "v5e:16x16",
    "v5e:16x16@2",
    "v5p:4x4x4",
    "v5p:4x8x8",
    "v6e:8x8",
    "tpu7x:4x4x4",
    "v4:4x4x8",
    "h100:8x4",
]
MODELS = ["llama3-8b", "llama3-70b", "mixtral-8x7b", "gemma2-9b", "deepseek-v2-lite", "qwen3-8b"]


def problem(
    model: str = "llama3-8b", on: str = "v5p:4x4x4", seqs: int = 256, seq_len: int = 4096, **more: object
) -> Problem:
    return Problem(
        model=load_model(model),
        slice=Slice.parse(on),
        workload=Workload(batch_tokens=seqs * seq_len, seq_len=seq_len, tokens=1e12),
        **more,  # type: ignore[arg-type]
    )


def best(swept: Sweep) -> TrainingPlan:
    return swept.plan(swept.best)


problems = st.builds(
    problem,
    model=st.sampled_from(MODELS),
    on=st.sampled_from(SLICES),
    seqs=st.sampled_from([64, 256, 1024]),
    seq_len=st.sampled_from([2048, 8192]),
)


@settings(max_examples=examples(25, quick=6), deadline=None)
@given(problems)
# Stages of other meshes do the first, dense layer alone.
@example(problem("deepseek-v2-lite", "v5e:4x4", seqs=64, seq_len=8192))
def test_what_the_plan_says_adds_up(given_: Problem) -> None:
    swept = sweep(given_)
    plan = best(swept)
    data = plan.to_json()
    memory, step = data["memory"], data["step"]
    classes = ("weights", "optimizer", "gradients", "activations", "workspace")
    assert memory["total"] == pytest.approx(sum(memory[name] for name in classes))
    assert memory["fits"] == (memory["total"] <= memory["capacity"])
    # The ledger of the winner adds up to the number that the sweep saw.
    assert sum(row["count"] * row["expected_s"] for row in data["ledger"]) == pytest.approx(step["expected_s"])
    assert swept.expected_s[swept.best] == pytest.approx(step["expected_s"])
    assert swept.memory_bytes[swept.best] == pytest.approx(memory["total"])
    for name in ("mxu", "vpu", "hbm", "ici", "dcn", "pcie"):
        total = sum(row["count"] * row["time_s"].get(name, 0.0) for row in data["ledger"])
        assert total == pytest.approx(step[f"{name}_s"])
    assert 0 < step["lower_s"] <= step["expected_s"] * (1 + 1e-9)
    assert step["expected_s"] <= step["upper_s"] * (1 + 1e-9)
    assert 0 < plan.mfu < 1


@settings(max_examples=examples(20, quick=6), deadline=None)
@given(problems)
def test_without_recompute_devices_execute_at_least_the_models_flops(given_: Problem) -> None:
    """Key/value heads that tensor parallelism copies, parts of MLA, and uneven stages come on top."""
    plan = best(sweep(replace(given_, remat="none", microbatches=1)))
    assert _executed_over_model(plan) > 1 - 2e-3


@settings(max_examples=examples(20, quick=6), deadline=None)
@given(
    model=st.sampled_from([name for name in MODELS if load_model(name).mla is None]),
    on=st.sampled_from(SLICES),
    tensor=st.sampled_from([1, 2, 4, 8]),
    seqs_per_group=st.sampled_from([1, 2, 4]),
    seq_len=st.sampled_from([2048, 8192]),
)
def test_no_recompute_means_model_flops(model: str, on: str, tensor: int, seqs_per_group: int, seq_len: int) -> None:
    """Without remat a device executes its share of the model's FLOPs, on meshes that divide all heads and sequences."""
    groups = Slice.parse(on).devices // tensor
    axes = {"fsdp": groups, "tensor": tensor}
    plan = best(sweep(problem(model, on, groups * seqs_per_group, seq_len, axes=axes, remat="none", microbatches=1)))
    assert load_model(model).kv_heads % tensor == 0
    assert _executed_over_model(plan) == pytest.approx(1, rel=2e-3)


def _executed_over_model(plan: TrainingPlan) -> float:
    """Matmul FLOPs of all devices over the model's; attention, which runs by whole blocks, is not among them."""
    work = plan.problem.workload
    model = 3 * flops_per_token(plan.problem.model, work.seq_len).matmul * work.batch_tokens
    return float(plan.ledger.flops(kernels=False)) * plan.problem.slice.devices / model


@settings(max_examples=examples(15, quick=5), deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(["v5p:4x4x4", "v6e:8x8", "h100:8x4"]))
def test_more_chips_never_raise_compute_time(model: str, on: str) -> None:
    small = Slice.parse(on)
    large = Slice(small.chip, (*small.shape[:-1], small.shape[-1] * 2), small.num_slices)
    seconds = [best(sweep(problem(model, slice_.name))).ledger.total("mxu") for slice_ in (small, large)]
    assert float(seconds[1]) <= float(seconds[0]) * (1 + 1e-9)


@settings(max_examples=6, deadline=None)
@given(st.sampled_from(MODELS), st.sampled_from(["v5e:4x4", "v5p:4x4x4", "v5e:8x8@2", "h100:8x4"]))
def test_bounding_loses_no_winner(model: str, on: str) -> None:
    job = problem(model, on)
    quick, whole = sweep(job), sweep(job, SweepOptions(exhaustive=True))
    assert quick.searched == whole.searched
    assert quick.expected_s[quick.best] == pytest.approx(whole.expected_s[whole.best])
    ranked = [[swept.expected_s[candidate] for candidate in swept.alternatives(5)] for swept in (quick, whole)]
    assert ranked[0] == pytest.approx(ranked[1])


@pytest.mark.parametrize(
    ("model", "on", "seqs", "framework"),
    [
        ("llama3-8b", "v5e:4x4", 64, "rooftop"),
        ("llama3-8b", "v6e:2x4", 64, "maxtext"),
        ("llama3-8b", "v6e:8x8", 64, "rooftop"),
    ],
)
def test_offload_is_searched_where_memory_is_short(model: str, on: str, seqs: int, framework: str) -> None:
    """The winner is that of all candidates, each with a price; and nothing is offloaded that has room on the device."""
    job = problem(model, on, seqs, 8192, framework=FrameworkName(name=framework))
    quick, whole = (sweep(job, SweepOptions(executable=True, exhaustive=every)) for every in (False, True))
    assert quick.expected_s[quick.best] == pytest.approx(whole.expected_s[whole.best])
    choice = quick.strategies.choices[quick.best[1]]
    short = on != "v6e:8x8"
    assert ("offload" in choice.policy.values()) == short
    # Without host memory nothing is offloaded, and a step takes longer.
    figures = {"host_bytes": 1.0}
    without = sweep(replace(job, slice=Slice(job.slice.chip.replace(**figures), job.slice.shape)))
    assert "offload" not in without.strategies.choices[without.best[1]].policy.values()
    assert (without.expected_s[without.best] > quick.expected_s[quick.best]) == short
    plan = best(quick)
    assert not plan.obstacles
    tried = {lever.lever: lever for lever in levers(quick, plan)}
    assert tried["checkpoints in host memory"].gain > 0 or not short
    assert ("schedule" in tried) == (plan.mesh.size("stage") > 1)
    assert all(lever.gain > -1e-9 for lever in tried.values())
    taken = plan.document.memory.host
    assert taken <= (job.host_capacity or 0.0)
    reasons = [reason for reason in plan.reasons if reason.rule == "memory of the host"]
    assert [reason.limit for reason in reasons] == ([taken] if short else [])


@pytest.mark.parametrize(
    ("model", "on", "seqs", "framework"),
    [
        ("llama3-70b", "h100:8x8", 256, "megatron"),
        ("llama3-8b", "h100:8x2", 64, "torchtitan"),
        ("llama3-8b", "v5e:2x2@4", 64, "rooftop"),
        ("llama3-8b", "v6e:2x4", 64, "maxtext"),
    ],
)
def test_schedules_and_chunks_are_searched(model: str, on: str, seqs: int, framework: str) -> None:
    """The winner is that of all candidates, each with a price, over meshes with stages too."""
    axes = ["stage", "fsdp", "data", "tensor"]
    job = problem(model, on, seqs, 8192, framework=FrameworkName(name=framework), remat="block")
    quick, whole = (sweep(job, SweepOptions(executable=True, exhaustive=every, axes=axes)) for every in (False, True))
    assert quick.expected_s[quick.best] == pytest.approx(whole.expected_s[whole.best])
    assert quick.searched == whole.searched
    tried = {choice.pipeline for choice in quick.strategies.choices}
    assert len(tried) > 1 and tried == set(job.pipelines)
    staged = whole.strategies.layouts.along("stage") > 1
    chunked = np.array([choice.chunks > 1 for choice in whole.strategies.choices])
    # Without stages a step has no schedule, and with them chunks of fewer layers fit too.
    assert not whole.allowed[~staged][:, chunked].any() and whole.allowed[staged][:, chunked].any()
    # Pinned, the search has that alone.
    pinned = sweep(replace(job, chunks=2), SweepOptions(axes=axes))
    assert {choice.pipeline for choice in pinned.strategies.choices} == {("interleaved", 2)}


@pytest.mark.parametrize("model", MODELS)
def test_plan_json_round_trips_and_follows_its_schema(model: str) -> None:
    answer = plan_training(problem(model))
    data = json.loads(json.dumps(answer.to_json()))
    jsonschema.validate(data, schema(TrainingAnswerDocument))
    again = TrainingPlan.from_json(data).to_json()
    for name, value in again.items():
        assert json.loads(json.dumps(value)) == data[name], name


def test_search_balances_fsdp_and_tensor_as_the_book_says() -> None:
    """Fewer tokens per chip ask for more tensor parallelism: X_opt grows with the square root of the batch."""
    tensor = [
        best(sweep(problem("llama3-70b", "v5p:16x16x16", seqs=seqs))).mesh.shape["tensor"] for seqs in (512, 1024, 8192)
    ]
    assert tensor == sorted(tensor, reverse=True)
    assert tensor[0] > tensor[-1]


def test_remat_trades_flops_for_memory() -> None:
    plans = {name: best(sweep(problem("llama3-8b", remat=name))) for name in ("none", "matmuls", "minimal", "block")}
    memory = [plans[name].memory["activations"] for name in ("none", "matmuls", "minimal", "block")]
    assert memory == sorted(memory, reverse=True)
    mxu = {name: float(plan.ledger.total("mxu")) for name, plan in plans.items()}
    assert mxu["none"] == pytest.approx(mxu["matmuls"])
    assert mxu["matmuls"] < mxu["minimal"] < mxu["block"]


def test_offload_moves_bytes_to_the_host() -> None:
    saved = best(sweep(problem("llama3-8b", remat="block,qkv=save", axes={"fsdp": 64})))
    offloaded = best(sweep(problem("llama3-8b", remat="block,qkv=offload", axes={"fsdp": 64})))
    moved = saved.memory["activations"] - offloaded.memory["activations"]
    assert offloaded.to_json()["memory"]["host"] == pytest.approx(moved)
    assert float(offloaded.ledger.total("pcie")) > 0 == float(saved.ledger.total("pcie"))


@pytest.mark.parametrize("model", ["llama3-8b", "mixtral-8x7b", "deepseek-v2-lite"])
@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_every_offloaded_checkpoint_goes_to_the_host_and_back(model: str, checkpoint: str) -> None:
    plan = best(sweep(problem(model, remat=f"block,{checkpoint}=offload", axes={"fsdp": 64}, microbatches=1)))
    host = plan.to_json()["memory"]["host"]
    # Nothing reads the MLP's output again: the next layer begins with its sum.
    assert (host > 0) == (checkpoint != "mlp_down")
    moved = float(plan.ledger.total("pcie")) * plan.step.rates.pcie_bytes_per_s
    assert moved == pytest.approx(2 * host)


def at_own_pace(asked: Problem) -> Problem:
    """The problem of a program whose stages wait for their neighbours alone, and repeat nothing."""
    habits = replace(asked.program.habits, lockstep=False, staged_loop=False)
    return replace(asked, framework=replace(asked.program, habits=habits))


def test_pipeline_bubble_shrinks_with_microbatches_and_schedule() -> None:
    def idle(*, lockstep: bool = False, **more: object) -> float:
        asked = problem("llama3-8b", axes={"fsdp": 16, "stage": 4}, remat="block", **{"schedule": "1f1b", **more})
        plan = best(sweep(asked if lockstep else at_own_pace(asked)))
        return plan.exposed_s()["idle"] / (plan.expected_s - plan.exposed_s()["idle"])

    few, many = idle(microbatches=4), idle(microbatches=16)
    assert many < few
    assert idle(microbatches=4, schedule="interleaved", chunks=2) < few
    assert idle(microbatches=4, schedule="zero_bubble") == pytest.approx(few / 3, rel=0.02)
    # (stages - 1)/microbatches of the busy time, which is all but the update.
    assert few == pytest.approx(3 / 4, rel=0.01)
    # In step, slots of 1F1B in which some stages go forward last as long as the backward tasks of others. Where no slot
    # has both, stages wait no longer than at their own pace.
    slow, eager = (idle(microbatches=16, lockstep=True, schedule=name) for name in ("1f1b", "eager_1f1b"))
    assert eager <= many < slow
    assert slow > eager + 0.15


def test_pipelines_that_no_program_runs_say_why() -> None:
    def obstacles(**more: object) -> str:
        asked = problem("llama3-8b", axes={"fsdp": 16, "stage": 4}, remat="block", **more)
        return "; ".join(best(sweep(asked)).obstacles)

    assert not obstacles(microbatches=8)
    several = obstacles(seqs=96, microbatches=6, schedule="interleaved", chunks=2)
    assert "multiple of 4 microbatches, not 6" in several


def test_stages_wait_for_copies_to_the_host() -> None:
    """Both ways for every microbatch; the device has what two microbatches saved, and the host one place to spare."""
    saved, offloaded = (
        best(sweep(problem(
            "llama3-8b", axes={"fsdp": 16, "stage": 4}, remat=remat, microbatches=8, schedule="1f1b"
        )))
        for remat in ("block", "block,layer_input=offload")
    )  # fmt: skip
    assert not offloaded.obstacles
    one = 8 * saved.problem.workload.batch_tokens / 16 / 8 * 4096 * 2
    assert offloaded.memory["activations"] == pytest.approx(2 * one)
    assert offloaded.to_json()["memory"]["host"] == pytest.approx((4 + 1) * one)
    pcie = saved.problem.slice.chip.pcie_bytes_per_s
    bubble = 1 / (1 - 3 / 11)
    assert offloaded.expected_s - saved.expected_s == pytest.approx(8 * 2 * one / pcie * bubble, rel=0.02)


def test_layers_that_stages_do_not_share_are_done_by_one_of_them_and_held_by_all() -> None:
    """DeepSeek-V2-Lite: one dense layer, then 26 of experts, of which each of two stages has 13."""

    def planned(stages: int, layers: int = 27, remat: str = "block") -> TrainingPlan:
        asked = problem(
            "deepseek-v2-lite", "v5p:2x2x4", seqs=128, axes={"stage": stages, "expert": 16 // stages}, remat=remat,
            microbatches=8,
        )  # fmt: skip
        return best(sweep(replace(asked, model=replace(asked.model, layers=layers))))

    def times(plan: TrainingPlan, scope: str, phase: str = "forward") -> float:
        return sum(float(row.count) for row in plan.ledger if (row.scope, row.phase) == (scope, phase)) / 8

    two = planned(2)
    assert not two.obstacles
    assert float(two.step.layers.item()) == 14
    assert (times(two, "layers/mlp/up"), times(two, "layers/moe/router"), times(two, "layers/attn/qkv")) == (1, 13, 28)
    # The dense layer is not kept from task to task, whatever the policy: its backward pass begins with the tokens.
    every = planned(2, remat="none")
    flops = [float(row.flops.get("bf16", 0.0)) for row in every.ledger if row.key == ("layers/mlp/up", "recompute")]
    assert flops[0] > 0 and times(every, "embed", "recompute") == times(two, "embed", "recompute") == 1
    one = planned(1)
    assert (times(one, "layers/mlp/up"), times(one, "layers/moe/router"), times(one, "embed")) == (1, 26, 1)
    assert not times(one, "embed", "recompute")
    # A stage's 13 layers keep three microbatches, the dense layer one while it is done.
    activations = [plan.memory["activations"] / float(plan.step.tokens.item()) for plan in (two, planned(2, layers=53))]
    layer = (activations[1] - activations[0]) / (3 * 13)
    assert activations[0] == pytest.approx((3 * 13 + 1) * layer)
    # Every stage has the tables and the dense layer: their gradients are summed over stages.
    summed = sum(
        float(one.bytes) for row in two.ledger if row.scope == "gradients"
        for one in row.collectives if "stage" in one.axes
    )  # fmt: skip
    step = two.step
    shared_by_none = step.held_parameters["vocab"] + step.layer_parameters["attn"] + step.layer_parameters["mlp"]
    assert summed == pytest.approx(2 * float(shared_by_none.item()))
    # Over four stages some have seven layers and some six: what these wait is padding.
    four = planned(4)
    assert not four.obstacles and float(four.step.layers.item()) == 1 + 7
    assert times(four, "layers/moe/router") == 26 / 4 and times(four, "layers/mlp/up") == 1
    forward = sum(
        float(row.count * row.expected_s) for row in four.ledger
        if row.phase == "forward" and row.scope.startswith("layers/moe")
    )  # fmt: skip
    waits = {row.phase: float(row.expected_s) for row in four.ledger if row.scope == "padding"}
    assert waits.keys() == {"forward", "recompute", "backward"} and waits["forward"] > 0.5 / 6.5 * forward
    assert not any(row.scope == "padding" for row in two.ledger)


@pytest.mark.parametrize(
    ("model", "axes", "layers", "padding"),
    [
        ("llama3.1-405b", {"stage": 16, "fsdp": 32, "tensor": 8}, 8, 2 / 16),
        ("llama3.1-405b", {"stage": 8, "fsdp": 64, "tensor": 8}, 16, 2 / 8),
        ("deepseek-v3", {"stage": 16, "fsdp": 4, "expert": 64}, 3 + 4, 6 / 16),
    ],
)
def test_published_pipelines_are_uneven_and_run(model: str, axes: dict[str, int], layers: int, padding: float) -> None:
    asked = problem(model, "v5p:16x16x16", seqs=4096, axes=axes, remat="block", microbatches=16)
    plan = best(sweep(asked))
    assert not plan.obstacles
    assert float(plan.step.layers.item()) == layers and float(plan.step.padding_layers.item()) == padding
    # A token of one stage's share passes through its part of all layers, and through none of the padding.
    tokens = asked.workload.batch_tokens / (axes["fsdp"] * axes.get("expert", 1))
    attended = sum(float(row.count) for row in plan.ledger if row.key == ("layers/attn/core", "forward")) / 16
    assert attended == layers - padding and plan.step.tokens.item() == tokens / 16


def test_a_stage_gathers_keys_and_sends_in_every_trip() -> None:
    """As its program does: no ring over context, attention's forward pass once more, results in each of 22 slots."""
    plans = {
        name: best(sweep(problem("llama3-8b", seqs=128, axes=axes, remat="block", microbatches=8, chunks=1)))
        for name, axes in {
            "context": {"stage": 4, "context": 4, "fsdp": 4}, "stage": {"stage": 4, "fsdp": 16},
            "ring": {"context": 4, "fsdp": 16},
        }.items()
    }  # fmt: skip
    core = {
        name: {row.phase: row for row in plan.ledger if row.scope == "layers/attn/core"} for name, plan in plans.items()
    }
    kinds = {phase: [collective.kind for collective in row.collectives] for phase, row in core["context"].items()}
    assert kinds == {"forward": ["all_gather"], "recompute": ["all_gather"], "backward": ["reduce_scatter"]}
    assert {collective.kind for row in core["ring"].values() for collective in row.collectives} == {"permute"}
    counts = {name: rows["recompute"].count / rows["forward"].count for name, rows in core.items()}
    assert counts == {"context": 2, "stage": 2, "ring": 1}
    # Of four devices' queries, a kernel without masks meets 11/8 of the keys that come before them.
    tokens = {name: plan.step.tokens.item() for name, plan in plans.items()}
    flops = {name: rows["forward"].kernel_flops / tokens[name] for name, rows in core.items()}
    assert flops["context"] == pytest.approx(flops["stage"] * 11 / 8) and flops["ring"] == flops["stage"]
    sends = [row.count for row in plans["stage"].ledger if row.scope == "pipeline" and row.collectives]
    # A trip goes forward and back, but for three at either end of four stages.
    assert sends == [8 + 2 * 3, 8 + 2 * 3]


def test_stages_have_at_least_a_layer_for_each_of_their_chunks() -> None:
    asked = problem("llama3-8b", "v5e:8x8", axes={"stage": 64}, microbatches=8)
    with pytest.raises(RooftopError, match="mesh axis stage: got 64; accepted: at most the 32 layers"):
        best(sweep(asked))
    chunked = problem("llama3-8b", "v5e:8x8", schedule="interleaved", chunks=9, microbatches=8)
    with pytest.raises(RooftopError, match=r"chunks: got 9; accepted: at most 8 \(4 stages share 32 layers\)"):
        best(sweep(replace(chunked, axes={"stage": 4, "fsdp": 16})))
    assert not best(sweep(replace(chunked, axes={"stage": 4, "fsdp": 16}, chunks=5))).obstacles


def test_stages_share_whole_periods_of_layers() -> None:
    """Gemma 3 27B: ten periods of six layers, and two layers that the last stage does alone."""
    asked = problem("gemma3-27b", "v5p:4x4x4", axes={"stage": 2, "fsdp": 32}, remat="block", microbatches=4)
    plan = best(sweep(asked))
    assert not plan.obstacles and float(plan.step.layers.item()) == 32
    forward = [float(row.count) / 4 for row in plan.ledger if (row.scope, row.phase) == ("layers/mlp/up", "forward")]
    assert forward == [30, 2]
    uneven = best(sweep(replace(asked, axes={"stage": 4, "fsdp": 16})))
    assert not uneven.obstacles and float(uneven.step.layers.item()) == 3 * 6 + 2
    with pytest.raises(RooftopError, match=r"mesh axis stage.*at most the 10 periods of 6 layers that stages share"):
        best(sweep(replace(asked, axes={"stage": 16, "fsdp": 4})))


def test_experts_are_exchanged_and_counted() -> None:
    plan = best(sweep(problem("mixtral-8x7b", axes={"fsdp": 8, "expert": 8}, microbatches=1)))
    exchanged = [
        collective
        for row in plan.ledger
        for collective in row.collectives
        if row.scope == "layers/moe/dispatch" and row.phase == "forward" and collective.axes == ("expert",)
    ]
    assert [collective.kind for collective in exchanged] == ["all_to_all"]
    tokens = 256 * 4096 / 64
    # Two experts a token: its D elements in bf16, and the expert's weight in float32.
    assert exchanged[0].bytes == tokens * 2 * (4096 * 2 + 4)


def test_context_parallelism_rotates_keys_and_values() -> None:
    plan = best(sweep(problem("llama3-8b", axes={"fsdp": 16, "context": 4}, seqs=16, seq_len=65536, remat="block")))
    core = next(row for row in plan.ledger if row.key == ("layers/attn/core", "forward"))
    (ring,) = core.collectives
    tokens = 16 * 65536 / 64
    assert (ring.kind, ring.axes) == ("permute", ("context",))
    assert ring.bytes == pytest.approx(3 * tokens * 2 * 8 * 128 * 2)


def test_fsdp_over_two_slices_gathers_between_them_first() -> None:
    """A device gets the other slice's counterpart of its shard over DCN, and all others over ICI, in pairs."""
    plan = best(sweep(problem("llama3-8b", "v5e:4x4@2", axes={"fsdp": 32}, seqs=32)))
    assert {piece.axis for piece in plan.mesh.axes["fsdp"]} == {"x", "y", "dcn"}
    row = next(row for row in plan.ledger if (row.scope, row.phase) == ("layers/mlp/down", "forward"))
    (gather,) = (collective for collective in row.collectives if collective.kind == "all_gather")
    assert gather.bytes == 2 * 4096 * 14336
    assert gather.time_s["dcn"] == pytest.approx(gather.bytes / 32 / plan.problem.slice.chip.dcn_bytes_per_s)
    assert gather.time_s["ici"] == pytest.approx(gather.bytes * 15 / 16 / 90e9)  # Over two open lines.
    # It costs more than copies of the weights on both slices, where these fit.
    copies = best(sweep(problem("llama3-8b", "v5e:4x4@2", axes={"data": 2, "fsdp": 16}, seqs=32)))
    assert {piece.axis for piece in copies.mesh.axes["data"]} == {"dcn"}
    assert copies.expected_s < plan.expected_s


def test_a_ring_over_two_slices_goes_over_dcn_in_every_hop() -> None:
    asked = problem("llama3-8b", "v5e:4x4@2", seqs=8)
    slice_, seconds = asked.slice, {}
    for layout in ("fsdp=x+dcn,context=y", "fsdp=x+y[1:2],context=y[2:2]+dcn", "fsdp=x+y,context=dcn"):
        mesh = Mesh(slice_, dict.fromkeys(AXES, ()) | dict(Mesh.from_layout(slice_, layout).axes))
        step = asked.step(Strategies(from_mesh(mesh), (Choice(remat="block"),)))
        (row,) = (r for r in training_ledger(step) if (r.scope, r.phase) == ("layers/attn/core", "forward"))
        (ring,) = (collective for collective in row.collectives if scalar(collective.wire_bytes) > 0)
        seconds[layout] = scalar(ring.expected_s) / scalar(ring.wire_bytes)
    within, both, between = seconds.values()
    # A device sends all that it sends through the network of its host.
    assert both == pytest.approx(between, rel=0.05)
    assert both > 10 * within


def test_data_over_dcn_reduces_gradient_shards() -> None:
    plan = best(sweep(problem("llama3-8b", "v5e:16x16@2", axes={"data": 2, "fsdp": 256}, seqs=512)))
    (row,) = [row for row in plan.ledger if row.scope == "gradients"]
    reduce, norms = row.collectives
    assert (reduce.kind, reduce.axes) == ("all_reduce", ("data",))
    assert (norms.kind, norms.axes) == ("all_reduce", ("data", "fsdp"))
    assert norms.bytes == 2 * (2 * 32 + 1) * 4096
    parameters = sum(plan.step.held_parameters[name].item() for name in ("dense", "vocab"))
    assert reduce.bytes == pytest.approx(2 * parameters)
    assert parameters == pytest.approx(8.03e9 / 256, rel=1e-3)
    assert reduce.time_s["dcn"] == pytest.approx(reduce.bytes / plan.problem.slice.chip.dcn_bytes_per_s, rel=1e-6)


#: Figures not within 5 % of the compiled program's (memory: 3 % below to 5 % above); why: docs/evidence/accuracy.md.
#: A plan whose figure comes within them has to leave the list.
_KNOWN_MISSES = {
    "3-5": {"memory": "0.968: what both layers of a trip of the loop have kept"},
    "3-20": {"time": "0.895: no plan leaves memory free, and XLA multiplies again what it has no room for"},
    "7-4": {
        "FLOPs": "5 % fewer: no plan leaves memory free, and XLA multiplies again what it has no room for",
        "time": "1.077: the loss is fused into the unembedding",
    },
    "8-2": {"time": "1.065: rows of experts on TPU7x"},
    "h100-fsdp": {"time": "0.941: what a layer's backward pass waits for, in no plan: docs/evidence/accuracy.md"},
    "h200-405b": {"time": "0.947: the same, over 32 nodes"},
    "h100-moe": {"time": "0.927: the same, with experts"},
    # Rules that explained these cost more lines than they moved errors of all plans: bench/results/rules.csv.
    "3-7": {"time": "1.083: the loss is fused into the unembedding"},
    "3-10": {"time": "1.090: the same"},
    "3-25": {"time": "1.071: the same"},
    "3-32": {"time": "1.078: the same"},
    "tpu7x-rings": {"memory": "0.914: pieces of gathered streams as they arrive"},
    "tpu7x-muon": {"memory": "0.966: gradients of weights come last, and keep gate and up"},
    "v5e-shared-keys": {"memory": "1.093: layers of two kinds, whose gradients get their place in turn"},
    "v5e-stages-uneven": {"memory": "0.966: eight streams next to the loss of a stage"},
    "3-13": {"memory": "1.055: permutes of padded gradients end the MLP's input early"},
    "a100-fsdp": {"memory": "0.967: zeros of gradients are written before the loss"},
}


#: Dtypes of FLOPs in matmuls of 8 bits.
_8_BITS = ("int8", "f8_e4m3", "f8_e5m2")


def _compiled_rows() -> list[dict[str, str]]:
    """Results of compile.py, compile_random.py and compile_gpu.py of bench/compiler: plans next to programs by XLA."""
    rows: list[dict[str, str]] = []
    for name in ("compile.csv", "compile_random.csv", "compile_gpu.csv"):
        path = Path(__file__).parents[2] / "bench" / "results" / name
        with path.open(encoding="utf-8", newline="") as file:
            rows += (row for row in csv.DictReader(file) if row["compiled_s"])
    return rows


@pytest.mark.parametrize("row", [pytest.param(row, id=row["name"]) for row in _compiled_rows()])
def test_plans_are_what_xla_makes_of_them(row: dict[str, str]) -> None:
    """The figures of the plan as it is now, by those of its compiled program as it was then."""
    model = replace(load_model(row["model"]), layers=int(row["layers"]))
    asked = Problem(
        model=model,
        slice=Slice.parse(row["slice"]),
        workload=Workload(batch_tokens=int(row["sequences"]) * int(row["seq_len"]), seq_len=int(row["seq_len"])),
        assumptions=Assumptions(attention=row["attention"]),
        numerics=Numerics(optimizer=row.get("optimizer") or "adamw", matmul=row.get("matmul") or "bf16"),
        axes=parse_axes(row["mesh"]),
        remat=row["remat"],
        microbatches=int(row["microbatches"]),
        collective_matmuls=row.get("collective_matmuls") == "yes",
        experts_over_tensor=row.get("experts_over_tensor") == "yes",
    )
    plan = best(sweep(asked))
    flops, memory, time = (
        planned / float(row[name])
        for planned, name in (
            (float(plan.ledger.flops(kernels=False)), "compiled_flops"),
            (plan.memory_bytes, "compiled_peak_bytes"),
            (plan.expected_s, "compiled_s"),
        )
    )
    within = {"FLOPs": abs(flops - 1) <= 0.01, "memory": 0.97 <= memory <= 1.05, "time": abs(time - 1) <= 0.05}
    misses = {name for name, is_within in within.items() if not is_within}
    assert misses == set(_KNOWN_MISSES.get(row["name"], ())), f"FLOPs {flops:.3f}, memory {memory:.3f}, time {time:.3f}"
    in_8_bits = sum(
        float(entry.count * sum(entry.flops.get(name, 0.0) for name in _8_BITS)) for entry in plan.ledger.rows
    )
    assert in_8_bits == pytest.approx(float(row.get("compiled_narrow_flops") or 0.0), rel=0.01)
    no_findings = Findings(unexpected=(), missing=(), recomputed=(), spelled=())
    moved = bytes_by_axes(join(plan.ledger, Ledger(())), no_findings)
    for entry in row["compiled_collective_bytes"].split():
        axes, _, nbytes = entry.partition(":")
        # A sum over slices is taken in steps, over other axes each: see docs/evidence/accuracy.md. Near the edge of HBM
        # some are done twice.
        if asked.slice.num_slices == 1 and not float(row["rematerialised_s"] or 0.0):
            planned, _ = moved.get(axes, (0.0, 0.0))
            assert planned == pytest.approx(float(nbytes), rel=0.05, abs=2**16)


def test_matmuls_in_8_bits_gather_half_the_bytes() -> None:
    """Forward and the gradient of inputs are in 8 bits, that of weights is not; nor are routers and the unembedding."""
    plans = {
        dtype: best(
            sweep(
                problem(
                    "mixtral-8x7b", on="tpu7x:4x4x4", axes={"fsdp": 16, "expert": 8}, remat="block", microbatches=1,
                    numerics=Numerics(matmul=dtype),
                )
            )
        )
        for dtype in ("bf16", "f8_e4m3")
    }  # fmt: skip
    wide, narrow = (plan.ledger.rows for plan in plans.values())
    multiplied = ([row for row in rows if row.flops] for rows in (wide, narrow))
    for row, ours in zip(*multiplied, strict=True):
        assert ours.key == row.key
        flops = row.flops["bf16"]
        if row.scope in ("layers/moe/router", "unembed"):
            assert ours.flops == row.flops
        elif row.phase == "backward":
            assert ours.flops == {"f8_e5m2": flops / 2, "bf16": flops / 2}
        else:
            assert ours.flops == {"f8_e4m3": flops}
    (before, *_), (after, maxima, *_) = (
        [
            item
            for row in rows
            if row.key == ("layers/attn/qkv", "forward")
            for item in row.collectives
            if item.axes == ("fsdp",)
        ]
        for rows in (wide, narrow)
    )
    assert (after.kind, after.bytes) == ("all_gather", before.bytes / 2)
    assert (maxima.kind, maxima.bytes) == ("all_reduce", 4 * (32 + 2 * 8) * 128)
    assert plans["bf16"].memory_bytes == plans["f8_e4m3"].memory_bytes


def test_groups_over_several_axes_are_priced_as_one() -> None:
    """Each layout's AllReduce is that of the group of devices on its mesh, as compiled programs are priced."""
    layouts = enumerate_layouts(Slice.parse("v6e:4x8"), ("fsdp", "expert", "context", "tensor"), {})
    strategies = Strategies(layouts, ())
    for axes in (("expert", "context"), ("context", "tensor"), ("data", "fsdp"), ("fsdp", "expert", "tensor")):
        planned = strategies.price("all_reduce", axes)
        for index in range(0, len(layouts), 7):
            alone = price("all_reduce", layouts.mesh(index).span(*axes))
            for resource, seconds in alone.seconds_per_byte.items():
                assert planned.seconds_per_byte[resource][index, 0] == pytest.approx(float(seconds))
                assert planned.latency_s[resource][index, 0] == pytest.approx(float(alone.latency_s[resource]))
            assert planned.wire_per_byte[index, 0] == pytest.approx(float(alone.wire_per_byte))


def test_experts_that_fill_no_registers_are_stored_padded() -> None:
    """gpt-oss-20b's D and F of 2880 and 1440 on a device: 26.780 GB of optimizer state compiled, 26.309 of elements."""
    asked = replace(problem("gpt-oss-20b", "tpu7x:2x2x1", seqs=4, seq_len=8192), axes={"expert": 4, "tensor": 2})
    assert best(sweep(replace(asked, remat="none"))).memory["optimizer"] == pytest.approx(26.780e9, rel=0.005)


@pytest.mark.parametrize(
    ("remat", "seqs", "compiled"), [("none", 4, 68.674e9), ("matmuls", 4, 63.747e9), ("none", 8, 67.825e9)]
)
def test_narrow_heads_of_one_sequence_are_kept_padded(remat: str, seqs: int, compiled: float) -> None:
    """Bytes compiled of gpt-oss-20b with heads of 64, 32 Ki tokens in 4 sequences, one a device, and in 8."""
    asked = problem("gpt-oss-20b", "tpu7x:2x2x1", seqs=seqs, seq_len=32768 // seqs)
    plan = best(sweep(replace(asked, axes={"expert": 4, "tensor": 2}, remat=remat)))
    assert plan.memory_bytes == pytest.approx(compiled, rel=0.03)


def test_a_search_leaves_the_compiler_room_in_hbm() -> None:
    asked = problem("qwen3-32b", "v5p:2x2x2", seqs=8, seq_len=2048)
    # Compiled, the plan without remat has 98.6 GB of 102.8, and XLA repeats matmuls and gathers.
    tight = plan_training(replace(asked, axes={"fsdp": 2, "tensor": 4}, remat="none", microbatches=1)).plan
    assert 0.95 < tight.memory_bytes / asked.capacity < 0.97
    assert tight.fits
    assert "room for the compiler" in [reason.rule for reason in tight.reasons if not reason.holds]
    assert not tight.leaves_room
    assert not tight.document.step.leaves_room
    roomy = plan_training(asked).plan
    assert roomy.memory_bytes <= asked.roomy_bytes < asked.capacity
    assert roomy.leaves_room
    assert not any(reason.rule == "room for the compiler" for reason in roomy.reasons)
    book = replace(asked, bounds="book")
    assert book.roomy_bytes == book.capacity


def test_a_plan_without_room_is_too_short_an_estimate_and_names_the_nearest_with_room() -> None:
    asked = problem("qwen3-32b", "v5p:2x2x2", seqs=8, seq_len=2048)
    pinned = plan_training(replace(asked, axes={"fsdp": 2, "tensor": 4}, remat="none", microbatches=1))
    own = pinned.nearest_with_room
    # The same mesh with another remat policy.
    assert own is not None
    assert (own.slice, own.mesh) == ("v5p:2x2x2", {"fsdp": 2, "tensor": 4})
    assert own.memory_bytes <= asked.roomy_bytes
    # No plan has room on this slice; compiled, this one takes 1.12 times as long.
    small = problem("deepseek-v2-lite", "v6e:2x4", seqs=4, seq_len=8192)
    answer = plan_training(small)
    larger = answer.nearest_with_room
    assert larger is not None
    assert (larger.slice, larger.executable) == ("v6e:4x4", True)
    assert larger.memory_bytes <= small.roomy_bytes < answer.plan.memory_bytes
    assert answer.nearest_executable is None
    lines = training_plan(answer.document).verdict.details
    assert any(line.startswith("its time is an estimate, and too short: at 98% of HBM") for line in lines)
    assert any(line.startswith("nearest with room: v6e:4x4 as ") for line in lines)
    assert plan_training(asked).nearest_with_room is None


def test_a_stage_holds_a_microbatch_more_than_those_in_flight() -> None:
    """With all activations kept XLA needs more than a v5e has; what the matmuls make fits, in 15.03 GB (compiled)."""
    asked = replace(
        problem("llama3-8b", "v5e:4x4@2", seqs=32),
        axes={"stage": 2, "fsdp": 8, "tensor": 2},
        microbatches=4,
        schedule="1f1b",
    )
    assert not best(sweep(replace(asked, remat="none"))).fits
    assert best(sweep(replace(asked, remat="matmuls"))).memory_bytes == pytest.approx(15.03e9, rel=0.05)


def test_kept_checkpoints_are_copied_out_of_their_stack() -> None:
    """The backward pass reads and writes checkpoints once more: 73.8 GB compiled for 36.6 GB of them."""
    asked = replace(
        problem("llama3-8b", "v5p:4x4x4", seqs=256, seq_len=2048),
        axes={"data": 2, "fsdp": 32},
        microbatches=1,
    )
    saving = best(sweep(replace(asked, remat="matmuls")))
    plain = best(sweep(replace(asked, remat="block")))
    scopes = ("layers/attn/core", "layers/mlp/down")

    def moved(plan: TrainingPlan) -> float:
        rows = (row for row in plan.ledger if row.scope in scopes and row.phase == "backward")
        return sum(float(row.count) * float(row.hbm_bytes) for row in rows)

    layer_inputs = plain.memory["activations"]
    assert moved(saving) - moved(plain) == pytest.approx(2 * (saving.memory["activations"] - layer_inputs), rel=1e-6)


def test_nothing_fits_says_by_how_much_and_where() -> None:
    answer = plan_training(problem("llama3-405b", "v5e:4x4"))
    with pytest.raises(Infeasible, match=r"over the 16\.9 GB of a v5e device; of .* are optimizer$"):
        answer.require_fit()


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ({"fsdp": 16, "tensor": 3}, r"64 devices.*48.*such as fsdp="),
        ({"fsdp": 1000}, r"64 devices.*such as fsdp=64"),
        ({"fsdp": 2, "tensor": 32}, None),
        ({"fsdp": 1, "tensor": 64}, None),
        ({"fsdp": 32, "expert": 2}, r"1: llama3-8b has no experts, such as"),
    ],
)
def test_a_mesh_that_does_not_divide_names_the_nearest_that_does(axes: dict[str, int], message: str | None) -> None:
    if message is None:
        assert sweep(problem(axes=axes)).expected_s.size
        return
    with pytest.raises(RooftopError, match=message):
        sweep(problem(axes=axes))


def test_uneven_sequences_are_priced_on_the_busiest_device() -> None:
    """13 sequences over 16 devices take as long as 16; model FLOPs and tokens are those of the 13."""
    how: dict[str, Any] = {"on": "v5e:4x4", "axes": {"fsdp": 16}, "remat": "block", "microbatches": 1}
    some, all_ = (best(sweep(problem("llama3-8b", seqs=seqs, seq_len=4000, **how))) for seqs in (13, 16))
    assert some.expected_s == pytest.approx(all_.expected_s)
    assert some.memory_bytes == all_.memory_bytes
    assert some.mfu == pytest.approx(all_.mfu * 13 / 16)
    assert some.padding == Padding(
        sequences=16, positions=4096, empty_sequences=3, sequence_tokens=96, share=1 - 13 * 4000 / (16 * 4096)
    )
    assert some.padding.share == pytest.approx(float(some.step.padding[0, 0]))
    assert not some.obstacles


@settings(max_examples=examples(300, quick=60), deadline=None)
@given(st.integers(1, 9000), st.integers(1, 40), st.integers(1, 12), st.sampled_from(KERNELS), st.integers(1, 2))
def test_padded_positions_divide(seq_len: int, ring: int, tensor: int, kernel: AttentionKernel, chunks: int) -> None:
    padded = int(padded_positions(seq_len, ring=ring, residual=ring * tensor, kernel=kernel, chunks=chunks))
    unit = chunks * ring if ring > 1 else 1
    unit = math.lcm(unit * (LANES if kernel == "splash" else 1), ring * tensor)
    assert padded >= seq_len and padded % unit == 0
    if padded != seq_len:
        # At most three units more than division asks for, so that the kernel's blocks are large.
        assert padded - seq_len < (4 if kernel == "splash" else 1) * unit
    if kernel == "splash" and padded != seq_len:
        chunk = padded // (chunks * ring if ring > 1 else 1)
        assert block_size(chunk, 1024) >= min(chunk, 512)


def test_long_sequences_use_the_whole_pod() -> None:
    """The book's pod has 2^8 x 5 x 7 chips: batch and sequences of 128 Ki tokens are split unevenly."""
    pod = problem("llama3.1-405b", "v5p:16x20x28", seqs=128, seq_len=2**17)
    plan = best(sweep(pod))
    assert plan.fits and not plan.obstacles
    assert plan.mesh.shape["context"] > 1
    assert plan.mesh.shape["context"] * plan.mesh.shape["fsdp"] % 35 == 0
    assert 0 < plan.padding.share < 0.1


@settings(max_examples=examples(30), deadline=None)
@given(st.dictionaries(st.sampled_from(AXES), st.integers(1, 40), min_size=1))
def test_given_meshes_are_planned_or_refused(axes: dict[str, int]) -> None:
    try:
        swept = sweep(problem(axes=axes))
    except RooftopError as error:
        assert "\n" not in str(error)
        _, _, suggestion = error.accepted.partition("such as ")
        if suggestion:
            assert sweep(problem(axes=parse_axes(suggestion))).expected_s.size
    else:
        assert {name: size for name, size in best(swept).mesh.shape.items() if size > 1} == {
            name: size for name, size in axes.items() if size > 1
        }


def test_interleaving_needs_chunks() -> None:
    with pytest.raises(RooftopError, match="interleaved"):
        problem(schedule="1f1b", chunks=2)
    with pytest.raises(RooftopError, match="gpipe"):
        problem(schedule="pipe")


def test_unknown_dtype_for_a_chip_is_refused() -> None:
    with pytest.raises(RooftopError, match="bf16"):
        sweep(problem(numerics=Numerics(matmul="f16")))


@pytest.mark.parametrize(
    ("text", "what"), [("tensr=1", "tensor"), ("tensor=2", "between 0 and 1"), ("tensor=a", "between 0 and 1")]
)
def test_bad_assumptions_name_the_fault(text: str, what: str) -> None:
    with pytest.raises(RooftopError, match=what):
        Assumptions().with_hidden(text)


@pytest.mark.parametrize("schedule", get_args(PipelineSchedule))
@pytest.mark.parametrize("lockstep", [True, False])
@pytest.mark.parametrize(("stages", "microbatches"), [(16, 1), (16, 4), (8, 8)])
def test_stages_take_no_less_than_their_bound(stages: int, microbatches: int, lockstep: bool, schedule: str) -> None:
    asked = problem(
        axes={"stage": stages, "fsdp": 64 // stages}, seqs=64, microbatches=microbatches, schedule=schedule,
        chunks=2 if schedule == "interleaved" else 1,
    )  # fmt: skip
    plan = best(sweep(asked if lockstep else at_own_pace(asked)))
    waited = dict.fromkeys(("mxu", "vpu", "hbm", "ici", "dcn", "pcie"), 0.0)
    for row in plan.ledger:
        for name, seconds in row.time_s.items():
            waited[name] += row.count * seconds
    assert max(waited.values()) < max(plan.lower_s.values()) <= plan.expected_s


def test_hiding_more_is_never_slower() -> None:
    slow = best(sweep(problem("llama3-70b", axes={"fsdp": 16, "tensor": 4}, seqs=64)))
    hidden = Assumptions().with_hidden("weight_gather=1,gradient_scatter=1,tensor=1,gradient_all_reduce=1")
    fast = best(sweep(problem("llama3-70b", axes={"fsdp": 16, "tensor": 4}, seqs=64, assumptions=hidden)))
    assert fast.expected_s < slow.expected_s
    assert fast.expected_s >= max(fast.lower_s.values())


def _brute_pairs(seq_len: int, window: int | None, block: int) -> int:
    rows = np.arange(seq_len)[:, None]
    columns = np.arange(seq_len)[None, :]
    seen = columns <= rows
    if window is not None:
        seen &= columns > rows - window
    blocks = seq_len // block
    used = seen.reshape(blocks, block, blocks, block).any(axis=(1, 3))
    return int(used.sum()) * block * block


@given(st.integers(1, 8), st.sampled_from([1, 2, 4]), st.none() | st.integers(1, 40))
def test_attended_pairs_count_the_blocks_that_are_not_masked(blocks: int, block: int, window: int | None) -> None:
    seq_len = blocks * block
    assert attended_pairs(seq_len, window, block) == _brute_pairs(seq_len, window, block)


def test_moe_memory_is_split_over_experts() -> None:
    config = ModelConfig(
        name="toy", family="mixtral", layers=4, d_model=1024, d_ff=4096, heads=8, kv_heads=8, d_head=128, vocab=4096,
        max_seq_len=4096, moe=MoE(experts=16, active=2, d_ff=4096),
    )  # fmt: skip
    job = replace(problem(axes={"fsdp": 16, "expert": 4}), model=config)
    parameters = best(sweep(job)).step.held_parameters
    assert parameters["experts"].item() == 4 * 16 * 3 * 1024 * 4096 / 64


def test_paths_to_configs_are_models_too(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 1024, "intermediate_size": 4096,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 4096,
    }))  # fmt: skip
    job = replace(problem(), model=load_model(str(file)))
    assert best(sweep(job)).fits


def test_collective_matmuls_are_chosen_where_they_pay() -> None:
    """The search sets the switch on v5p, whose compiler overlaps permutes, and leaves it alone without tensor."""
    asked = problem("llama3-70b", on="v5p:8x8x8", seqs=128, axes={"fsdp": 128, "tensor": 4})
    searched = plan_training(asked, alternatives=0).plan
    off, on = (
        plan_training(replace(asked, collective_matmuls=switch), alternatives=0).plan for switch in (False, True)
    )
    assert searched.choice.collective_matmuls and searched.expected_s == on.expected_s < off.expected_s
    assert on.exposed_s()["tensor"] < 0.6 * off.exposed_s()["tensor"]
    moved = [sum(float(c.bytes * row.count) for row in p.ledger for c in row.collectives) for p in (off, on)]
    assert moved[0] == pytest.approx(moved[1])
    assert float(on.ledger.flops()) == float(off.ledger.flops())
    for plain in (replace(asked, axes={"fsdp": 512}), problem("llama3-8b", on="v5e:4x4", seqs=32)):
        assert not plan_training(plain, alternatives=0).plan.choice.collective_matmuls
    assert TrainingPlan.from_json(on.to_json()).choice == on.choice
    staged = replace(asked, axes={"stage": 4, "fsdp": 32, "tensor": 4}, microbatches=4)
    assert not plan_training(staged, alternatives=0).plan.choice.collective_matmuls
    pinned = plan_training(replace(staged, collective_matmuls=True), alternatives=0).plan
    assert pinned.obstacles == ["no program has collective matmuls in a pipeline stage"]


def test_switched_off_a_search_says_what_collective_matmuls_gain() -> None:
    asked = problem("llama3-70b", on="v5p:8x8x8", seqs=128, axes={"fsdp": 128, "tensor": 4}, collective_matmuls=False)
    answer = plan_training(asked, alternatives=0)
    gains = {entry.change: entry for entry in answer.what_if}
    assert gains["collective matmuls over tensor"].obstacle is None
    assert gains["collective matmuls over tensor"].gain > 0.02


def test_a_ring_hides_behind_its_matmul() -> None:
    """Hops next to a matmul of half their time wait for the rest; a matmul that lasts long hides all of them."""
    for sums in (False, True):
        for closed in (0.0, 1.0):
            ring = RingSteps(on=1.0, members=4.0, beside_s=0.0, sums=sums)
            waits = [float(replace(ring, beside_s=beside).exposed_s(1.0, closed)) for beside in (0.0, 0.5, 1.0, 2.0)]
            assert waits == sorted(waits, reverse=True)
            assert waits[0] >= 3.0 and waits[-1] == 0.0
            at_once = replace(ring, beside_s=0.5, at_once=True)
            assert float(at_once.exposed_s(1.0, closed)) < waits[1]
    assert float(RingSteps(on=1.0, members=1.0, beside_s=0.0, sums=False).exposed_s(1.0, 0.0)) == 0.0


def test_whole_experts_over_tensor_are_chosen_where_they_pay() -> None:
    """On a mesh with tensor small experts stay whole: no rows are gathered, none are summed, the work is the same."""
    asked = problem("qwen3-30b-a3b", seqs=64, axes={"fsdp": 8, "expert": 2, "tensor": 4}, remat="block", microbatches=1)
    columns, whole = (
        plan_training(replace(asked, experts_over_tensor=switch), alternatives=0).plan for switch in (False, True)
    )
    searched = plan_training(asked, alternatives=0).plan
    assert searched.choice.experts_over_tensor and searched.expected_s == whole.expected_s < 0.7 * columns.expected_s
    assert not whole.obstacles
    assert whole.spec.rules.parameters["expert"] == ("expert", "tensor")
    assert float(whole.ledger.flops()) == pytest.approx(float(columns.ledger.flops()))
    assert whole.step.held_parameters["experts"].item() == columns.step.held_parameters["experts"].item()
    of_experts = [
        {
            (item.kind, item.axes)
            for row in plan.ledger
            if row.scope.startswith("layers/moe")
            for item in row.collectives
        }
        for plan in (columns, whole)
    ]
    assert ("all_to_all", ("expert", "tensor")) in of_experts[1]
    gone = {("all_gather", ("tensor",)), ("reduce_scatter", ("tensor",)), ("all_to_all", ("expert",))}
    assert gone <= of_experts[0] and not gone & of_experts[1]
    assert TrainingPlan.from_json(whole.to_json()).choice == whole.choice


def test_a_search_keeps_exchanged_tokens_where_memory_allows() -> None:
    """DeepSeek-V3 on 512 chips has no room for every matmul's output, but for its experts' inputs."""
    asked = problem("deepseek-v3", on="v5p:8x8x8", seqs=512, axes={"fsdp": 8, "expert": 64}, microbatches=1)
    searched = plan_training(asked, alternatives=0).plan
    repeats, saves = (
        plan_training(replace(asked, remat=remat), alternatives=0).plan for remat in ("block", "block,mlp_normed=save")
    )
    assert searched.choice.remat == saves.choice.remat
    assert searched.expected_s == saves.expected_s < repeats.expected_s
    assert repeats.memory_bytes < saves.memory_bytes
    sent = [
        {
            (row.phase, item.axes)
            for row in plan.ledger
            if row.scope == "layers/moe/dispatch"
            for item in row.collectives
        }
        for plan in (repeats, saves)
    ]
    assert sent[0] - sent[1] == {("recompute", ("expert",))}
    dense = searched_choices(problem("llama3-8b", axes={"fsdp": 16, "tensor": 4}), from_mesh(repeats.mesh))
    assert {choice.remat for choice in dense} == set(SEARCHED)


def test_whole_experts_over_tensor_need_experts_and_little_padding() -> None:
    with pytest.raises(RooftopError, match="experts_over_tensor"):
        problem("llama3-8b", experts_over_tensor=True)
    # Eight experts over 32 devices would be mostly padding.
    asked = problem("mixtral-8x7b", seqs=64, axes={"fsdp": 2, "expert": 8, "tensor": 4})
    assert not plan_training(asked, alternatives=0).plan.choice.experts_over_tensor
    pinned = plan_training(replace(asked, experts_over_tensor=True), alternatives=0).plan
    assert pinned.step.widths.padding.item() == 3.0 and not pinned.obstacles


@pytest.mark.parametrize(("on", "executable"), [("a100:8", False), ("v5p:2x2x2", True)])
def test_activations_in_float32_take_twice_the_bytes(on: str, executable: bool) -> None:
    """Matmuls in float32 have inputs in float32: cuDNN's attention has none, splash attention has."""
    plans = {
        dtype: rooftop.plan_training(
            "llama2-7b", on=on, batch_seqs=8, seq=2048, mesh="fsdp=8", remat="none", matmul_dtype=dtype
        ).plan
        for dtype in ("f32", "bf16", "int8")
    }
    activations = {dtype: plan.memory["activations"] for dtype, plan in plans.items()}
    assert activations["f32"] == pytest.approx(2 * activations["bf16"])
    assert activations["int8"] == activations["bf16"]
    assert plans["f32"].problem.formats.gradients == "f32"
    assert (not plans["f32"].obstacles) is executable


@given(st.integers(1, 12), st.sampled_from((1, 2, 4)), st.sampled_from((None, 5, 100)), st.sampled_from((8, 32, 512)))
def test_pairs_in_runs_are_those_of_the_chunked_kernel(
    pieces: int, devices: int, window: int | None, block: int
) -> None:
    """On one device; in a ring every device meets all tokens that come before its own at least."""
    length = 16 * pieces * devices
    chunks = devices * CONTEXT_CHUNKS if devices > 1 else 1
    pairs = run_pairs(length, window, block, chunks=chunks)
    if devices == 1:
        counted = runs(q_len=length, kv_len=length, window=window, offset=0, block=block)
        assert pairs == sum(run.pairs for run in counted)
    assert pairs >= attended_pairs(length, window, 1)
