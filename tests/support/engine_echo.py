"""The process of an engine without a model (``serving_echo``), for the engine's side of a link.

A prompt that begins with the token 1 hangs the step loop at its second token, one with 2 ends the process there.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.admission import Admission
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.requests import Beat, Token
from rooftop.serve.hosts.engine_process import EngineTask, main
from tests.support.serving_echo import EchoEngine, _Running

#: Arguments that run this module in a child.
COMMAND = ("-m", "tests.support.engine_echo")


@dataclass
class EchoChild(EchoEngine):
    """An echo with what the process of an engine needs of one; it waits for masks while it steps."""

    configuration: Configuration = field(default_factory=Configuration)
    policy: Policy = field(default_factory=lambda: Policy(max_batch=64))

    def __post_init__(self) -> None:
        super().__post_init__()
        self._stuck_s: float | None = None

    @property
    def admission(self) -> Admission:
        return Admission(vocab=400, max_model_len=self.max_model_len, page_tokens=16, pages=1000)

    def wake(self) -> None:
        pass

    def waits(self) -> str:
        return "one of its 2 collectives"

    def beat(self) -> Beat:
        stuck_s = self._stuck_s
        return Beat(age_s=0.0 if stuck_s is None else time.monotonic() - stuck_s, doing="echoing")

    def _next(self, running: _Running) -> Token:
        if running.done == 1 and running.request.prompt[0] == 1:
            self._stuck_s = time.monotonic()
            threading.Event().wait()
        if running.done == 1 and running.request.prompt[0] == 2:
            os._exit(3)
        return super()._next(running)


def load(task: EngineTask, log: logging.Logger, on_progress: Callable[[int, int], None]) -> EchoChild:
    """The echo of a task: a step takes as long as its ``drain_s`` says."""
    on_progress(1, 1)
    return EchoChild(end=333, step_s=task.request.drain_s, configuration=replace(task.configuration, max_queue=8))


if __name__ == "__main__":
    main(load)
