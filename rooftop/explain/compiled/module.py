"""A module of HLO alone, as ``--xla_dump_to`` or ``compiled.as_text()`` writes it: its compiled ledger and timeline."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rooftop.arrays import Mesh
from rooftop.compiler.compiling import Compiled
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.memory import PeakMemory, read_memory
from rooftop.core.errors import UNFORESEEN, RooftopError
from rooftop.core.files import read_text
from rooftop.explain.axes import devices_of, infer_mesh
from rooftop.explain.compiled.report import CompiledReport
from rooftop.explain.measured.modules import read_module
from rooftop.hardware import Chip, Slice

#: Endings of files of one module.
SUFFIXES = (".hlo", ".txt", ".pb", ".hlo_module")
_OPTIMISED = "after_optimizations"
_ACCEPTED = f"an optimised module: compiled.as_text(), *{_OPTIMISED}.txt or .hlo.pb, or a folder of --xla_dump_to"


@dataclass(frozen=True, kw_only=True)
class DumpedModule:
    """The text of a module and, out of a folder of ``--xla_dump_to``, the arrays at its peak of memory."""

    name: str
    text: str
    at_peak: PeakMemory | None


def is_module(path: Path) -> bool:
    """Return True for a file of a module, or a folder with dumped ones; other files and folders are traces and runs."""
    if path.is_dir():
        return any(path.glob(f"*{_OPTIMISED}*"))
    return path.suffix in SUFFIXES and not path.name.endswith(".xplane.pb")


def read_dump(path: Path) -> DumpedModule:
    """Read a module. Of a folder with several, the largest one.

    Raises RooftopError if a file is not an optimised module, or a folder has none.
    """
    if not path.is_dir():
        return _read(path)
    texts = sorted(path.glob(f"*{_OPTIMISED}.txt"), key=lambda file: -file.stat().st_size)
    protos = sorted(path.glob(f"*{_OPTIMISED}*.pb"), key=lambda file: -file.stat().st_size)
    if not texts and not protos:
        raise RooftopError("module", str(path), _ACCEPTED)
    return _read((texts or protos)[0])


def _read(path: Path) -> DumpedModule:
    text = read_module(path)
    return DumpedModule(name=path.name, text=text, at_peak=_at_peak(path, text))


def _at_peak(path: Path, text: str) -> PeakMemory | None:
    """The arrays at the peak, from the reports that XLA dumps next to a module; None without them."""
    reports = [path.with_name(f"{path.stem}-{name}.txt") for name in ("buffer-assignment", "live-range")]
    if not all(report.exists() for report in reports):
        return None
    assignment, live_ranges = (read_text(report, errors="replace") for report in reports)
    return read_memory(assignment, live_ranges, hlo.parse(text))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what no reader of a module foresees, in a text that XLA did not write, into a RooftopError."""
    try:
        yield
    except UNFORESEEN as error:
        says = f"{type(error).__name__}: {error}".splitlines()[0]
        raise RooftopError("module", f"{path} ({says})", _ACCEPTED) from error


def explain_module(path: Path, *, on: Slice | Chip, mesh: Mapping[str, int] | None = None) -> CompiledReport:
    """The report of a module on a slice, or on as many chips of a kind as it has devices.

    ``mesh`` names its axes, in the order of its partitions; by default they follow from its replica groups. Where the
    module was laid out in another way than ``Mesh.lay`` does, times of its collectives are those of this layout.
    Raises RooftopError for other files, and for a slice with another number of devices.
    """
    with reading(path):
        report = _explain(path, on, mesh)
        # All of it is read here, where a text that makes no sense has a name.
        report.record()
        return report


def _explain(path: Path, on: Slice | Chip, mesh: Mapping[str, int] | None) -> CompiledReport:
    dumped = read_dump(path)
    module, devices = hlo.parse(dumped.text), devices_of(dumped.text)
    if "is_scheduled=true" not in dumped.text.partition("\n")[0]:
        raise RooftopError("module", str(path), f"{_ACCEPTED}; this one is not scheduled yet")
    slice_ = on if isinstance(on, Slice) else _slice_of(on, devices)
    if slice_.devices != devices:
        raise RooftopError("on", slice_.name, f"a slice of the {devices} devices that {dumped.name} is compiled for")
    sizes = dict(mesh) if mesh is not None else infer_mesh(module, devices)
    return CompiledReport(
        plan=None,
        compiled=Compiled(
            mesh=Mesh.lay(slice_, sizes),
            hlo_text=dumped.text,
            peak_bytes=round(_at_least_bytes(module, dumped.text)),
            memory={},
            lower_s=0.0,
            compile_s=0.0,
            versions={},
            at_peak=dumped.at_peak,
        ),
    )


def _slice_of(chip: Chip, devices: int) -> Slice:
    """A slice of a kind of chip with so many devices: one of the catalogue's shapes, the most cubic one."""
    shapes = [shape for shape in chip.slice_shapes if math.prod(shape) * chip.devices == devices]
    if not shapes:
        example = "x".join(map(str, chip.slice_shapes[0]))
        raise RooftopError("on", chip.name, f"a slice of {devices} devices, written like {chip.name}:{example}")
    return Slice(chip, min(shapes, key=lambda shape: (max(shape), shape)))


def _at_least_bytes(module: hlo.Module, text: str) -> float:
    """Bytes of the arguments, and of the results that do not take the place of one."""
    entry = module.computations[module.entry]
    arguments = [tensor for item in entry if item.opcode == "parameter" for tensor in item.shape if not tensor.space]
    results = entry.instructions[entry.root].shape
    aliased = {int(output or 0) for output in re.findall(r"\{(\d*)\}: \(\d+, \{", text.partition("\n")[0])}
    new = [tensor for at, tensor in enumerate(results) if at not in aliased]
    return sum(tensor.nbytes for tensor in (*arguments, *new))
