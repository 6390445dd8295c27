"""The documents of embedding tables: their plan and its compilation, limits from data, and exported tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.plan.embedding.plan import EmbedMemory, EmbedPlanDocument
from rooftop.present.document import Bar, Bars, Document, ShownFigure, ShownVerdict, Table, TableColumn
from rooftop.present.documents.parts import (
    bound_text,
    calibrated_by,
    ledger_bars,
    ledger_lines,
    ledger_table,
    obstacles,
    sentence,
    table,
    version_note,
)

if TYPE_CHECKING:
    from rooftop.embed.export import ExportedTables
    from rooftop.embed.host.limits import LimitsRecord
    from rooftop.explain.embedding.compiled import CompiledEmbedRecord, CompiledStep, RefusedEmbedRecord


def embedding_plan(plan: EmbedPlanDocument) -> Document:
    """A plan of embedding tables: the steps, the units that bind them, stacks and memory."""
    where, work = plan.slice, plan.workload
    passes = f" in {work.sample_passes} passes" if work.sample_passes > 1 else ""
    count = sum(len(stack.tables) for stack in plan.stacks)
    return Document(
        title=f"{count} embedding tables on {where.name}: a plan",
        verdict=ShownVerdict(
            subject=f"{count} tables in {len(plan.stacks)} stacks on {where.name}, {where.sparse_cores} "
            f"SparseCores, {work.batch:,} samples a step{passes}{calibrated_by(where)}",
            no=_shortfall(plan),
        ),
        figures=tuple(_figures(plan)),
        charts=(
            *obstacles(plan.obstacles),
            _stacks(plan),
            table("Where a step goes (expected, one device)", ("unit", "busy"),
                  [(name, format_seconds(seconds)) for name, seconds in plan.units_s.items()], section="Step"),
            Bars(
                title="The units of a step", unit="s",
                bars=tuple(Bar(name, ((name, float(seconds)),)) for name, seconds in plan.units_s.items()),
            ),
            ledger_bars(plan.ledger),
            ledger_table(
                ledger_lines({"planned": plan.ledger}), "The ledger", about="Per device and step, counts applied."
            ),
            _memory(plan.memory),
            memory_bars(plan.memory),
        ),
        sources=version_note(plan.rooftop_version),
    )  # fmt: skip


def _shortfall(plan: EmbedPlanDocument) -> str:
    """The memory that is too small, and the passes with which it is not; empty if the plan fits."""
    memory, near = plan.memory, plan.nearest
    if memory.tile > memory.tile_capacity:
        too_small = f"{format_bytes(memory.tile)} of {format_bytes(memory.tile_capacity)} a tile"
    elif not any(memory.fits.values()):
        too_small = f"{format_bytes(min(memory.total.values()))} of {format_bytes(memory.capacity)} a device"
    else:
        return ""
    return f"does not fit: {too_small}" + (f"; nearest: --sample-passes {near.sample_passes}" if near else "")


def _figures(plan: EmbedPlanDocument) -> Iterator[ShownFigure]:
    for mode, step in plan.step.items():
        yield ShownFigure(mode, f"{mode} step", step.expected_s, "s", "estimate",
            note=f"an estimate, {bound_text(step.bound)}")  # fmt: skip
    yield ShownFigure("ids", "ids of a host", plan.host.ids, level="expected",
        shown=f"{plan.host.ids:,.0f}",
        note=f"prepared for a step; {format_bytes(plan.memory.inputs)} sent to each device")  # fmt: skip


def _stacks(plan: EmbedPlanDocument) -> Table:
    names = ("stack", "tables", "width", "padding", "rows", "slots", "forward stack", "backward stack", "of a tile")
    rows = [
        (
            stack.name,
            str(len(stack.tables)),
            str(stack.width),
            f"{stack.waste:.0%}",
            format_bytes(stack.memory.tables),
            format_bytes(stack.memory.slots),
            format_bytes(stack.memory.forward_stack),
            format_bytes(stack.memory.backward_stack),
            f"{stack.memory.tile / plan.memory.tile_capacity:.0%}",
        )
        for stack in plan.stacks
    ]
    return table("Stacks of tables (HBM of one device)", names, rows, section="Stacks")


def _classes(memory: EmbedMemory) -> dict[str, float]:
    """Bytes of a device by class. Only passes over samples have sums."""
    return {
        "tables": memory.tables,
        "slots": memory.slots,
        **({"sums": memory.sums} if memory.sums else {}),
        "forward stack": memory.forward_stack,
        "backward stack": memory.backward_stack,
        "inputs": memory.inputs,
        "activations": memory.activations,
    }


def _memory(memory: EmbedMemory) -> Table:
    rows = [(name, format_bytes(size)) for name, size in _classes(memory).items()]
    rows += [
        (f"in all, {mode}", f"{format_bytes(needed)} of {format_bytes(memory.capacity)}")
        for mode, needed in memory.total.items()
    ]
    return table("HBM of one device", ("", "bytes"), rows, section="Memory")


def memory_bars(memory: EmbedMemory) -> Bars:
    """HBM of a device, each class alone and in all."""
    bars = [Bar(name, (("one class", float(size)),)) for name, size in _classes(memory).items()]
    bars += [Bar(f"all, {mode}", (("in all", float(size)),)) for mode, size in memory.total.items()]
    return Bars(
        title="HBM of a device",
        about="The larger of the two stacks counts, and activations twice, for their gradients.",
        unit="B",
        bars=tuple(bars),
        limit=(float(memory.capacity), "usable"),
    )


# ---- compiled -------------------------------------------------------------------------------------------------------

_ROWS: dict[str, Callable[[CompiledStep], float]] = {
    "planned": lambda step: step.planned_bytes,
    "compiled": lambda step: step.needed_bytes,
    "  XLA's heap": lambda step: step.heap_bytes,
    "  of it arguments": lambda step: step.arguments_bytes,
    "stack of a SparseCore": lambda step: step.sparsecore_hbm_bytes,
    "memory of a tile": lambda step: step.tile_bytes,
}


def compiled_embedding(answer: CompiledEmbedRecord | RefusedEmbedRecord) -> Document:
    """The compilation of a plan of embedding tables: high-water marks of memory next to the planned ones."""
    passes = f", {answer.sample_passes} passes over samples" if answer.sample_passes > 1 else ""
    stacks = answer.plan.stacks
    tables = f"{sum(len(stack.tables) for stack in stacks)} tables in {len(stacks)} stacks on "
    return Document(
        title=f"Embedding tables compiled for {answer.slice.name}",
        verdict=ShownVerdict(
            subject=f"{tables}{answer.slice.name}, {answer.sparse_cores} SparseCores{passes}",
            says=sentence(answer.verdict) if answer.fits else "",
            no="" if answer.fits else _refusal(answer),
            differs=answer.fits and not answer.agrees,
            details=tuple(_built(answer)) if answer.fits else (),
        ),
        charts=(_compiled_stacks(answer), _compiled_steps(answer)) if answer.fits else (),
        sources=version_note(answer.rooftop_version),
    )


def _refusal(answer: RefusedEmbedRecord) -> str:
    of = "" if answer.stack is None else f" of stack {answer.stack}"
    return f"does not fit: the {answer.part}{of}: {answer.why}"


def _built(answer: CompiledEmbedRecord) -> Iterator[str]:
    """The versions of the compiler, and the checks that are built in."""
    versions = ", ".join(f"{name} {version}" for name, version in answer.versions.items())
    yield f"XLA:TPU ({versions})"
    if answer.checks:
        yield f"Checks built in: {', '.join(answer.checks)}"


def _compiled_stacks(answer: CompiledEmbedRecord) -> Table:
    names = ("stack", "part", "HBM planned", "compiled", "ratio", "tile at least", "compiled", "tile has")
    rows = [
        (
            row.stack if row.part == "lookup" else "",
            row.part,
            format_bytes(row.planned_hbm_bytes),
            format_bytes(row.hbm_bytes),
            f"{row.ratio:.3f}",
            format_bytes(row.planned_tile_bytes),
            format_bytes(row.tile_bytes),
            format_bytes(answer.tile_capacity_bytes),
        )
        for row in answer.stacks
    ]
    title = "Stacks of tables: HBM of one SparseCore, memory of one tile"
    return table(title, names, rows, text=2, section="Stacks")


def _compiled_steps(answer: CompiledEmbedRecord) -> Table:
    steps = {"sequential": answer.steps.sequential, "pipelined": answer.steps.pipelined}
    rows = [(name, *(format_bytes(size(step)) for step in steps.values())) for name, size in _ROWS.items()]
    rows.append(("a device has", *(format_bytes(answer.capacity_bytes) for _ in steps)))
    rows.append(("SparseCore calls", *(str(step.sparsecore_calls) for step in steps.values())))
    overlap = (f"{step.beside_sparsecores} of {step.tensorcore_computations}" for step in steps.values())
    rows.append(("TensorCore work beside", *overlap))
    return table("Whole steps (HBM of one device)", ("", *steps), rows, section="Steps")


# ---- limits and exports ---------------------------------------------------------------------------------------------

_KEPT = {True: "the limits given are kept", False: "the limits given no longer serve: compile again"}


def embedding_limits(answer: LimitsRecord, *, batch_samples: int) -> Document:
    """Limits of each stack next to what a stream of batches needs."""
    notes = [f"{count:,} ids of {name} out of range" for name, count in answer.out_of_range.items() if count]
    if answer.kept is not None:
        notes.append(_KEPT[answer.kept])
    rows = []
    for stack in answer.stacks:
        ids = f"{stack.ids / (batch_samples * answer.batches):.3g}"
        for at, (limit, observed) in enumerate(stack.observed.items()):
            compiled = stack.limits[limit]
            first = ("", "") if at else (stack.name, ids)
            rows.append((*first, limit, f"{observed:,}", f"{compiled:,}", f"{observed / compiled:.0%}"))
    names = ("stack", "ids a sample", "limit", "observed", "compiled", "used")
    columns = tuple(TableColumn(name=name, kind="text" if name in ("stack", "limit") else "number") for name in names)
    return Document(
        verdict=ShownVerdict(
            subject=f"{answer.batches:,} batches of {batch_samples:,} samples, {answer.cores:,} SparseCores",
            details=tuple(notes),
        ),
        charts=(Table(title="Limits", columns=columns, rows=tuple(rows)),),
    )


def embedding_export(answer: ExportedTables, *, summary: str) -> Document:
    """Exported tables; in int8 with the range and the errors of each."""
    names = ("table", "rows", "low", "high", "largest error", "relative error", "clipped")
    rows = [
        (
            name,
            f"{exported.shape[0]:,}",
            f"{exported.low:.4g}",
            f"{exported.high:.4g}",
            f"{exported.max_error:.4g}",
            f"{exported.relative_error:.2%}",
            f"{exported.clipped:,}",
        )
        for name, exported in answer.quantized.items()
    ]
    return Document(
        verdict=ShownVerdict(subject=summary),
        charts=(table("Tables", names, rows),) if rows else (),
    )
