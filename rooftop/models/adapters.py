"""Low-rank adapters (LoRA): their matrices and parameters, and the formats of the frozen weights that they change.

A weight W [in, out] stays as it is, and x W + (x A) B is trained in A [in, rank] and B [rank, out] (Hu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import Record
from rooftop.models.attention import MatmulShape
from rooftop.models.counting import Weight, count_params, flops_per_token, weights

if TYPE_CHECKING:
    from rooftop.core.ledger import Number
    from rooftop.models.config import ModelConfig

#: Weights that adapters change, by the scope of their matmuls.
_TARGETS: Mapping[str, str] = MappingProxyType(
    {
        "layers/attn/qkv": "qkv",
        "layers/attn/out": "attn_out",
        "layers/mlp/up": "mlp",
        "layers/mlp/down": "mlp",
        "layers/moe/experts": "mlp",
        "layers/moe/shared": "mlp",
    }
)
TARGETS: tuple[str, ...] = tuple(dict.fromkeys(_TARGETS.values()))
#: Bytes of a frozen weight by the format of the layers' matrices, scales included: int4 in groups of 128 with a scale
#: of 16 bits and a zero point of 4 (GPTQ, AWQ), f4_e2m1 in groups of 32 with one of 8 bits (OCP MX 1.0), nf4 in blocks
#: of 64 with one of 8 bits, whose own scale of 32 bits is of 256 blocks (Dettmers et al. 2023, section 3). Scales of
#: whole columns are left out.
BASE_BYTES: Mapping[str, float] = MappingProxyType(
    {
        "bf16": 2.0,
        "int8": 1.0,
        "f8_e4m3": 1.0,
        "int4": (4 + (16 + 4) / 128) / 8,
        "f4_e2m1": (4 + 8 / 32) / 8,
        "nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8,
    }
)


@dataclass(frozen=True, kw_only=True)
class Adapters(Record):
    """Adapters of ``rank`` on the ``targets``; the layers' frozen matrices are stored in the format ``base``.

    ``mlp`` are the matrices of MLPs, of each expert and of shared experts. Raises RooftopError on an unknown target or
    format, and on a rank that is not positive.
    """

    closed = True

    rank: int
    targets: tuple[str, ...] = TARGETS
    base: str = "bf16"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise RooftopError("lora", self.rank, "a rank of 1 or more")
        if not self.targets:
            raise RooftopError("lora-targets", "", ", ".join(TARGETS))
        for target in self.targets:
            if target not in TARGETS:
                raise unknown("lora-targets", target, TARGETS)
        if self.base not in BASE_BYTES:
            raise unknown("base-format", self.base, BASE_BYTES)

    @property
    def base_bytes(self) -> float:
        """Bytes of a frozen weight of a layer's matrix at rest, scales included."""
        return BASE_BYTES[self.base]

    def adapts(self, scope: str) -> bool:
        """True if the matrices of a matmul's scope have adapters."""
        return _TARGETS.get(scope) in self.targets

    def matmuls(self, shape: MatmulShape, arrays: int) -> tuple[MatmulShape, MatmulShape]:
        """A [in, rank] and B [rank, out] of ``arrays`` weights that share an input, which ``shape`` counts as one.

        The columns of A are those of all arrays; B has the rank of one, as each array reads only its own part.
        """
        rank = float(self.rank) * (shape.k * 0.0 + 1.0)
        return MatmulShape(shape.k, arrays * rank), MatmulShape(rank, shape.n)

    def count(self, config: ModelConfig) -> int:
        """Parameters of all adapters: rank x (in + out) of each matrix that has one."""
        return sum(count for _, count in self._of_weights(config))

    def active(self, config: ModelConfig) -> int:
        """Those of them that one token uses: of k of E experts."""
        return sum(count * weight.active[0] // weight.active[1] for weight, count in self._of_weights(config))

    def state_bytes(self, config: ModelConfig, trained: float, table: float) -> float:
        """Bytes of the frozen model and of adapters with ``trained`` bytes a parameter, ``table`` of the tables."""
        count = count_params(config)
        tables = count.by_component["embed"] + count.by_component.get("unembed", 0)
        return self.base_bytes * (count.total - tables) + table * tables + trained * self.count(config)

    def _of_weights(self, config: ModelConfig) -> Iterator[tuple[Weight, int]]:
        """Weights that have adapters, each with the parameters of these."""
        for weight in weights(config):
            if not weight.matmul or not self.adapts(weight.scope) or weight.name == "shared_gate":
                continue
            *many, inputs, outputs = weight.as_matrices
            # The gate of attention is more columns of the queries' projection.
            sizes = outputs if (weight.component, weight.name) == ("attn", "gate") else inputs + outputs
            count = weight.layers * self.rank * sizes
            for size in many:
                count *= size
            yield weight, count


def require_adaptable(config: ModelConfig) -> None:
    """Raise RooftopError for a model with matrices whose adapters are not planned."""
    if config.mixers or config.others:
        raise RooftopError("lora", config.name, "a model of attention, MLPs and experts: no recurrent mixers")


def training_flops_per_token(config: ModelConfig, seq_len: Number, adapters: Adapters | None) -> tuple[Number, str]:
    """Training FLOPs per token in the convention of MFU, and the convention in words.

    A frozen matrix has no matmul for its gradient: 4 FLOPs a parameter, and 6 of an adapter's.
    """
    plain = flops_per_token(config, seq_len)
    if adapters is None:
        return plain.total, plain.convention
    trained = 6 * adapters.active(config)
    words = f"{plain.convention}; of frozen weights no gradients: backward as forward"
    return 2 * plain.matmul + 3 * plain.attention + trained, words
