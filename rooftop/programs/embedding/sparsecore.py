"""Lookups and updates as XLA's own SparseCore operations, for TPUs that have SparseCores.

They read buffers that are laid out for minibatches, and hold a stack as the reference does (``embedding_exchange``):
each SparseCore's rows one after the other. The optimizer's rule is the reference's, traced for one row and handed to
the compiler as a computation of its own, which the SparseCores run on every row that they update.

The update is a loop over the passes of a batch: gradients are merged by row over all SparseCores, the rows read, the
rule run, the rows written. A row that is in several passes, as passes over samples have them, would be updated in each.
There the loop runs twice: first it adds up each row's gradients in an array beside the table, ``sums``; then it
updates each row by its sum in the first pass that has it, and marks it as done.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo
from jax.interpreters import mlir

from rooftop.core.errors import RooftopError
from rooftop.models.embedding_tables.tables import OPTIMIZERS, Quantization, TableOptimizer
from rooftop.programs.embedding.buffers import StackInputs
from rooftop.programs.embedding.optimizers import Slots, row_rule

#: What marks padding in the buffers of ids.
_PAD = 2**31 - 1
#: Where the table stands among an update's operands: after four buffers and the passes.
_STATE_AT = 5
#: What ``sums`` hold for a row that waits for no update: a number that no sum of gradients comes to.
NO_SUM = float(np.finfo(np.float32).min)


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """What SparseCores do with each row that a pass has, element by element.

    'update' the table and its slots by the row's gradient; 'add' the gradient to the sums; 'apply' the sums to table
    and slots, both before the sums, which hold NO_SUM then. Called with the gradient [N, W], the state's arrays
    [N, W], the learning rate and the step counted from 1; returns the new state.
    """

    optimizer: TableOptimizer
    what: str = "update"

    def __call__(
        self, gradient: jax.Array, held: tuple[jax.Array, ...], rate: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The state after a row's turn in a pass."""
        if self.what == "add":
            return (jnp.where(held[0] == NO_SUM, 0.0, held[0]) + gradient,)
        if self.what == "update":
            return self._updated(gradient, held, rate, step)
        *before, sums = held
        waits = sums != NO_SUM
        # What is not kept is computed too: of nothing, so that it is a number.
        after = self._updated(jnp.where(waits, sums, 0.0), tuple(before), rate, step)
        kept = tuple(jnp.where(waits, new, old) for new, old in zip(after, before, strict=True))
        # Not just NO_SUM: SparseCores write no array that is made of nothing they have read.
        return (*kept, jnp.where(waits, NO_SUM, sums))

    def _updated(
        self, gradient: jax.Array, held: tuple[jax.Array, ...], rate: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, ...]:
        if self.optimizer.clip is not None:
            gradient = jnp.clip(gradient, -self.optimizer.clip, self.optimizer.clip)
        # No rule that SparseCores can run asks for a row's width.
        new, slots = row_rule(self.optimizer)(held[0], held[1:], gradient, rate, step, jnp.ones((1, 1), jnp.float32))
        return (new, *slots)


def lookup_on_sparsecores(
    inputs: StackInputs,
    passes: jax.Array,
    table: jax.Array,
    *,
    activations: int,
    max_ids: int,
    max_unique_ids: int,
    quantization: Quantization | None,
) -> jax.Array:
    """Activations [``activations``, W] of one device from its ``table`` [rows, W], inside ``jax.shard_map``."""
    config: dict[str, Any] = {
        "max_ids_per_partition": max_ids,
        "max_unique_ids_per_partition": max_unique_ids,
        "sharding_strategy": 1,
        "pad_value": _PAD,
    }
    if quantization is not None:
        config["quantization_config"] = {
            "min_value": quantization.low,
            "max_value": quantization.high,
            "num_buckets": quantization.buckets,
        }
    shape = (activations, table.shape[1])
    call = jax.ffi.ffi_call(
        "SparseDenseMatmulWithMinibatchingOp",
        jax.ShapeDtypeStruct(shape, jnp.float32),
        custom_call_api_version=1,
        legacy_backend_config=_backend_config(config),
    )
    found: jax.Array = call(*_buffers(inputs), passes, table, jnp.zeros(shape, jnp.float32))
    return found


