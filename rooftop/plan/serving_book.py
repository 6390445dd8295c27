"""The arithmetic of chapters 7 and 8: everything spread evenly over the chips, no network, two numbers a step."""

from __future__ import annotations

from rooftop.ledger import Ledger, Number, Row
from rooftop.models import ModelConfig, count_params
from rooftop.models.counting import kv_cache_bytes
from rooftop.plan.serving_rules import distinct_experts, generate_step_s, prefill_s
from rooftop.plan.serving_workload import ServingNumerics
from rooftop.roofline.rates import Rates


def book_generate(
    model: ModelConfig, numerics: ServingNumerics, devices: int, rates: Rates, batch: Number, context: Number
) -> Ledger:
    """Two rows of a step on one of ``devices``: the cache, and all else as one matmul (chapter 7).

    Of experts those that the batch is expected to use are read.
    """
    kv = batch * kv_cache_bytes(model, numerics.kv, context) / devices
    count = count_params(model)
    read: Number = float(count.total)
    if model.moe is not None:
        used = distinct_experts(model.moe.experts, model.moe.active, batch)
        read = count.total - count.by_component["experts"] * (1 - used / model.moe.experts)
    weights = read * numerics.weight_bytes / devices
    flops = 2.0 * batch * count.active / devices
    hbm, peak = rates.hbm_bytes_per_s, rates.flops_per_s[numerics.flops]
    step = generate_step_s(kv, weights, flops, hbm, peak)
    cache = Row(
        scope="layers/attn/core",
        phase="generate",
        hbm_bytes=kv,
        time_s={"hbm": kv / hbm},
        expected_s=kv / hbm,
        serial_s=kv / hbm,
        formula="batch x KV / HBM",
    )
    rest = Row(
        scope="unscoped",
        phase="generate",
        hbm_bytes=weights,
        flops={numerics.flops: flops},
        time_s={"hbm": weights / hbm, "mxu": flops / peak},
        expected_s=step - kv / hbm,
        serial_s=weights / hbm + flops / peak,
        formula="max(2 B P / C, bytes of P / HBM)",
    )
    return Ledger((cache, rest))


def book_prefill(
    model: ModelConfig, numerics: ServingNumerics, devices: int, rates: Rates, tokens: float, mfu: float
) -> Ledger:
    """One row: 2 FLOPs per (active) parameter and token, at a given utilisation (chapter 8)."""
    count = count_params(model)
    peak = rates.flops_per_s[numerics.flops]
    seconds = prefill_s(count.active, tokens, devices * peak, mfu)
    flops = 2.0 * count.active * tokens / devices
    weights = count.total * numerics.weight_bytes / devices
    row = Row(
        scope="unscoped",
        phase="prefill",
        flops={numerics.flops: flops},
        hbm_bytes=weights,
        time_s={"mxu": flops / peak, "hbm": weights / rates.hbm_bytes_per_s},
        expected_s=seconds,
        serial_s=seconds,
        formula="2 P T / (C x MFU)",
    )
    return Ledger((row,))
