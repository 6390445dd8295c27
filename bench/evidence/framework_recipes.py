"""Published recipes of the frameworks as tables, from checkouts of them.

    python bench/evidence/framework_recipes.py megatron BRIDGE --core MEGATRON_LM  # recipes/megatron.csv; a minute
    python bench/evidence/framework_recipes.py maxtext CHECKOUT                    # recipes/maxtext.csv
    python bench/evidence/framework_recipes.py torchtitan CHECKOUT_OF_0.2.2        # recipes/torchtitan.csv

The tables stand in rooftop/frameworks/data/recipes: a first line of provenance, then a row per recipe. Functions of
Megatron-Bridge are run, with torch (CPU), Megatron Core from its own checkout, and a model of Megatron Core's defaults
in place of one downloaded from Hugging Face: what a column says is set by the recipe, or is that default. MaxText's are
dictionaries of its benchmark modules and the command lines of its scripts, without XLA's flags; torchtitan's are TOML
files. An empty cell of MaxText or torchtitan is the release's default (tests/frameworks/data). Left out: diffusion
models, debug models, inference scripts, and tuning keys that name files, logs, profiles, checkpoints or data.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import importlib
import inspect
import io
import json
import re
import shlex
import sys
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from checkouts import REPOSITORIES, ROOT, commit_of, import_torch, plain, stand_in

TABLES = ROOT / "rooftop" / "frameworks" / "data" / "recipes"
PRESETS = ROOT / "rooftop" / "models" / "presets"
#: MaxText's names of models that rooftop has under others.
MAXTEXT_MODELS = {
    "deepseek2-16b": "deepseek-v2-lite",
    "deepseek2-236b": "deepseek-v2",
    "deepseek3-671b": "deepseek-v3",
    "deepseek3.2-671b": "deepseek-v3.2",
    "kimi-k2-1t": "kimi-k2",
    "llama3-405b": "llama3.1-405b",
    "llama4-17b-16e": "llama4-scout",
    "llama4-17b-128e": "llama4-maverick",
    "qwen3-480b-a35b": "qwen3-coder-480b-a35b",
}
#: Names of checkpoints that are those of a preset.
SAME_SIZES = {
    "moonshotai/kimi-k2-instruct": "kimi-k2",
    "meta-llama/meta-llama-3.1-405b": "llama3.1-405b",
    "meta-llama/llama-4-scout-17b-16e": "llama4-scout",
    "meta-llama/llama-4-maverick-17b-128e": "llama4-maverick",
    "deepseek-ai/deepseek-v3.1-base": "deepseek-v3",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "qwen/qwen3-next-80b-a3b-instruct": "qwen3-next-80b-a3b",
}
#: Tuning keys of MaxText that do not change the step.
BYSTANDERS = re.compile(
    r"dataset|checkpoint|profil|metrics|gcs|goodput|tokenizer|_path$|base_output|run_name|steps$|log|vocab_file|"
    r"hf_|tensorboard|monitor|grain|tfds|eval|upload|cloud|pathways|data_shuffle|enable_single_controller|skip_first"
)
Row = dict[str, Any]


def presets() -> dict[str, str]:
    """Preset by the lower-case name of its checkpoint."""
    named = {
        str(json.loads(path.read_text(encoding="utf-8")).get("_name_or_path", "")).lower(): path.stem
        for path in sorted(PRESETS.glob("*.json"))
    }
    return named | SAME_SIZES


def words(pairs: Iterable[tuple[str, Any]]) -> str:
    """Settings as NAME=VALUE, in order, spaces between."""
    return " ".join(f"{name}={cell(value)}" for name, value in pairs)


def cell(value: object) -> str:
    """A value as a cell."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return "+".join(cell(plain(item)) for item in value)
    if isinstance(value, float) and value == int(value):
        return str(int(value))
    return str(plain(value)).removeprefix("torch.")


def write(name: str, head: str, rows: Sequence[Row]) -> None:
    """A table with its provenance above."""
    TABLES.mkdir(exist_ok=True)
    columns = list(dict.fromkeys(column for row in rows for column in row))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([{column: cell(value) for column, value in row.items()} for row in rows])
    (TABLES / f"{name}.csv").write_text(f"# {head}\n{out.getvalue()}", encoding="utf-8")
    print(f"{name}: {len(rows)} recipes, {sum(bool(row['model']) for row in rows)} of presets")


