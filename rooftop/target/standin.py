"""Stand-ins for arrays: a type and a sharding, and the value if it is small and known.

JAX's C++ dispatch does not know the class, so that every call of a jit with a stand-in passes through Python.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
import numpy.typing as npt
from jax._src import ad_util, array, core, dtypes
from jax._src.interpreters import mlir, pxla
from jax._src.numpy import array_methods, indexing
from jax._src.random import prng
from jax._src.sharding_impls import make_single_device_sharding, physical_sharding
from jax.experimental.layout import Format
from jax.sharding import Sharding

from rooftop.target.computing import computing

#: Elements of the largest value that is really computed.
SMALL = 1 << 16


class Reader(Protocol):
    """Counts arrays, and reads of values that nobody knows."""

    def made(self, value: StandIn) -> None:
        """Count a stand-in as long as somebody has it."""

    def read(self, value: StandIn) -> None:
        """Count a read of the value of a stand-in."""


class StandIn(jax.Array):
    """An array on devices that are described: ``aval``, sharding, and its value on the CPU if that is ``known``.

    The value of any other one reads as ones (False for booleans), and ``reader`` counts it.
    """

    def __init__(
        self, aval: Any, sharding: Sharding, *, committed: bool, reader: Reader, known: Any | None = None
    ) -> None:
        self.aval = core.ShapedArray(  # type: ignore[misc]
            aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False)
        )
        self._sharding, self._committed, self._reader = sharding, committed, reader
        self.known = known
        self._deleted_by: str | None = None
        reader.made(self)

    # Types: JAX's own declarations are of methods that a subclass replaces with properties.
    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(self.aval.shape)

    @property
    def dtype(self) -> Any:
        """The dtype."""
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self.aval.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.aval.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of one whole copy."""
        return self.size * int(self.dtype.itemsize)

    @property
    def weak_type(self) -> bool:
        """True if the dtype gives way to others."""
        return bool(self.aval.weak_type)

    @property
    def sharding(self) -> Sharding:
        """The sharding."""
        return self._sharding

    @property
    def committed(self) -> bool:
        """True if a program put it on these devices."""
        return self._committed

    @property
    def format(self) -> Any:
        """The sharding, with a layout that is left to the compiler."""
        return Format(None, self._sharding)

    @property
    def device(self) -> Any:
        """The device, or the sharding over several."""
        return next(iter(self._sharding.device_set)) if self._sharding.num_devices == 1 else self._sharding

    @property
    def is_fully_replicated(self) -> bool:
        """True if every device has all of it."""
        return bool(self._sharding.is_fully_replicated)

    @property
    def is_fully_addressable(self) -> bool:
        """True: one process has all the devices."""
        return True

    @property
    def addressable_shards(self) -> Sequence[Any]:
        """A shard for each device."""
        places = self._sharding.devices_indices_map(self.shape)
        return [
            array.Shard(device, self._sharding, self.shape, self._piece(device, index))
            for device, index in places.items()
        ]

    @property
    def global_shards(self) -> Sequence[Any]:
        """A shard for each device."""
        return self.addressable_shards

    def addressable_data(self, index: int) -> StandIn:
        """The part of one device."""
        data: StandIn = self.addressable_shards[index].data
        return data

    def _piece(self, device: Any, index: Any) -> StandIn:
        part = None if self.known is None else np.asarray(self.known)[index]
        aval = core.ShapedArray(self._sharding.shard_shape(self.shape), self.dtype)
        on = make_single_device_sharding(device)
        return StandIn(aval, on, committed=True, reader=self._reader, known=part)

    @property
    def _value(self) -> npt.NDArray[Any]:
        """The value on the host; ones if it is not known, without memory of their own."""
        self.require()
        if self.known is not None:
            return np.asarray(self.known)
        self._reader.read(self)
        one = np.zeros((), bool) if self.dtype == bool else np.ones((), self.dtype)
        return np.broadcast_to(one, self.shape)

    def __array__(self, dtype: Any = None, context: None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self._value, dtype=dtype)

    def __bool__(self) -> bool:
        core.check_bool_conversion(self)
        return bool(self._value)

    def __float__(self) -> float:
        return float(self._scalar())

    def __int__(self) -> int:
        return int(self._scalar())

    def __complex__(self) -> complex:
        return complex(self._scalar())

    def __index__(self) -> int:
        core.check_integer_conversion(self)
        return int(self._scalar())

    def _scalar(self) -> Any:
        core.check_scalar_conversion(self)
        return self._value

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.ndim:
            raise TypeError("iteration over a 0-d array")
        return (self[index] for index in range(self.shape[0]))

    def __getitem__(self, index: Any) -> Any:
        return indexing.rewriting_take(self, index)

    def __repr__(self) -> str:
        if self.known is not None:
            with computing():
                return repr(jax.numpy.asarray(self.known))
        spec = getattr(self._sharding, "spec", None)
        place = str(spec) if spec is not None else "on one device" if self._sharding.num_devices == 1 else "split"
        return f"Array({self.aval.str_short()}, {place}, value not computed)"

    def __str__(self) -> str:
        return repr(self) if self.known is None else str(self._value)

    def __format__(self, spec: str) -> str:
        return format(self._value if self.ndim else self._value[()], spec)

    def __deepcopy__(self, memo: object) -> StandIn:
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled: the device that would have its value is not there")

    def tolist(self) -> Any:
        """The value as Python lists."""
        return self._value.tolist()

    def devices(self) -> set[Any]:
        """The devices."""
        return set(self._sharding.device_set)

    def block_until_ready(self) -> StandIn:
        """Return at once."""
        return self

    def copy_to_host_async(self) -> None:
        """Do nothing."""

    def delete(self, by: str = "delete()") -> None:
        """Make every later use an error, as after ``delete`` and donation."""
        self._deleted_by = self._deleted_by or by

    def is_deleted(self) -> bool:
        """True after ``delete``, and after a call that the array was donated to."""
        return self._deleted_by is not None

    def require(self) -> None:
        """Raise JAX's RuntimeError if the array is deleted."""
        if self._deleted_by is not None:
            raise RuntimeError(f"Array has been deleted with shape={self.aval.str_short()}. ({self._deleted_by})")

    def on_device_size_in_bytes(self) -> int:
        """Bytes of one whole copy."""
        return self.nbytes


