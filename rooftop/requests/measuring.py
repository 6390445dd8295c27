"""Requests for prices of sharded arrays, for loads of a server, and for comparisons with published runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from rooftop.requests.kinds import FILE, FLAG, PATH, SLICE, Kind, Listed, Pairs, Written
from rooftop.requests.request import Request, setting
from rooftop.requests.words import ASSUMPTIONS, PARALLELISM, RUN, SERVER, WORKLOAD

if TYPE_CHECKING:
    from pathlib import Path

    from rooftop.arrays import Mesh
    from rooftop.plan.serving.plan import ServingPlan
    from rooftop.requests.likes import (
        AxesLike,
        CalibrationLike,
        CountLike,
        LengthsLike,
        SliceLike,
        TimeLike,
        TraceLike,
    )
    from rooftop.simulate.expressions import ShardedExpression


@dataclass(frozen=True)
class Matmul(Request):
    """The price of an einsum, a resharding or one collective of sharded arrays."""

    verb: ClassVar[str] = "matmul"

    expression: str | ShardedExpression = setting(kind=Written("EXPRESSION"))
    """'A @ B -> C', 'A @ B', 'A -> B', 'AllGather_X(A)' or 'A'; an array is 'bf16[B_X, D_YZ]{U_W}'."""
    _: KW_ONLY
    on: SliceLike | None = setting(None, kind=SLICE)
    """CHIP:SHAPE[@SLICES], such as v5e:4x4; needed for times."""
    figures: Mapping[str, float | str] | None = None
    """Override a figure of the chip."""
    dims: Mapping[str, int] | str | None = None
    """Sizes of the dims: B=8192,D=8192,F=32Ki."""
    backward: bool = setting(False, kind=FLAG, group=WORKLOAD)
    """Price the backward program of the best strategy too."""
    mesh: AxesLike | Mesh | None = None
    """Mesh axes and their sizes: X=4,Y=4. Without mesh, dims and slice: the case of the book."""
    layout: str | None = None
    """Pin axes to the torus: X=x,Y=y[1:2]+z."""
    overlap: bool = setting(True, kind=FLAG, group=PARALLELISM)
    """Include collective matmuls."""
    dtype: str = "bf16"
    """Dtype of arrays that are written with a name, as in A[I_X, J]."""
    level: str = "bound"
    """Peak rates, achievable rates, or the book's."""
    simulate: bool = setting(False, kind=FLAG, group=ASSUMPTIONS)
    """Simulate each collective link by link on the torus."""
    bidirectional: bool = setting(True, kind=FLAG, group=ASSUMPTIONS, option="bidirectional/unidirectional")
    """With ``simulate``: rings that send both ways, or one way only."""
    compile: bool = setting(False, kind=FLAG)
    """Compile with XLA:TPU for the slice, and compare."""
    measure: bool = setting(False, kind=FLAG, group=RUN)
    """Run the listed strategies on local devices, and time them."""
    top: CountLike | Literal["all"] = 8
    """Strategies to list, or all."""


@dataclass(frozen=True)
class BenchServing(Request):
    """A load of a server with OpenAI's API."""

    verb: ClassVar[str] = "bench serve"

    url: str = setting(argument=False)
    """The server: http://127.0.0.1:8000."""
    _: KW_ONLY
    trace: TraceLike | None = None
    """Requests: JSONL or CSV; or a rate, or clients."""
    requests_per_second: float | str | None = None
    """Rate of drawn requests."""
    duration: TimeLike = "60s"
    """Time span of drawn requests: 10m."""
    concurrency: CountLike | None = None
    """Clients that each wait for an answer, instead of a rate."""
    requests: CountLike | None = None
    """Requests of all clients; 10 for each by default."""
    prompt: LengthsLike = setting("512", kind=Pairs("N", numbers=True))
    """Tokens of a prompt: 512, or 128:1024."""
    texts: Path | str | None = setting(None, kind=PATH, group=WORKLOAD)
    """Prompts: JSONL of {"prompt": ...}, or ShareGPT's JSON. By default random token ids."""
    generate: LengthsLike = setting("128", kind=Pairs("N", numbers=True))
    """Tokens of an answer, likewise."""
    burstiness: float | str = 1.0
    """1: Poisson; below it requests come in bursts."""
    seed: int = setting(0, group=WORKLOAD)
    """Seed of everything that is drawn."""
    hash_tokens: CountLike = 512
    """Tokens that a hash of a trace stands for."""
    model: str | None = setting(None, kind=Kind("NAME"), group=SERVER)
    """The model to ask. [default: the one that is served]"""
    api_key: str | None = setting(None, kind=Kind("KEY"), group=SERVER, envvar="OPENAI_API_KEY", secret=True)
    """If the server asks for one."""
    vocab: CountLike | None = None
    """Prompts have token ids below N. [default: the server's, or 1000]"""
    ignore_eos: bool = setting(True, kind=FLAG, group=WORKLOAD)
    """Ask for answers of their full length."""
    plan: ServingPlan | Path | str | None = setting(None, kind=FILE, group=WORKLOAD)
    """Predict by a plan.json, not by the steps that the server measured."""
    ttft: TimeLike | None = None
    """Target for goodput: 500ms."""
    tpot: TimeLike | None = None
    """Target for goodput: 30ms."""


@dataclass(frozen=True, kw_only=True)
class BenchCollectives(Request):
    """Collectives over the axes of a mesh of the local devices, to time."""

    verb: ClassVar[str] = "bench collectives"

    on: SliceLike | None = setting(None, kind=SLICE)
    """Show what is planned for this slice too: CHIP:SHAPE[@SLICES]."""
    mesh: AxesLike | None = None
    """Mesh axes and their sizes: X=2,Y=4. One axis X of all devices by default."""
    axis: Sequence[str] | str | None = setting(None, kind=Listed("AXES"), group=WORKLOAD)
    """The axes that collectives run over: X or X,Y. All by default."""
    kinds: Sequence[str] | str | None = setting(None, kind=Listed("KINDS"), group=WORKLOAD)
    """Some of all_gather, reduce_scatter, all_reduce, all_to_all, permute. All by default."""
    sizes: Sequence[CountLike] | str = setting("64Ki,1Mi,16Mi", kind=Listed("BYTES"), group=WORKLOAD)
    """Payloads of one device, as a list."""
    dtype: str = "bf16"
    """Dtype of the elements."""


@dataclass(frozen=True, kw_only=True)
class Validate(Request):
    """A comparison of predicted with published times of training and serving."""

    verb: ClassVar[str] = "validate"

    runs: Path | str | None = setting(None, kind=PATH, group=WORKLOAD, metavar="FILE")
    """Another table of runs, with the columns of either table that comes with rooftop (CSV)."""
    learn: bool = setting(False, kind=FLAG, group=ASSUMPTIONS)
    """Learn factors, nulls and intervals from the table, each run's model left out; by default they are those that come
    with rooftop."""
    assume: str | None = None
    """Shares of transfers that hide: weight_gather=1,tensor=0.5 (docs/plan.md)."""
    calibration: CalibrationLike | None = None
    """Predict training by the fractions that rooftop calibrate measured (JSON)."""
    compiled: bool = setting(False, kind=FLAG, group=RUN)
    """Compile runs on TPUs for their slices too (XLA:TPU; cached)."""
    only: str | None = setting(None, kind=Kind("NAME"), group=WORKLOAD)
    """Runs of training with this in their names: a model, a chip."""
    timeout: TimeLike | None = None
    """Give up a compilation after this time: 10m."""
