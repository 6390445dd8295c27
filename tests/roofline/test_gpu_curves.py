"""Curves of GPUs: they reproduce the published measurements that they were fitted to, and stay below every peak."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.arrays import Mesh
from rooftop.core.ledger import COLLECTIVES
from rooftop.hardware import Slice, chip
from rooftop.roofline.achievable import NO_MEASUREMENT, attention_seconds, fractions, matmul_fraction
from rooftop.roofline.collectives import price
from rooftop.roofline.rates import Rates

RESULTS = Path(__file__).parents[2] / "bench" / "evidence" / "gpu_microbenchmarks.csv"
with RESULTS.open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(line for line in file if not line.startswith("#")))
GPUS = ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300")
#: Where figures have kernels of both kinds, causal ones were fitted, but for heads of 64.
FITTED_HEADS = {64: "attention fwd cuDNN", 128: "attention fwd causal cuDNN", 256: "attention fwd causal cuDNN"}


def measured(name: str, what: str, dtype: str | None = None) -> list[npt.NDArray[np.float64]]:
    """Columns batch, a, b, c and value of the measurements of one kind."""
    rows = [row for row in ROWS if (row["chip"], row["what"]) == (name, what) and dtype in (None, row["dtype"])]
    return list(np.array([[float(row[key] or 0) for key in ("batch", "a", "b", "c", "value")] for row in rows]).T)


def error(seconds: npt.NDArray[np.float64], expected: npt.NDArray[np.float64]) -> float:
    """The mean relative error."""
    return float(np.abs(expected / seconds - 1).mean())


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("dtype", ["bf16", "f8"])
def test_matmuls_take_as_long_as_cublas_takes(name: str, dtype: str) -> None:
    columns = measured(name, "matmul", dtype)
    width, rate = ("16-bit", "bf16") if dtype == "bf16" else ("8-bit", "f8_e4m3")
    if not columns:
        assert fractions(name).sources[f"matmul.{width}"] == NO_MEASUREMENT
        return
    batch, m, k, n, tflops = columns
    one = batch == 1
    m, k, n, tflops = (column[one] for column in (m, k, n, tflops))
    assert len(m) >= 224
    flops = 2 * m * k * n
    expected = flops / (matmul_fraction(name, m, k, n, rate) * chip(name).flops_per_s[rate])
    # TensorRT-LLM quantises the left operand: two bytes read, one written.
    expected = expected + 3 * m * k / (fractions(name).hbm * chip(name).hbm_bytes_per_s) * (dtype == "f8")
    assert error(flops / tflops / 1e12, expected) < 0.1


@pytest.mark.parametrize("name", ["h100", "b200"])
def test_batches_of_matmuls_take_as_long_as_was_measured(name: str) -> None:
    batch, m, k, n, tflops = measured(name, "matmul", "bf16")
    many = (batch > 1) & (m >= 1024) & (k >= 1024) & (n >= 1024)
    batch, m, k, n, tflops = (column[many] for column in (batch, m, k, n, tflops))
    expected = Rates.of(chip(name)).matmul_s(m, k, n, "bf16", batch)
    assert len(m) == 54
    assert error(batch * 2 * m * k * n / tflops / 1e12, np.asarray(expected)) < 0.13


@pytest.mark.parametrize("name", GPUS)
def test_attention_takes_as_long_as_was_measured(name: str) -> None:
    """Where tokens are many: the fits leave starts of 20 to 40 us out."""
    if name in ("h100", "h200"):
        parts = [(size, measured("h100", what)) for size, what in FITTED_HEADS.items()]
    else:
        parts = [(int(size), measured(name, "attention fwd causal")) for size in (64, 128, 256)]
    for size, (batch, length, heads, sizes, tflops) in parts:
        chosen = (sizes == size) & (batch * heads * length**2 > 2**31)
        batch, length, heads, tflops = (column[chosen] for column in (batch, length, heads, tflops))
        causal = not (name in ("h100", "h200") and size == 64)
        queries = batch * heads * length
        useful = 4 * size * queries * length * (0.5 if causal else 1)
        scores = queries * ((length + 128) / 2 if causal else length)
        expected = sum(attention_seconds(chip(name), scores, size, size, queries=queries))
        if len(batch):
            assert error(useful / tflops / 1e12, np.asarray(expected)) < 0.09


def test_backward_attention_takes_as_long_as_cudnn_takes() -> None:
    batch, length, heads, size, tflops = measured("h100", "attention bwd cuDNN")
    queries = batch * heads * length
    expected = sum(attention_seconds(chip("h100"), queries * length, 128, 128, backward=True, queries=queries))
    # Next to causal forward kernels, which are slower: these are not causal.
    assert 1.05 < float(np.mean(expected / (10 * 128 * queries * length / tflops / 1e12))) < 1.15
    assert set(size) == {128}


@pytest.mark.parametrize("name", GPUS)
@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_collectives_take_as_long_as_nccl_takes(name: str, kind: str) -> None:
    _, ranks, nbytes, _, microseconds = measured(name, kind)
    for count in sorted(set(ranks)):
        chosen = ranks == count
        mesh = Mesh.from_layout(Slice.parse(f"{name}:{int(count)}"), "fsdp=node")
        expected = price(kind, mesh.span("fsdp")).expected_s(nbytes[chosen], Rates.of(chip(name)).network(kind))
        assert error(microseconds[chosen] * 1e-6, np.asarray(expected)) < 0.2


@pytest.mark.parametrize("name", [*GPUS, "h100-96gb", "h100-96gb-500w", "h800"])
@given(kind=st.sampled_from(COLLECTIVES), ranks=st.integers(1, 100))
def test_collectives_between_measured_ranks_lie_between_them(name: str, kind: str, ranks: int) -> None:
    fit = fractions(name).ici[kind]
    start_s, share = fit.at(ranks)
    least_s, most = fit.at(None)
    assert least_s <= start_s <= max(fit.start_s)
    assert min(fit.share) <= share <= most <= 1


def test_a_chip_like_another_has_its_curves() -> None:
    assert fractions("h800").matmul == fractions("h100").matmul
    assert fractions("h100-96gb-500w").attention == fractions("h100").attention
