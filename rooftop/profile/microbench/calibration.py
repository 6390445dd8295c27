"""Measurements of a calibration: calls, HBM, matmuls, collectives and attention on all local devices at once.

A program repeats its work in a loop whose passes depend on each other, and its time is that of many passes less that of
one: the call from Python and the wait are not in it. All devices work at the same time, on operands of their own, so
that their clocks and power are those of a run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from rooftop.algebra.pricing import Prices
from rooftop.arrays import Mesh
from rooftop.core.ledger import COLLECTIVES
from rooftop.core.measurements import CalibrationPoint, Measurement
from rooftop.core.quantities import dtype_bytes, format_bytes
from rooftop.hardware import Chip, Slice
from rooftop.profile.microbench.collectives import on_shards
from rooftop.profile.microbench.timing import (
    Timing,
    compile_program,
    device_mesh,
    empty_call,
    normal,
    time_program,
    usable_bytes,
)
from rooftop.programs.attention.attend import attend
from rooftop.programs.attention.scores import Scores
from rooftop.programs.einsum.sharded import DTYPES
from rooftop.roofline.achievable import kernel_flops

#: Seconds of the passes of a timed program, and the most passes. A longer pass is timed alone.
_LOOP_S, _LONG_S, _MOST_PASSES = 0.1, 0.5, 2000
#: Calls without a wait between them, whose mean is the time of a launch.
_LAUNCHES = 200
#: A pass that is expected to take longer than this share of the time for all measurements is left out.
_LONGEST = 1 / 300
#: Largest array of HBM measurements, as a share of a device's memory, and in bytes.
_HBM_SHARE, _HBM_BYTES = 1 / 8, 2**30
#: Arrays of HBM measurements on a CPU, whose caches are far smaller.
_CPU_BYTES = 2**24
#: M, K and N of matmuls: squares, and those of layers with D of 4096 and 8192.
MATMULS = (
    *((side, side, side) for side in (1024, 2048, 4096, 8192, 16384)),
    *((8192, 4096, 14336), (8192, 14336, 4096), (4096, 8192, 1024), (2048, 8192, 28672), (1024, 4096, 4096)),
)
#: Length, heads and head size of attention.
ATTENTION = tuple((seq, 8, size) for size in (128, 64, 256) for seq in (1024, 2048, 8192))
#: Payloads of collectives.
PAYLOADS = (2**20, 2**24, 2**27, 2**16, 2**22)


@dataclass(frozen=True, kw_only=True)
class CalibrationCase:
    """Work to measure, with the fields of the ``CalibrationPoint`` that it becomes."""

    what: Measurement
    kind: str = ""
    dtype: str = "bf16"
    sizes: dict[str, int] = field(default_factory=dict)
    flops: float = 0.0
    bytes: float = 0.0

    @property
    def key(self) -> tuple[str, ...]:
        """The key of its point."""
        return self.what, self.kind, self.dtype, *(f"{name}={size}" for name, size in sorted(self.sizes.items()))

    @property
    def label(self) -> str:
        """The work in words."""
        match self.what:
            case "matmul":
                return f"matmul {self.dtype} {self.sizes['m']}x{self.sizes['k']}x{self.sizes['n']}"
            case "attention":
                return f"attention {self.kind} {self.sizes['seq']} tokens, heads of {self.sizes['d_head']}"
            case "collective":
                return f"{self.kind} of {format_bytes(self.sizes['bytes'])} over {self.sizes['ranks']} devices"
            case "hbm":
                return f"HBM {self.kind} of {format_bytes(self.sizes['bytes'])}"
        return f"call: {self.kind}"


@dataclass(frozen=True, kw_only=True)
class Bench:
    """The local devices as one axis, and the slice that they are (None: of no chip in the catalogue)."""

    devices: Sequence[jax.Device]
    slice: Slice | None

    @property
    def chip(self) -> Chip | None:
        """The chip of the devices."""
        return None if self.slice is None else self.slice.chip

    @property
    def kernel(self) -> str:
        """The attention kernel of the platform."""
        return {"tpu": "splash", "gpu": "cudnn"}.get(self.devices[0].platform, "chunked")

    def cases(self) -> list[CalibrationCase]:
        """All work to measure: a little of everything first, and then the rest in turns."""
        room = usable_bytes(self.devices)
        largest = int(min(_HBM_BYTES, room * _HBM_SHARE, _CPU_BYTES if self.devices[0].platform == "cpu" else math.inf))
        dtypes, groups = self._dtypes(), self._groups()
        calls = [CalibrationCase(what="call", kind=kind, dtype="f32") for kind in ("wait", "launch")]
        hbm = [
            CalibrationCase(what="hbm", kind=kind, sizes={"bytes": size}, bytes=size * (2 if kind == "copy" else 1))
            for size in (largest, largest // 4)
            for kind in ("copy", "read")
        ]
        matmuls = [
            CalibrationCase(
                what="matmul",
                dtype=dtype,
                sizes={"m": m, "k": k, "n": n},
                flops=2.0 * m * k * n,
                bytes=(m * k + k * n) * dtype_bytes(dtype) + 2.0 * m * n,
            )
            for m, k, n in MATMULS
            for dtype in dtypes
        ]
        attention = [
            CalibrationCase(what="attention", kind=kind, sizes={"batch": 1, "seq": seq, "heads": heads, "d_head": size},
                 flops=self._attention_flops(seq, heads, size, backward=kind == "backward"))
            for seq, heads, size in ATTENTION
            for kind in ("forward", "backward")
        ]  # fmt: skip
        collectives = [
            CalibrationCase(what="collective", kind=kind, sizes={"ranks": ranks, "bytes": size}, bytes=float(size))
            for size in PAYLOADS
            for ranks in groups
            for kind in COLLECTIVES
        ]
        first = (len(matmuls[: 3 * len(dtypes)]), len(COLLECTIVES) * len(groups), 2)
        some = [case for cases, count in zip((matmuls, collectives, attention), first, strict=True)
                for case in cases[:count]]  # fmt: skip
        rest = zip_longest(matmuls[first[0] :], collectives[first[1] :], attention[first[2] :], hbm[2:])
        return [*calls, *hbm[:2], *some, *(case for turn in rest for case in turn if case is not None)]

    def _dtypes(self) -> list[str]:
        """bf16, and the 8-bit dtypes in which the chip is faster; of a GPU both, as XLA may be slow in one of them."""
        rates = {} if self.chip is None else self.chip.flops_per_s
        faster = [name for name in ("int8", "f8_e4m3") if rates.get(name, 0.0) > rates.get("bf16", math.inf)]
        return ["bf16", *(faster if self.chip is not None and self.chip.kind == "gpu" else faster[:1])]

    def _groups(self) -> list[int]:
        """Sizes of groups: all devices; on GPUs powers of two too, as NCCL differs by the size of a group."""
        count = len(self.devices)
        if count == 1:
            return []
        smaller = [2**power for power in range(1, 10) if 2**power < count and count % 2**power == 0]
        return [count, *(smaller if self.chip is not None and self.chip.kind == "gpu" else ())]

    def _attention_flops(self, seq: int, heads: int, size: int, *, backward: bool) -> float:
        """FLOPs as plans count them: those of the chip's kernels, for half of the scores and the diagonal."""
        scores = heads * seq * (seq + 1) / 2
        if self.chip is not None:
            return scores * kernel_flops(self.chip, size, size, backward=backward)
        return scores * 4.0 * size * (2.5 if backward else 1.0)

    def measure(self, case: CalibrationCase) -> CalibrationPoint:
        """Measure one case. Raises Infeasible if it does not fit the devices, RooftopError if it does not compile."""
        timing = _MEASURES[case.what](case, self)
        return CalibrationPoint(
            what=case.what,
            kind=case.kind,
            dtype=case.dtype,
            sizes=case.sizes,
            flops=case.flops,
            bytes=case.bytes,
            bound_s=self.bound_s(case),
            median_s=timing.median_s,
            fastest_s=timing.fastest_s,
            runs=timing.runs,
        )

    def bound_s(self, case: CalibrationCase) -> float | None:
        """Seconds of a case at the peaks of the chip; None without one, and for calls."""
        if self.slice is None or case.what == "call":
            return None
        chip = self.slice.chip
        if case.what == "hbm":
            return case.bytes * chip.devices / chip.hbm_bytes_per_s
        if case.what != "collective":
            return case.flops * chip.devices / chip.flops_per_s[case.dtype]
        laid = Mesh.lay(self.slice, self.axes(case.sizes["ranks"]))
        return Prices(mesh=laid, dims={}, kind="bound").collective_s(case.kind, ("X",), case.bytes)

    def axes(self, ranks: int) -> dict[str, int]:
        """Mesh axes with groups of ``ranks`` devices along X."""
        count = len(self.devices)
        return {"X": count} if ranks == count else {"Y": count // ranks, "X": ranks}


def too_long(case: CalibrationCase, points: Sequence[CalibrationPoint], minutes: float) -> bool:
    """True if a pass of ``case`` is expected to take more than a share of all the time, by points of its kind."""
    alike = [point for point in points if (point.what, point.dtype) == (case.what, case.dtype)]
    rates = [(point.flops or point.bytes) / point.median_s for point in alike]
    return case.what != "call" and bool(rates) and (case.flops or case.bytes) / max(rates) > 60 * minutes * _LONGEST


def _call(case: CalibrationCase, bench: Bench) -> Timing:
    """Seconds of an empty program: with a wait for each, or of one among many that nothing waits for."""
    mesh = device_mesh({"X": len(bench.devices)})
    if case.kind == "wait":
        return empty_call(mesh)
    number = jnp.zeros(mesh.size, jnp.float32, device=jax.NamedSharding(mesh, jax.P("X")))
    program = jax.jit(lambda x: x + 1).lower(number).compile()
    jax.block_until_ready(program(number))
    seconds = []
    for _ in range(5):
        start, value = time.perf_counter(), number
        for _ in range(_LAUNCHES):
            value = program(value)
        jax.block_until_ready(value)
        seconds.append((time.perf_counter() - start) / _LAUNCHES)
    return Timing(seconds=tuple(seconds))


def _hbm(case: CalibrationCase, bench: Bench) -> Timing:
    array = jax.ShapeDtypeStruct((int(case.sizes["bytes"] / dtype_bytes(case.dtype)),), DTYPES[case.dtype])
    if case.kind == "copy":
        return _time_passes(lambda x: x + 1, [array], case, bench, following=lambda x, result: result)
    element = jax.ShapeDtypeStruct((1,), "float32")
    return _time_passes(lambda c, x: jnp.sum(x + c.astype(x.dtype), dtype=jnp.float32), [element, array], case, bench)


def _matmul(case: CalibrationCase, bench: Bench) -> Timing:
    m, k, n = (case.sizes[name] for name in ("m", "k", "n"))
    arrays = [jax.ShapeDtypeStruct(shape, DTYPES[case.dtype]) for shape in ((m, k), (k, n))]
    result = jnp.int32 if case.dtype == "int8" else jnp.bfloat16
    return _time_passes(lambda x, w: jnp.matmul(x, w, preferred_element_type=result), arrays, case, bench)


def _attention(case: CalibrationCase, bench: Bench) -> Timing:
    batch, seq, heads, size = (case.sizes[name] for name in ("batch", "seq", "heads", "d_head"))
    scores, kernel = Scores(scale=size**-0.5), bench.kernel
    arrays = [jax.ShapeDtypeStruct((batch, seq, heads, size), DTYPES[case.dtype])] * 3

    def forward(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return attend(kernel, scores, q, k, v)

    alone = _time_passes(forward, arrays, case, bench)
    if case.kind == "forward":
        return alone
    # A backward pass needs the residuals of its forward pass, whose time is taken off.
    both = _time_passes(lambda q, k, v: jax.vjp(forward, q, k, v)[1](q), arrays, case, bench)
    return Timing(seconds=tuple(max(seconds - alone.median_s, seconds / 2) for seconds in both.seconds))


def _collective(case: CalibrationCase, bench: Bench) -> Timing:
    ranks = case.sizes["ranks"]
    parts = math.ceil(case.sizes["bytes"] / dtype_bytes(case.dtype) / ranks)
    array = jax.ShapeDtypeStruct((parts if case.kind == "all_gather" else parts * ranks,), DTYPES[case.dtype])
    collective = on_shards(case.kind, ("X",), ranks)
    return _time_passes(collective, [array], case, bench, axes=bench.axes(ranks))


_MEASURES: Mapping[Measurement, Callable[[CalibrationCase, Bench], Timing]] = {
    "call": _call, "hbm": _hbm, "matmul": _matmul, "attention": _attention, "collective": _collective
}  # fmt: skip


def _touched(first: jax.Array, results: Any) -> jax.Array:
    """``first`` with one element of the results in it, so that the next pass depends on them."""
    leaf = jax.tree.leaves(results)[0]
    element = jnp.nan_to_num(leaf[(0,) * leaf.ndim].astype(jnp.float32))
    return first.at[(0,) * first.ndim].set(jnp.clip(element, -1.0, 1.0).astype(first.dtype))


def _time_passes(
    work: Callable[..., Any],
    arrays: Sequence[jax.ShapeDtypeStruct],
    case: CalibrationCase,
    bench: Bench,
    *,
    axes: Mapping[str, int] | None = None,
    following: Callable[[jax.Array, Any], jax.Array] = _touched,
) -> Timing:
    """Time one pass of ``work`` on every device; ``arrays`` are those of a device.

    ``following`` gives the first operand of the next pass. Raises Infeasible if the arrays do not fit.
    """
    mesh = device_mesh(axes or {"X": len(bench.devices)})
    spec, leading = jax.P(*mesh.axis_names), (1,) * len(mesh.axis_names)
    operands = [
        jax.ShapeDtypeStruct((*mesh.devices.shape, *array.shape), array.dtype, sharding=jax.NamedSharding(mesh, spec))
        for array in arrays
    ]

    def passes(count: int) -> jax.stages.Compiled:
        def local(*shards: jax.Array) -> jax.Array:
            first, *rest = (shard.reshape(shard.shape[len(leading) :]) for shard in shards)

            def single_s(_: int, operand: jax.Array) -> jax.Array:
                return following(operand, lax.optimization_barrier(work(operand, *rest)))

            last: jax.Array = lax.fori_loop(0, count, single_s, first)
            return last.reshape(*leading, *last.shape)

        # Kernels and gathered results have no types of replication.
        mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * len(operands), out_specs=spec, check_vma=False)
        return compile_program(mapped, *operands, what=case.label, advice="it is left out")

    once = passes(1)
    values = [normal(operand, seed) for seed, operand in enumerate(operands)]
    single = time_program(once, *values, least_s=0.0, least_runs=3)
    if single.median_s > _LONG_S:
        return single
    count = min(_MOST_PASSES, max(2, math.ceil(_LOOP_S / single.median_s)))
    many = time_program(passes(count), *values, least_s=_LOOP_S)
    each_s = [(seconds - single.median_s) / (count - 1) for seconds in many.seconds]
    # On a busy machine single passes may take longer than many: the call is then in the time of each.
    return Timing(
        seconds=tuple(
            max(single_s, seconds / count / 2) for single_s, seconds in zip(each_s, many.seconds, strict=True)
        )
    )
