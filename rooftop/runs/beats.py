"""Heartbeats of a supervised process: each second it says what it does, so that its supervisor knows that it lives.

The beats come from a thread of their own. A process that is stopped, or has no processor, misses beats; one whose main
thread waits for ever goes on beating, and its beats name the same activity with a growing time.
"""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass
from functools import cache

#: The environment variable of a supervised process: the descriptor to which it writes its beats.
DESCRIPTOR = "ROOFTOP_BEATS"
_PERIOD_S = 1.0
#: Activity of a process that has not said anything else.
STARTING = "starting"
STEP = "step"
#: Waiting for the batch of the next step.
DATA = "waiting for data"


@dataclass(frozen=True, kw_only=True)
class ProcessBeat:
    """A beat: the activity of a process, the step that it is of, and for how long the process has been in it."""

    activity: str
    step: int
    seconds: float

    def __str__(self) -> str:
        what = f"{self.activity} {self.step}" if self.activity == STEP else self.activity
        return what if self.activity in (STEP, STARTING) or not self.step else f"{what} after step {self.step}"

    @classmethod
    def read(cls, line: bytes) -> ProcessBeat:
        """The beat of a line that ``Beats`` wrote. Raises ValueError for another."""
        activity, step, seconds = json.loads(line)
        return cls(activity=str(activity), step=int(step), seconds=float(seconds))


class Beats:
    """The beats of this process, which has one of them. Without a supervisor nothing is written."""

    @classmethod
    @cache
    def of_process(cls) -> Beats:
        """The beats of this process, from the first call on."""
        return cls()

    def __init__(self) -> None:
        self._now = (STARTING, 0, time.monotonic())
        descriptor = os.environ.get(DESCRIPTOR)
        if descriptor is not None:
            threading.Thread(target=self._beat, args=(int(descriptor),), name="beats", daemon=True).start()

    def enter(self, activity: str, step: int) -> None:
        """Begin an activity, which belongs to a step."""
        self._now = (activity, step, time.monotonic())

    def _beat(self, descriptor: int) -> None:
        while True:
            activity, step, since = self._now
            line = json.dumps([activity, step, round(time.monotonic() - since, 3)]) + "\n"
            try:
                os.write(descriptor, line.encode())
            except OSError:
                return  # The supervisor has ended.
            time.sleep(_PERIOD_S)
