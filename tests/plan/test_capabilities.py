"""One table lists what programs can run: plans, programs and the documentation agree with it."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType

from rooftop import capabilities
from rooftop.arrays import AXES, Mesh
from rooftop.capabilities import (
    ENGINE_AXES,
    ENGINE_WEIGHTS,
    KERNELS,
    SERVING,
    SWITCHES,
    TRAINING,
    AskedSwitches,
    AttentionKernel,
    Choice,
    ServingSpec,
    TrainingSpec,
    attention_kernel,
    kernel_lacks,
    obstacles,
)
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.models.activations import parse_policy
from rooftop.models.numerics import Numerics
from rooftop.plan.layouts import Layouts, enumerate_layouts
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.plan import PlanSummary, TrainingPlan, TrainingPlanDocument
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.programs.attention.attend import _ATTEND
from rooftop.programs.serving.quantised import FORMATS
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import abstract_batch, abstract_state
from rooftop.requests.planning import PlanTraining
from rooftop.serve.engine.configuration import configuration_of
from tests.support.examples import examples

MODELS = ("llama3-8b", "gemma2-9b", "gpt-oss-20b", "mixtral-8x7b", "deepseek-v2-lite", "gpt3-175b")


@cache
def _layouts(slice_: str) -> Layouts:
    return enumerate_layouts(Slice.parse(slice_), AXES, {})


@st.composite
def plans(draw: st.DrawFn) -> TrainingPlan:
    """Plans of any model, with any mesh that the slice carries; many of them are not executable."""
    layouts = _layouts(draw(st.sampled_from(("v5e:4x4", "v5p:2x2x4", "h100:8x2", "v5e:16x16"))))
    slice_ = layouts.slice
    mesh = layouts.mesh(draw(st.integers(0, len(layouts) - 1)))
    model = load_model(draw(st.sampled_from(MODELS)))
    # Such a mesh is refused before anything is priced.
    assume(model.moe is not None or mesh.size("expert") == 1)
    schedule = draw(st.sampled_from(("1f1b", "gpipe", "zero_bubble", "interleaved")))
    chunks = 2 if schedule == "interleaved" else 1
    seq_len = draw(st.sampled_from((384, 1000, 1024, 4096)))
    state = st.sampled_from(("bf16", "f32", "int8"))
    numerics = Numerics(
        matmul=draw(st.sampled_from(("bf16", "bf16", "bf16", "int8"))),
        moments=draw(st.sampled_from(("bf16", "f32"))),
        weights=draw(st.sampled_from(("f32", "bf16"))) if draw(st.booleans()) else draw(state),
        optimizer=draw(st.sampled_from(("adamw", "lion", "sgd"))),
    )
    problem = Problem(
        model=model,
        slice=slice_,
        workload=Workload(batch_tokens=draw(st.sampled_from((96, 256, 470, 1024))) * seq_len, seq_len=seq_len),
        numerics=numerics,
        schedule=schedule,
        chunks=chunks,
    )
    remat = draw(st.sampled_from(("none", "block", "block,qkv=offload")))
    choice = Choice(
        remat=remat,
        microbatches=draw(st.sampled_from((1, 2, 4, 8))),
        schedule=schedule,
        chunks=chunks,
    )
    return TrainingPlan(problem=problem, mesh=mesh, choice=choice)


@settings(max_examples=examples(100))
@given(plans())
def test_a_plan_is_executable_exactly_if_its_program_is_built(plan: TrainingPlan) -> None:
    if plan.obstacles:
        with pytest.raises(RooftopError) as refused:
            TrainProgram.from_plan(plan)
        assert refused.value.given == plan.obstacles[0]
        return
    program = TrainProgram.from_plan(plan)
    sizes = {axis: plan.mesh.size(axis) for axis in AXES}
    mesh = AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Explicit,) * len(sizes))
    # Arrays of the wrong size for the mesh are refused here; those that do not divide are padded.
    vocab, d_model = abstract_state(program, mesh).weights.embed.shape
    assert vocab >= plan.problem.model.vocab and d_model >= plan.problem.model.d_model
    assert abstract_batch(program, mesh).tokens.shape == (plan.padding.sequences, plan.padding.positions)


def problem(
    model: str = "llama3-8b", on: str = "v5e:4x4", *, seqs: int = 64, seq_len: int = 4096, **more: Any
) -> Problem:
    workload = Workload(batch_tokens=seqs * seq_len, seq_len=seq_len)
    return Problem(model=load_model(model), slice=Slice.parse(on), workload=workload, **more)


@pytest.mark.parametrize(
    ("asked", "obstacle"),
    [
        (problem(numerics=Numerics(matmul="int4")), "no program multiplies in int4"),
        (problem(numerics=Numerics(weights="f16")), "no program has weights in f16"),
        (problem("gpt3-175b", "v4:4x4x4", seq_len=4096), "learned positions for 2048 tokens, not 4096"),
        (
            problem("gemma2-9b", "h100:8x2", numerics=Numerics(matmul="f8_e4m3")),
            "on GPUs XLA multiplies f8_e4m3 operands as float16",
        ),
        (problem(on="h100:8x2", axes={"context": 2, "fsdp": 8}), "cannot attend to keys of other devices"),
        (
            problem(axes={"stage": 4, "context": 4}, schedule="zero_bubble"),
            "no program has a zero_bubble pipeline over a context axis",
        ),
    ],
)  # fmt: skip
def test_obstacles_name_what_programs_lack(asked: Problem, obstacle: str) -> None:
    plan = plan_training(asked, alternatives=0).plan
    assert any(obstacle in text for text in plan.obstacles)


@pytest.mark.parametrize(
    "asked",
    [
        problem(on="v5e:4x8", axes={"tensor": 16, "fsdp": 2}),
        problem("llama2-13b", "v5e:4x4", axes={"tensor": 16}),
        problem("gpt3-175b", "v4:4x4x4", seq_len=2048, axes={"tensor": 8, "fsdp": 8}),
        problem("gpt-oss-20b", "v5e:16x16", seqs=256, axes={"fsdp": 256}),
        problem("llama3.1-405b", "v5p:16x20x28", seqs=1120, seq_len=8192, axes={"fsdp": 1120, "tensor": 8}),
    ],
    ids=["key/value heads", "heads", "vocabulary", "F of experts", "D"],
)
def test_widths_that_do_not_divide_are_no_obstacle(asked: Problem) -> None:
    assert not plan_training(asked, alternatives=0).plan.obstacles


def test_the_nearest_plan_is_executable() -> None:
    """A plan in int4 is priced, and the one that runs has matmuls in bf16 on the same slice."""
    answer = plan_training(problem(numerics=Numerics(matmul="int4")))
    assert answer.nearest_executable is not None
    assert (answer.nearest_executable.slice, answer.nearest_executable.matmul) == ("v5e:4x4", "bf16")
    assert answer.nearest_executable.executable


def test_changes_that_programs_run_have_no_obstacle() -> None:
    answer = plan_training(problem(on="v5p:4x4x4", seqs=32, axes={"fsdp": 16, "tensor": 4}))
    missing = {entry.change: entry.obstacle for entry in answer.what_if}
    assert missing["int8 matmuls in the layers"] is None
    assert missing["ICI twice as fast"] is None


def spec(**more: Any) -> ServingSpec:
    fields: dict[str, Any] = {"model": load_model("llama3-8b"), "axes": {"tensor": 4}}
    return ServingSpec(**fields | more)


@pytest.mark.parametrize(
    ("more", "obstacle"),
    [
        ({"axes": {"stage": 33}}, "rooftop serve has no mesh axis stage of 33, only at most one for each of 32 layers"),
        ({"axes": {"stage": 2}, "drafted": True}, "an engine with a draft model has one stage, not 2"),
        ({"axes": {"fsdp": 3, "tensor": 4}}, "a divisor of a D of 4096"),
        ({"weights": "int4"}, "weights in int4 with a scale for each column"),
        ({"weights": "int8", "weight_group": 64}, "groups of 64"),
        ({"weights": "f16"}, "weights in f16"),
        ({"kv": "f8_e4m3"}, "rooftop serve has no KV cache in f8_e4m3 (it has bf16, int8)"),
        ({"matmul": "int8"}, "multiplies in bf16, not in int8"),
        ({"kv_sharing": 2}, "no cache that 2 layers share"),
        ({"axes": {"context": 32}, "kv_split": "seq"}, "pages of 16 tokens cannot be split 32 ways"),
        ({"axes": {"data": 2}, "disaggregated": True}, "one copy, not 2 over data"),
        ({"drafted": True, "disaggregated": True}, "--batching interleaved"),
        ({"axes": {"expert": 2}}, "has no experts"),
        ({"weights": "int4", "weight_group": 128, "axes": {"tensor": 32}}, "do not divide the 448 columns of an MLP"),
        ({"tokens": 8193}, "was made for 8,192 tokens, not 8,193"),
        (
            {"prefill_axes": {"context": 2, "tensor": 4}, "prefill_ring": True},
            "splits no prompt over context in a ring",
        ),
        ({"prefill_axes": {"tensor": 16}}, "a cache of key/value heads 0 0 1 1 2 2 3 3 ... (16 in all)"),
        ({"prefill_axes": {"expert": 2}}, "rooftop serve prefills over no mesh axis expert of 2"),
    ],
)
def test_engines_name_what_they_lack(more: dict[str, Any], obstacle: str) -> None:
    assert obstacle in next(obstacles(SERVING, spec(**more)))


@pytest.mark.parametrize(
    "more",
    [
        {"axes": {"tensor": 3, "context": 2}},
        {"axes": {"fsdp": 4, "tensor": 8, "context": 2}},
        {"model": replace(load_model("llama3-8b"), heads=48, kv_heads=6)},
        {"model": load_model("mixtral-8x7b"), "axes": {"expert": 3}},
        {"model": replace(load_model("llama3-8b"), d_ff=14338, d_model=4098, vocab=50257)},
        {"prefill_axes": {"tensor": 4, "context": 3}},
        # Four of D over fsdp, so that a prompt's cache may be sent to a server without it.
        {"prefill_axes": {"tensor": 4, "fsdp": 4}},
    ],
)
def test_engines_pad_what_a_mesh_does_not_divide(more: dict[str, Any]) -> None:
    assert not list(obstacles(SERVING, spec(**more)))


@pytest.mark.parametrize("format_", list(ENGINE_WEIGHTS))
def test_engines_have_every_format_of_the_table(format_: tuple[str, int | None]) -> None:
    weights, group = format_
    assert not list(obstacles(SERVING, spec(weights=weights, weight_group=group, kv="int8")))
    axes = {"data": 2, "tensor": 4, "context": 1}
    plan = {
        "kind": "serve",
        "mesh": {"axes": axes},
        "kv_split": "seq",
        "generate": {"batch": 8},
        "dtypes": {"weights": weights, "weight_group": group, "only_experts": False, "kv": "int8"},
    }
    configuration = configuration_of(plan)
    assert (configuration.weights_dtype, configuration.kv_dtype, dict(configuration.mesh)) == (
        ENGINE_WEIGHTS[format_],
        "int8",
        {"data": 2, "tensor": 4},
    )


def test_the_table_lists_what_programs_have() -> None:
    assert set(ENGINE_WEIGHTS.values()) == {"plain", *FORMATS}
    assert set(KERNELS) == set(_ATTEND)
    assert set(ENGINE_AXES) == set(AXES)
    plan = plan_training(problem(), alternatives=0).plan
    assert not list(obstacles(TRAINING, plan.spec))
    plain = plan.spec.numerics
    assert plan.spec.runnable_numerics == plain
    assert replace(plan.spec, numerics=replace(plain, matmul="int4", weights="f16")).runnable_numerics == plain
    narrow = replace(plan.spec, numerics=replace(plain, matmul="int8"))
    assert narrow.runnable_numerics == narrow.numerics
    overlapped = replace(narrow, choice=replace(plan.choice, collective_matmuls=True))
    assert overlapped.runnable_numerics == plain


def test_the_documentation_has_the_table() -> None:
    page = (Path(__file__).parents[2] / "docs" / "capabilities.md").read_text(encoding="utf-8")
    assert capabilities.table() in page


def test_a_mesh_that_is_laid_has_every_axis() -> None:
    slice_ = Slice.parse("v5e:4x4")
    assert tuple(Mesh.lay(slice_, dict.fromkeys(AXES, 1) | {"fsdp": 16}).shape) == AXES


def test_switches_are_asked_planned_and_written_under_their_names() -> None:
    assert {field.name for field in fields(AskedSwitches)} == set(SWITCHES)
    for kind in (PlanTraining, Problem, Choice, TrainingPlanDocument, PlanSummary):
        assert {field.name for field in fields(kind)} >= set(SWITCHES), kind.__name__


def test_a_choice_names_a_policy_that_is_known() -> None:
    assert Choice(remat="block,qkv=offload").policy == parse_policy("block") | {"qkv": "offload"}
    with pytest.raises(RooftopError, match=r"^remat: got 'blok'; accepted: did you mean block"):
        Choice(remat="blok")


@pytest.mark.parametrize(
    ("model", "kind", "kernel"),
    [
        ("deepseek-v3", "gpu", "chunked"),
        ("gemma2-9b", "gpu", "chunked"),
        ("gpt-oss-20b", "gpu", "chunked"),
        ("llama3-8b", "gpu", "cudnn"),
        ("deepseek-v3", "tpu", "splash"),
    ],
)
def test_a_kernel_that_lacks_a_part_of_attention_gives_way_to_one_that_has_it(
    model: str, kind: str, kernel: AttentionKernel
) -> None:
    assert attention_kernel(kind, load_model(model)) == kernel
    spec = TrainingSpec.plain(load_model(model), kind)
    assert spec.kernel == kernel and not list(obstacles(TRAINING, spec))
    lack = kernel_lacks("cudnn", load_model(model))
    refusal = next(obstacles(TRAINING, replace(spec, kernel="cudnn")), None)
    assert refusal == (None if lack is None else f"the cudnn kernel has no {lack}, which {model} has")
