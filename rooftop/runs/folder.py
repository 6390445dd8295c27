"""The folder of a run: what it is (run.json), what it measured (metrics.jsonl), and who may write there now."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from rooftop.core.errors import RooftopError
from rooftop.core.files import claimed, write_text

SCHEMA = 2
#: The HLO of the step, in the folder of its traces.
MODULE_FILE = "step.hlo.txt"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """RUN/{plan.json, run.json, metrics.jsonl, tensorboard/, tokenizer.json, checkpoints/<step>/, profile/}."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Where the state is saved."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of the run."""
        return self.path / "tokenizer.json"

    @property
    def plan(self) -> Path:
        """The plan that the run began with, if it began with one."""
        return self.path / "plan.json"

    @property
    def tensorboard(self) -> Path:
        """Event files, if they were asked for."""
        return self.path / "tensorboard"

    @property
    def metrics(self) -> Path:
        """One JSON object a line: see ``rooftop.train.metrics``."""
        return self.path / "metrics.jsonl"

    @property
    def profile(self) -> Path:
        """Traces of JAX's profiler, and the module of the step that they are of."""
        return self.path / "profile"

    def write_module(self, text: str) -> None:
        """Write the step's HLO beside its traces. Raises RooftopError where it cannot be written."""
        try:
            self.profile.mkdir(exist_ok=True)
        except OSError as error:
            raise RooftopError("run", str(self.path), f"a folder that can be written ({error.strerror})") from None
        write_text(self.profile / MODULE_FILE, text)

    def read(self) -> dict[str, Any] | None:
        """run.json; None if no run has begun here. Raises RooftopError for one that is none."""
        file = self.path / "run.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise RooftopError("run", str(file), f"a run.json of rooftop train ({error})") from None
        if not isinstance(found, dict) or (found.get("kind"), found.get("schema")) != ("run", SCHEMA):
            raise RooftopError("run", str(file), f"a run.json of rooftop train, of schema {SCHEMA}")
        return found

    def write(self, about: Mapping[str, Any]) -> None:
        """Write run.json. Raises RooftopError where it cannot be written."""
        whole = {"kind": "run", "schema": SCHEMA, **about}
        write_text(self.path / "run.json", json.dumps(whole, indent=1, allow_nan=False) + "\n")

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Keep other processes out: see ``rooftop.core.files.claimed``."""
        with claimed(self.path):
            yield


class MetricsFile:
    """metrics.jsonl, continued behind the record of ``step``: what is there of later steps is dropped.

    A process that was killed may have recorded more steps than it saved; they are done again, with the same losses.
    """

    def __init__(self, path: Path, *, step: int) -> None:
        self._path = path
        kept = list(_records(path, step))
        write_text(path, "".join(kept))
        self._file: BinaryIO = path.open("ab", buffering=0)

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one line. Raises RooftopError where it cannot be written: what was there is whole."""
        line = (json.dumps(record, allow_nan=False) + "\n").encode()
        try:
            if self._file.write(line) != len(line):
                raise OSError(0, "no room for a line")
        except OSError as error:
            raise RooftopError("metrics", str(self._path), f"a file with room for it ({error.strerror})") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _records(path: Path, step: int) -> Iterator[str]:
    """The whole lines up to ``step``."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            try:
                if json.loads(line)["step"] <= step and line.endswith("\n"):
                    yield line
            except (ValueError, KeyError, TypeError):
                return
