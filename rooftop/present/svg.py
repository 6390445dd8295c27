"""Charts as SVG: points and lines over two axes, bars, timelines, arrays on a mesh.

Every mark has a title with its figures, which the script of a page shows to mouse, touch and keyboard. A colour has a
meaning: phases, resources, memory classes and sides of a ledger have the same one in every chart.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.core.timelines import COMPUTE, MORE, TRANSFER, WAIT, Lane, TimeSpan
from rooftop.present.document import (
    MOST_LANES,
    Bars,
    Blocks,
    Chart,
    ChartAxis,
    ChartSeries,
    Frames,
    Items,
    Lines,
    Spans,
    Table,
    Timeline,
    format_value,
)
from rooftop.present.markup import Content, Html, asset, join, tag

#: Colours of the palette; charts.css has the values.
PALETTE = 8
#: Meaning -> colour. Names without a meaning take the colours that their chart leaves, in order.
COLOURS = {
    # Phases, and the units that are busiest in them.
    "forward": 0, "backward": 2, "recompute": 4, "update": 3, "gradients": 6, "generate": 0, "prefill": 4,
    # Resources.
    "mxu": 0, "vpu": 5, "hbm": 4, "ici": 2, "dcn": 3, "pcie": 6, "host": 7, "multiply": 0,
    # Computing and waiting.
    "computing": 0, "compute": 0, "not waiting": 0, "busy": 0, "waiting for collectives": 1, "idle": 7,
    "between the ops of loops": 6, "matmuls at peak": 0, "the rest": 1, "busy beside compute": 0, "busy alone": 4,
    # What fills memory.
    "weights": 0, "scales": 6, "kv": 2, "activations": 1, "optimizer": 3, "workspace": 7,
    # Sides of a ledger.
    "measured": 0, "compiled": 1, "planned": 2, "this plan": 1, "alternatives": 0,
}  # fmt: skip
_EDGE_TOP, _EDGE_RIGHT, _EDGE_BOTTOM, _EDGE_LEFT = 20, 16, 42, 66
#: Characters a pixel at the size of the text of charts.
_CHARACTER = 6.3


def colours(names: Iterable[str]) -> dict[str, int]:
    """The colour of each name: its meaning's, else the next that no name of the chart has."""
    unique = list(dict.fromkeys(names))
    result = {name: COLOURS[name] for name in unique if name in COLOURS}
    free = [colour for colour in range(PALETTE) if colour not in result.values()] or list(range(PALETTE))
    rest = [name for name in unique if name not in result]
    return result | {name: free[at % len(free)] for at, name in enumerate(rest)}


