"""Frameworks for one job: habits, assumptions and defaults by release, family of chips, kind of model and settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any

from rooftop.arrays.rules import AXES
from rooftop.capabilities import attention_kernel
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.quantities import parse_quantity, parse_share
from rooftop.core.records import Record
from rooftop.frameworks.habits import Habits
from rooftop.frameworks.launches import GRAPH_PARTS
from rooftop.frameworks.tables import data_table
from rooftop.frameworks.xla import libtpu_releases, pinned_release, planned_release, xla_rules
from rooftop.hardware import Chip
from rooftop.models import ModelConfig
from rooftop.scheduling.pipeline import DEFAULT_SCHEDULE, PipelineSchedule

#: Names of frameworks that train, ours first, and of engines that serve: each is a file in ``data/``.
FRAMEWORKS: tuple[str, ...] = ("rooftop", "maxtext", "megatron", "torchtitan")
ENGINES: tuple[str, ...] = ("rooftop", "vllm", "trtllm", "sglang")
#: Parts of a plan that rules and settings decide: fields of ``Habits``, and of a plan's assumptions, shares that hide,
#: number formats, switches, and what a search tries.
_PARTS = ("habits", "assumptions", "hidden", "numerics", "switches", "search")
#: Keys of a rule, or of a setting, that say which jobs it is about.
_MATCHED = ("releases", "from", "chips", "models", "dtypes")
#: ``releases`` of a program that is known by those of its compiler for TPUs.
_COMPILERS = "libtpu"
_EMPTY: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class FrameworkName(Record):
    """A framework, its release and the settings that were asked for, by name: what a plan keeps of its framework."""

    name: str = "rooftop"
    release: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PlannedFramework(FrameworkName):
    """A framework by name, the title by which its runs are known, and every setting that applies."""

    title: str = "rooftop"
    applied: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The program that a plan is of, for one job.

    ``title`` is the name by which published runs know it, ``axes`` are those of a mesh that it has. ``settings`` are
    all that apply, ``asked`` those that somebody asked for. ``assumptions``, ``hidden``, ``numerics`` and ``switches``
    are fields of a plan's assumptions, shares of transfers that hide, number formats and switches of the strategy
    which the framework decides. ``searched`` are the switches that a search tries, unless they are decided, and
    ``offloads`` the remat policies with checkpoints in host memory. ``schedules`` are those of pipeline stages, the
    plainest first, and ``chunks`` the numbers of a stage's model chunks in the interleaved one. ``orders`` are those in
    which axes get the ranks of devices, the innermost first; (): an axis may be anywhere.
    ``other_kernels``: why the program has not the attention kernels of published runs, if their gain may be shown.
    """

    name: str = "rooftop"
    title: str = "rooftop"
    axes: tuple[str, ...] = AXES
    release: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    asked: Mapping[str, str] = field(default_factory=dict)
    habits: Habits = Habits()
    assumptions: Mapping[str, Any] = field(default_factory=dict)
    hidden: Mapping[str, float] = field(default_factory=dict)
    numerics: Mapping[str, str] = field(default_factory=dict)
    switches: Mapping[str, bool] = field(default_factory=dict)
    searched: tuple[str, ...] = ()
    offloads: tuple[str, ...] = ()
    schedules: tuple[PipelineSchedule, ...] = (DEFAULT_SCHEDULE,)
    chunks: tuple[int, ...] = ()
    orders: tuple[tuple[str, ...], ...] = ()
    other_kernels: str | None = None

    @property
    def is_ours(self) -> bool:
        """True for rooftop's own program."""
        return self.name == FRAMEWORKS[0]

    @property
    def published(self) -> str | None:
        """The title of the published runs that a plan is priced like; None: those of other programs, priced as ours."""
        return None if self.is_ours else self.title

    def require_ours(self) -> None:
        """Raise RooftopError for a plan of another framework, which is not ours to build, compile or run."""
        if not self.is_ours:
            accepted = "a plan of rooftop's own program: rooftop plan train without --framework"
            raise RooftopError("plan", f"a plan of {self}", accepted)

    @property
    def planned(self) -> PlannedFramework:
        """The framework as plan.json has it."""
        return PlannedFramework(
            name=self.name,
            release=self.release,
            settings=dict(self.asked),
            title=self.title,
            applied=dict(self.settings),
        )

    def __str__(self) -> str:
        return self.title if self.release is None else f"{self.title} {self.release}"


