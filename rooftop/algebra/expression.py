"""Expressions over sharded arrays, as people write them.

``A @ B -> C`` is an einsum, ``A @ B`` one whose output follows from its operands, ``A -> B`` a resharding,
``AllGather_X(A)`` one collective, ``A`` an array.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rooftop.algebra import steps
from rooftop.algebra.einsums import Einsum, natural_output
from rooftop.algebra.steps import Step
from rooftop.arrays import ShardedArray
from rooftop.core.errors import RooftopError, unknown

_FORMS = (
    "'A @ B -> C', 'A @ B', 'A -> B', 'AllGather_X(A)' or 'A', where an array is written as bf16[B_X, D_YZ]{U_W}; "
    "such as 'bf16[B_X, D_Y] @ bf16[D_Y, F] -> bf16[B_X, F]'"
)
_ARROW = re.compile(r"->|→|\\(?:right|long|longright)?arrow(?![a-z])|\\to(?![a-z])")
#: Between two factors: @, *, a dot, with the contracted dim as the book notes it. Not the @ of a place.
_TIMES = re.compile(
    r"(?:(?<=[\]})])|(?<=@host))\s*(?:@(?!\s*(?:host\b|\())|(?:\*|·|⋅|\\cdot(?![a-z]))(?:_\{\w+\}|_\w+)?)\s*"
)
_CALL = re.compile(
    r"((?:all|reduce)[a-z]*)_(?:\{([^{}]*)\}|(\w+?))\s*(?:\((.*)\)|(\w+\s*\[.*))", re.DOTALL | re.IGNORECASE
)
_OPS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
}
#: What LaTeX wraps around a word: the word alone is read.
_WRAPPED = re.compile(r"\\(?:math|text)(?:bf|rm|it)?\s*\{\s*([\w ]+?)\s*\}")


@dataclass(frozen=True)
class Reshard:
    """An array and the sharding that it should have."""

    source: ShardedArray
    target: ShardedArray


def parse(text: str, dtype: str | None = None) -> Einsum | Reshard | Step | ShardedArray:
    """Read an expression; ``dtype`` is that of arrays written with a name instead of one.

    Raises RooftopError on anything else, and on arrays that do not fit together.
    """
    plain = _WRAPPED.sub(r"\1", text.strip().strip("$"))
    sides = _ARROW.split(plain)
    if len(sides) > 2:
        raise RooftopError("expression", text, _FORMS)
    if called := _CALL.fullmatch(sides[0].strip()):
        step = _collective(text, called, dtype)
        if len(sides) == 2 and (output := _array(sides[1], dtype)) != step.output:
            raise RooftopError("output", str(output), f"{step.output}, which is what the collective gives")
        return step
    factors = _TIMES.split(sides[0])
    arrays = [_array(factor, dtype) for factor in factors]
    target = _array(sides[1], dtype) if len(sides) == 2 else None
    if len(arrays) == 2:
        return Einsum(left=arrays[0], right=arrays[1], output=target or natural_output(*arrays))
    if len(arrays) == 1:
        return arrays[0] if target is None else _reshard(arrays[0], target)
    raise RooftopError("expression", text, _FORMS)


def dims_of(asked: Einsum | Reshard | Step | ShardedArray) -> tuple[str, ...]:
    """The names of the dims of all arrays of an expression."""
    match asked:
        case Einsum():
            arrays: tuple[ShardedArray, ...] = (asked.left, asked.right, asked.output)
        case Reshard():
            arrays = (asked.source,)
        case Step():
            arrays = asked.inputs
        case _:
            arrays = (asked,)
    return tuple(dict.fromkeys(dim for array in arrays for dim in array.dims))


def _array(text: str, dtype: str | None) -> ShardedArray:
    """An array whose dims can be told apart: in an expression a number is the name of its dim."""
    array = ShardedArray.parse(text, dtype)
    for dim in array.dims:
        if array.dims.count(dim) > 1:
            raise RooftopError(f"dim {dim}", str(array), "each once; give equal sizes names, such as I and J")
    return array


def _reshard(source: ShardedArray, target: ShardedArray) -> Reshard:
    if (source.dtype, source.dims) != (target.dtype, target.dims):
        accepted = f"{source.dtype}[{', '.join(source.dims)}] in another sharding or place"
        raise RooftopError("output", str(target), accepted)
    return Reshard(source, target)


def _collective(text: str, called: re.Match[str], dtype: str | None) -> Step:
    """One collective, written AllGather_X(A), ReduceScatter_{X,J}(A), AllReduce_X(A) or AllToAll_{X,J}(A)."""
    name, listed, bare, in_brackets, after = called.groups()
    op = _OPS.get(name.lower())
    if op is None:
        raise unknown("collective", name, ("AllGather", "ReduceScatter", "AllReduce", "AllToAll"))
    array = _array(in_brackets or after, dtype)
    used = [*array.unreduced, *(axis for split in array.axes for axis in split)]
    words = [word.strip() for word in (bare or listed).split(",")]
    dims = [word for word in words if word in array.dims]
    axes: list[str] = []
    for word in words:
        if word not in dims:
            axes += [word] if word in used else list(word)
    for axis in axes:
        if axis not in used:
            raise unknown("mesh axis", axis, used or ("none",))
    axis_dims = {axis: dim for dim, split in zip(array.dims, array.axes, strict=True) for axis in split}
    if op == "all_reduce":
        return steps.all_reduce(array, axes)
    if op == "all_gather":
        return steps.all_gather(array, [(axis, axis_dims.get(axis, "")) for axis in used if axis in axes])
    if len(dims) != 1:
        raise RooftopError(
            "expression", text, f"the dim that is split, as in {name}_{{{','.join(axes)},{array.dims[0]}}}(...)"
        )
    if op == "reduce_scatter":
        return steps.reduce_scatter(array, [(axis, dims[0]) for axis in axes])
    return steps.all_to_all(array, axes, axis_dims.get(axes[0], ""), dims[0])
