"""How a plan for other devices is laid on those that are here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rooftop.arrays import AXES
from rooftop.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.xla.local import Local, write_axes


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
