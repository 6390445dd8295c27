"""The simple machine that executes a compiled program, to find its waits.

It has one compute stream, which executes the instructions in the order of the text, and the links of the network, which
transfers use one after the other. ``rooftop.compiler.machine.schedule`` returns the results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rooftop.arrays import Mesh
from rooftop.compiler.collectives.logical import LogicalCollective, logical_collectives
from rooftop.compiler.hlo.costs import is_host_copy, moved_bytes, work
from rooftop.compiler.hlo.dataflow import ends, rendezvous
from rooftop.compiler.hlo.groups import replica_groups
from rooftop.compiler.hlo.places import outermost
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.core.errors import RooftopError
from rooftop.hardware import PhysicalAxis
from rooftop.roofline.collectives import price
from rooftop.roofline.rates import Rates
from rooftop.roofline.routing import Route, route

COMPUTE = "compute"
#: Trips of a loop whose events are recorded; the remaining trips are one event.
DETAILED_TRIPS = 3
#: Trips of a loop that are executed if none is like the one before: the others take as long as these in the mean.
_MOST_TRIPS = 1000
#: Instructions that are executed, in all calls and trips. Real programs have some hundred thousand.
MOST_STEPS = 2_000_000


@dataclass(frozen=True, kw_only=True)
class Event:
    """An event on the timeline. ``track`` is 'compute', 'hbm' or 'pcie' (asynchronous copies), or a network link.

    On the compute track an instruction computes, or waits (``waits``) for a ``flight``, the number of a transfer. On
    other tracks a transfer of that number is in flight, issued at ``issued_s`` (earlier than its start if links were
    busy). ``collective`` is its index among the logical ones. ``trips`` is the number of trips of a loop in one event.
    """

    track: str
    place: Place
    start_s: float
    end_s: float
    waits: bool = False
    flight: int | None = None
    issued_s: float = 0.0
    collective: int | None = None
    trips: int = 0


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """An asynchronous transfer: its number, the time of its completion, and the shares of its collectives."""

    number: int
    finish_s: float
    shares: Mapping[int, float]


class Machine:
    """The state during execution: the clock, the time at which each link is free, and transfers in flight."""

    def __init__(self, module: Module, mesh: Mesh, rates: Rates, estimates: str) -> None:
        self.module, self.rates, self.estimates = module, rates, estimates
        self.collectives = logical_collectives(module, mesh.shape, mesh)
        self.network = Network(module=module, mesh=mesh, rates=rates, collectives=self.collectives)
        count = len(self.collectives)
        self.accounts = {
            (computation.name, instruction.name): 3 + 2 * count + index
            for index, (computation, instruction) in enumerate(
                (computation, instruction) for computation in scheduled(module) for instruction in computation
            )
        }
        # The clock, compute, other waits; prices and waits of every collective; then the time of each instruction
        # without waits for collectives. A repeated loop multiplies all of it.
        self.sums = np.zeros(3 + 2 * count + len(self.accounts))
        self.first: dict[int, list[float]] = {}
        self.free: dict[str, float] = {}
        self.flights: dict[object, _Flight] = {}
        self.kernels: dict[str, None] = {}
        self.seconds: dict[Place, float] = {}
        self.events: list[Event] = []
        self.detailed, self.started, self.steps = True, 0, 0

    @property
    def now(self) -> float:
        """The clock."""
        return float(self.sums[0])

    def _work(self, steps: int) -> None:
        """Count the work of the machine. Raises RooftopError if it is too much."""
        self.steps += steps
        if self.steps > MOST_STEPS:
            raise RooftopError("hlo", f"more than {MOST_STEPS:,} instructions to execute", "shorter loops and calls")

    def run(self, computation: HloComputation) -> None:
        """Execute every instruction of a computation, in order."""
        self._work(len(computation.instructions))
        for instruction in computation:
            place = computation.name, instruction.name
            if instruction.opcode == "while":
                self._loop(computation, instruction)
            elif instruction.opcode == "call":
                self.run(_longest(self.module, instruction))
            elif instruction.opcode == "conditional":
                self._branch(instruction)
            elif place in self.network.places or instruction.opcode.startswith("collective-permute"):
                self._communicate(computation, instruction)
            elif instruction.opcode.endswith("-start"):
                self._prefetch(computation, instruction, place)
            elif instruction.opcode.endswith("-done") and instruction.opcode != "send-done":
                self._wait(_started(self.module, computation, instruction), place)
            else:
                self._compute(computation, instruction)

    def _branch(self, conditional: Instruction) -> None:
        """Execute the longest branch of a conditional, for the share of its time that the mean execution lasts."""
        branch = _longest(self.module, conditional)
        executed, share = map(float, self.module.taken(conditional, branch))
        self._work(self.sums.size // 256)
        start, events, free = self.sums.copy(), len(self.events), dict(self.free)
        self.run(branch)
        if executed == share == 1:
            return
        begin = float(start[0])

        def shortened(at_s: float) -> float:
            return begin + share * (at_s - begin)

        shares = np.full(len(self.sums), share)
        shares[3 : 3 + len(self.collectives)] = executed
        self.sums = start + shares * (self.sums - start)
        self.free = {link: until if until == free.get(link) else shortened(until) for link, until in self.free.items()}
        self.events[events:] = [
            replace(
                event,
                start_s=shortened(event.start_s),
                end_s=shortened(event.end_s),
                issued_s=shortened(event.issued_s),
            )
            for event in self.events[events:]
        ]

    def _loop(self, computation: HloComputation, loop: Instruction) -> None:
        """Execute trip after trip. Once all sums of a trip equal those of the trip before, multiply instead.

        Of a loop whose mean trips its program declares, one trip is executed and multiplied.
        """
        body = self.module.computations[loop.called_as("body")]
        counted, declared = self.module.trip_count(computation, loop), self.module.declared_trips(loop)
        if counted is None and declared is not None:
            start = self.sums.copy()
            self.run(body)
            rest, end = float(declared - 1) * (self.sums - start), self.now
            self.sums += rest
            self.free = {link: until + float(rest[0]) for link, until in self.free.items()}
            if declared > 1:
                whole = computation.name, loop.name
                more = max(1, round(declared - 1))
                self._record(Event(track=COMPUTE, place=whole, start_s=end, end_s=self.now, trips=more))
            return
        trips, first = counted or 1, self.sums.copy()
        detailed, before, left = self.detailed, None, (0.0, 0)
        for trip in range(trips):
            # The sums are as many as the program's instructions.
            self._work(self.sums.size // 256)
            start = self.sums.copy()
            if trip == DETAILED_TRIPS:
                left, self.detailed = (self.now, trips - trip), False
            self.run(body)
            spent = self.sums - start
            if trip == _MOST_TRIPS:
                # These trips take turns: the rest goes on like all of them.
                spent = (self.sums - first) / (trip + 1)
                before = spent
            if before is not None and np.allclose(spent, before, rtol=1e-9, atol=0.0):
                rest = (trips - trip - 1) * spent
                left = left if left[1] else (self.now, trips - trip - 1)
                self.sums += rest
                self.free = {link: until + float(rest[0]) for link, until in self.free.items()}
                break
            before = spent
        self.detailed = detailed
        if left[1]:
            whole = computation.name, loop.name
            self._record(Event(track=COMPUTE, place=whole, start_s=left[0], end_s=self.now, trips=left[1]))

    def _compute(self, computation: HloComputation, instruction: Instruction) -> None:
        place = computation.name, instruction.name
        if place not in self.seconds:
            done = work(self.module, computation, instruction)
            if done.kernel and done.kernel.flops is None:
                self.kernels[instruction.name] = None
            ours = self.estimates == "rooftop"
            self.seconds[place] = done.expected_s(self.rates) if ours else done.estimated_s(self.rates)
        seconds = self.seconds[place]
        if seconds:
            self._record(Event(track=COMPUTE, place=place, start_s=self.now, end_s=self.now + seconds))
            self.sums[:2] += seconds
            self.sums[self.accounts[place]] += seconds

    def _communicate(self, computation: HloComputation, instruction: Instruction) -> None:
        """Execute an instruction of a collective: a synchronous one, or a start, step or end."""
        place = computation.name, instruction.name
        if instruction.opcode.endswith("-done"):
            self._wait(_started(self.module, computation, instruction), place)
            return
        if instruction.opcode == "fusion" and not self.collectives[self.network.places[place][0]].synchronous:
            # A step of an asynchronous collective: the first starts it, the one with AsyncCollectiveDone ends it.
            chain = "chain", *self.network.places[place]
            if chain not in self.flights:
                self.flights[chain] = self._begin(self.network.transmission(computation, instruction), place)
            self._compute(computation, instruction)
            fused = self.module.computations[instruction.called[0]]
            if any("AsyncCollectiveDone" in step.attributes for step in fused):
                self._wait(chain, place)
            return
        self.flights[place] = self._begin(self.network.transmission(computation, instruction), place)
        if instruction.opcode != "send" and not instruction.opcode.endswith("-start"):
            self._wait(place, place)

    def _prefetch(self, computation: HloComputation, instruction: Instruction, place: Place) -> None:
        """A copy between HBM and VMEM, to and from the host, or next to a GPU's kernels."""
        moved = moved_bytes(self.module, computation, instruction)
        if is_host_copy(instruction):
            transfer = Transmission(links=("pcie",), seconds=moved / self.rates.pcie_bytes_per_s, shares={})
        else:
            transfer = Transmission(links=("hbm",), seconds=float(self.rates.hbm_s(moved)), shares={})
        if moved:
            self.flights[place] = self._begin(transfer, place)

    def _begin(self, transfer: Transmission, place: Place) -> _Flight:
        busy = [until for link, until in self.free.items() if any(_share(link, own) for own in transfer.links)]
        start = max([self.now, *busy])
        finish = start + transfer.seconds
        self.free |= dict.fromkeys(transfer.links, finish)
        self.started += 1
        for link in dict.fromkeys(link.partition("/")[0] for link in transfer.links):
            self._record(
                Event(
                    track=link,
                    place=place,
                    start_s=start,
                    end_s=finish,
                    flight=self.started,
                    issued_s=self.now,
                    collective=_only(transfer.shares),
                )
            )
        for index, share in transfer.shares.items():
            self.sums[3 + index] += share * transfer.seconds
            seen = self.first.setdefault(index, [])
            if len(seen) < 2 * max(1, self.collectives[index].hops):
                seen += [start, finish]
        return _Flight(number=self.started, finish_s=finish, shares=transfer.shares)

    def _wait(self, key: object, place: Place) -> None:
        flight = self.flights.pop(key, None)
        if flight is None:
            return
        waited = max(0.0, flight.finish_s - self.now)
        self._record(
            Event(
                track=COMPUTE,
                place=place,
                start_s=self.now,
                end_s=self.now + waited,
                waits=True,
                flight=flight.number,
                collective=_only(flight.shares),
            )
        )
        self.sums[0] += waited
        if not flight.shares:
            self.sums[2] += waited
            self.sums[self.accounts[place]] += waited
        for index, share in flight.shares.items():
            self.sums[3 + len(self.collectives) + index] += share * waited

    def _record(self, event: Event) -> None:
        if self.detailed:
            self.events.append(event)


