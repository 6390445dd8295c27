"""The book's worked problems of chapters 7 and 8, through the public API, on their exact values.

Each test is named after its row in the table of problems; what the book prints, rounded, stands beside the exact value.
Problems give their own constants, so chips' figures are overridden.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from rooftop.hardware import Slice, chip
from rooftop.models import ModelConfig, count_params, kv_bytes_per_token, load_model
from rooftop.models.counting import kv_cache_bytes
from rooftop.plan.serving.answer import plan_serving
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.search import smallest_slice
from rooftop.plan.serving.workload import ServingNumerics, ServingWorkload
from rooftop.roofline import rules
from rooftop.roofline import rules as roofline_rules

V5E = chip("v5e").replace(hbm_bytes_per_s=8.1e11)
INT8 = ServingNumerics(weights="int8", kv="int8")
LLAMA = load_model("llama3-70b")


def problem(shape: tuple[int, ...] = (4, 4), batch: int | None = 32, **more: object) -> ServingProblem:
    """LLaMA-3 70B in int8 with 8192 tokens of context, by the book's arithmetic."""
    fields: dict[str, object] = {
        "model": LLAMA,
        "slice": Slice(V5E, shape),
        "workload": ServingWorkload(prompt=8192, generate=512, batch_seqs=batch),
        "numerics": INT8,
        "bounds": "book",
    }
    return ServingProblem(**(fields | more))  # type: ignore[arg-type]


# ---- chapter 7 ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("batch", "seconds", "book"), [(4, 2.568e-3, 2.5e-3), (256, 21.05e-3, 21e-3)])
def test_i1_30b_on_v5e_4x4(batch: int, seconds: float, book: float) -> None:
    kv = batch * 100e3 * 8192
    step_s = rules.generate_step_s(kv, 30e9, 2 * batch * 30e9, 16 * 8.1e11, 16 * 1.97e14)
    assert step_s == pytest.approx(seconds, rel=5e-4)
    assert step_s == pytest.approx(book, rel=0.03)


def test_i2_a_sequence_of_llama2_13b() -> None:
    assert kv_cache_bytes(load_model("llama2-13b"), "bf16", 8192) == pytest.approx(6.71089e9, rel=1e-6)


@pytest.mark.parametrize(
    ("smaller", "exact_ms", "book_ms", "rel"),
    [
        (1, [4.99, 12.15, 20.34, 36.70, 69.44, 249.49], [4.98, 12.13, 20.30, 36.65, 69.33, 249.09], 1e-3),
        (5, [4.17, 5.60, 7.24, 10.51, 17.06, 53.1], [4.17, 5.60, 7.23, 10.50, 17.04, 52.99], 2e-3),
    ],
)
def test_i3_i4_i5_llama2_13b_on_eight_v5e(
    smaller: int, exact_ms: list[float], book_ms: list[float], rel: float
) -> None:
    batches = np.array([1.0, 8, 16, 32, 64, 240])
    kv = kv_cache_bytes(load_model("llama2-13b"), "bf16", 8192) / smaller
    # The table reads everything from HBM: no FLOPs.
    step_s = rules.generate_step_s(batches * kv, 26e9, 0.0 * batches, 8 * 8.2e11, 8 * 1.97e14)
    assert step_s * 1e3 == pytest.approx(exact_ms, rel=rel)
    assert step_s * 1e3 == pytest.approx(book_ms, rel=4e-3)
    if smaller == 1:
        assert batches / step_s == pytest.approx([200.61, 659.30, 787.99, 873.21, 923.13, 963.53], rel=4e-3)


def test_i6_tensor_parallelism_while_hbm_binds() -> None:
    assert rules.generate_tensor_limit(16384, 32, 8) == 64
    assert V5E.hbm_bytes_per_s / (2 * V5E.ici_bytes_per_s) == pytest.approx(9)


def test_i7_parameters_of_the_problem_model() -> None:
    config = ModelConfig(
        name="problem", family="llama", layers=64, d_model=4096, d_ff=16384, heads=32, kv_heads=8, d_head=256,
        vocab=32128, max_seq_len=8192, tied_embeddings=True,
    )  # fmt: skip
    count = count_params(config)
    assert count.total - count.by_component["norms"] == pytest.approx(1.83852e10, rel=1e-5)
    assert kv_bytes_per_token(config, "int8") == 262144


def test_i8_two_dimensional_weight_stationary() -> None:
    assert rules.weight_stationary_2d_chips(4, 3) == 72
    # Where the two move equal bytes: 4 D / axes against 2 D / X + 4 F X / N at the best X.
    n, d, f = 72.0, 4096.0, 4 * 4096.0
    x = np.sqrt(n * d / (2 * f))
    assert 2 * d / x + 4 * f * x / n == pytest.approx(4 * d / 3)


# ---- chapter 8 ------------------------------------------------------------------------------------------------------


