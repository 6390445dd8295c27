"""MaxText's words: its YAML file, written and read, and the key=value arguments of its trainer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from rooftop.core.errors import RooftopError, unknown
from rooftop.frameworks.remat import has_remat, named_policy, remat_words
from rooftop.frameworks.words.shell import script_arguments
from rooftop.frameworks.words.step import ConfiguredStep, StatedStep
from rooftop.frameworks.words.table import FrameworkConfiguration, WordTable, WordValue, word_table
from rooftop.models import ModelConfig, load_model
from rooftop.models.activations import CHECKPOINTS

_PROGRAMS = ("train.py", "train_compile.py", "maxtext.trainers.pre_train.train", "MaxText.train")
_AXES = ("data", "fsdp", "tensor", "context", "expert", "stage")
_ACTIONS = {"save": "device", "offload": "offload", "recompute": "remat"}
_DTYPES = {"f32": "float32", "bf16": "bfloat16"}


def maxtext_words() -> WordTable:
    """The words of MaxText's configuration."""
    return word_table("maxtext")


def maxtext_values(step: ConfiguredStep) -> dict[str, WordValue]:
    """The value of each word for a train step. Raises RooftopError for a model that MaxText's words cannot say."""
    choice, numerics, kind = step.choice, step.numerics, step.slice.chip.kind
    stages = step.ways("stage")
    accumulation = 1 if stages > 1 else choice.microbatches
    values: dict[str, WordValue] = {
        **_model_values(step.model),
        "batch": step.batch_seqs / accumulation / step.slice.devices,
        "accumulation": accumulation,
        "seq": step.seq_len,
        **_axis_values(step),
        **_remat_values(step),
        "dtype": _DTYPES[numerics.compute],
        "weights_dtype": _DTYPES[numerics.weights],
        "moments_dtype": "" if numerics.moments == numerics.weights else _DTYPES[numerics.moments],
        "optimizer": {"adam": "adam_pax"}.get(numerics.optimizer, numerics.optimizer),
        "quantization": maxtext_words().data["quantization"][kind].get(numerics.matmul, ""),
        **_kernel_values(step),
        "data": "synthetic",
        "checkpoints": False,
        "steps": 50,
    }
    if stages > 1:
        values |= {
            "pipeline_microbatches": choice.microbatches,
            "repeats": choice.chunks,
            "stage_layers": step.model.layers // (stages * choice.chunks),
        }
    return values


def _model_values(model: ModelConfig) -> dict[str, WordValue]:
    named = maxtext_words().data["models"].get(model.name)
    if named is not None:
        return {"model": named}
    plain = model.family in ("llama", "mistral") and model.moe is None and not model.layer_windows
    if not plain:
        known = ", ".join(maxtext_words().data["models"])
        raise RooftopError("model", model.name, f"a model with LLaMA's layers, or one that MaxText names: {known}")
    return {
        "hidden": model.d_model,
        "heads": model.heads,
        "kv_heads": model.kv_heads,
        "ffn": model.d_ff,
        "layers": model.layers,
        "d_head": model.d_head,
        "vocab": model.vocab,
        "tied": model.tied_embeddings,
        "rope_theta": round(model.rope_theta),
        "norm_epsilon": model.norm_eps,
    }


def _axis_values(step: ConfiguredStep) -> dict[str, WordValue]:
    """Sizes of axes within slices or nodes, and across them."""
    values: dict[str, WordValue] = {}
    for axis in _AXES:
        across = step.dcn.get(axis, 1)
        values[f"dcn_{axis}"] = across
        values[f"ici_{axis}"] = step.ways(axis) // across
    return values


def _remat_values(step: ConfiguredStep) -> dict[str, WordValue]:
    """A policy by its name, or a custom one by checkpoints. Raises RooftopError for checkpoints without a word."""
    data, policy = maxtext_words().data, step.choice.policy
    if (named := named_policy("maxtext", step.choice.remat)) is not None:
        return {"remat": named}
    if not has_remat("maxtext", step.choice.remat, step.model):
        raise RooftopError("remat", step.choice.remat, remat_words("maxtext"))
    values: dict[str, WordValue] = {"remat": "custom"}
    for checkpoint, words in data["checkpoints"].items():
        values |= dict.fromkeys(words, _ACTIONS[policy[checkpoint]])
    return values


