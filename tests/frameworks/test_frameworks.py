"""Frameworks: their files, the settings that a user has, and the train steps that each can run."""

from __future__ import annotations

import ast
import itertools
import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import rooftop
import rooftop.plan
from rooftop.capabilities import Choice
from rooftop.core.errors import RooftopError
from rooftop.frameworks import framework as module
from rooftop.frameworks.framework import FRAMEWORKS, accepted_values, framework_of, parse_settings, runs_on
from rooftop.frameworks.launches import GRAPH_PARTS
from rooftop.frameworks.programs import PROGRAMS, training_obstacles
from rooftop.hardware import Slice, catalogue, chip, slice_sizes
from rooftop.models import count_params, load_model
from rooftop.plan.training.answer import search_of
from rooftop.plan.training.plan import TrainingPlan
from rooftop.requests.planning import PlanTraining
from rooftop.requests.problems import training_problem
from rooftop.validation.predict import planned, request_of
from rooftop.validation.runs import load_published

DATA = Path(module.__file__).with_name("data")
OTHERS = FRAMEWORKS[1:]
MODELS = {"dense": load_model("llama3-8b"), "experts": load_model("qwen3-30b-a3b")}
Run = Callable[..., Any]


def facts(name: str) -> dict[str, Any]:
    return tomllib.loads((DATA / f"{name}.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", OTHERS)
def test_every_rule_and_setting_says_where_it_comes_from(name: str) -> None:
    data = facts(name)
    assert all(rule["source"] for rule in data["rule"])
    assert all(setting["about"] for setting in data["setting"].values())
    assert set(PROGRAMS) == set(FRAMEWORKS)


@pytest.mark.parametrize("name", OTHERS)
def test_defaults_are_settings_that_a_user_can_give(name: str) -> None:
    """Giving each default by name changes nothing: what recipes set has a word for users."""
    for spec in catalogue().values():
        if spec.kind not in facts(name)["chips"]:
            continue
        for model in MODELS.values():
            for release in facts(name)["releases"]:
                matmul = "bf16" if release in ("2021", "2022") else "f8_e4m3"
                plain = framework_of(name, chip=spec, model=model, release=release, matmul=matmul)
                named = framework_of(
                    name, chip=spec, model=model, release=release, matmul=matmul, settings=plain.settings
                )
                assert (named.habits, named.assumptions, named.hidden) == (
                    plain.habits,
                    plain.assumptions,
                    plain.hidden,
                )
                assert (named.numerics, named.switches) == (plain.numerics, plain.switches)


@pytest.mark.parametrize("name", OTHERS)
def test_every_value_of_a_setting_is_read(name: str) -> None:
    # A job that has all settings.
    spec = chip({"maxtext": "v5p", "megatron": "b200", "torchtitan": "h100"}[name])
    job: dict[str, Any] = {"chip": spec, "model": MODELS["experts"], "matmul": "f8_e4m3"}
    for key, setting in facts(name)["setting"].items():
        values = list(setting.get("values", {})) or {
            "number": ["1.5"], "parts": ["none", *GRAPH_PARTS, "attn+mlp"], "tiles": ["128,256,256/128,256,512/0"],
        }[next(kind for kind in ("number", "parts", "tiles") if kind in setting)]  # fmt: skip
        for value in values:
            applied = framework_of(name, **job, settings={key: value})
            assert applied.settings[key] == value
        assert setting["about"]
        assert accepted_values(setting)


@pytest.mark.parametrize(("newer", "known"), [("h200", "h100"), ("b300", "b200"), ("gb300", "gb200")])
def test_a_chip_has_the_defaults_of_its_family(newer: str, known: str) -> None:
    for model in MODELS.values():
        for release in facts("megatron")["releases"]:
            one, other = (
                framework_of("megatron", chip=chip(name), model=model, release=release) for name in (newer, known)
            )
            assert one == other


def test_our_own_program_has_habits_of_xla_and_no_settings() -> None:
    for name in ("v5p", "h100"):
        ours, theirs = (framework_of(which, chip=chip(name), model=MODELS["dense"]) for which in ("rooftop", "maxtext"))
        assert ours.is_ours
        assert not ours.assumptions
        assert not ours.settings
        assert ours.habits.kernels == theirs.habits.kernels == {"v5p": "xla_tpu", "h100": "xla_gpu"}[name]
        assert ours.habits.as_scheduled
        assert not theirs.habits.as_scheduled


def test_plans_ask_neither_whose_program_nor_what_kind_of_chip() -> None:
    """The book is the same for all: programs differ by their habits, chips by their figures."""
    asked = []
    for path in sorted(Path(rooftop.plan.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("is_ours", "own_program"):
                asked.append(f"{path.name}:{node.lineno} {node.attr}")
            if isinstance(node, ast.Compare):
                values = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                if {"tpu", "gpu", "vllm", "trtllm", "sglang", *FRAMEWORKS}.intersection(map(str, values)):
                    asked.append(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not asked


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--framework", "megatro"), "framework: got 'megatro'; accepted: did you mean megatron?"),
        (("--framework", "maxtext", "--release", "9"), "release: got '9'; accepted: one of 0.2.4"),
        (("--release", "26.08"), "release: got '26.08'; accepted: nothing with rooftop"),
        (("--set", "cuda_graphs=none"), "set: got 'cuda_graphs'; accepted: nothing with rooftop"),
        (("--framework", "megatron", "--set", "graphs=none"), "set: got 'graphs'; accepted: did you mean cuda_graphs?"),
        (("--framework", "megatron", "--set", "cuda_graphs=all"), "set cuda_graphs: got 'all'; accepted: one of attn"),
        (("--framework", "megatron", "--set", "dispatcher=x"), "set dispatcher: got 'x'; accepted: one of alltoall"),
        (("--framework", "megatron", "--set", "x"), "set: got 'x'; accepted: NAME=VALUE"),
        (("--framework", "maxtext", "--set", "capacity=0.5"), "set capacity: got '0.5'; accepted:"),
        (
            ("--framework", "maxtext", "--set", "expert_tiles=1"),
            "set: got 'expert_tiles'; accepted: nothing on h100",
        ),
    ],
)
def test_wrong_frameworks_are_one_line(rooftop: Run, options: tuple[str, ...], says: str) -> None:
    answer = rooftop("plan", "train", "qwen3-30b-a3b", "--on", "h100:8", "--batch-seqs", "64", *options)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"rooftop: {says}")
    assert answer.err.count("\n") == 1


def test_a_framework_is_refused_on_chips_that_it_does_not_run_on(rooftop: Run) -> None:
    answer = rooftop("plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "64", "--framework", "megatron")
    assert answer.status == 2
    assert "accepted: one that runs on v5e: rooftop or maxtext" in answer.err


def test_settings_of_experts_are_for_models_with_experts(rooftop: Run) -> None:
    job = ("plan", "train", "llama3-8b", "--on", "h100:8", "--batch-seqs", "64", "--framework", "megatron")
    answer = rooftop(*job, "--set", "dispatcher=deepep")
    assert answer.status == 2
    assert answer.err == "rooftop: set: got 'dispatcher'; accepted: nothing for llama3-8b, which has no experts\n"
    assert "dispatcher" not in framework_of("megatron", chip=chip("h100"), model=MODELS["dense"]).settings


def test_settings_with_commas_hang_together() -> None:
    text = "experts=sparse,expert_tiles=1,2,3/4,5,6/7,capacity=1.25"
    assert parse_settings(text) == {"experts": "sparse", "expert_tiles": "1,2,3/4,5,6/7", "capacity": "1.25"}
    for wrong in ("a", ",a=1", "a=1,a=2", "=1"):
        with pytest.raises(RooftopError, match="set: got"):
            parse_settings(wrong)


JOB: dict[str, Any] = {"model": "llama3-70b", "on": "h100:8x8", "batch_seqs": 256, "seq": 8192}


@pytest.fixture(scope="module")
def megatron() -> rooftop.TrainingPlanResult:
    return rooftop.plan_training(**JOB, framework="megatron", release="26.04", framework_settings="tp_overlap=no")


def test_a_plan_names_its_framework_and_is_priced_again_alike(megatron: rooftop.TrainingPlanResult) -> None:
    data = json.loads(json.dumps(megatron.to_json()))
    assert data["framework"]["title"] == "Megatron Core"
    assert (data["framework"]["release"], data["framework"]["settings"]) == ("26.04", {"tp_overlap": "no"})
    again = TrainingPlan.from_json(data)
    assert (again.expected_s, again.memory) == (megatron.plan.expected_s, megatron.plan.memory)
    assert again.problem.program == megatron.plan.problem.program
    assert "priced as our program" not in data["evidence"]["text"]
    assert "Megatron Core" in data["evidence"]["text"]


def test_a_plan_of_a_framework_is_one_that_it_runs(megatron: rooftop.TrainingPlanResult) -> None:
    plan = megatron.plan
    assert plan.fits
    assert not plan.obstacles
    assert not plan.choice.collective_matmuls
    pinned = rooftop.plan_training(**JOB, framework="megatron", mesh="fsdp=16,stage=4").plan
    assert pinned.obstacles[0].startswith("Megatron splits weights over fsdp without stages alone")
    pinned = rooftop.plan_training(**JOB, framework="megatron", mesh="fsdp=16,data=4").plan
    assert pinned.obstacles[0].startswith("Megatron splits weights over all copies of a batch or none")


def test_sizes_that_do_not_divide_are_obstacles_of_frameworks_and_padding_of_ours() -> None:
    job = {
        "model": "llama3-8b",
        "on": "h100:8",
        "batch_seqs": 60,
        "mesh": "data=8",
        "microbatches": 1,
        "remat": "block",
    }
    ours, theirs = (rooftop.plan_training(**job, framework=name).plan for name in ("rooftop", "megatron"))
    assert not ours.obstacles
    assert ours.padding.empty_sequences == 4
    assert theirs.obstacles == ["Megatron divides sequences of a step by copies and microbatches: 60 by 8"]


@pytest.mark.parametrize("verb", ["train", "compile"])
def test_plans_of_frameworks_are_not_ours_to_run(rooftop: Run, verb: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    job = ("plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "16", "--framework", "maxtext")
    assert rooftop(*job, "-o", str(path)).status == 0
    more = ("--run", str(tmp_path / "run"), "--data", __file__, "--steps", "1") if verb == "train" else ()
    answer = rooftop(verb, str(path), *more)
    assert answer.status == 2
    assert "plan: got 'a plan of MaxText 0.2.4'; accepted: a plan of rooftop's own program" in answer.err


@pytest.mark.parametrize(("name", "on"), [("torchtitan", "h100:8"), ("megatron", "h100:8x2"), ("maxtext", "v6e:4x4")])
def test_a_search_counts_the_memory_that_its_plans_have(name: str, on: str) -> None:
    request = PlanTraining("llama3-8b", on=on, batch_seqs=64, seq=8192, framework=name)
    searched = search_of(training_problem(request, Slice.parse(on)))
    layouts, choices = searched.memory_bytes.shape
    for candidate in itertools.product(range(min(2, layouts)), range(choices)):
        if searched.allowed[candidate]:
            assert searched.plan(candidate).memory_bytes == pytest.approx(float(searched.memory_bytes[candidate]))


@pytest.mark.parametrize(
    ("settings", "moments", "gradient_bytes", "split_bytes"),
    [("gradients=f32", "f32", 4, 12), ("", "f32", 2, 12), ("", "bf16", 2, 6)],
)
def test_memory_of_a_distributed_optimizer_is_in_the_dtypes_of_its_parts(
    settings: str, moments: str, gradient_bytes: int, split_bytes: int
) -> None:
    """6 + 12/d bytes with float32 gradients; narrow moments have a master weight's other 16 bits next to them."""
    plan = rooftop.plan_training(
        model="llama3-8b",
        on="h100:8",
        batch_seqs=64,
        mesh="data=8",
        framework="megatron",
        framework_settings=settings or None,
        moments_dtype=moments,
        remat="block",
        microbatches=8,
    ).plan
    parameters = 8_030_261_248
    assert plan.memory["weights"] == pytest.approx(2 * parameters, rel=1e-3)
    assert plan.memory["gradients"] == pytest.approx(gradient_bytes * parameters, rel=1e-3)
    assert plan.memory["optimizer"] == pytest.approx(split_bytes * parameters / 8, rel=1e-3)


def test_stages_of_megatron_keep_the_activations_of_experts() -> None:
    """Only our own loop of stages repeats experts in the backward pass."""
    request = PlanTraining("qwen3-30b-a3b", on="h100:8x2", batch_seqs=512, seq=4096, framework="megatron", remat="none")
    alone = planned(replace(request, mesh="expert=16", microbatches=32)).memory["activations"]
    staged = planned(replace(request, mesh="expert=8,stage=2", microbatches=64, schedule="1f1b")).memory["activations"]
    assert staged == pytest.approx(alone, rel=0.01)


@pytest.mark.parametrize("name", OTHERS)
def test_every_chip_of_a_framework_has_plans_of_both_kinds_of_models(name: str) -> None:
    """Defaults of recipes are settings that can be priced on the chip."""
    for spec in catalogue().values():
        if runs_on(name, spec):
            for model, axis in (("llama3-8b", "tensor"), ("qwen3-30b-a3b", "expert")):
                slice_ = slice_sizes(spec, 16)[0]
                mesh = {axis: slice_.devices}
                request = PlanTraining(
                    model=model, on=slice_.name, batch_seqs=8, framework=name, mesh=mesh, remat="block", microbatches=1
                )
                assert planned(request).expected_s > 0


def test_published_runs_of_frameworks_are_steps_that_they_run() -> None:
    """Limits of a framework leave room for what its users published."""
    for run in load_published().runs:
        if run.mesh is not None:
            request = replace(request_of(run), remat="none", microbatches=None)
            problem = training_problem(request, run.slice)
            schedule, chunks = problem.pipelines[0]
            choice = Choice(schedule=schedule, chunks=chunks, microbatches=run.mesh.get("stage", 1))
            refused = list(training_obstacles(problem.framework.name, problem.spec(dict(run.mesh), choice)))
            assert not refused, (request.framework, run.model.name, run.mesh)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("h100:8", "--mesh", "tensor=8", "--matmul-dtype", "int8"),
            "Not executable: Megatron has no dtype of matmuls",
        ),
        (("h100:8", "--mesh", "tensor=8", "--optimizer", "lion"), "Not executable: Megatron has no optimizer lion"),
    ],
)
def test_the_nearest_plan_of_a_framework_is_of_that_framework(
    rooftop: Run, options: tuple[str, ...], says: str
) -> None:
    answer = rooftop("plan", "train", "llama3-8b", "--batch-seqs", "64", "--framework", "megatron", "--on", *options)
    assert answer.status == 1
    first = " ".join(answer.out.split())
    assert first.startswith(says)
    assert "nearest that" in first.partition("llama3-8b on")[0]
    assert ("with bf16 matmuls" in first) or ("with adamw" in first)
    assert "rooftop" not in first


@pytest.mark.parametrize(
    ("framework", "on", "mesh", "says"),
    [
        ("maxtext", "gb200:72", "tensor=3,fsdp=24", "MaxText divides heads by tensor: 32 by 3"),
        ("maxtext", "gb200:72", "fsdp=72", "MaxText divides D by fsdp x context x expert: 4,096 by 72"),
        ("megatron", "h100:8x8", "tensor=16,data=4", None),
    ],
)
def test_widths_divide(framework: str, on: str, mesh: str, says: str | None) -> None:
    plan = rooftop.plan_training("llama3-8b", on=on, batch_seqs=144, framework=framework, mesh=mesh).plan
    assert plan.obstacles[:1] == ([] if says is None else [says])


def test_experts_that_are_dealt_out_over_tensor_divide_by_it_too() -> None:
    """Megatron's experts have no tensor axis of their own: expert x tensor devices have some of them."""
    plan = rooftop.plan_training(
        "qwen3-30b-a3b", on="h100:8x32", batch_seqs=256, framework="megatron", mesh={"expert": 64, "tensor": 4},
    ).plan  # fmt: skip
    assert plan.choice.experts_over_tensor
    assert plan.obstacles == ["Megatron divides experts by expert x tensor: 128 by 256"]


def test_changes_that_help_are_of_meshes_that_the_framework_runs() -> None:
    """On 72 GPUs nearly no mesh divides the batch: those that do not are no help."""
    answer = rooftop.plan_training("gpt-oss-120b", on="gb200:72", batch_seqs=256, framework="megatron").record
    assert answer.executable
    assert "NVLink twice as fast" in [change.change for change in answer.what_if]
    assert not [change for change in answer.what_if if change.obstacle]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--release", "2021", "--set", "cuda_graphs=layer"),
            "set: got 'cuda_graphs'; accepted: nothing with megatron 2021: from 25.09",
        ),
        (
            ("--release", "2021", "--matmul-dtype", "f8_e4m3"),
            "matmul-dtype: got 'f8_e4m3'; accepted: another with megatron 2021",
        ),
        (("--set", "fp8_recipe=mxfp8"), "set: got 'fp8_recipe'; accepted: nothing with bf16 matmuls: f8_e4m3"),
        (
            ("--matmul-dtype", "f8_e4m3", "--set", "fp8_recipe=mxfp8"),
            "set fp8_recipe: got 'mxfp8'; accepted: another value on h100",
        ),
        (("--matmul-dtype", "f4_e2m1"), "matmul dtype on h100: got 'f4_e2m1'; accepted: bf16, f16, f8_e4m3, f32"),
    ],
)
def test_settings_that_a_job_does_not_have_are_refused(rooftop: Run, options: tuple[str, ...], says: str) -> None:
    job = ("plan", "train", "llama3-8b", "--on", "h100:8", "--batch-seqs", "64", "--framework", "megatron")
    answer = rooftop(*job, *options)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.startswith(f"rooftop: {says}")


