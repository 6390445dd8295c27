"""Embedding tables on SparseCores: their plan, and limits of their buffers from data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rooftop.core.errors import RooftopError
from rooftop.core.files import write_json
from rooftop.core.quantities import format_bytes, format_seconds, parse_count, parse_quantity
from rooftop.embed.host.inputs import count_samples, parquet_batches
from rooftop.embed.host.limits import (
    HEADROOM,
    LimitsRecord,
    LimitUse,
    StackNeeds,
    compare,
    estimate,
    expected,
    feed_back,
    observe,
    read_limits,
    write_limits,
)
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.embed.host.statistics import Statistics
from rooftop.library.inputs import calibration_of, slice_of
from rooftop.library.results import Result, flat
from rooftop.models.embedding_tables.files import load_tables, tables_from_json
from rooftop.models.embedding_tables.limits import LARGEST_LIMIT, Limits
from rooftop.models.embedding_tables.stacking import Stacking
from rooftop.models.embedding_tables.tables import Tables
from rooftop.plan.embedding.plan import EmbedPlan, EmbedPlanDocument
from rooftop.plan.embedding.problem import EmbedProblem, check_passes, stacking_on
from rooftop.present.documents import document
from rooftop.requests.function import of_request
from rooftop.requests.planning import PlanEmbedding

if TYPE_CHECKING:
    from rooftop.present.document import Document
    from rooftop.requests.likes import CountLike, LimitsLike, SliceLike, TablesLike

_Batch = TypeVar("_Batch")
#: Arguments by the fields of lower rooms that have another name.
_ARGUMENTS = {
    "batch": "batch-samples", "sample_passes": "sample-passes", "out_of_range": "out-of-range", "slice": "on",
    "host_threads": "host-threads",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingPlanResult(Result):
    """Memory, step time and bottleneck of embedding tables on a slice."""

    request: PlanEmbedding
    plan: EmbedPlan

    @cached_property
    def record(self) -> EmbedPlanDocument:
        """plan.json as a record."""
        return replace(self.plan.document, request=self.request.to_json())

    def to_json(self) -> dict[str, object]:
        """plan.json: all that is needed to compile the program."""
        return self.record.to_json()

    @property
    def document(self) -> Document:
        """The steps, the units that bind them, stacks and memory."""
        return document(self.record)

    @property
    def rows(self) -> list[dict[str, object]]:
        """A stack of tables a row."""
        return [flat(stack.to_json()) for stack in self.record.stacks]

    @property
    def summary(self) -> str:
        """Stacks, step times and memory."""
        problem, memory = self.plan.problem, self.record.memory
        steps = ", ".join(
            f"{mode} {format_seconds(step.expected_s)} (bound by {step.bound})" for mode, step in self.plan.step.items()
        )
        return (
            f"{len(problem.tables.tables)} tables in {len(problem.stacking.stacks)} stacks on {problem.slice.name}, "
            f"{problem.batch:,} samples a step\n"
            f"step {steps}; {format_bytes(max(memory.total.values()))} of "
            f"{format_bytes(memory.capacity)} a device"
        )

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible, with the missing bytes, if the tables do not fit."""
        self.plan.require_fit()

    def write_plan(self, path: Path | str) -> None:
        """Write plan.json. Raises RooftopError if the path cannot be written."""
        write_json(Path(path), self.to_json())


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingLimitsResult(Result):
    """Limits of the SparseCores' buffers for a stream of batches, next to what the stream needs.

    ``kept`` says if the current limits still serve; None if there were none.
    """

    stacking: Stacking
    statistics: Statistics
    limits: Limits
    batch_samples: int
    sample_passes: int
    kept: bool | None

    @property
    def uses(self) -> list[LimitUse]:
        """Every limit next to the observed need."""
        return compare(self.limits, self.statistics)

    @cached_property
    def record(self) -> LimitsRecord:
        """The answer as it is written."""
        uses = self.uses
        return LimitsRecord(
            batches=self.statistics.batches,
            cores=self.stacking.cores,
            sample_passes=self.sample_passes,
            kept=self.kept,
            out_of_range=dict(self.statistics.out_of_range),
            stacks=tuple(
                StackNeeds(
                    name=stack.name,
                    tables=tuple(place.table.name for place in stack.places),
                    ids=self.statistics.stacks[stack.name].ids,
                    observed={use.limit: use.observed for use in uses if use.stack == stack.name},
                    limits=vars(self.limits[stack.name]),
                )
                for stack in self.stacking.stacks
            ),
        )

    def to_json(self) -> dict[str, object]:
        """Batches, ids out of range, and each stack's needs and limits."""
        return self.record.to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """A limit of a stack a row."""
        return [
            {"stack": use.stack, "limit": use.limit, "observed": use.observed, "compiled": use.compiled,
             "used": use.used}
            for use in self.uses
        ]  # fmt: skip

    @property
    def document(self) -> Document:
        """Every limit next to the observed need."""
        from rooftop.present.documents.embedding import embedding_limits

        return embedding_limits(self.record, batch_samples=self.batch_samples)

    @property
    def summary(self) -> str:
        """Batches, SparseCores, and the fullest limit."""
        fullest = max(self.uses, key=lambda use: use.used)
        return (
            f"{self.statistics.batches:,} batches of {self.batch_samples:,} samples, {self.stacking.cores:,} "
            f"SparseCores; fullest: {fullest.limit} of {fullest.stack}, {fullest.used:.0%}"
        )

    def write_limits(self, path: Path | str) -> None:
        """Write the limits file. Raises RooftopError if the path cannot be written."""
        write_limits(
            Path(path), self.limits, self.stacking, batch=self.batch_samples, batches=self.statistics.batches,
            sample_passes=self.sample_passes,
        )  # fmt: skip