def picture(chart: Chart, width: float, identifier: str) -> Html:
    """The legend and the drawing of a chart, ``width`` pixels wide. Empty for tables, lists and animations."""
    if isinstance(chart, Lines):
        return _lines(chart, width, identifier)
    if isinstance(chart, Bars):
        return _bars(chart, width, identifier)
    if isinstance(chart, Spans):
        return _spans(chart, width, identifier)
    if isinstance(chart, Blocks):
        return _blocks(chart, width, identifier)
    if isinstance(chart, Timeline):
        return _timeline(chart, width, identifier)
    return Html("")


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Parts of an SVG and its size; ``attributes`` are those that a script reads."""

    parts: Sequence[Content]
    width: float
    height: float
    class_: str = ""
    attributes: tuple[tuple[str, str], ...] = ()


def _drawing(chart: Chart, identifier: str, drawn: Drawing) -> Html:
    """An SVG with a title and a description, one stop of the keyboard; its arrow keys go from mark to mark."""
    return tag(
        "svg",
        tag("title", chart.title, id=f"{identifier}-title"),
        tag("desc", chart.about or chart.title, id=f"{identifier}-desc"),
        drawn.parts,
        viewbox=f"0 0 {drawn.width:.0f} {drawn.height:.0f}",
        role="group",
        tabindex="0",
        class_=f"plot {drawn.class_}".strip(),
        aria_labelledby=f"{identifier}-title {identifier}-desc",
        **dict(drawn.attributes),
    )


def mark(shape: Content | Iterable[Content], figures: str) -> Html:
    """A shape that says its figures."""
    return tag("g", shape, tag("title", figures), class_="mark", role="img")


def _legend(entries: Sequence[tuple[str, int, str]]) -> Html | None:
    """Names with their colour, each as a 'box', a 'line', a 'dashed' line or a 'dot'."""
    if not entries:
        return None
    keys = [
        tag(
            "li",
            tag(
                "svg",
                tag("line", class_=f"series {shape} s{colour}", x1=1, x2=19, y1=5, y2=5)
                if shape in ("line", "dashed")
                else tag("circle", class_=f"f{colour}", cx=10, cy=5, r=4)
                if shape == "dot"
                else tag("rect", class_=f"f{colour}", x=5, y=0, width=10, height=10, rx=2),
                viewbox="0 0 20 10",
                aria_hidden="true",
            ),
            name,
        )
        for name, colour, shape in entries
    ]
    return tag("ul", keys, class_="legend")


# ---- axes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChartScale:
    """An axis between two values, drawn from one coordinate to another."""

    axis: ChartAxis
    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, axis: ChartAxis, values: Iterable[float], begin: float, end: float) -> ChartScale:
        """The scale that has room for all ``values``."""
        log = axis.scale == "log"
        usable = [value for value in values if math.isfinite(value) and (not log or value > 0)] or [1.0]
        low, high = min(usable), max(usable)
        if log:
            low, high = (low / 2, high * 2) if low == high else (low, high)
            low, high = low / (high / low) ** 0.03, high * (high / low) ** 0.04
        else:
            low = min(0.0, low) if axis.zero else low
            high = low + 1.0 if high == low else high
            low, high = low if axis.zero else low - 0.06 * (high - low), high + 0.06 * (high - low)
        return cls(axis=axis, low=low, high=high, begin=begin, end=end)

    def at(self, value: float) -> float:
        """The coordinate of a value, those outside at the ends."""
        if self.axis.scale == "log":
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.begin + (self.end - self.begin) * min(max(share, 0.0), 1.0), 2)

    def ticks(self, most: int) -> list[float]:
        """Round values of the axis."""
        if self.axis.scale == "log":
            return log_ticks(self.low, self.high, most)
        return linear_ticks(self.low, self.high, most)


def linear_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers from ``low`` to ``high``, at most ``most`` steps apart."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / most))
    step = next(power * digit for digit in (1, 2, 5, 10) if (high - low) / (power * digit) <= most)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float, most: int = 10) -> list[float]:
    """Round numbers between the ends of a logarithmic axis, at most ``most``."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    finest: tuple[tuple[float, ...], int] = ((1, 2, 5), 1)
    coarser = (((1.0,), every) for every in range(1, last - first + 2))
    for digits, every in (finest, ((1, 3), 1), *coarser):
        powers = range(first, last + 1, every)
        ticks = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(ticks) <= most:
            # Between neighbours of 1, 2 and 5 there is none: the axis is all but linear.
            return ticks if len(ticks) > 1 else linear_ticks(low, high, most)
    return [low, high]


def _tick_text(value: float, axis: ChartAxis) -> str:
    if value == 0:
        return "0"
    if axis.unit in ("s", "B"):
        return format_value(value, axis.unit)
    if axis.unit == "%":
        return f"{value:.3g}" if abs(value) > 1.5 else f"{value:.0%}"
    small = abs(value) < 1e4 and axis.unit == ""
    return f"{value:.4g}" if small else format_value(value, "tok/s").removesuffix("tok/s").strip()


def axis_label(axis: ChartAxis) -> str:
    """The label of an axis, with its unit where ticks have no room for it."""
    known = not axis.unit or axis.unit in ("s", "B", "%") or axis.unit in axis.label
    label = axis.label if known else f"{axis.label}, {axis.unit}"
    return f"{label}, logarithmic" if axis.scale == "log" else label


# ---- lines ----------------------------------------------------------------------------------------------------------


def _lines(chart: Lines, width: float, identifier: str) -> Html:
    shown = [series for series in chart.series if series.points]
    palette = colours(series.name for series in shown)
    shapes = {"line": "line", "dashed": "dashed", "marked": "line"}
    legend = [(series.name, palette[series.name], shapes.get(series.style, "dot")) for series in shown]
    return join(_legend(legend), _drawing(chart, identifier, draw_lines(chart, width)))


