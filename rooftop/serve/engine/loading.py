"""Load a checkpoint into an engine: place its weights on the devices, and size the cache by the memory left."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding

from rooftop.arrays.rules import COLUMN_AXES, SEQUENCE_AXES, ways
from rooftop.capabilities import PROGRAM_AXES, engine_mesh_errors
from rooftop.checkpoints.huggingface import ScaledDim, load_weights
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import format_bytes
from rooftop.core.rounding import ceil_div, next_multiple
from rooftop.models import ModelConfig, from_huggingface
from rooftop.models.program_sizes import LANES, SUBLANES
from rooftop.programs.parameters import Parameter, Transformer, initialise
from rooftop.programs.serving.decode import Decoder, by_layer
from rooftop.programs.serving.formats import FORMATS
from rooftop.programs.serving.paged import best_reader
from rooftop.programs.serving.quantised import Turned, quantise, require_format, scaled_by, summed_dim
from rooftop.serve.engine.configuration import Configuration, Shapes
from rooftop.serve.engine.engine import PagedEngine
from rooftop.serve.engine.replica import Replica
from rooftop.serve.source import stop_tokens

#: Tokens of a step that prefills: enough to be bound by compute, and not so many that those who generate wait long.
_PREFILL_TOKENS = {"cpu": 256, "gpu": 1024, "tpu": 1024}


#: Converts an array once it is loaded, with its scales if the checkpoint has usable ones.
Placed = Callable[[Parameter, jax.Array, jax.Array | None], Any]
#: The dim of a parameter with usable scales, None if none are.
Scaled = Callable[[Parameter], ScaledDim | None]


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """A model, the tokens that end its texts, and a loader of its stacked weights, each as ``Placed`` returns it."""

    model: ModelConfig
    stops: frozenset[int]
    weights: Callable[[Decoder, Mesh, Placed, Scaled], Transformer[Any]]


def published(checkpoint: Path) -> WeightSource:
    """The model of a folder with config.json and safetensors. Raises RooftopError if it has none."""
    path = checkpoint / "config.json"
    if not path.exists():
        raise RooftopError("checkpoint", str(checkpoint), "a folder with a config.json")
    model = from_huggingface(path, checkpoint.resolve().name)

    def weights(decoder: Decoder, mesh: Mesh, placed: Placed, scaled: Scaled) -> Transformer[Any]:
        abstract = decoder.abstract_weights(mesh)
        weights: Transformer[Any] = load_weights(
            checkpoint, model, abstract, described=decoder.described, placed=placed, scaled=scaled
        )
        return weights

    return WeightSource(model=model, stops=stop_tokens(checkpoint), weights=weights)


def drawn(model: ModelConfig, *, seed: int = 0) -> WeightSource:
    """A model with random weights, for measurements that do not depend on them."""

    def weights(decoder: Decoder, mesh: Mesh, placed: Placed, scaled: Scaled) -> Transformer[Any]:
        whole = replace(decoder, stages=1, stage=0).described
        key, dtype = jax.random.key(seed), jnp.dtype(decoder.dtype)
        initial = initialise(decoder.described, key, mesh, decoder.specs, dtype, whole=whole)
        weights: Transformer[Any] = jax.tree.map(
            lambda parameter, array: placed(parameter, array, None), decoder.described, initial
        )
        return weights

    return WeightSource(model=model, stops=frozenset(), weights=weights)


def load(
    checkpoint: Path | WeightSource,
    configuration: Configuration | None = None,
    *,
    draft: Path | WeightSource | None = None,
    devices: Sequence[jax.Device] | None = None,
    options: Mapping[str, Any] | None = None,
    replica: Callable[..., Replica] = Replica,
    on_progress: Callable[[int, int], None] | None = None,
) -> PagedEngine:
    """An engine, not yet started, of the ``checkpoint``: a folder with config.json and safetensors, or ``drawn``.

    ``draft`` is a smaller model of the same vocabulary, which guesses tokens. ``devices`` may be used (default: all),
    ``options`` are the compiler's, ``replica`` constructs replicas, and ``on_progress`` is called with the number of
    compiled programs. Raises RooftopError for wrong input, and Infeasible if weights or cache do not fit.
    """
    configuration = configuration or Configuration()
    loaded = parts(checkpoint, configuration, draft, devices, options, replica)
    return PagedEngine(
        loaded.replicas,
        configuration,
        max_model_len=loaded.max_model_len,
        stops=loaded.stops,
        draft=loaded.draft,
        on_progress=on_progress,
    )


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """Parts of an engine."""

    replicas: list[Replica]
    draft: Replica | None
    max_model_len: int
    stops: frozenset[int]


def parts(
    checkpoint: Path | WeightSource,
    configuration: Configuration,
    draft: Path | WeightSource | None,
    devices: Sequence[jax.Device] | None,
    options: Mapping[str, Any] | None,
    replica: Callable[..., Replica] = Replica,
) -> EngineParts:
    """Load the parts of an engine, with a kind of ``replica``; raises as ``load`` does."""
    source = published(checkpoint) if isinstance(checkpoint, Path) else checkpoint
    guesser = published(draft) if isinstance(draft, Path) else draft
    here = list(jax.devices() if devices is None else devices)
    platform = here[0].platform
    copies = _meshes(configuration, here)
    decoder = _decoder(source.model, configuration, platform)
    stages = [replace(decoder, stages=configuration.stages, stage=stage) for stage in range(configuration.stages)]
    drafter = None
    if guesser is not None:
        _require_draft(source.model, guesser.model, configuration)
        drafter = _decoder(guesser.model, configuration, platform)
    # The decoders of each device.
    decoders = [[stage, *([] if drafter is None else [drafter])] for stage in stages]
    for meshes in copies:
        for local, mesh in zip(decoders, meshes, strict=True):
            if mesh.local_devices:
                require_room(local, mesh, configuration)
    weights = [
        [
            _placed(stage, mesh, configuration, source.weights) if mesh.local_devices else None
            for stage, mesh in zip(stages, meshes, strict=True)
        ]
        for meshes in copies
    ]
    last = copies[-1][-1]
    small = None if drafter is None or guesser is None else _placed(drafter, last, configuration, guesser.weights)
    fitting = [cache_pages(local, mesh, configuration) for local, mesh in zip(decoders, copies[-1], strict=True)]
    pages, max_model_len = min(fitting)
    shapes = configuration.shapes or Shapes.of(
        max_batch=configuration.own_policy.max_batch,
        max_model_len=max_model_len,
        page_tokens=configuration.page_tokens,
        prefill_tokens=_PREFILL_TOKENS[platform],
        reader=decoder.reader,
        least=decoder.least_rows * (SUBLANES if platform == "tpu" and decoder.specs.width else 1),
    )
    if any(rows % decoder.groups.ways for rows in shapes.batches):
        raise RooftopError("batches", shapes.batches, f"multiples of the {decoder.groups.ways} groups")
    for name in ("batches", "widths"):
        if any(size % decoder.token_parts for size in getattr(shapes, name)):
            accepted = f"multiples of {decoder.token_parts}, as so many devices split the tokens of a step"
            raise RooftopError(name, getattr(shapes, name), accepted)
    sized = dict[str, Any](
        pages=pages,
        host_pages=configuration.host_pages,
        slots=next_multiple(configuration.own_policy.max_batch, decoder.groups.ways),
        shapes=shapes,
        draft_length=configuration.draft_length,
        options=None if options is None else dict(options),
    )

    def flights(meshes: Sequence[Mesh], weights: Sequence[Transformer[Any] | None]) -> list[Replica]:
        """A replica of one copy of the model for each of its flights."""
        after: Replica | None = None
        for stage, mesh, placed_weights in reversed(list(zip(stages, meshes, weights, strict=True))[1:]):
            after = Replica(stage, mesh, placed_weights, after=after, **sized)
        first = replica(stages[0], meshes[0], weights[0], after=after, **sized)
        return [first, *(first.beside() for _ in range(configuration.stages - 1))]

    return EngineParts(
        replicas=[
            flight
            for meshes, copy_weights in zip(copies, weights, strict=True)
            for flight in flights(meshes, copy_weights)
        ],
        draft=None if drafter is None or small is None else replica(drafter, last, small, drafts=True, **sized),
        max_model_len=max_model_len,
        stops=source.stops,
    )


def _decoder(model: ModelConfig, configuration: Configuration, platform: str) -> Decoder:
    sizes, quantised = dict(configuration.mesh), configuration.kv_dtype == "int8"
    split = tuple((axis, sizes[axis]) for axis in PROGRAM_AXES if sizes.get(axis, 1) > 1)
    dtype = configuration.compute_dtype or ("float32" if platform == "cpu" else "bfloat16")
    plain = configuration.weights_dtype == "plain" and model.moe is None and model.mla is None and not split
    decoder = Decoder(
        model=model,
        sizes=split,
        kv_split=configuration.kv_split,
        page_tokens=configuration.page_tokens,
        dtype=dtype,
        quantised_cache=quantised,
        # The kernels read whole pages.
        reader="gather"
        if platform != "cpu" and ways(sizes, *SEQUENCE_AXES) > 1 and configuration.kv_split == "seq"
        else best_reader(model, platform, quantised=quantised),
        expert_matmul="grouped" if platform == "tpu" else "batched",
        lanes=LANES if platform == "tpu" else 1,
        weights_left=platform == "cpu" and dtype == "float32" and plain,
    )
    for error in engine_mesh_errors(model, sizes):
        raise error
    if decoder.page_tokens % decoder.parts.ways:
        accepted = f"a multiple of {decoder.parts.ways}, over which {' and '.join(decoder.parts.axes)} split pages"
        raise RooftopError("page_tokens", decoder.page_tokens, accepted)
    return decoder


def _require_draft(model: ModelConfig, draft: ModelConfig, configuration: Configuration) -> None:
    if draft.vocab != model.vocab:
        raise RooftopError("draft", f"a vocabulary of {draft.vocab}", f"that of the model, {model.vocab}")
    if not configuration.draft_length:
        raise RooftopError("draft_length", 0, "1 or more with a draft model")
    if configuration.policy.batching == "disaggregated":
        raise RooftopError("draft", draft.name, "none with disaggregated batching: its cache is not sent")
    if configuration.copies > 1:
        raise RooftopError("draft", draft.name, f"none with mesh axis data: here are {configuration.copies} copies")
    if configuration.stages > 1:
        raise RooftopError("draft", draft.name, f"none with mesh axis stage: here are {configuration.stages} stages")


def _meshes(configuration: Configuration, here: Sequence[jax.Device]) -> list[list[Mesh]]:
    """One copy of the model, several, or one that prefills and one that generates: a mesh for each of its stages."""
    sizes, copies, stages = dict(configuration.mesh), configuration.copies, configuration.stages
    per_copy = math.prod(sizes.values()) // copies
    split = configuration.policy.batching == "disaggregated" and configuration.role == "both"
    if bool(configuration.prefill_devices) != split:
        accepted = f"{per_copy} with disaggregated batching, 0 with any other"
        raise RooftopError("prefill_devices", configuration.prefill_devices, accepted)
    if split and configuration.prefill_devices != per_copy:
        raise RooftopError("prefill_devices", configuration.prefill_devices, f"{per_copy}, as many as the mesh has")
    count = 2 if split else copies
    if count * per_copy > len(here):
        raise RooftopError("mesh", _written(sizes), f"at most the local devices: {len(here)}")
    if jax.process_count() > 1 and count * per_copy < len(here):
        accepted = f"all {len(here)} devices of the {jax.process_count()} processes"
        raise RooftopError("mesh", _written(sizes), accepted)
    axes = PROGRAM_AXES
    shape, types = tuple(sizes.get(axis, 1) for axis in axes), (AxisType.Explicit,) * len(axes)
    # Stages lie over slices, and so over processes.
    by_slice = sorted(here, key=lambda device: getattr(device, "slice_index", 0))
    copies_ = [np.array(group, dtype=object) for group in _apart(by_slice, count, per_copy)]
    return [
        [Mesh(devices.reshape(shape), axes, axis_types=types) for devices in np.split(group, stages)]
        for group in copies_
    ]


def _written(sizes: Mapping[str, int]) -> str:
    """Axes as ``--mesh`` takes them."""
    return ",".join(f"{axis}={size}" for axis, size in sizes.items()) or f"{COLUMN_AXES[0]}=1"


def _apart(here: Sequence[jax.Device], count: int, item: int) -> list[Sequence[jax.Device]]:
    """``count`` meshes' devices: of several processes, as many of each process in all of them, in the same places.

    All processes then run all programs, and what goes from mesh to mesh stays in its process. Raises RooftopError where
    that cannot be.
    """
    of_process = dict[int, list[jax.Device]]()
    for device in here:
        of_process.setdefault(device.process_index, []).append(device)
    if count == 1 or len(of_process) == 1:
        return [here[at * item : (at + 1) * item] for at in range(count)]
    share, rest = divmod(item, len(of_process))
    if rest or any(len(devices) != count * share for devices in of_process.values()):
        accepted = f"as many devices of each of the {len(of_process)} processes in each of {count} meshes"
        raise RooftopError("mesh", f"{item} devices", accepted)
    return [
        [device for devices in of_process.values() for device in devices[at * share : (at + 1) * share]]
        for at in range(count)
    ]


def _placed(
    decoder: Decoder,
    mesh: Mesh,
    configuration: Configuration,
    weights: Callable[[Decoder, Mesh, Placed, Scaled], Transformer[Any]],
) -> Transformer[Any]:
    """The weights layer by layer. Each array is quantised or turned, and split into layers, once it is loaded.

    A format with the scales of the checkpoint has the checkpoint's values.
    """
    name, platform = configuration.weights_dtype, mesh.devices.flat[0].platform

    def scaled(parameter: Parameter) -> ScaledDim | None:
        dim, format_ = _quantised_dim(parameter, configuration), FORMATS.get(name)
        if dim is None or format_ is None:
            return None
        return ScaledDim(dim=dim, group=format_.group, dtype=format_.scales(decoder.dtype))

    def placed(parameter: Parameter, array: jax.Array, scales: jax.Array | None) -> Any:
        with jax.set_mesh(mesh):
            dim, stored = _quantised_dim(parameter, configuration), array
            if dim is not None and scales is not None:
                stored = jax.jit(scaled_by, static_argnums=(2, 3, 4))(array, scales, dim, name, platform)
            elif dim is not None:
                stored = jax.jit(quantise, static_argnums=(1, 2, 3, 4))(array, dim, name, platform, decoder.dtype)
            turns = decoder.weights_left and (summed_dim(parameter) == 1 or parameter == decoder.described.unembed)
            whole = Turned.of if turns else lambda leaf: leaf
            if not parameter.stacked:
                return whole(stored)
            return tuple(whole(jax.tree.map(lambda leaf, at=at: leaf[at], stored)) for at in range(parameter.shape[0]))

    result = by_layer(decoder, weights(decoder, mesh, placed, scaled))
    place = NamedSharding(mesh, decoder.specs.parameter(None, ("vocab", "embed")))
    if decoder.is_last and result.unembed is None and place.spec != P(None, None):
        # A tied table is split over D, and every step would reshard it to a split over V.
        with jax.set_mesh(mesh):
            width, rows = decoder.model.d_model, decoder.logits_stored - result.embed.shape[0]

            def turned(table: jax.Array) -> jax.Array:
                return jnp.pad(jax.sharding.reshard(table, P(None, None)).T[:width], ((0, 0), (0, rows)))

            unembed = jax.jit(turned)(result.embed)
            result = replace(result, unembed=jax.device_put(unembed, place))
            if not decoder.is_first:
                result = replace(result, embed=None)
    return result


def _quantised_dim(parameter: Parameter, configuration: Configuration) -> int | None:
    """The dim of a parameter that its matmul sums over; None if the engine does not quantise it."""
    plain = configuration.weights_dtype == "plain" or (configuration.only_experts and "expert" not in parameter.dims)
    return None if plain else summed_dim(parameter)


#: Share of the memory left by weights that the cache gets by default: the rest is for steps and the host.
_CACHE_SHARE = {"cpu": 0.25, "gpu": 0.85, "tpu": 0.85}


def weight_bytes(decoder: Decoder, mesh: Mesh, configuration: Configuration) -> int:
    """Bytes of the weights on one device.

    Raises RooftopError if they cannot be quantised in this format.
    """
    total = 0
    parameters, leaves = jax.tree.leaves(decoder.described), jax.tree.leaves(decoder.abstract_weights(mesh))
    for parameter, leaf in zip(parameters, leaves, strict=True):
        shard = leaf.sharding.shard_shape(leaf.shape)
        count, dim = math.prod(shard), _quantised_dim(parameter, configuration)
        if dim is None:
            total += count * leaf.dtype.itemsize
            continue
        require_format(configuration.weights_dtype, parameter, shard)
        platform = mesh.devices.flat[0].platform
        total += FORMATS[configuration.weights_dtype].weight_bytes(count, shard[dim], platform, decoder.dtype)
    return total


def _memory(device: jax.Device) -> int:
    """Bytes of memory of a device that this process may use."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return int((device.memory_stats() or {}).get("bytes_limit", 0))


