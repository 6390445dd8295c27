"""Two processes: one prefills, one generates. Real ones, over real sockets, killed and disturbed at any point."""

from __future__ import annotations

import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.engine import PagedEngine
from rooftop.serve.engine.requests import Constraint, GenerationRequest, Sampling, Token
from rooftop.serve.hosts.generating import Generator, load_generator
from rooftop.serve.hosts.link import Link, LinkListener, LinkLost, connect
from rooftop.serve.hosts.prefilling import PrefillEngine, load_prefill
from rooftop.serve.hosts.processes import Child, GeneratorTask, Other, Remote
from rooftop.serve.sockets import bind, parse_address
from tests.support.engines import CONFIGURATION, GREEDY, answers, checkpoint, engine
from tests.support.quickly import QUICKLY

CASES = GREEDY["llama"]
POLICY = Policy(max_batch=4, batching="disaggregated")
PREFILL = replace(CONFIGURATION, policy=POLICY, role="prefill", max_model_len=32)
#: With so few pages, sequences are preempted.
GENERATE = replace(PREFILL, role="generate", pages=11)
SWAPPING = replace(GENERATE, policy=replace(POLICY, preemption="swap"))
#: A process that is started again compiles nothing anew.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "",
    "JAX_COMPILATION_CACHE_DIR": os.environ["XDG_CACHE_HOME"],
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("processes"))


@pytest.fixture(scope="module")
def child(folder: Path) -> Iterator[Kept]:
    """One process for all tests that need no other: it is linked to one engine after the other."""
    generator = Kept(folder, GENERATE, options=QUICKLY, environment=ENVIRONMENT)
    yield generator
    generator.end()


class Kept(Child):
    """A process that outlives the engines that are linked to it."""

    def begin(self) -> None:
        if self.pid is None:
            super().begin()

    def close(self) -> None:
        pass

    def end(self) -> None:
        super().close()


class Nowhere:
    """No process at all."""

    def begin(self) -> None:
        pass

    def connect(self) -> Link:
        raise LinkLost("there is none")

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def prefill_engine(folder: Path) -> PrefillEngine:
    return load_prefill(folder, PREFILL, Nowhere(), options=QUICKLY)


def split(
    prefill_engine: PrefillEngine, other: Other, events: list[str] | None = None, **changes: Any
) -> PrefillEngine:
    """Another engine on the programs of one, no text of which ends by itself."""
    configuration = replace(prefill_engine.configuration, **changes)
    engine = PrefillEngine(
        prefill_engine.replicas[0], configuration, other,
        facts=prefill_engine.facts, max_model_len=prefill_engine.max_model_len,
        on_link=(events if events is not None else list[str]()).append,
    )  # fmt: skip
    _SPLIT.append(engine)
    return engine


#: The engines of the test that runs.
_SPLIT: list[PrefillEngine] = []


@pytest.fixture(autouse=True)
def no_link_is_left() -> Iterator[None]:
    """The other process has one link at a time: a test that fails must not keep it from the next."""
    yield
    while _SPLIT:
        _SPLIT.pop().drain(0)


class Caller:
    """Who asked: what came; ``on_token`` hears of each."""

    def __init__(self, on_token: Callable[[Token], None] = lambda token: None) -> None:
        self.tokens: list[Token] = []
        self.ended = threading.Event()
        self._on_token = on_token

    def __call__(self, token: Token) -> None:
        assert not self.ended.is_set(), "nothing comes after the end"
        self.tokens.append(token)
        self._on_token(token)
        if token.finish is not None:
            self.ended.set()

    @property
    def ids(self) -> list[int | None]:
        return [token.token for token in self.tokens]


def ask(serving: PagedEngine, number: int, caller: Caller, **how: Any) -> Caller:
    case = CASES[number % len(CASES)]
    sampling = Sampling(**({"max_tokens": len(case["output"]), "temperature": 0.0} | how))
    request = GenerationRequest(id=number, prompt=tuple(case["prompt"]), sampling=sampling, arrival_s=time.monotonic())
    serving.submit(request, caller)
    return caller


