"""Elements of a page, written so that no text of a trace or a plan is ever taken for markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

#: Elements without an end.
_VOID = ("br", "line", "rect", "circle", "path", "polyline", "meta", "col")


class Html(str):
    """Markup: whatever else is put into a page is text, and is escaped."""

    __slots__ = ()


Content = str | float | None


def tag(name: str, *content: Content | Iterable[Content], **attributes: str | float | bool | None) -> Html:
    """An element; ``class_`` is its class, ``_`` in names stands for ``-``. None and False leave an attribute out."""
    told = "".join(
        f" {_attribute(key)}" + ("" if value is True else f'="{escape(_number(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inner = join(*content)
    return Html(f"<{name}{told}/>" if name in _VOID and not inner else f"<{name}{told}>{inner}</{name}>")


def join(*content: Content | Iterable[Content]) -> Html:
    """Content one after the other; what is no markup is escaped."""
    parts = []
    for each in content:
        if each is None:
            continue
        if isinstance(each, Html):
            parts.append(str(each))
        elif isinstance(each, (str, int, float)):
            parts.append(escape(_number(each)))
        else:
            parts.append(str(join(*each)))
    return Html("".join(parts))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[Content]], *, caption: str, text: int = 1, wide: bool = True
) -> Html:
    """A table with a caption; the first ``text`` columns are text, the others numbers, aligned to the right.

    A column whose name ends in '...' is text as well. ``wide`` lets it scroll on a narrow screen.
    """
    sorts = ["t" if at < text or name.endswith("...") else "n" for at, name in enumerate(columns)]
    head = tag(
        "tr",
        [
            # A column without a name is named by what is in it: it has no header.
            tag("th", name.removesuffix("..."), scope="col", class_=sort) if name else tag("td")
            for name, sort in zip(columns, sorts, strict=True)
        ],
    )
    body = [tag("tr", [tag("td", cell, class_=sort) for cell, sort in zip(row, sorts, strict=True)]) for row in rows]
    made = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", body))
    return tag("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption) if wide else made


def details(summary: str, *content: Content | Iterable[Content], opened: bool = False) -> Html:
    """What is shown when it is asked for."""
    return tag("details", tag("summary", summary), *content, open=opened)


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-").replace("viewbox", "viewBox")


def _number(value: Content | bool) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


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
