"""Kernels of a serving engine on a GPU, as microbenchmarks have them (``kernels.toml``)."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.ledger import Number
from rooftop.hardware import Chip, chip

#: Tables of ``kernels.toml`` that are no chips.
_OTHERS = ("bytes", "like")


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
    """The kernels of an engine on a chip, from the table ``name``; ``measured_on`` another chip or the chip itself.

    ``matmul``, ``experts`` and ``attention`` (of one token of each sequence) are by dtype; 'f8_block' is FP8 with a
    scale for each block of weights. ``latent`` is attention to latents. ``all_reduce``: seconds by ranks, of
    ``payloads`` bytes.
    """

    name: str
    chip: str
    measured_on: str
    matmul: Mapping[str, KernelFit] = field(hash=False)
    experts: Mapping[str, KernelFit] = field(hash=False)
    attention: Mapping[str, KernelFit] = field(hash=False)
    latent: KernelFit
    payloads: npt.NDArray[np.float64] = field(hash=False)
    all_reduce: Mapping[int, npt.NDArray[np.float64]] = field(hash=False)

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


def _measured_chips() -> list[str]:
    return [name for name in _table() if name not in _OTHERS]


@cache
def engine_kernels(name: str, where: Chip) -> EngineKernels:
    """The kernels of an engine, in the table ``name``, on a chip. Raises RooftopError where nothing is known."""
    table = _table()
    measured_on = table["like"].get(where.name, where.name)
    if measured_on not in _measured_chips():
        known = ", ".join((*_measured_chips(), *table["like"]))
        raise RooftopError(
            "engine", name.partition("-")[0], f"nothing on {where.name}: its kernels are known on {known}"
        )
    if name not in table[measured_on]:
        raise unknown("engine", name, tuple(table[measured_on]))
    entry = table[measured_on][name]
    if "like" in entry:
        base = table[measured_on][entry["like"]]
        entry = base | {name: base[name] | entry[name] for name in entry if name != "like"}
    slower = 1.0 if measured_on == where.name else chip(measured_on).ici_bytes_per_s / where.ici_bytes_per_s
    return EngineKernels(
        name=name,
        chip=where.name,
        measured_on=measured_on,
        **{kind: _fits(entry[kind]) for kind in ("matmul", "experts", "attention")},
        latent=_fit(entry["latent"]),
        payloads=np.array(table["bytes"], dtype=np.float64),
        all_reduce={int(ranks): _all_reduce_s(figures, slower) for ranks, figures in entry["all_reduce"].items()},
    )


def _all_reduce_s(figures: Sequence[float], slower: float) -> npt.NDArray[np.float64]:
    """Seconds by payload, of links that take so many times as long for their bytes."""
    seconds = 1e-6 * np.array(figures)
    start = seconds.min()
    return np.asarray(start + slower * (seconds - start))


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("kernels.toml").read_text(encoding="utf-8"))


def _fits(entry: Mapping[str, Mapping[str, float]]) -> dict[str, KernelFit]:
    return {dtype: _fit(figures) for dtype, figures in entry.items()}


def _fit(figures: Mapping[str, float]) -> KernelFit:
    return KernelFit(
        start_s=1e-6 * figures["start_us"], hbm=figures["hbm"], peak=figures["peak"], quantise=figures.get("quantise")
    )
