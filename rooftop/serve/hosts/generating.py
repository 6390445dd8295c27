"""The process that generates for a process that prefills: a step loop between messages of a link.

It serves one link at a time. When the link ends, its requests are dropped: the other side prefills them again.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NoReturn

import numpy as np

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.records import plain
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.counters import Counters, stats_of
from rooftop.serve.engine.loading import parts
from rooftop.serve.engine.programs import COPIED, Compilations
from rooftop.serve.engine.replica import Replica
from rooftop.serve.engine.running import Running
from rooftop.serve.engine.steps import EngineServer, check_scheduler, scheduler_of
from rooftop.serve.hosts.handover import GeneratorReport, page_arrays, pieces, shared_facts, taken
from rooftop.serve.hosts.link import Link, LinkListener, LinkLost, Message
from rooftop.serve.hosts.masks import RemoteMasks
from rooftop.serve.hosts.messages import token_fields
from rooftop.serve.hosts.processes import BEAT_S, GeneratorTask, end_with
from rooftop.serve.sockets import bind

#: Damaged pieces after which a link is given up.
_REFUSALS = 8
#: Most events about strangers in so many seconds: they come as fast as strangers like.
_REFUSED, _REFUSED_S = 8, 60.0
#: Seconds between reports while there is work.
_REPORT_S = 1.0


class Generator:
    """Generates requests that arrive over a link. ``facts`` are values that both sides must share."""

    def __init__(
        self,
        replica: Replica,
        configuration: Configuration,
        *,
        max_model_len: int,
        facts: Mapping[str, Any],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.replica, self.configuration, self.max_model_len = replica, configuration, max_model_len
        self._facts, self._on_progress = facts, on_progress
        self._counters, self._compilations = Counters(), Compilations()
        self._programs = 0
        #: When the step loop turned last; None while it has nothing to do.
        self._turned_s: float | None = None
        #: The last link, for those who end it.
        self._linked: Link | None = None
        self._stopped = False

    def start(self) -> None:
        """Compile everything."""
        self._programs = self.replica.compile(self._on_progress, role="generate")

    def stop(self, listening: socket.socket) -> None:
        """Have ``serve`` return after the current step. From any thread, or a signal handler."""
        self._stopped = True
        # The socket may not be listening yet.
        with suppress(OSError):
            listening.shutdown(socket.SHUT_RDWR)
        if self._linked is not None:
            self._linked.close("stopped")

    def serve(
        self, listening: socket.socket, key: str, on_link: Callable[[str], None], *, encrypted: bool = True
    ) -> None:
        """Serve clients that know ``key``, one after the other; ``on_link`` is called at each change.

        Returns after ``stop``, or when ``listening`` is shut down.
        """
        self._compilations.watch()
        listener, refused = LinkListener(listening, key, encrypted=encrypted), deque[float](maxlen=_REFUSED)
        while not self._stopped:
            try:
                link = listener.accept()
            except LinkLost as error:
                now_s = time.monotonic()
                if len(refused) < _REFUSED or now_s - refused[0] > _REFUSED_S:
                    refused.append(now_s)
                    on_link(f"refused: {error}")
                continue
            except OSError:
                break
            on_link("linked")
            on_link(f"lost: {self._follow(link)}")
        self._compilations.stop()

    def _follow(self, link: Link) -> str:
        """Serve until the link is lost. Return the reason."""
        self._link = self._linked = link
        if self._stopped:
            link.close("stopped")
        self._running = dict[int, Running]()
        #: Missing pieces of requests whose KV is being sent.
        self._missing = dict[int, set[int]]()
        self._constraints = dict[int, RemoteMasks]()
        self._inbox = SimpleQueue[Message | LinkLost]()
        self._refusals = 0
        self._reset()
        reader = threading.Thread(target=self._read, name="rooftop link reader", daemon=True)
        reader.start()
        try:
            link.send(
                "serving", facts=dict(self._facts), max_model_len=self.max_model_len, report=self._report().to_json()
            )
            # The first message says what is served.
            threading.Thread(target=self._beat, args=(link,), name="rooftop beat", daemon=True).start()
            self._work()
        except LinkLost as error:
            return str(error)
        finally:
            link.close()
            reader.join()
            link.discard()

    def _beat(self, link: Link) -> None:
        """Say twice a second that this process is alive, and how long its step has taken."""
        while link.open:
            age_s = 0.0 if self._turned_s is None else time.monotonic() - self._turned_s
            link.send("beat", age_s=age_s, doing=self._server.doing)
            time.sleep(BEAT_S)

    def _read(self) -> None:
        """Handle messages as they arrive: the other side never waits for a step here."""
        while True:
            try:
                message = self._link.receive()
                ticket = message.fields.get("ticket", 0)
                if message.kind == "offer" and message.fields["constrained"]:
                    self._constraints[ticket] = RemoteMasks()
                if message.kind in ("offer", "mask") and ticket in self._constraints:
                    if not message.payload:
                        self._link.close("a mask came damaged")
                        raise LinkLost("a mask came damaged")
                    self._constraints[ticket].came(message.payload)
                elif message.kind == "cancel" and ticket in self._constraints:
                    self._constraints[ticket].release()
                # A mask too: the step loop may rest until it arrives.
                self._inbox.put(message)
            except LinkLost as error:
                self._inbox.put(error)
                for constraint in list(self._constraints.values()):
                    constraint.end()
                return

    def _work(self) -> NoReturn:
        """Run steps while there are requests. Raises LinkLost."""
        busy, reported_s = False, time.monotonic()
        while True:
            if not busy or time.monotonic() - reported_s > _REPORT_S:
                self._link.send("report", number=0, **plain(self._report()))
                reported_s = time.monotonic()
            wait = not busy
            while True:
                self._turned_s = None if wait else time.monotonic()
                try:
                    message = self._inbox.get(block=wait)
                except Empty:
                    break
                if isinstance(message, LinkLost):
                    raise message
                self._heard(message)
                wait = False
            self._turned_s = time.monotonic()
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
            self._link.send("report", number=fields["number"], **plain(self._report(checked=True)))

    def _advance(self) -> bool:
        """Run one step. Return False if there was nothing to do."""
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
        """Store a piece of KV, or ask for it again."""
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
        """Pages of the cache that sequences can hold: each group has one more, for padding."""
        return self.replica.pages + 1 - self.replica.decoder.groups.ways

    def _reset(self) -> None:
        """Create a scheduler without requests and an empty cache."""
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


def load_generator(
    checkpoint: Path,
    configuration: Configuration,
    *,
    options: Mapping[str, Any] | None = None,
    replica: Callable[..., Replica] = Replica,
    on_progress: Callable[[int, int], None] | None = None,
) -> Generator:
    """A generator (role 'generate') of ``checkpoint``, not yet started. Raises as ``load`` does."""
    loaded = parts(checkpoint, configuration, None, None, options, replica)
    facts = shared_facts(checkpoint, loaded.replicas[0], configuration)
    return Generator(
        loaded.replicas[0], configuration, max_model_len=loaded.max_model_len, facts=facts, on_progress=on_progress
    )


def main() -> None:
    """Generate for the process that started this one, until that ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # Everything else that is printed goes to stderr.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task: GeneratorTask = pickle.load(sys.stdin.buffer)
    end_with(task.parent)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()

    try:
        generator = load_generator(task.checkpoint, task.configuration, options=task.options)
        generator.start()
    except RooftopError as error:
        said = {"field": error.field, "given": str(error.given), "accepted": error.accepted}
        print(json.dumps(said), file=out, flush=True)
        return
    except Infeasible as error:
        print(json.dumps({"what": error.what, "by": error.by}), file=out, flush=True)
        return
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        print(json.dumps({"port": bound.getsockname()[1]}), file=out, flush=True)
        generator.serve(bound, task.key, lambda event: None, encrypted=False)


def _end_with(pipe: IO[bytes]) -> None:
    pipe.read()
    os._exit(0)


if __name__ == "__main__":
    main()
