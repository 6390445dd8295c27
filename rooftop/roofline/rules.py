"""The book's rules of thumb, each once: thresholds that say which resource binds, before any plan is searched.

Every function takes plain figures, so that a worked problem with other constants is the same call. ``alpha`` is the
arithmetic intensity of the network, peak FLOPs/s over the *bidirectional* bandwidth of one ICI axis (chapter 5).
"""

from __future__ import annotations

import math

from rooftop.hardware import Chip
from rooftop.quantities import dtype_bytes


def network_intensity(chip: Chip, dtype: str = "bf16") -> float:
    """alpha = C / W_ici, FLOPs per byte, with W_ici both directions of one ICI axis: 2,550 for v5p in bf16."""
    return chip.flops_per_s[dtype] / (2 * chip.ici_bytes_per_s)


def critical_batch(
    flops_per_s: float,
    bytes_per_s: float,
    *,
    weight_dtype: str = "bf16",
    activation_dtype: str = "bf16",
    d: float = math.inf,
    f: float = math.inf,
) -> float:
    """Tokens above which [B, D] x [D, F] is bound by FLOPs and not by bytes (chapter 1, 2).

    2 B D F / C = (w D F + a B D + a B F) / W solved for B, with w and a the bytes of a weight and an activation. With
    D and F left infinite it is C w / (2 W): 240 on v5e in bf16. Returns infinity where no batch is large enough.
    """
    weight, activation = dtype_bytes(weight_dtype), dtype_bytes(activation_dtype)
    per_token = 2 * bytes_per_s / flops_per_s - activation * (1 / d + 1 / f)
    return weight / per_token if per_token > 0 else math.inf


def critical_split_contraction(flops_per_s: float, link_bytes_per_s: float) -> float:
    """Contraction size D above which a bf16 matmul split in two over D is compute-bound (chapter 1): D/2 > C/W."""
    return 2 * flops_per_s / link_bytes_per_s


def critical_moe_tokens(critical_tokens: float, experts: int, active: int) -> float:
    """Tokens for a mixture of experts to be compute-bound: each expert sees active/experts of them (chapter 4)."""
    return critical_tokens * experts / active


def fsdp_tokens_per_chip(alpha: float, axes: float) -> float:
    """Tokens per chip below which pure FSDP or data parallelism is bound by ICI on ``axes`` axes (chapter 5)."""
    return alpha / axes


def tensor_limit(f: float, alpha: float, axes: float) -> float:
    """Ways of tensor parallelism above which its collectives outlast its matmuls (chapter 5): Y = M_Y F / alpha."""
    return f * axes / alpha


def mixed_tokens_per_chip(alpha: float, f: float, fsdp_axes: float, tensor_axes: float, *, overlapped: bool) -> float:
    """Tokens per chip below which the best mix of FSDP and tensor parallelism is bound by ICI (chapter 5).

    4 alpha^2 / (M_X M_Y F) if the two share the network one after the other (first edition), a quarter of that if
    they overlap on their own axes (later editions).
    """
    return (1 if overlapped else 4) * alpha**2 / (fsdp_axes * tensor_axes * f)


def best_fsdp(batch_tokens: float, f: float, chips: float, fsdp_axes: float, tensor_axes: float) -> float:
    """Ways of FSDP that move the fewest bytes beside tensor parallelism (chapter 5): sqrt(B M_X N / (F M_Y))."""
    return math.sqrt(batch_tokens / f * fsdp_axes / tensor_axes * chips)


def dcn_tokens_per_slice(flops_per_s: float, dcn_bytes_per_s: float) -> float:
    """Tokens per slice below which data parallelism over DCN is bound by it: C / W_dcn, both per chip or per slice.

    The slice's size cancels (chapter 5). A gradient AllReduce of 2 (P-1)/P x 2 bytes against 4 FLOPs per parameter
    and token gives the same for many slices.
    """
    return flops_per_s / dcn_bytes_per_s


def effective_d_ff(d_ff: float, heads: int, kv_heads: int, d_head: int, mlp_matrices: int) -> float:
    """F of the two-matrix MLP without attention that the rules assume, for a layer as it is.

    The rules count 2 matmuls with F columns and one gather and one scatter of D. A layer has ``mlp_matrices`` of F
    and 2 (N + K) H columns of attention, with two gathers and two scatters: (3F + 2(N+K)H)/4 for LLaMA.
    """
    return (mlp_matrices * d_ff + 2 * (heads + kv_heads) * d_head) / 4


def model_flops_utilisation(model_flops: float, seconds: float, peak_flops_per_s: float) -> float:
    """MFU: model FLOPs (say by which convention) over peak FLOPs in the time taken, rematerialisation not counted."""
    return model_flops / (seconds * peak_flops_per_s)
