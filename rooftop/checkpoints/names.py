"""The map between tensors of published checkpoints, by their names in transformers, and our weights.

``entries`` lists every tensor of a model; ``matrix``, ``tensor_shape`` and ``region`` say how ours lies in it. NumPy
only: callers read files and place arrays.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.models.config import ModelConfig
from rooftop.models.segments import segments
from rooftop.programs.parameters import Layer, MoEWeights, Parameter, Transformer, describe

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a checkpoint, or a part of one, and the place of its elements in our weights.

    ``leaf`` is the key path of one of our arrays, and ``index`` selects the tensor's part by its leading dims (layer,
    expert). Where several of our arrays share a tensor, ``whole`` is the size of its dim of outputs, and our outputs
    are those from ``before`` on, every ``stride``-th. If ``transposed``, [out, in] becomes [in, out]. Then it is
    reshaped to the selected part of our array. ``row``: the tensor has a leading dim of 1.
    """

    name: str
    leaf: str
    index: tuple[int, ...] = ()
    transposed: bool = False
    before: int = 0
    whole: int = 0
    stride: int = 1
    row: bool = False

    @property
    def outputs(self) -> int:
        """The dim of outputs of the tensor."""
        return -2 if self.transposed else -1

    def of_outputs(self, start: int, stop: int) -> slice:
        """The outputs in the tensor of ours from ``start`` to ``stop``."""
        if self.stride == 1:
            return slice(self.before + start, self.before + stop)
        return slice(self.before + start * self.stride, self.before + (stop - 1) * self.stride + 1, self.stride)


@dataclass(frozen=True, kw_only=True)
class _Tensor:
    """A name below a layer, with {expert} if each expert has a tensor; see ``Entry``.

    ``among``: our weights that share the tensor, in their order, one after the other or ``interleaved``.
    """

    name: str
    as_is: bool = False
    among: tuple[str, ...] = ()
    interleaved: bool = False
    row: bool = False


def _shared(name: str, *among: str, as_is: bool = False, interleaved: bool = False) -> dict[str, _Tensor]:
    """One tensor for several of our weights."""
    tensor = _Tensor(name=name, as_is=as_is, among=among, interleaved=interleaved)
    return dict.fromkeys(among, tensor)


def _linear(prefix: str, ours: str, **names: str) -> dict[str, _Tensor]:
    """Weights and biases of linear maps, by our field names."""
    tensors = {}
    for field, name in names.items():
        tensors[f"{ours}.{field}"] = _Tensor(name=f"{prefix}.{name}.weight")
        tensors[f"{ours}.{field}_bias"] = _Tensor(name=f"{prefix}.{name}.bias")
    return tensors


_MLP = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_SHARED = {f"shared_{field}": name for field, name in _MLP.items()}

