"""Chips: what one accelerator can do, each figure with its source and date (read from ``catalogue.toml``)."""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.quantities import DTYPE_BYTES
from rooftop.hardware.calibrated import Calibrated

#: Figure -> unit. "" is a pure number, a name or a shape in chips.
UNITS: dict[str, str] = {
    "flops_per_s": "FLOP/s",
    "vector_flops_per_s": "FLOP/s",
    "hbm_bytes": "B",
    "hbm_usable_bytes": "B",
    "hbm_bytes_per_s": "B/s",
    "vmem_bytes": "B",
    "vmem_bytes_per_s": "B/s",
    "mxu_tile": "",
    "cores": "",
    "devices": "",
    "clock_hz": "Hz",
    "hop_s": "s",
    "ici_bytes_per_s": "B/s",
    "ici_axes": "",
    "wrap": "",
    "pod_shape": "",
    "host_shape": "",
    "slice_shapes": "",
    "core_bytes_per_s": "B/s",
    "host_bytes": "B",
    "pcie_bytes_per_s": "B/s",
    "dcn_bytes_per_s": "B/s",
    "sparse_cores": "",
    "price_usd_per_hour": "USD/h",
    "sharp_gain": "",
    "power_w": "W",
}
_COUNTS = ("mxu_tile", "cores", "devices", "ici_axes", "sparse_cores")
_SHAPES = ("pod_shape", "host_shape")
_OPTIONAL = ("core_bytes_per_s", "host_bytes", "price_usd_per_hour", "sharp_gain", "power_w")
#: What ``replace`` does not change: a chip with another kind of network is another chip.
_FIXED = ("wrap", "ici_axes", "slice_shapes")

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure as it is shown: its value (None if unpublished), unit, source and the date of the source."""

    value: float | str | tuple[int | Shape, ...] | None
    unit: str
    source: str
    date: str


#: The source of a figure that a user gives.
GIVEN = "given"
#: What JAX takes of a GPU's memory, and the bytes that CUDA takes before: "jax-gpu-memory" in the catalogue.
JAX_SHARE, CUDA_BYTES = 0.95, 502e6


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One kind of accelerator. Figures are per chip, in SI units and one-way, unless said otherwise.

    ``flops_per_s`` holds dense matmul peaks by dtype of ``quantities.DTYPE_BYTES``; a dtype that is not there has no
    peak of its own (f32 is the rate at JAX's default precision: one bf16 pass on a TPU, TF32 on a GPU).
    ``vector_flops_per_s`` counts one elementwise operation a lane, ALU and cycle. ``hbm_bytes`` is the nominal
    capacity, ``hbm_usable_bytes`` what a *device* may fill. ``vmem_bytes`` and ``vmem_bytes_per_s`` are VMEM on a TPU
    (loads into registers) and shared memory and L1 of all SMs on a GPU. ``mxu_tile`` is the side of the systolic
    array, or M of the widest matrix instruction on a GPU. ``cores`` are TensorCores, or SMs; ``devices`` are JAX
    devices of one chip. ``hop_s`` is the latency of one hop.

    ``ici_bytes_per_s`` is one link's rate one way (GPU: one GPU's into the switch of its node), ``ici_axes`` the rank
    of the network, and ``wrap`` its wraparound rule: "16" and "32" wrap an axis of exactly that size, "cube" wraps all
    axes if every one is a multiple of 4, "switch" has no links to wrap. ``slice_shapes`` are the shapes on offer, in
    one order of the axes; chips that wrap by "cube" come in any number of whole 4x4x4 cubes besides, up to a pod.
    On GPUs the pod is a node: the NVLink domain, which may have several hosts.
    ``host_bytes`` is the memory of a host over its chips (None: no figure).
    ``core_bytes_per_s`` joins the devices of one chip (None: there is one, or no figure). ``dcn_bytes_per_s`` is
    egress to other slices (GPU: to other nodes). ``sparse_programs``: libtpu compiles programs of TensorCores together
    with SparseCores. ``price_usd_per_hour`` is a list price, None if none was found.
    ``sharp_gain`` is how much faster an AllReduce of large arrays is if the node's switches reduce it (SHARP); None if
    they cannot. ``power_w`` is the most that a chip may draw, None if unpublished.

    ``calibrated`` has the achievable fractions that a user has measured, None for those of the catalogue.
    ``sources`` maps a figure ('hbm_bytes', 'flops_per_s.bf16') to "source, date", or to "given" after ``replace``.
    """

    name: str
    title: str
    aliases: tuple[str, ...]
    kind: str
    flops_per_s: Mapping[str, float] = field(hash=False)
    vector_flops_per_s: float
    hbm_bytes: float
    hbm_usable_bytes: float
    hbm_bytes_per_s: float
    vmem_bytes: float
    vmem_bytes_per_s: float
    mxu_tile: int
    cores: int
    devices: int
    clock_hz: float
    hop_s: float
    ici_bytes_per_s: float
    ici_axes: int
    wrap: str
    pod_shape: Shape
    host_shape: Shape
    slice_shapes: tuple[Shape, ...]
    core_bytes_per_s: float | None = None
    host_bytes: float | None = None
    pcie_bytes_per_s: float
    dcn_bytes_per_s: float
    sparse_cores: int
    sparse_programs: bool = False
    price_usd_per_hour: float | None
    sharp_gain: float | None = None
    power_w: float | None = None
    sources: Mapping[str, str] = field(hash=False)
    calibrated: Calibrated | None = field(default=None, hash=False)

    @property
    def driver_hbm_bytes(self) -> float:
        """HBM bytes of a device that its driver reports: on a GPU JAX leaves a part of them to others."""
        if self.kind != "gpu":
            return self.hbm_usable_bytes
        return self.hbm_usable_bytes / JAX_SHARE + CUDA_BYTES

    @property
    def switched(self) -> bool:
        """True if switches join the chips of a slice (NVLink), and not links of a torus (ICI)."""
        return self.kind == "gpu"

    @property
    def lanes(self) -> int:
        """Elements to which the last dim of arrays in HBM is padded: lanes of a register on TPUs, 1 on GPUs."""
        return 1 if self.switched else 128

    @property
    def link(self) -> str:
        """The name of the network within a slice."""
        return "NVLink" if self.switched else "ICI"

    @property
    def price_source(self) -> str | None:
        """Source and date of the price, or "given"; None without a price."""
        return None if self.price_usd_per_hour is None else self.sources.get("price_usd_per_hour", GIVEN)

    @property
    def figures(self) -> dict[str, Figure]:
        """Every figure with its unit, source and date, one entry per dtype of ``flops_per_s``."""
        values: dict[str, Any] = {f"flops_per_s.{dtype}": rate for dtype, rate in self.flops_per_s.items()}
        values |= {name: getattr(self, name) for name in UNITS if name != "flops_per_s"}
        shown: dict[str, Figure] = {}
        for name, value in values.items():
            if name in self.sources:
                source, _, date = self.sources[name].rpartition(", ")
                shown[name] = Figure(
                    value=value, unit=UNITS[name.partition(".")[0]], source=source or date, date=date if source else ""
                )
        return shown

    def replace(self, **figures: Any) -> Chip:
        """This chip with some figures overridden, their source "given".

        ``flops_per_s`` takes a mapping and changes the dtypes in it. Raises RooftopError on a name that is not a
        figure, on a dtype that is unknown and on a value that is not positive.
        """
        known = [name for name in UNITS if name not in _FIXED]
        changed: dict[str, Any] = {}
        sources = dict(self.sources)
        for name, value in figures.items():
            if name not in known:
                raise unknown("figure", name, known)
            if name == "flops_per_s":
                changed[name] = dict(self.flops_per_s) | _rates(value)
                sources |= {f"flops_per_s.{dtype}": GIVEN for dtype in value}
                continue
            changed[name] = self._checked(name, value)
            sources[name] = GIVEN
        return dataclasses.replace(self, **changed, sources=sources)

    def _checked(self, name: str, value: Any) -> Any:
        if name in _OPTIONAL and value is None:
            return None
        if name in _SHAPES:
            rank = self.ici_axes
            if not isinstance(value, (tuple, list)) or len(value) != rank or not all(_is_count(size) for size in value):
                raise RooftopError(name, value, f"{rank} positive whole numbers")
            return tuple(int(size) for size in value)
        if name in _COUNTS:
            if not _is_count(value) and not (name == "sparse_cores" and value == 0):
                raise RooftopError(name, value, "a positive whole number")
            return int(value)
        return _positive(name, value)


