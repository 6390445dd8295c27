"""What a serving expectation assumes beyond the bound: named, settable, each with its evidence in ``serving.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.hardware import Chip

#: What may be assumed, and what it is. ``ring``: the share of a prefill's ring of keys and values that hides.
SHARES: Mapping[str, str] = MappingProxyType(
    {
        "hbm_read": "share of the HBM rate that streams of weights and KV reach",
        "latency": "share of the start and the hops of a collective that hides behind the reading of weights",
        "bytes": "share of the bytes of a collective that does",
        "ring": "share of a prefill's ring of keys and values that hides behind attention",
    }
)
#: Those whose figures were chosen with measured decode steps in sight; the others have none to go by.
CALIBRATED = ("hbm_read", "latency")
_RING = 0.9


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("serving.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, kw_only=True)
class ServingAssumptions:
    """Shares by name (see ``SHARES``) that replace those of ``serving.toml``; ``mfu`` fixes a prefill's efficiency."""

    shares: Mapping[str, float] = field(default_factory=dict)
    mfu: float | None = None

    def __post_init__(self) -> None:
        for name, share in self.shares.items():
            if name not in SHARES:
                raise unknown("assume", name, SHARES)
            if not (0 < share <= 1 if name == "hbm_read" else 0 <= share <= 1):
                raise RooftopError(f"assume {name}", share, "a share between 0 and 1")
        if self.mfu is not None and not 0 < self.mfu <= 1:
            raise RooftopError("mfu", self.mfu, "a share between 0 and 1, such as 0.4")

    def share(self, name: str, chip: Chip) -> float:
        """The share in force: as given, or as ``serving.toml`` has it for the chip."""
        if name in self.shares:
            return self.shares[name]
        if name == "ring":
            return _RING
        return float(_entry(chip)[name][0])

    def sources(self, chip: Chip) -> dict[str, str]:
        """Where each share comes from."""
        return {name: "given" if name in self.shares else _source(name, chip) for name in SHARES}

    def with_shares(self, text: str) -> ServingAssumptions:
        """These assumptions with some changed, from 'hbm_read=0.9,latency=0.5'."""
        changed = dict(self.shares)
        for entry in text.split(","):
            name, _, share = (part.strip() for part in entry.partition("="))
            if name not in SHARES:
                raise unknown("assume", name, SHARES)
            try:
                changed[name] = float(share)
            except ValueError:
                raise RooftopError(f"assume {name}", share, "a share between 0 and 1") from None
        return replace(self, shares=changed)


def _entry(chip: Chip) -> Mapping[str, Any]:
    table = _table()
    found: Mapping[str, Any] = table["gpu"] if chip.kind == "gpu" else table["default"] | table.get(chip.name, {})
    return found


def _source(name: str, chip: Chip) -> str:
    return "assumed: written to overlap, as in training" if name == "ring" else str(_entry(chip)[name][1])