def whole(serving: PrefillEngine, callers: list[Caller]) -> None:
    """Every request has its greedy answer, and no page is held anywhere."""
    for number, caller in enumerate(callers):
        assert caller.ended.wait(120)
        assert caller.ids == CASES[number % len(CASES)]["output"]
    serving.check()
    stats = serving.stats()
    assert (stats.running, stats.waiting, stats.pages_used, stats.compilations) == (0, 0, 0, 0)


class Alternating(Constraint):
    """A constraint: even tokens and odd ones take turns."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def mask(self) -> npt.NDArray[np.uint32]:
        return np.full(3, 0xAAAAAAAA if len(self.tokens) % 2 else 0x55555555, np.uint32)

    def accept(self, token: int) -> None:
        assert token % 2 == len(self.tokens) % 2
        self.tokens.append(token)


def ways() -> list[Sampling]:
    """Each way to choose, for one prompt after the other."""
    return [
        Sampling(max_tokens=10, temperature=1.0, seed=3),
        Sampling(max_tokens=10, temperature=1.5, seed=-4, top_k=20, top_p=0.9, min_p=0.01, logprobs=3),
        Sampling(max_tokens=10, temperature=0.8, seed=5, frequency_penalty=0.5, repetition_penalty=1.2),
        Sampling(max_tokens=10, temperature=0.0, logit_bias={3: 5.0, 7: -100.0}, logprobs=0),
        Sampling(max_tokens=10, temperature=1.0, seed=6, constraint=Alternating()),
        Sampling(max_tokens=1, temperature=0.0, stop_tokens=frozenset({1})),
    ]


@pytest.mark.oracle
@pytest.mark.parametrize("pages", [40, 11])
def test_greedy_tokens_are_those_of_transformers(prefill_engine: PrefillEngine, child: Kept, pages: int) -> None:
    serving = split(prefill_engine, child, pages=pages)
    serving.start()
    whole(serving, [ask(serving, number, Caller()) for number in range(2 * len(CASES))])
    assert serving.stats().preemptions > 0
    assert serving.drain(60)


def test_every_way_to_choose_gives_the_tokens_of_one_process(
    folder: Path, prefill_engine: PrefillEngine, child: Kept
) -> None:
    prompts = [CASES[number]["prompt"] for number in range(len(ways()))]
    alone, serving = engine(folder), split(prefill_engine, child)
    alone.start()
    serving.start()
    expected, outputs = answers(alone, prompts, ways()), answers(serving, prompts, ways())
    assert [[(token.token, token.finish) for token in answer] for answer in outputs] == [
        [(token.token, token.finish) for token in answer] for answer in expected
    ]
    for one, other in zip(expected, outputs, strict=True):
        for token, same in zip(one, other, strict=True):
            assert [id for id, _ in token.top] == [id for id, _ in same.top]
            assert (token.logprob is None) == (same.logprob is None)
            if token.logprob is not None and same.logprob is not None:
                assert same.logprob == pytest.approx(token.logprob, abs=1e-4)


@pytest.mark.parametrize("at", [(1, 5), pytest.param((1, 2, 3, 4, 5, 6, 7), marks=pytest.mark.slow)])
def test_a_kill_at_any_token_changes_no_answer(
    folder: Path, prefill_engine: PrefillEngine, at: tuple[int, ...]
) -> None:
    """With so few pages that sequences are preempted too, at both sides."""
    other, events, done = Child(folder, GENERATE, options=QUICKLY, environment=ENVIRONMENT), list[str](), list[int]()
    serving = split(prefill_engine, other, events, pages=11)
    serving.start()
    callers = list[Caller]()
    for number in range(12):

        def on_token(token: Token, number: int = number) -> None:
            # The first token is drawn where it is prefilled, the others are generated. Each process is killed once.
            count, pid = len(callers[number].tokens), other.pid
            if len(done) < len(at) and count >= at[len(done)] and pid is not None and pid not in done:
                done.append(pid)
                os.kill(pid, signal.SIGKILL)

        callers.append(Caller(on_token))
    for number, caller in enumerate(callers):
        ask(serving, number, caller)
    whole(serving, callers)
    assert len(done) == len(at)
    # One that was killed before it was ready was never linked.
    assert events[0] == events[-1] == "linked" and any(event.startswith("lost") for event in events)
    assert serving.stats().preemptions > 0
    assert serving.drain(60)
    assert other.pid is None


def test_a_process_that_is_started_ends_with_its_stdin_and_not_by_a_signal(folder: Path) -> None:
    """Ctrl-C and SIGTERM are for the one that started it, which still needs it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rooftop.serve.hosts.generating"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | ENVIRONMENT,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None
    task = GeneratorTask(checkpoint=folder, configuration=GENERATE, options=QUICKLY, key="key")
    process.stdin.write(pickle.dumps(task))
    process.stdin.flush()
    port = json.loads(process.stdout.readline())["port"]
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    link = connect("127.0.0.1", port, "key", encrypted=False)
    assert link.receive().kind == "serving"
    link.discard()
    process.communicate()
    assert process.returncode == 0


