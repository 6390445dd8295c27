"""The kinds of attention: what each counts, projects, keeps and caches.

An ``AttentionKind`` is all that counting, remat policies, training plans and serving plans know of attention. A new
variant is a new class here, and a program.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

from rooftop.models.config import MLA, ModelConfig

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    #: A size, or one per strategy of a sweep.
    Size: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True)
class MatmulShape:
    """One weight matrix on one device after its gather, [k, n]; a gate and an up count as one of twice the columns."""

    k: Size
    n: Size

    @property
    def parameters(self) -> Size:
        """Elements of the gathered weight."""
        return self.k * self.n


def parameters(matmuls: Iterable[MatmulShape]) -> Size:
    """Elements of all the weights together."""
    import numpy as np

    total: Size = sum((m.parameters for m in matmuls), np.zeros(()))
    return total


@dataclass(frozen=True, kw_only=True)
class AttentionMatmuls:
    """The projections of a layer's attention on one device.

    ``latent`` have no heads: each device has them whole, and applies them to its own part of the sequence. ``into``
    make the queries, keys and values of a device's heads; ``out`` sums over its heads.
    """

    latent: tuple[MatmulShape, ...] = ()
    into: tuple[MatmulShape, ...]
    out: tuple[MatmulShape, ...]

    @property
    def every(self) -> tuple[MatmulShape, ...]:
        """All of them."""
        return self.latent + self.into + self.out


@dataclass(frozen=True, kw_only=True)
class AttentionWeight:
    """A tensor of a layer's attention, in the scope ``layers/attn/{part}``; ``dims`` are those that split a vector."""

    part: str
    name: str
    shape: tuple[int, ...]
    matmul: bool = True
    dims: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AttentionWidths:
    """Elements per token: of all projections, of rotated queries and keys, and of what a rotation leaves unread."""

    projected: int
    rotated: int
    unrotated: int


class AttentionKind(Protocol):
    """Sizes of a model's attention, for counting and plans."""

    @property
    def head_sizes(self) -> tuple[int, int]:
        """Head size of queries and keys, and of values."""
        ...

    @property
    def cached(self) -> int:
        """Elements cached per token and layer."""
        ...

    @property
    def cached_together(self) -> int:
        """Cached elements that share a scale in a narrow cache: those of a head's key or value, or of a latent."""
        ...

    @property
    def cached_heads(self) -> int | None:
        """Heads of the cache, over which tensor parallelism splits it; None where all heads share what is cached."""
        ...

    @property
    def decode_width(self) -> int:
        """Multiply-adds per query head and cached token of a generate step."""
        ...

    @property
    def decode_sizes(self) -> tuple[int, int]:
        """Elements of a head's query and output in the core of a generate step."""
        ...

    @property
    def gathers_stream(self) -> bool:
        """True if queries come from the residual stream itself, which is then gathered over tensor."""
        ...

    @property
    def widths(self) -> AttentionWidths:
        """Elements per token of what a layer's attention computes before its core."""
        ...

    def weights(self) -> Iterator[AttentionWeight]:
        """The tensors of a layer's attention, norms excepted."""
        ...

    def norms(self) -> Iterator[tuple[str, int]]:
        """Name and size of the norms inside attention."""
        ...

    def matmuls(self, heads: Size, kv_heads: Size) -> AttentionMatmuls:
        """The projections on a device that has ``heads`` query heads and ``kv_heads`` key/value heads."""
        ...


def attention_kind(config: ModelConfig) -> AttentionKind:
    """The kind of attention of a model."""
    return GroupedQueries(config) if config.mla is None else LatentKeys(config, config.mla)


@dataclass(frozen=True)
class GroupedQueries:
    """Multi-head attention in which groups of query heads share a key/value head; with one group each, plain MHA."""

    config: ModelConfig

    @property
    def head_sizes(self) -> tuple[int, int]:
        """See ``AttentionKind``."""
        return self.config.d_head, self.config.d_head

    @property
    def cached(self) -> int:
        """See ``AttentionKind``: 2 K H."""
        return 2 * self.config.kv_heads * self.config.d_head

    @property
    def cached_together(self) -> int:
        """See ``AttentionKind``."""
        return self.config.d_head

    @property
    def cached_heads(self) -> int | None:
        """See ``AttentionKind``."""
        return self.config.kv_heads

    @property
    def decode_width(self) -> int:
        """See ``AttentionKind``."""
        return 2 * self.config.d_head

    @property
    def decode_sizes(self) -> tuple[int, int]:
        """See ``AttentionKind``."""
        return self.head_sizes

    @property
    def gathers_stream(self) -> bool:
        """See ``AttentionKind``."""
        return True

    @property
    def widths(self) -> AttentionWidths:
        """See ``AttentionKind``."""
        queries, keys = self.config.heads * self.config.d_head, self.config.kv_heads * self.config.d_head
        gate = queries if self.config.attn_gate else 0
        return AttentionWidths(projected=queries + gate + 2 * keys, rotated=queries + keys, unrotated=keys + gate)

    def weights(self) -> Iterator[AttentionWeight]:
        """See ``AttentionKind``."""
        config = self.config
        d_model, head = config.d_model, config.d_head
        for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)):
            yield AttentionWeight(part="qkv", name=name, shape=(d_model, heads, head))
            if config.qkv_bias:
                dims = ("heads" if name == "q" else "kv_heads",)
                yield AttentionWeight(part="qkv", name=f"{name}_bias", shape=(heads, head), matmul=False, dims=dims)
        if config.attn_gate:
            yield AttentionWeight(part="qkv", name="gate", shape=(d_model, config.heads, head))
        if config.attention_sinks:
            yield AttentionWeight(part="core", name="sinks", shape=(config.heads,), matmul=False, dims=("heads",))
        yield AttentionWeight(part="out", name="out", shape=(config.heads, head, d_model))
        if config.attn_out_bias:
            yield AttentionWeight(part="out", name="out_bias", shape=(d_model,), matmul=False)

    def norms(self) -> Iterator[tuple[str, int]]:
        """See ``AttentionKind``."""
        config = self.config
        for name, heads in (("q", config.heads), ("k", config.kv_heads)):
            if config.qk_norm == "head":
                yield f"{name}_norm", config.d_head
            elif config.qk_norm in ("heads", "width"):
                yield f"{name}_norm", heads * config.d_head

    def matmuls(self, heads: Size, kv_heads: Size) -> AttentionMatmuls:
        """See ``AttentionKind``."""
        import numpy as np

        config = self.config
        d = config.d_model * np.ones_like(heads)
        return AttentionMatmuls(
            into=(MatmulShape(d, ((1 + config.attn_gate) * heads + 2 * kv_heads) * config.d_head),),
            out=(MatmulShape(heads * config.d_head, d),),
        )


