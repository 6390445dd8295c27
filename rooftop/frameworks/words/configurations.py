"""Configurations of train steps, and train steps of configurations, by framework."""

from __future__ import annotations

import re
from collections.abc import Mapping

from rooftop.core.errors import RooftopError
from rooftop.frameworks.answers import PricedRecipe
from rooftop.frameworks.framework import FRAMEWORKS
from rooftop.frameworks.words.step import ConfiguredStep, StatedStep
from rooftop.frameworks.words.table import FrameworkConfiguration, option_values, word_table
from rooftop.hardware import Slice
from rooftop.models import ModelConfig


def configuration_of(step: ConfiguredStep) -> FrameworkConfiguration | None:
    """A train step in the words of its framework; None of rooftop's own, whose plan.json is its configuration.

    Raises RooftopError for a step that the words cannot say.
    """
    name = step.framework.name
    if name == "megatron":
        from rooftop.frameworks.words.megatron import megatron_configuration as configuration
    elif name == "torchtitan":
        from rooftop.frameworks.words.torchtitan import torchtitan_configuration as configuration
    elif name == "maxtext":
        from rooftop.frameworks.words.maxtext import maxtext_configuration as configuration
    else:
        return None
    return configuration(step)


def short_words(framework: str, mesh: Mapping[str, int], chunks: int = 1) -> str:
    """Sizes of a mesh as users of the framework say them in short: 'TP 4, PP 4, VPP 5'; those of 1 left out."""
    names: Mapping[str, str] = {} if framework == FRAMEWORKS[0] else word_table(framework).data.get("short", {})
    sizes = {**mesh, "chunks": chunks}
    order = [*names, *(name for name in sizes if name not in names)]
    said = [f"{names.get(name, name)} {sizes[name]}" for name in order if sizes.get(name, 1) > 1]
    return ", ".join(said) or "one device"


def written_words(step: ConfiguredStep) -> dict[str, str]:
    """Settings of a train step's configuration by key, those at their defaults left out. Raises RooftopError."""
    name = step.framework.name
    if name == "megatron":
        from rooftop.frameworks.words.megatron import megatron_values as values
    elif name == "torchtitan":
        from rooftop.frameworks.words.torchtitan import torchtitan_values as values
    else:
        from rooftop.frameworks.words.maxtext import maxtext_values as values
    return {
        word.key: "" if word.is_flag else " ".join(map(str, value)) if isinstance(value, tuple) else _text(value)
        for word, value in word_table(name).written(values(step))
    }


def usual_text(framework: str, key: str) -> str | None:
    """The value of a setting that a configuration does not say; None if it then is not set."""
    word = word_table(framework).by_key[key]
    if word.is_flag or word.default in (None, (), ""):
        return None
    return " ".join(map(str, word.default)) if isinstance(word.default, tuple) else _text(word.default)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def priced_recipe(step: ConfiguredStep) -> PricedRecipe | None:
    """The kind of recipe that the price of a step is of; None of programs whose published recipes are of one kind."""
    if step.framework.name != "megatron":
        return None
    from rooftop.frameworks.words import megatron_recipes

    return megatron_recipes.priced_recipe(step)


def frameworks_of(text: str) -> tuple[str, ...]:
    """Frameworks whose words stand in a configuration's text."""
    options = set(re.findall(r"(?<![\w-])--[\w-]+(?![\w.-])", text)) & option_values("megatron").keys()
    sections = {key.partition(".")[0] for key in word_table("torchtitan").by_key}
    titles = sections.intersection(re.findall(r"^\s*\[?\s*(\w+)\s*[].]", text, re.MULTILINE))
    keys = set(re.findall(r"(?:^|(?<=\s))([a-z]\w*)(?::(?=\s|$)|=)", text, re.MULTILINE))
    keys &= word_table("maxtext").by_key.keys()
    said = {"megatron": options, "maxtext": keys, "torchtitan": titles}
    return tuple(name for name in FRAMEWORKS if said.get(name))


def stated_recipe(framework: str, name: str, slice_: Slice, model: ModelConfig | None = None) -> StatedStep:
    """The train step of a recipe or a configuration that a framework ships. Raises RooftopError."""
    if framework == "megatron":
        from rooftop.frameworks.words.megatron_recipes import recipe_step

        return recipe_step(name, devices=slice_.devices, model=model)
    from rooftop.frameworks.words.published import maxtext_recipe, torchtitan_recipe

    if framework == "torchtitan":
        from rooftop.frameworks.words.torchtitan import torchtitan_options_step

        return torchtitan_options_step(torchtitan_recipe(name), devices=slice_.devices, model=model)
    from rooftop.frameworks.words.maxtext import maxtext_options_step

    return maxtext_options_step(
        maxtext_recipe(name), devices=slice_.devices, slices=dcn_groups(slice_), model=model
    )  # fmt: skip


def dcn_groups(slice_: Slice) -> int:
    """Groups of devices that MaxText's DCN axes join: slices of TPUs, nodes of GPUs."""
    return slice_.hosts if slice_.chip.kind == "gpu" else slice_.num_slices


def stated_step(framework: str, text: str, slice_: Slice, model: ModelConfig | None = None) -> StatedStep:
    """The train step that a configuration of a framework, its ``text``, states for the devices of a slice.

    ``model``: in place of the one that the configuration states. Raises RooftopError for what the framework does not
    have or refuses, and for settings without a price.
    """
    if framework == "megatron":
        from rooftop.frameworks.words.megatron_read import megatron_step

        return megatron_step(text, devices=slice_.devices, model=model)
    if framework == "torchtitan":
        from rooftop.frameworks.words.torchtitan import torchtitan_step

        return torchtitan_step(text, devices=slice_.devices, model=model)
    if framework == "maxtext":
        from rooftop.frameworks.words.maxtext import maxtext_step

        return maxtext_step(text, devices=slice_.devices, slices=dcn_groups(slice_), model=model)
    others = ", ".join(name for name in FRAMEWORKS[1:])
    raise RooftopError("from", framework, f"a configuration of another framework: --framework {others}")
