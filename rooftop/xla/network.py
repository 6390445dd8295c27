"""What the instructions of a compiled program that communicate cost, and which links of the network they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rooftop.arrays import Mesh
from rooftop.hardware import PhysicalAxis
from rooftop.roofline.collectives import price
from rooftop.roofline.rates import Rates
from rooftop.roofline.routing import Route, route
from rooftop.xla.collectives import LogicalCollective
from rooftop.xla.groups import replica_groups
from rooftop.xla.hlo import Computation, Instruction, Module
from rooftop.xla.places import holders

#: An instruction, as (computation, instruction).
Place = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Transmission:
    """Something under way: ``links`` are busy for ``seconds``, of which logical collectives have their ``shares``."""

    links: tuple[str, ...]
    seconds: float
    shares: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network as a program uses it that was compiled for ``mesh``; ``collectives`` are its logical ones.

    A link is a physical axis with a direction, such as 'x+'.
    """

    module: Module
    mesh: Mesh
    rates: Rates
    collectives: tuple[LogicalCollective, ...]

    @cached_property
    def places(self) -> Mapping[Place, list[int]]:
        """Which collectives each scheduled instruction belongs to: the fusion or call that holds them, if one does."""
        found: dict[Place, list[int]] = {}
        for index, each in enumerate(self.collectives):
            for computation, name in each.instructions:
                for place in _held(self.module, computation, name):
                    found.setdefault(place, []).append(index)
        return found

    def transmission(self, computation: Computation, instruction: Instruction) -> Transmission:
        """The price of one instruction that communicates, and which links it takes."""
        place = computation.name, instruction.name
        if place not in self._known:
            logical = {index: self.collectives[index] for index in self.places.get(place, ())}
            if instruction.opcode.startswith("collective-permute"):
                self._known[place] = self._permute(computation, instruction, tuple(logical))
            else:
                self._known[place] = self._collective(logical)
        return self._known[place]

    def bound_s(self, index: int) -> dict[str, float]:
        """Lower bound on one execution of a collective by network resource."""
        each = self.collectives[index]
        computation, name = each.instructions[0]
        inside = self.module.computations[computation]
        first = inside.instructions[name]
        if each.kind == "permute" and first.opcode.startswith("collective-permute"):
            return dict(self._route(inside, first)[0].seconds)
        bound = price(each.kind, self.mesh.span(*each.axes)).bound_s(each.bytes)
        return {resource: float(seconds) for resource, seconds in bound.items()}

    @cached_property
    def _known(self) -> dict[Place, Transmission]:
        return {}

    def _collective(self, logical: Mapping[int, LogicalCollective]) -> Transmission:
        first = next(iter(logical.values()))
        group = self.mesh.span(*first.axes)
        payload = sum(each.bytes for each in logical.values())
        seconds = price(first.kind, group).expected_s(
            payload, self.rates.network_efficiency(first.kind), self.rates.collective_start_s
        )
        used = [axis.name for axis, size in zip(group.physical, group.size, strict=True) if size > 1]
        return Transmission(
            links=tuple(f"{name}{way}" for name in used for way in "+-"),
            seconds=float(seconds),
            shares={index: each.bytes / payload for index, each in logical.items()},
        )

    def _permute(self, computation: Computation, instruction: Instruction, logical: tuple[int, ...]) -> Transmission:
        routed, links = self._route(computation, instruction)
        efficiency = self.rates.network_efficiency("permute")
        busy = sum(seconds / efficiency[resource] for resource, seconds in routed.seconds.items())
        seconds = self.rates.collective_start_s + routed.latency_s + busy if links else 0.0
        return Transmission(links=links, seconds=seconds, shares=dict.fromkeys(logical, 1.0 / max(1, len(logical))))

    def _route(self, computation: Computation, instruction: Instruction) -> tuple[Route, tuple[str, ...]]:
        """The pairs of a permute by shortest paths, of which the busiest link decides, and the links."""
        sent = sum(tensor.nbytes for each in computation.operands(instruction) for tensor in each.shape)
        physical = self.mesh.slice.physical_axes
        # Devices of one slice: a permute between slices is no permute in the text.
        places = self.mesh.device_coordinates().reshape(-1, len(physical))
        places = places[(places[:, [axis.kind == "dcn" for axis in physical]] == 0).all(axis=1)]
        pairs = np.array(replica_groups(instruction.attributes, len(places)))
        source, target = places[pairs[:, 0]], places[pairs[:, 1]]
        links = (
            axis.name + way
            for column, axis in enumerate(physical)
            for way in _ways(axis, target[:, column] - source[:, column])
        )
        return route(physical, source, target, sent), tuple(links)


def _ways(axis: PhysicalAxis, moved: npt.NDArray[np.int64]) -> str:
    """The directions of an axis that messages take which move so far along it: '+', '-', both or none."""
    if not moved.any():
        return ""
    if axis.kind != "torus":
        return "+-"
    up, down = (moved % axis.size, -moved % axis.size) if axis.wrapped else (moved, -moved)
    short = np.minimum(up, down) if axis.wrapped else np.abs(moved)
    return "".join(way for way, far in (("+", up), ("-", down)) if ((far == short) & (far > 0)).any())


def _held(module: Module, computation: str, name: str) -> Iterator[Place]:
    held = holders(module, computation)
    if not held:
        yield computation, name
    for outer, holder in held:
        yield from _held(module, outer.name, holder.name)