def scheduled(module: Module) -> Iterator[HloComputation]:
    """Yield the computations whose instructions run in sequence: the entry, bodies of loops and called computations.

    The longest branch of a conditional stands for all branches.
    """
    seen, left = set[str](), [module.entry]
    while left:
        name = left.pop(0)
        if name in seen:
            continue
        seen.add(name)
        yield module.computations[name]
        for instruction in module.computations[name]:
            if instruction.opcode == "while":
                left.append(instruction.called_as("body"))
            elif instruction.opcode in ("call", "conditional"):
                left.append(_longest(module, instruction).name)


def _longest(module: Module, instruction: Instruction) -> HloComputation:
    """The computation of a call; for a conditional, the longest branch."""
    return max((module.computations[name] for name in instruction.called), key=lambda branch: len(branch.instructions))


def _only(shares: Mapping[int, float]) -> int | None:
    """The collective of a transfer: the first, if it has several."""
    return next(iter(shares), None)


def _started(module: Module, computation: HloComputation, done: Instruction) -> tuple[str, str]:
    """The instruction that started the operation of ``done``."""
    source = computation.operands(done)[0]
    while source.opcode == "get-tuple-element":
        source = computation.operands(source)[0]
    if source.opcode == "recv":
        # It waits for the data that the other slices send at the rendezvous, as this one does.
        meeting = rendezvous(source)
        source = next(iter(ends(module, computation, "send").get(meeting, ())), source)
    return computation.name, source.name