def _kernel_values(step: ConfiguredStep) -> dict[str, WordValue]:
    settings, kind = step.framework.settings, step.slice.chip.kind
    values: dict[str, WordValue] = {"hardware": kind, "attention": "flash" if kind == "tpu" else "cudnn_flash_te"}
    if kind == "gpu":
        return values | {"segments": 32}
    kernels = settings.get("attention_kernels", "")
    if match := re.fullmatch(r"jax-(\d+)", kernels):
        values |= {name: int(match[1]) for name in maxtext_words().words if name.startswith("block_")}
    values["tokamax"] = kernels.startswith("tokamax")
    values["fused_backward"] = settings.get("fused_backward") == "yes"
    if step.model.moe is not None and settings.get("experts") == "slots":
        values |= {"sorted_experts": False, "megablox": False, "capacity": float(settings.get("capacity", "1"))}
    return values


def maxtext_configuration(step: ConfiguredStep) -> FrameworkConfiguration:
    """The YAML file of a train step, and the command that every host runs. Raises RooftopError."""
    table, chip = maxtext_words(), step.slice.chip.name
    settings = {word.key: value for word, value in table.written(maxtext_values(step))}
    text = f"# {table.program}.\nbase_config: base.yml\n" + yaml.safe_dump(settings, sort_keys=False)
    command = "python3 -m maxtext.trainers.pre_train.train plan.yml run_name=$RUN base_output_directory=$OUTPUT"
    notes = ["every host runs the command", "synthetic data and 50 steps stand for yours"]
    if chip in table.data["flags"]:
        notes.append(f"XLA's options: {table.data['flags'][chip]} of benchmarks/xla_flags_library.py")
    if step.model.moe is not None:
        notes.append("tokens are priced as dealt evenly to experts: use_random_routing in benchmarks")
    return FrameworkConfiguration(program=table.program, files={"plan.yml": text}, command=command, notes=tuple(notes))


def maxtext_step(text: str, *, devices: int, slices: int = 1, model: ModelConfig | None = None) -> StatedStep:
    """The train step of a YAML file, or of a command with key=value, on ``devices`` in ``slices``.

    Raises RooftopError for what MaxText refuses, and for a value without a price.
    """
    return maxtext_options_step(_options(text), devices=devices, slices=slices, model=model)


#: The largest number that a setting may be.
_MOST = 1e9
#: Optimizers by their words.
_OPTIMIZERS = {"adamw": "adamw", "adam_pax": "adam", "sgd": "sgd", "muon": "muon"}


def maxtext_options_step(
    options: Mapping[str, Any], *, devices: int, slices: int = 1, model: ModelConfig | None = None
) -> StatedStep:
    """The train step of settings by key, on ``devices`` in ``slices``. Raises RooftopError as ``maxtext_step``."""
    table = maxtext_words()
    values, others = table.read(options)
    _require_priced_sizes({key: options[key] for key in others}, named=model is not None)
    if model is None:
        model = _model(table, values)
    mesh = _mesh(table, values, devices, slices)
    accumulation = _whole(table, values, "accumulation")
    sequences = _number(table, values, "batch") * devices * accumulation
    if sequences != round(sequences) or sequences < 1:
        raise RooftopError(table["batch"].key, values["batch"], f"sequences of {devices} devices that are whole")
    stages = mesh.get("stage", 1)
    fields: dict[str, object] = {
        "mesh": {name: size for name, size in mesh.items() if size > 1 or name in ("data", "fsdp")},
        "batch_seqs": round(sequences),
        "seq": _whole(table, values, "seq"),
        "microbatches": accumulation,
        "remat": _policy(table, values),
        "weights_dtype": _dtype(table, values, "weights_dtype"),
        # Those without a dtype have that of weights (base.yml).
        "moments_dtype": _dtype(table, values, "moments_dtype" if values["moments_dtype"] else "weights_dtype"),
        "optimizer": _optimizer(table, values),
        "matmul_dtype": _matmul_dtype(table, values),
        "framework_settings": _settings(values, model),
    }
    if stages > 1:
        fields |= _pipeline(table, values, model, stages)
    notes = ("context_parallel_strategy all_gather is priced as a ring",) if mesh.get("context", 1) > 1 else ()
    return StatedStep(fields=fields, model=model, unpriced=table.without_words(others), notes=notes)


