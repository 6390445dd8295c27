"""Names, defaults and accepted values of the frameworks' options, from checkouts of them.

    python bench/evidence/framework_options.py megatron CHECKOUT     # writes megatron-options.json
    python bench/evidence/framework_options.py torchtitan CHECKOUT   # torchtitan-main-fields.json, or that of 0.2.2
    python bench/evidence/framework_options.py maxtext CHECKOUT      # maxtext-keys.json

The files stand in tests/frameworks/data, a line per option. Each writer runs the framework's parser or its table of
settings, not a reading of its text: Megatron-LM's argparse parser, torchtitan's dataclasses, MaxText's pydantic model
below its base.yml. The interpreter needs torch (CPU) for the first two and jax with pydantic for the third; packages of
clouds and kernels that it lacks are stood in for: no option reads them. Commit and date come from ``git log``
of the checkout, or from a file COMMIT (hash and date) in one without history. Seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import enum
import importlib
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checkouts import REPOSITORIES, ROOT, commit_of, import_torch, plain, stand_in

DATA = ROOT / "tests" / "frameworks" / "data"
#: Packages that options do not need, by framework.
ABSENT = {
    "megatron": ("triton",),
    "torchtitan": ("triton", "torchtitan.distributed.minimal_async_ep.kernels", "torchtitan.models.moe.kernels"),
    "maxtext": ("tensorflow", "google.cloud", "drjax", "pathwaysutils", "tokamax", "ml_goodput_measurement"),
}


def megatron(checkout: Path) -> tuple[str, dict[str, Any]]:
    """Options of the train scripts' parser: option -> destination, default, type, nargs, choices."""
    sys.path.insert(0, str(checkout))
    arguments = importlib.import_module("megatron.training.arguments")
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    options: dict[str, Any] = {}
    for action in parser._actions:
        if not action.option_strings:
            continue
        entry: dict[str, Any] = {"dest": action.dest, "default": plain(action.default)}
        if action.nargs is not None:
            entry["nargs"] = action.nargs
        if action.type is not None:
            entry["type"] = plain(action.type)
        if action.const is not None:
            entry["const"] = plain(action.const)
        if action.choices is not None:
            entry["choices"] = [plain(choice) for choice in action.choices]
        if action.required:
            entry["required"] = True
        name, *others = [text for text in action.option_strings if text.startswith("--")]
        options[name] = entry | ({"also": others} if others else {})
    return "megatron-options", options


def classes(annotation: object) -> list[type]:
    """Dataclasses that a field's annotation names, in order."""
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return [annotation]
    return [kind for part in typing.get_args(annotation) for kind in classes(part)]


def choices(annotation: object) -> list[Any] | None:
    """The values of a Literal inside an annotation; None: any."""
    if typing.get_origin(annotation) is typing.Literal:
        return [plain(value) for value in typing.get_args(annotation)]
    return next((values for part in typing.get_args(annotation) if (values := choices(part)) is not None), None)


def fields_of(kind: type, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Fields of a dataclass and of the dataclasses in it: dotted name -> default and accepted values.

    Where a section is one of several classes, each class's fields follow under ``section:CLASS``.
    """
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, kinds = f"{prefix}{field.name}", classes(hints[field.name])
        if kinds and typing.get_origin(hints[field.name]) in (list, tuple, dict):
            kinds = []
        missing = field.default is dataclasses.MISSING
        value = field.default if missing is False else None
        if missing and field.default_factory is not dataclasses.MISSING and not kinds:
            value = field.default_factory()
        if not kinds:
            entry = {"default": plain(value)}
            accepted = choices(hints[field.name])
            required = missing and field.default_factory is dataclasses.MISSING
            extra = ({"choices": accepted} if accepted else {}) | ({"required": True} if required else {})
            yield name, entry | extra
        for inner in kinds:
            section = name if len(kinds) == 1 else f"{name}:{inner.__qualname__.removesuffix('.Config')}"
            if len(kinds) > 1:
                chosen = field.default_factory() if field.default_factory is not dataclasses.MISSING else field.default
                yield section, {"default": type(chosen) is inner}
            yield from fields_of(inner, f"{section}.")


def torchtitan(checkout: Path) -> tuple[str, dict[str, Any]]:
    """Fields of the train job: section.field -> default, choices."""
    sys.path.insert(0, str(checkout))
    if (checkout / "torchtitan" / "config" / "job_config.py").exists():
        job = importlib.import_module("torchtitan.config.job_config").JobConfig
        return "torchtitan-0.2.2-fields", dict(fields_of(job))
    fields = fields_of(importlib.import_module("torchtitan.trainer").Trainer.Config)
    # A model's own sizes and layouts are made by its registry's functions, not by options.
    return "torchtitan-main-fields", {name: entry for name, entry in fields if not name.startswith("model_spec.")}


def enums(annotation: object) -> list[Any] | None:
    """The values of an enum or a Literal inside an annotation; None: any."""
    if isinstance(annotation, type) and issubclass(annotation, enum.Enum):
        return [plain(member) for member in annotation]
    inner = [values for part in typing.get_args(annotation) if (values := enums(part)) is not None]
    return inner[0] if inner else choices(annotation)


def maxtext(checkout: Path) -> tuple[str, dict[str, Any]]:
    """Keys of a run: key -> default (base.yml before the model's), choices, whether base.yml has it."""
    yaml = importlib.import_module("yaml")
    source = checkout / "src"
    sys.path.insert(0, str(source))
    base = yaml.safe_load((source / "maxtext" / "configs" / "base.yml").read_text(encoding="utf-8"))
    model = importlib.import_module("maxtext.configs.types").MaxTextConfig
    keys: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        unset = field.default_factory() if field.default_factory is not None else field.default
        value = base[name] if name in base else (None if field.is_required() else unset)
        accepted = enums(field.annotation)
        keys[name] = {"default": plain(value), "base": name in base} | ({"choices": accepted} if accepted else {})
    keys |= {name: {"default": plain(value), "base": True} for name, value in base.items() if name not in keys}
    return "maxtext-keys", keys


def provenance(framework: str, checkout: Path) -> dict[str, str]:
    """Repository, commit, its date and the command that wrote a file."""
    commit, date = commit_of(checkout)
    return {
        "repository": REPOSITORIES[framework],
        "commit": commit,
        "date": date,
        "command": f"python bench/evidence/framework_options.py {framework} CHECKOUT",
    }


def write(path: Path, head: dict[str, str], entries: dict[str, Any]) -> None:
    """A file with a line per option."""
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in sorted(entries.items())]
    top = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in head.items())
    path.write_text(f'{{\n{top},\n"options": {{\n' + ",\n".join(lines) + "\n}\n}\n", encoding="utf-8")


def main() -> None:
    """Write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("framework", choices=tuple(ABSENT))
    parser.add_argument("checkout", type=Path)
    options = parser.parse_args()
    if options.framework != "maxtext":
        import_torch()
    stand_in(ABSENT[options.framework])
    readers = {"megatron": megatron, "torchtitan": torchtitan, "maxtext": maxtext}
    name, entries = readers[options.framework](options.checkout.resolve())
    write(DATA / f"{name}.json", provenance(options.framework, options.checkout), entries)
    print(f"{name}: {len(entries)}")


if __name__ == "__main__":
    main()
