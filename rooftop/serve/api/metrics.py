"""Metrics for Prometheus: latencies of requests, and statistics of the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rooftop.serve.engine.requests import EngineStats, ServingEngine

#: Bounds of histograms in seconds, from a step of a small model to a long answer.
_SHORT = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
_LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)
_TOKENS = tuple(float(2**power) for power in range(0, 21, 2))

#: Name, description and value of statistics of the engine.
_Figures = tuple[tuple[str, str, Callable[[EngineStats], float]], ...]
_GAUGES: _Figures = (
    ("waiting_requests", "Sequences that are queued: they have no place in the engine yet.", lambda s: s.waiting),
    ("running_requests", "Sequences that have a place in the engine.", lambda s: s.running),
    ("kv_pages_used", "Pages of the KV cache that sequences or kept prefixes hold.", lambda s: s.pages_used),
    ("kv_pages", "Pages of the KV cache.", lambda s: s.pages),
    ("servers", "Copies, or parts, of the engine that take their steps at once.", lambda s: s.servers),
    ("kv_groups", "Groups of devices of a server that have an equal part of its pages each.", lambda s: s.kv_groups),
    ("prefill_kv_pages", "Of those pages, the ones of a server that only prefills.", lambda s: s.prefill_pages),
    ("prefill_kv_groups", "Its groups of devices.", lambda s: s.prefill_kv_groups),
    ("kv_page_tokens", "Tokens of a page.", lambda s: s.page_tokens),
    ("kv_host_pages_used", "Pages in the host's memory that are in use.", lambda s: s.host_pages_used),
    ("kv_host_pages", "Pages in the host's memory.", lambda s: s.host_pages),
)
_COUNTERS: _Figures = (
    ("steps", "Steps of the engine.", lambda s: s.steps),
    ("step_seconds", "Time of the engine's steps, each until the next one begins.", lambda s: s.step_s),
    ("busy_seconds", "Time of the engine's steps in which programs ran.", lambda s: s.busy_s),
    ("handovers", "Sequences that were handed over to the process that generates.", lambda s: s.handovers),
    ("handover_seconds", "Time from when their KV was wanted until it was there.", lambda s: s.handover_s),
    ("host_seconds", "Time of the engine's steps outside XLA; over steps: host time per step.", lambda s: s.host_s),
    ("engine_prompt_tokens", "Tokens of the prompts of admitted sequences.", lambda s: s.prompt_tokens),
    ("prefix_hit_tokens", "Of those, tokens whose KV the prefix cache had.", lambda s: s.prefix_tokens),
    ("generated_tokens", "Tokens that the engine generated.", lambda s: s.tokens),
    ("preemptions", "Sequences that lost their place to others when pages ran out.", lambda s: s.preemptions),
    ("guessed_tokens", "Tokens that speculative decoding guessed.", lambda s: s.guessed),
    ("accepted_tokens", "Of those, tokens that were right; over guessed tokens: acceptance.", lambda s: s.accepted),
    ("compilations", "Programs compiled after the warm-up; anything but 0 is a defect.", lambda s: s.compilations),
    ("warmup_programs", "Programs compiled, or read from the cache, in the warm-up.", lambda s: s.programs),
)
_SHAPE = ("sequences", "tokens", "context_tokens", "generating")


class PrometheusMetrics:
    """The metrics of one server. Latencies are measured where the engine hands a token over, before HTTP."""

    def __init__(self, engine: Callable[[], ServingEngine | None]) -> None:
        """``engine`` returns the engine once it is loaded."""
        self._registry = CollectorRegistry()
        self._registry.register(_EngineMetrics(engine))
        self.ttft = self._histogram(
            "time_to_first_token_seconds",
            "TTFT: from the arrival of a request to its first token, queueing included.",
            _LONG,
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "TPOT, by sequence: (last token - first token) / (tokens - 1); none where there is one token.",
            _SHORT,
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds",
            "ITL: each time between two tokens of a sequence, all sequences together.",
            _SHORT,
        )
        self.e2e = self._histogram(
            "request_seconds", "End to end, by sequence: from the arrival of its request to its last token.", _LONG
        )
        self.prompt = self._histogram("prompt_tokens", "Tokens of a prompt, by sequence.", _TOKENS)
        self.output = self._histogram("output_tokens", "Tokens generated, by sequence.", _TOKENS)
        self.finished = Counter(
            "rooftop_sequences", "Sequences that ended, by why.", ("finish",), registry=self._registry
        )
        self.responses = Counter(
            "rooftop_responses", "Answers over HTTP, by path and status.", ("path", "status"), registry=self._registry
        )

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self._registry)

    def _histogram(self, name: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"rooftop_{name}", help_, buckets=buckets, registry=self._registry)


class _EngineMetrics(Collector):
    """The engine's statistics at the time of a scrape."""

    def __init__(self, engine: Callable[[], ServingEngine | None]) -> None:
        self._engine = engine

    def collect(self) -> Iterable[Metric]:
        engine = self._engine()
        if engine is None:
            return
        stats, policy, beat = engine.stats(), engine.policy, engine.beat()
        yield GaugeMetricFamily(
            "rooftop_step_age_seconds",
            "Time since the engine's step loop turned; 0 while it has nothing to do.",
            value=beat.age_s,
        )
        yield CounterMetricFamily(
            "rooftop_engine_restarts", "Processes of the engine that were lost and started again.", value=beat.restarts
        )
        for name, help_, value in _GAUGES:
            yield GaugeMetricFamily(f"rooftop_{name}", help_, value=value(stats))
        for name, help_, value in _COUNTERS:
            yield CounterMetricFamily(f"rooftop_{name}", help_, value=value(stats))
        runs = CounterMetricFamily(
            "rooftop_program_runs",
            "Steps that ran a compiled program, by its shape: sequences, new tokens of prompts in all (0: it "
            "generates), tokens of KV that each sequence can read, sequences that generate beside a prefill.",
            labels=_SHAPE,
        )
        seconds = CounterMetricFamily("rooftop_program_seconds", "Time of those steps, by shape.", labels=_SHAPE)
        for program_time in stats.program_times:
            shape = [str(size) for size in program_time.shape]
            runs.add_metric(shape, program_time.runs)
            seconds.add_metric(shape, program_time.seconds)
        yield runs
        yield seconds
        info = GaugeMetricFamily(
            "rooftop_policy",
            "1, labelled with how the engine batches.",
            labels=("batching", "max_batch", "chunk_tokens", "preemption", "prefix_cache"),
        )
        chunk = "" if policy.chunk_tokens is None else str(policy.chunk_tokens)
        cached = str(engine.prefix_cache).lower()
        info.add_metric([policy.batching, str(policy.max_batch), chunk, policy.preemption, cached], 1)
        yield info
