"""Kinds of values that fields have: how a text is read, how it is completed, and its form in JSON.

Nothing here imports planners or JAX, so that a command line is checked before they are imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from rooftop.core import records
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.quantities import (
    DTYPE_BYTES,
    LARGEST_QUANTITY,
    parse_bytes,
    parse_count,
    parse_dtype,
    parse_growth,
    parse_quantity,
    parse_seconds,
    parse_share,
)


class Kind:
    """A text that is taken as it is. ``name`` stands for a value in help.

    ``json_types`` are types of its values in JSON, and ``json_words`` their names in errors.
    """

    json_types: tuple[type, ...] = (str,)
    json_words = "a text"

    def __init__(self, name: str) -> None:
        self.name = name

    def of_json(self, value: Any, field: str) -> Any:
        """Read a value in JSON. Raises RooftopError naming ``field``."""
        is_flag = isinstance(value, bool) and bool not in self.json_types
        if not isinstance(value, self.json_types) or is_flag or value == []:
            raise RooftopError(field, value, f"{self.json_words} in JSON")
        return self.read(value, field)

    def read(self, value: Any, field: str) -> Any:
        """Check and convert a text, or a value that was read before. Raises RooftopError naming ``field``."""
        return value

    def plain(self, value: Any, field: str) -> Any:
        """The value in JSON. Raises RooftopError naming ``field``."""
        return plain(self.read(value, field))

    def text(self, value: Any) -> Any:
        """A default as one would type it."""
        return value

    def gather(self, entries: Sequence[Any]) -> Any:
        """The value of an option that is typed several times. Raises RooftopError."""
        return tuple(entries)

    def candidates(self, incomplete: str) -> Iterable[str]:
        """Values that may complete what is typed."""
        return ()

    def meanings(self, value: Any) -> Iterable[str]:
        """Lines that say what names in a text mean: 'v6e-256 is v6e:16x16'; none for rooftop's own names."""
        return ()


class Parsed(Kind):
    """A text that ``parse(text, field)`` reads, a function of ``rooftop.core.quantities``."""

    json_types: tuple[type, ...] = (str, int, float)
    json_words = "a number or a text"

    def __init__(self, name: str, parse: Callable[[str, str], Any]) -> None:
        super().__init__(name)
        self.parse = parse

    def read(self, value: Any, field: str) -> Any:
        """Parse it."""
        return self.parse(value, field)


class Time(Parsed):
    """Seconds, as a float, of a time with its unit."""

    def __init__(self) -> None:
        super().__init__("time", _seconds)

    def text(self, value: Any) -> Any:
        """Minutes where they are whole, and seconds."""
        if isinstance(value, str):
            return value
        return f"{value:.12g}s" if value % 60 else f"{value / 60:.12g}m"


class TracedSteps(Parsed):
    """The first and last of some steps: steps=A..B, or both in a list."""

    json_types: tuple[type, ...] = (str, list)
    json_words = "a text or a list"

    def text(self, value: Any) -> Any:
        """Both steps as one types them."""
        return value if isinstance(value, str) else f"steps={value[0]}..{value[1]}"


class Port(Kind):
    """A port; 0 is a free one."""

    json_types: tuple[type, ...] = (str, int)
    json_words = "a number"

    def __init__(self) -> None:
        super().__init__("n")

    def read(self, value: Any, field: str) -> int:
        """The number."""
        text = str(value)
        if not text.isdecimal() or int(text) >= 2**16:
            raise RooftopError(field, value, "a whole number from 0 to 65535")
        return int(text)


class Dtype(Kind):
    """The canonical name of a dtype; several, comma-separated, become a tuple if ``several``."""

    def __init__(self, *, several: bool = False) -> None:
        super().__init__("dtype")
        self.several = several
        if several:
            self.json_types, self.json_words = (str, list), "a text, or a list of them,"

    def read(self, value: Any, field: str) -> str | tuple[str, ...]:
        """The canonical names."""
        if not self.several:
            return parse_dtype(value, field)
        return tuple(parse_dtype(part, field) for part in (value.split(",") if isinstance(value, str) else value))

    def candidates(self, incomplete: str) -> Iterable[str]:
        """Dtypes."""
        return last_entries(incomplete, DTYPE_BYTES) if self.several else DTYPE_BYTES


