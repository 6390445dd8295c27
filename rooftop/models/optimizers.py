"""Optimizers: what each keeps and moves per parameter, and how Muon deals whole matrices out to devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from rooftop.core.rounding import ceil_div

if TYPE_CHECKING:
    from rooftop.core.ledger import Number


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """Costs of an update, per parameter.

    ``moments`` are kept for each parameter, and ``gradient_reads`` are passes over its gradient. If matrices of layers
    are ``orthogonalised`` (Muon), tables and routers have two moments, by AdamW. ``factored`` second moments are means
    over rows and columns (Adafactor).
    """

    moments: int
    gradient_reads: int = 1
    orthogonalised: bool = False
    factored: bool = False

    @property
    def table_moments(self) -> int:
        """Moments of each parameter of embedding tables."""
        return 2 if self.orthogonalised else self.moments


#: Adafactor keeps a row and a column of each matrix, about a hundredth of a moment. It reads the gradient for the means
#: of rows and columns, for the root mean square of the update, and for the update.
OPTIMIZERS: Mapping[str, OptimizerKind] = MappingProxyType(
    {
        "adamw": OptimizerKind(moments=2),
        "adam": OptimizerKind(moments=2),
        "lion": OptimizerKind(moments=1),
        "muon": OptimizerKind(moments=1, orthogonalised=True),
        "adafactor": OptimizerKind(moments=0, gradient_reads=3, factored=True),
        "sgd": OptimizerKind(moments=0),
    }
)

#: Adafactor factors a matrix if both of its dims have this many elements: with fewer, little is saved.
SMALLEST_FACTORED_DIM = 128
#: Newton-Schulz steps of Muon (Jordan et al. 2024).
NEWTON_SCHULZ_STEPS = 5
#: The most matrices, over those that there are, that devices with copies of weights share out with padding.
_MOST_PADDED = 4


@dataclass(frozen=True, kw_only=True)
class Deal:
    """A deal of the matrices of a stacked weight, of which each device gets whole ones.

    Each of ``groups`` has ``together`` matrices, one for each device that they are dealt to. ``columns`` is 1 where the
    matrices are dealt over the columns' axis too, 0 where these stay split over it; ``copies`` has a 1 for each axis of
    copies over which they are dealt.
    """

    groups: Number
    together: Number
    columns: Number
    copies: tuple[Number, ...]


def deal(matrices: Number, *, gather: Number, columns: Number, splits_long: Number, copies: Sequence[Number]) -> Deal:
    """Deal ``matrices`` that a stage's and an expert shard's devices store together.

    ``gather`` devices split their rows (fsdp), ``columns`` devices their columns (tensor): the longer dim if
    ``splits_long``, which is summed over. ``copies`` are devices along each axis that has copies.

    An AllToAll moves a device's shard once there and once back. Distributed matmuls would sum an [m, m] matrix over the
    devices in each of five steps, and gathering would do the same work on every device. So matrices are dealt over
    fsdp, and over tensor too if there are as many as devices; otherwise tensor splits the matmuls of each. Axes of
    copies each take a part of what is left, unless more than three quarters would be padding. Sizes may be arrays.
    """
    import numpy as np

    count = np.asarray(matrices)
    whole = np.where((count >= np.asarray(gather) * columns) | (np.asarray(splits_long) == 0), 1, 0)
    together = gather * np.where(whole, columns, 1)
    dealt = []
    for ways in copies:
        helps = (np.asarray(ways) > 1) & (count > together) & (together * ways <= _MOST_PADDED * count)
        dealt.append(np.where(helps, 1, 0))
        together = together * np.where(helps, ways, 1)
    return Deal(groups=ceil_div(count, together), together=together, columns=whole, copies=tuple(dealt))


def newton_schulz_flops(short: Number, long: Number, parts: Number = 1) -> Number:
    """FLOPs of orthogonalising a [short, long] matrix whose long dim is split into ``parts``, on one device."""
    return NEWTON_SCHULZ_STEPS * (4.0 * short * short * long / parts + 2.0 * short * short * short)
