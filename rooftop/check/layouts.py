"""Rules on how arrays lie: made whole because the partitioner knows no shorter way, and copied into another order."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rooftop.compiler.hlo.costs import is_matmul
from rooftop.compiler.hlo.places import purpose, users
from rooftop.compiler.hlo.scopes import source_of
from rooftop.compiler.hlo.text import HloComputation, Instruction, Module
from rooftop.compiler.machine.run import scheduled
from rooftop.explain.compiled.report import CompiledReport

#: Mesh axes of each dim of an array, as in a PartitionSpec.
Spec = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """An array that moves because of how it lies. ``instruction`` is None if the compiled program has it no more."""

    instruction: Instruction | None
    place: tuple[str, str]
    source: str
    frames: tuple[str, ...]
    seconds: float
    bytes: float
    evidence: str
    what: str


# ---- arrays that are made whole --------------------------------------------------------------------------------------


def made_whole(report: CompiledReport, module: Module) -> Iterator[LayoutCost]:
    """Arrays of the partitioner's warnings, with the gather that makes each whole."""
    axes = report.compiled.mesh.shape
    taken = set[int]()
    for warning in report.compiled.rematerialized:
        elements = _elements(warning.array) * math.prod(_tiles(warning.before))
        stack = warning.stack
        seconds, nbytes, user = 0.0, 0.0, ""
        for at, entry in enumerate(report.timeline.collectives):
            moved = entry.collective
            computation, name = moved.instructions[0]
            result = module.computations[computation].instructions[name].shape
            # XLA gathers in another dtype and shape, if the next operation asks for it.
            same = max((tensor.elements for tensor in result), default=0) == elements
            if at not in taken and moved.kind == "all_gather" and same:
                taken.add(at)
                seconds, nbytes = moved.executions * entry.exposed_s, moved.bytes
                user = moved.source.rpartition("/")[2]
                break
        before, after = (spec_of(text, axes) for text in (warning.before, warning.after))
        named = [
            warning.before if before is None else written(before),
            warning.after if after is None else written(after),
        ]
        yield LayoutCost(
            instruction=None,
            place=module.scopes.place(warning.op_name, stack),
            source=source_of(stack),
            frames=tuple(f"{frame.place} {frame.function}".rstrip() for frame in stack),
            seconds=seconds,
            bytes=nbytes,
            evidence=f"XLA makes an array of {elements:,} elements ({warning.array} on a device) whole on every "
            f"device, to go from {named[0]} to {named[1]}" + (f" for {user}" if user else ""),
            what=_detour(before, after),
        )  # fmt: skip


def _detour(before: Spec | None, after: Spec | None) -> str:
    """The advice: shardings between the two that differ by one axis each."""
    steps = between(before, after) if before is not None and after is not None else []
    if not steps:
        return "give the array one sharding from the operation that makes it to the one that uses it"
    named = ", then ".join(map(written, steps))
    how = "jax.lax.with_sharding_constraint, or jax.sharding.reshard"
    return f"go through {named} ({how}): one axis at a time is an AllToAll"


def between(before: Spec, after: Spec) -> list[Spec]:
    """The shardings between two, if the axes of ``before`` move to their dims in ``after`` one after another.

    Axes that only ``after`` has are split first, which sends nothing. The last step, to ``after``, is not in the list.
    """
    steps, now = list[Spec](), before
    old = {axis: dim for dim, axes in enumerate(before) for axis in axes}
    new = {axis: dim for dim, axes in enumerate(after) for axis in axes}
    for dim, axes in enumerate(after):
        for axis in sorted(axes, key=lambda name: (name in old, axes.index(name))):
            if old.get(axis) == dim:
                continue
            moved = [tuple(other for other in members if other != axis) for members in now]
            # Axes that leave this dim later stay in front until then.
            leaving = [name for name in moved[dim] if name not in axes]
            moved[dim] = (*leaving, *(name for name in axes if name in moved[dim] or name == axis))
            now = tuple(moved)
            steps.append(now)
    gathered = tuple(tuple(axis for axis in axes if axis in new) for axes in now)
    if gathered != now:
        steps.append(gathered)
    return [step for step in steps if step not in (before, after)]


def spec_of(sharding: str, axes: Mapping[str, int]) -> Spec | None:
    """The mesh axes of each dim, from a sharding as HLO writes it; None if it is no sharding over whole axes.

    The sharding numbers devices in the order of the program, which is that of the mesh.
    """
    if sharding == "replicated":
        return ()
    if (own := _named(sharding)) is not None:
        return own[1] if own[0].items() <= axes.items() else None
    match = re.fullmatch(r"devices=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?( last_tile_dim_replicate)?", sharding)
    if match is None:
        return None
    tiles, dims = (tuple(map(int, match.group(at).split(","))) for at in (1, 2))
    count = math.prod(axes.values())
    if math.prod(dims) != count or math.prod(tiles) != count:
        return None
    grid = np.arange(count).reshape(dims)
    if match.group(3):
        grid = grid.transpose([int(at) for at in match.group(3).split(",")])
    grid = grid.reshape(tiles)
    spec = list[tuple[str, ...]]()
    for dim in range(grid.ndim - bool(match.group(4))):
        line = grid[tuple(slice(None) if at == dim else 0 for at in range(grid.ndim))]
        coordinates = np.unravel_index(line, tuple(axes.values()))
        varying = {
            name: values for name, values in zip(axes, coordinates, strict=True) if len(set(values.tolist())) > 1
        }
        # The major axis changes last.
        named = sorted(varying, key=lambda name: -int(np.argmax(varying[name] != varying[name][0])))
        if math.prod(axes[name] for name in named) != tiles[dim]:
            return None
        spec.append(tuple(named))
    return tuple(spec)


