"""The document of ``rooftop check``: findings with their prices, what changed, and where the time goes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rooftop.check.report import CheckRecord
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.present.document import Chart, Document, Item, Items, ShownFigure, Table, TableColumn
from rooftop.present.documents.compiled import compilation, layered
from rooftop.present.documents.explained import difference
from rooftop.present.documents.parts import place, sentence, table


def checked(answer: CheckRecord, *, frames: bool = False, top: int = 0) -> Document:
    """A checked program. ``top`` rows of what changed are printed (0: all).

    With ``frames``, sources are whole stacks.
    """
    whole = compilation(answer.compiled, cached=None, frames=frames)
    broken = not all(gate.holds for gate in answer.gates)
    return replace(
        whole,
        title=f"Check of {answer.program}",
        verdict=replace(
            whole.verdict,
            subject=f"{answer.program} on {whole.verdict.subject}",
            says=sentence(answer.verdict),
            no=answer.verdict if broken else "",
            details=(*whole.verdict.details, *_ending(answer)),
        ),
        figures=(*whole.figures, *_figures(answer)),
        charts=(
            *_findings(answer, frames=frames),
            *_gates(answer),
            *_changes(answer, top),
            *_sums(answer),
            *whole.charts,
        ),
    )


def _ending(answer: CheckRecord) -> Iterator[str]:
    if answer.error:
        yield f"The script failed: {answer.error}"
    if answer.refused:
        yield f"Next to it, {answer.refused}"


def _figures(answer: CheckRecord) -> Iterator[ShownFigure]:
    yield ShownFigure("mfu", "MFU", answer.mfu, "%", "expected", note="the program's own FLOPs, of the bf16 peak")
    if answer.tokens_per_s is not None:
        rate = answer.tokens_per_s
        yield ShownFigure("tokens_per_s", "tokens a second", rate, "", "expected", shown=format_count(rate))


def _findings(answer: CheckRecord, *, frames: bool) -> Iterator[Chart]:
    if not answer.findings:
        return
    layers = answer.compiled.layers
    rows, items = [], []
    for number, finding in enumerate(answer.findings, start=1):
        stack = " < ".join(map(place, finding.frames)) if frames else ""
        rows.append(
            (
                str(number),
                finding.rule,
                format_seconds(finding.seconds) if finding.seconds else "",
                format_bytes(finding.bytes) if finding.bytes else "",
                "" if finding.scope == "unscoped" else layered(finding.scope, layers),
                stack or place(finding.source),
            )
        )
        items.append(Item(finding.evidence, mark=str(number), note=finding.what))
    headings = (
        TableColumn("", "text"),
        TableColumn("finding", "text"),
        *(TableColumn(name) for name in ("time", "memory")),
        TableColumn("scope", "text", wrap=True, drop=1),
        TableColumn("from", "text", wrap=frames),
    )
    about = "What each is worth at most, on one device in a step."
    yield Table(title="Findings", about=about, section="Findings", columns=headings, rows=tuple(rows))
    yield Items(title="", items=tuple(items))


def _gates(answer: CheckRecord) -> Iterator[Chart]:
    rows = []
    for gate in answer.gates:
        write = format_seconds if gate.unit == "s" else format_bytes
        before = write(gate.before) if gate.before else ""
        holds = "" if gate.holds else "over"
        rows.append((gate.name, before, write(gate.after), write(gate.limit), holds))
    if rows:
        yield table("Limits", ("", "before", "now", "at most", ""), rows, section="Limits")


def _changes(answer: CheckRecord, top: int) -> Iterator[Chart]:
    if answer.difference is not None:
        yield from difference(answer.difference, top=top).charts


def _sums(answer: CheckRecord) -> Iterator[Chart]:
    sums = answer.sums
    classes = list(dict.fromkeys([*sums.arguments, *(sums.at_peak or {})]))
    rows = [
        (
            name,
            format_bytes(sums.arguments[name]) if name in sums.arguments else "",
            format_bytes((sums.at_peak or {})[name]) if name in (sums.at_peak or {}) else "",
        )
        for name in classes
    ]
    if rows:
        yield table("Bytes on a device", ("", "arguments", "at the peak"), rows, section="Memory sums")
