"""Protocol-buffer messages as they lie in a file, read without their schema: one at a time, or millions in lockstep.

Traces hold millions of small messages of the same kind. ``messages`` finds where each begins and ends, and ``Lockstep``
reads the same field of all of them at once with NumPy, so that no Python object is made for any.
Source: the public encoding of protocol buffers (varints; wire types 0, 1, 2 and 5).
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rooftop.errors import RooftopError

Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: its number, its value (of a LENGTH field where its content begins), and where it ends."""

    number: int
    wire: int
    value: int
    end: int


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The varint at a position, and the position behind it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: bytes | memoryview, start: int, end: int) -> Iterator[Field]:
    """The fields of the message between two positions, in their order. Raises RooftopError for what is no message."""
    at = start
    try:
        while at < end:
            tag, at = varint(data, at)
            number, wire = tag >> 3, tag & 7
            if wire == VARINT:
                value, at = varint(data, at)
                yield Field(number, wire, value, at)
            elif wire == LENGTH:
                size, at = varint(data, at)
                if at + size > end:
                    raise IndexError
                yield Field(number, wire, at, at + size)
                at += size
            else:
                yield Field(number, wire, at, at + _SIZES[wire])
                at += _SIZES[wire]
    except (IndexError, KeyError):
        raise RooftopError("trace", f"{end - start} bytes", "a protocol-buffer message that is whole") from None


def text(data: bytes | memoryview, field: Field) -> str:
    """The content of a LENGTH field as text."""
    return bytes(data[field.value : field.end]).decode("utf-8", "replace")


def double(data: bytes | memoryview, at: int) -> float:
    """The 64-bit float at a position."""
    return float(struct.unpack_from("<d", data, at)[0])


def signed(value: int) -> int:
    """A varint as a signed 64-bit integer."""
    return value - (1 << 64) if value >> 63 else value


def messages(data: bytes | memoryview, start: int, end: int, number: int) -> tuple[Ints, Ints]:
    """Where each repeated message ``number`` (below 16) of the message between two positions begins, and ends."""
    tag = number << 3 | LENGTH
    # Arrays of machine integers: lists would take five times the memory.
    starts, ends = array("q"), array("q")
    begins, stops = starts.append, ends.append
    at = start
    while at < end:
        if data[at] == tag:
            size = data[at + 1]
            at += 2
            if size >= 0x80:
                size, at = varint(data, at - 1)
            begins(at)
            at += size
            stops(at)
        else:
            other = next(fields(data, at, end))
            at = other.end
    if at > end:
        raise RooftopError("trace", f"{end - start} bytes", "a protocol-buffer message that is whole")
    return np.frombuffer(starts, np.int64), np.frombuffer(ends, np.int64)


class Lockstep:
    """The fields of many messages in ``data``, one field of each at a time."""

    def __init__(self, data: Bytes, starts: Ints, ends: Ints) -> None:
        self._data, self._at, self._ends = data, starts.copy(), ends

    def __iter__(self) -> Iterator[tuple[Ints, Ints, Ints, Ints, Ints]]:
        """(which messages, number, wire type, value, end) of the next field of every message that has one left.

        ``value`` is that of a varint, as a signed 64-bit integer, or where the content of another field begins, and
        ``end`` where it ends.
        """
        which = np.flatnonzero(self._at < self._ends)
        while which.size:
            tags, at = self._varints(self._at[which])
            wire, value, end = tags & 7, at.copy(), at.copy()
            for one in np.unique(wire):
                chosen = np.flatnonzero(wire == one)
                if one == VARINT:
                    value[chosen], end[chosen] = self._varints(at[chosen])
                elif one == LENGTH:
                    size, begin = self._varints(at[chosen])
                    value[chosen], end[chosen] = begin, begin + size
                elif int(one) in _SIZES:
                    end[chosen] += _SIZES[int(one)]
                else:
                    raise RooftopError("trace", f"wire type {one}", "a protocol-buffer message that is whole")
            self._at[which] = end
            yield which, tags >> 3, wire, value, end
            which = which[end < self._ends[which]]

    def _varints(self, at: Ints) -> tuple[Ints, Ints]:
        """The varints at positions, and the positions behind them."""
        byte = self._data[at]
        value = (byte & 0x7F).astype(np.uint64)
        end = at + 1
        more = np.flatnonzero(byte >= 0x80)
        shift = 7
        while more.size:
            byte = self._data[end[more]]
            value[more] |= (byte & 0x7F).astype(np.uint64) << np.uint64(shift)
            end[more] += 1
            more = more[byte >= 0x80]
            shift += 7
        return value.view(np.int64), end
