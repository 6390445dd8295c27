"""The generating process: started on this machine, or reached on another one.

A process that is started here reads its task from stdin, prints its port to stdout, and ends when its stdin is closed,
that is, with the process that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.hosts.link import Link, LinkLost, connect

#: Seconds between two beats of a process.
BEAT_S = 0.5
#: Seconds without a beat after which a process counts as stopped.
SILENT_S = 6.0
#: The same while it loads: the compiler may keep it busy.
LOADING_S = 300.0
#: Seconds after which a thread that watches others was itself stopped, or had no core.
STARVED_S = 2.0
#: Seconds that an engine of several processes waits for one that was lost.
AWAY_S = 600.0
#: Seconds for which to try to reach a process on another machine, and between attempts.
_PATIENCE_S, _EVERY_S = 60.0, 1.0
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def ended_by(status: int) -> str:
    """The end of a process by its ``returncode``, in words: SIGKILL, or status 2."""
    return signal.Signals(-status).name if status < 0 else f"status {status}"


#: Most starts of a process that ends before it is ready.
_STARTS = 3


class Other(Protocol):
    """The process that generates, seen from the one that prefills."""

    def suspect(self) -> None:
        """End the process if it is ours: it does not answer."""
        ...

    def begin(self) -> None:
        """Start the process if that is ours to do; return at once."""
        ...

    def connect(self) -> Link:
        """A link to the process. Raises LinkLost, RooftopError or Infeasible."""
        ...

    def close(self) -> None:
        """Have ``connect`` raise LinkLost from now on."""
        ...


class Remote:
    """A process that listens at ``host``:``port``, and may come back after it was lost."""

    def __init__(
        self, host: str, port: int, key: str, *, patience_s: float = _PATIENCE_S, encrypted: bool = True
    ) -> None:
        self._host, self._port, self._key, self._patience_s = host, port, key, patience_s
        self._encrypted = encrypted
        self._closed = threading.Event()

    def suspect(self) -> None:
        """Do nothing: somebody else ends the process."""

    def begin(self) -> None:
        """Do nothing: somebody else starts the process."""

    def connect(self) -> Link:
        """See ``Other``."""
        until_s = time.monotonic() + self._patience_s
        while not self._closed.is_set():
            try:
                return connect(self._host, self._port, self._key, encrypted=self._encrypted)
            except LinkLost:
                if time.monotonic() > until_s:
                    raise
            self._closed.wait(_EVERY_S)
        raise LinkLost("closed")

    def close(self) -> None:
        """See ``Other``."""
        self._closed.set()


@dataclass(frozen=True, kw_only=True)
class GeneratorTask:
    """Task of a generating process: the checkpoint to load, and the key of its link."""

    checkpoint: Path
    configuration: Configuration
    options: Mapping[str, Any] | None
    key: str
    parent: int = field(default_factory=os.getpid)


def end_with(parent: int) -> None:
    """End this process when ``parent``, which started it, does, even if it is stopped then (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


class Child:
    """A process that is started here, with ``environment`` added to ours, and again when it is lost."""

    def __init__(
        self,
        checkpoint: Path,
        configuration: Configuration,
        *,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._task = GeneratorTask(
            checkpoint=checkpoint.resolve(), configuration=configuration, options=options, key=secrets.token_hex()
        )
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Process id; None if there is no process."""
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """Start the process."""
        with self._lock:
            if self._closed:
                raise LinkLost("closed")
            self._port = None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rooftop.serve.hosts.generating"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | self._environment,
                # Ctrl-C is for us: we finish what is running, and need it for that.
                start_new_session=True,
            )
            assert self._process.stdin is not None
            # If it has ended already, ``connect`` says so.
            with suppress(OSError):
                pickle.dump(self._task, self._process.stdin)
                self._process.stdin.flush()

    def suspect(self) -> None:
        """Kill the process."""
        self._end()

    def connect(self) -> Link:
        """See ``Other``."""
        if self._process is not None and self._port is not None:
            # Perhaps only the link was lost.
            try:
                return connect("127.0.0.1", self._port, self._task.key, encrypted=False)
            except LinkLost:
                self._end()
        for _ in range(_STARTS):
            if self._process is None:
                self.begin()
            port = self._announced_port()
            if port is not None:
                self._port = port
                return connect("127.0.0.1", port, self._task.key, encrypted=False)
        raise LinkLost(f"the process that generates ended {_STARTS} times before it was ready")

    def close(self) -> None:
        """See ``Other``; the process is killed."""
        with self._lock:
            self._closed = True
        self._end()

    def _announced_port(self) -> int | None:
        """Port of the process once it is ready; None if it ended without an answer."""
        process = self._process
        if process is None or process.stdout is None:
            raise LinkLost("closed")
        line = process.stdout.readline()
        if not line:
            self._end()
            return None
        said = json.loads(line)
        if "port" in said:
            return int(said["port"])
        self._end()
        if "what" in said:
            raise Infeasible(said["what"], said["by"])
        raise RooftopError(said["field"], said["given"], said["accepted"])

    def _end(self) -> None:
        with self._lock:
            process, self._process, self._port = self._process, None, None
        if process is None:
            return
        # It has nothing to finish, and may be in the middle of compiling.
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                # Unflushed data has no reader.
                with suppress(OSError):
                    pipe.close()
