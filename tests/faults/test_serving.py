"""A seeded schedule of attacks and faults: a short one with an engine that echoes, a longer one with a model."""

from __future__ import annotations

import pytest

from tests.faults.serving import Bounds, run

#: Others may have the cores: a defect that these tests are for stops a server for many seconds, not for two.
BUSY = Bounds(gap_p999_s=2.0, gap_s=4.0, first_p99_s=10.0, first_s=20.0, health_s=4.0)


def test_no_client_stops_the_others_and_a_broken_engine_comes_back() -> None:
    report = run(1, 0.2, engine="echo", bounds=BUSY)
    assert report.broken == [] and len(report.faults) == 2


@pytest.mark.slow
def test_the_same_with_a_model_for_longer() -> None:
    report = run(2, 3.0, bounds=BUSY)
    assert report.broken == [] and len(report.faults) == 2
