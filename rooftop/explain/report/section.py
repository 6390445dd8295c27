"""What a page is put together from: its head, and sections."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rooftop.explain.report.html import Html, tag


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of a page under a title; ``name`` is what links call it."""

    name: str
    title: str
    content: Html


@dataclass(frozen=True, kw_only=True)
class Head:
    """The title of a page and what stands under it."""

    title: str
    content: Html


def figures(pairs: Iterable[tuple[str, str]]) -> Html:
    """The figures that a page begins with, each with its name."""
    return tag("dl", [tag("div", tag("dt", name), tag("dd", value)) for name, value in pairs], class_="figures")


def notes(texts: Iterable[str]) -> Html:
    """What to know before a figure is believed."""
    return tag("ul", [tag("li", text) for text in texts], class_="notes")


def mesh_text(sizes: dict[str, int]) -> str:
    """Mesh axes and their sizes, those of one device left out."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one device"


def place(source: str) -> str:
    """A 'file:line' without its directories."""
    return source.rpartition("/")[2]


def sentence(text: str) -> str:
    """A clause as a sentence."""
    return f"{text[0].upper()}{text[1:]}." if text else ""
