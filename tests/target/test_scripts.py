"""Scripts as their users write them, compiled for a slice you do not have: nothing in them knows of rooftop.

Matmul FLOPs are counted here by hand, from the shapes that each script writes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jsonschema
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import rooftop as library
from rooftop.check.report import CheckRecord
from rooftop.compiler.memory import OutOfMemory
from rooftop.core.errors import Infeasible, RooftopError
from rooftop.core.quantities import format_bytes
from rooftop.core.records import schema
from rooftop.explain.scripts import ScriptRecord
from rooftop.present.documents import document
from rooftop.present.terminal import printed
from rooftop.target.running import Command

Run = Callable[..., Any]

MLP = """
import functools, sys
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

D, F, B = 512, 1024, int(sys.argv[1])
mesh = Mesh(mesh_utils.create_device_mesh((2, 2)), ("data", "model"))
assert jax.default_backend() == "tpu" and jax.devices()[0].device_kind == "TPU v5 lite"
params = {"up": jax.random.normal(jax.random.key(0), (D, F)) / D**0.5, "down": jnp.zeros((F, D))}
spec = {"up": P("data", "model"), "down": P("model", "data")}
params = jax.tree.map(lambda x, s: jax.device_put(x, NamedSharding(mesh, s)), params, spec)

def loss_fn(params, x):
    with jax.named_scope("mlp"):
        h = jax.lax.with_sharding_constraint(x @ params["up"], NamedSharding(mesh, P("data", "model")))
        return jnp.mean(jnp.square(jax.nn.relu(h) @ params["down"] - x))

@functools.partial(jax.jit, static_argnames="lr", donate_argnums=0)
def step(params, x, *, lr):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - lr * g, params, grads), loss

for i in range(1000):
    x = jax.device_put(np.zeros((B, D), np.float32), NamedSharding(mesh, P("data")))
    params, loss = step(params, x, lr=1e-3)
    print("loss", float(loss))
    if i == 1:
        params = jax.device_put(params, NamedSharding(mesh, P()))
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The working directory of a user."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    yield tmp_path


def write(name: str, text: str) -> str:
    Path(name).write_text(text.lstrip())
    return name


# ---- scripts --------------------------------------------------------------------------------------------------------


def test_a_training_loop_as_it_is(rooftop: Run, folder: Path) -> None:
    """Its mesh, donation, static argument and prints; the second compilation names what changed."""
    script = write("train.py", MLP)
    answer = rooftop(
        "compile", "--on", "v5e:2x2", "--json", "--out", "programs", "--steps", "2", "--min-flops", "1M",
        "--", "python", script, "256",
    )  # fmt: skip
    assert answer.status == 0
    data = answer.json
    jsonschema.validate(data, schema(ScriptRecord))
    # XLA splits the results of the second one, so that JAX compiles a third.
    first, second, third = data["programs"]
    assert third["differs"] == [
        "sharding of 2 arguments: params['down'] P() -> P('model',); params['up'] P() -> P(None, 'model')"
    ]
    # Forward and backward: the gradient of the batch is not needed.
    flops = 2 * 256 * 512 * 1024 * 5
    for program in (first, second):
        assert (program["name"], program["source"], program["called_from"]) == ("step", "train.py:18", "train.py:25")
        assert program["matmul_flops"] == flops
        assert program["compiled"]["mesh"]["axes"] == {"data": 2, "model": 2}
    assert first["compiled"]["flops"] == flops / 4
    assert first["differs"] == []
    assert second["differs"] == [
        "sharding of 2 arguments: params['down'] P('model', 'data') -> P(); params['up'] P('data', 'model') -> P()"
    ]
    # Weights of 4 MiB: a quarter on a device, then all of them. Donated, they are not there twice.
    sizes = [program["compiled"]["memory"] for program in (first, second)]
    assert [memory["weights"] for memory in sizes] == [2**20, 2**22]
    axes = {axis for item in first["compiled"]["collectives"] for axis in item["axes"]}
    assert axes == {"data", "model"}
    assert (data["ending"], data["error"], data["reads"]) == ("steps", None, {"train.py:26": 5})
    assert sorted(path.name for path in (folder / "programs").iterdir()) == [
        "1_step.hlo.txt", "2_step.hlo.txt", "3_step.hlo.txt", "report.json"
    ]  # fmt: skip


