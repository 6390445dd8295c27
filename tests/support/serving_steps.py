"""Generate steps of an engine, to be compiled for a slice: see ``rooftop.compiler.compiling.CompileRequest``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import P
from jax.sharding import Mesh, NamedSharding

from rooftop.models import ModelConfig, load_model
from rooftop.models.program_sizes import LANES
from rooftop.programs.parameters import Parameter
from rooftop.programs.serving.decode import Decoder, by_layer
from rooftop.programs.serving.paged import best_reader
from rooftop.programs.serving.quantised import quantise, summed_dim
from rooftop.serve.engine.configuration import Shapes
from rooftop.serve.engine.programs import Programs


def small(name: str, layers: int) -> ModelConfig:
    """A preset with few layers."""
    model = load_model(name)
    return replace(model, layers=layers, layer_windows=model.layer_windows[:layers])


def lower(mesh: Mesh, arguments: Mapping[str, Any]) -> jax.stages.Lowered:
    """The step of ``_step``."""
    return _step(mesh, **arguments)


def _step(
    mesh: Mesh,
    *,
    model: str,
    layers: int,
    batch: int,
    context: int,
    kv_split: str,
    axes: Mapping[str, int],
    weights_dtype: str = "plain",
    only_experts: bool = False,
    stages: int = 1,
    stage: int = 0,
    platform: str = "tpu",
) -> jax.stages.Lowered:
    """The step that generates for ``batch`` sequences whose tables have room for ``context`` tokens, on TPUs or GPUs.

    Weights are in ``weights_dtype``, or those of experts alone. Of several pipeline ``stages`` it is one.
    """
    whole_pages, config = kv_split == "batch" or axes.get("context", 1) == 1, small(model, layers)
    decoder = Decoder(
        model=config,
        sizes=tuple((axis, size) for axis, size in axes.items() if size > 1),
        kv_split=kv_split,
        dtype="bfloat16",
        reader=best_reader(config, platform, quantised=False) if whole_pages else "gather",
        expert_matmul="grouped" if platform == "tpu" else "batched",
        lanes=LANES if platform == "tpu" else 1,
        stages=stages,
        stage=stage,
    )

    def apart(parameter: Parameter, leaf: jax.ShapeDtypeStruct) -> Any:
        if not parameter.stacked:
            return leaf
        dim = summed_dim(parameter)
        stored: Any = leaf
        if weights_dtype != "plain" and dim is not None and ("expert" in parameter.dims or not only_experts):
            with jax.set_mesh(mesh):
                of = partial(quantise, dim=dim, name=weights_dtype, platform=platform, compute="bfloat16")
                stored = jax.eval_shape(of, leaf)

        def of_layer(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            place = NamedSharding(mesh, P(*leaf.sharding.spec[1:]))
            return jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype, sharding=place)

        return (jax.tree.map(of_layer, stored),) * leaf.shape[0]

    weights = by_layer(decoder, jax.tree.map(apart, decoder.described, decoder.abstract_weights(mesh)))
    pages = batch * (context // decoder.page_tokens) + decoder.groups.ways - 1
    shapes = Shapes(batches=(batch,), widths=(decoder.least_rows,), contexts=(context,), prefill_tokens=256)
    programs = Programs(decoder, mesh, weights, pages=pages, slots=batch, shapes=shapes)
    traced, donated, arguments = programs._step_program((batch, 1, context // decoder.page_tokens))
    with jax.set_mesh(mesh):
        return jax.jit(traced, donate_argnums=donated).lower(*arguments)
