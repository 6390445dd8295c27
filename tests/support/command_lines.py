"""Many command lines in one interpreter, which imports once what planning needs.

As a program it reads ``{"lines": [[WORD, ...], ...], "seconds": N, "folder": PATH, "apart": BOOLEAN}`` on stdin and
writes a JSON object a line: the exit status of each command line, its two outputs, and whether JAX is imported then.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from rooftop.cli.main import main

#: Exit status of a command line that raised what is no exit.
CRASHED = 70


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The status of a command line (negative: a signal ended it), its outputs, and True if JAX is imported."""

    status: int
    out: str
    err: str
    jax: bool


def run_lines(lines: Sequence[Sequence[str]], folder: Path, *, seconds: int, apart: bool = False) -> Iterator[Outcome]:
    """Outcomes of command lines of ``rooftop`` that run in ``folder`` one after the other, each at most ``seconds``.

    ``apart``: each in a fork, so that what one imports and starts is not there for the next.
    """
    request = {"lines": lines, "seconds": seconds, "folder": str(folder), "apart": apart}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.command_lines"],
        input=json.dumps(request),
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    for line in done.stdout.splitlines():
        yield Outcome(**json.loads(line))


def _call(words: Sequence[str]) -> int:
    """The exit status of the command line; a traceback goes to stderr."""
    try:
        main(words)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
        return CRASHED
    return 0


def _run_here(words: Sequence[str], seconds: int) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    signal.alarm(seconds)
    with redirect_stdout(out), redirect_stderr(err):
        status = _call(words)
    signal.alarm(0)
    return Outcome(status=status, out=out.getvalue(), err=err.getvalue(), jax="jax" in sys.modules)


def _run_apart(words: Sequence[str], seconds: int) -> Outcome:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            signal.alarm(seconds)
            status = _call(words)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        _, state = os.waitpid(child, 0)
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode(errors="replace"))
        return Outcome(status=os.waitstatus_to_exitcode(state), out=texts[0], err=texts[1], jax=False)


def _program() -> None:
    request = json.load(sys.stdin)
    run = _run_apart if request["apart"] else _run_here
    os.chdir(request["folder"])
    for words in request["lines"]:
        print(json.dumps(vars(run(words, request["seconds"]))), flush=True)


if __name__ == "__main__":
    _program()
