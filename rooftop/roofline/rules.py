"""The book's rules of thumb, in the order of its chapters: thresholds that say which resource binds.

Every function takes plain figures, so that a worked problem with other constants is the same call. ``alpha`` is the
arithmetic intensity of the network: peak FLOPs/s over the *bidirectional* bandwidth of one ICI axis (chapter 5).
``Number`` arguments may be arrays.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from rooftop.core.errors import RooftopError
from rooftop.core.ledger import Number
from rooftop.core.quantities import dtype_bytes
from rooftop.hardware import Chip

# Chapters 1 and 2: rooflines


def critical_batch(
    flops_per_s: float,
    bytes_per_s: float,
    *,
    weight_dtype: str = "bf16",
    activation_dtype: str = "bf16",
    d: float = math.inf,
    f: float = math.inf,
) -> float:
    """Tokens above which [B, D] x [D, F] is bound by FLOPs and not by bytes (chapters 1 and 2).

    2 B D F / C = (w D F + a B D + a B F) / W solved for B; w and a are the bytes of a weight and an activation. With
    infinite D and F it is C w / (2 W): 240 on v5e in bf16. Infinite where no batch is large enough.
    """
    weight, activation = dtype_bytes(weight_dtype), dtype_bytes(activation_dtype)
    per_token = 2 * bytes_per_s / flops_per_s - activation * (1 / d + 1 / f)
    return weight / per_token if per_token > 0 else math.inf


# Chapter 4: transformers


def critical_moe_tokens(critical_tokens: float, experts: int, active: int) -> float:
    """Tokens above which a mixture of experts is compute-bound: an expert sees active/experts of them (chapter 4)."""
    return critical_tokens * experts / active


def distinct_experts(experts: int, active: int, tokens: Number) -> Number:
    """Expected number of experts that at least one of ``tokens`` tokens uses: E (1 - (1 - k/E)^B)."""
    # NumPy's power, which rounds other than Python's: one result for a number and for arrays.
    unused: Number = np.power(1.0 - active / experts, tokens)
    return experts * (1.0 - unused)


def expert_visits(experts: int, active: int, tokens: Number, tile: Number) -> Number:
    """Expected visits of experts that multiply ``tile`` rows at a time: of each as many as its rows fill tiles.

    The rows of an expert are binomial. Of one tile the probability is that of ``distinct_experts``, of each further one
    that of a normal variable, by Bowling's logistic function (within 0.01).
    """
    mean = np.asarray(tokens * active / experts, np.float64)
    spread = np.sqrt(np.maximum(mean * (1.0 - active / experts), 1e-9))
    visits = np.asarray(distinct_experts(experts, active, tokens), np.float64)
    for further in range(1, int(np.max((mean + 5.0 * spread) / tile)) + 1):
        above = np.clip(1.702 * (further * np.asarray(tile) + 0.5 - mean) / spread, -100.0, 100.0)
        visits = visits + experts / (1.0 + np.exp(above))
    return visits


def distinct_parts(
    experts: int, active: int, parts: Number, *, groups: int = 1, active_groups: int = 1
) -> npt.NDArray[np.float64]:
    """Expected number of equal ``parts`` of the experts, such as nodes, that the ``active`` experts of a token are in.

    The experts are those of ``active_groups`` of the ``groups``, every choice of groups and of experts in them as
    likely as any other, as of a router whose load is balanced. Of the n experts that may be chosen s are in a part:
    none of the k active ones is, with the probability C(n - s, k) / C(n, k).
    """
    sizes, index = np.unique(np.asarray(parts, np.float64), return_inverse=True)
    group = experts // groups
    choosable = group * active_groups
    expected = []
    for size in np.minimum(sizes, experts):
        own = max(round(experts / size), 1)
        # A part has some experts of one group, or several groups whole.
        within, size_of_one = (1, own) if own <= group else (own // group, group)
        used = 0.0
        for count in range(1, min(within, active_groups) + 1):
            ways = math.comb(within, count) * math.comb(groups - within, active_groups - count)
            missed = math.comb(choosable - count * size_of_one, active) / math.comb(choosable, active)
            used += ways / math.comb(groups, active_groups) * (1.0 - missed)
        expected.append(size * used)
    return np.array(expected)[index].reshape(np.shape(parts))


def effective_d_ff(d_ff: float, heads: int, kv_heads: int, d_head: int, mlp_matrices: int) -> float:
    """F of the two-matrix MLP without attention that stands for a whole layer in the rules.

    The rules count two matmuls with F columns, one gather and one scatter of D. A layer has ``mlp_matrices`` of F
    and 2 (N + K) H columns of attention, with two gathers and two scatters: (3F + 2(N+K)H)/4 for LLaMA.
    """
    return (mlp_matrices * d_ff + 2 * (heads + kv_heads) * d_head) / 4


def model_flops_utilisation(model_flops: float, seconds: float, peak_flops_per_s: float) -> float:
    """MFU: model FLOPs over peak FLOPs in the same time. State the convention; recomputed FLOPs do not count."""
    return model_flops / (seconds * peak_flops_per_s)


# Chapter 5: training


def network_intensity(chip: Chip, dtype: str = "bf16") -> float:
    """alpha = C / W_ici, FLOPs per byte, with W_ici both directions of one ICI axis: 2,550 for v5p in bf16."""
    return chip.flops_per_s[dtype] / (2 * chip.ici_bytes_per_s)


def fsdp_tokens_per_chip(alpha: float, axes: float, *, sparsity: float = 1.0) -> float:
    """Tokens per chip below which pure FSDP or data parallelism is bound by ICI on ``axes`` axes (chapter 5).

    ``sparsity``: parameters that are gathered over those that a token uses, E/k for experts alone.
    """
    return alpha / axes * sparsity


def tensor_limit(f: float, alpha: float, axes: float) -> float:
    """Ways of tensor parallelism whose collectives take as long as its matmuls (chapter 5): Y = M_Y F / alpha."""
    return f * axes / alpha


def mixed_tokens_per_chip(
    alpha: float, f: float, fsdp_axes: float, tensor_axes: float, *, overlapped: bool, sparsity: float = 1.0
) -> float:
    """Tokens per chip below which the best mix of FSDP and tensor parallelism is bound by ICI (chapter 5).

    4 alpha^2 / (M_X M_Y F) if the two share the network one after the other (first edition), a quarter of that if
    they overlap on their own axes (later editions). ``sparsity`` as in ``fsdp_tokens_per_chip``; F is that in use.
    """
    return (1 if overlapped else 4) * alpha**2 / (fsdp_axes * tensor_axes * f) * sparsity


def best_fsdp(batch_tokens: float, f: float, chips: float, fsdp_axes: float, tensor_axes: float) -> float:
    """Ways of FSDP that, with tensor parallelism, move the fewest bytes (chapter 5): sqrt(B M_X N / (F M_Y))."""
    return math.sqrt(batch_tokens / f * fsdp_axes / tensor_axes * chips)


def dcn_tokens_per_slice(flops_per_s: float, dcn_bytes_per_s: float) -> float:
    """Tokens per slice below which data parallelism over DCN is bound by it: C / W_dcn, both per chip or per slice.

    The slice's size cancels (chapter 5). A gradient AllReduce of 2 (P-1)/P x 2 bytes against 4 FLOPs per parameter
    and token gives the same for many slices.
    """
    return flops_per_s / dcn_bytes_per_s


# Chapter 7: inference


def generate_step_s(
    kv_bytes: Number, weight_bytes: Number, flops: Number, hbm_bytes_per_s: float, flops_per_s: float
) -> Number:
    """Lower bound of a generate step: the cache read from HBM, then the longer of FLOPs and weights (chapter 7).

    ``kv_bytes`` and ``weight_bytes`` are read once. Rates are those of all chips together.
    """
    return kv_bytes / hbm_bytes_per_s + np.maximum(flops / flops_per_s, weight_bytes / hbm_bytes_per_s)


def generate_tensor_limit(d_ff: float, batch: float, beta: float) -> float:
    """Ways of tensor parallelism above which ICI takes longer than reading the weights: F / (B beta) (chapter 7).

    ``beta`` is HBM bytes/s over the bidirectional bytes/s of one ICI axis: 9 on v5e.
    """
    return d_ff / (batch * beta)


def weight_stationary_2d_chips(f_over_d: float, axes: int = 3) -> float:
    """Chips above which 2-D weight-stationary sharding moves less than 1-D over ``axes`` ICI axes (chapter 7).

    1-D moves 4 B D / (axes W) a layer; 2-D, with X = sqrt(N D / (2 F)), 2 B sqrt(8 D F / N) / W. They are equal at
    N = 2 (F/D) axes^2: 72 for F = 4 D and three axes. (The book prints 81.)
    """
    return 2.0 * f_over_d * axes**2


def latency_bound_bytes(link_bytes_per_s: float, hop_s: float) -> float:
    """Bytes of a shard below which a hop takes longer than its bytes: 45 kB on v5e (chapter 7, appendix C)."""
    return link_bytes_per_s * hop_s


# Chapter 8: serving


def prefill_s(params: float, tokens: Number, flops_per_s: float, mfu: float) -> Number:
    """Seconds of a prefill at a given utilisation: 2 FLOPs per active parameter and token, no attention (chapter 8)."""
    return 2.0 * params * tokens / (flops_per_s * mfu)


def evicted_tokens_per_step(batch: float, prompt: float, generate: float) -> float:
    """Mean tokens that leave the KV cache per step: B (P + G) / G (chapter 8)."""
    return batch * (prompt + generate) / generate


def prefill_per_generate(prefill_seconds: float, step_s: float, batch: float, generate: float) -> float:
    """Prefill servers that keep one generate server busy: its sequences/s times a prefill's seconds (chapter 8)."""
    return prefill_seconds * batch / (step_s * generate)


