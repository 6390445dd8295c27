"""Megatron-Bridge's recipes in Megatron-LM's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.frameworks.answers import PricedRecipe
from rooftop.frameworks.recipes import recipe, recipes
from rooftop.frameworks.words.megatron import megatron_values, megatron_words, read_layout
from rooftop.frameworks.words.megatron_read import stated_values
from rooftop.frameworks.words.step import ConfiguredStep, StatedStep
from rooftop.models import ModelConfig, load_model

#: Words by columns of the table of recipes.
_COLUMNS = {
    "tp": "tensor", "pp": "stage", "vpp": "chunks", "cp": "context", "ep": "expert", "etp": "expert_tensor",
    "seq": "seq",
    "batch": "batch", "microbatch": "micro_batch", "layout": "layout", "first_stage_layers": "first_layers",
    "last_stage_layers": "last_layers", "recompute": "recompute", "recompute_method": "recompute_method",
    "recompute_layers": "recompute_layers", "cuda_graphs": "graphs", "dispatcher": "dispatcher",
    "dispatcher_backend": "flex_backend", "moments": "moments_dtype", "optimizer": "optimizer",
}  # fmt: skip
_FLAGS = {
    "sequence_parallel": "sequence_parallel", "embedding_is_a_layer": "counts_embedding",
    "loss_is_a_layer": "counts_loss", "ep_overlap": "ep_overlap", "delays_weight_gradients": "delays_gradients",
    "tp_overlap": "tp_overlap", "grad_overlap": "overlaps_gradients", "param_overlap": "overlaps_weights",
    "precision_aware": "precise_optimizer",
}  # fmt: skip
_LISTS = {"recompute_modules": "recompute_modules", "graph_modules": "graph_modules"}
_DTYPES = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16", "uint8": "fp8"}
#: Words that make two steps the same strategy, besides the parts of a pipeline.
_STRATEGY = (
    "tensor", "stage", "context", "expert", "micro_batch", "batch", "seq", "recompute", "recompute_modules",
)  # fmt: skip
_PUBLISHER = "Megatron-Bridge"
_CHECKS, _UNEVEN = "checks of the loss", "uneven loads of experts"


def recipe_values(row: Mapping[str, str]) -> dict[str, Any]:
    """Values of words that a recipe sets, the others at their defaults."""
    values, _ = megatron_words().read({})
    values |= {word: row[column] or values[word] for column, word in _COLUMNS.items()}
    values |= {word: row[column] == "yes" for column, word in _FLAGS.items()}
    values |= {word: tuple(row[column].split("+")) if row[column] else None for column, word in _LISTS.items()}
    values |= {"bf16": True, "distributed": True, "moments_dtype": _DTYPES.get(row["moments"], row["moments"])}
    if row["fsdp"]:
        values |= {"weights_sharded": True, "sharding": row["fsdp"], "checkpoint_format": "fsdp_dtensor"}
    if values["recompute"] == "none":
        values["recompute"] = None
    values["bf16_gradients"] = row["grads_f32"] != "yes"
    if row["layout"]:
        # The layout says the chunks.
        values["chunks"] = None
    elif values["chunks"] == "1":
        values["chunks"] = None
    if row["dtype"] == "f8_e4m3":
        values |= {"fp8": "hybrid", "fp8_recipe": row["scaling"]}
    if row["dtype"] == "f4":
        values |= {"fp4": "e2m1", "fp4_recipe": row["scaling"]}
    if row["dispatcher"] == "" and row["ep"]:
        values["dispatcher"] = "alltoall"
    return values


def recipe_step(name: str, *, devices: int, model: ModelConfig | None = None) -> StatedStep:
    """The train step of a recipe on ``devices``, with as many sequences for each as on its own number.

    Raises RooftopError for a recipe that is not known, and for one whose model or settings have no price.
    """
    row = recipe("megatron", name)
    if row["offload_modules"] or row["offload_layers"]:
        raise RooftopError("from", name, "a recipe without offload, which has no price")
    if model is None:
        if not row["model"]:
            raise RooftopError(
                "from", name, f"a recipe of a model with a preset, not {row['checkpoint'] or row['family']}"
            )
        model = load_model(row["model"])
    values = recipe_values(row)
    gpus, batch = int(row["gpus"]), int(row["batch"])
    if batch * devices % gpus:
        raise RooftopError("on", f"{devices} GPUs", f"a multiple of {gpus // batch or 1} GPUs for the recipe {name}")
    values["batch"] = str(batch * devices // gpus)
    return stated_values(values, devices=devices, model=model)


def recipe_of(step: ConfiguredStep) -> str | None:
    """The recipe that has the strategy of a step for its model, chips, batch and number format; None without one."""
    matmul = {"f4_e2m1": "f4"}.get(step.numerics.matmul, step.numerics.matmul)
    scaling = step.framework.settings.get("fp8_recipe", "") if matmul == "f8_e4m3" else ""
    ours = (step.model.name, step.slice.chip.name, str(step.slice.devices), matmul)
    said = megatron_values(step)
    for name, row in recipes("megatron").items():
        theirs = (row["model"], row["chip"], row["gpus"], row["dtype"])
        if theirs != ours or row["fsdp"] or (scaling and row["scaling"] != scaling):
            continue
        values = recipe_values(row)
        if all(_same(said.get(word), values[word]) for word in _STRATEGY) and _parts(said) == _parts(values):
            return name
    return None


def priced_recipe(step: ConfiguredStep) -> PricedRecipe | None:
    """The kind of recipe that the price of a step is of; None of releases before Megatron-Bridge's."""
    gradients = step.framework.settings.get("gradients")
    if gradients is None:
        return None
    experts = step.model.moe is not None
    if gradients == "bf16":
        habits = ("gradients reduced in bf16", f"no {_CHECKS}", *(("balanced routing forced",) if experts else ()))
        return PricedRecipe(kind="benchmark", habits=habits, publisher=_PUBLISHER, name=recipe_of(step))
    unpriced = (_CHECKS, *((_UNEVEN,) if experts else ()))
    return PricedRecipe(
        kind="training", habits=("gradients reduced in f32",), unpriced=unpriced, publisher=_PUBLISHER
    )  # fmt: skip


def _parts(values: Mapping[str, Any]) -> int:
    """Parts of a pipeline: stages x chunks, or those of a layout."""
    if values.get("layout"):
        return read_layout(values["layout"])[0]
    return int(values["stage"]) * int(values.get("chunks") or 1)


def _same(ours: object, theirs: object) -> bool:
    if isinstance(ours, tuple) and isinstance(theirs, tuple):
        return set(ours) == set(theirs)
    return str(ours or None) == str(theirs or None)
