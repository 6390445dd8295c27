"""The vocabulary: one name has one kind of value and one group in every verb."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rooftop.requests.kinds import (
    AXES,
    BYTES,
    COUNT,
    COUNT_OR_ZERO,
    DTYPE,
    FILE,
    FLAG,
    HARDWARE_NAME,
    MODEL,
    PATH,
    QUANTITY,
    SHARE,
    TIME,
    Kind,
    Listed,
    Name,
    Pairs,
)

#: Headings under which ``--help`` shows options, in this order; options without a heading come last.
HARDWARE = "Model and hardware"
WORKLOAD = "Workload"
PARALLELISM = "Parallelism"
NUMERICS = "Numerics"
ASSUMPTIONS = "Assumptions"
CACHE = "KV cache"
RUN = "Run"
SERVER = "Server"
PROCESSES = "Processes"
OUTPUT = "Output"
GROUPS = (HARDWARE, WORKLOAD, PARALLELISM, NUMERICS, ASSUMPTIONS, CACHE, RUN, SERVER, PROCESSES, OUTPUT)

#: Names that fields accept, in the words of the modules that read them; tests hold them equal.
SCHEDULES = ("eager_1f1b", "gpipe", "1f1b", "interleaved", "zero_bubble")
OPTIMIZERS = ("adamw", "adam", "lion", "muon", "adafactor", "sgd")
BATCHINGS = ("static", "interleaved", "disaggregated")
LEVELS = ("bound", "expected", "book")


@dataclass(frozen=True, kw_only=True)
class Word:
    """A name's group in help and kind of value; ``option`` where the option has another name, ``metavar`` for help."""

    group: str = ""
    kind: Kind = Kind("text")
    option: str = ""
    metavar: str = ""

    def with_changes(self, changes: Mapping[str, Any]) -> Word:
        """The word with other attributes."""
        return replace(self, **changes) if changes else self


def _words(group: str, **kinds: Kind) -> dict[str, Word]:
    return {name: Word(group=group, kind=kind) for name, kind in kinds.items()}


#: Group and kind of fields by name. A field with another kind in one verb says so where it is declared.
WORDS: Mapping[str, Word] = {
    **_words(
        HARDWARE, model=MODEL, on=HARDWARE_NAME, chips=COUNT, smallest=FLAG, price=Pairs("USD"),
        link=Name("ici", "dcn"), prefill_on=Kind("SLICE"), replicas=COUNT, prefill_servers=COUNT,
        tables=PATH, plan=PATH,
    ),
    **_words(
        WORKLOAD, batch_tokens=COUNT, batch_seqs=COUNT, batch_samples=COUNT, tokens=COUNT, days=QUANTITY, seq=COUNT,
        budget=Kind("USD"), prompt=COUNT, generate=COUNT, context=COUNT, ttft=TIME, tpot=TIME,
        requests_per_second=QUANTITY, hit_rate=SHARE, draft=MODEL, draft_length=COUNT_OR_ZERO, acceptance=SHARE,
        batching=Name(*BATCHINGS), limits=FILE, sample_passes=COUNT, dense_flops=QUANTITY, trace=PATH, duration=TIME,
        concurrency=COUNT, requests=COUNT, burstiness=QUANTITY, hash_tokens=COUNT, chunk_tokens=COUNT,
        routing=Name("round_robin", "least_loaded", "affinity"), preemption=Name("recompute", "swap"),
        prefix_cache=FLAG,
    ),
    **_words(
        PARALLELISM, mesh=AXES, layout=Kind("LAYOUT"), remat=Kind("POLICY"), microbatches=COUNT,
        collective_matmuls=FLAG, experts_over_tensor=FLAG, schedule=Name(*SCHEDULES), chunks=COUNT, prefill_mesh=AXES,
        kv_split=Name("batch", "seq"),
    ),
    **_words(
        NUMERICS, matmul_dtype=DTYPE, weights_dtype=DTYPE, moments_dtype=DTYPE, kv_dtype=DTYPE, compute_dtype=DTYPE,
        embeddings_dtype=DTYPE, optimizer=Name(*OPTIMIZERS), weight_group=COUNT, kv_sharing=COUNT,
    ),
    **_words(
        ASSUMPTIONS, assume=Pairs("NAME=SHARE,..."), calibration=FILE, bounds=Name("usable", "book"), mfu=SHARE,
        engine=Name("vllm", "trtllm"),
    ),
    **_words(RUN, host_dram=BYTES, host_threads=COUNT, seed=COUNT_OR_ZERO),
    **_words(
        OUTPUT, alternatives=COUNT, objective=Name("cost", "chips", "pareto"), contexts=Listed("LIST"),
    ),
}  # fmt: skip
