"""The weights of a decoder: one description, from which come shapes, shardings and initial values.

Dims: D model, F feed-forward, N query heads, K key/value heads, H head size, L layers, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from rooftop.errors import RooftopError
from rooftop.models import ModelConfig
from rooftop.programs.sharding import Dim, Specs, axes_of

Leaf = TypeVar("Leaf")


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Attention(Generic[Leaf]):
    """Attention weights of all layers: norm [L, D], q [L, D, N, H], k and v [L, D, K, H], out [L, N*H, D]."""

    norm: Leaf
    q: Leaf
    k: Leaf
    v: Leaf
    out: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class MLP(Generic[Leaf]):
    """Feed-forward weights of all layers: norm [L, D], gate and up [L, D, F], down [L, F, D]."""

    norm: Leaf
    gate: Leaf
    up: Leaf
    down: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Layers(Generic[Leaf]):
    """The stacked layers, scanned over L."""

    attn: Attention[Leaf]
    mlp: MLP[Leaf]


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Transformer(Generic[Leaf]):
    """The whole decoder: embed [V, D], layers, final_norm [D], unembed [D, V]."""

    embed: Leaf
    layers: Layers[Leaf]
    final_norm: Leaf
    unembed: Leaf


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch(Generic[Leaf]):
    """Token ids and the ids that follow them, both [B, T] int32."""

    tokens: Leaf
    targets: Leaf


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter before it exists: its shape, the logical dims that split it, its fan-in (None for a norm's scale)."""

    shape: tuple[int, ...]
    dims: tuple[Dim, ...]
    fan_in: int | None = None


#: Fields of a ModelConfig that this program reads. Every other must have its default value.
_READ = frozenset(
    {
        "name",
        "family",
        "layers",
        "d_model",
        "d_ff",
        "heads",
        "kv_heads",
        "d_head",
        "vocab",
        "max_seq_len",
        "norm_eps",
        "rope_theta",
    }
)


def describe(model: ModelConfig) -> Transformer[Parameter]:
    """The one description of the weights, from which shapes, shardings and initial values are made.

    Weights after a nonlinearity are two-dimensional, with tensor and then fsdp on their rows, so that shards stay
    thick enough for the hardware's tiles. Raises RooftopError for a model with parts that this program does not have.
    """
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if field.name not in _READ and value != field.default:
            raise RooftopError(f"model.{field.name}", value, f"{field.default!r}: the dense decoder has nothing else")
    layers, d, f, v, h = model.layers, model.d_model, model.d_ff, model.vocab, model.d_head
    heads, kv_heads = model.heads, model.kv_heads
    scale = Parameter(shape=(layers, d), dims=(None, None))
    column = partial(Parameter, fan_in=d)
    return Transformer(
        embed=column(shape=(v, d), dims=(None, ("vocab", "embed"))),
        layers=Layers(
            attn=Attention(
                norm=scale,
                q=column(shape=(layers, d, heads, h), dims=(None, "embed", "heads", None)),
                k=column(shape=(layers, d, kv_heads, h), dims=(None, "embed", "kv_heads", None)),
                v=column(shape=(layers, d, kv_heads, h), dims=(None, "embed", "kv_heads", None)),
                out=Parameter(shape=(layers, heads * h, d), dims=(None, ("heads", "embed"), None), fan_in=heads * h),
            ),
            mlp=MLP(
                norm=scale,
                gate=column(shape=(layers, d, f), dims=(None, "embed", "mlp")),
                up=column(shape=(layers, d, f), dims=(None, "embed", "mlp")),
                down=Parameter(shape=(layers, f, d), dims=(None, ("mlp", "embed"), None), fan_in=f),
            ),
        ),
        final_norm=Parameter(shape=(d,), dims=(None,)),
        unembed=column(shape=(d, v), dims=("embed", "vocab")),
    )


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
    described: Transformer[Parameter], mesh: Mesh | AbstractMesh, specs: Specs
) -> Transformer[jax.ShapeDtypeStruct]:
    """Shapes and shardings of the float32 weights, with no memory behind them."""
    return jax.tree.map(
        lambda parameter, sharding: jax.ShapeDtypeStruct(parameter.shape, jnp.float32, sharding=sharding),
        described,
        shardings(described, mesh, specs),
    )


def initialise(described: Transformer[Parameter], key: jax.Array, mesh: Mesh, specs: Specs) -> Transformer[jax.Array]:
    """Initial float32 weights, each made in its shards: normal with deviation fan_in**-0.5, ones for norms' scales.

    The values depend on ``key`` and not on the mesh.
    """
    places = jax.tree.leaves(shardings(described, mesh, specs))
    parameters, tree = jax.tree.flatten(described)

    def make(parameter: Parameter, key: jax.Array, place: NamedSharding) -> jax.Array:
        if parameter.fan_in is None:
            return jnp.ones(parameter.shape, jnp.float32, out_sharding=place)
        return jax.random.normal(key, parameter.shape, jnp.float32, out_sharding=place) * parameter.fan_in**-0.5

    @jax.jit
    def made(key: jax.Array) -> list[jax.Array]:
        return list(map(make, parameters, jax.random.split(key, len(parameters)), places))

    with jax.set_mesh(mesh):
        return jax.tree.unflatten(tree, made(key))
