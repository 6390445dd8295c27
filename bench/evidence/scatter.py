"""Gradients that XLA:TPU scatters, and those that it sums on every device: small programs, compiled ahead of time.

    python bench/evidence/scatter.py [kinds | rows]

Each program multiplies inputs and output gradients whose tokens are split over fsdp, and keeps a part of the rows of
the product on each device, as the backward pass of a weight does. No TPU needed, a few seconds a case. ``kinds`` writes
bench/results/scatter.csv, which collective a gradient becomes; ``rows`` writes bench/results/scatter_rows.csv, how many
rows of each part are scattered, padding included; without an argument both are written.
``rooftop.arrays.tiles.summed_whole`` and ``scattered_rows`` are the rules; tests hold them against the results.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from math import lcm
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import P

import rooftop
from rooftop.arrays import parse_axes
from rooftop.core.files import write_text
from rooftop.explain.compiled.report import CompiledReport

RESULTS = Path(__file__).parents[1] / "results" / "scatter.csv"
COLUMNS = ("slice", "mesh", "parts", "shape", "kind", "jax", "libtpu", "date")
ROWS_RESULTS = RESULTS.with_name("scatter_rows.csv")
ROWS_COLUMNS = ("slice", "mesh", "parts", "shape", "rows", "jax", "libtpu", "date")
TOKENS = 4096
#: Slice, mesh, devices along fsdp, and weights: [rows, columns], or [rows, heads, head size].
CASES: tuple[tuple[str, str, int, tuple[tuple[int, ...], ...]], ...] = (
    (
        "v6e:4x8", "fsdp=4,expert=8", 4,
        (
            (2880, 64, 64), (3072, 64, 64), (2880, 32, 128), (576, 32, 128), (480, 32, 128), (3584, 1, 128),
            (2048, 16, 192), (512, 16, 256), (2880, 4096), (2880, 32), (480, 4096), (400, 4096), (4096, 2880),
            (2048, 576), (2880, 131072), (4608, 131072), (2880, 201088), (2880, 151936), (1440, 201088), (2880, 201216),
            (2880, 152448), (2880, 65152), (2880, 65792), (2880, 32896), (4096, 128256),
        ),
    ),
    ("v6e:4x8", "fsdp=8,expert=4", 8, ((2880, 64, 64), (4096, 64, 64), (3584, 2, 128))),
    ("v6e:4x8", "fsdp=16,expert=2", 16, ((2880, 4096), (2880, 32, 128), (4096, 32, 128), (2048, 576))),
    ("v5e:8x16", "fsdp=16,expert=8", 16, ((2048, 576), (4096, 576), (6144, 576), (2048, 16, 192))),
    ("v5p:4x4x4", "fsdp=16,tensor=4", 16, ((4096, 151936), (4096, 75968), (4096, 37984), (5120, 8, 128))),
    ("v5e:4x8", "fsdp=8,tensor=4", 8, ((4096, 151936), (2560, 4, 256))),
    ("tpu7x:2x2x4", "fsdp=8,tensor=4", 8, ((4096, 151936), (3072, 8, 128), (2880, 64, 64))),
    ("tpu7x:2x2x4", "fsdp=16,tensor=2", 16, ((3072, 64128), (3072, 32064))),
    (
        "tpu7x:2x2x4", "fsdp=32", 32,
        ((3072, 128256), (3072, 32000), (4096, 44032), (4096, 49664), (4096, 52736), (4096, 54784), (4096, 57856)),
    ),
    ("tpu7x:4x4x4", "fsdp=64,tensor=2", 64, ((3072, 64128), (3072, 4096), (4096, 44032), (4096, 54272))),
    # Long rings, and parts that are padded to whole tiles.
    (
        "v5p:4x4x12", "fsdp=96,tensor=2", 96,
        ((4128, 64128), (4608, 64128), (4128, 32000), (4128, 16000), (4128, 7168), (2112, 4096)),
    ),
    ("v5p:4x4x8", "fsdp=8,tensor=16", 8, ((4096, 128256),)),
    ("v5p:4x4x8", "fsdp=16,tensor=8", 16, ((4096, 128256), (4096, 32000))),
    (
        "v5p:4x4x8", "fsdp=32,tensor=4", 32,
        ((4096, 103424), (4096, 62464), (4096, 54272), (4096, 44032), (4096, 32064), (5120, 27648)),
    ),
    ("v5p:4x4x4", "fsdp=16,tensor=4", 16, ((4096, 32064), (8192, 32064))),
    ("v5p:4x4x4", "fsdp=32,tensor=2", 32, ((4096, 64128),)),
    ("v5p:4x4x8", "fsdp=64,tensor=2", 64, ((4096, 64128), (4096, 14336), (5120, 13824), (5120, 8192))),
    ("v5p:4x4x8", "data=2,fsdp=64", 64, ((4096, 128256), (5120, 152064), (5120, 27648), (27648, 5120), (5120, 5120))),
    (
        "v5p:8x8x4", "fsdp=128,tensor=2", 128,
        ((8192, 7168), (8192, 8192), (7168, 8192), (16384, 13312), (13312, 16384), (4096, 14336), (8192, 32064)),
    ),
    (
        "v5p:8x8x8", "fsdp=256,tensor=2", 256,
        (
            (8192, 3584), (8192, 5120), (8192, 5632), (8192, 6144), (8192, 6656), (8192, 7168), (8192, 8192),
            (8192, 8704), (8192, 9216), (8192, 14336), (7168, 8192), (13312, 16384), (4096, 8192), (8192, 32064),
            (16384, 3584), (16384, 6656),
        ),
    ),
    (
        "v5p:8x8x16", "fsdp=512,tensor=2", 512,
        (
            (8192, 6144), (8192, 7168), (8192, 8192), (7168, 8192), (13312, 16384), (4096, 8192), (2048, 8192),
            (16384, 13312),
        ),
    ),
    (
        "v5p:16x16x16", "fsdp=1024,tensor=4", 1024,
        ((8192, 7168), (7168, 8192), (2048, 8192), (8192, 6144), (8192, 8192), (8192, 32064), (16384, 6656)),
    ),
    ("v5p:16x20x28", "fsdp=2240,tensor=4", 2240, ((17920, 13312), (13440, 16384), (4480, 16384))),
    ("v5p:16x20x28", "fsdp=1120,tensor=8", 1120, ((17920, 6656), (6720, 16384))),
    ("v5e:8x16", "data=2,fsdp=64", 64, ((4096, 128256),)),
    ("v5e:16x16", "fsdp=64,tensor=4", 64, ((5120, 6912),)),
    ("v6e:16x16", "fsdp=64,tensor=4", 64, ((5120, 6912),)),
    ("v6e:16x16", "fsdp=128,tensor=2", 128, ((2048, 8192),)),
    ("v6e:8x8", "fsdp=8,tensor=8", 8, ((4096, 16032),)),
)  # fmt: skip

#: The same for weights of experts: [rows, experts on a device, columns].
EXPERTS: tuple[tuple[str, str, int, tuple[tuple[int, int, int], ...]], ...] = (
    ("v5e:8x16", "fsdp=16,expert=8", 16, ((1408, 8, 2048), (2048, 8, 1408))),
    ("v6e:4x8", "fsdp=8,expert=4", 8, ((1408, 16, 2048),)),
    ("v6e:4x8", "fsdp=16,expert=2", 16, ((1408, 8, 2048),)),
)

#: Weights [rows, columns] of which the rows of a scattered part are read.
PADDED: tuple[tuple[str, str, int, tuple[tuple[int, int], ...]], ...] = (
    (
        "v5e:4x4", "fsdp=2,tensor=8", 2,
        (
            (640, 4096), (672, 4096), (704, 4096), (768, 4096), (896, 4096), (1024, 4096), (1056, 4096), (1280, 4096),
            (2048, 4096), (2304, 4096), (3328, 4096), (3584, 4096), (2048, 1536), (4096, 896), (4096, 1024),
            (4096, 1280), (4096, 1408), (4096, 1536), (4096, 1792), (4096, 3584),
        ),
    ),
    (
        "v5e:4x4", "fsdp=4,tensor=4", 4,
        (
            (1280, 4096), (1536, 4096), (1792, 4096), (2048, 4096), (3072, 4096), (4096, 1024), (4096, 1536),
            (4096, 2048), (4096, 2560), (4096, 3072), (4096, 3584), (4096, 4096), (4096, 7168), (5120, 3456),
        ),
    ),
    ("v5e:4x8", "fsdp=8,tensor=4", 8, ((4096, 3584), (4096, 1792), (4096, 4096), (1792, 4096))),
    ("v5e:8x8", "fsdp=16,tensor=4", 16, ((4096, 3584), (3584, 3584), (3584, 4096), (4096, 4096), (1024, 7168))),
    ("v5p:4x4x4", "fsdp=16,tensor=4", 16, ((4096, 3584), (4096, 4096), (8192, 7168))),
)  # fmt: skip
#: XLA's note on the collective: the shape that it pads the array to.
_PADDED_TO = re.compile(r"formatting steps: \(pad -\\u003e bf16\[(\d+),")


def gradient(x: jax.Array, dy: jax.Array, *, dims: str) -> jax.Array:
    """The gradient of a weight with these dims, the rows split over fsdp."""
    rest = [None] * (len(dims) - 1)
    partial_sums = jnp.einsum(f"td,t{dims[1:]}->{dims}", x, dy, out_sharding=P(None, *rest, unreduced={"fsdp"}))
    return jax.sharding.reshard(partial_sums, P("fsdp", *rest))


def expert_gradient(x: jax.Array, dy: jax.Array) -> jax.Array:
    """The gradient of experts' weights [e, d, f], the rows d split over fsdp."""
    partial_sums = jnp.einsum("etd,etf->edf", x, dy, out_sharding=P("expert", None, None, unreduced={"fsdp"}))
    return jax.sharding.reshard(partial_sums, P("expert", "fsdp", None))


