"""Faults of the operating system, for processes that tests start: see shim.c, which is compiled once."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

#: False where there is no compiler for C, or no Linux.
AVAILABLE = sys.platform == "linux" and shutil.which("cc") is not None
_KEPT = list[tempfile.TemporaryDirectory[str]]()


@cache
def preload() -> dict[str, str]:
    """Environment of a process that can be given faults; empty where they are not AVAILABLE."""
    if not AVAILABLE:
        return {}
    _KEPT.append(tempfile.TemporaryDirectory(prefix="rooftop-shim-"))
    library = Path(_KEPT[0].name) / "shim.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O2", "-Wall", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


def failing_disk(folder: Path, first: int, count: int, hit: Path) -> dict[str, str]:
    """EIO for ``count`` writes and syncs of files below ``folder``, from the one with the number ``first`` on.

    The file ``hit`` is made at the first failure.
    """
    return {"ROOFTOP_FAULT_EIO": f"{first}:{count}:{folder}", "ROOFTOP_FAULT_HIT": str(hit)}


def jumping_clock(seed: int) -> dict[str, str]:
    """Jumps of the clock of the day by up to two days."""
    return {"ROOFTOP_FAULT_CLOCK": str(seed)}
