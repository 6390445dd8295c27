"""Tables in int8: half a step away at most, and what was clipped is counted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from rooftop.cli.embed import export as export_command
from rooftop.cli.embed import train as train_command
from rooftop.core.errors import RooftopError
from rooftop.embed.export import LEVELS, export, load, quantize
from rooftop.models.embedding_tables.tables import Quantization
from tests.support.embedding_run import BATCH, tables, write_clicks


@given(seed=st.integers(0, 1000), scale=st.floats(1e-6, 1e6), same=st.booleans())
def test_every_value_is_half_a_step_away_at_most(seed: int, scale: float, same: bool) -> None:
    table = np.random.default_rng(seed).normal(size=(20, 8)).astype(np.float32) * np.float32(scale)
    table = np.full_like(table, table[0, 0]) if same else table
    quantized = quantize(table)
    assert np.abs(quantized.values.astype(np.float64) - table).max() <= quantized.step / 2 * 1.001 + 1e-6 * scale
    assert quantized.max_error <= quantized.step / 2 * (1 + 1e-9) and quantized.clipped == 0
    assert same or (quantized.codes.min(), quantized.codes.max()) == (-128, 127)


def test_a_given_range_clips_and_counts() -> None:
    quantized = quantize(np.array([[-2.0, -1.0, 0.1, 1.0, 3.0]]), Quantization(low=-1.0, high=1.0))
    assert quantized.clipped == 2 and quantized.max_error == pytest.approx(2.0) and quantized.step == 2 / (LEVELS - 1)
    with pytest.raises(RooftopError, match="finite"):
        quantize(np.array([[np.nan]]))


def test_an_export_is_read_again(tmp_path: Path) -> None:
    model = tables()
    ranged = dataclasses.replace(model.tables[0], quantization=Quantization(low=-1, high=1))
    model = dataclasses.replace(model, tables=(ranged, *model.tables[1:]))
    random = np.random.default_rng(0)
    values = {one.name: random.normal(size=(one.vocabulary, one.width)).astype(np.float32) for one in model.tables}
    report = export(tmp_path / "out", model, values)
    assert report.quantized["t1"].clipped == int((np.abs(values["t1"]) > 1).sum()) > 0
    for name, table in load(tmp_path / "out").items():
        inside = np.clip(values[name], -1, 1) if name == "t1" else values[name]
        assert np.abs(table - inside).max() <= report.quantized[name].step / 2 * 1.001
    with pytest.raises(RooftopError, match="t2"):
        export(tmp_path / "out", model, {"t1": values["t1"]})
    with pytest.raises(RooftopError, match=r"table t1: got '39 x 8'; accepted: 40 x 8, as the tables file says"):
        export(tmp_path / "none", model, {**values, "t1": values["t1"][:39]})
    assert not (tmp_path / "none").exists()
    with pytest.raises(RooftopError, match="export"):
        load(tmp_path)


@pytest.mark.parametrize(("low", "step"), [(1e308, 0.01), (-1.0, 1e38), (0.0, float("nan")), (float("inf"), 1.0)])
def test_values_beyond_float32_are_refused(tmp_path: Path, low: float, step: float) -> None:
    np.save(tmp_path / "0.npy", np.zeros((2, 2), np.int8))
    table = {"file": "0.npy", "low": low, "step": step}
    (tmp_path / "tables.json").write_text(json.dumps({"dtype": "int8", "tables": {"t1": table}}))
    with pytest.raises(RooftopError, match="beyond float32"):
        load(tmp_path)


def test_an_export_as_trained_is_what_was_trained(tmp_path: Path) -> None:
    model, random = tables(), np.random.default_rng(0)
    values = {one.name: random.normal(size=(one.vocabulary, one.width)).astype(np.float32) for one in model.tables}
    report = export(tmp_path / "out", model, values, dtype="f32")
    assert report.to_json()["tables"]["t1"] == {"file": "0.npy", "shape": [40, 8], "bytes": 40 * 8 * 4}
    for name, table in load(tmp_path / "out").items():
        assert table.dtype == np.float32 and np.array_equal(table, values[name])
    with pytest.raises(RooftopError, match="dtype: got 'int4'; accepted: did you mean int8"):
        export(tmp_path / "none", model, values, dtype="int4")
    assert not (tmp_path / "none").exists()


TOML = """
[tables.t1]
vocabulary = 40
width = 8
[tables.t2]
vocabulary = 40
width = 8
[features.C1]
table = "t1"
[features.C2]
table = "t2"
"""


def test_the_commands_train_evaluate_and_export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It would tell this whole process to keep what it compiles.
    monkeypatch.setattr("rooftop.runs.environment.keep_compilations", lambda: None)
    write_clicks(tmp_path / "train.tsv", 6 * BATCH, seed=0)
    (tmp_path / "tables.toml").write_text(TOML)
    paths = [str(tmp_path / name) for name in ("tables.toml", "train.tsv", "run", "out")]
    call: Callable[..., object] = CliRunner().invoke
    report = call(train_command, [*paths[:3], "--batch-samples", str(BATCH), "--evaluate", paths[1], "--json"])
    assert report.exit_code == 0 and '"batches": 6' in report.output and '"auc": 0.' in report.output  # type: ignore[attr-defined]
    for field in ('"passes": 1', '"dropped_ids": 0', '"kernel": "reference"', "limits-16.json"):
        assert field in report.output  # type: ignore[attr-defined]
    # What cannot be evaluated is refused before anything is trained; another batch is no continuation.
    (tmp_path / "short.tsv").write_text("")
    for words, says in (
        (
            ["--batch-samples", str(BATCH), "--evaluate", str(tmp_path / "short.tsv")],
            f"at least one batch of {BATCH} lines",
        ),
        (["--batch-samples", "32"], f"got 32; accepted: {BATCH}, as it began"),
    ):
        wrong = call(train_command, [*paths[:3], *words])
        assert isinstance(wrong.exception, RooftopError) and says in str(wrong.exception)  # type: ignore[attr-defined]
    report = call(export_command, [paths[0], paths[2], paths[3]])
    assert report.exit_code == 0 and "t2" in report.output  # type: ignore[attr-defined]
    assert set(load(tmp_path / "out")) == {"t1", "t2"}
    whole = call(export_command, [*paths[:1], *paths[2:], "--dtype", "f32"])
    assert whole.exit_code == 0 and "2 tables, 2.56 kB, as they were trained in 6 batches" in whole.output  # type: ignore[attr-defined]
    refused = call(export_command, [paths[0], str(tmp_path), paths[3]])
    assert isinstance(refused.exception, RooftopError)  # type: ignore[attr-defined]
