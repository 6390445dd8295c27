"""Import and export of the weights of published checkpoints, tensor by tensor.

In both directions a host holds at most about one tensor. Reading copies a shard of one layer at a time to the device
that owns it, and each process reads only the parts of its own devices. Writing appends one tensor after another.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import P
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from rooftop.checkpoints.huggingface_files import Checkpoint, CheckpointTensor, write_checkpoint
from rooftop.checkpoints.names import Array, Entry, entries, matrix, region, tensor_shape
from rooftop.checkpoints.quantised import group_scales, open_weights
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.files import parse_json, read_bytes
from rooftop.models import ModelConfig, from_huggingface
from rooftop.models.config import MoE
from rooftop.models.families import FAMILIES, Keys
from rooftop.models.widths import PaddedDim
from rooftop.programs.parameters import Parameter, Transformer, describe
from rooftop.programs.sharding import axes_of

#: Files of 5 GB, as in published checkpoints.
SHARD_BYTES = 5 * 10**9


def load_weights(
    folder: Path,
    model: ModelConfig,
    abstract: Transformer[jax.ShapeDtypeStruct],
    *,
    described: Transformer[Parameter] | None = None,
    placed: Callable[[Parameter, jax.Array, jax.Array | None], Any] = lambda parameter, array, scales: array,
    scaled: Callable[[Parameter], ScaledDim | None] = lambda parameter: None,
) -> Transformer[Any]:
    """The weights of ``model`` from the safetensors in ``folder`` (one file, or several with an index).

    ``abstract`` has shapes, dtypes and shardings, as returned by ``rooftop.programs.parameters.abstract``; values are
    cast to those dtypes on the device. ``described`` says how dims are padded, and which layers there are
    (``rooftop.programs.parameters.of_layers``); by default none is padded, and all are there. Tensors that the model
    does not have are ignored, and quantised ones are dequantised. ``placed`` converts each array to its stored form,
    before the next one is read. It also gets the scales that the checkpoint has for the array, if they are those of the
    groups that ``scaled`` says, whose dim has an element for each group then; else None.

    Raises RooftopError for a file or tensor that is missing, damaged, quantised in a way that is not read, or of
    another shape than the model's.
    """
    checkpoint, parameters = open_weights(folder), _by_path(describe(model))
    padded = parameters if described is None else _by_path(described)
    places = defaultdict[str, dict[tuple[int, ...], Entry]](dict)
    for entry in entries(model):
        entry = replace(entry, name=_published(entry.name, model, checkpoint))
        checkpoint.check(entry.name, tensor_shape(parameters[entry.leaf], entry))
        places[entry.leaf][entry.index] = entry
    leaves = []
    for path, leaf in _by_path(abstract).items():
        parameter = padded[path]
        own_places = {
            (index[0] - parameter.first, *index[1:]) if parameter.stacked else index: entry
            for index, entry in places[path].items()
        }
        source, scaled_dim = _Source(parameter=parameters[path], padding=parameter.padding), scaled(parameter)
        array, own = _load(checkpoint, own_places, source, leaf), None
        if scaled_dim is not None and (scaled_dim.group is None or not source.pads(scaled_dim.dim)):
            scales = group_scales(checkpoint, scaled_dim.group)
            if all(entry.name in scales for entry in places[path].values()):
                own = _load(scales, own_places, source.thin(scaled_dim), _thin(leaf, scaled_dim))
        leaves.append(placed(parameter, array, own))
    weights: Transformer[Any] = jax.tree.unflatten(jax.tree.structure(abstract), leaves)
    return weights


@dataclass(frozen=True, kw_only=True)
class ScaledDim:
    """The ``dim`` of an array whose elements share scales in ``dtype``: all of it, or each ``group`` of neighbours."""

    dim: int
    group: int | None = None
    dtype: str = "float32"

    def thin(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the scales of an array of ``shape``."""
        groups = 1 if self.group is None else shape[self.dim] // self.group
        return (*shape[: self.dim], groups, *shape[self.dim + 1 :])


