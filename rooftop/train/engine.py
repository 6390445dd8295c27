"""The loop of a training run: one compiled step after another, what it tells, saves and evaluates, and how it ends."""

from __future__ import annotations

import math
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from rooftop.checkpoints.huggingface import load_weights
from rooftop.core.errors import Infeasible
from rooftop.core.quantities import format_bytes
from rooftop.profile.microbench.timing import usable_bytes
from rooftop.programs.parameters import Batch
from rooftop.programs.training.program import TrainProgram
from rooftop.programs.training.step import TrainState, abstract_batch, abstract_state, init_state, train_step
from rooftop.runs.checkpoints import Checkpoints
from rooftop.runs.folder import RunFolder
from rooftop.runs.signals import Agreement, Signals
from rooftop.train.data.dataset import Dataset
from rooftop.train.data.loading import place, prefetch
from rooftop.train.diagnosis import find_origin
from rooftop.train.evaluate import Evaluation, Forward
from rooftop.train.metrics import StepRecord, TrainRates
from rooftop.train.recording import Failed, Loop, Watch


@dataclass(frozen=True, kw_only=True)
class TrainJob:
    """What is trained, and where: ``init`` is a published checkpoint to begin from, None for fresh weights."""

    program: TrainProgram
    mesh: Mesh
    seed: int
    init: Path | None = None

    def initial(self) -> TrainState[jax.Array]:
        """The state before the first step. Raises RooftopError for an ``init`` that is not of this model."""
        state = init_state(self.program, jax.random.key(self.seed), self.mesh)
        if self.init is None:
            return state
        # The moments begin at zero whatever the weights are; the fresh weights make room for those that are read.
        moments, first = state.optimizer, state.step
        del state
        with jax.set_mesh(self.mesh):
            wanted = abstract_state(self.program, self.mesh).weights
            weights = load_weights(self.init, self.program.model, wanted)
        return TrainState(step=first, weights=weights, optimizer=moments)

    @cached_property
    def step(self) -> jax.stages.Compiled:
        """The compiled step: (state, batch) -> (state, metrics), the state given away."""
        with jax.set_mesh(self.mesh):
            step = jax.jit(train_step(self.program, self.program.specs(self.mesh)), donate_argnums=0)
            return step.lower(
                abstract_state(self.program, self.mesh), abstract_batch(self.program, self.mesh)
            ).compile()

    def without_stages(self) -> TrainJob:
        """The same step in one piece: stages become copies, and microbatches one batch, where the batch divides.

        Inside a pipeline, values have no scopes of their own to be told by.
        """
        forward = Forward(self.program, self.mesh)
        if self.mesh.shape.get("stage", 1) == 1 or self.program.batch % forward.rows:
            return self
        plain = replace(self.program, microbatches=1, schedule="1f1b", chunks=1)
        return replace(self, program=plain, mesh=forward.own_mesh)

    def batch(self, data: Dataset, index: int) -> Batch[jax.Array]:
        """The global batch of a step, counted from 0."""
        order = self.program.computation.context_order
        return place(data.train, index, self.mesh, self.program.specs(self.mesh), order)


