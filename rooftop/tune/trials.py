"""Trials of a search, and the file that keeps them: a line of JSON for each, on the disk when it is added."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rooftop.core.errors import RooftopError
from rooftop.core.files import make_folder, read_text, sync, write_text
from rooftop.core.ledger import Row
from rooftop.core.records import Record, read_record
from rooftop.tune.factors import Factor
from rooftop.tune.records import Trial
from rooftop.tune.subjects import change_of, options_of


@dataclass(frozen=True, kw_only=True)
class _Line(Record):
    """A line of the file: a trial, with its compiled ledger if it is the first with its schedule."""

    trial: Trial
    ledger: tuple[Row, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Header(Record):
    """The first line of the file; ``program`` is the fingerprint of the program and of the versions."""

    kind: Literal["tuning"] = "tuning"
    schema: int = 1
    program: str


def trial_key(factors: Sequence[Factor], layers: int | None) -> str:
    """The key of a trial: of what is set, however it is called."""
    question = [options_of(factors), change_of(factors), layers]
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:16]


class TrialFile:
    """The trials of one program with one set of versions, in a file.

    A line is added for each trial, and is on the disk when ``add`` returns. A line that a crash has cut is dropped.
    With ``fresh`` what is in the file is dropped. Raises RooftopError for trials of another program or of other
    versions, for a file of something else, and for one that cannot be written.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any], *, fresh: bool = False) -> None:
        self.path = path
        self._header = json.dumps(_Header(program=_digest(identity)).to_json()) + "\n"
        self._trials: dict[str, Trial] = {}
        self._ledgers: dict[str, tuple[Row, ...]] = {}
        if not fresh:
            self._read()

    @property
    def trials(self) -> tuple[Trial, ...]:
        """All trials, in the order in which they ended."""
        return tuple(self._trials.values())

    def find(self, key: str) -> Trial | None:
        """The trial of a key; None if there is none yet."""
        return self._trials.get(key)

    def ledger(self, trial: Trial) -> tuple[Row, ...]:
        """Rows of the compiled ledger: of a trial with another's schedule those of the other."""
        if trial.key in self._ledgers:
            return self._ledgers[trial.key]
        like = (other for other in self.trials if other.schedule == trial.schedule and other.key in self._ledgers)
        first = next(like, None)
        return () if first is None else self._ledgers[first.key]

    def with_schedule(self, schedule: str) -> Trial | None:
        """The first trial whose scheduled module is this one."""
        return next((trial for trial in self.trials if trial.schedule == schedule and trial.end == "priced"), None)

    def add(self, trial: Trial, ledger: Sequence[Row] = ()) -> None:
        """Keep a trial, and write it."""
        self._trials[trial.key] = trial
        if ledger:
            self._ledgers[trial.key] = tuple(ledger)
        if len(self._trials) == 1:
            self._write_all()
        else:
            self._append(self._line(trial))

    def restart(self) -> None:
        """Drop all trials."""
        self._trials.clear()
        self._ledgers.clear()

    def _line(self, trial: Trial) -> str:
        return json.dumps(_Line(trial=trial, ledger=self._ledgers.get(trial.key, ())).to_json()) + "\n"

    def _write_all(self) -> None:
        try:
            make_folder(self.path.parent)
        except OSError as error:
            raise _unwritable(self.path, error) from None
        write_text(self.path, self._header + "".join(map(self._line, self.trials)))

    def _append(self, line: str) -> None:
        try:
            with self.path.open("ab", buffering=0) as file:
                file.write(line.encode())
                os.fsync(file.fileno())
            sync(self.path.parent)
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def _read(self) -> None:
        try:
            text = read_text(self.path, errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise RooftopError("results", str(self.path), f"a file that can be read ({error.strerror})") from None
        header, _, rest = text.partition("\n")
        if text and not _is_header(header):
            raise RooftopError("results", str(self.path), "a file of rooftop tune, or a new one")
        if text and header + "\n" != self._header:
            accepted = "trials of this program with these versions of jax and the compiler; --fresh drops others"
            raise RooftopError("results", str(self.path), accepted)
        whole = rest.rpartition("\n")[0]
        for line in whole.splitlines():
            try:
                ended = read_record(_Line, json.loads(line), "trial")
            except (ValueError, RecursionError, RooftopError):
                # What a crash has left: all that follows is compiled again.
                break
            self._trials[ended.trial.key] = ended.trial
            if ended.ledger:
                self._ledgers[ended.trial.key] = ended.ledger
        if self._trials:
            self._write_all()


def _digest(identity: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(identity, sort_keys=True, default=str).encode()).hexdigest()


def _is_header(line: str) -> bool:
    try:
        read_record(_Header, json.loads(line), "results")
    except (ValueError, RecursionError, RooftopError):
        return False
    return True


def _unwritable(path: Path, error: OSError) -> RooftopError:
    return RooftopError("results", str(path), f"a file that can be written ({error.strerror})")