def draw_lines(chart: Lines, width: float, *, named: bool = False) -> Drawing:
    """Series over two axes; where they are ``named``, points have their names next to them if there is room."""
    shown = [series for series in chart.series if series.points]
    height = round(min(380.0, max(230.0, width * 0.5)))
    left, right, top, bottom = _EDGE_LEFT, width - _EDGE_RIGHT, _EDGE_TOP, height - _EDGE_BOTTOM
    across = ChartScale.of(chart.x, [x for series in shown for x, _ in series.points], left, right)
    up = ChartScale.of(chart.y, [y for series in shown for _, y in series.points], bottom, top)
    parts: list[Content] = []
    for tick in up.ticks(7):
        y = up.at(tick)
        parts.append(tag("line", class_="grid", x1=left, x2=right, y1=y, y2=y))
        parts.append(tag("text", _tick_text(tick, chart.y), x=left - 7, y=y + 4, text_anchor="end"))
    for tick in across.ticks(max(3, int((right - left) / 66))):
        x = across.at(tick)
        parts.append(tag("line", class_="grid", x1=x, x2=x, y1=top, y2=bottom))
        anchor = "end" if x > width - 30 else "middle"
        parts.append(tag("text", _tick_text(tick, chart.x), x=x, y=bottom + 16, text_anchor=anchor))
    parts += [
        tag("line", class_="base", x1=left, x2=right, y1=bottom, y2=bottom),
        tag("text", axis_label(chart.x), x=(left + right) / 2, y=height - 5, text_anchor="middle"),
        tag("text", axis_label(chart.y), x=3, y=11),
    ]
    for value, label in chart.marks:
        if across.low <= value <= across.high:
            x, late = across.at(value), across.at(value) > width * 0.72
            parts.append(tag("line", class_="markline", x1=x, x2=x, y1=top, y2=bottom))
            anchor = "end" if late else "start"
            parts.append(tag("text", label, x=x + (-5 if late else 5), y=bottom - 7, text_anchor=anchor))
    palette = colours(series.name for series in shown)
    # The chosen point is drawn last, on top of all others.
    for series in sorted(shown, key=lambda series: series.style == "point"):
        parts += _series(chart, series, palette[series.name], across, up)
    if named:
        parts += _names(shown, across, up)
    return Drawing(parts=parts, width=width, height=height)


#: A name next to a point keeps this far from every other, in pixels across and down.
_NAME_ROOM = 22, 12


def _names(shown: Sequence[ChartSeries], across: ChartScale, up: ChartScale) -> Iterator[Html]:
    """Names of points below them and to their right, each where it is clear of other names and of all points."""
    dots = [(across.at(x), up.at(y)) for series in shown for x, y in series.points]
    placed: list[tuple[float, float]] = []
    for series in shown:
        for (px, py), name in zip(series.points, series.names, strict=False):
            short = name.rpartition(" ")[2]
            x, y = across.at(px) + 5, up.at(py) + 11
            apart = all(abs(x - u) > _NAME_ROOM[0] or abs(y - v) > _NAME_ROOM[1] for u, v in placed)
            if apart and not any(x - 3 < u < x + 6 * len(short) + 3 and y - 10 < v < y + 3 for u, v in dots):
                placed.append((x, y))
                yield tag("text", short, x=x, y=y)


def lines_file(chart: Lines, title: str, note: str = "") -> str:
    """An SVG file of a chart, for light and dark pages: title, legend, and the names of points."""
    width, room, above = 660.0, 200.0, 40.0
    drawn = draw_lines(chart, width, named=True)
    series = [curve for curve in chart.series if curve.points]
    palette = colours(curve.name for curve in series)
    legend: list[Content] = []
    for at, item in enumerate(series):
        y = above + 20 + 20 * at
        legend.append(tag("line", class_=f"series s{palette[item.name]}", x1=width + 8, x2=width + 28, y1=y, y2=y))
        legend.append(tag("text", item.name, x=width + 34, y=y + 4))
    if note:
        legend.append(tag("text", note, x=width + 8, y=above + 30 + 20 * len(series)))
    height = drawn.height + above
    svg = tag(
        "svg", tag("style", Html(_standalone())), tag("rect", class_="paper", width=width + room, height=height),
        tag("text", title, class_="strong", x=_EDGE_LEFT, y=26),
        tag("g", drawn.parts, transform=f"translate(0 {above:g})"), legend,
        xmlns="http://www.w3.org/2000/svg", viewbox=f"0 0 {width + room:g} {height:g}", width=width + room,
        height=height, class_="plot",
    )  # fmt: skip
    return f"{svg}\n"


