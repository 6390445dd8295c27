"""One price: the time of a published run is that of the plan which a user would ask for."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftop.plan.evidence import measured_ratios
from rooftop.validation import load_published
from rooftop.validation.predict import command_of, predict, request_of
from rooftop.validation.runs import PublishedRun

Run = Callable[..., Any]
RUNS = load_published().runs
#: Every third run; a few of them, of all frameworks, in the quick tier.
SOME = RUNS[::3]
QUICK = {run.id for run in SOME[::9]} | set({run.framework: run.id for run in SOME}.values())


@pytest.mark.parametrize(
    "run",
    [pytest.param(run, id=run.id, marks=() if run.id in QUICK else pytest.mark.slow) for run in SOME],
)
def test_the_command_line_of_a_run_gives_its_price(rooftop: Run, run: PublishedRun, tmp_path: Path) -> None:
    request = request_of(run)
    words = shlex.split(command_of(request))[1:]
    if "--request" in words:
        # A model that no preset has.
        file = tmp_path / "request.json"
        file.write_text(json.dumps(request.to_json()))
        words[words.index("FILE")] = str(file)
    answer = rooftop(*words, "--json")
    expected = predict(run)
    assert answer.json["step"]["expected_s"] == pytest.approx(expected.uncalibrated_s, rel=1e-9)
    assert answer.json["memory"]["total"] == pytest.approx(expected.plan.memory_bytes, rel=1e-9)


def test_enough_runs_are_asked_for_by_the_command_line() -> None:
    assert len(SOME) >= 50
    assert {run.framework for run in RUNS if run.id in QUICK} >= {
        "MaxText",
        "Megatron-LM",
        "Megatron Core",
        "torchtitan",
    }
    named = [run for run in RUNS if "--request" not in command_of(request_of(run))]
    assert len(named) > len(RUNS) / 2


def test_both_prices_are_of_the_same_runs() -> None:
    theirs, ours = ({one.run for one in measured_ratios(name)} for name in ("evidence.csv", "own_evidence.csv"))
    assert theirs == ours
