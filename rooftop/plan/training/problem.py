"""The input of a training plan: model, slice, workload, and the parts of the strategy that are fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property

from rooftop.arrays.mesh import Mesh
from rooftop.arrays.rules import Rules
from rooftop.capabilities import AskedSwitches, AttentionKernel, Choice, Pipeline, TrainingSpec
from rooftop.core.errors import RooftopError
from rooftop.frameworks.framework import Framework, FrameworkName, framework_of
from rooftop.hardware import Slice
from rooftop.models.adapters import Adapters, require_adaptable
from rooftop.models.config import ModelConfig
from rooftop.models.numerics import Numerics
from rooftop.models.optimizers import OPTIMIZERS
from rooftop.plan.pricing import Bounds
from rooftop.plan.shapes import require_planned
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.memory import Memory, book_memory, step_memory
from rooftop.plan.training.step import TrainingStep, priced_block
from rooftop.plan.training.strategies import Strategies
from rooftop.plan.training.workload import Workload
from rooftop.roofline.rates import Rates
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE, PipelineSchedule, require_schedule


@dataclass(frozen=True, kw_only=True)
class Problem(AskedSwitches):
    """The input of a search: model, slice, workload. A part of the strategy that is None is searched.

    ``framework`` names the program that is planned, or is one; ``program`` is that for the model and chip, which
    decides some of the number formats and assumptions: ``formats`` and ``assumed`` are those that are priced. With
    ``adapters`` these are trained, and the model is frozen.
    """

    model: ModelConfig
    slice: Slice
    workload: Workload
    numerics: Numerics = Numerics()
    assumptions: Assumptions = Assumptions()
    framework: FrameworkName | Framework = FrameworkName()
    axes: Mapping[str, int] | None = None
    mesh: Mesh | None = None
    remat: str | None = None
    microbatches: int | None = None
    schedule: PipelineSchedule | None = None
    chunks: int | None = None
    bounds: Bounds = "usable"
    adapters: Adapters | None = None

    def __post_init__(self) -> None:
        require_planned(self.model)
        if self.adapters is not None:
            require_adaptable(self.model)
            if self.numerics.update.orthogonalised:
                others = ", ".join(name for name, kind in OPTIMIZERS.items() if not kind.orthogonalised)
                raise RooftopError("optimizer", self.numerics.optimizer, f"{others}, where adapters are trained")
        if self.schedule is not None or self.chunks is not None:
            # One of the two may be searched: that which the other leaves open.
            interleaved = (self.chunks or 2) > 1 if self.schedule is None else self.schedule == "interleaved"
            plain: PipelineSchedule = "interleaved" if interleaved else DEFAULT_SCHEDULE
            require_schedule(self.schedule or plain, self.chunks or (2 if interleaved else 1))
        if self.experts_over_tensor and self.model.moe is None:
            raise RooftopError("experts_over_tensor", True, f"False for {self.model.name}, which has no experts")

    @cached_property
    def program(self) -> Framework:
        """The framework for the problem's model and chip. Raises RooftopError for one that cannot be."""
        named = self.framework
        if isinstance(named, Framework):
            return named
        return framework_of(
            named.name, chip=self.slice.chip, model=self.model, matmul=self.numerics.matmul, release=named.release,
            settings=named.settings,
        )  # fmt: skip

    @cached_property
    def assumed(self) -> Assumptions:
        """The assumptions, with those of the framework."""
        hidden = {**self.program.hidden, **self.assumptions.hidden}
        return replace(self.assumptions, **{**self.program.assumptions, "hidden": hidden})

    @cached_property
    def formats(self) -> Numerics:
        """The number formats, with those of the framework. Matmuls in that of activations stay so."""
        formats = replace(self.numerics, **self.program.numerics)
        alike = self.numerics.matmul == self.numerics.compute
        return replace(formats, matmul=formats.compute) if alike else formats

    def pinned(self, switch: str) -> bool | None:
        """A switch of the strategy as it was asked for, or as the framework has it; None if it is searched."""
        asked: bool | None = getattr(self, switch)
        return self.program.switches.get(switch) if asked is None else asked

    @cached_property
    def pipelines(self) -> tuple[Pipeline, ...]:
        """The schedules and chunks of pipeline stages that are searched, the plainest first; one if both are given."""
        program = self.program
        schedules = program.schedules if self.schedule is None else (self.schedule,)
        counts = program.chunks or (2,) if self.chunks is None else (self.chunks,)
        plain = [(name, 1) for name in schedules if name != "interleaved" and self.chunks in (None, 1)]
        tried: list[Pipeline] = [*plain, *(("interleaved", count) for count in counts if count > 1)]
        return tuple(pair for pair in tried if pair[0] in schedules or self.chunks is not None)

    @property
    def kernel(self) -> AttentionKernel:
        """The attention kernel of the program."""
        return self.assumed.kernel(self.program.habits)

    @property
    def capacity(self) -> float:
        """HBM bytes of a device: usable, or nominal with the book's bounds."""
        chip = self.slice.chip
        return chip.hbm_bytes / chip.devices if self.bounds == "book" else chip.hbm_usable_bytes

    @property
    def host_capacity(self) -> float | None:
        """Bytes of a device's part of its host's memory; None where no figure is known."""
        chip = self.slice.chip
        return None if chip.host_bytes is None else chip.host_bytes / chip.devices

    @property
    def roomy_bytes(self) -> float:
        """HBM bytes of a device that a search fills: usable ones, less the room that a compiler needs."""
        room = self.program.habits.headroom if self.bounds == "usable" else 0.0
        return (1 - room) * self.capacity

    def days_at(self, step_s: float) -> float | None:
        """Days for the token budget in steps of ``step_s``; None without a budget."""
        tokens = self.workload.tokens
        return None if tokens is None else tokens / (self.workload.batch_tokens / step_s) / 86400

    def cost_usd_at(self, step_s: float) -> float | None:
        """List price of the chips for the token budget in steps of ``step_s``; None without either."""
        price, days = self.slice.price_usd_per_hour, self.days_at(step_s)
        return None if days is None or price is None else days * 24 * price

    def memory(self, step: TrainingStep) -> Memory:
        """Bytes per device by class, by what the program holds or by the book's arithmetic."""
        return (book_memory if self.bounds == "book" else step_memory)(step)

    def step(self, strategies: Strategies) -> TrainingStep:
        """The training step under given strategies."""
        return TrainingStep(
            model=self.model, slice=self.slice, workload=self.workload, numerics=self.formats,
            assumptions=self.assumed, habits=self.program.habits, strategies=strategies, adapters=self.adapters,
        )  # fmt: skip

    def spec(self, axes: Mapping[str, int], choice: Choice) -> TrainingSpec:
        """The train step that a program is asked for, on a mesh with these ``axes``."""
        return TrainingSpec(
            model=self.model,
            axes=axes,
            sequences=self.workload.batch_seqs,
            seq_len=self.workload.seq_len,
            kernel=self.kernel,
            attention_block=self.assumed.attention_block or priced_block(self.kernel, Rates.of(self.slice.chip)),
            kind=self.slice.chip.kind,
            choice=choice,
            numerics=self.formats,
            adapters=self.adapters,
            rules=_rules(tuple(axes), experts_over_tensor=choice.experts_over_tensor),
        )


@cache
def _rules(axes: tuple[str, ...], *, experts_over_tensor: bool) -> Rules:
    """The rules over the axes of a mesh: the same for all meshes of a search."""
    rules = Rules().with_whole_experts if experts_over_tensor else Rules()
    return rules.only(dict.fromkeys(axes, 1))
