"""All that decides a training step, the mesh excepted: from a plan, and as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from rooftop.arrays.rules import Rules
from rooftop.core.errors import RooftopError, misread, unknown
from rooftop.hardware import Slice
from rooftop.models import ModelConfig
from rooftop.models.activations import LOSS_CHUNK
from rooftop.programs.model.layer import Computation
from rooftop.programs.sharding import Specs
from rooftop.programs.training.optimizer import DTYPES, Optimizer
from rooftop.roofline.rates import Rates
from rooftop.scheduling.pipeline import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class TrainProgram:
    """All that decides the step, the mesh excepted. ``batch`` is B, in sequences of ``seq_len`` T.

    ``computation`` is that of the forward pass, its specs those of all rules: a step takes ``specs`` of its mesh.
    Each of the ``microbatches`` has an equal part of the batch, and of each device's sequences; their gradients are
    summed in float32. Balance loss is the mean of theirs, and so depends on which sequences they have. ``loss_chunks``
    splits T for the logits. ``compute_dtype`` is that of matmuls, ``weights_dtype`` that of the weights at rest,
    ``gradient_dtype`` that in which gradients are summed over devices that hold copies (None: ``compute_dtype``).
    Batches are ``packed`` or not (see ``rooftop.programs.parameters.Batch``), and ``gradient_norm`` asks for this one
    of ``Metrics``, which takes a sum over all gradients. Over a stage axis, ``schedule`` and ``chunks`` are those of
    ``rooftop.scheduling.pipeline.pipeline_table``.
    """

    computation: Computation
    batch: int
    seq_len: int
    packed: bool = False
    microbatches: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    loss_chunks: int = 1
    gradient_norm: bool = False
    compute_dtype: str = "bf16"
    weights_dtype: str = "f32"
    gradient_dtype: str | None = None
    optimizer: Optimizer = Optimizer()

    def __post_init__(self) -> None:
        for name in ("compute_dtype", "weights_dtype", "gradient_dtype"):
            if (dtype := getattr(self, name)) is not None and dtype not in DTYPES:
                raise unknown(name, dtype, DTYPES)
        if self.schedule not in SCHEDULES:
            raise unknown("schedule", self.schedule, SCHEDULES)
        if self.chunks < 1 or (self.chunks > 1) != (self.schedule == "interleaved"):
            raise RooftopError("chunks", self.chunks, "2 or more with the interleaved schedule, 1 with any other")
        for name in ("batch", "seq_len", "microbatches", "loss_chunks"):
            if getattr(self, name) < 1:
                raise RooftopError(name, getattr(self, name), "a positive whole number")

    @property
    def model(self) -> ModelConfig:
        """What is trained."""
        return self.computation.model

    def to_json(self) -> dict[str, Any]:
        """The program as plain JSON values."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {"computation": self.computation.to_json(), "optimizer": dataclasses.asdict(self.optimizer)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainProgram:
        """The inverse of ``to_json``. Raises RooftopError on a field that a program does not have."""
        fields = dict(data)
        try:
            fields["computation"] = Computation.from_json(fields["computation"])
            if "optimizer" in fields:
                fields["optimizer"] = Optimizer(**fields["optimizer"])
            return cls(**fields)
        except (TypeError, KeyError, ValueError) as error:
            raise RooftopError("train program", sorted(data), f"the fields of a TrainProgram ({error})") from None

    @classmethod
    def from_plan(cls, plan: Mapping[str, Any]) -> TrainProgram:
        """The program of a plan.json; its mesh is ``Mesh.from_json`` of the same file.

        Attention is the chip's kernel, in the blocks that the plan prices. Experts keep as many tokens as evenly chosen
        ones need, as the plan counts. In pipeline stages keys and values are gathered over a context axis. Raises
        RooftopError for a plan that is not executable or that asks for what no program does yet: matmuls in another
        dtype than activations.
        """
        try:
            sizes, workload, dtypes = plan["mesh"]["axes"], plan["workload"], plan["dtypes"]
            slice_ = Slice.parse(plan["slice"]["name"])
            if plan["obstacles"]:
                raise RooftopError("plan", plan["obstacles"][0], "an executable plan, such as its nearest_executable")
            if dtypes["matmul"] != dtypes["compute"]:
                raise RooftopError("plan dtypes.matmul", dtypes["matmul"], f"{dtypes['compute']}, as activations are")
            assumed, microbatches = plan["assumptions"], int(plan["microbatches"])
            rules = Rules.from_json(plan["rules"])
            seq_len = int(workload["seq_len"])
            batch = int(workload["batch_tokens"]) // seq_len
            on_device = batch // microbatches // _ways(rules.activations["batch"], sizes)
            kernel = "splash" if slice_.chip.kind == "tpu" else "cudnn"
            computation = Computation(
                model=ModelConfig.from_json(plan["model"]["config"]),
                specs=Specs(rules),
                remat=plan["remat"]["name"],
                attention="reference" if assumed["attention"] == "reference" else kernel,
                attention_block=assumed["attention_block"] or Rates.of(slice_.chip).attention_block,
                context_attention="all_gather" if sizes.get("stage", 1) > 1 else "ring",
                expert_capacity=1.0,
            )
            return cls(
                computation=computation,
                batch=batch,
                seq_len=seq_len,
                microbatches=microbatches,
                schedule=plan["schedule"]["name"],
                chunks=int(plan["schedule"]["chunks"]),
                loss_chunks=loss_chunks(on_device, seq_len // _ways(rules.activations["seq"], sizes)),
                compute_dtype=dtypes["compute"],
                weights_dtype=dtypes["weights"],
                gradient_dtype=dtypes["gradients"],
                optimizer=Optimizer(name=plan["optimizer"], moments=dtypes["moments"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise misread("plan", error, "a plan.json of rooftop plan train") from None

    def specs(self, mesh: Mesh | AbstractMesh) -> Specs:
        """The specs of arrays on ``mesh``: the rules without the axes that split nothing there."""
        rules = self.computation.specs.rules
        return Specs(rules.only({axis: size for axis, size in mesh.shape.items() if size > 1}))


def _ways(axes: tuple[str, ...], sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in axes)


def loss_chunks(sequences: int, positions: int) -> int:
    """The fewest chunks of ``positions`` whose logits a plan has memory for, each of at least one position."""
    return next(
        chunks
        for chunks in range(1, positions + 1)
        if positions % chunks == 0 and (chunks == positions or sequences * positions // chunks <= LOSS_CHUNK)
    )
