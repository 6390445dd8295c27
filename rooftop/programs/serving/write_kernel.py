"""A kernel for TPUs (Pallas, Mosaic) that writes the keys and values of new tokens into a pool of pages, in place.

XLA:TPU copies a whole pool that fits VMEM there and back, to scatter tokens into it. The kernel copies each token from
one array to the other, at most two ``_TOGETHER`` at a time.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

#: Tokens whose copies are begun together, while the group before them is copied.
_TOGETHER = 8


def write_tokens(
    values: Shaped[Array, "pages p heads H"],
    page: Int[Array, " T"],
    offset: Int[Array, " T"],
    tokens: Shaped[Array, "T heads H"],
) -> Shaped[Array, "pages p heads H"]:
    """The pool with ``tokens`` at ``offset`` of ``page``; of several tokens with the same place, any."""
    values = pltpu.with_memory_space_constraint(values, pltpu.HBM)
    cost = pl.CostEstimate(flops=0, bytes_accessed=2 * tokens.size * tokens.dtype.itemsize, transcendentals=0)
    written: jax.Array = pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[pltpu.SemaphoreType.DMA],
        ),
        out_shape=jax.ShapeDtypeStruct(values.shape, values.dtype),
        # Pages and offsets count too.
        input_output_aliases={3: 0},
        cost_estimate=cost,
        # Tables name pages of the pool.
        compiler_params=pltpu.CompilerParams(disable_bounds_checks=True),
        name="write_tokens",
    )(page, offset, tokens, values)
    return written


def _kernel(page_ref: Any, offset_ref: Any, tokens_ref: Any, _: Any, pool_ref: Any, semaphore: Any) -> None:
    count = tokens_ref.shape[0]
    groups = count // _TOGETHER

    def copy(at: Any) -> Any:
        place = pool_ref.at[page_ref[at], offset_ref[at]]
        return pltpu.make_async_copy(tokens_ref.at[at], place, semaphore)

    def start(first: Any, size: int) -> None:
        for at in range(size):
            copy(first + at).start()

    def wait(first: Any, size: int) -> None:
        for at in range(size):
            copy(first + at).wait()

    def following(group: Any, _: None) -> None:
        start(group * _TOGETHER, _TOGETHER)
        wait((group - 1) * _TOGETHER, _TOGETHER)

    rest = groups * _TOGETHER, count - groups * _TOGETHER
    if groups:
        start(0, _TOGETHER)
        lax.fori_loop(1, groups, following, None)
    start(*rest)
    if groups:
        wait((groups - 1) * _TOGETHER, _TOGETHER)
    wait(*rest)
