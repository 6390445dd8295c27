"""Shares of collectives that XLA:TPU's schedules run asynchronously, and that computation hides, by chip.

    python bench/evidence/overlap.py [SLICE ...] > bench/results/overlap.csv

A four-layer decoder (D 2048, F 8192, block remat) is compiled ahead of time, with no accelerator, for a small slice of
each chip: weights split over the whole slice, and split beside tensor parallelism. Collectives of the layers are summed
by axis and by the kind that the compiler chose; what is no start/done pair nor fused with computation is synchronous.
``hidden`` is a share of their time: what no computation waits for, in the compiled schedule run on the machine of
docs/evidence/accuracy.md. ``options`` are XLA's own, those of a plan (``rooftop.compiler.options``), and those that
published MaxText recipes set for asynchronous AllGathers.
"""

from __future__ import annotations

import csv
import sys
import time
from collections import defaultdict
from dataclasses import dataclass

from rooftop.arrays import AXES, Mesh
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.options import train_options
from rooftop.core.ledger import Collective
from rooftop.explain.compiled.report import CompiledReport
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
    ("tpu7x:2x2x2", "fsdp=x+y+z,tensor=core", 64),
]
PUBLISHED: dict[str, bool | str] = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": "true",
}


@dataclass
class Moved:
    """Bytes of a kind of collective over an axis, and seconds; of both, those that computation hides."""

    bytes: float = 0.0
    asynchronous: float = 0.0
    seconds: float = 0.0
    exposed_s: float = 0.0

    def add(self, collective: Collective, count: float) -> None:
        """Count ``count`` executions."""
        self.bytes += count * float(collective.bytes)
        self.asynchronous += 0.0 if collective.critical else count * float(collective.bytes)
        self.seconds += count * float(collective.expected_s)
        self.exposed_s += count * float(collective.exposed_s)


def laid(name: str, layout: str) -> Mesh:
    """The mesh of a layout on a slice, with all axes."""
    mesh = Mesh.from_layout(Slice.parse(name), layout)
    return Mesh(mesh.slice, {axis: mesh.axes.get(axis, ()) for axis in AXES})


def moved_in_layers(report: CompiledReport) -> dict[tuple[tuple[str, ...], str], Moved]:
    """The collectives of a compiled step's layers, by axes and kind."""
    moved: defaultdict[tuple[tuple[str, ...], str], Moved] = defaultdict(Moved)
    for row in report.ledger:
        if row.scope.startswith("layers"):
            for collective in row.collectives:
                moved[tuple(collective.axes), collective.kind].add(collective, float(row.count))
    return moved


def main() -> None:
    """Compile every case of the slices asked for, and write one line per kind of collective."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    header = True
    for name, layout, batch in CASES:
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        mesh = laid(name, layout)
        planned = train_options(mesh.shape, mesh.slice.chip.name, slices=1)
        for label, options in {"default": {}, "plan": planned, "asynchronous": PUBLISHED}.items():
            if label == "plan" and not options:
                continue
            program = TrainProgram(computation=Computation(model=MODEL, remat="block"), batch=batch, seq_len=2048)
            request = CompileRequest(
                mesh=mesh,
                program="rooftop.programs.training.step:lower",
                arguments=program.to_json(),
                options=options,
            )
            compiled = compile_ahead_of_time(request, timeout_s=1800)
            if header:
                versions = ", ".join(f"{package} {version}" for package, version in compiled.versions.items())
                print(f"# python bench/evidence/overlap.py; {versions}; {time.strftime('%Y-%m-%d')}")
                out.writerow(("slice", "layout", "options", "axis", "kind", "bytes", "asynchronous", "hidden"))
                header = False
            moved = moved_in_layers(CompiledReport(plan=None, compiled=compiled))
            for (axes, kind), sums in sorted(moved.items()):
                asynchronous, hidden = sums.asynchronous / sums.bytes, 1 - sums.exposed_s / sums.seconds
                out.writerow(
                    (name, layout, label, "+".join(axes), kind, int(sums.bytes), f"{asynchronous:.3f}", f"{hidden:.3f}")
                )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
