"""A ModelConfig from a Hugging Face ``config.json``, and the models that ship with rooftop, which are such files."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from rooftop.core.errors import RooftopError, unknown
from rooftop.core.files import parse_json, read_bytes
from rooftop.models.config import ModelConfig, StoredFormat
from rooftop.models.families import Keys, read_family
from rooftop.models.hub import Repository, architecture, cached_config, config_address, dtype_word, fetch_config, joined
from rooftop.models.sizing import SMALL_FAMILIES, is_small, small_model
from rooftop.models.stored import read_stored

_PRESETS = resources.files("rooftop.models") / "presets"


def from_huggingface(source: Mapping[str, Any] | str | Path, name: str | None = None) -> ModelConfig:
    """The model that a ``config.json`` describes, given as its path, its directory or its content.

    ``name`` is by default that of the directory, or of the file if it is not called config.json. Raises RooftopError
    naming file and key on a file that cannot be read, a missing key, a wrong type, an unknown ``model_type``, or a key
    that may change the computation and that its family does not have.
    """
    if isinstance(source, Mapping):
        return _described(source, "config", name or "config")
    path = Path(source, "config.json") if os.path.isdir(source) else Path(source)
    source_name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return _described(_read(path), str(path), name or source_name or "config")


def _described(data: Any, where: str, name: str) -> ModelConfig:
    """The model that the content of a config.json describes; ``where`` it is from stands in errors."""
    keys = Keys(data, where)
    try:
        family, fields = read_family(keys)
        stored = read_stored(keys)
        return ModelConfig(name=name, family=family, stored=stored, **fields)
    except RooftopError as error:
        if error.field.startswith(f"{where}:"):
            raise
        # The parts of a ModelConfig check themselves and do not know which file they came from.
        raise RooftopError(keys.field(error.field), error.given, error.accepted) from None


def stored_format(folder: Path) -> StoredFormat | None:
    """The format of the matrices of the checkpoint in ``folder``, as its config.json says; None if they are plain.

    Raises RooftopError for a file that cannot be read, and for a format that is not read.
    """
    path = folder / "config.json"
    return read_stored(Keys(_read(path), str(path))) if path.exists() else None


def presets() -> tuple[str, ...]:
    """The names of the models that ship with rooftop, sorted."""
    return tuple(sorted(file.name.removesuffix(".json") for file in _PRESETS.iterdir() if file.name.endswith(".json")))


def preset_source(name: str) -> str | None:
    """Source of the preset with this name or alias, or of which it has the architecture; None if there is none."""
    origin = _origin(name)
    preset = _preset_name(origin) if isinstance(origin, str) else None
    return None if preset is None else str(_preset(preset)["source"])


def load_model(name_or_path: str) -> ModelConfig:
    """A model by the name or alias of a preset, by FAMILY:N for a small one, or by the path of a config.json.

    The path may be that of a directory that holds one.

    Case does not matter in names. Raises RooftopError, with close matches, on what is neither.
    """
    preset = _preset_name(name_or_path)
    if preset is not None:
        return from_huggingface(_preset(preset), preset)
    if is_small(name_or_path):
        return small_model(name_or_path)
    if name_or_path.endswith(".json") or os.path.exists(name_or_path):
        return from_huggingface(name_or_path)
    small = ", ".join(f"{family}:N" for family in SMALL_FAMILIES)
    named = unknown("model", name_or_path, presets(), listed_by="rooftop model")
    accepted = f"{named.accepted}; {small} with N parameters; or a config.json"
    raise RooftopError("model", name_or_path, accepted)


def find_model(name: str) -> ModelConfig:
    """A model as ``load_model`` knows it, or by its name on the Hugging Face hub: an id or an address.

    The configuration is, in this order: that of a preset whose repository it is; the hub's cache on this machine; that
    of a preset of the same architecture, from whose name it differs in words that say nothing of it ('Instruct',
    '2507'); and what the hub answers. A name that says a format of weights is not taken for a preset, which does not
    have it. Raises RooftopError, in one line, if there is none.
    """
    origin = _origin(name)
    match origin:
        case str():
            return load_model(origin)
        case Path():
            repository = Repository.parse(name)
            return from_huggingface(origin, None if repository is None else repository.name)
        case Repository():
            data = fetch_config(origin, _otherwise(origin))
            return _described(data, config_address(origin), origin.name)


def model_meaning(name: str) -> str | None:
    """The line that says which model another name is, without asking the hub; None for rooftop's names and paths."""
    origin = _origin(name)
    match origin:
        case str():
            return None if origin == name or preset_names().get(name.lower()) else f"{name} is {origin}"
        case Path():
            return f"{name} is {origin}"
        case Repository():
            return f"{name} is {config_address(origin)}"


def _origin(name: str) -> str | Path | Repository:
    """The origin of a model: a name for ``load_model``, a cached config.json, or a repository to ask the hub for."""
    repository = Repository.parse(name)
    if _preset_name(name) is not None or os.path.exists(name):
        return name
    if repository is not None:
        if (preset := _preset_name(repository.id)) is not None:
            return preset
        if (path := cached_config(repository)) is not None:
            return path
    like = _presets_by_words().get(joined(architecture(name if repository is None else repository.name)))
    said = dtype_word(name)
    if like is not None and (said is None or (said in _PLAIN and "quantization_config" not in _preset(like))):
        return like
    return name if repository is None else repository


#: Words of dtypes that a model's weights have where it has no format of its own.
_PLAIN = ("bf16", "fp16")


def _otherwise(repository: Repository) -> str:
    """The models that are accepted in place of one that the hub has to be asked for."""
    like = _presets_by_words().get(joined(architecture(repository.name, stored=True)))
    has_sizes = "" if like is None else f" ({like} has its sizes; --weights-dtype its format)"
    return f"a preset of `rooftop model`{has_sizes}, or a config.json"


@cache
def _presets_by_words() -> Mapping[str, str]:
    """Words of presets and their aliases that say an architecture -> preset."""
    return {joined(architecture(alias)): preset for alias, preset in preset_names().items()}


def _preset_name(name: str) -> str | None:
    return preset_names().get(name.lower())


@cache
def preset_names() -> Mapping[str, str]:
    """Lower-case name or alias -> preset. The Hugging Face repository of a preset is an alias of it."""
    aliases = {}
    for name in presets():
        data = _preset(name)
        for alias in (name, data.get("_name_or_path", name), *data.get("aliases", ())):
            aliases[alias.lower()] = name
    return aliases


@cache
def _preset(name: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((_PRESETS / f"{name}.json").read_text(encoding="utf-8"))
    return data


def _read(path: Path) -> Any:
    accepted = "a Hugging Face config.json"
    try:
        return parse_json(read_bytes(path))
    except FileNotFoundError:
        raise RooftopError(str(path), "no such file", accepted) from None
    except OSError as error:
        raise RooftopError(str(path), error.strerror or "unreadable", accepted) from None
    except RecursionError:
        raise RooftopError(str(path), "malformed JSON", f"{accepted} (nested too deeply)") from None
    except ValueError as error:
        raise RooftopError(str(path), "malformed JSON", f"{accepted} ({error})") from None
