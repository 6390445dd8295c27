"""Rings of permutes, and the AllGather or ReduceScatter that each of them implements.

XLA:TPU and hand-written programs overlap a matmul with its collective by splitting the collective into permutes. The
rule that recognises them uses data flow alone, so names, directions and the number of hops do not matter:

- *AllGather*: permutes that carry one array unchanged (the operand of each is that array, a previous permute's result,
  or a slice of it), until together they have brought every device the whole array of every other member.
- *ReduceScatter*: permutes whose results are added to terms that each device computes itself, until one array has a
  term of every member in all its elements (parts of it may have travelled different ways). The terms must differ and
  must not depend on the sum (else it is a pipeline of stages).

Zeros do not count. Bodies of loops that are short enough to be a ring are unrolled. All other permutes stay permutes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import islice
from typing import Literal

import numpy as np
import numpy.typing as npt

from rooftop.compiler.hlo.dataflow import MOVES, PERMUTES, Flow, Value, is_unrolled
from rooftop.compiler.hlo.groups import Groups, replica_groups, varying_axes
from rooftop.compiler.hlo.text import Instruction, Module

#: Terms of a sum that may be a ring's: a ring has one for each member and each part.
_MOST_TERMS = 2**14

#: Indices of members in the group of device 0; -1 where a permute brings no data.
_Origins = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Ring:
    """A logical collective of ``members`` devices along ``axes``, implemented by permutes.

    ``kind`` is 'all_gather' or 'reduce_scatter', ``bytes`` its payload (an AllGather's output, a ReduceScatter's
    input). ``sent_bytes`` is sent by one device in its ``hops`` permutes, which is more than necessary if some carry
    zeros or data that has arrived already. ``permutes`` are the instructions, as (computation, instruction), and
    ``executions`` counts runs of the whole ring in one execution of the module.
    """

    kind: Literal["all_gather", "reduce_scatter"]
    axes: tuple[str, ...]
    members: int
    bytes: float
    sent_bytes: float
    hops: int
    executions: float
    permutes: tuple[tuple[str, str], ...]


def find_rings(module: Module, mesh: Mapping[str, int]) -> tuple[Ring, ...]:
    """The rings of a scheduled module, in order of execution. ``mesh`` has its axes and sizes, in order."""
    rings: dict[tuple[str, frozenset[tuple[str, str]]], Ring] = {}
    for name, times in module.executions.items():
        if times and not is_unrolled(module, name):
            for ring in _Frame(Flow(module, name), mesh).rings():
                key = ring.kind, frozenset(ring.permutes)
                before = rings[key].executions if key in rings else 0
                rings[key] = replace(ring, executions=before + times)
    return tuple(rings.values())


@dataclass(frozen=True, kw_only=True)
class _Permute:
    """Origins of a permute's data: ``source`` [members], over the group of device 0."""

    axes: tuple[str, ...]
    source: _Origins
    elements: int
    nbytes: float


@dataclass(frozen=True, eq=False)
class _Term:
    """A part of a sum and, if it was permuted along ``axes``, the member that it comes from, on every member."""

    value: Value
    elements: int
    axes: tuple[str, ...]
    origins: _Origins | None


@dataclass(frozen=True)
class _Bound:
    """Upper limits of a sum: ``elements`` of all its terms, and ``paths`` of permutes by which terms arrive.

    ``members`` is the size of the smallest group that it has received from (infinite if it has received nothing).
    """

    elements: int
    paths: int = 0
    members: float = math.inf

    def covers(self, elements: int) -> bool:
        """True if a sum of ``elements`` may have a term of every member in all of them."""
        return self.paths + 1 >= self.members and self.elements >= self.members * elements


@dataclass(frozen=True, kw_only=True, eq=False)
class _Carried:
    """A permute's data: (a ``part`` of) the array ``whole``, and the member that it comes from, on every member.

    ``chain`` is the first permute that sent it.
    """

    whole: Value
    part: Value
    chain: Value
    axes: tuple[str, ...]
    origins: _Origins


