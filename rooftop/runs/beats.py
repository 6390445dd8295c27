"""Heartbeats of a supervised process: each second it says what it does, so that its supervisor knows that it lives.

The beats come from a thread of their own. A process that is stopped, or has no processor, misses beats; one whose main
thread waits for ever goes on beating, and its beats name the same activity with a growing time. If a step is slow they
also say in which collectives its program can wait, and where its main thread stands.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

#: The environment variable of a supervised process: the descriptor to which it writes its beats.
DESCRIPTOR = "ROOFTOP_BEATS"
_PERIOD_S = 1.0
#: Seconds after which a step is slow.
_SLOW_S = 10.0
#: Innermost frames of the main thread that are told.
_FRAMES = 12
#: Activity of a process that has not said anything else.
STARTING = "starting"
STEP = "step"
#: Waiting for the batch of the next step.
DATA = "waiting for data"


@dataclass(frozen=True, kw_only=True)
class ProcessBeat:
    """A beat: the activity of a process, the step that it is of, and for how long the process has been in it.

    Of a slow step ``waits`` has the collectives in which its program can wait, in a line, and ``stack`` the frames of
    the main thread, innermost last; otherwise both are empty.
    """

    activity: str
    step: int
    seconds: float
    waits: str = ""
    stack: tuple[str, ...] = ()

    def __str__(self) -> str:
        what = f"{self.activity} {self.step}" if self.activity == STEP else self.activity
        return what if self.activity in (STEP, STARTING) or not self.step else f"{what} after step {self.step}"

    @classmethod
    def read(cls, line: bytes) -> ProcessBeat:
        """The beat of a line that ``Beats`` wrote. Raises ValueError for another."""
        activity, step, seconds, waits, stack = json.loads(line)
        return cls(activity=str(activity), step=int(step), seconds=float(seconds), waits=str(waits), stack=tuple(stack))


def start_beating(
    arguments: Sequence[str], *, stdin: int, stderr: int | None = None, environment: dict[str, str] | None = None
) -> tuple[subprocess.Popen[bytes], Iterator[ProcessBeat]]:
    """Start Python with these arguments; return the process and its beats as they come, which end with it.

    Its stdout is a pipe; ``stdin`` and ``stderr`` are those of Popen. It has a session of its own, so that Ctrl-C
    reaches this process alone, which passes it on once.
    """
    beats, write = os.pipe()
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=os.environ | {DESCRIPTOR: str(write)} | (environment or {}),
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        pass_fds=(write,),
        start_new_session=True,
    )
    os.close(write)
    return process, _read_beats(beats)


def _read_beats(descriptor: int) -> Iterator[ProcessBeat]:
    with os.fdopen(descriptor, "rb") as file:
        for line in file:
            with suppress(ValueError):
                yield ProcessBeat.read(line)


class Beats:
    """The beats of this process, which has one of them. Without a supervisor nothing is written."""

    @classmethod
    @cache
    def of_process(cls) -> Beats:
        """The beats of this process, from the first call on."""
        return cls()

    def __init__(self) -> None:
        self._now = (STARTING, 0, time.monotonic())
        self._waits: str | None = None
        #: Describes the collectives in which the program of a step can wait; it may take a while.
        self.describe: Callable[[], str] = lambda: ""
        descriptor = os.environ.get(DESCRIPTOR)
        if descriptor is not None:
            threading.Thread(target=self._beat, args=(int(descriptor),), name="beats", daemon=True).start()

    def enter(self, activity: str, step: int) -> None:
        """Begin an activity, which belongs to a step."""
        self._now = (activity, step, time.monotonic())

    def _describe(self) -> None:
        try:
            self._waits = self.describe()
        except Exception as error:  # Whatever the runtime of a hung program raises: the beats go on.
            self._waits = f"a program that cannot be read ({type(error).__name__}: {error})"

    def _details(self) -> tuple[str, list[str]]:
        """The collectives of the program, once they are read, and the stack of the main thread."""
        if self._waits is None:
            self._waits = ""
            threading.Thread(target=self._describe, name="collectives of the step", daemon=True).start()
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        stack = traceback.extract_stack(frame)[-_FRAMES:] if frame is not None else []
        return self._waits, [f"{one.filename}:{one.lineno} {one.name}" for one in stack]

    def _beat(self, descriptor: int) -> None:
        while True:
            activity, step, since = self._now
            seconds = time.monotonic() - since
            waits, stack = self._details() if activity == STEP and seconds > _SLOW_S else ("", [])
            line = json.dumps([activity, step, round(seconds, 3), waits, stack]) + "\n"
            try:
                os.write(descriptor, line.encode())
            except OSError:
                return  # The supervisor has ended.
            time.sleep(_PERIOD_S)
