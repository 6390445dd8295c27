"""A kept process of an engine is started again when it is lost, stopped or killed, and ends with the engine."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.serve.hosts import keeper
from rooftop.serve.hosts.keeper import Keeper
from rooftop.serve.request import ServeRequest

if sys.platform != "linux":
    pytest.skip("stopped processes are found in /proc", allow_module_level=True)

#: A process that notes its start, beats, says what BODY says, and ends as it ends.
_PROCESS = """
import os, pickle, sys, threading, time
folder = sys.argv[1]
with open(f"{folder}/starts", "a") as starts:
    starts.write(f"{os.getpid()}\\n")
number = sum(1 for _ in open(f"{folder}/starts"))
def beat():
    while True:
        os.write(int(os.environ["ROOFTOP_BEATS"]), b'["step", 0, 0.0, "", []]\\n')
        time.sleep(0.05)
threading.Thread(target=beat, daemon=True).start()
def say(kind, value):
    os.write(1, pickle.dumps((kind, value)))
"""


def kept(folder: Path, body: str, on_ready: Callable[[Any], None] = lambda ready: None) -> Keeper:
    request = ServeRequest(checkpoint=folder, coordinator="127.0.0.1:9", processes=2, process=1)
    command = ("-c", _PROCESS + body, str(folder))
    return Keeper(request, on_ready, logging.getLogger("rooftop.serve"), command=command)


def starts(folder: Path, count: int) -> list[int]:
    """The numbers of the processes, once there are so many."""
    while True:
        try:
            lines = (folder / "starts").read_text().split()
        except OSError:
            lines = []
        if len(lines) >= count:
            return [int(line) for line in lines]
        time.sleep(0.01)


@pytest.mark.parametrize("end", ["os._exit(75)", "os.abort()"])
def test_a_lost_process_is_started_again_until_the_engine_ends(tmp_path: Path, end: str) -> None:
    ready = list[object]()
    body = f"say('ready', number)\nif number < 3:\n    {end}\nos._exit(0)"
    kept(tmp_path, body, ready.append).run()
    assert len(starts(tmp_path, 3)) == 3 and ready == [1]


def test_a_process_that_does_not_come_back_at_once_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its second start the others are not there, which is no wrong input then; after a while it is given up."""
    say = "say('wrong', ('coordinator', 'here:1', 'HOST:PORT'))\nos._exit(2)"
    with pytest.raises(RooftopError, match="coordinator: got 'here:1'; accepted: HOST:PORT"):
        kept(tmp_path, say).run()
    monkeypatch.setattr(keeper, "_LONGEST_PAUSE_S", 0.1)
    again = "if number in (2, 5):\n    say('ready', 0)\n    os._exit(75 if number == 2 else 0)\n" + say
    kept(tmp_path, again).run()
    assert len(starts(tmp_path, 5)) == 5
    monkeypatch.setattr(keeper, "AWAY_S", 0.3)
    last = f"if number == 6:\n    say('ready', 0)\n    os._exit(75)\n{say}"
    with pytest.raises(Infeasible, match="the engine has not come back: coordinator: got 'here:1'"):
        kept(tmp_path, last).run()


def test_one_that_was_never_ready_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(Infeasible, match="ended before it was ready: it ended with status 75"):
        kept(tmp_path, "os._exit(75)").run()
    with pytest.raises(Infeasible, match="the cache does not fit: by 3 GB"):
        kept(tmp_path, "say('no', ('the cache does not fit', 'by 3 GB', None))\nos._exit(1)").run()


@pytest.mark.parametrize("how", ["stopped", "silent"])
def test_a_process_that_is_stopped_or_silent_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keeper, "SILENT_S" if how == "stopped" else "_QUIET_S", 0.6)
    monkeypatch.setattr(keeper, "_LOOK_S", 0.1)
    # A descriptor that is closed ends the beats.
    close = "os.close(int(os.environ['ROOFTOP_BEATS']))" if how == "silent" else "pass"
    body = f"say('ready', os.getpid())\nif number == 1:\n    {close}\n    time.sleep(600)\nos._exit(0)"

    def stop(pid: int) -> None:
        if how == "stopped":
            os.kill(pid, signal.SIGSTOP)

    with caplog.at_level(logging.ERROR, logger="rooftop.serve"):
        monkeypatch.setattr(logging.getLogger("rooftop.serve"), "propagate", True)
        kept(tmp_path, body, stop).run()
    reason = "it was stopped for" if how == "stopped" else "it has not answered for"
    assert any(reason in record.message for record in caplog.records)
    first, _ = starts(tmp_path, 2)
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)


def test_sigterm_is_passed_on_and_ends_it(tmp_path: Path) -> None:
    def tell() -> None:
        starts(tmp_path, 1)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=tell, daemon=True).start()
    kept(tmp_path, "say('ready', 0)\ntime.sleep(600)").run()
    assert len(starts(tmp_path, 1)) == 1
