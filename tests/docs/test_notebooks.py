"""Notebooks have the cells of their sources, and run with the answers that they show."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def _notebooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("rooftop_notebooks", ROOT / "docs" / "notebooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


NOTEBOOKS = _notebooks()


def _stored(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((NOTEBOOKS.FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return data


def _answers(notebook: dict[str, Any]) -> list[object]:
    """Printed text and answers of the code cells."""
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return [output["text"] if "text" in output else output["data"]["text/plain"] for output in outputs]


@pytest.mark.parametrize("name", NOTEBOOKS.names())
def test_a_notebook_has_the_cells_of_its_source(name: str) -> None:
    stored = [("".join(cell["source"]), cell["cell_type"] == "code") for cell in _stored(name)["cells"]]
    assert stored == [(cell.text, cell.is_code) for cell in NOTEBOOKS.cells(name)]
    assert any(is_code for _, is_code in stored)


@pytest.mark.slow
@pytest.mark.parametrize("name", NOTEBOOKS.names())
def test_a_notebook_runs_with_the_answers_that_it_shows(name: str) -> None:
    assert _answers(NOTEBOOKS.notebook(name)) == _answers(_stored(name))
