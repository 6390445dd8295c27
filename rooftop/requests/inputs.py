"""The objects that are meant by fields of requests, which are objects or the strings of the command line."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rooftop.core.errors import RooftopError
from rooftop.core.files import read_json_object
from rooftop.core.quantities import LARGEST_QUANTITY, parse_quantity, parse_seconds
from rooftop.core.records import read_record
from rooftop.hardware import Calibrated, Chip, Slice, named_chip
from rooftop.models import ModelConfig, find_model

if TYPE_CHECKING:
    from rooftop.arrays import Mesh
    from rooftop.plan.embedding.plan import EmbedPlan
    from rooftop.plan.serving.plan import ServingPlan
    from rooftop.plan.training.plan import TrainingPlan
    from rooftop.requests.likes import (
        AxesLike,
        CalibrationLike,
        ChipLike,
        ModelLike,
        PlanLike,
        PriceLike,
        SliceLike,
        TimeLike,
    )

_Plan = TypeVar("_Plan", bound="TrainingPlan | EmbedPlan | ServingPlan")


def slice_of(on: SliceLike) -> Slice:
    """The slice that is meant, or whose record it is. Raises RooftopError."""
    if isinstance(on, str):
        on = Slice.parse(on)
    if isinstance(on, Mapping):
        return read_record(Slice, on, "on")
    return on if isinstance(on, Slice) else on.slice


def priced_places(places: Mapping[str, Sequence[Slice]], price: PriceLike | None) -> dict[str, list[Slice]]:
    """Slices by name, with the given dollars per chip-hour in place of list prices.

    Raises RooftopError for one number where several chips are asked for, and for a chip that is not among them.
    """
    if price is None:
        return {name: list(slices) for name, slices in places.items()}
    prices = _prices(price, list(dict.fromkeys(slice_.chip.name for slices in places.values() for slice_ in slices)))
    result: dict[str, list[Slice]] = {}
    for name, slices in places.items():
        # All slices of a name are of one chip.
        usd = prices.get(slices[0].chip.name)
        spec = slices[0].chip if usd is None else slices[0].chip.replace(price_usd_per_hour=usd)
        result[name] = [slice_ if usd is None else Slice(spec, slice_.shape, slice_.num_slices) for slice_ in slices]
    return result


def _prices(price: PriceLike, chips: Sequence[str]) -> dict[str, float]:
    """Dollars per chip-hour by chip. Raises RooftopError."""

    def dollars(value: float | str) -> float:
        return parse_quantity(value, "price", smallest=1e-6, largest=1e6)

    if isinstance(price, Mapping):
        entries = [(str(name), usd) for name, usd in price.items()]
    elif isinstance(price, str) and "=" in price:
        pairs = (entry.partition("=") for entry in price.split(","))
        entries = [(name.strip(), usd.strip()) for name, _, usd in pairs]
    else:
        usd = dollars(price)
        if len(chips) > 1:
            raise RooftopError(
                "price", price, "a price for each chip: " + ",".join(f"{name}={usd:g}" for name in chips)
            )
        return {chips[0]: usd}
    prices: dict[str, float] = {}
    for entry, value in entries:
        try:
            name = named_chip(entry).name
        except RooftopError:
            # A chip of a user's own, or none.
            name = entry
        if name not in chips or name in prices:
            once = "once for each chip" if name in prices else "of a chip that is asked for"
            raise RooftopError("price", f"{entry}={value}", f"CHIP=USD {once}: {', '.join(chips)}")
        prices[name] = dollars(value)
    return prices


def calibration_of(calibration: CalibrationLike | None) -> Calibrated | None:
    """The fractions that are meant. Raises RooftopError if a file is not a calibration of a chip."""
    if calibration is None or isinstance(calibration, Calibrated):
        return calibration
    if isinstance(calibration, Mapping):
        return read_record(Calibrated, calibration, "calibration")
    if isinstance(calibration, (str, Path)):
        from rooftop.roofline.calibration import read_fractions

        return read_fractions(Path(calibration))
    if calibration.fractions is None:
        raise RooftopError("calibration", "points of no chip", "a calibration of a chip: calibrate(on='CHIP:SHAPE')")
    return calibration.fractions


def calibrated_places(
    places: Mapping[str, Sequence[Slice]], calibration: CalibrationLike | None
) -> dict[str, list[Slice]]:
    """Slices by name, those of the calibrated chip with its fractions. Raises RooftopError if none is of that chip."""
    fractions = calibration_of(calibration)
    if fractions is None:
        return {name: list(slices) for name, slices in places.items()}
    chips = dict.fromkeys(slice_.chip.name for slices in places.values() for slice_ in slices)
    if fractions.chip not in chips:
        raise RooftopError("calibration", fractions.by, f"one of {' or '.join(chips)}; this one is of {fractions.chip}")
    return {
        name: [
            slice_.with_calibration(fractions) if slice_.chip.name == fractions.chip else slice_ for slice_ in slices
        ]
        for name, slices in places.items()
    }


def recalibrated(plan: _Plan, calibration: CalibrationLike | None) -> _Plan:
    """The plan with the fractions of a calibration. Raises RooftopError for one of another chip."""
    fractions = calibration_of(calibration)
    if fractions is None:
        return plan
    data = dict(plan.to_json())
    data["slice"] = {**data["slice"], "calibrated": fractions.to_json()}
    calibrated: _Plan = type(plan).from_json(data)  # type: ignore[assignment]  # of the same class
    return calibrated


def chip_of(on: ChipLike, figures: Mapping[str, float | str] | None = None) -> Chip:
    """The chip that is meant, or whose record it is, with ``figures`` overridden. Raises RooftopError."""
    if isinstance(on, str):
        on = named_chip(on)
    if isinstance(on, Mapping):
        on = read_record(Chip, on, "on")
    spec = on if isinstance(on, Chip) else on.chip
    return spec.replace(**figures_of(figures)) if figures else spec


def model_of(model: ModelLike) -> ModelConfig:
    """The model that is meant, or whose record it is. Raises RooftopError."""
    if isinstance(model, (str, Path)):
        return find_model(str(model))
    if isinstance(model, Mapping):
        return ModelConfig.from_json(model)
    return model if isinstance(model, ModelConfig) else model.config


def plan_of(plan: PlanLike) -> TrainingPlan | EmbedPlan:
    """Return the plan. Raises RooftopError for a file or mapping that is not a training or embedding plan."""
    from rooftop.plan.embedding.plan import EmbedPlan
    from rooftop.plan.training.plan import TrainingPlan

    if isinstance(plan, (TrainingPlan, EmbedPlan)):
        return plan
    if isinstance(plan, (str, Path)):
        name = str(plan)
        data: Mapping[str, object] = read_json_object(
            Path(plan), field="plan", accepted="a plan.json written by rooftop plan"
        )
    elif isinstance(plan, Mapping):
        name, data = "a mapping", plan
    else:
        return plan.plan
    kind = data.get("kind")
    if kind not in ("train", "embed"):
        kind_text = f"of kind {kind!r}" if "kind" in data else "without a kind"
        raise RooftopError(
            "plan", name, f"a plan.json written by rooftop plan train or embed (this one is {kind_text})"
        )
    return TrainingPlan.from_json(data) if kind == "train" else EmbedPlan.from_json(data)


def training_plan_of(plan: PlanLike) -> TrainingPlan:
    """The training plan that is meant. Raises RooftopError for anything else, a plan of embeddings among it."""
    from rooftop.plan.training.plan import TrainingPlan

    training = plan_of(plan)
    if not isinstance(training, TrainingPlan):
        name = str(plan) if isinstance(plan, (str, Path)) else "a plan of embeddings"
        raise RooftopError("plan", name, "a plan.json written by rooftop plan train (this one is of kind 'embed')")
    return training


def seconds_of(time: TimeLike, field: str) -> float:
    """The seconds of a time. Raises RooftopError naming ``field``."""
    if isinstance(time, str):
        return parse_seconds(time, field)
    if not 0 < time < math.inf:
        raise RooftopError(field, time, "a positive number of seconds")
    return float(time)


def rate_of(requests_per_second: float | str | None) -> float | None:
    """The rate of requests. Raises RooftopError."""
    if requests_per_second is None:
        return None
    return parse_quantity(requests_per_second, "requests-per-second", smallest=1e-9, largest=1e12)


def axes_of(mesh: AxesLike, known: Iterable[str] | None = None) -> dict[str, int]:
    """Sizes of mesh axes; ``known`` are the names that are accepted, None any. Raises RooftopError."""
    from rooftop.arrays import parse_axes

    text = mesh if isinstance(mesh, str) else ",".join(f"{name}={size}" for name, size in mesh.items())
    return parse_axes(text, known)


def mesh_on(slice_: Slice, mesh: AxesLike | Mesh | None, layout: str | None) -> Mesh:
    """A mesh laid on a slice by its ``layout``, or else as well as it can be. Raises RooftopError if they differ."""
    from rooftop.arrays import Mesh

    if isinstance(mesh, Mesh):
        return mesh
    sizes = None if mesh is None else axes_of(mesh)
    if layout is None:
        return Mesh.lay(slice_, sizes or {axis.name: axis.size for axis in slice_.physical_axes})
    laid = Mesh.from_layout(slice_, layout)
    if sizes is not None and laid.shape != sizes:
        raise RooftopError("layout", layout, f"a layout of the mesh {mesh}; this one is of {laid.shape}")
    return laid


def figures_of(figures: Mapping[str, float | str]) -> dict[str, float | dict[str, float]]:
    """Figures of a chip by name; 'flops_per_s.bf16' is that of a dtype. Raises RooftopError."""
    numbers: dict[str, float | dict[str, float]] = {}
    rates: dict[str, float] = {}
    for name, value in figures.items():
        number = parse_quantity(value, f"figure {name}", largest=LARGEST_QUANTITY)
        if name.startswith("flops_per_s."):
            rates[name.removeprefix("flops_per_s.")] = number
        else:
            numbers[name] = number
    return numbers | ({"flops_per_s": rates} if rates else {})
