"""Train a DLRM on Criteo's format: host preprocessing, lookups, dense part and updates, sequential or pipelined.

A run's folder holds limits.json (the limits that it was begun with), checkpoints/ and metrics.jsonl. A pipeline is
drained before a checkpoint, so that nothing is under way in it: a run that was killed goes on as if it had not been,
bit for bit on the same devices, and may move to others.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rooftop.embed.checkpoint import Saved, restore, save, stacked, unstacked
from rooftop.embed.criteo import CriteoBatch, auc, check_features, count_batches, read_batches
from rooftop.embed.limits import estimate, observe, read_limits, write_limits
from rooftop.embed.preprocess import Preprocessor
from rooftop.embed.train_step import Target, TrainStep, compiler_options
from rooftop.errors import Infeasible, RooftopError
from rooftop.models.tables import Tables
from rooftop.models.tables_stacking import Stacking, stack_tables, unpack
from rooftop.programs.dlrm import DlrmBatch
from rooftop.programs.embedding_optimizers import initial_slots
from rooftop.programs.embedding_pipeline import ModelState
from rooftop.programs.embedding_state import EmbeddingState, device_inputs, host_state, initialise, place_state

#: Batches from which a new run estimates its limits.
_OBSERVED = 16


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What a run is asked. ``batch`` is B on all ``devices``.

    ``cores_per_device`` SparseCores are emulated by each device without any (None: ``train_step.EMULATED_CORES``).
    ``pipelined`` uses stale gradients, see ``rooftop.programs.embedding_pipeline``. A checkpoint is made every
    ``checkpoint_every`` batches and at the end; tables are looked over for NaNs then, with the check ``nan`` after
    every batch. ``checks`` are names of ``rooftop.xla.sparsecore_checks.CHECKS``; others than ``nan`` need SparseCores.
    ``profile`` is the first and last batch, counted from 1, of a trace.
    """

    tables: Tables
    data: Path
    run: Path
    batch: int
    devices: int = 1
    cores_per_device: int | None = None
    steps: int | None = None
    pipelined: bool = False
    checkpoint_every: int = 100
    dense_learning_rate: float = 1e-3
    seed: int = 0
    threads: int = 1
    checks: tuple[str, ...] = ()
    profile: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "devices", "cores_per_device", "checkpoint_every", "threads"):
            given = getattr(self, name)
            if given is not None and given < 1:
                raise RooftopError(name, getattr(self, name), "a positive whole number")
        if self.devices > len(jax.devices()):
            raise RooftopError("devices", self.devices, f"at most the {len(jax.devices())} that are here")
        check_features(self.tables)
        widths = {table.width for table in self.tables.tables}
        if len(widths) > 1:
            raise RooftopError("tables", f"widths {sorted(widths)}", "one width: a DLRM multiplies embeddings pairwise")


def check_finite(state: EmbeddingState[jax.Array], stacking: Stacking, batch: int) -> None:
    """Raises Infeasible, naming the table, its first bad row and the batch, where a table holds NaN or infinity."""
    for stack in stacking.stacks:
        if not bool(jnp.isfinite(state.tables[stack.name]).all()):
            whole = unpack(stacking, host_state(stacking, state)[0])
            for place in stack.places:
                bad = np.flatnonzero(~np.isfinite(whole[place.table.name]).all(axis=1))
                if len(bad):
                    what = f"table {place.table.name} after batch {batch}"
                    raise Infeasible(what, f"{len(bad)} rows that are no finite numbers, first row {bad[0]}")


