"""Every verb in every install: each example of its help answers, or names in one line the extra that it lacks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from rooftop.core.extras import EXTRAS
from tests.support.help_examples import examples, is_refused, quick
from tests.support.installs import INSTALLS, NAMED, hidden

ROOT = Path(__file__).parents[2]
#: Verbs that answer a quick example in an install without extras; validate, which computes for seconds, is apart.
BARE = {
    "chips", "model", "support", "matmul", "plan train", "plan serve", "plan embed", "simulate", "check", "diff",
    "explain", "ui",
}  # fmt: skip
_Table = dict[str, dict[str, dict[str, tuple[int, str, str]]]]


def _table(*words: str) -> _Table:
    command = [sys.executable, "-m", "tests.support.installs", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    answers: _Table = json.loads(done.stdout)
    return answers


@pytest.fixture(scope="module")
def table() -> _Table:
    return _table("quick")


def test_every_verb_has_examples_and_all_are_tried(table: _Table) -> None:
    assert set(table) == set(INSTALLS) and all(table.values())
    assert all(examples().values())
    assert {verb: tuple(answers) for verb, answers in table[""].items()} == {
        verb: quick(lines) for verb, lines in examples().items()
    }


@pytest.mark.parametrize("install", INSTALLS)
def test_every_example_answers_or_names_its_extra(table: _Table, install: str) -> None:
    _check(table, install)


@pytest.mark.slow
def test_the_slow_examples_answer_without_extras() -> None:
    table = _table()
    assert {verb: tuple(answers) for verb, answers in table[""].items()} == examples()
    for install in INSTALLS:
        _check(table, install)


def _check(table: _Table, install: str) -> None:
    for answers in table[install].values():
        for line, (status, out, err) in answers.items():
            if status in (0, 1):
                assert out and "Traceback" not in err, line
            elif is_refused(line, err):
                assert status == 2 and err.count("\n") == 1
            else:
                named = NAMED.match(err)
                assert status == 2 and not out and named, f"{line}: {err}"
                package, extra = named.groups()
                assert package in EXTRAS[extra] and package in hidden(install) and package not in hidden(extra), line


def test_what_needs_no_extra_answers_without_any(table: _Table) -> None:
    answering = {
        verb for verb, answers in table[""].items() if any(status in (0, 1) for status, _, _ in answers.values())
    }
    assert answering == BARE


def test_functions_of_the_library_name_extras_too(tmp_path: Path) -> None:
    published = (ROOT / "rooftop" / "validation" / "data" / "measured_runs.csv").read_text(encoding="utf-8")
    runs = tmp_path / "runs.csv"
    runs.write_text("\n".join(published.splitlines()[:2]), encoding="utf-8")
    code = """
import sys
from tests.support.installs import Hider, hidden
modules = hidden("")
Hider().modules = modules
import rooftop
for name in rooftop.__all__:
    getattr(rooftop, name)
assert rooftop.validate(runs=sys.argv[1]).rows
for name, call in {
    "rooftop[jax]": lambda: rooftop.bench_collectives(),
    "rooftop[compile]": lambda: rooftop.compile(rooftop.plan_training("llama:2M", on="v5e:2x2", batch_seqs=4)),
    "rooftop[serve]": lambda: rooftop.serve(rooftop.ServeRequest(checkpoint="llama:2M")),
}.items():
    try:
        call()
    except Exception as error:
        assert type(error).__name__ == "RooftopError" and name in str(error), repr(error)
    else:
        raise AssertionError(name)
"""
    subprocess.run([sys.executable, "-c", code, str(runs)], cwd=ROOT, check=True)