def _number(table: WordTable, values: Mapping[str, Any], word: str) -> float:
    value = values[word]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MOST:
        raise RooftopError(table[word].key, str(value), "a number above 0")
    return float(value)


def _optimizer(table: WordTable, values: Mapping[str, Any]) -> str:
    word = str(values["optimizer"])
    if word not in _OPTIMIZERS:
        raise RooftopError(table["optimizer"].key, word, f"one with a price: {', '.join(_OPTIMIZERS)}")
    return _OPTIMIZERS[word]


def _require_priced_sizes(others: Mapping[str, Any], *, named: bool) -> None:
    """Raise RooftopError for an axis without a price, and for a scale of the model's sizes, unless it is ``named``."""
    for key, value in others.items():
        if re.fullmatch(r"(ici|dcn)_\w+_parallelism", key) and value != 1:
            raise RooftopError(key, value, f"1: axes with a price are {', '.join(_AXES[:-1])}, pipeline")
        if key == "global_parameter_scale" and value != 1 and not named:
            raise RooftopError(key, value, "1, with base_* in place of a scale: or say the MODEL")


def _options(text: str) -> dict[str, Any]:
    """Settings by key, from YAML or from a command; those of a command are read as YAML does."""
    if not re.search(r"^\s*[\w.]+\s*:(\s|$)", text, re.MULTILINE):
        pairs = [word.split("=", 1) for word in script_arguments(text, *_PROGRAMS) if re.match(r"[a-z]\w*=", word)]
        text = "\n".join(f"{key}: {value}" for key, value in pairs)
    try:
        options = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise RooftopError("from", "invalid YAML", f"MaxText's YAML or key=value ({error})") from None
    if not isinstance(options, dict) or not options:
        raise RooftopError("from", "no settings", "MaxText's YAML, or a command with key=value")
    return {str(key): value for key, value in options.items()}


def _whole(table: WordTable, values: Mapping[str, Any], name: str) -> int:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RooftopError(table[name].key, value, "a whole number, 1 or more")
    return value


def _model(table: WordTable, values: Mapping[str, Any]) -> ModelConfig:
    named = values["model"]
    if named != table["model"].default:
        ours = {theirs: name for name, theirs in table.data["models"].items()}
        if named not in ours:
            raise unknown(table["model"].key, str(named), ours)
        return load_model(ours[named])
    if values["decoder"] != table["decoder"].default:
        raise RooftopError(table["decoder"].key, values["decoder"], "llama2, or a model_name: or say the MODEL")
    return ModelConfig(
        name="the model of the configuration",
        family="llama",
        layers=_whole(table, values, "layers"),
        d_model=_whole(table, values, "hidden"),
        d_ff=_whole(table, values, "ffn"),
        heads=_whole(table, values, "heads"),
        kv_heads=_whole(table, values, "kv_heads"),
        vocab=_whole(table, values, "vocab"),
        d_head=_whole(table, values, "d_head"),
        max_seq_len=_whole(table, values, "seq"),
        tied_embeddings=bool(values["tied"]),
        rope_theta=float(values["rope_theta"]),
        norm_eps=float(values["norm_epsilon"]),
    )


