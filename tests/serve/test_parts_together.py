"""``rooftop serve`` as two parts of two processes each: asked over HTTP, told to end, and one of them killed."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.serving_process import (
    ENGINE,
    ENVIRONMENT,
    ROOFTOP,
    Served,
    adjusted,
    finishes_when_told,
    started,
    texts,
)

#: Of two groups each has pages for one answer and a bit: of two there, one has to wait in the hosts' memory.
SHORT = ["--page-tokens", "4", "--max-model-len", "44", "--pages", "22", "--host-pages", "80"]


class Part:
    """Two processes of two emulated devices each; the first one says where it is."""

    def __init__(self, folder: Path, arguments: list[str], port: str) -> None:
        command = [
            ROOFTOP, "serve", str(folder), *ENGINE, *arguments, "--devices", "2", "--coordinator",
            f"127.0.0.1:{free_port()}", "--processes", "2", "--json",
        ]  # fmt: skip
        self.first = [*command, "--process", "0", "--port", port]
        self._second = [*command, "--process", "1"]
        self.begin_second()

    def begin_second(self) -> None:
        self.second = subprocess.Popen(
            self._second, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def end(self) -> None:
        """At once."""
        self.second.kill()
        self.second.communicate()


@contextmanager
def generating(
    folder: Path, *arguments: str, port: str = "0"
) -> Iterator[tuple[str, tuple[subprocess.Popen[str], Part]]]:
    """Where a part listens that generates, its first process, and itself."""
    part = Part(folder, [*arguments, "--role", "generate"], port)
    first = subprocess.Popen(part.first, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
    try:
        assert first.stdout is not None
        yield json.loads(first.stdout.readline())["address"], (first, part)
    finally:
        first.kill()
        first.communicate()
        part.end()


@contextmanager
def prefilling(folder: Path, address: str, *arguments: str) -> Iterator[tuple[Served, subprocess.Popen[str]]]:
    """The server, which prefills, and the process that does so with it."""
    part = Part(folder, [*arguments, "--generate-at", address], "0")
    try:
        with started(part.first, folder.parent, env=ENVIRONMENT) as served:
            yield served, part.second
    finally:
        part.end()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("meshes", "swaps"),
    [
        # Each part splits its cache its own way: pages travel whole.
        (("context=4", "tensor=2,context=2"), False),
        (("tensor=2,context=2", "tensor=2,context=2"), True),
    ],
)
def test_two_parts_of_two_processes_answer_as_one(
    model: Path, expected: tuple[list[str], list[str]], meshes: tuple[str, str], swaps: bool
) -> None:
    more = ["--preemption", "swap", "--kv-split", "batch", *SHORT] if swaps else []
    with (
        generating(model, "--mesh", meshes[1], *more) as (address, (first, part)),
        prefilling(model, address, "--mesh", meshes[0], *more[4:6]) as (served, other),
    ):
        assert (texts(served), adjusted(served)) == expected
        assert served.metric("rooftop_compilations_total") == 0
        assert (served.metric("rooftop_preemptions_total") > 0) == swaps
        served.wait_until_idle()
        # A signal to one of them ends its part, and no other, when what runs is finished.
        finishes_when_told(served, other, max_tokens=40)
        assert other.wait(60) == 0
        assert first.poll() is None
        part.second.send_signal(signal.SIGTERM)
        assert [process.wait(60) for process in (first, part.second)] == [0, 0]
        assert part.second.communicate()[1] == ""


@pytest.mark.slow
def test_a_part_that_is_lost_is_linked_when_it_is_there_again(
    model: Path, expected: tuple[list[str], list[str]]
) -> None:
    """Its first process waits for one that was killed; what they had is prefilled again, and no answer differs."""
    port, mesh = str(free_port()), ["--mesh", "tensor=2,context=2"]
    with (
        generating(model, *mesh, port=port) as (address, (first, part)),
        prefilling(model, address, *mesh) as (served, _),
    ):
        assert texts(served) == expected[0]
        fields: dict[str, Any] = {"model": served.model, "prompt": "a", "max_tokens": 50, "temperature": 0}
        whole = served.complete(**fields, ignore_eos=True).json()["choices"][0]["text"]
        with served.http.stream(
            "POST", "/v1/completions", json=fields | {"ignore_eos": True, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            begun = [next(lines) for _ in range(8)]
            part.end()
            part.begin_second()
            events = [line.removeprefix("data: ") for line in (*begun, *lines) if line]
            assert events.pop() == "[DONE]"
            assert "".join(json.loads(event)["choices"][0]["text"] for event in events) == whole
        assert texts(served) == expected[0]
        served.wait_until_idle()
        assert served.metric("rooftop_compilations_total") == 0
        assert first.poll() is None and served.stop()[0] == 0