def test_a_program_that_is_compiled_by_hand_and_then_called_as_a_jit(rooftop: Run) -> None:
    """As MaxText does, for statistics: JAX compiles it once, and its calls count."""
    script = write(
        "train.py",
        """
import jax, jax.numpy as jnp
step = jax.jit(lambda x: x @ x)
x = jnp.zeros((256, 256))
print(step.lower(x).compile().memory_analysis())
for _ in range(10):
    y = step(x)
""",
    )
    answer = rooftop("compile", "--on", "v5e:2x2", "--json", "--min-flops", "1M", "--", "python", script)
    (program,) = answer.json["programs"]
    assert answer.json["ending"] == "steps"
    assert (program["calls"], program["matmul_flops"]) == (3, 2 * 256**3)
    assert (program["source"], program["called_from"]) == ("train.py:2", "train.py:6")


def test_a_page_and_tables_of_a_script(rooftop: Run) -> None:
    script = write("train.py", MLP)
    command = ("--on", "v5e:2x2", "--steps", "1", "--min-flops", "1M", "--report", "page.html", "--", "python", script)
    answer = rooftop("compile", *command, "256")
    assert (answer.status, answer.out.splitlines()[0]) == (0, "python train.py 256 on v5e:2x2: data 2 x model 2")
    for part in ("Program step: ", "The script was stopped", "Programs", "train.py:25", "Collectives", "read as 1"):
        assert part in answer.out
    assert "python train.py 256" in Path("page.html").read_text()


def test_a_script_is_checked(rooftop: Run) -> None:
    """The findings of the program whose calls take longest, with the script's own lines, and limits against them."""
    write("train.py", MLP)
    answer = rooftop("check", "--on", "v5e:2x2", "--save", "before.json", "--json", "--", "python", "train.py", "256")
    assert answer.status == 0, answer.err
    # The third program, whose weights are whole on each device: it is called most.
    findings = [(finding["rule"], finding["source"]) for finding in answer.json["findings"]]
    assert ("exposed_collective", "train.py:16") in findings and ("f32_operand", "train.py:15") in findings
    limits = ("--against", "before.json", "--max-time", "+1%", "--json")
    again = rooftop("check", "--on", "v5e:2x2", *limits, "--", "python", "train.py", "256")
    assert again.status == 0 and [gate["holds"] for gate in again.json["gates"]] == [True]
    longer = rooftop("check", "--on", "v5e:2x2", *limits, "--", "python", "train.py", "512")
    assert longer.status == 1 and [gate["holds"] for gate in longer.json["gates"]] == [False]
    nothing = rooftop("check", "--on", "v5e:2x2", "--", "python", "-c", "print(1)")
    assert nothing.status == 2 and "one that compiles a program" in nothing.err


def test_a_bug_is_the_users_own_line(rooftop: Run) -> None:
    script = write(
        "bug.py",
        """
        import jax, jax.numpy as jnp

        def loss(w, x):
            return (x @ w + x[:, :3]).sum()

        jax.jit(jax.grad(loss))(jnp.zeros((512, 512)), jnp.ones((64, 512)))
        """.replace("\n        ", "\n"),
    )
    answer = rooftop("compile", "--on", "v5e:2x2", "--", "python", script)
    assert (answer.status, answer.out) == (2, "")
    line = answer.err.strip().splitlines()[-1]
    assert line.startswith("rooftop: script: got 'bug.py:4: TypeError: add got incompatible shapes for broadcasting")