class Listening:
    """A generator in a thread of this process, which others are linked to by its port."""

    KEY = "a key"

    def __init__(self, folder: Path, *, encrypted: bool = True) -> None:
        self.generator: Generator = load_generator(folder, SWAPPING, options=QUICKLY)
        self.generator.start()
        self.bound = bind("127.0.0.1", 0)
        self.bound.listen()
        self.port: int = self.bound.getsockname()[1]
        self.events = list[str]()
        arguments = (self.bound, self.KEY, self.events.append)
        self._thread = threading.Thread(target=self.generator.serve, args=arguments, kwargs={"encrypted": encrypted})
        self._thread.start()

    def other(self) -> Remote:
        return Remote("127.0.0.1", self.port, self.KEY, patience_s=0.0)

    def end(self) -> None:
        self.bound.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.bound.close()


@pytest.fixture(scope="module")
def listening(folder: Path) -> Iterator[Listening]:
    listener = Listening(folder)
    yield listener
    listener.end()


@pytest.fixture(scope="module")
def plain(folder: Path) -> Iterator[Listening]:
    """One whose messages can be read on their way."""
    listener = Listening(folder, encrypted=False)
    yield listener
    listener.end()


class Disturbing:
    """Passes on what two sides say, and damages what the first one sends, once for each (message, part) to damage."""

    def __init__(self, port: int, damage: list[tuple[str, str]]) -> None:
        self._to, self.damage = port, damage
        self._bound = bind("127.0.0.1", 0)
        self._bound.listen()
        self.port: int = self._bound.getsockname()[1]
        self._sides = list[socket.socket]()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def end(self) -> None:
        self._bound.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for side in (self._bound, *self._sides):
            side.close()

    def _accept(self) -> None:
        while True:
            try:
                asking, _ = self._bound.accept()
            except OSError:
                return
            answering = socket.create_connection(("127.0.0.1", self._to))
            self._sides += [asking, answering]
            for run in (self._forth, self._back):
                self._threads.append(threading.Thread(target=run, args=(asking, answering)))
                self._threads[-1].start()

    def _forth(self, asking: socket.socket, answering: socket.socket) -> None:
        # What ends a link does so once: some of what follows is already under way.
        ended = False
        with suppress(OSError), asking.makefile("rb") as file:
            answering.sendall(file.read(64))
            while lengths := file.read(24):
                head_bytes, payload_bytes = (int.from_bytes(lengths[at : at + 4], "big") for at in (0, 4))
                parts = {"lengths": lengths, "head": file.read(head_bytes + 16)}
                parts["payload"] = file.read(payload_bytes + 16) if payload_bytes else b""
                for kind, part in self.damage:
                    if not ended and f'["{kind}"'.encode() in parts["head"]:
                        # In the exponent of a number of the KV.
                        parts[part] = parts[part][:3] + bytes([parts[part][3] ^ 64]) + parts[part][4:]
                        self.damage.remove((kind, part))
                        ended = part != "payload"
                        break
                answering.sendall(b"".join(parts.values()))
        self._shut(asking, answering)

    def _back(self, asking: socket.socket, answering: socket.socket) -> None:
        with suppress(OSError):
            while some := answering.recv(1 << 16):
                asking.sendall(some)
        self._shut(asking, answering)

    def _shut(self, *sides: socket.socket) -> None:
        for side in sides:
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)


