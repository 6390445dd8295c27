"""``rooftop serve`` as two processes that are one engine: asked over HTTP, told to end, and killed."""

from __future__ import annotations

import ipaddress
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
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


def command_of(folder: Path, *arguments: str, mesh: str = "tensor=2,context=2") -> list[str]:
    """The command of both processes, with two emulated devices each, but for --process."""
    return [
        ROOFTOP, "serve", str(folder), *ENGINE, *arguments, "--mesh", mesh, "--devices", "2",
        "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--json",
    ]  # fmt: skip


@contextmanager
def follower(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    """The process that does not answer."""
    words = [*command, "--process", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def leader(command: list[str], folder: Path, port: int = 0) -> Iterator[Served]:
    """The server."""
    with started([*command, "--process", "0", "--port", str(port)], folder, env=ENVIRONMENT) as served:
        yield served


@contextmanager
def together(
    folder: Path, *arguments: str, mesh: str = "tensor=2,context=2"
) -> Iterator[tuple[Served, subprocess.Popen[str]]]:
    """The server of two processes, and the one that does not answer."""
    command = command_of(folder, *arguments, mesh=mesh)
    with follower(command) as other, leader(command, folder.parent) as served:
        yield served, other


def child_of(parent: int) -> int:
    """The process that another one keeps."""
    while True:
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with suppress(OSError, IndexError):
                    if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                        return int(entry.name)


def likeliest(served: Served) -> str:
    """An answer, which may have to wait until the engine is back."""
    answer = served.complete(timeout=600, temperature=0, max_tokens=20)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def wait_until(served: Served, doing: str) -> None:
    """Ask /ready until the server says that it is restarting, and what it does."""
    while True:
        answer = served.http.get("/ready")
        if answer.status_code == 503 and doing in answer.json()["doing"]:
            assert answer.json()["status"] == "restarting"
            return


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
def test_a_process_that_is_lost_or_stopped_is_started_again(model: Path) -> None:
    """A stream that has begun ends with an error; requests that have sent nothing are repeated, and answered."""
    with together(model) as (served, other):
        expected = likeliest(served)
        with served.http.stream(
            "POST", "/v1/completions",
            json={"model": served.model, "prompt": "a", "max_tokens": 50, "ignore_eos": True, "stream": True},
        ) as stream:  # fmt: skip
            lines = stream.iter_lines()
            next(lines)
            os.kill(child_of(other.pid), signal.SIGKILL)
            last = [line for line in lines if line][-1]
        # Said by the link, or by the collective that the step was in: whichever hears of it first.
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
        assert likeliest(served) == expected
        assert served.metric("rooftop_engine_restarts_total") == 1
        os.kill(child_of(other.pid), signal.SIGSTOP)
        assert likeliest(served) == expected
        assert served.metric("rooftop_engine_restarts_total") == 2
        status, log = served.stop()
        assert status == 0 and other.wait(60) == 0
    losses = [line["event"] for line in log if line["event"].startswith("the engine is lost")]
    # A stopped process is killed by its own keeper or missed by the first process, both after 6 s.
    assert "process 1 of the engine is lost" in losses[0] and "process 1 of the engine" in losses[1]


@pytest.mark.slow
def test_an_engine_waits_for_a_process_that_others_start(model: Path) -> None:
    """Either end is killed with its keeper, as with its machine; the same command brings the engine back."""
    command, port = command_of(model), free_port()
    with ExitStack() as first, ExitStack() as second:
        other = second.enter_context(follower(command))
        served = first.enter_context(leader(command, model.parent, port))
        expected = likeliest(served)
        second.close()
        wait_until(served, "waiting for the other processes of the engine")
        other = second.enter_context(follower(command))
        assert likeliest(served) == expected
        first.close()
        served = first.enter_context(leader(command, model.parent, port))
        assert likeliest(served) == expected
        assert other.poll() is None
        assert served.stop()[0] == 0 and other.wait(60) == 0


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
