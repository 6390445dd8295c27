"""Serving rows of the table of published runs: what is read, how far predictions are off, and what beats its bound."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from rooftop.validation.serving import SERVING_LEVELS, ServingComparison, ServingReport, serving_report
from rooftop.validation.serving_runs import load_serving
from rooftop.validation.table import COLUMNS

Run = Callable[..., Any]
Decode = dict[tuple[int | None, int, int | None], ServingComparison]
ROW = {
    **{"source": "mine", "model": "small", "layers": "16", "d_model": "2048", "d_ff": "8192", "heads": "16"},
    **{"kv_heads": "8", "d_head": "128", "vocab": "32000", "seq_len": "1024", "global_batch_seqs": "16"},
    **{"chip": "v5e", "num_chips": "4", "dp": "1", "fsdp": "1", "tp": "4", "pp": "1", "phase": "decode"},
    **{"dtype": "int8 weights, int8 kv", "measured_metric": "step_time", "measured_value": "2", "unit": "ms"},
    **{"where_found": "here", "mlp_matrices": "3", "tied_embeddings": "no"},
}


def table(tmp_path: Path, *changes: Mapping[str, str]) -> Path:
    """A table with one row per change of ROW."""
    file = tmp_path / "mine.csv"
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.DictWriter(out, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(ROW | change for change in changes)
    return file


@pytest.fixture(scope="module")
def report() -> ServingReport:
    """Report on the rows of the package's own table."""
    return serving_report()


@pytest.fixture(scope="module")
def decode(report: ServingReport) -> Decode:
    """Rows of decode by tensor parallelism, batch and context."""
    return {
        (one.run.mesh.get("tensor") if one.run.mesh else None, one.run.batch, one.run.context): one
        for one in report.comparisons
        if one.run.phase == "decode"
    }


def test_every_serving_row_is_compared(report: ServingReport) -> None:
    counts = {
        phase: sum(one.run.phase == phase for one in report.comparisons) for phase in ("decode", "prefill", "serve")
    }
    # 36 rows of the v5e-16 table, 12 of which give the same runs' HBM utilisation; six of JetStream.
    assert counts == {"decode": 12, "prefill": 12, "serve": 6}
    assert report.unusable == ()
    assert sum(len(one.run.lines) for one in report.comparisons) == 42


def test_decode_at_2048_is_within_8_percent(decode: Decode) -> None:
    for tensor, batch in ((16, 8), (16, 32), (8, 8), (8, 32)):
        one = decode[tensor, batch, 2048]
        assert one.expected_s / one.run.measured_s == pytest.approx(1, abs=0.08)
        assert not one.beats_bound
    # max(HBM, FLOPs) alone misses the worst of them by a fifth.
    assert decode[16, 32, 2048].error("max_hbm_flops") < -0.19


def test_measurements_below_their_bound_are_flagged_with_a_reason(decode: Decode) -> None:
    beaten = {key for key, one in decode.items() if one.beats_bound}
    assert beaten == {(16, 8, 8192), (16, 32, 8192), (8, 32, 8192)}
    for key in beaten:
        one = decode[key]
        assert one.bound_s > one.run.measured_s
        assert one.implied_context is not None
        assert one.implied_context < 0.6 * 8192
        assert one.reason is not None
        assert "not full" in one.reason


def test_the_plan_beats_the_null_model_and_the_longer_of_hbm_and_flops(report: ServingReport) -> None:
    levels = report.groups["decode, no bound beaten"]
    error = {level: errors.mean_absolute for level, errors in levels.items() if errors is not None}
    assert set(error) == set(SERVING_LEVELS)
    assert error["expected"] < 0.06
    assert error["expected"] < 0.6 * error["max_hbm_flops"]
    assert error["expected"] < 0.6 * error["null"]


def test_levels_are_in_order(report: ServingReport) -> None:
    for one in report.comparisons:
        assert one.max_hbm_flops_s <= one.bound_s <= one.expected_s
        assert one.uncalibrated_s >= one.expected_s or one.run.phase != "decode"


def test_what_was_calibrated_is_said_and_left_out(report: ServingReport) -> None:
    shares = report.shares["v5e"]
    assert [name for name, share in shares.items() if share.calibrated] == ["hbm_read", "latency"]
    assert all("calibrated on" in share.source for share in shares.values() if share.calibrated)
    assert (shares["hbm_read"].uncalibrated, shares["latency"].uncalibrated) == (0.85, 0.0)
    # Either sharding predicted with what fits the other best.
    levels = report.groups["decode, no bound beaten"]
    error = {level: errors.mean_absolute for level, errors in levels.items() if errors is not None}
    assert error["expected"] < error["left_out"] < error["max_hbm_flops"] < error["uncalibrated"]
    assert all((one.left_out_s is None) == (one.run.phase != "decode") for one in report.comparisons)


