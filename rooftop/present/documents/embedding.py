"""The documents of embedding tables: their plan and its compilation, limits from data, and exported tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.present.document import Bar, Bars, Document, ShownFigure, ShownVerdict, Table, TableColumn
from rooftop.present.documents.parts import (
    bound_text,
    calibrated_text,
    ledger_bars,
    ledger_table,
    obstacles,
    of_ledgers,
    sentence,
    table,
    written_by,
)

if TYPE_CHECKING:
    from rooftop.embed.export import ExportedTables

_CLASSES = ("tables", "slots", "sums", "forward_stack", "backward_stack", "inputs", "activations")


def embedding_plan(data: Mapping[str, Any]) -> Document:
    """A plan of embedding tables: the steps, the units that bind them, stacks and memory."""
    where, work = data["slice"], data["workload"]
    passes = f" in {work['sample_passes']} passes" if work["sample_passes"] > 1 else ""
    count = sum(len(stack["tables"]) for stack in data["stacks"])
    return Document(
        title=f"{count} embedding tables on {where['name']}: a plan",
        verdict=ShownVerdict(
            subject=f"{count} tables in {len(data['stacks'])} stacks on {where['name']}, {where['sparse_cores']} "
            f"SparseCores, {work['batch']:,} samples a step{passes}{calibrated_text(where)}",
            no=_shortfall(data),
        ),
        figures=tuple(_figures(data)),
        charts=(
            *obstacles(data),
            _stacks(data),
            table("Where a step goes (expected, one device)", ("unit", "busy"),
                  [(name, format_seconds(seconds)) for name, seconds in data["units_s"].items()], section="Step"),
            Bars(
                title="The units of a step", unit="s",
                bars=tuple(Bar(name, ((name, float(s)),)) for name, s in data["units_s"].items()),
            ),
            ledger_bars(Ledger.from_json(data["ledger"])),
            ledger_table(
                of_ledgers({"planned": data["ledger"]}), "The ledger", about="Per device and step, counts applied."
            ),
            _memory(data),
            memory_bars(data["memory"]),
        ),
        sources=written_by(data),
    )  # fmt: skip


def _shortfall(data: Mapping[str, Any]) -> str:
    """The memory that is too small, and the passes with which it is not; empty if the plan fits."""
    memory, near = data["memory"], data["nearest"]
    if memory["tile"] > memory["tile_capacity"]:
        too_small = f"{format_bytes(memory['tile'])} of {format_bytes(memory['tile_capacity'])} a tile"
    elif not memory["fits"]["sequential"]:
        too_small = f"{format_bytes(memory['total']['sequential'])} of {format_bytes(memory['capacity'])} a device"
    else:
        return ""
    return f"does not fit: {too_small}" + (f"; nearest: --sample-passes {near['sample_passes']}" if near else "")


def _figures(data: Mapping[str, Any]) -> Iterator[ShownFigure]:
    for mode, step in data["step"].items():
        yield ShownFigure(mode, f"{mode} step", step["expected_s"], "s", "estimate",
            note=f"an estimate, {bound_text(step['bound'])}")  # fmt: skip
    yield ShownFigure("ids", "ids of a host", data["host"]["ids"], level="expected",
        shown=f"{data['host']['ids']:,.0f}",
        note=f"prepared for a step; {format_bytes(data['memory']['inputs'])} sent to each device")  # fmt: skip


def _stacks(data: Mapping[str, Any]) -> Table:
    names = ("stack", "tables", "width", "padding", "rows", "slots", "forward stack", "backward stack", "of a tile")
    rows = []
    for stack in data["stacks"]:
        memory = stack["memory"]
        rows.append(
            (
                stack["name"],
                str(len(stack["tables"])),
                str(stack["width"]),
                f"{stack['waste']:.0%}",
                *(format_bytes(memory[name]) for name in ("tables", "slots", "forward_stack", "backward_stack")),
                f"{memory['tile'] / data['memory']['tile_capacity']:.0%}",
            )
        )
    return table("Stacks of tables (HBM of one device)", names, rows, section="Stacks")


def _memory(data: Mapping[str, Any]) -> Table:
    memory = data["memory"]
    rows = [
        # Only passes over samples have sums.
        (name.replace("_", " "), format_bytes(memory[name]))
        for name in _CLASSES
        if memory.get(name) or name != "sums"
    ]
    rows += [
        (f"in all, {mode}", f"{format_bytes(needed)} of {format_bytes(memory['capacity'])}")
        for mode, needed in memory["total"].items()
    ]
    return table("HBM of one device", ("", "bytes"), rows, section="Memory")


def memory_bars(memory: Mapping[str, Any]) -> Bars:
    """HBM of a device, each class alone and in all."""
    bars = [
        Bar(name.replace("_", " "), (("one class", float(memory.get(name, 0.0))),))
        for name in _CLASSES
        if memory.get(name) or name != "sums"
    ]
    bars += [Bar(f"all, {mode}", (("in all", float(size)),)) for mode, size in memory["total"].items()]
    return Bars(
        title="HBM of a device",
        about="The larger of the two stacks counts, and activations twice, for their gradients.",
        unit="B",
        bars=tuple(bars),
        limit=(float(memory["capacity"]), "usable"),
    )


# ---- compiled -------------------------------------------------------------------------------------------------------

_ROWS = {
    "planned": "planned_bytes",
    "compiled": "needed_bytes",
    "  XLA's heap": "heap_bytes",
    "  of it arguments": "arguments_bytes",
    "stack of a SparseCore": "sparsecore_hbm_bytes",
    "memory of a tile": "tile_bytes",
}


def compiled_embedding(data: Mapping[str, Any]) -> Document:
    """The compilation of a plan of embedding tables: high-water marks of memory next to the planned ones."""
    passes = f", {data['sample_passes']} passes over samples" if data["sample_passes"] > 1 else ""
    stacks = data["plan"]["stacks"]
    tables = f"{sum(len(stack['tables']) for stack in stacks)} tables in {len(stacks)} stacks on "
    return Document(
        title=f"Embedding tables compiled for {data['slice']['name']}",
        verdict=ShownVerdict(
            subject=f"{tables}{data['slice']['name']}, {data['sparse_cores']} SparseCores{passes}",
            says=sentence(data["verdict"]) if data["fits"] else "",
            no=_refusal(data),
            differs=not data.get("agrees", True),
            details=tuple(_built(data)),
        ),
        charts=(_compiled_stacks(data), _compiled_steps(data)) if data["fits"] else (),
        sources=written_by(data),
    )


def _refusal(data: Mapping[str, Any]) -> str:
    if data["fits"]:
        return ""
    of = "" if data["stack"] is None else f" of stack {data['stack']}"
    return f"does not fit: the {data['part']}{of}: {data['why']}"


def _built(data: Mapping[str, Any]) -> Iterator[str]:
    """The versions of the compiler, and the checks that are built in."""
    if data["fits"]:
        versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
        yield f"XLA:TPU ({versions})"
        if data["checks"]:
            yield f"Checks built in: {', '.join(data['checks'])}"


def _compiled_stacks(data: Mapping[str, Any]) -> Table:
    names = ("stack", "part", "HBM planned", "compiled", "ratio", "tile at least", "compiled", "tile has")
    rows = [
        (
            row["stack"] if row["part"] == "lookup" else "",
            row["part"],
            *(format_bytes(row[name]) for name in ("planned_hbm_bytes", "hbm_bytes")),
            f"{row['ratio']:.3f}",
            format_bytes(row["planned_tile_bytes"]),
            format_bytes(row["tile_bytes"]),
            format_bytes(data["tile_capacity_bytes"]),
        )
        for row in data["stacks"]
    ]
    title = "Stacks of tables: HBM of one SparseCore, memory of one tile"
    return table(title, names, rows, text=2, section="Stacks")


def _compiled_steps(data: Mapping[str, Any]) -> Table:
    steps = data["steps"].values()
    rows = [(name, *(format_bytes(step[field]) for step in steps)) for name, field in _ROWS.items()]
    rows.append(("a device has", *(format_bytes(data["capacity_bytes"]) for _ in steps)))
    rows.append(("SparseCore calls", *(str(step["sparsecore_calls"]) for step in steps)))
    overlap = (f"{step['beside_sparsecores']} of {step['tensorcore_computations']}" for step in steps)
    rows.append(("TensorCore work beside", *overlap))
    return table("Whole steps (HBM of one device)", ("", *data["steps"]), rows, section="Steps")


# ---- limits and exports ---------------------------------------------------------------------------------------------

_KEPT = {True: "the limits given are kept", False: "the limits given no longer serve: compile again"}


def embedding_limits(data: Mapping[str, Any], *, batch_samples: int) -> Document:
    """Limits of each stack next to what a stream of batches needs."""
    notes = [f"{count:,} ids of {name} out of range" for name, count in data["out_of_range"].items() if count]
    if data["kept"] is not None:
        notes.append(_KEPT[data["kept"]])
    rows = []
    for stack in data["stacks"]:
        ids = f"{stack['ids'] / (batch_samples * data['batches']):.3g}"
        for at, (limit, observed) in enumerate(stack["observed"].items()):
            compiled = stack["limits"][limit]
            first = ("", "") if at else (stack["name"], ids)
            rows.append((*first, limit, f"{observed:,}", f"{compiled:,}", f"{observed / compiled:.0%}"))
    names = ("stack", "ids a sample", "limit", "observed", "compiled", "used")
    columns = tuple(TableColumn(name=name, kind="text" if name in ("stack", "limit") else "number") for name in names)
    return Document(
        verdict=ShownVerdict(
            subject=f"{data['batches']:,} batches of {batch_samples:,} samples, {data['cores']:,} SparseCores",
            details=tuple(notes),
        ),
        charts=(Table(title="Limits", columns=columns, rows=tuple(rows)),),
    )


def embedding_export(data: ExportedTables, *, summary: str) -> Document:
    """Exported tables; in int8 with the range and the errors of each."""
    names = ("table", "rows", "low", "high", "largest error", "relative error", "clipped")
    rows = [
        (
            name,
            f"{exported['shape'][0]:,}",
            *(f"{exported[figure]:.4g}" for figure in ("low", "high", "max_error")),
            f"{exported['relative_error']:.2%}",
            f"{exported['clipped']:,}",
        )
        for name, exported in data["tables"].items()
        if data["dtype"] == "int8"
    ]
    return Document(
        verdict=ShownVerdict(subject=summary),
        charts=(table("Tables", names, rows),) if rows else (),
    )
