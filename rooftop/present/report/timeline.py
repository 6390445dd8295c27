"""A timeline as SVG: a row for each lane, a bar for each span. A script of the page zooms and moves it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.core.timelines import COMPUTE, MORE, TRANSFER, WAIT, Lane, Lanes, TimeSpan
from rooftop.present.report.html import Content, Html, details, table, tag
from rooftop.present.report.plots import WIDTH, anchor, drawing, figure, linear_ticks, mark

_LEFT, _TOP, _ROW, _BAR = 150, 10, 24, 18
#: Bars of one timeline at most: shorter ones that stand beside each other become one.
MOST_BARS = 3000
_LANES = 40
_COLOURS = {COMPUTE: 0, WAIT: 1, TRANSFER: 2, MORE: 3}
_WORDS = {COMPUTE: "computes", WAIT: "waits", TRANSFER: "under way"}


def timeline(identifier: str, drawn: Lanes) -> Html:
    """A timeline with its table: what each lane spends on what."""
    lanes = drawn.lanes[:_LANES]
    merged = _merged(lanes, drawn.total_s)
    height = _TOP + _ROW * len(lanes) + 34
    scale = (WIDTH - _LEFT - 10) / drawn.total_s if drawn.total_s else 0.0
    bars: list[Content] = []
    for at, lane in enumerate(merged):
        y = _TOP + _ROW * at
        for each in lane.spans:
            shape = tag(
                "rect", x=round(_LEFT + each.start_s * scale, 2), y=y, width=round(max(each.seconds * scale, 0.4), 2),
                height=_BAR, class_=f"fill s{_COLOURS[each.sort]} {each.sort}",
                data_s=f"{each.start_s:.9g}", data_e=f"{each.end_s:.9g}",
            )  # fmt: skip
            bars.append(mark(shape, _told(each)))
    ticks = [
        tag("g", tag("line", x1=x, x2=x, y1=_TOP, y2=height - 28, class_="grid"),
            tag("text", format_seconds(at_s) if at_s else "0", x=x, y=height - 10, text_anchor=anchor(x)))
        for at_s in linear_ticks(0.0, drawn.total_s)
        for x in (round(_LEFT + at_s * scale, 2),)
    ]  # fmt: skip
    labels = [
        tag("text", _short(lane.name), tag("title", lane.name), x=_LEFT - 8, y=_TOP + _ROW * at + 13, text_anchor="end")
        for at, lane in enumerate(lanes)
    ]
    inner = tag(
        "svg", tag("g", bars, class_="bars"), x=0, y=0, width=WIDTH, height=height, viewbox=f"0 0 {WIDTH} {height}",
    )  # fmt: skip
    cover = tag("rect", x=0, y=0, width=_LEFT - 4, height=height, class_="cover")
    about = "; ".join(part for part in (drawn.note, _left_out(drawn)) if part) or f"{drawn.source}, one step"
    parts: list[Content] = [tag("g", ticks, class_="ticks"), inner, cover, *labels]
    svg = drawing(
        identifier, drawn.title, about, parts, height, class_="plot timeline",
        data_total=f"{drawn.total_s:.9g}", data_left=_LEFT,
    )  # fmt: skip
    used = {each.sort for lane in lanes for each in lane.spans}
    return figure(
        identifier,
        drawn.title,
        about,
        svg,
        legend=[(_words(sort, drawn), colour, False) for sort, colour in _COLOURS.items() if sort in used],
        controls=_controls(identifier),
        under=details(f"Table: {drawn.title}", table(
            ["lane", "what...", "times", "seconds in all"], _sums(lanes), caption=drawn.title, text=2)),
    )  # fmt: skip


def _words(sort: str, drawn: Lanes) -> str:
    more = "a loop or a call" if drawn.source == "measured" else "not drawn one by one"
    return _WORDS.get(sort, more)


def _controls(identifier: str) -> Html:
    """Buttons that the script of the page listens to; without it they are not shown."""
    buttons = [
        tag("button", sign, type="button", data_zoom=how, aria_label=label, aria_controls=identifier)
        for how, sign, label in (
            ("in", "+", "zoom in"), ("out", "\N{MINUS SIGN}", "zoom out"), ("left", "\N{LEFTWARDS ARROW}", "earlier"),
            ("right", "\N{RIGHTWARDS ARROW}", "later"), ("all", "all", "the whole step"),
        )
    ]  # fmt: skip
    return tag("div", buttons, class_="controls", hidden=True)


def _merged(lanes: Sequence[Lane], total_s: float) -> list[Lane]:
    """The lanes with the shortest spans put together, as many as have to be."""
    least = 0.0
    found = list(lanes)
    while sum(len(lane.spans) for lane in found) > MOST_BARS:
        least = max(2 * least, total_s / 20_000)
        found = [replace(lane, spans=tuple(_joined(lane.spans, least))) for lane in lanes]
    return found


def _joined(spans: Sequence[TimeSpan], least: float) -> list[TimeSpan]:
    """Spans of one sort, each shorter than ``least`` and nearer than that to the one before, as one."""
    found: list[TimeSpan] = []
    counts: list[int] = []
    for each in spans:
        last = found[-1] if found else None
        near = last is not None and last.sort == each.sort and each.start_s - last.end_s < least
        if last is not None and near and each.seconds < least and (counts[-1] > 1 or last.seconds < least):
            counts[-1] += 1
            found[-1] = replace(
                last,
                end_s=max(last.end_s, each.end_s),
                name=f"{counts[-1]} short ones",
                scope="",
                phase="",
                source="",
                op="",
                details={},
            )
        else:
            found.append(each)
            counts.append(1)
    return found


def _told(each: TimeSpan) -> str:
    where = " ".join(part for part in (each.scope, each.phase) if part)
    lines = [each.name, f"{format_seconds(each.seconds)}, from {format_seconds(each.start_s)}"]
    lines += [where if where != each.name else "", each.source.rpartition("/")[2]]
    for name, value in each.details.items():
        if value != "":
            lines.append(f"{name}: {format_bytes(float(value)) if name == 'bytes' else value}")
    return "\n".join(line for line in lines if line)


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"{name[:21]}\N{HORIZONTAL ELLIPSIS}"


def _left_out(drawn: Lanes) -> str:
    left = len(drawn.lanes) - _LANES
    return f"{left} more lanes are not drawn" if left > 0 else ""


def _sums(lanes: Sequence[Lane], most: int = 60) -> list[list[str]]:
    """What the lanes spend most on."""
    sums: dict[tuple[str, str], list[float]] = {}
    for lane in lanes:
        for each in lane.spans:
            name = " ".join(part for part in (each.name, each.phase) if part)
            both = sums.setdefault((lane.name, name), [0, 0.0])
            both[0] += 1
            both[1] += each.seconds
    longest = sorted(sums.items(), key=lambda item: -item[1][1])[:most]
    return [[*key, f"{count:.0f}", format_seconds(seconds)] for key, (count, seconds) in longest]
