"""Attention of a serving step: one layer's queries, keys and values, and its paged cache, where they lie on a mesh.

Dims: T new tokens of all rows (sequences), N query and K key/value heads, H head size, D model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import P, lax, named_scope
from jax.sharding import reshard

from rooftop.programs.attention_scores import Scores
from rooftop.programs.layer import Computation, qkv
from rooftop.programs.mla import latents
from rooftop.programs.page_groups import Groups
from rooftop.programs.page_parts import Parts
from rooftop.programs.paged import Pages, Rows, attend_heads, attend_latents
from rooftop.programs.parameters import Attention, LatentAttention
from rooftop.programs.sharding import on_shards


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
    groups: Groups
    parts: Parts
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
