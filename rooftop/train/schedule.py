"""The learning rate as a function of the step: it warms up, then decays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rooftop.core.errors import RooftopError, unknown
from rooftop.programs.parameters import Parameter, Transformer
from rooftop.programs.training.optimizer import Optimizer

DECAYS: tuple[str, ...] = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Shares of the largest learning rate: up in a line over ``warmup`` steps, then to ``final`` at ``steps``.

    ``decay`` is half a cosine (Loshchilov and Hutter 2017), a line, or none; behind ``steps`` the share stays as it
    is. Raises RooftopError for figures that cannot be.
    """

    steps: int
    warmup: int = 0
    decay: str = "cosine"
    final: float = 0.1

    def __post_init__(self) -> None:
        if self.decay not in DECAYS:
            raise unknown("decay", self.decay, DECAYS)
        if self.warmup < 0:
            raise RooftopError("warmup", self.warmup, "a whole number of steps from 0")
        if not 0 <= self.final <= 1:
            raise RooftopError("final-lr", self.final, "a share of the largest learning rate, from 0 to 1")

    def share(self, step: Any) -> Any:
        """The share at ``step``, counted from 0: a number, or a float32 scalar of JAX for one of JAX.

        The first step of a warm-up has 1/warmup of the rate, and not none of it.
        """
        xp: Any = jnp if isinstance(step, jax.Array) else np
        rising = (step + 1) / max(self.warmup, 1)
        if self.decay == "constant":
            return xp.minimum(rising, 1.0)
        done = xp.clip((step - self.warmup) / max(self.steps - self.warmup, 1), 0.0, 1.0)
        left = (1 + xp.cos(np.pi * done)) / 2 if self.decay == "cosine" else 1 - done
        return xp.minimum(rising, self.final + (1 - self.final) * left)


@dataclass(frozen=True, kw_only=True)
class ScheduledOptimizer(Optimizer):
    """An optimizer whose ``learning_rate`` is the largest: what it would add is multiplied by the schedule's share.

    Decoupled weight decay is a part of what is added, and so follows the schedule too.
    """

    schedule: Schedule

    def transformation(self, described: Transformer[Parameter]) -> optax.GradientTransformation:
        """From float32 gradients to what is added to the weights; its state counts the steps."""
        return optax.chain(super().transformation(described), optax.scale_by_schedule(self.schedule.share))
