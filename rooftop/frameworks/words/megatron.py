"""Megatron-LM's words: the arguments of ``pretrain_gpt.py``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, GATHER_AXES, SEQUENCE_AXES, STAGE_AXES
from rooftop.core.errors import RooftopError
from rooftop.core.rounding import ceil_div
from rooftop.frameworks.framework import family_of
from rooftop.frameworks.programs import megatron_lacks
from rooftop.frameworks.remat import recompute_modules, remat_words
from rooftop.frameworks.words.step import ConfiguredStep
from rooftop.frameworks.words.table import FrameworkConfiguration, FrameworkWord, WordTable, WordValue, word_table
from rooftop.models import ModelConfig
from rooftop.models.activations import POLICIES

#: The table of a layer's layout in pipeline stages: embedding, layer, loss.
_EMBEDDING, _LAYER, _LOSS = "E", "t", "L"
#: Settings of a framework for CUDA graphs of all of a step, and of a whole layer.
_GRAPHS_OF_ALL = "layer"
_FP8_FORMATS = {"tensorwise": "hybrid", "delayed": "hybrid", "mxfp8": "e4m3", "blockwise": "e4m3"}


def megatron_words() -> WordTable:
    """The words of Megatron-LM."""
    return word_table("megatron")


def megatron_values(step: ConfiguredStep) -> dict[str, WordValue]:
    """The value of each word for a train step. Raises RooftopError for a remat policy that Megatron does not have."""
    values: dict[str, WordValue] = {
        **model_values(step.model),
        "seq": step.seq_len,
        "positions": max(step.seq_len, min(step.model.max_seq_len, 2**20)),
        **_parallel_values(step),
        **_number_values(step),
        **_remat_values(step),
        **_overlap_values(step),
    }
    return values


def model_values(model: ModelConfig) -> dict[str, WordValue]:
    """The words of a model's sizes. Raises RooftopError for a model that they cannot say."""
    if (lacks := next(megatron_lacks(model), None)) is not None:
        raise RooftopError("model", model.name, f"a model without {lacks}, which Megatron-LM's arguments have not")
    values: dict[str, WordValue] = {
        "layers": model.layers,
        "hidden": model.d_model,
        "ffn": model.d_ff,
        "heads": model.heads,
        "position_kind": {"rope": "rope", "none": "none", "learned": "learned_absolute"}[model.positions],
        "swiglu": model.activation == "silu" and model.mlp_matrices == 3,
        "squared_relu": model.activation == "relu2",
        "norm": "RMSNorm" if model.norm == "rms" else "LayerNorm",
        "norm_epsilon": model.norm_eps,
        "norm_offset": model.norm_offset,
        "qk_norm": model.qk_norm is not None or model.mla is not None,
        "no_bias": not (model.attn_out_bias or model.mlp_bias),
        "qkv_bias": model.qkv_bias and not model.attn_out_bias,
        "untied": not model.tied_embeddings,
        "sinks": "learnable" if model.attention_sinks else "vanilla",
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "vocab": model.vocab,
    }
    if model.positions == "rope":
        values |= {
            "rotary_base": round(model.rope_theta),
            "rotary_share": 1.0 if model.mla else model.rotated / model.d_head,
            "rotary_interleaved": model.rope_interleaved and model.mla is None,
        }
    values |= _scaling_values(model)
    values |= _window_values(model)
    if model.mla is None:
        values |= {
            "kv_channels": model.d_head,
            "groups_queries": model.kv_heads != model.heads,
            "query_groups": model.kv_heads if model.kv_heads != model.heads else None,
        }
    else:
        values |= {
            "latent": True,
            "kv_channels": model.mla.d_v,
            "q_rank": model.mla.q_rank,
            "kv_rank": model.mla.kv_rank,
            "d_nope": model.mla.d_nope,
            "d_rope": model.mla.d_rope,
            "d_value": model.mla.d_v,
        }
    return values | _expert_values(model)


def _window_values(model: ModelConfig) -> dict[str, WordValue]:
    """Windows of layers: Transformer Engine counts the positions before a token's own."""
    windows = {window for window in model.windows if window is not None}
    if not windows:
        return {}
    if len(windows) > 1 or model.windows_chunked:
        raise RooftopError(
            "model", model.name, "a model with windows of one length, which Megatron-LM's arguments have"
        )
    some = None in model.windows
    kinds = [int(window is not None) for window in model.windows]
    return {
        "window": f"{windows.pop() - 1},0",
        "window_layers": f"[{','.join(map(str, kinds))}]" if some else None,
    }


def _scaling_values(model: ModelConfig) -> dict[str, WordValue]:
    scaling = model.rope_scaling
    if scaling is None:
        return {"rope_kind": "rope" if model.mla is not None else None}
    if scaling.kind == "llama3":
        return {"scales_rope": True, "rope_factor": scaling.factor}
    if scaling.kind == "yarn":
        return {"rope_kind": "yarn", "rotary_factor": scaling.factor}
    return {"rotary_factor": scaling.factor}


