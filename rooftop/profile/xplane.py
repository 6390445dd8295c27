"""XPlane traces (``*.xplane.pb``): planes, lines and events, as JAX's profiler writes them for CPUs, GPUs and TPUs.

``jax.profiler.ProfileData`` reads them too, one Python object per event. It omits the stats that events of one kind
share: FLOPs, bytes and category of an HLO op, and the HLO modules themselves. This reader has those, and returns the
events of a line as columns. Times are picoseconds from the beginning of the trace's earliest line. Source: the
published schema of XSpace, XPlane, XLine, XEvent and XStat.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.core.files import open_file

#: Events whose stats are read at a time: few enough for memory, many enough for NumPy.
_AT_ONCE = 1 << 18
#: Numbers of XStat's value fields.
_DOUBLE, _UNSIGNED, _SIGNED, _STRING, _BYTES, _REFERENCE = 2, 3, 4, 5, 6, 7
_PS_PER_NS = 1000


@dataclass(frozen=True, kw_only=True)
class StatKind:
    """Properties that all events of one kind share: a name, another for display, and stats by name."""

    name: str
    display_name: str
    stats: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One stat of every event of a line: its number, or the index of its text in ``texts``; ``present`` is its mask."""

    values: npt.NDArray[Any]
    present: npt.NDArray[np.bool_]
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class XEvents:
    """The events of a line as columns, [N] each, in the order of the file. ``kinds`` are keys of ``Plane.kinds``."""

    kinds: Ints
    starts: Ints
    ends: Ints
    stats: Mapping[str, Column]

    def __len__(self) -> int:
        return len(self.kinds)


@dataclass(frozen=True, kw_only=True)
class XLine:
    """One timeline of a plane: sequential or nested events."""

    name: str
    id: int
    _file: _TraceFile = field(repr=False)
    _names: Mapping[int, str] = field(repr=False)
    _timestamp_ns: int
    _span: tuple[int, int]

    @property
    def stats(self) -> frozenset[str]:
        """The names of stats that events of this line may have."""
        return frozenset(self._names.values())

    def read(self, stats: Sequence[str] = ()) -> XEvents:
        """The events with these stats; a stat that no event has is a column without present values."""
        data = self._file
        starts, ends = messages(data.bytes, *self._span, 4)
        begin = (self._timestamp_ns - data.base_ns) * _PS_PER_NS
        columns = np.zeros((3, len(starts)), np.int64)
        counted = np.zeros(len(starts), bool)
        requested = {identifier: name for identifier, name in self._names.items() if name in stats}
        values = _Stats(data, requested, self._names, len(starts))
        for low in range(0, len(starts), _AT_ONCE):
            high = min(low + _AT_ONCE, len(starts))
            pieces: list[tuple[Ints, Ints, Ints]] = []
            for which, number, _, value, end in Lockstep(data.array, starts[low:high], ends[low:high]):
                for at in (1, 2, 3):
                    chosen = number == at
                    columns[at - 1, low + which[chosen]] = value[chosen]
                counted[low + which[number == 5]] = True
                is_stat = number == 4
                if requested and is_stat.any():
                    pieces.append((low + which[is_stat], value[is_stat], end[is_stat]))
            values.add(pieces)
        # Aggregated events have a count and no time.
        timed = ~counted
        first = begin + columns[1][timed]
        return XEvents(
            kinds=columns[0][timed],
            starts=first,
            ends=first + columns[2][timed],
            stats={name: values.column(name, timed) for name in stats},
        )


@dataclass(frozen=True, kw_only=True)
class Plane:
    """The recording of one source: a device, the threads of a host, or metadata."""

    name: str
    stats: Mapping[str, Any]
    lines: tuple[XLine, ...]
    kinds: Mapping[int, StatKind]

    def line(self, name: str) -> XLine | None:
        """The first line of a name."""
        return next((line for line in self.lines if line.name == name), None)


@dataclass(frozen=True, kw_only=True)
class XSpace:
    """One trace file: the planes of one host. ``problems`` are errors of the profiler."""

    host: str
    planes: tuple[Plane, ...]
    problems: tuple[str, ...]

    def named(self, prefix: str) -> Iterator[Plane]:
        """The planes whose name begins with ``prefix``."""
        return (plane for plane in self.planes if plane.name.startswith(prefix))


