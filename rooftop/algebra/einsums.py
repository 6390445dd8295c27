"""Two-operand einsums of sharded arrays: the book's cases, and every strategy as explicit steps.

A strategy decides, for each mesh axis, what it splits while local shards are multiplied: a batch dim, a contracted
dim, a free dim of either operand, or nothing. The operands are resharded to that placement by their cheapest paths
(gather, slice, ...), multiplied, and the product is resharded to what is wanted (ReduceScatter, AllReduce, ...).
Where a gather comes right before the multiplication, or a sum right after it, the two can overlap as a collective
matmul. Source: chapter 3 of the book; collective matmuls chapter 10.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from rooftop.algebra import steps
from rooftop.algebra.pricing import Cost, Prices
from rooftop.algebra.resharding import Paths
from rooftop.algebra.steps import Step
from rooftop.arrays import ShardedArray
from rooftop.core.errors import RooftopError
from rooftop.core.records import Record


@dataclass(frozen=True, kw_only=True)
class Einsum:
    """``left`` times ``right``, summed over the dims that ``output`` lacks, sharded as ``output`` says."""

    left: ShardedArray
    right: ShardedArray
    output: ShardedArray

    def __post_init__(self) -> None:
        for dim in self.output.dims:
            if dim not in self.dims:
                raise RooftopError(f"dim {dim}", str(self.output), f"dims of the operands: {', '.join(self.dims)}")
        for dim in self.dims:
            if (dim in self.left.dims) + (dim in self.right.dims) + (dim in self.output.dims) == 1:
                accepted = "a dim of both operands, or of the output: an einsum of two does not sum over one alone"
                raise RooftopError(f"dim {dim}", str(self), accepted)

    def __str__(self) -> str:
        return f"{self.left} @ {self.right} -> {self.output}"

    @property
    def arrays(self) -> tuple[ShardedArray, ShardedArray, ShardedArray]:
        """Both operands and the output."""
        return self.left, self.right, self.output

    @property
    def contracted(self) -> tuple[str, ...]:
        """Dims that are summed over."""
        return tuple(dim for dim in self.left.dims if dim in self.right.dims and dim not in self.output.dims)

    @property
    def dims(self) -> tuple[str, ...]:
        """All dims, those of the left operand first."""
        return tuple(dict.fromkeys((*self.left.dims, *self.right.dims)))


def natural_output(left: ShardedArray, right: ShardedArray) -> ShardedArray:
    """The product of two arrays that name no output: what comes out if nothing else is asked for. Source: chapter 3.

    Dims of both are summed over. The other dims keep their mesh axes; an axis that splits one of each operand stays
    with the left one. An axis that splits a contracted dim of both leaves the product unreduced over it. Raises
    RooftopError if no dim is left.
    """
    dims = [dim for dim in (*left.dims, *right.dims) if (dim in left.dims) != (dim in right.dims)]
    if not dims:
        raise RooftopError("expression", f"{left} @ {right}", "an output, '-> C': no dim of the operands is left")
    split = dict(zip(left.dims, left.axes, strict=True))
    both = zip(right.dims, right.axes, strict=True)
    partial = [axis for dim, axes in both for axis in axes if axis in split.get(dim, ())]
    unreduced = tuple(dict.fromkeys((*left.unreduced, *right.unreduced, *partial)))
    used = set(unreduced)
    axes: list[tuple[str, ...]] = []
    for dim, ways in zip((*left.dims, *right.dims), (*left.axes, *right.axes), strict=True):
        if dim in dims:
            axes.append(tuple(axis for axis in ways if axis not in used))
            used.update(ways)
    return ShardedArray(dtype=left.dtype, dims=tuple(dims), axes=tuple(axes), unreduced=unreduced)


@dataclass(frozen=True)
class Case(Record):
    """One of the four cases of the book that an einsum falls under, on the mesh axes that make it so."""

    number: int
    axes: tuple[str, ...]
    rule: str


def cases(einsum: Einsum) -> tuple[Case, ...]:
    """The cases of the book that apply, in its order; case 1 only where no other does. Source: chapter 3."""
    placed = [
        {axis: dim for dim, split in zip(array.dims, array.axes, strict=True) for axis in split}
        for array in (einsum.left, einsum.right)
    ]
    contracted = set(einsum.contracted)
    dims_by_case: dict[int, list[str]] = {2: [], 3: [], 4: []}
    for axis in dict.fromkeys((*placed[0], *placed[1])):
        left, right = (place.get(axis) for place in placed)
        if left == right and left in contracted:
            dims_by_case[3].append(axis)
        elif left is not None and right is not None and left != right:
            dims_by_case[4 if not {left, right} & contracted else 2].append(axis)
        elif (left or right) in contracted:
            dims_by_case[2].append(axis)
    rules = {
        2: "one operand is split over the contracted dim: gather it there, or split the other one too",
        3: "both operands are split over the contracted dim: multiply shards, then sum (AllReduce or ReduceScatter)",
        4: "both operands are split over the same axis on dims that stay: gather one of them first",
    }
    applying = tuple(Case(number, tuple(axes), rules[number]) for number, axes in dims_by_case.items() if axes)
    return applying or (Case(1, (), "no contracted dim is split: multiply shards, nothing moves"),)


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to do an einsum: its steps in order, each with its cost.

    ``memory_bytes`` is the most that one device holds at once: the operands as they stand and what is being made.
    ``streamed``: pieces of arrays on hosts come and go while others are multiplied.
    """

    steps: tuple[Step, ...]
    costs: tuple[Cost, ...]
    memory_bytes: float
    streamed: bool = False

    @property
    def time_s(self) -> float:
        """Seconds, one step after another: each needs the result of the one before; streamed, those of the longest."""
        return self.lower_s if self.streamed else sum(cost.time_s for cost in self.costs)

    @property
    def resources(self) -> dict[str, float]:
        """Seconds that each resource is busy."""
        busy: dict[str, float] = {}
        for cost in self.costs:
            for name, seconds in cost.resources.items():
                busy[name] = busy.get(name, 0.0) + seconds
        return busy

    @property
    def bound(self) -> str:
        """The busiest resource."""
        return max(self.resources, key=lambda name: self.resources[name], default="")

    @property
    def lower_s(self) -> float:
        """Seconds if all resources overlapped perfectly: those of the busiest. PCIe carries both ways at once."""
        busy: dict[tuple[str, bool], float] = {}
        for step, cost in zip(self.steps, self.costs, strict=True):
            for name, seconds in cost.resources.items():
                way = name, name == "pcie" and step.output.at == "host"
                busy[way] = busy.get(way, 0.0) + seconds
        return max(busy.values(), default=0.0)

    @property
    def flops(self) -> float:
        """FLOPs of one device."""
        return sum(cost.flops for cost in self.costs)

    @property
    def rule(self) -> str:
        """Description of the strategy in words."""
        parts = []
        for step in self.steps:
            over, ways = ",".join(step.axes), ", both ways round" if step.bidirectional else ""
            match step.op:
                case "einsum":
                    parts.append("multiply")
                case "all_gather_einsum":
                    parts.append(f"multiply while gathering {_short(step.inputs[step.operand])} over {over}{ways}")
                case "einsum_reduce_scatter":
                    parts.append(f"multiply while scattering the sums over {over}{ways}")
                case "einsum_all_reduce":
                    parts.append(f"multiply in chunks while summing over {over}{ways}")
                case op:
                    parts.append(f"{op} {_short(step.inputs[0])}" + (f" over {over}" if over else ""))
        return ", then ".join(parts)


