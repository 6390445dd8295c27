"""The frameworks' estimates of memory and FLOPs next to plans of the same jobs: bench/results/oracles.csv.

    python bench/evidence/oracles.py megatron BRIDGE --core MEGATRON_LM   # Megatron-Bridge's estimator
    python bench/evidence/oracles.py torchtitan CHECKOUT                  # sharded meta models; a Python with torch
    python bench/evidence/oracles.py maxtext JOB ARGUMENTS TEMPORARIES    # figures that train_compile printed
    python bench/evidence/oracles.py plans                                # rooftop's figures

The first three write the column ``oracle`` of their framework, the last ``planned`` and ``error`` of all. A row is one
figure of one job; the other columns are what ``rooftop plan train`` is asked. Jobs of Megatron are recipes of
rooftop/frameworks/data/recipes/megatron.csv in 16 bits.

Why they differ. Megatron-Bridge's estimator is a formula too: float32 gradients whatever a recipe sets; layers of a
stage in the mean; attention of heads without latents (MLA); activations of a layer of (18 + 4 f/h) h bytes a token,
which is 12.5 h + 6 f with gated MLPs and fused attention, without tokens as experts get them (2 k h) and without what a
recipe recomputes. torchtitan counts FLOPs of windows of attention in full. MaxText's temporaries are XLA's statistics
(5 to 50 % over the heap), with all logits in float32 at once and float32 gradients, where plans have logits of a chunk
and gradients in 16 bits.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import io
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from checkouts import ROOT, commit_of, import_torch, stand_in

RESULTS = ROOT / "bench" / "results" / "oracles.csv"
RECIPES = ROOT / "rooftop" / "frameworks" / "data" / "recipes"
PRESETS = ROOT / "rooftop" / "models" / "presets"
KEYS = (
    "framework",
    "source",
    "job",
    "model",
    "on",
    "mesh",
    "batch",
    "seq",
    "microbatches",
    "chunks",
    "remat",
    "settings",
)
COLUMNS = (*KEYS, "figure", "oracle", "planned", "error")
Row = dict[str, Any]

#: Recipes in 16 bits whose models rooftop has, dense and with experts, with and without each axis.
MEGATRON = (
    "llama3_8b_pretrain_8gpu_h100_bf16_config",
    "llama3_8b_pretrain_64gpu_h100_bf16_config",
    "llama3_8b_pretrain_8gpu_gb200_bf16_config",
    "llama3_70b_pretrain_64gpu_h100_bf16_config",
    "llama31_405b_pretrain_1024gpu_h100_bf16_config",
    "llama31_405b_pretrain_512gpu_h100_bf16_config",
    "llama31_405b_pretrain_128gpu_gb200_bf16_config",
    "qwen3_30b_a3b_pretrain_16gpu_h100_bf16_config",
    "qwen3_30b_a3b_pretrain_64gpu_h100_bf16_config",
    "qwen3_30b_a3b_pretrain_8gpu_gb200_bf16_config",
    "qwen3_235b_a22b_pretrain_256gpu_h100_bf16_config",
    "qwen3_235b_a22b_pretrain_64gpu_gb200_bf16_config",
    "gpt_oss_120b_pretrain_64gpu_h100_bf16_config",
    "gpt_oss_120b_pretrain_64gpu_gb200_bf16_config",
    "deepseek_v3_pretrain_1024gpu_h100_bf16_config",
    "kimi_k2_pretrain_1024gpu_h100_bf16_config",
    "kimi_k2_pretrain_256gpu_gb200_bf16_config",
)
#: GPUs of a node, or of an NVLink domain.
NODES = {"h100": 8, "b200": 8, "b300": 8, "gb200": 64, "gb300": 64}


def read() -> list[Row]:
    """Rows of the results."""
    if not RESULTS.exists():
        return []
    with RESULTS.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def write(rows: list[Row]) -> None:
    """Rows in the order of frameworks and jobs."""
    out = io.StringIO()
    writer = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(sorted(rows, key=lambda row: (row["framework"], row["source"])))
    head = "# python bench/evidence/oracles.py; bytes of a device, parameters of a device, FLOPs of a token\n"
    RESULTS.write_text(head + out.getvalue(), encoding="utf-8")


def replaced(framework: str, rows: list[Row], job: str | None = None) -> None:
    """Write ``rows`` in place of those of the framework, or of its job."""
    write([row for row in read() if row["framework"] != framework or (job and row["job"] != job)] + rows)


def figures(job: Mapping[str, Any], values: Mapping[str, float]) -> list[Row]:
    """A row for each figure of a job."""
    return [{**job, "figure": name, "oracle": f"{value:.6g}"} for name, value in values.items()]


# Megatron


def bridge_estimator(bridge: Path, core: Path) -> Any:
    """The module of Megatron-Bridge's estimator."""
    root = bridge / "src" / "megatron"
    bare = {f"megatron{dots}": root.joinpath(*dots.split(".")) for dots in ("", ".bridge", ".bridge.training")}
    bare |= {f"megatron.bridge.{part}": root / "bridge" / part for part in ("utils",)}
    bare["megatron.bridge.training.utils"] = root / "bridge" / "training" / "utils"
    bare["megatron.training"] = core / "megatron" / "training"
    stand_in(("torch", "megatron.bridge.training.config", "megatron.core", "megatron.training.utils"), bare)
    return importlib.import_module("megatron.bridge.training.utils.theoretical_memory_utils")


