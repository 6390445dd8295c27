"""What the steps of a run tell while they are under way: metrics, the clock, the trace."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from rooftop.programs.parameters import Batch
from rooftop.programs.training.optimizer import Optimizer
from rooftop.programs.training.step import StepMetrics
from rooftop.runs.folder import MetricsFile, RunFolder
from rooftop.runs.signals import Agreement, one_at_a_time
from rooftop.train.data.loading import Fetched
from rooftop.train.evaluate import Evaluation
from rooftop.train.metrics import Divergence, StepRecord, TrainRates
from rooftop.train.schedule import ScheduledOptimizer

#: Steps that are dispatched before the metrics of an earlier one are read.
_AHEAD = 1


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Who is told of what: each step's record, evaluations, and lines of text."""

    on_step: Callable[[StepRecord], None]
    on_evaluation: Callable[[int, Evaluation], None]
    say: Callable[[str], None]


class Failed(Exception):
    """The record of a step after which it makes no sense to go on, and why."""

    def __init__(self, record: StepRecord, why: str) -> None:
        super().__init__(why)
        self.record, self.why = record, why


@dataclass(frozen=True)
class _Posted:
    """A step that was dispatched, and may not be done."""

    step: int
    metrics: StepMetrics[jax.Array]
    waited_s: float
    vote: bool | jax.Array


class Loop:
    """What the steps on their way have told: their records, the clock, the trace."""

    def __init__(
        self, folder: RunFolder, optimizer: Optimizer, rates: TrainRates, watch: Watch, *, start: int,
        divergence: float, profile: tuple[int, int] | None, tensorboard: bool,
    ) -> None:  # fmt: skip
        self._folder, self._optimizer, self._rates, self._watch, self._profile = (
            folder,
            optimizer,
            rates,
            watch,
            profile,
        )
        self._pending = deque[_Posted]()
        self._ahead = 0 if one_at_a_time() else _AHEAD
        self._divergence = Divergence(divergence)
        first = jax.process_index() == 0
        self._events = TensorBoardEvents(folder.tensorboard, step=start) if first and tensorboard else None
        self._file = MetricsFile(folder.metrics, step=start) if first else None
        self._mark = time.perf_counter()
        self._tracing = False
        self.record: StepRecord | None = None

    def posted(
        self,
        fetched: Fetched[Batch[jax.Array]],
        metrics: StepMetrics[jax.Array],
        vote: bool | jax.Array,
        agreement: Agreement,
    ) -> bool:
        """Take a dispatched step, and read those that are due; whether to stop now."""
        self._pending.append(_Posted(fetched.step + 1, metrics, fetched.waited_s, vote))
        return len(self._pending) > self._ahead and self._read(agreement)

    def drain(self, agreement: Agreement) -> bool:
        """Wait for all steps; whether to stop now."""
        wanted = False
        while self._pending:
            wanted = self._read(agreement) or wanted
        return wanted

    def resume_clock(self) -> None:
        """Time spent on other things than steps is not theirs."""
        self._mark = time.perf_counter()

    def profile(self, step: int) -> None:
        """Begin or end the trace before a step."""
        wanted = self._profile
        if wanted is None:
            return
        if self._tracing and step > wanted[1]:
            self._end_trace()
        elif not self._tracing and wanted[0] <= step <= wanted[1]:
            jax.profiler.start_trace(self._folder.profile)
            self._tracing = True

    def append(self, record: dict[str, Any]) -> None:
        """A line of metrics.jsonl, in the first process."""
        if self._file is not None:
            self._file.append(record)
        if self._events is not None:
            self._events.append(record)

    def close(self) -> None:
        """End what is open."""
        if self._tracing:
            self._end_trace()
        for each in (self._file, self._events):
            if each is not None:
                each.close()

    def _end_trace(self) -> None:
        for posted in self._pending:
            jax.block_until_ready(posted.metrics)
        jax.profiler.stop_trace()
        self._tracing = False

    def _read(self, agreement: Agreement) -> bool:
        posted = self._pending.popleft()
        jax.block_until_ready(posted.metrics)
        now = time.perf_counter()
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
        )
        self._mark = now
        self.append(record.to_json())
        self.record = record
        self._watch.on_step(record)
        if not record.finite:
            what = "a gradient" if math.isfinite(record.loss) else "the loss"
            raise Failed(record, f"{what} is not a finite number")
        if (rise := self._divergence.rise(record.loss)) is not None:
            over = f"the mean loss of {self._divergence.window} steps is {rise:.2f} nats above the lowest before"
            raise Failed(record, f"the loss diverges: {over} (--divergence {self._divergence.nats:g})")
        return agreement.read(posted.vote)


class TensorBoardEvents:
    """An event file in ``folder``; TensorBoard shows those of the folder as one run.

    What earlier files have of steps behind ``step`` is void: they are done again. Needs tensorboardX.
    """

    def __init__(self, folder: Path, *, step: int) -> None:
        from tensorboardX import SummaryWriter

        # The name has the second in which the file was made: the step keeps a quick restart from writing over it.
        self._writer = SummaryWriter(
            str(folder), purge_step=step + 1 if step else None, filename_suffix=f".behind{step}"
        )

    def append(self, record: Mapping[str, Any]) -> None:
        """One point for every number of a line of metrics.jsonl, at its step; evaluations under ``eval/``."""
        for name, value in record.items():
            if name in ("step", "unix_s") or value is None:
                continue
            group, _, rest = name.partition("_")
            tag = f"eval/{rest}" if group == "eval" else f"train/{name}"
            self._writer.add_scalar(tag, value, record["step"], walltime=record.get("unix_s"))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
