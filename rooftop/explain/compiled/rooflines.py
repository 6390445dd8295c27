"""A roofline for every instruction of a compiled program: its FLOPs, its bytes, and the resource that binds."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.compiler.hlo.costs import work
from rooftop.compiler.hlo.kernels import KernelEvidence, KernelLimit, kernel, kernel_name
from rooftop.compiler.hlo.places import place_of, purpose, users
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.compiler.machine.run import scheduled
from rooftop.compiler.machine.schedule import ScheduleTimeline
from rooftop.core.amounts import Amount
from rooftop.core.records import Record, derived
from rooftop.roofline.rates import Rates


@dataclass(frozen=True, kw_only=True)
class OperationRoofline(Record):
    """One scheduled instruction and its work; every figure is of one execution on one device.

    ``count`` is the number of executions. ``shape`` is that of its results as XLA writes it, ``matmul`` the M, K, N of
    its largest matmul ('' without one). ``flops`` of a hand-written ``kernel`` are those of ``CalledKernel``.
    ``time_s`` is the bound by resource at peak rates, ``expected_s`` the duration on the timeline: the time at the
    named fractions of the chip or, for a copy that overlaps other work, the wait for it. ``source`` is 'file:line', and
    ``frames`` the whole stack, innermost first.
    """

    op: str
    opcode: str
    scope: str
    phase: str
    count: Amount
    shape: str
    matmul: str
    flops: Amount
    hbm_bytes: Amount
    time_s: dict[str, Amount]
    expected_s: Amount
    kernel: bool
    source: str
    frames: tuple[str, ...] = ()

    @derived
    def bound(self) -> str:
        """The busiest resource ('' for what takes no time)."""
        busiest = max(self.time_s, key=lambda name: self.time_s[name])
        if self.time_s[busiest]:
            return busiest
        # The end of a copy computes nothing: it waits.
        return "hbm" if self.opcode.endswith("-done") else ""

    @derived
    def intensity(self) -> Amount | None:
        """FLOPs per byte of HBM traffic (None where there is none)."""
        return self.flops / self.hbm_bytes if self.hbm_bytes else None

    @property
    def total_s(self) -> float:
        """Expected seconds of all executions."""
        return self.count * self.expected_s


def operations(module: Module, line: ScheduleTimeline, rates: Rates) -> tuple[OperationRoofline, ...]:
    """Every instruction that computes or moves something, in the order of execution; collectives are left out.

    A fusion that computes while a collective advances counts by what it computes. Expected seconds times executions add
    up to ``compute_s`` and ``other_wait_s`` of the timeline.
    """
    rooflines = (
        _operation(module, computation, instruction, purpose(module, computation, instruction, used_by), line, rates)
        for computation, used_by in ((computation, users(computation)) for computation in scheduled(module))
        for instruction in computation
    )
    return tuple(item for item in rooflines if item.expected_s)


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
        op=instruction.name,
        opcode=instruction.opcode,
        scope=place[0],
        phase=place[1],
        count=executions,
        shape=", ".join(f"{item.dtype}[{','.join(map(str, item.dims))}]" for item in instruction.shape),
        matmul="" if sizes is None else " x ".join(f"{size:.0f}" for size in sizes[:3]),
        flops=done.flops,
        hbm_bytes=float(done.hbm_bytes),
        time_s=done.bound_s(rates),
        expected_s=line.spent_s.get((computation.name, instruction.name), 0.0) / executions,
        kernel=done.kernel is not None,
        source=module.source(instruction),
        frames=module.frames(instruction),
    )


@dataclass(frozen=True, kw_only=True)
class CalledKernel(Record):
    """A hand-written kernel of the program, called ``count`` times; figures are of one call on one device.

    ``flops`` (None: unknown) have an ``evidence``, see ``rooftop.compiler.hlo.kernels``, and are 'at most' so many if
    branches on data count as taken. ``source`` is 'file:line'.
    """

    kernel: str
    op: str
    scope: str
    phase: str
    count: Amount
    flops: Amount | None
    evidence: KernelEvidence
    limit: KernelLimit
    hbm_bytes: Amount
    source: str


def called_kernels(module: Module) -> tuple[CalledKernel, ...]:
    """Every call of a hand-written kernel, in the order of the text."""
    calls = []
    for computation in scheduled(module):
        for instruction in computation:
            counted = kernel(module, computation, instruction)
            if counted is None:
                continue
            scope, phase = place_of(module, computation, instruction)
            calls.append(
                CalledKernel(
                    kernel=kernel_name(instruction),
                    op=instruction.name,
                    scope=scope,
                    phase=phase,
                    count=module.executions[computation.name],
                    flops=counted.flops,
                    evidence=counted.evidence,
                    limit=counted.limit,
                    hbm_bytes=float(work(module, computation, instruction).hbm_bytes),
                    source=module.source(instruction),
                )
            )
    return tuple(calls)
