"""The processes of a training run: their supervisor, and one line at the end."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import click

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.runs.environment import join_processes


def parse_profile(text: str, field: str) -> tuple[int, int]:
    """Read the first and last traced step of 'steps=A..B'. Raises RooftopError naming ``field``."""
    match = re.fullmatch(r"steps=(\d+)\.\.(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise RooftopError(field, text, "steps=A..B with A up to B, counted from 1: steps=10..13")
    return int(match[1]), int(match[2])


def train_together(
    train: Callable[[], int], run: Path, *, coordinator: str, processes: int | None, process: int | None
) -> int:
    """Train as one of several processes, under a supervisor.

    An error ends the process at once: the usual way out of Python waits for the other processes.
    """
    from rooftop.runs.supervise import follow_supervisor, is_worker, keep_stdout, supervise

    how_to_resume = f"to go on: rooftop train --resume {shlex.quote(str(run))}"
    if not is_worker():
        return supervise(sys.argv[1:], how_to_resume)
    follow_supervisor()
    keep_stdout()
    try:
        join_processes(coordinator, processes, process)
        return train()
    except (RooftopError, Infeasible) as error:
        line, status = str(error), error.exit_status
    except Exception as error:  # Any error of the runtime may mean that a process is lost.
        reason = (str(error).splitlines() or [""])[0][:160]
        line, status = f"the run has lost one of its processes ({reason}); {how_to_resume}", 1
    click.echo(f"rooftop: {line}", err=True)
    sys.stdout.flush()
    os._exit(status)


def expect_late_reports() -> None:
    """Ignore errors of TensorStore's threads that find Orbax's event loop closed, after a write failed."""
    before = sys.unraisablehook

    def hook(report: sys.UnraisableHookArgs) -> None:
        if not (isinstance(report.exc_value, RuntimeError) and str(report.exc_value) == "Event loop is closed"):
            before(report)

    # The hook stays: those threads end after the command does.
    sys.unraisablehook = hook
