"""Calibration: the user's own devices and runs, measured, in place of the catalogue's fractions."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.files import write_json
from rooftop.core.quantities import format_seconds, parse_quantity
from rooftop.hardware import Calibrated, Slice, slice_sizes
from rooftop.library.inputs import SliceLike, slice_of
from rooftop.library.results import Result, flat
from rooftop.library.serving import Progress
from rooftop.roofline.calibration import Calibration, fit, read_calibration
from rooftop.runs.environment import prepare_environment, uninterrupted

if TYPE_CHECKING:
    from rooftop.core.measurements import CalibrationPoint
    from rooftop.plan.training.plan import TrainingPlan
    from rooftop.profile.microbench.calibration import Bench

#: The longest calibration, in minutes.
_LONGEST = 24 * 60
_NOT_TIMED = "a pass takes more than a share of the time: raise --minutes"


@dataclass(frozen=True, kw_only=True, repr=False)
class CalibrationResult(Result):
    """Measured points of devices, or terms of a run, and the fractions of the chip that they give."""

    document_kind = "calibration"

    calibration: Calibration
    path: Path | None = None

    @property
    def fractions(self) -> Calibrated | None:
        """The fractions that plans take; None for devices of no chip in the catalogue."""
        if self.calibration.fractions is None:
            return None
        name = "a calibration" if self.path is None else self.path.name
        return replace(self.calibration.fractions, by=self.calibration.by(name))

    def to_json(self) -> dict[str, object]:
        """The calibration file."""
        return self.calibration.to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """A point a row; of a run a term a row."""
        run = self.calibration.run
        return [flat(item.to_json()) for item in (self.calibration.points if run is None else run.terms)]

    @property
    def summary(self) -> str:
        """Devices, and what was measured of them."""
        calibration = self.calibration
        if (run := calibration.run) is not None:
            return (
                f"{run.run}: {run.steps} steps of {format_seconds(run.measured_s)}, planned "
                f"{format_seconds(run.planned_s)}; most off: {run.worst}"
            )
        chip = "no chip of the catalogue" if calibration.chip is None else f"as {calibration.slice}"
        return f"{calibration.devices}, {chip}: {len(calibration.points)} points" + (
            "" if calibration.complete else "; the time was over: the same command goes on"
        )


def calibrate(
    run: Path | str | None = None,
    *,
    output: Path | str | None = None,
    on: SliceLike | None = None,
    minutes: float | str = 10.0,
    devices: int | None = None,
    on_progress: Progress | None = None,
) -> CalibrationResult:
    """Measure the local devices, or compare the steps of a run with its plan, for plans with ``calibration``.

    Args:
        run: The folder of a run of a plan: says which term of the plan is off. By default devices are measured.
        output: The calibration file. One of the same devices is continued: what it has is not measured again.
        on: The slice that the devices are; by default that of their kind and number. Devices that a CPU emulates are
            none of their own, and stand for this one.
        minutes: Time after which the measurements end.
        devices: Devices that a CPU emulates.
        on_progress: Called with measurements done, their number, and a label.

    Raises RooftopError naming the argument that is wrong, such as a slice of another chip than that of the devices.
    """
    path = None if output is None else Path(output)
    if run is not None:
        for name, value in (("on", on), ("devices", devices)):
            if value is not None:
                raise RooftopError(name, value, "nothing with a run, which says it")
        return _of_run(Path(run), path)
    limit = parse_quantity(minutes, "minutes", largest=_LONGEST)
    where = None if on is None else slice_of(on)
    known = read_calibration(path) if path is not None and path.exists() else None
    prepare_environment(devices, packages=("jax",), extra="jax")
    with uninterrupted():
        from rooftop.profile.microbench.calibration import Bench
    from rooftop.profile.microbench import timing

    local = timing.devices()
    bench = Bench(devices=local, where=_slice(local, where))
    begun = Calibration(
        **vars(timing.provenance(local)),
        command=shlex.join(["rooftop", *sys.argv[1:]]),
        chip=None if bench.where is None else bench.where.chip.name,
        slice=None if bench.where is None else bench.where.name,
        spent_s=0.0,
        complete=False,
        points=(),
        skipped={},
        run=None,
        fractions=None,
        notes=(),
    )
    if known is not None:
        begun = _continued(begun, known, path)
    return CalibrationResult(calibration=_measure(bench, begun, limit, path, on_progress), path=path)


def _slice(local: Any, where: Slice | None) -> Slice | None:
    """The slice of the local devices. Raises RooftopError for one of another chip, or of another size."""
    from rooftop.compiler.devices import chip_of_kind

    chip = chip_of_kind(local[0].device_kind)
    if where is None:
        sizes = () if chip is None else slice_sizes(chip, len(local))
        return next((size for size in sizes if size.devices == len(local)), None)
    if local[0].platform != "cpu" and (chip is None or chip.name != where.chip.name):
        raise RooftopError("on", where.name, f"a slice of the {len(local)} x {local[0].device_kind} that are here")
    if where.devices != len(local):
        raise RooftopError("on", where.name, f"a slice of {len(local)} devices, as many as are here")
    return where


def _continued(begun: Calibration, known: Calibration, path: Path | None) -> Calibration:
    """A calibration of the same devices, to go on with. Raises RooftopError for another one."""
    same = ("device_kind", "count", "slice", "versions")
    for name in same:
        if known.run is not None or getattr(known, name) != getattr(begun, name):
            was = f"{known.devices} as {known.slice or 'no chip'}, {_versions(known.versions)}"
            raise RooftopError("output", str(path), f"another file: this has a calibration of {was}")
    return replace(begun, points=known.points, skipped={}, spent_s=known.spent_s)


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _measure(
    bench: Bench, begun: Calibration, minutes: float, path: Path | None, on_progress: Progress | None
) -> Calibration:
    """Measure what is not known, and write the file after each point: a process that is killed goes on from there."""
    from rooftop.profile.microbench.calibration import too_long

    start, cases = time.monotonic(), bench.cases()
    points: list[CalibrationPoint] = list(begun.points)
    seen, skipped, complete = {point.key for point in points}, dict[str, str](), True
    calibration = begun
    for done, case in enumerate(cases):
        if case.key in seen:
            continue
        if time.monotonic() - start > 60 * minutes:
            complete = False
            break
        if on_progress is not None:
            on_progress(done, len(cases), case.label)
        if too_long(case, points, minutes):
            skipped[case.label] = _NOT_TIMED
            continue
        try:
            points.append(bench.measure(case))
        except (Infeasible, RooftopError) as error:
            skipped[case.label] = str(error)
            continue
        spent_s = begun.spent_s + time.monotonic() - start
        calibration = _fitted(replace(begun, points=tuple(points), skipped=skipped, spent_s=spent_s), bench)
        if path is not None:
            write_json(path, calibration.to_json())
    spent_s = begun.spent_s + time.monotonic() - start
    calibration = _fitted(
        replace(begun, points=tuple(points), skipped=skipped, spent_s=spent_s, complete=complete), bench
    )
    if path is not None:
        write_json(path, calibration.to_json())
    return calibration


def _fitted(calibration: Calibration, bench: Bench) -> Calibration:
    """The calibration with the fractions of its points."""
    notes = []
    if calibration.emulated:
        notes.append("a CPU emulates these devices, which share its cores")
    if bench.where is None:
        notes.append("the catalogue has no such chip: points alone, and no fractions for plans")
        return replace(calibration, notes=tuple(notes))
    if calibration.emulated:
        notes[-1] += f"; they stand for {bench.where.name}"
    result, doubts = fit(calibration.points, bench.where.chip, calibration.devices)
    return replace(calibration, fractions=result, notes=(*notes, *doubts))


def _of_run(run: Path, path: Path | None) -> CalibrationResult:
    from rooftop.plan.training.plan import TrainingPlan
    from rooftop.runs.folder import RunFolder

    folder = RunFolder(path=run)
    about = folder.read()
    if about is None:
        raise RooftopError("run", str(run), "the folder of a run of a plan: rooftop train plan.json --run DIR")
    try:
        plan = TrainingPlan.from_json(json.loads(folder.plan.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise RooftopError(
            "run", str(run), "a run of a plan, whose times can be compared: rooftop train plan.json"
        ) from None
    with uninterrupted():
        from rooftop.explain.measured import terms
    notes: tuple[str, ...] = ()
    if folder.profile.is_dir():
        from rooftop.explain.measured.report import explain

        explained = explain(run)
        measured, notes = terms.traced_terms(explained), explained.notes
    else:
        from rooftop.runs.records import read_records

        measured = terms.timed_terms(str(run), plan, read_records(folder.metrics))
        notes = ("no trace: rooftop train --profile steps=A..B tells compute, HBM, collectives and host gaps apart",)
    calibration = _run_record(plan, about, measured, notes)
    if path is not None:
        write_json(path, calibration.to_json())
    return CalibrationResult(calibration=calibration, path=path)


def _run_record(plan: TrainingPlan, about: Mapping[str, Any], measured: Any, notes: tuple[str, ...]) -> Calibration:
    from rooftop.explain.measured.terms import corrected

    devices = about["devices"]
    least_s = max(plan.lower_s.values())
    if measured.measured_s < least_s:
        notes = (*notes, f"steps beat the lower bound of {format_seconds(least_s)}, so an input is wrong")
    is_cpu = devices["platform"] == "cpu"
    return Calibration(
        devices=devices["name"] + (" (emulated)" if is_cpu else ""),
        count=devices["used"],
        emulated=is_cpu,
        platform=devices["platform"],
        device_kind=devices["name"].partition(" x ")[2],
        host_cpus=None,
        versions={"rooftop": about["rooftop_version"], **about["versions"]},
        runtime="",
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["rooftop", *sys.argv[1:]]),
        chip=plan.problem.slice.chip.name,
        slice=plan.problem.slice.name,
        spent_s=0.0,
        complete=True,
        points=(),
        skipped={},
        run=measured,
        fractions=corrected(measured, plan),
        notes=notes,
    )
