"""An engine without a model: it answers with the prompt. What the API does can be told from what a model would."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from rooftop.checkpoints.tokenizer import Tokenizer, train_bpe
from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.requests import (
    Beat,
    Deliver,
    EngineStats,
    GenerationRequest,
    Overloaded,
    ServingEngine,
    Token,
)

#: What begins and ends a turn of the chats here.
TURN, END = "<|turn|>", "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<|turn|>{{ message.role }}\n{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
CORPUS = ['the quick brown fox jumps over the lazy dog. Größe, naïve, 日本語 and 🙂 emoji {"a": 1, "b": [true]}\n'] * 20


def tokenizer() -> Tokenizer:
    """A byte-level BPE of 400 tokens with a chat template and three special tokens."""
    trained = train_bpe(CORPUS, 398)
    definition = json.loads(trained.definition)
    for content in (TURN, END):
        token = {"id": trained.vocab, "content": content, "special": True}
        token |= {"id": trained.vocab + (content == END)}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        definition["added_tokens"].append(token | flags)
    settings = {**trained.settings, "eos_token": END, "chat_template": TEMPLATE}
    return Tokenizer(definition=json.dumps(definition), settings=settings)


@dataclass
class _Running:
    request: GenerationRequest
    deliver: Deliver
    done: int = 0


@dataclass
class EchoEngine:
    """Answers with the tokens of the prompt, one a step for each sequence, and then ``end``.

    With a constraint it takes the lowest token allowed. At most ``room`` sequences; each further one is one too many.
    A prompt that begins with the token ``breaks`` fails at its second token.
    A step takes ``step_s``. With ``holds_last`` no sequence gets its last token before the engine drains.
    """

    end: int
    room: int = 64
    max_model_len: int = 512
    step_s: float = 0.0
    holds_last: bool = False
    breaks: int | None = None
    policy: Policy = field(default_factory=lambda: Policy(max_batch=64))
    prefix_cache: bool = False
    devices: str = "1 x echo"
    cancelled: list[int] = field(default_factory=list)
    steps: int = 0
    tokens: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Condition()
        self._running: dict[int, _Running] = {}
        self._come: deque[_Running] = deque()
        self._draining = self._stopped = False

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        if len(request.prompt) + request.sampling.max_tokens > self.max_model_len:
            raise RooftopError("max_tokens", request.sampling.max_tokens, f"{self.max_model_len} tokens in all")
        with self._lock:
            if self._draining or len(self._running) >= self.room:
                raise Overloaded(2.5)
            self._running[request.id] = _Running(request, deliver)
            self._lock.notify_all()

    def cancel(self, id: int) -> None:
        with self._lock:
            running = self._running.pop(id, None)
            if running is not None:
                self.cancelled.append(id)
                running.deliver(Token(id=id, token=None, finish="cancelled"))
                self._lock.notify_all()

    def drain(self, timeout_s: float) -> bool:
        with self._lock:
            self._draining = True
            whole = self._lock.wait_for(lambda: not self._running, timeout_s)
        for id in list(self._running):
            self.cancel(id)
        with self._lock:
            self._stopped = True
            self._lock.notify_all()
        return whole

    def stats(self) -> EngineStats:
        with self._lock:
            return EngineStats(
                waiting=0, running=len(self._running), pages_used=0, pages=8, host_pages_used=0, host_pages=0,
                page_tokens=16, requests=0, steps=self.steps, tokens=self.tokens, prompt_tokens=0, prefix_tokens=0,
                preemptions=0, host_s=0.0, step_s=0.0, programs=0, compilations=0,
            )  # fmt: skip

    def beat(self) -> Beat:
        return Beat(age_s=0.0)

    def check(self) -> None:
        assert not self._running

    def _run(self) -> None:
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._running or self._stopped)
                if self._stopped:
                    return
                self.steps += 1
                for id, running in list(self._running.items()):
                    constraint = running.request.sampling.constraint
                    if constraint is not None and not constraint.ready():
                        # Another process computes the mask, and is heard by who needs this lock.
                        continue
                    if self.holds_last and running.done + 1 == running.request.sampling.max_tokens:
                        self._lock.wait_for(lambda: self._draining, 0.01)
                        if not self._draining:
                            continue
                    token = self._next(running)
                    running.deliver(token)
                    self.tokens += 1
                    if token.finish is not None:
                        del self._running[id]
                self._lock.notify_all()
            if self.step_s:
                time.sleep(self.step_s)

    def _next(self, running: _Running) -> Token:
        request, sampling, done = running.request, running.request.sampling, running.done
        running.done += 1
        if request.prompt[0] == self.breaks and done == 1:
            return Token(id=request.id, token=None, finish="error", message="a step failed")
        token = request.prompt[done % len(request.prompt)]
        if done == len(request.prompt) and not sampling.ignore_eos:
            token = self.end
        if sampling.constraint is not None:
            mask = sampling.constraint.mask()
            token = next(t for t in range(32 * len(mask)) if mask[t // 32] >> (t % 32) & 1)
            sampling.constraint.accept(token)
        finish = "length" if running.done == sampling.max_tokens else None
        if token in sampling.stop_tokens or (token == self.end and not sampling.ignore_eos):
            finish = "stop"
        if sampling.logprobs is None:
            return Token(id=request.id, token=token, finish=finish)
        top = tuple((token + k, -0.5 - k) for k in range(sampling.logprobs))
        return Token(id=request.id, token=token, logprob=-0.5, top=top, finish=finish)


def main() -> None:
    """Serve an EchoEngine: what a test says in JSON on the command line. Says where when it is ready."""
    from rooftop.serve import http
    from rooftop.serve.api.texts import Texts
    from rooftop.serve.http import HttpLimits, tls_context
    from rooftop.serve.logs import start_logging
    from rooftop.serve.request import Settings
    from rooftop.serve.server import Serving
    from rooftop.serve.sockets import bind

    options = json.loads(sys.argv[1])
    # With fewer reserved descriptors than none, the server accepts more connections than it has descriptors for.
    http._RESERVED = options.get("reserved", http._RESERVED)
    folder = Path(sys.argv[2])
    read = Tokenizer.load(folder)
    assert read.eos is not None
    texts = Texts.load(folder, vocab=read.vocab, ends=(read.eos,))
    log = start_logging("info", sys.stderr)

    def load() -> ServingEngine:
        engine: ServingEngine
        if options.get("child"):
            from rooftop.serve.engine.configuration import Configuration
            from rooftop.serve.hosts.engine_child import EngineChild
            from rooftop.serve.hosts.engine_process import EngineTask
            from rooftop.serve.hosts.parts import EnginePart
            from rooftop.serve.request import ServeRequest

            request = ServeRequest(checkpoint=folder, drain_s=options["engine"]["step_s"])
            task = EngineTask(request=request, part=EnginePart(), configuration=Configuration(), folder=folder)
            engine = EngineChild(task, hang_s=60.0, log=log, command=("-m", "tests.support.engine_echo"))
        else:
            engine = EchoEngine(end=read.eos, **options.get("engine", {}))
        engine.start()
        return engine

    bound = bind("127.0.0.1", 0)
    fields = {name: tuple(v) if isinstance(v, list) else v for name, v in options.get("settings", {}).items()}
    settings = Settings(model="echo", **fields)
    tls = tls_context(*map(Path, options["tls"])) if "tls" in options else None
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{bound.getsockname()[1]}"
    Serving(
        bound=bound, settings=settings, texts=texts, log=log, load=load, drain_s=options.get("drain_s", 10.0),
        limits=HttpLimits(**options.get("limits", {})), tls=tls,
        on_ready=lambda _: print(json.dumps({"url": url, "model": "echo"}), flush=True),
    ).run()  # fmt: skip


if __name__ == "__main__":
    main()
