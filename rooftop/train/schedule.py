"""An optimizer whose learning rate follows a schedule."""

from __future__ import annotations

from dataclasses import dataclass

import optax

from rooftop.programs.parameters import Parameter, Transformer
from rooftop.programs.training.program import Optimizer
from rooftop.runs.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class ScheduledOptimizer(Optimizer):
    """An optimizer whose ``learning_rate`` is the largest: every update is multiplied by the schedule's share.

    Decoupled weight decay is part of the update, so it follows the schedule too.
    """

    schedule: Schedule

    def transformation(self, described: Transformer[Parameter]) -> optax.GradientTransformation:
        """Return the transformation from float32 gradients to updates; its state counts the steps."""
        return optax.chain(super().transformation(described), optax.scale_by_schedule(self.schedule.share))
