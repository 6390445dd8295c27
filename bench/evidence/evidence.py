"""Write rooftop/plan/evidence.csv and own_evidence.csv: published runs, measured over expected.

The first has each run as a plan of its framework expects it, the second as a plan of rooftop's own program.

Run it after each change of a figure of a plan: ``python bench/evidence/evidence.py``. No accelerator is needed.
"""

from pathlib import Path

import rooftop
from rooftop.plan import evidence
from rooftop.validation.accuracy import training_ratios
from rooftop.validation.predict import as_ours, planned, request_of
from rooftop.validation.serving import serving_ratios


def main() -> None:
    """Predict the published runs, and write their ratios."""
    result = rooftop.validate()
    compared = result.report.comparisons
    runs = [one.run for one in compared]
    serving = serving_ratios(result.serving.comparisons)
    for name, seconds in (
        ("evidence.csv", [one.uncalibrated_s for one in compared]),
        ("own_evidence.csv", [planned(as_ours(request_of(run))).expected_s for run in runs]),
    ):
        ratios = (*training_ratios(runs, seconds), *serving)
        path = Path(evidence.__file__).with_name(name)
        evidence.write_ratios(evidence.with_strays(ratios), path)
        print(f"{len(ratios)} runs in {path}")


if __name__ == "__main__":
    main()
