"""Training runs from the command line: a small corpus, the command, and the process that runs it."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rooftop.runs.supervise import WORKER
from tests.support.forks import BEFORE, Fork
from tests.support.quickly import QUICK_FLAGS

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}
#: Of every run here, but for the folder and what it is about.
OPTIONS = {
    "vocab": 300, "seq": 32, "batch-seqs": 8, "lr": 1e-2, "decay-steps": 40, "warmup": 4, "hold-out": 0.2, "samples": 0,
}  # fmt: skip


def write_corpus(folder: Path) -> Path:
    """Twenty documents of a few made-up words, and a config.json beside them."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(60)]
    (folder / "corpus").mkdir()
    for number in range(20):
        text = " ".join(draw.choices(words, weights=range(1, 61), k=300))
        (folder / "corpus" / f"{number:02}.txt").write_text(text)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def command(folder: Path, run: Path | None, **options: Any) -> list[str]:
    """The command of a run in ``run``; an option that is None is left out, one that is True has no value."""
    settings = {"model": folder / "config.json", "data": folder / "corpus", "run": run} | OPTIONS
    settings |= {name.replace("_", "-"): value for name, value in options.items()}
    words = [*ROOFTOP, "train"]
    for name, value in settings.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


#: One CPU device, compiled quickly.
ENVIRONMENT = {"XLA_FLAGS": QUICK_FLAGS, "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
#: The command in a process that imports everything itself.
ROOFTOP = [sys.executable, "-m", "rooftop"]

Process = Fork | subprocess.Popen[str]


@dataclass(frozen=True, kw_only=True)
class Done:
    """Exit status and output of a process."""

    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """The one line on stderr."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        return lines[0]


def be_a_worker() -> None:
    """Have this process train as one of several itself, without a supervisor that starts another for it."""
    os.environ[WORKER] = str(os.getppid())


def start(words: list[str], *, worker: bool = False) -> Process:
    """Start a process whose output is kept: a fork if the command is ROOFTOP itself, on Linux.

    ``worker``: a fork that is one of several processes has no supervisor.
    """
    if words[: len(ROOFTOP)] == ROOFTOP and sys.platform == "linux":
        prepared = {BEFORE: "tests.support.training_runs:be_a_worker"} if worker else {}
        return Fork(words[len(ROOFTOP) :], ENVIRONMENT | prepared)
    return start_new(words)


def start_new(words: list[str]) -> subprocess.Popen[str]:
    """Start a process as a shell does."""
    return subprocess.Popen(
        words,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )


def finish(process: Process) -> Done:
    """Wait for a process."""
    out, err = process.communicate(timeout=1200)
    assert process.returncode is not None
    return Done(status=process.returncode, out=out, err=err)


def run(words: list[str]) -> Done:
    """Run a command to its end."""
    return finish(start(words))
