"""The ``rooftop`` command: a group whose verbs are imported when they are called."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from rooftop import __version__
from rooftop.cli.output import VerbGroup, say, usage_line
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.extras import naming_extras
from rooftop.core.quantities import DTYPE_ALIASES

#: Verb -> (MODULE:COMMAND, one line of help). A module with one verb calls it ``command``.
VERBS: dict[str, tuple[str, str]] = {
    "chips": ("rooftop.cli.catalogue:chips", "The hardware catalogue, every figure with its source."),
    "model": ("rooftop.cli.catalogue:model", "Parameters, FLOPs and KV bytes of a model."),
    "support": ("rooftop.cli.catalogue:support", "A model on a chip: what works, and with which evidence."),
    "matmul": ("rooftop.cli.matmul", "Sharded arrays: the cost of multiplying and moving them."),
    "plan": ("rooftop.cli.plan", "Plan training or serving: sharding, memory, time, cost, and why."),
    "simulate": ("rooftop.cli.simulate", "Requests against a serving plan: the latencies that users feel."),
    "compile": ("rooftop.cli.programs.compile", "Compile a plan, a script or a function, with no TPU or GPU."),
    "check": ("rooftop.cli.programs.check", "What a compiled program wastes, with prices; limits for CI."),
    "tune": ("rooftop.cli.programs.tune", "Options and shardings that make a step faster."),
    "diff": ("rooftop.cli.explain:diff", "Two runs, plans or compilations: what changed."),
    "train": ("rooftop.cli.train", "Train a plan or a model on local devices."),
    "serve": ("rooftop.cli.serve", "Serve a checkpoint, as OpenAI's API, on local devices."),
    "embed": ("rooftop.cli.embed", "Embedding tables: limits from data, training, export."),
    "explain": ("rooftop.cli.explain", "Where time goes: measured next to compiled next to planned."),
    "bench": ("rooftop.cli.bench", "Measure: collectives on local devices, a server under load."),
    "calibrate": ("rooftop.cli.bench:calibrate", "Measure your devices, or a run: fractions for plans."),
    "validate": ("rooftop.cli.explain:validate", "Predictions next to published measurements, misses included."),
    "ui": ("rooftop.cli.ui", "Explorers in a browser, with sliders; plans and runs too."),
}


class _ReaderGone(Exception):
    """The reader of stdout (a pager, ``head``) has closed it. No OSError: click would exit with status 1."""


@contextmanager
def _reader_may_go() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise _ReaderGone from None


class _Verbs(VerbGroup):
    """A group that lists its verbs without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        module, _, name = VERBS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name or "command")
        return command

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with _reader_may_go():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _reader_may_go():
            return super().invoke(ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.group(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"]},
    examples=("rooftop plan train llama3-70b --on v5p:16x16x16 --batch-tokens 4Mi",),
)
@click.version_option(__version__, prog_name="rooftop")
def cli() -> None:
    """Plan, compile, run and explain large-model training, serving and embedding on TPU and GPU meshes.

    Every verb takes --json. Exit status: 0 the answer, 1 the answer is no, 2 the input is wrong. Words of answers:
    rooftop help glossary [WORD].
    """


def _as_typed(error: RooftopError, words: Sequence[str]) -> RooftopError:
    """The error about a dtype with the spelling that stands in the command line: fp8, not f8_e4m3."""
    parts = [part for word in words for part in re.split("[=,]", word)]
    typed = [part for part in parts if DTYPE_ALIASES.get(part.lower(), part) == error.given]
    return RooftopError(error.field, typed[0], error.accepted) if typed and error.given not in parts else error


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: every failure that a user can cause is one line on stderr and its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    about_words = words[:2] == ["help", "glossary"]
    if words[:1] == ["help"] or (words[:1] in (["-h"], ["--help"]) and words[1:2] != []):
        words = [*words[1:], "--help"]
    elif words == ["version"]:
        words = ["--version"]
    try:
        if about_words:
            _print_glossary(words[1:-1])
            sys.exit(0)
        with naming_extras():
            status = cli.main(args=words, prog_name="rooftop", standalone_mode=False)
    except RooftopError as error:
        _fail(str(_as_typed(error, words)), error.exit_status)
    except Infeasible as error:
        _fail(str(error), error.exit_status)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        _fail(usage_line(error), 2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except _ReaderGone:
        _drop_output()
        sys.exit(141)
    except OSError as error:
        # A full or broken disk is not the program's fault. Any other OSError that a verb lets through is a bug.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        if error.filename is None:
            _drop_output()
        _fail(f"output: got {error.filename or 'stdout'}; accepted: a place that can be written ({error.strerror})", 2)
    sys.exit(status if isinstance(status, int) else 0)


def _print_glossary(words: Sequence[str]) -> None:
    """Print the entry of a word, or all entries. Raises RooftopError for a word that has none."""
    from rooftop.present.glossary import entries, entry

    formatter = click.HelpFormatter()
    chosen = [entry(" ".join(words))] if words else entries()
    formatter.write_dl([(item.words, item.meaning) for item in chosen])
    with _reader_may_go():
        say(formatter.getvalue().rstrip("\n"))


def _drop_output() -> None:
    """Send what stdout still holds to nowhere: Python's flush at exit would fail again, with status 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, status: int) -> None:
    say(f"rooftop: {message}", err=True)
    sys.exit(status)
