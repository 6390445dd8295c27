"""Texts, templates and grammars are bounded before they cost: time, memory, and the interpreter's lock."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from rooftop.core.errors import RooftopError
from rooftop.serve.api import answers
from rooftop.serve.api.answers import Inbox, TokenStream
from rooftop.serve.api.budget import ByteBudget, Turns
from rooftop.serve.api.compiling import MOST_CHARACTERS, Unkeepable
from rooftop.serve.api.grammars import json_grammar, regex_grammar
from rooftop.serve.api.texts import ChatTemplate, Texts, TooLong
from rooftop.serve.engine.requests import Sampling, Token
from tests.support import serving_echo


@pytest.fixture(scope="module")
def texts() -> Texts:
    tokenizer = serving_echo.tokenizer()
    assert tokenizer.eos is not None
    template = ChatTemplate(templates={"default": serving_echo.TEMPLATE}, tokens={"bos_token": "<|endoftext|>"})
    return Texts(tokenizer=tokenizer, template=template, vocab=tokenizer.vocab, ends=(tokenizer.eos,))


def test_the_longest_prompt_has_at_most_so_many_bytes(texts: Texts) -> None:
    """No text of n tokens is longer than the bound says, so no prompt that fits is refused by it."""
    longest = max(range(texts.vocab), key=lambda token: len(texts.vocabulary.bytes_of(token)))
    text = texts.vocabulary.bytes_of(longest).decode() * 50
    assert len(text.encode()) == texts.most_bytes(50)
    assert len(texts.prompt(text, longest=50)) == 50


def test_a_text_with_too_many_bytes_is_never_tokenised(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Texts, "_ids", lambda *_, **__: pytest.fail("the text was tokenised"))
    with pytest.raises(TooLong, match=r"^prompt: got '1,000,000 bytes'; accepted: 1 to 50 tokens, which have at most"):
        texts.prompt("a" * 1_000_000, longest=50)
    with pytest.raises(TooLong, match="messages: got"):
        texts.chat([{"role": "user", "content": "a" * 1_000_000}], None, None, longest=50)


def test_a_text_of_short_tokens_is_counted_in_pieces(texts: Texts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the bound of bytes a text may have many times the tokens: only a part of it is tokenised."""
    tokenised = list[int]()
    ids = Texts._ids

    def counted(self: Texts, text: str, **options: Any) -> list[int]:
        tokenised.append(len(text))
        return ids(self, text, **options)

    monkeypatch.setattr(Texts, "_ids", counted)
    text = "~" * (texts.most_bytes(1000) - 1)
    with pytest.raises(TooLong, match="more than 1,000 tokens"):
        texts.prompt(text, longest=1000)
    assert sum(tokenised) < len(text) / 2 and max(tokenised) == 4000


def test_other_threads_run_while_a_text_is_tokenised(texts: Texts) -> None:
    """``encode`` of this text keeps the interpreter's lock until it is done; the batch releases it."""
    text, begun, done = "a b c " * 200_000, threading.Event(), threading.Event()

    def tokenise() -> None:
        begun.set()
        texts._ids(text, add_special_tokens=False)
        done.set()

    thread = threading.Thread(target=tokenise)
    thread.start()
    begun.wait()
    turns = 0
    while not done.wait(0.001):
        turns += 1
    thread.join()
    assert turns > 20


def test_a_template_has_a_time_limit() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate(templates={"default": endless}, tokens={})
    with pytest.raises(RooftopError, match=r"what the chat template renders within 0\.1 s"):
        template.render([{"role": "user", "content": "a"}], most_s=0.1)
    # The thread is as before, and another template of it is rendered.
    quick = ChatTemplate(templates={"default": "{{ messages[0].content }}"}, tokens={})
    assert quick.render([{"role": "user", "content": "a"}], most_s=5) == "a"


def test_a_client_may_leave_out_the_generation_prompt(texts: Texts) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = texts.chat(messages, None, None, longest=99)
    shorter = texts.chat(messages, None, {"add_generation_prompt": False}, longest=99)
    assert len(shorter) < len(ids) and ids[: len(shorter)] == shorter