# Megatron-Bridge


class Defaults:
    """A model's settings before a recipe: Megatron Core's defaults and the name of its checkpoint."""

    fields: ClassVar[Row] = {}

    def __init__(self, checkpoint: str = "", **sizes: Any) -> None:
        self.__dict__.update(self.fields)
        unset = ("seq_length", "cross_entropy_fusion_impl", "pipeline_model_parallel_layout", "cuda_graph_scope")
        self.__dict__.update(dict.fromkeys(unset), checkpoint=checkpoint, should_pad_vocab=False, transformer=self)
        # A vocabulary is asked for by name in recipes of vision models; no column has it.
        self.__dict__.update(vocab_size=1, make_vocab_size_divisible_by=128, apply_rope_fusion=False)
        # Every bridge of a model with experts sets it.
        self.__dict__.update(moe_token_dispatcher_type="alltoall")
        # Only whether there are experts is asked for: dispatchers of tokens are set where there are.
        self.__dict__.update({"num_moe_experts": None if "llama" in checkpoint.lower() else 1} | sizes)

    def finalize(self) -> None:
        """Nothing to check."""


class ModelNames:
    """AutoBridge without Hugging Face: the names of checkpoints, and defaults."""

    def __init__(self, checkpoint: str) -> None:
        self.checkpoint = checkpoint

    @classmethod
    def from_hf_pretrained(cls, name: str, *_: Any, **__: Any) -> ModelNames:
        """A model by name."""
        return cls(name)

    @classmethod
    def from_hf_config(cls, *_: Any, **__: Any) -> ModelNames:
        """A model by its configuration."""
        return cls("")

    def get_model_config(self, *_: Any, **__: Any) -> Defaults:
        """Its settings."""
        return Defaults(self.checkpoint)

    to_megatron_provider = get_model_config


def bridge_functions(bridge: Path, core: Path) -> Iterator[tuple[str, str, str, Any]]:
    """(name, family, chip, function) of each pre-training recipe of Megatron-Bridge."""
    root = bridge / "src" / "megatron" / "bridge"
    sys.path[:0] = [str(core), str(bridge / "src")]
    import_torch()
    package = "megatron.bridge"
    bare = {f"{package}{dots}": root.joinpath(*dots.split(".")) for dots in ("", ".recipes", ".perf_recipes", ".data")}
    absent = ["triton", *(f"{package}.{part}" for part in ("models", "peft", "diffusion"))]
    absent += [f"{package}.data.{part}" for part in ("builders", "sources", "datasets", "energon", "utils")]
    finder = stand_in(absent, bare)
    settings = importlib.import_module("megatron.core.transformer.transformer_config").MLATransformerConfig
    importlib.import_module("megatron.training.arguments")
    # Megatron Core works without these, and its recipes do not.
    finder.names += ["transformer_engine", "nvidia_resiliency_ext", "modelopt"]
    for field in dataclasses.fields(settings):
        factory = field.default_factory
        value = factory() if factory is not dataclasses.MISSING else field.default
        Defaults.fields[field.name] = None if value is dataclasses.MISSING else value
    importlib.import_module(package).AutoBridge = ModelNames
    importlib.import_module(f"{package}.models.hybrid.hybrid_provider").HybridModelProvider = Defaults
    for path in sorted(root.glob("perf_recipes/*/*/*.py")):
        family, chip, stem = path.parts[-3], path.parts[-2], path.stem
        if stem == "__init__" or family == "wan":
            continue
        module = importlib.import_module(f"{package}.perf_recipes.{family}.{chip}.{stem}")
        for name, function in inspect.getmembers(module, inspect.isfunction):
            if function.__module__ == module.__name__ and "_pretrain_" in name and not name.startswith("_"):
                yield name, family, chip, function


def layout_words(layout: object) -> str:
    """A layout of pipeline stages as Megatron's string: E t m L by stage, repeats as (...)*N."""
    if layout is None or isinstance(layout, str):
        return layout or ""
    letters = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L"}
    stages = ["".join(letters[str(plain(part))] for part in stage) for stage in stages_of(layout)]
    runs = [(stage, len(list(run))) for stage, run in groupby(stages)]
    text = "".join(f"({stage}|)*{times}" if times > 1 else f"{stage}|" for stage, times in runs)
    return text.removesuffix("|")


