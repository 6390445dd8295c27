"""The document of a compilation: planned next to compiled, the differences, and where the time goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.core.scopes import UNSCOPED
from rooftop.present.document import Chart, Document, ShownFigure, ShownVerdict, Table, TableColumn, columns
from rooftop.present.documents.parts import (
    calibrated_text,
    ledger_bars,
    ledger_table,
    memory_bars,
    mesh_text,
    microbatches_text,
    milliseconds,
    of_ledgers,
    place,
    prose,
    rooflines,
    roofs_of_slice,
    sentence,
    table,
    written_by,
)

#: The text of a compiled figure that equals the planned one.
SAME = "="
#: Operations that take a smaller share of the time are not listed.
_WORTH = 1e-3
_TIMES = (
    ("mxu_s", "matrix unit at peak"),
    ("hbm_s", "HBM at peak"),
    ("exposed_ici_s", "exposed on ICI"),
    ("exposed_dcn_s", "exposed on DCN"),
)


def compilation(data: Mapping[str, Any], *, cached: bool | None = False, frames: bool = False) -> Document:
    """A compilation, next to its plan if there is one. With ``frames``, sources are whole stacks.

    ``cached`` says whether it was compiled before (None: say nothing about the time of compiling).
    """
    where, ledger = data["slice"]["name"], Ledger.from_json(data.get("ledger", []))
    plan = data["plan"]
    subject = f"{where}: {mesh_text(data['mesh']['axes'])}{calibrated_text(data['slice'])}"
    if plan is not None:
        count = microbatches_text(plan["microbatches"])
        subject = f"{plan['model']['name']} on {subject}; remat {plan['remat']['name']}; {count}"
    return Document(
        title=f"Compiled for {where}",
        verdict=ShownVerdict(
            subject=subject,
            says=sentence(data["verdict"]),
            no="" if data["fits"] else data["verdict"],
            differs=not data.get("agrees", True),
            details=_versions(data, cached),
        ),
        figures=tuple(_figures(data)),
        charts=tuple(_charts(data, ledger, plan, frames=frames)),
        sources=written_by(data, "; XLA's schedule, priced at the chip's named fractions"),
    )


def _versions(data: Mapping[str, Any], cached: bool | None) -> tuple[str, ...]:
    if not data["fits"] or not data.get("versions"):
        return ()
    versions = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    took = f", {'once ' if cached else ''}compiled in {data['compile_s']:.0f} s" if cached is not None else ""
    compiler = "XLA:TPU" if "libtpu" in data["versions"] else "XLA:GPU"
    refused = data.get("left_out")
    without = (f"compiled without {', '.join(refused)}, which this release of {compiler} refuses",) if refused else ()
    return (f"{compiler} ({versions}){took}", *without)


def _figures(data: Mapping[str, Any]) -> Iterator[ShownFigure]:
    if data["fits"]:
        step = data["step"]
        exposed = step["exposed_ici_s"] + step["exposed_dcn_s"]
        waits = f"{format_seconds(exposed)} waiting for collectives" if exposed else "no collective waits"
        yield ShownFigure("compiled_s", "expected time", step["expected_s"], "s", "expected",
            note=f"of the compiled schedule; {waits}")  # fmt: skip
        if data.get("planned_step") is not None:
            yield ShownFigure("planned_s", "as planned", data["planned_step"]["expected_s"], "s", "expected")
    # A module alone has neither versions nor a peak.
    alone = data["fits"] and not data["versions"] and data["memory"] is None
    title, note = ("arguments, results", "") if alone else ("peak memory", ", as the compiler allocates")
    yield ShownFigure("peak_bytes", title, data["peak_bytes"], "B",
        note=f"of {format_bytes(data['capacity_bytes'])} a device{note}")  # fmt: skip
    if data.get("planned_peak_bytes") is not None:
        yield ShownFigure("planned_peak_bytes", "peak, planned", data["planned_peak_bytes"], "B", "expected")


def _charts(
    data: Mapping[str, Any], ledger: Ledger, plan: Mapping[str, Any] | None, *, frames: bool
) -> Iterator[Chart]:
    sides = {
        side: classes
        for side, classes in (("compiled", data.get("memory")), ("planned", data.get("planned_memory")))
        if classes
    }
    filled = (memory_bars(sides, data["capacity_bytes"], section="Memory"),) if sides else ()
    if not data["fits"]:
        yield from filled
        yield _memory(data)
        yield from _buffers(data)
        yield from _nearest(data)
        return
    planned = data.get("planned_step") is not None
    yield from (
        (_checks(data), _memory(data), *_rows(data, plan), *_findings(data)) if planned else _alone(data, frames=frames)
    )
    ledgers = {"compiled": data["ledger"]} | ({"planned": plan["ledger"]} if plan is not None else {})
    notes = {(row["scope"], row["phase"]): row["verdict"] for row in data["joined"] if row["verdict"] != "as planned"}
    lines = of_ledgers(ledgers, notes)
    yield ledger_bars(ledger, section="Ledger")
    yield ledger_table(lines, "The ledger", about="Per device and step, counts applied.")
    yield from rooflines(lines, roofs_of_slice(data["slice"]["name"]), section="Roofline")
    yield from filled
    yield from _operations(data, frames=frames)
    yield from _buffers(data, detail=planned)


def _checks(data: Mapping[str, Any]) -> Table:
    rows = []
    formats: Mapping[str, Callable[[float], str]] = {"matmul FLOPs": format_count, "expected time": format_seconds}
    for check in data["checks"]:
        write = formats.get(check["name"], format_bytes)
        ratio = "" if check["ratio"] is None else f"{check['ratio']:.3f}"
        holds = "" if check["holds"] else "differs"
        rows.append((check["name"], write(check["planned"]), write(check["compiled"]), ratio, holds))
        if check["name"] == "matmul FLOPs" and (data["kernel_flops"] or data["planned_kernel_flops"]):
            kernels = (format_count(data["planned_kernel_flops"]), format_count(data["kernel_flops"]))
            rows.append(("kernels' FLOPs", *kernels, "", ""))
    for name, title in _TIMES:
        both = data["planned_step"][name], data["step"][name]
        if any(both):
            rows.append((title, format_seconds(both[0]), format_seconds(both[1]), "", ""))
    names = ("", "planned", "compiled", "ratio", "")
    return table("Per step on one device", names, rows, section="Planned and compiled")


def _memory(data: Mapping[str, Any]) -> Table:
    """HBM at the peak by class."""
    planned, compiled = data["planned_memory"] or {}, data["memory"] or {}
    rows = [
        (name, *(format_bytes(side[name]) if name in side else "" for side in (planned, compiled)))
        for name in dict.fromkeys([*planned, *compiled])
    ]
    peaks = (data["planned_peak_bytes"], data["peak_bytes"])
    rows.append(("all", *("" if size is None else format_bytes(size) for size in peaks)))
    return table("HBM of a device at the peak", ("", "planned", "compiled"), rows)


def _buffers(data: Mapping[str, Any], *, detail: bool = False) -> tuple[Chart, ...]:
    rows = [
        (
            # An argument, or an array without a scope, goes by its name.
            buffer["name"] if buffer["scope"] in ("", UNSCOPED) else f"{buffer['scope']} {buffer['phase']}",
            buffer["shape"],
            buffer["memory_class"],
            format_bytes(buffer["bytes"]),
            place(buffer["source"]),
        )
        for buffer in data["buffers"]
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


def _nearest(data: Mapping[str, Any]) -> tuple[Chart, ...]:
    near = data["nearest"]
    if near is None:
        return ()
    mesh = " x ".join(f"{name} {size}" for name, size in near["mesh"].items())
    text = (
        f"The nearest plan that should fit, by what XLA asked for here: {mesh}, remat {near['remat']}, "
        f"{near['microbatches']} microbatches: {format_seconds(near['expected_s'])} a step."
    )
    return (prose(text),)


def _rows(data: Mapping[str, Any], plan: Mapping[str, Any] | None) -> tuple[Table, ...]:
    """Planned and compiled figures by scope and phase."""
    planned = _seconds([] if plan is None else plan["ledger"])
    compiled, before = _seconds(data["ledger"]), ""
    rows: list[tuple[str, ...]] = []
    for row in data["joined"]:
        moved = [
            (f"{item['kind']} {','.join(item['axes'])}", item["planned_bytes"] or 0.0, item["compiled_bytes"] or 0.0)
            for item in row["collectives"]
        ]
        key = row["scope"], row["phase"]
        rows.append(
            (
                "" if row["scope"] == before else row["scope"],
                row["phase"],
                "\n".join(name for name, _, _ in moved),
                "\n".join(format_bytes(ours) if ours else "" for _, ours, _ in moved),
                "\n".join(_next_to(ours, theirs, format_bytes) for _, ours, theirs in moved),
                format_count(row["planned_flops"]) if row["planned_flops"] else "",
                _next_to(row["planned_flops"], row["compiled_flops"], format_count),
                milliseconds(planned.get(key, 0.0)),
                milliseconds(compiled.get(key, 0.0)),
            )
        )
        before = row["scope"]
    shown = {(row["scope"], row["phase"]) for row in data["joined"]}
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


def _seconds(ledger: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Expected seconds per step by scope and phase."""
    seconds: dict[tuple[str, str], float] = {}
    for row in ledger:
        key = row["scope"], row["phase"]
        seconds[key] = seconds.get(key, 0.0) + float(row["count"]) * float(row["expected_s"])
    return seconds


