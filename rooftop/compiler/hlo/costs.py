"""Work of one scheduled instruction on its device, and its time.

A fusion reads the used part of its parameters (a slice of one, if it is only sliced), writes its results, and executes
its matmuls. Arrays that the compiler keeps in VMEM cause no HBM traffic.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from rooftop.compiler.hlo.kernels import Kernel, kernel
from rooftop.compiler.hlo.matmuls import MATMULS, matmul_dtype, matmul_sizes
from rooftop.compiler.hlo.text import HloComputation, HloTensor, Instruction, Module
from rooftop.roofline.rates import Rates

#: Opcodes that take no time: names for other results, and scalars that identify the device.
FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "add-dependency", "domain", "opt-barrier", "while", "call", "conditional", "iota",
    "send", "recv",
)  # fmt: skip
_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
#: Opcodes that compute no elements one by one.
_MOVES = (
    *FREE, *MATMULS, *_COLLECTIVES, "copy", "reshape", "transpose", "broadcast", "slice", "dynamic-slice",
    "dynamic-update-slice", "pad", "concatenate", "gather", "scatter", "reverse", "fusion", "custom-call",
)  # fmt: skip
#: Custom calls of the compiler that move no data.
_FREE_CALLS = (
    "AllocateBuffer", "ConcatBitcast", "AsyncCollective", "PrepareAsyncCall", "AssumeGatherIndicesInBound", "Sharding",
)  # fmt: skip
#: Asynchronous copies; the shape of each has both its ends.
_COPIES = ("copy-start", "slice-start", "dynamic-slice-start", "dynamic-update-slice-start")
#: The memory space of the host in layouts.
_HOST = 5
_RENAMES = ("bitcast", "reshape", "transpose", "convert", "copy", "pad")


@dataclass(frozen=True, kw_only=True)
class InstructionWork:
    """Work of one execution of an instruction.

    ``matmuls`` are M, K, N and dtype of each matmul; ``vector_ops`` the elements computed one by one; ``vmem_bytes``
    all bytes that are read; ``cycles`` XLA's own estimate (None without one). Of a hand-written ``kernel`` only the
    arrays that it reads and writes and the declared FLOPs are known.
    """

    matmuls: tuple[tuple[float, float, float, str], ...] = ()
    hbm_bytes: float = 0.0
    vmem_bytes: float = 0.0
    vector_ops: float = 0.0
    cycles: float | None = None
    kernel: Kernel | None = None

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls, and those that a kernel declares."""
        return sum(2.0 * m * k * n for m, k, n, _ in self.matmuls) + self._kernel_flops

    @property
    def _kernel_flops(self) -> float:
        return 0.0 if self.kernel is None else self.kernel.flops or 0.0

    def bound_s(self, rates: Rates) -> dict[str, float]:
        """Seconds by resource at peak rates; a dtype that the chip does not support runs as bf16."""
        peak = rates.flops_per_s
        return {
            "mxu": sum(2.0 * m * k * n / peak.get(dtype, peak["bf16"]) for m, k, n, dtype in self.matmuls)
            + self._kernel_flops / peak["bf16"],
            "hbm": self.hbm_bytes / rates.hbm_bytes_per_s,
            "vpu": self.vector_ops / rates.vector_flops_per_s,
        }

    def expected_s(self, rates: Rates) -> float:
        """Seconds at the chip's named fractions, the slowest of matrix unit, HBM, VMEM and vector unit."""
        known = rates.chip.flops_per_s
        matrix = sum(float(rates.matmul_s(m, k, n, d if d in known else "bf16")) for m, k, n, d in self.matmuls)
        matrix += self.kernel.expected_s(rates) if self.kernel else 0.0
        return max(
            matrix,
            float(rates.hbm_s(self.hbm_bytes)),
            self.vmem_bytes * rates.chip.devices / rates.chip.vmem_bytes_per_s,
            self.vector_ops / rates.vector_flops_per_s,
        )

    def estimated_s(self, rates: Rates) -> float:
        """Seconds by XLA's own estimate, at the catalogue's clock; ours without one."""
        return self.expected_s(rates) if self.cycles is None else self.cycles / rates.chip.clock_hz


def work(module: Module, computation: HloComputation, instruction: Instruction) -> InstructionWork:
    """The work of one instruction of a scheduled computation, without the bodies of loops and calls."""
    opcode = instruction.opcode
    if opcode in FREE or (opcode == "custom-call" and any(name in instruction.attributes for name in _FREE_CALLS)):
        return InstructionWork()
    if opcode.endswith(("-start", "-done")):
        return InstructionWork(hbm_bytes=moved_bytes(instruction))
    cycles = re.search(r'"estimated_cycles":"?(\d+)', instruction.attributes)
    reads, writes = _traffic(module, computation, instruction)
    return InstructionWork(
        matmuls=tuple(_matmuls(module, computation, instruction)),
        hbm_bytes=sum(nbytes for nbytes, space in (*reads, *writes) if space == 0),
        vmem_bytes=sum(nbytes for nbytes, _ in reads),
        vector_ops=_vector_ops(module, instruction),
        cycles=float(cycles.group(1)) if cycles else None,
        kernel=kernel(computation, instruction),
    )


