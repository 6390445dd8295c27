"""Programs that are bad on purpose, traced on eight emulated devices: each fault is found, with its cause and its
line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from rooftop.explain.measured.advice import Advice
from rooftop.explain.measured.report import Explained, explain

HERE = Path(__file__)


def line_of(mark: str) -> str:
    """'file:line' of the line here that ends with a mark."""
    lines = HERE.read_text(encoding="utf-8").splitlines()
    return f"{HERE.name}:{next(at for at, line in enumerate(lines, start=1) if line.endswith(f'# {mark}'))}"


@pytest.fixture(scope="module")
def mesh() -> Iterator[jax.sharding.Mesh]:
    """Two by four devices, left to the partitioner."""
    yield jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def traced(folder: Path, step: Callable[[int], Any], steps: int = 5) -> Explained:
    """Trace so many steps, the first one left out since it compiles, and explain them."""
    jax.block_until_ready(step(0))
    with jax.profiler.trace(str(folder)):
        for number in range(1, steps + 1):
            with jax.profiler.StepTraceAnnotation("step", step_num=number):
                jax.block_until_ready(step(number))
    return explain(folder, mesh={"data": 2, "model": 4})


def advice(explained: Explained, rule: str) -> Advice:
    """The advice of one rule."""
    return next(item for item in explained.advice if item.rule == rule)


def feed_forward(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """[B, D] by way of [B, F]: ``down`` is split over its output, so that the whole of F is needed everywhere."""
    with jax.named_scope("mlp/up"):
        hidden = jnp.tanh(x @ up)  # makes
    with jax.named_scope("mlp/down"):
        return hidden @ down  # gathers


def arrays(mesh: jax.sharding.Mesh, down: P) -> tuple[jax.Array, ...]:
    """x [64_data, 256], up [256, 512_model], down [512, 256]."""
    parts = ((64, 256), P("data")), ((256, 512), P(None, "model")), ((512, 256), down)
    return tuple(jax.device_put(jnp.ones(shape), NamedSharding(mesh, spec)) for shape, spec in parts)


def test_activations_that_a_missing_sharding_makes_xla_gather(mesh: jax.sharding.Mesh, tmp_path: Path) -> None:
    operands = arrays(mesh, P(None, "model"))
    program = jax.jit(feed_forward)
    explained = traced(tmp_path, lambda number: program(*operands))
    said = advice(explained, "gathered_activation")
    # Newer JAX gives the gather the line of what it gathers.
    where = line_of("gathers" if jax.__version_info__ < (0, 11) else "makes")
    assert said.source.endswith(where)
    assert line_of("makes") in said.what, "where the constraint is missing"
    assert "over model" in said.evidence
    assert "65.5 kB" in said.evidence, "[32, 512] in float32 on a device"
    assert where in said.evidence


def test_weights_that_are_split_as_megatron_does_gather_no_activations(mesh: jax.sharding.Mesh, tmp_path: Path) -> None:
    operands = arrays(mesh, P("model", None))
    program = jax.jit(feed_forward)
    explained = traced(tmp_path, lambda number: program(*operands))
    assert "gathered_activation" not in [item.rule for item in explained.advice]
    assert [collective.facts.kind for collective in explained.measured.collectives] == ["all_reduce"]


def next_batch(number: int) -> float:  # works
    """Work of the host, a step's whole time."""
    total = 0.0
    for term in range(100_000):
        total += term % (number + 1)
    return total


def test_a_loop_that_is_bound_by_its_host(tmp_path: Path) -> None:
    program = jax.jit(lambda x: (x @ x).sum())
    x = jnp.ones((64, 64))
    explained = traced(tmp_path, lambda number: program(x + next_batch(number)))
    said = advice(explained, "host_bound")
    assert said.source == f"{line_of('works')} next_batch"
    assert "the host runs Python" in said.evidence
    assert explained.measured.idle.between_s > 0.5 * explained.measured.step_s
    first = explained.verdict.losses[0]
    assert (first.what, first.source) == ("idle between programs", said.source)
    assert "it waits for the host, which runs Python" in explained.verdict.line


def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """[B, N, T, H] each."""
    scores = jnp.einsum("bnth,bnsh->bnts", q, k)  # pads
    return jnp.einsum("bnts,bnsh->bnth", jax.nn.softmax(scores), v)


@pytest.mark.parametrize(("head", "padded"), [(80, True), (128, False)])
def test_a_head_dim_that_does_not_fill_the_systolic_array(head: int, padded: bool, tmp_path: Path) -> None:
    program = jax.jit(attention)
    q = jnp.ones((2, 2, 128, head))
    explained = traced(tmp_path, lambda number: program(q, q, q), steps=2)
    rules = [item.rule for item in explained.advice]
    assert ("padded_dim" in rules) == padded
    if padded:
        said = advice(explained, "padded_dim")
        assert "a dim of 80, 62% of the 128" in said.evidence
        assert said.source.partition(":")[0].endswith(HERE.name)
        assert said.source.rpartition(":")[2] in {
            line_of("pads").rpartition(":")[2],
            str(int(line_of("pads").rpartition(":")[2]) + 1),
        }


def test_scopes_of_a_program_that_is_not_ours_are_its_own(mesh: jax.sharding.Mesh, tmp_path: Path) -> None:
    operands = arrays(mesh, P("model", None))
    program = jax.jit(feed_forward)
    explained = traced(tmp_path, lambda number: program(*operands))
    assert {row.scope for row in explained.measured.rows} == {"mlp/up", "mlp/down"}
    rows = {row.scope: row for row in explained.rows}
    up = rows["mlp/up"]
    assert up.compiled is not None
    assert up.compiled.flops == 2 * 32 * 256 * 128
    (reduce,) = rows["mlp/down"].collectives
    assert (reduce.kind, reduce.axes, reduce.compiled_bytes) == ("all_reduce", ("model",), 32 * 256 * 4)
    assert reduce.exposed_s is not None
    data = explained.to_json()
    assert data["devices"]["emulated"]
    assert data["roofline"] is None
    assert "a CPU has no roofs" in data["empty"]["roofline"]
