"""rooftop: plan, compile, run and explain large-model training, serving and embedding on TPU and GPU meshes.

Every verb of the command line is a function of the same words here: ``rooftop plan train llama3-8b --on v5e:4x4
--batch-seqs 16`` is ``rooftop.plan_training("llama3-8b", on="v5e:4x4", batch_seqs=16)``. Functions take objects or the
strings of the command line, or one request, and return results with ``to_json()``, ``rows`` and a table for notebooks.
"""

from __future__ import annotations

import importlib
import sys
import types

__version__ = "0.1.0"

#: Public functions by the module of ``rooftop.library`` that has them. A module is imported on first use.
_FUNCTIONS = {
    "chip": "catalogue",
    "chips": "catalogue",
    "model": "catalogue",
    "models": "catalogue",
    "support": "catalogue",
    "matmul": "arrays",
    "Matmul": "arrays",
    "plan_training": "planning",
    "PlanTraining": "planning",
    "plan_serving": "serving",
    "serving_front": "serving",
    "PlanServing": "serving",
    "simulate": "simulation",
    "Simulate": "simulation",
    "serve": "serving",
    "ServeRequest": "serving",
    "plan_embedding": "embedding",
    "PlanEmbedding": "embedding",
    "embedding_limits": "embedding",
    "calibrate": "benchmarks",
    "bench_collectives": "benchmarks",
    "BenchCollectives": "benchmarks",
    "bench_serving": "benchmarks",
    "BenchServing": "benchmarks",
    "compile": "programs.requested",
    "Compile": "programs.requested",
    "inspect": "programs.compiling",
    "compile_script": "programs.scripts",
    "target": "programs.scripts",
    "mesh": "programs.scripts",
    "check": "programs.checking",
    "CheckProgram": "programs.checking",
    "tune": "programs.tuning",
    "Tune": "programs.tuning",
    "explain": "explaining",
    "Explain": "explaining",
    "explain_module": "programs.compiling",
    "explain_operations": "explaining",
    "diff": "explaining",
    "validate": "explaining",
    "Validate": "explaining",
    "train": "training",
    "train_embedding": "training",
    "export_embedding": "training",
}

__all__ = ["__version__", *_FUNCTIONS]


def __getattr__(name: str) -> object:
    """Import a public function on first use."""
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from rooftop.core.extras import naming_extras

    with naming_extras():
        member: object = getattr(importlib.import_module(f"rooftop.library.{_FUNCTIONS[name]}"), name)
    if isinstance(member, types.FunctionType):
        # Some packages are imported when a function is called.
        member = naming_extras()(member)
        member.__module__, member.__qualname__ = __name__, name
    globals()[name] = member
    return member


def __dir__() -> list[str]:
    """Public names, imported or not."""
    return sorted(__all__)


class _Package(types.ModuleType):
    """The type of this module. Importing a package such as ``rooftop.explain`` does not hide the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _FUNCTIONS and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
