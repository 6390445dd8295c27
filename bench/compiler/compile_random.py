"""Recommended plans drawn at random, next to their compiled programs: does what is recommended compile as planned?

    python bench/compiler/compile_random.py [--seed N [--count K | --only I [I ...]] [--again]]

Models, slices, sequence lengths and batches are drawn; the search does the rest, and XLA:TPU compiles its answer ahead
of time (no TPU; one at a time, a minute or several each). A draw whose plan does not fit, or that no program runs, is
drawn again. Writes bench/results/compile_random.csv, a row at a time, and prints a table. Rows that the file has are
not compiled again, except with ``--again``; ``--only`` picks single draws of a seed. Without a seed nothing is
compiled: all rows get today's planned time and memory, and are the table of docs/evidence/accuracy.md.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from compile import COLUMNS, PAGE, compiled_figures, priced_again, put, read_rows, table, write_rows

from rooftop.core.errors import RooftopError
from rooftop.frameworks.framework import framework_of
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload

RESULTS = Path(__file__).parents[1] / "results" / "compile_random.csv"
MODELS = (
    "deepseek-v2-lite", "gemma2-9b", "gemma3-4b", "gpt-oss-20b", "llama2-7b", "llama2-13b", "llama3-8b", "llama3-70b",
    "llama3.2-1b", "llama3.2-3b", "mistral-7b", "mixtral-8x7b", "qwen2.5-7b", "qwen2.5-32b", "qwen3-0.6b",
    "qwen3-30b-a3b", "qwen3-8b", "qwen3-32b",
)  # fmt: skip
SLICES = {
    "v5e": ("4x4", "4x8", "8x8", "8x16", "4x4@2"),
    "v5p": ("2x2x2", "2x2x4", "4x4x4", "4x4x8"),
    "v6e": ("2x4", "4x4", "4x8", "8x8", "4x4@2"),
    "tpu7x": ("2x2x1", "2x2x2", "2x2x4", "4x4x4"),
}
LENGTHS = (2048, 4096, 8192, 16384)
#: Tokens of a device and step.
TOKENS = (1024, 2048, 4096, 8192, 16384)


@dataclass(frozen=True)
class Draw:
    """The ``index``-th plan of a seed."""

    seed: int
    index: int

    @property
    def name(self) -> str:
        """The row's name."""
        return f"{self.seed}-{self.index}"

    @cached_property
    def plan(self) -> TrainingPlan:
        """The recommended plan of the first job drawn that fits and that a program runs."""
        numbers = random.Random(f"{self.seed}-{self.index}")
        while True:
            model, kind = load_model(numbers.choice(MODELS)), numbers.choice(list(SLICES))
            slice_ = Slice.parse(f"{kind}:{numbers.choice(SLICES[kind])}")
            length, tokens = numbers.choice(LENGTHS), numbers.choice(TOKENS) * slice_.devices
            if length > model.max_seq_len:
                continue
            workload = Workload(batch_tokens=max(tokens, length), seq_len=length)
            try:
                plan = plan_training(Problem(model=model, slice=slice_, workload=workload), alternatives=0).plan
            except RooftopError:
                continue
            if plan.fits and not plan.obstacles:
                return plan

    @property
    def row(self) -> dict[str, Any]:
        """One line of the table: the plan and its compiled program."""
        plan = self.plan
        problem, summary = plan.problem, plan.summary
        return {
            "name": self.name,
            "model": problem.model.name,
            "slice": problem.slice.name,
            "mesh": ",".join(f"{axis}={size}" for axis, size in summary.mesh.items()),
            "remat": summary.remat,
            "microbatches": summary.microbatches,
            "sequences": problem.workload.batch_seqs,
            "seq_len": problem.workload.seq_len,
            "attention": problem.assumptions.attention,
            "optimizer": problem.numerics.optimizer,
            "matmul": problem.numerics.matmul,
            "collective_matmuls": "yes" if summary.collective_matmuls else "",
            "experts_over_tensor": "yes" if plan.choice.experts_over_tensor else "",
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
        } | compiled_figures(plan)


def summary(rows: Iterable[Mapping[str, Any]]) -> str:
    """Distribution of the figures over the rows, in a few lines."""
    every = list(rows)
    compiled = [line for line in every if line["compiled_s"]]
    done = [line for line in compiled if not _is_tight(line)]
    lines = [f"- {len(every)} plans; {len(every) - len(compiled)} do not compile or do not fit."]
    tight = [line for line in compiled if _is_tight(line)]
    if tight:
        ratios = ((row["name"], float(row["planned_s"]) / float(row["compiled_s"])) for row in tight)
        bounds = ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios)
        lines.append(f"- {len(tight)} leave no room in HBM, and their time is too short: {bounds}. Of the others:")
    for name, what in (("flops", "matmul FLOPs"), ("peak_bytes", "peak memory"), ("s", "expected time")):
        ratios = sorted(float(line[f"planned_{name}"]) / float(line[f"compiled_{name}"]) for line in done)
        near = sum(0.95 <= ratio <= 1.05 for ratio in ratios)
        if ratios:
            lines.append(
                f"- {what}: {ratios[0]:.3f} to {ratios[-1]:.3f}, median {median(ratios):.3f}; {near} of {len(ratios)} "
                "within 5 %."
            )
    again = [line for line in compiled if float(line["rematerialised_s"] or 0) > 0.001 * float(line["compiled_s"])]
    lines.append(f"- {len(again)} with work that XLA repeats unasked.")
    return "\n".join(lines)


def _is_tight(line: Mapping[str, Any]) -> bool:
    """True for a plan that leaves the compiler no room in HBM."""
    chip = Slice.parse(line["slice"]).chip
    room = framework_of("rooftop", chip=chip).habits.headroom
    return float(line["planned_peak_bytes"]) > (1 - room) * chip.hbm_usable_bytes


def _order(name: str) -> tuple[int, ...]:
    """Seed and index of a row's name."""
    return tuple(map(int, name.split("-")))


def main() -> None:
    """Draw, compile and compare, one after another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--count", type=int, default=12, help="the first COUNT draws")
    parser.add_argument("--only", type=int, nargs="+", metavar="I", help="these draws instead")
    parser.add_argument("--again", action="store_true", help="compile rows that the file has already")
    options = parser.parse_args()
    if options.seed is None:
        rows = {name: priced_again(line) if line["compiled_s"] else line for name, line in read_rows(RESULTS).items()}
        write_rows(RESULTS, COLUMNS, rows.values())
        put(PAGE, "compile_random.py", shown(rows.values()))
        print(shown(rows.values()))
        return
    draws = [Draw(options.seed, index) for index in options.only or range(options.count)]
    for draw in draws:
        if options.again or draw.name not in read_rows(RESULTS):
            line = {column: "" for column in COLUMNS} | draw.row
            print(f"{draw.name}: {line['note'] or line['differs'] or 'as planned'}", file=sys.stderr, flush=True)
            # Other processes may have written rows while this one compiled.
            rows = {**read_rows(RESULTS), draw.name: line}
            write_rows(RESULTS, COLUMNS, (rows[name] for name in sorted(rows, key=_order)))
    known = read_rows(RESULTS)
    print(shown([known[draw.name] for draw in draws]))


def shown(rows: Collection[Mapping[str, Any]]) -> str:
    """The table and its summary, in Markdown."""
    return f"{table(rows)}\n\n{summary(rows)}"


if __name__ == "__main__":
    main()
