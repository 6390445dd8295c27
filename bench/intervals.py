"""Write bench/results/intervals.csv: how often intervals hold published runs of models that they were not learnt from.

``python bench/intervals.py`` takes a minute and no accelerator. A row is a kind of ``rooftop validate``: the runs that
have an interval, the share that it holds, the median width as a share of the expected time, and how many of so many
runs an interval holds, in nine cases of ten, that is right: if all runs were independent (``independent``), and if runs
of a model stray together as much as those of the table do (``correlated``). That is the share of the variance between
models and kinds in the places of runs in their intervals, by a one-way analysis of variance. ``aimed`` is the
probability that a right interval then holds 85 to 95 %.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, median

import numpy as np

import rooftop
from rooftop.plan.evidence import model_key
from rooftop.validation.engines import METRICS

_DRAWS = 20000
_COLUMNS = ("table", "kind", "runs", "models", "covered", "width", "independent", "correlated", "aimed")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A run in its interval, logarithmic: ``place`` is -1 at the 5th percentile and 1 at the 95th."""

    table: str
    kind: str
    model: str
    place: float
    width: float

    @classmethod
    def of(
        cls, table: str, kind: str, model: str, measured_s: float, interval_s: tuple[float, float], expected_s: float
    ) -> Place:
        """The place of a measured time."""
        low, high = np.log(interval_s)
        place = float((np.log(measured_s) - (low + high) / 2) / ((high - low) / 2))
        width = (interval_s[1] - interval_s[0]) / expected_s
        return cls(table=table, kind=kind, model=model, place=place, width=width)


def places() -> list[Place]:
    """The runs of ``rooftop validate`` that have an interval."""
    result = rooftop.validate()
    rows = []
    for one in result.report.comparisons:
        if one.interval_s is not None:
            experts = "" if one.run.model.moe is None else ", experts"
            chip = one.run.slice.chip.name
            kind, model = f"{chip}{experts}", model_key(one.run.model)
            rows.append(Place.of("training", kind, model, one.measured_s, one.interval_s, one.uncalibrated_s))
    for metric in METRICS:
        for load in result.engines.comparisons:
            interval_s, expected_s = load.interval_s[metric], load.seconds[metric]["expected"]
            if interval_s is not None and expected_s is not None:
                model = model_key(load.run.model)
                measured_s = load.measured_s(metric)
                rows.append(Place.of(metric, load.run.kind, model, measured_s, interval_s, expected_s))
    return rows


def correlation(rows: Sequence[Place]) -> float:
    """The share of the variance of places that runs of one kind and model have in common."""
    cells: dict[tuple[str, str], list[float]] = {}
    for one in rows:
        cells.setdefault((one.kind, one.model), []).append(one.place)
    sizes = np.array([len(cell) for cell in cells.values()])
    means = np.array([np.mean(cell) for cell in cells.values()])
    within = sum(float(np.sum((np.array(cell) - np.mean(cell)) ** 2)) for cell in cells.values())
    within /= sizes.sum() - len(sizes)
    typical = (sizes.sum() - np.sum(sizes**2) / sizes.sum()) / (len(sizes) - 1)
    between = (np.sum(sizes * (means - np.average(means, weights=sizes)) ** 2) / (len(sizes) - 1) - within) / typical
    return float(max(0.0, between) / (max(0.0, between) + within))


def shares_held(sizes: Sequence[int], share: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Shares that a right interval holds of models with so many runs each, drawn at random, in order.

    ``share`` of the variance is common to the runs of a model.
    """
    draw = np.random.default_rng(0)
    edge = NormalDist().inv_cdf(0.95)
    inside = np.zeros(_DRAWS)
    for size in sizes:
        common = np.sqrt(share) * draw.standard_normal((_DRAWS, 1))
        own = np.sqrt(1 - share) * draw.standard_normal((_DRAWS, size))
        inside += np.sum(np.abs(common + own) < edge, axis=1)
    return np.sort(inside / sum(sizes))


def main() -> None:
    """Compare intervals with runs, and write the table."""
    rows = places()
    path = Path(__file__).parent / "results" / "intervals.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for table in ("training", *METRICS):
            of_table = [one for one in rows if one.table == table]
            share = correlation(of_table)
            print(f"{table}: runs of a model in a kind have {share:.2f} of the variance in common")
            for kind in sorted({one.kind for one in of_table}):
                members = [one for one in of_table if one.kind == kind]
                models = [one.model for one in members]
                sizes = [models.count(model) for model in sorted(set(models))]
                alone, together = (shares_held(sizes, common) for common in (0.0, share))
                independent, correlated = (
                    f"{low:.0%} to {high:.0%}"
                    for low, high in (np.percentile(one, [5, 95]) for one in (alone, together))
                )
                row = {
                    "table": table,
                    "kind": kind,
                    "runs": len(members),
                    "models": len(sizes),
                    "covered": f"{np.mean([abs(one.place) <= 1 for one in members]):.3f}",
                    "width": f"{median(one.width for one in members):.3f}",
                    "independent": independent,
                    "correlated": correlated,
                    "aimed": f"{np.mean((together >= 0.85) & (together <= 0.95)):.2f}",
                }
                writer.writerow(row)
                print(" | ".join(str(value) for value in row.values()))


if __name__ == "__main__":
    main()
