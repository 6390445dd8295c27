"""Records: dataclasses whose JSON, JSON Schema and reader all follow from their fields.

A field is written under its own name. A ``derived`` property is written as well, and ignored by the reader. msgspec
reads and makes schemas; it is imported when that is asked for, as many commands only write.
"""

from __future__ import annotations

import re
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
        if isinstance(error.__cause__, RooftopError):
            raise error.__cause__ from None
        raise _read_error(str(error), data, name) from None


_MESSAGE = re.compile(r"(?P<text>.*?)(?: - at `(?:key` in `)?\$(?P<path>[^`]*)`)?", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(?P<field>.*)`")
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]|\[\.\.\.\]")


def _read_error(message: str, data: object, name: str) -> RooftopError:
    """A RooftopError from a message of msgspec, which names what is wrong and its path."""
    match = _MESSAGE.fullmatch(message)
    assert match is not None  # every string matches
    text, path = match["text"], match["path"] or ""
    field = f"{name} {path.lstrip('.')}".strip()
    if missing := _MISSING.fullmatch(text):
        dot = "." if path else ""
        return RooftopError(f"{field}{dot if path else ' '}{missing['field']}", None, "a value: this field is required")
    accepted = text[:1].lower() + text[1:].replace("`", "")
    return RooftopError(field, _at(data, path), accepted.removeprefix("expected ").partition(", got ")[0])


def _at(data: object, path: str) -> object:
    """The value at a path like ``.ledger[3].count``; the innermost one that the path names."""
    for step in _STEP.finditer(path):
        if isinstance(data, Mapping) and step["key"] in data:
            data = data[step["key"]]
        elif isinstance(data, list) and step["index"]:
            data = data[int(step["index"])]
    text = repr(data)
    return data if len(text) <= 80 else f"{text[:80]}..."


def schema(kind: type) -> dict[str, Any]:
    """The JSON Schema of a record: its fields and derived properties, and those of the records in them."""
    import msgspec

    kinds = list(dict.fromkeys(_records(kind)))
    properties = [
        (owner, name, get_type_hints(_function(member), include_extras=True)["return"])
        for owner in kinds
        for name, member in _derived(owner).items()
    ]
    schemas, components = msgspec.json.schema_components(
        [*kinds, *(hint for _, _, hint in properties)], ref_template="#/$defs/{name}"
    )
    for (owner, name, _), property_schema in zip(properties, schemas[len(kinds) :], strict=True):
        component = components[owner.__name__]
        component["properties"][name] = property_schema
        component["required"] = [*component.get("required", ()), name]
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
