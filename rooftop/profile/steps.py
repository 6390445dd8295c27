"""The steps of a trace on one device: those that it marks itself, those that its host has marked, or executions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from rooftop.profile.intervals import Ints
from rooftop.profile.trace import Device, Steps

ON_DEVICE = "marked on the device"
ON_HOST = "StepTraceAnnotation on the host, as executions of the program on the device"
EXECUTIONS = "executions of the program that takes most of the time (nothing marks steps)"
WHOLE = "the whole trace (nothing tells steps apart)"


@dataclass(frozen=True, kw_only=True)
class Stepped:
    """Steps on one device in picoseconds, [N] each; ``marked`` says what tells them apart.

    A step lasts until the next one begins. What follows the last one is not known, so that it is not ``counted`` where
    there are others, unless the device has marked its end.
    """

    numbers: Ints
    starts: Ints
    ends: Ints
    marked: str

    @property
    def counted(self) -> int:
        """How many steps figures are the means of."""
        return len(self.numbers) if self.marked == ON_DEVICE else max(1, len(self.numbers) - 1)

    @property
    def low(self) -> int:
        """When the first step begins."""
        return int(self.starts[0])

    @property
    def high(self) -> int:
        """When the last counted step ends."""
        return int(self.ends[self.counted - 1])

    @property
    def window(self) -> int:
        """How long the counted steps are together."""
        return self.high - self.low

    def spans(self) -> Iterator[tuple[int, int, int]]:
        """(number, start, end) of every step."""
        return zip(self.numbers.tolist(), self.starts.tolist(), self.ends.tolist(), strict=True)


def stepped(device: Device, marks: Steps | None) -> Stepped:
    """The steps of a device whose host has marked ``marks``."""
    if device.steps is not None:
        own = device.steps
        return Stepped(numbers=own.numbers, starts=own.starts, ends=own.ends, marked=ON_DEVICE)
    last = int(device.track.ends.max())
    runs = device.runs
    if not len(runs.starts):
        whole = np.array([int(device.track.starts.min())], np.int64)
        return Stepped(numbers=np.array([1]), starts=whole, ends=np.array([last], np.int64), marked=WHOLE)
    programs, inverse = np.unique(runs.programs, return_inverse=True)
    spent = np.bincount(inverse, runs.ends - runs.starts)
    if marks is not None and len(marks.numbers):
        # What runs in the steps runs as often as there are steps, or several times each; what runs beside them may take
        # longer (an evaluation at the end).
        often = np.bincount(inverse) % len(marks.numbers) == 0
        spent = np.where(often, spent, 0) if often.any() else spent
    main = np.flatnonzero(runs.programs == programs[int(np.argmax(spent))])
    begins, numbers, marked = runs.starts[main], np.arange(1, len(main) + 1), EXECUTIONS
    if marks is not None and len(main) % len(marks.numbers) == 0:
        # A step may execute the program several times: for each microbatch, or each token.
        begins, numbers, marked = begins[:: len(main) // len(marks.numbers)], marks.numbers, ON_HOST
    ends = np.append(begins[1:], max(int(runs.ends[main].max()), int(begins[-1])))
    return Stepped(numbers=numbers, starts=begins, ends=ends, marked=marked)
