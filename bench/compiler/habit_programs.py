"""Small programs that show the habits of XLA:TPU's schedules, compiled ahead of time with the installed libtpu.

    python -m bench.compiler.habit_programs FOLDER [CHIP ...]

Writes the facts of each program to a file of its own in FOLDER, unless the file is there: one interrupted goes on. For
each chip there are

- ``whole`` and ``tensor``: the decoder of bench/evidence/overlap.py, its weights split over the whole slice, and beside
  tensor parallelism, with XLA's default options; ``plain``: ``whole`` without XLA's own collective matmuls, if it has
  any.

No TPU is needed. ``bench/compiler/habits.py`` reads the facts.
"""

from __future__ import annotations

import sys
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

from bench.compiler.habits import MovedBytes, ProgramFacts, read_facts
from bench.evidence import overlap
from rooftop.compiler.compiling import CompileRequest, compile_ahead_of_time
from rooftop.compiler.options import options_for
from rooftop.core.files import write_json
from rooftop.core.records import plain
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.compiled.training import PROGRAM
from rooftop.programs.model.layer import Computation
from rooftop.programs.training.program import TrainProgram

TIMEOUT_S = 1800.0
CHIPS = tuple(dict.fromkeys(case[0].partition(":")[0] for case in overlap.CASES))


def main(folder: Path, chips: tuple[str, ...]) -> None:
    """Compile the programs whose facts are not in the folder yet."""
    for chip in chips or CHIPS:
        for name in ("whole", "tensor", "plain"):
            path = folder / f"{chip}-{name}.json"
            if path.exists() or (name == "plain" and not read_facts(folder / f"{chip}-whole.json").has_rings):
                continue
            start = time.monotonic()
            facts = compiled(chip, name)
            folder.mkdir(parents=True, exist_ok=True)
            write_json(path, plain(facts))
            print(f"{chip} {name}: {time.monotonic() - start:.0f} s", flush=True)


def compiled(chip: str, name: str) -> ProgramFacts:
    """The facts of a chip's program, which is compiled."""
    cases = [case for case in overlap.CASES if case[0].startswith(f"{chip}:")]
    slice_, layout, batch = cases[name == "tensor"]
    computation = Computation(model=overlap.MODEL, remat="block")
    program = TrainProgram(computation=computation, batch=batch, seq_len=overlap.MODEL.max_seq_len)
    request = CompileRequest(
        mesh=overlap.laid(slice_, layout),
        program=PROGRAM,
        arguments=program.to_json(),
        options=options_for("no windowed einsums") if name == "plain" else {},
    )
    report = CompiledReport(plan=None, compiled=compile_ahead_of_time(request, timeout_s=TIMEOUT_S))
    sums = overlap.moved_in_layers(report)
    rings: defaultdict[tuple[tuple[str, ...], str], float] = defaultdict(float)
    for entry in report.timeline.collectives:
        one = entry.collective
        if one.hops and one.scope.startswith("layers"):
            rings[one.axes, one.kind] += float(one.bytes * one.executions)
    return ProgramFacts(
        chip=chip,
        program=name,
        slice=slice_,
        mesh=layout,
        versions=dict(report.compiled.versions),
        date=f"{datetime.now(UTC):%Y-%m-%d}",
        step_s=float(report.timed.step.expected_s),
        moved=tuple(
            MovedBytes(axes="+".join(axes), kind=kind, rings=rings[axes, kind], **vars(moved))
            for (axes, kind), moved in sorted(sums.items())
        ),
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(sys.argv[2:]))
