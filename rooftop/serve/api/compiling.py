"""Grammars, compiled within limits: the work itself, and processes in which a grammar may fail without harm.

A grammar comes from a client, and a native library compiles it: it may take any time and memory, or end its process. So
each is first compiled in a process of its own, with limits of time, memory and stack. Only one that passes there is
compiled in the process that answers, in a thread with a larger stack.

A process that has read the tokenizer and has one thread starts these processes by ``fork``: a grammar costs
milliseconds, and nothing of one is left for the next. The starter reads its task from stdin, and from the socket that
is its stdout a message with the descriptor of another socket for each grammar. On that socket come the grammar and then
the answer, as JSON; an end without an answer says that the process ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import llguidance

from rooftop.core.errors import RooftopError

#: Most characters of a schema or a regular expression: a thousand times a long one.
MOST_CHARACTERS = 256 * 1024
#: Work and states of a grammar. llguidance does about 50,000 units of the first fuel, 14,000 of the second and 20,000
#: items in a millisecond, and a state takes 1 to 2 kB (its documentation of ``LLParserLimits``).
_LIMITS = llguidance.LLParserLimits(
    initial_lexer_fuel=500_000,
    step_lexer_fuel=50_000,
    step_max_items=20_000,
    max_lexer_states=20_000,
    max_grammar_size=100_000,
    verbose_errors=False,
)
#: JSON as Python's json.dumps writes it: with free white space, small models never stop writing blanks.
_COMPACT: Any = {"whitespace_flexible": False}
#: Seconds of a processor, seconds by the clock, and bytes for a grammar, besides what the tokenizer takes.
COMPILE_CPU_S, COMPILE_S, COMPILE_BYTES = 3, 30, 512 * 2**20
#: Bytes of the stack on which a grammar is compiled, apart and in the process that answers: what has had room on the
#: first has it on the second.
_TRIAL_STACK, _STACK = 16 * 2**20, 64 * 2**20
#: Nice value of the processes: where cores are scarce, answers in progress go first.
_NICE = 10
#: Seconds for the end of the starter, and after a process's own limit.
_END_S, _MARGIN_S = 5.0, 5.0
#: The first byte of a process that compiles; its answer follows.
_BEGUN = b" "
#: Most starts of a starter that ends.
_STARTS = 3
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


@dataclass(frozen=True, kw_only=True)
class Grammar:
    """A JSON Schema (as text) or a regular expression for a whole answer; ``field`` of the request asks for it."""

    kind: Literal["json", "regex"]
    text: str
    field: str = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class TokenizerTask:
    """The tokenizer of grammars: ``definition`` is a tokenizer.json, ``vocab`` the V of the model's logits."""

    definition: str
    vocab: int
    ends: tuple[int, ...]

    def load(self) -> llguidance.LLTokenizer:
        """The tokenizer. Raises RooftopError."""
        try:
            return llguidance.LLTokenizer(self.definition, n_vocab=self.vocab, eos_token=list(self.ends))
        except Exception as error:  # the package raises nothing narrower
            raise RooftopError(
                "response_format", "a constraint", f"a tokenizer that llguidance reads ({error})"
            ) from None


class Unkeepable(Exception):
    """A grammar that cannot be enforced: ``given`` and ``accepted`` of the error about its field.

    ``lasting``: it never can. A process may have ended for want of time that others took.
    """

    def __init__(self, value: str, accepted: str, *, lasting: bool = True) -> None:
        self.given, self.accepted, self.lasting = value, accepted, lasting
        super().__init__(value)


def compile_grammar(tokenizer: llguidance.LLTokenizer, grammar: Grammar) -> llguidance.LLMatcher:
    """The matcher of a grammar. Raises Unkeepable."""
    if grammar.kind == "json":
        try:
            source = llguidance.LLMatcher.grammar_from_json_schema(grammar.text, overrides=_COMPACT)
        except ValueError as error:
            raise Unkeepable("a schema", one_sentence(str(error))) from None
    else:
        source = llguidance.LLMatcher.grammar_from_regex(grammar.text)
    matcher = llguidance.LLMatcher(tokenizer, source, log_level=0, limits=_LIMITS)
    if matcher.is_error():
        raise Unkeepable("a constraint that cannot be enforced", one_sentence(matcher.get_error()))
    # Most grammars that exceed the limits do so at their first token. They are refused before anything is sent.
    probe = matcher.deep_copy()
    allowed = int.from_bytes(probe.compute_bitmask(), "little")
    if not allowed and not probe.is_error():
        raise Unkeepable("a constraint that no text of this tokenizer keeps", "one that a text can keep")
    if not probe.is_error():
        probe.consume_token(allowed.bit_length() - 1)
    if probe.is_error():
        reason = one_sentence(probe.get_error())
        raise Unkeepable("a constraint over the limits of grammars", f"a simpler one ({reason})")
    return matcher


def one_sentence(text: str) -> str:
    """The first sentence of llguidance's error in one line."""
    return " ".join(text.partition("<non-verbose/>")[0].split())[:300]


