"""The process of an engine: it loads a model and steps, and has a link to the process that answers (``engine_child``).

The process that answers says

- ``submit``: a request, its prompt as int32 and the first mask of its constraint, if it has one;
- ``mask``: the tokens that its constraint allows next;
- ``cancel``, ``stats`` and ``check``: as the methods of an engine; ``stop``: end.

This one says ``progress`` while it loads, ``ready`` or ``failed`` once, ``tokens``, ``stats``, ``checked`` and, twice a
second, ``beat``.

The engine may have several processes, under ``jax.distributed``: this is the first one then. It says ``lost`` and ends
when it has lost another one, and ``end`` when another one is told to end.
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
from rooftop.core.garbage import settle
from rooftop.core.records import plain
from rooftop.runs.environment import join_processes, keep_compilations
from rooftop.runs.supervise import LOST_STATUS, drop_stdout
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.requests import Beat, GenerationRequest, Overloaded, Token
from rooftop.serve.hosts.link import Link, LinkLost, Message
from rooftop.serve.hosts.masks import RemoteMasks
from rooftop.serve.hosts.messages import sampling_of, token_fields
from rooftop.serve.hosts.parts import EnginePart, Lead
from rooftop.serve.hosts.processes import BEAT_S, end_with
from rooftop.serve.logs import start_logging
from rooftop.serve.request import ServeRequest, named_as_options, shrunk

if TYPE_CHECKING:
    from rooftop.serve.engine.engine import PagedEngine


#: Seconds for which an engine that starts again waits at a time for its other processes; JAX aborts after that.
_BACK_S = 60
#: Seconds after which a step is slow: beats then say more about it.
_SLOW_S = 2.0
#: Activity of a process that waits for them.
JOINING = "waiting for the other processes of the engine"


@dataclass(frozen=True, kw_only=True)
class EngineTask:
    """Task of an engine's process: what to serve, and the ``descriptor`` and the keys of its link.

    ``parent`` is the process that starts it, with which it ends. The engine has served before if it starts ``again``.
    """

    request: ServeRequest
    part: EnginePart
    configuration: Configuration
    folder: Path
    descriptor: int = -1
    parent: int = 0
    again: bool = False
    asks: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    answers: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)


class EngineProcess:
    """An engine over a link. ``build`` makes it, not yet started; it may raise RooftopError and Infeasible.

    With a ``lead`` it is the first process of several.
    """

    def __init__(
        self, link: Link, build: Callable[[Callable[[int, int], None]], PagedEngine], lead: Lead | None = None
    ) -> None:
        self._link, self._build, self._lead = link, build, lead
        if lead is not None:
            lead.on_lost, lead.stop = self._lost, lambda: link.send("end")
        self._engine: PagedEngine | None = None
        self._masks = dict[int, RemoteMasks]()
        self._prompt: tuple[int, ...] = ()
        #: The last step that was slow, and the collectives in which it can wait.
        self._slow = ("", "")
        #: Tokens to send, and an event for their thread.
        self._tokens, self._come = deque[Token](), threading.Event()

    def run(self) -> None:
        """Load, then serve until the other side says stop or is lost."""
        threading.Thread(target=self._beat, name="rooftop beat", daemon=True).start()
        try:
            engine = self._build(lambda done, total: self._link.send("progress", done=done, total=total))
            engine.start()
            if self._lead is not None:
                self._lead.started(engine)
        except _Away as error:
            self._lost(str(error), away=True)
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
        settle()
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
        if self._lead is not None:
            self._lead.end()

    def _lost(self, reason: str, *, away: bool = False) -> None:
        """Report the loss of another process and end: collectives with it never do. ``away``: it has not come back."""
        self._link.send("lost", reason=reason, away=away)
        self._link.finish()
        os._exit(LOST_STATUS)

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
        joins = self._lead is not None and not self._lead.joined
        beat = Beat(age_s=0.0, doing=JOINING if joins else "loading") if engine is None else engine.beat()
        parts = [beat.doing]
        if engine is not None and beat.age_s > _SLOW_S:
            parts += [self._waits_in(engine, beat.doing), "" if self._lead is None else self._lead.doing]
        self._link.send("beat", age_s=beat.age_s, doing="; ".join(filter(None, parts)))

    def _waits_in(self, engine: PagedEngine, doing: str) -> str:
        """The collectives in which a slow step can wait, once they are read: beats go on meanwhile."""
        step, line = self._slow
        if step != doing:
            self._slow = (doing, line := "")

            def read() -> None:
                # Whatever the runtime of a hung program raises: the step is named without them.
                with suppress(Exception):
                    self._slow = (doing, engine.waits())

            threading.Thread(target=read, name="rooftop collectives", daemon=True).start()
        return line and f"in {line}"


class _Away(Exception):
    """Processes of an engine that starts again have not come back yet."""


def load_engine(
    task: EngineTask, log: logging.Logger, on_progress: Callable[[int, int], None], lead: Lead | None = None
) -> PagedEngine:
    """The engine of a task, not yet started. Starts JAX. Raises RooftopError and Infeasible as ``load`` does."""
    request, configuration = task.request, task.configuration
    if lead is not None:
        try:
            patience_s = {"patience_s": _BACK_S} if task.again else {}
            join_processes(lead.coordinator, request.processes, request.process, **patience_s)
        except RooftopError as error:
            if task.again:
                raise _Away(error.accepted) from None
            raise
        lead.joined = True
    keep_compilations()
    import jax

    if request.shrink:
        configuration = shrunk(configuration, len(jax.devices()))
    with named_as_options():
        return task.part.engine(
            task.folder, configuration, draft=request.draft, lead=lead, on_progress=on_progress, log=log
        )


def main(load: Callable[[EngineTask, logging.Logger, Callable[[int, int], None]], Any] | None = None) -> NoReturn:
    """Run an engine for the process that started this one, until that ends. ``load`` replaces ``load_engine``."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Everything that is printed goes to stderr: stdout is the other process's.
    os.dup2(2, 1)
    task: EngineTask = pickle.load(sys.stdin.buffer)
    end_with(task.parent)
    threading.Thread(target=_end_with_pipe, args=(sys.stdin.buffer,), daemon=True).start()
    link = Link(socket.socket(fileno=task.descriptor), send_key=task.answers, receive_key=task.asks)
    log = start_logging(task.request.log_level, sys.stderr)
    coordinator, lead = task.request.coordinator, None
    if coordinator is not None:
        # Gloo logs its connections there.
        drop_stdout()
        lead = Lead(coordinator=coordinator, draft=task.request.draft, log=log)

    def build(on_progress: Callable[[int, int], None]) -> PagedEngine:
        engine: PagedEngine = (
            load_engine(task, log, on_progress, lead) if load is None else load(task, log, on_progress)
        )
        return engine

    # If the other process has ended, everyone who waits for a token has.
    with suppress(LinkLost):
        EngineProcess(link, build, lead).run()
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
