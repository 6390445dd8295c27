"""Random training runs as a user has them: planned, trained, evaluated, resumed on another mesh, and exported.

    python -m tests.support.whole_run --seed 1 --count 300

Each draw is a model of some family, a mesh, a schedule, dtypes, an optimizer and a remat policy. The command line plans
it, trains the plan on emulated devices for two steps and evaluates it, resumes the run on another mesh or by another
plan, evaluates the same weights there, trains a third step, and exports the weights. ``--compare`` trains each on one
device as well, and compares all losses. Every command is a process of its own, so that a draw that aborts is known, and
no XLA flag is set. A draw has a number, and ``--start`` begins with it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from rooftop.arrays.rules import AXES, BATCH_AXES, EXPERT_AXES, STAGE_AXES, ways
from rooftop.core.errors import RooftopError
from rooftop.models import from_huggingface, load_model
from rooftop.models.activations import POLICIES
from rooftop.models.optimizers import OPTIMIZERS
from rooftop.scheduling.pipeline import SCHEDULES
from tests.support.checkpoint_tensors import from_checkpoint
from tests.support.forks import Fork
from tests.support.tiny_models import NAMES, ORACLES
from tests.support.training_runs import write_corpus

#: Of every command: no flag of XLA but those that ``rooftop`` sets itself.
ENVIRONMENT = {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
#: Hardware to plan for, by its number of devices.
HARDWARE = {
    1: ("v5e:1x1", "v6e:1x1"), 2: ("tpu7x:1x1x1", "v5e:1x1@2"), 4: ("v5e:2x2", "v5p:2x2x1", "h100:4"),
    8: ("v5e:2x4", "v6e:2x4", "v5p:2x2x2", "tpu7x:2x2x1", "v5e:2x2@2", "h100:8"),
}  # fmt: skip
#: Largest difference of losses, relative to them: if the step computes in float32, and in fewer bits.
TOLERANCE = {"f32": 5e-3, "bf16": 2e-2}
#: The same of models with experts, which rounded scores choose.
EXPERT_TOLERANCE = 5e-2
VOCAB = 300
STEPS = 2
#: Seconds that a command may take.
PATIENCE_S = 1800


@dataclass(frozen=True, kw_only=True)
class WholeRun:
    """A drawn run: the config.json, options of plans and of training, and the meshes and hardware it is resumed on."""

    config: dict[str, Any]
    hardware: str
    axes: dict[str, int]
    planned: dict[str, Any]
    trained: dict[str, Any]
    resumed_by_plan: bool
    resumed: tuple[tuple[str, dict[str, int]], ...]


def draw(seed: int, number: int) -> WholeRun:
    """Return run ``number`` of a seed."""
    rng = Random(f"{seed}/{number}")
    config = _config(rng, rng.choice(NAMES))
    model = from_huggingface(config, "the model")
    known = [axis for axis in AXES if axis not in EXPERT_AXES or model.moe is not None]
    hardware, axes = _mesh(rng, known)
    stages = ways(axes, *STAGE_AXES)
    microbatches = rng.choice((1, 2, 3, 4))
    longest = min(model.max_seq_len, 64)
    planned: dict[str, Any] = {
        "batch-seqs": rng.choice((ways(axes, *BATCH_AXES) * microbatches, rng.randint(1, 12))),
        "seq": rng.choice((longest // 16 * 16 or longest // 8 * 8, rng.randint(8, longest))),
        "microbatches": microbatches,
        "remat": rng.choice((None, *POLICIES, "block,qkv=offload", "full,mlp_up=save")),
        "optimizer": rng.choice(list(OPTIMIZERS)),
        "matmul-dtype": rng.choice((None, None, None, "int8", "f8_e4m3")),
        "weights-dtype": rng.choice((None, "bf16")),
        "moments-dtype": rng.choice((None, "bf16")),
        rng.choice(("collective-matmuls", "no-collective-matmuls", "experts-over-tensor", "no-experts-over-tensor")): (
            rng.choice((True, None))
        ),
    }
    if stages > 1:
        planned["schedule"] = rng.choice(list(SCHEDULES))
        planned["chunks"] = rng.randint(2, 3) if planned["schedule"] == "interleaved" else None
    return WholeRun(
        config=config,
        hardware=hardware,
        axes=axes,
        planned=planned,
        trained={"compute-dtype": rng.choice((None, None, "f32")), "samples": rng.choice((0, 0, 0, 1))},
        resumed_by_plan=rng.random() < 0.3,
        resumed=tuple(_mesh(rng, known) for _ in range(2)),
    )


def _mesh(rng: Random, known: Sequence[str]) -> tuple[str, dict[str, int]]:
    """Hardware, and axes of all its devices, some of those that are ``known``."""
    devices = rng.choice((8, 8, 8, 4, 4, 2, 1))
    axes = dict.fromkeys(AXES, 1)
    for _ in range(devices.bit_length() - 1):
        axes[rng.choice(known)] *= 2
    return rng.choice(HARDWARE[devices]), {axis: size for axis, size in axes.items() if size > 1} or {AXES[0]: 1}


def _config(rng: Random, name: str) -> dict[str, Any]:
    """The config.json of a tiny model, often with another number of layers."""
    config: dict[str, Any] = json.loads((ORACLES / "logits" / f"{name}.json").read_text())["config"]
    text = config.get("text_config", config)
    text["vocab_size"] = VOCAB + rng.choice((0, 0, 1, 20))
    layers = next(key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in text)
    if rng.random() < 0.7 and not any(isinstance(value, list) for key, value in text.items() if "layer" in key):
        published = text[layers]
        text[layers] = rng.randint(published, 9)
        try:
            from_huggingface(config, name)
        except RooftopError:
            # Other keys of the family name layers too.
            text[layers] = published
    return config


#: Name of a loss and its step -> the loss.
_Losses = dict[tuple[str, int], float]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a draw: ``passed``, ``refused`` by a planner or by training with a named reason, or ``failed``."""

    kind: str
    reason: str = ""
    commands: list[str] = field(default_factory=list)


