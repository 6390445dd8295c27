"""A trace of any JAX program on any device: devices with their ops, executions of programs, steps, host threads.

Times are picoseconds from the beginning of a host's trace; the clocks of two hosts are never compared.
``rooftop.profile.planes`` creates a trace from the files of a profiler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.profile.intervals import Ints
from rooftop.profile.xplane import Plane, XLine

SECONDS = 1e-12
DeviceKind = Literal["tpu", "gpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Op:
    """An HLO op of a program as the trace describes it; figures are of one execution (None: not in the trace).

    ``text`` is its line of HLO ('' if the trace has none), ``op_name`` the program's name stack, ``source``
    'file:line'.
    """

    program: int
    name: str
    text: str = ""
    category: str = ""
    op_name: str = ""
    source: str = ""
    flops: float | None = None
    hbm_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class Track:
    """Executed ops, sorted by start; ``ops`` are indices into ``Trace.ops``. [N] each."""

    ops: Ints
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, parts: Sequence[tuple[Ints, Ints, Ints]]) -> Track:
        """One track of the (ops, starts, ends) of several."""
        none = np.zeros(0, np.int64)
        ops, starts, ends = (np.concatenate(column) for column in zip((none,) * 3, *parts, strict=True))
        order = np.argsort(starts, kind="stable")
        return cls(ops=ops[order], starts=starts[order], ends=ends[order])

    def __len__(self) -> int:
        return len(self.ops)


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Executions of programs on a device, sorted by start. ``programs`` are keys of ``Trace.programs``. [N] each."""

    programs: Ints
    starts: Ints
    ends: Ints


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Steps that the program has marked, in order: their numbers, starts and ends. [N] each."""

    numbers: Ints
    starts: Ints
    ends: Ints


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device of a host: ``kind`` is tpu, gpu or cpu. ``stats`` are its properties in the trace (peaks, its type).

    ``track`` has the ops that it ran, ``beside`` its asynchronous transfers, if the trace records those separately.
    """

    host: str
    kind: DeviceKind
    ordinal: int
    track: Track
    beside: Track
    runs: Runs
    steps: Steps | None
    stats: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class SparseCore:
    """One SparseCore ``core`` of the TPU ``ordinal`` of a host, with the ops that it ran."""

    host: str
    ordinal: int
    core: int
    track: Track


@dataclass(frozen=True, kw_only=True)
class Host:
    """The threads of one host that ran no ops of devices, and the steps that they marked."""

    name: str
    plane: Plane | None
    threads: tuple[XLine, ...]
    steps: Steps | None


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The recording of one host or several. ``modules`` are serialized HloModuleProtos by program."""

    ops: tuple[Op, ...]
    devices: tuple[Device, ...]
    hosts: tuple[Host, ...]
    sparse_cores: tuple[SparseCore, ...]
    programs: Mapping[int, str]
    modules: Mapping[int, bytes]
    problems: tuple[str, ...]
    planes: tuple[str, ...]

    @property
    def kind(self) -> DeviceKind | Literal[""]:
        """The kind of the devices: tpu, gpu or cpu ('' if there are none)."""
        return self.devices[0].kind if self.devices else ""


def trace_files(path: Path) -> list[Path]:
    """The trace files of a path: one file, or the newest session in a folder, with a file for each host.

    Raises RooftopError if there is none.
    """
    if path.is_file():
        return [path]
    files = sorted(path.rglob("*.xplane.pb"), key=lambda file: (file.parent.name, file.name))
    if not files:
        accepted = "a trace of JAX's profiler (*.xplane.pb), or a folder with one: rooftop train --profile steps=A..B"
        raise RooftopError("trace", str(path), accepted if path.exists() else f"{accepted}; there is no such path")
    return [file for file in files if file.parent == files[-1].parent]
