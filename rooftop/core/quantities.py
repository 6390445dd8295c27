"""Quantities as people write and read them: SI and binary suffixes, dtypes and their bytes."""

from __future__ import annotations

import math
import re
from decimal import Decimal

from rooftop.core.errors import RooftopError, unknown

#: Bytes of one element, by dtype name. Two of 4 bits share a byte.
DTYPE_BYTES: dict[str, float] = {
    "bf16": 2.0,
    "f32": 4.0,
    "f16": 2.0,
    "int8": 1.0,
    "int4": 0.5,
    "f8_e4m3": 1.0,
    "f8_e5m2": 1.0,
    "f4_e2m1": 0.5,
}

#: Bytes of one element of arrays that are not multiplied: tokens, positions, masks, the bits of PRNG keys.
INDEX_BYTES: dict[str, float] = {"int32": 4.0, "uint32": 4.0, "bool": 1.0}

#: Other spellings of dtypes, in lower case, by the name that rooftop prints.
DTYPE_ALIASES: dict[str, str] = {
    "bfloat16": "bf16",
    "float32": "f32",
    "fp32": "f32",
    "float16": "f16",
    "fp16": "f16",
    "half": "f16",
    "fp8": "f8_e4m3",
    "e4m3": "f8_e4m3",
    "float8_e4m3": "f8_e4m3",
    "float8_e4m3fn": "f8_e4m3",
    "f8_e4m3fn": "f8_e4m3",
    "e5m2": "f8_e5m2",
    "float8_e5m2": "f8_e5m2",
    "fp4": "f4_e2m1",
    "mxfp4": "f4_e2m1",
    "e2m1": "f4_e2m1",
    "float4_e2m1fn": "f4_e2m1",
}

#: The largest number of tokens, steps, dims or requests that is accepted: more is a slip of the keyboard.
LARGEST_COUNT = 10**15
#: The largest quantity that an option takes; counts have limits of their own. FLOP/s of a chip have sixteen digits.
LARGEST_QUANTITY = 1e18
#: The longest time, thirty years.
LARGEST_SECONDS = 1e9

_SECONDS = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,3})?)\s*(us|ms|s|m|h)\s*")
_SECONDS_OF = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

#: Suffixes, in lower case. There is none for 1e18: '1E' is more likely an unfinished '1e3'.
_SUFFIX: dict[str, int] = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "b": 10**9, "t": 10**12, "p": 10**15} | {
    prefix + "i": 2 ** (10 * power) for power, prefix in enumerate("kmgtp", start=1)
}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]{1,3})?)\s*([A-Za-z]*)\s*")


def dtype_bytes(dtype: str, field: str = "dtype") -> float:
    """Bytes of one element of ``dtype``. Raises RooftopError on a name that is not a dtype."""
    try:
        return DTYPE_BYTES[dtype] if dtype in DTYPE_BYTES else INDEX_BYTES[dtype]
    except KeyError:
        raise unknown(field, dtype, DTYPE_BYTES) from None


def parse_dtype(text: str, field: str = "dtype") -> str:
    """The canonical name of a dtype: 'bf16' for 'bfloat16' and 'BF16'. Raises RooftopError, naming ``field``."""
    name = str(text).strip().lower()
    name = DTYPE_ALIASES.get(name, name)
    if name not in DTYPE_BYTES:
        raise unknown(field, text, DTYPE_BYTES)
    return name


def parse_quantity(
    text: str | float | int, field: str, *, largest: float = math.inf, smallest: float = 0.0, zero: bool = False
) -> float:
    """A positive number with an optional suffix: '4M' is 4e6, '4Mi' is 4 * 2**20, '15T' is 1.5e13.

    'B' (billion) is accepted as 1e9, as model sizes are written. ``zero`` allows 0. Raises RooftopError, naming
    ``field``, also for a number below ``smallest`` or above ``largest``.
    """
    value = float(_parse(text, field, zero=zero))
    if value > largest:
        raise RooftopError(field, text, f"at most {largest:g}")
    if value < smallest:
        raise RooftopError(field, text, f"at least {smallest:g}")
    return value


