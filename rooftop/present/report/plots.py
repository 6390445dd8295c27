"""Plots as SVG: points and lines over two axes, and bars. Every mark says its figures, to a mouse and to a keyboard.

Each plot has a title and a description, and stands above a table of the same figures.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rooftop.present.report.html import Content, Html, details, table, tag

WIDTH, HEIGHT = 860, 430
_LEFT, _RIGHT, _TOP, _BOTTOM = 84, 20, 18, 54
#: Series that have a colour of their own; those after them begin again.
COLOURS = 7


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One axis: what it shows, how a value is written, whether it is logarithmic."""

    label: str
    text: Callable[[float], str]
    log: bool = False
    #: Values that have to be on it.
    includes: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Point:
    """A mark at (x, y), what it is, and its figures by name."""

    x: float
    y: float
    name: str
    figures: tuple[tuple[str, str], ...] = ()

    @property
    def told(self) -> str:
        """Everything in one line each."""
        return "\n".join([self.name, *(f"{name}: {value}" for name, value in self.figures)])


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one colour; ``line`` joins them, ``marks`` makes each a mark. A ``dashed`` line is a limit."""

    name: str
    points: tuple[Point, ...]
    line: bool = False
    marks: bool = True
    dashed: bool = False


def plot(identifier: str, title: str, about: str, x: Axis, y: Axis, series: Sequence[Series]) -> Html:
    """Points and lines over two axes, with a legend, and a table of the points."""
    shown = [each for each in series if each.points]
    across = _Scale.of(x, [p.x for each in shown for p in each.points], _LEFT, WIDTH - _RIGHT)
    up = _Scale.of(y, [p.y for each in shown for p in each.points], HEIGHT - _BOTTOM, _TOP)
    parts = [*_axes(across, up)]
    for at, each in enumerate(shown):
        parts += _series(each, at % COLOURS, across, up)
    marked = [each for each in shown if each.marks]
    names = list(dict.fromkeys(name for each in marked for p in each.points for name, _ in p.figures))
    rows = [
        [each.name, p.name, *(dict(p.figures).get(name, "") for name in names)] for each in marked for p in each.points
    ]
    return figure(
        identifier,
        title,
        about,
        drawing(identifier, title, about, parts, HEIGHT),
        legend=[(each.name, at % COLOURS, each.dashed) for at, each in enumerate(shown)],
        under=details(f"Table: {title}", table(["", "", *names], rows, caption=title, text=2)) if rows else None,
    )


def figure(
    identifier: str,
    title: str,
    about: str,
    drawn: Html,
    *,
    legend: Sequence[tuple[str, int, bool]] = (),
    under: Html | None = None,
    controls: Html | None = None,
) -> Html:
    """A drawing with its heading, what to know of it, a legend and what stands under it."""
    keys = [
        tag("li", tag("span", class_=f"key s{colour}" + (" dashed" if dashed else ""), aria_hidden="true"), name)
        for name, colour, dashed in legend
    ]
    return tag(
        "figure",
        tag("h3", title, id=f"{identifier}-heading"),
        controls,
        tag("div", drawn, class_="scroll", tabindex="0", role="region", aria_label=f"Plot: {title}"),
        tag("ul", keys, class_="legend") if keys else None,
        tag("figcaption", about),
        under,
        id=identifier,
    )


def drawing(
    identifier: str, title: str, about: str, parts: Sequence[Content], height: float, **more: str | float
) -> Html:
    """An SVG with a title and a description, one stop of the keyboard; its arrow keys go from mark to mark."""
    told: dict[str, str | float] = {"class_": "plot", **more}
    return tag(
        "svg",
        tag("title", title, id=f"{identifier}-title"),
        tag("desc", about, id=f"{identifier}-desc"),
        parts,
        viewbox=f"0 0 {WIDTH} {height:.0f}",
        role="group",
        tabindex="0",
        aria_labelledby=f"{identifier}-title {identifier}-desc",
        **told,
    )


def mark(shape: Html, told: str) -> Html:
    """A shape that tells its figures."""
    return tag("g", shape, tag("title", told), class_="mark", role="img")


def bars(
    identifier: str, title: str, about: str, rows: Sequence[tuple[str, Sequence[tuple[str, float]]]],
    text: Callable[[float], str], *, limit: tuple[str, float] | None = None,
) -> Html:  # fmt: skip
    """A bar for each row, made of named parts one after the other; ``limit`` is a line that they should not cross."""
    names = list(dict.fromkeys(name for _, parts in rows for name, _ in parts))
    used = {name for _, parts in rows for name, value in parts if value}
    most = max([sum(value for _, value in parts) for _, parts in rows] + ([limit[1]] if limit else []), default=0.0)
    height, left = 44 * len(rows) + 46, 110
    scale = (WIDTH - left - 84) / most if most > 0 else 0.0
    drawn: list[Content] = []
    for at, (row, parts) in enumerate(rows):
        y, x = 12 + 44 * at, float(left)
        drawn.append(tag("text", row, x=left - 8, y=y + 20, text_anchor="end"))
        for name, value in parts:
            if not value:
                continue
            wide = value * scale
            shape = tag(
                "rect", x=round(x, 2), y=y, width=round(wide, 2), height=30, class_=f"fill s{_colour(names, name)}"
            )
            drawn.append(mark(shape, f"{row}: {name}\n{text(value)}"))
            x += wide
        drawn.append(
            tag(
                "text",
                text(sum(value for _, value in parts)),
                x=round(x + 6, 1),
                y=y + 20,
                class_="over",
            )
        )
    if limit:
        x = left + limit[1] * scale
        drawn.append(tag("line", x1=round(x, 1), x2=round(x, 1), y1=4, y2=height - 30, class_="limit"))
        drawn.append(
            tag("text", f"{limit[0]} {text(limit[1])}", x=round(x, 1), y=height - 12, text_anchor="end", class_="quiet")
        )
    cells = [[row, *(text(dict(parts)[name]) if name in dict(parts) else "" for name in names)] for row, parts in rows]
    return figure(
        identifier, title, about, drawing(identifier, title, about, drawn, height),
        legend=[(name, _colour(names, name), False) for name in names if name in used],
        under=details(f"Table: {title}", table(["", *names], cells, caption=title)),
    )  # fmt: skip


def _colour(names: Sequence[str], name: str) -> int:
    return names.index(name) % COLOURS


@dataclass(frozen=True, kw_only=True)
class _Scale:
    """An axis between two values, laid from one place of the drawing to another."""

    axis: Axis
    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def of(cls, axis: Axis, values: Sequence[float], begin: float, end: float) -> _Scale:
        every = [value for value in (*values, *axis.includes) if not axis.log or value > 0] or [1.0]
        low, high = min(every), max(every)
        if axis.log:
            low, high = low / 1.6, high * 1.6
        else:
            low, high = min(0.0, low), high * 1.08 if high > 0 else 1.0
        return cls(axis=axis, low=low, high=high, begin=begin, end=end)

    def at(self, value: float) -> float:
        if self.axis.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return round(self.begin + (self.end - self.begin) * min(max(share, 0.0), 1.0), 2)

    @property
    def ticks(self) -> list[float]:
        return log_ticks(self.low, self.high) if self.axis.log else linear_ticks(self.low, self.high)


def anchor(x: float) -> str:
    """How a text at ``x`` is aligned so that it stays within the drawing."""
    return "middle" if x < WIDTH - 36 else "end"


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
    finest: tuple[tuple[int, ...], int] = ((1, 2, 5), 1)
    for digits, every in (finest, ((1, 3), 1), *(((1,), every) for every in range(1, last - first + 2))):
        powers = range(first, last + 1, every)
        found = [digit * 10.0**power for power in powers for digit in digits if low <= digit * 10.0**power <= high]
        if len(found) <= most:
            # Between neighbours of 1, 2 and 5 there is none: the axis is all but linear.
            return found if len(found) > 1 else linear_ticks(low, high)
    return [low, high]


def _axes(across: _Scale, up: _Scale) -> Iterator[Html]:
    bottom, right = HEIGHT - _BOTTOM, WIDTH - _RIGHT
    for tick in across.ticks:
        x = across.at(tick)
        yield tag("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid")
        yield tag("text", across.axis.text(tick), x=x, y=bottom + 18, text_anchor=anchor(x))
    for tick in up.ticks:
        y = up.at(tick)
        yield tag("line", x1=_LEFT, x2=right, y1=y, y2=y, class_="grid")
        yield tag("text", up.axis.text(tick), x=_LEFT - 8, y=y + 4, text_anchor="end")
    middle = (_TOP + bottom) / 2
    yield tag("text", across.axis.label, x=(_LEFT + right) / 2, y=HEIGHT - 12, text_anchor="middle", class_="quiet")
    yield tag(
        "text", up.axis.label, x=16, y=middle, text_anchor="middle", transform=f"rotate(-90 16 {middle:g})",
        class_="quiet",
    )  # fmt: skip


def _series(each: Series, colour: int, across: _Scale, up: _Scale) -> Iterator[Html]:
    places = [(across.at(p.x), up.at(p.y), p) for p in each.points]
    if each.line:
        path = " ".join(f"{x:g},{y:g}" for x, y, _ in places)
        yield tag("polyline", points=path, class_=f"line s{colour}" + (" dashed" if each.dashed else ""))
    if each.marks:
        for x, y, p in places:
            yield mark(tag("circle", cx=x, cy=y, r=5, class_=f"fill s{colour}"), f"{each.name}: {p.told}")
