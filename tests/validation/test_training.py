"""Published runs: how the table is read, what the null model scores, and how calibration leaves a model out."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.frameworks.engines import engine_of
from rooftop.frameworks.framework import Framework
from rooftop.hardware import chip
from rooftop.library.explaining import validate
from rooftop.models import count_params, load_model
from rooftop.plan.evidence import measured_ratios
from rooftop.requests.problems import training_problem
from rooftop.roofline.achievable import fractions
from rooftop.validation import AccuracyReport, PublishedRun, accuracy, load_published, load_reasons, summarise
from rooftop.validation.engine_runs import load_engine_runs
from rooftop.validation.engines import EngineReport, engine_comparisons, engine_report, predictions
from rooftop.validation.memory import compare_memory, planned_memory
from rooftop.validation.predict import Prediction, as_ours, command_of, planned, predict, request_of
from rooftop.validation.readings import _matches, source_facts
from rooftop.validation.runs import CONVENTIONS, full_attention_and_remat, step_seconds
from rooftop.validation.serving import ServingReport, serving_ratios, serving_report
from rooftop.validation.table import COLUMNS, read_table

PUBLISHED = load_published()
RUNS = PUBLISHED.runs
MEASURED = np.array([run.step_s for run in RUNS])
DENSE = [run for run in RUNS if run.dense_tpu]
PRESET = "a preset (`rooftop model` lists them), or a table that states"
BF16 = [run for run in DENSE if run.dtype == "bf16"]


@pytest.fixture(scope="module")
def predicted() -> Mapping[str, Prediction]:
    """The predictions of all runs, by id."""
    return {run.id: predict(run) for run in RUNS}


def table(*changes: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> str:
    """A table of rows that differ from one good row by ``changes``."""
    good = dict.fromkeys(columns, "") | {
        **{"source": "mine", "model": "small", "layers": "8", "d_model": "1024", "d_ff": "4096", "heads": "8"},
        **{"kv_heads": "8", "d_head": "128", "vocab": "32000", "seq_len": "2048", "global_batch_seqs": "64"},
        **{"chip": "v5e", "num_chips": "16", "dp": "1", "fsdp": "16", "tp": "1", "pp": "1", "dtype": "bf16"},
        **{"phase": "train", "recompute": "full", "measured_metric": "step_time", "measured_value": "0.5", "unit": "s"},
    }
    out = io.StringIO()
    writer = csv.DictWriter(out, columns)
    writer.writeheader()
    writer.writerows(good | change for change in changes)
    return out.getvalue()


def load(tmp_path: Path, text: str) -> Any:
    path = tmp_path / "mine.csv"
    path.write_text(text, encoding="utf-8")
    return load_published(path)


def only(tmp_path: Path, **change: str) -> PublishedRun:
    published = load(tmp_path, table(change, columns=tuple({**dict.fromkeys(COLUMNS), **change})))
    assert not published.unusable
    (run,) = published.runs
    assert isinstance(run, PublishedRun)
    return run


# --- the table that comes with rooftop ---


def test_every_training_row_is_in_one_run_or_is_said_to_be_unusable() -> None:
    rows = read_table()
    assert len(rows) == 454
    training = sorted(row.number for row in rows if row.cells["phase"] == "train")
    used = [line for item in (*RUNS, *PUBLISHED.unusable) for line in item.lines]
    assert sorted(used) == training
    assert (len(RUNS), len(PUBLISHED.unusable), PUBLISHED.serving_rows) == (171, 23, 42)
    assert len({run.id for run in RUNS}) == len(RUNS)


def test_the_dense_tpu_runs() -> None:
    chips = Counter(run.slice.chip.name for run in DENSE)
    assert chips == {"v5e": 12, "v5p": 11, "v4": 6, "v6e": 14, "tpu7x": 8}
    assert [run.id for run in DENSE if run.dtype != "bf16"] == [
        "tpu-recipes/gpt3-175b/v6e:16x16/768x2048/int8/full",
        "tpu-recipes/gpt3-175b/v5p:8x8x8/2048x2048/int8/full",
        "tpu-recipes-ironwood-table/llama3.1-70b/tpu7x:4x4x4/256x8192/f8_e4m3/block,attn_core=save,qkv=save",
        "tpu-recipes-ironwood-table/llama3.1-70b/tpu7x:4x8x8/1024x8192/f8_e4m3/block,attn_core=save,qkv=save",
        "tpu-recipes-ironwood-table/llama3.1-70b/tpu7x:4x8x8/64x131072/f8_e4m3/block,attn_core=save,qkv=save,mlp_down=save",
        "tpu-recipes-ironwood-table/llama3.1-405b/tpu7x:4x8x8/1536x8192/f8_e4m3/custom",
    ]
    assert Counter(run.over_dcn for run in DENSE) == {False: 32, True: 19}


def program(run: PublishedRun) -> Framework:
    """The framework of a run, with what applies to it."""
    return training_problem(request_of(run), run.slice).program


def assumed(run: PublishedRun) -> Mapping[str, Any]:
    """Assumptions of a plan that the framework of a run decides."""
    return program(run).assumptions


def with_settings(run: PublishedRun, **settings: str) -> PublishedRun:
    """A run with other settings of its framework."""
    return replace(run, facts={**run.facts, "settings": {**run.facts["settings"], **settings}})


def test_recipes_say_what_the_table_of_ironwood_does_not() -> None:
    runs = [run for run in RUNS if run.slice.chip.name == "tpu7x"]
    assert {run.model.name: run.remat.policy or run.remat.offloaded for run in runs if run.seq_len == 8192} == {
        "llama3.1-70b": "block,attn_core=save,qkv=save",
        "llama3.1-405b": "custom",
    }
    assert [run.remat.offloaded for run in runs if run.model.name == "llama3.1-405b"] == [
        ("decoder_layer_input", "mlpwo"),
        ("decoder_layer_input",),
    ]
    (long, _) = (run for run in runs if run.seq_len == 131072)
    assert long.mesh == {"fsdp": 64, "context": 8}
    experts = [run for run in runs if run.model.moe is not None]
    assert [(run.remat.offloaded, run.mesh) for run in experts] == [
        ((name,), {"fsdp": devices})
        for name, devices in (
            *(("layer_input", devices) for devices in (256, 256, 512, 512)),
            *(("decoder_layer_input", 512) for _ in range(2)),
        )
    ]
    assert all(assumed(run)["fused_attention_gradients"] for run in runs)
    assert {run.dtype for run in runs if assumed(run).get("narrow_gradients")} == {"f8_e4m3"}


def test_a_run_is_priced_with_the_attention_kernels_of_its_recipe() -> None:
    run = next(run for run in DENSE if run.seq_len == 131072 and run.dtype == "bf16")
    fit = fractions("tpu7x").kernels[assumed(run)["attention_kernels"]]
    theirs, ours = (predict(one) for one in (run, with_settings(run, attention_kernels="default")))
    cores = {}
    for prediction in (theirs, ours):
        rows = [row for row in prediction.plan.ledger.rows if row.scope == "layers/attn/core"]
        cores[prediction.uncalibrated_s] = sum(row.count * row.expected_s for row in rows)
    # Tokamax's kernels without a running maximum: 0.71 of the time (bench/results/compiler_fractions.csv).
    assert cores[theirs.uncalibrated_s] / cores[ours.uncalibrated_s] == pytest.approx(0.71, abs=0.02)
    saved_s = cores[ours.uncalibrated_s] - cores[theirs.uncalibrated_s]
    assert ours.uncalibrated_s - theirs.uncalibrated_s == pytest.approx(saved_s, rel=0.01)
    assert theirs.plan.document.assumptions.attention_kernels == assumed(run)["attention_kernels"]
    assert theirs.plan.step.attention_block == fit.block
    # Our program, which `--compiled` compiles, has its own kernels.
    assert theirs.plan.spec.attention_block == ours.plan.spec.attention_block == fractions("tpu7x").attention.block


def test_one_kernel_for_the_gradients_of_attention_makes_a_step_shorter() -> None:
    (run,) = (run for run in DENSE if run.slice.name == "tpu7x:4x4x4" and run.dtype == "bf16")
    fused, separate = (predict(with_settings(run, fused_backward=one)) for one in ("yes", "no"))
    rows = [
        next(row for row in one.plan.ledger.rows if (row.scope, row.phase) == ("layers/attn/core", "backward"))
        for one in (fused, separate)
    ]
    # 5 matmuls in place of 7, and 0.67 of the time (bench/results/compiler_fractions.csv: 5,612 of 8,283 cycles).
    assert rows[0].kernel_flops / rows[1].kernel_flops == pytest.approx(5 / 7)
    assert rows[0].expected_s / rows[1].expected_s == pytest.approx(0.67, rel=0.02)
    shorter_s = rows[1].count * (rows[1].expected_s - rows[0].expected_s)
    assert separate.uncalibrated_s - fused.uncalibrated_s == pytest.approx(shorter_s, rel=0.05)


def test_the_runs_on_gpus() -> None:
    chips = Counter((run.slice.chip.name, run.framework) for run in RUNS if run.slice.chip.kind == "gpu")
    assert chips == {
        ("a100", "Megatron-LM"): 18,
        ("h100-96gb-500w", "torchtitan"): 10,
        ("b200", "SimuMax B200 v1.2"): 16,
        ("h100", "Megatron Core"): 16,
        ("b200", "Megatron Core"): 14,
        ("gb200", "Megatron Core"): 35,
        ("h200", "MaxText"): 1,
        ("h200", "Megatron Core"): 1,
    }
    gpus = [run for run in RUNS if run.slice.chip.kind == "gpu" and run.model.name == "deepseek-v3"]
    spread = {run.mesh["expert"]: run.slice.name for run in gpus if run.mesh}
    assert (spread[64], spread[32]) == ("h100:8x128", "gb200:64x4")


def test_launches_of_megatron_core_take_about_what_those_of_vllm_take() -> None:
    """The overheads of vLLM are fitted on prefills of served models, whose kernels its host launches one by one."""
    engine = engine_of("vllm", chip=chip("h100"), model=load_model("llama3-8b"))
    assert engine is not None
    (launch_s,) = {program(run).habits.launch_s for run in RUNS if run.framework == "Megatron Core"}
    assert launch_s == pytest.approx(engine.overheads.host_s, rel=0.15)


def test_recipes_have_graphs_and_strategies() -> None:
    runs = {(run.source.split()[-1], run.slice.chip.name): run for run in RUNS if run.model.name == "qwen3-30b-a3b"}
    graphs = {key: program(run).habits.graphs for key, run in runs.items()}
    assert {graphs[release, "h100"] for release in ("25.09", "25.11", "26.02", "26.06")} == {()}
    assert graphs["25.11", "b200"] == ("moe_router", "moe_preprocess")
    assert graphs["26.04", "b200"] == ("attn", "moe_router", "moe_preprocess")
    assert (graphs["25.09", "gb200"], graphs["26.08", "gb200"]) == (("layer",), ("layer",))
    # What the recipe says, where the table's columns are those of an earlier release.
    assert runs["25.11", "h100"].microbatch_seqs == 1
    assert runs["26.02.01", "h100"].mesh == {"expert": 16}
    assert runs["26.02", "h100"].mesh == {"stage": 2, "expert": 8}


def test_mixtures_on_gpus_are_within_fifteen_per_cent(predicted: Mapping[str, Prediction]) -> None:
    runs = [run for run in RUNS if run.slice.chip.kind == "gpu" and run.model.moe is not None]
    errors = [predicted[run.id].uncalibrated_s / run.step_s - 1 for run in runs]
    assert len(runs) == 39
    assert sum(map(abs, errors)) / len(errors) < 0.15


def test_mixtures_on_tpus_are_within_twelve_per_cent(predicted: Mapping[str, Prediction]) -> None:
    """With no run in it: 19 % before their kernels, slots and weights after the last matmul were priced."""
    runs = [run for run in RUNS if run.slice.chip.kind == "tpu" and run.model.moe is not None]
    errors = [predicted[run.id].uncalibrated_s / run.step_s - 1 for run in runs]
    assert len(runs) == 9
    assert sum(map(abs, errors)) / len(errors) < 0.12
    habits = {(run.model.name, run.slice.chip.name): program(run).habits for run in runs}
    assert all(one.weighs_outputs for one in habits.values())
    assert habits["deepseek-v3", "v5p"].group_rows == ((512,) * 3,) * 2


def test_the_evidence_of_plans_is_of_todays_predictions(predicted: Mapping[str, Prediction]) -> None:
    """``python bench/evidence/evidence.py`` writes it anew."""
    ratios = (
        *accuracy.training_ratios(RUNS, [predicted[run.id].uncalibrated_s for run in RUNS]),
        *serving_ratios(serving_report().comparisons),
    )
    written = {one.run: one for one in measured_ratios()}
    assert written.keys() == {one.run for one in ratios}
    for one in ratios:
        # The file has four decimals.
        assert written[one.run].ratio == pytest.approx(one.ratio, abs=1e-4), one.run
        assert written[one.run].cells | {"ratio": "", "stray": ""} == one.cells | {"ratio": ""}
    ours = {one.run: one.ratio for one in measured_ratios("own_evidence.csv")}
    assert ours.keys() == written.keys()
    for run in RUNS[::9]:
        expected_s = planned(as_ours(request_of(run))).expected_s
        assert ours[run.id] == pytest.approx(run.step_s / expected_s, abs=1e-4), run.id


def test_flop_conventions_reproduce_the_logs_that_give_both_time_and_rate() -> None:
    deviations = []
    for run in RUNS:
        # The table of Ironwood has step times to 10 ms; the log of DeepSeek-V3 counts FLOPs in a way of its own.
        logged = run.slice.chip.name in ("v4", "v5e", "v5p", "v6e") and run.model.name != "deepseek-v3"
        if {"step_time", "tflops_per_chip"} <= run.measured.keys() and logged:
            flops = CONVENTIONS[source_facts(run.source)["flops"]](run.model, run.seq_len) * run.batch_tokens
            rate = flops / run.slice.chips / run.step_s
            deviations.append(abs(rate / run.measured["tflops_per_chip"] - 1))
            tokens = run.batch_tokens / run.slice.chips / run.step_s
            assert tokens == pytest.approx(run.measured["tokens_per_s_per_chip"], rel=2e-4)
    # 15 logs of dense models and two of mixtures; step times are printed to the millisecond.
    assert len(deviations) == 17
    assert max(deviations) < 2e-4


def test_model_flops_reproduce_the_published_mfu() -> None:
    published = [run for run in RUNS if run.source == "Korthikanti2022 T5" and "mfu" in run.measured]
    assert len(published) == 4
    for run in published:
        # Step times and MFU have three digits; the papers' peak is 312 TFLOP/s.
        assert run.flops_per_s_per_chip / 312e12 == pytest.approx(run.measured["mfu"], rel=5e-3)


def test_narayanans_equation_3() -> None:
    published = [run for run in RUNS if run.source == "Narayanan2021 T1"]
    assert len(published) == 10
    for run in published:
        model, s = run.model, run.seq_len
        h, layers, vocab = model.d_model, model.layers, model.vocab
        printed = 96 * s * layers * h**2 * (1 + s / (6 * h) + vocab / (16 * layers * h))
        assert full_attention_and_remat(model, s) * s == pytest.approx(printed, rel=1e-12)


def test_null_model_on_the_dense_tpu_runs() -> None:
    errors = np.abs(accuracy.null_seconds(DENSE) / [run.step_s for run in DENSE] - 1)
    assert (len(errors), round(100 * errors.mean(), 1), round(100 * np.median(errors), 1)) == (51, 8.6, 6.8)
    errors = np.abs(accuracy.null_seconds(BF16) / [run.step_s for run in BF16] - 1)
    assert (len(errors), round(100 * errors.mean(), 1), round(100 * np.median(errors), 1)) == (45, 5.6, 4.5)


def test_models_have_the_published_number_of_parameters() -> None:
    published = {row.number: row.cells["params"] for row in read_table()}
    exact = rounded = 0
    for run in RUNS:
        params = published[run.lines[0]]
        counted = count_params(run.model)
        if run.source in ("MaxText v5e table", "MaxText v5p table"):
            exact += 1
            assert counted.total - counted.by_component["norms"] == int(params)
        elif params:
            rounded += 1
            assert counted.total == pytest.approx(float(params), rel=0.03)
    assert (exact, rounded) == (22, 45)


@pytest.mark.parametrize(
    ("identity", "mesh"),
    [
        ("maxtext-v5e-table/maxtext-default-16b/v5e:16x16@32/49152x2048/bf16/full", {"data": 32, "fsdp": 256}),
        (
            "maxtext-v5p-table/maxtext-default-128b/v5p:4x8x8@2/512x2048/bf16/minimal",
            {"data": 2, "fsdp": 32, "tensor": 8},
        ),
        ("maxtext-v4-table/maxtext-52b-nominal/v4:4x4x12@2/2688x2048/bf16/full", {"data": 2, "fsdp": 192}),
        (
            "narayanan2021-t1/gpt-310.1b/a100:8x240/2160x2048/f16/full",
            {"stage": 16, "data": 15, "tensor": 8},
        ),
        (
            "torchtitan-t2/llama3.1-8b/h100-96gb-500w:8/4x65536/f8_e4m3+compile/full",
            {"fsdp": 4, "context": 2},
        ),
    ],
)
def test_slices_and_meshes(identity: str, mesh: dict[str, int]) -> None:
    (run,) = (run for run in RUNS if run.id == identity)
    assert run.mesh == mesh
    assert list(run.mesh) == list(mesh)
    assert math.prod(mesh.values()) == run.slice.devices


def test_what_was_offloaded_and_what_was_measured() -> None:
    by_id = {run.id: run for run in RUNS}
    run = by_id["tpu-recipes/llama3.1-8b/v6e:2x4/24x8192/bf16/custom"]
    assert run.remat.offloaded == ("layer_input", "qkv", "out_proj")
    assert by_id["tpu-recipes/llama2-70b/v6e:16x16/512x4096/bf16/custom"].remat.offloaded == ("qkv",)
    log = by_id["maxtext-logs-guide/deepseek2-16b/v5p:2x2x1/96x2048/bf16/full"]
    assert log.model.moe is not None
    assert log.measured_memory_bytes["xla_total"] == pytest.approx(100.4 * 2**30)
    titan = by_id["torchtitan-t1/llama3.1-8b/h100-96gb-500w:8/16x8192/bf16/selective"]
    assert titan.slice.chip.hbm_bytes_per_s == 2.4e12
    assert titan.measured_memory_bytes == {"peak": 82.4 * 2**30}
    assert (titan.compiled, by_id[titan.id.replace("bf16", "bf16+compile")].compiled) == (False, True)


def test_unusable_runs_say_why_and_keep_their_memory() -> None:
    why = Counter(one.why.partition("model: ")[2] or one.why for one in PUBLISHED.unusable)
    assert why == {
        "not stated: global batch": 16,
        "not stated: sequence length, global batch": 5,
        f"got 'llama4-17b-128e'; accepted: {PRESET} d_head": 1,
        f"got 'llama4-17b-16e'; accepted: {PRESET} d_head": 1,
    }
    memory = [one.measured_memory_bytes for one in PUBLISHED.unusable if one.source == "Korthikanti2022 Fig1"]
    assert memory[1] == {"activation": 59.25 * 2**30}


# --- other tables ---


def test_a_run_from_another_table(tmp_path: Path) -> None:
    run = only(tmp_path)
    assert (run.id, run.step_s, run.mesh) == ("mine/small/v5e:4x4/64x2048/bf16/full", 0.5, {"fsdp": 16})
    assert (run.model.mlp_matrices, run.model.tied_embeddings) == (3, False)


def test_metrics_of_one_run_are_merged_and_the_most_direct_gives_the_time(tmp_path: Path) -> None:
    rate = {"measured_metric": "tokens_per_s_per_chip", "measured_value": "1024", "unit": "tok/s/chip"}
    peak = {"measured_metric": "peak_memory_per_chip", "measured_value": "2", "unit": "GB"}
    (run,) = load(tmp_path, table(rate, peak)).runs
    assert (run.step_s, run.step_from, run.measured_memory_bytes) == (8.0, "tokens_per_s_per_chip", {"peak": 2e9})
    (run,) = load(tmp_path, table(rate, {}, peak)).runs
    assert (run.step_s, run.step_from, run.lines) == (0.5, "step_time", (2, 3, 4))


def test_time_from_mfu_and_from_nothing() -> None:
    given_mfu = step_seconds({"mfu": 0.5}, tokens=1.0, chips=4, flops=8e12, peak_flops_per_s=1e12)
    assert given_mfu == (4.0, "mfu")
    assert step_seconds({"mfu": 0.5}, tokens=1.0, chips=4, flops=8e12, peak_flops_per_s=None) is None
    assert step_seconds({"tflops_per_chip": 1e12}, tokens=1.0, chips=4, flops=None, peak_flops_per_s=1e12) is None


def test_the_optional_column_slice(tmp_path: Path) -> None:
    run = only(tmp_path, slice="v5e:2x4@2", dp="2", fsdp="8")
    assert (run.slice.name, run.over_dcn) == ("v5e:2x4@2", True)
    for text, accepted in (("v5e:4x8", "a slice of 16 v5e chips"), ("v5e", "CHIP:SHAPE")):
        (unusable,) = load(tmp_path, table({"slice": text}, columns=(*COLUMNS, "slice"))).unusable
        assert f"mine.csv line 2 slice: got '{text}'; accepted: {accepted}" in unusable.why


def test_more_chips_than_a_pod_are_several_slices(tmp_path: Path) -> None:
    assert only(tmp_path, num_chips="1024", fsdp="1024").slice.name == "v5e:16x16@4"


def test_two_runs_alike_but_for_where_they_were_found(tmp_path: Path) -> None:
    published = load(tmp_path, table({"where_found": "a"}, {"where_found": "b"}, {"where_found": "c"}))
    first = "mine/small/v5e:4x4/64x2048/bf16/full"
    assert [run.id for run in published.runs] == [first, f"{first}#2", f"{first}#3"]


def test_experts_and_presets(tmp_path: Path) -> None:
    moe = only(tmp_path, experts="16", active_experts="2").model.moe
    assert moe is not None
    assert (moe.experts, moe.active, moe.d_ff) == (16, 2, 4096)
    sizes = {"layers": "", "vocab": "", "d_model": "4096", "d_ff": "11008", "heads": "32", "kv_heads": "32"}
    run = only(tmp_path, model="llama2-7b", **sizes)
    assert (run.model.layers, run.model.vocab) == (32, 32000)
    assert "architecture of the preset llama2-7b" in run.assumed


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"global_batch_seqs": ""}, "not stated: global batch"),
        ({"num_chips": "48", "fsdp": "48"}, "no standard slice of 48 v5e chips: name it in a column `slice`"),
        ({"dtype": ""}, "dtype not stated"),
        ({"experts": "8"}, "experts and active_experts are not both stated"),
        ({"chip": "a100", "num_chips": "12", "fsdp": "12"}, "12 GPUs are not whole nodes of 8, nor a part of one"),
        (
            {"measured_metric": "tflops_per_chip", "unit": "TFLOP/s/chip"},
            "no step_time or tokens_per_s_per_chip, and no rate whose FLOP count is known",
        ),
    ],
)
def test_rows_that_say_too_little(tmp_path: Path, change: dict[str, str], why: str) -> None:
    published = load(tmp_path, table(change))
    assert not published.runs
    assert [one.why for one in published.unusable] == [why]


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"num_chips": "many"}, "line 2 num_chips: got 'many'"),
        ({"num_chips": ""}, "line 2 num_chips: got ''; accepted: a value: this column may not be empty"),
        ({"seq_len": "20.5"}, "line 2 seq_len: got '20.5'"),
        ({"measured_value": "-1"}, "line 2 measured_value: got '-1'"),
        ({"measured_value": "nan"}, "line 2 measured_value: got 'nan'"),
        ({"measured_metric": "stap_time"}, "line 2 measured_metric: got 'stap_time'; accepted: did you mean step_time"),
        ({"unit": "h"}, "line 2 unit: got 'h'; accepted: s or ms"),
        ({"chip": "v9"}, "line 2 chip: got 'v9'"),
        ({"dtype": "half"}, "line 2 dtype: got 'half'"),
        ({"recompute": "some"}, "line 2 recompute: got 'some'"),
        ({"sp": "maybe"}, "line 2 sp: got 'maybe'; accepted: yes or no, or nothing"),
        ({"mlp_matrices": "5"}, "line 2 mlp_matrices: got 5; accepted: 3 (gated), 2, or 0"),
        ({"fsdp": "8"}, "line 2 mesh: got 'pp 1 x dp 1 x fsdp 8 x tp 1'; accepted: axes that multiply to 16 devices"),
        (
            {"model": "llama2-7b", "layers": ""},
            "line 2 d_model: got '1024'; accepted: 4096, as in the preset llama2-7b",
        ),
        ({"phase": "tran"}, "line 2 phase: got 'tran'; accepted: train, prefill, decode, serve"),
        ({"experts": "2", "active_experts": "4"}, "line 2 moe.active: got 4"),
    ],
)
def test_bad_cells_are_named(tmp_path: Path, change: dict[str, str], line: str) -> None:
    published = load(tmp_path, table(change, {"model": "another"}))
    (unusable,) = published.unusable
    assert "mine.csv " + line in unusable.why
    assert "\n" not in unusable.why
    # The other rows of the table are used.
    assert [run.model.name for run in published.runs] == ["another"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "mine.csv header: got ''; accepted: some of the columns source,"),
        ("a,b\n1,2\n", "mine.csv header: got 'a,b'; accepted: some of the columns source,"),
        (table(), "a table with at least one row"),
        (table({}) + '"open', "a CSV file (unexpected end of data)"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(RooftopError) as error:
        load(tmp_path, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (table({}) + "one,two\n", "mine.csv line 3: got '2 cells'; accepted: 32 cells, as in the header"),
        (table({}, {"measured_metric": "power", "unit": "W"}), "line 3 measured_metric: got 'power'"),
        (table({}).replace("num_chips", "chips"), "line 2 num_chips: got ''; accepted: a value"),
    ],
)
def test_rows_that_cannot_be_read_are_listed(tmp_path: Path, text: str, line: str) -> None:
    published = load(tmp_path, text)
    assert [line in run.why for run in published.unusable] == [True]
    assert len(published.runs) == ("num_chips" in text)


@pytest.mark.parametrize(
    ("change", "step_s"),
    [
        # 16 chips; 8 sequences of 2,048 tokens in each of 1e12 / 16384 steps.
        ({"measured_metric": "days_for_1T_tokens", "measured_value": "100", "unit": "days"}, 8.64e6 * 16384 / 1e12),
        ({"measured_metric": "gpu_hours_for_1T_tokens", "measured_value": "8000", "unit": "h"}, 1.8e6 * 16384 / 1e12),
        ({"measured_metric": "tokens_per_s_per_gpu", "measured_value": "512", "unit": "tok/s/GPU"}, 2.0),
        ({"measured_metric": "iteration_time", "measured_value": "3", "unit": "sec"}, 3.0),
    ],
)
def test_times_in_the_units_of_publications(tmp_path: Path, change: dict[str, str], step_s: float) -> None:
    (run,) = load(tmp_path, table(change | {"seq_len": "2048", "global_batch_seqs": "8"})).runs
    assert run.step_s == pytest.approx(step_s)


def test_hours_without_tokens_say_what_is_missing(tmp_path: Path) -> None:
    text = table({"measured_metric": "gpu_hours", "measured_value": "8", "unit": "h"})
    (unusable,) = load(tmp_path, text).unusable
    assert "tokens of gpu_hours not stated" in unusable.why


@pytest.mark.parametrize(
    ("word", "policy"),
    [
        ("dots_saveable", "matmuls"),
        ("nothing_saveable", "full"),
        ("custom(qkv_proj+out_proj save; mlpwi offload)", "block,qkv=save,attn_out=save,mlp_up=offload"),
        ("custom(decoder_layer_input=device, context=offload)", "block,attn_core=offload"),
        ("per-op SAC", "matmuls"),
        ("Full activation checkpointing", "full"),
    ],
)
def test_remat_words_of_publications(tmp_path: Path, word: str, policy: str) -> None:
    (run,) = load(tmp_path, table({"recompute": word})).runs
    assert run.remat.policy == policy
    assert predict(run).uncalibrated_s > 0


def test_gpt_oss_is_not_gpt2(tmp_path: Path) -> None:
    """A family is one of whole names: what begins like it is another model."""
    (oss, gpt) = load(tmp_path, table({"model": "gpt-oss-120b"}, {"model": "gpt-1.7b"})).runs
    assert (oss.model.family, oss.model.mlp_matrices) == ("llama", 3)
    assert (gpt.model.family, gpt.model.mlp_matrices) == ("gpt2", 2)
    bare = {name: "" for name in ("layers", "d_model", "d_ff", "heads", "kv_heads", "d_head", "vocab")}
    assert only(tmp_path, model="gpt-oss-120b", **bare).model == load_model("gpt-oss-120b")


@pytest.mark.parametrize(("pp", "matches"), [("8", True), ("80", False), ("", False)])
def test_a_recipe_is_of_whole_words(tmp_path: Path, pp: str, matches: bool) -> None:
    (tmp_path / "mine.csv").write_text(table({"pp": pp}), encoding="utf-8")
    (row,) = read_table(tmp_path / "mine.csv")
    assert _matches({"source": "mine", "model": "small", "pp": "8"}, row) == matches


def test_a_run_that_cannot_be_priced_is_a_row_that_is_not_used(tmp_path: Path) -> None:
    bare = {name: "" for name in ("layers", "d_model", "d_ff", "heads", "kv_heads", "d_head", "vocab")}
    path = tmp_path / "mine.csv"
    rows = ({}, {"model": "gemma3n-e4b", **bare}, {"chip": "v3", "dtype": "fp8"}, {"chip": "h100-pcie"})
    path.write_text(table(*rows), encoding="utf-8")
    summary = validate(runs=path).to_json()["summary"]
    assert isinstance(summary, dict)
    assert summary["runs"] == 1
    assert [one["lines"] for one in summary["unusable"]] == [[3], [4], [5]]
    assert all("accepted: " in one["why"] for one in summary["unusable"])


def test_a_table_without_a_usable_row_says_why(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(table({"chip": "abacus"}), encoding="utf-8")
    answer = rooftop("validate", "--runs", str(path))
    assert (answer.status, answer.err) == (0, "")
    assert f"not used: {path} line 2 chip: got 'abacus'" in " ".join(answer.out.split())


def test_metrics_that_somebody_derived_belong_to_their_run(tmp_path: Path) -> None:
    rate = {"measured_metric": "tokens_per_s_per_chip", "measured_value": "512", "unit": "tok/s/chip"}
    derived = {"measured_value": "9", "where_found": "page 1; step_time DERIVED = GBS*seq/rate"}
    (run,) = load(tmp_path, table(rate | {"where_found": "page 1"}, derived)).runs
    assert (run.step_from, len(run.lines)) == ("tokens_per_s_per_chip", 2)


def test_state_that_a_program_does_not_use_is_stored_all_the_same() -> None:
    (log,) = [run for run in RUNS if run.source == "MaxText logs guide"]
    plan = predict(log).plan
    memory = planned_memory(log, plan)
    # 15.933e9 parameters, as the log prints, of 12 bytes over 4 chips.
    assert memory["weights"] + memory["optimizer"] == pytest.approx(12 * 15.933e9 / 4, rel=1e-3)
    assert memory["gradients"] == 2 * plan.memory["gradients"]
    record = compare_memory([(log, plan)])
    kinds = {group.kind: group.statistics for group in record.groups}
    assert kinds == {"xla_total": True, "xla_argument": False, "xla_temp": True, "state_runtime": False}
    errors = {row.kind: row.error for row in record.rows}
    assert max(abs(errors[kind]) for kind in ("xla_argument", "state_runtime")) < 0.005


def test_memory_is_compared_with_its_null(tmp_path: Path) -> None:
    memory = {"measured_metric": "peak_memory_per_chip", "unit": "GiB", "measured_value": "10"}
    bytes_ = {"measured_metric": "xla_argument_memory_per_chip", "unit": "GB", "measured_value": "2"}
    other = {"layers": "10"}
    rows = [{}, memory, bytes_, other, other | memory | {"measured_value": "6"}]
    runs = load(tmp_path, table(*rows)).runs
    plans = [predict(run).plan for run in runs]
    record = compare_memory(list(zip(runs, plans, strict=True)))
    peak = [row for row in record.rows if row.kind == "peak"]
    assert [row.null_bytes for row in peak] == [6 * 2**30, 10 * 2**30]
    assert [row.planned_bytes for row in peak] == pytest.approx([plan.memory_bytes for plan in plans])
    assert peak[0].error == pytest.approx(plans[0].memory_bytes / (10 * 2**30) - 1)
    (argument,) = [row for row in record.rows if row.kind == "xla_argument"]
    # Parameters and two moments in f32, split over all 16 devices.
    assert argument.planned_bytes == pytest.approx(12 * count_params(runs[0].model).total / 16, rel=0.02)
    assert argument.null_bytes is None
    assert [(group.kind, group.errors.runs) for group in record.groups] == [("peak", 2), ("xla_argument", 1)]


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(RooftopError, match="No such file"):
        load_published(tmp_path / "none.csv")
    (tmp_path / "latin.csv").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(RooftopError, match="not UTF-8"):
        load_published(tmp_path / "latin.csv")


# --- accuracy ---

times = st.lists(st.floats(0.5, 2.0), min_size=len(RUNS), max_size=len(RUNS))


def report_for(factors: Any) -> AccuracyReport:
    """A report for uncalibrated predictions of measured x factors, and bounds at half of the measured time."""
    return summarise(RUNS, 0.5 * MEASURED, MEASURED * np.asarray(factors))


def sizes(run: PublishedRun) -> tuple[int, ...]:
    model = run.model
    return (model.layers, model.d_model, model.d_ff, model.heads, model.kv_heads, model.d_head, model.vocab)


@given(st.floats(0.1, 10.0))
def test_one_factor_per_chip_makes_up_for_a_common_one(factor: float) -> None:
    assert accuracy.calibrated_seconds(RUNS, factor * MEASURED) == pytest.approx(MEASURED)


@given(times, st.integers(0, len(RUNS) - 1))
def test_a_models_own_runs_do_not_calibrate_it(factors: list[float], index: int) -> None:
    own = sizes(RUNS[index])
    changed = [factor * 3 if sizes(run) == own else factor for run, factor in zip(RUNS, factors, strict=True)]
    before, after = (accuracy.calibrated_seconds(RUNS, MEASURED * one)[index] for one in (factors, changed))
    assert after == pytest.approx(3 * before)


def test_one_architecture_under_two_names_is_one_model() -> None:
    pair = [run for run in RUNS if run.model.name in ("gpt-1008.0b", "megatron-1T")]
    assert len(pair) == 3
    assert np.isnan(accuracy.leave_one_model_out(np.ones(3), pair)).all()


def test_experts_on_tpus_learn_from_other_mixtures_and_those_on_gpus_from_dense_models() -> None:
    runs = [run for run in RUNS if run.model.moe is not None and run.slice.chip.kind == "tpu"]
    mixtral = next(index for index, run in enumerate(runs) if run.model.name == "mixtral-8x7b")
    # DeepSeek-V3 counts once with its five runs, on two chips, and so do Qwen3 235B and DeepSeek-V2-Lite.
    values = [{"mixtral-8x7b": 5.0, "deepseek-v3": 2.0}.get(run.model.name, 3.0) for run in runs]
    assert accuracy.leave_one_model_out(values, runs, pools=True)[mixtral] == 3.0
    gpus = [run for run in RUNS if run.slice.chip.name == "b200" and run.framework == "Megatron Core"]
    of_kind = [1.0 if run.model.moe is None else 9.0 for run in gpus]
    learnt = accuracy.leave_one_model_out(of_kind, gpus, pools=True)
    assert {factor for factor, run in zip(learnt, gpus, strict=True) if run.model.moe is not None} == {1.0}


def test_a_model_alone_on_its_chip_stays_uncalibrated_and_says_so() -> None:
    runs = [run for run in RUNS if run.model.name != "llama3.1-405b"]
    measured = np.array([run.step_s for run in runs])
    report = summarise(runs, 0.5 * measured, 0.8 * measured)
    (tpu7x,) = (group for group in report.groups if group.name == "tpu7x")
    assert (tpu7x.errors["calibrated"], tpu7x.errors["null"]) == (None, None)
    assert tpu7x.errors["uncalibrated"] is not None
    assert tpu7x.errors["uncalibrated"].mean == pytest.approx(-0.2)
    assert tpu7x.note == "no other dense model on tpu7x: uncalibrated only, and no null"


def test_gpus_without_another_model_take_those_of_other_gpus() -> None:
    # Megatron Core is twice as slow as expected on H100, and half as slow again elsewhere.
    slow = {"h100": 0.5, "gb200": 0.8}
    factors = [
        slow.get(run.slice.chip.name, 1.0) if run.framework == "Megatron Core" and run.model.moe is None else 1.0
        for run in RUNS
    ]
    report = report_for(factors)
    by_group = {(group.by, group.name): group for group in report.groups}
    h100 = by_group["chip", "h100"].errors["calibrated"]
    # Two models on H100 calibrate each other; the one of NeMo on H200 takes the other one of all GPUs.
    assert h100 is not None
    assert h100.largest_absolute == pytest.approx(0.0, abs=1e-12)
    (nemo,) = (one for one in report.comparisons if one.run.source == "gpu-recipes NeMo")
    assert nemo.uncalibrated_s == pytest.approx(nemo.measured_s)
    # 8B: two runs on each of H100, GB200 and B200, a median of (2, 1.25, 1).
    assert nemo.calibrated_s == pytest.approx(1.25 * nemo.measured_s)
    assert by_group["chip", "h200"].note == (
        "no other dense model of a framework on h200: calibrated on other GPUs, and no null for those runs"
    )


def test_groups_and_their_statistics() -> None:
    report = report_for([0.9 if run.over_dcn else 1.2 for run in RUNS])
    groups = {(group.by, group.name): group for group in report.groups}
    names = ("dense TPU", "dense TPU, bf16", "dense TPU, single slice", "dense TPU, over DCN", "v5p", "v5p, experts")
    counts = [group.runs for name in names for group in report.groups if group.name == name]
    assert counts == [51, 45, 32, 19, 11, 2]
    over_dcn = groups["slices", "dense TPU, over DCN"].errors["uncalibrated"]
    assert over_dcn is not None
    assert (over_dcn.mean, over_dcn.mean_absolute) == (pytest.approx(-0.1), pytest.approx(0.1))
    dense = groups["cohort", "dense TPU"].errors["uncalibrated"]
    assert dense is not None
    assert dense.mean == pytest.approx((32 * 0.2 - 19 * 0.1) / 51)
    assert (dense.median_absolute, dense.largest_absolute) == (pytest.approx(0.2), pytest.approx(0.2))
    null = groups["cohort", "dense TPU"].errors["null"], groups["cohort", "dense TPU, bf16"].errors["null"]
    assert [round(100 * errors.mean_absolute, 1) for errors in null if errors is not None] == [8.6, 5.6]


def test_a_measurement_below_the_bound_is_flagged() -> None:
    bound = np.where(np.arange(len(RUNS)) == 5, 1.01, 0.9) * MEASURED
    assert summarise(RUNS, bound, 1.1 * MEASURED).beats_bound == (RUNS[5].id,)


@pytest.mark.parametrize("bad", [[1.0], [0.0] * len(RUNS), [math.nan] * len(RUNS)])
def test_predictions_must_be_one_positive_number_per_run(bad: list[float]) -> None:
    with pytest.raises(RooftopError, match=r"bound_s: .* accepted: 171 positive numbers, one per run"):
        summarise(RUNS, bad, np.ones(len(RUNS)))


def test_reasons(tmp_path: Path) -> None:
    assert load_reasons().keys() <= {run.id for run in RUNS}
    assert load_reasons(tmp_path / "none.toml") == {}
    path = tmp_path / "reasons.toml"
    path.write_text('[reasons]\n"a/b" = "stragglers"\n', encoding="utf-8")
    assert load_reasons(path) == {"a/b": "stragglers"}


# --- the verb ---


@pytest.fixture(scope="module")
def served() -> tuple[EngineReport, ServingReport]:
    """Reports on a shipped benchmark of each kind, and on the shipped runs of serving."""
    one_a_kind = {run.kind: run for run in load_engine_runs()[0]}
    priced, _ = predictions(tuple(one_a_kind.values()))
    return EngineReport(comparisons=engine_comparisons(priced), unusable=()), serving_report()


@pytest.fixture
def predictor(
    monkeypatch: pytest.MonkeyPatch,
    predicted: Mapping[str, Prediction],
    served: tuple[EngineReport, ServingReport],
) -> Iterator[None]:
    """A predictor that is 20 % too fast, 40 % on one run, and refuses mixtures of experts.

    Of the benchmarks of engines it has one a kind.
    """
    plan = predicted[RUNS[0].id].plan

    def stub(run: PublishedRun, assume: str | None) -> SimpleNamespace:
        if run.model.moe is not None:
            raise Infeasible("does not fit", "1 GB too many")
        factor = 0.6 if run.slice.num_slices == 32 and run.model.d_model == 8192 else 0.8
        seconds = {"bound_s": 0.5 * run.step_s, "uncalibrated_s": factor * run.step_s}
        return SimpleNamespace(**seconds, notes=("a stub",), plan=plan, request=request_of(run))

    module = ModuleType("rooftop.validation.predict")
    module.predict = stub  # type: ignore[attr-defined]
    module.command_of = command_of  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rooftop.validation.predict", module)
    shipped_engines, shipped_serving = served
    monkeypatch.setattr(
        "rooftop.validation.engines.engine_report", lambda path: engine_report(path) if path else shipped_engines
    )
    monkeypatch.setattr(
        "rooftop.validation.serving.serving_report", lambda path: serving_report(path) if path else shipped_serving
    )
    yield


@pytest.mark.usefixtures("predictor")
def test_validate_json(rooftop: Callable[..., Any]) -> None:
    answer = rooftop("validate", "--json")
    assert (answer.status, answer.err) == (0, "")
    rows, summary = answer.json["rows"], answer.json["summary"]
    assert (len(rows), summary["runs"], len(summary["unusable"]), summary["serving_rows"]) == (123, 123, 23 + 48, 42)
    assert sum(one["why"].endswith(": does not fit: 1 GB too many") for one in summary["unusable"]) == 48
    row = rows[0]
    assert row["error"]["uncalibrated"] == pytest.approx(-0.2)
    assert row["error"]["calibrated"] == pytest.approx(0.0, abs=1e-12)
    assert (row["notes"], row["beats_bound"]) == (["a stub"], False)
    group = next(group for group in summary["groups"] if group["name"] == "dense TPU")
    assert group["errors"]["null"]["mean_absolute"] == pytest.approx(0.086, abs=5e-4)


@pytest.mark.usefixtures("predictor")
def test_validate_prints_the_worst_runs_first(rooftop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    worst = "maxtext-v5e-table/maxtext-default-32b/v5e:16x16@32/32768x2048/bf16/full"
    monkeypatch.setattr("rooftop.validation.load_reasons", lambda: {worst: "because of the stub"})
    answer = rooftop("validate", "--top", "1")
    assert answer.status == 0
    assert answer.out.index("Predicted worst") < answer.out.index("maxtext-v5e-table/maxtext-default-32b/v5e:16x16@32")
    assert "-25.0 " in answer.out
    assert "because of the stub" in answer.out
    assert "no other dense model of a framework on h200: calibrated on other GPUs" in answer.out
    assert "123 runs compared, 71 not used; 42 rows of serving are" in answer.out
    assert "Predicted worst" not in rooftop("validate", "--top", "0").out


@pytest.mark.usefixtures("predictor")
def test_validate_is_legible_at_eighty_columns(rooftop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [line for line in rooftop("validate").out.splitlines() if line]
    wide = [line for line in lines if len(line) > 80]
    assert all(max(map(len, line.split())) > 60 for line in wide), "only names of runs, which are never broken"
    assert sum(len(line.strip()) <= 4 for line in lines) < len(lines) / 10, "names are not folded letter by letter"


@pytest.mark.usefixtures("predictor")
def test_validate_names_the_bad_cell(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(table({}, {"where_found": "b", "heads": "x"}), encoding="utf-8")
    answer = rooftop("validate", "--runs", str(path))
    assert (answer.status, answer.err) == (0, "")
    assert f"not used: {path} line 3 heads: got 'x'; accepted: " in " ".join(answer.out.split())
    assert "1 runs compared, 1 not used;" in answer.out


@pytest.mark.usefixtures("predictor")
def test_a_name_that_no_run_has_is_refused_before_anything_is_priced(
    rooftop: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def price(*_: object) -> None:
        raise AssertionError("priced")

    monkeypatch.setattr("rooftop.validation.engines.engine_report", price)
    monkeypatch.setattr("rooftop.validation.serving.serving_report", price)
    answer = rooftop("validate", "--only", "nothing-like-this")
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert "a part of the name of a run of training" in answer.err
    assert all(name in answer.err for name in ("tpu7x", "gb200", "mixtral-8x7b"))


@pytest.mark.parametrize("option", ["--chip", "--model"])
def test_an_option_that_validate_has_not_names_the_one_that_filters(rooftop: Callable[..., Any], option: str) -> None:
    answer = rooftop("validate", option, "h100")
    assert (answer.status, answer.out) == (2, "")
    assert "did you mean --only" in answer.err


def test_a_table_is_judged_by_what_ships_and_learns_when_asked(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    """Runs at half of their published rates are twice as slow as expected, unless factors are learnt from them."""
    path, source = tmp_path / "runs.csv", "MaxText v5p table"
    with (Path(accuracy.__file__).with_name("data") / "measured_runs.csv").open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        rows = [row | {"model": f"{row['model']}-other"} for row in reader if row["source"] == source]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(row | {"measured_value": str(float(row["measured_value"]) / 2)} for row in rows)
    judged, learnt = (rooftop("validate", "--runs", str(path), *more, "--json").json for more in ((), ("--learn",)))
    assert len(judged["rows"]) == len(learnt["rows"]) == 10
    for one, other in zip(judged["rows"], learnt["rows"], strict=True):
        assert one["error"]["calibrated"] == pytest.approx(-0.5, abs=0.1)
        assert abs(other["error"]["calibrated"]) < 0.2
        assert one["uncalibrated_s"] == other["uncalibrated_s"]
        assert one["interval_s"][1] < one["measured_s"]
    is_held = [row["interval_s"][0] <= row["measured_s"] <= row["interval_s"][1] for row in learnt["rows"]]
    assert sum(is_held) >= 8


_RUN = "chip,num_chips,model,fsdp,seq_len,global_batch_seqs,dtype,recompute,metric,value,unit,source"


@pytest.mark.parametrize(
    ("columns", "cells", "program", "release"),
    [
        ("", "", "rooftop", None),
        ("framework", "megatron", "megatron", None),
        ("framework,release,settings", "megatron,26.06,tp_overlap=no", "megatron", "26.06"),
        ("framework", "torchtitan", "torchtitan", None),
    ],
)
def test_a_table_names_the_framework(
    tmp_path: Path, columns: str, cells: str, program: str, release: str | None
) -> None:
    path = tmp_path / "mine.csv"
    row = "h100,8,llama3-8b,8,4096,64,bf16,full,step_time,5.0,s,our cluster"
    path.write_text(f"{_RUN},{columns}\n{row},{cells}\n" if columns else f"{_RUN}\n{row}\n")
    (run,) = load_published(path).runs
    request = request_of(run)
    assert request.framework == program
    assert release is None or request.release == release
    assert planned(request).problem.program.name == program
    assert any("framework not stated" in text for text in run.assumed) == (not columns)


@pytest.mark.parametrize(
    ("columns", "cells", "accepted"),
    [
        ("framework", "megatro", "maxtext"),
        ("framework,release", "megatron,7", "26.08"),
        ("framework", "megatron", "runs on"),
    ],
)
def test_a_framework_that_cannot_be_is_one_line(tmp_path: Path, columns: str, cells: str, accepted: str) -> None:
    path = tmp_path / "mine.csv"
    chip = "v5e" if accepted == "runs on" else "h100"
    row = f"{chip},8,llama3-8b,8,4096,64,bf16,full,step_time,5.0,s,our cluster"
    path.write_text(f"{_RUN},{columns}\n{row},{cells}\n")
    (unusable,) = load_published(path).unusable
    assert "line 2" in unusable.why and accepted in unusable.why


def test_an_unknown_chip_is_named_as_such_next_to_a_framework(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(f"{_RUN},framework\nh1000,8,llama3-8b,8,4096,64,bf16,full,step_time,5.0,s,our cluster,megatron\n")
    (unusable,) = load_published(path).unusable
    assert "line 2 chip" in unusable.why
