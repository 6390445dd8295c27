"""Published runs compiled for their own slices: chosen, refused and compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest

import rooftop
from rooftop.core.errors import RooftopError
from rooftop.core.records import schema
from rooftop.explain.compiled import training
from rooftop.validation.report import ValidationRecord
from tests.validation.test_training import table

SMALL = {
    "num_chips": "4", "fsdp": "4", "layers": "2", "d_model": "512", "d_ff": "1024", "heads": "4", "kv_heads": "4",
    "vocab": "1024", "seq_len": "512", "global_batch_seqs": "8",
}  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    path = tmp_path / "mine.csv"
    wide = {"num_chips": "16", "fsdp": "16", "global_batch_seqs": "16", "model": "wide"}
    gpu = {"chip": "h100", "num_chips": "8", "fsdp": "8", "model": "other"}
    path.write_text(table(SMALL | wide, SMALL, SMALL | gpu))
    return path


def test_small_slices_come_first_and_a_refusal_is_a_row(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, progress = list[str](), list[tuple[int, int, str]]()

    def refuse(plan: Any, **how: Any) -> Any:
        compiled.append(plan.problem.slice.name)
        raise RooftopError("program", "step", "one that XLA compiles")

    monkeypatch.setattr(training, "compile_plan", refuse)
    result = rooftop.validate(runs=runs, compiled=True, on_progress=lambda *step: progress.append(step))
    assert compiled == ["v5e:2x2", "v5e:4x4"]
    assert [done for done, _, _ in progress] == [0, 1]
    data: Any = result.to_json()
    jsonschema.validate(data, schema(ValidationRecord))
    assert [row["compiled_s"] for row in data["compiled"]["rows"]] == [None, None]
    assert all("one that XLA compiles" in row["why"] for row in data["compiled"]["rows"])
    assert data["compiled"]["groups"] == []


def test_one_run_is_chosen_by_a_part_of_its_name(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slices = list[str]()
    monkeypatch.setattr(training, "compile_plan", lambda plan, **how: slices.append(plan.problem.slice.name))
    with pytest.raises(RooftopError, match="a part of the name of a run of training"):
        rooftop.validate(runs=runs, only="nothing")
    with pytest.raises(RooftopError, match="a table with runs on TPUs"):
        rooftop.validate(runs=runs, only="other", compiled=True)
    assert slices == []
    assert [row["model"] for row in rooftop.validate(runs=runs, only="wide").to_json()["rows"]] == ["wide"]


@pytest.mark.slow
def test_a_published_run_is_compiled_for_its_slice(runs: Path) -> None:
    data: Any = rooftop.validate(runs=runs, only="small/v5e", compiled=True).to_json()
    (row,) = data["compiled"]["rows"]
    assert row["why"] is None
    assert 0.3 < row["compiled_s"] / row["planned_s"] < 3
    assert row["error"]["compiled"] == pytest.approx(row["compiled_s"] / row["measured_s"] - 1)
    assert row["compiled_bytes"] == pytest.approx(row["planned_bytes"], rel=0.5)
    assert "libtpu" in row["versions"]
    (group,) = data["compiled"]["groups"]
    assert (group["name"], group["runs"]) == ("v5e", 1)
