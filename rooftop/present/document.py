"""The document of an answer: its verdict, figures, tables and charts, as data.

``rooftop.present.documents`` builds documents; the terminal, HTML files, notebooks and the browser show them. How a
document looks is the business of its renderers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from typing import Any, Literal

from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.core.records import Record, derived
from rooftop.core.timelines import Lanes

#: The evidence of a figure: a bound (nothing can beat it), an estimate (priced, nothing measured), an expectation
#: (priced, with measurements), an exact count, a measurement, a simulation, a rule of thumb.
Level = Literal["bound", "estimate", "expected", "exact", "measured", "simulated", "rule"]

#: A place where a heading may be hyphened.
HYPHEN = "\N{SOFT HYPHEN}"
#: A price of ``rooftop.algebra.pricing`` -> the evidence of its figures. The book's forms are no bounds.
PRICE_LEVELS: Mapping[str, Level] = {"bound": "bound", "expected": "expected", "book": "rule"}
#: Lanes of a timeline that are drawn.
MOST_LANES = 40
#: Units that are words, which take no prefix.
_WORDS = ("tokens", "ids")


def format_value(value: float | str | None, unit: str) -> str:
    """A value with its unit, scaled for reading."""
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


@dataclass(frozen=True, kw_only=True)
class ShownVerdict:
    """The answer in one line: ``subject`` names the thing, ``says`` is a sentence about it.

    ``no`` is the reason of an answer that is no; ``differs`` marks one that disagrees with a plan. ``details`` are
    lines below the verdict.
    """

    subject: str = ""
    says: str = ""
    no: str = ""
    differs: bool = False
    details: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """Subject and sentence in one line."""
        return f"{self.subject}. {self.says}" if self.subject and self.says else self.subject or self.says

    @property
    def refusal(self) -> str:
        """The reason as a line of its own; empty for an answer that is not no."""
        return self.no[:1].upper() + self.no[1:]


@dataclass(frozen=True)
class ShownFigure(Record):
    """One figure: ``value`` in SI ``unit`` (or words, or None), with its evidence, formula and source.

    ``note`` is the rest of its line. ``shown`` replaces the usual text of the value: only a number has evidence.
    """

    name: str
    label: str
    value: float | str | None
    unit: str = ""
    level: Level = "exact"
    _: KW_ONLY
    formula: str = ""
    source: str = ""
    note: str = ""
    shown: str = ""

    @derived
    def text(self) -> str:
        """The value as people read it."""
        return self.shown or format_value(self.value, self.unit)

    @derived
    def mark(self) -> str:
        """The evidence that pages name; empty for exact counts, for words, and where there is no value."""
        return "" if self.level == "exact" or self.value is None or isinstance(self.value, str) else self.level


@dataclass(frozen=True)
class ChartAxis:
    """An axis: its label, SI unit and scale. A linear one with ``zero`` begins at 0."""

    label: str
    unit: str = ""
    scale: Literal["linear", "log"] = "linear"
    _: KW_ONLY
    zero: bool = True


@dataclass(frozen=True)
class ChartSeries:
    """Points [n] of (x, y). ``names`` [n] name the points, ``notes`` [n] are their figures, a line each."""

    name: str
    points: tuple[tuple[float, float], ...]
    style: Literal["line", "dashed", "dots", "point", "marked"] = "line"
    _: KW_ONLY
    names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chart(Record):
    """A part of a document. ``about`` says what to look for, also for readers who cannot see the chart.

    ``section`` is the title of the section that the part begins. Only pages show a ``detail``: the terminal leaves it
    out.
    """

    kind: str = ""
    title: str
    about: str = ""
    section: str = ""
    detail: bool = False

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values. Tuples of plain values stay tuples: charts hold thousands of them."""
        return {field.name: _plain(getattr(self, field.name)) for field in fields(self)}


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        return [_plain(entry) for entry in value]
    return value


@dataclass(frozen=True, kw_only=True)
class Lines(Chart):
    """Series over two axes; ``marks`` are vertical lines: (x, label)."""

    kind: str = "lines"
    x: ChartAxis
    y: ChartAxis
    series: tuple[ChartSeries, ...]
    marks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True)