class Trainer:
    """A run, begun or gone on with."""

    def __init__(self, options: TrainOptions) -> None:
        self.options = options
        first = jax.devices()[0]
        self.target = Target.of(first, options.tables, options.cores_per_device)
        own = self.target.cores_per_device
        self.stacking: Stacking = stack_tables(
            options.tables, cores=options.devices * own, cores_per_device=own, batch=options.batch
        )
        self.mesh = jax.make_mesh((options.devices,), ("data",), devices=jax.devices()[: options.devices])
        options.run.mkdir(parents=True, exist_ok=True)
        limits = self._limits()
        self.preprocessor = Preprocessor(
            self.stacking, batch=options.batch, limits=limits, minibatching=True, threads=options.threads
        )
        self._step = TrainStep(
            stacking=self.stacking,
            limits=limits,
            batch=options.batch,
            mesh=self.mesh,
            kernel=self.target.kernel,
            pipelined=options.pipelined,
            dense_learning_rate=options.dense_learning_rate,
            options=compiler_options(self.target, first, options.checks, pipelined=options.pipelined),
        )
        self.state, self.done = self._begin()
        self._tracing = False

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.options.run / "checkpoints"

    @property
    def trace(self) -> Path:
        """Where a trace is, if one was asked for."""
        return self.options.run / "profile"

    def train(self) -> list[float]:
        """Go on to the end of the data (or to ``steps`` batches) and return the losses of the batches read now."""
        options = self.options
        last = count_batches(options.data, options.batch)
        last = last if options.steps is None else min(last, options.steps)
        found, losses = list[float](), list[Any]()
        batches = islice(
            read_batches(options.data, options.tables, options.batch, start=self.done), max(last - self.done, 0)
        )
        with jax.set_mesh(self.mesh):
            for batch in batches:
                with self._traced(self.done + 1, last):
                    self.state, told = self._step(self.state, *self._placed(batch))
                losses.append(told)
                self.done += 1
                if "nan" in options.checks:
                    check_finite(self.state.embedding, self.stacking, self.done)
                if self.done % options.checkpoint_every == 0 or self.done == last:
                    losses += self._drain()
                    found += self._record(losses)
                    losses.clear()
                    self._save()
        return found

    @contextmanager
    def _traced(self, number: int, last: int) -> Iterator[None]:
        """Around batch ``number``, of ``last``: it is told to the profiler, which begins and ends as it was asked."""
        low, high = self.options.profile or (0, 0)
        if low <= number <= high and not self._tracing:
            jax.block_until_ready(self.state)
            jax.profiler.start_trace(self.trace)
            self._tracing = True
        try:
            with jax.profiler.StepTraceAnnotation("train", step_num=number):
                yield
        finally:
            if self._tracing and (number == min(high, last) or sys.exception() is not None):
                jax.block_until_ready(self.state)
                jax.profiler.stop_trace()
                self._tracing = False

    def _record(self, losses: list[Any]) -> list[float]:
        """Write the losses of the batches up to now to metrics.jsonl, and return them."""
        found = [float(loss) for loss in losses if loss is not None]
        with (self.options.run / "metrics.jsonl").open("a", encoding="utf-8") as file:
            for index, loss in enumerate(found, start=self.done - len(found)):
                file.write(json.dumps({"batch": index, "loss": loss}) + "\n")
        return found

    def evaluate(self, data: Path) -> float:
        """AUC on the whole batches of ``data``."""
        labels, scores = [], []
        with jax.set_mesh(self.mesh):
            for batch in read_batches(data, self.options.tables, self.options.batch):
                inputs, placed = self._placed(batch)
                scores.append(np.asarray(self._step.scores(self.state, inputs, placed.dense)))
                labels.append(batch.label)
        if not labels:
            raise RooftopError("data", str(data), f"at least one batch of {self.options.batch} lines")
        return auc(np.concatenate(labels), np.concatenate(scores))

    def _placed(self, batch: CriteoBatch) -> tuple[Any, DlrmBatch[jax.Array]]:
        """One batch on the devices: what is looked up, and the rest."""
        made = self.preprocessor.preprocess(batch.ids)
        split = jax.NamedSharding(self.mesh, jax.P(self.mesh.axis_names))
        # What no device tells of is told to a trace by the host.
        with jax.profiler.TraceAnnotation("place", dropped_ids=made.statistics.dropped, minibatches=made.minibatches):
            placed = DlrmBatch(dense=jax.device_put(batch.dense, split), label=jax.device_put(batch.label, split))
            return device_inputs(made.buffers, made.minibatches, self.mesh), placed

    def _drain(self) -> list[Any]:
        """Finish what is under way in a pipeline."""
        told = []
        while self.state.looked_up is not None or self.state.differentiated is not None:
            self.state, one = self._step(self.state, None, None)
            told.append(one)
        return told

    def _limits(self) -> Any:
        """Those of the run, or, when it begins or moves to other devices, from its first batches."""
        options, path = self.options, self.options.run / f"limits-{self.stacking.cores}.json"
        if path.exists():
            return read_limits(path, self.stacking, batch=options.batch)
        observer = Preprocessor(self.stacking, batch=options.batch)
        first: Iterator[Any] = (
            batch.ids for batch in islice(read_batches(options.data, options.tables, options.batch), _OBSERVED)
        )
        limits = estimate(observe(observer, first), self.stacking)
        write_limits(path, limits, self.stacking, batch=options.batch, batches=_OBSERVED)
        return limits

    def _begin(self) -> tuple[ModelState[jax.Array], int]:
        """The state of the newest checkpoint, or a new one, and the batches that it has seen."""
        saved = restore(self.checkpoints)
        dense = self._step.model.initialise(self.mesh, self.options.seed)
        kernel = self.target.kernel
        if saved is None:
            return ModelState(embedding=initialise(self.stacking, self.mesh, self.options.seed, kernel), dense=dense), 0
        beginnings = {stack.name: initial_slots(stack.optimizer) for stack in self.stacking.stacks}
        tables, slots = stacked(self.stacking, saved, beginnings)
        embedding = place_state(self.stacking, self.mesh, tables, slots, saved.step, kernel)
        paths, structure = jax.tree_util.tree_flatten_with_path(dense)
        names = [jax.tree_util.keystr(path) for path, _ in paths]
        for name in names:
            if name not in saved.dense:
                raise RooftopError("checkpoint", f"no {name}", "the same dense part as the run began with")
        leaves = [
            jax.device_put(saved.dense[name], leaf.sharding) for name, (_, leaf) in zip(names, paths, strict=True)
        ]
        return ModelState(embedding=embedding, dense=jax.tree_util.tree_unflatten(structure, leaves)), saved.batch

    def _save(self) -> None:
        state = self.state
        check_finite(state.embedding, self.stacking, self.done)
        tables, slots = unstacked(self.stacking, *host_state(self.stacking, state.embedding))
        dense = {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(state.dense)[0]
        }
        save(
            self.checkpoints,
            Saved(step=int(state.embedding.step), batch=self.done, tables=tables, slots=slots, dense=dense),
        )