#: Names below a layer that most families use, by the fields of a Layer; ``moe`` is the mlp of a mixture.
_DECODER: Mapping[str, _Tensor] = {
    "attn.norm.scale": _Tensor(name="input_layernorm.weight"),
    "attn.norm.bias": _Tensor(name="input_layernorm.bias"),
    **_linear("self_attn", "attn", q="q_proj", k="k_proj", v="v_proj", out="o_proj"),
    "attn.q_norm": _Tensor(name="self_attn.q_norm.weight"),
    "attn.k_norm": _Tensor(name="self_attn.k_norm.weight"),
    "attn.sinks": _Tensor(name="self_attn.sinks"),
    "mlp.norm.scale": _Tensor(name="post_attention_layernorm.weight"),
    "mlp.norm.bias": _Tensor(name="post_attention_layernorm.bias"),
    **_linear("mlp", "mlp", **_MLP),
    "moe.norm.scale": _Tensor(name="post_attention_layernorm.weight"),
    **_linear("mlp.experts.{expert}", "moe", **_MLP),
    **_linear("mlp.shared_experts", "moe", **_SHARED),
    "moe.router": _Tensor(name="mlp.gate.weight"),
    "moe.correction_bias": _Tensor(name="mlp.gate.e_score_correction_bias"),
}
_LATENT: Mapping[str, _Tensor] = {
    "attn.q_down": _Tensor(name="self_attn.q_a_proj.weight"),
    "attn.q_norm": _Tensor(name="self_attn.q_a_layernorm.weight"),
    "attn.kv_down": _Tensor(name="self_attn.kv_a_proj_with_mqa.weight"),
    "attn.kv_norm": _Tensor(name="self_attn.kv_a_layernorm.weight"),
    "attn.kv_up": _Tensor(name="self_attn.kv_b_proj.weight"),
}
_FOUR_NORMS: Mapping[str, _Tensor] = {
    "attn.post_norm.scale": _Tensor(name="post_attention_layernorm.weight"),
    "mlp.norm.scale": _Tensor(name="pre_feedforward_layernorm.weight"),
    "mlp.post_norm.scale": _Tensor(name="post_feedforward_layernorm.weight"),
}
_POST_NORMS: Mapping[str, _Tensor] = {
    f"{block}.post_norm.scale": _Tensor(name=f"post_{name}_layernorm.weight")
    for block, name in (("attn", "attention"), ("mlp", "feedforward"), ("moe", "feedforward"))
}
_FUSED_MLP = _shared("mlp.gate_up_proj.weight", "mlp.gate", "mlp.up")
_MINIMAX_M2: Mapping[str, _Tensor] = {
    "moe.router": _Tensor(name="block_sparse_moe.gate.weight"),
    "moe.correction_bias": _Tensor(name="block_sparse_moe.e_score_correction_bias"),
    **_linear("block_sparse_moe.experts.{expert}", "moe", gate="w1", up="w3", down="w2"),
}
_GRANITE_MOE: Mapping[str, _Tensor] = {
    "moe.router": _Tensor(name="block_sparse_moe.router.layer.weight"),
    **_shared("block_sparse_moe.input_linear.weight", "moe.gate", "moe.up"),
    "moe.down": _Tensor(name="block_sparse_moe.output_linear.weight"),
    **_shared("shared_mlp.input_linear.weight", "moe.shared_gate", "moe.shared_up"),
    "moe.shared_down": _Tensor(name="shared_mlp.output_linear.weight"),
}
_OPT: Mapping[str, _Tensor] = {
    "attn.norm.scale": _Tensor(name="self_attn_layer_norm.weight"),
    "attn.norm.bias": _Tensor(name="self_attn_layer_norm.bias"),
    **_linear("self_attn", "attn", out="out_proj"),
    "mlp.norm.scale": _Tensor(name="final_layer_norm.weight"),
    "mlp.norm.bias": _Tensor(name="final_layer_norm.bias"),
    "mlp.up": _Tensor(name="fc1.weight"),
    "mlp.up_bias": _Tensor(name="fc1.bias"),
    "mlp.down": _Tensor(name="fc2.weight"),
    "mlp.down_bias": _Tensor(name="fc2.bias"),
}
_MIXTRAL: Mapping[str, _Tensor] = {
    "moe.router": _Tensor(name="block_sparse_moe.gate.weight"),
    **_linear("block_sparse_moe.experts.{expert}", "moe", gate="w1", up="w3", down="w2"),
}
_GPT_OSS: Mapping[str, _Tensor] = {
    "moe.router": _Tensor(name="mlp.router.weight"),
    "moe.router_bias": _Tensor(name="mlp.router.bias"),
    **_shared("mlp.experts.gate_up_proj", "moe.gate", "moe.up", as_is=True, interleaved=True),
    "moe.down": _Tensor(name="mlp.experts.down_proj", as_is=True),
    **_shared("mlp.experts.gate_up_proj_bias", "moe.gate_bias", "moe.up_bias", interleaved=True),
    "moe.down_bias": _Tensor(name="mlp.experts.down_proj_bias"),
}
_GPT2: Mapping[str, _Tensor] = {
    "attn.norm.scale": _Tensor(name="ln_1.weight"),
    "attn.norm.bias": _Tensor(name="ln_1.bias"),
    **_shared("attn.c_attn.weight", "attn.q", "attn.k", "attn.v", as_is=True),
    **_shared("attn.c_attn.bias", "attn.q_bias", "attn.k_bias", "attn.v_bias"),
    "attn.out": _Tensor(name="attn.c_proj.weight", as_is=True),
    "attn.out_bias": _Tensor(name="attn.c_proj.bias"),
    "mlp.norm.scale": _Tensor(name="ln_2.weight"),
    "mlp.norm.bias": _Tensor(name="ln_2.bias"),
    "mlp.up": _Tensor(name="mlp.c_fc.weight", as_is=True),
    "mlp.up_bias": _Tensor(name="mlp.c_fc.bias"),
    "mlp.down": _Tensor(name="mlp.c_proj.weight", as_is=True),
    "mlp.down_bias": _Tensor(name="mlp.c_proj.bias"),
}
#: Names that differ in some families.
_OTHERS: Mapping[str, Mapping[str, _Tensor]] = {
    "ernie4_5_moe": {"moe.correction_bias": _Tensor(name="mlp.moe_statics.e_score_correction_bias", row=True)},
    "glm": _FUSED_MLP,
    "glm4": {
        **_FUSED_MLP,
        "attn.post_norm.scale": _Tensor(name="post_self_attn_layernorm.weight"),
        "mlp.norm.scale": _Tensor(name="post_attention_layernorm.weight"),
        "mlp.post_norm.scale": _Tensor(name="post_mlp_layernorm.weight"),
    },
    "gpt2": _GPT2,
    "gpt_oss": _GPT_OSS,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "hunyuan_v1_dense": {
        "attn.q_norm": _Tensor(name="self_attn.query_layernorm.weight"),
        "attn.k_norm": _Tensor(name="self_attn.key_layernorm.weight"),
    },
    "minimax_m2": _MINIMAX_M2,
    "mixtral": _MIXTRAL,
    "opt": _OPT,
    "phi3": {**_FUSED_MLP, **_shared("self_attn.qkv_proj.weight", "attn.q", "attn.k", "attn.v")},
    "qwen2_moe": {
        "moe.shared_router": _Tensor(name="mlp.shared_expert_gate.weight"),
        **_linear("mlp.shared_expert", "moe", **_SHARED),
    },
    "starcoder2": _linear("mlp", "mlp", up="c_fc", down="c_proj"),
    "vaultgemma": {"mlp.norm.scale": _Tensor(name="pre_feedforward_layernorm.weight")},
}
#: Names outside layers: of the layers themselves, tables, the final norm and the unembedding.
_MODEL = {
    "layers": "model.layers.{layer}.",
    "embed": "model.embed_tokens.weight",
    "final_norm.scale": "model.norm.weight",
    "final_norm.bias": "model.norm.bias",
    "unembed": "lm_head.weight",
}
_MODELS: Mapping[str, Mapping[str, str]] = {
    "gemma3": {ours: f"language_model.{name}" for ours, name in _MODEL.items()},
    "gpt2": {
        "layers": "transformer.h.{layer}.",
        "embed": "transformer.wte.weight",
        "positions": "transformer.wpe.weight",
        "final_norm.scale": "transformer.ln_f.weight",
        "final_norm.bias": "transformer.ln_f.bias",
        "unembed": "lm_head.weight",
    },
    "qwen3_vl_text": {ours: name.replace("model.", "model.language_model.") for ours, name in _MODEL.items()},
    "opt": {
        "layers": "model.decoder.layers.{layer}.",
        "embed": "model.decoder.embed_tokens.weight",
        "positions": "model.decoder.embed_positions.weight",
        "final_norm.scale": "model.decoder.final_layer_norm.weight",
        "final_norm.bias": "model.decoder.final_layer_norm.bias",
        "unembed": "lm_head.weight",
    },
}