@contextmanager
def _named_as_arguments() -> Iterator[None]:
    """Name the argument in errors of lower rooms."""
    try:
        yield
    except RooftopError as error:
        raise RooftopError(_ARGUMENTS.get(error.field, error.field), error.given, error.accepted) from None


@of_request(PlanEmbedding)
@_named_as_arguments()
def plan_embedding(request: PlanEmbedding) -> EmbeddingPlanResult:
    """Plan embedding tables on a slice: memory, step time, and the unit that binds.

    A plan that does not fit is returned: ``raise_if_infeasible`` raises Infeasible for it. Raises RooftopError naming
    the field that is wrong.
    """
    where = slice_of(request.on).with_calibration(calibration_of(request.calibration))
    samples, model = parse_count(request.batch_samples, "batch-samples"), _tables(request.tables)
    passes = parse_count(request.sample_passes, "sample-passes")
    stacking = stacking_on(model, where, samples)
    dense_flops, host_threads = request.dense_flops, request.host_threads
    if request.limits is None:
        limits: Limits = _expected_limits(stacking, samples, passes)
    elif isinstance(request.limits, (str, Path)):
        limits = read_limits(Path(request.limits), stacking, batch=samples, sample_passes=passes)
    else:
        limits = request.limits
    problem = EmbedProblem(
        tables=model,
        slice=where,
        batch=samples,
        limits=limits,
        dense_flops=0.0 if dense_flops is None else parse_quantity(dense_flops, "dense-flops"),
        host_threads=None if host_threads is None else parse_count(host_threads, "host-threads"),
        sample_passes=passes,
    )
    return EmbeddingPlanResult(request=request, plan=EmbedPlan(problem=problem))


def _expected_limits(stacking: Stacking, samples: int, passes: int) -> Limits:
    """Limits from each feature's ``ids_per_sample``. Raises RooftopError that names the batch or the passes."""
    check_passes(passes)
    try:
        return expected(stacking, batch=samples, sample_passes=passes)
    except RooftopError as error:
        if not error.field.startswith("limits."):
            raise
        accepted = f"fewer samples: {error.field} would be {error.given}, and is at most {LARGEST_LIMIT}"
        raise RooftopError("batch-samples", samples, accepted) from None


@_named_as_arguments()
def embedding_limits(
    tables: TablesLike,
    data: Path | str | Sequence[Path | str],
    *,
    on: SliceLike,
    batch_samples: CountLike,
    batches: CountLike | None = None,
    sample_passes: CountLike = 1,
    headroom: float = HEADROOM,
    limits: LimitsLike | None = None,
    out_of_range: str = "error",
    host_threads: int = 1,
    on_progress: Callable[[int, int, str], None] | None = None,
) -> EmbeddingLimitsResult:
    """Limits of the SparseCores' buffers for the ids in data.

    Args:
        tables: Tables, or the path of a TOML file of them.
        data: Parquet files with a column of ids, or of lists of ids, for each feature.
        on: A slice of chips with SparseCores.
        batch_samples: Samples of a step, on all devices.
        batches: Batches to read at most; all by default.
        sample_passes: Passes over the samples of a batch; limits are those of one pass.
        headroom: Fraction that limits have beyond the observed need.
        limits: Current limits, or a limits file; they are kept if they still serve.
        out_of_range: error, warn or clamp ids that are no rows.
        host_threads: Threads that prepare batches.
        on_progress: Called with batches done, batches in all, and a label.

    Raises RooftopError naming the argument that is wrong, and for data without a whole batch.
    """
    model, where = _tables(tables), slice_of(on)
    samples, passes = parse_count(batch_samples, "batch-samples"), parse_count(sample_passes, "sample-passes")
    stacking = stacking_on(model, where, samples)
    current: Limits | None = None
    if isinstance(limits, (str, Path)):
        current = read_limits(Path(limits), stacking, batch=samples, sample_passes=passes)
    elif limits is not None:
        current = limits
    preprocessor = Preprocessor(
        stacking,
        batch=samples,
        threads=host_threads,
        out_of_range=out_of_range,
        minibatching=passes > 1,
        sample_passes=passes,
    )
    files = [Path(data)] if isinstance(data, (str, Path)) else [Path(file) for file in data]
    rows = count_samples(files)
    last = rows // samples if batches is None else min(rows // samples, parse_count(batches, "batches"))
    if not last:
        raise RooftopError("data", f"{rows} samples", f"at least one batch of {samples}")
    read = islice(parquet_batches(files, model, samples), last)
    statistics = observe(preprocessor, read if on_progress is None else _reported(read, on_progress, last))
    new: Limits = estimate(statistics, stacking, headroom=headroom)
    unchanged: bool | None = None
    if current is not None:
        new = feed_back(current, statistics, stacking, headroom=headroom)
        unchanged = new is current
    return EmbeddingLimitsResult(
        stacking=stacking,
        statistics=statistics,
        limits=new,
        batch_samples=samples,
        sample_passes=passes,
        kept=unchanged,
    )


def _tables(tables: TablesLike) -> Tables:
    if isinstance(tables, Mapping):
        return tables_from_json(tables)
    return tables if isinstance(tables, Tables) else load_tables(Path(tables))


def _reported(batches: Iterable[_Batch], on_progress: Callable[[int, int, str], None], last: int) -> Iterator[_Batch]:
    """The batches; each is reported before it is read."""
    for done, batch in enumerate(batches):
        on_progress(done, last, "batches")
        yield batch
