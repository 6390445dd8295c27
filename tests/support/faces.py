"""The text of an answer on each face, to compare: on a terminal, in a page that is a file, in the browser."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from rooftop import __version__
from rooftop.present.document import HYPHEN
from rooftop.ui.opened import opened_text

#: Lines of a terminal only: files that were written, and what a table has no room for.
_TERMINAL_ONLY = re.compile(r"\w+ written to |\.\.\. and \d+ more |no room for: ")


#: Words of Python and JavaScript for what is no value, and a number of one thing with the word for several.
_NOTHING = re.compile(r"[^\n]{0,40}(?:\b(?:null|undefined|NaN|nan|None|inf)\b|\[object |(?<![\d.,x(] )(?<![\d.,x])\b1 "
                      r"(?:chip|row|device|server|run|sequence|candidate|way|slice|host)s\b)[^\n]{0,40}")  # fmt: skip


def nothing(text: str) -> list[str]:
    """Places of a text that show a missing value, or several of one thing."""
    return [" ".join(place.group().split()) for place in _NOTHING.finditer(text)]


def twice(page: str) -> list[str]:
    """Headings of an HTML page that stand twice in a row, and a version that its last line repeats."""
    headings = [words(of_page(text)) for text in re.findall(r"(?s)<(?:h[1-4]|caption|th)\b[^>]*>(.*?)</", page)]
    (last,) = re.findall(r"(?s)<footer>(.*?)</footer>", page)
    again = [heading for heading, following in pairwise(headings) if heading == following]
    return again + ([last] if last.count(f"rooftop {__version__}") != 1 else [])


def words(text: str) -> str:
    """The text with single blanks, without places to hyphen it."""
    return " ".join(text.replace(HYPHEN, "").split())


def cells(terminal: str) -> Iterator[str]:
    """Every label, value and cell of a terminal's text, which must be wide enough that nothing wraps."""
    for line in terminal.splitlines():
        if not _TERMINAL_ONLY.match(line.strip()):
            for cell in re.split(r"\s{2,}", line.strip()):
                # The note of a reason stands in brackets on a terminal, in a column of its own elsewhere.
                yield words(re.sub(r"^\[(.*)\]$", r"\1", cell))


def missing(terminal: str, shown: str) -> list[str]:
    """The cells of a terminal's text that another face does not show."""
    text = words(shown)
    return [cell for cell in dict.fromkeys(cells(terminal)) if cell not in text]


def of_page(page: str) -> str:
    """The text of an HTML page."""
    return html.unescape(re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(script|style)>.*?</\1>", " ", page)))


def of_browser(file: Path) -> str:
    """The text that the browser is sent for a file."""
    return "\n".join(texts(opened_text(file.name, file.read_bytes()).to_json()))


def texts(value: Any) -> Iterator[str]:
    """Every text of JSON values; of drawings, what they show."""
    if isinstance(value, str):
        yield of_page(value) if value.startswith("<") else value
    elif isinstance(value, dict):
        for item in value.values():
            yield from texts(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from texts(item)
