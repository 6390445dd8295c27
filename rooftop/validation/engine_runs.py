"""Published benchmarks of serving engines under load: mean TTFT and TPOT of clients that wait for their answers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.core.quantities import DTYPE_BYTES, parse_count
from rooftop.frameworks.engines import Engine, engine_of
from rooftop.frameworks.framework import ENGINES, framework_data
from rooftop.hardware import Chip, Slice
from rooftop.models import ModelConfig, load_model
from rooftop.plan.serving.workload import ServingNumerics
from rooftop.requests.planning import PlanServing
from rooftop.validation.names import published_model, readings
from rooftop.validation.readings import Gap, read_chip, require_room
from rooftop.validation.serving_runs import serving_readings
from rooftop.validation.table import TableRow, read_table, table_columns

#: Columns of a table of such benchmarks: a row a run. Further ones are ignored.
ENGINE_COLUMNS: tuple[str, ...] = (
    *("source", "model", "chip", "num_chips", "engine", "engine_version", "mode", "weights", "isl", "osl"),
    *("concurrency", "tp", "ep", "attention_dp", "ttft_ms", "tpot_ms", "request_rate_or_note", "where_found"),
    *("prefill_workers", "prefill_tp", "prefill_attention_dp", "prefill_ep"),
    *("decode_workers", "decode_tp", "decode_attention_dp", "decode_ep"),
)
_TABLE = "serving_measured.csv"
_ROLES = ("prefill", "decode")
_WORKERS = re.compile(r"(prefill|decode) workers (\d+) x tp(\d+)(?: dp(\d+))?(?: ep(\d+))?")
#: What the servers of one role are: their number, tensor parallelism, copies of attention and ways of experts.
_Sizes = tuple[int, int, int, int]


@dataclass(frozen=True, kw_only=True)
class Workers:
    """``count`` equal servers. ``mesh``: axis -> devices, of a tensor or an expert axis."""

    count: int
    slice: Slice
    mesh: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class EngineRun:
    """One published benchmark, and the ``request`` for a plan of it: what its user would ask.

    ``engine`` is its name in options, ``title`` the one by which it is known. ``from_source``: the row does not say all
    sizes of its servers, its source does elsewhere.
    """

    id: str
    source: str
    model: ModelConfig
    engine: str
    title: str
    version: str | None
    request: PlanServing
    numerics: ServingNumerics
    generate_on: Workers
    prefill_on: Workers | None
    prompt: int
    generate: int
    clients: int
    ttft_s: float
    tpot_s: float
    where_found: str
    assumed: tuple[str, ...]
    from_source: bool
    line: int

    @property
    def mode(self) -> str:
        """'aggregated' or 'disaggregated'."""
        return "aggregated" if self.prefill_on is None else "disaggregated"

    @property
    def kind(self) -> str:
        """Engine, chip, model and mode: the rows that are reported together."""
        mode = "" if self.prefill_on is None else ", disaggregated"
        return f"{self.title} {self.generate_on.slice.chip.name} {self.model.name}{mode}"


@dataclass(frozen=True, kw_only=True)
class UnusableEngineRun:
    """A row that says too little, has a bad cell, or is of a run that cannot be priced."""

    source: str
    model: str
    engine: str
    why: str
    line: int

    @classmethod
    def of(cls, run: EngineRun, why: str) -> UnusableEngineRun:
        """A run that was read."""
        return cls(source=run.source, model=run.model.name, engine=run.engine, why=why, line=run.line)


def is_engine_table(path: Path | None) -> bool:
    """True if a table has the columns of benchmarks of engines; without a path there is one."""
    return path is None or {"ttft_ms", "tpot_ms", "concurrency"} <= set(table_columns(path))


def load_engine_runs(path: Path | None = None) -> tuple[list[EngineRun], list[UnusableEngineRun]]:
    """The runs of a table, by default of the one that comes with rooftop, and the rows that cannot be used."""
    runs: list[EngineRun] = []
    unusable: list[UnusableEngineRun] = []
    rows = read_table(path, columns=ENGINE_COLUMNS, packaged=_TABLE)
    if not rows:
        raise RooftopError("table of runs", str(path), "a table with at least one row")
    for row in rows:
        try:
            runs.append(_run(row))
        except (Gap, RooftopError) as why:
            cells = row.cells
            unusable.append(
                UnusableEngineRun(
                    source=cells["source"], model=cells["model"], engine=cells["engine"], why=str(why), line=row.number
                )
            )
    return runs, unusable


def _run(row: TableRow) -> EngineRun:
    name, source = row.required("engine").lower(), _source(row)
    if name not in ENGINES[1:]:
        raise row.error("engine", ", ".join(ENGINES[1:]))
    model = _model(row)
    chip, from_chip = read_chip(row)
    clients = row.count("concurrency")
    if clients is None:
        raise Gap("concurrency not stated")
    mode = row.required("mode").lower()
    if mode not in ("agg", "disagg"):
        raise row.error("mode", "agg or disagg")
    if mode == "agg":
        prefill_on, (generate_on, assumed) = None, _server(row, chip)
    else:
        (prefill_on, generate_on), assumed = _workers(row, model, chip, name)
    weights, from_weights = _weights(row, chip)
    version = row.text("engine_version")
    released = version if version in framework_data(name)["releases"] else None
    engine = engine_of(name, chip=chip, model=model, weights=weights, release=released)
    assert engine is not None
    prompt, margin = row.required_count("isl"), source.get("margin")
    memory = source.get("memory", {}).get(name)
    settings = {} if memory is None else {"memory": f"{memory:g}"}
    if margin is not None:
        settings["step_tokens"] = str(clients + prompt + int(margin))
    request = PlanServing(
        model=model,
        on=generate_on.slice,
        engine=name,
        release=released,
        engine_settings=settings or None,
        prompt=prompt,
        generate=row.required_count("osl"),
        weights_dtype=weights,
        kv_dtype=engine.habits.kv,
        batching="interleaved" if prefill_on is None else "disaggregated",
        mesh=generate_on.mesh,
        prefill_on=None if prefill_on is None else prefill_on.slice.name,
        prefill_mesh=None if prefill_on is None else prefill_on.mesh,
        concurrency=clients,
        requests=int(source["requests"]) * clients,
        shortest=float(source["shortest"]),
        replicas=generate_on.count,
        prefill_servers=1 if prefill_on is None else prefill_on.count,
    )
    numerics = ServingNumerics(weights=weights, kv=engine.habits.kv, flops=weights)
    for workers in (generate_on,) if prefill_on is None else (prefill_on, generate_on):
        column = "tp" if mode == "agg" else "request_rate_or_note"
        require_room(row, column, model, numerics, workers.slice)
    return EngineRun(
        id=_id(row),
        source=row.required("source"),
        model=model,
        engine=name,
        title=engine.title,
        version=version,
        request=request,
        numerics=numerics,
        generate_on=generate_on,
        prefill_on=prefill_on,
        prompt=prompt,
        generate=row.required_count("osl"),
        clients=clients,
        ttft_s=row.value("ttft_ms") / 1e3,
        tpot_s=row.value("tpot_ms") / 1e3,
        where_found=row.cells["where_found"],
        assumed=(
            *from_chip,
            *assumed,
            *from_weights,
            *source["assumed"],
            f"KV in {engine.habits.kv}, {_settings(engine)}: as {engine} has them",
        ),
        from_source=mode == "disagg" and bool(assumed),
        line=row.number,
    )


def _settings(engine: Engine) -> str:
    return ", ".join(f"{name} {value}" for name, value in engine.settings.items())


def _id(row: TableRow) -> str:
    """Name of a row in its source."""
    return row.cells["where_found"].split("id=")[-1]


def _source(row: TableRow) -> Mapping[str, Any]:
    """The client of a row's benchmark: by its source and a beginning of its id, or as it mostly is."""
    sources: Mapping[str, Mapping[str, Any]] = serving_readings()["benchmark"]
    known = [
        start
        for start, facts in sources.items()
        if facts.get("source") == row.cells["source"] and _id(row).startswith(start)
    ]
    return sources[max(known, key=len, default="default")]


