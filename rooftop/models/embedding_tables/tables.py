"""Parts of an embedding model: tables, the features that look them up, and the SparseCore settings.

Dims: V vocabulary (rows of a table), W width (floats of a row), B samples of a step. A *stack* is several tables that
are stored and looked up as one (``tables_stacking``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, is_dataclass
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import field_values

COMBINERS: tuple[str, ...] = ("sum", "mean", "sqrtn")

#: Kind of initialiser -> its parameters and their defaults.
INITIALIZERS: dict[str, dict[str, float]] = {
    "constant": {"value": 0.0},
    "normal": {"mean": 0.0, "stddev": 0.05},
    "truncated_normal": {"mean": 0.0, "stddev": 0.05},
    "uniform": {"low": -0.05, "high": 0.05},
}

#: Kind of optimizer -> its parameters next to the learning rate, and their defaults.
OPTIMIZERS: dict[str, dict[str, float]] = {
    "sgd": {},
    "adagrad": {"initial_accumulator": 0.1},
    "rowwise_adagrad": {"initial_accumulator": 0.1},
    "adam": {"beta1": 0.9, "beta2": 0.999, "epsilon": 1e-8},
    "ftrl": {"initial_accumulator": 0.1, "learning_rate_power": -0.5, "l1": 0.0, "l2": 0.0, "beta": 0.0},
    "adagrad_momentum": {"initial_accumulator": 0.1, "momentum": 0.9, "beta2": 1.0, "epsilon": 1e-10, "power": 2.0},
}

#: Kind of optimizer -> floats kept for each float of a row (a row-wise one keeps one a row, see ``slots``).
_SLOTS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 0, "adam": 2, "ftrl": 2, "adagrad_momentum": 2}

#: Ids are 32-bit on SparseCores, and a lookup's columns count the rows of a whole stack.
MOST_ROWS = 2**31 - 1
MOST_WIDTH = 1 << 16


def _number(field: str, value: object, accepted: str, *, low: float = -math.inf, high: float = math.inf) -> None:
    """Refuse what is no finite number from ``low`` to ``high``."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RooftopError(field, value, accepted)
    if not low <= value <= high:
        raise RooftopError(field, value, accepted)


