"""The steps that programs over sharded arrays are made of, in the book's notation.

A step takes sharded arrays to a sharded array. Collectives: ``all_gather`` takes axes off the ends of dims,
``reduce_scatter`` sums over unreduced axes and puts them there, ``all_reduce`` sums and leaves copies, ``all_to_all``
moves axes from one dim to another, ``permute`` rearranges whole shards. Free of communication are ``slice`` (keep your
own part of a dim), ``pad`` (your shard among zeros: unreduced) and ``mask`` (zeros on all devices but the first along
an axis: unreduced). ``einsum`` multiplies what is local. Overlapped with its neighbour it is a collective matmul:
``all_gather_einsum``, ``einsum_reduce_scatter``, ``einsum_all_reduce``.

Source: chapter 3 of the book; collective matmuls chapter 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from rooftop.arrays import ShardedArray
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.ledger import COLLECTIVES, CollectiveKind

FREE_OPS: tuple[str, ...] = ("slice", "pad", "mask")
#: Collective matmuls, and the collective that each overlaps with the multiplication.
OVERLAPPED_OPS: Mapping[str, CollectiveKind] = {
    "all_gather_einsum": "all_gather",
    "einsum_reduce_scatter": "reduce_scatter",
    "einsum_all_reduce": "all_reduce",
}
#: Parts of an output that an overlapped AllReduce scatters and gathers in turn: the gather of the last hides behind
#: nothing. More parts would be shorter, but so would their matmuls.
ALL_REDUCE_PARTS = 2
_TITLES = {
    "all_gather": "AllGather",
    "reduce_scatter": "ReduceScatter",
    "all_reduce": "AllReduce",
    "all_to_all": "AllToAll",
    "permute": "Permute",
    "slice": "Slice",
    "pad": "Pad",
    "mask": "Mask",
}


@dataclass(frozen=True, kw_only=True)
class Step:
    """One operation on sharded arrays.

    ``axes`` are the mesh axes that it works over. ``dims`` are, one for each axis, the dims that all_gather,
    reduce_scatter, slice and pad change; of an all_to_all (from, to); of an einsum_all_reduce the dim that is cut into
    chunks. Of an ``all_gather_einsum``, ``operand`` is the input that is gathered; ``bidirectional`` says whether a
    collective matmul's shards travel both ways round.
    """

    op: str
    inputs: tuple[ShardedArray, ...]
    output: ShardedArray
    axes: tuple[str, ...] = ()
    dims: tuple[str, ...] = ()
    operand: int = 0
    bidirectional: bool = False

    @property
    def collective(self) -> CollectiveKind | None:
        """The kind of collective that the step performs, overlapped or not; None if it does not communicate."""
        op = OVERLAPPED_OPS.get(self.op, self.op)
        return next((kind for kind in COLLECTIVES if kind == op), None)

    @property
    def multiplies(self) -> bool:
        """True if the step is an einsum, overlapped or not."""
        return self.op == "einsum" or self.op in OVERLAPPED_OPS

    @property
    def parts(self) -> tuple[Step, ...]:
        """The plain steps that a collective matmul does at once, in order; of any other step itself."""
        dims, dtype = self.output.dims, self.output.dtype
        if self.op == "all_gather_einsum":
            first = all_gather(self.inputs[self.operand], [(self.axes[0], self.dims[0])])
            inputs = (first.output, self.inputs[1]) if self.operand == 0 else (self.inputs[0], first.output)
            return first, einsum(*inputs, dims, dtype)
        if self.op in OVERLAPPED_OPS:
            left, right = self.inputs
            first = einsum(left, right, dims, dtype)
            if self.op == "einsum_all_reduce":
                return first, all_reduce(first.output, self.axes)
            return first, reduce_scatter(first.output, [(self.axes[0], self.dims[0])])
        return (self,)

    def __str__(self) -> str:
        if not self.multiplies:
            return f"{self._title(self.op)}({self.inputs[0]}) -> {self.output}"
        factors = [str(array) for array in self.inputs]
        if self.op == "all_gather_einsum":
            factors[self.operand] = f"{self._title('all_gather')}({factors[self.operand]})"
        product = " * ".join(factors)
        if self.op in ("einsum_reduce_scatter", "einsum_all_reduce"):
            product = f"{self._title(OVERLAPPED_OPS[self.op])}({product})"
        return f"{product} -> {self.output}" + (", overlapped" if self.op in OVERLAPPED_OPS else "")

    def _title(self, op: str) -> str:
        over = "".join(self.axes) if all(len(axis) == 1 for axis in self.axes) else ",".join(self.axes)
        dims = {"all_to_all": self.dims[1:], "reduce_scatter": self.dims}.get(op, ())
        named = ",".join([over, *dict.fromkeys(dims)])
        if not named:
            return _TITLES[op]
        return f"{_TITLES[op]}_{named}" if len(named) == 1 else f"{_TITLES[op]}_{{{named}}}"


def all_gather(array: ShardedArray, axes: Sequence[tuple[str, str]]) -> Step:
    """Gather over (mesh axis, dim) pairs. Raises RooftopError unless the axes end their dim's subscript."""
    changed = dict(zip(array.dims, array.axes, strict=True))
    for dim, gathered in _by_dim(array, axes).items():
        changed[dim] = _without_end(array, dim, gathered)
    output = array.with_axes(tuple(changed.values()), array.unreduced)
    return _step("all_gather", array, output, axes)


