"""The simulator against the engine: the same requests, and every decision of the scheduler beside the other's."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from rooftop.scheduling.serving.cache import CachedSequence as Held
from rooftop.scheduling.serving.groups import GroupedScheduler, GroupedStep
from rooftop.scheduling.serving.scheduler import EngineStep, Policy, Scheduler
from rooftop.serve.client.prediction import PredictionInput, deployment_of
from rooftop.serve.engine.engine import PagedEngine
from rooftop.serve.engine.requests import GenerationRequest, Sampling, Token
from rooftop.simulate.serving.engine import simulate
from rooftop.simulate.serving.records import Deployment
from rooftop.simulate.serving.traces import RequestTrace
from tests.serve.test_groups import GROUPED
from tests.support.engines import CONFIGURATION, again, checkpoint, engine

PAGE_TOKENS, GROUPS, LONGEST = 4, 2, 32


@dataclass(frozen=True, kw_only=True)
class SecondsOfOne:
    """Every step takes a second."""

    page_tokens: int = PAGE_TOKENS
    kv_tokens: int
    prefill_kv_tokens: int = 0
    kv_groups: int = GROUPS
    prefill_kv_groups: int = GROUPS

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return 1.0

    def generate_s(self, batch: int, context_tokens: int) -> float:
        return 1.0

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        return 1.0

    def transfer_s(self, tokens: int) -> float:
        return 0.0

    def host_copy_s(self, tokens: int) -> float:
        return 0.0


class Decisions:
    """Decisions of one scheduler, step by step, and the number of steps before each request came."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps, self.came = list[Any](), dict[int, int]()
        self.new = list[int]()
        submit, next_step, complete = GroupedScheduler.submit, GroupedScheduler.next_step, GroupedScheduler.complete

        def submitted(scheduler: GroupedScheduler, sequence: Held, *, first: bool = False) -> None:
            self.new.append(sequence.id)
            submit(scheduler, sequence, first=first)

        def decided(scheduler: GroupedScheduler) -> GroupedStep | None:
            self.came |= dict.fromkeys(self.new, len(self.steps))
            self.new.clear()
            return next_step(scheduler)

        def completed(scheduler: GroupedScheduler, step: EngineStep, repeats: int = 1) -> None:
            assert isinstance(step, GroupedStep)
            self.steps += [self._of(step)] * repeats
            complete(scheduler, step, repeats)
            self.after(len(self.steps))

        patch.setattr(GroupedScheduler, "submit", submitted)
        patch.setattr(GroupedScheduler, "next_step", decided)
        patch.setattr(GroupedScheduler, "complete", completed)

    def after(self, steps: int) -> None:
        """So many steps are over."""

    @staticmethod
    def _of(step: GroupedStep) -> Any:
        return (
            [(chunk.sequence.id, chunk.sequence.group, chunk.start, chunk.tokens) for chunk in step.chunks],
            [None if part is None else part.generating for part in step.parts],
            [sequence.id for sequence in step.preempted],
            [sequence.id for sequence in step.resumed],
        )


