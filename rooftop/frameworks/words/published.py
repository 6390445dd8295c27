"""Configurations that MaxText and torchtitan ship, in their own words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import yaml

from rooftop.frameworks.recipes import recipe
from rooftop.frameworks.words.table import word_table

#: Words of torchtitan by columns of the table of its recipes.
_TORCHTITAN = {
    "model_name": "model", "flavor": "flavor", "local_batch": "local_batch", "batch": "batch", "seq": "seq",
    "dtype": "stored_dtype", "dp_replicate": "data", "dp_shard": "fsdp", "tp": "tensor", "cp": "context",
    "pp": "stage", "ep": "expert", "etp": "expert_tensor", "schedule": "schedule", "reshard": "reshard",
    "async_tp": "async_tensor", "remat": "remat", "remat_option": "remat_option", "compile": "compile",
    "compile_parts": "compiled", "converters": "converters", "float8_gather": "fp8_gather", "float8_not": "fp8_filter",
}  # fmt: skip
#: Keys of MaxText by columns of the table of its recipes.
_MAXTEXT = (
    "model_name", "per_device_batch_size", "max_target_length", "gradient_accumulation_steps", "remat_policy",
    "quantization", "attention",
)  # fmt: skip


def torchtitan_recipe(name: str) -> dict[str, object]:
    """Settings of a configuration of torchtitan by key. Raises RooftopError for one that is not known."""
    row, table = recipe("torchtitan", name), word_table("torchtitan")
    options = dict[str, object]()
    for column, word_name in _TORCHTITAN.items():
        word = table[word_name]
        if not row[column]:
            continue
        if word.is_list:
            options[word.key] = tuple(row[column].split("+"))
        elif isinstance(word.default, bool):
            options[word.key] = row[column] == "yes"
        else:
            options[word.key] = int(row[column]) if isinstance(word.default, int) else row[column]
    return options


def maxtext_recipe(name: str) -> dict[str, object]:
    """Settings of a configuration of MaxText by key. Raises RooftopError for one that is not known."""
    text = "\n".join(f"{key}: {value}" for key, value in _maxtext(recipe("maxtext", name)))
    return {str(key): value for key, value in (yaml.safe_load(text) or {}).items()}


def _maxtext(row: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    yield from ((column, row[column]) for column in _MAXTEXT if row[column])
    for place in ("ici", "dcn"):
        for axis, _, size in (entry.partition("=") for entry in row[place].split()):
            yield f"{place}_{axis}_parallelism", size
    for key, _, value in (entry.partition("=") for entry in f"{row['places']} {row['other']}".split()):
        yield key, value
