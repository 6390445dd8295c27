"""The one list of scope names and phases, and how a compiler's op_name maps onto them.

The planner names its rows with these scopes, programs open ``jax.named_scope`` with the same ones, and readers of
HLO and of profiles map what they find back: that is what lets the three ledgers join.
"""

from __future__ import annotations

import re
from typing import Any, Literal, get_args

SCOPES: tuple[str, ...] = (
    "embed",
    "layers/attn/norm",
    "layers/attn/qkv",
    "layers/attn/rope",
    "layers/attn/core",
    "layers/attn/out",
    "layers/mlp/norm",
    "layers/mlp/up",
    "layers/mlp/act",
    "layers/mlp/down",
    "layers/moe/router",
    "layers/moe/dispatch",
    "layers/moe/experts",
    "layers/moe/combine",
    "layers/moe/shared",
    "final_norm",
    "unembed",
    "loss",
    "gradients",
    "optimizer",
    "pipeline",
    "padding",
    "host_gap",
    "kv_cache",
    "sample",
    "tables/*/lookup",
    "tables/*/update",
)
UNSCOPED = "unscoped"
Phase = Literal["forward", "backward", "recompute", "update", "prefill", "generate"]
PHASES: tuple[Phase, ...] = get_args(Phase)

#: Scopes whose work belongs to the update whatever the compiler wraps around it.
_UPDATE_SCOPE = re.compile(r"gradients|optimizer|tables/[^/]+/update")


def _tree(paths: tuple[str, ...]) -> dict[str, Any]:
    root: dict[str, Any] = {}
    for path in paths:
        node = root
        for part in path.split("/"):
            node = node.setdefault(part, {})
    return root


_TREE = _tree(SCOPES)
_SCOPE = re.compile("|".join(re.escape(scope).replace(r"\*", "[^/*]+") for scope in SCOPES))
#: A jitted function, which may well be called as a scope is (``loss``, ``sample``), and is none.
_FUNCTION = re.compile(r"\bp?jit\([^()]*\)")
#: A transformation encloses the whole name of the first scope within it: ``transpose(jvp(layers/mlp/up))/dot_general``.
_TRANSFORMATION = re.compile(r"\w+\(|\)")


def is_scope(name: str) -> bool:
    """Return True if ``name`` is a scope, a table's included ('tables/user/lookup')."""
    return _SCOPE.fullmatch(name) is not None


def is_phase(name: str) -> bool:
    """Return True if ``name`` is a phase."""
    return name in PHASES


def scope_and_phase(op_name: str) -> tuple[str, str]:
    """Scope and phase of a compiler's ``op_name``, such as ``jit(step)/transpose(jvp(layers))/while/body/mlp/up/dot``.

    Wrappers (``jit(..)``, ``jvp(..)``, ``while/body``, ``checkpoint/rematted_computation``, ...) are stripped and give
    the phase. An op outside every scope, or in a group of scopes and not in a leaf of it, is ``unscoped``.
    """
    node, path = _TREE, list[str]()
    for part in _TRANSFORMATION.sub("", _FUNCTION.sub("", op_name)).split("/"):
        child = node.get(part)
        if child is None and path == ["tables"]:
            child = node["*"]
        if child is not None:
            node, path = child, [*path, part]
            if not node:
                break
    scope = "/".join(path)
    if not is_scope(scope):
        scope = UNSCOPED
    if _UPDATE_SCOPE.fullmatch(scope):
        return scope, "update"
    words = re.split(r"[/()]", op_name)
    if "rematted_computation" in words:
        return scope, "recompute"
    for phase in ("prefill", "generate"):
        if phase in words:
            return scope, phase
    return scope, "backward" if "transpose(" in op_name else "forward"
