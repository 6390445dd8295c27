"""The loop of a training run: one compiled step after another, with records, checkpoints and evaluations."""

from __future__ import annotations

import math
import shlex
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from rooftop.arrays.rules import STAGE_AXES, ways
from rooftop.checkpoints.huggingface import load_weights
from rooftop.compiler.collectives.waits import axes_over_processes, waiting_line
from rooftop.compiler.options import compile_without_refused, train_options
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import format_bytes
from rooftop.hardware import chip_of_kind
from rooftop.profile.microbench.timing import usable_bytes
from rooftop.programs.parameters import (
    Batch,
    Parameter,
    Transformer,
    moved,
    padding_in_parts,
    padding_last,
)
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import (
    TrainState,
    abstract_batch,
    abstract_state,
    described_state,
    init_state,
    repadded,
    train_step,
    unpadded,
)
from rooftop.runs.beats import DATA, STEP, Beats
from rooftop.runs.checkpoints import Checkpoints
from rooftop.runs.folder import RunFolder
from rooftop.runs.records import Records
from rooftop.runs.signals import Agreement, Signals
from rooftop.runs.trace import StepTrace
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE
from rooftop.train.data.dataset import Dataset
from rooftop.train.data.loading import place, prefetch
from rooftop.train.diagnosis import find_origin
from rooftop.train.evaluate import Evaluation, Forward
from rooftop.train.metrics import StepRecord, TrainRates
from rooftop.train.recording import Failed, StepReader, Watch
from rooftop.train.request import TrainRequest


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """A program, its mesh, and its first weights: of the checkpoint ``init``, or fresh ones of ``seed``."""

    program: TrainProgram
    mesh: Mesh
    seed: int
    init: Path | None = None

    def initial(self) -> TrainState[jax.Array]:
        """Return the state before the first step. Raises RooftopError if ``init`` is of another model."""
        state = init_state(self.program, jax.random.key(self.seed), self.mesh)
        if self.init is None:
            return state
        # Moments are zero for any weights. Fresh weights are freed for those of the checkpoint.
        moments, first = state.optimizer, state.step
        del state
        with jax.set_mesh(self.mesh):
            abstract = abstract_state(self.program, self.mesh).weights
            weights = load_weights(self.init, self.program.model, abstract, described=self.described)
        return TrainState(step=first, weights=weights, optimizer=moments)

    @property
    def described(self) -> Transformer[Parameter]:
        """The weights as the mesh stores them."""
        return self.program.described(self.mesh)

    @cached_property
    def step(self) -> jax.stages.Compiled:
        """The compiled step: (state, batch) -> (state, metrics). It donates the state."""
        with jax.set_mesh(self.mesh):
            step = jax.jit(train_step(self.program, self.program.specs(self.mesh)), donate_argnums=0)
            lowered = step.lower(abstract_state(self.program, self.mesh), abstract_batch(self.program, self.mesh))
            options = self.compiler_options
            return compile_without_refused(lowered.compile, options, options)[0]

    def waits(self) -> str:
        """The collectives in which the step can wait for other processes, in a line."""
        return waiting_line(self.step.as_text() or "", dict(self.mesh.shape), axes_over_processes(self.mesh))

    @property
    def compiler_options(self) -> dict[str, bool | int | str]:
        """The compiler's options for the step on these devices, which plans assume; none but on TPUs."""
        devices = self.mesh.devices.flat
        chip = chip_of_kind(devices[0].device_kind) if devices[0].platform == "tpu" else None
        slices = len({getattr(device, "slice_index", 0) for device in devices})
        return {} if chip is None else train_options(self.mesh.shape, chip.name, slices=slices)

    def without_stages(self) -> TrainJob:
        """Return the job without pipeline stages and microbatches: stages become copies.

        Values inside a pipeline have no scopes of their own.
        """
        if ways(self.mesh.shape, *STAGE_AXES) == 1:
            return self
        plain = replace(self.program, microbatches=1, schedule=DEFAULT_SCHEDULE, chunks=1)
        return replace(self, program=plain, mesh=Forward(self.program, self.mesh).own_mesh)

    def batch(self, data: Dataset, index: int) -> Batch[jax.Array]:
        """Return the global batch of a step, counted from 0."""
        program, mesh = self.program, self.mesh
        order = program.computation.context_order
        return place(data.train, index, mesh, program.specs(mesh), order, padded=program.padded(mesh))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a run after ``step``: ``stopped`` by a signal or done, with the last ``record`` of this process."""

    step: int
    stopped: bool
    state: TrainState[jax.Array]
    record: StepRecord | None
    evaluation: Evaluation | None


@dataclass(frozen=True, kw_only=True)
class TrainEngine:
    """A job, its data and the folder of its run. All processes of a run make the same calls."""

    job: TrainJob
    data: Dataset
    folder: RunFolder
    checkpoints: Checkpoints
    rates: TrainRates
    request: TrainRequest
    watch: Watch
    beats: Beats

    def begin(self) -> tuple[int, TrainState[jax.Array]]:
        """Return the step and state to resume from: the newest undamaged checkpoint, or the initial state.

        Raises RooftopError if all checkpoints are damaged or of another model.
        """
        if not self.checkpoints.steps():
            return 0, self.job.initial()
        abstract = abstract_state(self.job.program, self.job.mesh)
        described = described_state(self.job.program, self.job.mesh)
        restored = self.checkpoints.restore(abstract, unpadded=unpadded(abstract, described))
        for damage in restored.refused:
            self.watch.on_message(f"checkpoint left out: {damage}")
        with jax.set_mesh(self.job.mesh):
            return restored.step, repadded(restored.state, described, padding_in_parts)

    def train(self, signals: Signals) -> Outcome:
        """Train to the last step or to a signal, and save the state.

        Raises Infeasible if the loss or a gradient is not finite or the loss has diverged, and RooftopError if a file
        cannot be written.
        """
        try:
            return self._train(signals)
        except Failed as error:
            failed, why = error.record, error.why
        # The frames that held the state are gone here, so there is room for it once more.
        self.checkpoints.wait()
        saved = self.checkpoints.steps()
        newest = f"the newest checkpoint is of step {saved[-1]}" if saved else "no checkpoint was written"
        raise Infeasible(f"training stopped at step {failed.step}", f"{why}; {self._origin(failed)}; {newest}")

    def _train(self, signals: Signals) -> Outcome:
        self.beats.enter("restoring the state", 0)
        start, state = self.begin()
        self.watch.on_message("compiling the step")
        self.beats.enter("compiling the step", start)
        step = self.job.step
        self.beats.describe = self.job.waits
        request = self.request
        if request.profile is not None and jax.process_index() == 0 and (module := step.as_text()):
            # Traces of CPUs lack the module of a program that comes out of the compilation cache.
            self.folder.write_module(module)
        also = None if request.save_also is None else RunFolder(path=Path(request.save_also).absolute())
        records = Records(self.folder, step=start, tensorboard=request.tensorboard, also=also)
        trace = StepTrace(self.folder.profile, request.profile)
        divergence = request.divergence or math.inf
        reader = StepReader(records, self.job.program.optimizer, self.rates, self.watch, divergence=divergence)
        agreement = Agreement()
        indices = range(start, request.steps)
        evaluation: Evaluation | None = None
        done = start
        stopping = signals.caught is not None
        signals.deferred = True
        batches = prefetch(lambda index: self.job.batch(self.data, index), indices)
        with jax.set_mesh(self.job.mesh), closing(records), closing(trace), closing(batches):
            if self._is_evaluated(start) and agreement.any(not records.evaluated and not stopping):
                # An earlier start saved this state, and ended before it was evaluated.
                evaluation = self._evaluate(records, start, state)
                reader.restart_clock()
            self.beats.enter(DATA, start + 1)
            for fetched in batches:
                self.beats.enter(STEP, fetched.step + 1)
                vote = agreement.post(signals.caught is not None, reader.host_s())
                with trace.step(fetched.step + 1, reader.running):
                    state, metrics = step(state, fetched.batch)
                stopping = reader.posted(fetched, metrics, vote, agreement)
                done = fetched.step + 1
                trace.end(done, metrics)
                last = stopping or done == request.steps
                if last or _is_due(done, request.eval_every) or _is_due(done, request.save_every):
                    stopping = reader.drain(agreement) or stopping
                    if last or stopping or _is_due(done, request.save_every):
                        self._save(records, done, state, last=last or stopping)
                    # After the state is saved: whatever ends an evaluation ends no more than that.
                    if self._is_evaluated(done) and not stopping:
                        evaluation = self._evaluate(records, done, state)
                    reader.restart_clock()
                if stopping:
                    break
                self.beats.enter(DATA, done + 1)
            if done == start and not self.checkpoints.steps():
                self._save(records, done, state, last=True)
            self.checkpoints.wait()
        return Outcome(step=done, stopped=stopping, state=state, record=reader.record, evaluation=evaluation)

    def _is_evaluated(self, step: int) -> bool:
        """True if the weights after ``step`` are to be evaluated."""
        is_due = step == self.request.steps or _is_due(step, self.request.eval_every)
        return self.data.held is not None and step > 0 and is_due

    def _evaluate(self, records: Records, step: int, state: TrainState[jax.Array]) -> Evaluation:
        assert self.data.held is not None
        self.beats.enter("evaluating", step)
        forward = Forward(self.job.program, self.job.mesh)
        evaluation = forward.evaluate(state.weights, self.data.held, most=self.request.eval_batches)
        records.append({"step": step, **{f"eval_{name}": value for name, value in evaluation.to_json().items()}})
        self.watch.on_evaluation(step, evaluation)
        return evaluation

    def _save(self, records: Records, step: int, state: TrainState[jax.Array], *, last: bool) -> None:
        """Save the state, after the records up to it. The ``last`` save is on the disk on return."""
        self.beats.enter("saving", step)
        unwritten = records.sync()
        described = described_state(self.job.program, self.job.mesh)
        try:
            self.checkpoints.save(
                step,
                repadded(state, described, padding_last),
                {"data": self.data.digest, "seed": self.job.seed},
                unpadded=unpadded(state, described),
                last=last,
            )
        except RooftopError as error:
            also = "" if self.checkpoints.also else ", or --save-also DIR, a second one"
            resume = f"to go on: rooftop train --resume {shlex.quote(str(self.folder.path))}"
            raise RooftopError(error.field, error.given, f"{error.accepted}{also}; {resume}") from error
        if last and unwritten is not None:
            raise unwritten

    def _origin(self, failed: StepRecord) -> str:
        """Find the operation that made the first NaN: repeat the run from its last checkpoint to that step."""
        if failed.finite:
            return "every number is finite"
        start, state = self.begin()
        self.watch.on_message(f"looking for the cause: steps {start + 1} to {failed.step} again, the last one op by op")
        with jax.set_mesh(self.job.mesh):
            for index in range(start, failed.step - 1):
                state, _ = self.job.step(state, self.job.batch(self.data, index))
        job = self.job.without_stages()
        if job is not self.job:
            state = moved(state, abstract_state(job.program, job.mesh))
        step = train_step(job.program, job.program.specs(job.mesh))
        with jax.set_mesh(job.mesh):
            origin = find_origin(step, state, job.batch(self.data, failed.step - 1))
        return str(origin or "not reproducible op by op: a fused operation produces it")


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def require_room(program: TrainProgram, mesh: Mesh) -> None:
    """Raise Infeasible if the state alone does not fit the devices. CPU devices share the machine's memory."""

    def on_device(leaf: jax.ShapeDtypeStruct) -> int:
        assert leaf.sharding is not None
        return int(math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize)

    needed = sum(on_device(leaf) for leaf in jax.tree.leaves(abstract_state(program, mesh)))
    room = usable_bytes([device for device in mesh.devices.flat if device.process_index == jax.process_index()])
    if needed > room:
        raise Infeasible(
            f"{program.model.name} does not fit the local devices",
            f"weights and optimizer take {format_bytes(needed)} on each of the {mesh.size} devices, and one has "
            f"{format_bytes(room)}",
        )
