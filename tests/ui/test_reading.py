"""Runs and traces opened: what is known at once, what a thread reads meanwhile, what is kept."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from rooftop.core.errors import RooftopError
from rooftop.ui import opened as files
from rooftop.ui.opened import Opened, Shelf, first_look, opened
from rooftop.ui.server import application
from tests.support.traces import tpu, xspace

STEPS = 5


def write_run(path: Path, *, steps: int = STEPS, traced: bool = True) -> Path:
    """A run as rooftop train leaves it, with a synthetic trace."""
    (path / "profile").mkdir(parents=True)
    about = {
        "kind": "run", "mesh": {"data": 2, "tensor": 4}, "devices": {"name": "8 x cpu"},
        "job": {"program": {"computation": {"model": {"name": "tiny"}}, "compute_dtype": "bf16"}},
    }  # fmt: skip
    (path / "run.json").write_text(json.dumps(about))
    records = [
        {"step": step, "loss": 6.0 - step / 1e6, "seconds": 0.5, "tokens_per_s": 512.0, "mfu": None}
        for step in range(1, steps + 1)
    ]
    lines = [json.dumps(record) + "\n" for record in [*records, {"step": steps, "eval_loss": 5.5}]]
    (path / "metrics.jsonl").write_text("".join(lines))
    if traced:
        (path / "profile" / "host.xplane.pb").write_bytes(xspace(tpu()))
    return path


@pytest.fixture
def slow_reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Nothing is read through before this is set."""
    let = threading.Event()

    def waits(path: Path) -> Opened:
        assert let.wait(60)
        return opened(path)

    monkeypatch.setattr(files, "opened", waits)
    yield let
    let.set()


def test_a_run_says_at_once_what_it_knows_and_the_rest_when_its_trace_is_read(
    tmp_path: Path, slow_reader: threading.Event
) -> None:
    run = write_run(tmp_path / "run")
    with TestClient(application(files=[run]), base_url="http://localhost") as client:
        first = client.get("/api/files/0?now").json()
        assert first["pending"].startswith("Reading ")
        assert first["verdict"] == "tiny on 8 x cpu, data 2, tensor 4: step 5."
        figures = {figure["name"]: figure["text"] for figure in first["figures"]}
        assert (figures["step"], figures["loss"], figures["step_s"]) == ("5", "6.0000", "500 ms")
        (loss,) = first["charts"]
        assert [series["name"] for series in loss["series"]] == ["training", "held out"]
        assert len(loss["series"][0]["points"]) == STEPS
        slow_reader.set()
        whole = client.get("/api/files/0").json()
        assert (whole["what"], whole["pending"]) == ("a run", "")
        titles = [chart["title"] for chart in whole["charts"]]
        assert titles[0] == "Where a step goes"
        assert titles[-1] == "Loss"
        assert any(chart["kind"] == "timeline" and "measured" in chart["title"] for chart in whole["charts"])
        assert whole["verdict"].startswith("run: "), "a heading has no room for a path"
        assert client.get("/api/files/0?now").json() == whole


def test_a_trace_is_read_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def counted(path: Path) -> Opened:
        read.append(path)
        return opened(path)

    monkeypatch.setattr(files, "opened", counted)
    trace = tmp_path / "host.xplane.pb"
    trace.write_bytes(xspace(tpu()))
    shelf = Shelf([trace])
    shelf.begin()
    assert shelf.whole(trace) is shelf.whole(trace)
    assert shelf.now(trace) is shelf.whole(trace)
    assert read == [trace]
    os.utime(trace, ns=(1, 1))
    assert shelf.whole(trace).what == "an explained run"
    assert read == [trace, trace]


def test_a_run_without_a_trace_shows_its_loss_and_says_how_to_make_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", traced=False)
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"step": 6, "lo')  # it is being written
    shown = Shelf([run]).now(run)
    assert shown == Shelf([run]).whole(run)
    assert shown.pending == ""
    assert [chart.title for chart in shown.answer.charts] == ["Loss"]
    assert "--profile steps=A..B" in shown.answer.notes[-1]


def test_what_is_no_trace_is_refused_by_the_one_who_asks(tmp_path: Path) -> None:
    broken = tmp_path / "host.xplane.pb"
    broken.write_bytes(b"\x0a\xff")
    shelf = Shelf([broken, tmp_path])
    shelf.begin()
    for path in (broken, tmp_path):
        with pytest.raises(RooftopError):
            shelf.whole(path)
    with TestClient(application(files=[broken]), base_url="http://localhost") as client:
        assert client.get("/api/files/0").status_code == 400


def test_a_long_run_shows_some_of_its_steps_and_the_last(tmp_path: Path) -> None:
    shown = first_look(write_run(tmp_path / "run", steps=40_000, traced=False))
    assert shown is not None
    (loss,) = shown.answer.charts
    steps = [step for step, _ in loss.series[0].points]  # type: ignore[attr-defined]
    assert 300 < len(steps) < 1000
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1, 40_000)
    apart = [later - earlier for earlier, later in pairwise(steps)]
    assert max(apart) < 2 * 40_000 / 300
    assert shown.answer.figures[0].text == "40,000"


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '{"job": 3}', '{"job": {"program": {"computation": {"model": {"name": "x"}}}}}']
)
def test_a_folder_that_is_no_run_has_no_first_look(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.json").write_text(content)
    (tmp_path / "metrics.jsonl").write_text("not JSON\n")
    assert first_look(tmp_path) is None
    assert first_look(tmp_path / "absent") is None