def stages_of(layout: object) -> list[list[str]]:
    """A layout as lists of stages."""
    stages = getattr(layout, "layout", layout)
    assert isinstance(stages, list)
    return stages


def bridge_dtype(precision: Any) -> tuple[str, str]:
    """(rooftop's dtype of matmuls, the recipe of scaling)."""
    if precision.fp4:
        return "f4", cell(precision.fp4_recipe)
    if precision.fp8:
        return "f8_e4m3", cell(precision.fp8_recipe)
    return "bf16", ""


def set_or(value: Any, default: Any) -> bool:
    """A setting, or its default where it is None."""
    return bool(default if value is None else value)


def bridge_row(name: str, family: str, chip: str, config: Any, known: dict[str, str]) -> Row:
    """A recipe's row."""
    model, overlap, ddp, optimizer = config.model, config.comm_overlap, config.ddp, config.optimizer
    precision = config.mixed_precision
    checkpoint = getattr(model, "checkpoint", "")
    gpus = re.search(r"_(\d+)gpu_", name)
    dtype, scaling = bridge_dtype(precision)
    wide = model.recompute_granularity
    graphs = cell(model.cuda_graph_impl)
    graph_parts = model.cuda_graph_scope or getattr(model, "cuda_graph_modules", None)
    offloads = bool(getattr(model, "fine_grained_activation_offloading", False))
    fsdp = bool(ddp.use_megatron_fsdp)
    flex = model.moe_token_dispatcher_type == "flex"
    return {
        "name": name,
        "model": known.get(checkpoint.lower(), "") if checkpoint else "",
        "family": family,
        "checkpoint": checkpoint,
        "chip": chip,
        "gpus": int(gpus[1]) if gpus else None,
        "dtype": dtype,
        "scaling": scaling,
        "seq": config.dataset.seq_length if isinstance(config.dataset.seq_length, int) else model.seq_length,
        "batch": config.train.global_batch_size,
        "microbatch": config.train.micro_batch_size,
        "tp": model.tensor_model_parallel_size,
        "pp": model.pipeline_model_parallel_size,
        "vpp": model.virtual_pipeline_model_parallel_size or 1,
        "cp": model.context_parallel_size,
        "ep": model.expert_model_parallel_size,
        "etp": model.expert_tensor_parallel_size or model.tensor_model_parallel_size,
        "sequence_parallel": bool(model.sequence_parallel),
        "layout": layout_words(model.pipeline_model_parallel_layout),
        "first_stage_layers": model.num_layers_in_first_pipeline_stage,
        "last_stage_layers": model.num_layers_in_last_pipeline_stage,
        "embedding_is_a_layer": bool(model.account_for_embedding_in_pipeline_split),
        "loss_is_a_layer": bool(model.account_for_loss_in_pipeline_split),
        "recompute": wide or "none",
        "recompute_method": model.recompute_method if wide == "full" else None,
        "recompute_layers": model.recompute_num_layers if wide == "full" else None,
        "recompute_modules": (model.recompute_modules or ["core_attn"]) if wide == "selective" else None,
        "offload_modules": model.offload_modules if offloads else None,
        "offload_layers": model.cpu_offloading_num_layers if model.cpu_offloading else None,
        "cuda_graphs": graphs if graphs not in ("", "none") else "none",
        "graph_modules": graph_parts if graphs not in ("", "none") else None,
        "dispatcher": model.moe_token_dispatcher_type if model.num_moe_experts else None,
        "dispatcher_backend": model.moe_flex_dispatcher_backend if flex else None,
        "balanced_routing": bool(model.moe_router_force_load_balancing),
        "rank_capacity_factor": getattr(model, "moe_expert_rank_capacity_factor", None),
        "ep_overlap": bool(overlap and overlap.overlap_moe_expert_parallel_comm),
        "delays_weight_gradients": bool(overlap and overlap.delay_wgrad_compute),
        "shared_expert_overlap": bool(model.moe_shared_expert_overlap),
        # As CommOverlapConfig does: nothing to overlap without a tensor group and sequence parallelism.
        "tp_overlap": bool(overlap and overlap.tp_comm_overlap and model.sequence_parallel),
        "grad_overlap": set_or(overlap and overlap.overlap_grad_reduce, ddp.overlap_grad_reduce),
        "param_overlap": set_or(overlap and overlap.overlap_param_gather, ddp.overlap_param_gather),
        "fsdp": (cell(ddp.data_parallel_sharding_strategy)) if fsdp else None,
        "grads_f32": bool(precision.grad_reduce_in_fp32),
        "precision_aware": bool(optimizer.use_precision_aware_optimizer),
        "main_grads": optimizer.main_grads_dtype,
        "moments": optimizer.exp_avg_dtype,
        "optimizer": optimizer.optimizer,
        "narrow_gather": bool(precision.fp8_param_gather or precision.fp4_param_gather),
        "first_last_bf16": bool(precision.first_last_layers_bf16),
        "mtp": getattr(model, "mtp_num_layers", None) or 0,
        "cross_entropy": model.cross_entropy_fusion_impl,
        "pads_vocabulary": bool(model.should_pad_vocab),
        "vocabulary_multiple": model.make_vocab_size_divisible_by,
    }


