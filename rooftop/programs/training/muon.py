"""Muon (Jordan et al. 2024): the momentum of each matrix, orthogonalised by Newton-Schulz steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic

import jax
import jax.numpy as jnp
import optax
from jax import P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from rooftop.arrays.rules import COLUMN_AXES, ways
from rooftop.models.optimizers import NEWTON_SCHULZ_STEPS, deal
from rooftop.programs.parameters import Leaf, Parameter, Transformer
from rooftop.programs.sharding import axes_of, on_shards

#: The quintic's coefficients, and the momentum, of the method's publication.
_QUINTIC, _MOMENTUM = (3.4445, -4.7750, 2.0315), 0.95
#: The root mean square of an update, as AdamW's has it: "consistent RMS" of Liu et al. 2025 (Moonlight), section 2.2.
#: One learning rate then fits the matrices and the weights that AdamW updates.
_RMS = 0.2
_EPSILON = 1e-8


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MuonState(Generic[Leaf]):
    """Number of updates, an int32 scalar; momenta of all weights; second moments of those that AdamW updates."""

    count: Leaf
    momenta: Transformer[Leaf]
    squares: Any


def stack_dims(described: Transformer[Parameter]) -> Transformer[int]:
    """The number of leading dims of each weight that stack matrices [rows, *columns]; 0 where AdamW updates it.

    They are layers, and experts. Tables, norms, biases and routers are AdamW's.
    """

    def dims(path: tuple[Any, ...], parameter: Parameter) -> int:
        if not parameter.stacked or parameter.fan_in is None or path[-1].name in ("router", "shared_router"):
            return 0
        return 1 + ("expert" in axes_of(parameter.dims[1]))

    numbers: Transformer[int] = jax.tree_util.tree_map_with_path(dims, described)
    return numbers


def describe_squares(described: Transformer[Parameter]) -> Any:
    """A tree of the weights with those that AdamW updates, and None for the others."""
    return jax.tree.map(lambda parameter, stack: None if stack else parameter, described, stack_dims(described))


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Muon for matrices of layers, AdamW with ``b1``, ``b2`` and ``eps`` for the rest; both decay decoupled.

    Newton-Schulz steps are done in ``dtype``.
    """

    learning_rate: float
    b1: float
    b2: float
    eps: float
    weight_decay: float
    dtype: DTypeLike

    def transformation(self, described: Transformer[Parameter]) -> optax.GradientTransformation:
        """The transformation from float32 gradients to updates."""
        stacks = stack_dims(described)

        def init(weights: Any) -> MuonState[jax.Array]:
            momenta = jax.tree.map(jnp.zeros_like, weights)
            squares = jax.tree.map(lambda weight, stack: None if stack else jnp.zeros_like(weight), weights, stacks)
            return MuonState(count=jnp.zeros((), jnp.int32), momenta=momenta, squares=squares)

        def update(gradients: Any, state: MuonState[jax.Array], weights: Any) -> tuple[Any, Any]:
            count = state.count + 1

            def momentum(stack: int, gradient: jax.Array, old: jax.Array) -> jax.Array:
                decay = _MOMENTUM if stack else self.b1
                return decay * old + (1.0 - decay) * gradient

            def square(stack: int, gradient: jax.Array, old: jax.Array | None) -> jax.Array | None:
                return None if old is None else self.b2 * old + (1.0 - self.b2) * jnp.square(gradient)

            def change(
                stack: int,
                parameter: Parameter,
                gradient: jax.Array,
                weight: jax.Array,
                momentum: jax.Array,
                square: jax.Array | None,
            ) -> jax.Array:
                if square is None:
                    ahead = _MOMENTUM * _unbiased(momentum, _MOMENTUM, count + 1)
                    nesterov = ahead + (1.0 - _MOMENTUM) * _unbiased(gradient, _MOMENTUM, count)
                    rows, columns = parameter.true_shape[stack], math.prod(parameter.true_shape[stack + 1 :])
                    scale = _RMS * max(rows, columns) ** 0.5
                    direction = scale * orthogonalised(nesterov, stack, self.dtype)
                else:
                    root = jnp.sqrt(_unbiased(square, self.b2, count))
                    direction = _unbiased(momentum, self.b1, count) / (root + self.eps)
                if parameter.fan_in is not None:
                    direction = direction + self.weight_decay * weight
                return -self.learning_rate * direction

            momenta = jax.tree.map(momentum, stacks, gradients, state.momenta)
            squares = jax.tree.map(square, stacks, gradients, state.squares)
            changes = jax.tree.map(change, stacks, described, gradients, weights, momenta, squares)
            return changes, MuonState(count=count, momenta=momenta, squares=squares)

        return optax.GradientTransformation(init, update)


def _unbiased(moment: jax.Array, decay: float, count: jax.Array) -> jax.Array:
    """The moment after ``count`` gradients, without the zeros that it began with."""
    return moment / (1.0 - decay ** count.astype(jnp.float32))


