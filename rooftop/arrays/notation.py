r"""The book's notation for sharded arrays: ``bf16[B_X, D_YZ]{U_W}`` (chapter 3).

A dim is a name or a number, its subscript the mesh axes that it is split over: ``D_YZ`` over Y, then Z. Capitals are
one-letter axes and need no separator; other names stand in braces, ``D_{fsdp,tensor}``, and a single name that is all
capitals keeps a comma, ``D_{DP,}``. ``{U_W}`` marks partial sums still to be reduced over W. ``@host`` puts the array
in the hosts' DRAM, split in the same way, and ``@(0,0)`` puts all of it on one chip.

The same in Unicode is ``Iₓ, Jᵧ`` (there is no subscript y, so gamma stands for Y; where a letter has no subscript the
plain form is used), and in LaTeX ``\mathbf{A}[I_X, J_{YZ}]\{U_W\}``. All three are read and written.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.quantities import DTYPE_ALIASES, DTYPE_BYTES, INDEX_BYTES, dtype_bytes, parse_count, parse_dtype

Style = Literal["ascii", "unicode", "latex"]
Axes = tuple[str, ...]

#: Words that are misspelt dtypes rather than names of arrays.
_LIKE_DTYPE = re.compile(r"(?:bf|fp|float|bfloat|int|uint|f(?=8|16|32|64))[0-9]\w*")
#: Spellings of JAX and XLA for dtypes of indices and masks.
_INDEX_ALIASES = {"i32": "int32", "s32": "int32", "u32": "uint32", "pred": "bool", "bool_": "bool"}
_FORM = "dtype[DIM_AXES, ...]{U_AXES}, such as bf16[B_X, D_YZ]{U_W}; @host or @(0,0) may follow"
_ARRAY = re.compile(r"\s*(\w+)'*\s*\[([^\[\]]*)\]\s*(?:\{(.*)\}\s*)?(?:@\s*(\w+|\([^()]*\))\s*)?", re.ASCII)
_DIM = re.compile(r"\s*([A-Za-z0-9]+)\s*(?:_\s*(\w*|\{[^{}]*\})\s*)?", re.ASCII)
_NAME = re.compile(r"\w+", re.ASCII)
_CAPITALS = re.compile(r"[A-Z]+")

# Every subscript letter of Unicode that looks like a Latin one. The Greek ones come last: read, and of them only
# gamma is also written (for Y), because it alone stands for a letter without a subscript of its own.
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓᵧᵦᵨᵪ", "0123456789AEHIJKLMNOPRSTUVXYBPX", strict=True))
_READ = re.compile(f"[{''.join(_SUBSCRIPTS)}]+")
_WRITE = {plain: subscript for subscript, plain in _SUBSCRIPTS.items() if subscript not in "ᵦᵨᵪ"}

_LATEX_FONT = re.compile(
    r"\\(?:math(?:bf|rm|it|sf|tt)|text(?:bf|rm|it|sf|tt)?|boldsymbol|textcolor\s*\{\w*\})\s*\{([^{}]*)\}"
)
_LATEX_SPACE = re.compile(r"\\[ ,;:!]|\\(?:left|right|quad)(?![A-Za-z])|~")


@dataclass(frozen=True, kw_only=True)
class ShardedArray:
    """A sharded array: dtype, dims with the mesh axes that each is split over, and unreduced mesh axes.

    ``at`` says where it lives: "" in the HBM of the whole mesh, "host" in the DRAM of its hosts, split in the same way,
    or the coordinates of the one chip that holds all of it (then no dim is split and nothing is unreduced).

    Raises RooftopError on a mesh axis used twice, a dim named twice (equal numbers may stand side by side), an unknown
    dtype and a name that the notation cannot write.
    """

    dtype: str
    dims: tuple[str, ...]
    axes: tuple[Axes, ...]
    unreduced: Axes = ()
    at: str | tuple[int, ...] = ""

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        if len(self.axes) != len(self.dims):
            raise RooftopError("axes", self.axes, f"one entry for each of the dims {', '.join(self.dims) or '(none)'}")
        for dim in self.dims:
            if not _DIM.fullmatch(dim) or "_" in dim:
                raise RooftopError("dim", dim, "a name of letters and digits, or a number")
            if dim[0].isdecimal():
                parse_count(dim, "dim")
            elif self.dims.count(dim) > 1:
                raise RooftopError("array", str(self), f"each dim once; {dim} is named {self.dims.count(dim)} times")
        used = [axis for dim in self.axes for axis in dim] + list(self.unreduced)
        for axis in used:
            if not _NAME.fullmatch(axis):
                raise RooftopError("mesh axis", axis, "a name of letters, digits and underscores")
            if used.count(axis) > 1:
                raise RooftopError(
                    "sharding", str(self), f"each mesh axis once; {axis} is used {used.count(axis)} times"
                )
        if isinstance(self.at, tuple):
            if not self.at or min(self.at) < 0:
                raise RooftopError("at", self.at, "the coordinates of a chip, such as (0,0)")
            if used:
                raise RooftopError("array", str(self), "no mesh axes on an array that one chip holds")
        elif self.at not in ("", "host"):
            raise RooftopError("at", self.at, "host, or the coordinates of a chip, such as (0,0)")

    def __str__(self) -> str:
        return self.to_text("ascii")

    def to_text(self, style: Style) -> str:
        """The notation in plain text, with Unicode subscripts or in LaTeX. ``parse`` reads all three back."""
        if style not in ("ascii", "unicode", "latex"):
            raise unknown("style", style, ("ascii", "unicode", "latex"))
        word = _latex_text if style == "latex" else str
        dims = ", ".join(word(dim) + _subscript(axes, style) for dim, axes in zip(self.dims, self.axes, strict=True))
        text = f"{word(self.dtype)}[{dims}]"
        if self.unreduced:
            left, right = (r"\{", r"\}") if style == "latex" else "{}"
            text += f"{left}U{_subscript(self.unreduced, style)}{right}"
        if isinstance(self.at, tuple):
            return f"{text}@({','.join(map(str, self.at))})"
        return f"{text}@{word(self.at)}" if self.at else text

    @classmethod
    def parse(cls, text: str, dtype: str | None = None) -> ShardedArray:
        """Read the notation, in plain text, Unicode or LaTeX.

        The word before the bracket is a dtype, in any of its spellings, or, where ``dtype`` is given, the name of an
        array of that dtype. Raises RooftopError on bad text, an unknown dtype, and all that the class refuses.
        """
        match = _ARRAY.fullmatch(_plain(text))
        if match is None:
            raise RooftopError("array", text, _FORM)
        word, inside, unreduced, place = match.groups()
        if word.lower() in DTYPE_BYTES or word.lower() in DTYPE_ALIASES:
            dtype = parse_dtype(word)
        elif (index := _INDEX_ALIASES.get(word.lower(), word.lower())) in INDEX_BYTES:
            dtype = index
        elif dtype is None or _LIKE_DTYPE.fullmatch(word):
            raise unknown("dtype", word, DTYPE_BYTES | INDEX_BYTES)
        entries = re.split(r",(?![^{]*\})", inside) if inside.strip() else []
        split = [_dim(entry, text) for entry in entries]
        partial: Axes = ()
        if unreduced is not None:
            name, partial = _dim(unreduced, text)
            if name != "U" or not partial:
                raise RooftopError("array", text, "{U_AXES} after the dims, such as {U_W}")
        at: str | tuple[int, ...] = place or ""
        if place and place.startswith("("):
            coordinates = place[1:-1].split(",")
            if not all(coordinate.strip().isdecimal() for coordinate in coordinates):
                raise RooftopError("array", text, "the coordinates of a chip after @, such as @(0,0)")
            at = tuple(map(int, coordinates))
        return cls(
            dtype=dtype,
            dims=tuple(name for name, _ in split),
            axes=tuple(axes for _, axes in split),
            unreduced=partial,
            at=at,
        )

    def with_axes(self, axes: tuple[Axes, ...], unreduced: Axes = ()) -> ShardedArray:
        """The same array (dtype, dims, place) in another sharding. Raises RooftopError as the class does."""
        return dataclasses.replace(self, axes=axes, unreduced=unreduced)

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
            ways = _ways(axes, mesh)
            if size % ways:
                near = " or ".join(str(size // ways * ways + more) for more in (0, ways) if size // ways + more)
                raise RooftopError(f"dim {dim} over {'x'.join(axes)}", size, f"a multiple of {ways}: {near}")
            local.append(size // ways)
        return tuple(local)

    def device_bytes(self, dims: Mapping[str, int], mesh: Mapping[str, int]) -> float:
        """Bytes of one shard: what each of the ``devices`` holds (in its share of host DRAM for ``@host``)."""
        return prod(self.local_shape(dims, mesh)) * dtype_bytes(self.dtype)

    def one_copy_bytes(self, dims: Mapping[str, int]) -> float:
        """Bytes of the whole array, once."""
        return prod(self.shape(dims)) * dtype_bytes(self.dtype)

    def total_bytes(self, dims: Mapping[str, int], mesh: Mapping[str, int]) -> float:
        """Bytes over all devices of the mesh, copies along unused axes and partial sums counted.

        This is ``one_copy_bytes`` x ``replication`` x ``partial_sums``.
        """
        return self.device_bytes(dims, mesh) * self.devices(mesh)

    def devices(self, mesh: Mapping[str, int]) -> int:
        """Devices that hold a shard: all of the mesh, or the one chip."""
        return 1 if isinstance(self.at, tuple) else prod(mesh.values())

    def partial_sums(self, mesh: Mapping[str, int]) -> int:
        """Terms that each element is still the sum of, held apart: the devices along the unreduced axes."""
        return _ways(self.unreduced, mesh)

    def replication(self, mesh: Mapping[str, int]) -> int:
        """Devices that hold the same values: those along the mesh axes that the array does not name.

        Partial sums are not copies: the devices along an unreduced axis hold different values.
        """
        used = tuple(axis for dim in self.axes for axis in dim) + self.unreduced
        return self.devices(mesh) // _ways(used, mesh)


def _plain(text: str) -> str:
    """Unicode and LaTeX forms rewritten in plain text."""
    plain = text.strip()
    if len(plain) > 1 and plain[0] == plain[-1] == "$":
        plain = plain.strip("$")
    if "\\" in plain:
        plain = _LATEX_SPACE.sub(" ", plain).replace(r"\_", "_")
        plain = _LATEX_FONT.sub(r"\1", plain).replace(r"\{", "{").replace(r"\}", "}")
    return _READ.sub(lambda run: "_" + "".join(_SUBSCRIPTS[letter] for letter in run.group()), plain)


def _dim(entry: str, text: str) -> tuple[str, Axes]:
    """A dim, or the U of unreduced axes, with the axes of its subscript."""
    match = _DIM.fullmatch(entry)
    if match is None:
        raise RooftopError("array", text, _FORM)
    name, subscript = match.groups()
    if subscript is None:
        return name, ()
    body = subscript.strip("{}")
    axes = tuple(axis.strip() for axis in body.split(","))
    if len(axes) == 1:
        letters = "".join(body.split())
        axes = tuple(letters) if _CAPITALS.fullmatch(letters) else axes
    elif not axes[-1]:
        axes = axes[:-1]
    if not all(axes):
        raise RooftopError("array", text, f"a mesh axis after each underscore, as in {name}_X, and between commas")
    return name, axes


def _subscript(axes: Axes, style: Style) -> str:
    if not axes:
        return ""
    bare = "".join(axes)
    letters = all(len(axis) == 1 and _CAPITALS.fullmatch(axis) for axis in axes)
    # A name of several capitals would be read back as one axis per letter: it keeps a comma.
    listed = ",".join(axes) + ("," if len(axes) == 1 and len(bare) > 1 and _CAPITALS.fullmatch(bare) else "")
    if style == "unicode" and (letters or listed == bare) and _WRITE.keys() >= set(bare):
        return "".join(_WRITE[letter] for letter in bare)
    if style == "latex":
        listed = ",".join(map(_latex_text, listed.split(",")))
    if letters or len(bare) == 1:
        return f"_{bare}" if style != "latex" or len(bare) == 1 else f"_{{{bare}}}"
    return f"_{{{listed}}}"


def _latex_text(word: str) -> str:
    """A word of several letters upright, as LaTeX would otherwise set a product of one-letter symbols."""
    return word if len(word) < 2 or word.isdecimal() else rf"\text{{{word.replace('_', chr(92) + '_')}}}"


def _ways(axes: Axes, mesh: Mapping[str, int]) -> int:
    for axis in axes:
        if axis not in mesh:
            raise RooftopError("mesh axis", axis, f"one of {', '.join(mesh) or 'none'}")
    return prod(mesh[axis] for axis in axes)
