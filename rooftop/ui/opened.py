"""Files that rooftop wrote, as documents: plans, compilations, simulations, explained runs, runs under way.

Reading a trace takes seconds. A shelf reads it in a thread, once, and shows what is known
meanwhile.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.extras import naming_extras
from rooftop.core.files import open_file, parse_json, read_bytes, read_text
from rooftop.core.quantities import format_bytes
from rooftop.present.browser import Widths, to_data
from rooftop.present.document import Chart, ChartAxis, ChartSeries, Document, Lines, ShownFigure, ShownVerdict
from rooftop.present.documents import KINDS, document

_ACCEPTED = "a plan, a compilation, a simulation or an explained run: what rooftop wrote with -o or --json"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """A file, its kind in words, and its document; ``pending`` names the work that is still under way."""

    name: str
    what: str
    answer: Document
    pending: str = ""

    def to_json(self, widths: Widths | None = None) -> dict[str, Any]:
        """Plain JSON values, with charts drawn at some widths."""
        return {"name": self.name, "what": self.what, "pending": self.pending} | to_data(self.answer, widths)


def opened(path: Path) -> Opened:
    """Document of a file; of a folder or trace, the one of ``rooftop explain``. Raises RooftopError."""
    if path.is_dir() or path.name.endswith(".xplane.pb"):
        from rooftop.explain.measured.report import explain
        from rooftop.present.traced import measured_document

        # A trace that has the only copy of its program needs jaxlib to read it. The timelines are drawn from the trace
        # and its plan: the JSON of a report does not have them.
        with naming_extras():
            answer = measured_document(explain(path))
        return Opened(name=path.name, what=KINDS["explained"].what, answer=answer)
    try:
        body = read_bytes(path)
    except OSError as error:
        raise RooftopError("file", path.name, f"a file that can be read ({error.strerror})") from None
    return opened_text(path.name, body)


def opened_text(name: str, body: bytes) -> Opened:
    """Document of a file's content. Raises RooftopError on files that rooftop did not write."""
    try:
        data = parse_json(body)
    except (ValueError, RecursionError) as error:
        raise RooftopError("file", name, f"{_ACCEPTED} (not JSON: {str(error)[:120]})") from None
    return opened_json(name, data)


def opened_json(name: str, data: Any) -> Opened:
    """Document of JSON values. Raises RooftopError on values that rooftop did not write."""
    kind = data.get("kind") if isinstance(data, Mapping) else None
    if not isinstance(kind, str) or kind not in KINDS:
        raise RooftopError("file", name, f"{_ACCEPTED}; its kind one of {', '.join(KINDS)}")
    what = KINDS[kind].what
    try:
        answer = document(data)
        json.dumps(to_data(answer), allow_nan=False)
    except Infeasible as no:
        raise RooftopError("file", name, str(no)) from None
    except RooftopError as error:
        raise RooftopError("file", name, f"{what} as rooftop writes it ({error})") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        accepted = f"{what} as rooftop writes it ({type(error).__name__}: {str(error)[:120]})"
        raise RooftopError("file", name, accepted) from None
    return Opened(name=name, what=what, answer=answer)


#: State of a file when it was read: path, time of its last change and size of each part.
_Stamp = tuple[tuple[str, int, int], ...]
_PARTS = ("**/*.xplane.pb", "run.json", "plan.json", "profile/step.hlo.txt")


class Shelf:
    """The files that the page shows. Those that take long to read are cached until they change."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = tuple(files)
        self._opened: dict[Path, tuple[_Stamp, Future[Opened]]] = {}
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Begin to read the files that take long."""
        for path in self._files:
            if takes_long(path):
                self._reading(path)

    def whole(self, path: Path) -> Opened:
        """The complete document of a file, however long that takes. Raises RooftopError."""
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
            if path not in self._opened or self._opened[path][0] != stamp:
                result: Future[Opened] = Future()
                self._opened[path] = stamp, result
                # A daemon: Ctrl-C does not wait for it.
                threading.Thread(target=_read, args=(path, result), name=f"reads {path.name}", daemon=True).start()
            return self._opened[path][1]


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
        openeds.set_exception(error)  # raised in the thread that asks for the result


#: Records of metrics that are shown, evenly over the run.
_SHOWN = 400
_LINE = 4096


def first_look(path: Path) -> Opened | None:
    """Document of run.json and metrics.jsonl; None if the folder is no run."""
    try:
        about = parse_json(read_text(path / "run.json"))
        return Opened(name=path.name, what="a run", answer=_answer(about, list(_records(path / "metrics.jsonl"))))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def _answer(about: Mapping[str, Any], records: list[Mapping[str, Any]]) -> Document:
    program = about["job"]["program"]
    mesh = ", ".join(f"{name} {size}" for name, size in about.get("mesh", {}).items() if size > 1) or "one device"
    steps = [record for record in records if "loss" in record]
    title = f"{program['computation']['model']['name']} on {about.get('devices', {}).get('name', 'devices')}, {mesh}"
    if not steps:
        return Document(verdict=ShownVerdict(says=f"{title}; no step is recorded yet."))
    last = steps[-1]
    figures = (
        ShownFigure("step", "Steps done", float(last["step"]), level="measured"),
        ShownFigure(
            "loss", "Loss", last["loss"], level="measured", formula="nats a token", shown=f"{last['loss']:.4f}"
        ),
        ShownFigure("step_s", "Step", last["seconds"], "s", "measured", formula="the last one"),
        ShownFigure("tokens_per_s", "Throughput", last["tokens_per_s"], "tok/s", "measured"),
        ShownFigure(
            "mfu",
            "MFU",
            last["mfu"],
            "%",
            "measured",
            formula="of the chip's peak" if last["mfu"] is not None else "no peak is known of these devices",
        ),
    )
    return Document(verdict=ShownVerdict(says=f"{title}: step {last['step']}."), figures=figures, charts=_loss(records))


def _loss(records: list[Mapping[str, Any]]) -> tuple[Chart, ...]:
    kinds = (("training", "loss"), ("held out", "eval_loss"))
    series = tuple(
        ChartSeries(name, points, "line" if len(points) > 1 else "point")
        for name, key in kinds
        if (points := tuple((float(record["step"]), float(record[key])) for record in records if key in record))
    )
    step, loss = ChartAxis("step", zero=False), ChartAxis("loss, nats a token", zero=False)
    return (Lines(title="Loss", x=step, y=loss, series=series),) if series else ()


def _records(path: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of metrics.jsonl; of a long one some, evenly over it, and the last."""
    with open_file(path) as file:
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