def _standalone() -> str:
    """The style of charts for a file of its own: colours by the scheme of the page that shows it."""
    style = asset("charts.css")
    pairs = re.findall(r"--([a-z0-9-]+): light-dark\((#[0-9a-f]+), (#[0-9a-f]+)\)", style)
    light, dark = ("; ".join(f"--{name}: {value}" for name, *both in pairs for value in [both[at]]) for at in (0, 1))
    rules = "\n".join(line for line in style.splitlines() if re.match(r"\.(plot [a-z.]|series|[sf]\d)", line))
    fonts = "--sans: system-ui, sans-serif"
    return (
        f"svg {{ {light}; {fonts} }} @media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n"
        f".paper {{ fill: var(--panel) }}\n{rules}\n"
    )


def _series(chart: Lines, series: ChartSeries, colour: int, across: ChartScale, up: ChartScale) -> Iterator[Html]:
    places = [(across.at(x), up.at(y)) for x, y in series.points]
    if series.style in ("line", "dashed", "marked"):
        path = " ".join(f"{x:g},{y:g}" for x, y in places)
        yield tag("polyline", points=path, class_=f"series {series.style} s{colour}")
    radius = {"dots": 4.0, "marked": 3.0, "point": 7.0}.get(series.style, 5.0)
    class_ = {"dots": "dot", "marked": "dot", "point": "halo"}.get(series.style, "spot")
    for at, ((x, y), point) in enumerate(zip(places, series.points, strict=True)):
        yield mark(
            tag("circle", cx=x, cy=y, r=radius, class_=f"{class_} f{colour}"), point_text(chart, series, at, point)
        )


def point_text(chart: Lines, series: ChartSeries, at: int, point: tuple[float, float]) -> str:
    """The figures of a point."""
    name = f"{series.name}: {series.names[at]}" if at < len(series.names) and series.names[at] else series.name
    if at < len(series.notes):
        return f"{name}\n{series.notes[at]}"
    return f"{name}\n{format_value(point[1], chart.y.unit)} at {format_value(point[0], chart.x.unit)}"


# ---- boxes ----------------------------------------------------------------------------------------------------------


def _cut(text: str, most: float) -> str:
    return text if len(text) <= most else f"{text[: max(1, int(most) - 1)]}\N{HORIZONTAL ELLIPSIS}"


def _bars(chart: Bars, width: float, identifier: str) -> Html:
    """Bars. Names are next to many bars, and above a few."""
    palette = colours(part for bar in chart.bars for part, value in bar.parts if value > 0)
    sums = [sum(value for _, value in bar.parts) for bar in chart.bars]
    most = max(*sums, chart.limit[0] if chart.limit else 0.0, 1e-300) if sums else 1.0
    after = len(chart.bars) > 6
    longest = max((len(bar.name) for bar in chart.bars), default=0)
    left = min(width * 0.42, 9 + _CHARACTER * longest) if after else 0.0
    room, row, low = width - left - 80, 23 if after else 40, 3 if after else 17
    parts: list[Content] = []
    for at, (bar, total) in enumerate(zip(chart.bars, sums, strict=True)):
        y, x = at * row, left
        label = _cut(bar.name, left / _CHARACTER) if after else bar.name
        parts.append(tag("text", label, tag("title", bar.name), class_="ink", x=0, y=y + (14 if after else 12)))
        for part, value in bar.parts:
            wide = room * value / most
            if wide > 0:
                shape = tag(
                    "rect", class_=f"f{palette[part]}", x=round(x, 2), y=y + low,
                    width=round(max(wide - 1, 0.6), 2), height=13, rx=2,
                )  # fmt: skip
                parts.append(mark(shape, f"{bar.name}: {part}\n{format_value(value, chart.unit)}"))
            x += max(wide, 0.0)
        text = bar.note or format_value(total, chart.unit)
        parts.append(tag("text", text, class_="strong", x=round(x + 6, 1), y=y + low + 11))
    height = len(chart.bars) * row + (22 if chart.limit else 6)
    if chart.limit:
        value, label = chart.limit
        x, bottom = left + room * value / most, len(chart.bars) * row
        anchor = "end" if x > width * 0.6 else "middle" if x > width * 0.2 else "start"
        parts.append(tag("line", class_="markline", x1=x, x2=x, y1=14, y2=bottom))
        parts.append(tag("text", f"{label} {format_value(value, chart.unit)}", x=x, y=bottom + 14, text_anchor=anchor))
    legend = [(name, colour, "box") for name, colour in palette.items()] if len(palette) > 1 else []
    return join(_legend(legend), _drawing(chart, identifier, Drawing(parts=parts, width=width, height=height)))


