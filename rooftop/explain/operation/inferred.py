"""True shapes and parallelism out of a few HLO lines: local shapes, what uses what, and the groups of the collectives.

A matmul whose result is summed over a group contracts a dim that the group's devices hold a part of each: the true size
is the local one times the devices of the group. What made that dim has it split in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rooftop.explain.axes import stride
from rooftop.explain.operation.instruction import HloMatmul, Operation

_SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, kw_only=True)
class TrueMatmul:
    """A matmul as the program means it; sizes of the left, right and result array, with the dim that is split."""

    name: str
    left: tuple[int, ...]
    right: tuple[int, ...]
    result: tuple[int, ...]
    split: int
    contracts: bool

    def __str__(self) -> str:
        what = "contracted" if self.contracts else "output"
        sides = " x ".join(_shape(item) for item in (self.left, self.right))
        return f"{self.name}: {sides} -> {_shape(self.result)}, the {what} dim of {self.split} split"


@dataclass(frozen=True, kw_only=True)
class Inferred:
    """``ways`` of model parallelism, over devices ``step`` apart; ``devices`` is what the groups tell of at least."""

    ways: int
    step: int | None
    devices: int
    summed_by: str
    matmuls: tuple[TrueMatmul, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return vars(self) | {"matmuls": [dict(vars(matmul)) for matmul in self.matmuls]}


def infer(operations: Sequence[Operation]) -> tuple[Inferred, ...]:
    """Infer parallelism from the sums among operations; empty if no sum has both its groups and its matmul."""
    by_name = {operation.name: operation for operation in operations}
    result = []
    for operation in operations:
        moved = operation.moved
        if moved is None or moved.kind not in _SUMS or not moved.members or not operation.operands:
            continue
        summed = _behind(operation.operands[0][0], by_name)
        if summed is None or summed.matmul is None:
            continue
        local = summed.matmul.contracted[-1]
        matmuls = [_true(summed, summed.matmul, local, moved.members, contracts=True)]
        for name, _ in summed.operands:
            maker = _behind(name, by_name)
            matmul = maker.matmul if maker is not None else None
            if maker is not None and matmul is not None and local in maker.results[0].shape:
                matmuls.insert(0, _true(maker, matmul, local, moved.members, contracts=False))
        groups = moved.groups or ((),)
        step = stride(groups[0])
        # Groups of one stride interleave: so many devices lie between two members of the first.
        devices = max(moved.members * (step or 1), 1 + max((max(group, default=0) for group in groups), default=0))
        result.append(
            Inferred(ways=moved.members, step=step, devices=devices, summed_by=operation.name, matmuls=tuple(matmuls))
        )
    return tuple(result)


def _true(operation: Operation, matmul: HloMatmul, local: int, ways: int, *, contracts: bool) -> TrueMatmul:
    left, right = sorted((layout.shape for _, layout in operation.operands if layout is not None), key=len)[:2]

    def grown(sizes: Sequence[int]) -> tuple[int, ...]:
        return tuple(ways * size if size == local else size for size in sizes)

    return TrueMatmul(
        name=operation.name,
        left=grown(left) if contracts else left,
        right=grown(right),
        result=operation.results[0].shape if contracts else grown(operation.results[0].shape),
        split=ways * local,
        contracts=contracts,
    )


def _behind(name: str, by_name: dict[str, Operation]) -> Operation | None:
    """The operation of a name, seen through what only moves its result."""
    behind = by_name.get(name)
    while (
        behind is not None
        and behind.opcode in ("copy", "bitcast", "copy-done", "copy-start", "reshape")
        and behind.operands
    ):
        behind = by_name.get(behind.operands[0][0])
    return behind


def _shape(sizes: Sequence[int]) -> str:
    """Sizes, with a batch dim that one row a device leaves no trace of."""
    return f"[{','.join(map(str, sizes))}]" if len(sizes) > 1 else f"[B,{sizes[0]}]" if sizes else "[B]"
