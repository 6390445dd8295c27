"""Quantised checkpoints, served: greedy tokens are those that transformers continues with."""

from __future__ import annotations

from pathlib import Path

import pytest

from rooftop.serve.engine.loading import load
from rooftop.serve.engine.requests import Sampling
from tests.checkpoints.test_quantised import CASES, NAMES, publish
from tests.support.engines import CONFIGURATION, answers
from tests.support.quickly import QUICKLY


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "llama_awq" else pytest.mark.slow) for name in NAMES]
)
def test_greedy_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    serving = load(publish(name, tmp_path / name), CONFIGURATION, options=QUICKLY)
    serving.stops = frozenset()
    continuations = CASES[name]["greedy"]
    prompts = [case["prompt"] for case in continuations]
    serving.start()
    samplings = [Sampling(max_tokens=len(case["output"]), temperature=0.0) for case in continuations]
    for tokens, case in zip(answers(serving, prompts, samplings), continuations, strict=True):
        assert [token.token for token in tokens] == case["output"]
