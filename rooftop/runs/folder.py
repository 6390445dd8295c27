"""The folder of a run: its paths, what the run is (run.json), and the claim of its only writer."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.core.files import make_folder, read_text, write_json, write_text

SCHEMA = 3
#: HLO of the step, next to its traces.
MODULE_FILE = "step.hlo.txt"


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """RUN/{plan.json, run.json, metrics.jsonl, tensorboard/, tokenizer.json, checkpoints/<step>/, profile/}."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Checkpoints of the state, a folder a step."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The tokenizer of the run."""
        return self.path / "tokenizer.json"

    @property
    def plan(self) -> Path:
        """The plan that the run began with, if any."""
        return self.path / "plan.json"

    @property
    def tensorboard(self) -> Path:
        """TensorBoard event files, if requested."""
        return self.path / "tensorboard"

    @property
    def metrics(self) -> Path:
        """One JSON object a line, with its ``step``: see ``rooftop.runs.records``."""
        return self.path / "metrics.jsonl"

    @property
    def profile(self) -> Path:
        """Traces of JAX's profiler, and the HLO of the traced step."""
        return self.path / "profile"

    def create(self) -> None:
        """Create the folder if there is none. Raises RooftopError if it cannot be written."""
        _create(self.path, self.path)

    def write_module(self, text: str) -> None:
        """Write the HLO of the step next to its traces. Raises RooftopError if it cannot be written."""
        _create(self.profile, self.path)
        write_text(self.profile / MODULE_FILE, text)

    def read(self) -> dict[str, Any] | None:
        """Return the content of run.json; None if no run has begun here. Raises RooftopError if it is damaged."""
        file = self.path / "run.json"
        try:
            content = json.loads(read_text(file))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise RooftopError("run", str(file), f"a run.json of rooftop train ({reason})") from None
        if not isinstance(content, dict) or (content.get("kind"), content.get("schema")) != ("run", SCHEMA):
            raise RooftopError("run", str(file), f"a run.json of rooftop train, of schema {SCHEMA}")
        return content

    def write(self, about: Mapping[str, Any]) -> None:
        """Write run.json. Raises RooftopError if it cannot be written."""
        content = {"kind": "run", "schema": SCHEMA, **about}
        write_json(self.path / "run.json", content)

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Lock the folder against other processes. The system unlocks it when this process ends, even if killed.

        A folder that was created for the claim and stayed empty is removed. Raises RooftopError if another process
        holds the lock or the folder cannot be written.
        """
        # Windows has no fcntl, and it can still read runs.
        import fcntl

        is_new = not self.path.exists()
        self.create()
        lock = self.path / ".lock"
        try:
            file = lock.open("wb")
        except OSError as error:
            raise _not_writable(self.path, error) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RooftopError("run", str(self.path), "a folder that no other process trains in now") from None
            try:
                yield
            finally:
                if is_new and list(self.path.iterdir()) == [lock]:
                    lock.unlink()
                    self.path.rmdir()


def require_same(run: Path, recorded: object, current: object, *, ignored: Sequence[str] = (), name: str = "") -> None:
    """Compare the identity of a run, plain JSON values, with that of the same run as it was recorded.

    Values named in ``ignored`` may differ. Raises RooftopError naming the first other value that does.
    """
    if name in ignored:
        return
    if isinstance(recorded, Mapping) and isinstance(current, Mapping):
        for key in {**recorded, **current}:
            path = f"{name}.{key}" if name else str(key)
            require_same(run, recorded.get(key), current.get(key), ignored=ignored, name=path)
        return
    if isinstance(current, tuple):
        current = list(current)
    if recorded != current:
        accepted = f"{recorded!r}, as it began; or another folder for a new run"
        raise RooftopError(f"{name} of the run {run}", current, accepted)


def _create(folder: Path, run: Path) -> None:
    try:
        make_folder(folder)
    except OSError as error:
        raise _not_writable(run, error) from None


def _not_writable(run: Path, error: OSError) -> RooftopError:
    return RooftopError("run", str(run), f"a folder that can be written ({error.strerror})")
