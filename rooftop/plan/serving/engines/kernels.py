"""Kernels of a serving engine on a GPU, as microbenchmarks have them (``kernels.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.ledger import Number

#: Engines by the name that options and tables have.
ENGINES: Mapping[str, str] = {"vllm": "vLLM", "trtllm": "TensorRT-LLM"}


@dataclass(frozen=True, kw_only=True)
class KernelFit:
    """A kernel: ``start_s``, then the longer of its bytes and its FLOPs at these shares of the device's peaks.

    ``quantise``: share of the HBM rate at which what comes in is quantised before; None: it is not.
    """

    start_s: float
    hbm: float
    peak: float
    quantise: float | None = None

    def seconds(self, hbm_s: Number, matmul_s: Number, quantise_s: Number = 0.0) -> Number:
        """Seconds of a kernel whose bytes and FLOPs, and whose quantising, take so long at peak."""
        before_s = 0.0 if self.quantise is None else quantise_s / self.quantise
        return self.start_s + before_s + np.maximum(hbm_s / self.hbm, matmul_s / self.peak)


@dataclass(frozen=True, kw_only=True)
class EngineKernels:
    """The kernels of ``engine`` on a chip.

    ``matmul``, ``experts`` and ``attention`` (of one token of each sequence) are by dtype; 'f8_block' is FP8 with a
    scale for each block of weights. ``latent`` is attention to latents. ``all_reduce``: seconds by ranks, of
    ``payloads`` bytes. ``gap_s`` and ``host_s`` of a kernel, ``request_s`` and ``token_s`` of the front end: see
    ``ServingAssumptions``.
    """

    engine: str
    chip: str
    matmul: Mapping[str, KernelFit] = field(hash=False)
    experts: Mapping[str, KernelFit] = field(hash=False)
    attention: Mapping[str, KernelFit] = field(hash=False)
    latent: KernelFit
    payloads: npt.NDArray[np.float64] = field(hash=False)
    all_reduce: Mapping[int, npt.NDArray[np.float64]] = field(hash=False)
    gap_s: float
    host_s: float
    request_s: float
    token_s: float

    def all_reduce_s(self, payload: Number, ranks: Number) -> Number:
        """Seconds of an AllReduce of ``payload`` bytes by ``ranks`` GPUs of a node; 0 by one.

        Other numbers of ranks are priced as the next larger one that was measured; larger payloads are scaled.
        """
        sizes = np.log(np.clip(payload, self.payloads[0], self.payloads[-1]))
        larger = np.maximum(np.asarray(payload) / self.payloads[-1], 1.0)
        seconds: Number = 0.0
        fewer = 1
        for known, known_s in self.all_reduce.items():
            here = (np.asarray(ranks) > fewer) & ((np.asarray(ranks) <= known) | (known == max(self.all_reduce)))
            measured_s = np.exp(np.interp(sizes, np.log(self.payloads), np.log(known_s))) * larger
            seconds, fewer = np.where(here, measured_s, seconds), known
        return seconds


def _chips() -> list[str]:
    return [name for name in _table() if name not in ("bytes", "overheads")]


@cache
def engine_kernels(engine: str, chip_name: str) -> EngineKernels:
    """The kernels of an engine on a chip. Raises RooftopError where nothing was measured."""
    table = _table()
    if chip_name not in _chips():
        raise RooftopError("engine", engine, f"nothing on {chip_name}: its kernels are known on {', '.join(_chips())}")
    if engine not in table[chip_name]:
        raise unknown("engine", engine, tuple(ENGINES))
    entry = table[chip_name][engine]
    if "like" in entry:
        base = table[chip_name][entry["like"]]
        entry = base | {name: base[name] | entry[name] for name in entry if name != "like"}
    overheads = {name: 1e-6 * figure for name, figure in table["overheads"][engine.split("-")[0]].items()}
    return EngineKernels(
        engine=engine,
        chip=chip_name,
        **{name: _fits(entry[name]) for name in ("matmul", "experts", "attention")},
        latent=_fit(entry["latent"]),
        payloads=np.array(table["bytes"], dtype=np.float64),
        all_reduce={int(ranks): 1e-6 * np.array(figures) for ranks, figures in entry["all_reduce"].items()},
        gap_s=overheads["gap_us"],
        host_s=overheads["host_us"],
        request_s=overheads["request_us"],
        token_s=overheads["token_us"],
    )


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8"))


def _fits(entry: Mapping[str, Mapping[str, float]]) -> dict[str, KernelFit]:
    return {dtype: _fit(figures) for dtype, figures in entry.items()}


def _fit(figures: Mapping[str, float]) -> KernelFit:
    return KernelFit(
        start_s=1e-6 * figures["start_us"], hbm=figures["hbm"], peak=figures["peak"], quantise=figures.get("quantise")
    )
