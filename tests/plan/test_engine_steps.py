"""Steps of serving engines on GPUs: their kernels, what overheads add, and plans that are made of them."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

import rooftop as package
from rooftop.core.errors import RooftopError
from rooftop.frameworks.engines import Overheads
from rooftop.hardware import Slice
from rooftop.hardware import chip as catalogue_chip
from rooftop.models import load_model
from rooftop.plan.evidence import MeasuredRatio, Question, evidence_for, measured_ratios
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.engines.kernels import engine_kernels
from rooftop.plan.serving.engines.rows import launches
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.times.clients import engine_room_tokens
from rooftop.plan.serving.workload import ServingNumerics, ServingWorkload


def _problem(model: str = "llama3.1-70b", on: str = "h100:4", **changes: Any) -> ServingProblem:
    axes = changes.pop("axes", {"tensor": int(on.split(":")[1])})
    return ServingProblem(
        model=load_model(model),
        slice=Slice.parse(on),
        workload=ServingWorkload(prompt=1024, generate=1024),
        numerics=ServingNumerics(weights="f8_e4m3", flops="f8_e4m3"),
        assumptions=ServingAssumptions(engine="vllm", overheads=Overheads(**changes) if changes else None),
        mode="interleaved",
        axes=axes,
    )


@pytest.mark.parametrize(
    ("engine", "chip"),
    [*product(("vllm", "trtllm"), ("h100", "b200", "h200", "gb200", "b300", "a100")), ("vllm-triton", "b200")],
)
def test_kernels_are_slower_than_peak_and_faster_than_a_tenth_of_it(engine: str, chip: str) -> None:
    kernels = engine_kernels(engine, catalogue_chip(chip))
    for fits in (kernels.matmul, kernels.attention, {"latent": kernels.latent}):
        for fit in fits.values():
            assert 0.25 < fit.hbm <= 1
            assert 0.25 < fit.peak <= 1
            assert 1e-6 < fit.start_s < 50e-6


def test_an_all_reduce_takes_as_long_as_was_measured_and_longer_with_more_bytes() -> None:
    kernels = engine_kernels("vllm", catalogue_chip("h100"))
    assert kernels.all_reduce_s(np.array([65536.0]), 8) == pytest.approx(6.4e-6)
    sizes = np.geomspace(1e3, 1e10, 50)
    for ranks in (2, 4, 8):
        assert (np.diff(kernels.all_reduce_s(sizes, ranks)) >= 0).all()
    assert kernels.all_reduce_s(1e6, np.array([1, 2, 8])).tolist()[0] == 0.0
    # Twice the largest payload takes twice as long.
    largest = kernels.payloads[-1]
    assert kernels.all_reduce_s(2 * largest, 4) == pytest.approx(2 * kernels.all_reduce_s(largest, 4))


def test_a_step_is_longer_than_its_bound_and_its_kernels_and_gaps() -> None:
    problem = _problem(gap_s=0.0)
    (placement,) = problem.generate_placements()
    step = problem.generate(placement, 32.0)
    assert step.expected_s > max(float(step.total(name)) for name in ("hbm", "mxu", "ici"))
    gap_s = 1e-6
    slower = replace(problem, assumptions=replace(problem.assumptions, overheads=Overheads(gap_s=gap_s))).generate(
        placement, 32.0
    )
    kernels = float(launches(problem.phase("generate", placement, 1.0)))
    # 80 layers of 15 kernels: 4 matmuls, each with one that quantises, 5 others, and 2 sums.
    assert kernels == 80 * 15
    assert slower.expected_s - step.expected_s == pytest.approx(kernels * gap_s)


def test_a_short_prefill_waits_for_the_host() -> None:
    problem = _problem(gap_s=0.0, host_s=50e-6)
    (placement,) = problem.generate_placements()
    kernels = float(launches(problem.phase("generate", placement, 1.0)))
    assert problem.prefill(placement, 16.0).expected_s == pytest.approx(kernels * 50e-6, rel=0.02)
    assert problem.prefill(placement, 8192.0).expected_s > 1.5 * kernels * 50e-6


def test_steps_over_arrays_are_those_one_by_one() -> None:
    problem = _problem()
    (placement,) = problem.generate_placements()
    batches, contexts, prompts = (
        np.array([1.0, 16.0, 64.0]),
        np.array([100.0, 2000.0, 500.0]),
        np.array([64.0, 1024.0, 8000.0]),
    )
    together = problem.mixed_s(placement, prompts, batches, contexts)
    alone = [problem.mixed_s(placement, p, b, c) for p, b, c in zip(prompts, batches, contexts, strict=True)]
    assert together == pytest.approx(np.array(alone, dtype=np.float64))
    generated = problem.generate_s(placement, batches, contexts)
    assert generated == pytest.approx(
        [float(problem.generate(placement, b, c).expected_s) for b, c in zip(batches, contexts, strict=True)]
    )


def test_attention_data_parallelism_has_sequences_of_its_own_on_each_gpu() -> None:
    tensor, expert = (_problem("minimax-m2.5", axes=axes, gap_s=0.0) for axes in ({"tensor": 4}, {"expert": 4}))
    core = {}
    for name, problem in (("tensor", tensor), ("expert", expert)):
        (placement, *_) = problem.generate_placements()
        rows = {row.scope: row for row in problem.generate(placement, 64.0).rows}
        core[name] = rows["layers/attn/core"]
        kinds = {one.kind for row in rows.values() for one in row.collectives}
        assert kinds == ({"all_reduce"} if name == "tensor" else {"all_gather", "reduce_scatter"})
    # The same KV in all: a quarter of the heads of all sequences, or all heads of a quarter of them.
    assert core["tensor"].hbm_bytes == pytest.approx(core["expert"].hbm_bytes)


def test_a_plan_for_an_engine_has_its_evidence_and_no_program() -> None:
    result = package.plan_serving(
        "llama3.1-70b", on="h100:4", engine="vllm", weights_dtype="fp8", prompt=1024, generate=1024,
        batching="interleaved", batch_seqs=32,
    )  # fmt: skip
    data = result.to_json()
    assert (data["assumptions"]["engine"], data["executable"]) == ("vllm", False)
    assert data["obstacles"] == ["priced for vLLM, to be run by vLLM; `rooftop serve` does not run it"]
    result.raise_if_infeasible()
    low, high = data["evidence"]["tpot_s"]
    # Measured: 16.49 ms with 32 clients.
    assert low < 0.01649 < high
    assert low < data["tpot_s"] < high < 2 * low
    assert "TPOT of engines under load on GPUs: 4 models, TensorRT-LLM, vLLM" in data["evidence"]["decode"]["text"]
    again = ServingPlan.from_json(data)
    assert (again.problem.assumptions.engine, again.tpot_s) == ("vllm", pytest.approx(result.plan.tpot_s))
    own = package.plan_serving("llama3.1-70b", on="h100:4", prompt=1024, generate=1024, batch_seqs=32).to_json()
    assert own["evidence"]["decode"]["level"] == "estimate"


def test_prompts_of_an_engine_are_prefilled_in_steps_that_generate() -> None:
    plan = package.plan_serving(
        "llama3.1-70b", on="h100:4", engine="vllm", weights_dtype="fp8", prompt=1024, generate=1024,
        batching="interleaved", batch_seqs=32,
    ).plan  # fmt: skip
    steps = plan.problem.mixed_s(plan.generate_on, 1024.0, 32.0, plan.problem.step_context) - plan.step_s
    assert plan.tpot_s == pytest.approx(plan.step_s + 31 / 1024 * steps)
    assert steps < plan.prefill_s


UNDER_LOAD: dict[str, Any] = {"prompt": 1024, "generate": 1024, "concurrency": 64, "weights_dtype": "fp8"}


def test_clients_that_wait_give_the_load_of_a_plan() -> None:
    plan = package.plan_serving("llama3.1-70b", on="h100:4", engine="vllm", shortest=0.8, **UNDER_LOAD).plan
    load = plan.problem.workload.load
    assert load is not None
    assert (load.concurrency, load.requests, plan.problem.mode) == (64, 640, "interleaved")
    assert plan.batch == 64
    # Measured: 19.5 and 256 ms.
    assert plan.tpot_s == pytest.approx(0.0195, rel=0.15)
    assert plan.ttft_s == pytest.approx(0.256, rel=0.25)
    again = ServingPlan.from_json(plan.to_json())
    assert (again.ttft_s, again.tpot_s) == (pytest.approx(plan.ttft_s), pytest.approx(plan.tpot_s))
    more = package.plan_serving(
        "llama3.1-70b", on="h100:4", engine="vllm", shortest=0.8, **UNDER_LOAD | {"concurrency": 128}
    ).plan
    assert more.tpot_s > plan.tpot_s
    assert more.ttft_s > plan.ttft_s


def test_settings_of_an_engine_change_its_plan() -> None:
    job: dict[str, Any] = {"on": "h100:4", "engine": "vllm", **UNDER_LOAD}
    plans = {
        text: package.plan_serving("llama3.1-70b", engine_settings=text, **job).plan
        for text in (None, "cuda_graphs=no", "memory=0.3", "step_tokens=512")
    }
    usual = plans[None]
    # 80 layers of 15 kernels that the host launches one by one.
    assert plans["cuda_graphs=no"].step_s == pytest.approx(80 * 15 * 40e-6, rel=0.02)
    assert plans["memory=0.3"].under_load.active < usual.under_load.active == 64
    assert plans["memory=0.3"].ttft_s > 2 * usual.ttft_s
    assert plans["memory=0.3"].evidence.ttft_s is None
    assert plans["step_tokens=512"].ttft_s != pytest.approx(usual.ttft_s)
    assert plans["memory=0.3"].to_json()["assumptions"]["settings"] == {"memory": "0.3"}


def test_an_engine_has_room_for_a_large_model_with_latents_in_four_bits() -> None:
    """A scale of NVFP4 has one byte: with two, the weights of Kimi-K2 leave no room on four B200, and clients queue."""
    plan = package.plan_serving(
        "kimi-k2", on="b200:4", engine="vllm", weights_dtype="f4_e2m1", prompt=8192, generate=1024, concurrency=64,
        mesh="tensor=4",
    ).plan  # fmt: skip
    memory = plan.memory
    experts = 60 * 384 * 3 * 7168 * 2048
    assert float(memory.scales) == pytest.approx(experts / 16 / 4, rel=0.05)
    assert plan.under_load is not None
    assert plan.under_load.active == 64
    # Each GPU has all latents: 576 numbers in FP8 a layer.
    room = engine_room_tokens(plan.problem, plan.generate_on, plan.problem.engine)
    left = 0.9 * plan.problem.capacity - float(memory.weights + memory.scales + memory.activations)
    assert room == pytest.approx(left / (61 * 576), rel=0.15)


@pytest.mark.parametrize(("chip", "like"), [("h200", "h100"), ("gb200", "b200"), ("b300", "b200"), ("h800", "h100")])
def test_a_chip_without_kernels_has_those_of_another_at_its_own_rates(chip: str, like: str) -> None:
    one, other = (engine_kernels("vllm", catalogue_chip(name)) for name in (chip, like))
    assert (one.measured_on, other.measured_on) == (like, like)
    assert one.matmul == other.matmul
    slower = catalogue_chip(like).ici_bytes_per_s / catalogue_chip(chip).ici_bytes_per_s
    assert one.all_reduce_s(1e8, 8) == pytest.approx(slower * other.all_reduce_s(1e8, 8), rel=0.05)
    assert one.all_reduce_s(1024, 8) == other.all_reduce_s(1024, 8)


@pytest.mark.parametrize(("on", "level"), [("h200:4", "expected"), ("gb200:4", "estimate"), ("a100:8", "estimate")])
def test_times_on_chips_without_benchmarks_say_so(on: str, level: str) -> None:
    weights = "bf16" if on.startswith("a100") else "fp8"
    data = package.plan_serving(
        "llama3.1-70b", on=on, engine="vllm", **UNDER_LOAD | {"weights_dtype": weights}
    ).to_json()["evidence"]
    assert data["decode"]["level"] == level
    assert data["decode"]["unlike"] != []
    assert (data["tpot_s"] is None) == (level == "estimate")


def test_an_engine_without_benchmarks_has_estimates() -> None:
    plan = package.plan_serving("llama3.1-70b", on="h100:4", engine="sglang", **UNDER_LOAD).plan
    vllm = package.plan_serving("llama3.1-70b", on="h100:4", engine="vllm", **UNDER_LOAD).plan
    assert plan.tpot_s == pytest.approx(vllm.tpot_s, rel=0.01)
    assert (plan.evidence.decode.level, plan.evidence.tpot_s) == ("estimate", None)
    assert "no benchmark of SGLang" in plan.evidence.decode.text


def test_formats_are_those_of_the_engine_by_default() -> None:
    for engine, on, weights, kv, group in (
        ("vllm", "h100:4", "f8_e4m3", "bf16", None),
        ("vllm", "b200:4", "f8_e4m3", "f8_e4m3", None),
        ("vllm", "b200:4", "bf16", "bf16", None),
        ("trtllm", "h100:4", "f8_e4m3", "f8_e4m3", None),
        ("trtllm", "b200:4", "f4_e2m1", "f8_e4m3", 16),
    ):
        numerics = package.plan_serving(
            "llama3.1-70b", on=on, engine=engine, weights_dtype=weights, prompt=1024, batch_seqs=8
        ).plan.problem.numerics
        assert (numerics.kv, numerics.weight_group, numerics.flops) == (kv, group, weights)
        assert numerics.group_scale_bytes == (1.0 if group else 2.0)


@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ({"on": "v5e:4x4"}, "one that runs on v5e: rooftop"),
        ({"engine": "abacus"}, "vllm"),
        ({"weights_dtype": "int8"}, "bf16, f8_e4m3"),
        ({"kv_dtype": "int8"}, "bf16, f8_e4m3"),
        ({"mfu": 0.4}, "no --mfu"),
        ({"draft": "llama3.2-1b"}, "no --draft"),
        ({"bounds": "book"}, "usable"),
        ({"mesh": "context=4"}, "tensor and expert axes alone"),
        ({"release": "9"}, "one of 0.12.0"),
        ({"engine_settings": "balance=yes"}, "one of cuda_graphs, memory, step_tokens"),
        ({"engine_settings": "memory=0"}, "a share above 0"),
        ({"engine_settings": "step_tokens=0"}, "set step_tokens"),
        ({"engine": "rooftop", "engine_settings": "memory=0.5"}, "nothing with rooftop"),
        ({"engine": "rooftop", "release": "1"}, "nothing with rooftop"),
        ({"engine": "rooftop", "batch_seqs": None, "concurrency": 4}, "this with --engine vllm"),
        ({"concurrency": 4}, "this without --concurrency"),
        ({"shortest": 0.5}, "this with --concurrency"),
        ({"batch_seqs": None, "concurrency": 0}, "concurrency"),
        ({"batch_seqs": None, "concurrency": 4, "shortest": 0}, "a share above 0"),
        ({"batch_seqs": None, "concurrency": 4, "on": "h100"}, "this with one slice"),
    ],
)
def test_engines_refuse_what_they_have_no_kernels_for(options: dict[str, Any], accepted: str) -> None:
    arguments: dict[str, Any] = {"on": "h100:4", "engine": "vllm", "prompt": 1024, "batch_seqs": 8} | options
    with pytest.raises(RooftopError) as caught:
        package.plan_serving("llama3.1-70b", **arguments)
    assert accepted in str(caught.value)


def test_the_fleet_of_an_engine_is_searched() -> None:
    result = package.plan_serving(
        "llama3.1-8b", on="h100", engine="vllm", prompt=1024, generate=256, requests_per_second=20, ttft="500ms"
    )
    assert result.recommendation is not None
    assert result.plan.problem.numerics.weights in ("bf16", "f8_e4m3")
    assert result.plan.problem.numerics.flops == result.plan.problem.numerics.weights


def _latency(**changes: Any) -> MeasuredRatio:
    fields: dict[str, Any] = {
        **{"phase": "tpot", "chip": "h100", "family": "gpu", "kind": "dense", "framework": "vLLM", "model": "a"},
        **{"seq_len": 1024, "over_dcn": False, "ratio": 1.0, "run": "one"},
    }
    return MeasuredRatio(**{**fields, **changes})


def test_benchmarks_of_all_gpus_count_together_and_each_model_alike() -> None:
    many = [_latency(model="a", ratio=ratio, chip="b200") for ratio in np.linspace(0.9, 1.1, 401)]
    few = [_latency(model="b", ratio=ratio) for ratio in np.linspace(1.9, 2.1, 5)]
    question = Question(phase="tpot", chip="h100", family="gpu", kind="dense", seq_len=1024, over_dcn=False)
    known = evidence_for(question, [*many, *few])
    assert known.factor is not None
    # Half of the weight is on either model, although one has eighty times the runs.
    assert known.factor[0] < 0.95
    assert known.factor[1] > 2.0
    assert (known.models, known.unlike) == (2, ())
    elsewhere = evidence_for(replace(question, kind="experts"), [*many, *few])
    assert elsewhere.unlike == ("none of mixtures of experts on h100",)
    assert elsewhere.factor is not None
    assert elsewhere.factor[1] / elsewhere.factor[0] > known.factor[1] / known.factor[0]


def test_the_evidence_of_engines_is_on_both_chips_and_of_both_kinds() -> None:
    ratios = measured_ratios("engine_evidence.csv")
    kinds = {(one.phase, one.chip, one.kind) for one in ratios}
    assert kinds >= {
        (phase, chip, kind) for phase in ("tpot", "ttft") for chip in ("h100", "b200") for kind in ("dense", "experts")
    }
