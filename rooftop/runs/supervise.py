"""One of several processes of a run as a worker, under a supervisor that reports in one line why the worker ended.

When a process of a run is lost, threads of JAX's runtime end the other processes with an abort and pages on stderr,
which no handler in Python can turn into a line. The supervisor is not part of the run, and can.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from types import FrameType

#: The environment variable of a worker; its value is the supervisor's process id.
WORKER = "ROOFTOP_SUPERVISOR"
_OURS = b"rooftop: "
#: Last lines of a worker's stderr that are kept, to be shown if none of them is ours.
_LINES = 1000
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
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.close(null)
    sys.stdout = stdout


def supervise(arguments: Sequence[str], how_to_resume: str) -> int:
    """Run ``rooftop`` with these arguments as a worker, pass its output and signals on, and return its status.

    A worker that a signal or its runtime has ended had lost the other processes: one line says so, and the status is 1.
    """
    worker = subprocess.Popen(
        [sys.executable, "-m", "rooftop", *arguments],
        env=os.environ | {WORKER: str(os.getpid())},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # Ctrl-C reaches the supervisor alone, which passes it on once.
        start_new_session=True,
    )
    errors = deque[bytes](maxlen=_LINES)

    def on_signal(number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ProcessLookupError):
            worker.send_signal(number)

    def copy_stdout() -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()

    def keep_stderr() -> None:
        assert worker.stderr is not None
        errors.extend(worker.stderr)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    threads = [threading.Thread(target=target) for target in (copy_stdout, keep_stderr)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        status = worker.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    ours = [line for line in errors if line.startswith(_OURS)]
    if status >= 0:
        shown = ours or list(errors)
    else:
        lost = f"rooftop: the run has lost one of its processes; {how_to_resume}\n"
        shown, status = ours or [lost.encode()], 1
    sys.stderr.buffer.writelines(shown)
    sys.stderr.buffer.flush()
    return status
