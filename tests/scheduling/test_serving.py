"""The serving policy under an engine that really keeps tokens in pages: nothing is lost, mixed up or leaked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.cache import CachedSequence, KvCache
from rooftop.scheduling.serving.prefixes import PagePool, PrefixCache
from rooftop.scheduling.serving.scheduler import EngineStep, Policy, Routing, Scheduler, StaticScheduler
from tests.support.examples import examples

Tokens = tuple[int, ...]


def next_token(history: Tokens) -> int:
    """The model's next token after ``history``: any function of all of it."""
    return (sum(history) * 7 + len(history)) % 5


def answer(prompt: Tokens, tokens: int) -> Tokens:
    history = prompt
    for _ in range(tokens):
        history += (next_token(history),)
    return history


def sequence(number: int, prompt: Tokens, tokens: int, page_tokens: int) -> CachedSequence:
    """A request whose keys are the very tokens of each page and all before it, generated ones included."""
    history = answer(prompt, tokens)
    ends = range(page_tokens, len(history) + 1, page_tokens)
    return CachedSequence(
        id=number, prompt_tokens=len(prompt), max_tokens=tokens, keys=tuple(history[:end] for end in ends)
    )  # fmt: skip


class Engine:
    """Executes steps on pages that hold, for each token, the whole history up to it: a wrong page cannot go unseen."""

    def __init__(self, scheduler: Scheduler | StaticScheduler, prompts: dict[int, Tokens]) -> None:
        self.scheduler = scheduler
        self.page_tokens = scheduler.cache.page_tokens
        self.hbm: dict[int, list[Tokens]] = {}
        self.host: dict[int, list[Tokens]] = {}
        self.history = dict(prompts)

    def execute(self, step: EngineStep) -> list[CachedSequence]:
        """Do what the step says; returns the sequences that got a token."""
        for copy in step.copies:
            source, target = (self.hbm, self.host) if copy.to_host else (self.host, self.hbm)
            for one, other in zip(copy.source, copy.target, strict=True):
                target[other] = list(source[one])
        for chunk in step.chunks:
            for position in range(chunk.start, chunk.start + chunk.tokens):
                self.write(chunk.sequence, position)
        generating = list(self.scheduler.generating) if step.batch else []
        assert len(generating) == step.generating
        for one in generating:
            self.write(one, self.scheduler.kv_tokens(one))
        first = [chunk.sequence for chunk in step.chunks if chunk.last]
        for one in generating + first:
            self.history[one.id] += (next_token(self.history[one.id]),)
        return generating + first

    def write(self, one: CachedSequence, position: int) -> None:
        """The KV of a token, which needs that of all tokens before it."""
        history = self.history[one.id]
        for before in range(position):
            page, slot = divmod(before, self.page_tokens)
            assert self.hbm[one.pages[page]][slot] == history[: before + 1]
        page, slot = divmod(position, self.page_tokens)
        assert self.scheduler.cache.device.users(one.pages[page]) == 1, "no one else reads a page that is written"
        tokens = self.hbm.setdefault(one.pages[page], [])
        del tokens[slot:]
        tokens.append(history[: position + 1])


