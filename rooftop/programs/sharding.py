"""From sharding rules to the specs of arrays in JAX's explicit mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jax import P

from rooftop.arrays.rules import Rules
from rooftop.errors import RooftopError, unknown

#: A dim of an array, as the logical dims whose mesh axes split it, in order: one, several, or none.
Dim = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Specs:
    """Specs by the two tables of ``rules``. Every method raises RooftopError for an unknown dim or an axis used twice.

    ``residual_seq`` is the sequence dim between matmuls and ``seq`` the one inside them: the axes that only the former
    has are gathered before a matmul and scattered after it.
    """

    rules: Rules

    def parameter(self, *dims: Dim) -> P:
        """A parameter at rest, in shards."""
        return _spec("rules.parameters", self.rules.parameters, dims)

    def in_use(self, *dims: Dim) -> P:
        """A parameter while a matmul uses it: gathered over its ``embed`` axes.

        ``reduced`` over every axis that splits tokens: its gradient then leaves the matmul unreduced, and is reduced
        where the parameter was gathered.
        """
        table = {name: () if name == "embed" else axes for name, axes in self.rules.parameters.items()}
        return P(*_spec("rules.parameters", table, dims), reduced=self.token_axes)

    def activation(self, *dims: Dim, reduced: str | None = None, unreduced: str | None = None) -> P:
        """An activation; ``unreduced``: partial sums over that logical dim's axes; ``reduced``: their transpose."""
        table = self.rules.activations
        pending = {"reduced": reduced, "unreduced": unreduced}
        axes = {kind: frozenset(table[dim]) for kind, dim in pending.items() if dim is not None}
        return P(*_spec("rules.activations", table, dims), **axes)

    @property
    def token_axes(self) -> frozenset[str]:
        """The axes over which the tokens of a matmul are spread."""
        return frozenset(self.rules.activations["batch"] + self.rules.activations["seq"])

    @property
    def residual_axes(self) -> frozenset[str]:
        """The axes over which the tokens of the residual stream are spread."""
        return frozenset(self.rules.activations["batch"] + self.rules.activations["residual_seq"])

    @property
    def copy_axes(self) -> frozenset[str]:
        """The token axes that hold copies of a parameter at rest: its gradient is all-reduced over them."""
        return self.token_axes - frozenset(self.rules.parameters["embed"])


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def _spec(field: str, table: Mapping[str, tuple[str, ...]], dims: tuple[Dim, ...]) -> P:
    names = [axes_of(dim) for dim in dims]
    for name in (name for group in names for name in group):
        if name not in table:
            raise unknown(field, name, table)
    entries = [tuple(axis for name in group for axis in table[name]) for group in names]
    used = [axis for entry in entries for axis in entry]
    if len(set(used)) != len(used):
        raise RooftopError(field, f"{dims} -> {entries}", "each mesh axis at most once in an array")
    return P(*(entry or None for entry in entries))
