"""The options of ``rooftop serve`` as values: each is checked here, before JAX starts on anything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rooftop.arrays import parse_axes
from rooftop.capabilities import KV_SPLITS, KvSplit
from rooftop.cli.output import read_plan_file
from rooftop.core.errors import RooftopError, one_of, unknown
from rooftop.core.quantities import parse_count, parse_quantity
from rooftop.models import ModelConfig, from_huggingface
from rooftop.plan.serving.plan import ServingPlan
from rooftop.scheduling.serving.scheduler import BATCHING, Policy
from rooftop.serve.api.app import Settings
from rooftop.serve.engine.configuration import CACHES, DTYPES, WEIGHTS, Configuration
from rooftop.serve.engine.loading import configuration_of

_CHECKPOINT = "the folder of a checkpoint (config.json, safetensors, tokenizer.json), a plan.json, or llama:2M to try"


@dataclass(frozen=True, kw_only=True)
class ServeSource:
    """What is served: a ``folder`` with a checkpoint of ``model``, and the content of a plan, if there is one."""

    folder: Path
    model: ModelConfig
    plan: Mapping[str, Any] | None


def source_of(given: Path, weights: Path | None) -> ServeSource:
    """The checkpoint, or the plan and its checkpoint. Raises RooftopError for what is neither."""
    if given.is_dir():
        if weights is not None:
            raise RooftopError("weights-of", str(weights), "this with a plan only")
        return ServeSource(folder=given, model=from_huggingface(given / "config.json"), plan=None)
    data = read_plan_file(given, field="checkpoint", accepted=_CHECKPOINT)
    plan = ServingPlan.from_json(data)
    if weights is None:
        accepted = f"--weights-of DIR: the folder of a checkpoint of {plan.problem.model.name}"
        raise RooftopError("weights-of", None, accepted)
    model = from_huggingface(weights / "config.json")
    if replace(model, name=plan.problem.model.name) != plan.problem.model:
        raise RooftopError("weights-of", str(weights), f"a checkpoint of the plan's model, {plan.problem.model.name}")
    return ServeSource(folder=weights, model=model, plan=data)


def configuration(options: Mapping[str, Any], plan: Mapping[str, Any] | None) -> Configuration:
    """How the engine serves: the plan's way, or the default one, as far as options say nothing else.

    Raises RooftopError naming the option that is wrong.
    """
    found = Configuration() if plan is None else configuration_of(plan)
    batch = _count(options, "max_batch") or found.policy.max_batch
    batching = options["batching"] or found.policy.batching
    if batching not in BATCHING:
        raise unknown("batching", batching, [each for each in BATCHING if each != "static"])
    draft = options.get("draft")
    if draft is not None and not (draft / "config.json").is_file():
        raise RooftopError("draft", str(draft), "the folder of a checkpoint (config.json, safetensors)")
    chunk = _count(options, "chunk_tokens", zero=True)
    if chunk is None and batching == "interleaved":
        # Room for a piece of a prompt beside those who generate.
        chunk = max(found.policy.chunk_tokens or 0, batch + 224)
    for name, known in (
        ("weights_dtype", WEIGHTS), ("kv_dtype", CACHES), ("dtype", DTYPES),
    ):  # fmt: skip
        if options[name] is not None and options[name] not in known:
            raise unknown(name.replace("_", "-"), options[name], known)
    mesh = found.mesh if options["mesh"] is None else tuple(parse_axes(options["mesh"]).items())
    return Configuration(
        policy=Policy(
            max_batch=batch,
            batching=batching,
            chunk_tokens=chunk or None,
            preemption=options["preemption"] or found.policy.preemption,
        ),
        page_tokens=_count(options, "page_tokens") or found.page_tokens,
        pages=_count(options, "pages"),
        host_pages=_count(options, "host_pages", zero=True) or 0,
        prefix_cache=options["prefix_cache"],
        longest=_count(options, "max_model_len"),
        max_queue=_count(options, "max_queue") or 1,
        mesh=mesh,
        kv_split=_kv_split(options["kv_split"]) or found.kv_split,
        prefill_devices=_count(options, "prefill_devices", zero=True) or 0,
        dtype=options["dtype"],
        weights=options["weights_dtype"] or found.weights,
        cache=options["kv_dtype"] or found.cache,
        guesses=_count(options, "guesses", zero=True) or 0,
    )


def on_local(wanted: Configuration, devices: int) -> Configuration:
    """``wanted`` with its mesh shrunk to so many devices: its largest axis halved (or the like) until it fits."""
    sizes = dict(wanted.mesh)
    while math.prod(sizes.values()) > devices:
        largest = max(sizes, key=lambda axis: sizes[axis])
        size = sizes[largest]
        sizes[largest] = size // next(prime for prime in range(2, size + 1) if size % prime == 0)
    return replace(wanted, mesh=tuple(sizes.items()))


def settings(options: Mapping[str, Any], model: str) -> Settings:
    """How the API answers. Raises RooftopError naming the option that is wrong."""
    return Settings(
        model=options["name"] or model,
        keys=tuple(options["api_key"]),
        origins=tuple(options["cors"]),
        body_bytes=int(parse_quantity(options["max_body"], "max-body")),
        log_texts=options["log_texts"],
    )


def port(options: Mapping[str, Any]) -> int:
    """Raises RooftopError for what is no port."""
    given = str(options["port"])
    if not given.isdecimal() or int(given) >= 2**16:
        raise RooftopError("port", given, "0 to 65535")
    return int(given)


def _kv_split(given: str | None) -> KvSplit | None:
    return None if given is None else one_of("kv-split", given, KV_SPLITS)


def _count(options: Mapping[str, Any], name: str, *, zero: bool = False) -> int | None:
    """A positive whole number, or 0 if ``zero``; None where the option is not given."""
    value = options[name]
    if value is None:
        return None
    return 0 if zero and str(value) == "0" else parse_count(value, name.replace("_", "-"))