class _Ended(Exception):
    """A command that did not answer yes."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(kind, reason)
        self.kind, self.reason = kind, reason


def outcome(run: WholeRun, data: Path, *, compared: bool) -> Outcome:
    """Plan, train, resume and export a run with the corpus in ``data``. ``compared``: with one device, too."""
    commands = list[str]()
    with tempfile.TemporaryDirectory(prefix="rooftop-whole-run-") as folder:
        try:
            _Attempt(run, Path(folder), data, commands).whole(compared=compared)
        except _Ended as end:
            return Outcome(kind=end.kind, reason=end.reason, commands=commands)
    return Outcome(kind="passed", commands=commands)


class _Attempt:
    """The commands of a run."""

    def __init__(self, run: WholeRun, folder: Path, data: Path, commands: list[str]) -> None:
        self.run, self.folder, self.data, self.commands = run, folder, data, commands
        (folder / "config.json").write_text(json.dumps(run.config))

    def whole(self, *, compared: bool) -> None:
        """Raise _Ended if the run is refused or fails."""
        run, folder = self.run, self.folder
        plan = self._plan("plan.json", run.hardware, run.axes)
        more = {
            "data": self.data, "vocab": VOCAB, "hold-out": 0.2, "lr": 1e-2, "warmup": 0, "decay": "constant",
            "eval-every": STEPS, "eval-batches": 1, "sample-tokens": 2, "divergence": 0, **run.trained,
        }  # fmt: skip
        self._call(
            "train", plan, "as-is", devices=math.prod(run.axes.values()), run=folder / "run", steps=STEPS, **more
        )
        self._require((folder / "run" / "checkpoints" / str(STEPS)).is_dir(), "no checkpoint was written")
        before = self._forget_evaluation()
        self._resume()
        if compared:
            self._call(
                "train", plan, mesh=_text({AXES[0]: 1}), devices=1, run=folder / "one", steps=STEPS + 1,
                **(more | {"samples": 0}),
            )  # fmt: skip
        self._compare(before, compared=compared)
        self._read_export()

    def _plan(self, name: str, hardware: str, axes: dict[str, int]) -> Path:
        path = self.folder / name
        self._call("plan", "train", self.folder / "config.json", on=hardware, mesh=_text(axes), output=path,
                   **self.run.planned, refusals=(1, 2))  # fmt: skip
        plan = json.loads(path.read_text())
        if not plan["executable"]:
            raise _Ended("refused", f"plan: {_folded(plan['obstacles'][0])}")
        return path

    def _resume(self) -> None:
        """Train a third step on another mesh: the first of those drawn that can be planned, or else one device."""
        if self.run.resumed_by_plan:
            for hardware, axes in self.run.resumed:
                try:
                    plan = self._plan("another.json", hardware, axes)
                except _Ended as end:
                    if end.kind == "failed":
                        raise
                    continue
                self._third("as-is", devices=math.prod(axes.values()), positional=plan)
                return
        for _, axes in (*self.run.resumed, ("", {AXES[0]: 1})):
            try:
                self._third(mesh=_text(axes), devices=math.prod(axes.values()), refusals=(2,))
            except _Ended as end:
                if end.kind == "failed" or math.prod(axes.values()) == 1:
                    raise _Ended("failed", end.reason) from None
                continue
            return

    def _third(self, *flags: str, positional: Path | None = None, **options: Any) -> None:
        where = {"run": self.folder / "run"} if positional is not None else {"resume": self.folder / "run"}
        words = [] if positional is None else [positional]
        self._call(
            "train", *words, *flags, **where, steps=STEPS + 1, samples=0, export=self.folder / "export", **options
        )

    def _forget_evaluation(self) -> float:
        """Remove the last evaluation from the records, so that the next start does it again; return its loss."""
        file = self.folder / "run" / "metrics.jsonl"
        *lines, last = file.read_text().splitlines(keepends=True)
        record = json.loads(last)
        self._require(record["step"] == STEPS and "eval_loss" in record, f"the records end with {last}")
        file.write_text("".join(lines))
        return float(record["eval_loss"])

    def _compare(self, before: float, *, compared: bool) -> None:
        ours = _losses(self.folder / "run")
        steps = [("loss", 1), ("loss", 2), ("eval_loss", 2), ("loss", 3), ("eval_loss", 3)]
        self._require(sorted(ours) == sorted(steps), f"records of {sorted(ours)}")
        self._require(all(loss is not None and math.isfinite(loss) for loss in ours.values()), f"losses {ours}")
        exact = self.run.trained["compute-dtype"] == "f32" and self.run.planned["matmul-dtype"] is None
        within = TOLERANCE["f32" if exact else "bf16"]
        if load_model(str(self.folder / "config.json")).moe is not None:
            within = EXPERT_TOLERANCE
        theirs = {("eval_loss", STEPS): before}
        self._require_near(ours, theirs, within, "before it was resumed")
        if compared:
            self._require_near(ours, _losses(self.folder / "one"), within, "of one device")

    def _require_near(self, ours: _Losses, theirs: _Losses, within: float, whose: str) -> None:
        for key, loss in theirs.items():
            distance = abs(ours[key] - loss) / abs(loss)
            differs = f"{key[0]} of step {key[1]} differs by {distance:.2g}: {ours}, {whose} {theirs}"
            self._require(distance <= within, differs)

    def _read_export(self) -> None:
        exported = self.folder / "export"
        planned, read = load_model(str(self.folder / "config.json")), load_model(str(exported))
        self._require(_unnamed(planned) == _unnamed(read), f"another model is exported: {read}, not {planned}")
        tensors = load_file(exported / "model.safetensors")
        weights = from_checkpoint(read, tensors)
        import jax

        finite = all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(weights))
        self._require(finite, "weights of the export are not finite")

    def _require(self, condition: bool, reason: str) -> None:
        if not condition:
            raise _Ended("failed", reason)

    def _call(self, *words: object, refusals: Sequence[int] = (2,), **options: Any) -> None:
        """Call the command line. ``refusals`` are statuses that refuse in one line."""
        verb = [word for word in words if isinstance(word, str)]
        arguments = [*verb[: len(verb) - (verb[-1] == "as-is")], *(str(word) for word in words if word not in verb)]
        arguments += ["--as-is"] if verb[-1] == "as-is" else []
        for name, value in options.items():
            if value is not None:
                arguments += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        self.commands.append(shlex.join(["rooftop", *arguments]))
        fork = Fork(arguments, ENVIRONMENT)
        try:
            out, err = fork.communicate(timeout=PATIENCE_S)
        except TimeoutError:
            os.kill(fork.pid, signal.SIGKILL)
            raise _Ended("failed", f"{verb[0]}: no answer in {PATIENCE_S} s") from None
        if fork.returncode == 0:
            return
        lines = [line for line in (err or out).splitlines() if line]
        # Libraries write lines of their own to stderr. A planner that answers no does so on stdout.
        refusal = next((line for line in lines if line.startswith("rooftop: ")), out if fork.returncode == 1 else None)
        if fork.returncode in refusals and refusal is not None and "Traceback" not in err:
            raise _Ended("refused", f"{verb[0]}: {_folded(refusal.partition(chr(10))[0])}")
        abort = next((line for line in lines if re.match(r"F\d{4} ", line)), None)
        last = abort or (lines[-1] if lines else "")
        raise _Ended("failed", f"{' '.join(verb)}: status {fork.returncode}: {last[:400]}")


def _text(axes: dict[str, int]) -> str:
    return ",".join(f"{axis}={size}" for axis, size in axes.items())


def _folded(text: str) -> str:
    text = re.sub(r"rooftop-whole-run-\w+", "the model", re.sub(r"/\S*/", "", text))
    return re.sub(r"\b\d[\d,.]*\b", "N", text)


def _losses(run: Path) -> _Losses:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {
        (name, record["step"]): record[name] for record in records for name in ("loss", "eval_loss") if name in record
    }


def _unnamed(model: Any) -> dict[str, Any]:
    values: dict[str, Any] = model.to_json()
    return {name: value for name, value in values.items() if name not in ("name", "source")}


def main() -> None:
    """Draw, run, and print a line a draw and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="number of the first draw")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--compare", action="store_true", help="compare each run with one device, never interrupted")
    chosen = parser.parse_args()
    counts = Counter[tuple[str, str]]()
    with tempfile.TemporaryDirectory(prefix="rooftop-whole-runs-") as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        data = write_corpus(Path(folder)) / "corpus"
        for number in range(chosen.start, chosen.start + chosen.count):
            result = outcome(draw(chosen.seed, number), data, compared=chosen.compare)
            counts[result.kind, result.reason] += 1
            print(f"{number}: {result.kind} {result.reason}", flush=True)
            if result.kind == "failed":
                print(*(f"    {line}" for line in result.commands), sep="\n", flush=True)
            shutil.rmtree(f"{folder}/cache/rooftop/jax", ignore_errors=True)
    kinds = Counter[str]()
    for (kind, _), count in counts.items():
        kinds[kind] += count
    print(f"{chosen.count} drawn, " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    for (kind, reason), count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if kind != "passed":
            print(f"  {count:5d} {kind}: {reason}")


if __name__ == "__main__":
    main()
