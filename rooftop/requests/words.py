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
    DEVICES,
    DOCUMENT,
    DTYPE,
    FILE,
    FLAG,
    HARDWARE_NAME,
    MODEL,
    NUMBER,
    PATH,
    PROFILE,
    QUANTITY,
    SHARE,
    TIME,
    TOP,
    Figures,
    Kind,
    Listed,
    Location,
    Name,
    Pairs,
    Sizes,
)

#: Headings under which ``--help`` shows options, in this order; options without a heading come last.
HARDWARE = "Model and hardware"
WORKLOAD = "Workload"
FRAMEWORK = "Framework"
PARALLELISM = "Parallelism"
NUMERICS = "Numerics"
ASSUMPTIONS = "Assumptions"
CACHE = "KV cache"
RUN = "Run"
SERVER = "Server"
PROCESSES = "Processes"
OUTPUT = "Output"
GROUPS = (
    HARDWARE, WORKLOAD, FRAMEWORK, PARALLELISM, NUMERICS, ASSUMPTIONS, CACHE, RUN, SERVER, PROCESSES, OUTPUT,
)  # fmt: skip

#: Names that fields accept, in the words of the modules that read them; tests hold them equal.
FRAMEWORKS = ("rooftop", "maxtext", "megatron", "torchtitan")
ENGINES = ("rooftop", "vllm", "trtllm", "sglang")
SCHEDULES = ("eager_1f1b", "gpipe", "1f1b", "interleaved", "zero_bubble")
OPTIMIZERS = ("adamw", "adam", "lion", "muon", "adafactor", "sgd")
BATCHINGS = ("static", "interleaved", "disaggregated")
LEVELS = ("bound", "expected", "book")


@dataclass(frozen=True, kw_only=True)
class Word:
    """A name's group in help and kind of value; ``option`` where the option has another name, ``metavar`` for help.

    An ``option`` on/off names both sides of a flag.

    An option with ``several`` may be given more than once. ``envvar`` gives it too. A ``secret`` is never written. An
    ``argument`` has no name on a command line; by default a field that may be passed without its name in Python. One
    that is not ``typed`` is no option: Python and the JSON of a request have it. ``label`` and ``unit`` are for forms.
    ``stated_by`` is the field without which one with a default must be given.
    """

    group: str = ""
    kind: Kind = Kind("text")
    option: str = ""
    metavar: str = ""
    several: bool = False
    envvar: str | None = None
    secret: bool = False
    argument: bool | None = None
    typed: bool = True
    label: str = ""
    unit: str = ""
    stated_by: str = ""

    def with_changes(self, changes: Mapping[str, Any]) -> Word:
        """The word with other attributes."""
        return replace(self, **changes) if changes else self


def _words(group: str, **kinds: Kind) -> dict[str, Word]:
    return {name: Word(group=group, kind=kind) for name, kind in kinds.items()}


