"""torchtitan's words: the TOML file of a run, written and read."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from rooftop.arrays.rules import COLUMN_AXES, EXPERT_AXES, GATHER_AXES, REPLICA_AXES, SEQUENCE_AXES, STAGE_AXES
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.rounding import ceil_div
from rooftop.frameworks.remat import named_policy, remat_words
from rooftop.frameworks.words.step import ConfiguredStep, StatedStep
from rooftop.frameworks.words.table import FrameworkConfiguration, WordTable, WordValue, word_table
from rooftop.models import ModelConfig, load_model


def torchtitan_words() -> WordTable:
    """The words of torchtitan's TOML."""
    return word_table("torchtitan")


def torchtitan_values(step: ConfiguredStep) -> dict[str, WordValue]:
    """The value of each word for a train step. Raises RooftopError for a model or a policy that torchtitan has not."""
    data, choice, settings = torchtitan_words().data, step.choice, step.framework.settings
    if step.model.name not in data["models"]:
        raise RooftopError("model", step.model.name, f"a flavor of torchtitan: {', '.join(data['models'])}")
    name, flavor = data["models"][step.model.name]
    mode = named_policy("torchtitan", choice.remat)
    if mode is None:
        raise RooftopError("remat", choice.remat, remat_words("torchtitan"))
    stages, expert = step.ways(*STAGE_AXES), step.ways(*EXPERT_AXES)
    narrow = step.numerics.matmul == "f8_e4m3"
    staged = stages > 1
    return {
        "model": name,
        "flavor": flavor,
        "converters": ("float8",) if narrow else None,
        "local_batch": step.micro_batch * (choice.microbatches if staged else 1),
        "batch": step.batch_seqs,
        "seq": step.seq_len,
        "data": step.ways(*REPLICA_AXES),
        # Devices with other experts are shards of all the rest.
        "fsdp": step.ways(*GATHER_AXES) * expert,
        "tensor": step.ways(*COLUMN_AXES),
        "async_tensor": settings.get("async_tp") == "yes" and step.ways(*COLUMN_AXES) > 1,
        "stage": stages,
        "schedule": data["schedules"][choice.schedule] if staged else None,
        **(_stage_values(step.model.layers, stages * choice.chunks) if choice.chunks > 1 else {}),
        "micro_batch": step.micro_batch if staged else None,
        "context": step.ways(*SEQUENCE_AXES),
        "expert": expert,
        "remat": mode,
        "remat_option": "op" if mode == "selective" else None,
        "compile": settings.get("compile") == "yes",
        "fp8_filter": ("output",) if narrow else None,
        "steps": 50,
    }


def _stage_values(layers: int, parts: int) -> dict[str, WordValue]:
    """Layers of a part of a pipeline; embedding and loss count as a layer each where that comes out even."""
    for first, last in ((1, 1), (1, 0), (0, 1), (0, 0)):
        size = ceil_div(layers + first + last, parts)
        if ceil_div(layers + first + last, size) == parts:
            return {"stage_layers": size, "first_less": first, "last_less": last}
    raise RooftopError("chunks", parts, f"stages x chunks that {layers} layers come out even in")


def torchtitan_configuration(step: ConfiguredStep) -> FrameworkConfiguration:
    """The TOML file of a train step, and the command that runs it under Slurm. Raises RooftopError."""
    table = torchtitan_words()
    written = [(*word.key.rsplit(".", 1), value) for word, value in table.written(torchtitan_values(step))]
    sections = groupby(sorted(written, key=lambda entry: _section_order(entry[0])), key=lambda entry: entry[0])
    text = f"# {table.program}. Later releases are configured in Python.\n"
    for section, entries in sections:
        text += f"\n[{section}]\n" + "".join(f"{key} = {_toml(value)}\n" for _, key, value in entries)
    nodes, devices = step.nodes
    command = (
        f"srun --nodes {nodes} --ntasks-per-node 1 torchrun --nnodes {nodes} --nproc_per_node {devices} --rdzv_id 101 "
        '--rdzv_backend c10d --rdzv_endpoint "$HEAD:29500" -m torchtitan.train --job.config_file plan.toml'
    )
    notes = ["data, tokenizer, learning rate and 50 steps stand for yours"]
    if step.numerics.matmul == "f8_e4m3":
        notes.append("float8 is tensorwise, which releases after 0.2.2 do not have")
    return FrameworkConfiguration(program=table.program, files={"plan.toml": text}, command=command, notes=tuple(notes))


def _section_order(section: str) -> int:
    order = ("model", "training", "parallelism", "activation_checkpoint", "compile")
    return order.index(section) if section in order else len(order)


