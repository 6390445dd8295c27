"""The book's companion is true: each command prints the figures that its row has in bold."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Answer

ROOT = Path(__file__).parents[2]
_ROW = re.compile(r"^\| (?P<question>[^|]+) \| `rooftop (?P<command>[^`]+)` \| (?P<answer>[^|]+) \|$", re.MULTILINE)
ROWS = [match.groups() for match in _ROW.finditer((ROOT / "docs" / "book.md").read_text(encoding="utf-8"))]


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
