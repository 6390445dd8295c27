"""The face of the command line that belongs to no verb: help, version, wrong words, and what gets imported."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest

from rooftop import __version__
from rooftop.cli import main as main_module
from rooftop.cli.main import VERBS
from rooftop.cli.output import emit_json
from rooftop.cli.programs import words
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.runs.environment import prefer_cpus, uninterrupted

HEAVY = ("jax", "jaxlib", "msgspec", "numpy", "rich", "scipy", "rooftop.plan")


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


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["help"], ["--help"]),
        (["help", "plan", "train"], ["plan", "train", "--help"]),
        (["--help", "plan"], ["plan", "--help"]),
        (["version"], ["--version"]),
    ],
)
def test_help_and_version_are_words_too(rooftop, words, same):
    assert rooftop(*words) == rooftop(*same)


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


def test_the_first_line_of_a_model_says_that_sequences_are_too_long(rooftop) -> None:
    first = rooftop("model", "llama3-8b", "--seq", "1M").out.splitlines()[0]
    assert first.endswith("; sequences of 1,000,000, made for 8,192")
    assert "made for" not in rooftop("model", "llama3-8b").out


@pytest.mark.parametrize("arguments", [["--help"], ["model", "--json"], ["model"], ["plan", "train", "--help"]])
def test_a_reader_that_has_gone_ends_it_quietly(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "rooftop", *arguments], stdout=writer, stderr=subprocess.PIPE, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no device that is full")
@pytest.mark.parametrize("arguments", [["--help"], ["model", "--json"], ["model"]])
def test_a_full_disk_is_one_line(arguments):
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rooftop", *arguments], stdout=full, stderr=subprocess.PIPE, check=False
        )
    line = b"rooftop: output: got stdout; accepted: a place that can be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (2, line)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["plan", "trian"], "plan: got 'trian'; accepted: did you mean train? one of embed, serve, train"),
        (["plan", "embed"], "tables: got nothing; accepted: rooftop plan embed [OPTIONS] TABLES"),
        (
            ["plan", "train", "llama3-8b"],
            "on: got nothing; accepted: --on HARDWARE: A slice, CHIP:SHAPE[@SLICES], such as v5p:16x16x16; or slices "
            "and chips to compare: v5p,v6e:16x16@8",
        ),
        (
            ["chips", "v5e", "v5p"],
            "argument: got 'v5p'; accepted: no more than in rooftop chips [OPTIONS] [NAME|SLICE]",
        ),
        (["chips", "--jsn"], "option: got '--jsn'; accepted: did you mean --json? one of --help, --json"),
        (["ui", "--port", "99999"], "port: got 99999; accepted: a whole number from 0 to 65535"),
        (["ui", "--port", "x"], "port: got 'x'; accepted: a whole number from 0 to 65535"),
        (
            ["bench", "collectives", "-o", "/"],
            "output: File '/' is a directory; accepted: --output FILE: Write the JSON answer here",
        ),
    ],
)
def test_wrong_words_are_one_line_that_says_what_is_accepted(rooftop, arguments, line):
    answer = rooftop(*arguments)
    assert (answer.status, answer.out, answer.err) == (2, "", f"rooftop: {line}\n")


@pytest.mark.parametrize(
    ("words", "offered"), [("rooftop pl", "plan"), ("rooftop plan t", "train"), ("rooftop chips --j", "--json")]
)
def test_a_shell_completes(words, offered):
    done = _complete(words)
    assert (done.stdout, done.stderr) == (f"plain,{offered}\n", "")


def test_a_shell_that_completes_after_a_word_that_is_no_verb_is_not_told_so():
    assert _complete("rooftop plam ").stderr == ""


def _complete(words):
    typed = {"_ROOFTOP_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    call = "from rooftop.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", call], env=os.environ | typed, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(("returned", "status"), [(None, 0), (0, 0), (1, 1), ("text", 0)])
def test_an_int_that_a_verb_returns_is_the_exit_status(rooftop, monkeypatch, returned, status):
    monkeypatch.setattr(main_module.cli, "main", lambda **_: returned)
    assert rooftop().status == status


@pytest.fixture
def ctrl_c():
    """Ctrl-C raises: a shell starts what runs in its background with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_ctrl_c_waits_until_an_import_is_done():
    done = []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("ctrl_c")
def test_an_import_that_is_not_interrupted_leaves_ctrl_c_as_it_was():
    with uninterrupted():
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_log_gets_a_line_a_minute_of_a_compilation(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(words, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with words.progress_line(shown=True) as on_progress:
        for seconds in (1, 59, 61, 119, 121):
            now[0] = 100.0 + seconds
            on_progress("compiling", seconds)
    assert capsys.readouterr().err == "rooftop: compiling: 61 s\nrooftop: compiling: 121 s\n"
    with words.progress_line(shown=False) as on_progress:
        assert on_progress is None


def test_ctrl_c_while_the_command_line_is_imported_is_one_line(tmp_path):
    """``click`` is the first large import: this one is interrupted."""
    interrupted = (
        "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nsignal.raise_signal(signal.SIGINT)"
    )
    (tmp_path / "click.py").write_text(interrupted)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "rooftop", "chips"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "rooftop: interrupted\n")


@pytest.mark.parametrize(("here", "platforms"), [([], "cpu"), ([Path("/dev/accel0")], None)])
def test_jax_is_told_not_to_look_for_accelerators_where_there_are_none(monkeypatch, here, platforms):
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(Path, "glob", lambda *_: iter(here))
    prefer_cpus()
    assert os.environ.get("JAX_PLATFORMS") == platforms


def test_json_is_the_object_and_nothing_else(capsys):
    emit_json({"slice": "v5e:4x4", "title": "µ", "time_s": 1e-6})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"slice": "v5e:4x4", "title": "µ", "time_s": 1e-6}
    assert err == ""


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_json_refuses_what_json_has_not(value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        emit_json({"time_s": value})


@pytest.mark.parametrize("statement", ["import rooftop", "import rooftop.cli.main", "import rooftop.core.errors"])
def test_import_brings_nothing_heavy(statement):
    assert imported_by(statement) == []


def test_the_import_test_sees_what_is_imported():
    assert imported_by("import numpy") == ["numpy"]


def test_help_brings_nothing_heavy():
    assert imported_by("from rooftop.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass") == []


def test_a_plan_is_written_without_jax_and_scipy():
    statement = (
        "import contextlib, io\nfrom rooftop.cli.main import main\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    main(['plan', 'train', 'llama3-8b', '--on', 'v5e:4x4', '--batch-seqs', '16'])"
    )
    heavy = imported_by(statement)
    assert "numpy" in heavy and not {"jax", "jaxlib", "scipy"} & set(heavy)


def test_the_ledger_needs_nothing_heavy():
    assert imported_by("import rooftop.core.ledger") == []
