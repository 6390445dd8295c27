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
from rooftop.validation.predict import predict
from rooftop.validation.report import ValidationRecord
from tests.validation.test_training import only, table

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


@pytest.mark.parametrize(
    ("change", "compiled_mb"),
    [
        ({}, 22.087),
        ({"layers": "8"}, 69.348),
        ({"chip": "v6e"}, 22.086),
        ({"seq_len": "2048"}, 30.290),
        ({"layers": "8", "seq_len": "4096"}, 185.720),
        ({"chip": "v6e", "layers": "8", "seq_len": "4096"}, 216.422),
        ({"layers": "4", "seq_len": "2048", "fsdp": "1", "tp": "4"}, 89.691),
        ({"layers": "8", "seq_len": "2048", "d_model": "1024", "d_ff": "4096", "vocab": "32000"}
         | {"heads": "8", "kv_heads": "8"}, 980.316),
    ],
)  # fmt: skip
def test_small_temporaries_stay_in_vmem(tmp_path: Path, change: dict[str, str], compiled_mb: float) -> None:
    # Peaks of our programs as XLA:TPU compiled them (libtpu 0.0.42.1). Without VMEM plans were 1.1 to 3.9 times these.
    planned = predict(only(tmp_path, **SMALL | change)).plan.memory_bytes
    assert planned / 1e6 == pytest.approx(compiled_mb, rel=0.2)


@pytest.mark.slow
def test_a_published_run_is_compiled_for_its_slice(runs: Path) -> None:
    data: Any = rooftop.validate(runs=runs, only="small/v5e", compiled=True).to_json()
    (row,) = data["compiled"]["rows"]
    assert row["why"] is None
    assert 0.3 < row["compiled_s"] / row["planned_s"] < 3
    assert row["error"]["compiled"] == pytest.approx(row["compiled_s"] / row["measured_s"] - 1)
    # XLA keeps all of its temporaries in VMEM.
    assert row["compiled_bytes"] == pytest.approx(row["planned_bytes"], rel=0.1)
    assert "libtpu" in row["versions"]
    (group,) = data["compiled"]["groups"]
    assert (group["name"], group["runs"]) == ("v5e", 1)
