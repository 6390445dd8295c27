"""Plans compiled with a release of libtpu, and planned with the habits of that release and of the one before.

    python bench/compiler/habit_plans.py RELEASE [NAME ... | --planned]

Run it with a Python whose JAX reads the programs of the release. Each plan is compiled ahead of time in an environment
with that libtpu (``rooftop compile --with``): no TPU, a minute or two each on two cores. Writes planned over compiled
time and memory into bench/results/habits.csv, one row for the habits of each release. ``--planned`` compiles nothing,
and plans again what the file has.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from compile import Case, case, write_rows
from habits import base_release

from rooftop.core.files import write_json
from rooftop.frameworks.framework import FrameworkName
from rooftop.frameworks.xla import release_number
from rooftop.plan.training.plan import TrainingPlan

RESULTS = Path(__file__).parents[1] / "results" / "habits.csv"
COLUMNS = (
    "name", "model", "layers", "slice", "mesh", "remat", "sequences", "seq_len", "libtpu", "jax", "habits",
    "planned_s", "compiled_s", "time_ratio", "planned_peak_bytes", "compiled_peak_bytes", "memory_ratio", "date",
)  # fmt: skip
CASES = (
    case("v5e", "llama3.2-1b", "v5e:4x4", "fsdp=16", "block", 32, seq_len=2048),
    case("v5p", "llama3.2-1b", "v5p:2x2x4", "fsdp=4,tensor=4", "block", 32, seq_len=2048),
    case("v6e", "llama3.2-3b", "v6e:2x4", "fsdp=8", "block", 32, seq_len=2048),
    case("tpu7x", "llama3.2-1b", "tpu7x:2x2x1", "fsdp=8", "block", 32, seq_len=2048),
    case("mixture", "mixtral-8x7b", "v6e:4x4", "fsdp=4,expert=4", "block", 32, seq_len=2048, layers=4),
)


def main(release: str, names: list[str], *, compiles: bool) -> None:
    """Compile the plans, and write their rows."""
    known, order = {one.name: one for one in CASES}, {one.name: at for at, one in enumerate(CASES)}
    rows = _read()
    for name in names or known:
        plan = known[name].plan
        earlier = [row for row in rows if (row["name"], row["libtpu"]) == (name, release)]
        if not compiles and not earlier:
            continue
        compiled = _compiled(plan, release) if compiles else earlier[0]
        again = list(_rows(known[name], plan, release, compiled))
        rows = [row for row in rows if row not in earlier] + again
        write_rows(RESULTS, COLUMNS, sorted(rows, key=lambda row: (release_number(row["libtpu"]), order[row["name"]])))
        for row in again:
            print(*(row[column] for column in ("name", "habits", "time_ratio", "memory_ratio")), flush=True)


def _read() -> list[dict[str, Any]]:
    if not RESULTS.exists():
        return []
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _compiled(plan: TrainingPlan, release: str) -> dict[str, Any]:
    """The columns of a plan that is compiled with a release."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        write_json(path, plan.to_json())
        command = ["compile", str(path), "--with", f"libtpu=={release}", "--timeout", "30m", "--json"]
        done = subprocess.run([sys.executable, "-m", "rooftop", *command], capture_output=True, text=True)
    if not done.stdout:
        sys.exit(done.stderr)
    data = json.loads(done.stdout)
    return {
        "libtpu": data["versions"]["libtpu"],
        "jax": data["versions"]["jax"],
        "compiled_s": data["step"]["expected_s"],
        "compiled_peak_bytes": data["peak_bytes"],
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }


def _rows(one: Case, plan: TrainingPlan, release: str, compiled: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for the habits of each release."""
    seconds, nbytes = float(compiled["compiled_s"]), float(compiled["compiled_peak_bytes"])
    for habits in dict.fromkeys((base_release(release), release)):
        planned = replace(plan, problem=replace(plan.problem, framework=FrameworkName(release=habits)))
        yield {
            **{name: compiled[name] for name in ("libtpu", "jax", "date")},
            **{
                name: getattr(one, name) for name in ("name", "model", "slice", "mesh", "remat", "sequences", "seq_len")
            },
            "layers": plan.problem.model.layers,
            "habits": habits,
            "planned_s": f"{planned.expected_s:.6g}",
            "compiled_s": f"{seconds:.6g}",
            "time_ratio": f"{planned.expected_s / seconds:.3f}",
            "planned_peak_bytes": f"{planned.memory_bytes:.0f}",
            "compiled_peak_bytes": f"{nbytes:.0f}",
            "memory_ratio": f"{planned.memory_bytes / nbytes:.3f}",
        }


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("python bench/compiler/habit_plans.py RELEASE [NAME ... | --planned]")
    main(sys.argv[1], [name for name in sys.argv[2:] if name != "--planned"], compiles="--planned" not in sys.argv)
