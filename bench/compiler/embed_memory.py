"""The planned HBM stack of embedding programs beside the compiler's high-water marks, over widths and limits.

Each case is one table's lookup or update, compiled ahead of time by XLA:TPU for a slice (no TPU; about ten seconds
each on one core, one at a time). Writes bench/results/embed_memory.csv, a row at a time, and prints what differs by
more than 5 %. The document's estimate stands in it too. A limit that the plan refuses is compiled as well: ``outcome``
says what the compiler made of it.

    python bench/compiler/embed_memory.py [SLICE ...]

SLICE picks slices (all of them otherwise); rows of the others stay as they are.
"""

from __future__ import annotations

import csv
import dataclasses
import importlib.metadata
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rooftop.arrays import Mesh
from rooftop.compiler.compiling import CompileRequest
from rooftop.compiler.sparsecore import compile_with_marks
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import write_text
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, TableOptimizer, Tables
from rooftop.plan.embedding.plan import EmbedPlan
from rooftop.plan.embedding.problem import EmbedProblem, per_device

RESULTS = Path(__file__).parents[1] / "results" / "embed_memory.csv"
SLICES = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
WIDTHS = (8, 64, 256)
#: Different ids and ids of a partition; the last are more than a tile of any chip holds.
LIMITS = ((64, 128), (512, 1024), (4096, 8192))
REFUSED = (16384, 16384)
SAMPLES = 128
#: Phase, optimizer, passes over samples: above one the update adds gradients up first.
PROGRAMS = (("forward", "sgd", 1), ("backward", "sgd", 1), ("backward", "adagrad", 1), ("backward", "adagrad", 4))
COLUMNS = (
    "slice", "cores", "phase", "optimizer", "sample_passes", "width", "max_unique_ids", "max_ids", "planned_bytes",
    "document_bytes", "compiled_bytes", "error", "planned_feasible", "outcome", "jax", "libtpu", "date",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One compilation."""

    slice: str
    phase: str
    optimizer: str
    sample_passes: int
    width: int
    max_unique_ids: int
    max_ids: int


def cases() -> Iterator[Case]:
    """The grid, and for each slice limits that do not fit."""
    for name in SLICES:
        refused = Case(
            slice=name,
            phase="backward",
            optimizer="sgd",
            sample_passes=1,
            width=8,
            max_unique_ids=REFUSED[0],
            max_ids=REFUSED[1],
        )
        for phase, optimizer, passes in PROGRAMS:
            kind = dataclasses.replace(refused, phase=phase, optimizer=optimizer, sample_passes=passes)
            for width in WIDTHS:
                for unique, every in LIMITS:
                    yield dataclasses.replace(kind, width=width, max_unique_ids=unique, max_ids=every)
        yield refused


def run(case: Case) -> dict[str, Any]:
    """A row of the results."""
    where = Slice.parse(case.slice)
    own = per_device(where)
    cores = own * where.devices
    tables = Tables(
        tables=(
            EmbeddingTable(
                name="t", vocabulary=4096 * cores, width=case.width, optimizer=TableOptimizer(kind=case.optimizer)
            ),
        ),
        features=(Feature(name="f", table="t"),),
    )
    limits = StackLimits(
        max_ids=case.max_ids, max_unique_ids=case.max_unique_ids, buffer=full_buffer(case.max_ids, cores)
    )
    passes = case.sample_passes
    problem = EmbedProblem(
        tables=tables, slice=where, batch=SAMPLES * cores, limits={"t": limits}, sample_passes=passes
    )
    plan = EmbedPlan(problem=problem)
    memory = plan.stack_memory(problem.stacking.stacks[0])
    request = CompileRequest(
        mesh=Mesh.lay(where, {"data": where.devices}),
        program="rooftop.programs.embedding.lowering:lower_part",
        arguments={
            "tables": tables.to_json(),
            "cores_per_device": own,
            "batch": problem.batch,
            "limits": {"t": vars(limits)},
            "part": "lookup" if case.phase == "forward" else "update",
            "kernel": "sparsecore",
            **({"sample_passes": passes} if passes > 1 else {}),
        },
    )
    compiled: int | None = None
    try:
        compiled = compile_with_marks(request).hbm_bytes
        outcome = "compiled"
    except (Infeasible, RooftopError) as no:
        outcome = str(no).replace("\n", " ")[:160]
    planned = round(memory[f"{case.phase}_stack"] / own)
    return {
        **vars(case),
        "cores": cores,
        "planned_bytes": planned,
        "document_bytes": round(memory[f"{case.phase}_stack_document"] / own),
        "compiled_bytes": compiled if compiled is not None else "",
        "error": "" if compiled is None else round(planned / compiled - 1, 4),
        "planned_feasible": not plan.obstacles,
        "outcome": outcome,
        "jax": importlib.metadata.version("jax"),
        "libtpu": importlib.metadata.version("libtpu"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main(chosen: list[str]) -> None:
    """Run the chosen slices' cases and write a row after each."""
    rows = []
    if RESULTS.exists() and chosen:
        with RESULTS.open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.DictReader(file) if row["slice"] not in chosen]
    for case in cases():
        if chosen and case.slice not in chosen:
            continue
        row = run(case)
        rows.append(row)
        out = io.StringIO()
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_text(RESULTS, out.getvalue())
        if row["error"] == "" or abs(row["error"]) > 0.05:
            print(case, row["planned_bytes"], row["compiled_bytes"], row["outcome"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
