"""Achievable fractions: what the fits claim, against the compiler's table and against published measurements."""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import fmean, median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.core.ledger import COLLECTIVES
from rooftop.hardware import catalogue, chip
from rooftop.roofline.achievable import (
    MEASURED_DIMS,
    NO_MEASUREMENT,
    attention_kernels,
    attention_seconds,
    fractions,
    grouped_matmul_seconds,
    matmul_fraction,
)
from rooftop.roofline.rates import Rates

RESULTS = Path(__file__).parents[2] / "bench" / "results" / "compiler_fractions.csv"
with RESULTS.open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(line for line in file if not line.startswith("#")))
FITTED = ("v4", "v5e", "v5p", "v6e", "tpu7x")
UNMEASURED = ("v3",)

#: GEMM_SHAPES[chip]: (side of square bf16 matmuls, FLOPs/s of one device) of tpu-recipes, microbenchmarks.
MEASURED_GEMMS = {
    "v6e": ((8192, 827.474e12),),
    "tpu7x": ((4096, 892.9e12), (16384, 950.1e12), (32768, 956.4e12)),
}
sizes = st.integers(1, 2**17)


@pytest.mark.parametrize("name", catalogue())
def test_every_figure_is_a_fraction_with_a_source(name: str) -> None:
    table = fractions(name)
    assert set(table.ici) == set(COLLECTIVES)
    figures = {"hbm": table.hbm, "dcn": table.dcn}
    figures |= {f"matmul.{width}": fit.peak for width, fit in table.matmul.items()}
    by_ranks = "collectives" in table.sources
    for kind, fit in table.ici.items():
        figures |= {"collectives" if by_ranks else f"ici.{kind}": max(fit.share)}
        assert len(fit.ranks) == len(fit.start_s) == len(fit.share) and min(fit.share) > 0
    for path, value in figures.items():
        assert 0 < value <= 1
        assert table.sources[path]
        assert (table.sources[path] == NO_MEASUREMENT) <= (value == 1)
    converted = {f"convert_s.{dtype}" for dtype in table.convert_s}
    started = () if by_ranks else ("collective_start_s",)
    assert set(table.sources) == {*figures, *converted, "matmul.batch", "attention", *started}
    for dtype, seconds in table.convert_s.items():
        assert (table.sources[f"convert_s.{dtype}"] == NO_MEASUREMENT) == (seconds == 0)
    assert (table.batch is None) == (table.sources["matmul.batch"] == NO_MEASUREMENT)


@pytest.mark.parametrize("name", UNMEASURED)
def test_a_chip_without_evidence_gets_its_bound(name: str) -> None:
    assert set(fractions(name).sources.values()) == {NO_MEASUREMENT}
    assert matmul_fraction(name, 4096, 4096, 4096) == 1
    spec = chip(name)
    matrix, waits = attention_seconds(spec, 1e9, 128, 128)
    assert waits == 0
    assert matrix == pytest.approx(4 * 128 * 1e9 * spec.devices / spec.flops_per_s["bf16"])


def test_unknown_chips_and_dtypes_are_refused() -> None:
    with pytest.raises(RooftopError, match="chip"):
        fractions("v9")
    with pytest.raises(RooftopError, match="dtype on v5e"):
        matmul_fraction("v5e", 1024, 1024, 1024, "f8_e4m3")


@pytest.mark.parametrize("name", FITTED)
@given(m=sizes, k=sizes, n=sizes, larger=st.integers(1, 64))
def test_larger_matmuls_never_reach_less(name: str, m: int, k: int, n: int, larger: int) -> None:
    base = matmul_fraction(name, m, k, n)
    assert 0 < base < 1
    for bigger in ((m * larger, k, n), (m, k * larger, n), (m, k, n * larger)):
        assert matmul_fraction(name, *bigger) >= base


def test_sizes_outside_the_measured_range_count_as_the_nearest_inside() -> None:
    low, high = MEASURED_DIMS
    assert matmul_fraction("v6e", 8, high * 2, 8192) == matmul_fraction("v6e", low, high, 8192)


def test_arrays_are_priced_as_scalars_are() -> None:
    m, n = np.array([[512.0], [4096.0]]), np.array([1024.0, 8192.0, 65536.0])
    fraction = matmul_fraction("v5p", m, 8192, n)
    assert np.shape(fraction) == (2, 3)
    assert fraction[1, 2] == matmul_fraction("v5p", 4096, 8192, 65536)


@pytest.mark.parametrize("name", MEASURED_GEMMS)
def test_bare_matmuls_reach_what_was_measured(name: str) -> None:
    spec, fit = chip(name), fractions(name).matmul["16-bit"]
    for side, rate in MEASURED_GEMMS[name]:
        bare = matmul_fraction(name, side, side, side) / fit.layer
        assert bare == pytest.approx(rate * spec.devices / spec.flops_per_s["bf16"], rel=0.06)


