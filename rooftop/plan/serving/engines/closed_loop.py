"""Latencies of a server in a closed loop, in closed form: so many clients, each with one request in progress.

A client sends its next request when its last answer ends. The server never waits, so that time passes in steps: each
generates a token for every active sequence, and fills up to ``budget`` tokens with prompts. While a sequence generates
its n tokens, each of the others is prefilled once, and makes one of those steps (or several) longer: that is all that
TPOT needs. A new request waits for the step that is under way, shares its own with prompts that came at the same time,
and waits for a place where the KV cache has room for fewer sequences than there are clients. At the beginning all
clients come at once, and their prompts are prefilled one after another. Before that the front end (HTTP and tokenising)
takes the prompts, one after another too.

Not counted: sequences that lose their place and are prefilled again, and the end of a benchmark, when clients have no
more requests. ``rooftop.simulate`` steps through the same server; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
#: Steps that a prompt waits at most for another, where copies of attention prefill together: assumed, engines set it.
_LONGEST_WAIT = 10.0
#: Steps from an answer's end to the end of the prefill of its client's next prompt, where each step prefills a prompt:
#: the host reads a step's tokens while the next one runs, which is why the prompt misses the one after that too.
_TURNAROUND = 3.0


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """Loads of one server, arrays [R]: ``clients`` with requests of ``prompt`` tokens answered with ``generate``.

    Each client sends ``requests`` of them; ``equal``: all of the same length. ``budget``: most tokens of a step.
    ``reserved``: share of an answer for which there is room when a request is let in; half of it is there in the mean.
    """

    clients: Floats
    prompt: Floats
    generate: Floats
    requests: Floats | float = 10.0
    equal: bool | npt.NDArray[np.bool_] = False
    budget: Floats | float = 8192.0
    reserved: Floats | float = 0.5

    @property
    def context(self) -> Floats:
        """Tokens of a sequence's cache in the mean."""
        return self.prompt + self.generate / 2

    @property
    def intervals(self) -> Floats:
        """Times between the tokens of an answer."""
        return np.maximum(self.generate - 1.0, 1.0)

    def places(self, kv_tokens: float) -> Floats:
        """Sequences for which there is room among ``kv_tokens``, one at least."""
        return np.maximum(np.floor(kv_tokens / (self.prompt + self.reserved * self.generate)), 1.0)


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of a server's steps, and its room: figures and arguments are arrays [R].

    ``generate_s`` takes the batch and the tokens of each cache; ``mixed_s`` the tokens of a prompt, the number of such
    prompts in a step, and those two. ``together`` copies of attention prefill as many prompts each, and wait for one
    another. ``kv_tokens`` fit the cache.
    """

    generate_s: Callable[[Floats, Floats], Floats]
    mixed_s: Callable[[Floats, Floats, Floats, Floats], Floats]
    kv_tokens: float
    together: int = 1


@dataclass(frozen=True, kw_only=True)
class LoopSteps:
    """Steps of a closed loop, arrays [R]: ``active`` sequences have a place, a prompt takes ``chunks`` steps.

    Seconds of a step that generates, of one that also prefills (a chunk of) ``together`` prompts, and of a full one, of
    ``full_tokens`` tokens of prompts on each copy of attention; ``front_s`` those of a prompt in the front end.
    """

    active: Floats
    chunks: Floats
    step_s: Floats
    mixed_s: Floats
    full_s: Floats
    full_tokens: Floats
    together: Floats | float = 1.0
    front_s: Floats | float = 0.0

    @classmethod
    def of(cls, load: ClosedLoop, costs: StepCosts) -> LoopSteps:
        """The steps of a load on a server with these costs."""
        active = np.minimum(load.places(costs.kv_tokens), load.clients)
        room = np.maximum(load.budget - active, 1.0)
        chunks = np.ceil(load.prompt / room)
        fitting = np.clip(np.floor(room / load.prompt), 1.0, active)
        return cls(
            active=active,
            chunks=chunks,
            step_s=costs.generate_s(active, load.context),
            mixed_s=costs.mixed_s(load.prompt / chunks, np.ones_like(active), active, load.context),
            full_s=costs.mixed_s(np.minimum(room, load.prompt), fitting, active / 2, load.prompt),
            full_tokens=np.minimum(room, load.prompt) * fitting,
            together=float(costs.together),
        )

    def with_overheads(
        self, gap_s: Floats | float, host_s: Floats | float, front_s: Floats | float = 0.0, *, graphs: bool = True
    ) -> LoopSteps:
        """Steps with ``gap_s`` more each; the front end takes ``front_s`` of a prompt.

        A step that prefills takes ``host_s`` at least, and without ``graphs`` each step does.
        """
        step_s = self.step_s + gap_s
        return replace(
            self,
            front_s=front_s,
            step_s=step_s if graphs else np.maximum(step_s, host_s),
            mixed_s=np.maximum(self.mixed_s + gap_s, host_s),
            full_s=np.maximum(self.full_s + gap_s, host_s),
        )


@dataclass(frozen=True, kw_only=True)
class LoopTimes:
    """Mean seconds of requests, arrays [R]; ``active`` sequences have a place at once."""

    ttft_s: Floats
    tpot_s: Floats
    active: Floats


def closed_loop(load: ClosedLoop, costs: StepCosts) -> LoopTimes:
    """Mean TTFT and TPOT of the loads on servers with these costs."""
    return loop_times(load, LoopSteps.of(load, costs))


def loop_times(load: ClosedLoop, steps: LoopSteps) -> LoopTimes:
    """Mean TTFT and TPOT of the loads whose steps are known."""
    active, chunks, mixed_s = steps.active, steps.chunks, steps.mixed_s
    prompt_s = chunks * np.maximum(mixed_s - steps.step_s, 0.0) / steps.together
    # Of the other prompts, those count that are prefilled while this sequence generates.
    tpot_s = steps.step_s + (active - 1) * prompt_s / (load.intervals + chunks)
    cycle_s = load.intervals * tpot_s + chunks * mixed_s
    # Other prompts come in as many steps as a sequence takes, some in its own.
    meeting = (active - 1) / (load.intervals + chunks) * chunks
    under_way_s = np.where(active > 1, tpot_s, 0.0)
    own_s = under_way_s + chunks * mixed_s + meeting * prompt_s
    # Until there is a prompt for each copy.
    own_s = own_s + (steps.together - 1) / 2 * np.minimum(cycle_s / active, _LONGEST_WAIT * steps.step_s)
    waves = load.prompt * active / (steps.full_tokens * steps.together)
    if np.any(load.equal):
        own_s = np.where(load.equal, _chained_s(own_s, load, steps), own_s)
    own_s = own_s + _front_s(load, steps.front_s, cycle_s)
    # A queue for places: the clients that have none wait for as many answers to end.
    queued_s = (load.clients - active) / active * cycle_s
    # At first all come at once: full steps, and half of them in the mean.
    first_s = np.maximum(steps.full_s * (waves + 1.0) / 2, steps.full_s) + steps.front_s
    first_s = np.maximum(first_s, steps.front_s * (load.clients + 1.0) / 2 + chunks * mixed_s)
    share = 1.0 / load.requests
    return LoopTimes(ttft_s=(1 - share) * own_s + share * first_s + queued_s, tpot_s=tpot_s, active=active)


def _front_s(load: ClosedLoop, front_s: Floats | float, cycle_s: Floats) -> Floats:
    """Seconds of a prompt in the front end, with those of the prompts that it waits for."""
    busy = np.minimum(load.clients * front_s / cycle_s, 0.95)
    return cast(Floats, front_s * (1 + busy / (2 * (1 - busy))))


def _chained_s(own_s: Floats, load: ClosedLoop, steps: LoopSteps) -> Floats:
    """Seconds of a prefill among requests of equal length.

    Those that were prefilled in successive steps end in successive steps, so that their clients' next ones come one
    step after another, in a chain that lasts: each step of it prefills what a step has room for.
    """
    rounds = np.minimum(_TURNAROUND, steps.active)
    step_s = steps.chunks * np.where(steps.full_tokens > load.prompt, steps.full_s, steps.mixed_s)
    # Where there are more prompts than steps of an answer they wait for one another.
    longer_s = steps.active * steps.mixed_s * steps.chunks - load.intervals * steps.mixed_s
    return cast(Floats, np.maximum(own_s, np.maximum(rounds * step_s, longer_s)))


@dataclass(frozen=True, kw_only=True)
class PrefillServers:
    """``count`` servers that only prefill, each with so many ``copies`` of attention.

    ``prefill_s`` takes the tokens of a prompt, and the prompts that each copy prefills at once; under load those that
    fill a step. ``transfer_s``: seconds of a prompt's KV on its way to a server that generates; ``front_s`` those of a
    prompt in the front end.
    """

    count: float
    copies: float
    prefill_s: Callable[[Floats, Floats], Floats]
    transfer_s: Callable[[Floats], Floats]
    front_s: Callable[[Floats], Floats] = np.zeros_like


def disaggregated_loop(load: ClosedLoop, servers: float, costs: StepCosts, prefill: PrefillServers) -> LoopTimes:
    """Mean TTFT and TPOT where ``servers`` servers generate and others prefill."""
    most = load.places(costs.kv_tokens)
    together = np.maximum(np.floor(load.budget / load.prompt), 1.0)
    prompt_s = prefill.prefill_s(load.prompt, together) / (together * prefill.copies * prefill.count)
    own_s = prefill.prefill_s(load.prompt, np.ones_like(load.prompt)) + prefill.transfer_s(load.prompt)
    front_s = prefill.front_s(load.prompt)
    ttft_s = own_s + front_s
    active = np.minimum(load.clients / servers, most)
    tpot_s = costs.generate_s(active, load.context)
    # The batch depends on how many are generating, and that on how long a step is: a few rounds settle it.
    for _ in range(8):
        answer_s = load.intervals * tpot_s
        cycle_s = ttft_s + answer_s
        active = np.clip(load.clients / servers * answer_s / cycle_s, 1.0, most)
        tpot_s = costs.generate_s(np.ceil(active), load.context)
        busy = np.minimum(load.clients * prompt_s / cycle_s, 0.95)
        # Others in front; where prompts come faster than they are prefilled, all clients wait for them.
        waiting_s = np.maximum(prompt_s * busy / (2 * (1 - busy)), load.clients * prompt_s - answer_s - own_s)
        ttft_s = (ttft_s + own_s + waiting_s + _front_s(load, front_s, cycle_s)) / 2
    share = 1.0 / load.requests
    first_s = own_s + load.clients * np.maximum(prompt_s, front_s) / 2
    return LoopTimes(ttft_s=(1 - share) * ttft_s + share * first_s, tpot_s=tpot_s, active=active)
