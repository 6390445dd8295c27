"""The ``rooftop`` command: a group whose verbs are imported when they are called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

import click

from rooftop import __version__
from rooftop.errors import Infeasible, RooftopError, unknown

#: Verb -> (module, one line of help). The module holds a click command named ``command``.
VERBS: dict[str, tuple[str, str]] = {
    "chips": ("rooftop.cli.chips", "The hardware catalogue, every figure with its source."),
    "model": ("rooftop.cli.model", "Parameters, FLOPs and KV bytes of a model."),
    "matmul": ("rooftop.cli.matmul", "Sharded arrays: what multiplying and moving them costs."),
    "plan": ("rooftop.cli.plan", "Plan training or serving: sharding, memory, time, cost, and why."),
    "simulate": ("rooftop.cli.simulate", "Requests against a serving plan: the latencies that users feel."),
    "compile": ("rooftop.cli.compile", "A plan, or any JAX function, through XLA:TPU, without a TPU."),
    "train": ("rooftop.cli.train", "Train a plan or a model on the devices that are here."),
    "serve": ("rooftop.cli.serve", "Serve a checkpoint, as OpenAI's API, on the devices here."),
    "embed": ("rooftop.cli.embed", "Embedding tables: limits from data, training, export."),
    "explain": ("rooftop.cli.explain", "Where time goes: measured beside compiled beside planned."),
    "bench": ("rooftop.cli.bench", "Measure: collectives on the devices here, a server under load."),
    "validate": ("rooftop.cli.validate", "Our predictions beside published measurements, misses included."),
    "ui": ("rooftop.cli.ui", "The same in a browser, with sliders; plans and runs opened."),
}


class _Verbs(click.Group):
    """A group that lists its verbs without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS:
            return None
        command: click.Command = importlib.import_module(VERBS[cmd_name][0]).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in VERBS:
            raise unknown("verb", args[0], VERBS)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Verbs"):
            formatter.write_dl([(name, text) for name, (_, text) in VERBS.items()])


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rooftop")
def cli() -> None:
    """Plan, compile, run and explain large-model training, serving and embedding on TPU and GPU meshes.

    Every verb takes --json. Exit status: 0 the answer, 1 the answer is no, 2 the input is wrong.

    \b
    Example: rooftop plan train llama3-70b --on v5p:16x16x16 --batch-tokens 4Mi --seq 4096
    """


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point: every failure that a user can cause is one line on stderr and its exit status."""
    try:
        status = cli.main(args=argv if argv is None else list(argv), prog_name="rooftop", standalone_mode=False)
    except (RooftopError, Infeasible) as error:
        _fail(str(error), error.exit_status)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        _fail(error.format_message().replace("\n", " "), 2)
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    except BrokenPipeError:
        # The reader (a pager, `head`) has gone: nothing is left to say, and flushing would raise again.
        sys.stderr.close()
        sys.exit(141)
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str, status: int) -> None:
    click.echo(f"rooftop: {message}", err=True)
    sys.exit(status)