def _next_to(planned: float, compiled: float, write: Callable[[float], str]) -> str:
    if not planned and not compiled:
        return ""
    return SAME if abs(planned - compiled) <= 1e-6 * max(planned, compiled) else write(compiled)


def _findings(data: Mapping[str, Any]) -> Iterator[Chart]:
    titles = {
        "unexpected": "Unexpected: compiled, not planned",
        "missing": "Missing: planned, not compiled",
        "spelled": "As planned, under another name",
    }
    for name, title in titles.items():
        listed = [finding for finding in data[name] if finding["rule"] != "named"]
        if listed:
            yield _finding_table(title, listed)
    renamed = [finding for finding in data["unexpected"] if finding["rule"] == "named"]
    if renamed:
        moved = format_bytes(sum(finding["bytes"] for finding in renamed))
        yield prose(f"As planned, but under another scope or phase in XLA's names: {len(renamed)} items, {moved}.")
    # The rows have the recomputation that the remat policy asks for.
    strange = [finding for finding in data["recomputed"] if finding["rule"] != "policy"]
    if strange:
        yield _finding_table("Recomputed, not as planned", strange)
    elif data["recomputed"]:
        cost = sum(finding["cost_s"] for finding in data["recomputed"])
        yield prose(f"Recomputed as the remat policy asks: {format_seconds(cost)} a step.")


