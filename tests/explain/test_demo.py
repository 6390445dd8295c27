"""The recorded run that comes with rooftop: explained at once, from a cache, and named nowhere on this machine."""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from rooftop.explain.demo import _ARCHIVE, demo_run
from rooftop.profile import idle
from rooftop.ui.opened import opened
from tests.conftest import Answer
from tests.support import faces

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_the_recorded_run_is_explained_next_to_its_plan(rooftop: Callable[..., Answer]) -> None:
    answer = rooftop("explain", "--demo", "--json").json
    assert answer["kind"] == "explained"
    assert {"measured", "compiled", "planned"} <= set(answer["rows"][0])
    assert any(row["planned"] and row["measured"] for row in answer["rows"])


def test_page_and_browser_show_what_the_terminal_shows(
    rooftop: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "2000")
    page, file = tmp_path / "page.html", tmp_path / "run.json"
    terminal = rooftop("explain", "--demo", "--report", str(page)).out
    file.write_text(rooftop("explain", "--demo", "--json").out)
    assert sum(1 for _ in faces.cells(terminal)) > 100
    assert faces.missing(terminal, faces.of_page(page.read_text(encoding="utf-8"))) == []
    assert faces.missing(terminal, faces.of_browser(file)) == []


def test_the_recorded_run_needs_no_jax(rooftop: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the answer depends on what is installed, and the page opens it too."""
    known = rooftop("explain", "--demo", "--json").json
    monkeypatch.setitem(sys.modules, "jaxlib", None)
    monkeypatch.setitem(sys.modules, "jax", None)
    idle._library.cache_clear()
    assert rooftop("explain", "--demo", "--json").json == known
    assert opened(demo_run()).answer.verdict.says
    idle._library.cache_clear()


def test_the_names_of_the_files_of_jax_are_recorded() -> None:
    """Those of the release that the tests are pinned to."""
    recorded = Path(idle.__file__).with_name("jax_files.txt").read_text(encoding="utf-8").split()
    pinned = re.search(r"^jax==(\S+)", (ROOT / "requirements" / "dev.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    if importlib.metadata.version("jax") == pinned[1]:
        assert recorded == sorted(idle.jax_files())


def test_the_recorded_run_is_unpacked_once() -> None:
    folder = demo_run()
    (folder / "seen").touch()
    assert demo_run() == folder and (folder / "seen").exists()


def test_a_run_next_to_the_recorded_one_is_refused(rooftop: Callable[..., Answer]) -> None:
    answer = rooftop("explain", "run", "--demo")
    assert (answer.status, answer.out) == (2, "")
    assert "RUN and demo" in answer.err


def test_the_recording_names_no_folder_of_a_user() -> None:
    with tarfile.open(_ARCHIVE) as archive:
        for member in archive:
            file = archive.extractfile(member)
            assert file is not None
            content = file.read()
            assert not any(place in content for place in (b"/home/", b"/root/", b"/tmp/", b"/work/"))
