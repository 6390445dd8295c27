"""Elements of HTML and SVG, written so that no text of a trace or a plan is ever taken for markup."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib.resources import files

from rooftop.core.printable import printable

#: Elements without an end.
_VOID = ("br", "line", "rect", "circle", "path", "polyline", "meta", "col")


class Html(str):
    """Markup. All other text that is put into a page is escaped."""

    __slots__ = ()


Content = str | float | None


def tag(name: str, *content: Content | Iterable[Content], **attributes: str | float | bool | None) -> Html:
    """An element; ``class_`` is its class, and ``_`` in names is written ``-``. None and False omit an attribute."""
    written = "".join(
        f" {_attribute(key)}" + ("" if value is True else f'="{_text(value)}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    inner = join(*content)
    return Html(f"<{name}{written}/>" if name in _VOID and not inner else f"<{name}{written}>{inner}</{name}>")


def join(*content: Content | Iterable[Content]) -> Html:
    """Join content; plain text is escaped."""
    parts = []
    for entry in content:
        if entry is None:
            continue
        if isinstance(entry, Html):
            parts.append(str(entry))
        elif isinstance(entry, (str, int, float)):
            parts.append(_text(entry))
        else:
            parts.append(str(join(*entry)))
    return Html("".join(parts))


def _attribute(name: str) -> str:
    return name.rstrip("_").replace("_", "-").replace("viewbox", "viewBox")


def _text(value: Content | bool) -> str:
    """A value as text of a page. HTML has no control characters, and a terminal that shows the file would obey them."""
    return escape(printable(f"{value:.6g}" if isinstance(value, float) else str(value)))


def asset(name: str) -> str:
    """A style or script that pages share."""
    return (files(__package__) / "static" / name).read_text(encoding="utf-8")
