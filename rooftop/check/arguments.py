"""Arguments and results of a compiled program: their names, classes, shardings, and which results take which place."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rooftop.compiler.hlo.text import HloComputation, HloTensor, Instruction, Module, aliases

#: Words of an argument's name by its class; the first class with a matching word applies.
_CLASSES: Mapping[str, frozenset[str]] = {
    "optimizer": frozenset({"mu", "nu", "opt_state", "opt", "optimizer", "moments", "first_moment", "second_moment"}),
    "cache": frozenset({"cache", "kv_cache", "kvcache", "k_cache", "v_cache", "kv", "k_pages", "v_pages", "kv_pages"}),
    "parameters": frozenset({"params", "parameters", "weights", "kernel", "embedding", "w", "model"}),
    "batch": frozenset({"batch", "tokens", "targets", "labels", "inputs", "x", "y"}),
}

#: Arguments of eqx.filter_jit, in words: it hands on their arrays as flat tuples, in one object for each kind.
_EQUINOX = re.compile(r"dynamic_(?:no)?donate\['(first|rest|fun)'\]")
_EQUINOX_WORDS = {"first": "the first argument", "rest": "the other arguments", "fun": "the function"}


@dataclass(frozen=True, kw_only=True)
class EntryArgument:
    """An argument on one device. ``sharding`` is as HLO writes it ('' without one)."""

    number: int
    name: str
    tensor: HloTensor
    sharding: str
    instruction: Instruction

    @property
    def group(self) -> str:
        """The first part of the name: 'params' of ``params['layers']['w']``."""
        if equinox := _EQUINOX.match(self.name):
            return _EQUINOX_WORDS[equinox.group(1)]
        match = re.match(r"[A-Za-z_]\w*", self.name)
        return match.group() if match else f"argument {self.number}"

    @property
    def words(self) -> str:
        """The name, or of arrays that eqx.filter_jit hands on their argument and number in it."""
        equinox = _EQUINOX.match(self.name)
        if equinox is None:
            return self.name
        return f"array {self.name[equinox.end() :].strip('[]')} of {self.group}"

    @property
    def donation(self) -> str:
        """The way to donate the argument."""
        equinox = _EQUINOX.match(self.name)
        if equinox is None:
            return "jax.jit(..., donate_argnums=...)"
        return f"eqx.filter_jit(..., donate={'all' if equinox.group(1) == 'first' else 'all-except-first'!r})"

    @property
    def argument_class(self) -> str:
        """Parameters, optimizer, cache, batch, or other, by the words of the name."""
        words = set(re.findall(r"[A-Za-z_]+\w*", self.name))
        return next((name for name, known in _CLASSES.items() if words & known), "other")

    @property
    def is_replicated(self) -> bool:
        """True if every device has the whole array."""
        return self.sharding == "replicated" or ("last_tile_dim_replicate" in self.sharding and self._tiles == 1)

    @property
    def _tiles(self) -> int:
        match = re.search(r"devices=\[([\d,]+)\]", self.sharding)
        sizes = [int(size) for size in match.group(1).split(",")][:-1] if match else []
        return max(sizes, default=1)


def arguments(module: Module) -> tuple[EntryArgument, ...]:
    """The arguments of a program, in their order."""
    entry = module.computations[module.entry]
    parameters = [item for item in entry if item.opcode == "parameter" and item.shape]
    return tuple(
        EntryArgument(
            number=int(item.literal),
            name=item.op_name.replace("\\", "") or item.name,
            tensor=item.shape[0],
            sharding=item.attribute("sharding"),
            instruction=item,
        )
        for item in sorted(parameters, key=lambda parameter: int(parameter.literal))
    )


@dataclass(frozen=True, kw_only=True)
class EntryResult:
    """A result of a program, and the instruction that computes it."""

    number: int
    tensor: HloTensor
    made_by: Instruction


def results(module: Module) -> tuple[EntryResult, ...]:
    """The results of a program, in their order."""
    entry = module.computations[module.entry]
    root = entry.instructions[entry.root]
    makers = entry.operands(root) if root.opcode == "tuple" else (root,)
    return tuple(
        EntryResult(number=at, tensor=maker.shape[0], made_by=_computed(entry, maker))
        for at, maker in enumerate(makers)
        if maker.shape
    )


def _computed(entry: HloComputation, maker: Instruction) -> Instruction:
    while maker.opcode in ("copy", "bitcast", "copy-done", "copy-start", "get-tuple-element") and maker.operands:
        if "stack_frame_id" in maker.attributes:
            break
        maker = entry.operands(maker)[0]
    return maker


def undonated(module: Module, text: str) -> Iterator[tuple[EntryArgument, EntryResult]]:
    """Arguments of a module and its text that a result of the same type could take the place of, with that result."""
    taken = aliases(text)
    free = [argument for argument in arguments(module) if argument.number not in taken.values()]
    for result in results(module):
        if result.number in taken:
            continue
        same = [argument for argument in free if _type(argument.tensor) == _type(result.tensor)]
        if same:
            free.remove(same[0])
            yield same[0], result


def _type(tensor: HloTensor) -> tuple[str, tuple[int, ...]]:
    return tensor.dtype, tensor.dims