def _short(array: ShardedArray) -> str:
    return re.sub(r"^\w+", "", str(array))


def strategies(einsum: Einsum, prices: Prices, *, overlapped: bool = True) -> tuple[Strategy, ...]:
    """Every strategy, best first. Raises RooftopError if an array does not split evenly on the mesh.

    For each placement of the multiplication the cheapest paths to and from it are taken; of equally fast strategies
    the one with fewer steps comes first.
    """
    to_left, to_right = Paths(einsum.left, prices), Paths(einsum.right, prices)
    to_output = Paths(einsum.output, prices, backwards=True)
    by_steps: dict[tuple[Step, ...], Strategy] = {}
    for left, right in _placements(einsum, prices):
        multiply = steps.einsum(left, right, einsum.output.dims, einsum.output.dtype)
        plain = (*to_left.to(left), *to_right.to(right), multiply, *to_output.to(multiply.output))
        variants = [plain]
        if overlapped:
            variants += _overlaps(to_left.to(left), to_right.to(right), multiply, to_output.to(multiply.output), prices)
        for chosen in variants:
            if chosen not in by_steps:
                by_steps[chosen] = priced(chosen, (einsum.left, einsum.right), prices)
    return tuple(sorted(by_steps.values(), key=lambda strategy: (strategy.time_s, len(strategy.steps))))


def priced(chosen: Sequence[Step], arrays: Sequence[ShardedArray], prices: Prices) -> Strategy:
    """Steps that take ``arrays`` to a result, as a strategy with its costs."""
    live, most = list(arrays), 0.0
    for step in chosen:
        most = max(most, sum(map(prices.bytes, [*live, step.output])))
        for array in step.inputs:
            live.remove(array)
        live.append(step.output)
    return Strategy(steps=tuple(chosen), costs=tuple(map(prices.cost, chosen)), memory_bytes=most)


