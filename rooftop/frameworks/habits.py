"""Habits of a train step: how one program does the work that the book counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rooftop.capabilities import AttentionKernel
from rooftop.core.errors import RooftopError, unknown
from rooftop.frameworks.launches import GRAPH_PARTS, GraphPart
from rooftop.frameworks.tables import data_table

#: Ways of keeping parameters, gradients and the optimizer's state in memory.
State = Literal["xla", "distributed_optimizer", "reserved"]


#: Collectives of a layer that run next to computation.
Asynchronous = Literal["none", "gathers", "all"]


@dataclass(frozen=True, kw_only=True)
class ElementwisePasses:
    """HBM passes (a read or a write of an activation) of elementwise work in one execution, by scope."""

    norm: float
    """Forward, with the residual sum before it."""
    norm_backward: float
    rope: float
    rope_backward: float
    normed_heads: float = 0.0
    """More of rope where queries and keys are normalised first."""
    act_more: float = 0.0
    """Of an activation beyond one kernel that reads inputs and writes its result, forward; backward twice as many."""
    fuses_act: bool = False
    """Activations are fused into the matmuls around them."""
    act_with_gradient: bool = True
    """An activation that is recomputed is a second result of its gradient's kernel, and not a kernel of its own."""


@cache
def _kernels() -> Mapping[str, ElementwisePasses]:
    """Passes by the name of the kernels."""
    table = data_table("kernels")
    return {
        name: ElementwisePasses(**{key: value for key, value in entry.items() if key != "source"})
        for name, entry in table.items()
    }


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Habits of a program's train step. The defaults are the book: nothing moves that a formula does not need."""

    # -- kernels
    attention_kernel: AttentionKernel = "cudnn"
    """The attention kernel, unless a plan stores all scores."""
    kernels: str = "fused"
    """Kernels of elementwise work, by their name in ``data/kernels.toml``."""
    attention_speed: float = 1.0
    """Speed of the attention kernels over that of those which the chip was measured with."""
    separate_arrays: bool = False
    """Weights that share an input are separate arrays: each reads it, and their gradients of it are summed in HBM."""
    adds_in_matmuls: bool = False
    """Matmuls of weights' gradients add to the sums over microbatches."""
    scatter_pieces: int = 0
    """Pieces of a matmul whose output is scattered next to it; 0: one for each hop of a ring, in halves."""

    # -- 8-bit matmuls
    quantises_once: bool = False
    """Weights are quantised once in a step, and activations before they are gathered."""
    quantising_reads: float = 1.0
    """Times that an activation is read to be quantised: 2 where its largest value is needed first."""
    quantised_copies: float = 1.0
    """Layouts in which it is then written."""

    # -- launches
    launch_s: float = 0.0
    """Seconds of the host for each kernel of a layer that it launches; 0 where the host is never waited for."""
    graphs: tuple[GraphPart, ...] = ()
    """Parts of a layer that are CUDA graphs."""
    quantising_kernels: int = 1
    """Kernels that make the 8-bit copies of a tensor."""
    scaling_kernels: int = 0
    """Kernels that put the scales of a matmul's operands in order."""

    # -- experts
    dispatch: Literal["experts", "nodes"] = "experts"
    """A token is sent once for each of its experts, or once to each of its nodes (DeepEP, HybridEP)."""
    exchange_passes: float = 1.0
    """Times that rows of experts are read and written when they are sent to their experts, or come back."""
    hides_token_gradients: bool = False
    """Gradients of experts' weights are next to the AllToAlls of gradients of rows."""
    groups_experts: bool = True
    """Matmuls of a device's experts are one kernel, which starts once."""
    group_rows: tuple[tuple[int, int, int], ...] = ()
    """Rows of a tile of the kernels that multiply experts' rows, forward, for gradients of inputs and of weights: of up
    and gate, then of down. A tile that two experts share is multiplied for both. (): there is no such kernel."""
    group_dim: int = 0
    """Size of their tiles in the other dims; 0 where it divides them."""
    weighs_outputs: bool = False
    """Outputs of experts are weighted after the last matmul, so that gradients of the weights need them."""
    capacity: float = 1.0
    """Slots of an expert over its even share of tokens, all of which are multiplied."""
    one_hot: bool = False
    """Tokens come into slots, and back, by matmuls with masks of 0 and 1."""

    # -- loops and stacks
    unstacked_passes: float = 0.0
    """Passes that take a layer's checkpoints out of the stack of all layers."""
    unstacks_weights: bool = False
    """A device's part of a layer's weights is copied out of the stack of all layers before it is gathered."""
    cuts_padding: bool = False
    """Rows that fsdp adds are cut off once a weight is gathered, and put to its gradient: passes over the whole."""
    fills_stages: bool = False
    """Pipeline stages get layers of all kinds in order, the last stages fewer of them."""
    staged_loop: bool = False
    """Pipeline stages are one loop: each trip adds gradients and keeps a place for checkpoints, and the backward pass
    repeats attention's kernel and the experts."""
    stages_keep_all: bool = False
    """A stage has the activations of all microbatches before its backward pass, whatever the schedule."""
    lockstep: bool = False
    """All pipeline stages pass from slot to slot together, and not each at its own pace."""

    # -- transfers
    as_scheduled: bool = False
    """Transfers hide where the compiler's schedule of a layer puts them (``rooftop.plan.parts``)."""
    hides_gradients: bool = False
    """Inputs gathered for gradients of weights arrive next to matmuls of gradients of inputs, which are summed next to
    those of weights."""
    steps_between_slices: bool = False
    """Sums over slices are scattered within each, summed between them and gathered; a ring that crosses slices goes
    between hosts in every hop."""
    exposes_parts_of_nodes: bool = False
    """Nothing hides a transfer of groups over nodes with some GPUs of a node but not all."""
    hides_weight_gathers: float = 1.0
    """Share of the gathers of weights that is next to computation."""
    hides_gradient_scatters: float = 1.0
    """Share of the scatters of their gradients."""
    asynchronous: Asynchronous = "none"
    """Collectives of a layer that run next to any computation (``rooftop.plan.parts``)."""
    hides_rings: bool = False
    """The permutes of collective matmuls overlap them, so that plans may have them."""
    slow_windowed_einsums: bool = False
    """The compiler's own collective matmuls of gathered weights take longer than the matmuls that they replace."""
    sums_whole_slices: bool = False
    """A ReduceScatter over every device of a slice is an AllReduce."""
    gathers_as_sums: bool = False
    """An AllGather over every device of a slice is an AllReduce, unless an option says otherwise."""
    scatters_up_to: float | None = None
    """Devices of a ring over which gradients are scattered, times the largest prime factor of the tiles across them;
    over longer rings all is summed on every device. None: they always are."""
    scatters_tiles: bool = False
    """Gradients whose parts are no whole tiles are summed on every device."""

    # -- memory
    state: State = "xla"
    """Memory of parameters, gradients and optimizer: 'xla' as XLA's programs; 'distributed_optimizer' as Megatron-LM's,
    which splits the optimizer's part over copies; 'reserved' as PyTorch's allocator has it for FSDP."""
    headroom: float = 0.0
    """Share of usable HBM that a search leaves free."""
    vmem_share: float = 0.0
    """Share of VMEM below which arrays around attention stay there from one operation to the next, the smaller the more
    of them."""
    pads_lanes: bool = False
    """Arrays whose last dim does not fill registers are padded, and tied tables copied into whole ones."""
    table_in_pieces: bool = False
    """The unembedding is there a second time, as it arrives."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise RooftopError("capacity", self.capacity, "1 or more: slots of an expert over its even share")
        if self.group_rows and [len(rows) for rows in self.group_rows] != [3, 3]:
            raise RooftopError("group_rows", self.group_rows, "rows of tiles of up and of down: three each")
        if self.dispatch not in ("experts", "nodes"):
            raise unknown("dispatch", self.dispatch, ("experts", "nodes"))
        if self.kernels not in _kernels():
            raise unknown("kernels", str(self.kernels), tuple(_kernels()))
        if self.attention_speed <= 0:
            raise RooftopError("attention_speed", self.attention_speed, "a positive factor")
        if self.launch_s < 0:
            raise RooftopError("launch_s", self.launch_s, "seconds, 0 or more")
        for part in self.graphs:
            if part not in GRAPH_PARTS:
                raise unknown("graphs", part, GRAPH_PARTS)

    @property
    def passes(self) -> ElementwisePasses:
        """Passes of the elementwise kernels."""
        return _kernels()[self.kernels]
