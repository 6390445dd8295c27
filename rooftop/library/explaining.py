"""Traces, HLO instructions and differences explained; predictions next to published measurements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rooftop.core.errors import Infeasible, RooftopError, refuse
from rooftop.explain.measured.modules import read_module
from rooftop.explain.operations import Inferred, Operation, OperationRecord, OperationsRecord, infer, read_operation
from rooftop.library.results import Result, flat, in_answer
from rooftop.library.serving import Progress
from rooftop.present.documents import document
from rooftop.requests.function import of_request
from rooftop.requests.inputs import axes_of, calibrated_places, calibration_of, chip_of, seconds_of, training_plan_of
from rooftop.requests.likes import ChipLike, TimeLike
from rooftop.requests.measuring import Validate
from rooftop.requests.programs import Explain
from rooftop.runs.environment import uninterrupted

if TYPE_CHECKING:
    from rooftop.explain.difference import Difference, Side
    from rooftop.explain.measured.report import Explained
    from rooftop.hardware import Chip
    from rooftop.library.programs.compiling import CompileResult
    from rooftop.plan.training.plan import TrainingPlan
    from rooftop.present.document import Document
    from rooftop.validation import AccuracyReport, PublishedRun, PublishedRuns
    from rooftop.validation.accuracy import ComparisonRecord
    from rooftop.validation.compiled import CompiledRuns
    from rooftop.validation.engines import EngineReport
    from rooftop.validation.memory import MemoryRecord
    from rooftop.validation.report import ValidationRecord
    from rooftop.validation.serving import ServingReport


@dataclass(frozen=True, kw_only=True, repr=False)
class ExplainResult(Result):
    """A trace: measured next to compiled next to planned, the verdict, and what to try."""

    explained: Explained
    request: Explain | None = None

    def to_json(self, *, top: int = 20) -> dict[str, object]:
        """Rows by scope and phase, losses, and ``top`` operations and collectives."""
        return self.explained.to_json(top=top) | in_answer(self.request)

    @property
    def rows(self) -> list[dict[str, object]]:
        """A scope in a phase a row: measured, compiled, planned."""
        return [flat(row.to_json()) for row in self.explained.rows]

    @property
    def summary(self) -> str:
        """The verdict."""
        return f"{self.explained.name}: {self.explained.verdict.line}"

    @property
    def document(self) -> Document:
        """The trace next to its compilation and plan, with their timelines."""
        from rooftop.present.traced import measured_document

        return measured_document(self.explained)


@dataclass(frozen=True, kw_only=True, repr=False)
class OperationsResult(Result):
    """HLO instructions made readable; ``inferred`` is the parallelism that they show together."""

    operations: tuple[Operation, ...]
    inferred: tuple[Inferred, ...]
    chip: Chip | None = None
    request: Explain | None = None

    @cached_property
    def record(self) -> OperationsRecord:
        """The answer as it is written."""
        return OperationsRecord(
            kind="operations",
            schema=1,
            operations=tuple(OperationRecord.of(operation, self.chip) for operation in self.operations),
            inferred=self.inferred,
        )

    def to_json(self) -> dict[str, object]:
        """Each instruction with its layouts and work, and its times on the chip."""
        return self.record.to_json() | in_answer(self.request)

    @property
    def rows(self) -> list[dict[str, object]]:
        """An instruction a row."""
        return [flat(operation.to_json()) for operation in self.record.operations]

    @property
    def document(self) -> Document:
        """The operations, made readable."""
        return document(self.record)

    @property
    def summary(self) -> str:
        """A line for each instruction."""
        return "\n".join(f"{operation.name}: {operation.does}" for operation in self.operations)


@dataclass(frozen=True, kw_only=True, repr=False)
class DiffResult(Result):
    """Two runs, plans, compilations or reports, and the rows that differ."""

    difference: Difference

    def to_json(self) -> dict[str, object]:
        """Both sides, the verdict, and the changes, the largest first."""
        return self.difference.to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """A changed scope in a phase a row."""
        return [flat(change.to_json()) for change in self.difference.changes]

    @property
    def document(self) -> Document:
        """The rows that differ."""
        return document(self.difference)

    @property
    def summary(self) -> str:
        """The verdict."""
        return self.difference.verdict


@dataclass(frozen=True, kw_only=True, repr=False)
class ValidationResult(Result):
    """Predictions next to published measurements of training and of serving.

    ``commands``, ``notes`` and ``reasons`` are by run; ``published`` has the rows that cannot be used, each with its
    reason.
    """

    request: Validate
    report: AccuracyReport
    serving: ServingReport
    engines: EngineReport
    published: PublishedRuns
    commands: Mapping[str, str]
    notes: Mapping[str, Sequence[str]]
    reasons: Mapping[str, str]
    memory: MemoryRecord
    calibrated_by: str | None = None
    compiled: CompiledRuns | None = None

    @property
    def record(self) -> ValidationRecord:
        """The answer as it is written."""
        from rooftop.validation.report import UnusableTraining, ValidationRecord, ValidationSummary

        rows = self._training_rows
        return ValidationRecord(
            rows=rows,
            memory=self.memory,
            calibrated_by=self.calibrated_by,
            compiled=self.compiled,
            summary=ValidationSummary(
                groups=self.report.groups,
                beats_bound=self.report.beats_bound,
                runs=len(rows),
                unusable=tuple(UnusableTraining.of(run) for run in self.published.unusable),
                serving_rows=self.published.serving_rows,
            ),
            serving=self.serving.record,
            engines=self.engines.record,
            request=self.request.to_json(),
        )

    def to_json(self) -> dict[str, object]:
        """Every run with its levels and errors, errors by group, and the runs left out."""
        return self.record.to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """A run a row, those of training first."""
        serving = [comparison.record for comparison in self.serving.comparisons]
        return [flat(row.to_json()) for row in (*self._training_rows, *serving, *self.engines.record.rows)]

    @property
    def _training_rows(self) -> tuple[ComparisonRecord, ...]:
        notes, reasons = self.notes, self.reasons
        return tuple(
            comparison.record(self.commands[name], notes[name], reasons.get(name))
            for name, comparison in ((comparison.run.id, comparison) for comparison in self.report.comparisons)
        )

    @property
    def document(self) -> Document:
        """Errors by group, and the worst runs."""
        return document(self.record, kind="validation")

    @property
    def summary(self) -> str:
        """Mean absolute error of each kind of chip."""
        engines = len(self.engines.comparisons)
        lines = [
            f"{len(self.report.comparisons)} training runs, {len(self.serving.comparisons)} of serving, "
            f"{engines} of engines under load"
        ]
        for group in self.report.groups:
            errors = group.best_errors
            if group.by == "chip" and errors is not None:
                lines.append(f"{group.name}: {100 * errors.mean_absolute:.1f}% mean absolute error")
        return "\n".join(lines)


@of_request(Explain)
def explain(request: Explain) -> ExplainResult | CompileResult | OperationsResult:
    """Explain where the time of a run or a trace goes, a compiled module, or HLO instructions.

    A trace is set next to its compilation and its plan. Raises RooftopError for a path that is none of these, for a
    trace in which nothing ran, and for a field that means nothing with what is explained.
    """
    from rooftop.explain.measured import report

    path, lines = request.path, _several(request.op)
    if (path is None) == (not lines):
        named = None if path is None else "RUN and op"
        raise RooftopError("explain", named, "one of: a run or a trace, --op HLO, --diff A B, --demo")
    of_trace = {"plan": request.plan, "hlo": request.hlo, "figure": request.figures}
    if path is None:
        refuse({"plan": request.plan, "hlo": request.hlo, "mesh": request.mesh}, "nothing next to --op")
        return explain_operations(*lines, on=request.on, figures=request.figures)
    if _is_module(Path(path)):
        refuse(of_trace, "nothing with a module: it has no trace")
        if request.on is None:
            raise RooftopError("on", None, "the chip or slice that the module is compiled for, such as v5e:4x4")
        from rooftop.library.programs.compiling import explain_module

        return explain_module(path, on=request.on, mesh=request.mesh)
    if not Path(path).exists():
        accepted = "a run, a trace of JAX's profiler (*.xplane.pb) or a folder with one; there is no such path"
        raise RooftopError("trace", str(path), accepted)
    explained = report.explain(
        Path(path),
        plan=None if request.plan is None else training_plan_of(request.plan),
        modules=[read_module(Path(file)) for file in _several(request.hlo)],
        mesh=None if request.mesh is None else axes_of(request.mesh),
        chip=_roofs(request.on, request.figures),
    )
    return ExplainResult(explained=explained, request=request)


def _several(values: Sequence[Path | str] | Path | str) -> list[str]:
    """Texts of several values; one becomes a list."""
    return [str(value) for value in ([values] if isinstance(values, (str, Path)) else values)]


def _is_module(path: Path) -> bool:
    """True for a module of HLO: by its suffix, or a folder of dumped ones."""
    dumped = path.is_dir() and any(path.glob("*after_optimizations*"))
    return dumped or (path.suffix in (".hlo", ".txt", ".pb") and not path.name.endswith(".xplane.pb"))


def explain_operations(
    *lines: str, on: ChipLike | None = None, figures: Mapping[str, float | str] | None = None
) -> OperationsResult:
    """Make HLO instructions readable: layouts, padding, work, and the parallelism that they show together.

    Args:
        lines: Instructions as HLO text or a profile has them, one or several a text.
        on: The chip for their times.
        figures: Figures of that chip to override.

    Raises RooftopError for a line that is no instruction.
    """
    # An empty text is refused like any other that is no instruction.
    texts = [line for text in lines for line in text.splitlines() if line.strip()] or [""]
    operations = tuple(read_operation(text) for text in texts)
    return OperationsResult(
        operations=operations, inferred=infer(operations), chip=_roofs(on, figures),
        request=Explain(op=lines, on=on, figures=figures),
    )  # fmt: skip


def diff(before: Result | Path | str, after: Result | Path | str) -> DiffResult:
    """Compare two runs, traces, plans, compilations or reports, row by row.

    Each is a result of this library or a path: a run, a trace, a plan.json, or the JSON of 'rooftop compile -o' or
    'rooftop explain --json'. Raises RooftopError for anything else, and for a plan of training next to one of serving.
    """
    from rooftop.explain.difference import difference

    return DiffResult(difference=difference(_side(before, "before"), _side(after, "after")))


@of_request(Validate)
def validate(request: Validate, on_progress: Progress | None = None) -> ValidationResult:
    """Predict published runs of training and serving, and compare with the measured times.

    What is compiled is in the cache of ``compile``: a second call goes on from there. ``on_progress`` is called with
    runs compiled, their number, and the run.

    Raises RooftopError for a table that cannot be read, naming the cell, and for a calibration of a chip that no run is
    on.
    """
    from rooftop import validation
    from rooftop.plan.training.assumptions import Assumptions
    from rooftop.validation.accuracy import Peers
    from rooftop.validation.engine_runs import is_engine_table
    from rooftop.validation.engines import EngineReport, engine_report
    from rooftop.validation.memory import compare_memory
    from rooftop.validation.predict import command_of, predict
    from rooftop.validation.runs import PublishedRuns, Unusable
    from rooftop.validation.serving import ServingReport, serving_report

    if request.compiled:
        from rooftop.compiler.compiling import require_compiler

        require_compiler("tpu")
    fractions, only = calibration_of(request.calibration), request.only
    if request.assume is not None:
        # Refused here, and not run by run.
        Assumptions().with_hidden(request.assume)
    path = None if request.runs is None else Path(request.runs)
    # Reading takes little time: what is refused is refused before anything is priced.
    of_engines = path is not None and is_engine_table(path)
    published = PublishedRuns(runs=(), unusable=(), serving_rows=0) if of_engines else validation.load_published(path)
    engines, serving = EngineReport(comparisons=(), unusable=()), ServingReport(comparisons=(), unusable=())
    if only is not None:
        named = tuple(run for run in published.runs if only in run.id)
        if not named:
            raise RooftopError("only", only, _accepted_names(published))
        published = replace(published, runs=named)
    else:
        engines = engine_report(path) if of_engines or path is None else engines
        serving = serving if of_engines else serving_report(path)
    runs_of = calibrated_places({run.id: [run.slice] for run in published.runs}, fractions)
    predicted, commands, notes, unusable = [], {}, {}, list(published.unusable)
    plans = []
    for run in (replace(run, slice=runs_of[run.id][0]) for run in published.runs):
        try:
            prediction = predict(run, request.assume)
        except (RooftopError, Infeasible) as error:
            unusable.append(Unusable.unpriced(run, error))
            continue
        predicted.append((run, prediction.bound_s, prediction.uncalibrated_s))
        plans.append((run, prediction.plan))
        commands[run.id], notes[run.id] = command_of(prediction.request), list(prediction.notes)
    # Other figures of plans than those that come with rooftop have no errors but those of the table.
    judges = path is not None and not request.learn and request.assume is None and fractions is None
    report = validation.summarise(
        [run for run, _, _ in predicted],
        [bound for _, bound, _ in predicted],
        [seconds for _, _, seconds in predicted],
        Peers.shipped() if judges else None,
    )
    return ValidationResult(
        request=request,
        report=report,
        serving=serving,
        engines=engines,
        published=replace(published, unusable=tuple(sorted(unusable, key=lambda run: run.lines))),
        commands=commands,
        notes=notes,
        reasons=validation.load_reasons(),
        memory=compare_memory(plans),
        calibrated_by=None if fractions is None else fractions.by,
        compiled=_compiled(plans, only, request.timeout, on_progress) if request.compiled else None,
    )


def _accepted_names(published: PublishedRuns) -> str:
    """Parts of the names of runs, in words."""
    if not published.runs:
        return "a table with runs of training that can be used"
    chips = ", ".join(sorted({run.slice.chip.name for run in published.runs}))
    models = ", ".join(sorted({run.id.split("/")[1] for run in published.runs}))
    return f"a part of the name of a run of training, such as {published.runs[0].id}; of {chips}; of {models}"


def _compiled(
    plans: Sequence[tuple[PublishedRun, TrainingPlan]],
    only: str | None,
    timeout: TimeLike | None,
    on_progress: Progress | None,
) -> CompiledRuns:
    """Published, planned and compiled times of runs on TPUs."""
    from rooftop.validation.compiled import CompiledRow, CompiledRuns, chosen

    timeout_s = None if timeout is None else seconds_of(timeout, "timeout")
    by_id = {run.id: plan for run, plan in plans}
    runs = chosen([run for run, _ in plans], only)
    with uninterrupted():
        from rooftop.explain.compiled.report import CompiledReport
        from rooftop.explain.compiled.training import compile_plan
    rows = []
    for done, run in enumerate(runs):
        if on_progress is not None:
            on_progress(done, len(runs), run.id)
        plan = by_id[run.id]
        both = run, plan.expected_s, plan.memory_bytes
        try:
            report = compile_plan(plan, timeout_s=timeout_s)
        except RooftopError as error:
            rows.append(CompiledRow.of(*both, why=str(error)))
            continue
        if not isinstance(report, CompiledReport):
            rows.append(CompiledRow.of(*both, compiled_bytes=report.answer.needed_bytes, why=report.verdict))
            continue
        rows.append(
            CompiledRow.of(
                *both,
                compiled_s=report.timed.step.expected_s,
                compiled_bytes=report.peak_bytes,
                compile_s=report.compiled.compile_s,
                versions=report.compiled.versions,
            )
        )
    return CompiledRuns.of(rows)


def _roofs(on: ChipLike | None, figures: Mapping[str, float | str] | None) -> Chip | None:
    if on is None and figures:
        name, value = next(iter(figures.items()))
        figure = f"{name}={value}" if isinstance(value, str) else f"{name}={value:g}"
        raise RooftopError("figure", figure, "a chip to override it of: --on CHIP")
    return None if on is None else chip_of(on, figures)


def _side(source: Result | Path | str, name: str) -> Side:
    from rooftop.explain.difference import read_side, side_of

    return side_of(name, source.to_json()) if isinstance(source, Result) else read_side(Path(source))