@st.composite
def workloads(draw: st.DrawFn) -> dict[str, Any]:
    """Prompts that begin alike, a cache that is just large enough for each alone, and any policy."""
    page_tokens = draw(st.integers(1, 4))
    openings = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=8), min_size=1, max_size=3))
    requests = draw(
        st.lists(
            st.tuples(st.sampled_from(openings), st.lists(st.integers(0, 1), max_size=6), st.integers(1, 8)),
            min_size=1,
            max_size=10,
        )
    )
    prompts = [tuple(opening) + tuple(rest) for opening, rest, _ in requests]
    outputs = [tokens for _, _, tokens in requests]
    # Later turns of a conversation: the prompt is an earlier prompt with its answer.
    for earlier in draw(st.lists(st.integers(0, len(requests) - 1), max_size=3)):
        prompts.append((*answer(prompts[earlier], outputs[earlier]), 1))
        outputs.append(2)
    least = max(-(-(len(p) + n - 1) // page_tokens) for p, n in zip(prompts, outputs, strict=True))
    max_batch = draw(st.integers(1, 5))
    return {
        "prompts": prompts,
        "outputs": outputs,
        "page_tokens": page_tokens,
        "pages": least + draw(st.integers(0, 8)),
        "host_pages": draw(st.sampled_from([0, 1, 3, 20])),
        "prefixes": draw(st.booleans()),
        "policy": Policy(
            max_batch=max_batch,
            chunk_tokens=draw(st.sampled_from([None, max_batch + 1, max_batch + 3])),
            preemption=draw(st.sampled_from(["recompute", "swap"])),
        ),
        "gaps": draw(st.lists(st.integers(0, 4), min_size=len(prompts), max_size=len(prompts))),
        "abandoned": draw(st.sets(st.integers(0, len(prompts) - 1), max_size=2)),
    }


def check_cache(cache: KvCache, running: list[CachedSequence], swapped: list[CachedSequence]) -> None:
    """Every page is free, idle or held by exactly those who say so."""
    for pool, holders in ((cache.device, [s.pages for s in running]), (cache.host, [s.host_pages for s in swapped])):
        users: dict[int, int] = {}
        for pages in holders:
            assert len(set(pages)) == len(pages)
            for page in pages:
                users[page] = users.get(page, 0) + 1
        assert [pool.users(page) for page in range(pool.size)] == [users.get(page, 0) for page in range(pool.size)]
        assert pool.used == len(users)
        assert min(pool.free, pool.idle, pool.used) >= 0
        assert pool.free + pool.idle + pool.used == pool.size


def check_idle(cache: KvCache) -> None:
    """With no sequence left, every page that is not free is one that the prefix cache can give up."""
    if cache.prefixes is not None:
        cache.prefixes.evict(cache.device.idle)
        cache.prefixes.evict_host(cache.host.idle)
    assert (cache.device.free, cache.host.free) == (cache.device.size, cache.host.size)


@settings(max_examples=examples(400))
@given(workloads())
def test_every_token_once_and_no_page_lost(load: dict[str, Any]) -> None:
    page_tokens = load["page_tokens"]
    cache = KvCache(
        page_tokens=page_tokens, pages=load["pages"], host_pages=load["host_pages"], prefixes=load["prefixes"]
    )  # fmt: skip
    scheduler = Scheduler(load["policy"], cache)
    sequences = [
        sequence(number, prompt, tokens, page_tokens)
        for number, (prompt, tokens) in enumerate(zip(load["prompts"], load["outputs"], strict=True))
    ]
    assert all(scheduler.refusal(s.prompt_tokens, s.max_tokens) is None for s in sequences)
    engine = Engine(scheduler, dict(enumerate(load["prompts"])))
    coming = [s for s, gap in zip(sequences, load["gaps"], strict=True) for s in [None] * gap + [s]]
    tokens = dict.fromkeys(range(len(sequences)), 0)
    ended: set[int] = set()
    steps = 0
    while coming or scheduler.outstanding:
        steps += 1
        assert steps < 3000, "it goes on for ever"
        if coming and (new := coming.pop(0)) is not None:
            scheduler.submit(new)
        step = scheduler.next_step()
        if step is not None:
            got = engine.execute(step)
            scheduler.complete(step)
            for one in got:
                tokens[one.id] += 1
                gone = one.id in load["abandoned"] and tokens[one.id] == 2
                if tokens[one.id] == one.max_tokens or gone:
                    scheduler.finish(one)
                    ended.add(one.id)
                    assert one.generated == tokens[one.id]
        running = [*scheduler.prefilling, *scheduler.generating]
        assert len(running) <= load["policy"].max_batch
        check_cache(cache, running, list(scheduler.swapped))
    assert ended == set(range(len(sequences)))
    for one in sequences:
        allowed = 2 if one.id in load["abandoned"] else one.max_tokens
        assert tokens[one.id] == min(allowed, one.max_tokens)
        assert engine.history[one.id] == answer(load["prompts"][one.id], tokens[one.id])
    assert cache.device.used == cache.host.used == 0
    check_idle(cache)


@settings(max_examples=examples(200))
@given(workloads())
def test_disaggregated_servers_pass_sequences_on(load: dict[str, Any]) -> None:
    page_tokens = load["page_tokens"]
    policy = Policy(
        max_batch=load["policy"].max_batch, batching="disaggregated", preemption=load["policy"].preemption
    )  # fmt: skip
    front_cache = KvCache(page_tokens=page_tokens, pages=load["pages"], prefixes=load["prefixes"])
    back_cache = KvCache(page_tokens=page_tokens, pages=load["pages"], host_pages=load["host_pages"])
    front, back = Scheduler(policy, front_cache, "prefill"), Scheduler(policy, back_cache, "generate")
    sequences = [
        sequence(number, prompt, tokens, page_tokens)
        for number, (prompt, tokens) in enumerate(zip(load["prompts"], load["outputs"], strict=True))
    ]
    here, there = Engine(front, dict(enumerate(load["prompts"]))), Engine(back, {})
    there.history = here.history
    coming = list(sequences)
    tokens = dict.fromkeys(range(len(sequences)), 0)
    on_the_way: list[CachedSequence] = []
    for _ in range(3000):
        if not (coming or front.outstanding or back.outstanding or front.to_send):
            break
        if coming:
            front.submit(coming.pop(0))
        if (step := front.next_step()) is not None:
            assert not step.batch
            got = here.execute(step)
            front.complete(step)
            for one in got:
                tokens[one.id] += 1
                if tokens[one.id] == one.max_tokens:
                    front.finish(one)
                else:
                    back.submit(one)
        for one in on_the_way:  # what was admitted a step ago has arrived
            for source, target in zip(front.to_send[one], one.pages, strict=True):
                there.hbm[target] = list(here.hbm[source])
            front.sent(one)
            back.arrived(one)
        on_the_way = back.receive()
        if (step := back.next_step()) is not None:
            assert not step.chunks, "a generate server never prefills"
            for one in there.execute(step):
                tokens[one.id] += 1
            generating = list(back.generating)
            back.complete(step)
            for one in step.preempted:
                if not one.host_pages:
                    front.submit(one, first=True)
            for one in generating:
                if tokens[one.id] == one.max_tokens:
                    back.finish(one)
        check_cache(back_cache, [*back.generating, *back.incoming], list(back.swapped))
    assert tokens == {s.id: s.max_tokens for s in sequences}
    for one in sequences:
        assert here.history[one.id] == answer(load["prompts"][one.id], one.max_tokens)
    assert front_cache.device.used == back_cache.device.used == back_cache.host.used == 0
    check_idle(front_cache)
    check_idle(back_cache)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 6)), min_size=1, max_size=8), st.integers(1, 4))
