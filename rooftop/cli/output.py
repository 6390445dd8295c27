"""Output of every verb: ``--json`` is one object on stdout and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

    from rooftop.present.document import Document


def emit_json(data: Any) -> None:
    """Write one JSON object on stdout. NaN and infinities are refused: JSON has none."""
    click.echo(json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False))


def console() -> Console:
    """The console for tables; imported late, because rich costs more than a plan does."""
    from rich.console import Console

    class Page(Console):
        def on_broken_pipe(self) -> None:
            raise  # main decides the exit status

    # Piped output has no width of its own: COLUMNS, or 110.
    page = Page(highlight=False)
    return page if page.is_terminal or "COLUMNS" in os.environ else Page(highlight=False, width=110)


def show(data: Mapping[str, Any], written: Mapping[str, object] | None = None, **context: Any) -> None:
    """Print the document of an answer, then the files ``written`` by what they hold (None: not written)."""
    from rooftop.present.documents import document

    show_document(document(data, **context), written)


def show_document(document: Document, written: Mapping[str, object] | None = None) -> None:
    """Print a document, then the files ``written``."""
    from rooftop.present.terminal import printed

    out = console()
    out.print(printed(document, out.width), soft_wrap=True)
    for name, file in (written or {}).items():
        if file is not None:
            out.print(f"{name} written to {file}", markup=False, soft_wrap=True)


@contextmanager
def progress_bar(*, shown: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """Progress callback ``(done, total, label)`` that draws a bar on stderr; None if stderr is not a terminal."""
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
