"""Requests for training runs of language models and of embedding tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from rooftop.requests.kinds import COUNT, DOCUMENT, FILE, FOLDER, MODEL, Kind
from rooftop.requests.request import Request, setting
from rooftop.requests.words import OUTPUT, PARALLELISM

if TYPE_CHECKING:
    from rooftop.models import ModelConfig
    from rooftop.models.embedding_tables.tables import Tables
    from rooftop.plan.training.plan import TrainingPlan
    from rooftop.requests.likes import OfTrainingPlan


@dataclass(frozen=True, kw_only=True)
class Train(Request):
    """Training of a plan or a model on local devices, in the folder ``run``.

    None is the plan's value, or a default.
    """

    verb: ClassVar[str] = "train"
    checked_by: ClassVar[str] = "rooftop.train.request:TrainRequest"

    plan: TrainingPlan | OfTrainingPlan | Mapping[str, object] | Path | str | None = setting(
        None, kind=DOCUMENT, argument=True, metavar="[PLAN.json]"
    )
    """A plan.json of rooftop plan train: its model, mesh, batch and numerics."""
    model: ModelConfig | Path | str | None = setting(None, kind=MODEL)
    """Without a plan: a preset, a config.json or llama:4M."""
    init: Path | str | None = None
    """Begin with a published checkpoint (safetensors)."""
    as_is: bool = False
    """Run a plan for another slice with its own mesh and batch."""
    shrink: bool = False
    """Shrink the plan's mesh to the local devices."""
    devices: int | None = setting(None, metavar="N")
    """Emulate N devices on the CPU."""
    data: str | Path | tuple[str | Path, ...] = setting(several=True)
    """Text, JSONL, Parquet, .npy or .bin: a file, a folder or a glob."""
    field: str = "text"
    """Column of JSONL, Parquet."""
    tokenizer: Path | str | None = None
    """A tokenizer.json, or a folder that has one."""
    vocab: int | None = None
    """Train a BPE tokenizer of N tokens on the data."""
    hold_out: float | None = None
    """Share of the documents to evaluate on; 0: none. [default: 0.01, of one document nothing]"""
    batch_seqs: int | None = None
    """Sequences of a step. [default: the plan's, else about 16]"""
    seq_len: int | None = setting(None, option="seq")
    """Tokens of a sequence. [default: the plan's, else 512]"""
    steps: int = setting()
    """The last step of the run."""
    mesh: Mapping[str, int] | str | None = None
    """Axes over the local devices: fsdp=2,tensor=2. [default: the plan's, else fsdp]"""
    microbatches: int | None = None
    """Parts of a batch whose gradients are accumulated."""
    schedule: str | None = None
    """Schedule of pipeline stages."""
    chunks: int | None = None
    """Model chunks of a stage (interleaved)."""
    remat: str | None = None
    """none, matmuls, minimal, block, or changes: block,qkv=offload."""
    context_attention: str | None = None
    """Attention over a context axis."""
    expert_capacity: float | None = None
    """Room of an expert, in even shares. [default: dropless]"""
    compute_dtype: str | None = None
    """bf16 or f32. [default: the plan's, else bf16, on a CPU f32]"""
    matmul_dtype: str | None = None
    """bf16, f32, int8 or f8_e4m3. [default: the plan's, else ``compute_dtype``]"""
    weights_dtype: str | None = None
    """Dtype of the stored weights. [default: the plan's, else f32]"""
    moments_dtype: str | None = None
    """Dtype of the optimizer's moments. [default: the plan's, else f32]"""
    optimizer: str | None = None
    """The optimizer. [default: the plan's, else adamw]"""
    learning_rate: float = 3e-4
    """Largest learning rate."""
    warmup: int | None = None
    """Steps of warm-up. [default: a tenth of the steps, at most 1000]"""
    decay: str = "cosine"
    """Shape of the decay."""
    decay_steps: int | None = None
    """Last step of the decay. [default: the steps]"""
    final_learning_rate: float = 0.1
    """Last learning rate, as a share of the largest."""
    weight_decay: float = 0.1
    """Decoupled weight decay."""
    clip_norm: float = 1.0
    """Largest norm of the gradients; 0: any."""
    z_loss: float = 0.0
    """Coefficient of the z-loss."""
    balance_loss: float | None = None
    """Coefficient of the balance of experts. [default: 0.01 with experts]"""
    run: Path | str = setting()
    """Folder of the run. One that has begun is resumed."""
    seed: int = 0
    """Seed of weights, order of the data and held-out documents."""
    eval_every: int | None = None
    """Steps between evaluations. [default: at the end only]"""
    eval_batches: int = 16
    """Most batches of an evaluation."""
    save_every: int | None = 100
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints to keep."""
    keep_every: int | None = None
    """Keep checkpoints of steps that N divides."""
    save_also: Path | str | None = None
    """For checkpoints that the run's folder has no room for."""
    divergence: float = 2.0
    """Stop when the loss has risen by this, in nats; 0: never."""
    peak_flops: float | None = None
    """FLOP/s of a device for MFU, if not catalogued."""
    samples: int = 2
    """Texts to draw at the end."""
    sample_tokens: int = 64
    """Tokens of each text."""
    prompt: str = setting("", kind=Kind("TEXT"), group=OUTPUT)
    """Beginning of the texts."""
    temperature: float = 0.8
    """0: the likeliest token."""
    profile: tuple[int, int] | None = None
    """Trace these steps into DIR/profile."""
    tensorboard: bool = False
    """Write TensorBoard events into DIR/tensorboard."""
    export: Path | str | None = None
    """Write the weights as a published checkpoint."""