@dataclass(frozen=True)
class LatentKeys:
    """Multi-head latent attention: keys and values of all heads come from one latent (see ``MLA``).

    In a generate step the projections of keys and values are folded into queries and outputs: all heads read the
    latent.
    """

    config: ModelConfig
    mla: MLA

    @property
    def head_sizes(self) -> tuple[int, int]:
        """See ``AttentionKind``."""
        return self.mla.d_nope + self.mla.d_rope, self.mla.d_v

    @property
    def cached(self) -> int:
        """See ``AttentionKind``: the latent and the rotated key that all heads share."""
        return self.mla.kv_rank + self.mla.d_rope

    @property
    def cached_together(self) -> int:
        """See ``AttentionKind``."""
        return self.cached

    @property
    def cached_heads(self) -> int | None:
        """See ``AttentionKind``."""
        return None

    @property
    def decode_width(self) -> int:
        """See ``AttentionKind``."""
        return 2 * self.mla.kv_rank + self.mla.d_rope

    @property
    def decode_sizes(self) -> tuple[int, int]:
        """See ``AttentionKind``: those of latents."""
        return self.cached, self.mla.kv_rank

    @property
    def gathers_stream(self) -> bool:
        """See ``AttentionKind``."""
        return self.mla.q_rank is None

    @property
    def widths(self) -> AttentionWidths:
        """See ``AttentionKind``."""
        heads, mla = self.config.heads, self.mla
        queries = heads * (mla.d_nope + mla.d_rope)
        downs = (mla.q_rank or 0) + mla.kv_rank
        return AttentionWidths(
            projected=queries + heads * (mla.d_nope + mla.d_v) + downs + mla.d_rope,
            rotated=2 * queries,
            # Values are kept with the keys that they were projected with.
            unrotated=heads * (mla.d_nope + mla.d_v) + downs,
        )

    def weights(self) -> Iterator[AttentionWeight]:
        """See ``AttentionKind``."""
        d_model, heads, mla = self.config.d_model, self.config.heads, self.mla
        if mla.q_rank is None:
            yield AttentionWeight(part="qkv", name="q", shape=(d_model, heads, self.config.d_head))
        else:
            yield AttentionWeight(part="qkv", name="q_down", shape=(d_model, mla.q_rank))
            yield AttentionWeight(part="qkv", name="q_up", shape=(mla.q_rank, heads, self.config.d_head))
        yield AttentionWeight(part="qkv", name="kv_down", shape=(d_model, mla.kv_rank + mla.d_rope))
        yield AttentionWeight(part="qkv", name="kv_up", shape=(mla.kv_rank, heads, mla.d_nope + mla.d_v))
        yield AttentionWeight(part="out", name="out", shape=(heads, mla.d_v, d_model))

    def norms(self) -> Iterator[tuple[str, int]]:
        """See ``AttentionKind``."""
        yield "kv_norm", self.mla.kv_rank
        if self.mla.q_rank is not None:
            yield "q_norm", self.mla.q_rank

    def matmuls(self, heads: Size, kv_heads: Size) -> AttentionMatmuls:
        """See ``AttentionKind``: down-projections have no heads, every device has them whole."""
        import numpy as np

        mla, d, one = self.mla, float(self.config.d_model), np.ones_like(heads)
        queries = heads * (mla.d_nope + mla.d_rope)
        latent = [MatmulShape(d * one, (mla.kv_rank + mla.d_rope) * one)]
        into = [MatmulShape(mla.kv_rank * one, heads * (mla.d_nope + mla.d_v))]
        if mla.q_rank is None:
            into.append(MatmulShape(d * one, queries))
        else:
            latent.append(MatmulShape(d * one, mla.q_rank * one))
            into.append(MatmulShape(mla.q_rank * one, queries))
        return AttentionMatmuls(latent=tuple(latent), into=tuple(into), out=(MatmulShape(heads * mla.d_v, d * one),))
