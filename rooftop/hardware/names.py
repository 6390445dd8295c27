"""Slices and chips by the names of clouds and schedulers, which ``names.toml`` has: v6e-256, p5.48xlarge, 8xH100."""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.hardware.chips import Chip, catalogue, chip

_MEMORY = re.compile(r"(\d+)(gb|gib)")
#: GPUs that NVLink joins.
_DOMAIN = re.compile(r"nvl(\d+)")
_SHAPE = re.compile(r"\d{1,6}(x\d{1,6})+")
#: Similarity from which on a name is taken for a misspelt one.
_CLOSE = 0.8
#: Names of machines may begin with this where a managed service runs them.
_SERVICE = "ml."


@dataclass(frozen=True, kw_only=True)
class TpuNames:
    """Names of a TPU's slices: a prefix and a ``count`` of chips or TensorCores, or a prefix and a topology.

    ``topologies`` maps chips to the topology that the cloud gives for that many.
    """

    chip: str
    prefixes: tuple[str, ...]
    accelerators: tuple[str, ...]
    count: str
    cores: int
    topologies: Mapping[int, str]
    source: str

    @property
    def per_chip(self) -> int:
        """Chips or TensorCores that a name counts for each chip."""
        return self.cores if self.count == "cores" else 1


@dataclass(frozen=True, kw_only=True)
class CloudMachine:
    """A cloud's machine: its chip, and its shape, a topology of TPUs or a number of GPUs; ``source`` in names.toml."""

    chip: str
    shape: str
    source: str


@cache
def _data() -> Mapping[str, Any]:
    return tomllib.loads(Path(__file__).with_name("names.toml").read_text(encoding="utf-8"))


@cache
def tpu_names() -> Mapping[str, TpuNames]:
    """Names of the slices of each TPU, by chip."""
    names = {}
    for name, row in _data()["tpu"].items():
        topologies = {_chips(topology): topology for topology in row["topologies"].split()}
        words = {"prefixes": tuple(row["prefixes"]), "accelerators": tuple(row["accelerators"])}
        names[name] = TpuNames(
            chip=name, count=row["count"], cores=row["cores"], topologies=topologies, source=row["source"], **words
        )
    return names


@cache
def machines() -> Mapping[str, CloudMachine]:
    """Machines of clouds by their names in lower case."""
    rows = _data()["machines"].items()
    return {name: CloudMachine(chip=chip, shape=shape, source=source) for name, (chip, shape, source) in rows}


def slice_names(chip: Chip) -> Iterator[str]:
    """Names of the slices and machines of a chip, as a completion offers them."""
    if (names := tpu_names().get(chip.name)) is not None:
        yield from (f"{names.prefixes[0]}-{chips * names.per_chip}" for chips in sorted(names.topologies))
    yield from (name for name, machine in machines().items() if machine.chip == chip.name)


def published_chip(name: str) -> Chip:
    """The catalogue's chip with a published name: 'H100-80GB-SXM'. Raises RooftopError for one that is not in it."""
    return _chip_of_words(name) or chip(name)


def named_chip(text: str) -> Chip:
    """The chip with a name of the catalogue or of a publication, or that of a slice: 'NVIDIA-H100-80GB-SXM', 'v6e-256'.

    Raises RooftopError for a chip that is not in the catalogue, with close names.
    """
    name = canonical(text).partition(":")[0].strip()
    if (known := _chip_of_words(name)) is not None:
        return known
    if (misspelt := misspelt_machine(text)) is not None:
        raise misspelt
    return chip(name)


def misspelt_machine(text: str) -> RooftopError | None:
    """The error for a text that is nearly a machine's name, with that name; None for any other text."""
    name = text.strip().lower()
    near = difflib.get_close_matches(name, machines(), n=1, cutoff=_CLOSE)
    if not near or difflib.get_close_matches(name, catalogue(), n=1, cutoff=_CLOSE):
        return None
    return _no_slice(text, f"did you mean {near[0]} ({_readable(near[0])})?")


