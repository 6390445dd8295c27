"""Scope names, and what comes back from the names that XLA gives to ops."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooftop.core.scopes import (
    PHASES,
    SCOPES,
    UNSCOPED,
    folded,
    is_own,
    is_path,
    is_phase,
    is_scope,
    open_place,
    scope_and_phase,
)

LEAVES = tuple(scope.replace("*", "user_id") for scope in SCOPES)

#: Wrappings that JAX 0.10.2 was seen to put around a scope, {} its place, and the phase that each one means.
WRAPPINGS = {
    "jit(train_step)/{}/dot_general": "forward",
    "jit(train_step)/jvp({})/dot_general": "forward",
    "jit(train_step)/jvp()/{}/add": "forward",
    "jit(train_step)/vmap({})/bsd,df->bsf/dot_general": "forward",
    "jit(train_step)/jvp()/while/body/closed_call/{}/jit(silu)/mul": "forward",
    "jit(train_step)/jvp()/while/body/closed_call/checkpoint/{}/dot_general": "forward",
    "jit(train_step)/shard_map/{}/all_gather": "forward",
    "jit(train_step)/transpose(jvp({}))/dot_general": "backward",
    "jit(train_step)/transpose(jvp())/while/body/closed_call/{}/transpose": "backward",
    "jit(train_step)/transpose(jvp())/while/body/closed_call/checkpoint/{}/dot_general": "backward",
    "jit(train_step)/transpose(jvp(vmap({})))/mul": "backward",
    "jit(train_step)/transpose(jvp())/while/body/checkpoint/rematted_computation/{}/exp": "recompute",
    "jit(prefill)/{}/dot_general": "prefill",
    "jit(step)/prefill/while/body/{}/dot_general": "prefill",
    "jit(step)/vmap(generate)/while/body/{}/pallas_call": "generate",
    # A jitted function is not a scope, whatever its name.
    "jit(loss)/jvp(jit(sample))/{}/dot_general": "forward",
    "jit(embed)/transpose(jvp(jit(loss)))/{}/jit(_take)/scatter-add": "backward",
}


@given(st.sampled_from(LEAVES), st.sampled_from(sorted(WRAPPINGS)))
def test_every_scope_comes_back_from_every_wrapping(scope, wrapping):
    updates = scope in ("gradients", "optimizer") or scope.endswith("/update")
    phase = "update" if updates else WRAPPINGS[wrapping]
    assert scope_and_phase(wrapping.format(scope)) == (scope, phase)


@given(
    st.sampled_from([scope for scope in LEAVES if scope.startswith("layers/")]),
    st.sampled_from(["jvp({})", "transpose(jvp({}))", "{}"]),
    st.sampled_from(["while/body", "while/body/closed_call", "while/body/closed_call/checkpoint", "remat2"]),
    st.booleans(),
)
def test_a_scope_that_is_opened_in_two_places_is_one(scope, wrapper, between, repeated):
    """``layers`` stands around the scan, the rest (or the whole name once more) within its body."""
    within = scope if repeated else scope.removeprefix("layers/")
    op_name = f"jit(train_step)/{wrapper.format('layers')}/{between}/{within}/dot_general"
    assert scope_and_phase(op_name) == (scope, "backward" if "transpose" in wrapper else "forward")


@pytest.mark.parametrize(
    ("op_name", "scope", "phase"),
    [
        (
            "jit(train_step)/transpose(jvp(layers))/while/body/closed_call/checkpoint/rematted_computation/mlp/up/dot",
            "layers/mlp/up",
            "recompute",
        ),
        ("jit(f)/jvp(layers)/while/body/attn/qkv/btd,dnh->btnh/dot_general", "layers/attn/qkv", "forward"),
        ("jit(f)/jvp(layers/mlp/up)/dot_general", "layers/mlp/up", "forward"),
        ("jit(f)/transpose(jvp(layers/mlp/up))/transpose", "layers/mlp/up", "backward"),
        ("jit(f)/transpose(jvp(tables/user/lookup))/jit(_take)/scatter-add", "tables/user/lookup", "backward"),
        ("jit(f)/layers/while/body/attn/core/pallas_call", "layers/attn/core", "forward"),
        ("jit(f)/transpose(jvp(layers))/while/body/attn/core/pallas_call", "layers/attn/core", "backward"),
        ("jit(f)/transpose(jvp(embed))/scatter-add", "embed", "backward"),
        ("jit(loss)/jvp(jit(loss))/loss/tanh", "loss", "forward"),
        ("jit(f)/optimizer/mul", "optimizer", "update"),
        ("jit(f)/transpose(jvp())/gradients/psum", "gradients", "update"),
        ("jit(generate)/sample/jit(_gumbel)/log", "sample", "generate"),
        # Outside every scope, or in a group of scopes and not in a leaf of it.
        ("jit(train_step)/jvp(layers)/while", UNSCOPED, "forward"),
        ("jit(f)/transpose(jvp(layers))/while/body/jit(dynamic_index_in_dim)/dynamic_slice", UNSCOPED, "backward"),
        ("jit(f)/layers/mlp/add", UNSCOPED, "forward"),
        ("jit(f)/tables/user/gather", UNSCOPED, "forward"),
        ("jit(loss)/add", UNSCOPED, "forward"),
        ("jit(sample)", UNSCOPED, "forward"),
        ("mlp/up/dot_general", UNSCOPED, "forward"),
        ("jit(f)/layers/mlpx/up/dot_general", UNSCOPED, "forward"),
        ("jit(f)/jit(transpose)/dot_general", UNSCOPED, "forward"),
        ("reduce_sum", UNSCOPED, "forward"),
        ("w[\\'l\\'][\\'u\\']", UNSCOPED, "forward"),
        ("", UNSCOPED, "forward"),
    ],
)
def test_op_names_of_real_programs(op_name, scope, phase):
    assert scope_and_phase(op_name) == (scope, phase)


@given(st.text())
def test_any_text_has_a_scope_and_a_phase(text):
    scope, phase = scope_and_phase(text)
    assert scope == UNSCOPED or is_scope(scope)
    assert is_phase(phase)


@pytest.mark.parametrize("scope", LEAVES)
def test_the_leaves_are_scopes(scope):
    assert is_scope(scope)


@pytest.mark.parametrize(
    "name",
    [
        *("", "layers", "layers/mlp", "layers/mlp/up/more", "mlp/up", "embed/", "/embed", "Embed", UNSCOPED),
        *("tables", "tables/user", "tables/user/more", "tables/lookup", "tables//lookup", "tables/*/lookup"),
    ],
)
def test_what_is_no_scope(name):
    assert not is_scope(name)


def test_phases():
    assert all(is_phase(phase) for phase in PHASES)
    assert not is_phase("training")
    assert not is_phase("")


# ---- scopes of other programs ---------------------------------------------------------------------------------------

COMBINED = (
    "jit(step)/(transpose(jvp(M))/layers_0/Dense_0/reduce_sum:transpose(jvp(M))/layers_0/Dense_1/dot_general:"
    "transpose(jvp(M))/layers_0/jit(_take)/scatter-add)"
)


@pytest.mark.parametrize(
    ("op_name", "scope", "phase"),
    [
        ("jit(step)/jvp(M)/layers_3/Attention_0/Attention_0/value/dot", "M/layers_3/Attention_0/value", "forward"),
        ("jit(step)/transpose(jvp(M))/Embed_0/jit(_take)/scatter-add", "M/Embed_0", "backward"),
        ("jit(f)/while/body/checkpoint/rematted_computation/ffn/gate/btd,df->btf/dot_general", "ffn/gate", "recompute"),
        ("jit(f)/shard_map/vmap(attention)/splash_mha_fwd/pallas_call", "attention/splash_mha_fwd", "forward"),
        ("jit(f)/cond/branch_1_fun/experts/mul", "experts", "forward"),
        # What all parts share, with the phase of the first; without anything, the first part's.
        (COMBINED, "M/layers_0", "backward"),
        ("jit(f)/(a/add:b/c/mul)", "a", "forward"),
        ("jit(f)/a/b/mul;jit(f)/a/c/div", "a", "forward"),
        ("jit(f)/shard_map/mul;jit(f)/shard_map/div", UNSCOPED, "forward"),
        ("jit(step)/add", UNSCOPED, "forward"),
        ("params['layers']['w']", UNSCOPED, "forward"),
        ("broadcast.99", UNSCOPED, "forward"),
        ("", UNSCOPED, "forward"),
    ],
)  # fmt: skip
def test_open_places(op_name, scope, phase):
    assert open_place(op_name) == (scope, phase)


@given(st.text(alphabet="ab/():;[]'_0", max_size=30))
def test_any_text_has_an_open_place(text):
    scope, phase = open_place(text)
    assert is_path(scope)
    assert is_phase(phase)


@pytest.mark.parametrize(
    ("names", "own"),
    [
        (["jit(f)/jvp(layers)/while/body/mlp/up/dot", "jit(f)/mine/add"], True),
        (["jit(f)/loss/mul", "jit(f)/add"], True),
        # A program of somebody else may have a loss too.
        (["jit(f)/loss/mul", "jit(f)/jvp(GPT)/block/dot"], False),
        (["jit(f)/GPT/mul"], False),
        ([], False),
    ],
)
def test_whose_program_it_is(names, own):
    assert is_own(names) == own


def test_equal_layers_are_one():
    modules = ("attn/q", "attn/out", "Dense_0", "Dense_1")
    paths = [f"M/layers_{at}/{name}" for at in range(32) for name in modules] + ["M/embed", "M/Dense_0"]
    result = folded(paths)
    assert result.layers == {"M/layers_*": 32}
    assert {result.names[path] for path in paths} == {
        *(f"M/layers_*/{name}" for name in modules), "M/embed", "M/Dense_0",
    }  # fmt: skip


def test_numbers_in_parts_are_layers_too():
    result = folded([f"blocks/{at}/mlp" for at in range(3)])
    assert (set(result.names.values()), result.layers) == ({"blocks/*/mlp", UNSCOPED}, {"blocks/*": 3})


@pytest.mark.parametrize(
    "paths",
    [
        # Matmuls of one block, towers that share nothing.
        ["M/fc1", "M/fc2"],
        ["M/tower_0/image", "M/tower_1/text"],
        ["layer_0/up"],
    ],
)
def test_what_is_no_row_of_layers(paths):
    assert folded(paths).layers == {}


def test_layers_without_scopes_in_them():
    assert folded([f"h_{at}" for at in range(12)]).layers == {"h_*": 12}
