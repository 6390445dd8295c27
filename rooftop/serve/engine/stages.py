"""Hand-overs between pipeline stages: arrays go from the devices of one mesh to the same places of another."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P, lax
from jax.sharding import AxisType, Mesh, NamedSharding

#: Name of the axis from the one mesh to the other.
_PAIR = "pair"


class HandOver:
    """From mesh ``source`` to mesh ``target``, of as many devices.

    If this process has all of them, the runtime copies from device to device. Otherwise a program over both meshes,
    which all of their processes run, permutes the shards.
    """

    def __init__(self, source: Mesh, target: Mesh) -> None:
        devices = np.stack([source.devices, target.devices])
        types = (AxisType.Explicit,) * devices.ndim
        self._source, self._target = source, target
        self._mesh = Mesh(devices, (_PAIR, *source.axis_names), axis_types=types)
        process = jax.process_index()
        self._local = [device for device in devices.flat if device.process_index == process]
        self._alone = len(self._local) == devices.size
        self._programs = dict[tuple[Any, ...], jax.stages.Compiled]()
        self._blanks = dict[tuple[Any, ...], jax.Array]()

    def compile(self, like: jax.ShapeDtypeStruct) -> int:
        """Compile the program that moves arrays such as ``like``, on the target; returns how many that are."""
        key = _key(like)
        if self._alone or not self._local or key in self._programs:
            return 0
        place = self._place(like)
        with jax.set_mesh(self._mesh):
            body = jax.shard_map(
                lambda shard: lax.ppermute(shard, _PAIR, [(0, 1)]), in_specs=place.spec, out_specs=place.spec
            )
            both = jax.ShapeDtypeStruct((2 * like.shape[0], *like.shape[1:]), like.dtype, sharding=place)
            self._programs[key] = jax.jit(body).lower(both).compile()
        return 1

    def __call__(self, array: jax.Array | None, like: jax.ShapeDtypeStruct) -> jax.Array | None:
        """``array`` as ``like``, on the target; None in a process that has no part of the target.

        A process that has no part of the source gives None.
        """
        if self._alone:
            assert array is not None
            moved: jax.Array = jax.device_put(array, like.sharding)
            return moved
        if not self._local:
            return None
        place = self._place(like)
        shards = {} if array is None else {shard.device: shard.data for shard in array.addressable_shards}
        parts = [shards[device] if device in shards else self._blank(like, device) for device in self._local]
        shape = (2 * like.shape[0], *like.shape[1:])
        both = jax.make_array_from_single_device_arrays(shape, place, parts)
        result = self._programs[_key(like)](both)
        if self._local[0].platform == "cpu":
            # As in ``Replica``: collectives of several programs would wait for each other.
            jax.block_until_ready(result)
        assert like.sharding is not None
        arrived = {shard.device: shard.data for shard in result.addressable_shards}
        there = [arrived[device] for device in self._target.local_devices]
        if not there:
            return None
        return jax.make_array_from_single_device_arrays(like.shape, like.sharding, there)

    def _place(self, like: jax.ShapeDtypeStruct) -> NamedSharding:
        """The sharding of what both meshes have, one after the other along the first dim, which neither splits."""
        assert isinstance(like.sharding, NamedSharding)
        assert like.sharding.spec[:1] in ((), (None,))
        return NamedSharding(self._mesh, P(_PAIR, *like.sharding.spec[1:]))

    def _blank(self, like: jax.ShapeDtypeStruct, device: jax.Device) -> jax.Array:
        """A shard that the target gives in exchange."""
        assert like.sharding is not None
        shape = like.sharding.shard_shape(like.shape)
        key = shape, like.dtype, device
        if key not in self._blanks:
            self._blanks[key] = jax.device_put(np.zeros(shape, like.dtype), device)
        return self._blanks[key]


def _key(like: jax.ShapeDtypeStruct) -> tuple[Any, ...]:
    return like.shape, jnp.dtype(like.dtype), like.sharding
