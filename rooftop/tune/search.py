"""The search: a baseline, every factor alone, then those that gain together, until the time is over.

Factors are tried one at a time first, so that each has a figure of its own. Then the one that gains most is joined by
the others, the largest gain first, and each that makes the step faster stays. Compilations run in processes of their
own, and their trials are kept one by one: a search that was ended goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from statistics import median

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.ledger import Row
from rooftop.tune.compilations import CompilerOutcome, CompilerPool, GivenUp, ended_trial
from rooftop.tune.factors import Factor
from rooftop.tune.records import SAME, Trial
from rooftop.tune.subjects import Subject, change_of, options_of
from rooftop.tune.trials import TrialFile, trial_key

#: Share of the time in which factors are tried alone, before those that gain are joined.
_ALONE = 0.7
#: Compilations that must fit into the time; for fewer, proxies with few layers are tried.
_ENOUGH = 8
#: A proxy is worth it if it compiles in this share of the time of the whole.
_SHORTER = 0.6

#: Factors that are set together.
Setting = tuple[Factor, ...]
#: Callback (trials that have ended, trials in all, what is being compiled).
OnTrials = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class SearchLimits:
    """``seconds`` of the search, ``jobs`` compilations at a time, and the ``layers`` of proxies.

    ``layers`` None: proxies only if few whole compilations fit into the time; 0: never.
    """

    seconds: float
    jobs: int = 1
    layers: int | None = None


@dataclass(frozen=True, kw_only=True)
class Searched:
    """A search that has ended: its ``baseline``, the ``best`` setting and its trial, and the ``layers`` of proxies.

    ``whole`` are the baseline and the best compiled with all layers, where proxies were searched (None: not, or not
    yet). ``out_of_time``: factors were left. ``seconds`` are those of this run, and ``compiled`` counts its
    compilations.
    """

    baseline: Trial
    best: Trial
    setting: Setting
    factors: tuple[Factor, ...]
    layers: int | None
    whole: tuple[Trial, Trial] | None
    out_of_time: bool
    seconds: float
    compiled: int


class Search:
    """A search for ``subject`` over ``factors``, ranked by the times of ``estimates``, 'rooftop' or 'xla'."""

    def __init__(
        self,
        subject: Subject,
        factors: Sequence[Factor],
        file: TrialFile,
        limits: SearchLimits,
        *,
        estimates: str = "rooftop",
        cache: bool = True,
        clock: Callable[[], float] = time.monotonic,
        on_progress: OnTrials | None = None,
    ) -> None:
        self._subject, self._factors, self._file, self._limits = subject, tuple(factors), file, limits
        self._estimates, self._cache, self._clock = estimates, cache, clock
        self._report = on_progress or (lambda done, total, what: None)
        self._begin = clock()
        self._pool = CompilerPool(limits.jobs, clock=clock)
        self._layers = limits.layers or None
        self._took = [trial.seconds for trial in file.trials]
        self._done, self._total = 0, len(self._factors) + 1
        #: Kept for the whole program, where proxies are searched.
        self._reserve_s = 0.0
        self._settings: dict[str, Setting] = {}

    def run(self) -> Searched:
        """Search until every factor was tried and joined, or the time is over.

        Raises RooftopError if the baseline is refused, and Infeasible if nothing that was tried fits.
        """
        with self._pool:
            baseline = self._baseline()
            alone: list[Setting] = [(factor,) for factor in self._factors]
            for share in (_ALONE, 1.0):
                self._try_all(alone, share=share)
                self._join()
            best = self._best()
            whole = self._whole(best) if self._layers is not None else None
        left = any(self._known(setting) is None for setting in alone)
        if not best.fits:
            raise Infeasible(f"{self._subject.name} does not fit", f"{baseline.reason}; nothing that was tried does")
        return Searched(
            baseline=baseline,
            best=best,
            setting=self._settings[best.key],
            factors=self._factors,
            layers=self._layers,
            whole=whole,
            out_of_time=left,
            seconds=self._elapsed(),
            compiled=self._pool.count,
        )

    # ---- order

    def _baseline(self) -> Trial:
        """The program as it is, compiled or taken from the cache, with which earlier trials must agree."""
        if self._limits.layers:
            return self._checked_baseline(self._limits.layers)
        whole = self._checked_baseline(None)
        fewest = self._subject.fewest_layers() if self._limits.layers is None else None
        fitting = self._limits.seconds * self._limits.jobs / max(whole.seconds, 1e-3)
        if fewest is None or fitting >= _ENOUGH or self._all_known():
            return whole
        self._layers = fewest
        short = self._checked_baseline(fewest)
        if short.fits and short.seconds <= _SHORTER * whole.seconds:
            self._reserve_s = whole.seconds
            return short
        self._layers = None
        return whole

    def _all_known(self) -> bool:
        return all(self._known((factor,)) is not None for factor in self._factors)

    def _checked_baseline(self, layers: int | None) -> Trial:
        self._layers = layers
        before = self._known(())
        trial, ledger = self._end((), self._submit((), cache=self._cache, timed=False).result())
        if trial.end == "refused":
            raise RooftopError("program", self._subject.name, f"one that compiles ({trial.reason})")
        if before is not None:
            if (before.schedule, before.expected_s, before.end) == (trial.schedule, trial.expected_s, trial.end):
                # A cached answer is no compilation: the seconds are those of the first.
                return before
            self._file.restart()
        self._file.add(trial, ledger)
        self._took.append(trial.seconds)
        self._done += 1
        return trial

    def _join(self) -> None:
        """Join the factors that gain, the largest gain first; what no longer gains in company is left out."""
        baseline_s = self._cost(self._known(()))
        gains = list[tuple[float, Setting]]()
        for factor in self._factors:
            cost = self._cost(self._known((factor,)))
            if cost < baseline_s * (1 - SAME) and self._is_first((factor,)):
                gains.append((cost, (factor,)))
        queue = [setting for _, setting in sorted(gains, key=lambda entry: entry[0])]
        if not queue:
            return
        current = queue.pop(0)
        while queue:
            batch, queue = queue[: self._limits.jobs], queue[self._limits.jobs :]
            joined = [self._joined(current, setting) for setting in batch]
            self._total += sum(self._known(setting) is None for setting in joined)
            self._try_all(joined, share=1.0)
            limit = self._cost(self._known(current)) * (1 - SAME)
            costs = [self._cost(self._known(setting)) for setting in joined]
            faster = sorted((cost, at) for at, cost in enumerate(costs) if cost < limit)
            if faster:
                current = joined[faster[0][1]]
                # The others of the batch gain on what was: they may gain on what is.
                queue = [batch[at] for _, at in faster[1:]] + queue

    def _joined(self, setting: Setting, more: Setting) -> Setting:
        knobs = {factor.knob for factor in more}
        return (*(factor for factor in setting if factor.knob not in knobs), *more)

    def _is_first(self, setting: Setting) -> bool:
        """True unless an earlier trial has the same schedule: what does the same need not be joined twice."""
        trial = self._known(setting)
        return trial is not None and trial.end == "priced"

    def _best(self) -> Trial:
        known = [trial for trial in map(self._file.find, self._settings) if trial is not None]
        # Among equals the one with the fewest factors.
        own = [trial for trial in known if trial.layers == self._layers]
        fastest_s = min(map(self._cost, own))
        near = [trial for trial in own if self._cost(trial) <= fastest_s * (1 + SAME)]
        return min(near, key=lambda trial: (len(trial.factors), self._cost(trial)))

    def _whole(self, best: Trial) -> tuple[Trial, Trial] | None:
        """Baseline and best with all layers, if there is time for them."""
        proxies, setting = self._layers, self._settings[best.key]
        self._layers = None
        try:
            pair: list[Setting] = [(), setting]
            self._try_all(pair, share=1.0, whole=True)
            first, last = map(self._known, pair)
        finally:
            self._layers = proxies
        return None if first is None or last is None else (first, last)

    # ---- trials

    def _known(self, setting: Setting) -> Trial | None:
        key = trial_key(setting, self._layers)
        self._settings[key] = setting
        return self._file.find(key)

    def _cost(self, trial: Trial | None) -> float:
        return float("inf") if trial is None else trial.time_s(self._estimates)

    def _elapsed(self) -> float:
        return self._clock() - self._begin

    def _try_all(self, settings: Iterable[Setting], *, share: float, whole: bool = False) -> None:
        """Compile the settings that have no trial yet, while they are expected to end within a ``share`` of the time.

        The ``whole`` program is compiled if any time is left: how long it takes is not known.
        """
        waiting = iter([setting for setting in settings if self._known(setting) is None])
        begun = self._in_time(waiting, share, whole)
        for setting, outcome in self._pool.ended(begun, lambda setting: self._submit(setting, cache=False)):
            trial, ledger = self._end(setting, outcome)
            self._file.add(trial, ledger)
            self._took.append(trial.seconds)
            self._done += 1
            self._report(self._done, self._total, trial.title)

    def _in_time(self, waiting: Iterator[Setting], share: float, whole: bool) -> Iterator[Setting]:
        for setting in waiting:
            expected_s = 0.0 if whole or not self._took else median(self._took)
            time_s = self._limits.seconds - (0.0 if whole else self._reserve_s)
            if self._elapsed() + expected_s > share * time_s:
                return
            yield setting

    def _submit(self, setting: Setting, *, cache: bool, timed: bool = True) -> Future[CompilerOutcome]:
        layers, title = self._layers, " + ".join(factor.name for factor in setting) or "baseline"

        def tick(phase: str, elapsed_s: float) -> None:
            if timed and self._elapsed() > self._limits.seconds:
                raise GivenUp
            self._report(self._done, self._total, f"{title}: {phase} {elapsed_s:.0f} s")

        return self._pool.submit(
            lambda on_progress: self._subject.compile(setting, layers=layers, cache=cache, on_progress=on_progress),
            tick,
        )

    def _end(self, setting: Setting, outcome: CompilerOutcome) -> tuple[Trial, Sequence[Row]]:
        """The trial of an outcome, and its ledger if it is the first with its schedule."""
        begun = Trial(
            key=trial_key(setting, self._layers),
            factors=tuple(factor.name for factor in setting),
            options=options_of(setting),
            change=change_of(setting),
            layers=self._layers,
            end="refused",
            seconds=outcome.seconds,
        )
        return ended_trial(begun, outcome, self._first_with)

    def _first_with(self, schedule: str) -> Trial | None:
        first = self._file.with_schedule(schedule)
        return first if first is not None and first.layers == self._layers else None