def parse_count(text: str | float | int, field: str, *, largest: int = LARGEST_COUNT) -> int:
    """A positive whole number up to ``largest`` with an optional suffix. Raises RooftopError, naming ``field``."""
    value = _parse(text, field)
    if value != int(value):
        raise RooftopError(field, text, "a whole number")
    if value > largest:
        raise RooftopError(field, text, f"at most {largest:,}" if largest < LARGEST_COUNT else f"at most {largest:g}")
    return int(value)


def parse_bytes(text: str | int, field: str) -> int:
    """A positive number of bytes: '400G' is 4e11, '32Mi' is 32 * 2**20; a final 'B' may follow: '400GB', '512B'.

    Raises RooftopError, naming ``field``.
    """
    written = str(text).strip()
    try:
        value = _parse(written[:-1] if written[-1:] in ("b", "B") else written, field)
    except RooftopError:
        value = Decimal(0)
    if not 1 <= value <= LARGEST_COUNT * 10**6:
        raise RooftopError(field, text, "a number of bytes: 512B, 400G, 32Mi")
    return int(value)


def parse_share(text: str | float, field: str) -> float:
    """A share between 0 and 1. Raises RooftopError, naming ``field``."""
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise RooftopError(field, text, "a share between 0 and 1, such as 0.4")
    return share


def parse_growth(text: str | float, field: str) -> float:
    """The share by which a figure may grow, of '+2%' or 0.02. Raises RooftopError, naming ``field``."""
    number = str(text).strip().removeprefix("+")
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 10:
        raise RooftopError(field, text, "a share such as +2% or 0.02")
    return share


def _parse(text: str | float | int, field: str, *, zero: bool = False) -> Decimal:
    # Decimal: 2.01k is 2010, and in binary floating point it is not.
    match = _QUANTITY.fullmatch(str(text))
    number, suffix = match.groups() if match else ("-1", "")
    value = Decimal(number) * _SUFFIX.get(suffix.lower(), -1)
    # A number too small for a float is no zero either.
    size = float(value)
    if not 0 <= size < math.inf or (size == 0 and not (zero and value == 0)):
        number = "0, or a positive number" if zero else "a positive number"
        raise RooftopError(field, text, f"{number}, with a suffix if wanted: 4M (4e6), 4Mi (4194304), 15T")
    return value


def parse_seconds(text: str, field: str) -> float:
    """The seconds of a time with its unit: '30us', '500ms', '1.5s', '10m', '2h'. Raises RooftopError naming ``field``.

    A number alone is refused: 500 may mean seconds or milliseconds.
    """
    match = _SECONDS.fullmatch(str(text))
    seconds = float(match[1]) * _SECONDS_OF[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise RooftopError(field, text, "a time with its unit: 500ms, 1.5s, 10m")
    if seconds > LARGEST_SECONDS:
        raise RooftopError(field, text, f"at most {LARGEST_SECONDS:g}s")
    return seconds


def format_count(value: float, unit: str = "") -> str:
    """A number with three significant digits and an SI prefix: 4.19 M, 15 T."""
    return _format(value, unit, ["", "k", "M", "G", "T", "P", "E", "Z", "Y"])


def counted(count: float, noun: str) -> str:
    """A number of things: '1 chip', '1,024 chips', '0.25 chips'."""
    number = f"{count:,.4g}" if count % 1 else f"{count:,.0f}"
    return f"{number} {noun}" if count == 1 else f"{number} {noun}s"


def format_bytes(value: float) -> str:
    """Bytes in decimal units, as data sheets and the book write them: 2.4 GB."""
    return _format(value, "B", ["", "k", "M", "G", "T", "P", "E"])


def format_seconds(value: float) -> str:
    """A duration: 3.2 us, 12.4 ms, 1.9 s; hours and days from two of them on."""
    for scale, unit in ((86400.0, "days"), (3600.0, "h")):
        if value >= 2 * scale:
            return f"{value / scale:.4g} {unit}"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-9:.3g} ns" if value else "0 s"


def _format(value: float, unit: str, prefixes: list[str]) -> str:
    magnitude, index = abs(float(value)), 0
    while magnitude >= 999.5 and index < len(prefixes) - 1:
        magnitude /= 1000
        index += 1
    sign = "-" if value < 0 else ""
    return f"{sign}{magnitude:.3g} {prefixes[index]}{unit}".rstrip()
