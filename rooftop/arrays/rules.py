"""Mesh axes and sharding rules: what each axis of a mesh splits.

``MESH_AXES`` is the one table of axes. The rules, two tables from logical dims to ordered mesh axes, follow from it:
programs shard by them and plans write them down, so that a plan says all that is needed to build its program.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from math import prod
from pathlib import Path

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import Record

#: Logical dims. ``embed`` is D of a parameter; ``residual_seq`` is the sequence dim between matmuls, ``seq`` inside;
#: ``expert_mlp`` are hidden columns of experts, ``mlp`` those of other MLPs.
LOGICAL: tuple[str, ...] = (
    "batch",
    "seq",
    "residual_seq",
    "embed",
    "heads",
    "kv_heads",
    "mlp",
    "expert_mlp",
    "vocab",
    "expert",
    "layers",
)


@dataclass(frozen=True, kw_only=True)
class MeshAxis:
    """An axis of a mesh, by the logical dims of ``parameters`` and ``activations`` that it splits.

    ``order`` is the place of the axis, outermost first, in a dim that several axes split.
    """

    name: str
    summary: str
    parameters: tuple[str, ...] = ()
    activations: tuple[str, ...] = ()
    order: int = 0

    @property
    def splits_tokens(self) -> bool:
        """True if the devices along the axis work on different tokens of a step's matmuls."""
        return bool({"batch", "seq"} & set(self.activations))


#: The axes that rooftop's own programs use, in mesh order: slowest network first.
MESH_AXES: tuple[MeshAxis, ...] = (
    MeshAxis(
        name="data",
        summary="copies of the weights; their gradients are summed (AllReduce)",
        activations=("batch",),
    ),
    MeshAxis(
        name="stage",
        summary="layers, as a pipeline; activations go from stage to stage (Permute)",
        parameters=("layers",),
    ),
    MeshAxis(
        name="fsdp",
        summary="weights and their state; gathered for a matmul (AllGather), gradients scattered (ReduceScatter)",
        parameters=("embed",),
        activations=("batch",),
        order=2,
    ),
    MeshAxis(
        name="expert",
        summary="experts; tokens go to their experts and back (AllToAll)",
        parameters=("expert",),
        activations=("batch", "expert"),
        order=1,
    ),
    MeshAxis(
        name="context",
        summary="the sequence; keys and values rotate (Permute) or are gathered",
        activations=("seq", "residual_seq"),
    ),
    MeshAxis(
        name="tensor",
        summary="heads and hidden columns; inputs are gathered (AllGather), partial sums scattered (ReduceScatter)",
        parameters=("heads", "kv_heads", "mlp", "expert_mlp", "vocab"),
        activations=("residual_seq", "heads", "kv_heads", "mlp", "vocab"),
        order=1,
    ),
)
AXES: tuple[str, ...] = tuple(axis.name for axis in MESH_AXES)


@cache
def _framework_names() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Names of axes in frameworks -> axis, and names that mean several -> the axes to choose from (axes.toml)."""
    data = tomllib.loads(Path(__file__).with_name("axes.toml").read_text(encoding="utf-8"))
    names = {name: axis for axis, texts in data["names"].items() for name in texts.split()}
    return names, data["ambiguous"]


def axis_name(text: str) -> str:
    """The axis of ``MESH_AXES`` that a framework calls so, in any case: 'TP' is tensor, 'dp_shard' fsdp.

    Another text is returned as it is. Raises RooftopError for a name that means several axes.
    """
    names, ambiguous = _framework_names()
    word = text.strip().lower().lstrip("-").replace("-", "_")
    if word in ambiguous:
        raise RooftopError("mesh axis", text, ambiguous[word])
    return word if word in AXES else names.get(word, text)


#: The axes over which the tokens of a step are spread, and those of them that split the batch.
TOKEN_AXES: tuple[str, ...] = tuple(axis.name for axis in MESH_AXES if axis.splits_tokens)
BATCH_AXES: tuple[str, ...] = tuple(axis.name for axis in MESH_AXES if "batch" in axis.activations)
#: The axes along which devices differ in nothing but their sequences: copies of the model.
REPLICA_AXES: tuple[str, ...] = tuple(
    axis.name for axis in MESH_AXES if axis.activations == ("batch",) and not axis.parameters
)


def _parameters() -> dict[str, tuple[str, ...]]:
    return _table("parameters")


def _activations() -> dict[str, tuple[str, ...]]:
    return _table("activations")


def _table(kind: str) -> dict[str, tuple[str, ...]]:
    """Axes of each logical dim that some axis splits; ``kind`` is 'parameters' or 'activations'."""
    outermost_first = sorted(MESH_AXES, key=lambda axis: axis.order)
    axes = {dim: tuple(axis.name for axis in outermost_first if dim in getattr(axis, kind)) for dim in LOGICAL}
    return {dim: names for dim, names in axes.items() if names}


#: The axes that split D of a weight, which is gathered over them while a matmul uses it (FSDP).
GATHER_AXES: tuple[str, ...] = _parameters()["embed"]
#: The axes that split heads and hidden columns (tensor parallelism), experts, and layers (a pipeline).
COLUMN_AXES: tuple[str, ...] = _parameters()["mlp"]
EXPERT_AXES: tuple[str, ...] = _parameters()["expert"]
STAGE_AXES: tuple[str, ...] = _parameters()["layers"]
#: The axes that split a sequence inside of matmuls and attention, and those that split it between matmuls.
SEQUENCE_AXES: tuple[str, ...] = _activations()["seq"]
RESIDUAL_AXES: tuple[str, ...] = _activations()["residual_seq"]


def copy_axes(*dims: str, sequence: str = "seq") -> tuple[str, ...]:
    """The axes that hold copies of a parameter with these logical dims: its gradients are summed over them.

    ``sequence`` is the logical dim that splits the tokens at the parameter's place: see ``LOGICAL``.
    """
    return tuple(
        axis.name
        for axis in MESH_AXES
        if {"batch", sequence} & set(axis.activations) and not set(dims) & set(axis.parameters)
    )


def ways(sizes: Mapping[str, int], *axes: str) -> int:
    """Devices along mesh axes together; 1 for an axis that ``sizes`` does not have."""
    return prod(sizes.get(axis, 1) for axis in axes)


@dataclass(frozen=True, kw_only=True)
class Rules(Record):
    """Sharding rules: mesh axes by logical dim.

    The ``embed`` axes of a parameter hold it in shards, which are gathered while a matmul uses it (FSDP).
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

    @property
    def with_whole_experts(self) -> Rules:
        """The rules with experts dealt out over the axes that split their hidden columns, none of which is split."""
        tables = self.parameters
        axes = tables.get("expert", ()) + tables.get("expert_mlp", ())
        return Rules(parameters={**tables, "expert": axes, "expert_mlp": ()}, activations=self.activations)
