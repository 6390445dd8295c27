"""Work of one scheduled instruction on its device, and its time.

- *Matmuls*: ``dot``, ``convolution``, which XLA:TPU uses for every matmul, and calls of cuBLAS.
- *Hand-written kernels*: ``rooftop.compiler.hlo.kernels``.
- A *fusion* reads the used part of its parameters (a slice of one, if it is only sliced), writes its results, and
  executes its matmuls. Arrays that the compiler keeps in VMEM cause no HBM traffic.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from rooftop.compiler.hlo.kernels import CUBLAS, CUDNN, Kernel, kernel, target
from rooftop.compiler.hlo.text import HloComputation, HloTensor, Instruction, Module
from rooftop.core.errors import RooftopError
from rooftop.roofline.rates import Rates

_MATMULS = ("dot", "convolution")

#: Positions of a window in one dim, and pairs of them that are looked at.
_MOST_POSITIONS, _MOST_PAIRS = 2**24, 2**32

#: M, K and N, the dtype, and the batch: so many matmuls of [M / batch, K] x [K, N].
Matmul: TypeAlias = tuple[float, float, float, str, int]

_DTYPES = {"bf16": "bf16", "f16": "f16", "f32": "f32", "s8": "int8", "u8": "int8", "s4": "int4", "u4": "int4"}


def is_matmul(instruction: Instruction) -> bool:
    """True for a ``dot``, a ``convolution`` or a matmul of cuBLAS."""
    return instruction.opcode in _MATMULS or target(instruction).startswith(CUBLAS)


def matmul_flops(computation: HloComputation, instruction: Instruction) -> float:
    """FLOPs of one matmul: two per multiply-add that reads no padding.

    XLA:TPU turns batch and contracted dims of a matmul into windows with padding and dilation. Positions where the
    window is outside of its input do not count, so the result is exactly 2 * B * M * N * K of the matmul.
    """
    left, right = (operand.shape[0] for operand in computation.operands(instruction)[:2])
    out = instruction.shape[0]
    if instruction.opcode != "convolution":
        return 2.0 * out.elements * math.prod(left.dims[dim] for dim in _left_dims(instruction, "contracting"))
    labels = re.search(r"dim_labels=(\w{1,99})_(\w{1,99})->(\w{1,99})", instruction.attributes)
    if labels is None:
        return 0.0
    left_labels, right_labels, out_labels = labels.groups()
    window = _window(instruction.attributes, sum(label.isdigit() for label in out_labels))
    terms = 1
    for axis, (stride, low, left_dilate, right_dilate) in enumerate(window):
        label = str(axis)
        terms *= _valid_positions(
            size=left.dims[left_labels.index(label)],
            kernel=right.dims[right_labels.index(label)],
            out=out.dims[out_labels.index(label)],
            stride=stride,
            low=low,
            left_dilate=left_dilate,
            right_dilate=right_dilate,
        )
    batch_groups = int(instruction.attribute("batch_group_count") or 1)
    batch = left.dims[left_labels.index("b")] // batch_groups
    inputs, outputs = right.dims[right_labels.index("i")], right.dims[right_labels.index("o")]
    return 2.0 * terms * batch * inputs * outputs


def _left_dims(instruction: Instruction, role: str) -> list[int]:
    """The dims of the left operand of a ``dot``, or of a call of cuBLAS, that are "contracting" or "batch"."""
    written = rf"lhs_{role}_dims=\{{([\d,]*)\}}|\"lhs_{role}_dimensions\":\[([\"\d,]*)\]"
    match = re.search(written, instruction.attributes)
    return [int(dim) for dim in re.findall(r"\d+", match.group(1) or match.group(2) or "")] if match else []


def _window(attributes: str, axes: int) -> list[tuple[int, int, int, int]]:
    """Stride, low padding and both dilations of each spatial axis."""
    text = re.search(r"window=\{([^{}]*)\}", attributes)
    window = dict(part.split("=") for part in text.group(1).split()) if text else {}

    def numbers(name: str, default: int) -> list[int]:
        return [int(part.split("_")[0]) for part in window[name].split("x")] if name in window else [default] * axes

    return list(
        zip(numbers("stride", 1), numbers("pad", 0), numbers("lhs_dilate", 1), numbers("rhs_dilate", 1), strict=True)
    )


def _valid_positions(
    *, size: int, kernel: int, out: int, stride: int, low: int, left_dilate: int, right_dilate: int
) -> int:
    """Pairs of an output position and a kernel position at which the window reads an element of the input."""
    dilated = (size - 1) * left_dilate + 1
    # Both positions are counted alike: go through the shorter range, and see all of the longer one at once.
    if kernel <= out:
        shorter, step, longer, stride = kernel, right_dilate, out, stride
    else:
        shorter, step, longer, stride = out, stride, kernel, right_dilate
    if longer > _MOST_POSITIONS or shorter * longer > _MOST_PAIRS:
        raise RooftopError("hlo window", f"{kernel} x {out} positions", f"up to {_MOST_POSITIONS:,} in each dim")
    starts = np.arange(longer, dtype=np.int64) * stride - low
    total = 0
    for position in range(shorter):
        read = starts + position * step
        total += int(np.count_nonzero((read >= 0) & (read < dilated) & (read % left_dilate == 0)))
    return total


def matmul_sizes(computation: HloComputation, instruction: Instruction) -> tuple[float, float, float]:
    """M, K and N of one matmul as [M, K] x [K, N]; batch dims and windows count into M and K."""
    out = instruction.shape[0]
    labels = re.search(r"dim_labels=\w{1,199}->(\w{1,99})", instruction.attributes)
    n = out.dims[labels.group(1).index("f") if labels else -1] if out.dims else 1
    k = matmul_flops(computation, instruction) / (2.0 * max(1, out.elements))
    return out.elements / n, k, float(n)


def matmul_batch(computation: HloComputation, instruction: Instruction) -> int:
    """Matmuls that one instruction does at once: 1 without dims that both operands and the result have.

    In a convolution such a dim is a spatial one whose window reads one element of the input for each of the result.
    """
    left, right = (operand.shape[0] for operand in computation.operands(instruction)[:2])
    if instruction.opcode != "convolution":
        return math.prod(left.dims[dim] for dim in _left_dims(instruction, "batch"))
    labels = re.search(r"dim_labels=(\w{1,99})_(\w{1,99})->(\w{1,99})", instruction.attributes)
    if labels is None:
        return 1
    sizes = (
        {tensor.dims[names.index(str(axis))] for tensor, names in zip(tensors, labels.groups(), strict=True)}
        for tensors in [(left, right, instruction.shape[0])]
        for axis in range(sum(label.isdigit() for label in labels.group(3)))
    )
    return math.prod(size.pop() for size in sizes if len(size) == 1)


def matmul_dtype(computation: HloComputation, instruction: Instruction) -> str:
    """The dtype in which a matmul runs: next to a bf16 operand, a float32 one is rounded on its way into the unit."""
    types = [_ledger_dtype(operand.shape[0].dtype) for operand in computation.operands(instruction)[:2]]
    return "bf16" if "bf16" in types else types[0]


def _ledger_dtype(dtype: str) -> str:
    if dtype.startswith("f8"):
        return "f8_e5m2" if dtype.startswith("f8e5m2") else "f8_e4m3"
    return _DTYPES.get(dtype, "f32")


#: Opcodes that take no time: names for other results, and scalars that identify the device.
FREE = (
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id",
    "optimization-barrier", "add-dependency", "domain", "opt-barrier", "while", "call", "conditional", "iota",
    "send", "recv",
)  # fmt: skip
_COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
#: Opcodes that compute no elements one by one.
_MOVES = (
    *FREE, *_MATMULS, *_COLLECTIVES, "copy", "reshape", "transpose", "broadcast", "slice", "dynamic-slice",
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

    ``vector_ops`` are the elements computed one by one; ``vmem_bytes`` all bytes that are read; ``cycles`` XLA's own
    estimate (None without one). The bytes of a hand-written ``kernel`` are those of its estimate, without arrays in
    VMEM; without an estimate, those of its arrays in HBM.
    """

    matmuls: tuple[Matmul, ...] = ()
    hbm_bytes: float = 0.0
    vmem_bytes: float = 0.0
    vector_ops: float = 0.0
    cycles: float | None = None
    kernel: Kernel | None = None

    @property
    def flops(self) -> float:
        """FLOPs of the matmuls, and those of a kernel."""
        return sum(2.0 * m * k * n for m, k, n, *_ in self.matmuls) + self._kernel_flops

    @property
    def _kernel_flops(self) -> float:
        return 0.0 if self.kernel is None else self.kernel.flops or 0.0

    def bound_s(self, rates: Rates) -> dict[str, float]:
        """Seconds by resource at peak rates; a dtype that the chip does not support runs as bf16."""
        peak = rates.flops_per_s
        return {
            "mxu": sum(2.0 * m * k * n / peak.get(dtype, peak["bf16"]) for m, k, n, dtype, _ in self.matmuls)
            + self._kernel_flops / peak["bf16"],
            "hbm": self.hbm_bytes / rates.hbm_bytes_per_s,
            "vpu": self.vector_ops / rates.vector_flops_per_s,
        }

    def expected_s(self, rates: Rates) -> float:
        """Seconds at the chip's named fractions, the slowest of matrix unit, HBM, VMEM and vector unit."""
        known = rates.chip.flops_per_s
        matrix = sum(
            float(rates.matmul_s(m / batch, k, n, dtype if dtype in known else "bf16", batch))
            for m, k, n, dtype, batch in self.matmuls
        )
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
        return InstructionWork(hbm_bytes=moved_bytes(module, computation, instruction))
    cycles = re.search(r'"estimated_cycles":"?(\d+)', instruction.attributes)
    reads, writes = _traffic(module, computation, instruction)
    called = kernel(module, computation, instruction)
    arrays = sum(nbytes for nbytes, space in (*reads, *writes) if space == 0)
    read = sum(nbytes for nbytes, _ in reads)
    if called is not None and called.hbm_bytes is not None:
        # An estimate does not know in which memory XLA puts an array. A kernel may read a small part of one.
        elsewhere = sum(nbytes for nbytes, space in (*reads, *writes) if space != 0)
        arrays, read = max(0.0, called.hbm_bytes - elsewhere) if arrays else 0.0, min(read, called.hbm_bytes)
    return InstructionWork(
        matmuls=tuple(_matmuls(module, computation, instruction)),
        hbm_bytes=arrays,
        vmem_bytes=read,
        vector_ops=_vector_ops(module, instruction),
        cycles=float(cycles.group(1)) if cycles else None,
        kernel=called,
    )


