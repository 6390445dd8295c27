"""Clients that wait for their answers: the simulation by hand, and the closed form of its means next to it."""

from __future__ import annotations

import numpy as np
import pytest

from rooftop.core.errors import RooftopError
from rooftop.plan.serving.engines.closed_loop import (
    ClosedLoop,
    LoopSteps,
    LoopTimes,
    PrefillServers,
    StepCosts,
    closed_loop,
    disaggregated_loop,
    loop_times,
)
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.scheduling.serving.times import FrontEnd
from rooftop.simulate.serving.engine import simulate
from rooftop.simulate.serving.metrics import ServingMetrics, Targets
from rooftop.simulate.serving.records import Deployment
from rooftop.simulate.serving.traces import Lengths, RequestTrace, closed_trace
from tests.simulate.test_serving import AffineTimes


def closed(clients: int, requests: int, prompt: int, output: int, *, shortest: float = 1.0) -> RequestTrace:
    return closed_trace(
        clients=clients,
        requests=requests,
        prompt=Lengths(low=int(shortest * prompt), high=prompt),
        output=Lengths(low=int(shortest * output), high=output),
    )


def served(
    trace: RequestTrace, times: AffineTimes, policy: Policy, front_end: FrontEnd | None = None, **servers: int
) -> ServingMetrics:
    simulation = simulate(trace, Deployment(policy=policy, times=times, front_end=front_end or FrontEnd(), **servers))
    return ServingMetrics(simulation=simulation, targets=Targets())


def test_one_client_sends_when_it_has_its_answer() -> None:
    times = AffineTimes(context_token_s=0.0)
    metrics = served(closed(1, 3, 100, 5), times, Policy(max_batch=8))
    prefill_s, step_s = times.prefill_s([(100, 0)]), times.generate_s(1, 0)
    answer_s = prefill_s + 4 * step_s
    assert metrics.simulation.trace.arrival_s == pytest.approx([0.0, answer_s, 2 * answer_s])
    assert metrics.ttft_s == pytest.approx([prefill_s] * 3)
    assert metrics.tpot_s == pytest.approx([step_s] * 3)


@pytest.mark.parametrize("servers", [{}, {"replicas": 2}, {"replicas": 1, "prefill_servers": 1}])
def test_there_are_never_more_requests_than_clients(servers: dict[str, int]) -> None:
    batching = "disaggregated" if "prefill_servers" in servers else "interleaved"
    metrics = served(
        closed(7, 60, 200, 40, shortest=0.5), AffineTimes(), Policy(max_batch=4, batching=batching), **servers
    )
    arrival_s, last_s = metrics.simulation.trace.arrival_s, np.array(metrics.simulation.requests.last_s)
    assert metrics.finished == 60
    for now in arrival_s:
        assert np.sum((arrival_s <= now) & (last_s > now)) <= 7
    # After the first seven each comes at the end of an answer.
    assert set(arrival_s[7:]) <= set(last_s)


def test_the_front_end_takes_one_request_after_another() -> None:
    times, front_end = AffineTimes(context_token_s=0.0), FrontEnd(request_s=1.0, token_s=0.01)
    metrics = served(closed(3, 3, 100, 1), times, Policy(max_batch=8), front_end)
    assert metrics.ttft_s == pytest.approx([(1 + number) * 2.0 + times.prefill_s([(100, 0)]) for number in range(3)])


def test_a_refused_request_makes_room_for_the_next() -> None:
    trace = RequestTrace(
        arrival_s=np.zeros(3), prompt_tokens=np.array([10**6, 100, 100]), output_tokens=np.full(3, 5), clients=1
    )
    metrics = served(trace, AffineTimes(), Policy(max_batch=8))
    assert (metrics.finished, set(metrics.simulation.requests.refused)) == (2, {0})


@pytest.mark.parametrize(("clients", "requests", "field"), [(0, 10, "clients"), (4, 3, "requests")])
def test_loops_that_cannot_be(clients: int, requests: int, field: str) -> None:
    with pytest.raises(RooftopError) as caught:
        closed(clients, requests, 10, 10)
    assert caught.value.field == field


BUDGET = 4096
#: Clients, tokens of a prompt and of an answer, tokens that fit the cache.
LOADS = [
    (1, 1024, 256, 10**7),
    (8, 1024, 256, 10**7),
    (64, 1024, 1024, 10**7),
    (64, 1024, 128, 10**7),
    (16, 8192, 512, 10**7),
    (32, 3000, 512, 10**7),
    (32, 8192, 512, 100_000),
]


def in_closed_form(
    clients: int, prompt: int, output: int, times: AffineTimes, front_end: FrontEnd | None = None
) -> LoopTimes:
    load = ClosedLoop(
        clients=np.array([float(clients)]),
        prompt=np.array([0.9 * prompt]),
        generate=np.array([0.9 * output]),
        budget=BUDGET,
    )
    costs = StepCosts(
        generate_s=lambda batch, context: (
            times.generate_base_s + times.generate_seq_s * batch + times.context_token_s * batch * context
        ),
        mixed_s=lambda tokens, count, batch, context: (
            times.generate_base_s
            + times.generate_seq_s * batch
            + times.context_token_s * batch * context
            + times.prefill_token_s * tokens * count
        ),
        kv_tokens=float(times.kv_tokens),
    )
    front_s = (front_end or FrontEnd()).seconds(0.9 * prompt)
    return loop_times(load, LoopSteps.of(load, costs).with_overheads(0.0, 0.0, front_s))


