"""The view of a run under way: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rooftop.cli.output import progress_bar, say
from rooftop.core.quantities import format_count, format_seconds
from rooftop.train.metrics import StepRecord
from rooftop.train.recording import Watch

if TYPE_CHECKING:
    from rooftop.train.evaluate import Evaluation

#: Seconds between lines without a terminal.
_PAUSE_S = 10.0
#: Weight of the newest step in the rates that the bar shows.
_SMOOTH = 0.1


def describe_step(record: StepRecord) -> str:
    """Loss, rates and the share of the step that waited for data, in words."""
    rate = f"{format_count(record.tokens_per_s)} tokens/s"
    use = f"{format_count(record.model_flops_per_s)} model FLOP/s" if record.mfu is None else f"MFU {record.mfu:.1%}"
    return f"loss {record.loss:.4f}, {rate}, {use}, data {record.data_share:.0%}"


class LiveView(Watch):
    """Shows a run on stderr if that is a terminal, else as lines on stdout; with ``quiet`` (--json) no lines.

    A context manager: bars are cleared at its end.
    """

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._stack = ExitStack()
        self._progress = self._stack.enter_context(progress_bar(shown=not quiet))
        self._bar: tuple[Progress, TaskID] | None = None
        self._smooth: StepRecord | None = None
        self._steps, self._shown_s = 0, 0.0

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def on_progress(self, done: int, total: int, label: str) -> None:
        """Move the bar of the data."""
        if self._progress is not None:
            self._progress(done, total, label)

    def on_message(self, line: str) -> None:
        """Write a line above the bar."""
        if self._bar is not None:
            self._bar[0].console.print(escape(line))
        elif not self._quiet:
            say(line)

    def on_start(self, step: int, steps: int) -> None:
        """Replace the bar of the data by that of the steps."""
        self._stack.close()
        self._progress, self._steps = None, steps
        if not sys.stderr.isatty():
            return
        columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        bar = self._stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        self._bar = bar, bar.add_task("compiling", total=steps, completed=step)

    def on_step(self, record: StepRecord) -> None:
        """Move the bar, or write a line every few seconds."""
        if self._bar is not None:
            self._smooth = record if self._smooth is None else _mixed(self._smooth, record)
            bar, task = self._bar
            bar.update(task, completed=record.step, description=escape(describe_step(self._smooth)))
            return
        now = time.monotonic()
        if not self._quiet and (now - self._shown_s >= _PAUSE_S or record.step == self._steps):
            self._shown_s = now
            left = format_seconds(record.seconds * (self._steps - record.step))
            say(f"step {record.step}/{self._steps}: {describe_step(record)}, {left} left")

    def on_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Write a line."""
        figures = f"held-out loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.4g}"
        self.on_message(f"step {step}: {figures} ({evaluation.tokens} tokens)")


def _mixed(before: StepRecord, now: StepRecord) -> StepRecord:
    """The newest loss with smoothed rates."""

    def mix(name: str) -> float:
        old, new = getattr(before, name), getattr(now, name)
        return float(old + _SMOOTH * (new - old))

    return replace(
        now,
        tokens_per_s=mix("tokens_per_s"),
        model_flops_per_s=mix("model_flops_per_s"),
        data_share=mix("data_share"),
        mfu=None if now.mfu is None or before.mfu is None else mix("mfu"),
    )
