"""XLA:TPU's expected times of matmuls, a dense layer and attention kernels: compiled ahead of time, without a TPU.

    python bench/evidence/compiler_fractions.py                               # everything: about 90 minutes of one core
    python bench/evidence/compiler_fractions.py --sections matmul --chips v6e # one part; the other rows are kept
    python bench/evidence/compiler_fractions.py --sections recipes            # needs tokamax 0.0.12 too: 5 minutes

Five sections, each chip in a process of its own (libtpu takes its flags once), each recipe too:

matmul     bare matmuls, forward [M,K]x[K,N] ("nn"), dX ("nt") and dW ("tn"): `estimated_cycles` of the fusion;
batched    the same for matmuls of several experts at once, [E,M,K]x[E,K,N]; "detail" has E;
layer      dense LLaMA layers, forward and backward: the same for their matmuls, and HBM bytes of everything else;
attention  the splash kernels of JAX: the final VLIW listing, issued in order, one bundle a cycle, a matrix push
           waiting until its systolic array is free ("cycles" is one executed block; see docs/evidence/achievable.md);
recipes    the same for the kernels of published recipes: their library, blocks, layouts and options, and segment ids,
           which MaxText always has. "m" and "k" are queries and keys of a block, "cycles" those of a block without a
           causal mask; "detail" has the cycles of all, per 1024 scores of the causal blocks of 2,048 x 2,048.

The table goes to bench/results/compiler_fractions.csv; docs/evidence/achievable.md says what follows from it.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rooftop.hardware import chip as find_chip

RESULTS = Path(__file__).parents[1] / "results" / "compiler_fractions.csv"
COLUMNS = ("section", "chip", "dtype", "case", "m", "k", "n", "flops", "cycles", "fraction", "detail")
SECTIONS = ("matmul", "batched", "layer", "attention", "recipes")
DEFAULT_SECTIONS = SECTIONS[:-1]
#: Smallest slice that libtpu describes, and the VMEM that a fusion may use (KiB; None leaves the default).
CHIPS: dict[str, tuple[str, dict[str, str], int | None]] = {
    "v4": ("v4:1x1x1", {"chip_config_name": "megacore"}, None),
    "v5e": ("v5e:1x1", {}, 65536),
    "v5p": ("v5p:1x1x1", {}, 49152),
    "v6e": ("v6e:1x1", {}, 98304),
    "tpu7x": ("tpu7x:1x1x1", {}, 57344),
}
#: Systolic arrays of one core. An attention kernel runs on one core: a megacore chip gives half of the heads to each.
ARRAYS = {"v4": 4, "v5e": 4, "v5p": 4, "v6e": 2, "tpu7x": 2}

#: (K, N) of weights, whole and split over tensor parallelism, in all three forms and in the forward one only.
ALL_FORMS = ((4096, 4096), (4096, 14336), (8192, 8192), (1024, 8192))
FORWARD = ((14336, 4096), (8192, 28672), (28672, 8192), (8192, 3584), (5120, 5120), (4096, 1792), (12288, 12288),
           (4096, 1024), (2048, 2048), (1024, 1024), (4096, 1408), (1408, 4096))  # fmt: skip
#: Experts at once, tokens of each, and (K, N) of their weights: D 2048 and F 1408, whole and over two devices.
BATCHES = ((2, 1024), (2, 4096), (8, 256), (8, 1024), (8, 4096))
EXPERTS = ((2048, 1408), (2048, 704))
CONTRACT = {"nn": ((1,), (0,)), "nt": ((1,), (1,)), "tn": ((0,), (0,))}
#: dtype -> (chips with a matrix unit for it, JAX name, dtype of the result).
DTYPES = {
    "bf16": (tuple(CHIPS), "bfloat16", "bfloat16"),
    "int8": (("v5e", "v5p", "v6e"), "int8", "int32"),
    "f8_e4m3": (("tpu7x",), "float8_e4m3fn", "bfloat16"),
}
#: (D, F, query heads, KV heads, tokens) of a layer; the last one is what a tensor split of 4 leaves. Heads are of 128.
LAYERS = ((4096, 14336, 32, 8, 4096), (4096, 14336, 32, 8, 16384), (8192, 7168, 16, 2, 4096))
#: (block, keys per inner iteration) and head sizes of attention.
BLOCKS = ((512, 512), (1024, 512), (1024, 1024))
HEADS = ((64, 64), (128, 128), (192, 128), (256, 256))
SEQUENCE = 4096
#: Kernels by name, as rooftop/roofline/achievable.toml has them: what a recipe of AI-Hypercomputer/tpu-recipes says of
#: MaxText's sa_block_*, sa_*_layout and so on. Blocks are of queries, keys, and keys inside; layouts of queries, keys
#: and values have heads (H) or tokens (S) minor. The recipes are in training/, in the folders after each name.
RECIPES: dict[str, dict[str, Any]] = {
    "tokamax-llama3.1-70b-128k": {  # ironwood/llama3.1-70b/128k-*
        "chip": "tpu7x", "library": "tokamax", "tokens": 131072, "layouts": "SHS",
        "forward": (2048, 2048, 512), "fused": (1024, 4096, 256),
        "options": {"max_logit_const": 30.0, "dq_reduction_steps": 3},
    },
    "jax-2048": {  # trillium/Llama3.1-8B-MaxText, Llama3.1-70B-MaxText and Mistral-7B-MaxText
        "chip": "v6e", "library": "jax", "tokens": 8192, "layouts": "HHH",
        "forward": (2048, 2048, 2048), "fused": (2048, 2048, 2048),
    },
}  # fmt: skip
#: Cycles that a grid step waits besides its bundles (docs/evidence/achievable.md), and the side of the square blocks of
#: which the causal ones have the scores that all cycles of a recipe's kernel are divided by.
STEP_CYCLES, SIDE = 230, 2048
KERNEL_MATMULS = {"forward": (1, 1), "dq": (2, 1), "dkv": (2, 2), "fused": (3, 2)}  # of size d_qk, of size d_v


def flops_per_cycle(chip_name: str) -> float:
    """Peak bf16 FLOPs of a device in a cycle of its clock."""
    chip = find_chip(chip_name)
    return chip.flops_per_s["bf16"] / chip.devices / chip.clock_hz


def device_sharding(chip_name: str) -> Any:
    """The sharding that puts a whole array on one described device."""
    from jax.experimental import topologies
    from jax.sharding import SingleDeviceSharding

    name, options, _ = CHIPS[chip_name]
    bounds = (1, 1, 1)
    topology = topologies.get_topology_desc(name, "tpu", chips_per_host_bounds=bounds, **options)
    return SingleDeviceSharding(topology.devices[0])


def compiled_text(lowered: Any, chip_name: str) -> str:
    """The optimised HLO of a lowered function."""
    limit = CHIPS[chip_name][2]
    return str(lowered.compile(compiler_options={"xla_tpu_scoped_vmem_limit_kib": limit} if limit else {}).as_text())


def matmul_rows(chip_name: str) -> Iterator[dict[str, Any]]:
    """One row per matmul."""
    for dtype, (chips, _, _) in DTYPES.items():
        if chip_name in chips:
            cases = [(1, form, *_operands(form, m, k, n)) for k, n in ALL_FORMS for m in (1024, 4096, 16384)
                     for form in CONTRACT if dtype == "bf16"]  # fmt: skip
            cases += [(1, "nn", m, k, n) for k, n in FORWARD for m in (2048, 8192)]
            yield from _matmuls(chip_name, dtype, cases)


def batched_rows(chip_name: str) -> Iterator[dict[str, Any]]:
    """One row per matmul of a batch of experts; all figures but "detail" are those of the batch, or of one expert."""
    cases = [(experts, form, *_operands(form, m, k, n)) for k, n in EXPERTS for experts, m in BATCHES
             for form in CONTRACT]  # fmt: skip
    for (experts, *_), row in zip(cases, _matmuls(chip_name, "bf16", cases), strict=True):
        yield row | {"detail": f"experts={experts}"}


def _matmuls(chip_name: str, dtype: str, cases: list[tuple[int, str, int, int, int]]) -> Iterator[dict[str, Any]]:
    """Rows of matmuls (batch, form, m, k, n); several share a module, where they stay fusions of their own."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    sharding = device_sharding(chip_name)
    _, kind, result = DTYPES[dtype]
    modules: list[list[tuple[int, str, int, int, int]]] = [[]]
    for case in cases:  # Arguments and results of a module have to fit in HBM.
        if sum(e * (m * k + k * n + m * n) for e, _, m, k, n in [*modules[-1], case]) > 2e9:
            modules.append([])
        modules[-1].append(case)
    for module in modules:
        arguments = []
        for e, form, m, k, n in module:
            batch = (e,) if e > 1 else ()
            shapes = ((k, m) if form == "tn" else (m, k), (n, k) if form == "nt" else (k, n))
            arguments.append([jax.ShapeDtypeStruct(batch + s, jnp.dtype(kind), sharding=sharding) for s in shapes])

        def run(pairs: Any, module: Any = module, result: str = result) -> Any:
            out = []
            for index, (a, b) in enumerate(pairs):
                with jax.named_scope(f"case{index}"):
                    batched = a.ndim - 2
                    over = [tuple(axis + batched for axis in axes) for axes in CONTRACT[module[index][1]]]
                    dims = ((over[0], over[1]), (tuple(range(batched)),) * 2)
                    out.append(lax.dot_general(a, b, dims, preferred_element_type=jnp.dtype(result)))
            return out

        cycles = [0] * len(module)
        for line in compiled_text(jax.jit(run).lower(arguments), chip_name).splitlines():
            estimate, scope = re.search(r'estimated_cycles":"(\d+)"', line), re.search(r"/case(\d+)/", line)
            if estimate and scope:
                cycles[int(scope[1])] += int(estimate[1])
        chip = find_chip(chip_name)
        peak = flops_per_cycle(chip_name) * chip.flops_per_s[dtype] / chip.flops_per_s["bf16"]
        for (e, form, m, k, n), count in zip(module, cycles, strict=True):
            flops = 2 * e * m * k * n
            yield {"dtype": dtype, "case": form, "m": m, "k": k, "n": n, "flops": flops, "cycles": count,
                   "fraction": round(flops / count / peak, 4)}  # fmt: skip


