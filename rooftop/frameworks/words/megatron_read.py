"""Train steps as Megatron-LM's arguments state them."""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.frameworks.remat import recomputed
from rooftop.frameworks.words.megatron import megatron_words, model_values, read_layout
from rooftop.frameworks.words.shell import script_arguments
from rooftop.frameworks.words.step import StatedStep
from rooftop.frameworks.words.table import option_values
from rooftop.models import MLA, ModelConfig, MoE, RopeScaling, load_model, presets
from rooftop.models.counting import count_params

#: Optimizers with a price, by their names.
_OPTIMIZERS = {"adam": "adamw", "muon": "muon", "dist_muon": "muon"}
_PROGRAMS = ("pretrain_gpt.py", "pretrain_mamba.py", "pretrain.py")


def megatron_step(text: str, *, devices: int, model: ModelConfig | None = None) -> StatedStep:
    """The train step of a script or of arguments alone, on ``devices``.

    ``model``: in place of the one that the arguments state. Raises RooftopError for an option or a value that
    Megatron-LM does not have or refuses, and for one whose price is not known.
    """
    values, others = megatron_words().read(_options(text))
    return stated_values(values, devices=devices, model=model, others=others)


def stated_values(
    values: Mapping[str, Any], *, devices: int, model: ModelConfig | None = None, others: tuple[str, ...] = ()
) -> StatedStep:
    """The train step that values of words state, next to the keys of ``others``. Raises RooftopError."""
    numbers = _Numbers(values)
    if model is None:
        model = _model(numbers)
    tensor, stages, context = (numbers.whole(name) for name in ("tensor", "stage", "context"))
    expert = numbers.whole("expert")
    grid = tensor * stages * context
    if devices % grid:
        raise RooftopError(_key("tensor"), grid, f"sizes of tensor x stage x context that divide {devices} GPUs")
    copies = devices // grid
    axes, whole = _expert_axes(numbers, model, copies, tensor, expert)
    batch, micro = numbers.whole("batch", or_else=copies), numbers.whole("micro_batch")
    if batch % (micro * copies):
        accepted = f"a multiple of {_key('micro_batch')} {micro} x {copies} data-parallel copies"
        raise RooftopError(_key("batch"), batch, accepted)
    fields: dict[str, object] = {
        "mesh": {name: size for name, size in {**axes, "context": context, "tensor": tensor, "stage": stages}.items()},
        "batch_seqs": batch,
        "seq": numbers.whole("seq"),
        "microbatches": batch // (micro * copies),
        **_schedule(numbers, model, stages),
        "remat": _remat(numbers, model),
        **_formats(numbers),
        "framework_settings": _settings(numbers, model, whole=whole),
    }
    if numbers.values["weights_sharded"]:
        if (kind := numbers.values["sharding"]) != "optim_grads_params":
            raise RooftopError(_key("sharding"), kind, "optim_grads_params: others have no price")
        if (stored := numbers.values["checkpoint_format"]) != "fsdp_dtensor":
            raise RooftopError(_key("checkpoint_format"), stored, f"fsdp_dtensor with {_key('weights_sharded')}")
        mesh = fields["mesh"]
        assert isinstance(mesh, dict)
        mesh["fsdp"] = mesh.pop("data")
    unpriced = megatron_words().without_words(others)
    return StatedStep(fields=fields, model=model, unpriced=unpriced, notes=tuple(_defaults(numbers, tensor)))


def _options(text: str) -> dict[str, Any]:
    """Options by name, from a script that starts ``pretrain_gpt.py``, or from its arguments alone."""
    options, counts = dict[str, Any](), option_values("megatron")
    arguments, index = script_arguments(text, *_PROGRAMS), 0
    while index < len(arguments):
        name, equals, value = arguments[index].partition("=")
        index += 1
        if not name.startswith("--"):
            # What the shell puts in, such as "$@", or a redirection.
            continue
        if name not in counts:
            close = difflib.get_close_matches(name, counts, n=2, cutoff=0.7)
            hint = f"; did you mean {' or '.join(close)}?" if close else ""
            raise RooftopError("from", name, f"options of {megatron_words().version}{hint}")
        values = [value] if equals else []
        while not equals and index < len(arguments) and not arguments[index].startswith("--"):
            if counts[name] is not None and len(values) == counts[name]:
                break
            values.append(arguments[index])
            index += 1
        if counts[name] == 0:
            options[name] = True
        elif not values:
            raise RooftopError("from", name, "a value after it")
        else:
            options[name] = tuple(values) if counts[name] is None else values[0]
    return options