def written(spec: Spec) -> str:
    """The sharding as a PartitionSpec."""
    dims = [repr(axes[0]) if len(axes) == 1 else str(axes) if axes else "None" for axes in spec]
    return f"P({', '.join(dims)})"


def _named(sharding: str) -> tuple[dict[str, int], Spec] | None:
    """Mesh and spec of a sharding that names them, as JAX 0.12 has them; None for another one, or parts of axes."""
    axis = r"'\w+'"
    dims = rf"\{{(?:{axis}(?:, ?{axis})*)?\}}"
    match = re.fullmatch(rf"mesh\[((?:,?{axis}=\d+)+)\], \[({dims}(?:, {dims})*)\]", sharding)
    if match is None:
        return None
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", match.group(1))}
    return sizes, tuple(tuple(re.findall(r"'(\w+)'", dim)) for dim in re.findall(dims, match.group(2)))


def _tiles(sharding: str) -> Sequence[int]:
    if (named := _named(sharding)) is not None:
        return [math.prod(named[0][axis] for axis in members) for members in named[1]]
    match = re.match(r"devices=\[([\d,]+)\]", sharding)
    sizes = [int(size) for size in match.group(1).split(",")] if match else []
    return sizes[:-1] if "last_tile_dim_replicate" in sharding else sizes


def _elements(array: str) -> int:
    dims = array.partition("[")[2].rstrip("]")
    return math.prod(int(dim) for dim in dims.split(",") if dim)


# ---- arrays that are copied into another order -----------------------------------------------------------------------

#: Opcodes of a fusion that does nothing but move elements.
_MOVES = frozenset({"parameter", "bitcast", "copy", "transpose", "reshape", "convert"})


def relaid(report: CompiledReport, module: Module) -> Iterator[LayoutCost]:
    """Copies into another order of dims that a matmul alone asks for."""
    orders = _orders(report.compiled.hlo_text)
    spent = report.timeline.spent_s
    for computation in scheduled(module):
        used_by = users(computation)
        for instruction in computation:
            seconds = spent.get((computation.name, instruction.name), 0.0)
            if not seconds or not _is_relaid(module, computation, instruction, orders):
                continue
            matmul = _only_matmul(module, instruction, used_by)
            if matmul is None:
                continue
            count = module.executions[computation.name]
            (tensor,) = instruction.shape
            dims = f"{tensor.dtype}[{','.join(map(str, tensor.dims))}]"
            yield LayoutCost(
                instruction=instruction,
                place=purpose(module, computation, matmul, used_by),
                source=module.source(matmul) or module.source(instruction),
                frames=module.frames(matmul) or module.frames(instruction),
                seconds=seconds * count,
                bytes=tensor.nbytes,
                evidence=f"{instruction.name} writes {dims} in another order of dims for {matmul.name}",
                what="contract the dim that the operand has last, or store it in the order that the matmul reads "
                "(another order of dims in the einsum that makes it, or jax.experimental.layout for an argument)",
            )


def _is_relaid(
    module: Module, computation: HloComputation, instruction: Instruction, orders: Mapping[str, tuple[int, ...]]
) -> bool:
    """True if an instruction writes one operand in another order of dims, and does nothing else."""
    if len(instruction.shape) != 1 or len(instruction.operands) != 1 or instruction.shape[0].space:
        return False
    if instruction.opcode == "fusion":
        inner = list(module.computations[instruction.called[0]])
        # A transposition that moves nothing is a bitcast.
        return all(item.opcode in _MOVES for item in inner) and any(
            item.opcode == "transpose"
            or (item.opcode == "copy" and _changes(module.computations[instruction.called[0]], item, orders))
            for item in inner
        )
    return instruction.opcode == "transpose" or (
        instruction.opcode == "copy" and _changes(computation, instruction, orders)
    )


def _changes(computation: HloComputation, copy: Instruction, orders: Mapping[str, tuple[int, ...]]) -> bool:
    source = computation.operands(copy)[0]
    before, after = orders.get(source.name), orders.get(copy.name)
    return before is not None and after is not None and before != after


def _orders(text: str) -> dict[str, tuple[int, ...]]:
    """Minor-to-major dims of every array of a module, by instruction."""
    arrays = re.findall(r"^\s*(?:ROOT )?%([\w.-]+) = \w+\[[\d,]*\]\{([\d,]+)", text, flags=re.MULTILINE)
    return {name: tuple(map(int, dims.split(","))) for name, dims in arrays}


def _only_matmul(
    module: Module, instruction: Instruction, used_by: Mapping[str, Sequence[Instruction]]
) -> Instruction | None:
    """The matmul that is the only user of a result, through bitcasts; None if something else uses it."""
    uses = list(used_by.get(instruction.name, ()))
    while len(uses) == 1 and uses[0].opcode in ("bitcast", "copy-start", "copy-done"):
        uses = list(used_by.get(uses[0].name, ()))
    if len(uses) != 1:
        return None
    user = uses[0]
    inside = [user] if user.opcode != "fusion" else list(module.computations[user.called[0]])
    return user if any(map(is_matmul, inside)) else None
