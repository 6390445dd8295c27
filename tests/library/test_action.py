"""The GitHub Action: its step runs ``rooftop check`` with the ledger of the repository, and ends with its status."""

from __future__ import annotations

import os
import re
import subprocess
import textwrap
from pathlib import Path

ACTION = Path(__file__).parents[2] / "action.yml"

#: A Python that writes its words, a line each, and ends with a status.
STUB = """#!/bin/bash
printf '%s\\n' "$@" > "{words}"
echo "a verdict"
exit {status}
"""


def step(name: str) -> str:
    """The commands of a step, whose lines are indented below ``run: |``."""
    text = ACTION.read_text(encoding="utf-8").partition(f"- name: {name}\n")[2]
    return textwrap.dedent(re.split(r"^    - ", text.partition("run: |\n")[2], flags=re.MULTILINE)[0])


def run(folder: Path, arguments: str, status: int = 0) -> tuple[int, list[str], str]:
    python = folder / "python"
    python.write_text(STUB.format(words=folder / "words", status=status))
    python.chmod(0o755)
    variables = {
        "PATH": os.environ["PATH"],
        "ARGUMENTS": arguments,
        "LEDGER": "ledger.json",
        "MAX_TIME": "+2%",
        "MAX_MEMORY": "+1%",
        "JUNIT": "rooftop.xml",
        "PYTHON": str(python),
        "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
    }
    done = subprocess.run(["bash", "-e", "-c", step("rooftop check")], cwd=folder, env=variables)
    return done.returncode, (folder / "words").read_text().splitlines(), (folder / "summary.md").read_text()


def test_a_ledger_that_is_there(tmp_path: Path) -> None:
    (tmp_path / "ledger.json").write_text("{}")
    status, words, summary = run(
        tmp_path, "train:step --args 'f32[8, 8]' --on v5e:2x2 -- python 'my train.py'", status=1
    )
    assert status == 1
    assert words == [
        "-m", "rooftop", "check", "--junit", "rooftop.xml", "--against", "ledger.json", "--max-time", "+2%",
        "--max-memory", "+1%", "train:step", "--args", "f32[8, 8]", "--on", "v5e:2x2", "--", "python", "my train.py",
    ]  # fmt: skip
    assert summary == "```\na verdict\n```\n"


def test_the_first_run_writes_the_ledger(tmp_path: Path) -> None:
    status, words, _ = run(tmp_path, "--on v5e:2x2 -- python train.py")
    assert status == 0
    assert words[3:7] == ["--junit", "rooftop.xml", "--save", "ledger.json"]


def test_inputs_are_those_that_the_steps_read() -> None:
    text = ACTION.read_text(encoding="utf-8")
    inputs = set(re.findall(r"^  ([a-z-]+):$", text.partition("inputs:")[2].partition("runs:")[0], flags=re.MULTILINE))
    assert set(re.findall(r"inputs\.([a-z-]+)", text)) == inputs
