"""Many crashes of training at a low price: one run gives many images of its folder, and one process resumes them all.

``python -m tests.faults.images --seed S --cuts 500 --kills 500 --damages 1000`` runs the three, in turn with one and
with two processes, and prints figures. The status is 1 if anything is wrong.

- A power cut: an operation of the run's folder is drawn, and the disk is written as a crash there leaves it
  (tests/support/power.py). The run goes on: what it does later changes no image.
- A kill: all processes of the run are stopped at a random moment, the folder is copied, and they go on. A stopped
  process has written what one that is killed at that moment has, and the kernel keeps it for both. (Processes that are
  killed indeed, and start again from nothing, are in ``tests.faults.training``.)
- A damaged file: any file of a checkpoint is flipped, cut, removed or zeroed; ``restore`` has to name it and to return
  the checkpoint before, bit for bit.

A process that has started JAX resumes each image by ``rooftop.train`` to the end of the run. Every loss and norm has to
be that of a run that nothing disturbs, and so has every array of the last checkpoint.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.runs.checkpoints import Checkpoints
from tests.faults.training import DEVICES, begin, damage, keep_compilations, losses
from tests.support.ports import free_port
from tests.support.training_runs import ENVIRONMENT, OPTIONS, Process, command, finish, write_corpus

#: Steps of a run, and steps between checkpoints.
STEPS, SAVE_EVERY = 16, 2
#: Images of a run.
_PER_RUN = 10
_MESH = "fsdp=2,tensor=2"


@dataclass
class Crashes:
    """Images that were resumed and files that were damaged, by kind and processes, and what was wrong."""

    done: Counter[str] = field(default_factory=Counter)
    steps: int = 0
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{dict(sorted(self.done.items()))}; {self.steps} losses compared; {len(self.wrong)} wrong"


def run_options(processes: int) -> dict[str, Any]:
    """The options of a run, beyond those of all runs of tests."""
    options: dict[str, Any] = {"steps": STEPS, "save_every": SAVE_EVERY}
    return options | ({} if processes == 1 else {"devices": DEVICES, "mesh": _MESH})


def request(folder: Path, run: Path, processes: int) -> dict[str, Any]:
    """The fields of a TrainRequest that the command has for these options; a run that is resumed saves at its end."""
    options = {**OPTIONS, **run_options(processes), "save_every": STEPS}
    options |= {"model": str(folder / "config.json"), "data": [str(folder / "corpus")], "run": str(run)}
    return {
        {"lr": "learning_rate", "seq": "seq_len"}.get(name, name.replace("-", "_")): value
        for name, value in options.items()
    }


def commands(folder: Path, run: Path, processes: int) -> list[list[str]]:
    """The commands of a run's processes."""
    options = run_options(processes)
    if processes == 1:
        return [command(folder, run, **options)]
    where = f"127.0.0.1:{free_port()}"
    return [
        command(folder, run, **options, coordinator=where, processes=processes, process=process)
        for process in range(processes)
    ]


def abstract_state(checkpoint: Path) -> dict[str, jax.ShapeDtypeStruct]:
    """The arrays that the manifest of a checkpoint names, each on one device."""
    manifest = json.loads(json.loads((checkpoint / "manifest.json").read_text())["manifest"])
    sharding, result = jax.sharding.SingleDeviceSharding(jax.devices()[0]), dict[str, jax.ShapeDtypeStruct]()
    for name, kind in manifest["arrays"].items():
        dtype, _, shape = kind.removesuffix("]").partition("[")
        dims = tuple(int(dim) for dim in shape.split(", ") if dim)
        result[name] = jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)
    return result


def arrays(run: Path) -> dict[str, str]:
    """Digest of each array of the last checkpoint."""
    checkpoints = Checkpoints(run / "checkpoints")
    try:
        return digests(checkpoints.restore(abstract_state(checkpoints.folder / str(STEPS)), STEPS).state)
    finally:
        checkpoints.close()


def digests(state: dict[str, jax.Array]) -> dict[str, str]:
    """SHA-256 of each array."""
    return {name: hashlib.sha256(np.asarray(value).tobytes()).hexdigest() for name, value in state.items()}


