"""Write rooftop/plan/engine_evidence.csv: ``python bench/evidence/engine_evidence.py``.

Run it after each change of a figure of an engine's steps, and after ``engine_overheads.py``. Each benchmark is
predicted by its plan, with the overheads that fit the runs of other models.
"""

from pathlib import Path

from rooftop.plan import evidence
from rooftop.validation.engine_runs import load_engine_runs
from rooftop.validation.engines import engine_comparisons, engine_ratios, predictions


def main() -> None:
    """Predict the benchmarks, and write their ratios."""
    priced, _ = predictions(load_engine_runs()[0])
    ratios = engine_ratios(engine_comparisons(priced, shipped=False))
    path = Path(evidence.__file__).with_name("engine_evidence.csv")
    evidence.write_ratios(evidence.with_strays(ratios), path)
    print(f"{len(ratios)} latencies in {path}")


if __name__ == "__main__":
    main()
