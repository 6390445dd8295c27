"""The process of an engine: it loads a model and steps, and has a link to the process that answers (``engine_child``).

The process that answers says

- ``submit``: a request, its prompt as int32 and the first mask of its constraint, if it has one;
- ``mask``: the tokens that its constraint allows next;
- ``cancel``, ``stats`` and ``check``: as the methods of an engine; ``stop``: end.

This one says ``progress`` while it loads, ``ready`` or ``failed`` once, ``tokens``, ``stats``, ``checked`` and, twice a
second, ``beat``.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

import numpy as np

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.records import plain
from rooftop.runs.environment import keep_compilations
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.requests import Beat, GenerationRequest, Overloaded, Token
from rooftop.serve.hosts.link import Link, LinkLost, Message
from rooftop.serve.hosts.masks import RemoteMasks
from rooftop.serve.hosts.messages import sampling_of, token_fields
from rooftop.serve.hosts.parts import EnginePart
from rooftop.serve.hosts.processes import BEAT_S, end_with
from rooftop.serve.logs import start_logging
from rooftop.serve.request import ServeRequest, named_as_options, shrunk

if TYPE_CHECKING:
    from rooftop.serve.engine.engine import PagedEngine


@dataclass(frozen=True, kw_only=True)
class EngineTask:
    """Task of an engine's process: what to serve, and the ``descriptor`` and the keys of its link.

    ``parent`` is the process that starts it, with which it ends.
    """

    request: ServeRequest
    part: EnginePart
    configuration: Configuration
    folder: Path
    descriptor: int = -1
    parent: int = 0
    asks: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    answers: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


class EngineProcess:
    """An engine over a link. ``build`` makes it, not yet started; it may raise RooftopError and Infeasible."""

    def __init__(self, link: Link, build: Callable[[Callable[[int, int], None]], PagedEngine]) -> None:
        self._link, self._build = link, build
        self._engine: PagedEngine | None = None
        self._masks = dict[int, RemoteMasks]()
        self._prompt: tuple[int, ...] = ()
        #: Tokens to send, and an event for their thread.
        self._tokens, self._come = deque[Token](), threading.Event()

    def run(self) -> None:
        """Load, then serve until the other side says stop or is lost."""
        threading.Thread(target=self._beat, name="rooftop beat", daemon=True).start()
        try:
            engine = self._build(lambda done, total: self._link.send("progress", done=done, total=total))
            engine.start()
        except RooftopError as error:
            # It is shown as it was given: a number without quotes.
            number = isinstance(error.given, int | float | None)
            value = error.given if number else str(error.given)
            self._link.send("failed", field=error.field, given=value, accepted=error.accepted)
        except Infeasible as error:
            self._link.send("failed", what=error.what, by=error.by)
        else:
            self._engine = engine
            threading.Thread(target=self._send_tokens, name="rooftop tokens", daemon=True).start()
            self._serve(engine)
        self._link.finish()

    def _serve(self, engine: PagedEngine) -> None:
        self._link.send(
            "ready",
            admission=asdict(engine.admission),
            prefix_cache=engine.prefix_cache,
            policy=asdict(engine.policy),
            max_queue=engine.configuration.max_queue,
            devices=engine.devices,
            stats=plain(engine.stats()),
        )
        self._say_beat()
        while (message := self._link.receive()).kind != "stop":
            self._heard(engine, message)
        engine.drain(0.0)

    def _heard(self, engine: PagedEngine, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "submit":
                self._submit(engine, message)
            case "mask":
                masks = self._masks.get(fields["id"])
                if masks is not None and message.payload is not None:
                    masks.came(message.payload)
                    engine.wake()
            case "cancel":
                if (masks := self._masks.get(fields["id"])) is not None:
                    masks.release()
                engine.cancel(fields["id"])
            case "stats":
                self._link.send("stats", number=fields["number"], stats=plain(engine.stats()))
            case "check":
                threading.Thread(target=self._check, args=(engine, fields["number"]), daemon=True).start()

    def _submit(self, engine: PagedEngine, message: Message) -> None:
        fields = message.fields
        id, size = fields["id"], 4 * fields["prompt_tokens"]
        payload = b"" if message.payload is None else bytes(message.payload)
        if size:
            # Choices of a request share its prompt, which is sent with the first of them.
            self._prompt = tuple(np.frombuffer(payload, np.int32, fields["prompt_tokens"]).tolist())
        masks: RemoteMasks | None = None
        if fields["constrained"]:
            masks = self._masks[id] = RemoteMasks()
            masks.came(payload[size:])
        try:
            sampling = sampling_of(fields["sampling"], masks)
            request = GenerationRequest(id=id, prompt=self._prompt, sampling=sampling, arrival_s=fields["arrival_s"])
            engine.submit(request, self._deliver)
        except (RooftopError, Overloaded) as error:
            self._deliver(Token(id=id, token=None, finish="error", message=str(error)))

    def _deliver(self, token: Token) -> None:
        if token.finish is not None:
            self._masks.pop(token.id, None)
        self._tokens.append(token)
        self._come.set()

    def _send_tokens(self) -> None:
        """Send tokens, those that come together in one message."""
        while True:
            self._come.wait()
            self._come.clear()
            fields = list[list[Any]]()
            while self._tokens:
                fields.append(token_fields(self._tokens.popleft()))
            if fields:
                self._link.send("tokens", tokens=fields)

    def _check(self, engine: PagedEngine, number: int) -> None:
        problem: str | None = None
        try:
            engine.check()
        except AssertionError as error:
            problem = str(error)
        self._link.send("checked", number=number, problem=problem)

    def _beat(self) -> None:
        while True:
            self._say_beat()
            time.sleep(BEAT_S)

    def _say_beat(self) -> None:
        engine = self._engine
        beat = Beat(age_s=0.0, doing="loading") if engine is None else engine.beat()
        self._link.send("beat", age_s=beat.age_s, doing=beat.doing)


def load_engine(task: EngineTask, log: logging.Logger, on_progress: Callable[[int, int], None]) -> PagedEngine:
    """The engine of a task, not yet started. Starts JAX. Raises RooftopError and Infeasible as ``load`` does."""
    keep_compilations()
    import jax

    configuration = task.configuration
    if task.request.shrink:
        configuration = shrunk(configuration, len(jax.devices()))
    with named_as_options():
        return task.part.engine(
            task.folder, configuration, draft=task.request.draft, lead=None, on_progress=on_progress, log=log
        )


def main(load: Callable[[EngineTask, logging.Logger, Callable[[int, int], None]], Any] = load_engine) -> NoReturn:
    """Run the engine that ``load`` makes for the process that started this one, until that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Everything that is printed goes to stderr: stdout is the other process's.
    os.dup2(2, 1)
    task: EngineTask = pickle.load(sys.stdin.buffer)
    end_with(task.parent)
    threading.Thread(target=_end_with_pipe, args=(sys.stdin.buffer,), daemon=True).start()
    link = Link(socket.socket(fileno=task.descriptor), send_key=task.answers, receive_key=task.asks)
    log = start_logging(task.request.log_level, sys.stderr)
    # If the other process has ended, everyone who waits for a token has.
    with suppress(LinkLost):
        EngineProcess(link, lambda on_progress: load(task, log, on_progress)).run()
    sys.stderr.flush()
    # Threads of the runtime may be in the middle of something, and nobody waits for them.
    os._exit(0)


def _end_with_pipe(pipe: IO[bytes]) -> None:
    pipe.read()
    os._exit(0)


#: The command that runs this module, without the interpreter.
COMMAND = ("-m", "rooftop.serve.hosts.engine_process")


if __name__ == "__main__":
    main()
