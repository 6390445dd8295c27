"""The roofs of a slice's chip, by the catalogue."""

from __future__ import annotations

from rooftop.explain.report.ledgers import Roof
from rooftop.hardware import Slice
from rooftop.roofline.rates import Rates


def roofs_of_slice(name: str, whose: str = "") -> list[Roof]:
    """The roofs of one device of a slice, for matmuls in bf16."""
    rates = Rates.of(Slice.parse(name).chip)
    said = f"{name.partition(':')[0]}, bf16" + (f" ({whose})" if whose else "")
    return [Roof(name=said, flops_per_s=rates.flops_per_s["bf16"], hbm_bytes_per_s=rates.hbm_bytes_per_s)]
