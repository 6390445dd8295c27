"""A timeline as a trace of JAX's profiler (XSpace): XProf, TensorBoard and ``rooftop explain`` read it as if measured.

A TPU for each lane in which something computes: what it computes and waits for on its line "XLA Ops", transfers next to
that on "Async XLA Ops", the program on "XLA Modules" and the step on "Steps". Sources: the published schema of XSpace,
and of a folder of profiles (``plugins/profile/RUN/HOST.xplane.pb``).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rooftop.core.errors import RooftopError
from rooftop.core.files import write_bytes
from rooftop.core.timelines import MORE, TRANSFER, Lanes, TimeSpan

_PS = 1e12
#: A line of a real trace begins at some time of day; at 0 readers take it for absent.
_BEGIN_NS = 1_000_000
#: Numbers of the fields of XSpace and of the messages in it.
_PLANES, _WARNINGS, _HOSTNAMES = 1, 3, 4
_NAME, _LINES, _EVENT_METADATA, _STAT_METADATA, _STATS = 2, 3, 4, 5, 6
_DOUBLE, _UNSIGNED, _TEXT, _BYTES = 2, 3, 5, 6
_OPCODE = re.compile(r"= .*?[\]\})] ([a-z][\w\-]*)\(")
_NUMBER = re.compile(r"\.\d+$")


def varint(value: int) -> bytes:
    """A varint of a protocol buffer."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def message(number: int, content: bytes | int) -> bytes:
    """Field ``number`` of a message: bytes with their length, or a varint."""
    if isinstance(content, int):
        return varint(number << 3) + varint(content)
    return varint(number << 3 | 2) + varint(len(content)) + content


@dataclass(kw_only=True)
class _Names:
    """Numbers of events and of stats, in the order in which they are first used."""

    events: dict[str, int] = field(default_factory=dict)
    about: dict[int, bytes] = field(default_factory=dict)
    stats: dict[str, int] = field(default_factory=dict)

    def stat(self, name: str, value: str | float | int | bytes) -> bytes:
        """An XStat."""
        number = message(1, self.stats.setdefault(name, len(self.stats) + 1))
        if isinstance(value, float):
            return number + varint(_DOUBLE << 3 | 1) + struct.pack("<d", value)
        if isinstance(value, bytes):
            return number + message(_BYTES, value)
        return number + (message(_UNSIGNED, value) if isinstance(value, int) else message(_TEXT, value.encode()))

    def event(self, name: str, stats: Mapping[str, str | float | int | bytes] | None = None) -> int:
        """The number of events of that name, with what they have in common."""
        number = self.events.get(name)
        if number is None:
            number = self.events[name] = len(self.events) + 1
            encoded_stats = b"".join(message(5, self.stat(*entry)) for entry in (stats or {}).items())
            self.about[number] = message(1, number) + message(2, name.encode()) + encoded_stats
        return number

    def metadata(self) -> bytes:
        """The maps of a plane."""
        events = b"".join(
            message(_EVENT_METADATA, message(1, number) + message(2, body)) for number, body in self.about.items()
        )
        return events + b"".join(
            message(_STAT_METADATA, message(1, number) + message(2, message(1, number) + message(2, name.encode())))
            for name, number in self.stats.items()
        )


def xspace(
    drawn: Lanes,
    *,
    program: str,
    device: Mapping[str, str | float] | None = None,
    module: bytes = b"",
    host: str = "rooftop",
) -> bytes:
    """The bytes of a trace of one step. ``device`` are stats of each plane: what the device is, and its peaks.

    ``module`` is a serialized HloProto of ``program``, which readers map ops to their instructions with. A warning in
    the trace says that it is no measurement.
    """
    devices = [lane for lane in drawn.lanes if any(span.sort != TRANSFER for span in lane.spans)]
    # Transfers are those of the one device, where there is one: lanes of several do not say whose they are.
    beside = _transfers(drawn) if len(devices) == 1 else []
    planes = b"".join(
        message(_PLANES, _plane(drawn, number, lane.spans, beside, program, device or {}))
        for number, lane in enumerate(devices)
    )
    if module:
        inside = _Names()
        inside.event(f"{program}(1)", {"program_id": 1, "Hlo Proto": module})
        planes += message(_PLANES, message(1, len(devices) + 1) + message(_NAME, b"/host:metadata") + inside.metadata())
    # Readers show it next to the figures: nobody should take them for measured ones.
    note = f"a {drawn.source} timeline, no measurement" + (f": {drawn.note}" if drawn.note else "")
    return planes + message(_WARNINGS, note.encode()) + message(_HOSTNAMES, host.encode())


