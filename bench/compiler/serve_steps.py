"""Generate steps with weights in published formats next to their programs, compiled for TPUs without a TPU.

    python bench/compiler/serve_steps.py [NAME ...] [--scopes]

Each step is planned, and compiled by XLA:TPU (one to four minutes each on two cores). ``planned_us`` is the plan's,
``at_compiled_rates_us`` the same plan with the rate of HBM that compiled schedules use, and with no start of a
collective hidden, as XLA's schedules hide almost none: it compares work and not assumptions. Loops over experts count
as often as the plan expects visits. Writes bench/results/serve_steps.csv, a row at a time; ``--scopes`` prints both
times scope by scope. NAME picks steps (all of them otherwise); rows of the others stay as they are.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import io
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from rooftop.arrays import Mesh, parse_axes
from rooftop.arrays.rules import AXES
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.ledger import TimedLedger, compiled_ledger
from rooftop.core.files import write_text
from rooftop.core.ledger import Ledger
from rooftop.hardware import Slice
from rooftop.plan.serving.assumptions import ServingAssumptions
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ServingNumerics, ServingWorkload
from rooftop.roofline.rates import Rates
from tests.support.serving_steps import small

RESULTS = Path(__file__).parents[1] / "results" / "serve_steps.csv"
COLUMNS = (
    "name", "model", "layers", "slice", "mesh", "weights", "sequences", "context", "planned_us",
    "at_compiled_rates_us", "compiled_us", "planned_of_compiled", "work_of_compiled", "jax", "libtpu", "date",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step of ``sequences`` sequences with ``context`` tokens each, of a model with few ``layers``."""

    name: str
    model: str
    layers: int
    slice: str
    mesh: str
    weights: str
    sequences: int
    context: int
    only_experts: bool = False

    @property
    def laid(self) -> Mesh:
        """The mesh on its slice."""
        return Mesh.lay(Slice.parse(self.slice), dict.fromkeys(AXES, 1) | dict(parse_axes(self.mesh)))

    @property
    def numerics(self) -> ServingNumerics:
        """Formats of the weights."""
        dtype, _, group = self.weights.partition("-")
        return ServingNumerics(
            weights=dtype, weight_group=int(group) if group else None, only_experts=self.only_experts
        )

    def planned(self, assumptions: ServingAssumptions) -> Ledger:
        """The plan's ledger."""
        problem = ServingProblem(
            model=small(self.model, self.layers),
            slice=self.laid.slice,
            workload=ServingWorkload(prompt=self.context - 16, generate=16, context=self.context),
            numerics=self.numerics,
            assumptions=assumptions,
        )
        return problem.generate(Placement(mesh=self.laid, kv_split="batch"), float(self.sequences))

    def compiled(self) -> TimedLedger:
        """The compiled program's ledger."""
        arguments = {
            "model": self.model, "layers": self.layers, "batch": self.sequences, "context": self.context,
            "kv_split": "batch", "axes": dict(parse_axes(self.mesh)), "weights_dtype": self.weights,
            "only_experts": self.only_experts,
        }  # fmt: skip
        program = "tests.support.serving_steps:lower"
        return compiled_ledger(
            compile_ahead_of_time(CompileRequest(mesh=self.laid, program=program, arguments=arguments))
        )


def step(
    name: str, model: str, layers: int, slice_: str, mesh: str, weights: str, sequences: int, context: int
) -> Step:
    """A step to be compiled."""
    return Step(
        name=name, model=model, layers=layers, slice=slice_, mesh=mesh, weights=weights, sequences=sequences,
        context=context,
    )  # fmt: skip


STEPS = (
    step("llama3-8b-int4", "llama3-8b", 4, "v5e:2x2", "tensor=4", "int4-128", 32, 2048),
    replace(
        step("gpt-oss-20b-mxfp4", "gpt-oss-20b", 4, "v5e:2x4", "expert=8", "f4_e2m1-32", 64, 2048),
        only_experts=True,
    ),
    step("deepseek-v2-lite-fp8", "deepseek-v2-lite", 3, "v6e:2x2", "tensor=4", "f8_e4m3", 64, 2048),
    step(
        "deepseek-v3-fp8-blocks", "deepseek-v3", 4, "v5e:16x16", "expert=16,context=4,tensor=4", "f8_e4m3-128", 1024,
        2048,
    ),
)  # fmt: skip


def row_of(case: Step, scopes: bool) -> dict[str, object]:
    """The row of a step."""
    rates = Rates.of(case.laid.slice.chip)
    share = 1.0 / (float(rates.hbm_s(1.0)) * rates.hbm_bytes_per_s)
    compiled = case.compiled()
    default = case.planned(ServingAssumptions())
    same = case.planned(ServingAssumptions(shares={"hbm_read": share, "latency": 0.0, "latency_2d": 0.0}))
    total = 1e6 * compiled.step.expected_s
    if scopes:
        times: dict[str, list[float]] = defaultdict(lambda: [0.0] * 3)
        for at, ledger in enumerate((default, same, compiled.ledger)):
            for row in ledger:
                times[row.scope][at] += 1e6 * float(row.count * row.expected_s)
        print(f"{case.name:24} {'planned':>9} {'its rates':>9} {'compiled':>9}  us")
        for scope, figures in times.items():
            print(f"  {scope:22} " + " ".join(f"{figure:9.1f}" for figure in figures))
    planned, work = (1e6 * float(ledger.expected_s) for ledger in (default, same))
    return {
        "name": case.name, "model": case.model, "layers": case.layers, "slice": case.slice, "mesh": case.mesh,
        "weights": case.weights, "sequences": case.sequences, "context": case.context,
        "planned_us": round(planned), "at_compiled_rates_us": round(work), "compiled_us": round(total),
        "planned_of_compiled": round(planned / total, 3), "work_of_compiled": round(work / total, 3),
        "jax": importlib.metadata.version("jax"), "libtpu": importlib.metadata.version("libtpu"),
        "date": datetime.now(UTC).date().isoformat(),
    }  # fmt: skip


def main() -> None:
    """Compile, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[*(case.name for case in STEPS), []])
    parser.add_argument("--scopes", action="store_true")
    options = parser.parse_args()
    rows: dict[str, dict[str, object]] = {}
    if RESULTS.exists():
        rows = {row["name"]: dict(row) for row in csv.DictReader(io.StringIO(RESULTS.read_text()))}
    for case in STEPS:
        if options.names and case.name not in options.names:
            continue
        rows[case.name] = row_of(case, options.scopes)
        print(rows[case.name], flush=True)
        text = io.StringIO()
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[one.name] for one in STEPS if one.name in rows)
        write_text(RESULTS, text.getvalue())


if __name__ == "__main__":
    main()