def _operands(form: str, m: int, k: int, n: int) -> tuple[int, int, int]:
    """Rows, contraction and columns of a form of the layer [m, k] x [k, n]."""
    return {"nn": (m, k, n), "nt": (m, n, k), "tn": (k, m, n)}[form]


def layer_rows(chip_name: str) -> Iterator[dict[str, Any]]:
    """For each layer, forward and backward together: its matmuls, and the HBM traffic beyond theirs.

    "detail" has bytes per token in units of D bytes: of fusions and copies without a matmul ("alone"), and what those
    with one move beyond reading their operands and writing their results once ("beside").
    """
    for d, f, heads, kv_heads, tokens in LAYERS:
        weights = {"n1": (d,), "q": (d, heads, 128), "k": (d, kv_heads, 128), "v": (d, kv_heads, 128),
                   "o": (heads, 128, d), "n2": (d,), "gate": (d, f), "up": (d, f), "down": (f, d)}  # fmt: skip
        cycles, alone, beside = read_layer(compile_layer(chip_name, weights, tokens))
        widths = [(d, heads * 128), (d, kv_heads * 128), (d, kv_heads * 128), (heads * 128, d), (d, f), (d, f), (f, d)]
        flops = sum(6 * tokens * k * n for k, n in widths)
        beside -= sum(6 * (k * n + tokens * (k + n)) for k, n in widths)
        yield {"dtype": "bf16", "case": "layer", "m": tokens, "k": d, "n": f, "flops": flops, "cycles": cycles,
               "fraction": round(flops / cycles / flops_per_cycle(chip_name), 4),
               "detail": f"heads={heads} kv_heads={kv_heads} alone={alone / tokens / d:.1f}D "
               f"beside={beside / tokens / d:.1f}D"}  # fmt: skip


