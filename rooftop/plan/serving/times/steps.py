"""Seconds of any step of a planned server, in closed form: a simulation asks a million times.

The ledger of a step is affine in the tokens of KV that it reads (but for the latency that hides), and what does not
depend on them depends on the batch, or on the new tokens of a prefill, alone: those are tabulated once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

from rooftop.arrays.rules import EXPERT_AXES, GATHER_AXES, REPLICA_AXES, SEQUENCE_AXES
from rooftop.core.rounding import next_multiple
from rooftop.models.attention import attention_kind
from rooftop.models.program_sizes import PAGE_TOKENS
from rooftop.plan.serving.placement import Placement
from rooftop.plan.serving.problem import ServingProblem
from rooftop.plan.serving.rows import chunk_pairs

#: Batches whose step is tabulated; a larger one is priced when it is asked for.
TABULATED = 1024
#: New tokens at which a prefill is priced; between them its time is interpolated.
_GRID: tuple[int, ...] = (1, *(2**power * part // 4 for power in range(3, 18) for part in (4, 5, 6, 7)), 2**18)


class PlannedTimes:
    """Seconds of steps on the servers of a serving plan (the protocol ``rooftop.scheduling.serving.times.StepTimes``).

    ``transfer_bytes_per_s``: of the KV between a prefill and a generate server.
    """

    def __init__(
        self, problem: ServingProblem, generate: Placement, prefill: Placement, transfer_bytes_per_s: float
    ) -> None:
        self._problem, self._generate = problem, generate
        self._prefill_times = _PrefillTimes(problem, prefill)
        self._mixed_times = (
            self._prefill_times
            if problem.mode == "interleaved"
            else _PrefillTimes(problem, problem.shared_prefill(generate))
        )
        self._spread = 1 if problem.book else generate.spread
        self._windows = _windows(problem)
        # With no latency hidden a step is affine in the context; the smaller of latency and streams is hidden.
        shares = dict(problem.assumptions.shares)
        waits = {**shares, "latency": 0.0, "latency_2d": 0.0}
        self._plain = replace(problem, assumptions=replace(problem.assumptions, shares=waits))
        self._waiting = replace(problem, assumptions=replace(problem.assumptions, shares={**waits, "bytes": 1.0}))
        two_d = generate.ways(GATHER_AXES) > 1
        unhidden = problem.book or problem.engine is not None
        self._hidden = 0.0 if unhidden else problem.assumptions.latency(problem.slice.chip, two_d=two_d)
        self._rate = problem.assumptions.share("hbm_read", problem.slice.chip)
        bounded = [window for _, window in self._windows if window is not None]
        far = 2.0**20 if len(bounded) < len(self._windows) else min(bounded) / 4
        read = self._spread * far * sum(share for share, at in self._windows if at is None or at >= 2 * far)
        less, more = (self._plain.generate(generate, float(self._spread), context=far * n) for n in (1, 2))
        self._token_s = float(more.expected_s - less.expected_s) / read
        self._stream_s = float(more.total("hbm") - less.total("hbm")) / self._rate / read
        self._steps = [(0.0, 0.0, 0.0), *self._without_cache(np.arange(1.0, TABULATED + 1))]
        self._larger: dict[int, tuple[float, float, float]] = {}
        self._transfer = transfer_bytes_per_s

    @property
    def page_tokens(self) -> int:
        """Tokens of a page of the KV cache."""
        return PAGE_TOKENS

    @cached_property
    def kv_tokens(self) -> int:
        """Tokens whose KV fits a generate server, all sequences together."""
        return self._problem.room_tokens(self._generate, generating=True)

    @cached_property
    def prefill_kv_tokens(self) -> int:
        """Tokens whose KV fits a prefill server."""
        if self._problem.mode == "interleaved":
            return self.kv_tokens
        return self._problem.room_tokens(self._prefill_times.placement, generating=False)

    @property
    def kv_groups(self) -> int:
        """Groups of devices over which a generate server spreads whole sequences."""
        return self._spread

    @property
    def prefill_kv_groups(self) -> int:
        """Groups of a prefill server, which splits the tokens of a sequence over all axes but data."""
        if self._problem.mode == "interleaved":
            return self._spread
        return self._prefill_times.placement.mesh.size(*REPLICA_AXES)

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Prefill of chunks (new tokens, tokens before them) as one step."""
        return self._prefill_times.seconds(chunks, 0)

    def generate_s(self, batch: int, context_tokens: int) -> float:
        """One token for each of ``batch`` sequences that hold ``context_tokens`` tokens of KV in all."""
        if batch <= TABULATED:
            base, waits, streams = self._steps[batch]
        else:
            if batch not in self._larger:
                self._larger[batch] = self._without_cache(np.array([float(batch)]))[0]
            base, waits, streams = self._larger[batch]
        read = self._read(batch, context_tokens)
        return base + read * self._token_s - self._hidden * min(waits, streams + read * self._stream_s)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch: int, context_tokens: int) -> float:
        """A step that prefills chunks and generates: one pass over the weights for all of their tokens."""
        return self._mixed_times.seconds(chunks, batch) + (
            self._read(batch, context_tokens) * self._token_s if batch else 0.0
        )

    def transfer_s(self, tokens: int) -> float:
        """The KV of ``tokens`` tokens from a prefill server to a generate server."""
        return tokens * self._stored_per_token / self._transfer

    def host_copy_s(self, tokens: int) -> float:
        """The KV of ``tokens`` tokens between HBM and the hosts' memory, one way, over every chip's PCIe."""
        rate = self._problem.slice.chips * self._problem.slice.chip.pcie_bytes_per_s
        return tokens * self._stored_per_token / rate

    def host_tokens(self, host_bytes: float) -> int:
        """Tokens whose KV fits the hosts of a server, with ``host_bytes`` for it on each host."""
        hosts = min(self._problem.slice.hosts, self._problem.prefill_server.hosts)
        return int(host_bytes * hosts / self._stored_per_token)

    def _without_cache(self, batches: npt.NDArray[np.float64]) -> list[tuple[float, float, float]]:
        """Seconds of a step without a cache by batch: in all, of the collectives' latency, of HBM streams."""
        plain = self._plain.generate(self._generate, batches, context=0.0)
        waiting = self._waiting.generate(self._generate, batches, context=0.0)
        waits = sum((row.count * one.exposed_s for row in waiting for one in row.collectives), 0.0)
        columns = (plain.expected_s, waits, plain.total("hbm") / self._rate)
        table = np.stack([np.broadcast_to(column, batches.shape) for column in columns], axis=1)
        return [(base, wait, stream) for base, wait, stream in table.tolist()]

    def _read(self, batch: int, context_tokens: int) -> float:
        """Tokens of context, as if every layer saw all, that the busiest device reads, for all its peers."""
        busiest = next_multiple(batch, self._spread) / batch
        read = 0.0
        for share, window in self._windows:
            read += share * (context_tokens if window is None else min(context_tokens, window * batch))
        return read * busiest

    @cached_property
    def _stored_per_token(self) -> float:
        problem = self._problem
        tokens = problem.held_tokens
        phase = problem.phase("generate", self._generate, 1.0)
        return float(phase.cached_bytes(tokens, stored=True)) / tokens