def test_a_program_that_does_not_fit(rooftop: Run) -> None:
    script = write(
        "large.py",
        """
        import jax, jax.numpy as jnp

        @jax.jit
        def step(params, x):
            return jnp.tanh(x @ params["w"]).sum()

        print(step({"w": jnp.zeros((1 << 17, 1 << 17))}, jnp.ones((64, 1 << 17))))
        """.replace("\n        ", "\n"),
    )
    answer = rooftop("compile", "--on", "v5e:2x2", "--", "python", script)
    assert answer.status == 1
    assert answer.out.splitlines()[0].startswith("Program step does not fit: XLA needs 68.8 GB of 16.9 GB a device")
    assert "1 of 4 devices" in answer.out.splitlines()[1]
    assert "params['w']" in answer.out
    assert "needs 64.03GiB of the 15.75GiB of HBM of a device" in answer.err


def test_seventy_billion_parameters_are_initialised_eagerly_in_little_memory() -> None:
    """The child may use 3 GB of address space more than JAX does by itself: the weights would need 280 GB."""
    code = (
        "import resource, jax, jax.numpy as jnp, numpy as np\n"
        "from jax.sharding import NamedSharding, PartitionSpec as P\n"
        "mesh = jax.make_mesh((4,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "w = [jax.random.normal(jax.random.key(i), (8192, 106496)) for i in range(80)]\n"
        "w = jax.device_put(w, NamedSharding(mesh, P('x')))\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "assert sum(x.size for x in w) > 69e9\n"
        "raise SystemExit(0 if grown < 500_000 else f'{grown} kB')\n"
    )
    result = library.compile_script(["python", "-c", code], on="v5e:2x2")
    assert result.report.run.error is None
    assert result.programs == ()
    assert "no program was compiled" in result.summary


def test_a_module_with_arguments(folder: Path) -> None:
    package = folder / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "main.py").write_text(
        "import sys\nfrom pkg import other\nraise SystemExit(str(sys.argv[1:]) + other.X)\n"
    )
    (package / "other.py").write_text("import os\nX = 'x'\nos.environ['LIBTPU_INIT_ARGS'] = '--xla_x=1'\n")
    result = library.compile_script("python -m pkg.main --layers 2", on="v5e:2x2")
    assert str(result.report.run.error) == "main.py:3: exit: ['--layers', '2']x"
    (note,) = result.report.run.record.notes
    assert note.startswith("the script sets LIBTPU_INIT_ARGS, which is read before it starts")


def test_a_script_that_takes_too_long() -> None:
    with pytest.raises(RooftopError, match="timeout"):
        library.compile_script(["python", "-c", "import time; time.sleep(600)"], on="v5e:2x2", timeout=6.0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "command: got nothing; accepted: python SCRIPT"),
        (["torchrun", "x.py"], "command: got 'torchrun x.py'"),
        (["python"], "command: got 'python'"),
        (["python", "-m"], "command: got 'python -m'"),
        (["python", "absent.py"], "script: got 'absent.py'; accepted: a Python file that exists"),
        (["/no/such/python", "x.py"], "a Python that is installed"),
    ],
)
def test_commands_that_are_not_python(words: list[str], message: str) -> None:
    with pytest.raises(RooftopError, match=message):
        Command.parse(words)


def test_a_command_is_taken_apart() -> None:
    write("train.py", "")
    command = Command.parse(["python3", "-X", "dev", "-u", "train.py", "-m", "3"])
    assert command.interpreter == (sys.executable, "-X", "dev", "-u")
    assert (command.script, command.arguments) == ("train.py", ("-m", "3"))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--", "python", "x.py"), "on: got nothing"),
        (
            ("--on", "v5e:2x2", "--mesh", "X=4", "--", "python", "x.py"),
            "mesh: got 'X=4'; accepted: nothing with a script",
        ),
        (("--on", "v5e:2x2", "--save", "f", "--", "python", "x.py"), "save: got 'f'"),
        (("plan.json", "--on", "v5e:2x2", "--", "python", "x.py"), "program: got 'plan.json'"),
        (("step:f", "--on", "v5e:2x2", "--out", "f"), "out: got 'f'; accepted: nothing but with a script"),
        (("--on", "v5e:2x2"), "program: got nothing"),
        (("step:f", "--on", "v5e:2x2", "--compiler-option", "x"), "compiler-option: got 'x'; accepted: NAME=VALUE"),
    ],
)
def test_options_that_do_not_go_together(rooftop: Run, words: tuple[str, ...], message: str) -> None:
    answer = rooftop("compile", *words)
    assert answer.status == 2
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1


