"""Everything that decides a train step except its mesh: from a plan, and as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh

from rooftop.arrays.mesh import Mesh as LaidMesh
from rooftop.arrays.rings import DeviceRing
from rooftop.arrays.rules import COLUMN_AXES, STAGE_AXES, ways
from rooftop.capabilities import STATE_DTYPES, TRAINING, TrainingSpec, require
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import Record, read_record
from rooftop.core.rounding import next_multiple
from rooftop.models import ModelConfig
from rooftop.models.activations import LOSS_CHUNK
from rooftop.models.optimizers import OPTIMIZERS
from rooftop.models.program_sizes import padded_positions
from rooftop.plan.training.plan import TrainingPlan
from rooftop.programs.attention.context import chunks_of
from rooftop.programs.model.layer import Computation
from rooftop.programs.parameters import Parameter, Transformer, describe
from rooftop.programs.sharding import Specs
from rooftop.programs.training.adafactor import adafactor
from rooftop.programs.training.muon import Muon
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE, require_schedule

#: JAX's dtypes of arrays that live from step to step.
DTYPES = dict(zip(STATE_DTYPES, (jnp.bfloat16, jnp.float32), strict=True))


@dataclass(frozen=True, kw_only=True)
class Optimizer(Record):
    """Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019), Lion, Muon, Adafactor or plain SGD, by ``name``.

    Sources: Lion, Chen et al. 2023; Adafactor, Shazeer and Stern 2018, whose ``learning_rate`` is relative to the root
    mean square of a weight's matrix. Muon (``rooftop.programs.training.muon``) updates the matrices of layers, by steps
    in the dtype ``matmul``, and AdamW all others. ``weight_decay`` is decoupled, for adamw, lion and muon only; scales,
    biases and sinks do not decay. ``clip_norm`` limits the norm of all gradients together. ``moments`` is the dtype of
    the state.
    """

    closed = True

    name: str = "adamw"
    learning_rate: float = 3e-4
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float | None = None
    moments: str = "f32"
    matmul: str = "bf16"

    def __post_init__(self) -> None:
        if self.name not in OPTIMIZERS:
            raise unknown("optimizer", self.name, OPTIMIZERS)
        if self.moments not in DTYPES:
            raise unknown("dtype of moments", self.moments, DTYPES)
        if self.matmul not in DTYPES:
            raise unknown("dtype of an optimizer's matmuls", self.matmul, DTYPES)
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise RooftopError("clip_norm", self.clip_norm, "a positive number, or none")

    def clip(self, gradients: Transformer[jax.Array]) -> Transformer[jax.Array]:
        """Gradients scaled down to ``clip_norm`` if their norm is larger."""
        if self.clip_norm is None:
            return gradients
        clipped, _ = optax.clip_by_global_norm(self.clip_norm).update(gradients, optax.EmptyState())
        return clipped

    def transformation(self, described: Transformer[Parameter]) -> optax.GradientTransformation:
        """The optax transformation from float32 gradients to updates of the weights, which are ``described``."""
        if self.name == "adafactor":
            return _stored(adafactor(described, self.learning_rate), DTYPES[self.moments])
        if self.name == "muon":
            muon = Muon(
                learning_rate=self.learning_rate, b1=self.b1, b2=self.b2, eps=self.eps,
                weight_decay=self.weight_decay, dtype=DTYPES[self.matmul],
            )  # fmt: skip
            return _stored(muon.transformation(described), DTYPES[self.moments])
        decays = jax.tree.map(lambda parameter: parameter.fan_in is not None, described)
        decay = optax.add_decayed_weights(self.weight_decay, decays)
        adam = optax.scale_by_adam(self.b1, self.b2, self.eps)
        parts = {
            "adamw": (adam, decay),
            "adam": (adam,),
            "lion": (optax.scale_by_lion(self.b1, self.b2), decay),
            "sgd": (),
        }[self.name]
        return _stored(optax.chain(*parts, optax.scale_by_learning_rate(self.learning_rate)), DTYPES[self.moments])


def _stored(inner: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """``inner`` in float32, its state stored in ``dtype``."""

    def init(weights: Any) -> Any:
        return _cast(inner.init(_cast(weights, jnp.float32)), dtype)

    def update(gradients: Any, state: Any, weights: Any) -> tuple[Any, Any]:
        changes, state = inner.update(gradients, _cast(state, jnp.float32), _cast(weights, jnp.float32))
        return changes, _cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _cast(tree: Any, dtype: Any) -> Any:
    """The tree with its floating arrays in ``dtype``; counters stay as they are."""
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


@dataclass(frozen=True, kw_only=True)
class TrainProgram(Record):
    """A train step, its mesh excepted. ``batch`` is B, in sequences of ``seq_len`` T, before padding (``padded``).

    ``computation`` describes the forward pass. Its specs come from all rules; a step takes the ``specs`` of its mesh.
    Each of the ``microbatches`` has an equal part of the batch, and of each device's sequences; their gradients are
    summed in float32. The balance loss is the mean over microbatches, and so depends on which sequences each has.
    ``loss_chunks`` splits T for the logits. Dtypes: ``compute_dtype`` of matmuls, ``weights_dtype`` of stored weights,
    ``gradient_dtype`` of sums of gradients over devices that hold copies (None: ``compute_dtype``). Batches are
    ``packed`` or not (see ``rooftop.programs.parameters.Batch``). ``gradient_norm`` adds this metric, which takes a
    sum over all gradients. ``schedule`` and ``chunks`` are those of ``rooftop.scheduling.pipeline.pipeline_table``,
    over a stage axis.
    """

    closed = True

    computation: Computation
    batch: int
    seq_len: int
    packed: bool = False
    microbatches: int = 1
    schedule: str = DEFAULT_SCHEDULE
    chunks: int = 1
    loss_chunks: int = 1
    gradient_norm: bool = False
    compute_dtype: str = "bf16"
    weights_dtype: str = "f32"
    gradient_dtype: str | None = None
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "weights_dtype", "gradient_dtype"):
            if (dtype := getattr(self, name)) is not None and dtype not in STATE_DTYPES:
                raise unknown(name, dtype, STATE_DTYPES)
        require_schedule(self.schedule, self.chunks)
        for name in ("batch", "seq_len", "microbatches", "loss_chunks"):
            if getattr(self, name) < 1:
                raise RooftopError(name, getattr(self, name), "a positive whole number")

    @property
    def model(self) -> ModelConfig:
        """The model that is trained."""
        return self.computation.model

    @classmethod
    def from_json(cls, data: object) -> TrainProgram:
        """The inverse of ``to_json``. Raises RooftopError on a field that a program does not have."""
        return read_record(cls, data, "train program")

    @classmethod
    def from_plan(cls, plan: TrainingPlan) -> TrainProgram:
        """The program of a plan. Raises RooftopError with the first obstacle of a plan that is not executable.

        A plan of another framework is one.
        """
        plan.require_ours()
        return cls.from_spec(plan.spec, "an executable plan, such as its nearest_executable", mesh=plan.mesh)

    @classmethod
    def from_spec(cls, spec: TrainingSpec, accepted: str, *, mesh: LaidMesh | None = None) -> TrainProgram:
        """The program of a train step that is asked for.

        Attention is the spec's kernel, in its blocks. Experts keep as many tokens as evenly chosen ones need, as a plan
        counts. In pipeline stages keys and values are gathered over a context axis. Rings of collective matmuls visit
        neighbours on the network if the ``mesh`` is laid on it. Raises RooftopError with the first
        obstacle of the spec, if there is one; ``accepted`` says what to give instead.
        """
        require(TRAINING, spec, accepted)
        choice, numerics = spec.choice, spec.numerics
        axes, (sequences, positions) = spec.rules.activations, spec.padded
        ring = DeviceRing.of(mesh, *COLUMN_AXES) if mesh is not None and choice.collective_matmuls else None
        computation = Computation(
            model=spec.model,
            rules=spec.rules,
            remat=choice.remat,
            attention=spec.kernel,
            attention_block=spec.attention_block,
            context_attention="all_gather" if spec.ways(*STAGE_AXES) > 1 else "ring",
            expert_capacity=1.0,
            collective_matmuls=choice.collective_matmuls,
            ring_order=None if ring is None else ring.order,
            both_ways=ring is not None and ring.closed,
            matmul=None if numerics.matmul == numerics.compute else numerics.matmul,
        )
        return cls(
            computation=computation,
            batch=spec.sequences,
            seq_len=spec.seq_len,
            microbatches=choice.microbatches,
            schedule=choice.schedule,
            chunks=choice.chunks,
            loss_chunks=loss_chunks(
                sequences // choice.microbatches // spec.ways(*axes["batch"]), positions // spec.ways(*axes["seq"])
            ),
            compute_dtype=numerics.compute,
            weights_dtype=numerics.weights,
            gradient_dtype=numerics.gradients,
            optimizer=Optimizer(name=numerics.optimizer, moments=numerics.moments, matmul=numerics.compute),
        )

    def padded(self, mesh: Mesh | AbstractMesh) -> tuple[int, int]:
        """Sequences and positions of a batch on ``mesh``: with empty sequences, and padding at the end of each.

        Every device, and in it every microbatch, has as many sequences, and every device equal parts of them.
        """
        axes, how = self.specs(mesh).rules.activations, self.computation
        positions = padded_positions(
            self.seq_len,
            ring=ways(mesh.shape, *axes["seq"]),
            residual=ways(mesh.shape, *axes["residual_seq"]),
            kernel=how.attention,
            chunks=chunks_of(how.context_order),
        )
        return next_multiple(self.batch, ways(mesh.shape, *axes["batch"]) * self.microbatches), int(positions)

    def specs(self, mesh: Mesh | AbstractMesh) -> Specs:
        """The specs of arrays on ``mesh``: the rules without axes of size 1."""
        rules = self.computation.rules
        return Specs(rules.only({axis: size for axis, size in mesh.shape.items() if size > 1}))

    def described(self, mesh: Mesh | AbstractMesh) -> Transformer[Parameter]:
        """The weights as ``mesh`` stores them, padded where its axes do not divide a dim."""
        stages = ways(mesh.shape, *STAGE_AXES)
        parts = {"layers": stages * self.chunks if stages > 1 else 1}
        return describe(self.model, self.specs(mesh).ways(mesh.shape) | parts)


def loss_chunks(sequences: int, positions: int) -> int:
    """The fewest chunks of ``positions`` whose logits a plan has memory for, each of at least one position."""
    return next(
        chunks
        for chunks in range(1, positions + 1)
        if positions % chunks == 0 and (chunks == positions or sequences * positions // chunks <= LOSS_CHUNK)
    )