class Bar:
    """A bar of parts that add up: (part, value)."""

    name: str
    parts: tuple[tuple[str, float], ...]
    _: KW_ONLY
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Bars(Chart):
    """Bars in one ``unit``; ``limit`` is a line across all of them: (value, label)."""

    kind: str = "bars"
    unit: str
    bars: tuple[Bar, ...]
    limit: tuple[float, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Spans(Chart):
    """A timeline: lanes of spans (start, end, index of a colour, label), in ``unit``. ``colours`` are names."""

    kind: str = "spans"
    unit: str
    lanes: tuple[tuple[str, tuple[tuple[float, float, int, str], ...]], ...]
    colours: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Held:
    """The part of an array on one device: from and to along two dims, as shares of 1; and in words."""

    device: str
    place: tuple[int, int]
    block: int
    rows: tuple[float, float]
    columns: tuple[float, float]
    label: str


@dataclass(frozen=True, kw_only=True)
class Blocks(Chart):
    """An array on a mesh: a cell for each device with its block filled, ``shape`` (rows, columns) of devices."""

    kind: str = "blocks"
    shape: tuple[int, int]
    axes: tuple[str, str]
    cells: tuple[Held, ...]


@dataclass(frozen=True)
class FrameCell:
    """A cell of an animation: its parts as (colour, amount of 0 to 1), and a text."""

    parts: tuple[tuple[int, float], ...]
    text: str = ""


@dataclass(frozen=True)
class Frame:
    """One picture of an animation, with a sentence about it. ``arrows`` go from cell to cell; None: it has none."""

    cells: tuple[FrameCell, ...]
    says: str
    arrows: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Frames(Chart):
    """An animation over a grid of cells, ``shape`` (rows, columns), shown from frame ``start`` on.

    ``names`` are those of the cells, if they have any.
    """

    kind: str = "frames"
    shape: tuple[int, int]
    names: tuple[str, ...]
    frames: tuple[Frame, ...]
    start: int = 0


@dataclass(frozen=True, kw_only=True)
class Timeline(Chart):
    """The timeline of a step, with zoom where it is drawn."""

    kind: str = "timeline"
    lanes: Lanes

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: lanes of (start, end, sort, name) in seconds."""
        lanes = [
            (lane.name, [(span.start_s, span.end_s, span.sort, span.name) for span in lane.spans])
            for lane in self.lanes.lanes
        ]
        return {"kind": self.kind, "title": self.title, "about": self.about, "lanes": lanes, "unit": "s"}


@dataclass(frozen=True)
class TableColumn:
    """A column: text or numbers. Text may ``wrap``. Where room is short, the column of largest ``drop`` goes first.

    A column with ``drop`` 0 is never left out.
    """

    name: str
    kind: Literal["text", "number"] = "number"
    _: KW_ONLY
    wrap: bool = False
    drop: int = 0


@dataclass(frozen=True, kw_only=True)
class Table(Chart):
    """Rows of text under ``columns``; an empty row separates groups. ``top`` rows are printed (0: all).

    Columns of a ``detail`` that ``wrap`` stand below their row.
    """

    kind: str = "table"
    columns: tuple[TableColumn, ...]
    rows: tuple[tuple[str, ...], ...]
    top: int = 0

    @property
    def below(self) -> tuple[int, ...]:
        """Columns whose texts stand below their row on a page: next to many figures they would be out of sight."""
        return tuple(at for at, column in enumerate(self.columns) if self.detail and column.wrap)


@dataclass(frozen=True)
class Item:
    """A line of a list: a ``mark`` before it and a quiet ``note`` after it. ``good`` colours the mark."""

    text: str
    _: KW_ONLY
    mark: str = ""
    note: str = ""
    good: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Items(Chart):
    """A list of lines: reasons, changes, obstacles, runners-up. One that ``warns`` is yellow."""

    kind: str = "items"
    items: tuple[Item, ...]
    warns: bool = False


@dataclass(frozen=True, kw_only=True)
class Listing(Chart):
    """A text to copy, such as a file: its lines stand as they are."""

    kind: str = "listing"
    text: str


def columns(*names: str, text: int = 1) -> tuple[TableColumn, ...]:
    """Columns of a table, the first ``text`` of them text and the others numbers."""
    return tuple(TableColumn(name, "text" if at < text else "number") for at, name in enumerate(names))


@dataclass(frozen=True, kw_only=True)
class Document:
    """An answer as every face shows it. ``command`` is the command line that says the same."""

    verdict: ShownVerdict
    title: str = ""
    figures: tuple[ShownFigure, ...] = ()
    charts: tuple[Chart, ...] = ()
    notes: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
