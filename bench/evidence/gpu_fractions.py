"""The curves of GPUs in achievable.toml, fitted to published measurements by shape.

    python bench/evidence/gpu_fractions.py              # prints each fit as TOML, with its residual; a few seconds

``gpu_microbenchmarks.csv`` has the measurements: matmuls of cuBLAS (a, b, c: m, k, n), attention (a, b, c: length,
heads, head size), NCCL in one NVLink domain (a, b: ranks, bytes). docs/evidence/achievable.md has the formulas.
Residuals are mean relative errors of the seconds. Each fit minimises squared logarithms.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from rooftop.hardware import chip as find_chip

ROWS = Path(__file__).with_name("gpu_microbenchmarks.csv")
CHIPS = ("a100", "h100", "h200", "b200", "b300", "gb200", "gb300")
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
#: Largest block of scores that a kernel skips as a whole.
BLOCK = 128
#: The share of HBM's rate that a copy reaches (achievable.toml).
HBM = 0.9
#: NCCL uses other protocols for fewer bytes.
FEW = 2**22

Floats = npt.NDArray[np.float64]


def rows() -> list[dict[str, str]]:
    """The measurements."""
    with ROWS.open(encoding="utf-8") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def select(table: Sequence[dict[str, str]], chip: str, what: str, dtype: str | None = None) -> Floats:
    """(batch, a, b, c, value) of the measurements of one kind on a chip, [R, 5]."""
    columns = ("batch", "a", "b", "c", "value")
    chosen = [
        [float(row[column] or 0) for column in columns]
        for row in table
        if row["chip"] == chip and row["what"] == what and dtype in (None, row["dtype"])
    ]
    return np.array(chosen).reshape(-1, 5)


def fit(
    seconds: Floats, model: Callable[[Floats], Floats], start: Sequence[float], high: Sequence[float]
) -> tuple[Floats, float, float]:
    """The parameters that fit ``model`` to ``seconds``, the mean and the largest relative error."""
    result = least_squares(lambda x: np.log(model(x) / seconds), start, bounds=(np.full(len(start), 1e-9), high))
    errors = np.abs(model(result.x) / seconds - 1)
    return result.x, float(errors.mean()), float(errors.max())


def matmul(table: Sequence[dict[str, str]], chip: str, dtype: str) -> str | None:
    """Matmuls with 1,024 rows and more."""
    # XLA's table of b200 ("matmul of 8 bits", no larger than 4,096) has matmuls alone: their fit is too fast for larger
    # ones.
    measured = select(table, chip, "matmul", dtype)
    measured = measured[measured[:, 0] == 1]
    quantises = dtype == "f8"
    if not len(measured):
        return None
    count, m, k, n, rate = measured.T
    flops, result_size = 2 * count * m * k * n, count * m * n
    spec = find_chip(chip)
    peak = spec.flops_per_s["bf16" if dtype == "bf16" else "f8_e4m3"]
    # TensorRT-LLM quantises the left operand: two bytes read, one written.
    before = 3 * m * k / (HBM * spec.hbm_bytes_per_s) * quantises
    (share, start, result), mean, largest = fit(
        flops / rate / 1e12,
        lambda x: flops / peak / x[0] + x[1] * 1e-6 + result_size * x[2] * 1e-12 + before,
        (0.8, 5, 0.1), (1, 100, 10),
    )  # fmt: skip
    return (
        f"[{chip}.matmul.{16 if dtype == 'bf16' else 8}-bit]\npeak = {share:.3f}\nstart_s = {start:.1f}e-6\n"
        f"result_s = {result:.2f}e-12\n# {len(m)} matmuls, residual {mean:.1%} mean, {largest:.0%} at most"
    )


def batches(table: Sequence[dict[str, str]], chip: str) -> str | None:
    """Two and four matmuls at once."""
    measured = select(table, chip, "matmul", "bf16")
    measured = measured[measured[:, 0] > 1]
    if not len(measured):
        return None
    count, m, k, n, rate = measured.T
    flops, spec = 2 * m * k * n, find_chip(chip)

    def model(x: Floats) -> Floats:
        moved = 2 * ((m * k + k * n) / x[1] + m * n / x[2])
        return x[0] * 1e-6 + count * np.maximum(flops / x[3] / spec.flops_per_s["bf16"], moved / spec.hbm_bytes_per_s)

    (start, inputs, results, share), mean, largest = fit(
        count * flops / rate / 1e12, model, (5, 0.9, 0.5, 0.8), (100, 1, 1, 1)
    )
    return (
        f"[{chip}.matmul.batch]\nstart_s = {start:.1f}e-6\ninputs = {inputs:.2f}\nresults = {results:.2f}\n"
        f"# {len(m)} batches, peak {share:.2f}, residual {mean:.1%} mean, {largest:.0%} at most"
    )


def attention(table: Sequence[dict[str, str]], chip: str, what: str, matmuls: int) -> list[str]:
    """Kernels by head size: the share of peak, and seconds of each query of a head on top."""
    measured = select(table, chip, what)
    lines = []
    for size in sorted(set(measured[:, 3])):
        batch, length, heads, _, rate = measured[measured[:, 3] == size].T
        causal = "causal" in what
        queries = batch * heads * length
        useful = 2 * matmuls * queries * length * size * (0.5 if causal else 1)
        flops = 2 * matmuls * size * queries * ((length + BLOCK) / 2 if causal else length)
        peak = find_chip(chip).flops_per_s["bf16"]
        started = not what.endswith("cuDNN")
        (share, query, start), mean, largest = fit(
            useful / rate / 1e12,
            lambda x, flops=flops, peak=peak, queries=queries, started=started: (  # type: ignore[misc]
                flops / peak / x[0] + queries * x[1] * 1e-12 + x[2] * 1e-6 * started
            ),
            (0.6, 10, 5), (1, 1e4, 100),
        )  # fmt: skip
        lines.append(
            f"# {chip} {what} {size:.0f}: share {share:.3f}, query {query:.0f} ps, start {start * started:.0f} us; "
            f"{len(rate)} kernels, residual {mean:.1%} mean, {largest:.0%} at most"
        )
    return lines


def collective(table: Sequence[dict[str, str]], chip: str, kind: str) -> str:
    """A collective by ranks: its start, and the share of a GPU's NVLink rate; the same for few bytes."""
    every = select(table, chip, kind)
    ranks = sorted(set(every[:, 1]))
    large = [_line(chip, kind, every[(every[:, 1] == count) & (every[:, 2] >= FEW)]) for count in ranks]
    # A protocol for few bytes that were faster for many, too, would be used for them.
    small = [
        _line(chip, kind, every[(every[:, 1] == count) & (every[:, 2] < FEW)], most=share)
        for count, (_, share, _) in zip(ranks, large, strict=True)
    ]
    figures, residuals = [], []
    for lines in (large, small):
        starts, shares, errors = zip(*lines, strict=True)
        starts = ", ".join(f"{start:.1f}e-6" for start in starts)
        figures.append(f"start_s = [{starts}], share = [{', '.join(f'{share:.2f}' for share in shares)}]")
        residuals.append(f"{min(errors):.0%} to {max(errors):.0%}")
    return (
        f"{kind} = {{ ranks = {[int(count) for count in ranks]}, {figures[0]}, small = {{ {figures[1]} }} }} "
        f"# residual {', '.join(residuals)}"
    )


