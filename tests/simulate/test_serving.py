"""The simulator of serving against theory, against itself step by step, and what must hold for any traffic."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.scheduler import EngineStep, Policy, Routing
from rooftop.scheduling.serving.times import StepTimes
from rooftop.simulate.serving import engine as serving
from rooftop.simulate.serving.engine import simulate
from rooftop.simulate.serving.metrics import ServingMetrics, Targets
from rooftop.simulate.serving.records import Deployment, Simulation
from rooftop.simulate.serving.timeline import timeline
from rooftop.simulate.serving.traces import Lengths, RequestTrace, draw_trace, read_trace
from tests.support.examples import examples


@dataclass(frozen=True, kw_only=True)
class AffineTimes:
    """EngineStep times with a constant and so much per token; the context counts up to ``window`` tokens a sequence."""

    page_tokens: int = 16
    kv_tokens: int = 160_000
    prefill_kv_tokens: int = 160_000
    kv_groups: int = 1
    prefill_kv_groups: int = 1
    prefill_base_s: float = 2.1e-3
    prefill_token_s: float = 3.3e-5
    generate_base_s: float = 7.7e-3
    generate_seq_s: float = 1.3e-5
    context_token_s: float = 1.7e-7
    transfer_token_s: float = 2.3e-7
    window: int | None = None

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.prefill_base_s + self.prefill_token_s * sum(new for new, _ in chunks)

    def generate_s(self, batch: int, context_tokens: int) -> float:
        read = context_tokens if self.window is None else min(context_tokens, self.window * batch)
        return self.generate_base_s + self.generate_seq_s * batch + self.context_token_s * read

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        return self.generate_s(batch, context_tokens) + self.prefill_token_s * sum(new for new, _ in chunks)

    def transfer_s(self, tokens: int) -> float:
        return self.transfer_token_s * tokens

    def host_copy_s(self, tokens: int) -> float:
        return 2 * self.transfer_token_s * tokens


def fixed(arrivals: Sequence[float], prompt: int, output: int) -> RequestTrace:
    count = len(arrivals)
    return RequestTrace(
        arrival_s=np.array(arrivals, np.float64),
        prompt_tokens=np.full(count, prompt),
        output_tokens=np.full(count, output),
    )


def metrics(trace: RequestTrace, times: StepTimes, targets: Targets | None = None, **options: Any) -> ServingMetrics:
    policy = {name: options.pop(name) for name in ("batching", "chunk_tokens", "preemption") if name in options}
    deployment = Deployment(policy=Policy(max_batch=options.pop("max_batch", 64), **policy), times=times, **options)
    return ServingMetrics(simulation=simulate(trace, deployment), targets=targets or Targets())


MODES: list[dict[str, Any]] = [
    {"batching": "static"},
    {"batching": "interleaved"},
    {"batching": "interleaved", "chunk_tokens": 300},
    {"batching": "disaggregated", "prefill_servers": 1},
]


@pytest.mark.parametrize("mode", MODES)
def test_at_low_load_latencies_are_the_step_times(mode: dict[str, Any]) -> None:
    times, prompt, output = AffineTimes(), 1000, 200
    result = metrics(fixed([0, 100, 200], prompt, output), times, **mode)
    if mode.get("chunk_tokens"):
        ttft_s = 3 * times.prefill_s([(300, 0)]) + times.prefill_s([(100, 900)])
    else:
        ttft_s = times.prefill_s([(prompt, 0)])
    steps_s = [times.generate_s(1, prompt + step) for step in range(output - 1)]
    waited_s = times.transfer_s(prompt) if mode["batching"] == "disaggregated" else 0.0
    assert result.ttft_s == pytest.approx(ttft_s, rel=1e-9)
    assert result.tpot_s == pytest.approx((sum(steps_s) + waited_s) / (output - 1), rel=1e-9)
    assert result.worst_itl_s == pytest.approx(max(steps_s[-1], steps_s[0] + waited_s), rel=1e-9)
    spread = result.figures.to_json()["itl_s"]
    assert spread["mean"] == pytest.approx(result.tpot_s.mean(), rel=1e-9)
    assert spread["p50"] == pytest.approx(np.median(steps_s), rel=1e-3)


def queue(
    mode: dict[str, Any], load: float, requests: int, output: int = 1
) -> tuple[RequestTrace, float, np.ndarray[Any, Any]]:
    """Poisson arrivals of equal requests at a server that takes one at a time: trace, service time, waits."""
    times, prompt = AffineTimes(), 250
    service_s = times.prefill_s([(prompt, 0)])
    service_s += sum(times.generate_s(1, prompt + step) for step in range(output - 1))
    trace = draw_trace(
        requests_per_second=load / service_s,
        requests=requests,
        prompt=Lengths(low=prompt, high=prompt),
        output=Lengths(low=output, high=output),
        seed=3,
    )
    return trace, service_s, metrics(trace, times, **mode, max_batch=1).e2e_s - service_s


@pytest.mark.parametrize("mode", MODES)
def test_equal_requests_wait_as_lindley_says(mode: dict[str, Any]) -> None:
    """Each waits for what the one before it still had to wait and be served, less the time between their arrivals."""
    # Where one server does both, a request holds it until its last token.
    output = 20 if mode["batching"] == "interleaved" and "chunk_tokens" not in mode else 1
    trace, service_s, waited_s = queue(mode, 0.9, 5000, output)
    expected = [0.0]
    for gap in np.diff(trace.arrival_s):
        expected.append(max(0.0, expected[-1] + service_s - gap))
    assert waited_s == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("load", [pytest.param(0.5, marks=pytest.mark.slow), 0.8])
def test_one_server_with_equal_requests_is_m_d_1(load: float) -> None:
    """Pollaczek-Khinchine for a deterministic service time D: a mean wait of load D / (2 (1 - load))."""
    _, service_s, waited_s = queue({"batching": "interleaved"}, load, 200_000)
    assert waited_s.mean() == pytest.approx(load * service_s / (2 * (1 - load)), rel=0.02)


@pytest.mark.parametrize(("batch", "load"), [(4, 0.6), pytest.param(8, 0.9, marks=pytest.mark.slow)])
def test_static_batches_are_bulk_service(batch: int, load: float) -> None:
    """M/D[1,B]/1: a server that is free takes up to B of those that wait, and waits for one if there are none.

    The queue at departures is a Markov chain; by renewal, the mean queue over time follows from it, and the mean wait
    from Little's law.
    """
    times, prompt = AffineTimes(prefill_token_s=0.0), 100
    service_s = times.prefill_s([(prompt, 0)])
    rate = load * batch / service_s
    size = 400
    arrivals = np.exp([k * math.log(rate * service_s) - rate * service_s - math.lgamma(k + 1) for k in range(size)])
    chain = np.zeros((size, size))
    for waiting in range(size):
        left = max(waiting - batch, 0)
        chain[waiting, left:] = arrivals[: size - left]
        chain[waiting, -1] += 1 - chain[waiting].sum()
    balance = np.vstack([chain.T - np.eye(size), np.ones(size)])
    chance = np.linalg.lstsq(balance, np.append(np.zeros(size), 1.0), rcond=None)[0]
    queued = chance @ (np.maximum(np.arange(size) - batch, 0) + rate * service_s / 2) * service_s
    wait_s = queued / (service_s + chance[0] / rate) / rate
    trace = draw_trace(
        requests_per_second=rate,
        requests=200_000,
        prompt=Lengths(low=prompt, high=prompt),
        output=Lengths(low=1, high=1),
        seed=1,
    )
    result = metrics(trace, times, batching="static", max_batch=batch)
    assert result.ttft_s.mean() - service_s == pytest.approx(wait_s, rel=0.02)


def test_littles_law() -> None:
    """Sequences that generate, on average over time, are arrivals per second times the time that each generates."""
    trace = draw_trace(
        requests_per_second=30, requests=20_000, prompt=Lengths(low=10, high=500), output=Lengths(low=2, high=200)
    )
    result = metrics(trace, AffineTimes(), batching="disaggregated", prefill_servers=1, max_batch=1000)
    generating = sum(
        run.generating * (run.end_s - run.start_s) for server in result.simulation.servers for run in server.runs
    )
    # Beside its steps a sequence waits for its KV to come and for the step under way to end: less than two steps.
    after_first_s = (result.e2e_s - result.ttft_s).sum()
    assert generating < after_first_s <= generating + sum(result.simulation.joining_gaps_s)
    assert generating == pytest.approx(after_first_s, rel=0.02)


def test_disaggregated_never_stalls_a_decode_behind_a_prefill() -> None:
    times = AffineTimes(prefill_token_s=3.3e-4)
    trace = draw_trace(
        requests_per_second=3,
        requests=2000,
        prompt=Lengths(low=100, high=1000),
        output=Lengths(low=2, high=300),
        burstiness=0.3,
    )
    apart = metrics(trace, times, batching="disaggregated", prefill_servers=2)
    for server in apart.simulation.servers:
        for run in server.runs:
            assert run.prefill_tokens == 0 or server.role == "prefill"
            if run.continued:
                assert run.gap_s == pytest.approx(run.first_s, rel=1e-9), "a token for each in every step"
    seconds, counts = apart.itl_s
    longest_step_s = max(run.first_s + run.growth_s * (run.steps - 1) for run in apart.simulation.servers[-1].runs)
    joined = len(apart.simulation.joining_gaps_s)
    assert counts[seconds > longest_step_s * (1 + 1e-9)].sum() <= joined
    together = metrics(trace, times)
    assert together.worst_itl_s.max() > times.prefill_s([(500, 0)]), "which is what it does when interleaved"
    chunked = metrics(trace, times, chunk_tokens=128)
    assert np.percentile(chunked.worst_itl_s, 90) < np.percentile(together.worst_itl_s, 50)


@st.composite
def traffic(draw: st.DrawFn) -> tuple[RequestTrace, AffineTimes, dict[str, Any]]:
    """A few requests close together, a cache that is too small for all of them, and any way to serve."""
    count = draw(st.integers(1, 12))
    random = np.random.default_rng(draw(st.integers(0, 10_000)))
    page_tokens = draw(st.sampled_from([1, 4, 16]))
    trace = RequestTrace(
        arrival_s=np.cumsum(random.exponential(draw(st.sampled_from([1e-4, 0.02, 0.2])), count)),
        prompt_tokens=random.integers(1, 120, count),
        output_tokens=random.integers(1, 60, count),
        hashes=tuple(tuple(random.integers(0, 2, 8).cumsum().tolist()) for _ in range(count)),
        hash_tokens=16,
    )
    most = int((trace.prompt_tokens + trace.output_tokens).max()) - 1 + page_tokens
    groups, prefill_groups = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    times = AffineTimes(
        page_tokens=page_tokens,
        kv_tokens=groups * (most + draw(st.integers(0, 200))),
        prefill_kv_tokens=prefill_groups * (most + draw(st.integers(0, 200))),
        kv_groups=groups,
        prefill_kv_groups=prefill_groups,
        window=draw(st.sampled_from([None, 40])),
    )
    mode = dict(draw(st.sampled_from(MODES)))
    if mode.get("chunk_tokens"):
        mode["chunk_tokens"] = draw(st.sampled_from([9, 40, 300]))
    if mode["batching"] == "disaggregated":
        mode["prefill_servers"] = draw(st.integers(1, 2))
    mode["max_batch"] = draw(st.integers(1, 8))
    mode["replicas"] = draw(st.integers(1, 2))
    mode["preemption"] = draw(st.sampled_from(["recompute", "swap"]))
    mode["host_kv_tokens"] = draw(st.sampled_from([0, 64, 10_000]))
    if mode["batching"] != "static" and draw(st.booleans()):
        mode["prefix_cache"] = True
        mode["routing"] = Routing(kind=draw(st.sampled_from(["affinity", "round_robin", "least_loaded"])))
    return trace, times, mode


def served(result: ServingMetrics) -> None:
    """Every token of every request exactly once, no page left, no time before another."""
    simulation = result.simulation
    trace, requests = simulation.trace, simulation.requests
    assert not requests.refused
    assert requests.tokens == trace.output_tokens.tolist()
    steps = sum(run.generating * run.steps for server in simulation.servers for run in server.runs)
    # The first token, and at most one after each preemption, comes out of a prefill; all others out of a step.
    after_first = int((trace.output_tokens - 1).sum())
    assert after_first - sum(requests.preemptions) <= steps <= after_first
    stayed = 0
    for stay in simulation.stays:
        runs = simulation.servers[stay.server].runs[stay.first : stay.last + 1]
        stayed += sum(run.steps for run in runs if run.generating)
    assert stayed == steps
    figures = result.figures.to_json()
    assert figures["tokens"]["generated"] == int(trace.output_tokens.sum())
    assert figures["tokens"]["recomputed"] >= 0
    if not sum(requests.preemptions):
        assert steps == after_first
        assert [a + b for a, b in zip(requests.prefilled, requests.cached, strict=True)] == trace.prompt_tokens.tolist()
    assert (result.ttft_s > 0).all()
    assert (result.e2e_s >= result.ttft_s).all()
    seconds, counts = result.itl_s
    assert counts.sum() == (trace.output_tokens - 1).sum()
    assert (seconds * counts).sum() == pytest.approx((result.e2e_s - result.ttft_s).sum(), rel=1e-9)
    for server in simulation.servers:
        for cache in server.scheduler.caches:
            assert cache.device.used == cache.host.used == 0
            assert cache.device.free + cache.device.idle == cache.device.size
        assert all(run.end_s >= run.start_s and run.kv_pages <= server.pages for run in server.runs)
        assert all(before.end_s <= after.start_s for before, after in pairwise(server.runs))
    for server in figures["servers"]:
        assert 0 <= server["kv"]["mean_occupancy"] <= server["kv"]["max_occupancy"] + 1e-9 <= 1 + 1e-9
        assert 0 <= server["utilisation"]["busy"] <= 1 + 1e-9


@settings(max_examples=examples(300))
@given(traffic())
def test_every_token_of_every_request_exactly_once(case: tuple[RequestTrace, AffineTimes, dict[str, Any]]) -> None:
    trace, times, mode = case
    served(metrics(trace, times, **mode))


def one_by_one(times: StepTimes, step: EngineStep, most: int) -> tuple[int, float, float]:
    return 1, times.generate_s(step.batch, step.context_tokens), 0.0


@settings(max_examples=examples(200))
@given(traffic())
def test_steps_in_closed_form_are_steps_one_by_one(case: tuple[RequestTrace, AffineTimes, dict[str, Any]]) -> None:
    trace, times, mode = case
    fast = metrics(trace, times, **mode)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "joint_steps", one_by_one)
        slow = metrics(trace, times, **mode)
    assert fast.ttft_s == pytest.approx(slow.ttft_s, rel=1e-9)
    assert fast.e2e_s == pytest.approx(slow.e2e_s, rel=1e-9)
    assert fast.worst_itl_s == pytest.approx(slow.worst_itl_s, rel=1e-6, abs=1e-12)
    assert fast.simulation.requests.preemptions == slow.simulation.requests.preemptions
    ours, theirs = (np.repeat(seconds, counts.astype(int)) for seconds, counts in (fast.itl_s, slow.itl_s))
    assert ours == pytest.approx(theirs, rel=1e-6)


def test_worst_gaps_are_those_of_the_tokens() -> None:
    """Against the times of all tokens, written out step by step."""
    trace = draw_trace(
        requests_per_second=40, requests=300, prompt=Lengths(low=1, high=400), output=Lengths(low=1, high=60)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving, "joint_steps", one_by_one)
        result = metrics(trace, AffineTimes(), replicas=2)
    tokens = {request: [first] for request, first in enumerate(result.simulation.requests.first_s)}
    for stay in result.simulation.stays:
        runs = result.simulation.servers[stay.server].runs[stay.first : stay.last + 1]
        tokens[stay.request] += [run.end_s for run in runs if run.generating]
    gaps = [np.diff(times) for times in tokens.values()]
    assert [len(times) for times in tokens.values()] == trace.output_tokens.tolist()
    assert result.worst_itl_s == pytest.approx([gap.max(initial=0.0) for gap in gaps], rel=1e-9)
    every = np.sort(np.concatenate(gaps))
    seconds, counts = result.itl_s
    assert np.repeat(seconds, counts.astype(int)) == pytest.approx(every, rel=1e-9)
    figures = result.figures.to_json()["itl_s"]
    assert figures["p99"] == pytest.approx(every[math.ceil(0.99 * len(every)) - 1], rel=1e-9)


def test_two_requests_by_hand() -> None:
    times = AffineTimes(
        prefill_base_s=0.0, prefill_token_s=0.01, generate_base_s=0.1, generate_seq_s=0.0, context_token_s=0.0
    )
    # Prefills take 1 s. 0: arrives at 0, tokens at 1, 1.1, 1.2; the second prefill until 2.2; 2.3, 2.4.
    # 1: arrives at 1.15, waits for the step under way; tokens at 2.2, 2.3.
    trace = RequestTrace(
        arrival_s=np.array([0.0, 1.15]), prompt_tokens=np.array([100, 100]), output_tokens=np.array([5, 2])
    )  # fmt: skip
    result = metrics(trace, times, Targets(ttft_s=1.06, tpot_s=0.2))
    assert result.ttft_s == pytest.approx([1.0, 1.05])
    assert result.e2e_s == pytest.approx([2.4, 1.15])
    assert result.tpot_s == pytest.approx([1.4 / 4, 0.1])
    assert result.worst_itl_s == pytest.approx([1.1, 0.1])
    seconds, counts = result.itl_s
    assert np.repeat(seconds, counts.astype(int)) == pytest.approx([0.1] * 4 + [1.1])
    figures = result.figures.to_json()
    assert figures["goodput"]["requests"] == 1
    assert figures["goodput"]["requests_per_second"] == pytest.approx(1 / 2.4)
    assert figures["requests"]["per_second"] == pytest.approx(2 / 2.4)
    assert figures["servers"][0]["utilisation"] == pytest.approx(
        {"prefill": 2 / 2.4, "generate": 0.4 / 2.4, "mixed": 0.0, "busy": 1.0}
    )
    assert figures["servers"][0]["mean_batch"] == pytest.approx(5 / 4)


def test_a_step_lasts_as_long_as_that_of_the_busiest_group() -> None:
    """Two groups with a sequence each: the devices of the smaller one wait for those of the larger."""
    times = AffineTimes(kv_tokens=2 * 160, kv_groups=2)
    trace = RequestTrace(
        arrival_s=np.zeros(2), prompt_tokens=np.array([100, 20]), output_tokens=np.array([11, 11]), hashes=None
    )
    result = metrics(trace, times)
    steps_s = sum(times.generate_s(2, 2 * (100 + step)) for step in range(10))
    assert result.ttft_s == pytest.approx(times.prefill_s([(120, 0)]), rel=1e-9)
    assert result.e2e_s - result.ttft_s == pytest.approx(steps_s, rel=1e-9)
    # One has pages for both; each of two groups has pages for one, and for half of what all hold together.
    assert metrics(trace, times).simulation.servers[0].pages == 20
    refused = metrics(fixed([0.0, 0.0], 155, 10), times).figures.to_json()["requests"]
    assert refused["refused_why"] == "164 tokens of KV take 11 pages of 10"
    assert not metrics(fixed([0.0], 155, 10), AffineTimes(kv_tokens=2 * 160)).figures.to_json()["requests"]["refused"]


def test_prefix_cache_and_affinity() -> None:
    """Conversations: each turn repeats what was said before. With one cache per replica, it pays to go back there."""
    random = np.random.default_rng(0)
    turns, people = 5, 40
    arrival, prompts, hashes = [], [], []
    for person in range(people):
        for turn in range(turns):
            arrival.append(turn * 30 + float(random.uniform(0, 25)))
            prompts.append(512 * (turn + 1))
            hashes.append(tuple(person * turns + block for block in range(turn + 1)))
    order = np.argsort(arrival)
    trace = RequestTrace(
        arrival_s=np.array(arrival)[order],
        prompt_tokens=np.array(prompts)[order],
        output_tokens=np.full(len(order), 20),
        hashes=tuple(hashes[index] for index in order),
    )
    times = AffineTimes(kv_tokens=200_000, prefill_token_s=1e-4)

    def run(**options: Any) -> dict[str, Any]:
        return metrics(trace, times, replicas=4, **options).figures.to_json()

    without, turns_ = run(), run(prefix_cache=True, routing=Routing(kind="round_robin"))
    sticky = run(prefix_cache=True, routing=Routing(kind="affinity"))
    assert without["tokens"]["cached"] == 0
    # All that was said before is there, except the last token before the end of a turn's first page.
    said_before = sum(512 * turn for turn in range(turns)) * people
    assert sticky["tokens"]["cached"] >= 0.95 * said_before
    assert turns_["tokens"]["cached"] < 0.7 * said_before
    assert sticky["ttft_s"]["mean"] < turns_["ttft_s"]["mean"] < without["ttft_s"]["mean"]


def test_a_host_tier_holds_what_hbm_cannot() -> None:
    people, turns = 30, 3
    hashes = tuple((person, 1000 + person) for _ in range(turns) for person in range(people))
    trace = RequestTrace(
        arrival_s=np.arange(len(hashes), dtype=np.float64),
        prompt_tokens=np.full(len(hashes), 1025),
        output_tokens=np.full(len(hashes), 2),
        hashes=hashes,
    )
    times = AffineTimes(kv_tokens=8_000)
    small = metrics(trace, times, prefix_cache=True).figures.to_json()
    large = metrics(trace, times, prefix_cache=True, host_kv_tokens=40_000).figures.to_json()
    assert small["tokens"]["cached"] == 0, "30 prompts in turn push each other out"
    assert large["tokens"]["cached"] == (turns - 1) * people * 1024


def test_preempted_sequences_are_computed_anew_or_swapped() -> None:
    trace = fixed([0.0] * 8, 64, 64)
    times = AffineTimes(kv_tokens=16 * 4 * 8 + 16 * 8)
    anew = metrics(trace, times)
    swapped = metrics(trace, times, preemption="swap", host_kv_tokens=10_000)
    for result in (anew, swapped):
        served(result)
        assert result.figures.to_json()["preemptions"] > 0
    assert anew.figures.to_json()["tokens"]["recomputed"] > 0
    assert swapped.figures.to_json()["tokens"]["recomputed"] == 0


def test_requests_that_never_fit_are_refused_and_the_others_served() -> None:
    trace = RequestTrace(
        arrival_s=np.array([0.0, 1.0]), prompt_tokens=np.array([100, 500]), output_tokens=np.array([5, 5])
    )  # fmt: skip
    figures = metrics(trace, AffineTimes(kv_tokens=400)).figures.to_json()
    assert figures["requests"] == {
        "offered": 2,
        "finished": 1,
        "refused": 1,
        "refused_why": "504 tokens of KV take 32 pages of 25",
        "per_second": pytest.approx(1 / figures["duration_s"]),
    }
    nothing = metrics(fixed([0.0], 500, 5), AffineTimes(kv_tokens=400)).figures.to_json()
    assert nothing["ttft_s"] is nothing["itl_s"] is None
    json.dumps(nothing, allow_nan=False)


def test_timelines_have_a_process_per_server_and_a_span_per_request() -> None:
    trace = fixed([0.0, 0.01, 50.0], 100, 10)
    simulation: Simulation = metrics(trace, AffineTimes(), batching="disaggregated", prefill_servers=1).simulation
    events = timeline(simulation, until_s=10.0)["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"prefill server 0", "generate server 1", "requests"}
    assert {event["id"] for event in events if event["ph"] == "b"} == {0, 1}, "the third begins after 10 s"
    slices = [event for event in events if event["ph"] == "X"]
    assert sum(event["args"]["prefill_tokens"] for event in slices) == 200
    assert sum(event["args"]["generating"] * event["args"]["steps"] for event in slices) == 18
    begun = [event["name"] for event in events if event["ph"] == "b"]
    assert sorted(begun) == sorted(event["name"] for event in events if event["ph"] == "e")


def test_drawn_arrivals() -> None:
    def gaps(burstiness: float) -> Any:
        lengths = Lengths(low=5, high=9)
        trace = draw_trace(
            requests_per_second=4, requests=50_000, prompt=lengths, output=lengths, burstiness=burstiness, seed=5
        )  # fmt: skip
        assert set(trace.prompt_tokens) == set(range(5, 10))
        return np.diff(trace.arrival_s)

    for burstiness in (0.25, 1.0, 4.0):
        drawn = gaps(burstiness)
        assert drawn.mean() == pytest.approx(0.25, rel=0.03)
        assert drawn.var() / drawn.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.05)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "own.csv",
            "arrival_s,prompt_tokens,output_tokens,hashes\n7.5,30,2,1 2\n5,10,3,\n",
        ),
        (
            "mooncake.jsonl",
            '{"timestamp": 5000, "input_length": 10, "output_length": 3, "hash_ids": []}\n\n'
            '{"timestamp": 7500, "input_length": 30, "output_length": 2, "hash_ids": [1, 2]}\n',
        ),
        (
            "azure.csv",
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,10,3\n"
            "2023-11-16 18:17:06.4799600,30,2\n",
        ),
        (
            "burst.csv",
            "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,10,3,13,API\n"
            "7.5,GPT-4,30,2,32,API\n",
        ),
    ],
)
def test_traces_are_read(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    trace = read_trace(path, hash_tokens=16)
    assert trace.arrival_s == pytest.approx([0, 2.5])
    assert trace.prompt_tokens.tolist() == [10, 30]
    assert trace.output_tokens.tolist() == [3, 2]
    if trace.hashes is not None:
        assert trace.hashes == ((), (1, 2))
        assert trace.keys(1, 8) == (2, 3, 4), "30 tokens are 3 full pages of 8"


def test_hashes_that_go_on_are_of_the_answer() -> None:
    trace = RequestTrace(
        arrival_s=np.zeros(1),
        prompt_tokens=np.array([20]),
        output_tokens=np.array([30]),
        hashes=((7, 8, 9),),
        hash_tokens=16,
    )
    assert trace.keys(0, 16) == (7, 8, 9)


@pytest.mark.parametrize(
    ("name", "text", "field"),
    [
        ("trace.txt", "", "trace file"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\n", "trace file"),
        ("trace.csv", "arrival_s,prompt_tokens\n1,2\n", "trace.csv line 2"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\nsoon,2,3\n", "trace.csv line 2"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\n1,2.5,3\n", "trace.csv line 2, prompt_tokens"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\n1,2,0\n", "trace.csv line 2, output_tokens"),
        ("trace.jsonl", "[]\n", "trace.jsonl line 1"),
        ("trace.jsonl", "{\n", "trace.jsonl line 1"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\n1,-2,3\n", "trace.csv line 2, prompt_tokens"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\n1,nan,3\n", "trace.csv line 2, prompt_tokens"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\n1,2,inf\n", "trace.csv line 2, output_tokens"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\n1,1e30,3\n", "trace.csv line 2, prompt_tokens"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\ninf,2,3\n", "trace.csv line 2"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens\n1,2,3,4\n", "trace.csv line 2"),
        ("trace.csv", "arrival_s,prompt_tokens,output_tokens,hashes\n1,2,3,--4\n", "trace.csv line 2"),
        (
            "trace.jsonl",
            '{"arrival_s": 1, "prompt_tokens": true, "output_tokens": 1}\n',
            "trace.jsonl line 1, prompt_tokens",
        ),
        *(
            (
                "trace.jsonl",
                '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": ' + hashes + "}\n",
                "trace.jsonl line 1",
            )
            for hashes in ('["a"]', "[1.5]", "[1e400]", "7")
        ),
    ],
)
def test_traces_that_are_none(tmp_path: Path, name: str, text: str, field: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    with pytest.raises(RooftopError) as error:
        read_trace(path)
    assert error.value.field == field


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"replicas": 0}, "replicas"),
        ({"prefill_servers": 1}, "prefill_servers"),
        ({"batching": "disaggregated"}, "prefill_servers"),
        ({"batching": "static", "prefix_cache": True}, "prefix_cache"),
        ({"routing": Routing(kind="affinity")}, "routing"),
        ({"host_kv_tokens": -1}, "host_kv_tokens"),
    ],
)
def test_deployments_that_cannot_be(options: dict[str, Any], field: str) -> None:
    with pytest.raises(RooftopError) as error:
        metrics(fixed([0.0], 1, 1), AffineTimes(), **options)
    assert error.value.field == field
