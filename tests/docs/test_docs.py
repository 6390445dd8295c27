"""The documentation is true: transcripts print what they say, links lead somewhere, every verb has its page."""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import shlex
import subprocess
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from rooftop import __version__
from rooftop.cli.main import VERBS, main

ROOT = Path(__file__).parents[2]


def _module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRANSCRIPTS = _module("transcripts")
CASES = [(page.name, *case) for page in TRANSCRIPTS.pages() for case in TRANSCRIPTS.commands(page)]


#: A command of rooftop whose output goes through a filter.
FILTERED = re.compile(r"(?P<command>rooftop .*) \| (?P<filter>(?:head|tail|sed) [^|]*)")


@cache
def _answer(command: str) -> tuple[str, str]:
    """Stdout and stderr of a command of rooftop, run in this process."""
    program, *words = shlex.split(command)
    assert program == "rooftop"
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors), pytest.raises(SystemExit):
        main(words)
    return output.getvalue(), errors.getvalue()


def _needs_shell(command: str) -> bool:
    """True if a shell does more with a command than to take quotes from its words, or the command runs a script."""
    return " -- " in command or re.search(r"[^\w ,.:/=@-]", re.sub(r"'[^']*'", "", command)) is not None


@pytest.mark.parametrize(("page", "command", "printed"), CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES])
def test_transcripts_print_what_they_say(
    page: str, command: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that need no shell run in this process: Python starts once. One on several pages is run once."""
    monkeypatch.chdir(TRANSCRIPTS.ROOT)
    for name, value in TRANSCRIPTS.TERMINAL.items():
        monkeypatch.setenv(name, value)
    filtered = FILTERED.fullmatch(command)
    alone = command if filtered is None else filtered["command"]
    output, errors = ("", "") if _needs_shell(alone) else _answer(alone)
    if _needs_shell(alone) or (filtered and errors):
        assert TRANSCRIPTS.run(command) == printed
        return
    if filtered is not None:
        output = subprocess.run(
            ["bash", "-c", filtered["filter"]], input=output, capture_output=True, text=True, check=True
        ).stdout
    assert TRANSCRIPTS.tidy(output + errors) == printed


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_with_a_transcript(verb: str) -> None:
    page = ROOT / "docs" / f"{verb}.md"
    assert any(command.startswith(f"rooftop {verb}") for command, _ in TRANSCRIPTS.commands(page))
    assert f"({verb}.md)" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_the_picture_is_that_of_the_transcript() -> None:
    drawing = _module("picture")
    page = (ROOT / "docs" / "compile.md").read_text(encoding="utf-8")
    assert drawing.draw(page) == drawing.PICTURE.read_text(encoding="utf-8")
    assert len(drawing.rows(page)) > 15


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", TRANSCRIPTS.pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for name, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
        target = page.parent / name if name else page
        known = "://" in name or (
            target.exists() and (not anchor or target.suffix != ".md" or anchor in _anchors(target))
        )
        if not known:
            broken.append(f"{name}#{anchor}")
    assert broken == []


@pytest.mark.parametrize("script", ["compile", "compile_gpu", "compile_random"])
def test_tables_of_compiled_plans_are_those_of_their_results(script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "bench" / "compiler"))
    shared, module = importlib.import_module("compile"), importlib.import_module(script)
    rows = shared.read_rows(module.RESULTS)
    if script == "compile_random":
        text = module.shown(rows.values())
    else:
        text = shared.table(rows[case.name] for case in module.CASES)
    assert f"<!-- measured: python bench/compiler/{script}.py -->\n{text}\n<!-- end -->" in module.PAGE.read_text(
        encoding="utf-8"
    )


def test_the_site_has_every_page() -> None:
    """``make site`` refuses a page without a place in the menu, and a link out of the documentation."""
    listed = re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    docs = ROOT / "docs"
    pages = list(docs.rglob("*.md"))
    assert sorted(listed) == sorted(str(page.relative_to(docs)) for page in pages)
    links = [page.parent / name for page in pages for name in re.findall(r"\]\(([^)#\s:]+)", _text(page))]
    assert [link for link in links if not link.resolve().is_relative_to(docs)] == []


def test_pages_of_the_tool_are_short() -> None:
    """Tables and histories of figures belong to ``docs/evidence``, which is counted apart."""
    assert sum(len(_text(page).split()) for page in (ROOT / "docs").glob("*.md")) <= 60_000


def test_the_version_stands_in_the_citation() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
