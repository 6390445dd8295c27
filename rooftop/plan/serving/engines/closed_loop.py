"""Latencies of a server in a closed loop, in closed form: so many clients, each with one request in progress.

A client sends its next request when its last answer ends. The server never waits, so that time passes in steps: each
generates a token for every active sequence, and fills up to ``budget`` tokens with prompts. While a sequence generates
its n tokens, each of the others is prefilled once, and makes one of those steps (or several) longer: that is all that
TPOT needs. A new request waits for the step that is under way, shares its own with prompts that came at the same time,
and waits for a place where the KV cache has room for fewer sequences than there are clients. At the beginning all
clients come at once, and their prompts are prefilled one after another.

Not counted: sequences that lose their place and are prefilled again, and the end of a benchmark, when clients have no
more requests. ``rooftop.simulate`` steps through the same server; a test holds the two together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ClosedLoop:
    """Loads of one server, arrays [R]: ``clients`` with requests of ``prompt`` tokens answered with ``generate``.

    Each client sends ``requests`` of them. ``budget``: most tokens of a step. ``reserved``: share of an answer for which
    there is room when a request is let in; half of it is there in the mean.
    """

    clients: Floats
    prompt: Floats
    generate: Floats
    requests: float = 10.0
    budget: float = 8192.0
    reserved: float = 0.5


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Seconds of a server's steps, and its room: figures and arguments are arrays [R].

    ``generate_s`` takes the batch and the tokens of each cache; ``mixed_s`` the tokens of a prompt, and those two.
    ``kv_tokens`` fit the cache.
    """

    generate_s: Callable[[Floats, Floats], Floats]
    mixed_s: Callable[[Floats, Floats, Floats], Floats]
    kv_tokens: float


@dataclass(frozen=True, kw_only=True)
class ClosedLoopTimes:
    """Mean seconds of requests, arrays [R]; ``active`` sequences have a place at once."""

    ttft_s: Floats
    tpot_s: Floats
    active: Floats


def closed_loop(load: ClosedLoop, costs: StepCosts) -> ClosedLoopTimes:
    """Mean TTFT and TPOT of the loads on servers with these costs."""
    held = load.prompt + load.reserved * load.generate
    active = cast(Floats, np.clip(np.floor(costs.kv_tokens / held), 1.0, load.clients))
    return _steady(load, costs, active)


def _steady(load: ClosedLoop, costs: StepCosts, active: Floats) -> ClosedLoopTimes:
    room = np.maximum(load.budget - active, 1.0)
    chunks = np.ceil(load.prompt / room)
    context = load.prompt + load.generate / 2
    step_s = costs.generate_s(active, context)
    mixed_s = costs.mixed_s(load.prompt / chunks, active, context)
    prompt_s = chunks * np.maximum(mixed_s - step_s, 0.0)
    steps = np.maximum(load.generate - 1.0, 1.0)
    # Of the other prompts, those count that are prefilled while this sequence generates.
    tpot_s = step_s + (active - 1) * prompt_s / (steps + chunks)
    cycle_s = steps * tpot_s + chunks * mixed_s
    # Other prompts come in as many steps as a sequence takes, some in its own.
    together = (active - 1) / (steps + chunks) * chunks
    under_way_s = np.where(active > 1, tpot_s, 0.0)
    own_s = under_way_s + chunks * mixed_s + together * prompt_s
    # A queue for places: the clients that have none wait for as many answers to end.
    queued_s = (load.clients - active) / active * cycle_s
    # At first all come at once: full steps, and half of them in the mean.
    full_s = costs.mixed_s(np.minimum(room, load.prompt * active), active / 2, load.prompt)
    first_s = full_s * (load.prompt * active / room + 1.0) / 2
    share = 1.0 / load.requests
    return ClosedLoopTimes(
        ttft_s=(1 - share) * own_s + share * np.maximum(first_s, full_s) + queued_s, tpot_s=tpot_s, active=active
    )


@dataclass(frozen=True, kw_only=True)
class PrefillServers:
    """``count`` servers that only prefill, ``prompts`` at once in ``prefill_s(tokens of each)``.

    ``transfer_s``: seconds of a prompt's KV on its way to a server that generates.
    """

    count: float
    prompts: float
    prefill_s: Callable[[Floats], Floats]
    transfer_s: Callable[[Floats], Floats]


def disaggregated_loop(load: ClosedLoop, servers: float, costs: StepCosts, prefill: PrefillServers) -> ClosedLoopTimes:
    """Mean TTFT and TPOT where ``servers`` servers generate and others prefill."""
    context = load.prompt + load.generate / 2
    steps = np.maximum(load.generate - 1.0, 1.0)
    most = np.maximum(np.floor(costs.kv_tokens / (load.prompt + load.reserved * load.generate)), 1.0)
    prefill_s = prefill.prefill_s(load.prompt)
    prompt_s = prefill_s / (prefill.prompts * prefill.count)
    own_s = prefill_s + prefill.transfer_s(load.prompt)
    ttft_s = own_s
    active = np.minimum(load.clients / servers, most)
    tpot_s = costs.generate_s(active, context)
    # The batch depends on how many are generating, and that on how long a step is: a few rounds settle it.
    for _ in range(8):
        cycle_s = ttft_s + steps * tpot_s
        active = np.clip(load.clients / servers * steps * tpot_s / cycle_s, 1.0, most)
        tpot_s = costs.generate_s(np.ceil(active), context)
        busy = np.minimum(load.clients * prompt_s / cycle_s, 0.95)
        # Others in front; where prompts come faster than they are prefilled, all clients wait for them.
        waiting_s = np.maximum(prompt_s * busy / (2 * (1 - busy)), load.clients * prompt_s - steps * tpot_s - own_s)
        ttft_s = (ttft_s + own_s + waiting_s) / 2
    share = 1.0 / load.requests
    first_s = own_s + load.clients * prompt_s / 2
    return ClosedLoopTimes(ttft_s=(1 - share) * ttft_s + share * first_s, tpot_s=tpot_s, active=active)
