"""A server in a process of its own, and what tests ask of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import openai

from rooftop.checkpoints.huggingface import save_weights
from rooftop.models import from_huggingface
from rooftop.programs.parameters import describe
from tests.support import serving_echo
from tests.support.quickly import QUICK_FLAGS

TEXT = "the quick brown fox jumps over the lazy dog"
ROOFTOP = str(Path(sys.executable).with_name("rooftop"))
#: Options of an engine of the served model, and its environment.
ENGINE = ["--batch-seqs", "4", "--max-model-len", "64", "--pages", "20"]
ENVIRONMENT = os.environ | {
    "XLA_FLAGS": QUICK_FLAGS,
    "JAX_PLATFORMS": "cpu",
    "ROOFTOP_LINK_KEY": "3f0d9c61b27a48e5" * 2,
}
PROMPTS = ["the quick", "brown fox", "jumps over the lazy dog", "a"] * 4


class Served:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], said: dict[str, Any], log: Path) -> None:
        self.process, self.url, self.model, self._log = process, said["url"], said["model"], log
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self._clients: list[openai.OpenAI] = []

    def client(self, key: str = "none") -> openai.OpenAI:
        self._clients.append(openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60))
        return self._clients[-1]

    def close(self) -> None:
        """Every connection of this side."""
        for client in (self.http, *self._clients):
            client.close()

    def complete(self, timeout: httpx.Timeout | float = 60, **fields: Any) -> httpx.Response:
        body = {"model": self.model, "prompt": TEXT, "max_tokens": 100} | fields
        return self.http.post("/v1/completions", json=body, timeout=timeout)

    def metric(self, name: str) -> float:
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))

    def wait_until_idle(self) -> None:
        """Asks until nothing runs; the test's time limit is the only one."""
        while self.metric("rooftop_running_requests"):
            pass

    def ended(self) -> tuple[int, list[dict[str, Any]]]:
        """Its status, once it has ended by itself, and its log."""
        status = self.process.wait(timeout=60)
        return status, [json.loads(line) for line in self._log.read_text(encoding="utf-8").splitlines()]

    def stop(self) -> tuple[int, list[dict[str, Any]]]:
        """SIGTERM, and then the same."""
        self.process.send_signal(signal.SIGTERM)
        return self.ended()


@contextmanager
def started(command: Sequence[str], folder: Path, **more: Any) -> Iterator[Served]:
    """The server that ``command`` starts, which says in JSON on stdout when it is ready; its log goes to ``folder``."""
    # A file: a pipe that no one reads would fill up, and stop the server.
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl", dir=folder, delete=False) as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, **more)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, Path(log.name).read_text(encoding="utf-8")
        served = Served(process, json.loads(line), Path(log.name))
        try:
            yield served
        finally:
            served.close()
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def write_served_model(folder: Path) -> Path:
    """Write a LLaMA of two layers with random weights, and the tokenizer of the echo, to ``folder/tiny``."""
    folder = folder / "tiny"
    tokenizer = serving_echo.tokenizer()
    keys: dict[str, Any] = {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": tokenizer.vocab,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
        "eos_token_id": tokenizer.eos, "rope_theta": 10000.0,
    }  # fmt: skip
    model, random = from_huggingface(keys, "tiny"), np.random.default_rng(0)
    drawn = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(np.float32) * 0.3, describe(model))
    save_weights(folder, model, drawn)
    (folder / "config.json").write_text(json.dumps(keys))
    tokenizer.save(folder)
    return folder


def texts(served: Served, **fields: Any) -> list[str]:
    """Of all prompts, asked at once."""

    def one(prompt: str) -> str:
        answer = served.complete(prompt=prompt, max_tokens=30, temperature=1.0, seed=3, ignore_eos=True, **fields)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, PROMPTS))


def adjusted(served: Served) -> list[str]:
    """The likeliest answers, and those whose tokens depend on masks and on what was said before."""
    fields: dict[str, Any] = {"max_tokens": 20, "temperature": 0, "ignore_eos": True}
    asked: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 2.0},
        {"logit_bias": {"65": 100}},
        {"guided_regex": "(a|b){20}", "ignore_eos": False},
    ]
    return [served.complete(**(fields | change)).json()["choices"][0]["text"] for change in asked]


def finishes_when_told(served: Served, other: subprocess.Popen[str], *, max_tokens: int) -> None:
    """SIGTERM to ``other`` while a stream is read: the stream goes on to its end, and the server ends."""
    with served.http.stream(
        "POST", "/v1/completions",
        json={"model": served.model, "prompt": "a", "max_tokens": max_tokens, "ignore_eos": True, "stream": True},
    ) as stream:  # fmt: skip
        lines = stream.iter_lines()
        next(lines)
        other.send_signal(signal.SIGTERM)
        assert [line for line in lines if line][-1] == "data: [DONE]"
    status, log = served.ended()
    assert status == 0 and log[-1] == log[-1] | {"event": "drained", "all_finished": True}
