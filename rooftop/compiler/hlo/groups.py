"""Replica groups of collectives in every form that XLA writes, and the mesh axes that they vary over."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError

Groups = tuple[tuple[int, ...], ...]

#: Devices of one program. No slice has a quarter as many.
MOST_DEVICES = 2**17

_LISTS = re.compile(r"\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[([^\[\]]*)\](?:, ?device_ids=\((?:\[([\d,]+)\]T\(([\d,]+)\)|([\d,]+))\))? ?\{([^}]*)\}")
_MESH_AXIS = re.compile(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?")


# Trips of a loop and many of its instructions have the same thousands of pairs: attributes and their lists are cached.
@lru_cache(maxsize=64)
def replica_groups(attributes: str, devices: int) -> Groups:
    """The groups of a collective as logical device ids, from the attributes of its instruction.

    The spellings are

    - ``{{0,4},{1,5}}``, or ``{}`` for all ``devices``;
    - ``[4,4]<=[16]`` and ``[4,4]<=[4,4]T(1,0)``: an iota reshaped, transposed and cut into rows;
    - ``mesh['a'=4,'b'=4] {'a'}``: rows along axes of a mesh, with ``device_ids=([4,4]T(1,0))`` or
      ``device_ids=(0,2,1,3)`` when its ids are not in order; ``'a':(2)4`` is the part of size 4 of an axis below a
      major part of size 2;
    - of a permute, its ``source_target_pairs``.

    Raises RooftopError for any other spelling.
    """
    if (pairs := re.search(r"source_target_pairs=", attributes)) and (lists := _LISTS.match(attributes, pairs.end())):
        return _lists(lists.group(1))
    match = re.search(r"replica_groups=", attributes)
    start = match.end() if match else len(attributes)
    if lists := _LISTS.match(attributes, start):
        return _lists(lists.group(1)) or (tuple(range(devices)),)
    if iota := _IOTA.match(attributes, start):
        dims, reshape, permutation = (_integers(group) for group in iota.groups())
        return _rows(_transposed(reshape, permutation).reshape(dims))
    if mesh := _MESH.match(attributes, start):
        return _mesh_groups(*mesh.groups())
    text = attributes[start : start + 80]
    raise RooftopError("replica_groups", text, "lists of ids, an iota tile assignment, or a mesh and its axes")


def varying_axes(groups: Groups, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes along which members of a group differ, in mesh order; () when every group has one member.

    ``mesh`` gives the axes in the order in which logical device ids count them. Raises RooftopError for an id that is
    outside the mesh.
    """
    shape, size = tuple(mesh.values()), math.prod(mesh.values())
    lengths = np.array([len(group) for group in groups])
    members = np.fromiter(itertools.chain.from_iterable(groups), np.int64)
    if np.any((members < 0) | (members >= size)):
        raise RooftopError("replica_groups", int(members.max()), f"ids of the mesh's {size} devices")
    coordinates = np.array(np.unravel_index(members, shape))
    # A group varies along an axis if a member differs from its first one.
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)
    varies = np.any(coordinates != coordinates[:, first], axis=1)
    return tuple(name for name, seen in zip(mesh, varies, strict=True) if seen)


def _mesh_groups(mesh: str, reshape: str | None, permutation: str | None, ids: str | None, selected: str) -> Groups:
    axes = {name: int(size) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", mesh)}
    chosen = [
        (name, int(before or 1), int(before or 1) * int(size or axes[name]))
        for name, before, size in _MESH_AXIS.findall(selected)
    ]
    # Split every axis at both ends of a chosen part, which is then a run of whole pieces.
    pieces: list[int] = []
    picked: list[int] = []
    for name, size in axes.items():
        cuts = sorted({1, size} | {edge for axis, begin, end in chosen if axis == name for edge in (begin, end)})
        for begin, end in itertools.pairwise(cuts):
            if any(axis == name and low <= begin and end <= high for axis, low, high in chosen):
                picked.append(len(pieces))
            pieces.append(end // begin)
    if ids is not None:
        order = np.array(_integers(ids))
    elif reshape is not None:
        order = _transposed(_integers(reshape), _integers(permutation))
    else:
        order = _ids(math.prod(pieces))
    grid = order.reshape(pieces)
    width = math.prod(pieces[index] for index in picked)
    rest = [index for index in range(len(pieces)) if index not in picked]
    return _rows(grid.transpose(rest + picked).reshape(-1, width))


def _transposed(reshape: tuple[int, ...], permutation: tuple[int, ...]) -> npt.NDArray[np.int64]:
    ids = _ids(math.prod(reshape)).reshape(reshape)
    return ids.transpose(permutation).reshape(-1) if permutation else ids.reshape(-1)


def _ids(devices: int) -> npt.NDArray[np.int64]:
    """The ids of so many devices, in order. Raises RooftopError for more than ``MOST_DEVICES``."""
    if devices > MOST_DEVICES:
        raise RooftopError("replica_groups", f"{devices:,} devices", f"up to {MOST_DEVICES:,} devices")
    return np.arange(devices, dtype=np.int64)


def _integers(text: str | None) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


@lru_cache(maxsize=64)
def _lists(text: str) -> Groups:
    return tuple(_integers(group) for group in re.findall(r"\{([\d,]+)\}", text))


def _rows(array: npt.NDArray[np.int64]) -> Groups:
    return tuple(tuple(int(member) for member in row) for row in array)
