"""Slices: chips joined by ICI (GPUs by NVLink switches), their geometry and the axes of the network they span."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.rounding import ceil_div
from rooftop.hardware.calibrated import Calibrated
from rooftop.hardware.chips import Chip, Shape, chip
from rooftop.hardware.names import canonical, misspelt_machine

#: Chips that a program or a fleet is planned for, at most: all that were ever built are fewer.
MOST_CHIPS = 10_000_000
_TEXT = re.compile(r"\s*([^:@\s]+)\s*:\s*([0-9]{1,12}(?:x[0-9]{1,12})*)\s*(?:@\s*([0-9]{1,12}))?\s*", re.IGNORECASE)
_ACCEPTED = "CHIP:SHAPE[@SLICES], such as v5e:4x4, v5p:16x20x28, v5e:16x16@4 or h100:8x128; or a name such as v6e-256"
_CUBE = 4
_CUBE_CHIPS = _CUBE**3


@dataclass(frozen=True, kw_only=True)
class PhysicalAxis:
    """One dimension of the network as one device sees it.

    ``name`` is x, y or z, ``core`` (between the devices of one chip) or ``dcn`` (between slices); on GPUs ``node``
    and ``network`` (between nodes). ``kind`` is "torus" (a ring if ``wrapped``, else a line), "core", "switch" or
    "dcn". ``bytes_per_s`` is one-way, per port and per device: two devices of a chip share its links. ``hop_s`` is 0
    where no figure is published, which keeps a bound a bound. ``resource`` is the "ici" or the "dcn" of a ledger.
    ``reduces`` is True if the switch can sum what passes through it (SHARP).
    """

    name: str
    size: int
    kind: str
    wrapped: bool
    bytes_per_s: float
    hop_s: float
    resource: str
    reduces: bool = False


@dataclass(frozen=True)
class Slice:
    """``num_slices`` equal slices of ``shape`` chips, joined by DCN if there are several.

    The shape of a GPU slice is (GPUs used in a node, nodes); a node is an NVLink domain. Raises RooftopError, with the
    nearest possible shapes, if the chip does not come in that shape.
    """

    chip: Chip
    shape: Shape
    num_slices: int = 1

    def __post_init__(self) -> None:
        if self.chip.kind == "gpu" and len(self.shape) == 1:
            object.__setattr__(self, "shape", (*self.shape, 1))
        _check(self)

    @classmethod
    def parse(cls, text: str) -> Slice:
        """A slice as people write it: 'v5e:4x4', 'v5p:16x20x28', 'v5e:16x16@4', 'h100:8x128', 'gb200:72x4'.

        Other names of slices are those of ``names.canonical``: 'v6e-256', 'p5.48xlarge', '8xH100'. Raises RooftopError
        on anything that is not a slice, naming near ones.
        """
        match = _TEXT.fullmatch(canonical(text))
        if match is None:
            raise misspelt_machine(text) or RooftopError("slice", text, _ACCEPTED)
        name, shape, slices = match.groups()
        sizes = tuple(int(size) for size in shape.lower().split("x"))
        return cls(chip(name), sizes, 1 if slices is None else int(slices))

    def with_calibration(self, calibrated: Calibrated | None) -> Slice:
        """The slice of a chip with the fractions that a user has measured; None: those of the catalogue.

        Raises RooftopError on the calibration of another chip.
        """
        if calibrated is not None and calibrated.chip != self.chip.name:
            raise RooftopError(
                "calibration", calibrated.by, f"one of {self.chip.name}; this one is of {calibrated.chip}"
            )
        return Slice(replace(self.chip, calibrated=calibrated), self.shape, self.num_slices)

    @property
    def name(self) -> str:
        """The slice as ``parse`` reads it."""
        return _name(self.chip, self.shape) + (f"@{self.num_slices}" if self.num_slices != 1 else "")

    @property
    def chips(self) -> int:
        """Chips in all slices."""
        return math.prod(self.shape) * self.num_slices

    @property
    def devices(self) -> int:
        """JAX devices in all slices."""
        return self.chips * self.chip.devices

    @property
    def cores(self) -> int:
        """TensorCores (SMs of a GPU) in all slices."""
        return self.chips * self.chip.cores

    @property
    def hosts(self) -> int:
        """CPU hosts of all slices; part of a host counts as one."""
        if self.chip.kind == "gpu":
            return ceil_div(self.shape[0], math.prod(self.chip.host_shape)) * self.shape[1]
        return max(1, math.prod(self.shape) // math.prod(self.chip.host_shape)) * self.num_slices

    @property
    def wraparound(self) -> tuple[bool, ...]:
        """Which axes of ``shape`` are rings (book, ch. 2)."""
        if self.chip.wrap == "cube":
            return (_is_cubes(self.shape),) * len(self.shape)
        return tuple(str(size) == self.chip.wrap for size in self.shape)

    @property
    def over_dcn(self) -> bool:
        """True if the devices are in several slices (TPU) or nodes (GPU)."""
        return any(axis.resource == "dcn" and axis.size > 1 for axis in self.physical_axes)

    @cached_property
    def physical_axes(self) -> tuple[PhysicalAxis, ...]:
        """The network as one device sees it: x, y, z, core, dcn; on GPUs node, network.

        The axes of ``shape`` are all there, those of size 1 too; core, dcn and network only if there is more than one.
        """
        spec = self.chip
        dcn = spec.dcn_bytes_per_s / spec.devices
        if spec.kind == "gpu":
            node = PhysicalAxis(
                name="node",
                size=self.shape[0],
                kind="switch",
                wrapped=False,
                bytes_per_s=spec.ici_bytes_per_s,
                hop_s=spec.hop_s,
                resource="ici",
                reduces=spec.sharp_gain is not None,
            )
            return (node, *_outer("network", self.shape[1], dcn))
        link = spec.ici_bytes_per_s / spec.devices
        torus = tuple(
            PhysicalAxis(
                name=name,
                size=size,
                kind="torus",
                wrapped=wrapped,
                bytes_per_s=link,
                hop_s=spec.hop_s,
                resource="ici",
            )
            for name, size, wrapped in zip("xyz", self.shape, self.wraparound, strict=False)
        )
        core: tuple[PhysicalAxis, ...] = ()
        if spec.devices > 1:
            # Without a figure, what a device can read from its memory bounds what it can send.
            rate = spec.core_bytes_per_s or self.device_hbm_bytes_per_s
            core = (
                PhysicalAxis(
                    name="core",
                    size=spec.devices,
                    kind="core",
                    wrapped=False,
                    bytes_per_s=rate,
                    hop_s=0.0,
                    resource="ici",
                ),
            )
        return (*torus, *core, *_outer("dcn", self.num_slices, dcn))

    def flops_per_s(self, dtype: str) -> float:
        """Dense peak of all chips. Raises RooftopError if the chip has no peak for ``dtype``."""
        return self.chips * self._rate(dtype)

    @property
    def hbm_bytes(self) -> float:
        """Nominal HBM of all chips."""
        return self.chips * self.chip.hbm_bytes

    @property
    def hbm_usable_bytes(self) -> float:
        """HBM that programs may fill, of all devices."""
        return self.devices * self.chip.hbm_usable_bytes

    @property
    def price_usd_per_hour(self) -> float | None:
        """List price of all chips, None if none is known."""
        price = self.chip.price_usd_per_hour
        return None if price is None else self.chips * price

    def device_flops_per_s(self, dtype: str) -> float:
        """Dense peak of one device. Raises RooftopError if the chip has no peak for ``dtype``."""
        return self._rate(dtype) / self.chip.devices

    @property
    def device_hbm_bytes_per_s(self) -> float:
        """HBM bandwidth of one device."""
        return self.chip.hbm_bytes_per_s / self.chip.devices

    @property
    def device_hbm_usable_bytes(self) -> float:
        """HBM that a program may fill on one device."""
        return self.chip.hbm_usable_bytes

    def _rate(self, dtype: str) -> float:
        try:
            return self.chip.flops_per_s[dtype]
        except KeyError:
            raise unknown(f"dtype of {self.chip.name}", dtype, self.chip.flops_per_s) from None


def slice_sizes(chip: Chip, most: int) -> list[Slice]:
    """Slices of a chip of up to ``most`` chips (and ``MOST_CHIPS``), ascending, about four sizes to a doubling.

    Shapes of the catalogue, the most cubic ones of whole cubes, whole nodes of GPUs, and several whole pods over DCN.
    """
    most = min(most, MOST_CHIPS)
    steps = sorted({part * 2**power // 4 for part in (4, 5, 6, 7) for power in range(2, 20)} | {1, 2, 3})
    shapes: list[tuple[Shape, int]] = [(shape, 1) for shape in chip.slice_shapes]
    pod = math.prod(chip.pod_shape)
    if chip.kind == "gpu":
        shapes += [((pod, nodes), 1) for nodes in steps if 1 < nodes <= most // pod]
    else:
        cubes: dict[int, Shape] = {}
        for shape in sorted(_cubes(chip), key=sum):
            if any(side > longest for side, longest in zip(sorted(shape), sorted(chip.pod_shape), strict=True)):
                continue
            cubes.setdefault(math.prod(shape) // _CUBE_CHIPS, shape)
        shapes += [(cubes[count], 1) for count in (*steps, pod // _CUBE_CHIPS) if count in cubes]
        shapes += [(chip.pod_shape, count) for count in steps if 1 < count <= most // pod]
    slices = {(size := Slice(chip, shape, count)).chips: size for shape, count in shapes}
    return [slices[chips] for chips in sorted(slices) if chips <= most]


def _outer(name: str, size: int, bytes_per_s: float) -> tuple[PhysicalAxis, ...]:
    """The axis between slices or nodes, if there are several."""
    if size == 1:
        return ()
    return (
        PhysicalAxis(
            name=name, size=size, kind="dcn", wrapped=False, bytes_per_s=bytes_per_s, hop_s=0.0, resource="dcn"
        ),
    )


def _exists(spec: Chip, shape: Shape) -> bool:
    """Return True if the chip is sold in this shape (axes in any order)."""
    if spec.kind == "gpu":
        return len(shape) == 2 and shape[:1] in spec.slice_shapes and shape[1] > 0
    if len(shape) != spec.ici_axes or min(shape) < 1:
        return False
    if sorted(shape) in [sorted(offered) for offered in spec.slice_shapes]:
        return True
    return spec.wrap == "cube" and _is_cubes(shape) and math.prod(shape) <= math.prod(spec.pod_shape)


def _is_cubes(shape: Shape) -> bool:
    """Return True if a shape is made of whole 4x4x4 cubes, which optical switches join into a torus (book, ch. 2)."""
    return all(size % _CUBE == 0 for size in shape)


def _check(spec: Slice) -> None:
    if spec.num_slices < 1:
        raise RooftopError("slice", spec.name, "one slice or more after the @")
    if spec.chip.kind == "gpu" and spec.num_slices > 1:
        nodes = _name(spec.chip, (spec.shape[0], math.prod(spec.shape[1:]) * spec.num_slices))
        raise RooftopError("slice", spec.name, f"no @, which joins TPU slices over DCN: nodes of GPUs are {nodes}")
    if not _exists(spec.chip, spec.shape):
        near = " or ".join(_name(spec.chip, shape) for shape in _nearest(spec.chip, spec.shape))
        raise RooftopError("slice", spec.name, f"{_rule(spec.chip, spec.shape)}; nearest: {near}")
    if spec.chips > MOST_CHIPS:
        raise RooftopError("slice", f"{spec.name} ({spec.chips:,} chips)", f"at most {MOST_CHIPS:,} chips")


def _rule(spec: Chip, shape: Shape) -> str:
    """The rule of the chip's shapes that the given one breaks."""
    pod = math.prod(spec.pod_shape)
    if spec.kind == "gpu":
        parts = ", ".join(str(part) for (part,) in spec.slice_shapes)
        return f"{parts} GPUs of a node, times nodes ({spec.name}:{pod}x16)"
    if len(shape) != spec.ici_axes:
        return f"{spec.ici_axes} axes for {spec.name}"
    if math.prod(shape) > pod or (spec.wrap != "cube" and max(shape) > max(spec.pod_shape)):
        return f"at most a pod of {_text(spec.pod_shape)}, {pod} chips (more are several slices over DCN, with @)"
    offered = ", ".join(_text(shape) for shape in spec.slice_shapes)
    return offered + (", or every axis a multiple of 4" if spec.wrap == "cube" else "")


