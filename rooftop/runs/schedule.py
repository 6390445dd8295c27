"""The learning rate as a function of the step: it warms up, then decays. Imports no JAX until a step is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rooftop.core.errors import RooftopError, unknown

DECAYS: tuple[str, ...] = ("cosine", "linear", "constant")


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Shares of the largest learning rate: linear over ``warmup`` steps up to 1, then down to ``final`` at ``steps``.

    ``decay`` is half a cosine (Loshchilov and Hutter 2017), linear, or constant; after ``steps`` the share stays at
    ``final``. Raises RooftopError for figures out of range.
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
        """Return the share at ``step``, counted from 0: a number, or a float32 scalar for an array of JAX.

        The first step of a warm-up has the share 1/warmup, not 0.
        """
        xp: Any = np
        if not isinstance(step, (int, float, np.ndarray, np.generic)):
            import jax.numpy as jnp

            xp = jnp
        rising = (step + 1) / max(self.warmup, 1)
        if self.decay == "constant":
            return xp.minimum(rising, 1.0)
        done = xp.clip((step - self.warmup) / max(self.steps - self.warmup, 1), 0.0, 1.0)
        left = (1 + xp.cos(np.pi * done)) / 2 if self.decay == "cosine" else 1 - done
        return xp.minimum(rising, self.final + (1 - self.final) * left)
