"""Exposed communication from the scheduled order: a compiled program run on a simple machine.

The machine has one compute stream, which takes the instructions in the order of the text, and the links of the
network, on which transfers take turns. A synchronous collective is exposed from end to end. An asynchronous one runs
beside what follows its start, and its ``done`` waits until it has finished: that wait is exposed. Compute is priced
with our own named fractions (or with XLA's estimates), collectives with ``rooftop.roofline.collectives``, permutes with
``rooftop.roofline.routing``. Copies between HBM and VMEM run beside the rest as well, and are no communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from rooftop.arrays import Mesh
from rooftop.errors import unknown
from rooftop.hardware import PhysicalAxis
from rooftop.ledger import Collective
from rooftop.roofline.collectives import price
from rooftop.roofline.rates import Rates
from rooftop.roofline.routing import route
from rooftop.xla.compiled import LogicalCollective, holders, logical_collectives
from rooftop.xla.costs import work
from rooftop.xla.groups import replica_groups
from rooftop.xla.hlo import Computation, Instruction, Module

#: Whose estimate of compute: the named fractions of ``rooftop.roofline``, or the compiler's cycles.
ESTIMATES: tuple[str, ...] = ("rooftop", "xla")
_PREFETCH = "hbm"


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """One logical collective on the timeline; durations are of one execution, the mean if there are several.

    ``start_s`` and ``done_s`` are when the first execution begins and when its last byte has arrived. ``price_s`` is
    how long its transfers take, ``exposed_s`` how long the device waits for them (and for links that are busy with
    others, so that it may exceed the price).
    """

    collective: LogicalCollective
    start_s: float
    done_s: float
    price_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """The part of the price that passes beside something else."""
        return max(0.0, self.price_s - self.exposed_s)

    @property
    def ledger_entry(self) -> Collective:
        """One execution as a row of a ledger holds it, with its expected and its exposed seconds."""
        return replace(self.collective.ledger_entry, expected_s=self.price_s, exposed_s=self.exposed_s)


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One execution of a compiled program on one device, in seconds.

    ``total_s`` is ``compute_s`` plus the exposed part of every collective plus ``other_wait_s``: waits for copies from
    HBM and for transfers that belong to no logical collective. ``kernels`` names the hand-written kernels that were
    priced by their arrays alone, which is a lower bound.
    """

    total_s: float
    compute_s: float
    other_wait_s: float
    collectives: tuple[Scheduled, ...]
    kernels: tuple[str, ...]

    @property
    def exposed_s(self) -> float:
        """Seconds in which the device waits for collectives, executions multiplied out."""
        return sum(each.collective.executions * each.exposed_s for each in self.collectives)


def timeline(module: Module, mesh: Mesh, rates: Rates | None = None, *, estimates: str = "rooftop") -> Timeline:
    """The schedule of a compiled program on the mesh that it was compiled for.

    ``rates`` are those of the mesh's chip unless given; ``estimates`` says whose estimate of compute to use, one of
    ``ESTIMATES``. Raises RooftopError for any other name.
    """
    if estimates not in ESTIMATES:
        raise unknown("estimates", estimates, ESTIMATES)
    machine = _Machine(module, mesh, rates or Rates.of(mesh.slice.chip), estimates)
    machine.run(module.computations[module.entry])
    return machine.timeline()


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    """Something that the network does: ``links`` are busy for ``seconds``; ``shares`` of it by logical collective."""

    links: tuple[str, ...]
    seconds: float
    shares: Mapping[int, float]


@dataclass(frozen=True, kw_only=True)
class _Flight:
    """An asynchronous transfer: when it will have finished, and whose it is."""

    finish_s: float
    shares: Mapping[int, float]