def is_host_copy(start: Instruction) -> bool:
    """True if the copy that begins here reads or writes the host's memory."""
    return start.opcode in _COPIES and any(tensor.space == _HOST for tensor in start.shape[:2])


def moved_bytes(module: Module, computation: HloComputation, start: Instruction) -> float:
    """Bytes of the copy between memories that begins with this instruction, 0 if it begins none.

    A copy that an earlier program has begun is complete already. XLA:GPU copies slices of a loop's stacks in fusions of
    their own, next to its kernels: they read and write HBM.
    """
    if start.opcode == "fusion-start":
        reads, writes = _traffic(module, computation, start)
        return sum(nbytes for nbytes, space in (*reads, *writes) if space == 0)
    if start.opcode not in _COPIES or "cross_program_prefetch_index" in start.attributes:
        return 0.0
    return min((tensor.nbytes for tensor in start.shape[:2]), default=0.0)


def _matmuls(module: Module, computation: HloComputation, instruction: Instruction) -> list[Matmul]:
    if is_matmul(instruction):
        sizes, dtype = matmul_sizes(computation, instruction), matmul_dtype(computation, instruction)
        return [(*sizes, dtype, matmul_batch(computation, instruction))]
    if instruction.opcode != "fusion":
        return []
    inner = module.computations[instruction.called[0]]
    key = inner.name
    return module.remember("matmuls", key, lambda: [one for fused in inner for one in _matmuls(module, inner, fused)])


