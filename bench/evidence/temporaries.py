"""Temporaries as XLA:TPU's statistics count them, over the heap of the same programs, from the compiler's cache.

    python bench/evidence/temporaries.py

Fill the cache with ``python bench/compiler/compile.py`` first. Programs with less than 0.5 GB of temporaries are left
out. ``rooftop.validation.memory.STATISTICS_OVER_HEAP`` are the 5th and the 95th percentile.
"""

from __future__ import annotations

import json

import numpy as np

from rooftop.compiler.cache import Cache
from rooftop.explain.compiled.training import PROGRAM

LEAST_BYTES = 5e8


def ratios() -> list[float]:
    """``temp_size_in_bytes`` over the heap, of each cached train step that XLA:TPU compiled."""
    over_heap = []
    for path in Cache.of_user().folder.glob("*.json"):
        entry = json.loads(path.read_text(encoding="utf-8"))
        program = entry["result"].get("program")
        if entry["request"]["program"] != PROGRAM or program is None or program["at_peak"] is None:
            continue
        memory = program["memory"]
        heap = program["at_peak"]["allocated_bytes"] - memory["argument"] - memory["output"] + memory["alias"]
        if "libtpu" in program["versions"] and heap > LEAST_BYTES:
            over_heap.append(memory["temp"] / heap)
    return over_heap


if __name__ == "__main__":
    of_programs = ratios()
    least, low, middle, high, most = np.percentile(of_programs, (0, 5, 50, 95, 100))
    print(f"{len(of_programs)} programs: {least:.2f} to {most:.2f}, median {middle:.2f}, 90 % {low:.2f} to {high:.2f}")
