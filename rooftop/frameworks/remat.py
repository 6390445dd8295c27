"""Remat policies that each framework has, by its own words for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import Any

from rooftop.core.errors import RooftopError
from rooftop.frameworks.tables import data_table
from rooftop.models import ModelConfig
from rooftop.models.activations import POLICIES, parse_policy

#: The most modules that a search recomputes together.
_MOST_MODULES = 3


def remat_policies(framework: str, model: ModelConfig) -> tuple[str, ...]:
    """Remat policies that a search tries for a framework, without offload; none for one that has all."""
    data = _words(framework)
    if "recompute" in data:
        modules = [name for name in data["recompute"] if _has_module(name, model)]
        groups = (group for count in range(_MOST_MODULES + 1) for group in combinations(modules, count))
        apart = (group for group in groups if not any(_is_part(data, name, group) for name in group))
        policies = [recomputed(framework, group, model) for group in apart]
        return (*dict.fromkeys(policies), "block")
    # Of custom policies there are more than a search can try: it tries those with a name.
    return tuple(text for text in data.get("remat", {}).values() if "offload" not in parse_policy(text).values())


def has_remat(framework: str, remat: str, model: ModelConfig) -> bool:
    """True if the framework has a remat policy."""
    data = _words(framework)
    if "recompute" in data:
        return remat == "block" or recompute_modules(framework, remat, model) is not None
    if "checkpoints" in data:
        actions = parse_policy(remat)
        return named_policy(framework, remat) is not None or all(
            action == "recompute" or name in data["checkpoints"] for name, action in actions.items()
        )
    return "remat" not in data or named_policy(framework, remat) is not None


def remat_words(framework: str) -> str:
    """The policies of a framework in words."""
    data = _words(framework)
    if "recompute" in data:
        return f"none, block, or none with some of {', '.join(data['recompute'])} recomputed"
    custom = f", or block with some of {', '.join(data['checkpoints'])} kept" if "checkpoints" in data else ""
    return ", ".join(data.get("remat", {}).values()) + custom


def named_policy(framework: str, remat: str) -> str | None:
    """The framework's name of a policy; None without one."""
    policy = parse_policy(remat)
    return next((name for name, text in _words(framework)["remat"].items() if parse_policy(text) == policy), None)


def policy_text(framework: str, remat: str) -> str:
    """A policy as answers show it: one with changes by the framework's name for it, if it has one."""
    named = named_policy(framework, remat) if "=" in remat and "remat" in _words(framework) else None
    return named or remat


def policy_of(framework: str, text: str) -> str:
    """The policy of a framework's name for one; any other text as it is."""
    policy: str = _words(framework).get("remat", {}).get(text, text)
    return policy


def recompute_modules(framework: str, remat: str, model: ModelConfig) -> tuple[str, ...] | None:
    """Modules that a framework recomputes under a policy that keeps all the rest; None if they do not add up to it."""
    data, policy = _words(framework), parse_policy(remat)
    again = {name for name, action in policy.items() if action == "recompute"}
    # The largest modules first: a module may be a part of another.
    sizes = sorted(data["recompute"].items(), key=lambda entry: -len(entry[1]))
    modules = list[str]()
    for name, names in sizes:
        if _has_module(name, model) and again.issuperset(names) and not _is_part(data, name, modules):
            modules.append(name)
    left = again.difference(*(data["recompute"][name] for name in modules))
    return None if left or "offload" in policy.values() else tuple(sorted(modules, key=list(data["recompute"]).index))


def recomputed(framework: str, modules: Sequence[str], model: ModelConfig) -> str:
    """The remat policy of recomputed modules. Raises RooftopError for one that has no price."""
    table = _words(framework)["recompute"]
    again = list(_checkpoints(table, modules, model))
    return ",".join(("none", *(f"{name}=recompute" for name in POLICIES["none"] if name in again)))


def _checkpoints(table: Mapping[str, Sequence[str]], modules: Sequence[str], model: ModelConfig) -> Iterator[str]:
    for name in modules:
        if name not in table:
            raise RooftopError("recomputed module", name, f"one that has a price: {', '.join(table)}")
        if _has_module(name, model):
            yield from table[name]


def _has_module(name: str, model: ModelConfig) -> bool:
    experts, latent = model.moe is not None, model.mla is not None
    dense = not experts or bool(model.dense_layers)
    return {"mlp": dense, "moe": experts, "moe_act": experts, "mla_up_proj": latent}.get(name, True)


def _is_part(data: Mapping[str, Any], name: str, modules: Sequence[str]) -> bool:
    """True if another of the modules recomputes all of a module's checkpoints already."""
    table = data["recompute"]
    return any(module != name and set(table[name]) <= set(table[module]) for module in modules)


@cache
def _words(framework: str) -> Mapping[str, Any]:
    """The words of a framework; rooftop's own program has no others than ours."""
    return {} if framework == "rooftop" else data_table(f"words/{framework}")
