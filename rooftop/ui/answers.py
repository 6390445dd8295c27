"""What an explorer answers: figures with their units and sources, charts as plain data, the command that says the same.

A chart is data only; how it looks is the page's business. Every chart can be shown as a table.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, ClassVar, Literal

from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.ui.controls import Control, State

#: What a figure is: a bound, what is expected, an exact count, measured, simulated, or a rule of thumb. Never mixed up.
Level = Literal["bound", "expected", "exact", "measured", "simulated", "rule"]


#: A price of ``rooftop.algebra.pricing`` -> what its figures are. The book's forms are no bounds.
PRICE_LEVELS: Mapping[str, Level] = {"bound": "bound", "expected": "expected", "book": "rule"}
#: Units that are words, which take no prefix.
_WORDS = ("tokens", "ids")


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure: ``value`` in SI ``unit`` (or a word), how it follows, and where from."""

    name: str
    label: str
    value: float | str | None
    unit: str = ""
    level: Level = "exact"
    formula: str = ""
    source: str = ""

    @property
    def text(self) -> str:
        """The value as people read it."""
        return format_value(self.value, self.unit)


def format_value(value: float | str | None, unit: str) -> str:
    """A value with its unit, scaled to be read."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return value
    if unit == "s":
        return format_seconds(value)
    if unit == "B":
        return format_bytes(value)
    if unit == "%":
        return f"{value:.1%}"
    if unit in ("", *_WORDS):
        exact = float(value).is_integer() and abs(value) < 1e5
        return f"{value:,.0f} {unit}".strip() if exact else f"{format_count(value)} {unit}".strip()
    return format_count(value, unit)


def _plain(value: Any) -> Any:
    """Dataclasses within a chart as dicts, all else as it is: charts hold thousands of tuples that need no copy."""
    if is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_plain(each) for each in value]
    return value


@dataclass(frozen=True, kw_only=True)
class Axis:
    """An axis: what it counts, in which SI unit, on which scale; ``zero``: whether a linear one begins there."""

    label: str
    unit: str = ""
    scale: Literal["linear", "log"] = "linear"
    zero: bool = True


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points [n] of (x, y); ``names`` say what each is, if given."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: Literal["line", "dashed", "dots", "point"] = "line"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What every chart has: a title, and a sentence for who cannot see it (or wants to know what to look for)."""

    kind: ClassVar[str] = ""
    title: str
    about: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values, tuples for lists."""
        return {"kind": self.kind} | {each.name: _plain(getattr(self, each.name)) for each in fields(self)}


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Series over two axes; ``marks`` are vertical lines: (x, what)."""

    kind: ClassVar[str] = "lines"
    x: Axis
    y: Axis
    series: tuple[Series, ...]
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A bar of parts that add up: (part, value)."""

    name: str
    parts: tuple[tuple[str, float], ...]
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Bars in one ``unit``; ``limit`` is a line across all of them: (value, what)."""

    kind: ClassVar[str] = "bars"
    unit: str
    bars: tuple[Bar, ...]
    limit: tuple[float, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Spans(Chart):
    """A timeline: lanes of spans (start, end, colour, label), seconds or another ``unit``. ``colours`` name them."""

    kind: ClassVar[str] = "spans"
    unit: str
    lanes: tuple[tuple[str, tuple[tuple[float, float, int, str], ...]], ...]
    colours: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Held:
    """What one device holds of an array: from and to along two dims, as parts of 1; and in words."""

    device: str
    place: tuple[int, int]
    block: int
    rows: tuple[float, float]
    columns: tuple[float, float]
    label: str


@dataclass(frozen=True, kw_only=True)
class Blocks(Chart):
    """An array on a mesh: a cell for each device with its block filled, ``shape`` (rows, columns) of devices."""

    kind: ClassVar[str] = "blocks"
    shape: tuple[int, int]
    axes: tuple[str, str]
    cells: tuple[Held, ...]


@dataclass(frozen=True, kw_only=True)
class Frames(Chart):
    """An animation over a grid of cells, ``shape`` (rows, columns), shown from frame ``start`` on.

    A frame has ``cells``, each with ``parts`` (colour, amount of 0 to 1) and a ``text``; ``arrows`` (from, to, colour)
    between cells; and in ``says`` what happens. ``names`` are those of the cells, if they have any.
    """

    kind: ClassVar[str] = "frames"
    shape: tuple[int, int]
    names: tuple[str, ...]
    frames: tuple[Mapping[str, Any], ...]
    start: int = 0


@dataclass(frozen=True, kw_only=True)
class Table(Chart):
    """Rows of text under ``columns``."""

    kind: ClassVar[str] = "table"
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What an explorer says of a state. ``verdict`` is the one line that matters; ``no`` is why it cannot be."""

    verdict: str
    figures: tuple[Figure, ...] = ()
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    no: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; every figure with the text that is shown."""
        return {
            "verdict": self.verdict,
            "no": self.no,
            "figures": [asdict(figure) | {"text": figure.text} for figure in self.figures],
            "charts": [chart.to_json() for chart in self.charts],
            "notes": list(self.notes),
            "command": shlex.join(self.command),
            "sources": list(self.sources),
        }


@dataclass(frozen=True, kw_only=True)
class Explorer:
    """One page: its controls, and the function from their state to an answer. ``chapter`` is the book's."""

    name: str
    title: str
    summary: str
    chapter: str
    controls: tuple[Control, ...]
    answer: Callable[[State], Answer]

    def to_json(self) -> dict[str, Any]:
        """The declaration that the page builds its form from."""
        return {
            "name": self.name,
            "title": self.title,
            "summary": self.summary,
            "chapter": self.chapter,
            "controls": [control.to_json() for control in self.controls],
        }
