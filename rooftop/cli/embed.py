"""``rooftop embed``: large embedding tables on SparseCores."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import click

from rooftop.cli.embed_train import export, train
from rooftop.cli.output import console, emit_json, json_option, progress_bar
from rooftop.cli.usage import Group
from rooftop.errors import RooftopError

_Batch = TypeVar("_Batch")
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.group(name="embed", cls=Group)
def command() -> None:
    """Large embedding tables on SparseCores: limits from data, training, export.

    \b
    Example: rooftop embed train tables.toml day0.tsv runs/first --batch 4096 --evaluate day1.tsv
    """


command.add_command(train)
command.add_command(export)


@command.command(name="stats")
@click.argument("tables", type=_FILE)
@click.argument("data", type=_FILE, nargs=-1, required=True)
@click.option("--on", "on", required=True, metavar="SLICE", help="Chips that the tables lie on: v5p:2x2x1.")
@click.option("--batch", required=True, metavar="N", help="Samples of a step, on all devices.")
@click.option("--batches", metavar="N", help="At most so many. All that the data hold if not given.")
@click.option(
    "--sample-passes", default="1", show_default=True, metavar="N", help="Limits of one of N passes over samples."
)
@click.option("--headroom", default=0.1, show_default=True, help="What limits have beyond what was observed.")
@click.option("--limits", "current", type=_FILE, help="Limits to go on from: kept where they still serve.")
@click.option("--out-of-range", default="error", show_default=True, help="error, warn or clamp ids that are no rows.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True)
@click.option("-o", "--output", type=_FILE, help="Write the limits file here.")
@json_option
def stats(
    tables: Path,
    data: tuple[Path, ...],
    on: str,
    batch: str,
    batches: str | None,
    sample_passes: str,
    headroom: float,
    current: Path | None,
    out_of_range: str,
    threads: int,
    output: Path | None,
    as_json: bool,
) -> int:
    """Limits for TABLES (tables.toml) from DATA, Parquet files with a column of ids, or of lists, per feature.

    \b
    Example: rooftop embed stats tables.toml day0.parquet --on v5p:2x2x1 --batch 4096 -o limits.json
    """
    from rooftop.embed.batches import count_samples, parquet_batches
    from rooftop.embed.host.limits import compare, estimate, feed_back, observe, read_limits, write_limits
    from rooftop.embed.host.preprocess import Preprocessor
    from rooftop.hardware.slices import Slice
    from rooftop.models.tables_files import load_tables
    from rooftop.models.tables_limits import Limits
    from rooftop.models.tables_stacking import stack_tables
    from rooftop.quantities import parse_count

    model, slice_, samples = load_tables(tables), Slice.parse(on), parse_count(batch, "batch")
    per_device = slice_.chip.sparse_cores // slice_.chip.devices
    if not per_device:
        raise RooftopError("on", on, "chips with SparseCores: v5p, v6e or tpu7x")
    stacking = stack_tables(model, cores=per_device * slice_.devices, cores_per_device=per_device, batch=samples)
    passes = parse_count(sample_passes, "sample_passes")
    before = None if current is None else read_limits(current, stacking, batch=samples, sample_passes=passes)
    preprocessor = Preprocessor(
        stacking,
        batch=samples,
        threads=threads,
        out_of_range=out_of_range,
        minibatching=passes > 1,
        sample_passes=passes,
    )
    rows = count_samples(data)
    last = rows // samples if batches is None else min(rows // samples, parse_count(batches, "batches"))
    if not last:
        raise RooftopError("data", f"{rows} samples", f"at least one batch of {samples}")
    with warnings.catch_warnings(), progress_bar(shown=not as_json) as bar:
        warnings.showwarning = lambda message, *_, **__: click.echo(f"rooftop: {message}", err=True)
        read = islice(parquet_batches(data, model, samples), last)
        statistics = observe(preprocessor, read if bar is None else _told(read, bar, last))
    kept = None
    limits: Limits = estimate(statistics, stacking, headroom=headroom)
    if before is not None:
        limits = feed_back(before, statistics, stacking, headroom=headroom)
        kept = limits is before
    if output is not None:
        write_limits(output, limits, stacking, batch=samples, batches=statistics.batches, sample_passes=passes)
    uses = compare(limits, statistics)
    if as_json:
        emit_json(
            {
                "batches": statistics.batches,
                "cores": stacking.cores,
                "sample_passes": passes,
                "kept": kept,
                "out_of_range": dict(statistics.out_of_range),
                "stacks": [
                    {
                        "name": stack.name,
                        "tables": [place.table.name for place in stack.places],
                        "ids": statistics.stacks[stack.name].ids,
                        "observed": {use.limit: use.observed for use in uses if use.stack == stack.name},
                        "limits": vars(limits[stack.name]),
                    }
                    for stack in stacking.stacks
                ],
            }
        )
        return 0
    _show(stacking, statistics, uses, samples, kept)
    return 0


def _told(batches: Iterable[_Batch], bar: Callable[[int, int, str], None], last: int) -> Iterator[_Batch]:
    """The batches, each told to the bar."""
    for done, batch in enumerate(batches):
        bar(done, last, "batches")
        yield batch


def _show(stacking: Any, statistics: Any, uses: Any, samples: int, kept: bool | None) -> None:
    from rich.table import Table

    out = console()
    out.print(f"{statistics.batches:,} batches of {samples:,} samples, {stacking.cores:,} SparseCores")
    for name, count in statistics.out_of_range.items():
        if count:
            out.print(f"  {count:,} ids of {name} out of range")
    if kept is not None:
        out.print("  the limits given are kept" if kept else "  the limits given no longer serve: compile again")
    table = Table(box=None, header_style="", padding=(0, 1, 0, 1))
    for heading in ("stack", "ids a sample", "limit", "observed", "compiled", "used"):
        table.add_column(heading, justify="left" if heading in ("stack", "limit") else "right")
    last = None
    for use in uses:
        ids = statistics.stacks[use.stack].ids / (samples * statistics.batches)
        first = (use.stack, f"{ids:.3g}") if use.stack != last else ("", "")
        table.add_row(*first, use.limit, f"{use.observed:,}", f"{use.compiled:,}", f"{use.used:.0%}")
        last = use.stack
    out.print(table)
