"""The training plan: the best strategy for a model, a slice and a batch, with its ledger and its reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from rooftop import __version__
from rooftop.arrays.mesh import AXES, Mesh
from rooftop.arrays.rules import Rules
from rooftop.core.errors import RooftopError, misread
from rooftop.core.ledger import Collective, Ledger, Row
from rooftop.hardware import Slice
from rooftop.models import ModelConfig, count_params, flops_per_token
from rooftop.models.activations import parse_policy
from rooftop.models.segments import stage_parts
from rooftop.plan.layouts import from_mesh
from rooftop.plan.training.assumptions import Assumptions
from rooftop.plan.training.memory import host_bytes
from rooftop.plan.training.pricing import idle_fraction
from rooftop.plan.training.problem import Problem
from rooftop.plan.training.reasons import Reason, training_reasons
from rooftop.plan.training.rows import training_ledger
from rooftop.plan.training.step import TrainingStep
from rooftop.plan.training.strategies import Choice, Strategies
from rooftop.plan.training.workload import Numerics, Workload
from rooftop.roofline.bounds import lower_s
from rooftop.roofline.rules import model_flops_utilisation

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """One strategy for one job, and what it is expected to take.

    MFU counts model FLOPs (causal attention, unembedding in, embedding lookup out, nothing recomputed) over peak.
    """

    problem: Problem
    mesh: Mesh
    choice: Choice

    @cached_property
    def step(self) -> TrainingStep:
        """The step as the planner prices it, arrays [1, 1]."""
        return self.problem.step(Strategies(from_mesh(self.mesh), (self.choice,)))

    @cached_property
    def ledger(self) -> Ledger:
        """The planned ledger: scalar rows, those that do nothing left out."""
        rows = (_scalar_row(row, self.mesh) for row in training_ledger(self.step))
        return Ledger(tuple(row for row in rows if row.count and (row.expected_s or row.time_s)))

    @cached_property
    def memory(self) -> dict[str, float]:
        """Bytes per device by class, in the plan's bounds."""
        found = self.problem.memory(self.step)
        return {name: _scalar(value) for name, value in asdict(found).items()}

    @property
    def memory_bytes(self) -> float:
        """Bytes per device, all classes."""
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        """Whether it stays within the device's HBM."""
        return self.memory_bytes <= self.problem.capacity

    @property
    def expected_s(self) -> float:
        """Expected seconds per step: the sum of the ledger."""
        return float(self.ledger.expected_s)

    @cached_property
    def lower_s(self) -> dict[str, float]:
        """Lower bound by resource, with the pipeline's idle time if there is one."""
        spans = {name: self.mesh.span(name) for name in AXES}
        waiting = 1 + _scalar(idle_fraction(self.step.strategies))
        return {name: _scalar(seconds) * waiting for name, seconds in lower_s(self.ledger, spans).items()}

    @property
    def bound(self) -> str:
        """The resource that binds: the largest lower bound."""
        return max(self.lower_s, key=lambda name: self.lower_s[name])

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs per token in the convention of MFU."""
        return float(flops_per_token(self.problem.model, self.problem.workload.seq_len).total)

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation at the expected step time; the peak is that of the matmuls' dtype."""
        problem = self.problem
        return model_flops_utilisation(
            self.flops_per_token * problem.workload.batch_tokens,
            self.expected_s,
            problem.slice.flops_per_s(problem.numerics.matmul),
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over the whole slice."""
        return self.problem.workload.batch_tokens / self.expected_s

    @property
    def days(self) -> float | None:
        """Days for the token budget."""
        tokens = self.problem.workload.tokens
        return None if tokens is None else tokens / self.tokens_per_s / 86400

    @cached_property
    def obstacles(self) -> list[str]:
        """What keeps a JAX program from running the plan as it stands."""
        return list(_obstacles(self.problem, self.mesh, self.choice))

    @cached_property
    def reasons(self) -> list[Reason]:
        """The rules of the book that apply."""
        return training_reasons(self.problem, self.step)

    def exposed_s(self) -> dict[str, float]:
        """Seconds per step of collectives that nothing hides, by mesh axis, and of pipeline idle time."""
        exposed: dict[str, float] = {}
        for row in self.ledger:
            for collective in row.collectives:
                name = collective.axes[0]
                exposed[name] = exposed.get(name, 0.0) + float(row.count * collective.exposed_s)
        idle = sum(float(row.count * row.expected_s) for row in self.ledger if row.formula.startswith("idle"))
        return exposed | ({"idle": idle} if idle else {})

    def summary(self) -> dict[str, Any]:
        """What tells this plan from another: mesh, remat, microbatches, time and memory."""
        return {
            "mesh": {name: size for name, size in self.mesh.shape.items() if size > 1},
            "layout": self.mesh.layout,
            "remat": self.choice.remat,
            "microbatches": self.choice.microbatches,
            "expected_s": self.expected_s,
            "mfu": self.mfu,
            "memory_bytes": self.memory_bytes,
            "fits": self.fits,
            "executable": not self.obstacles,
        }

    def to_json(self) -> dict[str, Any]:
        """The plan without what other candidates say (alternatives and what-if): see ``plan_training``."""
        problem, numerics = self.problem, self.problem.numerics
        parameters = count_params(problem.model)
        price = problem.slice.chip.price_usd_per_hour
        days = self.days
        return {
            "kind": "train",
            "schema": SCHEMA,
            "rooftop_version": __version__,
            "model": {
                "name": problem.model.name,
                "params": parameters.total,
                "active_params": parameters.active,
                "config": problem.model.to_json(),
            },
            "slice": {
                "name": problem.slice.name,
                "chips": problem.slice.chips,
                "devices": problem.slice.devices,
            },
            "workload": asdict(problem.workload),
            "mesh": self.mesh.to_json(),
            "rules": Rules().only(self.mesh.shape).to_json(),
            "dtypes": {name: value for name, value in asdict(numerics).items() if name != "optimizer"},
            "optimizer": numerics.optimizer,
            "remat": {"name": self.choice.remat, "policy": dict(self.choice.policy)},
            "microbatches": self.choice.microbatches,
            "schedule": {"name": self.choice.schedule, "chunks": self.choice.chunks},
            "assumptions": asdict(problem.assumptions)
            | {"hidden": problem.assumptions.shares(self.step.rates.overlap), "bounds": problem.bounds},
            "flops": {
                "per_token": self.flops_per_token,
                "per_step": self.flops_per_token * problem.workload.batch_tokens,
                "executed_per_step": float(self.ledger.flops()) * problem.slice.devices,
                "convention": flops_per_token(problem.model, problem.workload.seq_len).convention,
            },
            "memory": self.memory
            | {
                "total": self.memory_bytes,
                "capacity": problem.capacity,
                "fits": self.fits,
                "host": _scalar(host_bytes(self.step)),
            },
            "step": {
                **{f"{name}_s": float(self.ledger.total(name)) for name in ("mxu", "vpu", "hbm", "ici", "dcn", "pcie")},
                "lower_s": max(self.lower_s.values()),
                "expected_s": self.expected_s,
                "upper_s": float(self.ledger.serial_s),
                "bound": self.bound,
                "lower_by_resource_s": self.lower_s,
                "exposed_s": self.exposed_s(),
            },
            "mfu": self.mfu,
            "tokens_per_s": self.tokens_per_s,
            "days": days,
            "cost_usd": None if days is None or price is None else days * 24 * price * problem.slice.chips,
            "executable": not self.obstacles,
            "obstacles": self.obstacles,
            "ledger": self.ledger.to_json(),
            "reasons": [reason.to_json() for reason in self.reasons],
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TrainingPlan:
        """The plan that a plan.json describes, priced anew. Raises RooftopError on a file that is not one."""
        try:
            if (data["kind"], data["schema"]) != ("train", SCHEMA):
                raise RooftopError("plan kind and schema", f"{data['kind']} {data['schema']}", f"train {SCHEMA}")
            slice_ = Slice.parse(data["slice"]["name"])
            assumptions = {name: value for name, value in data["assumptions"].items() if name != "bounds"}
            problem = Problem(
                model=ModelConfig.from_json(data["model"]["config"]),
                slice=slice_,
                workload=Workload(**data["workload"]),
                numerics=Numerics(optimizer=data["optimizer"], **data["dtypes"]),
                assumptions=Assumptions(**assumptions),
                schedule=data["schedule"]["name"],
                chunks=int(data["schedule"]["chunks"]),
                bounds=data["assumptions"]["bounds"],
            )
            choice = Choice(
                remat=data["remat"]["name"],
                policy=parse_policy(data["remat"]["name"]),
                microbatches=int(data["microbatches"]),
                schedule=problem.schedule,
                chunks=problem.chunks,
            )
            return cls(problem=problem, mesh=Mesh.from_json(slice_, data["mesh"]), choice=choice)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise misread("plan", error, "a plan.json written by rooftop plan") from None


def _obstacles(problem: Problem, mesh: Mesh, choice: Choice) -> list[str]:
    model, workload = problem.model, problem.workload
    found: list[str] = []
    if (stages := mesh.size("stage")) > 1:
        if "offload" in choice.policy.values():
            found.append("no program offloads activations from a pipeline stage")
        if choice.chunks > 1 and choice.microbatches > stages and choice.microbatches % stages:
            found.append(f"interleaved stages want a multiple of {stages} microbatches, not {choice.microbatches}")
    batch = mesh.size("data", "fsdp", "expert")
    columns = mesh.size("fsdp", "tensor")
    parts, what = stage_parts(model)
    checks = [
        (workload.batch_seqs, batch, f"{workload.batch_seqs} sequences", "data x fsdp x expert"),
        (model.d_model, columns, f"a D of {model.d_model}", "fsdp x tensor"),
        (workload.seq_len, mesh.size("context", "tensor"), f"sequences of {workload.seq_len}", "context x tensor"),
        (parts, stages * choice.chunks, f"{parts} {what}", "stages and their chunks"),
    ]
    for whole, ways, what, axes in checks:
        if whole % ways:
            found.append(f"JAX shards evenly: {what} cannot be split {ways} ways over {axes}")
    return found


def _scalar(value: Any) -> float:
    """The one entry of a [1, 1] array."""
    return float(np.asarray(value, np.float64).reshape(-1)[0])


def _scalar_row(row: Row, mesh: Mesh) -> Row:
    collectives = tuple(
        replace(
            collective,
            axes=tuple(axis for axis in collective.axes if mesh.size(axis) > 1),
            bytes=_scalar(collective.bytes),
            wire_bytes=_scalar(collective.wire_bytes),
            time_s={name: _scalar(value) for name, value in collective.time_s.items()},
            expected_s=_scalar(collective.expected_s),
            exposed_s=_scalar(collective.exposed_s),
        )
        for collective in row.collectives
    )
    return replace(
        row,
        count=_scalar(row.count),
        flops={name: _scalar(value) for name, value in row.flops.items() if _scalar(value)},
        kernel_flops=_scalar(row.kernel_flops),
        vector_flops=_scalar(row.vector_flops),
        hbm_bytes=_scalar(row.hbm_bytes),
        collectives=tuple(entry for entry in collectives if _moves(entry)),
        time_s={name: _scalar(value) for name, value in row.time_s.items() if _scalar(value)},
        expected_s=_scalar(row.expected_s),
        serial_s=_scalar(row.serial_s),
    )


def _moves(collective: Collective) -> bool:
    return float(collective.wire_bytes) > 0
