"""Cost of splitting the engine's cache over ``context`` by sequences or by the tokens of pages, on a CPU.

    python bench/speed/serve_kv_split.py > bench/results/serve_kv_split.csv

Eight emulated devices, ``tensor=2,context=4``, a LLaMA of 4 layers and D 512 with 2 key/value heads, weights drawn,
float32; prompts of 700 tokens, answers of 64, all asked for at once. Both kinds take turns in one process; a row is a
round. CPU time is that of all threads: emulated devices share the cores, so that the clock says little of devices that
work side by side, and a busy machine changes CPU time less.
"""

from __future__ import annotations

import csv
import os
import sys
import threading
import time
from dataclasses import replace
from datetime import UTC, datetime

PROMPT, ANSWER, MOST, ROUNDS = 700, 64, 32, 3


def main() -> None:
    """Write the table."""
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    import jax
    import numpy as np

    from rooftop.capabilities import KV_SPLITS
    from rooftop.models import load_model
    from rooftop.scheduling.serving.scheduler import Policy
    from rooftop.serve.engine.configuration import Configuration, Shapes
    from rooftop.serve.engine.engine import PagedEngine
    from rooftop.serve.engine.loading import drawn, load
    from rooftop.serve.engine.requests import GenerationRequest, Sampling, Token

    model = replace(
        load_model("llama3-8b"), name="small", d_model=512, layers=4, heads=16, kv_heads=2, d_head=32, d_ff=1408,
        vocab=1024, max_seq_len=2048,
    )  # fmt: skip
    configuration = Configuration(
        policy=Policy(max_batch=MOST, chunk_tokens=512),
        pages=2400,
        max_model_len=1024,
        mesh=(("tensor", 2), ("context", 4)),
        prefix_cache=False,
        shapes=Shapes(batches=(4, MOST), widths=(256,), contexts=(1024,), prefill_tokens=256),
    )
    compiled = {kind: load(drawn(model), replace(configuration, kv_split=kind)) for kind in KV_SPLITS}
    for engine in compiled.values():
        engine.start()
        engine.drain(0.0)
    tokens = np.random.default_rng(0).integers(0, model.vocab, (MOST, PROMPT)).tolist()
    columns = [
        "sequences",
        "kv_split",
        "cpu_s",
        "seconds",
        "step_ms",
        "compilations",
        "load_average",
        "versions",
        "date",
    ]
    table = csv.DictWriter(sys.stdout, columns, lineterminator="\n")
    table.writeheader()
    for _ in range(ROUNDS):
        for sequences in (MOST, 1):
            for kind, program in compiled.items():
                engine = PagedEngine(program.replicas, program.configuration, max_model_len=program.max_model_len)
                engine.start()
                ended = threading.Semaphore(0)

                def deliver(token: Token, ended: threading.Semaphore = ended) -> None:
                    if token.finish is not None:
                        ended.release()

                began_s, cpu_s = time.perf_counter(), time.process_time()
                for number in range(sequences):
                    sampling = Sampling(max_tokens=ANSWER, temperature=0.0)
                    request = GenerationRequest(
                        id=number, prompt=tuple(tokens[number]), sampling=sampling, arrival_s=began_s
                    )
                    engine.submit(request, deliver)
                for _ in range(sequences):
                    ended.acquire()
                cpu_s, seconds = time.process_time() - cpu_s, time.perf_counter() - began_s
                stats = engine.stats()
                engine.drain(0.0)
                steps = max(
                    (program for program in stats.program_times if not program.tokens),
                    key=lambda program: (program.runs, program.sequences),
                )
                table.writerow(
                    {
                        "sequences": sequences, "kv_split": kind, "cpu_s": f"{cpu_s:.2f}", "seconds": f"{seconds:.2f}",
                        "step_ms": f"{1e3 * steps.seconds / steps.runs:.1f}", "compilations": stats.compilations,
                        "load_average": f"{os.getloadavg()[0]:.1f}", "versions": f"jax {jax.__version__}",
                        "date": datetime.now(UTC).date().isoformat(),
                    }
                )  # fmt: skip
                sys.stdout.flush()


if __name__ == "__main__":
    main()
