"""Notebooks in ``docs/notebooks``: each NAME.py, in percent format, is run and written as NAME.ipynb with its answers.

``python docs/notebooks.py [NAME...]`` writes them, all by default. A cell is Markdown (``# %% [markdown]``) or code
(``# %%``), whose last expression is its answer, as in Jupyter. The slow tests run the code of every notebook.
"""

from __future__ import annotations

import ast
import io
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import chdir, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
_CELL = re.compile(r"^# %%(?P<kind> \[markdown\])?\n(?P<body>(?:(?!# %%).*\n)*)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A cell of a notebook: its text, and if that is code."""

    text: str
    is_code: bool


def names() -> list[str]:
    """Names of the notebooks."""
    return sorted(path.stem for path in FOLDER.glob("*.py"))


def cells(name: str) -> Iterator[Cell]:
    """The cells of a notebook's source. Lines of Markdown are comments there."""
    for cell in _CELL.finditer((FOLDER / f"{name}.py").read_text(encoding="utf-8")):
        body = cell["body"].strip("\n")
        is_code = cell["kind"] is None
        yield Cell(text=body if is_code else re.sub(r"^# ?", "", body, flags=re.MULTILINE), is_code=is_code)


def run(code: str, scope: dict[str, Any]) -> tuple[str, Any]:
    """Run a cell; what it prints, and the value of its last expression, None if it has none."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(tree, "cell", "exec"), scope)
        value = None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), scope)
    return printed.getvalue(), value


def notebook(name: str) -> dict[str, Any]:
    """The notebook with the answers of its cells, as nbformat 4 has it."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    written: list[dict[str, Any]] = []
    with chdir(ROOT):
        for index, cell in enumerate(cells(name)):
            source = cell.text.splitlines(keepends=True)
            common = {"id": f"{name}-{index}", "metadata": {}, "source": source}
            if not cell.is_code:
                written.append({"cell_type": "markdown", **common})
                continue
            printed, value = run(cell.text, scope)
            outputs = _outputs(printed, value, count=len(written) + 1)
            code = {"cell_type": "code", "execution_count": len(written) + 1, "outputs": outputs, **common}
            written.append(code)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return {"cells": written, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}


def _outputs(printed: str, value: Any, *, count: int) -> list[dict[str, Any]]:
    outputs: list[dict[str, Any]] = []
    if printed:
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.splitlines(keepends=True)})
    if value is not None:
        data = {"text/plain": repr(value)}
        if hasattr(value, "_repr_html_"):
            data["text/html"] = value._repr_html_()
        outputs.append({"output_type": "execute_result", "execution_count": count, "metadata": {}, "data": data})
    return outputs


def main() -> None:
    """Write the notebooks that are named, or all."""
    # No accelerator is looked for, and several processes may use the compiler of TPUs.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    for name in sys.argv[1:] or names():
        (FOLDER / f"{name}.ipynb").write_text(json.dumps(notebook(name), indent=1) + "\n", encoding="utf-8")
        print(f"written: docs/notebooks/{name}.ipynb")


if __name__ == "__main__":
    main()