def _model(row: TableRow) -> ModelConfig:
    """The preset of a published model. Raises RooftopError for a model that no preset is of."""
    name = row.required("model")
    try:
        return load_model(published_model(name).preset or name)
    except RooftopError:
        raise row.error("model", "a preset (`rooftop model` lists them)") from None


def _server(row: TableRow, chip: Chip) -> tuple[Workers, tuple[str, ...]]:
    """The server of an aggregated run.

    One of the files behind the table multiplies the sizes of an expert-parallel server with one another: 64 ways of
    8 GPUs. Other files name the same runs with 8.
    """
    tensor, copies, experts = (
        row.count(name) or 1 if row.cells[name] != "0" else 1 for name in ("tp", "attention_dp", "ep")
    )
    ways, chips = tensor * copies, row.count("num_chips") or tensor * copies
    assumed: tuple[str, ...] = ()
    if experts > 1 and ways == experts * experts:
        chips, assumed = experts, (f"{ways} ways of {experts} experts are a server of {experts} GPUs",)
    elif tensor == copies > 1 and experts == ways:
        chips, assumed = tensor, (f"{ways} ways of {experts} experts are a server of {tensor} GPUs",)
    elif copies > 1 and ways != chips:
        chips = ways
    return _group(row, chip, 1, chips if copies == 1 else 1, chips if copies > 1 else 1), assumed


