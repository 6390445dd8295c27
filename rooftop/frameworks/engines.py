"""Engines for one job: their kernels, overheads, limits and defaults, by release, family of chips and settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rooftop.core.errors import RooftopError, unknown
from rooftop.frameworks.framework import ENGINES, Job, framework_data, runs_on
from rooftop.hardware import Chip
from rooftop.models import ModelConfig

#: Parts of a plan that the file of an engine decides.
_PARTS = ("habits", "overheads", "scales")


@dataclass(frozen=True, kw_only=True)
class Overheads:
    """Seconds of an engine next to its kernels.

    ``gap_s`` passes next to each kernel in which none runs that was measured (norms, rotations). ``host_s`` is the
    least of a kernel where the host launches kernels one by one: in a step that prefills, and in all without CUDA
    graphs. ``request_s`` of a request and ``token_s`` of a token of its prompt pass in the front end (HTTP,
    tokenising), one request after another.
    """

    gap_s: float = 0.0
    host_s: float = 0.0
    request_s: float = 0.0
    token_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class EngineHabits:
    """Habits of an engine.

    ``kernels``: its table in ``kernels.toml``. ``step_tokens``: most tokens of a step; longer prompts are prefilled in
    chunks. ``memory``: the share of HBM that weights and KV fill, or with ``memory_of_free`` the share for KV of what
    weights leave. ``reserved``: the share of an answer for which there is room when a request is let in. ``balanced``:
    copies of attention prefill at the same time. ``graphs``: steps that only generate are CUDA graphs. ``kv``: dtype of
    the cache by default. ``estimate``: the reason why nothing that was measured speaks for its prices.
    """

    kernels: str = ""
    step_tokens: float = 8192.0
    memory: float = 0.9
    memory_of_free: bool = False
    reserved: float = 0.5
    balanced: bool = False
    graphs: bool = True
    kv: str = "bf16"
    estimate: str = ""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The engine that a serving plan is of, for one job.

    ``title`` is the name by which published benchmarks know it. ``settings`` are all that apply, ``asked`` those that
    somebody asked for. ``weight_group`` inputs of a weight in the job's dtype have a scale of ``scale_bytes``; None:
    all inputs of an output have one.
    """

    name: str
    title: str
    release: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    habits: EngineHabits = EngineHabits()
    overheads: Overheads = Overheads()
    weight_group: int | None = None
    scale_bytes: float | None = None

    def __str__(self) -> str:
        return self.title if self.release is None else f"{self.title} {self.release}"

    def command(self, axes: Mapping[str, int], kv: str) -> str:
        """The command line that serves MODEL on a mesh; options of its YAML file stand after a #."""
        data = framework_data(self.name)
        words = data["words"]
        parts = [text.replace("{}", str(axes[axis])) for axis, text in words["axes"].items() if axes.get(axis, 1) > 1]
        parts += [text for dtype, text in words["kv"].items() if dtype == kv]
        for key, value in self.settings.items():
            facts = data["setting"][key]
            flag = facts["flag"].replace("{}", value) if "flag" in facts else facts.get("flags", {}).get(value)
            parts += [] if flag is None else [flag]
        flags, options = zip(*(part.partition("#")[::2] for part in parts), strict=True)
        command = " ".join((words["serve"], *(flag.strip() for flag in flags if flag.strip())))
        in_file = "; ".join(option.strip() for option in options if option.strip())
        return f"{command} # {in_file}" if in_file else command


def engine_of(
    name: str,
    *,
    chip: Chip,
    model: ModelConfig,
    weights: str = "bf16",
    release: str | None = None,
    settings: Mapping[str, str] | None = None,
) -> Engine | None:
    """The engine ``name`` for a model on a chip with ``weights`` in a dtype; None: rooftop's own.

    The newest release by default. Raises RooftopError for an engine, release, setting or value that does not exist, and
    for an engine that does not run on the chip.
    """
    asked = dict(settings or {})
    if name not in ENGINES:
        raise unknown("engine", name, ENGINES)
    if name == ENGINES[0] and release is not None:
        raise RooftopError(
            "release", release, f"nothing with {name}: its plans of serving are the same for all releases"
        )
    job = Job.of(name, release, chip=chip, model=model, matmul=weights)
    if not runs_on(name, chip):
        able = " or ".join(name for name in ENGINES if runs_on(name, chip))
        raise RooftopError("engine", name, f"one that runs on {chip.name}: {able}")
    applied, parts = job.applied(asked, _PARTS)
    if name == ENGINES[0]:
        return None
    return Engine(
        name=name,
        title=framework_data(name)["title"],
        release=job.release,
        settings=applied,
        asked=asked,
        habits=EngineHabits(**parts["habits"]),
        overheads=Overheads(**parts["overheads"]),
        weight_group=parts["scales"].get("group"),
        scale_bytes=parts["scales"].get("bytes"),
    )
