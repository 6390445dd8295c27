"""The ledger: rows of named work, the one table that plans, compilations and profiles are written in.

A row's figures are per device for *one* execution; ``count`` multiplies (layers x microbatches). In a sweep every
number may be a NumPy array with one entry per candidate; in a plan's JSON it is a scalar.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.core.quantities import DTYPE_BYTES
from rooftop.core.scopes import UNSCOPED, is_phase, is_scope

#: A number, or one per candidate of a sweep.
Number = float | npt.NDArray[np.float64]

Resource = Literal["mxu", "vpu", "hbm", "ici", "dcn", "pcie", "host"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One logical collective of a row.

    ``bytes`` is the logical local payload: an AllGather's output, a ReduceScatter's input, an AllReduce's or
    AllToAll's operand, what a permute sends. ``wire_bytes`` is what one device sends. ``time_s`` is the bound by
    network resource ('ici', 'dcn'), ``expected_s`` its expected duration, ``exposed_s`` the part of that in which
    nothing else runs. ``critical`` collectives stand between two computations that depend on each other.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: Number
    wire_bytes: Number
    critical: bool
    time_s: Mapping[str, Number] = field(default_factory=dict)
    expected_s: Number = 0.0
    exposed_s: Number = 0.0

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise RooftopError("collective.kind", self.kind, ", ".join(COLLECTIVES))


@dataclass(frozen=True, kw_only=True)
class Row:
    """One scope in one phase.

    ``flops`` are matmul FLOPs by dtype, ``kernel_flops`` those executed inside hand-written kernels (which compilers
    do not count) and ``vector_flops`` elementwise ones. ``time_s`` is the bound by resource, at peak rates.
    ``expected_s`` is the expected duration of one execution, exposed collectives included; ``serial_s`` the same if
    nothing overlapped. ``formula`` says how the main figure follows.
    """

    scope: str
    phase: str
    count: Number = 1
    flops: Mapping[str, Number] = field(default_factory=dict)
    kernel_flops: Number = 0.0
    vector_flops: Number = 0.0
    hbm_bytes: Number = 0.0
    collectives: tuple[Collective, ...] = ()
    time_s: Mapping[str, Number] = field(default_factory=dict)
    expected_s: Number = 0.0
    serial_s: Number = 0.0
    formula: str = ""

    def __post_init__(self) -> None:
        if self.scope != UNSCOPED and not is_scope(self.scope):
            raise RooftopError("row.scope", self.scope, "a scope of rooftop.core.scopes, or 'unscoped'")
        if not is_phase(self.phase):
            raise RooftopError("row.phase", self.phase, "a phase of rooftop.core.scopes")
        for name in self.time_s:
            if name not in RESOURCES:
                raise RooftopError("row.time_s", name, ", ".join(RESOURCES))
        for name in self.flops:
            if name not in DTYPE_BYTES:
                raise RooftopError("row.flops", name, ", ".join(DTYPE_BYTES))

    @property
    def key(self) -> tuple[str, str]:
        """The key on which rows of different ledgers are joined: scope and phase."""
        return self.scope, self.phase

    @property
    def is_idle(self) -> bool:
        """True if a scalar row only waits: it takes time and keeps no resource busy."""
        return not self.time_s

    @property
    def bound(self) -> str:
        """The busiest resource of a scalar row ('' if it uses none)."""
        return max(self.time_s, key=lambda name: float(self.time_s[name]), default="")

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values; arrays of a sweep are refused by ``float``."""
        plain: dict[str, Any] = _plain(asdict(self))
        return plain | {"bound": self.bound}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Row:
        """The inverse of ``to_json``. Raises RooftopError on a field that a row does not have."""
        try:
            fields = {name: value for name, value in data.items() if name != "bound"}
            collectives = tuple(
                Collective(**{**entry, "axes": tuple(entry["axes"])}) for entry in fields.pop("collectives", ())
            )
            return cls(**fields, collectives=collectives)
        except (AttributeError, TypeError, KeyError) as error:
            raise RooftopError("ledger row", data, f"the fields of a row ({error})") from None


@dataclass(frozen=True)
class Ledger:
    """An ordered collection of rows, with the sums that plans are made of."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def total(self, resource: str) -> Number:
        """Seconds per step that ``resource`` is busy at its peak rate: the sum over rows, counts applied."""
        return sum((row.count * row.time_s[resource] for row in self.rows if resource in row.time_s), 0.0)

    @property
    def expected_s(self) -> Number:
        """Expected seconds per step: the sum over rows, counts applied."""
        return sum((row.count * row.expected_s for row in self.rows), 0.0)

    @property
    def serial_s(self) -> Number:
        """Expected seconds per step if nothing overlapped."""
        return sum((row.count * row.serial_s for row in self.rows), 0.0)

    def flops(self, *, kernels: bool = True) -> Number:
        """Matmul FLOPs per device and step, of every dtype, and those of kernels unless told otherwise."""
        matmuls = sum((row.count * amount for row in self.rows for amount in row.flops.values()), 0.0)
        return matmuls + (sum((row.count * row.kernel_flops for row in self.rows), 0.0) if kernels else 0.0)

    def by_key(self) -> dict[tuple[str, str], list[Row]]:
        """Rows by (scope, phase), in order of first appearance."""
        groups: dict[tuple[str, str], list[Row]] = {}
        for row in self.rows:
            groups.setdefault(row.key, []).append(row)
        return groups

    def to_json(self) -> list[dict[str, Any]]:
        """The rows as plain JSON values."""
        return [row.to_json() for row in self.rows]

    @classmethod
    def from_json(cls, data: Iterable[Mapping[str, Any]]) -> Ledger:
        """The inverse of ``to_json``. Raises RooftopError on what is no list of rows."""
        if not isinstance(data, list):
            raise RooftopError("ledger", data, "a list of rows")
        return cls(tuple(Row.from_json(entry) for entry in data))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, (str, bool, int)) or value is None:
        return value
    number = float(value)
    return int(number) if number.is_integer() and abs(number) < 2**53 else number
