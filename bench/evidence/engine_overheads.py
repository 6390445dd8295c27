"""Measure which overheads of engines carry over to other models: ``python bench/evidence/engine_overheads.py``.

Each subset of the four terms (``rooftop.frameworks.engines.Overheads``) is fitted on all models but one, and predicts
the benchmarks of that one. ``bench/results/engine_overheads.csv`` has the errors by engine and subset, of all chips and
of each. The overheads that fit the models without each one, in the terms that the engine's file has, are written to
``rooftop/validation/data/left_out_overheads.toml``, and those that fit all models are printed for
``rooftop/frameworks/data``. ``--judge TABLE`` adds the errors of another table's rows with the latter.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rooftop import validation
from rooftop.frameworks.engines import Overheads
from rooftop.plan.evidence import model_key
from rooftop.validation.engine_runs import load_engine_runs
from rooftop.validation.engines import EnginePrediction, predictions
from rooftop.validation.overheads import TERMS, OverheadErrors, fitted_terms

RESULTS = Path(__file__).parents[1] / "results" / "engine_overheads.csv"
LEFT_OUT = Path(validation.__file__).with_name("data") / "left_out_overheads.toml"
COLUMNS = (
    *("engine", "terms", "chip", "models", "runs", "tpot_mean", "tpot_median", "ttft_mean", "ttft_median"),
    *("judged_runs", "judged_tpot_mean", "judged_tpot_median", "judged_ttft_mean", "judged_ttft_median"),
)


def main() -> None:
    """Fit, write the table and the overheads of other models, and print those of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--judge", type=Path, help="A table of other benchmarks, that nothing is fitted on.")
    judge = parser.parse_args().judge
    runs, _ = load_engine_runs()
    by_engine = _by_engine(predictions(runs)[0])
    judged = {} if judge is None else _by_engine(predictions(load_engine_runs(judge)[0])[0])
    rows: list[dict[str, object]] = []
    lines = [
        "# Overheads in seconds that fit the benchmarks of an engine without those of one model, by the model's sizes:",
        "# written by bench/evidence/engine_overheads.py. The level 'left_out' of `rooftop validate` has them.",
    ]
    for engine, priced in sorted(by_engine.items()):
        errors = OverheadErrors.of(priced)
        others = OverheadErrors.of(judged[engine]) if engine in judged else None
        for count in range(len(TERMS) + 1):
            for terms in combinations(TERMS, count):
                rows += _rows(engine, terms, errors, others)
        in_file = fitted_terms(priced[0].overheads)
        print(f"{engine} {_figures(errors.fit(in_file))}")
        lines += ["", f"[{engine}]"]
        lines += [f'"{model}" = {_figures(errors.fit(in_file, model))} # {name}' for model, name in _models(priced)]
    LEFT_OUT.write_text("\n".join(lines) + "\n", encoding="utf-8")
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(f"{len(rows)} rows in {RESULTS}")


def _by_engine(priced: Sequence[EnginePrediction]) -> dict[str, list[EnginePrediction]]:
    engines: dict[str, list[EnginePrediction]] = {}
    for one in priced:
        engines.setdefault(one.run.engine, []).append(one)
    return engines


def _models(priced: Sequence[EnginePrediction]) -> Iterator[tuple[str, str]]:
    yield from sorted({model_key(one.run.model): one.run.model.name for one in priced}.items())


def _figures(overheads: Overheads) -> str:
    figures = ", ".join(f"{name} = {figure:.3g}" for name, figure in asdict(overheads).items() if figure)
    return f"{{ {figures} }}"


def _rows(
    engine: str, terms: Sequence[str], errors: OverheadErrors, others: OverheadErrors | None
) -> Iterator[dict[str, object]]:
    """The errors of an engine with some terms, of all chips and of each."""
    tpot, ttft = errors.left_out(terms)
    of_runs = np.array([run.generate_on.slice.chip.name for run in errors.runs])
    judged: Mapping[str, object] = {}
    if others is not None:
        chosen = errors.place(terms)
        judged = {"judged_runs": len(others.runs)} | _errors(*others.at(chosen), prefix="judged_")
    for chip in ("all", *sorted(set(of_runs.tolist()))):
        here = np.ones(len(of_runs), dtype=bool) if chip == "all" else of_runs == chip
        yield {
            "engine": engine,
            "terms": "+".join(term.removesuffix("_s") for term in terms) or "none",
            "chip": chip,
            "models": len(set(errors.models[here].tolist())),
            "runs": int(here.sum()),
            **_errors(tpot[here], ttft[here]),
            **(judged if chip == "all" else {}),
        }


def _errors(tpot: npt.NDArray[np.float64], ttft: npt.NDArray[np.float64], prefix: str = "") -> dict[str, object]:
    """Mean and median absolute errors in %."""
    return {
        f"{prefix}{metric}_{name}": f"{100 * float(function(np.abs(values))):.1f}"
        for metric, values in (("tpot", tpot), ("ttft", ttft))
        for name, function in (("mean", np.mean), ("median", np.median))
    }


if __name__ == "__main__":
    main()