@pytest.mark.parametrize("regex", ["a{1000000}", "a" * (MOST_CHARACTERS + 1)])
def test_a_grammar_that_overflows_is_refused_at_once(texts: Texts, regex: str) -> None:
    with pytest.raises((RooftopError, Unkeepable)):
        texts.grammars.compiled(regex_grammar(regex))
    with pytest.raises(RooftopError, match=r"^schema: got '[0-9,]+ characters'; accepted: at most 262,144"):
        json_grammar({"enum": ["x" * MOST_CHARACTERS]}, "schema")


def test_a_budget_is_shared_in_order() -> None:
    async def check() -> list[str]:
        budget, done = ByteBudget(10), list[str]()

        async def one(name: str, size: int, turns: int) -> None:
            async with budget.take(size):
                assert budget.used <= 10
                for _ in range(turns):
                    await asyncio.sleep(0)
                done.append(name)

        # The third waits for the second, although there is room for it at once; the fourth takes everything.
        tasks = [asyncio.create_task(one(*item)) for item in (("a", 6, 5), ("b", 6, 1), ("c", 2, 1), ("d", 99, 1))]
        left = asyncio.create_task(one("left", 6, 1))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(*tasks)
        assert budget.used == 0
        return done

    assert asyncio.run(check()) == ["a", "b", "c", "d"]


def test_clients_take_turns_in_a_round() -> None:
    async def check() -> list[str]:
        turns, order, go = Turns(2, per_client=1), list[str](), asyncio.Event()

        async def one(client: str) -> None:
            async with turns.take(client):
                order.append(client)
                await go.wait()

        tasks = [asyncio.create_task(one("many")) for _ in range(3)]
        left = asyncio.create_task(one("left"))
        await asyncio.sleep(0)
        # A client has one turn, whatever it asks for; another one has the second at once.
        assert order == ["many", "left"]
        left.cancel()
        tasks += [asyncio.create_task(one(client)) for client in ("few", "few", "other")]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert order == ["many", "left", "few"]
        gone = tasks.pop(1)
        gone.cancel()
        go.set()
        await asyncio.gather(*tasks)
        return order

    # The client that had none comes before the second turns of others.
    order = asyncio.run(check())
    assert order[:4] == ["many", "left", "few", "other"] and sorted(order[4:]) == ["few", "many"]


class Silent:
    """An engine that only notes what it is told."""

    def __init__(self) -> None:
        self.cancelled = list[int]()

    def submit(self, request: Any, deliver: Any) -> None:
        self.deliver = deliver

    def cancel(self, id: int) -> None:
        self.cancelled.append(id)


def test_tokens_are_read_a_few_at_a_time_and_not_kept_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream whose client reads nothing is broken off once too many tokens wait; another one is not."""
    monkeypatch.setattr(answers, "_MOST_WAITING", 200)
    monkeypatch.setattr(answers, "_MANY_WAITING", 100)

    async def check() -> None:
        inbox, engine, other = Inbox(), Silent(), Silent()
        slow, quick = TokenStream(inbox, engine), TokenStream(inbox, other)  # type: ignore[arg-type]
        for stream in (slow, quick):
            stream.submit([(1,)], [Sampling()], 0.0)
        for _ in range(50):
            other.deliver(Token(id=2, token=5))
        await asyncio.sleep(0)
        reading, others = quick.read(), list[int]()
        asyncio.get_running_loop().call_soon(others.append, 1)
        assert len(await anext(reading)) == 32 and others == [1]
        assert len(await anext(reading)) == 18
        for _ in range(300):
            engine.deliver(Token(id=1, token=5))
        await asyncio.sleep(0)
        assert inbox.waiting == 1 and engine.cancelled == [1] and other.cancelled == []
        come = [item async for part in slow.read() for item in part]
        assert [(token.finish, token.token) for _, token, _ in come] == [("error", None)]
        assert inbox.waiting == 0

    asyncio.run(check())
