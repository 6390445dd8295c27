"""``rooftop embed``: large embedding tables on SparseCores."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rooftop.cli.embed.train import export, train
from rooftop.cli.options import (
    COUNT,
    FILE,
    WORKLOAD,
    Name,
    VerbCommand,
    batch_samples_option,
    host_threads_option,
    json_option,
    on_option,
    option,
    output_option,
)
from rooftop.cli.output import console, emit_json, progress_bar
from rooftop.cli.usage import VerbGroup

if TYPE_CHECKING:
    from rooftop.library.embedding import EmbeddingLimitsResult


@click.group(
    name="embed",
    cls=VerbGroup,
    examples=("rooftop embed train tables.toml day0.tsv runs/first --batch-samples 4096 --evaluate day1.tsv",),
)
def command() -> None:
    """Large embedding tables on SparseCores: limits from data, training, export."""


command.add_command(train)
command.add_command(export)


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
        warnings.showwarning = lambda message, *_, **__: click.echo(f"rooftop: {message}", err=True)
        result = embedding_limits(
            tables, data, on=on, batch_samples=batch_samples, batches=batches, sample_passes=sample_passes,
            headroom=headroom, limits=limits, out_of_range=out_of_range, host_threads=host_threads,
            on_progress=progress,
        )  # fmt: skip
    if output is not None:
        result.write_limits(output)
    if as_json:
        emit_json(result.to_json())
    else:
        _show(result)
    return 0


def _show(result: EmbeddingLimitsResult) -> None:
    from rich.table import Table

    out, stacking, statistics, samples = console(), result.stacking, result.statistics, result.batch_samples
    out.print(f"{statistics.batches:,} batches of {samples:,} samples, {stacking.cores:,} SparseCores")
    for name, count in statistics.out_of_range.items():
        if count:
            out.print(f"  {count:,} ids of {name} out of range")
    if result.kept is not None:
        out.print("  the limits given are kept" if result.kept else "  the limits given no longer serve: compile again")
    table = Table(box=None, header_style="", padding=(0, 1, 0, 1))
    for heading in ("stack", "ids a sample", "limit", "observed", "compiled", "used"):
        table.add_column(heading, justify="left" if heading in ("stack", "limit") else "right")
    last = None
    for use in result.uses:
        ids = statistics.stacks[use.stack].ids / (samples * statistics.batches)
        first = (use.stack, f"{ids:.3g}") if use.stack != last else ("", "")
        table.add_row(*first, use.limit, f"{use.observed:,}", f"{use.compiled:,}", f"{use.used:.0%}")
        last = use.stack
    out.print(table)
