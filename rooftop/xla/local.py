"""The devices that are here: which chips they are, and meshes of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from rooftop.arrays import AXES, Mesh
from rooftop.errors import RooftopError
from rooftop.hardware import Chip, Slice, catalogue
from rooftop.xla.topology import laid


@dataclass(frozen=True, kw_only=True)
class Local:
    """What is here: all ``devices`` of all processes, and the ``chip`` they are, None if the catalogue has no such."""

    devices: tuple[jax.Device, ...]
    chip: Chip | None

    @property
    def name(self) -> str:
        """As a person would say it: '8 x cpu'."""
        return f"{len(self.devices)} x {self.devices[0].device_kind}"

    def is_slice(self, wanted: Slice) -> bool:
        """Whether these devices are that slice."""
        return self.chip is not None and (self.chip.name, len(self.devices)) == (wanted.chip.name, wanted.devices)

    def attention(self, compute_dtype: str) -> str:
        """The attention kernel for these devices (see ``rooftop.programs.attention``)."""
        platform = self.devices[0].platform
        if platform == "tpu":
            return "splash"
        return "cudnn" if platform == "gpu" and compute_dtype == "bf16" else "chunked"

    def flops_per_s(self, dtype: str) -> float | None:
        """Peak matmul FLOP/s of one device, None where the catalogue has no figure."""
        rate = None if self.chip is None else self.chip.flops_per_s.get(dtype)
        return None if rate is None or self.chip is None else rate / self.chip.devices


def local_devices() -> Local:
    """The devices of all processes. Starts JAX."""
    found = tuple(sorted(jax.devices(), key=lambda device: (device.process_index, device.id)))
    return Local(devices=found, chip=chip_of_kind(found[0].device_kind))


def chip_of_kind(kind: str) -> Chip | None:
    """The chip by JAX's ``device_kind``: a TPU's is an alias in the catalogue, a GPU's has its name somewhere."""
    kind, chips = kind.lower(), catalogue().values()
    named = (chip for chip in chips if kind in (chip.name, *chip.aliases) or (chip.kind == "gpu" and chip.name in kind))
    return next(named, None)


def write_axes(sizes: Mapping[str, int]) -> str:
    """As ``--mesh`` takes it, axes of one device left out: 'fsdp=2,tensor=2'."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "data=1"


def mesh_of(sizes: Mapping[str, int], here: Local, *, layout: Mesh | None = None) -> DeviceMesh:
    """A mesh of all ``AXES`` in explicit mode on the devices here; ``layout``: where each of a TPU slice stands.

    Raises RooftopError if there are too few devices, or if a process would have none of its own in the mesh.
    """
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    count = math.prod(shape)
    if count > len(here.devices):
        more = f"; --devices {count} emulates them" if here.devices[0].platform == "cpu" else ""
        raise RooftopError("mesh", write_axes(sizes), f"at most the {here.name} that are here{more}")
    if count < len(here.devices) and jax.process_count() > 1:
        raise RooftopError("mesh", write_axes(sizes), f"all {here.name} of the {jax.process_count()} processes")
    types = (AxisType.Explicit,) * len(AXES)
    devices = here.devices[:count]
    if devices[0].platform == "tpu" and layout is not None:
        names = tuple(layout.shape)
        return DeviceMesh(laid(devices, layout), names, axis_types=(AxisType.Explicit,) * len(names))
    if devices[0].platform == "tpu":
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    return DeviceMesh(np.array(devices, dtype=object).reshape(shape), AXES, axis_types=types)