def _key(name: str) -> str:
    return megatron_words()[name].key


class _Numbers:
    """Values of words, read as numbers where they are."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def whole(self, name: str, *, or_else: int | None = None) -> int:
        """A whole number above 0. Raises RooftopError if there is none."""
        value = self.values[name] if self.values[name] is not None else or_else
        if value is None or not re.fullmatch(r"\d+", str(value)) or int(value) < 1:
            raise RooftopError(_key(name), value, "a whole number, 1 or more")
        return int(value)

    def number(self, name: str) -> float:
        """A number. Raises RooftopError if there is none."""
        try:
            return float(self.values[name])
        except (TypeError, ValueError):
            raise RooftopError(_key(name), self.values[name], "a number") from None

    def optional(self, name: str) -> int | None:
        """A whole number, or None where the word is not said."""
        return None if self.values[name] is None else self.whole(name)


def _expert_axes(
    numbers: _Numbers, model: ModelConfig, copies: int, tensor: int, expert: int
) -> tuple[dict[str, int], bool]:
    """Sizes of data and expert axes, and True where experts are dealt out over tensor whole."""
    if model.moe is None:
        if expert > 1:
            raise RooftopError(_key("expert"), expert, f"1 for {model.name}, which has no experts")
        return {"data": copies}, False
    ways = numbers.whole("expert_tensor", or_else=tensor)
    if ways not in (1, tensor):
        raise RooftopError(_key("expert_tensor"), ways, f"1 or {tensor}: others have no price")
    whole = ways == 1 and tensor > 1
    if whole and expert % tensor:
        accepted = f"a multiple of {_key('tensor')} {tensor} with {_key('expert_tensor')} 1: others have no price"
        raise RooftopError(_key("expert"), expert, accepted)
    axis = expert // tensor if whole else expert
    if copies % axis:
        raise RooftopError(_key("expert"), expert, f"experts over a divisor of {copies} data-parallel copies"
                           + (f" x tensor {tensor}" if whole else ""))  # fmt: skip
    return {"data": copies // axis, "expert": axis}, whole or tensor == 1


def _schedule(numbers: _Numbers, model: ModelConfig, stages: int) -> dict[str, object]:
    """Schedule and chunks of stages. Raises RooftopError where Megatron-LM refuses them."""
    values, layers, chunks = numbers.values, model.layers, 1
    ways = [name for name in ("chunks", "chunk_layers", "layout") if values[name] is not None]
    if len(ways) > 1:
        raise RooftopError(_key(ways[1]), values[ways[1]], f"one of {', '.join(map(_key, ways))}")
    if values["layout"] is not None:
        parts, said = read_layout(str(values["layout"]))
        if parts % stages or said != layers:
            accepted = f"a multiple of {stages} parts with {layers} layers"
            raise RooftopError(_key("layout"), f"{parts} parts, {said} layers", accepted)
        chunks = parts // stages
    elif values["first_layers"] is None and values["last_layers"] is None:
        counted = layers + bool(values["counts_embedding"]) + bool(values["counts_loss"])
        chunks = numbers.whole("chunks", or_else=1)
        if values["chunk_layers"] is not None:
            chunks = max(1, counted // stages // numbers.whole("chunk_layers"))
        if counted % (stages * chunks):
            raise RooftopError(
                _key("stage"), stages,
                f"stages x chunks ({stages} x {chunks}) that divide {counted} layers, or {_key('layout')}",
            )  # fmt: skip
    if stages == 1:
        return {"chunks": None, "schedule": None} if chunks == 1 else _refused_chunks(chunks)
    return {"schedule": "interleaved" if chunks > 1 else "1f1b", "chunks": chunks}


def _refused_chunks(chunks: int) -> dict[str, object]:
    raise RooftopError(_key("chunks"), chunks, f"1 without {_key('stage')}")


def _remat(numbers: _Numbers, model: ModelConfig) -> str:
    values, granularity = numbers.values, numbers.values["recompute"]
    if granularity is None:
        return "none"
    if granularity == "selective":
        return recomputed("megatron", values["recompute_modules"] or ("core_attn",), model)
    if granularity != "full":
        raise RooftopError(_key("recompute"), granularity, "full or selective")
    method, count = values["recompute_method"], numbers.whole("recompute_layers", or_else=1)
    if method is None:
        raise RooftopError(_key("recompute_method"), None, "uniform or block with full recomputation")
    per_part = -(-model.layers // (numbers.whole("stage") * numbers.whole("chunks", or_else=1)))
    if (method == "uniform" and count > 1) or (method == "block" and count < per_part):
        accepted = "1 (uniform), or all layers of a stage (block): parts of a stage have no price"
        raise RooftopError(_key("recompute_layers"), count, accepted)
    return "block"


def _formats(numbers: _Numbers) -> dict[str, object]:
    values, formats = numbers.values, dict[str, object]()
    if values["fp8"] is not None and values["fp4"] is not None:
        raise RooftopError(_key("fp4"), values["fp4"], f"nothing next to {_key('fp8')}: Megatron-LM excludes both")
    if values["fp8"] is not None:
        formats["matmul_dtype"] = "f8_e4m3"
    if values["fp4"] is not None:
        formats["matmul_dtype"] = "f4_e2m1"
    if values["precise_optimizer"] and values["moments_dtype"] in ("bf16", "fp16"):
        formats["moments_dtype"] = "bf16"
    if values["optimizer"] not in _OPTIMIZERS:
        accepted = f"{' or '.join(_OPTIMIZERS)}: others have no price"
        raise RooftopError(_key("optimizer"), values["optimizer"], accepted)
    formats["optimizer"] = _OPTIMIZERS[values["optimizer"]]
    return formats


def _settings(numbers: _Numbers, model: ModelConfig, *, whole: bool) -> dict[str, str]:
    """Settings of the framework as the arguments have them."""
    values = numbers.values
    settings = {
        "tp_overlap": _yes(values["tp_overlap"]),
        "attention": "unfused" if values["attention"] in ("unfused", "local") else "flash",
        "precision": "fp16" if values["fp16"] else "bf16",
        "gradients": "bf16" if values["bf16_gradients"] or values["gradients_dtype"] == "bf16" else "f32",
        "cuda_graphs": _graphs(values),
    }
    if model.moe is not None:
        kind = values["dispatcher"]
        if kind not in ("allgather", "alltoall", "flex"):
            raise RooftopError(_key("dispatcher"), kind, "allgather, alltoall or flex")
        settings |= {
            "dispatcher": values["flex_backend"] if kind == "flex" else "alltoall",
            "ep_overlap": _yes(values["ep_overlap"]),
            "expert_tp": "1" if whole else "tp",
        }
    if values["fp8"] is not None:
        settings["fp8_recipe"] = values["fp8_recipe"]
    return settings


def _graphs(values: Mapping[str, Any]) -> str:
    modules = tuple(values["graph_modules"] or ())
    if values["graphs"] == "none":
        return "none"
    whole = values["graphs"] == "full_iteration" or modules in ((), ("full_iteration",))
    return "layer" if whole else "+".join(modules)


def _yes(value: object) -> str:
    return "yes" if value else "no"


def _defaults(numbers: _Numbers, tensor: int) -> Iterator[str]:
    """Options that a job leaves as they are by default, and that cost time."""
    values = numbers.values
    if values["dispatcher"] == "allgather" and values["experts"] is not None:
        yield f"{_key('dispatcher')} is allgather by default, priced as alltoall: plans have no price of it"
    for name in ("overlaps_gradients", "overlaps_weights"):
        if not values[name]:
            yield f"{_key(name)} is off: the price has it on"
    if not values["distributed"] and not values["weights_sharded"]:
        yield f"{_key('distributed')} is off: memory is priced with it"
    if tensor > 1 and not values["sequence_parallel"]:
        yield f"{_key('sequence_parallel')} is off: the price has it on"


def _model(numbers: _Numbers) -> ModelConfig:
    """The model that arguments state. Raises RooftopError naming a size that is missing."""
    values = numbers.values
    heads, hidden = numbers.whole("heads"), numbers.whole("hidden")
    latent = _latent(numbers) if values["latent"] else None
    channels = numbers.whole("kv_channels", or_else=hidden // heads)
    swiglu = bool(values["swiglu"])
    positions = {"rope": "rope", "learned_absolute": "learned", "none": "none"}.get(str(values["position_kind"]))
    if positions is None:
        raise RooftopError(_key("position_kind"), values["position_kind"], "rope, learned_absolute or none")
    layers = numbers.whole("layers")
    biased = not values["no_bias"]
    facts: dict[str, Any] = {
        "name": "the model of the arguments",
        "family": "megatron",
        "layers": layers,
        "d_model": hidden,
        "d_ff": numbers.whole("ffn", or_else=_usual_ffn(hidden, swiglu=swiglu)),
        "heads": heads,
        "kv_heads": numbers.whole("query_groups") if values["groups_queries"] and not latent else heads,
        "d_head": latent.d_nope + latent.d_rope if latent else channels,
        "vocab": numbers.whole("vocab"),
        "max_seq_len": numbers.whole("positions", or_else=numbers.whole("seq")),
        "mlp_matrices": 3 if swiglu else 2,
        "activation": "silu" if swiglu else "relu2" if values["squared_relu"] else "gelu",
        "tied_embeddings": not values["untied"],
        "qkv_bias": (biased or bool(values["qkv_bias"])) and not latent,
        "attn_out_bias": biased and not latent,
        "mlp_bias": biased,
        "norm": "rms" if values["norm"] == "RMSNorm" else "layer",
        "norm_eps": numbers.number("norm_epsilon"),
        "norm_offset": bool(values["norm_offset"]),
        "qk_norm": "head" if values["qk_norm"] and not latent else None,
        "attention_sinks": values["sinks"] == "learnable",
        "positions": positions,
        "moe": _experts(numbers, layers),
        "mla": latent,
        "rope_scaling": _scaling(numbers),
    }
    if positions == "rope":
        facts["rope_theta"] = numbers.number("rotary_base")
        facts["rope_interleaved"] = bool(values["rotary_interleaved"])
        share = numbers.number("rotary_share")
        facts["rotary_dims"] = None if share == 1 or latent else round(share * channels)
    return _named(ModelConfig(**facts, layer_windows=_windows(numbers, layers)))


def _named(model: ModelConfig) -> ModelConfig:
    """The model with the name of the preset that has its arguments and its parameters, if there is one."""
    said = _said(model)
    same = [preset for preset in map(load_model, presets()) if said is not None and _said(preset) == said]
    same.sort(key=lambda preset: preset.max_seq_len != model.max_seq_len)
    return replace(model, name=same[0].name) if same else model


def _said(model: ModelConfig) -> tuple[object, ...] | None:
    """Megatron's words of a model, and its parameters; None of one that they cannot say."""
    try:
        return model_values(model), count_params(model)
    except RooftopError:
        return None


