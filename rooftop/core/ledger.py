"""The ledger: rows of named work, the one table that plans, compilations and profiles are written in.

A row's figures are per device for *one* execution; ``count`` multiplies (layers x microbatches). In a sweep every
number may be a NumPy array with one entry per candidate; in a plan's JSON it is a scalar.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, get_args

from rooftop.core.errors import RooftopError
from rooftop.core.quantities import DTYPE_BYTES
from rooftop.core.records import Record, derived, read_record
from rooftop.core.scopes import Phase, is_path, is_phase

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    #: A number, or one per candidate of a sweep. In JSON it is one number.
    Number = float | npt.NDArray[np.float64]
else:
    Number = float

Resource = Literal["mxu", "vpu", "hbm", "ici", "dcn", "pcie", "host"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
CollectiveKind = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute"]
COLLECTIVES: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True, kw_only=True)
class Collective(Record):
    """One logical collective of a row.

    ``bytes`` is the logical local payload: an AllGather's output, a ReduceScatter's input, an AllReduce's or
    AllToAll's operand, what a permute sends. ``wire_bytes`` is what one device sends. ``time_s`` is the bound by
    network resource ('ici', 'dcn'), ``expected_s`` its expected duration, ``exposed_s`` the part of that in which
    nothing else runs. ``critical`` collectives stand between two computations that depend on each other.
    """

    closed = True

    kind: CollectiveKind
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
class Row(Record):
    """One scope in one phase.

    ``flops`` are matmul FLOPs by dtype, ``kernel_flops`` those executed inside hand-written kernels (which compilers
    do not count) and ``vector_flops`` elementwise ones. ``time_s`` is the bound by resource, at peak rates.
    ``expected_s`` is the expected duration of one execution, exposed collectives included; ``serial_s`` the same if
    nothing overlapped. ``formula`` says how the main figure follows.
    """

    closed = True

    scope: str
    phase: Phase
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
        if not is_path(self.scope):
            raise RooftopError("row.scope", self.scope, "a scope, such as layers/mlp/up, or 'unscoped'")
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

    @derived
    def bound(self) -> Resource | Literal[""]:
        """The busiest resource of a scalar row ('' if it uses none)."""
        used = [name for name in RESOURCES if name in self.time_s]
        return max(used, key=lambda name: float(self.time_s[name]), default="")

    def to_json(self) -> dict[str, Any]:
        """The row as plain JSON values, whole numbers without a fraction. Raises TypeError for arrays of a sweep."""
        data: dict[str, Any] = _without_fractions(super().to_json())
        return data


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
    def from_json(cls, data: object) -> Ledger:
        """The inverse of ``to_json``. Raises RooftopError on what is no list of rows."""
        return cls(read_record(tuple[Row, ...], data, "ledger", amounts=True))


def _without_fractions(value: Any) -> Any:
    """JSON values in which 32.0 has become 32."""
    if isinstance(value, dict):
        return {name: _without_fractions(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_fractions(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    return value