def _whole(field: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise RooftopError(field, value, f"a whole number from {least} to {most}")


def _name(field: str, value: object) -> None:
    # A name becomes a part of a scope (tables/NAME/lookup) and of a file.
    if not isinstance(value, str) or not value or set(value) & set("/\\ \n\t") or len(value) > 200:
        raise RooftopError(field, value, "a name of 1 to 200 characters without blanks or slashes")


def _parameters(
    field: str,
    kind: str,
    parameters: Mapping[str, float],
    known: Mapping[str, Mapping[str, float]],
    others: tuple[str, ...] = (),
) -> tuple[tuple[str, float], ...]:
    """All parameters of ``kind``, the defaults included, as sorted pairs: equal exactly if they mean the same.

    ``others`` are accepted next to them where ``field`` is written.
    """
    if kind not in known:
        raise unknown(f"{field}.kind", str(kind), known)
    for name, value in parameters.items():
        if name not in known[kind]:
            raise unknown(field, name, (*known[kind], *others))
        _number(f"{field}.{name}", value, "a finite number")
    return tuple(sorted((name, float(value)) for name, value in {**known[kind], **parameters}.items()))


@dataclass(frozen=True, kw_only=True)
class Initializer:
    """Initial values of a table's rows: ``kind`` is a key of INITIALIZERS, ``parameters`` are those that it names."""

    kind: str = "normal"
    parameters: tuple[tuple[str, float], ...] = ()

    def __post_init__(self) -> None:
        pairs = _parameters("initializer", self.kind, dict(self.parameters), INITIALIZERS)
        object.__setattr__(self, "parameters", pairs)
        if self.kind == "uniform" and self["low"] > self["high"]:
            raise RooftopError("initializer.low", self["low"], f"at most initializer.high, {self['high']}")
        if self.kind in ("normal", "truncated_normal"):
            _number("initializer.stddev", self["stddev"], "a number of at least 0", low=0)

    def __getitem__(self, name: str) -> float:
        """A parameter by its name."""
        return dict(self.parameters)[name]


@dataclass(frozen=True, kw_only=True)
class TableOptimizer:
    """Optimizer of a table: ``kind`` is a key of OPTIMIZERS, ``parameters`` are those that it names.

    ``learning_rate`` is the rate, or the factor of a schedule. ``clip`` bounds the absolute value of every
    element of a row's gradient (after duplicates have been merged); None leaves gradients alone.
    """

    kind: str = "adagrad"
    learning_rate: float = 0.01
    parameters: tuple[tuple[str, float], ...] = ()
    clip: float | None = None

    def __post_init__(self) -> None:
        pairs = _parameters("optimizer", self.kind, dict(self.parameters), OPTIMIZERS, ("learning_rate", "clip"))
        object.__setattr__(self, "parameters", pairs)
        _number("optimizer.learning_rate", self.learning_rate, "a number of at least 0", low=0)
        if self.clip is not None:
            _number("optimizer.clip", self.clip, "a positive number", low=math.ulp(0.0))
        for name, value in pairs:
            if name in ("beta1", "beta2", "momentum"):
                _number(f"optimizer.{name}", value, "a number from 0 to 1", low=0, high=1)
            elif name != "learning_rate_power":
                _number(f"optimizer.{name}", value, "a number of at least 0", low=0)

    def __getitem__(self, name: str) -> float:
        """A parameter by its name."""
        return dict(self.parameters)[name]

    @property
    def elementwise(self) -> bool:
        """True if each float of a row is updated on its own, as on SparseCores, which never see a whole row."""
        return self.kind != "rowwise_adagrad"

    @property
    def additive(self) -> bool:
        """True if sequential updates of a row equal a single update with the summed gradient."""
        return self.kind == "sgd" and self.clip is None

    def slots(self, width: int) -> tuple[int, ...]:
        """Floats per row of each array that the optimizer keeps next to a table of ``width`` floats per row."""
        if self.kind == "rowwise_adagrad":
            return (1,)
        return (width,) * _SLOTS[self.kind]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Simulated quantisation: values between ``low`` and ``high`` fall into ``buckets`` levels."""

    buckets: int = 256
    low: float
    high: float

    def __post_init__(self) -> None:
        _whole("quantization.buckets", self.buckets, 2, 1 << 16)
        for name in ("low", "high"):
            _number(f"quantization.{name}", getattr(self, name), "a finite number")
        if self.low >= self.high:
            raise RooftopError("quantization.low", self.low, f"less than quantization.high, {self.high}")


@dataclass(frozen=True, kw_only=True)
class EmbeddingTable:
    """An embedding table: V = ``vocabulary`` rows of W = ``width`` floats.

    ``combiner`` makes one row of the rows that a sample looks up: their sum; their mean, weighted (divided by the sum
    of the weights); or the sum divided by the square root of the sum of the squared weights.
    """

    name: str
    vocabulary: int
    width: int
    combiner: str = "sum"
    initializer: Initializer = Initializer()
    optimizer: TableOptimizer = TableOptimizer()
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        _name("table", self.name)
        _whole(f"tables.{self.name}.vocabulary", self.vocabulary, 1, MOST_ROWS)
        _whole(f"tables.{self.name}.width", self.width, 1, MOST_WIDTH)
        if self.combiner not in COMBINERS:
            raise unknown(f"tables.{self.name}.combiner", str(self.combiner), COMBINERS)


@dataclass(frozen=True, kw_only=True)
class Feature:
    """A column of the input whose ids are rows of ``table``; several features may share a table.

    ``weighted`` features come with a weight per id. A feature of ``length`` L is a sequence: each of its L positions
    holds at most one id and is looked up by itself, so that a step has B x L rows of activations and not B.
    ``ids_per_sample`` is how many ids a sample (of a sequence: a position) is expected to hold: what is planned with
    before data are seen.
    """

    name: str
    table: str
    weighted: bool = False
    length: int | None = None
    ids_per_sample: float = 1.0

    def __post_init__(self) -> None:
        _name("feature", self.name)
        if self.length is not None:
            _whole(f"features.{self.name}.length", self.length, 1, 1 << 20)
        if not isinstance(self.weighted, bool):
            raise RooftopError(f"features.{self.name}.weighted", self.weighted, "true or false")
        at_most = 1 if self.length is not None else 1e6
        _number(
            f"features.{self.name}.ids_per_sample", self.ids_per_sample, f"from 0 to {at_most:g}", low=0, high=at_most
        )

    @property
    def rows_per_sample(self) -> int:
        """Rows of activations that one sample of the input becomes."""
        return self.length or 1


@dataclass(frozen=True, kw_only=True)
class SparseCoreConfig:
    """SparseCore settings: the seven parameters of the SparseCore deep dive (section 4), with its defaults.

    ``max_ids_per_chip_per_sample`` bounds the ids of one chip, all tables together, per sample of its batch.
    ``max_ids_per_table`` and ``max_unique_ids_per_table`` bound the ids that one SparseCore sends for a table, all
    partitions together. With ``allow_id_dropping`` ids beyond a limit are dropped, in sorted order; without, they are
    an error. Tables are initialised on the host unless ``initialize_tables_on_host`` is false or
    ``enable_fast_table_initialization`` is true (``initialized_on_host``).
    """

    disable_table_stacking: bool = False
    max_ids_per_chip_per_sample: int = 64
    max_ids_per_table: Mapping[str, int] | None = None
    max_unique_ids_per_table: Mapping[str, int] | None = None
    allow_id_dropping: bool = False
    initialize_tables_on_host: bool = True
    enable_fast_table_initialization: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise RooftopError(f"config.{field.name}", value, "true or false")
            elif field.default is None and value is not None:
                if not isinstance(value, Mapping):
                    raise RooftopError(f"config.{field.name}", value, "a limit for each table named")
                for table, limit in value.items():
                    _whole(f"config.{field.name}.{table}", limit, 1, MOST_ROWS)
        _whole("config.max_ids_per_chip_per_sample", self.max_ids_per_chip_per_sample, 1, MOST_ROWS)

    @property
    def initialized_on_host(self) -> bool:
        """True if tables are initialised on the host and sent to the device."""
        return self.initialize_tables_on_host and not self.enable_fast_table_initialization


@dataclass(frozen=True, kw_only=True)
class Tables:
    """The embedding part of a model: ``tables`` and the ``features`` that look them up, in their order."""

    tables: tuple[EmbeddingTable, ...]
    features: tuple[Feature, ...]
    config: SparseCoreConfig = SparseCoreConfig()

    def __post_init__(self) -> None:
        for field, named in (("tables", self.tables), ("features", self.features)):
            if not named:
                raise RooftopError(field, "none", "at least one")
            seen = set[str]()
            for one in named:
                if one.name in seen:
                    raise RooftopError(field, one.name, "names that differ")
                seen.add(one.name)
        names = [table.name for table in self.tables]
        for feature in self.features:
            if feature.table not in names:
                raise unknown(f"features.{feature.name}.table", str(feature.table), names)
        used = {feature.table for feature in self.features}
        for name in names:
            if name not in used:
                raise RooftopError(f"tables.{name}", "no feature looks it up", "a table that some feature names")
        for field in ("max_ids_per_table", "max_unique_ids_per_table"):
            for name in getattr(self.config, field) or ():
                if name not in names:
                    raise unknown(f"config.{field}", str(name), names)

    def table(self, name: str) -> EmbeddingTable:
        """A table by its name. Raises RooftopError."""
        for table in self.tables:
            if table.name == name:
                return table
        raise unknown("table", name, [table.name for table in self.tables])

    def feature(self, name: str) -> Feature:
        """A feature by its name. Raises RooftopError."""
        for feature in self.features:
            if feature.name == name:
                return feature
        raise unknown("feature", name, [feature.name for feature in self.features])

    def features_of(self, table: str) -> tuple[Feature, ...]:
        """The features that look ``table`` up, in their order."""
        return tuple(feature for feature in self.features if feature.table == table)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that ``tables_from_json`` reads."""
        return {
            "config": _set_fields(self.config),
            "tables": {table.name: _set_fields(table) for table in self.tables},
            "features": {feature.name: _set_fields(feature) for feature in self.features},
        }


def _set_fields(part: Any) -> dict[str, Any]:
    """The fields of a part that are set, but its name; parameters stand next to the other fields."""
    entry: dict[str, Any] = {}
    for name, value in field_values(part).items():
        if name == "parameters":
            entry |= dict(value)
        elif name != "name" and value is not None:
            entry[name] = _set_fields(value) if is_dataclass(value) else value
    return entry
