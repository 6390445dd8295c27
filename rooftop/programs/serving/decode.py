"""One step of a serving engine: new tokens of some sequences through the model, over a paged KV cache, to the next.

The layers are those of ``programs.model.transformer``; only what is between the projections of queries and the one of
outputs is other than in training. Layers are not scanned: a scan would copy each layer's weights out of their stack on
CPUs and GPUs, and its cache with them.

Dims: R rows (sequences), C new tokens of each, P pages of its block table, D model, V vocabulary. All T = R C tokens
are one sequence [1, T] to the layers; only attention tells rows apart. Rows of C = 1 generate, others prefill chunks of
prompts; a step may have both, and then reads its weights once for them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import P, lax, named_scope
from jax.sharding import AbstractMesh, Mesh, NamedSharding, reshard

from rooftop.arrays.rules import Rules
from rooftop.models import ModelConfig
from rooftop.models.segments import LayerKind, segments
from rooftop.programs.attention.scores import Scores
from rooftop.programs.model import loss as losses
from rooftop.programs.model.describe import describe
from rooftop.programs.model.layer import Computation, attention, feed_forward, qkv
from rooftop.programs.model.mla import latents
from rooftop.programs.model.positions import rotation
from rooftop.programs.model.transformer import embed, final_norm
from rooftop.programs.parameters import Attention, Batch, LatentAttention, Layer, Transformer, shardings
from rooftop.programs.serving.groups import DeviceGroups
from rooftop.programs.serving.paged import PageParts, Pages, Rows, attend_heads, attend_latents
from rooftop.programs.serving.quantised import in_full
from rooftop.programs.serving.sampling import Adjustments, SampledChoice, choose, largest, log_probabilities
from rooftop.programs.sharding import Specs, on_shards

#: The columns of a step's integers before its tokens: [R, HEAD + C + P] int32, floats by their bits.
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
    """How a model serves on a mesh whose axes of more than one device are ``sizes``.

    Weights are split over tensor and context (and experts over expert); the KV cache over tensor by heads, over expert
    by sequences, and over context by ``kv_split``: 'batch', by sequences too, or 'seq', by the tokens of each page.
    Where there are fewer key/value heads than devices along tensor, each device keeps the one that its query heads use;
    latents are alike along tensor.
    ``reader`` is of ``rooftop.programs.serving.paged``, ``alternatives`` the most of ``log_probabilities``. With
    ``weights_left``, on one device, weights of attention and MLPs are left operands of their matmuls: all ``Turned``.
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
    weights_left: bool = False

    @cached_property
    def tensor(self) -> int:
        """Devices along the tensor axis."""
        return dict(self.sizes).get("tensor", 1)

    @cached_property
    def specs(self) -> Specs:
        """Where arrays live. Only with experts is the residual stream split, since their exchange needs it."""
        rules = Rules().only(dict(self.sizes))
        parameters, activations = dict(rules.parameters), dict(rules.activations)
        # Heads of neighbours along context share a key/value head.
        columns = tuple(axis for axis in ("tensor", "context") if axis in dict(self.sizes))
        for table in (parameters, activations):
            table |= dict.fromkeys(("heads", "mlp"), columns) | {"vocab": self._dividing(columns, self.model.vocab)}
        if self.model.kv_heads % self.tensor:
            parameters["kv_heads"] = activations["kv_heads"] = ()
        # Outside the experts, too, devices along expert have sequences of their own.
        activations["batch"], activations["seq"] = (), activations["expert"] if self.model.moe is not None else ()
        activations["residual_seq"] = activations["seq"] + activations["heads"] if self.model.moe is not None else ()
        return Specs(Rules(parameters=parameters, activations=activations))

    def _dividing(self, axes: tuple[str, ...], size: int) -> tuple[str, ...]:
        """As many of ``axes``, from the first, as a dim of that size can be split over."""
        sizes = dict(self.sizes)
        while size % math.prod(sizes[axis] for axis in axes):
            axes = axes[:-1]
        return axes

    @cached_property
    def groups(self) -> DeviceGroups:
        """How sequences are spread over devices."""
        return DeviceGroups(
            tokens=self._along("expert"), heads=self._along("context") if self.kv_split == "batch" else ()
        )

    @cached_property
    def parts(self) -> PageParts:
        """How the tokens of a page are split."""
        return PageParts(heads=self._along("context") if self.kv_split == "seq" else ())

    def _along(self, axis: str) -> tuple[tuple[str, int], ...]:
        return tuple(each for each in self.sizes if each[0] == axis)

    @cached_property
    def computation(self) -> Computation:
        """What the layers are computed by."""
        return Computation(
            model=self.model, specs=self.specs, expert_matmul=self.expert_matmul, weights_left=self.weights_left
        )

    @property
    def kinds(self) -> Iterator[LayerKind]:
        """The kind of each layer, from the first to the last."""
        for segment in segments(self.model):
            for _ in range(segment.repeats):
                yield from segment.kinds

    @property
    def page_shape(self) -> tuple[int, ...]:
        """A page of a layer's pool, over all devices; see ``rooftop.programs.serving.paged``."""
        mla = self.model.mla
        if mla is not None:
            return (1, 1, self.page_tokens, mla.kv_rank + mla.d_rope)
        heads = max(self.model.kv_heads, self.tensor)
        if self.reader == "ragged":
            return (self.page_tokens, 2 * heads, self.model.d_head)
        return (2, heads, self.page_tokens, self.model.d_head)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page of all layers, on all devices together."""
        item = 1 if self.quantised_cache else jnp.dtype(self.dtype).itemsize
        *rows, size = self.page_shape
        scale = 4 if self.quantised_cache else 0
        copies = self.tensor if self.model.mla is not None else 1
        return self.model.layers * math.prod(rows) * (size * item + scale) * copies

    @property
    def cache_spec(self) -> P:
        """How a layer's pool [pages + 1, *page_shape] is split."""
        heads = "tensor" if self.tensor > 1 and self.model.mla is None else None
        return P(self.groups.axes or None, None, heads, self.parts.axes or None, *(None for _ in self.page_shape[3:]))

    def abstract_pools(self, pages: int, mesh: Mesh | AbstractMesh) -> tuple[Pages, ...]:
        """Shapes and shardings of the pools of all layers, ``pages`` pages and the last one for padding.

        Each of several ``groups`` has an equal part of them, and its own last one for padding.
        """
        spec, shape = self.cache_spec, (pages + 1, *self.page_shape)
        dtype = jnp.int8 if self.quantised_cache else jnp.dtype(self.dtype)
        values = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        place = NamedSharding(mesh, P(*spec.partitions[:-1]))
        scales = jax.ShapeDtypeStruct(shape[:-1], jnp.float32, sharding=place) if self.quantised_cache else None
        pool: Any = Pages(values=values, scales=scales)  # type: ignore[arg-type]
        return (pool,) * self.model.layers

    def abstract_weights(self, mesh: Mesh | AbstractMesh) -> Transformer[jax.ShapeDtypeStruct]:
        """Shapes and shardings of the weights in stacks, as checkpoints are read.

        Raises RooftopError where a dim does not divide over its axes.
        """
        described = describe(self.model)
        dtype = jnp.dtype(self.dtype)
        return jax.tree.map(
            lambda parameter, place: jax.ShapeDtypeStruct(parameter.shape, dtype, sharding=place),
            described,
            shardings(described, mesh, self.specs),
        )


