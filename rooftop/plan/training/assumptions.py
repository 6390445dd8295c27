"""Assumptions of a training expectation beyond the bound: named, settable, argued in docs/plan.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from rooftop.capabilities import AttentionKernel
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import Record
from rooftop.frameworks.habits import Habits
from rooftop.plan.pricing import parse_shares, require_shares

#: Largest share of each transfer's time that can overlap computation, unless a schedule of the compiler says otherwise
#: (``rooftop.frameworks`` has the first two by chip). A collective between two dependent matmuls is exposed
#: unless it is written as a collective matmul. ``context`` and ``stage`` are written to overlap;
#: their 0.9 is assumed, not measured.
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
class Assumptions(Record):
    """The shares that hide, the attention that is computed, and a chip's calibration factor.

    ``hidden`` overrides the shares that the chip's compiler and ``HIDDEN`` give.
    ``attention``: a 'flash' kernel that skips masked blocks of ``attention_block`` (as priced for the chip if None), or
    the 'reference' that computes and stores all scores. ``narrow_gradients``: gradients of weights are multiplied in
    the dtype of the layers' matmuls too, as Transformer Engine does, and not in that of activations.
    ``fused_attention_gradients``: all gradients of attention come from one kernel, as with ``use_fused_bwd_kernel`` of
    splash attention on TPUs, and not from two. ``attention_kernels`` names kernels of another program that were
    counted for the chip (``rooftop.roofline.achievable.Fractions.kernels``), with their blocks; None are those of ours.
    """

    closed = True
    #: Plans of earlier versions said with it whose program they are of: their ``framework`` does.
    retired = frozenset({"own_program"})

    hidden: Mapping[str, float] = field(default_factory=dict)
    attention: Literal["flash", "reference"] = "flash"
    attention_block: int | None = None
    calibration: float = 1.0
    narrow_gradients: bool = False
    fused_attention_gradients: bool = False
    attention_kernels: str | None = None

    def __post_init__(self) -> None:
        require_shares(self.hidden, HIDDEN, "assume")
        if self.attention not in ("flash", "reference"):
            raise unknown("attention", self.attention, ("flash", "reference"))
        if self.attention_block is not None and self.attention_block < 1:
            raise RooftopError("attention_block", self.attention_block, "a positive whole number")
        if self.calibration <= 0:
            raise RooftopError("calibration", self.calibration, "a positive factor")

    def kernel(self, habits: Habits) -> AttentionKernel:
        """The attention kernel of a program with these habits."""
        return "reference" if self.attention == "reference" else habits.attention_kernel

    def shares(self, habits: Habits) -> dict[str, float]:
        """The share of each transfer that may hide: as given, else by the program's schedule, else ``HIDDEN``."""
        scheduled = {
            "weight_gather": habits.hides_weight_gathers,
            "gradient_scatter": habits.hides_gradient_scatters,
        }
        return {**HIDDEN, **scheduled, **self.hidden}

    def with_hidden(self, text: str) -> Assumptions:
        """These assumptions with some changed, from 'weight_gather=1,tensor=0.5'."""
        return replace(self, hidden={**self.hidden, **parse_shares(text, HIDDEN, "assume")})
