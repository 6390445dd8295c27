"""Assumptions of a training expectation beyond the bound: named, settable, argued in docs/plan.md."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from rooftop.capabilities import KERNEL_OF_CHIP, AttentionKernel
from rooftop.core.errors import RooftopError, unknown
from rooftop.core.records import Record
from rooftop.plan.launches import GRAPH_PARTS, GraphPart
from rooftop.plan.pricing import parse_shares, require_shares
from rooftop.roofline.overlap import Overlap

#: Largest share of each transfer's time that can overlap computation, unless a schedule of the compiler says otherwise
#: (``rooftop.roofline.overlap`` has the first two by chip). A collective between two dependent matmuls is exposed
#: unless it is written as a collective matmul. ``context`` and ``stage`` are written to overlap;
#: their 0.9 is assumed, not measured.
HIDDEN: Mapping[str, float] = MappingProxyType(
    {
        "weight_gather": 1.0,
        "gradient_scatter": 1.0,
        "gradient_all_reduce": 0.0,
        "tensor": 0.0,
        "context": 0.9,
        "all_to_all": 0.0,
        "stage": 0.9,
        "offload": 1.0,
    }
)


@dataclass(frozen=True, kw_only=True)
class Framework:
    """The train step of a framework, where it does something other than rooftop's programs do.

    ``dispatch``: a token is sent once for each of its 'experts', or once to each of its 'nodes' (DeepEP, HybridEP),
    where it goes on to each GPU that has some of them. ``kernels``: elementwise work is in kernels of its own, 'fused'
    as Transformer Engine's and torch.compile's are, or 'eager', one for each operation of PyTorch; with None it is
    fused into matmuls, as XLA does. ``attention_speed``: the speed of its attention kernels over that of those which
    the chip was measured with.

    ``adds_in_matmuls``: matmuls of weights' gradients add to the sums over microbatches. ``quantises_once``: weights
    are quantised once in a step, and activations before they are gathered. ``quantising_reads``: times that an
    activation is read to be quantised, 2 where its largest value is needed first; ``quantised_copies``: layouts in
    which it is then written. ``hides_gradients``: gathers of inputs for gradients of weights are next to the matmuls
    of gradients of inputs, and sums of gradients of inputs next to those of weights. ``fills_stages``: pipeline stages
    get layers of all kinds in order, the last stages fewer of them. ``groups_experts``: matmuls of a device's experts
    are one kernel, which starts once.

    ``launch_s``: seconds of the host for each kernel that it launches, and so the least of a kernel in a layer; 0 where
    all are CUDA graphs. ``graphs``: the parts of a layer that are graphs. ``quantising_kernels``: kernels that make the
    8-bit copies of a tensor, and ``scaling_kernels`` those that put the scales of a matmul's operands in order.

    ``group_rows``: rows of a tile of the kernels that multiply groups of experts' rows: forward, for gradients of
    inputs and of weights; those of up and gate, then those of down. A tile that two experts share is multiplied for
    both. () where there is no such kernel. ``group_dim``: size of their tiles in the other dims, 0 where it divides
    them. ``weighs_outputs``: the outputs of experts are weighted after the last matmul, so that the gradients of the
    weights need them. ``capacity``: slots of an expert over its even share of tokens, all of which are multiplied; 1
    where no slot is empty. ``one_hot``: tokens come into slots, and back, by matmuls with masks of 0 and 1.
    """

    dispatch: Literal["experts", "nodes"] = "experts"
    kernels: Literal["fused", "eager"] | None = None
    attention_speed: float = 1.0
    adds_in_matmuls: bool = False
    quantises_once: bool = False
    quantising_reads: float = 1.0
    quantised_copies: float = 1.0
    hides_gradients: bool = False
    fills_stages: bool = False
    groups_experts: bool = True
    launch_s: float = 0.0
    graphs: tuple[GraphPart, ...] = ()
    quantising_kernels: int = 1
    scaling_kernels: int = 0
    group_rows: tuple[tuple[int, int, int], ...] = ()
    group_dim: int = 0
    weighs_outputs: bool = False
    capacity: float = 1.0
    one_hot: bool = False

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise RooftopError("capacity", self.capacity, "1 or more: slots of an expert over its even share")
        if self.group_rows and [len(rows) for rows in self.group_rows] != [3, 3]:
            raise RooftopError("group_rows", self.group_rows, "rows of tiles of up and of down: three each")
        if self.dispatch not in ("experts", "nodes"):
            raise unknown("dispatch", self.dispatch, ("experts", "nodes"))
        if self.kernels not in (None, "fused", "eager"):
            raise unknown("kernels", str(self.kernels), ("fused", "eager"))
        if self.attention_speed <= 0:
            raise RooftopError("attention_speed", self.attention_speed, "a positive factor")
        if self.launch_s < 0:
            raise RooftopError("launch_s", self.launch_s, "seconds, 0 or more")
        for part in self.graphs:
            if part not in GRAPH_PARTS:
                raise unknown("graphs", part, GRAPH_PARTS)


@dataclass(frozen=True, kw_only=True)
class Assumptions(Record):
    """The shares that hide, the attention that is computed, and a chip's calibration factor.

    ``hidden`` overrides the shares that the chip's compiler and ``HIDDEN`` give.
    ``attention``: a 'flash' kernel that skips masked blocks of ``attention_block`` (as priced for the chip if None), or
    the 'reference' that computes and stores all scores. ``own_program``: the step is rooftop's program as XLA schedules
    it. Its pipeline stages pass from slot to slot together, and on TPUs nothing hides behind attention kernels, which
    XLA takes to need no time. Published runs are tuned: each stage goes on as soon as it can, and all computation hides
    transfers. ``narrow_gradients``: gradients of weights are multiplied in the dtype of the layers' matmuls too, as
    Transformer Engine does; our program multiplies them in that of activations. ``fused_attention_gradients``: all
    gradients of attention come from one kernel, as with ``use_fused_bwd_kernel`` of splash attention on TPUs; our
    program has two. ``attention_kernels`` names kernels of another program that were counted for the chip
    (``rooftop.roofline.achievable.Fractions.kernels``), with their blocks; None are those of ours.
    """

    closed = True

    hidden: Mapping[str, float] = field(default_factory=dict)
    attention: Literal["flash", "reference"] = "flash"
    attention_block: int | None = None
    calibration: float = 1.0
    own_program: bool = True
    narrow_gradients: bool = False
    fused_attention_gradients: bool = False
    attention_kernels: str | None = None

    def __post_init__(self) -> None:
        require_shares(self.hidden, HIDDEN, "assume")
        if self.attention not in ("flash", "reference"):
            raise unknown("attention", self.attention, ("flash", "reference"))
        if self.attention_block is not None and self.attention_block < 1:
            raise RooftopError("attention_block", self.attention_block, "a positive whole number")
        if self.calibration <= 0:
            raise RooftopError("calibration", self.calibration, "a positive factor")

    def kernel(self, chip_kind: str) -> AttentionKernel:
        """The attention kernel of programs for a kind of chip, 'tpu' or 'gpu'."""
        return "reference" if self.attention == "reference" else KERNEL_OF_CHIP[chip_kind]

    def shares(self, schedule: Overlap) -> dict[str, float]:
        """The share of each transfer that may hide: as given, else by the compiler's schedule, else ``HIDDEN``."""
        return {**HIDDEN, **schedule.hidden, **self.hidden}

    def with_hidden(self, text: str) -> Assumptions:
        """These assumptions with some changed, from 'weight_gather=1,tensor=0.5'."""
        return replace(self, hidden={**self.hidden, **parse_shares(text, HIDDEN, "assume")})
