"""The document of a compilation: planned next to compiled, the differences, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rooftop.compiler.ledger import CompiledTimes
from rooftop.core.ledger import Row
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.core.scopes import UNSCOPED
from rooftop.explain.compiled.findings import Finding
from rooftop.explain.compiled.report import CompiledCollective, CompiledRecord, RefusedRecord
from rooftop.explain.compiled.rooflines import OperationRoofline
from rooftop.present.document import Chart, Document, ShownFigure, ShownVerdict, Table, TableColumn, columns
from rooftop.present.documents.parts import (
    calibrated_by,
    ledger_bars,
    ledger_lines,
    ledger_table,
    memory_bars,
    mesh_text,
    microbatches_text,
    milliseconds,
    place,
    prose,
    rooflines,
    roofs_of_slice,
    sentence,
    table,
    version_note,
)

#: The text of a compiled figure that equals the planned one.
SAME = "="
#: Operations that take a smaller share of the time are not listed.
_WORTH = 1e-3


def _times(step: CompiledTimes) -> dict[str, float]:
    """Seconds of a step by what takes them, in words."""
    return {
        "matrix unit at peak": step.mxu_s,
        "HBM at peak": step.hbm_s,
        "exposed on ICI": step.exposed_ici_s,
        "exposed on DCN": step.exposed_dcn_s,
    }


def compilation(
    answer: CompiledRecord | RefusedRecord, *, cached: bool | None = False, frames: bool = False
) -> Document:
    """A compilation, next to its plan if there is one. With ``frames``, sources are whole stacks.

    ``cached`` says whether it was compiled before (None: say nothing about the time of compiling).
    """
    where, plan = answer.slice.name, answer.plan
    subject = f"{where}: {mesh_text(answer.mesh.axes)}{calibrated_by(answer.slice)}"
    if plan is not None:
        count = microbatches_text(plan.microbatches)
        subject = f"{plan.model.name} on {subject}; remat {plan.remat.name}; {count}"
    fits = isinstance(answer, CompiledRecord)
    return Document(
        title=f"Compiled for {where}",
        verdict=ShownVerdict(
            subject=subject,
            says=sentence(answer.verdict),
            no="" if fits else answer.verdict,
            differs=isinstance(answer, CompiledRecord) and not answer.agrees,
            details=_versions(answer, cached) if isinstance(answer, CompiledRecord) else (),
        ),
        figures=tuple(_figures(answer)),
        charts=tuple(_charts(answer, frames=frames)),
        sources=version_note(answer.rooftop_version, "; XLA's schedule, priced at the chip's named fractions"),
    )


def _versions(compiled: CompiledRecord, cached: bool | None) -> tuple[str, ...]:
    if not compiled.versions:
        return ()
    versions = ", ".join(f"{name} {version}" for name, version in compiled.versions.items())
    took = f", {'once ' if cached else ''}compiled in {compiled.compile_s:.0f} s" if cached is not None else ""
    compiler = "XLA:TPU" if "libtpu" in compiled.versions else "XLA:GPU"
    refused = compiled.left_out
    without = (f"compiled without {', '.join(refused)}, which this release of {compiler} refuses",) if refused else ()
    return (f"{compiler} ({versions}){took}", *without)


def _figures(answer: CompiledRecord | RefusedRecord) -> Iterator[ShownFigure]:
    alone = False
    if isinstance(answer, CompiledRecord):
        step = answer.step
        exposed = step.exposed_ici_s + step.exposed_dcn_s
        waits = f"{format_seconds(exposed)} waiting for collectives" if exposed else "no collective waits"
        yield ShownFigure("compiled_s", "expected time", step.expected_s, "s", "expected",
            note=f"of the compiled schedule; {waits}")  # fmt: skip
        if answer.planned_step is not None:
            yield ShownFigure("planned_s", "as planned", answer.planned_step.expected_s, "s", "expected")
        # A module alone has neither versions nor a peak.
        alone = not answer.versions and answer.memory is None
    title, note = ("arguments, results", "") if alone else ("peak memory", ", as the compiler allocates")
    yield ShownFigure("peak_bytes", title, answer.peak_bytes, "B",
        note=f"of {format_bytes(answer.capacity_bytes)} a device{note}")  # fmt: skip
    if answer.planned_peak_bytes is not None:
        yield ShownFigure("planned_peak_bytes", "peak, planned", answer.planned_peak_bytes, "B", "expected")


def _charts(answer: CompiledRecord | RefusedRecord, *, frames: bool) -> Iterator[Chart]:
    sides = {
        side: classes for side, classes in (("compiled", answer.memory), ("planned", answer.planned_memory)) if classes
    }
    filled = (memory_bars(sides, answer.capacity_bytes, section="Memory"),) if sides else ()
    if isinstance(answer, RefusedRecord):
        yield from filled
        yield _memory(answer)
        yield from _buffers(answer)
        yield from _nearest(answer)
        return
    plan, planned_step = answer.plan, answer.planned_step
    if planned_step is None:
        yield from _alone(answer, frames=frames)
    else:
        yield from (_checks(answer, planned_step), _memory(answer), *_rows(answer), *_findings(answer))
    ledgers = {"compiled": answer.ledger} | ({"planned": plan.ledger} if plan is not None else {})
    notes = {(row.scope, row.phase): row.verdict for row in answer.joined if row.verdict != "as planned"}
    lines = ledger_lines(ledgers, notes)
    yield ledger_bars(answer.ledger, section="Ledger")
    yield ledger_table(lines, "The ledger", about="Per device and step, counts applied.")
    yield from rooflines(lines, roofs_of_slice(answer.slice.name), section="Roofline")
    yield from filled
    yield from _operations(answer, frames=frames)
    yield from _buffers(answer, detail=planned_step is not None)


def _checks(compiled: CompiledRecord, planned_step: CompiledTimes) -> Table:
    rows = []
    formats: Mapping[str, Callable[[float], str]] = {"matmul FLOPs": format_count, "expected time": format_seconds}
    for check in compiled.checks:
        write = formats.get(check.name, format_bytes)
        ratio = "" if check.ratio is None else f"{check.ratio:.3f}"
        holds = "" if check.holds else "differs"
        rows.append((check.name, write(check.planned), write(check.compiled), ratio, holds))
        if check.name == "matmul FLOPs" and (compiled.kernel_flops or compiled.planned_kernel_flops):
            kernels = (format_count(compiled.planned_kernel_flops or 0.0), format_count(compiled.kernel_flops))
            rows.append(("kernels' FLOPs", *kernels, "", ""))
    real = _times(compiled.step)
    for title, planned_s in _times(planned_step).items():
        if planned_s or real[title]:
            rows.append((title, format_seconds(planned_s), format_seconds(real[title]), "", ""))
    names = ("", "planned", "compiled", "ratio", "")
    return table("Per step on one device", names, rows, section="Planned and compiled")


def _memory(answer: CompiledRecord | RefusedRecord) -> Table:
    """HBM at the peak by class."""
    planned, compiled = answer.planned_memory or {}, answer.memory or {}
    rows = [
        (name, *(format_bytes(side[name]) if name in side else "" for side in (planned, compiled)))
        for name in dict.fromkeys([*planned, *compiled])
    ]
    planned_peak = "" if answer.planned_peak_bytes is None else format_bytes(answer.planned_peak_bytes)
    rows.append(("all", planned_peak, format_bytes(answer.peak_bytes)))
    return table("HBM of a device at the peak", ("", "planned", "compiled"), rows)


def _buffers(answer: CompiledRecord | RefusedRecord, *, detail: bool = False) -> tuple[Chart, ...]:
    rows = [
        (
            # An argument, or an array without a scope, goes by its name.
            buffer.name if buffer.scope in ("", UNSCOPED) else f"{buffer.scope} {buffer.phase}",
            buffer.shape,
            buffer.memory_class,
            format_bytes(buffer.bytes),
            place(buffer.source),
        )
        for buffer in answer.buffers
    ]
    headings = (
        TableColumn("array", "text", wrap=True),
        TableColumn("shape", "text", wrap=True),
        TableColumn("class", "text", drop=2),
        TableColumn("bytes"),
        TableColumn("from", "text", drop=1),
    )
    title = "The largest arrays at the peak"
    return (Table(title=title, columns=headings, rows=tuple(rows), detail=detail),) if rows else ()


def _nearest(refused: RefusedRecord) -> tuple[Chart, ...]:
    near = refused.nearest
    if near is None:
        return ()
    mesh = " x ".join(f"{name} {size}" for name, size in near.mesh.items())
    text = (
        f"The nearest plan that should fit, by what XLA asked for here: {mesh}, remat {near.remat}, "
        f"{near.microbatches} microbatches: {format_seconds(near.expected_s)} a step."
    )
    return (prose(text),)


def _rows(answer: CompiledRecord) -> tuple[Table, ...]:
    """Planned and compiled figures by scope and phase."""
    planned = _seconds(() if answer.plan is None else answer.plan.ledger)
    compiled, before = _seconds(answer.ledger), ""
    rows: list[tuple[str, ...]] = []
    for row in answer.joined:
        moved = [
            (f"{item.kind} {','.join(item.axes)}", item.planned_bytes or 0.0, item.compiled_bytes or 0.0)
            for item in row.collectives
        ]
        key = row.scope, row.phase
        rows.append(
            (
                "" if row.scope == before else row.scope,
                row.phase,
                "\n".join(name for name, _, _ in moved),
                "\n".join(format_bytes(ours) if ours else "" for _, ours, _ in moved),
                "\n".join(_next_to(ours, theirs, format_bytes) for _, ours, theirs in moved),
                format_count(row.planned_flops) if row.planned_flops else "",
                _next_to(row.planned_flops, row.compiled_flops, format_count),
                milliseconds(planned.get(key, 0.0)),
                milliseconds(compiled.get(key, 0.0)),
            )
        )
        before = row.scope
    shown = {(row.scope, row.phase) for row in answer.joined}
    rest = [sum(seconds for key, seconds in side.items() if key not in shown) for side in (planned, compiled)]
    rows.append(("elementwise, other", "", "", "", "", "", "", *map(milliseconds, rest)))
    return (
        Table(
            title="By scope, planned and then as XLA compiled it ('=': as planned; ms with what collectives expose)",
            columns=(
                TableColumn("scope", "text"),
                TableColumn("phase", "text"),
                TableColumn("collective", "text", wrap=True),
                *(TableColumn(name) for name in ("bytes", "XLA")),
                *(TableColumn(name, drop=1) for name in ("FLOPs", "XLA")),
                *(TableColumn(name) for name in ("ms", "XLA")),
            ),
            rows=tuple(rows),
        ),
    )


def _seconds(ledger: Iterable[Row]) -> dict[tuple[str, str], float]:
    """Expected seconds per step by scope and phase."""
    seconds: dict[tuple[str, str], float] = {}
    for row in ledger:
        seconds[row.key] = seconds.get(row.key, 0.0) + float(row.count) * float(row.expected_s)
    return seconds


def _next_to(planned: float, compiled: float, write: Callable[[float], str]) -> str:
    if not planned and not compiled:
        return ""
    return SAME if abs(planned - compiled) <= 1e-6 * max(planned, compiled) else write(compiled)


def _findings(compiled: CompiledRecord) -> Iterator[Chart]:
    for title, findings in (
        ("Unexpected: compiled, not planned", compiled.unexpected),
        ("Missing: planned, not compiled", compiled.missing),
        ("As planned, under another name", compiled.spelled),
    ):
        listed = [finding for finding in findings if finding.rule != "named"]
        if listed:
            yield _finding_table(title, listed)
    renamed = [finding for finding in compiled.unexpected if finding.rule == "named"]
    if renamed:
        moved = format_bytes(sum(finding.bytes for finding in renamed))
        yield prose(f"As planned, but under another scope or phase in XLA's names: {len(renamed)} items, {moved}.")
    # The rows have the recomputation that the remat policy asks for.
    strange = [finding for finding in compiled.recomputed if finding.rule != "policy"]
    if strange:
        yield _finding_table("Recomputed, not as planned", strange)
    elif compiled.recomputed:
        cost = sum(finding.cost_s for finding in compiled.recomputed)
        yield prose(f"Recomputed as the remat policy asks: {format_seconds(cost)} a step.")


def _finding_table(title: str, findings: Sequence[Finding]) -> Table:
    """Findings. A reason that several share is written once, below the table."""
    whys = list(dict.fromkeys(finding.why or "no reason is known" for finding in findings))
    rows = []
    for finding in findings:
        much = format_bytes(finding.bytes)
        if finding.kind == "matmul":
            much = format_count(finding.flops, "FLOPs")
        number = f"{whys.index(finding.why or 'no reason is known') + 1}"
        rows.append(
            (
                finding.scope, finding.phase, f"{finding.kind} {','.join(finding.axes)}".strip(), much,
                format_seconds(finding.cost_s), place(finding.source), number,
            )
        )  # fmt: skip
    headings = (
        TableColumn("scope", "text"),
        TableColumn("phase", "text"),
        TableColumn("what", "text", wrap=True),
        TableColumn("how much"),
        TableColumn("time"),
        TableColumn("from", "text", drop=1),
        TableColumn("why"),
    )
    about = "\n".join(f"{number}: {why}" for number, why in enumerate(whys, start=1))
    return Table(title=title, about=about, columns=headings, rows=tuple(rows))


def _alone(compiled: CompiledRecord, *, frames: bool) -> Iterator[Chart]:
    """A program that nobody planned: its figures, scopes and collectives."""
    rows = [("matmul FLOPs", format_count(compiled.flops))]
    if compiled.kernel_flops:
        rows.append(("kernels' FLOPs", format_count(compiled.kernel_flops)))
    rows += [(title, format_seconds(seconds)) for title, seconds in _times(compiled.step).items() if seconds]
    yield table("Per execution on one device", ("", ""), rows, section="Execution")
    yield from _called(compiled)
    yield from _scopes(compiled)
    if not compiled.collectives:
        yield prose("No collectives.")
        return
    scoped = any(item.scope != UNSCOPED for item in compiled.collectives)
    moved = [
        (
            *((layered(item.scope, compiled.layers),) if scoped else ()),
            item.kind + (" (ring)" if item.ring else ""),
            ",".join(item.axes),
            format_bytes(item.bytes),
            f"{item.count:g}",
            format_seconds(item.expected_s),
            format_seconds(item.exposed_s),
            _from(item, frames=frames),
        )
        for item in sorted(compiled.collectives, key=lambda entry: -entry.count * entry.expected_s)
    ]
    headings = (
        *((TableColumn("scope", "text", wrap=True, drop=2),) if scoped else ()),
        *columns("collective", "axes", "bytes", "times", "time", "exposed", text=2),
        TableColumn("from", "text", wrap=frames, drop=0 if frames else 1),
    )
    yield Table(title="Collectives", columns=headings, rows=tuple(moved))


def _from(item: CompiledCollective | OperationRoofline, *, frames: bool) -> str:
    """The source line of an item; with ``frames`` its whole stack, innermost first."""
    stack = item.frames if frames else ()
    return " < ".join(place(frame) for frame in stack) if stack else place(item.source)


#: Rows of the table of scopes, the longest first, and the smallest share of the time that is listed.
_SCOPES = 30


def layered(scope: str, layers: Mapping[str, int]) -> str:
    """A scope, with the number of layers that it stands for: 'model/layers_*/mlp x 32'."""
    counts = [count for folded, count in layers.items() if f"{scope}/".startswith(f"{folded}/")]
    return scope + "".join(f" x {count}" for count in counts)


@dataclass(kw_only=True)
class _ScopeSums:
    """Seconds, FLOPs and HBM bytes of a scope in a phase; ``moved`` has executions and bytes of each collective."""

    time_s: float = 0.0
    exposed_s: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    moved: dict[str, list[float]] = field(default_factory=dict)


def _scopes(compiled: CompiledRecord) -> Iterator[Chart]:
    """A program's own scopes, the longest first, with its collectives by kind and axes."""
    rows: dict[tuple[str, str], _ScopeSums] = {}
    for row in compiled.ledger:
        sums, count = rows.setdefault(row.key, _ScopeSums()), float(row.count)
        sums.time_s += count * float(row.expected_s)
        sums.flops += count * float(sum(row.flops.values()) + row.kernel_flops)
        sums.hbm_bytes += count * float(row.hbm_bytes)
        for item in row.collectives:
            sums.exposed_s += count * float(item.exposed_s)
            amounts = sums.moved.setdefault(f"{item.kind} {','.join(item.axes)}", [0.0, 0.0])
            amounts[0] += count
            amounts[1] += count * float(item.bytes)
    if all(scope == UNSCOPED for scope, _ in rows):
        return
    whole = compiled.step.expected_s or 1.0
    longest = sorted(rows.items(), key=lambda entry: -entry[1].time_s)
    listed = [(key, sums) for key, sums in longest if sums.time_s > _WORTH * whole][:_SCOPES]
    cells = [
        (
            layered(scope, compiled.layers),
            phase,
            milliseconds(sums.time_s, 3),
            f"{sums.time_s / whole:.1%}",
            milliseconds(sums.exposed_s, 3),
            format_count(sums.flops) if sums.flops else "",
            format_bytes(sums.hbm_bytes) if sums.hbm_bytes else "",
            "\n".join(
                f"{name}: {format_bytes(nbytes)}" + (f" in {count:g}" if count > 1 else "")
                for name, (count, nbytes) in sums.moved.items()
            ),
        )
        for (scope, phase), sums in listed
    ]
    rest = longest[len(listed) :]
    seconds = sum(sums.time_s for _, sums in rest)
    if seconds:
        cells.append((f"{len(rest)} more", "", milliseconds(seconds, 3), f"{seconds / whole:.1%}", "", "", "", ""))
    yield Table(
        title="By scope, the longest first (ms with what collectives expose)",
        section="Scopes",
        columns=(
            TableColumn("scope", "text", wrap=True),
            TableColumn("phase", "text"),
            *(TableColumn(name) for name in ("ms", "share", "exposed")),
            *(TableColumn(name, drop=2) for name in ("FLOPs", "HBM")),
            TableColumn("collectives", "text", wrap=True, drop=1),
        ),
        rows=tuple(cells),
    )


