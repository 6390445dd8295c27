"""Resharding: the cheapest path of collectives from one sharding of an array to any other.

Shardings are the nodes of a graph, single steps its edges, and Dijkstra's algorithm finds the shortest paths. Among
paths of equal price the one with fewer steps wins.

The graph is its own mirror image. Replicated over an axis and unreduced over it are dual (the derivative of one is
the other), so reversing every edge and swapping the two turns an AllGather into a ReduceScatter, a slice into a pad,
and leaves AllReduce, AllToAll, permute and mask what they are. A search backwards from a sharding is therefore a
search forwards from its dual.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain, combinations, permutations, product
from math import prod

from rooftop.algebra import steps
from rooftop.algebra.pricing import Prices
from rooftop.algebra.steps import Step
from rooftop.arrays import ShardedArray
from rooftop.core.errors import RooftopError, unknown

Axes = tuple[str, ...]
#: The axes of every dim, and the unreduced ones in mesh order: a sharding apart from the array that has it.
Sharding = tuple[tuple[Axes, ...], Axes]


#: What each step is when it is run backwards on derivatives.
TRANSPOSES: Mapping[str, str] = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "all_reduce": "all_reduce",
    "all_to_all": "all_to_all",
    "permute": "permute",
    "slice": "pad",
    "pad": "slice",
    "mask": "mask",
}


@dataclass(frozen=True)
class _Move:
    """An edge of the graph: a step, for an array of any dtype. ``dims`` are positions."""

    op: str
    axes: Axes
    dims: tuple[int, ...]
    target: Sharding

    def transposed(self, source: Sharding) -> _Move:
        """The edge from the dual of its target to ``source``, which is the dual of where it began."""
        dims = self.dims[::-1] if self.op == "all_to_all" else self.dims
        return _Move(TRANSPOSES[self.op], self.axes, dims, source)


def reshard(source: ShardedArray, target: ShardedArray, prices: Prices) -> tuple[Step, ...]:
    """The cheapest steps from ``source`` to ``target``: () if they are the same.

    Raises RooftopError if the two are not shardings of one array, or if one of them does not split evenly.
    """
    if (source.dtype, source.dims) != (target.dtype, target.dims):
        accepted = f"{source.dtype}[{', '.join(source.dims)}] in another sharding"
        raise RooftopError("array", str(target), accepted)
    return Paths(source, prices).to(target)


@dataclass(frozen=True)
class Paths:
    """The cheapest paths from ``origin`` to every sharding of that array; with ``backwards`` those that lead to it."""

    origin: ShardedArray
    prices: Prices
    backwards: bool = False

    def __post_init__(self) -> None:
        if self.origin.at:
            raise RooftopError(
                "array", str(self.origin), "an array in the HBM of the mesh; price the copy by itself, as 'A@host -> A'"
            )
        self.prices.bytes(self.origin)
        for axis in self.origin.unreduced:
            if axis not in self._mesh:
                raise unknown("mesh axis", axis, self._mesh)

    def seconds(self, other: ShardedArray) -> float:
        """Price of the cheapest path between ``origin`` and ``other``."""
        return self._reached[self._node(other)][0]

    def to(self, other: ShardedArray) -> tuple[Step, ...]:
        """The steps of the cheapest path to ``other`` (with ``backwards``: from ``other``)."""
        if other not in self._found:
            self._found[other] = self._path(other)
        return self._found[other]

    def _path(self, other: ShardedArray) -> tuple[Step, ...]:
        moves: list[_Move] = []
        edge = self._reached[self._node(other)][2]
        while edge is not None:
            node, move = edge
            moves.append(move.transposed(_dual(node, self._mesh)) if self.backwards else move)
            edge = self._reached[node][2]
        array = other if self.backwards else self.origin
        path: list[Step] = []
        for move in moves if self.backwards else reversed(moves):
            step = _step(move, array)
            array = step.output
            if path and (path[-1].op, step.op) == ("slice", "slice"):
                before = path.pop()
                step = steps.slice_(
                    before.inputs[0], list(zip(before.axes + step.axes, before.dims + step.dims, strict=True))
                )
            path.append(step)
        return tuple(path)

    @cached_property
    def _mesh(self) -> Mapping[str, int]:
        return self.prices.mesh.shape

    @cached_property
    def _found(self) -> dict[ShardedArray, tuple[Step, ...]]:
        return {}

    def _node(self, array: ShardedArray) -> Sharding:
        self.prices.bytes(array)
        node = _sharding(array, self._mesh)
        return _dual(node, self._mesh) if self.backwards else node

    @cached_property
    def _reached(self) -> dict[Sharding, tuple[float, int, tuple[Sharding, _Move] | None]]:
        """For each sharding: seconds, steps, and the last edge of its cheapest path."""
        graph = _Graph(self.origin, self.prices)
        start = self._node(self.origin)
        reached: dict[Sharding, tuple[float, int, tuple[Sharding, _Move] | None]] = {start: (0.0, 0, None)}
        queue = [(0.0, 0, start)]
        settled: set[Sharding] = set()
        while queue:
            seconds, length, node = heapq.heappop(queue)
            if node in settled:
                continue
            settled.add(node)
            for move in graph.moves(node):
                if move.target in settled:
                    continue
                price = seconds + graph.seconds(node, move), length + 1
                if move.target not in reached or price < reached[move.target][:2]:
                    reached[move.target] = (*price, (node, move))
                    heapq.heappush(queue, (*price, move.target))
        return reached


@dataclass(frozen=True)
class _Graph:
    """Every sharding of an array on a mesh, and the single steps between them."""

    array: ShardedArray
    prices: Prices
    _known: dict[tuple[str, Axes, float], float] = field(default_factory=dict)
    _permutes_known: dict[tuple[Axes, Axes, float], float] = field(default_factory=dict)

    @cached_property
    def mesh(self) -> Mapping[str, int]:
        return self.prices.mesh.shape

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return self.array.shape(self.prices.dims)

    @cached_property
    def whole_bytes(self) -> float:
        return self.array.one_copy_bytes(self.prices.dims)

    @cached_property
    def local_bytes(self) -> dict[Sharding, float]:
        return {node: self.whole_bytes / prod(self._signature(node)[:-1]) for node in self._even}

    def seconds(self, node: Sharding, move: _Move) -> float:
        if move.op in steps.FREE_OPS:
            return 0.0
        payload = self.local_bytes[move.target if move.op == "all_gather" else node]
        if move.op == "permute":
            orders = self._order[node], self._order[move.target], payload
            if orders not in self._permutes_known:
                self._permutes_known[orders] = self.prices.permute(*orders).time_s
            return self._permutes_known[orders]
        key = move.op, move.axes, payload
        if key not in self._known:
            self._known[key] = self.prices.collective_s(*key)
        return self._known[key]

    def moves(self, node: Sharding) -> Iterator[_Move]:
        return (
            move for move in chain(_moves(node, tuple(self.mesh)), self._permutes(node)) if move.target in self._even
        )

    def _permutes(self, node: Sharding) -> Iterator[_Move]:
        for target in self._alike[self._signature(node)]:
            if target != node:
                yield _Move("permute", (), (), target)

    @cached_property
    def _even(self) -> frozenset[Sharding]:
        """Shardings that split every dim evenly."""
        return frozenset(chain.from_iterable(self._alike.values()))

    @cached_property
    def _order(self) -> dict[Sharding, Axes]:
        return {node: steps.shard_order(*node, self.mesh) for node in self._even}

    @cached_property
    def _alike(self) -> dict[tuple[int, ...], list[Sharding]]:
        """Shardings by the shape of their shards: permutes connect those of one shape."""
        groups: dict[tuple[int, ...], list[Sharding]] = {}
        for node in shardings(len(self.sizes), self.mesh):
            signature = self._signature(node)
            if all(size % ways == 0 for size, ways in zip(self.sizes, signature, strict=False)):
                groups.setdefault(signature, []).append(node)
        return groups

    def _signature(self, node: Sharding) -> tuple[int, ...]:
        return tuple(prod(self.mesh[axis] for axis in split) for split in (*node[0], node[1]))


def shardings(dims: int, mesh: Mapping[str, int], *, unreduced: bool = True) -> Iterator[Sharding]:
    """Every sharding of an array with so many dims: each mesh axis unused, on a dim in any order, or unreduced."""
    for places in product(range(-1, dims + unreduced), repeat=len(mesh)):
        groups = [[axis for axis, place in zip(mesh, places, strict=True) if place == dim] for dim in range(dims)]
        left = tuple(axis for axis, place in zip(mesh, places, strict=True) if place == dims)
        for split in product(*(permutations(group) for group in groups)):
            yield split, left


@lru_cache(maxsize=4096)
def _moves(node: Sharding, mesh: Axes) -> tuple[_Move, ...]:
    """The steps that lead from a sharding on a mesh of these axes, permutes apart."""
    return tuple(_each_move(node, mesh))


def _each_move(node: Sharding, mesh: Axes) -> Iterator[_Move]:
    split, unreduced = node
    dims = range(len(split))
    used = {axis for axes in split for axis in axes} | set(unreduced)
    unused = [axis for axis in mesh if axis not in used]

    def changed(ends: Mapping[int, Axes]) -> tuple[Axes, ...]:
        return tuple(ends.get(dim, axes) for dim, axes in enumerate(split))

    for lengths in product(*(range(len(axes) + 1) for axes in split)):
        pairs = [(axis, dim) for dim in dims for axis in split[dim][len(split[dim]) - lengths[dim] :]]
        if pairs:
            shortened = tuple(axes[: len(axes) - length] for axes, length in zip(split, lengths, strict=True))
            yield _Move("all_gather", *_columns(pairs), (shortened, unreduced))
    for source, target in permutations(dims, 2):
        for length in range(1, len(split[source]) + 1):
            moved = split[source][-length:]
            ends = {source: split[source][:-length], target: split[target] + moved}
            yield _Move("all_to_all", moved, (source, target), (changed(ends), unreduced))
    for count in range(1, len(unreduced) + 1):
        for chosen in combinations(unreduced, count):
            rest = tuple(axis for axis in unreduced if axis not in chosen)
            yield _Move("all_reduce", chosen, (), (split, rest))
            for order in permutations(chosen):
                # Dims in ascending order: other orders lead to the same shardings.
                for places in product(dims, repeat=count):
                    if list(places) == sorted(places):
                        pairs = list(zip(order, places, strict=True))
                        yield _Move("reduce_scatter", *_columns(pairs), (_with(split, pairs), rest))
    for axis in unused:
        partial = _in_order((*unreduced, axis), mesh)
        yield _Move("mask", (axis,), (), (split, partial))
        for dim in dims:
            yield _Move("slice", (axis,), (dim,), (_with(split, [(axis, dim)]), unreduced))
    for dim in dims:
        if split[dim]:
            axis = split[dim][-1]
            partial = _in_order((*unreduced, axis), mesh)
            yield _Move("pad", (axis,), (dim,), (changed({dim: split[dim][:-1]}), partial))


def _step(move: _Move, array: ShardedArray) -> Step:
    """The step that a move is for an array."""
    if move.op == "permute":
        return steps.permute(array, array.with_axes(*move.target))
    return steps.make(move.op, array, axes=move.axes, dims=tuple(array.dims[dim] for dim in move.dims))


def _sharding(array: ShardedArray, mesh: Mapping[str, int]) -> Sharding:
    return array.axes, _in_order(array.unreduced, mesh)


def _dual(node: Sharding, mesh: Mapping[str, int]) -> Sharding:
    """Unreduced axes become unused ones, and unused ones unreduced."""
    used = {axis for axes in node[0] for axis in axes} | set(node[1])
    return node[0], tuple(axis for axis in mesh if axis not in used)


def _in_order(axes: Axes, mesh: Iterable[str]) -> Axes:
    return tuple(axis for axis in mesh if axis in axes)


def _columns(pairs: list[tuple[str, int]]) -> tuple[Axes, tuple[int, ...]]:
    return tuple(axis for axis, _ in pairs), tuple(dim for _, dim in pairs)


def _with(split: tuple[Axes, ...], pairs: list[tuple[str, int]]) -> tuple[Axes, ...]:
    return tuple(axes + tuple(axis for axis, place in pairs if place == dim) for dim, axes in enumerate(split))
