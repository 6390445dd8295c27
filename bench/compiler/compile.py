"""Plans next to their compiled programs: FLOPs, peak memory, collective bytes by axis, expected time.

Each case is planned, its program compiled ahead of time by XLA:TPU (no TPU; half a minute to two minutes each on two
cores, one at a time) and set next to the plan. Writes bench/results/compile.csv, a row at a time, and the table of
docs/evidence/accuracy.md. A case whose program cannot be built, or does not fit, says so in ``note``.

    python bench/compiler/compile.py [NAME ... | --planned]

NAME picks cases (all of them otherwise); rows of the others stay as they are. With ``--planned`` nothing is compiled:
all rows get today's planned time, memory and FLOPs of kernels.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rooftop.arrays import parse_axes
from rooftop.capabilities import MATMUL_DTYPES
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import write_text
from rooftop.core.ledger import Ledger
from rooftop.explain.compiled.report import PEAK, TIME, Check, CompiledReport, bytes_by_axes
from rooftop.explain.compiled.training import Refusal, compile_plan
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.models.numerics import Numerics
from rooftop.plan.training.answer import plan_training
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE, PipelineSchedule

RESULTS = Path(__file__).parents[1] / "results" / "compile.csv"
PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "accuracy.md"
COLUMNS = (
    "name", "model", "layers", "slice", "mesh", "remat", "microbatches", "sequences", "seq_len", "attention",
    "optimizer", "matmul", "collective_matmuls", "experts_over_tensor",
    "planned_flops", "compiled_flops", "compiled_narrow_flops",
    "planned_kernel_flops", "compiled_kernel_flops", "planned_peak_bytes", "compiled_peak_bytes",
    "planned_collective_bytes", "compiled_collective_bytes", "planned_s", "compiled_s",
    "unexpected", "unexplained", "missing",
    "rematerialised_s", "differs", "compile_s", "jax", "libtpu", "date", "note",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """A plan to be compiled: all that is not searched. ``layers`` None: all of them."""

    name: str
    model: str
    slice: str
    mesh: str
    remat: str
    sequences: int
    seq_len: int = 4096
    microbatches: int = 1
    layers: int | None = None
    attention: str = "flash"
    optimizer: str = "adamw"
    matmul: str = "bf16"
    collective_matmuls: bool = False
    experts_over_tensor: bool = False
    schedule: PipelineSchedule = DEFAULT_SCHEDULE

    @property
    def plan(self) -> TrainingPlan:
        """The plan, laid on the slice as the search finds best."""
        model = load_model(self.model)
        problem = Problem(
            model=model if self.layers is None else replace(model, layers=self.layers),
            slice=Slice.parse(self.slice),
            workload=Workload(batch_tokens=self.sequences * self.seq_len, seq_len=self.seq_len),
            assumptions=Assumptions(attention=self.attention),
            numerics=Numerics(optimizer=self.optimizer, matmul=self.matmul),
            axes=parse_axes(self.mesh),
            remat=self.remat,
            microbatches=self.microbatches,
            collective_matmuls=self.collective_matmuls,
            experts_over_tensor=self.experts_over_tensor,
            schedule=self.schedule,
        )
        return plan_training(problem, alternatives=0).plan


def case(name: str, model: str, slice_: str, mesh: str, remat: str, sequences: int, **more: Any) -> Case:
    """A plan to be compiled."""
    return Case(name=name, model=model, slice=slice_, mesh=mesh, remat=remat, sequences=sequences, **more)


CASES = (
    case("v5e-fsdp", "llama3-8b", "v5e:4x4", "fsdp=16", "block", 16),
    case("v5e-fsdp-tensor", "llama3-8b", "v5e:4x4", "fsdp=4,tensor=4", "block", 16),
    case("v5e-muon", "llama3-8b", "v5e:4x4", "fsdp=4,tensor=4", "block", 16, optimizer="muon"),
    case("v5p-muon", "llama3-8b", "v5p:4x4x4", "fsdp=16,tensor=4", "block", 128, optimizer="muon"),
    case("v5e-tensor", "llama3-8b", "v5e:4x4", "data=2,tensor=8", "block", 4, layers=8),
    case("v5e-matmuls", "llama3-8b", "v5e:4x4", "fsdp=4,tensor=4", "matmuls", 8),
    case("v5e-two-slices", "llama3-8b", "v5e:4x4@2", "data=2,fsdp=4,tensor=4", "block", 32),
    case("v5e-fsdp-two-slices", "llama3-8b", "v5e:4x4@2", "fsdp=32", "block", 32),
    case(
        "v6e-two-slices",
        "llama3.1-405b",
        "v6e:16x16@2",
        "fsdp=128,tensor=4",
        "block",
        512,
        seq_len=8192,
        microbatches=4,
    ),
    case("v5e-microbatches", "llama3-8b", "v5e:8x8", "fsdp=16,tensor=4", "block", 64, microbatches=2),
    case("v5e-padded", "llama3-8b", "v5e:4x4", "fsdp=4,tensor=4", "block", 13, seq_len=4000, layers=8, microbatches=2),
    case("v5e-padded-context", "llama3-8b", "v5e:4x4", "fsdp=4,context=4", "block", 3, seq_len=30000, layers=4),
    case("v6e-fsdp", "llama3-8b", "v6e:4x4", "fsdp=16", "minimal", 16),
    case("v6e-fsdp-block", "llama3-8b", "v6e:4x4", "fsdp=16", "block", 32),
    case("v6e-fsdp-tensor", "llama3-8b", "v6e:4x4", "fsdp=4,tensor=4", "matmuls", 16),
    case("v5p-fsdp", "llama3-8b", "v5p:4x4x4", "fsdp=64", "matmuls", 128),
    case("v5p-fsdp-tensor", "llama3-70b", "v5p:4x4x4", "fsdp=16,tensor=4", "block", 128),
    case("v5p-rings", "llama3-70b", "v5p:4x4x4", "fsdp=16,tensor=4", "none", 16, layers=8, collective_matmuls=True),
    case("v5p-rings-block", "llama3-8b", "v5p:4x4x4", "fsdp=16,tensor=4", "block", 32, collective_matmuls=True),
    case("v5p-none", "llama3-8b", "v5p:4x4x4", "fsdp=16,tensor=4", "none", 32),
    case("v5p-tensor", "llama3-8b", "v5p:4x4x4", "data=8,tensor=8", "matmuls", 64),
    case("v5p-two-slices", "llama3-8b", "v5p:4x4x4@2", "data=2,fsdp=64", "block", 256),
    case("v5p-context", "llama3-8b", "v5p:4x4x4", "fsdp=16,context=4", "block", 16, seq_len=32768),
    case("v5e-gemma", "gemma2-9b", "v5e:8x8", "fsdp=16,tensor=4", "block", 64),
    case("v5p-mla", "deepseek-v2-lite", "v5p:4x4x4", "fsdp=8,expert=8", "block", 64),
    case("tpu7x-fsdp-tensor", "llama3-8b", "tpu7x:2x2x2", "fsdp=4,tensor=4", "block", 16),
    case("v5p-moe", "mixtral-8x7b", "v5p:4x4x4", "fsdp=8,expert=8", "block", 64),
    case("v6e-moe", "mixtral-8x7b", "v6e:8x8", "fsdp=8,expert=8", "block", 64),
    case(
        "v5e-experts-tensor",
        "qwen3-30b-a3b",
        "v5e:4x4",
        "fsdp=4,tensor=4",
        "block",
        16,
        layers=8,
        experts_over_tensor=True,
    ),
    case(
        "v5p-experts-tensor",
        "qwen3-30b-a3b",
        "v5p:4x4x4",
        "fsdp=8,expert=2,tensor=4",
        "block",
        64,
        experts_over_tensor=True,
    ),
    case("v5p-experts-kept", "qwen3-30b-a3b", "v5p:4x4x4", "fsdp=8,expert=8", "block,mlp_normed=save", 64),
    case("v5e-heads", "llama2-13b", "v5e:4x4", "tensor=16", "block", 4, layers=8),
    case("v5e-shared-keys", "llama3-8b", "v5e:4x8", "fsdp=2,tensor=16", "block", 8, layers=8),
    case("v5p-uneven-d", "llama3-8b", "v5p:4x4x12", "fsdp=96,tensor=2", "block", 96, layers=8),
    case("v5p-stages-uneven", "llama3.1-405b", "v5p:2x2x4", "stage=4,tensor=4", "block", 16, microbatches=8, layers=6),
    case(
        "v5p-stages-experts",
        "deepseek-v2-lite",
        "v5p:2x2x1",
        "stage=2,expert=2",
        "none",
        16,
        seq_len=2048,
        microbatches=8,
        layers=5,
    ),
    case("v5e-stages-uneven", "llama3.2-1b", "v5e:4x4", "stage=4,fsdp=4", "block", 32, microbatches=8, layers=14),
    case(
        "v5e-stages-offload",
        "llama3.2-3b",
        "v5e:4x4",
        "stage=4,fsdp=4",
        "block,layer_input=offload",
        32,
        microbatches=8,
    ),
    case("v5e-stages-slices", "llama3-8b", "v5e:4x4@2", "stage=2,fsdp=4,tensor=4", "matmuls", 32, microbatches=8),
    case("v5e-stages-across", "llama2-13b", "v5e:4x4@2", "stage=4,tensor=8", "matmuls", 32, microbatches=32),
    case("v5e-int8", "llama3-8b", "v5e:4x4", "fsdp=4,tensor=4", "block", 16, matmul="int8"),
    case("v6e-int8", "llama3-8b", "v6e:4x4", "fsdp=16", "block", 32, matmul="int8"),
    case("v6e-moe-int8", "mixtral-8x7b", "v6e:8x8", "fsdp=8,expert=8", "block", 64, matmul="int8"),
    case("v5p-mla-int8", "deepseek-v2-lite", "v5p:4x4x4", "fsdp=8,expert=8", "block", 64, matmul="int8"),
    case("tpu7x-f8", "llama3-8b", "tpu7x:2x2x2", "fsdp=4,tensor=4", "block", 16, matmul="f8_e4m3"),
    case("v5p-fsdp-two-slices", "llama3-8b", "v5p:2x2x2@2", "fsdp=16", "block", 32),
    case("v6e-tied", "llama3.2-3b", "v6e:4x4", "fsdp=4,tensor=4", "block", 32),
    case("v6e-small-experts", "qwen3-30b-a3b", "v6e:8x8", "fsdp=8,expert=8", "block", 128),
    case("v5p-gpt-oss", "gpt-oss-20b", "v5p:4x4x4", "fsdp=8,expert=8", "block", 64, seq_len=8192),
    case("v5p-windows-context", "gemma3-4b", "v5p:2x2x4", "fsdp=4,context=4", "block", 8, seq_len=16384),
    case("tpu7x-muon", "llama3.2-3b", "tpu7x:2x2x2", "fsdp=4,tensor=4", "block", 16, optimizer="muon"),
    case("tpu7x-rings", "llama3-8b", "tpu7x:2x2x2", "fsdp=4,tensor=4", "block", 16, layers=4, collective_matmuls=True),
    case("v6e-tensor-int8", "qwen3-8b", "v6e:4x4", "fsdp=4,tensor=4", "block", 32, matmul="int8"),
    case("v5p-odd-rows", "qwen2.5-7b", "v5p:4x4x8", "fsdp=128", "block", 128, layers=4),
    case("pod", "llama3-70b", "v5p:16x16x16", "fsdp=1024,tensor=4", "block", 1024),
    case("pod-fsdp", "llama3-70b", "v5p:16x16x16", "fsdp=4096", "block", 4096, layers=8),
)


def row(case: Case) -> dict[str, Any]:
    """One line of the table."""
    described = {
        "name": case.name, "slice": case.slice, "mesh": case.mesh, "remat": case.remat, "sequences": case.sequences,
        "microbatches": case.microbatches, "seq_len": case.seq_len, "attention": case.attention, "model": case.model,
        "optimizer": case.optimizer, "matmul": case.matmul,
        "collective_matmuls": "yes" if case.collective_matmuls else "",
        "experts_over_tensor": "yes" if case.experts_over_tensor else "",
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }  # fmt: skip
    try:
        return described | compiled_figures(case.plan)
    except (RooftopError, Infeasible) as error:
        return described | {"note": str(error)}


def compiled_figures(plan: TrainingPlan) -> dict[str, Any]:
    """Compile a plan, and return the columns that follow from it; ``note`` says so if it cannot be, or does not fit."""
    figures = {
        "layers": plan.problem.model.layers,
        "planned_s": plan.expected_s,
        "planned_peak_bytes": plan.memory_bytes,
    }
    try:
        answer = compile_plan(plan, timeout_s=1800)
    except (RooftopError, Infeasible) as error:
        return figures | {"note": str(error)}
    return figures | ({"note": answer.verdict} if isinstance(answer, Refusal) else _compared(answer))


def problem_of(row: Mapping[str, Any]) -> Problem:
    """The plan of a row, asked for again: the strategy that was compiled."""
    seq_len = int(row["seq_len"])
    return Problem(
        model=replace(load_model(row["model"]), layers=int(row["layers"])),
        slice=Slice.parse(row["slice"]),
        workload=Workload(batch_tokens=int(row["sequences"]) * seq_len, seq_len=seq_len),
        assumptions=Assumptions(attention=row["attention"]),
        numerics=Numerics(optimizer=row.get("optimizer") or "adamw", matmul=row.get("matmul") or "bf16"),
        axes=parse_axes(row["mesh"]),
        remat=row["remat"],
        microbatches=int(row["microbatches"]),
        collective_matmuls=row.get("collective_matmuls") == "yes",
        experts_over_tensor=row.get("experts_over_tensor") == "yes",
    )


def priced_again(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row with today's planned time, memory and FLOPs of kernels for the strategy that was compiled."""
    plan = plan_training(problem_of(row), alternatives=0).plan
    over, under = PEAK
    memory, time = (float(row[f"compiled_{name}"]) for name in ("peak_bytes", "s"))
    again = (
        Check.of("peak memory", "B", plan.memory_bytes, memory, above=over, below=under),
        Check.of("expected time", "s", plan.expected_s, time, above=TIME, below=TIME),
    )
    names = tuple(check.name for check in again)
    others = [text for text in row["differs"].split("; ") if text and not text.startswith(names)]
    return {
        **row,
        "planned_s": plan.expected_s,
        "planned_peak_bytes": plan.memory_bytes,
        "planned_kernel_flops": float(plan.ledger.flops() - plan.ledger.flops(kernels=False)),
        "differs": "; ".join([str(check) for check in again if not check.holds] + others),
    }


