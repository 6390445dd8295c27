"""Engines under random work and faults: nothing compiles, no page is lost, every request hears of its end."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine import programs as mappings
from rooftop.serve.engine.configuration import Configuration, configuration_of
from rooftop.serve.engine.engine import PagedEngine
from rooftop.serve.engine.loading import load, stop_tokens
from rooftop.serve.engine.requests import GenerationRequest, Overloaded, Sampling, Token
from tests.support.engines import CONFIGURATION, GREEDY, again, answers, checkpoint, engine

PROMPT = GREEDY["llama"][0]["prompt"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("faults"))


@pytest.fixture(scope="module", params=[1, 2], ids=lambda stages: f"stage={stages}")
def paged_engine(folder: Path, request: pytest.FixtureRequest) -> PagedEngine:
    return engine(folder, replace(CONFIGURATION, mesh=(("stage", request.param),)))


class Caller:
    """The caller of one request: its tokens, and its end. An end with an error is appended to ``errors`` as well."""

    def __init__(self, errors: list[Token] | None = None) -> None:
        self.tokens: list[Token] = []
        self.errors = [] if errors is None else errors
        self.ended, self.begun = threading.Event(), threading.Event()

    def __call__(self, token: Token) -> None:
        self.tokens.append(token)
        self.begun.set()
        if token.finish == "error":
            self.errors.append(token)
        if token.finish is not None:
            assert not self.ended.is_set(), "nothing comes after the end"
            self.ended.set()


def ask(
    serving: PagedEngine, number: int, prompt: list[int] = PROMPT, *, caller: Caller | None = None, **how: Any
) -> Caller:
    caller = caller or Caller()
    sampling = Sampling(**({"max_tokens": 8, "temperature": 0.0} | how))
    serving.submit(
        GenerationRequest(id=number, prompt=tuple(prompt), sampling=sampling, arrival_s=time.monotonic()), caller
    )
    return caller


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"pages": 12, "policy": Policy(max_batch=4, chunk_tokens=7)}, marks=pytest.mark.slow),
        pytest.param(
            {"pages": 12, "policy": Policy(max_batch=4, chunk_tokens=7, preemption="swap")}, marks=pytest.mark.slow
        ),
        {"pages": 10, "policy": Policy(max_batch=3), "host_pages": 6},
    ],
)
def test_random_work_compiles_nothing_and_loses_no_page(paged_engine: PagedEngine, changes: dict[str, Any]) -> None:
    """Prompts that share beginnings, all ways of choosing, requests that are cancelled, callers that raise."""
    serving, random = again(paged_engine, **changes), np.random.default_rng(3)
    serving.start()
    bases = [random.integers(1, 90, 20).tolist() for _ in range(3)]
    callers = list[Caller]()
    for number in range(120):
        base = bases[random.integers(3)][: random.integers(0, 18)]
        prompt = base + random.integers(1, 90, random.integers(1, 6)).tolist()
        how: dict[str, Any] = {"max_tokens": int(random.integers(1, 33 - len(prompt)))}
        how |= [{}, {"temperature": 1.0, "top_k": 3}, {"logprobs": 2}, {"frequency_penalty": 0.5}][number % 4]
        callers.append(ask(serving, number, prompt, **how))
        if number % 7 == 0:
            serving.cancel(int(random.integers(0, number + 1)))
        if number % 10 == 0:
            serving.check()
    assert all(caller.ended.wait(120) for caller in callers)
    serving.check()
    stats = serving.stats()
    assert (stats.pages_used, stats.running, stats.waiting, stats.compilations) == (0, 0, 0, 0)
    assert stats.preemptions > 0 and stats.prefix_tokens > 0
    assert {caller.tokens[-1].finish for caller in callers} <= {"length", "stop", "cancelled"}
    assert {caller.tokens[-1].finish for caller in callers} >= {"length", "cancelled"}
    assert serving.drain(1.0)


def test_one_that_leaves_does_not_disturb_the_others(paged_engine: PagedEngine) -> None:
    serving = again(paged_engine)
    serving.start()

    def gone(token: Token) -> None:
        raise BrokenPipeError

    sampling = Sampling(max_tokens=8, temperature=0.0)
    serving.submit(GenerationRequest(id=1, prompt=tuple(PROMPT), sampling=sampling, arrival_s=0.0), gone)
    other = ask(serving, 2)
    assert other.ended.wait(60)
    assert [token.token for token in other.tokens] == GREEDY["llama"][0]["output"][:8]
    assert serving.drain(60) and serving.stats().pages_used == 0
    serving.check()


def test_an_engine_that_is_abandoned_says_so_once(paged_engine: PagedEngine) -> None:
    """Every submitted request ends with an error, begun or not; nothing comes after that."""
    serving = again(paged_engine)
    serving.start()
    callers = [ask(serving, number, max_tokens=19) for number in range(8)]
    assert callers[0].begun.wait(60)
    serving.abandon("a process is lost")
    assert all(caller.ended.is_set() for caller in callers)
    lost = [caller.tokens[-1] for caller in callers if caller.tokens[-1].finish != "length"]
    assert lost and {(token.finish, token.message) for token in lost} == {("error", "a process is lost")}
    with pytest.raises(Overloaded):
        ask(serving, 9)
    assert serving.drain(1.0)
    # Other engines of these tests have the same replicas.
    serving._thread.join(60)


def test_a_step_that_fails_ends_all_requests_with_an_error_and_the_next_are_served(
    paged_engine: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = again(paged_engine)
    serving.start()
    run, count = serving.replicas[0].step, iter(range(100))

    def failing(*arguments: Any, **named: Any) -> Any:
        if next(count) == 3:
            raise RuntimeError("the device is gone\nin many lines")
        return run(*arguments, **named)

    monkeypatch.setattr(serving.replicas[0], "step", failing)
    errors, before = list[Token](), list[list[Token]]()
    serving.on_failed = lambda: before.append(list(errors))
    callers = [Caller(errors) for _ in range(6)]
    for number, caller in enumerate(callers):
        ask(serving, number, caller=caller)
    assert all(caller.ended.wait(60) for caller in callers)
    assert errors and before == [[]], "a failure is heard of once, before requests end with an error"
    ends = [caller.tokens[-1] for caller in callers]
    failed = [end for end in ends if end.finish == "error"]
    assert failed and {end.message for end in failed} == {"RuntimeError: the device is gone"}
    later = ask(serving, 10)
    assert later.ended.wait(60)
    assert [token.token for token in later.tokens] == GREEDY["llama"][0]["output"][:8]
    serving.check()
    assert serving.drain(10) and serving.stats().compilations == 0


def test_what_can_never_be_served_is_refused_at_once(paged_engine: PagedEngine) -> None:
    serving = again(paged_engine, pages=6, max_queue=2)
    for number, (prompt, how, named) in enumerate(
        [
            ([], {}, "no tokens"),
            ([96], {}, "prompt: got 96"),
            ([-1], {}, "prompt: got -1"),
            (PROMPT, {"max_tokens": 30}, "at most 32 together"),
            (PROMPT, {"max_tokens": 19}, "pages of 6"),
            (PROMPT, {"logit_bias": {96: 1.0}}, "logit_bias"),
        ]
    ):
        with pytest.raises(RooftopError, match=named):
            ask(serving, number, prompt, **how)
    with pytest.raises(Overloaded):
        ask(serving, 0)
    serving.start()
    ask(serving, 0)
    with pytest.raises(RooftopError, match="request id"):
        for _ in range(10):
            ask(serving, 0, max_tokens=9)
    with pytest.raises(Overloaded) as raised:
        for number in range(1, 60):
            ask(serving, number, max_tokens=9)
    assert raised.value.retry_after_s >= 1.0
    assert serving.drain(60)
    with pytest.raises(Overloaded):
        ask(serving, 100)


def test_draining_cancels_what_takes_too_long(paged_engine: PagedEngine) -> None:
    serving = again(paged_engine)
    serving.start()
    callers = [ask(serving, number, max_tokens=19) for number in range(30)]
    assert not serving.drain(0.0)
    assert all(caller.ended.is_set() for caller in callers)
    assert "cancelled" in {caller.tokens[-1].finish for caller in callers}
    serving.check()
    assert serving.stats().pages_used == 0


def test_two_hundred_at_once(paged_engine: PagedEngine) -> None:
    serving = again(paged_engine)
    serving.start()
    cases = GREEDY["llama"]
    how = [Sampling(max_tokens=len(cases[i % 6]["output"]), temperature=0.0) for i in range(200)]
    outputs = answers(serving, [cases[i % 6]["prompt"] for i in range(200)], how)
    assert all([token.token for token in output] == cases[i % 6]["output"] for i, output in enumerate(outputs))


def test_programs_without_room_for_their_mappings_are_one_line(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Linux gives a process no more mappings of memory it crashes; so nothing is compiled shortly before."""
    (tmp_path / "most").write_text("70000\n")
    (tmp_path / "own").write_text("7f8302835000-7f8302838000 r-xp 00000000 00:00 0\n" * 63_001)
    monkeypatch.setattr(mappings, "MOST", tmp_path / "most")
    monkeypatch.setattr(mappings, "OWN", tmp_path / "own")
    with pytest.raises(Infeasible, match=r"^63,001 mappings of memory .* nearly the 70,000 .* vm.max_map_count"):
        engine(folder).start()
    monkeypatch.setattr(mappings, "OWN", tmp_path / "none")
    mappings.require_mappings()


