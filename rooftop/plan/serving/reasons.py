"""The reasons of a serving plan: each rule of chapters 7 and 8 that applies, with its values."""

from __future__ import annotations

from collections.abc import Iterator

from rooftop.arrays.rules import COLUMN_AXES, GATHER_AXES, SEQUENCE_AXES
from rooftop.capabilities import engine_heads
from rooftop.core.ledger import Ledger
from rooftop.core.quantities import counted, format_bytes, format_count
from rooftop.models.attention import attention_kind
from rooftop.models.widths import MOST_PADDING
from rooftop.plan.documents import Reason
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.problem import ServingProblem
from rooftop.roofline import rules


def serving_reasons(problem: ServingProblem, placement: Placement, batch: int, step: Ledger) -> list[Reason]:
    """The rules of chapters 7 and 8 for this batch at this placement; ``step`` is the step's ledger."""
    return [
        *_matmuls(problem, batch),
        *_widths(problem, placement, batch),
        *_cache(problem, placement, batch, step),
        *_network(problem, placement, batch),
    ]


def _matmuls(problem: ServingProblem, batch: int) -> Iterator[Reason]:
    rates, numerics = problem.rates, problem.numerics
    flops, hbm = rates.flops_per_s[numerics.flops], rates.hbm_bytes_per_s
    need = rules.critical_batch(flops, hbm, weight_dtype=numerics.shared_weights)
    yield Reason.at_least(
        rule="matmuls bound by FLOPs, not HBM",
        source="chapter 7",
        formula="B >= C x bytes of a weight / (2 W_hbm)",
        value=float(batch),
        limit=need,
        text=f"{counted(batch, 'sequence')} share{'s' if batch == 1 else ''} each reading of the weights; {need:.0f} "
        "would make the matmuls outlast it.",
    )
    moe = problem.model.moe
    if moe is not None:
        of_experts = rules.critical_batch(flops, hbm, weight_dtype=numerics.weights)
        more = rules.critical_moe_tokens(of_experts, moe.experts, moe.active)
        used = float(rules.distinct_experts(moe.experts, moe.active, float(batch)))
        yield Reason.at_least(
            rule="experts bound by FLOPs, not HBM",
            source="chapter 4",
            formula="B >= B_crit E / k",
            value=float(batch),
            limit=more,
            text=f"A step reads {used:.1f} of {moe.experts} experts in the mean; {more:.0f} sequences keep them busy.",
        )


def _widths(problem: ServingProblem, placement: Placement, batch: int) -> Iterator[Reason]:
    if problem.book:
        return
    widths = problem.phase("generate", placement, float(batch)).widths
    padded = {name: (size, float(stored)) for name, (size, stored) in widths.padded.items()}
    wide = [f"{name} {size} as {stored:.0f}" for name, (size, stored) in padded.items() if stored > size]
    heads = engine_heads(problem.model, placement.engine_mesh.shape)
    if problem.model.mla is None and len(heads.cached) > heads.kv_heads:
        wide.append(f"key/value heads {heads.kv_heads} as {len(heads.cached)}")
    if wide:
        yield Reason.at_least(
            rule="padded widths",
            source="JAX shards evenly",
            formula="width / padded width >= 1 / 1.2",
            value=1 / (1 + float(widths.padding)),
            limit=1 / (1 + MOST_PADDING),
            text=f"The mesh does not divide all widths, which are padded, or copied ({', '.join(wide)}).",
        )