@pytest.mark.slow
def test_shard_map_with_splash_attention(rooftop: Run) -> None:
    """A Pallas kernel for TPUs in a shard_map over the script's own mesh, forward and backward."""
    script = write(
        "splash.py",
        """
        import functools, jax, jax.numpy as jnp, numpy as np
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as sk
        from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as sm
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "heads"))
        B, H, T, K, D = 2, 4, 512, 128, 512
        kernel = sk.make_splash_mha(sm.MultiHeadMask([sm.CausalMask((T, T))] * H), head_shards=2, q_seq_shards=1)
        spec, act = kernel.manual_sharding_spec(NamedSharding(mesh, P("heads", None))), P("data", "heads")

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, act, act, act), out_specs=act, check_vma=False)
        def attention(kernel, q, k, v):
            return jax.vmap(kernel)(q, k, v)

        def loss(w, x):
            q, k, v = (jnp.einsum("btd,dhk->bhtk", x, w[n]) for n in "qkv")
            return attention(kernel, q, k, v).astype(jnp.float32).var()

        split = {n: NamedSharding(mesh, P("data", "heads")) for n in "qkv"}
        w = jax.jit(lambda: {n: jnp.ones((D, H, K), jnp.bfloat16) for n in "qkv"}, out_shardings=split)()
        x = jax.device_put(jnp.zeros((B, T, D), jnp.bfloat16), NamedSharding(mesh, P("data")))
        value, grads = jax.jit(jax.value_and_grad(loss), in_shardings=(split, None))(w, x)
        assert jax.tree.map(jnp.shape, grads) == {n: (D, H, K) for n in "qkv"}
        """.replace("\n        ", "\n"),
    )
    answer = rooftop("compile", "--on", "v5e:2x2", "--json", "--", "python", script)
    (program,) = answer.json["programs"]
    assert (program["name"], program["kernels"]) == ("loss", 3)
    # Three projections, forward and the gradient of their weights. Attention is within the kernels, but for the sums
    # over the head size of outputs times their gradients, which XLA does not multiply as matrices.
    flops = 3 * 2 * 2 * (2 * 512) * 512 * (4 * 128)
    assert program["matmul_flops"] == flops + 2 * 2 * 4 * 512 * 128
    assert program["compiled"]["flops"] == flops / 4
    assert program["compiled"]["mesh"]["axes"] == {"data": 2, "heads": 2}


# ---- scripts without a matmul, and scripts that end early -----------------------------------------------------------

UPDATES = """
import os
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
rows, words = NamedSharding(mesh, P("model")), NamedSharding(mesh, P("data"))
table = jax.jit(lambda key: jax.random.normal(key, (4096, 128)), out_shardings=rows)(jax.random.key(0))
ids = jax.device_put(np.zeros(256, np.int32), words)
optimizer = optax.adam(1e-3)

@jax.jit
def lookup(table, ids):
    return table[ids]

@jax.jit
def update(table, ids, gradient):
    return table.at[ids].add(gradient)

state = jax.jit(optimizer.init)(table)
gradient = lookup(table, ids)
step = jax.jit(optimizer.update)
for _ in range(2):
    table = update(table, ids, gradient)
    _, state = step(table, state)
assert int(state[0].count) == 2 and jnp.sum(table).shape == ()
os._exit(0)
"""


