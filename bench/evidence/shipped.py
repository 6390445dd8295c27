"""Recipes that frameworks ship, priced by name: which are read and why others are not, next to the search.

``python bench/evidence/shipped.py`` writes bench/results/shipped.csv: for each recipe its step by the same price as the
best plan of the search for its job, and if its configuration is read again as it was written. Recipes of
Megatron-Bridge name their GPUs. A configuration of MaxText that names no slice, and those of torchtitan, stand on the
smallest slice on which they fit, of a power of two of the chip, or of nodes of 8 H100.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rooftop.core.errors import RooftopError
from rooftop.frameworks.framework import FRAMEWORKS
from rooftop.frameworks.recipes import recipes
from rooftop.frameworks.words.configurations import configuration_of, stated_step, written_words
from rooftop.hardware import Slice, chip, slice_sizes
from rooftop.plan.training.answer import search_of
from rooftop.plan.training.plan import TrainingPlan
from rooftop.requests.configured import configured_request
from rooftop.requests.planning import PlanTraining
from rooftop.requests.problems import training_problem

RESULTS = Path(__file__).parents[1] / "results" / "shipped.csv"
COLUMNS = ("framework", "name", "model", "slice", "dtype", "outcome", "step_s", "best_s", "rank", "read_again")


#: The most chips of a slice that is searched for, and chips of TPU slices that are named by their cores.
MOST_CHIPS = 1024
CORES = {"v4": 2, "v5p": 2}


def slices_of(framework: str, row: Mapping[str, str]) -> Iterator[Slice]:
    """Slices that a recipe may stand on, the smallest first. Raises RooftopError for a chip that is not known."""
    known = chip(row.get("chip", "h100"))
    if framework == "torchtitan":
        yield from (Slice(known, (8, 2**power)) for power in range(MOST_CHIPS.bit_length() - 3))
    elif framework == "megatron":
        # As many GPUs of a node, or of a rack, as divide its number.
        gpus = int(row["gpus"])
        node = max(math.prod(shape) for shape in known.slice_shapes if gpus % math.prod(shape) == 0)
        yield Slice(known, (node, gpus // node))
    else:
        axes = dict(entry.split("=") for entry in row["dcn"].split())
        slices = math.prod(int(size) for size in axes.values() if size != "-1")
        named = int(row["slice"].rpartition("-")[2] or 0) // CORES.get(row["chip"], 1)
        for where in slice_sizes(known, MOST_CHIPS):
            if where.num_slices == 1 and (where.chips == named or (not named and where.chips.bit_count() == 1)):
                yield replace(where, num_slices=slices)


def planned(framework: str, name: str, where: Slice) -> TrainingPlan:
    """The plan of a recipe on a slice. Raises RooftopError."""
    request, _ = configured_request(PlanTraining(on=where, framework=framework, configuration=name), where)
    searched = search_of(training_problem(request, where))
    return searched.plan(searched.best)


def placed(framework: str, name: str, row: Mapping[str, str]) -> TrainingPlan:
    """The plan of a recipe on the smallest slice on which it fits and runs, or on the largest. Raises RooftopError."""
    plan, error = None, RooftopError("slice", row.get("slice", ""), "a slice of the chip")
    for where in slices_of(framework, row):
        try:
            plan = planned(framework, name, where)
        except RooftopError as refusal:
            error = refusal
            continue
        if plan.fits and not plan.obstacles:
            break
    if plan is None:
        raise error
    return plan


def best_seconds(plan: TrainingPlan) -> list[float]:
    """The steps of the best meshes of the search for the job of a plan."""
    free = replace(plan.problem, axes=None, remat=None, microbatches=None, schedule=None, chunks=None)
    best = search_of(free, ranked=10)
    return [float(best.expected_s[best.best]), *(float(best.expected_s[at]) for at in best.alternatives(9))]


def read_again(plan: TrainingPlan) -> bool:
    """True if the configuration of a plan is read as the same configuration."""
    configuration = configuration_of(plan.configured)
    assert configuration is not None
    framework = plan.problem.program.name
    (text,) = configuration.files.values()
    stated = stated_step(framework, text, plan.problem.slice, plan.problem.model)
    asked = {name: value for name, value in stated.fields.items() if value is not None}
    request = PlanTraining(stated.model, on=plan.problem.slice, framework=framework, **asked)  # type: ignore[arg-type]
    searched = search_of(training_problem(request, plan.problem.slice))
    return written_words(searched.plan(searched.best).configured) == written_words(plan.configured)


def row_of(framework: str, name: str, row: Mapping[str, str]) -> dict[str, object]:
    """The row of a recipe."""
    dtype = row.get("dtype") or row.get("quantization") or "+".join(filter(None, [row.get("converters")])) or "bf16"
    facts: dict[str, object] = {
        "framework": framework,
        "name": name,
        "model": row["model"],
        "dtype": " ".join(filter(None, (dtype, row.get("scaling")))),
    }
    try:
        plan = placed(framework, name, row)
    except RooftopError as error:
        return facts | {"outcome": f"{error.field}: {error.accepted}"}
    outcome = "priced" if plan.fits else "does not fit"
    if plan.obstacles:
        return facts | {"slice": plan.problem.slice.name, "outcome": plan.obstacles[0]}
    seconds = best_seconds(plan)
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
    rows = [row_of(framework, *entry) for framework in FRAMEWORKS[1:] for entry in recipes(framework).items()]
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for framework in FRAMEWORKS[1:]:
        shipped = [row for row in rows if row["framework"] == framework]
        priced = [row for row in shipped if row.get("step_s")]
        fitting = [row for row in priced if row["outcome"] == "priced"]
        gains = sorted(float(str(row["step_s"])) / float(str(row["best_s"])) - 1 for row in fitting)
        print(f"{framework}: {len(shipped)} recipes, {len(priced)} priced, {len(fitting)} of them fit by plan")
        print(f"  read again as written: {sum(row['read_again'] == 'yes' for row in priced)} of {len(priced)}")
        print(f"  among the ten best meshes of the search: {sum(bool(row['rank']) for row in fitting)}")
        print(f"  the search is slower: {sum(gain < -1e-6 for gain in gains)}", end="")
        print(f"; faster by {gains[len(gains) // 2]:.1%} (median)" if gains else "")


if __name__ == "__main__":
    main()