def _cache(problem: ServingProblem, placement: Placement, batch: int, step: Ledger) -> Iterator[Reason]:
    kv = sum(float(row.count * row.hbm_bytes) for row in step if row.scope in ("layers/attn/core", "kv_cache"))
    every = sum(float(row.count * row.hbm_bytes) for row in step)
    weights = every - kv
    yield Reason.at_least(
        rule="a larger batch pays",
        source="chapter 7",
        formula="weights read >= KV read",
        value=weights,
        limit=kv,
        text=f"A device reads {format_bytes(weights)} of weights and {format_bytes(kv)} of KV a step"
        + ("." if weights >= kv else ": more sequences add little to tokens/s."),
    )
    longest = problem.model.max_seq_len
    yield Reason.at_least(
        rule="sequences no longer than the model's",
        source="the model's config",
        formula="prompt + answer <= longest sequence",
        value=float(longest),
        limit=float(problem.held_tokens),
        text=f"A sequence grows to {problem.held_tokens:,.0f} tokens; the model was made for {longest:,}.",
    )
    if problem.book:
        return
    heads, ways = attention_kind(problem.model).cached_heads, placement.mesh.size(*COLUMN_AXES)
    split = placement.mesh.size(*SEQUENCE_AXES)
    holders = "a latent that all heads share," if heads is None else counted(heads, "KV head")
    text = f"{holders} over {counted(ways, 'way')}"
    limit = heads or 1
    yield Reason.at_least(
        rule="the cache is not copied",
        source="chapter 7",
        formula="tensor <= KV heads" if heads else "tensor <= 1: a latent has no heads",
        value=float(limit),
        limit=float(ways),
        text=f"{text}: {'no copies' if ways <= limit else f'{ways / limit:g} copies of each'}"
        + (
            f"; its {'sequences' if placement.kv_split == 'batch' else 'tokens'} are split {split} ways."
            if split > 1
            else "."
        ),
    )


def _network(problem: ServingProblem, placement: Placement, batch: int) -> Iterator[Reason]:
    chip, model = problem.slice.chip, problem.model
    if chip.switched or problem.slice.chips == 1:
        return
    ways = placement.mesh.size(*SEQUENCE_AXES, *COLUMN_AXES)
    hidden = model.d_ff if model.moe is None else model.moe.d_ff
    beta = chip.hbm_bytes_per_s / (2 * chip.ici_bytes_per_s)
    limit = rules.generate_tensor_limit(hidden, batch, beta)
    yield Reason.at_least(
        rule="tensor parallelism while HBM binds",
        source="chapter 7",
        formula="Y <= F / (B beta), beta = W_hbm / W_ici",
        value=limit,
        limit=float(ways),
        text=f"{counted(ways, 'way')} against {limit:.0f}, at which the collectives of "
        f"{counted(batch, 'sequence')} outlast the weights.",
    )
    axes = sum(1 for axis in problem.slice.physical_axes if axis.kind == "torus" and axis.size > 1)
    busy = rules.tensor_limit(hidden, rules.network_intensity(chip, problem.numerics.flops), axes)
    yield Reason.at_least(
        rule="tensor parallelism while FLOPs bind",
        source="chapter 8",
        formula="Y <= M F / alpha",
        value=busy,
        limit=float(ways),
        text=f"{counted(ways, 'way')} against {busy:.1f} for batches so large that FLOPs bind.",
    )
    two_d = rules.weight_stationary_2d_chips(hidden / model.d_model, axes)
    used = placement.mesh.size(*GATHER_AXES) > 1
    yield Reason.at_least(
        rule="2-D weight-stationary sharding",
        source="chapter 7",
        formula="N > 2 (F/D) axes^2",
        value=float(problem.slice.chips),
        limit=two_d,
        text=f"Splitting D too moves fewer bytes above {two_d:.0f} chips; {problem.slice.chips} here, and D is "
        f"{'split' if used else 'whole'}.",
    )
    shard = batch * model.d_model * 2.0 / max(ways, 1)
    small = rules.latency_bound_bytes(chip.ici_bytes_per_s, chip.hop_s)
    yield Reason.at_least(
        rule="collectives bound by bytes, not latency",
        source="chapter 7, appendix C",
        formula="B D bytes / Y >= W hop",
        value=shard,
        limit=small,
        text=f"A shard of activations has {format_count(shard, 'B')}; below {format_count(small, 'B')} hops cost more.",
    )
