"""The process around a training run: its supervisor, and one line at the end."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping
from typing import Any

import click

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.runs.environment import join_processes

#: Packages that training imports.
PACKAGES = ("jax", "optax", "orbax", "safetensors", "tokenizers")


def parse_profile(text: str | None) -> tuple[int, int] | None:
    """The first and the last step that are traced, of steps=A..B. Raises RooftopError for another text."""
    if text is None:
        return None
    match = re.fullmatch(r"steps=(\d+)\.\.(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise RooftopError("profile", text, "steps=A..B with A up to B, counted from 1: steps=10..13")
    return int(match[1]), int(match[2])


def train_together(options: dict[str, Any], train: Callable[[], int]) -> int:
    """Train as one of several processes. An error ends this one at once: the usual way out waits for the others."""
    from rooftop.runs.supervise import follow_supervisor, is_worker, keep_stdout, supervise

    if not is_worker():
        return supervise(sys.argv[1:], _how_to_resume(options))
    follow_supervisor()
    keep_stdout()
    try:
        join_processes(options["coordinator"], options["processes"], options["process"])
        return train()
    except (RooftopError, Infeasible) as error:
        line, status = str(error), error.exit_status
    except Exception as error:  # what the runtime raises when a process is lost depends on where it is met
        reason = (str(error).splitlines() or [""])[0][:160]
        line, status = f"the run has lost one of its processes ({reason}); {_how_to_resume(options)}", 1
    click.echo(f"rooftop: {line}", err=True)
    sys.stdout.flush()
    os._exit(status)


def _how_to_resume(options: Mapping[str, Any]) -> str:
    return f"to go on: rooftop train --resume {shlex.quote(str(options['resume'] or options['run']))}"


def expect_late_reports() -> None:
    """Keep to the one line that says it: behind a failed write, threads of TensorStore find Orbax's loop closed."""
    before = sys.unraisablehook

    def hook(late: sys.UnraisableHookArgs) -> None:
        if not (isinstance(late.exc_value, RuntimeError) and str(late.exc_value) == "Event loop is closed"):
            before(late)

    # It stays: those threads end after the command does.
    sys.unraisablehook = hook