def compile_layer(chip_name: str, weights: dict[str, tuple[int, ...]], tokens: int) -> str:
    """Optimised HLO of one pre-norm layer with rotary embedding and SwiGLU, and of its backward pass."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental.layout import Format, Layout

    heads, size = weights["q"][1:]
    kernel = splash_kernel(heads, tokens, (1024, 512), fused=False)
    angle = jnp.outer(jnp.arange(tokens), 1e4 ** (-jnp.arange(size // 2) / (size // 2)))[:, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)

    def norm(x: Any, scale: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale

    def rope(x: Any) -> Any:
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def layer(w: Any, x: Any) -> Any:
        h = norm(x, w["n1"])
        q, k, v = (jnp.einsum("td,dnh->tnh", h, w[name]) for name in "qkv")
        turned = [a.transpose(1, 0, 2) for a in (rope(q) * jnp.bfloat16(size**-0.5), rope(k), v)]
        x = x + jnp.einsum("nth,nhd->td", kernel(*turned), w["o"])
        h = norm(x, w["n2"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]

    def step(w: Any, x: Any, dy: Any) -> Any:
        y, pull = jax.vjp(layer, w, x)
        return y, pull(dy)

    # Inside a loop over layers the compiler chooses the layout of weights and activations: let it do so here.
    sharding = Format(Layout.AUTO, device_sharding(chip_name))
    shapes = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in weights.items()}
    stream = jax.ShapeDtypeStruct((tokens, weights["n1"][0]), jnp.bfloat16)
    jitted = jax.jit(step, in_shardings=sharding, out_shardings=sharding)
    return compiled_text(jitted.lower(shapes, stream, stream), chip_name)


_ARRAY = re.compile(r"\b(pred|[a-z]\w*\d\w*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
_IDLE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all"}


def read_layer(text: str) -> tuple[int, float, float]:
    """Estimated cycles of the matmuls; HBM bytes of what has no matmul, and of what has; attention kernels left out."""
    bodies = re.findall(r"^(?:ENTRY )?%?([\w.\-]+) \(.*?\{\n(.*?)^\}", text, re.M | re.S)
    matmuls = {name for name, body in bodies if re.search(r"\b(?:convolution|dot)\(", body)}
    entry = text[text.index("\nENTRY ") :]
    instructions = re.findall(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)(.*(?:\n\S.*)*)", entry, re.M)
    shapes = {name: shape for name, shape, *_ in instructions}
    cycles, alone, beside = 0, 0.0, 0.0
    for _, shape, opcode, operands, rest in instructions:
        if opcode in _IDLE or opcode == "custom-call" or opcode.endswith("-done"):
            continue
        read = [shapes.get(name, "") for name in re.findall(r"%([\w.\-]+)", operands)]
        written = [shape.split(", ")[0]] if opcode.endswith("-start") else [shape]
        moved = sum(hbm_bytes(array) for array in read + written)
        calls = re.search(r"calls=%?([\w.\-]+)", rest)
        if calls and calls[1] in matmuls:
            cycles += int(re.search(r'estimated_cycles":"(\d+)"', rest)[1])  # type: ignore[index]
            beside += moved
        elif opcode.endswith("-start"):  # A prefetch into VMEM: what it feeds no longer reads HBM.
            beside += moved
        else:
            alone += moved
    return cycles, alone, beside


def hbm_bytes(shape: str) -> float:
    """Bytes of the arrays of an HLO shape that lie in HBM, the padding of their tiles included."""
    total = 0.0
    for dtype, dims, order, layout in _ARRAY.findall(shape):
        if "S(" in layout:
            continue
        sizes = [int(size) for size in dims.split(",") if size]
        tile = re.search(r"T\((\d+)(?:,(\d+))?\)", layout)
        minor = [int(axis) for axis in order.split(",") if axis]
        if tile and minor:
            steps = [int(tile[2] or tile[1]), int(tile[1])] if tile[2] else [int(tile[1])]
            for axis, step in zip(minor, steps, strict=False):
                sizes[axis] = -(-sizes[axis] // step) * step
        bits = 8 if dtype == "pred" or dtype.startswith("f8") else int(re.sub(r"\D", "", dtype))
        elements = 1
        for size in sizes:
            elements *= size
        total += elements * bits / 8
    return total


def splash_kernel(heads: int, tokens: int, block: tuple[int, int], *, fused: bool) -> Any:
    """JAX's splash attention, causal, with square blocks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    rows, inner = block
    separate = None if fused else rows
    sizes = splash.BlockSizes(
        block_q=rows, block_kv=rows, block_kv_compute=inner, block_q_dkv=rows, block_kv_dkv=rows,
        block_kv_dkv_compute=inner, block_q_dq=separate, block_kv_dq=separate, use_fused_bwd_kernel=fused,
    )  # fmt: skip
    mask = masks.MultiHeadMask([masks.CausalMask((tokens, tokens))] * heads)
    return splash.make_splash_mha(mask=mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)


