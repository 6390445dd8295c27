"""``rooftop compile`` of a plan of embedding tables: the compiler's high-water marks beside the planned ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rooftop.cli.output import console

if TYPE_CHECKING:
    from rich.table import Table

    from rooftop.explain.embedding.compiled import EmbedRefusal, EmbedReport


def show(answer: EmbedReport | EmbedRefusal, data: Mapping[str, Any], written: str | None) -> None:
    """Print a report: the verdict, stacks of tables, whole steps."""
    from rich.console import Group, RenderableType
    from rich.text import Text

    from rooftop.explain.embedding.compiled import EmbedRefusal

    problem = answer.plan.problem
    count, stacks = len(problem.tables.tables), len(problem.stacking.stacks)
    head = f"{count} tables in {stacks} stacks on {problem.slice.name}, {problem.cores} SparseCores"
    passes = f", {problem.sample_passes} passes over samples" if problem.sample_passes > 1 else ""
    parts: list[RenderableType] = [Text(f"{head}{passes}", style="bold")]
    if isinstance(answer, EmbedRefusal):
        of = "" if answer.stack is None else f" of stack {answer.stack}"
        parts.append(Text(f"Does not fit: the {answer.part}{of}: {answer.why}", style="red"))
    else:
        versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        parts.append(Text(f"XLA:TPU ({versions})", style="dim"))
        verdict = data["verdict"]
        parts.append(Text(f"{verdict[0].upper()}{verdict[1:]}.", style="green" if data["agrees"] else "yellow"))
        if data["checks"]:
            parts.append(Text(f"Checks built in: {', '.join(data['checks'])}"))
        parts += [_stacks(data), _steps(data)]
    if written is not None:
        parts.append(Text(f"\nreport written to {written}"))
    console().print(Group(*parts))


def _stacks(data: Mapping[str, Any]) -> Table:
    from rooftop.core.quantities import format_bytes

    table = _table("Stacks of tables: HBM of one SparseCore, memory of one tile", "stack", "part", "HBM planned",
                   "compiled", "ratio", "tile at least", "compiled", "tile has", left=2)  # fmt: skip
    for row in data["stacks"]:
        numbers = ("planned_hbm_bytes", "hbm_bytes")
        table.add_row(
            row["stack"] if row["part"] == "lookup" else "",
            row["part"],
            *(format_bytes(row[name]) for name in numbers),
            f"{row['ratio']:.3f}",
            format_bytes(row["planned_tile_bytes"]),
            format_bytes(row["tile_bytes"]),
            format_bytes(data["tile_capacity_bytes"]),
        )
    return table


def _steps(data: Mapping[str, Any]) -> Table:
    from rooftop.core.quantities import format_bytes

    table = _table("Whole steps (HBM of one device)", "", *data["steps"])
    rows = {
        "planned": "planned_bytes",
        "compiled": "needed_bytes",
        "  XLA's heap": "heap_bytes",
        "  of it arguments": "arguments_bytes",
        "stack of a SparseCore": "sparsecore_hbm_bytes",
        "memory of a tile": "tile_bytes",
    }
    steps = data["steps"].values()
    for name, field in rows.items():
        table.add_row(name, *(format_bytes(step[field]) for step in steps))
    table.add_row("a device has", *(format_bytes(data["capacity_bytes"]) for _ in steps))
    table.add_row("SparseCore calls", *(str(step["sparsecore_calls"]) for step in steps))
    table.add_row(
        "TensorCore work beside", *(f"{s['beside_sparsecores']} of {s['tensorcore_computations']}" for s in steps)
    )
    return table


def _table(title: str, *columns: str, left: int = 1) -> Table:
    from rich.table import Table

    table = Table(title=f"\n{title}", title_justify="left", title_style="bold", box=None, padding=(0, 1, 0, 0))
    for place, name in enumerate(columns):
        table.add_column(name, justify="left" if place < left else "right", no_wrap=True)
    return table
