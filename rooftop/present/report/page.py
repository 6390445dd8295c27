"""The whole page: one HTML file that needs no network, of a trace, a compilation, or a plan for training or serving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from rooftop import __version__
from rooftop.core.errors import unknown
from rooftop.core.timelines import Lanes
from rooftop.present.report.explained import explained_sections
from rooftop.present.report.html import Content, Html, Section, join, tag
from rooftop.present.report.plans import compiled_sections, pareto_sections, serving_sections, training_sections
from rooftop.present.report.timeline import timeline

#: What may load anything: nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a page is made of: what ``--json`` prints, the plan beside it (None: none), and timelines."""

    data: Mapping[str, Any]
    plan: Mapping[str, Any] | None = None
    lanes: Sequence[Lanes] = ()


_KINDS = {
    "explained": explained_sections,
    "compiled": compiled_sections,
    "train": training_sections,
    "serve": serving_sections,
    "pareto": pareto_sections,
}


def page(material: Material) -> str:
    """The page as text. Raises RooftopError for a kind of answer that has none."""
    kind = material.data.get("kind")
    if kind not in _KINDS:
        raise unknown("report", str(kind), _KINDS)
    head, sections = _KINDS[kind](material.data, material.plan)
    drawn = [timeline(f"timeline-{at}", each) for at, each in enumerate(material.lanes)]
    if drawn:
        lanes = Section(name="timeline", title="Timeline", content=join(drawn))
        sections = [*sections[:2], lanes, *sections[2:]]
    return _document(head.title, head.content, sections)


def _document(title: str, head: Content, sections: Sequence[Section]) -> str:
    links = [tag("li", tag("a", each.title, href=f"#{each.name}")) for each in sections]
    body = tag(
        "body",
        tag("header", tag("h1", title), head),
        tag("nav", tag("ul", links), aria_label="sections"),
        tag("main", [tag("section", tag("h2", each.title), each.content, id=each.name) for each in sections]),
        tag("footer", f"rooftop {__version__}. Figures are per device and step, in SI units."),
        tag("div", id="tip", role="tooltip", hidden=True),
        tag("script", Html(_asset("page.js"))),
    )
    metas = [
        tag("meta", charset="utf-8"),
        tag("meta", name_="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name_="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
    ]
    inside = tag("head", metas, tag("title", f"rooftop: {title}"), tag("style", Html(_asset("page.css"))))
    return f"<!doctype html>\n{tag('html', inside, body, lang='en')}\n"


def _asset(name: str) -> str:
    """A file that is part of every page."""
    return (files(__package__) / name).read_text(encoding="utf-8")
