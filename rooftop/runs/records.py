"""Records of a run: lines of metrics.jsonl and, on request, TensorBoard events, continued after a checkpoint."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from rooftop.core.errors import RooftopError
from rooftop.core.files import write_text
from rooftop.runs.folder import RunFolder


class Records:
    """The records of a run after ``step``. Every process may append to them; the first process writes.

    Records of later steps are removed: a process that was killed may have recorded more steps than it saved, and they
    are trained again, with the same losses. Raises RooftopError if the files cannot be written.
    """

    def __init__(self, folder: RunFolder, *, step: int, tensorboard: bool = False) -> None:
        self._writers = list[MetricsFile | TensorBoardEvents]()
        if jax.process_index() == 0:
            self._writers.append(MetricsFile(folder.metrics, step=step))
            if tensorboard:
                self._writers.append(TensorBoardEvents(folder.tensorboard, step=step))

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record, which has its ``step``. Raises RooftopError if it cannot be written."""
        for writer in self._writers:
            writer.append(record)

    def close(self) -> None:
        """Flush and close the event file. Later records open another."""
        for writer in self._writers:
            if isinstance(writer, TensorBoardEvents):
                writer.close()


class MetricsFile:
    """The file metrics.jsonl, cut after the records of ``step``."""

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            raise RooftopError("metrics", str(path), f"records that can be read ({error})") from None
        earlier = "".join(_lines_up_to(text, step))
        if earlier != text:
            write_text(path, earlier)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, NaN and infinities as null. Raises RooftopError if there is no room for it."""
        values = {name: None if _is_no_number(value) else value for name, value in record.items()}
        line = (json.dumps(values, allow_nan=False) + "\n").encode()
        try:
            with self._path.open("ab", buffering=0) as file:
                if file.write(line) != len(line):
                    raise OSError(0, "no room for a line")
        except OSError as error:
            raise RooftopError("metrics", str(self._path), f"a file with room for it ({error.strerror})") from None


class TensorBoardEvents:
    """An event file in ``folder``, created with its first record. TensorBoard shows all files of a folder as one run.

    Points of earlier files after ``step`` are marked void: those steps are trained again. Needs tensorboardX.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        self._folder, self._step = folder, step
        self._writer: Any = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one point for each number of a record, at its step; evaluations under ``eval/``."""
        if self._writer is None:
            from tensorboardX import SummaryWriter

            # File names contain the second of their creation: the step keeps a quick restart from overwriting one.
            self._writer = SummaryWriter(
                str(self._folder),
                purge_step=self._step + 1 if self._step else None,
                filename_suffix=f".after{self._step}",
            )
        self._step = record["step"]
        for name, value in record.items():
            if name in ("step", "unix_s") or value is None or _is_no_number(value):
                continue
            group, _, rest = name.partition("_")
            tag = f"eval/{rest}" if group == "eval" else f"train/{name}"
            self._writer.add_scalar(tag, value, record["step"], walltime=record.get("unix_s"))

    def close(self) -> None:
        """Flush and close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def read_records(path: Path) -> tuple[dict[str, Any], ...]:
    """Return the records of a metrics.jsonl, oldest first; none if there is no file."""
    if not path.exists():
        return ()
    return tuple(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def _is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _lines_up_to(text: str, step: int) -> Iterator[str]:
    """Yield the whole lines up to ``step``; the first line that cannot be read ends them."""
    for line in text.splitlines(keepends=True):
        try:
            if json.loads(line)["step"] <= step and line.endswith("\n"):
                yield line
        except (ValueError, KeyError, TypeError):
            return
