"""A document as text for a terminal: verdict, figures, tables and lists. Charts are left to pages.

A table never loses a column in silence. Where it is too wide, blanks between columns go first, then headings and texts
wrap, then columns are left out, and a line below the table names them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from rich.text import Text

from rooftop.present.document import HYPHEN, Document, Items, Listing, ShownFigure, Table, TableColumn

#: A text column wraps to no fewer characters than this.
_NARROW = 16
#: Stands where a word may break, and is not shown.
_BREAK = "\N{ZERO WIDTH SPACE}"


def printed(document: Document, width: int) -> Text:
    """The document as lines of at most ``width`` characters, without blanks at their ends."""
    lines = list(_lines(document, width))
    return Text("\n").join(lines[1:] if lines and not lines[0] else lines)


def _lines(document: Document, width: int) -> Iterator[Text]:
    verdict = document.verdict
    colour = "red" if verdict.no else "yellow" if verdict.differs else "green"
    if verdict.no:
        yield from _wrapped(verdict.refusal, width, style="bold red")
    if verdict.subject:
        yield from _wrapped(verdict.subject, width, style="bold")
    for detail in verdict.details:
        yield from _wrapped(detail, width, style="dim")
    if verdict.says and verdict.says != verdict.no:
        yield from _wrapped(verdict.says, width, style=colour)
    yield from _figures(document.figures, width)
    for chart in document.charts:
        if chart.detail:
            continue
        if isinstance(chart, Table):
            yield from _table(chart, width)
        elif isinstance(chart, Items):
            yield from _items(chart, width)
        elif isinstance(chart, Listing):
            yield from _listing(chart, width)
    for note in document.notes:
        yield from _wrapped(note, width)


def _wrapped(text: str, width: int, *, style: str = "", indent: int = 0) -> Iterator[Text]:
    """Paragraphs that wrap between words; a word is never broken, because it may be a path or a command."""
    for paragraph in text.splitlines() or [""]:
        for line in _fold(paragraph, width - indent, whole=True):
            yield Text(" " * indent + line, style=style)


def _fold(text: str, width: int, *, whole: bool = False) -> list[str]:
    if len(text) <= width:
        return [text]
    # A list without blanks breaks after its commas; those of digits are no list.
    spaced = text if whole else re.sub(r",(?=[A-Za-z_])", f",{_BREAK} ", text)
    lines = textwrap.wrap(spaced, max(width, 1), break_long_words=not whole, break_on_hyphens=False) or [""]
    return [line.replace(f"{_BREAK} ", "").replace(_BREAK, "") for line in lines]


def _figures(figures: Sequence[ShownFigure], width: int) -> Iterator[Text]:
    """A line for each figure: label, value, note; notes wrap below themselves, or below the figure at small widths."""
    if not figures:
        return
    labels = max(len(figure.label) for figure in figures)
    values = max(len(figure.text) for figure in figures)
    start = 2 + labels + 4 + values + 4
    below = width - start < 3 * _NARROW
    for figure in figures:
        line = Text(f"  {figure.label:<{labels}}    {figure.text}")
        if not figure.note or below:
            yield line
            if figure.note:
                yield from _wrapped(figure.note, width, indent=6)
            continue
        notes = _fold(figure.note, width - start - 2, whole=True)
        line.append(" " * (start - len(line)) + notes[0])
        yield line
        yield from (Text(" " * start + note) for note in notes[1:])


def _items(chart: Items, width: int) -> Iterator[Text]:
    """A titled list; lines hang under their text."""
    style = "yellow" if chart.warns else ""
    if chart.title or chart.about:
        yield Text("")
    if chart.title:
        yield from _wrapped(chart.title, width, style=style or "bold")
    if chart.about:
        yield from _wrapped(chart.about, width)
    marks = max((len(item.mark) for item in chart.items), default=0)
    indent = 2 + (marks + 1 if marks else 0)
    for item in chart.items:
        colour = "" if item.good is None else "green" if item.good else "yellow"
        words = len(item.text.split())
        joined = f"{item.text}  [{item.note}]" if item.note else item.text
        for at, line in enumerate(
            part for text in joined.splitlines() for part in _fold(text, width - indent, whole=True)
        ):
            text = Text("  ")
            if marks:
                text.append(f"{item.mark if at == 0 else '':<{marks}} ", style=colour)
            starts = [word.start() for word in re.finditer(r"\S+", line)]
            note = starts[words] if words < len(starts) else len(line)
            words = max(0, words - len(starts))
            yield text.append(line[:note], style=style).append(line[note:], style="dim")


def _listing(chart: Listing, width: int) -> Iterator[Text]:
    yield Text("")
    yield from _wrapped(chart.title, width, style="bold")
    if chart.about:
        yield from _wrapped(chart.about, width)
    yield from (Text(line) for line in chart.text.splitlines())


def _table(table: Table, width: int) -> Iterator[Text]:
    shown = table.rows[: table.top] if table.top else table.rows
    columns, rows, left_out = _fitting(table.columns, shown, width)
    indent, gap = _spacing(columns, rows, width)
    indent = indent if table.title else 0
    widths = _widths(columns, rows, width - indent, gap)
    yield Text("")
    if table.title:
        yield from _wrapped(table.title, width, style="bold")
    if any(column.name for column in columns):
        headings = [_heading(column.name, size) for column, size in zip(columns, widths, strict=True)]
        tall = max(map(len, headings))
        for at in range(tall):
            cells = [heading[at - tall + len(heading)] if at >= tall - len(heading) else "" for heading in headings]
            yield _row(columns, cells, widths, indent, gap, style="bold")
    for row in rows:
        if not row:
            yield Text("")
            continue
        for line in zip_longest(*(cell.split("\n") for cell in row), fillvalue=""):
            # What stands on one line of a cell stays next to the same line of the others.
            folded = [_fold(part, size) for part, size in zip(line, widths, strict=True)]
            for texts in zip_longest(*folded, fillvalue=""):
                yield _row(columns, texts, widths, indent, gap)
    if table.about:
        yield from _wrapped(table.about, width, indent=indent, style="dim")
    if len(table.rows) > len(rows):
        yield Text(f"... and {len(table.rows) - len(rows)} more (--top)")
    if left_out:
        yield from _wrapped(f"no room for: {', '.join(left_out)}", width, indent=indent, style="dim")


Rows = Sequence[tuple[str, ...]]


def _row(
    columns: Sequence[TableColumn], cells: Sequence[str], widths: Sequence[int], indent: int, gap: int, style: str = ""
) -> Text:
    texts = [
        cell.ljust(size) if column.kind == "text" else cell.rjust(size)
        for column, cell, size in zip(columns, cells, widths, strict=True)
    ]
    return Text((" " * indent + (" " * gap).join(texts)).rstrip(), style=style)


def _natural(columns: Sequence[TableColumn], rows: Rows) -> list[int]:
    """Characters of each column if nothing wraps."""
    return [
        max([len(_plain(column.name)), *(len(line) for row in rows if row for line in row[at].split("\n"))])
        for at, column in enumerate(columns)
    ]


def _least(columns: Sequence[TableColumn], rows: Rows) -> list[int]:
    """Characters of each column with headings wrapped, and texts that may wrap at their narrowest."""
    sizes = []
    for at, column in enumerate(columns):
        cells = max((len(line) for row in rows if row for line in row[at].split("\n")), default=0)
        head = max(map(len, _hyphened(column.name).split()), default=0)
        sizes.append(max(head, min(cells, _NARROW) if column.wrap else cells))
    return sizes


def _plain(name: str) -> str:
    """A heading without the places where it may be hyphened."""
    return name.replace(HYPHEN, "")


def _hyphened(name: str) -> str:
    return name.replace(HYPHEN, "- ")


def _total(widths: Sequence[int], gap: int) -> int:
    return sum(widths) + gap * max(0, len(widths) - 1)


def _spacing(columns: Sequence[TableColumn], rows: Rows, width: int) -> tuple[int, int]:
    """Indent, and blanks between columns."""
    return (1, 2) if 1 + _total(_natural(columns, rows), 2) <= width else (0, 1)


def _fitting(columns: Sequence[TableColumn], rows: Rows, width: int) -> tuple[tuple[TableColumn, ...], Rows, list[str]]:
    """The columns that there is room for, their rows, and the names of those left out."""
    shown = list(range(len(columns)))
    while (
        _total(_least([columns[at] for at in shown], [tuple(row[at] for at in shown) for row in rows if row]), 1)
        > width
    ):
        # Where nothing else is left, figures go from the right: those on the left name a row.
        droppable = [at for at in shown if columns[at].drop] or [at for at in shown[2:] if columns[at].kind == "number"]
        if not droppable:
            break
        shown.remove(max(droppable, key=lambda at: (columns[at].drop, at)))
    left_out = [_plain(columns[at].name) for at in range(len(columns)) if at not in shown]
    return tuple(columns[at] for at in shown), [tuple(row[at] for at in shown) if row else () for row in rows], left_out


def _widths(columns: Sequence[TableColumn], rows: Rows, width: int, gap: int) -> list[int]:
    """Characters of each column: as many as it would like, then fewer from the widest that may shrink."""
    sizes, least = _natural(columns, rows), _least(columns, rows)
    while _total(sizes, gap) > width:
        over = [at for at in range(len(sizes)) if sizes[at] > least[at]]
        if not over:
            # Nothing that may wrap is left: the widest text is folded anyway.
            over = [at for at in range(len(sizes)) if columns[at].kind == "text" and sizes[at] > _NARROW // 4]
        if not over:
            break
        widest = max(over, key=lambda at: sizes[at])
        sizes[widest] -= 1
    return sizes


def _heading(name: str, size: int) -> list[str]:
    if len(_plain(name)) <= size:
        return [_plain(name)]
    return _fold(_hyphened(name), size, whole=True) or [""]
