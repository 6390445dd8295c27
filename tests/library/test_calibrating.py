"""Calibrations: points give back the fractions that made them, and plans are priced by them, for their chip alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import rooftop
from rooftop.arrays import Mesh
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import COLLECTIVES
from rooftop.core.measurements import CalibrationPoint
from rooftop.core.records import read_record, schema
from rooftop.explain.measured.terms import corrected, timed_terms
from rooftop.hardware import Calibrated, CollectiveFit, MatmulFit, Slice, chip
from rooftop.plan.training.plan import TrainingPlan
from rooftop.profile.microbench import calibration as bench
from rooftop.requests.inputs import recalibrated
from rooftop.roofline.achievable import attention_seconds, fractions, matmul_fraction
from rooftop.roofline.calibration import Calibration, MeasuredRun, RunTerm, fit
from rooftop.roofline.collectives import price
from rooftop.roofline.rates import Rates
from tests.support.training_runs import command, write_corpus
from tests.support.training_runs import run as run_command

OWN = Calibrated(chip="v5e", by="mine.json")


def point(
    what: Any, seconds: float, bound_s: float, kind: str = "", dtype: str = "bf16", **sizes: int
) -> CalibrationPoint:
    return CalibrationPoint(
        what=what, kind=kind, dtype=dtype, sizes=sizes, flops=0.0, bytes=0.0, bound_s=bound_s, median_s=seconds,
        fastest_s=seconds, runs=5,
    )  # fmt: skip


def test_matmuls_give_back_peak_start_and_results() -> None:
    spec, points = chip("v6e"), []
    for m, k, n in ((1024, 1024, 1024), (4096, 4096, 4096), (8192, 4096, 14336), (2048, 8192, 1024)):
        bound_s = 2.0 * m * k * n / spec.flops_per_s["bf16"]
        points.append(point("matmul", bound_s / 0.8 + 7e-6 + m * n * 2e-12, bound_s, m=m, k=k, n=n))
    result = fit(points, spec, "me")[0].matmul
    assert set(result) == {"16-bit"}
    own = result["16-bit"]
    assert (own.peak, own.start_s, own.result_s) == pytest.approx((0.8, 7e-6, 2e-12), rel=1e-6)
    # Elementwise work that is fused is not in a bare matmul.
    assert own.layer == fractions("v6e").matmul["16-bit"].layer


def test_one_matmul_gives_a_share_alone() -> None:
    spec = chip("v5e")
    assert fit([point("matmul", 2.0, 1.0, m=8, k=8, n=8)], spec, "me")[0].matmul["16-bit"].peak == 0.5


def test_collectives_give_back_start_and_share_by_ranks() -> None:
    points = [
        point("collective", 1e-5 * ranks + bound_s / 0.7, bound_s, kind="all_gather", ranks=ranks, bytes=1)
        for ranks in (2, 8)
        for bound_s in (1e-5, 1e-4, 1e-3)
    ]
    own = fit(points, chip("h100"), "me")[0].ici["all_gather"]
    assert own.ranks == (2.0, 8.0)
    assert own.start_s == pytest.approx((2e-5, 8e-5))
    assert own.share == pytest.approx((0.7, 0.7))


def test_attention_gives_back_shares_by_head_size() -> None:
    points = [
        point(
            "attention",
            factor * bound_s / share + 8 * seq * 1e-9,
            bound_s,
            kind=kind,
            batch=1,
            seq=seq,
            heads=8,
            d_head=size,
        )
        for size, share in ((64, 0.3), (128, 0.5))
        for seq, bound_s in ((1024, 1e-4), (8192, 6.4e-3))
        for kind, factor in (("forward", 1.0), ("backward", 1.25))
    ]
    own = fit(points, chip("v5p"), "me")[0].attention
    assert own is not None
    assert own.share == pytest.approx((0.3, 0.5))
    assert own.query_s == pytest.approx((1e-9, 1e-9))
    assert own.backward_share == pytest.approx(0.8)
    assert own.block == 1024


def test_points_above_the_peak_are_said_to_be_wrong() -> None:
    result, doubts = fit([point("hbm", 0.5, 1.0, kind="copy", bytes=1)], chip("v5e"), "me")
    assert result.hbm == 1.0
    assert "faster than the peak" in doubts[0]


def test_measured_fractions_replace_those_of_the_catalogue() -> None:
    own = replace(
        OWN,
        hbm=0.5,
        matmul={"16-bit": MatmulFit(peak=0.25)},
        ici={"all_gather": CollectiveFit(share=(0.1,))},
        compute=2.0,
    )
    where = Slice.parse("v5e:4x4").with_calibration(own)
    known, catalogue = fractions(where.chip), fractions("v5e")
    assert Rates.of(where.chip).hbm_s(1.0) == pytest.approx(Rates.of(chip("v5e")).hbm_s(1.0) * catalogue.hbm / 0.5)
    assert matmul_fraction(where.chip, 4096, 4096, 4096) == pytest.approx(0.125)
    assert known.ici["all_gather"].share == (0.1,)
    assert known.ici["all_reduce"] == catalogue.ici["all_reduce"]
    assert known.sources["hbm"] == "calibrated by mine.json"
    assert known.sources["dcn"] == catalogue.sources["dcn"]
    # Kernels that were counted for the chip take so much longer as the user's runs say.
    assert sum(attention_seconds(where.chip, 1e9, 128, 128)) == pytest.approx(
        2 * sum(attention_seconds(chip("v5e"), 1e9, 128, 128))
    )


def plan(calibration: Calibrated | None = None) -> Any:
    return rooftop.plan_training(
        "llama3-8b", on="v5e:4x4", batch_seqs=16, mesh="fsdp=16", remat="block", calibration=calibration
    )


def test_a_plan_takes_the_calibration_and_its_json_keeps_it() -> None:
    before, after = plan().plan, plan(replace(OWN, step=1.5, gap_s=0.25)).plan
    assert after.expected_s == pytest.approx(1.5 * before.expected_s + 0.25)
    assert (before.evidence.level, after.evidence.level) == ("expected", "calibrated")
    assert after.evidence.text.startswith("calibrated by mine.json; training of dense models on v5e")
    again = TrainingPlan.from_json(json.loads(json.dumps(after.to_json())))
    assert again.expected_s == after.expected_s
    low, high = after.interval_s
    assert low <= after.expected_s <= high


def test_the_search_prices_as_the_plan_does() -> None:
    answer = rooftop.plan_training(
        "llama3-8b", on="v5e:4x4", batch_seqs=16, calibration=replace(OWN, step=1.2, gap_s=0.1, hbm=0.4)
    ).answer
    assert answer.document.alternatives[0].expected_s > answer.plan.expected_s > 0
    assert answer.plan.summary.expected_s == pytest.approx(answer.plan.expected_s)


def test_a_chip_without_runs_is_calibrated_and_no_bound() -> None:
    result = rooftop.plan_training("llama3-8b", on="v4:2x2x2", batch_seqs=16).plan
    own = rooftop.plan_training(
        "llama3-8b", on="h200:8", batch_seqs=16, calibration=Calibrated(chip="h200", by="x")
    ).plan
    assert own.evidence.level == "calibrated"
    assert result.evidence.calibrated_by is None


@pytest.mark.parametrize(("calibration", "is_estimate"), [(None, True), (Calibrated(chip="v6e", by="x"), False)])
def test_a_fleet_on_a_chip_without_runs_is_a_bound_unless_calibrated(
    calibration: Calibrated | None, is_estimate: bool
) -> None:
    result = rooftop.plan_serving(
        "llama3-8b", on="v6e", requests_per_second=2, ttft="2s", tpot="50ms", calibration=calibration
    )
    assert result.recommendation is not None
    assert result.recommendation.best.is_estimate is is_estimate


def test_serving_plans_and_simulations_take_it() -> None:
    before = rooftop.plan_serving("llama3-8b", on="v5e:2x2", batch_seqs=8, prompt=512)
    after = rooftop.plan_serving(
        "llama3-8b", on="v5e:2x2", batch_seqs=8, prompt=512, calibration=replace(OWN, hbm_read=0.4)
    )
    assert after.plan.tpot_s > 1.5 * before.plan.tpot_s
    assert after.plan.evidence.decode.level == "calibrated"
    simulated = rooftop.simulate(
        before.to_json(), requests_per_second=0.5, duration=20, calibration=replace(OWN, hbm_read=0.4)
    )
    assert simulated.plan.tpot_s == pytest.approx(after.plan.tpot_s)


def test_plans_of_tables_and_plans_from_files_take_it() -> None:
    tables, own = Path(__file__).parents[2] / "docs" / "tables.toml", Calibrated(chip="v5p", by="mine.json", hbm=0.085)
    before = rooftop.plan_embedding(tables, on="v5p:2x2x1")
    after = rooftop.plan_embedding(tables, on="v5p:2x2x1", calibration=own)
    assert after.plan.document.units_s["hbm"] == pytest.approx(10 * before.plan.document.units_s["hbm"])
    assert recalibrated(before.plan, own).document == after.plan.document
    assert recalibrated(plan().plan, replace(OWN, step=2.0)).expected_s == pytest.approx(2 * plan().plan.expected_s)
    with pytest.raises(RooftopError, match="one of v5e; this one is of v5p"):
        recalibrated(plan().plan, own)


def test_validation_takes_it_for_its_chip() -> None:
    only = "maxtext-default-16b/v5e:16x16/"
    before, after = (rooftop.validate(only=only, calibration=own).to_json() for own in (None, replace(OWN, step=2.0)))
    assert after["rows"][0]["uncalibrated_s"] == pytest.approx(2 * before["rows"][0]["uncalibrated_s"])
    assert (before["calibrated_by"], after["calibrated_by"]) == (None, "mine.json")


@pytest.fixture
def calibrated_file(tmp_path: Path) -> Path:
    path = tmp_path / "v5e.json"
    record = Calibration(
        devices="16 x TPU v5 lite", count=16, emulated=False, platform="tpu", device_kind="TPU v5 lite", host_cpus=1,
        versions={"jax": "0"}, runtime="", date="2026-11-26T00:00:00+00:00", command="rooftop calibrate", chip="v5e",
        slice="v5e:4x4", spent_s=1.0, complete=True, points=(), skipped={}, run=None, fractions=replace(OWN, hbm=0.5),
        notes=(),
    )  # fmt: skip
    path.write_text(json.dumps(record.to_json()))
    jsonschema.validate(record.to_json(), schema(Calibration))
    assert read_record(Calibration, record.to_json(), "x") == record
    return path


def test_the_first_line_names_the_file(rooftop: Callable[..., Any], calibrated_file: Path) -> None:
    words = ("llama3-8b", "--batch-seqs", "16", "--calibration", str(calibrated_file))
    answer = rooftop("plan", "train", *words, "--on", "v5e:4x4", "--mesh", "fsdp=16")
    assert answer.status == 0
    assert answer.out.splitlines()[0].endswith("calibrated by v5e.json (16 x TPU v5 lite, 2026-11-26)")


@pytest.mark.parametrize(
    "verb", [("plan", "train", "llama3-8b", "--batch-seqs", "16"), ("plan", "serve", "llama3-8b")], ids=" ".join
)
def test_another_chip_is_refused_in_one_line(
    rooftop: Callable[..., Any], calibrated_file: Path, verb: tuple[str, ...]
) -> None:
    answer = rooftop(*verb, "--on", "v5p:2x2x1", "--calibration", str(calibrated_file))
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert "accepted: one of v5p; this one is of v5e" in answer.err


def test_a_file_of_something_else_is_refused(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    other = tmp_path / "plan.json"
    other.write_text('{"kind": "train"}')
    answer = rooftop("plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "16", "--calibration", str(other))
    assert (answer.status, answer.err.count("\n")) == (2, 1)
    assert "a file that rooftop calibrate wrote (this one is of kind 'train')" in answer.err


def test_help_needs_no_jax() -> None:
    code = (
        "import sys; from rooftop.cli.main import main\n"
        "try: main(['calibrate', '--help'])\n"
        "except SystemExit: print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work that a CPU does in milliseconds."""
    monkeypatch.setattr(bench, "MATMULS", ((128, 128, 128), (256, 128, 256), (256, 256, 256)))
    monkeypatch.setattr(bench, "ATTENTION", ((128, 2, 64), (256, 2, 64)))
    monkeypatch.setattr(bench, "PAYLOADS", (4096, 16384))
    monkeypatch.setattr(bench, "_CPU_BYTES", 2**16)
    monkeypatch.setattr(bench, "_LOOP_S", 0.002)
    yield


