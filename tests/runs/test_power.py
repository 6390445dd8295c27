"""Power cuts at every operation: what was saved is there, whole, or what was saved before it."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax import P
from jax.sharding import NamedSharding

from rooftop.checkpoints.huggingface import load_weights, save_weights
from rooftop.checkpoints.huggingface_files import Checkpoint
from rooftop.checkpoints.tokenizer import Tokenizer, train_bpe
from rooftop.core.files import publish, write_text
from rooftop.models import from_huggingface
from rooftop.programs.parameters import describe
from rooftop.runs.checkpoints import Checkpoints
from rooftop.train.data import tokens as tokens_module
from rooftop.train.data.corpus import find_corpus
from rooftop.train.data.tokens import tokenise
from tests.support.curves import mesh_of
from tests.support.power import Crash, Disk
from tests.support.training_runs import CONFIG

#: Draws of what was torn and reordered, at each moment.
TORN = 1
SLOW_TORN = 12


def disks(crash: Crash, folder: Path, torn: int) -> list[Path]:
    """Disks after a crash, in new folders."""
    hows = [("lost", 0), ("names", 0), *(("torn", seed) for seed in range(torn))]
    folder.mkdir()
    paths = []
    for number, (how, seed) in enumerate(hows):
        paths.append(folder / str(number))
        crash.write(paths[-1], how, seed)
    return paths


def content(folder: Path) -> str:
    """A digest of all that is in a folder."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        total.update(f"{path.relative_to(folder)} {path.is_dir()}".encode())
        total.update(b"" if path.is_dir() else path.read_bytes())
    return total.hexdigest()


def cut_everywhere(
    tmp_path: Path, root: Path, torn: int, work: Callable[[Callable[[str], None]], None],
    check: Callable[[Path, str], None],
) -> int:  # fmt: skip
    """Do ``work``, cut the power at every operation, and ``check`` each disk; the number of different disks.

    ``work`` calls its argument with what is true from then on, which ``check`` gets.
    """
    seen, state = set[tuple[str, str]](), ""
    crashes = list[tuple[Crash, str]]()

    def now(words: str) -> None:
        nonlocal state
        state = words

    with Disk(root, lambda crash: crashes.append((crash, state))).recording():
        work(now)
    cuts = 0
    for number, (crash, words) in enumerate(crashes):
        for disk in disks(crash, tmp_path / f"cut{number}", torn):
            if (key := (content(disk), words)) not in seen:
                seen.add(key)
                check(disk, words)
                cuts += 1
    return cuts


def state_of(seed: int) -> dict[str, Any]:
    mesh = mesh_of(fsdp=2)
    matrix = np.random.default_rng(seed).normal(size=(16, 8)).astype(np.float32)
    return {"matrix": jax.device_put(matrix, NamedSharding(mesh, P("fsdp"))), "step": np.int32(seed)}


@pytest.mark.parametrize("torn", [TORN, pytest.param(SLOW_TORN, marks=pytest.mark.slow)])
def test_a_power_cut_leaves_a_whole_checkpoint(tmp_path: Path, torn: int) -> None:
    """The only checkpoint that is kept, before, while and after it is followed or replaced."""
    root = tmp_path / "run"
    root.mkdir()
    blank = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state_of(0))
    blank["matrix"] = jax.ShapeDtypeStruct((16, 8), np.float32, sharding=state_of(0)["matrix"].sharding)

    def work(now: Callable[[str], None]) -> None:
        checkpoints = Checkpoints(root / "checkpoints", keep=1)
        whole = 0
        for step, seed in ((1, 1), (2, 2), (2, 20), (3, 3)):
            now(f"{whole} {seed}")
            checkpoints.save(step, state_of(seed), {"seed": seed})
            checkpoints.wait()
            now(f"{seed}")
            # An operation for a power cut here.
            write_text(root / "records", f"{seed}")
            whole = seed
        checkpoints.close()

    def check(disk: Path, words: str) -> None:
        accepted = [int(word) for word in words.split()]
        checkpoints = Checkpoints(disk / "checkpoints", keep=1)
        if 0 in accepted and not checkpoints.steps():
            return
        restored = checkpoints.restore(blank)
        assert restored.extra["seed"] in accepted and not restored.refused, words
        expected = state_of(restored.extra["seed"])
        assert all(np.array_equal(restored.state[name], expected[name]) for name in expected)
        checkpoints.close()

    assert cut_everywhere(tmp_path, root, torn, work, check) > 100


@pytest.mark.parametrize("synced", [True, False])
def test_the_disk_of_these_tests_finds_what_is_not_synchronised(tmp_path: Path, synced: bool) -> None:
    """Without the fsyncs of a publication, some power cut leaves a name without its content."""
    root, left = tmp_path / "disk", set[str]()
    root.mkdir()

    def work(now: Callable[[str], None]) -> None:
        (root / "new").mkdir()
        (root / "new" / "file").write_text("content")
        if synced:
            publish(root / "new", root / "final")
        else:
            (root / "new").rename(root / "final")

    def check(disk: Path, words: str) -> None:
        file = disk / "final" / "file"
        left.add(file.read_text() if file.exists() else "no file" if (disk / "final").exists() else "nothing")

    cut_everywhere(tmp_path, root, 40, work, check)
    assert left == {"nothing", "content"} if synced else left >= {"nothing", "no file", "", "content"}


