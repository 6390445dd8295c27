"""Records of a run: lines of metrics.jsonl and, on request, TensorBoard events, continued after a checkpoint."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.core.files import make_folder, read_text, sync, write_text
from rooftop.runs.folder import RunFolder


class Records:
    """The records of a run after ``step``. Every process may append to them; the first process writes.

    Records of later steps are removed: a process that was killed may have recorded more steps than it saved, and they
    are trained again, with the same losses. ``also`` is a second folder, for records that the first has no room for.
    Raises RooftopError if the files cannot be read, or cannot be cut.
    """

    def __init__(
        self, folder: RunFolder, *, step: int, tensorboard: bool = False, also: RunFolder | None = None
    ) -> None:
        self._metrics: MetricsFile | None = None
        self._events: TensorBoardEvents | None = None
        # Reading records needs no JAX.
        import jax

        if jax.process_index() == 0:
            self._metrics = MetricsFile(folder.metrics, step=step, also=None if also is None else also.metrics)
            if tensorboard:
                self._events = TensorBoardEvents(folder.tensorboard, step=step)

    @property
    def evaluated(self) -> bool:
        """True if the records end with an evaluation of the first ``step``. Processes that write none say so too."""
        return self._metrics is None or self._metrics.evaluated

    def append(self, record: Mapping[str, Any]) -> None:
        """Write a record, which has its ``step``. Metrics without room on the disk wait for the next record."""
        if self._metrics is not None:
            self._metrics.append(record)
        if self._events is not None:
            self._events.append(record)

    def sync(self) -> RooftopError | None:
        """Bring the metrics to the disk, so that a checkpoint never has steps that they lack.

        Returns the error if there is no room for them.
        """
        return None if self._metrics is None else self._metrics.sync()

    def close(self) -> None:
        """Flush and close the event file. Later records open another."""
        if self._events is not None:
            self._events.close()


class MetricsFile:
    """The file metrics.jsonl, cut after the records of ``step``, with those that only the file ``also`` has."""

    def __init__(self, path: Path, *, step: int, also: Path | None = None) -> None:
        self._path, self._also = path, also
        self._waiting = b""
        text, more = (_read(file) for file in (path, also))
        earlier = "".join(_lines_up_to(text, step))
        if more:
            lines = {_key(line): line for line in (*_lines_up_to(more, step), *earlier.splitlines(keepends=True))}
            earlier = "".join(lines[key] for key in sorted(lines))
        #: True if the last of these records is an evaluation of ``step``.
        self.evaluated = any(_key(line) == (step, True) for line in earlier.splitlines()[-1:])
        if earlier != text:
            write_text(path, earlier)
        if more and also is not None:
            also.unlink()

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line, NaN and infinities as null. A line without room on the disk waits for the next one."""
        values = {name: None if _is_no_number(value) else value for name, value in record.items()}
        self._waiting += (json.dumps(values, allow_nan=False) + "\n").encode()
        self._write(self._path)

    def sync(self) -> RooftopError | None:
        """Bring all lines to the disk, if need be to the second file. Returns the error if there is no room."""
        error = self._write(self._path, to_disk=True)
        if error is not None and self._also is not None:
            error = self._write(self._also, to_disk=True)
        if error is None:
            return None
        return RooftopError("metrics", str(self._path), f"a file with room for it ({error.strerror})")

    def _write(self, path: Path, *, to_disk: bool = False) -> OSError | None:
        """Write the lines that wait. Returns the error, after which all of them wait."""
        try:
            is_new = not path.exists()
            if to_disk:
                make_folder(path.parent)
            with path.open("ab", buffering=0) as file:
                before = file.seek(0, os.SEEK_END)
                try:
                    if file.write(self._waiting) != len(self._waiting):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                    if to_disk:
                        os.fsync(file.fileno())
                except OSError:
                    file.truncate(before)
                    raise
            if to_disk and (is_new or not self._is_named):
                sync(path.parent)
                self._is_named = True
        except OSError as error:
            return error
        self._waiting = b""
        return None

    #: True once the folder that has the file is on the disk.
    _is_named = False


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
    """Return the records of a metrics.jsonl, oldest first; none if there is no file.

    Raises RooftopError if a line is not a JSON object.
    """
    records = list[dict[str, Any]]()
    for number, line in enumerate(_read(path).splitlines(), start=1):
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RooftopError("metrics", f"{path}:{number}", f"one JSON object a line ({error})") from None
        if not isinstance(record, dict):
            raise RooftopError("metrics", f"{path}:{number}", "one JSON object a line")
        records.append(record)
    return tuple(records)


def _read(path: Path | None) -> str:
    """The text of a file, empty if there is none. Bytes that a crash left are no UTF-8. Raises RooftopError."""
    try:
        return "" if path is None else read_text(path, errors="replace", most=2**32)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise RooftopError("metrics", str(path), f"records that can be read ({error})") from None


def _key(line: str) -> tuple[int, bool]:
    """Step of a record, and True for an evaluation, which comes after its step."""
    record = json.loads(line)
    return record["step"], "loss" not in record


def _is_no_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _lines_up_to(text: str, step: int) -> Iterator[str]:
    """Yield the whole lines up to ``step``; the first line that cannot be read ends them."""
    for line in text.splitlines(keepends=True):
        try:
            if json.loads(line)["step"] > step or not line.endswith("\n"):
                continue
        except (ValueError, KeyError, TypeError, RecursionError):
            return
        yield line