def _vector_ops(module: Module, instruction: Instruction) -> float:
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        return module.remember("vector ops", inner.name, lambda: sum(_vector_ops(module, fused) for fused in inner))
    return 0.0 if instruction.opcode in _MOVES else float(sum(tensor.elements for tensor in instruction.shape))


def _traffic(
    module: Module, computation: HloComputation, instruction: Instruction
) -> tuple[list[tuple[float, int]], list[tuple[float, int]]]:
    """Bytes read and bytes written, each with its memory space."""
    if instruction.opcode in ("fusion", "fusion-start"):
        inner = module.computations[instruction.called[0]]
        parameters = [fused for fused in inner.parameters if fused.shape]
        reads = [(_read(module, inner, parameter), parameter.shape[0].space) for parameter in parameters]
        root = inner.instructions[inner.root]
        results = inner.operands(root) if root.opcode == "tuple" else (root,)
        return reads, [(_written(inner, result), result.shape[0].space) for result in results if result.shape]
    operands = computation.operands(instruction)
    # The last result of a call of cuBLAS or cuDNN is its workspace.
    arrays = instruction.shape[:-1] if _has_workspace(instruction) else instruction.shape
    out = [(tensor.nbytes, tensor.space) for tensor in arrays]
    if instruction.opcode in ("slice", "dynamic-slice", "gather"):
        return [(out[0][0], operands[0].shape[0].space)], out
    if instruction.opcode == "dynamic-update-slice":
        update = operands[1].shape[0]
        return [(update.nbytes, update.space)], [(update.nbytes, out[0][1])]
    if _scatters_one(instruction):
        indices, updates = (operand.shape[0] for operand in operands[1:])
        # The elements that change are read too: a row is a part of a tile, and may be added to.
        reads = [(updates.nbytes, out[0][1]), (indices.nbytes, indices.space), (updates.nbytes, updates.space)]
        return reads, [(updates.nbytes, out[0][1])]
    return [(tensor.nbytes, tensor.space) for operand in operands for tensor in operand.shape], out


