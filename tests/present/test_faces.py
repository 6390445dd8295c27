"""Each answer as three faces show it: whatever the terminal says, the page that is a file and the browser say too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rooftop.ui.opened import opened_text
from tests.conftest import Answer
from tests.support import faces

TABLES = str(Path(__file__).parents[2] / "docs" / "tables.toml")
#: Name of an answer -> its command, and words that only a complete answer has.
ANSWERS = {
    "train": (
        ("plan", "train", "llama3-8b", "--on", "v5e:4x4", "--batch-seqs", "16", "--tokens", "1T"),
        ("laid out as", "not hidden", "What would change it"),
    ),
    "chips": (
        ("plan", "train", "llama3-8b", "--on", "v5e,v6e", "--tokens", "1T", "--days", "30"),
        ("Slices compared", "recommended", "budget"),
    ),
    "no room": (("plan", "train", "llama3-70b", "--on", "v5e:4x4", "--batch-seqs", "16"), ("Does not fit",)),
    "serve": (("plan", "serve", "llama3-8b", "--on", "v5e:2x4"), ("largest batch", "Why")),
    "fleet": (
        ("plan", "serve", "llama3-8b", "--on", "v5e", "--requests-per-second", "10", "--ttft", "1s", "--tpot", "50ms"),
        ("Recommended:", "an hour at list prices", "Fleets compared"),
    ),
    "one chip": (
        ("plan", "serve", "qwen3-0.6b", "--on", "v5p", "--requests-per-second", "1", "--ttft", "1s", "--tpot", "50ms"),
        ("Recommended: 1 x v5p:1x1x1", "1 chip, $", "none", "an estimate: nothing measured"),
    ),
    "simulation": (
        ("simulate", "{plan}", "--concurrency", "4"),
        ("requests finished", "What users feel", "queue most"),
    ),
    "embed": (("plan", "embed", TABLES, "--on", "v5p:2x2x1"), ("Stacks of tables", "Where a step goes")),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_page_and_browser_show_what_the_terminal_shows(
    name: str, rooftop: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    command, special = ANSWERS[name]
    page, file, plan = tmp_path / "page.html", tmp_path / "answer.json", tmp_path / "plan.json"
    if "{plan}" in command:
        rooftop(*ANSWERS["serve"][0], "-o", str(plan))
    answer = rooftop(*(word.format(plan=plan) for word in command), "--report", str(page), "-o", str(file))
    assert all(text in answer.out for text in special)
    assert sum(1 for _ in faces.cells(answer.out)) > 30
    text, browser = faces.of_page(page.read_text(encoding="utf-8")), faces.of_browser(file)
    assert faces.missing(answer.out, text) == []
    assert faces.missing(answer.out, browser) == []
    # Each says what is true, and says it once.
    assert [faces.nothing(shown) for shown in (answer.out, text, browser)] == [[], [], []]
    assert faces.twice(page.read_text(encoding="utf-8")) == []
    shown = opened_text(file.name, file.read_bytes()).to_json()
    assert all(chart["title"] not in chart["columns"] for chart in shown["charts"])
    marks = {figure["text"]: figure.get("mark", figure["level"]) for figure in shown["figures"]}
    assert marks.get("none", "") == "", "what is not there has no evidence"


def test_a_cell_that_is_not_shown_is_noticed() -> None:
    terminal = (
        "llama on v5e\n  step    1.2 s    expected\n yes A reason.  [chapter 5; B/N]\nplan written to plan.json\n"
    )
    shown = "llama  on\nv5e step 1.2 s expected yes A reason. chapter 5; B/N"
    assert faces.missing(terminal, shown) == []
    assert faces.missing(terminal, shown.replace("chapter 5", "")) == ["chapter 5; B/N"]
    assert faces.missing(terminal, shown.replace("1.2 s", "1.3 s")) == ["1.2 s"]