def _spans(chart: Spans, width: float, identifier: str) -> Html:
    longest = max((len(name) for name, _ in chart.lanes), default=0)
    left = min(width * 0.34, max(30.0, longest * 6.4 + 12))
    end = max([span[1] for _, spans in chart.lanes for span in spans] + [1e-300])
    row = 22 if len(chart.lanes) > 10 else 28
    height = len(chart.lanes) * row + 24
    scale = (width - left - 2) / end
    parts: list[Content] = []
    palette = colours(chart.colours)
    for lane, (name, spans) in enumerate(chart.lanes):
        y = lane * row
        parts += [
            tag(
                "text", _cut(name, (left - 8) / 6), tag("title", name), class_="ink", x=left - 8, y=y + row / 2 + 2,
                text_anchor="end",
            ),
            tag("rect", class_="empty", x=left, y=y + 2, width=width - left - 2, height=row - 5, rx=2),
        ]  # fmt: skip
        for begins, ends, colour, label in spans:
            x, wide = left + begins * scale, (ends - begins) * scale
            meaning = chart.colours[colour] if colour < len(chart.colours) else ""
            shape: list[Content] = [
                tag(
                    "rect",
                    class_=f"f{palette.get(meaning, colour % PALETTE)}",
                    x=round(x, 2),
                    y=y + 2,
                    width=round(max(wide - (1 if wide > 3 else 0), 0.5), 2),
                    height=row - 5,
                    rx=2 if wide > 6 else 0,
                )
            ]  # fmt: skip
            if wide > len(label) * 6.5 + 3:
                shape.append(tag("text", label, class_="on", x=x + wide / 2, y=y + row / 2 + 3, text_anchor="middle"))
            first, last = format_value(begins, chart.unit), format_value(ends, chart.unit)
            parts.append(mark(shape, f"{name}: {span_name(meaning, label)}\n{first} to {last}"))
    for tick in linear_ticks(0, end, max(2, int((width - left) / 110))):
        x = left + tick * scale
        anchor = "start" if tick == 0 else "end" if x > width - 30 else "middle"
        parts.append(tag("line", class_="base", x1=x, x2=x, y1=height - 22, y2=height - 18))
        parts.append(tag("text", _tick_text(tick, ChartAxis("", chart.unit)), x=x, y=height - 5,
                         text_anchor=anchor))  # fmt: skip
    used = {span[2] for _, spans in chart.lanes for span in spans}
    legend = [(name, palette[name], "box") for at, name in enumerate(chart.colours) if at in used]
    return join(_legend(legend), _drawing(chart, identifier, Drawing(parts=parts, width=width, height=height)))


def span_name(meaning: str, label: str) -> str:
    """The meaning of a span's colour and its label; once if they are equal."""
    return label if label == meaning else f"{meaning} {label}".strip()


def _blocks(chart: Blocks, width: float, identifier: str) -> Html:
    rows, across = chart.shape
    left, gap = 26, 5 if across > 4 else 9
    size = max(16.0, min(92.0, (width - left - gap * (across - 1)) / across))
    tall, text = size * 0.72, 16 if size > 46 else 0
    parts: list[Content] = []
    if chart.axes[1]:
        parts.append(tag("text", f"{chart.axes[1]} \N{RIGHTWARDS ARROW}", x=left, y=11))
    if chart.axes[0]:
        parts.append(tag("text", f"{chart.axes[0]} \N{DOWNWARDS ARROW}", x=0, y=32))
    for cell in chart.cells:
        x = left + cell.place[1] * (size + gap)
        y = 18 + cell.place[0] * (tall + text + gap)
        shape: list[Content] = [
            tag("rect", class_="empty", x=x, y=y, width=size, height=tall, rx=2),
            tag(
                "rect", class_=f"f{cell.block % PALETTE} t{cell.block // PALETTE % 4}", x=x + size * cell.columns[0],
                y=y + tall * cell.rows[0], width=size * (cell.columns[1] - cell.columns[0]),
                height=tall * (cell.rows[1] - cell.rows[0]), rx=1,
            ),
            tag("rect", class_="frame", x=x, y=y, width=size, height=tall, rx=2),
        ]  # fmt: skip
        if text:
            shape.append(tag("text", cell.device, x=x + size / 2, y=y + tall + 13, text_anchor="middle"))
        parts.append(mark(shape, f"{cell.device}: {cell.label}"))
    height = 18 + rows * (tall + text + gap)
    return _drawing(chart, identifier, Drawing(parts=parts, width=width, height=height))


