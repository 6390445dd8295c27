"""``rooftop plan embed``: embedding tables on SparseCores."""

from __future__ import annotations

from pathlib import Path

import click

from rooftop.cli.options import (
    COUNT,
    FILE,
    PATH,
    QUANTITY,
    WORKLOAD,
    VerbCommand,
    batch_samples_option,
    host_threads_option,
    json_option,
    on_option,
    option,
    output_option,
)
from rooftop.cli.output import emit_json, show


@click.command(
    name="embed", cls=VerbCommand, examples=("rooftop plan embed tables.toml --on v5p:2x2x1 --batch-samples 16384",)
)
@click.argument("tables", type=PATH)
@on_option(required=True, help="A slice with SparseCores, such as v5p:2x2x1.")
@batch_samples_option(default="16384", show_default=True)
@option("--limits", group=WORKLOAD, type=FILE, help="A limits file. Default: from ids_per_sample.")
@option(
    "--sample-passes", group=WORKLOAD, type=COUNT, default="1", show_default=True,
    help="Look up a batch in N parts of its samples.",
)  # fmt: skip
@option(
    "--dense-flops", group=WORKLOAD, type=QUANTITY, help="Matmul FLOPs of a sample in the dense part, forward: 30M."
)
@host_threads_option()
@output_option(help="Write plan.json here.")
@json_option
def embed(
    *,
    tables: Path,
    on: str,
    batch_samples: int,
    limits: Path | None,
    sample_passes: int,
    dense_flops: float | None,
    host_threads: int | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Plan the embedding TABLES (a TOML file) on a slice: memory, step time, and what binds."""
    from rooftop.library.embedding import plan_embedding

    result = plan_embedding(
        tables, on=on, batch_samples=batch_samples, limits=limits, sample_passes=sample_passes,
        dense_flops=dense_flops, host_threads=host_threads,
    )  # fmt: skip
    if output is not None:
        result.write_plan(output)
    if as_json:
        emit_json(result.to_json())
    else:
        show(result.to_json(), {"plan": output})
    result.raise_if_infeasible()
    return 0
