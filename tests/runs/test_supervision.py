"""Supervisors: what they show, whom they name, and which mesh fewer processes have."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from rooftop.runs import beats
from rooftop.runs.beats import ProcessBeat
from rooftop.runs.restarts import Supervision, _Connection, _Lead, mesh_for
from rooftop.runs.vigil import Vigil


class Clock:
    """A clock that is set."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def step(number: int, seconds: float = 0.1) -> ProcessBeat:
    return ProcessBeat(activity="step", step=number, seconds=seconds)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def vigil(clock: Clock) -> Vigil:
    """Two processes that have done forty steps of one second."""
    result = Vigil(clock)
    for process in (0, 1):
        result.start(process)
    for number in range(1, 41):
        clock.now = float(number)
        for process in (0, 1):
            result.take(process, step(number))
    return result


def test_a_process_without_beats_is_named_with_its_step(clock: Clock, vigil: Vigil) -> None:
    assert vigil.problem() is None
    for number in range(41, 61):
        clock.now = float(number)
        vigil.take(0, step(40, number - 40.0))
        assert vigil.problem() is None
    clock.now = 61.0
    vigil.take(0, step(40, 21.0))
    assert vigil.problem({1: True}) == "process 1 does not answer since 21 s (stopped); it was in step 40"
    vigil.forget(1)
    assert vigil.problem() is None


@pytest.mark.parametrize("stopped", [True, False])
def test_an_abort_is_blamed_on_the_process_that_is_stopped(tmp_path: Path, stopped: bool) -> None:
    """JAX may abort the others before the supervisor has waited long enough for one that is stopped."""
    of = Supervision(
        arguments=(), run=tmp_path, processes=2, process=None, host="127.0.0.1", port=0, axes=None, max_restarts=1
    )
    ends = socket.socketpair(), socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        lead = _Lead(of=of, listening=listening, key="")
        for process, (ours, _) in enumerate(ends):
            lead.members[process] = _Connection(ours)
        lead.events.put(("alive", 1, {"stopped": stopped}))
        for process, status, killed in ((0, -signal.SIGABRT, False), (1, -signal.SIGKILL, True)):
            lead.events.put(("ended", process, dict(generation=1, status=status, killed=killed, line="")))
        reason, end = lead._generation(1, [0, 1])
    for pair in ends:
        for side in pair:
            side.close()
    silent = "process 1 does not answer since 0 s (stopped); it was in starting"
    assert (reason, end) == (silent if stopped else "process 0 was ended by SIGABRT", None)


def test_a_process_that_holds_up_the_others_is_named(clock: Clock, vigil: Vigil) -> None:
    """Both beat, and neither goes on: the one that is not in the step is the cause."""
    for number in range(1, 130):
        clock.now = 40.0 + number
        vigil.take(0, step(41, float(number)))
        vigil.take(1, ProcessBeat(activity="waiting for data", step=41, seconds=float(number)))
        if number <= 120:
            assert vigil.problem() is None
    line = "no process goes on: process 1 is in waiting for data after step 41 since 129 s, and the others in step 41"
    assert vigil.problem() == line
    # A checkpoint may take longer.
    vigil.take(1, ProcessBeat(activity="saving", step=41, seconds=130.0))
    assert vigil.problem() is None


def test_a_process_that_starts_may_be_silent_for_longer(clock: Clock) -> None:
    vigil = Vigil(clock)
    vigil.start(0)
    clock.now = 59.0
    assert vigil.problem() is None
    clock.now = 61.0
    assert vigil.problem() == "process 0 does not answer since 61 s; it was in starting"


def test_a_slow_step_is_no_hung_one(clock: Clock) -> None:
    """Thirty times the median of steps of ten seconds."""
    vigil = Vigil(clock)
    vigil.start(0)
    for number in range(1, 6):
        clock.now = 10.0 * number
        vigil.take(0, step(number))
    clock.now = 349.0
    vigil.take(0, step(5, 299.0))
    assert vigil.problem() is None
    vigil.take(0, step(5, 301.0))
    assert vigil.problem() == "no process goes on: process 0 is in step 5 since 301 s"


def test_the_mesh_of_fewer_processes() -> None:
    assert mesh_for(None, 4, 2) is None
    axes = {"data": 1, "fsdp": 4, "tensor": 2}
    assert mesh_for(axes, 4, 4) == "data=1,fsdp=4,tensor=2"
    assert mesh_for(axes, 4, 3) == "data=1,fsdp=3,tensor=2"
    assert mesh_for({"data": 4, "fsdp": 2}, 4, 1) == "data=1,fsdp=2"
    with pytest.raises(ValueError, match="no axis"):
        mesh_for({"tensor": 2}, 4, 1)