@pytest.mark.usefixtures("small")
def test_devices_are_measured_and_a_killed_calibration_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, measured = tmp_path / "cpu.json", list[tuple[str, ...]]()
    measure = bench.Bench.measure

    def counted(self: bench.Bench, case: bench.CalibrationCase) -> CalibrationPoint:
        if len(measured) == 9:
            raise KeyboardInterrupt
        measured.append(case.key)
        return measure(self, case)

    monkeypatch.setattr(bench.Bench, "measure", counted)
    with pytest.raises(KeyboardInterrupt):
        rooftop.calibrate(output=path, on="v5e:2x4", minutes=5)
    begun = json.loads(path.read_text())
    assert (len(begun["points"]), begun["complete"]) == (9, False)

    monkeypatch.setattr(bench.Bench, "measure", measure)
    result = rooftop.calibrate(output=path, on="v5e:2x4", minutes=5)
    data = json.loads(path.read_text())
    jsonschema.validate(data, schema(Calibration))
    assert data["complete"]
    assert not data["skipped"]
    assert data["points"][:9] == begun["points"]
    keys = [one.key for one in result.calibration.points]
    assert len(set(keys)) == len(keys) == 2 + 4 + 2 * 3 + 2 * len(COLLECTIVES) + 4
    assert all(one.median_s > 0 for one in result.calibration.points)
    own = result.fractions
    assert own is not None
    assert own.by == f"cpu.json (8 x cpu (emulated), {data['date'][:10]})"
    # A CPU is slower than a v5e, and does what it was measured to do.
    assert 0 < own.matmul["16-bit"].peak < 0.1
    assert set(own.ici) == set(COLLECTIVES)
    assert rooftop.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=16, calibration=result).plan.expected_s > 10

    with pytest.raises(RooftopError, match="another file"):
        rooftop.calibrate(output=path, on="v4:2x2x2", minutes=5)