@cache
def _catalogue() -> dict[str, Chip]:
    data = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
    cited = {key: (source["title"], source["date"]) for key, source in data["sources"].items()}
    return {name: _chip(name, _whole(entry, data["chips"]), cited) for name, entry in data["chips"].items()}


def catalogue() -> dict[str, Chip]:
    """All chips by name, TPUs by generation and then GPUs."""
    return dict(_catalogue())


@cache
def _names() -> dict[str, Chip]:
    return {alias: entry for entry in _catalogue().values() for alias in (entry.name, *entry.aliases)}


def chip(name: str) -> Chip:
    """The chip called ``name``, or one of its aliases, in any case. Raises RooftopError on an unknown name."""
    names = _names()
    try:
        return names[name.strip().lower()]
    except KeyError:
        raise unknown("chip", name, names, listed_by="rooftop chips") from None


def chip_of_kind(kind: str) -> Chip | None:
    """The chip by JAX's ``device_kind``: an alias of a TPU in the catalogue, or text with a GPU's name."""
    kind, chips = kind.lower(), catalogue().values()
    named = (chip for chip in chips if kind in (chip.name, *chip.aliases) or (chip.kind == "gpu" and chip.name in kind))
    return next(named, None)


def _whole(entry: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
    """An entry with the figures of the chip that it is like, its own in their place."""
    own = dict(entry)
    if (like := own.pop("like", None)) is None:
        return own
    base = _whole(entries[like], entries)
    return base | own | {"flops_per_s": base["flops_per_s"] | own.get("flops_per_s", {})}


def _chip(name: str, entry: Mapping[str, Any], cited: Mapping[str, tuple[str, str]]) -> Chip:
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for field_name, figure in entry.items():
        if field_name in ("title", "kind"):
            values[field_name] = figure
        elif field_name == "aliases":
            values[field_name] = tuple(figure)
        elif field_name == "flops_per_s":
            values[field_name] = {dtype: rate[0] for dtype, rate in figure.items()}
            sources |= {f"flops_per_s.{dtype}": _cite(rate, cited) for dtype, rate in figure.items()}
        else:
            value = figure[0]
            if field_name in _SHAPES:
                value = tuple(value)
            elif field_name == "slice_shapes":
                value = tuple(tuple(shape) for shape in value)
            values[field_name] = None if value == "unpublished" else value
            sources[field_name] = _cite(figure, cited)
    return Chip(name=name, **values, sources=sources)


def _cite(figure: list[Any], cited: Mapping[str, tuple[str, str]]) -> str:
    title, date = cited[figure[1]]
    note = f" ({figure[2]})" if len(figure) > 2 else ""
    return f"{title}{note}, {date}"


def _rates(entries: Any) -> dict[str, float]:
    if not isinstance(entries, Mapping):
        raise RooftopError("flops_per_s", entries, "a mapping from dtype to FLOPs/s, such as {'bf16': 1.97e14}")
    for dtype in entries:
        if dtype not in DTYPE_BYTES:
            raise unknown("flops_per_s", str(dtype), DTYPE_BYTES)
    return {dtype: _positive(f"flops_per_s.{dtype}", rate) for dtype, rate in entries.items()}


def _positive(name: str, value: Any) -> float:
    number = float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    if not 0 < number < math.inf:
        raise RooftopError(name, value, "a positive number" + (f" of {UNITS[name]}" if UNITS.get(name) else ""))
    return number


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) > 0
