"""Measurements: collectives on local devices, a server under load next to its simulation, and calibrations.

A calibration replaces the catalogue's fractions of a chip by those of the user's own devices, or of a run.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from rooftop import __version__
from rooftop.algebra.pricing import Prices
from rooftop.arrays import Mesh
from rooftop.arrays.mesh import MeshLayout
from rooftop.core.errors import Infeasible, RooftopError, refuse, unknown
from rooftop.core.extras import require
from rooftop.core.files import parse_json, read_text, write_json
from rooftop.core.ledger import COLLECTIVES
from rooftop.core.measurements import MeasuredCollectives
from rooftop.core.quantities import format_bytes, format_seconds, parse_bytes, parse_count, parse_dtype, parse_quantity
from rooftop.hardware import Calibrated, Slice, slice_sizes
from rooftop.library.inputs import axes_of, slice_of
from rooftop.library.results import Result, flat
from rooftop.library.serving import Progress
from rooftop.library.simulation import read_serving_plan, targets_of, trace_of
from rooftop.plan.serving.plan import ServingPlan
from rooftop.present.documents import document
from rooftop.profile.microbench.records import CollectivesRecord
from rooftop.requests.function import of_request
from rooftop.requests.likes import AxesLike, CountLike, SliceLike
from rooftop.requests.measuring import BenchServing
from rooftop.roofline.calibration import Calibration, fit, read_calibration
from rooftop.runs.environment import prefer_cpus, prepare_environment, uninterrupted
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.client.metrics import ServingBenchRecord
from rooftop.simulate.serving.metrics import ServingFigures, SimulatedTrace, Targets
from rooftop.simulate.serving.traces import RequestTrace

if TYPE_CHECKING:
    from rooftop.core.measurements import CalibrationPoint
    from rooftop.plan.training.plan import TrainingPlan
    from rooftop.present.document import Document
    from rooftop.profile.microbench.calibration import Bench
    from rooftop.serve.client.prediction import PredictionInput
    from rooftop.serve.client.replay import Replayed

#: Names, or a comma-separated text of them.
NamesLike: TypeAlias = Sequence[str] | str
#: Token ids of prompts for a server that does not tell its vocabulary.
_VOCAB = 1000


@dataclass(frozen=True, kw_only=True, repr=False)
class CollectivesResult(CollectivesRecord, Result):
    """Times of collectives over ``axes`` of a mesh; with a ``slice``, next to what is planned for it."""

    @property
    def document(self) -> Document:
        """The times of each kind and size."""
        return document(self, kind="bench collectives")

    @property
    def rows(self) -> list[dict[str, object]]:
        """A collective of a size a row."""
        return [flat(timing.to_json()) for timing in self.measured.collectives]

    @property
    def summary(self) -> str:
        """Every collective at its largest size."""
        largest = {timing.kind: timing for timing in sorted(self.measured.collectives, key=lambda timing: timing.bytes)}
        times = [
            f"{kind} of {format_bytes(timing.bytes)} {format_seconds(timing.median_s)}"
            for kind, timing in largest.items()
        ]
        return f"{self.measured.devices}, over {','.join(self.axes)}: {'; '.join(times)}"


def bench_collectives(
    *,
    mesh: AxesLike | None = None,
    axis: NamesLike | None = None,
    kinds: NamesLike | None = None,
    sizes: Sequence[CountLike] | str = "64Ki,1Mi,16Mi",
    dtype: str = "bf16",
    on: SliceLike | None = None,
    on_progress: Progress | None = None,
) -> CollectivesResult:
    """Time collectives over the axes of a mesh of the local devices, for several sizes.

    Args:
        mesh: Axes and their sizes; by default one axis X of all devices.
        axis: Axes that collectives run over; all by default.
        kinds: all_gather, reduce_scatter, all_reduce, all_to_all, permute; all by default.
        sizes: Payloads of one device, in bytes.
        dtype: Dtype of the elements.
        on: A slice; its planned times stand next to those that are measured.
        on_progress: Called with collectives done, collectives in all, and a label.

    Everything is checked before JAX is imported, except the number of devices. Raises RooftopError naming the argument
    that is wrong.
    """
    payloads = [float(parse_bytes(size, "sizes")) for size in (sizes.split(",") if isinstance(sizes, str) else sizes)]
    names = _names(kinds) or list(COLLECTIVES)
    for name in names:
        if name not in COLLECTIVES:
            raise unknown("kinds", name, COLLECTIVES)
    dtype, where = parse_dtype(dtype), None if on is None else slice_of(on)
    shape = None if mesh is None else axes_of(mesh)
    if shape is not None:
        _require_axes(_names(axis) or list(shape), shape)
        _prices(where, shape)

    prefer_cpus()
    with uninterrupted():
        from rooftop.profile.microbench.collectives import measure
    from rooftop.profile.microbench.timing import device_mesh, devices, empty_call, provenance

    shape = shape or {"X": len(devices())}
    axes = _names(axis) or list(shape)
    _require_axes(axes, shape)
    prices = _prices(where, shape)
    used = device_mesh(shape)
    written = {
        "--mesh": ",".join(f"{name}={size}" for name, size in shape.items()),
        "--axis": ",".join(axes),
        "--kinds": ",".join(names),
        "--sizes": sizes if isinstance(sizes, str) else ",".join(map(str, sizes)),
        "--dtype": dtype,
        **({} if where is None else {"--on": where.name}),
    }
    command = shlex.join(["rooftop", "bench", "collectives", *(word for option in written.items() for word in option)])
    timings = tuple(measure(names, axes, payloads, dtype, used, prices=prices, on_progress=on_progress))
    return CollectivesResult(
        mesh=prices[0].mesh.described if prices else MeshLayout(axes=shape, layout={}),
        axes=tuple(axes),
        dtype=dtype,
        slice=None if where is None else where.name,
        measured=MeasuredCollectives(
            **vars(provenance(list(used.devices.flat))),
            command=command,
            empty_call_s=empty_call(used).median_s,
            collectives=timings,
        ),
    )


def _names(names: NamesLike | None) -> list[str]:
    if names is None:
        return []
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _require_axes(axes: Sequence[str], shape: Mapping[str, int]) -> None:
    for axis in axes:
        if axis not in shape:
            raise unknown("axis", axis, shape)
    if len(set(axes)) < len(axes):
        raise RooftopError("axis", ",".join(axes), "each axis once")
    if all(shape[axis] == 1 for axis in axes):
        requested = ",".join(f"{axis}={shape[axis]}" for axis in axes)
        accepted = "two devices or more: one alone sends nothing (JAX_PLATFORMS=cpu emulates eight)"
        raise RooftopError("axis", requested, accepted)


def _prices(where: Slice | None, shape: Mapping[str, int]) -> list[Prices]:
    """Prices that a slice is planned by; none without a slice."""
    if where is None:
        return []
    laid = Mesh.lay(where, shape)
    return [Prices(mesh=laid, dims={}, kind=kind) for kind in ("bound", "expected")]


@dataclass(frozen=True, kw_only=True, repr=False)
class ServingBenchResult(ServingBenchRecord, Result):
    """Latencies that clients of a server measured, next to a simulation of the same requests."""

    @property
    def document(self) -> Document:
        """Measured latencies next to predicted ones."""
        return document(self)

    @property
    def rows(self) -> list[dict[str, object]]:
        """A latency a row, measured and predicted."""
        sides = {"measured": self.measured, "predicted": self.predicted}
        return [
            {"time": name, "source": source} | spread.to_json()
            for name in ("ttft_s", "tpot_s", "itl_s", "e2e_s")
            for source, figures in sides.items()
            if figures is not None and (spread := getattr(figures, name)) is not None
        ]

    @property
    def summary(self) -> str:
        """Requests served and mean latencies."""
        requests = self.measured.requests
        means = [
            f"{name} {format_seconds(spread.mean)}"
            for name, spread in (("TTFT", self.measured.ttft_s), ("TPOT", self.measured.tpot_s))
            if spread is not None
        ]
        return (
            f"{self.model} at {self.url}: {requests.finished:,} of {requests.offered:,} requests; "
            f"{', '.join(means)}, mean; predicted by {self.predicted_by}"
        )


@of_request(BenchServing)
def bench_serving(request: BenchServing, on_progress: Progress | None = None) -> ServingBenchResult:
    """Replay requests against a server with OpenAI's API, and simulate the same requests.

    ``on_progress`` is called with requests done, requests in all, and a label.

    Raises RooftopError naming the field that is wrong, and Infeasible if no request was answered.
    """
    require("serve", "httpx", "prometheus_client")
    asked = trace_of(
        request.trace,
        concurrency=request.concurrency,
        requests=request.requests,
        requests_per_second=request.requests_per_second,
        duration=request.duration,
        prompt=request.prompt,
        generate=request.generate,
        burstiness=request.burstiness,
        seed=request.seed,
        hash_tokens=request.hash_tokens,
    )
    if request.trace is not None:
        refuse({"texts": request.texts}, "nothing with a trace, which says how long its prompts are")
    targets = targets_of(request.ttft, request.tpot)
    vocab, plan = request.vocab, request.plan
    ids = None if vocab is None else parse_count(vocab, "vocab")
    planned = plan if plan is None or isinstance(plan, ServingPlan) else read_serving_plan(plan)
    url = request.url.rstrip("/").removesuffix("/v1")
    from rooftop.serve.client.prediction import PredictionInput
    from rooftop.serve.client.replay import ReplayTarget, find_model, prompts_of, read_texts, replay

    written = None if request.texts is None else read_texts(Path(request.texts))
    name, served_vocab = find_model(url, request.model, request.api_key)
    ids = ids or served_vocab or _VOCAB
    target = ReplayTarget(url=url, model=name, vocab=ids, key=request.api_key, exact=request.ignore_eos)
    before = PredictionInput.read(url)
    prompts: Sequence[Sequence[int] | str] = prompts_of(asked, ids, request.seed)
    if written is not None:
        prompts = [written[index % len(written)] for index in range(len(asked))]
    replayed = asyncio.run(replay(asked, prompts, target, targets, on_progress))
    if not replayed.served:
        raise Infeasible("no request was answered", str(replayed.metrics.requests.why))
    after = PredictionInput.read(url)
    # How long texts are, the server says.
    sent = replayed.sent(asked) if written is None else replace(replayed.trace(), clients=asked.clients)
    predicted, predicted_by = _prediction(replayed, asked, before, after, planned, targets)
    outside_s = None
    if before is not None and after is not None and replayed.metrics.ttft_s is not None:
        from rooftop.serve.client.prediction import outside_s as outside_engine_s

        outside_s = outside_engine_s(before, after, replayed.metrics.ttft_s.mean)
    return ServingBenchResult(
        rooftop_version=__version__,
        command=shlex.join(["rooftop", *sys.argv[1:]]),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        request=request.to_json(),
        url=url,
        model=name,
        trace=SimulatedTrace.of(sent),
        measured=replayed.metrics,
        predicted=predicted,
        predicted_by=predicted_by,
        outside_engine_ttft_s=outside_s,
    )


def _prediction(
    replayed: Replayed,
    trace: RequestTrace,
    before: PredictionInput | None,
    after: PredictionInput | None,
    plan: ServingPlan | None,
    targets: Targets,
) -> tuple[ServingFigures | None, str]:
    """Simulated figures of the replayed requests, and the source of their step times or why there are none."""
    from rooftop.serve.client.prediction import deployment_of, measured_times, predict

    if plan is None and (before is None or after is None):
        return None, "no --plan, and no step times at /metrics of the server"
    served = replayed.trace()
    if trace.clients is not None:
        served = replace(served, clients=trace.clients, arrival_s=np.zeros(len(served)))
    if trace.hashes is not None and len(served) == len(trace):
        served = replace(served, hashes=trace.hashes, hash_tokens=trace.hash_tokens)
    try:
        policy, cached = (Policy(max_batch=plan.batch), False) if after is None and plan is not None else after.policy  # type: ignore[union-attr]
        times = plan.step_times() if plan is not None else measured_times(before, after)  # type: ignore[arg-type]
        cached = cached and served.hashes is not None
        counted = after if plan is None else None
        deployment = deployment_of(counted, times, policy=policy, prefix_cache=cached)
        predicted = predict(served, deployment, targets)
    except RooftopError as error:
        return None, str(error)
    return predicted, (
        f"the plan for {plan.problem.slice.name}" if plan is not None else "step times that the server measured"
    )


# Calibration.

#: The longest calibration, in minutes.
_LONGEST = 24 * 60
_NOT_TIMED = "a pass takes more than a share of the time: raise --minutes"


@dataclass(frozen=True, kw_only=True, repr=False)
class CalibrationResult(Result):
    """Measured points of devices, or terms of a run, and the fractions of the chip that they give."""

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
    def document(self) -> Document:
        """The terms of a run, or the points of devices and the fractions that they give."""
        from rooftop.present.documents import document

        return document(self.calibration)

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
        refuse({"on": on, "devices": devices}, "nothing with a run, which says it")
        return _of_run(Path(run), path)
    limit = parse_quantity(minutes, "minutes", largest=_LONGEST)
    where = None if on is None else slice_of(on)
    known = read_calibration(path) if path is not None and path.exists() else None
    prepare_environment(devices, extra="jax")
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
    from rooftop.hardware import chip_of_kind

    chip = chip_of_kind(local[0].device_kind)
    if where is None:
        sizes = () if chip is None else slice_sizes(chip, len(local))
        return next((size for size in sizes if size.devices == len(local)), None)
    if local[0].platform != "cpu" and (chip is None or chip.name != where.chip.name):
        raise RooftopError("on", where.name, f"a slice of the {len(local)} x {local[0].device_kind} here")
    if where.devices != len(local):
        raise RooftopError("on", where.name, f"a slice of {len(local)} devices, as many as are local")
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
        plan = TrainingPlan.from_json(parse_json(read_text(folder.plan)))
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