def _sharing(mesh: Mesh, configuration: Configuration) -> int:
    """Number of devices of all stages, on meshes such as this one, that share one memory."""
    local = mesh.local_devices
    return len(local) * configuration.stages if local[0].platform == "cpu" else 1


def require_room(decoders: Sequence[Decoder], mesh: Mesh, configuration: Configuration) -> None:
    """Raises Infeasible if the weights, or the weights and the requested pages, do not fit."""
    device = mesh.local_devices[0]
    room = _memory(device) // _sharing(mesh, configuration)
    weights = sum(weight_bytes(decoder, mesh, configuration) for decoder in decoders)
    pages = 1 if configuration.pages is None else configuration.pages
    every = configuration.stages * (pages + decoders[0].groups.ways)
    need = weights + every * sum(decoder.page_bytes for decoder in decoders) // mesh.size
    if need > room:
        names = " and ".join(decoder.model.name for decoder in decoders)
        what = f"{names}: {format_bytes(weights)} of weights and {pages} pages of cache on a device"
        raise Infeasible(what, f"{format_bytes(need - room)} more than the {format_bytes(room)} that it has")


def cache_pages(decoders: Sequence[Decoder], mesh: Mesh, configuration: Configuration) -> tuple[int, int]:
    """Pages of a flight's cache, and the most tokens of a sequence: as many as one group of devices has pages for.

    All groups have the same number of pages, padding pages included. Raises RooftopError if that is too few.
    """
    groups = decoders[0].groups.ways
    page_tokens, most = configuration.page_tokens, min(decoder.model.max_seq_len for decoder in decoders)
    max_model_len = configuration.max_model_len or most
    if max_model_len > most:
        raise RooftopError("max_model_len", max_model_len, f"at most the model's {most} tokens")
    pages = configuration.pages
    if pages is None:
        free = math.inf
        for device in mesh.local_devices[:1]:
            stats = device.memory_stats() or {}
            free = _memory(device) // _sharing(mesh, configuration) - int(stats.get("bytes_in_use", 0))
        if jax.process_count() > 1:
            # All processes use the least free memory of any.
            free = float(multihost_utils.process_allgather(np.array(free, np.float32)).min())
        room = int(free * _CACHE_SHARE[mesh.devices.flat[0].platform]) // configuration.stages
        fit = room * mesh.size // sum(decoder.page_bytes for decoder in decoders)
        useful = configuration.own_policy.max_batch * ceil_div(max_model_len, page_tokens)
        pages = max(1, min(fit, useful * (2 if configuration.prefix_cache else 1)))
    share = max(1, pages // groups)
    if configuration.max_model_len is not None and configuration.max_model_len > share * page_tokens:
        cache = "the cache's" if groups == 1 else "one group's"
        accepted = f"at most the {share * page_tokens} tokens of {cache} {share} pages"
        raise RooftopError("max_model_len", configuration.max_model_len, accepted)
    return groups * (share + 1) - 1, min(max_model_len, share * page_tokens)
