"""A weight-stationary systolic array: the cycles that a matmul takes on it, in closed form.

Each of rows x columns cells holds one weight. Activations enter at the left edge, one row of the matrix a cycle, and
move right; partial sums move down. Row r of the array gets its activation r cycles after row 0, and column c its
weights c cycles after column 0, so that work crosses the array as a diagonal wave. Source: chapter 2, appendix B.

The model is of the array alone: its memory always delivers, and sums over several blocks of k are added up outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.hardware import Chip

Count = int | npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Cycles:
    """Cycles of one matmul, those of its busiest array.

    ``fill`` loads the first weights, in ``stream`` a row of activations enters on every cycle, in ``wait`` none does
    because the next weights are not there yet, ``drain`` is from the last row's entry to the last sum's exit.
    ``utilisation`` is useful multiply-adds over those that all arrays could have made. All may be NumPy arrays.
    """

    fill: Count
    stream: Count
    wait: Count
    drain: Count
    utilisation: float | npt.NDArray[np.float64]

    @property
    def total(self) -> Count:
        """All cycles."""
        return self.fill + self.stream + self.wait + self.drain


@dataclass(frozen=True, kw_only=True)
class SystolicArray:
    """``mxus`` arrays of ``rows`` (of the contracted dim k) by ``columns`` (of n) that share a matmul.

    ``double_buffered`` arrays take the next weights into spare registers while they stream, and change over with the
    wave; others begin to load when the last row has entered. ``split`` says what the arrays divide among them: "n",
    whole blocks of columns in turn, or "m", equal runs of rows.

    Raises RooftopError on a size that is not positive and on another split.
    """

    rows: int
    columns: int
    mxus: int = 1
    double_buffered: bool = True
    split: Literal["n", "m"] = "n"

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "mxus"):
            if getattr(self, name) < 1:
                raise RooftopError(name, getattr(self, name), "a positive whole number")
        if self.split not in ("n", "m"):
            raise RooftopError("split", self.split, "n or m")

    @classmethod
    def of(cls, chip: Chip) -> SystolicArray:
        """All arrays of a TPU. Their number is derived: the bf16 peak over 2 x side^2 x clock.

        Raises RooftopError where that is not within 2 % of a whole number (v3 and TPU7x, whose clock and peak have
        different sources), and for GPUs: then give ``rows``, ``columns`` and ``mxus``.
        """
        if chip.kind != "tpu":
            raise RooftopError("chip", chip.name, "a TPU: this is a model of its systolic arrays")
        side = chip.mxu_tile
        mxus = chip.flops_per_s["bf16"] / (2 * side**2 * chip.clock_hz)
        if abs(mxus / max(round(mxus), 1) - 1) > 0.02:
            raise RooftopError("chip", chip.name, f"one whose peak is a whole number of arrays, not {mxus:.2f} of them")
        return cls(rows=side, columns=side, mxus=round(mxus))

    @property
    def flops_per_cycle(self) -> int:
        """FLOPs of a cycle in which every cell of every array works."""
        return 2 * self.rows * self.columns * self.mxus

    def cycles(self, m: Count, k: Count, n: Count) -> Cycles:
        """Cycles of [m, k] x [k, n]; sizes are positive and may be NumPy arrays.

        k and n are cut into blocks of rows x columns, which a matmul smaller than that does not fill. A block streams
        for as many cycles as there are rows of activations, or, if the next weights take longer than that, waits for
        them.
        """
        if np.any(np.minimum(np.minimum(m, k), n) < 1):
            raise RooftopError("m, k, n", f"{m}, {k}, {n}", "positive whole numbers")
        blocks, streamed = -(-n // self.columns), m
        if self.split == "n":
            blocks = -(-blocks // self.mxus)
        else:
            streamed = -(-m // self.mxus)
        blocks = blocks * -(-k // self.rows)
        late = self.rows - streamed
        wait: Count = late * (late > 0) if self.double_buffered else self.rows
        stream: Count = blocks * streamed
        waits: Count = (blocks - 1) * wait
        drain = self.rows + self.columns - 2
        done = (self.rows + stream + waits + drain) * self.flops_per_cycle
        return Cycles(fill=self.rows, stream=stream, wait=waits, drain=drain, utilisation=2 * m * k * n / done)

    def wave(self, m: int, cycle: int) -> npt.NDArray[np.int64]:
        """The row of activations that each cell works on in a cycle, [rows, columns], while one block is multiplied.

        -1 where a cell has none. Row i enters once the weights are in, and reaches row r and column c of the array
        r + c cycles later.
        """
        place = cycle - self.rows - np.add.outer(np.arange(self.rows), np.arange(self.columns))
        return np.where((place >= 0) & (place < m), place, -1)
