"""One engine over several processes: the first process leads and answers, the others follow."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rooftop.serve.engine.configuration import Configuration

if TYPE_CHECKING:
    from rooftop.serve.engine.engine import PagedEngine
    from rooftop.serve.hosts.together import Followers
    from rooftop.serve.server import Serving

#: Seconds in which clients hear that a process is lost; a hanging collective ends by then.
_GRACE_S = 10.0


@dataclass(kw_only=True)
class Lead:
    """The first process: its links to the followers, and the end of its ``serving`` when one of them is lost.

    ``draft`` is the folder of a draft model. ``stop`` is called when a follower is told to end.
    """

    coordinator: str
    draft: Path | None
    log: logging.Logger
    stop: Callable[[], None] = lambda: None
    serving: Serving | None = None
    _followers: Followers | None = field(default=None, init=False)
    _engine: PagedEngine | None = field(default=None, init=False)
    _lost: str | None = field(default=None, init=False)

    def followers(self, checkpoint: Path, configuration: Configuration) -> Followers:
        """The other processes. Raises RooftopError as ``rooftop.serve.hosts.together.gather`` does."""
        from rooftop.serve.hosts.together import gather, own_host

        self._followers = gather(
            checkpoint,
            configuration,
            own_host(self.coordinator),
            draft=self.draft,
            on_lost=self._on_lost,
            on_stop=lambda: self.stop(),
        )
        return self._followers

    def started(self, engine: PagedEngine | None) -> None:
        """Wait until the followers have started. ``engine`` (None: it has no requests) hears of losses."""
        assert self._followers is not None
        self._followers.wait()
        self._engine = engine

    def end(self) -> None:
        """End the followers after the last request."""
        if self._lost is not None:
            end_process(self._lost, 1)
        if self._followers is not None:
            self._followers.stop()

    def _on_lost(self, message: str) -> None:
        self._lost = message
        if self._engine is None or self.serving is None:
            end_process(message, 1)
        self.log.error(message)
        threading.Timer(_GRACE_S, end_process, (message, 1)).start()
        self._engine.abandon(message)
        self.serving.refuse()


def follow(checkpoint: Path, configuration: Configuration, draft: Path | None, on_ready: Callable[[], None]) -> None:
    """Follow the first process until it ends. Raises RooftopError and Infeasible."""
    from rooftop.serve.hosts.together import Follower

    follower = Follower(checkpoint, configuration, draft=draft, on_lost=lambda message: end_process(message, 1))

    def stop(number: int, frame: object) -> None:
        # Running requests are finished first, and that takes all processes.
        follower.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    follower.run(on_ready)


def end_process(line: str, status: int) -> NoReturn:
    """Print one line and end this process at once: the usual way out waits for the other processes."""
    print(f"rooftop: {line}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