@dataclass(frozen=True)
class _Frame:
    """One computation with its short loops: rings begin and end in it."""

    flow: Flow
    mesh: Mapping[str, int]
    _bounds: dict[Value, _Bound] = field(default_factory=dict)
    _complete: dict[Value, bool] = field(default_factory=dict)

    def rings(self) -> Iterator[Ring]:
        """Yield ReduceScatters first: over two devices, a permute of an added term would look like an AllGather."""
        used: set[Value] = set()
        for value, permutes in self._complete_sums():
            if used.isdisjoint(permutes) and self._is_reduction(value, permutes):
                used.update(permutes)
                sent = self.permutes[permutes[0]]
                payload = self.flow.elements(value) * sent.nbytes / sent.elements * len(sent.source)
                yield self._ring("reduce_scatter", permutes, payload=payload)
        yield from self._all_gathers(used)

    @cached_property
    def permutes(self) -> dict[Value, _Permute]:
        """Every permute of one array in the frame, trip by trip, in order of execution."""
        permutes = {}
        for value, instruction in self.flow.instructions():
            if instruction.opcode in PERMUTES and len(instruction.operands) == 1:
                permute = _permute(self.flow.instruction(self.flow.operands(value)[0]), instruction, self.mesh)
                if permute is not None:
                    permutes[value] = permute
        return permutes

    # ---- AllGather ------------------------------------------------------------------------------------------------

    def _all_gathers(self, used: set[Value]) -> Iterator[Ring]:
        carried: dict[Value, _Carried] = {}
        for value, permute in self.permutes.items():
            if value in used or self.flow.is_zero(whole := self.flow.source(self._sent(value), "slice")):
                continue
            before = carried.get(whole)
            if before is not None and before.axes == permute.axes:
                carried[value] = replace(before, origins=_arrive(before.origins, permute.source))
            else:
                carried[value] = _Carried(
                    whole=whole,
                    part=self.flow.source(self._sent(value)),
                    chain=value,
                    axes=permute.axes,
                    origins=permute.source,
                )
        for group in _groups(carried, lambda data: (data.whole, data.axes)):
            # Slices that travel different ways together bring one array; else each slice is a separate array.
            rings = list(self._gathers(carried[next(iter(group))].whole, group))
            if not rings:
                parts = _groups(group, lambda data: data.part)
                rings = [ring for part in parts for ring in self._gathers(carried[next(iter(part))].part, part)]
            yield from rings

    def _gathers(self, root: Value, group: Mapping[Value, _Carried]) -> Iterator[Ring]:
        """Yield rings that bring all of ``root`` from every member to every other; several if it is gathered again."""
        taken: list[Value] = []
        rings: list[list[Value]] = []
        elements, members = self.flow.elements(root), np.arange(len(self.permutes[next(iter(group))].source))
        needed, total = (len(members) - 1) * elements, sum(self.permutes[value].elements for value in group)
        if total < needed:
            return
        brought, total = _own(elements, members), 0
        for chain in _groups(group, lambda data: data.chain):
            taken += chain
            for value, data in chain.items():
                brought[members[data.origins >= 0], data.origins[data.origins >= 0]] += self.permutes[value].elements
                total += self.permutes[value].elements
            # The matrix is large: it is compared only when enough has arrived.
            complete = total >= needed and (brought >= elements).all()
            if complete and (len(members) > 2 or self._stays(root, taken)):
                rings, taken = [*rings, taken], []
                brought, total = _own(elements, members), 0
        for index, values in enumerate(rings):
            sent = self.permutes[values[0]]
            payload = self.flow.elements(root) * sent.nbytes / sent.elements * len(sent.source)
            # Remaining permutes are redundant; they count in the last ring.
            yield self._ring("all_gather", values + (taken if index == len(rings) - 1 else []), payload=payload)

    def _sent(self, permute: Value) -> Value:
        return self.flow.operands(permute)[0]

    def _stays(self, root: Value, values: list[Value]) -> bool:
        """True if a device also reads the array itself. If not, two devices only exchange their arrays."""
        path, sent = values[0].path, {value.name for value in values}

        def producer(value: Value) -> tuple[str, str]:
            inside = len(value.path) > len(path) and value.path[: len(path)] == path
            return value.path[len(path)][:2] if inside else (value.computation, value.name)

        computation = self.flow.module.computations[values[0].computation]
        return any(
            producer(self.flow.source(Value(path, computation.name, operand), "slice")) == producer(root)
            for instruction in computation
            if instruction.name not in sent
            and instruction.opcode not in (*MOVES, "tuple", "get-tuple-element", "slice", "slice-start", "slice-done")
            for operand in instruction.operands
        )

    # ---- ReduceScatter --------------------------------------------------------------------------------------------

    def _complete_sums(self) -> list[tuple[Value, list[Value]]]:
        """Sums that hold a term of every member, those of fewer permutes first, each with its permutes in order."""
        for value in self.permutes:
            # In order of execution, so that later calls reuse results and do not recurse deeply.
            self._is_complete(self._sent(value))
        complete = [(value, self._upstream_permutes(value)) for value in self._sums() if self._is_complete(value)]
        return sorted(complete, key=lambda entry: len(entry[1]))

    def _is_reduction(self, value: Value, permutes: list[Value]) -> bool:
        """True if the terms of a sum differ and do not depend on it."""
        terms = [term.value for term in self._terms(value)]
        return len(set(terms)) == len(terms) and not self.flow.depends(terms, set(permutes))

    def _terms(self, value: Value) -> Iterator[_Term]:
        """Yield the terms of a sum. A complete sum that was permuted is one term: another ring may carry it."""
        left: list[tuple[Value, tuple[str, ...], _Origins | None]] = [(value, (), None)]
        while left:
            value, axes, origins = left.pop()
            for leaf in self.flow.parts(value):
                permute = self.permutes.get(leaf)
                if permute is None:
                    yield _Term(leaf, self.flow.elements(leaf), axes, origins)
                elif axes in ((), permute.axes):
                    sent = self._sent(leaf)
                    came = permute.source if origins is None else _arrive(permute.source, origins)
                    if self._is_complete(sent):
                        yield _Term(sent, self.flow.elements(sent), permute.axes, came)
                    else:
                        left.append((sent, permute.axes, came))

    def _upstream_permutes(self, value: Value) -> list[Value]:
        """The permutes through which a sum has come, in order, up to those that carry a complete sum."""
        upstream, left = set[Value](), [value]
        while left:
            for leaf in self.flow.parts(left.pop()):
                if leaf in self.permutes and leaf not in upstream:
                    upstream.add(leaf)
                    if not self._is_complete(self._sent(leaf)):
                        left.append(self._sent(leaf))
        return sorted(upstream, key=self.flow.position)

    def _is_complete(self, value: Value) -> bool:
        """True if every member has, in all elements of ``value``, a term of every member of one group."""
        if value not in self._complete:
            bound = self._bound(value)
            self._complete[value] = bound.covers(self.flow.elements(value)) and self._has_all_terms(value)
        return self._complete[value]

    def _has_all_terms(self, value: Value) -> bool:
        """The rule of ``_is_complete``, term by term."""
        terms = list(islice(self._terms(value), _MOST_TERMS + 1))
        if len(terms) > _MOST_TERMS:
            return False
        received = [term.origins for term in terms if term.origins is not None]
        if not received or len({term.axes for term in terms if term.axes}) > 1:
            return False
        everyone = np.arange(len(received[0]))
        elements = np.zeros((len(everyone), len(everyone)))
        for term in terms:
            origins = everyone if term.origins is None else term.origins
            elements[everyone[origins >= 0], origins[origins >= 0]] += term.elements
        return bool((elements >= self.flow.elements(value)).all())

    def _bound(self, value: Value) -> _Bound:
        """Limits of a sum, from those of its addends: each value is looked at once."""
        left = [value]
        while value not in self._bounds:
            last = left[-1]
            addends = () if last in self.permutes else self.flow.addends(last) or ()
            missing = [addend for addend in addends if addend not in self._bounds]
            if missing:
                left += missing
            else:
                self._bounds[left.pop()] = self._next_bound(last)
        return self._bounds[value]

    def _next_bound(self, value: Value) -> _Bound:
        """Limits of a sum whose addends have theirs."""
        if value in self.permutes:
            sent, members = self._sent(value), len(self.permutes[value].source)
            if self._is_complete(sent):
                return _Bound(self.flow.elements(sent), 1, members)
            return _Bound(self._bound(sent).elements, self._bound(sent).paths + 1, members)
        addends = self.flow.addends(value)
        if addends is None:
            return _Bound(self.flow.elements(value))
        bounds = [self._bounds[addend] for addend in addends]
        return _Bound(
            elements=sum(bound.elements for bound in bounds),
            paths=sum(bound.paths for bound in bounds),
            members=min((bound.members for bound in bounds), default=math.inf),
        )

    def _sums(self) -> Iterator[Value]:
        """Yield results that may be a sum with received data."""
        least = min((permute.elements for permute in self.permutes.values()), default=0)
        for value, instruction in self.flow.instructions() if least else ():
            if instruction.opcode in ("add", "fusion"):
                for index, tensor in enumerate(instruction.shape):
                    if tensor.elements >= least:
                        yield replace(value, element=index) if len(instruction.shape) > 1 else value

    def _ring(self, kind: Literal["all_gather", "reduce_scatter"], values: list[Value], *, payload: float) -> Ring:
        first = self.permutes[values[0]]
        return Ring(
            kind=kind,
            axes=first.axes,
            members=len(first.source),
            bytes=payload,
            sent_bytes=sum(self.permutes[value].nbytes for value in values),
            hops=len(values),
            executions=1,
            permutes=tuple(dict.fromkeys((value.computation, value.name) for value in values)),
        )


