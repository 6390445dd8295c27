"""Time that the page waits for its answers, over HTTP: every stop, choice and suggestion of every control.

    python bench/speed/ui.py [--run RUN] [-o bench/results/ui.csv]

`rooftop ui` runs in a process of its own and is asked over one connection, one question after another, each state
``REPEATS`` times in ``REPEATS`` servers, of which the shortest wait counts: what is left is not other programs' doing,
and no answer comes out of a cache that the same question filled. ``first_ms`` is the wait for the first question of
an explorer. ``cpu`` is the time that the server computed for an answer (Linux tells it of each thread): the wait
on a machine that does nothing else; ``slowest`` is the state of ``cpu_max_ms``. With ``--run`` the folder of a run is
opened too: what is there while its trace is read, when all of it is there, and when it is opened again.
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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import urlencode, urlsplit

from rooftop.core.files import write_text
from rooftop.ui.explorers import EXPLORERS, explorer

#: States besides the default one whose sliders are moved: larger slices, the planner's own arithmetic.
OTHERS: tuple[tuple[str, dict[str, str]], ...] = (
    ("training", {"on": "v5p:16x16x16"}),
    ("training", {"on": "v5e:16x16@4", "model": "llama3-8b"}),
    ("serving", {"bounds": "usable"}),
    ("serving", {"bounds": "usable", "on": "v5e:4x8", "mesh": "context=4,tensor=8"}),
    ("serving", {"bounds": "usable", "on": "v5e:8x8"}),
    ("serving", {"bounds": "usable", "on": "v5p:4x4x8"}),
    ("sharding", {"expression": "A[I_X, J] @ B[J, K_X] -> C[I_X, K]"}),
    ("sharding", {"mesh": "X=4,Y=4,Z=4", "on": "v5p:4x4x4"}),
    ("sharding", {"mesh": "X=4,Y=4,Z=4", "on": "v5p:4x4x4", "price": "expected"}),
    ("pipeline", {"stages": "16", "microbatches": "64"}),
    ("pipeline", {"stages": "16", "microbatches": "64", "schedule": "interleaved"}),
)
REPEATS = 2
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def states(name: str, base: dict[str, str]) -> Iterator[dict[str, str]]:
    """Every stop, option and suggestion of every control, the other controls as they are."""
    for control in explorer(name).form.controls:
        for value in (*control.stops, *control.options, *control.suggestions):
            yield base | {control.name: str(value)}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One answer: milliseconds until it was there, those that the server computed, its status and body."""

    wait_ms: float
    cpu_ms: float
    status: int
    body: bytes


