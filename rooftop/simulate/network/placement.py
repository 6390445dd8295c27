"""Arrays that move to, from and between single chips and hosts: no closed form, so the links are simulated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from rooftop.algebra.einsums import Strategy
from rooftop.algebra.pricing import Cost, Prices
from rooftop.algebra.resharding import reshard
from rooftop.algebra.steps import Step, shard_numbers
from rooftop.arrays import ShardedArray
from rooftop.core.errors import RooftopError
from rooftop.simulate.network.torus import Floats, NetworkRun, Torus, gather, run, send


def move(source: ShardedArray, target: ShardedArray, prices: Prices) -> Strategy:
    """Steps that take an array from one place (the mesh, the hosts' DRAM, one chip) to another.

    ``host_transfer`` is over PCIe, all devices at once; ``gather_to_chip``, ``scatter_from_chip`` and ``send`` go over
    ICI by shortest paths. Times are simulated link by link, hops included; the bound of a send takes all its paths.

    Raises RooftopError for a move that is none of these, or a chip that is not in the slice.
    """
    steps: list[Step] = []
    costs: list[Cost] = []
    for step, cost in _steps(source, target, prices):
        steps.append(step)
        costs.append(cost)
    memory = max(_held_bytes(array, prices) for array in (source, target) if array.at != "host")
    return Strategy(steps=tuple(steps), costs=tuple(costs), memory_bytes=memory)


def _steps(source: ShardedArray, target: ShardedArray, prices: Prices) -> Iterator[tuple[Step, Cost]]:
    array = source
    if source.at == "host":
        array = _at(source, "")
        yield _host(source, array, prices)
    landed = _at(target, "") if target.at == "host" else target
    if array.at != landed.at:
        yield _network(array, landed, prices)
    elif not isinstance(array.at, tuple):
        for step in reshard(array, landed, prices):
            yield step, prices.cost(step)
    if target.at == "host":
        yield _host(landed, target, prices)


def _host(source: ShardedArray, target: ShardedArray, prices: Prices) -> tuple[Step, Cost]:
    moved = prices.bytes(_at(source, ""))
    seconds = moved / prices.rates.pcie_bytes_per_s
    cost = Cost(bytes=moved, resources={"pcie": seconds}, time_s=seconds)
    return Step(op="host_transfer", inputs=(source,), output=target), cost


def _network(source: ShardedArray, target: ShardedArray, prices: Prices) -> tuple[Step, Cost]:
    torus = Torus.of(prices.mesh.slice.physical_axes)
    whole = source.one_copy_bytes(prices.dims)
    if isinstance(target.at, tuple) and isinstance(source.at, tuple):
        step, ends = Step(op="send", inputs=(source,), output=target), (torus.chip(source.at), torus.chip(target.at))
        cost = _cost(whole, run(torus, send(torus, *ends, whole)), torus)
        if prices.kind == "bound" and ends[0] != ends[1]:
            # Disjoint paths lead through all links of the chip with fewer of them; the last byte then has its hops.
            links = min(sum(to[chip] >= 0 for axis in torus.neighbours for to in axis) for chip in ends)
            busy_s = whole / (links * torus.bytes_per_s)
            cost = replace(cost, resources={"ici": busy_s}, time_s=busy_s + cost.latency_s)
        return step, cost
    if isinstance(target.at, tuple):
        op, spread, place = "gather_to_chip", source, target.at
    else:
        assert isinstance(source.at, tuple), "one of the two is on one chip"
        op, spread, place = "scatter_from_chip", target, source.at
        if spread.replication(prices.mesh.shape) > 1:
            raise RooftopError("output", str(target), "an array without copies: scatter it over all axes, then gather")
    if spread.unreduced:
        raise RooftopError("array", str(spread), "an array without partial sums, to move to or from one chip")
    # A scatter is the messages of a gather the other way.
    chip = torus.chip(place)
    result = run(torus, gather(torus, chip, _shares(spread, chip, torus, prices)))
    return Step(op=op, inputs=(source,), output=target), _cost(whole, result, torus)


def _cost(moved: float, result: NetworkRun, torus: Torus) -> Cost:
    busy = {"ici": float(result.busy_s.max())}
    return Cost(bytes=moved, resources=busy, latency_s=result.hops * torus.hop_s, time_s=result.seconds)


def _shares(array: ShardedArray, chip: int, torus: Torus, prices: Prices) -> Floats:
    """Bytes that each chip contributes, [chips]: copies share the work, and what the chip has itself stays."""
    mesh = prices.mesh
    numbers = shard_numbers(array, mesh.shape)
    places = mesh.device_coordinates().reshape(len(numbers), -1)[:, : len(torus.sizes)]
    chips = np.ravel_multi_index(tuple(places.T), torus.sizes)
    missing = ~np.isin(numbers, numbers[chips == chip])
    shares = np.zeros(torus.chips)
    np.add.at(shares, chips, missing * prices.bytes(array) / array.replication(mesh.shape))
    return shares


def _held_bytes(array: ShardedArray, prices: Prices) -> float:
    return array.one_copy_bytes(prices.dims) if isinstance(array.at, tuple) else prices.bytes(_at(array, ""))


def _at(array: ShardedArray, place: str) -> ShardedArray:
    return replace(array, at=place)
