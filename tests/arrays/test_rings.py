"""Rings through the devices of an axis, on the network."""

from __future__ import annotations

import numpy as np
import pytest

from rooftop.arrays import Mesh
from rooftop.arrays.rings import DeviceRing
from rooftop.hardware import Slice


@pytest.mark.parametrize(
    ("slice_", "layout", "closed"),
    [
        ("v5p:4x4x4", "fsdp=x+y,tensor=z", True),
        ("v5e:4x4", "fsdp=x,tensor=y", False),
        ("v5p:16x16x16", "fsdp=x+y[2:8]+z[2:8],tensor=y[1:2]+z[1:2]", True),
        ("v5p:4x4x4", "fsdp=x+y[2:2],tensor=z+y[1:2]", True),
        ("v5e:4x8", "fsdp=x[2:2]+y[4:2],tensor=y[1:4]+x[1:2]", True),
        ("v5e:4x4", "tensor=x+y", False),
        ("v5p:4x4x8", "fsdp=x+y+z[2:4],tensor=z[1:2]", False),
        ("tpu7x:2x2x2", "fsdp=x+y,tensor=z+core", True),
    ],
)
def test_ring_visits_neighbours(slice_: str, layout: str, closed: bool) -> None:
    """Each device is one link away from the one before; the last from the first where the ring closes."""
    mesh = Mesh.from_layout(Slice.parse(slice_), layout)
    ring, devices = DeviceRing.of(mesh, "tensor"), mesh.size("tensor")
    assert ring.closed == closed
    assert sorted(ring.order) == list(range(devices))
    # "fsdp" comes first where there is any.
    places = mesh.device_coordinates().reshape(-1, devices, len(mesh.slice.physical_axes))[0][list(ring.order)]
    lengths = np.array([axis.size for axis in mesh.slice.physical_axes])
    wraps = np.array([axis.wrapped for axis in mesh.slice.physical_axes])
    moved = np.abs(np.roll(places, -1, axis=0) - places)
    hops = np.where(wraps, np.minimum(moved, lengths - moved), moved).sum(axis=1)
    assert (hops[:-1] == 1).all()
    assert devices == 2 or (hops[-1] == 1) == closed


def test_ring_of_an_axis_that_is_not_laid() -> None:
    mesh = Mesh.from_layout(Slice.parse("v5e:4x4"), "fsdp=x+y")
    assert DeviceRing.of(mesh, "tensor") == DeviceRing(order=(0,), closed=False)
