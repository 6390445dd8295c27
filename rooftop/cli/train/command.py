"""``rooftop train``: the planned program, or a model of any config.json, on the devices that are here."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from rooftop.cli.options import json_option
from rooftop.cli.output import emit_json, progress_bar
from rooftop.cli.process import PACKAGES, expect_late_reports, train_together
from rooftop.runs.environment import keep_compilations, prepare_environment

if TYPE_CHECKING:
    from rooftop.runs.folder import RunFolder
    from rooftop.train.engine import Outcome
    from rooftop.train.start import ReadyRun, TrainRequest

_PATH = click.Path(path_type=Path)
#: Options whose values are paths.
_PATHS = ("run", "data", "tokenizer", "init", "model")
#: Options of this call only: they do not say how a run goes on.
_ONCE = ("resume", "as_json", "coordinator", "processes", "process", "profile", "plan", "run")


@click.command()
@click.argument("plan", required=False, type=click.Path(dir_okay=False, path_type=Path), metavar="[PLAN.json]")
@click.option("--run", type=_PATH, metavar="DIR", help="The folder of the run; one that is there goes on.")
@click.option("--resume", type=_PATH, metavar="DIR", help="Go on with the run in DIR, with the options it had.")
@click.option("--data", multiple=True, metavar="PATH", help="Text, JSONL, Parquet, .npy or .bin: file, folder or glob.")
@click.option(
    "--field", default="text", show_default=True, metavar="NAME", help="Of JSONL and Parquet, what is trained on."
)
@click.option("--tokenizer", type=_PATH, metavar="PATH", help="A tokenizer.json, or a folder that has one.")
@click.option("--vocab", metavar="N", help="Train a BPE tokenizer of N tokens on the data.")
@click.option(
    "--model", metavar="MODEL", help="Without a plan: a preset, a config.json, or llama:4M for one of 4M parameters."
)
@click.option(
    "--init", type=_PATH, metavar="DIR", help="Begin with the weights of a published checkpoint (safetensors)."
)
@click.option("--steps", metavar="N", help="Steps in all.")
@click.option("--batch-seqs", metavar="N", help="Sequences in a step, instead of the plan's.")
@click.option("--seq", metavar="N", help="Tokens in a sequence, instead of the plan's.")
@click.option("--mesh", metavar="AXES", help="Mesh axes on the devices here: fsdp=2,tensor=2,context=2.")
@click.option("--as-is", is_flag=True, help="Run a plan for another slice with its own mesh and batch.")
@click.option("--on", metavar="local", help="'local': shrink a plan to the devices that are here.")
@click.option("--devices", metavar="N", help="Emulate N devices on the CPU.")
@click.option(
    "--coordinator", metavar="HOST:PORT", help="Several processes: where the first one listens; 'auto' asks JAX."
)
@click.option("--processes", metavar="N", help="How many processes there are.")
@click.option("--process", metavar="I", help="Which of them this one is, from 0.")
@click.option("--lr", default="3e-4", show_default=True, metavar="X", help="The largest learning rate.")
@click.option("--warmup", metavar="N", help="Steps of warm-up. [default: a tenth of the steps, at most 1000]")
@click.option("--decay", default="cosine", show_default=True, help="cosine, linear or constant.")
@click.option("--decay-steps", metavar="N", help="Where the decay ends. [default: the steps]")
@click.option(
    "--final-lr",
    default="0.1",
    show_default=True,
    metavar="X",
    help="The last learning rate, as a share of the largest.",
)
@click.option("--optimizer", metavar="NAME", help="adamw, adam, lion or sgd. [default: adamw, or the plan's]")
@click.option("--weight-decay", default="0.1", show_default=True, metavar="X", help="Decoupled weight decay.")
@click.option("--clip", default="1", show_default=True, metavar="X", help="Largest norm of the gradients; 0: any.")
@click.option("--z-loss", default="0", show_default=True, metavar="X", help="Coefficient of the z-loss.")
@click.option("--balance-loss", metavar="X", help="Coefficient of the experts' balance. [default: 0.01 with experts]")
@click.option("--expert-capacity", metavar="X", help="Room of an expert, in even shares; without: no token is dropped.")
@click.option("--microbatches", metavar="N", help="Parts of a batch whose gradients are accumulated.")
@click.option("--schedule", metavar="NAME", help="Of pipeline stages: gpipe, 1f1b, interleaved, zero_bubble.")
@click.option("--chunks", metavar="N", help="Model chunks on a stage (interleaved).")
@click.option("--remat", metavar="POLICY", help="none, matmuls, minimal, block, or changes: block,qkv=offload.")
@click.option("--context-attention", metavar="HOW", help="Over a context axis: ring or all_gather.")
@click.option("--compute-dtype", metavar="DTYPE", help="bf16 or f32. [default: the plan's, else bf16, on a CPU f32]")
@click.option("--weights-dtype", metavar="DTYPE", help="Of the stored weights. [default: the plan's, else f32]")
@click.option("--moments-dtype", metavar="DTYPE", help="Of the optimizer's moments. [default: the plan's, else f32]")
@click.option(
    "--seed", default="0", show_default=True, metavar="N", help="Of weights, data order and what is held out."
)
@click.option(
    "--hold-out", default="0.01", show_default=True, metavar="X", help="Share of documents to evaluate on; 0: none."
)
@click.option("--eval-every", metavar="N", help="Steps between evaluations. [default: at the end only]")
@click.option("--eval-batches", default="16", show_default=True, metavar="N", help="Batches of an evaluation at most.")
@click.option("--save-every", default="100", show_default=True, metavar="N", help="Steps between checkpoints.")
@click.option("--keep", default="2", show_default=True, metavar="N", help="Newest checkpoints to keep.")
@click.option("--keep-every", metavar="N", help="Checkpoints of steps that N divides are kept for good.")
@click.option(
    "--divergence",
    default="2",
    show_default=True,
    metavar="NATS",
    help="Stop when the loss has risen by this; 0: never.",
)
@click.option("--peak-flops", metavar="F", help="FLOP/s of one device for MFU, if it is not in the catalogue.")
@click.option("--samples", default="2", show_default=True, metavar="N", help="Texts to draw at the end; 0: none.")
@click.option("--sample-tokens", default="64", show_default=True, metavar="N", help="Tokens of each.")
@click.option("--prompt", default="", metavar="TEXT", help="What they begin with.")
@click.option("--temperature", default="0.8", show_default=True, metavar="X", help="0: the likeliest token each time.")
@click.option("--profile", metavar="steps=A..B", help="Trace these steps with JAX's profiler, into DIR/profile.")
@click.option("--tensorboard", is_flag=True, help="Write the metrics as TensorBoard events too, into DIR/tensorboard.")
@click.option("--export", type=_PATH, metavar="DIR", help="At the end, write the weights as a published checkpoint.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, as_json: bool, **given: Any) -> int:
    r"""Train on the devices that are here: one CPU, emulated ones, GPUs, a TPU slice, or many processes.

    Of a PLAN.json written by 'rooftop plan train', or of a --model. The folder of the run has everything that it needs
    to go on: the same command again, or --resume DIR. SIGTERM and Ctrl-C save at the next step.

    \b
    Examples: rooftop train plan.json --data corpus/ --tokenizer llama/ --run run1 --steps 1000 --on local
              rooftop train --model llama:2M --data '/usr/lib/python3*/**/*.py' --vocab 2048 --run run2 --steps 200 \
                  --devices 8 --mesh fsdp=2,tensor=2,context=2
    """
    from rooftop.core.errors import RooftopError
    from rooftop.runs.folder import RunFolder

    place = given["resume"] or given["run"]
    if place is None:
        raise RooftopError("run", None, "--run DIR, a folder to keep the run in")
    folder = RunFolder(path=place.absolute())
    recorded = folder.read()
    if recorded is None and given["resume"] is not None:
        raise RooftopError("resume", str(place), "the folder of a run that has begun")
    explicit = {
        name: _plain(name, value)
        for name, value in given.items()
        if ctx.get_parameter_source(name) is ParameterSource.COMMANDLINE
    }
    defaults = {name: _plain(name, value) for name, value in given.items()}
    # A run that is there goes on with the options that it had, but for those that are given now.
    options = defaults | (recorded["arguments"] if recorded is not None else {}) | explicit
    prepare_environment(options["devices"], packages=PACKAGES, extra="train")

    def train() -> int:
        return _train(options, explicit, folder, recorded, as_json)

    return train() if options["coordinator"] is None else train_together(options, train)


def _plain(name: str, value: Any) -> Any:
    """An option as JSON holds it; paths do not depend on where the command is called."""
    if isinstance(value, tuple):
        return [_plain(name, each) for each in value]
    if isinstance(value, Path) or (name in _PATHS and isinstance(value, str) and os.path.exists(value)):
        return str(Path(value).absolute())
    if name == "data" and isinstance(value, str):
        return str(Path(value).expanduser().absolute())
    return value


def _train(
    options: dict[str, Any],
    explicit: Mapping[str, Any],
    folder: RunFolder,
    recorded: dict[str, Any] | None,
    as_json: bool,
) -> int:
    keep_compilations()
    import jax

    from rooftop.checkpoints.huggingface_files import require_new
    from rooftop.cli.train.options import count, course_of, request_of, sampling_of
    from rooftop.runs.checkpoints import Checkpoints
    from rooftop.runs.signals import Signals, Stopped
    from rooftop.train.engine import TrainEngine
    from rooftop.train.live import live_view
    from rooftop.train.recording import Watch
    from rooftop.train.start import prepare, session

    first = jax.process_index() == 0
    quiet = as_json or not first

    def say(line: str) -> None:
        if not quiet:
            click.echo(line)

    expect_late_reports()
    course = course_of(options)
    request = request_of(options, explicit, folder, recorded)
    sampling = sampling_of(options)
    if first and options["export"] is not None:
        # Found now, and not after the last step.
        require_new(Path(options["export"]))
    with Signals() as signals:
        try:
            with folder.claimed() if first else _nothing():
                with progress_bar(shown=not quiet) as progress:
                    ready = prepare(request, recorded, progress)
                checkpoints = Checkpoints(
                    folder.checkpoints, keep=count(options, "keep") or 1, every=count(options, "keep_every")
                )
                done = checkpoints.steps()[-1] if checkpoints.steps() else 0
                if first:
                    _record(
                        folder, ready, options, recorded, session(done, shlex.join(["rooftop", *sys.argv[1:]])), request
                    )
                say(_headline(ready))
                if done:
                    say(f"going on behind step {done}")
                with live_view(course.steps, done, None if quiet else say) as (on_step, line):
                    shown = Watch(
                        on_step=on_step if first else lambda record: None,
                        on_evaluation=lambda step, found: line(
                            f"step {step}: held-out loss {found.loss:.4f}, perplexity {found.perplexity:.4g} "
                            f"({found.tokens} tokens)"
                        ),
                        say=line if first else lambda text: None,
                    )
                    engine = TrainEngine(
                        job=ready.job, data=ready.data, folder=folder, checkpoints=checkpoints, rates=ready.rates,
                        course=course, watch=shown,
                    )  # fmt: skip
                    outcome = engine.train(signals)
                summary = _summary(ready, outcome, folder, options)
                if not outcome.stopped:
                    summary["samples"] = _samples(ready, outcome, sampling)
                    _export(ready, outcome, options)
                checkpoints.close()
        except Stopped as stopped:
            if not quiet:
                click.echo(f"{stopped}; the same command begins again")
            return 0
    if as_json and first:
        emit_json(summary)
    elif first:
        _show(summary, signals.caught.name if signals.caught is not None else "another process")
    return 0


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _record(
    folder: RunFolder,
    ready: ReadyRun,
    options: Mapping[str, Any],
    recorded: Mapping[str, Any] | None,
    session: Mapping[str, Any],
    request: TrainRequest,
) -> None:
    """Write run.json, and beside it the plan."""
    from rooftop.core.files import write_text

    if recorded is None and request.plan is not None:
        write_text(folder.plan, json.dumps(request.plan, indent=1) + "\n")
    arguments = {name: value for name, value in options.items() if name not in _ONCE}
    arguments |= {"batch_seqs": str(ready.job.program.batch), "seq": str(ready.job.program.seq_len)}
    before = list(recorded["sessions"]) if recorded is not None else []
    folder.write({**ready.about, "arguments": arguments, "sessions": [*before, session]})


def _headline(ready: ReadyRun) -> str:
    from rooftop.core.quantities import format_count
    from rooftop.models import count_params

    program, data = ready.job.program, ready.data
    left = f"; {data.left_out} files are no text" if data.left_out else ""
    return (
        f"{program.model.name}: {format_count(count_params(program.model).total)} parameters; {ready.note}; "
        f"{program.batch} sequences of {program.seq_len}\n"
        f"{format_count(data.store.tokens)} tokens in {data.store.documents} documents{left}; "
        f"{data.train.steps_per_epoch} steps an epoch; unigram entropy {data.unigram_entropy:.3f} nats a token"
    )


def _summary(ready: ReadyRun, outcome: Outcome, folder: RunFolder, options: Mapping[str, Any]) -> dict[str, Any]:
    evaluation = outcome.evaluation
    return {
        "kind": "train",
        "run": str(folder.path),
        "step": outcome.step,
        "stopped": outcome.stopped,
        "resume": f"rooftop train --resume {shlex.quote(str(folder.path))}",
        "last": None if outcome.record is None else outcome.record.to_json(),
        "evaluation": None
        if evaluation is None
        else {"loss": evaluation.loss, "perplexity": evaluation.perplexity, "tokens": evaluation.tokens},
        "unigram_entropy": ready.data.unigram_entropy,
        "mesh": dict(ready.job.mesh.shape),
        "mfu_convention": ready.rates.convention,
        "samples": [],
    }


def _samples(ready: ReadyRun, outcome: Outcome, sampling: Any) -> list[str]:
    from rooftop.train.evaluate import sample

    if not sampling.count or ready.data.tokenizer is None:
        return []
    return sample(ready.job.program, ready.job.mesh, outcome.state.weights, ready.data.tokenizer, sampling)


def _export(ready: ReadyRun, outcome: Outcome, options: Mapping[str, Any]) -> None:
    if options["export"] is None:
        return
    import jax

    from rooftop.checkpoints.huggingface import save_weights

    folder = Path(options["export"])
    save_weights(folder, ready.job.program.model, outcome.state.weights, source=ready.job.init)
    if jax.process_index() == 0 and ready.data.tokenizer is not None:
        ready.data.tokenizer.save(folder)


def _show(summary: Mapping[str, Any], by: str) -> None:
    last, evaluation = summary["last"], summary["evaluation"]
    for text in summary["samples"]:
        click.echo(f"--- sample\n{text}")
    if summary["samples"]:
        click.echo("---")
    if summary["stopped"]:
        click.echo(f"stopped by {by}, saved at step {summary['step']}; to go on: {summary['resume']}")
        return
    loss = "" if last is None else f"; loss {last['loss']:.4f} (unigram entropy {summary['unigram_entropy']:.3f})"
    held = "" if evaluation is None else f"; held-out perplexity {evaluation['perplexity']:.4g}"
    click.echo(f"step {summary['step']} done{loss}{held}; run in {summary['run']}")
