"""Records: dataclasses whose JSON, JSON Schema and reader all follow from their fields.

A field is written under its own name. A ``derived`` property is written as well, and ignored by the reader. msgspec
reads and makes schemas; it is imported when that is asked for, as many commands only write.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, cached_property
from typing import Any, Generic, TypeVar, get_type_hints

from rooftop.core.errors import RooftopError

T = TypeVar("T")


class derived(cached_property[T], Generic[T]):
    """A property that is written to JSON next to the fields. It is computed once."""


class Record:
    """Base of frozen dataclasses that are written as JSON."""

    def to_json(self) -> dict[str, Any]:
        """The fields and derived properties as plain JSON values."""
        data: dict[str, Any] = plain(self)
        return data


def plain(value: Any) -> Any:
    """``value`` as plain JSON values: dicts, lists, strings, numbers, booleans and None.

    Dataclasses become objects with their fields and derived properties; a NumPy scalar becomes a number. Raises
    TypeError for anything else, arrays with several values included.
    """
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if isinstance(value, Record) and kind.to_json is not Record.to_json:
        return value.to_json()
    if is_dataclass(kind):
        return {name: plain(getattr(value, name)) for name in _written(kind)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    if isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{kind.__name__} is not written as JSON")


@cache
def _written(kind: type) -> tuple[str, ...]:
    """Names of the JSON keys of a dataclass, fields first."""
    return (*(field.name for field in fields(kind)), *_derived(kind))


@cache
def _derived(kind: type) -> dict[str, derived[Any]]:
    """Derived properties of a class by name, those of its bases first."""
    members = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return {name: member for name, member in members.items() if isinstance(member, derived)}


def read_record(kind: type[T], data: object, name: str, *, strict: bool = True) -> T:
    """The record of type ``kind`` in plain JSON values.

    ``name`` is how messages call the data. Raises RooftopError naming the field that is missing or of another type,
    the value in it, and what is accepted there.
    """
    import msgspec

    try:
        return msgspec.convert(data, kind, strict=strict)
    except msgspec.ValidationError as error:
        raise _read_error(str(error), kind, data, name) from None


_MESSAGE = re.compile(r"(?P<text>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`")
_STEP = re.compile(r"\.(?P<field>[^.\[]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")
#: JSON types by the names in messages of msgspec.
_TYPES = {
    "int": "a whole number", "float": "a number", "str": "a string", "bool": "true or false", "object": "an object",
    "array": "a list", "null": "null",
}  # fmt: skip


def _read_error(message: str, kind: Any, data: Any, name: str) -> RooftopError:
    """A RooftopError from a message of msgspec, which names what is wrong and the path of it."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None  # every string matches
    path, dot = name, " "
    for step in _STEP.finditer(match["path"] or ""):
        if step["field"]:
            kind, data, path = _fields(kind)[step["field"]], data[step["field"]], f"{path}{dot}{step['field']}"
        elif step["index"]:
            entries, index = _arguments(kind), int(step["index"])
            kind, data, path = entries[min(index, len(entries) - 1)], data[index], f"{path}[{index}]"
        else:
            _, kind = _arguments(kind)
            key, data = next((key, item) for key, item in data.items() if not _accepts(kind, item))
            path = f"{path}{dot}{key}"
        dot = "."
    if match["key"]:
        kind, _ = _arguments(kind)
        path, data = f"{path} key", next(key for key in data if not _accepts(kind, key))
    if missing := _MISSING.fullmatch(match["text"]):
        return RooftopError(f"{path}{dot}{missing['field']}", None, "a value: this field is required")
    expected = match["text"].removeprefix("Expected ").partition(", got ")[0].replace("`", "").split(" | ")
    accepted = ", ".join(_choices(kind)) or " or ".join(_TYPES.get(word, word) for word in expected)
    return RooftopError(path, data if len(repr(data)) <= 80 else f"{str(data)[:80]}...", accepted)


def _accepts(kind: Any, value: object) -> bool:
    import msgspec

    try:
        msgspec.convert(value, kind, strict=True)
    except msgspec.ValidationError:
        return False
    except RooftopError:
        return True  # the value has the right type; the message is about another one
    return True


def _alternatives(kind: Any) -> list[Any]:
    """Members of a union, None left out; a type that is no union alone."""
    members = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    return [member for member in members if member is not type(None)]


def _fields(kind: Any) -> dict[str, Any]:
    """Types of the fields of the dataclass in a type."""
    return next(get_type_hints(member) for member in _alternatives(kind) if is_dataclass(member))


def _arguments(kind: Any) -> tuple[Any, ...]:
    """Types of the entries of the container in a type."""
    arguments = next(typing.get_args(member) for member in _alternatives(kind) if typing.get_args(member))
    return tuple(argument for argument in arguments if argument is not ...)


def _choices(kind: Any) -> Iterator[str]:
    """Values of the Literals in a type."""
    for member in _alternatives(kind):
        if typing.get_origin(member) is typing.Literal:
            yield from map(str, typing.get_args(member))


def schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a record, or of a type like ``tuple[Row, ...]``, as it is written.

    Fields and derived properties of all records are required, though ``read_record`` takes fields' defaults.
    """
    import msgspec

    kinds = list(dict.fromkeys(_records(kind)))
    properties = [
        (owner, name, get_type_hints(_function(member))["return"])
        for owner in kinds
        for name, member in _derived(owner).items()
    ]
    schemas, components = msgspec.json.schema_components(
        [kind, *kinds, *(hint for _, _, hint in properties)], ref_template="#/$defs/{name}"
    )
    for (owner, name, _), property_schema in zip(properties, schemas[len(kinds) + 1 :], strict=True):
        component = components[owner.__name__]
        component["properties"][name] = property_schema
    for owner in kinds:
        components[owner.__name__]["required"] = list(_written(owner))
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schemas[0], "$defs": components}


def _function(member: derived[Any]) -> Callable[..., Any]:
    return member.func


def _records(hint: Any) -> Iterator[type]:
    """Dataclasses that a type mentions, itself first, each with those that its own fields mention."""
    seen: dict[Any, None] = {}
    waiting = [hint]
    while waiting:
        item = waiting.pop(0)
        waiting += typing.get_args(item)
        if is_dataclass(item) and isinstance(item, type) and item not in seen:
            seen[item] = None
            hints = get_type_hints(item)
            waiting += [hints[field.name] for field in fields(item)]
            waiting += [get_type_hints(_function(member))["return"] for member in _derived(item).values()]
    return iter(typing.cast("list[type]", list(seen)))
