"""The mixture of experts on eight emulated devices equals a plain one; XLA:TPU makes of it what is planned."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import P, named_scope
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding

from rooftop.arrays import AXES, Mesh
from rooftop.arrays.rules import Rules
from rooftop.capabilities import Choice
from rooftop.compiler.devices import topology_mesh
from rooftop.compiler.hlo import text as hlo
from rooftop.compiler.ledger import read_ledger
from rooftop.core.errors import RooftopError
from rooftop.explain.join import JoinedRow, join
from rooftop.hardware import Slice
from rooftop.models import ModelConfig
from rooftop.models import MoE as Mixture
from rooftop.models.activations import parse_policy
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.plan import TrainingPlan
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.workload import Workload
from rooftop.programs.model import grouped_matmul
from rooftop.programs.model.activation import activate
from rooftop.programs.model.moe.mixture import moe_mlp
from rooftop.programs.model.moe.route import route
from rooftop.programs.model.moe.slots import ExpertSlots, capacity, from_slots, to_slots
from rooftop.programs.parameters import MoEWeights, Norm
from rooftop.programs.serving.decode import Decoder
from rooftop.programs.serving.quantised import quantise
from rooftop.programs.sharding import Dim, Specs, axes_of, named_reshard
from tests.support.curves import mesh_of
from tests.support.examples import examples

Weights = dict[str, np.ndarray]

BATCH, SEQ_LEN, D, F = 8, 8, 16, 24
V3 = Mixture(
    experts=8, active=3, d_ff=F, shared_d_ff=12, scoring="sigmoid", groups=4, active_groups=2, group_score="top2_sum",
    correction_bias=True, routed_scaling=2.5,
)  # fmt: skip
V2 = Mixture(
    experts=8, active=2, d_ff=F, shared_d_ff=12, normalise=False, routed_scaling=16.0, groups=4, active_groups=3,
)  # fmt: skip
GPT_OSS = {"swiglu_limit": 0.7, "swiglu_alpha": 1.702}
MODELS: Mapping[str, tuple[Mixture, dict[str, Any]]] = {
    "mixtral": (Mixture(experts=8, active=2, d_ff=F), {}),
    "deepseek_v2": (V2, {}),
    "deepseek_v3": (V3, {}),
    "gpt_oss": (Mixture(experts=8, active=4, d_ff=F, bias=True), GPT_OSS),
    "four_experts": (Mixture(experts=4, active=2, d_ff=F, bias=True, shared_d_ff=12), GPT_OSS),
    "not_gated": (
        Mixture(experts=8, active=1, d_ff=F, bias=True, normalise=False),
        {"activation": "gelu", "mlp_matrices": 2},
    ),
}
DIMS: Mapping[str, tuple[Dim, ...]] = {
    "router": ("embed", None),
    "router_bias": (None,),
    "correction_bias": (None,),
    "gate": ("expert", "embed", "expert_mlp"),
    "up": ("expert", "embed", "expert_mlp"),
    "down": ("expert", ("expert_mlp", "embed"), None),
    "gate_bias": ("expert", "expert_mlp"),
    "up_bias": ("expert", "expert_mlp"),
    "down_bias": ("expert", None),
    "shared_gate": ("embed", "mlp"),
    "shared_up": ("embed", "mlp"),
    "shared_down": (("mlp", "embed"), None),
}


def model_of(moe: Mixture, **changes: Any) -> ModelConfig:
    fields = {"d_model": D, "d_ff": F, "heads": 4, "kv_heads": 4, "d_head": 4, "vocab": 32, "max_seq_len": SEQ_LEN}
    return ModelConfig(**({"name": "tiny", "family": "tiny", "layers": 2, "moe": moe} | fields | changes))


def shapes_of(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The weights that a mixture of this model has."""
    moe, d = model.moe, model.d_model
    assert moe is not None
    e, f, shared = moe.experts, moe.d_ff, moe.shared_d_ff
    shapes = {"router": (d, e), "gate": (e, d, f), "up": (e, d, f), "down": (e, f, d)}
    shapes |= {"shared_gate": (d, shared), "shared_up": (d, shared), "shared_down": (shared, d)} if shared else {}
    biases = {"router_bias": (e,), "gate_bias": (e, f), "up_bias": (e, f), "down_bias": (e, d)}
    shapes |= biases if moe.bias else {}
    shapes |= {"correction_bias": (e,)} if moe.correction_bias else {}
    gated = model.mlp_matrices == 3
    return {name: shape for name, shape in shapes.items() if gated or "gate" not in name}


