"""Activations of a layer between its input and output, and which of them each remat policy keeps.

The names are the ones that programs pass to ``checkpoint_name``; the policies say ``save``, ``offload`` or
``recompute`` for each. Book, chapter 4: about 20 arrays a layer without remat, 1 with block remat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rooftop.core.errors import RooftopError, unknown
from rooftop.models.attention import attention_kind
from rooftop.models.config import ModelConfig
from rooftop.models.mixers import projections, recurrences

#: Intermediates of a layer, in the order in which they are computed.
CHECKPOINTS: tuple[str, ...] = (
    "layer_input",
    "attn_normed",
    "qkv",
    "rope",
    "attn_core",
    "attn_out",
    "mlp_input",
    "mlp_normed",
    "mlp_up",
    "mlp_act",
    "mlp_down",
)
#: Those within an MLP.
MLP_CHECKPOINTS: tuple[str, ...] = ("mlp_normed", "mlp_up", "mlp_act", "mlp_down")
#: Tokens whose logits are held at once: the loss is computed in chunks.
LOSS_CHUNK = 1024

ACTIONS: tuple[str, ...] = ("save", "offload", "recompute")


def _policy(*saved: str) -> dict[str, str]:
    return {name: "save" if name == "layer_input" or name in saved else "recompute" for name in CHECKPOINTS}


#: Policies by name. ``none`` keeps all that the backward pass reads; ``matmuls`` the output of every matmul and of the
#: attention kernel; ``minimal`` the projections only, as MaxText's policy of that name; ``block`` and ``full`` (two
#: names in use for the same) only the layer's input, which a scan over layers keeps in any case.
POLICIES: dict[str, dict[str, str]] = {
    "none": _policy(*CHECKPOINTS),
    "matmuls": _policy("qkv", "attn_core", "attn_out", "mlp_up"),
    "minimal": _policy("qkv", "attn_out", "mlp_up", "mlp_down"),
    "block": _policy(),
    "full": _policy(),
}
#: The presets that a plan searches: 'full' is another name of 'block'.
SEARCHED: tuple[str, ...] = tuple(name for name in POLICIES if name != "full")


def searched_policies(*, exchanges: bool, offloads: Sequence[str] = ()) -> dict[str, dict[str, str]]:
    """The policies that a plan searches, by name.

    ``offloads`` are names of others, with checkpoints in host memory: each comes with its twin that keeps them on the
    device, for meshes that have room. If layers exchange tokens, policies that repeat this come in a second form, which
    keeps tokens as experts get them.
    """
    policies = {name: POLICIES[name] for name in SEARCHED}
    if exchanges:
        again = [name for name, policy in policies.items() if policy["mlp_normed"] == "recompute"]
        policies |= {name: parse_policy(name) for name in (f"{name},mlp_normed=save" for name in again)}
    for name in offloads:
        twin = name.replace("=offload", "=save")
        if parse_policy(twin) not in policies.values():
            policies[twin] = parse_policy(twin)
        policies[name] = parse_policy(name)
    return policies


def parse_policy(text: str, field: str = "remat") -> dict[str, str]:
    """A policy from its name, or from 'block,qkv=offload,attn_out=save': a preset and changes to it.

    Raises RooftopError on an unknown policy, checkpoint name or action.
    """
    first, *changes = [part.strip() for part in text.split(",")]
    if "=" in first:
        first, changes = "block", [first, *changes]
    if first not in POLICIES:
        raise unknown(field, first, POLICIES)
    policy = dict(POLICIES[first])
    for change in changes:
        name, _, action = (part.strip() for part in change.partition("="))
        if name not in CHECKPOINTS:
            raise unknown(f"{field} checkpoint", name, CHECKPOINTS)
        if action not in ACTIONS:
            raise unknown(f"{field} of {name}", action, ACTIONS)
        policy[name] = action
    if policy["layer_input"] == "recompute":
        raise RooftopError(f"{field} of layer_input", "recompute", "save or offload: a scan over layers keeps it")
    return policy


def checkpoint_widths(config: ModelConfig, *, moe_layer: bool) -> dict[str, float]:
    """Elements per token of each intermediate of one layer, before any sharding.

    In a layer of experts each token is held once per active expert (and for the shared ones). MLA makes its latents
    next to queries, keys and values. Where layers have different mixers, the figures are their mean.
    """
    widths = attention_kind(config).widths
    attention, into, inner = _mixed(config)
    hidden: float = config.d_ff
    if moe_layer and config.moe is not None:
        hidden = config.moe.active * config.moe.d_ff + config.moe.shared_d_ff
    gathered = config.d_model * (config.moe.active if moe_layer and config.moe is not None else 1)
    return {
        "layer_input": config.d_model,
        "attn_normed": config.d_model,
        "qkv": attention * widths.projected + into,
        "rope": attention * widths.rotated if config.positions == "rope" else 0.0,
        # The kernel keeps one float32 log-sum-exp per query and head next to its output.
        "attn_core": attention * (config.heads * config.d_value + 2 * config.heads) + inner,
        "attn_out": config.d_model,
        "mlp_input": config.d_model,
        "mlp_normed": gathered,
        "mlp_up": (config.mlp_matrices - 1) * hidden,
        "mlp_act": hidden,
        "mlp_down": gathered,
    }


def _mixed(config: ModelConfig) -> tuple[float, float, float]:
    """Share of layers with attention; elements per token into and out of recurrent mixers, in the mean of layers."""
    into = inner = 0.0
    for kind, layers in recurrences(config):
        first, _, (out, _) = projections(kind)
        into += layers / config.layers * sum(n for _, n in first)
        inner += layers / config.layers * out
    return config.attention_layers / config.layers, into, inner


def kept_widths(config: ModelConfig, policy: Mapping[str, str], *, moe_layer: bool) -> dict[str, float]:
    """Elements per token of each intermediate that ``policy`` keeps and the backward pass reads, others 0.

    What nothing reads is not stored, whatever the policy says: the sum of a residual needs neither of its terms again,
    and a rotation not what it rotated, unless norms stand between.
    """
    widths = checkpoint_widths(config, moe_layer=moe_layer)
    saved = {name: 0.0 if policy[name] == "recompute" else width for name, width in widths.items()}
    if not config.post_norms:
        saved["mlp_down"] = 0.0
        if saved["mlp_input"]:
            saved["attn_out"] = 0.0
    if saved["rope"] and not config.qk_norm:
        attention, into, _ = _mixed(config)
        saved["qkv"] = min(saved["qkv"], attention * attention_kind(config).widths.unrotated + into)
    return saved
