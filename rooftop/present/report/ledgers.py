"""The ledger of a page: each scope and phase as measured, compiled and planned, and its place on a roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.hardware import Slice
from rooftop.present.report.html import Content, Html, join, table, tag
from rooftop.present.report.plots import Axis, Point, Series, plot
from rooftop.roofline.rates import Rates

#: The three columns, in their order.
SIDES = ("measured", "compiled", "planned")


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One side of a row, per device and step; None: that side does not tell."""

    time_s: float | None = None
    exposed_s: float | None = None
    flops: float | None = None
    hbm_bytes: float | None = None
    at_peak_s: float | None = None

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of HBM."""
        return self.flops / self.hbm_bytes if self.flops and self.hbm_bytes else None


@dataclass(frozen=True, kw_only=True)
class LedgerLine:
    """A scope in a phase: its ``sides``, what its collectives move, the op and the line of source that take longest."""

    scope: str
    phase: str
    sides: Mapping[str, Figures]
    moves: tuple[str, ...] = ()
    slowest: str = ""
    source: str = ""
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Scope and phase."""
        return f"{self.scope} {self.phase}"


@dataclass(frozen=True, kw_only=True)
class Roof:
    """What a device can do: FLOP/s of its matrix unit, bytes/s of its HBM."""

    name: str
    flops_per_s: float
    hbm_bytes_per_s: float


def of_explained(data: Mapping[str, Any]) -> list[LedgerLine]:
    """The rows of ``rooftop explain --json``."""
    found = []
    for row in data["rows"]:
        mine, made, plan = row["measured"], row["compiled"], row["planned"]
        sides: dict[str, Figures] = {}
        if mine:
            rates = {name: mine[f"{name}_per_s"] for name in ("flops", "hbm_bytes")}
            amounts = {name: None if rate is None else rate * mine["time_s"] for name, rate in rates.items()}
            sides["measured"] = Figures(time_s=mine["time_s"], exposed_s=mine["exposed_s"], **amounts)
        if made:
            peak = max(made["bound_s"].values(), default=None)
            sides["compiled"] = Figures(flops=made["flops"], hbm_bytes=made["hbm_bytes"], at_peak_s=peak)
        if plan:
            sides["planned"] = Figures(**plan)
        found.append(
            LedgerLine(
                scope=row["scope"], phase=row["phase"], sides=sides, moves=tuple(map(_move, row["collectives"])),
                slowest=(mine or {}).get("slowest") or "", source=(mine or {}).get("source") or "",
            )
        )  # fmt: skip
    return found


def of_ledgers(
    sides: Mapping[str, Iterable[Mapping[str, Any]]], notes: Mapping[Any, str] | None = None
) -> list[LedgerLine]:
    """Rows of ledgers in JSON, joined on scope and phase in the order of the first; ``notes`` by scope and phase."""
    rows: dict[tuple[str, str], dict[str, list[float]]] = {}
    moves: dict[tuple[str, str], list[str]] = {}
    for side, ledger in sides.items():
        for row in ledger:
            key, count = (row["scope"], row["phase"]), row["count"]
            sums = rows.setdefault(key, {}).setdefault(side, [0.0] * 5)
            shown = sum(each["exposed_s"] for each in row["collectives"])
            peak = max(row["time_s"].values(), default=0.0)
            flops = sum(row["flops"].values()) + row["kernel_flops"]
            for at, value in enumerate((row["expected_s"], shown, flops, row["hbm_bytes"], peak)):
                sums[at] += count * value
            moves.setdefault(key, []).extend(
                f"{each['kind']} over {','.join(each['axes'])}: {format_bytes(count * each['bytes'])} {side}"
                for each in row["collectives"]
            )
    return [
        LedgerLine(
            scope=key[0],
            phase=key[1],
            sides={
                side: Figures(time_s=s[0], exposed_s=s[1], flops=s[2], hbm_bytes=s[3], at_peak_s=s[4])
                for side, s in found.items()
            },
            moves=tuple(moves[key]),
            notes=(notes[key],) if notes and key in notes else (),
        )
        for key, found in rows.items()
    ]


