"""Plans for GPUs next to their compiled programs, with no GPU: FLOPs, peak memory, collective bytes, expected time.

As ``bench/compiler/compile.py``, with the compiler for GPUs (``pip install 'rooftop[gpu-compile]'``), whose version is
that of jax. Writes bench/results/compile_gpu.csv, and a table of docs/evidence/accuracy.md.

    python bench/compiler/compile_gpu.py [NAME ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

from compile import case, main

RESULTS = Path(__file__).parents[1] / "results" / "compile_gpu.csv"
PAGE = Path(__file__).parents[2] / "docs" / "evidence" / "accuracy.md"
CASES = (
    case("h100-fsdp", "llama3-8b", "h100:8", "fsdp=8", "matmuls", 16),
    case("h100-fsdp-tensor", "llama3-8b", "h100:8", "fsdp=4,tensor=2", "block", 16),
    case("h100-two-nodes", "llama3-8b", "h100:8x2", "fsdp=16", "matmuls", 32, seq_len=8192),
    case("h100-70b", "llama3-70b", "h100:8x4", "fsdp=8,tensor=4", "matmuls", 64, seq_len=8192, microbatches=8),
    case("h200-70b", "llama3-70b", "h200:8x32", "fsdp=256", "block", 512, seq_len=8192),
    case("h200-405b", "llama3.1-405b", "h200:8x32", "fsdp=256", "block", 256, seq_len=8192),
    case("h100-moe", "mixtral-8x7b", "h100:8x2", "fsdp=2,expert=8", "block", 32, seq_len=8192, microbatches=4),
    case("b200-fsdp", "llama3-8b", "b200:8", "fsdp=8", "matmuls", 32, seq_len=8192),
    case("b200-moe", "qwen3-30b-a3b", "b200:8", "expert=8", "block", 32),
    case("a100-fsdp", "llama3-8b", "a100:8", "fsdp=8", "block", 16),
)


if __name__ == "__main__":
    main(sys.argv[1:], CASES, RESULTS, PAGE)
