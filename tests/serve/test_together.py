"""``rooftop serve`` as two processes that are one engine: asked over HTTP, told to end, and killed."""

from __future__ import annotations

import ipaddress
import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rooftop.serve.hosts.together import own_host
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

#: Pages for two sequences, of four: the others wait in the hosts' memory.
SHORT = ["--page-tokens", "4", "--pages", "32", "--host-pages", "80"]


@contextmanager
def together(
    folder: Path, *arguments: str, mesh: str = "tensor=2,context=2"
) -> Iterator[tuple[Served, subprocess.Popen[str]]]:
    """The server of two processes with two emulated devices each, and the process that does not answer."""
    command = [
        ROOFTOP, "serve", str(folder), *ENGINE, *arguments, "--mesh", mesh, "--devices", "2",
        "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--json",
    ]  # fmt: skip
    other = subprocess.Popen(
        [*command, "--process", "1"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        with started([*command, "--process", "0", "--port", "0"], folder.parent, env=ENVIRONMENT) as served:
            yield served, other
    finally:
        other.kill()
        other.communicate()


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [False, True])
def test_two_processes_answer_as_one(model: Path, expected: tuple[list[str], list[str]], drafts: bool) -> None:
    with together(model, *(["--draft-length", "2", "--draft", str(model)] if drafts else [])) as (served, other):
        assert (texts(served), adjusted(served)) == expected
        assert served.metric("rooftop_compilations_total") == 0
        assert (served.metric("rooftop_accepted_tokens_total") > 0) == drafts
        served.wait_until_idle()
        # A signal to one of them ends all, when what runs is finished.
        finishes_when_told(served, other, max_tokens=50)
        out, err = other.communicate(timeout=60)
        assert (other.returncode, err) == (0, "")
        assert json.loads(out) | {"pid": 0} == {
            "kind": "serve", "role": "follow", "process": 1, "processes": 2, "model": "tiny", "pid": 0,
        }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "arguments", "preempts"),
    [
        ("data=2,tensor=2", [], False),
        # Each process has one stage.
        ("stage=2,tensor=2", [], False),
        ("data=2,stage=2", ["--host-pages", "8"], False),
        ("tensor=2", ["--batching", "disaggregated", "--prefill-devices", "2"], False),
        ("tensor=2,context=2", ["--kv-split", "batch", "--preemption", "swap", *SHORT], True),
    ],
)
def test_two_processes_are_copies_or_apart_or_swap_to_their_hosts(
    model: Path, expected: tuple[list[str], list[str]], mesh: str, arguments: list[str], preempts: bool
) -> None:
    with together(model, *arguments, mesh=mesh) as (served, other):
        assert (texts(served), adjusted(served)) == expected
        assert served.metric("rooftop_compilations_total") == 0
        assert (served.metric("rooftop_preemptions_total") > 0) == preempts
        served.wait_until_idle()
        assert served.stop()[0] == 0
        assert other.wait(60) == 0


@pytest.mark.slow
def test_a_lost_process_ends_requests_with_an_error_and_the_server(model: Path) -> None:
    with together(model) as (served, other):
        with served.http.stream(
            "POST", "/v1/completions",
            json={"model": served.model, "prompt": "a", "max_tokens": 50, "ignore_eos": True, "stream": True},
        ) as stream:  # fmt: skip
            lines = stream.iter_lines()
            next(lines)
            other.kill()
            last = [line for line in lines if line][-1]
        # Said by the link, or by the collective that the step was in: whichever hears of it first.
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert served.process.wait(60) == 1
        assert served._log.read_text().splitlines()[-1].startswith("rooftop: process 1 of the engine is lost")


@pytest.mark.slow
def test_the_others_end_with_the_first(model: Path) -> None:
    with together(model) as (served, other):
        served.process.kill()
        out, err = other.communicate(timeout=60)
        assert other.returncode == 1 and json.loads(out)["process"] == 1
        assert err.splitlines()[-1].startswith("rooftop: the first process of the engine is lost")


@pytest.mark.slow
def test_processes_that_serve_something_else_are_refused(model: Path) -> None:
    command = [
        ROOFTOP, "serve", str(model), *ENGINE, "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2",
        "--devices", "1", "--mesh", "tensor=2", "--port", "0",
    ]  # fmt: skip
    second = subprocess.Popen(
        [*command, "--process", "1", "--page-tokens", "8"], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
    )
    try:
        first = subprocess.run(
            [*command, "--process", "0"], capture_output=True, text=True, env=ENVIRONMENT, timeout=120
        )
        line = "rooftop: page_tokens of process 1: got '8'; accepted: 16, as in process 0"
        assert (first.returncode, first.stderr.splitlines()[-1]) == (2, line)
        assert second.wait(60) == 1
    finally:
        second.kill()
        second.communicate()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--coordinator", "127.0.0.1:9"], "coordinator: got '127.0.0.1:9'; accepted: --processes N and --process I"),
        (
            ["--coordinator", "127.0.0.1:9", "--generate-at", "local"],
            "generate-at: got 'local'; accepted: HOST:PORT with",
        ),
        (["--coordinator", "127.0.0.1:9", "--processes", "2", "--process", "2"], "process: got 2; accepted: 0 to 1"),
    ],
)
def test_wrong_options_are_one_line(model: Path, arguments: list[str], message: str) -> None:
    command = [ROOFTOP, "serve", str(model), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and message in done.stderr


def test_where_the_first_process_is_reached() -> None:
    assert [own_host(address) for address in ("10.0.0.1:80", "[::1]:80", "there:1")] == ["10.0.0.1", "::1", "there"]
    assert ipaddress.ip_address(own_host("auto"))
