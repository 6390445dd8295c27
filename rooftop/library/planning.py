"""Plans of training runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from rooftop.arrays import Mesh
from rooftop.arrays.rules import AXES, STAGE_AXES
from rooftop.core.errors import RooftopError, one_of
from rooftop.core.files import write_json, write_text
from rooftop.core.quantities import format_bytes, format_seconds, parse_count, parse_dtype, parse_quantity
from rooftop.core.records import field_values
from rooftop.core.timelines import perfetto, xprof
from rooftop.hardware import Chip, Slice, slice_sizes
from rooftop.library.inputs import (
    AxesLike,
    CalibrationLike,
    CountLike,
    ModelLike,
    PriceLike,
    SliceLike,
    axes_of,
    calibrated_places,
    chip_of,
    model_of,
    priced_places,
    slice_of,
)
from rooftop.library.results import Result, ledger_rows
from rooftop.plan.pricing import BOUNDS, OnProgress
from rooftop.plan.training import answer as training
from rooftop.plan.training.answer import TrainingAnswer
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.comparison import (
    MOST_CHIPS,
    Aim,
    ComparedAnswerDocument,
    Limits,
    SliceComparison,
    compare,
    searched_on,
)
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import MOST_TOKENS, Numerics, Workload
from rooftop.present.documents import document
from rooftop.roofline.rates import device_stats
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE, SCHEDULES
from rooftop.simulate.pipeline import of_plan
from rooftop.simulate.planned import planned_lanes

#: The longest run, a century, and the largest budget in dollars: more is a slip of the keyboard.
LARGEST_DAYS, LARGEST_BUDGET = 36_500, 1e12
#: Tokens of a sequence by default.
_SEQ = 4096
#: Tokens of a step where slices are compared and no batch is given: LLaMA-2's 4 Mi, doubled until a run takes no more
#: than a million steps, as LLaMA-3's 15 T tokens at 16 Mi.
_LEAST_BATCH, _MOST_STEPS = 4 * 2**20, 1e6
#: A slice or several, or chips whose size is searched; or their text: 'v5p,v6e:16x16@8'.
SlicesLike: TypeAlias = SliceLike | Chip | Sequence[SliceLike | Chip]

if TYPE_CHECKING:
    from rooftop.present.document import Document


@dataclass(frozen=True, kw_only=True, repr=False)
class TrainingPlanResult(Result):
    """The best plan of a training run, the runners-up, and the changes that would help."""

    answer: TrainingAnswer
    comparison: SliceComparison | None = None
    """The slices that were compared, if there was more than one slice or a limit."""

    @property
    def plan(self) -> TrainingPlan:
        """The best plan."""
        return self.answer.plan

    @cached_property
    def _data(self) -> dict[str, object]:
        data: dict[str, object] = self.answer.to_json()
        if self.comparison is not None:
            document = self.answer.document
            compared = ComparedAnswerDocument(**field_values(document), comparison=self.comparison.document)
            data = compared.to_json()
        return data | {"pipeline": of_plan(self.plan).to_json()} if self.plan.mesh.size(*STAGE_AXES) > 1 else data

    def to_json(self) -> dict[str, object]:
        """plan.json: all that is needed to build, compile and run the program."""
        return dict(self._data)

    @property
    def rows(self) -> list[dict[str, object]]:
        """The planned ledger."""
        return ledger_rows(self.plan.ledger)

    @property
    def summary(self) -> str:
        """Mesh, step time, MFU and memory."""
        plan = self.plan
        mesh = " x ".join(f"{name} {size}" for name, size in plan.mesh.shape.items() if size > 1) or "one device"
        fits = "" if plan.fits else "does not fit: "
        return (
            f"{plan.problem.model.name} on {plan.problem.slice.name}: {mesh}\n"
            f"{fits}{format_seconds(plan.expected_s)} a step expected, bound by {plan.bound}, MFU {plan.mfu:.1%}, "
            f"{format_bytes(plan.memory_bytes)} of {format_bytes(plan.problem.capacity)} a device"
        )

    def raise_if_infeasible(self) -> None:
        """Raise Infeasible, with the nearest that is one, if no plan fits, no program runs it, or it misses a limit."""
        self.answer.require_fit()
        self.answer.require_executable()
        if self.comparison is not None:
            self.comparison.require_met()

    @property
    def document(self) -> Document:
        """The plan, its reasons and alternatives, and the planned timeline."""
        return document(self._data, lanes=[planned_lanes(self.plan)])

    def write_plan(self, path: Path | str) -> None:
        """Write plan.json. Raises RooftopError if the path cannot be written."""
        write_json(Path(path), self._data)

    def write_perfetto(self, path: Path | str) -> None:
        """Write the planned timeline for ui.perfetto.dev."""
        write_text(Path(path), json.dumps(perfetto.trace(planned_lanes(self.plan)), allow_nan=False))

    def write_xprof(self, folder: Path | str) -> None:
        """Write the planned timeline as a profile for XProf and TensorBoard."""
        lanes = planned_lanes(self.plan, every_trip=True)
        stats = device_stats(self.plan.problem.slice.chip)
        xprof.write(xprof.xspace(lanes, program="planned", device=stats), Path(folder), run="planned")


def plan_training(
    model: ModelLike,
    *,
    on: SlicesLike,
    batch_tokens: CountLike | None = None,
    batch_seqs: CountLike | None = None,
    seq: CountLike | None = None,
    tokens: CountLike | None = None,
    days: float | str | None = None,
    budget: float | str | None = None,
    chips: CountLike | None = None,
    smallest: bool = False,
    mesh: AxesLike | Mesh | None = None,
    layout: str | None = None,
    remat: str | None = None,
    microbatches: CountLike | None = None,
    collective_matmuls: bool | None = None,
    experts_over_tensor: bool | None = None,
    schedule: str = DEFAULT_SCHEDULE,
    chunks: CountLike = 1,
    optimizer: str = "adamw",
    matmul_dtype: str = "bf16",
    weights_dtype: str = "f32",
    moments_dtype: str = "f32",
    assume: str | None = None,
    calibration: CalibrationLike | None = None,
    bounds: str = "usable",
    price: PriceLike | None = None,
    alternatives: CountLike = 5,
    on_progress: OnProgress | None = None,
) -> TrainingPlanResult:
    """Plan a training run: search mesh, layout, remat and microbatches, and predict time, memory and cost.

    With several slices, chips without a shape, or a limit, compare slices and plan the one that is recommended: the
    cheapest that is in time; the fastest within ``budget`` or ``chips`` without ``days``; or the ``smallest``.

    Args:
        model: A preset, a ModelConfig, or the path of a Hugging Face config.json or of its folder.
        on: A slice, CHIP:SHAPE[@SLICES]; or several, or chips whose size is searched: 'v5p,v6e:16x16@8'.
        batch_tokens: Tokens of a step, rounded to whole sequences; give this or ``batch_seqs``. Where slices are
            compared, by default at least 4 Mi and so many that a run takes at most a million steps.
        batch_seqs: Sequences of a step.
        seq: Tokens of a sequence; by default 4,096, or as many as the model was made for.
        tokens: Tokens in all, for days and cost.
        days: Limit of the days for all tokens.
        budget: Limit of the dollars for all tokens, at list prices.
        chips: Limit of the chips.
        smallest: Recommend the smallest slice that fits and meets the limits.
        mesh: Sizes of axes, or a Mesh with its layout; searched by default.
        layout: Axes pinned to the torus, 'fsdp=x+y,tensor=z', instead of ``mesh``.
        remat: none, matmuls, minimal, block, or changes such as 'block,qkv=offload'; searched by default.
        microbatches: Microbatches of a step; searched by default.
        collective_matmuls: Overlap dense matmuls with their collectives over tensor; searched by default, where the
            chip's compiler overlaps them.
        experts_over_tensor: Deal out whole experts over tensor, in place of their columns; searched by default.
        schedule: Of pipeline stages: eager_1f1b, gpipe, 1f1b, interleaved or zero_bubble.
        chunks: Model chunks of a stage (interleaved).
        optimizer: adamw, adam, lion, muon, adafactor or sgd.
        matmul_dtype: Dtype of the layers' matmuls.
        weights_dtype: Dtype of the stored weights.
        moments_dtype: Dtype of the optimizer's moments.
        assume: Shares of transfers that hide behind compute: 'weight_gather=1,tensor=0.5'.
        calibration: A calibration file of `rooftop calibrate`, or its fractions: they replace the catalogue's.
        bounds: 'usable' HBM and XLA's memory, or the 'book' arithmetic.
        price: Dollars per chip-hour, instead of the list price; by chip where several are asked for: 'h100=2.5,v5p=3'.
        alternatives: Runners-up to keep.
        on_progress: Called with mesh shapes or slices priced, their number, and a label.

    A plan that does not fit, that no program runs or that misses a limit is returned: ``raise_if_infeasible`` raises
    Infeasible for it. Raises Infeasible if slices are compared and nothing fits any, and RooftopError naming the
    argument that is wrong.
    """
    limits = Limits(
        days=None if days is None else parse_quantity(days, "days", largest=LARGEST_DAYS),
        budget_usd=None
        if budget is None
        else parse_quantity(str(budget).removeprefix("$"), "budget", largest=LARGEST_BUDGET),
        chips=None if chips is None else parse_count(chips, "chips"),
    )
    places, comparing = _places(on, limits, smallest)
    places = calibrated_places(priced_places(places, price), calibration)
    if limits.days is not None or limits.budget_usd is not None:
        _require_a_price(places)
    config, where = model_of(model), next(iter(places.values()))[0]
    seq = min(_SEQ, config.max_seq_len) if seq is None else seq
    batch_given = batch_tokens is not None or batch_seqs is not None
    if comparing:
        for name, value in (("mesh", mesh), ("layout", layout)):
            if value is not None:
                raise RooftopError(name, value, "this with one slice, such as --on v5p:16x16x16, and no limits")
        if not batch_given:
            batch_seqs = max(1, round(_usual_batch(tokens) / parse_count(seq, "seq")))
    if mesh is not None and layout is not None:
        raise RooftopError("layout", layout, "--mesh or --layout, not both: a layout says the sizes too")
    if layout is not None:
        mesh = Mesh.from_layout(where, layout)
    problem = Problem(
        model=config,
        slice=where,
        workload=_workload(batch_tokens, batch_seqs, seq, tokens),
        numerics=Numerics(
            matmul=parse_dtype(matmul_dtype, "matmul-dtype"),
            weights=parse_dtype(weights_dtype, "weights-dtype"),
            moments=parse_dtype(moments_dtype, "moments-dtype"),
            optimizer=optimizer,
        ),
        assumptions=Assumptions() if assume is None else Assumptions().with_hidden(assume),
        axes=None if mesh is None or isinstance(mesh, Mesh) else axes_of(mesh, AXES),
        mesh=mesh if isinstance(mesh, Mesh) else None,
        remat=remat,
        microbatches=None if microbatches is None else parse_count(microbatches, "microbatches"),
        collective_matmuls=collective_matmuls,
        experts_over_tensor=experts_over_tensor,
        schedule=one_of("schedule", schedule, SCHEDULES),
        chunks=parse_count(chunks, "chunks"),
        bounds=one_of("bounds", bounds, BOUNDS),
    )
    count = parse_count(alternatives, "alternatives")
    if not comparing:
        return TrainingPlanResult(answer=training.plan_training(problem, alternatives=count, on_progress=on_progress))
    aim: Aim = "chips" if smallest else "time" if limits.days is None else "cost"
    compared = compare(problem, places, limits, aim, on_progress)
    answer = training.answer_of(searched_on(compared.best), alternatives=count, batch_given=batch_given)
    return TrainingPlanResult(answer=answer, comparison=compared)


def _usual_batch(tokens: CountLike | None) -> int:
    """Tokens of a step of a run of ``tokens``, where none are given."""
    batch = _LEAST_BATCH
    while tokens is not None and parse_count(tokens, "tokens") > _MOST_STEPS * batch:
        batch *= 2
    return batch


def _require_a_price(places: Mapping[str, Sequence[Slice]]) -> None:
    """Raise RooftopError, with the chips, if none has a price: their dollars cannot be compared."""
    chips = dict.fromkeys(slices[0].chip for slices in places.values())
    if all(spec.price_usd_per_hour is None for spec in chips):
        names = [spec.name for spec in chips]
        prices = ",".join(f"{name}=USD" for name in names)
        raise RooftopError("price", None, f"dollars per chip-hour, --price {prices}: no list price is known")


def _places(on: SlicesLike, limits: Limits, smallest: bool) -> tuple[dict[str, list[Slice]], bool]:
    """The slices that are meant, by the names that were given, and whether they are compared. Raises RooftopError."""
    if isinstance(on, str):
        names: Sequence[SliceLike | Chip] = [name.strip() for name in on.split(",")]
    else:
        names = on if isinstance(on, Sequence) else [on]
    is_open = smallest or limits != Limits()
    places = {}
    for name in names:
        is_chip = isinstance(name, Chip) or (isinstance(name, str) and ":" not in name)
        if not smallest and not is_chip:
            where = slice_of(cast(SliceLike, name))
            places[where.name] = [where]
            continue
        spec = chip_of(cast("Chip | str", name)) if is_chip else slice_of(cast(SliceLike, name)).chip
        if not is_open:
            accepted = "with a shape, such as v5p:16x16x16; or with --days, --budget, --chips or --smallest"
            raise RooftopError("on", spec.name, accepted)
        sizes = slice_sizes(spec, MOST_CHIPS if limits.chips is None else limits.chips)
        if not sizes:
            raise RooftopError("chips", limits.chips, f"at least the smallest slice of {spec.name}")
        places[spec.name] = sizes
    return places, is_open or len(places) > 1


def _workload(
    batch_tokens: CountLike | None, batch_seqs: CountLike | None, seq: CountLike, tokens: CountLike | None
) -> Workload:
    length = parse_count(seq, "seq")
    if batch_tokens is not None and batch_seqs is None:
        batch = parse_count(batch_tokens, "batch-tokens")
    elif batch_seqs is not None and batch_tokens is None:
        batch = parse_count(batch_seqs, "batch-seqs") * length
    else:
        both = None if batch_tokens is None else f"{batch_tokens} and {batch_seqs}"
        raise RooftopError("batch", both, "one of --batch-tokens and --batch-seqs")
    if length > MOST_TOKENS:
        raise RooftopError("seq", length, f"tokens from 1 to {MOST_TOKENS:,}")
    if batch > MOST_TOKENS:
        option, count = ("batch-tokens", batch) if batch_seqs is None else ("batch-seqs", batch // length)
        raise RooftopError(option, count, f"tokens of a step from 1 to {MOST_TOKENS:,}")
    total = None if tokens is None else float(parse_count(tokens, "tokens"))
    return Workload.nearest(batch_tokens=batch, seq_len=length, tokens=total)
