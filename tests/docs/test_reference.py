"""Generated pages are what their generator writes."""

from __future__ import annotations

import importlib.util
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
