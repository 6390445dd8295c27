"""Train a DLRM on Criteo's format: host preprocessing, lookups, dense part and updates, sequential or pipelined.

A run's folder holds the limits of its program, checkpoints/ and metrics.jsonl. A pipeline is drained before a
checkpoint, so that nothing is under way in it: a run that was killed goes on as if it had not been, bit for bit on the
same devices, and may move to others. A batch that exceeds the limits, and cannot be split, makes them grow: from a
checkpoint on, so that this too comes out the same when it is killed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rooftop.embed.checkpoint import Saved, require_tables, restore, save, stacked, unstacked
from rooftop.embed.criteo import (
    CriteoBatch,
    auc,
    digest_first,
    read_batches,
    read_lines,
    require_batches,
    split_lines,
)
from rooftop.embed.finite import check_dense, check_finite
from rooftop.embed.host.limits import estimate, grown, observe, read_limits, write_limits
from rooftop.embed.host.overflow import LimitsExceeded
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.embed.host.statistics import Statistics
from rooftop.embed.host.workers import Ready, make_ready
from rooftop.embed.memory import require_memory
from rooftop.embed.metrics import append_metrics, keep_metrics
from rooftop.embed.train_options import TrainOptions
from rooftop.embed.train_step import Target, TrainStep, compiler_options
from rooftop.errors import RooftopError
from rooftop.models.tables_limits import Limits
from rooftop.models.tables_stacking import Stacking, stack_tables
from rooftop.programs.dlrm import DlrmBatch
from rooftop.programs.embedding_optimizers import initial_slots
from rooftop.programs.embedding_pipeline import ModelState
from rooftop.programs.embedding_state import (
    begin_sums,
    device_inputs,
    host_state,
    initialise,
    place_state,
)

#: Batches from which a new run estimates its limits.
_OBSERVED = 16


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
        require_memory(self.stacking, batch=options.batch, on_host=first.platform == "cpu")
        self.mesh = jax.make_mesh((options.devices,), ("data",), devices=jax.devices()[: options.devices])
        self._data = digest_first(options.data, options.batch)
        saved = restore(self.checkpoints)
        if saved is not None:
            self._check(saved)
        self.seed: int = (None if saved is None else saved.seed) or options.seed or 0
        self._options = compiler_options(self.target, first, options.checks, pipelined=options.pipelined)
        self._compile_for(self._first_limits())
        self.state, self.done = self._begin(saved)
        keep_metrics(self._metrics, self.done)
        #: Ids that were dropped, and the most passes that a batch took, of the batches trained on now.
        self.dropped, self.passes = 0, 1
        self._tracing = False

    def _check(self, saved: Saved) -> None:
        """Raises RooftopError where the options are not those of the run that the checkpoint is of."""
        options = self.options
        # What has been read is counted in batches.
        for name, there in (("batch", saved.samples), ("seed", saved.seed)):
            if None not in (there, given := getattr(options, name)) and given != there:
                raise RooftopError(name, given, f"{there}, that of the run in {options.run}")
        if saved.data not in (None, self._data):
            accepted = f"a file that begins like that of the run in {options.run}, or another folder for a new run"
            raise RooftopError("data", str(options.data), accepted)
        require_tables(saved, options.tables)

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.options.run / "checkpoints"

    @property
    def trace(self) -> Path:
        """Where a trace is, if one was asked for."""
        return self.options.run / "profile"

    @property
    def _metrics(self) -> Path:
        return self.options.run / "metrics.jsonl"

    def train(
        self,
        on_batch: Callable[[int, int], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[float]:
        """Go on to the end of the data (or to ``steps`` batches) and return the losses of the batches read now.

        ``on_batch`` is told how many batches are done and how many there are in all. Where the run is ``stopped``, a
        checkpoint is made behind the batch that is under way, and nothing else is read. A pipeline is then drained
        where it would not have been.
        """
        options = self.options
        last = require_batches(options.data, options.batch)
        last = last if options.steps is None else min(last, options.steps)
        found, losses = list[float](), list[Any]()

        def grow(batch: CriteoBatch) -> None:
            nonlocal found
            found += self._checkpoint(losses)
            self._grow(batch)

        with jax.set_mesh(self.mesh), closing(self._ready(options.data, self.done, last, grow)) as batches:
            ending = self.done >= last or stopped()
            while not ending:
                if on_batch is not None:
                    on_batch(self.done, last)
                with self._traced(self.done + 1, last):
                    self.state, told = self._step(self.state, *self._placed(next(batches)))
                losses.append(told)
                self.done += 1
                if "nan" in options.checks:
                    check_finite(self.state.embedding, self.stacking, self.done)
                ending = self.done == last or stopped()
                if ending or self.done % options.checkpoint_every == 0:
                    found += self._checkpoint(losses)
        return found

    def _ready(
        self, data: Path, first: int, last: int, grow: Callable[[CriteoBatch], None]
    ) -> Generator[Ready[CriteoBatch]]:
        """Batches ``first`` to ``last`` of ``data``, made ready; ``grow`` is told of one that does not fit, before."""
        tables, batch = self.options.tables, self.options.batch
        split = partial(split_lines, path=data, tables=tables, batch=batch)
        grown_for = -1
        while first < last:
            lines = islice(read_lines(data, batch, start=first), last - first)
            made = make_ready(lines, split, self._preprocessor, workers=self.options.workers)
            try:
                with closing(made) as ready:
                    for one in ready:
                        yield one
                        first += 1
            except LimitsExceeded:
                if grown_for == first:
                    raise
            else:
                if first < last:
                    raise RooftopError("data", f"{first} batches in {data}", f"the {last} that it had at first")
                return
            # All behind it is made ready anew, for the limits that it takes.
            grow(next(read_batches(data, tables, batch, start=first)))
            grown_for = first

    def _checkpoint(self, losses: list[Any]) -> list[float]:
        """Finish what is under way, record the ``losses``, which are none then, and save. Returns them as numbers."""
        losses += self._drain()
        found = self._record(losses)
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
        append_metrics(self._metrics, found, self.done - len(found))
        return found

    def evaluate(self, data: Path) -> float:
        """AUC on the whole batches of ``data``."""
        last = require_batches(data, self.options.batch)
        labels, scores = [], []
        with jax.set_mesh(self.mesh), closing(self._ready(data, 0, last, self._grow)) as batches:
            for batch in batches:
                inputs, placed = self._placed(batch)
                scores.append(np.asarray(self._step.scores(self.state, inputs, placed.dense)))
                labels.append(batch.rest.label)
        return auc(np.concatenate(labels), np.concatenate(scores))

    def _placed(self, batch: Ready[CriteoBatch]) -> tuple[Any, DlrmBatch[jax.Array]]:
        """One batch on the devices: what is looked up, and the rest."""
        made, rest = batch.made, batch.rest
        self.dropped += made.statistics.dropped
        self.passes = max(self.passes, made.minibatches)
        split = jax.NamedSharding(self.mesh, jax.P(self.mesh.axis_names))
        # What no device tells of is told to a trace by the host.
        with jax.profiler.TraceAnnotation("place", dropped_ids=made.statistics.dropped, minibatches=made.minibatches):
            placed = DlrmBatch(dense=jax.device_put(rest.dense, split), label=jax.device_put(rest.label, split))
            return device_inputs(made.buffers, made.minibatches, self.mesh), placed

    def _drain(self) -> list[Any]:
        """Finish what is under way in a pipeline."""
        told = []
        while self.state.looked_up is not None or self.state.differentiated is not None:
            self.state, one = self._step(self.state, None, None)
            told.append(one)
        return told

    @property
    def limits_file(self) -> Path:
        """The limits of the run on so many SparseCores, in so many passes over samples."""
        passes = self.options.sample_passes
        return self.options.run / f"limits-{self.stacking.cores}{f'-{passes}-passes' if passes > 1 else ''}.json"

    def _first_limits(self) -> Limits:
        """Those given or of the run, or, when it begins or moves to other devices, from its first batches."""
        options, path = self.options, self.options.limits or self.limits_file
        how = {"batch": options.batch, "sample_passes": options.sample_passes}
        limits: Limits | None = None
        if options.limits is not None:
            limits = read_limits(path, self.stacking, **how)
        elif path.exists():
            # With other learning rates tables stack otherwise: the run's limits are then of stacks that are no more.
            with suppress(RooftopError):
                limits = read_limits(path, self.stacking, **how)
        batches = 0
        if limits is None:
            require_batches(options.data, options.batch)
            first = islice(read_batches(options.data, options.tables, options.batch), _OBSERVED)
            limits = estimate(self._observed(first), self.stacking)
            batches = _OBSERVED
        if path != self.limits_file or batches:
            try:
                options.run.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                accepted = f"a folder that can be written ({error.strerror})"
                raise RooftopError("run", str(options.run), accepted) from None
            write_limits(self.limits_file, limits, self.stacking, batches=batches, **how)
        return limits

    def _observed(self, batches: Iterable[CriteoBatch]) -> Statistics:
        """What the batches need."""
        passes = self.options.sample_passes
        observer = Preprocessor(self.stacking, batch=self.options.batch, minibatching=passes > 1, sample_passes=passes)
        return observe(observer, (batch.ids for batch in batches))

    def _grow(self, batch: CriteoBatch) -> None:
        """Go on with limits that hold ``batch`` too. Nothing is under way."""
        limits, options = grown(self._step.limits, self._observed([batch]), self.stacking), self.options
        write_limits(self.limits_file, limits, self.stacking, batch=options.batch, sample_passes=options.sample_passes)
        self._compile_for(limits)

    def _compile_for(self, limits: Limits) -> None:
        """Make ready for these limits what prepares batches and what runs them; a step is compiled when it is run."""
        options = self.options
        self._preprocessor = partial(
            Preprocessor,
            self.stacking,
            batch=options.batch,
            limits=limits,
            minibatching=True,
            sample_passes=options.sample_passes,
            threads=options.threads,
        )
        self._step = TrainStep(
            stacking=self.stacking,
            limits=limits,
            batch=options.batch,
            mesh=self.mesh,
            kernel=self.target.kernel,
            pipelined=options.pipelined,
            dense_learning_rate=options.dense_learning_rate,
            share_of=options.share_of,
            sample_passes=options.sample_passes,
            options=self._options,
        )

    def _begin(self, saved: Saved | None) -> tuple[ModelState[jax.Array], int]:
        """The state of a checkpoint, or a new one, and the batches that it has seen."""
        dense = self._step.model.initialise(self.mesh, self.seed)
        kernel = self.target.kernel
        sums = begin_sums(self.stacking, self.mesh, self._step.program.embedding.summed)
        if saved is None:
            embedding = initialise(self.stacking, self.mesh, self.seed, kernel)
            return ModelState(embedding=replace(embedding, sums=sums), dense=dense), 0
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
        whole = jax.tree_util.tree_unflatten(structure, leaves)
        return ModelState(embedding=replace(embedding, sums=sums), dense=whole), saved.batch

    def _save(self) -> None:
        state = self.state
        check_finite(state.embedding, self.stacking, self.done)
        tables, slots = unstacked(self.stacking, *host_state(self.stacking, state.embedding))
        dense = {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(state.dense)[0]
        }
        check_dense(dense, self.done)
        save(
            self.checkpoints,
            Saved(
                step=int(state.embedding.step),
                batch=self.done,
                tables=tables,
                slots=slots,
                dense=dense,
                samples=self.options.batch,
                seed=self.seed,
                data=self._data,
                optimizers={table.name: table.optimizer.kind for table in self.options.tables.tables},
            ),
        )