def test_static_batches_end_together(requests: list[tuple[int, int]], max_batch: int) -> None:
    cache = KvCache(page_tokens=2, pages=12)
    scheduler = StaticScheduler(Policy(max_batch=max_batch, batching="static"), cache)
    prompts = {number: (1,) * prompt for number, (prompt, _) in enumerate(requests)}
    engine = Engine(scheduler, prompts)
    for number, (prompt, tokens) in enumerate(requests):
        scheduler.submit(sequence(number, (1,) * prompt, tokens, 2))
    tokens = dict.fromkeys(prompts, 0)
    while (step := scheduler.next_step()) is not None:
        if step.chunks:
            longest = max(one.prompt_tokens for one in scheduler.batch)
            assert step.prefill == ((longest, 0),) * len(step.chunks)
        else:
            assert step.batch == len(scheduler.batch) >= step.generating
        got = engine.execute(step)
        scheduler.complete(step)
        for one in got:
            tokens[one.id] += 1
            if tokens[one.id] == one.max_tokens:
                scheduler.finish(one)
    assert tokens == {number: out for number, (_, out) in enumerate(requests)}
    assert cache.device.free == cache.device.size


def test_prefill_goes_first_and_chunks_fill_up() -> None:
    def started(chunk_tokens: int | None) -> Iterator[EngineStep]:
        scheduler = Scheduler(
            Policy(max_batch=4, chunk_tokens=chunk_tokens), KvCache(page_tokens=4, pages=100)
        )  # fmt: skip
        scheduler.submit(CachedSequence(id=0, prompt_tokens=3, max_tokens=50))
        for number in range(1, 4):
            step = scheduler.next_step()
            assert step is not None
            scheduler.complete(step)
            scheduler.submit(CachedSequence(id=number, prompt_tokens=20, max_tokens=50))
            yield step
        for _ in range(6):
            step = scheduler.next_step()
            assert step is not None
            scheduler.complete(step)
            yield step

    whole = [(step.prefill, step.batch) for step in started(None)]
    assert whole[:4] == [(((3, 0),), 0), (((20, 0),), 0), (((20, 0),), 0), (((20, 0),), 0)]
    assert all(step == ((), 4) for step in whole[4:])
    chunked = [(step.prefill, step.batch) for step in started(8)]
    assert chunked[:5] == [
        (((3, 0),), 0),
        (((7, 0),), 1),
        (((7, 7),), 1),
        (((6, 14), (1, 0)), 1),
        (((6, 1),), 2),
    ]


def test_the_last_admitted_is_preempted_and_comes_back_first() -> None:
    scheduler = Scheduler(Policy(max_batch=4), KvCache(page_tokens=2, pages=6))
    first, second, third = (CachedSequence(id=number, prompt_tokens=2, max_tokens=9) for number in range(3))
    for one in (first, second):
        scheduler.submit(one)
    lost: list[CachedSequence] = []
    for _ in range(20):
        step = scheduler.next_step()
        assert step is not None
        scheduler.complete(step)
        lost += step.preempted
        if lost:
            break
    assert lost == [second]
    assert second.generated > 1
    scheduler.submit(third)
    assert list(scheduler.waiting) == [second, third]
    assert second.target == 2 + second.generated