#: The evidence for the FLOPs of a kernel in words.
_EVIDENCE = {
    "declared": "declared by the program", "body": "its body, over its grid", "estimate": "its cost estimate",
    "shapes": "the shapes of its operands", "": "unknown",
}  # fmt: skip


def _called(compiled: CompiledRecord) -> tuple[Chart, ...]:
    """Hand-written kernels, equal calls in one row."""
    calls: dict[tuple[str, ...], float] = {}
    for call in compiled.called:
        flops = "unknown" if call.flops is None else format_count(call.flops)
        limit = f"{call.limit}, " if call.limit else ""
        key = (
            call.kernel, flops, format_bytes(call.hbm_bytes), f"{limit}{_EVIDENCE[call.evidence]}",
            place(call.source),
        )  # fmt: skip
        calls[key] = calls.get(key, 0.0) + call.count
    rows = [(key[0], f"{count:g}", *key[1:]) for key, count in calls.items()]
    headings = (
        TableColumn("kernel", "text", wrap=True),
        *(TableColumn(name) for name in ("times", "FLOPs", "HBM")),
        TableColumn("FLOPs by", "text", wrap=True),
        TableColumn("from", "text", drop=1),
    )
    return (Table(title="Hand-written kernels", columns=headings, rows=tuple(rows)),) if rows else ()


