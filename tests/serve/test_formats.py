"""Quantised checkpoints, served: greedy tokens are those that transformers continues with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from rooftop.serve.engine.loading import load
from rooftop.serve.engine.requests import Sampling
from tests.checkpoints.test_quantised import CASES, NAMES, publish
from tests.support.engines import CONFIGURATION, answers
from tests.support.quickly import QUICKLY
from tests.support.serving_process import ENGINE, ENVIRONMENT, ROOFTOP, started


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


@pytest.mark.slow
def test_served_from_the_command_line(tmp_path: Path) -> None:
    """`rooftop serve FOLDER` of a quantised checkpoint answers with the tokens that transformers continues with."""
    for name in ("gpt_oss_mxfp4", "llama_gptq"):
        folder = publish(name, tmp_path / name)
        words = tokenizers.Tokenizer(WordLevel({f"t{token}": token for token in range(96)}, unk_token="t0"))
        words.pre_tokenizer = Whitespace()
        words.save(str(folder / "tokenizer.json"))
        command = [ROOFTOP, "serve", str(folder), "--port", "0", "--json", *ENGINE]
        with started(command, tmp_path, env=ENVIRONMENT) as server:
            for case in CASES[name]["greedy"]:
                fields = {"prompt": case["prompt"], "max_tokens": len(case["output"]), "temperature": 0}
                text = server.complete(**fields).raise_for_status().json()["choices"][0]["text"]
                assert [int(word[1:]) for word in text.split()] == case["output"]


def test_what_is_not_read_ends_with_one_line(tmp_path: Path) -> None:
    folder = publish("llama_awq", tmp_path / "nf4", quant_method="bitsandbytes", bnb_4bit_quant_type="nf4")
    ended = subprocess.run([ROOFTOP, "serve", str(folder)], capture_output=True, text=True)
    assert ended.returncode == 2 and len(ended.stderr.splitlines()) == 1
    assert "quantization_config.quant_method: got 'bitsandbytes'; accepted: one of awq, " in ended.stderr
