"""A document as JSON for a browser: its data, and every chart drawn as SVG for the width that it has there."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rooftop.present.document import Chart, Document, Items, Listing, Table
from rooftop.present.svg import chart_table, picture

Place = Literal["half", "third", "wide"]
#: Charts that share a row with others, where there is room.
_PLACES: Mapping[str, Place] = {"lines": "half", "bars": "half", "blocks": "third"}
_NARROWEST, _WIDEST = 240, 2400


@dataclass(frozen=True, kw_only=True)
class Widths:
    """Pixels of a chart that has a row for itself, half of one, or a third."""

    wide: int = 860
    half: int = 500
    third: int = 320

    @classmethod
    def parse(cls, text: str) -> Widths:
        """Widths from 'WIDE,HALF,THIRD', those outside sensible limits at them; the usual ones from other text."""
        try:
            wide, half, third = (min(max(int(size), _NARROWEST), _WIDEST) for size in text.split(","))
        except ValueError:
            return cls()
        return cls(wide=wide, half=half, third=third)


def to_data(document: Document, widths: Widths | None = None) -> dict[str, Any]:
    """The document as plain JSON values: figures with their text, charts with place, SVG and table."""
    sizes = widths or Widths()
    prose = [chart.about for chart in document.charts if isinstance(chart, Items) and not chart.items]
    shown = [chart for chart in document.charts if not isinstance(chart, Items) or chart.items]
    charts = [
        _chart(chart, place, sizes, f"chart-{at}")
        for at, (chart, place) in enumerate(zip(shown, places(shown), strict=True))
    ]
    verdict = document.verdict
    return {
        "verdict": verdict.refusal if verdict.text == verdict.no else verdict.text,
        "no": verdict.refusal,
        "details": list(verdict.details),
        "figures": [figure.to_json() for figure in document.figures],
        "charts": charts,
        "notes": [*document.notes, *prose],
        "command": shlex.join(document.command),
        "sources": list(document.sources),
    }


def _chart(chart: Chart, place: Place, sizes: Widths, identifier: str) -> dict[str, Any]:
    if isinstance(chart, Listing):
        return chart.to_json() | {"place": place}
    names, rows = chart_table(chart)
    drawn = picture(chart, getattr(sizes, place), identifier)
    data = chart.to_json() | {"place": place, "svg": drawn, "columns": names, "rows": rows}
    if isinstance(chart, Items):
        return data | {"kind": "table"}
    if isinstance(chart, Table):
        return data | {"numeric": [column.kind == "number" for column in chart.columns], "below": chart.below}
    return data


def places(charts: Sequence[Chart]) -> list[Place]:
    """The place of each chart in its row. A half that has no other half next to it has the whole row."""
    places: list[Place] = [_PLACES.get(chart.kind, "wide") for chart in charts]
    waiting: int | None = None
    for at, place in enumerate([*places, "wide"]):
        # One bar alone leaves half a row empty.
        if place == "half":
            waiting = at if waiting is None else None
        elif waiting is not None:
            places[waiting] = "wide"
            waiting = None
    return places
