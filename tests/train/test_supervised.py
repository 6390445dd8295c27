"""Runs under supervision: processes are lost, stopped and added, and the losses are those of a run in peace."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.training import losses
from tests.support.ports import free_port
from tests.support.training_runs import command, run, start_new, write_corpus

if sys.platform != "linux":
    pytest.skip("workers are found in /proc", allow_module_level=True)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


def workers(supervisor: int) -> list[int]:
    """Children of a process, in the order of their processes in the run."""
    children = dict[int, int]()
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().decode().split("\0")
            except (OSError, IndexError):
                continue
            if parent == supervisor and "rooftop" in words:
                index = int(words[words.index("--process") + 1]) if "--process" in words else 0
                children[index] = int(entry.name)
    return [children[index] for index in sorted(children)]


def wait_for(condition: Callable[[], bool], *running: subprocess.Popen[str]) -> None:
    while not condition():
        assert all(process.poll() is None for process in running), running[0].communicate()
        time.sleep(0.02)


def steps(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b'"loss"')
    except OSError:
        return 0


def test_a_lost_process_is_started_again(corpus: Path) -> None:
    """The newest checkpoint is resumed, bit for bit, and the supervisor's one line says so."""
    calm, folder = corpus / "calm", corpus / "restarted"
    options = {"steps": 150, "save_every": 15}
    assert run(command(corpus, calm, **options)).status == 0
    process = start_new(command(corpus, folder, **options, supervise=True))
    wait_for(lambda: steps(folder) >= 20, process)
    os.kill(workers(process.pid)[0], signal.SIGKILL)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    line = r"rooftop: process 0 was ended by SIGKILL; restart 1 of at most 3, after step \d+\n"
    assert re.fullmatch(line, err) and "step 150 done" in out
    assert losses(folder) == losses(calm)


def test_a_wrong_option_is_no_reason_to_start_again(corpus: Path) -> None:
    done = run(command(corpus, corpus / "wrong", steps=2, mesh="fsdp=2", supervise=True))
    accepted = "at most the 1 x cpu here; --devices 2 emulates them"
    assert (done.status, done.line) == (2, f"rooftop: mesh: got 'fsdp=2'; accepted: {accepted}")
    done = run(command(corpus, corpus / "wrong", steps=2, supervise=True, process=1, processes=2))
    accepted = "--coordinator HOST:PORT with it; or neither, for all processes on this machine"
    assert done.line == f"rooftop: process: got 1; accepted: {accepted}"


@pytest.mark.slow
def test_two_processes_are_killed_and_stopped(corpus: Path) -> None:
    """A stopped process is named, and ended, which frees its devices."""
    # Between two checkpoints, of which a process may also wait for the other, are many steps.
    options = {"steps": 300, "save_every": 40, "devices": 2, "mesh": "fsdp=2,tensor=2", "processes": 2}
    calm, folder = corpus / "calm two", corpus / "restarted two"
    assert run(command(corpus, calm, **options, supervise=True)).status == 0
    process = start_new(command(corpus, folder, **options, supervise=True))
    wait_for(lambda: steps(folder) >= 45, process)
    os.kill(workers(process.pid)[1], signal.SIGKILL)
    wait_for(lambda: steps(folder) >= 130, process)
    stopped = workers(process.pid)[0]
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: stopped not in workers(process.pid), process)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    assert "rooftop: process 1 was ended by SIGKILL; restart 1 of at most 3" in err
    # The moment of the stop is in a step, or before one, in its data.
    line = r"rooftop: process 0 does not answer since \d\d+ s \(stopped\); it was in [^;]*\d+; process 1 is in step "
    waits = r"\d+, in one of its \d+ collectives over processes: .*all_gather over fsdp.*; restart 1"
    assert re.search(line + waits, err)
    report = json.loads((folder / "hangs.jsonl").read_text())
    assert [one["process"] for one in report["processes"]] == [0, 1]
    assert any("block_until_ready" in frame for frame in report["processes"][1]["stack"])
    assert losses(folder) == losses(calm)


@pytest.mark.slow
def test_a_run_goes_on_with_those_that_are_left(corpus: Path) -> None:
    """A host is lost and comes back: the run has one process, then two again; sums differ by their order only."""
    where, folder, calm = f"127.0.0.1:{free_port()}", corpus / "elastic", corpus / "calm elastic"
    options = {"steps": 3000, "save_every": 20, "devices": 2, "mesh": "fsdp=2,tensor=2", "processes": 2}
    words = command(corpus, folder, **options, supervise=True, coordinator=where)
    first, second = (start_new([*words, "--process", f"{process}"]) for process in range(2))
    wait_for(lambda: steps(folder) >= 30, first, second)
    second.kill()
    second.communicate()
    assert first.stderr is not None
    lines = list[str]()

    def read_to(part: str) -> None:
        assert first.stderr is not None
        for line in first.stderr:
            lines.append(line)
            if part in line:
                return
        raise AssertionError(f"no {part!r} in {lines}")

    read_to("going on without process 1: mesh fsdp=1,tensor=2")
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 40, first)
    second = start_new([*words, "--process", "1"])
    read_to("all processes are back")
    before = steps(folder)
    wait_for(lambda: steps(folder) > before + 40, first, second)
    second.send_signal(signal.SIGTERM)
    statuses = [process.wait(timeout=600) for process in (first, second)]
    for process in (first, second):
        process.communicate()
    assert statuses == [0, 0], lines
    result = losses(folder)
    straight = options | {"steps": len(result)}
    assert run(command(corpus, calm, **straight, supervise=True)).status == 0
    pairs = zip(*([float(text.split()[0]) for text in losses(path).values()] for path in (folder, calm)), strict=True)
    assert all(one == pytest.approx(other, abs=1e-4) for one, other in pairs)
