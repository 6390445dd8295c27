"""Messages between the API and the engine: requests in, tokens out. Token ids only; texts stay in the API.

Dims: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.scheduling.serving.scheduler import Policy

#: Why a request ends.
TokenFinish = Literal["stop", "length", "cancelled", "error"]
#: Most alternatives of ``Sampling.logprobs``, as in OpenAI's API.
MOST_TOP = 20


class Constraint(Protocol):
    """Constraint on the next tokens: a grammar or a schema. One object a request; the engine's thread calls it.

    Another process may compute the masks: until one is ``ready``, its request is left out of steps.
    """

    def ready(self, wait_s: float = 0.0) -> bool:
        """Return True if ``mask`` answers at once, now or within ``wait_s``."""
        return True

    def when_ready(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the mask is ready, here or in another thread."""
        call()

    def mask(self) -> npt.NDArray[np.uint32]:
        """The tokens allowed next, [ceil(V/32)]: token t is bit t % 32 of word t // 32."""
        ...

    def accept(self, token: int) -> None:
        """Advance by ``token``, which was chosen. The engine asks for the next mask only after this."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling of a request's tokens.

    Logits first get the penalties (OpenAI's ``presence_penalty`` and ``frequency_penalty`` count what was generated;
    ``repetition_penalty``, of Keskar et al. 2019, divides positive and multiplies negative logits of tokens of prompt
    and output alike), then ``logit_bias``, then the mask of ``constraint``. ``temperature`` 0 takes the likeliest.
    Otherwise logits are divided by it, and one token is drawn among the ``top_k`` likeliest (None: all), of these
    among the fewest whose probabilities reach ``top_p``, of these among those at least ``min_p`` times as likely as the
    likeliest. ``seed`` draws the same tokens whatever is in the batch; None: a seed of the engine's.

    ``stop_tokens`` end the text, and so do those of the model unless ``ignore_eos``; the last token is delivered with
    ``finish`` 'stop'. ``logprobs`` asks for the logarithms of the probabilities, of the model before any of the above:
    of the chosen token, and of so many of the likeliest (0: of none besides). None: not at all.

    Raises RooftopError naming the field.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1)
        _real("temperature", self.temperature, 0.0, 100.0)
        if self.top_k is not None:
            _whole("top_k", self.top_k, 1)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0:
            raise RooftopError("top_p", self.top_p, "a number above 0, at most 1")
        _real("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**64)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MOST_TOP)
        _real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        for token, bias in self.logit_bias.items():
            _whole("logit_bias", token, 0)
            _real(f"logit_bias of {token}", bias, -100.0, 100.0)

    @property
    def penalised(self) -> bool:
        """True if the choice depends on earlier tokens."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1.0)


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """``prompt`` are token ids, at least one; ``id`` is the caller's, and of one request at a time.

    ``arrival_s`` is on the clock ``time.monotonic``.
    """

    id: int
    prompt: tuple[int, ...]
    sampling: Sampling
    arrival_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Token:
    """One token of request ``id``, or why there is none.

    ``token`` is None with the finishes 'cancelled' and 'error' (``message`` says what happened), else never.
    ``logprob`` and ``top``, the likeliest tokens with their log-probabilities, best first, are there if asked for.
    ``finish`` is 'stop', 'length', 'cancelled' or 'error' on the last one of a request, which every request that was
    submitted gets.
    """

    id: int
    token: int | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    finish: TokenFinish | None = None
    message: str | None = None


Deliver = Callable[[Token], None]


