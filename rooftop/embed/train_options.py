"""What a training run of embedding tables is asked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import jax

from rooftop.embed.criteo import check_features
from rooftop.embed.host.workers import check_workers
from rooftop.errors import RooftopError
from rooftop.models.tables import Tables
from rooftop.programs.embedding_pipeline import ShareOf


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a run is asked. ``batch`` is B on all ``devices``.

    ``cores_per_device`` SparseCores are emulated by each device without any (None: ``train_step.EMULATED_CORES``).
    ``sample_passes`` above 1 look every batch up in so many parts of its samples, and update each row once by them all.
    ``pipelined`` uses stale gradients, see ``rooftop.programs.embedding_pipeline``. A checkpoint is made every
    ``checkpoint_every`` batches and at the end; tables are looked over for NaNs then, with the check ``nan`` after
    every batch. ``checks`` are names of ``rooftop.xla.sparsecore_checks.CHECKS``; others than ``nan`` need SparseCores.
    ``limits`` is a file of them to go on with (None: the run's own, which at its begin come from its first batches).
    Batches are read and made ready by ``workers`` processes, ahead of time, or by the run's own (0), with ``threads``
    threads each. ``profile`` is the first and last batch, counted from 1, of a trace. ``share_of`` all learning rates
    is used at a step, counted from 0 (None: all of them, always). ``seed`` is that of the run (None: 0 at its begin).
    """

    tables: Tables
    data: Path
    run: Path
    batch: int
    devices: int = 1
    cores_per_device: int | None = None
    steps: int | None = None
    sample_passes: int = 1
    pipelined: bool = False
    checkpoint_every: int = 100
    dense_learning_rate: float = 1e-3
    share_of: ShareOf | None = None
    seed: int | None = None
    threads: int = 1
    workers: int = 0
    limits: Path | None = None
    checks: tuple[str, ...] = ()
    profile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "devices", "cores_per_device", "checkpoint_every", "threads"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise RooftopError(name, getattr(self, name), "a positive whole number")
        check_workers(self.workers)
        if self.devices > len(jax.devices()):
            raise RooftopError("devices", self.devices, f"at most the {len(jax.devices())} that are here")
        if not 0 <= self.dense_learning_rate < math.inf:
            raise RooftopError("lr", self.dense_learning_rate, "a number of at least 0")
        if self.seed is not None and not 0 <= self.seed < 2**31:
            raise RooftopError("seed", self.seed, "a whole number from 0 to 2147483647")
        check_features(self.tables)
        widths = {table.width for table in self.tables.tables}
        if len(widths) > 1:
            raise RooftopError("tables", f"widths {sorted(widths)}", "one width: a DLRM multiplies embeddings pairwise")
