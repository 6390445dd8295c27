"""Engines of the tiny models, and what tests ask of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rooftop.checkpoints.huggingface import save_weights
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.configuration import Configuration, Shapes
from rooftop.serve.engine.engine import PagedEngine
from rooftop.serve.engine.loading import load
from rooftop.serve.engine.requests import GenerationRequest, Sampling, Token
from tests.support.checkpoint_tensors import from_checkpoint
from tests.support.quickly import QUICKLY
from tests.support.tiny_models import ORACLES, case

GREEDY: dict[str, Any] = json.loads((ORACLES / "greedy.json").read_text())
NAMES = sorted(set(GREEDY) - {"made_with"})
#: Few programs, so that they are compiled in seconds: batches of 4, chunks of 8 tokens, contexts of 32.
CONFIGURATION = Configuration(
    policy=Policy(max_batch=4, chunk_tokens=12),
    page_tokens=4,
    pages=40,
    host_pages=16,
    max_model_len=32,
    shapes=Shapes(batches=(4,), widths=(8,), contexts=(32,), prefill_tokens=8),
)


def checkpoint(name: str, folder: Path) -> Path:
    """A folder with the tiny model ``name``."""
    model, facts, tensors, _ = case(name)
    save_weights(folder / name, model, from_checkpoint(model, tensors), config=facts["config"])
    return folder / name


def engine(folder: Path, configuration: Configuration = CONFIGURATION, **options: Any) -> PagedEngine:
    """An engine of the checkpoint in ``folder``, no text of which ends by itself."""
    max_model_len = min(configuration.max_model_len or 32, case(folder.name)[0].max_seq_len)
    serving = load(folder, replace(configuration, max_model_len=max_model_len), options=QUICKLY, **options)
    serving.stops = frozenset()
    return serving


def again(original: PagedEngine, **changes: Any) -> PagedEngine:
    """Another engine on the programs of one: their shapes stay."""
    configuration = replace(original.configuration, **changes)
    return PagedEngine(original.replicas, configuration, max_model_len=original.max_model_len, draft=original.draft)


def answers(
    serving: PagedEngine, prompts: Sequence[Sequence[int]], samplings: Iterable[Sampling], *, at_once: bool = True
) -> list[list[Token]]:
    """The tokens of each request; all are submitted before the first step, or one after another."""
    outputs: list[list[Token]] = [[] for _ in prompts]
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        ended = threading.Event()

        def deliver(token: Token, number: int = number, ended: threading.Event = ended) -> None:
            outputs[number].append(token)
            if token.finish is not None:
                ended.set()

        request = GenerationRequest(id=number, prompt=tuple(prompt), sampling=sampling, arrival_s=time.monotonic())
        serving.submit(request, deliver)
        if not at_once:
            assert ended.wait(120)
    assert serving.drain(120)
    serving.check()
    assert serving.stats().pages_used == serving.stats().host_pages_used == 0 or serving.configuration.prefix_cache
    assert serving.stats().compilations == 0
    return outputs


def greedy(name: str, serving: PagedEngine, *, at_once: bool = True) -> tuple[list[list[int | None]], list[list[int]]]:
    """Tokens that the engine generates after the prompts of a family, and those of transformers."""
    cases = GREEDY[name]
    serving.start()
    samplings = [Sampling(max_tokens=len(case["output"]), temperature=0.0) for case in cases]
    outputs = answers(serving, [case["prompt"] for case in cases], samplings, at_once=at_once)
    return [[token.token for token in output] for output in outputs], [case["output"] for case in cases]
