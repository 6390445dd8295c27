"""Speed of plans: candidates per second on one core, the wall time of a command, the CPU time of others.

    python bench/speed/plan.py                             # ours
    python bench/speed/plan.py --peer PEER_VENV/bin/python # and llm-analysis 0.2.2 (in a venv of its own), side by side

Runs alternate, and each figure is given as minimum, median and maximum: machines are noisy. NumPy runs on one thread.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time

COMMAND = [
    "plan",
    "train",
    "llama3-70b",
    "--on",
    "v5p:16x16x16",
    "--batch-tokens",
    "4Mi",
    "--seq",
    "4096",
    "--tokens",
    "15T",
    "--json",
]
#: Commands whose CPU seconds are measured too: mixtures of experts, odd slices, many pods, chips for a job, fleets.
COMMANDS = [
    "plan train deepseek-v3 --on h100:8x128 --batch-tokens 4Mi --seq 4096 --json",
    "plan train deepseek-v3 --on tpu7x:8x8x16 --batch-tokens 16Mi --seq 4096 --json",
    "plan train llama3.1-405b --on v5p:16x20x28 --batch-tokens 16Mi --seq 8192 --json",
    "plan train llama3.1-405b --on v5p:16x20x28@8 --batch-tokens 16Mi --seq 4096 --json",
    "plan train llama3-70b --on v5p:16x20x28@4 --batch-tokens 4Mi --seq 4096 --json",
    "plan train llama3-70b --on v5p,v6e,tpu7x --tokens 15T --days 60 --json",
    "plan serve deepseek-v3 --on v5e,v5p,v6e,tpu7x,h100,h200,b200 --requests-per-second 10 --tpot 50ms --json",
]
THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

SWEEP = """
import time
from rooftop.hardware import Slice
from rooftop.models import load_model
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import SweepOptions, sweep
from rooftop.plan.training.workload import Workload
problem = Problem(model=load_model("llama3-70b"), slice=Slice.parse("v5p:16x16x16"),
                  workload=Workload(batch_tokens=4 * 2**20, seq_len=4096))
for way in (True, False):
    start = time.process_time()
    result = sweep(problem, SweepOptions(exhaustive=way))
    seconds = time.process_time() - start
    print(result.expected_s.size, result.searched, seconds)
"""

PEER = """
import time, logging
from llm_analysis.analysis import LLMAnalysis, ActivationRecomputation, DSZeRO
from llm_analysis.config import (ParallelismConfig, get_model_config_by_name, get_gpu_config_by_name,
                                 get_dtype_config_by_name)
from llm_analysis.logger import logger
logger.setLevel(logging.CRITICAL)
model, gpu = get_model_config_by_name("upstage_Llama-2-70b-instruct-v2"), get_gpu_config_by_name("a100-sxm-80gb")
dtype, count, start = get_dtype_config_by_name("w16a16e16"), 0, time.process_time()
while time.process_time() - start < 2:
    for tensor in (1, 2, 4, 8):
        analysis = LLMAnalysis(model, gpu, dtype, ParallelismConfig(tp_size=tensor, pp_size=1, dp_size=512 // tensor))
        analysis.training(batch_size_per_gpu=1, gradient_accumulation_steps=1, seq_len=4096, total_num_tokens=10**12,
                          activation_recomputation=ActivationRecomputation.FULL, ds_zero=DSZeRO.STAGE_3)
        count += 1
print(count, count, time.process_time() - start)
"""


def rates(python: str, program: str) -> list[tuple[int, int, float]]:
    """(priced, searched, CPU seconds) of each line that ``program`` prints."""
    printed = subprocess.run(
        [python, "-c", program], check=True, capture_output=True, text=True, env=os.environ | THREADS
    ).stdout
    return [(int(a), int(b), float(c)) for a, b, c in (line.split() for line in printed.strip().splitlines())]


def cpu_and_memory(command: str) -> tuple[float, float]:
    """CPU seconds and largest resident bytes of ``rooftop COMMAND``."""
    process = subprocess.Popen(
        [sys.executable, "-m", "rooftop", *command.split()], stdout=subprocess.DEVNULL, env=os.environ | THREADS
    )
    _, status, usage = os.wait4(process.pid, 0)
    # Status 1 is an answer: no program runs the plan.
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        raise SystemExit(f"rooftop {command}: status {os.waitstatus_to_exitcode(status)}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024.0


def spread(values: list[float]) -> dict[str, float]:
    """Minimum, median and maximum."""
    return {"min": min(values), "median": statistics.median(values), "max": max(values)}


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--peer", help="a Python that has llm-analysis")
    chosen = parser.parse_args()
    priced, pruned, wall, peer = [], [], [], []
    candidates = searched = 0
    measured: dict[str, list[tuple[float, float]]] = {command: [] for command in COMMANDS}
    for _ in range(chosen.runs):
        (candidates, searched, whole), (_, _, bounded) = rates(sys.executable, SWEEP)
        priced.append(candidates / whole)
        pruned.append(searched / bounded)
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "rooftop", *COMMAND], check=True, stdout=subprocess.DEVNULL, env=os.environ | THREADS
        )
        wall.append(time.perf_counter() - start)
        for command, runs in measured.items():
            runs.append(cpu_and_memory(command))
        if chosen.peer:
            ((count, _, seconds),) = rates(chosen.peer, PEER)
            peer.append(count / seconds)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        "cores": os.cpu_count(),
        "candidates": candidates,
        "candidates_priced_per_cpu_second": spread(priced),
        "candidates_searched_per_cpu_second": spread(pruned),
        "command": "rooftop " + " ".join(COMMAND),
        "command_wall_s": spread(wall),
        "commands": {
            f"rooftop {command}": {
                "cpu_s": spread([seconds for seconds, _ in runs]),
                "resident_bytes": max(nbytes for _, nbytes in runs),
            }
            for command, runs in measured.items()
        },
    }
    if peer:
        result["llm_analysis_evaluations_per_cpu_second"] = spread(peer)
        result["ratio_priced"] = statistics.median(priced) / statistics.median(peer)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