def test_what_does_not_fit_or_go_together_is_one_line(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match=r"llama: .* of weights and .* more than the"):
        load(folder, Configuration(pages=10**12))
    with pytest.raises(RooftopError, match="a folder with a config"):
        load(tmp_path)
    with pytest.raises(RooftopError, match="at most the local devices: 8"):
        load(folder, Configuration(mesh=(("tensor", 16),)))
    with pytest.raises(RooftopError, match="page_tokens: got 6; accepted: a multiple of 4, over which context split"):
        load(folder, Configuration(mesh=(("context", 4),), page_tokens=6))
    with pytest.raises(RooftopError, match="mesh axis data: got 2; accepted: 1 with disaggregated"):
        Configuration(mesh=(("data", 2),), policy=Policy(max_batch=4, batching="disaggregated"))
    with pytest.raises(RooftopError, match="mesh axis stage: got 2; accepted: 1 in a process that can only generate"):
        Configuration(mesh=(("stage", 2),), role="generate", policy=Policy(max_batch=4, batching="disaggregated"))
    with pytest.raises(RooftopError, match=r"mesh axis expert: got 2; accepted: 1: llama has no experts"):
        load(folder, Configuration(mesh=(("expert", 2),)))
    with pytest.raises(RooftopError, match="prefill_devices"):
        load(folder, Configuration(prefill_devices=1))
    with pytest.raises(RooftopError, match="max_model_len"):
        load(folder, Configuration(max_model_len=10**6))
    with pytest.raises(RooftopError, match="batching"):
        Configuration(policy=Policy(max_batch=4, batching="static"))
    with pytest.raises(RooftopError, match="plan kind"):
        configuration_of({"kind": "train"})


def test_the_model_says_what_ends_a_text(tmp_path: Path) -> None:
    assert stop_tokens(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert stop_tokens(tmp_path) == {7}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    assert stop_tokens(tmp_path) == {1, 5}


def test_defaults_serve(folder: Path) -> None:
    """No shape, page or length is asked for."""
    serving = load(folder, Configuration(policy=Policy(max_batch=2, chunk_tokens=256)))
    assert serving.max_model_len == 256 and serving.configuration.shapes is None
    assert CONFIGURATION.shapes is not None