@dataclass(frozen=True, kw_only=True)
class Course:
    """How far to go and what to do on the way; steps count from 1.

    ``save_every`` and ``eval_every``: None: at the end only. ``eval_batches``: batches in an evaluation at most.
    ``profile``: first and last step of a trace. ``divergence``: nats by which the loss may rise (see
    ``rooftop.train.metrics.Divergence``). ``tensorboard``: write events too.
    """

    steps: int
    save_every: int | None = None
    eval_every: int | None = None
    eval_batches: int = 16
    profile: tuple[int, int] | None = None
    divergence: float = 2.0
    tensorboard: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended: behind ``step``, ``stopped`` by a signal or done, with the last ``record`` of this process."""

    step: int
    stopped: bool
    state: TrainState[jax.Array]
    record: StepRecord | None
    evaluation: Evaluation | None


@dataclass(frozen=True, kw_only=True)
class TrainEngine:
    """A job, its data and the folder of its run. All processes of a run do the same with it."""

    job: TrainJob
    data: Dataset
    folder: RunFolder
    checkpoints: Checkpoints
    rates: TrainRates
    course: Course
    watch: Watch

    def begin(self) -> tuple[int, TrainState[jax.Array]]:
        """The step and state to go on from: the newest checkpoint that is whole, or the beginning.

        Raises RooftopError if checkpoints are there and none is whole, or of another model.
        """
        if not self.checkpoints.steps():
            return 0, self.job.initial()
        found = self.checkpoints.restore(abstract_state(self.job.program, self.job.mesh))
        for problem in found.refused:
            self.watch.say(f"checkpoint left out: {problem}")
        return found.step, found.state

    def train(self, signals: Signals) -> Outcome:
        """Go on to the last step, or to a signal; either way the state is saved.

        Raises Infeasible where the loss or a gradient is no number, or the loss has diverged, and RooftopError where
        something cannot be written.
        """
        try:
            return self._train(signals)
        except Failed as error:
            failed, why = error.record, error.why
        # Out here the frames that held the state are gone: there is room for it once more.
        self.checkpoints.wait()
        saved = self.checkpoints.steps()
        kept = f"the newest checkpoint is of step {saved[-1]}" if saved else "no checkpoint was written"
        raise Infeasible(f"training stopped at step {failed.step}", f"{why}; {self._origin(failed)}; {kept}")

    def _train(self, signals: Signals) -> Outcome:
        start, state = self.begin()
        self.watch.say("compiling the step")
        step = self.job.step
        course = self.course
        if course.profile is not None and jax.process_index() == 0 and (module := step.as_text()):
            # The traces of CPUs have no module of a program that comes out of the compilation cache.
            self.folder.write_module(module)
        loop = Loop(
            self.folder, self.job.program.optimizer, self.rates, self.watch, start=start, divergence=course.divergence,
            profile=course.profile, tensorboard=course.tensorboard,
        )  # fmt: skip
        agreement = Agreement()
        indices = range(start, self.course.steps)
        evaluated: Evaluation | None = None
        done = start
        stopping = signals.caught is not None
        signals.deferred = True
        with jax.set_mesh(self.job.mesh), closing(loop):
            batches = prefetch(lambda index: self.job.batch(self.data, index), indices)
            with closing(batches):
                for fetched in batches:
                    loop.profile(fetched.step + 1)
                    posted = agreement.post(signals.caught is not None)
                    with jax.profiler.StepTraceAnnotation("train", step_num=fetched.step + 1):
                        state, metrics = step(state, fetched.batch)
                    stopping = loop.posted(fetched, metrics, posted, agreement)
                    done = fetched.step + 1
                    last = stopping or done == self.course.steps
                    if last or self._due(done, self.course.eval_every) or self._due(done, self.course.save_every):
                        stopping = loop.drain(agreement) or stopping
                        if (
                            self.data.held is not None
                            and not stopping
                            and self._due(done, self.course.eval_every, last)
                        ):
                            evaluated = self._evaluate(loop, done, state)
                        if last or stopping or self._due(done, self.course.save_every):
                            self._save(done, state)
                        loop.resume_clock()
                    if stopping:
                        break
            if done == start and not self.checkpoints.steps():
                self._save(done, state)
            self.checkpoints.wait()
        return Outcome(step=done, stopped=stopping, state=state, record=loop.record, evaluation=evaluated)

    @staticmethod
    def _due(step: int, every: int | None, last: bool = False) -> bool:
        return last or (every is not None and step % every == 0)

    def _evaluate(self, loop: Loop, step: int, state: TrainState[jax.Array]) -> Evaluation:
        assert self.data.held is not None
        found = Forward(self.job.program, self.job.mesh).evaluate(
            state.weights, self.data.held, most=self.course.eval_batches
        )
        loop.append(
            {"step": step, "eval_loss": found.loss, "eval_perplexity": found.perplexity, "eval_tokens": found.tokens}
        )
        self.watch.on_evaluation(step, found)
        return found

    def _save(self, step: int, state: TrainState[jax.Array]) -> None:
        self.checkpoints.save(step, state, {"data": self.data.digest, "seed": self.job.seed})

    def _origin(self, failed: StepRecord) -> str:
        """Where the first value that is no number was made: the run again from its last checkpoint to that step."""
        if failed.finite:
            return "every number is finite"
        start, state = self.begin()
        self.watch.say(f"looking for the cause: steps {start + 1} to {failed.step} again, the last one value by value")
        with jax.set_mesh(self.job.mesh):
            for index in range(start, failed.step - 1):
                state, _ = self.job.step(state, self.job.batch(self.data, index))
        job = self.job.without_stages()
        if job is not self.job:
            places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(job.program, job.mesh))
            state = jax.device_put(state, places)
        step = train_step(job.program, job.program.specs(job.mesh))
        with jax.set_mesh(job.mesh):
            found = find_origin(step, state, job.batch(self.data, failed.step - 1))
        return str(found or "value by value it does not come again, so that an operation fused with others makes it")


def require_room(program: TrainProgram, mesh: Mesh) -> None:
    """Raise Infeasible if the state alone does not fit the devices; on a CPU they share the machine's memory."""

    def on_device(leaf: jax.ShapeDtypeStruct) -> int:
        assert leaf.sharding is not None
        return int(math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize)

    needed = sum(on_device(leaf) for leaf in jax.tree.leaves(abstract_state(program, mesh)))
    room = usable_bytes([device for device in mesh.devices.flat if device.process_index == jax.process_index()])
    if needed > room:
        raise Infeasible(
            f"{program.model.name} does not fit the devices here",
            f"weights and optimizer take {format_bytes(needed)} on each of the {mesh.size} devices, and one has "
            f"{format_bytes(room)}",
        )
