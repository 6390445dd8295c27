"""``rooftop embed``: large embedding tables on SparseCores: limits from data, training, export."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TypedDict, Unpack

import click

from rooftop.cli.options import (
    COUNT,
    COUNT_OR_ZERO,
    FILE,
    FOLDER,
    PROFILE,
    Name,
    VerbCommand,
    batch_samples_option,
    check_option,
    devices_option,
    dtype_option,
    host_threads_option,
    json_option,
    on_option,
    option,
    output_option,
    save_every_option,
    seed_option,
    workers_option,
)
from rooftop.cli.output import VerbGroup, emit_json, progress_bar, say, show_document
from rooftop.requests.words import NUMERICS, OUTPUT, PARALLELISM, RUN, WORKLOAD
from rooftop.runs.environment import keep_compilations, prepare_environment

_TRAIN_EXAMPLES = (
    "rooftop embed train tables.toml day0.tsv runs/first --batch-samples 4096 --evaluate day1.tsv",
    "rooftop embed train tables.toml day0.tsv runs/first --batch-samples 4096 --warmup 100 --decay cosine --workers 2",
)
_EXPORT_EXAMPLES = ("rooftop embed export tables.toml runs/first served",)


@click.group(
    name="embed",
    cls=VerbGroup,
    examples=("rooftop embed train tables.toml day0.tsv runs/first --batch-samples 4096 --evaluate day1.tsv",),
)
def command() -> None:
    """Large embedding tables on SparseCores: limits from data, training, export."""


@command.command(
    name="stats",
    cls=VerbCommand,
    examples=("rooftop embed stats tables.toml day0.parquet --on v5p:2x2x1 --batch-samples 4096 -o limits.json",),
)
@click.argument("tables", type=FILE)
@click.argument("data", type=FILE, nargs=-1, required=True)
@on_option(required=True, help="Chips that the tables lie on: v5p:2x2x1.")
@batch_samples_option(required=True)
@option("--batches", group=WORKLOAD, type=COUNT, help="Batches to read at most. All of the data by default.")
@option(
    "--sample-passes", group=WORKLOAD, type=COUNT, default="1", show_default=True,
    help="Limits of one of N passes over samples.",
)  # fmt: skip
@option("--headroom", group=WORKLOAD, default=0.1, show_default=True, help="Fraction that limits have beyond the need.")
@option("--limits", group=WORKLOAD, type=FILE, help="Current limits: kept if they still serve.")
@option(
    "--out-of-range", group=WORKLOAD, default="error", show_default=True, type=Name("error", "warn", "clamp"),
    help="For ids that are no rows.",
)  # fmt: skip
@host_threads_option(type=click.IntRange(1, 1024), metavar="N", default=1, show_default=True)
@output_option(help="Write the limits file here.")
@json_option
def stats(
    *,
    tables: Path,
    data: tuple[Path, ...],
    on: str,
    batch_samples: int,
    batches: int | None,
    sample_passes: int,
    headroom: float,
    limits: Path | None,
    out_of_range: str,
    host_threads: int,
    output: Path | None,
    as_json: bool,
) -> int:
    """Limits for TABLES (tables.toml) from DATA, Parquet files with a column of ids, or of lists, per feature."""
    from rooftop.library.embedding import embedding_limits

    with warnings.catch_warnings(), progress_bar(shown=not as_json) as progress:
        warnings.showwarning = lambda message, *_, **__: say(f"rooftop: {message}", err=True)
        result = embedding_limits(
            tables, data, on=on, batch_samples=batch_samples, batches=batches, sample_passes=sample_passes,
            headroom=headroom, limits=limits, out_of_range=out_of_range, host_threads=host_threads,
            on_progress=progress,
        )  # fmt: skip
    if output is not None:
        result.write_limits(output)
    emit_json(result.to_json()) if as_json else show_document(result.document)
    return 0


class _EmbedTrainOptions(TypedDict):
    """Arguments and options that are fields of ``EmbeddingTrainRequest``."""

    tables: Path
    data: Path
    run: Path
    batch_samples: int
    steps: int | None
    evaluate: Path | None
    devices: int | None
    cores_per_device: int | None
    sample_passes: int
    pipelined: bool
    limits: Path | None
    learning_rate: float
    warmup: int
    decay: str
    decay_steps: int | None
    final_learning_rate: float
    seed: int | None
    save_every: int
    keep: int
    keep_every: int | None
    host_threads: int
    workers: int
    profile: tuple[int, int] | None
    tensorboard: bool


@command.command(name="train", cls=VerbCommand, examples=_TRAIN_EXAMPLES)
@click.argument("tables", type=FILE)
@click.argument("data", type=FILE)
@click.argument("run", type=FOLDER)
@batch_samples_option(default=1024, show_default=True)
@option("--steps", group=RUN, type=COUNT, help="The last step of the run. [default: the end of the data]")
@option("--evaluate", group=WORKLOAD, type=FILE, help="Data whose AUC is computed at the end.")
@devices_option(help="Emulate N devices on the CPU. [default: the devices here]", metavar="N")
@option(
    "--cores-per-device",
    group=PARALLELISM,
    type=COUNT,
    help="SparseCores that a device without any emulates. [default: 2]",
)
@option("--sample-passes", group=PARALLELISM, type=COUNT, default=1, show_default=True, help="Passes over the samples.")
@option("--pipelined", group=PARALLELISM, is_flag=True, help="Overlap tables and dense part: gradients a step stale.")
@option("--limits", group=PARALLELISM, type=FILE, help="Limits file. [default: the run's own, from its first batches]")
@option(
    "--lr", "learning_rate", group=NUMERICS, type=float, default=1e-3, show_default=True, metavar="X",
    help="Largest learning rate of the dense part.",
)  # fmt: skip
@option("--warmup", group=NUMERICS, type=int, default=0, show_default=True, metavar="N", help="Steps of warm-up.")
@option(
    "--decay", group=NUMERICS, type=Name("cosine", "linear", "constant"), default="constant", show_default=True,
    help="Shape of the decay of all learning rates.",
)  # fmt: skip
@option("--decay-steps", group=NUMERICS, type=COUNT, help="Last step of the decay. [default: the last step]")
@option(
    "--final-lr", "final_learning_rate", group=NUMERICS, type=float, default=0.1, show_default=True, metavar="X",
    help="Last learning rate, as a share of the largest.",
)  # fmt: skip
@seed_option(type=int, metavar="N", help="Seed of tables and weights. [default: the run's own; 0 for a new run]")
@save_every_option(default=100, show_default=True)
@option("--keep", group=RUN, type=COUNT, default=2, show_default=True, help="Newest checkpoints to keep.")
@option("--keep-every", group=RUN, type=COUNT, help="Keep checkpoints of steps that N divides.")
@check_option(help="Look for faults: nan; on TPUs also bounds and buffers.")
@host_threads_option(type=click.IntRange(1, 1024), metavar="N", default=1, show_default=True)
@workers_option(type=COUNT_OR_ZERO, default=0, show_default=True, help="Processes that prepare batches ahead.")
@option(
    "--profile", group=OUTPUT, type=PROFILE, metavar="steps=A..B",
    help="Trace these steps into RUN/profile.",
)  # fmt: skip
@option("--tensorboard", group=OUTPUT, is_flag=True, help="Write TensorBoard events into RUN/tensorboard.")
@json_option
def train(*, check: str | None, as_json: bool, **options: Unpack[_EmbedTrainOptions]) -> int:
    """Train a DLRM with TABLES (tables.toml) on DATA (Criteo's TSV) in the folder RUN, or resume the run there.

    SIGTERM and Ctrl-C save the state; the same command resumes the run.
    """
    from rooftop.compiler.sparsecore import parse_checks
    from rooftop.embed.train.request import EmbeddingTrainRequest
    from rooftop.library.training import train_embedding

    request = EmbeddingTrainRequest(checks=parse_checks(check), **options)
    prepare_environment(request.devices, extra="embed")
    if request.profile is None:
        # Traces of a program out of the compilation cache lack its scopes.
        keep_compilations()
    with progress_bar(shown=not as_json) as bar:
        watch = None if bar is None else lambda done, last: bar(done, last, "batches")
        result = train_embedding(request, watch=watch)
    if as_json:
        emit_json(result.to_json())
        return 0
    say(result.summary)
    if (trace := request.folder.profile).is_dir():
        say(f"  trace in {trace}: see rooftop explain {trace}")
    return 0


@command.command(name="export", cls=VerbCommand, examples=_EXPORT_EXAMPLES)
@click.argument("tables", type=FILE)
@click.argument("run", type=FOLDER)
@click.argument("output", type=FOLDER)
@dtype_option(default="int8", show_default=True, help="int8, or f32: as trained.")
@json_option
def export(*, tables: Path, run: Path, output: Path, dtype: str, as_json: bool) -> int:
    """Write the tables of RUN's newest checkpoint to OUTPUT in int8, with the error that this makes."""
    from rooftop.library.training import export_embedding

    result = export_embedding(tables=tables, run=run, output=output, dtype=dtype)
    emit_json(result.to_json()) if as_json else show_document(result.document)
    return 0