def attention_rows(chip_name: str, dump: Path) -> Iterator[dict[str, Any]]:
    """One row per kernel, head size and block: cycles of one executed block and, in detail, what surrounds it."""
    import jax
    import jax.numpy as jnp

    sharding = device_sharding(chip_name)
    for d_qk, d_v in HEADS:
        for block in BLOCKS:
            for fused in (False, True):
                kernel = splash_kernel(2, SEQUENCE, block, fused=fused)
                q, v = (jax.ShapeDtypeStruct((2, SEQUENCE, d), jnp.bfloat16, sharding=sharding) for d in (d_qk, d_v))
                before = set(dump.iterdir())
                try:
                    jax.jit(lambda q, k, v, do, kernel=kernel: jax.vjp(kernel, q, k, v)[1](do)).lower(
                        q, q, v, v
                    ).compile()
                except jax.errors.JaxRuntimeError as error:  # A block that does not fit in VMEM has no row.
                    print(chip_name, d_qk, d_v, block, str(error).splitlines()[0], file=sys.stderr)
                    continue
                for path in sorted(set(dump.iterdir()) - before):
                    match = re.search(r"-splash_mha_(fwd|dq|dkv)\w*\.\d+-\d+-final_bundles\.txt$", path.name)
                    if match and not (fused and match[1] == "fwd"):
                        case = {"fwd": "forward", "dq": "dq", "dkv": "fused" if fused else "dkv"}[match[1]]
                        yield attention_row(chip_name, case, d_qk, d_v, block, path)
                for path in set(dump.iterdir()) - before:
                    path.unlink()


