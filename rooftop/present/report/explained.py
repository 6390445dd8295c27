"""The sections of a page about a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.present.report import ledgers
from rooftop.present.report.html import (
    Content,
    Head,
    Html,
    Section,
    figures,
    join,
    mesh_text,
    notes,
    place,
    sentence,
    table,
    tag,
)
from rooftop.present.report.ledgers import Roof, roofs_of_slice
from rooftop.present.report.plots import Axis, Point, Series, bars, plot

_PARTS = (
    ("compute_s", "computing"), ("exposed_s", "waiting for collectives"), ("held_s", "between the ops of loops"),
    ("idle_s", "idle"),
)  # fmt: skip


def explained_sections(data: Mapping[str, Any], plan: Mapping[str, Any] | None) -> tuple[Head, list[Section]]:
    """A trace: the ledger, the roofline, memory, collectives, losses and what to try."""
    lines = ledgers.of_explained(data)
    sections = [
        Section(name="ledger", title="Ledger", content=join(_step(data), ledgers.ledger(lines, _ledger_title(lines)))),
        Section(name="roofline", title="Roofline", content=_roofline(data, plan, lines)),
        Section(name="memory", title="Memory over time", content=_memory(data, plan)),
        *_tables(data),
    ]
    return _head(data), sections


def _head(data: Mapping[str, Any]) -> Head:
    devices = data["devices"]
    kind = f"{devices['count']} {'emulated ' if devices['emulated'] else ''}{devices['kind']} devices"
    told = [
        ("step", format_seconds(data["step_s"])),
        ("of the roofline", "not known" if data["roofline"] is None else f"{data['roofline']:.0%} ({data['bound']})"),
        ("devices", kind + (f", {devices['hosts']} hosts" if devices["hosts"] > 1 else "")),
        ("mesh", mesh_text(data["mesh"])),
        ("in a scope", f"{data['attributed']:.1%} of the busy time"),
        ("steps", f"{sum(each['counted'] for each in data['steps'])} of {len(data['steps'])} counted"),
    ]
    for each in data["achieved"]:
        unit = "FLOP/s" if each["resource"] == "mxu" else "B/s"
        share = "" if each["of_roof"] is None else f", {each['of_roof']:.0%} of its roof"
        told.append((f"achieved: {each['resource']}", f"{format_count(each['per_s'], unit)}{share}"))
    verdict = tag("p", sentence(data["verdict"]), class_="verdict")
    title = f"{data['trace']}: {', '.join(data['programs']) or 'a trace'}"
    return Head(title=title, content=join(verdict, figures(told), notes(map(sentence, data["notes"]))))


def _ledger_title(lines: list[ledgers.LedgerLine]) -> str:
    sides = [side for side in ledgers.SIDES if any(side in line.sides for line in lines)]
    return f"By scope and phase: {' beside '.join(sides)}"


def _step(data: Mapping[str, Any]) -> Html:
    whole = ("a step", [(title, data[name]) for name, title in _PARTS])
    rows = [whole]
    for each in data["steps"]:
        if each["counted"] and each["busy_s"] is not None and len(rows) < 12:
            idle, busy = each["seconds"] - each["busy_s"], each["busy_s"] - each["exposed_s"]
            parts = ("computing", busy), ("waiting for collectives", each["exposed_s"]), ("idle", max(0.0, idle))
            rows.append((f"step {each['number']}", list(parts)))
    about = f"The mean of the counted steps, then each: {data['marked']}"
    return bars("step", "A step", about, rows, format_seconds)


def _roofline(data: Mapping[str, Any], plan: Mapping[str, Any] | None, lines: list[ledgers.LedgerLine]) -> Html:
    found, missing = list[Roof](), None
    if own := data["roofs"]:
        bf16 = own["flops_per_s"]["bf16"]
        found.append(
            Roof(name=f"{own['source']} roofs, bf16", flops_per_s=bf16, hbm_bytes_per_s=own["hbm_bytes_per_s"])
        )
    else:
        missing = tag(
            "p", f"No roofs of what was measured: {data['empty'].get('roofline', 'none is known')}.", class_="quiet"
        )
    if plan is not None and not found:
        found += roofs_of_slice(plan["slice"]["name"], "that of the plan")
    return join(missing, ledgers.roofline("roofline-plot", lines, found))


def _memory(data: Mapping[str, Any], plan: Mapping[str, Any] | None) -> Html:
    if not data["memory"]:
        return tag("p", f"No memory over time: {data['empty'].get('memory', 'the trace has none')}.", class_="quiet")
    series = []
    for each in data["memory"]:
        points = tuple(
            Point(
                x=at_s, y=taken, name=format_seconds(at_s) if at_s else "0 s", figures=(("taken", format_bytes(taken)),)
            )
            for at_s, taken in each["points"]
        )
        series.append(Series(name=f"{each['host']} {each['allocator']}", points=points, line=True))
    span = [point[0] for each in data["memory"] for point in each["points"]]
    limits = {
        f"capacity of {each['allocator']}": each["capacity_bytes"] for each in data["memory"] if each["capacity_bytes"]
    }
    if plan is not None:
        limits["planned"] = plan["memory"]["total"]
    for name, value in limits.items():
        ends = tuple(Point(x=x, y=value, name=name) for x in (min(span), max(span)))
        series.append(Series(name=f"{name}, {format_bytes(value)}", points=ends, line=True, marks=False, dashed=True))
    return plot(
        "memory-plot", "Memory over time", "Bytes taken in each allocator, the highest of each span of time",
        Axis(label="seconds from the beginning of the trace", text=lambda s: format_seconds(s) if s else "0"),
        Axis(label="bytes", text=format_bytes, includes=(0.0,)), series,
    )  # fmt: skip


def _tables(data: Mapping[str, Any]) -> Iterator[Section]:
    if data["collectives"]:
        rows: list[list[Content]] = [
            [
                f"{each['kind']} {','.join(each['axes'])}", f"{each['scope']} {each['phase']}", each["op"],
                place(each["source"]), format_bytes(each["bytes"]) if each["bytes"] is not None else "",
                *(format_seconds(each[name]) for name in ("in_flight_s", "exposed_s", "hidden_s")),
                f"{format_bytes(each['wire_bytes_per_s'])}/s" if each["wire_bytes_per_s"] else "",
                f"{each['of_roof']:.0%}" if each["of_roof"] else "",
            ]
            for each in data["collectives"]
        ]  # fmt: skip
        names = ["collective", "scope", "op", "from", "bytes", "under way", "exposed", "hidden", "sent", "of the links"]
        made = table(names, rows, caption="Collectives, the most exposed first", text=4)
        yield Section(name="collectives", title="Collectives", content=made)
    if cores := data["sparse_cores"]["cores"]:
        parts = (("beside_s", "busy beside compute"), ("alone_s", "busy alone"), ("idle_s", "idle"))
        made = bars(
            "sparse-cores", "SparseCores, a step", "Busy while the TensorCore computes, busy while it does not, idle",
            [(f"TPU {each['device']} SC {each['core']}", [(title, each[name]) for name, title in parts])
             for each in cores[:16]],
            format_seconds,
        )  # fmt: skip
        yield Section(name="sparsecores", title="SparseCores", content=made)
    if data["operations"]:
        rows = [
            [
                each["op"], f"{each['scope']} {each['phase']}", place(each["source"]), format_seconds(each["time_s"]),
                format_count(each["flops_per_s"], "FLOP/s") if each["flops_per_s"] else "",
                f"{format_bytes(each['hbm_bytes_per_s'])}/s" if each["hbm_bytes_per_s"] else "", each["bound"],
                f"{each['of_roof']:.0%}" if each["of_roof"] else "",
            ]
            for each in data["operations"]
        ]  # fmt: skip
        names = ["op", "scope", "from", "time", "FLOP/s", "HBM/s", "bound", "of its roof"]
        made = table(names, rows, caption="The ops that take longest", text=3)
        yield Section(name="operations", title="Operations", content=made)
    if data["losses"]:
        rows = [
            [each["what"], each["waits_for"], place(each["source"]), format_seconds(each["seconds"]),
             f"{each['seconds'] / data['step_s']:.1%}" if data["step_s"] else ""]
            for each in data["losses"]
        ]  # fmt: skip
        made = table(["what", "waits for", "from", "time", "share"], rows, caption="The largest losses", text=3)
        yield Section(name="losses", title="Losses", content=made)
    if data["advice"]:
        items = [
            tag("li", tag("p", sentence(each["what"])), tag("p", f"{each['rule']}: {each['evidence']}", class_="quiet"))
            for each in data["advice"]
        ]
        yield Section(name="advice", title="What to try", content=tag("ol", items))
    if data["empty"]:
        items = [tag("li", f"{name}: {why}") for name, why in data["empty"].items()]
        yield Section(name="empty", title="Not there", content=tag("ul", items))
