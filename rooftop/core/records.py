"""Records: dataclasses whose JSON, JSON Schema and reader all follow from their fields.

A field is written under its own name. A ``derived`` property is written as well, and ignored by the reader. The types
of fields are imported at run time, and made of JSON's types, literals, unions, tuples, lists, mappings and dataclasses.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping, Sequence
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

    ``sparse`` names fields that are not written where they are None.
    """

    closed: ClassVar[bool] = False
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
    record: T = _read(kind, data, (name,), amounts)
    return record


def _read(kind: Any, value: Any, path: tuple[str, ...], amounts: bool) -> Any:
    """``value`` as a ``kind``. ``path`` leads to it: the name of the data, then '.FIELD' or '[INDEX]'."""
    members = _members(kind)
    for member in members:
        if member.takes(value):
            if amounts and type(value) in (int, float):
                _check_number(member, value, path)
            return _convert(member, value, path, amounts)
    accepted = " or ".join(dict.fromkeys(member.words for member in members))
    raise RooftopError(_join(path), value if len(repr(value)) <= 80 else f"{str(value)[:80]}...", accepted)


#: The largest number in a record of amounts: figures of the largest plans are far below it.
_LARGEST, _LARGEST_WHOLE = 1e36, 2**63 - 1


def _check_number(member: _Member, value: float, path: tuple[str, ...]) -> None:
    """Raise RooftopError for an amount that is not finite, or outside of what its field takes."""
    least = 0.0 if member.least is None else member.least
    most = min(_LARGEST_WHOLE if member.kind is int else _LARGEST, _LARGEST if member.most is None else member.most)
    if not least <= value <= most:
        raise RooftopError(_join(path), value, f"{member.words} from {least:g} to {most:g}")


def _convert(member: _Member, value: Any, path: tuple[str, ...], amounts: bool) -> Any:
    """``value``, whose JSON type fits, as the type of ``member``."""
    if member.is_record:
        return _convert_record(member.kind, value, path, amounts)
    if member.container in _OBJECTS:
        keys, items = member.arguments
        return {
            _read(keys, key, (*path, " key"), amounts): _read(items, item, (*path, f".{key}"), amounts)
            for key, item in value.items()
        }
    if member.container in _ARRAYS:
        kinds = member.arguments
        if member.container is not tuple or kinds[1:] == (...,):
            kinds = kinds[:1] * len(value)
        elif len(value) != len(kinds):
            raise RooftopError(_join(path), value, f"a list of {len(kinds)}")
        pairs = enumerate(zip(kinds, value, strict=True))
        entries = (_read(kind, item, (*path, f"[{index}]"), amounts) for index, (kind, item) in pairs)
        return (list if member.container in (list, Sequence) else member.container)(entries)
    return value


def _convert_record(kind: type, value: Mapping[str, object], path: tuple[str, ...], amounts: bool) -> object:
    hints, arguments = _hints(kind), dict[str, object]()
    if getattr(kind, "closed", False):
        for name in value:
            if name not in _written(kind):
                raise unknown(_join((*path, ".field")), name, (field.name for field in fields(kind)))
    for field in fields(kind):
        if field.name in value:
            place = (*path, f".{field.name}")
            arguments[field.name] = _read(hints[field.name], value[field.name], place, amounts)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise RooftopError(_join((*path, f".{field.name}")), None, "a value: this field is required")
    record: object = kind(**arguments)
    return record


_OBJECTS = (dict, Mapping)
_ARRAYS = (tuple, list, Sequence, frozenset)
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
        self.least: float | None = None
        self.most: float | None = None
        while typing.get_origin(kind) is typing.Annotated:
            kind, *notes = typing.get_args(kind)
            # Limits of msgspec's Meta, whatever else the type is annotated with.
            for note in notes:
                self.least = getattr(note, "ge", self.least)
                self.most = getattr(note, "le", self.most)
        self.kind, self.container, self.arguments = kind, typing.get_origin(kind), typing.get_args(kind)
        self.is_record = is_dataclass(kind)
        self.literals = self.arguments if self.container is typing.Literal else ()
        self.words = ", ".join(map(str, self.literals))
        self.types: tuple[type, ...] = ()
        if not self.literals:
            self.words, self.types = _JSON_TYPES[dict if self.is_record else self.container or kind]

    def takes(self, value: object) -> bool:
        """True if the value is one of the literals, or of the JSON type. A bool is an int to Python only."""
        if self.literals:
            return value in self.literals
        return isinstance(value, self.types) and (type(value) is not bool or int not in self.types)


@cache
def _members(kind: Any) -> tuple[_Member, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return tuple(_Member(member) for member in (typing.get_args(kind) if is_union else (kind,)))


def _join(path: tuple[str, ...]) -> str:
    """A path in words: 'plan mesh.axes', 'plan[3].count'."""
    name, rest = path[0], "".join(path[1:])
    return f"{name} {rest[1:]}" if rest.startswith(".") else name + rest


@cache
def _hints(kind: type) -> Mapping[str, Any]:
    """Types of the fields of a dataclass by name, with the limits of numbers."""
    return get_type_hints(kind, include_extras=True)


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


def _records(hint: Any) -> list[Any]:
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
    return list(seen)
