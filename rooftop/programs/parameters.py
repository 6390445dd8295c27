"""The weights of a decoder: one description, from which come shapes, shardings and initial values.

Dims: D model, F feed-forward, N query heads, K key/value heads, H head size, V vocabulary, E experts, n layers of one
kind that a scan runs over.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from rooftop.core.errors import RooftopError
from rooftop.programs.sharding import Dim, Specs, axes_of

Leaf = TypeVar("Leaf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Norm(Generic[Leaf]):
    """A norm over D (or a latent's size): scale [n, D] and, of a layer norm, bias [n, D]; without n outside layers."""

    scale: Leaf
    bias: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Attention(Generic[Leaf]):
    """Attention weights: q [n, D, N, H], k and v [n, D, K, H], out [n, N*H, D]; what a family lacks is None.

    Biases have the shape of what they are added to, without D; q_norm and k_norm [n, H]; sinks [n, N].
    """

    norm: Norm[Leaf]
    q: Leaf
    k: Leaf
    v: Leaf
    out: Leaf
    q_bias: Leaf | None = None
    k_bias: Leaf | None = None
    v_bias: Leaf | None = None
    out_bias: Leaf | None = None
    q_norm: Leaf | None = None
    k_norm: Leaf | None = None
    sinks: Leaf | None = None
    post_norm: Norm[Leaf] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LatentAttention(Generic[Leaf]):
    """Weights of multi-head latent attention (DeepSeek-V2 paper, section 2.1).

    With a query latent q_down [n, D, q_rank], q_norm [n, q_rank] and q [n, q_rank, N, d_nope + d_rope], else only q
    [n, D, N, d_nope + d_rope]. kv_down [n, D, kv_rank + d_rope], kv_norm [n, kv_rank], kv_up [n, kv_rank, N,
    d_nope + d_v], out [n, N*d_v, D].
    """

    norm: Norm[Leaf]
    q_down: Leaf | None = None
    q_norm: Leaf | None = None
    q: Leaf
    kv_down: Leaf
    kv_norm: Leaf
    kv_up: Leaf
    out: Leaf
    post_norm: Norm[Leaf] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MLP(Generic[Leaf]):
    """Feed-forward weights: gate and up [n, D, F], down [n, F, D]; no gate in an MLP of two matrices.

    Biases [n, F], [n, F] and [n, D].
    """

    norm: Norm[Leaf]
    gate: Leaf | None = None
    up: Leaf
    down: Leaf
    gate_bias: Leaf | None = None
    up_bias: Leaf | None = None
    down_bias: Leaf | None = None
    post_norm: Norm[Leaf] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MoEWeights(Generic[Leaf]):
    """Weights of a mixture of experts: router [n, D, E], gate and up [n, E, D, F], down [n, E, F, D].

    Biases: router_bias [n, E], gate_bias and up_bias [n, E, F], down_bias [n, E, D]. correction_bias [n, E] is added to
    the scores for choosing only. The shared experts together are one MLP: shared_gate and shared_up [n, D, F_shared],
    shared_down [n, F_shared, D]. ``norm`` (and ``post_norm``) are applied by the transformer, not by the mixture.
    """

    norm: Norm[Leaf]
    router: Leaf
    gate: Leaf | None = None
    up: Leaf
    down: Leaf
    router_bias: Leaf | None = None
    correction_bias: Leaf | None = None
    gate_bias: Leaf | None = None
    up_bias: Leaf | None = None
    down_bias: Leaf | None = None
    shared_gate: Leaf | None = None
    shared_up: Leaf | None = None
    shared_down: Leaf | None = None
    post_norm: Norm[Leaf] | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Layer(Generic[Leaf]):
    """n layers of one kind, stacked: each weight has a leading dim n."""

    attn: Attention[Leaf] | LatentAttention[Leaf]
    mlp: MLP[Leaf] | MoEWeights[Leaf]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Transformer(Generic[Leaf]):
    """The whole decoder: embed [V, D], learned positions [max_seq_len, D], unembed [D, V] (None if tied).

    ``layers[s][j]``: the weights of the layers at position j of segment s's period (see ``rooftop.models.segments``).
    """

    embed: Leaf
    positions: Leaf | None = None
    layers: tuple[tuple[Layer[Leaf], ...], ...]
    final_norm: Norm[Leaf]
    unembed: Leaf | None = None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch(Generic[Leaf]):
    """Token ids and the ids that follow them, both [B, T] int32; in a packed batch also which document they are of.

    ``segments`` [B, T] int32: a token attends to those of its own segment only, and a target of -1 carries no loss
    (without segments every target does). The tokens of a segment lie side by side; 0 is padding. ``positions`` [B, T]
    int32: where a token stands; None: counted from the start of its segment, or of the sequence.
    """

    tokens: Leaf
    targets: Leaf
    segments: Leaf | None = None
    positions: Leaf | None = None


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter before it exists: its shape and the logical dims that split it.

    ``fan_in`` is None for scales, biases and sinks, which begin as ``value`` and do not decay. ``sequence`` is the
    logical dim by which the tokens are split that it meets: inside matmuls ``seq``, between them ``residual_seq``. A
    ``stacked`` one is of several layers, by its first dim.
    """

    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    fan_in: int | None = None
    value: float = 0.0
    sequence: str = "seq"
    stacked: bool = False


def shardings(described: Transformer[Parameter], mesh: Mesh | AbstractMesh, specs: Specs) -> Transformer[NamedSharding]:
    """The sharding of every weight at rest. Raises RooftopError where a dim does not divide over its axes."""

    def sharding(path: tuple[object, ...], parameter: Parameter) -> NamedSharding:
        spec = specs.parameter(*parameter.dims)
        for size, entry in zip(parameter.shape, spec, strict=True):
            ways = math.prod(mesh.shape[axis] for axis in axes_of(entry))
            if size % ways:
                name = f"model weight {jax.tree_util.keystr(path).lstrip('.')}"
                raise RooftopError(name, parameter.shape, f"a multiple of {ways} in place of {size}: {spec} splits it")
        return NamedSharding(mesh, spec)

    return jax.tree_util.tree_map_with_path(sharding, described)


def abstract(
    described: Transformer[Parameter], mesh: Mesh | AbstractMesh, specs: Specs, dtype: jnp.dtype
) -> Transformer[jax.ShapeDtypeStruct]:
    """Shapes and shardings of the weights, with no memory behind them."""
    return jax.tree.map(
        lambda parameter, sharding: jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=sharding),
        described,
        shardings(described, mesh, specs),
    )


def initialise(
    described: Transformer[Parameter], key: jax.Array, mesh: Mesh, specs: Specs, dtype: jnp.dtype
) -> Transformer[jax.Array]:
    """Initial weights, each made in its shards: normal with deviation fan_in**-0.5, or constant without a fan-in.

    The values depend on ``key`` and not on the mesh.
    """
    places = jax.tree.leaves(shardings(described, mesh, specs))
    parameters, tree = jax.tree.flatten(described)

    def make(parameter: Parameter, key: jax.Array, place: NamedSharding) -> jax.Array:
        if parameter.fan_in is None:
            return jnp.full(parameter.shape, parameter.value, dtype, out_sharding=place)
        normal = jax.random.normal(key, parameter.shape, jnp.float32, out_sharding=place)
        return (normal * parameter.fan_in**-0.5).astype(dtype)

    @jax.jit
    def made(key: jax.Array) -> list[jax.Array]:
        return list(map(make, parameters, jax.random.split(key, len(parameters)), places))

    with jax.set_mesh(mesh):
        return jax.tree.unflatten(tree, made(key))
