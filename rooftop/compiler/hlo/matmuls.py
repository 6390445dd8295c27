"""Matmuls in HLO: FLOPs and sizes of ``dot`` and of ``convolution``, which XLA:TPU uses for every matmul."""

from __future__ import annotations

import math
import re

import numpy as np

from rooftop.compiler.hlo.text import HloComputation, Instruction

MATMULS = ("dot", "convolution")

_DTYPES = {"bf16": "bf16", "f16": "f16", "f32": "f32", "s8": "int8", "u8": "int8", "s4": "int4", "u4": "int4"}


def matmul_flops(computation: HloComputation, instruction: Instruction) -> float:
    """FLOPs of one ``dot`` or ``convolution``: two per multiply-add that reads no padding.

    XLA:TPU turns batch and contracted dims of a matmul into windows with padding and dilation. Positions where the
    window is outside of its input do not count, so the result is exactly 2 * B * M * N * K of the matmul.
    """
    left, right = (operand.shape[0] for operand in computation.operands(instruction)[:2])
    out = instruction.shape[0]
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(dim) for dim in contracted.group(1).split(",") if dim] if contracted else []
        return 2.0 * out.elements * math.prod(left.dims[dim] for dim in dims)
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
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


def _window(attributes: str, axes: int) -> list[tuple[int, int, int, int]]:
    """Stride, low padding and both dilations of each spatial axis."""
    text = re.search(r"window=\{([^}]*)\}", attributes)
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
    starts = np.arange(out, dtype=np.int64) * stride - low
    dilated = (size - 1) * left_dilate + 1
    total = 0
    for position in range(kernel):
        read = starts + position * right_dilate
        total += int(np.count_nonzero((read >= 0) & (read < dilated) & (read % left_dilate == 0)))
    return total


def matmul_sizes(computation: HloComputation, instruction: Instruction) -> tuple[float, float, float]:
    """M, K and N of one ``dot`` or ``convolution`` as [M, K] x [K, N]; batch dims and windows count into M and K."""
    out = instruction.shape[0]
    labels = re.search(r"dim_labels=\w+->(\w+)", instruction.attributes)
    n = out.dims[labels.group(1).index("f") if labels else -1] if out.dims else 1
    k = matmul_flops(computation, instruction) / (2.0 * max(1, out.elements))
    return out.elements / n, k, float(n)


def matmul_dtype(computation: HloComputation, instruction: Instruction) -> str:
    """The dtype in which a matmul runs: next to a bf16 operand, a float32 one is rounded on its way into the unit."""
    types = [_ledger_dtype(operand.shape[0].dtype) for operand in computation.operands(instruction)[:2]]
    return "bf16" if "bf16" in types else types[0]


def _ledger_dtype(dtype: str) -> str:
    if dtype.startswith("f8"):
        return "f8_e5m2" if dtype.startswith("f8e5m2") else "f8_e4m3"
    return _DTYPES.get(dtype, "f32")
