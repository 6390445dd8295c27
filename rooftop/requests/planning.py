"""Requests for plans of training, serving and embedding tables."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, ClassVar

from rooftop.requests.kinds import COUNT, DTYPES, SLICE, Name
from rooftop.requests.request import Request, setting
from rooftop.requests.words import WORKLOAD

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rooftop.arrays import Mesh
    from rooftop.requests.likes import (
        AxesLike,
        CalibrationLike,
        CountLike,
        DtypesLike,
        LimitsLike,
        ModelLike,
        PriceLike,
        ServersLike,
        SettingsLike,
        SliceLike,
        SlicesLike,
        TablesLike,
        TimeLike,
    )


@dataclass(frozen=True)
class PlanTraining(Request):
    """A plan of a training run.

    With several slices, chips without a shape, or a limit, slices are compared and the recommended one is planned: the
    cheapest that is in time; the fastest within ``budget`` or ``chips`` without ``days``; or the ``smallest``.
    """

    verb: ClassVar[str] = "plan train"

    model: ModelLike | None = setting(None, stated_by="configuration")
    """A preset, or the path of a Hugging Face config.json or of its folder. By default that of ``--from``."""
    _: KW_ONLY
    on: SlicesLike = setting()
    """A slice, CHIP:SHAPE[@SLICES], such as v5p:16x16x16; or slices and chips to compare: v5p,v6e:16x16@8."""
    chips: CountLike | None = None
    """Compare slices of at most so many chips."""
    smallest: bool = False
    """Recommend the smallest slice that fits and meets the limits."""
    batch_tokens: CountLike | None = None
    """Tokens of a step: 4M, 4Mi. Rounded to whole sequences. Where slices are compared, by default at least 4 Mi and
    so many that a run takes at most a million steps."""
    batch_seqs: CountLike | None = None
    """Sequences of a step, instead of tokens."""
    seq: CountLike | None = None
    """Tokens of a sequence. By default 4,096, or what the model allows."""
    tokens: CountLike | None = None
    """Tokens in all, for days and cost: 15T."""
    days: float | str | None = None
    """Days for all tokens: recommend the cheapest slice in time."""
    budget: float | str | None = None
    """Dollars for all tokens: recommend the fastest slice: 20M."""
    framework: str = "rooftop"
    """The program to plan: rooftop's own, or that of a framework that trains on the chip; all: compare them."""
    release: str | None = None
    """Release of the framework; of libtpu for rooftop's own program. By default the newest known, or the installed."""
    framework_settings: SettingsLike | None = setting(None, option="set")
    """Settings of the framework: cuda_graphs=layer,dispatcher=deepep. By default those of its recipes for the chip."""
    configuration: Path | str | None = setting(None, option="from")
    """A configuration of the framework to price: a script with Megatron's arguments, a MaxText YAML, a torchtitan TOML,
    or the name of one that they ship. Other options change it."""
    mesh: AxesLike | Mesh | None = None
    """Sizes of axes: fsdp=1024,tensor=4. Searched by default."""
    layout: str | None = None
    """Pin axes to the torus: fsdp=x+y,tensor=z[1:4],context=z[4:4]."""
    remat: str | None = None
    """Recomputation policy: none, matmuls, minimal, block, or changes: block,qkv=offload. Searched by default."""
    microbatches: CountLike | None = None
    """Microbatches of a step. Searched by default."""
    collective_matmuls: bool | None = None
    """Overlap dense matmuls with their collectives over tensor. Searched by default."""
    experts_over_tensor: bool | None = None
    """Deal out whole experts over tensor, in place of their columns. Searched by default."""
    schedule: str | None = None
    """Schedule of pipeline stages. Searched by default."""
    chunks: CountLike | None = None
    """Model chunks of a stage (interleaved). Searched by default."""
    matmul_dtype: str = "bf16"
    """Dtype of the layers' matmuls: bf16, int8, f8_e4m3."""
    weights_dtype: str = "f32"
    """Dtype of the stored weights."""
    moments_dtype: str = "f32"
    """Dtype of the optimizer's moments."""
    optimizer: str = "adamw"
    """The optimizer."""
    lora: CountLike | None = None
    """Train adapters of this rank; all weights are frozen. No program of rooftop does."""
    lora_targets: Sequence[str] | str = "qkv,attn_out,mlp"
    """Weights with adapters."""
    base_format: str | None = None
    """Format of frozen matrices: bf16 (default), int8, f8_e4m3, int4, f4_e2m1, nf4."""
    assume: str | None = None
    """Shares of transfers that hide: weight_gather=1,tensor=0.5 (docs/plan.md)."""
    calibration: CalibrationLike | None = None
    """Take the fractions that rooftop calibrate measured (JSON)."""
    bounds: str = "usable"
    """Usable HBM, or the book's arithmetic."""
    price: PriceLike | None = None
    """Dollars per chip-hour, not the list price: 2.5, or h100=2.5,v5p=3."""
    alternatives: CountLike = 5
    """Other meshes to show."""
    compile: CountLike | None = None
    """Compile the N best plans with XLA, without the chips, and recommend the one whose compiled step is the
    fastest."""


