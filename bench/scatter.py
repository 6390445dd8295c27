"""Gradients that XLA:TPU scatters, and those that it sums on every device: small programs, compiled ahead of time.

    python bench/scatter.py

Each program multiplies inputs and output gradients whose tokens are split over fsdp, and keeps a part of the rows of
the product on each device, as the backward pass of a weight does. Writes bench/results/scatter.csv: no TPU needed, a
few seconds a case. ``rooftop.arrays.tiles.summed_whole`` is the rule that follows; tests hold it against the results.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from math import lcm
from pathlib import Path

import jax
import jax.numpy as jnp
from jax import P

import rooftop
from rooftop.arrays import parse_axes
from rooftop.core.files import write_text
from rooftop.explain.compiled.report import CompiledReport

RESULTS = Path(__file__).parent / "results" / "scatter.csv"
COLUMNS = ("slice", "mesh", "parts", "shape", "kind", "jax", "libtpu", "date")
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


def main() -> None:
    """Compile every case and write the table."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for read, cases in ((kind, CASES), (expert_kind, EXPERTS)):
        for slice_, mesh, parts, shape in ((*case[:3], shape) for case in cases for shape in case[3]):
            became, report = read(slice_, mesh, shape)
            versions = report.compiled.versions
            line = (slice_, mesh, parts, "x".join(map(str, shape)), became, versions["jax"], versions["libtpu"])
            print(*line, flush=True)
            writer.writerow((*line, f"{datetime.now(UTC):%Y-%m-%d}"))
            write_text(RESULTS, text.getvalue())


if __name__ == "__main__":
    main()
