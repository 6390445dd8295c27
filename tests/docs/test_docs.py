"""The documentation is true: transcripts print what they say, links lead somewhere, every verb has its page."""

from __future__ import annotations

import importlib.util
import io
import re
import shlex
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import ModuleType

import pytest

from rooftop.cli.main import VERBS, main

ROOT = Path(__file__).parents[2]


def _transcripts() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transcripts", ROOT / "docs" / "transcripts.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TRANSCRIPTS = _transcripts()
CASES = [(page.name, *case) for page in TRANSCRIPTS.pages() for case in TRANSCRIPTS.commands(page)]


@pytest.mark.parametrize(("page", "command", "printed"), CASES, ids=[f"{case[0]}: {case[1]}" for case in CASES])
def test_transcripts_print_what_they_say(
    page: str, command: str, printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands that need no shell run in this process: Python starts once."""
    unquoted = re.sub(r"'[^']*'", "", command)
    if re.search(r"[^\w ,.:/=@-]", unquoted):
        assert TRANSCRIPTS.run(command) == printed
        return
    program, *words = shlex.split(command)
    assert program == "rooftop"
    monkeypatch.chdir(TRANSCRIPTS.ROOT)
    for name, value in TRANSCRIPTS.TERMINAL.items():
        monkeypatch.setenv(name, value)
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output), pytest.raises(SystemExit):
        main(words)
    assert TRANSCRIPTS.tidy(output.getvalue()) == printed


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_with_a_transcript(verb: str) -> None:
    page = ROOT / "docs" / f"{verb}.md"
    assert any(command.startswith(f"rooftop {verb}") for command, _ in TRANSCRIPTS.commands(page))
    assert any(command.startswith(f"rooftop {verb}") for command, _ in TRANSCRIPTS.commands(ROOT / "README.md")), (
        "and a short one in the README"
    )


@pytest.mark.parametrize("page", TRANSCRIPTS.pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if "://" not in target and not (page.parent / target).exists()] == []
