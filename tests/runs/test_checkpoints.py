"""The training state on disk: exact, atomic, checked, kept as asked, the same for any mesh and number of processes."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from rooftop.core.errors import RooftopError
from rooftop.models import from_huggingface
from rooftop.programs.model.layer import Computation
from rooftop.programs.training.program import Optimizer, TrainProgram
from rooftop.programs.training.step import abstract_state, described_state, init_state, unpadded
from rooftop.runs import checkpoints as state_module
from rooftop.runs.checkpoints import Checkpoints
from tests.support.curves import mesh_of

ORACLES = Path(__file__).parents[1] / "oracles"


def small(seed: int) -> dict[str, Any]:
    """A state of a float32 matrix over two devices and a counter."""
    mesh = mesh_of(fsdp=2)
    matrix = np.random.default_rng(seed).normal(size=(64, 32)).astype(np.float32)
    return {
        "matrix": jax.device_put(matrix, NamedSharding(mesh, P("fsdp"))),
        "step": jax.device_put(np.int32(seed), NamedSharding(mesh, P())),
    }


def abstract(state: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state)


def same(one: Any, other: Any) -> bool:
    """Bit for bit: NaN equals itself and 0 differs from -0."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    pairs = zip(map(np.asarray, jax.tree.leaves(one)), map(np.asarray, jax.tree.leaves(other)), strict=True)
    return all(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() for a, b in pairs)


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    """Three checkpoints of ``small``: 1, 2, 3."""
    checkpoints = Checkpoints(tmp_path / "run", keep=3)
    for step in (1, 2, 3):
        checkpoints.save(step, small(step), {"seed": step})
    checkpoints.wait()
    return checkpoints


def test_a_training_state_on_another_mesh(tmp_path: Path) -> None:
    """Weights and moments in bfloat16 and float32 go from eight devices to four, split otherwise, and to one."""
    tiny = json.loads((ORACLES / "tiny_models.json").read_text())["llama"]
    program = TrainProgram(
        computation=Computation(model=from_huggingface(tiny, "llama")),
        batch=8,
        seq_len=16,
        optimizer=Optimizer(moments="bf16"),
    )
    eight = mesh_of(data=2, fsdp=2, tensor=2)
    draw = np.random.default_rng(0)
    state = jax.tree.map(
        lambda leaf: jax.device_put(draw.normal(size=leaf.shape).astype(leaf.dtype), leaf.sharding),
        abstract_state(program, eight),
    )
    checkpoints = Checkpoints(tmp_path / "run")
    with jax.set_mesh(eight):
        checkpoints.save(7, state, {"loss": 1.5})
    for mesh in (mesh_of(fsdp=4), mesh_of(), eight):
        blank = abstract_state(program, mesh)
        restored = checkpoints.restore(blank)
        assert (restored.step, restored.extra, restored.refused) == (7, {"loss": 1.5}, ())
        assert same(restored.state, state)
        assert jax.tree.map(lambda leaf: leaf.sharding, restored.state) == jax.tree.map(
            lambda leaf: leaf.sharding, blank
        )
    other = abstract_state(replace(program, optimizer=Optimizer(moments="f32")), eight)
    with pytest.raises(RooftopError, match=r"optimizer.*\.mu\.embed: got 'bfloat16\[96, 32\]'.*float32\[96, 32\]"):
        checkpoints.restore(other)
    with pytest.raises(RooftopError, match=r"\.embed: got 'no such array'"):
        checkpoints.restore(blank.weights)


@pytest.mark.slow
def test_a_checkpoint_of_uneven_stages_loads_on_any_mesh(tmp_path: Path) -> None:
    """Five layers over four stages are stored as eight; elsewhere as five or as six. Another model is refused."""
    tiny = json.loads((ORACLES / "tiny_models.json").read_text())["llama"]
    model = replace(from_huggingface(tiny, "llama"), layers=5)
    program = TrainProgram(computation=Computation(model=model), batch=8, seq_len=16)
    meshes = [mesh_of(stage=4), mesh_of(fsdp=2), mesh_of(stage=2)]
    states = [init_state(program, jax.random.key(1), mesh) for mesh in meshes]
    assert [state.weights.layers[0][0].mlp.up.shape[0] for state in states] == [8, 5, 6]
    true = unpadded(abstract_state(program, meshes[0]), described_state(program, meshes[0]))
    checkpoints = Checkpoints(tmp_path / "run")
    for step, state in enumerate(states[:2]):
        checkpoints.save(step, state, {}, unpadded=true)
        for mesh, expected in zip(meshes, states, strict=True):
            assert same(checkpoints.restore(abstract_state(program, mesh), unpadded=true).state, expected)
    six = replace(program, computation=Computation(model=replace(model, layers=6)))
    with pytest.raises(RooftopError, match=r"got 'float32\[5, .*accepted: float32\[6, "):
        checkpoints.restore(abstract_state(six, meshes[0]), unpadded=abstract_state(six, meshes[1]))