def canonical(text: str) -> str:
    """The name of a slice or a chip as rooftop writes it: 'v6e-256' becomes 'v6e:16x16', 'p5.48xlarge' 'h100:8'.

    Any other text is returned unchanged. Raises RooftopError for a number of chips
    that no slice has, with the nearest that do, and for a machine whose chip the catalogue lacks.
    """
    name = text.strip().lower()
    if not name or name in catalogue():
        return text
    body, at, slices = name.partition("@")
    if at and not slices.isdecimal():
        return text
    for read in (_machine, _tpu, _gpus):
        if (written := read(body, text, int(slices) if at else 1)) is not None:
            return written
    known = None if ":" in body else _chip_of_words(body)
    return text if known is None or at else known.name


def is_slice(text: str) -> bool:
    """True if a text names a slice, and not a chip alone. Raises RooftopError as ``canonical`` does."""
    return ":" in canonical(text)


def renamed(text: str) -> str | None:
    """The line that says which slice or chip another name is: 'v6e-256 is v6e:16x16'; None for rooftop's own names."""
    name = canonical(text)
    return None if name.lower() == text.strip().lower() else f"{text.strip()} is {name}"


def _machine(body: str, text: str, slices: int) -> str | None:
    """Read a machine's name, or several machines: p5.48xlarge, 4xp5.48xlarge, p5.48xlarge@4."""
    known, count, name = machines(), slices, body
    for pattern in (r"(?P<count>\d{1,6})\s*[x*]\s*(?P<name>\S+)", r"(?P<name>\S+?)\s*[x*:]\s*(?P<count>\d{1,6})"):
        match = re.fullmatch(pattern, body)
        if match is not None and match["name"].removeprefix(_SERVICE) in known:
            name, count = match["name"], slices * int(match["count"])
    machine = known.get(name.removeprefix(_SERVICE))
    if machine is None:
        return None
    spec = _catalogued(machine.chip, text, machine.shape)
    if spec.kind == "gpu":
        return f"{spec.name}:{machine.shape}" if count == 1 else f"{spec.name}:{machine.shape}x{count}"
    if count != slices:
        near, sides = tpu_names()[spec.name].accelerators[0], "x".join(["4"] * spec.ici_axes)
        raise _no_slice(text, f"one machine of TPUs, or a topology of several: {near}:{sides}")
    return _with_slices(f"{spec.name}:{machine.shape}", slices)


def _tpu(body: str, text: str, slices: int) -> str | None:
    """Read a TPU's name with a count or a topology: v6e-256, tpu-v6e-slice:4x4, ct6e-standard-4t:4x4."""
    match = re.fullmatch(r"(?P<name>\S+?)(?P<join>[-:]|\s+)(?P<size>\d{1,6}(?:x\d{1,6})*)", body)
    if match is None:
        name = next((names.chip for names in tpu_names().values() if body in names.accelerators), None)
        return None if name is None or name == body else _catalogued(name, text, "").name
    name, size = match["name"], match["size"]
    names = next((names for names in tpu_names().values() if name in names.prefixes), None)
    if "x" in size:
        machine = machines().get(name)
        names = names or next((names for names in tpu_names().values() if name in names.accelerators), None)
        if machine is not None and _SHAPE.fullmatch(machine.shape):
            names = tpu_names()[machine.chip]
        if names is None or (name in catalogue() and match["join"] != "-"):
            return None
        return _with_slices(f"{_catalogued(names.chip, text, size).name}:{size}", slices)
    if names is None or match["join"] != "-":
        return None
    return _with_slices(_counted(names, name, int(size), text), slices)


