"""The face of the command line that belongs to no verb: help, version, wrong words, and what gets imported."""

from __future__ import annotations

import io
import json
import subprocess
import sys

import click
import pytest

from rooftop import __version__
from rooftop.cli import main as main_module
from rooftop.cli.main import VERBS, main
from rooftop.cli.output import emit_json
from rooftop.errors import Infeasible, RooftopError

HEAVY = ("jax", "jaxlib", "numpy", "rich", "scipy", "rooftop.plan")


def imported_by(statement: str) -> list[str]:
    """The heavy modules that a fresh interpreter holds after ``statement``."""
    report = f"{statement}\nimport json, sys\nprint(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", report], capture_output=True, text=True, check=True)
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_verb(rooftop, flag):
    answer = rooftop(flag)
    assert (answer.status, answer.err) == (0, "")
    for verb, (_, text) in VERBS.items():
        assert f"{verb} " in answer.out
        assert text in answer.out


def test_version(rooftop):
    answer = rooftop("--version")
    assert (answer.status, answer.out) == (0, f"rooftop, version {__version__}\n")


@pytest.mark.parametrize("verb", VERBS)
def test_each_verb_is_a_command_with_help(rooftop, verb):
    answer = rooftop(verb, "--help")
    assert (answer.status, answer.err) == (0, "")
    assert answer.out.startswith(f"Usage: rooftop {verb} ")


def test_unknown_verb_is_one_line_with_the_close_match(rooftop):
    answer = rooftop("plam")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err == f"rooftop: verb: got 'plam'; accepted: did you mean plan? one of {', '.join(sorted(VERBS))}\n"


def test_unknown_option_is_one_line(rooftop):
    answer = rooftop("--frobnicate")
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.count("\n") == 1
    assert "--frobnicate" in answer.err


def test_no_arguments_is_help_as_people_read_it(rooftop):
    answer = rooftop()
    assert answer.status == 2
    assert answer.out + answer.err == rooftop("--help").out


@pytest.mark.parametrize(
    ("raised", "status", "line"),
    [
        (RooftopError("on", "v5p:0", "CHIP:SHAPE"), 2, "on: got 'v5p:0'; accepted: CHIP:SHAPE"),
        (RooftopError("name", "two\nlines", "a word"), 2, r"name: got 'two\nlines'; accepted: a word"),
        (Infeasible("memory", "3.2 GB too many"), 1, "memory: 3.2 GB too many"),
        (click.UsageError("no such\nthing"), 2, "no such thing"),
        (click.FileError("plan.json", "no such file"), 2, "Could not open file 'plan.json': no such file"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (click.Abort(), 130, "interrupted"),
    ],
)
def test_each_failure_is_one_line_and_its_status(rooftop, monkeypatch, raised, status, line):
    def fail(**_):
        raise raised

    monkeypatch.setattr(main_module.cli, "main", fail)
    answer = rooftop()
    assert (answer.status, answer.out, answer.err) == (status, "", f"rooftop: {line}\n")


def test_a_reader_that_has_gone_ends_it_quietly(monkeypatch):
    def fail(**_):
        raise BrokenPipeError

    stderr = io.StringIO()
    monkeypatch.setattr(main_module.cli, "main", fail)
    monkeypatch.setattr(sys, "stderr", stderr)
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert exit_.value.code == 141
    assert stderr.closed


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (1, 1), ("text", 0)])
def test_an_int_that_a_verb_returns_is_the_exit_status(rooftop, monkeypatch, returned, status):
    monkeypatch.setattr(main_module.cli, "main", lambda **_: returned)
    assert rooftop().status == status


def test_json_is_the_object_and_nothing_else(capsys):
    emit_json({"slice": "v5e:4x4", "title": "µ", "time_s": 1e-6})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"slice": "v5e:4x4", "title": "µ", "time_s": 1e-6}
    assert err == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_what_json_has_not(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        emit_json({"time_s": value})


@pytest.mark.parametrize("statement", ["import rooftop", "import rooftop.cli.main", "import rooftop.errors"])
def test_import_brings_nothing_heavy(statement):
    assert imported_by(statement) == []


def test_the_import_test_sees_what_is_imported():
    assert imported_by("import numpy") == ["numpy"]


def test_help_brings_nothing_heavy():
    assert imported_by("from rooftop.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass") == []


def test_the_ledger_needs_numpy_alone():
    assert imported_by("import rooftop.ledger") == ["numpy"]
