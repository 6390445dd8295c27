"""Mesh axes inferred from replica groups, for programs whose mesh is unknown.

Groups that a mesh's axes make step through the devices with a stride: ``{{0,16,32,48},...}`` is an axis of size 4 above
16 devices. The groups of a program together show the axes that its collectives use.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise

from rooftop.compiler.hlo.groups import Groups, replica_groups
from rooftop.compiler.hlo.text import Module
from rooftop.core.errors import RooftopError

_DEVICES = re.compile(r"\b(?:num_partitions|replica_count)=(\d+)")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[[\d,]+\]<=\[([\d,]+)\]")
_NAMED = re.compile(r"mesh\[([^\[\]]*)\]")


def devices_of(text: str) -> int:
    """Number of devices of a module, from the first line of its text or from the ids in its replica groups."""
    stated = math.prod(int(item) for item in _DEVICES.findall(text.partition("\n")[0]))
    listed = (int(item) for groups in _LISTED.findall(text) for item in re.findall(r"\d+", groups))
    iotas = (math.prod(map(int, item.split(","))) for item in _IOTA.findall(text))
    meshes = (math.prod(int(item) for item in re.findall(r"=(\d+)", mesh)) for mesh in _NAMED.findall(text))
    return max(stated, 1 + max(listed, default=0), max(iotas, default=1), max(meshes, default=1))


def infer_mesh(module: Module, devices: int) -> dict[str, int]:
    """Axes and sizes, major first, that explain the replica groups of a module on ``devices`` devices.

    Their names are those in the HLO (``mesh['data'=2,'model'=4]``), or axis_0, axis_1 and so on. If groups have no even
    stride, all devices are one axis.
    """
    groups: list[Groups] = []
    for computation in module.computations.values():
        for instruction in computation:
            if "source_target_pairs=" in instruction.attributes:
                groups.append(_connected(replica_groups(instruction.attributes, devices)))
            elif "replica_groups=" in instruction.attributes:
                if match := _NAMED.search(instruction.attributes):
                    named = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", match[1])}
                    if math.prod(named.values()) == devices:
                        return named
                try:
                    groups.append(replica_groups(instruction.attributes, devices))
                except RooftopError:
                    continue
    return axes_of(groups, devices)


def axes_of(groups: Iterable[Groups], devices: int) -> dict[str, int]:
    """Axes and sizes, major first, that explain groups of device ids."""
    edges = {1, devices}
    for group in groups:
        edges |= _edges(group[0]) if group else set()
    cuts = sorted(edges)
    if any(high % low for low, high in pairwise(cuts)):
        cuts = [1, devices]
    sizes = [high // low for low, high in pairwise(cuts)][::-1]
    return {f"axis_{at}": size for at, size in enumerate(sizes)} or {"axis_0": 1}


def stride(group: Iterable[int]) -> int | None:
    """The stride of a group; None if it is uneven, or if the group is one device."""
    members = sorted(group)
    steps = {high - low for low, high in pairwise(members)}
    return steps.pop() if len(steps) == 1 else None


def describe(mesh: Mapping[str, int]) -> str:
    """'axis_0=2,axis_1=4'."""
    return ",".join(f"{name}={size}" for name, size in mesh.items() if size > 1) or "one device"


def _connected(pairs: Groups) -> Groups:
    """Groups of devices that the pairs of a permute connect."""
    parts: dict[int, list[int]] = {}
    for pair in pairs:
        # The smaller part joins the larger one, so that each device changes its part a few times only.
        met = {id(part): part for device in pair for part in [parts.setdefault(device, [device])]}
        ordered = sorted(met.values(), key=len, reverse=True)
        for part in ordered[1:]:
            ordered[0] += part
            parts |= dict.fromkeys(part, ordered[0])
    return tuple(tuple(sorted(part)) for part in {id(part): part for part in parts.values()}.values())


def _edges(group: tuple[int, ...]) -> set[int]:
    """Strides at which a group's axes begin and end."""
    members = sorted(group)
    if len(members) < 2:
        return set()
    result, run = set[int](), 1
    step = members[1] - members[0]
    while run < len(members) and members[run] - members[run - 1] == step:
        run += 1
    result |= {step, step * run}
    # The rest is another, more major axis.
    return result | (_edges(tuple(members[::run])) if run < len(members) and len(members) % run == 0 else set())
