"""The options of ``rooftop train`` as values: each is checked here, before JAX starts on anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftop.arrays import parse_axes
from rooftop.cli.output import read_plan_file
from rooftop.cli.process import parse_profile
from rooftop.core.errors import RooftopError
from rooftop.core.quantities import parse_count
from rooftop.models import ModelConfig
from rooftop.plan.training.plan import TrainingPlan
from rooftop.train.engine import Course
from rooftop.train.evaluate import SampleOptions
from rooftop.train.schedule import Schedule
from rooftop.train.start import TrainRequest

if TYPE_CHECKING:
    from rooftop.runs.folder import RunFolder


def read_plan(file: Path) -> dict[str, Any]:
    """The content of a plan.json. Raises RooftopError for what is none."""
    data: dict[str, Any] = read_plan_file(file)
    TrainingPlan.from_json(data)
    return data


def count(options: Mapping[str, Any], name: str, *, zero: bool = False) -> int | None:
    """A positive whole number, or 0 if ``zero``; None where the option is not given. Raises RooftopError naming it."""
    value = options[name]
    if value is None:
        return None
    return 0 if zero and str(value) == "0" else parse_count(value, name.replace("_", "-"))


def number(options: Mapping[str, Any], name: str) -> float | None:
    """A number that is not negative; None where the option is not given. Raises RooftopError naming it."""
    value = options[name]
    try:
        number = None if value is None else float(value)
    except ValueError:
        number = -1.0
    if number is not None and not 0 <= number < float("inf"):
        raise RooftopError(name.replace("_", "-"), value, "a number from 0")
    return number


def course_of(options: Mapping[str, Any]) -> Course:
    """How far to go. Raises RooftopError naming the option that is wrong."""
    steps = count(options, "steps", zero=True)
    if steps is None:
        raise RooftopError("steps", None, "--steps N, a whole number of steps")
    if options["tensorboard"] and find_spec("tensorboardX") is None:
        raise RooftopError("tensorboard", "--tensorboard", "tensorboardX installed: pip install 'rooftop[tensorboard]'")
    return Course(
        steps=steps,
        save_every=count(options, "save_every"),
        eval_every=count(options, "eval_every"),
        eval_batches=count(options, "eval_batches") or 1,
        profile=parse_profile(options["profile"]),
        tensorboard=options["tensorboard"],
        divergence=number(options, "divergence") or math.inf,
    )


def sampling_of(options: Mapping[str, Any]) -> SampleOptions:
    """What to draw at the end. Raises RooftopError naming the option that is wrong."""
    return SampleOptions(
        count=count(options, "samples", zero=True) or 0,
        tokens=count(options, "sample_tokens") or 1,
        prompt=options["prompt"],
        temperature=number(options, "temperature") or 0.0,
        seed=count(options, "seed", zero=True) or 0,
    )


def request_of(
    options: dict[str, Any], explicit: Mapping[str, Any], folder: RunFolder, recorded: Mapping[str, Any] | None
) -> TrainRequest:
    """The options as values. Raises RooftopError naming the one that is wrong."""
    if not options["data"]:
        raise RooftopError("data", None, "--data PATH: a file, a folder or a glob")
    if options["on"] not in (None, "local"):
        raise RooftopError("on", options["on"], "local; another slice is what rooftop plan is asked for")
    steps = count(options, "steps", zero=True) or 0
    if options["decay_steps"] is None:
        options["decay_steps"] = str(steps) if steps else None
    length = count(options, "decay_steps") or 0
    if options["warmup"] is None:
        options["warmup"] = str(min(length // 10, 1000))
    plan = None
    if options["plan"] is not None:
        plan = read_plan(Path(options["plan"]))
    elif recorded is not None and folder.plan.exists():
        plan = read_plan(folder.plan)
    model = options["model"]
    if recorded is not None and plan is None and "model" not in explicit:
        model = ModelConfig.from_json(recorded["job"]["program"]["computation"]["model"])
    computation = {
        "z_loss": number(options, "z_loss"),
        "balance_loss": number(options, "balance_loss"),
        "expert_capacity": number(options, "expert_capacity"),
        "remat": options["remat"],
        "context_attention": options["context_attention"],
    }
    fields = {
        "microbatches": count(options, "microbatches"),
        "schedule": options["schedule"],
        "chunks": count(options, "chunks"),
        "compute_dtype": options["compute_dtype"],
        "weights_dtype": options["weights_dtype"],
    }
    optimizer = {
        "name": options["optimizer"],
        "learning_rate": number(options, "lr"),
        "weight_decay": number(options, "weight_decay"),
        "moments": options["moments_dtype"],
    }
    return TrainRequest(
        folder=folder,
        data=tuple(options["data"]),
        data_field=options["field"],
        schedule=Schedule(
            steps=length,
            warmup=count(options, "warmup", zero=True) or 0,
            decay=options["decay"],
            final=number(options, "final_lr") or 0.0,
        ),
        seed=count(options, "seed", zero=True) or 0,
        held_share=number(options, "hold_out") or 0.0,
        plan=plan,
        as_is=options["as_is"],
        on_local=options["on"] == "local",
        mesh=None if options["mesh"] is None else parse_axes(options["mesh"]),
        model=model,
        init=None if options["init"] is None else Path(options["init"]),
        tokenizer=None if options["tokenizer"] is None else Path(options["tokenizer"]),
        vocab=count(options, "vocab"),
        batch=count(options, "batch_seqs"),
        seq_len=count(options, "seq"),
        fields={name: value for name, value in fields.items() if value is not None},
        computation={name: value for name, value in computation.items() if value is not None},
        optimizer={name: value for name, value in optimizer.items() if value is not None}
        | {"clip_norm": number(options, "clip") or None},
        peak_flops_per_s=number(options, "peak_flops") or None,
    )
