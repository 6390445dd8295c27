"""Records that plan.json of training, serving and embeddings share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

from rooftop.core.records import Record
from rooftop.hardware import GIVEN, Calibrated, Slice
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
    """The slice of a plan: its chips and devices, the calibration of its chip (None: the catalogue's), and its price.

    ``price_source`` is the source and date of a list price, or "given".
    """

    name: str
    chips: int
    devices: int
    calibrated: Calibrated | None = None
    price_usd_per_hour: float | None = None
    price_source: str | None = None

    @classmethod
    def of(cls, slice_: Slice) -> PlannedSlice:
        """The record of a slice."""
        return cls(
            name=slice_.name,
            chips=slice_.chips,
            devices=slice_.devices,
            calibrated=slice_.chip.calibrated,
            price_usd_per_hour=slice_.chip.price_usd_per_hour,
            price_source=slice_.chip.price_source,
        )

    @property
    def hardware(self) -> Slice:
        """The slice. Raises RooftopError on a name that is none, and on the calibration of another chip."""
        where = Slice.parse(self.name).with_calibration(self.calibrated)
        if self.price_source != GIVEN:
            return where
        return Slice(where.chip.replace(price_usd_per_hour=self.price_usd_per_hour), where.shape, where.num_slices)


@dataclass(frozen=True, kw_only=True)
class Reason(Record):
    """A rule of the book applied to a plan. ``margin`` is value over limit: 2 is twice as much as needed, 0.5 half."""

    rule: str
    source: str
    formula: str
    value: float
    limit: float
    text: str
    holds: bool
    margin: float

    @classmethod
    def at_least(cls, *, rule: str, source: str, formula: str, value: float, limit: float, text: str) -> Reason:
        """A rule that holds if ``value`` is at least ``limit``."""
        return cls(
            rule=rule,
            source=source,
            formula=formula,
            value=value,
            limit=limit,
            text=text,
            holds=bool(value >= limit),
            margin=value / limit if limit else inf,
        )

    @classmethod
    def balanced(cls, *, rule: str, source: str, formula: str, value: float, limit: float, text: str) -> Reason:
        """A rule that two figures should be about equal. It holds if they are within a factor of two."""
        one = cls.at_least(rule=rule, source=source, formula=formula, value=value, limit=limit, text=text)
        return replace(one, holds=bool(0.5 <= one.margin <= 2))


@dataclass(frozen=True, kw_only=True)
class PipelineFigures(Record):
    """A plan's pipeline, simulated, next to the closed forms that price it.

    ``bubble`` is the share of the passes that a stage waits, ``in_flight`` the most microbatches whose activations one
    stage holds. ``passes_s`` is the time of the passes at the stages' own pace, ``lockstep_s`` that in lockstep.
    """

    schedule: str
    stages: int
    microbatches: int
    chunks: int
    bubble: float
    bubble_closed_form: float
    in_flight: float
    in_flight_closed_form: float
    passes_s: float
    lockstep_s: float