@pytest.mark.usefixtures("small")
def test_without_a_chip_there_are_points_alone(tmp_path: Path) -> None:
    result = rooftop.calibrate(minutes=0.02)
    assert result.calibration.points
    assert result.fractions is None
    with pytest.raises(RooftopError, match="calibration of a chip"):
        plan(result)


def test_a_slice_of_another_size_is_refused() -> None:
    with pytest.raises(RooftopError, match="a slice of 8 devices"):
        rooftop.calibrate(on="v5e:4x4")


def test_a_run_without_a_trace_gives_the_whole_step() -> None:
    planned = plan().plan
    records = [{"step": 1, "seconds": 99.0, "data_share": 0.0}]
    records += [{"step": step, "seconds": 4.0, "data_share": 0.25} for step in (2, 3, 4)]
    run = timed_terms("run", planned, records)
    assert {term.term: term.measured_s for term in run.terms} == {"step": 3.0, "host gaps": 1.0}
    after = plan(replace(corrected(run, planned), by="run.json")).plan
    assert after.expected_s == pytest.approx(4.0)
    # A run of the corrected plan that takes as long changes nothing more.
    again = timed_terms("run", after, records)
    assert corrected(again, after).step == pytest.approx(after.problem.slice.chip.calibrated.step)


def test_collectives_that_were_slower_take_so_much_longer_in_the_next_plan() -> None:
    """Starts, hops and bytes alike: those of few bytes are starts and hops alone."""
    planned = plan().plan
    slow = RunTerm(term="collectives", measured_s=3.0, planned_s=1.0, ratio=3.0, change="")
    run = MeasuredRun(run="run", steps=3, measured_s=3.0, planned_s=1.0, terms=(slow,), worst="collectives")
    before = planned.problem.slice.chip
    rates = [Rates.of(chip) for chip in (before, replace(before, calibrated=corrected(run, planned)))]
    group = Mesh.lay(planned.problem.slice, {"fsdp": 16}).span("fsdp")
    for kind in COLLECTIVES:
        for payload in (1e3, 1e9):
            expected, after = (float(price(kind, group).expected_s(payload, rate.network(kind))) for rate in rates)
            assert after == pytest.approx(3 * expected), (kind, payload)


