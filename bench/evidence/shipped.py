"""Recipes that Megatron-Bridge publishes, priced by name: which are read and why others are not, next to the search.

``python bench/evidence/shipped.py`` writes bench/results/shipped.csv: for each recipe its step by the same price as the
best plan of the search for its job, and if its configuration is read again as it was written.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rooftop.core.errors import RooftopError
from rooftop.frameworks.recipes import recipes
from rooftop.frameworks.words.configurations import configuration_of, stated_step, written_words
from rooftop.hardware import Slice, chip
from rooftop.plan.training.answer import search_of
from rooftop.plan.training.plan import TrainingPlan
from rooftop.requests.configured import configured_request
from rooftop.requests.planning import PlanTraining
from rooftop.requests.problems import training_problem

RESULTS = Path(__file__).parents[1] / "results" / "shipped.csv"
COLUMNS = ("name", "model", "slice", "dtype", "outcome", "step_s", "best_s", "rank", "read_again")


def slice_of(row: Mapping[str, str]) -> Slice:
    """The slice of a recipe: as many GPUs of a node, or of a rack, as divide its number. Raises RooftopError."""
    known, gpus = chip(row["chip"]), int(row["gpus"])
    node = max(math.prod(shape) for shape in known.slice_shapes if gpus % math.prod(shape) == 0)
    return Slice(known, (node, gpus // node))


def planned(name: str, row: Mapping[str, str]) -> tuple[TrainingPlan, list[float]]:
    """The plan of a recipe, and the steps of the best meshes of the search for its job. Raises RooftopError."""
    where = slice_of(row)
    request, _ = configured_request(PlanTraining(on=where, framework="megatron", configuration=name), where)
    problem = training_problem(request, where)
    searched = search_of(problem)
    plan = searched.plan(searched.best)
    free = replace(problem, axes=None, remat=None, microbatches=None, schedule=None, chunks=None)
    best = search_of(free, ranked=10)
    seconds = [float(best.expected_s[best.best]), *(float(best.expected_s[at]) for at in best.alternatives(9))]
    return plan, seconds


def read_again(plan: TrainingPlan) -> bool:
    """True if the configuration of a plan is read as the same configuration."""
    configuration = configuration_of(plan.configured)
    assert configuration is not None
    stated = stated_step("megatron", configuration.files["train.sh"], plan.problem.slice, plan.problem.model)
    asked = {name: value for name, value in stated.fields.items() if value is not None}
    request = PlanTraining(stated.model, on=plan.problem.slice, framework="megatron", **asked)  # type: ignore[arg-type]
    searched = search_of(training_problem(request, plan.problem.slice))
    return written_words(searched.plan(searched.best).configured) == written_words(plan.configured)


def row_of(name: str, row: Mapping[str, str]) -> dict[str, object]:
    """The row of a recipe."""
    facts: dict[str, object] = {"name": name, "model": row["model"], "dtype": " ".join((row["dtype"], row["scaling"]))}
    try:
        plan, seconds = planned(name, row)
    except RooftopError as error:
        return facts | {"outcome": f"{error.field}: {error.accepted}"}
    outcome = "priced" if plan.fits else "does not fit"
    if plan.obstacles:
        return facts | {"slice": plan.problem.slice.name, "outcome": plan.obstacles[0]}
    rank = 1 + sum(second < plan.expected_s * (1 - 1e-6) for second in seconds)
    return facts | {
        "slice": plan.problem.slice.name,
        "outcome": outcome,
        "step_s": f"{plan.expected_s:.4g}",
        "best_s": f"{min(seconds):.4g}",
        "rank": rank if rank <= len(seconds) else "",
        "read_again": "yes" if read_again(plan) else "no",
    }


def main() -> None:
    """Write the table, and print its sums."""
    rows = [row_of(name, row) for name, row in recipes("megatron").items()]
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    priced = [row for row in rows if row.get("step_s")]
    fitting = [row for row in priced if row["outcome"] == "priced"]
    gains = sorted(float(str(row["step_s"])) / float(str(row["best_s"])) - 1 for row in fitting)
    print(f"{len(rows)} recipes, {len(priced)} priced, {len(fitting)} of them fit by plan")
    print(f"read again as written: {sum(row['read_again'] == 'yes' for row in priced)} of {len(priced)}")
    print(f"among the ten best meshes of the search: {sum(bool(row['rank']) for row in fitting)} of {len(fitting)}")
    print(
        f"the search is slower: {sum(gain < -1e-6 for gain in gains)}; faster by {gains[len(gains) // 2]:.1%} (median)"
    )


if __name__ == "__main__":
    main()