def test_a_link_that_breaks_again_and_again_changes_no_answer(
    prefill_engine: PrefillEngine, listening: Listening
) -> None:
    """Swapped out, on its way or running: whatever a request is doing there, it is done again."""
    events, random = list[str](), np.random.default_rng(7)
    serving = split(prefill_engine, listening.other(), events)
    serving.start()
    breaks = set(random.choice(150, 6, replace=False).tolist())
    count = iter(range(10**6))

    def on_token(token: Token) -> None:
        if next(count) in breaks and serving._link is not None:
            serving._link.close("broken")

    whole(serving, [ask(serving, number, Caller(on_token)) for number in range(24)])
    assert 1 <= sum(event.startswith("lost") for event in events) <= 6
    assert serving.stats().preemptions > 0
    assert serving.drain(60)


@pytest.mark.parametrize(
    ("damage", "losses"),
    [
        ([("pages", "payload")] * 4, 0),
        ([("offer", "head")], 1),
        ([("pages", "lengths"), ("pages", "head")], 2),
        ([("pages", "payload")] * 9, 1),
    ],
)
def test_what_comes_damaged_is_refused_and_comes_again(
    prefill_engine: PrefillEngine, plain: Listening, damage: list[tuple[str, str]], losses: int
) -> None:
    proxy, events = Disturbing(plain.port, list(damage)), list[str]()
    serving = split(prefill_engine, Remote("127.0.0.1", proxy.port, Listening.KEY, encrypted=False), events)
    serving.start()
    whole(serving, [ask(serving, number, Caller()) for number in range(6)])
    assert sum(event.startswith("lost") for event in events) == losses and not proxy.damage
    assert serving.drain(60)
    proxy.end()


class Broken(Kept):
    """One that cannot be linked to while ``broken``."""

    broken = False

    def connect(self) -> Link:
        if self.broken:
            raise LinkLost("it is gone")
        return super().connect()


def test_where_no_process_generates_every_request_hears_so_until_one_does(
    folder: Path, prefill_engine: PrefillEngine
) -> None:
    other = Broken(folder, GENERATE, options=QUICKLY, environment=ENVIRONMENT)
    serving = split(prefill_engine, other)
    serving.start()

    def kill(token: Token) -> None:
        other.broken = True
        assert other.pid is not None
        os.kill(other.pid, signal.SIGKILL)

    first = ask(serving, 0, Caller(kill), max_tokens=10)
    others = [ask(serving, number, Caller(), max_tokens=10) for number in range(1, 4)]
    # Each ended before the process did, or with it.
    assert first.ended.wait(60) and all(caller.ended.wait(60) for caller in others)
    assert first.tokens[-1].finish == "error"
    assert {caller.tokens[-1].message for caller in (first, *others)} <= {None, "no process generates: it is gone"}
    again = ask(serving, 7, Caller())
    assert again.ended.wait(60) and again.tokens[-1].message == "no process generates: it is gone"
    serving.check()
    assert serving.stats().pages_used == 0
    other.broken = False
    whole(serving, [ask(serving, 0, Caller())])
    assert serving.drain(60)
    other.end()


