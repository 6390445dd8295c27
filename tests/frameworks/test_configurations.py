"""Configurations that are asked for wrongly, and policies by the names of frameworks."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rooftop.frameworks.framework import FRAMEWORKS
from rooftop.frameworks.recipes import recipes
from rooftop.frameworks.remat import policy_of, policy_text
from rooftop.frameworks.words.configurations import configuration_of, frameworks_of, stated_step
from rooftop.hardware import Slice
from rooftop.library.planning import plan_training
from rooftop.models import load_model
from rooftop.models.activations import parse_policy

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """A configuration of each framework."""
    texts = {}
    for name in FRAMEWORKS[1:]:
        plan = plan_training("llama3-8b", on="h100:8x2", batch_seqs=64, framework=name).plan
        configuration = configuration_of(plan.configured)
        assert configuration is not None
        (texts[name],) = configuration.files.values()
    return texts


def test_a_configuration_has_the_words_of_its_framework_alone(texts: dict[str, str]) -> None:
    assert {name: frameworks_of(text) for name, text in texts.items()} == {name: (name,) for name in texts}
    assert frameworks_of("# nothing\n") == ()
    assert frameworks_of("python3 -m MaxText.train base.yml per_device_batch_size=4") == ("maxtext",)


@pytest.mark.parametrize("asked", FRAMEWORKS[1:])
@pytest.mark.parametrize("written", [*FRAMEWORKS[1:], None])
def test_a_file_of_another_framework_is_refused_by_its_name(
    asked: str, written: str | None, texts: dict[str, str], tmp_path: Path, rooftop: Run
) -> None:
    if asked == written:
        return
    path = tmp_path / "job"
    path.with_suffix(".txt").write_text("" if written is None else texts[written], encoding="utf-8")
    answer = rooftop("plan", "train", "--from", f"{path}.txt", "--framework", asked, "--on", "h100:8x2")
    assert answer.status == 2 and answer.err.count("\n") == 1
    assert f"from: got '{path}.txt'; accepted: a configuration of {asked}" in answer.err
    assert written is None or f"--framework {written}" in answer.err


def test_a_configuration_without_its_framework_is_refused(texts: dict[str, str], tmp_path: Path, rooftop: Run) -> None:
    path = tmp_path / "train.sh"
    path.write_text(texts["megatron"], encoding="utf-8")
    answer = rooftop("plan", "train", "--from", str(path), "--on", "h100:8x2")
    assert answer.status == 2 and answer.err.count("\n") == 1
    assert "train.sh'; accepted: this with the framework that it configures" in answer.err


def test_policies_go_by_the_names_of_their_framework() -> None:
    named = "block,qkv=save,attn_core=save,attn_out=save,mlp_up=save,mlp_down=save"
    assert policy_text("maxtext", named) == "minimal_with_context"
    assert parse_policy(policy_of("maxtext", "minimal_with_context")) == parse_policy(named)
    # Names that are ours, and policies without a name, stay as they are.
    for framework, text in (("maxtext", "block"), ("megatron", "none,mlp_act=recompute"), ("rooftop", named)):
        assert policy_text(framework, text) == text
        assert policy_of(framework, text) == text


def test_long_policies_leave_room_for_the_figures_of_alternatives(
    rooftop: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    words = ("plan", "train", "qwen3-30b-a3b", "--on", "h100:8x16", "--batch-seqs", "512")
    remat = "block,layer_input=offload,qkv=save,attn_core=save,attn_out=save"
    answer = rooftop(*words, "--framework", "maxtext", "--remat", remat)
    table = answer.out[answer.out.index("Alternatives (") :].split("\n\n")[0]
    assert "no room for" not in table
    assert all(heading in table for heading in ("microbatches", "step", "MFU", "memory"))
    assert "layer_input=offload," in table


@pytest.mark.parametrize("framework", ["maxtext", "torchtitan"])
def test_a_plan_takes_a_policy_by_the_name_of_its_framework(framework: str) -> None:
    name = {"maxtext": "save_qkv_proj", "torchtitan": "selective"}[framework]
    plan = plan_training("llama3-8b", on="h100:8x2", batch_seqs=64, framework=framework, remat=name).plan
    assert plan.choice.remat == policy_of(framework, name)


@pytest.fixture(scope="module")
def priced() -> list[dict[str, str]]:
    """Rows of recipes that have a price, on the slices that it was made for."""
    path = Path(__file__).parents[2] / "bench" / "results" / "shipped.csv"
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    rows = [row for row in rows if row["framework"] == "megatron" and row["step_s"]]
    return [row for row in rows if not recipes("megatron")[row["name"]]["fsdp"]]


def test_a_plan_that_is_a_recipe_says_so(priced: list[dict[str, str]]) -> None:
    for row in priced[::24]:
        result = plan_training(on=row["slice"], framework="megatron", configuration=row["name"])
        recipe = result.record.recipe
        assert recipe is not None and recipe.name is not None, row["name"]
        assert recipe.kind == "benchmark" and "no checks of the loss" in recipe.habits
        assert ("balanced routing forced" in recipe.habits) == (result.plan.problem.model.moe is not None)
        values = [recipes("megatron")[name] for name in (row["name"], recipe.name)]
        same = ("model", "chip", "gpus", "dtype", "scaling", "seq", "batch", "microbatch", "tp", "pp", "cp", "ep")
        assert [values[0][column] for column in same] == [values[1][column] for column in same]


def test_a_recipe_is_named_next_to_the_plan_and_not_twice(tmp_path: Path, rooftop: Run) -> None:
    name, words = "llama3_70b_pretrain_64gpu_h100_bf16_config", ("plan", "train", "--on", "h100:8x8")
    by_name = rooftop(*words, "--framework", "megatron", "--from", name, "--config", str(tmp_path))
    assert f"as {name} configures it priced as a benchmark recipe: gradients reduced in bf16, no checks" in " ".join(
        by_name.out.split()
    )
    written = rooftop(*words, "--framework", "megatron", "--from", str(tmp_path / "train.sh"))
    assert written.out.startswith("llama3-70b on h100:8x8")
    assert f"as recipe {name} of Megatron-Bridge, a benchmark: gradients reduced in bf16" in " ".join(
        written.out.split()
    )
    # Any other batch, mesh or dtype of gradients is another plan.
    for change in (("--batch-seqs", "512"), ("--chunks", "1"), ("--matmul-dtype", "f8_e4m3")):
        other = rooftop(*words, "--framework", "megatron", "--from", name, *change, "--json")
        assert other.json["recipe"]["name"] != name
    training = rooftop(*words, "--framework", "megatron", "--from", name, "--set", "gradients=f32")
    assert "priced as a training recipe: gradients reduced in f32; without a price: checks of the loss" in " ".join(
        training.out.split()
    )


def test_a_script_with_the_sizes_of_a_preset_is_of_that_model(texts: dict[str, str]) -> None:
    where = Slice.parse("h100:8x2")
    assert stated_step("megatron", texts["megatron"], where).model == replace(
        load_model("llama3-8b"), family="megatron"
    )
    other = texts["megatron"].replace("--num-layers 32", "--num-layers 16")
    changed = stated_step("megatron", other, where).model
    assert changed is not None and changed.name == "the model of the arguments"


@pytest.mark.parametrize(
    ("framework", "name", "on", "mesh", "remat"),
    [
        ("torchtitan", "llama3_405b", "h100:8x64", {"fsdp": 64, "tensor": 8}, "block"),
        ("torchtitan", "qwen3_0.6b", "h100:8", {"fsdp": 8}, "matmuls"),
        ("maxtext", "llama2_7b_v5p_128", "v5p:4x4x4", {"fsdp": 64}, "minimal"),
        ("maxtext", "llama3_1_70b_8192_synthetic_ckpt", "v6e:16x16", {"fsdp": 256},
         "block,layer_input=offload,qkv=offload"),
    ],
)  # fmt: skip
def test_a_shipped_configuration_is_priced_by_its_name(
    framework: str, name: str, on: str, mesh: dict[str, int], remat: str
) -> None:
    plan = plan_training(on=on, framework=framework, configuration=name).plan
    row = recipes(framework)[name]
    assert plan.problem.model.name == row["model"]
    assert {axis: size for axis, size in plan.mesh.shape.items() if size > 1} == mesh
    assert parse_policy(plan.choice.remat) == parse_policy(remat)
    batch, seq = ("local_batch", "seq") if framework == "torchtitan" else ("per_device_batch_size", "max_target_length")
    ways = plan.problem.slice.devices // mesh.get("tensor", 1)
    assert plan.problem.workload.batch_tokens == int(row[batch]) * ways * int(row[seq])


@pytest.mark.parametrize(
    ("framework", "name", "on", "says"),
    [
        ("torchtitan", "qwen3_1.7b", "h100:8", "a model with a preset"),
        ("torchtitan", "llama3_7b", "h100:8", "one of the 10 recipes of torchtitan"),
        ("maxtext", "llama3", "v5p:4x4x4", "one of the 91 recipes of maxtext"),
        # An axis and a scale of sizes that plans do not have are not taken for others.
        ("maxtext", "gemma2-9b-8192", "v6e:16x16", "ici_fsdp_transpose_parallelism: got 256"),
        ("maxtext", "v5p-128b", "v5p:4x4x4", "global_parameter_scale: got 128"),
    ],
)
def test_a_shipped_configuration_without_a_price_is_one_line(
    framework: str, name: str, on: str, says: str, rooftop: Run
) -> None:
    answer = rooftop("plan", "train", "--from", name, "--framework", framework, "--on", on)
    assert answer.status == 2 and answer.err.count("\n") == 1 and says in answer.err


def test_every_shipped_configuration_has_its_row_and_is_read_as_it_was_written() -> None:
    path = Path(__file__).parents[2] / "bench" / "results" / "shipped.csv"
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert [(row["framework"], row["name"]) for row in rows] == [
        (framework, name) for framework in FRAMEWORKS[1:] for name in recipes(framework)
    ]
    for row in rows:
        assert row["outcome"], row["name"]
        assert row["read_again"] == ("yes" if row["step_s"] else ""), row["name"]


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
def test_the_table_of_shipped_configurations_has_the_price_of_plans(framework: str) -> None:
    path = Path(__file__).parents[2] / "bench" / "results" / "shipped.csv"
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    priced = [row for row in rows if row["framework"] == framework and row["step_s"]]
    for row in priced[:: max(1, len(priced) // 4)]:
        plan = plan_training(on=row["slice"], framework=framework, configuration=row["name"]).plan
        assert f"{plan.expected_s:.4g}" == row["step_s"], row["name"]
        assert plan.fits == (row["outcome"] == "priced"), row["name"]


@pytest.mark.parametrize("kernels", ["default", "jax-2048"])
def test_gradients_of_attention_are_priced_apart_where_only_one_kernel_was_counted(kernels: str) -> None:
    steps = [
        plan_training(
            "llama3-8b", on="v6e:4x4", batch_seqs=64, seq=8192, framework="maxtext", mesh="fsdp=16", remat="block",
            framework_settings=f"fused_backward={fused},attention_kernels={kernels}",
        ).plan.expected_s
        for fused in ("no", "yes")
    ]  # fmt: skip
    assert steps[0] > steps[1]
