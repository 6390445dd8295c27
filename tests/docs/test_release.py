"""Names and figures that a release states in several places are the same in all of them."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

from rooftop import __version__

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _release() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / "tests" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_citation_names_the_version() -> None:
    cited = re.search(r"^version: (\S+)$", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE)
    assert cited is not None and cited[1] == __version__
    assert "version" in PROJECT["project"]["dynamic"]
    assert f"To be released as {__version__}." in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_check_of_a_release_uses_every_extra_on_every_python() -> None:
    release = _release()
    extras = set(PROJECT["project"]["optional-dependencies"]) - {"gpu-compile"}
    assert set(release.EXTRAS) == extras | {""}
    assert all(uses for extra, uses in release.EXTRAS.items() if extra)
    assert f">={release.PYTHONS[0]}" == PROJECT["project"]["requires-python"]


def test_no_script_of_others_is_in_the_package() -> None:
    """Every script begins as ours do: with a comment in one sentence, and no licence of its own."""
    scripts = sorted((ROOT / "rooftop").rglob("*.js"))
    assert len(scripts) > 5
    for script in scripts:
        text = script.read_text(encoding="utf-8")
        assert not re.search(r"copyright|licen[cs]e|@preserve|sourceMappingURL", text, re.IGNORECASE), script
        assert max(map(len, text.splitlines())) < 400, f"{script} is minified"


def test_the_installed_sizes_are_those_of_all_extras() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `?([a-z-]+)`? \|", page, re.MULTILINE)) - {"extra"}
    assert listed == set(PROJECT["project"]["optional-dependencies"]) | {"none"}