def save_weights(
    folder: Path,
    model: ModelConfig,
    weights: Transformer[Any],
    *,
    source: Path | None = None,
    config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
    described: Transformer[Parameter] | None = None,
    complete: Callable[[Path], None] | None = None,
) -> None:
    """Write ``weights``, arrays of JAX or NumPy, as a published checkpoint: safetensors and config.json.

    ``source``: the folder that the weights once came from. Its config.json is copied byte for byte, and each tensor
    gets its dtype there. ``config``: the keys of the config.json where there is no such folder (None: written anew).
    Files have at most ``shard_bytes`` bytes of tensors, or one tensor. All processes call this function; the first one
    writes. ``complete`` adds further files, such as a tokenizer, to the folder, which appears once all is in it.
    ``described`` says how dims of ``weights`` are padded, which tensors of a checkpoint never are; by default none is.

    Raises RooftopError if ``folder`` exists already or cannot be written, if ``config`` or that of ``source`` is of
    another model, and if no config.json of the family can describe ``model``.
    """
    keys = _config(model, source, config)
    origin = None if source is None else open_weights(source)
    arrays, parameters = _by_path(weights), _by_path(describe(model))
    padded = parameters if described is None else _by_path(described)
    parts = defaultdict[str, list[Entry]](list)
    for entry in sorted(entries(model), key=lambda entry: _layers_in_order(entry.name)):
        parts[entry.name if origin is None else _published(entry.name, model, origin)].append(entry)
    tensors = [
        CheckpointTensor(
            name=name,
            shape=tensor_shape(parameters[of[0].leaf], of[0]),
            dtype=np.dtype(arrays[of[0].leaf].dtype) if origin is None else origin.dtype(name),
        )
        for name, of in parts.items()
    ]
    if not isinstance(keys, bytes):
        keys = keys | {"torch_dtype": tensors[0].dtype.name}

    def content(tensor: CheckpointTensor) -> Array:
        """The tensor on this host; a collective if other processes have parts of it."""
        whole = np.empty(tensor.shape, tensor.dtype)
        for entry in parts[tensor.name]:
            parameter = parameters[entry.leaf]
            part = _fetch(arrays[entry.leaf], entry.index, tensor.dtype)
            for at, dim in enumerate(padded[entry.leaf].padding[len(entry.index) :]):
                part = part if dim is None else part.take(dim.positions, axis=at)
            part = matrix(part, parameter, entry)
            if not entry.whole:
                return part
            whole[region(parameter, entry, (slice(None),) * len(parameter.shape))] = part
        return whole

    if jax.process_index() == 0:
        write_checkpoint(folder, tensors, content, keys, shard_bytes, complete)
    else:
        for tensor in tensors:
            content(tensor)
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(f"rooftop export {folder}")


def _config(model: ModelConfig, source: Path | None, config: Mapping[str, Any] | None = None) -> dict[str, Any] | bytes:
    if config is not None and from_huggingface(config, model.name) != model:
        raise RooftopError("config of the export", config.get("model_type"), f"the keys of {model.name}")
    if source is None:
        return to_huggingface(model) if config is None else _plain(config)
    path = source / "config.json"
    origin = from_huggingface(path, model.name)
    if origin != model:
        raise RooftopError("source of the export", str(path), f"the config.json of the exported model, {model.name}")
    content = read_bytes(path)
    return content if origin.stored is None else _plain(parse_json(content))


