"""A systolic array cell by cell and cycle by cycle: the oracle for the closed form of ``rooftop.simulate.systolic``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.simulate.systolic import SystolicArray

Matrix = npt.NDArray[Any]


def multiply(array: SystolicArray, x: Matrix, w: Matrix) -> tuple[Matrix, int]:
    """Multiply x [m, k] by w [k, n] cell by cell: the product [m, n], and the cycles until its last element is out.

    Takes time in proportion to cycles x rows x columns; it is there to check ``cycles``. Raises RooftopError on
    shapes that do not multiply.
    """
    if x.ndim != 2 or w.ndim != 2 or x.shape[1] != w.shape[0]:
        raise RooftopError("x, w", f"shapes {x.shape} and {w.shape}", "matrices [m, k] and [k, n]")
    product = np.zeros((len(x), w.shape[1]), np.result_type(x, w))
    blocks = range(0, w.shape[1], array.columns)
    step = -(-len(x) // array.mxus) if array.split == "m" else len(x)
    busiest = 0
    for mxu in range(array.mxus):
        part = slice(mxu * step, (mxu + 1) * step) if array.split == "m" else slice(None)
        starts = blocks if array.split == "m" else blocks[mxu :: array.mxus]
        if len(x[part]) and len(starts):
            busiest = max(busiest, _multiply_one(array, x[part], w, starts, product[part]))
    return product, busiest


def _multiply_one(array: SystolicArray, x: Matrix, w: Matrix, starts: Sequence[int], product: Matrix) -> int:
    """Add x times the blocks of w at columns ``starts`` to ``product``, on one array; the cycles it took."""
    rows, columns, m = array.rows, array.columns, len(x)
    blocks = [(row, column) for column in starts for row in range(0, w.shape[0], rows)]
    x = np.pad(x, ((0, 0), (0, rows)))
    w = np.pad(w, ((0, rows), (0, columns)))
    cells = (rows, columns)
    active, spare, sums = (np.zeros(cells, product.dtype) for _ in range(3))
    # What each cell passes on: an activation with its place in the stream (-1: none), a weight with its target row.
    value, place = np.zeros(cells, product.dtype), np.full(cells, -1)
    weight, target = np.zeros(cells, product.dtype), np.full(cells, -1)
    # The edges delay row r by r cycles, column c by c: what entered on each cycle is kept, for the last to find.
    left: list[int] = []
    top: list[tuple[int, int]] = []
    entered, loaded, left_to_load, out = 0, 0, rows, 0
    while out < len(blocks) * m * columns:
        # A block may stream when its weights are in, and from then on a row enters on every cycle.
        streaming = entered < loaded * m
        left.append(entered if streaming else -1)
        entered += streaming
        # Weights may follow once the wave has begun to free the registers that they go to.
        begun = entered > (loaded - 1) * m if array.double_buffered else entered - streaming == loaded * m
        if loaded < len(blocks) and begun:
            left_to_load -= 1
            top.append((loaded, left_to_load))
            if not left_to_load:
                loaded, left_to_load = loaded + 1, rows
        else:
            top.append((-1, -1))

        now = len(left) - 1
        value[:, 1:], place[:, 1:] = value[:, :-1].copy(), place[:, :-1].copy()
        weight[1:], target[1:] = weight[:-1].copy(), target[:-1].copy()
        for row in range(rows):
            place[row, 0] = left[now - row] if now >= row else -1
            block, at = divmod(int(place[row, 0]), m)
            value[row, 0] = x[at, blocks[block][0] + row] if block >= 0 else 0
        for column in range(columns):
            block, target[0, column] = top[now - column] if now >= column else (-1, -1)
            if block >= 0:
                weight[0, column] = w[blocks[block][0] + target[0, column], blocks[block][1] + column]

        if array.double_buffered:
            active = np.where((place >= 0) & (place % m == 0), spare, active)
        sums[1:] = sums[:-1].copy()
        sums[0] = 0
        sums += value * active
        for column in np.flatnonzero(place[-1] >= 0).tolist():
            block, at = divmod(int(place[-1, column]), m)
            if blocks[block][1] + column < product.shape[1]:
                product[at, blocks[block][1] + column] += sums[-1, column]
            out += 1
        arrived = target == np.arange(rows)[:, None]
        if array.double_buffered:
            spare = np.where(arrived, weight, spare)
        else:
            active = np.where(arrived, weight, active)
    return len(left)
