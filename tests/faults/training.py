"""Training under faults, compared bit for bit with a run that nothing disturbs.

``python -m tests.faults.training --seed S --count N`` injects N faults into runs of one and of two processes of a
tiny model, one after another, and prints a line for each, then the figures. The status is 1 if a loss differs, a
damaged file is not noticed, or a run does not end.

Faults: ``kill`` -9, ``stop`` (SIGSTOP, of two processes), ``term`` (SIGTERM), ``full`` (no file beyond a size, as on a
full disk), ``eio`` (writes and syncs of the run's folder fail for a while), ``clock`` (the clock of the day jumps until
a kill), ``cut`` (the power fails at an operation of the run's folder: see tests/support/power.py) and ``flip`` (a byte
of the newest checkpoint is damaged between two starts).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rooftop.runs.supervise import WORKER
from tests.support import shim
from tests.support.forks import BEFORE, Fork
from tests.support.ports import free_port
from tests.support.power import Crash, Disk
from tests.support.training_runs import ENVIRONMENT, ROOFTOP, Process, command, finish, write_corpus

#: Faults, and how often they are drawn: most are the hardest ones, and a stopped process takes half a minute to notice.
WEIGHTS = {"kill": 8, "cut": 8, "flip": 4, "term": 2, "full": 2, "stop": 1}
if shim.AVAILABLE:
    WEIGHTS |= {"eio": 2, "clock": 2}
#: Of a run of each number of processes: steps, also those of quick tests, and steps between checkpoints.
STEPS, QUICK_STEPS, SAVE_EVERY = 200, 70, 6
#: Two processes, of as many devices each.
DEVICES = 2
#: The environment variable of what ``prepare`` does in a process.
PREPARED = "ROOFTOP_TESTS_FAULT"
_RECORDING = ExitStack()
#: Seconds for which a process may wait for one that was killed while both started.
_JOINING_S = 30.0
#: Bytes beyond which no file grows on a full disk: records fit, arrays do not.
FULL_BYTES = 40 << 10


def prepare() -> None:
    """Prepare a process that was forked, before it trains.

    ``worker``: it is one of several processes itself, and no supervisor that starts another. ``full``: files have a
    limit. ``power``: [RUN, CUTS, {AT: [HOW, SEED]}]; at operation AT of the folder RUN the disk after a crash is
    written to CUTS/AT, and after the last of them the process ends as if killed. Without any it runs to its end, and
    CUTS has the number of operations.
    """
    fault = json.loads(os.environ.pop(PREPARED))
    if fault["worker"]:
        os.environ[WORKER] = str(os.getppid())
    if fault.get("full"):
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, FULL_BYTES))
    if fault.get("power"):
        run, cuts, moments = fault["power"]
        last = max(map(int, moments), default=0)

        def crash(moment: Crash) -> None:
            if drawn := moments.get(str(moment.number)):
                Path(cuts).mkdir(exist_ok=True)
                moment.write(Path(cuts) / str(moment.number), *drawn)
            if moment.number == last:
                os.kill(os.getpid(), signal.SIGKILL)
            if not moments:
                Path(cuts).write_text(str(moment.number))

        Path(run).mkdir(exist_ok=True)
        # For as long as the process runs: a context that nobody holds ends at once.
        _RECORDING.enter_context(Disk(Path(run), crash).recording())


def begin(words: list[str], environment: Mapping[str, str] | None = None, **fault: object) -> Process:
    """Start a process, in a fork that is prepared; the ``environment`` is that of a shim."""
    fault["worker"] = "--coordinator" in words
    changes = ENVIRONMENT | {BEFORE: "tests.faults.training:prepare", PREPARED: json.dumps(fault)}
    return Fork(words[len(ROOFTOP) :], {**changes, **(environment or {})}, shim=True)


def losses(folder: Path) -> dict[int, str]:
    """Step -> loss and norm of the gradients, as they are written: every bit."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    pairs = [(one["step"], f"{one['loss']!r} {one['gradient_norm']!r}") for one in records if "loss" in one]
    assert len(dict(pairs)) == len(pairs), "a step is recorded twice"
    return dict(pairs)


@dataclass
class Figures:
    """Faults by kind, starts, damaged files that were noticed, and what was wrong."""

    faults: Counter[str] = field(default_factory=Counter)
    starts: int = 0
    damaged: int = 0
    noticed: int = 0
    runs: int = 0
    steps: int = 0
    wrong: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "faults": dict(self.faults)}

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {kind}" for kind, count in sorted(self.faults.items()))
        return (
            f"{sum(self.faults.values())} faults ({faults}) in {self.runs} runs, {self.starts} starts; "
            f"{self.steps} losses compared; {self.noticed} of {self.damaged} damaged files noticed; "
            f"{len(self.wrong)} wrong"
        )


