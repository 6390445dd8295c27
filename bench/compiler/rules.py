"""The price of each rule about XLA: what plans lose without it.

    python bench/compiler/rules.py [NAME ...]

Rules are the habits that ``rooftop/frameworks/data`` gives to our program on XLA and to MaxText, and functions that
imitate one detail. Each is switched off alone, and compared:

- with all compiled plans (bench/results/compile*.csv, nothing is compiled again): mean absolute error of time and of
  memory, in %, and figures that move by more than 0.5 %, with their error;
- with published runs of MaxText on TPUs: mean absolute error of time, in %;
- with recommendations of ``JOBS``: the mean and the largest regret in %, the time of the plan that is then recommended
  over that of the plan recommended with all rules, both priced with all rules, and the plans that do not fit then.

Lines are those that would go: of functions, or of branches on the habit. Writes bench/results/rules.csv in ten minutes.
"""

from __future__ import annotations

import ast
import csv
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any
from unittest.mock import patch

from compile import problem_of

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import write_text
from rooftop.frameworks import framework
from rooftop.frameworks.habits import Habits
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.training import memory, step
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import SweepOptions, sweep
from rooftop.plan.training.work import attention
from rooftop.plan.training.work.optimizer import update
from rooftop.plan.training.workload import Workload
from rooftop.validation.predict import planned, request_of
from rooftop.validation.runs import PublishedRun, load_published

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench" / "results"
COLUMNS = (
    "rule", "lines", "moved", "moved_error", "moved_error_more", "time_error", "memory_error", "time_error_more",
    "memory_error_more", "published_error",
    "published_error_more", "regret_mean", "regret_max", "does_not_fit", "jobs_changed",
)  # fmt: skip

