"""Judgement of the processes of a run by their heartbeats: which one does not answer, or holds up the others."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rooftop.runs.beats import DATA, STARTING, STEP, ProcessBeat

#: Seconds without a beat after which a process does not answer; while it starts, imports may keep it from beating.
SILENT_S = 20.0
SILENT_AT_START_S = 60.0
#: A step may take as long as this many of the last ones, and at least so many seconds.
_STEPS, _LEAST_STUCK_S = 30, 120.0
#: Seconds that any other activity may take, such as compilation or a checkpoint.
_OTHER_S = 3600.0
_RECENT = 32


@dataclass
class Vigil:
    """The beats of the processes by number, with the time of a ``clock`` at which each came."""

    clock: Callable[[], float]
    _last: dict[int, tuple[float, ProcessBeat]] = field(default_factory=dict)
    _steps: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _began: dict[int, tuple[int, float]] = field(default_factory=dict)

    def start(self, process: int) -> None:
        """Expect beats of a process from now on."""
        self._last[process] = (self.clock(), ProcessBeat(activity=STARTING, step=0, seconds=0.0))

    def forget(self, process: int) -> None:
        """Expect no more beats of a process, which has ended."""
        self._last.pop(process, None)

    def take(self, process: int, beat: ProcessBeat) -> None:
        """Take a beat."""
        now = self.clock()
        self._last[process] = (now, beat)
        if beat.activity == STEP:
            step, since = self._began.get(process, (beat.step, now))
            if beat.step > step:
                self._steps.append((now - since) / (beat.step - step))
            if beat.step != step or process not in self._began:
                self._began[process] = (beat.step, now)

    def problem(self, stopped: Mapping[int, bool] | None = None) -> str | None:
        """Name the process that does not answer, or that the others wait for, in one line; None if all is well.

        ``stopped`` is True for processes that the system says are stopped.
        """
        now = self.clock()
        for process, (at, beat) in sorted(self._last.items()):
            if now - at > (SILENT_AT_START_S if beat.activity == STARTING else SILENT_S):
                return self._silent(process, " (stopped)" if (stopped or {}).get(process) else "")
        if not self._last:
            return None
        slow = [beat for _, beat in self._last.values() if beat.seconds > self._patience_s(beat)]
        if len(slow) < len(self._last):
            return None
        process, (_, beat) = min(self._last.items(), key=lambda item: (item[1][1].step, item[1][1].activity == STEP))
        others = [other for number, (_, other) in self._last.items() if number != process]
        wait = f", and the others in {others[0]}" if others else ""
        line = f"no process goes on: process {process} is in {beat} since {beat.seconds:.0f} s{wait}"
        return line + self._waiting()

    def stopped(self, stopped: Mapping[int, bool]) -> str | None:
        """Name the first process that the system says is stopped, however short its silence; None if none is."""
        lines = (self._silent(process, " (stopped)") for process in sorted(self._last) if stopped.get(process))
        return next(lines, None)

    def report(self) -> list[dict[str, object]]:
        """The last beat of each process, as JSON, with the seconds since it came."""
        now = self.clock()
        return [
            {"process": process, "silent_s": round(now - at, 3), **vars(beat)}
            for process, (at, beat) in sorted(self._last.items())
        ]

    def _silent(self, process: int, why: str) -> str:
        at, beat = self._last[process]
        line = f"process {process} does not answer since {self.clock() - at:.0f} s{why}; it was in {beat}"
        return line + self._waiting(besides=process)

    def _waiting(self, besides: int | None = None) -> str:
        """The first other process that says in which collectives of its step it can wait."""
        for process, (_, beat) in sorted(self._last.items()):
            if process != besides and beat.waits:
                return f"; process {process} is in {beat}, in {beat.waits}"
        return ""

    def _patience_s(self, beat: ProcessBeat) -> float:
        if beat.activity not in (STEP, DATA) or not self._steps:
            return _OTHER_S
        return max(_LEAST_STUCK_S, _STEPS * statistics.median(self._steps))
