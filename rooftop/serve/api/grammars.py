"""Constraints on answers (by llguidance): grammars of JSON Schemas and regular expressions, within limits.

A grammar comes from a client. Its text, its depth, the states of its lexer and the work for a token are bounded, so
that each mask takes less than a second and some 100 MB at most; a grammar that needs more is the client's error. Each
is compiled in a process of its own first (``rooftop.serve.api.compiling``).
"""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any
from urllib.parse import unquote

import llguidance
import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.serve.api.budget import Turns, be_nice
from rooftop.serve.api.compiling import (
    MOST_CHARACTERS,
    Grammar,
    TokenizerTask,
    Trials,
    Unkeepable,
    compile_grammar,
    one_sentence,
    with_room,
)
from rooftop.serve.engine.requests import Constraint

#: Most levels of objects and arrays of a schema on a path that also follows its references. Published schemas have
#: tens; llguidance takes 2 KiB of stack for a level.
MOST_LEVELS = 512
#: Characters of all grammars that wait to be compiled, and of those whose trial is remembered.
_WAITING, _TRIED = 64 * 2**20, 16 * 2**20


class Matcher(Constraint):
    """Position of one request's answer in its grammar. One thread calls its methods.

    ``failed``, which other threads may read, is why the answer left the grammar, for example because that grew too
    complex.
    """

    def __init__(self, matcher: llguidance.LLMatcher, words: int, field: str) -> None:
        self.field = field
        self.failed: str | None = None
        self._matcher = matcher
        self._mask = np.zeros(words, np.uint32)

    def mask(self) -> npt.NDArray[np.uint32]:
        """The tokens allowed next, [ceil(V/32)]: token t is bit t % 32 of word t // 32. Valid until the next call."""
        self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if self.failed is None and self._matcher.is_error():
            self.failed = one_sentence(self._matcher.get_error())
        if not self._mask.any():
            # An engine has to choose some token; the answer is broken off at it.
            self.failed = self.failed or "no token of the model continues the answer"
            self._mask[:] = 2**32 - 1
        return self._mask

    def accept(self, token: int) -> None:
        """Advance by ``token``. If that fails (see ``failed``), only the end is allowed from then on."""
        if not self._matcher.is_stopped() and not self._matcher.consume_token(token):
            self.failed = one_sentence(self._matcher.get_error())

    def copy(self) -> Matcher:
        """A matcher at the same position."""
        return Matcher(self._matcher.deep_copy(), len(self._mask), self.field)


def json_grammar(schema: Mapping[str, Any], field: str = "response_format.json_schema.schema") -> Grammar:
    """The grammar of a JSON Schema, the value of ``field``. Raises RooftopError if it is too long or too deep."""
    levels = depth(schema)
    if levels > MOST_LEVELS:
        raise RooftopError(field, f"more than {MOST_LEVELS} levels", f"at most {MOST_LEVELS}, references followed")
    text = json.dumps(schema)
    _check_length(text, field)
    return Grammar(kind="json", text=text, field=field)


def regex_grammar(pattern: str, field: str = "guided_regex") -> Grammar:
    """The grammar of a regular expression for the whole answer. Raises RooftopError if it is too long."""
    _check_length(pattern, field)
    return Grammar(kind="regex", text=pattern, field=field)