def test_gathers_updates_and_optimizers_are_programs(rooftop: Run) -> None:
    """Jits without a matmul, by their own names; operations of JAX itself and the init are not compiled."""
    answer = rooftop("compile", "--on", "v5e:2x2", "--json", "--", "python", write("train.py", UPDATES))
    assert answer.status == 0, answer.err
    data = answer.json
    jsonschema.validate(data, schema(ScriptRecord))
    assert (data["ending"], data["error"]) == ("end", None)
    calls = {program["name"]: program["calls"] for program in data["programs"]}
    # The second state lies where XLA has put the first one.
    assert {name: calls[name] for name in ("init_fn", "lookup", "update")} == {"init_fn": 1, "lookup": 1, "update": 2}
    assert calls.keys() == {"init_fn", "lookup", "update", "update_fn"}
    moved = {program["name"]: program["compiled"]["collectives"] for program in data["programs"]}
    # A row is on one half of the devices: the others add zeros.
    assert [(item["kind"], item["axes"]) for item in moved["lookup"]] == [("all_reduce", ["model"])]
    left_out = {(item["name"], item["source"]): item["reason"] for item in data["not_compiled"]}
    assert left_out["<lambda>", "train.py:7"] == "small"
    assert {reason for (_, source), reason in left_out.items() if not source} == {"operation"}
    shown = " ".join(printed(document(data), 200).plain.split())
    assert "Not compiled, small arguments that are not split: <lambda> (train.py:7)." in shown
    assert "broadcast_in_dim" not in shown


LATE = """
import jax, jax.numpy as jnp, os, signal
from jax.sharding import NamedSharding, PartitionSpec as P

x = jax.device_put(jnp.zeros((1 << 18, 1024)), NamedSharding(jax.make_mesh((4,), ("x",)), P("x")))
step = jax.jit(lambda x: x + 1)
y = step(x)
{}
"""


def test_a_script_that_fails_late_is_checked(rooftop: Run) -> None:
    """Findings of what was compiled, in both forms, then the error as that of every script."""
    script = write("train.py", LATE.format('raise OSError("no space for a checkpoint")'))
    answer = rooftop("check", "--on", "v5e:2x2", "--out", "programs", "--json", "--", "python", script)
    error = "train.py:7: OSError: no space for a checkpoint"
    assert (answer.status, answer.json["error"]) == (2, error)
    jsonschema.validate(answer.json, schema(CheckRecord))
    assert [finding["rule"] for finding in answer.json["findings"]] == ["not_donated"]
    accepted = "accepted: one that runs until its programs are compiled"
    assert answer.err.splitlines()[-1] == f"rooftop: script: got '{error}'; {accepted}"
    assert Path("programs/1_lambda.hlo.txt").is_file()
    shown = printed(document(answer.json), 200).plain
    assert f"The script failed: {error}" in shown and "not_donated" in shown


def test_a_program_that_does_not_fit_hides_no_findings_of_another(rooftop: Run) -> None:
    """Findings of the program that fits, then the refusal of the other, with its status."""
    script = write("train.py", LATE.format("jax.jit(lambda x: x @ x.T)(jnp.zeros((1 << 17, 1024)))"))
    answer = rooftop("check", "--on", "v5e:2x2", "--json", "--save", "check.json", "--", "python", script)
    assert answer.status == 1
    jsonschema.validate(answer.json, schema(CheckRecord))
    # The product in float32, and its argument.
    needed = format_bytes(4 * 2**34 + 4 * 2**27)
    refused = f"program <lambda> does not fit: XLA needs {needed} of 16.9 GB a device"
    assert answer.json["error"] is None and answer.json["refused"].startswith(refused)
    assert [finding["rule"] for finding in answer.json["findings"]] == ["not_donated"]
    assert answer.err.splitlines()[-1].startswith("rooftop: <lambda> on v5e:2x2: needs 64.50GiB")
    shown = printed(document(answer.json), 200).plain
    assert "Next to it, program <lambda> does not fit" in shown and "not_donated" in shown
    assert "script failed" not in shown
    compiled = rooftop("compile", "--on", "v5e:2x2", "-o", "script.json", "--", "python", script)
    assert compiled.status == 1
    for saved in ("check.json", "script.json"):
        again = rooftop("check", saved, "--json")
        assert (again.status, again.json["refused"]) == (1, answer.json["refused"])
        assert again.json["expected_s"] == answer.json["expected_s"]


