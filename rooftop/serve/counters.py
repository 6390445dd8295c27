"""What the servers of an engine count of themselves, and the time that they spend on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter

from rooftop.serve.requests import ProgramTimes

#: Of a program: rows, new tokens of each, tokens of context, and rows that generate beside those that are prefilled.
Shape = tuple[int, int, int, int]


@dataclass(kw_only=True)
class Counters:
    """What servers did, in sums; ``device_s`` is what of ``step_s`` went by in XLA and in waiting for it."""

    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    prefix_tokens: int = 0
    preemptions: int = 0
    guessed: int = 0
    accepted: int = 0
    step_s: float = 0.0
    device_s: float = 0.0
    #: Runs and seconds of each program.
    programs: dict[Shape, list[float]] = field(default_factory=dict)
    #: The same of steps that ran nothing else.
    alone: dict[Shape, list[float]] = field(default_factory=dict)

    def ran(self, programs: list[Shape], seconds: float) -> None:
        """A step of these programs took so long: each as long as it takes alone, and what is left is the others'."""
        known = [self.alone.get(program) for program in programs]
        means = [None if each is None else each[1] / each[0] for each in known]
        spent, unknown = sum(mean for mean in means if mean is not None), means.count(None)
        scale = seconds / spent if spent and (not unknown or spent > seconds) else 1.0
        rest = max(0.0, seconds - spent)
        for program, mean in zip(programs, means, strict=True):
            share = rest / unknown if mean is None else mean * scale
            for totals in (self.programs, self.alone) if len(programs) == 1 else (self.programs,):
                entry = totals.setdefault(program, [0, 0.0])
                entry[0] += 1
                entry[1] += share

    def program_times(self) -> tuple[ProgramTimes, ...]:
        """The programs that have run, in order of their sizes."""
        return tuple(
            ProgramTimes(
                sequences=rows, tokens=rows * width if width > 1 else 0, context_tokens=context,
                generating=beside, runs=int(runs), seconds=seconds,
            )
            for (rows, width, context, beside), (runs, seconds) in sorted(self.programs.copy().items())
        )  # fmt: skip

    def on_device(self) -> _OnDevice:
        """What goes by inside is time of the device."""
        return _OnDevice(self)


class _OnDevice:
    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    def __enter__(self) -> None:
        self._begun = perf_counter()

    def __exit__(self, *error: object) -> None:
        self._counters.device_s += perf_counter() - self._begun
