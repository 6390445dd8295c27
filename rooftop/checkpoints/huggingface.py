"""Weights from published checkpoints and back, tensor by tensor.

Neither way does a host hold more than about one tensor: reading goes shard by shard of one layer straight to the
device that owns it, each process reading only what its devices need; writing appends one tensor after another.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding

from rooftop.checkpoints.huggingface_config import to_huggingface
from rooftop.checkpoints.huggingface_files import Checkpoint, Tensor, write_checkpoint
from rooftop.errors import RooftopError
from rooftop.models import ModelConfig, from_huggingface
from rooftop.programs.checkpoint_names import Array, Entry, entries, matrix, region, tensor_shape
from rooftop.programs.describe import describe
from rooftop.programs.parameters import Parameter, Transformer
from rooftop.programs.sharding import axes_of

#: Files of 5 GB, as published checkpoints have them.
SHARD_BYTES = 5 * 10**9


def load_weights(
    folder: Path,
    model: ModelConfig,
    abstract: Transformer[jax.ShapeDtypeStruct],
    *,
    placed: Callable[[Parameter, jax.Array], Any] = lambda parameter, array: array,
) -> Transformer[Any]:
    """The weights of ``model`` from the safetensors in ``folder`` (one file, or several with an index).

    ``abstract`` says shapes, dtypes and shardings, as ``rooftop.programs.parameters.abstract`` makes them; values are
    cast to those dtypes on the device. Tensors that the model does not have are left alone. ``placed`` makes of each
    array what it is kept as, before the next one is read.

    Raises RooftopError for a file or tensor that is missing, damaged, quantised or of another shape than the model's.
    """
    checkpoint, described = Checkpoint.open(folder), describe(model)
    parameters = _by_path(described)
    places = defaultdict[str, dict[tuple[int, ...], Entry]](dict)
    for entry in entries(model):
        entry = replace(entry, name=_published(entry.name, model, checkpoint))
        checkpoint.check(entry.name, tensor_shape(parameters[entry.leaf], entry))
        places[entry.leaf][entry.index] = entry
    leaves = [
        placed(parameters[path], _load(checkpoint, places[path], parameters[path], leaf))
        for path, leaf in _by_path(abstract).items()
    ]
    weights: Transformer[Any] = jax.tree.unflatten(jax.tree.structure(described), leaves)
    return weights


def save_weights(
    folder: Path,
    model: ModelConfig,
    weights: Transformer[Any],
    *,
    source: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write ``weights``, arrays of JAX or NumPy, as a published checkpoint: safetensors and config.json.

    ``source``: the folder that the weights once came from; its config.json is kept byte for byte, and each tensor gets
    the dtype that it has there. Files have at most ``shard_bytes`` bytes of tensors, or one tensor. All processes call
    it; the first one writes. ``folder`` appears when it is complete.

    Raises RooftopError if ``folder`` is already there or cannot be written, if the config of ``source`` is of another
    model, and if ``model`` has something that no config.json of its family can say.
    """
    config = _config(model, source)
    origin = None if source is None else Checkpoint.open(source)
    arrays, parameters = _by_path(weights), _by_path(describe(model))
    parts = defaultdict[str, list[Entry]](list)
    for entry in sorted(entries(model), key=lambda entry: _layers_in_order(entry.name)):
        parts[entry.name if origin is None else _published(entry.name, model, origin)].append(entry)
    tensors = [
        Tensor(
            name=name,
            shape=tensor_shape(parameters[of[0].leaf], of[0]),
            dtype=np.dtype(arrays[of[0].leaf].dtype) if origin is None else origin.dtype(name),
        )
        for name, of in parts.items()
    ]
    if not isinstance(config, bytes):
        config = config | {"torch_dtype": tensors[0].dtype.name}

    def content(tensor: Tensor) -> Array:
        """The tensor on this host; a collective where other processes have parts of it."""
        whole = np.empty(tensor.shape, tensor.dtype)
        for entry in parts[tensor.name]:
            parameter = parameters[entry.leaf]
            part = matrix(_fetch(arrays[entry.leaf], entry.index, tensor.dtype), parameter, entry)
            if entry.parts == 1:
                return part
            whole[region(parameter, entry, (slice(None),) * len(parameter.shape))] = part
        return whole

    if jax.process_index() == 0:
        write_checkpoint(folder, tensors, content, config, shard_bytes)
    else:
        for tensor in tensors:
            content(tensor)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"rooftop export {folder}")


def _config(model: ModelConfig, source: Path | None) -> dict[str, Any] | bytes:
    if source is None:
        return to_huggingface(model)
    path = source / "config.json"
    if from_huggingface(path, model.name) != model:
        raise RooftopError("source of the export", str(path), f"the config.json of the exported model, {model.name}")
    return path.read_bytes()


def _published(name: str, model: ModelConfig, checkpoint: Checkpoint) -> str:
    """GPT-2's oldest files name their tensors without what stands in front in later ones."""
    short = name.removeprefix("transformer.")
    return short if model.family == "gpt2" and name not in checkpoint and short in checkpoint else name


