"""Traces made by hand, through JAX's own writer: what tests of measurements read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from jax.profiler import ProfileData

from rooftop.profile.facts import facts_of
from rooftop.profile.measured import Measured, MeasuredCollective, measure
from rooftop.profile.planes import trace_of
from rooftop.profile.xplane import space_of

US = 1_000_000
GATHER = (
    "%all-gather-start.1 = (bf16[8,128]{1,0}, bf16[64,128]{1,0}) all-gather-start(bf16[8,128]{1,0} %p.1), channel_id=1"
)
GATHERED = (
    "%all-gather-done.1 = bf16[64,128]{1,0} all-gather-done((bf16[8,128]{1,0}, bf16[64,128]{1,0}) %all-gather-start.1)"
)
REDUCE = "%all-reduce.3 = f32[1024]{0} all-reduce(f32[1024]{0} %fusion.2), channel_id=2, to_apply=%add"
LOOP = "%while.4 = (s32[], f32[8]{0}) while((s32[], f32[8]{0}) %tuple.1), condition=%c, body=%b"


def fusion(number: int) -> str:
    """The HLO of a fusion."""
    array = "bf16[64,64]{1,0}"
    return f"%fusion.{number} = {array} fusion({array} %p.0), kind=kLoop, calls=%fused_computation.{number}"


@dataclass(frozen=True)
class Event:
    """An event in microseconds from the beginning of its line."""

    name: str
    start: float
    end: float
    stats: Mapping[str, Any] = field(default_factory=dict)


def plane(
    name: str,
    lines: Mapping[str, Sequence[Event]],
    stats: Mapping[str, Any] | None = None,
    kinds: Mapping[str, Mapping[str, Any]] | None = None,
    timestamp_ns: int = 1_000_000,
) -> str:
    """A plane as the text of a protocol buffer; ``kinds`` are the stats that events of one name have in common."""
    names: dict[str, int] = {}
    known: dict[str, int] = {}

    def stat(key: str, value: Any) -> str:
        number = names.setdefault(key, len(names) + 1)
        what = {int: "int64_value", float: "double_value", str: "str_value"}[type(value)]
        return f"stats {{ metadata_id: {number} {what}: {json.dumps(value)} }}"

    written = []
    for at, (title, events) in enumerate(lines.items()):
        body = " ".join(
            f"events {{ metadata_id: {known.setdefault(event.name, len(known) + 1)} "
            f"offset_ps: {round(event.start * US)} duration_ps: {round((event.end - event.start) * US)} "
            f"{' '.join(stat(*one) for one in event.stats.items())} }}"
            for event in events
        )
        written.append(f'lines {{ id: {at} name: "{title}" timestamp_ns: {timestamp_ns} {body} }}')
    about = " ".join(stat(*one) for one in (stats or {}).items())
    metadata = " ".join(
        f"event_metadata {{ key: {number} value {{ id: {number} name: {json.dumps(text)} "
        f"{' '.join(stat(*one) for one in ((kinds or {}).get(text) or {}).items())} }} }}"
        for text, number in known.items()
    )
    stat_metadata = " ".join(
        f'stat_metadata {{ key: {n} value {{ id: {n} name: "{text}" }} }}' for text, n in names.items()
    )
    return f'planes {{ name: "{name}" {" ".join(written)} {metadata} {stat_metadata} {about} }}'


def xspace(*planes: str) -> bytes:
    """The bytes of a trace."""
    return bytes(ProfileData.text_proto_to_serialized_xspace("\n".join(planes)))


def step(at: float) -> list[Event]:
    """A step of 100 us that begins at ``at``: 63 compute, 21 exposed, 6 within a loop, 10 idle."""
    return [
        Event(fusion(1), at, at + 30),
        Event(GATHER, at + 30, at + 31),
        Event(fusion(2), at + 31, at + 60),
        Event(GATHERED, at + 60, at + 70),
        Event(REDUCE, at + 70, at + 80),
        Event(LOOP, at + 80, at + 90),
        Event(fusion(5), at + 82, at + 86),
    ]


KINDS = {
    fusion(1): {"flops": 3_000_000_000, "bytes_accessed": 6_000_000, "hlo_category": "convolution fusion"},
    fusion(2): {"flops": 2_900_000, "bytes_accessed": 2_900_000, "tf_op": "jit(step)/jvp(layers)/mlp/up/dot_general:"},
    fusion(5): {"source": "model.py:12"},
}


def tpu(
    number: int = 0,
    *,
    extra: Mapping[str, Sequence[Event]] | None = None,
    stats: Mapping[str, Any] | None = None,
    timestamp_ns: int = 1_000_000,
    ops: Sequence[Event] | None = None,
) -> str:
    """The plane of a TPU with two steps."""
    lines = {
        "Steps": [Event("7", 0, 100), Event("8", 100, 200)],
        "XLA Modules": [Event("jit_step(123)", 0, 90), Event("jit_step(123)", 100, 190)],
        "XLA Ops": [*step(0), *step(100)] if ops is None else ops,
    } | dict(extra or {})
    return plane(f"/device:TPU:{number}", lines, stats, KINDS, timestamp_ns)


def measured(*spaces: bytes) -> Measured:
    """Measure the traces of hosts, by what they tell alone."""
    trace = trace_of([space_of(planes, host=f"host{at}") for at, planes in enumerate(spaces)])
    return measure(trace, [facts_of(op) for op in trace.ops])


def the(result: Measured, name: str) -> MeasuredCollective:
    """A collective by its op."""
    return next(collective for collective in result.collectives if collective.name == name)


def seconds(microseconds: float) -> Any:
    """Microseconds as seconds, to rounding."""
    return pytest.approx(microseconds * 1e-6, rel=1e-12, abs=1e-18)