class _TraceFile:
    """The bytes of a trace, for Python and for NumPy, and the start of its earliest line."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.bytes = memoryview(data)
        self.array: Bytes = np.frombuffer(data, np.uint8)
        self.base_ns = 0


class _Stats:
    """The requested stats of the events of a line, collected in pieces."""

    def __init__(self, file: _TraceFile, requested: Mapping[int, str], names: Mapping[int, str], count: int) -> None:
        self._file, self._requested, self._names, self._count = file, requested, names, count
        self._pieces: dict[str, list[tuple[Ints, Ints, Ints, Ints]]] = {}

    def add(self, pieces: Iterable[tuple[Ints, Ints, Ints]]) -> None:
        """Add stats, given as (event, start, end) of each."""
        for event, starts, ends in pieces:
            identifiers, numbers = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
            values, stops = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
            for which, number, _, value, end in Lockstep(self._file.array, starts, ends):
                first = number == 1
                identifiers[which[first]] = value[first]
                other = which[~first]
                numbers[other], values[other], stops[other] = number[~first], value[~first], end[~first]
            for identifier, name in self._requested.items():
                chosen = identifiers == identifier
                if chosen.any():
                    self._pieces.setdefault(name, []).append(
                        (event[chosen], numbers[chosen], values[chosen], stops[chosen])
                    )

    def column(self, name: str, chosen: npt.NDArray[np.bool_]) -> Column:
        """The column of one stat, for the events in the mask ``chosen``."""
        values: npt.NDArray[Any] = np.zeros(self._count, np.int64)
        present = np.zeros(self._count, bool)
        texts: dict[str, int] = {}
        for events, numbers, raw, stops in self._pieces.get(name, ()):
            present[events] = True
            for number in np.unique(numbers):
                is_number = numbers == number
                values = self._filled(values, events[is_number], int(number), raw[is_number], stops[is_number], texts)
        return Column(values=values[chosen], present=present[chosen], texts=tuple(texts))

    def _filled(
        self, values: npt.NDArray[Any], events: Ints, number: int, raw: Ints, stops: Ints, texts: dict[str, int]
    ) -> npt.NDArray[Any]:
        """``values`` with those of some events filled in; text is added to ``texts``, its index there to the values."""
        if number == _DOUBLE:
            values = values.astype(np.float64)
            values[events] = self._file.array[raw[:, None] + np.arange(8)].reshape(-1).view("<f8")
        elif number == _REFERENCE:
            known, inverse = np.unique(raw, return_inverse=True)
            codes = [texts.setdefault(self._names.get(int(key), ""), len(texts)) for key in known]
            values[events] = np.array(codes, np.int64)[inverse]
        elif number in (_STRING, _BYTES):
            spans = zip(raw.tolist(), stops.tolist(), strict=True)
            written = (bytes(self._file.bytes[low:high]).decode("utf-8", "replace") for low, high in spans)
            values[events] = [texts.setdefault(string, len(texts)) for string in written]
        else:
            values[events] = raw
        return values


def read_space(path: Path) -> XSpace:
    """Read a trace file; the events of a line are read on demand. Raises RooftopError for other files."""
    try:
        with open_file(path) as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise RooftopError("trace", str(path), f"a trace of JAX's profiler, *.xplane.pb ({error})") from None
    try:
        return space_of(data, host=path.name.removesuffix(".xplane.pb"))
    except RooftopError as error:
        raise RooftopError("trace", str(path), f"a trace of JAX's profiler, *.xplane.pb ({error.accepted})") from None


def space_of(data: bytes | mmap.mmap, *, host: str) -> XSpace:
    """The XSpace of its serialized bytes; see ``read_space``."""
    file = _TraceFile(data)
    spans: list[Field] = []
    problems: list[str] = []
    for item in fields(file.bytes, 0, len(file.bytes)):
        if item.wire != LENGTH or item.number > 4:
            raise RooftopError("trace", f"field {item.number}", "the planes of an XSpace")
        if item.number == 1:
            spans.append(item)
        elif item.number in (2, 3):
            problems.append(text(file.bytes, item))
        else:
            host = text(file.bytes, item)
    planes = tuple(_plane(file, span) for span in spans)
    starts = [line._timestamp_ns for plane in planes for line in plane.lines if line._span[1] > line._span[0]]
    file.base_ns = min((start for start in starts if start), default=0)
    return XSpace(host=host, planes=planes, problems=tuple(problems))


def _plane(file: _TraceFile, span: Field) -> Plane:
    items = list(fields(file.bytes, span.value, span.end))
    names: dict[int, str] = {}
    for item in items:
        if item.number == 5:
            key, value = _entry(file, item)
            names[key] = next((text(file.bytes, part) for part in value if part.number == 2), "")
    kinds: dict[int, StatKind] = {}
    for item in items:
        if item.number == 4:
            key, value = _entry(file, item)
            named = {part.number: text(file.bytes, part) for part in value if part.number in (2, 4)}
            stats = [part for part in value if part.number == 5]
            kinds[key] = StatKind(
                name=named.get(2, ""), display_name=named.get(4, ""), stats=_stats(file, stats, names)
            )
    return Plane(
        name=next((text(file.bytes, item) for item in items if item.number == 2), ""),
        stats=_stats(file, [item for item in items if item.number == 6], names),
        lines=tuple(_line(file, item, names) for item in items if item.number == 3),
        kinds=kinds,
    )


def _line(file: _TraceFile, span: Field, names: Mapping[int, str]) -> XLine:
    name, identifier, timestamp_ns = "", 0, 0
    at, end = span.value, span.end
    # Other fields precede the events, which are many: stop at the first event.
    for item in fields(file.bytes, at, end):
        if item.number == 4:
            break
        name, identifier, timestamp_ns = _head(file, item, name, identifier, timestamp_ns)
        at = item.end
    return XLine(name=name, id=identifier, _file=file, _names=names, _timestamp_ns=timestamp_ns, _span=(at, end))


def _head(file: _TraceFile, item: Field, name: str, identifier: int, timestamp_ns: int) -> tuple[str, int, int]:
    if item.number in (2, 11) and (item.number == 2 or not name):
        return text(file.bytes, item), identifier, timestamp_ns
    if item.number == 1:
        return name, signed(item.value), timestamp_ns
    if item.number == 3:
        return name, identifier, signed(item.value)
    return name, identifier, timestamp_ns


def _entry(file: _TraceFile, span: Field) -> tuple[int, list[Field]]:
    """Key of an entry of a map, and the fields of its value."""
    key, value = 0, list[Field]()
    for item in fields(file.bytes, span.value, span.end):
        if item.number == 1:
            key = signed(item.value)
        elif item.number == 2:
            value = list(fields(file.bytes, item.value, item.end))
    return key, value


def _stats(file: _TraceFile, spans: Sequence[Field], names: Mapping[int, str]) -> dict[str, Any]:
    stats: dict[str, Any] = {}
    for span in spans:
        name = ""
        value: Any = None
        for item in fields(file.bytes, span.value, span.end):
            if item.number == 1:
                name = names.get(signed(item.value), "")
            elif item.number == _DOUBLE:
                value = double(file.bytes, item.value)
            elif item.number == _SIGNED:
                value = signed(item.value)
            elif item.number == _STRING:
                value = text(file.bytes, item)
            elif item.number == _BYTES:
                value = bytes(file.bytes[item.value : item.end])
            elif item.number == _REFERENCE:
                value = names.get(signed(item.value), "")
            else:
                value = item.value
        stats[name] = value
    return stats


Ints = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_SIZES = {FIXED64: 8, FIXED32: 4}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: its number, its value (for a LENGTH field the start of its content), and its end."""

    number: int
    wire: int
    value: int
    end: int