def framework_of(
    name: str,
    *,
    chip: Chip,
    model: ModelConfig | None = None,
    matmul: str = "bf16",
    release: str | None = None,
    settings: Mapping[str, str] = _EMPTY,
) -> Framework:
    """The framework ``name`` for a model on a chip, with matmuls in the dtype ``matmul``.

    Without a ``model`` it has what all models have in common. The newest release by default; rooftop's own program has
    releases on TPUs, those of libtpu, and by default that of the installed one. Raises RooftopError for a
    framework, release, setting or value that does not exist, and for a framework that does not run on the chip.
    """
    data = framework_data(name)
    if not runs_on(name, chip):
        able = " or ".join(name for name in FRAMEWORKS if runs_on(name, chip))
        raise RooftopError("framework", name, f"one that runs on {chip.name}: {able}")
    job = Job.of(name, release, chip=chip, model=model, matmul=matmul)
    if (why := job.missing(data.get("dtype", {}).get(matmul, {}))) is not None:
        raise RooftopError("matmul-dtype", matmul, f"another {why}")
    applied, parts = job.applied(settings, _PARTS)
    if name == FRAMEWORKS[0]:
        parts["habits"]["attention_kernel"] = attention_kernel(chip.kind, model)
    return Framework(
        name=name,
        title=data.get("titles", {}).get(job.release, data["title"]),
        axes=tuple(data.get("axes", AXES)),
        release=job.release,
        settings=applied,
        asked=dict(settings),
        habits=Habits(**parts["habits"]),
        assumptions=parts["assumptions"],
        hidden=parts["hidden"],
        numerics=parts["numerics"],
        switches=parts["switches"],
        searched=tuple(data.get("searched", ())),
        offloads=parts["search"].get("offloads", ()),
        schedules=tuple(data["schedules"]),
        chunks=tuple(data["chunks"]),
        orders=tuple(map(tuple, data.get("orders", ()))),
        other_kernels=data.get("other_kernels"),
    )


def runs_on(name: str, chip: Chip) -> bool:
    """True if the framework ``name`` runs on a chip."""
    return chip.kind in framework_data(name)["chips"]


def parse_settings(text: str | Mapping[str, str] | None) -> dict[str, str]:
    """Settings by name, from 'cuda_graphs=layer,dispatcher=deepep'. Raises RooftopError.

    Parts of a value that has commas itself, such as tiles, hang together: a part without '=' belongs to the one before.
    """
    if text is None:
        return {}
    if isinstance(text, Mapping):
        return {str(name): str(value) for name, value in text.items()}
    if not isinstance(text, str):
        raise RooftopError("set", text, "NAME=VALUE,... or a mapping of names to values")
    settings: dict[str, str] = {}
    last = None
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if equals:
            last = name.strip()
            if not last or last in settings:
                raise RooftopError("set", text, "NAME=VALUE, each name once: cuda_graphs=layer,dispatcher=deepep")
            settings[last] = value.strip()
        elif last is None or not part.strip():
            raise RooftopError("set", text, "NAME=VALUE,...: cuda_graphs=layer,dispatcher=deepep")
        else:
            settings[last] += f",{part.strip()}"
    return settings


@cache
def framework_data(name: str) -> Mapping[str, Any]:
    """The file of a framework or engine, the rules of its compiler in front. Raises RooftopError for an unknown one."""
    if name not in (*FRAMEWORKS, *ENGINES):
        raise unknown("framework", name, FRAMEWORKS)
    data = data_table(name)
    if data.get("compiler") == "xla":
        data["rule"] = [*xla_rules(), *data.get("rule", ())]
    return data


@cache
def _families() -> Mapping[str, str]:
    """Family of each chip that has one."""
    families = data_table("families")
    return {chip: family for family, chips in families.items() for chip in chips}


def family_of(chip: str) -> str:
    """The family of a chip, or its own name."""
    return _families().get(chip, chip)


