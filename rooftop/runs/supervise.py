"""One of several processes of a run as a worker, under a supervisor that reports in one line why the worker ended.

When a process of a run is lost, threads of JAX's runtime end the other processes with an abort and pages on stderr,
which no handler in Python can turn into a line. The supervisor is not part of the run, and can.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType

from rooftop.runs.beats import ProcessBeat, start_beating

#: The environment variable of a worker; its value is the supervisor's process id.
WORKER = "ROOFTOP_SUPERVISOR"
#: The environment variable of a worker that is started again when it is lost.
RESTARTED = "ROOFTOP_RESTARTED"
OURS = b"rooftop: "
#: Exit status of a worker under restarts that has lost another process (EX_TEMPFAIL).
LOST_STATUS = 75
#: What JAX's runtime and Python write when they abort: held until the end, and shown if none of our lines explains it.
_PAGES = re.compile(
    rb"[EFWI]\d{4} |\*\*\* |    @ |Fatal Python error|Current thread|Thread 0x|  File |  <no Python|  \.\.\."
    rb"|Extension mod|\n"
)
#: Processes of which JAX's coordinator has had no heartbeat, each in a line that ends with its number.
_SILENT_TASKS = re.compile(rb"stopped sending heartbeats\):\n((?:.*\d\n)+)")
#: Seconds within which further lines belong to a page.
_PAGE_S = 1.0
#: Last such lines that are kept.
_LINES = 1000
#: Seconds after which the others have gone on without a worker that is stopped, whose heartbeat JAX misses after 30 s.
_STOPPED_S = 45.0
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux


def is_worker() -> bool:
    """True if this process has a supervisor."""
    return WORKER in os.environ


def follow_supervisor() -> None:
    """Have this worker end when its supervisor does, however that ends (Linux; elsewhere nothing)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != int(os.environ[WORKER]):
            os._exit(1)


def keep_stdout() -> None:
    """Reserve stdout for Python: gloo logs its connections there, where --json allows one object."""
    stdout = os.fdopen(os.dup(1), "w", buffering=1)
    drop_stdout()
    sys.stdout = stdout


def drop_stdout() -> None:
    """Drop what libraries write to stdout."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)


def supervise(arguments: Sequence[str], how_to_resume: str) -> int:
    """Run ``rooftop`` with these arguments as a worker, pass its output and signals on, and return its status.

    What it writes is shown as it comes, but for the pages of a runtime that aborts.

    A worker that a signal or its runtime has ended had lost the other processes: one line says so, and the status is 1.
    """
    worker, beats = start_beating(
        ("-m", "rooftop", *arguments),
        environment={WORKER: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    pages, ours = deque[bytes](maxlen=_LINES), 0
    last: ProcessBeat | None = None

    def copy_beats() -> None:
        nonlocal last
        for beat in beats:
            last = beat

    def on_signal(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(number)

    def copy_stdout() -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    def copy_stderr() -> None:
        nonlocal ours
        assert worker.stderr is not None
        page = -math.inf
        for line in worker.stderr:
            is_ours, is_page = line.startswith(OURS), _PAGES.match(line) is not None
            # Lines right after those of a page go on with it.
            if not is_ours and (is_page or time.monotonic() - page < _PAGE_S):
                page = time.monotonic() if is_page else page
                pages.append(line)
                continue
            ours += is_ours
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    threads = [threading.Thread(target=target) for target in (copy_stdout, copy_stderr, copy_beats)]
    stopped = False
    try:
        for thread in threads:
            thread.start()
        stopped = _waited(worker)
        for thread in threads:
            thread.join()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    status = worker.returncode
    if status < 0:
        status = 1
        what = "this process was stopped, and is ended" if stopped else _loss(pages, last)
        if not ours:
            sys.stderr.buffer.write(f"rooftop: {what}; {how_to_resume}\n".encode())
    elif not ours:
        sys.stderr.buffer.writelines(pages)
    sys.stderr.buffer.flush()
    return status


def _loss(pages: Iterable[bytes], last: ProcessBeat | None) -> str:
    """A line about a lost process: which one, if JAX's pages say so, and in what this one waited for it."""
    silent = _SILENT_TASKS.search(b"".join(pages))
    lost = [] if silent is None else sorted({int(number) for number in re.findall(rb"(\d+)\n", silent.group(1))})
    named = f" ({', '.join(f'process {number}' for number in lost)})" if lost else ""
    waits = ""
    if last is not None and last.waits:
        waits = f"; this one was in {last} since {last.seconds:.0f} s, in {last.waits}"
    return f"the run has lost one of its processes{named}{waits}"


def is_stopped(process: int) -> bool:
    """True if the system has stopped a process, by SIGSTOP or a debugger (Linux; elsewhere False)."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return False
    return fields[0] in "Tt"


def _waited(worker: subprocess.Popen[bytes]) -> bool:
    """Wait for the end of a worker. One that stays stopped is ended, which frees its devices; returns True then."""
    since: float | None = None
    while True:
        try:
            worker.wait(1.0)
        except subprocess.TimeoutExpired:
            now = time.monotonic()
            since = (since or now) if is_stopped(worker.pid) else None
            if since is not None and now - since > _STOPPED_S:
                worker.kill()
                worker.wait()
                return True
        else:
            return False