_UNLABELLED: Mapping[str, Word] = {
    **_words(
        HARDWARE, model=MODEL, on=HARDWARE_NAME, chips=COUNT, smallest=FLAG, price=Pairs("USD", numbers=True),
        link=Name("ici", "dcn"), prefill_on=Kind("SLICE"), replicas=COUNT, prefill_servers=COUNT,
        tables=Location("path", object_too=True),
        plan=Location("path", object_too=True), checkpoint=PATH, weights_of=Location("DIR"), shrink=FLAG,
        init=Location("DIR"), as_is=FLAG,
    ),
    **_words(
        WORKLOAD, batch_tokens=COUNT, batch_seqs=COUNT, batch_samples=COUNT, tokens=COUNT, days=QUANTITY, seq=COUNT,
        budget=Kind("USD"), prompt=COUNT, generate=COUNT, context=COUNT, ttft=TIME, tpot=TIME,
        requests_per_second=QUANTITY, hit_rate=SHARE, draft=MODEL, draft_length=COUNT_OR_ZERO, acceptance=SHARE,
        batching=Name(*BATCHINGS), limits=FILE, sample_passes=COUNT, dense_flops=QUANTITY, trace=PATH, duration=TIME,
        concurrency=COUNT, requests=COUNT, shortest=SHARE, burstiness=QUANTITY, hash_tokens=COUNT, chunk_tokens=COUNT,
        routing=Name("round_robin", "least_loaded", "affinity"), preemption=Name("recompute", "swap"),
        prefix_cache=FLAG, max_model_len=COUNT, data=PATH, field=Kind("NAME"), tokenizer=PATH, vocab=COUNT,
        hold_out=NUMBER, evaluate=FILE, seq_len=COUNT, dims=Sizes(),
    ),
    **_words(
        FRAMEWORK, framework=Name(*FRAMEWORKS, "all"),
        release=Kind("VERSION"), framework_settings=Pairs("NAME=VALUE,..."),
        configuration=Kind("FILE|RECIPE"), engine=Name(*ENGINES), engine_settings=Pairs("NAME=VALUE,..."),
    ),
    **_words(
        PARALLELISM, mesh=AXES, layout=Kind("LAYOUT"), remat=Kind("POLICY"), microbatches=COUNT,
        collective_matmuls=FLAG, experts_over_tensor=FLAG, schedule=Name(*SCHEDULES), chunks=COUNT, prefill_mesh=AXES,
        kv_split=Name("batch", "seq"), prefill_devices=COUNT,
        context_attention=Name("ring", "all_gather"), expert_capacity=NUMBER,
        cores_per_device=COUNT,
        pipelined=FLAG,
    ),
    **_words(
        NUMERICS, matmul_dtype=DTYPE, weights_dtype=DTYPE, moments_dtype=DTYPE, kv_dtype=DTYPE, compute_dtype=DTYPE,
        embeddings_dtype=DTYPE, dtype=DTYPE, optimizer=Name(*OPTIMIZERS), weight_group=COUNT, kv_sharing=COUNT,
        warmup=COUNT_OR_ZERO, decay=Name("cosine", "linear", "constant"), decay_steps=COUNT, weight_decay=NUMBER,
        z_loss=NUMBER, balance_loss=NUMBER, lora_targets=Listed("LIST"), base_format=Kind("FORMAT"),
    ),
    **_words(
        ASSUMPTIONS, assume=Kind("NAME=SHARE,..."), calibration=DOCUMENT, bounds=Name("usable", "book"), mfu=SHARE,
        level=Name(*LEVELS),
    ),
    **_words(
        RUN, host_dram=BYTES, host_threads=COUNT, seed=COUNT_OR_ZERO, run=Location("DIR"), steps=COUNT_OR_ZERO,
        eval_every=COUNT, eval_batches=COUNT, save_every=COUNT, keep=COUNT, keep_every=COUNT, save_also=Location("DIR"),
        divergence=NUMBER, peak_flops=QUANTITY, checks=Kind("NAMES"), workers=COUNT_OR_ZERO, timeout=TIME,
        compile=COUNT,
    ),
    "figures": Word(group=HARDWARE, kind=Figures(), option="figure", several=True),
    "profile": Word(group=OUTPUT, kind=PROFILE, metavar="steps=A..B"),
    "lora": Word(group=NUMERICS, kind=COUNT, metavar="RANK"),
    "learning_rate": Word(group=NUMERICS, kind=NUMBER, option="lr"),
    "final_learning_rate": Word(group=NUMERICS, kind=NUMBER, option="final-lr"),
    "clip_norm": Word(group=NUMERICS, kind=NUMBER, option="clip"),
    **_words(CACHE, page_tokens=COUNT, pages=COUNT, host_pages=COUNT_OR_ZERO),
    **_words(
        SERVER, url=Kind("URL"), host=Kind("ADDRESS"), port=COUNT, name=Kind("NAME"), api_keys=Kind("KEY"),
        cors=Kind("ORIGIN"),
        max_queue=COUNT, max_body=BYTES, allow_host=Kind("NAME"), tls_cert=FILE, tls_key=FILE, request_timeout_s=TIME,
        max_connections=COUNT, max_connections_per_address=COUNT, step_timeout_s=TIME, chat_template=FILE, drain_s=TIME,
        log_level=Name("debug", "info", "warning", "error"), log_texts=FLAG,
    ),
    **_words(
        PROCESSES, devices=DEVICES, coordinator=Kind("HOST:PORT"), processes=COUNT, process=COUNT_OR_ZERO,
        generate_at=Kind("local|HOST:PORT"), role=Name("generate"), link_key=Kind("KEY"),
    ),
    **_words(
        OUTPUT, alternatives=COUNT, objective=Name("cost", "chips", "pareto"), contexts=Listed("LIST"),
        samples=COUNT_OR_ZERO, sample_tokens=COUNT, temperature=NUMBER, tensorboard=FLAG,
        export=Location("DIR"), top=TOP,
    ),
}  # fmt: skip

#: Labels of fields in forms, with their units, where the name of the option is none.
_LABELS: Mapping[str, tuple[str, str]] = {
    "on": ("Slice", ""),
    "batch_seqs": ("Batch", "sequences"),
    "batch_samples": ("Batch", "samples"),
    "seq": ("Sequence", "tokens"),
    "context": ("Context", "tokens"),
    "dense_flops": ("Dense FLOPs", ""),
    "host_threads": ("Threads of a host", ""),
    "tables": ("Tables (TOML)", ""),
    "weights_dtype": ("Weights", ""),
    "kv_dtype": ("KV cache", ""),
    "bounds": ("Arithmetic", ""),
    "level": ("Price", ""),
    "dims": ("Sizes of dims", ""),
    "chunks": ("Chunks of a stage", ""),
    "framework_settings": ("Settings", ""),
}
#: Group and kind of fields by name. A field with another kind in one verb says so where it is declared.
WORDS: Mapping[str, Word] = {
    name: word.with_changes(dict(zip(("label", "unit"), _LABELS[name], strict=True)) if name in _LABELS else {})
    for name, word in _UNLABELLED.items()
}

#: Meanings of names that verbs share, where a field says more.
MEANINGS: Mapping[str, str] = {
    "mesh": "Mesh axes and their sizes: fsdp=4,tensor=2.",
    "steps": "The last step of the run, or of a script.",
    "timeout": "Give up after this time: 10m.",
    "plan": "A plan.json.",
    "assume": "Assumptions beyond the bound.",
    "compile": "Compile with XLA for the slice, and compare: an expression, or the N best plans.",
    "check": "Build checks in: nan, bounds, buffers.",
    "batch_seqs": "Sequences of a step.",
    "batch_tokens": "Tokens of a step: 4M, 4Mi. Rounded to whole sequences.",
    "batching": "Batching of requests.",
    "microbatches": "Microbatches of a step.",
    "remat": "none, matmuls, minimal, block, or changes: block,qkv=offload.",
    "weights_dtype": "Dtype of the stored weights.",
    "kv_dtype": "Dtype of the KV cache.",
    "compute_dtype": "Dtype of everything else that is computed.",
    "embeddings_dtype": "Dtype of embedding and unembedding.",
    "weight_group": "Input channels of the weights that share a scale.",
    "host_dram": "Memory of a host for KV pages: 400G.",
    "workers": "Worker processes.",
}
