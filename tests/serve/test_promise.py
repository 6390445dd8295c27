"""The promise of serving plans: an engine of each random plan that says ``executable`` is built, and others are not."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from rooftop.capabilities import ENGINE_WEIGHTS
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models import ModelConfig
from rooftop.models.config import MLA, MoE
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ServingNumerics, ServingWorkload
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.configuration import Configuration, configuration_of
from rooftop.serve.engine.loading import drawn, load, parts
from rooftop.serve.engine.replica import Replica
from rooftop.serve.engine.requests import Sampling
from tests.support.engines import answers
from tests.support.examples import examples
from tests.support.quickly import QUICKLY

#: Tokens of the longest sequence of the tiny models.
LONGEST = 64


@st.composite
def models(draw: st.DrawFn) -> ModelConfig:
    """Tiny models of every part that engines have, with sizes that divide over some meshes and not over others."""
    latent, mixture = draw(st.booleans()), draw(st.booleans())
    layers, kv = draw(st.integers(1, 2)), draw(st.sampled_from((1, 2, 3, 4)))
    heads = kv * draw(st.sampled_from((1, 2, 3, 4)))
    mla = None
    if latent:
        mla = MLA(q_rank=draw(st.sampled_from((None, 24))), kv_rank=16, d_nope=8, d_rope=4, d_v=8)
    moe = None
    if mixture:
        moe = MoE(
            experts=draw(st.sampled_from((4, 6, 8))), active=2, d_ff=draw(st.sampled_from((16, 24, 20))),
            shared_d_ff=draw(st.sampled_from((0, 24, 16))), dense_layers=draw(st.integers(0, layers - 1)),
        )  # fmt: skip
    plain = mla is None
    return ModelConfig(
        name="tiny",
        family="tiny",
        layers=layers,
        d_model=draw(st.sampled_from((32, 48, 36))),
        d_ff=draw(st.sampled_from((64, 48, 40))),
        heads=heads,
        kv_heads=kv if plain else heads,
        d_head=8 if plain else 12,
        vocab=draw(st.sampled_from((64, 72, 50))),
        max_seq_len=LONGEST,
        tied_embeddings=draw(st.booleans()),
        qk_norm=plain and draw(st.booleans()),
        qkv_bias=plain and draw(st.booleans()),
        attention_sinks=plain and draw(st.booleans()),
        attn_softcap=draw(st.sampled_from((None, 20.0))),
        layer_windows=draw(st.sampled_from(((), (8, *(None,) * (layers - 1))))),
        norms_per_layer=draw(st.sampled_from((2, 4))),
        positions=draw(st.sampled_from(("rope", "rope", "learned"))) if plain else "rope",
        mla=mla,
        moe=moe,
    )


@st.composite
def plans(draw: st.DrawFn) -> ServingPlan:
    """Plans of any mesh of a slice with up to eight devices, and any batch; many of them are not executable."""
    weights, group = draw(st.sampled_from([*ENGINE_WEIGHTS, ("bf16", None), ("bf16", None)]))
    problem = ServingProblem(
        model=draw(models()),
        slice=Slice.parse(draw(st.sampled_from(("v5e:1x1", "v5e:2x2", "v5e:2x4")))),
        workload=ServingWorkload(
            prompt=draw(st.sampled_from((16, 16, 16, LONGEST))), generate=16, batch_seqs=draw(st.integers(1, 9))
        ),
        numerics=ServingNumerics(weights=weights, weight_group=group, kv=draw(st.sampled_from(("bf16", "int8")))),
        mode="interleaved" if draw(st.booleans()) else "disaggregated",
    )
    placements = problem.generate_placements()
    assume(placements)
    placement = draw(st.sampled_from(placements))
    prefills = [
        place for place in problem.engine_prefills() if problem.cache_heads(place) == problem.cache_heads(placement)
    ]
    assume(prefills)
    prefill = placement.joined() if problem.mode == "interleaved" else draw(st.sampled_from(prefills))
    return ServingPlan(
        problem=problem, generate_on=placement, prefill_on=prefill, batch=problem.workload.batch_seqs or 1
    )


def configured(plan: ServingPlan) -> Configuration:
    """The configuration of the plan's engine, with few programs and a small cache."""
    configuration = configuration_of(plan.to_json())
    batch = configuration.policy.max_batch
    return replace(
        configuration,
        policy=Policy(max_batch=batch, chunk_tokens=batch + 16),
        pages=16 * batch,
        compute_dtype="float32",
        prefix_cache=False,
    )


class Traced(Replica):
    """A replica whose largest step and prefill are traced and lowered for the mesh, and not compiled."""

    def trace(self) -> None:
        shapes, programs = self.shapes, self._programs
        pages = shapes.contexts[-1] // self.decoder.page_tokens
        for shape in ((shapes.batches[-1], 1, pages), (*shapes.prefills[-1], pages)):
            with jax.set_mesh(programs._mesh):
                traced, donated, arguments = programs._step_program(shape)
                jax.jit(traced, donate_argnums=donated).lower(*arguments)


@settings(max_examples=examples(400, quick=6), deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans())
def test_an_executable_plan_is_traced_and_no_other_is(plan: ServingPlan) -> None:
    source = drawn(plan.problem.model)
    named = [text for text in plan.obstacles if "was made for" not in text]
    if named:
        # Devices are those of the plan, so that nothing but the obstacle can be in the way.
        with pytest.raises(RooftopError):
            parts(source, configured(plan), None, jax.devices(), None, Traced)
        return
    assert plan.problem.workload.held_tokens <= LONGEST or plan.obstacles
    for replica in parts(source, configured(plan), None, jax.devices(), None, Traced).replicas:
        assert isinstance(replica, Traced)
        replica.trace()


@pytest.mark.slow
@settings(max_examples=examples(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(plan=plans())
def test_an_executable_plan_answers_as_one_device_does(plan: ServingPlan) -> None:
    """Greedy tokens of an engine on the plan's mesh, and log-probabilities, are those of one device."""
    assume(not plan.obstacles and math.prod(plan.generate_on.mesh.shape.values()) > 1)
    configuration = configured(plan)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, plan.problem.model.vocab, 5 + at).tolist() for at in range(5)]
    likeliest = []
    for mesh in (configuration.mesh, ()):
        engine = load(drawn(plan.problem.model), replace(configuration, mesh=mesh), options=QUICKLY)
        engine.start()
        samplings = [Sampling(max_tokens=4, temperature=0.0, logprobs=1)] * len(prompts)
        tokens = answers(engine, prompts, samplings)
        likeliest.append([[token.logprob for token in answer] for answer in tokens])
    np.testing.assert_allclose(likeliest[0], likeliest[1], rtol=2e-2, atol=2e-2)
