"""What is asked of a training plan: the model, the slice, the work, and what of the strategy is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooftop.arrays.mesh import Mesh
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models.config import ModelConfig
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.memory import Memory, book_memory, training_memory
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.strategies import SCHEDULES, Strategies
from rooftop.plan.training.workload import Numerics, Workload


@dataclass(frozen=True, kw_only=True)
class Problem:
    """All that a search is given. What is None is searched."""

    model: ModelConfig
    slice: Slice
    workload: Workload
    numerics: Numerics = Numerics()
    assumptions: Assumptions = Assumptions()
    axes: Mapping[str, int] | None = None
    mesh: Mesh | None = None
    remat: str | None = None
    microbatches: int | None = None
    schedule: str = "1f1b"
    chunks: int = 1
    bounds: str = "usable"

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise RooftopError("schedule", self.schedule, ", ".join(SCHEDULES))
        if (self.chunks > 1) != (self.schedule == "interleaved"):
            raise RooftopError("chunks", self.chunks, "2 or more with the interleaved schedule, 1 with any other")

    @property
    def capacity(self) -> float:
        """HBM bytes of a device: usable, or nominal with the book's bounds."""
        chip = self.slice.chip
        return chip.hbm_bytes / chip.devices if self.bounds == "book" else chip.hbm_usable_bytes

    def memory(self, step: TrainingStep) -> Memory:
        """Bytes per device by class, by what XLA holds or by the book's arithmetic."""
        return (book_memory if self.bounds == "book" else training_memory)(step)

    def step(self, strategies: Strategies) -> TrainingStep:
        """The training step under given strategies."""
        return TrainingStep(
            model=self.model, slice=self.slice, workload=self.workload, numerics=self.numerics,
            assumptions=self.assumptions, strategies=strategies,
        )  # fmt: skip
