"""What memory allows: whether weights and cache fit, and how many pages the cache has."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rooftop.errors import Infeasible, RooftopError
from rooftop.programs.decode import Decoder
from rooftop.programs.describe import describe
from rooftop.programs.quantised import FORMATS, require_format, summed_dim
from rooftop.quantities import format_bytes
from rooftop.serve.configuration import Configuration

#: Of the memory that weights leave, the part that the cache gets by itself: the rest is for steps and the host.
_CACHE_SHARE = {"cpu": 0.25, "gpu": 0.85, "tpu": 0.85}


def weight_bytes(decoder: Decoder, mesh: Mesh, configuration: Configuration) -> int:
    """Bytes of the weights on one device.

    Raises RooftopError where they cannot be quantised so.
    """
    total = 0
    parameters, leaves = jax.tree.leaves(describe(decoder.model)), jax.tree.leaves(decoder.abstract_weights(mesh))
    for parameter, leaf in zip(parameters, leaves, strict=True):
        shard = leaf.sharding.shard_shape(leaf.shape)
        count, dim = math.prod(shard), summed_dim(parameter)
        if dim is None or configuration.weights == "plain":
            total += count * leaf.dtype.itemsize
            continue
        require_format(configuration.weights, parameter, shard)
        total += FORMATS[configuration.weights].weight_bytes(count, shard[dim])
    return total


def _memory(device: jax.Device) -> int:
    """Bytes that a device has for us."""
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return int((device.memory_stats() or {}).get("bytes_limit", 0))


def _sharing(mesh: Mesh) -> int:
    """How many devices of the mesh share the memory of one."""
    local = mesh.local_devices
    return len(local) if local[0].platform == "cpu" else 1


def require_room(decoders: Sequence[Decoder], mesh: Mesh, configuration: Configuration) -> None:
    """Raises Infeasible where the weights, or they and the pages that are asked for, do not fit."""
    device = mesh.local_devices[0]
    room = _memory(device) // _sharing(mesh)
    weights = sum(weight_bytes(decoder, mesh, configuration) for decoder in decoders)
    pages = 1 if configuration.pages is None else configuration.pages
    need = weights + (pages + decoders[0].groups.ways) * sum(decoder.page_bytes for decoder in decoders) // mesh.size
    if need > room:
        names = " and ".join(decoder.model.name for decoder in decoders)
        what = f"{names}: {format_bytes(weights)} of weights and {pages} pages of cache on a device"
        raise Infeasible(what, f"{format_bytes(need - room)} more than the {format_bytes(room)} that it has")


def cache_pages(decoders: Sequence[Decoder], mesh: Mesh, configuration: Configuration) -> tuple[int, int]:
    """Pages of the cache, and the most tokens of a sequence: what one group of devices has pages for.

    All groups have as many; those for padding between them are counted. Raises RooftopError where that is too little.
    """
    groups = decoders[0].groups.ways
    page_tokens, most = configuration.page_tokens, min(decoder.model.max_seq_len for decoder in decoders)
    longest = configuration.longest or most
    if longest > most:
        raise RooftopError("longest", longest, f"at most the model's {most} tokens")
    pages = configuration.pages
    if pages is None:
        device = mesh.local_devices[0]
        stats = device.memory_stats() or {}
        free = _memory(device) // _sharing(mesh) - int(stats.get("bytes_in_use", 0))
        if jax.process_count() > 1:
            # The same in all processes: what the one with the least has.
            free = int(multihost_utils.process_allgather(np.array(free, np.float32)).min())
        fit = int(free * _CACHE_SHARE[device.platform]) * mesh.size // sum(each.page_bytes for each in decoders)
        useful = configuration.own_policy.max_batch * -(-longest // page_tokens)
        pages = max(1, min(fit, useful * (2 if configuration.prefix_cache else 1)))
    own = max(1, pages // groups)
    if configuration.longest is not None and configuration.longest > own * page_tokens:
        cache = "the cache's" if groups == 1 else "one group's"
        accepted = f"at most the {own * page_tokens} tokens of {cache} {own} pages"
        raise RooftopError("longest", configuration.longest, accepted)
    return groups * (own + 1) - 1, min(longest, own * page_tokens)