def test_requests_that_end_early_leave_nothing_in_either_process(
    prefill_engine: PrefillEngine, listening: Listening
) -> None:
    """Cancelled ones, some in the middle; callers that raise; a step that fails; a constraint that does."""
    serving = split(prefill_engine, listening.other())
    serving.start()

    def gone(token: Token) -> None:
        if len(gone_one.tokens) == 3:
            raise BrokenPipeError

    gone_one = Caller(gone)
    ask(serving, 0, gone_one)
    leaving = list[Caller]()
    for number in range(1, 13):

        def leave(token: Token, number: int = number) -> None:
            if number % 2:
                serving.cancel(number)

        leaving.append(Caller(leave))
        ask(serving, number, leaving[-1])
    assert all(caller.ended.wait(60) for caller in leaving)
    assert {caller.tokens[-1].finish for caller in leaving[::2]} == {"cancelled"}
    assert {caller.tokens[-1].finish for caller in leaving[1::2]} == {"length"}

    class Failing(Alternating):
        def accept(self, token: int) -> None:
            if len(self.tokens) == 2:
                raise ValueError("no such word")
            super().accept(token)

    failing = ask(serving, 20, Caller(), constraint=Failing())
    assert failing.ended.wait(60) and failing.tokens[-1].message == "ValueError: no such word"
    whole(serving, [ask(serving, number, Caller()) for number in range(2)])
    assert serving.drain(60)


def test_a_step_that_fails_there_ends_what_was_there_with_an_error(
    prefill_engine: PrefillEngine, listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = split(prefill_engine, listening.other())
    serving.start()
    run, count = listening.generator.replica.step, iter(range(1000))

    def step(*arguments: Any, **named: Any) -> Any:
        if next(count) == 3:
            raise RuntimeError("the device is gone")
        return run(*arguments, **named)

    monkeypatch.setattr(listening.generator.replica, "step", step)
    callers = [ask(serving, number, Caller()) for number in range(6)]
    assert all(caller.ended.wait(60) for caller in callers)
    assert {caller.tokens[-1].message for caller in callers} >= {"RuntimeError: the device is gone"}
    whole(serving, [ask(serving, number, Caller()) for number in range(6)])
    assert serving.drain(60)


def test_a_stranger_gets_no_link(listening: Listening) -> None:
    before = len(listening.events)
    with pytest.raises(LinkLost, match="is its key the same"):
        connect("127.0.0.1", listening.port, "another key")
    with socket.create_connection(("127.0.0.1", listening.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere\r\n\r\n" * 4)
        # What it did not read is why it resets the connection.
        with suppress(ConnectionResetError):
            assert stranger.recv(1000) == b""
    link = connect("127.0.0.1", listening.port, Listening.KEY)
    assert link.receive().kind == "serving"
    link.close()
    link.discard()
    refused = [event for event in listening.events[before:] if event.startswith("refused")]
    assert len(refused) == 2


def test_a_process_that_serves_something_else_is_refused(prefill_engine: PrefillEngine, listening: Listening) -> None:
    serving = split(prefill_engine, listening.other())
    serving.facts["weights"] = "int8"
    with pytest.raises(RooftopError, match="weights of the process that generates: got 'plain'; accepted: int8"):
        serving.start()


@pytest.mark.parametrize("address", ["", "8000", "host:", ":80", "host:0", "host:65536", "host:http"])
def test_what_is_no_address_is_one_line(address: str) -> None:
    with pytest.raises(RooftopError, match=r"generate-at: got .*; accepted: HOST:PORT"):
        parse_address(address, "generate-at")


def test_an_address_may_have_brackets() -> None:
    assert parse_address("[::1]:80", "generate-at") == ("::1", 80)
    assert parse_address("there:1234", "generate-at") == ("there", 1234)


def test_messages_arrive_in_order_and_the_end_is_heard() -> None:
    with bind("127.0.0.1", 0) as bound:
        bound.listen()
        links = list[Link]()
        thread = threading.Thread(target=lambda: links.append(LinkListener(bound, "key").accept()))
        thread.start()
        one = connect("127.0.0.1", bound.getsockname()[1], "key")
        thread.join()
        (other,) = links
        for number in range(40):
            one.send("count", payload=partial(list[bytes], [bytes(number), b"x"]), number=number)
        for number in range(40):
            message = other.receive()
            assert (message.kind, message.fields, message.payload) == (
                "count", {"number": number}, bytearray(bytes(number) + b"x"),
            )  # fmt: skip
        one.discard()
        with pytest.raises(LinkLost):
            other.receive()
        other.discard()
        one.send("more")