def stand_in(aval: Any, sharding: Sharding, *, committed: bool, reader: Reader, known: Any | None = None) -> Any:
    """A stand-in of type ``aval``; for PRNG keys JAX's own array of keys, around a stand-in for their bits."""
    if dtypes.issubdtype(aval.dtype, dtypes.extended):
        bits = None if known is None else known._base_array
        place = physical_sharding(aval, sharding)
        base = StandIn(core.physical_aval(aval), place, committed=committed, reader=reader, known=bits)
        return prng.PRNGKeyArray(aval.dtype._impl, base)
    return StandIn(aval, sharding, committed=committed, reader=reader, known=known)


def is_known(value: Any) -> bool:
    """True if ``value`` is small, and not a stand-in without a value."""
    if isinstance(value, prng.PRNGKeyArray):
        return is_known(value._base_array)
    if isinstance(value, StandIn):
        return value.known is not None
    return getattr(value, "size", 1) <= SMALL


def array_of(value: Any) -> StandIn | None:
    """The stand-in that is ``value``, or has the bits of its keys; None for other values."""
    if isinstance(value, prng.PRNGKeyArray):
        return array_of(value._base_array)
    return value if isinstance(value, StandIn) else None


def value_of(value: Any) -> Any:
    """The value of a stand-in (None if it is not known), or ``value`` itself."""
    if isinstance(value, prng.PRNGKeyArray):
        bits = value_of(value._base_array)
        return None if bits is None else prng.PRNGKeyArray(value._impl, jax.numpy.asarray(bits))
    return value.known if isinstance(value, StandIn) else value


def register() -> None:
    """Make JAX take stand-ins for arrays. It stays: outside of a target nothing makes one."""
    if StandIn in core.pytype_aval_mappings:
        return
    core.pytype_aval_mappings[StandIn] = lambda value: core.update_aval_with_sharding(value.aval, value.sharding)
    dtypes.register_canonicalize_value_handler(StandIn, None)
    mlir.register_constant_handler(StandIn, _constant)
    pxla.shard_arg_handlers[StandIn] = _shard
    ad_util.raw_jaxval_adders[StandIn] = ad_util.raw_jaxval_adders[array.ArrayImpl]
    array_methods._set_array_base_attributes(StandIn, exclude={"__getitem__", "__deepcopy__", "nbytes"})
    array_methods._set_array_attributes(StandIn)
    types: Any = (*array_methods._JAX_ARRAY_TYPES, StandIn)
    array_methods._JAX_ARRAY_TYPES = types
    StandIn.__hash__ = None  # type: ignore[method-assign, assignment]
    StandIn.__array_priority__ = 100  # type: ignore[attr-defined]


def _constant(val: StandIn, aval: Any) -> Any:
    """A stand-in that a function closes over, as a constant: XLA shares the memory of equal elements."""
    return mlir.ir_constant(val._value if val.known is None else np.ascontiguousarray(val._value))


def _shard(values: Sequence[StandIn], shardings: Any, layouts: Any, semantics: Any) -> Any:
    """The values of stand-ins, to compute with on the CPU."""
    unknown = next((value for value in values if value.known is None), None)
    if unknown is not None:
        raise TypeError(f"{unknown!r} belongs to a target: it has no value to compute with here")
    return pxla.shard_args(shardings, layouts, semantics, [value.known for value in values])
