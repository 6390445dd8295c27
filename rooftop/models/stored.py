"""Formats of the matrices of published checkpoints: ``quantization_config`` of a config.json, and the bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import Record
from rooftop.models.config import ModelConfig, StoredFormat
from rooftop.models.counting import Weight, weights
from rooftop.models.families import Keys

_KEY = "quantization_config"
#: Bytes of an element that is not quantised: bf16 or f16.
PLAIN_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class StoredWeights(Record):
    """The weights of a model in its checkpoint: the format in words, all their bytes, and their bytes in bf16."""

    format: str
    bytes: int
    bf16_bytes: int

    @classmethod
    def of(cls, config: ModelConfig) -> StoredWeights | None:
        """The record of a model; None if nothing says that its checkpoint is quantised."""
        stored = config.stored
        if stored is None:
            return None
        table = weights(config)
        return cls(
            format=stored.words,
            bytes=sum(_weight_bytes(config, stored, weight) for weight in table),
            bf16_bytes=PLAIN_BYTES * sum(weight.params for weight in table),
        )


@dataclass(frozen=True, kw_only=True)
class KeptWeights(Record):
    """A format of the layers' weights on a server: a scale for each ``group`` inputs of an output, None for all inputs.

    With ``only_experts`` all other weights are bf16.
    """

    dtype: str
    group: int | None = None
    only_experts: bool = False

    @classmethod
    def of(cls, config: ModelConfig) -> KeptWeights | None:
        """The format in which a server keeps the values of the model's published checkpoint; None if it has none.

        That of a checkpoint with zero points, or with matrices of both kinds, is none.
        """
        stored = config.stored
        weights_format = None if stored is None else _kept(stored)
        if stored is None or weights_format is None:
            return None
        plain = {
            weight.component
            for weight in weights(config)
            if weight.name in _MODULES.get(weight.component, {}) and not _all_quantised(config, stored, weight)
        }
        if "experts" in plain or (plain and config.moe is None):
            return None
        return replace(weights_format, only_experts=bool(plain))


#: Inputs of an output that share an exponent in MXFP4.
MXFP4_GROUP = 32


def _kept(stored: StoredFormat) -> KeptWeights | None:
    """The format on a server of matrices that are stored so; None for those with zero points, and other widths."""
    match stored.method, stored.bits, stored.block[1]:
        case "mxfp4", 4, columns:
            return KeptWeights(dtype="f4_e2m1", group=columns)
        case "fp8", 8, columns:
            return KeptWeights(dtype="f8_e4m3", group=columns or None)
        case "packed", 8, 0:
            return KeptWeights(dtype="int8")
        case "packed", 4, columns if columns:
            return KeptWeights(dtype="int4", group=columns)
    return None


def _all_quantised(config: ModelConfig, stored: StoredFormat, weight: Weight) -> bool:
    return _in_method(stored, weight) and not any(stored.skips(name) for name in _modules(config, weight))


def _in_method(stored: StoredFormat, weight: Weight) -> bool:
    """True if the method quantises such weights, where no list leaves them out: MXFP4 is for experts alone."""
    return stored.method != "mxfp4" or weight.component == "experts"


#: Names of modules in published checkpoints, by the names of weights in ``rooftop.models.counting``.
_MODULES: Mapping[str, Mapping[str, str]] = {
    "attn": {
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "q_down": "self_attn.q_a_proj",
        "q_up": "self_attn.q_b_proj",
        "kv_down": "self_attn.kv_a_proj_with_mqa",
        "kv_up": "self_attn.kv_b_proj",
    },
    "mlp": {name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "experts": {name: f"mlp.experts.0.{name}_proj" for name in ("gate", "up", "down")},
    "shared_experts": {name: f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}


def _weight_bytes(config: ModelConfig, stored: StoredFormat, weight: Weight) -> int:
    """Bytes of one weight in all layers."""
    names = list(_modules(config, weight))
    if not names or not _in_method(stored, weight):
        return weight.params * PLAIN_BYTES
    *many, inputs, outputs = weight.as_matrices
    size = math.prod(many) * stored.matrix_bytes(outputs, inputs)
    plain = math.prod(weight.shape) * PLAIN_BYTES
    return sum(plain if stored.skips(name) else size for name in names)


def _modules(config: ModelConfig, weight: Weight) -> Iterator[str]:
    """Names of the modules with this weight, layer by layer; none if it is never quantised."""
    if weight.component == "unembed" and weight.matmul:
        yield "lm_head"
    name = _MODULES.get(weight.component, {}).get(weight.name)
    if name is None:
        return
    for layer in range(config.layers):
        of_experts = weight.component in ("experts", "shared_experts")
        if weight.component == "attn" or config.has_experts(layer) == of_experts:
            yield f"model.layers.{layer}.{name}"


# -- quantization_config -----------------------------------------------------------------------------------------------


def read_stored(config: Keys) -> StoredFormat | None:
    """The format that ``quantization_config`` of a config.json says; None if it has none.

    Raises RooftopError naming the key for a method, or a variant of one, that is not read.
    """
    data, prefix = config.data, config.prefix
    if not data.get(_KEY) and isinstance(data.get("text_config"), Mapping):
        # Multimodal models say it for all their parts, or for the language model.
        data, prefix = data["text_config"], f"{prefix}text_config."
    if not data.get(_KEY):
        return None
    keys = Keys(data[_KEY], config.where, f"{prefix}{_KEY}.")
    method = keys.text("quant_method")
    if method not in _READERS:
        error = unknown(keys.field("quant_method"), method, _READERS)
        raise RooftopError(error.field, error.given, f"{error.accepted}; or a checkpoint that is not quantised")
    stored = _READERS[method](keys)
    keys.check()
    return stored


def _patterns(keys: Keys, key: str, *more: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
    """A list of modules that are not quantised; ``default`` if the file has none."""
    names = keys.array(key, None)
    if names is None:
        return (*default, *more)
    for name in names:
        try:
            re.compile(name)
        except (re.error, TypeError):
            raise RooftopError(keys.field(key), name, "names of modules, or regular expressions of them") from None
    return (*names, *more)


def _mxfp4(keys: Keys) -> StoredFormat:
    keys.ignore("modules_to_not_convert", "dequantize", "use_kernels")
    return StoredFormat(method="mxfp4", bits=4, block=(1, MXFP4_GROUP), scale_bytes=1)


def _block(keys: Keys, key: str, default: list[int] | None) -> tuple[int, int]:
    sizes = default if key not in keys.data else keys.array(key, None)
    keys.ignore(key)
    if not sizes:
        return 0, 0
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise RooftopError(keys.field(key), sizes, "two positive whole numbers")
    return sizes[0], sizes[1]


def _fp8(keys: Keys) -> StoredFormat:
    keys.only("fmt", "e4m3", "float8_e4m3fn")
    keys.only("scale_fmt", "float", "ue8m0")
    keys.only("expert_dtype", "fp8")
    # Activations are multiplied in bf16 here, so that it does not matter how others would quantise them.
    keys.ignore("activation_scheme", "dequantize")
    skips = keys.first("modules_to_not_convert", "ignored_layers")
    skipped = _patterns(keys, skips, default=("lm_head",))
    block = _block(keys, "weight_block_size", [128, 128])
    return StoredFormat(method="fp8", bits=8, block=block, scale_bytes=4, skipped=skipped)


def _fbgemm(keys: Keys) -> StoredFormat:
    keys.ignore("activation_scale_ub")
    skipped = _patterns(keys, "modules_to_not_convert", default=("lm_head",))
    return StoredFormat(method="fp8", bits=8, block=(1, 0), scale_bytes=4, skipped=skipped)


#: Formats of compressed-tensors, with the type of their numbers and the bits that are read.
_COMPRESSED: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "float-quantized": ("float", (8,)),
    "naive-quantized": ("float", (8,)),
    "pack-quantized": ("int", (4, 8)),
}


def _compressed(keys: Keys) -> StoredFormat:
    type_, bits = keys.name("format", _COMPRESSED)
    keys.only("quantization_status", "compressed", "frozen")
    keys.ignore("version", "global_compression_ratio", "sparsity_config", "ignore")
    if keys.has("sparsity_config") and (format_ := keys.data["sparsity_config"].get("format")) not in (None, "dense"):
        raise RooftopError(keys.field("sparsity_config.format"), format_, "dense")
    groups = keys.inner("config_groups")
    if len(groups.data) != 1:
        raise RooftopError(groups.field(""), ", ".join(groups.data), "one group: one format for all matrices")
    group = groups.inner(next(iter(groups.data)))
    group.only("targets", ["Linear"])
    group.only("format", keys.data["format"])
    group.ignore("input_activations")
    weights = group.inner("weights")
    weights.name("type", {type_: type_})
    weights.only("num_bits", *bits)
    weights.only("symmetric", True)
    # With any other order, inputs of a group are not neighbours.
    weights.only("actorder", "weight", "static")
    weights.only("dynamic", False)
    weights.ignore("observer", "observer_kwargs", "group_size", "block_structure", "scale_dtype", "zp_dtype")
    blocks: dict[str, Callable[[], tuple[int, int]]] = {"channel": lambda: (1, 0)}
    if type_ == "float":
        blocks |= {"tensor": lambda: (0, 0), "block": lambda: _block(weights, "block_structure", None)}
    else:
        blocks["group"] = lambda: (1, weights.whole("group_size"))
    # Names are whole, unless they are marked as regular expressions, which begin where a name begins.
    skipped = tuple(
        name.removeprefix("re:") + ".*" if name.startswith("re:") else f"{re.escape(name)}$"
        for name in _patterns(keys, "ignore")
    )
    return StoredFormat(
        method="fp8" if type_ == "float" else "packed",
        bits=weights.whole("num_bits"),
        block=weights.name("strategy", blocks)(),
        scale_bytes=2,
        skipped=skipped,
    )


#: Keys of GPTQ and AWQ about how the weights were chosen, or who multiplies with them.
_CALIBRATION = (
    *("damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "model_name_or_path", "dataset"),
    *("model_file_base_name", "meta", "pack_dtype", "use_exllama", "exllama_config", "cache_block_outputs", "backend"),
    *("batch_size", "pad_token_id", "tokenizer", "use_cuda_fp16", "max_input_length", "disable_exllama", "version"),
    *("model_seqlen", "act_group_aware", "quantizer", "fuse_max_seq_len", "do_fuse", "modules_to_fuse"),
    *("block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "format"),
)


def _group(keys: Keys) -> tuple[int, int]:
    size = keys.data.get("group_size", 128)
    if type(size) is not int or (size < 1 and size != -1):
        raise RooftopError(keys.field("group_size"), size, "a positive whole number, or -1 for all inputs")
    keys.ignore("group_size")
    return 1, max(size, 0)


def _gptq(keys: Keys) -> StoredFormat:
    keys.only("bits", 4, 8)
    format_ = keys.first("checkpoint_format", "format")
    keys.only(format_, "gptq", "gptq_v2")
    # Groups in the order of activations are in g_idx, which is read anyway.
    keys.ignore("desc_act", "sym", *_CALIBRATION)
    skipped = _patterns(keys, "modules_to_not_convert", *(() if keys.flag("lm_head", False) else ("lm_head",)))
    return StoredFormat(
        method="gptq",
        bits=keys.whole("bits"),
        block=_group(keys),
        scale_bytes=2,
        zeros_less_one=keys.text(format_, "gptq") == "gptq",
        skipped=skipped,
    )


def _awq(keys: Keys) -> StoredFormat:
    keys.only("bits", 4)
    keys.only("version", "gemm", "GEMM")
    keys.only("format", "gemm", "GEMM")
    keys.ignore("zero_point", *_CALIBRATION)
    skipped = _patterns(keys, "modules_to_not_convert", "lm_head")
    return StoredFormat(method="awq", bits=4, block=_group(keys), scale_bytes=2, skipped=skipped)


_READERS: Mapping[str, Callable[[Keys], StoredFormat]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "compressed-tensors": _compressed,
    "gptq": _gptq,
    "awq": _awq,
}
