"""Reports that were written to files, as answers: compilations, explained runs, simulations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.hardware import Slice
from rooftop.ui.answers import Answer, Axis, Bar, Bars, Chart, Figure, Lines, Series, Table
from rooftop.ui.ledgers import ledger_charts, memory_bars, rows_roofline


def compiled(data: Mapping[str, Any]) -> Answer:
    """A compilation: what the compiler allocates and schedules, beside the plan."""
    charts: list[Chart] = []
    if "ledger" in data:
        slice_ = Slice.parse(data["slice"]["name"])
        points = (
            (each["op"], each["flops"], each["hbm_bytes"], each["expected_s"]) for each in data.get("operations", ())
        )
        roofline = rows_roofline(points, slice_, "bf16")
        found = ledger_charts(Ledger.from_json(data["ledger"]), None)
        charts += [found[0], *((roofline,) if roofline else ()), *found[1:]]
    if data.get("memory"):
        charts.append(memory_bars(data["memory"], data["capacity_bytes"], "compiled"))
    if data.get("joined"):
        charts.append(_joined(data["joined"]))
    step, planned = data.get("step"), data.get("planned_step")
    figures = [
        Figure(name="peak_bytes", label="Peak of a device", value=data["peak_bytes"], unit="B",
               formula=f"of {format_bytes(data['capacity_bytes'])}; what the compiler allocates"),
    ]  # fmt: skip
    if data.get("planned_peak_bytes") is not None:
        figures.append(Figure(name="planned_peak_bytes", label="as planned", value=data["planned_peak_bytes"], unit="B",
                              level="expected"))  # fmt: skip
    for name, label, each in (("compiled_s", "Compiled step", step), ("planned_s", "Planned step", planned)):
        if each is not None:
            figures.append(Figure(name=name, label=label, value=each["expected_s"], unit="s", level="expected"))
    return Answer(
        verdict=f"{data['slice']['name']}: {data['verdict']}.",
        no="" if data["fits"] else data["verdict"],
        figures=tuple(figures),
        charts=tuple(charts),
        sources=(
            f"Written by rooftop {data['rooftop_version']}; XLA's schedule, priced at the chip's named fractions.",
        ),
    )


def _joined(rows: list[Mapping[str, Any]]) -> Table:
    return Table(
        title="Compiled beside planned",
        columns=("scope", "phase", "planned FLOPs", "compiled FLOPs", "what"),
        rows=tuple(
            (
                row["scope"],
                row["phase"],
                format_count(row["planned_flops"]),
                format_count(row["compiled_flops"]),
                row["verdict"],
            )
            for row in rows
        ),
    )


def explained(data: Mapping[str, Any]) -> Answer:
    """An explained run: measured beside compiled beside planned."""
    parts = {"computing": "compute_s", "waiting for collectives": "exposed_s", "held": "held_s", "idle": "idle_s"}
    rows = [row for row in data["rows"] if row["measured"] is not None]
    return Answer(
        verdict=f"{PurePath(data['trace']).name}: {data['verdict']}.",
        figures=(
            Figure(name="step_s", label="Step", value=data["step_s"], unit="s", level="measured"),
            Figure(name="compute_s", label="Computing", value=data["compute_s"], unit="s", level="measured"),
            Figure(
                name="exposed_s", label="Waiting for collectives", value=data["exposed_s"], unit="s", level="measured"
            ),
            Figure(name="idle_s", label="Idle", value=data["idle_s"], unit="s", level="measured"),
            Figure(
                name="attributed", label="Busy time in scopes", value=data["attributed"], unit="%", level="measured"
            ),
            Figure(
                name="roofline",
                label="Of the roofline",
                value=data["roofline"],
                unit="%",
                level="measured",
                formula=data["bound"] or "no roofs are known",
            ),
        ),
        charts=(
            Bars(
                title="Where a step goes",
                unit="s",
                bars=(Bar(name="step", parts=tuple((what, float(data[name])) for what, name in parts.items())),),
            ),
            Bars(
                title="The longest rows",
                about="Measured seconds of a step, by scope and phase.",
                unit="s",
                bars=tuple(
                    Bar(
                        name=f"{row['scope']} {row['phase']}",
                        parts=(
                            ("not waiting", max(0.0, row["measured"]["time_s"] - row["measured"]["exposed_s"])),
                            ("waiting for collectives", min(row["measured"]["exposed_s"], row["measured"]["time_s"])),
                        ),
                    )
                    for row in sorted(rows, key=lambda row: -row["measured"]["time_s"])[:12]
                ),
            ),
            _columns(data["rows"]),
            *_advice(data["advice"]),
            *_over_time(data["memory"]),
        ),
        notes=tuple(f"{note[0].upper()}{note[1:]}." for note in data["notes"]),
        sources=(f"Written by rooftop {data['rooftop_version']}.",),
    )


def _advice(found: list[Mapping[str, Any]]) -> tuple[Table, ...]:
    """What to try; what helps against several things is said once."""
    whats = list(dict.fromkeys(each["what"] for each in found))
    rows: list[tuple[str, ...]] = []
    for each in sorted(found, key=lambda each: whats.index(each["what"])):
        again = bool(rows) and each["what"] in (row[0] for row in rows)
        rows.append(("" if again else each["what"], each["evidence"], each["source"].rpartition("/")[2]))
    return (Table(title="What to try", columns=("what", "since", "from"), rows=tuple(rows)),) if rows else ()


def _columns(rows: list[Mapping[str, Any]]) -> Table:
    def seconds(column: Mapping[str, Any] | None, name: str) -> str:
        return "" if column is None else format_seconds(column[name])

    return Table(
        title="Measured beside compiled beside planned",
        columns=("scope", "phase", "measured", "exposed", "planned", "compiled FLOPs", "compiled HBM"),
        rows=tuple(
            (
                row["scope"],
                row["phase"],
                seconds(row["measured"], "time_s"),
                seconds(row["measured"], "exposed_s"),
                seconds(row["planned"], "time_s"),
                "" if row["compiled"] is None else format_count(row["compiled"]["flops"]),
                "" if row["compiled"] is None else format_bytes(row["compiled"]["hbm_bytes"]),
            )
            for row in rows
        ),
    )


def _over_time(memory: list[Mapping[str, Any]]) -> tuple[Chart, ...]:
    series = tuple(
        Series(
            name=f"{each['host']} {each['allocator']}",
            points=tuple((float(at), float(held)) for at, held in each["points"]),
        )
        for each in memory
        if each["points"]
    )
    if not series:
        return ()
    return (
        Lines(
            title="Memory over time",
            x=Axis(label="time", unit="s"),
            y=Axis(label="held", unit="B"),
            series=series,
        ),
    )


def simulation(data: Mapping[str, Any]) -> Answer:
    """A simulation of requests: latencies."""
    names = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "Between tokens", "e2e_s": "End to end"}
    points = [name for name in ("p50", "p90", "p95", "p99") if all(name in (data[each] or {}) for each in names)]
    return Answer(
        verdict=f"{data['requests']['finished']:,} of {data['requests']['offered']:,} requests finished, "
        f"{format_count(data['tokens']['generated_per_second'], 'tok/s')}.",
        charts=(
            Table(
                title="Latencies",
                columns=("latency", *points),
                rows=tuple(
                    (label, *(format_seconds(data[name][point]) for point in points)) for name, label in names.items()
                ),
            ),
        ),
        sources=(f"Written by rooftop {data['rooftop_version']}.",),
    )
