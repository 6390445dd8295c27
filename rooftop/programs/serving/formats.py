"""Formats of stored weights. Options are checked against them before JAX is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a quantised weight is held: ``largest`` is what the largest magnitude under a scale becomes.

    A scale covers ``group`` elements of the summed dim (None: all). ``bits`` are those of an element; of 4, two
    elements of a group share a byte, those that are half a group apart.
    """

    dtype: str
    largest: float
    bits: int = 8
    group: int | None = None

    def weight_bytes(self, count: int, size: int) -> int:
        """Bytes of ``count`` elements whose summed dim has ``size``: their values and float32 scales."""
        return count * self.bits // 8 + 4 * count // (self.group or size)


#: Formats by dtype; int4 by its group too.
FORMATS: dict[str, Format] = {
    "int8": Format(dtype="int8", largest=127),
    "f8_e4m3": Format(dtype="float8_e4m3fn", largest=448),
    "int4-32": Format(dtype="int8", largest=7, bits=4, group=32),
    "int4-64": Format(dtype="int8", largest=7, bits=4, group=64),
    "int4-128": Format(dtype="int8", largest=7, bits=4, group=128),
}
