"""Published training runs: the rows of a table merged into runs, with everything a prediction needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.quantities import parse_count, parse_quantity
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, flops_per_token
from rooftop.validation import names, readings
from rooftop.validation.readings import Gap, Remat
from rooftop.validation.table import RUN_COLUMNS, TableRow, read_table

_PHASES = ("train", "prefill", "decode", "serve")
_MEMORY_UNITS = {"GiB": 2.0**30, "GB": 1e9}
_MEMORY = re.compile(r"(.+)_per_(?:chip|gpu|device)")
#: A note that somebody computed a metric from the others of the run.
_DERIVED = re.compile(r";?\s*\w+ DERIVED.*")
#: Days or chip-hours of all tokens of a run: 'days_for_15T_tokens'; without a number, of those in the column 'tokens'.
_BUDGET = re.compile(r"(days|gpu_hours|chip_hours)(?:_for_(\w+?)_tokens)?")
_BUDGET_UNITS = {"days": ("days", "d"), "gpu_hours": ("h", "hours", "GPU hours"), "chip_hours": ("h", "hours")}
#: Further columns that tell one run from another, where a table has them.
OPTIONAL_COLUMNS = ("slice", "cp", "ep", "tokens", "framework", "release", "settings")


@dataclass(frozen=True, kw_only=True)
class PublishedRun:
    """One published training run, all its metrics merged.

    ``mesh``: axis -> devices, None where it was not published. ``batch_seqs``: global batch, in sequences of
    ``seq_len`` tokens. ``microbatch_seqs``: sequences per microbatch and data-parallel replica. ``interleave``:
    stages of layers per pipeline device. ``dtype`` is the matmuls', ``published_dtype`` what was said of all dtypes
    (None: nothing); ``compiled``: torch.compile was used.
    ``step_s``: measured seconds per step, derived from the metric ``step_from``. ``measured``: published metrics by
    name, in SI (fractions for %), ``measured_memory_bytes``: bytes per chip by kind ('peak', 'activation', ...).
    ``assumed``: what the table left open and how it was read. ``lines``: the table's lines. ``facts``: what the
    readings say of its source and recipe (``readings.run_facts``).
    """

    id: str
    source: str
    model: ModelConfig
    slice: Slice
    mesh: Mapping[str, int] | None
    seq_len: int
    batch_seqs: int
    microbatch_seqs: int | None
    interleave: int | None
    sequence_parallel: bool | None
    dtype: str
    published_dtype: str | None
    compiled: bool
    remat: Remat
    step_s: float
    step_from: str
    measured: Mapping[str, float]
    measured_memory_bytes: Mapping[str, float]
    where_found: str
    assumed: tuple[str, ...]
    lines: tuple[int, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batch_tokens(self) -> int:
        """Tokens of one step over all chips."""
        return self.batch_seqs * self.seq_len

    @property
    def framework(self) -> str:
        """The framework that ran it, or its source where neither the table nor the readings name one."""
        return str(self.facts.get("framework", self.source))

    @property
    def over_dcn(self) -> bool:
        """True if the run spans several slices (TPU) or several nodes (GPU)."""
        return self.slice.over_dcn

    @property
    def dense_tpu(self) -> bool:
        """True for a dense model on TPUs: the runs of the headline figures."""
        return self.slice.chip.kind == "tpu" and self.model.moe is None

    @property
    def model_flops(self) -> float:
        """FLOPs of one step over all chips: attention in full, no embedding lookup, no recomputation."""
        return full_attention(self.model, self.seq_len) * self.batch_tokens

    @property
    def flops_per_s_per_chip(self) -> float:
        """The achieved ``model_flops`` per second and chip."""
        return self.model_flops / (self.step_s * self.slice.chips)


@dataclass(frozen=True, kw_only=True)
class Unusable:
    """A published run that cannot be predicted, and ``why`` in words. Its measurements are kept.

    ``num_chips`` is None where the table has no number.
    """

    source: str
    model: str
    chip: str
    num_chips: int | None
    why: str
    measured: Mapping[str, float]
    measured_memory_bytes: Mapping[str, float]
    lines: tuple[int, ...]

    @classmethod
    def of(
        cls,
        rows: Sequence[TableRow],
        why: Exception,
        measured: Mapping[str, float],
        memory: Mapping[str, float] = MappingProxyType({}),
    ) -> Unusable:
        """The run that ``rows`` are of."""
        cells = rows[0].cells
        return cls(
            source=cells["source"],
            model=cells["model"],
            chip=cells["chip"],
            num_chips=_number(cells["num_chips"]),
            why=str(why),
            measured=measured,
            measured_memory_bytes=memory,
            lines=tuple(row.number for row in rows),
        )

    @classmethod
    def unpriced(cls, run: PublishedRun, why: Exception) -> Unusable:
        """A run that was read and cannot be priced."""
        return cls(
            source=run.source,
            model=run.model.name,
            chip=run.slice.chip.name,
            num_chips=run.slice.chips,
            why=f"{run.id}: {why}",
            measured=run.measured,
            measured_memory_bytes=run.measured_memory_bytes,
            lines=run.lines,
        )


def _number(cell: str) -> int | None:
    """A positive whole number; None where there is none."""
    try:
        return parse_count(cell, "num_chips")
    except RooftopError:
        return None


@dataclass(frozen=True, kw_only=True)
class PublishedRuns:
    """Contents of a table: training runs, unusable rows, and the number of serving rows."""

    runs: tuple[PublishedRun, ...]
    unusable: tuple[Unusable, ...]
    serving_rows: int


def load_published(path: Path | None = None) -> PublishedRuns:
    """Merge the rows of a table (columns: ``table.COLUMNS``, and optionally 'slice') into runs, in the table's order.

    Rows belong to one run when all but the measurement columns agree. A row that cannot be read is unusable, with
    file, line and column of the bad cell. Raises RooftopError on a file that is no such table, and on a table without
    rows.
    """
    return _shipped() if path is None else _read(path)


@cache
def _shipped() -> PublishedRuns:
    return _read(None)


def _read(path: Path | None) -> PublishedRuns:
    rows = read_table(path)
    groups: dict[tuple[str, ...], list[TableRow]] = {}
    unusable: list[Unusable] = []
    for row in rows:
        if row.fault is not None:
            unusable.append(Unusable.of([row], row.fault, {}))
        elif row.cells["phase"] not in _PHASES:
            unusable.append(Unusable.of([row], row.error("phase", ", ".join(_PHASES)), {}))
        elif row.cells["phase"] == "train":
            cells = {**row.cells, "where_found": _DERIVED.sub("", row.cells["where_found"])}
            key = (*(cells[column] for column in RUN_COLUMNS), *(cells.get(column, "") for column in OPTIONAL_COLUMNS))
            groups.setdefault(key, []).append(row)
    if not rows:
        raise RooftopError("table of runs", str(path), "a table with at least one row")
    runs: list[PublishedRun] = []
    for group in groups.values():
        measured: dict[str, float] = {}
        memory: dict[str, float] = {}
        try:
            measured, memory, unread = _metrics(group)
            unusable += unread
            lines = tuple(row.number for row in group)
            runs.append(_run(group[0], measured, memory, lines, taken={run.id for run in runs}))
        except (Gap, RooftopError) as why:
            unusable.append(Unusable.of(group, why, measured, memory))
    serving = sum(row.cells["phase"] in _PHASES[1:] for row in rows)
    return PublishedRuns(runs=tuple(runs), unusable=tuple(unusable), serving_rows=serving)


def _metrics(group: list[TableRow]) -> tuple[dict[str, float], dict[str, float], list[Unusable]]:
    """Metrics in SI by name, memory in bytes by kind, and rows that cannot be read next to others that can.

    Raises the first row's error if none can be read.
    """
    measured: dict[str, float] = {}
    memory: dict[str, float] = {}
    unread: list[Unusable] = []
    # What somebody computed from the published metrics of the run says nothing more, with fewer digits.
    published = [row for row in group if not _DERIVED.search(row.cells["where_found"])] or group
    errors: list[Exception] = []
    for row in published:
        try:
            _read_metric(row, measured, memory)
        except (Gap, RooftopError) as error:
            errors.append(error)
            unread.append(Unusable.of([row], error, {}))
    if errors and not measured and not memory:
        raise errors[0]
    return measured, memory, unread


def _read_metric(row: TableRow, measured: dict[str, float], memory: dict[str, float]) -> None:
    """Add the metric of a row. Raises RooftopError for a metric, a unit or a number that cannot be read."""
    known, aliases = (names.readings()[name] for name in ("metric", "metric_alias"))
    metric, unit = row.required("measured_metric"), row.required("unit")
    metric = aliases.get(metric, metric)
    if (budget := _BUDGET.fullmatch(metric)) is not None:
        _read_budget(row, budget, measured)
        return
    kind = _MEMORY.fullmatch(metric) if "memory" in metric else None
    if kind is not None:
        into, name = memory, kind[1].replace("_memory", "")
        gigabyte = readings.source_facts(row.required("source")).get("gigabyte", _MEMORY_UNITS["GB"])
        units = _MEMORY_UNITS | {"GB": float(gigabyte)}
    elif metric in known:
        into, name, units = measured, metric, known[metric]
    else:
        raise unknown(row.field("measured_metric"), metric, [*known, "peak_memory_per_chip"])
    if unit not in units:
        raise row.error("unit", " or ".join(units))
    if name in into:
        raise row.error("measured_metric", "each metric once per run; where_found can tell two runs apart")
    into[name] = row.value("measured_value") * units[unit]


def _read_budget(row: TableRow, budget: re.Match[str], measured: dict[str, float]) -> None:
    """Add the seconds of a run, and its tokens: days, or hours of all chips. Raises RooftopError or Gap."""
    kind, count = budget.groups()
    if row.required("unit") not in _BUDGET_UNITS[kind]:
        raise row.error("unit", " or ".join(_BUDGET_UNITS[kind]))
    if count is None and not row.cells.get("tokens"):
        raise Gap(f"tokens of {kind} not stated: {kind}_for_15T_tokens, or a column tokens")
    tokens = parse_quantity(count or row.cells["tokens"], row.field("measured_metric" if count else "tokens"))
    value = row.value("measured_value")
    seconds = value * 86400.0 if kind == "days" else value * 3600.0 / row.required_count("num_chips")
    measured["seconds_per_token"] = seconds / tokens


def _run(
    row: TableRow, measured: dict[str, float], memory: dict[str, float], lines: tuple[int, ...], taken: set[str]
) -> PublishedRun:
    """One run. Raises Gap where the row says too little."""
    facts = readings.run_facts(row)
    needed = {"seq_len": "sequence length", "global_batch_seqs": "global batch"}
    missing = [words for column, words in needed.items() if row.text(column) is None]
    if missing:
        raise Gap(f"not stated: {', '.join(missing)}")
    seq_len, batch_seqs = row.required_count("seq_len"), row.required_count("global_batch_seqs")
    model, from_model = readings.read_model(row, seq_len)
    on, from_slice = readings.read_slice(row)
    mesh, from_mesh = readings.read_mesh(row, on.devices)
    dtype = readings.read_dtype(row)
    remat, from_remat = readings.read_remat(row)
    count = facts.get("flops")
    step = step_seconds(
        measured,
        tokens=batch_seqs * seq_len,
        chips=on.chips,
        flops=None if count is None else CONVENTIONS[count](model, seq_len) * batch_seqs * seq_len,
        # The peak that a share of peak refers to is plain only when matmuls run in the dtype of the data.
        peak_flops_per_s=on.chip.flops_per_s.get(dtype) if dtype in ("bf16", "f16", "f32") else None,
    )
    if step is None:
        raise Gap("no step_time or tokens_per_s_per_chip, and no rate whose FLOP count is known")
    word = f"{dtype}+compile" if "+compile" in row.cells["dtype"] else dtype
    run = PublishedRun(
        id=readings.identity(row, (on.name, f"{batch_seqs}x{seq_len}", word, remat.policy or "unstated"), taken),
        source=row.required("source"),
        model=model,
        slice=on,
        mesh=mesh,
        seq_len=seq_len,
        batch_seqs=batch_seqs,
        microbatch_seqs=readings.read_microbatch(row),
        interleave=row.count("interleave"),
        sequence_parallel=row.choice("sp", {"yes": True, "no": False}),
        dtype=dtype,
        published_dtype=row.text("dtype"),
        compiled="+compile" in row.cells["dtype"],
        remat=remat,
        step_s=step[0],
        step_from=step[1],
        measured=measured,
        measured_memory_bytes=memory,
        where_found=row.cells["where_found"],
        assumed=(*from_model, *from_slice, *from_mesh, *from_remat, *facts.get("assumed", ()), *_unnamed(facts)),
        lines=lines,
        facts=facts,
    )
    # A recipe at the tag of its release knows better than a table's columns.
    return replace(run, **facts.get("strategy", {}))


def _unnamed(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """The assumption about a run whose framework nothing names."""
    if "program" in facts:
        return ()
    return ("framework not stated, and the source is not a known one: planned as rooftop's own program",)


def full_attention(model: ModelConfig, seq_len: int) -> float:
    """6 x (parameters without embedding, with output projection) + 12 L N H S per token.

    What MaxText logged before it halved causal attention (its PR 1988), and the model FLOPs of Korthikanti et al.
    (arXiv:2205.05198).
    """
    return float(flops_per_token(model, seq_len, attention="full").total)


def causal_attention(model: ModelConfig, seq_len: int) -> float:
    """The same with 6 L N H S: attention below the diagonal only, as MaxText logs since its PR 1988."""
    return float(flops_per_token(model, seq_len, attention="causal").total)


def full_attention_and_remat(model: ModelConfig, seq_len: int) -> float:
    """Full attention and one more forward pass through the layers, as full remat executes it.

    Narayanan et al., arXiv:2104.04473, eq. 3: 96 B s l h^2 (1 + s/(6h) + V/(16 l h)) for B sequences.
    """
    layers = flops_per_token(model, seq_len, attention="full", embeddings=False)
    return full_attention(model, seq_len) + float(layers.forward)


#: FLOPs per token by the name that readings.toml gives a source.
CONVENTIONS: Mapping[str, Callable[[ModelConfig, int], float]] = {
    "full_attention": full_attention,
    "causal_attention": causal_attention,
    "full_attention_and_remat": full_attention_and_remat,
}


def step_seconds(
    measured: Mapping[str, float],
    *,
    tokens: float,
    chips: int,
    flops: float | None,
    peak_flops_per_s: float | None,
) -> tuple[float, str] | None:
    """Seconds of one step and the metric they come from, or None where no metric gives them.

    ``measured`` in SI by metric, ``tokens`` and ``flops`` of the whole batch in one step (None: the count is
    unknown), ``peak_flops_per_s`` of one chip (None: unknown). The most direct metric wins: step_time, then
    tokens_per_s_per_chip, then the time of a whole run, then tflops_per_chip, then mfu.
    """
    if "step_time" in measured:
        return measured["step_time"], "step_time"
    if "tokens_per_s_per_chip" in measured:
        return tokens / (chips * measured["tokens_per_s_per_chip"]), "tokens_per_s_per_chip"
    if "seconds_per_token" in measured:
        return tokens * measured["seconds_per_token"], "seconds_per_token"
    if flops is None:
        return None
    if "tflops_per_chip" in measured:
        return flops / (chips * measured["tflops_per_chip"]), "tflops_per_chip"
    if "mfu" in measured and peak_flops_per_s is not None:
        return flops / (chips * peak_flops_per_s * measured["mfu"]), "mfu"
    return None
