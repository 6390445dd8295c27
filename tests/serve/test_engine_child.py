"""An engine in a process of its own: answers, masks, limits, and that it is started again when it is lost or hangs."""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from rooftop.core.errors import RooftopError
from rooftop.serve.engine.configuration import Configuration
from rooftop.serve.engine.requests import Constraint, GenerationRequest, Overloaded, Sampling, Token
from rooftop.serve.hosts.engine_child import EngineChild
from rooftop.serve.hosts.engine_process import EngineTask
from rooftop.serve.hosts.parts import EnginePart
from rooftop.serve.request import ServeRequest
from tests.support.engine_echo import COMMAND

#: Seconds for everything that a test waits for.
PATIENCE_S = 60.0


class Answer:
    """Tokens of one request as they come."""

    def __init__(self) -> None:
        self.come = queue.Queue[Token]()

    def next(self) -> Token:
        return self.come.get(timeout=PATIENCE_S)

    def rest(self) -> tuple[list[int], Token]:
        """All tokens, and the last message."""
        tokens = list[int]()
        while True:
            token = self.next()
            tokens += [] if token.token is None else [token.token]
            if token.finish is not None:
                return tokens, token


def task(step_s: float = 0.0) -> EngineTask:
    request = ServeRequest(checkpoint=Path("."), drain_s=step_s)
    return EngineTask(request=request, part=EnginePart(), configuration=Configuration(), folder=Path("."))


Start = Callable[..., EngineChild]


@pytest.fixture
def start() -> Iterator[Start]:
    children = list[EngineChild]()

    def start(step_s: float = 0.0, hang_s: float = 60.0, **more: object) -> EngineChild:
        log = logging.getLogger("rooftop.serve")
        child = EngineChild(task(step_s), hang_s=hang_s, log=log, command=COMMAND, **more)  # type: ignore[arg-type]
        child.start()
        children.append(child)
        return child

    yield start
    for child in children:
        child.drain(0.0)


def ask(child: EngineChild, id: int, prompt: tuple[int, ...] = (5, 6, 7), **sampling: object) -> Answer:
    answer = Answer()
    how = Sampling(**{"max_tokens": 6, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    child.submit(GenerationRequest(id=id, prompt=prompt, sampling=how, arrival_s=time.monotonic()), answer.come.put)
    return answer


class Ascending(Constraint):
    """A constraint that allows one token, the next one each time; its third mask takes a while."""

    def __init__(self) -> None:
        self.accepted = list[int]()

    def mask(self) -> npt.NDArray[np.uint32]:
        if len(self.accepted) == 2:
            time.sleep(0.2)
        mask, token = np.zeros(13, np.uint32), 40 + len(self.accepted)
        mask[token // 32] = 1 << token % 32
        return mask

    def accept(self, token: int) -> None:
        self.accepted.append(token)


def test_answers_choices_and_masks_are_those_of_one_process(start: Start) -> None:
    child = start()
    constraint = Ascending()
    prompt = (8, 9)
    # The second request has the very prompt of the first, which is sent once.
    answers = [ask(child, 1, prompt), ask(child, 2, prompt), ask(child, 3, (3, 4), logprobs=2)]
    constrained = ask(child, 4, constraint=constraint)
    assert [answer.rest()[0] for answer in answers[:2]] == [[8, 9, 8, 9, 8, 9]] * 2
    assert answers[2].next().top == ((3, -0.5), (4, -1.5))
    tokens, last = constrained.rest()
    assert tokens == [40, 41, 42, 43, 44, 45] == constraint.accepted and last.finish == "length"
    assert child.stats().tokens >= 18 and child.beat().age_s == 0.0
    child.check()


def test_what_can_never_be_served_is_refused_here(start: Start) -> None:
    child = start()
    with pytest.raises(RooftopError, match="prompt: got 400; accepted: 0 to 399"):
        ask(child, 1, (400,))
    with pytest.raises(RooftopError, match="at most 512 together"):
        ask(child, 1, max_tokens=510)


def test_a_full_queue_is_refused_and_a_cancelled_request_ends(start: Start) -> None:
    child = start(step_s=0.02)
    answers = [ask(child, id, max_tokens=400) for id in range(1, 73)]
    with pytest.raises(Overloaded):
        ask(child, 99)
    for id in range(1, 73):
        child.cancel(id)
    assert {answer.rest()[1].finish for answer in answers} <= {"cancelled", "error"}
    assert ask(child, 99).rest()[1].finish == "length"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_a_process_that_stops_or_is_killed_is_started_again(start: Start, number: signal.Signals) -> None:
    child = start(step_s=0.05)
    begun = ask(child, 1, max_tokens=400)
    begun.next()
    first = child.pid
    assert first is not None
    os.kill(first, number)
    # This one has sent nothing when the process is lost: it is submitted again, and nobody notices.
    silent = ask(child, 2, max_tokens=3)
    _, last = begun.rest()
    assert last.finish == "error" and last.message is not None
    if number == signal.SIGSTOP:
        assert "it has not answered for" in last.message and "echoing" in last.message
    else:
        assert "SIGKILL" in last.message
    assert silent.rest() == ([5, 6, 7], Token(id=2, token=7, finish="length"))
    assert child.pid != first and child.beat().restarts == 1 and not child.beat().restarting


def test_a_hanging_step_is_noticed_while_its_process_answers(start: Start) -> None:
    child = start(hang_s=1.0)
    _, last = ask(child, 1, (1, 5)).rest()
    assert last.finish == "error" and "its step has taken" in str(last.message) and "echoing" in str(last.message)
    assert ask(child, 2).rest()[1].finish == "length"


def test_a_request_that_ends_the_process_each_time_is_given_up(start: Start) -> None:
    """It has sent a token before; one that has not is tried once more."""
    failed = list[bool]()
    child = start(step_s=0.0, on_failed=lambda: failed.append(True))
    _, last = ask(child, 1, (2, 5)).rest()
    assert last.finish == "error" and "status 3" in str(last.message)
    assert ask(child, 2).rest()[1].finish == "length" and not failed


def test_the_process_ends_with_the_one_that_started_it(start: Start) -> None:
    child = start()
    pid = child.pid
    assert pid is not None
    assert child.drain(5.0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_draining_ends_while_the_process_is_started_again(start: Start) -> None:
    child = start()
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    while not child.beat().restarting:
        time.sleep(0.01)
    answer = ask(child, 1)
    child.drain(0.0)
    assert answer.rest()[1].finish in ("cancelled", "length")