@dataclass(frozen=True, kw_only=True)
class Server:
    """A page that is served, and a connection to it."""

    connection: http.client.HTTPConnection
    pid: int

    def computed_ms(self) -> float:
        """Milliseconds that all of its threads have computed."""
        threads = Path(f"/proc/{self.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e6

    def ask(self, address: str) -> Asked:
        """Ask for one address."""
        computed, start = self.computed_ms(), time.perf_counter()
        self.connection.request("GET", address)
        response = self.connection.getresponse()
        body = response.read()
        wait_ms = (time.perf_counter() - start) * 1e3
        return Asked(wait_ms=wait_ms, cpu_ms=self.computed_ms() - computed, status=response.status, body=body)


@contextmanager
def served(*files: Path) -> Iterator[Server]:
    """A server of its own."""
    command = [sys.executable, "-m", "rooftop", "ui", "--no-open", "--port", "0", *map(str, files)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | THREADS) as server:
        assert server.stdout is not None
        where = urlsplit(server.stdout.readline().split()[3])
        yield Server(connection=http.client.HTTPConnection(where.hostname or "", where.port), pid=server.pid)
        server.terminate()


def measure(server: Server, name: str, base: dict[str, str]) -> tuple[Asked, list[tuple[dict[str, str], Asked]]]:
    """The first answer of an explorer, and those to each of its states."""
    first = server.ask(f"/api/{name}?{urlencode(base)}")
    return first, [(state, server.ask(f"/api/{name}?{urlencode(state)}")) for state in states(name, base)]


def row(
    name: str, base: dict[str, str], measured: list[tuple[Asked, list[tuple[dict[str, str], Asked]]]]
) -> dict[str, object]:
    """One line of the table: the shortest of the repeated waits for each state."""
    repeated = list(zip(*(answers for _, answers in measured), strict=True))
    good = [pair for pair in repeated if pair[0][1].status == 200]
    slowest = max(good, key=lambda answers: min(one.cpu_ms for _, one in answers))[0][0]
    return line(
        name,
        " ".join(f"{key}={value}" for key, value in base.items()) or "default",
        [[one for _, one in pair] for pair in good],
        first=[one for one, _ in measured],
        refused=len(repeated) - len(good),
        slowest=" ".join(f"{key}={value}" for key, value in slowest.items() if base.get(key) != value) or "itself",
    )


def line(
    name: str, base: str, asked: list[list[Asked]], *, first: list[Asked], refused: int = 0, slowest: str = ""
) -> dict[str, object]:
    """A row of the table: the states of an explorer, each requested several times."""
    waits = sorted(min(one.wait_ms for one in answers) for answers in asked)
    cpu = sorted(min(one.cpu_ms for one in answers) for answers in asked)
    return {
        "explorer": name,
        "base": base,
        "states": len(waits),
        "refused": refused,
        "first_ms": round(min(one.wait_ms for one in first), 1),
        "median_ms": round(statistics.median(waits), 1),
        "p90_ms": round(waits[int(0.9 * (len(waits) - 1))], 1),
        "max_ms": round(waits[-1], 1),
        "under_50_ms": round(sum(took < 50 for took in waits) / len(waits), 3),
        "cpu_first_ms": round(min(one.cpu_ms for one in first), 1),
        "cpu_median_ms": round(statistics.median(cpu), 1),
        "cpu_max_ms": round(cpu[-1], 1),
        "cpu_under_50_ms": round(sum(took < 50 for took in cpu) / len(cpu), 3),
        "slowest": slowest,
        "kilobytes": round(statistics.median(len(answers[0].body) for answers in asked) / 1e3, 1),
    }


def opened(run: Path) -> list[dict[str, object]]:
    """A run opened: asked again and again until its trace is read, then all of it, then once more."""
    size = sum(file.stat().st_size for file in run.rglob("*.xplane.pb")) / 1e6
    begin = time.perf_counter()
    with served(run) as server:
        meanwhile = []
        while json.loads((answer := server.ask("/api/files/0?now")).body).get("pending"):
            meanwhile.append([answer])
        whole = replace(answer, wait_ms=(time.perf_counter() - begin) * 1e3)
        again = [[server.ask("/api/files/0")] for _ in range(20)]
    what = f"a run with {size:.1f} MB of trace"
    rows = [
        line("open", f"{what}, while it is read", meanwhile[1:], first=meanwhile[0]),
        line("open", f"{what}, all of it from the start of the page", [[whole]], first=[whole]),
        line("open", f"{what}, again", again, first=again[0]),
    ]
    # A thread reads the trace meanwhile: what the server computes is not for these answers.
    return [{name: "" if name.startswith("cpu") else value for name, value in line.items()} for line in rows]


def main() -> None:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path)
    parser.add_argument("-o", "--output", type=Path)
    chosen = parser.parse_args()
    os.environ.update(THREADS)
    cases = (*((explorer, dict[str, str]()) for explorer in EXPLORERS), *OTHERS)
    measured: list[list[tuple[Asked, list[tuple[dict[str, str], Asked]]]]] = [[] for _ in cases]
    for _ in range(REPEATS):
        with served() as server:
            for (name, base), pairs in zip(cases, measured, strict=True):
                pairs.append(measure(server, name, base))
    rows = [row(name, base, pairs) for (name, base), pairs in zip(cases, measured, strict=True)]
    rows += opened(chosen.run) if chosen.run is not None else []
    out = io.StringIO()
    versions = f"python {platform.python_version()}, numpy {importlib.metadata.version('numpy')}"
    load = ", ".join(f"{load:.1f}" for load in os.getloadavg())
    command = "python bench/speed/ui.py" + (" --run RUN" if chosen.run is not None else "")
    out.write(f"# {command}; {versions}, {os.cpu_count()} cores shared (load {load}); {time.strftime('%F')}\n")
    writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    print(out.getvalue(), end="")
    if chosen.output is not None:
        write_text(chosen.output, out.getvalue())


if __name__ == "__main__":
    main()