def test_two_steps_are_too_few() -> None:
    records = [{"step": step, "seconds": 4.0, "data_share": 0.25} for step in (1, 2, 3)]
    with pytest.raises(RooftopError, match=r"3 measured steps or more.*this has 2"):
        timed_terms("run", plan().plan, records)


@pytest.mark.slow
def test_the_terms_of_a_traced_run_correct_its_plan(rooftop: Callable[..., Any], tmp_path: Path) -> None:
    folder, planned, run, file = write_corpus(tmp_path), tmp_path / "plan.json", tmp_path / "run", tmp_path / "own.json"
    model = str(folder / "config.json")
    words = ["--on", "v5e:2x2", "--mesh", "fsdp=4", "--batch-seqs", "8", "--seq", "32", "--remat", "block"]
    assert rooftop("plan", "train", model, *words, "-o", str(planned)).status == 0
    trained = command(folder, run, steps=6, profile="steps=3..6", devices=4, as_is=True)
    apart = {"--model", "--seq", "--batch-seqs"}
    trained = [word for at, word in enumerate(trained) if not {word, trained[at - 1]} & apart]
    trained.insert(trained.index("train") + 1, str(planned))
    done = run_command(trained)
    assert done.status == 0, done.err

    explained = rooftop("explain", str(run), "--json").json
    measured = rooftop("calibrate", str(run), "-o", str(file), "--json").json["run"]
    terms = {term["term"]: term for term in measured["terms"]}
    assert sum(term["measured_s"] for term in terms.values()) == pytest.approx(explained["step_s"])
    assert sum(term["planned_s"] for term in terms.values()) == pytest.approx(measured["planned_s"])
    assert terms["collectives"]["measured_s"] == explained["exposed_s"]
    assert measured["steps"] == 3
    after = rooftop("plan", "train", model, *words, "--calibration", str(file), "--json").json
    assert after["evidence"]["calibrated_by"].startswith("own.json (3 steps of ")
    # A CPU has another balance of compute and bytes than the chip: the terms overlap differently.
    assert after["step"]["expected_s"] == pytest.approx(explained["step_s"], rel=0.3)