def _compared(report: CompiledReport) -> dict[str, Any]:
    data = report.to_json()
    moved = bytes_by_axes(report.joined, report.findings)
    return {
        "planned_flops": data["planned_flops"],
        "compiled_flops": data["flops"],
        "compiled_narrow_flops": sum(narrow_flops(report.ledger).values()) or "",
        "planned_kernel_flops": data["planned_kernel_flops"],
        "compiled_kernel_flops": data["kernel_flops"],
        "planned_peak_bytes": data["planned_peak_bytes"],
        "compiled_peak_bytes": data["peak_bytes"],
        "planned_collective_bytes": " ".join(f"{axes}:{ours:.0f}" for axes, (ours, _) in moved.items()),
        "compiled_collective_bytes": " ".join(f"{axes}:{theirs:.0f}" for axes, (_, theirs) in moved.items()),
        "planned_s": data["planned_step"]["expected_s"],
        "compiled_s": data["step"]["expected_s"],
        "unexpected": sum(moved["bytes"] for moved in data["unexpected"] if moved["kind"] != "matmul"),
        "unexplained": sum(moved.bytes for moved in report.findings.unexplained),
        "missing": sum(moved["bytes"] for moved in data["missing"]),
        "rematerialised_s": sum(
            finding["cost_s"] for finding in data["recomputed"] if finding["rule"] == "rematerialised"
        ),
        "differs": "; ".join(str(check) for check in report.checks if not check.holds),
        "compile_s": data["compile_s"],
        "jax": data["versions"]["jax"],
        "libtpu": data["versions"].get("libtpu", ""),
    }