def test_a_script_that_is_killed_keeps_its_programs() -> None:
    script = write("train.py", LATE.format("os.kill(os.getpid(), signal.SIGKILL)"))
    result = library.compile_script(["python", script], on="v5e:2x2")
    assert [program.program.name for program in result.report.programs] == ["<lambda>"]
    assert library.check(result).report.error == "killed: signal 9 (Killed)"
    with pytest.raises(RooftopError, match=r"command: got 'python train.py'.*ended with signal 9"):
        result.raise_if_infeasible()


@pytest.mark.slow
def test_a_script_that_runs_out_of_time_keeps_its_programs() -> None:
    script = write("train.py", LATE.format("while True: pass"))
    result = library.compile_script(["python", script], on="v5e:2x2", timeout="90s")
    assert [program.program.name for program in result.report.programs] == ["<lambda>"]
    with pytest.raises(RooftopError, match="timeout: got '90 s'; accepted: longer than the script takes"):
        result.raise_if_infeasible()


def test_all_programs_of_a_script_can_be_compiled(rooftop: Run) -> None:
    """``--min-flops 0`` compiles operations of JAX itself too, for every verb that takes a script."""
    words = ("--on", "v5e:2x2", "--min-flops", "0", "--json", "--", "python", "-c", "import jax; jax.numpy.ones(3)")
    compiled = rooftop("compile", *words)
    assert compiled.status == 0
    names = [program["name"] for program in compiled.json["programs"]]
    assert names == ["convert_element_type", "broadcast_in_dim"]
    checked = rooftop("check", *words)
    assert (checked.status, checked.json["error"]) == (0, None)
    wrong = rooftop("check", "--on", "v5e:2x2", "--min-flops", "-1", "--", "python", "-c", "1")
    assert wrong.status == 2 and "min-flops: got '-1'; accepted: 0, or a positive number" in wrong.err


@pytest.mark.parametrize("verb", ["compile", "check", "tune"])
@pytest.mark.parametrize("option", [("--min-flops", "0"), ("--steps", "0")])
def test_options_of_scripts_need_a_script(rooftop: Run, verb: str, option: tuple[str, str]) -> None:
    answer = rooftop(verb, "step:f", "--on", "v5e:2x2", *option)
    accepted = "accepted: nothing but with a script: -- python SCRIPT"
    assert (answer.status, answer.err.strip()) == (2, f"rooftop: {option[0][2:]}: got '0'; {accepted}")


# ---- scripts with libraries that are not installed with rooftop ------------------------------------------------------

#: A Python that has Flax and Equinox; without it this one is asked.
GUEST = os.environ.get("ROOFTOP_GUEST_PYTHON", sys.executable)


def has(package: str) -> bool:
    if sys.executable == GUEST:
        return find_spec(package) is not None
    return subprocess.run([GUEST, "-c", f"import {package}"], check=False, capture_output=True).returncode == 0


NNX = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

D, F, B = 512, 1024, 512
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))

class Block(nnx.Module):
    def __init__(self, rngs):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(D, F, kernel_init=nnx.with_partitioning(init, ("data", "model")), rngs=rngs)
        self.down = nnx.Linear(F, D, kernel_init=nnx.with_partitioning(init, ("model", "data")), rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.gelu(self.up(x))))

