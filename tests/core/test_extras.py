"""Packages of extras: the table is that of pyproject.toml, and a failed import of one is a line that names an extra."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from rooftop.core.errors import RooftopError
from rooftop.core.extras import EXTRAS, is_installed, naming_extras, require
from tests.support.installs import INSTALLS, PROJECT, hidden

ROOT = Path(__file__).parents[2]


def test_the_extras_are_those_of_the_project_and_have_their_packages() -> None:
    assert set(EXTRAS) == set(PROJECT["optional-dependencies"]) - {"all"}
    for extra in INSTALLS[1:]:
        assert not set(EXTRAS[extra]) & hidden(extra), extra


def _imported(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_every_package_that_is_imported_is_of_the_install_or_of_an_extra() -> None:
    imported = set().union(*(_imported(file) for file in (ROOT / "rooftop").rglob("*.py")))
    # Tests of a user's own import rooftop.library.testing, in pytest.
    optional = imported & hidden("") - {"pytest"}
    of_extras = {package for packages in EXTRAS.values() for package in packages}
    assert len(optional) > 10 and optional <= of_extras
    # JAX and uvicorn load the others themselves.
    assert of_extras - {"libtpu", "jax_cuda12_plugin", "nvidia.cudnn", "httptools"} <= imported


def test_the_smallest_extras_come_first() -> None:
    """In the order of docs/install.md, whose table has their sizes."""
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert list(EXTRAS) == sorted(EXTRAS, key=lambda extra: page.index(f"| `{extra}` |"))


def test_a_missing_package_is_named_with_the_smallest_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for package, extra in (("pyarrow", "parquet"), ("jaxlib", "jax"), ("numba", "embed"), ("cryptography", "serve")):
        monkeypatch.setitem(sys.modules, package, None)
        accepted = (
            rf"^{package}: got 'not installed'; accepted: a Python that has it: pip install 'rooftop\[{extra}\]'$"
        )
        with pytest.raises(RooftopError, match=accepted), naming_extras():
            __import__(f"{package}.part")
    assert not is_installed("nvidia_of_nobody.cudnn")
    with pytest.raises(RooftopError, match=r"^numba: .* has it, for speed: pip install 'rooftop\[embed\]'$"):
        require("embed", "numba", purpose="for speed")
    require("ui")


@pytest.mark.parametrize("module", ["rooftop.nowhere", "nobodys_module", "jax.nowhere"])
def test_other_failed_imports_are_raised_as_they_are(module: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=module), naming_extras():
        __import__(module)