def test_what_is_donated_after_a_save_is_saved_as_it_was(tmp_path: Path) -> None:
    strange = np.array([0.0, -0.0, np.nan, np.inf, 1e-45], np.float32)
    state = jax.device_put(strange, NamedSharding(mesh_of(), P()))
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, [state], {})
    following = jax.jit(lambda x: x + 1, donate_argnums=0)(state)
    assert not np.array_equal(np.asarray(following), strange, equal_nan=True)
    assert same(checkpoints.restore(abstract([following])).state, [strange])


@pytest.mark.parametrize(
    ("keep", "every", "left"),
    [(1, None, (9,)), (2, None, (8, 9)), (1, 4, (4, 8, 9)), (3, 5, (5, 7, 8, 9)), (20, None, tuple(range(1, 10)))],
)
def test_what_is_kept(tmp_path: Path, keep: int, every: int | None, left: tuple[int, ...]) -> None:
    checkpoints = Checkpoints(tmp_path, keep=keep, every=every)
    for step in range(1, 10):
        checkpoints.save(step, {"step": jnp.int32(step)}, {})
    checkpoints.wait()
    assert checkpoints.steps() == left
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(map(str, left))


def test_a_run_that_went_back_leaves_nothing_of_the_old_future(saved: Checkpoints) -> None:
    restored = saved.restore(abstract(small(0)), step=1)
    assert restored.step == 1 and same(restored.state, small(1))
    saved.save(2, small(20), {})
    saved.wait()
    assert saved.steps() == (1, 2)
    assert same(saved.restore(abstract(small(0))).state, small(20))


def files_of(checkpoint: Path) -> list[Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def largest(checkpoint: Path) -> Path:
    return max(files_of(checkpoint), key=lambda path: path.stat().st_size)


def truncate(checkpoint: Path) -> Path:
    path = largest(checkpoint)
    os.truncate(path, path.stat().st_size // 2)
    return path


def flip_a_bit(checkpoint: Path) -> Path:
    path = largest(checkpoint)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    return path


def delete(checkpoint: Path) -> Path:
    path = largest(checkpoint)
    path.unlink()
    return path


def spoil_the_manifest(checkpoint: Path) -> Path:
    path = checkpoint / "manifest.json"
    path.write_text(
        path.read_text().replace('\\"seed\\": 3', '\\"seed\\": 4').replace('\\"seed\\": 2', '\\"seed\\": 4')
    )
    return path


def cut_the_manifest(checkpoint: Path) -> Path:
    path = checkpoint / "manifest.json"
    os.truncate(path, 100)
    return path


def remove_the_manifest(checkpoint: Path) -> Path:
    path = checkpoint / "manifest.json"
    path.unlink()
    return path


def give_the_manifest_other_types(checkpoint: Path) -> Path:
    path = checkpoint / "manifest.json"
    fields = json.loads(json.loads(path.read_text())["manifest"])
    body = json.dumps(fields | {"files": 3, "arrays": None})
    path.write_text(json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "manifest": body}))
    return path


