"""Steps under way: their metrics are read, recorded and checked while the next step runs."""

from __future__ import annotations

import math
import time
from collections import deque
from dataclasses import dataclass

import jax

from rooftop.programs.parameters import Batch
from rooftop.programs.training.program import Optimizer
from rooftop.programs.training.step import StepMetrics
from rooftop.runs.records import Records
from rooftop.runs.signals import Agreement, Votes, one_at_a_time
from rooftop.train.data.loading import Fetched
from rooftop.train.evaluate import Evaluation
from rooftop.train.metrics import Divergence, StepRecord, TrainRates
from rooftop.train.schedule import ScheduledOptimizer

#: Steps that are dispatched before the metrics of an earlier one are read.
_AHEAD = 1


class Watch:
    """Callbacks of a training run, in its first process. Those of this class do nothing."""

    def on_progress(self, done: int, total: int, label: str) -> None:
        """Show the progress of preparing the data."""

    def on_message(self, line: str) -> None:
        """Show a line."""

    def on_start(self, step: int, steps: int) -> None:
        """Expect the steps after ``step``, up to ``steps``."""

    def on_step(self, record: StepRecord) -> None:
        """Show a step that is done."""

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Show an evaluation of the weights after ``step``."""


class Failed(Exception):
    """The record of a step after which training makes no sense, and the reason."""

    def __init__(self, record: StepRecord, why: str) -> None:
        super().__init__(why)
        self.record, self.why = record, why


@dataclass(frozen=True)
class _Posted:
    """A step that was dispatched and may still run."""

    step: int
    metrics: StepMetrics[jax.Array]
    waited_s: float
    vote: Votes | jax.Array


class StepReader:
    """Reads the metrics of dispatched steps, one step late, so that the devices never wait for the host."""

    def __init__(
        self, records: Records, optimizer: Optimizer, rates: TrainRates, watch: Watch, *, divergence: float
    ) -> None:
        self._records, self._optimizer, self._rates, self._watch = records, optimizer, rates, watch
        self._pending = deque[_Posted]()
        self._ahead = 0 if one_at_a_time() else _AHEAD
        self._divergence = Divergence(divergence)
        self._mark = self._host_mark = time.perf_counter()
        self.record: StepRecord | None = None

    @property
    def running(self) -> list[StepMetrics[jax.Array]]:
        """Metrics of the steps that may still run."""
        return [posted.metrics for posted in self._pending]

    def host_s(self) -> float:
        """Seconds that this process has worked on its host since the last step was read: data, and what else it does.

        A process with more of them than the others makes all of them wait.
        """
        return time.perf_counter() - self._host_mark

    def posted(
        self,
        fetched: Fetched[Batch[jax.Array]],
        metrics: StepMetrics[jax.Array],
        vote: Votes | jax.Array,
        agreement: Agreement,
    ) -> bool:
        """Take a dispatched step and read the steps that are due. Return True to stop now. Raises Failed."""
        self._pending.append(_Posted(fetched.step + 1, metrics, fetched.waited_s, vote))
        return len(self._pending) > self._ahead and self._read(agreement)

    def drain(self, agreement: Agreement) -> bool:
        """Read all dispatched steps. Return True to stop now. Raises Failed."""
        stop = False
        while self._pending:
            stop = self._read(agreement) or stop
        return stop

    def restart_clock(self) -> None:
        """Leave the time since the last step out of the next one."""
        self._mark = self._host_mark = time.perf_counter()

    def _read(self, agreement: Agreement) -> bool:
        posted = self._pending.popleft()
        jax.block_until_ready(posted.metrics)
        now = time.perf_counter()
        votes = agreement.read(posted.vote)
        optimizer = self._optimizer
        share = optimizer.schedule.share(posted.step - 1) if isinstance(optimizer, ScheduledOptimizer) else 1.0
        record = StepRecord.of(
            posted.step,
            posted.metrics,
            learning_rate=optimizer.learning_rate * float(share),
            seconds=now - self._mark,
            waited_s=posted.waited_s,
            unix_s=time.time(),
            rates=self._rates,
            host_s=votes.host_s,
        )
        self._mark = now
        self._records.append(record.to_json())
        self.record = record
        self._watch.on_step(record)
        if not record.finite:
            what = "a gradient" if math.isfinite(record.loss) else "the loss"
            raise Failed(record, f"{what} is not a finite number")
        if (rise := self._divergence.rise(record.loss)) is not None:
            over = f"the mean loss of {self._divergence.window} steps is {rise:.2f} nats above the lowest before"
            raise Failed(record, f"the loss diverges: {over} (--divergence {self._divergence.nats:g})")
        self._host_mark = time.perf_counter()
        return votes.stop
