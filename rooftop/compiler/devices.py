"""The local devices: their chip, and meshes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.experimental import topologies
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from rooftop.arrays import AXES, Mesh
from rooftop.capabilities import KERNELS_OF_CHIP, AttentionKernel, attention_kernel
from rooftop.compiler.targets import gpus_by_coordinates, target_text, topology_text
from rooftop.core.errors import RooftopError
from rooftop.hardware import Chip, Slice, chip_of_kind
from rooftop.models import ModelConfig


@dataclass(frozen=True, kw_only=True)
class Local:
    """All ``devices`` of all processes, and their ``chip``, None if the catalogue has no such chip."""

    devices: tuple[jax.Device, ...]
    chip: Chip | None

    @property
    def name(self) -> str:
        """A name for people: '8 x cpu'."""
        return f"{len(self.devices)} x {self.devices[0].device_kind}"

    def is_slice(self, slice_: Slice) -> bool:
        """True if these devices are ``slice_``."""
        return self.chip is not None and (self.chip.name, len(self.devices)) == (slice_.chip.name, slice_.devices)

    def attention(self, compute_dtype: str, model: ModelConfig) -> AttentionKernel:
        """The attention kernel of a model for these devices (see ``rooftop.programs.attention.attend``)."""
        platform = self.devices[0].platform
        # cuDNN has none in float32.
        if platform not in KERNELS_OF_CHIP or (platform == "gpu" and compute_dtype != "bf16"):
            return "chunked"
        return attention_kernel(platform, model)

    def flops_per_s(self, dtype: str) -> float | None:
        """Peak matmul FLOP/s of one device, None if the catalogue has no figure."""
        rate = None if self.chip is None else self.chip.flops_per_s.get(dtype)
        return None if rate is None or self.chip is None else rate / self.chip.devices


def local_devices() -> Local:
    """The devices of all processes. Starts JAX."""
    devices = tuple(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    return Local(devices=devices, chip=chip_of_kind(devices[0].device_kind))


def write_axes(sizes: Mapping[str, int]) -> str:
    """Axes as ``--mesh`` takes them, without those of one device: 'fsdp=2,tensor=2'."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"


def mesh_of(sizes: Mapping[str, int], here: Local, *, layout: Mesh | None = None) -> DeviceMesh:
    """A mesh of all ``AXES`` in explicit mode on the local devices; ``layout`` has coordinates on a TPU slice.

    Raises RooftopError if there are too few devices, or if a process would have no device in the mesh.
    """
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    count = math.prod(shape)
    if count > len(here.devices):
        more = f"; --devices {count} emulates them" if here.devices[0].platform == "cpu" else ""
        raise RooftopError("mesh", write_axes(sizes), f"at most the {here.name} here{more}")
    if count < len(here.devices) and jax.process_count() > 1:
        raise RooftopError("mesh", write_axes(sizes), f"all {here.name} of the {jax.process_count()} processes")
    types = (AxisType.Explicit,) * len(AXES)
    devices = here.devices[:count]
    if devices[0].platform == "tpu" and layout is not None:
        names = tuple(layout.shape)
        return DeviceMesh(device_grid(devices, layout), names, axis_types=(AxisType.Explicit,) * len(names))
    if devices[0].platform == "tpu":
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    return DeviceMesh(np.array(devices, dtype=object).reshape(shape), AXES, axis_types=types)


def topology_mesh(mesh: Mesh, *, one_process: bool = False) -> DeviceMesh:
    """The mesh over described devices, in explicit mode, with each device at its coordinates in the layout.

    ``one_process``: see ``described_devices``.

    JAX must have been imported under ``rooftop.compiler.compiling.ENVIRONMENT``. Raises RooftopError for a slice that
    the compiler cannot describe.
    """
    described = described_devices(mesh.slice, one_process=one_process)
    names = tuple(mesh.shape)
    return DeviceMesh(device_grid(described, mesh), names, axis_types=(AxisType.Explicit,) * len(names))


