"""The sections of a page about a plan, or about a compilation beside its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from rooftop.present.report.ledgers import roofs_of_slice
from rooftop.present.report.plots import Axis, Point, Series, bars, plot

Answer = tuple[Head, list[Section]]


def training_sections(data: Mapping[str, Any], plan: Mapping[str, Any] | None) -> Answer:
    """A training plan: its ledger, roofline, memory, reasons and alternatives."""
    step, where, memory = data["step"], data["slice"]["name"], data["memory"]
    told = [
        ("step", f"{format_seconds(step['expected_s'])} expected"),
        ("bounds", f"{format_seconds(step['lower_s'])} ({step['bound']}) to {format_seconds(step['upper_s'])}"),
        ("MFU", f"{data['mfu']:.1%}"),
        ("rate", format_count(data["tokens_per_s"], "tokens/s")),
        ("memory", f"{format_bytes(memory['total'])} of {format_bytes(memory['capacity'])} a device"),
        (
            "mesh",
            f"{mesh_text(data['mesh']['axes'])}; remat {data['remat']['name']}; microbatches {data['microbatches']}",
        ),
    ]
    said = notes([f"MFU counts {data['flops']['convention']}."])
    lines = ledgers.of_ledgers({"planned": data["ledger"]})
    sections = [
        Section(name="ledger", title="Ledger", content=ledgers.ledger(lines, "By scope and phase: planned")),
        _roofline(lines, where),
        Section(name="memory", title="Memory", content=_memory({"planned": memory}, memory["capacity"])),
        *_reasons(data.get("reasons", ())),
    ]
    if data["alternatives"]:
        sections.append(Section(name="alternatives", title="Alternatives", content=_alternatives(data)))
    return Head(
        title=f"{data['model']['name']} on {where}: a training plan", content=join(figures(told), said)
    ), sections


def compiled_sections(data: Mapping[str, Any], plan: Mapping[str, Any] | None) -> Answer:
    """A compilation, beside its plan if there is one."""
    where = data["slice"]["name"]
    told = [("peak memory", f"{format_bytes(data['peak_bytes'])} of {format_bytes(data['capacity_bytes'])} a device")]
    if data["fits"]:
        told.insert(0, ("step", f"{format_seconds(data['step']['expected_s'])} expected of the compiled schedule"))
        exposed = data["step"]["exposed_ici_s"] + data["step"]["exposed_dcn_s"]
        told.append(("waiting for collectives", format_seconds(exposed) if exposed else "none"))
    head = Head(
        title=f"Compiled for {where}",
        content=join(tag("p", sentence(data["verdict"]), class_="verdict"), figures(told)),
    )
    memory = {"compiled": data["memory"] or {}} | (
        {"planned": data["planned_memory"]} if data["planned_memory"] else {}
    )
    filled = Section(
        name="memory", title="Memory at the peak", content=join(_memory(memory, data["capacity_bytes"]), _buffers(data))
    )
    if not data["fits"]:
        return head, [filled]
    sides = {"compiled": data["ledger"]} | ({"planned": plan["ledger"]} if plan is not None else {})
    differs = {(row["scope"], row["phase"]): row["verdict"] for row in data["joined"] if row["verdict"] != "as planned"}
    lines = ledgers.of_ledgers(sides, differs)
    title = f"By scope and phase: {' beside '.join(sides)}"
    found = [Section(name="ledger", title="Ledger", content=join(_checks(data), ledgers.ledger(lines, title)))]
    return head, [*found, _roofline(lines, where), filled, *_findings(data), _operations(data)]


def serving_sections(data: Mapping[str, Any], plan: Mapping[str, Any] | None) -> Answer:
    """A serving plan: the Pareto front, a ledger and a roofline of each phase, memory, reasons."""
    where, generate, prefill, memory = data["slice"]["name"], data["generate"], data["prefill"], data["memory"]
    cost = data["cost_per_million_tokens"]
    told = [
        ("time per output token", format_seconds(data["tpot_s"])),
        ("time to first token", format_seconds(data["ttft_s"])),
        ("step", f"{format_seconds(generate['step_s']['expected_s'])}, bound by {generate['bound']}"),
        ("batch", f"{generate['batch']} of at most {data['max_batch']}"),
        ("rate", format_count(generate["tokens_per_s_per_chip"], "tokens/s per chip")),
    ]
    if cost and cost.get("output") is not None:
        told.append(("a million tokens", f"${cost['input']:.2f} in, ${cost['output']:.2f} out"))
    sections = [Section(name="pareto", title="Pareto", content=_pareto(data["pareto"], generate))]
    for name, phase in (("generate", generate), ("prefill", prefill)):
        lines = ledgers.of_ledgers({"planned": phase["ledger"]})
        made = ledgers.ledger(lines, f"By scope: {name}, planned")
        drawn = ledgers.roofline(
            f"roofline-{name}", lines, roofs_of_slice(phase.get("slice") or where), f"Roofline of {name}"
        )
        sections.append(Section(name=name, title=name.capitalize(), content=join(made, drawn)))
    device = memory["per_device"]
    filled = _memory({"planned": device}, device["capacity"])
    sections += [Section(name="memory", title="Memory", content=filled), *_reasons(data.get("reasons", ()))]
    return Head(title=f"{data['model']['name']} on {where}: a serving plan", content=figures(told)), sections


def pareto_sections(data: Mapping[str, Any], plan: Mapping[str, Any] | None) -> Answer:
    """The Pareto front of several slices."""
    content = _pareto(data["pareto"], None)
    head = Head(title=f"{data['model']}: latency and throughput of generation", content=Html(""))
    return head, [Section(name="pareto", title="Pareto", content=content)]


def _roofline(lines: Sequence[ledgers.LedgerLine], where: str) -> Section:
    content = ledgers.roofline("roofline-plot", lines, roofs_of_slice(where))
    return Section(name="roofline", title="Roofline", content=content)


def _memory(sides: Mapping[str, Mapping[str, Any]], capacity: float) -> Html:
    rest = ("total", "capacity", "fits", "host", "free", "kv_per_token", "per_device")
    rows = [
        (side, [(name, float(value)) for name, value in parts.items() if name not in rest and value])
        for side, parts in sides.items()
    ]
    about = "What fills the HBM of one device when most of it is in use"
    return bars("memory-bars", "Memory at the peak", about, rows, format_bytes, limit=("usable", float(capacity)))


def _buffers(data: Mapping[str, Any]) -> Html | None:
    rows = [
        [
            each["name"],
            each["shape"],
            each["memory_class"],
            f"{each['scope']} {each['phase']}".strip(),
            place(each["source"]),
            format_bytes(each["bytes"]),
        ]
        for each in data["buffers"]
    ]
    names = ["array", "shape", "class", "scope", "from", "bytes"]
    return table(names, rows, caption="The largest arrays at the peak", text=5) if rows else None


def _checks(data: Mapping[str, Any]) -> Html | None:
    rows: list[list[Content]] = [
        [
            each["name"],
            *(_amount(each[side], each["unit"]) for side in ("planned", "compiled")),
            "" if each["ratio"] is None else f"{each['ratio']:.3f}",
            f"{each['above']:.0%} above, {each['below']:.0%} below",
            "yes" if each["holds"] else "no",
        ]
        for each in data["checks"]
    ]
    names = ["", "planned", "compiled", "ratio", "may be", "holds"]
    return table(names, rows, caption="What plan and compiler must agree on") if rows else None


def _amount(value: float, unit: str) -> str:
    return {"B": format_bytes, "s": format_seconds}.get(unit, format_count)(value)


def _findings(data: Mapping[str, Any]) -> list[Section]:
    rows: list[list[Content]] = [
        [
            kind, f"{each['scope']} {each['phase']}", f"{each['kind']} {','.join(each['axes'])}".strip(),
            each["why"] or "no rule explains it", place(each["source"]),
            format_bytes(each["bytes"]) if each["bytes"] else format_count(each["flops"], "FLOPs"),
            format_seconds(each["cost_s"]) if each["cost_s"] else "",
        ]
        for kind in ("unexpected", "missing", "recomputed", "spelled")
        for each in data[kind]
    ]  # fmt: skip
    names = ["", "scope", "what", "why", "from", "amount", "time"]
    if not rows:
        return []
    made = table(names, rows, caption="Compiled and not planned, planned and not compiled", text=5)
    return [Section(name="findings", title="Findings", content=made)]


def _operations(data: Mapping[str, Any]) -> Section:
    rows: list[list[Content]] = [
        [
            each["op"], f"{each['scope']} {each['phase']}", place(each["source"]), each["matmul"] or each["shape"],
            f"{each['count']}", format_seconds(each["expected_s"]) if each["expected_s"] else "", each["bound"],
            f"{each['intensity']:.3g}" if each["intensity"] else "",
        ]
        for each in data["operations"]
    ]  # fmt: skip
    names = ["op", "scope", "from", "shape", "times", "one takes", "bound", "FLOPs per byte"]
    made = table(names, rows, caption="The ops that take longest", text=4)
    return Section(name="operations", title="Operations", content=made)


def _reasons(reasons: Sequence[Mapping[str, Any]]) -> list[Section]:
    rows: list[list[Content]] = [
        ["yes" if each["holds"] else "no", each["text"], each["formula"], each["source"]] for each in reasons
    ]
    made = table(["holds", "rule", "formula", "source"], rows, caption="Why", text=4)
    return [Section(name="reasons", title="Why", content=made)] if rows else []


def _pareto(points: Sequence[Mapping[str, Any]], chosen: Mapping[str, Any] | None) -> Html:
    """Tokens/s per chip over the seconds of a step, a line for each context, or for each slice and its dtypes."""
    formats = {(point.get("weights"), point.get("kv")) for point in points}
    lines: dict[str, list[Point]] = {}
    for each in points:
        name = f"context {each['context']:,.0f}"
        if "slice" in each:
            name = each["slice"] + (f", {each['weights']}, KV {each['kv']}" if len(formats) > 1 else "")
        told = [
            ("step", format_seconds(each["step_s"])),
            ("tokens/s per chip", format_count(each["tokens_per_s_per_chip"])),
            ("batch", f"{each['batch']}"),
        ]
        if each.get("usd_per_million_tokens") is not None:
            told.append(("a million tokens", f"${each['usd_per_million_tokens']:.2f}"))
        told.append(("mesh", mesh_text(each["mesh"])))
        at = Point(
            x=each["step_s"], y=each["tokens_per_s_per_chip"], name=f"batch {each['batch']}", figures=tuple(told)
        )
        lines.setdefault(name, []).append(at)
    series = [Series(name=name, points=tuple(found), line=True) for name, found in lines.items()]
    if chosen is not None:
        at = Point(
            x=chosen["step_s"]["expected_s"], y=chosen["tokens_per_s_per_chip"], name=f"batch {chosen['batch']}",
            figures=(("step", format_seconds(chosen["step_s"]["expected_s"])), ("batch", f"{chosen['batch']}"),
                     ("tokens/s per chip", format_count(chosen["tokens_per_s_per_chip"]))),
        )  # fmt: skip
        series.append(Series(name="this plan", points=(at,)))
    return plot(
        "pareto-plot", "Latency and throughput of generation",
        "Tokens/s per chip over the time of a step; each point is a batch on its best mesh",
        Axis(label="step, logarithmic", text=format_seconds, log=True),
        Axis(label="tokens/s per chip", text=format_count, includes=(0.0,)), series,
    )  # fmt: skip


def _alternatives(data: Mapping[str, Any]) -> Html:
    """The plan among the meshes that come after it: time of a step over memory."""
    others = tuple(_alternative(each) for each in data["alternatives"])
    own = _alternative(
        {
            "mesh": data["mesh"]["axes"], "remat": data["remat"]["name"], "microbatches": data["microbatches"],
            "expected_s": data["step"]["expected_s"], "mfu": data["mfu"], "memory_bytes": data["memory"]["total"],
        }
    )  # fmt: skip
    series = [Series(name="this plan", points=(own,)), Series(name="alternatives", points=others)]
    return plot(
        "alternatives-plot", "Alternatives", "The time of a step over the memory of a device, each mesh at its best",
        Axis(label="memory of a device", text=format_bytes, includes=(0.0,)),
        Axis(label="step", text=lambda value: format_seconds(value) if value else "0", includes=(0.0,)), series,
    )  # fmt: skip


def _alternative(each: Mapping[str, Any]) -> Point:
    told = (
        ("remat", str(each["remat"])), ("microbatches", str(each["microbatches"])),
        ("step", format_seconds(each["expected_s"])), ("MFU", f"{each['mfu']:.1%}"),
        ("memory", format_bytes(each["memory_bytes"])),
    )  # fmt: skip
    return Point(x=each["memory_bytes"], y=each["expected_s"], name=mesh_text(each["mesh"]), figures=told)
