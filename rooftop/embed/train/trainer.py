"""Training of a DLRM on Criteo's format: host preprocessing, lookups, dense part and updates, sequential or pipelined.

A run's folder holds the limits of its program, checkpoints/ and metrics.jsonl. A pipeline is drained before each
checkpoint, so that a killed run resumes bit for bit on the same devices, and may move to others. If a batch overflows
the limits and cannot be split, the run saves a checkpoint first and then raises the limits: a killed run resumes
identically.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import format_bytes
from rooftop.embed.criteo import CriteoBatch, auc, digest_first, read_batches, read_lines, require_batches, split_lines
from rooftop.embed.host.limits import estimate, grown, observe, read_limits, write_limits
from rooftop.embed.host.overflow import LimitsExceeded
from rooftop.embed.host.preprocess import Preprocessor
from rooftop.embed.host.statistics import Statistics
from rooftop.embed.host.workers import Ready, make_ready
from rooftop.embed.train.checkpoint import Saved, restore, save, stacked, unstacked
from rooftop.embed.train.request import EmbeddingTrainRequest
from rooftop.embed.train.step import StepTarget, TrainStep, compiler_options
from rooftop.models.embedding_tables.limits import Limits
from rooftop.models.embedding_tables.stacking import Stacking, report, stack_tables, unpack
from rooftop.programs.embedding.dlrm import DlrmBatch
from rooftop.programs.embedding.optimizers import initial_slots
from rooftop.programs.embedding.pipeline import ModelState
from rooftop.programs.embedding.state import (
    EmbeddingState,
    begin_sums,
    device_inputs,
    host_state,
    initialise,
    place_state,
)
from rooftop.runs.checkpoints import Checkpoints
from rooftop.runs.folder import require_same
from rooftop.runs.records import Records
from rooftop.runs.trace import StepTrace

#: Batches from which a new run estimates its limits.
_OBSERVED = 16


class Trainer:
    """A run, new or resumed. ``done`` counts its trained batches, of ``last``.

    Raises RooftopError where the request is not that of the run in its folder, and Infeasible where the tables exceed
    this machine's memory.
    """

    def __init__(self, request: EmbeddingTrainRequest) -> None:
        self.request, self.folder = request, request.folder
        self._tables, self._data = request.all_tables, Path(request.data)
        available = jax.devices()
        devices = request.devices or len(available)
        if devices > len(available):
            raise RooftopError("devices", devices, f"at most the {len(available)} here")
        self.target = StepTarget.of(available[0], self._tables, request.cores_per_device)
        cores = self.target.cores_per_device
        self.stacking: Stacking = stack_tables(
            self._tables, cores=devices * cores, cores_per_device=cores, batch=request.batch_samples
        )
        require_memory(self.stacking, batch=request.batch_samples, on_host=available[0].platform == "cpu")
        self.mesh = jax.make_mesh((devices,), ("data",), devices=available[:devices])
        last = require_batches(self._data, request.batch_samples)
        self.last = last if request.steps is None else min(last, request.steps)
        self.checkpoints = Checkpoints(self.folder.checkpoints, keep=request.keep, every=request.keep_every)
        saved = restore(self.checkpoints)
        recorded = None if saved is None else saved.job["seed"]
        self.seed: int = next((seed for seed in (request.seed, recorded) if seed is not None), 0)
        self._job = self._identity()
        if saved is not None:
            require_same(self.folder.path, saved.job, self._job)
        #: One line for each damaged checkpoint that was passed over.
        self.refused = () if saved is None else saved.refused
        self._options = compiler_options(self.target, available[0], request.check_names, pipelined=request.pipelined)
        self._compile_for(self._first_limits())
        self.state, self.done = self._begin(saved)
        self.resumed_at = self.done
        self._records = Records(self.folder, step=self.done, tensorboard=request.tensorboard)
        self._trace = StepTrace(self.folder.profile, request.profile)
        #: Ids dropped, and the most passes of a batch, of the batches trained by this process.
        self.dropped, self.passes = 0, 1

    def _identity(self) -> dict[str, Any]:
        """Values that may not change when the run is resumed. Learning rates, devices and later data may."""
        return {
            # The position in the data is counted in batches.
            "batch_samples": self.request.batch_samples,
            "seed": self.seed,
            "data": digest_first(self._data, self.request.batch_samples),
            "tables": {
                table.name: {"shape": f"{table.vocabulary} x {table.width}", "optimizer": table.optimizer.kind}
                for table in self._tables.tables
            },
        }

    def train(
        self,
        on_step: Callable[[int, int], None] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> list[float]:
        """Train to the end of the data, or to ``steps``, and return the losses of the batches trained now.

        ``on_step`` is called before each step with the steps done and the last one. Once ``stopped`` returns True the
        run saves a checkpoint after the step that is under way and reads no more; a pipeline is drained for it.
        """
        request = self.request
        losses, unread = list[float](), list[Any]()

        def grow(batch: CriteoBatch) -> None:
            losses.extend(self._checkpoint(unread))
            # On disk before the limits are: a run that is killed in between has grown neither or both.
            self.checkpoints.wait()
            self._grow(batch)

        with (
            # An error, such as a line that cannot be read, leaves the last checkpoint on disk.
            _finally(self.checkpoints.wait),
            jax.set_mesh(self.mesh),
            closing(self._trace),
            closing(self._records),
            closing(self._ready(self._data, self.done, self.last, grow)) as batches,
        ):
            ending = self.done >= self.last or stopped()
            while not ending:
                if on_step is not None:
                    on_step(self.done, self.last)
                with self._trace.step(self.done + 1, self.state):
                    self.state, loss = self._step(self.state, *self._placed(next(batches)))
                unread.append(loss)
                self.done += 1
                self._trace.end(self.done, self.state)
                if "nan" in request.check_names:
                    check_finite(self.state.embedding, self.stacking, self.done)
                ending = self.done == self.last or stopped()
                if ending or self.done % request.save_every == 0:
                    losses += self._checkpoint(unread)
        return losses

    def close(self) -> None:
        """Wait for the last checkpoint and end its threads. Raises RooftopError if it could not be written."""
        self.checkpoints.close()

    def _ready(
        self, data: Path, first: int, last: int, grow: Callable[[CriteoBatch], None]
    ) -> Generator[Ready[CriteoBatch]]:
        """Prepare batches ``first`` to ``last`` of ``data``; call ``grow`` before one that exceeds the limits."""
        tables, batch = self._tables, self.request.batch_samples
        split = partial(split_lines, path=data, tables=tables, batch=batch)
        grown_for = -1
        while first < last:
            lines = islice(read_lines(data, batch, start=first), last - first)
            prepared = make_ready(lines, split, self._preprocessor, workers=self.request.workers)
            try:
                with closing(prepared) as batches:
                    for ready in batches:
                        yield ready
                        first += 1
            except LimitsExceeded:
                if grown_for == first:
                    raise
            else:
                if first < last:
                    raise RooftopError("data", f"{first} batches in {data}", f"the {last} that it had at first")
                return
            # This batch and all later ones are prepared again, for the new limits.
            grow(next(read_batches(data, tables, batch, start=first)))
            grown_for = first

    def _checkpoint(self, unread: list[Any]) -> list[float]:
        """Drain the pipeline, record the ``unread`` losses and clear them, and save. Return them as numbers.

        Raises RooftopError if there is no room for them.
        """
        unread += self._drain()
        losses = [float(loss) for loss in unread if loss is not None]
        for step, loss in enumerate(losses, start=self.done - len(losses) + 1):
            self._records.append({"step": step, "loss": loss})
        unread.clear()
        if (error := self._records.sync()) is not None:
            raise error
        self._save()
        return losses

    def evaluate(self, data: Path) -> float:
        """Return the AUC on the whole batches of ``data``."""
        last = require_batches(data, self.request.batch_samples)
        labels, scores = [], []
        with jax.set_mesh(self.mesh), closing(self._ready(data, 0, last, self._grow)) as batches:
            for batch in batches:
                inputs, placed = self._placed(batch)
                scores.append(np.asarray(self._step.scores(self.state, inputs, placed.dense)))
                labels.append(batch.rest.label)
        return auc(np.concatenate(labels), np.concatenate(scores))

    def _placed(self, batch: Ready[CriteoBatch]) -> tuple[Any, DlrmBatch[jax.Array]]:
        """Place a batch on the devices: the inputs of lookups, and the rest."""
        preprocessed, rest = batch.made, batch.rest
        self.dropped += preprocessed.statistics.dropped
        self.passes = max(self.passes, preprocessed.minibatches)
        split = jax.NamedSharding(self.mesh, jax.P(self.mesh.axis_names))
        # Only the host knows these figures, so it adds them to a trace.
        with jax.profiler.TraceAnnotation(
            "place", dropped_ids=preprocessed.statistics.dropped, minibatches=preprocessed.minibatches
        ):
            placed = DlrmBatch(dense=jax.device_put(rest.dense, split), label=jax.device_put(rest.label, split))
            return device_inputs(preprocessed.buffers, preprocessed.minibatches, self.mesh), placed

    def _drain(self) -> list[Any]:
        """Finish the steps of a pipeline and return their losses."""
        losses = []
        while self.state.looked_up is not None or self.state.differentiated is not None:
            self.state, loss = self._step(self.state, None, None)
            losses.append(loss)
        return losses

    @property
    def limits_file(self) -> Path:
        """The file of the run's limits on so many SparseCores, in so many passes over samples."""
        passes = self.request.sample_passes
        return self.folder.path / f"limits-{self.stacking.cores}{f'-{passes}-passes' if passes > 1 else ''}.json"

    def _first_limits(self) -> Limits:
        """The requested limits or the run's own; estimated from its first batches if it is new or on other devices."""
        request, path = self.request, Path(self.request.limits or self.limits_file)
        sizes = {"batch": request.batch_samples, "sample_passes": request.sample_passes}
        limits: Limits | None = None
        if request.limits is not None:
            limits = read_limits(path, self.stacking, **sizes)
        elif path.exists():
            # A new learning rate changes how tables are stacked: saved limits may be of stacks that no longer exist.
            with suppress(RooftopError):
                limits = read_limits(path, self.stacking, **sizes)
        batches = 0
        if limits is None:
            first = islice(read_batches(self._data, self._tables, request.batch_samples), _OBSERVED)
            limits = estimate(self._observed(first), self.stacking)
            batches = _OBSERVED
        if path != self.limits_file or batches:
            self.folder.create()
            write_limits(self.limits_file, limits, self.stacking, batches=batches, **sizes)
        return limits

    def _observed(self, batches: Iterable[CriteoBatch]) -> Statistics:
        """Return the largest need of any of the batches."""
        passes, batch = self.request.sample_passes, self.request.batch_samples
        observer = Preprocessor(self.stacking, batch=batch, minibatching=passes > 1, sample_passes=passes)
        return observe(observer, (batch.ids for batch in batches))

    def _grow(self, batch: CriteoBatch) -> None:
        """Raise the limits so that they hold ``batch`` too. No step may be under way."""
        limits, request = grown(self._step.limits, self._observed([batch]), self.stacking), self.request
        write_limits(
            self.limits_file, limits, self.stacking, batch=request.batch_samples, sample_passes=request.sample_passes
        )
        self._compile_for(limits)

    def _compile_for(self, limits: Limits) -> None:
        """Set up preprocessing and steps for these limits. A step is compiled when it first runs."""
        request = self.request
        schedule = request.schedule(self.last)
        self._preprocessor = partial(
            Preprocessor,
            self.stacking,
            batch=request.batch_samples,
            limits=limits,
            minibatching=True,
            sample_passes=request.sample_passes,
            threads=request.host_threads,
        )
        self._step = TrainStep(
            stacking=self.stacking,
            limits=limits,
            batch=request.batch_samples,
            mesh=self.mesh,
            kernel=self.target.kernel,
            pipelined=request.pipelined,
            dense_learning_rate=request.learning_rate,
            share_of=None if schedule is None else schedule.share,
            sample_passes=request.sample_passes,
            options=self._options,
        )

    def _begin(self, saved: Saved | None) -> tuple[ModelState[jax.Array], int]:
        """The state of a checkpoint, or a new one, and the batches that it was trained on."""
        dense = self._step.model.initialise(self.mesh, self.seed)
        kernel = self.target.kernel
        sums = begin_sums(self.stacking, self.mesh, self._step.program.embedding.summed)
        if saved is None:
            embedding = initialise(self.stacking, self.mesh, self.seed, kernel)
            return ModelState(embedding=replace(embedding, sums=sums), dense=dense), 0
        initial = {stack.name: initial_slots(stack.optimizer) for stack in self.stacking.stacks}
        tables, slots = stacked(self.stacking, saved, initial)
        embedding = place_state(self.stacking, self.mesh, tables, slots, saved.updates, kernel)
        paths, structure = jax.tree_util.tree_flatten_with_path(dense)
        leaves = []
        for path, leaf in paths:
            name = jax.tree_util.keystr(path)
            if name not in saved.dense:
                raise RooftopError("checkpoint", f"no {name}", "the same dense part as the run began with")
            leaves.append(jax.device_put(saved.dense[name], leaf.sharding))
        restored = jax.tree_util.tree_unflatten(structure, leaves)
        return ModelState(embedding=replace(embedding, sums=sums), dense=restored), saved.step

    def _save(self) -> None:
        state = self.state
        check_finite(state.embedding, self.stacking, self.done)
        tables, slots = unstacked(self.stacking, *host_state(self.stacking, state.embedding))
        dense = {
            jax.tree_util.keystr(path): np.asarray(leaf)
            for path, leaf in jax.tree_util.tree_flatten_with_path(state.dense)[0]
        }
        check_dense(dense, self.done)
        saved = Saved(
            step=self.done,
            updates=int(state.embedding.step),
            job=self._job,
            tables=tables,
            slots=slots,
            dense=dense,
        )
        save(self.checkpoints, saved)