def megatron(bridge: Path, core: Path) -> None:
    """Write recipes/megatron.csv."""
    known = presets()
    rows = [
        bridge_row(name, family, chip, function(), known)
        for name, family, chip, function in bridge_functions(bridge, core)
    ]
    commit, date = commit_of(bridge)
    head = f"{REPOSITORIES['bridge']}@{commit[:12]} {date}, 0.7.0 (dev); Megatron-LM@{commit_of(core)[0][:12]}"
    write("megatron", head, sorted(rows, key=lambda row: str(row["name"])))


# MaxText


def maxtext_row(name: str, source: str, chip: str, settings: Row) -> Row:
    """A recipe's row; ``settings`` are its keys."""
    left = {key: value for key, value in settings.items() if not BYSTANDERS.search(key)}
    model_name = str(left.pop("model_name", "default"))
    left = {key: {"true": True, "false": False}.get(str(value).strip("'\""), value) for key, value in left.items()}
    places = {key: left.pop(key) for key in list(left) if left[key] in ("offload", "device", "remat")}
    axes = {
        kind: [
            (key.removeprefix(f"{kind}_").removesuffix("_parallelism"), left.pop(key))
            for key in list(left)
            if key.startswith(f"{kind}_") and key.endswith("_parallelism")
        ]
        for kind in ("ici", "dcn")
    }
    preset = MAXTEXT_MODELS.get(model_name, model_name)
    return {
        "name": name,
        "source": source,
        "model": preset if (PRESETS / f"{preset}.json").exists() else "",
        "model_name": model_name,
        "chip": chip,
        "slice": f"{chip}-{slices[2]}" if (slices := re.search(r"(v5e|v5p|v6e)[-_]?(\d+)$", name)) else None,
        "per_device_batch_size": left.pop("per_device_batch_size", None),
        "max_target_length": left.pop("max_target_length", None),
        "gradient_accumulation_steps": left.pop("gradient_accumulation_steps", None),
        "ici": words(axes["ici"]),
        "dcn": words(axes["dcn"]),
        "remat_policy": left.pop("remat_policy", None),
        "places": words(places.items()),
        "quantization": left.pop("quantization", None) or None,
        "attention": left.pop("attention", None),
        "other": words(left.items()),
    }


def script_settings(text: str) -> Row:
    """Settings of a script that starts MaxText; those from variables are left out unless it sets them."""
    variables = dict(re.findall(r'^\s*export (\w+)="?([^"\n$]*)"?\s*$', text, re.MULTILINE))
    joined = re.sub(r"\\\s*\n", " ", text)
    command = next((line for line in joined.splitlines() if line.strip().startswith("python3 -m maxtext")), "")
    settings: Row = {}
    for word in shlex.split(command)[3:]:
        key, equals, value = word.partition("=")
        value = re.sub(r"\$\{?(\w+)\}?", lambda match: variables.get(match[1], "$"), value)
        if equals and "$" not in value and "/" not in key:
            settings[key] = value
    return settings