def _nearest(spec: Chip, shape: Shape, count: int = 3) -> list[Shape]:
    """Possible shapes nearest to an impossible one: by the ratio of axes, or of chips where axes do not compare."""
    chips = max(1, math.prod(shape))

    def distance(candidate: Shape) -> tuple[float, int]:
        if spec.kind == "gpu" or len(candidate) != len(shape):
            off = abs(math.log(math.prod(candidate) / chips))
        else:
            pairs = zip(sorted(candidate), sorted(shape), strict=True)
            off = sum(abs(math.log(size / max(1, requested))) for size, requested in pairs)
        return off, max(candidate)

    if spec.kind == "gpu":
        nodes = sorted({1, ceil_div(chips, math.prod(spec.pod_shape))})
        candidates = [(*part, count) for part in spec.slice_shapes for count in nodes]
    else:
        candidates = [*spec.slice_shapes, *_cubes(spec)]
    return sorted(candidates, key=distance)[:count]


def _cubes(spec: Chip) -> list[Shape]:
    """Shapes of whole cubes up to a pod, axes in ascending order."""
    if spec.wrap != "cube":
        return []
    most = math.prod(spec.pod_shape) // _CUBE_CHIPS
    return [
        (a * _CUBE, b * _CUBE, c * _CUBE)
        for a in range(1, most + 1)
        for b in range(a, most // a + 1)
        for c in range(b, most // (a * b) + 1)
    ]


def _name(spec: Chip, shape: Shape) -> str:
    """A slice's name; one node of GPUs is named by its GPUs alone."""
    return f"{spec.name}:{_text(shape[:1] if spec.kind == 'gpu' and shape[1:] == (1,) else shape)}"


def _text(shape: Shape) -> str:
    return "x".join(str(size) for size in shape)
