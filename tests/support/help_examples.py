"""The examples of every verb's help, and a folder in which each of them can run.

Tests try them where packages are hidden, ``tests.release`` where a wheel is installed.
"""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

import rooftop
from rooftop.cli.main import cli
from rooftop.core.extras import is_installed
from rooftop.explain.demo import demo_run
from tests.support.embedding_run import write_clicks

#: How examples begin that no folder makes right, and what they say: the recorded run has two steps, no server listens.
_REFUSED = {
    "rooftop calibrate run1": "accepted: a run with 3 measured steps or more",
    "rooftop train --resume run2": "accepted: the folder of a run that has begun",
    "rooftop bench serve": "accepted: a server",
}
#: How examples begin that compute for seconds before they answer: only slow tests run them.
_SLOW = (
    "rooftop plan train llama3-70b --on v5p,", "rooftop plan serve llama3-70b --requests-per-second",
    "rooftop simulate plan.json --requests-per-second", "rooftop validate --top", "rooftop diff run1",
    "rooftop explain --diff", "rooftop explain trace",
)  # fmt: skip
#: Verbs whose plan.json is one of serving.
_SERVING = ("simulate", "serve", "bench serve")
_MODULE = """HloModule jit_step, is_scheduled=true, num_partitions=16

ENTRY %main (x: bf16[512,4096], w: bf16[256,4096]) -> bf16[512,4096] {
  %x = bf16[512,4096]{1,0} parameter(0), metadata={op_name="x"}
  %w = bf16[256,4096]{1,0} parameter(1), metadata={op_name="w"}
  %gathered = bf16[4096,4096]{1,0} all-gather(%w), channel_id=1, replica_groups=[1,16]<=[16], dimensions={0}, \
use_global_device_ids=true, metadata={op_name="jit(step)/gather"}
  ROOT %dot = bf16[512,4096]{1,0} dot(%x, %gathered), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(step)/dot_general"}
}
"""
_FUNCTION = '''"""A function for the compiler."""


def step(x, w, block=512):
    """A matmul."""
    return x @ w
'''
_SCRIPT = '''"""A script of three steps."""

import argparse

import jax
import jax.numpy as jnp

parser = argparse.ArgumentParser()
parser.add_argument("--layers", type=int, default=1)
parser.add_argument("--remat", default="none")
options = parser.parse_args()


def loss(w, x):
    for layer in w:
        x = jnp.tanh(x @ layer)
    return (x**2).mean()


step = jax.jit(jax.value_and_grad(jax.checkpoint(loss) if options.remat == "full" else loss))
weights = [jnp.ones((2048, 2048), jnp.bfloat16)] * options.layers
for _ in range(3):
    value, gradient = step(weights, jnp.ones((2048, 2048), jnp.bfloat16))
print(value)
'''
_TABLES = "".join(
    f"[tables.t{index}]\nvocabulary = {40 + index}\nwidth = 8\n"
    f'optimizer = {{kind = "adagrad", learning_rate = 0.2}}\n\n[features.C{index}]\ntable = "t{index}"\n\n'
    for index in (1, 2, 3, 4)
)
_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "intermediate_size": 1024,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu",
}  # fmt: skip


def verbs() -> Iterator[tuple[str, click.Command]]:
    """Every command of the command line that is no group, by the words that name it."""

    def within(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
        if not isinstance(command, click.Group):
            yield name, command
            return
        context = click.Context(command)
        for word in command.list_commands(context):
            child = command.get_command(context, word)
            assert child is not None
            yield from within(child, f"{name} {word}".strip())

    return within(cli, "")


def examples() -> dict[str, tuple[str, ...]]:
    """The examples of every verb's help."""
    return {verb: getattr(command, "examples", ()) for verb, command in verbs()}


def quick(lines: Iterable[str]) -> tuple[str, ...]:
    """The examples that do not compute for seconds."""
    return tuple(line for line in lines if not line.startswith(_SLOW))


def words_of(example: str) -> list[str]:
    """The arguments of an example: ``rooftop`` is left out."""
    return shlex.split(example.replace("\\\n", ""))[1:]


def is_refused(example: str, error: str) -> bool:
    """True for the line in which an example is refused for something that the folder does not have."""
    return any(example.startswith(begin) and accepted in error for begin, accepted in _REFUSED.items())


def prepare(folder: Path, *, clicks: int) -> None:
    """Write the files that the examples name, with so many ``clicks`` a day. No extra of rooftop is needed."""
    demo = demo_run()
    (folder / "trace").mkdir()
    for trace in demo.rglob("*.xplane.pb"):
        shutil.copy(trace, folder / "trace")
    shutil.copy(demo / "profile" / "step.hlo.txt", folder / "step.hlo.txt")
    (folder / "module.hlo").write_text(_MODULE)
    checked = rooftop.check(folder / "module.hlo", on="v5p:2x2x4", mesh="X=16")
    training = rooftop.plan_training("llama:2M", on="v5e:2x2", batch_seqs=4, seq=128)
    answers = {
        "ledger": checked,
        "new": checked,
        "report": checked,
        "training": training,
        "serving": rooftop.plan_serving("llama:2M", on="v5e:1x1", prompt=64, generate=32, batch_seqs=4),
    }
    for name, answer in answers.items():
        (folder / f"{name}.json").write_text(json.dumps(answer.to_json()))
    (folder / "trace.jsonl").write_text(
        "".join(
            json.dumps({"arrival_s": at / 4, "prompt_tokens": 40, "output_tokens": 8, "hashes": [1]}) + "\n"
            for at in range(20)
        )
    )
    for name in ("my-model", "models/llama"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps(_CONFIG))
    for name in ("mypkg", "src", "corpus", "llama", "runs"):
        (folder / name).mkdir()
    (folder / "mypkg" / "mymodule.py").write_text(_FUNCTION)
    (folder / "train.py").write_text(_SCRIPT)
    (folder / "src" / "text.py").write_text(_SCRIPT * 200)
    (folder / "corpus" / "text.txt").write_text("some text to train on\n" * 4000)
    (folder / "tables.toml").write_text(_TABLES)
    for day in ("day0", "day1"):
        write_clicks(folder / f"{day}.tsv", clicks, seed=0)
    (folder / "day0.parquet").write_bytes(b"PAR1")
    if is_installed("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        columns = {f"C{index}": [[index, number % 40] for number in range(clicks)] for index in (1, 2, 3, 4)}
        parquet.write_table(pyarrow.table(columns), folder / "day0.parquet")


def place(folder: Path, verb: str) -> None:
    """Make plan.json of ``folder`` a plan that ``verb`` reads, and runs those that it reads or makes."""
    for name in ("run1", "run2"):
        shutil.rmtree(folder / name, ignore_errors=True)
        if verb != "train":
            shutil.copytree(demo_run(), folder / name)
    shutil.copy(folder / ("serving.json" if verb in _SERVING else "training.json"), folder / "plan.json")
