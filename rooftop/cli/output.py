"""Text that all verbs print alike: answers, progress, help with examples, and usage errors of one line.

``--json`` is one object on stdout and nothing else.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import click

from rooftop.core.errors import Infeasible, RooftopError, unknown
from rooftop.core.printable import printable, printable_json
from rooftop.core.records import Record

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

    from rooftop.present.document import Document
    from rooftop.requests.request import Request


#: Key of a click context's ``meta``: lines that say what names on the command line mean.
MEANINGS = "rooftop.meanings"


def emit_json(data: object) -> None:
    """Write one JSON object on stdout. NaN and infinities are refused: JSON has none."""
    text = json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False)
    click.echo(printable_json(text))


def say(line: str, *, err: bool = False) -> None:
    """Write a line on stdout, or stderr, with control characters of names in it as text."""
    click.echo(printable(line), err=err)


def console() -> Console:
    """The console for tables; imported late, because rich costs more than a plan does."""
    from rich.console import Console
    from rich.segment import Segment

    class Page(Console):
        def on_broken_pipe(self) -> None:
            raise  # main decides the exit status

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            # Names may have characters that a terminal obeys; those of styles are added later.
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    # Piped output has no width of its own: COLUMNS, or 110.
    page = Page(highlight=False)
    return page if page.is_terminal or "COLUMNS" in os.environ else Page(highlight=False, width=110)


def show(
    answer: Mapping[str, object] | Record,
    written: Mapping[str, object] | None = None,
    *,
    as_json: bool = False,
    request: Request | None = None,
    **context: Any,
) -> None:
    """Print an answer: its JSON, or its document and the files ``written`` by what they hold (None: not written).

    A ``request`` that the answer does not carry is written next to it.
    """
    if as_json:
        data = answer.to_json() if isinstance(answer, Record) else dict(answer)
        emit_json(data if request is None else data | request.in_answer())
        return
    from rooftop.present.documents import document

    show_document(document(answer, **context), written)


@contextmanager
def no_answer(*, as_json: bool) -> Iterator[None]:
    """Print the reason why there is no answer as the only line of stdout, and exit with status 1.

    With ``as_json`` nothing is printed here: the reason is that of every Infeasible, on stderr.
    """
    try:
        yield
    except Infeasible as no:
        if as_json:
            raise
        say(str(no))
        sys.exit(no.exit_status)


def show_document(document: Document, written: Mapping[str, object] | None = None) -> None:
    """Print a document, then the files ``written``."""
    from rooftop.present.terminal import printed

    out = console()
    context = click.get_current_context(silent=True)
    for line in () if context is None else context.meta.get(MEANINGS, ()):
        out.print(line, markup=False, soft_wrap=True)
    out.print(printed(document, out.width), soft_wrap=True)
    for name, file in (written or {}).items():
        if file is not None:
            out.print(f"{name} written to {file}", markup=False, soft_wrap=True)


@contextmanager
def progress_bar(*, shown: bool, after_s: float = 0.0) -> Iterator[Callable[[int, int, str], None] | None]:
    """Progress callback ``(done, total, label)`` that draws a bar on stderr; None if stderr is not a terminal.

    The bar begins at the first call ``after_s`` seconds from now: short work shows none.
    """
    if not (shown and sys.stderr.isatty()):
        yield None
        return
    begin = time.monotonic() + after_s
    with ExitStack() as stack:
        bars: list[Callable[[int, int, str], None]] = []

        def show_progress(done: int, total: int, what: str) -> None:
            if not bars and time.monotonic() >= begin:
                bars.append(stack.enter_context(_bar()))
            for bar in bars:
                bar(done, total, what)

        yield show_progress


@contextmanager
def _bar() -> Iterator[Callable[[int, int, str], None]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("")
        yield lambda done, total, what: bar.update(task, completed=done, total=total, description=escape(what))


def write_examples(formatter: click.HelpFormatter, examples: Sequence[str]) -> None:
    """Write command lines as they are, a section of them; those of several lines keep their lines."""
    if examples:
        with formatter.section("Examples" if len(examples) > 1 else "Example"):
            for line in "\n".join(examples).splitlines():
                formatter.write(f"{'':{formatter.current_indent}}{line}\n")


@contextmanager
def named_context(ctx: click.Context) -> Iterator[None]:
    """Give the context to click's errors about an option's value, some of which have none."""
    try:
        yield
    except click.BadOptionUsage as error:
        error.ctx = error.ctx or ctx
        raise


class VerbGroup(click.Group):
    """A group of commands that lists them for a word that names none. Its help ends with ``examples``."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = tuple(examples)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples."""
        write_examples(formatter, self.examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the words of the group. Raises RooftopError if none names a command of a group within rooftop."""
        if not args and ctx.parent is not None and not ctx.resilient_parsing:
            names = self.list_commands(ctx)
            raise RooftopError(f"{ctx.info_name}", None, f"one of {', '.join(names)}; {ctx.command_path} --help")
        with named_context(ctx):
            return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """The command that the first word names. Raises RooftopError; while a shell completes a line, returns none."""
        known = self.list_commands(ctx)
        if args and not args[0].startswith("-") and args[0] not in known and not ctx.resilient_parsing:
            raise unknown("verb" if ctx.parent is None else f"{ctx.info_name}", args[0], known)
        return super().resolve_command(ctx, args)


def usage_line(error: click.UsageError) -> str:
    """Return click's error as one line of a RooftopError: the field, its value, and the accepted values."""
    message = error.format_message().replace("\n", " ")
    if error.ctx is None:
        return message
    params = error.ctx.command.get_params(error.ctx)
    if isinstance(error, click.NoSuchOption):
        return str(_no_such_option(error.option_name, params, f"{error.ctx.command_path} --help"))
    if isinstance(error, click.BadOptionUsage):
        named = next((param for param in params if error.option_name in (*param.opts, *param.secondary_opts)), None)
        if named is not None:
            if isinstance(named, click.Option) and named.is_flag:
                return str(RooftopError(_field(named), "a value", f"{error.option_name}, without one"))
            return str(RooftopError(_field(named), None, _accepted(named, error.ctx)))
    if more := re.fullmatch(r"Got unexpected extra arguments? \((.*)\)", message):
        return str(RooftopError("argument", more.group(1), f"no more than in {_usage(error.ctx)}"))
    if not isinstance(error, click.BadParameter) or error.param is None:
        return f"{message.rstrip('.')}; accepted: {_usage(error.ctx)}"
    field, accepted = _field(error.param), _accepted(error.param, error.ctx)
    if isinstance(error, click.MissingParameter):
        return str(RooftopError(field, None, accepted))
    # Click does not keep what was given; of a number its sentence begins with it.
    value, is_number, _ = error.message.partition(" is not ")
    return f"{field}: {f'got {value}' if is_number else error.message.rstrip('.')}; accepted: {accepted}"


def _no_such_option(name: str, params: Sequence[click.Parameter], listed_by: str) -> RooftopError:
    """The error for an option that a verb has not: it names one that is spelt alike, or one whose help has the word."""
    options = [param for param in params if isinstance(param, click.Option)]
    names = {name: param for param in options for name in (*param.opts, *param.secondary_opts) if name.startswith("--")}
    error = unknown("option", name, names, listed_by=listed_by)
    # Nobody who writes another word for an option is after --help.
    _, alike, rest = error.accepted.rpartition("did you mean --help? ")
    word = re.compile(rf"\b{re.escape(name.strip('-'))}\b", re.IGNORECASE)
    about = next((known for known, param in names.items() if word.search(param.help or "")), None)
    if not alike or about is None:
        return error
    return RooftopError("option", name, f"did you mean {about}? {rest}")


def _usage(ctx: click.Context) -> str:
    return " ".join((ctx.command_path, *ctx.command.collect_usage_pieces(ctx)))


def _field(param: click.Parameter) -> str:
    if isinstance(param, click.Option):
        return max(param.opts, key=len).lstrip("-")
    return (param.name or "argument").rstrip("_").replace("_", "-")


def _accepted(param: click.Parameter, ctx: click.Context) -> str:
    if not isinstance(param, click.Option):
        return _usage(ctx)
    if isinstance(param.type, click.IntRange):
        most = "or more" if param.type.max is None else f"to {param.type.max}"
        return f"a whole number from {param.type.min} {most}"
    option = f"{max(param.opts, key=len)} {param.make_metavar(ctx)}"
    return f"{option}: {param.help.rstrip('.')}" if param.help else option
