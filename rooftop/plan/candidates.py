"""The candidates of a search: layouts of mesh axes, remat policies and microbatches, and which of them can be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import gcd

import numpy as np
import numpy.typing as npt

from rooftop.arrays.mesh import AXES
from rooftop.errors import RooftopError
from rooftop.models.activations import POLICIES, parse_policy
from rooftop.models.config import ModelConfig
from rooftop.models.segments import stage_parts
from rooftop.plan.layouts import Layouts, enumerate_layouts, from_mesh
from rooftop.plan.problem import Problem
from rooftop.plan.strategies import Choice, Strategies, choices


def uneven(problem: Problem, layouts: Layouts) -> npt.NDArray[np.bool_]:
    """Layouts that JAX could not run as they stand, because a dim does not split evenly, [C]."""
    batch = layouts.along("data") * layouts.along("fsdp") * layouts.along("expert")
    columns = layouts.along("fsdp") * layouts.along("tensor")
    bad: npt.NDArray[np.bool_] = (problem.workload.batch_seqs % batch != 0) | (problem.model.d_model % columns != 0)
    return bad


def searched_layouts(problem: Problem) -> tuple[Layouts, bool]:
    """The layouts to be priced, and whether they split batch and model evenly.

    Raises RooftopError if a given mesh cannot be.
    """
    if problem.mesh is not None:
        layouts = from_mesh(problem.mesh)
        return layouts, not uneven(problem, layouts).any()
    if problem.axes is not None:
        layouts = _given(problem, problem.axes)
        return layouts, not uneven(problem, layouts).any()
    axes, divides = _searched(problem)
    layouts = enumerate_layouts(problem.slice, axes, divides)
    layouts = layouts[_heads_split(problem.model, layouts)]
    good = ~uneven(problem, layouts)
    even = bool(good.any())
    if even:
        layouts = layouts[good]
    return layouts, even


def _searched(problem: Problem) -> tuple[list[str], dict[str, int]]:
    """The axes worth searching and what each must divide."""
    model = problem.model
    columns = gcd(model.heads, model.d_ff if model.dense_layers else 0)
    divides = {"tensor": columns, "context": problem.workload.seq_len, "stage": stage_parts(model)[0]}
    if model.moe is not None:
        divides["tensor"] = gcd(columns, model.moe.d_ff)
        divides["expert"] = model.moe.experts
    return [name for name in AXES if name != "expert" or model.moe is not None], divides


def _heads_split(model: ModelConfig, layouts: Layouts) -> npt.NDArray[np.bool_]:
    """Key and value heads must split over tensor, or be copied a whole number of times."""
    tensor = layouts.along("tensor")
    good: npt.NDArray[np.bool_] = (model.kv_heads % tensor == 0) | (tensor % model.kv_heads == 0)
    return good


def _given(problem: Problem, sizes: Mapping[str, int]) -> Layouts:
    """Layouts with exactly the given axis sizes."""
    devices = problem.slice.devices
    product = int(np.prod(list(sizes.values())))
    given = ",".join(f"{name}={size}" for name, size in sizes.items())
    if product != devices:
        raise RooftopError(
            "mesh", given, f"sizes whose product is the {devices} devices of {problem.slice.name} "
            f"(yours is {product}), such as {_nearest(sizes, devices)}",
        )  # fmt: skip
    model = problem.model
    parts, what = stage_parts(model)
    for name, of, size in (
        ("tensor", "attention heads", model.heads),
        ("stage", what, parts),
        ("expert", "experts", 1 if model.moe is None else model.moe.experts),
    ):
        if size % sizes.get(name, 1):
            divisors = [n for n in range(1, size + 1) if size % n == 0]
            near = sorted(divisors, key=lambda n: abs(n - sizes[name]))[:2]
            raise RooftopError(f"mesh axis {name}", sizes[name], f"a divisor of the {size} {of}: {sorted(near)}")
    names = [name for name in AXES if sizes.get(name, 1) > 1] or ["data"]
    divides = {name: sizes.get(name, 1) for name in AXES}
    layouts = enumerate_layouts(problem.slice, names, divides)
    wanted = np.array([divides[name] for name in AXES])
    layouts = layouts[np.all(layouts.devices == wanted, axis=1)]
    if not len(layouts):
        physical = " x ".join(f"{axis.name}={axis.size}" for axis in problem.slice.physical_axes)
        raise RooftopError(
            "mesh", given, f"axes that whole or split physical axes ({physical}) make up; over DCN only data and stage"
        )
    return layouts


def _nearest(sizes: Mapping[str, int], devices: int) -> str:
    """The given mesh with its largest axis changed so that the product is right, the others rounded to divisors."""
    largest = max(sizes, key=lambda name: sizes[name])
    found: dict[str, int] = {}
    left = devices
    for name, size in sizes.items():
        if name != largest:
            found[name] = max(n for n in range(1, size + 1) if left % n == 0)
            left //= found[name]
    found[largest] = left
    return ",".join(f"{name}={found[name]}" for name in sizes)


def searched_choices(problem: Problem, layouts: Layouts) -> tuple[Choice, ...]:
    """The remat policies and microbatches to be priced, in the problem's schedule.

    Raises RooftopError if a given number of microbatches does not divide the sequences.
    """
    if problem.remat is None:
        # 'full' is another name of 'block'.
        policies = {name: POLICIES[name] for name in ("none", "matmuls", "minimal", "block")}
    else:
        policies = {problem.remat: parse_policy(problem.remat)}
    counts: Sequence[int]
    if problem.microbatches is not None:
        if problem.workload.batch_seqs % problem.microbatches:
            raise RooftopError(
                "microbatches", problem.microbatches, f"a divisor of the {problem.workload.batch_seqs} sequences"
            )
        counts = (problem.microbatches,)
    else:
        replicas = layouts.along("data") * layouts.along("fsdp") * layouts.along("expert")
        most = max(1, problem.workload.batch_seqs // int(replicas.min(initial=1)))
        counts = [2**power for power in range(8) if 2**power <= most]
    return choices(policies, counts, schedule=problem.schedule, chunks=problem.chunks)


def allowed_candidates(problem: Problem, strategies: Strategies, even: bool) -> npt.NDArray[np.bool_]:
    """Whether microbatches split each replica's sequences evenly, and interleaved chunks the layers of a stage, [C, K].

    Raises RooftopError if no candidate does.
    """
    layouts = strategies.layouts
    replicas = strategies.devices("data", "fsdp", "expert")
    counts = strategies.microbatches
    good = np.ones(strategies.shape, np.bool_)
    if even:
        good &= problem.workload.batch_seqs % (replicas * counts) == 0
    else:
        good &= counts == counts.min()
    stages = layouts.along("stage")[:, None]
    parts, what = stage_parts(problem.model)
    even_parts = (problem.chunks == 1) | (parts % (stages * problem.chunks) == 0)
    if not even_parts.any():
        most = [parts // int(each) for each in np.unique(stages) if parts % each == 0]
        fitting = sorted({n for each in most for n in range(2, each + 1) if each % n == 0})
        accepted = ", ".join(map(str, fitting)) or "no interleaving"
        raise RooftopError("chunks", problem.chunks, f"{accepted} (stages x chunks must divide the {parts} {what})")
    good &= even_parts
    if not good.any():
        raise RooftopError(
            "microbatches",
            int(counts.max()),
            f"a divisor of the {problem.workload.batch_seqs} sequences of each replica",
        )
    return good