class Rounds(Decisions):
    """The same of servers that take their steps at once: rounds of them, each with what every server did.

    ``steps`` has the server's number and its step; ``came`` counts rounds.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.steps, self.came, self.new = list[Any](), dict[int, int](), list[int]()
        self.rounds, self.taken = 0, 0
        servers = list[Scheduler]()
        submit, next_step, complete = Scheduler.submit, Scheduler.next_step, Scheduler.complete

        def submitted(scheduler: Scheduler, sequence: Held, *, first: bool = False) -> None:
            if sequence.id not in self.came and sequence.id not in self.new:
                self.new.append(sequence.id)
            submit(scheduler, sequence, first=first)

        def decided(scheduler: Scheduler, others: int = 0, *, generate: bool = True) -> EngineStep | None:
            if scheduler not in servers:
                servers.append(scheduler)
            if scheduler is servers[0]:
                self.rounds += self.taken
                self.taken = 0
                self.came |= dict.fromkeys(self.new, self.rounds)
                self.new.clear()
            return next_step(scheduler, others, generate=generate)

        def completed(scheduler: Scheduler, step: EngineStep, repeats: int = 1) -> None:
            did = (
                [(chunk.sequence.id, chunk.start, chunk.tokens) for chunk in step.chunks],
                step.generating,
                [sequence.id for sequence in step.preempted],
                [sequence.id for sequence in step.resumed],
            )
            self.steps += [(self.rounds + repeat, servers.index(scheduler), did) for repeat in range(repeats)]
            complete(scheduler, step, repeats)
            if not self.taken:
                self.taken = repeats
                self.after(self.rounds + repeats)

        patch.setattr(Scheduler, "submit", submitted)
        patch.setattr(Scheduler, "next_step", decided)
        patch.setattr(Scheduler, "complete", completed)


@pytest.fixture(scope="module", params=["copies", pytest.param("parts", marks=pytest.mark.slow)])
def several(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PagedEngine:
    """Two copies, or a part that prefills and one that generates, with 12 pages each."""
    if request.param == "copies":
        how: dict[str, Any] = {"mesh": (("data", 2),), "policy": Policy(max_batch=8, chunk_tokens=12)}
    else:
        how = {"prefill_devices": 1, "policy": Policy(max_batch=4, batching="disaggregated")}
    configuration = replace(CONFIGURATION, prefix_cache=False, pages=12, host_pages=16, **how)
    return engine(checkpoint("llama", tmp_path_factory.mktemp("several")), configuration)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_servers_of_one_process_are_simulated_as_they_step(several: PagedEngine, preemption: str) -> None:
    """Who gets a request, and what each server does in every step."""
    policy = replace(several.policy, preemption=preemption)
    serving, chance = again(several, policy=policy), random.Random(repr(policy))
    prompts = [[chance.randrange(96) for _ in range(chance.randint(3, 12))] for _ in range(16)]
    outputs = [chance.randint(8, 20) for _ in prompts]
    trace = RequestTrace(
        arrival_s=np.sort(np.array([chance.choice([0.0, 0.0, 5.0, 9.5, 17.0, 200.0, 203.0]) for _ in prompts])),
        prompt_tokens=np.array([len(prompt) for prompt in prompts]),
        output_tokens=np.array(outputs),
    )
    room = 12 * PAGE_TOKENS
    reported = PredictionInput(values={("rooftop_servers", ()): serving.stats().servers})
    times = SecondsOfOne(kv_tokens=room, prefill_kv_tokens=room, kv_groups=1, prefill_kv_groups=1)
    deployment = deployment_of(reported, times, policy=policy, prefix_cache=False)
    with pytest.MonkeyPatch.context() as patch:
        simulated = Rounds(patch)
        simulation = simulate(trace, replace(deployment, host_kv_tokens=16 * PAGE_TOKENS))
    with pytest.MonkeyPatch.context() as patch:
        ran = Rounds(patch)
        run(serving, prompts, outputs, simulated.came, ran)
    assert ran.came == simulated.came
    assert sorted(ran.steps, key=lambda step: step[:2]) == sorted(simulated.steps, key=lambda step: step[:2])
    assert {server for _, server, _ in ran.steps} == {0, 1}
    stats = serving.stats()
    assert sum(simulation.requests.preemptions) == stats.preemptions > 0
    assert stats.steps == len({number for number, *_ in ran.steps})
    assert (stats.pages, stats.prefill_pages) == (24, 12 if policy.batching == "disaggregated" else 0)
    assert stats.kv_groups == 1 and stats.busy_s <= stats.step_s


@pytest.fixture(scope="module")
def grouped(tmp_path_factory: pytest.TempPathFactory) -> PagedEngine:
    return engine(checkpoint("llama", tmp_path_factory.mktemp("simulated")), GROUPED)


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("chunk_tokens", [12, None])
def test_the_simulator_decides_as_the_engine_does(
    grouped: PagedEngine, chunk_tokens: int | None, preemption: str, prefixes: bool
) -> None:
    """Which group gets a request and when, its pieces, and who loses its place, in every step, with short caches."""
    chance = random.Random(repr((chunk_tokens, preemption, prefixes)))
    count, policy = 16, Policy(max_batch=4, chunk_tokens=chunk_tokens, preemption=preemption)
    shared = [[chance.randrange(80) for _ in range(LONGEST)] for _ in range(3)]
    prompts = list[list[int]]()
    for _ in range(count):
        common, own = chance.choice(shared)[: chance.randrange(0, 10)], chance.randint(3, 9)
        prompts.append(common + [chance.randrange(80, 96) for _ in range(own)])
    outputs = [min(chance.randint(8, 20), LONGEST - len(prompt)) for prompt in prompts]
    arrivals = np.sort(np.array([chance.choice([0.0, 0.0, 5.0, 9.5, 17.0, 200.0, 203.0]) for _ in prompts]))
    trace = RequestTrace(
        arrival_s=arrivals,
        prompt_tokens=np.array([len(prompt) for prompt in prompts]),
        output_tokens=np.array(outputs),
        hashes=tuple(keys_of(prompt, number, LONGEST) for number, prompt in enumerate(prompts)),
        hash_tokens=PAGE_TOKENS,
    )
    pages = 16
    deployment = Deployment(
        policy=policy,
        times=SecondsOfOne(kv_tokens=pages * PAGE_TOKENS),
        prefix_cache=prefixes,
        host_kv_tokens=16 * PAGE_TOKENS,
    )
    with pytest.MonkeyPatch.context() as patch:
        simulated = Decisions(patch)
        simulation = simulate(trace, deployment)
    with pytest.MonkeyPatch.context() as patch:
        ran = Decisions(patch)
        serving = again(grouped, pages=pages, host_pages=16, policy=policy, prefix_cache=prefixes)
        run(serving, prompts, outputs, simulated.came, ran)
    assert ran.came == simulated.came
    assert ran.steps == simulated.steps
    assert sum(simulation.requests.preemptions) == serving.stats().preemptions > 0
    assert (sum(simulation.requests.cached) > 0) == prefixes == (serving.stats().prefix_tokens > 0)
    assert len({group for chunks, *_ in ran.steps for _, group, _, _ in chunks}) == GROUPS


def keys_of(prompt: Sequence[int], number: int, longest: int) -> tuple[int, ...]:
    """A number for each page of a text: equal where pages are, and all before them; answers are like no other."""
    keys = [hash(tuple(prompt[:end])) % 2**40 for end in range(PAGE_TOKENS, len(prompt) + 1, PAGE_TOKENS)]
    return (*keys, *(2**41 + number * longest + page for page in range(longest // PAGE_TOKENS - len(keys))))


def run(
    serving: PagedEngine,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[int],
    came: dict[int, int],
    decisions: Decisions,
) -> None:
    """Each request comes to the engine when so many steps are over as when it came to the simulator."""
    left, ended = len(prompts), threading.Event()

    def deliver(token: Token) -> None:
        nonlocal left
        assert token.finish in (None, "length"), token
        left -= token.finish is not None
        if not left:
            ended.set()

    def submit(steps: int) -> None:
        for number in [number for number, at in came.items() if at == steps]:
            how = Sampling(max_tokens=outputs[number], temperature=0.0)
            request = GenerationRequest(id=number, prompt=tuple(prompts[number]), sampling=how, arrival_s=0.0)
            serving.submit(request, deliver)

    decisions.after = submit  # type: ignore[method-assign]
    serving.start()
    # The first ones come together, while the engine is held.
    release, begun = threading.Event(), threading.Event()

    def hold() -> None:
        release.set()
        begun.wait(60)

    serving._ask(hold)
    assert release.wait(60)
    submit(0)
    begun.set()
    assert ended.wait(120)
    assert serving.drain(60)
    serving.check()
