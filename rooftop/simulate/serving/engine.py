"""Serving, request by request: discrete events around the scheduler that a server runs.

Time passes in steps of the servers and in transfers of KV. The scheduler decides each step and ``StepTimes`` says how
long it takes. Steps that repeat until something arrives or ends are added up in closed form: an hour of traffic has
millions of steps and a few hundred thousand events.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from heapq import heappop, heappush

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.cache import CachedSequence
from rooftop.scheduling.serving.scheduler import EngineStep, Routing, StaticScheduler
from rooftop.scheduling.serving.times import StepTimes
from rooftop.simulate.serving.records import (
    Deployment,
    Requests,
    ServerRole,
    SimulatedServer,
    Simulation,
    Stay,
    StepRun,
)
from rooftop.simulate.serving.traces import RequestTrace

#: Order of events at the same instant: a server sees all arrivals before it decides.
_ARRIVED, _ENTERED, _DONE, _WAKE = 0, 1, 2, 3


def simulate(
    trace: RequestTrace, deployment: Deployment, on_progress: Callable[[int, int, str], None] | None = None
) -> Simulation:
    """Serve ``trace`` until the last request has ended. Raises RooftopError if pages do not divide its hashes.

    The result's trace has the times at which the requests of a closed loop came.
    """
    page_tokens = deployment.times.page_tokens
    if trace.hashes is not None and trace.hash_tokens % page_tokens:
        raise RooftopError("hash_tokens", trace.hash_tokens, f"a multiple of the pages' {page_tokens} tokens")
    return _Events(trace, deployment, on_progress).run()


class _Events:
    """The events to come and what they change."""

    def __init__(
        self, trace: RequestTrace, deployment: Deployment, on_progress: Callable[[int, int, str], None] | None
    ) -> None:
        self.trace, self.deployment, self.times = trace, deployment, deployment.times
        self.on_progress, self.report_every, self.finished = on_progress, max(1, len(trace) // 200), 0
        front, back = deployment.schedulers()
        role: ServerRole = "prefill" if back else "both"
        self.front = [SimulatedServer(number, role, scheduler) for number, scheduler in enumerate(front)]
        self.back = [SimulatedServer(number, "generate", it) for number, it in enumerate(back, start=len(front))]
        self.servers = [*self.front, *self.back]
        for server in self.servers:
            server.together = self.servers if deployment.lockstep else [server]
        count = len(trace)
        self.arrival_s: list[float] = trace.arrival_s.tolist()
        if trace.clients is not None:
            # In a closed loop a request waits for a client.
            self.arrival_s[trace.clients :] = [math.inf] * max(0, count - trace.clients)
        #: The next request that waits for a client; ``count`` if none does.
        self.waiting = count if trace.clients is None else min(trace.clients, count)
        self.output = trace.output_tokens.tolist()
        self.prompt = trace.prompt_tokens.tolist()
        nan, zero = [math.nan] * count, [0] * count
        self.requests = Requests(
            first_s=nan[:], last_s=nan[:], tokens=zero[:], prefilled=zero[:], cached=zero[:], preemptions=zero[:],
            joining_gap_s=[0.0] * count, server=[-1] * count, refused={},
        )  # fmt: skip
        self.sequences: dict[int, CachedSequence] = {}
        #: In lockstep, those that have come during the step under way.
        self.came: list[CachedSequence] = []
        self.stays: list[Stay] = []
        self.joining_gaps_s: list[float] = []
        #: Per request that generates: (stay number, server's steps and runs when it joined).
        self.joined: dict[int, tuple[int, int, int]] = {}
        self.stay_numbers = 0
        self.handovers = 0
        #: When the front end has taken all requests that came.
        self.front_free_s = 0.0
        self.heap: list[
            tuple[float, int, int, SimulatedServer, int, CachedSequence | None, SimulatedServer | None]
        ] = []
        self.pushed = 0

    def run(self) -> Simulation:
        arrival_s, heap = self.arrival_s, self.heap
        request = 0
        while True:
            if request < self.waiting and (not heap or arrival_s[request] <= heap[0][0]):
                self.arrive(request)
                request += 1
            elif heap:
                now, what, _, server, version, sequence, sender = heappop(heap)
                if what == _DONE:
                    if version == server.version:
                        self.done(server, now)
                elif what == _WAKE:
                    server.meter(now)
                    self.begin(server, now)
                elif what == _ENTERED:
                    assert sequence is not None
                    self.entered(sequence, now)
                elif sequence is not None and sender is not None:
                    self.landed(server, sequence, sender, now)
            else:
                break
        trace = self.trace
        return Simulation(
            trace=trace if trace.clients is None else replace(trace, arrival_s=np.array(arrival_s)),
            deployment=self.deployment,
            servers=self.servers,
            requests=self.requests,
            stays=self.stays,
            joining_gaps_s=self.joining_gaps_s,
        )

    def push(
        self,
        at: float,
        what: int,
        server: SimulatedServer,
        sequence: CachedSequence | None = None,
        sender: SimulatedServer | None = None,
    ) -> None:
        self.pushed += 1
        heappush(self.heap, (at, what, self.pushed, server, server.version, sequence, sender))

    def arrive(self, request: int) -> None:
        keys = self.trace.keys(request, self.times.page_tokens) if self.deployment.prefix_cache else ()
        prompt, output = self.prompt[request], self.output[request]
        refused = (
            self.front[0].scheduler.refusal(prompt, output)
            or (self.back and self.back[0].scheduler.refusal(prompt, output))
            or None
        )
        if refused is not None:
            self.requests.refused[request] = refused
            self.next_of_client(self.arrival_s[request])
            return
        sequence = CachedSequence(id=request, prompt_tokens=prompt, max_tokens=output, keys=keys)
        self.sequences[request] = sequence
        front_s = self.deployment.front_end.seconds(prompt)
        if front_s:
            self.front_free_s = max(self.front_free_s, self.arrival_s[request]) + front_s
            self.push(self.front_free_s, _ENTERED, self.front[0], sequence)
        else:
            self.entered(sequence, self.arrival_s[request])

    def entered(self, sequence: CachedSequence, now: float) -> None:
        """Hand a request that the front end has taken to a server."""
        if self.deployment.lockstep:
            # The process that drives all servers looks at what has come between two steps.
            self.came.append(sequence)
            self.nudge(self.front[0], now, certain=True)
            return
        server = self.route(sequence.id, sequence)
        server.scheduler.submit(sequence)
        self.nudge(server, now, certain=False)

    def route(self, number: int, sequence: CachedSequence) -> SimulatedServer:
        """The server that prefills ``sequence``."""
        if len(self.front) == 1:
            return self.front[0]
        routing = self.deployment.routing
        matches = list[int]()
        if routing.kind == "affinity":
            matches = [max(cache.match(sequence) for cache in server.scheduler.caches) for server in self.front]
        return self.front[routing.choose(number, [one.scheduler.outstanding for one in self.front], matches)]

    def nudge(self, server: SimulatedServer, now: float, *, certain: bool) -> None:
        """Work has arrived at ``server``: wake it, or let it decide again after the current step.

        The latter if the decision may differ; ``certain`` says that it does.
        """
        lead = server.together[0]
        if not lead.busy:
            lead.busy = True
            self.push(now, _WAKE, lead)
        elif lead.planned > 1 and (certain or server.scheduler.may_admit()):
            steps = steps_by(now - lead.started_s, lead.first_s, lead.growth_s, lead.planned)
            if steps < lead.planned:
                for partner in lead.together:
                    partner.planned = steps
                lead.version += 1
                self.push(lead.started_s + run_seconds(steps, lead.first_s, lead.growth_s), _DONE, lead)

    def begin(self, lead: SimulatedServer, now: float) -> None:
        """Decide what the servers that step together with ``lead``, their first one, do from ``now`` on."""
        lead.planned, handed_s = 0, 0.0
        for sequence in self.came:
            self.route(sequence.id, sequence).scheduler.submit(sequence)
        self.came.clear()
        for server in lead.together:
            if server.role == "generate":
                handed_s += self.receive(server, now)
        if not any([self.decide(server, now) for server in lead.together]):
            lead.busy = False
            return
        working = [server for server in lead.together if server.step is not None]
        # A step lasts as long as the longest of those that are taken together.
        planned = min(server.planned for server in working)
        first_s = handed_s + max(server.first_s for server in working)
        growth_s = max(server.growth_s for server in working)
        for server in lead.together:
            server.planned, server.first_s, server.growth_s, server.started_s = planned, first_s, growth_s, now
        lead.busy = True
        lead.version += 1
        self.push(now + run_seconds(planned, first_s, growth_s), _DONE, lead)

    def decide(self, server: SimulatedServer, now: float) -> bool:
        """Set the next step of ``server``, its time and its repetitions. Returns False if there is none."""
        scheduler = server.scheduler
        waiting = scheduler.queued
        step = server.step = scheduler.next_step()
        if step is None:
            server.meter(now)
            return False
        for sequence in step.preempted:
            self.preempted(server, sequence, now)
        for sequence in step.resumed:
            self.join(server, sequence.id)
        if not step.chunks and step.batch:
            while server.ends and not self.generates(server.ends[0]):
                heappop(server.ends)
            most = 1 if step.copies else min(step.repeats, server.ends[0][0] - server.steps)
            server.planned, server.first_s, server.growth_s = joint_steps(self.times, step, most)
        else:
            server.planned, server.growth_s = 1, 0.0
            if step.batch:
                server.first_s = self.times.mixed_s(step.prefill, step.batch, step.context_tokens)
            else:
                server.first_s = self.times.prefill_s(step.prefill) if step.chunks else 0.0
        if step.copies:
            # Copies have a path of their own next to the step, which takes as long as the longer of the two.
            pages = sum(len(copy.source) for copy in step.copies)
            server.first_s = max(server.first_s, self.times.host_copy_s(pages * self.times.page_tokens))
        server.meter(now)
        server.waiting = waiting
        return True

    def done(self, lead: SimulatedServer, now: float) -> None:
        """Record the planned steps of ``lead`` and of the servers that step with it, and begin the next."""
        for server in lead.together:
            if server.step is not None:
                self.completed(server, server.step, now)
        self.begin(lead, now)

    def completed(self, server: SimulatedServer, step: EngineStep, now: float) -> None:
        """Record the planned steps of ``server``, which are over."""
        steps, scheduler, requests = server.planned, server.scheduler, self.requests
        scheduler.complete(step, steps)
        server.meter(now)
        prefilled = 0
        for chunk in step.chunks:
            requests.prefilled[chunk.sequence.id] += chunk.tokens
            prefilled += chunk.tokens
        continued, gap_s = 0, 0.0
        if step.batch:
            first_token_s = server.started_s + server.first_s
            continued = step.generating - len(server.newcomers)
            gap_s = first_token_s - server.last_token_s if continued else 0.0
            for request in server.newcomers:
                self.joining_gap(request, first_token_s)
            server.newcomers.clear()
            server.last_token_s = now
            server.steps += steps
        server.runs.append(
            StepRun(
                server.started_s, now, steps, server.first_s, server.growth_s, step.generating, prefilled, continued,
                gap_s, server.pages_used, server.waiting,
            )
        )  # fmt: skip
        while server.ends and server.ends[0][0] <= server.steps:
            entry = heappop(server.ends)
            if self.generates(entry):
                self.leave(server, entry[1])
                self.ended(server, entry[1], now)
        for chunk in step.chunks:
            if chunk.last:
                self.prefilled(server, chunk.sequence, now)

    def prefilled(self, server: SimulatedServer, sequence: CachedSequence, now: float) -> None:
        """Record the token of a finished prefill: the first, or the next after a preemption."""
        request, requests = sequence.id, self.requests
        if requests.tokens[request]:
            self.joining_gap(request, now)
        else:
            requests.first_s[request] = now
            requests.cached[request] = sequence.cached
            requests.server[request] = server.number
        requests.tokens[request] += 1
        requests.last_s[request] = now
        if requests.tokens[request] == self.output[request]:
            self.ended(server, request, now)
        elif server.role == "prefill":
            loads = [one.scheduler.outstanding for one in self.back]
            target = self.back[Routing().choose(self.handovers, loads)]
            self.handovers += 1
            target.scheduler.submit(sequence)
            requests.server[request] = server.number
            self.nudge(target, now, certain=False)
        else:
            self.join(server, request)

    def join(self, server: SimulatedServer, request: int) -> None:
        """Let ``request`` generate on ``server`` from its next step on."""
        self.stay_numbers += 1
        self.joined[request] = (self.stay_numbers, server.steps, len(server.runs))
        left = self.output[request] - self.requests.tokens[request]
        heappush(server.ends, (server.steps + left, request, self.stay_numbers))
        server.newcomers.append(request)

    def generates(self, entry: tuple[int, int, int]) -> bool:
        """Return True if an entry of ``ends`` belongs to a sequence that is still generating."""
        return self.joined.get(entry[1], (0,))[0] == entry[2]

    def leave(self, server: SimulatedServer, request: int) -> None:
        """End the generation of ``request`` on ``server``."""
        _, since, first = self.joined.pop(request)
        steps = server.steps - since
        if steps:
            self.requests.tokens[request] += steps
            self.requests.last_s[request] = server.last_token_s
            self.stays.append(Stay(request, server.number, first, len(server.runs) - 1))
        else:
            server.newcomers.remove(request)

    def ended(self, server: SimulatedServer, request: int, now: float) -> None:
        server.scheduler.finish(self.sequences.pop(request))
        self.finished += 1
        self.next_of_client(now)
        if self.on_progress is not None and self.finished % self.report_every == 0:
            self.on_progress(self.finished, len(self.trace), "requests served")

    def next_of_client(self, now: float) -> None:
        """Let the next request of a closed loop come: a client has its answer."""
        if self.waiting < len(self.trace):
            self.arrival_s[self.waiting] = now
            self.waiting += 1

    def joining_gap(self, request: int, now: float) -> None:
        gap = now - self.requests.last_s[request]
        self.joining_gaps_s.append(gap)
        self.requests.joining_gap_s[request] = max(self.requests.joining_gap_s[request], gap)

    def preempted(self, server: SimulatedServer, sequence: CachedSequence, now: float) -> None:
        self.requests.preemptions[sequence.id] += 1
        if sequence.id in self.joined:
            self.leave(server, sequence.id)
        if server.role == "generate" and not sequence.host_pages:
            front = self.route(sequence.id, sequence)
            front.scheduler.submit(sequence, first=True)
            self.nudge(front, now, certain=True)

    def receive(self, server: SimulatedServer, now: float) -> float:
        """Begin to send the KV that ``server`` has room for, and join sequences whose KV has arrived.

        In lockstep both servers wait for the transfer. Returns its seconds.
        """
        scheduler = server.scheduler
        assert not isinstance(scheduler, StaticScheduler)
        for sequence in server.landed:
            self.join(server, sequence.id)
        server.landed.clear()
        seconds = 0.0
        for sequence in scheduler.receive():
            # A prefill server sends one sequence at a time.
            sender = self.servers[self.requests.server[sequence.id]]
            if server.together is sender.together:
                assert not isinstance(sender.scheduler, StaticScheduler)
                seconds += self.times.transfer_s(sequence.length)
                sender.scheduler.sent(sequence)
                scheduler.arrived(sequence)
                self.join(server, sequence.id)
                continue
            sender.link_free_s = max(now, sender.link_free_s) + self.times.transfer_s(sequence.length)
            self.push(sender.link_free_s, _ARRIVED, server, sequence, sender)
        return seconds

    def landed(self, server: SimulatedServer, sequence: CachedSequence, sender: SimulatedServer, now: float) -> None:
        """Hand the KV of ``sequence`` from ``sender``, whose pages are now free, to ``server``."""
        assert not isinstance(server.scheduler, StaticScheduler)
        assert not isinstance(sender.scheduler, StaticScheduler)
        sender.meter(now)
        sender.scheduler.sent(sequence)
        sender.meter(now)
        self.nudge(sender, now, certain=False)
        server.scheduler.arrived(sequence)
        server.landed.append(sequence)
        self.nudge(server, now, certain=True)


def joint_steps(times: StepTimes, step: EngineStep, most: int) -> tuple[int, float, float]:
    """Number of steps to take at once (at most ``most``), the time of the first, and the growth from step to step.

    Times are convex or concave in the context: where the second of three points lies on the line through the others,
    they are on a line all the way.
    """
    batch, context, grown = step.batch, step.context_tokens, step.growth
    first = times.generate_s(batch, context)
    if most == 1:
        return 1, first, 0.0
    growth = times.generate_s(batch, context + grown) - first
    while most > 2:
        last = times.generate_s(batch, context + (most - 1) * grown)
        if abs(first + (most - 1) * growth - last) <= 1e-9 * last:
            return most, first, (last - first) / (most - 1)
        most = (most + 1) // 2
    return most, first, growth


def run_seconds(steps: int, first: float, growth: float) -> float:
    """Time of ``steps`` steps, the first taking ``first`` and each ``growth`` more than the last."""
    return steps * first + growth * (steps * (steps - 1) / 2)


def steps_by(elapsed: float, first: float, growth: float, most: int) -> int:
    """The fewest steps (1 to ``most``) whose time is ``elapsed`` or more."""
    if growth:
        half = first - growth / 2
        root = half * half + 2 * growth * elapsed
        guess = (math.sqrt(max(root, 0.0)) - half) / growth
    else:
        guess = elapsed / first if first else 1.0
    steps = min(max(1, math.ceil(guess)), most)
    while steps > 1 and run_seconds(steps - 1, first, growth) >= elapsed:
        steps -= 1
    while steps < most and run_seconds(steps, first, growth) < elapsed:
        steps += 1
    return steps
