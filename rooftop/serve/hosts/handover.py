"""Messages over a link (``link``): requests with their tokens, pages, and reports of a process.

Dims: V vocabulary, P pages of a piece.

A request that is handed over has a ticket, a number of its own each time. The process that prefills says

- ``offer``: a request, to be generated; with the first mask of its constraint, if it has one;
- ``pages``: a piece of its KV, when it was ``wanted``;
- ``mask``: the tokens that its constraint allows next;
- ``cancel``: no one wants it any more;
- ``check``: count your pages and ``report``.

The one that generates says ``serving`` (what it serves, once), ``wanted`` (there is room for its KV, or a piece came
damaged), ``arrived`` (all of it is here), ``tokens``, ``lost`` (its pages went to others: prefill it again), ``failed``
(a step, and with it every request) and ``report``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

import rooftop
from rooftop.core.files import open_file, read_bytes
from rooftop.core.records import Record, field_values
from rooftop.core.rounding import ceil_div
from rooftop.scheduling.serving.cache import CachedSequence
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.programs import COPIED
from rooftop.serve.engine.replica import Replica
from rooftop.serve.engine.requests import Constraint, EngineStats, GenerationRequest
from rooftop.serve.engine.running import Running
from rooftop.serve.hosts.link import Buffer, Link
from rooftop.serve.hosts.messages import sampling_fields, sampling_of

#: Bytes at the end of a file of weights that the fingerprint reads.
_SAMPLED = 1 << 20


def offered(running: Running) -> dict[str, Any]:
    """Fields of an ``offer``, without the ticket: all that another process needs to continue a request."""
    sampling = running.request.sampling
    return {
        "prompt": running.request.prompt,
        "generated": running.tokens[len(running.request.prompt) :],
        "stops": sorted(running.stops),
        "seed": running.seed,
        "sampling": sampling_fields(sampling),
    }


def taken(ticket: int, offer: Mapping[str, Any], page_tokens: int, constraint: Constraint | None) -> Running:
    """The offered request in this process, before its KV has arrived. Its tokens are not delivered."""
    sampling = sampling_of(offer["sampling"], constraint)
    request = GenerationRequest(id=ticket, prompt=tuple(offer["prompt"]), sampling=sampling, arrival_s=0.0)
    prompt, generated = len(request.prompt), len(offer["generated"])
    taken = Running(
        request=request,
        deliver=lambda token: None,
        sequence=CachedSequence(
            id=ticket,
            prompt_tokens=prompt,
            max_tokens=request.sampling.max_tokens,
            generated=generated,
            length=prompt + generated - 1,
        ),
        stops=frozenset(offer["stops"]),
        seed=offer["seed"],
        page_tokens=page_tokens,
        cached=False,
    )
    taken.tokens += offer["generated"]
    return taken


def begin_anew(running: Running) -> None:
    """Reset a request that lost its KV: it waits to be prefilled, with the tokens that it has."""
    running.ticket = None
    running.sequence = CachedSequence(
        id=running.request.id,
        prompt_tokens=len(running.request.prompt),
        max_tokens=running.request.sampling.max_tokens,
        generated=running.generated,
    )
    running.extend_keys(len(running.tokens))


def pieces(pages: int) -> int:
    """Number of pieces in which ``pages`` pages are sent."""
    return ceil_div(pages, COPIED)


def page_bytes(replica: Replica, arrays: Sequence[Any], count: int) -> Sequence[Buffer]:
    """The first ``count`` of pages as ``Replica.take`` gives them, of one pool array after the other."""
    assert len(arrays) == len(replica.pool_leaves)
    return [np.asarray(array)[:count].reshape(-1).view(np.uint8).data for array in arrays]


def send_pages(link: Link, ticket: int, replica: Replica, own_pages: Sequence[int], indices: Iterable[int]) -> None:
    """Send the ``indices`` pieces of the pages that a request holds. Called by the thread of ``replica``."""
    for piece in indices:
        pages = np.array(own_pages[piece * COPIED : (piece + 1) * COPIED], np.int32)
        payload = partial(page_bytes, replica, replica.take(pages), len(pages))
        link.send("pages", payload=payload, ticket=ticket, piece=piece)


def page_arrays(replica: Replica, payload: bytearray, count: int) -> list[np.ndarray[Any, Any]] | None:
    """Pages of a payload as ``Replica.put`` takes them: [COPIED, ...]. None if the payload has another size."""
    result, at = [], 0
    for leaf in replica.pool_leaves:
        array = np.zeros((COPIED, *leaf.shape[1:]), leaf.dtype)
        part = array[:count].reshape(-1).view(np.uint8)
        if at + part.size > len(payload):
            return None
        part[:] = np.frombuffer(payload, np.uint8, part.size, at)
        result.append(array)
        at += part.size
    return result if at == len(payload) else None


@dataclass(frozen=True, kw_only=True)
class GeneratorReport(Record):
    """Totals and current state of a generating process; ``problem`` describes a lost page."""

    stats: EngineStats
    problem: str | None = None


#: Fields of ``EngineStats`` that are current; the others are totals.
_NOW = (
    "waiting", "running", "pages_used", "pages", "host_pages_used", "host_pages", "kv_groups", "prefill_pages",
    "prefill_kv_groups",
)  # fmt: skip


def summed(stats: Iterable[EngineStats]) -> EngineStats:
    """Sum of the reports of one engine's processes."""
    first, *others = stats
    result = field_values(first)
    for other in others:
        for name in result.keys() - {"page_tokens", "servers", "program_times"}:
            result[name] += getattr(other, name)
        times = {item.shape: item for item in result["program_times"]}
        for program_time in other.program_times:
            known = times.get(program_time.shape)
            if known is not None:
                program_time = replace(
                    program_time, runs=program_time.runs + known.runs, seconds=program_time.seconds + known.seconds
                )
            times[program_time.shape] = program_time
        result["program_times"] = tuple(times[shape] for shape in sorted(times))
    return EngineStats(**result)


def ended(stats: EngineStats) -> EngineStats:
    """Report of a process that has ended: only its totals."""
    current: dict[str, Any] = dict.fromkeys(_NOW, 0)
    return replace(stats, **current)


def fingerprint(checkpoint: Path) -> str:
    """Digest of a checkpoint: of config.json, and of the size and the end of each file of weights."""
    digest = blake2b(digest_size=16)
    digest.update(read_bytes(checkpoint / "config.json"))
    for path in sorted(checkpoint.glob("*.safetensors")):
        size = path.stat().st_size
        with open_file(path) as file:
            file.seek(max(0, size - _SAMPLED))
            digest.update(f"{path.name} {size} ".encode() + file.read())
    return digest.hexdigest()


def shared_facts(checkpoint: Path, replica: Replica, configuration: Configuration) -> dict[str, Any]:
    """Facts that two processes of one engine must share: the same weights, and pages that can be sent."""
    return {
        "version": rooftop.__version__,
        "checkpoint": fingerprint(checkpoint),
        "weights": configuration.weights_dtype + (" experts" if configuration.only_experts else ""),
        "dtype": replica.decoder.dtype,
        "page_tokens": configuration.page_tokens,
        "pools": [[list(leaf.shape[1:]), str(leaf.dtype)] for leaf in replica.pool_leaves],
    }