def test_matmuls_are_in_the_format_of_activations() -> None:
    plan = rooftop.plan_training(
        "llama3-8b", on="h100:8", batch_seqs=64, framework="megatron", release="2021", mesh={"tensor": 8}
    ).record
    assert (plan.dtypes.compute, plan.dtypes.matmul) == ("f16", "f16")


@pytest.mark.parametrize(
    ("name", "value"),
    [("framework", 3), ("schedule", 1), ("release", 26.08), ("framework_settings", 5), ("matmul_dtype", None)],
)
def test_values_of_other_types_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RooftopError, match=r"^[\w-]+: got .*; accepted: "):
        rooftop.plan_training(**{**JOB, "framework": "megatron", name: value})


@pytest.mark.parametrize(("model", "expert"), [("llama3-70b", 1), ("qwen3-30b-a3b", 8)])
def test_state_that_is_split_over_copies_is_split_once(model: str, expert: int) -> None:
    """With --use-megatron-fsdp weights take two bytes over all devices; the optimizer's share stays as it was."""
    job: dict[str, Any] = {"on": "h100:8x32", "batch_seqs": 512, "seq": 4096, "framework": "megatron"}
    copies = 256 // expert
    split, whole = (
        rooftop.plan_training(model, mesh=f"{axis}={copies},expert={expert}", **job).plan for axis in ("fsdp", "data")
    )
    elements = count_params(load_model(model)).total
    assert split.memory["weights"] == pytest.approx(2 * elements / 256, rel=0.01)
    assert split.memory["optimizer"] == pytest.approx(whole.memory["optimizer"], rel=0.01)
    assert split.memory["optimizer"] == pytest.approx(12 * elements / 256, rel=0.01)
