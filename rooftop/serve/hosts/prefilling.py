"""An engine that prefills, and hands what it has prefilled over to another process to be generated.

A request is in the hands of one process at a time. While the other one has it (it has a ticket), its tokens are
delivered by the thread that hears the link, whatever step is under way here. When the other process is lost, its
requests are prefilled again, with the tokens that they have: seeds and positions decide what is drawn, so that nothing
changes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.records import read_record
from rooftop.scheduling.serving.cache import CachedSequence
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.counters import Handovers
from rooftop.serve.engine.engine import PagedEngine
from rooftop.serve.engine.loading import parts
from rooftop.serve.engine.replica import Replica
from rooftop.serve.engine.requests import Beat, EngineStats, Token
from rooftop.serve.engine.running import Running
from rooftop.serve.hosts.handover import (
    GeneratorReport,
    begin_anew,
    ended,
    offered,
    send_pages,
    shared_facts,
    summed,
)
from rooftop.serve.hosts.link import Link, LinkLost, Message
from rooftop.serve.hosts.messages import token_of
from rooftop.serve.hosts.processes import SILENT_S, STARVED_S, Other

#: Most losses of the generating process while it has a request: the request may be the cause.
_LOSSES = 8
#: Seconds between two looks at the other process.
_LOOK_S = 0.5
#: Seconds to wait for the other process to count its pages.
_PATIENCE_S = 60.0


class PrefillEngine(PagedEngine):
    """A ``serve.engine.requests.ServingEngine`` for which ``other`` generates; both share the ``facts``.

    ``on_link`` is called when the link is made or lost, with the reason.
    """

    def __init__(
        self,
        replica: Replica,
        configuration: Configuration,
        other: Other,
        *,
        facts: Mapping[str, Any],
        max_model_len: int,
        stops: frozenset[int] = frozenset(),
        on_progress: Callable[[int, int], None] | None = None,
        on_link: Callable[[str], None] = lambda event: None,
    ) -> None:
        #: Guards ``_away`` and ``_link``, and so the owner of each request.
        self._lock = threading.RLock()
        #: Requests of the other process, by ticket.
        self._away = dict[int, Running]()
        self._tickets = count(1)
        self._link: Link | None = None
        self._away_tokens = 0
        self._handovers = Handovers()
        super().__init__([replica], configuration, max_model_len=max_model_len, stops=stops, on_progress=on_progress)
        self.facts, self._other, self._on_link = dict(facts), other, on_link
        self._past = list[EngineStats]()
        self._report: GeneratorReport | None = None
        self._checked = self._asked = 0  # The check that was answered last, and that was asked for last.
        self._heard = threading.Condition(self._lock)
        self._closing = False
        self._error: Exception | None = None
        #: When the other process was heard last, its heartbeat, and the seconds after which its step hangs.
        self._heard_s, self._other_beat, self.step_s = 0.0, Beat(age_s=0.0), math.inf
        self._listener = threading.Thread(target=self._follow, name="rooftop link", daemon=True)
        self._watcher = threading.Thread(target=self._watch, name="rooftop watchdog", daemon=True)

    def start(self) -> None:
        """Compile everything in both processes and begin to serve.

        Raises RooftopError or Infeasible where there is no process that generates, or none of the same model.
        """
        self._other.begin()
        try:
            super().start()
            self._listener.start()
            self._watcher.start()
            with self._heard:
                self._heard.wait_for(lambda: self._link is not None or self._error is not None)
            if isinstance(self._error, LinkLost):
                raise Infeasible("no process generates", str(self._error))
            if self._error is not None:
                raise self._error
        except BaseException:
            self.drain(0.0)
            raise

    def drain(self, timeout_s: float) -> bool:
        """See ``rooftop.serve.engine.requests.ServingEngine``; the link ends, and a process that was started for it."""
        done = super().drain(timeout_s)
        self._ask_for_report()
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        with self._lock:
            if self._link is not None:
                self._link.close()
        self._other.close()
        if self._listener.ident is not None:
            self._listener.join()
        return done

    def stats(self) -> EngineStats:
        """Statistics of both processes together."""
        figures = super().stats()
        with self._lock:
            others = [*self._past, *([] if self._report is None else [self._report.stats])]
            away = self._away_tokens
        result = summed([figures, *others])
        with self._wake:
            open_ = len(self._open)
        return replace(
            result,
            tokens=result.tokens + away,
            waiting=max(0, open_ - result.running),
            handovers=self._handovers.count,
            handover_s=self._handovers.seconds,
        )

    def check(self) -> None:
        """See ``rooftop.serve.engine.requests.ServingEngine``; in both processes."""
        super().check()
        self._ask_for_report()
        with self._lock:
            assert self._report is None or self._report.problem is None, self._report.problem

    def _ask_for_report(self) -> None:
        """Ask for a report with checked pages. Return when it has arrived, or the link is lost."""
        with self._heard:
            link = self._link
            if link is None:
                return
            self._asked = number = self._asked + 1
            link.send("check", number=number)
            self._heard.wait_for(lambda: self._checked >= number or self._link is not link, _PATIENCE_S)

    # Called by the engine's thread.

    def _advance(self) -> bool:
        for sequence in list(self._servers[0].scheduler.to_send):
            running = self._running.get(sequence.id)
            if running is not None and running.sequence is sequence and running.ticket is None:
                self._offer(running)
        return super()._advance()

    def _offer(self, running: Running) -> None:
        constraint, payload = running.request.sampling.constraint, None
        if constraint is not None:
            if not constraint.ready():
                constraint.when_ready(self.wake)
                return
            payload = partial(list[bytes], [constraint.mask().tobytes()])
        with self._lock:
            link = self._link
            if link is None:
                return
            running.ticket = next(self._tickets)
            self._away[running.ticket] = running
        fields = offered(running) | {"constrained": constraint is not None}
        link.send("offer", payload=payload, ticket=running.ticket, **fields)

    def _send_pages(self, link: Link, ticket: int, indices: list[int]) -> None:
        with self._lock:
            running = self._away.get(ticket)
        pages = None if running is None else self._servers[0].scheduler.to_send.get(running.sequence)
        if pages is None:
            return
        send_pages(link, ticket, self.replicas[0], pages, indices)

    def _sent(self, sequence: CachedSequence) -> None:
        scheduler = self._servers[0].scheduler
        if sequence in scheduler.to_send:
            scheduler.sent(sequence)

    def _again(self, running: Running) -> None:
        """Prefill a request that has lost its KV."""
        if self._running.get(running.request.id) is not running:
            return
        begin_anew(running)
        self._servers[0].scheduler.submit(running.sequence, first=True)

    def _recover(self, left: list[Running], reason: str) -> None:
        """Take back the requests of the other process after the link is lost."""
        # Each is queued first, so the first one must come last.
        for running in reversed(left):
            if self._running.get(running.request.id) is not running:
                continue
            running.losses += 1
            if running.losses > _LOSSES:
                message = f"the process that generates was lost {running.losses} times: {reason}"
                self._end(running.request.id, Token(id=running.request.id, token=None, finish="error", message=message))
            elif running.sequence in self._servers[0].scheduler.to_send:
                running.ticket = None
            else:
                self._again(running)

    def _abandon(self, reason: str, done: threading.Event) -> None:
        """End all requests with an error: there is no other process."""
        message = f"no process generates: {reason}"
        for id in list(self._running):
            self._end(id, Token(id=id, token=None, finish="error", message=message))
        done.set()

    def _end(self, id: int, token: Token) -> None:
        with self._lock:
            running = self._running.get(id)
            if running is None or running.ticket is None:
                super()._end(id, token)
                return
            self._withdraw(running)
            if running.sequence in self._servers[0].scheduler.to_send:
                self._servers[0].scheduler.finish(running.sequence)
            self._deliver(running, token)

    def _fail(self, error: Exception) -> None:
        with self._lock:
            for running in list(self._away.values()):
                if self._link is not None:
                    self._link.send("cancel", ticket=running.ticket)
            self._away.clear()
            super()._fail(error)

    # Called by the link's thread.

    def _follow(self) -> None:
        """Connect, handle messages, and connect again after a loss."""
        while not self._closing:
            try:
                link, hello = self._connected()
            except (LinkLost, RooftopError, Infeasible) as error:
                if self._closing:
                    return
                if self._report is None and not self._past:
                    with self._heard:
                        self._error = error
                        self._heard.notify_all()
                    return
                self._without(str(error))
                continue
            with self._heard:
                if self._closing:
                    link.discard()
                    return
                self._heard_s = time.monotonic()
                self._link, self._report = link, read_record(GeneratorReport, hello.fields["report"], "report")
                self.max_model_len = min(self.max_model_len, hello.fields["max_model_len"])
                self._heard.notify_all()
            self._on_link("linked")
            # Wake the engine: it offers requests that wait.
            self._ask(lambda: None)
            reason = self._hear(link)
            with self._heard:
                left = list(self._away.values())
                self._away.clear()
                self._handovers.lost()
                self._link = None
                if not self._closing and self._report is not None:
                    self._past.append(ended(self._report.stats))
                    self._report = None
                self._heard.notify_all()
            link.discard()
            if not self._closing:
                self._on_link(f"lost: {reason}")
            self._ask(partial(self._recover, left, reason))

    def _watch(self) -> None:
        """End a link whose other side is silent or hangs in a step: its requests are prefilled again."""
        looked_s = time.monotonic()
        while not self._closing:
            time.sleep(_LOOK_S)
            now_s = time.monotonic()
            if now_s - looked_s > STARVED_S:
                # This process was stopped, or had no core: what the other one said is yet to be heard.
                self._heard_s = now_s
            looked_s = now_s
            link, beat, silent_s = self._link, self._other_beat, now_s - self._heard_s
            if link is None or not link.open:
                continue
            if silent_s > SILENT_S:
                reason = f"it has not answered for {silent_s:.0f} s; it was {beat.doing or 'waiting'}"
            elif beat.age_s > self.step_s:
                reason = f"its step has taken {beat.age_s:.0f} s; it was {beat.doing}"
            else:
                continue
            self._other_beat = Beat(age_s=0.0)
            link.close(reason)
            self._other.suspect()

    def _connected(self) -> tuple[Link, Message]:
        link = self._other.connect()
        try:
            hello = link.receive()
            for name, ours in self.facts.items():
                theirs = hello.fields["facts"].get(name)
                if theirs != ours:
                    raise RooftopError(f"{name} of the process that generates", theirs, f"{ours}, as here")
        except BaseException:
            link.discard()
            raise
        return link, hello

    def _without(self, reason: str) -> None:
        """End all requests with an error, and wait for the next one before another attempt."""
        self._on_link(f"not linked: {reason}")
        done = threading.Event()
        self._ask(partial(self._abandon, reason, done))
        while not done.wait(0.1) and self._thread.is_alive():
            pass
        with self._wake:
            self._wake.wait_for(lambda: self._open or self._closing)

    def _hear(self, link: Link) -> str:
        """Serve until the link is lost. Return the reason."""
        try:
            while True:
                message = link.receive()
                self._heard_s = time.monotonic()
                fields = message.fields
                if message.kind == "beat":
                    self._other_beat = Beat(age_s=fields["age_s"], doing=fields["doing"])
                elif message.kind == "tokens":
                    for field in fields["tokens"]:
                        self._came(link, field)
                elif message.kind == "wanted":
                    self._handovers.wanted(fields["ticket"])
                    self._ask(partial(self._send_pages, link, fields["ticket"], fields["pieces"]))
                elif message.kind == "report":
                    with self._heard:
                        self._report = read_record(GeneratorReport, fields, "report")
                        self._checked = max(self._checked, fields["number"])
                        self._heard.notify_all()
                elif message.kind == "failed":
                    self._all_failed(fields["message"])
                else:
                    with self._lock:
                        running = self._away.get(fields["ticket"])
                        if running is not None and message.kind == "arrived":
                            self._handovers.arrived(fields["ticket"])
                            self._ask(partial(self._sent, running.sequence))
                        elif running is not None and message.kind == "lost":
                            del self._away[fields["ticket"]]
                            self._ask(partial(self._again, running))
        except LinkLost as error:
            return str(error)
        except Exception as error:  # what came is not what a process that generates says
            link.close()
            return f"{type(error).__name__}: {error}"

    def _came(self, link: Link, fields: list[Any]) -> None:
        """Deliver a token of a request that the other process has."""
        with self._lock:
            running = self._away.get(fields[0])
            if running is None or running.ticket is None:
                return
            id, constraint = running.request.id, running.request.sampling.constraint
            token = token_of(fields, id)
            assert token.token is not None
            running.tokens.append(token.token)
            self._away_tokens += 1
            if token.finish is not None:
                del self._away[running.ticket]
                del self._running[id]
            ticket = running.ticket
            if constraint is not None and token.finish is None:
                try:
                    constraint.accept(token.token)
                except Exception as error:
                    token = Token(id=id, token=None, finish="error", message=f"{type(error).__name__}: {error}")
                    self._withdraw(running)
            if not self._deliver(running, token) and token.finish is None:
                self._withdraw(running)
                self._deliver(running, Token(id=id, token=None, finish="cancelled"))
            elif constraint is not None and token.finish is None:
                # Another process may compute the mask: this thread hears other requests meanwhile.
                constraint.when_ready(partial(self._send_mask, link, ticket, running))

    def _send_mask(self, link: Link, ticket: int, running: Running) -> None:
        """Send the next mask of a request that the other process has."""
        constraint = running.request.sampling.constraint
        assert constraint is not None
        try:
            mask = constraint.mask().tobytes()
        except Exception as error:
            id, message = running.request.id, f"{type(error).__name__}: {error}"
            with self._lock:
                self._withdraw(running)
                self._deliver(running, Token(id=id, token=None, finish="error", message=message))
            return
        with self._lock:
            if running.ticket == ticket and self._away.get(ticket) is running:
                link.send("mask", payload=partial(list[bytes], [mask]), ticket=ticket)

    def _all_failed(self, message: str) -> None:
        """End every request of the other process with an error: one of its steps has failed."""
        with self._lock:
            for running in list(self._away.values()):
                self._withdraw(running)
                self._ask(partial(self._sent, running.sequence))
                self._deliver(running, Token(id=running.request.id, token=None, finish="error", message=message))

    def _withdraw(self, running: Running) -> None:
        """Cancel a request at the other process. The lock is held."""
        self._running.pop(running.request.id, None)
        if running.ticket is not None and self._away.pop(running.ticket, None) is not None and self._link is not None:
            self._handovers.dropped(running.ticket)
            self._link.send("cancel", ticket=running.ticket)


def load_prefill(
    checkpoint: Path,
    configuration: Configuration,
    other: Other,
    *,
    options: Mapping[str, Any] | None = None,
    replica: Callable[..., Replica] = Replica,
    on_progress: Callable[[int, int], None] | None = None,
    on_link: Callable[[str], None] = lambda event: None,
) -> PrefillEngine:
    """An engine, not yet started, that prefills here (role 'prefill') while ``other`` generates.

    With a kind of ``replica``, as the first of several processes (``together``). Raises as ``load`` does.
    """
    loaded = parts(checkpoint, configuration, None, None, options, replica)
    return PrefillEngine(
        loaded.replicas[0],
        configuration,
        other,
        facts=shared_facts(checkpoint, loaded.replicas[0], configuration),
        max_model_len=loaded.max_model_len,
        stops=loaded.stops,
        on_progress=on_progress,
        on_link=on_link,
    )