def check_finite(state: EmbeddingState[jax.Array], stacking: Stacking, batch: int) -> None:
    """Raise Infeasible, naming the table, its first bad row and the batch, if a table holds NaN or infinity."""
    for stack in stacking.stacks:
        if not bool(jnp.isfinite(state.tables[stack.name]).all()):
            whole = unpack(stacking, host_state(stacking, state)[0])
            for place in stack.places:
                bad = np.flatnonzero(~np.isfinite(whole[place.table.name]).all(axis=1))
                if len(bad):
                    what = f"table {place.table.name} after batch {batch}"
                    raise Infeasible(what, f"{len(bad)} rows that are no finite numbers, first row {bad[0]}")


def check_dense(arrays: Mapping[str, NDArray[Any]], batch: int) -> None:
    """Raise Infeasible, naming the array and the batch, if the dense part holds NaN or infinity."""
    for name, array in arrays.items():
        count = int(array.size - np.isfinite(array).sum())
        if count:
            raise Infeasible(f"dense part after batch {batch}", f"{count} values of {name} that are no finite numbers")


def require_memory(stacking: Stacking, *, batch: int, on_host: bool) -> None:
    """Raise Infeasible if tables and slots exceed this machine's memory; the system would end the process.

    Tables initialised on the host are there twice, by themselves and stacked. ``on_host``: the devices' memory is the
    host's.
    """
    from_host = stacking.tables.config.initialized_on_host
    if not (from_host or on_host):
        return
    copies = 2 if from_host else 1
    needed = sum(copies * stack.table_bytes + stack.slot_bytes for stack in report(stacking, batch=batch))
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > room:
        what = f"tables and slots take at least {format_bytes(needed)} of this machine's memory"
        raise Infeasible(what, f"it has {format_bytes(room)}")


@contextmanager
def _finally(call: Callable[[], None]) -> Iterator[None]:
    try:
        yield
    finally:
        call()
