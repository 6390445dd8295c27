"""Files that take long to read, read once: in a thread beside the page, and kept until they change.

Reading a trace takes seconds, most of them for JAX to be imported. Who asks meanwhile gets what is there already.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooftop.core.quantities import format_bytes
from rooftop.present.document import Chart, ChartAxis, ChartSeries, Document, Lines, ShownFigure, ShownVerdict
from rooftop.ui.opened import Opened, opened

#: What a file was when it was read: path, time of its last change and size of each part.
_Stamp = tuple[tuple[str, int, int], ...]
_PARTS = ("**/*.xplane.pb", "run.json", "plan.json", "profile/step.hlo.txt")


class Shelf:
    """The files that the page shows, those that take long kept as they were last read."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._kept: dict[Path, tuple[_Stamp, Future[Opened]]] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin to read what takes long, before anybody asks for it."""
        for path in self._files:
            if takes_long(path):
                self._reading(path)

    def whole(self, path: Path) -> Opened:
        """All that a file says, however long that takes. Raises RooftopError."""
        if not takes_long(path):
            return opened(path)
        first = first_look(path)
        if first is not None and not any(map(_is_trace, _parts(path))):
            return _with(first, notes=("It has no trace: rooftop train ... --profile steps=A..B makes one.",))
        result = self._reading(path).result()
        return result if first is None else _with(replace(result, what="a run"), charts=first.answer.charts)

    def now(self, path: Path) -> Opened:
        """Document of a file so far; ``pending`` if more is being read. Raises RooftopError."""
        traces = [part for part in _parts(path) if _is_trace(part)]
        if not traces or self._reading(path).done():
            return self.whole(path)
        pending = f"Reading {format_bytes(sum(trace.stat().st_size for trace in traces))} of trace"
        first = first_look(path) or Opened(name=path.name, what="a trace", answer=Document(verdict=ShownVerdict()))
        return replace(first, pending=pending)

    def _reading(self, path: Path) -> Future[Opened]:
        stamp = tuple((str(part), part.stat().st_mtime_ns, part.stat().st_size) for part in _parts(path))
        with self._lock:
            if path not in self._kept or self._kept[path][0] != stamp:
                result: Future[Opened] = Future()
                self._kept[path] = stamp, result
                # A daemon: Ctrl-C does not wait for it.
                threading.Thread(target=_read, args=(path, result), name=f"reads {path.name}", daemon=True).start()
            return self._kept[path][1]


def takes_long(path: Path) -> bool:
    """True for a trace, or a folder that may have one."""
    return path.is_dir() or _is_trace(path)


def _is_trace(path: Path) -> bool:
    return path.name.endswith(".xplane.pb")


def _with(opened: Opened, *, charts: tuple[Chart, ...] = (), notes: tuple[str, ...] = ()) -> Opened:
    """The document of a file, with more parts."""
    answer = opened.answer
    return replace(opened, answer=replace(answer, charts=(*answer.charts, *charts), notes=(*answer.notes, *notes)))


def _parts(path: Path) -> list[Path]:
    result = [item for pattern in _PARTS for item in path.glob(pattern)] if path.is_dir() else [path]
    return sorted(item for item in result if item.is_file())


def _read(path: Path, openeds: Future[Opened]) -> None:
    try:
        openeds.set_result(opened(path))
    except BaseException as error:
        openeds.set_exception(error)  # whoever asks for it gets it


#: Records of metrics that are shown, evenly over the run.
_SHOWN = 400
_LINE = 4096


def first_look(path: Path) -> Opened | None:
    """Document of run.json and metrics.jsonl; None if the folder is no run."""
    try:
        about = json.loads((path / "run.json").read_text(encoding="utf-8"))
        return Opened(name=path.name, what="a run", answer=_answer(about, list(_records(path / "metrics.jsonl"))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _answer(about: Mapping[str, Any], records: list[Mapping[str, Any]]) -> Document:
    program = about["job"]["program"]
    mesh = ", ".join(f"{name} {size}" for name, size in about.get("mesh", {}).items() if size > 1) or "one device"
    steps = [record for record in records if "loss" in record]
    where = f"{program['computation']['model']['name']} on {about.get('devices', {}).get('name', 'devices')}, {mesh}"
    if not steps:
        return Document(verdict=ShownVerdict(says=f"{where}; no step is recorded yet."))
    last = steps[-1]
    figures = (
        ShownFigure(name="step", label="Steps done", value=float(last["step"]), level="measured"),
        ShownFigure(name="loss", label="Loss", value=f"{last['loss']:.4f}", level="measured", formula="nats a token"),
        ShownFigure(
            name="step_s", label="Step", value=last["seconds"], unit="s", level="measured", formula="the last one"
        ),
        ShownFigure(
            name="tokens_per_s", label="Throughput", value=last["tokens_per_s"], unit="tok/s", level="measured"
        ),
        ShownFigure(
            name="mfu",
            label="MFU",
            value=last["mfu"],
            unit="%",
            level="measured",
            formula="of the chip's peak" if last["mfu"] is not None else "no peak is known of these devices",
        ),
    )
    return Document(verdict=ShownVerdict(says=f"{where}: step {last['step']}."), figures=figures, charts=_loss(records))


def _loss(records: list[Mapping[str, Any]]) -> tuple[Chart, ...]:
    kinds = (("training", "loss"), ("held out", "eval_loss"))
    series = tuple(
        ChartSeries(name=name, points=points, style="line" if len(points) > 1 else "point")
        for name, key in kinds
        if (points := tuple((float(record["step"]), float(record[key])) for record in records if key in record))
    )
    step, loss = ChartAxis(label="step", zero=False), ChartAxis(label="loss, nats a token", zero=False)
    return (Lines(title="Loss", x=step, y=loss, series=series),) if series else ()


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of metrics.jsonl; of a long one some, evenly over it, and the last."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        starts = [0] if size < _SHOWN * _LINE else [size * part // _SHOWN for part in range(_SHOWN)]
        for at, start in enumerate(starts):
            file.seek(start)
            if start:
                file.readline()  # the rest of a line that began before
            if len(starts) == 1 or at == len(starts) - 1:
                # A run that goes on may be writing its last line now.
                yield from (json.loads(line) for line in file if line.endswith(b"\n"))
            else:
                yield json.loads(file.readline())
