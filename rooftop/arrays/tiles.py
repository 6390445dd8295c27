"""Arrays in a TPU's memory: HLO layouts such as ``f32[3,5]{1,0:T(2,2)}``, and padding to tiles.

All shapes here are those of one device: take ``ShardedArray.local_shape`` first. Source of the layout notation: chapter
9 and XLA's description of tiled layouts. Source of the padding rules: chapter 2.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.quantities import dtype_bytes
from rooftop.core.rounding import ceil_div, next_multiple

Shape = tuple[int, ...]
Ints = npt.NDArray[np.int64]

#: HLO's name for each of rooftop's dtypes.
HLO_DTYPES: Mapping[str, str] = {
    "bf16": "bf16",
    "f32": "f32",
    "f16": "f16",
    "int8": "s8",
    "int4": "s4",
    "f8_e4m3": "f8e4m3fn",
    "f8_e5m2": "f8e5m2",
    "f4_e2m1": "f4e2m1fn",
}

#: Bits of one element by HLO dtype. In memory one of fewer than 8 bits fills a byte, unless its layout says ``E(4)``.
HLO_BITS: Mapping[str, int] = {name: int(8 * dtype_bytes(dtype)) for dtype, name in HLO_DTYPES.items()} | {
    "pred": 8, "u4": 4, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32, "s64": 64, "u64": 64, "f64": 64,
    "c64": 64, "c128": 128, "f8e4m3": 8, "f8e3m4": 8, "f8e4m3fnuz": 8, "f8e4m3b11fnuz": 8, "f8e5m2fnuz": 8,
}  # fmt: skip

#: The memory spaces that the book names. It calls 2 and 3 other memories, without saying which.
MEMORY_SPACES: Mapping[int, str] = {0: "hbm", 1: "vmem"}

#: The vector unit is this many (sublanes, lanes) of 32 bits (chapter 2).
VPU: tuple[int, int] = (8, 128)

_LAYOUT = re.compile(
    r"(\w+)\[([\d,\s]*)\](?:\{([\d,\s]*)(?:[:,]\s*(?:T((?:\([\d,\s]*\)\s*)+))?(?:E\((\d+)\))?\s*(?:S\((\d+)\))?\s*)?\})?",
    re.ASCII,
)
_FORM = "dtype[dims]{minor_to_major:T(tile)...E(bits)S(space)}, such as bf16[32,8192]{1,0:T(8,128)(2,1)S(1)}"


@dataclass(frozen=True, kw_only=True)
class TileLayout:
    """An array in memory, as HLO text has it: ``bf16[32,32,8192]{2,1,0:T(8,128)(2,1)S(1)}``.

    ``dtype`` is HLO's name. ``minor_to_major`` lists the dims from the one that varies fastest. The first tile cuts the
    minor dims, in that physical order, into blocks that are padded to whole ones and stored one after another; each
    further tile cuts the blocks of the tile before it in the same way. ``memory_space`` is 0 for HBM, 1 for VMEM.
    A tile with more dims than there are treats the missing ones as 1. ``element_bits`` is HLO's E: the bits of one
    stored element where that is not the usual number.

    Raises RooftopError on an unknown dtype, an order that is no permutation of the dims, and sizes below their least.
    """

    dtype: str
    shape: Shape
    minor_to_major: Shape
    tiles: tuple[Shape, ...] = ()
    memory_space: int = 0
    element_bits: int | None = None

    def __post_init__(self) -> None:
        if self.dtype not in HLO_BITS:
            raise unknown("HLO dtype", self.dtype, HLO_BITS)
        if sorted(self.minor_to_major) != list(range(len(self.shape))):
            raise RooftopError("minor_to_major", self.minor_to_major, f"the {len(self.shape)} dims, each once, from 0")
        if any(size < 0 for size in self.shape):
            raise RooftopError("shape", self.shape, "sizes of 0 or more")
        for tile in self.tiles:
            if not tile or min(tile) < 1:
                raise RooftopError("tile", tile, "positive sizes, as in T(8,128)")
        if self.memory_space < 0:
            raise RooftopError("memory_space", self.memory_space, "0 (HBM), 1 (VMEM) or another number")
        if self.element_bits is not None and self.element_bits < 1:
            raise RooftopError("element_bits", self.element_bits, "a positive number")

    def __str__(self) -> str:
        tiles = "T" + "".join(f"({_join(tile)})" for tile in self.tiles) if self.tiles else ""
        bits = f"E({self.element_bits})" if self.element_bits is not None else ""
        space = f"S({self.memory_space})" if self.memory_space else ""
        suffix = f":{tiles}{bits}{space}" if tiles or bits or space else ""
        return f"{self.dtype}[{_join(self.shape)}]{{{_join(self.minor_to_major)}{suffix}}}"

    @classmethod
    def parse(cls, text: str) -> TileLayout:
        """Read HLO's text. Without braces the order is row-major, without S(n) the space is 0 (HBM)."""
        match = _LAYOUT.fullmatch(text.strip())
        if match is None:
            raise RooftopError("layout", text, _FORM)
        dtype, shape, order, tiles, bits, space = match.groups()
        sizes = _split(shape, text)
        return cls(
            dtype=dtype,
            shape=sizes,
            minor_to_major=tuple(reversed(range(len(sizes)))) if order is None else _split(order, text),
            tiles=tuple(_split(tile, text) for tile in re.findall(r"\(([^)]*)\)", tiles or "")),
            memory_space=int(space or 0),
            element_bits=int(bits) if bits else None,
        )

    @property
    def memory(self) -> str:
        """The name of the memory space: hbm, vmem, or the number of another."""
        return MEMORY_SPACES.get(self.memory_space, str(self.memory_space))

    @property
    def padded_shape(self) -> Shape:
        """The shape with each dim padded to whole blocks of the first tile, dims in the order of ``shape``."""
        physical = [self.shape[dim] for dim in reversed(self.minor_to_major)]
        if not self.tiles:
            return self.shape
        padded = padded_shape(physical, self.tiles[0])
        return tuple(padded[len(padded) - 1 - self.minor_to_major.index(dim)] for dim in range(len(self.shape)))

    @property
    def tiled_shape(self) -> Shape:
        """The shape as stored, major to minor: numbers of blocks, then the dims within a block, for every tile."""
        shape = tuple(self.shape[dim] for dim in reversed(self.minor_to_major))
        for tile in self.tiles:
            major, minor = _cut(shape, tile)
            shape = (*major, *(ceil_div(size, block) for size, block in zip(minor, tile, strict=True)), *tile)
        return shape

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        bits = self.element_bits or max(8, HLO_BITS[self.dtype])
        return ceil_div(prod(self.tiled_shape) * bits, 8)

    @property
    def expansion(self) -> float:
        """Bytes in memory over those of the elements alone (1 for an array without elements)."""
        return prod(self.tiled_shape) / prod(self.shape) if prod(self.shape) else 1.0

    def offset(self, index: Sequence[Any]) -> Any:
        """Position in memory, in elements, of the element at ``index`` (integers or NumPy arrays, one per dim)."""
        if len(index) != len(self.shape):
            raise RooftopError("index", index, f"{len(self.shape)} entries, one per dim")
        for at, size in zip(index, self.shape, strict=True):
            if np.any((np.asarray(at) < 0) | (np.asarray(at) >= size)):
                raise RooftopError("index", index, f"an element of an array of shape {list(self.shape)}")
        place: tuple[Any, ...] = tuple(index[dim] for dim in reversed(self.minor_to_major))
        for tile in self.tiles:
            major, minor = _cut(place, tile, fill=0)
            blocks = tuple(at // block for at, block in zip(minor, tile, strict=True))
            place = (*major, *blocks, *(at % block for at, block in zip(minor, tile, strict=True)))
        offset: Any = 0
        for at, size in zip(place, self.tiled_shape, strict=True):
            offset = offset * size + at
        return offset


@dataclass(frozen=True, kw_only=True)
class MxuPadding:
    """A matmul [m, k] x [k, n] as the systolic arrays see it: padded sizes, and the share of FLOPs that is useful."""

    m: Any
    k: Any
    n: Any
    useful: Any


def padded_shape(shape: Sequence[int], tile: Sequence[int]) -> Shape:
    """``shape`` with its last dims padded to multiples of ``tile``; missing dims count as 1 before the others."""
    major, minor = _cut(tuple(shape), tuple(tile))
    return (*major, *(next_multiple(size, block) for size, block in zip(minor, tile, strict=True)))


def default_layout(dtype: str, shape: Sequence[int]) -> TileLayout:
    """The layout that XLA:TPU gives an argument of this (local) shape if nothing else is asked for.

    ``dtype`` is rooftop's name or HLO's. Rows and columns are the two minor dims, and ``p`` elements share 32 bits:

    - the tile has 128 columns; its rows are the array's, rounded up to a power of two, at least ``p`` and at most 8;
    - arrays of 8 and 4 bits whose rows are a multiple of ``8 p`` have tiles of ``8 p`` rows, a whole register;
    - a vector has a tile of its size rounded up to a power of two, at least ``128 p`` and at most 1024;
    - for ``p`` > 1 a second tile, (p, 1), packs ``p`` rows into each word;
    - of all orders of the dims it takes the one that pads least, and of these the one closest to row-major.

    So found, not documented: it agrees with libtpu 0.0.42.1 (jax 0.10.2) on all arguments tried, of 0 to 5 dims, for
    v4, v5e, v5p, v6e and TPU7x. Raises RooftopError on a dtype wider than 32 bits, which was not tried.
    """
    name = HLO_DTYPES.get(dtype, dtype)
    packing = _packing(dtype)
    sizes = tuple(int(size) for size in shape)
    row_major = tuple(reversed(range(len(sizes))))
    orders = [
        # Only the two minor dims matter for the padding; the others stand in row-major order.
        (*minor, *(dim for dim in row_major if dim not in minor))
        for minor in permutations(row_major, min(2, len(sizes)))
    ]
    layouts = [
        TileLayout(
            dtype=name,
            shape=sizes,
            minor_to_major=order,
            tiles=_default_tiles([sizes[dim] for dim in reversed(order)], packing),
            element_bits=HLO_BITS[name] if HLO_BITS[name] < 8 else None,
        )
        for order in orders
    ]
    return min(layouts, key=lambda layout: (prod(layout.tiled_shape), [-dim for dim in layout.minor_to_major]))


def largest_factor(numbers: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """The largest prime factor of each whole number of an array; 1 of 1."""
    sizes, index = np.unique(np.asarray(numbers, np.int64), return_inverse=True)
    factors = np.array([_largest_factor(size) for size in sizes.tolist()], np.float64)
    return factors[index].reshape(np.shape(numbers))


@cache
def _largest_factor(number: int) -> int:
    factor, largest = 2, 1
    while factor * factor <= number:
        while number % factor == 0:
            number, largest = number // factor, factor
        factor += 1
    return max(number, largest)


def mxu_padding(m: Any, k: Any, n: Any, tile: int) -> MxuPadding:
    """A local matmul [m, k] x [k, n] padded for systolic arrays of side ``tile`` (``Chip.mxu_tile``).

    Both dims of the weights, k and n, fill whole arrays; the rows m come in groups of 8, as they do from a vector
    register. Sizes may be NumPy arrays. Source: chapter 2.
    """
    padded = [next_multiple(size, block) for size, block in ((m, VPU[0]), (k, tile), (n, tile))]
    return MxuPadding(m=padded[0], k=padded[1], n=padded[2], useful=(m / padded[0]) * (k / padded[1]) * (n / padded[2]))


def _default_tiles(physical: Sequence[int], packing: int) -> tuple[Shape, ...]:
    rows, lanes = VPU
    words = () if packing == 1 else ((packing, 1),)
    if not physical:
        return ((lanes * packing,),)
    if len(physical) == 1:
        vector = min(max(_power_of_two(physical[0]), lanes * packing), rows * lanes)
        return ((vector,), (lanes,), *words) if words else ((vector,),)
    if packing >= 4 and physical[-2] % (rows * packing) == 0:
        rows *= packing
    else:
        rows = min(max(_power_of_two(physical[-2]), packing), rows)
    return ((rows, lanes), *words)


def _packing(dtype: str) -> int:
    name = HLO_DTYPES.get(dtype, dtype)
    if name not in HLO_BITS:
        raise unknown("dtype", dtype, {**HLO_DTYPES, **HLO_BITS})
    if HLO_BITS[name] > 32:
        raise RooftopError("dtype", dtype, "a dtype of at most 32 bits")
    return 32 // HLO_BITS[name]


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()


def _cut(sizes: tuple[Any, ...], tile: Shape, fill: int = 1) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """``sizes`` before and within a tile, which covers the last of them; missing ones are ``fill``."""
    sizes = (fill,) * (len(tile) - len(sizes)) + sizes
    return sizes[: len(sizes) - len(tile)], sizes[len(sizes) - len(tile) :]


def _join(sizes: Shape) -> str:
    return ",".join(map(str, sizes))


def _split(text: str, whole: str) -> Shape:
    entries = text.split(",") if text.strip() else []
    if not all(entry.strip().isdecimal() for entry in entries):
        raise RooftopError("layout", whole, _FORM)
    return tuple(map(int, entries))
