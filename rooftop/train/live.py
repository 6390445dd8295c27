"""How a run looks while it goes on: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from rooftop.core.quantities import format_count, format_seconds
from rooftop.train.metrics import StepRecord

#: Seconds between lines where there is no terminal.
_PAUSE_S = 10.0
#: Steps over which rates are averaged in the bar.
_SMOOTH = 0.1


def describe_step(record: StepRecord) -> str:
    """Loss, rates and the share of the step that waited for data, as a person reads them."""
    rate = f"{format_count(record.tokens_per_s)} tokens/s"
    use = f"{format_count(record.model_flops_per_s)} model FLOP/s" if record.mfu is None else f"MFU {record.mfu:.1%}"
    return f"loss {record.loss:.4f}, {rate}, {use}, data {record.data_share:.0%}"


@contextmanager
def live_view(
    steps: int, start: int, say: Callable[[str], None] | None
) -> Iterator[tuple[Callable[[StepRecord], None], Callable[[str], None]]]:
    """What to call with each step's record, and with a line of text; ``say`` writes lines where there is no terminal.

    Without ``say`` (``--json``) the bar alone is shown, if stderr is a terminal.
    """
    if sys.stderr.isatty():
        with _bar(steps, start) as calls:
            yield calls
        return
    shown_s = 0.0

    def on_step(record: StepRecord) -> None:
        nonlocal shown_s
        now = time.monotonic()
        if say is not None and (now - shown_s >= _PAUSE_S or record.step == steps):
            shown_s = now
            left = format_seconds(record.seconds * (steps - record.step))
            say(f"step {record.step}/{steps}: {describe_step(record)}, {left} left")

    yield on_step, say or (lambda line: None)


@contextmanager
def _bar(steps: int, start: int) -> Iterator[tuple[Callable[[StepRecord], None], Callable[[str], None]]]:
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("compiling", total=steps, completed=start)
        smooth: StepRecord | None = None

        def on_step(record: StepRecord) -> None:
            nonlocal smooth
            smooth = record if smooth is None else _mixed(smooth, record)
            bar.update(task, completed=record.step, description=escape(describe_step(smooth)))

        yield on_step, lambda line: bar.console.print(escape(line))


def _mixed(before: StepRecord, now: StepRecord) -> StepRecord:
    """The newest loss beside rates that do not jump."""

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
