"""Share of a step's TensorCore work scheduled next to its SparseCore work: sequential and pipelined, three chips.

Each step of a small DLRM, of one table or of three in two stacks, is compiled ahead of time by XLA:TPU (no TPU; about
fifteen seconds each). ``rescheduled`` are compilations with ``rooftop.compiler.sparsecore.PIPELINING_OPTIONS``.
Writes bench/results/embed_overlap.csv and prints it.

    python bench/compiler/embed_overlap.py
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
from datetime import UTC, datetime
from pathlib import Path

from rooftop.arrays import Mesh
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.sparsecore import PIPELINING_OPTIONS, sparsecore_overlap
from rooftop.core.files import write_text
from rooftop.hardware import Slice
from rooftop.models.embedding_tables.limits import StackLimits, full_buffer
from rooftop.models.embedding_tables.tables import EmbeddingTable, Feature, TableOptimizer, Tables
from rooftop.plan.embedding.problem import per_device, stacking_on

RESULTS = Path(__file__).parents[1] / "results" / "embed_overlap.csv"
SLICES = ("v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1")
#: Optimizers of the tables.
MODELS = (("adagrad",), ("adagrad", "adagrad", "sgd"))
SAMPLES = 256


def run(name: str, kinds: tuple[str, ...], part: str, rescheduled: bool) -> dict[str, object]:
    """One row: compile a step and read its schedule."""
    where = Slice.parse(name)
    cores = per_device(where) * where.devices
    tables = Tables(
        tables=tuple(
            EmbeddingTable(name=f"t{index}", vocabulary=4096 * cores, width=32, optimizer=TableOptimizer(kind=kind))
            for index, kind in enumerate(kinds)
        ),
        features=tuple(Feature(name=f"f{index}", table=f"t{index}") for index in range(len(kinds))),
    )
    limits = StackLimits(max_ids=256, max_unique_ids=128, buffer=full_buffer(256, cores))
    stacks = stacking_on(tables, where, SAMPLES * cores).stacks
    compiled = compile_ahead_of_time(
        CompileRequest(
            mesh=Mesh.lay(where, {"data": where.devices}),
            program="rooftop.programs.embedding.lowering:lower_part",
            arguments={
                "tables": tables.to_json(),
                "cores_per_device": per_device(where),
                "batch": SAMPLES * cores,
                "limits": {stack.name: vars(limits) for stack in stacks},
                "part": part,
                "kernel": "sparsecore",
                "dense": 13,
            },
            options=PIPELINING_OPTIONS if rescheduled else {},
        )
    )
    overlap = sparsecore_overlap(compiled.module)
    return {
        "slice": name,
        "tables": len(kinds),
        "step": part,
        "rescheduled": rescheduled,
        "sparsecore_calls": overlap.calls,
        "tensorcore_computations": overlap.computations,
        "beside": overlap.overlapped,
        "share": round(overlap.share, 3),
        "jax": importlib.metadata.version("jax"),
        "libtpu": importlib.metadata.version("libtpu"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def main() -> None:
    """All chips and steps."""
    parts = (("sequential", False), ("pipelined", False), ("pipelined", True))
    rows = [run(name, kinds, part, rescheduled) for name in SLICES for kinds in MODELS for part, rescheduled in parts]
    out = io.StringIO()
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(RESULTS, out.getvalue())
    print(out.getvalue(), end="")


if __name__ == "__main__":
    main()