class _Machine:
    """The state while a program runs: the clock, how long each link is taken, and what is in flight."""

    def __init__(self, module: Module, mesh: Mesh, rates: Rates, estimates: str) -> None:
        self.module, self.mesh, self.rates, self.estimates = module, mesh, rates, estimates
        self.collectives = logical_collectives(module, mesh.shape)
        self.places = _places(module, self.collectives)
        count = len(self.collectives)
        # The clock, compute, other waits; then prices and waits of every collective: what a repeated loop multiplies.
        self.sums = np.zeros(3 + 2 * count)
        self.first: dict[int, list[float]] = {}
        self.free: dict[str, float] = {}
        self.flights: dict[object, _Flight] = {}
        self.kernels: dict[str, None] = {}
        self.seconds: dict[tuple[str, str], float] = {}
        self.transfers: dict[tuple[str, str], _Transfer] = {}

    def timeline(self) -> Timeline:
        """What has been summed up."""
        count = len(self.collectives)
        prices, waits = self.sums[3 : 3 + count], self.sums[3 + count :]
        scheduled = (
            Scheduled(
                collective=each,
                start_s=min(self.first.get(index, [0.0])),
                done_s=max(self.first.get(index, [0.0])),
                price_s=float(prices[index]) / each.executions,
                exposed_s=float(waits[index]) / each.executions,
            )
            for index, each in enumerate(self.collectives)
        )
        return Timeline(
            total_s=max([float(self.sums[0]), *(flight.finish_s for flight in self.flights.values())]),
            compute_s=float(self.sums[1]),
            other_wait_s=float(self.sums[2]),
            collectives=tuple(scheduled),
            kernels=tuple(self.kernels),
        )

    def run(self, computation: Computation) -> None:
        """Every instruction of a computation, in order."""
        for instruction in computation:
            place = computation.name, instruction.name
            if instruction.opcode == "while":
                self._loop(computation, instruction)
            elif instruction.opcode in ("call", "conditional"):
                # Of the branches of a conditional the longest stands for all.
                called = [self.module.computations[name] for name in instruction.called]
                self.run(max(called, key=lambda each: len(each.instructions)))
            elif place in self.places or instruction.opcode.startswith("collective-permute"):
                self._communicate(computation, instruction)
            elif instruction.opcode.endswith("-start"):
                self._prefetch(instruction, place)
            elif instruction.opcode.endswith("-done"):
                self._wait(_started(computation, instruction))
            else:
                self._compute(computation, instruction)

    def _loop(self, computation: Computation, loop: Instruction) -> None:
        """Trip after trip; once a trip takes as long as the one before, in all that is summed up, so do the rest."""
        body = self.module.computations[loop.called_as("body")]
        trips = self.module.trip_count(computation, loop) or 1
        before = None
        for trip in range(trips):
            start = self.sums.copy()
            self.run(body)
            spent = self.sums - start
            if before is not None and np.allclose(spent, before, rtol=1e-9, atol=0.0):
                rest = (trips - trip - 1) * spent
                self.sums += rest
                self.free = {link: until + float(rest[0]) for link, until in self.free.items()}
                return
            before = spent

    def _compute(self, computation: Computation, instruction: Instruction) -> None:
        place = computation.name, instruction.name
        if place not in self.seconds:
            done = work(self.module, computation, instruction)
            if done.kernel:
                self.kernels[instruction.name] = None
            ours = self.estimates == "rooftop"
            self.seconds[place] = done.expected_s(self.rates) if ours else done.estimated_s(self.rates)
        self.sums[:2] += self.seconds[place]

    def _communicate(self, computation: Computation, instruction: Instruction) -> None:
        """A collective that is synchronous, or begins, goes on or ends here."""
        place = computation.name, instruction.name
        if instruction.opcode.endswith("-done"):
            self._wait(_started(computation, instruction))
            return
        if instruction.opcode == "fusion" and not self.collectives[self.places[place][0]].synchronous:
            # One step of an asynchronous collective: the first begins it, one that calls for it ends it.
            chain = "chain", *self.places[place]
            if chain not in self.flights:
                self.flights[chain] = self._begin(self._transfer(computation, instruction))
            self._compute(computation, instruction)
            fused = self.module.computations[instruction.called[0]]
            if any("AsyncCollectiveDone" in each.attributes for each in fused):
                self._wait(chain)
            return
        self.flights[place] = self._begin(self._transfer(computation, instruction))
        if not instruction.opcode.endswith("-start"):
            self._wait(place)

    def _prefetch(self, instruction: Instruction, place: tuple[str, str]) -> None:
        """A copy between HBM and VMEM. One that an earlier program has begun is there already."""
        if "cross_program_prefetch_index" in instruction.attributes:
            return
        moved = min((tensor.nbytes for tensor in instruction.shape[:2]), default=0.0)
        seconds = float(self.rates.hbm_s(moved))
        self.flights[place] = self._begin(_Transfer(links=(_PREFETCH,), seconds=seconds, shares={}))

    def _begin(self, transfer: _Transfer) -> _Flight:
        now = float(self.sums[0])
        start = max([now, *(self.free.get(link, 0.0) for link in transfer.links)])
        finish = start + transfer.seconds
        self.free |= dict.fromkeys(transfer.links, finish)
        for index, share in transfer.shares.items():
            self.sums[3 + index] += share * transfer.seconds
            seen = self.first.setdefault(index, [])
            if len(seen) < 2 * max(1, self.collectives[index].hops):
                seen += [start, finish]
        return _Flight(finish_s=finish, shares=transfer.shares)

    def _wait(self, key: object) -> None:
        flight = self.flights.pop(key, None)
        if flight is None:
            return
        waited = max(0.0, flight.finish_s - float(self.sums[0]))
        self.sums[0] += waited
        if not flight.shares:
            self.sums[2] += waited
        for index, share in flight.shares.items():
            self.sums[3 + len(self.collectives) + index] += share * waited

    def _transfer(self, computation: Computation, instruction: Instruction) -> _Transfer:
        """The price of one instruction that communicates, and which links it takes."""
        place = computation.name, instruction.name
        if place not in self.transfers:
            logical = {index: self.collectives[index] for index in self.places.get(place, ())}
            if instruction.opcode.startswith("collective-permute"):
                self.transfers[place] = self._permute(computation, instruction, tuple(logical))
            else:
                self.transfers[place] = self._collective(logical)
        return self.transfers[place]

    def _collective(self, logical: Mapping[int, LogicalCollective]) -> _Transfer:
        first = next(iter(logical.values()))
        group = self.mesh.span(*first.axes)
        payload = sum(each.bytes for each in logical.values())
        seconds = price(first.kind, group).expected_s(
            payload, self.rates.network_efficiency(first.kind), self.rates.collective_start_s
        )
        used = [axis.name for axis, size in zip(group.physical, group.size, strict=True) if size > 1]
        return _Transfer(
            links=tuple(f"{name}{way}" for name in used for way in "+-"),
            seconds=float(seconds),
            shares={index: each.bytes / payload for index, each in logical.items()},
        )

    def _permute(self, computation: Computation, instruction: Instruction, logical: tuple[int, ...]) -> _Transfer:
        """Pairs by shortest paths; the busiest link decides."""
        sent = sum(tensor.nbytes for each in computation.operands(instruction) for tensor in each.shape)
        physical = self.mesh.slice.physical_axes
        places = self.mesh.device_coordinates().reshape(-1, len(physical))
        pairs = np.array(replica_groups(instruction.attributes, len(places)))
        source, target = places[pairs[:, 0]], places[pairs[:, 1]]
        routed = route(physical, source, target, sent)
        links = [
            axis.name + way
            for column, axis in enumerate(physical)
            for way in _ways(axis, target[:, column] - source[:, column])
        ]
        efficiency = self.rates.network_efficiency("permute")
        busy = sum(seconds / efficiency[resource] for resource, seconds in routed.seconds.items())
        seconds = self.rates.collective_start_s + routed.latency_s + busy if links else 0.0
        shares = dict.fromkeys(logical, 1.0 / max(1, len(logical)))
        return _Transfer(links=tuple(links), seconds=seconds, shares=shares)