def _groups(carried: Mapping[Value, _Carried], key: Callable[[_Carried], object]) -> list[dict[Value, _Carried]]:
    groups: dict[object, dict[Value, _Carried]] = {}
    for value, data in carried.items():
        groups.setdefault(key(data), {})[value] = data
    return list(groups.values())


def _own(elements: int, members: _Origins) -> npt.NDArray[np.float64]:
    """Elements that each member has of the array of every member before it receives any: all of its own."""
    return np.diag(np.full(len(members), float(elements)))


def _arrive(origins: _Origins, source: _Origins) -> _Origins:
    """Origins of the members' data after a permute in which each receives from ``source``."""
    return np.where(source >= 0, origins[source], -1)


def _permute(sent: Instruction, permute: Instruction, mesh: Mapping[str, int]) -> _Permute | None:
    """A permute along whole axes of the mesh; None for any other."""
    pairs = replica_groups(permute.attributes, math.prod(mesh.values()))
    axes, source = _sources(pairs, tuple(mesh.items()))
    tensor = sent.shape[0]
    if not axes or source is None:
        return None
    return _Permute(axes=axes, source=source, elements=tensor.elements, nbytes=tensor.nbytes)


@lru_cache(maxsize=64)
def _sources(pairs: Groups, mesh: tuple[tuple[str, int], ...]) -> tuple[tuple[str, ...], _Origins | None]:
    """Axes of a permute, and the member that each member of a group along them receives from (-1: none).

    The members are those of the first group; None if pairs leave it. Many permutes of a ring have the same pairs.
    """
    shape = dict(mesh)
    axes = varying_axes(pairs, shape)
    devices = math.prod(shape.values())
    grid = np.arange(devices).reshape(tuple(shape.values()))
    group = grid[tuple(slice(None) if axis in axes else 0 for axis in shape)].reshape(-1)
    place = np.full(devices, -1)
    place[group] = np.arange(len(group))
    senders, receivers = place[np.array(pairs, np.int64).reshape(-1, 2).T]
    if np.any((senders >= 0) != (receivers >= 0)):
        return axes, None
    source = np.full(len(group), -1)
    source[receivers[receivers >= 0]] = senders[receivers >= 0]
    return axes, source
