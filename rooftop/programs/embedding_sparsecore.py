"""Lookups and updates as XLA's own SparseCore operations, for TPUs that have SparseCores.

They read buffers that are laid out for minibatches, and hold a stack as the reference does (``embedding_exchange``):
each SparseCore's rows one after the other. The optimizer's rule is the reference's, traced for one row and handed to
the compiler as a computation of its own, which the SparseCores run on every row that they update.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func, stablehlo
from jax.interpreters import mlir

from rooftop.errors import RooftopError
from rooftop.models.tables import OPTIMIZERS, Quantization, TableOptimizer
from rooftop.programs.embedding_buffers import StackInputs
from rooftop.programs.embedding_optimizers import Slots, row_rule

#: What marks padding in the buffers of ids.
_PAD = 2**31 - 1
#: Where the table stands among an update's operands: after four buffers and the passes.
_STATE_AT = 5


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
) -> tuple[jax.Array, Slots]:
    """``table`` [rows, W] and its slots after the optimizer's update by ``gradients`` [activations, W] of a device.

    ``rate`` is the learning rate and ``step`` counts updates from 1. Raises RooftopError for an optimizer that needs
    whole rows: the compiler runs its rule on columns, [rows, 1] each, and ends its process where it sums over them.
    """
    if not optimizer.elementwise:
        kinds = [kind for kind in OPTIMIZERS if TableOptimizer(kind=kind).elementwise]
        raise RooftopError("optimizer.kind", optimizer.kind, f"on SparseCores one of {', '.join(kinds)}")
    config = {
        "max_ids_per_partition": max_ids,
        "max_unique_ids_per_partition": max_unique_ids,
        "sharding_strategy": 1,
        "pad_value": _PAD,
        "num_slot_variables": len(slots),
        "num_hyperparameters": 2,
    }
    new, *new_slots = _update.bind(
        *_buffers(inputs),
        passes,
        table,
        *slots,
        gradients,
        rate,
        step.astype(jnp.float32),
        optimizer=optimizer,
        config=_backend_config(config),
    )
    return new, tuple(new_slots)


def _buffers(inputs: StackInputs) -> list[jax.Array]:
    names = ("row_pointers", "embedding_ids", "sample_ids", "gains")
    return [getattr(inputs, name).reshape(-1) for name in names]


def _backend_config(config: dict[str, Any]) -> str:
    return json.dumps({"sparse_dense_matmul_config": config, "device_type": "DEVICE_TYPE_SPARSECORE"})


_update = Primitive("sparsecore_update")
_update.multiple_results = True


def _update_shapes(*arrays: Any, optimizer: TableOptimizer, **_: Any) -> list[Any]:
    return list(arrays[_STATE_AT : _STATE_AT + 1 + len(optimizer.slots(1))])


_update.def_abstract_eval(_update_shapes)


def _lower_update(ctx: mlir.LoweringRuleContext, *operands: Any, optimizer: TableOptimizer, config: str) -> list[Any]:
    """The custom call, and the optimizer's rule for one row as the computation that it calls."""
    count = 1 + len(optimizer.slots(1))
    table: Any = ctx.avals_in[_STATE_AT]
    row = jax.core.ShapedArray((1, table.shape[1]), jnp.dtype(jnp.float32))

    def rule(gradient: jax.Array, *rest: jax.Array) -> tuple[jax.Array, ...]:
        old, slots, (rate, step) = rest[0], rest[1:count], rest[count:]
        if optimizer.clip is not None:
            gradient = jnp.clip(gradient, -optimizer.clip, optimizer.clip)
        new, new_slots = row_rule(optimizer)(old, slots, gradient, rate, step, jnp.ones((1, 1), jnp.float32))
        return (new, *new_slots)

    # Gradient, row, slots, and the two scalars, which come broadcast.
    given = [row] * (1 + count + 2)
    row_type = mlir.aval_to_ir_type(ctx.module_context, row)
    computation: Any = func.FuncOp(
        f"{optimizer.kind}_of_a_row",
        ([row_type] * len(given), [ir.TupleType.get_tuple([row_type] * count)]),
        ip=ctx.module_context.ip,
        visibility="private",
    )  # type: ignore[call-arg]
    # Several tables may be updated by one rule: the symbol table makes their names differ.
    ctx.module_context.symbol_table.insert(computation)
    block = computation.add_entry_block()
    with ir.InsertionPoint(block):
        inner = ctx.replace(primitive=None, avals_in=given, avals_out=[row] * count)
        results: Any = mlir.lower_fun(rule, multiple_results=True)(inner, *block.arguments)
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
