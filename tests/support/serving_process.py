"""A server in a process of its own, and what tests ask of it."""

from __future__ import annotations

import json
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai

TEXT = "the quick brown fox jumps over the lazy dog"


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
        for each in (self.http, *self._clients):
            each.close()

    def complete(self, timeout: httpx.Timeout | float = 60, **fields: Any) -> httpx.Response:
        wanted = {"model": self.model, "prompt": TEXT, "max_tokens": 100} | fields
        return self.http.post("/v1/completions", json=wanted, timeout=timeout)

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
