"""Achievable fractions of each peak: named fractions of a chip, and the matmuls and kernels that they price.

The figures are in ``achievable.toml``, each with its evidence; docs/evidence/achievable.md says how they were found.
They come from microbenchmarks and from the compiler, never from the runs that predictions are held against. A chip
without evidence gets 1: its expectation is then its bound. A chip that is ``like`` another has what that one has. A
chip that a user has calibrated has the user's fractions in place of those of the catalogue.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np

from rooftop.core.errors import RooftopError
from rooftop.core.ledger import COLLECTIVES, Number
from rooftop.core.rounding import next_multiple
from rooftop.hardware import AttentionCurve, Chip, CollectiveFit, MatmulFit
from rooftop.hardware import chip as find_chip

#: Smallest and largest size of a dim among the matmuls that were compiled; sizes outside are priced as the nearest.
MEASURED_DIMS: tuple[int, int] = (1024, 32768)
NO_MEASUREMENT = "no measurement: at peak"

#: Scores that fill one vector register: the unit in which attention kernels are counted.
_REGISTER = 1024
#: Matmuls of an attention kernel that contract or produce the size of a query head, and of a value head.
KERNEL_MATMULS: Mapping[str, tuple[int, int]] = {"fwd": (1, 1), "dq": (2, 1), "dkv": (2, 2), "bwd": (3, 2)}
#: Kernels of the backward pass: one for dQ and one for dK and dV on TPU, both in one ('bwd') on GPU.
_BACKWARD: Mapping[str, tuple[str, ...]] = {"tpu": ("dq", "dkv"), "gpu": ("bwd",)}


#: Dtypes of weights that come in groups with scales of their own.
GROUPED_DTYPES = ("f8_e4m3", "int4", "f4_e2m1")


@dataclass(frozen=True, kw_only=True)
class BatchFit:
    """Time of several bare matmuls at once, such as those of a device's experts: ``start_s`` once for all of them.

    Then the longer of two: their FLOPs, or their traffic, operands read at the share ``inputs`` of HBM's rate and
    results written at the share ``results``.
    """

    start_s: float
    inputs: float
    results: float


@dataclass(frozen=True, kw_only=True)
class GroupedFit:
    """Shares of the peak that kernels of grouped matmuls reach over the tiles that they execute, in 16 bits.

    By pass: ``forward``, gradients of ``inputs`` and of ``weights``. All cores of a chip are at work.
    """

    forward: float
    inputs: float
    weights: float
    source: str


@dataclass(frozen=True, kw_only=True)
class AttentionFit:
    """Attention kernels with square blocks of ``block`` queries and keys.

    ``vector_cycles`` maps a kernel ('fwd', 'dq', 'dkv') to the cycles of one core, per 1024 scores, in which the
    matrix unit waits for the vector unit and for the loop around them. ``fused``: the time of one kernel for all
    gradients over that of 'dq' and 'dkv', where that kernel ('bwd') was not counted itself. ``source`` is the evidence
    of kernels of other programs; that of ours is among those of ``Fractions``.
    """

    block: int
    vector_cycles: Mapping[str, float] = field(hash=False)
    fused: float = 1.0
    source: str | None = None


@dataclass(frozen=True, kw_only=True)
class Fractions:
    """The named achievable fractions of a chip.

    ``matmul`` maps a width ('16-bit', '8-bit') to a fit, ``ici`` a collective kind to one.
    ``batch`` is of 16-bit matmuls, None where none was compiled; ``grouped`` is of other programs' kernels for groups
    of experts' rows, None where none was measured.
    ``hbm`` and ``dcn`` are shares of the catalogue's rates. ``convert_s`` are seconds in which a weight in groups is
    read and converted for a matmul, by dtype; 0 where nothing was compiled. ``attention`` is None where no kernel was
    counted or measured; ``kernels`` are attention kernels of other programs, by name. ``sources`` has the evidence of
    all else, under 'hbm', 'ici.all_gather', 'matmul.16-bit' and so on.
    """

    chip: str
    matmul: Mapping[str, MatmulFit] = field(hash=False)
    batch: BatchFit | None
    grouped: GroupedFit | None
    attention: AttentionFit | AttentionCurve | None
    kernels: Mapping[str, AttentionFit] = field(hash=False)
    hbm: float
    ici: Mapping[str, CollectiveFit] = field(hash=False)
    dcn: float
    convert_s: Mapping[str, float] = field(hash=False)
    sources: Mapping[str, str] = field(hash=False)


def fractions(chip: Chip | str) -> Fractions:
    """The fractions of a chip, calibrated ones before those of the catalogue, or of a chip's name or alias.

    Raises RooftopError on an unknown name.
    """
    if isinstance(chip, str):
        return _catalogued(find_chip(chip).name)
    return _catalogued(chip.name) if chip.calibrated is None else _calibrated(chip)


@lru_cache(maxsize=64)
def _calibrated(chip: Chip) -> Fractions:
    known, own = _catalogued(chip.name), chip.calibrated
    assert own is not None
    matmuls = {**known.matmul, **own.matmul}
    matmul = {width: replace(fit, layer=fit.layer / own.compute) for width, fit in matmuls.items()}
    measured = {
        **{f"matmul.{width}": fit for width, fit in own.matmul.items()},
        **{f"ici.{kind}": fit for kind, fit in own.ici.items()},
        **{name: getattr(own, name) for name in ("attention", "hbm", "dcn")},
    }
    return replace(
        known,
        matmul=MappingProxyType(matmul),
        attention=own.attention or known.attention,
        hbm=own.hbm or known.hbm,
        ici=MappingProxyType({**known.ici, **own.ici}),
        dcn=own.dcn or known.dcn,
        sources=MappingProxyType(
            {**known.sources, **{name: f"calibrated by {own.by}" for name, figure in measured.items() if figure}}
        ),
    )


@cache
def _catalogued(name: str) -> Fractions:
    table = tomllib.loads(Path(__file__).with_name("achievable.toml").read_text(encoding="utf-8"))
    entry = table.get(name, {})
    # The entries of chips that are alike have no figures of their own.
    entry = table[entry["like"]] if "like" in entry else entry
    sources: dict[str, str] = {}

    def figure(path: str, default: float) -> float:
        result = entry
        for part in path.split("."):
            result = result.get(part, {})
        value, source = result or (default, NO_MEASUREMENT)
        sources[path] = source
        return float(value)

    def fit(path: str) -> dict[str, Any] | None:
        """The figures of a fit, if there is one."""
        result = entry
        for part in path.split("."):
            result = result.get(part, {})
        sources[path] = result["source"] if result else NO_MEASUREMENT
        return {name: value for name, value in result.items() if name != "source"} or None

    matmul = {width: MatmulFit(**fit(f"matmul.{width}") or {}) for width in ("16-bit", "8-bit")}
    batch, attention, curves = fit("matmul.batch"), fit("attention"), fit("collectives")
    grouped = entry.get("matmul", {}).get("grouped")
    kernels = {kernel: _counted(**figures) for kernel, figures in entry.get("kernels", {}).items()}
    if curves:
        ici: dict[str, CollectiveFit] = {kind: _by_ranks(**curves[kind]) for kind in COLLECTIVES}
    else:
        start_s = figure("collective_start_s", 0.0)
        ici = {kind: CollectiveFit(start_s=(start_s,), share=(figure(f"ici.{kind}", 1.0),)) for kind in COLLECTIVES}
        del sources["collectives"]
    return Fractions(
        chip=name,
        matmul=MappingProxyType(matmul),
        batch=BatchFit(**batch) if batch else None,
        grouped=GroupedFit(**grouped) if grouped else None,
        attention=_attention(attention) if attention else None,
        kernels=MappingProxyType(kernels),
        hbm=figure("hbm", 1.0),
        ici=MappingProxyType(ici),
        dcn=figure("dcn", 1.0),
        convert_s=MappingProxyType({dtype: figure(f"convert_s.{dtype}", 0.0) for dtype in GROUPED_DTYPES}),
        sources=MappingProxyType(sources),
    )


def _by_ranks(small: Mapping[str, Any], ranks: Sequence[float], **large: Any) -> CollectiveFit:
    return CollectiveFit(ranks=ranks, small=CollectiveFit(ranks=ranks, **small), **large)


def _attention(figures: Mapping[str, Any]) -> AttentionFit | AttentionCurve:
    return AttentionCurve(**figures) if "sizes" in figures else _counted(**figures)


def _counted(vector_cycles: Mapping[str, float], **figures: Any) -> AttentionFit:
    return AttentionFit(vector_cycles=MappingProxyType(vector_cycles), **figures)


def matmul_fraction(chip: Chip | str, m: Number, k: Number, n: Number, dtype: str = "bf16") -> Number:
    """Fraction of a device's peak that [m, k] x [k, n] can be expected to reach on its matrix unit, inside a layer.

    HBM is another resource: a matmul short of FLOPs per byte is slower than this. Sizes broadcast; a size outside
    ``MEASURED_DIMS`` counts as the nearest one inside. Raises RooftopError if the chip has no peak for ``dtype``.
    """
    chip = find_chip(chip) if isinstance(chip, str) else chip
    if dtype not in chip.flops_per_s:
        raise RooftopError(f"matmul dtype on {chip.name}", dtype, ", ".join(chip.flops_per_s))
    fast = chip.flops_per_s[dtype] > chip.flops_per_s["bf16"]
    fit = fractions(chip).matmul["8-bit" if fast else "16-bit"]
    # What np.clip does, which takes as long as all the rest.
    low, high = MEASURED_DIMS
    m, k, n = (np.minimum(np.maximum(size, low), high) for size in (m, k, n))
    ideal_s = 2.0 * m * k * n * chip.devices / chip.flops_per_s[dtype]
    matmul_fraction: Number = fit.layer / (1.0 / fit.peak + (fit.start_s + m * n * fit.result_s) / ideal_s)
    return matmul_fraction


def batched_matmul_seconds(
    chip: Chip, batch: Number, m: Number, k: Number, n: Number, dtype: str = "bf16"
) -> Number | None:
    """Expected seconds of a batch of matmuls [m, k] x [k, n] on one device, inside a layer; None without a fit.

    Results are bf16. Batches of other dtypes were measured on GPUs alone.
    """
    known = fractions(chip)
    wide = chip.flops_per_s[dtype] <= chip.flops_per_s["bf16"]
    fit, alone = known.batch, known.matmul["16-bit" if wide else "8-bit"]
    if fit is None or not (dtype == "bf16" or chip.kind == "gpu"):
        return None
    multiplied_s = 2.0 * m * k * n * chip.devices / (alone.peak * chip.flops_per_s[dtype])
    moved = (2.0 if wide else 1.0) * (m * k + k * n) / fit.inputs + 2.0 * m * n / fit.results
    seconds: Number = fit.start_s + batch * np.maximum(multiplied_s, moved * chip.devices / chip.hbm_bytes_per_s)
    return seconds / alone.layer


def grouped_matmul_seconds(
    chip: Chip, of: Literal["forward", "inputs", "weights"], rows: Number, k: Number, n: Number, dtype: str
) -> Number:
    """Expected seconds of a kernel that multiplies ``rows`` executed rows of a device's experts, [rows, k] x [k, n].

    In 8 bits it has the share of the 8-bit peak that 16-bit kernels have of theirs.
    Raises RooftopError for a chip without measured kernels.
    """
    fit = fractions(chip).grouped
    if fit is None:
        raise RooftopError("grouped matmuls", chip.name, "a chip on which such kernels were measured")
    share = {"forward": fit.forward, "inputs": fit.inputs, "weights": fit.weights}[of]
    return 2.0 * rows * k * n * chip.devices / (chip.flops_per_s[dtype] * share)


def kernel_flops(chip: Chip, d_qk: int, d_v: int, *, backward: bool = False, fused: bool = False) -> int:
    """FLOPs of the attention kernels per (query, key, head) that they execute.

    2 matmuls forward; backward 7 in two kernels on TPU, 5 in one on GPU, and on TPU where they are ``fused``. Each
    contracts or produces the size of a query head (``d_qk``) or of a value head (``d_v``).
    """
    backwards = ("bwd",) if fused else _BACKWARD[chip.kind]
    matmuls = [KERNEL_MATMULS[kernel] for kernel in (backwards if backward else ("fwd",))]
    return sum(2 * (of_qk * d_qk + of_v * d_v) for of_qk, of_v in matmuls)


def attention_kernels(chip: Chip | str, name: str) -> AttentionFit:
    """The attention kernels of another program by their name. Raises RooftopError if the chip has none of that name."""
    known = fractions(chip).kernels
    if name not in known:
        raise RooftopError("attention kernels", name, ", ".join(known) or "none on this chip")
    return known[name]


def attention_seconds(
    chip: Chip,
    scores: Number,
    d_qk: int,
    d_v: int,
    *,
    backward: bool = False,
    fused: bool = False,
    kernels: str | None = None,
    queries: Number = 0.0,
) -> tuple[Number, Number]:
    """Expected seconds of an attention kernel on one device: the matrix unit's, and those in which it waits.

    Their sum is how long the kernel takes. ``scores`` is the (query, key, head) triples that it executes: whole blocks
    of its side, masked ones skipped; ``queries`` the (query, head) pairs. Heads fill a TPU's matrix unit in whole
    multiples of its side. ``backward`` prices the kernels of the backward pass, which compute the scores again, or the
    one kernel in which they are ``fused``. ``kernels`` names those of another program (``Fractions.kernels``); gradient
    kernels that it has no count of are the chip's own. Raises RooftopError if the chip has none of that name.
    """
    fit = fractions(chip).attention if kernels is None else attention_kernels(chip, kernels)
    if backward and not fused and not isinstance(fit, AttentionCurve) and fit and "bwd" in fit.vector_cycles:
        # Only its one kernel for all gradients was counted: those apart are the chip's own.
        fit = fractions(chip).attention
    slower = 1.0 if chip.calibrated is None else chip.calibrated.compute
    if isinstance(fit, AttentionCurve):
        matrix_s = scores * kernel_flops(chip, d_qk, d_v, backward=backward) * chip.devices / chip.flops_per_s["bf16"]
        share, query_s = fit.at((d_qk + d_v) / 2, backward=backward)
        return matrix_s, slower * (matrix_s / share + queries * query_s) - matrix_s
    side = chip.mxu_tile if fit else 1
    matrix, waits = 0.0, 0.0
    counted = fused and fit is not None and "bwd" in fit.vector_cycles
    backwards = ("bwd",) if counted else _BACKWARD[chip.kind]
    for kernel in backwards if backward else ("fwd",):
        of_qk, of_v = KERNEL_MATMULS[kernel]
        matrix += of_qk * next_multiple(d_qk, side) + of_v * next_multiple(d_v, side)
        waits += fit.vector_cycles[kernel] / _REGISTER if fit else 0.0
    rate = chip.flops_per_s["bf16"] / chip.devices
    matrix_s, waiting_s = 2.0 * scores * matrix / rate, scores * waits * chip.devices / (chip.cores * chip.clock_hz)
    if fit and backward and fused and not counted:
        of_qk, of_v = KERNEL_MATMULS["bwd"]
        whole_s = fit.fused * (matrix_s + waiting_s)
        matrix_s = 2.0 * scores * (of_qk * next_multiple(d_qk, side) + of_v * next_multiple(d_v, side)) / rate
        waiting_s = whole_s - matrix_s
    return matrix_s, waiting_s + (slower - 1.0) * (matrix_s + waiting_s)
