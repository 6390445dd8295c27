"""The engine: a thread that steps its servers while there are requests, and the interface to other threads.

Interleaved, one server prefills and generates, or each of several copies does for requests of its own. Disaggregated,
one prefills and another one, on devices of its own, generates; the KV goes from pool to pool. The policy is
``rooftop.scheduling``'s, driven as ``rooftop.simulate`` does.

A model in pipeline stages has a server for each of its flights: the sequences that take their steps together. Flights
have the devices and the weights in common, and a scheduler and a cache each. There are as many flights as stages, so
that every stage has work while the steps of all flights are in progress.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import jax
import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.cache import CachedSequence
from rooftop.scheduling.serving.scheduler import Policy, Routing
from rooftop.serve.engine.admission import Admission
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.counters import Counters, stats_of
from rooftop.serve.engine.programs import COPIED, Compilations
from rooftop.serve.engine.replica import Replica
from rooftop.serve.engine.requests import Beat, Deliver, EngineStats, GenerationRequest, Overloaded, Token
from rooftop.serve.engine.running import Running
from rooftop.serve.engine.steps import EngineServer, Sent, check_scheduler, scheduler_of

#: Routing of requests to copies.
_ROUTING = Routing(kind="affinity")


class PagedEngine:
    """A ``requests.ServingEngine`` over one replica, several copies, or one that prefills and one that generates.

    ``stops`` are the tokens that end a text of the model. ``draft`` guesses, on the same pages. Create it with
    ``rooftop.serve.engine.loading.load``.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        configuration: Configuration,
        *,
        max_model_len: int,
        stops: frozenset[int] = frozenset(),
        draft: Replica | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.configuration, self.max_model_len, self.stops = configuration, max_model_len, stops
        self.model = replicas[0].decoder.model
        self.replicas, self.draft, self._on_progress = tuple(replicas), draft, on_progress
        self._running = dict[int, Running]()
        self._counters = Counters()
        self._compilations = Compilations()
        self._programs = self._requests = self._finished = self._routed = 0
        self._began_s = 0.0
        #: When the step loop turned last, and True while it has nothing to do.
        self._turned_s, self._resting = 0.0, True
        self._wake = threading.Condition()
        self._commands = deque[Callable[[], None]]()
        #: Requests that were submitted and have not ended, by id; guarded by ``_wake``.
        self._open = dict[int, Running]()
        #: Called when a step has failed, before its requests end with an error.
        self.on_failed: Callable[[], None] = lambda: None
        self._state = "new"
        self._thread = threading.Thread(target=self._loop, name="rooftop engine", daemon=True)
        self._reset()

    @property
    def policy(self) -> Policy:
        """Batching policy."""
        return self.configuration.policy

    @property
    def devices(self) -> str:
        """Number and kind of the local devices."""
        devices = jax.devices()
        return f"{len(devices)} x {devices[0].device_kind}"

    @property
    def admission(self) -> Admission:
        """Limits of the requests that the engine can serve."""
        caches = [cache for server in self._servers for cache in server.scheduler.caches]
        return Admission(
            vocab=self.model.vocab,
            max_model_len=self.max_model_len,
            page_tokens=self.configuration.page_tokens,
            pages=min(cache.device.size for cache in caches),
        )

    @property
    def prefix_cache(self) -> bool:
        """True if prompts with a common prefix share KV."""
        return self.configuration.prefix_cache

    def start(self) -> None:
        """Compile everything and begin to serve."""
        for replica in self._all:
            self._programs += replica.compile(self._on_progress, role=self.configuration.role)
        self._began_s = time.monotonic()
        self._state = "serving"
        self._thread.start()

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        """See ``requests.ServingEngine``."""
        running = self._admitted(request, deliver)
        with self._wake:
            if self._state != "serving":
                raise Overloaded(1.0)
            waiting = len(self._open) - self.configuration.policy.max_batch
            if waiting >= self.configuration.max_queue:
                raise Overloaded(self._retry_after_s(waiting))
            if request.id in self._open:
                raise RooftopError("request id", request.id, "an id that no request in progress has")
            self._open[request.id] = running
            self._requests += 1
            self._commands.append(lambda: self._admit(running))
            self._wake.notify_all()

    def cancel(self, id: int) -> None:
        """See ``requests.ServingEngine``."""
        self._ask(lambda: self._end(id, Token(id=id, token=None, finish="cancelled")))

    def drain(self, timeout_s: float) -> bool:
        """See ``requests.ServingEngine``."""
        with self._wake:
            if self._state == "new":
                self._state = "stopped"
            if self._state == "stopped":
                return True
            self._state = "draining"
            done = self._wake.wait_for(lambda: not self._open, timeout_s)
            left = list(self._open)
        for entry in left:
            self.cancel(entry)
        with self._wake:
            self._wake.wait_for(lambda: not self._open, 60.0)
            self._state = "stopped"
            self._wake.notify_all()
        self._thread.join()
        return done

    def abandon(self, message: str) -> None:
        """End every request with an error, and take no more: the devices may never answer. From any thread."""
        with self._wake:
            self._state = "stopped"
            left, self._open = self._open, {}
            self._wake.notify_all()
        for id, running in left.items():
            # A client that has left needs no message.
            with suppress(Exception):
                running.deliver(Token(id=id, token=None, finish="error", message=message))

    def stats(self) -> EngineStats:
        """See ``requests.ServingEngine``."""
        result = stats_of(
            [server.scheduler for server in self._servers],
            self._counters,
            page_tokens=self.configuration.page_tokens,
            programs=self._programs,
            compilations=self._compilations.count,
        )
        with self._wake:
            open_ = len(self._open)
        return replace(result, waiting=max(0, open_ - result.running), requests=self._requests)

    def beat(self) -> Beat:
        """See ``requests.ServingEngine``."""
        resting, age_s = self._resting, time.monotonic() - self._turned_s
        doing = "; ".join(server.doing for server in self._servers if server.doing)
        if self._state in ("serving", "draining") and not self._thread.is_alive():
            return Beat(age_s=age_s, doing=f"its thread has ended: {doing}")
        return Beat(age_s=0.0 if resting or self._state == "stopped" else age_s, doing=doing)

    def waits(self) -> str:
        """The collectives in which the programs of the last steps can wait; it reads them, which may take a while."""
        lines = dict.fromkeys(server.replica.waits() for server in self._servers)
        return "; ".join(filter(None, lines))

    def wake(self) -> None:
        """Have the engine look for work: a mask has arrived. From any thread."""
        with self._wake:
            self._commands.append(lambda: None)
            self._wake.notify_all()

    def check(self) -> None:
        """See ``requests.ServingEngine``."""
        if not self._thread.is_alive():
            return self._check()
        failed, done = list[AssertionError](), threading.Event()

        def check() -> None:
            try:
                self._check()
            except AssertionError as error:
                failed.append(error)
            done.set()

        self._ask(check)
        while not done.wait(0.1) and self._thread.is_alive():
            pass
        if failed:
            raise failed[0]

    @property
    def _entrances(self) -> list[EngineServer]:
        """The servers that requests come to first, by ``Running.copy``."""
        return self._servers[: self.configuration.stages] if self._apart else self._servers

    @property
    def _all(self) -> tuple[Replica, ...]:
        return self.replicas if self.draft is None else (*self.replicas, self.draft)

    def _check(self) -> None:
        for server in self._servers:
            running = [request for request in list(self._running.values()) if self._home(request) is server]
            check_scheduler(server.scheduler, [request.sequence for request in running])

    def _home(self, running: Running) -> EngineServer:
        """The server whose pool has the pages of ``running``."""
        if not self._apart:
            return self._servers[running.copy]
        (front, back), sequence = self._flights[running.copy], running.sequence
        scheduler = back.scheduler
        here = scheduler.generating, scheduler.swapped, scheduler.paused
        return back if any(sequence in place for place in here) else front

    def _reset(self) -> None:
        """Create schedulers without requests and with empty caches."""
        configuration = self.configuration
        self._apart = configuration.policy.batching == "disaggregated" and len(self.replicas) > 1
        stages = configuration.stages
        both = ("prefill",) * stages + ("generate",) * stages
        roles = both if self._apart else (configuration.role,) * len(self.replicas)
        self._servers = [
            EngineServer(scheduler_of(configuration, replica, role), replica, self._running, self._counters, self.draft)
            for role, replica in zip(roles, self.replicas, strict=True)
        ]
        #: The servers that begin a step together: replicas are in the order of copies, then of flights.
        self._flights = [self._servers[at::stages] for at in range(stages)]
        #: Steps of flights in progress, the one that began first at the front.
        self._flying = deque[tuple[list[EngineServer], list[tuple[EngineServer, Sent]]]]()
        self._landed_s = 0.0
        self._running.clear()

    def _admitted(self, request: GenerationRequest, deliver: Deliver) -> Running:
        """Raises RooftopError for what can never be served."""
        self.admission.check(request)
        sampling = request.sampling
        return Running(
            request=request,
            deliver=deliver,
            sequence=CachedSequence(id=request.id, prompt_tokens=len(request.prompt), max_tokens=sampling.max_tokens),
            stops=sampling.stop_tokens if sampling.ignore_eos else sampling.stop_tokens | self.stops,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            page_tokens=self.configuration.page_tokens,
            cached=self.configuration.prefix_cache,
        )

    def _retry_after_s(self, waiting: int) -> float:
        """Seconds until the queue may have room, by the rate at which requests have ended so far."""
        rate = self._finished / max(time.monotonic() - self._began_s, 1e-3)
        return min(60.0, max(1.0, 1 / rate)) if rate else 1.0

    def _ask(self, command: Callable[[], None]) -> None:
        """Run ``command`` between steps, with none in progress."""

        def run() -> None:
            while self._flying:
                self._land()
            command()

        with self._wake:
            self._commands.append(run)
            self._wake.notify_all()

    def _loop(self) -> None:
        self._compilations.watch()
        idle, begun_s = True, 0.0
        while True:
            with self._wake:
                if idle:
                    self._resting = True
                    self._wake.wait_for(lambda: self._commands or self._state == "stopped")
                self._turned_s, self._resting = time.monotonic(), False
                if self._state == "stopped" and not self._commands:
                    break
                commands, self._commands = self._commands, deque()
            if idle:
                begun_s = time.perf_counter()
            try:
                for command in commands:
                    command()
                idle = not self._advance()
            except Exception as error:
                self._fail(error)
                idle = True
            # A step lasts until the next one begins: requests wait for the time between steps too.
            now_s = time.perf_counter()
            if not idle:
                self._counters.step_s += now_s - begun_s
            begun_s = now_s
        self._compilations.stop()

    def _fail(self, error: Exception) -> None:
        """End every request with an error after a failed step, and start again with an empty cache.

        If there is no memory for the cache, the engine stops.
        """
        self.on_failed()
        message = f"{type(error).__name__}: {error}".splitlines()[0]
        left = list(self._running.values())
        self._reset()
        for running in left:
            self._deliver(running, Token(id=running.request.id, token=None, finish="error", message=message))
        try:
            for replica in self._all:
                replica.allocate()
        except Exception:
            with self._wake:
                self._state = "stopped"

    def _admit(self, running: Running) -> None:
        self._running[running.request.id] = running
        if len(self._entrances) > 1:
            running.copy = self._copy_for(running)
        self._entrances[running.copy].scheduler.submit(running.sequence)

    def _copy_for(self, running: Running) -> int:
        """Index of the replica for ``running``: one with a prefix of its prompt, unless others are much less busy."""
        schedulers = [server.scheduler for server in self._entrances]
        matches = [max(cache.match(running.sequence) for cache in scheduler.caches) for scheduler in schedulers]
        chosen = _ROUTING.choose(self._routed, [scheduler.outstanding for scheduler in schedulers], matches)
        self._routed += 1
        return chosen

    def _advance(self) -> bool:
        """Begin a step of each flight that has none in progress, and end the step that began first.

        Return False if there was nothing to do.
        """
        for flight in self._flights:
            if any(flight is other for other, _ in self._flying):
                continue
            if self._apart:
                self._hand_over(*flight)
            sent = [(server, step) for server in flight if (step := server.send()) is not None]
            if sent:
                self._flying.append((flight, sent))
        if not self._flying:
            return False
        self._land()
        return True

    def _land(self) -> None:
        """Wait for the step that began first, of each server of its flight, and deliver its tokens."""
        flight, sent = self._flying.popleft()
        for at, (server, step) in enumerate(sent):
            for running, token in server.collect(step, behind=at > 0, since_s=self._landed_s):
                self._counters.tokens += 1
                if token.finish is not None:
                    self._end(running.request.id, token)
                elif not self._deliver(running, token):
                    self._end(running.request.id, Token(id=running.request.id, token=None, finish="cancelled"))
            if self._apart:
                front, back = flight
                prefilled = [chunk.sequence for chunk in step.step.chunks if chunk.last]
                self._moved(front, back, step.step.preempted if server is back else (), prefilled)
        self._landed_s = time.perf_counter()
        self._counters.stepped()

    def _moved(
        self,
        front: EngineServer,
        back: EngineServer,
        preempted: Sequence[CachedSequence],
        prefilled: Sequence[CachedSequence],
    ) -> None:
        """Disaggregated: complete prompts move on to generation; sequences that lost their KV are prefilled again."""
        for sequence in prefilled:
            if sequence in front.scheduler.to_send:
                back.scheduler.submit(sequence)
        for sequence in preempted:
            if not sequence.host_pages and sequence.id in self._running:
                front.scheduler.submit(sequence, first=True)

    def _hand_over(self, front: EngineServer, back: EngineServer) -> None:
        """Send KV to the generate server as far as it has room."""
        for sequence in back.scheduler.receive():
            source = np.array(front.scheduler.to_send[sequence], np.int32)
            target = np.array(sequence.pages, np.int32)
            for first in range(0, len(target), COPIED):
                pages = front.replica.take(source[first : first + COPIED])
                back.replica.put(target[first : first + COPIED], pages)
            front.scheduler.sent(sequence)
            back.arrived(sequence)

    def _end(self, id: int, token: Token) -> None:
        """Deliver the last ``token`` of a request, if the engine still has it, and free its pages."""
        running = self._running.pop(id, None)
        if running is None:
            return
        sequence = running.sequence
        server = self._home(running)
        if self._apart:
            front, back = self._flights[running.copy]
            if server is front:
                back.scheduler.forget(sequence)
        server.scheduler.finish(sequence)
        server.leave(running)
        self._deliver(running, token)

    def _deliver(self, running: Running, token: Token) -> bool:
        """Deliver a token; return True if it was accepted."""
        if running.request.id not in self._open:
            # Abandoned: its last token has been delivered.
            return False
        if token.finish is not None:
            with self._wake:
                self._finished += 1
                self._open.pop(running.request.id, None)
                self._wake.notify_all()
        try:
            running.deliver(token)
        except Exception:
            # The client has left: the request ends, and the others go on.
            return False
        return True