def _operations(compiled: CompiledRecord, *, frames: bool) -> Iterator[Chart]:
    whole = compiled.step.expected_s
    listed = [op for op in compiled.operations if op.count * op.expected_s > _WORTH * whole]
    if not listed:
        yield prose("No operation takes a thousandth of the time.")
        return
    # A program with scopes is known by them, any other by XLA's names.
    scoped = any(op.scope != UNSCOPED for op in listed)
    rows = [
        (
            *((op.scope, op.phase) if scoped else (op.op,)),
            op.matmul or op.shape.split(", ")[0],
            format_count(op.flops) if op.flops else "",
            format_bytes(op.hbm_bytes),
            f"{op.intensity:.0f}" if op.intensity else "",
            op.bound,
            format_seconds(op.count * op.expected_s),
            _from(op, frames=frames),
        )
        for op in listed
    ]
    names = ("scope", "phase") if scoped else ("operation",)
    yield Table(
        title=f"The {len(listed)} operations that take the longest (time of all executions)",
        section="Operations",
        columns=(
            *(TableColumn(name, "text", wrap=name == "operation") for name in names),
            TableColumn("M x K x N, or result", "text", wrap=True, drop=2),
            TableColumn("FLOPs", drop=3),
            TableColumn("HBM", drop=3),
            TableColumn("FLOPs/B"),
            TableColumn("bound", "text"),
            TableColumn("time"),
            TableColumn("from", "text", wrap=frames, drop=0 if frames else 1),
        ),
        rows=tuple(rows),
    )
