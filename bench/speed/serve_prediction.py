"""Simulated latencies of a trace next to those that clients of a server measured, on this machine's CPU.

    python bench/speed/serve_prediction.py -o bench/results/serve_prediction.csv

``rooftop serve`` runs in a process of its own, over HTTP, a LLaMA with drawn weights (a model of
bench/speed/serve_cpu.py); traces are drawn at ``--rates`` with as many seeds. The simulator has the scheduler of the
server, the lengths and the times at which requests were sent, and as step times the means that the engine counted
meanwhile (/metrics): nothing is fitted. What passes outside the engine, ``outside_ttft_ms`` in the mean, it does not
know of. A replay before the first one warms both sides up. Where others use the machine (``load_average``, of the last
minute), steps of one program take now this and now that long, and a simulation in which each takes the mean is not of
what was measured.

``--engine`` has copies serve, or two parts. The file has one such table after another.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from serve_cpu import MODELS, make_checkpoint

from rooftop.checkpoints.tokenizer import train_bpe
from rooftop.serve.client.prediction import PredictionInput, deployment_of, measured_times, outside_s, predict
from rooftop.serve.client.replay import ReplayTarget, prompts_of, replay
from rooftop.simulate.serving.metrics import Targets
from rooftop.simulate.serving.traces import Lengths, draw_trace


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="medium")
    parser.add_argument("--rates", type=float, nargs="+", default=[1, 2, 3], help="requests a second")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--prompt", default="32:256")
    parser.add_argument("--generate", default="16:64")
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--engine", default="", help="more options of rooftop serve: '--mesh data=2 --devices 2'")
    parser.add_argument("--port", type=int, default=8017)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / options.model
        make_checkpoint(folder, options.model)
        train_bpe(["the quick brown fox jumps over the lazy dog"] * 9, 300).save(folder)
        command = [
            sys.executable, "-m", "rooftop", "serve", str(folder), "--port", str(options.port),
            "--batch-seqs", str(options.max_batch), "--max-model-len", "512", "--json",
            *shlex.split(options.engine),
        ]  # fmt: skip
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            if server.stdout is None or not json.loads(server.stdout.readline() or "{}"):
                raise SystemExit("the server did not start")
            ask(options, rate=max(options.rates), seed=options.seeds)
            rows = [ask(options, rate=rate, seed=seed) for rate in options.rates for seed in range(options.seeds)]
        finally:
            server.terminate()
            server.wait()
    if options.output:
        with options.output.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def ask(options: argparse.Namespace, *, rate: float, seed: int) -> dict[str, Any]:
    """One replay, and its simulation."""
    url = f"http://127.0.0.1:{options.port}"
    trace = draw_trace(
        requests_per_second=rate,
        requests=round(rate * options.seconds),
        prompt=Lengths.parse(options.prompt, "prompt"),
        output=Lengths.parse(options.generate, "generate"),
        seed=seed,
    )
    # The tokenizer is smaller than the model: it can spell what comes back.
    target = ReplayTarget(url=url, model=options.model, vocab=300)
    before = PredictionInput.read(url)
    replayed = asyncio.run(replay(trace, prompts_of(trace, 300, seed), target, Targets()))
    after = PredictionInput.read(url)
    assert before is not None and after is not None and len(replayed.served) == len(trace)
    policy, _ = after.policy
    measured = replayed.metrics
    assert measured.ttft_s is not None
    deployment = deployment_of(after, measured_times(before, after), policy=policy, prefix_cache=False)
    predicted = predict(replayed.trace(), deployment, Targets())
    row: dict[str, Any] = {
        "model": options.model, "engine": options.engine or "one server", "requests_per_second": rate, "seed": seed,
        "requests": len(trace), "prompt": options.prompt, "generate": options.generate,
    }  # fmt: skip
    for name in ("ttft", "tpot"):
        ours, theirs = (getattr(figures, f"{name}_s").p50 for figures in (predicted, measured))
        row |= {
            f"measured_{name}_p50_ms": round(1e3 * theirs, 2),
            f"predicted_{name}_p50_ms": round(1e3 * ours, 2),
            f"{name}_p50_off": round(ours / theirs - 1, 3),
        }
    outside = outside_s(before, after, measured.ttft_s.mean)
    assert outside is not None
    row |= {
        "measured_ttft_mean_ms": round(1e3 * measured.ttft_s.mean, 2),
        "predicted_ttft_mean_ms": round(1e3 * predicted.ttft_s.mean, 2),
        "outside_ttft_ms": round(1e3 * outside, 2),
        "load_average": round(os.getloadavg()[0], 1),
        "jax": importlib.metadata.version("jax"),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(row, flush=True)
    return row


if __name__ == "__main__":
    main()