def _layers_in_order(name: str) -> list[tuple[int, str]]:
    """Layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _load(
    checkpoint: Checkpoint, places: Mapping[tuple[int, ...], Entry], parameter: Parameter, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    """One of our arrays, in its shards.

    The shards of this process's devices stand one after another along the first dim of one array over those devices,
    which is filled layer by layer: then one compiled program fills them all, whatever splits the leading dims.
    """
    assert leaf.sharding is not None
    owned = leaf.sharding.addressable_devices_indices_map(leaf.shape)
    shard = leaf.sharding.shard_shape(leaf.shape)
    entry = next(iter(places.values()))
    stacked = bool(entry.index)
    mesh = Mesh(np.array(list(owned)), ("device",))
    local = NamedSharding(mesh, P("device"))
    replicas = defaultdict[tuple[tuple[int, int], ...], list[jax.Device]](list)
    for device, index in owned.items():
        assert index is not None
        spans = tuple(part.indices(size)[:2] for part, size in zip(index, leaf.shape, strict=True))
        replicas[spans].append(device)

    def piece(layer: int) -> jax.Array:
        """What all shards hold of their ``layer``-th layer; of an array without layers, all."""
        rows = dict[jax.Device, jax.Array]()
        for spans, devices in replicas.items():
            if stacked:
                spans = ((spans[0][0] + layer, spans[0][0] + layer + 1), *spans[1:])
            host = _read(checkpoint, places, parameter, tuple(slice(*span) for span in spans))
            # Wait, so that a host holds one shard of one layer at a time.
            rows |= {device: jax.block_until_ready(jax.device_put(host, device)) for device in devices}
        first, *rest = next(iter(rows.values())).shape
        shape = (first * len(rows), *rest)
        return jax.make_array_from_single_device_arrays(shape, local, [rows[device] for device in owned])

    with jax.set_mesh(mesh):
        filled = _blank(shard, leaf.dtype, local)
        for layer in range(shard[0] if stacked else 1):
            filled = jax.block_until_ready(_fill(filled, piece(layer), layer, entry.transposed, local))
    shards = {part.device: part.data for part in filled.addressable_shards}
    array: jax.Array = jax.make_array_from_single_device_arrays(
        leaf.shape, leaf.sharding, [shards[device] for device in owned]
    )
    return array


@partial(jax.jit, static_argnums=(0, 1, 2))
def _blank(shard: tuple[int, ...], dtype: Any, place: NamedSharding) -> jax.Array:
    """Zeros; each device makes its own, which XLA would not see by itself."""
    zeros: jax.Array = jax.shard_map(
        lambda: jnp.zeros(shard, dtype), mesh=place.mesh, in_specs=(), out_specs=place.spec, check_vma=False
    )()
    return zeros


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _fill(filled: jax.Array, piece: jax.Array, layer: jax.Array, transposed: bool, place: NamedSharding) -> jax.Array:
    """``filled`` with ``piece``, as the checkpoint has it, for one layer; or for everything, if that is its size."""

    def put(filled: jax.Array, piece: jax.Array, layer: jax.Array) -> jax.Array:
        piece = jnp.swapaxes(piece, -1, -2) if transposed else piece
        rows = piece.size * filled.shape[0] // filled.size
        piece = piece.reshape(rows, *filled.shape[1:]).astype(filled.dtype)
        return jax.lax.dynamic_update_slice_in_dim(filled, piece, layer, axis=0)

    specs = (place.spec, place.spec, P())
    done: jax.Array = jax.shard_map(put, mesh=place.mesh, in_specs=specs, out_specs=place.spec)(filled, piece, layer)
    return done


def _read(
    checkpoint: Checkpoint, places: Mapping[tuple[int, ...], Entry], parameter: Parameter, index: tuple[slice, ...]
) -> Array:
    """The elements of ``index``: dims of layers and experts first, then those of the checkpoint's tensors."""
    depth = len(next(iter(places)))
    picked = [range(part.start, part.stop) for part in index[:depth]]
    found: Array | None = None
    for at in np.ndindex(*map(len, picked)):
        entry = places[tuple(numbers[i] for numbers, i in zip(picked, at, strict=True))]
        cut = checkpoint.read(entry.name, region(parameter, entry, index))
        if found is None:
            found = np.empty((*map(len, picked), *cut.shape), cut.dtype)
        found[at] = cut
    assert found is not None
    return found


def _fetch(array: Any, index: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """``array[index]`` on this host, in ``dtype``."""
    if isinstance(array, np.ndarray):
        part: Array = array[index].astype(dtype, copy=False)
        return part
    place = array.sharding
    if not isinstance(place, NamedSharding):
        place = NamedSharding(Mesh(np.array(list(array.devices())), ("device",)), P())
        array = jax.device_put(array, place)
    assert isinstance(place.mesh, Mesh)
    with jax.set_mesh(place.mesh):
        found = _take(array, index, dtype, place)
        if not found.is_fully_addressable:
            found = jax.device_put(found, NamedSharding(place.mesh, P())).addressable_data(0)
        host: Array = np.asarray(found)
        return host


@partial(jax.jit, static_argnums=(2, 3))
def _take(array: jax.Array, index: tuple[jax.Array, ...], dtype: np.dtype[Any], place: NamedSharding) -> jax.Array:
    """``array[index]``, the other dims split as they are; where a leading dim is split, its owner hands it out."""
    spec = [*place.spec, *(None,) * (array.ndim - len(place.spec))]
    leading = [axes_of(axes) for axes in spec[: len(index)]]

    def pick(shard: jax.Array, index: tuple[jax.Array, ...]) -> jax.Array:
        for axes, at in zip(leading, index, strict=True):
            owner, at = at // shard.shape[0], at % shard.shape[0]
            shard = jax.lax.dynamic_index_in_dim(shard, at, axis=0, keepdims=False)
            if axes:
                shard = jax.lax.dynamic_index_in_dim(jax.lax.all_gather(shard, axes), owner, axis=0, keepdims=False)
        return shard.astype(dtype)

    specs = (P(*spec), (P(),) * len(index))
    rest = P(*spec[len(index) :])
    taken: jax.Array = jax.shard_map(pick, mesh=place.mesh, in_specs=specs, out_specs=rest, check_vma=False)(
        array, index
    )
    return taken
