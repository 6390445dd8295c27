"""Tokens per second of the serving engine on this machine's CPU, beside transformers' ``generate`` in static batches.

    python bench/speed/serve_cpu.py --torch-python TORCH_VENV/bin/python -o bench/results/serve_cpu.csv

The same requests for both, in float32, greedy: prompts of one length, so that no batch of transformers has padding,
and outputs of ``--outputs`` lengths drawn evenly; a static batch goes on until its longest output is complete, and only
the tokens that were asked for count. So many requests are in progress as the row says: the engine takes another one as
soon as one ends, transformers a batch at a time. The last ones of a round are in progress with fewer others, which is
why a round has several times as many (``--batches``). Every side is a process of its own, pinned to the same cores with
as many threads; they take turns, a round each, and a ratio is of one turn, by the clock and by the CPU time of all
threads, which a busy machine changes less; ``load_average`` is that of the last five minutes, of which the side whose
turn it is makes as much as it has threads. With ``--copies`` rooftop serves copies of the model (the mesh axis data) on
as many emulated devices, which use the same cores. Nearly all texts must be the same on both sides, or there is no
result. transformers is no dependency of rooftop: ``--torch-python`` is a Python that has it, torch and safetensors.
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
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: LLaMA shapes: layers, D, F, query heads, key/value heads, vocabulary.
MODELS = {
    "tiny": (2, 128, 384, 4, 2, 512),
    "small": (4, 256, 768, 4, 2, 8192),
    "medium": (8, 512, 1408, 8, 4, 8192),
    "large": (12, 768, 2048, 12, 4, 32000),
}
#: One round: the tokens of each request, and seconds.
Round = Callable[[list[list[int]], list[int]], tuple[list[list[int]], float]]


def rooftop_round(folder: Path, asked: dict[str, Any]) -> tuple[Round, Callable[[], dict[str, float]], dict[str, str]]:
    """The engine that ``rooftop serve`` starts, without the API."""
    from rooftop.core.rounding import ceil_div, next_multiple
    from rooftop.scheduling.serving.scheduler import Policy
    from rooftop.serve.engine.configuration import Configuration, Shapes
    from rooftop.serve.engine.loading import load
    from rooftop.serve.engine.requests import GenerationRequest, Sampling, Token

    concurrent, prompt, max_model_len = asked["concurrent"], asked["prompt"], asked["prompt"] + asked["outputs"][1]
    contexts, copies = next_multiple(max_model_len, 64), asked["copies"]
    share = ceil_div(concurrent, copies)
    engine = load(
        folder,
        Configuration(
            policy=Policy(max_batch=concurrent, chunk_tokens=256 + concurrent),
            max_model_len=max_model_len,
            mesh=(("data", copies),) if copies > 1 else (),
            prefix_cache=False,
            shapes=Shapes(
                batches=(*(size for size in (1, 2, 4, 8, 16, 24) if size < share), share),
                widths=(prompt,),
                contexts=(contexts,),
                prefill_tokens=256,
            ),
        ),
    )
    engine.stops = frozenset()
    engine.start()
    number = iter(range(10**9))

    def run(prompts: list[list[int]], outputs: list[int]) -> tuple[list[list[int]], float]:
        by_request: dict[int, list[int]] = {}
        order: list[int] = []
        slots = threading.Semaphore(concurrent)
        left = threading.Semaphore(0)

        def deliver(token: Token) -> None:
            assert token.token is not None
            by_request[token.id].append(token.token)
            if token.finish is not None:
                slots.release()
                left.release()

        begun = time.perf_counter()
        for tokens, count in zip(prompts, outputs, strict=True):
            slots.acquire()
            id_ = next(number)
            order.append(id_)
            by_request[id_] = []
            sampling = Sampling(max_tokens=count, temperature=0.0)
            engine.submit(
                GenerationRequest(id=id_, prompt=tuple(tokens), sampling=sampling, arrival_s=time.monotonic()), deliver
            )
        for _ in prompts:
            left.acquire()
        return [by_request[id_] for id_ in order], time.perf_counter() - begun

    def measured() -> dict[str, float]:
        stats = engine.stats()
        assert stats.compilations == 0
        return {"steps": stats.steps, "host_s": stats.host_s, "step_s": stats.step_s}

    return run, measured, {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")}


def torch_round(folder: Path, asked: dict[str, Any]) -> tuple[Round, Callable[[], dict[str, float]], dict[str, str]]:
    """``generate`` of transformers, one static batch after another."""
    import torch
    import transformers

    torch.set_num_threads(asked["threads"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(prompts: list[list[int]], outputs: list[int]) -> tuple[list[list[int]], float]:
        tokens: list[list[int]] = []
        begun = time.perf_counter()
        for first in range(0, len(prompts), asked["concurrent"]):
            batch = slice(first, first + asked["concurrent"])
            most = max(outputs[batch])
            ids = torch.tensor(prompts[batch])
            with torch.inference_mode():
                answer = model.generate(
                    input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, min_new_tokens=most,
                    do_sample=False, eos_token_id=None, pad_token_id=0,
                )  # fmt: skip
            rows = answer[:, ids.shape[1] :].tolist()
            tokens += [row[:count] for row, count in zip(rows, outputs[batch], strict=True)]
        return tokens, time.perf_counter() - begun

    return run, lambda: {}, {name: importlib.metadata.version(name) for name in ("torch", "transformers")}


SIDES = {"rooftop": rooftop_round, "transformers": torch_round}


def serve_side(name: str, folder: Path) -> None:
    """Run in a process of its own: rounds as they are asked for, on standard input and output."""
    asked = json.loads((folder / "asked.json").read_text())
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    run, measured, versions = SIDES[name](folder, asked)
    print(json.dumps({"versions": versions}), file=answer, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        before, cpu = measured(), time.process_time()
        tokens, seconds = run(request["prompts"], request["outputs"])
        cpu = time.process_time() - cpu
        delta = {key: value - before[key] for key, value in measured().items()}
        print(
            json.dumps({"tokens": tokens, "seconds": seconds, "cpu_s": cpu, "measured": delta}), file=answer, flush=True
        )


def make_checkpoint(folder: Path, name: str) -> None:
    """A LLaMA with drawn weights, as a published checkpoint."""
    import jax
    import numpy as np

    from rooftop.checkpoints.huggingface import save_weights
    from rooftop.models import ModelConfig
    from rooftop.programs.parameters import describe

    layers, d, f, heads, kv_heads, vocab = MODELS[name]
    model = ModelConfig(
        name=name, family="llama", layers=layers, d_model=d, d_ff=f, heads=heads, kv_heads=kv_heads, d_head=d // heads,
        vocab=vocab, max_seq_len=2048,
    )  # fmt: skip
    random = np.random.default_rng(0)

    def drawn(parameter: Any) -> Any:
        if parameter.fan_in is None:
            return np.full(parameter.shape, parameter.value, np.float32)
        return random.normal(0, parameter.fan_in**-0.5, parameter.shape).astype(np.float32)

    save_weights(folder, model, jax.tree.map(drawn, describe(model)))


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch-python", default=sys.executable)
    parser.add_argument("--model", choices=MODELS, default="medium")
    parser.add_argument("--concurrent", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--outputs", type=int, nargs=2, default=[16, 128])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=8, help="requests of a round, in multiples of the concurrent")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        serve_side(options.side, options.folder)
        return
    cores = set(sorted(os.sched_getaffinity(0))[: options.threads])
    os.sched_setaffinity(0, cores)
    os.environ |= {"OMP_NUM_THREADS": str(len(cores)), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    if options.copies > 1:
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.copies}"
    # Threads that spin while others of the machine work would cost PyTorch most of its time.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "checkpoint"
        make_checkpoint(folder, options.model)
        for concurrent in options.concurrent:
            rows += compare(folder, options, concurrent, len(cores))
    if options.output:
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def compare(folder: Path, options: argparse.Namespace, concurrent: int, threads: int) -> list[dict[str, Any]]:
    """Rounds of both sides in turns; a row for each side."""
    import random

    asked = {
        "concurrent": concurrent, "copies": options.copies, "prompt": options.prompt, "outputs": options.outputs,
        "threads": threads,
    }  # fmt: skip
    (folder / "asked.json").write_text(json.dumps(asked))
    pythons = {"rooftop": sys.executable, "transformers": options.torch_python}
    workers, versions = {}, {}
    for name, python in pythons.items():
        command = [python, __file__, "--side", name, "--folder", str(folder)]
        workers[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = workers[name].stdout.readline()  # type: ignore[union-attr]
        if not line:
            raise SystemExit(f"{name} did not start")
        versions[name] = json.loads(line)["versions"]
    drawn = random.Random(0)
    vocab = MODELS[options.model][-1]
    rates: dict[str, list[float]] = {name: [] for name in workers}
    cpu_s: dict[str, list[float]] = {name: [] for name in workers}
    host_ms: list[float] = []
    for turn in range(options.rounds + 1):
        count = concurrent * options.batches
        prompts = [[drawn.randrange(1, vocab) for _ in range(options.prompt)] for _ in range(count)]
        outputs = [drawn.randint(*options.outputs) for _ in range(count)]
        tokens = {}
        for name, worker in workers.items():
            assert worker.stdin is not None and worker.stdout is not None
            print(json.dumps({"prompts": prompts, "outputs": outputs}), file=worker.stdin, flush=True)
            answer = json.loads(worker.stdout.readline())
            tokens[name] = answer["tokens"]
            if turn:
                rates[name].append(sum(outputs) / answer["seconds"])
                cpu_s[name].append(answer["cpu_s"])
                if answer["measured"]:
                    host_ms.append(1e3 * answer["measured"]["host_s"] / answer["measured"]["steps"])
        same = sum(one == other for one, other in zip(*tokens.values(), strict=True))
        if same < 0.9 * count:
            raise SystemExit(f"only {same} of {count} texts are the same on both sides")
    for worker in workers.values():
        worker.stdin.close()  # type: ignore[union-attr]
        worker.wait()
    ratio = statistics.median(a / b for a, b in zip(rates["rooftop"], rates["transformers"], strict=True))
    by_cpu = statistics.median(b / a for a, b in zip(cpu_s["rooftop"], cpu_s["transformers"], strict=True))
    print(
        f"{options.model}, {concurrent} concurrent, {threads} threads: "
        + ", ".join(f"{name} {statistics.median(values):.1f} tokens/s" for name, values in rates.items())
        + f", ratio {ratio:.2f}, by CPU time {by_cpu:.2f}; "
        f"host {statistics.median(host_ms):.2f} ms a step; {same} of {count} texts alike",
        flush=True,
    )
    return [
        {
            "model": options.model, "concurrent": concurrent, "requests": concurrent * options.batches,
            "copies": options.copies if name == "rooftop" else 1, "threads": threads, "prompt": options.prompt,
            "outputs": "{}-{}".format(*options.outputs), "side": name,
            "tokens_per_s": round(statistics.median(values), 2),
            "ratio_to_transformers": round(ratio, 3) if name == "rooftop" else 1.0,
            "ratio_by_cpu_time": round(by_cpu, 3) if name == "rooftop" else 1.0,
            "host_ms_per_step": round(statistics.median(host_ms), 3) if name == "rooftop" else "",
            "load_average": round(os.getloadavg()[1], 1),
            "versions": " ".join(f"{key} {value}" for key, value in versions[name].items()),
            "date": time.strftime("%Y-%m-%d"),
        }
        for name, values in rates.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main()