def _placements(einsum: Einsum, prices: Prices) -> Iterator[tuple[ShardedArray, ShardedArray]]:
    """Operands as they can be multiplied: each mesh axis splits one dim, or nothing, or an operand stays unreduced."""
    mesh, sizes = prices.mesh.shape, {dim: _size(einsum, dim, prices.dims) for dim in einsum.dims}
    roles: list[tuple[object, ...]] = [
        (None, *einsum.dims, *(side for side in (0, 1) if axis in (einsum.left, einsum.right)[side].unreduced))
        for axis in mesh
    ]
    for chosen in product(*roles):
        split = {dim: [axis for axis, role in zip(mesh, chosen, strict=True) if role == dim] for dim in einsum.dims}
        if any(size % prices.mesh.size(*split[dim]) for dim, size in sizes.items()):
            continue
        partial = [tuple(axis for axis, role in zip(mesh, chosen, strict=True) if role == side) for side in (0, 1)]
        for order in product(*(permutations(axes) for axes in split.values())):
            placed = dict(zip(split, order, strict=True))
            left, right = (
                array.with_axes(tuple(placed[dim] for dim in array.dims), partial[side])
                for side, array in enumerate((einsum.left, einsum.right))
            )
            yield left, right


def _size(einsum: Einsum, dim: str, dims: Mapping[str, int]) -> int:
    array = einsum.left if dim in einsum.left.dims else einsum.right
    return array.shape(dims)[array.dims.index(dim)]


def _overlaps(
    to_left: Sequence[Step], to_right: Sequence[Step], multiply: Step, after: Sequence[Step], prices: Prices
) -> Iterator[tuple[Step, ...]]:
    """The strategy with its last gather, or its first sum, overlapped with the multiplication.

    One mesh axis goes round; what else a gather or a sum covers is done before it, or after it.
    """
    for operand, path in enumerate((to_left, to_right)):
        if path and path[-1].op == "all_gather":
            # The outermost axis of a dim goes round last: the inner ones are gathered before.
            (axis, dim), *early = zip(path[-1].axes, path[-1].dims, strict=True)
            first = (steps.all_gather(path[-1].inputs[0], early),) if early else ()
            array = first[0].output if first else path[-1].inputs[0]
            if prices.mesh.size(axis) > 1:
                inputs = (array, multiply.inputs[1]) if operand == 0 else (multiply.inputs[0], array)
                ring = replace(
                    multiply, op="all_gather_einsum", inputs=inputs, axes=(axis,), dims=(dim,), operand=operand
                )
                paths = [*to_left], [*to_right]
                paths[operand][-1:] = first
                for way in _ways(ring, prices):
                    yield (*paths[0], *paths[1], way, *after)
    if after and after[0].op == "reduce_scatter":
        pairs = list(zip(after[0].axes, after[0].dims, strict=True))
        # The outermost axis of a dim is scattered first; the rest of the sum follows.
        (axis, dim), rest = pairs[0], pairs[1:]
        if prices.mesh.size(axis) > 1:
            scattered = steps.reduce_scatter(multiply.output, [(axis, dim)]).output
            ring = replace(multiply, op="einsum_reduce_scatter", output=scattered, axes=(axis,), dims=(dim,))
            then = (steps.reduce_scatter(scattered, rest),) if rest else ()
            for way in _ways(ring, prices):
                yield (*to_left, *to_right, way, *then, *after[1:])
    if after and after[0].op == "all_reduce" and len(after[0].axes) == 1:
        axis = after[0].axes[0]
        chunked = _chunked(multiply.output, prices, axis)
        if chunked is not None and prices.mesh.size(axis) > 1:
            ring = replace(multiply, op="einsum_all_reduce", output=after[0].output, axes=(axis,), dims=(chunked,))
            for way in _ways(ring, prices):
                yield (*to_left, *to_right, way, *after[1:])


def _chunked(array: ShardedArray, prices: Prices, axis: str) -> str | None:
    """The longest local dim that can be cut into as many chunks as there are devices along ``axis``."""
    local = dict(zip(array.dims, array.local_shape(prices.dims, prices.mesh.shape), strict=True))
    even = [dim for dim, size in local.items() if size % prices.mesh.size(axis) == 0]
    return max(even, key=lambda dim: local[dim], default=None)


def _ways(ring: Step, prices: Prices) -> tuple[Step, ...]:
    """Both ways round and one way; on an open line, where the way back uses the other links anyway, only one."""
    closed = bool(prices.mesh.span(*ring.axes).ring.any()) and prices.mesh.size(*ring.axes) > 2
    return (replace(ring, bidirectional=True), ring) if closed else (ring,)
