"""The document of a script that ran on a described slice: its programs, and the costliest one in detail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from rooftop.arrays.mesh import UNUSED
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.explain.scripts import ScriptRecord
from rooftop.present.document import Chart, Document, ShownVerdict, Table, TableColumn
from rooftop.present.documents.compiled import compilation
from rooftop.present.documents.parts import mesh_text, prose, sentence

#: Lines of the script that read unknown values, and jits, that are named.
_NAMED = 6
_OPERATIONS = "operations of JAX itself"
#: Reasons for which programs are not compiled, in words.
_REASONS = {
    "operation": _OPERATIONS,
    "small": "small arguments that are not split",
    "repeated": "a function that was compiled often enough with other arguments",
    "flops": "fewer matmul FLOPs than asked for",
}


def script(answer: ScriptRecord) -> Document:
    """A script on a slice."""
    where = answer.slice.name
    shown = None if answer.costliest is None else answer.programs[answer.costliest]
    compiled = None if shown is None else shown.compiled or shown.refused
    detail = None if compiled is None else compilation(compiled, cached=None)
    mesh = "" if compiled is None else f": {_mesh(compiled.mesh.axes)}"
    return Document(
        title=f"Compiled for {where}",
        verdict=ShownVerdict(
            subject=f"{answer.command} on {where}{mesh}",
            says=sentence(answer.verdict),
            no="" if answer.fits else answer.verdict,
            details=(*(() if detail is None else detail.verdict.details), *_ending(answer)),
        ),
        figures=() if detail is None else detail.figures,
        charts=(*_programs(answer), *(() if detail is None else detail.charts), *_rest(answer)),
        sources=() if detail is None else detail.sources,
    )


def _mesh(axes: Mapping[str, int]) -> str:
    """The axes, and how many of the devices they are over."""
    used = {name: size for name, size in axes.items() if name != UNUSED}
    count, total = math.prod(used.values()), math.prod(axes.values())
    whole = mesh_text(used) if count > 1 else ""
    return ", ".join(filter(None, [whole, f"{count} of {total} devices" if count < total else ""]))


def _ending(answer: ScriptRecord) -> Iterator[str]:
    if answer.ending == "error" and answer.fits:
        yield f"The script failed: {answer.error}"
    elif answer.ending == "steps":
        yield "The script was stopped after enough calls of one program."


def _programs(answer: ScriptRecord) -> Iterator[Chart]:
    if not answer.programs:
        return
    rows = []
    for number, program in enumerate(answer.programs, start=1):
        compiled, refused = program.compiled, program.refused
        result = compiled or refused
        flops = program.matmul_flops
        step = None if compiled is None else compiled.step
        waits = None if step is None else step.exposed_ici_s + step.exposed_dcn_s
        took = "" if compiled is None else "cached" if program.cached else f"{compiled.compile_s:.0f} s"
        rows.append(
            (
                str(number),
                program.name,
                program.called_from,
                str(program.calls) if program.calls else "",
                "" if not flops else format_count(flops),
                "" if step is None else format_seconds(step.expected_s),
                "" if not waits else format_seconds(waits),
                "" if result is None else format_bytes(result.peak_bytes),
                "does not fit" if refused else "not read" if program.unread else took,
            )
        )
    columns = (
        TableColumn(""),
        TableColumn("program", "text"),
        TableColumn("called from", "text", drop=1),
        TableColumn("calls", drop=2),
        TableColumn("FLOPs"),
        TableColumn("a call"),
        TableColumn("waiting"),
        TableColumn("peak"),
        TableColumn("XLA", "text"),
    )
    about = "FLOPs as the program writes them, over all devices; times and memory of one device."
    yield Table(title="Programs", columns=columns, rows=tuple(rows), about=about)
    for number, program in enumerate(answer.programs, start=1):
        for difference in program.differs:
            yield prose(f"Program {number} is {program.name} compiled again; what differs: {difference}.")
        if program.kernels:
            yield prose(f"Program {number} has {program.kernels} Pallas kernels; the FLOPs above are outside of them.")
        if program.unread:
            yield prose(f"Program {number} cannot be read: {program.unread}.")
    if not all(program.regular for program in answer.programs):
        text = "The devices of an axis do not form a line or a grid on the slice"
        yield prose(f"{text}: collectives are priced as on a mesh of the same axes that rooftop lays out.")


def _rest(answer: ScriptRecord) -> Iterator[Chart]:
    if answer.reads:
        lines = _listed(answer.reads)
        yield prose(f"Values that were not computed, and read as 1, by line of the script: {lines}.")
    for note in answer.notes:
        yield prose(f"Note: {note}.")
    yield from _not_compiled(answer)


def _not_compiled(answer: ScriptRecord) -> Iterator[Chart]:
    """Jits of the script that were left out; operations of JAX itself only if there is nothing else to say."""
    by_reason: dict[str, dict[str, int]] = {}
    for item in answer.not_compiled:
        own = item.source or item.reason in ("small", "repeated")
        name = f"{item.name} ({item.source})" if item.source else item.name
        counts = by_reason.setdefault(_REASONS[item.reason] if own else _OPERATIONS, {})
        counts[name] = counts.get(name, 0) + item.count
    operations = by_reason.pop(_OPERATIONS, {})
    if operations and not (by_reason or answer.programs):
        by_reason[_OPERATIONS] = operations
    for reason, counts in by_reason.items():
        yield prose(f"Not compiled, {reason}: {_listed(counts)}.")
    if by_reason:
        yield prose("--min-flops 0 compiles every program.")


def _listed(counts: Mapping[str, int]) -> str:
    named = [f"{name} x {count}" if count > 1 else name for name, count in list(counts.items())[:_NAMED]]
    left = len(counts) - len(named)
    return ", ".join([*named, *([f"{left} more"] if left else [])])