#: Habits that are no rules about XLA alone, and one that follows another.
_OTHERS = ("attention_kernel", "kernels", "weighs_outputs", "scatters_tiles")
#: Model, slice, batch in sequences and their length: jobs whose recommendation a rule may change.
JOBS = (
    ("llama3.2-1b", "v5e:2x2", 32, 2048),
    ("llama3-8b", "v5e:4x4", 64, 4096),
    ("llama3-8b", "v5e:8x8", 128, 8192),
    ("llama3-70b", "v5e:16x16", 256, 4096),
    ("qwen3-30b-a3b", "v5e:8x8", 256, 4096),
    ("llama3-8b", "v4:4x4x4", 256, 4096),
    ("llama3-8b", "v5p:2x2x4", 64, 4096),
    ("llama3-70b", "v5p:4x4x8", 256, 8192),
    ("llama3-70b", "v5p:4x4x4@2", 256, 4096),
    ("mixtral-8x7b", "v5p:4x4x4", 256, 4096),
    ("deepseek-v3", "v5p:8x8x16", 2048, 4096),
    ("llama3-70b", "v5p:16x16x16", 1024, 4096),
    ("llama3-70b", "v5p:16x20x28", 1024, 4096),
    ("llama2-13b", "v5p:8x16x16", 1024, 4096),
    ("llama3.1-405b", "v5p:16x20x28", 128, 131072),
    ("gpt-oss-120b", "v5p:4x8x8", 512, 4096),
    ("llama3-70b", "v6e:16x16@16", 4096, 4096),
    ("gemma2-9b", "v6e:4x4", 64, 8192),
    ("llama3-8b", "v6e:4x8", 128, 8192),
    ("llama3-70b", "v6e:16x16", 512, 8192),
    ("qwen3-30b-a3b", "v6e:8x8", 256, 4096),
    ("llama3-8b", "tpu7x:2x2x2", 64, 8192),
    ("llama3-70b", "tpu7x:4x4x4", 256, 8192),
    ("mixtral-8x7b", "tpu7x:4x4x4", 256, 4096),
    ("deepseek-v3", "tpu7x:4x8x8", 1024, 4096),
    ("llama3-8b", "h100:8", 64, 8192),
    ("llama3-70b", "h100:8x8", 256, 8192),
    ("mixtral-8x7b", "h100:8x4", 256, 4096),
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule with its name, the lines that would go, and a context in which plans do not have it."""

    name: str
    lines: int
    off: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """A compiled plan: the plan asked for again, and its compiled seconds and bytes."""

    problem: Problem
    seconds: float
    nbytes: float

    def again(self) -> tuple[float, float]:
        """Planned seconds and bytes."""
        swept = sweep(replace(self.problem))  # what a problem has cached has all rules
        at = swept.best
        return float(swept.expected_s[at]), float(swept.memory_bytes[at])


def compiled_rows() -> Iterator[Compiled]:
    """The plans of all tables that were compiled."""
    for name in ("compile", "compile_random", "compile_gpu"):
        with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as file:
            for row in csv.DictReader(file):
                if row["compiled_s"]:
                    yield Compiled(
                        problem=problem_of(row),
                        seconds=float(row["compiled_s"]),
                        nbytes=float(row["compiled_peak_bytes"]),
                    )


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Planned figures of all compiled plans and published runs, and the recommended plans of all jobs."""

    seconds: list[float]
    nbytes: list[float]
    published: list[float]
    recommended: list[TrainingPlan | None]


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """All that rules are compared with."""

    compiled: list[Compiled]
    published: list[PublishedRun]
    jobs: list[Problem]

    @cached_property
    def with_all(self) -> Figures:
        """Figures with all rules."""
        return self.figures()

    def figures(self) -> Figures:
        """Figures with the rules that are there now."""
        again = [one.again() for one in self.compiled]
        return Figures(
            seconds=[seconds for seconds, _ in again],
            nbytes=[nbytes for _, nbytes in again],
            published=[planned(request_of(run)).expected_s for run in self.published],
            recommended=[_recommended(job) for job in self.jobs],
        )

    def row(self, rule: Rule) -> dict[str, Any]:
        """The price of a rule."""
        before = self.with_all
        with rule.off():
            after = self.figures()
        moved = self._moved(before, after)
        regrets, unfit, changed = _regrets(before.recommended, after.recommended)
        errors = {
            name: [self._errors(figures)[name] for figures in (before, after)]
            for name in ("time", "memory", "published")
        }
        return {
            "rule": rule.name,
            "lines": rule.lines,
            "moved": len(moved),
            "moved_error": f"{100 * fmean([abs(old) for old, _ in moved] or [0.0]):.2f}",
            "moved_error_more": f"{100 * fmean([abs(new) - abs(old) for old, new in moved] or [0.0]):+.2f}",
            **{f"{name}_error": f"{old:.2f}" for name, (old, _) in errors.items()},
            **{f"{name}_error_more": f"{new - old:+.2f}" for name, (old, new) in errors.items()},
            "regret_mean": f"{100 * fmean(regrets):.2f}",
            "regret_max": f"{100 * max(regrets):.2f}",
            "does_not_fit": unfit,
            "jobs_changed": changed,
        }

    def _moved(self, before: Figures, after: Figures) -> list[tuple[float, float]]:
        """Relative errors, before and after, of times and of memory that move."""
        compiled_s, nbytes = ([getattr(one, name) for one in self.compiled] for name in ("seconds", "nbytes"))
        return [
            (old / true - 1, new / true - 1)
            for true_of, old_of, new_of in (
                (compiled_s, before.seconds, after.seconds),
                (nbytes, before.nbytes, after.nbytes),
            )
            for true, old, new in zip(true_of, old_of, new_of, strict=True)
            if abs(new / old - 1) > 0.005
        ]

    def _errors(self, figures: Figures) -> dict[str, float]:
        compiled_s = [one.seconds for one in self.compiled]
        return {
            "time": _mean_error(figures.seconds, compiled_s),
            "memory": _mean_error(figures.nbytes, [one.nbytes for one in self.compiled]),
            "published": _mean_error(figures.published, [run.step_s for run in self.published]),
        }


def _mean_error(expected: list[float], true: list[float]) -> float:
    """Mean absolute error in %."""
    return 100 * fmean(abs(one / other - 1) for one, other in zip(expected, true, strict=True))


def _recommended(job: Problem) -> TrainingPlan | None:
    """The plan that is recommended for a job; None if nothing fits."""
    try:
        swept = sweep(replace(job), SweepOptions(executable=True, roomy=True))
        return swept.plan(swept.best)
    except (RooftopError, Infeasible):
        return None


def _regrets(before: list[TrainingPlan | None], after: list[TrainingPlan | None]) -> tuple[list[float], int, int]:
    """Regret of each job, plans that do not fit with all rules, and jobs with another plan."""
    regrets, unfit, changed = [], 0, 0
    for best, other in zip(before, after, strict=True):
        if best is None or other is None:
            continue
        again = replace(best, mesh=other.mesh, choice=other.choice)
        changed += (best.mesh.shape, best.choice) != (other.mesh.shape, other.choice)
        if again.memory_bytes > best.problem.capacity:
            unfit += 1
            continue
        regrets.append(max(again.expected_s / best.expected_s - 1, 0.0))
    return regrets or [0.0], unfit, changed


# ---------------------------------------------------------------- switches


@contextmanager
def _without_habit(name: str, value: Any) -> Iterator[None]:
    """Plans of our program and of MaxText without a habit."""
    rules = [framework.framework_data(which)["rule"] for which in ("rooftop", "maxtext")]
    for some in rules:
        some.append({"habits": {name: value}})
    try:
        yield
    finally:
        for some in rules:
            some.pop()


def _function(module: ModuleType, name: str, result: Any, *, owner: type | None = None) -> Rule:
    """A function that gives ``result`` in place of its own."""
    holder: Any = owner or module
    lines = len(inspect.getsource(getattr(holder, name)).splitlines())
    return Rule(
        name=f"{module.__name__.rpartition('.')[2]}.{name}",
        lines=lines,
        off=lambda: patch.object(holder, name, lambda *_, **__: result),
    )


def rules() -> list[Rule]:
    """All rules."""
    book = Habits()
    of_xla = dict[str, Any]()
    for which in ("rooftop", "maxtext"):
        for rule in framework.framework_data(which)["rule"]:
            of_xla |= rule.get("habits", {})
    known = []
    for habit in fields(Habits):
        if habit.name in of_xla and habit.name not in (
            "attention_kernel",
            "kernels",
            "weighs_outputs",
            "scatters_tiles",
        ):
            value = getattr(book, habit.name)
            known.append(
                Rule(
                    name=habit.name,
                    lines=branch_lines(habit.name),
                    off=lambda name=habit.name, value=value: _without_habit(name, value),
                )
            )
    of_step = step.TrainingStep
    zero = 0.0
    return [
        *known,
        _function(step, "summed_whole", zero, owner=of_step),
        _function(memory, "_table_copies", zero),
        _function(memory, "_table_pieces", zero),
        _function(attention, "merged", zero, owner=attention._Core),
        _function(update, "newton_schulz_work", []),
    ]


def branch_lines(habit: str) -> int:
    """Lines of statements in the planner that ask for a habit: whole branches, or the statement alone."""
    lines = 0
    for path in (ROOT / "rooftop" / "plan" / "training").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.If) and _asks(node.test, habit):
                lines += (node.end_lineno or node.lineno) - node.lineno + 1
            elif isinstance(node, ast.stmt) and not hasattr(node, "body") and _asks(node, habit):
                lines += 1
    return lines