# ---- the timeline of a step -----------------------------------------------------------------------------------------

#: Bars of one timeline at most: shorter neighbours become one.
MOST_BARS = 3000
_LANE_LEFT, _LANE_TOP, _LANE_ROW, _LANE_BAR = 150, 10, 24, 18
#: Sort of a span -> its colour and its words.
_SORTS = {COMPUTE: (0, "computes"), WAIT: (1, "waits"), TRANSFER: (2, "under way"), MORE: (7, "")}


def _timeline(chart: Timeline, width: float, identifier: str) -> Html:
    """A row for each lane, a bar for each span. A script of the page zooms and moves it."""
    drawn = chart.lanes
    lanes = drawn.lanes[:MOST_LANES]
    height = _LANE_TOP + _LANE_ROW * len(lanes) + 34
    scale = (width - _LANE_LEFT - 10) / drawn.total_s if drawn.total_s else 0.0
    bars: list[Content] = []
    for at, lane in enumerate(_merged(lanes, drawn.total_s)):
        for span in lane.spans:
            colour, _ = _SORTS[span.sort]
            shape = tag(
                "rect", x=round(_LANE_LEFT + span.start_s * scale, 2), y=_LANE_TOP + _LANE_ROW * at,
                width=round(max(span.seconds * scale, 0.4), 2), height=_LANE_BAR, class_=f"f{colour} {span.sort}",
                data_s=f"{span.start_s:.9g}", data_e=f"{span.end_s:.9g}",
            )  # fmt: skip
            bars.append(mark(shape, _span_text(span)))
    ticks = [
        tag(
            "g",
            tag("line", x1=x, x2=x, y1=_LANE_TOP, y2=height - 28, class_="grid"),
            tag("text", format_seconds(at_s) if at_s else "0", x=x, y=height - 10,
                text_anchor="middle" if x < width - 36 else "end"),
        )
        for at_s in linear_ticks(0.0, drawn.total_s)
        for x in (round(_LANE_LEFT + at_s * scale, 2),)
    ]  # fmt: skip
    labels = [
        tag("text", _cut(lane.name, 22), tag("title", lane.name), class_="ink", x=_LANE_LEFT - 8,
            y=_LANE_TOP + _LANE_ROW * at + 13, text_anchor="end")
        for at, lane in enumerate(lanes)
    ]  # fmt: skip
    inner = tag(
        "svg", tag("g", bars, class_="bars"), x=0, y=0, width=width, height=height, viewbox=f"0 0 {width:.0f} {height}",
    )  # fmt: skip
    cover = tag("rect", x=0, y=0, width=_LANE_LEFT - 4, height=height, class_="cover")
    used = {span.sort for lane in lanes for span in lane.spans}
    more = "a loop or a call" if drawn.source == "measured" else "not drawn one by one"
    legend = [(words or more, colour, "box") for sort, (colour, words) in _SORTS.items() if sort in used]
    svg = Drawing(
        parts=[tag("g", ticks, class_="ticks"), inner, cover, *labels],
        width=width,
        height=height,
        class_="timeline",
        attributes=(("data_total", f"{drawn.total_s:.9g}"), ("data_left", str(_LANE_LEFT))),
    )
    return join(_zoom(), _legend(legend), _drawing(chart, identifier, svg))


def _zoom() -> Html:
    """Buttons that the script of a page listens to; without it they are not shown."""
    buttons = [
        tag("button", sign, type="button", data_zoom=how, aria_label=label)
        for how, sign, label in (
            ("in", "+", "zoom in"), ("out", "\N{MINUS SIGN}", "zoom out"), ("left", "\N{LEFTWARDS ARROW}", "earlier"),
            ("right", "\N{RIGHTWARDS ARROW}", "later"), ("all", "all", "the whole step"),
        )
    ]  # fmt: skip
    return tag("div", buttons, class_="zoom", hidden=True)


def _merged(lanes: Sequence[Lane], total_s: float) -> list[Lane]:
    """The lanes with the shortest spans joined, as many as necessary."""
    least = 0.0
    merged = list(lanes)
    while sum(len(lane.spans) for lane in merged) > MOST_BARS:
        least = max(2 * least, total_s / 20_000)
        merged = [replace(lane, spans=tuple(_joined(lane.spans, least))) for lane in lanes]
    return merged


