"""Kernels that the host of an eager framework launches for a layer, one by one.

Where they are shorter than their launches, the host sets the pace of a step. Counts are those of Megatron Core and
Transformer Engine 2.9, as their sources have them. Small kernels that PyTorch adds (casts, sums of gradients, zeros)
are not counted: a published profile of Qwen3-30B-A3B in BF16 has a third more (docs/evidence/runs.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from rooftop.core.ledger import Number
from rooftop.models.config import ModelConfig

#: Parts of a layer that can be CUDA graphs: by Megatron Core's names, and the whole 'layer'.
GraphPart = Literal["layer", "attn", "mlp", "moe_router", "moe_preprocess"]
GRAPH_PARTS: tuple[GraphPart, ...] = get_args(GraphPart)


@dataclass(frozen=True)
class Launches:
    """Kernels that the host launches in a pass over a layer."""

    forward: Number
    backward: Number

    def __add__(self, other: Launches) -> Launches:
        return Launches(self.forward + other.forward, self.backward + other.backward)

    def __mul__(self, count: Number) -> Launches:
        return Launches(self.forward * count, self.backward * count)


#: A graph is replayed once in either pass.
_GRAPH = Launches(1, 1)
_NONE = Launches(0, 0)
#: A norm; its gradient is two kernels, of inputs and of scales.
_NORM = Launches(1, 2)
#: Queries and keys rotated.
_ROTATION = Launches(2, 2)
#: One kernel; backward also products of outputs with their gradients, and a conversion of the queries' gradient.
_CORE = Launches(1, 3)
_ACTIVATION = Launches(1, 1)
#: The sum with the stream, and that of both gradients.
_RESIDUAL = Launches(1, 1)
#: Gradients of queries, keys and values put together; or those of the router's input and of the rows added.
_GRADIENTS = Launches(0, 1)
#: Two casts to float32, the matmul, the choice, and scores, sums and loss of the balance; in the backward pass those of
#: loss, scores and choice, their sum, two matmuls and two casts.
_ROUTER = Launches(7, 8)
#: Numbers of tokens by expert made whole numbers, summed, and copied to the host.
_COUNTS = Launches(3, 0)
#: A gather and a scatter over tensor for each of two blocks; backward inputs are gathered again.
_TENSOR = Launches(4, 6)


@dataclass(frozen=True)
class _Exchange:
    """Kernels of a dispatcher: before rows are sent, to send them, and to bring them back."""

    preprocess: Launches
    dispatch: Launches
    combine: Launches


#: 'experts', PyTorch's AllToAll: a histogram, the gather of all, three sums of it; then rows are put in order (a map in
#: two kernels, and a copy), sent with their weights, and sorted by expert (two); the way back is sorted, sent and
#: summed. 'nodes', DeepEP and HybridEP: the gather of the choice, two scans; sent, and put in order.
_EXCHANGES = {
    "experts": _Exchange(preprocess=Launches(5, 0), dispatch=Launches(7, 7), combine=Launches(3, 3)),
    "nodes": _Exchange(preprocess=Launches(3, 0), dispatch=Launches(2, 2), combine=Launches(2, 2)),
}


@dataclass(frozen=True, kw_only=True)
class LayerKernels:
    """A layer's kernels under a framework.

    ``quantise`` kernels make a tensor's copies in 8 bits and ``scales`` put those of both operands of a matmul in
    order; both are 0 for matmuls in 16 bits. ``experts`` of a device have kernels of their own, or one for all if they
    are ``grouped``. ``dispatch`` is that of a framework; ``tensor`` is 1 where tensor parallelism splits the layer.
    ``graphs`` are launched at once. ``again`` has 1 for each checkpoint that the backward pass makes once more.
    """

    model: ModelConfig
    quantise: float
    scales: float
    experts: Number
    grouped: bool
    dispatch: Literal["experts", "nodes"]
    tensor: Number
    graphs: tuple[GraphPart, ...] = ()
    again: Mapping[str, Number] = field(default_factory=dict)

    def of(self, *, moe: bool) -> Launches:
        """Launches of a layer with experts, or of a dense one."""
        if "layer" in self.graphs:
            return _GRAPH
        return self._attention() + (self._experts() if moe else self._mlp()) + _TENSOR * self.tensor

    def _linear(self, count: float = 1) -> Launches:
        """Matmuls with weights of their own: inputs quantised, then outputs' gradients, once for both gradients."""
        return Launches(self.quantise + self.scales + 1, self.quantise + 2 * self.scales + 2) * count

    def _graph(self, part: GraphPart, launches: Launches) -> Launches:
        return _GRAPH if part in self.graphs else launches

    def _once_more(self, **forward: Launches) -> Launches:
        """Forward launches that the backward pass repeats, by checkpoint."""
        return Launches(0, sum((self.again.get(name, 0.0) * some.forward for name, some in forward.items()), 0.0))

    def _attention(self) -> Launches:
        model, mla = self.model, self.model.mla
        if mla is None:
            norms, projections = 1 + (0 if model.qk_norm is None else 2), 1
        else:
            # Down and up for keys and values, and for queries if they have a latent.
            norms, projections = (2, 3) if mla.q_rank is None else (3, 4)
        into, out = self._linear(projections), self._linear()
        kernels = _NORM * norms + into + _ROTATION + _CORE + out + _RESIDUAL + _GRADIENTS
        again = self._once_more(attn_normed=_NORM, qkv=into, rope=_ROTATION, attn_core=_CORE, attn_out=out)
        return self._graph("attn", kernels + again)

    def _mlp(self) -> Launches:
        again = self._once_more(mlp_normed=_NORM, mlp_up=self._linear(), mlp_act=_ACTIVATION)
        return self._graph("mlp", _NORM + self._linear(2) + _ACTIVATION + _RESIDUAL + again)

    def _experts(self) -> Launches:
        moe, exchange = self.model.moe, _EXCHANGES[self.dispatch]
        assert moe is not None
        count = 1 if self.grouped else self.experts
        matmul = Launches(count * (self.quantise + 1) + self.scales, count * (self.quantise + 2) + 2 * self.scales)
        shared = self._linear(2) + _ACTIVATION if moe.shared_d_ff else _NONE
        # The graph of what comes before the exchange goes on from the router's.
        before = _NONE if "moe_preprocess" in self.graphs else exchange.preprocess
        routed = self._graph("moe_router", _NORM + _ROUTER) + before
        exchanged = exchange.dispatch + exchange.combine + _COUNTS
        again = self._once_more(mlp_normed=exchange.dispatch, mlp_up=matmul, mlp_act=_ACTIVATION)
        return routed + exchanged + matmul * 2 + _ACTIVATION + shared + _RESIDUAL + _GRADIENTS + again