def orthogonalised(x: Float[Array, "*stack rows *columns"], stack: int, dtype: DTypeLike) -> Float[Array, "..."]:
    """Every matrix of x with its singular values near 1, in the sharding of x, computed in ``dtype``.

    The first ``stack`` dims are a batch of matrices [rows, columns]. Each device gets whole matrices, a group of them
    at a time: see ``rooftop.models.optimizers.deal``.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _Dealt.of({}, (None,) * x.ndim, x.shape, stack)(x, dtype)
    spec = jax.typeof(x).sharding.spec
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    entries = (*spec.partitions, *(None,) * (x.ndim - len(spec.partitions)))
    dealt = _Dealt.of(sizes, entries, x.shape, stack)
    # Every device of an axis of copies ends with the same result.
    return on_shards(partial(dealt, dtype=dtype), in_specs=P(*entries), out_specs=P(*entries), check_vma=False)(x)


@dataclass(frozen=True, kw_only=True)
class _Dealt:
    """The way of one weight's matrices to devices and back.

    ``rows`` and ``columns`` are axes that split a dim and over which matrices are dealt, ``split`` those over which the
    dim that is summed over stays split, ``copies`` those that have copies and share matrices out.
    """

    stack: int
    groups: int
    together: int
    sum_columns: bool
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    split: tuple[str, ...]
    copies: tuple[str, ...]
    copy_ways: int

    @classmethod
    def of(cls, sizes: Mapping[str, int], entries: tuple[Any, ...], shape: tuple[int, ...], stack: int) -> _Dealt:
        """The deal of an array whose dims are split by ``entries`` of axes with ``sizes``."""

        def split(entry: Any) -> tuple[str, ...]:
            return tuple(axis for axis in axes_of(entry) if axis in sizes)

        stacked = [axis for entry in entries[:stack] for axis in split(entry)]
        rows, columns = split(entries[stack]), tuple(axis for entry in entries[stack + 1 :] for axis in split(entry))
        n_rows, n_columns = shape[stack], math.prod(shape[stack + 1 :])
        wide = [axis for axis in (*rows, *columns) if axis in COLUMN_AXES]
        in_columns = any(axis in columns for axis in wide)
        sum_columns = n_columns > n_rows or (n_columns == n_rows and in_columns)
        copies = [axis for axis in reversed(tuple(sizes)) if axis not in (*stacked, *rows, *columns)]
        gather = ways(sizes, *rows, *columns) // ways(sizes, *wide)
        dealt = deal(
            math.prod(shape[:stack]) // ways(sizes, *stacked),
            gather=gather,
            columns=ways(sizes, *wide),
            splits_long=bool(wide) and in_columns == sum_columns,
            copies=[sizes[axis] for axis in copies],
        )
        uncut = () if bool(dealt.columns) else tuple(wide)
        sharing = tuple(axis for axis, shares in zip(copies, dealt.copies, strict=True) if bool(shares))
        return cls(
            stack=stack,
            groups=int(dealt.groups),
            together=int(dealt.together),
            sum_columns=sum_columns,
            rows=tuple(axis for axis in rows if axis not in uncut),
            columns=tuple(axis for axis in columns if axis not in uncut),
            split=uncut,
            copies=sharing,
            copy_ways=ways(sizes, *sharing),
        )

    def __call__(self, x: jax.Array, dtype: DTypeLike) -> jax.Array:
        """The local shards of x, orthogonalised."""
        matrices = x.reshape(-1, x.shape[self.stack], math.prod(x.shape[self.stack + 1 :]))
        padding = self.groups * self.together - len(matrices)
        padded = jnp.pad(matrices.astype(dtype), ((0, padding), (0, 0), (0, 0)))
        groups = padded.reshape(self.groups, self.together, *matrices.shape[1:])

        def with_group(index: jax.Array, groups: jax.Array) -> jax.Array:
            group = self._group(jax.lax.dynamic_index_in_dim(groups, index, keepdims=False))
            return jax.lax.dynamic_update_index_in_dim(groups, group, index, 0)

        # Results replace their matrices: XLA:TPU gives the place of a second stack before the first layer runs.
        results = jax.lax.fori_loop(0, self.groups, with_group, groups)
        return results.reshape(-1, *matrices.shape[1:])[: len(matrices)].reshape(x.shape).astype(x.dtype)

    def _group(self, x: jax.Array) -> jax.Array:
        """The local parts [together, rows, columns] of a group of matrices: one of them goes to each device."""
        part = self.together // self.copy_ways
        if self.copies:
            x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(self.copies) * part, part)
        exchange = partial(jax.lax.all_to_all, tiled=True)
        if self.rows:
            x = exchange(x, self.rows, split_axis=0, concat_axis=1)
        if self.columns:
            x = exchange(x, self.columns, split_axis=0, concat_axis=2)
        x = newton_schulz(x[0], sum_columns=self.sum_columns, split=self.split)[None]
        if self.columns:
            x = exchange(x, self.columns, split_axis=2, concat_axis=0)
        if self.rows:
            x = exchange(x, self.rows, split_axis=1, concat_axis=0)
        return jax.lax.all_gather(x, self.copies, tiled=True) if self.copies else x


def newton_schulz(
    x: Float[Array, "rows columns"], *, sum_columns: bool, split: tuple[str, ...] = ()
) -> Float[Array, "rows columns"]:
    """x after steps that bring its singular values near 1.

    Products [m, m] sum over columns, or else over rows: the longer dim, which may be split over the axes ``split``.
    """

    def total(y: jax.Array) -> jax.Array:
        return jax.lax.psum(y, split) if split else y

    def step(_: jax.Array, x: jax.Array) -> jax.Array:
        a, b, c = _QUINTIC
        products = total(x @ x.T if sum_columns else x.T @ x)
        more = b * products + c * (products @ products)
        return a * x + (more @ x if sum_columns else x @ more)

    norm = jnp.sqrt(total(jnp.sum(jnp.square(x.astype(jnp.float32)))))
    x = (x / (norm + _EPSILON)).astype(x.dtype)
    return jax.lax.fori_loop(0, NEWTON_SCHULZ_STEPS, step, x)