def _asks(node: ast.AST, habit: str) -> bool:
    return any(isinstance(part, ast.Attribute) and part.attr == habit for part in ast.walk(node))


def main(names: list[str]) -> None:
    """Switch rules off one by one, and write the table."""
    known = {rule.name: rule for rule in rules()}
    for name in names:
        if name not in known:
            sys.exit(f"{name}: one of {', '.join(known)}")
    benchmark = Benchmark(
        compiled=list(compiled_rows()),
        published=[
            run
            for run in load_published().runs
            if run.slice.chip.kind == "tpu" and request_of(run).framework == "maxtext"
        ],
        jobs=[
            Problem(
                model=load_model(model),
                slice=Slice.parse(on),
                workload=Workload(batch_tokens=seqs * seq_len, seq_len=seq_len),
            )
            for model, on, seqs, seq_len in JOBS
        ],
    )
    path = RESULTS / "rules.csv"
    rows = {}
    if names and path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            rows = {row["rule"]: row for row in csv.DictReader(file)}
    print(" | ".join(COLUMNS))
    for name in names or known:
        rows[name] = benchmark.row(known[name])
        print(" | ".join(str(rows[name][column]) for column in COLUMNS), flush=True)
        text = [",".join(COLUMNS), *(",".join(str(row[column]) for column in COLUMNS) for row in rows.values())]
        write_text(path, "\n".join(text) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
