"""Published measurements of serving beside our predictions: prefill, decode and serving rows of a table of runs.

Levels: *max_hbm_flops*, the longer of HBM and FLOPs at peak, without a network; *bound*, with it; *expected*, what the
plan expects. The *null* model knows no batch, context or network: the weights alone (of a prefill: 2 FLOPs per
parameter and token) at the median share of peak of the other runs on that chip. An error is predicted / measured - 1.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from rooftop.errors import unknown
from rooftop.hardware import Slice
from rooftop.models import ModelConfig
from rooftop.plan.serving_phase import Placement
from rooftop.plan.serving_pricing import price_serving
from rooftop.plan.serving_problem import ServingProblem
from rooftop.plan.serving_rows import prefill_work
from rooftop.plan.serving_workload import ServingNumerics, ServingWorkload
from rooftop.quantities import DTYPE_BYTES
from rooftop.validation import readings
from rooftop.validation.accuracy import Errors
from rooftop.validation.readings import Gap
from rooftop.validation.runs import Unusable
from rooftop.validation.table import RUN_COLUMNS, TableRow, read_table

SERVING_PHASES = ("prefill", "decode", "serve")
SERVING_LEVELS = ("max_hbm_flops", "bound", "expected", "null")


@dataclass(frozen=True, kw_only=True)
class ServingRun:
    """One published measurement of serving, its metrics merged.

    ``measured_s``: seconds of a step (decode), of a prefill, or of a token of the whole batch (serve: batch over
    tokens/s). ``context``: tokens of each cache; ``prompt`` and ``generate``: tokens of a request. ``mesh`` None: not
    published. ``lines``: the table's lines.
    """

    id: str
    source: str
    model: ModelConfig
    slice: Slice
    mesh: Mapping[str, int] | None
    phase: str
    batch: int
    context: int | None
    prompt: int | None
    generate: int | None
    numerics: ServingNumerics
    measured_s: float
    measured: Mapping[str, float]
    where_found: str
    assumed: tuple[str, ...]
    lines: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class ServingComparison:
    """One run beside its predictions in seconds; ``null_s`` None where no other run of its kind was on the chip."""

    run: ServingRun
    max_hbm_flops_s: float
    bound_s: float
    expected_s: float
    null_s: float | None
    implied_context: float | None
    reason: str | None

    def error(self, level: str) -> float | None:
        """Predicted / measured - 1 at one of SERVING_LEVELS."""
        seconds: float | None = getattr(self, f"{level}_s")
        return None if seconds is None else seconds / self.run.measured_s - 1

    @property
    def beats_bound(self) -> bool:
        """Whether the measurement is below the bound: an input of one of the two is wrong."""
        return self.run.measured_s < self.bound_s

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        run = self.run
        return {
            "id": run.id,
            "source": run.source,
            "model": run.model.name,
            "slice": run.slice.name,
            "mesh": None if run.mesh is None else dict(run.mesh),
            "phase": run.phase,
            "batch": run.batch,
            "context": run.context,
            "prompt": run.prompt,
            "generate": run.generate,
            "weights": run.numerics.weights,
            "kv": run.numerics.kv,
            "measured_s": run.measured_s,
            "measured": dict(run.measured),
            **{f"{level}_s": getattr(self, f"{level}_s") for level in SERVING_LEVELS},
            "error": {level: self.error(level) for level in SERVING_LEVELS},
            "beats_bound": self.beats_bound,
            "implied_context": self.implied_context,
            "assumed": list(run.assumed),
            "reason": self.reason,
            "where_found": run.where_found,
        }


@dataclass(frozen=True, kw_only=True)
class ServingReport:
    """Every serving run beside its predictions, errors by group, and the rows that say too little."""

    comparisons: tuple[ServingComparison, ...]
    unusable: tuple[Unusable, ...]

    @property
    def groups(self) -> dict[str, dict[str, Errors | None]]:
        """Errors by level, by phase; of decode also without the runs that beat their bound."""
        chosen: dict[str, Callable[[ServingComparison], bool]] = {
            "decode": lambda one: one.run.phase == "decode",
            "decode, no bound beaten": lambda one: one.run.phase == "decode" and not one.beats_bound,
            "prefill": lambda one: one.run.phase == "prefill",
            "serve": lambda one: one.run.phase == "serve",
        }
        return {
            name: {level: _errors(self.comparisons, wanted, level) for level in SERVING_LEVELS}
            for name, wanted in chosen.items()
            if any(wanted(one) for one in self.comparisons)
        }

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "rows": [one.to_json() for one in self.comparisons],
            "summary": {
                name: {level: None if found is None else vars(found) for level, found in levels.items()}
                for name, levels in self.groups.items()
            },
            "beats_bound": [one.run.id for one in self.comparisons if one.beats_bound],
            "unusable": [
                {"source": one.source, "model": one.model, "why": one.why, "lines": list(one.lines)}
                for one in self.unusable
            ],
        }


def serving_report(path: Path | None = None) -> ServingReport:
    """Predict every serving row of a table; without a path, of the one that comes with rooftop."""
    runs, unusable = load_serving(path)
    nulls = _nulls(runs)
    return ServingReport(
        comparisons=tuple(_compare(run, null) for run, null in zip(runs, nulls, strict=True)), unusable=tuple(unusable)
    )


def load_serving(path: Path | None = None) -> tuple[list[ServingRun], list[Unusable]]:
    """The serving runs of a table, and those that say too little. Raises RooftopError naming a bad cell."""
    groups: dict[tuple[str, ...], list[TableRow]] = {}
    for row in read_table(path):
        if row.cells["phase"] in SERVING_PHASES:
            key = (*(row.cells[column] for column in RUN_COLUMNS), row.cells.get("slice", ""))
            # Rows without a sequence length repeat a measurement for other rows of the table: each is a run.
            groups.setdefault(key if row.cells["seq_len"] else (*key, str(row.number)), []).append(row)
    runs: list[ServingRun] = []
    unusable: list[Unusable] = []
    for group in groups.values():
        first, measured = group[0], _metrics(group)
        lines = tuple(row.number for row in group)
        try:
            runs.append(_run(first, measured, lines, {run.id for run in runs}))
        except Gap as gap:
            unusable.append(
                Unusable(
                    source=first.required("source"), model=first.required("model"), chip=first.required("chip"),
                    num_chips=first.required_count("num_chips"), why=str(gap), measured=measured,
                    measured_memory_bytes={}, lines=lines,
                )
            )  # fmt: skip
    return runs, unusable


@cache
def _readings() -> dict[str, Any]:
    file = Path(__file__).with_name("data") / "serving_readings.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _metrics(group: Sequence[TableRow]) -> dict[str, float]:
    known = _readings()["metric"]
    found: dict[str, float] = {}
    for row in group:
        metric, unit = row.required("measured_metric"), row.required("unit").split()[0]
        if metric not in known:
            raise unknown(row.field("measured_metric"), metric, known)
        if unit not in known[metric]:
            raise row.error("unit", " or ".join(known[metric]))
        if metric in found:
            raise row.error("measured_metric", "each metric once per run; where_found can tell two runs apart")
        found[metric] = row.value("measured_value") * known[metric][unit]
    return found


def _run(row: TableRow, measured: Mapping[str, float], lines: tuple[int, ...], taken: set[str]) -> ServingRun:
    """One run. Raises Gap where the row says too little."""
    source, phase = row.required("source"), row.cells["phase"]
    facts = _readings()["source"].get(source, {})
    context = row.count("seq_len")
    batch = row.count("global_batch_seqs")
    prompt = context if phase == "prefill" and context is not None else facts.get("prompt")
    if batch is None:
        raise Gap("batch not stated")
    if phase == "decode" and context is None:
        raise Gap("sequence length not stated")
    if phase != "decode" and prompt is None:
        raise Gap("length of the prompts not stated")
    if phase == "serve" and "generate" not in facts:
        raise Gap("length of the answers not stated")
    model, from_model = readings.read_model(row, context or prompt or 1)
    on, from_slice = readings.read_slice(row)
    mesh, from_mesh = readings.read_mesh(row, on.devices)
    seconds = _seconds(phase, batch, measured)
    if seconds is None:
        raise Gap("no metric gives the time of a step")
    numerics = _numerics(row, facts)
    assumed = (*from_model, *from_slice, *from_mesh, *facts.get("assumed", ()))
    if phase == "prefill" and context is None:
        assumed += tuple(facts.get("assumed_prefill", ()))
    return ServingRun(
        id=_identity(row, on, mesh, batch, numerics, taken),
        source=source,
        model=model,
        slice=on,
        mesh=mesh,
        phase=phase,
        batch=batch,
        context=context,
        prompt=prompt,
        generate=facts.get("generate"),
        numerics=numerics,
        measured_s=seconds,
        measured=measured,
        where_found=row.cells["where_found"],
        assumed=assumed,
        lines=lines,
    )


def _seconds(phase: str, batch: int, measured: Mapping[str, float]) -> float | None:
    if phase == "serve":
        return batch / measured["output_tokens_per_s"] if "output_tokens_per_s" in measured else None
    if "step_time" in measured:
        return measured["step_time"]
    if phase == "prefill":
        return measured.get("prefill_time")
    return 1 / measured["decode_steps_per_s"] if "decode_steps_per_s" in measured else None


def _numerics(row: TableRow, facts: Mapping[str, Any]) -> ServingNumerics:
    """Dtypes as the column says ('int8 weights, int8 kv'), or as is known of the source."""
    weights = readings.read_dtype(row)
    stated = re.search(r"(\w+) (?:kv|KV)\b", row.cells["dtype"])
    kv = str(facts.get("kv", weights if facts.get("kv_as_weights") else "bf16"))
    if stated is not None:
        kv = stated[1]
        if kv not in DTYPE_BYTES:
            raise row.error("dtype", f"a KV dtype among {', '.join(DTYPE_BYTES)}")
    return ServingNumerics(
        weights=weights, kv=kv, flops=str(facts.get("flops", "bf16")), embeddings=facts.get("embeddings")
    )


def _identity(
    row: TableRow, on: Slice, mesh: Mapping[str, int] | None, batch: int, numerics: ServingNumerics, taken: set[str]
) -> str:
    plain = [re.sub(r"[^a-z0-9.]+", "-", row.required(column).lower()).strip("-") for column in ("source", "model")]
    sizes = {"data": 1} | dict(mesh or {})
    laid = "searched" if mesh is None else "-".join(f"{name}{size}" for name, size in sizes.items())
    length = row.cells["seq_len"] or "unstated"
    name = "/".join((*plain, on.name, laid, f"{batch}x{length}", row.cells["phase"], numerics.weights))
    serial = 2
    while name in taken:
        name = f"{name.split('#')[0]}#{serial}"
        serial += 1
    return name


def _compare(run: ServingRun, null_s: float | None) -> ServingComparison:
    ledger, extra_s, of_context = _predicted(run)
    busy = {name: float(ledger.total(name)) for name in ("hbm", "mxu", "ici", "dcn")}
    expected = float(ledger.expected_s) + extra_s[1]
    hbm_flops = max(busy["hbm"], busy["mxu"]) + extra_s[0]
    implied = None
    if of_context is not None and run.context is not None:
        empty = of_context(0.0)
        implied = max(0.0, (run.measured_s - empty) / (of_context(float(run.context)) - empty) * run.context)
    return ServingComparison(
        run=run,
        max_hbm_flops_s=hbm_flops,
        bound_s=max(max(busy.values()) + extra_s[0], hbm_flops),
        expected_s=expected,
        null_s=null_s,
        implied_context=implied,
        reason=_reason(run.id),
    )


def _predicted(run: ServingRun) -> tuple[Any, tuple[float, float], Callable[[float], float] | None]:
    """The ledger of the run's step; what prefills add to it, as a bound and as expected; its time by context."""
    context = run.context if run.phase == "decode" else None
    problem = ServingProblem(
        model=run.model,
        slice=run.slice,
        workload=ServingWorkload(
            prompt=run.prompt or run.context or 1, generate=run.generate or 1, batch_seqs=run.batch, context=context
        ),
        numerics=run.numerics,
        mode="interleaved",
        axes=run.mesh,
        prefill_axes=run.mesh,
    )
    batch = float(run.batch)
    if run.phase == "prefill":
        ledgers = [_prefill_batch(problem, place, run) for place in problem.prefill_placements()]
        return min(ledgers, key=lambda ledger: float(ledger.expected_s)), (0.0, 0.0), None
    places = problem.generate_placements()
    place = min(places, key=lambda place: float(problem.generate(place, batch).expected_s))
    ledger = problem.generate(place, batch)
    if run.phase == "decode":
        return ledger, (0.0, 0.0), lambda tokens: float(problem.generate(place, batch, tokens).expected_s)
    assert run.generate is not None and run.prompt is not None
    prefill = problem.prefill(problem.shared_prefill(place), float(run.prompt))
    each = batch / run.generate
    bound = max(float(prefill.total(name)) for name in ("hbm", "mxu", "ici"))
    return ledger, (each * bound, each * float(prefill.expected_s)), None