def entries(model: ModelConfig) -> tuple[Entry, ...]:
    """Every tensor of a checkpoint of ``model``; tied ones occur once."""
    return tuple(_entries(model))


#: Families that run, but whose published tensors have no place here yet.
_UNNAMED = ("falcon", "gpt_neox", "hunyuan_v1_moe", "qwen3_vl_moe_text")


def _entries(model: ModelConfig) -> Iterator[Entry]:
    if model.family in _UNNAMED:
        raise RooftopError("model family", model.family, "one of docs/model-types.md that reads published weights")
    described, names = describe(model), _MODELS.get(model.family, _MODEL)
    for path, _ in _leaves(_Outside.of(described)):
        yield Entry(name=names[path], leaf=f".{path}", transposed=path == "unembed")
    table = dict(_DECODER)
    if model.mla is not None:
        table |= _LATENT
        if model.mla.q_rank is not None:
            table["attn.q"] = _Tensor(name="self_attn.q_b_proj.weight")
    if model.norm_placement == "sandwich":
        table |= _FOUR_NORMS
    elif model.norm_placement == "post":
        table |= _POST_NORMS
    table |= _OTHERS.get(model.family, {})
    for s, (segment, stacks) in enumerate(zip(segments(model), described.layers, strict=True)):
        for j, stack in enumerate(stacks):
            paths = dict(_leaves(stack))
            if isinstance(stack.mlp, MoEWeights):
                paths = {path.replace("mlp.", "moe.", 1): parameter for path, parameter in paths.items()}
            for path in paths:
                leaf = f".layers[{s}][{j}].{path.replace('moe.', 'mlp.', 1)}"
                for repeat in range(segment.repeats):
                    prefix = names["layers"].format(layer=segment.layer(j, repeat))
                    yield from _layer_entries(table[path], prefix, leaf, repeat, path, paths)