@dataclass(frozen=True, kw_only=True)
class TrainEmbedding(Request):
    """Training of a DLRM on embedding tables, in the folder ``run``."""

    verb: ClassVar[str] = "embed train"
    checked_by: ClassVar[str] = "rooftop.embed.train.request:EmbeddingTrainRequest"

    tables: Tables | Path | str = setting(kind=DOCUMENT, argument=True)
    """Tables, or a tables.toml."""
    data: Path | str = setting(kind=FILE, argument=True)
    """Criteo's TSV."""
    run: Path | str = setting(kind=FOLDER, argument=True)
    """Folder of the run. One that has begun is resumed."""
    batch_samples: int = 1024
    """Samples of a step, on all devices."""
    steps: int | None = setting(None, kind=COUNT)
    """The last step of the run. [default: the end of the data]"""
    evaluate: Path | str | None = None
    """Data whose AUC is computed at the end."""
    devices: int | None = setting(None, metavar="N")
    """Emulate N devices on the CPU. [default: the local devices]"""
    cores_per_device: int | None = None
    """SparseCores that a device without any emulates. [default: 2]"""
    sample_passes: int = setting(1, group=PARALLELISM)
    """Passes over the samples: a batch is looked up in so many parts, and each row updated once."""
    pipelined: bool = False
    """Overlap tables and dense part: gradients a step stale."""
    limits: Path | str | None = setting(None, group=PARALLELISM)
    """Limits file. [default: the run's own, from its first batches]"""
    learning_rate: float = 1e-3
    """Largest learning rate of the dense part."""
    warmup: int = 0
    """Steps of warm-up."""
    decay: str = "constant"
    """Shape of the decay of all learning rates."""
    decay_steps: int | None = None
    """Last step of the decay. [default: the last step]"""
    final_learning_rate: float = 0.1
    """Last learning rate, as a share of the largest."""
    seed: int | None = None
    """Seed of tables and weights. [default: the run's own; 0 for a new run]"""
    save_every: int = 100
    """Steps between checkpoints."""
    keep: int = 2
    """Newest checkpoints to keep."""
    keep_every: int | None = None
    """Keep checkpoints of steps that N divides."""
    checks: tuple[str, ...] | str | None = setting(None, option="check", kind=Kind("NAMES"))
    """Look for faults: nan; on TPUs also bounds and buffers."""
    host_threads: int = 1
    """Threads that prepare batches on a host."""
    workers: int = 0
    """Processes that prepare batches ahead. [default: none, the run's own]"""
    profile: tuple[int, int] | None = None
    """Trace these steps into RUN/profile."""
    tensorboard: bool = False
    """Write TensorBoard events into RUN/tensorboard."""
