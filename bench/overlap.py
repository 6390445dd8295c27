"""Share of collective bytes that XLA:TPU's schedules run asynchronously, by chip.

    python bench/overlap.py > bench/results/overlap.csv

A four-layer decoder (D 2048, F 8192, block remat) is compiled ahead of time, with no accelerator, for a small slice of
each chip: weights split over the whole slice, and split beside tensor parallelism. Collectives of the layers are summed
by axis and by the kind that the compiler chose; what is no start/done pair nor fused with computation is synchronous.
``options`` are the ones that published MaxText recipes set for asynchronous AllGathers.
"""

from __future__ import annotations

import csv
import sys
import time
from collections import Counter

from rooftop.arrays import AXES, Mesh
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.ledger import read_ledger
from rooftop.hardware import Slice
from rooftop.models import ModelConfig
from rooftop.programs.model.layer import Computation
from rooftop.programs.training.program import TrainProgram

MODEL = ModelConfig(
    name="toy", family="llama", layers=4, d_model=2048, d_ff=8192, heads=16, kv_heads=8, d_head=128, vocab=8192,
    max_seq_len=2048,
)  # fmt: skip
CASES = [
    ("v4:4x4x4", "fsdp=x+y+z", 64),
    ("v4:4x4x4", "fsdp=x+y,tensor=z", 64),
    ("v5e:4x4", "fsdp=x+y", 32),
    ("v5e:4x4", "fsdp=x,tensor=y", 32),
    ("v5p:4x4x4", "fsdp=x+y+z", 64),
    ("v5p:4x4x4", "fsdp=x+y,tensor=z", 64),
    ("v6e:4x4", "fsdp=x+y", 32),
    ("v6e:4x4", "fsdp=x,tensor=y", 32),
    ("tpu7x:2x2x2", "fsdp=x+y+z+core", 64),
]
OPTIONS = {
    "default": {},
    "asynchronous": {
        "xla_tpu_enable_async_collective_fusion": True,
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
        "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
        "xla_tpu_overlap_compute_collective_tc": True,
        "xla_enable_async_all_gather": "true",
    },
}


def main() -> None:
    """Compile every case and write one line per kind of collective."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    header = True
    for name, layout, batch in CASES:
        for label, options in OPTIONS.items():
            laid = Mesh.from_layout(Slice.parse(name), layout)
            mesh = Mesh(laid.slice, {axis: laid.axes.get(axis, ()) for axis in AXES})
            program = TrainProgram(computation=Computation(model=MODEL, remat="block"), batch=batch, seq_len=2048)
            request = CompileRequest(
                mesh=mesh,
                program="rooftop.programs.training.step:lower",
                arguments=program.to_json(),
                options=options,
            )
            compiled = compile_ahead_of_time(request, timeout_s=1200)
            if header:
                versions = ", ".join(f"{package} {version}" for package, version in compiled.versions.items())
                print(f"# python bench/overlap.py; {versions}; {time.strftime('%Y-%m-%d')}")
                out.writerow(("slice", "layout", "options", "axis", "kind", "bytes", "asynchronous"))
                header = False
            moved: Counter[tuple[str, str]] = Counter()
            asynchronous: Counter[tuple[str, str]] = Counter()
            for row in read_ledger(compiled.module, compiled.mesh.shape, compiled.mesh):
                if row.scope.startswith("layers"):
                    for collective in row.collectives:
                        key = "+".join(collective.axes), collective.kind
                        moved[key] += int(row.count * collective.bytes)
                        asynchronous[key] += 0 if collective.critical else int(row.count * collective.bytes)
            for (axis, kind), total in sorted(moved.items()):
                share = asynchronous[axis, kind] / total
                out.writerow((name, layout, label, axis, kind, total, f"{share:.3f}"))
            sys.stdout.flush()


if __name__ == "__main__":
    main()
