"""One step of a serving engine: new tokens of some sequences through the model, over a paged KV cache.

The layers are those of ``programs.model.transformer``, except between the projections of queries and of outputs. Layers
are not scanned: on CPUs and GPUs a scan would copy each layer's weights, and its cache, out of their stack.

Dims: R rows (sequences), C new tokens of each, P pages of its block table, D model, V vocabulary. To the layers, all
T = R C tokens are one sequence [1, T]; only attention separates rows. Rows of C = 1 generate; others prefill chunks of
prompts. A step may have both kinds, and then reads its weights once for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import P, lax, named_scope
from jax.sharding import AbstractMesh, Mesh, NamedSharding, reshard
from jaxtyping import Array, Float, Float32, Int, Int32

from rooftop.arrays.rules import EXPERT_AXES, Rules, ways
from rooftop.core.rounding import next_multiple
from rooftop.models import ModelConfig
from rooftop.models.program_sizes import cache_row
from rooftop.models.segments import LayerKind, segments, stage_layers
from rooftop.models.widths import HeadSplit
from rooftop.programs.attention.scores import Scores
from rooftop.programs.model import loss as losses
from rooftop.programs.model.layer import Computation, qkv, transform
from rooftop.programs.model.mla import latents
from rooftop.programs.model.positions import rotation
from rooftop.programs.model.transformer import embed, final_norm
from rooftop.programs.parameters import (
    Attention,
    Batch,
    LatentAttention,
    Layer,
    Parameter,
    Transformer,
    abstract,
    describe,
    of_layers,
)
from rooftop.programs.serving.groups import DeviceGroups
from rooftop.programs.serving.paged import PageParts, Pages, Rows, attend_heads, attend_latents
from rooftop.programs.serving.quantised import in_full, layer_in_full
from rooftop.programs.serving.sampling import Adjustments, SampledChoice, choose, largest_of_parts, log_probabilities
from rooftop.programs.sharding import Specs, axes_of, on_shards

#: The columns of a step's integers before its tokens: [R, HEAD + C + P] int32, floats as their bits.
START, COUNT, SLOT, TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED, DRAWN, ADJUSTED, LOGPROBS = (
    0,
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    9,
    10,
    11,
)
HEAD = 12


@dataclass(frozen=True, kw_only=True)
class Decoder:
    """A model, and its parallelism on a mesh whose axes of more than one device are ``sizes``.

    Weights are split over tensor and context (experts over expert, D over fsdp), and padded where sizes do not divide.
    The KV cache is split over tensor by heads, over expert and fsdp by sequences, and over context by ``kv_split``:
    'batch', also by sequences, or 'seq', by the tokens of each page. Key/value heads that devices have in common are
    stored on each of them, weights and cache (``HeadSplit``). Latents are replicated along tensor. ``reader`` is one of
    ``rooftop.programs.serving.paged.READERS``, ``alternatives`` the limit of ``log_probabilities``. Rows of the cache
    and of the embedding table are of whole ``lanes``. With
    ``weights_left``, on one device, weights of attention and MLPs are left operands of their matmuls, all of them
    ``Turned``.

    Of ``stages`` pipeline stages this is the decoder of one, ``stage``: it has ``stage_layers`` of the model and their
    cache. Each stage is a program on devices of its own; the residual stream goes from one to the next.
    """

    model: ModelConfig
    sizes: tuple[tuple[str, int], ...] = ()
    kv_split: str = "seq"
    page_tokens: int = 16
    dtype: str = "float32"
    quantised_cache: bool = False
    reader: str = "gather"
    expert_matmul: str = "batched"
    alternatives: int = 20
    lanes: int = 1
    weights_left: bool = False
    stages: int = 1
    stage: int = 0

    @cached_property
    def layers(self) -> range:
        """The layers of this stage."""
        return stage_layers(self.model.layers, self.stages)[self.stage]

    @property
    def is_first(self) -> bool:
        """True if this stage looks up the tokens."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """True if this stage computes logits."""
        return self.stage == self.stages - 1

    @cached_property
    def tensor(self) -> int:
        """Devices along the tensor axis."""
        return dict(self.sizes).get("tensor", 1)

    @cached_property
    def specs(self) -> Specs:
        """Specs of arrays. The residual stream is split only with experts, whose exchange needs it, and over fsdp."""
        rules = Rules().only(dict(self.sizes))
        parameters, activations = dict(rules.parameters), dict(rules.activations)
        # Neighbours along context have query heads of the same key/value head.
        columns = tuple(axis for axis in ("tensor", "context") if axis in dict(self.sizes))
        # Devices along expert have their own sequences, in attention too, and their own part of the logits of all.
        expert, width = activations["expert"] if self.model.moe is not None else (), parameters["embed"]
        for table in (parameters, activations):
            table |= dict.fromkeys(("heads", "mlp", "expert_mlp"), columns)
            table["vocab"] = (*expert, *columns)
        spread = bool(width) or self.model.moe is not None
        activations |= {"batch": (), "embed": width, "seq": (*expert, *width)}
        activations["residual_seq"] = (*expert, *columns) if spread else ()
        return Specs(Rules(parameters=parameters, activations=activations))

    @cached_property
    def heads(self) -> HeadSplit:
        """Query and key/value heads over tensor; context splits the query heads of a group further."""
        return HeadSplit.of(self.model, self.tensor, math.prod(size for _, size in self._along("context")))

    @cached_property
    def described(self) -> Transformer[Parameter]:
        """The weights as this decoder stores them."""
        whole = describe(self.model, self.specs.ways(dict(self.sizes)), stationary=True, lanes=self.lanes)
        return whole if self.stages == 1 else of_layers(whole, self.model, self.layers)

    @cached_property
    def groups(self) -> DeviceGroups:
        """Groups of devices over which sequences are spread."""
        return DeviceGroups(
            tokens=self._along("expert") + self._along("fsdp"),
            heads=self._along("context") if self.kv_split == "batch" else (),
        )

    @cached_property
    def parts(self) -> PageParts:
        """Parts into which the tokens of a page are split."""
        return PageParts(heads=self._along("context") if self.kv_split == "seq" else ())

    @property
    def logits_spec(self) -> P:
        """Spec of the logits [n, V] of a step; a step sends only the likeliest token of each device's part."""
        (columns,) = self.specs.parameter(("vocab", "embed"))
        return P(None, columns)

    @property
    def logits_stored(self) -> int:
        """V of these logits, padding included."""
        return next_multiple(self.model.vocab, ways(dict(self.sizes), *axes_of(self.logits_spec.partitions[1])))

    @property
    def token_parts(self) -> int:
        """Tokens of a step are a multiple of it: devices have equal parts of the residual stream."""
        activations, sizes = self.specs.rules.activations, dict(self.sizes)
        return math.lcm(ways(sizes, *activations["seq"]), ways(sizes, *activations["residual_seq"]))

    @property
    def least_rows(self) -> int:
        """Rows of a step that generates are a multiple of it, so that groups have equal parts of them too."""
        return math.lcm(self.groups.ways, self.token_parts)

    def _along(self, axis: str) -> tuple[tuple[str, int], ...]:
        return tuple((name, size) for name, size in self.sizes if name == axis)

    @cached_property
    def computation(self) -> Computation:
        """Options of the layers."""
        return Computation(
            model=self.model,
            rules=self.specs.rules,
            expert_matmul=self.expert_matmul,
            experts_gather=True,
            weights_left=self.weights_left,
        )

    @property
    def kinds(self) -> Iterator[LayerKind]:
        """The kind of each layer of this stage, from the first to the last."""
        every = (kind for run in segments(self.model) for _ in range(run.repeats) for kind in run.kinds)
        yield from islice(every, self.layers.start, self.layers.stop)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """Shape of a page of a layer's pool, over all devices; see ``rooftop.programs.serving.paged``."""
        heads = 1 if self.model.mla is not None else len(self.heads.cached)
        if self.reader == "ragged":
            return (self.page_tokens, 2 * heads, self.model.d_head)
        rows, size = cache_row(self.model, self.lanes, quantised=self.quantised_cache)
        return (rows, heads, self.page_tokens, size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers of this stage, on all its devices together."""
        item = 1 if self.quantised_cache else jnp.dtype(self.dtype).itemsize
        *rows, size = self.page_shape
        scale = 4 if self.quantised_cache else 0
        copies = self.tensor if self.model.mla is not None else 1
        return len(self.layers) * math.prod(rows) * (size * item + scale) * copies

    @property
    def cache_spec(self) -> P:
        """Spec of a layer's pool [pages + 1, *page_shape]."""
        heads = "tensor" if self.tensor > 1 and self.model.mla is None else None
        return P(self.groups.axes or None, None, heads, self.parts.axes or None, *(None for _ in self.page_shape[3:]))

    def abstract_pools(self, pages: int, mesh: Mesh | AbstractMesh) -> tuple[Pages, ...]:
        """Shapes and shardings of the pools of this stage's layers: ``pages`` pages, and a last one for padding.

        With several ``groups`` each has an equal part of the pages, and its own last one for padding.
        """
        spec, shape = self.cache_spec, (pages + 1, *self.page_shape)
        dtype = jnp.int8 if self.quantised_cache else jnp.dtype(self.dtype)
        values = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        place = NamedSharding(mesh, P(*spec.partitions[:-1]))
        scales = jax.ShapeDtypeStruct(shape[:-1], jnp.float32, sharding=place) if self.quantised_cache else None
        pool: Any = Pages(values=values, scales=scales)  # type: ignore[arg-type]
        return (pool,) * len(self.layers)

    @property
    def handed_spec(self) -> P:
        """Spec of the residual stream between two stages: no part of it is sent more than once, if D divides."""
        batch, tokens, width = self.specs.residual.partitions
        (columns,) = self.specs.activation("mlp")
        if tokens is None and width is None and self.model.d_model % ways(dict(self.sizes), *axes_of(columns)) == 0:
            return P(batch, None, columns)
        return self.specs.residual

    def abstract_stream(self, tokens: int, mesh: Mesh | AbstractMesh) -> jax.ShapeDtypeStruct:
        """Shape and sharding of the residual stream [1, T, D] that a stage hands to the next one."""
        place = NamedSharding(mesh, self.handed_spec)
        return jax.ShapeDtypeStruct((1, tokens, self.model.d_model), jnp.dtype(self.dtype), sharding=place)

    def abstract_weights(self, mesh: Mesh | AbstractMesh) -> Transformer[jax.ShapeDtypeStruct]:
        """Shapes and shardings of the weights in stacks, the form in which checkpoints are read."""
        return abstract(self.described, mesh, self.specs, jnp.dtype(self.dtype))


def by_layer(decoder: Decoder, stacks: Transformer[Any]) -> Transformer[Any]:
    """Weights layer by layer, the form that this module uses.

    Leaves in layers of ``stacks`` are sequences over their stacks' first dim. In the result, ``layers[l][0]`` are the
    weights of layer l of the stage, without a leading dim.
    """
    by_index = dict[int, Layer[Any]]()
    for segment, periods in zip(segments(decoder.model), stacks.layers, strict=True):
        for position, stack in enumerate(periods):
            leaves, tree = jax.tree.flatten(stack, is_leaf=lambda leaf: isinstance(leaf, tuple))
            own = [repeat for repeat in range(segment.repeats) if segment.layer(position, repeat) in decoder.layers]
            for at, repeat in enumerate(own):
                layer = jax.tree.unflatten(tree, [leaf[at] for leaf in leaves])
                by_index[segment.layer(position, repeat)] = layer
    return replace(stacks, layers=tuple((by_index[layer],) for layer in decoder.layers))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chosen:
    """The token of each row, its log-probability, and the likeliest tokens' log-probabilities and ids.

    There are no log-probabilities if no row needs more than the likeliest token.
    """

    tokens: Int32[Array, " R"]
    logprobs: Float32[Array, " R"] | None = None
    top: Float32[Array, "R A"] | None = None
    top_ids: Int32[Array, "R A"] | None = None


def step(
    weights: Transformer[Any],
    pools: tuple[Pages, ...],
    packed: Sequence[Int32[Array, "_R _columns"]],
    how: Decoder,
    *,
    widths: Sequence[int],
    every: bool = False,
    stream: Float[Array, "1 T D"] | None = None,
) -> tuple[Int32[Array, " chosen"], Float32[Array, "chosen V"], tuple[Pages, ...]]:
    """The likeliest next token of each row and its logits, and the pools with the new tokens' keys and values.

    Logits are split over V as ``Decoder.logits_spec`` says, and padded.

    Each of ``packed`` [R, HEAD + C + P] has the columns named above, C = ``widths`` tokens, of which ``COUNT`` are
    valid, and block tables. Rows of different ``packed`` are concatenated. Tokens are meaningful only for rows whose
    prompt is complete. ``choose_tokens`` is for rows that do not take the likeliest token.

    With ``every``, the next token after each of the T tokens. This verifies guesses: a guess is accepted if it equals
    the token chosen after its predecessor. The probability of acceptance is then the one that the model gives the
    guess, and the replacement of a rejected guess has the model's distribution without it: the rejection rule
    (Leviathan et al. 2023) for deterministic guesses. The last of several stages gets the ``stream`` of the stage
    before. Runs under ``jax.set_mesh``.
    """
    tokens, rows = _unpacked(packed, widths)
    x, pools = _stream(weights, pools, tokens, rows, how, stream)
    last, first = list[jax.Array](), 0
    for block in rows:
        last.append(first + jnp.arange(len(block.count)) * block.width + jnp.maximum(block.count, 1) - 1)
        first += block.tokens
    # Where every row has room for one token, that is its last: no token is left out.
    some = not every and any(width > 1 for width in widths)
    logits = _logits(x, weights, jnp.concatenate(last) if some else None, how)
    with named_scope("sample"):
        return largest_of_parts(logits), logits, pools


def through_stage(
    weights: Transformer[Any],
    pools: tuple[Pages, ...],
    packed: Sequence[Int32[Array, "_R _columns"]],
    how: Decoder,
    *,
    widths: Sequence[int],
    stream: Float[Array, "1 T D"] | None = None,
) -> tuple[Float[Array, "1 T D"], tuple[Pages, ...]]:
    """The residual stream after the layers of a stage before the last one, and its pools; otherwise as ``step``.

    ``stream`` is that of the stage before; None in the first stage.
    """
    tokens, rows = _unpacked(packed, widths)
    return _stream(weights, pools, tokens, rows, how, stream)


def _unpacked(
    packed: Sequence[Int32[Array, "_R _columns"]], widths: Sequence[int]
) -> tuple[Int32[Array, "1 T"], tuple[Rows, ...]]:
    rows = tuple(
        Rows(tables=block[:, HEAD + width :], start=block[:, START], count=block[:, COUNT], width=width)
        for block, width in zip(packed, widths, strict=True)
    )
    tokens = [block[:, HEAD : HEAD + width].reshape(-1) for block, width in zip(packed, widths, strict=True)]
    return jnp.concatenate(tokens)[None], rows


def propose(
    weights: Transformer[Any], pools: tuple[Pages, ...], packed: Int32[Array, "R columns"], how: Decoder, *, most: int
) -> tuple[Int32[Array, "R most"], tuple[Pages, ...]]:
    """``most`` guesses of a draft model at the tokens after the one token of each row, the likeliest each time.

    ``packed`` as for ``step`` with C = 1. For a row with ``COUNT`` 1 + g, the first g guesses are valid. Afterwards the
    pools have the keys and values of the token and of these guesses, so that the next round can begin after any of
    them.
    """
    tables, start = packed[:, HEAD + 1 :], packed[:, START]

    def guess(
        carry: tuple[jax.Array, tuple[Pages, ...]], index: jax.Array
    ) -> tuple[tuple[jax.Array, tuple[Pages, ...]], jax.Array]:
        tokens, pools = carry
        count = (index < packed[:, COUNT]).astype(jnp.int32)
        rows = Rows(tables=tables, start=start + index, count=count, width=1)
        x, pools = _stream(weights, pools, tokens[None], (rows,), how)
        tokens = largest_of_parts(_logits(x, weights, None, how))
        return (tokens, pools), tokens

    (_, pools), guesses = lax.scan(guess, (packed[:, HEAD], pools), jnp.arange(most + 1, dtype=jnp.int32))
    return guesses[:most].T, pools


def heads_of_each(packed: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
    """The heads [R C, HEAD] of a step with ``every``: the token after each position is drawn as its own number.

    Only the first token of a row can have adjustments.
    """
    index = np.tile(np.arange(width, dtype=np.int32), len(packed))
    rows = np.repeat(packed[:, :HEAD], width, axis=0)
    rows[:, DRAWN] += index
    rows[:, ADJUSTED] *= index == 0
    return rows


def only_likeliest(heads: npt.NDArray[np.int32]) -> bool:
    """True if all of these rows [R, HEAD] take the likeliest token and ask for nothing else."""
    return not heads[:, (TEMPERATURE, ADJUSTED, LOGPROBS)].any()


def _stream(
    weights: Transformer[Any],
    pools: tuple[Pages, ...],
    tokens: Int[Array, "1 T"],
    rows: tuple[Rows, ...],
    how: Decoder,
    x: Float[Array, "1 T D"] | None = None,
) -> tuple[Float[Array, "1 T D"], tuple[Pages, ...]]:
    """The residual stream of ``tokens`` after the layers, and the pools with their keys and values.

    ``x`` is the stream before the layers (None: looked up). After the last layer of the model it is normalised.
    """
    model, computation = how.model, how.computation
    positions = jnp.concatenate([block.positions().reshape(-1) for block in rows])[None]
    positions = jnp.minimum(positions, model.max_seq_len - 1)
    if x is None:
        with named_scope("embed"):
            x = embed(weights, Batch(tokens=tokens, targets=tokens, positions=positions), computation)
    else:
        with named_scope("pipeline"):
            x = reshard(x, how.specs.residual)
    with named_scope("layers"):
        with named_scope("attn"), named_scope("rope"):
            turns = {local: rotation(model, positions, local=local) for local in (False, True)}
        written = list[Pages]()
        for kind, (layer,), pool in zip(how.kinds, weights.layers, pools, strict=True):
            layer = layer_in_full(layer, jnp.dtype(how.dtype))
            local = kind.window is not None and model.rope_local_theta is not None
            own = turns[local] if kind.rope and model.positions == "rope" else None
            heads = PagedHeads(layer=layer.attn, turns=own, window=kind.window, rows=rows, how=how)
            x, _ = transform(x, layer, partial(heads, pool=pool, written=written), None, computation)
    if how.is_last:
        return final_norm(x, weights, computation), tuple(written)
    with named_scope("pipeline"):
        return reshard(x, how.handed_spec), tuple(written)


def _logits(
    x: Float[Array, "1 T D"], weights: Transformer[Any], which: Int[Array, " n"] | None, how: Decoder
) -> Float32[Array, "n V"]:
    """Logits of the tokens ``which`` of x (None: all), V split as the unembedding is; minus infinity in its padding."""
    with named_scope("unembed"):
        # The unembedding has all of D, so that no sums of logits are added up.
        # One dim and axis after the other: XLA:TPU would gather several by an AllReduce.
        _, tokens, *width = how.specs.residual.partitions
        expert = tuple(axis for axis in axes_of(tokens) if axis in EXPERT_AXES)
        for spec in (P(None, expert or None, *width), P(None, None, *width), P(None, None, None)):
            x = reshard(x, spec)
        picked = x
        picked = picked if which is None else picked[:, which]
        tied = weights.unembed is None
        matrix = weights.embed[:, : how.model.d_model].T if tied else in_full(weights.unembed, x.dtype)
    vocab = how.model.vocab
    logits = losses.logits(picked, matrix, how.model.final_softcap, vocab=vocab, left=how.weights_left)
    return logits[0]


def choose_tokens(
    logits: Float32[Array, "R V"], adjustments: Adjustments, heads: Int32[Array, "R HEAD"], how: Decoder
) -> tuple[Chosen, Adjustments]:
    """Tokens chosen by logits and the options in each row's head, and the updated adjustments.

    The chosen tokens of requests with ``ADJUSTED`` are counted as seen.
    """
    logits = reshard(logits, P(None, None))[:, : how.model.vocab]

    def float_column(column: int) -> jax.Array:
        return lax.bitcast_convert_type(heads[:, column], jnp.float32)

    slots, adjusted = heads[:, SLOT], heads[:, ADJUSTED]
    choice = SampledChoice(
        temperature=float_column(TEMPERATURE),
        top_k=heads[:, TOP_K],
        top_p=float_column(TOP_P),
        min_p=float_column(MIN_P),
        seed=lax.bitcast_convert_type(heads[:, SEED : SEED + 2], jnp.uint32),
        drawn=heads[:, DRAWN],
    )
    any_adjusted = jnp.any(adjusted > 0)
    changed = lax.cond(
        any_adjusted,
        lambda: jnp.where(adjusted[:, None] > 0, adjustments.apply(logits, slots), logits),
        lambda: logits,
    )
    tokens = choose(changed, choice)
    adjustments = replace(adjustments, seen=adjustments.seen.at[slots, tokens].add(adjusted))
    count = min(how.alternatives, logits.shape[1])

    def with_log_probabilities() -> tuple[jax.Array, jax.Array, jax.Array]:
        return log_probabilities(logits, tokens, count)

    def without() -> tuple[jax.Array, jax.Array, jax.Array]:
        zeros = jnp.zeros((len(heads), count), jnp.float32)
        return zeros[:, 0], zeros, zeros.astype(jnp.int32)

    logprobs, top, top_ids = lax.cond(jnp.any(heads[:, LOGPROBS] > 0), with_log_probabilities, without)
    return Chosen(tokens=tokens, logprobs=logprobs, top=top, top_ids=top_ids), adjustments


#: Most heads of a device whose matmuls are written one by one; more would make programs long.
_HEADS_APART = 32


def multiply_heads(
    x: Float[Array, "B T N size"], weights: Float[Array, "N size columns"], lanes: int
) -> Float[Array, "B T N columns"]:
    """Each head of x times its own matrix.

    With ``lanes``, on a TPU, one head after the other: XLA:TPU multiplies a batch of so few rows many times slower.
    """
    heads = len(weights)
    if lanes == 1 or heads > _HEADS_APART:
        return jnp.einsum("btns,nsc->btnc", x, weights)
    return jnp.stack([x[:, :, head] @ weights[head] for head in range(heads)], axis=2)


@dataclass(frozen=True, kw_only=True)
class PagedHeads:
    """The attention heads of one layer over its pool; ``turns`` are its rotary angles, ``rows`` have the new tokens."""

    layer: Attention[jax.Array] | LatentAttention[jax.Array]
    turns: Float32[Array, "*turns"] | None
    window: int | None
    rows: tuple[Rows, ...]
    how: Decoder

    def __call__(self, normed: Float[Array, "1 T D"], pool: Pages, written: list[Pages]) -> Float[Array, "1 T N d_v"]:
        """Outputs of all heads for the normalised stream; the updated pool is appended to ``written``."""
        heads = self._latent(normed, pool) if isinstance(self.layer, LatentAttention) else self._plain(normed, pool)
        written.append(heads[1])
        return heads[0]

    @property
    def _scores(self) -> Scores:
        return Scores.of(self.how.model, self.window)

    @property
    def _typed(self) -> bool:
        """False with a Pallas kernel: the type of its outputs does not say over which axes they vary."""
        return self.how.reader not in ("ragged", "rows", "kernel")

    def _specs(self, pool: Pages) -> tuple[P, P, Pages, tuple[Rows, ...]]:
        """Specs of arrays by heads, of arrays by key/value heads, of the pool and of the rows."""
        specs, spec = self.how.specs, self.how.cache_spec
        scales = None if pool.scales is None else P(*spec.partitions[:-1])
        return (
            specs.activation("batch", "seq", "heads", None),
            specs.activation("batch", "seq", "kv_heads", None),
            Pages(values=spec, scales=scales),  # type: ignore[arg-type]
            tuple(replace(block, tables=P(None, None), start=P(None), count=P(None)) for block in self.rows),  # type: ignore[arg-type]
        )

    def _plain(self, normed: Float[Array, "1 T D"], pool: Pages) -> tuple[Float[Array, "1 T N d_v"], Pages]:
        assert isinstance(self.layer, Attention)
        q, k, v = qkv(normed, self.layer, self.turns, self.how.computation)
        sinks = self.layer.sinks
        by_heads, by_kv_heads, of_pool, of_rows = self._specs(pool)

        def local(
            q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, pool: Pages, rows: tuple[Rows, ...]
        ) -> tuple[jax.Array, Pages]:
            if sinks is not None:
                sinks = self.how.groups.of_heads(sinks)

            def attend(
                q: jax.Array, new: tuple[jax.Array, ...], pool: Pages, rows: tuple[Rows, ...]
            ) -> tuple[jax.Array, Pages]:
                return attend_heads(self.how.reader, self._scores, q, new[0], new[1], sinks, pool, rows, self.how.parts)

            o, pool = self.how.groups.attend(attend, q[0], (k[0], v[0]), pool, rows)
            return o[None], pool

        sink_spec = None if sinks is None else jax.typeof(sinks).sharding.spec
        specs_in = (by_heads, by_kv_heads, by_kv_heads, sink_spec, of_pool, of_rows)
        over = on_shards(local, in_specs=specs_in, out_specs=(by_heads, of_pool), check_vma=self._typed)
        with named_scope("core"):
            result: tuple[jax.Array, Pages] = over(q, k, v, sinks, pool, self.rows)
        return result

    def _latent(self, normed: Float[Array, "1 T D"], pool: Pages) -> tuple[Float[Array, "1 T N d_v"], Pages]:
        assert isinstance(self.layer, LatentAttention)
        model, specs, mla = self.how.model, self.how.specs, self.how.model.mla
        assert mla is not None
        q, latent, shared = latents(normed, self.layer, self.turns, model, mla, specs)
        by_heads, _, of_pool, of_rows = self._specs(pool)
        up_spec = specs.in_use(None, "heads", None)
        whole = specs.activation("batch", "seq", None)

        def local(
            q: jax.Array, latent: jax.Array, shared: jax.Array, up: jax.Array, pool: Pages, rows: tuple[Rows, ...]
        ) -> tuple[jax.Array, Pages]:
            of_keys, of_values = jnp.split(up, [mla.d_nope], axis=-1)
            plain, turned = jnp.split(q, [mla.d_nope], axis=-1)
            absorbed = jnp.concatenate(
                [multiply_heads(plain, of_keys.transpose(1, 2, 0), self.how.lanes), turned], axis=-1
            )

            def attend(
                q: jax.Array, new: tuple[jax.Array, ...], pool: Pages, rows: tuple[Rows, ...]
            ) -> tuple[jax.Array, Pages]:
                return attend_latents(self.how.reader, self._scores, q, new[0], new[1], pool, rows, self.how.parts)

            o, pool = self.how.groups.attend(attend, absorbed[0], (latent[0], shared[0]), pool, rows)
            return multiply_heads(o[None], of_values.transpose(1, 0, 2), self.how.lanes), pool

        specs_in = (by_heads, whole, whole, up_spec, of_pool, of_rows)
        over = on_shards(local, in_specs=specs_in, out_specs=(by_heads, of_pool), check_vma=self._typed)
        with named_scope("core"):
            latent, shared = (reshard(x, whole) for x in (latent, shared))
            up = reshard(self.layer.kv_up, up_spec)
            result: tuple[jax.Array, Pages] = over(q, latent, shared, up, pool, self.rows)
        return result
