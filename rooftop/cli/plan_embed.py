"""``rooftop plan embed``: embedding tables on SparseCores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rooftop.cli.output import console, emit_json, json_option

if TYPE_CHECKING:
    from rich.table import Table

    from rooftop.plan.embed import EmbedPlan


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
    from rooftop.embed.host.limits import expected, read_limits
    from rooftop.files import write_text
    from rooftop.hardware import Slice
    from rooftop.models.tables_files import load_tables
    from rooftop.plan.embed import EmbedPlan
    from rooftop.plan.embed_problem import EmbedProblem, stacking_on
    from rooftop.quantities import parse_count, parse_quantity

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
        _show(plan, output)
    plan.require_fit()
    return 0


def _show(plan: EmbedPlan, output: Path | None) -> None:
    """Print stacks, memory, and the step."""
    from rich.console import Group
    from rich.text import Text

    from rooftop.quantities import format_bytes, format_seconds

    problem, memory = plan.problem, plan.memory
    stacks = _table("Stacks of tables (HBM of one device)", "stack", "tables", "width", "padding", "rows", "slots",
                    "forward stack", "backward stack", "of a tile")  # fmt: skip
    for one in plan.to_json()["stacks"]:
        own = one["memory"]
        stacks.add_row(
            one["name"],
            str(len(one["tables"])),
            str(one["width"]),
            f"{one['waste']:.0%}",
            *(format_bytes(own[name]) for name in ("tables", "slots", "forward_stack", "backward_stack")),
            f"{own['tile'] / memory['tile_capacity']:.0%}",
        )
    held = _table("HBM of one device", "what", "bytes")
    for name in ("tables", "slots", "sums", "forward_stack", "backward_stack", "inputs", "activations"):
        # Only passes over samples have sums.
        if memory[name] or name != "sums":
            held.add_row(name.replace("_", " "), format_bytes(memory[name]))
    for mode, needed in memory["total"].items():
        held.add_row(f"in all, {mode}", f"{format_bytes(needed)} of {format_bytes(memory['capacity'])}")
    busy = _table("Where a step goes (expected, one device)", "unit", "busy")
    for name, seconds in plan.units_s.items():
        busy.add_row(name, format_seconds(seconds))
    lines = [
        f"{mode.capitalize()} step {format_seconds(one['expected_s'])}, bound by {one['bound']}"
        for mode, one in plan.step.items()
    ]
    lines.append(
        f"A host prepares {plan.host['ids']:,.0f} ids a step and sends {format_bytes(memory['inputs'])} to each device"
    )
    head = f"{len(problem.tables.tables)} tables in {len(problem.stacking.stacks)} stacks on {problem.slice.name}"
    passes = f" in {problem.sample_passes} passes" if problem.sample_passes > 1 else ""
    parts = [Text(f"{head}, {problem.cores} SparseCores, {problem.batch:,} samples a step{passes}", style="bold")]
    parts += [Text("\n".join(lines))]
    parts += [Text(text, style="yellow") for text in plan.obstacles]
    if output is not None:
        parts.append(Text(f"plan written to {output}"))
    console().print(Group(*parts, stacks, held, busy))


def _table(title: str, *columns: str) -> Table:
    from rich.box import SIMPLE
    from rich.table import Table

    found = Table(title=title, box=SIMPLE, title_justify="left")
    for index, name in enumerate(columns):
        found.add_column(name, justify="left" if index == 0 else "right")
    return found
