"""Tables from a file: ``tables.toml``, or the JSON that a plan carries.

[tables.user]
vocabulary = 1_000_000
width = 32
combiner = "mean"
optimizer = {kind = "adagrad", learning_rate = 0.05}

[features.user_id]
table = "user"

[config]
allow_id_dropping = true
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.files import read_text
from rooftop.models.embedding_tables.tables import (
    EmbeddingTable,
    Feature,
    Initializer,
    Quantization,
    SparseCoreConfig,
    TableOptimizer,
    Tables,
)

_SECTIONS = ("config", "tables", "features")


def load_tables(path: Path) -> Tables:
    """The tables, features and config of a TOML file. Raises RooftopError, naming the field, on anything wrong."""
    try:
        text = read_text(path, encoding="utf-8-sig")
    except OSError as error:
        raise RooftopError("tables", str(path), f"a TOML file that can be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise RooftopError("tables", str(path), "a TOML file (this is no UTF-8)") from None
    return tables_from_toml(text, str(path))


def tables_from_toml(text: str, name: str = "tables") -> Tables:
    """As ``load_tables``, of the text itself; ``name`` is what an error calls it."""
    try:
        data = tomllib.loads(text)
    # Numbers of thousands of digits are a ValueError of Python's.
    except (ValueError, RecursionError) as error:
        raise RooftopError("tables", name, f"TOML ({error})".replace("\n", " ")) from None
    return tables_from_json(data)


def tables_from_json(data: Mapping[str, Any]) -> Tables:
    """Tables of the mapping that ``Tables.to_json`` made or that a TOML file holds. Raises RooftopError."""
    for section in data:
        if section not in _SECTIONS:
            raise unknown("tables file", str(section), _SECTIONS)
    sections = {name: _mapping(name, data.get(name, {})) for name in _SECTIONS}
    config = _mapping("config", sections["config"])
    _known("config", config, SparseCoreConfig)
    return Tables(
        config=SparseCoreConfig(**config),
        tables=tuple(_table(name, fields) for name, fields in sections["tables"].items()),
        features=tuple(_feature(name, fields) for name, fields in sections["features"].items()),
    )


def _mapping(field: str, value: object) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RooftopError(field, value, "a section (a mapping of names to values)")
    return dict(value)


def _known(field: str, mapping: Mapping[str, Any], kind: type[Any], needed: tuple[str, ...] = ()) -> None:
    names = [one.name for one in dataclasses.fields(kind) if one.name != "name"]
    for name in mapping:
        if name not in names:
            raise unknown(field, str(name), names)
    for name in needed:
        if name not in mapping:
            raise RooftopError(f"{field}.{name}", None, "a value: it has no default")


def _table(name: str, value: object) -> EmbeddingTable:
    where = f"tables.{name}"
    fields = _mapping(where, value)
    _known(where, fields, EmbeddingTable, ("vocabulary", "width"))
    if "quantization" in fields:
        fields["quantization"] = _mapping(f"{where}.quantization", fields["quantization"])
        _known(f"{where}.quantization", fields["quantization"], Quantization, ("low", "high"))
    arguments = {
        "initializer": (Initializer, lambda value: _kind(f"{where}.initializer", value, ())),
        "optimizer": (TableOptimizer, lambda value: _kind(f"{where}.optimizer", value, ("learning_rate", "clip"))),
        "quantization": (Quantization, dict),
    }
    for part, (kind, read) in arguments.items():
        if part in fields:
            fields[part] = _in_table(where, kind, read(fields[part]))
    return EmbeddingTable(name=name, **fields)


def _in_table(where: str, kind: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call ``cls`` with these arguments; name the table in any error."""
    try:
        return kind(**arguments)
    except RooftopError as error:
        raise RooftopError(f"{where}.{error.field}", error.given, error.accepted) from None


def _kind(field: str, value: object, own: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of an Initializer or a TableOptimizer: a bare name, or its kind and parameters side by side."""
    if isinstance(value, str):
        return {"kind": value}
    fields = _mapping(field, value)
    if not isinstance(fields.get("kind"), str):
        raise RooftopError(f"{field}.kind", fields.get("kind"), "its kind, a name")
    arguments: dict[str, Any] = {"kind": fields.pop("kind")}
    arguments.update({name: fields.pop(name) for name in own if name in fields})
    return arguments | {"parameters": tuple(fields.items())}


def _feature(name: str, value: object) -> Feature:
    where = f"features.{name}"
    fields = _mapping(where, value)
    _known(where, fields, Feature, ("table",))
    return Feature(name=name, **fields)