def specs_on(mesh: jax.sharding.Mesh, *, whole_experts: bool = False) -> Specs:
    rules = Rules().with_whole_experts if whole_experts else Rules()
    return Specs(rules.only({axis: size for axis, size in mesh.shape.items() if size > 1}))


def case(name: str) -> tuple[ModelConfig, Weights, np.ndarray, np.ndarray]:
    """A model, its weights, an input and a derivative of the output."""
    moe, changes = MODELS[name]
    model, random = model_of(moe, **changes), np.random.default_rng(0)
    weights = {
        key: (random.standard_normal(shape) * (shape[-2] ** -0.5 if "bias" not in key else 0.3)).astype(np.float32)
        for key, shape in shapes_of(model).items()
    }
    x, derivative = random.standard_normal((2, BATCH, SEQ_LEN, D)).astype(np.float32)
    return model, weights, x, derivative


def sharded(
    model: ModelConfig,
    weights: Weights,
    x: np.ndarray,
    derivative: np.ndarray,
    mesh: jax.sharding.Mesh,
    *,
    factor: float | None = None,
    rules: Rules | None = None,
    matmul: str = "batched",
) -> tuple[np.ndarray, np.ndarray, Weights]:
    """Output, and gradients of input and weights, on a mesh."""
    specs = specs_on(mesh) if rules is None else Specs(rules)
    stream = NamedSharding(mesh, specs.residual)

    @jax.jit
    def both(x: jax.Array, weights: dict[str, jax.Array], derivative: jax.Array) -> Any:
        def mixture(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
            layer = MoEWeights(norm=Norm(scale=None), **weights)
            return moe_mlp(x, layer, model, specs, capacity_factor=factor, matmul=matmul)[0]

        out, pull = jax.vjp(mixture, x, weights)
        return out, *pull(derivative)

    with jax.set_mesh(mesh):
        placed = {k: jax.device_put(w, NamedSharding(mesh, specs.parameter(*DIMS[k]))) for k, w in weights.items()}
        results = both(jax.device_put(x, stream), placed, jax.device_put(derivative, stream))
    return jax.tree.map(np.asarray, results)


def test_padding_takes_no_slot() -> None:
    """Tokens 1 and 3 choose no expert: the others are taken and dropped as if these were not there."""
    real = np.array([[0, 1], [1, 2], [1, 0], [2, 1]], np.int32)
    chosen = np.full((6, 2), 3, np.int32)
    chosen[[0, 2, 4, 5]] = real
    padded, alone = (ExpertSlots.of(jnp.asarray(ids), 3, 2) for ids in (chosen, real))
    assert np.array_equal(np.asarray(padded.taken)[[0, 2, 4, 5]], alone.taken)
    assert (np.asarray(padded.taken)[[1, 3]] == 6).all()
    tokens = np.append(np.asarray([0, 2, 4, 5]), 6)
    assert np.array_equal(np.asarray(padded.pairs) // 2, tokens[np.asarray(alone.pairs) // 2])


# ---- a plain mixture ------------------------------------------------------------------------------------------------


def choose(scores: np.ndarray, correction: np.ndarray | float, moe: Mixture) -> np.ndarray:
    """Which experts each token uses, [n, E] booleans, token by token."""
    chosen = np.zeros(scores.shape, bool)
    for token, biased in enumerate(scores + correction):
        groups = np.sort(biased.reshape(moe.groups, -1), axis=1)
        rank = groups[:, -1] if moe.group_score == "max" else groups[:, -1] + groups[:, -2]
        active = np.argsort(rank)[-moe.active_groups :] if moe.groups > 1 else np.arange(moe.groups)
        allowed = [e for e in range(moe.experts) if e // (moe.experts // moe.groups) in active]
        best = sorted(allowed, key=lambda expert: biased[expert])[-moe.active :]
        chosen[token, best] = True
    return chosen


def plain(
    model: ModelConfig, weights: Weights, x: np.ndarray, derivative: np.ndarray, real: np.ndarray | bool = True
) -> tuple[np.ndarray, np.ndarray, Weights]:
    """The same by the definition: every expert on every token, weighed. ``kept`` [n, E]: pairs that are not dropped."""
    moe = model.moe
    assert moe is not None

    def score(tokens: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        logits = tokens @ weights["router"] + weights.get("router_bias", 0.0)
        exp = jnp.exp(logits)
        return exp / exp.sum(-1, keepdims=True) if moe.scoring == "softmax" else 1 / (1 + jnp.exp(-logits))

    def mlp(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        up = x @ weights["up"] + weights.get("up_bias", 0.0)
        if model.mlp_matrices == 2:
            act = up * (1 + jax.scipy.special.erf(up / 2**0.5)) / 2
        else:
            gate = x @ weights["gate"] + weights.get("gate_bias", 0.0)
            if (limit := model.swiglu_limit) is not None:
                gate, up = jnp.where(gate > limit, limit, gate), jnp.maximum(jnp.minimum(up, limit), -limit) + 1
            act = gate / (1 + jnp.exp(-model.swiglu_alpha * gate)) * up
        return act @ weights["down"] + weights.get("down_bias", 0.0)

    chosen = choose(np.asarray(score(x.reshape(-1, D), weights)), weights.get("correction_bias", 0.0), moe)

    def mixture(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        tokens = x.reshape(-1, D)
        share = score(tokens, weights) * chosen
        share = share / share.sum(-1, keepdims=True) if moe.normalise else share
        share = share * moe.routed_scaling * real
        out = jnp.zeros_like(tokens)
        for expert in range(moe.experts):
            own = {k: w[expert] for k, w in weights.items() if k.startswith(("gate", "up", "down"))}
            out = out + share[:, expert, None] * mlp(tokens, own)
        if moe.shared_d_ff:
            out = out + mlp(tokens, {k.removeprefix("shared_"): w for k, w in weights.items() if "shared_" in k})
        return out.reshape(x.shape)

    out, pull = jax.vjp(mixture, x, weights)
    return jax.tree.map(np.asarray, (out, *pull(derivative)))


def assert_equal(actual: Any, expected: Any) -> None:
    """Every array, to 2e-6 of its largest element."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        scale = np.abs(b).max() or 1.0
        assert np.abs(a - b).max() / scale < 2e-6, jax.tree_util.keystr(path)


SHARDINGS = [
    *((name, {"expert": 2, "fsdp": 2, "tensor": 2}) for name in MODELS if name != "four_experts"),
    ("mixtral", {"expert": 8}),  # one expert on a device
    ("four_experts", {"expert": 4, "fsdp": 2}),
    *(
        pytest.param(name, sizes, marks=pytest.mark.slow)
        for name, sizes in (
            ("mixtral", {}),
            ("deepseek_v3", {"data": 2, "expert": 2, "context": 2}),
            ("four_experts", {"expert": 2, "fsdp": 2, "tensor": 2}),
            ("four_experts", {"expert": 4, "tensor": 2}),
            ("gpt_oss", {"fsdp": 4, "tensor": 2}),
            ("mixtral", {"data": 2, "fsdp": 4}),
        )
    ),
]


@pytest.mark.parametrize(("name", "sizes"), SHARDINGS)
def test_values_and_gradients_are_those_of_a_plain_mixture(name: str, sizes: Mapping[str, int]) -> None:
    """Whatever the mesh. Without a capacity factor nothing is dropped, though experts are chosen very unevenly."""
    problem = case(name)
    assert_equal(sharded(*problem, mesh_of(**sizes)), plain(*problem))


WHOLE = [
    ("gpt_oss", {"expert": 2, "fsdp": 2, "tensor": 2}, "batched"),
    ("deepseek_v3", {"tensor": 4, "expert": 2}, "grouped"),
    *(
        pytest.param(*case_, marks=pytest.mark.slow)
        for case_ in (
            ("mixtral", {"tensor": 8}, "batched"),
            ("mixtral", {"tensor": 2, "context": 2, "data": 2}, "batched"),
            ("four_experts", {"data": 2, "tensor": 4}, "batched"),
            ("gpt_oss", {"fsdp": 4, "tensor": 2}, "grouped"),
            ("not_gated", {"expert": 2, "fsdp": 2, "tensor": 2}, "grouped"),
        )
    ),
]


@pytest.mark.parametrize(("name", "sizes", "matmul"), WHOLE)
def test_whole_experts_over_tensor_are_those_of_a_plain_mixture(
    name: str, sizes: Mapping[str, int], matmul: str
) -> None:
    """Each device along tensor has experts of its own, and sends its tokens to all of them."""
    problem, mesh = case(name), mesh_of(**sizes)
    specs = specs_on(mesh, whole_experts=True)
    assert specs.parameter(*DIMS["up"])[2] is None
    assert_equal(sharded(*problem, mesh, rules=specs.rules, matmul=matmul), plain(*problem))


GROUPED = [
    ("mixtral", {}),
    ("gpt_oss", {"expert": 2, "fsdp": 2, "tensor": 2}),  # biases
    ("deepseek_v3", {"expert": 4, "tensor": 2}),
    *(
        pytest.param(name, sizes, marks=pytest.mark.slow)
        for name, sizes in (
            ("mixtral", {"expert": 8}),
            ("not_gated", {"expert": 2, "fsdp": 2, "tensor": 2}),
            ("four_experts", {"expert": 4, "fsdp": 2}),
            ("deepseek_v2", {"data": 2, "expert": 2, "context": 2}),
            ("gpt_oss", {"fsdp": 4, "tensor": 2}),
        )
    ),
]


@pytest.mark.parametrize(("name", "sizes"), GROUPED)
def test_grouped_matmul_drops_nothing(name: str, sizes: Mapping[str, int]) -> None:
    problem = case(name)
    assert_equal(sharded(*problem, mesh_of(**sizes), matmul="grouped"), plain(*problem))


@pytest.mark.parametrize(
    ("name", "matmul", "sizes"),
    [
        ("deepseek_v3", "grouped", {"fsdp": 2, "expert": 2, "tensor": 2}),
        ("four_experts", "batched", {"fsdp": 2, "expert": 2, "tensor": 2}),
        ("gpt_oss", "grouped", {"expert": 2, "tensor": 2}),
        ("gpt_oss", "grouped", {"fsdp": 4}),
    ],
)
def test_experts_that_gather_all_tokens_are_those_that_exchange_them(
    name: str, matmul: str, sizes: Mapping[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a server computes them, D split over fsdp; also in many pieces of few rows."""
    model, weights, x, derivative = case(name)
    expected, *_ = plain(model, weights, x, derivative)
    mesh, specs = mesh_of(**sizes), Decoder(model=model, sizes=tuple(sizes.items())).specs
    dims = DIMS | {"down": ("expert", "expert_mlp", "embed"), "shared_down": ("mlp", "embed")}
    dims |= {"down_bias": ("expert", "embed")}
    stream = NamedSharding(mesh, specs.residual)
    placed = {k: jax.device_put(w, NamedSharding(mesh, specs.parameter(*dims[k]))) for k, w in weights.items()}

    def mixture(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        layer = MoEWeights(norm=Norm(scale=None), **weights)
        return moe_mlp(x, layer, model, specs, capacity_factor=None, matmul=matmul, gathers=True)[0]

    for rows in (None, 8):
        if rows is not None:
            monkeypatch.setattr("rooftop.programs.model.moe.experts.expert_rows", lambda *_, rows=rows: rows)
        with jax.set_mesh(mesh):
            out = jax.jit(lambda x, weights: mixture(x, weights))(jax.device_put(x.reshape(1, -1, D), stream), placed)
        assert_equal(np.asarray(out).reshape(x.shape), expected)


@pytest.mark.parametrize("matmul", ["batched", "grouped"])
def test_crowded_experts_drop_nothing_without_a_factor(matmul: str) -> None:
    """All tokens go to the experts of two of four devices; other experts have no rows at all."""
    model, weights, x, derivative = case("gpt_oss")
    weights = weights | {"router_bias": weights["router_bias"] + 30.0 * (np.arange(8) < 4)}
    problem = model, weights, x, derivative
    assert_equal(sharded(*problem, mesh_of(expert=4, tensor=2), matmul=matmul), plain(*problem))


def test_a_capacity_of_grouped_experts_is_that_of_a_whole_shard() -> None:
    """Of two shards of four experts a device keeps C pairs of each, those of its first tokens, whichever expert's."""
    model, weights, x, derivative = case("mixtral")
    mesh, moe = mesh_of(expert=2), model.moe
    assert moe is not None
    weights = weights | {"router": weights["router"] + np.float32(0.2) * (np.arange(8) < 4)}
    chosen = choose((x @ weights["router"]).reshape(-1, moe.experts), 0.0, moe).reshape(BATCH, SEQ_LEN, -1)
    limit = capacity(BATCH * SEQ_LEN // 2, moe, 1.0, shards=2)
    whole = chosen.copy()
    for place in NamedSharding(mesh, specs_on(mesh).residual).devices_indices_map(x.shape).values():
        own = chosen[place[:2]].reshape(-1, 2, 4)
        scores = (x[place[:2]] @ weights["router"]).reshape(-1, 2, 4)
        for shard in range(2):
            # A token's pairs are in the order of its preference.
            best = np.argsort(-np.where(own[:, shard], scores[:, shard], -np.inf), axis=1)
            pairs = [
                (token, expert) for token in range(len(own)) for expert in best[token] if own[token, shard, expert]
            ]
            for token, expert in pairs[limit:]:
                own[token, shard, expert] = False
        chosen[place[:2]] = own.reshape(chosen[place[:2]].shape)
    assert 0 < (whole & ~chosen).sum() < 0.3 * whole.sum()
    problem = model, weights, x, derivative
    actual = sharded(*problem, mesh, factor=1.0, matmul="grouped")
    assert_equal(actual, plain(*problem, real=chosen.reshape(-1, moe.experts)))


@settings(max_examples=10)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 4), st.sampled_from([1, 3, 4, 64]))
def test_products_of_groups(sizes: list[int], beyond: int, tile: int) -> None:
    """Empty groups, groups that share a tile or fill several, rows of no group."""
    random, total = np.random.default_rng(0), max(sum(sizes) + beyond, 1)
    rows, others = random.standard_normal((total, 3)), random.standard_normal((total, 2))
    ends = np.cumsum(sizes)
    expected = [rows[end - size : end].T @ others[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    with mock.patch.object(grouped_matmul, "TILE", tile):
        actual = grouped_matmul.grouped_products(
            jnp.asarray(rows, jnp.float32), jnp.asarray(others, jnp.float32), jnp.asarray(sizes, jnp.int32)
        )
    np.testing.assert_allclose(actual, expected, atol=1e-5)


@settings(max_examples=10)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 4), st.sampled_from([1, 3, 4, 64]))
def test_quantised_matrices_of_groups(sizes: list[int], beyond: int, tile: int) -> None:
    """Each row times the matrix of its group, as if that were in full; zeros for rows of no group."""
    random, total = np.random.default_rng(0), max(sum(sizes) + beyond, 1)
    rows = random.standard_normal((total, 64))
    matrices = quantise(
        jnp.asarray(random.standard_normal((len(sizes), 64, 3)), jnp.float32), 1, "f4_e2m1-32", "cpu", "float32"
    )
    full = np.asarray(matrices.in_full(jnp.float32))
    expected = np.zeros((total, 3))
    for group, (size, end) in enumerate(zip(sizes, np.cumsum(sizes), strict=True)):
        expected[end - size : end] = rows[end - size : end] @ full[group]
    groups = grouped_matmul.RowGroups(
        order=jnp.arange(total), places=jnp.arange(total), sizes=jnp.asarray(sizes, jnp.int32)
    )
    actual = grouped_matmul.grouped_matmul_of(jnp.asarray(rows, jnp.float32), matrices, groups, tile=tile, visits=1.0)
    np.testing.assert_allclose(actual, expected, atol=1e-4)


@pytest.mark.parametrize("sizes", [{}, {"expert": 4, "tensor": 2}, {"fsdp": 2, "expert": 2}])
def test_pairs_beyond_the_capacity_are_dropped_last_come_first(sizes: Mapping[str, int]) -> None:
    """Each device keeps C pairs for each expert, those of its first tokens; the other weights stay as they are."""
    model, weights, x, derivative = case("mixtral")
    mesh, moe = mesh_of(**sizes), model.moe
    assert moe is not None
    stream = NamedSharding(mesh, specs_on(mesh).residual)
    logits = x @ weights["router"]
    chosen = choose(logits.reshape(-1, moe.experts), 0.0, moe).reshape(BATCH, SEQ_LEN, -1)
    tokens = BATCH * SEQ_LEN // len(mesh.devices.flat)
    limit = capacity(tokens, moe, 0.75, shards=moe.experts)
    assert limit == math.ceil(0.75 * tokens * 2 / 8)
    for place in stream.devices_indices_map(x.shape).values():
        own = chosen[place[:2]].reshape(tokens, -1)
        chosen[place[:2]] = (own & (np.cumsum(own, axis=0) <= limit)).reshape(chosen[place[:2]].shape)
    assert 0.1 < 1 - chosen.sum() / (BATCH * SEQ_LEN * 2) < 0.6
    problem = model, weights, x, derivative
    assert_equal(sharded(*problem, mesh, factor=0.75), plain(*problem, real=chosen.reshape(-1, moe.experts)))


@pytest.mark.parametrize("sizes", [{"expert": 4}, pytest.param({"expert": 2, "tensor": 2}, marks=pytest.mark.slow)])
def test_tokens_that_are_kept_are_not_exchanged_again(sizes: Mapping[str, int]) -> None:
    """Rows and their weights go out, rows come back, and gradients both ways: three and three exchanges, once."""
    model, weights, x, _ = case("mixtral")
    mesh = mesh_of(**sizes)
    specs = specs_on(mesh, whole_experts=True)
    exchanges = {}
    for remat in ("block", "block,mlp_normed=save"):
        saved = [name for name, action in parse_policy(remat).items() if action == "save"]

        @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*saved))
        def mixture(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
            layer = MoEWeights(norm=Norm(scale=None), **weights)
            return moe_mlp(jnp.sin(x), layer, model, specs, capacity_factor=None)[0]

        def total(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
            return jnp.sum(jnp.square(mixture(x, weights)))

        with jax.set_mesh(mesh):
            placed = {k: jax.device_put(w, NamedSharding(mesh, specs.parameter(*DIMS[k]))) for k, w in weights.items()}
            step = jax.jit(jax.grad(total, argnums=(0, 1)))
            text = step.lower(jax.device_put(x, NamedSharding(mesh, specs.residual)), placed).compile().as_text()
        exchanges[remat] = sum(" all-to-all(" in line for line in text.splitlines())
    assert exchanges == {"block": 8, "block,mlp_normed=save": 6}


# ---- its parts ------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(20))
@given(st.sampled_from([(1, 1), (3, 2), (12, 3)]), st.sampled_from([1, 3, 12]), st.randoms(use_true_random=False))
def test_slots_are_filled_in_order_and_known_both_ways(shape: tuple[int, int], size: int, random: Any) -> None:
    experts, (tokens, active) = 5, shape
    # Some experts more often than others.
    chosen = np.array([sorted(range(experts), key=lambda e: random.random() * (e + 1)) for _ in range(tokens)])
    chosen = chosen[:, :active].astype(np.int32)
    slots = ExpertSlots.of(jnp.asarray(chosen), experts, size)
    pairs, taken = np.asarray(slots.pairs), np.asarray(slots.taken).reshape(-1)
    for expert in range(experts):
        of_expert = [pair for pair, chose in enumerate(chosen.reshape(-1)) if chose == expert]
        assert pairs[expert].tolist() == [*of_expert[:size], *[chosen.size] * (size - len(of_expert))]
        assert [taken[pair] for pair in of_expert[:size]] == [expert * size + i for i in range(len(of_expert[:size]))]
        assert {int(taken[pair]) for pair in of_expert[size:]} <= {experts * size}


def test_to_and_from_slots_are_each_others_transpose() -> None:
    random = np.random.default_rng(1)
    slots = ExpertSlots.of(jnp.asarray(random.permuted(np.tile(np.arange(5), (7, 1)), axis=1)[:, :2], jnp.int32), 5, 2)
    x, rows = (jnp.asarray(random.standard_normal(shape), jnp.float32) for shape in ((7, 3), (5, 2, 3)))
    source = slots.pairs // 2
    there, back = to_slots(x, source, slots.taken), from_slots(rows, source, slots.taken)
    assert (there == 0).all(-1).sum() == (slots.pairs == 14).sum() > 0
    assert float((there * rows).sum()) == pytest.approx(float((x * back).sum()), rel=1e-5)
    by_x, by_rows = (
        jax.grad(lambda y, f=f, w=w: (f(y, source, slots.taken) * w).sum())(y)
        for f, y, w in ((to_slots, x, rows), (from_slots, rows, x))
    )
    np.testing.assert_allclose(by_x, back, rtol=1e-6)
    np.testing.assert_array_equal(by_rows, there)


def test_correction_decides_and_does_not_weigh() -> None:
    moe = dataclasses.replace(V3, groups=1, active_groups=1, routed_scaling=1.0, normalise=False)
    logits = jnp.asarray(np.random.default_rng(2).standard_normal((5, 8)), jnp.float32)
    weights, chosen = route(logits, jnp.zeros(8).at[6].set(100.0), moe)
    assert (chosen[:, 0] == 6).all()
    np.testing.assert_allclose(weights[:, 0], 1 / (1 + np.exp(-logits[:, 6])), rtol=1e-6)
    gradient = jax.grad(lambda bias: route(logits, bias, moe)[0].sum())(jnp.ones(8))
    assert (gradient == 0).all()


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu"])
def test_activations(name: str) -> None:
    x = np.linspace(-3, 3, 13, dtype=np.float32)
    expected = {
        "silu": x / (1 + np.exp(-x)),
        "gelu": [v * (1 + math.erf(v / 2**0.5)) / 2 for v in x],
        "gelu_tanh": x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2,
        "relu": np.maximum(x, 0),
    }[name]
    model = model_of(V2, activation=name)
    np.testing.assert_allclose(activate(None, jnp.asarray(x), model), expected, atol=2e-6)
    np.testing.assert_allclose(activate(jnp.asarray(x), jnp.asarray(x), model), expected * x, atol=5e-6)


def test_capacity() -> None:
    moe = Mixture(experts=8, active=2, d_ff=4)
    sizes = [capacity(64, moe, factor, shards=8) for factor in (None, 1.0, 1.01, 0.01, 100.0)]
    assert sizes == [64, 16, 17, 1, 64]
    # A shard of four experts may be chosen twice by a token.
    assert [capacity(64, moe, factor, shards=2) for factor in (None, 1.0, 100.0)] == [128, 64, 128]


ON_STAGES = dataclasses.replace(Rules(), parameters={**Rules().parameters, "expert": ("stage",)})


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"factor": 0.0}, "capacity_factor"),
        ({"factor": math.nan}, "capacity_factor"),
        ({"matmul": "ragged"}, "expert_matmul"),
        ({"rules": ON_STAGES}, "rules.parameters.expert"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(arguments: dict[str, Any], field: str) -> None:
    model = model_of(Mixture(experts=8, active=2, d_ff=F))
    mesh = mesh_of(expert=4, tensor=2)
    rules = arguments.get("rules") or specs_on(mesh).rules
    # Abstract arrays, at rest in one piece, so that nothing but the mixture can refuse them.
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes_of(model).items()}
    x = jax.ShapeDtypeStruct((BATCH, SEQ_LEN, D), jnp.float32, sharding=NamedSharding(mesh, Specs(rules).residual))

    def mixture(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        layer = MoEWeights(norm=Norm(scale=None), **weights)
        matmul = arguments.get("matmul", "batched")
        return moe_mlp(x, layer, model, Specs(rules), capacity_factor=arguments.get("factor"), matmul=matmul)[0]

    with jax.set_mesh(mesh), pytest.raises(RooftopError) as refused:
        jax.eval_shape(mixture, x, weights)
    assert refused.value.field == field
    assert "\n" not in str(refused.value)


def test_a_dense_model_has_no_mixture() -> None:
    model, weights, x, derivative = case("mixtral")
    with pytest.raises(RooftopError, match=r"model\.moe"):
        sharded(dataclasses.replace(model, moe=None), weights, x, derivative, mesh_of())


# ---- the TPU compiler -----------------------------------------------------------------------------------------------


def compiled_rows(model: ModelConfig, slice_name: str, layout: str, batch: int, remat: str) -> dict[Any, JoinedRow]:
    """Planned and compiled rows of two layers of experts, forward and backward, by scope and phase."""
    slice_ = Slice.parse(slice_name)
    axes = Mesh.from_layout(slice_, layout).axes
    laid = Mesh(slice_, {name: axes.get(name, ()) for name in AXES})
    mesh = topology_mesh(laid)
    specs = specs_on(mesh)
    saved = [name for name, action in parse_policy(remat).items() if action == "save"]

    def at_rest(name: str, weight: jax.Array) -> jax.Array:
        spec = specs.parameter(None, *DIMS[name])
        used = {axis for entry in spec for axis in axes_of(entry)}
        with named_scope("gradients"):
            copies = frozenset(axis for axis in mesh.shape if mesh.shape[axis] > 1) - used
            return named_reshard(weight.astype(jnp.bfloat16), P(*spec, reduced=copies))

    @partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*saved))
    def block(x: jax.Array, layer: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        x = checkpoint_name(x, "layer_input")
        with named_scope("mlp"), named_scope("norm"):
            normed = jax.nn.standardize(x)
        return x + moe_mlp(normed, MoEWeights(norm=Norm(scale=None), **layer), model, specs, capacity_factor=1.0)[
            0
        ], None

    def total(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        weights = {name: at_rest(name, weight) for name, weight in weights.items()}
        with named_scope("layers"):
            x, _ = jax.lax.scan(block, x, weights)
        return jnp.sum(jnp.square(x.astype(jnp.float32)))

    def array(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    weights = {
        name: array((model.layers, *shape), jnp.float32, specs.parameter(None, *DIMS[name]))
        for name, shape in shapes_of(model).items()
    }
    x = array((batch, model.max_seq_len, model.d_model), jnp.bfloat16, specs.residual)
    with jax.set_mesh(mesh):
        text = jax.jit(jax.grad(total, argnums=(0, 1))).lower(weights, x).compile().as_text()
    workload = Workload(batch_tokens=batch * model.max_seq_len, seq_len=model.max_seq_len)
    problem = Problem(model=model, slice=slice_, workload=workload, assumptions=Assumptions())
    plan = TrainingPlan(problem=problem, mesh=laid, choice=Choice(remat=remat))
    rows = join(plan.ledger, read_ledger(hlo.parse(text), laid.shape))
    return {(row.scope, row.phase): row for row in rows if row.scope.startswith(("layers/moe", "unscoped"))}


def moved(row: JoinedRow, kind: str, axis: str) -> tuple[float, float]:
    """Bytes of one kind of collective, planned and compiled."""
    entries = [entry for entry in row.collectives if entry.kind == kind and entry.axes == (axis,)]
    return tuple(sum(getattr(entry, side) or 0.0 for entry in entries) for side in ("planned_bytes", "compiled_bytes"))


@pytest.mark.parametrize(
    ("slice_name", "layout", "experts", "remat", "width"),
    [
        pytest.param("v5e:4x4", "expert=x,fsdp=y", 16, "block", 512, marks=pytest.mark.slow),
        pytest.param("v5e:4x4", "expert=x,fsdp=y", 16, "block", 1024, marks=pytest.mark.slow),
        # One expert on a device.
        pytest.param("v5e:4x4", "expert=x,tensor=y", 4, "matmuls", 1024, marks=pytest.mark.slow),
        pytest.param("v5e:4x4", "fsdp=x,tensor=y", 16, "none", 1024, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", "expert=x+y,fsdp=z", 16, "block", 1024, marks=pytest.mark.slow),
        pytest.param("v5p:4x4x4", "expert=x,fsdp=y,tensor=z", 16, "minimal", 1024, marks=pytest.mark.slow),
    ],
)
def test_compiled_mixture_is_as_planned(slice_name: str, layout: str, experts: int, remat: str, width: int) -> None:
    """FLOPs to the last one; exchanges over expert, gathers and scatters over fsdp and tensor to within 1 %."""
    moe = Mixture(experts=experts, active=2, d_ff=width, shared_d_ff=width)
    model = model_of(moe, d_model=width, max_seq_len=512)
    rows = compiled_rows(model, slice_name, layout, batch=Slice.parse(slice_name).devices, remat=remat)
    assert all(row.compiled_flops == row.planned_flops for row in rows.values())
    assert rows["layers/moe/experts", "forward"].planned_flops > 0
    for axis in (axis for axis in ("expert", "fsdp", "tensor") if axis in layout):
        for kind in ("all_to_all",) if axis == "expert" else ("all_gather", "reduce_scatter"):
            # Not planned: the router's weight is gathered over fsdp, and routing weights travel beside the rows.
            amounts = [moved(row, kind, axis) for key, row in rows.items() if key[0] != "layers/moe/router"]
            planned, compiled = np.sum(amounts, axis=0)
            assert compiled == pytest.approx(planned, rel=0.01), (kind, axis)
            assert planned > 0
    stray = [entry for key, row in rows.items() if key[0] == "unscoped" for entry in row.collectives]
    assert sum(entry.compiled_bytes or 0.0 for entry in stray) < 2**18, stray


@pytest.mark.slow
def test_gradients_of_biases_need_no_copy_of_the_rows() -> None:
    """With one expert on a device, its outputs' gradient (512 rows of 8 devices) is never written in float32."""
    model = model_of(Mixture(experts=8, active=4, d_ff=512, bias=True), d_model=512, max_seq_len=512, **GPT_OSS)
    mesh = topology_mesh(Mesh.lay(Slice.parse("v6e:2x4"), {"expert": 4, "tensor": 2}))
    specs = specs_on(mesh, whole_experts=True)

    @jax.checkpoint
    def mixture(x: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        return moe_mlp(x * 2, MoEWeights(norm=Norm(scale=None), **weights), model, specs, capacity_factor=1.0)[0]

    def gradients(x: jax.Array, weights: dict[str, jax.Array], derivative: jax.Array) -> Any:
        return jax.vjp(mixture, x, weights)[1](derivative)

    def array(shape: tuple[int, ...], spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    x = array((16, model.max_seq_len, model.d_model), specs.residual)
    weights = {name: array(shape, specs.parameter(*DIMS[name])) for name, shape in shapes_of(model).items()}
    with jax.set_mesh(mesh):
        text = jax.jit(gradients).lower(x, weights, x).compile().as_text()
    # Arrays of the entry are in memory; those inside fusions are not.
    entry = text[text.index("\nENTRY ") :]
    assert re.search(r" = bf16\[8,512,512\]\S* all-to-all\(", entry)
    assert not re.search(r" = f32\[(8,512|1,4096),512\]", entry)
