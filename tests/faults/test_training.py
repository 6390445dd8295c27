"""Seeded faults over training: a few in the quick tests, and more in the slow ones."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.images import Crashes, Images, damage_files
from tests.faults.training import QUICK_STEPS, STEPS, Schedule
from tests.support import shim
from tests.support.power import Crash
from tests.support.training_runs import write_corpus

needs_shim = pytest.mark.skipif(not shim.AVAILABLE, reason="faults of the system need Linux and a compiler for C")


@pytest.mark.parametrize(
    ("seed", "count", "processes", "steps"),
    [(0, 3, (1,), QUICK_STEPS), pytest.param(1, 40, (1, 2), STEPS, marks=pytest.mark.slow)],
)
def test_faults_change_no_bit(tmp_path: Path, seed: int, count: int, processes: tuple[int, ...], steps: int) -> None:
    figures = Schedule(tmp_path, seed, print, steps=steps).run(count, processes=processes)
    assert figures.wrong == []
    assert figures.noticed == figures.damaged
    assert sum(figures.faults.values()) >= count and figures.steps >= steps


@needs_shim
@pytest.mark.parametrize("kind", ["eio", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("clock", "cut"))])
def test_faults_of_the_system_have_effect_and_change_no_bit(tmp_path: Path, kind: str) -> None:
    figures = Schedule(tmp_path, 2, print, kinds=(kind,), steps=QUICK_STEPS).run(1, processes=(1,))
    assert figures.wrong == [] and figures.faults[kind] == 1


@pytest.mark.parametrize(
    ("processes", "count"),
    [(1, 2), pytest.param(1, 25, marks=pytest.mark.slow), pytest.param(2, 10, marks=pytest.mark.slow)],
)
def test_crash_images_are_resumed_bit_for_bit_and_damage_is_named(tmp_path: Path, processes: int, count: int) -> None:
    figures, draw = Crashes(), random.Random(processes)
    images = Images(write_corpus(tmp_path), processes, draw, figures, print)
    try:
        damage_files(images.calm, 10 * count, draw, figures, "damage")
        images.cut(count)
        images.kill(count)
        # The last one of many is alone, and has an image too.
        kills = figures.done[f"kill of {processes}"]
        images.kill(1)
        assert figures.done[f"kill of {processes}"] == kills + 1
    finally:
        images.close()
    assert figures.wrong == []
    assert figures.done["damage"] >= 10 * count and figures.done[f"cut of {processes}"] > 0
    assert figures.done[f"kill of {processes}"] > 0 and figures.steps > 0


def test_what_was_synchronised_stays_when_more_is_appended() -> None:
    """Of the rest any part may be there, or zeros; a file that was written anew may be torn anywhere."""
    draw = random.Random(0)
    appended = Crash(number=1, root=0, names={}, synced={1: b"whole\n"}, contents={1: b"whole\nmore\n"})
    rewritten = Crash(number=1, root=0, names={}, synced={1: b"whole\n"}, contents={1: b"other\nmore\n"})
    some = {appended._content(1, "torn", draw) for _ in range(500)}
    assert all(content.startswith(b"whole\n") for content in some)
    assert {b"whole\n", b"whole\nmore\n", b"whole\nmo", b"whole\nmo\0\0\0"} <= some
    assert {b"", b"oth", b"whole\n"} <= {rewritten._content(1, "torn", draw) for _ in range(500)}
    assert {how: appended._content(1, how, draw) for how in ("lost", "names")} == dict.fromkeys(
        ("lost", "names"), b"whole\n"
    )
