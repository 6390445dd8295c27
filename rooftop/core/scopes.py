"""The one list of scope names and phases, and how a compiler's op_name maps onto them.

The planner names its rows with these scopes, programs open ``jax.named_scope`` with the same ones, and readers of
HLO and of profiles map what they find back: that is what lets the three ledgers join.

A program of somebody else has its own scopes: named scopes and the paths of its modules. They form an open tree
(``open_place``), in which equal layers are one: ``layers_*`` (``folded``).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
_TRANSFORMATION = re.compile(r"\b\w+\(|\)")
#: Parts of the scope of another program, outermost first; and characters of the names that one instruction joins.
_DEEPEST, _LONGEST = 64, 2**16


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
    return scope, _phase(scope, op_name)


def _phase(scope: str, op_name: str) -> str:
    if _UPDATE_SCOPE.fullmatch(scope):
        return "update"
    words = re.split(r"[/()]", op_name)
    if "rematted_computation" in words:
        return "recompute"
    for phase in ("prefill", "generate"):
        if phase in words:
            return phase
    return "backward" if "transpose(" in op_name else "forward"


# ---- scopes of other programs ---------------------------------------------------------------------------------------

#: Parts of a name stack that JAX puts there: control flow, and rules for derivatives.
_WRAPPER = re.compile(
    r"while|body|cond|closed_call|checkpoint|rematted_computation|remat2?|shard_map|branch_\d+_fun|core_call|pjit"
    r"|custom_[jv][vj]p_call\w*|xla_call|scan|custom_lin"
)
#: Parts that declare figures (``kernel_flops[...]``), the name of an argument, and the subscripts of an einsum.
_NO_NAME = re.compile(r"[\[\]']|->|^$")
#: XLA joins the names of instructions that it combines: 'jit(f)/(a/b/add:a/c/dot_general)', or 'f/a/mul;f/b/div'.
_COMBINED = re.compile(r"(?<![\w>])\(")
_PUNCTUATION = re.compile(r"[():]")


def is_path(name: str) -> bool:
    """Return True if ``name`` can be a scope of a program: parts that are not empty, joined by '/'."""
    return bool(name) and all(part.strip() for part in name.split("/"))


def open_place(op_name: str) -> tuple[str, str]:
    """Scope and phase of an ``op_name`` of any program: its named scopes and modules, '/' between them.

    The last part is the operation itself. The name of a combined instruction has the scope that all its parts share,
    or that of its first part.
    """
    parts = _parts(op_name)
    paths = [path for path in map(_path, dict.fromkeys(parts)) if path]
    shared: list[str] = []
    for words in zip(*paths, strict=False):
        if len(set(words)) > 1:
            break
        shared.append(words[0])
    path = shared or next(iter(paths), [])
    scope = "/".join(path) or UNSCOPED
    return scope, _phase(scope, parts[0])


def _parts(op_name: str) -> list[str]:
    """The names that a combined instruction joins, else its own."""
    left, parts, characters = [op_name], list[str](), 0
    while left:
        name = left.pop()
        divided = name.split(";") if ";" in name else _combined(name)
        characters += sum(map(len, divided))
        # Names in names may be as many as the text has characters, and each repeats what is around it.
        if divided and characters <= max(_LONGEST, 2 * len(op_name)):
            left += reversed(divided)
        else:
            parts.append(name)
    return parts


def _combined(op_name: str) -> list[str]:
    """The names that 'jit(f)/(a/b/add:a/c/dot_general)' joins; none of another name."""
    opening = _COMBINED.search(op_name) if ":" in op_name and op_name.endswith(")") else None
    if opening is None:
        return []
    prefix, inner = op_name[: opening.start()], op_name[opening.end() : -1]
    depth, begin, names = 0, 0, list[str]()
    for sign in _PUNCTUATION.finditer(f"{inner}:"):
        depth += {"(": 1, ")": -1}.get(sign.group(), 0)
        if sign.group() == ":" and depth == 0:
            names.append(prefix + inner[begin : sign.start()])
            begin = sign.end()
    return names


def _path(op_name: str) -> list[str]:
    words = _TRANSFORMATION.sub("", _FUNCTION.sub("", op_name)).split("/")[:-1]
    names = [word for word in words if not _WRAPPER.fullmatch(word) and not _NO_NAME.search(word)]
    # A module that calls its base class opens its scope again.
    return [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name][:_DEEPEST]


def is_own(op_names: Iterable[str]) -> bool:
    """Return True if a program with these op_names opens rooftop's own scopes.

    One scope of a group, such as ``layers/mlp/up``, is enough. A name such as ``loss`` is rooftop's only where the
    program has no other scopes.
    """
    known, others = False, False
    for op_name in op_names:
        scope = scope_and_phase(op_name)[0]
        if "/" in scope:
            return True
        known = known or scope != UNSCOPED
        others = others or (scope == UNSCOPED and open_place(op_name)[0] != UNSCOPED)
    return known and not others


@dataclass(frozen=True, kw_only=True)
class FoldedScopes:
    """Scopes in which equal layers are one: ``names`` by the scope of the program.

    ``layers`` has the number of layers that each folded path stands for: {'model/layers_*': 32}.
    """

    names: Mapping[str, str]
    layers: Mapping[str, int]


_NUMBERED = re.compile(r"(.*?)(\d+)")
#: So many numbered parts without scopes in them are layers; fewer may be the two matmuls of a block.
_LEAVES = 4


def folded(scopes: Iterable[str]) -> FoldedScopes:
    """Fold numbered parts of paths, ``layers_0`` to ``layers_31`` or ``layers/0`` to ``layers/31``, into one.

    Such parts are layers if all contain scopes and share one of them. Parts without scopes are, if there are at least
    four of them.
    """
    paths = [scope.split("/") for scope in dict.fromkeys(scopes) if scope != UNSCOPED]
    tree: dict[str, Any] = _tree(tuple("/".join(path) for path in paths))
    renamed: dict[tuple[str, ...], str] = {}
    layers: dict[str, int] = {}
    _fold(tree, (), renamed, layers)
    names = {UNSCOPED: UNSCOPED}
    for path in paths:
        renamed_path: tuple[str, ...] = ()
        for part in path:
            renamed_path = (*renamed_path, renamed.get((*renamed_path, part), part))
        names["/".join(path)] = "/".join(renamed_path)
    return FoldedScopes(names=names, layers=layers)


def _fold(
    node: dict[str, Any], path: tuple[str, ...], renamed: dict[tuple[str, ...], str], layers: dict[str, int]
) -> None:
    groups: dict[str, list[str]] = {}
    for name in node:
        if match := _NUMBERED.fullmatch(name):
            groups.setdefault(match.group(1), []).append(name)
    for stem, members in groups.items():
        if len(members) > 1 and _are_layers([node[name] for name in members], len(members)):
            merged = f"{stem}*"
            renamed |= {(*path, name): merged for name in members}
            layers["/".join((*path, merged))] = len(members)
            node[merged] = {}
            for name in members:
                _merge(node[merged], node.pop(name))
    for name, child in node.items():
        _fold(child, (*path, name), renamed, layers)


def _are_layers(members: list[dict[str, Any]], count: int) -> bool:
    shared = set(members[0]).intersection(*members[1:])
    return bool(shared) or (count >= _LEAVES and not any(members))


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for name, child in other.items():
        _merge(into.setdefault(name, {}), child)