@settings(max_examples=examples(300))
@given(
    st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.booleans()), max_size=30),
    st.integers(2, 8),
)
def test_prefixes_are_the_least_recently_used_first(uses: list[tuple[list[int], bool]], size: int) -> None:
    """Against a model with one entry a page: of the pages with none below them, the one used longest ago goes."""
    device, host = PagePool(size), PagePool(0)
    cache = PrefixCache(device, host)
    used_at: dict[Tokens, int] = {}
    for now, (content, _) in enumerate(uses):
        content = content[:size]
        keys = tuple(tuple(content[: end + 1]) for end in range(len(content)))
        expected = sum(1 for key in keys if key in used_at)
        assert cache.match(keys) == expected
        on_device, on_host = cache.find(keys)
        assert len(on_device) == expected
        assert not on_host
        device.share(on_device)
        for key in keys[:expected]:
            used_at[key] = now
        missing = len(keys) - expected - device.free
        if missing > 0:
            cache.evict(missing)
            for _ in range(missing):
                leaves = [k for k in used_at if k not in keys and not any(o[: len(k)] == k != o for o in used_at)]
                del used_at[min(leaves, key=lambda k: (used_at[k], -len(k)))]
        pages = cache.insert(keys, on_device + device.take(len(keys) - expected))
        for key in keys:
            used_at[key] = now
        device.release(pages)
        cache.touch(keys)
        every = {tuple(k) for k in used_at}
        assert device.idle == len(every)
        for key in every:
            assert cache.match(tuple(key[: end + 1] for end in range(len(key)))) == len(key)


def test_prefixes_move_to_the_host_and_back() -> None:
    cache = KvCache(page_tokens=2, pages=4, host_pages=4, prefixes=True)
    scheduler = Scheduler(Policy(max_batch=1), cache)
    prompts = {0: (1,) * 7, 1: (0,) * 7, 2: (1,) * 7}
    engine = Engine(scheduler, prompts)
    cached, copied = [], []
    for number, prompt in prompts.items():
        one = sequence(number, prompt, 1, 2)
        scheduler.submit(one)
        step = scheduler.next_step()
        assert step is not None
        engine.execute(step)
        scheduler.complete(step)
        scheduler.finish(one)
        cached.append(one.cached)
        copied.append([copy.to_host for copy in step.copies])
    assert cached == [0, 0, 6]
    assert copied[0] == []
    assert True in copied[1]
    assert False in copied[2]


def test_routing() -> None:
    turns = Routing(kind="round_robin")
    assert [turns.choose(number, [9, 0, 0]) for number in range(4)] == [0, 1, 2, 0]
    least = Routing()
    assert least.choose(0, [3, 1, 2]) == 1
    assert [least.choose(number, [1, 1]) for number in range(3)] == [0, 1, 0], "ties rotate"
    affinity = Routing(kind="affinity")
    assert affinity.choose(0, [3, 1, 2], [0, 0, 64]) == 2
    assert affinity.choose(0, [1, 1, 30], [0, 0, 64]) == 0, "unless it has far more to do than the others"
    assert affinity.choose(0, [3, 1, 2], [0, 0, 0]) == 1


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"max_batch": 0}, "max_batch"),
        ({"max_batch": 4, "batching": "continous"}, "batching"),
        ({"max_batch": 4, "preemption": "drop"}, "preemption"),
        ({"max_batch": 4, "chunk_tokens": 4}, "chunk_tokens"),
        ({"max_batch": 4, "chunk_tokens": 64, "batching": "static"}, "chunk_tokens"),
    ],
)
def test_policies_that_cannot_be(wrong: dict[str, Any], field: str) -> None:
    with pytest.raises(RooftopError) as error:
        Policy(**wrong)
    assert error.value.field == field


def test_a_pool_of_any_size_takes_no_room_of_its_own() -> None:
    pool = PagePool(10**15)
    pages = pool.take(3)
    assert (pool.free, pool.used) == (10**15 - 3, 3)
    pool.release(pages[:2])
    assert pool.take(3)[:2] == pages[:2], "pages given back are taken first"
    with pytest.raises(IndexError, match="free"):
        PagePool(2).take(3)


def test_what_never_fits_is_refused() -> None:
    scheduler = Scheduler(Policy(max_batch=1), KvCache(page_tokens=16, pages=10))
    assert scheduler.refusal(100, 61) is None
    assert scheduler.refusal(100, 62) == "161 tokens of KV take 11 pages of 10"
    with pytest.raises(RooftopError):
        CachedSequence(id=0, prompt_tokens=0, max_tokens=1)