def _expert_values(model: ModelConfig) -> dict[str, WordValue]:
    moe = model.moe
    if moe is None:
        return {}
    kinds = [int(model.has_experts(layer)) for layer in range(model.layers)]
    runs = [(kind, len(list(run))) for kind, run in groupby(kinds)]
    return {
        "experts": moe.experts,
        "expert_layers": "1" if all(kinds) else "(" + "+".join(f"[{kind}]*{count}" for kind, count in runs) + ")",
        "expert_ffn": moe.d_ff,
        "shared_ffn": moe.shared_d_ff or None,
        "active": moe.active,
        "scoring": moe.scoring,
        "router_groups": moe.groups if moe.groups > 1 else None,
        "active_groups": moe.active_groups if moe.groups > 1 else None,
        "routed_scaling": moe.routed_scaling if moe.routed_scaling != 1 else None,
        "pre_softmax": moe.scoring == "softmax" and not moe.normalise,
        "correction_bias": moe.correction_bias,
        "router_dtype": "fp32",
        "balancing": ("aux_loss",),
        "grouped_matmul": True,
        "permute_fusion": True,
        "router_fusion": True,
    }


def _parallel_values(step: ConfiguredStep) -> dict[str, WordValue]:
    tensor, stages, choice = step.ways(*COLUMN_AXES), step.ways(*STAGE_AXES), step.choice
    expert = step.ways(*EXPERT_AXES)
    whole = step.model.moe is not None and choice.experts_over_tensor
    even = step.model.layers % (stages * choice.chunks) == 0
    sharded = step.ways(*GATHER_AXES) > 1
    return {
        "tensor": tensor,
        "sequence_parallel": tensor > 1,
        "stage": stages,
        "chunks": choice.chunks if choice.chunks > 1 and even else None,
        "layout": None if stages == 1 or even else stage_layout(step.model.layers, stages * choice.chunks),
        "context": step.ways(*SEQUENCE_AXES),
        "context_kind": ("p2p",) if step.ways(*SEQUENCE_AXES) > 1 else None,
        # Whole experts are dealt out over tensor too: its ranks belong to the expert grid.
        "expert": expert * (tensor if whole else 1),
        "expert_tensor": None if step.model.moe is None else 1 if whole else tensor,
        "micro_batch": step.micro_batch,
        "batch": step.batch_seqs,
        "weights_sharded": sharded,
        "sharding": "optim_grads_params" if sharded else None,
        "checkpoint_format": "fsdp_dtensor" if sharded else None,
    }


def stage_layout(layers: int, parts: int) -> str:
    """Layers in ``parts`` of a pipeline, embedding and loss counted as a layer each: 'Et|(tt|)*30L'.

    The first and last parts have a layer less where that evens them out.
    """
    most = ceil_div(layers + 2, parts)
    sizes = [most - 1, *[most] * (parts - 2), most - 1]
    spare = sum(sizes) - layers
    # The last parts but one are the shorter ones: no microbatch waits for them.
    for index in range(parts - 2, 0, -1):
        less = min(spare, 1)
        sizes[index] -= less
        spare -= less
    for index in (parts - 1, 0):
        less = min(spare, sizes[index])
        sizes[index] -= less
        spare -= less
    texts = [_EMBEDDING + _LAYER * sizes[0], *[_LAYER * size for size in sizes[1:-1]], _LAYER * sizes[-1] + _LOSS]
    runs = [(text, len(list(run))) for text, run in groupby(texts[:-1])]
    return "".join(f"{text}|" if count == 1 else f"({text}|)*{count}" for text, count in runs) + texts[-1]


def read_layout(layout: str) -> tuple[int, int]:
    """Parts and layers of a layout of pipeline stages. Raises RooftopError for one that cannot be read."""
    expanded = layout.replace(",", "").replace(" ", "")
    while (match := re.search(r"\(([^()]*)\)\*(\d+)", expanded)) is not None:
        expanded = expanded.replace(match[0], match[1] * int(match[2]))
    expanded = re.sub(r"([A-Za-z])\*(\d+)", lambda match: match[1] * int(match[2]), expanded)
    if not re.fullmatch(r"[EtmL|]+", expanded):
        raise RooftopError(megatron_words()["layout"].key, layout, "letters E, t, m, L, bars and *N: 'Et|(tt|)*30L'")
    return expanded.count("|") + 1, expanded.count(_LAYER)


