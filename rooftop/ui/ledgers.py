"""A ledger as charts: where the time goes by scope and phase, the rows in order, and each under its roofline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rooftop.core.ledger import Collective, Ledger, Row
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.hardware import Slice
from rooftop.roofline.matmul import attainable
from rooftop.roofline.rates import Rates
from rooftop.ui.answers import Axis, Bar, Bars, Chart, Lines, Series, Spans, Table

#: Scopes that bars show, the longest first.
_SHOWN = 14


def ledger_charts(ledger: Ledger, slice_: Slice | None, dtype: str = "bf16") -> tuple[Chart, ...]:
    """Bars, timeline, roofline (on a slice that is known) and table of a scalar ledger."""
    charts: list[Chart] = [_bars(ledger), _order(ledger)]
    if slice_ is not None and (roofline := rows_roofline(_points(ledger), slice_, dtype)):
        charts.insert(1, roofline)
    return (*charts, ledger_table(ledger))


def _seconds(row: Row) -> float:
    return float(row.count * row.expected_s)


def _bars(ledger: Ledger) -> Bars:
    scopes: dict[str, dict[str, float]] = {}
    for row in ledger:
        parts = scopes.setdefault(row.scope, {})
        parts[row.phase] = parts.get(row.phase, 0.0) + _seconds(row)
    longest = sorted(scopes, key=lambda scope: -sum(scopes[scope].values()))
    return Bars(
        title="Where the step goes",
        about="Expected seconds by scope and phase, counts applied."
        + (f" The {_SHOWN} longest of {len(longest)}." if len(longest) > _SHOWN else ""),
        unit="s",
        bars=tuple(Bar(name=scope, parts=tuple(scopes[scope].items())) for scope in longest[:_SHOWN]),
    )


def _order(ledger: Ledger) -> Spans:
    """The rows of each phase one after another, in the order of the ledger, phases in the order of their first row."""
    scopes = list(dict.fromkeys(row.scope.rsplit("/", 1)[0] for row in ledger))
    lanes: dict[str, list[tuple[float, float, int, str]]] = {}
    for row in ledger:
        spans = lanes.setdefault(row.phase, [])
        start = spans[-1][1] if spans else 0.0
        if _seconds(row) > 0:
            spans.append((start, start + _seconds(row), scopes.index(row.scope.rsplit("/", 1)[0]) % 8, row.scope))
    return Spans(
        title="Phase by phase",
        about="Rows in the ledger's order, all of their executions together: how long they take, not when they run.",
        unit="s",
        lanes=tuple((phase, tuple(spans)) for phase, spans in lanes.items() if spans),
        colours=tuple(scopes[:8]),
    )


def _points(ledger: Ledger) -> Iterable[tuple[str, float, float, float]]:
    for row in ledger:
        yield (
            f"{row.scope} {row.phase}",
            float(sum(row.flops.values())) + float(row.kernel_flops),
            float(row.hbm_bytes),
            float(row.expected_s),
        )


def rows_roofline(points: Iterable[tuple[str, float, float, float]], slice_: Slice, dtype: str) -> Lines | None:
    """Work (name, FLOPs, HBM bytes, seconds) under the roofs of one device; None if nothing computes."""
    rates = Rates.of(slice_.chip)
    peak = rates.flops_per_s.get(dtype, rates.flops_per_s["bf16"])
    bandwidth = rates.hbm_bytes_per_s
    known = [(name, flops / moved, flops / seconds) for name, flops, moved, seconds in points
             if flops and moved and seconds]  # fmt: skip
    if not known:
        return None
    ends = (min(0.5, *(x for _, x, _ in known)), peak / bandwidth, 4 * max(peak / bandwidth, *(x for _, x, _ in known)))
    return Lines(
        title="Rows under the roofline",
        about="Collectives that nothing hides count as time, so that rows which wait lie low.",
        x=Axis(label="FLOPs per byte of HBM", scale="log"),
        y=Axis(label="FLOP/s", unit="FLOP/s", scale="log"),
        series=(
            Series(
                name=f"roof of a {slice_.chip.name} device in {dtype}",
                points=tuple((x, float(attainable(x, peak, bandwidth))) for x in ends),
            ),
            Series(
                name="rows",
                points=tuple((x, y) for _, x, y in known),
                names=tuple(name for name, _, _ in known),
                style="dots",
            ),
        ),
    )


def ledger_table(ledger: Ledger) -> Table:
    """Every row, one execution on one device."""
    return Table(
        title="The ledger",
        about="Per device for one execution; the step has so many of each.",
        columns=("scope", "phase", "times", "FLOPs", "HBM", "collectives", "expected", "in all", "binds"),
        rows=tuple(
            (
                row.scope,
                row.phase,
                f"{row.count:g}",
                format_count(float(sum(row.flops.values())) + float(row.kernel_flops)),
                format_bytes(float(row.hbm_bytes)),
                ", ".join(map(_collective, row.collectives)),
                format_seconds(float(row.expected_s)),
                format_seconds(_seconds(row)),
                row.bound,
            )
            for row in ledger
        ),
    )


def _collective(each: Collective) -> str:
    return f"{each.kind} {','.join(each.axes)} {format_bytes(float(each.bytes))}"


def embedding_memory(memory: Mapping[str, Any]) -> Bars:
    """HBM of a device as a plan of embedding tables has it, each class alone, and in all."""
    names = ("tables", "slots", "sums", "forward_stack", "backward_stack", "inputs", "activations")
    # Only passes over samples have sums.
    held = {name: float(memory.get(name, 0.0)) for name in names}
    bars = [
        Bar(name=name.replace("_", " "), parts=(("held", size),))
        for name, size in held.items()
        if size or name != "sums"
    ]
    bars += [Bar(name=f"all, {mode}", parts=(("in all", float(needed)),)) for mode, needed in memory["total"].items()]
    return Bars(
        title="HBM of a device",
        about="The larger of the two stacks counts, and activations twice, for their gradients.",
        unit="B",
        bars=tuple(bars),
        limit=(float(memory["capacity"]), "there is"),
    )


def memory_bars(classes: Mapping[str, float], capacity: float, name: str = "a device") -> Bars:
    """What a device holds by class, against what there is."""
    return Bars(
        title="Memory of a device",
        unit="B",
        bars=(Bar(name=name, parts=tuple((each, float(size)) for each, size in classes.items() if size)),),
        limit=(float(capacity), "there is"),
    )