def _check_length(text: str, field: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise RooftopError(field, f"{len(text):,} characters", f"at most {MOST_CHARACTERS:,}")


def depth(schema: Any) -> int:
    """Levels of objects and arrays on the longest path through a JSON Schema that also follows references.

    A path ends where it would come to a part that it is in. The count ends beyond ``MOST_LEVELS``.
    """
    #: Levels below each part by its id; 0 while it is on the path.
    levels: dict[int, int] = {id(schema): 0}
    # No recursion: the depth is the client's.
    path = [(schema, iter(_parts(schema, schema)), [0])]
    while path:
        part, inner, most = path[-1]
        for child in inner:
            if id(child) not in levels:
                levels[id(child)] = 0
                path.append((child, iter(_parts(schema, child)), [0]))
                if len(path) > MOST_LEVELS:
                    return len(path)
                break
            most[0] = max(most[0], levels[id(child)])
        else:
            path.pop()
            levels[id(part)] = 1 + most[0]
            if path:
                path[-1][2][0] = max(path[-1][2][0], levels[id(part)])
    return levels[id(schema)]


def _parts(schema: Any, part: Any) -> list[Any]:
    """The objects and arrays in a part of a schema, and the one that it refers to."""
    parts = list(part.values() if isinstance(part, Mapping) else part)
    if isinstance(part, Mapping) and isinstance(reference := part.get("$ref"), str):
        parts.append(_resolved(schema, reference))
    return [inner for inner in parts if isinstance(inner, Mapping | list)]


def _resolved(schema: Any, reference: str) -> Any:
    """The part of a schema that a reference points to; None if that is not within it."""
    address, hash_sign, pointer = reference.partition("#")
    if not hash_sign or address:
        return None
    value = schema
    for step in unquote(pointer).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(value, Mapping):
            value = value.get(step)
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


@dataclass(frozen=True, kw_only=True)
class Grammars:
    """Makes matchers for a tokenizer: ``definition`` is a tokenizer.json, ``vocab`` the V of the model's logits.

    ``ends`` are the tokens that end an answer; they are allowed where the grammar may end, and only there.
    """

    definition: str
    vocab: int
    ends: tuple[int, ...]
    _tokenizer: llguidance.LLTokenizer = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.ends:
            raise RooftopError("response_format", "a constraint", "a model that has a token to end its text")
        object.__setattr__(self, "_tokenizer", self._task.load())

    @property
    def _task(self) -> TokenizerTask:
        return TokenizerTask(definition=self.definition, vocab=self.vocab, ends=self.ends)

    @cached_property
    def trials(self) -> Trials:
        """Processes in which grammars are compiled first."""
        return Trials(self._task)

    def compiled(self, grammar: Grammar) -> Matcher:
        """The matcher of a grammar that has passed its trial. Raises Unkeepable."""
        return Matcher(compile_grammar(self._tokenizer, grammar), ceil_div(self.vocab, 32), grammar.field)


class TooManyGrammars(Exception):
    """Too many grammars wait to be compiled."""


class GrammarQueue:
    """Compiles grammars, a few at a time and fairly by client. Used in one event loop.

    ``grammars`` is called, in a thread, when the first grammar comes. A grammar that has passed its trial has no other.
    It is compiled for each request: copies of a matcher share the states of its lexer, and their limit.
    """

    def __init__(self, grammars: Callable[[], Grammars]) -> None:
        self._grammars, self._lock = grammars, threading.Lock()
        self._count = max(2, (os.cpu_count() or 1) // 2)
        # A client has all but one of the turns, so that another's grammar is begun at once.
        self._turns = Turns(self._count, per_client=self._count - 1)
        #: Outcomes of trials, the oldest first; None: it passed.
        self._tried = OrderedDict[Grammar, Unkeepable | None]()
        self._tried_characters = 0
        #: Characters of grammars that wait, by client.
        self._waiting = Counter[str]()

    async def matcher(self, grammar: Grammar, client: str) -> Matcher:
        """A matcher at the beginning of a grammar. Raises RooftopError and TooManyGrammars."""
        size = len(grammar.text)
        if self._waiting[client] + size > _WAITING // 4 or self._waiting.total() + size > _WAITING:
            raise TooManyGrammars
        self._waiting[client] += size
        try:
            async with self._turns.take(client):
                tried = grammar in self._tried
                result: Matcher | Unkeepable | None = self._tried.get(grammar)
                if result is None:
                    work = partial(self._compile, grammar, tried)
                    result = await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting[client] -= size
            if not self._waiting[client]:
                del self._waiting[client]
        self._note(grammar, result if isinstance(result, Unkeepable) else None)
        if isinstance(result, Unkeepable):
            raise RooftopError(grammar.field, result.given, result.accepted)
        return result

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        """Threads for grammars, all of them started, with the stack that these need."""
        pool = ThreadPoolExecutor(self._count, "rooftop grammars", be_nice)
        barrier = threading.Barrier(self._count)

        def start() -> None:
            for _ in range(self._count):
                pool.submit(barrier.wait)

        with_room(start)
        return pool

    def _compile(self, grammar: Grammar, tried: bool) -> Matcher | Unkeepable:
        with self._lock:
            # Once, by the first of several threads.
            grammars, trials = self._grammars(), self._grammars().trials
        try:
            if not tried:
                trials.check(grammar)
            return grammars.compiled(grammar)
        except Unkeepable as wrong:
            return wrong

    def _note(self, grammar: Grammar, outcome: Unkeepable | None) -> None:
        """Keep the outcome of a trial."""
        if outcome is not None and not outcome.lasting:
            return
        if grammar not in self._tried:
            self._tried_characters += len(grammar.text)
        self._tried[grammar] = outcome
        self._tried.move_to_end(grammar)
        while self._tried_characters > _TRIED:
            self._tried_characters -= len(self._tried.popitem(last=False)[0].text)
