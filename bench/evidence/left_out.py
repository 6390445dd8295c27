"""Write bench/results/left_out.csv: how often intervals of training hold runs when more than their model is left out.

``python bench/evidence/left_out.py`` takes a minute and no accelerator. A row is a price (as ``frameworks`` run, or as
``rooftop``'s program), a framework, a family of chips and kind of model, and what is left out with each run: its
model, its release (the source of its table), its framework, its chip, or the family of its chip. ``error`` is the mean
absolute error of the expected time, in %; ``with_interval`` are runs for which others of the chip and kind are left.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import fmean

from rooftop.core.records import field_values
from rooftop.frameworks.framework import family_of
from rooftop.plan.evidence import MeasuredRatio, Question, evidence_for, measured_ratios

_COLUMNS = ("price", "framework", "family", "kind", "left_out", "runs", "error", "with_interval", "inside")
_KEYS: Mapping[str, Callable[[MeasuredRatio], str]] = {
    "model": lambda run: run.model,
    "release": lambda run: run.run.partition("/")[0],
    "framework": lambda run: run.framework,
    "chip": lambda run: run.chip,
    "family": lambda run: family_of(run.chip),
}


def is_inside(run: MeasuredRatio, ratios: list[MeasuredRatio]) -> bool | None:
    """True if the interval that ``ratios`` give holds a run; None if they give none."""
    edges = evidence_for(Question(**field_values(run, Question)), ratios).interval_s(1.0)
    return None if edges is None else edges[0] <= run.ratio <= edges[1]


def main() -> None:
    """Leave runs out, and write the table."""
    path = Path(__file__).parents[1] / "results" / "left_out.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        for price, name in (("frameworks", "evidence.csv"), ("rooftop", "own_evidence.csv")):
            ratios = measured_ratios(name)
            trained = [run for run in ratios if run.phase == "train"]
            groups = dict.fromkeys((run.framework, run.family, run.kind) for run in trained)
            for left_out, key in _KEYS.items():
                is_held = {run.run: is_inside(run, [one for one in ratios if key(one) != key(run)]) for run in trained}
                for group in groups:
                    runs = [run for run in trained if (run.framework, run.family, run.kind) == group]
                    inside = [is_held[run.run] for run in runs if is_held[run.run] is not None]
                    row = dict(zip(("framework", "family", "kind"), group, strict=True)) | {
                        "price": price,
                        "left_out": left_out,
                        "runs": len(runs),
                        "error": f"{100 * fmean(abs(run.error) for run in runs):.1f}",
                        "with_interval": len(inside),
                        "inside": f"{fmean(map(bool, inside)):.2f}" if inside else "",
                    }
                    writer.writerow(row)
                    print(" | ".join(str(row[column]) for column in _COLUMNS))


if __name__ == "__main__":
    main()