def attention_row(chip_name: str, case: str, d_qk: int, d_v: int, block: tuple[int, int], path: Path) -> dict[str, Any]:
    """Facts of a kernel in the listing at ``path``."""
    bundles = read_bundles(path.read_text())
    block_at, edge_bundles, step_bundles = find_block(bundles)
    inside = bundles[slice(*block_at)]
    rows, inner = block
    of_qk, of_v = KERNEL_MATMULS[case]
    flops = 2 * rows * rows * (of_qk * d_qk + of_v * d_v)
    chip = find_chip(chip_name)
    peak = flops_per_cycle(chip_name) * chip.devices / chip.cores
    cycles = issue_cycles(inside, chip_name, peak)
    vector = sum(len(re.findall(r"= v(?!ld|st|pop|mat|pow|rcp|log|sync)[a-z]", text)) for _, _, text in inside)
    return {
        "dtype": "bf16", "case": case, "m": rows, "k": inner, "n": d_qk, "flops": flops, "cycles": round(cycles),
        "fraction": round(flops / peak / cycles, 4),
        "detail": f"d_v={d_v} bundles={len(inside)} step={step_bundles} edge={edge_bundles} "
        f"vector_ops={vector / (rows * rows / 1024):.2f}",
    }  # fmt: skip


def read_bundles(text: str) -> list[tuple[int, str, str]]:
    """(address, label, text) of each bundle of a listing."""
    starts: list[tuple[int, str, str]] = []
    for line in text.splitlines():
        start = re.match(r"\s*(0x[0-9a-f]+|\d+)\s+([A-Z]{2})?\s*:\s*>*\s*\{", line)
        if start:
            starts.append((int(start[1], 0), start[2] or "", line))
        elif starts:  # Comments run over several lines.
            starts[-1] = (*starts[-1][:2], starts[-1][2] + line)
    return starts


