"""Number formats of a train step, and the bytes that they and the optimizer take per parameter."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.core.errors import unknown
from rooftop.core.quantities import dtype_bytes
from rooftop.core.records import Record, field_values
from rooftop.models.optimizers import OPTIMIZERS, OptimizerKind


@dataclass(frozen=True, kw_only=True)
class Dtypes(Record):
    """Number formats, which decide the bytes of each parameter and activation.

    ``compute`` is the dtype of activations and of the weights as gathered; ``matmul`` the dtype of the layers' matmuls
    (int8 or f8 for quantised training); ``weights`` that of the stored (master) weights; ``moments`` the optimizer's.
    """

    closed = True

    compute: str = "bf16"
    matmul: str = "bf16"
    weights: str = "f32"
    moments: str = "f32"
    gradients: str = "bf16"

    def __post_init__(self) -> None:
        for name in ("compute", "matmul", "weights", "moments", "gradients"):
            dtype_bytes(getattr(self, name), name)


@dataclass(frozen=True, kw_only=True)
class Numerics(Dtypes):
    """Number formats and the optimizer."""

    optimizer: str = "adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.optimizer not in OPTIMIZERS:
            raise unknown("optimizer", self.optimizer, OPTIMIZERS)

    @property
    def dtypes(self) -> Dtypes:
        """The number formats without the optimizer."""
        return Dtypes(**field_values(self, Dtypes))

    @property
    def weight_bytes(self) -> float:
        """Bytes per parameter held as weights: the master copy, and the copy in the compute dtype if that differs."""
        copy = dtype_bytes(self.compute) if self.compute != self.weights else 0.0
        return dtype_bytes(self.weights) + copy

    @property
    def update(self) -> OptimizerKind:
        """The kind of the optimizer."""
        return OPTIMIZERS[self.optimizer]

    @property
    def optimizer_bytes(self) -> float:
        """Bytes per parameter of optimizer state."""
        return self.update.moments * dtype_bytes(self.moments)

    @property
    def table_optimizer_bytes(self) -> float:
        """Bytes per parameter of optimizer state of embedding tables."""
        return self.update.table_moments * dtype_bytes(self.moments)

    @property
    def gradient_bytes(self) -> float:
        """Bytes per parameter of gradients, once reduced."""
        return dtype_bytes(self.gradients)

    @property
    def update_bytes(self) -> float:
        """HBM traffic of the update per parameter: state read and written, gradient read, compute copy made.

        The copy is cast in a pass of its own, which reads the weight again. What is orthogonalised is written before
        and read after, in the compute dtype.
        """
        direction = 2 * dtype_bytes(self.compute) if self.update.orthogonalised else 0.0
        return self._update_bytes(self.optimizer_bytes) + direction

    @property
    def table_update_bytes(self) -> float:
        """HBM traffic of the update per parameter of embedding tables."""
        return self._update_bytes(self.table_optimizer_bytes)

    def _update_bytes(self, state: float) -> float:
        copy = dtype_bytes(self.weights) + dtype_bytes(self.compute) if self.compute != self.weights else 0.0
        gradients = self.gradient_bytes * self.update.gradient_reads
        return 2 * (dtype_bytes(self.weights) + state) + gradients + copy