class Name(Kind):
    """One of a few names; another is refused with the close ones suggested."""

    def __init__(self, *names: str) -> None:
        super().__init__("name")
        self.names = names

    def read(self, value: Any, field: str) -> str:
        """The name in lower case."""
        name = str(value).strip().lower()
        if name not in self.names:
            raise unknown(field, str(value), self.names)
        return name

    def candidates(self, incomplete: str) -> Iterable[str]:
        """The names."""
        return self.names


class Hardware(Kind):
    """A slice, a chip, or several of them separated by commas: a text is checked against the catalogue, and stays one.

    In JSON a slice or chip of the catalogue is its name, another one the object of its figures.
    """

    json_types: tuple[type, ...] = (str, list, dict)
    json_words = "a name, an object, or a list of them,"

    def __init__(self, *, several: bool = True) -> None:
        super().__init__("hardware")
        if not several:
            self.json_types, self.json_words = (str, dict), "a name or an object"

    def read(self, value: Any, field: str) -> Any:
        """The text, or the objects as they are."""
        from rooftop.hardware import Slice, is_slice, named_chip

        for part in value.split(",") if isinstance(value, str) else ():
            if is_slice(part):
                Slice.parse(part)
            else:
                named_chip(part)
        return value

    def plain(self, value: Any, field: str) -> Any:
        """The name, or the object of a slice or chip that the catalogue does not have."""
        if isinstance(value, str):
            return value
        if isinstance(value, Sequence):
            parts = [self.plain(part, field) for part in value]
            return ",".join(parts) if all(isinstance(part, str) for part in parts) else parts
        from rooftop.hardware import Chip, Slice, catalogue

        hardware = value if isinstance(value, (Slice, Chip, Mapping)) else value.slice
        spec = hardware.chip if isinstance(hardware, Slice) else hardware
        if isinstance(hardware, Mapping) or not isinstance(spec, Chip) or catalogue().get(spec.name) != spec:
            return plain(hardware)
        return hardware.name

    def meanings(self, value: Any) -> Iterable[str]:
        """The slices and chips that other names are."""
        from rooftop.hardware import renamed

        return filter(None, map(renamed, value.split(",") if isinstance(value, str) else ()))

    def candidates(self, incomplete: str) -> Iterable[str]:
        """Chips; after a colon, shapes; of what begins otherwise, the names of clouds."""
        from rooftop.hardware import catalogue, slice_names

        chips = catalogue()
        name, colon, _ = incomplete.rpartition(",")[2].partition(":")
        if not colon:
            others = [other for spec in chips.values() for other in slice_names(spec)]
            return last_entries(incomplete, chips if any(known.startswith(name) for known in chips) else others)
        shapes = chips[name].slice_shapes if name in chips else ()
        return last_entries(incomplete, [f"{name}:{'x'.join(map(str, shape))}" for shape in shapes])


class Model(Kind):
    """A preset, llama:N or mixtral:N, or the path of a Hugging Face config.json or of its folder: left a text.

    In JSON a preset is its name, another ModelConfig its object.
    """

    json_types: tuple[type, ...] = (str, dict)
    json_words = "a name or an object"

    def __init__(self) -> None:
        super().__init__("model")

    def plain(self, value: Any, field: str) -> Any:
        """The text, a preset's name, or the object of the model."""
        if isinstance(value, (str, Path)):
            return str(value)
        from rooftop.models import ModelConfig, load_model, presets

        config = value if isinstance(value, (ModelConfig, Mapping)) else value.config
        is_preset = isinstance(config, ModelConfig) and config.name in presets() and load_model(config.name) == config
        return config.name if isinstance(config, ModelConfig) and is_preset else plain(config)

    def meanings(self, value: Any) -> Iterable[str]:
        """The preset, file or address that a name on the hub is."""
        from rooftop.models import model_meaning

        return filter(None, [model_meaning(value) if isinstance(value, str) else None])

    def candidates(self, incomplete: str) -> Iterable[str]:
        """Presets, and small models."""
        from rooftop.models import presets

        return (*presets(), "llama:2M", "mixtral:5M")