def bridge_model(recipe: Mapping[str, str], silu: Any) -> SimpleNamespace:
    """Sizes of a model that the estimator reads: sizes of the preset's checkpoint, axes of the recipe."""
    sizes = json.loads((PRESETS / f"{recipe['model']}.json").read_text(encoding="utf-8"))
    heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
    experts = sizes.get("n_routed_experts") or sizes.get("num_experts") or sizes.get("num_local_experts")
    wide = sizes.get("moe_intermediate_size") or sizes["intermediate_size"]
    first = sizes.get("first_k_dense_replace", 0)
    number = {name: int(recipe[name]) for name in ("tp", "pp", "vpp", "cp", "ep", "etp", "seq", "mtp")}
    return SimpleNamespace(
        num_layers=layers,
        hidden_size=sizes["hidden_size"],
        ffn_hidden_size=sizes["intermediate_size"],
        num_attention_heads=heads,
        num_query_groups=sizes.get("num_key_value_heads", heads),
        kv_channels=sizes.get("head_dim") or sizes.get("v_head_dim") or sizes["hidden_size"] // heads,
        vocab_size=sizes["vocab_size"],
        should_pad_vocab=recipe["pads_vocabulary"] == "yes",
        make_vocab_size_divisible_by=int(recipe["vocabulary_multiple"]),
        share_embeddings_and_output_weights=sizes.get("tie_word_embeddings", False),
        gated_linear_unit=True,
        activation_func=silu,
        seq_length=number["seq"],
        num_moe_experts=experts,
        moe_layer_freq=[0] * first + [1] * (layers - first) if experts else 1,
        moe_ffn_hidden_size=wide if experts else None,
        moe_router_topk=sizes.get("num_experts_per_tok", 1),
        moe_shared_expert_intermediate_size=wide * sizes.get("n_shared_experts", 0) or None,
        moe_latent_size=None,
        mtp_num_layers=None,  # rooftop's models have none
        tensor_model_parallel_size=number["tp"],
        pipeline_model_parallel_size=number["pp"],
        virtual_pipeline_model_parallel_size=number["vpp"] if number["vpp"] > 1 else None,
        context_parallel_size=number["cp"],
        expert_model_parallel_size=number["ep"],
        expert_tensor_parallel_size=number["etp"],
        sequence_parallel=number["tp"] > 1,
        recompute_granularity="selective",
    )


