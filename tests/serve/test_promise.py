"""The promise of serving plans: an engine of each random plan that says ``executable`` is built, and others are not."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import jax
import numpy as np
import pytest

from rooftop.capabilities import ENGINE_WEIGHTS
from rooftop.core.errors import RooftopError
from rooftop.hardware import Slice
from rooftop.models import ModelConfig
from rooftop.models.config import MLA, MoE
from rooftop.plan.serving.plan import ServingPlan
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.workload import ServingNumerics, ServingWorkload
from rooftop.programs.serving.decode import Decoder
from rooftop.scheduling.serving.scheduler import Policy
from rooftop.serve.engine.configuration import Configuration, configuration_of
from rooftop.serve.engine.loading import Placed, Scaled, WeightSource, drawn, load, parts
from rooftop.serve.engine.replica import Replica
from rooftop.serve.engine.requests import Sampling
from tests.support.engines import answers
from tests.support.quickly import QUICKLY

#: Tokens of the longest sequence of the tiny models.
LONGEST = 64
#: Plans that are traced, and those of which engines answer if they are executable and of several devices.
RANDOM_PLANS, RANDOM_ENGINES = 500, 60
#: Of them, one that is refused, and five with every axis, batching, split of the cache and kind of layer among them.
QUICK_PLANS = (22, 8, 18, 26, 27, 32)


def random_plan(seed: int, number: int) -> ServingPlan:
    """Plan number ``number`` of a seed: any mesh of up to eight devices, and any batch; many are not executable."""
    rng = Random(f"{seed}/{number}")
    while (plan := _plan(rng, _model(rng))) is None:
        pass
    return plan


def executable_plan(seed: int, number: int) -> ServingPlan:
    """The first plan of several devices that an engine runs, of those from ``RANDOM_ENGINES`` times ``number`` on."""
    plans = (random_plan(seed, RANDOM_ENGINES * number + at) for at in range(RANDOM_ENGINES))
    return next(plan for plan in plans if not plan.obstacles and plan.generate_on.mesh.slice.devices > 1)


def _model(rng: Random) -> ModelConfig:
    """A tiny model of parts that engines have, with sizes that divide over some meshes and not over others."""
    latent, mixture = rng.random() < 0.3, rng.random() < 0.4
    layers, kv = rng.randint(1, 2), rng.choice((1, 2, 3, 4, 5, 7))
    heads = kv * rng.choice((1, 2, 3, 4, 5))
    mla = MLA(q_rank=rng.choice((None, 24)), kv_rank=16, d_nope=8, d_rope=4, d_v=8) if latent else None
    moe = None
    if mixture:
        moe = MoE(
            experts=rng.choice((4, 5, 7, 8)), active=2, d_ff=rng.choice((16, 24, 20, 19)),
            shared_d_ff=rng.choice((0, 24, 16, 17)), dense_layers=rng.randint(0, layers - 1),
        )  # fmt: skip
    plain = mla is None
    return ModelConfig(
        name="tiny",
        family="tiny",
        layers=layers,
        d_model=rng.choice((32, 64, 48, 36, 33)),
        d_ff=rng.choice((64, 128, 48, 40, 37)),
        heads=heads,
        kv_heads=kv if plain else heads,
        d_head=8 if plain else 12,
        vocab=rng.choice((64, 72, 50, 53)),
        max_seq_len=LONGEST,
        tied_embeddings=rng.random() < 0.5,
        qk_norm=rng.choice(("head", "width", None, None)) if plain else None,
        qkv_bias=plain and rng.random() < 0.5,
        attention_sinks=plain and rng.random() < 0.5,
        attn_softcap=rng.choice((None, 20.0)),
        layer_windows=rng.choice(((), (8, *(None,) * (layers - 1)))),
        norm_placement=rng.choice(("pre", "sandwich")),
        positions=rng.choice(("rope", "rope", "learned")) if plain else "rope",
        mla=mla,
        moe=moe,
    )


def _plan(rng: Random, model: ModelConfig) -> ServingPlan | None:
    """A plan of the model; None where no placement of the draw is possible."""
    widest = max(model.d_model, model.d_ff, model.heads * model.d_value)
    formats = [(weights, group) for weights, group in ENGINE_WEIGHTS if group is None or group <= widest]
    weights, group = rng.choice([*formats, ("bf16", None), ("bf16", None)])
    problem = ServingProblem(
        model=model,
        slice=Slice.parse(rng.choice(("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:2x4"))),
        workload=ServingWorkload(prompt=rng.choice((16, 16, 16, LONGEST)), generate=16, batch_seqs=rng.randint(1, 9)),
        numerics=ServingNumerics(weights=weights, weight_group=group, kv=rng.choice(("bf16", "int8"))),
        mode=rng.choice(("interleaved", "disaggregated")),
    )
    if rng.random() < 0.5:
        # A mesh that is asked for, whatever the padding that it needs.
        other = [*(["expert"] if model.moe else []), *(["fsdp"] if model.d_model % 8 == 0 else [])]
        stages = ["stage"] if model.layers > 1 else []
        left, axes = problem.slice.devices, dict.fromkeys(["tensor", "context", *other, *stages], 1)
        while left > 1:
            axes[rng.choice([axis for axis in axes if axis != "stage" or axes[axis] < model.layers])] *= 2
            left //= 2
        problem = replace(problem, axes=axes)
    if not (placements := problem.generate_placements()):
        return None
    placement = rng.choice(placements)
    prefills = [
        place for place in problem.engine_prefills() if problem.cache_kind(place) == problem.cache_kind(placement)
    ]
    if not prefills:
        return None
    prefill = placement.joined() if problem.mode == "interleaved" else rng.choice(prefills)
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
        """Trace the programs of every pipeline stage."""
        shapes, pages = self.shapes, self.shapes.contexts[-1] // self.decoder.page_tokens
        stage: Replica | None = self
        while stage is not None:
            for shape in ((shapes.batches[-1], 1, pages), (*shapes.prefills[-1], pages)):
                with jax.set_mesh(stage.mesh):
                    traced, donated, arguments = stage._programs._step_program(shape)
                    jax.jit(traced, donate_argnums=donated).lower(*arguments)
            stage = stage.after


def zeros(model: ModelConfig) -> WeightSource:
    """A model whose weights are zeros, which no program has to be compiled for."""

    def weights(decoder: Decoder, mesh: jax.sharding.Mesh, placed: Placed, scaled: Scaled) -> Any:
        arrays = jax.tree.map(
            lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), decoder.abstract_weights(mesh)
        )
        return jax.tree.map(lambda parameter, array: placed(parameter, array, None), decoder.described, arrays)

    return WeightSource(model=model, stops=frozenset(), weights=weights)


@pytest.mark.parametrize(
    "number",
    [
        *QUICK_PLANS,
        *(pytest.param(number, marks=pytest.mark.slow) for number in range(RANDOM_PLANS) if number not in QUICK_PLANS),
    ],
)
def test_an_executable_plan_is_traced_and_no_other_is(number: int) -> None:
    plan = random_plan(0, number)
    source = zeros(plan.problem.model)
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
@pytest.mark.parametrize("number", range(RANDOM_ENGINES))
def test_an_executable_plan_answers_as_one_device_does(number: int) -> None:
    """Greedy tokens of an engine on the plan's mesh, and log-probabilities, are those of one device."""
    plan = executable_plan(1, number)
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
