"""Mixers of tokens with a state in place of a cache: their weights, their state, and the FLOPs of their recurrence.

A state has the same size whatever the sequence is, so a layer of theirs has no KV cache. Each recurrence has two
counts: ``flops``, of one token after another, and ``chunked_flops``, of the form with matmuls that kernels execute,
which repeats the products within a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from rooftop.models.config import GatedDelta, Mamba, ModelConfig

#: Tokens of a chunk in published kernels: of flash-linear-attention's gated delta rule, and of the state space duality.
DELTA_CHUNK, SPACE_CHUNK, LIGHTNING_CHUNK = 64, 256, 256
#: Bytes of an element of a state, which rounding would add up in, and of an input that a convolution waits for.
STATE_BYTES, CONV_BYTES = 4.0, 2.0


@dataclass(frozen=True, kw_only=True)
class MixerWeight:
    """A tensor of a layer's mixer, in the scope ``layers/attn/{part}``."""

    part: str
    name: str
    shape: tuple[int, ...]
    matmul: bool = True


class Recurrence(Protocol):
    """Sizes of a mixer, for counting and plans. FLOPs are of one token in one layer, projections excepted."""

    def weights(self) -> Iterator[MixerWeight]:
        """The tensors of a layer's mixer, the norm before it excepted."""
        ...

    @property
    def beside_attention(self) -> bool:
        """True if its layers have attention too, which reads the same normalised stream."""
        ...

    @property
    def state(self) -> int:
        """Elements of the state of a sequence in a layer."""
        ...

    @property
    def waiting(self) -> int:
        """Elements that the convolution keeps of a sequence in a layer."""
        ...

    @property
    def flops(self) -> float:
        """FLOPs of the convolution and of the recurrence, one token after the other."""
        ...

    @property
    def chunked_flops(self) -> float:
        """FLOPs of the same in chunks."""
        ...


def recurrences(config: ModelConfig) -> list[tuple[Recurrence, int]]:
    """The recurrent mixers of a model, each with the number of its layers."""
    kinds: list[tuple[str, Recurrence]] = [("lightning", Lightning(config))]
    if config.gated_delta is not None:
        kinds.append(("gated_delta", DeltaRule(config, config.gated_delta)))
    if config.mamba is not None:
        kinds.append(("mamba", StateSpace(config, config.mamba)))
    counts = [(kind, sum(name in mixer for mixer in config.mixers)) for name, kind in kinds]
    return [(kind, layers) for kind, layers in counts if layers]


def projections(kind: Recurrence) -> tuple[list[tuple[int, int]], list[tuple[int, int]], tuple[int, int]]:
    """Shapes of the matmuls into a mixer from D, between its channels, and out of it to D."""
    shapes = {part: [w.shape for w in kind.weights() if w.matmul and w.part == part] for part in ("qkv", "core", "out")}
    into, inside, out = ([(k, n) for k, n in shapes[part]] for part in ("qkv", "core", "out"))
    return into, inside, out[0]


def state_bytes(config: ModelConfig) -> float:
    """Bytes of the states of one sequence, over all layers: 0 for a model that has attention only."""
    return sum(layers * (kind.state * STATE_BYTES + kind.waiting * CONV_BYTES) for kind, layers in recurrences(config))


@dataclass(frozen=True)
class DeltaRule:
    """The gated delta rule (Yang et al. 2024, Gated Delta Networks, equation 10) as in Qwen3-Next."""

    config: ModelConfig
    sizes: GatedDelta

    @property
    def _channels(self) -> int:
        return 2 * self.sizes.key_heads * self.sizes.d_key + self.sizes.value_heads * self.sizes.d_value

    def weights(self) -> Iterator[MixerWeight]:
        """See ``Recurrence``: queries, keys, values and the output's gate; decay and strength of each value head."""
        d, sizes = self.config.d_model, self.sizes
        values = sizes.value_heads * sizes.d_value
        yield MixerWeight(part="qkv", name="mixer_in", shape=(d, self._channels + values))
        yield MixerWeight(part="qkv", name="mixer_gates", shape=(d, 2 * sizes.value_heads))
        yield MixerWeight(part="core", name="mixer_conv", shape=(self._channels, sizes.conv), matmul=False)
        for name in ("mixer_step_bias", "mixer_decay"):
            yield MixerWeight(part="core", name=name, shape=(sizes.value_heads,), matmul=False)
        yield MixerWeight(part="core", name="mixer_norm", shape=(sizes.d_value,), matmul=False)
        yield MixerWeight(part="out", name="mixer_out", shape=(values, d))

    @property
    def beside_attention(self) -> bool:
        """See ``Recurrence``."""
        return False

    @property
    def state(self) -> int:
        """See ``Recurrence``: d_key x d_value of each value head."""
        return self.sizes.value_heads * self.sizes.d_key * self.sizes.d_value

    @property
    def waiting(self) -> int:
        """See ``Recurrence``."""
        return self._channels * (self.sizes.conv - 1)

    @property
    def flops(self) -> float:
        """See ``Recurrence``: the state times the key, the key times what is to be written, the state times the query.

        Each is 2 d_key d_value for each value head.
        """
        return 2.0 * self._channels * self.sizes.conv + 6.0 * self.state

    @property
    def chunked_flops(self) -> float:
        """See ``Recurrence``: besides, in a chunk of C, keys x keys, queries x keys, and three products with [C, C].

        They are 2 C d_key for the first two and the first of the three, 2 C d_value for the others; the inverse of a
        triangular [C, C] takes C**2 / 3 per token (the paper's section 3.3, UT transform).
        """
        chunk, sizes = DELTA_CHUNK, self.sizes
        more = chunk * (6.0 * sizes.d_key + 4.0 * sizes.d_value) + chunk**2 / 3
        return self.flops + sizes.value_heads * more