class Resumer:
    """Processes that resume runs to their end (tests.faults.resumer)."""

    def __init__(self, processes: int) -> None:
        where, devices = f"127.0.0.1:{free_port()}", 1 if processes == 1 else DEVICES
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.faults.resumer", where, str(processes), str(process), str(devices)],
                env=os.environ | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for process in range(processes)
        ]  # fmt: skip

    def resume(self, request: dict[str, Any]) -> str:
        """Train a run to its end; the line of an error, empty without one."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        errors = list[str]()
        for process in self._processes:
            assert process.stdout is not None
            line = process.stdout.readline()
            errors.append(json.loads(line)["error"] or "" if line else f"ended with status {process.wait()}")
        return "; ".join(filter(None, errors))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            # Waits, and closes the pipes.
            with process:
                pass


@dataclass
class Images:
    """Images of runs of so many ``processes``, in ``folder``."""

    folder: Path
    processes: int
    draw: random.Random
    figures: Crashes
    say: Callable[[str], None]
    _runs: int = 0

    def __post_init__(self) -> None:
        self.calm = self.folder / f"calm{self.processes}"
        count = self.folder / f"operations{self.processes}"
        running = self._begun(self.calm, power=[str(self.calm), str(count), {}])
        assert all(finish(process).status == 0 for process in running)
        #: Moments of a run at which the power may fail.
        self.operations = int(count.read_text())
        self._losses, self._arrays = losses(self.calm), arrays(self.calm)
        self._resumer = Resumer(self.processes)

    def close(self) -> None:
        """End the processes."""
        self._resumer.close()

    def cut(self, count: int) -> None:
        """Cut the power at this many operations of a run, and resume from each."""
        run, cuts = self._new()
        drawn = self.draw.sample(range(1, self.operations + 1), count)
        moments = {
            at: (self.draw.choice(("lost", "names", "torn", "torn")), self.draw.randrange(1 << 30)) for at in drawn
        }
        for process in self._begun(run, power=[str(run), str(cuts), moments]):
            finish(process)
        # Operations of a thread of Orbax come in another order in each run, and may be a few fewer.
        self._resume_all(cuts, "cut")
        shutil.rmtree(run, ignore_errors=True)

    def kill(self, count: int) -> None:
        """Stop the processes of a run at this many moments, and resume from what each has left."""
        run, stops = self._new()
        stops.mkdir()
        running = self._begun(run)
        # Before there is a folder a kill leaves no image: one that waits for its last image would wait for ever.
        _wait_for(run, running)
        # The first moments are those while it starts; later ones are close together: a step takes milliseconds.
        for number in range(count):
            time.sleep(self.draw.choice((0.0, 0.005, 0.02, 0.05)))
            if number == 1:
                _wait_for(run / "metrics.jsonl", running)
            if any(process.poll() is not None for process in running):
                break
            with _stopped(running, self.draw):
                if all(process.poll() is None for process in running) and run.exists():
                    shutil.copytree(run, stops / str(number))
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=600)
        self._resume_all(stops, "kill")
        shutil.rmtree(run, ignore_errors=True)

    def _new(self) -> tuple[Path, Path]:
        self._runs += 1
        return self.folder / f"run{self.processes}-{self._runs}", self.folder / f"images{self.processes}-{self._runs}"

    def _begun(self, run: Path, **fault: object) -> list[Process]:
        first, *others = commands(self.folder, run, self.processes)
        return [begin(first, **fault), *(begin(words) for words in others)]

    def _resume_all(self, images: Path, kind: str) -> None:
        # Of a run that reached none of its moments there is no folder.
        for image in sorted(images.iterdir()) if images.exists() else []:
            # The last line may be torn.
            before = dict[int, str]()
            with suppress(ValueError, OSError):
                before = losses(image)
            error = self._resumer.resume(request(self.folder, image, self.processes))
            result = {} if error else losses(image)
            self.figures.done[f"{kind} of {self.processes}"] += 1
            self.figures.steps += len(result)
            if error or result != self._losses or arrays(image) != self._arrays:
                self.figures.wrong.append(f"{kind} {image.name}: {error or self._difference(result, before)}")
                self.say(self.figures.wrong[-1])
            shutil.rmtree(image)
        shutil.rmtree(images, ignore_errors=True)
        self.say(str(self.figures))

    def _difference(self, result: dict[int, str], before: dict[int, str]) -> str:
        """The first step that differs, and who computed it: the run before the crash, or the one after."""
        steps = sorted(step for step in {*self._losses, *result} if self._losses.get(step) != result.get(step))
        if not steps:
            return "arrays differ"
        first = steps[0]
        own = "before" if before.get(first) == result.get(first) else "after"
        values = f"{result.get(first)} for {self._losses.get(first)}"
        return f"{len(steps)} steps differ; step {first}, computed {own} the crash: {values}"


def damage_files(run: Path, count: int, draw: random.Random, figures: Crashes, kind: str) -> None:
    """Damage files of the newest checkpoint, one after another; now and then also one of the checkpoint before."""
    root = run / "checkpoints"
    older, newest = sorted((path for path in root.iterdir() if path.name.isdecimal()), key=lambda path: int(path.name))
    checkpoints = Checkpoints(root)
    # Damage may be in the manifest that says which arrays there are.
    abstract = abstract_state(older)
    whole = digests(checkpoints.restore(abstract, int(older.name)).state)
    names = [sorted(file for file in path.rglob("*") if file.is_file()) for path in (newest, older)]
    try:
        for _ in range(count):
            files = [draw.choice(names[0])] + ([draw.choice(names[1])] if draw.randrange(10) == 0 else [])
            contents = {file: file.read_bytes() for file in files}
            for file in files:
                damage(file, draw)
            figures.done[kind] += len(files)
            try:
                restored = checkpoints.restore(abstract)
            except RooftopError as refused:
                noticed = len(files) == 2 and all(str(file) in str(refused) for file in files)
            else:
                noticed = len(files) == 1 and restored.step == int(older.name) and len(restored.refused) == 1
                noticed &= any(str(files[0]) in line for line in restored.refused)
                noticed &= digests(restored.state) == whole
            if not noticed:
                figures.wrong.append(f"damage of {', '.join(map(str, files))}")
            for file, content in contents.items():
                file.write_bytes(content)
    finally:
        checkpoints.close()


def _wait_for(file: Path, running: list[Process]) -> None:
    while not file.exists() and all(process.poll() is None for process in running):
        time.sleep(0.002)


@contextmanager
def _stopped(running: list[Process], draw: random.Random) -> Iterator[None]:
    """Stop processes, one shortly after the other in a random order, and let them go on."""
    for process in draw.sample(running, len(running)):
        process.send_signal(signal.SIGSTOP)
        while process.poll() is None and not _is_stopped(process.pid):
            time.sleep(0.0005)
        time.sleep(draw.choice((0.0, 0.001, 0.01)) if len(running) > 1 else 0.0)
    try:
        yield
    finally:
        for process in running:
            process.send_signal(signal.SIGCONT)


def _is_stopped(pid: int) -> bool:
    """True if every thread is stopped: one may be in a call that it has to finish first."""
    with suppress(OSError):
        texts = [(task / "stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
        return all(text.rpartition(")")[2].split()[0] == "T" for text in texts)
    return True


def main() -> int:
    """Run by the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, choices=(1, 2), action="append", help="1 or 2; by default in turn")
    for name in ("cuts", "kills", "damages"):
        parser.add_argument(f"--{name}", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rooftop-images-") as name:
        folder, figures = write_corpus(Path(name)), Crashes()
        keep_compilations(f"{name}/jax")

        def say(line: str) -> None:
            print(line, flush=True)

        draw = random.Random(options.seed)
        kinds = [Images(folder, count, draw, figures, say) for count in options.processes or (1, 2)]
        for images in kinds:
            damage_files(images.calm, options.damages // len(kinds), draw, figures, f"damage of {images.processes}")
            say(str(figures))
        turn = 0
        while True:
            left = {"cut": options.cuts, "kill": options.kills}
            for kind in left:
                left[kind] -= sum(count for name, count in figures.done.items() if name.startswith(kind))
            if max(left.values()) <= 0:
                break
            images, turn = kinds[turn % len(kinds)], turn + 1
            if left["cut"] > 0:
                images.cut(min(left["cut"], _PER_RUN))
            if left["kill"] > 0:
                images.kill(min(left["kill"], _PER_RUN))
        for images in kinds:
            images.close()
        say(str(figures))
        for line in figures.wrong:
            say(line)
        return 1 if figures.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