@pytest.mark.parametrize(
    "spoil",
    [
        truncate, flip_a_bit, delete, spoil_the_manifest, cut_the_manifest, remove_the_manifest,
        give_the_manifest_other_types,
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_by_name(saved: Checkpoints, spoil: Callable[[Path], Path]) -> None:
    """The one before it is taken; where every one is damaged, none."""
    path = spoil(saved.folder / "3")
    restored = saved.restore(abstract(small(0)))
    assert restored.step == 2 and restored.extra == {"seed": 2} and same(restored.state, small(2))
    assert len(restored.refused) == 1 and str(path) in restored.refused[0]
    saved.verify(2)
    with pytest.raises(RooftopError) as refused:
        saved.verify(3)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)
    with pytest.raises(RooftopError) as refused:
        saved.restore(abstract(small(0)), step=3)
    assert str(path) in str(refused.value)
    others = truncate(saved.folder / "2"), truncate(saved.folder / "1")
    with pytest.raises(RooftopError) as refused:
        saved.restore(abstract(small(0)))
    assert all(str(file) in str(refused.value) for file in (path, *others))


def test_every_file_is_checked(saved: Checkpoints) -> None:
    for path in files_of(saved.folder / "3"):
        content = path.read_bytes()
        path.write_bytes(content[:-1])
        with pytest.raises(RooftopError, match=path.name):
            saved.verify(3)
        path.write_bytes(content)
    saved.verify(3)


def test_a_damaged_newest_is_replaced_by_the_run_that_goes_on(saved: Checkpoints) -> None:
    truncate(saved.folder / "3")
    again = Checkpoints(saved.folder, keep=1)
    assert again.restore(abstract(small(0))).step == 2
    again.save(3, small(3), {})
    restored = again.restore(abstract(small(0)))
    assert again.steps() == (3,) and restored.step == 3 and same(restored.state, small(3))


def test_where_there_is_none(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "nothing")
    assert checkpoints.steps() == ()
    with pytest.raises(RooftopError, match="nothing"):
        checkpoints.restore(abstract(small(0)))
    with pytest.raises(RooftopError, match="5"):
        checkpoints.restore(abstract(small(0)), step=5)
    for wrong in ({"keep": 0}, {"every": 0}):
        with pytest.raises(RooftopError, match="keep"):
            Checkpoints(tmp_path, **wrong)


def test_at_every_moment_a_whole_checkpoint_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed before or after any change to the folder can be restored, and goes on."""
    folder, moments = tmp_path / "run", list[tuple[Path, set[int]]]()
    standing = {1}

    def watched(change: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            before = shutil.copytree(folder, tmp_path / f"moment {len(moments)}")
            moments.append((before, set(standing)))
            answer = change(*arguments, **named)
            after = shutil.copytree(folder, tmp_path / f"moment {len(moments)}")
            moments.append((after, set(standing)))
            return answer

        return call

    checkpoints = Checkpoints(folder, keep=1)
    checkpoints.save(1, small(1), {"seed": 1})
    checkpoints.wait()
    rmtree = shutil.rmtree

    def torn(path: Path, **named: Any) -> None:
        """A removal that is watched half-way."""
        watched((path / "manifest.json").unlink if (path / "manifest.json").exists() else lambda: None)()
        rmtree(path, **named)

    with monkeypatch.context() as patch:
        patch.setattr(state_module, "write_text", watched(state_module.write_text))
        patch.setattr(state_module.shutil, "rmtree", torn)
        patch.setattr(Path, "rename", watched(Path.rename))
        for step, seed in ((2, 2), (2, 20), (3, 3)):
            standing |= {seed}
            checkpoints.save(step, small(seed), {"seed": seed})
            checkpoints.wait()
            standing &= {seed}
    names = {path.name for moment, _ in moments for path in moment.iterdir()}
    assert names >= {"1", "2", "3", "2.writing", "2.replaced", "1.removed"}
    for moment, seeds in moments:
        left = Checkpoints(moment, keep=1)
        restored = left.restore(abstract(small(0)))
        assert restored.extra["seed"] in seeds and not restored.refused
        assert same(restored.state, small(restored.extra["seed"]))
        left.save(4, small(4), {})
        left.wait()
        assert [path.name for path in moment.iterdir()] == ["4"]


KILLED = """
import sys
from pathlib import Path
import numpy as np
from rooftop.runs.checkpoints import Checkpoints
import jax
checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
for step in range(1, 1000):
    draw = np.random.default_rng(step).normal(size=(8, 4096)).astype(np.float32)
    checkpoints.save(step, {"a": jax.device_put(draw[:4]), "b": jax.device_put(draw[4:])}, {})
    print(step, flush=True)
"""


def test_kill_in_the_middle(tmp_path: Path) -> None:
    """Killed while the background still writes: the newest that is complete is the last or the one before it."""
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line == "4\n")
        process.kill()
    assert process.returncode == -signal.SIGKILL
    blank = jax.ShapeDtypeStruct((4, 4096), np.float32, sharding=NamedSharding(mesh_of(), P()))
    restored = Checkpoints(tmp_path).restore({"a": blank, "b": blank})
    assert restored.step >= int(line) - 1 and not restored.refused
    draw = np.random.default_rng(restored.step).normal(size=(8, 4096)).astype(np.float32)
    assert same(restored.state, {"a": draw[:4], "b": draw[4:]})


def test_a_full_disk_keeps_the_last_good_one(saved: Checkpoints) -> None:
    """Stood in for by a limit on the size of files, which fails a write half-way as a full disk does."""
    big = {"matrix": jnp.asarray(np.random.default_rng(0).normal(size=(512, 1024)), jnp.float32)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, hard))
    try:
        saved.save(4, big, {})
        with pytest.raises(RooftopError, match=r"step 4: got 'File too large'.*step 3 is the newest") as full:
            saved.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "\n" not in str(full.value)
    assert sorted(path.name for path in saved.folder.iterdir()) == ["1", "2", "3"]
    assert same(saved.restore(abstract(small(0))).state, small(3))
    saved.save(4, big, {})
    assert same(saved.restore(abstract(big)).state, big)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Pauses between attempts to save, which are not taken."""
    pauses = list[float]()
    monkeypatch.setattr(state_module, "time", SimpleNamespace(sleep=pauses.append))
    return pauses


def test_a_full_disk_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save in the background that failed is made up for by the next one, which waits for room."""
    said, limit = list[str](), resource.getrlimit(resource.RLIMIT_FSIZE)
    checkpoints = Checkpoints(tmp_path, on_message=said.append)
    big = {"matrix": jnp.asarray(np.random.default_rng(0).normal(size=(512, 1024)), jnp.float32)}
    room = SimpleNamespace(sleep=lambda _: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    monkeypatch.setattr(state_module, "time", room)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, limit[1]))
    try:
        checkpoints.save(1, big, {})
        checkpoints.save(2, big, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert checkpoints.steps() == (2,) and same(checkpoints.restore(abstract(big)).state, big)
    assert said == [
        "checkpoint of step 1 was not written: File too large; saving step 2 instead",
        "checkpoint of step 2: File too large; trying again in 1 s",
    ]


def test_a_disk_that_fails_is_replaced_by_a_second_one(tmp_path: Path, impatient: list[float]) -> None:
    """Its checkpoints count, until newer ones of the first disk do."""
    said = list[str]()
    disk, broken = tmp_path / "disk", tmp_path / "broken"
    checkpoints = Checkpoints(disk / "checkpoints", keep=2, also=tmp_path / "also", on_message=said.append)
    checkpoints.save(1, small(1), {})
    checkpoints.wait()
    disk.rename(broken)
    disk.write_text("no folder")
    for step in (2, 3):
        checkpoints.save(step, small(step), {})
    assert impatient == [1.0, 4.0, 1.0, 4.0]
    assert checkpoints.steps() == (2, 3)
    assert said[-1] == f"checkpoint of step 3 is in {tmp_path / 'also'}"
    assert same(checkpoints.restore(abstract(small(0))).state, small(3))
    # A new process, with the disk back: 1 is old, and goes with the next save.
    disk.unlink()
    broken.rename(disk)
    again = Checkpoints(disk / "checkpoints", keep=2, also=tmp_path / "also")
    assert again.steps() == (1, 2, 3)
    assert again.restore(abstract(small(0))).step == 3
    again.save(4, small(4), {})
    again.wait()
    assert again.steps() == (3, 4)
    assert [path.name for path in (tmp_path / "also").iterdir()] == ["3"]
    truncate(disk / "checkpoints" / "4")
    restored = again.restore(abstract(small(0)))
    assert restored.step == 3 and len(restored.refused) == 1
    with pytest.raises(RooftopError, match="save-also: got"):
        Checkpoints(disk, also=disk)


def test_a_folder_that_cannot_be_made(tmp_path: Path, impatient: list[float]) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RooftopError, match=r"step 1: got 'Not a directory'"):
        Checkpoints(tmp_path / "file" / "run").save(1, small(1), {})


def together(processes: int, folder: Path, *verbs: str) -> str:
    """Run checkpoint_process.py in several processes; the last line that the first one prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    program = str(Path(__file__).parents[1] / "support" / "checkpoint_process.py")
    running = [
        subprocess.Popen(
            [sys.executable, program, str(process), str(processes), port, str(folder), *verbs],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in range(processes)
    ]
    said = [process.communicate()[0] for process in running]
    assert [process.returncode for process in running] == [0] * processes, said
    return said[0].splitlines()[-1]


def test_two_processes_to_one_and_back(tmp_path: Path) -> None:
    """Two processes of four devices save, one of eight restores and saves, two restore past what is damaged."""
    together(2, tmp_path, "save", "1", "save", "2", "save", "2", "restore")
    answer = json.loads(together(1, tmp_path, "save", "3", "restore"))
    assert answer == {"step": 3, "extra": {"seed": 3}, "refused": []}
    path = truncate(tmp_path / "3")
    answer = json.loads(together(2, tmp_path, "restore", "save", "4"))
    assert (answer["step"], answer["extra"]) == (2, {"seed": 2})
    assert len(answer["refused"]) == 1 and str(path) in answer["refused"][0]
    assert json.loads(together(1, tmp_path, "restore"))["step"] == 4
