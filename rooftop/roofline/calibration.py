"""Calibrations: points that a user has measured, the fractions of a chip that they give, and the file that has both.

Each fit is of a form that plans price by. It minimises squared relative errors with no negative term, and falls back to
one share of the peak where there are too few points for more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt

from rooftop.core.amounts import Amount, Positive
from rooftop.core.errors import RooftopError
from rooftop.core.files import read_json_object
from rooftop.core.measurements import CalibrationPoint, Measurement, Provenance
from rooftop.core.records import Record, read_record
from rooftop.hardware import AttentionCurve, Calibrated, Chip, CollectiveFit, MatmulFit
from rooftop.roofline.achievable import fractions

ACCEPTED = "a file that rooftop calibrate wrote"
#: A measurement may be so much faster than the peak of the catalogue: clocks and timers are not exact.
_ABOVE_PEAK = 1.03
#: Matmuls that HBM bounds for more than this share of their time say nothing about the matrix unit.
_HBM_BOUND = 0.9

Term = Literal["compute", "HBM", "collectives", "idle in programs", "host gaps", "step"]
_Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RunTerm(Record):
    """A part of the step of a run, measured and planned, per device in seconds.

    ``ratio`` is measured / planned, None where nothing is planned; ``change`` says what the next plan changes.
    """

    term: Term
    measured_s: Amount
    planned_s: Amount
    ratio: Amount | None
    change: str

    @property
    def off_s(self) -> float:
        """Seconds by which the plan is off."""
        return abs(self.measured_s - self.planned_s)


@dataclass(frozen=True, kw_only=True)
class MeasuredRun(Record):
    """Steps of a run next to its plan: seconds of a step, and its parts. ``worst`` is the part that is off most."""

    run: str
    steps: Positive
    measured_s: Amount
    planned_s: Amount
    terms: tuple[RunTerm, ...]
    worst: Term


@dataclass(frozen=True, kw_only=True)
class Calibration(Provenance):
    """A calibration file: measured points, or a measured run, and the fractions that they give.

    ``chip`` is that of the devices, and ``slice`` theirs; without a chip there are points alone. ``skipped`` maps what
    was not measured to the reason. ``complete`` is False if the time was over before all points were measured.
    """

    kind: Literal["calibration"] = "calibration"
    schema: Literal[1] = 1
    command: str
    chip: str | None
    slice: str | None
    spent_s: Amount
    complete: bool
    points: tuple[CalibrationPoint, ...]
    skipped: Mapping[str, str]
    run: MeasuredRun | None
    fractions: Calibrated | None
    notes: tuple[str, ...]

    def by(self, name: str) -> str:
        """The calibration in words: 'calibration.json (4 x TPU v5 lite, 2026-11-26)'."""
        run = "" if self.run is None else f"{self.run.steps} steps of {self.run.run} on "
        return f"{name} ({run}{self.devices}, {self.date[:10]})"


def read_calibration(path: Path) -> Calibration:
    """The calibration in a file. Raises RooftopError for a file that is none."""
    data = read_json_object(path, field="calibration", accepted=ACCEPTED)
    if data.get("kind") != "calibration":
        raise RooftopError("calibration", str(path), f"{ACCEPTED} (this one is of kind {data.get('kind')!r})")
    return read_record(Calibration, data, "calibration", amounts=True)


def read_fractions(path: Path) -> Calibrated:
    """The fractions in a calibration file. Raises RooftopError for a file without any."""
    calibration = read_calibration(path)
    if calibration.fractions is None:
        accepted = f"a calibration of a chip: rooftop calibrate --on CHIP:SHAPE; this one is of {calibration.devices}"
        raise RooftopError("calibration", str(path), accepted)
    return replace(calibration.fractions, by=calibration.by(path.name))


def fit(points: Sequence[CalibrationPoint], chip: Chip, by: str) -> tuple[Calibrated, tuple[str, ...]]:
    """The fractions of ``chip`` that points give, and doubts about them. Points are of one device."""
    known = fractions(chip.name)
    named: dict[Measurement, list[CalibrationPoint]] = {}
    for point in points:
        if point.bound_s:
            named.setdefault(point.what, []).append(point)
    hbm = {kind: _fastest(named.get("hbm", ()), kind) for kind in ("copy", "read")}
    wide = chip.flops_per_s["bf16"]
    matmul = {}
    for width in ("16-bit", "8-bit"):
        chosen = [
            point
            for point in named.get("matmul", ())
            if (chip.flops_per_s[point.dtype] > wide) == (width == "8-bit") and not _hbm_bound(point, chip, hbm["read"])
        ]
        if chosen:
            matmul[width] = _matmul(chosen, known.matmul[width].layer)
    ici = {
        kind: _collective([point for point in named.get("collective", ()) if point.kind == kind])
        for kind in dict.fromkeys(point.kind for point in named.get("collective", ()))
    }
    block = 128 if known.attention is None else known.attention.block
    result = Calibrated(
        chip=chip.name,
        by=by,
        matmul=matmul,
        attention=_attention(named.get("attention", ()), block),
        hbm=hbm["copy"],
        hbm_read=hbm["read"],
        ici=ici,
    )
    return result, tuple(_doubts(points))


def _doubts(points: Sequence[CalibrationPoint]) -> list[str]:
    """Points that beat the peaks of the chip: then an input is wrong."""
    fast = [point for point in points if (point.of_peak or 0.0) > _ABOVE_PEAK]
    if not fast:
        return []
    worst = max(fast, key=lambda point: point.of_peak or 0.0)
    return [
        f"{len(fast)} of {len(points)} points are faster than the peak of the chip, so an input is wrong: "
        f"{' '.join(word for word in worst.key if word)} at {worst.of_peak:.2f} of it"
    ]


def _hbm_bound(point: CalibrationPoint, chip: Chip, share: float | None) -> bool:
    moved_s = point.bytes * chip.devices / (chip.hbm_bytes_per_s * (share or 1.0))
    return moved_s > _HBM_BOUND * point.median_s


def _fastest(points: Sequence[CalibrationPoint], kind: str) -> float | None:
    """The largest share of the peak; small arrays are not limited by bandwidth."""
    shares = [point.of_peak for point in points if point.kind == kind and point.of_peak]
    return min(1.0, max(shares)) if shares else None


def _matmul(points: Sequence[CalibrationPoint], layer: float) -> MatmulFit:
    """Seconds as bound / peak + start + results x seconds a result."""
    bound = [point.bound_s or 0.0 for point in points]
    results = [float(point.sizes["m"] * point.sizes["n"]) for point in points]
    inverse, start_s, result_s = _fitted(points, bound, [1.0] * len(points), results)
    return MatmulFit(peak=1 / inverse, start_s=start_s, result_s=result_s, layer=layer)


def _collective(points: Sequence[CalibrationPoint]) -> CollectiveFit:
    """Seconds as start + bound / share, by the devices of a group."""
    ranks = sorted({point.sizes["ranks"] for point in points})
    lines = []
    for count in ranks:
        group = [point for point in points if point.sizes["ranks"] == count]
        lines.append(_fitted(group, [point.bound_s or 0.0 for point in group], [1.0] * len(group)))
    return CollectiveFit(
        ranks=tuple(float(count) for count in ranks),
        start_s=tuple(start_s for _, start_s in lines),
        share=tuple(1 / inverse for inverse, _ in lines),
    )


def _attention(points: Sequence[CalibrationPoint], block: int) -> AttentionCurve | None:
    """Seconds as bound / share + queries x seconds a query: forward by the size of heads, backward over all sizes."""
    sizes = sorted({point.sizes["d_head"] for point in points if point.kind == "forward"})
    if not sizes:
        return None
    lines = [_line([point for point in points if point.kind == "forward" and point.sizes["d_head"] == size])
             for size in sizes]  # fmt: skip
    forward = {size: 1 / inverse for size, (inverse, _) in zip(sizes, lines, strict=True)}
    backward = [point for point in points if point.kind == "backward" and point.sizes["d_head"] in forward]
    ratio, query_s = 1.0, lines[0][1]
    if backward:
        bound = [(point.bound_s or 0.0) / forward[point.sizes["d_head"]] for point in backward]
        inverse, query_s = _fitted(backward, bound, [_queries(point) for point in backward], least=0.0)
        ratio = min(1 / inverse, 1 / max(forward.values()))
    return AttentionCurve(
        block=block,
        sizes=tuple(float(size) for size in sizes),
        share=tuple(forward.values()),
        query_s=tuple(seconds for _, seconds in lines),
        backward_share=ratio,
        backward_query_s=query_s,
    )


def _line(points: Sequence[CalibrationPoint]) -> tuple[float, float]:
    bound = [point.bound_s or 0.0 for point in points]
    inverse, query_s = _fitted(points, bound, [_queries(point) for point in points])
    return inverse, query_s


def _queries(point: CalibrationPoint) -> float:
    return float(point.sizes["seq"] * point.sizes["heads"] * point.sizes["batch"])


def _fitted(points: Sequence[CalibrationPoint], *terms: Sequence[float], least: float = 1.0) -> tuple[float, ...]:
    """Coefficients of ``terms``, [T, P], in the seconds of points: relative least squares, none negative.

    The first term is the time at peak, whose coefficient is never below 1, the ``least``. With fewer points than
    terms, or where the fit leaves the first term out, it is the only one: the median of seconds over it.
    """
    seconds = np.array([point.median_s for point in points])
    table: _Floats = np.array(terms).T / seconds[:, None]
    if len(points) >= len(terms):
        from scipy.optimize import nnls  # slow to import

        scale = np.maximum(np.abs(table).max(axis=0), np.finfo(np.float64).tiny)
        solution: _Floats = nnls(table / scale, np.ones(len(points)))[0] / scale
        if solution[0] > 0:
            return max(least, float(solution[0])), *map(float, solution[1:])
    only = float(median(1 / table[:, 0]))
    return max(least, only), *([0.0] * (len(terms) - 1))
