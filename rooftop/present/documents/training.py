"""The document of a training plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from rooftop.core.ledger import Ledger, Row
from rooftop.core.quantities import counted, format_bytes, format_count, format_seconds
from rooftop.present.document import (
    Chart,
    ChartAxis,
    ChartSeries,
    Document,
    Item,
    Items,
    Level,
    Lines,
    ShownFigure,
    ShownVerdict,
    Table,
    TableColumn,
)
from rooftop.present.documents.parts import (
    bound_text,
    busy,
    calibrated_text,
    evidence_figure,
    exposed_text,
    interval_text,
    layout_text,
    ledger_bars,
    ledger_table,
    level_of,
    memory_bars,
    mesh_text,
    microbatches_text,
    milliseconds,
    obstacles,
    of_ledgers,
    price_text,
    prices_text,
    reasons,
    rooflines,
    roofs_of_slice,
    stored_figures,
    written_by,
)

_PHASES = ("forward", "recompute", "backward", "update")


def training_plan(data: Mapping[str, Any]) -> Document:
    """A training plan: the step and its money, where the step goes, why, alternatives, what would change it."""
    step, where = data["step"], data["slice"]["name"]
    ledger, lines = Ledger.from_json(data["ledger"]), of_ledgers({"planned": data["ledger"]})
    layout = layout_text(where, data["mesh"])
    memory, dtypes = data["memory"], data["dtypes"]
    classes = {name: size for name, size in memory.items() if name not in ("total", "capacity", "fits", "host")}
    return Document(
        title=f"{data['model']['name']} on {where}: a training plan",
        verdict=ShownVerdict(
            subject=f"{data['model']['name']} on {where}: {mesh_text(data['mesh']['axes'])}"
            + calibrated_text(data["slice"])
            + _too_long(data),
            no=_refusal(data),
            details=(
                f"laid out as {layout}; remat {data['remat']['name']}; {microbatches_text(data['microbatches'])}"
                + ("; collective matmuls over tensor" if data["collective_matmuls"] else "")
                + ("; whole experts over tensor" if data["experts_over_tensor"] else "")
                + ("" if dtypes["matmul"] == dtypes["compute"] else f"; {dtypes['matmul']} matmuls in the layers"),
                *_tight(data),
                *_rounded(data["workload"]),
                *_batch(data),
            ),
        ),
        figures=tuple(_figures(data, classes)),
        charts=(
            *_comparison(data),
            *obstacles(data, *(_nearest(data) if memory["fits"] else ())),
            _where(ledger, step["expected_s"]),
            ledger_bars(ledger),
            ledger_table(lines, "The ledger", about="Per device and step, counts applied."),
            *rooflines(lines, roofs_of_slice(where, dtype=data["dtypes"]["matmul"]), section="Roofline"),
            memory_bars({"planned": classes}, memory["capacity"]),
            reasons(data),
            *_alternatives(data),
            *_changes(data),
        ),
        sources=written_by(data),
    )


def _rounded(workload: Mapping[str, Any]) -> Iterator[str]:
    """The batch, if it is not the one that was asked for."""
    if workload.get("asked_tokens") is not None:
        tokens, seq_len = workload["batch_tokens"], workload["seq_len"]
        yield (
            f"{workload['asked_tokens']:,} tokens a step are rounded to {counted(tokens // seq_len, 'sequence')} of "
            f"{seq_len:,}: {tokens:,} tokens"
        )


def _batch(data: Mapping[str, Any]) -> Iterator[str]:
    """The batch that was not given, and the figures of half and twice of it."""
    if not (others := data.get("other_batches")):
        return
    work, own = data["workload"], {**data, "step_s": data["step"]["expected_s"]}

    def figures(plan: Mapping[str, Any]) -> str:
        parts = [format_seconds(plan["step_s"]) + " a step"] if plan["days"] is None else [f"{plan['days']:,.1f} days"]
        parts += [] if plan["cost_usd"] is None else [f"${format_count(plan['cost_usd'])}"]
        return ", ".join((*parts, f"MFU {plan['mfu']:.1%}"))

    yield f"batch {counted(work['batch_tokens'] // work['seq_len'], 'sequence')} of {work['seq_len']:,} tokens, " + (
        f"chosen as none was given: {figures(own)}"
    )
    for other in others:
        share = "half of it" if other["batch_tokens"] < work["batch_tokens"] else "twice as many"
        yield f"  with {share} (--batch-tokens {other['batch_tokens']}): {figures(other)}"


def _tight(data: Mapping[str, Any]) -> Iterator[str]:
    """The plan leaves the compiler no room in HBM; the nearest that does."""
    if not data["step"]["leaves_room"]:
        memory = data["memory"]
        yield (
            f"its time is an estimate, and too short: at {memory['total'] / memory['capacity']:.0%} of HBM the "
            "compiler repeats work, which is not priced"
        )
        if (near := data.get("nearest_with_room")) is not None:
            yield (
                f"nearest with room: {near['slice']} as {mesh_text(near['mesh'])}, remat {near['remat']}, "
                f"{microbatches_text(near['microbatches'])}: {format_seconds(near['expected_s'])} a step"
            )


def padding_figure(padding: Mapping[str, Any] | None, seq_len: int, label: str = "padding") -> Iterator[ShownFigure]:
    """The padding of a batch that the mesh splits unevenly, if there is any."""
    if padding is None or not padding["share"]:
        return
    parts = []
    if empty := padding["empty_sequences"]:
        parts.append(f"{counted(empty, 'empty sequence')} next to {padding['sequences'] - empty:,}")
    if padding["sequence_tokens"]:
        parts.append(f"{padding['sequence_tokens']:,} tokens after the {seq_len:,} of a sequence")
    note = f"of all positions: {', '.join(parts)}; they take time, and count in no rate"
    yield ShownFigure("padding", label, padding["share"], "%", note=note)


def _refusal(data: Mapping[str, Any]) -> str:
    """The reason why a plan does not fit or meet the limits, and the nearest that does; empty if it does."""
    if not data["memory"]["fits"]:
        return "; ".join((_shortfall(data["memory"]), *_nearest(data)))
    if data["obstacles"]:
        where = data["slice"]["name"]
        near, reason = data.get("nearest_executable"), f"not executable: {data['obstacles'][0]}"
        if near is None:
            return f"{reason}; no plan runs in its place"
        if near["slice"].partition(":")[0] != where.partition(":")[0]:
            reason += f"; no mesh of {where.partition(':')[0]} runs it"
        return "; ".join((reason, *_nearest(data)))
    compared = data.get("comparison")
    if compared is None or compared["best"]["meets"]:
        return ""
    return f"no slice meets the limits; nearest is {compared['best']['slice']}: {compared['best']['why']}"


def _comparison(data: Mapping[str, Any]) -> tuple[Chart, ...]:
    """The slices that were compared, the recommended one first."""
    if (compared := data.get("comparison")) is None:
        return ()
    aim = {"cost": "fewest dollars", "time": "fastest", "chips": "fewest chips"}[compared["aim"]]
    own = data["workload"]
    best = compared["best"]

    def rank(offer: Mapping[str, Any]) -> str:
        return "" if offer is not best else "recommended" if best["meets"] else "nearest"

    def interval(ends: Sequence[float] | None, text: Callable[[float], str]) -> str:
        return "" if ends is None else "-".join(map(text, ends))

    offers = (best, *compared["others"])
    rows = [
        (
            offer["slice"],
            "" if offer["days"] is None else f"{offer['days']:,.1f}",
            interval(offer.get("interval_days"), lambda days: f"{days:,.1f}"),
            "" if offer["cost_usd"] is None else format_count(offer["cost_usd"]),
            interval(offer.get("interval_usd"), format_count),
            str(offer.get("evidence_runs") or "none"),
            "; ".join(filter(None, (rank(offer), offer["why"]))),
            f"{offer['mfu']:.1%}",
            mesh_text(offer["mesh"]),
            f"{offer['chips']:,}",
            format_count(offer["tokens_per_s"]),
            offer["bound"],
        )
        for offer in offers
    ]
    rows += [(entry["name"], *[""] * 5, entry["why"], *[""] * 5) for entry in compared["left_out"]]
    drops = {"MFU": 1, "chips": 3, "mesh": 2, "tok/s": 5, "bound": 4}
    money = ("days", "90% of days", "dollars", "90% of dollars")
    names = ("slice", *money, "runs", "", "MFU", "mesh", "chips", "tok/s", "bound")
    # Without tokens there are no days, and without a price no dollars.
    shown = [at for at, name in enumerate(names) if name not in money or any(row[at] for row in rows)]
    text = ("slice", "mesh", "bound", "")
    prices = prices_text(offer for offer in offers if offer["cost_usd"] is not None)
    return (
        Table(
            title=f"Slices compared: {aim} first ({compared['planned']} planned)",
            section="Slices",
            about=f"Each with {counted(own['batch_tokens'] // own['seq_len'], 'sequence')} of {own['seq_len']:,} "
            "tokens a step, on its best mesh that fits and that rooftop can run. 90%: the interval; runs: published "
            "runs that it rests on; not distinguishable: within another's interval."
            + (f" Dollars a chip-hour: {prices}." if prices else ""),
            columns=tuple(
                TableColumn(
                    name, "text" if name in text else "number", wrap=name in ("mesh", ""), drop=drops.get(name, 0)
                )
                for name in (names[at] for at in shown)
            ),
            rows=tuple(tuple(row[at] for at in shown) for row in rows),
        ),
    )


def _shortfall(memory: Mapping[str, Any]) -> str:
    over = memory["total"] - memory["capacity"]
    return (
        f"does not fit: {format_bytes(memory['total'])} of {format_bytes(memory['capacity'])} a device, "
        f"{format_bytes(over)} too much"
    )


def _figures(data: Mapping[str, Any], classes: Mapping[str, float]) -> Iterator[ShownFigure]:
    step, memory = data["step"], data["memory"]
    tight = not step["leaves_room"]
    level: Level = "estimate" if tight else level_of(data["evidence"]["level"])
    interval = "an estimate, and too short" if tight else interval_text(data["evidence"], step["interval_s"])
    yield ShownFigure("expected_s", "step", step["expected_s"], "s", level,
        note=f"{interval}; {format_seconds(step['lower_s'])} if everything overlaps ({bound_text(step['bound'])}), "
        f"{format_seconds(step['upper_s'])} if nothing does")  # fmt: skip
    yield evidence_figure(data["evidence"])
    yield ShownFigure("mfu", "MFU", data["mfu"], "%", level, formula=data["flops"]["convention"],
        note="causal attention and unembedding counted, recomputation not")  # fmt: skip
    yield ShownFigure("tokens_per_s", "rate", data["tokens_per_s"], "tok/s", level,
        note=f"{data['tokens_per_s'] / data['slice']['chips']:.0f} tok/s per chip")  # fmt: skip
    if data["days"] is not None:
        cost = f"no list price: --price {data['slice']['name'].partition(':')[0]}=USD"
        if data["cost_usd"] is not None:
            # Plans of earlier releases do not name the price.
            price = {"price_usd_per_hour": data["cost_usd"] / (data["days"] * 24 * data["slice"]["chips"])}
            cost = f"${data['cost_usd']:,.0f} at {price_text(price | data['slice'])}"
        yield ShownFigure("days", "budget", data["days"] * 86400, "s", level, shown=f"{data['days']:.1f} days",
            note=f"for {format_count(data['workload']['tokens'])} tokens; {cost}")  # fmt: skip
    classes_text = ", ".join(f"{name} {format_bytes(size)}" for name, size in classes.items())
    yield ShownFigure("memory_bytes", "memory", memory["total"], "B", "expected",
        note=f"of {format_bytes(memory['capacity'])} a device: {classes_text}")  # fmt: skip
    yield from stored_figures(data["model"], f"trained as {data['dtypes']['weights']}")
    yield from padding_figure(data.get("padding"), data["workload"]["seq_len"])
    exposed = {name: seconds for name, seconds in step["exposed_s"].items() if seconds > 0}
    yield ShownFigure("exposed_s", "not hidden", sum(exposed.values()), "s", "expected",
        note=exposed_text(exposed, step["expected_s"]) or "no collectives")  # fmt: skip
    if (pipeline := data.get("pipeline")) is not None:
        yield ShownFigure("bubble", "bubble", pipeline["bubble"], "%", "simulated",
            note=f"of the passes, {pipeline['schedule']} simulated; {pipeline['bubble_closed_form']:.1%} in closed "
            f"form; {pipeline['in_flight']:g} microbatches held at most")  # fmt: skip


def _too_long(data: Mapping[str, Any]) -> str:
    """A warning if sequences are longer than those for which the model was made."""
    longest, tokens = data["model"]["config"]["max_seq_len"], data["workload"]["seq_len"]
    return f"; sequences of {tokens:,}, the model was made for {longest:,}" if tokens > longest else ""


def _nearest(data: Mapping[str, Any]) -> Iterator[str]:
    """The nearest plan that runs."""
    if (near := data.get("nearest_executable")) is not None:
        other = "" if near["matmul"] == data["dtypes"]["matmul"] else f" with {near['matmul']} matmuls"
        if near["batch_tokens"] != data["workload"]["batch_tokens"]:
            other += f" with {counted(near['batch_seqs'], 'sequence')}"
        verb = "runs" if data["memory"]["fits"] else "does"
        yield (
            f"nearest that {verb}: {near['slice']} as {mesh_text(near['mesh'])}{other}, remat {near['remat']}, "
            f"{microbatches_text(near['microbatches'])}: {format_seconds(near['expected_s'])} a step"
        )


def _where(ledger: Ledger, step_s: float) -> Table:
    """Milliseconds by scope and phase."""
    scopes: dict[str, list[Row]] = {}
    for row in ledger:
        scopes.setdefault(row.scope, []).append(row)
    rows = []
    for scope, members in scopes.items():
        phases = {name: sum(float(r.count * r.expected_s) for r in members if r.phase == name) for name in _PHASES}
        exposed = sum(float(r.count * moved.exposed_s) for r in members for moved in r.collectives)
        seconds = busy(members)
        bound = max(seconds, key=lambda name: seconds[name], default="")
        rows.append(
            (
                scope,
                *(milliseconds(phases[name]) for name in _PHASES),
                f"{sum(phases.values()) / step_s:.1%}",
                milliseconds(exposed),
                milliseconds(seconds.get(bound, 0.0)),
                bound or "idle",
            )
        )
    return Table(
        title="Where the step goes (ms per step on one device)",
        section="Ledger",
        columns=(
            TableColumn("scope", "text"),
            *(TableColumn(name, drop=2 if name == "recompute" else 1) for name in _PHASES),
            TableColumn("share"),
            TableColumn("exposed"),
            TableColumn("at peak", drop=3),
            TableColumn("bound", "text"),
        ),
        rows=tuple(rows),
    )


def _alternatives(data: Mapping[str, Any]) -> tuple[Chart, ...]:
    """The runners-up of a search as a table, and with the plan as points."""
    others = data.get("alternatives", ())
    if not others:
        return ()
    rows = [
        (
            " x ".join(f"{name} {size}" for name, size in other["mesh"].items()),
            other["remat"],
            str(other["microbatches"]),
            format_seconds(other["expected_s"]),
            f"{other['mfu']:.1%}",
            format_bytes(other["memory_bytes"]),
            "" if other["fits"] else "does not fit",
        )
        for other in others
    ]
    columns = tuple(
        TableColumn(name, "text" if name in ("mesh", "remat", "") else "number", wrap=name == "mesh")
        for name in ("mesh", "remat", "microbatches", "step", "MFU", "memory", "")
    )
    own = {
        "mesh": data["mesh"]["axes"], "remat": data["remat"]["name"], "microbatches": data["microbatches"],
        "expected_s": data["step"]["expected_s"], "mfu": data["mfu"], "memory_bytes": data["memory"]["total"],
    }  # fmt: skip
    return (
        Table(
            title=f"Alternatives ({counted(data['searched'], 'candidate')} searched)",
            section="Alternatives",
            columns=columns,
            rows=tuple(rows),
        ),
        Lines(
            title="Alternatives",
            about="The time of a step over the memory of a device, each mesh at its best.",
            x=ChartAxis("memory of a device", "B"),
            y=ChartAxis("step", "s"),
            series=(_series("this plan", "point", [own]), _series("alternatives", "dots", others)),
        ),
    )


def _series(name: str, style: Any, plans: Any) -> ChartSeries:
    return ChartSeries(
        name,
        tuple((float(plan["memory_bytes"]), float(plan["expected_s"])) for plan in plans),
        style,
        names=tuple(mesh_text(plan["mesh"]) for plan in plans),
        notes=tuple(map(_note, plans)),
    )


def _note(plan: Mapping[str, Any]) -> str:
    return (
        f"remat: {plan['remat']}\nmicrobatches: {plan['microbatches']}\n"
        f"step: {format_seconds(plan['expected_s'])}\nMFU: {plan['mfu']:.1%}\n"
        f"memory: {format_bytes(plan['memory_bytes'])}"
    )


def _changes(data: Mapping[str, Any]) -> tuple[Chart, ...]:
    """The changes that would help, with their gains; those that no program runs apart, with what is missing."""
    changes = data.get("what_if", ())
    possible = tuple(entry for entry in changes if entry.get("obstacle") is None)
    missing = tuple(entry for entry in changes if entry.get("obstacle") is not None)
    section = "What would change it"
    charts = []
    if possible:
        items = tuple(Item(f" {entry['change']}", mark=f"{entry['gain']:+.1%}") for entry in possible)
        charts.append(Items(title="What would change it (tokens/s)", section=section, items=items))
    if missing:
        items = tuple(
            Item(f" {entry['change']}: {entry['obstacle']}", mark=f"{entry['gain']:+.1%}") for entry in missing
        )
        charts.append(
            Items(title="What rooftop's program does not run (tokens/s if it did)", section=section, items=items)
        )
    return tuple(charts)
