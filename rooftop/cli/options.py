"""The vocabulary of options: one name, one type and one meaning in every verb.

A verb declares an option of its own with ``option`` and takes a shared one by its decorator, such as
``@on_option(required=True)``; keywords refine what the vocabulary says, help and default above all. Types check a value
while the command line is parsed, before planners, JAX or servers are imported, and complete it in a shell.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from rooftop.cli.output import MEANINGS, named_context, write_examples
from rooftop.core.errors import RooftopError
from rooftop.requests import kinds
from rooftop.requests.kinds import Kind
from rooftop.requests.request import Request, Setting
from rooftop.requests.words import (
    GROUPS,
    HARDWARE,
    NUMERICS,
    OUTPUT,
    PROCESSES,
    RUN,
    WORKLOAD,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _Decorator(Protocol):
    """A decorator of a command's function."""

    def __call__(self, function: _Function, /) -> _Function:
        """Add a parameter to the command."""
        ...


class GroupedOption(click.Option):
    """An option shown under the heading ``group`` of a command's help."""

    def __init__(self, *args: Any, group: str | None = None, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.group = group


class VerbCommand(click.Command):
    """A command whose help shows options in groups and ends with ``examples``: command lines, each of which runs."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.examples = tuple(examples)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Read the options. Raises click's usage errors, each with its context."""
        with named_context(ctx):
            return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section for each group of options."""
        records: dict[str, list[tuple[str, str]]] = {group: [] for group in (*GROUPS, "Other options")}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if isinstance(param, click.Option) and record is not None:
                group = param.group if isinstance(param, GroupedOption) else None
                records[group or "Other options"].append(record)
        for group, rows in records.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples unwrapped, so that each can be copied."""
        write_examples(formatter, self.examples)


def option(*names: str, group: str | None = None, **attributes: Any) -> _Decorator:
    """``click.option`` under a heading of ``GROUPS``. Help shows a default."""
    attributes.setdefault("show_default", attributes.get("default") is not None)
    return click.option(*names, cls=GroupedOption, group=group, **attributes)


#: Where a command line after ``--`` stands in click's context.
SCRIPT = "rooftop.script"

# ---------------------------------------------------------------- types


class OptionType(click.ParamType):  # type: ignore[type-arg]  # generic from click 8.4 on only
    """A kind of value as click's type: it reads a text and completes one."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.name = kind.name

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        """The names of a choice, or the word that stands for a value."""
        if isinstance(self.kind, kinds.Name):
            return "|".join(self.kind.names)
        return self.name.upper() if self.name.islower() else self.name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text. Raises RooftopError naming the option."""
        read = self.kind.read(value, field_of(param))
        if ctx is not None:
            # A dict, as a value may be converted twice; the document of the answer begins with these lines.
            ctx.meta.setdefault(MEANINGS, {}).update(dict.fromkeys(self.kind.meanings(read)))
        return read

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Values that begin with ``incomplete``; of a model, files where no preset does."""
        names = [CompletionItem(name) for name in self.kind.candidates(incomplete) if name.startswith(incomplete)]
        return names or ([CompletionItem(incomplete, type="file")] if isinstance(self.kind, kinds.Model) else [])


def Name(*names: str) -> OptionType:  # as a type
    """One of a few names; another is refused with the close ones suggested."""
    return OptionType(kinds.Name(*names))


COUNT = OptionType(kinds.COUNT)
DEVICES = OptionType(kinds.DEVICES)
COUNT_OR_ZERO = OptionType(kinds.COUNT_OR_ZERO)
TOP = OptionType(kinds.TOP)
QUANTITY = OptionType(kinds.QUANTITY)
DTYPE = OptionType(kinds.DTYPE)
DTYPES = OptionType(kinds.DTYPES)
HARDWARE_NAME = OptionType(kinds.HARDWARE_NAME)
MODEL = OptionType(kinds.MODEL)
AXES = OptionType(kinds.AXES)
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
PATH = click.Path(path_type=Path)


def field_of(param: click.Parameter | None) -> str:
    """The name of an option or argument in errors: ``batch-seqs``."""
    if param is None:
        return "value"
    return max(param.opts, key=len).lstrip("-").replace("_", "-")


# ---------------------------------------------------------------- shared options


def _shared(*names: str, group: str, **attributes: Any) -> Callable[..., _Decorator]:
    """A decorator factory for an option of the vocabulary. Its keywords refine ``attributes``, not name or type."""

    def decorator(**changes: Any) -> _Decorator:
        return option(*names, **({"group": group} | attributes | changes))

    return decorator


on_option = _shared("--on", group=HARDWARE, type=HARDWARE_NAME, help="CHIP:SHAPE[@SLICES]: v5e:4x4; or v6e-16, 8xH100.")
batch_samples_option = _shared("--batch-samples", group=WORKLOAD, type=COUNT, help="Samples of a step, on all devices.")
seq_option = _shared("--seq", "seq_len", group=WORKLOAD, type=COUNT, help="Tokens of a sequence.")
dtype_option = _shared("--dtype", group=NUMERICS, type=DTYPE, help="Dtype of arrays without one.")
host_threads_option = _shared("--host-threads", group=RUN, type=COUNT, help="Threads that prepare batches on a host.")
devices_option = _shared("--devices", group=PROCESSES, type=DEVICES, help="Emulate N devices on the CPU.")
coordinator_option = _shared(
    "--coordinator", group=PROCESSES, metavar="HOST:PORT", help="Address of the first process; 'auto' asks JAX."
)
processes_option = _shared("--processes", group=PROCESSES, type=COUNT, help="Number of processes.")
process_option = _shared("--process", group=PROCESSES, type=COUNT_OR_ZERO, help="Index of this process, from 0.")

top_option = _shared("--top", group=OUTPUT, type=TOP, help="Rows to list, or all.")
frames_option = _shared(
    "--frames",
    group=OUTPUT,
    type=Name("first", "all"),
    default="first",
    help="Source lines: the first outside of libraries, or all frames.",
)
perfetto_option = _shared("--perfetto", group=OUTPUT, type=FILE, help="Write the timeline here, for ui.perfetto.dev.")
xprof_option = _shared(
    "--xprof", group=OUTPUT, type=FOLDER, help="Write it as a profile into this folder, for XProf and TensorBoard."
)
report_option = _shared("--report", group=OUTPUT, type=FILE, help="Write a page with tables and plots here (HTML).")
output_option = _shared("-o", "--output", group=OUTPUT, type=FILE, help="Write the JSON answer here.")


def json_option(function: _Function) -> _Function:
    """The ``--json`` flag, passed to the command as ``as_json``."""
    decorate = option("--json", "as_json", group=OUTPUT, is_flag=True, help="One JSON object on stdout, nothing else.")
    return decorate(function)


# ---------------------------------------------------------------- options of requests


class _Required:
    """A parameter that a file of ``--request`` may give, or that of another parameter, ``stated_by``."""

    def __init__(self, *args: Any, stated_by: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.stated_by = stated_by

    def value_is_missing(self, value: Any) -> bool:
        """True if neither the command line nor a file gives it."""
        context = click.get_current_context(silent=True)
        files = ("request_file", self.stated_by) if self.stated_by else ("request_file",)
        has_file = context is not None and any(isinstance(context.params.get(name), Path | str) for name in files)
        missing: bool = super().value_is_missing(value)  # type: ignore[misc]  # of click.Parameter
        return missing and not has_file


class _RequestOption(_Required, GroupedOption):
    """An option of a request's field."""


class _RequestArgument(_Required, click.Argument):
    """The argument of a request's field, or the words after ``--`` of a verb that takes a script."""

    def consume_value(self, ctx: click.Context, opts: Mapping[str, Any]) -> tuple[Any, ParameterSource]:
        """The word on the command line, or those of the script. Raises RooftopError for both."""
        value, source = super().consume_value(ctx, opts)
        script = ctx.meta.get(SCRIPT)
        if script is None:
            return value, source
        if isinstance(value, str):
            example = f"rooftop {ctx.info_name} --on SLICE -- python SCRIPT"
            raise RooftopError(field_of(self), value, f"nothing with a script: {example}")
        return script, ParameterSource.COMMANDLINE


def request_options(kind: type[Request]) -> _Decorator:
    """Give a verb the fields of a request as arguments and options; its function gets the ``request``.

    ``--request FILE`` reads the request from a file, or from an answer; options change it. ``--save-request FILE``
    writes it.
    """

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def with_request(*, request_file: Path | None, save_request: Path | None, **values: Any) -> Any:
            typed = {setting.name: values.pop(setting.name) for setting in kind.settings() if setting.word.typed}
            request = _request(kind.checked(), typed, request_file)
            if save_request is not None:
                request.write(save_request)
            return function(request=request, **values)

        with_request.__dict__["request_kind"] = kind
        reading = option(
            "--request", "request_file", group=OUTPUT, type=FILE, is_eager=True,
            help="Take the request from this file, or from an answer (JSON); options change it.",
        )  # fmt: skip
        writing = option("--save-request", group=OUTPUT, type=FILE, help="Write the request here (JSON).")
        return reading(writing(field_options(kind)(with_request)))

    return decorate


def field_options(kind: type[Request], *, required: bool = True) -> _Decorator:
    """Give a verb the fields of a request as arguments and options, all of them optional unless ``required``."""

    def decorate(function: Any) -> Any:
        files = {setting.word.stated_by for setting in kind.settings()}
        for setting in reversed(kind.settings()):
            if setting.word.typed:
                # What may state others is read before them.
                function = _parameter(setting, required=required, is_eager=setting.name in files)(function)
        return function

    return decorate


def _request(kind: type[Request], values: Mapping[str, Any], path: Path | None) -> Request:
    """The request on the command line, over the one in a file. Raises RooftopError."""
    if path is None:
        return kind(**values)
    context = click.get_current_context()
    sources = {name: context.get_parameter_source(name) for name in values}
    typed = (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)
    return kind.read(path, **{name: value for name, value in values.items() if sources[name] in typed})


def _parameter(setting: Setting, *, required: bool, is_eager: bool = False) -> _Decorator:
    """The argument or option of a field."""
    word, default = setting.word, None if setting.default is dataclasses.MISSING else setting.default
    attributes: dict[str, Any] = {
        "required": required and setting.is_required({}),
        "type": _type(setting.kind),
        "stated_by": setting.word.stated_by,
        "is_eager": is_eager,
    }
    if default not in (None, ()):
        attributes["default"] = setting.kind.text(default)
    if word.metavar or setting.kind.name == "DIR":
        attributes["metavar"] = word.metavar or setting.kind.name
    if setting.is_argument:
        return click.argument(setting.name, cls=_RequestArgument, **attributes)
    names = [f"--{setting.option}", setting.name]
    if isinstance(setting.kind, kinds.Flag):
        del attributes["type"]
        attributes["default"] = default
        if default is False:
            attributes["is_flag"] = True
        else:
            names[0] = f"--{setting.option}/--{setting.option_off}"
    if word.several:
        attributes["callback"] = lambda ctx, param, entries: setting.kind.gather(entries)
    text = re.sub(r"``(\w+)``", lambda match: "--" + match[1].replace("_", "-"), setting.about)
    return click.option(
        *names, cls=_RequestOption, group=word.group, help=text, multiple=word.several, envvar=word.envvar,
        show_default=default not in (None, (), "") and default is not False, **attributes,
    )  # fmt: skip


def _type(kind: Kind) -> click.ParamType:  # type: ignore[type-arg]  # generic from click 8.4 on only
    if isinstance(kind, kinds.Location):
        return click.Path(dir_okay=kind.folders, file_okay=kind.files, path_type=Path)
    return OptionType(kind)
