"""Sharding rules: two tables, parameters and activations, from logical dims to ordered mesh axes.

Programs shard by these tables and plans write them down, so that a plan says all that is needed to build its program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rooftop.core.errors import RooftopError, unknown

#: Logical dims. ``embed`` is D of a parameter; ``residual_seq`` is the sequence dim between matmuls, ``seq`` inside.
LOGICAL: tuple[str, ...] = (
    "batch",
    "seq",
    "residual_seq",
    "embed",
    "heads",
    "kv_heads",
    "mlp",
    "vocab",
    "expert",
    "layers",
)


def _parameters() -> dict[str, tuple[str, ...]]:
    return {
        "embed": ("fsdp",),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "mlp": ("tensor",),
        "vocab": ("tensor",),
        "expert": ("expert",),
        "layers": ("stage",),
    }


def _activations() -> dict[str, tuple[str, ...]]:
    return {
        "batch": ("data", "expert", "fsdp"),
        "seq": ("context",),
        "residual_seq": ("context", "tensor"),
        "heads": ("tensor",),
        "kv_heads": ("tensor",),
        "mlp": ("tensor",),
        "vocab": ("tensor",),
        "expert": ("expert",),
    }


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Sharding of parameters and activations by dim.

    A parameter's ``embed`` axes hold it in shards, gathered while a matmul uses it (FSDP).
    """

    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=_parameters)
    activations: Mapping[str, tuple[str, ...]] = field(default_factory=_activations)

    def __post_init__(self) -> None:
        for table, rules in (("parameters", self.parameters), ("activations", self.activations)):
            for dim, axes in rules.items():
                if dim not in LOGICAL:
                    raise unknown(f"rules.{table}", dim, LOGICAL)
                if len(set(axes)) != len(axes):
                    raise RooftopError(f"rules.{table}.{dim}", axes, "each mesh axis once")

    def only(self, axes: Mapping[str, int]) -> Rules:
        """The rules with mesh axes that a mesh does not have left out."""

        def keep(table: Mapping[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
            return {dim: tuple(axis for axis in used if axis in axes) for dim, used in table.items()}

        return Rules(parameters=keep(self.parameters), activations=keep(self.activations))

    def to_json(self) -> dict[str, Any]:
        """Both tables as plain JSON values."""
        return {
            "parameters": {dim: list(axes) for dim, axes in self.parameters.items()},
            "activations": {dim: list(axes) for dim, axes in self.activations.items()},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rules:
        """The inverse of ``to_json``. Raises RooftopError on a malformed table."""
        try:
            tables = {
                name: {dim: tuple(axes) for dim, axes in data[name].items()} for name in ("parameters", "activations")
            }
        except (KeyError, TypeError, AttributeError):
            raise RooftopError("rules", data, "two tables, parameters and activations, of dim -> axes") from None
        return cls(**tables)
