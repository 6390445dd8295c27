"""How long the page waits for its answers: every stop of every slider, over HTTP, and the CPU time that each takes.

    python bench/ui.py -o bench/results/ui.csv

`rooftop ui` runs in a process of its own and is asked over one connection, one question after another, each state
once after a first question that imports what the explorer needs (``first_ms``). ``cpu`` is the time of one thread on
the same states, without HTTP: what the answer would take on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import csv
import http.client
import importlib.metadata
import io
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from rooftop.files import write_text
from rooftop.ui.controls import read_state
from rooftop.ui.explorers import EXPLORERS, explorer

#: States besides the default one whose sliders are moved: larger slices, the planner's own arithmetic.
OTHERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("training", {"on": "v5p:16x16x16"}),
    ("training", {"on": "v5e:16x16@4", "model": "llama3-8b"}),
    ("serving", {"bounds": "usable"}),
    ("serving", {"bounds": "usable", "on": "v5e:4x8", "mesh": "context=4,tensor=8"}),
    ("sharding", {"expression": "A[I_X, J] @ B[J, K_X] -> C[I_X, K]"}),
)
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def states(name: str, base: dict[str, str]) -> Iterator[dict[str, str]]:
    """Every stop of every slider, the other controls as they are."""
    for control in explorer(name).controls:
        for stop in control.stops:
            yield base | {control.name: str(stop)}


def cpu_ms(name: str, state: dict[str, str]) -> float:
    """CPU milliseconds of one answer, as JSON."""
    one = explorer(name)
    start = time.process_time()
    json.dumps(one.answer(read_state(one.controls, state.items())).to_json())
    return (time.process_time() - start) * 1e3


def measure(connection: http.client.HTTPConnection, name: str, base: dict[str, str]) -> dict[str, object]:
    """One row: how long the answers to the states of an explorer took."""

    def ask(state: dict[str, str]) -> tuple[float, int, int]:
        start = time.perf_counter()
        connection.request("GET", f"/api/{name}?{urlencode(state)}")
        response = connection.getresponse()
        size = len(response.read())
        return (time.perf_counter() - start) * 1e3, size, response.status

    first, _, _ = ask(base)
    asked = list(states(name, base))
    answers = [(state, *ask(state)) for state in asked]
    good = [(state, took, size) for state, took, size, status in answers if status == 200]
    waits = sorted(took for _, took, _ in good)
    cpu = sorted(cpu_ms(name, state) for state, _, _ in good)
    return {
        "explorer": name,
        "base": " ".join(f"{key}={value}" for key, value in base.items()) or "default",
        "states": len(good),
        "refused": len(asked) - len(good),
        "first_ms": round(first, 1),
        "median_ms": round(statistics.median(waits), 1),
        "p90_ms": round(waits[int(0.9 * (len(waits) - 1))], 1),
        "max_ms": round(waits[-1], 1),
        "under_50_ms": round(sum(took < 50 for took in waits) / len(waits), 3),
        "cpu_median_ms": round(statistics.median(cpu), 1),
        "cpu_max_ms": round(cpu[-1], 1),
        "kilobytes": round(statistics.median(size for _, _, size in good) / 1e3, 1),
    }


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    os.environ.update(THREADS)
    command = [sys.executable, "-m", "rooftop", "ui", "--no-open", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | THREADS) as server:
        assert server.stdout is not None
        where = urlsplit(server.stdout.readline().split()[3])
        connection = http.client.HTTPConnection(where.hostname or "", where.port)
        rows = [measure(connection, name, base) for name, base in (*((each, {}) for each in EXPLORERS), *OTHERS)]
        server.terminate()
    out = io.StringIO()
    versions = f"python {platform.python_version()}, numpy {importlib.metadata.version('numpy')}"
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    out.write(f"# python bench/ui.py; {versions}, {os.cpu_count()} cores shared (load {load}); {time.strftime('%F')}\n")
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    print(out.getvalue(), end="")
    if chosen.output is not None:
        write_text(chosen.output, out.getvalue())


if __name__ == "__main__":
    main()