def _workers(
    row: TableRow, model: ModelConfig, chip: Chip, engine: str
) -> tuple[tuple[Workers, Workers], tuple[str, ...]]:
    """Servers that prefill, and servers that generate, and the readings that they need."""
    sizes = _sizes_of_columns(row)
    assumed: tuple[str, ...] = ()
    if sizes is None:
        field = row.field("request_rate_or_note")
        sizes = _sizes_of_note(row.cells["request_rate_or_note"], field)
        if set(sizes) != set(_ROLES):
            raise row.error(
                "request_rate_or_note",
                "'prefill workers 1 x tp1 dp8, decode workers 2 x tp8', or columns prefill_workers, prefill_tp, ...",
            )
        note = _note_of_source(row, model, chip, engine, sizes)
        if note is not None:
            sizes, assumed = (
                _sizes_of_note(note, field),
                (f"{note}: attention DP and experts as {row.cells['source']} has them",),
            )
    prefill, decode = (_group(row, chip, *sizes[role][:3]) for role in _ROLES)
    return (prefill, decode), assumed


def _sizes_of_columns(row: TableRow) -> dict[str, _Sizes] | None:
    """Servers by role from columns of their own; None where all are empty."""
    columns = {role: [f"{role}_{name}" for name in ("workers", "tp", "attention_dp", "ep")] for role in _ROLES}
    if not any(row.cells[column] for names in columns.values() for column in names):
        return None
    return {
        role: (
            row.required_count(names[0]),
            row.required_count(names[1]),
            row.count(names[2]) or 1,
            row.count(names[3]) or 1,
        )
        for role, names in columns.items()
    }


def _sizes_of_note(note: str, field: str) -> dict[str, _Sizes]:
    """Servers by role from 'prefill workers 1 x tp1 dp8 ep8, decode workers ...'. Raises RooftopError for a 0."""
    servers: dict[str, _Sizes] = {}
    for role, *sizes in _WORKERS.findall(note):
        count, tensor, copies, experts = (parse_count(size or 1, field) for size in sizes)
        servers[role] = count, tensor, copies, experts
    return servers


def _note_of_source(
    row: TableRow, model: ModelConfig, chip: Chip, engine: str, sizes: Mapping[str, _Sizes]
) -> str | None:
    """Return what a row's source says of its servers elsewhere; None unless it completes what the row says.

    The row is one of the source by its model, chip, engine and the configuration at the end of its id, has the same
    numbers and tensor parallelism of servers, and says neither attention DP nor expert parallelism itself.
    """
    if any(copies > 1 or experts > 1 for _, _, copies, experts in sizes.values()):
        return None
    for facts in serving_readings()["servers"]:
        if (facts["source"], facts["model"], facts["chip"], facts["engine"]) != (
            *(row.cells["source"], model.name, chip.name, engine),
        ):
            continue
        note: str | None = facts["configurations"].get(_id(row).rsplit("_", 1)[-1])
        if note is not None and {
            role: one[:2] for role, one in _sizes_of_note(note, row.field("request_rate_or_note")).items()
        } == {role: one[:2] for role, one in sizes.items()}:
            return note
    return None


def _group(row: TableRow, chip: Chip, count: int, tensor: int, copies: int) -> Workers:
    devices = tensor * copies
    fits = [prod(shape) for shape in chip.slice_shapes if devices % prod(shape) == 0]
    per_node = max(fits, default=0)
    if chip.kind != "gpu" or not per_node or (devices > per_node and per_node < prod(chip.pod_shape)):
        raise row.error("num_chips", f"GPUs of whole nodes, or a part of one; {devices} {chip.name} are not")
    on = Slice(chip, (per_node, devices // per_node))
    return Workers(count=count, slice=on, mesh={"tensor": tensor} if copies == 1 else {"expert": copies})


def _weights(row: TableRow, chip: Chip) -> tuple[str, tuple[str, ...]]:
    """The dtype of the weights, and what was assumed of it."""
    word = row.text("weights") or published_model(row.required("model")).dtype
    dtype = "bf16" if word is None else readings()["dtype"].get(word.lower(), word)
    if dtype not in DTYPE_BYTES:
        raise row.error("weights", "fp8, fp4, bf16, or nothing")
    if dtype not in chip.flops_per_s:
        raise row.error("weights", f"a format of the matrix unit: {', '.join(chip.flops_per_s)}")
    return dtype, () if word is not None else ("weights not stated: bf16, and so is the KV",)