def _number_values(step: ConfiguredStep) -> dict[str, WordValue]:
    numerics, settings = step.numerics, step.framework.settings
    recipe = settings.get("fp8_recipe")
    narrow = numerics.moments != "f32"
    return {
        "bf16": numerics.compute == "bf16",
        "fp16": numerics.compute == "f16",
        "fp8": _FP8_FORMATS[recipe or "tensorwise"] if numerics.matmul == "f8_e4m3" else None,
        "fp8_recipe": recipe if numerics.matmul == "f8_e4m3" else None,
        "fp4": "e2m1" if numerics.matmul == "f4_e2m1" else None,
        "optimizer": "dist_muon" if numerics.optimizer == "muon" else "adam",
        "distributed": True,
        "precise_optimizer": narrow,
        "moments_dtype": numerics.moments if narrow else None,
        "squares_dtype": numerics.moments if narrow else None,
        "bf16_gradients": numerics.gradients == "bf16",
        "overlaps_gradients": True,
        "overlaps_weights": True,
    }


def _remat_values(step: ConfiguredStep) -> dict[str, WordValue]:
    if step.choice.policy == POLICIES["block"]:
        return {"recompute": "full", "recompute_method": "uniform", "recompute_layers": 1}
    modules = recompute_modules("megatron", step.choice.remat, step.model)
    if modules is None:
        raise RooftopError("remat", step.choice.remat, remat_words("megatron"))
    return {"recompute": "selective", "recompute_modules": modules} if modules else {}


def _overlap_values(step: ConfiguredStep) -> dict[str, WordValue]:
    settings, tensor = step.framework.settings, step.ways(*COLUMN_AXES)
    graphs = settings.get("cuda_graphs", "none")
    dispatcher = settings.get("dispatcher")
    overlap = settings.get("ep_overlap") == "yes" and step.ways(*EXPERT_AXES) * tensor > 1
    return {
        "tp_overlap": settings.get("tp_overlap") == "yes" and tensor > 1,
        "ep_overlap": overlap,
        "delays_gradients": overlap,
        "dispatcher": None if dispatcher is None else "alltoall" if dispatcher == "alltoall" else "flex",
        "flex_backend": dispatcher if dispatcher not in (None, "alltoall") else None,
        "graphs": {"none": None, _GRAPHS_OF_ALL: "full_iteration"}.get(graphs, "transformer_engine"),
        "graph_modules": None if graphs in ("none", _GRAPHS_OF_ALL) else tuple(graphs.split("+")),
        "attention": "unfused" if settings.get("attention") == "unfused" else "auto",
        "loss_fusion": True,
        # Graphs of a whole step admit no check of the loss.
        "no_nan_check": graphs == _GRAPHS_OF_ALL,
        "manual_gc": True,
        "gc_interval": 100,
    }


#: Values of words that every job has to have and no plan knows.
_PLACEHOLDERS: Mapping[str, WordValue] = {
    "tokenizer": "NullTokenizer",
    "mock_data": True,
    "steps": 50,
    "learning_rate": 3e-4,
    "log_interval": 1,
    "log_throughput": True,
}


def megatron_configuration(step: ConfiguredStep) -> FrameworkConfiguration:
    """The script that runs a train step under Slurm. Raises RooftopError for a step that its words cannot say."""
    table, framework = megatron_words(), step.framework
    values = {**megatron_values(step), **_PLACEHOLDERS}
    nodes, devices = step.nodes
    family = family_of(step.slice.chip.name)
    environments = table.data["environment"]
    environment = dict(environments.get(family, environments["others"]))
    if values["weights_sharded"]:
        environment = {name: value for name, value in environment.items() if name not in environments["without_fsdp"]}
    exports = "\n".join(f"export {name}={value}" for name, value in environment.items())
    arguments = " \\\n  ".join(_arguments(table.written(values)))
    run = (
        f"torchrun --nnodes {nodes} --nproc-per-node {devices} --rdzv-backend c10d "
        f'--rdzv-endpoint "$HEAD:29500" pretrain_gpt.py'
    )
    release = "" if framework.release is None else f"; priced as Megatron-Bridge {framework.release}"
    script = (
        f"#!/bin/bash\n# {table.program}{release}.\n"
        f"# HEAD is the first node, as in: HEAD=$(scontrol show hostnames | head -n 1)\n"
        f"{exports}\nsrun --nodes {nodes} --ntasks-per-node 1 {run} \\\n  {arguments}\n"
    )
    notes = (
        "mock data, 50 steps and a learning rate stand for yours",
        *(() if values["no_nan_check"] else ("checks of the loss stay on",)),
        *(("routing is not forced to be balanced",) if step.model.moe is not None else ()),
    )
    return FrameworkConfiguration(
        program=table.program, files={"train.sh": script}, command="bash train.sh", notes=notes
    )


def _arguments(written: Iterator[tuple[FrameworkWord, Any]]) -> Iterator[str]:
    for word, value in written:
        if word.is_flag:
            yield word.key
        else:
            values = value if isinstance(value, tuple) else (value,)
            yield " ".join((word.key, *(shlex.quote(_text(entry)) for entry in values)))


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