def ledger(lines: Sequence[LedgerLine], title: str) -> Html:
    """The table: a group of columns for each side that has anything."""
    sides = [side for side in SIDES if any(side in line.sides for line in lines)]
    columns, cells = ["scope...", "phase..."], []
    kinds = {side: _columns(side, lines) for side in sides}
    for side in sides:
        columns += [f"{side}: {name}" for name in kinds[side]]
    extras = {"collectives": "moves", "slowest op": "slowest", "from": "source", "": "notes"}
    told = [name for name, has in extras.items() if any(getattr(line, has) for line in lines)]
    most = max((each.time_s or 0.0 for line in lines for each in line.sides.values()), default=0.0)
    for line in lines:
        row: list[Content] = [line.scope, line.phase]
        for side in sides:
            found = line.sides.get(side)
            row += [_cell(found, name, most) for name in kinds[side]]
        extra = {
            "collectives": _list(line.moves), "slowest op": line.slowest, "from": line.source.rpartition("/")[2],
            "": "; ".join(line.notes),
        }  # fmt: skip
        cells.append(row + [extra[name] for name in told])
    return table([*columns, *(f"{name}..." for name in told)], cells, caption=title, text=2)


def roofline(
    identifier: str,
    lines: Sequence[LedgerLine],
    roofs: Sequence[Roof],
    title: str = "Roofline",
    sides: Sequence[str] = SIDES,
) -> Html:
    """Every row with FLOPs and HBM bytes as a point, those with HBM bytes alone on a plot of their own."""
    every = [(side, line.name, found) for line in lines for side, found in line.sides.items() if side in sides]
    timed = [each for each in every if each[2].time_s]
    computes = [(side, name, found) for side, name, found in timed if found.intensity]
    copies = [(side, name, found) for side, name, found in timed if found.hbm_bytes and not found.flops]
    rest = len(timed) - len(computes) - len(copies)
    parts = []
    if computes:
        parts.append(_roofs(identifier, title, computes, roofs, sides))
    if copies:
        parts.append(_copies(f"{identifier}-hbm", f"{title}: rows without matmuls", copies, roofs, sides))
    if rest:
        parts.append(
            tag("p", f"{rest} rows have no HBM traffic that is known, and no place on a roofline.", class_="quiet")
        )
    return join(parts or tag("p", f"{title}: no row has a time, FLOPs and HBM bytes.", class_="quiet"))


_Placed = Sequence[tuple[str, str, Figures]]


def _placed(
    rows: _Placed, roofs: Sequence[Roof], sides: Sequence[str], at: Callable[[Figures], tuple[float, float]]
) -> list[Series]:
    """A point for each row where ``at`` places it, a series for each side."""
    points: dict[str, list[Point]] = {side: [] for side in sides}
    for side, name, each in rows:
        x, y = at(each)
        points[side].append(Point(x=x, y=y, name=name, figures=_figures(each, roofs)))
    return [Series(name=side, points=tuple(found)) for side, found in points.items()]


def _roofs(identifier: str, title: str, rows: _Placed, roofs: Sequence[Roof], sides: Sequence[str]) -> Html:
    series = _placed(
        rows, roofs, sides, lambda each: (each.intensity or 0.0, (each.flops or 0.0) / (each.time_s or 1.0))
    )
    every = [point.x for each in series for point in each.points]
    for roof in roofs:
        knee = roof.flops_per_s / roof.hbm_bytes_per_s
        ends = (min(*every, knee) / 1.3, knee, max(*every, knee) * 1.3)
        path = tuple(Point(x=x, y=min(roof.flops_per_s, x * roof.hbm_bytes_per_s), name="") for x in ends)
        series.append(Series(name=roof.name, points=path, line=True, marks=False, dashed=True))
    return plot(
        identifier,
        title,
        "FLOP/s over FLOPs per byte of HBM, per device, both axes logarithmic; under the slope HBM binds, under the "
        "level the matrix unit; a point far below its roof waits for something else",
        Axis(label="FLOPs per byte of HBM", text=lambda value: f"{value:g}", log=True),
        Axis(label="FLOP/s", text=format_count, log=True),
        series,
    )


