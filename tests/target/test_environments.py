"""Environments with other releases: packages of their own in front of those that are shared."""

from __future__ import annotations

import json
import subprocess
import zipfile
from pathlib import Path

import pytest

from rooftop.core.errors import RooftopError
from rooftop.target.environments import Releases, python_with, run_rooftop


@pytest.fixture(autouse=True)
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder of packages in the place of an index, and a cache of its own."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("jax", "jaxlib", "libtpu"):
        needs = 'Requires-Dist: libtpu==9.9.*; extra == "tpu"\n' if name == "jax" else ""
        with zipfile.ZipFile(wheels / f"{name}-9.9.9-py3-none-any.whl", "w") as wheel:
            info = f"{name}-9.9.9.dist-info"
            wheel.writestr(f"{name}/__init__.py", "origin = __file__\n")
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.9.9\n{needs}")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, value in {"NO_INDEX": "1", "FIND_LINKS": str(wheels)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
        monkeypatch.setenv(f"UV_{name}", value)
    return wheels


def versions(python: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata, json; names = ['jax', 'jaxlib', 'libtpu', 'click']; "
        "print(json.dumps({name: importlib.metadata.version(name) for name in names}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def test_own_releases_before_shared_packages(capfd: pytest.CaptureFixture[str]) -> None:
    phases = list[str]()
    python = python_with(Releases.parse("jax==9.9.9"), lambda phase, elapsed_s: phases.append(phase))
    assert dict.fromkeys(phases) == dict.fromkeys(
        ["making an environment", "installing jax==9.9.9, jaxlib==9.9.9", "installing libtpu==9.9.*"]
    )
    own = versions(python)
    assert {own[name] for name in ("jax", "jaxlib", "libtpu")} == {"9.9.9"}
    assert own["click"]
    # It is there when it is asked for again.
    again = list[str]()
    assert python_with(Releases.parse("jax==9.9.9"), lambda phase, elapsed_s: again.append(phase)) == python
    assert not again
    # rooftop runs in it, and refuses a jax that is none.
    assert run_rooftop(python, ["--version"]) == 0
    assert capfd.readouterr().out.startswith("rooftop")


def test_one_package_alone() -> None:
    own = versions(python_with(Releases.parse("libtpu==9.9.9")))
    assert own["libtpu"] == "9.9.9"
    assert own["jax"] != "9.9.9"


def test_a_release_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        RooftopError, match=r"with: got 'libtpu==1.2.3'; accepted: releases that can be installed \(.+\)"
    ):
        python_with(Releases.parse("libtpu==1.2.3"))
    assert not [path for path in (tmp_path / "cache").rglob("ready")]


@pytest.mark.parametrize("text", ["", "jax", "jax>=1", "numpy==2.0", "jax==1,jax==2", "libtpu==../x"])
def test_wrong_releases(text: str) -> None:
    with pytest.raises(RooftopError, match="with: got"):
        Releases.parse(text)
