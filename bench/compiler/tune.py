"""Options of XLA:TPU and changes of plans, ranked by compiling them: dense FSDP, dense tensor parallel, experts.

    python bench/compiler/tune.py [NAME ...] [--minutes 60] [--jobs 1] [--search NAMES] [--trials FOLDER]

Writes a row for every trial of the plans that were asked for to bench/results/tune.csv; rows of other plans stay. A
search that was ended goes on from its file in FOLDER (by default in the user's cache). ``small-`` plans have models of
fifty million parameters, attention blocks of 256 and SGD: they compile in a third of the time.
"""

from __future__ import annotations

import argparse
import csv
import io
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import rooftop
from rooftop.core.files import write_text

RESULTS = Path(__file__).parents[1] / "results" / "tune.csv"
PLANS: dict[str, dict[str, Any]] = {
    "dense": {"model": "llama3-8b", "on": "v5p:4x4x4", "mesh": "fsdp=64", "batch_tokens": "1Mi"},
    "tensor": {"model": "llama3-8b", "on": "v6e:4x4", "mesh": "fsdp=4,tensor=4", "batch_seqs": 32},
    "experts": {"model": "mixtral-8x7b", "on": "tpu7x:4x4x4", "mesh": "fsdp=16,expert=8", "batch_tokens": "1Mi"},
    "small-dense": {"model": "llama:50M", "on": "v5p:2x2x1", "mesh": "fsdp=4", "batch_seqs": 32},
    "small-tensor": {"model": "llama:50M", "on": "v6e:2x2", "mesh": "tensor=4", "batch_seqs": 32},
    "small-experts": {"model": "mixtral:50M", "on": "tpu7x:2x2x1", "mesh": "fsdp=2,expert=4", "batch_seqs": 64},
}
COLUMNS = (
    "name", "program", "rank", "change", "recipe", "end", "why", "expected_s", "estimated_s", "exposed_s", "peak_bytes",
    "gain_s", "gain_bytes", "layers", "compile_s", "jax", "libtpu", "date",
)  # fmt: skip


def plan_of(name: str) -> dict[str, Any]:
    """The plan of a case, as its JSON."""
    case = dict(PLANS[name])
    if name.startswith("small-"):
        case |= {"seq": 1024, "optimizer": "sgd", "remat": "none"}
    plan = rooftop.plan_training(case.pop("model"), **case).to_json()
    if name.startswith("small-"):
        plan["assumptions"] = {**plan["assumptions"], "attention_block": 256}  # type: ignore[dict-item]
    return plan


def rows(name: str, result: Any) -> list[dict[str, Any]]:
    """A row for each trial, the fastest first."""
    record, written = result.report.record(), []
    for entry in record.trials:
        trial = entry.trial
        written.append(
            {
                "name": name,
                "program": record.program,
                "rank": entry.rank,
                "change": trial.title,
                "recipe": entry.recipe,
                "end": trial.end,
                "why": entry.why,
                **{
                    key: getattr(trial, key)
                    for key in ("expected_s", "estimated_s", "exposed_s", "peak_bytes", "layers")
                },
                "gain_s": entry.gain_s,
                "gain_bytes": entry.gain_bytes,
                "compile_s": trial.seconds,
                "jax": record.versions["jax"],
                "libtpu": record.versions["libtpu"],
                "date": datetime.now(UTC).date().isoformat(),
            }
        )
    return written


def main() -> None:
    """Search, and write the trials."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*PLANS, []], default=[])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--search", default=None)
    parser.add_argument("--trials", type=Path, default=None)
    asked = parser.parse_args()
    for name in asked.names or [name for name in PLANS if not name.startswith("small-")]:
        result = rooftop.tune(
            plan_of(name),
            minutes=asked.minutes,
            jobs=asked.jobs,
            search=asked.search,
            layers="all",
            results=None if asked.trials is None else asked.trials / f"{name}.jsonl",
        )
        print(result, flush=True)
        known = []
        if RESULTS.exists():
            with RESULTS.open(encoding="utf-8", newline="") as file:
                known = [row for row in csv.DictReader(file) if row["name"] != name]
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows([*known, *rows(name, result)])
        write_text(RESULTS, text.getvalue())


if __name__ == "__main__":
    main()