def interleaved_token_s(
    token_s: float, prefill_seconds: float, batch: float, generate: float, *, together: float | None = None
) -> float:
    """Mean seconds between two tokens of a sequence on a server that also prefills, a prompt at a time (chapter 8).

    While a sequence takes the G - 1 steps after its first token, each of the B - 1 others is replaced once. Those that
    end in the same step are replaced one after another before the next: of k sequences that start ``together``, half
    of the others' prefills come before a sequence's first token and not between two. By default as many start together
    as of B sequences spread evenly over G - 1 steps.
    """
    steps = generate - 1
    if steps < 1:
        return token_s
    same = (batch - 1) / steps if together is None else together - 1
    return token_s + (batch - 1 - same / 2) / steps * prefill_seconds


def interleaved_tokens_per_s(token_s: float, prefill_seconds: float, batch: float, generate: float) -> float:
    """Tokens per second of a full server that also prefills, a prompt at a time.

    In the time of B prefills and G - 1 steps each of its B sequences has its G tokens, the first from its prefill.
    """
    return batch * generate / (batch * prefill_seconds + (generate - 1) * token_s)


# Chapter 12: GPUs. A node, the NVLink domain, has ``gpus``; rates are of one GPU, one way: into its node's switches
# (``node_bytes_per_s``) and into the network (``network_bytes_per_s``), so that a node's egress is ``gpus`` times that.


