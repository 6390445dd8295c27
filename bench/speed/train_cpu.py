"""Tokens per second of a training step on this machine's CPU, beside the same model, data and optimizer in PyTorch.

    python bench/speed/train_cpu.py --torch-python TORCH_VENV/bin/python -o bench/results/train_cpu.csv

Every side is a process of its own with as many threads, pinned to the same cores, and begins from the same weights.
They take turns, one step each, so that whatever else the machine does falls on all of them alike; a side's ratios are
to the rooftop step of the same turn, by the clock and by the CPU time of all its threads, which a busy machine changes
less. Their losses must agree, or there is no result. PyTorch is no dependency of rooftop: ``--torch-python`` is a
Python that has torch, transformers and safetensors (this one if it has them).
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: LLaMA shapes: layers, D, F, query heads, key/value heads, vocabulary; then sequences and tokens of each.
MODELS = {
    "tiny": (2, 128, 384, 4, 2, 512, 2, 64),
    "small": (4, 256, 768, 4, 2, 8192, 8, 512),
    "medium": (8, 512, 1408, 8, 4, 8192, 8, 512),
    "large": (12, 768, 2048, 12, 4, 32000, 4, 512),
}
#: What of rooftop's program is set beside its dtype: nothing is recomputed, and blocks of logits and scores fit caches.
COMPUTATION: dict[str, Any] = {"remat": "none", "attention_block": 128}
LOSS_CHUNKS = 8
#: Sides by name: which of the two programs, and how it computes.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "rooftop f32": ("rooftop", {"compute_dtype": "f32"}),
    "torch eager f32": ("torch", {"compile": False, "dtype": "float32"}),
    "torch compile f32": ("torch", {"compile": True, "dtype": "float32"}),
    "rooftop bf16": ("rooftop", {"compute_dtype": "bf16"}),
    "torch eager bf16": ("torch", {"compile": False, "dtype": "bfloat16"}),
    "torch compile bf16": ("torch", {"compile": True, "dtype": "bfloat16"}),
}
ADAMW: dict[str, Any] = {"learning_rate": 3e-4, "b1": 0.9, "b2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
#: How far losses of one step may be apart, by dtype of the matmuls.
AGREE = {"f32": 1e-3, "bf16": 3e-2}
#: One step: its loss, when it is done.
Step = Callable[[], float]


def rooftop_step(asked: dict[str, Any], folder: Path) -> tuple[Step, dict[str, str]]:
    """The step that ``rooftop train`` compiles for one CPU device (unpacked), from the weights in ``folder``."""
    import jax
    import numpy as np

    from rooftop.compiler.devices import local_devices, mesh_of
    from rooftop.models import ModelConfig
    from rooftop.programs.model.layer import Computation
    from rooftop.programs.parameters import Batch
    from rooftop.programs.training.program import Optimizer, TrainProgram
    from rooftop.programs.training.step import abstract_batch
    from rooftop.train.engine import TrainJob

    model, here, tokens = ModelConfig.from_json(asked["model"]), local_devices(), np.load(folder / "tokens.npy")
    compute = asked["set"]["compute_dtype"]
    program = TrainProgram(
        computation=Computation(model=model, attention=here.attention(compute, model), **COMPUTATION),
        batch=tokens.shape[0],
        seq_len=tokens.shape[1] - 1,
        loss_chunks=LOSS_CHUNKS,
        compute_dtype=compute,
        optimizer=Optimizer(**ADAMW),
    )
    job = TrainJob(program=program, mesh=mesh_of({}, here), seed=0, init=folder)
    state = job.initial()
    halves = Batch(tokens=tokens[:, :-1], targets=tokens[:, 1:])
    described = abstract_batch(program, job.mesh)
    batch = jax.tree.map(lambda half, leaf: jax.device_put(half, leaf.sharding), halves, described)

    def step() -> float:
        nonlocal state
        state, metrics = job.step(state, batch)
        jax.block_until_ready(state)
        return float(metrics.loss)

    return step, {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def torch_step(asked: dict[str, Any], folder: Path) -> tuple[Step, dict[str, str]]:
    """The same in PyTorch: transformers' model, its SDPA attention and the fused AdamW; bf16 by autocast."""
    import numpy as np
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(asked["threads"])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    model.config.use_cache = False
    model.train()
    decaying = [weight for weight in model.parameters() if weight.ndim > 1]
    rest = [weight for weight in model.parameters() if weight.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decaying, "weight_decay": ADAMW["weight_decay"]}, {"params": rest, "weight_decay": 0.0}],
        lr=ADAMW["learning_rate"],
        betas=(ADAMW["b1"], ADAMW["b2"]),
        eps=ADAMW["eps"],
        fused=True,
    )
    both = torch.from_numpy(np.load(folder / "tokens.npy")).long()
    tokens, targets = both[:, :-1].contiguous(), both[:, 1:].contiguous()
    dtype = getattr(torch, asked["set"]["dtype"])
    forward = torch.compile(model) if asked["set"]["compile"] else model

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            loss = forward(input_ids=tokens, labels=targets, shift_labels=targets).loss
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step, {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


def serve(asked: dict[str, Any], folder: Path) -> None:
    """A side's process: ready after two steps, then one step, its seconds and loss, for every line that comes in."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: asked["threads"]])
    step, versions = {"rooftop": rooftop_step, "torch": torch_step}[asked["program"]](asked, folder)
    print(json.dumps({"versions": versions, "losses": [step(), step()]}), file=answers)
    for _ in sys.stdin:
        start, start_cpu = time.perf_counter(), time.process_time()
        loss = step()
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - start_cpu
        print(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, "loss": loss}), file=answers)


class Side:
    """The process of one side."""

    def __init__(self, name: str, python: str, asked: dict[str, Any], folder: Path) -> None:
        self.name, self.losses, self.seconds, self.cpu_seconds = name, list[float](), list[float](), list[float]()
        self._process = subprocess.Popen(
            [python, __file__, "--serve", json.dumps(asked), "--folder", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(asked["threads"]), "JAX_PLATFORMS": "cpu"},
        )
        ready = self._answer()
        self.versions: dict[str, str] = ready["versions"]
        self.losses += ready["losses"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name}: the process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def run(self) -> None:
        """One more step."""
        assert self._process.stdin is not None
        print(file=self._process.stdin, flush=True)
        answer = self._answer()
        self.seconds.append(answer["seconds"])
        self.cpu_seconds.append(answer["cpu_seconds"])
        self.losses.append(answer["loss"])

    def end(self) -> None:
        """No more steps."""
        self._process.communicate()


def prepare(name: str, folder: Path) -> dict[str, Any]:
    """Write initial weights, the config and random tokens to ``folder``; the model as plain JSON."""
    import jax
    import numpy as np

    from rooftop.checkpoints.huggingface import save_weights
    from rooftop.compiler.devices import local_devices, mesh_of
    from rooftop.models import ModelConfig
    from rooftop.programs.model.layer import Computation
    from rooftop.programs.training.program import TrainProgram
    from rooftop.train.engine import TrainJob

    layers, d_model, d_ff, heads, kv_heads, vocab, batch, seq_len = MODELS[name]
    model = ModelConfig(
        name=name, family="llama", layers=layers, d_model=d_model, d_ff=d_ff, heads=heads, kv_heads=kv_heads,
        d_head=d_model // heads, vocab=vocab, max_seq_len=seq_len,
    )  # fmt: skip
    program = TrainProgram(computation=Computation(model=model), batch=batch, seq_len=seq_len)
    weights = TrainJob(program=program, mesh=mesh_of({}, local_devices()), seed=0).initial().weights
    save_weights(folder, model, jax.device_get(weights))
    tokens = np.random.default_rng(0).integers(vocab, size=(batch, seq_len + 1), dtype=np.int32)
    np.save(folder / "tokens.npy", tokens)
    config: dict[str, Any] = model.to_json()
    return config


def compare(name: str, names: list[str], chosen: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """A line for each side of one model, and the versions of what ran. Ends the program where losses differ."""
    from rooftop.models import ModelConfig, count_params

    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "weights"
        model = prepare(name, folder)
        sides = list[Side]()
        for title in names:
            program, fields = SIDES[title]
            print(f"{name}: {title}: compiling", file=sys.stderr)
            asked = {"program": program, "set": fields, "model": model, "threads": chosen.threads}
            python = sys.executable if program == "rooftop" else chosen.torch_python
            sides.append(Side(title, python, asked, folder))
        for turn in range(chosen.turns):
            for side in sides:
                side.run()
            now = ", ".join(f"{side.name} {side.seconds[-1]:.3f} s" for side in sides)
            print(f"{name}: turn {turn + 1} of {chosen.turns}: {now}", file=sys.stderr)
        for side in sides:
            side.end()
    *_, batch, seq_len = MODELS[name]
    lines = []
    for side in sides:
        dtype = side.name.split()[-1]
        ours = next((side for side in sides if side.name == f"rooftop {dtype}"), sides[0])
        apart = max(abs(one - other) for one, other in zip(side.losses, sides[0].losses, strict=True))
        if apart > AGREE[dtype] * sides[0].losses[0]:
            raise SystemExit(f"{side.name}: losses {side.losses}, of {sides[0].name} {sides[0].losses}: not the same")
        ratios = [theirs / own for theirs, own in zip(side.seconds, ours.seconds, strict=True)]
        of_cpu = [theirs / own for theirs, own in zip(side.cpu_seconds, ours.cpu_seconds, strict=True)]
        median = statistics.median(side.seconds)
        lines.append(
            {
                "model": name,
                "parameters": count_params(ModelConfig.from_json(model)).total,
                "batch": batch,
                "seq_len": seq_len,
                "side": side.name,
                "threads": chosen.threads,
                "turns": chosen.turns,
                "step_s": f"{median:.4f}",
                "fastest_s": f"{min(side.seconds):.4f}",
                "tokens_per_s": f"{batch * seq_len / median:.0f}",
                "seconds_to_rooftop": f"{statistics.median(ratios):.3f}",
                "lowest": f"{min(ratios):.3f}",
                "highest": f"{max(ratios):.3f}",
                "cpu_s": f"{statistics.median(side.cpu_seconds):.4f}",
                "cpu_to_rooftop": f"{statistics.median(of_cpu):.3f}",
                "first_loss": f"{side.losses[0]:.5f}",
                "last_loss": f"{side.losses[-1]:.5f}",
            }
        )
    return lines, {key: version for side in sides for key, version in side.versions.items()}


def main() -> None:
    """Run every model's sides in turns and write one line of CSV for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable, help="a Python that has torch and transformers")
    parser.add_argument("--models", default="small,medium", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--sides", default=",".join(list(SIDES)[:3]), help=f"of {', '.join(SIDES)}")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.serve is not None:
        serve(chosen.serve, chosen.folder)
        return
    lines = list[dict[str, Any]]()
    versions: dict[str, str] = {}
    for name in chosen.models.split(","):
        result, used = compare(name, chosen.sides.split(","), chosen)
        lines += result
        versions |= used
    arguments = " ".join(sys.argv[1:]).replace(chosen.torch_python, "TORCH_VENV/bin/python")
    packages = ", ".join(f"{package} {version}" for package, version in versions.items())
    flags = f"; XLA_FLAGS {set_}" if (set_ := os.environ.get("XLA_FLAGS")) else ""
    with open(chosen.output, "w") if chosen.output else os.fdopen(os.dup(1), "w") as file:
        print(f"# python bench/speed/train_cpu.py {arguments}", file=file)
        print(f"# {time.strftime('%Y-%m-%d')}, {packages}; {chosen.threads} threads{flags}", file=file)
        out = csv.DictWriter(file, lines[0], lineterminator="\n")
        out.writeheader()
        out.writerows(lines)


if __name__ == "__main__":
    main()
