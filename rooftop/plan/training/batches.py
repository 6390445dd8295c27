"""Strategies of one job over many batches: compute and communication side by side, as chapter 5 plots them.

Each strategy is one shape of the mesh: data parallelism, FSDP, tensor parallelism, or the last two mixed, on the
layout that is fastest at the job's own batch. All batches of all strategies are priced at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np

from rooftop.arrays.mesh import Floats, Ints, Mesh
from rooftop.arrays.rules import AXES
from rooftop.capabilities import Choice
from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Number
from rooftop.models.activations import parse_policy
from rooftop.plan.layouts import Layouts, enumerate_layouts
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.search import searched_switches
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.strategies import Strategies, choices
from rooftop.plan.training.work.rows import training_ledger

#: Layouts and batches that are all priced: of more layouts the fastest at the job's own batch are drawn.
MOST_PRICED = 4096


@dataclass(frozen=True, kw_only=True)
class BatchCurve:
    """One strategy, a mesh and a choice, over batches: arrays [n] of a step's tokens, and of its seconds on one device.

    ``compute_s`` is the matrix unit's at its peak, ``network_s`` all collectives one after another at the links' peak,
    ``expected_s`` the step with its overlaps, ``memory_bytes`` the bytes of a device.
    """

    mesh: Mesh
    choice: Choice
    batch_tokens: Floats
    compute_s: Floats
    network_s: Floats
    expected_s: Floats
    memory_bytes: Floats

    @property
    def axes(self) -> dict[str, int]:
        """The axes that are longer than 1."""
        return {name: size for name, size in self.mesh.shape.items() if size > 1}


@dataclass(frozen=True, kw_only=True)
class _ManyBatches(TrainingStep):
    """A step in which each layout has a batch of its own, ``own_seqs`` [C, 1]."""

    own_seqs: Floats

    @property
    def batch_seqs(self) -> Number:
        """Sequences of a step, [C, 1]."""
        return self.own_seqs


def batch_curves(problem: Problem, batches: Sequence[int], meshes: Sequence[Mapping[str, int]]) -> list[BatchCurve]:
    """The curve of each mesh shape that some layout on the slice has, in the order given, over ``batches`` in tokens.

    The problem's remat and microbatches hold, no remat and one microbatch where it has none; at each batch collective
    matmuls are used where they are faster. ``choice`` is that of the job's own batch. Raises RooftopError if no mesh
    can be.
    """
    remat = problem.remat or "none"
    layouts, starts = _of_shapes(problem, meshes)
    options = choices(
        {remat: parse_policy(remat)}, [problem.microbatches or 1], pipelines=problem.pipelines[:1],
        **searched_switches(problem, layouts),
    )  # fmt: skip
    own = problem.workload.batch_tokens
    if len(layouts) * (len(batches) + 1) > MOST_PRICED:
        # Too many to price at every batch: those that are fastest at the job's own.
        alone = _priced(problem, layouts, options, [own])
        layouts, starts = layouts[_fastest(alone.expected_s[:, 0], starts)], np.arange(len(starts))
    priced = _priced(problem, layouts, options, [*batches, own])
    return [
        BatchCurve(
            mesh=layouts.mesh(way),
            choice=options[int(priced.option[way, -1])],
            batch_tokens=np.array(batches, np.float64),
            compute_s=priced.compute_s[way, :-1],
            network_s=priced.network_s[way, :-1],
            expected_s=priced.expected_s[way, :-1],
            memory_bytes=priced.memory_bytes[way, :-1],
        )
        for way in _fastest(priced.expected_s[:, -1], starts).tolist()
    ]


@dataclass(frozen=True, kw_only=True)
class _Priced:
    """The curves of every layout, arrays [layouts, batches]; ``option`` is the place of the fastest choice."""

    option: Ints
    compute_s: Floats
    network_s: Floats
    expected_s: Floats
    memory_bytes: Floats


def _priced(problem: Problem, layouts: Layouts, options: Sequence[Choice], batches: Sequence[int]) -> _Priced:
    shape = len(layouts), len(batches)
    step = _ManyBatches(
        model=problem.model,
        slice=problem.slice,
        workload=problem.workload,
        numerics=problem.formats,
        assumptions=problem.assumed,
        habits=problem.program.habits,
        strategies=Strategies(layouts[np.repeat(np.arange(shape[0]), shape[1])], tuple(options)),
        own_seqs=np.tile(np.array(batches, np.float64) / problem.workload.seq_len, shape[0])[:, None],
    )

    def every(values: Number) -> Floats:
        return np.broadcast_to(np.asarray(values, np.float64), (shape[0] * shape[1], len(options)))

    ledger = training_ledger(step)
    option = every(ledger.expected_s).argmin(axis=1, keepdims=True)

    def table(values: Number) -> Floats:
        return np.take_along_axis(every(values), option, axis=1).reshape(shape)

    return _Priced(
        option=option.reshape(shape),
        compute_s=table(ledger.total("mxu")),
        network_s=table(ledger.total("ici") + ledger.total("dcn")),
        expected_s=table(ledger.expected_s),
        memory_bytes=table(problem.memory(step).total),
    )


def book_meshes(problem: Problem) -> list[dict[str, int]]:
    """The shapes that chapter 5 compares: pure ones, and every mix of FSDP and tensor parallelism, by powers of two.

    Slices are joined by data parallelism.
    """
    slices = problem.slice.num_slices
    devices = problem.slice.devices // slices
    outer = {"data": slices} if slices > 1 else {}
    most = gcd(devices, gcd(problem.model.heads, problem.model.d_ff))
    tensors = [2**power for power in range(1, most.bit_length()) if most % 2**power == 0]
    shapes: list[dict[str, int]] = [{"data": slices * devices}, outer | {"fsdp": devices}]
    shapes += [outer | {"fsdp": devices // ways, "tensor": ways} for ways in tensors]
    return [{name: size for name, size in shape.items() if size > 1} for shape in shapes]


def _of_shapes(problem: Problem, meshes: Sequence[Mapping[str, int]]) -> tuple[Layouts, Ints]:
    """All layouts of the mesh shapes, those of one shape together, and where each shape's begin."""
    names = [name for name in AXES if any(name in shape for shape in meshes)]
    layouts = enumerate_layouts(problem.slice, names, {})
    by_shape = [
        np.flatnonzero(np.all(layouts.devices == [shape.get(name, 1) for name in AXES], axis=1)) for shape in meshes
    ]
    by_shape = [members for members in by_shape if len(members)]
    if not by_shape:
        raise RooftopError("mesh", problem.slice.name, "a slice on which data, FSDP and tensor axes can be laid")
    starts = np.cumsum([0, *(len(members) for members in by_shape[:-1])])
    return layouts[np.concatenate(by_shape)], starts


def _fastest(seconds: Floats, starts: Ints) -> Ints:
    """The position of the least seconds among those of each shape."""
    ends = [*starts[1:].tolist(), len(seconds)]
    return np.array([start + np.argmin(seconds[start:end]) for start, end in zip(starts.tolist(), ends, strict=True)])