def _toml(value: object) -> str:
    """A value as TOML: JSON has the same words for texts, lists, numbers and booleans."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def torchtitan_step(text: str, *, devices: int, model: ModelConfig | None = None) -> StatedStep:
    """The train step of a TOML file on ``devices``. Raises RooftopError for what torchtitan has not or refuses."""
    try:
        options = dict(_flat(tomllib.loads(text)))
    except tomllib.TOMLDecodeError as error:
        raise RooftopError("from", "invalid TOML", f"torchtitan's TOML ({error})") from None
    listed = {key: tuple(value) if isinstance(value, list) else value for key, value in options.items()}
    return torchtitan_options_step(listed, devices=devices, model=model)


#: The key of the optimizer's name.
_OPTIMIZER = "optimizer.name"


def torchtitan_options_step(
    options: Mapping[str, Any], *, devices: int, model: ModelConfig | None = None
) -> StatedStep:
    """The train step of settings by key on ``devices``. Raises RooftopError as ``torchtitan_step``."""
    table = torchtitan_words()
    values, others = table.read(options)
    if (optimizer := options.get(_OPTIMIZER, "AdamW")) not in ("AdamW", "Adam"):
        raise RooftopError(_OPTIMIZER, str(optimizer), "AdamW or Adam: others have no price")
    numbers = {name: _whole(table, values, name) for name in ("tensor", "stage", "context", "expert", "data", "seq")}
    grid = numbers["tensor"] * numbers["stage"] * numbers["context"] * numbers["data"]
    shards = values["fsdp"] if values["fsdp"] != -1 else devices // grid
    if shards * grid != devices:
        raise RooftopError(
            table["fsdp"].key, values["fsdp"], f"degrees whose product is {devices} GPUs: {grid} x {shards}"
        )
    expert = numbers["expert"]
    if shards % expert:
        accepted = f"a divisor of {table['fsdp'].key} {shards}: others have no price"
        raise RooftopError(table["expert"].key, expert, accepted)
    copies, local = numbers["data"] * shards, _whole(table, values, "local_batch")
    batch = local * copies if values["batch"] == -1 else _whole(table, values, "batch")
    if batch % (local * copies):
        raise RooftopError(
            table["batch"].key, batch, f"a multiple of {table['local_batch'].key} {local} x {copies} copies"
        )
    micro = _whole(table, values, "micro_batch") if numbers["stage"] > 1 else local
    known = load_model(_model_name(table, values)) if model is None else model
    mesh = {"data": numbers["data"], "fsdp": shards // expert, "expert": expert}
    mesh |= {name: numbers[name] for name in ("context", "tensor", "stage")}
    fields: dict[str, object] = {
        "mesh": mesh if known.moe is not None else {name: size for name, size in mesh.items() if name != "expert"},
        "batch_seqs": batch,
        "seq": numbers["seq"],
        "microbatches": batch // (micro * copies),
        "remat": _policy(table, values),
        "matmul_dtype": "f8_e4m3" if "float8" in values["converters"] else None,
        **_schedule(table, values, known, numbers["stage"]),
        "framework_settings": {
            "compile": "yes" if values["compile"] and "model" in values["compiled"] else "no",
            "async_tp": "yes" if values["async_tensor"] else "no",
        },
    }
    unpriced = table.without_words(others)
    return StatedStep(fields=fields, model=known, unpriced=unpriced)


def _flat(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _whole(table: WordTable, values: Mapping[str, Any], name: str) -> int:
    value = values[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RooftopError(table[name].key, value, "a whole number, 1 or more")
    return value


def _model_name(table: WordTable, values: Mapping[str, Any]) -> str:
    # Of names with the same flavor the last is the newest.
    names: dict[tuple[str, ...], str] = {tuple(entry): name for name, entry in table.data["models"].items()}
    pair = values["model"], values["flavor"]
    if pair not in names:
        known = ", ".join(" ".join(entry) for entry in names)
        raise RooftopError(table["flavor"].key, " ".join(map(str, pair)), f"a model with a preset: {known}")
    return names[pair]


def _policy(table: WordTable, values: Mapping[str, Any]) -> str:
    mode = values["remat"]
    if mode not in table.data["remat"]:
        raise unknown(table["remat"].key, str(mode), table.data["remat"])
    if mode == "selective" and values["remat_option"] != "op":
        raise RooftopError(table["remat_option"].key, values["remat_option"], "op: layers of two kinds have no price")
    policy: str = table.data["remat"][mode]
    return policy


def _schedule(table: WordTable, values: Mapping[str, Any], model: ModelConfig, stages: int) -> dict[str, object]:
    """Schedule and chunks, those of an interleaved one by its layers, or two by default."""
    if stages == 1:
        return {}
    names = {word.lower(): name for name, word in table.data["schedules"].items()}
    name = names.get(str(values["schedule"]).lower())
    if name is None:
        raise unknown(table["schedule"].key, str(values["schedule"]), table.data["schedules"].values())
    if name != "interleaved":
        return {"schedule": name, "chunks": 1}
    if values["stage_layers"] is None:
        return {"schedule": name, "chunks": 2}
    counted = model.layers + values["first_less"] + values["last_less"]
    parts = ceil_div(counted, _whole(table, values, "stage_layers"))
    if parts % stages:
        raise RooftopError(
            table["stage_layers"].key, values["stage_layers"], f"parts that {stages} stages share: {parts}"
        )
    return {"schedule": name, "chunks": parts // stages}