def _joined(spans: Sequence[TimeSpan], least: float) -> list[TimeSpan]:
    """Spans of one sort, each shorter than ``least`` and nearer than that to the one before, as one."""
    joined: list[TimeSpan] = []
    counts: list[int] = []
    for span in spans:
        last = joined[-1] if joined else None
        near = last is not None and last.sort == span.sort and span.start_s - last.end_s < least
        if last is not None and near and span.seconds < least and (counts[-1] > 1 or last.seconds < least):
            counts[-1] += 1
            joined[-1] = replace(
                last, end_s=max(last.end_s, span.end_s), name=f"{counts[-1]} short ones", scope="", phase="",
                source="", op="", details={},
            )  # fmt: skip
        else:
            joined.append(span)
            counts.append(1)
    return joined


def _span_text(span: TimeSpan) -> str:
    where = " ".join(part for part in (span.scope, span.phase) if part)
    lines = [span.name, f"{format_seconds(span.seconds)}, from {format_seconds(span.start_s)}"]
    lines += [where if where != span.name else "", span.source.rpartition("/")[2]]
    for name, value in span.details.items():
        if value != "":
            lines.append(f"{name}: {format_bytes(float(value)) if name == 'bytes' else value}")
    return "\n".join(line for line in lines if line)


# ---- the same figures as a table ------------------------------------------------------------------------------------

#: Rows of the table of a timeline at most.
_MOST_SUMS = 60


def chart_table(chart: Chart) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows of the figures of a chart."""
    if isinstance(chart, Lines):
        return ("series", axis_label(chart.x), axis_label(chart.y)), [
            (
                f"{series.name}: {series.names[at]}" if at < len(series.names) and series.names[at] else series.name,
                _exact(x, chart.x.unit),
                _exact(y, chart.y.unit),
            )
            for series in chart.series
            for at, (x, y) in enumerate(series.points)
        ]
    if isinstance(chart, Bars):
        return ("bar", "part", "value"), [
            (bar.name, part, format_value(value, chart.unit)) for bar in chart.bars for part, value in bar.parts
        ]
    if isinstance(chart, Spans):
        names = [*chart.colours, *[""] * PALETTE]
        return ("lane", "span", "from", "to"), [
            (lane, span_name(names[colour], label), format_value(begins, chart.unit), format_value(ends, chart.unit))
            for lane, spans in chart.lanes
            for begins, ends, colour, label in spans
        ]
    if isinstance(chart, Blocks):
        return ("device", "holds"), [(cell.device, cell.label) for cell in chart.cells]
    if isinstance(chart, Frames):
        return ("step", "what happens"), [(str(at), frame.says) for at, frame in enumerate(chart.frames)]
    if isinstance(chart, Timeline):
        return ("lane", "span", "times", "seconds in all"), _lane_sums(chart.lanes.lanes[:MOST_LANES])
    if isinstance(chart, Table):
        return tuple(column.name for column in chart.columns), [row for row in chart.rows if row]
    if isinstance(chart, Items):
        # A line that is no sentence ends where the next one begins.
        texts = [" ".join(re.sub(r"(?<![.:;,])\n", "; ", item.text).split()) for item in chart.items]
        items = [(item.mark, text, item.note) for item, text in zip(chart.items, texts, strict=True)]
        used = [at for at in range(3) if any(item[at] for item in items)]
        # Its title stands above it.
        headings = ("", "", "source")
        return tuple(headings[at] for at in used), [tuple(item[at] for at in used) for item in items]
    return (), []


def _exact(value: float, unit: str) -> str:
    return str(int(value)) if not unit and float(value).is_integer() else format_value(value, unit)


def _lane_sums(lanes: Sequence[Lane]) -> list[tuple[str, ...]]:
    """The spans on which lanes spend most time."""
    sums: dict[tuple[str, str], list[float]] = {}
    for lane in lanes:
        for span in lane.spans:
            name = " ".join(part for part in (span.name, span.phase) if part)
            total = sums.setdefault((lane.name, name), [0, 0.0])
            total[0] += 1
            total[1] += span.seconds
    longest = sorted(sums.items(), key=lambda entry: -entry[1][1])[:_MOST_SUMS]
    return [(*key, f"{count:.0f}", format_seconds(seconds)) for key, (count, seconds) in longest]
