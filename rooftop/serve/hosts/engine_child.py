"""An engine in a process of its own, seen from the process that answers: texts and HTTP share no lock with its steps.

Two threads belong to it. One starts the process, hears it, and starts it again when it is lost; the other one watches
its heartbeat. A process that is silent, or whose step takes too long, is killed, and so counts as lost. Of the requests
of a lost process those that have sent nothing are submitted again, once; the others end with an error.

It may be the first of several processes of the engine. It then counts as lost with any of them, and waits for the
others when it starts again.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.records import read_record
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.admission import Admission
from rooftop.serve.engine.requests import Beat, Constraint, Deliver, EngineStats, GenerationRequest, Overloaded, Token
from rooftop.serve.hosts.engine_process import COMMAND, JOINING, EngineTask
from rooftop.serve.hosts.link import Buffer, Link, LinkLost, Message
from rooftop.serve.hosts.messages import sampling_fields, token_of
from rooftop.serve.hosts.processes import AWAY_S, LOADING_S, SILENT_S, STARVED_S, ended_by

#: Seconds between two looks at the heartbeat.
_LOOK_S = 0.5
#: Most losses in a row of processes that have served nothing.
_FRUITLESS = 3
#: Most losses of the process while it has a request that has sent nothing: the request may be the cause.
_LOSSES = 1
#: Seconds to wait for statistics, for a check of all pages, and for the process to end.
_STATS_S, _CHECK_S, _END_S = 2.0, 60.0, 15.0
#: Threads that compute masks; llguidance computes without the interpreter's lock.
_MASK_THREADS = 4


@dataclass(eq=False, slots=True, kw_only=True)
class _Open:
    """A request that has not ended: tokens that were delivered, and the process that has it by its number."""

    request: GenerationRequest
    deliver: Deliver
    tokens: int = 0
    losses: int = 0
    at: int = 0


class EngineChild:
    """A ``serve.engine.requests.ServingEngine`` that runs in a process of its own, which it starts.

    A step that takes longer than ``hang_s`` hangs. ``on_failed`` is called if the engine cannot be started again, and
    ``on_end`` if another process of the engine is told to end. ``others`` is what its other processes are started by.
    """

    def __init__(
        self,
        task: EngineTask,
        *,
        hang_s: float,
        log: logging.Logger,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
        on_failed: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
        others: str | None = None,
        command: Sequence[str] = COMMAND,
    ) -> None:
        self._task, self._hang_s, self._log = task, hang_s, log
        self._on_progress, self._on_failed, self._on_end, self._command = on_progress, on_failed, on_end, command
        self._others = others
        #: Since when other processes of the engine are away; None if they are not.
        self._away_s: float | None = None
        self._waits = ""
        #: Guards everything below.
        self._changed = threading.Condition()
        self._open = dict[int, _Open]()
        self._state = "new"
        self._link: Link | None = None
        self._process: subprocess.Popen[bytes] | None = None
        #: Number of the process, and True once it serves.
        self._number, self._ready = 0, False
        self._fruitless = self._restarts = 0
        self._error: Exception | None = None
        #: Why the engine cannot be started again; None if it can.
        self.failed: str | None = None
        self._verdict: str | None = None
        self._heard_s = time.monotonic()
        self._beat = Beat(age_s=0.0)
        self._asked = self._answered = 0
        self._problem: str | None = None
        self._stats: EngineStats | None = None
        self._ended_requests, self._began_s = 0, 0.0
        self._admission: Admission | None = None
        self._policy, self._max_queue, self._prefix_cache = task.configuration.policy, 0, False
        self.devices = ""
        self._outbox = SimpleQueue[tuple[str, int, bytes] | None]()
        self._masks = ThreadPoolExecutor(_MASK_THREADS, "rooftop masks")
        self._keeper = threading.Thread(target=self._keep, name="rooftop engine", daemon=True)
        self._sender = threading.Thread(target=self._send_all, name="rooftop requests", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="rooftop watchdog", daemon=True)

    @property
    def pid(self) -> int | None:
        """Process id of the engine; None while there is none."""
        process = self._process
        return None if process is None else process.pid

    @property
    def max_model_len(self) -> int:
        """See ``ServingEngine``."""
        assert self._admission is not None, "the engine has not started"
        return self._admission.max_model_len

    @property
    def policy(self) -> Policy:
        """See ``ServingEngine``."""
        return self._policy

    @property
    def prefix_cache(self) -> bool:
        """See ``ServingEngine``."""
        return self._prefix_cache

    def start(self) -> None:
        """Start the process, and return when it serves. Raises RooftopError and Infeasible as ``load`` does."""
        for thread in (self._keeper, self._sender, self._watcher):
            thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error is not None)
            if self._error is not None:
                self._state = "stopped"
                raise self._error
            self._state, self._began_s = "serving", time.monotonic()

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        """See ``ServingEngine``; while the process is started again, requests wait."""
        assert self._admission is not None, "the engine has not started"
        self._admission.check(request)
        with self._changed:
            if self._state != "serving":
                raise Overloaded(1.0)
            waiting = len(self._open) - self._policy.max_batch
            if waiting >= self._max_queue:
                rate = self._ended_requests / max(time.monotonic() - self._began_s, 1e-3)
                raise Overloaded(min(60.0, max(1.0, 1 / rate)) if rate else 1.0)
            if request.id in self._open:
                raise RooftopError("request id", request.id, "an id that no request in progress has")
            self._open[request.id] = _Open(request=request, deliver=deliver)
        self._queue(request)

    def cancel(self, id: int) -> None:
        """See ``ServingEngine``."""
        self._outbox.put(("cancel", id, b""))

    def drain(self, timeout_s: float) -> bool:
        """See ``ServingEngine``; the process ends."""
        with self._changed:
            if self._state in ("serving", "draining"):
                self._state = "draining"
            done = self._changed.wait_for(lambda: not self._open, timeout_s)
            left = list(self._open)
        for id in left:
            self.cancel(id)
        with self._changed:
            self._changed.wait_for(lambda: not self._open, SILENT_S)
        self._end_all("cancelled", None)
        with self._changed:
            self._state = "stopped"
            serves = self._ready
            self._changed.notify_all()
        if serves:
            self._outbox.put(("stop", 0, b""))
        else:
            # It loads, and would hear of the end only after that.
            self._kill(0.0)
        self._outbox.put(None)
        if self._keeper.ident is not None:
            self._keeper.join(_END_S)
        self._kill(0.0)
        return done

    def stats(self) -> EngineStats:
        """See ``ServingEngine``; those of the last answer if the process does not answer."""
        with self._changed:
            self._asked = number = self._asked + 1
        self._outbox.put(("stats", number, b""))
        with self._changed:
            self._changed.wait_for(lambda: self._answered >= number or not self._ready, _STATS_S)
            assert self._stats is not None, "the engine has not started"
            return replace(self._stats, waiting=max(0, len(self._open) - self._stats.running))

    def beat(self) -> Beat:
        """See ``ServingEngine``; a silent process is one whose loop does not turn."""
        with self._changed:
            beat, ready, silent_s = self._beat, self._ready, time.monotonic() - self._heard_s
            restarts, failed = self._restarts, self.failed
        if failed is not None:
            return Beat(age_s=silent_s, doing=failed, restarts=restarts)
        if not ready:
            return Beat(age_s=0.0, doing=self._waits or beat.doing, restarting=True, restarts=restarts)
        late = silent_s > STARVED_S
        age_s = beat.age_s + silent_s if beat.age_s or late else 0.0
        return Beat(age_s=age_s, doing=beat.doing, restarts=restarts)

    def check(self) -> None:
        """See ``ServingEngine``."""
        with self._changed:
            self._asked = number = self._asked + 1
        self._outbox.put(("check", number, b""))
        with self._changed:
            self._changed.wait_for(lambda: self._answered >= number or not self._ready, _CHECK_S)
            assert self._problem is None, self._problem

    def _queue(self, request: GenerationRequest) -> None:
        """Queue a request to be sent, with the first mask of its constraint."""
        constraint = request.sampling.constraint
        if constraint is None:
            self._outbox.put(("submit", request.id, b""))
        else:
            self._masks.submit(self._compute, "submit", request.id, constraint)

    def _compute(self, kind: str, id: int, constraint: Constraint) -> None:
        """Compute the next mask of a request, and queue it."""
        try:
            self._outbox.put((kind, id, constraint.mask().tobytes()))
        except Exception as error:
            self._end(id, Token(id=id, token=None, finish="error", message=f"{type(error).__name__}: {error}"))
            self.cancel(id)

    # The thread that sends.

    def _send_all(self) -> None:
        prompt: object = None
        at = 0
        while (item := self._outbox.get()) is not None:
            kind, id, payload = item
            with self._changed:
                link, number = self._link if self._ready else None, self._number
                open_ = self._open.get(id)
            if link is None:
                # What is open is queued again when the next process is ready.
                if kind == "cancel":
                    self._end(id, Token(id=id, token=None, finish="cancelled"))
                continue
            if kind == "submit":
                if open_ is None or open_.at == number:
                    continue
                open_.at = number
                request = open_.request
                # Choices of a request share its prompt.
                shared = request.prompt is prompt and at == number
                prompt, at = request.prompt, number
                parts: list[Buffer] = [] if shared else [np.asarray(request.prompt, np.int32).tobytes()]
                parts += [payload] if payload else []
                link.send(
                    "submit",
                    payload=_parts(parts),
                    id=id,
                    prompt_tokens=0 if shared else len(request.prompt),
                    constrained=request.sampling.constraint is not None,
                    sampling=sampling_fields(request.sampling),
                    arrival_s=request.arrival_s,
                )
            elif kind == "mask":
                if open_ is not None and open_.at == number:
                    link.send("mask", payload=_parts([payload]), id=id)
            elif kind == "cancel":
                if open_ is not None and open_.at != number:
                    self._end(id, Token(id=id, token=None, finish="cancelled"))
                elif open_ is not None:
                    link.send("cancel", id=id)
            else:
                link.send(kind, number=id)

    # The thread that keeps the process.

    def _keep(self) -> None:
        """Start the process and hear it; again when it is lost."""
        while True:
            try:
                link = self._begin()
                reason = self._hear(link)
            except OSError as error:
                reason = f"its process cannot be started: {error.strerror or error}"
            status = self._kill()
            with self._changed:
                self._ready, self._link = False, None
                if self._number and self._beat.doing == JOINING:
                    self._away_s = self._away_s or time.monotonic()
                    self._verdict = self._verdict or "not all of them have come back"
                reason = self._verdict or f"{reason}{status}"
                self._verdict = None
                self._changed.notify_all()
                if self._state == "stopped":
                    return
                if self._state == "new":
                    self._error = self._error or Infeasible("the engine ended before it was ready", reason)
                    self._changed.notify_all()
                    return
            if self._away_s is not None and self._error is None:
                self._say_away(reason)
                if time.monotonic() - self._away_s < AWAY_S:
                    continue
                self._error = Infeasible("the engine", f"{reason}, for {AWAY_S:.0f} s")
            self._lost(reason)
            if self._error is not None or self._fruitless > _FRUITLESS:
                self._give_up(reason if self._error is None else str(self._error))
                return

    def _begin(self) -> Link:
        """Start a process, and return the link to it."""
        ours, theirs = socket.socketpair()
        task = replace(
            self._task,
            descriptor=theirs.fileno(),
            parent=os.getpid(),
            again=self._number > 0,
            asks=secrets.token_bytes(32),
            answers=secrets.token_bytes(32),
        )
        with theirs:
            process = subprocess.Popen(
                [sys.executable, *self._command],
                stdin=subprocess.PIPE,
                # Ctrl-C is for us: we finish what is running, and need it for that.
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        with self._changed:
            self._process, self._heard_s = process, time.monotonic()
            self._beat = Beat(age_s=0.0, doing="loading")
            stopped = self._state == "stopped"
        if stopped:
            self._kill(0.0)
        assert process.stdin is not None
        # If it has ended already, the link says so.
        with suppress(OSError, ValueError):
            pickle.dump(task, process.stdin)
            process.stdin.flush()
        link = Link(ours, send_key=task.asks, receive_key=task.answers)
        with self._changed:
            self._link = link
        return link

    def _hear(self, link: Link) -> str:
        """Hear the process until it is lost. Return the reason."""
        try:
            while True:
                message = link.receive()
                self._heard_s = time.monotonic()
                self._heard(message)
        except LinkLost as lost:
            return str(lost)
        finally:
            link.discard()

    def _heard(self, message: Message) -> None:
        fields = message.fields
        match message.kind:
            case "tokens":
                for item in fields["tokens"]:
                    self._came(token_of(item, item[0]))
            case "beat":
                self._beat = Beat(age_s=fields["age_s"], doing=fields["doing"])
            case "stats" | "checked":
                with self._changed:
                    if message.kind == "stats":
                        self._stats = read_record(EngineStats, fields["stats"], "stats")
                    else:
                        self._problem = fields["problem"]
                    self._answered = max(self._answered, fields["number"])
                    self._changed.notify_all()
            case "lost":
                with self._changed:
                    self._verdict = self._verdict or fields["reason"]
                    if fields["away"]:
                        self._away_s = self._away_s or time.monotonic()
            case "end":
                self._on_end()
            case "progress":
                self._on_progress(fields["done"], fields["total"])
            case "ready":
                self._serves(fields)
            case "failed":
                if "what" in fields:
                    self._error = Infeasible(fields["what"], fields["by"])
                else:
                    self._error = RooftopError(fields["field"], fields["given"], fields["accepted"])

    def _serves(self, fields: Any) -> None:
        """Note what the process serves, and send it what is open."""
        with self._changed:
            self._admission = Admission(**fields["admission"])
            self._policy, self._max_queue = Policy(**fields["policy"]), fields["max_queue"]
            self._prefix_cache, self.devices = fields["prefix_cache"], fields["devices"]
            self._stats = read_record(EngineStats, fields["stats"], "stats")
            self._number += 1
            self._ready, self._away_s, self._waits = True, None, ""
            left = [entry.request for entry in self._open.values()]
            self._changed.notify_all()
        if self._number > 1:
            again = {"engine_pid": self.pid, "requests": len(left)}
            self._log.info("the engine serves again", extra={"fields": again})
        for request in left:
            self._queue(request)

    def _came(self, token: Token) -> None:
        """Deliver a token; a constrained request first accepts it, and then gets its next mask."""
        entry = self._open.get(token.id)
        if entry is None:
            return
        constraint = entry.request.sampling.constraint
        if token.token is not None:
            entry.tokens += 1
            self._fruitless = 0
        if constraint is None or token.token is None or token.finish == "stop":
            self._end(token.id, token) if token.finish is not None else _deliver(entry, token)
        else:
            self._masks.submit(self._accept, entry, token, constraint)

    def _accept(self, entry: _Open, token: Token, constraint: Constraint) -> None:
        try:
            constraint.accept(token.token if token.token is not None else 0)
        finally:
            self._end(token.id, token) if token.finish is not None else _deliver(entry, token)
        if token.finish is None:
            self._compute("mask", token.id, constraint)

    def _end(self, id: int, token: Token) -> None:
        """Deliver the last ``token`` of a request, if it is open."""
        with self._changed:
            entry = self._open.pop(id, None)
            self._ended_requests += entry is not None
            self._changed.notify_all()
        if entry is not None:
            _deliver(entry, token)

    def _end_all(self, finish: str, message: str | None) -> None:
        for id in list(self._open):
            kind: Any = finish
            self._end(id, Token(id=id, token=None, finish=kind, message=message))

    def _lost(self, reason: str) -> None:
        """Take back the requests of a lost process."""
        failed = 0
        for id, entry in list(self._open.items()):
            # One that it did not have yet was not its cause.
            entry.losses += entry.at == self._number
            if entry.tokens or entry.losses > _LOSSES:
                failed += 1
                self._end(id, Token(id=id, token=None, finish="error", message=f"the engine was lost: {reason}"))
        self._fruitless += 1
        self._restarts += 1
        fields = {"failed": failed, "again": len(self._open), "doing": self._beat.doing}
        self._log.error(f"the engine is lost: {reason}; it is started again", extra={"fields": fields})

    def _say_away(self, reason: str) -> None:
        """Say that the engine waits for others, which are not started here, and by which command they come back."""
        self._waits = f"{JOINING}: {reason}"
        fields = {} if self._others is None else {"run": self._others}
        self._log.warning(f"the engine waits for its other processes: {reason}", extra={"fields": fields})

    def _give_up(self, reason: str) -> None:
        with self._changed:
            self.failed = f"the engine was lost {self._fruitless} times before it served anything: {reason}"
            self._state = "stopped"
        self._log.error(self.failed)
        self._end_all("error", self.failed)
        self._on_failed()

    def _kill(self, wait_s: float = 1.0) -> str:
        """End the process. Return how it had ended, if it had by itself or does within ``wait_s``."""
        with self._changed:
            process, self._process = self._process, None
        if process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            # The link ends a little before the process.
            process.wait(wait_s)
        status = process.poll()
        process.kill()
        process.wait()
        if process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        if status is None or status == 0:
            return ""
        return f" (it ended with {ended_by(status)})"

    # The thread that watches.

    def _watch(self) -> None:
        """Kill a process that is silent, or whose step takes too long."""
        looked_s = time.monotonic()
        while True:
            time.sleep(_LOOK_S)
            now_s = time.monotonic()
            with self._changed:
                if self._state == "stopped" or self._error is not None:
                    return
                if now_s - looked_s > STARVED_S:
                    # This process was stopped, or had no core: what the other one said is yet to be heard.
                    self._heard_s = now_s
                looked_s = now_s
                process, beat, silent_s = self._process, self._beat, now_s - self._heard_s
                if process is None or self._verdict is not None:
                    continue
                if silent_s > (SILENT_S if self._ready else LOADING_S):
                    verdict = f"it has not answered for {silent_s:.0f} s; it was {beat.doing or 'waiting'}"
                elif self._ready and beat.age_s > self._hang_s:
                    verdict = f"its step has taken {beat.age_s + silent_s:.0f} s; it was {beat.doing}"
                else:
                    continue
                self._verdict = verdict
            process.kill()


def _deliver(entry: _Open, token: Token) -> None:
    # A client that has left needs no token.
    with suppress(Exception):
        entry.deliver(token)


def _parts(parts: list[Buffer]) -> Callable[[], list[Buffer]] | None:
    """The payload of a message, None if there is none."""
    return (lambda: parts) if parts else None