#: An instruction, as (computation, instruction).
Place = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Transmission:
    """A transfer: ``links`` are busy for ``seconds``, which its logical collectives share by ``shares``.

    'x+' is all links of an axis in a direction, and 'x+/3' the one of device 3 alone.
    """

    links: tuple[str, ...]
    seconds: float
    shares: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class Network:
    """The network of a program compiled for ``mesh``; ``collectives`` are its logical ones.

    A link is a physical axis with a direction, such as 'x+'.
    """

    module: Module
    mesh: Mesh
    rates: Rates
    collectives: tuple[LogicalCollective, ...]

    @cached_property
    def places(self) -> Mapping[Place, list[int]]:
        """Indices of the collectives of each scheduled instruction, or of the fusion or call around it."""
        by_place: dict[Place, list[int]] = {}
        for index, collective in enumerate(self.collectives):
            for computation, name in collective.instructions:
                for place in outermost(self.module, computation, name):
                    by_place.setdefault(place, []).append(index)
        return by_place

    def transmission(self, computation: HloComputation, instruction: Instruction) -> Transmission:
        """The price of one instruction that communicates, and its links."""
        place = computation.name, instruction.name
        if place not in self._known:
            logical = {index: self.collectives[index] for index in self.places.get(place, ())}
            if instruction.opcode.startswith("collective-permute"):
                self._known[place] = self._permute(computation, instruction, tuple(logical))
            else:
                self._known[place] = self._collective(logical, place)
        return self._known[place]

    def bound_s(self, index: int) -> dict[str, float]:
        """Lower bound on one execution of a collective by network resource."""
        collective = self.collectives[index]
        computation, name = collective.instructions[0]
        inside = self.module.computations[computation]
        first = inside.instructions[name]
        if collective.kind == "permute" and first.opcode.startswith("collective-permute"):
            return dict(self._route(inside, first)[0].seconds)
        bound = price(collective.kind, self.mesh.span(*collective.axes)).bound_s(collective.bytes)
        return {resource: float(seconds) for resource, seconds in bound.items()}

    @cached_property
    def _known(self) -> dict[Place, Transmission]:
        return {}

    def _collective(self, logical: Mapping[int, LogicalCollective], place: Place) -> Transmission:
        """The price of collectives, or of the step of one within or between slices that is at a place."""
        first = next(iter(logical.values()))
        kind, group = first.kind, self.mesh.span(*first.axes)
        physical = group.physical
        if first.between is not None:
            within = dict(first.steps).get(place)
            kind = first.between if within is None else within
            physical = tuple(axis for axis in physical if (axis.kind == "dcn") == (within is None))
        payload = sum(collective.bytes for collective in logical.values())
        seconds = (
            price(kind, group).over({axis.resource for axis in physical}).expected_s(payload, self.rates.network(kind))
        )
        used = [axis.name for axis, size in zip(group.physical, group.size, strict=True) if size > 1]
        return Transmission(
            links=tuple(f"{axis.name}{way}" for axis in physical if axis.name in used for way in "+-"),
            seconds=float(seconds),
            shares={index: collective.bytes / payload for index, collective in logical.items()},
        )

    def _permute(self, computation: HloComputation, instruction: Instruction, logical: tuple[int, ...]) -> Transmission:
        routed, links = self._route(computation, instruction)
        network = self.rates.network("permute")
        start_s, share = network.at(None)
        busy = sum(seconds / float(share[resource]) for resource, seconds in routed.seconds.items())
        seconds = float(start_s) + network.within.hops * routed.latency_s + busy if links else 0.0
        return Transmission(links=links, seconds=seconds, shares=dict.fromkeys(logical, 1.0 / max(1, len(logical))))

    def _route(self, computation: HloComputation, instruction: Instruction) -> tuple[Route, tuple[str, ...]]:
        """The route of a permute by shortest paths, whose busiest link determines its time, and its links."""
        sent = sum(tensor.nbytes for operand in computation.operands(instruction) for tensor in operand.shape)
        physical = self.mesh.slice.physical_axes
        places = self.mesh.device_coordinates().reshape(-1, len(physical))
        if self.mesh.slice.num_slices > 1:
            # Devices of one slice: the text has no permutes between slices.
            places = places[(places[:, [axis.kind == "dcn" for axis in physical]] == 0).all(axis=1)]
        pairs = np.array(replica_groups(instruction.attributes, len(places)))
        source, target = places[pairs[:, 0]], places[pairs[:, 1]]
        links = tuple(
            axis.name + way
            for column, axis in enumerate(physical)
            for way in _ways(axis, target[:, column] - source[:, column])
        )
        return route(physical, source, target, sent), _of_neighbours(physical, places, pairs) or links


