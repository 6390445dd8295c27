"""Assumptions of a serving expectation beyond the bound: named, settable, with their evidence in ``serving.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from rooftop.core.errors import RooftopError
from rooftop.frameworks.engines import Overheads
from rooftop.hardware import Chip
from rooftop.plan.pricing import parse_shares, require_shares

ServingShare = Literal["hbm_read", "latency", "latency_2d", "bytes", "ring"]
#: The assumptions of a serving plan, in words.
SHARES: Mapping[ServingShare, str] = MappingProxyType(
    {
        "hbm_read": "share of the HBM rate that streams of weights and KV reach",
        "latency": "share of the start and the hops of a collective that hides behind the reading of weights",
        "latency_2d": "the same share where fsdp splits D",
        "bytes": "share of the bytes of a collective that does",
        "ring": "share of a prefill's ring of keys and values that hides behind attention",
    }
)
#: Assumptions whose figures were calibrated on measured decode steps; the others have no measurement.
CALIBRATED: tuple[ServingShare, ...] = ("hbm_read", "latency")
#: Assumed as in training plans (``context`` of ``rooftop.plan.training.assumptions``); not measured.
_RING = 0.9


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("serving.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class ServingAssumptions:
    """Shares by name (see ``SHARES``) that replace those of ``serving.toml``; ``mfu`` fixes a prefill's efficiency.

    ``engine``: the engine whose kernels are priced on a GPU, with its ``release`` and ``settings``; None: our own
    programs. ``overheads`` replace those of the engine's file.
    """

    shares: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None
    engine: str | None = None
    release: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    overheads: Overheads | None = None

    def __post_init__(self) -> None:
        require_shares(self.shares, SHARES, "assume", positive=("hbm_read",))
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise RooftopError("mfu", self.mfu, "a share between 0 and 1, such as 0.4")

    def share(self, name: ServingShare, chip: Chip) -> float:
        """The share in use: as given, or that of ``serving.toml`` for the chip."""
        if name in self.shares:
            return self.shares[name]
        if name == "ring":
            return _RING
        if name == "hbm_read" and chip.calibrated is not None and chip.calibrated.hbm_read is not None:
            return chip.calibrated.hbm_read
        return float(_entry(chip)[name][0])

    def latency(self, chip: Chip, *, two_d: bool) -> float:
        """The share of starts and hops that hides; ``two_d``: where ``fsdp`` splits D."""
        return self.share("latency_2d" if two_d else "latency", chip)

    def sources(self, chip: Chip) -> dict[str, str]:
        """The source of each share."""
        return {name: "given" if name in self.shares else _source(name, chip) for name in SHARES}

    def with_shares(self, text: str) -> ServingAssumptions:
        """These assumptions with some changed, from 'hbm_read=0.9,latency=0.5'."""
        return replace(self, shares={**self.shares, **parse_shares(text, SHARES, "assume")})


def _entry(chip: Chip) -> Mapping[str, Any]:
    table = _table()
    entry: Mapping[str, Any] = table[chip.kind] | table.get(chip.name, {})
    return entry


def reads_experts_by_tile(chip: Chip) -> bool:
    """True if kernels read the weights of quantised experts once for each tile of their rows."""
    return bool(_entry(chip)["experts_by_tile"][0])


def _source(name: ServingShare, chip: Chip) -> str:
    if name == "ring":
        return "assumed: written to overlap, as in training"
    if name == "hbm_read" and chip.calibrated is not None and chip.calibrated.hbm_read is not None:
        return f"calibrated by {chip.calibrated.by}"
    return str(_entry(chip)[name][1])