class Pairs(Kind):
    """Names and values, fsdp=4,tensor=2: left a text; a mapping becomes one in JSON, and with ``numbers`` a number."""

    json_types: tuple[type, ...] = (str, dict)
    json_words = "a text or an object"

    def __init__(self, name: str, *, numbers: bool = False) -> None:
        super().__init__(name)
        if numbers:
            self.json_types, self.json_words = (str, int, float, dict), "a text, a number or an object"

    def plain(self, value: Any, field: str) -> Any:
        """The text of a mapping or a number; other objects as they are."""
        if isinstance(value, Mapping):
            return ",".join(f"{name}={entry:g}" if isinstance(entry, float) else f"{name}={entry}"
                            for name, entry in value.items())  # fmt: skip
        return f"{value:g}" if isinstance(value, float) else str(value) if isinstance(value, int) else plain(value)


class Sizes(Pairs):
    """Sizes of dims by name, B=8192,F=32Ki: left a text. In JSON without suffixes."""

    def __init__(self) -> None:
        super().__init__("SIZES")

    def plain(self, value: Any, field: str) -> Any:
        """The text, with whole numbers."""
        texts = () if isinstance(value, Mapping) else [entry for entry in value.split(",") if entry.strip()]
        for entry in texts:
            if "=" not in entry:
                raise RooftopError(field, entry, "NAME=SIZE, such as B=8192 or F=32Ki")
        entries = value.items() if isinstance(value, Mapping) else [entry.split("=", 1) for entry in texts]
        return ",".join(f"{name.strip()}={parse_count(size, f'dim {name.strip()}')}" for name, size in entries)


class Axes(Pairs):
    """Mesh axes and their sizes: left a text, as the names that a mesh may have differ by verb."""

    def __init__(self) -> None:
        super().__init__("axes")

    def candidates(self, incomplete: str) -> Iterable[str]:
        """Axes that are not typed yet."""
        from rooftop.arrays import AXES as names

        taken = {entry.partition("=")[0] for entry in incomplete.split(",")[:-1]}
        return last_entries(incomplete, [f"{axis}=" for axis in names if axis not in taken])


class Written(Kind):
    """A text, or an object that is written as one."""

    def plain(self, value: Any, field: str) -> Any:
        """The text."""
        return str(value)


class Assigned(Kind):
    """Values by name, each typed as NAME=VALUE; an object in JSON."""

    json_types: tuple[type, ...] = (dict,)
    json_words = "an object"

    def __init__(self) -> None:
        super().__init__("NAME=VALUE")


class Figures(Assigned):
    """Figures by name."""

    def gather(self, entries: Sequence[Any]) -> dict[str, float]:
        """The figures by name."""
        figures: dict[str, float] = {}
        for entry in entries:
            name, equals, value = (part.strip() for part in str(entry).partition("="))
            if not equals:
                raise RooftopError("figure", entry, "NAME=VALUE, such as ici_bytes_per_s=4.5e10")
            figures[name] = parse_quantity(value, f"figure {name}", largest=LARGEST_QUANTITY)
        return figures


class Listed(Kind):
    """Several texts, separated by commas: left a text; a sequence becomes one in JSON."""

    json_types: tuple[type, ...] = (str, list)
    json_words = "a text or a list"

    def plain(self, value: Any, field: str) -> Any:
        """The text."""
        return value if isinstance(value, str) else ",".join(map(str, value))


class Flag(Kind):
    """On or off; ``None`` where the verb decides."""

    json_types: tuple[type, ...] = (bool,)
    json_words = "true or false"

    def __init__(self) -> None:
        super().__init__("flag")