def by_layer(model: ModelConfig, stacks: Transformer[Any]) -> Transformer[Any]:
    """Weights whose leaves in layers are sequences over their stacks' first dim, as this module takes them.

    ``layers[l][0]`` are those of layer l, without a leading dim.
    """
    found = dict[int, Layer[Any]]()
    for segment, periods in zip(segments(model), stacks.layers, strict=True):
        for position, stack in enumerate(periods):
            for repeat in range(segment.repeats):
                leaves, tree = jax.tree.flatten(stack, is_leaf=lambda leaf: isinstance(leaf, tuple))
                layer = jax.tree.unflatten(tree, [leaf[repeat] for leaf in leaves])
                found[segment.layer(position, repeat)] = layer
    return replace(stacks, layers=tuple((found[layer],) for layer in range(model.layers)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Of each row: the token [R] int32, its log-probability [R], the likeliest ones' [R, A] and their ids.

    Where no row asks for more than the likeliest token, there are no log-probabilities.
    """

    tokens: jax.Array
    logprobs: jax.Array | None = None
    top: jax.Array | None = None
    top_ids: jax.Array | None = None


def step(
    weights: Transformer[Any],
    pools: tuple[Pages, ...],
    packed: Sequence[jax.Array],
    how: Decoder,
    *,
    widths: Sequence[int],
    every: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[Pages, ...]]:
    """The likeliest next token of each row [R] and its logits [R, V], and the pools with its new tokens' KV.

    Each of ``packed`` [R, HEAD + C + P] int32 has the columns named above, C = ``widths`` tokens, of which ``COUNT``
    are there, and block tables; the rows of one come behind those of another. Only tokens of rows whose prompt is
    complete mean something. ``choose_tokens`` is for rows that want another token than the likeliest one.

    With ``every``, the next one behind each of the tokens, [T]: of guesses at what comes next, those are right that are
    what was chosen before them. A guess is then accepted with the probability that the model gives it, and what comes
    in place of one that is not has the model's distribution without it: the rejection rule (Leviathan et al. 2023) for
    guesses that are made with certainty. Runs under ``jax.set_mesh``.
    """
    rows = tuple(
        Rows(tables=each[:, HEAD + width :], start=each[:, START], count=each[:, COUNT], width=width)
        for each, width in zip(packed, widths, strict=True)
    )
    tokens = [each[:, HEAD : HEAD + width].reshape(-1) for each, width in zip(packed, widths, strict=True)]
    x, pools = _stream(weights, pools, jnp.concatenate(tokens)[None], rows, how)
    last, first = list[jax.Array](), 0
    for some in rows:
        last.append(first + jnp.arange(len(some.count)) * some.width + jnp.maximum(some.count, 1) - 1)
        first += some.tokens
    logits = _logits(x, weights, jnp.arange(first) if every else jnp.concatenate(last), how)
    with named_scope("sample"):
        return largest(logits), logits, pools


def propose(
    weights: Transformer[Any], pools: tuple[Pages, ...], packed: jax.Array, how: Decoder, *, most: int
) -> tuple[jax.Array, tuple[Pages, ...]]:
    """A draft model's guesses [R, ``most``] at what follows the one token of each row, the likeliest each time.

    ``packed`` as for ``step`` with C = 1; of a row with ``COUNT`` 1 + g, g guesses mean something. The KV of the token
    and of these guesses is in the pools then, so that whichever of them are right, the next round can begin there.
    """
    tables, start = packed[:, HEAD + 1 :], packed[:, START]

    def one(
        carry: tuple[jax.Array, tuple[Pages, ...]], place: jax.Array
    ) -> tuple[tuple[jax.Array, tuple[Pages, ...]], jax.Array]:
        tokens, pools = carry
        count = (place < packed[:, COUNT]).astype(jnp.int32)
        rows = Rows(tables=tables, start=start + place, count=count, width=1)
        x, pools = _stream(weights, pools, tokens[None], (rows,), how)
        tokens = largest(_logits(x, weights, jnp.arange(len(packed)), how))
        return (tokens, pools), tokens

    (_, pools), guesses = lax.scan(one, (packed[:, HEAD], pools), jnp.arange(most + 1, dtype=jnp.int32))
    return guesses[:most].T, pools


def heads_of_each(packed: npt.NDArray[np.int32], width: int) -> npt.NDArray[np.int32]:
    """The heads of a step that chooses behind ``every`` token, [R C, HEAD]: each draws as the token that it chooses.

    Only the first of a row can be adjusted.
    """
    place = np.tile(np.arange(width, dtype=np.int32), len(packed))
    rows = np.repeat(packed[:, :HEAD], width, axis=0)
    rows[:, DRAWN] += place
    rows[:, ADJUSTED] *= place == 0
    return rows


def only_likeliest(heads: npt.NDArray[np.int32]) -> bool:
    """Whether all of these rows [R, HEAD] take the likeliest token, and nothing else is to be known of it."""
    return not heads[:, (TEMPERATURE, ADJUSTED, LOGPROBS)].any()


def _stream(
    weights: Transformer[Any], pools: tuple[Pages, ...], tokens: jax.Array, rows: tuple[Rows, ...], how: Decoder
) -> tuple[jax.Array, tuple[Pages, ...]]:
    """The residual stream [1, T, D] of ``tokens`` [1, T] behind the last layer, normalised.

    And the pools with its keys and values.
    """
    model, computation = how.model, how.computation
    positions = jnp.concatenate([each.positions().reshape(-1) for each in rows])[None]
    positions = jnp.minimum(positions, model.max_seq_len - 1)
    with named_scope("embed"):
        x = embed(weights, Batch(tokens=tokens, targets=tokens, positions=positions), computation)
    with named_scope("layers"):
        with named_scope("attn"), named_scope("rope"):
            turns = {local: rotation(model, positions, local=local) for local in (False, True)}
        written = list[Pages]()
        for kind, (layer,), pool in zip(how.kinds, weights.layers, pools, strict=True):
            layer = in_full(layer, jnp.dtype(how.dtype))
            local = kind.window is not None and model.rope_local_theta is not None
            heads = PagedHeads(
                layer=layer.attn, turns=turns[local], window=kind.window, rows=rows, reader=how.reader,
                computation=computation, cache_spec=how.cache_spec, groups=how.groups, parts=how.parts,
                tensor=how.tensor,
            )  # fmt: skip
            with named_scope("attn"):
                x = attention(x, layer.attn, computation, partial(heads, pool=pool, written=written))
            x, _ = feed_forward(x, layer.mlp, None, computation)
    return final_norm(x, weights, computation), tuple(written)


def _logits(x: jax.Array, weights: Transformer[Any], which: jax.Array, how: Decoder) -> jax.Array:
    """Logits [n, V] float32 of the tokens ``which`` [n] of x [1, T, D], alike on all devices."""
    picked = reshard(x, P(None, None, None))[:, which]
    tied = weights.unembed is None
    matrix = weights.embed if weights.unembed is None else in_full(weights.unembed, x.dtype)
    # Few tokens, which need not divide as those of the layers do.
    rules = how.specs.rules
    specs = Specs(replace(rules, activations={**rules.activations, "seq": ()}))
    picked, matrix = losses.head(picked, matrix, specs, tied=tied)
    found = losses.logits(picked, matrix, how.model.final_softcap, left=how.weights_left)
    return reshard(found, P(None, None, None))[0]


def choose_tokens(
    logits: jax.Array, adjustments: Adjustments, heads: jax.Array, how: Decoder
) -> tuple[Chosen, Adjustments]:
    """Tokens by logits [R, V] as each row's head [R, HEAD] says, and what their requests have seen since.

    Requests with ``ADJUSTED`` have their chosen token counted as seen.
    """

    def real(column: int) -> jax.Array:
        return lax.bitcast_convert_type(heads[:, column], jnp.float32)

    slots, adjusted = heads[:, SLOT], heads[:, ADJUSTED]
    choice = SampledChoice(
        temperature=real(TEMPERATURE),
        top_k=heads[:, TOP_K],
        top_p=real(TOP_P),
        min_p=real(MIN_P),
        seed=lax.bitcast_convert_type(heads[:, SEED : SEED + 2], jnp.uint32),
        drawn=heads[:, DRAWN],
    )
    wanted = jnp.any(adjusted > 0)
    changed = lax.cond(
        wanted,
        lambda: jnp.where(adjusted[:, None] > 0, adjustments.apply(logits, slots), logits),
        lambda: logits,
    )
    tokens = choose(changed, choice)
    adjustments = replace(adjustments, seen=adjustments.seen.at[slots, tokens].add(adjusted))
    count = min(how.alternatives, logits.shape[1])

    def asked() -> tuple[jax.Array, jax.Array, jax.Array]:
        return log_probabilities(logits, tokens, count)

    def unasked() -> tuple[jax.Array, jax.Array, jax.Array]:
        some = jnp.zeros((len(heads), count), jnp.float32)
        return some[:, 0], some, some.astype(jnp.int32)

    logprobs, top, top_ids = lax.cond(jnp.any(heads[:, LOGPROBS] > 0), asked, unasked)
    return Chosen(tokens=tokens, logprobs=logprobs, top=top, top_ids=top_ids), adjustments


@dataclass(frozen=True, kw_only=True)
class PagedHeads:
    """The heads of one layer over its pool, read by ``reader``, split as ``cache_spec``, ``groups`` and ``parts`` say.

    ``turns`` are its rotary angles, ``tensor`` the devices along that axis; a step has the new tokens of its ``rows``.
    """

    layer: Attention[jax.Array] | LatentAttention[jax.Array]
    turns: jax.Array
    window: int | None
    rows: tuple[Rows, ...]
    reader: str
    computation: Computation
    cache_spec: P
    groups: DeviceGroups
    parts: PageParts
    tensor: int

    def __call__(self, normed: jax.Array, pool: Pages, written: list[Pages]) -> jax.Array:
        """[1, T, N, d_v] of the normalised stream; the pool as it is then is appended to ``written``."""
        heads = self._latent(normed, pool) if isinstance(self.layer, LatentAttention) else self._plain(normed, pool)
        written.append(heads[1])
        return heads[0]

    @property
    def _scores(self) -> Scores:
        model = self.computation.model
        scale = model.d_head**-0.5 if model.query_scale is None else model.query_scale
        return Scores(scale=float(scale), window=self.window, softcap=model.attn_softcap)

    def _specs(self, pool: Pages) -> tuple[P, P, Pages, tuple[Rows, ...]]:
        """Of arrays by heads, of arrays by key/value heads, of the pool and of the rows."""
        specs, spec = self.computation.specs, self.cache_spec
        scales = None if pool.scales is None else P(*spec.partitions[:-1])
        return (
            specs.activation("batch", "seq", "heads", None),
            specs.activation("batch", "seq", "kv_heads", None),
            Pages(values=spec, scales=scales),  # type: ignore[arg-type]
            tuple(replace(each, tables=P(None, None), start=P(None), count=P(None)) for each in self.rows),  # type: ignore[arg-type]
        )

    def _plain(self, normed: jax.Array, pool: Pages) -> tuple[jax.Array, Pages]:
        assert isinstance(self.layer, Attention)
        q, k, v = qkv(normed, self.layer, self.turns, self.computation)
        sinks = self.layer.sinks
        by_heads, by_kv_heads, of_pool, of_rows = self._specs(pool)
        one_each = self.tensor > 1 and not self.computation.specs.rules.activations["kv_heads"]

        def local(
            q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, pool: Pages, rows: tuple[Rows, ...]
        ) -> tuple[jax.Array, Pages]:
            if one_each:
                mine = lax.axis_index("tensor") * k.shape[2] // self.tensor
                k, v = (lax.dynamic_slice_in_dim(each, mine, 1, axis=2) for each in (k, v))
            if sinks is not None:
                sinks = self.groups.of_heads(sinks)

            def attend(
                q: jax.Array, new: tuple[jax.Array, ...], pool: Pages, rows: tuple[Rows, ...]
            ) -> tuple[jax.Array, Pages]:
                return attend_heads(self.reader, self._scores, q, new[0], new[1], sinks, pool, rows, self.parts)

            o, pool = self.groups.attend(attend, q[0], (k[0], v[0]), pool, rows)
            return o[None], pool

        sink_spec = None if sinks is None else jax.typeof(sinks).sharding.spec
        specs_in = (by_heads, by_kv_heads, by_kv_heads, sink_spec, of_pool, of_rows)
        # A Pallas kernel's outputs do not say over which axes they vary.
        typed = self.reader != "ragged"
        over = on_shards(local, in_specs=specs_in, out_specs=(by_heads, of_pool), check_vma=typed)
        with named_scope("core"):
            found: tuple[jax.Array, Pages] = over(q, k, v, sinks, pool, self.rows)
        return found

    def _latent(self, normed: jax.Array, pool: Pages) -> tuple[jax.Array, Pages]:
        assert isinstance(self.layer, LatentAttention)
        model, specs, mla = self.computation.model, self.computation.specs, self.computation.model.mla
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
            absorbed = jnp.concatenate([jnp.einsum("btnh,rnh->btnr", plain, of_keys), turned], axis=-1)

            def attend(
                q: jax.Array, new: tuple[jax.Array, ...], pool: Pages, rows: tuple[Rows, ...]
            ) -> tuple[jax.Array, Pages]:
                return attend_latents(self.reader, self._scores, q, new[0], new[1], pool, rows, self.parts)

            o, pool = self.groups.attend(attend, absorbed[0], (latent[0], shared[0]), pool, rows)
            return jnp.einsum("btnr,rnv->btnv", o[None], of_values), pool

        specs_in = (by_heads, whole, whole, up_spec, of_pool, of_rows)
        over = on_shards(local, in_specs=specs_in, out_specs=(by_heads, of_pool))
        with named_scope("core"):
            latent, shared = (reshard(each, whole) for each in (latent, shared))
            up = reshard(self.layer.kv_up, up_spec)
            found: tuple[jax.Array, Pages] = over(q, latent, shared, up, pool, self.rows)
        return found
