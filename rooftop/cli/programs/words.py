"""Command lines with arrays of a function, or with a script after ``--``, and the options that they share."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypedDict, TypeVar

import click

from rooftop.cli.options import FOLDER, VerbCommand, layout_option, mesh_option, min_flops_option, option, steps_option
from rooftop.core.errors import RooftopError, refuse
from rooftop.requests.words import OUTPUT, PARALLELISM, RUN, WORKLOAD

_Command = TypeVar("_Command", bound=Callable[..., Any])
#: Where a command line after ``--`` stands in click's context.
SCRIPT = "rooftop.script"
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


#: Options of a function's arrays and mesh, in the order of ``--help``.
_FUNCTION_OPTIONS = (
    option(
        "--args",
        "arrays",
        group=WORKLOAD,
        multiple=True,
        metavar="ARRAY...",
        help="Arrays of a function: bf16[8192_X, D_Y].",
    ),
    option("--dims", group=WORKLOAD, metavar="SIZES", help="Sizes of the dims that arrays name: D=4096,F=16Ki."),
    mesh_option(help="Mesh axes and their sizes: X=4,Y=4."),
    layout_option(),
    option("--auto", is_flag=True, group=PARALLELISM, help="Leave axes to the partitioner: not JAX's explicit mode."),
)


class FunctionOptions(TypedDict):
    """A function's dims and mesh, as ``inspect`` and ``tune`` of the library take them next to its ``arrays``."""

    dims: str | None
    mesh: str | None
    layout: str | None
    auto: bool


def function_options(command: _Command) -> _Command:
    """Add the options of ``arrays`` and ``FunctionOptions`` to a command."""
    for decorate in reversed(_FUNCTION_OPTIONS):
        command = decorate(command)
    return command


#: Options of a script, for every verb that takes one.
_SCRIPT_OPTIONS = (
    steps_option(help="The last step of a script, in calls of one program; 0 runs it to its end. [default: 3]"),
    min_flops_option(),
)


class ScriptOptions(TypedDict):
    """Options of a script, as the command line has them."""

    steps: int | None
    min_flops: float | None


def script_options(command: _Command) -> _Command:
    """Add ``ScriptOptions`` to a command."""
    for decorate in reversed(_SCRIPT_OPTIONS):
        command = decorate(command)
    return command


def refuse_script_options(options: ScriptOptions) -> None:
    """Raise RooftopError for an option of a script without one."""
    # 0 is a value too.
    values = {name.replace("_", "-"): f"{value:g}" for name, value in options.items() if value is not None}
    refuse(values, "nothing but with a script: -- python SCRIPT")


def run_settings(options: ScriptOptions) -> dict[str, Any]:
    """Options of a script as the library's functions take them."""
    from rooftop.target.running import STEPS

    steps = STEPS if options["steps"] is None else options["steps"]
    return {**options, "steps": steps or None}


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
NO_CACHE = option("--no-cache", is_flag=True, group=RUN, help="Compile again, even if the answer is known.")


def program_of(program: str | None, accepted: str) -> str | list[str]:
    """The program, or the words of a script after ``--``. Raises RooftopError for both, and for neither."""
    context = click.get_current_context()
    script: list[str] | None = context.meta.get(SCRIPT)
    if program is not None and script is not None:
        example = f"rooftop {context.info_name} --on SLICE -- python SCRIPT"
        raise RooftopError("program", program, f"nothing with a script: {example}")
    named = program if script is None else script
    if named is None:
        raise RooftopError("program", None, accepted)
    return named


def required_slice(on: str | None) -> str:
    """The slice to compile for. Raises RooftopError without one."""
    if on is None:
        raise RooftopError("on", None, "a slice, such as v5e:4x4")
    return on


def compiler_options_of(texts: Sequence[str]) -> dict[str, bool | int | str]:
    """Options of the compiler from NAME=VALUE. Raises RooftopError."""
    options: dict[str, bool | int | str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise RooftopError(
                "compiler-option", text, "NAME=VALUE, such as xla_tpu_enable_async_collective_fusion=true"
            )
        words: dict[str, bool] = {"true": True, "false": False}
        number = int(value) if value.lstrip("-").isdecimal() else value
        options[name] = words.get(value.lower(), number)
    return options


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