def test_batches_that_were_not_looked_at_are_predicted_as_well() -> None:
    """Rows of the same source for batches 16, 64 and 128, found after the shares had been chosen."""
    report = serving_report(Path(__file__).parents[2] / "bench" / "evidence" / "held_out_decode.csv")
    assert {one.run.batch for one in report.comparisons} == {16, 64, 128}
    every, levels = report.groups["decode"], report.groups["decode, no bound beaten"]
    for group, runs in ((every, 12), (levels, 11)):
        error = {level: errors.mean_absolute for level, errors in group.items() if errors is not None}
        assert group["expected"] is not None
        assert group["expected"].runs == runs
        assert error["expected"] < 0.08
        assert error["expected"] < 0.5 * error["max_hbm_flops"]


def test_requests_under_load_are_those_of_another_run_of_the_benchmark(report: ServingReport) -> None:
    lengths = {one.run.model.name: (one.run.prompt, one.run.generate) for one in report.comparisons
               if one.run.phase == "serve"}  # fmt: skip
    # Totals of AI-Hypercomputer/jetstream-pytorch pull request 64 and JetStream pull request 83.
    assert lengths["llama2-13b"] == (round(220485 / 1999), round(608985 / 1999))
    assert lengths["llama3-8b"] == (round(214914 / 1780), round(415416 / 1780))
    assert all(any("another run of the benchmark" in text for text in one.run.assumed)
               for one in report.comparisons if one.run.phase == "serve")  # fmt: skip


def test_large_misses_have_a_reason(report: ServingReport) -> None:
    misses = [one for one in report.comparisons if abs(one.error("expected") or 0.0) > 0.2]
    assert all(miss.reason is not None for miss in misses)


def test_a_model_is_given_by_the_tables_own_columns(tmp_path: Path) -> None:
    (run,), unusable = load_serving(table(tmp_path, {}))
    assert unusable == []
    assert (run.model.d_ff, run.numerics.weights, run.numerics.kv, run.mesh) == (8192, "int8", "int8", {"tensor": 4})
    (one,) = serving_report(table(tmp_path, {})).comparisons
    assert one.null_s is None
    weights = 16 * (3 * 2048 * 8192 + 2 * 2048 * 128 * 24) + 2048 * 32000
    cache = 16 * 1024 * 16 * 2 * 8 * 128 * (1 + 4 / 128)
    assert one.max_hbm_flops_s == pytest.approx((weights + cache) / 4 / 8.2e11, rel=0.03)


def test_a_null_comes_from_other_batches(tmp_path: Path) -> None:
    other = {"global_batch_seqs": "32", "measured_value": "3"}
    one, two = serving_report(table(tmp_path, {}, other)).comparisons
    assert (one.null_s, two.null_s) == (pytest.approx(3e-3), pytest.approx(2e-3))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"global_batch_seqs": ""}, "batch not stated"),
        ({"seq_len": ""}, "sequence length not stated"),
        ({"phase": "prefill", "seq_len": ""}, "length of the prompts"),
        ({"phase": "serve", "measured_metric": "output_tokens_per_s", "unit": "tok/s"}, "length of the prompts"),
        ({"measured_metric": "hbm_bw_util", "unit": "%"}, "no metric gives the time"),
    ],
)  # fmt: skip
def test_rows_that_say_too_little_are_kept_with_the_reason(tmp_path: Path, change: dict[str, str], why: str) -> None:
    runs, unusable = load_serving(table(tmp_path, change))
    assert runs == []
    assert why in unusable[0].why


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unit": "hours"}, "unit"),
        ({"measured_metric": "speed"}, "measured_metric"),
        ({"measured_value": "-1"}, "measured_value"),
        ({"dtype": "int8 weights, int3 kv"}, "KV dtype"),
        ({"chip": "v5x"}, "chip"),
    ],
)
def test_bad_cells_name_line_and_column(tmp_path: Path, change: dict[str, str], message: str) -> None:
    runs, (unusable,) = load_serving(table(tmp_path, change))
    assert not runs
    assert message in unusable.why
    assert "line 2" in unusable.why or "dtype" in unusable.why


def test_a_bad_metric_is_listed_and_the_run_is_used(tmp_path: Path) -> None:
    (run,), (unusable,) = load_serving(table(tmp_path, {}, {"measured_metric": "mean_ttft"}))
    assert (run.lines, unusable.lines) == ((2, 3), (3,))
    assert "line 3 measured_metric: got 'mean_ttft'" in unusable.why


def test_a_row_that_cannot_be_priced_does_not_end_the_file(tmp_path: Path) -> None:
    bare = {name: "" for name in ("layers", "d_model", "d_ff", "heads", "kv_heads", "d_head", "vocab")}
    report = serving_report(table(tmp_path, {}, {"model": "gemma3n-e4b", **bare}))
    assert [one.run.lines for one in report.comparisons] == [(2,)]
    assert [(one.lines, one.why.split(":")[0]) for one in report.unusable] == [((3,), "model")]


def test_validate_shows_serving(rooftop: Run, tmp_path: Path) -> None:
    mine = table(tmp_path, {}, {"global_batch_seqs": "32", "measured_value": "0.01"})
    data = rooftop("validate", "--runs", str(mine), "--json").json
    assert [row["batch"] for row in data["serving"]["rows"]] == [16, 32]
    assert len(data["serving"]["beats_bound"]) == 1
    text = rooftop("validate", "--runs", str(mine)).out
    assert "Predicted against published times of serving" in text
    assert "measured below the bound" in text