def _windows(numbers: _Numbers, layers: int) -> tuple[int | None, ...]:
    """Windows of layers, a token's own position counted; () without any."""
    size, skipped = numbers.values["window"], numbers.values["window_layers"]
    if size is None:
        return ()
    back = re.match(r"\(?\s*(\d+)", str(size))
    if back is None:
        raise RooftopError(_key("window"), size, "two whole numbers: 127,0")
    kinds = [True] * layers
    if skipped is not None:
        # Of every N layers the last sees all.
        every = int(skipped) if str(skipped).isdigit() else None
        kinds = [bool((layer + 1) % every) for layer in range(layers)] if every else _layer_kinds(str(skipped), layers)
    return tuple(int(back[1]) + 1 if kind else None for kind in kinds)


def _usual_ffn(hidden: int, *, swiglu: bool) -> int:
    """F where it is not said: 4 D, or with SwiGLU 8/3 D in whole 64s (arguments.py, validate_args)."""
    return int(4 * hidden * 2 / 3 / 64) * 64 if swiglu else 4 * hidden


def _latent(numbers: _Numbers) -> MLA:
    return MLA(
        q_rank=numbers.optional("q_rank"),
        kv_rank=numbers.whole("kv_rank"),
        d_nope=numbers.whole("d_nope"),
        d_rope=numbers.whole("d_rope"),
        d_v=numbers.whole("d_value"),
    )