@dataclass(frozen=True)
class PlanServing(Request):
    """A plan of serving on one slice, or of a fleet for a rate of requests or over several chips."""

    verb: ClassVar[str] = "plan serve"

    model: ModelLike = "llama3-70b"
    """A preset, or the path of a Hugging Face config.json or of its folder."""
    _: KW_ONLY
    on: ServersLike
    """A slice, CHIP:SHAPE, such as v5e:4x4; or chips to search: v5e,v6e,h100."""
    engine: str = "rooftop"
    """The engine to plan: rooftop's own, or one whose kernels are priced on GPUs."""
    release: str | None = None
    """Release of the engine. By default the newest that is known."""
    engine_settings: SettingsLike | None = setting(None, option="set")
    """Settings of the engine: step_tokens=16384,memory=0.8. By default those of its recipes for the chip."""
    prompt: CountLike | None = None
    """Tokens of a prompt. By default 8,192, or what the model allows."""
    generate: CountLike = 512
    """Tokens of an answer."""
    batch_seqs: CountLike | None = None
    """Sequences generated together. By default the knee, or the most within ``tpot``."""
    context: CountLike | None = None
    """Tokens in the cache at the priced step. By default the prompt and half of the answer."""
    weights_dtype: DtypesLike | None = setting(None, kind=DTYPES)
    """Dtype of the layers' weights; a list when chips are searched. By default as published, where an engine keeps
    that format, or bf16."""
    kv_dtype: DtypesLike | None = setting(None, kind=DTYPES)
    """Dtype of the KV cache; a list when chips are searched. By default bf16, or as the engine has it."""
    matmul_dtype: str = "bf16"
    """Dtype of the layers' matmuls."""
    embeddings_dtype: str | None = None
    """Dtype of embedding and unembedding. By default bf16, as engines have them."""
    weight_group: CountLike | None = None
    """Weights of a column that share a scale. By default all, and 32 of f4_e2m1 (MXFP4), or as the engine has it."""
    kv_sharing: CountLike = 1
    """Layers that share one KV cache."""
    batching: str | None = setting(None, kind=Name("disaggregated", "interleaved"))
    """Batching of servers. By default disaggregated, of clients (``concurrency``) interleaved; both when chips are
    searched."""
    mesh: AxesLike | None = None
    """Axes of generation: context=2,tensor=8. Searched by default."""
    prefill_mesh: AxesLike | None = None
    """Axes of a prefill: context=2,tensor=8. Searched by default."""
    prefill_on: SliceLike | None = None
    """A prefill server, if it is another slice of the same chip."""
    kv_split: str | None = None
    """Split of the cache over the context axis: by sequences (batch) or tokens (seq). Searched by default."""
    link: str = "dcn"
    """Network between prefill and generate servers."""
    ttft: TimeLike | None = None
    """Target of the time to first token: 500ms."""
    tpot: TimeLike | None = None
    """Target of the time per output token: 30ms."""
    requests_per_second: float | str | None = None
    """Rate to plan servers for."""
    concurrency: CountLike | None = None
    """Clients of another engine that each wait for an answer: latencies are then those under this load."""
    requests: CountLike | None = None
    """Requests of all clients; 10 for each by default."""
    shortest: float | str = 1.0
    """Shortest requests of clients, as a share of the stated lengths, from which lengths are drawn."""
    replicas: CountLike = 1
    """Servers of the clients (disaggregated: that generate)."""
    prefill_servers: CountLike = 1
    """Disaggregated: servers that prefill for the clients."""
    objective: str = setting("cost", option="for")
    """Objective of a search: least cost, fewest chips, or all ways of which none is both slower and dearer (pareto)."""
    hit_rate: float | str = 0.0
    """Share of the prompt that the prefix cache has."""
    host_dram: CountLike | None = setting(None, group=WORKLOAD)
    """Memory of a host for the prefix cache: 400G."""
    draft: ModelLike | None = None
    """Draft model of speculative decoding."""
    draft_length: CountLike = setting(4, kind=COUNT)
    """Tokens that a draft guesses a round."""
    acceptance: float | str = 0.7
    """Probability that a guess is right."""
    mfu: float | str | None = None
    """Fix the prefill's efficiency: 2 x parameters x tokens at this share of peak."""
    assume: str | None = None
    """Assumptions beyond the bound: hbm_read=0.9,latency=0.5 (docs/plan-serve.md)."""
    calibration: CalibrationLike | None = None
    """Take the fractions that rooftop calibrate measured (JSON)."""
    bounds: str = "usable"
    """Usable HBM, or the book's arithmetic."""
    price: PriceLike | None = None
    """Dollars per chip-hour, not the list price: 2.5, or h100=2.5,v5p=3."""
    contexts: Sequence[CountLike] | str | None = None
    """Contexts of the Pareto front: 2k,8k,32k. By default the workload's."""


@dataclass(frozen=True)
class PlanEmbedding(Request):
    """A plan of embedding tables on a slice."""

    verb: ClassVar[str] = "plan embed"

    tables: TablesLike
    """Tables, or the path of a TOML file of them."""
    _: KW_ONLY
    on: SliceLike = setting(kind=SLICE)
    """A slice with SparseCores, such as v5p:2x2x1."""
    batch_samples: CountLike = 16384
    """Samples of a step, on all devices."""
    limits: LimitsLike | None = None
    """Limits of the stacks, or a limits file. By default from ids_per_sample."""
    sample_passes: CountLike = 1
    """Look up a batch in N parts of its samples."""
    dense_flops: float | str | None = None
    """Matmul FLOPs of a sample in the dense part, forward: 30M."""
    host_threads: CountLike | None = None
    """Threads that prepare batches on a host."""
    calibration: CalibrationLike | None = None
    """Take the fractions that rooftop calibrate measured (JSON)."""
