"""What the compiler says of SparseCores' memory: its high-water marks, which no memory analysis includes.

libtpu writes them to its log when it is told to before it starts, so that a worker of its own compiles.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rooftop.errors import Infeasible, RooftopError
from rooftop.xla.compiling import ENVIRONMENT, Request, require_compiler

#: What makes libtpu write the marks.
LOGGING: Mapping[str, str] = {
    "LIBTPU_INIT_ARGS": "--xla_sc_enable_logging_memory_high_water_marks=true",
    "TPU_MIN_LOG_LEVEL": "0",
    "TPU_STDERR_LOG_LEVEL": "0",
}
#: The units of the log: HBM in granules of 8 floats, a tile's memory in words. Found by changing one limit at a time.
_HBM_UNIT, _TILE_UNIT = 32, 4
_MARK = re.compile(r"\] (HBM|TileSpmem) high water mark: (\d+)")
_NO_ROOM = re.compile(
    r"Can't fit a single row\.[^\n]*|Fixed size allocations[^\n]*|Gather operand too large[^\n]*"
    r"|No viable logical replica count[^\n]*|E3001: [^\n)]*"
)


@dataclass(frozen=True, kw_only=True)
class Marks:
    """The largest marks of a program's SparseCore computations, in bytes: HBM of one SparseCore, memory of one tile.

    ``hlo_text`` is the compiled program.
    """

    hbm_bytes: int
    tile_bytes: int
    hlo_text: str


def read_marks(log: str) -> tuple[int, int] | None:
    """HBM of one SparseCore and memory of one tile, in bytes, as libtpu's log has them; None if it has none."""
    found: dict[str, int] = {}
    for kind, mark in _MARK.findall(log):
        found[kind] = max(found.get(kind, 0), int(mark))
    return (found["HBM"] * _HBM_UNIT, found["TileSpmem"] * _TILE_UNIT) if len(found) == 2 else None


def compile_with_marks(request: Request, *, timeout_s: float = 600.0) -> Marks:
    """Compile ``request`` ahead of time and read the SparseCores' marks.

    Raises Infeasible where the compiler finds no room in a tile's memory, RooftopError where it refuses otherwise or
    the program has no SparseCore computation.
    """
    require_compiler()
    with tempfile.TemporaryDirectory(prefix="rooftop-marks-") as name:
        folder = Path(name)
        question, answer, log = folder / "request.json", folder / "result.json", folder / "log"
        question.write_text(json.dumps(request.to_json()), encoding="utf-8")
        with log.open("w", encoding="utf-8") as output:
            worker = subprocess.Popen(
                [sys.executable, "-m", "rooftop.xla.worker", str(question), str(answer)],
                env={**os.environ, **ENVIRONMENT, **LOGGING},
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                worker.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise RooftopError("timeout_s", timeout_s, f"longer than compiling {request.program} takes") from None
            finally:
                worker.kill()
                worker.communicate()
        said = log.read_text(encoding="utf-8", errors="replace")
        found = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
    if "result" not in found:
        error = found.get("error", {})
        if refused := _NO_ROOM.search(said) or _NO_ROOM.search(error.get("given", "") + error.get("accepted", "")):
            raise Infeasible("a SparseCore's tile memory", refused.group().strip())
        raise RooftopError(**error) if error else RooftopError("program", request.program, "one that XLA compiles")
    if "hlo_text" not in found["result"]:
        raise Infeasible(request.program, json.dumps(found["result"])[:300])
    marks = read_marks(said)
    if marks is None:
        raise RooftopError("program", request.program, "one with a SparseCore computation")
    return Marks(hbm_bytes=marks[0], tile_bytes=marks[1], hlo_text=found["result"]["hlo_text"])
