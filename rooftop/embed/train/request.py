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
from rooftop.requests.training import TrainEmbedding
from rooftop.runs.folder import RunFolder
from rooftop.runs.schedule import Schedule
from rooftop.runs.trace import check_steps


@dataclass(frozen=True, kw_only=True)
class EmbeddingTrainRequest(TrainEmbedding):
    """A request for a training run of embedding tables, checked. Raises RooftopError naming a field out of range."""

    def __post_init__(self) -> None:
        for name in (
            "batch_samples", "steps", "devices", "cores_per_device", "decay_steps", "save_every", "keep", "keep_every",
            "host_threads",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < 1:
                raise RooftopError(name.replace("_", "-"), value, "a positive whole number")
        check_workers(self.workers)
        _ = self.check_names
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
    def check_names(self) -> tuple[str, ...]:
        """Names of ``rooftop.compiler.sparsecore.CHECKS``. Raises RooftopError for another."""
        return parse_checks(self.checks if isinstance(self.checks, str) else ",".join(self.checks or ()))

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