class Location(Kind):
    """The path of a file (``folders`` False), of a folder (``files`` False), or of either: read as a Path.

    In JSON the content of a file may stand for it if it is an ``object_too``.
    """

    def __init__(self, name: str, *, files: bool = True, folders: bool = True, object_too: bool = False) -> None:
        super().__init__(name)
        self.files, self.folders = files, folders
        if object_too:
            self.json_types, self.json_words = (str, dict), "a path or an object"

    def read(self, value: Any, field: str) -> Any:
        """The path; an object that was read from one stays."""
        return Path(value) if isinstance(value, str) else value


def plain(value: Any) -> Any:
    """A value in JSON: paths as text, objects by their ``to_json``."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): plain(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if hasattr(value, "to_json"):
        return plain(value.to_json())
    return records.plain(value) if is_dataclass(value) else value


def last_entries(incomplete: str, names: Iterable[str]) -> Iterable[str]:
    """A list, separated by commas, with each of ``names`` as its last entry."""
    before, comma, _ = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in names]


def _count_or_zero(text: str, field: str) -> int:
    try:
        return 0 if str(text) == "0" else parse_count(text, field)
    except RooftopError as error:
        accepted = error.accepted
        raise RooftopError(field, text, f"0, or {accepted}" if accepted.startswith("a ") else accepted) from None


def _top(text: str, field: str) -> int | str:
    return "all" if str(text) == "all" else parse_count(text, field)


def _quantity(text: str, field: str) -> float:
    return parse_quantity(text, field, largest=LARGEST_QUANTITY)


def _quantity_or_zero(text: str, field: str) -> float:
    return parse_quantity(text, field, largest=LARGEST_QUANTITY, zero=True)


def _seconds(text: str | float, field: str) -> float:
    return float(text) if isinstance(text, (int, float)) else parse_seconds(text, field)


def _number(text: str | float, field: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise RooftopError(field, text, "a number from 0")
    return number


def parse_profile(text: str | Sequence[int], field: str) -> tuple[int, int]:
    """Read the first and last traced step of 'steps=A..B'. Raises RooftopError naming ``field``."""
    match = re.fullmatch(r"steps=(\d+)\.\.(\d+)", text) if isinstance(text, str) else None
    steps = tuple(text) if match is None and not isinstance(text, str) else match and (int(match[1]), int(match[2]))
    if not steps or len(steps) != 2 or not 1 <= steps[0] <= steps[1]:
        raise RooftopError(field, text, "steps=A..B with A up to B, counted from 1: steps=10..13")
    return steps[0], steps[1]


def _devices(text: str, field: str) -> int:
    count = parse_count(text, field)
    if count > _MOST_EMULATED:
        raise RooftopError(field, text, f"from 1 to {_MOST_EMULATED:,} emulated devices")
    return count


#: XLA starts threads for each device that it emulates: thousands of them take minutes to start, or the memory.
_MOST_EMULATED = 1024
COUNT = Parsed("n", parse_count)
DEVICES = Parsed("n", _devices)
COUNT_OR_ZERO = Parsed("n", _count_or_zero)
#: A number of rows, or "all".
TOP = Parsed("n", _top)
QUANTITY = Parsed("x", _quantity)
QUANTITY_OR_ZERO = Parsed("x", _quantity_or_zero)
BYTES = Parsed("bytes", parse_bytes)
SHARE = Parsed("share", parse_share)
#: A share of '+2%'.
GROWTH = Parsed("share", parse_growth)
TIME = Time()
#: A number from 0, without a suffix.
NUMBER = Parsed("x", _number)
#: First and last step of a trace.
PROFILE = TracedSteps("steps=a..b", parse_profile)
DTYPE = Dtype()
DTYPES = Dtype(several=True)
HARDWARE_NAME = Hardware()
SLICE = Hardware(several=False)
MODEL = Model()
AXES = Axes()
FLAG = Flag()
FILE = Location("file", folders=False)
FOLDER = Location("directory", files=False)
PATH = Location("path")
#: A file, or what it contains.
DOCUMENT = Location("file", folders=False, object_too=True)
