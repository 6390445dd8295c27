"""Exposed communication from the scheduled order: a compiled program executed on a simple machine.

The machine (``run``) has one compute stream, which executes the instructions in the order of the text, and the links of
the network, which transfers use one after the other. A synchronous collective is fully exposed. An asynchronous one
overlaps the instructions after its start, and its ``done`` waits until it has finished: that wait is exposed. Compute
is priced with our own named fractions (or with XLA's estimates), collectives with ``rooftop.roofline.collectives``,
permutes with ``rooftop.roofline.routing``. Copies between HBM and VMEM, and to and from the host, are asynchronous too,
and do not count as communication.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from rooftop.arrays import Mesh
from rooftop.compiler.collectives.logical import LogicalCollective
from rooftop.compiler.hlo.text import Module
from rooftop.compiler.machine.run import Event, Machine, Place
from rooftop.core.errors import unknown
from rooftop.core.ledger import Collective
from rooftop.roofline.rates import Rates

#: Estimates of compute: by the named fractions of ``rooftop.roofline``, or the compiler's cycles.
ESTIMATES: tuple[str, ...] = ("rooftop", "xla")


@dataclass(frozen=True, kw_only=True)
class Scheduled:
    """One logical collective on the timeline; durations are of one execution, the mean if there are several.

    The first execution begins at ``start_s``, and its last byte arrives at ``done_s``. ``price_s`` is the duration of
    its transfers. The device waits ``exposed_s`` for them (and for links that are busy with other transfers, so it may
    exceed the price). ``time_s`` is the bound by network resource.
    """

    collective: LogicalCollective
    start_s: float
    done_s: float
    price_s: float
    exposed_s: float
    time_s: Mapping[str, float]

    def by_resource(self, seconds: float) -> dict[str, float]:
        """``seconds`` of this collective on each network resource, in proportion to the bounds there."""
        total = sum(self.time_s.values())
        return {name: seconds * bound / total for name, bound in self.time_s.items() if bound}

    @property
    def hidden_s(self) -> float:
        """The part of the price that overlaps other work."""
        return max(0.0, self.price_s - self.exposed_s)

    @property
    def ledger_entry(self) -> Collective:
        """One execution as an entry of a ledger row, with its expected and its exposed seconds."""
        entry = self.collective.ledger_entry
        return replace(entry, time_s=self.time_s, expected_s=self.price_s, exposed_s=self.exposed_s)


@dataclass(frozen=True, kw_only=True)
class ScheduleTimeline:
    """One execution of a compiled program on one device, in seconds.

    ``total_s`` is ``compute_s`` plus the exposed part of every collective plus ``other_wait_s``: waits for copies from
    HBM and for transfers that belong to no logical collective. ``kernels`` names the hand-written kernels that declare
    no FLOPs; their price counts arrays only, which is a lower bound. ``spent_s`` is the time of each instruction over
    all its executions, without waits for collectives. ``events`` are those of the timeline, with the first trips of
    loops.
    """

    total_s: float
    compute_s: float
    other_wait_s: float
    collectives: tuple[Scheduled, ...]
    kernels: tuple[str, ...]
    spent_s: Mapping[Place, float]
    events: tuple[Event, ...]

    @property
    def exposed_s(self) -> float:
        """Seconds in which the device waits for collectives, in all executions."""
        return sum(entry.collective.executions * entry.exposed_s for entry in self.collectives)


def timeline(module: Module, mesh: Mesh, rates: Rates | None = None, *, estimates: str = "rooftop") -> ScheduleTimeline:
    """The schedule of a compiled program on the mesh that it was compiled for.

    ``rates`` are by default those of the mesh's chip; ``estimates`` is one of ``ESTIMATES``. Raises RooftopError for
    any other name.
    """
    if estimates not in ESTIMATES:
        raise unknown("estimates", estimates, ESTIMATES)
    machine = Machine(module, mesh, rates or Rates.of(mesh.slice.chip), estimates)
    machine.run(module.computations[module.entry])
    return _timeline(machine)


def _timeline(machine: Machine) -> ScheduleTimeline:
    """The results of an executed machine."""
    count = len(machine.collectives)
    prices, waits = machine.sums[3 : 3 + count], machine.sums[3 + count : 3 + 2 * count]
    scheduled = (
        Scheduled(
            collective=collective,
            start_s=min(machine.first.get(index, [0.0])),
            done_s=max(machine.first.get(index, [0.0])),
            price_s=float(prices[index]) / collective.executions,
            exposed_s=float(waits[index]) / collective.executions,
            time_s=machine.network.bound_s(index),
        )
        for index, collective in enumerate(machine.collectives)
    )
    return ScheduleTimeline(
        total_s=max([machine.now, *(flight.finish_s for flight in machine.flights.values())]),
        compute_s=float(machine.sums[1]),
        other_wait_s=float(machine.sums[2]),
        collectives=tuple(scheduled),
        kernels=tuple(machine.kernels),
        spent_s={
            place: float(machine.sums[account]) for place, account in machine.accounts.items() if machine.sums[account]
        },
        events=tuple(machine.events),
    )