def kind(slice_: str, mesh: str, shape: tuple[int, ...]) -> tuple[str, CompiledReport]:
    """The collective that the gradient becomes, and the compiled program."""
    tokens = lcm(TOKENS, parse_axes(mesh)["fsdp"])
    operands = [f"bf16[{tokens}_fsdp,{','.join(map(str, sizes))}]" for sizes in (shape[:1], shape[1:])]
    return _compiled(partial(gradient, dims="dnh"[: len(shape)]), operands, slice_, mesh)


def expert_kind(slice_: str, mesh: str, shape: tuple[int, int, int]) -> tuple[str, CompiledReport]:
    """The same of the gradient of experts."""
    rows, local, columns = shape
    experts = local * parse_axes(mesh)["expert"]
    operands = [f"bf16[{experts}_expert,{TOKENS}_fsdp,{size}]" for size in (rows, columns)]
    return _compiled(expert_gradient, operands, slice_, mesh)


def _compiled(
    program: Callable[..., jax.Array], operands: list[str], slice_: str, mesh: str
) -> tuple[str, CompiledReport]:
    report = rooftop.inspect(program, *operands, on=slice_, mesh=mesh).report
    assert isinstance(report, CompiledReport)
    kinds = {entry.collective.kind for entry in report.timeline.collectives} - {"permute"}
    return "+".join(sorted(kinds)), report


