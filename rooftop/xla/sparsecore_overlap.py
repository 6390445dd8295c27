"""How much of the TensorCores' work a compiled step puts beside its SparseCores' work.

A SparseCore computation is an asynchronous call in the schedule of the TensorCore: what stands between its start and
its done runs meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rooftop.xla.hlo import Instruction, Module

#: Compiler options with which a pipelined step overlaps: without, the compiler may schedule before it knows which
#: computations are the SparseCores'.
PIPELINING_OPTIONS: Mapping[str, bool | int | str] = {"xla_tpu_rerun_latency_hiding_scheduler_post_sc_assignment": True}
#: What TensorCores compute with, as opcodes; the rest of a schedule moves, names or waits.
_COMPUTES = ("fusion", "convolution", "dot", "reduce", "scatter", "gather", "sort", "all-reduce", "select-and-scatter")


@dataclass(frozen=True, kw_only=True)
class SparseCoreOverlap:
    """SparseCore calls of a step, TensorCore computations in all, and those while a SparseCore call is under way."""

    calls: int
    computations: int
    beside: int

    @property
    def share(self) -> float:
        """The part of the TensorCores' computations that has SparseCore work beside it, 0 to 1."""
        return self.beside / self.computations if self.computations else 0.0


def sparsecore_overlap(module: Module) -> SparseCoreOverlap:
    """Read the schedule of a compiled step, its outermost computation."""
    under_way, calls, computations, beside = set[str](), 0, 0, 0
    for instruction in module.computations[module.entry]:
        if _is_sparsecore(instruction, "call-start"):
            under_way.add(instruction.name)
            calls += 1
        elif instruction.opcode == "call-done":
            under_way -= set(instruction.operands)
        elif instruction.opcode in _COMPUTES:
            computations += 1
            beside += bool(under_way)
    return SparseCoreOverlap(calls=calls, computations=computations, beside=beside)


def _is_sparsecore(instruction: Instruction, opcode: str) -> bool:
    return instruction.opcode == opcode and "sparse" in instruction.attribute("async_execution_thread")
