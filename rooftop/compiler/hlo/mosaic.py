"""FLOPs of a Pallas TPU kernel from its body: the matmuls of one grid step, times the steps that execute them.

XLA keeps the body of a Mosaic kernel as serialized MLIR in the configuration of the custom call. A body computes on
scalars what its control flow needs: program ids, constants, and tables in scalar memory (the block masks of sparse
attention). ``read_kernel`` evaluates these scalars for all steps of the grid at once. A branch on any other data counts
as taken, so the result is then an upper limit.
"""

from __future__ import annotations

import base64
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

#: Values of a scalar of the body, over the grid (dims that it does not depend on have size 1); None: not known.
Scalar: TypeAlias = npt.NDArray[np.int64] | None
#: A table in scalar memory: bytes of its int64 elements, and its dims. None: not known.
KernelTable: TypeAlias = tuple[bytes, tuple[int, ...]] | None

#: The bound of a grid dim that the kernel gets at run time.
_DYNAMIC = -(2**63)
#: A loop with more trips is not unrolled: its induction variable is not known.
_UNROLLED = 64
#: Limit on the steps of a grid for which scalars are evaluated.
_STEPS = 2**24
_PREDICATES: Sequence[Callable[[Any, Any], Any]] = (
    operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge,
    operator.lt, operator.le, operator.gt, operator.ge,
)  # fmt: skip
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply, "arith.andi": np.bitwise_and,
    "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor, "arith.maxsi": np.maximum, "arith.minsi": np.minimum,
    "arith.maxui": np.maximum, "arith.minui": np.minimum, "arith.shli": np.left_shift, "arith.shrsi": np.right_shift,
    "arith.floordivsi": np.floor_divide,
}  # fmt: skip
#: Casts of integers that keep the value: no table or index is out of the range of its type.
_CASTS = ("arith.extui", "arith.extsi", "arith.trunci", "arith.index_cast", "arith.index_castui")
_MATMULS = ("tpu.matmul", "vector.contract")


@dataclass(frozen=True, kw_only=True)
class KernelBody:
    """FLOPs of all grid steps by dtype of the operands, as MLIR writes it ('bf16', 'f32', 'i8').

    ``at_most``: branches on data count as taken. ``uncounted``: the trips of a loop with matmuls depend on data, and
    it counts once.
    """

    flops: Mapping[str, float]
    at_most: bool
    uncounted: bool


@lru_cache(maxsize=256)
def read_kernel(body: str, tables: tuple[KernelTable, ...], dynamic: tuple[int | None, ...] = ()) -> KernelBody | None:
    """Count a serialized body (base64). None for a body that this jaxlib cannot read, or with an unknown grid.

    Raises ModuleNotFoundError where no jaxlib is installed.

    ``tables`` are the operands in scalar memory, and ``dynamic`` the sizes of the dims of the grid that are operands.
    """
    try:
        from jaxlib.mlir import ir
        from jaxlib.mlir.passmanager import PassManager
        from jaxlib.mosaic.python import tpu
    except ImportError as error:
        if error.name == "jaxlib":
            raise
        return None
    context = ir.Context()
    context.allow_unregistered_dialects = True
    tpu.register_dialect(context)
    context.load_all_available_dialects()
    with context, ir.Location.unknown():
        try:
            module = ir.Module.parse(base64.b64decode(body))
            # Bodies are stored in a dialect that is stable over versions of jaxlib.
            PassManager.parse("builtin.module(mosaic-serde{serialize=false})").run(module.operation)
        except (ValueError, ir.MLIRError):
            return None
        # The functions after the kernel place its blocks.
        function = next(item.operation for item in module.body.operations if item.operation.name == "func.func")
        return _count(function, tables, dynamic)


