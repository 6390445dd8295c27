"""XPlane traces (``*.xplane.pb``): planes, lines and events, as JAX's profiler writes them for CPUs, GPUs and TPUs.

``jax.profiler.ProfileData`` reads them too, one Python object an event, and leaves out what the events of one kind have
in common: FLOPs, bytes and category of an HLO op, and the HLO modules themselves. This reader has those, and gives the
events of a line as columns. Times are picoseconds from the beginning of the trace's earliest line.
Source: the published schema of XSpace, XPlane, XLine, XEvent and XStat.
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

#: Events whose stats are read at once: a bound on memory, and long enough for NumPy.
_AT_ONCE = 1 << 18
#: Numbers of the fields of XStat that have its value.
_DOUBLE, _UNSIGNED, _SIGNED, _STRING, _BYTES, _REFERENCE = 2, 3, 4, 5, 6, 7
_PS_PER_NS = 1000


@dataclass(frozen=True, kw_only=True)
class StatKind:
    """What the events of one kind have in common: a name, another for display, and stats by name."""

    name: str
    display_name: str
    stats: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Column:
    """One stat of every event of a line: its number, or the place of its text in ``texts``; ``present`` where it is."""

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
    """One timeline of a plane: what ran one after the other, or nested, in one place."""

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
        """The events with these of their stats; one that no event has is a column without any present."""
        data = self._file
        starts, ends = messages(data.bytes, *self._span, 4)
        begin = (self._timestamp_ns - data.base_ns) * _PS_PER_NS
        columns = np.zeros((3, len(starts)), np.int64)
        counted = np.zeros(len(starts), bool)
        wanted = {identifier: name for identifier, name in self._names.items() if name in stats}
        found = _Stats(data, wanted, self._names, len(starts))
        for low in range(0, len(starts), _AT_ONCE):
            high = min(low + _AT_ONCE, len(starts))
            pieces: list[tuple[Ints, Ints, Ints]] = []
            for which, number, _, value, end in Lockstep(data.array, starts[low:high], ends[low:high]):
                for at in (1, 2, 3):
                    chosen = number == at
                    columns[at - 1, low + which[chosen]] = value[chosen]
                counted[low + which[number == 5]] = True
                own = number == 4
                if wanted and own.any():
                    pieces.append((low + which[own], value[own], end[own]))
            found.add(pieces)
        # What is only counted ran at no one time.
        kept = ~counted
        first = begin + columns[1][kept]
        return XEvents(
            kinds=columns[0][kept],
            starts=first,
            ends=first + columns[2][kept],
            stats={name: found.column(name, kept) for name in stats},
        )


@dataclass(frozen=True, kw_only=True)
class Plane:
    """What one source recorded: a device, the threads of a host, or metadata."""

    name: str
    stats: Mapping[str, Any]
    lines: tuple[XLine, ...]
    kinds: Mapping[int, StatKind]

    def line(self, name: str) -> XLine | None:
        """The first line of a name."""
        return next((each for each in self.lines if each.name == name), None)


@dataclass(frozen=True, kw_only=True)
class XSpace:
    """One trace file: the planes of one host. ``problems`` are what the profiler could not record."""

    host: str
    planes: tuple[Plane, ...]
    problems: tuple[str, ...]

    def named(self, prefix: str) -> Iterator[Plane]:
        """The planes whose name begins with ``prefix``."""
        return (each for each in self.planes if each.name.startswith(prefix))


class _TraceFile:
    """The bytes of a trace, for Python and for NumPy, and when its earliest line begins."""

    def __init__(self, data: bytes | mmap.mmap) -> None:
        self.bytes = memoryview(data)
        self.array: Bytes = np.frombuffer(data, np.uint8)
        self.base_ns = 0


class _Stats:
    """The wanted stats of the events of a line, piece by piece."""

    def __init__(self, file: _TraceFile, wanted: Mapping[int, str], names: Mapping[int, str], count: int) -> None:
        self._file, self._wanted, self._names, self._count = file, wanted, names, count
        self._found: dict[str, list[tuple[Ints, Ints, Ints, Ints]]] = {}

    def add(self, pieces: Iterable[tuple[Ints, Ints, Ints]]) -> None:
        """Stats as (event, start, end) of each."""
        for event, starts, ends in pieces:
            identifiers, numbers = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
            values, stops = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
            for which, number, _, value, end in Lockstep(self._file.array, starts, ends):
                first = number == 1
                identifiers[which[first]] = value[first]
                other = which[~first]
                numbers[other], values[other], stops[other] = number[~first], value[~first], end[~first]
            for identifier, name in self._wanted.items():
                own = identifiers == identifier
                if own.any():
                    self._found.setdefault(name, []).append((event[own], numbers[own], values[own], stops[own]))

    def column(self, name: str, kept: npt.NDArray[np.bool_]) -> Column:
        """The column of one stat, for the events that are kept."""
        values: npt.NDArray[Any] = np.zeros(self._count, np.int64)
        present = np.zeros(self._count, bool)
        texts: dict[str, int] = {}
        for events, numbers, found, stops in self._found.get(name, ()):
            present[events] = True
            for number in np.unique(numbers):
                own = numbers == number
                values = self._filled(values, events[own], int(number), found[own], stops[own], texts)
        return Column(values=values[kept], present=present[kept], texts=tuple(texts))

    def _filled(
        self, values: npt.NDArray[Any], events: Ints, number: int, found: Ints, stops: Ints, texts: dict[str, int]
    ) -> npt.NDArray[Any]:
        """The values with those of some events; text goes to ``texts``, and its place there to the values."""
        if number == _DOUBLE:
            values = values.astype(np.float64)
            values[events] = self._file.array[found[:, None] + np.arange(8)].reshape(-1).view("<f8")
        elif number == _REFERENCE:
            known, inverse = np.unique(found, return_inverse=True)
            codes = [texts.setdefault(self._names.get(int(one), ""), len(texts)) for one in known]
            values[events] = np.array(codes, np.int64)[inverse]
        elif number in (_STRING, _BYTES):
            spans = zip(found.tolist(), stops.tolist(), strict=True)
            written = (bytes(self._file.bytes[low:high]).decode("utf-8", "replace") for low, high in spans)
            values[events] = [texts.setdefault(each, len(texts)) for each in written]
        else:
            values[events] = found
        return values


def read_space(path: Path) -> XSpace:
    """Read a trace file; its events are read when a line is asked for them. Raises RooftopError for other files."""
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise RooftopError("trace", str(path), f"a trace of JAX's profiler, *.xplane.pb ({error})") from None
    try:
        return space_of(data, host=path.name.removesuffix(".xplane.pb"))
    except RooftopError as error:
        raise RooftopError("trace", str(path), f"a trace of JAX's profiler, *.xplane.pb ({error.accepted})") from None


def space_of(data: bytes | mmap.mmap, *, host: str) -> XSpace:
    """The same of the bytes of a serialized XSpace."""
    file = _TraceFile(data)
    spans: list[Field] = []
    problems: list[str] = []
    for each in fields(file.bytes, 0, len(file.bytes)):
        if each.wire != LENGTH or each.number > 4:
            raise RooftopError("trace", f"field {each.number}", "the planes of an XSpace")
        if each.number == 1:
            spans.append(each)
        elif each.number in (2, 3):
            problems.append(text(file.bytes, each))
        else:
            host = text(file.bytes, each)
    planes = tuple(_plane(file, each) for each in spans)
    begun = [line._timestamp_ns for plane in planes for line in plane.lines if line._span[1] > line._span[0]]
    file.base_ns = min((each for each in begun if each), default=0)
    return XSpace(host=host, planes=planes, problems=tuple(problems))


def _plane(file: _TraceFile, span: Field) -> Plane:
    own = list(fields(file.bytes, span.value, span.end))
    names: dict[int, str] = {}
    for each in own:
        if each.number == 5:
            key, value = _entry(file, each)
            names[key] = next((text(file.bytes, one) for one in value if one.number == 2), "")
    kinds: dict[int, StatKind] = {}
    for each in own:
        if each.number == 4:
            key, value = _entry(file, each)
            named = {one.number: text(file.bytes, one) for one in value if one.number in (2, 4)}
            stats = [one for one in value if one.number == 5]
            kinds[key] = StatKind(
                name=named.get(2, ""), display_name=named.get(4, ""), stats=_stats(file, stats, names)
            )
    return Plane(
        name=next((text(file.bytes, each) for each in own if each.number == 2), ""),
        stats=_stats(file, [each for each in own if each.number == 6], names),
        lines=tuple(_line(file, each, names) for each in own if each.number == 3),
        kinds=kinds,
    )


def _line(file: _TraceFile, span: Field, names: Mapping[int, str]) -> XLine:
    name, identifier, timestamp_ns = "", 0, 0
    at, end = span.value, span.end
    # The events come in between, and are many: this looks at what stands before the first of them, and behind them.
    for each in fields(file.bytes, at, end):
        if each.number == 4:
            break
        name, identifier, timestamp_ns = _head(file, each, name, identifier, timestamp_ns)
        at = each.end
    return XLine(name=name, id=identifier, _file=file, _names=names, _timestamp_ns=timestamp_ns, _span=(at, end))


def _head(file: _TraceFile, each: Field, name: str, identifier: int, timestamp_ns: int) -> tuple[str, int, int]:
    if each.number in (2, 11) and (each.number == 2 or not name):
        return text(file.bytes, each), identifier, timestamp_ns
    if each.number == 1:
        return name, signed(each.value), timestamp_ns
    if each.number == 3:
        return name, identifier, signed(each.value)
    return name, identifier, timestamp_ns


def _entry(file: _TraceFile, span: Field) -> tuple[int, list[Field]]:
    """Key and fields of the value of an entry of a map."""
    key, value = 0, list[Field]()
    for each in fields(file.bytes, span.value, span.end):
        if each.number == 1:
            key = signed(each.value)
        elif each.number == 2:
            value = list(fields(file.bytes, each.value, each.end))
    return key, value


def _stats(file: _TraceFile, spans: Sequence[Field], names: Mapping[int, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for span in spans:
        name = ""
        value: Any = None
        for each in fields(file.bytes, span.value, span.end):
            if each.number == 1:
                name = names.get(signed(each.value), "")
            elif each.number == _DOUBLE:
                value = double(file.bytes, each.value)
            elif each.number == _SIGNED:
                value = signed(each.value)
            elif each.number == _STRING:
                value = text(file.bytes, each)
            elif each.number == _BYTES:
                value = bytes(file.bytes[each.value : each.end])
            elif each.number == _REFERENCE:
                value = names.get(signed(each.value), "")
            else:
                value = each.value
        found[name] = value
    return found


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
