"""Records: what is written is what the schema describes and what the reader takes; errors name path and value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import jsonschema
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from rooftop.core.errors import RooftopError
from rooftop.core.records import Record, derived, plain, read_record, schema

Network = Literal["ici", "dcn"]


@dataclass(frozen=True, kw_only=True)
class Part(Record):
    """A record within a record."""

    network: Network
    seconds: Mapping[Network, float] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if any(size < 0 for size in self.sizes):
            raise RooftopError("sizes", self.sizes, "sizes of at least 0")


@dataclass(frozen=True, kw_only=True)
class Whole(Record):
    """A record with every kind of field."""

    name: str
    count: int
    flag: bool = False
    windows: tuple[int | None, ...] = ()
    best: Part | None = None
    parts: tuple[Part, ...] = ()
    by_name: Mapping[str, Part] = field(default_factory=dict)

    @derived
    def total(self) -> int:
        """Sum of all sizes."""
        return sum(sum(part.sizes) for part in self.parts)

    @derived
    def worst(self) -> Part | None:
        """The last part."""
        return self.parts[-1] if self.parts else None


_PARTS = st.builds(
    Part,
    network=st.sampled_from(["ici", "dcn"]),
    seconds=st.dictionaries(st.sampled_from(["ici", "dcn"]), st.floats(0, 1e9)),
    sizes=st.lists(st.integers(0, 10**12), max_size=3).map(tuple),
)
_WHOLES = st.builds(
    Whole,
    name=st.text(max_size=5),
    count=st.integers(-(2**60), 2**60),
    flag=st.booleans(),
    windows=st.lists(st.none() | st.integers(1, 9), max_size=3).map(tuple),
    best=st.none() | _PARTS,
    parts=st.lists(_PARTS, max_size=2).map(tuple),
    by_name=st.dictionaries(st.text(max_size=3), _PARTS, max_size=2),
)


@given(_WHOLES)
def test_reading_inverts_writing(whole: Whole) -> None:
    data = json.loads(json.dumps(whole.to_json()))
    assert read_record(Whole, data, "whole") == whole
    assert data["total"] == whole.total


@given(_WHOLES)
def test_schema_accepts_what_is_written_and_requires_all_of_it(whole: Whole) -> None:
    data = json.loads(json.dumps(whole.to_json()))
    checker = jsonschema.Draft202012Validator(schema(Whole))
    checker.validate(data)
    for name in data:
        assert not checker.is_valid({key: value for key, value in data.items() if key != name})
    many = jsonschema.Draft202012Validator(schema(tuple[Whole, ...]))
    many.validate([data])
    assert not many.is_valid(data)


@given(_WHOLES, st.sampled_from(["name", "count", "flag", "windows", "best", "parts", "by_name"]))
def test_error_names_a_field_of_another_type(whole: Whole, name: str) -> None:
    with pytest.raises(RooftopError) as caught:
        read_record(Whole, whole.to_json() | {name: 1.5}, "whole")
    assert caught.value.field == f"whole {name}"
    assert caught.value.given == 1.5


_GOOD: dict[str, Any] = {"network": "ici"}


@pytest.mark.parametrize(
    ("changed", "field", "value", "accepted"),
    [
        ({"count": "two"}, "whole count", "two", "a whole number"),
        ({"windows": [1, "2"]}, "whole windows[1]", "2", "a whole number or null"),
        ({"best": 3}, "whole best", 3, "an object or null"),
        ({"best": {"network": "ib"}}, "whole best.network", "ib", "ici, dcn"),
        ({"parts": [_GOOD, {"network": None}]}, "whole parts[1].network", None, "ici, dcn"),
        ({"parts": [_GOOD, {}]}, "whole parts[1].network", None, "a value: this field is required"),
        ({"parts": {}}, "whole parts", {}, "a list"),
        ({"by_name": {"a": _GOOD, "b": {"network": "nvl"}}}, "whole by_name.b.network", "nvl", "ici, dcn"),
        ({"by_name": {"a": _GOOD | {"seconds": {"ib": 1}}}}, "whole by_name.a.seconds key", "ib", "ici, dcn"),
        ({"by_name": {"a": _GOOD | {"seconds": {"ici": "1"}}}}, "whole by_name.a.seconds.ici", "1", "a number"),
        ({"best": _GOOD | {"sizes": [-1]}}, "sizes", (-1,), "sizes of at least 0"),
    ],
)
def test_error_names_path_value_and_what_is_accepted(
    changed: dict[str, Any], field: str, value: object, accepted: str
) -> None:
    with pytest.raises(RooftopError) as caught:
        read_record(Whole, {"name": "x", "count": 1} | changed, "whole")
    assert (caught.value.field, caught.value.given, caught.value.accepted) == (field, value, accepted)


def test_error_names_a_missing_field_and_a_document_that_is_no_object() -> None:
    with pytest.raises(RooftopError, match=r"^whole count: got nothing; accepted: a value: this field is required$"):
        read_record(Whole, {"name": "x"}, "whole")
    with pytest.raises(RooftopError, match=r"^whole: got 3; accepted: an object$"):
        read_record(Whole, 3, "whole")
    with pytest.raises(RooftopError, match=r"^whole parts\[0\]: got 'x{80}\.\.\.'; accepted: an object$"):
        read_record(Whole, {"name": "x", "count": 1, "parts": ["x" * 1000]}, "whole")


def test_numpy_scalars_are_written_as_numbers_and_arrays_are_refused() -> None:
    data = plain({"a": np.float64(1.5), "b": np.int64(2), "c": np.bool_(True), "d": np.array(3.0), "e": (None, "x")})
    assert data == {"a": 1.5, "b": 2, "c": True, "d": 3.0, "e": [None, "x"]}
    assert [type(value) for value in data.values()] == [float, int, bool, float, list]
    with pytest.raises(TypeError, match="ndarray is not written as JSON"):
        plain({"a": np.zeros(2)})


@dataclass(frozen=True)
class Tokens(Record):
    """A record with a JSON form of its own."""

    count: int

    def to_json(self) -> dict[str, Any]:
        """The count in thousands."""
        return {"thousands": self.count // 1000}


def test_own_form_of_a_record_is_kept_within_other_values() -> None:
    assert plain({"tokens": (Tokens(5000),)}) == {"tokens": [{"thousands": 5}]}


@dataclass(frozen=True, kw_only=True)
class Closed(Record):
    """A record that refuses unknown keys, with types that are chosen between."""

    closed = True
    size: int | str | tuple[float, int] = 1

    @derived
    def text(self) -> str:
        """The size in words."""
        return str(self.size)


@pytest.mark.parametrize("size", [3, "all", (1.5, 2)])
def test_reader_takes_every_member_of_a_union(size: int | str | tuple[float, int]) -> None:
    record = Closed(size=size)
    assert read_record(Closed, json.loads(json.dumps(record.to_json())), "data") == record


def test_closed_record_refuses_unknown_keys_and_suggests_one() -> None:
    with pytest.raises(RooftopError, match=r"^data field: got 'sise'; accepted: did you mean size\? one of size$"):
        read_record(Closed, {"sise": 1}, "data")
    assert read_record(Part, {"network": "ici", "unknown": 1}, "part") == Part(network="ici")


def test_error_of_a_union_lists_its_members_and_of_a_pair_its_length() -> None:
    with pytest.raises(RooftopError, match=r"^data size: got True; accepted: a whole number or a string or a list$"):
        read_record(Closed, {"size": True}, "data")
    with pytest.raises(RooftopError, match=r"^data size: got \[1\]; accepted: a list of 2$"):
        read_record(Closed, {"size": [1]}, "data")


@dataclass(frozen=True, kw_only=True)
class Limited(Record):
    """A record whose types have limits of msgspec."""

    names: Annotated[tuple[str, ...], Meta(min_length=1)]
    share: float = 0.0


def test_reader_holds_limits_of_types_and_makes_floats_of_whole_numbers() -> None:
    with pytest.raises(RooftopError, match=r"^data: got \{'names': \[\]\}; accepted: Expected `array` of length >= 1"):
        read_record(Limited, {"names": []}, "data")
    share = read_record(Limited, {"names": ["x"], "share": 1}, "data").share
    assert type(share) is float