@pytest.mark.parametrize("front_end", [None, FrontEnd(request_s=8e-3, token_s=12e-6)])
@pytest.mark.parametrize(("clients", "prompt", "output", "room"), LOADS)
def test_the_closed_form_has_the_means_of_the_simulation(
    clients: int, prompt: int, output: int, room: int, front_end: FrontEnd | None
) -> None:
    times = AffineTimes(kv_tokens=room, prefill_kv_tokens=room)
    policy = Policy(max_batch=clients, chunk_tokens=BUDGET)
    metrics = served(closed(clients, 10 * clients, prompt, output, shortest=0.8), times, policy, front_end)
    predicted = in_closed_form(clients, prompt, output, times, front_end)
    # Chunks, collisions of prompts, and the end of a benchmark, when clients have no more requests, are rough there.
    assert predicted.tpot_s[0] == pytest.approx(np.mean(metrics.tpot_s), rel=0.12)
    assert predicted.ttft_s[0] == pytest.approx(np.mean(metrics.ttft_s), rel=0.25)


@pytest.mark.parametrize("clients", [2, 8, 32])
def test_the_closed_form_of_disaggregated_servers_has_the_means_of_the_simulation(clients: int) -> None:
    times = AffineTimes()
    policy = Policy(max_batch=clients, batching="disaggregated")
    metrics = served(
        closed(clients, 10 * clients, 1024, 256, shortest=0.8), times, policy, replicas=1, prefill_servers=1
    )
    # Servers of ours prefill one prompt at a time.
    load = ClosedLoop(
        clients=np.array([float(clients)]), prompt=np.array([921.6]), generate=np.array([230.4]), budget=1024.0
    )
    costs = StepCosts(
        generate_s=lambda batch, context: np.array([times.generate_s(batch[0], batch[0] * context[0])]),
        mixed_s=lambda tokens, count, batch, context: tokens,
        kv_tokens=float(times.kv_tokens),
    )
    prefill = PrefillServers(
        count=1.0,
        copies=1.0,
        prefill_s=lambda tokens, together: times.prefill_base_s + times.prefill_token_s * tokens * together,
        transfer_s=lambda tokens: times.transfer_token_s * tokens,
    )
    predicted = disaggregated_loop(load, 1.0, costs, prefill)
    assert predicted.tpot_s[0] == pytest.approx(np.mean(metrics.tpot_s), rel=0.12)
    assert predicted.ttft_s[0] == pytest.approx(np.mean(metrics.ttft_s), rel=0.35)


@pytest.mark.parametrize("clients", [1, 2, 16, 64])
def test_requests_of_equal_length_come_in_a_chain(clients: int) -> None:
    """In steady state a prompt waits for two steps, each of which prefills one, and has its own: by hand."""
    times = AffineTimes()
    load = ClosedLoop(
        clients=np.array([float(clients)]),
        prompt=np.array([1024.0]),
        generate=np.array([256.0]),
        equal=True,
        budget=1024.0 + 500 + clients,
        requests=1e9,
    )
    costs = StepCosts(
        generate_s=lambda batch, context: times.generate_base_s + 0.0 * batch,
        mixed_s=lambda tokens, count, batch, context: times.generate_base_s + times.prefill_token_s * tokens * count,
        kv_tokens=1e9,
    )
    step_s = times.generate_base_s + times.prefill_token_s * 1024
    assert closed_loop(load, costs).ttft_s[0] == pytest.approx(min(clients, 3) * step_s, rel=0.15)


def test_more_clients_than_steps_of_an_answer_wait_for_one_another() -> None:
    times = AffineTimes()
    load = ClosedLoop(
        clients=np.array([100.0]),
        prompt=np.array([1024.0]),
        generate=np.array([11.0]),
        equal=True,
        budget=1124.0,
        requests=1e9,
    )
    costs = StepCosts(
        generate_s=lambda batch, context: times.generate_base_s + 0.0 * batch,
        mixed_s=lambda tokens, count, batch, context: times.generate_base_s + times.prefill_token_s * tokens * count,
        kv_tokens=1e9,
    )
    # Each step prefills one of 100 prompts, and a sequence generates during 10 of them.
    step_s = times.generate_base_s + times.prefill_token_s * 1024
    assert closed_loop(load, costs).ttft_s[0] == pytest.approx(90 * step_s, rel=0.02)


def test_overheads_make_steps_longer_and_those_that_prefill_at_least_as_long_as_the_host_needs() -> None:
    load = ClosedLoop(clients=np.array([4.0]), prompt=np.array([100.0]), generate=np.array([100.0]))
    costs = StepCosts(
        generate_s=lambda batch, context: 0.010 + 0.0 * batch,
        mixed_s=lambda tokens, count, batch, context: 0.012 + 0.0 * tokens,
        kv_tokens=1e9,
    )
    steps = LoopSteps.of(load, costs).with_overheads(0.001, 0.050)
    assert (steps.step_s[0], steps.mixed_s[0]) == (pytest.approx(0.011), pytest.approx(0.050))
    assert loop_times(load, steps).ttft_s[0] > closed_loop(load, costs).ttft_s[0] + 0.03
