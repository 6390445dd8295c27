"""Lookups and updates as XLA's own SparseCore operations, for TPUs with SparseCores.

They read buffers laid out for minibatches, and store a stack as the reference does (``lookup``): the rows of one
SparseCore after those of another. The optimizer's rule is the reference's, traced for one row and passed to the
compiler as a separate computation, which the SparseCores run on every row that they update.

The update is a loop over the passes of a batch: gradients are merged by row over all SparseCores, then rows are read,
updated by the rule and written. A row that is in several passes, as with passes over samples, would be updated in each.
In that case the loop runs twice. The first loop adds up each row's gradients in an array as large as the table,
``sums``. The second updates each row by its sum in the first pass that has the row, and marks it as done.
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
from jaxtyping import Array, Float, Float32, Int

from rooftop.core.errors import RooftopError
from rooftop.models.embedding_tables.tables import OPTIMIZERS, Quantization, TableOptimizer
from rooftop.programs.embedding.buffers import StackInputs
from rooftop.programs.embedding.optimizers import RowState, Slots, update_state

#: Marks padding in the buffers of ids.
_PAD = 2**31 - 1
#: Index of the table among an update's operands: after four buffers and the passes.
_STATE_AT = 5
#: Value of ``sums`` for a row without a pending update: a number that no sum of gradients reaches.
NO_SUM = float(np.finfo(np.float32).min)


@dataclass(frozen=True, kw_only=True)
class RowRule:
    """The operation of SparseCores on each row of a pass, element by element.

    'update': update the table and its slots by the row's gradient. 'add': add the gradient to the sums. 'apply': update
    table and slots by the sums, which come last and then hold NO_SUM. Called with the gradient [N, W], the state's
    arrays [N, W], the learning rate and the step counted from 1; returns the new state.
    """

    optimizer: TableOptimizer
    what: str = "update"

    def __call__(
        self, gradient: jax.Array, arrays: tuple[jax.Array, ...], rate: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, ...]:
        """The state of a row after its pass."""
        if self.what == "add":
            return (jnp.where(arrays[0] == NO_SUM, 0.0, arrays[0]) + gradient,)
        if self.what == "update":
            return self._updated(gradient, arrays, rate, step)
        *old_arrays, sums = arrays
        pending = sums != NO_SUM
        # Rows without a pending update are computed too: a sum of zero keeps them finite.
        after = self._updated(jnp.where(pending, sums, 0.0), tuple(old_arrays), rate, step)
        updated = tuple(jnp.where(pending, new, old) for new, old in zip(after, old_arrays, strict=True))
        # Not a constant NO_SUM: SparseCores only write arrays that depend on data that they have read.
        return (*updated, jnp.where(pending, NO_SUM, sums))

    def _updated(
        self, gradient: jax.Array, arrays: tuple[jax.Array, ...], rate: jax.Array, step: jax.Array
    ) -> tuple[jax.Array, ...]:
        if self.optimizer.clip is not None:
            gradient = jnp.clip(gradient, -self.optimizer.clip, self.optimizer.clip)
        # No rule that SparseCores can run needs a row's width.
        old = RowState(arrays[0], arrays[1:], gradient, rate, step, jnp.ones((1, 1), jnp.float32))
        new, slots = update_state(self.optimizer, old)
        return (new, *slots)


def lookup_on_sparsecores(
    inputs: StackInputs,
    passes: Int[Array, ""],
    table: Float[Array, "rows W"],
    *,
    activations: int,
    max_ids: int,
    max_unique_ids: int,
    quantization: Quantization | None,
) -> Float32[Array, "samples W"]:
    """Activations of one device from its ``table``, inside ``jax.shard_map``: ``activations`` rows."""
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
    result: jax.Array = call(*_buffers(inputs), passes, table, jnp.zeros(shape, jnp.float32))
    return result


def update_on_sparsecores(
    inputs: StackInputs,
    passes: Int[Array, ""],
    table: Float[Array, "rows W"],
    slots: Slots,
    gradients: Float[Array, "samples W"],
    *,
    optimizer: TableOptimizer,
    rate: Float[Array, ""],
    step: Int[Array, ""],
    max_ids: int,
    max_unique_ids: int,
    sums: Float[Array, "rows W"] | None = None,
) -> tuple[Float[Array, "rows W"], Slots, Float[Array, "rows W"] | None]:
    """``table``, its slots and ``sums`` after the update by a device's ``gradients``.

    ``rate`` is the learning rate and ``step`` counts updates from 1. ``sums``, NO_SUM everywhere, are needed if a row
    may be in several passes and the optimizer is not ``additive``; they are returned with their initial value. Raises
    RooftopError for an optimizer that needs whole rows: the compiler runs its rule on columns, [rows, 1] each, and
    crashes on a sum over them.
    """
    if not optimizer.elementwise:
        kinds = [kind for kind in OPTIMIZERS if TableOptimizer(kind=kind).elementwise]
        raise RooftopError("optimizer.kind", optimizer.kind, f"on SparseCores one of {', '.join(kinds)}")

    def run(what: str, arrays: tuple[jax.Array, ...], operands: tuple[Any, ...]) -> list[jax.Array]:
        *buffers, own_passes, own_gradients = operands
        config = {
            "max_ids_per_partition": max_ids,
            "max_unique_ids_per_partition": max_unique_ids,
            "sharding_strategy": 1,
            "pad_value": _PAD,
            "num_slot_variables": len(arrays) - 1,
            "num_hyperparameters": 2,
        }
        results: list[jax.Array] = _update.bind(
            *buffers,
            own_passes,
            *arrays,
            own_gradients,
            rate,
            step.astype(jnp.float32),
            rule=RowRule(optimizer=optimizer, what=what),
            count=len(arrays),
            config=_backend_config(config),
        )
        return results

    operands = (*_buffers(inputs), passes, gradients)
    if sums is None:
        new, *new_slots = run("update", (table, *slots), operands)
        return new, tuple(new_slots), None
    (sums,) = run("add", (sums,), operands)
    # XLA would merge two operations that read the same buffers, but the second one needs the first one's result.
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

    # Gradient, row, slots, and the two scalars, which are broadcast.
    inputs = [row] * (1 + count + 2)
    row_type = mlir.aval_to_ir_type(ctx.module_context, row)
    computation: Any = func.FuncOp(
        f"{rule.optimizer.kind}_{rule.what}_of_a_row",
        ([row_type] * len(inputs), [ir.TupleType.get_tuple([row_type] * count)]),
        ip=ctx.module_context.ip,
        visibility="private",
    )  # type: ignore[call-arg]
    # One rule may update several tables: the symbol table makes the names unique.
    ctx.module_context.symbol_table.insert(computation)
    block = computation.add_entry_block()
    with ir.InsertionPoint(block):
        inner = ctx.replace(primitive=None, avals_in=inputs, avals_out=[row] * count)
        results: Any = mlir.lower_fun(ruled, multiple_results=True)(inner, *block.arguments)
        func.ReturnOp([stablehlo.tuple([value for result in results for value in _flat(result)])])
    states = [operands[_STATE_AT + index].type for index in range(count)]
    call: Any = jax.ffi.ffi_lowering(
        "SparseDenseMatmulGradOptimizerUpdateWithMinibatchingOp",
        result_types=[ir.TupleType.get_tuple(states)],
        backend_config=config,
        called_computations=[computation.name.value],
        skip_ffi_layout_processing=True,
        api_version=1,
    )(ctx, *operands)
    results_ = []
    for index in range(count):
        element = stablehlo.GetTupleElementOp(call[0] if isinstance(call, list | tuple) else call, index)
        # Without this attribute a TensorCore would copy the element to its own buffer.
        sparse = ir.DictAttr.get({"_xla_compute_type": ir.StringAttr.get("sparse")})
        element.attributes["mhlo.frontend_attributes"] = sparse
        results_.append(element.result)
    return results_


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


mlir.register_lowering(_update, _lower_update)
