"""The soak: its plots, and a short one."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from dataclasses import fields, replace
from pathlib import Path

import pytest

from rooftop.present.svg import lines_file
from tests.faults.serving import Sample
from tests.faults.soak import gaps_chart, memory_chart, soak
from tests.faults.test_serving import BUSY

SAMPLE = Sample(
    minute=0.5, requests=10, faults=0, tokens=100, gap_p50_s=0.002, gap_p999_s=0.02, gap_s=0.05, first_p50_s=0.1,
    first_s=0.2, health_s=0.01, memory_mib=150.0, engine_memory_mib=500.0, descriptors=20, engine_descriptors=10,
    pages=3, running=1, load=1.0,
)  # fmt: skip


def test_plots_have_the_figures_and_the_faults() -> None:
    samples = [
        SAMPLE,
        replace(SAMPLE, minute=1.0, faults=1, gap_s=0.5, gap_p999_s=0.1),
        replace(SAMPLE, minute=1.5, faults=1),
    ]
    gaps, memory = gaps_chart(samples), memory_chart(samples)
    assert [series.name for series in gaps.series] == ["longest", "p99.9", "median"]
    assert gaps.series[1].points == ((0.5, 0.02), (1.0, 0.1), (1.5, 0.02))
    assert gaps.marks == ((0.5, "the engine is broken"),)
    assert memory.series[0].points[0] == (0.5, 500 * 2**20)
    for chart in (gaps, memory):
        assert ET.fromstring(lines_file(chart, chart.title)).tag.endswith("svg")


@pytest.mark.slow
def test_a_short_soak_leaves_its_figures(tmp_path: Path) -> None:
    assert soak(3, 1.2, tmp_path, engine="echo", bounds=BUSY)
    with (tmp_path / "soak.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows and {field.name for field in fields(Sample)} <= set(rows[0])
    report = json.loads((tmp_path / "soak.json").read_text())
    assert report["serving"]["broken"] == [] and report["training"]["status"] == 0
    assert {path.name for path in tmp_path.iterdir()} >= {"soak-gaps.svg", "soak-memory.svg"}
