"""Damaged inputs, drawn by a seed: of JSON documents, of texts and of bytes."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

#: Values of every JSON type, and those at which arithmetic breaks.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**9, 2**31, 2**63, 10**40, 0.0, 0.5, -0.5, 1e-300, 1e308, float("nan"),
    float("inf"), "", "x", "0", "-1", "1e400", "nan", "\x1b[31mred", "a\nb", "../../etc/passwd", "\ud800", "x" * 5000,
    [], [[]], [0], [None], ["x"], [1] * 300, {}, {"": 0}, {"a": {"b": [1]}},
)  # fmt: skip
#: What breaks readers of texts, whatever the format.
BOMBS = (b"[" * 100_000, b'{"a":' * 50_000, b"(" * 200, b"9" * 6000, b"\xff\xfe", b"\x00", b"1e999", b"-", b"\x1b[31m")


def mutate_json(text: bytes, draw: random.Random) -> bytes:
    """The document with one to three of its values replaced, removed, repeated, moved or scaled."""
    data = json.loads(text)
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        data = _changed(data, draw)
    return json.dumps(data).encode()


def _changed(data: Any, draw: random.Random) -> Any:
    places = list(_places(data))
    if not places:
        return _value(draw)
    holder, key = draw.choice(places)
    match draw.randrange(6):
        case 0 | 1:
            holder[key] = _value(draw)
        case 2:
            del holder[key]
        case 3:
            other, place = draw.choice(places)
            try:
                holder[key], other[place] = other[place], holder[key]
            except (KeyError, IndexError):
                holder[key] = _value(draw)
            try:
                json.dumps(data)
            except (ValueError, RecursionError):
                # A part was moved into itself.
                return _value(draw)
        case 4:
            value = holder[key]
            if isinstance(value, (int, float)):
                holder[key] = draw.choice((value * 0, -value, value * 1000, value + 1, value / 3, str(value), [value]))
            elif isinstance(value, str):
                at = draw.randint(0, len(value))
                holder[key] = value[:at] + draw.choice(("", "x", ":", ",", "=", "0", "\n", " ")) + value[at + 1 :]
            else:
                holder[key] = [value]
        case _:
            if isinstance(holder, dict):
                holder[draw.choice(("", "x", f"{key}x", "kind", "schema"))] = holder.pop(key)
            else:
                holder += holder[key : key + 1] * draw.choice((1, 2, 50))
    return data


def _value(draw: random.Random) -> Any:
    return copy.deepcopy(draw.choice(VALUES))


def _places(data: Any) -> Any:
    """Pairs of a dict or list and a key in it."""
    waiting = [data]
    while waiting:
        holder = waiting.pop()
        keys = list(holder) if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in keys:
            yield holder, key
            waiting.append(holder[key])


def mutate_bytes(content: bytes, draw: random.Random) -> bytes:
    """The content with bytes flipped, cut, repeated, overwritten or inserted."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 5))):
        at = draw.randint(0, len(data))
        to = min(len(data), at + draw.choice((1, 2, 8, 100)))
        match draw.randrange(7):
            case 0 if data:
                data[min(at, len(data) - 1)] ^= 1 << draw.randrange(8)
            case 1:
                del data[at:to]
            case 2:
                del data[at:]
            case 3:
                data[at:at] = data[at:to] * draw.choice((1, 3, 100))
            case 4:
                data[at:to] = draw.randbytes(to - at)
            case 5:
                data[at:to] = draw.choice((b"\x00", b"\xff")) * (to - at)
            case _:
                data[at:at] = draw.choice(BOMBS)
    return bytes(data)


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Three in four of JSON documents, and of lines that are some, are changed as values; all others as bytes."""
    if content[:1] in (b"{", b"[") and draw.randrange(4):
        lines = content.splitlines(keepends=True)
        at = draw.randrange(len(lines))
        lines[at] = mutate_json(lines[at], draw) + b"\n"
        return b"".join(lines)
    return mutate_bytes(content, draw)
