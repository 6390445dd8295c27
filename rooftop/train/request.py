"""The request for a training run, checked before JAX is imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rooftop.arrays import parse_axes
from rooftop.core.errors import RooftopError, misread, unknown
from rooftop.core.files import read_json_object
from rooftop.models import ModelConfig, find_model
from rooftop.models.activations import parse_policy
from rooftop.models.sizing import SMALL_VOCAB, is_small, small_model
from rooftop.plan.training.plan import TrainingPlan
from rooftop.requests.training import Train
from rooftop.runs.folder import RunFolder
from rooftop.runs.schedule import Schedule
from rooftop.runs.trace import check_steps
from rooftop.train.data.corpus import find_files

#: Tokens of a sequence where neither a plan nor an option says.
SEQ_LEN = 512

#: Accepted texts for fields that a request must have.
_REQUIRED = {
    "run": "--run DIR, a folder to keep the run in",
    "steps": "--steps N, a whole number of steps",
    "data": "--data PATH: a file, a folder or a glob",
}
_POSITIVE = (
    "vocab", "batch_seqs", "seq_len", "decay_steps", "microbatches", "chunks", "eval_every", "eval_batches",
    "save_every", "keep", "keep_every", "sample_tokens", "devices",
)  # fmt: skip
_NOT_NEGATIVE = (
    "steps", "seed", "warmup", "samples", "learning_rate", "final_learning_rate", "weight_decay", "clip_norm", "z_loss",
    "balance_loss", "expert_capacity", "divergence", "peak_flops", "temperature",
)  # fmt: skip
_NAMES: Mapping[str, tuple[str, ...]] = {
    "optimizer": ("adamw", "adam", "lion", "muon", "adafactor", "sgd"),
    "context_attention": ("ring", "all_gather"),
    "compute_dtype": ("bf16", "f32"),
    "matmul_dtype": ("bf16", "f32", "int8", "f8_e4m3"),
    "weights_dtype": ("bf16", "f32"),
    "moments_dtype": ("bf16", "f32"),
}
#: Fields that say nothing about how a run is resumed.
_ONCE = ("run", "plan", "profile")


@dataclass(frozen=True, kw_only=True)
class TrainRequest(Train):
    """A request for a training run, checked. Raises RooftopError naming a field that is out of range."""

    def __post_init__(self) -> None:
        # First, as a broken file is a surprise: other fields may be missing for it.
        _ = self.planned
        for name, accepted in _REQUIRED.items():
            if getattr(self, name) in (None, (), ""):
                raise RooftopError(name, None, accepted)
        for name in (*_POSITIVE, *_NOT_NEGATIVE):
            value, least = getattr(self, name), 1 if name in _POSITIVE else 0
            if value is not None and not least <= value < math.inf:
                raise RooftopError(_option(name), value, f"a number from {least}")
        if self.hold_out is not None and not 0 <= self.hold_out < 1:
            raise RooftopError("hold-out", self.hold_out, "a share of the documents from 0 to less than 1")
        for name, known in _NAMES.items():
            value = getattr(self, name)
            if value is not None and value not in known:
                raise unknown(_option(name), value, known)
        check_steps(self.profile)
        if self.as_is and self.shrink:
            raise RooftopError("as-is", "--as-is and --shrink", "one of the two")
        _ = self.learning_rates, self.axes

    @classmethod
    def of(cls, values: Mapping[str, object]) -> TrainRequest:
        """Build a request from values by field. Raises RooftopError for a field that is missing or unknown."""
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise unknown("option", name, known)
        required = {field.name: None for field in fields(cls) if field.default is MISSING}
        merged: dict[str, Any] = required | dict(values)
        return cls(**merged)

    @classmethod
    def resumed(cls, run: Path | str, changes: Mapping[str, object]) -> TrainRequest:
        """Build the request that the run in the folder ``run`` was started with, with ``changes`` by field.

        Raises RooftopError if no run has begun there.
        """
        folder = RunFolder(path=Path(run).absolute())
        recorded = folder.read()
        if recorded is None:
            raise RooftopError("resume", str(run), "the folder of a run that has begun")
        try:
            values = {**recorded["arguments"], **changes, "run": folder.path}
            if folder.plan.exists():
                values.setdefault("plan", folder.plan)
            elif "model" not in changes:
                # The config.json may have moved since.
                values["model"] = ModelConfig.from_json(recorded["job"]["program"]["computation"]["model"])
            return cls.of(values)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise misread(str(folder.path / "run.json"), error, "the run.json of rooftop train") from None

    @cached_property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(path=Path(self.run).absolute())

    @property
    def sources(self) -> tuple[str, ...]:
        """Absolute paths and globs of the data."""
        paths = self.data if isinstance(self.data, tuple | list) else (self.data,)
        return tuple(str(Path(path).expanduser().absolute()) for path in paths)

    @cached_property
    def axes(self) -> Mapping[str, int] | None:
        """Mesh axes and their sizes. Raises RooftopError if the text names others."""
        return parse_axes(self.mesh) if isinstance(self.mesh, str) else self.mesh

    @cached_property
    def planned(self) -> Mapping[str, Any] | None:
        """The content of plan.json. Raises RooftopError if the file is no training plan."""
        if self.plan is None:
            return None
        if isinstance(self.plan, str | Path):
            accepted = "a plan.json written by rooftop plan"
            content: Mapping[str, Any] = read_json_object(Path(self.plan), field="plan", accepted=accepted)
        elif isinstance(self.plan, Mapping):
            content = self.plan
        else:
            plan = self.plan if isinstance(self.plan, TrainingPlan) else self.plan.plan
            plan.require_ours()
            return plan.to_json()
        TrainingPlan.from_json(content).require_ours()
        return content

    @cached_property
    def model_without_plan(self) -> ModelConfig:
        """The model of ``model`` or ``init``. Raises RooftopError if there is none of this name."""
        source = self.init if self.model is None else self.model
        if source is None:
            raise RooftopError("model", None, "PLAN.json, --model (a preset, a config.json or llama:4M) or --init")
        if isinstance(source, ModelConfig):
            return source
        name = str(source)
        if is_small(name):
            return small_model(name, self.vocab or SMALL_VOCAB, max(self.seq_len or SEQ_LEN, SEQ_LEN))
        model = find_model(name)
        if self.vocab is not None and self.init is None and self.tokenizer is None:
            model = replace(model, vocab=self.vocab)
        return model

    def require_inputs(self) -> None:
        """Raise RooftopError if model, remat policy, data or tokenizer are not there. Needs no JAX."""
        if self.planned is None:
            _ = self.model_without_plan
        elif self.model is not None and not isinstance(self.model, ModelConfig):
            raise RooftopError("model", str(self.model), "nothing with a plan, which names its model")
        if self.remat is not None:
            parse_policy(self.remat)
        for name in self.sources:
            find_files(name)
        if self.tokenizer is not None and not Path(self.tokenizer).exists():
            accepted = "a tokenizer.json, or a folder that has one (No such file or directory)"
            raise RooftopError("tokenizer", str(self.tokenizer), accepted)

    @cached_property
    def learning_rates(self) -> Schedule:
        """The schedule of the learning rate. Raises RooftopError for a decay that is unknown."""
        length = self.decay_steps or self.steps
        warmup = min(length // 10, 1000) if self.warmup is None else self.warmup
        return Schedule(steps=length, warmup=warmup, decay=self.decay, final=self.final_learning_rate)

    def arguments(self, *, batch_seqs: int, seq_len: int) -> dict[str, object]:
        """Return the values that a resumed run begins with, as plain JSON: defaults are resolved, paths absolute."""
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in _ONCE}
        for name in ("model", "init", "tokenizer", "export"):
            values[name] = _plain_path(values[name])
        if isinstance(self.model, ModelConfig):
            values["model"] = None
        schedule = self.learning_rates
        return values | {
            "data": list(self.sources),
            "save_also": None if self.save_also is None else str(Path(self.save_also).absolute()),
            "mesh": self.axes and dict(self.axes),
            "batch_seqs": batch_seqs,
            "seq_len": seq_len,
            "decay_steps": schedule.steps or None,
            "warmup": schedule.warmup,
        }


def _option(field: str) -> str:
    return next(setting.option for setting in Train.settings() if setting.name == field)


def _plain_path(value: object) -> object:
    """A path as an absolute text. A name, such as that of a preset, stays one."""
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).exists()):
        return str(Path(value).absolute())
    return value