@pytest.mark.parametrize("name", FITTED)
@pytest.mark.parametrize("width", ["16-bit", "8-bit"])
def test_the_fit_reproduces_what_the_compiler_expects_of_bare_matmuls(name: str, width: str) -> None:
    wide = [row for row in ROWS if (row["section"], row["chip"]) == ("matmul", name)]
    rows = [row for row in wide if (row["dtype"] == "bf16") == (width == "16-bit")]
    assert bool(rows) == (fractions(name).sources[f"matmul.{width}"] != NO_MEASUREMENT)
    errors = []
    for row in rows:
        fraction = matmul_fraction(name, int(row["m"]), int(row["k"]), int(row["n"]), row["dtype"])
        errors.append(float(fraction) / fractions(name).matmul[width].layer / float(row["fraction"]) - 1)
    assert not rows or np.mean(np.abs(errors)) < 0.07


@pytest.mark.parametrize("name", FITTED)
def test_the_fit_reproduces_what_the_compiler_expects_of_batches(name: str) -> None:
    spec, layer = chip(name), fractions(name).matmul["16-bit"].layer
    rates, errors, alone = Rates.of(spec), [], []
    for row in (row for row in ROWS if (row["section"], row["chip"]) == ("batched", name)):
        sizes, experts = [int(row[dim]) for dim in "mkn"], int(row["detail"].split("=")[1])
        seconds = int(row["cycles"]) / spec.clock_hz / layer
        errors.append(float(rates.matmul_s(*sizes, "bf16", experts)) / seconds - 1)
        alone.append(experts * float(rates.matmul_s(*sizes, "bf16")) / seconds - 1)
    assert len(errors) == 30
    assert np.mean(np.abs(errors)) < 0.12
    # As so many matmuls of their own they are priced less well.
    assert np.mean(np.abs(alone)) > 1.3 * np.mean(np.abs(errors))


