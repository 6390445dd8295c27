"""Factors of a search: options of the compiler, and changes to a plan that its planner expects to be worth a look."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from rooftop.arrays.mesh import Mesh
from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, GATHER_AXES, STAGE_AXES
from rooftop.capabilities import SWITCHES, Switches
from rooftop.core.errors import RooftopError
from rooftop.core.records import field_values
from rooftop.hardware import Slice
from rooftop.models.activations import searched_policies
from rooftop.models.config import ModelConfig
from rooftop.models.program_sizes import block_size
from rooftop.models.segments import segments
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.search import SweepOptions, sweep

#: Value of an option of XLA.
OptionValue = bool | int | str
#: What a search may vary of a plan, in words of the command line; ``options`` are those of the compiler.
SEARCHED: tuple[str, ...] = ("options", "remat", "microbatches", "attention", "layout", "mesh", "switches")
#: What it varies unless it is asked for other things. Prices of attention kernels count the blocks that they visit, and
#: not what each visit costs: they favour small blocks.
USUAL: tuple[str, ...] = tuple(name for name in SEARCHED if name != "attention")
#: Largest planned time of a candidate, over that of the plan: the median error of plans of training is within it.
_PLANNED = 1.15
#: Candidates of one kind that are compiled: the best by the planner.
_MOST = 4
#: Positions in a block of attention.
_BLOCKS = (256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, kw_only=True)
class Factor:
    """One change: ``options`` of the compiler, a ``change`` of the program, or both.

    At most one factor of a ``knob`` is set at a time. ``recipe``: published recipes for the chip set it, and
    ``sources`` name the pages.
    """

    knob: str
    name: str
    options: Mapping[str, OptionValue] = field(default_factory=dict)
    change: Mapping[str, Any] = field(default_factory=dict)
    recipe: bool = False
    sources: tuple[str, ...] = ()


@cache
def _option_table() -> tuple[Mapping[str, Any], ...]:
    text = Path(__file__).with_name("options.toml").read_text(encoding="utf-8")
    return tuple(tomllib.loads(text)["option"])


def option_factors(slice_: Slice, uses: Iterable[str] | None = None) -> tuple[Factor, ...]:
    """Options of XLA:TPU for a slice, in the order of the file; none for GPUs.

    ``uses`` are what the program has (gather, tensor, expert, slices, offload); None if that is not known.
    """
    chip = slice_.chip
    if chip.kind != "tpu":
        return ()
    own = None if uses is None else set(uses)
    return tuple(
        Factor(
            knob=entry["knob"],
            name=entry["name"],
            options=entry["set"],
            recipe=chip.name in entry.get("recipes", ()),
            sources=tuple(entry["sources"]),
        )
        for entry in _option_table()
        if chip.name in entry.get("chips", (chip.name,))
        and (own is None or "where" not in entry or own & set(entry["where"]))
    )


def plan_uses(plan: TrainingPlan) -> tuple[str, ...]:
    """Parts of a plan's program that options matter to, in the words of ``options.toml``."""
    mesh = plan.mesh
    has = {
        "gather": mesh.size(*GATHER_AXES) > 1,
        "tensor": mesh.size(*COLUMN_AXES) > 1,
        "expert": mesh.size(*EXPERT_AXES) > 1,
        "slices": plan.problem.slice.num_slices > 1,
        "offload": "offload" in plan.choice.policy.values(),
    }
    return tuple(name for name, is_there in has.items() if is_there)


def changed_plan(plan: TrainingPlan, change: Mapping[str, Any]) -> TrainingPlan:
    """The plan with some fields changed: layout, remat, microbatches, attention_block and the switches of a choice.

    Raises RooftopError for a layout or policy that cannot be.
    """
    choice, problem, mesh = plan.choice, plan.problem, plan.mesh
    for name, value in change.items():
        if name == "layout":
            mesh = Mesh.from_layout(problem.slice, value)
        elif name == "attention_block":
            problem = replace(problem, assumptions=replace(problem.assumptions, attention_block=value))
        elif name in ("remat", "microbatches", *SWITCHES):
            choice = replace(choice, **{name: value})
        else:
            raise RooftopError("change", name, "layout, remat, microbatches, attention_block or a switch of a plan")
    return TrainingPlan(problem=problem, mesh=mesh, choice=choice)


def plan_factors(plan: TrainingPlan, kind: str) -> tuple[Factor, ...]:
    """Changes of a plan of one ``kind`` (``SEARCHED``), the best by the planner first.

    Left out are changes that no program runs, that do not fit by the planner's arithmetic, and that it expects to take
    15% longer than the plan. Kernels' blocks do not change what it expects.
    """
    if kind == "options":
        return option_factors(plan.problem.slice, plan_uses(plan))
    changes = {
        "remat": _remats, "microbatches": _counts, "attention": _blocks, "layout": _layouts, "mesh": _meshes,
        "switches": _switches,
    }  # fmt: skip
    return _worth(plan, changes[kind](plan), knob="mesh" if kind == "mesh" else "")


def _remats(plan: TrainingPlan) -> Iterator[Mapping[str, Any]]:
    exchanges = plan.problem.model.moe is not None and plan.mesh.size(*EXPERT_AXES, *COLUMN_AXES) > 1
    for name in searched_policies(exchanges=exchanges):
        if name != plan.choice.remat:
            yield {"remat": name}