def maxtext(checkout: Path) -> None:
    """Write recipes/maxtext.csv."""
    sys.path.insert(0, str(checkout))
    rows = []
    for stem, chip in (("trillium", "v6e"), ("v5e", "v5e"), ("v5p", "v5p")):
        module = importlib.import_module(f"benchmarks.maxtext_{stem}_model_configs")
        table = getattr(module, f"{stem}_model_dict")
        source = f"benchmarks/maxtext_{stem}_model_configs.py"
        for recipe in table.values():
            settings = {"model_name": recipe.model_type} | recipe.tuning_params
            rows.append(maxtext_row(recipe.model_name, source, chip, settings))
    folder = checkout / "src" / "maxtext" / "configs" / "tpu"
    for path in sorted(folder.rglob("*.sh")):
        settings = script_settings(path.read_text(encoding="utf-8"))
        if settings and "inference" not in path.parts:
            chip = path.relative_to(folder).parts[0]
            name = f"{chip}-{path.stem}".replace("_", "-")
            rows.append(maxtext_row(name, str(path.relative_to(checkout)), chip, settings))
    commit, date = commit_of(checkout)
    write("maxtext", f"{REPOSITORIES['maxtext']}@{commit[:12]} {date}", rows)


# torchtitan

#: Columns and the fields that they are.
TORCHTITAN = {
    "local_batch": "training.local_batch_size",
    "batch": "training.global_batch_size",
    "seq": "training.seq_len",
    "dtype": "training.dtype",
    "dp_replicate": "parallelism.data_parallel_replicate_degree",
    "dp_shard": "parallelism.data_parallel_shard_degree",
    "tp": "parallelism.tensor_parallel_degree",
    "cp": "parallelism.context_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "etp": "parallelism.expert_tensor_parallel_degree",
    "schedule": "parallelism.pipeline_parallel_schedule",
    "reshard": "parallelism.fsdp_reshard_after_forward",
    "async_tp": "parallelism.enable_async_tensor_parallel",
    "no_loss_parallel": "parallelism.disable_loss_parallel",
    "remat": "activation_checkpoint.mode",
    "remat_option": "activation_checkpoint.selective_ac_option",
    "compile": "compile.enable",
    "compile_parts": "compile.components",
    "converters": "model.converters",
    "float8_recipe": "quantize.linear.float8.recipe_name",
    "float8_gather": "quantize.linear.float8.enable_fsdp_float8_all_gather",
    "float8_not": "quantize.linear.float8.filter_fqns",
    "optimizer": "optimizer.name",
    "optimizer_kernel": "optimizer.implementation",
}


def torchtitan(checkout: Path) -> None:
    """Write recipes/torchtitan.csv."""
    known = {name.rpartition("/")[2]: preset for name, preset in presets().items()}
    rows = []
    for path in sorted(checkout.glob("torchtitan/models/*/train_configs/*.toml")):
        if "debug" in path.stem or "flux" in path.parts:
            continue
        job = tomllib.loads(path.read_text(encoding="utf-8"))
        assets = str(job["model"].get("hf_assets_path", "")).rpartition("/")[2]
        row = {
            "name": path.stem,
            "source": str(path.relative_to(checkout)),
            "model": known.get(assets.lower(), ""),
            "model_name": job["model"]["name"],
            "flavor": job["model"]["flavor"],
            "checkpoint": assets,
        }
        for column, field in TORCHTITAN.items():
            value: Any = job
            for part in field.split("."):
                value = value.get(part, {})
            row[column] = None if value == {} else value
        rows.append(row)
    commit, date = commit_of(checkout)
    write("torchtitan", f"{REPOSITORIES['torchtitan']}@{commit[:12]} {date}, v0.2.2", rows)


def main() -> None:
    """Write one table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("framework", choices=("megatron", "maxtext", "torchtitan"))
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--core", type=Path, help="checkout of Megatron-LM, for megatron")
    options = parser.parse_args()
    if options.framework == "megatron":
        megatron(options.checkout.resolve(), options.core.resolve())
    else:
        {"maxtext": maxtext, "torchtitan": torchtitan}[options.framework](options.checkout.resolve())


if __name__ == "__main__":
    main()
