"""One of several processes of an engine, in a process of its own: see ``rooftop.serve.hosts.keeper``."""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any, NoReturn

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.runs.beats import Beats
from rooftop.runs.supervise import drop_stdout
from rooftop.serve.hosts.keeper import MemberTask
from rooftop.serve.hosts.processes import end_with
from rooftop.serve.run import run_member


def main() -> NoReturn:
    """Run the process until the engine ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Stdout is the keeper's, and gloo would log its connections there.
    said = os.fdopen(os.dup(1), "wb", buffering=0)
    drop_stdout()

    def say(kind: str, value: Any) -> None:
        said.write(pickle.dumps((kind, value)))

    task: MemberTask = pickle.load(sys.stdin.buffer)
    end_with(task.parent)
    Beats.of_process()
    status = 0
    try:
        run_member(task.request, lambda ready: say("ready", ready))
    except RooftopError as error:
        say("wrong", (error.field, error.given, error.accepted))
        status = error.exit_status
    except Infeasible as error:
        say("no", (error.what, error.by, error.nearest))
        status = error.exit_status
    sys.stderr.flush()
    # The usual way out waits for the other processes.
    os._exit(status)


if __name__ == "__main__":
    main()
