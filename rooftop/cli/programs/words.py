"""Command lines with arrays of a function, or with a script after ``--``, and what their verbs share."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from rooftop.cli.options import FOLDER, SCRIPT, VerbCommand, option
from rooftop.core.errors import RooftopError
from rooftop.requests.words import OUTPUT, RUN

#: Seconds between two lines about a compilation in a log.
_LOG_EVERY_S = 60.0
#: Where the words of the command line stand there.
WORDS = "rooftop.words"


class SeveralArrays(VerbCommand):
    """A command whose ``--args`` takes all the words that follow it, up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Repeat ``--args`` before every word that belongs to it."""
        spread, taking = list[str](), False
        for word in args:
            if word.startswith("-"):
                taking = word == "--args"
                if not taking:
                    spread.append(word)
            else:
                spread += ["--args", word] if taking else [word]
        return super().parse_args(ctx, spread)


class ScriptCommand(SeveralArrays):
    """The same, where words after ``--`` are the command line of a script.

    With ``--with``, the command runs in an environment with other releases.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the script's words aside: its options are its own."""
        ctx.meta[WORDS] = list(args)
        if "--" in args:
            at = args.index("--")
            ctx.meta[SCRIPT], args = args[at + 1 :], args[:at]
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command here, or with other releases."""
        releases = ctx.params.get("releases")
        if releases is None:
            return super().invoke(ctx)
        from rooftop.target.environments import Releases, python_with, run_rooftop

        words, script = list(ctx.meta[WORDS]), list[str]()
        if "--" in words:
            at = words.index("--")
            words, script = words[:at], words[at:]
            if len(script) > 1 and os.sep in script[1] and not script[1].endswith(".py"):
                raise RooftopError("with", releases, f"a bare python: {script[1]} has its own jax")
        at = next(at for at, word in enumerate(words) if word == "--with" or word.startswith("--with="))
        del words[at : at + (2 if words[at] == "--with" else 1)]
        with progress_line(shown=not ctx.params.get("as_json")) as on_progress:
            python = python_with(Releases.parse(releases), on_progress)
        return run_rooftop(python, [str(ctx.info_name), *words, *script])


OUT = option(
    "--out", group=OUTPUT, type=FOLDER, help="Write report and optimised HLO of all programs of a script here."
)
WITH = option(
    "--with",
    "releases",
    group=RUN,
    metavar="jax==X,libtpu==Y",
    help="Run the same with other releases, in an environment of their own.",
)


@contextmanager
def progress_line(*, shown: bool) -> Iterator[Callable[[str, float], None] | None]:
    """A callback (phase, seconds) that keeps a line on a terminal up to date; a log gets a line a minute.

    Both are on stderr. None if nothing is to be shown.
    """
    if not shown:
        yield None
        return
    if not sys.stderr.isatty():
        logged_s = time.monotonic()

        def log(phase: str, elapsed_s: float) -> None:
            nonlocal logged_s
            if time.monotonic() - logged_s >= _LOG_EVERY_S:
                logged_s = time.monotonic()
                click.echo(f"rooftop: {phase}: {elapsed_s:.0f} s", err=True)

        yield log
        return

    def write(phase: str, elapsed_s: float) -> None:
        click.echo(f"\r{phase}: {elapsed_s:.0f} s\x1b[K", err=True, nl=False)

    try:
        yield write
    finally:
        click.echo("\r\x1b[K", err=True, nl=False)