def test_b1_kv_bytes_per_token() -> None:
    assert kv_bytes_per_token(LLAMA, "int8") == 163840


def test_b2_memory_and_the_smallest_slice() -> None:
    plan = plan_serving(problem()).plan
    memory = plan.memory_of_slice.to_json()
    assert memory["kv"] == pytest.approx(4.29497e10, rel=1e-5)
    assert memory["total"] == pytest.approx(1.135e11, rel=1e-4)
    assert memory["total"] / 16e9 == pytest.approx(7.09, rel=1e-3)
    assert math.ceil(memory["total"] / 16e9) == 8
    assert smallest_slice(problem(), 32) == Slice(V5E, (2, 4))


@pytest.mark.parametrize(("shape", "ms", "rate", "book_ms"), [((2, 4), 17.5, 228, 17), ((4, 4), 8.76, 228, 8.5)])
def test_b3_step_on_4x2_and_4x4(shape: tuple[int, ...], ms: float, rate: float, book_ms: float) -> None:
    plan = plan_serving(problem(shape)).plan
    assert plan.step_s * 1e3 == pytest.approx(ms, rel=1e-3)
    assert plan.lower_s == plan.step_s
    assert plan.tokens_per_s / plan.problem.slice.chips == pytest.approx(rate, rel=3e-3)
    assert plan.step_s * 1e3 == pytest.approx(book_ms, rel=0.04)


@pytest.mark.parametrize(
    ("dtype", "shape", "left"), [("bf16", (4, 4), 116e9), ("int8", (2, 4), 58e9), ("int4", (2, 2), 29e9)]
)
def test_b4_smallest_slice_by_dtype(dtype: str, shape: tuple[int, ...], left: float) -> None:
    smallest = smallest_slice(problem(numerics=ServingNumerics(weights=dtype, kv=dtype)), 1)
    assert smallest == Slice(V5E, shape)
    weights = 70e9 * ServingNumerics(weights=dtype).weight_bytes
    assert smallest.hbm_bytes - weights == pytest.approx(left)


def test_b5_reading_all_of_hbm() -> None:
    # However the memory is shared between cache and weights.
    assert rules.generate_step_s(10e9, 6e9, 0.0, 8.2e11, 1.97e14) == pytest.approx(19.51e-3, rel=1e-3)


def test_b6_tensor_parallelism() -> None:
    alpha = roofline_rules.network_intensity(V5E)
    assert roofline_rules.tensor_limit(28672, alpha, 2) == pytest.approx(26.2, rel=1e-3)
    assert roofline_rules.tensor_limit(28672, 2550, 2) == pytest.approx(22.49, rel=1e-3)
    assert rules.generate_tensor_limit(28672, 64, 8) == 56


def test_b7_one_matmul_on_4x8() -> None:
    batch, d, f, ways = 64, 8192, 28672, 32
    ici = 2 * batch * d / (2 * V5E.ici_bytes_per_s)
    hbm = 2 * d * f / (ways * V5E.hbm_bytes_per_s)
    math = 2 * batch * d * f / (ways * V5E.flops_per_s["bf16"])
    assert [ici * 1e6, hbm * 1e6, math * 1e6] == pytest.approx([11.65, 18.12, 4.77], rel=1e-3)


def test_b8_prefill() -> None:
    assert rules.prefill_s(70e9, 8192, 16 * 1.97e14, 0.4) == pytest.approx(0.9096, rel=1e-4)
    plan = plan_serving(problem(assumptions=ServingAssumptions(mfu=0.4))).plan
    # With all 70.55e9 parameters.
    assert plan.prefill_s == pytest.approx(0.9096 * 70.5537 / 70, rel=1e-4)
    assert plan.ttft_s == plan.prefill_s


def test_b9_evicted_tokens() -> None:
    assert rules.evicted_tokens_per_step(32, 8192, 4096) == 96


def test_b10_prefill_servers_per_generate_server() -> None:
    assert rules.prefill_per_generate(0.91, 0.019, 32, 512) == pytest.approx(2.993, rel=1e-3)


def test_the_plot_of_chapter_8() -> None:
    """Batch 1 takes 5.5 ms at 2k; past the critical batch throughput is flat near a token per chip and millisecond."""
    answer = plan_serving(problem(batch=None), contexts=[2048, 8192, 32768])
    points = {(point.context, point.batch): point for point in answer.front}
    assert points[2048, 1].step_s == pytest.approx(5.5e-3, rel=0.02)
    largest = max((point for point in answer.front if point.context == 2048), key=lambda point: point.batch)
    assert 120 < largest.batch < 552
    assert 0.8 < largest.tokens_per_s_per_chip / 1e3 < 1.0
    # At longer contexts the batch that would bind FLOPs no longer fits.
    assert max(batch for context, batch in points if context == 32768) < 120