def is_host_copy(start: Instruction) -> bool:
    """True if the copy that begins here reads or writes the host's memory."""
    return start.opcode in _COPIES and any(tensor.space == _HOST for tensor in start.shape[:2])


def moved_bytes(start: Instruction) -> float:
    """Bytes of the copy between memories that begins with this instruction, 0 if it begins none.

    A copy that an earlier program has begun is complete already.
    """
    if start.opcode not in _COPIES or "cross_program_prefetch_index" in start.attributes:
        return 0.0
    return min((tensor.nbytes for tensor in start.shape[:2]), default=0.0)


def _matmuls(
    module: Module, computation: HloComputation, instruction: Instruction
) -> list[tuple[float, float, float, str]]:
    if instruction.opcode in MATMULS:
        return [(*matmul_sizes(computation, instruction), matmul_dtype(computation, instruction))]
    if instruction.opcode != "fusion":
        return []
    inner = module.computations[instruction.called[0]]
    return [matmul for fused in inner for matmul in _matmuls(module, inner, fused)]


def _vector_ops(module: Module, instruction: Instruction) -> float:
    if instruction.opcode == "fusion":
        return sum(_vector_ops(module, fused) for fused in module.computations[instruction.called[0]])
    return 0.0 if instruction.opcode in _MOVES else float(sum(tensor.elements for tensor in instruction.shape))


def _traffic(
    module: Module, computation: HloComputation, instruction: Instruction
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Bytes read and bytes written, each with its memory space."""
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        parameters = [fused for fused in inner if fused.opcode == "parameter" and fused.shape]
        reads = [(_read(module, inner, parameter), parameter.shape[0].space) for parameter in parameters]
        root = inner.instructions[inner.root]
        results = inner.operands(root) if root.opcode == "tuple" else (root,)
        return reads, [(_written(inner, result), result.shape[0].space) for result in results if result.shape]
    operands = computation.operands(instruction)
    out = [(tensor.nbytes, tensor.space) for tensor in instruction.shape]
    if instruction.opcode in ("slice", "dynamic-slice", "gather"):
        return [(out[0][0], operands[0].shape[0].space)], out
    if instruction.opcode == "dynamic-update-slice":
        update = operands[1].shape[0]
        return [(update.nbytes, update.space)], [(update.nbytes, out[0][1])]
    return [(tensor.nbytes, tensor.space) for operand in operands for tensor in operand.shape], out


def _read(module: Module, inner: HloComputation, source: Instruction) -> float:
    """Bytes of ``source`` that a fused computation reads."""
    whole = source.shape[0]
    return min(whole.nbytes, _elements_read(module, inner, source) * _item_bytes(whole))


def _elements_read(module: Module, inner: HloComputation, source: Instruction) -> float:
    total = 0.0
    for user in inner:
        if source.name not in user.operands:
            continue
        first = user.operands[0] == source.name
        if user.opcode in ("slice", "dynamic-slice", "gather") and first:
            total += user.shape[0].elements
        elif user.opcode in _RENAMES:
            total += _elements_read(module, inner, user) if user.name != inner.root else source.shape[0].elements
        elif user.opcode == "fusion":
            called = module.computations[user.called[0]]
            parameters = {fused.literal: fused for fused in called if fused.opcode == "parameter"}
            for number, name in enumerate(user.operands):
                if name == source.name:
                    total += _elements_read(module, called, parameters[str(number)])
        elif not (_is_passed_through(user) or (user.opcode == "dynamic-update-slice" and first)):
            total += source.shape[0].elements
    return total


def _is_passed_through(user: Instruction) -> bool:
    """True if an instruction of a fusion passes an array through: an asynchronous collective in progress."""
    return user.opcode == "tuple" or user.opcode in _COLLECTIVES or "AsyncCollective" in user.attributes


def _written(inner: HloComputation, result: Instruction) -> float:
    """Bytes that a fused computation writes for one of its results."""
    while result.opcode in ("bitcast", "convert") and result.operands:
        result = inner.operands(result)[0]
    if result.opcode == "parameter" or _is_passed_through(result):
        return 0.0
    if result.opcode == "dynamic-update-slice":
        return inner.operands(result)[1].shape[0].nbytes
    return result.shape[0].nbytes


def _item_bytes(tensor: HloTensor) -> float:
    return tensor.nbytes / max(1, tensor.elements)
