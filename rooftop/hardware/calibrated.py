"""Fits of achievable rates, and those that a user has measured on a chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rooftop.core.ledger import Number
from rooftop.core.records import Record


@dataclass(frozen=True, kw_only=True)
class MatmulFit:
    """Time of a bare matmul: FLOPs at ``peak`` of the rate, ``start_s``, and ``result_s`` an element of its result.

    ``layer`` is the share of that speed that is left when the compiler has fused the elementwise work around it.
    """

    peak: float = 1.0
    start_s: float = 0.0
    result_s: float = 0.0
    layer: float = 1.0


@dataclass(frozen=True, kw_only=True)
class AttentionCurve:
    """Attention kernels with blocks of ``block``, measured with heads of several ``sizes``, [H].

    A kernel takes its FLOPs at ``share`` of the peak, and ``query_s`` for each query of a head. A backward kernel runs
    at ``backward_share`` of that share, with ``backward_query_s`` a query. Sizes between are interpolated, others are
    priced as the nearest.
    """

    block: int
    sizes: Sequence[float]
    share: Sequence[float]
    query_s: Sequence[float]
    backward_share: float
    backward_query_s: float

    def at(self, size: float, *, backward: bool) -> tuple[float, float]:
        """The share of the peak, and seconds a query, of heads of one size."""
        import numpy as np  # the catalogue itself needs no NumPy

        share = float(np.interp(size, self.sizes, self.share))
        if backward:
            return share * self.backward_share, self.backward_query_s
        return share, float(np.interp(size, self.sizes, self.query_s))


@dataclass(frozen=True, kw_only=True)
class CollectiveFit:
    """A collective within a slice: ``start_s``, then its bytes at ``share`` of the link rate.

    GPUs have both by ``ranks``, the devices of a group in one NVLink domain, [R]: between them they are interpolated,
    outside they are those of the nearest. NCCL's protocols for few bytes start sooner and are slower: ``small``. TPUs
    have one figure for all groups and sizes. ``hops`` multiplies the latency of hops.
    """

    ranks: Sequence[float] = (1,)
    start_s: Sequence[float] = (0.0,)
    share: Sequence[float] = (1.0,)
    small: CollectiveFit | None = None
    hops: float = 1.0

    def at(self, ranks: Number | None) -> tuple[Number, Number]:
        """Start and share of groups of ``ranks`` devices; the least start and the largest share if None."""
        if len(self.ranks) == 1 or ranks is None:
            return min(self.start_s), max(self.share)
        import numpy as np

        return np.interp(ranks, self.ranks, self.start_s), np.interp(ranks, self.ranks, self.share)


@dataclass(frozen=True, kw_only=True)
class Calibrated(Record):
    """Fractions of a chip's peaks that a user has measured, ``by`` a file. None, or no entry: the catalogue's.

    ``matmul`` is by width ('16-bit', '8-bit'), ``ici`` by kind of collective. ``hbm`` is the share of the HBM rate of
    traffic that reads and writes, ``hbm_read`` that of reading alone. Measured runs give the rest: ``compute`` is the
    measured over the expected time of matmuls and attention, ``gap_s`` the seconds of a step in which the devices idle
    or wait for their host, and ``step`` the measured over the expected time of steps whose parts are not known.
    """

    chip: str
    by: str
    matmul: Mapping[str, MatmulFit] = field(default_factory=dict)
    attention: AttentionCurve | None = None
    hbm: float | None = None
    hbm_read: float | None = None
    ici: Mapping[str, CollectiveFit] = field(default_factory=dict)
    dcn: float | None = None
    compute: float = 1.0
    step: float = 1.0
    gap_s: float = 0.0
