"""``rooftop serve`` as one of several processes that are one engine: the first, which answers, or one of the others."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.runs.environment import join_processes
from rooftop.serve.engine.configuration import Configuration

if TYPE_CHECKING:
    from rooftop.serve.engine.engine import PagedEngine
    from rooftop.serve.hosts.together import Followers
    from rooftop.serve.server import Serving

#: Seconds in which clients hear that a process is lost; what hangs in a collective ends by then.
_GRACE_S = 10.0


def as_one_of_several(options: Mapping[str, Any], serve: Callable[[], int]) -> int:
    """Join the others and ``serve``. An error ends this process at once: the usual way out waits for the others."""
    if options["generate_at"] == "local":
        accepted = "HOST:PORT with --coordinator: the processes that generate are started as these are"
        raise RooftopError("generate-at", "local", accepted)
    from rooftop.runs.supervise import keep_stdout

    keep_stdout()
    try:
        join_processes(options["coordinator"], options["processes"], options["process"])
        return serve()
    except (RooftopError, Infeasible) as error:
        _end(str(error), error.exit_status)


@dataclass(kw_only=True)
class Lead:
    """The first process: its links to the others, and what becomes of its ``serving`` with them.

    ``draft`` is the folder of a draft model. ``stop`` is called when one of the others is told to end.
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
        """The others. Raises RooftopError as ``rooftop.serve.hosts.together.gather`` does."""
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
        """Wait until the others have started too; without an ``engine`` of requests there is none to tell of a loss."""
        assert self._followers is not None
        self._followers.wait()
        self._engine = engine

    def end(self) -> None:
        """Nothing is served any more: the others end too."""
        if self._lost is not None:
            _end(self._lost, 1)
        if self._followers is not None:
            self._followers.stop()

    def _on_lost(self, message: str) -> None:
        self._lost = message
        if self._engine is None or self.serving is None:
            _end(message, 1)
        self.log.error(message)
        threading.Timer(_GRACE_S, _end, (message, 1)).start()
        self._engine.abandon(message)
        self.serving.refuse()


def is_first() -> bool:
    """Whether this process, of several, is the one that answers."""
    import jax

    return jax.process_index() == 0


def follow(checkpoint: Path, configuration: Configuration, draft: Path | None, *, as_json: bool) -> int:
    """Be one of the others, until the first one ends. Raises RooftopError and Infeasible."""
    import jax

    from rooftop.serve.hosts.together import Follower

    follower = Follower(checkpoint, configuration, draft=draft, on_lost=lambda message: _end(message, 1))

    def stop(number: int, frame: object) -> None:
        # What runs is finished first, and that takes all processes.
        follower.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)

    def ready() -> None:
        about = {
            "kind": "serve",
            "role": "follow",
            "process": jax.process_index(),
            "processes": jax.process_count(),
            "model": checkpoint.resolve().name,
            "pid": os.getpid(),
        }
        line = f"{about['model']}: process {about['process']} of {about['processes']} is ready"
        click.echo(json.dumps(about) if as_json else line)
        sys.stdout.flush()

    follower.run(ready)
    return 0


def _end(line: str, status: int) -> NoReturn:
    click.echo(f"rooftop: {line}", err=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