@pytest.mark.parametrize("name", ["v5p", "tpu7x"])
def test_grouped_kernels_have_the_median_share_of_the_measured_ones(name: str) -> None:
    with RESULTS.with_name("grouped_matmuls.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["chip"] == name]
    fit = fractions(name).grouped
    assert fit is not None
    for of in ("forward", "inputs", "weights"):
        shapes = [row for row in rows if row["pass"] == of]
        assert len(shapes) > 20
        assert getattr(fit, of) == pytest.approx(median(float(row["executed"]) for row in shapes), abs=6e-4)
        seconds = [
            float(grouped_matmul_seconds(
                chip(name), of, float(row["rows"]) + (float(row["groups"]) - 1) * float(row["tile_rows"]),
                float(row["k"]), float(row["n"]), "bf16",
            ))
            for row in shapes
        ]  # fmt: skip
        # Tiles on v5p were timed on one of two cores.
        cores = {"v5p": 2, "tpu7x": 1}[name]
        off = [cores * second / float(row["ms"]) * 1e3 - 1 for second, row in zip(seconds, shapes, strict=True)]
        assert fmean(map(abs, off)) < {"v5p": 0.07, "tpu7x": 0.15}[name]


def test_a_chip_without_measured_kernels_has_no_grouped_matmuls() -> None:
    with pytest.raises(RooftopError, match="grouped matmuls"):
        grouped_matmul_seconds(chip("v5e"), "forward", 1024.0, 4096, 4096, "bf16")


def test_a_batch_without_a_fit_is_so_many_matmuls() -> None:
    rates = Rates.of(chip("v5e"))
    assert rates.matmul_s(1024, 2048, 1408, "int8", 8) == 8 * rates.matmul_s(1024, 2048, 1408, "int8")
    together = rates.matmul_s(np.array([1024.0, 1024.0]), 2048, 1408, "bf16", np.array([1.0, 8.0]))
    assert together.tolist() == [rates.matmul_s(1024, 2048, 1408, "bf16"), rates.matmul_s(1024, 2048, 1408, "bf16", 8)]


@pytest.mark.parametrize("name", FITTED)
def test_the_matmuls_of_a_whole_layer_take_what_the_compiler_expects(name: str) -> None:
    spec = chip(name)
    rows = [row for row in ROWS if (row["section"], row["chip"]) == ("layer", name)]
    assert rows
    for row in rows:
        tokens, d, f = int(row["m"]), int(row["k"]), int(row["n"])
        heads, kv_heads = (int(entry.split("=")[1]) for entry in row["detail"].split()[:2])
        widths = [(d, heads * 128), (d, kv_heads * 128), (d, kv_heads * 128), (heads * 128, d), (d, f), (d, f), (f, d)]
        shapes = [shape for k, n in widths for shape in ((tokens, k, n), (tokens, n, k), (k, tokens, n))]
        ideal = sum(2 * m * k * n / float(matmul_fraction(name, m, k, n)) for m, k, n in shapes)
        seconds = ideal * spec.devices / spec.flops_per_s["bf16"]
        assert seconds == pytest.approx(int(row["cycles"]) / spec.clock_hz, rel=0.12)


def kernel_cycles(row: dict[str, str], stall: float = 230.0, seq: int = 4096) -> float:
    """Cycles of one core for the causal scores of one head, as docs/evidence/achievable.md makes them from a row."""
    block = int(row["m"])
    detail = dict(entry.split("=") for entry in row["detail"].split())
    side = seq // block
    steps = side * side * (float(detail["step"]) + stall) + side * float(detail["edge"])
    return side * (side + 1) / 2 * float(row["cycles"]) + steps


@pytest.mark.parametrize("name", FITTED)
def test_attention_takes_what_the_compiled_kernels_take(name: str) -> None:
    spec, fit = chip(name), fractions(name).attention
    assert fit is not None
    scores = 4096 * (4096 + fit.block) / 2
    for d_qk, d_v in ((64, 64), (128, 128), (192, 128), (256, 256)):
        cycles = {}
        for row in ROWS:
            chosen = (row["section"], row["chip"], row["m"], row["n"]) == ("attention", name, str(fit.block), str(d_qk))
            if chosen:
                cycles[row["case"]] = min(kernel_cycles(row), cycles.get(row["case"], np.inf))
        for backward, kernels in ((False, ("forward",)), (True, ("dq", "dkv"))):
            seconds = sum(attention_seconds(spec, scores, d_qk, d_v, backward=backward))
            compiled = sum(cycles[kernel] for kernel in kernels) * spec.devices / spec.cores / spec.clock_hz
            assert seconds == pytest.approx(compiled, rel=0.14)


RECIPE_ROWS = [row for row in ROWS if row["section"] == "recipes"]


def test_kernels_of_recipes_are_those_that_were_compiled() -> None:
    compiled = {(row["chip"], row["detail"].split()[0]) for row in RECIPE_ROWS}
    assert compiled == {(name, kernels) for name in catalogue() for kernels in fractions(name).kernels}
    assert all(fit.source and fit.block == 2048 for name in catalogue() for fit in fractions(name).kernels.values())


@pytest.mark.parametrize("row", RECIPE_ROWS, ids=lambda row: f"{row['detail'].split()[0]}-{row['case']}")
def test_kernels_of_recipes_take_what_the_compiled_ones_take(row: dict[str, str]) -> None:
    name, spec = row["detail"].split()[0], chip(row["chip"])
    detail = dict(entry.split("=") for entry in row["detail"].split()[1:])
    seconds = sum(attention_seconds(spec, 1024.0, 128, 128, backward=row["case"] == "fused", fused=True, kernels=name))
    compiled = float(detail["cycles_per_1024"]) * spec.devices / spec.cores / spec.clock_hz
    assert seconds == pytest.approx(compiled, rel=0.005)
    # All cycles of a kernel are those of its blocks, and those around them: a fifth of them at most.
    block = int(row["cycles"]) / (int(row["m"]) * int(row["k"]) / 1024)
    assert block < float(detail["cycles_per_1024"]) < 1.25 * block


def test_only_kernels_that_were_compiled_for_a_chip_have_a_time() -> None:
    with pytest.raises(RooftopError, match="attention kernels"):
        attention_kernels("v5e", "jax-2048")


def test_published_kernel_timings_follow_from_the_table() -> None:
    """Forward splash attention of 8 heads of 128 over 8192 tokens, blocks of 512 (marin pull request 6330)."""
    for name, measured_s in (("v5p", 0.778e-3), ("v4", 1.52e-3)):
        (row,) = [
            row
            for row in ROWS
            if (row["section"], row["chip"], row["case"], row["m"], row["n"])
            == ("attention", name, "forward", "512", "128")
        ]
        seconds = 8 * kernel_cycles(row, seq=8192) / chip(name).cores / chip(name).clock_hz
        assert seconds == pytest.approx(measured_s, rel=0.05)


@pytest.mark.parametrize("name", FITTED)
def test_no_attention_kernel_beats_the_matrix_unit(name: str) -> None:
    spec = chip(name)
    for backward, matmuls in ((False, 4), (True, 14)):
        for size in (64, 128, 256):
            matrix, waits = attention_seconds(spec, 1e9, size, size, backward=backward)
            assert waits > 0
            assert matrix >= matmuls * size * 1e9 * spec.devices / spec.flops_per_s["bf16"] * (1 - 1e-12)


def test_heads_of_128_half_fill_the_wide_matrix_units() -> None:
    for name, same in (("v6e", True), ("tpu7x", True), ("v5p", False)):
        half = attention_seconds(chip(name), 1e9, 128, 128)
        assert (half == attention_seconds(chip(name), 1e9, 256, 256)) is same


def test_attention_is_linear_in_its_scores() -> None:
    scores = np.array([1e6, 3e6])
    for part in attention_seconds(chip("v6e"), scores, 128, 128, backward=True):
        assert part[1] == pytest.approx(3 * part[0])
