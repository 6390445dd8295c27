"""``rooftop embed train`` and ``rooftop embed export``: a DLRM on Criteo's format, and its tables in int8."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from rooftop.cli.options import json_option
from rooftop.cli.output import console, emit_json, progress_bar

_FILE = click.Path(dir_okay=False, path_type=Path)
_FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command(name="train")
@click.argument("tables", type=_FILE)
@click.argument("data", type=_FILE)
@click.argument("run", type=_FOLDER)
@click.option("--batch", default="1024", show_default=True, metavar="N", help="Samples of a step, on all devices.")
@click.option("--steps", metavar="N", help="At most so many batches in all. All of the data if not given.")
@click.option("--devices", metavar="N", help="Emulate N devices on the CPU. [default: the devices that are here]")
@click.option("--cores-per-device", metavar="N", help="SparseCores that a device without any stands for. [default: 2]")
@click.option(
    "--limits", type=_FILE, help="A limits file to go on with. Default: the run's own, from its first batches."
)
@click.option(
    "--sample-passes", default="1", show_default=True, metavar="N", help="Look up a batch in N parts of its samples."
)
@click.option("--pipelined", is_flag=True, help="Overlap tables and dense part: gradients are stale by a step.")
@click.option("--checkpoint-every", default=100, show_default=True, metavar="N", help="Batches between checkpoints.")
@click.option("--check", metavar="NAMES", help="Look for faults: nan; on TPUs also bounds and buffers.")
@click.option("--profile", metavar="steps=A..B", help="Trace these batches with JAX's profiler, into RUN/profile.")
@click.option("--evaluate", type=_FILE, help="Data to tell the AUC on, at the end.")
@click.option("--lr", default=1e-3, show_default=True, metavar="X", help="Largest learning rate of the dense part.")
@click.option("--warmup", default=0, show_default=True, metavar="N", help="Batches in which all learning rates rise.")
@click.option("--decay", default="constant", show_default=True, help="Of all learning rates: cosine, linear, constant.")
@click.option("--decay-steps", metavar="N", help="Where the decay ends. [default: the last batch]")
@click.option("--final-lr", default=0.1, show_default=True, metavar="X", help="The last, as a share of the largest.")
@click.option("--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="That prepare a batch.")
@click.option("--workers", default=0, show_default=True, metavar="N", help="Processes that read and prepare, ahead.")
@click.option("--seed", type=int, metavar="N", help="[default: the run's own; 0 where it begins]")
@json_option
def train(
    tables: Path,
    data: Path,
    run: Path,
    batch: str,
    steps: str | None,
    devices: str | None,
    cores_per_device: str | None,
    limits: Path | None,
    sample_passes: str,
    pipelined: bool,
    checkpoint_every: int,
    check: str | None,
    profile: str | None,
    evaluate: Path | None,
    lr: float,
    warmup: int,
    decay: str,
    decay_steps: str | None,
    final_lr: float,
    threads: int,
    workers: int,
    seed: int | None,
    as_json: bool,
) -> int:
    """Train a DLRM with TABLES (tables.toml) on DATA (Criteo's TSV) in the folder RUN, or go on with it.

    SIGTERM and Ctrl-C save what is done; the same command goes on.

    \b
    Example: rooftop embed train tables.toml day0.tsv runs/first --batch 4096 --evaluate day1.tsv
    """
    from rooftop.cli.process import parse_profile
    from rooftop.runs.environment import keep_compilations, prepare_environment

    prepare_environment(devices, packages=("jax", "optax"), extra="embed")
    if profile is None:
        # A trace of a program out of a cache has nothing of its scopes.
        keep_compilations()
    import jax

    from rooftop.compiler.sparsecore import parse_checks
    from rooftop.core.files import claimed
    from rooftop.core.quantities import parse_count
    from rooftop.embed.criteo import require_batches, require_labels
    from rooftop.embed.train.options import TrainOptions
    from rooftop.embed.train.trainer import Trainer
    from rooftop.models.embedding_tables.files import load_tables
    from rooftop.runs.signals import Signals
    from rooftop.train.schedule import Schedule

    samples, limit = parse_count(batch, "batch"), None if steps is None else parse_count(steps, "steps")
    last = require_batches(data, samples)
    last = last if limit is None else min(last, limit)
    schedule = Schedule(
        steps=last if decay_steps is None else parse_count(decay_steps, "decay_steps"),
        warmup=warmup,
        decay=decay,
        final=final_lr,
    )
    options = TrainOptions(
        tables=load_tables(tables),
        data=data,
        run=run,
        batch=samples,
        steps=limit,
        devices=len(jax.devices()) if devices is None else parse_count(devices, "devices"),
        cores_per_device=None if cores_per_device is None else parse_count(cores_per_device, "cores_per_device"),
        limits=limits,
        sample_passes=parse_count(sample_passes, "sample_passes"),
        pipelined=pipelined,
        checkpoint_every=checkpoint_every,
        dense_learning_rate=lr,
        share_of=schedule.share if warmup or decay != "constant" else None,
        seed=seed,
        threads=threads,
        workers=workers,
        checks=parse_checks(check),
        profile=parse_profile(profile),
    )
    if evaluate is not None:
        require_labels(evaluate, samples)
    with Signals() as signals, claimed(run):
        # From here on a signal waits until it can be saved; a second one ends the process.
        signals.deferred = True
        trainer = Trainer(options)
        begun = trainer.done
        with progress_bar(shown=not as_json) as bar:
            losses = trainer.train(
                None if bar is None else lambda done, last: bar(done, last, "batches"),
                lambda: signals.caught is not None,
            )
    stopping = signals.caught is not None
    said: dict[str, Any] = {
        "run": str(run),
        "kernel": trainer.target.kernel,
        "batches": trainer.done,
        "begun_at": begun,
        "stopped": stopping,
        "seed": trainer.seed,
        "passes": trainer.passes,
        "dropped_ids": trainer.dropped,
        "limits": str(trainer.limits_file),
        "loss": losses[-1] if losses and math.isfinite(losses[-1]) else None,
        "auc": None if evaluate is None or stopping else trainer.evaluate(evaluate),
    }
    if as_json:
        emit_json(said)
        return 0
    out = console()
    if signals.caught is not None:
        out.print(f"stopped by {signals.caught.name} and saved: the same command goes on")
    out.print(f"{trainer.done:,} batches of {batch} samples, {begun:,} of them before")
    if trainer.target.kernel == "sparsecore":
        out.print("  lookups and updates are XLA's SparseCore operations")
    if losses:
        out.print(f"  loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last (nats a sample)")
    if trainer.passes > 1:
        out.print(f"  batches were looked up in up to {trainer.passes} passes")
    if trainer.dropped:
        out.print(f"  {trainer.dropped:,} ids were dropped for the limits in {trainer.limits_file}")
    if said["auc"] is not None:
        out.print(f"  AUC {said['auc']:.4f} on {evaluate}")
    out.print(f"  checkpoints in {trainer.checkpoints}")
    if trainer.trace.is_dir():
        out.print(f"  trace in {trainer.trace}: see rooftop explain {trainer.trace}")
    return 0


@click.command(name="export")
@click.argument("tables", type=_FILE)
@click.argument("run", type=_FOLDER)
@click.argument("output", type=_FOLDER)
@click.option("--dtype", default="int8", show_default=True, help="int8, or f32: as they were trained.")
@json_option
def export(tables: Path, run: Path, output: Path, dtype: str, as_json: bool) -> int:
    """Write the tables of RUN's newest checkpoint to OUTPUT in int8, and how far that is from what was trained.

    \b
    Example: rooftop embed export tables.toml runs/first served
    """
    from rich.table import Table

    from rooftop.core.errors import RooftopError
    from rooftop.core.quantities import format_bytes
    from rooftop.embed.export import export as write
    from rooftop.embed.train.checkpoint import restore
    from rooftop.models.embedding_tables.files import load_tables

    saved = restore(run / "checkpoints")
    if saved is None:
        raise RooftopError("run", str(run), "a folder with a whole checkpoint, of rooftop embed train")
    report = write(output, load_tables(tables), saved.tables, dtype=dtype)
    if as_json:
        emit_json(report)
        return 0
    if dtype == "f32":
        total = format_bytes(sum(one["bytes"] for one in report["tables"].values()))
        console().print(f"{len(report['tables'])} tables, {total}, as they were trained in {saved.batch:,} batches")
        return 0
    shown = Table(box=None, header_style="", padding=(0, 1, 0, 1))
    for heading in ("table", "rows", "low", "high", "largest error", "relative error", "clipped"):
        shown.add_column(heading, justify="left" if heading == "table" else "right")
    for name, one in report["tables"].items():
        shown.add_row(
            name,
            f"{one['shape'][0]:,}",
            *(f"{one[value]:.4g}" for value in ("low", "high", "max_error")),
            f"{one['relative_error']:.2%}",
            f"{one['clipped']:,}",
        )
    console().print(shown)
    return 0
