"""What every verb shares about output: ``--json`` is one object on stdout and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console


def emit_json(data: Any) -> None:
    """Write one JSON object on stdout. NaN and infinities are refused: JSON has none."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def console() -> Console:
    """The console for tables; imported late, because rich costs more than a plan does."""
    from rich.console import Console

    class Page(Console):
        def on_broken_pipe(self) -> None:
            raise  # the exit status of it is main's to decide

    # Piped output has no width of its own; 80 columns would cut tables that every terminal shows whole.
    found = Page(highlight=False)
    return found if found.is_terminal else Page(highlight=False, width=110)


@contextmanager
def progress_bar(*, shown: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """What to call with how much is done, how much there is and what comes next: a bar on stderr if that is a terminal.

    None where there is no one to look.
    """
    if not (shown and sys.stderr.isatty()):
        yield None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=escape(what))