with jax.set_mesh(mesh):
    model = Block(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    @nnx.jit
    def train_step(model, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, grads)
        return loss

    for i in range(100):
        x = jax.device_put(np.zeros((B, D), np.float32), NamedSharding(mesh, P("data")))
        loss = train_step(model, optimizer, x)
        # A counter is a real value, though no step is executed.
        assert int(optimizer.step.get_value()) == i + 1
"""

EQUINOX = """
import equinox as eqx, jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P

D, F, B = 512, 1024, 512
mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
data, everywhere = NamedSharding(mesh, P("batch")), NamedSharding(mesh, P())
model = eqx.nn.MLP(D, D, F, depth=1, activation=jax.nn.gelu, key=jax.random.key(0))
optimizer = optax.adam(1e-3)
state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
model, state = eqx.filter_shard((model, state), everywhere)

@eqx.filter_jit(donate="all-except-first")
def train_step(x, model, state):
    loss, grads = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.filter_shard((eqx.apply_updates(model, updates), state), everywhere), loss

for i in range(100):
    x = eqx.filter_shard(jnp.asarray(np.zeros((B, D), np.float32)), data)
    (model, state), loss = train_step(x, model, state)
    print(i, loss.item())
"""


@pytest.mark.parametrize(("package", "text"), [("flax", NNX), ("equinox", EQUINOX)])
def test_steps_of_libraries_as_they_are(package: str, text: str) -> None:
    if not has(package):
        pytest.skip(f"{package} is not installed")
    script = write("train.py", text)
    result = library.compile_script([GUEST, script], on="v5e:2x2")
    assert result.report.run.error is None
    assert result.report.run.ending == "steps"
    programs = result.report.programs
    assert {program.program.name for program in programs} == {"train_step"}
    flops = 2 * 512 * 512 * 1024 * 5
    for program in programs:
        assert program.report is not None
        assert program.program.matmul_flops == flops
        assert program.report.flops == flops / 4


# ---- blocks of Python and single functions --------------------------------------------------------------------------


def test_a_target_in_a_with_statement() -> None:
    with library.target("v5e:2x2") as target:
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        x = jax.device_put(jnp.ones((1024, 1024)), NamedSharding(mesh, P("x")))
        total = jax.jit(lambda x: (x.T @ x).sum())(x)
        seen = library.inspect(lambda x: x @ x.T, x)
    assert (total.shape, seen.report.flops) == ((), 2 * 1024**3 / 4)
    (first, second) = target.programs
    assert (first.report.flops, second.report.flops) == (2 * 1024**3 / 4, 2 * 1024**3 / 4)
    assert first.report.to_json()["mesh"]["axes"] == {"x": 4}
    assert target.result.rows[0]["called_from"].startswith("test_scripts.py:")
    with pytest.raises(RooftopError, match="a slice, such as"):
        library.inspect(jnp.sin, 3.0)
    with pytest.raises(RooftopError, match=r"with rooftop\.target"):
        _ = library.target("v5e:2x2").result


def test_jits_are_compiled_for_their_size_or_their_arguments() -> None:
    """An update of 512 MB of weights has no matmul; an eager operation on the same arrays is not the user's own jit."""
    with library.target("v5e:2x2") as target:
        weights = jnp.zeros((8192, 8192))
        _ = jax.jit(lambda w, g: w - 0.1 * g)(weights, weights)
        _ = jax.jit(lambda w: w @ w)(jnp.zeros((64, 64)))
        _ = weights + weights
    (program,) = target.result.report.programs
    assert program.program.matmul_flops == 0
    assert program.report is not None
    assert program.report.peak_bytes >= 2 * 8192**2 * 4
    left_out = {item.name: item.reason for item in target.result.report.run.record.not_compiled}
    assert (left_out["<lambda>"], left_out["add"]) == ("small", "operation")


def test_a_function_that_closes_over_a_mesh() -> None:
    """The ecosystem's commonest pattern: the meshes of a slice are over the same devices."""
    mesh = library.mesh("v5e:2x2", "data=2,model=2")
    assert mesh.devices.flat[0] is library.mesh("v5e:2x2").devices.flat[0]

    def local(x: Any, w: Any) -> Any:
        return jax.lax.psum(x @ w, "model")

    def product(x: Any, w: Any, scale: float) -> Any:
        specs = (P("data", "model"), P("model", None))
        return scale * jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("data", None))(x, w)

    def shape(spec: Any) -> Any:
        return jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, spec))

    arguments = (shape(P("data", "model")), shape(P("model", None)))
    report = library.inspect(product, *arguments, scale=2.0, on="v5e:2x2")
    collectives = [(item["kind"], item["axes"]) for item in report.to_json()["collectives"]]
    assert (report.report.flops, collectives) == (2 * 1024**3 / 4, [("all_reduce", ["model"])])
    jitted = jax.jit(product)
    for stage in (
        jitted.trace(*arguments, 2.0),
        jitted.lower(*arguments, 2.0),
        jitted.lower(*arguments, 2.0).compile(),
    ):
        assert library.inspect(stage, on="v5e:2x2").report.flops == report.report.flops
    with pytest.raises(RooftopError, match="a stage for cpu"):
        library.inspect(jax.jit(jnp.sin).lower(1.0), on="v5e:2x2")
    with pytest.raises(RooftopError, match="compiled stage for other devices"):
        library.inspect(jax.jit(jnp.sin).lower(jnp.ones(3)).compile(), on="v5e:2x2")


