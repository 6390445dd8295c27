"""A trace of requests against any server with OpenAI's API, and what its clients wait for."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.core.files import read_text
from rooftop.serve.client.metrics import ReplayMetrics, RequestCounts, TokenCounts
from rooftop.simulate.serving.metrics import Goodput, Targets, spread
from rooftop.simulate.serving.traces import RequestTrace

Floats = npt.NDArray[np.float64]
Progress = Callable[[int, int, str], None]

_TEXTS = 'JSONL of {"prompt": "..."}, or ShareGPT\'s JSON'
#: Statuses of a server that has too much to do.
_REFUSED = (429, 503)


@dataclass(frozen=True, kw_only=True)
class ReplayTarget:
    """A server: its ``url`` (without /v1), ``model`` and ``key``; prompts have token ids below ``vocab``.

    With ``exact``, answers go on after the end of a text (``ignore_eos``), so that they have the lengths of the trace.
    """

    url: str
    model: str
    vocab: int
    key: str | None = None
    exact: bool = True

    @property
    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {} if self.key is None else {"Authorization": f"Bearer {self.key}"}


@dataclass(kw_only=True, slots=True)
class ReplayedRequest:
    """Outcome of one request; times in seconds since the replay began. ``error``: why there was no answer."""

    due_s: float
    sent_s: float = 0.0
    times_s: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    refused: bool = False
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """Measurements of a replay. Definitions are those of ``rooftop.simulate.serving.metrics``, seen by the client.

    A request arrives when it is sent, and a token when its event does, so that times between tokens are times between
    events. The duration is from the first request to the last token.
    """

    records: list[ReplayedRequest]
    targets: Targets

    @property
    def served(self) -> list[ReplayedRequest]:
        """Requests that were answered whole."""
        return [record for record in self.records if record.error is None and record.times_s]

    def sent(self, trace: RequestTrace) -> RequestTrace:
        """The trace that was replayed; in a closed loop requests arrive when they were sent."""
        if trace.clients is None:
            return trace
        return replace(trace, arrival_s=np.sort([record.sent_s for record in self.records]))

    def trace(self) -> RequestTrace:
        """Trace of the served requests, with their send times and lengths, to simulate the same load."""
        served = sorted(self.served, key=lambda item: item.sent_s)
        return RequestTrace(
            arrival_s=np.array([item.sent_s for item in served]) - served[0].sent_s,
            prompt_tokens=np.array([item.prompt_tokens for item in served], np.int64),
            output_tokens=np.array([item.output_tokens for item in served], np.int64),
        )

    @cached_property
    def metrics(self) -> ReplayMetrics:
        """All figures; times in seconds."""
        served, failed = self.served, [record for record in self.records if record.error is not None]
        ttft = np.array([item.times_s[0] - item.sent_s for item in served])
        e2e = np.array([item.times_s[-1] - item.sent_s for item in served])
        after = np.array([item.output_tokens - 1.0 for item in served])
        after[after <= 0] = np.nan
        tpot = (e2e - ttft) / after
        gaps = [b - a for item in served for a, b in itertools.pairwise(item.times_s)]
        first = min((record.sent_s for record in self.records), default=0.0)
        duration = max((item.times_s[-1] for item in served), default=first) - first
        good = self._good(ttft, tpot)
        generated = sum(item.output_tokens for item in served)
        return ReplayMetrics(
            requests=RequestCounts(
                offered=len(self.records),
                finished=len(served),
                refused=sum(item.refused for item in failed),
                failed=sum(not item.refused for item in failed),
                why=next((item.error for item in failed), None),
                per_second=_rate(len(served), duration),
            ),
            tokens=TokenCounts(
                prompt=sum(item.prompt_tokens for item in served),
                generated=generated,
                generated_per_second=_rate(generated, duration),
            ),
            duration_s=duration,
            worst_lag_s=max((record.sent_s - record.due_s for record in self.records), default=0.0),
            ttft_s=spread(ttft),
            tpot_s=spread(tpot),
            itl_s=spread(np.array(gaps)),
            e2e_s=spread(e2e),
            goodput=Goodput(
                ttft_target_s=self.targets.ttft_s,
                tpot_target_s=self.targets.tpot_s,
                requests=good,
                requests_per_second=_rate(good, duration),
                share=good / len(self.records),
            ),
        )

    def _good(self, ttft: Floats, tpot: Floats) -> int:
        met = np.ones(len(ttft), bool)
        if self.targets.ttft_s is not None:
            met &= ttft <= self.targets.ttft_s
        if self.targets.tpot_s is not None:
            met &= ~(tpot > self.targets.tpot_s)
        return int(met.sum())


def _rate(amount: float, of: float) -> float:
    return float(amount / of) if of else 0.0


def prompts_of(trace: RequestTrace, vocab: int, seed: int) -> list[list[int]]:
    """Token ids for each request: at random, but blocks with equal hashes are equal."""
    prompts_of = []
    for request, length in enumerate(trace.prompt_tokens.tolist()):
        ids = list[int]()
        for hashed in () if trace.hashes is None else trace.hashes[request]:
            ids += np.random.default_rng([seed, 1, hashed]).integers(0, vocab, trace.hash_tokens).tolist()
        ids += np.random.default_rng([seed, 0, request]).integers(0, vocab, max(0, length - len(ids))).tolist()
        prompts_of.append(ids[:length])
    return prompts_of


def read_texts(path: Path) -> list[str]:
    """The prompts of a data set: JSONL with a ``prompt`` a line, or the first turns of ShareGPT's JSON.

    Raises RooftopError that names the entry.
    """
    try:
        content = read_text(path, most=2**30)
        rows = [json.loads(line) for line in content.split("\n") if line.strip()] if path.suffix == ".jsonl" else (
            json.loads(content)
        )  # fmt: skip
    except OSError as error:
        raise RooftopError("texts", str(path), f"a file that can be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise RooftopError("texts", str(path), f"{_TEXTS} ({error})") from None
    texts = []
    for number, row in enumerate(rows if isinstance(rows, list) else [rows], start=1):
        match row:
            case {"prompt": str(text)} | {"conversations": [{"value": str(text)}, *_]} if text:
                texts.append(text)
            case {"conversations": list()}:
                continue  # ShareGPT has conversations without a text.
            case _:
                raise RooftopError(f"{path.name} entry {number}", json.dumps(row)[:40], _TEXTS)
    if not texts:
        raise RooftopError("texts", str(path), "one prompt or more")
    return texts


async def replay(
    trace: RequestTrace,
    prompts: Sequence[Sequence[int] | str],
    target: ReplayTarget,
    targets: Targets,
    on_progress: Progress | None = None,
) -> Replayed:
    """Send each request when it is due, without waiting for earlier ones; return when all have ended.

    In a closed loop a request is due when one of the trace's clients has its last answer.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    # A queue may be long: wait for every request that is not refused.
    timeout = httpx.Timeout(None, connect=30.0)
    records = [ReplayedRequest(due_s=due) for due in trace.arrival_s.tolist()]
    clients = asyncio.Semaphore(trace.clients or len(records))
    done = 0
    async with httpx.AsyncClient(base_url=target.url, limits=limits, timeout=timeout, headers=target.headers) as client:
        begun = time.perf_counter()

        async def one(record: ReplayedRequest, prompt: Sequence[int] | str, output: int) -> None:
            nonlocal done
            await asyncio.sleep(max(0.0, record.due_s - (time.perf_counter() - begun)))
            async with clients:
                if trace.clients is not None:
                    record.due_s = time.perf_counter() - begun
                try:
                    await _ask(client, record, _body(target, prompt, output), begun)
                except httpx.HTTPError as error:
                    record.error = f"{type(error).__name__}: {error}"
            done += 1
            if on_progress is not None:
                on_progress(done, len(records), "requests")

        outputs = trace.output_tokens.tolist()
        await asyncio.gather(*(one(*record) for record in zip(records, prompts, outputs, strict=True)))
    return Replayed(records=records, targets=targets)


