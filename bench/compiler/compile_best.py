"""Plans that XLA chooses among the best of the planner: dense models and mixtures on v5e, v5p, v6e and TPU7x.

    python bench/compiler/compile_best.py [NAME ...] [--compile 5]

Plans each job with ``rooftop plan train --compile N`` and writes bench/results/compile_best.csv, a row at a time: the
planner's first and the plan that compiling chose, what both take, and what was gained. NAME picks jobs (all of them
otherwise); rows of the others stay. Compilations are kept in the user's cache, so that a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import csv
import io
import shlex
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rooftop
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import write_text
from rooftop.plan.training.compiled import CompiledCandidate, CompiledPlans

RESULTS = Path(__file__).parents[1] / "results" / "compile_best.csv"
JOBS: Mapping[str, Mapping[str, Any]] = {
    "v5e-1b": {"model": "llama3.2-1b", "on": "v5e:4x4", "batch_seqs": 16},
    "tpu7x-1b": {"model": "llama3.2-1b", "on": "tpu7x:2x2x1", "batch_seqs": 16},
    "v6e-3b": {"model": "llama3.2-3b", "on": "v6e:2x4", "batch_seqs": 16},
    "v5p-8b": {"model": "llama3-8b", "on": "v5p:2x2x4", "batch_seqs": 32},
    "v5e-mixtral-1b": {"model": "mixtral:1B", "on": "v5e:4x4", "batch_seqs": 32},
    "v5p-deepseek-lite": {"model": "deepseek-v2-lite", "on": "v5p:2x2x4", "batch_seqs": 32},
    "v6e-8b": {"model": "llama3-8b", "on": "v6e:4x4", "batch_seqs": 32},
    "tpu7x-qwen3-8b": {"model": "qwen3-8b", "on": "tpu7x:2x2x2", "batch_seqs": 32},
    "v5e-8b": {"model": "llama3-8b", "on": "v5e:8x8", "batch_seqs": 32, "seq": 2048},
    "v6e-gpt-oss": {"model": "gpt-oss-20b", "on": "v6e:4x8", "batch_seqs": 64},
}
COLUMNS = (
    "name", "compiled", "first", "first_planned_s", "first_compiled_s", "chosen", "chosen_planned_rank",
    "chosen_planned_s", "chosen_compiled_s", "gain_percent", "all_planned_s", "all_compiled_s", "compile_s", "note",
    "command", "jax", "libtpu", "date",
)  # fmt: skip


def row(name: str, count: int) -> dict[str, Any]:
    """One line of the table."""
    request = rooftop.PlanTraining(**JOBS[name], compile=count)
    line = {"name": name, "command": shlex.join(request.command()), "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    try:
        compiled = rooftop.plan_training(request).compiled
    except (RooftopError, Infeasible) as error:
        return line | {"note": str(error)}
    if compiled is None:
        return line | {"note": "the best plan does not fit"}
    versions = {package: compiled.versions[package] for package in ("jax", "libtpu")}
    return line | versions | figures(compiled)


def figures(compiled: CompiledPlans) -> dict[str, Any]:
    """The planner's first, the plan that compiling chose, and all candidates in the planner's order."""
    first, best = compiled.candidates[0], compiled.best
    line: dict[str, Any] = {
        "compiled": len(compiled.candidates),
        "first": first.name,
        "first_planned_s": first.plan.expected_s,
        "first_compiled_s": first.compiled_s,
        "all_planned_s": " ".join(f"{candidate.plan.expected_s:.4g}" for candidate in compiled.candidates),
        "all_compiled_s": " ".join(map(_compiled, compiled.candidates)),
        "compile_s": sum(candidate.seconds for candidate in compiled.candidates),
        "note": compiled.verdict,
    }
    if best is None:
        return line
    line |= {
        "chosen": best.name,
        "chosen_planned_rank": best.planned_rank,
        "chosen_planned_s": best.plan.expected_s,
        "chosen_compiled_s": best.compiled_s,
    }
    if first.compiled_s is not None and best.compiled_s is not None:
        line["gain_percent"] = f"{100 * (1 - best.compiled_s / first.compiled_s):.2f}"
    return line


def _compiled(candidate: CompiledCandidate) -> str:
    """Seconds of a compiled step; 'none' for a candidate that does not fit or was refused."""
    return "none" if candidate.compiled_s is None else f"{candidate.compiled_s:.4g}"


def main() -> None:
    """Plan the jobs, one after another."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*JOBS, []], default=[])
    parser.add_argument("--compile", type=int, default=5)
    asked = parser.parse_args()
    for name in asked.names or JOBS:
        line = row(name, asked.compile)
        print(f"{name}: {line['note']}", flush=True)
        # Another run may have written rows since.
        rows = {**_rows(), name: line}
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[job] for job in JOBS if job in rows)
        write_text(RESULTS, text.getvalue())


def _rows() -> dict[str, Mapping[str, Any]]:
    """The rows of the table by name; none if there is no table yet."""
    if not RESULTS.exists():
        return {}
    with RESULTS.open(encoding="utf-8", newline="") as file:
        return {line["name"]: line for line in csv.DictReader(file)}


if __name__ == "__main__":
    main()