def _plain(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config.json without those about quantised weights."""
    return {
        key: _plain(value) if key == "text_config" else value
        for key, value in keys.items()
        if key != "quantization_config"
    }


def _published(name: str, model: ModelConfig, checkpoint: Checkpoint) -> str:
    """The tensor's name in the checkpoint: GPT-2's oldest files omit the prefix of later ones."""
    short = name.removeprefix("transformer.")
    return short if model.family == "gpt2" and name not in checkpoint and short in checkpoint else name


def _layers_in_order(name: str) -> list[tuple[int, str]]:
    """Sort key that puts layer 2 before layer 10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


def _by_path(tree: Any) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@dataclass(frozen=True, kw_only=True)
class _Source:
    """A parameter as a checkpoint has it, and the ``padding`` of its dims on the devices."""

    parameter: Parameter
    padding: tuple[PaddedDim | None, ...]

    def pads(self, dim: int) -> bool:
        """True if devices have padding in ``dim``."""
        return bool(self.padding) and self.padding[dim] is not None

    def thin(self, scaled: ScaledDim) -> _Source:
        """The scales of the parameter, without padding in their dim."""
        padding = tuple(None if at == scaled.dim else one for at, one in enumerate(self.padding))
        return _Source(parameter=replace(self.parameter, shape=scaled.thin(self.parameter.shape)), padding=padding)

    def read(
        self, checkpoint: Checkpoint, places: Mapping[tuple[int, ...], Entry], spans: Sequence[tuple[int, int]]
    ) -> Array:
        """The elements of stored ``spans``, in the checkpoint's layout, zeros where they are padding."""
        if not self.padding:
            return _read(checkpoint, places, self.parameter, tuple(slice(*span) for span in spans))
        inside, true, chosen = list[NDArray[np.int64]](), list[slice](), list[NDArray[np.int64]]()
        for (start, stop), dim in zip(spans, self.padding, strict=True):
            sources = np.arange(start, stop) if dim is None else dim.sources[start:stop]
            inside.append(np.flatnonzero(sources >= 0))
            elements_ = sources[inside[-1]]
            first, last = (elements_.min(), elements_.max() + 1) if len(elements_) else (0, 0)
            true.append(slice(int(first), int(last)))
            chosen.append(elements_ - first)
        entry = next(iter(places.values()))
        depth, shape = len(entry.index), tuple(stop - start for start, stop in spans)
        elements = np.zeros(shape, checkpoint.dtype(entry.name))
        if all(len(positions) for positions in inside):
            part = _read(checkpoint, places, self.parameter, tuple(true))
            part = part.swapaxes(-1, -2) if entry.transposed else part
            part = part.reshape([part.stop - part.start for part in true])
            elements[np.ix_(*inside)] = part[np.ix_(*chosen)]
        rows = [matrix(elements[at], self.parameter, entry) for at in np.ndindex(*shape[:depth])]
        return np.stack(rows).reshape(*shape[:depth], *rows[0].shape)


def _load(
    checkpoint: Checkpoint, places: Mapping[tuple[int, ...], Entry], source: _Source, leaf: jax.ShapeDtypeStruct
) -> jax.Array:
    """One of our arrays, in its shards.

    The shards of this process's devices are concatenated along the first dim of one array over those devices, which is
    filled layer by layer: one compiled program fills all of them, whatever axes split the leading dims.
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
        """The ``layer``-th layer of all shards; the whole shards of an array without layers."""
        rows = dict[jax.Device, jax.Array]()
        for spans, devices in replicas.items():
            if stacked:
                spans = ((spans[0][0] + layer, spans[0][0] + layer + 1), *spans[1:])
            host = source.read(checkpoint, places, spans)
            # Wait, so that the host has one shard of one layer at a time.
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


def _thin(leaf: jax.ShapeDtypeStruct, scaled: ScaledDim) -> jax.ShapeDtypeStruct:
    """The scales of ``leaf``, split as it is."""
    place = leaf.sharding
    assert isinstance(place, NamedSharding)
    spec = [*place.spec, *(None,) * (len(leaf.shape) - len(place.spec))]
    if scaled.group is None:
        spec[scaled.dim] = None
    place = NamedSharding(place.mesh, P(*spec))
    return jax.ShapeDtypeStruct(scaled.thin(leaf.shape), jnp.dtype(scaled.dtype), sharding=place)


@partial(jax.jit, static_argnums=(0, 1, 2))
def _blank(shard: tuple[int, ...], dtype: Any, place: NamedSharding) -> jax.Array:
    """Zeros, created on each device; without shard_map, XLA would not do so."""
    zeros: jax.Array = jax.shard_map(
        lambda: jnp.zeros(shard, dtype), mesh=place.mesh, in_specs=(), out_specs=place.spec, check_vma=False
    )()
    return zeros


@partial(jax.jit, static_argnums=(3, 4), donate_argnums=0)
def _fill(filled: jax.Array, piece: jax.Array, layer: jax.Array, transposed: bool, place: NamedSharding) -> jax.Array:
    """``filled`` with ``piece``, in the checkpoint's layout, for one layer, or for everything if it has that size."""

    def put(filled: jax.Array, piece: jax.Array, layer: jax.Array) -> jax.Array:
        piece = jnp.swapaxes(piece, -1, -2) if transposed else piece
        rows = piece.size * filled.shape[0] // filled.size
        piece = piece.reshape(rows, *filled.shape[1:]).astype(filled.dtype)
        return jax.lax.dynamic_update_slice_in_dim(filled, piece, layer, axis=0)

    specs = (place.spec, place.spec, P())
    updated: jax.Array = jax.shard_map(put, mesh=place.mesh, in_specs=specs, out_specs=place.spec)(filled, piece, layer)
    return updated


def _read(
    checkpoint: Checkpoint, places: Mapping[tuple[int, ...], Entry], parameter: Parameter, index: tuple[slice, ...]
) -> Array:
    """The elements of ``index``: dims of layers and experts first, then those of the checkpoint's tensors."""
    depth = len(next(iter(places)))
    picked = [range(part.start, part.stop) for part in index[:depth]]
    elements: Array | None = None
    for at in np.ndindex(*map(len, picked)):
        entry = places[tuple(numbers[i] for numbers, i in zip(picked, at, strict=True))]
        cut = checkpoint.read(entry.name, region(parameter, entry, index))
        if elements is None:
            elements = np.empty((*map(len, picked), *cut.shape), cut.dtype)
        elements[at] = cut
    assert elements is not None
    return elements


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
        selected = _take(array, index, dtype, place)
        if not selected.is_fully_addressable:
            selected = jax.device_put(selected, NamedSharding(place.mesh, P())).addressable_data(0)
        host: Array = np.asarray(selected)
        return host


@partial(jax.jit, static_argnums=(2, 3))
def _take(array: jax.Array, index: tuple[jax.Array, ...], dtype: np.dtype[Any], place: NamedSharding) -> jax.Array:
    """``array[index]``, the other dims in their sharding; the owner of a split leading dim sends its part to all."""
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


_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "qwen3_vl_text": "Qwen3VLForConditionalGeneration",
    "arcee": "ArceeForCausalLM",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "flex_olmo": "FlexOlmoForCausalLM",
    "gemma": "GemmaForCausalLM",
    "glm": "GlmForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "helium": "HeliumForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral": "MinistralForCausalLM",
    "nemotron": "NemotronForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "seed_oss": "SeedOssForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
    "vaultgemma": "VaultGemmaForCausalLM",
}
_ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_ACTIVATIONS |= {"relu": "relu", "relu2": "relu2"}


