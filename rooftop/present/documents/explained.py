"""The documents of ``rooftop explain``: a trace, the difference of two sides, and single operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath

from rooftop.core.quantities import counted, format_bytes, format_count, format_seconds
from rooftop.explain.difference import Difference, DifferenceSide, MemoryChange
from rooftop.explain.measured.columns import CollectiveColumns
from rooftop.explain.measured.report import ExplainedRecord
from rooftop.explain.operations import LayoutRecord, OperationRecord, OperationsRecord, OperationTimes, TrueMatmul
from rooftop.plan.training.plan import TrainingPlanDocument
from rooftop.present.document import (
    Bar,
    Bars,
    Chart,
    ChartAxis,
    ChartSeries,
    Document,
    Item,
    Items,
    Lines,
    ShownFigure,
    ShownVerdict,
    Table,
    TableColumn,
)
from rooftop.present.documents.parts import (
    LedgerLine,
    Roof,
    SideFigures,
    ledger_table,
    mesh_text,
    place,
    rooflines,
    roofs_of_slice,
    sentence,
    table,
    version_note,
)

#: Steps and SparseCores that are drawn, rows that bars show, losses and changes that are listed.
_STEPS, _CORES, _BARS, _LISTED = 12, 16, 12, 6


def explained(answer: ExplainedRecord, *, plan: TrainingPlanDocument | None = None, top: int = 0) -> Document:
    """A trace: measured next to compiled next to planned. ``top`` rows of each table are printed (0: all)."""
    lines = of_explained(answer)
    sides = [side for side in ("measured", "compiled", "planned") if any(side in line.sides for line in lines)]
    return Document(
        title=f"{_name(answer)}: {', '.join(answer.programs) or 'a trace'}",
        verdict=ShownVerdict(
            subject=_subject(answer),
            says=sentence(answer.verdict),
            differs=(answer.roofline or 0) <= 0.5,
            details=(
                *(f"Note: {note}." for note in answer.notes),
                f"Steps: {answer.marked}; {sum(step.counted for step in answer.steps)} of {len(answer.steps)} counted.",
            ),
        ),
        figures=tuple(_figures(answer)),
        charts=(
            _step(answer),
            *_stragglers(answer),
            *_achieved(answer),
            _rows(answer, top),
            ledger_table(lines, f"By scope and phase: {' beside '.join(sides)}"),
            _longest(answer),
            *_roofline(answer, plan, lines),
            *_memory(answer, plan),
            *_collectives(answer, top),
            *_sparse_cores(answer),
            *_operations(answer, top),
            *_losses(answer, top),
            *_advice(answer),
            *_empty(answer),
        ),
        sources=version_note(answer.rooftop_version),
    )


def of_explained(answer: ExplainedRecord) -> list[LedgerLine]:
    """The rows of an explained trace."""
    lines = []
    for row in answer.rows:
        measured, compiled, planned = row.measured, row.compiled, row.planned
        sides: dict[str, SideFigures] = {}
        if measured is not None:
            time_s = measured.time_s
            sides["measured"] = SideFigures(
                time_s=time_s,
                exposed_s=measured.exposed_s,
                flops=None if measured.flops_per_s is None else measured.flops_per_s * time_s,
                hbm_bytes=None if measured.hbm_bytes_per_s is None else measured.hbm_bytes_per_s * time_s,
            )
        if compiled is not None:
            peak = max(compiled.bound_s.values(), default=None)
            sides["compiled"] = SideFigures(flops=compiled.flops, hbm_bytes=compiled.hbm_bytes, at_peak_s=peak)
        if planned is not None:
            sides["planned"] = SideFigures(
                time_s=planned.time_s,
                exposed_s=planned.exposed_s,
                flops=planned.flops,
                hbm_bytes=planned.hbm_bytes,
            )
        lines.append(
            LedgerLine(
                scope=row.scope, phase=row.phase, sides=sides, moves=tuple(map(_move, row.collectives)),
                slowest="" if measured is None else measured.slowest or "",
                source="" if measured is None else measured.source,
            )
        )  # fmt: skip
    return lines


def _move(moved: CollectiveColumns) -> str:
    texts = [
        f"{format_seconds(moved.exposed_s)} exposed of {format_seconds(moved.in_flight_s)}"
        if moved.in_flight_s is not None and moved.exposed_s is not None
        else "not measured",
        f"{format_bytes(moved.compiled_bytes)} compiled" if moved.compiled_bytes is not None else "not compiled",
        f"{format_bytes(moved.planned_bytes)} planned" if moved.planned_bytes is not None else "",
    ]
    return f"{moved.kind} over {','.join(moved.axes)}: {', '.join(text for text in texts if text)}"


def _subject(answer: ExplainedRecord) -> str:
    devices = answer.devices
    kind = counted(devices.count, f"{'emulated ' if devices.emulated else ''}{devices.kind} device")
    kind += f" of {devices.hosts} hosts" if devices.hosts > 1 else ""
    mesh = mesh_text(answer.mesh)
    programs = ", ".join(answer.programs)
    mesh = "" if mesh == "one device" else f", {mesh}"
    return f"{_name(answer)}: {kind}{mesh}" + (f"; {programs}" if programs else "")


def _name(answer: ExplainedRecord) -> str:
    """The last part of the path of a trace: a heading has no room for the rest."""
    return PurePath(answer.trace).name or answer.trace


def _parts(answer: ExplainedRecord) -> tuple[tuple[str, str, float], ...]:
    """Name, title and seconds of each part of a step."""
    return (
        ("compute_s", "computing", answer.compute_s),
        ("exposed_s", "waiting for collectives", answer.exposed_s),
        ("held_s", "between the ops of loops", answer.held_s),
        ("idle_s", "idle", answer.idle_s),
    )


def _figures(answer: ExplainedRecord) -> Iterator[ShownFigure]:
    step = answer.step_s
    yield ShownFigure("step_s", "step", step, "s", "measured")
    for name, title, seconds in _parts(answer):
        if seconds:
            share = f"{seconds / step:.1%}" if step else ""
            yield ShownFigure(name, title, seconds, "s", "measured", note=share)
    if answer.roofline is not None:
        yield ShownFigure("roofline", "of the roofline", answer.roofline, "%", "measured", note=answer.bound)
    yield ShownFigure("attributed", "in a scope", answer.attributed, "%", "measured", note="of the busy time")


def _achieved(answer: ExplainedRecord) -> tuple[Chart, ...]:
    if answer.roofs is None or not answer.achieved:
        return ()
    rows = []
    for entry in answer.achieved:
        unit = "FLOP/s" if entry.resource == "mxu" else "B/s"
        cells = [format_count(rate, unit) if rate else "" for rate in (entry.per_s, entry.peak)]
        rows.append((entry.resource, *cells, f"{entry.of_roof:.0%}" if entry.of_roof is not None else ""))
    return (table(f"Achieved, next to {answer.roofs.source} roofs", ("", "a second", "roof", "of it"), rows),)


def _step(answer: ExplainedRecord) -> Bars:
    """The mean of the counted steps, then each of them."""
    bars = [Bar("a step", tuple((title, float(seconds)) for _, title, seconds in _parts(answer)))]
    for step in answer.steps:
        if step.counted and step.busy_s is not None and step.exposed_s is not None and len(bars) < _STEPS:
            idle, busy = step.seconds - step.busy_s, step.busy_s - step.exposed_s
            parts = ("computing", busy), ("waiting for collectives", step.exposed_s), ("idle", max(0.0, idle))
            bars.append(Bar(f"step {step.number}", parts))
    about = f"The mean of the counted steps, then each: {answer.marked}"
    return Bars(title="Where a step goes", section="Step", about=about, unit="s", bars=tuple(bars))


def _stragglers(answer: ExplainedRecord) -> Iterator[Chart]:
    """Devices of several hosts, and processes that the others waited for."""
    devices = answer.by_device
    if len(devices) > 1 and answer.devices.hosts > 1:
        rows = [
            (
                f"device {device.ordinal} of {device.host}",
                *map(format_seconds, (device.compute_s, device.exposed_s, device.idle_s)),
            )
            for device in devices[:_LISTED]
        ]
        title = "By device, the one that computes longest first"
        yield table(title, ("", "computing", "waiting for collectives", "idle"), rows)
    if answer.processes:
        processes = [
            (
                f"process {process.process}", f"{process.steps} of {process.of_steps}",
                *map(format_seconds, (process.host_s, process.median_host_s, process.waited_s)),
            )
            for process in answer.processes[:_LISTED]
        ]  # fmt: skip
        columns = ("", "slowest in steps", "on its host", "the median process", "others waited, a step")
        yield table("By process of the run: who was the slowest on its host", columns, processes)


def _rows(answer: ExplainedRecord, top: int) -> Table:
    planned = any(row.planned for row in answer.rows)
    bound = any(row.compiled and row.compiled.bound_s for row in answer.rows)
    rows = []
    for row in answer.rows:
        measured, compiled, plan = row.measured, row.compiled, row.planned
        cells = ["", "", ""]
        if measured:
            exposed = format_seconds(measured.exposed_s) if measured.exposed_s else ""
            cells = [format_seconds(measured.time_s), f"{measured.share:.1%}", exposed]
        if bound:
            cells.append(format_seconds(max(compiled.bound_s.values(), default=0.0)) if compiled else "")
        if planned:
            cells.append(format_seconds(plan.time_s) if plan else "")
        flops = compiled.flops if compiled else 0.0
        moved = compiled.hbm_bytes if compiled else 0.0
        rows.append(
            (
                row.scope, row.phase, *cells, format_count(flops) if flops else "",
                format_bytes(moved) if moved else "", "" if measured is None else measured.slowest or "",
                place(measured.source) if measured else "",
            )
        )  # fmt: skip
    return Table(
        title="By scope, measured next to compiled" + (" next to planned" if planned else ""),
        section="Ledger",
        columns=(
            TableColumn("scope", "text", wrap=True),
            TableColumn("phase", "text"),
            *(TableColumn(name) for name in ("measured", "share", "exposed")),
            *((TableColumn("at peak", drop=2),) if bound else ()),
            *((TableColumn("planned"),) if planned else ()),
            TableColumn("FLOPs", drop=3),
            TableColumn("HBM", drop=3),
            # The source line says enough where room is short.
            TableColumn("slowest op", "text", drop=4),
            TableColumn("from", "text", drop=1),
        ),
        rows=tuple(rows),
        top=top,
    )


def _longest(answer: ExplainedRecord) -> Bars:
    rows = [(row, row.measured) for row in answer.rows if row.measured is not None]
    longest = sorted(rows, key=lambda entry: -entry[1].time_s)[:_BARS]
    return Bars(
        title="The longest rows",
        about="Measured seconds of a step, by scope and phase.",
        unit="s",
        bars=tuple(
            Bar(
                f"{row.scope} {row.phase}",
                (
                    ("not waiting", max(0.0, measured.time_s - measured.exposed_s)),
                    ("waiting for collectives", min(measured.exposed_s, measured.time_s)),
                ),
            )
            for row, measured in longest
        ),
    )


def _roofline(
    answer: ExplainedRecord, plan: TrainingPlanDocument | None, lines: Sequence[LedgerLine]
) -> tuple[Chart, ...]:
    roofs = list[Roof]()
    if own := answer.roofs:
        bf16 = own.peak("bf16")
        roofs.append(Roof(name=f"{own.source} roofs, bf16", flops_per_s=bf16, hbm_bytes_per_s=own.hbm_bytes_per_s))
    elif plan is not None:
        roofs += roofs_of_slice(plan.slice.name, "that of the plan")
    return rooflines(lines, roofs, section="Roofline")


def _memory(answer: ExplainedRecord, plan: TrainingPlanDocument | None) -> tuple[Chart, ...]:
    taken = [entry for entry in answer.memory if entry.points]
    if not taken:
        return ()
    series = [
        ChartSeries(
            f"{entry.host} {entry.allocator}",
            tuple((float(at_s), float(size)) for at_s, size in entry.points),
            "line" if len(entry.points) > 1 else "point",
        )
        for entry in taken
    ]
    times = [float(point[0]) for entry in taken for point in entry.points]
    limits = {f"capacity of {entry.allocator}": entry.capacity_bytes for entry in taken if entry.capacity_bytes}
    if plan is not None:
        limits["planned"] = plan.memory.total
    series += [
        ChartSeries(f"{name}, {format_bytes(size)}", ((min(times), float(size)), (max(times), float(size))), "dashed")
        for name, size in limits.items()
    ]
    return (
        Lines(
            title="Memory over time",
            section="Memory",
            about="Bytes taken in each allocator, the highest of each span of time.",
            x=ChartAxis("time from the beginning of the trace", "s"),
            y=ChartAxis("taken", "B"),
            series=tuple(series),
        ),
    )


def _collectives(answer: ExplainedRecord, top: int) -> tuple[Chart, ...]:
    rows = [
        (
            f"{entry.kind} {','.join(entry.axes)}", f"{entry.scope} {entry.phase}",
            format_bytes(entry.bytes) if entry.bytes is not None else "", format_seconds(entry.in_flight_s),
            format_seconds(entry.exposed_s),
            f"{format_bytes(entry.wire_bytes_per_s)}/s" if entry.wire_bytes_per_s else "",
            f"{entry.of_roof:.0%}" if entry.of_roof else "", entry.op, place(entry.source),
        )
        for entry in answer.collectives
    ]  # fmt: skip
    headings = (
        TableColumn("collective", "text"),
        TableColumn("scope", "text", wrap=True),
        *(TableColumn(name) for name in ("bytes", "under way", "exposed")),
        *(TableColumn(name, drop=3) for name in ("sent", "of the links")),
        TableColumn("op", "text", drop=2),
        TableColumn("from", "text", drop=1),
    )
    title = "Collectives, the most exposed first"
    return (Table(title=title, section="Collectives", columns=headings, rows=tuple(rows), top=top),) if rows else ()


def _sparse_cores(answer: ExplainedRecord) -> Iterator[Chart]:
    sparse = answer.sparse_cores
    if not sparse.cores:
        return
    yield Bars(
        title="SparseCores, a step",
        section="SparseCores",
        about="Busy while the TensorCore computes, busy while it does not, idle.",
        unit="s",
        bars=tuple(
            Bar(
                f"TPU {core.device} SC {core.core}",
                (("busy beside compute", core.beside_s), ("busy alone", core.alone_s), ("idle", core.idle_s)),
            )
            for core in sparse.cores[:_CORES]
        ),
    )
    rows = [
        (
            f"TPU {core.device} SparseCore {core.core}",
            *map(format_seconds, (core.busy_s, core.beside_s, core.alone_s, core.idle_s)),
            core.ops[0].name if core.ops else "",
        )
        for core in sparse.cores
    ]
    dropped = "nothing tells of dropped ids" if sparse.dropped_ids is None else f"{sparse.dropped_ids} ids dropped"
    yield Table(
        title="SparseCores, a step",
        about=f"At most {sparse.minibatches or 'an unknown number of'} passes over the tables a step; {dropped}.",
        columns=(
            TableColumn("core", "text"),
            *(TableColumn(name) for name in ("busy", "beside compute", "alone", "idle")),
            TableColumn("slowest op", "text", wrap=True, drop=1),
        ),
        rows=tuple(rows),
    )


def _operations(answer: ExplainedRecord, top: int) -> tuple[Chart, ...]:
    """The ops that take longest. They are printed where there are roofs, or no scopes to know them by."""
    unscoped = answer.attributed < 0.5
    listed = answer.operations
    if not listed:
        return ()
    rows = [
        (
            op.op, f"{op.scope} {op.phase}", format_seconds(op.time_s),
            format_count(op.flops_per_s) if op.flops_per_s else "",
            format_bytes(op.hbm_bytes_per_s) if op.hbm_bytes_per_s else "", op.bound,
            f"{op.of_roof:.0%}" if op.of_roof else "", place(op.source),
        )
        for op in listed
    ]  # fmt: skip
    headings = (
        TableColumn("op", "text", wrap=True),
        TableColumn("scope", "text", wrap=True),
        *(TableColumn(name) for name in ("time", "FLOP/s", "HBM/s")),
        TableColumn("bound", "text"),
        TableColumn("of roof"),
        TableColumn("from", "text", drop=1),
    )
    roofs = "" if answer.roofs is None else f", next to {answer.roofs.source} roofs"
    useful = unscoped or any(op.of_roof for op in listed)
    return (
        Table(
            title=f"The ops that take longest{roofs}", section="Operations", columns=headings, rows=tuple(rows),
            top=top, detail=not useful,
        ),
    )  # fmt: skip


def _losses(answer: ExplainedRecord, top: int) -> tuple[Chart, ...]:
    rows = [
        (
            format_seconds(loss.seconds), f"{loss.seconds / answer.step_s:.1%}" if answer.step_s else "",
            loss.what, loss.waits_for, place(loss.source),
        )
        for loss in answer.losses
    ]  # fmt: skip
    headings = (
        TableColumn("time"),
        TableColumn("share"),
        *(TableColumn(name, "text", wrap=True) for name in ("what", "waits for", "from")),
    )
    most = min(top or _LISTED, _LISTED)
    title = "The largest losses"
    return (Table(title=title, section="Losses", columns=headings, rows=tuple(rows[:most])),) if rows else ()


def _advice(answer: ExplainedRecord) -> tuple[Chart, ...]:
    """Changes to try. A change that helps against several losses is listed once."""
    evidence: dict[str, list[str]] = {}
    for entry in answer.advice[:_LISTED]:
        source = f" [{place(entry.source)}]" if entry.source else ""
        evidence.setdefault(entry.what, []).append(f"  {entry.rule}: {entry.evidence}{source}.")
    items = tuple(Item("\n".join((sentence(what), *lines)), mark="-") for what, lines in evidence.items())
    return (Items(title="What to try", section="What to try", items=items),) if items else ()


def _empty(answer: ExplainedRecord) -> tuple[Chart, ...]:
    items = tuple(Item(f"{name}: {why}") for name, why in answer.empty.items())
    return (Items(title="Not there", section="Not there", items=items),) if items else ()


# ---- differences ----------------------------------------------------------------------------------------------------


def difference(answer: Difference, *, top: int = 0) -> Document:
    """Two sides and the rows that differ."""
    before, after = answer.before, answer.after
    rows = []
    for change in answer.changes:
        seconds = change.change_s
        sides = ("" if side is None else format_seconds(side.time_s) for side in (change.before, change.after))
        sign = "+" if seconds > 0 else "-"
        rows.append(
            (
                change.scope, change.phase, *sides, f"{sign}{format_seconds(abs(seconds))}",
                "; ".join(change.collectives),
            )
        )  # fmt: skip
    headings = (
        *(TableColumn(name, "text") for name in ("scope", "phase")),
        *(TableColumn(name) for name in ("before", "after", "change")),
        TableColumn("collectives", "text", wrap=True),
    )
    title = "Rows that differ, the largest change first"
    return Document(
        title="What changed",
        verdict=ShownVerdict(
            subject=f"{before.name} ({_kind(before)}), then {after.name} ({_kind(after)})",
            details=() if answer.dollars is None else (answer.dollars,),
            says=sentence(answer.verdict),
        ),
        charts=(
            *((Table(title=title, columns=headings, rows=tuple(rows), top=top),) if rows else ()),
            *_memory_that_differs(answer.memory),
        ),
    )


def _kind(side: DifferenceSide) -> str:
    """The kind of a side, with the framework of a plan."""
    return side.kind if side.program is None else f"{side.kind} for {side.program}"


def _memory_that_differs(changes: Sequence[MemoryChange]) -> tuple[Chart, ...]:
    rows = []
    for change in changes:
        more = f"{'+' if change.change > 0 else '-'}{format_bytes(abs(change.change))}"
        rows.append((change.name, format_bytes(change.before), format_bytes(change.after), more))
    columns = (TableColumn("memory", "text"), *(TableColumn(name) for name in ("before", "after", "change")))
    title = "Memory at the peak of a device that differs"
    return (Table(title=title, columns=columns, rows=tuple(rows)),) if rows else ()


# ---- operations -----------------------------------------------------------------------------------------------------


def operations(answer: OperationsRecord) -> Document:
    """HLO instructions made readable, and what they say together."""
    charts = [chart for op in answer.operations for chart in _operation(op)]
    for inferred in answer.inferred:
        apart = "" if inferred.step is None else f", {inferred.step} devices apart"
        title = (
            f"{inferred.ways}-way model parallelism: {inferred.summed_by} sums over {inferred.ways} "
            f"devices{apart}, of {inferred.devices}"
        )
        items = [Item(_matmul(matmul)) for matmul in inferred.matmuls]
        if any(len(matmul.left) == 1 for matmul in inferred.matmuls):
            items.append(Item("B: the batch, of which these lines show one row on a device"))
        charts.append(Items(title=title, items=tuple(items)))
    return Document(title="Operations", verdict=ShownVerdict(), charts=tuple(charts))


def _matmul(matmul: TrueMatmul) -> str:
    sizes = " x ".join(_array(side) for side in (matmul.left, matmul.right))
    dim = "contracted" if matmul.contracts else "output"
    return f"{matmul.name}: {sizes} -> {_array(matmul.result)}, the {dim} dim of {matmul.split} split"


def _array(sizes: Sequence[int]) -> str:
    """Sizes, with a batch dim that one row on a device leaves no trace of."""
    return f"[{','.join(map(str, sizes))}]" if len(sizes) > 1 else f"[B,{sizes[0]}]" if sizes else "[B]"


def _operation(op: OperationRecord) -> Iterator[Chart]:
    texts = [sentence(op.does)]
    rows = [("result", *_layout(result)) for result in op.results]
    for operand in op.operands:
        empty = ("", "", "", "", "")
        rows.append((f"%{operand.name}", *(_layout(operand.layout) if operand.layout else empty)))
    after = []
    if matmul := op.matmul:
        batch = f"{matmul.batch} x " if matmul.batch > 1 else ""
        sizes = f"{batch}[{matmul.m}, {matmul.k}] x [{matmul.k}, {matmul.n}]"
        after.append(f"As its shapes tell, a matmul {sizes}: {format_count(matmul.flops, 'FLOPs')}.")
    if moved := op.collective:
        over = f" over {moved.members} devices" if moved.members else ""
        after.append(f"It moves as {moved.kind}{over} {format_bytes(moved.bytes)} a device.")
    if op.times:
        after += [
            f"It does not fit: its arrays in {memory.memory.upper()} are {format_bytes(memory.bytes)}, and "
            f"a device of {op.times.chip} has {format_bytes(memory.capacity)}."
            for memory in op.times.overfull
        ]
        after += _times(op.times, op.hbm_bytes)
    title = f"{op.op}: {op.opcode}" + (f", calls {op.calls}" if op.calls else "")
    yield Items(title=title, items=tuple(Item(text) for text in texts))
    headings = (
        TableColumn("", "text"),
        TableColumn("array", "text"),
        TableColumn("stored as", "text", wrap=True),
        TableColumn("memory", "text"),
        TableColumn("elements"),
        TableColumn("in memory"),
    )
    yield Table(title="", columns=headings, rows=tuple(rows))
    if after:
        yield Items(title="", items=tuple(Item(text) for text in after))


def _layout(layout: LayoutRecord) -> tuple[str, ...]:
    order = "row-major" if layout.order == tuple(range(len(layout.shape))) else f"order {list(layout.order)}"
    tiles = "".join(f"({','.join(map(str, tile))})" for tile in layout.tiles)
    padded = layout.padded_shape != layout.shape
    stored = order + (f" in tiles of {tiles}" if tiles else "")
    stored += f", padded to [{','.join(map(str, layout.padded_shape))}], {layout.expansion:.2f}x" if padded else ""
    return (
        f"{layout.dtype}[{','.join(map(str, layout.shape))}]",
        stored,
        layout.memory.upper() if layout.memory.isalpha() else f"space {layout.memory}",
        format_bytes(layout.element_bytes),
        format_bytes(layout.bytes),
    )


def _times(times: OperationTimes, hbm_bytes: float) -> Iterator[str]:
    parts = [f"{name} {format_seconds(seconds)}" for name, seconds in times.bound_s.items() if seconds]
    wrapped = "" if times.wrapped_s is None else f" ({format_seconds(times.wrapped_s)} on a ring)"
    bound = f": bound by {times.bound}" if times.bound else ""
    yield f"On a device of {times.chip} at least {', '.join(parts) or 'no time'}{wrapped}{bound}."
    if times.intensity is not None:
        yield (
            f"{times.intensity:.0f} FLOPs a byte of HBM ({format_bytes(hbm_bytes)}); the chip needs "
            f"{times.critical_intensity:.0f} to be bound by its matrix unit."
        )
