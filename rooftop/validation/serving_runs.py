"""Published runs of serving: prefill, decode and serving rows of a table merged into runs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.quantities import DTYPE_BYTES
from rooftop.hardware import Slice
from rooftop.models import ModelConfig
from rooftop.plan.serving.workload import ServingNumerics
from rooftop.validation import readings
from rooftop.validation.readings import Gap
from rooftop.validation.runs import Unusable
from rooftop.validation.table import RUN_COLUMNS, TableRow, read_table

SERVING_PHASES = ("prefill", "decode", "serve")


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


def load_serving(path: Path | None = None) -> tuple[list[ServingRun], list[Unusable]]:
    """The serving runs of a table, and those that say too little or have a bad cell."""
    groups: dict[tuple[str, ...], list[TableRow]] = {}
    for row in read_table(path):
        if row.cells["phase"] in SERVING_PHASES and row.fault is None:
            key = (*(row.cells[column] for column in RUN_COLUMNS), row.cells.get("slice", ""))
            # Rows without a sequence length repeat a measurement for other rows of the table: each is a run.
            groups.setdefault(key if row.cells["seq_len"] else (*key, str(row.number)), []).append(row)
    runs: list[ServingRun] = []
    unusable: list[Unusable] = []
    for group in groups.values():
        measured: dict[str, float] = {}
        try:
            measured, unread = _metrics(group)
            unusable += unread
            lines = tuple(row.number for row in group)
            runs.append(_run(group[0], measured, lines, {run.id for run in runs}))
        except (Gap, RooftopError) as why:
            unusable.append(Unusable.of(group, why, measured))
    return runs, unusable


@cache
def serving_readings() -> Mapping[str, Any]:
    """The parsed ``data/serving_readings.toml``."""
    file = Path(__file__).with_name("data") / "serving_readings.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _facts(source: str, model: str) -> Mapping[str, Any]:
    """Facts about a source and about one of its models."""
    facts: Mapping[str, Any] = serving_readings()["source"].get(source, {})
    own = facts.get("model", {}).get(model, {})
    return {**facts, **own, "assumed": [*facts.get("assumed", ()), *own.get("assumed", ())]}


def _metrics(group: Sequence[TableRow]) -> tuple[dict[str, float], list[Unusable]]:
    """Metrics in SI by name, and rows that cannot be read next to others that can.

    Raises the first row's error if none can be read.
    """
    metrics: dict[str, float] = {}
    unread: list[Unusable] = []
    errors: list[RooftopError] = []
    for row in group:
        try:
            _read_metric(row, metrics)
        except RooftopError as error:
            errors.append(error)
            unread.append(Unusable.of([row], error, {}))
    if errors and not metrics:
        raise errors[0]
    return metrics, unread


def _read_metric(row: TableRow, metrics: dict[str, float]) -> None:
    """Add the metric of a row. Raises RooftopError for a metric, a unit or a number that cannot be read."""
    known = serving_readings()["metric"]
    metric, unit = row.required("measured_metric"), row.required("unit").split()[0]
    if metric not in known:
        raise unknown(row.field("measured_metric"), metric, known)
    if unit not in known[metric]:
        raise row.error("unit", " or ".join(known[metric]))
    if metric in metrics:
        raise row.error("measured_metric", "each metric once per run; where_found can tell two runs apart")
    metrics[metric] = row.value("measured_value") * known[metric][unit]


def _run(row: TableRow, measured: Mapping[str, float], lines: tuple[int, ...], taken: set[str]) -> ServingRun:
    """One run. Raises Gap where the row says too little."""
    source, phase = row.required("source"), row.cells["phase"]
    facts = _facts(source, row.required("model"))
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
    readings.require_room(row, "num_chips", model, numerics, on)
    assumed = (*from_model, *from_slice, *from_mesh, *facts.get("assumed", ()))
    if phase == "prefill" and context is None:
        assumed += tuple(facts.get("assumed_prefill", ()))
    sizes = {"data": 1} | dict(mesh or {})
    laid = "searched" if mesh is None else "-".join(f"{name}{size}" for name, size in sizes.items())
    length = row.cells["seq_len"] or "unstated"
    return ServingRun(
        id=readings.identity(row, (on.name, laid, f"{batch}x{length}", phase, numerics.weights), taken),
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
        weights=weights, kv=kv, flops=str(facts.get("flops", "bf16")), embeddings=facts.get("embeddings") or weights
    )
