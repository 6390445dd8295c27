"""Schedules of XLA by release of libtpu: which one a plan assumes, and what a user asks for."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rooftop.core.errors import RooftopError
from rooftop.frameworks import xla
from rooftop.frameworks.framework import framework_of
from rooftop.frameworks.xla import libtpu_releases, nearest_release, pinned_release, planned_release, release_number
from rooftop.hardware import chip
from rooftop.plan.training.plan import TrainingPlan

ROOT = Path(__file__).parents[2]
DATA = Path(xla.__file__).with_name("data") / "xla"
RELEASES = libtpu_releases()
PLAN = ("plan", "train", "llama3.2-1b", "--on", "v5e:2x2", "--batch-seqs", "8", "--seq", "2048", "--mesh", "fsdp=4")
Run = Callable[..., Any]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str | None], None]]:
    """Set the release of libtpu that is installed; None: it is not."""

    def install(release: str | None) -> None:
        def version(name: str) -> str:
            if release is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return release

        planned_release.cache_clear()
        monkeypatch.setattr(importlib.metadata, "version", version)

    yield install
    monkeypatch.undo()
    planned_release.cache_clear()


def test_releases_are_files_the_oldest_first() -> None:
    names = [path.stem.removeprefix("libtpu-") for path in DATA.glob("libtpu-*.toml")]
    assert sorted(names) == sorted(RELEASES)
    assert list(map(release_number, RELEASES)) == sorted(map(release_number, RELEASES))
    assert pinned_release() in RELEASES


def test_the_pinned_release_is_that_of_the_lock_files() -> None:
    pins = re.findall(r"^libtpu==(\S+)", (ROOT / "requirements" / "demo.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert min(pins, key=release_number) == pinned_release()


def test_a_release_without_a_file_has_the_nearest_before_it() -> None:
    assert all(nearest_release(release) == release for release in RELEASES)
    assert nearest_release("0.0.42.2") == "0.0.42.1"
    assert nearest_release("0.0.1") == RELEASES[0]
    assert nearest_release("99.1.dev20270101+g1") == RELEASES[-1]


@pytest.mark.parametrize(
    ("present", "planned"),
    [(None, pinned_release()), *((release, release) for release in RELEASES), ("99", RELEASES[-1])],
)
def test_plans_are_for_the_installed_compiler(
    installed: Callable[[str | None], None], present: str | None, planned: str
) -> None:
    installed(present)
    assert framework_of("rooftop", chip=chip("v5p")).release == planned
    # Those of frameworks are as published runs were planned.
    theirs, ours = framework_of("maxtext", chip=chip("v5p")), framework_of("rooftop", chip=chip("v5p"))
    pinned = framework_of("rooftop", chip=chip("v5p"), release=pinned_release())
    assert theirs.habits.asynchronous == pinned.habits.asynchronous
    assert theirs.release == "0.2.4" and ours.release == planned


@pytest.mark.parametrize("release", RELEASES)
def test_the_habits_of_a_release_are_those_of_its_file(release: str) -> None:
    table = tomllib.loads((DATA / f"libtpu-{release}.toml").read_text(encoding="utf-8"))
    assert f"libtpu {release}" in table["source"]
    for rule in table["rule"]:
        for name in rule["chips"]:
            habits = framework_of("rooftop", chip=chip(name), release=release).habits
            assert rule["source"]
            assert rule["habits"] == {key: getattr(habits, key) for key in rule["habits"]}


def test_gpus_have_no_releases() -> None:
    assert framework_of("rooftop", chip=chip("h100")).release is None
    with pytest.raises(RooftopError, match=r"^release: got '0\.0\.42\.1'; accepted: nothing with rooftop on h100"):
        framework_of("rooftop", chip=chip("h100"), release="0.0.42.1")


def test_an_unknown_release_is_one_line(rooftop: Run) -> None:
    answer = rooftop(*PLAN, "--release", "0.0.1")
    assert (answer.status, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert answer.err.startswith("rooftop: release: got '0.0.1'; accepted: ")
    assert all(release in answer.err for release in RELEASES)


@pytest.mark.parametrize("release", RELEASES)
def test_a_plan_names_its_release(rooftop: Run, release: str) -> None:
    data = rooftop(*PLAN, "--release", release, "--json").json
    assert data["framework"]["release"] == release
    assert TrainingPlan.from_json(data).problem.program.release == release
    line = f"planned for libtpu {release}"
    assert (line in rooftop(*PLAN, "--release", release).out) == (release != pinned_release())
