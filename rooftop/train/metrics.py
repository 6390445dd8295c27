"""Metrics of a step: losses, rates, and the signs that training has failed."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rooftop.core.records import Record
from rooftop.models import ModelConfig, flops_per_token
from rooftop.programs.training.step import StepMetrics


@dataclass(frozen=True, kw_only=True)
class TrainRates:
    """Rates and MFU from tokens and seconds; ``peak_flops_per_s`` is that of all devices (None: unknown)."""

    flops_per_token: float
    convention: str
    peak_flops_per_s: float | None

    @classmethod
    def of(cls, model: ModelConfig, seq_len: int, peak_flops_per_s: float | None) -> TrainRates:
        """Return the rates of a model, with FLOPs as plans count them."""
        flops = flops_per_token(model, seq_len)
        convention = (
            f"model FLOPs of the tokens that carry loss, over peak; {flops.convention}; attention as if each "
            "sequence were one document"
        )
        return cls(flops_per_token=float(flops.total), convention=convention, peak_flops_per_s=peak_flops_per_s)

    def model_flops_per_s(self, tokens_per_s: float) -> float:
        """Return model FLOP/s at ``tokens_per_s``."""
        return self.flops_per_token * tokens_per_s

    def mfu(self, tokens_per_s: float) -> float | None:
        """Return the model FLOPs utilisation; None if the peak is unknown."""
        return None if self.peak_flops_per_s is None else self.model_flops_per_s(tokens_per_s) / self.peak_flops_per_s


@dataclass(frozen=True, kw_only=True)
class StepRecord(Record):
    """One line of metrics.jsonl.

    ``step`` counts from 1, and ``loss`` (nats per token) is that of the weights before it. ``tokens`` carry loss.
    ``seconds`` is the time since the end of the step before, and ``data_share`` the part of it that the step waited for
    its batch; ``unix_s`` is the time of day. ``z_loss`` and ``balance_loss`` are means, without coefficients.
    Of several processes ``slowest_process`` is the one that worked longest on its host before the step, which the
    others wait for: ``slowest_host_s``, where the median process took ``median_host_s``.
    """

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    tokens_per_s: float
    model_flops_per_s: float
    mfu: float | None
    data_share: float
    unix_s: float
    z_loss: float | None = None
    balance_loss: float | None = None
    slowest_process: int | None = None
    slowest_host_s: float | None = None
    median_host_s: float | None = None

    @classmethod
    def of(
        cls, step: int, metrics: StepMetrics[Any], *, learning_rate: float, seconds: float, waited_s: float,
        unix_s: float, rates: TrainRates, host_s: Sequence[float] = (),
    ) -> StepRecord:  # fmt: skip
        """Return the record of a step; waits until the step is done."""
        values = {name: None if value is None else float(value) for name, value in vars(metrics).items()}
        tokens = values.pop("tokens")
        assert tokens is not None
        tokens_per_s = tokens / max(seconds, 1e-9)
        return cls(
            step=step,
            tokens=int(tokens),
            learning_rate=learning_rate,
            seconds=seconds,
            tokens_per_s=tokens_per_s,
            model_flops_per_s=rates.model_flops_per_s(tokens_per_s),
            mfu=rates.mfu(tokens_per_s),
            data_share=min(waited_s / max(seconds, 1e-9), 1.0),
            unix_s=unix_s,
            **_slowest(host_s),
            **values,  # type: ignore[arg-type]
        )

    @property
    def finite(self) -> bool:
        """True if loss and gradients are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values, None for NaN and infinities; without the losses that the model does not have."""
        return {
            name: value if not isinstance(value, float) or math.isfinite(value) else None
            for name, value in super().to_json().items()
            if value is not None or name == "mfu"
        }


def _slowest(host_s: Sequence[float]) -> dict[str, Any]:
    """The process that takes longest; nothing of a single one."""
    if len(host_s) < 2:
        return {}
    slowest = max(range(len(host_s)), key=host_s.__getitem__)
    return {
        "slowest_process": slowest,
        "slowest_host_s": host_s[slowest],
        "median_host_s": statistics.median(host_s),
    }


@dataclass
class Divergence:
    """Detects a diverging loss: its mean over ``window`` steps is ``nats`` above the lowest such mean before."""

    nats: float
    window: int = 20
    lowest: float = math.inf
    _recent: deque[float] = field(default_factory=deque)

    def rise(self, loss: float) -> float | None:
        """Add a loss. Return the rise in nats if it is too much, else None."""
        self._recent.append(loss)
        if len(self._recent) < self.window:
            return None
        mean = math.fsum(self._recent) / self.window
        self._recent.popleft()
        self.lowest = min(self.lowest, mean)
        return mean - self.lowest if mean - self.lowest > self.nats else None
