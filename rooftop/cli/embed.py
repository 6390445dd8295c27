"""``rooftop embed``: large embedding tables on SparseCores: limits from data, training, export."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rooftop.cli.options import (
    COUNT,
    FILE,
    FOLDER,
    Name,
    VerbCommand,
    batch_samples_option,
    dtype_option,
    host_threads_option,
    json_option,
    on_option,
    option,
    output_option,
    request_options,
)
from rooftop.cli.output import VerbGroup, emit_json, progress_bar, say, show_document
from rooftop.requests.training import TrainEmbedding
from rooftop.requests.words import WORKLOAD
from rooftop.runs.environment import keep_compilations, prepare_environment

if TYPE_CHECKING:
    from rooftop.embed.train.request import EmbeddingTrainRequest

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


@command.command(name="train", cls=VerbCommand, examples=_TRAIN_EXAMPLES)
@request_options(TrainEmbedding)
@json_option
def train(*, request: EmbeddingTrainRequest, as_json: bool) -> int:
    """Train a DLRM with TABLES (tables.toml) on DATA (Criteo's TSV) in the folder RUN, or resume the run there.

    SIGTERM and Ctrl-C save the state; the same command resumes the run.
    """
    from rooftop.library.training import train_embedding

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
