"""Whole checkpoints in memory: tensors by their names in transformers, and our weights."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import numpy as np

from rooftop.checkpoints.names import Array, Entry, entries, matrix
from rooftop.core.errors import RooftopError
from rooftop.models.config import ModelConfig
from rooftop.programs.parameters import Transformer, describe


def from_checkpoint(model: ModelConfig, tensors: Mapping[str, Array]) -> Transformer[Array]:
    """Our weights, in the dtypes of the checkpoint, from tensors by name; other tensors are ignored.

    Raises RooftopError for a tensor that is missing or has another number of elements than the model's.
    """
    described = describe(model)
    leaves = {jax.tree_util.keystr(path): np.empty(0) for path, _ in jax.tree_util.tree_leaves_with_path(described)}
    shapes = {
        jax.tree_util.keystr(path): parameter.shape
        for path, parameter in jax.tree_util.tree_leaves_with_path(described)
    }
    for entry in entries(model):
        if entry.name not in tensors:
            raise RooftopError("checkpoint tensor", entry.name, f"a tensor: {model.family} has one of this name")
        tensor = np.asarray(tensors[entry.name])
        shape = shapes[entry.leaf][len(entry.index) :]
        cut = tensor[_outputs(entry, shape, tensor.ndim)]
        if cut.size != np.prod(shape, dtype=int) or (tensor.size != cut.size and not entry.whole):
            raise RooftopError(f"checkpoint tensor {entry.name}", tensor.shape, f"{shape}, whatever its layout")
        if not leaves[entry.leaf].size:
            leaves[entry.leaf] = np.empty(shapes[entry.leaf], tensor.dtype)
        leaves[entry.leaf][entry.index] = (cut.swapaxes(-1, -2) if entry.transposed else cut).reshape(shape)
    return jax.tree.unflatten(jax.tree.structure(described), leaves.values())


def to_checkpoint(model: ModelConfig, weights: Transformer[Array]) -> dict[str, Array]:
    """Tensors by name from our weights (or gradients): the inverse of ``from_checkpoint``."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(weights)}
    sizes = {jax.tree_util.keystr(path): p for path, p in jax.tree_util.tree_leaves_with_path(describe(model))}
    tensors = dict[str, Array]()
    for entry in entries(model):
        array = np.asarray(leaves[entry.leaf])[entry.index]
        array = matrix(array, sizes[entry.leaf], entry)
        if not entry.whole:
            tensors[entry.name] = array
            continue
        whole = list(array.shape)
        whole[entry.outputs] = entry.whole
        place = tensors.setdefault(entry.name, np.empty(whole, array.dtype))
        place[_along(entry, array.shape[entry.outputs], array.ndim)] = array
    return tensors


def _outputs(entry: Entry, shape: tuple[int, ...], ndim: int) -> tuple[slice, ...]:
    """The slices in a tensor of ``ndim`` dims of our array of ``shape``; heads are one dim in the tensor."""
    first = ndim - 1 if len(shape) >= ndim else len(shape) - 1
    size = int(np.prod(shape[first:], dtype=int))
    return _along(entry, size, ndim) if entry.whole else (slice(None),) * ndim


def _along(entry: Entry, size: int, ndim: int) -> tuple[slice, ...]:
    slices = [slice(None)] * ndim
    slices[entry.outputs] = entry.of_outputs(0, size)
    return tuple(slices)
