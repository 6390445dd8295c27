"""A rule of the book applied to a plan, with formula, values, verdict and margin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A rule of the book applied to a plan.

    The rule holds if ``value`` is at least ``limit``; a ``near`` rule if it is within a factor of two of it.
    """

    rule: str
    source: str
    formula: str
    value: float
    limit: float
    text: str
    near: bool = False

    @property
    def holds(self) -> bool:
        """True if the rule holds."""
        return 0.5 <= self.margin <= 2 if self.near else bool(self.value >= self.limit)

    @property
    def margin(self) -> float:
        """Value over limit: 2 is twice as much as needed, 0.5 half."""
        return self.value / self.limit if self.limit else float("inf")

    def to_json(self) -> dict[str, Any]:
        """The reason as plain JSON values."""
        return {
            "rule": self.rule,
            "source": self.source,
            "formula": self.formula,
            "value": self.value,
            "limit": self.limit,
            "holds": self.holds,
            "margin": self.margin,
            "text": self.text,
        }
