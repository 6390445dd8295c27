"""Training of language models and of embedding tables: runs in a folder, which resume where they stopped."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rooftop.core.errors import RooftopError
from rooftop.core.files import write_text
from rooftop.core.quantities import format_bytes, format_count, parse_dtype
from rooftop.embed.criteo import require_batches, require_labels
from rooftop.embed.export import ExportedTable, ExportedTables, export
from rooftop.embed.train.request import EmbeddingTrainRequest
from rooftop.library.results import Result, flat
from rooftop.models import count_params
from rooftop.models.embedding_tables.files import load_tables
from rooftop.models.embedding_tables.tables import Tables
from rooftop.present.documents.embedding import embedding_export
from rooftop.requests.function import of_request
from rooftop.runs.beats import Beats
from rooftop.runs.environment import prepare_environment, uninterrupted
from rooftop.runs.folder import RunFolder
from rooftop.train.request import TrainRequest

if TYPE_CHECKING:
    from rooftop.present.document import Document
    from rooftop.train.engine import Outcome
    from rooftop.train.evaluate import Evaluation
    from rooftop.train.metrics import StepRecord
    from rooftop.train.recording import Watch
    from rooftop.train.start import ReadyRun

#: Callback with the batches that are done and the last one.
OnBatch: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainResult(Result):
    """A run and its last step, ``step``. ``last`` is the record of that step, None if this call trained none.

    ``stopped_by`` names the signal that stopped it, None if it is done. Losses are in nats a token.
    """

    run: Path
    step: int
    stopped_by: str | None
    last: StepRecord | None
    evaluation: Evaluation | None
    unigram_entropy: float
    mesh: Mapping[str, int]
    mfu_convention: str
    samples: tuple[str, ...] = ()

    @property
    def resume(self) -> str:
        """The command that resumes the run."""
        return f"rooftop train --resume {shlex.quote(str(self.run))}"

    @property
    def rows(self) -> list[dict[str, object]]:
        """Records of all steps and evaluations of the run, oldest first: the lines of metrics.jsonl."""
        return _records(self.run)

    def to_json(self) -> dict[str, object]:
        """Return the object that ``rooftop train --json`` prints."""
        return {
            "kind": "train",
            "run": str(self.run),
            "step": self.step,
            "stopped": self.stopped_by is not None,
            "resume": self.resume,
            "last": None if self.last is None else self.last.to_json(),
            "evaluation": None if self.evaluation is None else self.evaluation.to_json(),
            "unigram_entropy": self.unigram_entropy,
            "mesh": dict(self.mesh),
            "mfu_convention": self.mfu_convention,
            "samples": list(self.samples),
        }

    @property
    def summary(self) -> str:
        """The last step, its loss and the perplexity of held-out documents; or how to resume."""
        if self.stopped_by is not None:
            return f"stopped by {self.stopped_by}, saved at step {self.step}; to go on: {self.resume}"
        last, evaluation = self.last, self.evaluation
        loss = "" if last is None else f"; loss {last.loss:.4f} (unigram entropy {self.unigram_entropy:.3f})"
        held_out = "" if evaluation is None else f"; held-out perplexity {evaluation.perplexity:.4g}"
        return f"step {self.step} done{loss}{held_out}; run in {self.run}"


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingTrainResult(Result):
    """A run of embedding tables after ``batches`` batches, of which ``begun_at`` were trained before.

    ``kernel`` runs lookups and updates. ``passes`` is the largest number of passes of a batch and ``dropped_ids`` the
    ids over the ``limits``, of the batches trained now; ``losses`` are theirs. ``refused`` has a line for each damaged
    checkpoint that was passed over.
    """

    run: Path
    kernel: str
    batches: int
    batch_samples: int
    begun_at: int
    stopped_by: str | None
    seed: int
    passes: int
    dropped_ids: int
    limits: Path
    losses: tuple[float, ...]
    auc: float | None
    refused: tuple[str, ...]

    @property
    def rows(self) -> list[dict[str, object]]:
        """Records of all steps of the run, oldest first: the lines of metrics.jsonl."""
        return _records(self.run)

    def to_json(self) -> dict[str, object]:
        """Return the object that ``rooftop embed train --json`` prints. ``loss`` is the last one."""
        loss = self.losses[-1] if self.losses else math.nan
        return {
            "run": str(self.run),
            "kernel": self.kernel,
            "batches": self.batches,
            "begun_at": self.begun_at,
            "stopped": self.stopped_by is not None,
            "seed": self.seed,
            "passes": self.passes,
            "dropped_ids": self.dropped_ids,
            "limits": str(self.limits),
            "loss": loss if math.isfinite(loss) else None,
            "auc": self.auc,
        }

    @property
    def summary(self) -> str:
        """Batches, losses, passes, dropped ids, AUC and the folder of the checkpoints."""
        lines = [f"checkpoint left out: {damage}" for damage in self.refused]
        if self.stopped_by is not None:
            lines.append(f"stopped by {self.stopped_by} and saved: the same command goes on")
        lines.append(f"{self.batches:,} batches of {self.batch_samples} samples, {self.begun_at:,} of them before")
        if self.kernel == "sparsecore":
            lines.append("  lookups and updates are XLA's SparseCore operations")
        if self.losses:
            lines.append(f"  loss {self.losses[0]:.4f} at first, {self.losses[-1]:.4f} at last (nats a sample)")
        if self.passes > 1:
            lines.append(f"  batches were looked up in up to {self.passes} passes")
        if self.dropped_ids:
            lines.append(f"  {self.dropped_ids:,} ids were dropped for the limits in {self.limits}")
        if self.auc is not None:
            lines.append(f"  AUC {self.auc:.4f}")
        lines.append(f"  checkpoints in {self.run / 'checkpoints'}")
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True, repr=False)
class EmbeddingExportResult(Result):
    """Exported tables of a run after ``batches`` batches. ``report`` is the content of tables.json."""

    batches: int
    report: ExportedTables

    @property
    def tables(self) -> Mapping[str, ExportedTable]:
        """Shape, bytes and, in int8, range and errors by table."""
        return dict(self.report.tables)

    def to_json(self) -> dict[str, object]:
        """Return the content of tables.json."""
        return self.report.to_json()

    @property
    def rows(self) -> list[dict[str, object]]:
        """Figures of each table."""
        return [{"table": name, **flat(table.to_json())} for name, table in self.tables.items()]

    @property
    def document(self) -> Document:
        """The figures of each table."""
        return embedding_export(self.report, summary=self.summary)

    @property
    def summary(self) -> str:
        """Tables, their bytes and the batches that they were trained on."""
        total = format_bytes(sum(table.bytes for table in self.tables.values()))
        dtype = "" if self.report.dtype == "f32" else f"in {self.report.dtype} of those "
        return f"{len(self.tables)} tables, {total}, {dtype}as they were trained in {self.batches:,} batches"


@of_request(TrainRequest)
def train(request: TrainRequest, watch: Watch | None = None) -> TrainResult:
    """Train a plan or a model on local devices, or resume the run in the folder ``run``.

    Takes a TrainRequest, and a ``watch`` for its progress, or the request's fields as keywords. In the main thread
    SIGTERM and Ctrl-C save the state at the next step; the result then says ``stopped_by``.

    Raises RooftopError naming a field that is wrong, or that is not that of the run in the folder; Infeasible if the
    state does not fit, the loss diverges or a gradient is not finite; and ``rooftop.runs.signals.Stopped`` for a signal
    before the first step.
    """
    prepare_environment(request.devices, extra="train", traced=request.profile is not None)
    with uninterrupted():
        import jax

    from rooftop.checkpoints.huggingface_files import require_new
    from rooftop.runs.checkpoints import Checkpoints
    from rooftop.runs.signals import Signals
    from rooftop.train.engine import TrainEngine
    from rooftop.train.recording import Watch
    from rooftop.train.start import prepare

    if request.devices is not None and (count := len(jax.local_devices())) != request.devices:
        accepted = f"{count}, as JAX has started with; or a fresh process, where JAX is not imported yet"
        raise RooftopError("devices", request.devices, accepted)
    first, folder = jax.process_index() == 0, request.folder
    watch = watch if first and watch is not None else Watch()
    if first and request.export is not None:
        require_new(Path(request.export))
    beats = Beats.of_process()
    with Signals() as signals, folder.claimed() if first else nullcontext():
        recorded = folder.read()
        beats.enter("preparing the data", 0)
        ready = prepare(request, recorded, watch.on_progress)
        also = None if request.save_also is None else RunFolder(path=Path(request.save_also).absolute()).checkpoints
        checkpoints = Checkpoints(
            folder.checkpoints, keep=request.keep, every=request.keep_every, also=also, on_message=watch.on_message
        )
        if recorded is None and also is not None and also.exists():
            accepted = "a folder that no other run has saved to"
            raise RooftopError("save-also", str(request.save_also), accepted)
        with closing(checkpoints):
            done = max(checkpoints.steps(), default=0)
            if first:
                _record(request, ready, recorded, done)
            watch.on_message(_headline(ready))
            if done:
                watch.on_message(f"going on after step {done}")
            watch.on_start(done, request.steps)
            engine = TrainEngine(
                job=ready.job, data=ready.data, folder=folder, checkpoints=checkpoints, rates=ready.rates,
                request=request, watch=watch, beats=beats,
            )  # fmt: skip
            outcome = engine.train(signals)
            beats.enter("sampling and exporting", outcome.step)
            caught = "another process" if signals.caught is None else signals.caught.name
            return TrainResult(
                run=folder.path,
                step=outcome.step,
                stopped_by=caught if outcome.stopped else None,
                last=outcome.record,
                evaluation=outcome.evaluation,
                unigram_entropy=ready.data.unigram_entropy,
                mesh=dict(ready.job.mesh.shape),
                mfu_convention=ready.rates.convention,
                samples=() if outcome.stopped else _finish(request, ready, outcome),
            )


@of_request(EmbeddingTrainRequest)
def train_embedding(request: EmbeddingTrainRequest, watch: OnBatch | None = None) -> EmbeddingTrainResult:
    """Train a DLRM on embedding tables, or resume the run in the folder ``run``.

    Takes an EmbeddingTrainRequest, and a ``watch`` (done, last) called before each batch, or the request's fields as
    keywords. In the main thread SIGTERM and Ctrl-C save the state after the batch that is under way.

    Raises RooftopError naming a field that is wrong, or that is not that of the run in the folder, and Infeasible if
    the tables exceed the memory or hold NaN.
    """
    prepare_environment(request.devices, extra="embed")
    require_batches(Path(request.data), request.batch_samples)
    if request.evaluate is not None:
        require_labels(Path(request.evaluate), request.batch_samples)
    with uninterrupted():
        from rooftop.embed.train.trainer import Trainer
        from rooftop.runs.signals import Signals

    with Signals() as signals, request.folder.claimed():
        # From here on a signal waits until the state can be saved; a second one ends the process.
        signals.deferred = True
        with closing(Trainer(request)) as trainer:
            losses = trainer.train(watch, lambda: signals.caught is not None)
            stopped_by = None if signals.caught is None else signals.caught.name
            is_evaluated = request.evaluate is not None and stopped_by is None
            auc = trainer.evaluate(Path(request.evaluate)) if request.evaluate is not None and is_evaluated else None
        return EmbeddingTrainResult(
            run=request.folder.path,
            kernel=trainer.target.kernel,
            batches=trainer.done,
            batch_samples=request.batch_samples,
            begun_at=trainer.resumed_at,
            stopped_by=stopped_by,
            seed=trainer.seed,
            passes=trainer.passes,
            dropped_ids=trainer.dropped,
            limits=trainer.limits_file,
            losses=tuple(losses),
            auc=auc,
            refused=trainer.refused,
        )


def export_embedding(
    *, tables: Tables | Path | str, run: Path | str, output: Path | str, dtype: str = "int8"
) -> EmbeddingExportResult:
    """Write the tables of a run's newest checkpoint to the folder ``output``, in int8 or f32.

    ``tables`` is the tables.toml of the run, whose ranges of quantisation are used. Raises RooftopError if there is no
    whole checkpoint, or it is of other tables.
    """
    config = tables if isinstance(tables, Tables) else load_tables(Path(tables))
    prepare_environment(None, extra="embed")
    if not RunFolder(path=Path(run)).checkpoints.is_dir():
        raise RooftopError("run", str(run), "a folder with a whole checkpoint, of rooftop embed train")
    with uninterrupted():
        from rooftop.embed.train.checkpoint import newest_tables

    saved = newest_tables(Path(run))
    report = export(Path(output), config, saved.tables, dtype=parse_dtype(dtype))
    return EmbeddingExportResult(batches=saved.step, report=report)


def _records(run: Path) -> list[dict[str, object]]:
    from rooftop.runs.records import read_records

    return list(read_records(RunFolder(path=run).metrics))


def _record(request: TrainRequest, ready: ReadyRun, recorded: Mapping[str, Any] | None, step: int) -> None:
    """Write run.json, and the plan of a new run."""
    from rooftop.train.start import session

    folder, program = request.folder, ready.job.program
    if recorded is None and request.planned is not None:
        write_text(folder.plan, json.dumps(request.planned, indent=1) + "\n")
    arguments = request.arguments(batch_seqs=program.batch, seq_len=program.seq_len)
    script = Path(sys.argv[0]).name
    command = shlex.join(["rooftop" if script == "__main__.py" else script, *sys.argv[1:]])
    sessions = [*(recorded["sessions"] if recorded is not None else []), session(step, command)]
    folder.write({**ready.about, "arguments": arguments, "sessions": sessions})


def _headline(ready: ReadyRun) -> str:
    program, data = ready.job.program, ready.data
    left = f"; {data.left_out} files are no text" if data.left_out else ""
    return (
        f"{program.model.name}: {format_count(count_params(program.model).total)} parameters; {ready.note}; "
        f"{program.batch} sequences of {program.seq_len}\n"
        f"{format_count(data.store.tokens)} tokens in {data.store.documents} documents{left}; "
        f"{data.train.steps_per_epoch} steps an epoch; unigram entropy {data.unigram_entropy:.3f} nats a token"
    )


def _finish(request: TrainRequest, ready: ReadyRun, outcome: Outcome) -> tuple[str, ...]:
    """Draw the samples and write the export of a run that is done; return the samples."""
    from rooftop.checkpoints.huggingface import save_weights
    from rooftop.train.evaluate import SampleOptions, sample

    job, tokenizer, weights = ready.job, ready.data.tokenizer, outcome.state.weights
    texts: list[str] = []
    if request.samples and tokenizer is not None:
        options = SampleOptions(
            count=request.samples,
            tokens=request.sample_tokens,
            prompt=request.prompt,
            temperature=request.temperature,
            seed=request.seed,
        )
        texts = sample(job.program, job.mesh, weights, tokenizer, options)
    if request.export is not None:
        complete = None if tokenizer is None else tokenizer.save
        save_weights(
            Path(request.export), job.program.model, weights, source=job.init, described=job.described,
            complete=complete,
        )  # fmt: skip
    return tuple(texts)
