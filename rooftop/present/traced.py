"""Documents of compilations and traces with their timelines, from reports and not from their JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rooftop.compiler.machine.lanes import compiled_lanes
from rooftop.compiler.machine.schedule import timeline
from rooftop.core.errors import RooftopError
from rooftop.core.timelines import COMPUTE, MORE, TRANSFER, WAIT, Lane, Lanes, TimeSpan
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.measured.report import Explained
from rooftop.present.document import Document
from rooftop.present.documents import document
from rooftop.profile.facts import COLLECTIVE, CONTROL, HOST, Facts
from rooftop.profile.measured import StepTime
from rooftop.profile.trace import SECONDS, Device, Track
from rooftop.simulate.planned import planned_lanes

if TYPE_CHECKING:
    from rooftop.explain.compiled.training import Refusal

#: Devices that are drawn, and lanes of one device that runs several ops at once.
DRAWN_DEVICES, _DEEP = 8, 4
_SORTS = {COLLECTIVE: WAIT, HOST: WAIT, CONTROL: MORE}


def compiled_document(answer: CompiledReport | Refusal) -> Document:
    """A compilation next to its plan, with both timelines; of a refusal, what fills the memory that is too small."""
    plan = answer.plan
    lanes = [] if plan is None else [planned_lanes(plan)]
    if not isinstance(answer, CompiledReport):
        return document(answer.record(), lanes=lanes)
    lanes.append(compiled_lanes(answer.compiled.module, answer.timeline, title="compiled: the schedule of XLA"))
    return document(answer.record(), cached=answer.compiled.cached, lanes=lanes)


def measured_document(explained: Explained) -> Document:
    """A trace next to its compilation and plan, with the timelines of all three."""
    lanes = [measured_lanes(explained), *_compiled(explained)]
    if explained.plan is not None:
        lanes.append(planned_lanes(explained.plan))
    plan = None if explained.plan is None else explained.plan.document
    return document(explained.record(), plan=plan, lanes=lanes)


def measured_lanes(explained: Explained) -> Lanes:
    """One step as the trace has it: the counted one that is nearest to the median, on the devices of one host."""
    step = typical_step(explained.measured.steps)
    devices = [device for device in explained.trace.devices if len(device.track)]
    first = devices[0].host
    mine = [device for device in devices if device.host == first]
    lanes = [lane for item in mine[:DRAWN_DEVICES] for lane in _device(item, step, explained)]
    lanes += [
        Lane(name=f"TPU {sparse_core.ordinal} SparseCore {sparse_core.core}", spans=tuple(spans))
        for sparse_core in explained.trace.sparse_cores
        if sparse_core.host == first and sparse_core.ordinal in {device.ordinal for device in mine[:DRAWN_DEVICES]}
        for spans in _rows(list(_spans(sparse_core.track, step, explained, beside=False)))[:1]
    ]
    left = len(devices) - len(mine[:DRAWN_DEVICES])
    note = f"step {step.number}, the counted one nearest to the median; where nothing is drawn the device idles"
    return Lanes(
        title=f"measured: step {step.number}",
        source="measured",
        total_s=(step.ends - step.begins) * SECONDS,
        lanes=tuple(lanes),
        note=note + (f"; {left} more devices ran it" if left else ""),
    )


def typical_step(steps: Sequence[StepTime]) -> StepTime:
    """The counted step whose duration is nearest to the median."""
    counted = [step for step in steps if step.counted] or list(steps)
    median = sorted(step.seconds for step in counted)[len(counted) // 2]
    return min(counted, key=lambda step: abs(step.seconds - median))


def _device(device: Device, step: StepTime, explained: Explained) -> Iterator[Lane]:
    """The lanes of a device: one for each op that it runs at once, then its transfers."""
    name = f"{device.kind.upper()} {device.ordinal}"
    for at, spans in enumerate(_rows(list(_spans(device.track, step, explained, beside=False)))):
        yield Lane(name=name + (f" ({at + 1})" if at else ""), spans=tuple(spans))
    for spans in _rows(list(_spans(device.beside, step, explained, beside=True)))[:1]:
        yield Lane(name=f"{name} beside", spans=tuple(spans))


def _spans(track: Track, step: StepTime, explained: Explained, *, beside: bool) -> Iterator[TimeSpan]:
    within = np.flatnonzero((track.ends > step.begins) & (track.starts < step.ends))
    for at in within.tolist():
        op, facts = explained.trace.ops[int(track.ops[at])], explained.facts[int(track.ops[at])]
        start, end = max(int(track.starts[at]), step.begins), min(int(track.ends[at]), step.ends)
        yield TimeSpan(
            name=op.name,
            sort=TRANSFER if beside else _SORTS.get(facts.category, COMPUTE),
            start_s=(start - step.begins) * SECONDS,
            end_s=(end - step.begins) * SECONDS,
            scope=facts.place.scope,
            phase=facts.place.phase,
            source=facts.source,
            details=_details(facts),
        )


def _details(facts: Facts) -> dict[str, str | float]:
    return {"collective": facts.kind, "axes": ",".join(facts.axes)} if facts.kind else {}


def _rows(spans: list[TimeSpan]) -> list[list[TimeSpan]]:
    """Spans in as few rows as need be for none to overlap, a loop above what runs in it; at most ``_DEEP`` rows."""
    rows: list[list[TimeSpan]] = []
    for item in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        row = next((row for row in rows if row[-1].end_s <= item.start_s * (1 + 1e-12)), None)
        if row is not None:
            row.append(item)
        elif len(rows) < _DEEP:
            rows.append([item])
    return rows


def _compiled(explained: Explained) -> Iterator[Lanes]:
    """The schedule of the largest program, where the plan says on which slice it lies and TPUs ran it."""
    plan = explained.plan
    if plan is None or explained.trace.kind != "tpu" or not explained.programs:
        return
    if math.prod(plan.mesh.shape.values()) != explained.measured.devices:
        return
    program = max(explained.programs.values(), key=lambda program: len(program.facts))
    try:
        line = timeline(program.module, plan.mesh)
    except RooftopError:
        # A program that does not lie on the plan's mesh has no schedule there.
        return
    yield compiled_lanes(program.module, line, title=f"compiled: {program.module.name}")