def test_any_argument() -> None:
    """Tokens, keys, masks, Python numbers, static arguments, keywords; a compiler's option is in the report."""

    def step(params: Any, tokens: Any, key: Any, mask: Any, layers: int, rate: float, mode: str = "") -> Any:
        assert mode == "train"
        h = params["embed"][tokens]
        for _ in range(layers):
            h = jnp.tanh(h @ params["w"])
        stays = jax.random.bernoulli(key, 1 - rate, h.shape)
        return jnp.where(mask[..., None] & stays, h, 0).astype(jnp.float32).mean() * rate

    jitted = jax.jit(step, static_argnums=(4, 5), static_argnames="mode")
    params = {"embed": "bf16[1024, 512]", "w": np.zeros((512, 512), jnp.bfloat16)}
    report = library.inspect(
        jitted, params, "int32[64_X, 128]", jax.random.key(0), "bool[64_X, 128]", 3, 0.1, mode="train", on="v5e:2x2",
        mesh="X=4", auto=True, compiler_options={"xla_tpu_enable_latency_hiding_scheduler": False},
    )  # fmt: skip
    assert report.report.flops == 3 * 2 * 64 * 128 * 512**2 / 4
    assert report.to_json()["options"] == {"xla_tpu_enable_latency_hiding_scheduler": False}


def test_modules_of_equinox_are_arguments() -> None:
    """Functions and numbers among the leaves stay as they are."""
    equinox = pytest.importorskip("equinox")
    model = equinox.nn.MLP(512, 512, 1024, depth=1, activation=jax.nn.gelu, key=jax.random.key(0))
    step = equinox.filter_jit(equinox.filter_grad(lambda model, x, rate: rate * jax.vmap(model)(x).mean()))
    report = library.inspect(step, model, "f32[512_X, 512]", 0.5, on="v5e:2x2", mesh="X=4", auto=True)
    # The gradient of the batch is not needed, nor is the second product itself.
    assert report.report.flops == 2 * 512 * 512 * 1024 * 4 / 4


def test_modules_of_flax_are_arguments() -> None:
    nnx = pytest.importorskip("flax.nnx")

    @nnx.jit
    def step(model: Any, x: Any) -> Any:
        return nnx.grad(lambda model: (model(x) ** 2).mean())(model)

    with library.target("v5e:2x2"):
        mesh = library.mesh("v5e:2x2", "data=4", auto=True)
        x = jax.device_put(np.zeros((512, 512), np.float32), NamedSharding(mesh, P("data")))
        report = library.inspect(step, nnx.Linear(512, 1024, rngs=nnx.Rngs(0)), x)
    assert report.report.flops == 2 * 512 * 512 * 1024 * 2 / 4
    assert report.to_json()["mesh"]["axes"] == {"data": 4}


def test_errors_of_functions_are_the_users_own_line() -> None:
    def wrong(x: Any) -> Any:
        return x @ x[:3]

    with pytest.raises(
        RooftopError, match=r"wrong'; accepted: one that lowers .*test_scripts.py:\d+: TypeError: dot"
    ) as no:
        library.inspect(wrong, "bf16[256, 256]", on="v5e:2x2")
    assert isinstance(no.value.__cause__, TypeError)
    with pytest.raises(OutOfMemory, match=r"needs 512\.00GiB of the 15\.75GiB"):
        library.inspect(lambda x: x @ x, "f32[262144, 262144]", on="v5e:2x2")
    with library.target("v5e:2x2") as target, pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        jax.jit(lambda x: x @ x)(jnp.zeros((1 << 18, 1 << 18)))
    with pytest.raises(Infeasible, match=r"512\.00GiB"):
        target.result.raise_if_infeasible()