def to_huggingface(model: ModelConfig) -> dict[str, Any]:
    """The keys of a config.json that describes ``model`` with plain weights; reading them returns the same model.

    Raises RooftopError for an unknown family, and for a field that no config.json of the family can express.
    """
    if model.family not in _ARCHITECTURES:
        raise unknown("model family", model.family, _ARCHITECTURES)
    keys = _FAMILIES.get(model.family, _spelled)(model)
    head = {"architectures": [_ARCHITECTURES[model.family]], "model_type": model.family}
    if model.family in _PARTS:
        whole, part = _PARTS[model.family]
        keys = head | {"model_type": whole, "text_config": {"model_type": part} | keys}
    else:
        keys = head | keys
    back = from_huggingface(keys, model.name)
    for field in (field for field in dataclasses.fields(ModelConfig) if field.compare):
        ours, theirs = getattr(model, field.name), getattr(back, field.name)
        if ours != theirs:
            raise RooftopError(f"model {field.name}", ours, f"{theirs}: a config.json of {model.family} says no other")
    return keys


def _decoder(model: ModelConfig) -> dict[str, Any]:
    """Keys that all families except GPT-2 share. A family ignores keys that it does not have."""
    activation = "hidden_activation" if model.family.startswith("gemma") else "hidden_act"
    return {
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.d_head,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.max_seq_len,
        activation: _ACTIVATIONS[model.activation],
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
        "rope_theta": model.rope_theta,
        "rope_scaling": _rope_scaling(model),
        "attention_bias": model.attn_out_bias,
        "mlp_bias": model.mlp_bias,
    }