def _ways(axis: PhysicalAxis, moved: npt.NDArray[np.int64]) -> str:
    """The directions of an axis that messages take which move so far along it: '+', '-', both or none."""
    if not moved.any():
        return ""
    if axis.kind != "torus":
        return "+-"
    up, down = (moved % axis.size, -moved % axis.size) if axis.wrapped else (moved, -moved)
    short = np.minimum(up, down) if axis.wrapped else np.abs(moved)
    return "".join(way for way, far in (("+", up), ("-", down)) if ((far == short) & (far > 0)).any())


def _started(computation: Computation, done: Instruction) -> tuple[str, str]:
    """The instruction that began what ``done`` waits for."""
    source = computation.operands(done)[0]
    while source.opcode == "get-tuple-element":
        source = computation.operands(source)[0]
    return computation.name, source.name


def _places(module: Module, collectives: tuple[LogicalCollective, ...]) -> dict[tuple[str, str], list[int]]:
    """Which collectives each scheduled instruction belongs to: the fusion or call that holds them, if one does."""
    found: dict[tuple[str, str], list[int]] = {}
    for index, each in enumerate(collectives):
        for computation, name in each.instructions:
            for place in _held(module, computation, name):
                found.setdefault(place, []).append(index)
    return found


def _held(module: Module, computation: str, name: str) -> Iterator[tuple[str, str]]:
    held = holders(module, computation)
    if not held:
        yield computation, name
    for outer, holder in held:
        yield from _held(module, outer.name, holder.name)
