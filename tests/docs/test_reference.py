"""Generated pages are what their generator writes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_SPEC = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
assert _SPEC is not None
assert _SPEC.loader is not None
reference = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(reference)


@pytest.mark.parametrize("name", reference.PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    page = ROOT / "docs" / name
    assert page.read_text(encoding="utf-8") == reference.PAGES[name](), "run make docs"


def test_every_option_has_one_row() -> None:
    rows = [line for line in reference.options_page().splitlines() if line.startswith("| `--")]
    names = [row.split("`")[1].split(" ")[0] for row in rows]
    assert sorted(names) == sorted({reference.long_name(option) for _, option in reference.every_option()} - {"--help"})


_OF_MANY_VERBS = ("README.md", "recipes.md", "tutorial.md")


def _named_options(page: Path) -> list[tuple[int, str, str]]:
    """(line, verb, option) of every command in a page's code.

    On pages of many verbs also of every bare option after a command of its section: with the verbs of the section,
    joined by a comma. Other pages are about one verb, and name it in their title.
    """
    named, verbs, fenced = [], dict[str, None](), False
    known = {verb for verb, _ in reference.every_option()}
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif line.startswith("#") and not fenced:
            verbs.clear()
        for span in [line] if fenced else re.findall(r"`([^`]+)`", line):
            for part in re.split(r"&&|[;|()]| -- ", span):
                command = re.match(r"\s*(?:\$ )?rooftop ((?:plan |embed )?[a-z]+)(.*)", part)
                if command is not None and command[1] in known:
                    verbs[command[1]] = None
                    named += [(number, command[1], option) for option in re.findall(r" (--[a-z][a-z-]*)", command[2])]
            if (
                page.name in _OF_MANY_VERBS
                and not fenced
                and verbs
                and (bare := re.match(r"--[a-z][a-z-]*", span)) is not None
            ):
                named.append((number, ",".join(verbs), bare[0]))
    return named


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_an_option_that_a_page_names_is_one_of_the_verb(page: Path) -> None:
    options: dict[str, set[str]] = {}
    for verb, option in reference.every_option():
        options.setdefault(verb, {"--help"}).update((*option.opts, *option.secondary_opts))
    named = _named_options(page)
    assert named or page.name not in _OF_MANY_VERBS
    wrong = [entry for entry in named if not any(entry[2] in options[verb] for verb in entry[1].split(","))]
    assert not wrong