def _finding_table(title: str, findings: Sequence[Mapping[str, Any]]) -> Table:
    """Findings. A reason that several share is written once, below the table."""
    whys = list(dict.fromkeys(finding["why"] or "no reason is known" for finding in findings))
    rows = []
    for finding in findings:
        much = format_bytes(finding["bytes"])
        if finding["kind"] == "matmul":
            much = format_count(finding["flops"], "FLOPs")
        number = f"{whys.index(finding['why'] or 'no reason is known') + 1}"
        rows.append(
            (
                finding["scope"], finding["phase"], f"{finding['kind']} {','.join(finding['axes'])}".strip(), much,
                format_seconds(finding["cost_s"]), place(finding["source"]), number,
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


def _alone(data: Mapping[str, Any], *, frames: bool) -> Iterator[Chart]:
    """A program that nobody planned: its figures, scopes and collectives."""
    rows = [("matmul FLOPs", format_count(data["flops"]))]
    if data["kernel_flops"]:
        rows.append(("kernels' FLOPs", format_count(data["kernel_flops"])))
    rows += [(title, format_seconds(data["step"][name])) for name, title in _TIMES if data["step"][name]]
    yield table("Per execution on one device", ("", ""), rows, section="Execution")
    yield from _called(data)
    yield from _scopes(data)
    if not data["collectives"]:
        yield prose("No collectives.")
        return
    scoped = any(item["scope"] != UNSCOPED for item in data["collectives"])
    layers = data.get("layers", {})
    moved = [
        (
            *((layered(item["scope"], layers),) if scoped else ()),
            item["kind"] + (" (ring)" if item["ring"] else ""),
            ",".join(item["axes"]),
            format_bytes(item["bytes"]),
            f"{item['count']:g}",
            format_seconds(item["expected_s"]),
            format_seconds(item["exposed_s"]),
            _from(item, frames=frames),
        )
        for item in sorted(data["collectives"], key=lambda entry: -entry["count"] * entry["expected_s"])
    ]
    headings = (
        *((TableColumn("scope", "text", wrap=True, drop=2),) if scoped else ()),
        *columns("collective", "axes", "bytes", "times", "time", "exposed", text=2),
        TableColumn("from", "text", wrap=frames, drop=0 if frames else 1),
    )
    yield Table(title="Collectives", columns=headings, rows=tuple(moved))


def _from(item: Mapping[str, Any], *, frames: bool) -> str:
    """The source line of an item; with ``frames`` its whole stack, innermost first."""
    stack = item.get("frames") if frames else None
    return " < ".join(place(frame) for frame in stack) if stack else place(item["source"])


#: Rows of the table of scopes, the longest first, and the smallest share of the time that is listed.
_SCOPES = 30


def layered(scope: str, layers: Mapping[str, int]) -> str:
    """A scope, with the number of layers that it stands for: 'model/layers_*/mlp x 32'."""
    counts = [count for folded, count in layers.items() if f"{scope}/".startswith(f"{folded}/")]
    return scope + "".join(f" x {count}" for count in counts)


def _scopes(data: Mapping[str, Any]) -> Iterator[Chart]:
    """A program's own scopes, the longest first, with its collectives by kind and axes."""
    rows: dict[tuple[str, str], dict[str, float]] = {}
    moved: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in data["ledger"]:
        key, count = (row["scope"], row["phase"]), row["count"]
        sums = rows.setdefault(key, {"time": 0.0, "exposed": 0.0, "flops": 0.0, "hbm": 0.0})
        sums["time"] += count * row["expected_s"]
        sums["flops"] += count * (sum(row["flops"].values()) + row["kernel_flops"])
        sums["hbm"] += count * row["hbm_bytes"]
        for item in row["collectives"]:
            sums["exposed"] += count * item["exposed_s"]
            name = f"{item['kind']} {','.join(item['axes'])}"
            amounts = moved.setdefault(key, {}).setdefault(name, [0.0, 0.0])
            amounts[0] += count
            amounts[1] += count * item["bytes"]
    if all(scope == UNSCOPED for scope, _ in rows):
        return
    whole, layers = data["step"]["expected_s"] or 1.0, data.get("layers", {})
    longest = sorted(rows, key=lambda key: -rows[key]["time"])
    listed = [key for key in longest if rows[key]["time"] > _WORTH * whole][:_SCOPES]
    cells = [
        (
            layered(key[0], layers),
            key[1],
            milliseconds(rows[key]["time"], 3),
            f"{rows[key]['time'] / whole:.1%}",
            milliseconds(rows[key]["exposed"], 3),
            format_count(rows[key]["flops"]) if rows[key]["flops"] else "",
            format_bytes(rows[key]["hbm"]) if rows[key]["hbm"] else "",
            "\n".join(
                f"{name}: {format_bytes(nbytes)}" + (f" in {count:g}" if count > 1 else "")
                for name, (count, nbytes) in moved.get(key, {}).items()
            ),
        )
        for key in listed
    ]
    rest = longest[len(listed) :]
    seconds = sum(rows[key]["time"] for key in rest)
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


def _called(data: Mapping[str, Any]) -> tuple[Chart, ...]:
    """Hand-written kernels, equal calls in one row."""
    calls: dict[tuple[str, ...], float] = {}
    for call in data.get("called", ()):
        flops = "unknown" if call["flops"] is None else format_count(call["flops"])
        limit = f"{call['limit']}, " if call["limit"] else ""
        key = (
            call["kernel"], flops, format_bytes(call["hbm_bytes"]), f"{limit}{_EVIDENCE[call['evidence']]}",
            place(call["source"]),
        )  # fmt: skip
        calls[key] = calls.get(key, 0.0) + call["count"]
    rows = [(key[0], f"{count:g}", *key[1:]) for key, count in calls.items()]
    headings = (
        TableColumn("kernel", "text", wrap=True),
        *(TableColumn(name) for name in ("times", "FLOPs", "HBM")),
        TableColumn("FLOPs by", "text", wrap=True),
        TableColumn("from", "text", drop=1),
    )
    return (Table(title="Hand-written kernels", columns=headings, rows=tuple(rows)),) if rows else ()


def _operations(data: Mapping[str, Any], *, frames: bool) -> Iterator[Chart]:
    whole = data["step"]["expected_s"]
    listed = [op for op in data["operations"] if op["count"] * op["expected_s"] > _WORTH * whole]
    if not listed:
        yield prose("No operation takes a thousandth of the time.")
        return
    # A program with scopes is known by them, any other by XLA's names.
    scoped = any(op["scope"] != UNSCOPED for op in listed)
    rows = [
        (
            *((op["scope"], op["phase"]) if scoped else (op["op"],)),
            op["matmul"] or op["shape"].split(", ")[0],
            format_count(op["flops"]) if op["flops"] else "",
            format_bytes(op["hbm_bytes"]),
            f"{op['intensity']:.0f}" if op["intensity"] else "",
            op["bound"],
            format_seconds(op["count"] * op["expected_s"]),
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