def recipe_rows(name: str, dump: Path) -> Iterator[dict[str, Any]]:
    """Rows of a recipe's two kernels, for heads of 128.

    The compiler takes long for a block of many inner ones: that is compiled with 4 and with 2, and the others take what
    two more take. For 16 of "tokamax-llama3.1-70b-128k" that is 0.4 % off (without segment ids: 21,032 for 20,955).
    """
    recipe = RECIPES[name]
    inner = {case: recipe[case][1] // recipe[case][2] for case in ("forward", "fused")}
    listings = {4: recipe_listings(recipe, 4, dump)}
    if max(inner.values()) > 4:
        listings[2] = recipe_listings(recipe, 2, dump)
    for case, number in inner.items():
        yield recipe_row(name, case, [read_bundles(listings[most][case]) for most in (4, 2)[: 1 + (number > 4)]])


def recipe_listings(recipe: dict[str, Any], most: int, dump: Path) -> dict[str, str]:
    """The listings of a recipe's two kernels, with ``most`` inner blocks at most in a block."""
    import jax
    import jax.numpy as jnp

    blocks = {case: (recipe[case][0], min(recipe[case][1], most * recipe[case][2]), recipe[case][2])
              for case in ("forward", "fused")}  # fmt: skip
    # Bundles of a block are those of any length.
    length = 2 * max(*blocks["forward"], *blocks["fused"])
    kernel, segments = recipe_kernel(recipe, blocks, length)
    sharding = device_sharding(recipe["chip"])
    heads = jax.ShapeDtypeStruct((2, length, 128), jnp.bfloat16, sharding=sharding)
    ids = jax.ShapeDtypeStruct((length,), jnp.int32, sharding=sharding)

    def run(q: Any, k: Any, v: Any, do: Any, ids: Any) -> Any:
        return jax.vjp(lambda q, k, v: kernel(q, k, v, segments(ids, ids)), q, k, v)[1](do)

    jax.jit(run).lower(heads, heads, heads, heads, ids).compile()
    listings = {}
    for path in sorted(dump.iterdir()):
        if match := re.search(r"-splash_mha_(fwd|dkv)\w*\.\d+-\d+-final_bundles\.txt$", path.name):
            listings["forward" if match[1] == "fwd" else "fused"] = path.read_text()
        path.unlink()
    return listings


def recipe_kernel(recipe: dict[str, Any], blocks: dict[str, tuple[int, int, int]], length: int) -> tuple[Any, Any]:
    """A recipe's splash attention, causal, with other ``blocks``, and the class of its segment ids."""
    library: Any
    if recipe["library"] == "jax":
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as library
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
    else:
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_kernel as library
        from tokamax._src.ops.experimental.tpu.splash_attention import splash_attention_mask as masks
    layouts = {"H": library.QKVLayout.HEAD_DIM_MINOR, "S": library.QKVLayout.SEQ_MINOR}
    sizes = dict(zip(("block_q", "block_kv", "block_kv_compute"), blocks["forward"], strict=True))
    sizes |= dict(zip(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), blocks["fused"], strict=True))
    orders = {f"{name}_layout": layouts[order] for name, order in zip("qkv", recipe["layouts"], strict=True)}
    mask = masks.CausalMask((length, length))
    if recipe["library"] == "jax":
        config = library.BlockSizes(**sizes, **orders, use_fused_bwd_kernel=True)
        many = masks.MultiHeadMask([mask] * 2)
        kernel = library.make_splash_mha(mask=many, head_shards=1, q_seq_shards=1, block_sizes=config)
    else:
        config = library.SplashConfig(**sizes, **orders, **recipe.get("options", {}))
        kernel = library.make_splash_mha(mask, config=config, q_seq_shards=1)
    return kernel, library.SegmentIds


