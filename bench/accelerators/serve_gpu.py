"""Step times of the serving engine on one accelerator, beside the plan's lower bound; and the MFU of its prefill.

    python bench/accelerators/serve_gpu.py --model llama3-8b --on h200:1x1 -o bench/results/serve_h200.csv

Weights are drawn in bfloat16. For each batch so many prompts are prefilled and generated from together; a step's time
is from its decision on the host until its tokens are known there, the mean over all steps of a full batch. The bound is
that of ``rooftop plan serve`` for the same batch and the context in the middle of the answer. MFU counts two FLOPs for
each parameter of the layers and the unembedding, and for each pair of query and key of the causal half. On a CPU, in
float32 and with ``--model`` a small ``config.json``, it only shows that all of this runs.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rooftop.hardware import Slice
from rooftop.models import ModelConfig, count_params, load_model
from rooftop.plan.serving.answer import plan_serving
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ServingWorkload
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.configuration import Configuration, Shapes
from rooftop.serve.engine.engine import PagedEngine
from rooftop.serve.engine.loading import drawn, load
from rooftop.serve.engine.requests import EngineStats, GenerationRequest, Sampling, Token


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b")
    parser.add_argument("--on", default="h200:1x1", help="the slice whose bound is taken")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--outputs", type=int, default=128)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    model = load_model(options.model)
    if options.layers is not None:
        windows = model.layer_windows[: options.layers]
        model = replace(model, layers=options.layers, layer_windows=windows)
    max_model_len = -(-(options.prompt + options.outputs) // 256) * 256
    most = max(options.batches)
    engine = load(
        drawn(model),
        Configuration(
            policy=Policy(max_batch=most),
            pages=most * max_model_len // 16,
            max_model_len=max_model_len,
            prefix_cache=False,
            shapes=Shapes(
                batches=tuple(sorted(options.batches)),
                widths=(options.prompt,),
                contexts=(max_model_len,),
                prefill_tokens=options.prompt,
            ),
        ),
    )
    begun = time.perf_counter()
    engine.start()
    compiled_s = time.perf_counter() - begun
    rows = [measure(engine, model, options, batch) | {"compile_s": round(compiled_s, 1)} for batch in options.batches]
    engine.drain(10)
    if options.output:
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def measure(engine: PagedEngine, model: ModelConfig, options: argparse.Namespace, batch: int) -> dict[str, Any]:
    """One batch, once to warm up and once to measure."""
    random = np.random.default_rng(batch)
    for turn in range(2):
        before, left = engine.stats(), threading.Semaphore(0)

        def deliver(token: Token, left: threading.Semaphore = left) -> None:
            if token.finish is not None:
                left.release()

        for number in range(batch):
            prompt = tuple(random.integers(1, model.vocab, options.prompt).tolist())
            sampling = Sampling(max_tokens=options.outputs, temperature=0.0)
            request = GenerationRequest(
                id=1000 * turn + number, prompt=prompt, sampling=sampling, arrival_s=time.monotonic()
            )
            engine.submit(request, deliver)
        for _ in range(batch):
            left.acquire()
    after = engine.stats()
    step_s = mean_s(before, after, tokens=0, sequences=batch)
    prefill_s = mean_s(before, after, tokens=options.prompt, sequences=1)
    workload = ServingWorkload(
        prompt=options.prompt, generate=options.outputs, batch_seqs=batch, context=options.prompt + options.outputs // 2
    )
    slice_ = Slice.parse(options.on)
    plan = plan_serving(ServingProblem(model=model, slice=slice_, workload=workload, mode="interleaved")).plan
    table = 0 if model.tied_embeddings else model.vocab * model.d_model
    pairs = options.prompt**2 / 2 * model.layers * model.heads * (model.d_head + model.d_value)
    # The unembedding is only multiplied for the last token of a prompt.
    weights = count_params(model).active - table - model.vocab * model.d_model
    flops = 2 * (weights * options.prompt + model.vocab * model.d_model + pairs)
    mfu = flops / prefill_s / slice_.chip.flops_per_s["bf16"]
    row = {
        "model": model.name, "layers": model.layers, "batch": batch, "prompt": options.prompt,
        "outputs": options.outputs, "device": jax.devices()[0].device_kind, "step_ms": round(1e3 * step_s, 3),
        "bound_ms": round(1e3 * plan.lower_s, 3), "ratio": round(step_s / plan.lower_s, 3),
        "host_ms": round(1e3 * (after.host_s - before.host_s) / (after.steps - before.steps), 3),
        "prefill_ms": round(1e3 * prefill_s, 2), "prefill_mfu": round(mfu, 4),
        "jax": importlib.metadata.version("jax"), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip
    print(row, flush=True)
    return row


def mean_s(before: EngineStats, after: EngineStats, *, tokens: int, sequences: int) -> float:
    """Mean seconds of the program of that size between two readings."""
    totals = [0.0, 0.0]
    for sign, stats in ((-1, before), (1, after)):
        for program in stats.program_times:
            if (program.tokens, program.sequences) == (tokens, sequences):
                totals[0] += sign * program.seconds
                totals[1] += sign * program.runs
    return totals[0] / totals[1]


if __name__ == "__main__":
    main()