def _spelled(model: ModelConfig) -> dict[str, Any]:
    """Keys of any other family: of all spellings of the model's fields, those that the family reads."""
    moe, scaling = model.moe, _rope_scaling(model)
    candidates: dict[str, Any] = _decoder(model) | _windows(model)
    candidates |= dict.fromkeys(("layer_norm_eps", "norm_epsilon", "norm_eps"), model.norm_eps)
    candidates |= dict.fromkeys(("qkv_bias", "use_qkv_bias", "attention_bias"), model.qkv_bias)
    candidates |= dict.fromkeys(("use_bias", "enable_bias"), model.mlp_bias)
    query_scale = model.d_head**-0.5 if model.query_scale is None else model.query_scale
    candidates |= {
        "activation_function": _ACTIVATIONS[model.activation],
        "attention_multiplier": query_scale,
        "attention_out_bias": model.attn_out_bias,
        "embedding_multiplier": model.embed_scale,
        "ffn_dim": model.d_ff,
        "logit_scale": model.logits_scale,
        "logits_scaling": 1 / model.logits_scale,
        "no_rope_layers": [int(rotated) for rotated in model.rope_layers or (True,) * model.layers],
        "partial_rotary_factor": model.rotated / model.d_head,
        "residual_multiplier": model.residual_scale,
        "rotary_dim": model.rotated,
        "use_parallel_residual": model.parallel is not None,
        "use_qk_norm": model.qk_norm is not None,
        "use_sliding_window": bool(model.layer_windows),
    }
    if model.rope_local_theta is not None:
        full = {"rope_type": "default", **(scaling or {}), "rope_theta": model.rope_theta}
        windowed = {"rope_type": "default", "rope_theta": model.rope_local_theta}
        candidates["rope_scaling"] = None
        candidates["rope_parameters"] = {"full_attention": full, "sliding_attention": windowed}
    if moe is not None:
        experts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        candidates |= dict.fromkeys(experts, moe.experts)
        candidates |= dict.fromkeys(("num_experts_per_tok", "moe_k"), moe.active)
        candidates |= dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), moe.shared_d_ff)
        candidates |= dict.fromkeys(("n_shared_experts", "moe_num_shared_experts"), moe.shared_d_ff // moe.d_ff)
        candidates |= dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index"), moe.dense_layers)
        candidates |= dict.fromkeys(("decoder_sparse_step", "moe_layer_interval"), moe.every)
        candidates |= {
            "moe_intermediate_size": moe.d_ff,
            "moe_layer_end_index": model.layers - 1,
            "mlp_only_layers": list(range(moe.dense_layers)) if moe.every == 1 else [],
            "n_group": moe.groups,
            "norm_topk_prob": moe.normalise,
            "routed_scaling_factor": moe.routed_scaling,
            "topk_group": moe.active_groups,
        }
    keys = Keys(candidates, "config")
    FAMILIES[model.family](keys)
    return {name: value for name, value in candidates.items() if name in keys.used}


def _rope_scaling(model: ModelConfig) -> dict[str, Any] | None:
    scaling = model.rope_scaling
    if scaling is None:
        return None
    keys: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind in ("llama3", "yarn"):
        keys["original_max_position_embeddings"] = scaling.original_max_seq_len
    if scaling.kind == "llama3":
        keys |= {"low_freq_factor": scaling.low_freq_factor, "high_freq_factor": scaling.high_freq_factor}
    if scaling.kind == "yarn":
        keys |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "attention_factor": scaling.attention_factor,
            "truncate": scaling.truncate,
        }
    return keys


def _windows(model: ModelConfig) -> dict[str, Any]:
    """The windows layer by layer; without any window the file has no size either."""
    sizes = {window for window in model.windows if window is not None}
    kinds = ["full_attention" if window is None else "sliding_attention" for window in model.windows]
    return {"sliding_window": next(iter(sizes), None), "layer_types": kinds}


def _one_window(model: ModelConfig) -> dict[str, Any]:
    return {"sliding_window": model.windows[0]}


def _mixtral(model: ModelConfig) -> dict[str, Any]:
    moe = _experts(model)
    counts = {"num_local_experts": moe.experts, "num_experts_per_tok": moe.active}
    return _decoder(model) | _one_window(model) | counts


def _experts(model: ModelConfig) -> MoE:
    if model.moe is None:
        raise RooftopError("model moe", None, f"experts: every {model.family} has some")
    return model.moe


def _qwen(model: ModelConfig) -> dict[str, Any]:
    windows = _windows(model)
    return _decoder(model) | windows | {"use_sliding_window": windows["sliding_window"] is not None}


def _qwen3_moe(model: ModelConfig) -> dict[str, Any]:
    moe, window = _experts(model), model.windows[0]
    return (
        _decoder(model)
        | _one_window(model)
        | {
            "use_sliding_window": window is not None,
            "num_experts": moe.experts,
            "num_experts_per_tok": moe.active,
            "moe_intermediate_size": moe.d_ff,
            "mlp_only_layers": list(range(moe.dense_layers)),
            "decoder_sparse_step": 1,
            "norm_topk_prob": moe.normalise,
        }
    )


