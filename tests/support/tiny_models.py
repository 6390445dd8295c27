"""Tiny models of every family, with the logits and gradients that transformers computed for them."""

from __future__ import annotations

import importlib.util
import json
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from rooftop.models import ModelConfig, from_huggingface

ORACLES = Path(__file__).parents[1] / "oracles"
NAMES = sorted(json.loads((ORACLES / "tiny_models.json").read_text()))


def load_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ORACLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TINY = load_module("tiny_weights")


@cache
def case(name: str) -> tuple[ModelConfig, dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Model, facts, weights by their published names, and the arrays that transformers computed from them."""
    facts = json.loads((ORACLES / "logits" / f"{name}.json").read_text())
    weights = TINY.weights(facts["weights"], facts["norm_mean"])
    assert TINY.checksum(weights) == facts["weights_checksum"]
    with np.load(ORACLES / "logits" / f"{name}.npz") as golden:
        return from_huggingface(facts["config"], name), facts, weights, dict(golden)
