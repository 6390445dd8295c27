"""A process that resumes one run after another, for ``tests.faults.images``: it imports and starts JAX once.

``python -m tests.faults.resumer COORDINATOR PROCESSES PROCESS DEVICES`` reads a line of JSON for each run on stdin, the
fields of its request; it trains the run to its end by ``rooftop.train``, and prints ``{"error": LINE or null}``. With
PROCESSES 1 there is no coordinator.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Resume runs until stdin is closed."""
    from rooftop.core.errors import Infeasible, RooftopError
    from rooftop.library.training import train
    from rooftop.runs.environment import join_processes, prepare_environment
    from rooftop.runs.folder import RunFolder
    from rooftop.runs.supervise import keep_stdout
    from rooftop.train.request import TrainRequest

    coordinator, processes, process, devices = sys.argv[1], *map(int, sys.argv[2:])
    keep_stdout()
    prepare_environment(devices, extra="train")
    if processes > 1:
        join_processes(coordinator, processes, process)
    import jax

    for number, line in enumerate(sys.stdin):
        fields, error = json.loads(line), None
        try:
            # As the command does: a run that has begun keeps its own options.
            begun = RunFolder(path=Path(fields["run"])).read() is not None
            train(TrainRequest.resumed(Path(fields["run"]), fields) if begun else TrainRequest.of(fields))
        except (RooftopError, Infeasible) as refused:
            error = str(refused)
        print(json.dumps({"error": error}), flush=True)
        # Each run compiles programs of its own.
        if number % 50 == 49:
            jax.clear_caches()


if __name__ == "__main__":
    main()