def _count(function: Any, tables: Sequence[KernelTable], dynamic: Sequence[int | None]) -> KernelBody | None:
    left = list(dynamic)
    grid: list[int] = []
    attributes = function.attributes
    has_grid = "iteration_bounds" in attributes
    for bound in attributes["iteration_bounds"] if has_grid else ():
        size = (left.pop(0) if left else None) if bound == _DYNAMIC else int(bound)
        if size is None:
            return None
        grid.append(size)
    if prod(grid) > _STEPS:
        return None
    block = function.regions[0].blocks[0]
    reader = _BodyCounter(grid=tuple(grid))
    for axis, argument in enumerate(list(block.arguments)[: len(grid)]):
        shape = [1] * len(grid)
        shape[axis] = grid[axis]
        reader.scalars[argument] = np.arange(grid[axis], dtype=np.int64).reshape(shape)
    for argument, table in zip(list(block.arguments)[len(grid) :], tables, strict=False):
        if table is not None:
            reader.tables[argument] = np.frombuffer(table[0], np.int64).reshape(table[1])
    flops = reader.block(block, np.ones([1] * len(grid)))
    steps = prod(grid)
    return KernelBody(
        flops={dtype: float(weight.sum()) * steps / weight.size for dtype, weight in flops.items()},
        at_most=reader.at_most,
        uncounted=reader.uncounted,
    )


#: FLOPs of each step of the grid, by dtype.
_Flops: TypeAlias = dict[str, npt.NDArray[np.float64]]