@dataclass(frozen=True)
class StateSpace:
    """A selective state space: Mamba (Gu and Dao 2023, section 3) or Mamba-2 (Dao and Gu 2024, section 7)."""

    config: ModelConfig
    sizes: Mamba

    @property
    def _channels(self) -> int:
        """Channels of the convolution: those of version 2 include input and output vectors."""
        sizes = self.sizes
        return sizes.d_inner + (2 * sizes.groups * sizes.d_state if sizes.step_rank is None else 0)

    def weights(self) -> Iterator[MixerWeight]:
        """See ``Recurrence``."""
        d, sizes = self.config.d_model, self.sizes
        inner, state, rank = sizes.d_inner, sizes.d_state, sizes.step_rank
        into = 2 * inner if rank is not None else inner + self._channels + sizes.heads
        yield MixerWeight(part="qkv", name="mixer_in", shape=(d, into))
        yield MixerWeight(part="core", name="mixer_conv", shape=(self._channels, sizes.conv), matmul=False)
        vectors = {"mixer_conv_bias": self._channels} if sizes.conv_bias else {}
        if rank is not None:
            yield MixerWeight(part="core", name="mixer_x", shape=(inner, rank + 2 * state))
            yield MixerWeight(part="core", name="mixer_step", shape=(rank, inner))
            yield MixerWeight(part="core", name="mixer_decay", shape=(inner, state), matmul=False)
            vectors |= {"mixer_step_bias": inner, "mixer_skip": inner}
            vectors |= {"mixer_norms": rank + 2 * state} if sizes.norms else {}
        else:
            vectors |= {name: sizes.heads for name in ("mixer_step_bias", "mixer_decay", "mixer_skip")}
            vectors |= {"mixer_norm": inner} if sizes.norms else {}
        if sizes.proj_bias:
            vectors |= {"mixer_in_bias": into, "mixer_out_bias": d}
        for name, size in vectors.items():
            yield MixerWeight(part="core", name=name, shape=(size,), matmul=False)
        yield MixerWeight(part="out", name="mixer_out", shape=(inner, d))

    @property
    def beside_attention(self) -> bool:
        """See ``Recurrence``."""
        return "attention+mamba" in self.config.mixers

    @property
    def state(self) -> int:
        """See ``Recurrence``: d_state of each channel."""
        return self.sizes.d_inner * self.sizes.d_state

    @property
    def waiting(self) -> int:
        """See ``Recurrence``."""
        return self._channels * (self.sizes.conv - 1)

    @property
    def flops(self) -> float:
        """See ``Recurrence``: the input into the state, and the state into the output, 2 d_inner d_state each."""
        return 2.0 * self._channels * self.sizes.conv + 4.0 * self.state

    @property
    def chunked_flops(self) -> float:
        """See ``Recurrence``: besides, in a chunk of C, 2 C d_state for each group and 2 C for each channel.

        The first version has no such form: its decay differs for each element of the state.
        """
        sizes = self.sizes
        if sizes.step_rank is not None:
            return self.flops
        return self.flops + 2.0 * SPACE_CHUNK * (sizes.groups * sizes.d_state + sizes.d_inner)


@dataclass(frozen=True)
class Lightning:
    """Lightning attention (Qin et al. 2024): linear attention with a decay per head, as in MiniMax-Text-01."""

    config: ModelConfig

    def weights(self) -> Iterator[MixerWeight]:
        """See ``Recurrence``: queries, keys and values of all heads, the output's norm and gate."""
        d, width = self.config.d_model, self.config.heads * self.config.d_head
        yield MixerWeight(part="qkv", name="mixer_in", shape=(d, 3 * width))
        yield MixerWeight(part="qkv", name="mixer_gates", shape=(d, width))
        yield MixerWeight(part="core", name="mixer_norm", shape=(width,), matmul=False)
        yield MixerWeight(part="out", name="mixer_out", shape=(width, d))

    @property
    def beside_attention(self) -> bool:
        """See ``Recurrence``."""
        return False

    @property
    def state(self) -> int:
        """See ``Recurrence``: H x H of each head."""
        return self.config.heads * self.config.d_head**2

    @property
    def waiting(self) -> int:
        """See ``Recurrence``."""
        return 0

    @property
    def flops(self) -> float:
        """See ``Recurrence``: the key times the value into the state, and the query times the state."""
        return 4.0 * self.state

    @property
    def chunked_flops(self) -> float:
        """See ``Recurrence``: besides, queries x keys and weights x values of a chunk."""
        return self.flops + 4.0 * LIGHTNING_CHUNK * self.config.heads * self.config.d_head
