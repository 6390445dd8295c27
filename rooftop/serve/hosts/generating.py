"""The process that generates what another one has prefilled: a step loop between two ends of a link.

It serves one link at a time. When that ends, what it had is dropped: the other side prefills it again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.counters import Counters, stats_of
from rooftop.serve.engine.programs import COPIED, Compilations
from rooftop.serve.engine.replica import Replica
from rooftop.serve.engine.running import Running
from rooftop.serve.engine.schedulers import check_scheduler, scheduler_of
from rooftop.serve.engine.steps import EngineServer
from rooftop.serve.hosts.handover import GeneratorReport, page_arrays, pieces, taken, token_fields
from rooftop.serve.hosts.link import Link, LinkLost, Message, accept

#: Damaged pieces after which a link is given up.
_REFUSALS = 8
#: Seconds between reports while there is work.
_REPORT_S = 1.0


class _Masks:
    """A constraint whose owner is the other process: its masks come one for each token."""

    def __init__(self) -> None:
        self._come = SimpleQueue[npt.NDArray[np.uint32] | None]()
        self._words = 0

    def came(self, payload: bytearray) -> None:
        """The next mask."""
        mask = np.frombuffer(bytes(payload), np.uint32)
        self._words = len(mask)
        self._come.put(mask)

    def release(self) -> None:
        """No more will come, for no one wants the tokens: whatever is drawn is good."""
        self._come.put(np.full(self._words, 2**32 - 1, np.uint32))

    def end(self) -> None:
        """No more will come, for the link is lost."""
        self._come.put(None)

    def mask(self) -> npt.NDArray[np.uint32]:
        """See ``rooftop.serve.engine.requests.Constraint``; waits for the other process."""
        mask = self._come.get()
        if mask is None:
            raise LinkLost("the link is lost")
        return mask

    def accept(self, token: int) -> None:
        """The other process sees the token, and accepts it."""


class Generator:
    """Generates with a replica what comes over a link. ``facts`` say what both sides must have in common."""

    def __init__(
        self,
        replica: Replica,
        configuration: Configuration,
        *,
        longest: int,
        facts: Mapping[str, Any],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.replica, self.configuration, self.longest = replica, configuration, longest
        self._facts, self._on_progress = facts, on_progress
        self._counters, self._compilations = Counters(), Compilations()
        self._programs = 0
        #: The last link, for those who end it.
        self._linked: Link | None = None
        self._stopped = False

    def start(self) -> None:
        """Compile everything."""
        self._programs = self.replica.compile(self._on_progress, role="generate")

    def stop(self, listening: socket.socket) -> None:
        """Have ``serve`` return, behind the step under way. From any thread, or a signal's handler."""
        self._stopped = True
        # No one may have listened yet.
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        if self._linked is not None:
            self._linked.close("stopped")

    def serve(self, listening: socket.socket, key: str, on_link: Callable[[str], None]) -> None:
        """Serve those who connect and know ``key``, one after the other; ``on_link`` hears of each change.

        Returns after ``stop``, or when ``listening`` is shut down.
        """
        self._compilations.watch()
        while not self._stopped:
            try:
                link = accept(listening, key)
            except LinkLost as error:
                on_link(f"refused: {error}")
                continue
            except OSError:
                break
            on_link("linked")
            on_link(f"lost: {self._follow(link)}")
        self._compilations.stop()

    def _follow(self, link: Link) -> str:
        """Until the link is lost; why it was."""
        self._link = self._linked = link
        if self._stopped:
            link.close("stopped")
        self._running = dict[int, Running]()
        #: Of requests whose KV is on its way, the pieces that are not here.
        self._missing = dict[int, set[int]]()
        self._constraints = dict[int, _Masks]()
        self._inbox = SimpleQueue[Message | LinkLost]()
        self._refusals = 0
        self._reset()
        reader = threading.Thread(target=self._read, name="rooftop link reader", daemon=True)
        reader.start()
        try:
            link.send("serving", facts=dict(self._facts), longest=self.longest, report=self._report().fields())
            self._work()
        except LinkLost as error:
            return str(error)
        finally:
            link.close()
            reader.join()
            link.discard()

    def _read(self) -> None:
        """Everything that comes, at once: the other side never waits for a step here."""
        while True:
            try:
                message = self._link.receive()
                ticket = message.fields.get("ticket", 0)
                if message.kind == "offer" and message.fields["constrained"]:
                    self._constraints[ticket] = _Masks()
                if message.kind in ("offer", "mask") and ticket in self._constraints:
                    if not message.payload:
                        self._link.close("a mask came damaged")
                        raise LinkLost("a mask came damaged")
                    self._constraints[ticket].came(message.payload)
                elif message.kind == "cancel" and ticket in self._constraints:
                    self._constraints[ticket].release()
                if message.kind != "mask":
                    self._inbox.put(message)
            except LinkLost as error:
                self._inbox.put(error)
                for constraint in list(self._constraints.values()):
                    constraint.end()
                return

    def _work(self) -> NoReturn:
        """Step as long as there is something to step. Raises LinkLost."""
        busy, reported_s = False, time.monotonic()
        while True:
            if not busy or time.monotonic() - reported_s > _REPORT_S:
                self._link.send("report", number=0, **self._report().fields())
                reported_s = time.monotonic()
            wait = not busy
            while True:
                try:
                    message = self._inbox.get(block=wait)
                except Empty:
                    break
                if isinstance(message, LinkLost):
                    raise message
                self._heard(message)
                wait = False
            try:
                busy = self._advance()
            except LinkLost:
                raise
            except Exception as error:  # a step has failed, and with it every request here
                self._reset()
                self.replica.allocate()
                self._link.send("failed", message=f"{type(error).__name__}: {error}".splitlines()[0])

    def _heard(self, message: Message) -> None:
        fields = message.fields
        if message.kind == "offer":
            ticket = fields["ticket"]
            running = taken(ticket, fields, self.configuration.page_tokens, self._constraints.get(ticket))
            self._running[ticket] = running
            self._server.scheduler.submit(running.sequence)
        elif message.kind == "pages":
            self._put(fields["ticket"], fields["piece"], message.payload)
        elif message.kind == "cancel":
            running_ = self._running.get(fields["ticket"])
            if running_ is not None:
                self._end(running_)
        elif message.kind == "check":
            self._link.send("report", number=fields["number"], **self._report(checked=True).fields())

    def _advance(self) -> bool:
        """One step; whether there was anything to do."""
        begun = time.perf_counter()
        for sequence in self._server.scheduler.receive():
            self._missing[sequence.id] = set(range(pieces(len(sequence.pages))))
            self._link.send("wanted", ticket=sequence.id, pieces=sorted(self._missing[sequence.id]))
        sent = self._server.send()
        if sent is None:
            return False
        tokens = list[list[Any]]()
        for running, token in self._server.collect(sent):
            tokens.append(token_fields(token))
            if token.finish is not None:
                self._end(running)
        if tokens:
            self._link.send("tokens", tokens=tokens)
        for sequence in sent.step.preempted:
            if not sequence.host_pages and self._running.pop(sequence.id, None) is not None:
                self._constraints.pop(sequence.id, None)
                self._link.send("lost", ticket=sequence.id)
        self._counters.stepped()
        self._counters.step_s += time.perf_counter() - begun
        return True

    def _put(self, ticket: int, piece: int, payload: bytearray | None) -> None:
        """A piece of KV is here, or has to come again."""
        missing = self._missing.get(ticket)
        if missing is None or piece not in missing:
            return
        sequence = self._running[ticket].sequence
        pages = np.array(sequence.pages[piece * COPIED : (piece + 1) * COPIED], np.int32)
        arrays = None if payload is None else page_arrays(self.replica, payload, len(pages))
        if arrays is None:
            self._refusals += 1
            if self._refusals > _REFUSALS:
                self._link.close(f"{self._refusals} pieces of KV came damaged")
                raise LinkLost(f"{self._refusals} pieces of KV came damaged")
            self._link.send("wanted", ticket=ticket, pieces=[piece])
            return
        self.replica.put(pages, arrays)
        missing.discard(piece)
        if not missing:
            del self._missing[ticket]
            self._link.send("arrived", ticket=ticket)
            self._server.arrived(sequence)

    def _end(self, running: Running) -> None:
        ticket = running.request.id
        del self._running[ticket]
        self._missing.pop(ticket, None)
        self._constraints.pop(ticket, None)
        self._server.scheduler.finish(running.sequence)
        self._server.leave(running)

    @property
    def pages(self) -> int:
        """Of its cache, as many as sequences can have: each group has one more, for padding."""
        return self.replica.pages + 1 - self.replica.decoder.groups.ways

    def _reset(self) -> None:
        """A scheduler that knows of no request, and a cache that holds nothing."""
        configuration = self.configuration
        for ticket in self._running:
            self._constraints.pop(ticket, None)
        self._running.clear()
        self._missing.clear()
        scheduler = scheduler_of(configuration, self.replica, "generate")
        self._server = EngineServer(scheduler, self.replica, self._running, self._counters)

    def _report(self, *, checked: bool = False) -> GeneratorReport:
        """Return the current report; ``checked`` also counts the pages."""
        scheduler, counters, problem = self._server.scheduler, self._counters, None
        if checked:
            try:
                check_scheduler(scheduler, [running.sequence for running in self._running.values()])
            except AssertionError as error:
                problem = f"where it generates, {error}"
        stats = stats_of(
            [scheduler],
            counters,
            page_tokens=self.configuration.page_tokens,
            programs=self._programs,
            compilations=self._compilations.count,
        )
        # Requests and their tokens are counted where they are delivered.
        stats = replace(stats, waiting=len(self._running) - stats.running, tokens=0, prompt_tokens=0, prefix_tokens=0)
        return GeneratorReport(stats=stats, problem=problem)
