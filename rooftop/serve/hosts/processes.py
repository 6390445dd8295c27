"""The generating process: started on this machine, or reached on another one.

The one that is started here is told everything over its stdin, says on stdout where it listens, and ends with its
stdin, that is with the process that started it.
"""

from __future__ import annotations

import json
import os
import pickle
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.hosts.link import Link, LinkLost, connect

#: Seconds for which a process on another machine is looked for, and how often.
_PATIENCE_S, _EVERY_S = 60.0, 1.0
#: How often a process is started that ends before it is ready.
_STARTS = 3


class Other(Protocol):
    """The process that generates, seen from the one that prefills."""

    def begin(self) -> None:
        """Let it get ready, if that is ours to do; returns at once."""
        ...

    def connect(self) -> Link:
        """A link to it, new or as it was. Raises LinkLost, RooftopError or Infeasible where there can be none."""
        ...

    def close(self) -> None:
        """No further link is wanted: ``connect`` raises LinkLost from now on."""
        ...


class Remote:
    """One that listens at ``host``:``port``, and is there again after some time if it was lost."""

    def __init__(self, host: str, port: int, key: str, *, patience_s: float = _PATIENCE_S) -> None:
        self._host, self._port, self._key, self._patience_s = host, port, key, patience_s
        self._closed = threading.Event()

    def begin(self) -> None:
        """Nothing is ours to do."""

    def connect(self) -> Link:
        """See ``Other``."""
        until_s = time.monotonic() + self._patience_s
        while not self._closed.is_set():
            try:
                return connect(self._host, self._port, self._key)
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


class Child:
    """One that is started here, with ``environment`` next to ours, and again when it is lost."""

    def __init__(
        self,
        checkpoint: Path,
        configuration: Configuration,
        *,
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._told = GeneratorTask(
            checkpoint=checkpoint.resolve(), configuration=configuration, options=options, key=secrets.token_hex()
        )
        self._environment = dict(environment or {})
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._port: int | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """Of the process, while there is one."""
        return None if self._process is None else self._process.pid

    def begin(self) -> None:
        """Start it."""
        with self._lock:
            if self._closed:
                raise LinkLost("closed")
            self._port = None
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rooftop.serve.hosts.loading"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=os.environ | self._environment,
                # Ctrl-C is for us: we finish what is running, and need it for that.
                start_new_session=True,
            )
            assert self._process.stdin is not None
            # Where it has ended already, ``connect`` says so.
            with suppress(OSError):
                pickle.dump(self._told, self._process.stdin)
                self._process.stdin.flush()

    def connect(self) -> Link:
        """See ``Other``."""
        if self._process is not None and self._port is not None:
            # What was lost may have been the link alone.
            try:
                return connect("127.0.0.1", self._port, self._told.key)
            except LinkLost:
                self._end()
        for _ in range(_STARTS):
            if self._process is None:
                self.begin()
            port = self._said()
            if port is not None:
                self._port = port
                return connect("127.0.0.1", port, self._told.key)
        raise LinkLost(f"the process that generates ended {_STARTS} times before it was ready")

    def close(self) -> None:
        """See ``Other``; the process has ended after that."""
        with self._lock:
            self._closed = True
        self._end()

    def _said(self) -> int | None:
        """The port that it listens at, once it is ready; None if it ended before that and said nothing."""
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
                # What was not flushed has no reader.
                with suppress(OSError):
                    pipe.close()