def recipe_job(recipe: Mapping[str, str], source: str) -> Row:
    """The plan that rooftop is asked for, for a recipe."""
    number = {name: int(recipe[name]) for name in ("gpus", "tp", "pp", "vpp", "cp", "ep", "etp", "batch", "microbatch")}
    copies = number["gpus"] // (number["tp"] * number["pp"] * number["cp"])
    # Whole experts are dealt out over the tensor group first.
    experts = max(1, number["ep"] // (number["tp"] if number["etp"] == 1 else 1))
    axes = {
        "data": copies // experts,
        "expert": experts,
        "context": number["cp"],
        "stage": number["pp"],
        "tensor": number["tp"],
    }
    node = min(NODES[recipe["chip"]], number["gpus"])
    shape = f"{node}" if node == number["gpus"] else f"{node}x{number['gpus'] // node}"
    changes = {
        "mla_up_proj": ("qkv", "rope"),
        "mlp": (),
        "moe_act": ("mlp_act",),
        "layernorm": ("attn_normed", "mlp_normed"),
    }
    repeats = [name for part in recipe["recompute_modules"].split("+") for name in changes.get(part, ())]
    return {
        "framework": "megatron",
        "source": source,
        "job": recipe["name"].removesuffix("_config"),
        "model": recipe["model"],
        "on": f"{recipe['chip']}:{shape}",
        "mesh": ",".join(f"{name}={size}" for name, size in axes.items() if size > 1),
        "batch": number["batch"],
        "seq": recipe["seq"],
        "microbatches": number["batch"] // (number["microbatch"] * copies),
        "chunks": number["vpp"],
        "remat": ",".join(["none", *(f"{name}=recompute" for name in repeats)]),
        # The estimator counts float32 gradients, whatever a recipe sets.
        "settings": "gradients=f32",
    }


def megatron(bridge: Path, core: Path) -> None:
    """Write Megatron-Bridge's estimates."""
    module = bridge_estimator(bridge, core)
    with (RECIPES / "megatron.csv").open(encoding="utf-8") as file:
        recipes = {row["name"]: row for row in csv.DictReader(line for line in file if not line.startswith("#"))}
    source = f"Megatron-Bridge@{commit_of(bridge)[0][:7]}"
    rows = list[Row]()
    for name in MEGATRON:
        recipe = recipes[name]
        model, job = bridge_model(recipe, module.F.silu), recipe_job(recipe, source)
        copies = int(recipe["gpus"]) // (int(recipe["tp"]) * int(recipe["pp"]) * int(recipe["cp"]))
        config = SimpleNamespace(
            model=model,
            train=SimpleNamespace(micro_batch_size=int(recipe["microbatch"]), global_batch_size=int(recipe["batch"])),
            optimizer=SimpleNamespace(use_distributed_optimizer=True),
            ddp=SimpleNamespace(use_distributed_optimizer=True),
            data_parallel_size=copies,
        )
        estimate = module.estimate_training_memory(config, num_microbatches=job["microbatches"])
        parts = estimate.model_state_components
        values = {"dense_parameters": parts[0].parameter_count_per_gpu}
        if len(parts) > 1:
            values["expert_parameters"] = parts[1].parameter_count_per_gpu
        values |= {"state": estimate.weight_and_optimizer_bytes, "activations": estimate.activation.memory_bytes}
        rows += figures(job, values)
    replaced("megatron", rows)


# torchtitan

#: LLaMA-3 405B of the registry is in 8 bits, which its code refuses without such a GPU.
#: (job, module, function of its registry, GPUs, changes, preset, chip and shape, mesh).
TORCHTITAN = (
    ("llama3_8b", "llama3", 8, {}, "llama3-8b", "h100:8", "fsdp=8"),
    ("llama3_70b", "llama3", 256, {}, "llama3-70b", "h100:8x32", "fsdp=32,tensor=8"),
    ("qwen3_0_6b", "qwen3", 8, {}, "qwen3-0.6b", "h100:8", "fsdp=8"),
    ("qwen3_32b", "qwen3", 64, {}, "qwen3-32b", "h100:8x8", "fsdp=64"),
    ("qwen3_30b_a3b", "qwen3", 16, {"expert_parallel_degree": 8}, "qwen3-30b-a3b", "h100:8x2", "expert=8,fsdp=2"),
    ("gpt_oss_20b", "gpt_oss", 8, {"expert_parallel_degree": 8}, "gpt-oss-20b", "h100:8", "expert=8"),
    (
        "deepseek_v3_671b",
        "deepseek_v3",
        512,
        {"expert_parallel_degree": 64},
        "deepseek-v3",
        "h100:8x64",
        "expert=64,fsdp=8",
    ),
)


def torchtitan(checkout: Path) -> None:
    """Write parameters, FLOPs of a token and the first rank's shard of models on the meta device."""
    import_torch()
    sys.path.insert(0, str(checkout))
    stand_in(("torchtitan.distributed.minimal_async_ep.kernels", "torchao"))
    source, rows = f"torchtitan@{commit_of(checkout)[0][:7]}", list[Row]()
    for name, module, world, changes, model, on, mesh in TORCHTITAN:
        try:
            values, tokens = meta_model(name, module, world, changes)
        except Exception as error:  # what a model of theirs refuses is said, and the next one is asked
            print(name, repr(error)[:300])
            continue
        job = {
            "framework": "torchtitan",
            "source": source,
            "job": f"{name}_{world}gpu",
            "model": model,
            "on": on,
            "mesh": mesh,
            "batch": world // 8 * 8,
            "seq": tokens,
            "microbatches": 1,
            "chunks": 1,
            "remat": "block",
        }
        rows += figures(job, values)
    replaced("torchtitan", rows)


def meta_model(name: str, module: str, world: int, changes: Mapping[str, int]) -> tuple[dict[str, float], int]:
    """Figures of a model that is built and sharded without memory, and tokens of its sequences."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        for place in ("tools.utils", "distributed.parallel_dims"):
            importlib.import_module(f"torchtitan.{place}").device_type = "cpu"
        config = getattr(importlib.import_module(f"torchtitan.models.{module}.config_registry"), name)()
        config.parallelism.spmd_backend = "partial_dtensor"
        config.parallelism.pipeline_parallel_degree = 1
        for field, value in changes.items():
            setattr(config.parallelism, field, value)
        utils = importlib.import_module("torchtitan.distributed.utils")
        dims = importlib.import_module("torchtitan.distributed.parallel_dims").ParallelDims
        dims = dims.from_config(config.parallelism, world)
        utils.set_spmd_backend("partial_dtensor")
        dims.build_mesh()
        model_config = config.model_spec.model
        model_config.update_from_config(config=config)
        set_dtype = importlib.import_module("torchtitan.tools.utils").set_default_dtype
        with torch.device("meta"), set_dtype(torch.float32):
            model = model_config.build()
        tokens = config.training.max_context_length
        parameters, flops = model_config.get_nparams_and_flops(model, tokens)
        sharded = config.model_spec.parallelize_fn(
            model,
            parallel_dims=dims,
            training=config.training,
            parallelism=config.parallelism,
            compile_config=config.compile,
            ac_config=config.activation_checkpoint,
            dump_folder="/nonexistent",
        )
        locals_ = [p.to_local() if hasattr(p, "to_local") else p for _, p in sharded.named_parameters()]
        local = sum(tensor.numel() for tensor in locals_)
    finally:
        dist.destroy_process_group()
    return {"parameters": parameters, "local_parameters": local, "flops_per_token": flops}, tokens


# MaxText

#: Jobs that train_compile was given (compile_topology, model_name and keys), and the same plans.
MAXTEXT: dict[str, Row] = {
    "llama2-7b-v5e-16": {
        "model": "llama2-7b",
        "on": "v5e:4x4",
        "mesh": "fsdp=16",
        "batch": 16,
        "seq": 2048,
        "remat": "block",
    },
    "llama2-7b-v5e-16-tensor-4": {
        "model": "llama2-7b",
        "on": "v5e:4x4",
        "mesh": "fsdp=4,tensor=4",
        "batch": 16,
        "seq": 2048,
        "remat": "block",
    },
    "llama3-8b-v5p-16-minimal": {
        "model": "llama3-8b",
        "on": "v5p:2x2x2",
        "mesh": "fsdp=8",
        "batch": 8,
        "seq": 4096,
        "remat": "minimal",
    },
    "qwen3-8b-v6e-16": {
        "model": "qwen3-8b",
        "on": "v6e:4x4",
        "mesh": "fsdp=16",
        "batch": 16,
        "seq": 4096,
        "remat": "block",
    },
    "qwen3-0.6b-v6e-16": {
        "model": "qwen3-0.6b",
        "on": "v6e:4x4",
        "mesh": "fsdp=16",
        "batch": 64,
        "seq": 4096,
        "remat": "block",
    },
}


def maxtext(name: str, arguments: str, temporaries: str) -> None:
    """Write what train_compile printed of a job: argument_size_in_bytes and temp_size_in_bytes."""
    job = {"framework": "maxtext", "source": "maxtext@e591f30", "job": name, "microbatches": 1, "chunks": 1}
    values = {"arguments": float(arguments), "temporaries": float(temporaries)}
    replaced("maxtext", figures(job | MAXTEXT[name], values), name)


# Plans


def planned_figures() -> None:
    """Write rooftop's figures and their errors."""
    from oracle_jobs import request_of

    from rooftop.core.errors import RooftopError
    from rooftop.validation.predict import planned

    rows, plans = read(), dict[str, dict[str, float] | str]()
    for row in rows:
        if row["job"] not in plans:
            try:
                plans[row["job"]] = plan_figures(planned(request_of(row)))
            except RooftopError as error:
                plans[row["job"]] = str(error)
                print(row["job"], error)
        values = plans[row["job"]]
        row["planned"] = row["error"] = ""
        if isinstance(values, dict):
            row["planned"] = f"{values[row['figure']]:.6g}"
            row["error"] = f"{values[row['figure']] / float(row['oracle']) - 1:.3f}"
    write(rows)
    summary(rows)


def plan_figures(plan: Any) -> dict[str, float]:
    """Figures of a plan under the oracles' names."""
    from rooftop.models import count_params, flops_per_token
    from rooftop.plan.pricing import scalar
    from rooftop.plan.training.memory import stored_weights

    memory, parts = plan.memory, {name: scalar(size) for name, size in plan.step.held_parameters.items()}
    weights = scalar(stored_weights(plan.step))
    # Of stages the first has the embedding and the last one the unembedding: Megatron's weights have two bytes.
    sixteen_bit = weights / 2
    # The estimator counts the logits among activations where there are no stages.
    logits = memory["workspace"] if plan.mesh.size("stage") == 1 else 0.0
    state = memory["weights"] + memory["gradients"] + memory["optimizer"]
    return {
        "dense_parameters": sixteen_bit - parts["experts"],
        "expert_parameters": parts["experts"],
        "state": state,
        "activations": memory["activations"] + logits,
        "local_parameters": weights / 4 if plan.step.habits.state == "reserved" else sum(parts.values()),
        "parameters": float(count_params(plan.problem.model).total),
        # torchtitan counts attention in full.
        "flops_per_token": float(
            flops_per_token(plan.problem.model, plan.problem.workload.seq_len, attention="full").total
        ),
        "arguments": weights + memory["optimizer"],
        "temporaries": memory["weights"] - weights + memory["gradients"] + memory["activations"] + memory["workspace"],
    }


def summary(rows: list[Row]) -> None:
    """Print the mean and the largest error by framework and figure."""
    for key in dict.fromkeys((row["framework"], row["figure"]) for row in rows):
        chosen = [row for row in rows if (row["framework"], row["figure"]) == key and row["error"]]
        if chosen:
            errors = [abs(float(row["error"])) for row in chosen]
            worst = max(chosen, key=lambda row: abs(float(row["error"])))
            mean = sum(errors) / len(errors)
            print(*key, len(errors), f"mean {mean:.1%}, largest {float(worst['error']):+.1%} ({worst['job']})")


def main() -> None:
    """Write one framework's figures, or the plans'."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("what", choices=("megatron", "torchtitan", "maxtext", "plans"))
    parser.add_argument("words", nargs="*")
    parser.add_argument("--core", type=Path)
    options = parser.parse_args()
    if options.what == "megatron":
        megatron(Path(options.words[0]).resolve(), options.core.resolve())
    elif options.what == "torchtitan":
        torchtitan(Path(options.words[0]).resolve())
    elif options.what == "maxtext":
        maxtext(*options.words)
    else:
        planned_figures()


if __name__ == "__main__":
    main()
