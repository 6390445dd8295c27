"""Serving and training under faults, for as long as you like: what holds for five minutes should hold for a day.

``python -m tests.faults.soak --minutes 60 --output build/soak`` attacks a server (``tests.faults.serving``) and breaks
its engine every five minutes. Meanwhile it kills, stops and damages training runs, one after another
(``tests.faults.training``), with what is left of the processor. It prints a line every half minute and at the end the
report, and writes ``soak.csv``, ``soak.json``, ``soak-gaps.svg`` and ``soak-memory.svg``. The status is 1 if a bound is
broken.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rooftop.present.document import ChartAxis, ChartSeries, Lines
from rooftop.present.svg import lines_file
from tests.faults.serving import Bounds, Sample, run
from tests.faults.training import Figures

#: Minutes between two faults of the engine, and seconds between two samples.
_FAULT_EVERY, _SAMPLE_EVERY_S = 5.0, 30.0
#: Minutes that the last training run may take to its end.
_PATIENCE = 10.0


def _give_way() -> None:
    """Take what others leave of the processor.

    Linux shares it between sessions first (``autogroup``), and a nice value counts only within one.
    """
    os.setsid()
    os.nice(10)
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text("10", encoding="ascii")


class Training:
    """Training runs under faults, in a process of their own; ``newest`` are the figures after the last fault."""

    def __init__(self, seed: int, minutes: float) -> None:
        command = [sys.executable, "-m", "tests.faults.training", "--json", "--count", str(10**9)]
        command += ["--seed", str(seed), "--minutes", str(minutes)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_give_way)
        self.newest = Figures().to_json()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self.newest = json.loads(line)

    @property
    def faults(self) -> int:
        """Faults so far."""
        return sum(self.newest["faults"].values())

    def end(self) -> dict[str, Any]:
        """Wait for the last run; the figures, with the exit status: that of a signal if it does not end."""
        try:
            status = self._process.wait(60 * _PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self._reader.join()
        return {**self.newest, "status": status}


def gaps_chart(samples: Sequence[Sample]) -> Lines:
    """The neighbour's gaps over time."""
    curves = {
        "longest": [sample.gap_s for sample in samples],
        "p99.9": [sample.gap_p999_s for sample in samples],
        "median": [sample.gap_p50_s for sample in samples],
    }
    return Lines(
        title="Time between two tokens of a neighbour's streams, of each half minute",
        x=ChartAxis("minutes", zero=False),
        y=ChartAxis("time between two tokens", "s", "log"),
        series=_series(samples, curves),
        marks=_fault_marks(samples),
    )


def memory_chart(samples: Sequence[Sample]) -> Lines:
    """Resident memory over time."""
    curves = {
        "engine": [2**20 * sample.engine_memory_mib for sample in samples],
        "HTTP and texts": [2**20 * sample.memory_mib for sample in samples],
    }
    return Lines(
        title="Resident memory of the server's two processes",
        x=ChartAxis("minutes", zero=False),
        y=ChartAxis("resident memory", "B"),
        series=_series(samples, curves),
        marks=_fault_marks(samples),
    )


def _series(samples: Sequence[Sample], curves: dict[str, list[float]]) -> tuple[ChartSeries, ...]:
    return tuple(
        ChartSeries(name, tuple((sample.minute, value) for sample, value in zip(samples, values, strict=True)))
        for name, values in curves.items()
    )


def _fault_marks(samples: Sequence[Sample]) -> tuple[tuple[float, str], ...]:
    """A line where the engine was broken; the first one says so."""
    marks = list[tuple[float, str]]()
    for before, after in itertools.pairwise(samples):
        for number in range(before.faults, after.faults):
            marks.append((before.minute, "" if number else "the engine is broken"))
    return tuple(marks)


def soak(seed: int, minutes: float, output: Path, *, engine: str = "llama:2M", bounds: Bounds | None = None) -> bool:
    """Run it; True if no bound is broken."""
    output.mkdir(parents=True, exist_ok=True)
    training, samples = Training(seed, minutes), list[Sample]()
    with (output / "soak.csv").open("w", newline="", encoding="utf-8") as file:
        names = [field.name for field in fields(Sample)] + ["training_faults", "training_losses"]
        table = csv.DictWriter(file, names, lineterminator="\n")
        table.writeheader()

        def on_sample(sample: Sample) -> None:
            samples.append(sample)
            rounded = {key: round(value, 5) for key, value in asdict(sample).items()}
            table.writerow({**rounded, "training_faults": training.faults, "training_losses": training.newest["steps"]})
            file.flush()
            print(
                f"{sample.minute:6.1f} min: {sample.requests} requests, {sample.faults} + {training.faults} faults; "
                f"gaps p99.9 {1e3 * sample.gap_p999_s:.0f} ms, longest {1e3 * sample.gap_s:.0f} ms; first token "
                f"{1e3 * sample.first_p50_s:.0f} ms, longest {1e3 * sample.first_s:.0f} ms; memory "
                f"{sample.memory_mib:.0f} + {sample.engine_memory_mib:.0f} MiB, {sample.descriptors} descriptors, "
                f"{sample.pages} pages; load {sample.load:.1f}",
                flush=True,
            )

        count = max(1, int(minutes / _FAULT_EVERY))
        shares = [(number + 0.5) / count for number in range(count)]
        begun = time.strftime("%Y-%m-%d")
        report = run(
            seed, minutes, engine=engine, bounds=bounds, faults=shares, every_s=_SAMPLE_EVERY_S, on_sample=on_sample
        )
    for name, chart in (("gaps", gaps_chart(samples)), ("memory", memory_chart(samples))):
        (output / f"soak-{name}.svg").write_text(lines_file(chart, chart.title), encoding="utf-8")
    trained = training.end()
    about = {"date": begun, "python": platform.python_version(), "cores": os.cpu_count()}
    text = json.dumps({**about, "serving": asdict(report), "training": trained}, indent=1)
    (output / "soak.json").write_text(text + "\n", encoding="utf-8")
    print(text)
    return not report.broken and trained["status"] == 0


def main() -> int:
    """Run by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--output", type=Path, default=Path("build/soak"))
    parser.add_argument("--engine", default="llama:2M", help="what to serve, or 'echo'")
    options = parser.parse_args()
    return 0 if soak(options.seed, options.minutes, options.output, engine=options.engine) else 1


if __name__ == "__main__":
    sys.exit(main())