def _plane(
    drawn: Lanes,
    number: int,
    spans: Iterable[TimeSpan],
    beside: Iterable[TimeSpan],
    program: str,
    device: Mapping[str, str | float],
) -> bytes:
    """One device: a line for the step, for the program, for its ops and for transfers next to them."""
    names, total_ps = _Names(), round(drawn.total_s * _PS)
    lines = [
        ("Steps", [(names.event("1"), 0, total_ps)]),
        ("XLA Modules", [(names.event(f"{program}(1)", {"program_id": 1}), 0, total_ps)]),
        ("XLA Ops", [_event(names, span) for span in sorted(spans, key=lambda span: span.start_s)]),
        ("Async XLA Ops", [_event(names, span) for span in beside]),
    ]
    written = b"".join(
        message(_LINES, message(1, at) + message(2, name.encode()) + message(3, _BEGIN_NS) + _events(events))
        for at, (name, events) in enumerate(lines)
        if events
    )
    about = b"".join(message(_STATS, names.stat(*span)) for span in device.items())
    named = message(_NAME, f"/device:TPU:{number}".encode())
    return message(1, number + 1) + named + written + about + names.metadata()


def write(data: bytes, folder: Path, *, run: str, host: str = "rooftop") -> Path:
    """Write a trace where XProf and TensorBoard look for it below ``folder``. Raises RooftopError if that cannot be."""
    place = folder / "plugins" / "profile" / run
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RooftopError("xprof", str(folder), f"a folder that can be written ({error.strerror})") from None
    file = place / f"{host}.xplane.pb"
    write_bytes(file, data)
    return file


def _transfers(drawn: Lanes) -> list[TimeSpan]:
    """Transfers once each, though several links carry one, from its first byte to its last."""
    transfers: dict[object, TimeSpan] = {}
    for lane in drawn.lanes:
        for span in lane.spans:
            if span.sort == TRANSFER:
                key = span.flight if span.flight is not None else id(span)
                seen = transfers.get(key)
                if seen is None or span.seconds > seen.seconds:
                    transfers[key] = span
    return sorted(transfers.values(), key=lambda span: span.start_s)


def _event(names: _Names, span: TimeSpan) -> tuple[int, int, int]:
    """An event: its number, and from when to when, in picoseconds."""
    start = round(span.start_s * _PS)
    name = span.op or span.name
    number = names.events.get(name)
    if number is None:
        # Readers know an op by its program and by a number in it.
        number = names.event(name, _about(span) | {"symbol_id": len(names.events) + 1})
    return number, start, max(round(span.end_s * _PS), start + 1)


def _about(span: TimeSpan) -> dict[str, str | float | int | bytes]:
    stats: dict[str, str | float | int | bytes | None] = {
        "hlo_category": "while" if span.sort == MORE else span.category or _category(span.op),
        "tf_op": span.op_name,
        "source": span.source,
        "flops": None if span.flops is None else int(span.flops),
        "bytes_accessed": None if span.hbm_bytes is None else int(span.hbm_bytes),
        "program_id": 1,
    }
    return {name: value for name, value in stats.items() if value not in (None, "")}


def _events(events: Iterable[tuple[int, int, int]]) -> bytes:
    return b"".join(
        message(4, message(1, number) + message(2, start) + message(3, end - start)) for number, start, end in events
    )


def _category(op: str) -> str:
    """Category that a profiler gives an instruction: its opcode, or the prefix of its name."""
    match = _OPCODE.search(op)
    return match[1] if match else _NUMBER.sub("", op)
