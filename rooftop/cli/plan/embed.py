"""``rooftop plan embed``: embedding tables on SparseCores."""

from __future__ import annotations

import json
from pathlib import Path

import click

from rooftop.cli.output import emit_json, json_option, show


@click.command(name="embed")
@click.argument("tables", type=click.Path(path_type=Path))
@click.option("--on", "slice_", required=True, metavar="SLICE", help="A slice with SparseCores, such as v5p:2x2x1.")
@click.option("--batch", default="16384", show_default=True, metavar="N", help="Samples of a step, on all devices.")
@click.option("--limits", type=click.Path(path_type=Path), help="A limits file. Default: from ids_per_sample.")
@click.option(
    "--sample-passes", default="1", show_default=True, metavar="N", help="Look up a batch in N parts of its samples."
)
@click.option("--dense-flops", metavar="N", help="Matmul FLOPs of a sample in the dense part, forward: 30M.")
@click.option("--host-threads", metavar="N", help="Threads that prepare the batches of a host.")
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Write plan.json here.")
@json_option
def embed(
    tables: Path,
    slice_: str,
    batch: str,
    limits: Path | None,
    sample_passes: str,
    dense_flops: str | None,
    host_threads: str | None,
    output: Path | None,
    as_json: bool,
) -> int:
    """Plan the embedding TABLES (a TOML file) on a slice: memory, step time, and what binds.

    \b
    Example: rooftop plan embed tables.toml --on v5p:2x2x1 --batch 16384
    """
    from rooftop.core.files import write_text
    from rooftop.core.quantities import parse_count, parse_quantity
    from rooftop.embed.limits import expected, read_limits
    from rooftop.hardware import Slice
    from rooftop.models.embedding_tables.files import load_tables
    from rooftop.plan.embedding.plan import EmbedPlan
    from rooftop.plan.embedding.problem import EmbedProblem, stacking_on

    where, samples, given = Slice.parse(slice_), parse_count(batch, "batch"), load_tables(tables)
    stacking, passes = stacking_on(given, where, samples), parse_count(sample_passes, "sample_passes")
    plan = EmbedPlan(
        problem=EmbedProblem(
            tables=given,
            slice=where,
            batch=samples,
            limits=expected(stacking, batch=samples, sample_passes=passes)
            if limits is None
            else read_limits(limits, stacking, batch=samples, sample_passes=passes),
            dense_flops=0.0 if dense_flops is None else parse_quantity(dense_flops, "dense-flops"),
            host_threads=None if host_threads is None else parse_count(host_threads, "host-threads"),
            sample_passes=passes,
        )
    )
    data = plan.to_json()
    if output is not None:
        write_text(output, json.dumps(data, indent=1, allow_nan=False) + "\n")
    if as_json:
        emit_json(data)
    else:
        show(data, {"plan": output})
    plan.require_fit()
    return 0