def _scatters_one(instruction: Instruction) -> bool:
    """True for a scatter of one array, which is in place: where XLA needs the array again, it copies it first."""
    return instruction.opcode == "scatter" and len(instruction.operands) == 3


def _has_workspace(instruction: Instruction) -> bool:
    return len(instruction.shape) > 1 and target(instruction).startswith((CUBLAS, CUDNN))


def _read(module: Module, inner: HloComputation, source: Instruction) -> float:
    """Bytes of ``source`` that a fused computation reads."""
    whole = source.shape[0]
    return min(whole.nbytes, _elements_read(module, inner)[source.name] * _item_bytes(whole))


def _elements_read(module: Module, inner: HloComputation) -> Mapping[str, float]:
    """Elements of each result that a fused computation reads, by its name."""
    return module.remember("elements read", inner.name, lambda: _read_elements(module, inner))


def _read_elements(module: Module, inner: HloComputation) -> Mapping[str, float]:
    """Count from the last instruction to the first, so that the users of a result have their figures."""
    total = dict.fromkeys(inner.instructions, 0.0)
    for user in reversed(tuple(inner)):
        for name in dict.fromkeys(user.operands):
            total[name] += _read_by(module, inner, user, inner.instructions[name], total[user.name])
    return total


def _read_by(module: Module, inner: HloComputation, user: Instruction, source: Instruction, passed: float) -> float:
    """Elements of ``source`` that ``user`` reads, of whose own result ``passed`` elements are read."""
    first = user.operands[0] == source.name
    if user.opcode in ("slice", "dynamic-slice", "gather") and first:
        return user.shape[0].elements
    if _scatters_one(user) and first:
        return inner.operands(user)[2].shape[0].elements
    if user.opcode in _RENAMES or _only_renames(module, user):
        return passed if user.name != inner.root else _first_elements(source)
    if user.opcode == "fusion":
        called = module.computations[user.called[0]]
        read = _elements_read(module, called)
        numbers = {str(number) for number, name in enumerate(user.operands) if name == source.name}
        return sum(read[parameter.name] for parameter in called.parameters if parameter.literal in numbers)
    if _is_passed_through(user) or (user.opcode == "dynamic-update-slice" and first):
        return 0.0
    return _first_elements(source)


def _first_elements(source: Instruction) -> float:
    """Elements of the first array of a result; a token has none."""
    return source.shape[0].elements if source.shape else 0.0


def _only_renames(module: Module, user: Instruction) -> bool:
    """True for a fusion that gives its operand another layout, tile by tile, as those of TPU7x do within fusions."""
    if user.opcode != "fusion":
        return False
    called = module.computations[user.called[0]]
    return called.origin(called.instructions[called.root], _renames).opcode == "parameter"


def _renames(instruction: Instruction) -> bool:
    return instruction.opcode in _RENAMES


def _is_bitcast(instruction: Instruction) -> bool:
    return instruction.opcode == "bitcast"


def _converts(instruction: Instruction) -> bool:
    return instruction.opcode in ("bitcast", "convert")


def _is_passed_through(user: Instruction) -> bool:
    """True if an instruction of a fusion passes an array through: an asynchronous collective in progress."""
    return user.opcode == "tuple" or user.opcode in _COLLECTIVES or "AsyncCollective" in user.attributes


def _written(inner: HloComputation, result: Instruction) -> float:
    """Bytes that a fused computation writes for one of its results, in the dtype in which it leaves the fusion."""
    whole = result.shape[0]
    result = inner.origin(result, _converts)
    if result.opcode == "parameter" or _is_passed_through(result):
        return 0.0
    if result.opcode == "dynamic-update-slice":
        return inner.operands(result)[1].shape[0].elements * _item_bytes(whole)
    if _scatters_one(result):
        array, _, updates = inner.operands(result)
        if inner.origin(array, _is_bitcast).opcode == "parameter":
            return updates.shape[0].elements * _item_bytes(whole)
    return whole.nbytes


def _item_bytes(tensor: HloTensor) -> float:
    return tensor.nbytes / max(1, tensor.elements)
