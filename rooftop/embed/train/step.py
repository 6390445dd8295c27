"""Programs of a training run: a step of a DLRM, and the scores of a batch, for the local devices.

On TPUs with SparseCores lookups and updates are XLA's SparseCore operations, elsewhere the reference program; this
decides the inputs and the layout of tables. ``lower_step`` lowers the same step for TPUs that are not here.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
from jax import P
from jaxtyping import Array, Float32

from rooftop.compiler.sparsecore import PIPELINING_OPTIONS, check_options, refusal, require_checks, smallest_slice
from rooftop.core.errors import RooftopError, unknown
from rooftop.embed.criteo import COUNTS, check_features
from rooftop.hardware import chip_of_kind
from rooftop.models.embedding_tables.files import tables_from_json
from rooftop.models.embedding_tables.limits import Limits, StackLimits
from rooftop.models.embedding_tables.stacking import Stacking, stack_tables
from rooftop.models.embedding_tables.tables import Tables
from rooftop.programs.embedding.buffers import LookupInputs
from rooftop.programs.embedding.dlrm import Dlrm, DlrmBatch, DlrmConfig
from rooftop.programs.embedding.lookup import EmbeddingProgram, lookup
from rooftop.programs.embedding.lowering import abstract_activations, abstract_dlrm, abstract_embedding, abstract_inputs
from rooftop.programs.embedding.pipeline import (
    Differentiated,
    LookedUp,
    ModelState,
    ShareOf,
    StepProgram,
    compiled_step,
)
from rooftop.programs.embedding.state import begin_on_devices

#: SparseCores that a device without any emulates.
EMULATED_CORES = 2
#: Batches under way before a step, by the effect of the step on a pipeline.
STAGES: Mapping[str, tuple[str, ...]] = {
    "sequential": (),
    "filling": (),
    "filled": ("looked_up",),
    "pipelined": ("looked_up", "differentiated"),
    "draining": ("looked_up", "differentiated"),
    "drained": ("differentiated",),
}


@dataclass(frozen=True, kw_only=True)
class StepTarget:
    """The devices of a run: the kernel of lookups and updates (``embedding.KERNELS``), and SparseCores of a device."""

    kernel: str
    cores_per_device: int

    @classmethod
    def of(cls, device: Any, tables: Tables, cores_per_device: int | None = None) -> StepTarget:
        """Return the target of devices like ``device``; those without SparseCores emulate ``cores_per_device``.

        SparseCores run no update rule that needs whole rows: with such an optimizer the reference program runs on TPUs
        too. Raises RooftopError for another number of SparseCores than the device has.
        """
        chip = chip_of_kind(device.device_kind) if device.platform == "tpu" else None
        if chip is None or not chip.sparse_programs:
            return cls(kernel="reference", cores_per_device=cores_per_device or EMULATED_CORES)
        cores = chip.sparse_cores // chip.devices
        if cores_per_device not in (None, cores):
            raise RooftopError("cores_per_device", cores_per_device, f"{cores}, what a device of {chip.name} has")
        elementwise = all(table.optimizer.elementwise for table in tables.tables)
        return cls(kernel="sparsecore" if elementwise else "reference", cores_per_device=cores)


def compiler_options(target: StepTarget, device: Any, checks: tuple[str, ...], *, pipelined: bool) -> dict[str, Any]:
    """Return compiler options: those of ``checks``, tried in another process first, and of overlap in a pipeline.

    Raises RooftopError for checks of SparseCores on other devices, and for checks that the compiler refuses.
    """
    if target.kernel != "sparsecore":
        for name in checks:
            if name != "nan":
                accepted = f"nan: the others are built in for SparseCores, not for {device.platform}"
                raise RooftopError("check", name, accepted)
        return {}
    chip = chip_of_kind(device.device_kind)
    if chip is not None:
        require_checks(checks, smallest_slice(chip))
    return {**(PIPELINING_OPTIONS if pipelined else {}), **check_options(checks)}


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    """Steps of a DLRM on ``mesh``, and its scores; ``batch`` is B, looked up in ``sample_passes`` over samples.

    ``share_of`` scales all learning rates at a step (None: constant rates). ``options`` are the compiler's.
    """

    stacking: Stacking
    limits: Limits
    batch: int
    mesh: jax.sharding.Mesh
    kernel: str
    pipelined: bool
    dense_learning_rate: float
    share_of: ShareOf | None = None
    sample_passes: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> Dlrm:
        """The dense part."""
        tables = self.stacking.tables
        return Dlrm(
            config=DlrmConfig(
                dense_features=COUNTS,
                features=check_features(tables),
                width=tables.tables[0].width,
                learning_rate=self.dense_learning_rate,
            ),
            share_of=self.share_of,
        )

    @cached_property
    def program(self) -> StepProgram:
        """The program of a step."""
        embedding = EmbeddingProgram(
            stacking=self.stacking,
            batch=self.batch,
            limits=self.limits,
            minibatching=True,
            sample_passes=self.sample_passes,
            kernel=self.kernel,
        )
        return StepProgram(embedding=embedding, dense=self.model, share_of=self.share_of)

    def compiled(self, state: ModelState[Any], inputs: LookupInputs | None, batch: Any) -> jax.stages.Wrapped:
        """Return the step for arguments like these, arrays or shapes."""
        return compiled_step(self.program, state, inputs, batch, pipelined=self.pipelined, options=self.options)

    def __call__(
        self, state: ModelState[jax.Array], inputs: LookupInputs | None, batch: DlrmBatch[jax.Array] | None
    ) -> tuple[ModelState[jax.Array], Any]:
        """Run a step, which donates ``state``. Raises Infeasible if the compiler finds no room for it."""
        result = self._stepped(state, inputs, batch)
        if self.mesh.size > 1 and self.mesh.devices.flat[0].platform == "cpu":
            # Emulated devices share threads: those that wait in a second step for another device may leave no thread
            # for it (JAX 0.10.2, 16 devices on 2 cores).
            jax.block_until_ready(result)
        return result

    def _stepped(
        self, state: ModelState[jax.Array], inputs: LookupInputs | None, batch: DlrmBatch[jax.Array] | None
    ) -> tuple[ModelState[jax.Array], Any]:
        under_way = (inputs is None, state.looked_up is None, state.differentiated is None)
        result: tuple[ModelState[jax.Array], Any]
        if under_way in self._compiled:
            result = self._compiled[under_way](self.program, state, inputs, batch)
            return result
        step = self._compiled[under_way] = self.compiled(state, inputs, batch)
        try:
            with warnings.catch_warnings():
                # A pipeline that fills or drains returns fewer arrays than it takes.
                warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
                result = step(self.program, state, inputs, batch)
        except jax.errors.JaxRuntimeError as error:
            raise refusal(str(error)) or error from None
        return result

    def scores(
        self, state: ModelState[jax.Array], inputs: LookupInputs, dense: Float32[Array, "B features"]
    ) -> Float32[Array, " B"]:
        """Return the logits of a batch."""
        return self._scored(state.embedding.tables, state.dense.weights, inputs, dense)

    @cached_property
    def _compiled(self) -> dict[tuple[bool, ...], jax.stages.Wrapped]:
        return {}

    @cached_property
    def _scored(self) -> Callable[..., jax.Array]:
        return jax.jit(self._score)

    def _score(
        self, tables: Any, weights: Any, inputs: LookupInputs, dense: Float32[Array, "B features"]
    ) -> Float32[Array, " B"]:
        activations = lookup(self.program.embedding, tables, inputs)
        split = P(self.mesh.axis_names)
        scored: jax.Array = jax.shard_map(
            self.model.logits, in_specs=(P(), split, split), out_specs=split, check_vma=False
        )(weights, activations, dense)
        return scored


def lower_step(mesh: jax.sharding.Mesh, arguments: Mapping[str, Any]) -> Any:
    """Lower a program of a run on the devices of ``mesh``, for ``rooftop.compiler.compiling``.

    ``arguments``: tables (as ``Tables.to_json``), batch, limits by stack, ``sample_passes`` (default 1) and ``stage``:
    one of STAGES, "scores" or "begin" (tables and slots initialised on the devices). Raises RooftopError for another.
    """
    stage = arguments["stage"]
    if stage not in (*STAGES, "scores", "begin"):
        raise unknown("stage", stage, (*STAGES, "scores", "begin"))
    tables, device = tables_from_json(arguments["tables"]), mesh.devices.flat[0]
    target = StepTarget.of(device, tables)
    stacking = stack_tables(
        tables,
        cores=target.cores_per_device * mesh.size,
        cores_per_device=target.cores_per_device,
        batch=arguments["batch"],
    )
    step = TrainStep(
        stacking=stacking,
        limits={name: StackLimits(**limit) for name, limit in arguments["limits"].items()},
        batch=arguments["batch"],
        mesh=mesh,
        kernel=target.kernel,
        pipelined=stage not in ("sequential", "scores", "begin"),
        dense_learning_rate=1e-3,
        sample_passes=arguments.get("sample_passes", 1),
    )
    if stage == "begin":
        with jax.set_mesh(mesh):
            return begin_on_devices(stacking, mesh, 0, target.kernel).lower()
    inputs, dense = abstract_inputs(step.program.embedding, mesh), abstract_dlrm(step.model, step.batch, mesh)
    state: ModelState[Any] = ModelState(embedding=abstract_embedding(step.program.embedding, mesh), dense=dense.state)
    with jax.set_mesh(mesh):
        if stage == "scores":
            return jax.jit(step._score).lower(state.embedding.tables, state.dense.weights, inputs, dense.batch.dense)
        activations = abstract_activations(step.program.embedding, mesh)
        if "looked_up" in STAGES[stage]:
            looked_up = LookedUp(inputs=inputs, activations=activations, batch=dense.batch)
            state = dataclasses.replace(state, looked_up=looked_up)
        if "differentiated" in STAGES[stage]:
            differentiated = Differentiated(inputs=inputs, gradients=activations)
            state = dataclasses.replace(state, differentiated=differentiated)
        fed: Any = (None, None) if stage.startswith("drain") else (inputs, dense.batch)
        return step.compiled(state, *fed).lower(step.program, state, *fed)
