"""rooftop: plan, compile, run and explain large-model training, serving and embedding on TPU and GPU meshes."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "inspect"]


def __getattr__(name: str) -> Any:
    """Public functions, imported when they are first used: ``rooftop.inspect`` needs JAX, planning does not."""
    if name == "inspect":
        return importlib.import_module("rooftop.explain.compiled.function").inspect
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