def _body(target: ReplayTarget, prompt: Sequence[int] | str, output: int) -> dict[str, Any]:
    sent = prompt if isinstance(prompt, str) else list(prompt)
    body = {"model": target.model, "prompt": sent, "max_tokens": output, "stream": True}
    return body | {"stream_options": {"include_usage": True}} | ({"ignore_eos": True} if target.exact else {})


async def _ask(client: httpx.AsyncClient, record: ReplayedRequest, body: Mapping[str, Any], begun: float) -> None:
    record.sent_s = time.perf_counter() - begun
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            text = (await answer.aread()).decode(errors="replace")
            record.refused = answer.status_code in _REFUSED
            record.error = f"{answer.status_code}: {_message(text)}"
            return
        whole = False
        async for line in _lines(answer):
            if not line.startswith("data:"):
                continue
            data = line.removeprefix("data:").strip()
            if data == "[DONE]":
                whole = True
                break
            try:
                event = json.loads(data)
            except ValueError:
                record.error = f"an event that is no JSON: {data[:200]}"
                return
            if "error" in event:
                record.error = _message(data)
                return
            if event.get("choices"):
                record.times_s.append(time.perf_counter() - begun)
            usage = event.get("usage")
            if usage:
                record.prompt_tokens, record.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        if not whole:
            record.error = "the answer broke off"


async def _lines(answer: httpx.Response) -> AsyncIterator[str]:
    """Yield lines as they arrive. Only a line feed ends a line: texts may have Unicode's other line separators."""
    rest = b""
    async for chunk in answer.aiter_bytes():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


def _message(text: str) -> str:
    """Message of an error in OpenAI's form."""
    try:
        return str(json.loads(text)["error"]["message"])[:200]
    except (ValueError, KeyError, TypeError):
        return text[:200]


def find_model(url: str, model: str | None, key: str | None) -> tuple[str, int | None]:
    """The name of the served model, and its vocabulary if the server reports it. Raises RooftopError."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=30.0)
        listed = {item["id"]: item.get("vocab") for item in answer.json()["data"]} if answer.is_success else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise RooftopError("url", url, f"a server with OpenAI's API ({type(error).__name__}: {error})") from None
    if not answer.is_success:
        raise RooftopError("url", url, f"a server with OpenAI's API ({answer.status_code}: {_message(answer.text)})")
    if model is not None and model not in listed:
        raise RooftopError("model", model, f"one of {', '.join(listed)}")
    if model is None and len(listed) != 1:
        raise RooftopError("model", None, f"--model NAME, one of {', '.join(listed)}")
    name = next(iter(listed)) if model is None else model
    return name, listed[name]