def _ways(axis: PhysicalAxis, moved: npt.NDArray[np.int64]) -> str:
    """The directions of an axis that messages take which move by ``moved`` along it: '+', '-', both or none."""
    if not moved.any():
        return ""
    if axis.kind != "torus":
        return "+-"
    up, down = (moved % axis.size, -moved % axis.size) if axis.wrapped else (moved, -moved)
    short = np.minimum(up, down) if axis.wrapped else np.abs(moved)
    return "".join(way for way, far in (("+", up), ("-", down)) if ((far == short) & (far > 0)).any())


def _share(one: str, other: str) -> bool:
    """True if two names mean a link in common."""
    (axis, _, own), (other_axis, _, others) = one.partition("/"), other.partition("/")
    return axis == other_axis and (own == others or not own or not others)


def _of_neighbours(
    physical: Sequence[PhysicalAxis], places: npt.NDArray[np.int64], pairs: npt.NDArray[np.int64]
) -> tuple[str, ...]:
    """The links of the first group of a permute in which all send to neighbours on a torus; else none.

    All groups are alike. A ring through several axes has links of its own in either direction, though both use each
    axis in both.
    """
    targets, group = dict(pairs.tolist()), [0]
    while (after := targets.get(group[-1])) is not None and after != group[0] and len(group) <= len(targets):
        group.append(after)
    links = []
    for device in group:
        if device not in targets:
            continue
        moved = places[targets[device]] - places[device]
        (columns,) = np.nonzero(moved)
        if len(columns) != 1:
            return ()
        axis, step = physical[columns[0]], int(moved[columns[0]])
        wraps = axis.wrapped and axis.size > 2 and abs(step) == axis.size - 1
        if axis.kind != "torus" or not (abs(step) == 1 or wraps):
            return ()
        links.append(f"{axis.name}{'+' if (step > 0) != wraps else '-'}/{device}")
    return tuple(links)
