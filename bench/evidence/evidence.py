"""Write rooftop/plan/evidence.csv: each published run that rooftop predicts, measured over expected.

Run it after each change of a figure of a plan: ``python bench/evidence/evidence.py``. No accelerator is needed.
"""

from pathlib import Path

import rooftop
from rooftop.plan import evidence
from rooftop.validation.accuracy import training_ratios
from rooftop.validation.serving import serving_ratios


def main() -> None:
    """Predict the published runs, and write their ratios."""
    result = rooftop.validate()
    compared = result.report.comparisons
    ratios = (
        *training_ratios([one.run for one in compared], [one.uncalibrated_s for one in compared]),
        *serving_ratios(result.serving.comparisons),
    )
    path = Path(evidence.__file__).with_name("evidence.csv")
    evidence.write_ratios(evidence.with_strays(ratios), path)
    print(f"{len(ratios)} runs in {path}")


if __name__ == "__main__":
    main()
