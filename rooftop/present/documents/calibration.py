"""The document of ``rooftop calibrate``: measured points and fractions of a chip, or the terms of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rooftop.core.measurements import CalibrationPoint
from rooftop.core.quantities import format_bytes, format_count, format_seconds
from rooftop.hardware import Calibrated
from rooftop.present.document import Chart, Document, ShownVerdict, Table, TableColumn, columns
from rooftop.present.documents.parts import prose
from rooftop.roofline.calibration import Calibration, MeasuredRun

_WHAT = {
    "call": "Calls", "hbm": "HBM", "matmul": "Matmuls", "collective": "Collectives", "attention": "Attention"
}  # fmt: skip
#: Sizes of a point in words; of other work its bytes and devices.
_SIZES = {"matmul": "{m}x{k}x{n}", "attention": "{seq} tokens, {heads} heads of {d_head}"}
_AMOUNTS: dict[str, Callable[[int], str]] = {"bytes": format_bytes, "ranks": "{} devices".format}


def calibration(answer: Calibration) -> Document:
    """The terms of a run, or the points of devices, and the fractions that plans take from them."""
    run = answer.run
    where = f" as {answer.slice}" if answer.slice else ""
    subject = f"{answer.devices}{where}, {answer.date[:10]}"
    if run is not None:
        worst = next(term for term in run.terms if term.term == run.worst)
        ratio = "" if worst.ratio is None else f", {_times(worst.ratio)} times the plan"
        says = (
            f"{run.worst} {'are' if run.worst.endswith('s') else 'is'} off most: "
            f"{format_seconds(worst.measured_s)} of a step, planned {format_seconds(worst.planned_s)}{ratio}"
        )
        verdict = ShownVerdict(
            subject=f"{run.run} on {subject}",
            says=says,
            details=(
                f"{run.steps} steps of {format_seconds(run.measured_s)}, planned {format_seconds(run.planned_s)}",
            ),
        )
        return Document(title="A calibration by a run", verdict=verdict, charts=(_terms(run), *_notes(answer)))
    state = "all points" if answer.complete else "the time was over: the same command goes on"
    verdict = ShownVerdict(
        subject=subject, says=f"{len(answer.points)} points in {format_seconds(answer.spent_s)}, {state}"
    )
    charts = (*_fractions(answer.fractions), *_points(answer), *_notes(answer))
    return Document(title="A calibration", verdict=verdict, charts=charts)


def _terms(run: MeasuredRun) -> Table:
    rows = tuple(
        (
            term.term,
            format_seconds(term.measured_s),
            format_seconds(term.planned_s),
            "" if term.ratio is None else _times(term.ratio),
            term.change,
        )
        for term in run.terms
    )
    headings = (*columns("of a step", "measured", "planned", "ratio"), TableColumn("next plan", "text", wrap=True))
    return Table(title="", columns=headings, rows=rows)


def _fractions(fractions: Calibrated | None) -> Iterator[Chart]:
    """The fractions that plans take."""
    if fractions is None:
        return
    rows = [
        *((f"matmul, {width}", _share(fit.peak), f"starts of {format_seconds(fit.start_s)}")
          for width, fit in fractions.matmul.items()),
        *((name, _share(share), "") for name, share in (("HBM copy", fractions.hbm), ("HBM read", fractions.hbm_read))
          if share is not None),
    ]  # fmt: skip
    if (attention := fractions.attention) is not None:
        for size, share in zip(attention.sizes, attention.share, strict=True):
            rows.append((f"attention, heads of {size:.0f}", _share(share), ""))
        rows.append(("attention, backward", _share(attention.backward_share), "of forward"))
    for kind, fit in fractions.ici.items():
        for ranks, start_s, share in zip(fit.ranks, fit.start_s, fit.share, strict=True):
            rows.append((f"{kind}, {ranks:.0f} devices", _share(share), f"starts of {format_seconds(start_s)}"))
    yield Table(title="Fractions of peak", columns=columns("figure", "of peak", "and", text=1), rows=tuple(rows))


def _times(ratio: float) -> str:
    return f"{ratio:,.{2 if ratio < 100 else 0}f}"


def _share(value: float) -> str:
    return f"{value:.3f}" if value >= 0.01 else f"{value:.1e}"


def _points(answer: Calibration) -> Iterator[Chart]:
    for what, title in _WHAT.items():
        points = [point for point in answer.points if point.what == what]
        if not points:
            continue
        rows = tuple(
            (
                " ".join(word for word in (point.kind, point.dtype) if word),
                _sizes(point),
                format_seconds(point.median_s),
                _rate(point),
                "" if point.of_peak is None else _share(point.of_peak),
            )
            for point in points
        )
        yield Table(title=title, columns=columns("work", "sizes", "median", "rate", "of peak", text=2), rows=rows)


def _sizes(point: CalibrationPoint) -> str:
    if point.what in _SIZES:
        return _SIZES[point.what].format_map(point.sizes)
    return ", ".join(write(point.sizes[name]) for name, write in _AMOUNTS.items() if name in point.sizes)


def _rate(point: CalibrationPoint) -> str:
    if point.flops:
        return format_count(point.flops / point.median_s, "FLOP/s")
    return f"{format_bytes(point.bytes / point.median_s)}/s" if point.bytes else ""


def _notes(answer: Calibration) -> Iterator[Chart]:
    lines = [f"Note: {note}." for note in answer.notes]
    skipped: dict[str, list[str]] = {}
    for name, why in answer.skipped.items():
        skipped.setdefault(why, []).append(name)
    lines += [
        f"not measured: {names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"
        for why, names in skipped.items()
    ]
    if lines:
        yield prose("\n".join(lines))