def reduce_scatter(array: ShardedArray, axes: Sequence[tuple[str, str]]) -> Step:
    """Sum over the mesh axes of (mesh axis, dim) pairs and split the dims over them."""
    names = tuple(axis for axis, _ in axes)
    rest = _without_unreduced(array, names)
    return _step("reduce_scatter", array, array.with_axes(_appended(array, axes), rest), axes)


def all_reduce(array: ShardedArray, axes: Sequence[str]) -> Step:
    """Sum over unreduced mesh axes."""
    output = array.with_axes(array.axes, _without_unreduced(array, axes))
    return Step(op="all_reduce", inputs=(array,), output=output, axes=tuple(axes))


def all_to_all(array: ShardedArray, axes: Sequence[str], source: str, target: str) -> Step:
    """Move mesh axes from the end of dim ``source`` to the end of dim ``target``."""
    _by_dim(array, [(axis, source) for axis in axes])
    changed = dict(zip(array.dims, array.axes, strict=True))
    changed[source] = _without_end(array, source, tuple(axes))
    changed[_known(array, target)] += tuple(axes)
    output = array.with_axes(tuple(changed.values()), array.unreduced)
    return Step(op="all_to_all", inputs=(array,), output=output, axes=tuple(axes), dims=(source, target))


def permute(array: ShardedArray, output: ShardedArray) -> Step:
    """Rearrange whole shards. ``axes`` are those whose place differs between input and output."""
    before, after = _places(array), _places(output)
    moved = tuple(sorted(axis for axis in before.keys() | after.keys() if before.get(axis) != after.get(axis)))
    return Step(op="permute", inputs=(array,), output=output, axes=moved)


def slice_(array: ShardedArray, axes: Sequence[tuple[str, str]]) -> Step:
    """Keep one's own part of dims that were not split over the mesh axes of (mesh axis, dim) pairs."""
    return _step("slice", array, array.with_axes(_appended(array, axes), array.unreduced), axes)


def pad(array: ShardedArray, axes: Sequence[tuple[str, str]]) -> Step:
    """Set one's shard among zeros: the dims are whole again, the array unreduced over the mesh axes."""
    gathered = all_gather(array, axes).output
    names = tuple(axis for axis, _ in axes)
    return _step("pad", array, array.with_axes(gathered.axes, (*array.unreduced, *names)), axes)


def mask(array: ShardedArray, axes: Sequence[str]) -> Step:
    """Zeros on all devices but the first along the mesh axes: unreduced over them."""
    output = array.with_axes(array.axes, (*array.unreduced, *axes))
    return Step(op="mask", inputs=(array,), output=output, axes=tuple(axes))


def einsum(left: ShardedArray, right: ShardedArray, dims: Sequence[str], dtype: str) -> Step:
    """Multiply local shards to an array of ``dims``: unreduced over the axes of what is contracted.

    Raises RooftopError if the shards do not fit together: a shared dim split differently, or a mesh axis that
    splits different dims of the two (then the product of shards is no shard of the product: case 4 of the book).
    """
    axes: dict[str, tuple[str, ...]] = dict(zip(left.dims, left.axes, strict=True))
    for dim, split in zip(right.dims, right.axes, strict=True):
        if axes.setdefault(dim, split) != split:
            raise RooftopError(f"dim {dim}", f"{left} * {right}", "the same sharding on both sides of a product")
    contracted = [axis for dim, split in axes.items() if dim not in dims for axis in split]
    output = ShardedArray(
        dtype=dtype,
        dims=tuple(dims),
        axes=tuple(axes[dim] for dim in dims),
        unreduced=(*left.unreduced, *right.unreduced, *contracted),
    )
    for one, other in ((left, right), (right, left)):
        for axis in one.unreduced:
            if axis in _places(other):
                raise RooftopError(
                    f"mesh axis {axis}", f"{left} * {right}", "a factor that is whole where the other is unreduced"
                )
    return Step(op="einsum", inputs=(left, right), output=output)


