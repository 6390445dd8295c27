"""The published OpenAPI document, and requests read by it: what it says is what is accepted."""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from rooftop import __version__
from rooftop.core.errors import RooftopError

_KINDS: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "number": (int, float),
    "integer": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
    "null": type(None),
}
_CLIPPED = 60


@cache
def document() -> Mapping[str, Any]:
    """The OpenAPI document of the server."""
    document: dict[str, Any] = json.loads(
        files("rooftop.serve.api").joinpath("openapi.json").read_text(encoding="utf-8")
    )
    document["info"]["version"] = __version__
    return document


def read_body(body: bytes, name: str) -> dict[str, Any]:
    """The request in ``body``, of the published schema ``name``; whole numbers are ints, and nulls are left out.

    Raises RooftopError naming the field (``messages[0].role``) that is wrong.
    """
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if "\\u" in text:
            # Half a surrogate pair is a string that has no UTF-8.
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RooftopError("body", "half a surrogate pair", "JSON whose strings are Unicode") from None
    except ValueError as error:
        body_text = _clip(body.decode("utf-8", errors="replace"))
        raise RooftopError("body", body_text, f"JSON in UTF-8 ({error})") from None
    except RecursionError:
        raise RooftopError("body", "JSON that is nested too deeply", "fewer levels") from None
    read: dict[str, Any] = _read(value, document()["components"]["schemas"][name], "")
    return read


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no number of JSON")


def _read(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    """``value`` if ``schema`` allows it. The keywords of JSON Schema that the document uses for requests."""
    if "$ref" in schema:
        return _read(value, document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]], where)
    if "anyOf" in schema:
        return _read_any(value, schema["anyOf"], where)
    kinds = schema.get("type", tuple(_KINDS))
    kinds = (kinds,) if isinstance(kinds, str) else kinds
    if not any(_is(value, kind) for kind in kinds) or ("enum" in schema and value not in schema["enum"]):
        raise _wrong(where, value, _accepted(schema))
    if isinstance(value, dict):
        return _read_object(value, schema, where)
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            raise _wrong(where, f"{len(value)} items", _accepted(schema))
        items = schema.get("items", {})
        if items.get("type") == "integer" and all(type(item) is int for item in value):
            return _read_ids(value, items, where)
        return [_read(item, items, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, str) and len(value) < schema.get("minLength", 0):
        raise _wrong(where, value, _accepted(schema))
    if _is(value, "number") and not _within(value, schema):
        raise _wrong(where, value, _accepted(schema))
    return int(value) if "integer" in kinds and isinstance(value, float) else value


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _KINDS[kind])


def _within(value: float, schema: Mapping[str, Any]) -> bool:
    least, above, most = (schema.get(name) for name in ("minimum", "exclusiveMinimum", "maximum"))
    return (
        (least is None or value >= least) and (above is None or value > above) and (most is None or value <= most)
    ) and math.isfinite(value)


def _read_ids(values: list[int], items: Mapping[str, Any], where: str) -> list[int]:
    """A long list of whole numbers at once."""
    if values and not (_within(min(values), items) and _within(max(values), items)):
        index = next(index for index, value in enumerate(values) if not _within(value, items))
        raise _wrong(f"{where}[{index}]", values[index], _accepted(items))
    return values


def _read_object(value: dict[str, Any], schema: Mapping[str, Any], where: str) -> dict[str, Any]:
    known, others = schema.get("properties", {}), schema.get("additionalProperties", True)
    dot = f"{where}." if where else ""
    result = dict[str, Any]()
    for name, item in value.items():
        if "propertyNames" in schema and not re.search(schema["propertyNames"]["pattern"], name):
            raise _wrong(where, name, f"names that match {schema['propertyNames']['pattern']}")
        if name in known:
            read = _read(item, known[name], f"{dot}{name}")
            if read is not None:
                result[name] = read
        elif others is False:
            close = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
            hint = f"did you mean {' or '.join(close)}? " if close else ""
            raise RooftopError(f"{dot}{_clip(name)}", _clip(item), f"{hint}one of {', '.join(known)}")
        else:
            result[name] = item if others is True else _read(item, others, f"{dot}{_clip(name)}")
    # After what is there and wrong: a part of another type lacks what this one has.
    for name in schema.get("required", ()):
        if name not in value:
            raise RooftopError(f"{dot}{name}", None, _accepted(known[name]))
    return result


def _read_any(value: Any, schemas: list[Mapping[str, Any]], where: str) -> Any:
    errors = []
    for schema in schemas:
        try:
            return _read(value, schema, where)
        except RooftopError as error:
            errors.append(error)
    # What is wrong deep inside, and far along, says more than that none of several fits.
    deepest = max(errors, key=lambda error: (len(error.field), error.field))
    if deepest.field != where and isinstance(value, dict | list):
        raise deepest
    raise _wrong(where, value, " or ".join(dict.fromkeys(error.accepted for error in errors)))


def _accepted(schema: Mapping[str, Any]) -> str:
    """Describe in words what a schema accepts."""
    if "$ref" in schema:
        return _accepted(document()["components"]["schemas"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return " or ".join(_accepted(item) for item in schema["anyOf"])
    if "enum" in schema:
        return "one of " + ", ".join(json.dumps(item) for item in schema["enum"])
    kinds = schema.get("type", "a value")
    words = [kinds] if isinstance(kinds, str) else list(kinds)
    if words[0] == "array":
        least, most = schema.get("minItems"), schema.get("maxItems")
        size = f" of {least or 0} to {most} items" if most else (f" of {least} items or more" if least else "")
        words[0] = f"an array{size} of {_accepted(schema.get('items', {}))}"
    elif words[0] in ("number", "integer"):
        low = f"from {schema['minimum']:,}" if "minimum" in schema else f"above {schema.get('exclusiveMinimum')}"
        words[0] = f"{words[0]} {low}" + (f" to {schema['maximum']:,}" if "maximum" in schema else "")
    elif words[0] == "string" and schema.get("minLength"):
        words[0] = "a string that is not empty"
    return " or ".join(words)


def _wrong(where: str, value: object, accepted: str) -> RooftopError:
    return RooftopError(where or "body", _clip(value), accepted)


def _clip(value: object) -> object:
    """``value``, short enough to be repeated in a message."""
    shown = value if isinstance(value, str) else repr(value)
    return value if len(shown) <= _CLIPPED else f"{shown[:_CLIPPED]}..."
