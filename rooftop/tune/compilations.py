"""Compilations in processes of their own, several at a time, and the trials that they end in."""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TypeAlias, TypeVar

from rooftop.compiler.compiling import Compiled, Progress
from rooftop.compiler.hlo.fingerprint import fingerprint
from rooftop.compiler.machine.schedule import timeline
from rooftop.compiler.memory import OutOfMemory
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.ledger import Row
from rooftop.explain.compiled.report import CompiledReport
from rooftop.tune.records import Trial

#: A compilation that calls its argument a few times a second.
Compilation: TypeAlias = Callable[[Progress], Compiled]
_Item = TypeVar("_Item")


def usual_jobs() -> int:
    """Compilations at a time: each keeps about two cores busy."""
    return max(1, (os.cpu_count() or 2) // 2)


class GivenUp(Exception):
    """A compilation that is given up: a callback raises it."""


@dataclass(frozen=True, kw_only=True)
class CompilerOutcome:
    """A compilation that ended in ``seconds``: the program, or the reason why there is none.

    ``cached``: the cache of the compiler had the answer.
    """

    compiled: Compiled | None
    error: Infeasible | RooftopError | None
    seconds: float
    cached: bool


class CompilerPool:
    """Compilations, ``jobs`` at a time. Leaving the context ends those that run; ``count`` are those that began."""

    def __init__(self, jobs: int = 1, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._jobs, self._clock = jobs, clock
        self._stop = threading.Event()
        self._pool = ThreadPoolExecutor(jobs)
        self.count = 0

    def __enter__(self) -> CompilerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)

    def submit(self, compilation: Compilation, on_progress: Progress) -> Future[CompilerOutcome]:
        """Begin a compilation as soon as fewer than ``jobs`` run. Of one that is given up the future raises GivenUp."""

        def ended() -> CompilerOutcome:
            start, compiled, error, is_cached = self._clock(), None, None, True

            def tick(phase: str, elapsed_s: float) -> None:
                nonlocal is_cached
                # An answer of the cache has no phases.
                is_cached = False
                if self._stop.is_set():
                    raise GivenUp
                on_progress(phase, elapsed_s)

            try:
                compiled = compilation(tick)
            except (Infeasible, RooftopError) as refused:
                error = refused
            seconds = self._clock() - start
            if compiled is not None and compiled.cached:
                # The seconds of its first compilation.
                seconds = compiled.lower_s + compiled.compile_s
            return CompilerOutcome(compiled=compiled, error=error, seconds=seconds, cached=is_cached)

        self.count += 1
        return self._pool.submit(ended)

    def ended(
        self, waiting: Iterable[_Item], submit: Callable[[_Item], Future[CompilerOutcome]]
    ) -> Iterator[tuple[_Item, CompilerOutcome]]:
        """Submit items, ``jobs`` at a time, and yield each with its outcome as it ends; not those that are given up."""
        running: dict[Future[CompilerOutcome], _Item] = {}
        for item in waiting:
            running[submit(item)] = item
            if len(running) == self._jobs:
                yield from _finished(running)
        while running:
            yield from _finished(running)


def _finished(running: dict[Future[CompilerOutcome], _Item]) -> Iterator[tuple[_Item, CompilerOutcome]]:
    """Wait until a future ends, and take it out of those that run."""
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        item = running.pop(future)
        if not isinstance(future.exception(), GivenUp):
            yield item, future.result()


def ended_trial(
    begun: Trial, outcome: CompilerOutcome, alike: Callable[[str], Trial | None] = lambda schedule: None
) -> tuple[Trial, Sequence[Row]]:
    """The trial that an outcome ends, priced by its schedule, and its compiled ledger.

    ``alike`` returns the first trial with a schedule, whose price is then the trial's; its ledger is left out.
    """
    begun = replace(begun, seconds=outcome.seconds)
    if outcome.compiled is None:
        if isinstance(outcome.error, RooftopError):
            return replace(begun, end="refused", reason=_reason(outcome.error)), ()
        needed = outcome.error.needed_bytes if isinstance(outcome.error, OutOfMemory) else None
        return replace(begun, end="too_large", reason=str(outcome.error), needed_bytes=needed), ()
    report = CompiledReport(plan=None, compiled=outcome.compiled)
    schedule = fingerprint(outcome.compiled.hlo_text)
    first = alike(schedule)
    if first is not None and first.key != begun.key:
        same = replace(
            begun,
            end="same_schedule",
            schedule=schedule,
            same_as=first.factors,
            expected_s=first.expected_s,
            estimated_s=first.estimated_s,
            exposed_s=first.exposed_s,
            peak_bytes=first.peak_bytes,
        )
        return same, ()
    try:
        line = report.timeline
        by_xla = timeline(outcome.compiled.module, outcome.compiled.mesh, report.rates, estimates="xla")
    except RooftopError as error:
        return replace(begun, end="refused", reason=f"rooftop cannot read it: {error}"), ()
    priced = replace(
        begun,
        end="priced",
        schedule=schedule,
        expected_s=line.total_s,
        estimated_s=by_xla.total_s,
        exposed_s=line.exposed_s,
        peak_bytes=report.peak_bytes,
    )
    return priced, report.ledger.rows


def _reason(error: RooftopError) -> str:
    """The reason of the compiler, or of the program: of 'one that XLA compiles (REASON)' the reason."""
    match = re.fullmatch(r"one that [\w ]+ \((.*)\)", error.accepted, re.DOTALL)
    return match[1] if match else error.accepted
