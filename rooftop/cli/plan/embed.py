"""``rooftop plan embed``: embedding tables on SparseCores."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
from rooftop.cli.output import console, emit_json

if TYPE_CHECKING:
    from rich.table import Table

    from rooftop.plan.embedding.plan import EmbedPlan


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
        _show(result.plan, output)
    result.raise_if_infeasible()
    return 0


def _show(plan: EmbedPlan, output: Path | None) -> None:
    """Print stacks, memory, and the step."""
    from rich.console import Group
    from rich.text import Text

    from rooftop.core.quantities import format_bytes, format_seconds

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
