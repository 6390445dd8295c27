"""The book's notation for sharded arrays: ``bf16[B_X, D_YZ]{U_W}``.

A dim is a name or a number, its subscript the mesh axes that it is split over: ``D_YZ`` over Y, then Z. Axis names of
several letters stand in braces: ``D_{fsdp,tensor}``. ``{U_W}`` marks partial sums still to be reduced over W.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from rooftop.errors import RooftopError
from rooftop.quantities import dtype_bytes, parse_count

_ARRAY = re.compile(r"\s*(\w+)\s*\[(.*?)\]\s*(?:\{\s*U_(.+)\})?\s*")
_DIM = re.compile(r"(\w+?)(?:_(\w+|\{[\w,\s]+\}))?")
_FORM = "dtype[DIM_AXES, ...]{U_AXES}, such as bf16[B_X, D_YZ]{U_W}"


@dataclass(frozen=True, kw_only=True)
class ShardedArray:
    """A sharded array: dtype, dims with the mesh axes that each is split over, and unreduced mesh axes."""

    dtype: str
    dims: tuple[str, ...]
    axes: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        used = [axis for dim in self.axes for axis in dim] + list(self.unreduced)
        for axis in used:
            if used.count(axis) > 1:
                raise RooftopError(
                    "sharding", str(self), f"each mesh axis once; {axis} is used {used.count(axis)} times"
                )

    def __str__(self) -> str:
        def subscript(axes: tuple[str, ...]) -> str:
            joined = "".join(axes) if all(len(axis) == 1 for axis in axes) else "{" + ",".join(axes) + "}"
            return f"_{joined}" if axes else ""

        dims = ", ".join(dim + subscript(axes) for dim, axes in zip(self.dims, self.axes, strict=True))
        return f"{self.dtype}[{dims}]" + (f"{{U{subscript(self.unreduced)}}}" if self.unreduced else "")

    @classmethod
    def parse(cls, text: str) -> ShardedArray:
        """Read the notation. Raises RooftopError on bad text, an unknown dtype or a mesh axis used twice."""
        match = _ARRAY.fullmatch(text)
        if match is None:
            raise RooftopError("array", text, _FORM)
        dtype, inside, unreduced = match.groups()
        dims: list[str] = []
        axes: list[tuple[str, ...]] = []
        for entry in re.split(r",(?![^{]*\})", inside) if inside.strip() else []:
            dim = _DIM.fullmatch(entry.strip())
            if dim is None:
                raise RooftopError("array", text, _FORM)
            dims.append(dim.group(1))
            axes.append(_axes(dim.group(2)))
        return cls(dtype=dtype, dims=tuple(dims), axes=tuple(axes), unreduced=_axes(unreduced))

    def shape(self, dims: Mapping[str, int]) -> tuple[int, ...]:
        """Global shape: numbers stand for themselves, names are looked up in ``dims``."""
        shape = []
        for dim in self.dims:
            if dim not in dims and not dim[0].isdecimal():
                raise RooftopError(f"dim {dim}", "no size", f"a size for it, as in {dim}=4096")
            shape.append(int(dims[dim]) if dim in dims else parse_count(dim, "dim"))
        return tuple(shape)

    def local_shape(self, dims: Mapping[str, int], mesh: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one device's shard. A dim that its axes do not divide is refused, with the nearest sizes that do."""
        local = []
        for dim, size, axes in zip(self.dims, self.shape(dims), self.axes, strict=True):
            ways = prod(_ways(axis, mesh) for axis in axes)
            if size % ways:
                below = size // ways * ways
                raise RooftopError(
                    f"dim {dim} over {'x'.join(axes)}", size, f"a multiple of {ways}: {below or ways} or {below + ways}"
                )
            local.append(size // ways)
        return tuple(local)

    def device_bytes(self, dims: Mapping[str, int], mesh: Mapping[str, int]) -> float:
        """Bytes that one device holds."""
        return prod(self.local_shape(dims, mesh)) * dtype_bytes(self.dtype)

    def total_bytes(self, dims: Mapping[str, int], mesh: Mapping[str, int]) -> float:
        """Bytes over all devices of the mesh, copies along unused axes counted."""
        return self.device_bytes(dims, mesh) * prod(mesh.values())


def _axes(text: str | None) -> tuple[str, ...]:
    if not text:
        return ()
    if text.startswith("{"):
        return tuple(axis.strip() for axis in text[1:-1].split(","))
    # Capitals are the book's one-letter axes, written without a separator; anything else is one name.
    return tuple(text) if text.isupper() and text.isalpha() else (text,)


def _ways(axis: str, mesh: Mapping[str, int]) -> int:
    if axis not in mesh:
        raise RooftopError("mesh axis", axis, f"one of {', '.join(mesh) or 'none'}")
    return mesh[axis]
