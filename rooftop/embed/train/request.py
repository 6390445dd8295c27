"""The request for a training run of embedding tables, checked before JAX is imported."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rooftop.compiler.sparsecore import parse_checks
from rooftop.core.errors import RooftopError
from rooftop.embed.criteo import check_features
from rooftop.embed.host.workers import check_workers
from rooftop.models.embedding_tables.files import load_tables
from rooftop.models.embedding_tables.tables import Tables
from rooftop.runs.folder import RunFolder
from rooftop.runs.schedule import Schedule
from rooftop.runs.trace import check_steps


@dataclass(frozen=True, kw_only=True)
class EmbeddingTrainRequest:
    """Training of a DLRM with ``tables`` (a tables.toml) on ``data`` (Criteo's TSV) in the folder ``run``.

    Data
        ``batch_samples``, B, is over all ``devices`` (None: all devices). ``steps`` is the last step of the run
        (None: the end of the data). ``evaluate`` is a file whose AUC is computed at the end.
    Program
        A device without SparseCores emulates ``cores_per_device`` (None: 2). ``sample_passes`` above 1 look a batch up
        in so many parts of its samples and update each row once. ``pipelined`` uses gradients that are stale by a step
        (``rooftop.programs.embedding.pipeline``). ``limits`` is a limits file (None: the run's own, estimated from its
        first batches). ``checks`` are names of ``rooftop.compiler.sparsecore.CHECKS``.
    Optimization
        ``learning_rate`` is that of the dense part. ``warmup``, ``decay``, ``decay_steps`` (None: the last step) and
        ``final_learning_rate``, a share, scale all learning rates alike. ``seed`` None is the run's own, 0 for a new
        run.
    Run
        A checkpoint every ``save_every`` steps and at the end; the newest ``keep`` stay, and every multiple of
        ``keep_every``. ``workers`` processes (0: the run's own) of ``host_threads`` threads prepare batches.
        ``profile`` is the first and last step of a trace, counted from 1. ``tensorboard`` writes events too.

    Raises RooftopError naming a field that is out of range.
    """

    tables: Tables | Path | str
    data: Path | str
    run: Path | str
    batch_samples: int = 1024
    steps: int | None = None
    evaluate: Path | str | None = None
    devices: int | None = None
    cores_per_device: int | None = None
    sample_passes: int = 1
    pipelined: bool = False
    limits: Path | str | None = None
    checks: tuple[str, ...] = ()
    learning_rate: float = 1e-3
    warmup: int = 0
    decay: str = "constant"
    decay_steps: int | None = None
    final_learning_rate: float = 0.1
    seed: int | None = None
    save_every: int = 100
    keep: int = 2
    keep_every: int | None = None
    host_threads: int = 1
    workers: int = 0
    profile: tuple[int, int] | None = None
    tensorboard: bool = False

    def __post_init__(self) -> None:
        for name in (
            "batch_samples", "steps", "devices", "cores_per_device", "decay_steps", "save_every", "keep", "keep_every",
            "host_threads",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RooftopError(name.replace("_", "-"), value, "a positive whole number")
        check_workers(self.workers)
        parse_checks(",".join(self.checks))
        check_steps(self.profile)
        if not 0 <= self.learning_rate < math.inf:
            raise RooftopError("lr", self.learning_rate, "a number of at least 0")
        if self.seed is not None and not 0 <= self.seed < 2**31:
            raise RooftopError("seed", self.seed, "a whole number from 0 to 2147483647")
        self.schedule(1)
        check_features(self.all_tables)
        widths = {table.width for table in self.all_tables.tables}
        if len(widths) > 1:
            raise RooftopError("tables", f"widths {sorted(widths)}", "one width: a DLRM multiplies embeddings pairwise")

    @cached_property
    def all_tables(self) -> Tables:
        """The tables, read if they are a file. Raises RooftopError if it cannot be read."""
        return self.tables if isinstance(self.tables, Tables) else load_tables(Path(self.tables))

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(path=Path(self.run))

    def schedule(self, last: int) -> Schedule | None:
        """Return the schedule of all learning rates for a run of ``last`` steps; None if they are constant."""
        if not self.warmup and self.decay == "constant":
            return None
        steps = self.decay_steps or last
        return Schedule(steps=steps, warmup=self.warmup, decay=self.decay, final=self.final_learning_rate)
