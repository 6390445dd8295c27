"""Collectives between slices: what XLA:TPU hands to the hosts, which talk over the data-centre network.

Such a collective is a ``send`` and a ``recv`` of one rendezvous. It names devices as the runtime numbers them (100,000
times the slice, from one, plus the place in the slice: cores first, then x, y, z), while collectives within a slice
number the partitions of that slice alone, in mesh order. A collective over both is taken apart by the compiler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import numpy as np

from rooftop.arrays import Mesh
from rooftop.errors import RooftopError
from rooftop.xla.dataflow import rendezvous
from rooftop.xla.hlo import Computation, Instruction, Module
from rooftop.xla.places import flow_place, place_of

_KINDS = {
    "ALL_GATHER": "all_gather",
    "REDUCE_SCATTER": "reduce_scatter",
    "ALL_REDUCE": "all_reduce",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "permute",
}
_NUMBERED = 100_000


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One collective between slices: ``members`` devices along ``axes`` of the mesh; ``bytes`` as in a ledger.

    It begins at ``send`` and is waited for at the end of ``recv``, both in ``computation``.
    """

    kind: str
    axes: tuple[str, ...]
    members: int
    bytes: float
    computation: Computation
    send: Instruction
    recv: Instruction


def within_slice(mesh: Mesh) -> dict[str, int]:
    """Sizes of the axes within one slice, in mesh order: what collectives there number their partitions by."""
    between = {axis.name for axis in mesh.slice.physical_axes if axis.kind == "dcn"}
    return {
        name: prod(piece.size for piece in pieces if piece.axis not in between) for name, pieces in mesh.axes.items()
    }


def transfers(module: Module, mesh: Mesh) -> Iterator[Transfer]:
    """Every collective between slices, in the order of the text. Raises RooftopError for a kind that is not known."""
    for computation in module.computations.values():
        if not module.executions[computation.name]:
            continue
        sent = {rendezvous(each): each for each in computation if each.opcode == "send" and rendezvous(each)}
        for recv in computation:
            send = sent.get(rendezvous(recv)) if recv.opcode == "recv" else None
            if send is not None:
                yield _transfer(mesh, computation, send, recv)


def place_of_transfer(module: Module, transfer: Transfer) -> tuple[str, str, str]:
    """Scope, phase and 'file:line' of a transfer: XLA drops its name, so the data flow tells."""
    computation = transfer.computation
    source = computation.operands(transfer.send)[0]
    found = flow_place(module, transfer.kind, (computation, source), (computation, transfer.recv))
    return found or (*place_of(module, computation, transfer.recv), "")


def _transfer(mesh: Mesh, computation: Computation, send: Instruction, recv: Instruction) -> Transfer:
    kind = re.search(r'_xla_megascale_transfer_type="(\w+)"', recv.attributes)
    if kind is None or kind.group(1) not in _KINDS:
        raise RooftopError("transfer between slices", kind and kind.group(1), ", ".join(_KINDS))
    groups = _groups(recv.attributes)
    gathered = kind.group(1) == "ALL_GATHER"
    return Transfer(
        kind=_KINDS[kind.group(1)],
        axes=_axes(mesh, groups),
        members=len(groups[0]),
        bytes=recv.shape[0].nbytes if gathered else send.shape[0].nbytes,
        computation=computation,
        send=send,
        recv=recv,
    )


def _groups(attributes: str) -> list[list[int]]:
    """Groups of device numbers (pairs of a permute): some of them, which tell the axes of all."""
    target = attributes.partition("_xla_megascale_target=")[2]
    product = re.match(r'"?\{([\d,]+)\}x\{(\d+)', target)
    if product:
        return [[int(each) * _NUMBERED + int(product.group(2)) for each in product.group(1).split(",")]]
    listed = re.match(r'"?\{((?:\{[\d,>\-]+\},?)+)\}', target)
    groups = re.findall(r"\{([^{}]+)\}", listed.group(1)) if listed else []
    if not groups:
        raise RooftopError("transfer between slices", target[:80], "slices times devices, or groups of devices")
    return [[int(each) for each in re.findall(r"\d+", group)] for group in groups]


def _axes(mesh: Mesh, groups: list[list[int]]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ, in mesh order."""
    names = [axis.name for axis in mesh.slice.physical_axes]
    sizes = {axis.name: axis.size for axis in mesh.slice.physical_axes}
    laid = mesh.device_coordinates().reshape(-1, len(names))
    index = {tuple(place): number for number, place in enumerate(laid.tolist())}
    varies = set[int]()
    for group in groups:
        members = [index[_coordinates(each, names, sizes)] for each in group]
        along = np.array(np.unravel_index(np.array(members), tuple(mesh.shape.values())))
        varies |= {int(axis) for axis in np.flatnonzero(np.ptp(along, axis=1))}
    return tuple(name for number, name in enumerate(mesh.shape) if number in varies)


def _coordinates(device: int, names: list[str], sizes: dict[str, int]) -> tuple[int, ...]:
    """Coordinates along the physical axes of those names."""
    slice_, rest = divmod(device, _NUMBERED)
    found = {"dcn": slice_ - 1}
    for name in ("core", "x", "y", "z"):
        if name in sizes:
            rest, found[name] = divmod(rest, sizes[name])
    return tuple(found[name] for name in names)
