"""Meshes of TPU devices that are not here: libtpu describes a slice of any size and compiles for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from rooftop.arrays import Mesh
from rooftop.errors import RooftopError
from rooftop.hardware import Slice


def topology_mesh(mesh: Mesh) -> DeviceMesh:
    """The mesh over described devices, in explicit mode, every device where the layout has its coordinates.

    JAX must have been imported under ``rooftop.xla.compiling.ENVIRONMENT``. Raises RooftopError for a slice that
    libtpu cannot describe.
    """
    slice_, described = mesh.slice, _describe(mesh.slice)
    if (count := len(_by_place(described, slice_))) != slice_.devices:
        raise RooftopError("slice", slice_.name, f"a slice that libtpu knows; it lists {count} devices here")
    names = tuple(mesh.shape)
    return DeviceMesh(laid(described, mesh), names, axis_types=(AxisType.Explicit,) * len(names))


def laid(devices: Sequence[Any], mesh: Mesh) -> npt.NDArray[np.object_]:
    """The devices of a TPU slice, described or real, each where the layout of ``mesh`` has its coordinates."""
    found, wanted = _by_place(devices, mesh.slice), mesh.device_coordinates()
    placed = np.empty(wanted.shape[:-1], dtype=object)
    for index in np.ndindex(placed.shape):
        placed[index] = found[tuple(int(place) for place in wanted[index])]
    return placed


def _describe(slice_: Slice) -> list[Any]:
    """libtpu's devices for a slice."""
    if slice_.chip.kind != "tpu":
        raise RooftopError("slice", slice_.name, "a TPU slice, such as v5e:4x4; nothing else is compiled for here")
    name = f"{slice_.chip.name}:{'x'.join(map(str, slice_.shape))}"
    # A slice smaller than a host has fewer chips on it than the 2x2 that libtpu expects.
    options: dict[str, Any] = {"chips_per_host_bounds": (min(2, slice_.shape[0]), min(2, slice_.shape[1]), 1)}
    if slice_.num_slices > 1:
        options["num_slices"] = slice_.num_slices
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
        if len(devices) == 2 * slice_.devices:
            # libtpu lists the two cores of a chip unless they are told to work as one device.
            options["chip_config_name"] = "megacore"
            devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:  # libtpu raises several kinds, all for an unknown slice
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RooftopError("slice", slice_.name, f"a slice that libtpu knows ({reason})") from None
    return list(devices)


def _by_place(devices: Sequence[Any], slice_: Slice) -> dict[tuple[int, ...], Any]:
    """Devices by their places along the physical axes of the slice."""
    found = {}
    for device in devices:
        x, y, z = device.coords
        place = {"x": x, "y": y, "z": z, "core": device.core_on_chip, "dcn": getattr(device, "slice_index", 0)}
        found[tuple(place[axis.name] for axis in slice_.physical_axes)] = device
    return found
