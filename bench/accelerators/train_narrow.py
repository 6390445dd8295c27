"""Losses of a small LLaMA trained with matmuls in bf16, int8 and f8_e4m3, on the same batches from the same weights.

    python bench/accelerators/train_narrow.py --steps 300 -o bench/results/train_narrow.csv

The text is the sources of Python's standard library, byte by byte. Everything but the layers' matmuls is in bf16, and
every dtype is trained from two sets of initial weights: how far the runs of one dtype are apart says what a difference
between dtypes means. A CPU multiplies float8 in float32, which gives the same products. Columns: dtype, seed, step, and
the mean loss of the ten steps up to it, in nats a byte.
"""

from __future__ import annotations

import argparse
import csv
import os
import sysconfig
from pathlib import Path

import jax
import numpy as np

from rooftop.capabilities import MATMUL_DTYPES
from rooftop.models import ModelConfig
from rooftop.programs.model.layer import Computation
from rooftop.programs.parameters import Batch
from rooftop.programs.training.program import Optimizer, TrainProgram
from rooftop.programs.training.step import init_state, train_step

MODEL = ModelConfig(
    name="bytes", family="llama", layers=4, d_model=128, d_ff=384, heads=4, kv_heads=2, d_head=32, vocab=256,
    max_seq_len=128,
)  # fmt: skip
SEQUENCES, SEQ_LEN, MEAN_OF = 8, 128, 10
DTYPES = ("bf16", *MATMUL_DTYPES)
SEEDS = (0, 1)


def text() -> np.ndarray:
    """The bytes of the standard library's modules, in the order of their names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def losses(dtype: str, seed: int, steps: int, data: np.ndarray) -> list[float]:
    """The loss of every step; batches are the same for all dtypes and seeds."""
    computation = Computation(model=MODEL, remat="none", attention="chunked", matmul=None if dtype == "bf16" else dtype)
    program = TrainProgram(
        computation=computation, batch=SEQUENCES, seq_len=SEQ_LEN, compute_dtype="bf16",
        optimizer=Optimizer(learning_rate=1e-3),
    )  # fmt: skip
    types = (jax.sharding.AxisType.Explicit,)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("fsdp",), axis_types=types)
    rng = np.random.default_rng(0)
    state = init_state(program, jax.random.key(seed), mesh)
    result = []
    with jax.set_mesh(mesh):
        step = jax.jit(train_step(program, program.specs(mesh)), donate_argnums=0)
        for _ in range(steps):
            starts = rng.integers(0, len(data) - SEQ_LEN - 1, SEQUENCES)
            rows = np.stack([data[start : start + SEQ_LEN + 1] for start in starts]).astype(np.int32)
            state, metrics = step(state, Batch(tokens=rows[:, :-1], targets=rows[:, 1:]))
            result.append(float(metrics.loss))
    return result


def main() -> None:
    """Train every dtype from every seed, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("-o", "--output", type=Path, required=True)
    chosen = parser.parse_args()
    data = text()
    with chosen.output.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("dtype", "seed", "step", "loss"))
        for dtype in DTYPES:
            for seed in SEEDS:
                curve = losses(dtype, seed, chosen.steps, data)
                for end in range(MEAN_OF, chosen.steps + 1, MEAN_OF):
                    writer.writerow((dtype, seed, end, f"{np.mean(curve[end - MEAN_OF : end]):.4f}"))
                last = np.mean(curve[-5 * MEAN_OF :])
                print(f"{dtype} seed {seed}: {last:.4f} over the last {5 * MEAN_OF} steps", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