def kinds() -> Iterator[dict[str, Any]]:
    """Lines of the table of collectives."""
    for read, cases in ((kind, CASES), (expert_kind, EXPERTS)):
        for slice_, mesh, parts, shape in ((*case[:3], shape) for case in cases for shape in case[3]):
            became, report = read(slice_, mesh, shape)
            yield _line(slice_, mesh, parts, shape, report) | {"kind": became}


def scattered_parts() -> Iterator[dict[str, Any]]:
    """Lines of the table of parts' rows."""
    for slice_, mesh, parts, shape in ((*case[:3], shape) for case in PADDED for shape in case[3]):
        became, report = kind(slice_, mesh, shape)
        if became != "reduce_scatter":
            sys.exit(f"{slice_} {mesh} {shape}: {became}, not scattered")
        padded = _PADDED_TO.search(report.compiled.hlo_text)
        rows = int(padded[1]) if padded else shape[0]
        yield _line(slice_, mesh, parts, shape, report) | {"rows": rows // parts}


def _line(slice_: str, mesh: str, parts: int, shape: tuple[int, ...], report: CompiledReport) -> dict[str, Any]:
    versions = report.compiled.versions
    return {
        "slice": slice_, "mesh": mesh, "parts": parts, "shape": "x".join(map(str, shape)),
        "jax": versions["jax"], "libtpu": versions["libtpu"], "date": f"{datetime.now(UTC):%Y-%m-%d}",
    }  # fmt: skip


def write(path: Path, columns: tuple[str, ...], lines: Iterable[Mapping[str, Any]]) -> None:
    """Write the lines as they come."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    for line in lines:
        print(*(line[column] for column in columns[:5]), flush=True)
        writer.writerow(line)
        write_text(path, text.getvalue())


def main(names: list[str]) -> None:
    """Compile every case and write the tables."""
    tables = {"kinds": (RESULTS, COLUMNS, kinds), "rows": (ROWS_RESULTS, ROWS_COLUMNS, scattered_parts)}
    for name in names:
        if name not in tables:
            sys.exit(f"{name}: one of {', '.join(tables)}")
    for name, (path, columns, lines) in tables.items():
        if not names or name in names:
            write(path, columns, lines())


if __name__ == "__main__":
    main(sys.argv[1:])