def _scaling(numbers: _Numbers) -> RopeScaling | None:
    """Scaling of rotary frequencies, with Megatron Core's defaults for figures that arguments do not say."""
    if numbers.values["rope_kind"] == "yarn":
        return RopeScaling(
            kind="yarn", factor=numbers.number("rotary_factor"), original_max_seq_len=4096, beta_fast=32.0,
            beta_slow=1.0,
        )  # fmt: skip
    if numbers.values["scales_rope"]:
        return RopeScaling(
            kind="llama3", factor=numbers.number("rope_factor"), original_max_seq_len=8192, low_freq_factor=1.0,
            high_freq_factor=4.0,
        )  # fmt: skip
    return None


def _experts(numbers: _Numbers, layers: int) -> MoE | None:
    values = numbers.values
    if values["experts"] is None:
        return None
    kinds = _layer_kinds(str(values["expert_layers"]), layers)
    first = kinds.index(True) if True in kinds else layers
    every = next((step for step in range(1, layers + 1) if kinds[first:] == _periodic(step, layers - first)), None)
    if every is None:
        raise RooftopError(
            _key("expert_layers"), values["expert_layers"], "dense layers first, then every N-th of experts"
        )
    return MoE(
        experts=numbers.whole("experts"),
        active=numbers.whole("active"),
        d_ff=numbers.whole("expert_ffn", or_else=numbers.whole("ffn", or_else=4 * numbers.whole("hidden"))),
        shared_d_ff=numbers.optional("shared_ffn") or 0,
        dense_layers=first,
        every=every,
        scoring="sigmoid" if values["scoring"] == "sigmoid" else "softmax",
        normalise=not values["pre_softmax"],
        groups=numbers.optional("router_groups") or 1,
        active_groups=numbers.optional("active_groups") or 1,
        group_score="top2_sum" if values["scoring"] == "sigmoid" else "max",
        routed_scaling=1.0 if values["routed_scaling"] is None else numbers.number("routed_scaling"),
        correction_bias=bool(values["correction_bias"]),
    )


def _periodic(step: int, count: int) -> list[bool]:
    return [index % step == 0 for index in range(count)]


def _layer_kinds(text: str, layers: int) -> list[bool]:
    """True for each layer of experts: N for every N-th from the first, or a sum of lists: ([0]*3+[1]*58)."""
    if text.strip().isdigit():
        return [layer % int(text) == 0 for layer in range(layers)]
    try:
        kinds = _listed(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError):
        raise RooftopError(_key("expert_layers"), text, "N, or a list such as ([0]*3+[1]*58)") from None
    if len(kinds) != layers:
        raise RooftopError(_key("expert_layers"), f"{len(kinds)} layers", f"as many as {_key('layers')}: {layers}")
    return [bool(kind) for kind in kinds]


def _listed(node: ast.expr) -> list[int]:
    """A list of numbers, sums of lists, and products of a list and a number."""
    if isinstance(node, ast.List):
        return [entry.value for entry in node.elts if isinstance(entry, ast.Constant) and isinstance(entry.value, int)]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _listed(node.left) + _listed(node.right)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Constant):
        count = node.right.value
        if isinstance(count, int) and count <= 10_000:
            return _listed(node.left) * count
    raise ValueError(ast.dump(node))