def _gemma(model: ModelConfig) -> dict[str, Any]:
    scale = model.d_head**-0.5 if model.query_scale is None else model.query_scale
    return (
        _decoder(model)
        | _windows(model)
        | {
            "attn_logit_softcapping": model.attn_softcap,
            "final_logit_softcapping": model.final_softcap,
            "query_pre_attn_scalar": round(scale**-2),
        }
        | ({} if model.rope_local_theta is None else {"rope_local_base_freq": model.rope_local_theta})
    )


def _gpt_oss(model: ModelConfig) -> dict[str, Any]:
    moe = _experts(model)
    return (
        _decoder(model)
        | _windows(model)
        | {
            "num_local_experts": moe.experts,
            "num_experts_per_tok": moe.active,
            "swiglu_limit": model.swiglu_limit,
            "swiglu_alpha": model.swiglu_alpha,
        }
    )


def _deepseek(model: ModelConfig) -> dict[str, Any]:
    moe, mla = _experts(model), model.mla
    if mla is None:
        raise RooftopError("model mla", None, f"latent attention: every {model.family} has it")
    keys = _decoder(model) | {
        "q_lora_rank": mla.q_rank,
        "kv_lora_rank": mla.kv_rank,
        "qk_nope_head_dim": mla.d_nope,
        "qk_rope_head_dim": mla.d_rope,
        "v_head_dim": mla.d_v,
        "n_routed_experts": moe.experts,
        "n_shared_experts": moe.shared_d_ff // moe.d_ff or None,
        "num_experts_per_tok": moe.active,
        "moe_intermediate_size": moe.d_ff,
        "first_k_dense_replace": moe.dense_layers,
        "norm_topk_prob": moe.normalise,
        "routed_scaling_factor": moe.routed_scaling,
        "n_group": moe.groups,
        "topk_group": moe.active_groups,
    }
    # The rotated size; the size of the whole head is the sum of two keys above.
    keys["head_dim"] = mla.d_rope
    if model.family == "deepseek_v2":
        keys |= {"scoring_func": "softmax", "topk_method": "greedy" if moe.groups == 1 else "group_limited_greedy"}
    else:
        keys |= {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "rope_interleave": model.rope_interleaved}
    if model.query_scale is not None and model.rope_scaling is not None and model.rope_scaling.factor > 1:
        keys["rope_scaling"]["mscale_all_dim"] = _mscale_all_dim(model, model.query_scale, model.rope_scaling.factor)
    return keys


def _mscale_all_dim(model: ModelConfig, scale: float, factor: float) -> float:
    """The weight w of YaRN's temperature: scale = H**-0.5 (0.1 w ln(factor) + 1)**2, solved for w."""
    weight = (math.sqrt(scale * math.sqrt(model.d_head)) - 1) / (0.1 * math.log(factor))
    return float(f"{weight:.10g}")


def _gpt2(model: ModelConfig) -> dict[str, Any]:
    return {
        "n_embd": model.d_model,
        "n_head": model.heads,
        "n_layer": model.layers,
        "n_inner": model.d_ff,
        "n_positions": model.max_seq_len,
        "vocab_size": model.vocab,
        "activation_function": "gelu_new" if model.activation == "gelu_tanh" else _ACTIVATIONS[model.activation],
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": model.tied_embeddings,
    }


#: Families that are the language model of a multimodal file: its ``model_type``, and that of its ``text_config``.
_PARTS = {"gemma3": ("gemma3", "gemma3_text"), "qwen3_vl_text": ("qwen3_vl", "qwen3_vl_text")}
_FAMILIES: Mapping[str, Callable[[ModelConfig], dict[str, Any]]] = {
    "mistral": lambda model: _decoder(model) | _one_window(model),
    "mixtral": _mixtral,
    "kimi_k2": _deepseek,
    "llama": _decoder,
    "qwen2": _qwen,
    "qwen3_vl_text": _qwen,
    "qwen3": _qwen,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma,
    "gemma3": _gemma,
    "gemma3_text": _gemma,
    "vaultgemma": _gemma,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
}