def _counted(names: TpuNames, prefix: str, count: int, text: str) -> str:
    """The slice of a count of chips or TensorCores. Raises RooftopError, with the nearest counts, for any other."""
    chips = {named // names.per_chip: named for named in (size * names.per_chip for size in names.topologies)}
    if count % names.per_chip == 0 and count // names.per_chip in chips:
        shape = names.topologies[count // names.per_chip]
        return f"{_catalogued(names.chip, text, shape).name}:{shape}"
    near = sorted(chips, key=lambda size: abs(math.log(max(count, 1) / (size * names.per_chip))))[:2]
    meant = " or ".join(f"{prefix}-{size * names.per_chip} ({names.topologies[size]})" for size in near)
    raise _no_slice(text, f"did you mean {meant}? {prefix}-N counts {_COUNTED[names.count]}")


_COUNTED = {"chips": "chips", "cores": "TensorCores, two a chip"}


def _gpus(body: str, text: str, slices: int) -> str | None:
    """Read a number of GPUs: 8xH100, h100x8, h100-8, h100:16, and the nodes of a published chip: H100-SXM:8x4."""
    patterns = (
        r"(?P<count>\d{1,7})\s*[x*]\s*(?P<name>[a-z].*)",
        r"(?P<name>[a-z].*?)\s*[x*-]\s*(?P<count>\d{1,7})",
        r"(?P<name>[a-z].*?)\s*:\s*(?P<count>\d{1,7}(?:x\d{1,7})?)",
    )
    for match in filter(None, (re.fullmatch(pattern, body) for pattern in patterns)):
        spec = _chip_of_words(match["name"])
        if spec is None or spec.kind != "gpu":
            continue
        parts = tuple(int(part) for part in match["count"].split("x"))
        node, written = math.prod(spec.pod_shape), match["name"] == spec.name and ":" in body
        if len(parts) == 2 or parts in spec.slice_shapes:
            return None if written else f"{spec.name}:{match['count']}" + (f"x{slices}" if slices > 1 else "")
        gpus = parts[0] * slices
        if gpus and gpus % node == 0:
            return f"{spec.name}:{node}x{gpus // node}"
        if not written:
            low, high = max(1, gpus // node), gpus // node + 1
            near = dict.fromkeys(f"{nodes * node}x{spec.name} ({_nodes(spec, nodes)})" for nodes in (low, high))
            raise _no_slice(
                text, f"did you mean {' or '.join(near)}? More than part of a node are whole nodes of {node}"
            )
    return None


def _nodes(spec: Chip, nodes: int) -> str:
    node = math.prod(spec.pod_shape)
    return f"{spec.name}:{node}" if nodes == 1 else f"{spec.name}:{node}x{nodes}"


def _with_slices(name: str, slices: int) -> str:
    return name if slices == 1 else f"{name}@{slices}"


def _catalogued(name: str, text: str, size: str) -> Chip:
    """The chip of a name that is known. Raises RooftopError, saying which chip it has, if the catalogue lacks it."""
    try:
        return chip(name)
    except RooftopError:
        has = f"{size} x {name}" if size.isdecimal() else f"{name} chips"
        accepted = f"a chip of `rooftop chips`: {text.strip()} has {has}, which the catalogue lacks"
        raise _no_slice(text, accepted) from None


def _no_slice(text: str, accepted: str) -> RooftopError:
    return RooftopError("slice", text, accepted)


def _readable(machine: str) -> str:
    """The slice that a machine is, or its chip where the catalogue lacks it."""
    row = machines()[machine]
    return f"{row.chip}:{row.shape}" if row.chip in catalogue() else row.chip


@cache
def _chip_of_words(name: str) -> Chip | None:
    """The catalogue's chip with a name in which other words only describe it; None if there is none."""
    if (spec := _exact(name.strip().lower())) is not None:
        return spec
    words = [word for word in re.split(r"[\s_-]+", name.strip().lower()) if word]
    describing = _data()["words"]["chip"]
    while words and words[0] in describing:
        del words[0]
    for end in range(len(words), 0, -1):
        spec = _exact("-".join(words[:end]))
        if spec is not None and all(_describes(word, spec) for word in words[end:]):
            return spec
    return None


def _exact(name: str) -> Chip | None:
    return next((spec for spec in catalogue().values() if name in (spec.name, *spec.aliases)), None)


def _describes(word: str, known: Chip) -> bool:
    """True if a word is right about a chip, so that the name with it is of the same chip."""
    if (memory := _MEMORY.fullmatch(word)) is not None:
        sizes = (int(memory[1]) * gigabyte for gigabyte in (1e9, 2**30))
        return any(math.isclose(size, known.hbm_bytes, rel_tol=0.01) for size in sizes)
    if (domain := _DOMAIN.fullmatch(word)) is not None:
        return int(domain[1]) == math.prod(known.pod_shape)
    return word in _data()["words"]["chip"]


def _chips(topology: str) -> int:
    return math.prod(int(side) for side in topology.split("x"))