def supervised(folder: Path, script: str, *, stopped_s: float = 45.0) -> subprocess.Popen[str]:
    """A supervisor of a worker that is this shell script."""
    worker = folder / "worker"
    worker.write_text(f"#!/bin/sh\n{script}\n")
    worker.chmod(0o755)
    program = (
        f"import sys; sys.executable = {str(worker)!r}\nfrom rooftop.runs import supervise\n"
        f"supervise._STOPPED_S = {stopped_s}\nsys.exit(supervise.supervise([], 'to resume: again'))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )


def test_what_a_worker_writes_is_shown_as_it_comes(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    process = supervised(tmp_path, f"echo a warning >&2; echo a step; read line < {gate}; echo done")
    assert process.stderr is not None and process.stdout is not None
    assert (process.stderr.readline(), process.stdout.readline()) == ("a warning\n", "a step\n")
    assert process.poll() is None
    gate.write_text("\n")
    assert process.communicate(timeout=60) == ("done\n", "") and process.returncode == 0


ABORT = """
echo "E1126 12:00:00.000000 1 agent.cc:2] Polled an error" >&2
echo "Additional information" >&2
echo "F1126 12:00:00.000000 1 client.h:80] Terminating process" >&2
echo "    @ 0x1 abort" >&2
kill -ABRT $$
"""


def test_an_abort_of_the_runtime_is_one_line(tmp_path: Path) -> None:
    process = supervised(tmp_path, ABORT)
    line = "rooftop: the run has lost one of its processes; to resume: again\n"
    assert process.communicate(timeout=60) == ("", line) and process.returncode == 1


def test_pages_that_nothing_explains_are_shown(tmp_path: Path) -> None:
    process = supervised(tmp_path, 'echo "E1126 broken" >&2; exit 3')
    assert process.communicate(timeout=60) == ("", "E1126 broken\n") and process.returncode == 3


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_worker_that_stays_stopped_is_ended(tmp_path: Path) -> None:
    process = supervised(tmp_path, "kill -STOP $$", stopped_s=0.5)
    line = "rooftop: this process was stopped, and is ended; to resume: again\n"
    assert process.communicate(timeout=60) == ("", line) and process.returncode == 1


def test_a_hang_is_named_with_the_collectives_of_the_others(clock: Clock, vigil: Vigil) -> None:
    waits = "one of its 3 collectives over processes: 3 all_gather over fsdp of layers/mlp/up"
    clock.now = 61.0
    vigil.take(0, ProcessBeat(activity="step", step=40, seconds=21.0, waits=waits, stack=("engine.py:1 train",)))
    line = f"process 1 does not answer since 21 s; it was in step 40; process 0 is in step 40, in {waits}"
    assert vigil.problem() == line
    report = vigil.report()
    assert [one["process"] for one in report] == [0, 1] and report[1]["silent_s"] == 21.0
    assert report[0]["waits"] == waits and report[0]["stack"] == ("engine.py:1 train",)


def test_beats_of_a_slow_step_have_its_collectives_and_the_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv(beats.DESCRIPTOR, str(write))
    monkeypatch.setattr(beats, "_SLOW_S", 0.05)
    monkeypatch.setattr(beats, "_PERIOD_S", 0.02)
    own = beats.Beats()
    own.describe = lambda: "its all_reduce over fsdp"
    own.enter(beats.STEP, 7)
    with os.fdopen(read, "rb") as lines:
        come = [ProcessBeat.read(lines.readline())]
        while not come[-1].waits:
            come.append(ProcessBeat.read(lines.readline()))
    assert (come[-1].activity, come[-1].step, come[-1].waits) == ("step", 7, "its all_reduce over fsdp")
    assert come[0].stack == () and any("test_supervision" in frame for frame in come[-1].stack)
    # The next write ends its thread.


def test_a_lost_process_is_named_and_so_is_what_this_one_waited_in(tmp_path: Path) -> None:
    """JAX's page has the number of the silent process; the worker's last beat has the collectives of its step."""
    beat = '["step", 33, 31.2, "one of its 2 collectives over processes: 2 all_reduce over data", []]'
    page = (
        "F1126 12:00:00.0 1 client.h:80] UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):"
    )
    script = f"echo '{beat}' >&$ROOFTOP_BEATS; echo '{page}' >&2; echo 1 >&2; echo 'The tasks' >&2; kill -ABRT $$"
    out, err = supervised(tmp_path, f'eval "{script.replace(chr(34), chr(92) + chr(34))}"').communicate(timeout=60)
    assert (out, err) == (
        "",
        "rooftop: the run has lost one of its processes (process 1); this one was in step 33 since 31 s, in one of its "
        "2 collectives over processes: 2 all_reduce over data; to resume: again\n",
    )