def _prefill_batch(problem: ServingProblem, place: Placement, run: ServingRun) -> Any:
    """All prompts of the batch in one prefill."""
    assert run.prompt is not None
    phase = problem.phase("prefill", place, float(run.batch * run.prompt))
    return price_serving(prefill_work(phase, 0.0, run.batch), place, problem.rates, problem.assumptions)


def _nulls(runs: Sequence[ServingRun]) -> list[float | None]:
    """Seconds at the median share of peak of the other runs of the phase and chip, which differ in batch or mesh."""
    ideal = [_ideal_s(run) for run in runs]
    found: list[float | None] = []
    for run, own in zip(runs, ideal, strict=True):
        others = [
            other.measured_s / seconds
            for other, seconds in zip(runs, ideal, strict=True)
            if (other.phase, other.slice.chip.name) == (run.phase, run.slice.chip.name)
            and (other.model.name, other.batch, other.mesh) != (run.model.name, run.batch, run.mesh)
        ]
        found.append(own * float(np.median(others)) if others else None)
    return found


def _ideal_s(run: ServingRun) -> float:
    """The weights read once, each replica its own; of a prefill 2 FLOPs per parameter and token, at peak."""
    problem = ServingProblem(
        model=run.model, slice=run.slice, workload=ServingWorkload(), numerics=run.numerics, bounds="book"
    )
    total, active = problem.params
    if run.phase == "prefill":
        assert run.prompt is not None
        return 2.0 * active * run.batch * run.prompt / run.slice.flops_per_s(run.numerics.flops)
    replicas = (run.mesh or {}).get("data", 1)
    rate = run.slice.chips * run.slice.chip.hbm_bytes_per_s
    return replicas * total * run.numerics.weight_bytes / rate


def _reason(run_id: str) -> str | None:
    reasons: Mapping[str, str] = _readings()["reasons"]
    fitting = [beginning for beginning in reasons if run_id.startswith(beginning)]
    return reasons[max(fitting, key=len)] if fitting else None


def _errors(
    comparisons: Sequence[ServingComparison], wanted: Callable[[ServingComparison], bool], level: str
) -> Errors | None:
    signed = np.array([error for one in comparisons if wanted(one) and (error := one.error(level)) is not None])
    if not signed.size:
        return None
    absolute = np.abs(signed)
    return Errors(
        runs=signed.size,
        mean=float(signed.mean()),
        mean_absolute=float(absolute.mean()),
        median_absolute=float(np.median(absolute)),
        largest_absolute=float(absolute.max()),
    )
