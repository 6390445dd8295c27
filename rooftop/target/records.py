"""The record of a run on a target: its programs with the compiler's results, and what was not computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from rooftop.arrays import Mesh, placed_mesh
from rooftop.compiler.compiling import WorkerResult
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice

#: Reasons for which a program is not compiled: it is an operation or a helper of JAX itself; its arguments are small,
#: and on one device each; its function was compiled often enough; it has too few matmul FLOPs for the number asked for.
LeftOutReason = Literal["operation", "small", "repeated", "flops"]
#: How a script ended: it called a program often enough, came to its end, or raised an exception.
Ending = Literal["steps", "end", "error"]


@dataclass(frozen=True, kw_only=True)
class TargetProgram:
    """A program that was compiled for the target.

    ``source`` is the 'file:line' of its function and ``called_from`` that of its first call; ``calls`` counts them.
    ``matmul_flops`` (None if it was compiled by hand) are those that the program writes, over all devices, outside of
    ``kernels``, its Pallas calls. ``differs`` says what differs from the last compilation of the same function.
    ``axes`` are those of its mesh, over devices at the coordinates ``places``.
    """

    name: str
    source: str
    called_from: str
    calls: int
    matmul_flops: float | None
    kernels: int
    differs: tuple[str, ...]
    axes: Mapping[str, int]
    places: tuple[tuple[int, ...], ...]
    result: WorkerResult
    cached: bool

    def mesh(self, slice_: Slice) -> Mesh:
        """The mesh on the slice. Raises RooftopError for a number of devices that does not divide the slice's."""
        return placed_mesh(slice_, self.axes, self.places)


@dataclass(frozen=True, kw_only=True)
class NotCompiled:
    """Programs of one function that were not compiled, and the reason; ``source`` is '' for functions of JAX itself."""

    name: str
    source: str
    reason: LeftOutReason
    count: int


@dataclass(frozen=True, kw_only=True)
class TargetRecord:
    """All programs; ``reads`` of unknown values by 'file:line', programs ``not_compiled``, and ``notes``."""

    programs: tuple[TargetProgram, ...]
    reads: Mapping[str, int] = field(default_factory=dict)
    not_compiled: tuple[NotCompiled, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class ScriptError:
    """The exception, exit, signal or timeout that ended a script; ``place`` is the user's own 'file:line'."""

    kind: str
    message: str
    place: str

    def __str__(self) -> str:
        return f"{self.place}: {self.kind}: {self.message}" if self.place else f"{self.kind}: {self.message}"

    def refusal(self, command: str) -> RooftopError:
        """The error of a verb that was given the script."""
        if self.kind == "timeout":
            return RooftopError("timeout", self.message, "longer than the script takes")
        if self.kind == "killed":
            return RooftopError("command", command, f"one that ends by itself (it ended with {self.message})")
        return RooftopError("script", str(self), "one that runs until its programs are compiled")


@dataclass(frozen=True, kw_only=True)
class ScriptRun:
    """A script that ran on the target for ``seconds``."""

    record: TargetRecord
    ending: Ending
    seconds: float
    error: ScriptError | None = None
