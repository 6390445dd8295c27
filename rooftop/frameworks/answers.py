"""Frameworks and configurations as answers show them: best plans, and settings that are left unused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from rooftop.core.records import Record


@dataclass(frozen=True, kw_only=True)
class UnusedSettings(Record):
    """Settings that would make a configured step faster: by key, their values and those of the configuration.

    An empty value is a flag, None a setting that is not written. ``gain`` is the share of tokens/s that they add.
    """

    about: str
    settings: Mapping[str, tuple[str | None, str | None]]
    step_s: float
    gain: float


@dataclass(frozen=True, kw_only=True)
class StatedConfiguration(Record):
    """A configuration by its ``file``: settings whose price is not known, remarks, and what it leaves unused."""

    file: str
    unpriced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unused: tuple[UnusedSettings, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PricedRecipe(Record):
    """The kind of recipe that a framework's price is of: ``kind``, its ``habits``, and what it leaves ``unpriced``.

    ``name`` is that of a recipe of ``publisher`` that has the plan's model, chips, strategy, batch and number format.
    """

    kind: Literal["benchmark", "training"]
    habits: tuple[str, ...]
    unpriced: tuple[str, ...] = ()
    publisher: str
    name: str | None = None


@dataclass(frozen=True, kw_only=True)
class FrameworkOffer(Record):
    """The best plan of a framework: its mesh, time, memory and money, and the runs that its interval is from.

    ``obstacle``: why it has none that runs; its figures are then those of the best that does not, or 0.
    """

    name: str
    title: str
    release: str | None = None
    mesh: Mapping[str, int]
    remat: str = ""
    schedule: str = ""
    chunks: int = 1
    step_s: float = 0.0
    interval_s: tuple[float, float] | None = None
    mfu: float = 0.0
    memory_bytes: float = 0.0
    days: float | None = None
    cost_usd: float | None = None
    runs: int = 0
    obstacle: str | None = None

    @property
    def likely_s(self) -> float:
        """Seconds in the middle of the interval, by their ratios; those expected without one."""
        return self.step_s if self.interval_s is None else sqrt(self.interval_s[0] * self.interval_s[1])