def fsdp_tokens_per_gpu(
    flops_per_s: float,
    node_bytes_per_s: float,
    network_bytes_per_s: float,
    gpus: int,
    nodes: int = 1,
    *,
    model_ways: float = 1,
    sparsity: float = 1.0,
) -> float:
    """Tokens per GPU below which FSDP or data parallelism over all GPUs is bound by a network (chapter 12).

    8 t D F / C of math in a backward pass against 8 D F (X-1)/X bytes, X the units of a level that FSDP joins. Of Y
    ``model_ways``, which lie inside, those in a node divide its bytes, and those beyond the network's:
    C max((1 - 1/X_node) / (W min(Y, n)), (1 - 1/X_network) / (w max(Y, n))). Many nodes of 8 H100 need 2,475.
    ``sparsity`` as in ``fsdp_tokens_per_chip``.
    """
    inside, inner = min(model_ways, gpus), max(model_ways, gpus)
    in_node = (1 - inside / gpus) / (node_bytes_per_s * inside)
    between = max(0.0, 1 - inner / (gpus * nodes)) / (network_bytes_per_s * inner)
    return flops_per_s * max(in_node, between) * sparsity


def tensor_limit_on_gpus(
    f: float, flops_per_s: float, node_bytes_per_s: float, network_bytes_per_s: float, gpus: int
) -> float:
    """Ways of tensor parallelism whose collectives take as long as its matmuls (chapter 12).

    4 B D F / (Y C) of math against 4 B D (X-1)/X bytes at each level: Y = 1 + F W / C within a node. Beyond it,
    Y = n + F n w / C by the network, and F W / C n/(n-1) by the node. (The book leaves the 1 out.)
    """
    within = f * node_bytes_per_s / flops_per_s
    if 1 + within < gpus or gpus == 1:
        return 1 + within
    return min(within * gpus / (gpus - 1), gpus + f * gpus * network_bytes_per_s / flops_per_s)


def expert_d_ff(
    flops_per_s: float,
    node_bytes_per_s: float,
    network_bytes_per_s: float,
    gpus: int,
    *,
    expert_ways: int,
    active: int,
) -> float:
    """Columns of an expert below which Z-way expert parallelism is bound by its AllToAlls (chapter 12).

    A token goes to at most min(k, M) of M units, GPUs of a node or nodes, (M-1)/M of them others, and back:
    F = C / W min(k, M) / k (M-1)/M, with W a GPU's rate into that level. Over many nodes it is C / w, 8 C / W_node.
    """
    beyond = expert_ways > gpus
    units = expert_ways / gpus if beyond else expert_ways
    rate = network_bytes_per_s if beyond else node_bytes_per_s
    return flops_per_s / rate * min(active, units) / active * (units - 1) / units


def bisection_bytes_per_s(gpus: float, bytes_per_s: float) -> float:
    """Bytes/s between two halves of a switched network, both ways together: 3.6 TB/s in a node of 8 H100 (chapter 12).

    An AllToAll of V bytes in all takes about V over it.
    """
    return gpus * bytes_per_s


# Beyond the book


def speculated_tokens(draft_length: int, acceptance: float) -> float:
    """Tokens that one round of speculative decoding yields: (1 - a^(K+1)) / (1 - a) (Leviathan et al. 2023, eq. 1).

    Each of ``draft_length`` guesses is accepted with probability ``acceptance`` if all before it were; the large model
    always adds one. Raises RooftopError unless 0 <= acceptance <= 1.
    """
    if not 0 <= acceptance <= 1:
        raise RooftopError("acceptance", acceptance, "a probability")
    return sum(acceptance**power for power in range(draft_length + 1))


def queue_wait_s(service_s: float, load: float) -> float:
    """Mean wait before one server with Poisson arrivals and a constant service time (M/D/1), at ``load`` < 1."""
    return service_s * load / (2 * (1 - load))
