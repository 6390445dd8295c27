"""Seeded faults over training: a few in the quick tests, and more in the slow ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.training import Schedule


@pytest.mark.parametrize(
    ("seed", "count", "processes"), [(0, 3, (1,)), pytest.param(1, 40, (1, 2), marks=pytest.mark.slow)]
)
def test_faults_change_no_bit(tmp_path: Path, seed: int, count: int, processes: tuple[int, ...]) -> None:
    figures = Schedule(tmp_path, seed, print).run(count, processes=processes)
    assert figures.wrong == []
    assert figures.noticed == figures.damaged
    assert sum(figures.faults.values()) >= count and figures.steps >= 200