@dataclass(frozen=True, kw_only=True)
class Job:
    """The job that rules, settings and values of a file are about, or not."""

    name: str
    releases: Sequence[str]
    release: str | None
    compiler: str | None
    chip: Chip
    model: ModelConfig | None
    matmul: str

    @classmethod
    def of(cls, name: str, release: str | None, *, chip: Chip, model: ModelConfig | None, matmul: str) -> Job:
        """A job of a release, by default the newest or the compiler's. Raises RooftopError for one that is unknown."""
        releases, on_tpus = framework_data(name)["releases"], chip.kind == "tpu"
        by_compiler = releases == _COMPILERS
        if by_compiler:
            releases = libtpu_releases() if on_tpus else ()
        if release is not None and release not in releases:
            if not releases:
                raise RooftopError("release", release, f"nothing with {name} on {chip.name}: it has no releases apart")
            raise unknown("release", release, releases)
        version = release or (releases and (planned_release() if by_compiler else releases[-1])) or None
        compiler = (version if by_compiler else pinned_release()) if on_tpus else None
        return cls(
            name=name, releases=releases, release=version, compiler=compiler, chip=chip, model=model, matmul=matmul
        )

    def applied(
        self, settings: Mapping[str, str], names: Sequence[str]
    ) -> tuple[dict[str, str], dict[str, dict[str, Any]]]:
        """The settings that apply, and what rules and settings decide, by the parts ``names`` of a file.

        Raises RooftopError for a setting or a value that does not exist.
        """
        data = framework_data(self.name)
        rules = [rule for rule in data.get("rule", ()) if self.missing(rule) is None]
        defaults = {key: value for rule in rules for key, value in rule.get("settings", {}).items()}
        known = data.get("setting", {})
        for key in settings:
            if key not in known:
                raise unknown("set", key, known) if known else RooftopError("set", key, f"nothing with {self.name}")
        parts: dict[str, dict[str, Any]] = {part: {} for part in names}
        for rule in rules:
            _join(parts, rule)
        for key, value in settings.items():
            if (why := self.missing(known[key])) is not None:
                raise RooftopError("set", key, f"nothing {why}")
            if (why := self.missing(known[key].get("only", {}).get(value, {}))) is not None:
                raise RooftopError(f"set {key}", value, f"another value {why}")
        applied = {key: value for key, value in (defaults | dict(settings)).items() if self.missing(known[key]) is None}
        for key, facts in known.items():
            if key in applied:
                _join(parts, _effect(key, facts, applied[key]))
        return applied, parts

    def missing(self, facts: Mapping[str, Any]) -> str | None:
        """The reason why facts are not about the job, as in 'nothing with bf16 matmuls'; None if they are."""
        chip = self.chip.name
        if (why := self._other_model(facts.get("models"))) is not None:
            return why
        if {chip, family_of(chip), self.chip.kind}.isdisjoint(facts.get("chips", (chip,))):
            return f"on {chip}: {', '.join(facts['chips'])}"
        if self.matmul not in facts.get("dtypes", (self.matmul,)):
            return f"with {self.matmul} matmuls: {', '.join(facts['dtypes'])}"
        if facts.get("compiler", self.compiler) != self.compiler:
            return f"with {facts['compiler']} of the compiler"
        if self.release not in facts.get("releases", (self.release,)):
            return f"with {self.name} {self.release}: {', '.join(facts['releases'])}"
        first = facts.get("from")
        if first is not None and self.release is not None:
            before = self.releases.index(self.release) < self.releases.index(first)
            return f"with {self.name} {self.release}: from {first}" if before else None
        return None

    def _other_model(self, kind: str | None) -> str | None:
        """The reason why facts about models of a ``kind`` are not about the job's."""
        if kind is None:
            return None
        if self.model is None:
            return f"for a job without a model: {kind}"
        own = "dense" if self.model.moe is None else "experts"
        return None if own == kind else f"for {self.model.name}, which has {'no' if own == 'dense' else 'its'} experts"


def _join(parts: dict[str, dict[str, Any]], facts: Mapping[str, Any]) -> None:
    for part in parts:
        parts[part] |= {
            name: _frozen(value) if part in ("habits", "search") else value
            for name, value in facts.get(part, {}).items()
        }


def _frozen(value: Any) -> Any:
    """Lists of a file as tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def accepted_values(facts: Mapping[str, Any]) -> str:
    """The values of a setting in words."""
    if "number" in facts:
        return "a number, 1 or more"
    if "share" in facts:
        return "a share up to 1"
    if "parts" in facts:
        return f"none, or some of {', '.join(GRAPH_PARTS)} joined by +"
    if "tiles" in facts:
        return "rows of three tiles of wi / of wo / other dims: 512,512,512/512,512,512/1024"
    return ", ".join(facts["values"])


def _effect(key: str, facts: Mapping[str, Any], value: str) -> Mapping[str, Any]:
    """The parts of a plan that a setting decides. Raises RooftopError for a value that it does not have."""
    field_name = f"set {key}"
    if "number" in facts:
        return {"habits": {facts["number"]: parse_quantity(value, field_name, smallest=1.0)}}
    if "share" in facts:
        return {"habits": {facts["share"]: _positive_share(value, field_name)}}
    if "parts" in facts:
        names = [] if value == "none" else value.split("+")
        for name in names:
            if name not in GRAPH_PARTS:
                raise unknown(field_name, name, ("none", *GRAPH_PARTS))
        return {"habits": {facts["parts"]: names}}
    if "tiles" in facts:
        return {"habits": _tiles(field_name, value)}
    if value not in facts["values"]:
        raise unknown(field_name, value, facts["values"])
    effect: Mapping[str, Any] = facts["values"][value]
    return effect


def _positive_share(value: str, name: str) -> float:
    share = parse_share(value, name)
    if share == 0:
        raise RooftopError(name, value, "a share above 0")
    return share


def _tiles(name: str, value: str) -> dict[str, Any]:
    """Rows of tiles, and the size of their other dims, from '512,512,512/512,512,512/1024'."""
    groups = [group.split(",") for group in value.split("/")]
    is_whole = all(word.strip().isdecimal() for group in groups for word in group)
    if [len(group) for group in groups] != [3, 3, 1] or not is_whole:
        raise RooftopError(name, value, "ROWS,ROWS,ROWS/ROWS,ROWS,ROWS/DIM, such as 512,512,512/512,512,512/1024")
    up, down, (dim,) = ([int(word) for word in group] for group in groups)
    return {"group_rows": [up, down], "group_dim": dim}
