"""Documents of compilations and traces with their timelines. They need JAX, unlike all other documents."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from rooftop.compiler.machine.lanes import compiled_lanes
from rooftop.compiler.machine.schedule import timeline
from rooftop.core.errors import RooftopError
from rooftop.core.timelines import COMPUTE, MORE, TRANSFER, WAIT, Lane, Lanes, TimeSpan
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.compiled.training import Refusal
from rooftop.explain.measured.report import Explained
from rooftop.present.document import Document
from rooftop.present.documents import document
from rooftop.profile.facts import COLLECTIVE, CONTROL, HOST, Facts
from rooftop.profile.measured import StepTime
from rooftop.profile.trace import SECONDS, Device, Track
from rooftop.simulate.planned import planned_lanes

#: Devices that are drawn, and lanes of one device that runs several ops at once.
DRAWN_DEVICES, _DEEP = 8, 4
_SORTS = {COLLECTIVE: WAIT, HOST: WAIT, CONTROL: MORE}


def compiled_document(answer: CompiledReport | Refusal) -> Document:
    """A compilation next to its plan, with both timelines; of a refusal, what fills the memory that is too small."""
    plan = answer.plan
    lanes = [] if plan is None else [planned_lanes(plan)]
    if isinstance(answer, CompiledReport):
        lanes.append(compiled_lanes(answer.compiled.module, answer.timeline, title="compiled: the schedule of XLA"))
    return document(answer.to_json(), plan=None if plan is None else plan.to_json(), lanes=lanes)


def measured_document(found: Explained) -> Document:
    """A trace next to its compilation and plan, with the timelines of all three."""
    lanes = [measured_lanes(found), *_compiled(found)]
    if found.plan is not None:
        lanes.append(planned_lanes(found.plan))
    plan = None if found.plan is None else found.plan.to_json()
    return document(found.to_json(), plan=plan, lanes=lanes)


def measured_lanes(found: Explained) -> Lanes:
    """One step as the trace has it: the counted one that is nearest to the median, on the devices of one host."""
    step = typical_step(found.measured.steps)
    devices = [each for each in found.trace.devices if len(each.track)]
    first = devices[0].host
    mine = [each for each in devices if each.host == first]
    lanes = [lane for each in mine[:DRAWN_DEVICES] for lane in _device(each, step, found)]
    lanes += [
        Lane(name=f"TPU {each.ordinal} SparseCore {each.core}", spans=tuple(spans))
        for each in found.trace.sparse_cores
        if each.host == first and each.ordinal in {device.ordinal for device in mine[:DRAWN_DEVICES]}
        for spans in _rows(list(_spans(each.track, step, found, beside=False)))[:1]
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
    counted = [each for each in steps if each.counted] or list(steps)
    median = sorted(each.seconds for each in counted)[len(counted) // 2]
    return min(counted, key=lambda each: abs(each.seconds - median))


def _device(device: Device, step: StepTime, found: Explained) -> Iterator[Lane]:
    """The lanes of a device: one, or as many as it runs ops at once; then the transfers that run beside them."""
    name = f"{device.kind.upper()} {device.ordinal}"
    for at, spans in enumerate(_rows(list(_spans(device.track, step, found, beside=False)))):
        yield Lane(name=name + (f" ({at + 1})" if at else ""), spans=tuple(spans))
    for spans in _rows(list(_spans(device.beside, step, found, beside=True)))[:1]:
        yield Lane(name=f"{name} beside", spans=tuple(spans))


def _spans(track: Track, step: StepTime, found: Explained, *, beside: bool) -> Iterator[TimeSpan]:
    within = np.flatnonzero((track.ends > step.begins) & (track.starts < step.ends))
    for at in within.tolist():
        op, facts = found.trace.ops[int(track.ops[at])], found.facts[int(track.ops[at])]
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
    for each in sorted(spans, key=lambda each: (each.start_s, -each.end_s)):
        row = next((row for row in rows if row[-1].end_s <= each.start_s * (1 + 1e-12)), None)
        if row is not None:
            row.append(each)
        elif len(rows) < _DEEP:
            rows.append([each])
    return rows


def _compiled(found: Explained) -> Iterator[Lanes]:
    """The schedule of the largest program, where the plan says on which slice it lies and TPUs ran it."""
    plan = found.plan
    if plan is None or found.trace.kind != "tpu" or not found.programs:
        return
    if math.prod(plan.mesh.shape.values()) != found.measured.devices:
        return
    program = max(found.programs.values(), key=lambda each: len(each.facts))
    try:
        line = timeline(program.module, plan.mesh)
    except RooftopError:
        # A program that does not lie on the plan's mesh has no schedule there.
        return
    yield compiled_lanes(program.module, line, title=f"compiled: {program.module.name}")
