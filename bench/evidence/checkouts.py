"""Shared parts of the readers of checkouts: stand-ins for packages, provenance, values as text.

framework_options.py, framework_recipes.py and oracles.py run code of frameworks from a checkout. What is not installed
(kernels, clouds, data loaders) is stood in for by modules whose every name is a class that accepts anything.
"""

from __future__ import annotations

import enum
import importlib
import importlib.abc
import importlib.machinery
import subprocess
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REPOSITORIES = {
    "megatron": "NVIDIA/Megatron-LM",
    "bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "torchtitan": "pytorch/torchtitan",
    "maxtext": "AI-Hypercomputer/maxtext",
}


class Kind(type):
    """A class that has whatever name it is asked for."""

    def __getattr__(cls, name: str) -> Any:
        """A class of that name."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Kind(name, (Anything,), {})


class Anything(metaclass=Kind):
    """An object that has whatever name it is asked for, and can be called."""

    def __init__(self, *_: Any, **fields: Any) -> None:
        self.__dict__.update(fields)

    def __getattr__(self, name: str) -> Any:
        """Another such object."""
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __call__(self, *_: Any, **fields: Any) -> Anything:
        """Another such object; a decorator leaves what it is applied to unusable, which suffices here."""
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        """Nothing."""
        return iter(())


class StandIn(types.ModuleType):
    """A module of a package that is not installed."""

    __path__: Sequence[str] = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        """A class of that name."""
        if name.startswith("__"):
            raise AttributeError(name)
        kind = Kind(name, (Anything,), {})
        setattr(self, name, kind)
        return kind


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stand-ins for packages by name, and for what is inside them; ``bare`` packages run no ``__init__``."""

    def __init__(self, names: Sequence[str], bare: Mapping[str, Path] | None = None) -> None:
        self.names, self.bare = list(names), dict(bare or {})

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        """A spec for a name of ``names`` or ``bare``."""
        if fullname in self.bare:
            spec = importlib.machinery.ModuleSpec(fullname, self, is_package=True)
            spec.submodule_search_locations = [str(self.bare[fullname])]
            return spec
        if any(fullname == name or fullname.startswith(f"{name}.") for name in self.names):
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        """The stand-in."""
        return None if spec.name in self.bare else StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to run."""


def stand_in(names: Sequence[str], bare: Mapping[str, Path] | None = None) -> StandIns:
    """Let imports of packages by these names succeed."""
    finder = StandIns(names, bare)
    sys.meta_path.insert(0, finder)
    return finder


def import_torch() -> None:
    """Import torch before triton is stood in for: torch asks for triton itself, and has to be told the truth."""
    importlib.import_module("torch._dynamo.testing")
    importlib.import_module("torch._inductor.compile_fx")
    # Megatron's sources ask for a decorator of Python 3.12.
    typing.override = getattr(typing, "override", lambda method: method)  # type: ignore[attr-defined]


def plain(value: object) -> Any:
    """A value as JSON has it; an enum by its value, a function by its name."""
    if isinstance(value, enum.Enum):
        return value.name if isinstance(value.value, int) else value.value
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return getattr(value, "__name__", None) or str(value)


def commit_of(checkout: Path) -> tuple[str, str]:
    """Commit and its date: of ``git log``, or of a file COMMIT in it ("HASH DATE")."""
    recorded = checkout / "COMMIT"
    if recorded.exists():
        commit, date = recorded.read_text(encoding="utf-8").split()
    else:
        command = ["git", "-C", str(checkout), "log", "-1", "--format=%H %cs"]
        commit, date = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    return commit, date