def narrow_flops(ledger: Ledger) -> dict[str, float]:
    """FLOPs of a ledger's matmuls in 8 bits, by dtype."""
    flops: dict[str, float] = {}
    for entry in ledger.rows:
        for dtype in sorted({*MATMUL_DTYPES, "f8_e5m2"} & set(entry.flops)):
            flops[dtype] = flops.get(dtype, 0.0) + float(entry.count * entry.flops[dtype])
    return flops


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    """The rows of a table of results by name; none if there is no table yet."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        return {line["name"]: {column: "" for column in COLUMNS} | line for line in csv.DictReader(file)}


def write_rows(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a table of results."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The rows in Markdown: planned over compiled."""
    lines = [
        "| name | plan | matmul FLOPs | peak memory | collective bytes, largest axes first | expected time | differs |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in rows:
        model = f"{entry['model']} ({entry['layers']} layers)"
        optimizer = "" if entry["optimizer"] in ("", "adamw") else f", {entry['optimizer']}"
        narrow = "" if entry["matmul"] in ("", "bf16") else f", {entry['matmul']}"
        rings = ", collective matmuls" if entry.get("collective_matmuls") else ""
        whole = ", whole experts over tensor" if entry.get("experts_over_tensor") else ""
        what = (
            f"{entry['name']} | {model}, {entry['slice']}, {entry['mesh']}, {entry['remat']}, "
            f"{entry['sequences']} x {entry['seq_len']}{optimizer}{narrow}{rings}{whole}"
        )
        if not entry["compiled_s"]:
            lines.append(f"| {what} | | | | | {entry['note']} |")
            continue
        planned, compiled = (_parsed(entry[f"{side}_collective_bytes"]) for side in ("planned", "compiled"))
        large = sorted((axes for axes in compiled if compiled[axes] > 1e6), key=lambda axes: -compiled[axes])
        moved = ", ".join(f"{axes} {planned[axes] / compiled[axes]:.3f}" for axes in large)
        ratios = [
            float(entry[f"planned_{name}"]) / float(entry[f"compiled_{name}"]) for name in ("flops", "peak_bytes", "s")
        ]
        differs = entry["differs"] or "no"
        lines.append(f"| {what} | {ratios[0]:.3f} | {ratios[1]:.3f} | {moved} | {ratios[2]:.3f} | {differs} |")
    return "\n".join(lines)


def _parsed(text: str) -> dict[str, float]:
    return {axes: float(nbytes) for axes, _, nbytes in (entry.partition(":") for entry in text.split())}


def put(page: Path, script: str, text: str) -> None:
    """Replace the part of a page that the script of this name has measured."""
    begin, end = f"<!-- measured: python bench/compiler/{script} -->\n", "<!-- end -->"
    head, marked, rest = page.read_text(encoding="utf-8").partition(begin)
    if not marked:
        raise ValueError(f"{page} has no {begin!r}")
    write_text(page, f"{head}{begin}{text}\n{end}{rest.partition(end)[2]}")


def main(names: list[str], cases: Sequence[Case], results: Path, page: Path) -> None:
    """Compile the cases, one after another, and write the table, in the page too."""
    known, planned = {case.name: case for case in cases}, names == ["--planned"]
    for name in () if planned else names:
        if name not in known:
            sys.exit(f"{name}: one of {', '.join(known)}")
    rows = read_rows(results)
    for name in () if planned else names or known:
        rows[name] = {column: "" for column in COLUMNS} | row(known[name])
        print(f"{name}: {rows[name]['note'] or rows[name]['differs'] or 'as planned'}", file=sys.stderr, flush=True)
        write_rows(results, COLUMNS, (rows[name] for name in known if name in rows))
    if planned:
        rows = {name: priced_again(line) if line["compiled_s"] else line for name, line in rows.items()}
        write_rows(results, COLUMNS, (rows[name] for name in known if name in rows))
    text = table(rows[name] for name in known if name in rows)
    put(page, f"{results.stem}.py", text)
    print(text)


if __name__ == "__main__":
    main(sys.argv[1:], CASES, RESULTS, PAGE)
