"""Bounds on a step from its ledger.

Lower: the busiest resource if everything overlapped perfectly. Upper: every row and collective one after another.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import AxisSpan
from rooftop.core.ledger import Ledger, Number


def ici_lower_s(ledger: Ledger, spans: Mapping[str, AxisSpan]) -> Number:
    """Seconds that the ICI needs at least, collectives on different physical axes running at once.

    The largest of: all collectives of one mesh axis; all of those that lie on one physical axis alone (they share its
    links); and all bytes over all links of a device.
    """
    by_axis: dict[str, Number] = {}
    for row in ledger:
        for collective in row.collectives:
            name = collective.axes[0]
            seconds = row.count * collective.time_s.get("ici", 0.0)
            by_axis[name] = by_axis.get(name, 0.0) + seconds
    lower: Number = 0.0
    for seconds in by_axis.values():
        lower = np.maximum(lower, seconds)
    if not by_axis:
        return lower
    some = next(iter(spans.values()))
    linked = np.array([axis.resource == "ici" and axis.kind != "core" for axis in some.physical])
    for position in np.flatnonzero(linked):
        alone: Number = 0.0
        for name, seconds in by_axis.items():
            used = spans[name].size > 1
            only_here = used[..., position] & (used.sum(axis=-1) == 1)
            alone = alone + np.where(_column(only_here), seconds, 0.0)
        lower = np.maximum(lower, alone)
    links = np.array([axis.bytes_per_s * (2 if axis.wrapped else 1) for axis in some.physical])
    total = float(links[linked].sum())
    if total > 0:
        moved: Number = 0.0
        for name, seconds in by_axis.items():
            group = spans[name]
            taken = np.sum(np.where((group.size > 1) & linked, group.bytes_per_s * group.stride, 0.0), axis=-1)
            moved = moved + seconds * _column(taken) / total
        lower = np.maximum(lower, moved)
    return lower


def lower_s(ledger: Ledger, spans: Mapping[str, AxisSpan]) -> dict[str, Number]:
    """Lower bound by resource; the step's is the largest."""
    seconds = {name: ledger.total(name) for name in ("mxu", "vpu", "hbm", "dcn", "pcie")}
    return seconds | {"ici": ici_lower_s(ledger, spans)}


def _column(values: npt.ArrayLike) -> npt.NDArray[Any]:
    """[C] as [C, 1], to broadcast against ledgers of sweeps."""
    column = np.asarray(values)
    return column[:, None] if column.ndim else column
