"""A sequence that is paused keeps its pages, gets no tokens, and goes on where it was."""

from __future__ import annotations

import pytest

from rooftop.scheduling.serving.cache import CachedSequence, KvCache
from rooftop.scheduling.serving.groups import AnyScheduler, GroupedScheduler
from rooftop.scheduling.serving.scheduler import Policy, Scheduler


def schedulers() -> list[AnyScheduler]:
    policy = Policy(max_batch=4, chunk_tokens=64)
    caches = [KvCache(page_tokens=4, pages=16, first=16 * group) for group in range(2)]
    return [Scheduler(policy, KvCache(page_tokens=4, pages=16)), GroupedScheduler(policy, caches)]


@pytest.mark.parametrize("at", [0, 1])
def test_a_paused_sequence_keeps_its_pages_and_goes_on(at: int) -> None:
    scheduler = schedulers()[at]
    one, two = (CachedSequence(id=id, prompt_tokens=6, max_tokens=20) for id in (1, 2))

    def steps(count: int) -> list[int]:
        generating = []
        for _ in range(count):
            step = scheduler.next_step()
            assert step is not None
            generating.append(step.generating)
            scheduler.complete(step)
        return generating

    def kv_tokens(sequence: CachedSequence) -> int:
        return scheduler.groups[sequence.group].kv_tokens(sequence)

    scheduler.submit(one)
    scheduler.submit(two)
    assert steps(3)[-1] == 2
    scheduler.pause(one)
    pages, tokens, others = list(one.pages), kv_tokens(one), kv_tokens(two)
    assert one in scheduler.paused and one not in scheduler.generating
    assert steps(6) == [1] * 6
    assert (one.pages, kv_tokens(one), kv_tokens(two)) == (pages, tokens, others + 6)
    scheduler.resume(one)
    assert steps(4) == [2] * 4
    assert (kv_tokens(one), kv_tokens(two)) == (tokens + 4, others + 10)
    # One that is paused can end, and then no page is in use.
    scheduler.pause(two)
    for sequence in (one, two):
        scheduler.finish(sequence)
    assert scheduler.next_step() is None and scheduler.outstanding == 0
    assert all(cache.device.used == 0 for cache in scheduler.caches)


def test_a_server_whose_sequences_are_all_paused_rests() -> None:
    scheduler = schedulers()[0]
    sequence = CachedSequence(id=1, prompt_tokens=6, max_tokens=20)
    scheduler.submit(sequence)
    step = scheduler.next_step()
    assert step is not None
    scheduler.complete(step)
    scheduler.pause(sequence)
    assert scheduler.next_step() is None and scheduler.outstanding == 1
    scheduler.resume(sequence)
    assert scheduler.next_step() is not None