def _layer_entries(
    tensor: _Tensor, prefix: str, leaf: str, repeat: int, path: str, paths: Mapping[str, Parameter]
) -> Iterator[Entry]:
    parameter = paths[path]
    experts = range(parameter.shape[1]) if "{expert}" in tensor.name else (None,)
    for expert in experts:
        entry = Entry(
            name=prefix + tensor.name.format(expert=expert),
            leaf=leaf,
            index=(repeat,) if expert is None else (repeat, expert),
            transposed=parameter.fan_in is not None and not tensor.as_is,
            row=tensor.row,
        )
        if tensor.among:
            sizes = [_part_shape(paths[name], entry)[entry.outputs] for name in tensor.among]
            at = tensor.among.index(path)
            before, stride = (at, len(sizes)) if tensor.interleaved else (sum(sizes[:at]), 1)
            entry = replace(entry, before=before, whole=sum(sizes), stride=stride)
        yield entry


def matrix(array: Array, parameter: Parameter, entry: Entry) -> Array:
    """An array in a checkpoint's layout: heads and their elements as one dim, and [in, out] as [out, in]."""
    at = _heads(parameter, entry)
    if at is not None and array.ndim > 1:
        array = array.reshape(*array.shape[:at], -1)
    if entry.row:
        return array[None]
    return array.swapaxes(-1, -2) if entry.transposed else array


def tensor_shape(parameter: Parameter, entry: Entry) -> tuple[int, ...]:
    """The shape in a checkpoint of the tensor of ``entry``, all parts included."""
    shape = list(_part_shape(parameter, entry))
    if entry.whole:
        shape[entry.outputs] = entry.whole
    return (1, *shape) if entry.row else tuple(shape)


def region(parameter: Parameter, entry: Entry, index: tuple[slice, ...]) -> tuple[slice, ...]:
    """The slices in a checkpoint's tensor of ``index`` in our array, transposed if ``entry`` is.

    Heads are always whole. Leading dims of ``index``, from which ``entry.index`` selects, are ignored.
    """
    shape, at = parameter.shape[len(entry.index) :], _heads(parameter, entry)
    spans = [part.indices(size)[:2] for part, size in zip(index[len(entry.index) :], shape, strict=True)]
    if at is not None:
        head = math.prod(shape[at + 1 :])
        spans = [*spans[:at], (spans[at][0] * head, spans[at][1] * head)]
    if entry.transposed:
        spans[-2:] = reversed(spans[-2:])
    slices = [slice(*span) for span in spans]
    if entry.whole:
        slices[entry.outputs] = entry.of_outputs(*spans[entry.outputs])
    return (slice(0, 1), *slices) if entry.row else tuple(slices)


def _part_shape(parameter: Parameter, entry: Entry) -> tuple[int, ...]:
    """The shape of the result of ``matrix``."""
    shape, at = parameter.shape[len(entry.index) :], _heads(parameter, entry)
    if at is not None:
        shape = (*shape[:at], math.prod(shape[at:]))
    return (*shape[:-2], shape[-1], shape[-2]) if entry.transposed else shape


def _heads(parameter: Parameter, entry: Entry) -> int | None:
    """The dim of heads, after the dims of ``entry.index``."""
    heads = [dim in ("heads", "kv_heads") for dim in parameter.dims[len(entry.index) :]]
    return heads.index(True) if any(heads) else None


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class _Outside:
    """The weights outside layers."""

    embed: Any
    positions: Any
    final_norm: Any
    unembed: Any

    @classmethod
    def of(cls, weights: Transformer[Parameter]) -> _Outside:
        return cls(
            embed=weights.embed,
            positions=weights.positions,
            final_norm=weights.final_norm,
            unembed=weights.unembed,
        )


def _leaves(tree: Layer[Parameter] | _Outside) -> list[tuple[str, Parameter]]:
    """Leaves with their paths, such as 'attn.norm.scale'."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [(jax.tree_util.keystr(path).lstrip("."), parameter) for path, parameter in leaves]