def recipe_row(name: str, case: str, listings: list[list[tuple[int, str, str]]]) -> dict[str, Any]:
    """Facts of one of a recipe's kernels, from one listing, or from those of blocks of 4 and of 2 inner ones."""
    recipe = RECIPES[name]
    tokens, (queries, keys, inside) = recipe["tokens"], recipe[case]
    chip = find_chip(recipe["chip"])
    peak = flops_per_cycle(chip.name) * chip.devices / chip.cores
    (unmasked, masked, step, edge), *fewer = (recipe_cycles(bundles, chip.name, peak) for bundles in listings)
    for few_unmasked, few_masked, _, _ in fewer:
        more = (keys // inside - 4) / 2
        unmasked, masked = unmasked + more * (unmasked - few_unmasked), masked + more * (masked - few_masked)
    causal = [(i, j) for i in range(tokens // queries) for j in range(tokens // keys) if j * keys < (i + 1) * queries]
    diagonal = sum((j + 1) * keys - 1 > i * queries for i, j in causal)
    rows = tokens // (queries if case == "forward" else keys)
    # Tokamax's grid has the causal blocks alone; JAX's has all.
    steps = len(causal) if recipe["library"] == "tokamax" else (tokens // queries) * (tokens // keys)
    cycles = (len(causal) - diagonal) * unmasked + diagonal * masked + steps * (step + STEP_CYCLES) + rows * edge
    scores = tokens * (tokens + SIDE) / 2
    of_qk, of_v = KERNEL_MATMULS[case]
    flops = 2 * queries * keys * (of_qk + of_v) * 128
    return {
        "dtype": "bf16", "case": case, "m": queries, "k": keys, "n": 128, "flops": flops, "cycles": round(unmasked),
        "fraction": round(flops / peak / unmasked, 4),
        "detail": f"{name} inside={inside} masked={masked:.0f} step={step} edge={edge} "
        f"cycles_per_1024={cycles / scores * 1024:.3f}",
    }  # fmt: skip


def recipe_cycles(bundles: list[tuple[int, str, str]], chip_name: str, peak: float) -> tuple[float, float, int, int]:
    """Cycles of a block without a causal mask and of one with it; bundles of every step, and around a row of blocks.

    The two blocks are code of their own in Tokamax's kernels, in JAX's the same.
    """
    regions = find_regions(bundles)

    def multiplies(region: tuple[int, int]) -> bool:
        return any("vmatmul" in text for _, _, text in bundles[slice(*region)])

    def within(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
        return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]

    blocks = [r for r in regions if multiplies(r) and not any(within(q, r) and multiplies(q) for q in regions)]
    plain = [r for r in regions if not multiplies(r)]
    edges = [r for r in plain if r[1] - r[0] > 24 and not any(within(r, q) for q in plain)
             and any("vst" in text for _, _, text in bundles[slice(*r)])]  # fmt: skip
    loop = next((at for at, (_, label, _) in enumerate(bundles) if label == "LB"), 0)
    edge = sum(high - low for low, high in edges)
    step = len(bundles) - loop - edge - sum(high - low for low, high in blocks)
    cycles = [issue_cycles(bundles[slice(*r)], chip_name, peak) for r in blocks]
    return min(cycles), max(cycles), step, edge


def find_regions(bundles: list[tuple[int, str, str]]) -> list[tuple[int, int]]:
    """Predicated regions: from a forward branch to its fallthrough."""
    ends = {name: at for at, (_, label, text) in enumerate(bundles) if label == "PF"
            for name in re.findall(r"empty region (\d+)", text)}  # fmt: skip
    return [(at + 1, ends[branch[1]]) for at, (_, _, text) in enumerate(bundles)
            if (branch := re.search(r"sbr\.rel \(!?%\w+\) target = \$region(\d+)", text))
            and ends.get(branch[1], -1) > at]  # fmt: skip


def find_block(bundles: list[tuple[int, str, str]]) -> tuple[tuple[int, int], int, int]:
    """Where the work of an executed block lies; bundles that run once per row of blocks; those of every grid step.

    A predicated region is a forward branch to its fallthrough. The innermost that multiplies is the block; regions
    beside it that store set the accumulators up and write them out.
    """
    regions = find_regions(bundles)
    products = [at for at, (_, _, text) in enumerate(bundles) if "vmatmul" in text]
    around = sorted((r for r in regions if r[0] <= products[0] and products[-1] < r[1]), key=lambda r: r[1] - r[0])
    block = around[0]
    low, high = around[1] if len(around) > 1 else (0, len(bundles))
    loop = next(at for at, (_, label, _) in enumerate(bundles) if label == "LB")
    edges = [r for r in regions if r[1] - r[0] > 24 and low <= r[0] and r[1] <= high
             and (r[1] <= block[0] or r[0] >= block[1])
             and any("vst" in text for _, _, text in bundles[slice(*r)])]  # fmt: skip
    edge = sum(r[1] - r[0] for r in edges)
    return block, edge, len(bundles) - loop - (block[1] - block[0]) - edge


def issue_cycles(bundles: list[tuple[int, str, str]], chip_name: str, peak: float) -> float:
    """Cycles to issue ``bundles`` in order, one a cycle; a push of rows waits for its array to take the last ones."""
    arrays, side = ARRAYS[chip_name], find_chip(chip_name).mxu_tile
    now, free = 0.0, [0.0] * arrays
    for _, _, text in bundles:
        now += 1
        for kind, array in re.findall(r"vmatmul\.(?:mubr\.)?(\w+?)\.\S*?mxu(\d)", text):
            rows = 8 if kind == "f32" else 16  # A register holds 8 sublanes of f32, or 16 rows of bf16.
            now = max(now, free[int(array)])
            free[int(array)] = now + rows * 2 * side * side * arrays / peak
    return max(now, *free)


def work(section: str, chip_name: str, recipe: str | None) -> None:
    """Print the rows of one section and chip, or of one recipe, as CSV."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    with tempfile.TemporaryDirectory() as dump:
        if section in ("attention", "recipes"):
            os.environ["LIBTPU_INIT_ARGS"] = (
                f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=final_bundles"
            )
            rows = attention_rows(chip_name, Path(dump)) if recipe is None else recipe_rows(recipe, Path(dump))
        else:
            rows = {"matmul": matmul_rows, "batched": batched_rows, "layer": layer_rows}[section](chip_name)
        for row in rows:
            writer.writerow({"section": section, "chip": chip_name, **row})
            sys.stdout.flush()


def main() -> None:
    """Run the parts asked for, and write the table with the other parts kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", default=list(DEFAULT_SECTIONS), choices=SECTIONS)
    parser.add_argument("--chips", nargs="+", default=list(CHIPS), choices=list(CHIPS))
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=list(RECIPES))
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        section = options.sections[0]
        work(section, options.chips[0], options.recipes[0] if section == "recipes" else None)
        return
    for section in options.sections:
        for chip_name in options.chips:
            recipes = [name for name in options.recipes if RECIPES[name]["chip"] == chip_name]
            for recipe in recipes if section == "recipes" else [None]:
                command = [sys.executable, __file__, "--worker", "--sections", section, "--chips", chip_name]
                command += [] if recipe is None else ["--recipes", recipe]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
                save(section, chip_name, recipe, list(csv.DictReader(io.StringIO(done.stdout), COLUMNS)))
                print(section, chip_name, recipe or "", file=sys.stderr)


def save(section: str, chip_name: str, recipe: str | None, rows: list[dict[str, str]]) -> None:
    """Replace the rows of one section and chip, or of one recipe, in the table."""
    entries: list[dict[str, str]] = []
    if RESULTS.exists():
        lines = [line for line in RESULTS.read_text().splitlines() if not line.startswith("#")]
        entries = [r for r in csv.DictReader(lines) if (r["section"], r["chip"]) != (section, chip_name)
                   or (recipe is not None and r["detail"].split()[0] != recipe)]  # fmt: skip
    entries = sorted(entries + rows, key=lambda r: (SECTIONS.index(r["section"]), list(CHIPS).index(r["chip"])))
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "jaxlib", "libtpu"))
    with RESULTS.open("w", newline="") as file:
        file.write(f"# python bench/evidence/compiler_fractions.py; {versions}; {datetime.date.today()}\n")
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(entries)


if __name__ == "__main__":
    main()