def described_devices(slice_: Slice, *, one_process: bool = False) -> tuple[jax.Device, ...]:
    """The devices of a slice as the compiler describes them, host after host; the same objects in every call.

    ``one_process``: all of them belong to process 0, as if one host had the whole slice. XLA's programs are the same.
    Raises RooftopError for a slice that the compiler cannot describe.
    """
    target = target_text(slice_.chip) if slice_.chip.kind == "gpu" else ""
    # Devices of two descriptions differ, and JAX refuses to mix them.
    key = (slice_.chip.name, slice_.shape, slice_.num_slices, one_process, target)
    if key not in _DESCRIBED:
        devices = _describe_gpus(slice_, target) if target else _describe(slice_, one_process)
        if (count := len(_by_coordinates(devices, slice_))) != slice_.devices:
            raise RooftopError("slice", slice_.name, f"a slice that the compiler knows; it lists {count} devices here")
        _DESCRIBED[key] = tuple(devices)
    return _DESCRIBED[key]


_DESCRIBED: dict[tuple[Any, ...], tuple[jax.Device, ...]] = {}


def coordinates_of(devices: Sequence[Any], slice_: Slice) -> list[tuple[int, ...]]:
    """The coordinates of devices along the physical axes of the slice that they belong to."""
    described = described_devices(slice_, one_process=devices[0] in described_devices(slice_, one_process=True))
    by_device = {device: place for place, device in _by_coordinates(described, slice_).items()}
    return [by_device[device] for device in devices]


def device_grid(devices: Sequence[Any], mesh: Mesh) -> npt.NDArray[np.object_]:
    """The devices of a slice, described or real, each at its coordinates in the layout of ``mesh``."""
    by_coordinates, coordinates = _by_coordinates(devices, mesh.slice), mesh.device_coordinates()
    grid = np.empty(coordinates.shape[:-1], dtype=object)
    for index in np.ndindex(grid.shape):
        grid[index] = by_coordinates[tuple(int(coordinate) for coordinate in coordinates[index])]
    return grid


def _describe(slice_: Slice, one_process: bool) -> list[Any]:
    """libtpu's devices for a slice of TPUs."""
    name = f"{slice_.chip.name}:{'x'.join(map(str, slice_.shape))}"
    # A slice smaller than a host has fewer chips than the 2x2 that libtpu expects.
    host = (min(2, slice_.shape[0]), min(2, slice_.shape[1]), 1)
    options: dict[str, Any] = {"chips_per_host_bounds": (*slice_.shape, 1)[:3] if one_process else host}
    if slice_.num_slices > 1:
        options["num_slices"] = slice_.num_slices
    try:
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
        if len(devices) == 2 * slice_.devices:
            # libtpu lists the two cores of a chip unless they are configured as one device.
            options["chip_config_name"] = "megacore"
            devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:  # libtpu raises several kinds, all for an unknown slice
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RooftopError("slice", slice_.name, f"a slice that libtpu knows ({reason})") from None
    return list(devices)


def _describe_gpus(slice_: Slice, target: str) -> list[Any]:
    """The devices of XLA:GPU for a slice of GPUs."""
    topology = {"target_config": target, "topology": topology_text(slice_)}
    try:
        return list(topologies.get_topology_desc(platform="cuda", **topology).devices)
    except NotImplementedError:
        accepted = "a TPU slice, or a Python with the compiler for GPUs: pip install 'rooftop[gpu-compile]' (Linux)"
        raise RooftopError("slice", slice_.name, accepted) from None


def _by_coordinates(devices: Sequence[Any], slice_: Slice) -> dict[tuple[int, ...], Any]:
    """Devices by their coordinates along the physical axes of the slice."""
    if slice_.chip.kind == "gpu":
        return gpus_by_coordinates(devices)
    by_coordinates = {}
    for device in devices:
        x, y, z = device.coords
        along = {"x": x, "y": y, "z": z, "core": device.core_on_chip, "dcn": getattr(device, "slice_index", 0)}
        by_coordinates[tuple(along[axis.name] for axis in slice_.physical_axes)] = device
    return by_coordinates