def make(op: str, array: ShardedArray, *, axes: tuple[str, ...], dims: tuple[str, ...]) -> Step:
    """The step ``op`` on one array, ``axes`` and ``dims`` as a Step has them: any but a multiplication or a permute."""
    pairs = list(zip(axes, dims, strict=False))
    match op:
        case "all_gather":
            return all_gather(array, pairs)
        case "reduce_scatter":
            return reduce_scatter(array, pairs)
        case "all_reduce":
            return all_reduce(array, axes)
        case "all_to_all":
            return all_to_all(array, axes, *dims)
        case "slice":
            return slice_(array, pairs)
        case "pad":
            return pad(array, pairs)
        case "mask":
            return mask(array, axes)
    raise unknown("step", op, (*COLLECTIVES[:-1], *FREE_OPS))


def shard_order(axes: Sequence[tuple[str, ...]], unreduced: Sequence[str], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that number the shards of an array, slowest first: those of its dims, then the unreduced ones."""
    # Unreduced axes are a set: count them in mesh order.
    return tuple(axis for split in (*axes, tuple(axis for axis in mesh if axis in unreduced)) for axis in split)


def shard_numbers(array: ShardedArray, mesh: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """Which shard, and which partial sum of it, every device holds: a number for each device in mesh order, [n].

    Two devices hold equal data exactly if their numbers are equal; so two shardings of the same local shape are a
    permutation of each other.
    """
    return _numbers(shard_order(array.axes, array.unreduced, mesh), mesh)


def permutation(step: Step, mesh: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """(source, target) device numbers in mesh order of a permute, [n, 2]: what already is in place stays."""
    before, after = (shard_order(array.axes, array.unreduced, mesh) for array in (step.inputs[0], step.output))
    return permuted(before, after, mesh)


def permuted(before: Sequence[str], after: Sequence[str], mesh: Mapping[str, int]) -> npt.NDArray[np.int64]:
    """The ``permutation`` of shards that one ``shard_order`` numbers before, and another after, [n, 2]."""
    return _pairs(_numbers(before, mesh), _numbers(after, mesh))


def _numbers(order: Sequence[str], mesh: Mapping[str, int]) -> npt.NDArray[np.int64]:
    index = dict(zip(mesh, np.indices(tuple(mesh.values())).reshape(len(mesh), -1), strict=True))
    number = np.zeros(prod(mesh.values()), np.int64)
    for axis in order:
        number = number * mesh[axis] + index[axis]
    return number


def _pairs(before: npt.NDArray[np.int64], after: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    devices = np.arange(len(before))
    moves = before != after
    # Holders and takers of each shard in the order of their numbers: the inverse permute has the same pairs.
    source = devices[moves][np.argsort(before[moves], kind="stable")]
    target = devices[moves][np.argsort(after[moves], kind="stable")]
    stay = devices[~moves]
    return np.concatenate([np.stack([stay, stay], 1), np.stack([source, target], 1)])


def _step(op: str, array: ShardedArray, output: ShardedArray, axes: Sequence[tuple[str, str]]) -> Step:
    names, dims = tuple(axis for axis, _ in axes), tuple(dim for _, dim in axes)
    return Step(op=op, inputs=(array,), output=output, axes=names, dims=dims)


def _known(array: ShardedArray, dim: str) -> str:
    if dim not in array.dims:
        raise RooftopError("dim", dim, f"one of {', '.join(array.dims)}")
    return dim


def _by_dim(array: ShardedArray, axes: Sequence[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    grouped: dict[str, tuple[str, ...]] = {}
    for axis, dim in axes:
        grouped[dim] = (*grouped.get(_known(array, dim), ()), axis)
    return grouped


def _without_end(array: ShardedArray, dim: str, axes: tuple[str, ...]) -> tuple[str, ...]:
    split = array.axes[array.dims.index(dim)]
    if split[len(split) - len(axes) :] != axes:
        whole = "".join(split) or "nothing"
        accepted = f"the last axes of dim {dim}, which is split over {whole}: the others hold no whole run of it"
        raise RooftopError("axes", "".join(axes), accepted)
    return split[: len(split) - len(axes)]


def _without_unreduced(array: ShardedArray, axes: Sequence[str]) -> tuple[str, ...]:
    for axis in axes:
        if axis not in array.unreduced:
            raise RooftopError("axes", axis, f"an unreduced axis of {array}")
    return tuple(axis for axis in array.unreduced if axis not in axes)


def _appended(array: ShardedArray, axes: Sequence[tuple[str, str]]) -> tuple[tuple[str, ...], ...]:
    added = _by_dim(array, axes)
    return tuple((*split, *added.get(dim, ())) for dim, split in zip(array.dims, array.axes, strict=True))


def _places(array: ShardedArray) -> dict[str, object]:
    """Position of each mesh axis: a dim and an index in its subscript, or an index among the unreduced axes."""
    placed: dict[str, object] = {
        axis: (dim, position)
        for dim, split in zip(array.dims, array.axes, strict=True)
        for position, axis in enumerate(split)
    }
    return placed | dict.fromkeys(array.unreduced, "unreduced")