class Overloaded(Exception):
    """The queue is full; it may have room after ``retry_after_s``."""

    def __init__(self, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"the queue is full; try again in {retry_after_s:.0f} s")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramTimes:
    """Time of one compiled program over all its ``runs``: input to a simulation of this engine.

    It has room for ``sequences`` sequences and ``tokens`` new tokens of prompts in all (0: it generates one token for
    each sequence), each of which can read ``context_tokens`` tokens of KV; next to those that it prefills, it generates
    a token for ``generating`` others. ``seconds`` are from when the step that ran
    it began until its tokens were known to the host; programs of one step share the step's time.
    """

    sequences: int
    tokens: int
    context_tokens: int
    generating: int = 0
    runs: int
    seconds: float

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes that identify the program."""
        return self.sequences, self.tokens, self.context_tokens, self.generating


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """Totals of an engine since it started, and its current state. Seconds are sums.

    ``waiting`` requests have no place yet, ``running`` ones do. ``host_s`` is the time of steps outside XLA, ``step_s``
    that of all steps. ``prefix_tokens`` are those of ``prompt_tokens`` that were found in the prefix cache.
    ``compilations`` are those after warm-up (0, or something is wrong), ``programs`` those of the warm-up. Of
    ``guessed`` tokens (speculative decoding) ``accepted`` were right. So many ``servers`` take their steps at once,
    each with a cache for each of ``kv_groups`` groups of devices; ``busy_s`` is the time of the longest of those steps.
    Of ``pages`` a server that only prefills has ``prefill_pages``, in ``prefill_kv_groups`` groups. In ``handover_s``
    ``handovers`` sequences came from it to the process that generates.
    """

    waiting: int
    running: int
    pages_used: int
    pages: int
    host_pages_used: int
    host_pages: int
    page_tokens: int
    requests: int
    steps: int
    tokens: int
    prompt_tokens: int
    prefix_tokens: int
    preemptions: int
    host_s: float
    step_s: float
    programs: int
    compilations: int
    guessed: int = 0
    accepted: int = 0
    busy_s: float = 0.0
    servers: int = 1
    kv_groups: int = 1
    prefill_pages: int = 0
    prefill_kv_groups: int = 0
    handovers: int = 0
    handover_s: float = 0.0
    program_times: tuple[ProgramTimes, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """The heartbeat of a step loop: it turned ``age_s`` ago, 0 while it has nothing to do.

    ``doing`` names the programs of the step in progress and their batch. The engine was restarted ``restarts`` times,
    and is ``restarting`` now.
    """

    age_s: float
    doing: str = ""
    restarting: bool = False
    restarts: int = 0


class ServingEngine(Protocol):
    """Interface of an engine to the API. All methods are safe to call from any thread."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a prompt and its output together."""
        ...

    @property
    def devices(self) -> str:
        """Number and kind of the devices that it runs on."""
        ...

    @property
    def policy(self) -> Policy:
        """Batching policy; /metrics reports it so that a simulation can use the same."""
        ...

    @property
    def prefix_cache(self) -> bool:
        """True if prompts with a common prefix share KV."""
        ...

    def start(self) -> None:
        """Compile everything (minutes, for a large model) and begin to serve; returns when requests are served."""
        ...

    def submit(self, request: GenerationRequest, deliver: Deliver) -> None:
        """Queue a request. ``deliver`` is called from the engine's thread, and must return at once.

        Raises RooftopError if the request can never be served, and Overloaded if the queue is full.
        """
        ...

    def cancel(self, id: int) -> None:
        """End a request with 'cancelled'; nothing happens if it has ended already."""
        ...

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests (``submit`` raises Overloaded), finish those in progress, and stop.

        Requests left after ``timeout_s`` end with 'cancelled'. Return True if none were left.
        """
        ...

    def stats(self) -> EngineStats:
        """Current statistics."""
        ...

    def beat(self) -> Beat:
        """The heartbeat of the step loop."""
        ...

    def check(self) -> None:
        """Raises AssertionError if a page is lost: each must be free, cached, or held by a request."""
        ...


def _whole(name: str, value: object, least: int, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        upto = "" if most == math.inf else f" to {int(most):,}"
        raise RooftopError(name, value, f"a whole number from {least:,}{upto}" if upto else f"{least} or more")


def _real(name: str, value: object, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise RooftopError(name, value, f"a number from {least:g} to {most:g}")
