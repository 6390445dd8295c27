"""Rates of one device: peaks from the catalogue, expectations from named fractions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Number
from rooftop.hardware import Chip
from rooftop.roofline.achievable import (
    Fractions,
    attention_seconds,
    batched_matmul_seconds,
    fractions,
    matmul_fraction,
)
from rooftop.roofline.collectives import NetworkRates


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Peak rates of one device, and the fractions of them that can be expected."""

    chip: Chip
    fractions: Fractions

    @classmethod
    def of(cls, chip: Chip) -> Rates:
        """The rates of one device of ``chip``."""
        return _rates(chip)

    @cached_property
    def flops_per_s(self) -> dict[str, float]:
        """Peak matmul FLOPs/s of a device by dtype."""
        return {dtype: rate / self.chip.devices for dtype, rate in self.chip.flops_per_s.items()}

    @property
    def vector_flops_per_s(self) -> float:
        """Peak vector FLOPs/s of a device."""
        return self.chip.vector_flops_per_s / self.chip.devices

    @property
    def hbm_bytes_per_s(self) -> float:
        """Peak HBM bytes/s of a device."""
        return self.chip.hbm_bytes_per_s / self.chip.devices

    @property
    def pcie_bytes_per_s(self) -> float:
        """Bytes/s of a device to and from its host."""
        return self.chip.pcie_bytes_per_s / self.chip.devices

    @property
    def attention_block(self) -> int:
        """Side of the blocks that the attention kernel works in, as it was priced; 128 where none was."""
        kernel = self.fractions.attention
        return 128 if kernel is None else kernel.block

    @property
    def step(self) -> float:
        """Measured over expected time of whole steps, where a user has measured only those; else 1."""
        return 1.0 if self.chip.calibrated is None else self.chip.calibrated.step

    @property
    def gap_s(self) -> float:
        """Seconds of a step in which devices idle or wait for their host, where a user has measured them; else 0."""
        return 0.0 if self.chip.calibrated is None else self.chip.calibrated.gap_s

    def network(self, kind: str) -> NetworkRates:
        """The network as one kind of collective can use it."""
        return NetworkRates(within=self.fractions.ici[kind], dcn=self.fractions.dcn)

    def hbm_s(self, moved: Number) -> Number:
        """Expected seconds to move bytes through HBM."""
        return moved / (self.hbm_bytes_per_s * self.fractions.hbm)

    def matmul_s(self, m: Number, k: Number, n: Number, dtype: str, batch: Number = 1.0) -> Number:
        """Expected seconds of ``batch`` matmuls [m, k] x [k, n] at once.

        Raises RooftopError if the chip has no peak for ``dtype``.
        """
        if dtype not in self.chip.flops_per_s:
            accepted = ", ".join(self.chip.flops_per_s)
            raise RooftopError(f"matmul dtype on {self.chip.name}", dtype, accepted)
        alone = 2.0 * m * k * n / (self.flops_per_s[dtype] * matmul_fraction(self.chip, m, k, n, dtype))
        if not (batch > 1 if isinstance(batch, float) else np.any(np.asarray(batch) > 1)):
            return alone
        together = batched_matmul_seconds(self.chip, batch, m, k, n, dtype)
        return batch * alone if together is None else np.where(np.asarray(batch) > 1, together, alone)

    def convert_s(self, weights: Number, dtype: str) -> Number:
        """Expected seconds to read and convert weights in groups for a matmul; 0 where no program was compiled."""
        return weights * self.fractions.convert_s.get(dtype, 0.0)

    def attention_s(
        self,
        scores: Number,
        d_qk: int,
        d_v: int,
        *,
        backward: bool,
        fused: bool = False,
        kernels: str | None = None,
        queries: Number = 0.0,
    ) -> Number:
        """Expected seconds of an attention kernel: its matrix unit's, and those in which that waits.

        ``scores`` is the (query, key, head) triples that the kernel executes on a device, ``queries`` its (query, head)
        pairs. ``fused``: the backward pass is one kernel. ``kernels`` names those of another program.
        """
        matrix_s, waiting_s = attention_seconds(
            self.chip, scores, d_qk, d_v, backward=backward, fused=fused, kernels=kernels, queries=queries
        )
        return matrix_s + waiting_s


@lru_cache(maxsize=64)
def _rates(chip: Chip) -> Rates:
    return Rates(chip=chip, fractions=fractions(chip))


def device_stats(chip: Chip) -> Mapping[str, str | float]:
    """The figures of one device of ``chip`` in a profile: its type, TFLOP/s in bf16, GB/s of its HBM."""
    rates = Rates.of(chip)
    names = [name for name in chip.aliases if name.startswith("tpu ")]
    return {
        "device_type_string": max(names, key=len).replace("tpu", "TPU") if names else chip.name,
        "peak_teraflops_per_second": rates.flops_per_s["bf16"] / 1e12,
        "peak_hbm_bw_gigabytes_per_second": rates.hbm_bytes_per_s / 1e9,
    }
