"""Formats of stored weights. Options are checked against them before JAX is imported."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Format:
    """Format of a quantised weight: ``largest`` is the quantised value of the largest magnitude under a scale.

    A scale covers ``group`` elements of the summed dim (None: all); with ``powers`` it is a power of two. Elements have
    ``bits``. ``on_cpu`` is a dtype of whole bytes that has the same values: JAX
    has no compiled programs for CPUs whose arguments have 4 bits.
    """

    dtype: str
    largest: float
    bits: int = 8
    group: int | None = None
    powers: bool = False
    on_cpu: str | None = None

    def stored(self, platform: str) -> str:
        """The dtype of values on a platform."""
        return self.on_cpu if self.on_cpu is not None and platform == "cpu" else self.dtype

    def scales(self, compute: str) -> str:
        """The dtype of scales where matmuls are in ``compute``: a whole column's multiply before they are rounded."""
        return "float32" if self.group is None else compute

    def weight_bytes(self, count: int, size: int, platform: str, compute: str) -> int:
        """Bytes of ``count`` elements whose summed dim has ``size``: their values and scales."""
        values = count if self.stored(platform) == self.on_cpu else count * self.bits // 8
        return values + (2 if self.scales(compute) == "bfloat16" else 4) * count // (self.group or size)


#: Formats by dtype, and by their group if they have groups.
FORMATS: dict[str, Format] = {
    "int8": Format(dtype="int8", largest=127),
    "f8_e4m3": Format(dtype="float8_e4m3fn", largest=448),
    **{f"int4-{group}": Format(dtype="int4", largest=7, bits=4, group=group, on_cpu="int8") for group in (32, 64, 128)},
    **{f"f8_e4m3-{group}": Format(dtype="float8_e4m3fn", largest=448, group=group) for group in (32, 64, 128)},
    "f4_e2m1-32": Format(dtype="float4_e2m1fn", largest=6, bits=4, group=32, powers=True, on_cpu="float8_e4m3fn"),
}
