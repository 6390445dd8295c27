"""The devices that are here, and how a plan for other ones is laid on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import Mesh as DeviceMesh

from rooftop.arrays import AXES, Mesh
from rooftop.errors import RooftopError
from rooftop.hardware import Chip, Slice, chip
from rooftop.xla.topology import laid

#: JAX's ``device_kind`` of each TPU -> its name in the catalogue. GPUs carry theirs in their kind.
_TPUS = {
    "TPU v3": "v3",
    "TPU v4": "v4",
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
_GPUS = ("a100", "h100", "h200", "b200")


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
    kind = found[0].device_kind
    name = _TPUS.get(kind, next((gpu for gpu in _GPUS if gpu in kind.lower()), None))
    return Local(devices=found, chip=None if name is None else chip(name))


def shrink(axes: Mapping[str, int], devices: int) -> dict[str, int]:
    """Mesh axes for at most ``devices`` devices: the largest axis is divided by its smallest prime, again and again.

    Of equals the first in the order of ``AXES`` is divided, so that what is left has as many of the axes as it can.
    """
    sizes = {axis: axes.get(axis, 1) for axis in AXES}
    while math.prod(sizes.values()) > devices:
        largest = max(AXES, key=lambda axis: sizes[axis])
        size = sizes[largest]
        sizes[largest] = size // next(prime for prime in range(2, size + 1) if size % prime == 0)
    return sizes


def shrunk_plan(plan: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The plan on fewer devices: axes by ``shrink``; a device has as many sequences in a step as before.

    Where that is no whole number, it has one. What kept the plan from running on its own slice is not looked at.
    """
    axes = shrink(plan["mesh"]["axes"], devices)
    workload = plan["workload"]

    def ways(sizes: Mapping[str, int]) -> int:
        return math.prod(sizes.get(axis, 1) for axis in plan["rules"]["activations"]["batch"])

    sequences = workload["batch_tokens"] // workload["seq_len"]
    microbatches = int(plan["microbatches"])
    on_device = max(sequences // ways(plan["mesh"]["axes"]) // microbatches, 1) * microbatches
    batch = on_device * ways(axes)
    return {
        **plan,
        "mesh": {"axes": axes},
        "obstacles": [],
        "workload": {**workload, "batch_tokens": batch * workload["seq_len"]},
    }


def map_plan(plan: Mapping[str, Any], here: Local, *, as_is: bool, on_local: bool) -> tuple[dict[str, Any], str]:
    """The plan as it runs on ``here``, and one line that says so; the mesh is ``mesh_of`` of its axes.

    Unchanged where its slice is here. Otherwise ``as_is`` keeps mesh and batch, and ``on_local`` is ``shrunk_plan``.
    Raises RooftopError, saying what would run, if the slice is not here and neither is asked for.
    """
    wanted = Slice.parse(plan["slice"]["name"])
    if as_is and on_local:
        raise RooftopError("as-is", "--as-is and --on local", "one of the two")
    if here.is_slice(wanted) and not on_local:
        return dict(plan), f"on {wanted.name}, as planned"
    devices = math.prod(plan["mesh"]["axes"].values())
    small = shrunk_plan(plan, len(here.devices))
    small_line = f"mesh {write_axes(small['mesh']['axes'])}, {_sequences(small)}"
    if on_local:
        return small, f"planned for {wanted.name}; here, on {here.name}: {small_line}"
    given = f"{wanted.name}, and here are {here.name}"
    if as_is and devices <= len(here.devices):
        line = f"mesh {write_axes(plan['mesh']['axes'])}, {_sequences(plan)}"
        return dict(plan), f"planned for {wanted.name}; here, on {here.name}, as it is: {line}"
    local = f"--on local to run it with {small_line}"
    kept = f"--as-is to keep mesh {write_axes(plan['mesh']['axes'])}, {_sequences(plan)}"
    if devices <= len(here.devices):
        raise RooftopError("plan slice", given, f"{local}; or {kept}")
    emulate = f" --devices {devices}" if here.devices[0].platform == "cpu" else f" on {devices} devices"
    raise RooftopError("plan slice", given, f"{local}; or {kept},{emulate}")


def _sequences(plan: Mapping[str, Any]) -> str:
    workload = plan["workload"]
    return f"{workload['batch_tokens'] // workload['seq_len']} sequences of {workload['seq_len']}"


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
