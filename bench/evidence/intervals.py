"""Write bench/results/intervals.csv: how often intervals hold published runs of models that they were not learnt from.

``python bench/evidence/intervals.py`` takes some seconds and no accelerator. A row is a phase, chip and kind of model:
the runs that have an interval, the share of them that it holds, and its median width as a share of the expected time.
The interval is that of a plan without the runs of the run's model; it is ``scaled`` by all other runs of the kind, or
by those of other models (``by_models``), or not (``effects``). ``score`` is the interval score of the logarithm at 90 %
(Gneiting and Raftery 2007) of scaled intervals.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np

from rooftop.plan.evidence import Evidence, MeasuredRatio, left_out_evidence, measured_ratios
from rooftop.validation.engines import METRICS

_COLUMNS = ("phase", "chip", "kind", "runs", "models", "scaled", "by_models", "effects", "width", "score")


def interval(evidence: Evidence) -> tuple[float, float]:
    """The edges of measured / expected, which hold the expectation."""
    edges = evidence.interval_s(1.0)
    assert edges is not None
    return edges


def held(runs: Sequence[MeasuredRatio], intervals: Sequence[tuple[float, float]]) -> str:
    """The share of runs inside their intervals."""
    inside = (low <= run.ratio <= high for run, (low, high) in zip(runs, intervals, strict=True))
    return f"{fmean(inside):.3f}"


def score(run: MeasuredRatio, edges: tuple[float, float]) -> float:
    """The interval score of one run, logarithmic."""
    low, high = np.log(edges)
    place = np.log(run.ratio)
    return float(high - low + 20 * max(low - place, place - high, 0.0))


def main() -> None:
    """Compare intervals with runs, and write the table."""
    path = Path(__file__).parents[1] / "results" / "intervals.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for name, phases in (("evidence.csv", ("train",)), ("engine_evidence.csv", METRICS)):
            runs = measured_ratios(name)
            ways = (left_out_evidence(runs), left_out_evidence(runs, "models"), left_out_evidence(runs, None))
            of = [
                (run, tuple(map(interval, evidence)))
                for run, *evidence in zip(runs, *ways, strict=True)
                if run.phase in phases and evidence[0].factor is not None
            ]
            for category in sorted({run.category for run, _ in of}):
                members = [run for run, _ in of if run.category == category]
                scaled, by_models, plain = zip(*(edges for run, edges in of if run.category == category), strict=True)
                row = dict(zip(("phase", "chip", "kind"), category, strict=True)) | {
                    "runs": len(members),
                    "models": len({run.model for run in members}),
                    "scaled": held(members, scaled),
                    "by_models": held(members, by_models),
                    "effects": held(members, plain),
                    "width": f"{median(high - low for low, high in scaled):.3f}",
                    "score": f"{fmean(map(score, members, scaled)):.3f}",
                }
                writer.writerow(row)
                print(" | ".join(str(value) for value in row.values()))


if __name__ == "__main__":
    main()
