"""Specs of arrays from sharding rules, in JAX's explicit mode, and the reshards that programs use."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import auto_axes, explicit_axes, reshard
from jaxtyping import Array, Float, Shaped

from rooftop.arrays.rules import Rules, ways
from rooftop.arrays.tiles import default_layout
from rooftop.core.errors import RooftopError, unknown

#: A dim of an array, as the logical dims whose mesh axes split it, in order: one, several, or none.
Dim = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Specs:
    """Specs by the two tables of ``rules``. Every method raises RooftopError for an unknown dim or an axis used twice.

    ``residual_seq`` is the sequence dim between matmuls and ``seq`` the one inside them. Axes that only
    ``residual_seq`` has are gathered before a matmul and scattered after it. A parameter's ``sequence`` names the one
    that splits its tokens.
    """

    rules: Rules

    def parameter(self, *dims: Dim) -> P:
        """A parameter at rest, in shards."""
        return _spec("rules.parameters", self.rules.parameters, dims)

    def at_rest(self, *dims: Dim, sequence: str = "seq") -> P:
        """A parameter at rest as a step uses it: ``reduced`` over the axes that hold copies of it.

        Its gradient is then unreduced over them: one all-reduce, after all layers.
        """
        spec = self.parameter(*dims)
        return P(*spec, reduced=self.token_axes(sequence) - _axes(spec))

    def in_use(self, *dims: Dim, sequence: str = "seq") -> P:
        """A parameter while a matmul uses it: gathered over its ``embed`` axes, unless these split the stream too.

        It is ``reduced`` over every axis that splits tokens but not the parameter. Its gradient then leaves the matmul
        unreduced, and is reduced by the transpose of the gather.
        """
        gathered = () if self.width else ("embed",)
        table = {name: () if name in gathered else axes for name, axes in self.rules.parameters.items()}
        spec = _spec("rules.parameters", table, dims)
        return P(*spec, reduced=self.token_axes(sequence) - _axes(spec))

    def activation(self, *dims: Dim, reduced: str | None = None, unreduced: str | None = None) -> P:
        """An activation; ``unreduced``: partial sums over that logical dim's axes; ``reduced``: their transpose."""
        table = self.rules.activations
        pending = {"reduced": reduced, "unreduced": unreduced}
        axes = {kind: frozenset(table[dim]) for kind, dim in pending.items() if dim is not None}
        return P(*_spec("rules.activations", table, dims), **axes)

    def ways(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Devices that split each logical dim of parameters, on a mesh with axes of these ``sizes``."""
        return {dim: ways(sizes, *axes) for dim, axes in self.rules.parameters.items()}

    @property
    def width(self) -> tuple[str, ...]:
        """The axes that split D of the residual stream: servers' weights stay split over them (2-D stationary)."""
        return self.rules.activations.get("embed", ())

    @property
    def table(self) -> str:
        """The dim of parameters whose axes split D of tables: devices along them look up the same tokens.

        Servers also split the vocabulary over the axes of experts, along which devices have their own tokens.
        """
        return "mlp" if set(self.rules.parameters["vocab"]) & set(self.rules.activations["seq"]) else "vocab"

    @property
    def residual(self) -> P:
        """The residual stream [B, T, D] between matmuls."""
        return self.activation("batch", "residual_seq", "embed" if self.width else None)

    def inputs(self, last: Dim = None, *, reduced: str | None = None, unreduced: str | None = None) -> P:
        """An array [B, T, ...] that a matmul sums over ``width`` axes, or sums to be added up over them.

        Its tokens are those of the other axes of ``seq``. The last dim is split as ``last``; None: it is D, or whole
        where D was summed over.
        """
        if not self.width:
            return self.activation("batch", "seq", last, reduced=reduced, unreduced=unreduced)
        (batch, *_), (seq,) = self.activation("batch", None), self.activation("seq")
        own = tuple(axis for axis in axes_of(seq) if axis not in self.width)
        axes = frozenset(self.rules.activations[unreduced]) if unreduced is not None else frozenset()
        if last is None:
            last = None if unreduced == "embed" else "embed"
        split = self.activation(last).partitions[0]
        return P(batch, own or None, split, unreduced=axes)

    def token_axes(self, sequence: str = "seq") -> frozenset[str]:
        """The axes that split the tokens of a matmul (``seq``) or of the residual stream (``residual_seq``)."""
        return frozenset(self.rules.activations["batch"] + self.rules.activations[sequence])


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes of one entry of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else entry


def named_reshard(array: Shaped[Array, "*dims"], spec: P) -> Shaped[Array, "*dims"]:
    """A reshard whose collectives keep the present scope in the compiled program, in the backward pass too.

    XLA names a collective after the operation that produced its operand: in the backward pass that is the transpose of
    the second reshard, which moves no data.
    """
    return reshard(reshard(array, spec), spec)


def laid_out_as_argument(array: Shaped[Array, "*dims"], dtype: str) -> Shaped[Array, "*dims"]:
    """The array with its dims in the order in which XLA:TPU stores an argument of ``dtype`` and of its shards' shape.

    Only on TPUs. An elementwise operation is compiled in one order of dims. Where a result comes in another order than
    arguments that are combined with it, XLA may copy them and what is stored in their place, rather than the result.
    """
    order = default_layout(dtype, jax.typeof(array).sharding.shard_shape(array.shape)).minor_to_major
    if order == tuple(reversed(range(array.ndim))):
        return array
    turned = partial(with_layout_constraint, layouts=Layout(major_to_minor=order[::-1]))

    def laid_out(shard: jax.Array) -> jax.Array:
        turned_shard: jax.Array = jax.lax.platform_dependent(shard, tpu=turned, default=lambda shard: shard)
        return turned_shard

    if jax.sharding.get_abstract_mesh().empty:
        return laid_out(array)
    # On shards: a constraint on an array that several axes split has XLA put the whole array together on each device.
    spec = jax.typeof(array).sharding.spec
    on_each: jax.Array = on_shards(laid_out, in_specs=spec, out_specs=spec)(array)
    return on_each


def split_sequence(x: Float[Array, "B T D"], spec: P) -> Float[Array, "B T D"]:
    """x resharded to ``spec``: T is gathered before a matmul, or its partial sums are scattered after one.

    With one sequence on a device, XLA:TPU turns that ReduceScatter into an AllReduce of twice the bytes, unless the dim
    of size one is folded into T first.
    """
    if not one_sequence(x):
        return named_reshard(x, spec)
    (batch, seq_len, width), source = x.shape, jax.typeof(x).sharding.spec

    def folded(spec: P) -> P:
        tokens = tuple(axis for entry in spec.partitions[:2] for axis in axes_of(entry))
        return P(tokens, *spec.partitions[2:], reduced=spec.reduced, unreduced=spec.unreduced)

    rows = x.reshape(batch * seq_len, width, out_sharding=folded(source))
    return named_reshard(rows, folded(spec)).reshape(batch, seq_len, width, out_sharding=spec)


def one_sequence(x: Float[Array, "B T ..."]) -> bool:
    """True if each device has one sequence of x."""
    (batch, *_), mesh = jax.typeof(x).sharding.spec.partitions, jax.sharding.get_abstract_mesh()
    return x.shape[0] <= ways(mesh.shape, *axes_of(batch))


def gather(
    weight: Float[Array, " stored *dims"], specs: Specs, *dims: Dim, rows: int, sequence: str = "seq"
) -> Float[Array, " rows *dims"]:
    """AllGather of a weight over its ``embed`` axes (fsdp); in the backward pass, ReduceScatter of its gradient.

    The first dim has ``rows`` in the matmul. Those that were added for the axes are cut off. A weight stays as it is
    where the stream is split over these axes.
    """
    if specs.width:
        return weight
    return first_rows(reshard(weight, specs.in_use(*dims, sequence=sequence)), rows)


def first_rows(weight: Shaped[Array, " stored *dims"], rows: int) -> Shaped[Array, " rows *dims"]:
    """The first rows that each device has of a weight, so that there are ``rows`` in all."""
    if weight.shape[0] == rows:
        return weight
    spec, rest = jax.typeof(weight).sharding.spec, weight.shape[1:]
    parts = ways(jax.sharding.get_abstract_mesh().shape, *axes_of(spec.partitions[0]))
    first, *others = spec.partitions
    by_device = weight.reshape(
        parts, -1, *rest, out_sharding=P(first, None, *others, reduced=spec.reduced, unreduced=spec.unreduced)
    )
    cut = jax.lax.slice_in_dim(by_device, 0, rows // parts, axis=1)
    return cut.reshape(rows, *rest, out_sharding=spec)


def on_shards(
    local: Callable[..., Any], *, in_specs: Any, out_specs: Any, check_vma: bool = True
) -> Callable[..., Any]:
    """``jax.shard_map`` over the axes that are not manual yet: all axes, except inside a pipeline stage.

    Inside a stage the backward pass is a ``shard_map`` of its own, which recomputes ``local``: JAX 0.10.2 cannot save
    residuals of nested shard_maps, whatever the remat policy.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.manual_axes:
        return jax.shard_map(local, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)
    free = set(mesh.axis_names) - set(mesh.manual_axes)
    mapped = partial(jax.shard_map, axis_names=free, check_vma=check_vma)

    @jax.custom_vjp
    def apply(*operands: Any) -> Any:
        return mapped(local, in_specs=in_specs, out_specs=out_specs)(*operands)

    def backward(operands: tuple[Any, ...], cotangents: Any) -> tuple[Any, ...]:
        leaves, tree = jax.tree.flatten(operands)
        is_float = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]
        specs = [jax.typeof(leaf).sharding.spec for leaf in leaves]

        def pull(leaves: list[jax.Array], cotangents: Any) -> list[jax.Array]:
            def differentiable(*moving: jax.Array) -> Any:
                parts = iter(moving)
                arguments = [next(parts) if is_real else leaf for leaf, is_real in zip(leaves, is_float, strict=True)]
                return local(*jax.tree.unflatten(tree, arguments))

            floats = (leaf for leaf, is_real in zip(leaves, is_float, strict=True) if is_real)
            results = jax.vjp(differentiable, *floats)[1](cotangents)
            if check_vma:
                return list(results)
            # Without types, JAX does not sum the gradients of arrays that all devices share.
            out = frozenset(axis for spec in jax.tree.leaves(out_specs) for axis in _axes(spec))
            return [jax.lax.psum(x, tuple(out - _axes(spec))) for x, spec in zip(results, moved, strict=True)]

        moved = [spec for spec, is_real in zip(specs, is_float, strict=True) if is_real]
        gradients = iter(mapped(pull, in_specs=(specs, out_specs), out_specs=moved)(leaves, cotangents))
        return tuple(jax.tree.unflatten(tree, [next(gradients) if is_real else None for is_real in is_float]))

    apply.defvjp(lambda *operands: (apply(*operands), operands), backward)
    return apply


def on_some_shards(
    local: Callable[..., Any],
    *operands: Any,
    axes: Collection[str],
    in_specs: Any,
    out_specs: Any,
    check_vma: bool = True,
) -> Any:
    """``local(*operands)`` by ``jax.shard_map`` over ``axes`` alone, split over the other axes inside as outside.

    ``in_specs`` name manual axes, as ``jax.shard_map`` has them, and ``out_specs`` are the whole specs of the results.

    JAX 0.10.2 declares at the boundary of such a ``shard_map`` that arrays are replicated over explicit axes outside
    ``axes``. XLA then gathers arrays that two axes split, and cuts them again. So the boundary is in JAX's automatic
    mode, where it declares nothing, and ``local`` in the explicit one.
    """
    mesh = jax.sharding.get_abstract_mesh()
    free = tuple(axis for axis in mesh.axis_names if axis not in axes)
    mapped = partial(jax.shard_map, in_specs=in_specs, axis_names=set(axes), check_vma=check_vma)
    of_manual = jax.tree.map(lambda spec: _only(spec, axes), out_specs)
    if not free:
        return mapped(local, out_specs=of_manual)(*operands)
    inside = jax.tree.map(lambda x: _only(jax.typeof(x).sharding.spec, free), operands)
    body = mapped(explicit_axes(local, axes=free, in_sharding=inside), out_specs=of_manual)
    return auto_axes(body, axes=free, out_sharding=out_specs)(*operands)


def _only(spec: P, axes: Collection[str]) -> P:
    """``spec`` without other axes."""
    return P(*(tuple(axis for axis in axes_of(entry) if axis in axes) or None for entry in spec.partitions))


def regroups_weight(x: Float[Array, "B T D"]) -> bool:
    """True if XLA:TPU may gather a weight over the wrong axes when it computes the gradient of x.

    That is, x is ``reduced`` over an axis, and an axis that splits its batch comes before one that is further out in
    the mesh and no larger: expert=16 before fsdp=4. XLA:TPU then permutes the shards of the weight between devices,
    and gathers them over a part of expert instead of over fsdp (libtpu 0.0.42.1 on TPU7x; docs/evidence/accuracy.md).
    """
    spec, mesh = jax.typeof(x).sharding.spec, jax.sharding.get_abstract_mesh()
    batch = [axis for axis in axes_of(spec.partitions[0]) if mesh.shape[axis] > 1]
    place = mesh.axis_names.index
    inverted = any(place(a) > place(b) and mesh.shape[a] >= mesh.shape[b] for a, b in pairwise(batch))
    return inverted and any(mesh.shape[axis] > 1 for axis in spec.reduced)


def partial_sums(
    product: Callable[..., jax.Array], out: P | None, left: jax.Array, right: jax.Array
) -> Shaped[Array, "..."]:
    """``product(left, right, out_sharding=out)``; where ``out`` is unreduced, each device multiplies its own parts.

    XLA:TPU may gather both operands of such a matmul, if that moves fewer bytes than the sum. It then adds up whole
    products as if they were parts, and the result is a multiple of the right one (libtpu 0.0.42.1, TPU7x with batches
    over two axes; docs/evidence/accuracy.md).
    """
    if out is None or not out.unreduced:
        return product(left, right, out_sharding=out)
    specs = tuple(jax.typeof(x).sharding.spec for x in (left, right))

    def local(left: jax.Array, right: jax.Array) -> jax.Array:
        of_device: jax.Array = jax.lax.pcast(product(left, right), tuple(out.unreduced), to="unreduced")
        return of_device

    sums: jax.Array = jax.shard_map(local, in_specs=specs, out_specs=out)(left, right)
    return sums


def psum(tree: Any, axes: tuple[str, ...]) -> Any:
    """``jax.lax.psum`` where other axes of the mesh are explicit: on CPUs, arrays of 16 bits are added up in float32.

    XLA:CPU adds up 16 bits in float32 by its pass AllReducePromotion. Where some axes are not manual, JAX 0.10.2
    constrains the sharding of the scalar sum that defines an AllReduce. XLA makes that a copy, and the pass ends the
    process: "Invalid binary instruction opcode copy".
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None or device.platform != "cpu" or not axes:
        return jax.lax.psum(tree, axes) if axes else tree

    def total(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32) if x.dtype.itemsize < 4 else x
        sum_: jax.Array = jax.lax.psum(wide, axes).astype(x.dtype)
        return sum_

    return jax.tree.map(total, tree)


def varying(tree: Any, axes: Collection[str]) -> Any:
    """Arrays as varying over manual axes, so that gradients are summed over these outside."""

    def vary(array: jax.Array | np.ndarray) -> jax.Array | np.ndarray:
        missing = tuple(axis for axis in axes if axis not in jax.typeof(array).manual_axis_type.varying)
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(vary, tree)


def varying_as(array: Shaped[Array, "*dims"], like: jax.Array) -> Shaped[Array, "*dims"]:
    """The array, varying over the manual axes that ``like`` varies over; unchanged without manual axes."""
    varied: jax.Array = varying(array, jax.typeof(like).manual_axis_type.varying)
    return varied


def varying_alike(*arrays: jax.Array, axes: Collection[str] = ()) -> list[jax.Array]:
    """The arrays, varying over ``axes`` and over every manual axis that any of them varies over."""
    union = frozenset(axes).union(*(jax.typeof(x).manual_axis_type.varying for x in arrays))
    varied: list[jax.Array] = varying(list(arrays), union)
    return varied


def in_parts(x: jax.Array, parts: int, *, dim: int) -> jax.Array:
    """[..., n, ...] -> [parts, ..., n/parts, ...], split as before.

    Each part has an equal share of each device's elements.
    """
    spec = jax.typeof(x).sharding.spec
    spec_of = partial(P, reduced=spec.reduced, unreduced=spec.unreduced)
    before, entry, after = spec.partitions[:dim], spec.partitions[dim], spec.partitions[dim + 1 :]
    ways = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes_of(entry))
    first, n, last = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    apart = spec_of(*before, entry, None, None, *after)
    x = x.reshape(*first, ways, parts, n // ways // parts, *last, out_sharding=apart)
    x = jnp.moveaxis(x, dim + 1, 0)
    return x.reshape(parts, *first, n // parts, *last, out_sharding=spec_of(None, *spec.partitions))


def whole(x: jax.Array, *, dim: int) -> jax.Array:
    """The inverse of ``in_parts``."""
    spec = jax.typeof(x).sharding.spec
    spec_of = partial(P, reduced=spec.reduced, unreduced=spec.unreduced)
    before, entry, after = spec.partitions[1 : dim + 1], spec.partitions[dim + 1], spec.partitions[dim + 2 :]
    ways = math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes_of(entry))
    parts, *first = x.shape[: dim + 1]
    n, last = x.shape[dim + 1], x.shape[dim + 2 :]
    x = x.reshape(parts, *first, ways, n // ways, *last, out_sharding=spec_of(None, *before, entry, None, *after))
    x = jnp.moveaxis(x, 0, dim + 1)
    return x.reshape(*first, parts * n, *last, out_sharding=spec_of(*before, entry, *after))


def _axes(spec: P) -> frozenset[str]:
    return frozenset(axis for entry in spec for axis in axes_of(entry))


def _spec(field: str, table: Mapping[str, tuple[str, ...]], dims: tuple[Dim, ...]) -> P:
    names = [axes_of(dim) for dim in dims]
    for name in (name for group in names for name in group):
        if name not in table:
            raise unknown(field, name, table)
    entries = [tuple(axis for name in group for axis in table[name]) for group in names]
    used = [axis for entry in entries for axis in entry]
    if len(set(used)) != len(used):
        raise RooftopError(field, f"{dims} -> {entries}", "each mesh axis at most once in an array")
    return P(*(entry or None for entry in entries))
