"""``rooftop serve`` in two processes, asked over HTTP while the one that generates is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rooftop.serve.hosts.parts import choose_part
from rooftop.serve.request import ServeRequest
from tests.support.serving_process import (
    ENGINE,
    ENVIRONMENT,
    ROOFTOP,
    Served,
    started,
    texts,
    write_served_model,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served_model(tmp_path_factory.mktemp("models"))


def generate_pid(served: Served) -> int:
    """Of the process that was linked last, as the log says."""
    lines = [json.loads(line) for line in served._log.read_text(encoding="utf-8").splitlines()]
    return int([line["generate_pid"] for line in lines if line["event"] == "link linked"][-1])


@contextmanager
def generating(folder: Path, *arguments: str) -> Iterator[str]:
    """A process that generates; where it listens."""
    command = [ROOFTOP, "serve", str(folder), *ENGINE, *arguments, "--role", "generate", "--port", "0", "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=ENVIRONMENT)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["address"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_a_killed_process_costs_no_answer(tiny: Path) -> None:
    command = [ROOFTOP, "serve", str(tiny), *ENGINE, "--port", "0", "--json", "--generate-at", "local"]
    with started(command, tiny.parent, env=ENVIRONMENT) as served:
        expected = texts(served)
        with served.http.stream(
            "POST", "/v1/completions", json={"model": served.model, "prompt": "a", "max_tokens": 40, "stream": True}
        ) as stream:
            lines = stream.iter_lines()
            # What is generated is on its way: the process has it.
            begun = [next(lines) for _ in range(8)]
            os.kill(generate_pid(served), signal.SIGKILL)
            assert begun and list(lines)[-2:][0] == "data: [DONE]"
        assert texts(served) == expected
        assert served.metric("rooftop_compilations_total") == 0
        served.wait_until_idle()
        assert served.metric("rooftop_kv_pages") == 40
        pid = generate_pid(served)
        status, log = served.stop()
        assert status == 0 and log[-1] == log[-1] | {"event": "drained", "all_finished": True}
        assert [line["level"] for line in log if line["event"].startswith("link lost")] == ["warning"]
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.parametrize("split", [[], ["--mesh", "context=2", "--devices", "2", "--kv-split"]])
def test_a_process_elsewhere_gives_the_same_answers(tiny: Path, split: list[str]) -> None:
    """Also where each has split its cache its own way: pages travel whole."""
    base = [ROOFTOP, "serve", str(tiny), *ENGINE, "--port", "0", "--json"]
    with started(base, tiny.parent, env=ENVIRONMENT) as served:
        expected = texts(served)
    with (
        generating(tiny, *split, *(["batch"] if split else [])) as address,
        started(
            [*base, *split, *(["seq"] if split else []), "--generate-at", address], tiny.parent, env=ENVIRONMENT
        ) as served,
    ):
        assert texts(served) == expected
        assert served.stop()[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--role", "prefill"], "role: got 'prefill'; accepted: one of generate"),
        (["--role", "generate"], "link-key: got nothing"),
        (["--generate-at", "there:80"], "link-key: got nothing"),
        (
            ["--role", "generate", "--link-key", "a-long-word"],
            "link-key: got '11 characters'; accepted: a secret of both",
        ),
        (["--role", "generate", "--link-key", "a" * 64], "openssl rand -hex 32 writes one"),
        (
            ["--generate-at", "there", "--link-key", "0123456789abcdef" * 2],
            "generate-at: got 'there'; accepted: HOST:PORT",
        ),
        (["--generate-at", "local", "--role", "generate"], "generate-at: got 'local'; accepted: none with --role"),
        (["--generate-at", "local", "--draft", "small"], "draft: got 'small'"),
        (["--generate-at", "local", "--prefill-devices", "1"], "prefill-devices: got '1'"),
        (["--generate-at", "local", "--batching", "interleaved"], "batching: got 'interleaved'"),
        (["--generate-at", "local", "--chunk-tokens", "64"], "chunk-tokens: got 64"),
    ],
)
def test_wrong_options_are_one_line(
    rooftop: Callable[..., Any], tiny: Path, arguments: list[str], message: str
) -> None:
    answer = rooftop("serve", str(tiny), *arguments)
    assert (answer.status, answer.out) == (2, "")
    assert answer.err.count("\n") == 1 and message in answer.err


@pytest.mark.parametrize(
    ("visible", "ours", "theirs"), [("0,1,2,3", "0,1", "2,3"), ("4,5,6", "4", "5"), ("GPU-a,GPU-b", "GPU-a", "GPU-b")]
)
def test_two_processes_share_the_gpus(monkeypatch: pytest.MonkeyPatch, visible: str, ours: str, theirs: str) -> None:
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    part = choose_part(ServeRequest(checkpoint=Path("model"), generate_at="local"))
    assert part.environment == {"CUDA_VISIBLE_DEVICES": theirs}
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ours
