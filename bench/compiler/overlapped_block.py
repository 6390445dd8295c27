"""The Transformer block of chapter 10 on v5e:4x4: overlapped, as XLA does it, and without communication.

Each is compiled ahead of time as F shrinks.

Times are those of the compiler's schedule, priced by rooftop's expected rates and by XLA's own cycles: no TPU is
needed, and none was used. Writes bench/results/overlapped_block.csv.

    python bench/compiler/overlapped_block.py
"""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from pathlib import Path

from rooftop.arrays import Mesh
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.machine.schedule import timeline
from rooftop.core.files import write_text
from rooftop.hardware import Slice

RESULTS = Path(__file__).parents[1] / "results" / "overlapped_block.csv"
SIZES = (32768, 24576, 16384, 8192, 4096)
VERSIONS = (("overlapped", False), ("overlapped", True), ("default", False), ("unreduced", False))


def main() -> None:
    """Compile every version for every F, and write what their schedules take."""
    mesh = Mesh.lay(Slice.parse("v5e:4x4"), {"X": 4, "Y": 4})
    rows: list[dict[str, object]] = []
    for width in SIZES:
        for version, bidirectional in VERSIONS:
            arguments = {"B": 8192, "D": 8192, "F": width, "version": version, "bidirectional": bidirectional}
            compiled = compile_ahead_of_time(
                CompileRequest(mesh=mesh, program="bench.compiler.block:lower", arguments=arguments)
            )
            ours = timeline(compiled.module, mesh)
            theirs = timeline(compiled.module, mesh, estimates="xla")
            rows.append(
                {
                    "F": width,
                    "version": version + (" both ways" if bidirectional else ""),
                    "total_us": round(1e6 * ours.total_s, 1),
                    "exposed_us": round(1e6 * ours.exposed_s, 1),
                    "xla_total_us": round(1e6 * theirs.total_s, 1),
                    "xla_exposed_us": round(1e6 * theirs.exposed_s, 1),
                    "collectives": "; ".join(
                        f"{entry.collective.kind}_{''.join(entry.collective.axes)} {entry.collective.hops} hops"
                        for entry in ours.collectives
                    ),
                }
            )
            print(*rows[-1].values(), sep="  ", flush=True)
    versions = ", ".join(f"{name} {version}" for name, version in compiled.versions.items())
    text = io.StringIO()
    text.write("# python bench/compiler/overlapped_block.py\n")
    text.write(f"# {datetime.now(UTC):%Y-%m-%d}, {versions}; B=8192 D=8192 bf16\n")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(RESULTS, text.getvalue())


if __name__ == "__main__":
    main()