def _line(chip: str, kind: str, measured: Floats, most: float = 1.0) -> tuple[float, float, float]:
    """Start in us, the share of the rate, ``most`` at most, and the residual, for groups of one size."""
    _, ranks, nbytes, _, us = measured.T
    sent = nbytes * (ranks - 1) / ranks * (2 if kind == "all_reduce" else 1) / find_chip(chip).ici_bytes_per_s
    (start, share), mean, _ = fit(us * 1e-6, lambda x: x[0] * 1e-6 + sent / x[1], (10, most / 2), (500, most))
    return float(start), float(share), mean


def main() -> None:
    """Print all fits."""
    table = rows()
    for chip in CHIPS:
        for dtype in ("bf16", "f8"):
            print(matmul(table, chip, dtype) or f"# {chip}: no {dtype} matmuls")
        print(batches(table, chip) or f"# {chip}: no batches")
        for what, count in (
            ("attention fwd causal", 2), ("attention fwd causal cuDNN", 2), ("attention fwd cuDNN", 2),
            ("attention bwd cuDNN", 5),
        ):  # fmt: skip
            print(*attention(table, chip, what, count), sep="\n")
        if len(select(table, chip, "all_gather")):
            print(f"[{chip}.collectives]", *(collective(table, chip, kind) for kind in KINDS), sep="\n")


if __name__ == "__main__":
    main()
