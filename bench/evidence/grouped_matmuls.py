"""Write bench/results/grouped_matmuls.csv: measured times of grouped matmul kernels on TPUs, and the rates they give.

    pip install tokamax==0.0.17; python bench/evidence/grouped_matmuls.py      # no accelerator; some seconds

The times are those that tokamax's authors measured to choose tiles (its ``data/autotuning``), of ``ragged_dot`` in bf16
with group sizes drawn at random, as random routing gives. Of each shape it is the fastest tiles, with dims of 512 or
more in whole registers of 128. A tile of rows that two groups share is multiplied for both, so that a kernel executes

    rows / tile rows + groups - 1

of them, each in whole tiles of the other dims. ``useful`` is the share of a core's peak without that, ``executed`` with
it. The times on v5p are those of one of its two cores: shapes whose columns are one tile, of which a second core would
have none, are as fast as others. The medians of ``executed`` are ``matmul.grouped`` in achievable.toml;
no published run is priced with those of v6e.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

from rooftop.hardware import chip as find_chip

RESULTS = Path(__file__).parents[1] / "results" / "grouped_matmuls.csv"
#: Folders of tokamax by the chip that they are about.
CHIPS = {"v5p": "tpu_v5", "v6e": "tpu_v6_lite", "tpu7x": "tpu7x"}
#: What is contracted of both operands, by pass.
PASSES = {"forward": [[1], [1]], "inputs": [[1], [2]], "weights": [[0], [0]]}
COLUMNS = ("chip", "pass", "rows", "k", "n", "groups", "tile_rows", "tile_k", "tile_n", "ms", "useful", "executed")


def main() -> None:
    """Read the times, write the table, and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="data/autotuning of tokamax; by default of the one installed")
    folder: Path | None = parser.parse_args().folder
    if folder is None:
        installed = importlib.util.find_spec("tokamax")
        if installed is None or installed.origin is None:
            parser.error("tokamax is not installed: name its data/autotuning with --folder")
        folder = Path(installed.origin).parent / "data" / "autotuning"
    rows = [row for chip in CHIPS for row in measured(chip, folder / CHIPS[chip] / "pallas_mosaic_tpu_ragged_dot.json")]
    with RESULTS.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    for chip in CHIPS:
        for name in PASSES:
            shares = [float(row["executed"]) for row in rows if (row["chip"], row["pass"]) == (chip, name)]
            middle = median(shares)
            off = [abs(share / middle - 1) for share in shares]
            print(f"{chip} {name}: {middle:.3f} of {len(shares)} shapes, {fmean(off):.1%} off, {max(off):.1%} at most")


def measured(chip: str, table: Path) -> Iterator[dict[str, Any]]:
    """The fastest tiles of each shape, with the shares of the peak."""
    best: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text, times in json.loads(table.read_text(encoding="utf-8")).items():
        case = json.loads(text)
        contracted = case["ragged_dot_dimension_numbers"]["dot_dimension_numbers"][0]
        name = next((name for name, dims in PASSES.items() if dims == contracted), None)
        left, right = (re.fullmatch(r"bf16\[([\d,]+)\]", str(case[side])) for side in ("lhs", "rhs"))
        sizes = case["group_sizes"]
        if name is None or left is None or right is None or not isinstance(sizes, dict) or case["return_residuals"]:
            continue
        (rows, k), other = ([int(size) for size in side[1].split(",")] for side in (left, right))
        n = other[-2] if name == "inputs" else other[-1]
        if min(k, n) < 512 or k % 128 or n % 128:
            continue
        for tiles_text, result in times.items():
            tiles, ms = json.loads(tiles_text), median(result["evaluation_times_ms"])
            shape = (name, rows, k, n, sizes["num_groups"])
            if shape not in best or ms < best[shape]["ms"]:
                # A tile is no larger than its dim. For gradients of inputs some tables name the forward pass's dims.
                pair = (tiles["tile_k"], tiles["tile_n"])
                orders = [tuple(map(min, order, (k, n))) for order in (pair, pair[::-1])[: 1 + (name == "inputs")]]
                tile_k, tile_n = min(orders, key=lambda order: whole(k, order[0]) * whole(n, order[1]))
                own = {"tile_rows": tiles["tile_m"], "tile_k": tile_k, "tile_n": tile_n, "ms": ms}
                best[shape] = dict(zip(COLUMNS, (chip, *shape), strict=False)) | own
    known = find_chip(chip)
    for row in best.values():
        ms_at_peak = 2e3 * known.cores / known.flops_per_s["bf16"]
        visits = row["rows"] + (row["groups"] - 1) * row["tile_rows"]
        k, n = (whole(row[dim], row[f"tile_{dim}"]) for dim in "kn")
        yield row | {
            "useful": f"{row['rows'] * row['k'] * row['n'] * ms_at_peak / row['ms']:.4f}",
            "executed": f"{visits * k * n * ms_at_peak / row['ms']:.4f}",
        }


def whole(size: int, tile: int) -> int:
    """The size in whole tiles."""
    return -(-size // tile) * tile


if __name__ == "__main__":
    main()