class _PrefillTimes:
    """Seconds of prefill steps at one placement: tabulated by new tokens, and so much per (query, key) pair."""

    def __init__(self, problem: ServingProblem, placement: Placement) -> None:
        self.placement = placement
        self._model = problem.model
        self._fixed = problem.book or problem.assumptions.mfu is not None
        self._block = problem.rates.attention_block
        self._pair_s = 0.0 if self._fixed else self._seconds_per_pair(problem)
        times = []
        for new in _GRID:
            whole = float(problem.prefill(placement, float(new)).expected_s)
            times.append(whole - self._pair_s * self._pairs([(new, 0)]))
        self._times = times

    def seconds(self, chunks: Sequence[tuple[int, int]], batch: int) -> float:
        """Chunks of (new, before) tokens, with ``batch`` tokens of other sequences in the same pass."""
        new = batch
        for more, _ in chunks:
            new += more
        return self._table(new) + (self._pair_s * self._pairs(chunks) if self._pair_s else 0.0)

    def _table(self, new: int) -> float:
        after = bisect_left(_GRID, new)
        if after == 0:
            return self._times[0]
        after = min(after, len(_GRID) - 1)
        low, high = _GRID[after - 1], _GRID[after]
        below, above = self._times[after - 1], self._times[after]
        return below + (above - below) * (new - low) / (high - low)

    def _pairs(self, chunks: Sequence[tuple[int, int]]) -> float:
        return sum(chunk_pairs(self._model, new, before, self._block) for new, before in chunks)

    def _seconds_per_pair(self, problem: ServingProblem) -> float:
        phase = problem.phase("prefill", self.placement, 1.0)
        d_qk, d_v = attention_kind(problem.model).head_sizes
        scores = problem.model.heads / phase.split / phase.ways(*EXPERT_AXES, *SEQUENCE_AXES)
        scores *= problem.model.attention_layers
        return float(problem.rates.attention_s(scores, d_qk, d_v, backward=False))


def _windows(problem: ServingProblem) -> list[tuple[float, int | None]]:
    """Share of the layers by window."""
    windows = problem.model.windows
    return [(windows.count(window) / len(windows), window) for window in set(windows)]
