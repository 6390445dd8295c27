"""What an expectation assumes beyond the bound: named, settable, argued in docs/plan.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from rooftop.core.errors import RooftopError, unknown
from rooftop.roofline.overlap import Overlap

#: Largest share of each transfer's time that can run beside computation, where the compiler's own schedule does not
#: say otherwise (rooftop.roofline.overlap says it of the first two). What stands between two dependent matmuls is not
#: hidden unless it is written as a collective matmul; rings and pipeline sends are written to overlap.
HIDDEN: Mapping[str, float] = MappingProxyType(
    {
        "weight_gather": 1.0,
        "gradient_scatter": 1.0,
        "gradient_all_reduce": 0.0,
        "tensor": 0.0,
        "context": 0.9,
        "all_to_all": 0.0,
        "stage": 0.9,
        "offload": 1.0,
    }
)


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """How much hides, how attention is computed, and a chip's calibration factor.

    ``hidden`` overrides the shares that the chip's compiler and ``HIDDEN`` give.
    ``attention``: a 'flash' kernel that skips masked blocks of ``attention_block`` (as priced for the chip if None), or
    the 'reference' that computes and stores all scores.
    """

    hidden: Mapping[str, float] = field(default_factory=dict)
    attention: str = "flash"
    attention_block: int | None = None
    calibration: float = 1.0

    def __post_init__(self) -> None:
        for name, share in self.hidden.items():
            if name not in HIDDEN:
                raise unknown("hidden", name, HIDDEN)
            if not 0 <= share <= 1:
                raise RooftopError(f"hidden {name}", share, "a share between 0 and 1")
        if self.attention not in ("flash", "reference"):
            raise unknown("attention", self.attention, ("flash", "reference"))
        if self.attention_block is not None and self.attention_block < 1:
            raise RooftopError("attention_block", self.attention_block, "a positive whole number")
        if self.calibration <= 0:
            raise RooftopError("calibration", self.calibration, "a positive factor")

    def shares(self, schedule: Overlap) -> dict[str, float]:
        """The share of each transfer that may hide: as given here, else by the compiler's schedule, else ``HIDDEN``."""
        return {**HIDDEN, **schedule.hidden, **self.hidden}

    def with_hidden(self, text: str) -> Assumptions:
        """These assumptions with some changed, from 'weight_gather=1,tensor=0.5'."""
        changed = dict(self.hidden)
        for entry in text.split(","):
            name, _, share = (part.strip() for part in entry.partition("="))
            if name not in HIDDEN:
                raise unknown("assume", name, HIDDEN)
            try:
                changed[name] = float(share)
            except ValueError:
                raise RooftopError(f"assume {name}", share, "a share between 0 and 1") from None
        return replace(self, hidden=changed)
