"""The tutorial runs as it is written: each command in turn, in one folder, and each line that it shows is printed."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_BLOCK = re.compile(r"```text\n\$ (?P<command>.+)\n(?P<printed>(?:.*\n)*?)```\n")
#: Units and suffixes that follow a figure, which differ from run to run with it.
_UNITS = {"ms", "us", "ns", "s", "k", "M", "G", "T", "B", "kB", "MB", "GB"}
_PORT = "8011"


def _steps() -> list[tuple[str, list[str]]]:
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    return [(block["command"], block["printed"].splitlines()) for block in _BLOCK.finditer(text)]


def _words(line: str) -> list[str]:
    """The words of a line without its figures."""
    return [word for word in re.findall(r"[A-Za-z_][\w/]*", line) if word not in _UNITS]


def _assert_shown(shown: list[str], printed: str) -> None:
    """Each line that the page shows stands in what was printed, in order, with other figures at most."""
    lines = iter(printed.splitlines())
    for line in shown:
        begin = line.partition("...")[0]
        if words := _words(begin):
            assert any(_words(other)[: len(words)] == words for other in lines), f"not printed: {line}"


@pytest.fixture
def environment() -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return os.environ | {"PATH": f"{here}:{os.environ['PATH']}", "COLUMNS": "110", "NO_COLOR": "1", "XLA_FLAGS": ""}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that a step leaves running."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path, environment: dict[str, str], started: list[subprocess.Popen[str]]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    steps = _steps()
    assert len(steps) == 8
    for command, shown in steps:
        command, shown = command.replace(_PORT, port), [line.replace(_PORT, port) for line in shown]
        if command.endswith(" &"):
            log = tmp_path / "server.log"
            with log.open("w") as file:
                words = ["bash", "-c", f"exec {command[:-2]}"]
                started.append(
                    subprocess.Popen(words, cwd=tmp_path, env=environment, stdout=file, stderr=file, text=True)
                )
            _wait_until_ready(port, started[-1])
            _assert_shown(shown, log.read_text())
            continue
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        _assert_shown(shown, done.stdout + done.stderr)


def _wait_until_ready(port: str, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        assert process.poll() is None, "the server ended"
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    pytest.fail("the server is not ready")


def test_a_line_that_is_not_printed_is_noticed() -> None:
    _assert_shown(["step 3/9: loss 4.1, 2 k tokens/s", "..."], "begin\nstep 3/9: loss 7, 3 M tokens/s\n")
    with pytest.raises(AssertionError, match="not printed"):
        _assert_shown(["held-out loss 4"], "step 3/9: loss 7\n")