def test_a_power_cut_leaves_a_whole_export_or_none(tmp_path: Path) -> None:
    """With its tokenizer, which belongs to it."""
    model = from_huggingface(CONFIG | {"vocab_size": 300}, "llama")
    draw = np.random.default_rng(0)
    weights = jax.tree.map(lambda leaf: draw.normal(size=leaf.shape).astype(np.float32), describe(model))
    tokenizer = train_bpe(["a text of a few words, of a few words"], 260)
    root = tmp_path / "out"
    root.mkdir()
    outcomes = set[str]()

    def work(now: Callable[[str], None]) -> None:
        now("under way")
        save_weights(root / "model", model, weights, shard_bytes=60_000, complete=tokenizer.save)
        now("done")
        write_text(root / "after", "")

    def check(disk: Path, words: str) -> None:
        folder = disk / "model"
        outcomes.add(f"{words} {folder.exists()}")
        if not folder.exists():
            assert words == "under way"
            return
        assert Tokenizer.load(folder).digest == tokenizer.digest
        Checkpoint.open(folder)
        abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, np.float32), describe(model))
        with jax.set_mesh(mesh_of()):
            one = NamedSharding(mesh_of(), P())
            abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=one), abstract)
            read = load_weights(folder, model, abstract)
        pairs = zip(jax.tree.leaves(read), jax.tree.leaves(weights), strict=True)
        assert all(np.asarray(one).tobytes() == other.tobytes() for one, other in pairs)

    cut_everywhere(tmp_path, root, 1, work, check)
    assert outcomes >= {"under way False", "done True"}


SAVES = """
import sys
from pathlib import Path
import jax, numpy as np
from rooftop.runs.checkpoints import Checkpoints
checkpoints = Checkpoints(Path(sys.argv[1]), keep=1)
for step in (1, 2):
    checkpoints.save(step, {"a": jax.device_put(np.arange(4096.0)), "b": jax.device_put(np.int32(step))}, {})
checkpoints.close()
"""
#: A system call of strace -yy: its name, the path of its first argument, and the rest up to the result.
CALL = re.compile(r"^\d+ +(\w+)\((?:AT_FDCWD<[^>]*>, )?(?:\d+<([^>]*)>|\"([^\"]*)\")(.*) = (\d+)")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_system_calls_synchronise_all_before_the_name(tmp_path: Path) -> None:
    """Those of all libraries: at the rename, nothing below has been written since its fsync."""
    trace, folder = tmp_path / "trace", tmp_path / "run"
    calls = "openat,write,pwrite64,writev,ftruncate,mkdir,rename,renameat,unlink,unlinkat,rmdir,fsync,fdatasync"
    words = ["strace", "-f", "-yy", "-qq", "-s", "300", "-o", str(trace), "-e", f"trace={calls}"]
    done = subprocess.run([*words, sys.executable, "-c", SAVES, str(folder)], capture_output=True, text=True)
    if "ptrace" in done.stderr.lower():
        pytest.skip(f"no tracing here: {done.stderr.strip()[:80]}")
    assert done.returncode == 0, done.stderr
    dirty, renamed, removed = set[str](), list[str](), list[str]()
    for line in trace.read_text().splitlines():
        if (match := CALL.match(line)) is None:
            continue
        name, descriptor, path, rest, _ = match.groups()
        path = descriptor or path
        if str(folder) not in path:
            continue
        if name in ("write", "pwrite64", "writev", "ftruncate"):
            dirty.add(path)
        elif name in ("fsync", "fdatasync"):
            dirty.discard(path)
        elif name in ("mkdir", "unlink", "rmdir") or (name == "openat" and "O_CREAT" in rest):
            dirty |= {path, str(Path(path).parent)} if name in ("mkdir", "openat") else {str(Path(path).parent)}
        elif name.startswith("rename"):
            if path.endswith(".writing"):
                renamed.append(path)
                assert not [other for other in dirty if other.startswith(path)]
            elif path in (f"{folder}/1", f"{folder}/2"):
                removed.append(path)
                assert str(folder) not in dirty, "a checkpoint is removed before the next has its name on the disk"
            target = rest.split('"')[-2]
            dirty = {other.replace(path, target) if other.startswith(path) else other for other in dirty}
            dirty.add(str(Path(target).parent))
    assert renamed == [f"{folder}/1.writing", f"{folder}/2.writing"] and removed == [f"{folder}/1"]


def test_a_power_cut_leaves_a_file_as_it_was_or_as_it_is(tmp_path: Path) -> None:
    root = tmp_path / "files"
    root.mkdir()
    (root / "plan.json").write_text(json.dumps({"version": 1}))

    def work(now: Callable[[str], None]) -> None:
        now("1 2")
        write_text(root / "plan.json", json.dumps({"version": 2}))
        now("2")
        write_text(root / "after", "")

    def check(disk: Path, words: str) -> None:
        assert str(json.loads((disk / "plan.json").read_text())["version"]) in words.split()

    assert cut_everywhere(tmp_path, root, 4, work, check) >= 3


def test_a_power_cut_leaves_whole_token_ids_or_none(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a text of a few words, of a few words")
    corpus = find_corpus([str(tmp_path / "text.txt")])
    tokenizer = train_bpe([(tmp_path / "text.txt").read_text()], 260)
    root = tmp_path / "cache"
    root.mkdir()
    expected = list[int]()

    def work(now: Callable[[str], None]) -> None:
        store = tokenise(corpus, tokenizer, root / "tokens", vocab=260)
        expected.extend(store.read(0, store.tokens).tolist())

    def check(disk: Path, words: str) -> None:
        for place in (disk / "tokens").glob("*[0-9a-f]") if (disk / "tokens").exists() else ():
            store = tokens_module._opened(place, place.name)
            assert store is not None and store.read(0, store.tokens).tolist() == expected

    cut_everywhere(tmp_path, root, 4, work, check)