def _counts(plan: TrainingPlan) -> Iterator[Mapping[str, Any]]:
    for count in (2**power for power in range(8)):
        if count != plan.choice.microbatches and count <= plan.problem.workload.batch_seqs:
            yield {"microbatches": count}


def _blocks(plan: TrainingPlan) -> Iterator[Mapping[str, Any]]:
    """Blocks of attention kernels that differ once they divide a sequence."""
    seq = plan.problem.workload.seq_len
    seen = {block_size(seq, plan.spec.attention_block)}
    for size in _BLOCKS if plan.spec.kernel == "splash" else ():
        if (own := block_size(seq, size)) not in seen:
            seen.add(own)
            yield {"attention_block": size}


def _switches(plan: TrainingPlan) -> Iterator[Mapping[str, Any]]:
    if plan.mesh.size(*COLUMN_AXES) > 1:
        yield {"collective_matmuls": not plan.choice.collective_matmuls}
        if plan.problem.model.moe is not None:
            yield {"experts_over_tensor": not plan.choice.experts_over_tensor}


def _worth(plan: TrainingPlan, changes: Iterable[Mapping[str, Any]], knob: str = "") -> tuple[Factor, ...]:
    """The changes that the planner expects to be worth a compilation, the fastest first."""
    # Of a plan that does not fit, what needs less memory is worth a look, at any time.
    slowest_s = _PLANNED * plan.expected_s if plan.fits else float("inf")
    ranked = list[tuple[float, Factor]]()
    for change in changes:
        try:
            other = changed_plan(plan, change)
            if other.obstacles or not other.fits or other.expected_s > slowest_s:
                continue
        except RooftopError:
            continue
        name = ", ".join(f"{key.replace('_', ' ')} {_written(value)}" for key, value in change.items())
        ranked.append((other.expected_s, Factor(knob=knob or next(iter(change)), name=name, change=change)))
    # Equals stay in the order in which they were named.
    return tuple(factor for _, factor in sorted(ranked, key=lambda entry: entry[0])[:_MOST])


def _written(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def _layouts(plan: TrainingPlan) -> Iterator[Mapping[str, Any]]:
    """Other layouts of the plan's mesh on its slice, one of those that take equally long."""
    axes = {name: size for name, size in plan.mesh.shape.items() if size > 1}
    choice = plan.choice
    if not axes:
        return
    pinned = replace(
        plan.problem, axes=axes, mesh=None, remat=choice.remat, microbatches=choice.microbatches,
        **field_values(choice, Switches),
    )  # fmt: skip
    result = sweep(pinned, SweepOptions(exhaustive=True))
    seen = {round(plan.expected_s, 9)}
    for index in result.expected_s[:, 0].argsort(kind="stable"):
        seconds = round(float(result.expected_s[index, 0]), 9)
        if seconds not in seen:
            seen.add(seconds)
            yield {"layout": result.plan((int(index), 0)).mesh.layout}


def _meshes(plan: TrainingPlan) -> Iterator[Mapping[str, Any]]:
    """Other meshes, each with what the planner chooses for it."""
    searched = replace(plan.problem, axes=None, mesh=None, remat=None, microbatches=None)
    result = sweep(searched, SweepOptions(executable=True))
    if not result.fits.any():
        return
    own = {name: size for name, size in plan.mesh.shape.items() if size > 1}
    for candidate in (result.best, *result.alternatives(_MOST)):
        other = result.plan(candidate)
        if {name: size for name, size in other.mesh.shape.items() if size > 1} != own:
            change: dict[str, Any] = {"layout": other.mesh.layout}
            for name in ("remat", "microbatches", *SWITCHES):
                if getattr(other.choice, name) != getattr(plan.choice, name):
                    change[name] = getattr(other.choice, name)
            yield change


def in_turns(groups: Sequence[Sequence[Factor]]) -> tuple[Factor, ...]:
    """The first factor of each group, then the second of each, and so on."""
    return tuple(factor for row in zip_longest(*groups) for factor in row if factor is not None)


def few_layers(plan: TrainingPlan, layers: int | None = None) -> TrainingPlan:
    """The plan of the same model with ``layers``, by default the fewest that have two of every kind that repeats.

    To XLA a scan over one layer is no loop, and its schedule another. Every chunk of a pipeline stage has as many.
    Raises RooftopError for more layers than the model has, and where no program runs it.
    """
    model = plan.problem.model
    parts = plan.mesh.size(*STAGE_AXES) * plan.choice.chunks
    runs = segments(model)
    period = max(len(segment.kinds) for segment in runs)
    lead = runs[0].repeats * len(runs[0].kinds) if len(runs) > 1 else 0
    count = layers or lead + 2 * period * parts
    if not 1 <= count <= model.layers:
        raise RooftopError("layers", count, f"1 to {model.layers}, those of {model.name}")
    short = replace(plan, problem=replace(plan.problem, model=_shortened(model, count)))
    if short.obstacles:
        raise RooftopError("layers", count, f"a number that a program runs ({short.obstacles[0]})")
    return short


def _shortened(model: ModelConfig, layers: int) -> ModelConfig:
    """The model with its first ``layers``."""
    own = {name: getattr(model, name)[:layers] for name in ("layer_windows", "rope_layers", "mixers")}
    return replace(model, layers=layers, shared_kv_layers=min(model.shared_kv_layers, layers - 1), **own)
