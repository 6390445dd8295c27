"""A trace of some steps of a run, by JAX's profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError


def check_steps(steps: tuple[int, int] | None) -> None:
    """Raise RooftopError unless ``steps`` are the first and last step of a trace, counted from 1, or None."""
    if steps is not None and not 1 <= steps[0] <= steps[1]:
        raise RooftopError("profile", f"steps={steps[0]}..{steps[1]}", "steps=A..B with A up to B, counted from 1")


class StepTrace:
    """The trace of ``steps``, first and last, counted from 1, written to ``folder``. None traces no step."""

    def __init__(self, folder: Path, steps: tuple[int, int] | None) -> None:
        self._folder = folder
        self._first, self._last = steps or (1, 0)
        self._is_on = False

    def step(self, step: int, running: Any) -> AbstractContextManager[object]:
        """Return the context of a step. The first traced step waits for the arrays ``running`` and starts the trace."""
        import jax

        if not self._is_on and self._first <= step <= self._last:
            jax.block_until_ready(running)
            jax.profiler.start_trace(self._folder)
            self._is_on = True
        return jax.profiler.StepTraceAnnotation("train", step_num=step)

    def end(self, step: int, running: Any) -> None:
        """Stop the trace after its last step, once the arrays ``running`` are ready."""
        if self._is_on and step >= self._last:
            self.close(running)

    def close(self, running: Any = ()) -> None:
        """Stop a trace that is under way, once the arrays ``running`` are ready."""
        import jax

        if self._is_on:
            jax.block_until_ready(running)
            jax.profiler.stop_trace()
            self._is_on = False
