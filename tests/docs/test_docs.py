"""The documentation is true: transcripts print what they say, links lead somewhere, every verb has its page."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from rooftop.cli.main import VERBS

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
def test_transcripts_print_what_they_say(page: str, command: str, printed: str) -> None:
    assert TRANSCRIPTS.run(command) == printed


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_a_page_with_a_transcript(verb: str) -> None:
    page = ROOT / "docs" / f"{verb}.md"
    assert any(command.startswith(f"rooftop {verb}") for command, _ in TRANSCRIPTS.commands(page))
    assert any(command.startswith(f"rooftop {verb}") for command, _ in TRANSCRIPTS.commands(ROOT / "README.md")), (
        "and a short one in the README"
    )


@pytest.mark.parametrize("page", TRANSCRIPTS.pages(), ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), target
