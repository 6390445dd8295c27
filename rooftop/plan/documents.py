"""Records that plan.json of training, serving and embeddings share."""

from __future__ import annotations

from dataclasses import dataclass

from rooftop.core.records import Record, derived
from rooftop.hardware import Calibrated, Slice
from rooftop.models import ModelConfig, count_params
from rooftop.models.stored import StoredWeights


@dataclass(frozen=True, kw_only=True)
class PlannedModel(Record):
    """The model of a plan, complete, with its parameters, and with its checkpoint's weights if they are quantised."""

    name: str
    params: int
    active_params: int
    stored: StoredWeights | None = None
    config: ModelConfig

    @classmethod
    def of(cls, model: ModelConfig) -> PlannedModel:
        """The record of a model."""
        parameters = count_params(model)
        return cls(
            name=model.name,
            params=parameters.total,
            active_params=parameters.active,
            stored=StoredWeights.of(model),
            config=model,
        )


@dataclass(frozen=True, kw_only=True)
class PlannedSlice(Record):
    """The slice of a plan, with its chips and devices, and the calibration of its chip (None: the catalogue's)."""

    name: str
    chips: int
    devices: int
    calibrated: Calibrated | None = None

    @classmethod
    def of(cls, slice_: Slice) -> PlannedSlice:
        """The record of a slice."""
        return cls(
            name=slice_.name, chips=slice_.chips, devices=slice_.devices, calibrated=slice_.chip.calibrated
        )  # fmt: skip

    @property
    def hardware(self) -> Slice:
        """The slice. Raises RooftopError on a name that is none, and on the calibration of another chip."""
        return Slice.parse(self.name).with_calibration(self.calibrated)


@dataclass(frozen=True, kw_only=True)
class Reason(Record):
    """A rule of the book applied to a plan. It holds if ``value`` is at least ``limit``."""

    rule: str
    source: str
    formula: str
    value: float
    limit: float
    text: str

    @derived
    def holds(self) -> bool:
        """True if the rule holds."""
        return bool(self.value >= self.limit)

    @derived
    def margin(self) -> float:
        """Value over limit: 2 is twice as much as needed, 0.5 half."""
        return self.value / self.limit if self.limit else float("inf")


class Balance(Reason):
    """A rule that two figures should be about equal. It holds if they are within a factor of two."""

    @derived
    def holds(self) -> bool:
        """True if the rule holds."""
        return 0.5 <= self.margin <= 2
