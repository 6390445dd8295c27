"""A process of an engine of several that does not answer requests, kept by this one, which starts it again.

The process gets its task on stdin, and says on stdout in pickles ``ready``, or the error that ends it. It ends with the
first process of the engine, and with status 75 if that or another one was lost. Then, or if it was ended itself, it is
started again, and waits for the others. A process that is silent or stopped is killed: its devices are needed.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import IO, Any

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.runs.beats import ProcessBeat, start_beating
from rooftop.runs.supervise import is_stopped
from rooftop.serve.hosts.processes import AWAY_S, LOADING_S, SILENT_S, STARVED_S, ended_by
from rooftop.serve.request import ServeRequest
from rooftop.serve.signals import stopping_signals

#: Arguments that run a process of an engine.
COMMAND = ("-m", "rooftop.serve.member")
#: Seconds between two looks at the process, and the longest pause before it is started again.
_LOOK_S, _LONGEST_PAUSE_S = 0.5, 30.0
#: Seconds without a beat, which comes each second.
_QUIET_S = 20.0


@dataclass(frozen=True, kw_only=True)
class MemberTask:
    """Task of one of several processes of an engine: its request, and the process that keeps it."""

    request: ServeRequest
    parent: int = field(default_factory=os.getpid)


class Keeper:
    """Keeps a process of the engine that ``request`` asks for. ``on_ready`` hears once that it is ready."""

    def __init__(
        self,
        request: ServeRequest,
        on_ready: Callable[[Any], None],
        log: logging.Logger,
        *,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._task, self._on_ready, self._log, self._command = MemberTask(request=request), on_ready, log, command
        self._process: subprocess.Popen[bytes] | None = None
        self._served = self._ready = self._stopping = False
        self._error: Exception | None = None
        self._heard_s = 0.0

    def run(self) -> None:
        """Keep the process until the engine ends. Signals that stop it are passed on.

        Raises the RooftopError or Infeasible that ended it, and Infeasible if the engine does not come back.
        """
        before = {number: signal.signal(number, self._pass_on) for number in stopping_signals()}
        lost_s: float | None = None
        losses = 0
        try:
            while True:
                reason = self._run_once()
                if reason is None or self._stopping:
                    return
                error, self._error = self._error, None
                if not self._served:
                    raise error or Infeasible("the process of the engine ended before it was ready", reason)
                # The others are not there yet, for instance.
                reason = reason if error is None else str(error)
                if self._ready or lost_s is None:
                    lost_s, losses = time.monotonic(), 0
                if time.monotonic() - lost_s > AWAY_S:
                    raise Infeasible("the engine has not come back", f"{reason}, {AWAY_S:.0f} s after it was lost")
                self._log.error(f"a process of the engine is lost: {reason}; it is started again")
                losses += 1
                time.sleep(min(2.0 ** (losses - 1) - 1, _LONGEST_PAUSE_S))
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True
        process = self._process
        if process is not None and process.poll() is None:
            # Ctrl-C does not reach it otherwise, and SIGTERM is what it knows.
            process.terminate()

    def _run_once(self) -> str | None:
        """Start the process and wait for its end. Return why it was lost; None if the engine has ended."""
        self._ready, self._heard_s = False, time.monotonic()
        process, beats = start_beating(self._command, stdin=subprocess.PIPE)
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        threads = [
            threading.Thread(target=self._hear, args=(process.stdout,), daemon=True),
            threading.Thread(target=self._count, args=(beats,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        # If it has ended already, its status says so.
        with suppress(OSError):
            pickle.dump(self._task, process.stdin)
            process.stdin.close()
        if self._stopping:
            process.kill()
        verdict = self._watched(process)
        for thread in threads:
            thread.join()
        if process.returncode == 0:
            return None
        return verdict or f"it ended with {ended_by(process.returncode)}"

    def _watched(self, process: subprocess.Popen[bytes]) -> str | None:
        """Wait for the end of the process; one that is silent or stopped is killed. Return why."""
        looked_s, stopped_s = time.monotonic(), 0.0
        while True:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_LOOK_S)
                return None
            now_s = time.monotonic()
            if now_s - looked_s > STARVED_S:
                self._heard_s = now_s
            stopped_s = stopped_s + min(now_s - looked_s, STARVED_S) if is_stopped(process.pid) else 0.0
            looked_s = now_s
            silent_s = now_s - self._heard_s
            if stopped_s > SILENT_S:
                verdict = f"it was stopped for {stopped_s:.0f} s"
            elif silent_s > (_QUIET_S if self._ready else LOADING_S):
                verdict = f"it has not answered for {silent_s:.0f} s"
            else:
                continue
            process.kill()
            process.wait()
            return verdict

    def _hear(self, said: IO[bytes]) -> None:
        with said:
            while True:
                try:
                    kind, value = pickle.load(said)
                except (EOFError, pickle.UnpicklingError, OSError):
                    return
                if kind == "ready":
                    self._ready = True
                    if not self._served:
                        self._served = True
                        self._on_ready(value)
                    else:
                        self._log.info("the process of the engine is ready again")
                elif kind == "wrong":
                    self._error = RooftopError(*value)
                else:
                    self._error = Infeasible(*value)

    def _count(self, beats: Iterable[ProcessBeat]) -> None:
        for _ in beats:
            self._heard_s = time.monotonic()