def with_stack(stack: int, start: Callable[[], None]) -> None:
    """Call ``start``, which starts threads, so that each of them has a stack of so many bytes."""
    before = threading.stack_size(stack)
    try:
        start()
    finally:
        threading.stack_size(before)


def with_room(start: Callable[[], None]) -> None:
    """Call ``start``, which starts threads, so that they have the stack for any grammar that passed its trial."""
    with_stack(_STACK, start)


class Trials:
    """Compiles grammars in processes of their own, which it starts when the first one comes. Any thread may ask."""

    def __init__(self, task: TokenizerTask) -> None:
        self._task = task
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def check(self, grammar: Grammar) -> None:
        """Compile a grammar apart. Raises Unkeepable, also if its process ended or took too long."""
        for _ in range(_STARTS):
            control, answer = self._starter(), b""
            with suppress(OSError):
                answer = _ask(control, grammar)
            if answer == _BEGUN:
                limits = f"{COMPILE_CPU_S} s and {COMPILE_BYTES // 2**20} MiB"
                wrong = "a constraint that could not be compiled"
                raise Unkeepable(wrong, f"a simpler one: each has {limits}", lasting=False)
            if answer:
                if wrong_fields := json.loads(answer):
                    raise Unkeepable(wrong_fields["given"], wrong_fields["accepted"])
                return
            # No process has begun: the one that starts them has ended, or does not answer.
            with self._lock:
                if self._control is control:
                    self._end()
        raise RuntimeError("the process that compiles grammars does not start")

    def close(self) -> None:
        """End the process that starts others."""
        with self._lock:
            self._end()

    @property
    def pid(self) -> int | None:
        """Process id of the starter; None before the first grammar."""
        return None if self._process is None else self._process.pid

    def _starter(self) -> socket.socket:
        with self._lock:
            if self._process is None or self._process.poll() is not None or self._control is None:
                self._end()
                ours, theirs = socket.socketpair()
                with theirs:
                    self._process = subprocess.Popen(
                        [sys.executable, "-m", "rooftop.serve.api.compiling"],
                        stdin=subprocess.PIPE,
                        stdout=theirs.fileno(),
                        # A library that panics writes there, and the log is JSON.
                        stderr=subprocess.DEVNULL,
                        # Ctrl-C is for us: we finish what is running.
                        start_new_session=True,
                    )
                self._control = ours
                assert self._process.stdin is not None
                # If it has ended already, the next message says so.
                with suppress(OSError), self._process.stdin as stdin:
                    stdin.write(json.dumps({**asdict(self._task), "parent": os.getpid()}).encode())
            return self._control

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait(_END_S)
        self._process = self._control = None


def _ask(control: socket.socket, grammar: Grammar) -> bytes:
    """Answer of a new process about a grammar: nothing if it did not begin. Raises OSError."""
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(COMPILE_S + _MARGIN_S)
        with theirs:
            socket.send_fds(control, [b"."], [theirs.fileno()])
        ours.sendall(json.dumps(asdict(grammar)).encode())
        ours.shutdown(socket.SHUT_WR)
        return _read(ours)


def _read(connection: socket.socket) -> bytes:
    received = bytearray()
    while data := connection.recv(2**16):
        received += data
    return bytes(received)


def _limit() -> None:
    """Limit what this process may take. Systems differ in the limits that they have."""
    # The action of these signals is the end of the process.
    signal.alarm(COMPILE_S)
    resource.setrlimit(resource.RLIMIT_CPU, (COMPILE_CPU_S, COMPILE_CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm", encoding="ascii") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
        most = now + COMPILE_BYTES + _TRIAL_STACK
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _try(connection: socket.socket, tokenizer: llguidance.LLTokenizer) -> None:
    """Compile the grammar that comes on ``connection``, and answer there."""
    connection.sendall(_BEGUN)
    grammar = Grammar(**json.loads(_read(connection)))
    _limit()
    answers = list[dict[str, Any]]()

    def work() -> None:
        try:
            compile_grammar(tokenizer, grammar)
        except Unkeepable as wrong:
            answers.append({"given": wrong.given, "accepted": wrong.accepted})
        else:
            answers.append({})

    thread = threading.Thread(target=work)
    with_stack(_TRIAL_STACK, thread.start)
    thread.join()
    connection.sendall(json.dumps(answers[0]).encode())


def main() -> None:
    """Start a process for each grammar, until the process that asks ends."""
    fields = json.load(sys.stdin.buffer)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != fields["parent"]:
            return
    os.nice(_NICE)
    # Processes that have ended leave nothing behind.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    tokenizer = TokenizerTask(definition=fields["definition"], vocab=fields["vocab"], ends=fields["ends"]).load()
    control = socket.socket(fileno=os.dup(1))
    os.dup2(2, 1)
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            if os.fork():
                continue
            try:
                control.close()
                _try(connection, tokenizer)
            finally:
                os._exit(0)


if __name__ == "__main__":
    main()
