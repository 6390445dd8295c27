"""A roofline for every instruction of a compiled program: what it computes, what it moves, and which of them binds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from rooftop.compiler.hlo.costs import work
from rooftop.compiler.hlo.places import purpose, users
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.compiler.machine.run import scheduled
from rooftop.compiler.machine.schedule import ScheduleTimeline
from rooftop.roofline.rates import Rates


@dataclass(frozen=True, kw_only=True)
class OperationRoofline:
    """One scheduled instruction and its work; every figure is of one execution on one device.

    ``shape`` is that of its results as XLA writes it, ``matmul`` the M, K, N of its largest matmul ('' without one).
    ``flops`` of a hand-written ``kernel`` are those that its program declares. ``time_s`` is the bound by resource at
    peak rates, ``expected_s`` what the operation takes on the timeline: its time at the named fractions of the chip or,
    of a copy that runs next to the rest, the wait for it.
    """

    name: str
    opcode: str
    scope: str
    phase: str
    source: str
    executions: int
    shape: str
    matmul: str
    flops: float
    hbm_bytes: float
    vector_ops: float
    time_s: dict[str, float]
    expected_s: float
    kernel: bool

    @property
    def bound(self) -> str:
        """The busiest resource ('' for what takes no time)."""
        busiest = max(self.time_s, key=lambda name: self.time_s[name])
        if self.time_s[busiest]:
            return busiest
        # What ends a copy computes nothing: it waits.
        return "hbm" if self.opcode.endswith("-done") else ""

    @property
    def intensity(self) -> float | None:
        """FLOPs per byte of HBM traffic (None where there is none)."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else None

    @property
    def total_s(self) -> float:
        """Expected seconds of all executions."""
        return self.executions * self.expected_s

    def to_json(self) -> dict[str, Any]:
        """The operation as plain JSON values."""
        return {
            "op": self.name,
            "opcode": self.opcode,
            "scope": self.scope,
            "phase": self.phase,
            "count": self.executions,
            "shape": self.shape,
            "matmul": self.matmul,
            "flops": self.flops,
            "hbm_bytes": self.hbm_bytes,
            "intensity": self.intensity,
            "bound": self.bound,
            "time_s": self.time_s,
            "expected_s": self.expected_s,
            "kernel": self.kernel,
            "source": self.source,
        }


def operations(module: Module, line: ScheduleTimeline, rates: Rates) -> tuple[OperationRoofline, ...]:
    """Every instruction that computes or moves something, in the order of execution; collectives are left out.

    A fusion that computes while a collective advances counts by what it computes. Expected seconds times executions add
    up to ``compute_s`` and ``other_wait_s`` of the timeline.
    """
    result = (
        _operation(module, computation, instruction, place, line, rates)
        for computation in scheduled(module)
        for instruction, place in _placed(module, computation)
    )
    return tuple(item for item in result if item.expected_s)


def slowest(rooflines: Iterable[OperationRoofline], count: int) -> list[OperationRoofline]:
    """The operations that take the most time over all their executions."""
    return sorted(rooflines, key=lambda item: -item.total_s)[:count]


def _placed(module: Module, computation: HloComputation) -> Iterator[tuple[Instruction, tuple[str, str]]]:
    """The instructions of a computation, each with its scope and phase."""
    used_by = users(computation)
    for instruction in computation:
        yield instruction, purpose(module, computation, instruction, used_by)


def _operation(
    module: Module,
    computation: HloComputation,
    instruction: Instruction,
    place: tuple[str, str],
    line: ScheduleTimeline,
    rates: Rates,
) -> OperationRoofline:
    done = work(module, computation, instruction)
    sizes = max(done.matmuls, key=lambda matmul: matmul[0] * matmul[1] * matmul[2], default=None)
    executions = module.executions[computation.name]
    return OperationRoofline(
        name=instruction.name,
        opcode=instruction.opcode,
        scope=place[0],
        phase=place[1],
        source=module.source(instruction),
        executions=executions,
        shape=", ".join(f"{item.dtype}[{','.join(map(str, item.dims))}]" for item in instruction.shape),
        matmul="" if sizes is None else " x ".join(f"{size:.0f}" for size in sizes[:3]),
        flops=done.flops,
        hbm_bytes=float(done.hbm_bytes),
        vector_ops=float(done.vector_ops),
        time_s=done.bound_s(rates),
        expected_s=line.spent_s.get((computation.name, instruction.name), 0.0) / executions,
        kernel=done.kernel is not None,
    )
