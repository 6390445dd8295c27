"""A document as HTML: a fragment for notebooks, or a whole page that needs no network."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rooftop import __version__
from rooftop.present.document import Chart, Document, Items, Listing, ShownFigure, Table
from rooftop.present.markup import Content, Html, asset, join, tag
from rooftop.present.svg import chart_table, picture

#: Pixels that charts are drawn for.
_WIDTH = 860
#: Characters of a cell from which on it wraps.
_LONG = 60
#: Nothing may be loaded.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(document: Document) -> str:
    """One HTML file that opens from a disk."""
    sections = list(_sections(document.charts))
    names = _Identifiers()
    parts = [(names.of(title), title, charts) for title, charts in sections]
    links = [tag("li", tag("a", title, href=f"#{name}")) for name, title, _ in parts]
    body = tag(
        "body",
        tag("header", tag("h1", document.title or document.verdict.text), _head(document)),
        tag("nav", tag("ul", links), aria_label="sections"),
        tag(
            "main",
            [
                tag("section", tag("h2", title), [_chart(chart, names, title) for chart in charts], id=name)
                for name, title, charts in parts
            ],
        ),
        tag("footer", " ".join((*document.sources, *_shown_by(document), "SI units."))),
        tag("div", id="tip", class_="tip", role="tooltip", hidden=True, data_page="file"),
        tag("script", Html(asset("charts.js"))),
    )
    metas = [
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
    ]
    style = Html(asset("charts.css") + asset("page.css"))
    head = tag("head", metas, tag("title", f"rooftop: {document.title}"), tag("style", style))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def fragment(document: Document) -> str:
    """Verdict, figures, tables and charts without a script, for a cell of a notebook."""
    names = _Identifiers(prefix="rooftop-")
    parts = [_chart(chart, names) for chart in document.charts if not chart.detail]
    style = tag("style", Html(asset("charts.css")))
    return tag("div", style, _head(document), parts, class_="rooftop")


@dataclass(kw_only=True)
class _Identifiers:
    """Identifiers, each used once."""

    prefix: str = ""
    used: set[str] = field(default_factory=set)

    def of(self, title: str) -> str:
        """An identifier made of a title."""
        stem = self.prefix + (re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-") or "part")
        name, number = stem, 2
        while name in self.used:
            name, number = f"{stem}-{number}", number + 1
        self.used.add(name)
        return name


def _sections(charts: Sequence[Chart]) -> Iterator[tuple[str, list[Chart]]]:
    """Titles of sections with their charts. Neighbours under one title are together."""
    title, members = "", list[Chart]()
    for chart in charts:
        if chart.section and chart.section != title:
            if members:
                yield title or members[0].title, members
            title, members = chart.section, []
        members.append(chart)
    if members:
        yield title or members[0].title, members


def _shown_by(document: Document) -> tuple[str, ...]:
    """The version that made the page, if the sources do not name it."""
    own = f"rooftop {__version__}"
    return () if any(own in source for source in document.sources) else (f"Shown by {own}.",)


def _head(document: Document) -> Html:
    verdict = document.verdict
    lines: list[Content] = []
    if verdict.no:
        lines.append(tag("p", verdict.refusal, class_="verdict no"))
    if verdict.text and verdict.text != verdict.no:
        lines.append(tag("p", verdict.text, class_="verdict differs" if verdict.differs else "verdict"))
    lines += [tag("p", detail, class_="quiet") for detail in verdict.details]
    shown = tag("dl", [_figure(figure) for figure in document.figures], class_="figures") if document.figures else None
    notes = tag("ul", [tag("li", note) for note in document.notes], class_="notes") if document.notes else None
    return join(lines, shown, notes)


def _figure(figure: ShownFigure) -> Html:
    level = tag("span", figure.mark, class_="level") if figure.mark else None
    more = " \N{MIDDLE DOT} ".join(text for text in (figure.note, figure.formula, figure.source) if text)
    note = tag("dd", more, class_="formula") if more else None
    return tag("div", tag("dt", figure.label, " ", level), tag("dd", figure.text), note)


def _chart(chart: Chart, names: _Identifiers, heading: str = "") -> Html:
    """A part under a ``heading``, which it does not repeat."""
    name = names.of(chart.title)
    if isinstance(chart, (Table, Items)):
        about = tag("p", chart.about, class_="quiet") if chart.about else None
        shown = table(chart, heading) if isinstance(chart, Table) or chart.items else None
        return tag("div", shown, about, id=name)
    if isinstance(chart, Listing):
        about = tag("p", chart.about, class_="quiet") if chart.about else None
        title = tag("h3", chart.title) if chart.title != heading else None
        text = tag("pre", chart.text, class_="scroll", tabindex="0", role="region", aria_label=chart.title)
        return tag("div", title, about, text, id=name)
    columns, rows = chart_table(chart)
    under = _rows(columns, rows, f"Figures: {chart.title}", text=1)
    return tag(
        "figure",
        tag("h3", chart.title, id=f"{name}-heading") if chart.title != heading else None,
        tag(
            "div",
            picture(chart, _WIDTH, name),
            class_="scroll",
            tabindex="0",
            role="region",
            aria_label=f"Plot: {chart.title}",
        ),
        tag("figcaption", chart.about) if chart.about else None,
        tag("details", tag("summary", f"Table: {chart.title}"), under),
        id=name,
    )


def table(chart: Table | Items, heading: str = "") -> Html:
    """A table, or a list as one, that scrolls on a narrow screen; without a caption where ``heading`` says the same."""
    columns, rows = chart_table(chart)
    captioned = chart.title != heading
    if isinstance(chart, Items):
        return _rows(columns, rows, chart.title, text=len(columns), captioned=captioned)
    text = [column.kind == "text" for column in chart.columns]
    return _rows(columns, rows, chart.title, text=text, captioned=captioned, below=chart.below)


def _rows(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    caption: str,
    *,
    text: int | Sequence[bool] = 1,
    captioned: bool = True,
    below: Sequence[int] = (),
) -> Html:
    kinds = [at < text if isinstance(text, int) else text[at] for at in range(len(columns))]
    classes = [None if kind else "number" for kind in kinds]
    beside = [at for at in range(len(columns)) if at not in below]
    # A column without a name has no header: its cells say what it is.
    head = tag(
        "tr",
        [tag("th", columns[at], scope="col", class_=classes[at]) if columns[at] else tag("td") for at in beside],
    )
    body = []
    for row in rows:
        body.append(tag("tr", [tag("td", row[at], class_=classes[at] or _long(row[at])) for at in beside]))
        if more := "; ".join(f"{columns[at]}: {row[at]}" if columns[at] else row[at] for at in below if row[at]):
            body.append(tag("tr", tag("td", tag("div", more), colspan=len(beside), class_="below")))
    named = tag("caption", caption) if caption and captioned else None
    whole = tag("table", named, tag("thead", head) if any(columns) else None, tag("tbody", body))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=caption)


def _long(cell: str) -> str | None:
    """The class of a text that wraps: it stays wide enough to be read next to many columns of figures."""
    return "long" if len(cell) > _LONG else None
