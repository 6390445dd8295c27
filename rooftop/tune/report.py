"""The answer of a search: baseline and best, what differs by scope, every trial in its rank, and the lines to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from rooftop import __version__
from rooftop.core.ledger import Ledger
from rooftop.core.quantities import format_bytes, format_seconds
from rooftop.explain.difference import Difference, difference, ledger_side
from rooftop.plan.documents import PlannedSlice
from rooftop.tune.factors import Factor
from rooftop.tune.records import SAME, RankedTrial, Trial, TuneRecord, saved
from rooftop.tune.search import Searched
from rooftop.tune.subjects import Subject
from rooftop.tune.trials import TrialFile


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


@dataclass(frozen=True, kw_only=True)
class TuneReport:
    """A search that has ended, with the program that it was for and the file of its trials."""

    subject: Subject
    searched: Searched
    file: TrialFile
    estimates: Literal["rooftop", "xla"]
    versions: Mapping[str, str]
    cpu_s: float

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines that set the best."""
        return self.subject.lines(self.searched.setting)

    @cached_property
    def trials(self) -> tuple[RankedTrial, ...]:
        """Trials of the search with as many layers as the baseline, the fastest first, then those without a time."""
        own = [trial for trial in self.file.trials if trial.layers == self.searched.layers]
        timed = sorted((trial for trial in own if trial.fits), key=self._time_s)
        rest = [trial for trial in own if not trial.fits]
        return tuple(self._ranked(timed)) + tuple(self._entry(trial, None) for trial in rest)

    def _ranked(self, timed: Sequence[Trial]) -> Iterator[RankedTrial]:
        rank, last_s = 0, float("-inf")
        for place, trial in enumerate(timed, start=1):
            # Equal times share a rank.
            if self._time_s(trial) > last_s * (1 + SAME):
                rank, last_s = place, self._time_s(trial)
            yield self._entry(trial, rank)

    def _entry(self, trial: Trial, rank: int | None) -> RankedTrial:
        baseline = self.searched.baseline
        by_name: dict[str, Factor] = {factor.name: factor for factor in self.searched.factors}
        factor = by_name.get(trial.factors[0]) if len(trial.factors) == 1 else None
        return RankedTrial(
            rank=rank,
            trial=trial,
            gain_s=saved(self._time_s(baseline), self._time_s(trial)),
            gain_bytes=saved(baseline.peak_bytes, trial.peak_bytes),
            recipe=factor is not None and factor.recipe,
            sources=() if factor is None else factor.sources,
            why=self._why(trial),
        )

    def _why(self, trial: Trial) -> str:
        baseline = self.searched.baseline
        if trial.end == "refused":
            return f"refused: {trial.reason}"
        if trial.end == "too_large":
            return f"does not fit: {trial.reason}"
        if not trial.factors:
            return ""
        if trial.schedule == baseline.schedule:
            return "the schedule of the baseline"
        same = ""
        if trial.end == "same_schedule" and trial.same_as:
            same = f"; the schedule of {' + '.join(trial.same_as)}"
        if not baseline.fits:
            return f"fits{same}"
        change = self._time_s(trial) / self._time_s(baseline) - 1
        words = "another schedule, as fast" if abs(change) < SAME else "faster" if change < 0 else "slower"
        return f"{words}{same}"

    def _time_s(self, trial: Trial) -> float:
        return trial.time_s(self.estimates)

    @cached_property
    def difference(self) -> Difference | None:
        """Changes by scope that the best makes; None if it is the baseline, or if the baseline does not fit."""
        first, last = self.searched.whole or (self.searched.baseline, self.searched.best)
        if first.schedule == last.schedule or not first.fits:
            return None
        sides = [
            ledger_side(trial.title, "compiled", Ledger(self.file.ledger(trial)), trial.peak_bytes)
            for trial in (first, last)
        ]
        return difference(*sides)

    @property
    def verdict(self) -> str:
        """One line."""
        searched = self.searched
        first, last = searched.whole or (searched.baseline, searched.best)
        of = "" if searched.layers is None else f" of {searched.layers} layers" if searched.whole is None else ""
        if not first.fits:
            says = (
                f"{last.title}: it fits, {format_seconds(self._time_s(last))} a step{of}, and the baseline does not"
                if last.fits
                else "nothing that was tried fits with all layers"
            )
        elif searched.best.factors == ():
            says = f"nothing that was tried is faster than {format_seconds(self._time_s(first))} a step{of}"
        else:
            before, after = self._time_s(first), self._time_s(last)
            memory = ""
            if first.peak_bytes is not None and last.peak_bytes is not None:
                saved = float(first.peak_bytes - last.peak_bytes)
                memory = f", peak memory {'-' if saved > 0 else '+'}{format_bytes(abs(saved))}"
            change = "more" if after > before else f"{after / before - 1:.1%}"
            says = f"{last.title}: {format_seconds(before)} a step{of}, then {format_seconds(after)} ({change}){memory}"
        return f"{says}; {self._counts}"

    @property
    def _counts(self) -> str:
        tried = len(self.trials)
        end = "; time is over before all were tried" if self.searched.out_of_time else ""
        return f"{_plural(tried, 'trial')}, {_plural(self.schedules, 'distinct schedule')}{end}"

    @property
    def schedules(self) -> int:
        """Distinct scheduled modules."""
        return len({entry.trial.schedule for entry in self.trials if entry.trial.schedule})

    def record(self) -> TuneRecord:
        """The answer as it is written."""
        searched, own = self.searched, [entry.trial for entry in self.trials]
        return TuneRecord(
            kind="tuned",
            schema=1,
            rooftop_version=__version__,
            program=self.subject.name,
            slice=PlannedSlice.of(self.subject.slice),
            estimates=self.estimates,
            versions=self.versions,
            layers=searched.layers,
            baseline=searched.baseline,
            best=searched.best,
            whole=searched.whole,
            difference=self.difference,
            lines=self.lines,
            tried=len(own),
            schedules=self.schedules,
            refused=sum(not trial.fits for trial in own),
            out_of_time=searched.out_of_time,
            seconds=searched.seconds,
            cpu_s=self.cpu_s,
            compiled=searched.compiled,
            compile_s=sum(float(trial.seconds) for trial in own),
            results=str(self.file.path),
            trials=self.trials,
            verdict=self.verdict,
        )

    def to_json(self) -> dict[str, Any]:
        """The answer as plain JSON values."""
        return self.record().to_json()