def _mesh(table: WordTable, values: Mapping[str, Any], devices: int, slices: int) -> dict[str, int]:
    """Sizes of all axes: one of those within slices may be -1, and one across them."""
    sizes = dict[str, dict[str, int]]()
    for place, count in (("ici", devices // slices), ("dcn", slices)):
        stated = {axis: values[f"{place}_{axis}"] for axis in _AXES}
        open_axes = [axis for axis, size in stated.items() if size == -1]
        rest = 1
        for axis, size in stated.items():
            if size != -1:
                rest *= _whole(table, values, f"{place}_{axis}")
        if len(open_axes) > 1 or count % rest or (not open_axes and rest != count):
            product = " x ".join(f"{axis} {size}" for axis, size in stated.items() if size != 1) or "1"
            raise RooftopError(
                table[f"{place}_fsdp"].key, product, f"{place}_* that multiply to {count}, one of them -1"
            )
        sizes[place] = {axis: count // rest if size == -1 else size for axis, size in stated.items()}
    return {axis: sizes["ici"][axis] * sizes["dcn"][axis] for axis in _AXES}


def _policy(table: WordTable, values: Mapping[str, Any]) -> str:
    named = values["remat"]
    if named != "custom":
        if named not in table.data["remat"]:
            raise unknown(table["remat"].key, str(named), (*table.data["remat"], "custom"))
        policy: str = table.data["remat"][named]
        return policy
    actions = {theirs: action for action, theirs in _ACTIONS.items()}
    changes = []
    for checkpoint in CHECKPOINTS:
        for word in table.data["checkpoints"].get(checkpoint, ()):
            said = values[word]
            if said not in actions:
                raise unknown(table[word].key, str(said), actions)
            if actions[said] != ("save" if checkpoint == "layer_input" else "recompute"):
                changes.append(f"{checkpoint}={actions[said]}")
    return ",".join(("block", *dict.fromkeys(changes)))


def _dtype(table: WordTable, values: Mapping[str, Any], name: str) -> str:
    names = {theirs: ours for ours, theirs in _DTYPES.items()}
    if values[name] not in names:
        raise unknown(table[name].key, str(values[name]), names)
    return names[values[name]]


def _matmul_dtype(table: WordTable, values: Mapping[str, Any]) -> str | None:
    said = values["quantization"]
    if not said:
        return None
    names: dict[str, str] = {
        theirs: ours for kinds in table.data["quantization"].values() for ours, theirs in kinds.items()
    }
    if said not in names:
        raise unknown(table["quantization"].key, str(said), names)
    return names[said]


def _settings(values: Mapping[str, Any], model: ModelConfig) -> dict[str, str]:
    if values["hardware"] != "tpu":
        return {}
    settings = {"fused_backward": "yes" if values["fused_backward"] else "no"}
    blocks = {values[name] for name in values if name.startswith("block_")}
    settings["attention_kernels"] = "jax-2048" if blocks == {2048} and not values["tokamax"] else "default"
    if model.moe is not None and not values["sorted_experts"]:
        settings["experts"] = "slots"
        if values["capacity"] > 0:
            settings["capacity"] = f"{values['capacity']:g}"
    return settings


def _pipeline(table: WordTable, values: Mapping[str, Any], model: ModelConfig, stages: int) -> dict[str, object]:
    per_stage = _whole(table, values, "stage_layers")
    repeats = model.layers // (stages * per_stage) if values["repeats"] == -1 else _whole(table, values, "repeats")
    if stages * per_stage * repeats != model.layers:
        raise RooftopError(
            table["repeats"].key, f"{stages} x {per_stage} x {repeats}",
            f"stages x layers of a stage x repeats that multiply to {model.layers} layers",
        )  # fmt: skip
    microbatches = stages if values["pipeline_microbatches"] == -1 else _whole(table, values, "pipeline_microbatches")
    if microbatches % stages:
        raise RooftopError(table["pipeline_microbatches"].key, microbatches, f"a multiple of {stages} stages")
    schedule = "interleaved" if repeats > 1 else "gpipe"
    return {"microbatches": microbatches, "schedule": schedule, "chunks": repeats}
