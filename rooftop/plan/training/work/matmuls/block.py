"""Matmuls that share an input or feed one output, and their sizes on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from rooftop.arrays.mesh import Floats
from rooftop.arrays.rules import GATHER_AXES
from rooftop.core.ledger import Number
from rooftop.models.attention import MatmulShape, parameters
from rooftop.plan.pricing import unless
from rooftop.plan.training.step import TrainingStep, turned


@dataclass(frozen=True, kw_only=True)
class ExpertBatch:
    """The experts of a device, ``local`` ones, whose matmuls are done together.

    Where ``whole`` is 1, tensor splits nothing of them, and nothing is gathered or scattered over it. ``tiles`` are
    rows of a tile of the kernels that multiply the rows of all, forward, for gradients of inputs and of weights; None:
    the compiler multiplies them as one batch.
    """

    local: Number
    whole: Number
    tiles: tuple[int, int, int] | None


@dataclass(frozen=True, kw_only=True)
class MatmulBlock:
    """Matmuls of ``shapes`` with ``tokens`` rows that share an input or feed one output, done ``count`` times a step.

    ``gathered`` is the bytes of the input once gathered over tensor, ``scattered`` those of the partial sums that are
    scattered over it; ``again`` is 1 where the forward pass is recomputed; ``residual`` adds the sum into the residual
    stream. ``keys``: key and value heads are among the columns, which are gathered over tensor too where devices have
    heads in common. Weights are in ``arrays`` arrays, each with collectives of its own, of all ``experts`` at once;
    ``shapes`` are of one expert. ``unstacked`` are bytes of checkpoints that the backward pass moves before it. Where
    ``rings`` is 1, shards of the input or the output travel next to the matmul, which is done in pieces. ``adapter``:
    A or B of adapters; its result is added to that of the frozen weights, and so is the gradient of its input.
    """

    scope: str
    count: Number
    shapes: Sequence[MatmulShape]
    tokens: Number
    again: Number
    gathered: Number | None = None
    scattered: Number | None = None
    residual: bool = False
    keys: bool = False
    experts: ExpertBatch | None = None
    arrays: int = 1
    unstacked: Number = 0.0
    rings: Number = 0.0
    adapter: Literal["a", "b"] | None = None
    whole_over_tensor: bool = False

    @property
    def at_rest(self) -> Sequence[MatmulShape]:
        """The shapes with the dim in front that fsdp splits: the longer one of an adapter."""
        return turned(self.shapes) if self.adapter == "b" else self.shapes

    @property
    def dims(self) -> tuple[str, ...]:
        """Logical dims of the weights: axes that split none of them hold copies.

        Gradients of copies are summed at once in pipeline stages, elsewhere once a step.
        """
        return ("embed",) if self.experts is None else ("embed", "expert")

    @property
    def local(self) -> Number:
        """Experts whose weights are in one array; 1 without experts."""
        return 1.0 if self.experts is None else self.experts.local

    @property
    def whole(self) -> Number:
        """1 where tensor splits nothing, and nothing is gathered or scattered over it."""
        return 0.0 if self.experts is None else self.experts.whole

    @property
    def pieces(self) -> Number:
        """The part of one expert in the collectives of all arrays."""
        return self.arrays / self.local


@dataclass(frozen=True, kw_only=True)
class MatmulSizes:
    """The dtypes of a block's matmuls, and elements and bytes of what they read and write."""

    step: TrainingStep
    block: MatmulBlock

    @property
    def element(self) -> float:
        """Bytes of an element of activations and weights."""
        return self.step.element_bytes

    @property
    def frozen(self) -> bool:
        """True for weights that have no gradients."""
        return self.step.adapters is not None and self.block.adapter is None

    @cached_property
    def resting(self) -> float:
        """Bytes of an element of a weight before it is gathered: those of frozen matrices of layers in their format."""
        adapters, in_layers = self.step.adapters, self.block.scope.startswith("layers")
        return self.element if adapters is None or not (self.frozen and in_layers) else adapters.base_bytes

    @property
    def sent(self) -> float:
        """Bytes of an element of a gathered weight: quantised before that, or unpacked after it."""
        return min(self.operand, self.resting)

    @cached_property
    def dtype(self) -> str:
        """The dtype of the operands: routers, adapters and the unembedding multiply in that of activations."""
        scope, numerics = self.block.scope, self.step.numerics
        if self.block.adapter is not None:
            return numerics.compute
        return numerics.matmul if scope.startswith("layers") and scope != "layers/moe/router" else numerics.compute

    @cached_property
    def operand(self) -> float:
        """Bytes of an element of an operand."""
        return self.element if self.dtype == self.step.numerics.compute else self.step.operand_bytes

    @property
    def narrow(self) -> bool:
        """True if operands have fewer bits than activations."""
        return self.operand < self.element

    @property
    def quantises_weights(self) -> bool:
        """True if weights are quantised for the matmul; frozen ones may be narrow already."""
        return self.narrow and self.resting > self.operand

    @cached_property
    def of_gradient(self) -> str:
        """The dtype of the matmul for gradients of inputs."""
        return "f8_e5m2" if self.dtype == "f8_e4m3" else self.dtype

    @cached_property
    def of_sum(self) -> str:
        """The dtype of the matmul for gradients of weights."""
        return self.of_gradient if self.step.assumptions.narrow_gradients else self.step.numerics.compute

    @cached_property
    def weights(self) -> Number:
        """Elements of the gathered weights."""
        return parameters(self.block.shapes)

    @cached_property
    def stored(self) -> Number:
        """Elements of the gathered weights with the rows that fsdp adds."""
        return self.step.stored(self.block.at_rest)

    @cached_property
    def stored_bytes(self) -> Number:
        """Bytes of the stored weights, without key and value heads that are gathered over tensor too."""
        return (self.stored - (self.step.own_keys if self.block.keys else 0.0)) * self.element

    @cached_property
    def gather(self) -> Number:
        """Devices over which weights are gathered."""
        return self.step.strategies.devices(*GATHER_AXES)

    @cached_property
    def split(self) -> Number:
        """``Transfer.when`` of transfers over tensor: 1 where it splits the block."""
        return unless(self.block.whole)

    @cached_property
    def inputs(self) -> Number:
        """Elements of the inputs of all shapes."""
        return sum((self.block.tokens * m.k for m in self.block.shapes), 0.0)

    @cached_property
    def outputs(self) -> Number:
        """Elements of the outputs of all shapes."""
        return sum((self.block.tokens * m.n for m in self.block.shapes), 0.0)

    @cached_property
    def flops(self) -> Number:
        """FLOPs of the forward pass."""
        return 2.0 * sum((self.block.tokens * m.parameters for m in self.block.shapes), 0.0)

    def columns(self, shape: MatmulShape) -> Floats:
        """Columns of one array: several shapes are one array each; a gate and an up are one shape."""
        return shape.n if len(self.block.shapes) > 1 else shape.n / self.block.arrays
