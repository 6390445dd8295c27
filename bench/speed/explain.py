"""Time and memory of reading and measuring a large trace: 100 MB in less than 15 s and 2 GB.

The trace is made here: eight TPUs, each with steps of a few hundred ops on its line "XLA Ops" that carry stats, their
transfers apart, and the executions and steps around them, as libtpu writes them. Reading it is done in a process of its
own, whose memory is then that of the reader.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from rooftop.core.timelines.xprof import message as field

#: What the tool promises.
SECONDS, BYTES = 15.0, 2e9
_DEVICES, _OPS, _STATS = 8, 400, 2
_PS = 1_000_000
PART, WHOLE = "bf16[8,128]{1,0}", "bf16[64,128]{1,0}"


def event(kind: int, start_ps: int, duration_ps: int, stats: bytes) -> bytes:
    """An event of a line."""
    return field(4, field(1, kind) + field(2, start_ps) + field(3, duration_ps) + stats)


def op(number: int) -> str:
    """The HLO of an op: three in a hundred are collectives with two ends."""
    if number % 100 in (10, 30, 50):
        return f"%all-gather-start.{number} = ({PART}, {WHOLE}) all-gather-start({PART} %p.{number})"
    if number % 100 in (12, 32, 52):
        return f"%all-gather-done.{number} = {WHOLE} all-gather-done(({PART}, {WHOLE}) %all-gather-start.{number - 2})"
    return f"%fusion.{number} = {WHOLE} fusion({WHOLE} %p.0), kind=kLoop, calls=%fused_computation.{number}"


def plane(ordinal: int, steps: int) -> bytes:
    """The plane of one TPU."""
    ops, modules, marks = [
        bytearray(field(2, name) + field(3, 1_000_000)) for name in (b"XLA Ops", b"XLA Modules", b"Steps")
    ]
    now = 0
    for step in range(steps):
        begin = now
        for number in range(_OPS):
            stats = b"".join(field(4, field(1, at + 1) + field(4, step * 7919 + number)) for at in range(_STATS))
            ops += event(number + 1, now, 9 * _PS + number, stats)
            now += 10 * _PS
        modules += event(_OPS + 1, begin, now - begin - _PS, b"")
        marks += event(_OPS + 2 + step, begin, now - begin, b"")
        now += 50 * _PS
    names = [op(number) for number in range(_OPS)] + ["jit_step(1)"] + [str(step) for step in range(steps)]
    metadata = b"".join(
        field(4, field(1, at) + field(2, field(1, at) + field(2, name.encode())))
        for at, name in enumerate(names, start=1)
    )
    stat_names = b"".join(
        field(5, field(1, at) + field(2, field(1, at) + field(2, name)))
        for at, name in enumerate((b"run_id", b"queue"), start=1)
    )
    lines = b"".join(field(3, bytes(line)) for line in (ops, modules, marks))
    return field(1, field(2, f"/device:TPU:{ordinal}".encode()) + lines + metadata + stat_names)


def write(path: Path, megabytes: float) -> int:
    """Write a trace of about so many megabytes; how many events of ops it has."""
    one = (len(plane(0, 60)) - len(plane(0, 50))) / 10
    steps = max(2, math.ceil(megabytes * 1e6 / _DEVICES / one))
    with path.open("wb") as file:
        for ordinal in range(_DEVICES):
            file.write(plane(ordinal, steps))
    return _DEVICES * steps * _OPS


def read(path: Path) -> None:
    """Read and measure a trace, and print what that took as JSON."""
    start, used = time.perf_counter(), time.process_time()
    # Importing is a part of what a user waits for.
    from rooftop.explain.measured.report import explain

    ledger = explain(path)
    data = ledger.to_json()
    print(
        json.dumps(
            {
                "wall_s": round(time.perf_counter() - start, 2),
                "cpu_s": round(time.process_time() - used, 2),
                "peak_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
                "steps": len(data["steps"]),
                "verdict": data["verdict"],
            }
        )
    )


def main() -> int:
    """Make a trace, read it, and say whether that keeps the promise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--read", type=Path, help="only read this trace")
    parser.add_argument("-o", "--output", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.read is not None:
        read(options.read)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "host.xplane.pb"
        events = write(file, options.megabytes)
        done = subprocess.run(
            [sys.executable, __file__, "--read", str(file)], capture_output=True, text=True, check=True
        )
        figures = json.loads(done.stdout.splitlines()[-1])
        size = file.stat().st_size
    within = figures["wall_s"] < SECONDS and figures["peak_rss_bytes"] < BYTES
    result = {
        "what": "read and measure a synthetic trace of eight TPUs",
        "bytes": size,
        "events": events,
        **figures,
        "within": within,
        "limits": {"wall_s": SECONDS, "peak_rss_bytes": BYTES},
        "machine": {"cpus": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
        "versions": {name: importlib.metadata.version(name) for name in ("rooftop", "numpy", "jax")},
        "date": datetime.now(UTC).date().isoformat(),
        "command": "python bench/speed/explain.py",
    }
    print(json.dumps(result, indent=1))
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