@dataclass(kw_only=True)
class _BodyCounter:
    """Scalars of a body by their MLIR value, and what could not be evaluated."""

    grid: tuple[int, ...]
    scalars: dict[Any, Scalar] = field(default_factory=dict)
    tables: dict[Any, npt.NDArray[np.int64]] = field(default_factory=dict)
    at_most: bool = False
    uncounted: bool = False

    def block(self, block: Any, weight: npt.NDArray[np.float64]) -> _Flops:
        """FLOPs of a block that each step of the grid executes ``weight`` times."""
        total: _Flops = {}
        for item in block.operations:
            operation = item.operation
            for dtype, flops in self._operation(operation, weight).items():
                total[dtype] = total[dtype] + flops if dtype in total else flops
        return total

    def _operation(self, operation: Any, weight: npt.NDArray[np.float64]) -> _Flops:
        name = operation.name
        if name in _MATMULS:
            dtype, flops = _matmul(operation)
            return {dtype: flops * weight}
        if name == "scf.if":
            return self._if(operation, weight)
        if name == "scf.for":
            return self._for(operation, weight)
        if len(operation.regions):
            inner = [self.block(block, weight) for region in operation.regions for block in region.blocks]
            if name == "scf.while" and any(inner):
                self.uncounted = True
            return _sum(inner)
        if len(operation.results) == 1:
            self.scalars[operation.results[0]] = self._value(operation)
        return {}

    def _if(self, operation: Any, weight: npt.NDArray[np.float64]) -> _Flops:
        condition = self._of(operation.operands[0])
        branches = [region.blocks[0] for region in operation.regions if len(region.blocks)]
        if condition is None:
            # The branch with more FLOPs counts.
            flops = [self.block(branch, weight) for branch in branches]
            most = max(flops, key=lambda item: sum(map(np.sum, item.values())), default={})
            self.at_most = self.at_most or bool(most)
            return most
        taken = condition.astype(bool)
        flops = [self.block(branch, weight * (taken if at == 0 else ~taken)) for at, branch in enumerate(branches)]
        if len(branches) > 1:
            yielded = [list(branch.operations)[-1].operation.operands for branch in branches]
            for result, one, other in zip(operation.results, *yielded, strict=False):
                yes, no = self._of(one), self._of(other)
                self.scalars[result] = None if yes is None or no is None else np.where(taken, yes, no)
        return _sum(flops)

    def _for(self, operation: Any, weight: npt.NDArray[np.float64]) -> _Flops:
        low, high, step = (self._of(operand) for operand in list(operation.operands)[:3])
        body = operation.regions[0].blocks[0]
        if low is None or high is None or step is None:
            flops = self.block(body, weight)
            self.uncounted = self.uncounted or bool(flops)
            return flops
        trips = np.maximum(0, -((low - high) // step))
        if trips.size == 1 and int(trips.max()) <= _UNROLLED:
            unrolled = []
            for trip in range(int(trips.max())):
                self.scalars[body.arguments[0]] = low + trip * step
                unrolled.append(self.block(body, weight))
            return _sum(unrolled)
        return self.block(body, weight * trips)

    def _value(self, operation: Any) -> Scalar:
        name, operands = operation.name, list(operation.operands)
        if name == "arith.constant":
            return self._constant(operation.attributes["value"])
        if name == "tpu.iteration_bound":
            return self._scalar(self.grid[int(operation.attributes["dim"].value)])
        inputs = operands[1:] if name == "memref.load" else operands
        values = [value for value in map(self._of, inputs) if value is not None]
        if len(values) < len(inputs):
            return None
        if name == "memref.load":
            table = self.tables.get(operands[0])
            return None if table is None else self._loaded(table, values)
        if not values:
            return None
        if name in _CASTS:
            return values[0]
        result: npt.NDArray[np.int64] | None = None
        if name in _BINARY:
            result = np.asarray(_BINARY[name](*values), np.int64)
        elif name == "arith.cmpi":
            result = _PREDICATES[int(operation.attributes["predicate"].value)](*values).astype(np.int64)
        elif name == "arith.select":
            result = np.asarray(np.where(values[0].astype(bool), values[1], values[2]), np.int64)
        elif name in ("arith.divsi", "arith.remsi"):
            left, right = np.broadcast_arrays(*values)
            # Division truncates. Steps that do not reach it may have a divisor of 0.
            divisor = np.where(right == 0, 1, right)
            whole = np.sign(left) * np.sign(divisor) * (np.abs(left) // np.abs(divisor))
            result = np.asarray(whole if name == "arith.divsi" else left - whole * divisor, np.int64)
        return result

    def _loaded(self, table: npt.NDArray[np.int64], indices: Sequence[npt.NDArray[np.int64]]) -> Scalar:
        if not indices:
            return self._scalar(int(table))
        # Steps that do not reach the load may have an index outside of the table.
        inside = [np.clip(index, 0, size - 1) for index, size in zip(indices, table.shape, strict=True)]
        return np.asarray(table[tuple(np.broadcast_arrays(*inside))], np.int64)

    def _constant(self, value: Any) -> Scalar:
        # A boolean attribute is an integer of one bit; arrays and floats are no scalars of the control flow.
        number = getattr(value, "value", None)
        return self._scalar(int(number)) if isinstance(number, int) else None

    def _scalar(self, value: int) -> npt.NDArray[np.int64]:
        return np.full([1] * len(self.grid), value, np.int64)

    def _of(self, value: Any) -> Scalar:
        return self.scalars.get(value)


def _sum(parts: Sequence[_Flops]) -> _Flops:
    total: _Flops = {}
    for part in parts:
        for dtype, flops in part.items():
            total[dtype] = total[dtype] + flops if dtype in total else flops
    return total


def _matmul(operation: Any) -> tuple[str, float]:
    """Dtype of the left operand, and two FLOPs per multiply-add."""
    left, result = operation.operands[0].type, operation.results[0].type
    numbers = str(operation.attributes["dimension_numbers"]) if "dimension_numbers" in operation.attributes else ""
    contracted = [1]
    if operation.name == "vector.contract":
        maps = [
            [str(expression) for expression in mapping.value.results]
            for mapping in operation.attributes["indexing_maps"]
        ]
        contracted = [dim for dim, name in enumerate(maps[0]) if name not in maps[2]]
    elif numbers:
        first = numbers[numbers.index("[") + 1 : numbers.index("]")]
        contracted = [int(dim) for dim in first.split(",") if dim.strip()]
    elif "transpose_lhs" in operation.attributes and operation.attributes["transpose_lhs"].value:
        contracted = [0]
    sizes = left.shape
    out = prod(result.shape) if hasattr(result, "shape") else 1
    return str(left.element_type), 2.0 * out * prod(sizes[dim] for dim in contracted)