def varint(data: bytes | memoryview, at: int) -> tuple[int, int]:
    """The varint at a position, and the position after it."""
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: bytes | memoryview, start: int, end: int) -> Iterator[Field]:
    """Yield the fields of the message between two positions, in order. Raises RooftopError for other data."""
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
    """Starts and ends of the repeated message ``number`` (below 16) in the message between two positions."""
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
        """Yield (which messages, number, wire type, value, end) of the next field of every message that has one left.

        ``value`` is that of a varint, as a signed 64-bit integer, or the start of another field's content, and ``end``
        is the end of the field.
        """
        which = np.flatnonzero(self._at < self._ends)
        while which.size:
            tags, at = self._varints(self._at[which])
            wire, value, end = tags & 7, at.copy(), at.copy()
            for wire_type in np.unique(wire):
                chosen = np.flatnonzero(wire == wire_type)
                if wire_type == VARINT:
                    value[chosen], end[chosen] = self._varints(at[chosen])
                elif wire_type == LENGTH:
                    size, begin = self._varints(at[chosen])
                    value[chosen], end[chosen] = begin, begin + size
                elif int(wire_type) in _SIZES:
                    end[chosen] += _SIZES[int(wire_type)]
                else:
                    raise RooftopError("trace", f"wire type {wire_type}", "a protocol-buffer message that is whole")
            self._at[which] = end
            yield which, tags >> 3, wire, value, end
            which = which[end < self._ends[which]]

    def _varints(self, at: Ints) -> tuple[Ints, Ints]:
        """The varints at positions, and the positions after them."""
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
