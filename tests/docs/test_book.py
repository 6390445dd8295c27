"""The book's companion is true: each command prints the figures that its row has in bold."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

import pytest

from rooftop.ui.controls import read_state
from rooftop.ui.explorers import explorer
from tests.conftest import Answer

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (?P<question>[^|]+) \| `rooftop (?P<command>[^`]+)` \| (?P<answer>[^|]+) \|$", re.MULTILINE)
ROWS = [match.groups() for match in _ROW.finditer((ROOT / "docs" / "book.md").read_text(encoding="utf-8"))]


LINKS = re.findall(
    r"^- \[(.+)\]\((http://127\.0\.0\.1:8080/\S+)\): \*\*(.+)\*\*$",
    (ROOT / "docs" / "book.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)


@pytest.mark.parametrize(("text", "address", "figure"), LINKS, ids=[link[0] for link in LINKS])
def test_a_link_into_the_page_shows_the_figure(text: str, address: str, figure: str) -> None:
    parts = urlsplit(address)
    one = explorer(parts.path.strip("/"))
    answer = one.answer(read_state(one.form.controls, parse_qsl(parts.query, strict_parsing=True)))
    assert figure in [shown.text for shown in answer.figures]


def test_there_are_links_into_the_page_after_each_part() -> None:
    assert len(LINKS) == (ROOT / "docs" / "book.md").read_text(encoding="utf-8").count("](http://127.0.0.1:8080/") >= 12


def test_all_rows_are_read() -> None:
    page = (ROOT / "docs" / "book.md").read_text(encoding="utf-8")
    assert len(ROWS) == page.count("| `rooftop ") > 25


@pytest.mark.parametrize(("question", "command", "answer"), ROWS, ids=[row[0][:60] for row in ROWS])
def test_the_command_prints_the_answer(
    question: str, command: str, answer: str, rooftop: Callable[..., Answer]
) -> None:
    figures = re.findall(r"\*\*(.+?)\*\*", answer)
    assert figures
    printed = rooftop(*shlex.split(command)).out
    for figure in figures:
        assert re.search(rf"(?<![\d.,]){re.escape(figure)}(?![\d.])", printed), (figure, printed)
