"""The simple machine on which a compiled program is run to see what it waits for.

It has one compute stream, which takes the instructions in the order of the text, and the links of the network, on which
transfers take turns. See ``rooftop.xla.schedule``, which hands out what comes of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from rooftop.arrays import Mesh
from rooftop.roofline.rates import Rates
from rooftop.xla.collectives import logical_collectives
from rooftop.xla.costs import is_host_copy, moved_bytes, work
from rooftop.xla.dataflow import rendezvous
from rooftop.xla.hlo import Computation, Instruction, Module
from rooftop.xla.network import Network, Place, Transmission

COMPUTE = "compute"
#: Trips of a loop of which every event is kept; those after them are one event.
DETAILED_TRIPS = 3


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something on the timeline. ``track`` is 'compute', 'hbm' or 'pcie' (copies beside the rest), or a network link.

    On the compute track an instruction computes, or waits (``waits``) for a ``flight``, the number of a transfer; on
    the others a transfer of that number is under way, begun (maybe earlier, if links were busy) at ``issued_s``.
    ``collective`` is its index among the logical ones. ``trips`` tells how often a loop's body runs in one event.
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
    """An asynchronous transfer: its number, when it will have finished, and whose it is."""

    number: int
    finish_s: float
    shares: Mapping[int, float]


class Machine:
    """The state while a program runs: the clock, how long each link is taken, and what is in flight."""

    def __init__(self, module: Module, mesh: Mesh, rates: Rates, estimates: str) -> None:
        self.module, self.rates, self.estimates = module, rates, estimates
        self.collectives = logical_collectives(module, mesh.shape, mesh)
        self.network = Network(module=module, mesh=mesh, rates=rates, collectives=self.collectives)
        count = len(self.collectives)
        self.accounts = {
            (computation.name, instruction.name): 3 + 2 * count + index
            for index, (computation, instruction) in enumerate(
                (each, instruction) for each in scheduled(module) for instruction in each
            )
        }
        # The clock, compute, other waits; prices and waits of every collective; then what each instruction takes, waits
        # for collectives left out. All of it is what a repeated loop multiplies.
        self.sums = np.zeros(3 + 2 * count + len(self.accounts))
        self.first: dict[int, list[float]] = {}
        self.free: dict[str, float] = {}
        self.flights: dict[object, _Flight] = {}
        self.kernels: dict[str, None] = {}
        self.seconds: dict[Place, float] = {}
        self.events: list[Event] = []
        self.detailed, self.started = True, 0

    @property
    def now(self) -> float:
        """The clock."""
        return float(self.sums[0])

    def run(self, computation: Computation) -> None:
        """Every instruction of a computation, in order."""
        for instruction in computation:
            place = computation.name, instruction.name
            if instruction.opcode == "while":
                self._loop(computation, instruction)
            elif instruction.opcode in ("call", "conditional"):
                self.run(_longest(self.module, instruction))
            elif place in self.network.places or instruction.opcode.startswith("collective-permute"):
                self._communicate(computation, instruction)
            elif instruction.opcode.endswith("-start"):
                self._prefetch(instruction, place)
            elif instruction.opcode.endswith("-done") and instruction.opcode != "send-done":
                self._wait(_started(computation, instruction), place)
            else:
                self._compute(computation, instruction)

    def _loop(self, computation: Computation, loop: Instruction) -> None:
        """Trip after trip; once a trip takes as long as the one before, in all that is summed up, so do the rest."""
        body = self.module.computations[loop.called_as("body")]
        trips = self.module.trip_count(computation, loop) or 1
        detailed, before, left = self.detailed, None, (0.0, 0)
        for trip in range(trips):
            start = self.sums.copy()
            if trip == DETAILED_TRIPS:
                left, self.detailed = (self.now, trips - trip), False
            self.run(body)
            spent = self.sums - start
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

    def _compute(self, computation: Computation, instruction: Instruction) -> None:
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

    def _communicate(self, computation: Computation, instruction: Instruction) -> None:
        """A collective that is synchronous, or begins, goes on or ends here."""
        place = computation.name, instruction.name
        if instruction.opcode.endswith("-done"):
            self._wait(_started(computation, instruction), place)
            return
        if instruction.opcode == "fusion" and not self.collectives[self.network.places[place][0]].synchronous:
            # One step of an asynchronous collective: the first begins it, one that calls for it ends it.
            chain = "chain", *self.network.places[place]
            if chain not in self.flights:
                self.flights[chain] = self._begin(self.network.transmission(computation, instruction), place)
            self._compute(computation, instruction)
            fused = self.module.computations[instruction.called[0]]
            if any("AsyncCollectiveDone" in each.attributes for each in fused):
                self._wait(chain, place)
            return
        self.flights[place] = self._begin(self.network.transmission(computation, instruction), place)
        if instruction.opcode != "send" and not instruction.opcode.endswith("-start"):
            self._wait(place, place)

    def _prefetch(self, instruction: Instruction, place: Place) -> None:
        """A copy between HBM and VMEM, or to and from the host."""
        moved = moved_bytes(instruction)
        if is_host_copy(instruction):
            transfer = Transmission(links=("pcie",), seconds=moved / self.rates.pcie_bytes_per_s, shares={})
        else:
            transfer = Transmission(links=("hbm",), seconds=float(self.rates.hbm_s(moved)), shares={})
        if moved:
            self.flights[place] = self._begin(transfer, place)

    def _begin(self, transfer: Transmission, place: Place) -> _Flight:
        start = max([self.now, *(self.free.get(link, 0.0) for link in transfer.links)])
        finish = start + transfer.seconds
        self.free |= dict.fromkeys(transfer.links, finish)
        self.started += 1
        for link in transfer.links:
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


def scheduled(module: Module) -> Iterator[Computation]:
    """The computations whose instructions run one after the other: the entry, bodies of loops and what is called.

    Of the branches of a conditional the longest stands for all.
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


def _longest(module: Module, instruction: Instruction) -> Computation:
    """What a call runs; of the branches of a conditional the longest."""
    return max((module.computations[name] for name in instruction.called), key=lambda each: len(each.instructions))


def _only(shares: Mapping[int, float]) -> int | None:
    """The collective that a transfer is for: the first, if it carries several."""
    return next(iter(shares), None)


def _started(computation: Computation, done: Instruction) -> tuple[str, str]:
    """The instruction that began what ``done`` waits for."""
    source = computation.operands(done)[0]
    while source.opcode == "get-tuple-element":
        source = computation.operands(source)[0]
    if source.opcode == "recv":
        # It waits for what the other slices send at the rendezvous, as this one does.
        meeting = rendezvous(source)
        source = next((each for each in computation if each.opcode == "send" and rendezvous(each) == meeting), source)
    return computation.name, source.name