def _copies(identifier: str, title: str, rows: _Placed, roofs: Sequence[Roof], sides: Sequence[str]) -> Html:
    series = _placed(
        rows, roofs, sides, lambda each: (each.hbm_bytes or 0.0, (each.hbm_bytes or 0.0) / (each.time_s or 1.0))
    )
    every = [point.x for each in series for point in each.points]
    for roof in roofs:
        ends = tuple(Point(x=x, y=roof.hbm_bytes_per_s, name="") for x in (min(every) / 1.3, max(every) * 1.3))
        series.append(Series(name=f"HBM of {roof.name}", points=ends, line=True, marks=False, dashed=True))
    return plot(
        identifier,
        title,
        "Bytes of HBM a second over bytes of HBM, both axes logarithmic; the level is what HBM gives at its peak",
        Axis(label="bytes of HBM", text=format_bytes, log=True),
        Axis(label="bytes/s", text=format_bytes, log=True),
        series,
    )


def _figures(found: Figures, roofs: Sequence[Roof]) -> tuple[tuple[str, str], ...]:
    """What a point tells."""
    seconds, told = found.time_s or 0.0, []
    told.append(("time", format_seconds(seconds)))
    if found.flops:
        told += [("FLOPs", format_count(found.flops)), ("FLOP/s", format_count(found.flops / seconds))]
    if found.hbm_bytes:
        told += [("HBM", format_bytes(found.hbm_bytes)), ("HBM/s", f"{format_bytes(found.hbm_bytes / seconds)}/s")]
    if found.intensity:
        told.append(("FLOPs per byte", f"{found.intensity:.3g}"))
    if found.exposed_s:
        told.append(("exposed", format_seconds(found.exposed_s)))
    if roofs:
        bound = max((found.flops or 0.0) / roofs[0].flops_per_s, (found.hbm_bytes or 0.0) / roofs[0].hbm_bytes_per_s)
        if bound:
            told.append(("of its roof", f"{bound / seconds:.1%}"))
    return tuple(told)


def _columns(side: str, lines: Sequence[LedgerLine]) -> list[str]:
    """The figures that a side tells of any row."""
    has = {
        "time": "time_s", "exposed": "exposed_s", "at peak": "at_peak_s", "FLOPs": "flops", "HBM": "hbm_bytes",
    }  # fmt: skip
    mine = [line.sides[side] for line in lines if side in line.sides]
    return [name for name, key in has.items() if any(getattr(each, key) for each in mine)]


def _cell(found: Figures | None, name: str, most: float) -> Content:
    if found is None:
        return "\N{EN DASH}"
    if name == "time" and found.time_s is not None:
        share = 100 * found.time_s / most if most else 0.0
        return tag("span", format_seconds(found.time_s), class_="bar", style=f"--share:{share:.1f}%")
    if name in ("exposed", "at peak"):
        value = found.exposed_s if name == "exposed" else found.at_peak_s
        return format_seconds(value) if value else ""
    value = found.flops if name == "FLOPs" else found.hbm_bytes
    return (format_count if name == "FLOPs" else format_bytes)(value) if value else ""


def _list(moves: Sequence[str]) -> Content:
    return tag("span", "; ".join(moves), class_="moves") if moves else ""


def _move(each: Mapping[str, Any]) -> str:
    told = [
        f"{format_seconds(each['exposed_s'])} exposed of {format_seconds(each['in_flight_s'])}"
        if each["in_flight_s"] is not None
        else "not measured",
        f"{format_bytes(each['compiled_bytes'])} compiled" if each["compiled_bytes"] is not None else "not compiled",
        f"{format_bytes(each['planned_bytes'])} planned" if each["planned_bytes"] is not None else "",
    ]
    return f"{each['kind']} over {','.join(each['axes'])}: {', '.join(one for one in told if one)}"


def roofs_of_slice(name: str, whose: str = "") -> list[Roof]:
    """The roofs of one device of a slice, for matmuls in bf16."""
    rates = Rates.of(Slice.parse(name).chip)
    said = f"{name.partition(':')[0]}, bf16" + (f" ({whose})" if whose else "")
    return [Roof(name=said, flops_per_s=rates.flops_per_s["bf16"], hbm_bytes_per_s=rates.hbm_bytes_per_s)]
