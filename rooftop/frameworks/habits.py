"""Habits of a framework's train step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rooftop.core.errors import RooftopError, unknown
from rooftop.frameworks.launches import GRAPH_PARTS, GraphPart

#: Ways of keeping parameters, gradients and the optimizer's state in memory.
State = Literal["xla", "distributed_optimizer", "reserved"]


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Habits of a framework's train step: where it does something other than rooftop's programs do.

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

    ``state``: memory of parameters, gradients and optimizer: 'xla' as XLA's programs; 'distributed_optimizer' as
    Megatron-LM's, which splits the optimizer's part over copies; 'reserved' as PyTorch's allocator has it for FSDP.

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
    state: State = "xla"

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
