"""Records: dataclasses whose JSON, JSON Schema and reader all follow from their fields.

A field is written under its own name. A ``derived`` property is written as well, and ignored by the reader. The types
of fields are imported at run time, and made of JSON's types, literals, unions, tuples, lists, mappings and dataclasses.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Generic, TypeVar, get_type_hints

from rooftop.core.errors import RooftopError, unknown

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class AtLeast:
    """The least value of a number, for modules that do not import msgspec."""

    ge: float


#: A change relative to what it is compared with: -1 leaves nothing.
RelativeChange = typing.Annotated[float, AtLeast(ge=-1)]


class derived(cached_property[T], Generic[T]):
    """A property that is written to JSON next to the fields. It is computed once."""


class Record:
    """Base of frozen dataclasses that are written as JSON. Of a ``closed`` one the reader refuses unknown keys.

    It ignores ``retired`` keys, which older releases wrote. ``sparse`` names fields that are not written where they
    are None.
    """

    closed: ClassVar[bool] = False
    retired: ClassVar[frozenset[str]] = frozenset()
    sparse: ClassVar[frozenset[str]] = frozenset()

    def to_json(self) -> dict[str, object]:
        """The fields and derived properties as plain JSON values."""
        return _plain_fields(self)


def field_values(value: Any, kind: Any = None) -> dict[str, Any]:
    """Fields of the dataclass ``kind`` by name, with what ``value`` has under these names: not copied.

    Without a ``kind`` the fields are those of ``value`` itself.
    """
    return {field.name: getattr(value, field.name) for field in fields(kind or value)}


def plain(value: Any) -> Any:
    """``value`` as plain JSON values: dicts, lists, strings, numbers, booleans and None.

    Dataclasses become objects with their fields and derived properties; a NumPy scalar becomes a number. Raises
    TypeError for anything else, arrays with several values included.
    """
    kind = type(value)
    if value is None or kind in (str, bool, int, float):
        return value
    if isinstance(value, Record):
        return value.to_json()
    if is_dataclass(kind):
        return _plain_fields(value)
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if hasattr(value, "item") and getattr(value, "ndim", 0) == 0:
        return value.item()
    if isinstance(value, (str, int, float)):
        return value
    raise TypeError(f"{kind.__name__} is not written as JSON")


def _plain_fields(value: object) -> dict[str, Any]:
    kind: Any = type(value)
    data = {name: plain(getattr(value, name)) for name in _written(kind)}
    for name in getattr(kind, "sparse", ()):
        if data[name] is None:
            del data[name]
    return data


@cache
def _written(kind: type) -> tuple[str, ...]:
    """Names of the JSON keys of a dataclass, fields first."""
    return (*(field.name for field in fields(kind)), *_derived(kind))


@cache
def _derived(kind: type) -> dict[str, derived[Any]]:
    """Derived properties of a class by name, those of its bases first."""
    members = {name: member for base in reversed(kind.__mro__) for name, member in vars(base).items()}
    return {name: member for name, member in members.items() if isinstance(member, derived)}


def read_record(kind: type[T], data: object, name: str, *, amounts: bool = False) -> T:
    """The record of type ``kind`` in plain JSON values; a type like ``tuple[Row, ...]`` is read too.

    ``name`` is how messages call the data. Raises RooftopError naming the field that is missing or of another type,
    the value in it, and what is accepted there. Keys without a field are ignored, except in ``closed`` records. The
    numbers of ``amounts``, such as those of a plan, are finite, none is negative unless its type has another limit, and
    whole ones have 64 bits.
    """
    import msgspec  # not needed by commands that read no records

    described: Any = kind
    if amounts or any(getattr(owner, "closed", False) for owner in _records(described)):
        _check(kind, data, (name,), amounts)
    try:
        record: T = msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        _check(kind, data, (name,), amounts)
        raise RooftopError(name, _shortened(data), str(error)) from None
    return record


def _check(kind: Any, value: Any, path: tuple[str, ...], amounts: bool) -> None:
    """Raise RooftopError for the first part of ``value`` that is not of its type in ``kind``.

    msgspec names neither the keys of mappings nor the values of literals, and knows no closed dataclasses and no
    amounts. ``path`` leads to the value: the name of the data, then '.FIELD' or '[INDEX]'.
    """
    for member in _members(kind):
        if member.takes(value):
            break
    else:
        accepted = " or ".join(dict.fromkeys(member.words for member in _members(kind)))
        raise RooftopError(_join(path), _shortened(value), accepted)
    if member.is_single:
        if not amounts or type(value) not in (int, float) or member.least <= value <= member.most:
            return
        raise RooftopError(_join(path), value, f"{member.words} from {member.least:g} to {member.most:g}")
    for name in value if member.is_closed else ():
        if name not in _written(member.kind) and name not in getattr(member.kind, "retired", ()):
            raise unknown(_join((*path, ".field")), name, member.fields)
    if member.length is not None and member.length != len(value):
        raise RooftopError(_join(path), value, f"a list of {member.length}")
    parts = list(member.parts(value))
    for place, part_kind, part in parts:
        # Data of another kind is refused by its kind, and not by the first field that it lacks.
        if all(choice.literals for choice in _members(part_kind)):
            _check(part_kind, part, (*path, place), amounts)
    for name in member.required:
        if name not in value:
            raise RooftopError(_join((*path, f".{name}")), None, "a value: this field is required")
    for place, part_kind, part in parts:
        _check(part_kind, part, (*path, place), amounts)


def _shortened(value: object) -> object:
    return value if len(repr(value)) <= 80 else f"{str(value)[:80]}..."


_OBJECTS = (dict, Mapping)
_ARRAYS = (tuple, list, Sequence, frozenset)
#: The largest number in a record of amounts: figures of the largest plans are far below it.
_LARGEST, _LARGEST_WHOLE = 1e36, 2**63 - 1
#: Python types by the JSON type that messages name; a float takes whole numbers too.
_JSON_TYPES: dict[object, tuple[str, tuple[type, ...]]] = {
    str: ("a string", (str,)), int: ("a whole number", (int,)), float: ("a number", (int, float)),
    bool: ("true or false", (bool,)), type(None): ("null", (type(None),)), Any: ("any value", (object,)),
    object: ("any value", (object,)), **dict.fromkeys(_OBJECTS, ("an object", (Mapping,))),
    **dict.fromkeys(_ARRAYS, ("a list", (list, tuple))),
}  # fmt: skip


class _Member:
    """One member of a union, or a type that is not a union. Error messages name its values with ``words``."""

    def __init__(self, kind: Any) -> None:
        # Limits of msgspec's Meta, whatever else the type is annotated with.
        kind, *notes = typing.get_args(kind) if typing.get_origin(kind) is typing.Annotated else (kind,)
        limits = {name: limit for note in notes for name in ("ge", "le") if (limit := getattr(note, name, None))}
        self.least, self.most = limits.get("ge", 0), limits.get("le", _LARGEST_WHOLE if kind is int else _LARGEST)
        self.kind, self.container, self.arguments = kind, typing.get_origin(kind), typing.get_args(kind)
        self.literals = self.arguments if self.container is typing.Literal else ()
        self.words, self.types = ", ".join(map(str, self.literals)), tuple[type, ...]()
        if not self.literals:
            self.words, self.types = _JSON_TYPES[dict if is_dataclass(kind) else self.container or kind]
        is_fixed = self.container is tuple and self.arguments[-1] is not ...
        self.length = len(self.arguments) if is_fixed else None
        own_fields = fields(kind) if is_dataclass(kind) else ()
        hints = get_type_hints(kind, include_extras=True) if own_fields else {}
        self.is_closed = getattr(kind, "closed", False)
        self.is_single = not own_fields and self.container not in (*_OBJECTS, *_ARRAYS)
        self.fields = {field.name: hints[field.name] for field in own_fields}
        self.required = [
            field.name for field in own_fields if field.default is MISSING and field.default_factory is MISSING
        ]

    def takes(self, value: object) -> bool:
        """True if the value is one of the literals, or of the JSON type. A bool is an int to Python only."""
        if self.literals:
            return value in self.literals
        return isinstance(value, self.types) and (type(value) is not bool or int not in self.types)

    def parts(self, value: Any) -> Iterator[tuple[str, Any, Any]]:
        """The place, type and value of each part of a value that the member takes."""
        if self.fields:
            yield from ((f".{name}", hint, value[name]) for name, hint in self.fields.items() if name in value)
        elif self.container in _OBJECTS:
            keys, items = self.arguments
            for key, item in value.items():
                yield " key", keys, key
                yield f".{key}", items, item
        elif self.container in _ARRAYS:
            kinds = self.arguments if self.length else self.arguments[:1] * len(value)
            yield from ((f"[{index}]", *part) for index, part in enumerate(zip(kinds, value, strict=True)))


@cache
def _members(kind: Any) -> tuple[_Member, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return tuple(_Member(member) for member in (typing.get_args(kind) if is_union else (kind,)))


def _join(path: tuple[str, ...]) -> str:
    """A path in words: 'plan mesh.axes', 'plan[3].count'."""
    name, rest = path[0], "".join(path[1:])
    return f"{name} {rest[1:]}" if rest.startswith(".") else name + rest


def schema(kind: Any) -> dict[str, Any]:
    """The JSON Schema of a record, or of a type like ``tuple[Row, ...]``, as it is written.

    Fields and derived properties of all records are required but sparse ones, though ``read_record`` takes fields'
    defaults.
    """
    import msgspec  # slow to import, and only schemas need it

    kinds = _records(kind)
    properties = [
        (owner, name, get_type_hints(member.func, include_extras=True)["return"])
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
        sparse = getattr(owner, "sparse", ())
        components[owner.__name__]["required"] = [name for name in _written(owner) if name not in sparse]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schemas[0], "$defs": components}


@cache
def _records(hint: Any) -> tuple[Any, ...]:
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
            waiting += [get_type_hints(member.func)["return"] for member in _derived(item).values()]
    return tuple(seen)
