"""The documents of a serving plan, with the fleet that it is part of, and of a front of servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.present.document import Chart, Document, Item, Items, ShownFigure, ShownVerdict, Table, TableColumn
from rooftop.present.documents.parts import (
    busy,
    front_chart,
    layout_text,
    ledger_bars,
    ledger_table,
    memory_bars,
    obstacles,
    of_ledgers,
    reasons,
    rooflines,
    roofs_of_slice,
    written_by,
)

#: Points of a front that are printed, and runners-up of a fleet; the data has all.
_POINTS, _OTHERS = 12, 6
_CLASSES = ("weights", "scales", "kv", "activations")


def serving_plan(data: Mapping[str, Any]) -> Document:
    """A serving plan: the fleet, a step and its latencies, both ledgers, why, and the front of batches."""
    where, generate, prefill = data["slice"]["name"], data["generate"], data["prefill"]
    memory, fleet = data["memory"]["per_device"], data.get("recommendation")
    subject = f"{data['model']['name']} on {where}: batch {generate['batch']}, {data['mode']}"
    return Document(
        title=f"{data['model']['name']} on {where}: a serving plan",
        verdict=ShownVerdict(
            subject=subject if fleet is None else f"Recommended: {fleet['best']['name']}",
            no=_shortfall(data["memory"]),
            details=(*_fleet(data), *(() if fleet is None else (subject,)), *_layouts(data)),
        ),
        figures=tuple(_figures(data)),
        charts=(
            *_others(fleet),
            *obstacles(data),
            _where(generate["ledger"], "Where a generate step goes (ms on one device)", "Generate"),
            *_pictures(generate["ledger"], where, "a generate step", ""),
            _where(prefill["ledger"], "Where a prefill goes (ms on one device)", "Prefill"),
            *_pictures(prefill["ledger"], prefill["slice"], "a prefill", " of a prefill"),
            memory_bars({"planned": {name: memory[name] for name in _CLASSES}}, memory["capacity"]),
            reasons(data),
            front_chart(data["pareto"], generate),
            _front(data["pareto"], "Batches worth having"),
        ),
        sources=written_by(data),
    )


def front(data: Mapping[str, Any]) -> Document:
    """A front of servers."""
    return Document(
        title=f"{data['model']}: latency and throughput of generation",
        verdict=ShownVerdict(subject=f"{data['model']}: the front of batches over servers"),
        charts=(front_chart(data["pareto"]), _front(data["pareto"], "Nothing generates both faster and cheaper")),
    )


def _shortfall(memory: Mapping[str, Any]) -> str:
    if memory["fits"]:
        return ""
    return f"does not fit: {format_bytes(memory['total'])} of {format_bytes(memory['capacity'])} a device"


def _fleet(data: Mapping[str, Any]) -> Iterator[str]:
    """The chips, dollars and latencies of the recommended fleet."""
    if (fleet := data.get("recommendation")) is None:
        return
    best = fleet["best"]
    money = "" if best["usd_per_hour"] is None else f", ${best['usd_per_hour']:,.2f} an hour at list prices"
    per_request = " for each request a second" if data["workload"]["requests_per_second"] is None else ""
    yield (
        f"  {best['chips']:,.4g} chips{money}{per_request}; TTFT {format_seconds(best['ttft_s'])} with its queue, TPOT "
        f"{format_seconds(best['tpot_s'])}"
    )


def _layouts(data: Mapping[str, Any]) -> Iterator[str]:
    """The layouts of generation and prefill on their slices."""
    split = ""
    if data["mesh"]["axes"].get("context", 1) > 1:
        split = f"; context splits the cache's {'sequences' if data['kv_split'] == 'batch' else 'tokens'}"
    yield f"generate as {layout_text(data['slice']['name'], data['mesh'])}{split}"
    where = data["prefill"]["slice"]
    yield f"prefill on {where} as {layout_text(where, data['prefill']['mesh'])}"


def _others(fleet: Mapping[str, Any] | None) -> tuple[Chart, ...]:
    """The fleets that lost, and why."""
    if fleet is None or not fleet["others"]:
        return ()
    ranks = ["Runner-up", *["Then"] * _OTHERS]
    items = tuple(
        Item(f"{rank}: {other['name']}\n  {other['why']}")
        for rank, other in zip(ranks, fleet["others"][:_OTHERS], strict=False)
    )
    return (Items(title="Other fleets", section="Fleets", items=items),)


def _figures(data: Mapping[str, Any]) -> Iterator[ShownFigure]:
    generate, memory, draft = data["generate"], data["memory"], data["draft"]
    step = generate["step_s"]
    parts = {name.removesuffix("_s"): format_seconds(seconds) for name, seconds in generate["breakdown"].items()}
    yield ShownFigure("step_s", "step", step["expected_s"], "s", "expected",
        note=f"expected, at least {format_seconds(step['lower_s'])} (bound by {generate['bound']}); at peak rates: "
        f"weights {parts['weights']}, KV {parts['kv']}, FLOPs {parts['flops']}, ICI {parts['ici']}")  # fmt: skip
    if draft is not None:
        yield ShownFigure("speculation", "speculation", draft["gain"], "%", "expected",
            shown=f"{draft['gain']:+.0%} tok/s",
            note=f"{draft['tokens_per_round']:.2f} tokens a round: {draft['length']} guesses of {draft['model']} in "
            f"{format_seconds(draft['guess_s'])}, checked in {format_seconds(draft['check_s'])}")  # fmt: skip
    yield ShownFigure("tokens_per_s", "rate", generate["tokens_per_s"], "tok/s", "expected",
        note=f"{generate['tokens_per_s_per_chip']:.4g} tok/s per chip")  # fmt: skip
    both = "" if draft is None else " by both models"
    yield ShownFigure("ttft_s", "TTFT", data["ttft_s"], "s", "expected", formula=data["definitions"]["ttft_s"],
        note=f"one prefill of {data['workload']['prompt']} tokens{both}, no queue")  # fmt: skip
    why = "with the prefills of others between" if data["mode"] == "interleaved" else "with the KV's transfer"
    yield ShownFigure("tpot_s", "TPOT", data["tpot_s"], "s", "expected",
        note="a step" if data["assumptions"]["bounds"] == "book" else f"a step, {why}")  # fmt: skip
    classes = ", ".join(f"{name} {format_bytes(memory[name])}" for name in _CLASSES)
    yield ShownFigure("memory_bytes", "memory", memory["total"], "B", "expected",
        note=f"of {format_bytes(memory['capacity'])}: {classes}")  # fmt: skip
    yield ShownFigure("max_batch", "largest batch", data["max_batch"], shown=str(data["max_batch"]),
        note=f"here; this one fits {data['smallest_slice'] or 'no slice'} at the smallest")  # fmt: skip
    transfer = data["kv_transfer"]
    yield ShownFigure("prefill_per_generate", "prefill", data["prefill_per_generate"], level="expected",
        shown=f"{data['prefill_per_generate']:.3g} servers",
        note=f"for each generate server; a prompt's KV of {format_bytes(transfer['bytes'])} moves in "
        f"{format_seconds(transfer['ici_s'])} over ICI, {format_seconds(transfer['dcn_s'])} over DCN")  # fmt: skip
    cost = data["cost_per_million_tokens"]
    if cost["input"] is not None:
        yield ShownFigure("usd_per_million_tokens", "cost", cost["output"], level="expected",
            shown=f"${cost['output']:.3g}",
            note=f"per million tokens out, ${cost['input']:.3g} in, of slices always busy")  # fmt: skip
    cache = data["prefix_cache"]
    if cache["hit_rate"]:
        host_text = (
            "" if cache["prompts_held"] is None else f"; host memory holds {cache['prompts_held']:,} prompts' KV"
        )
        yield ShownFigure("prefix_cache", "prefix cache", cache["speedup"], level="expected",
            shown=f"{cache['speedup']:.2f}x",
            note=f"faster prefill at {cache['hit_rate']:.0%} hits{host_text}")  # fmt: skip


def _where(ledger: Sequence[Mapping[str, Any]], title: str, section: str) -> Table:
    """Milliseconds by scope."""
    priced = Ledger.from_json(ledger)
    whole = float(priced.expected_s)
    rows = []
    for (scope, _), members in priced.by_key().items():
        seconds = busy(members)
        bound = max(seconds, key=lambda name: seconds[name])
        expected = sum(float(row.count * row.expected_s) for row in members)
        exposed = sum(float(row.count * moved.exposed_s) for row in members for moved in row.collectives)
        rows.append(
            (
                scope,
                f"{expected * 1e3:.3f}",
                f"{expected / whole:.1%}",
                f"{exposed * 1e3:.3f}" if exposed else "",
                f"{seconds[bound] * 1e3:.3f}",
                bound,
            )
        )
    return Table(
        title=title,
        section=section,
        columns=(
            TableColumn("scope", "text"),
            *(TableColumn(name) for name in ("expected", "share", "exposed")),
            TableColumn("at peak", drop=1),
            TableColumn("bound", "text"),
        ),
        rows=tuple(rows),
    )


def _pictures(ledger: list[Mapping[str, Any]], where: str, what: str, of: str) -> tuple[Chart, ...]:
    lines = of_ledgers({"planned": ledger})
    bars = ledger_bars(Ledger.from_json(ledger), title="Where the step goes" if not of else "Where a prefill goes")
    table = ledger_table(lines, f"The ledger{of}", about=f"Per device and {what}, counts applied.")
    return (bars, table, *rooflines(lines, roofs_of_slice(where), f"Roofline of {what}"))


def _front(points: Sequence[Mapping[str, Any]], title: str) -> Table:
    many = bool(points) and "slice" in points[0]
    names = (*(("slice", "weights", "kv") if many else ()), "context", "batch", "step", "tok/s per chip", "$/M tokens")
    stride = 1 if many else max(1, len(points) // _POINTS)
    rows = []
    for point in points[::stride]:
        cost = point["usd_per_million_tokens"]
        rows.append(
            (
                *((point["slice"], point["weights"], point["kv"]) if many else ()),
                f"{point['context']:,.0f}",
                str(point["batch"]),
                format_seconds(point["step_s"]),
                f"{point['tokens_per_s_per_chip']:.4g}",
                "" if cost is None else f"{cost:.3g}",
            )
        )
    kinds = ("slice", "weights", "kv")
    return Table(
        title=title,
        columns=tuple(TableColumn(name, "text" if name in kinds else "number") for name in names),
        rows=tuple(rows),
    )
