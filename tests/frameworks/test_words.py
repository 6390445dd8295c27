"""Plans in the words of their framework, and back: configurations are read as they were written."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.frameworks.framework import FRAMEWORKS
from rooftop.frameworks.remat import has_remat, remat_policies
from rooftop.frameworks.words.configurations import configuration_of, short_words, stated_step, written_words
from rooftop.frameworks.words.megatron import read_layout, stage_layout
from rooftop.frameworks.words.shell import script_arguments
from rooftop.frameworks.words.table import option_values, word_table
from rooftop.hardware import Slice
from rooftop.library.planning import plan_training
from rooftop.models import load_model

DATA = Path(__file__).with_name("data")
Run = Callable[..., Any]
#: Framework, model, slice, and the rest of a request: dense and sparse models, stages, chunks, context, dtypes.
JOBS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("megatron", "llama3-70b", "h100:8x32", {"batch_seqs": 1024, "seq": 8192, "remat": "none"}),
    ("megatron", "llama3.1-405b", "b200:8x64", {"batch_seqs": 1024, "seq": 8192, "matmul_dtype": "f8_e4m3"}),
    ("megatron", "llama3.1-405b", "h100:8x64", {
        "batch_seqs": 512, "seq": 8192, "mesh": "data=4,stage=16,tensor=8", "chunks": 4, "microbatches": 64}),
    ("megatron", "llama3.1-405b", "gb300:64x2", {"batch_seqs": 512, "seq": 8192, "mesh": "fsdp=64,tensor=2"}),
    ("megatron", "deepseek-v3", "h100:8x128", {
        "batch_seqs": 8192, "seq": 4096, "remat": "none,qkv=recompute,mlp_up=recompute,mlp_act=recompute"}),
    ("megatron", "qwen3-30b-a3b", "gb200:64x1", {"batch_seqs": 1024, "seq": 4096}),
    ("megatron", "gpt-oss-20b", "h100:8x2", {"batch_seqs": 256, "seq": 4096, "remat": "block"}),
    ("megatron", "llama3-8b", "h100:8x2", {
        "batch_seqs": 64, "seq": 32768, "mesh": "data=2,context=4,tensor=2", "moments_dtype": "bf16"}),
    ("torchtitan", "llama3.1-405b", "h100:8x64", {"batch_seqs": 256, "seq": 8192, "matmul_dtype": "f8_e4m3"}),
    ("torchtitan", "llama3.1-405b", "h100:8x64", {
        "batch_seqs": 256, "seq": 8192, "mesh": "fsdp=16,stage=4,tensor=8", "chunks": 4}),
    ("torchtitan", "deepseek-v3", "h100:8x64", {"batch_seqs": 2048, "seq": 4096, "mesh": "fsdp=64,expert=8"}),
    ("maxtext", "llama3-70b", "v6e:16x16", {
        "batch_seqs": 1280, "seq": 8192, "mesh": "fsdp=256", "remat": "block,layer_input=offload,qkv=offload"}),
    ("maxtext", "llama3.1-405b", "v6e:16x16@2", {"batch_seqs": 512, "seq": 8192}),
    ("maxtext", "llama3.1-405b", "h100:8x128", {"batch_seqs": 256, "seq": 8192, "mesh": "fsdp=1024"}),
    ("maxtext", "deepseek-v3", "v5p:8x8x8", {"batch_seqs": 2048, "seq": 4096, "mesh": "fsdp=64,expert=8"}),
    ("maxtext", "mixtral-8x7b", "v5p:4x4x4", {
        "batch_seqs": 1024, "seq": 4096, "framework_settings": "experts=slots,capacity=1.25"}),
    ("maxtext", "llama3-70b", "v5p:4x4x4", {
        "batch_seqs": 256, "seq": 8192, "mesh": "fsdp=8,stage=8", "microbatches": 32, "schedule": "interleaved",
        "chunks": 2}),
]  # fmt: skip


def _name(job: tuple[str, str, str, dict[str, Any]]) -> str:
    return " ".join(map(str, job[:3]))


def _read(framework: str, files: dict[str, str], where: Any) -> Any:
    (text,) = files.values()
    return stated_step(framework, text, where)


@pytest.mark.parametrize("job", JOBS, ids=_name)
def test_a_configuration_is_read_as_the_plan_that_it_was_written_for(job: tuple[str, str, str, dict[str, Any]]) -> None:
    framework, model, where, fields = job
    plan = plan_training(model, on=where, framework=framework, **fields).plan
    configuration = configuration_of(plan.configured)
    stated = _read(framework, dict(configuration.files), plan.problem.slice)
    assert stated.unpriced == ()
    asked = {name: value for name, value in stated.fields.items() if value is not None}
    again = plan_training(stated.model, on=where, framework=framework, **asked).plan
    shapes = [{axis: size for axis, size in priced.mesh.shape.items() if size > 1} for priced in (plan, again)]
    assert shapes[0] == shapes[1]
    assert again.expected_s == pytest.approx(plan.expected_s, rel=1e-4)
    assert again.memory_bytes == pytest.approx(plan.memory_bytes, rel=1e-4)
    assert written_words(again.configured) == written_words(plan.configured)


def test_keys_and_defaults_are_those_of_the_frameworks() -> None:
    for framework, recorded in (("megatron", "megatron-options"), ("torchtitan", "torchtitan-0.2.2-fields"),
                                ("maxtext", "maxtext-keys")):  # fmt: skip
        options = json.loads((DATA / f"{recorded}.json").read_text(encoding="utf-8"))["options"]
        table = word_table(framework)
        for word in table.words.values():
            facts = options[word.key]
            if word.is_flag:
                assert facts["nargs"] == 0, word.key
                continue
            default = facts.get("default")
            if word.is_list and default is not None:
                default = (default,) if isinstance(default, str) else tuple(default)
            # An empty list and no default are the same: nothing is said.
            assert (word.default or None) == (default or None) or str(word.default) == str(default), word.key
    counts = json.loads((DATA / "megatron-options.json").read_text(encoding="utf-8"))["options"]
    for name, facts in counts.items():
        for spelling in (name, *facts.get("also", ())):
            count = facts.get("nargs", 1)
            assert option_values("megatron")[spelling] == (count if count in (0, 1) else None), spelling


@pytest.mark.parametrize("framework", FRAMEWORKS[1:])
@pytest.mark.parametrize("model", ["llama3-8b", "deepseek-v3", "mixtral-8x7b"])
def test_searched_policies_are_those_of_the_framework(framework: str, model: str) -> None:
    config = load_model(model)
    policies = remat_policies(framework, config)
    assert len(policies) > 2
    assert all(has_remat(framework, policy, config) for policy in policies)
    assert not has_remat(framework, "none,rope=recompute,qkv=offload", config)


@given(layers=st.integers(2, 130), stages=st.integers(2, 16), chunks=st.integers(1, 6))
@settings(max_examples=200)
def test_layouts_of_stages_have_all_layers(layers: int, stages: int, chunks: int) -> None:
    parts = stages * chunks
    if parts > layers + 2:
        return
    layout = stage_layout(layers, parts)
    assert read_layout(layout) == (parts, layers)
    assert layout.startswith(("E", "(E")) and layout.endswith("L")


def test_layouts_of_recipes_are_read() -> None:
    assert read_layout("Et|(tt|)*30mL") == (32, 61)
    assert read_layout("Et*3|(tt|)*29m|L") == (32, 61)
    with pytest.raises(RooftopError, match="pipeline-model-parallel-layout"):
        read_layout("Ex|tL")


SCRIPT = """#!/bin/bash
# A comment with --num-layers 3
TP=4; PP=${2:-4}
NODES=32
GPUS=$((8*$NODES))
MODEL_ARGS=(
    --num-layers 80 # layers
    --swiglu
)
ARGS="--tensor-model-parallel-size $TP --pipeline-model-parallel-size ${PP} \\
  --global-batch-size $((GPUS * 4))"
CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node 8 pretrain_gpt.py "${MODEL_ARGS[@]}" $ARGS --bf16 \\
  --data-path ${DATA}
"""


def test_scripts_are_read_with_their_variables() -> None:
    arguments = script_arguments(SCRIPT, "pretrain_gpt.py")
    assert arguments == shlex.split(
        "--num-layers 80 --swiglu --tensor-model-parallel-size 4 --pipeline-model-parallel-size 4 "
        "--global-batch-size 1024 --bf16 --data-path '${DATA}'"
    )
    with pytest.raises(RooftopError, match="from"):
        script_arguments("ARGS=(\n--bf16", "pretrain_gpt.py")


MEGATRON = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention "
    "--num-query-groups 8 --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --swiglu "
    "--normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights --vocab-size 128256 --bf16 "
    "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 4 --micro-batch-size 1 "
    "--global-batch-size 128 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (" --no-such-option", "--no-such-option"),
        (" --num-virtual-stages-per-pipeline-rank 3", "stages x chunks (4 x 3) that divide 32 layers"),
        (" --global-batch-size 7", "--global-batch-size: got 7"),
        (" --expert-model-parallel-size 2", "has no experts"),
        (" --tensor-model-parallel-size 3", "divide 64 GPUs"),
        (" --fp8-format hybrid --fp4-format e2m1", "excludes both"),
        (" --recompute-granularity full", "--recompute-method"),
        (" --recompute-granularity selective --recompute-modules sinks", "recomputed module"),
        (" --num-layers", "a value after it"),
        (" --hidden-size many", "--hidden-size: got 'many'"),
        (" --position-embedding-type alibi", "rope, learned_absolute or none"),
    ],
)
def test_what_megatron_refuses_is_one_line(change: str, message: str, tmp_path: Path, rooftop: Run) -> None:
    path = tmp_path / "args.sh"
    path.write_text(MEGATRON + change, encoding="utf-8")
    words = ["plan", "train", "--framework", "megatron", "--from", str(path), "--on", "h100:8x8"]
    answer = rooftop(*words)
    assert answer.status == 2 and message in answer.err
    assert answer.err.count("\n") == 1


def test_what_a_configuration_leaves_unused_is_named(tmp_path: Path) -> None:
    path = tmp_path / "args.sh"
    path.write_text(MEGATRON + " --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
                    "--mtp-num-layers 1", encoding="utf-8")  # fmt: skip
    result = plan_training(on="h100:8x8", framework="megatron", configuration=path)
    stated = result.record.stated
    assert stated is not None and stated.unpriced == ("--mtp-num-layers",)
    changes = {change.about: change for change in stated.unused}
    recomputation = changes["recomputation"]
    assert recomputation.settings["--recompute-granularity"] == (None, "full")
    # Each gain is the price of that plan by the same call.
    plain = plan_training(on="h100:8x8", framework="megatron", configuration=path, remat="none").plan
    assert recomputation.step_s == pytest.approx(plain.expected_s)
    assert recomputation.gain == pytest.approx(result.plan.expected_s / plain.expected_s - 1)
    assert [change.gain for change in stated.unused] == sorted((c.gain for c in stated.unused), reverse=True)


def test_an_option_changes_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "args.sh"
    path.write_text(MEGATRON, encoding="utf-8")
    plain = plan_training(on="h100:8x8", framework="megatron", configuration=path).plan
    chunked = plan_training(on="h100:8x8", framework="megatron", configuration=path, chunks=4).plan
    assert (plain.choice.chunks, chunked.choice.chunks) == (1, 4)
    assert chunked.expected_s < plain.expected_s


def test_a_configuration_is_written_and_read_by_the_command_line(tmp_path: Path, rooftop: Run) -> None:
    words = ["plan", "train", "llama3-8b", "--on", "h100:8x2", "--batch-seqs", "64", "--framework"]
    for framework, name in (("megatron", "train.sh"), ("torchtitan", "plan.toml"), ("maxtext", "plan.yml")):
        folder = tmp_path / framework
        answer = rooftop(*words, framework, "--config", str(folder))
        assert answer.status == 0, answer.err
        assert f"Configuration: {name}" in answer.out
        assert sorted(path.suffix for path in folder.iterdir()).count(".sh") == 1
        stated = ("--framework", framework, "--from", str(folder / name), "--json")
        again = rooftop("plan", "train", "--on", "h100:8x2", *stated)
        assert again.status == 0, again.err
        assert again.json["stated"]["file"] == name
        assert again.json["model"]["config"]["layers"] == 32
    refused = rooftop(*words[:-1], "--config", str(tmp_path / "none"))
    assert refused.status == 2 and "config: got" in refused.err


def test_frameworks_are_compared_by_the_same_price() -> None:
    result = plan_training("llama3-8b", on="h100:8x2", batch_seqs=64, framework="all")
    assert {offer.name for offer in result.frameworks} == set(FRAMEWORKS)
    for offer in result.frameworks:
        plan = plan_training("llama3-8b", on="h100:8x2", batch_seqs=64, framework=offer.name).plan
        assert offer.step_s == plan.expected_s and offer.interval_s == plan.interval_s
    running = [offer.likely_s for offer in result.frameworks if offer.obstacle is None]
    assert running == sorted(running)
    assert result.plan.problem.program.name == result.frameworks[0].name
    with pytest.raises(RooftopError, match="release"):
        plan_training("llama3-8b", on="h100:8x2", batch_seqs=64, framework="all", release="26.08")


def test_sizes_are_said_in_the_words_of_users() -> None:
    assert short_words("megatron", {"data": 16, "stage": 4, "tensor": 4, "context": 1}, 5) == "TP 4, PP 4, VPP 5, DP 16"
    assert short_words("maxtext", {"fsdp": 64, "tensor": 4}) == "fsdp 64, tensor 4"
    assert short_words("rooftop", {"data": 1}) == "one device"


def test_split_weights_have_the_checkpoints_that_megatron_asks_for() -> None:
    job: dict[str, Any] = {"batch_seqs": 256, "seq": 4096, "mesh": "fsdp=64"}
    plan = plan_training("llama3-70b", on="h100:8x8", framework="megatron", **job).plan
    (script,) = dict(configuration_of(plan.configured).files).values()
    assert "--use-megatron-fsdp" in script
    assert "--ckpt-format fsdp_dtensor" in script
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in script, "Megatron refuses it"


@pytest.mark.parametrize(
    ("setting", "line"),
    [
        ("per_device_batch_size: abc", "per_device_batch_size: got 'abc'; accepted: a number above 0"),
        ("per_device_batch_size: .nan", "per_device_batch_size: got 'nan'; accepted: a number above 0"),
        ("per_device_batch_size: [2]", "per_device_batch_size: got '[2]'; accepted: a number above 0"),
        ("per_device_batch_size: 1.0e+300", "per_device_batch_size: got '1e+300'; accepted: a number above 0"),
        ("opt_type: adafactorr", "opt_type: got 'adafactorr'; accepted: one with a price: adamw"),
    ],
)
def test_wrong_settings_of_maxtext_are_one_line(setting: str, line: str) -> None:
    with pytest.raises(RooftopError) as caught:
        _read("maxtext", {"plan.yml": f"model_name: llama3.1-8b\n{setting}\n"}, Slice.parse("v6e:4x4"))
    assert str(caught.value).startswith(line)


def test_optimizer_and_moments_of_maxtext_are_read() -> None:
    text = "model_name: llama3.1-8b\nopt_type: sgd\nweight_dtype: bfloat16\n"
    fields = _read("maxtext", {"plan.yml": text}, Slice.parse("v6e:4x4")).fields
    assert (fields["optimizer"], fields["weights_dtype"], fields["moments_dtype"]) == ("sgd", "bf16", "bf16")


def test_an_optimizer_of_torchtitan_without_a_price_is_refused() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[optimizer]\nname = "Muon"\n'
    with pytest.raises(RooftopError, match=r"optimizer\.name: got 'Muon'; accepted: AdamW or Adam"):
        _read("torchtitan", {"train.toml": text}, Slice.parse("h100:8x2"))
