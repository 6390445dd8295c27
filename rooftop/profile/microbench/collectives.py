"""Collectives timed on the local devices, over any axes of a mesh.

Payloads are counted as in ``core.ledger.Collective``: the output of an AllGather, the input of a ReduceScatter, the
operand of an AllReduce, AllToAll or permute. Groups along the other axes of the mesh run at the same time, each on its
own data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh as DeviceMesh

from rooftop.algebra.pricing import Prices
from rooftop.arrays.mesh import span
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.ledger import COLLECTIVES
from rooftop.core.measurements import CollectiveTiming, PlannedSeconds
from rooftop.core.quantities import dtype_bytes
from rooftop.hardware import PhysicalAxis
from rooftop.profile.microbench.timing import Progress, compile_program, time_program
from rooftop.programs.einsum.sharded import DTYPES
from rooftop.roofline.collectives import price


def wire_bytes(kind: str, devices: int, payload: float) -> float:
    """Bytes that one of ``devices`` sends in a collective with ``payload``, as in ``core.ledger.Collective``."""
    # The number of bytes does not depend on the network; a switch is the simplest one.
    switch = PhysicalAxis(
        name="node", size=devices, kind="switch", wrapped=False, bytes_per_s=1.0, hop_s=0.0, resource="ici"
    )
    return payload * float(price(kind, span((switch,), np.array([devices]), np.array([1]))).wire_per_byte)


def operand(kind: str, axes: Sequence[str], payload: float, dtype: str, mesh: DeviceMesh) -> jax.ShapeDtypeStruct:
    """The operand of a collective with about ``payload`` bytes: [*mesh axes, elements of one device].

    The payload is rounded up to the same number of elements for every device. Raises RooftopError on an unknown kind,
    axis or dtype.
    """
    if kind not in COLLECTIVES:
        raise unknown("collective", kind, COLLECTIVES)
    for axis in axes:
        if axis not in mesh.shape:
            raise unknown("axis", axis, mesh.shape)
    members = math.prod(mesh.shape[axis] for axis in axes)
    if members < 2:
        raise RooftopError("axis", ",".join(axes), "axes of two devices or more: one alone sends nothing")
    parts = math.ceil(payload / dtype_bytes(dtype) / members)
    shape = (*mesh.devices.shape, parts if kind == "all_gather" else parts * members)
    return jax.ShapeDtypeStruct(shape, DTYPES[dtype], sharding=jax.NamedSharding(mesh, jax.P(*mesh.axis_names)))


def on_shards(kind: str, names: Sequence[str], members: int) -> Callable[[jax.Array], jax.Array]:
    """One collective over the axes ``names`` of ``members`` devices, for use inside ``jax.shard_map``."""
    ring = [(device, (device + 1) % members) for device in range(members)]
    collectives: dict[str, Callable[[jax.Array], jax.Array]] = {
        "all_gather": lambda x: lax.all_gather(x, names, tiled=True),
        "reduce_scatter": lambda x: lax.psum_scatter(x, names, tiled=True),
        "all_reduce": lambda x: lax.psum(x, names),
        "all_to_all": lambda x: lax.all_to_all(x, names, 0, 0, tiled=True),
        "permute": lambda x: lax.ppermute(x, names, ring),
    }
    return collectives[kind]


def program(kind: str, axes: Sequence[str], mesh: DeviceMesh) -> Callable[[jax.Array], jax.Array]:
    """A function that applies one collective over ``axes`` to arrays [*mesh axes, elements of one device].

    Devices are numbered along the axes in mesh order. A permute sends to the next device, and the last one to the
    first.
    """
    # JAX numbers the devices of a ppermute in mesh order, and those of other collectives in the order of ``names``.
    names = tuple(axis for axis in mesh.axis_names if axis in axes)
    collective = on_shards(kind, names, math.prod(mesh.shape[axis] for axis in names))
    here = (1,) * len(mesh.axis_names)
    spec = jax.P(*mesh.axis_names)
    return jax.shard_map(
        lambda x: collective(x.reshape(-1)).reshape(*here, -1),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        # The result of a gather is replicated along its axes, but here each device keeps its own copy.
        check_vma=False,
    )


def measure(
    kinds: Sequence[str],
    axes: Sequence[str],
    sizes: Sequence[float],
    dtype: str,
    mesh: DeviceMesh,
    *,
    prices: Sequence[Prices] = (),
    on_progress: Progress | None = None,
    least_s: float = 0.2,
) -> Iterator[CollectiveTiming]:
    """Time each kind of collective over ``axes`` for payloads of about ``sizes`` bytes.

    ``prices``, on a mesh of the same axes, give the planned times. Raises RooftopError on an unknown kind, axis or
    dtype, before anything runs, and Infeasible on a size that does not fit.
    """
    cases = [(kind, operand(kind, axes, size, dtype, mesh)) for kind in kinds for size in sizes]
    for index, (kind, array) in enumerate(cases):
        members = math.prod(mesh.shape[axis] for axis in axes)
        payload = round(array.shape[-1] * dtype_bytes(dtype)) * (members if kind == "all_gather" else 1)
        if on_progress is not None:
            on_progress(index, len(cases), f"{kind} of {payload} bytes")
        compiled = compile_program(
            program(kind, axes, mesh), array, what=f"{kind} of {payload} bytes", advice="give smaller --sizes"
        )
        timing = time_program(compiled, jnp.ones(array.shape, array.dtype, device=array.sharding), least_s=least_s)
        yield CollectiveTiming(
            kind=kind,
            axes=tuple(axes),
            devices=members,
            bytes=payload,
            wire_bytes=wire_bytes(kind, members, payload),
            median_s=timing.median_s,
            fastest_s=timing.fastest_s,
            runs=timing.runs,
            planned=PlannedSeconds(
                **{f"{price.kind}_s": price.collective_s(kind, tuple(axes), payload) for price in prices}
            ),
        )