class Schedule:
    """Faults drawn by a seed, injected into runs in ``folder``."""

    def __init__(
        self, folder: Path, seed: int, say: Callable[[str], None], *,
        kinds: Sequence[str] = tuple(WEIGHTS), steps: int = STEPS,
    ) -> None:  # fmt: skip
        self.draw, self.folder, self.say, self.kinds, self.steps = random.Random(seed), folder, say, kinds, steps
        self.figures = Figures()
        self._calm = dict[int, Path]()
        write_corpus(folder)

    def run(
        self, count: int, *, processes: tuple[int, ...] = (1, 2), per_run: int = 10, until_s: float = math.inf
    ) -> Figures:
        """Inject ``count`` faults, ``per_run`` into each run, in turn with each number of processes.

        The last one begins before the clock ``time.monotonic`` shows ``until_s``.
        """
        while (left := count - sum(self.figures.faults.values())) > 0 and time.monotonic() < until_s:
            self._one_run(processes[self.figures.runs % len(processes)], min(per_run, left), until_s)
        return self.figures

    def _words(self, run_: Path, processes: int) -> list[list[str]]:
        options: dict[str, object] = {"steps": self.steps, "save_every": SAVE_EVERY}
        if processes == 1:
            return [command(self.folder, run_, **options)]
        where = f"127.0.0.1:{free_port()}"
        options |= {"devices": DEVICES, "mesh": "fsdp=2,tensor=2", "coordinator": where, "processes": processes}
        return [command(self.folder, run_, **options, process=process) for process in range(processes)]

    def _calm_run(self, processes: int) -> Path:
        """A run that nothing disturbs."""
        if processes not in self._calm:
            self._calm[processes] = self.folder / f"calm{processes}"
            for done in self._together(self._words(self._calm[processes], processes)):
                assert done == 0
        return self._calm[processes]

    def _together(self, commands: list[list[str]]) -> list[int]:
        self.figures.starts += 1
        return [finish(process).status for process in [begin(words) for words in commands]]

    def _one_run(self, processes: int, faults: int, until_s: float) -> None:
        """Faults until so many have taken effect, or the run is done; then the rest of it, undisturbed."""
        calm = losses(self._calm_run(processes))
        folder = self.folder / f"run{self.figures.runs}"
        self.figures.runs += 1
        while faults > 0 and time.monotonic() < until_s and not (folder / "checkpoints" / f"{self.steps}").exists():
            allowed = [kind for kind in self.kinds if processes == 2 or kind != "stop"]
            kind = self.draw.choices(allowed, weights=[WEIGHTS[kind] for kind in allowed])[0]
            if getattr(self, f"_{kind}")(folder, processes):
                self.figures.faults[kind] += 1
                faults -= 1
                self.say(f"run {self.figures.runs} of {processes}: {kind} at {_lines(folder)} records")
        statuses = self._together(self._words(folder, processes))
        result = losses(folder)
        self.figures.steps += len(result)
        if statuses != [0] * processes or result != calm:
            differs = sorted(step for step in {*calm, *result} if calm.get(step) != result.get(step))
            self.figures.wrong.append(f"{folder.name}: status {statuses}, steps that differ {differs[:5]}")
            self.say(self.figures.wrong[-1])
        self.say(str(self.figures))
        shutil.rmtree(folder)

    def _begun(self, folder: Path, processes: int, environment: Mapping[str, str] | None = None) -> list[Process]:
        """Processes at a random moment: while they start, or after some records."""
        self.figures.starts += 1
        running = [begin(words, environment) for words in self._words(folder, processes)]
        lines = self.draw.choice([0, 1, 2, 5, 9, 14, 20])
        file, before = folder / "metrics.jsonl", _lines(folder)
        while all(process.poll() is None for process in running):
            now = _lines(folder)
            before = min(before, now)
            if file.exists() and now - before >= lines:
                break
            time.sleep(0.002)
        time.sleep(self.draw.choice([0, 0, 0.01, 0.03, 0.1]))
        return running

    def _clock(self, folder: Path, processes: int) -> bool:
        """Processes whose clocks jump, each by itself, until one is killed."""
        return self._kill(folder, processes, shim.jumping_clock(self.draw.randrange(1 << 30)))

    def _eio(self, folder: Path, processes: int) -> bool:
        """Writes and syncs of one process fail, once or more often: the run goes on, or ends with a line."""
        self.figures.starts += 1
        hit, failing = self.folder / "hit", self.draw.randrange(processes)
        hit.unlink(missing_ok=True)
        first, count = self.draw.randint(1, 300), self.draw.choice((1, 5, 1_000_000))
        environment = shim.failing_disk(folder, first, count, hit)
        commands = self._words(folder, processes)
        running = [begin(words, environment if at == failing else None) for at, words in enumerate(commands)]
        for at, process in enumerate(running):
            err = process.communicate(timeout=600)[1]
            if "Traceback" in err and at == failing:
                self.figures.wrong.append(f"EIO of operations {first} to {first + count}: {err[-2000:]}")
        return hit.exists()

    def _kill(self, folder: Path, processes: int, environment: Mapping[str, str] | None = None) -> bool:
        before = _lines(folder)
        running = self._begun(folder, processes, environment)
        killed = self.draw.choice(running)
        killed.send_signal(signal.SIGKILL)
        if _lines(folder) == before:
            # A process whose coordinator never came waits for it for five minutes: it is killed too.
            until_s = time.monotonic() + _JOINING_S
            while any(process.poll() is None for process in running) and time.monotonic() < until_s:
                time.sleep(0.05)
            for process in running:
                process.send_signal(signal.SIGKILL)
        return _ended(running)[running.index(killed)] == -signal.SIGKILL

    def _term(self, folder: Path, processes: int) -> bool:
        running = self._begun(folder, processes)
        was_running = running[0].poll() is None
        self.draw.choice(running).send_signal(signal.SIGTERM)
        _ended(running)
        return was_running

    def _stop(self, folder: Path, processes: int) -> bool:
        """A stopped process is noticed by the other, which ends; then it is killed."""
        running = self._begun(folder, processes)
        stopped = self.draw.randrange(processes)
        running[stopped].send_signal(signal.SIGSTOP)
        statuses = _ended([running[1 - stopped]])
        running[stopped].send_signal(signal.SIGKILL)
        _ended([running[stopped]])
        return statuses[0] != 0

    def _full(self, folder: Path, processes: int) -> bool:
        self.figures.starts += 1
        return 0 not in _ended([begin(words, full=True) for words in self._words(folder, processes)])

    def _cut(self, folder: Path, processes: int) -> bool:
        """The power fails at an operation of the first process; of two, the other is lost with it."""
        self.figures.starts += 1
        cuts, at = folder.with_suffix(".cuts"), self.draw.randint(1, 400)
        how = self.draw.choice(("lost", "names", "torn", "torn"))
        commands = self._words(folder, processes)
        leader = begin(commands[0], power=[str(folder), str(cuts), {at: [how, self.draw.randrange(1 << 30)]}])
        _ended([leader, *(begin(words) for words in commands[1:])])
        if not cuts.exists():
            return False
        shutil.rmtree(folder)
        (cuts / str(at)).rename(folder)
        cuts.rmdir()
        return True

    def _flip(self, folder: Path, processes: int) -> bool:
        """Damage to a file of the newest checkpoint: it is refused by name, and the one before is used."""
        checkpoints = [path for path in (folder / "checkpoints").glob("*") if path.name.isdecimal()]
        if len(checkpoints) < 2:
            return False
        newest = max(checkpoints, key=lambda path: int(path.name))
        file = self.draw.choice(sorted(path for path in newest.rglob("*") if path.is_file()))
        damage(file, self.draw)
        self.figures.damaged += 1
        self.figures.starts += 1
        running = [begin(words) for words in self._words(folder, processes)]
        assert running[0].stdout is not None
        beginning = f"checkpoint left out: {file}"
        self.figures.noticed += any(line.startswith(beginning) for line in running[0].stdout)
        _ended(running)
        return True


