"""Pages on their way: to other devices, and to the host's memory and back, where some devices are other processes'.

Every process has the same shards of all that moves, on its own devices and in its own memory: none is sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import NamedSharding

Ints = npt.NDArray[np.int32]
#: Where a shard begins and ends in each dim of its array.
_Place = tuple[tuple[int | None, int | None], ...]
#: An array, or the shards that this process has of it.
Content = jax.Array | npt.NDArray[Any] | Mapping[_Place, Any]


class HostPages:
    """The host's tier of a cache: ``pages`` pages of arrays such as ``contents`` [pages at a time, ...]."""

    def __init__(self, contents: Sequence[jax.ShapeDtypeStruct], pages: int) -> None:
        self._kept = list[dict[_Place, npt.NDArray[Any]]]()
        for each in contents:
            assert isinstance(each.sharding, NamedSharding)
            own = each.sharding.shard_shape(each.shape)
            whole = each.sharding.is_fully_addressable
            shape = (pages, *(each.shape if whole else own)[1:])
            places = {()} if whole else _places(each.sharding, each.shape).values()
            self._kept.append({place: np.zeros(shape, each.dtype) for place in places})

    def keep(self, pages: Ints, contents: Sequence[jax.Array]) -> None:
        """Put the first of ``contents`` into ``pages``, as many as these are."""
        for kept, array in zip(self._kept, contents, strict=True):
            for place, shard in _shards(array).items():
                kept[place][pages] = np.asarray(shard)[: len(pages)]

    def contents(self, pages: Ints) -> list[Content]:
        """What is in ``pages``."""
        return [
            kept[()][pages] if () in kept else {place: shard[pages] for place, shard in kept.items()}
            for kept in self._kept
        ]


def placed(contents: Sequence[Content], like: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """``contents`` on the devices of ``like``; what is in shards has a shard here for each of this process's."""
    if all(each.sharding is not None and each.sharding.is_fully_addressable for each in like):
        found: list[jax.Array] = jax.device_put(list(contents), [each.sharding for each in like])
        return found
    return [_placed(content, each) for content, each in zip(contents, like, strict=True)]


def _placed(content: Content, like: jax.ShapeDtypeStruct) -> jax.Array:
    sharding = like.sharding
    assert isinstance(sharding, NamedSharding)
    if isinstance(content, np.ndarray):
        return jax.make_array_from_callback(like.shape, sharding, lambda index: content[index])
    shards = _shards(content) if isinstance(content, jax.Array) else content
    parts = [jax.device_put(shards[place], device) for device, place in _places(sharding, like.shape).items()]
    return jax.make_array_from_single_device_arrays(like.shape, sharding, parts)


def _shards(array: jax.Array) -> dict[_Place, Any]:
    """The shards that are here, each once; the array itself where all of it is."""
    if array.is_fully_addressable:
        return {(): array}
    return {_place(shard.index): shard.data for shard in array.addressable_shards}


def _places(sharding: NamedSharding, shape: tuple[int, ...]) -> dict[jax.Device, _Place]:
    """What each device of this process has."""
    found = sharding.addressable_devices_indices_map(shape)
    return {device: _place(index) for device, index in found.items() if index is not None}


def _place(index: tuple[slice, ...]) -> _Place:
    return tuple((each.start, each.stop) for each in index)