def update_on_sparsecores(
    inputs: StackInputs,
    passes: jax.Array,
    table: jax.Array,
    slots: Slots,
    gradients: jax.Array,
    *,
    optimizer: TableOptimizer,
    rate: jax.Array,
    step: jax.Array,
    max_ids: int,
    max_unique_ids: int,
    sums: jax.Array | None = None,
) -> tuple[jax.Array, Slots, jax.Array | None]:
    """``table`` [rows, W], its slots and ``sums`` after the update by ``gradients`` [activations, W] of a device.

    ``rate`` is the learning rate and ``step`` counts updates from 1. ``sums`` [rows, W], NO_SUM everywhere, are needed
    where a row may be in several passes, unless the optimizer is ``additive``; they come back as they were. Raises
    RooftopError for an optimizer that needs whole rows: the compiler runs its rule on columns, [rows, 1] each, and ends
    its process where it sums over them.
    """
    if not optimizer.elementwise:
        kinds = [kind for kind in OPTIMIZERS if TableOptimizer(kind=kind).elementwise]
        raise RooftopError("optimizer.kind", optimizer.kind, f"on SparseCores one of {', '.join(kinds)}")

    def run(what: str, held: tuple[jax.Array, ...], operands: tuple[Any, ...]) -> list[jax.Array]:
        *buffers, own_passes, own_gradients = operands
        config = {
            "max_ids_per_partition": max_ids,
            "max_unique_ids_per_partition": max_unique_ids,
            "sharding_strategy": 1,
            "pad_value": _PAD,
            "num_slot_variables": len(held) - 1,
            "num_hyperparameters": 2,
        }
        found: list[jax.Array] = _update.bind(
            *buffers,
            own_passes,
            *held,
            own_gradients,
            rate,
            step.astype(jnp.float32),
            rule=RowRule(optimizer=optimizer, what=what),
            count=len(held),
            config=_backend_config(config),
        )
        return found

    operands = (*_buffers(inputs), passes, gradients)
    if sums is None:
        new, *new_slots = run("update", (table, *slots), operands)
        return new, tuple(new_slots), None
    (sums,) = run("add", (sums,), operands)
    # Two operations that read the same buffers are made one, which here would need its own result.
    sums, operands = jax.lax.optimization_barrier((sums, operands))
    new, *new_slots, sums = run("apply", (table, *slots, sums), operands)
    return new, tuple(new_slots), sums


def _buffers(inputs: StackInputs) -> list[jax.Array]:
    names = ("row_pointers", "embedding_ids", "sample_ids", "gains")
    return [getattr(inputs, name).reshape(-1) for name in names]


def _backend_config(config: dict[str, Any]) -> str:
    return json.dumps({"sparse_dense_matmul_config": config, "device_type": "DEVICE_TYPE_SPARSECORE"})


_update = Primitive("sparsecore_update")
_update.multiple_results = True


def _update_shapes(*arrays: Any, count: int, **_: Any) -> list[Any]:
    return list(arrays[_STATE_AT : _STATE_AT + count])


_update.def_abstract_eval(_update_shapes)


def _lower_update(ctx: mlir.LoweringRuleContext, *operands: Any, rule: RowRule, count: int, config: str) -> list[Any]:
    """The custom call, and the rule for one row as the computation that it calls. ``count`` arrays are the state."""
    table: Any = ctx.avals_in[_STATE_AT]
    row = jax.core.ShapedArray((1, table.shape[1]), jnp.dtype(jnp.float32))

    def ruled(gradient: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        return rule(gradient, rest[:count], *rest[count:])

    # Gradient, row, slots, and the two scalars, which come broadcast.
    given = [row] * (1 + count + 2)
    row_type = mlir.aval_to_ir_type(ctx.module_context, row)
    computation: Any = func.FuncOp(
        f"{rule.optimizer.kind}_{rule.what}_of_a_row",
        ([row_type] * len(given), [ir.TupleType.get_tuple([row_type] * count)]),
        ip=ctx.module_context.ip,
        visibility="private",
    )  # type: ignore[call-arg]
    # Several tables may be updated by one rule: the symbol table makes their names differ.
    ctx.module_context.symbol_table.insert(computation)
    block = computation.add_entry_block()
    with ir.InsertionPoint(block):
        inner = ctx.replace(primitive=None, avals_in=given, avals_out=[row] * count)
        results: Any = mlir.lower_fun(ruled, multiple_results=True)(inner, *block.arguments)
        func.ReturnOp([stablehlo.tuple([value for each in results for value in _flat(each)])])
    states = [operands[_STATE_AT + index].type for index in range(count)]
    call: Any = jax.ffi.ffi_lowering(
        "SparseDenseMatmulGradOptimizerUpdateWithMinibatchingOp",
        result_types=[ir.TupleType.get_tuple(states)],
        backend_config=config,
        called_computations=[computation.name.value],
        skip_ffi_layout_processing=True,
        api_version=1,
    )(ctx, *operands)
    found = []
    for index in range(count):
        element = stablehlo.GetTupleElementOp(call[0] if isinstance(call, list | tuple) else call, index)
        # Without it the copy to a buffer of its own is a TensorCore's.
        sparse = ir.DictAttr.get({"_xla_compute_type": ir.StringAttr.get("sparse")})
        element.attributes["mhlo.frontend_attributes"] = sparse
        found.append(element.result)
    return found


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


mlir.register_lowering(_update, _lower_update)