def _ended(running: list[Process]) -> list[int | None]:
    """Wait for processes; their statuses."""
    for process in running:
        process.communicate(timeout=600)
    return [process.returncode for process in running]


def damage(file: Path, draw: random.Random) -> None:
    """Flip a bit, cut the file, remove it, or overwrite it with zeros."""
    content = bytearray(file.read_bytes())
    how = draw.choice(("flip", "cut", "remove", "zeros") if content else ("remove",))
    if how == "remove":
        file.unlink()
        return
    if how == "flip":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[draw.randrange(len(content)) :]
    else:
        zeros = bytes(len(content))
        content[:] = zeros if content != zeros else b"\1" + zeros[1:]
    file.write_bytes(content)


def _lines(folder: Path) -> int:
    try:
        return (folder / "metrics.jsonl").read_bytes().count(b"\n")
    except OSError:
        return 0


def keep_compilations(folder: str) -> None:
    """Have the processes that are started share what they compile."""
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", folder)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def main() -> int:
    """Inject faults as the command says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--processes", type=int, choices=(1, 2), action="append", help="1 or 2; by default in turn")
    parser.add_argument("--kind", choices=WEIGHTS, action="append", help="a fault to draw; by default all")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no fault begins later")
    parser.add_argument("--json", action="store_true", help="a line of figures after each fault")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rooftop-faults-") as name:
        keep_compilations(f"{name}/jax")

        def say(line: str) -> None:
            print(json.dumps(schedule.figures.to_json()) if options.json else line, flush=True)

        schedule = Schedule(Path(name), options.seed, say, kinds=options.kind or tuple(WEIGHTS))
        until_s = time.monotonic() + 60 * options.minutes
        figures = schedule.run(options.count, processes=tuple(options.processes or (1, 2)), until_s=until_s)
        say(str(figures))
        for line in figures.wrong:
            say(line)
        return 1 if figures.wrong or figures.noticed != figures.damaged else 0


if __name__ == "__main__":
    sys.exit(main())
