"""Training runs as a user has them: they learn, go on bit for bit, and end with one line."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest

from rooftop.core.scopes import is_scope
from tests.support.forks import BEFORE, Fork
from tests.support.ports import free_port
from tests.support.training_runs import (
    ENVIRONMENT,
    ROOFTOP,
    Process,
    command,
    finish,
    run,
    start,
    start_new,
    write_corpus,
)


def losses(run: Path) -> dict[int, float]:
    """Step -> loss, as metrics.jsonl has them."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    pairs = [(record["step"], record["loss"]) for record in records if "loss" in record]
    assert len(dict(pairs)) == len(pairs), "a step is recorded twice"
    return dict(pairs)


def checkpoint_arrays(run: Path, step: int) -> dict[str, bytes]:
    """The content of every array of a checkpoint, by its path in the state."""
    with ocp.StandardCheckpointer() as checkpointer:
        arrays = checkpointer.restore((run / "checkpoints" / str(step) / "state").absolute())
    return {name: np.asarray(value).tobytes() for name, value in arrays.items()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(corpus: Path) -> Iterator[Path]:
    """A run of 12 steps that nothing disturbs."""
    folder = corpus / "whole"
    done = finish(start_new(command(corpus, folder, steps=12, save_every=5, eval_every=6, json=True)))
    assert done.status == 0, done.err
    (corpus / "whole.json").write_text(done.out)
    yield folder


def wait_for_line(process: Process, beginning: str) -> None:
    """Read what a process says up to a line."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith(beginning):
            return
    raise AssertionError(f"ended before {beginning!r}: {process.communicate()[1]}")


def test_a_run_says_what_it_did(whole: Path) -> None:
    summary = json.loads((whole.parent / "whole.json").read_text())
    records = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == list(range(1, 13))
    assert summary["last"] == steps[-1]
    assert summary["step"] == 12 and not summary["stopped"]
    for record in steps:
        assert record["tokens"] <= 8 * 32
        assert record["tokens_per_s"] == pytest.approx(record["tokens"] / record["seconds"])
        assert 0 <= record["data_share"] <= 1
        assert record["mfu"] is None, "a CPU is in no catalogue"
    # Warm-up over four steps, then half a cosine to a tenth at step 40.
    assert steps[0]["learning_rate"] == pytest.approx(1e-2 / 4)
    assert steps[3]["learning_rate"] == pytest.approx(1e-2)
    share = (1 + math.cos(math.pi * 7 / 36)) / 2
    assert steps[11]["learning_rate"] == pytest.approx(1e-2 * (0.1 + 0.9 * share))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    evaluations = [record for record in records if "eval_loss" in record]
    assert [record["step"] for record in evaluations] == [6, 12]
    assert summary["evaluation"]["perplexity"] == pytest.approx(math.exp(evaluations[-1]["eval_loss"]))
    assert sorted(int(path.name) for path in (whole / "checkpoints").iterdir()) == [10, 12]


def test_run_json_says_how_it_was_made(whole: Path) -> None:
    about = json.loads((whole / "run.json").read_text())
    assert about["kind"] == "run"
    assert about["job"]["program"]["batch"] == 8
    assert about["devices"]["platform"] == "cpu"
    assert set(about["versions"]) >= {"python", "jax", "jaxlib", "optax"}
    assert [session["step"] for session in about["sessions"]] == [0]
    assert "attention causal" in about["mfu_convention"]


def test_a_run_that_goes_on_has_the_same_losses(corpus: Path, whole: Path) -> None:
    """By the same command, and by --resume; what was recorded and not saved is done again."""
    folder = corpus / "parts"
    assert run(command(corpus, folder, steps=4, save_every=5)).status == 0
    assert run(command(corpus, folder, steps=9, save_every=5)).status == 0
    # As if it had been killed behind step 9, before that was saved.
    shutil.rmtree(folder / "checkpoints" / "9")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 10, "lo')
    assert max(losses_before_kill(folder)) == 9
    done = run([*ROOFTOP, "train", "--resume", str(folder), "--steps", "12"])
    assert done.status == 0, done.err
    assert "going on after step 5" in done.out
    assert losses(folder) == losses(whole)
    assert checkpoint_arrays(folder, 12) == checkpoint_arrays(whole, 12)
    about = json.loads((folder / "run.json").read_text())
    assert [session["step"] for session in about["sessions"]] == [0, 4, 5]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_other_optimizers_go_on_bit_for_bit(corpus: Path, optimizer: str) -> None:
    straight, parts = (corpus / f"{optimizer}-{name}" for name in ("straight", "parts"))
    assert run(command(corpus, straight, steps=4, optimizer=optimizer)).status == 0
    for steps in (2, 4):
        assert run(command(corpus, parts, steps=steps, optimizer=optimizer)).status == 0
    assert losses(parts) == losses(straight)
    assert checkpoint_arrays(parts, 4) == checkpoint_arrays(straight, 4)


def abort_evaluations() -> None:
    """Make an evaluation end the process as a failed check of XLA does. Called in a fork, before the command."""
    from rooftop.train.evaluate import Forward

    Forward.evaluate = lambda *_, **__: os.abort()  # type: ignore[method-assign]


@pytest.mark.skipif(sys.platform != "linux", reason="a process is prepared in a fork")
def test_an_evaluation_that_aborts_loses_no_step_and_is_made_up_for(corpus: Path, whole: Path) -> None:
    folder = corpus / "aborted"
    words = command(corpus, folder, steps=6, save_every=5, eval_every=6)
    changes = ENVIRONMENT | {BEFORE: "tests.train.test_train:abort_evaluations"}
    assert finish(Fork(words[len(ROOFTOP) :], changes)).status == -signal.SIGABRT
    assert (folder / "checkpoints" / "6").is_dir()
    for _ in range(2):
        assert run(words).status == 0
        # Made up for once.
        assert records(folder) == [record for record in records(whole) if record["step"] <= 6]


def records(folder: Path) -> list[dict[str, object]]:
    """Steps and evaluations, without their times."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    compared = ("step", "loss", "eval_loss", "eval_tokens")
    return [{name: value for name, value in json.loads(line).items() if name in compared} for line in lines]


def losses_before_kill(folder: Path) -> list[int]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()[:-1]
    return [json.loads(line)["step"] for line in lines]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_go_on(corpus: Path, whole: Path, number: signal.Signals) -> None:
    folder = corpus / number.name
    # More steps than it can do before the signal arrives.
    process = start(command(corpus, folder, steps=100_000))
    wait_for_line(process, "step 1/")
    process.send_signal(number)
    done = finish(process)
    assert (done.status, done.err) == (0, "")
    saved = [int(path.name) for path in (folder / "checkpoints").iterdir()]
    assert f"stopped by {number.name}, saved at step {max(saved)}" in done.out
    assert f"rooftop train --resume {folder}" in done.out
    assert max(losses(folder)) == max(saved)
    common = losses(folder).keys() & losses(whole).keys()
    assert all(losses(folder)[step] == losses(whole)[step] for step in common)


def test_a_signal_before_the_first_step_leaves_nothing_half_done(corpus: Path) -> None:
    done = run(
        [sys.executable, "-c", f"import os, signal, sys\n"
         f"def raising(*a, **k): os.kill(os.getpid(), signal.SIGTERM)\n"
         f"from rooftop.train import start\nstart.open_dataset = raising\n"
         f"from rooftop.cli.main import main\nmain({command(corpus, corpus / 'early', steps=3)[3:]!r})"]
    )  # fmt: skip
    assert done.status == 0, done.err
    assert "stopped by SIGTERM before the first step; the same command begins again" in done.out
    assert not (corpus / "early" / "run.json").exists()


def kill_at_random(corpus: Path, folder: Path, steps: int, kills: int) -> None:
    """Start again and again, and kill at a random moment, so many times; then let it end."""
    draw = random.Random(kills)
    words = command(corpus, folder, steps=steps, save_every=3)
    file = folder / "metrics.jsonl"
    for _ in range(kills):
        process = start(words)
        after = draw.choice([None, 0, 1, 2, 4])
        if after is None:
            # It has read its data, and neither compiled nor restored anything.
            wait_for_line(process, "")
        else:
            wait_for_growth(process, file, after)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    done = run(words)
    assert done.status == 0, done.err


def wait_for_growth(process: Process, file: Path, lines: int) -> None:
    """Wait until a process has added so many lines to a file, or has ended."""
    before = file.stat().st_size if file.exists() else 0
    while process.poll() is None:
        size = file.stat().st_size if file.exists() else 0
        # What was not saved is dropped before it is done again.
        before = min(before, size)
        if size > before and file.read_bytes()[before:].count(b"\n") >= lines:
            return


def test_a_killed_run_ends_as_one_that_was_not(corpus: Path, whole: Path) -> None:
    folder = corpus / "killed"
    kill_at_random(corpus, folder, steps=12, kills=2)
    assert losses(folder) == losses(whole)
    assert checkpoint_arrays(folder, 12) == checkpoint_arrays(whole, 12)


@pytest.mark.slow
def test_twenty_kills_change_no_bit(corpus: Path) -> None:
    assert run(command(corpus, corpus / "calm", steps=60, save_every=3)).status == 0
    kill_at_random(corpus, corpus / "chaos", steps=60, kills=20)
    assert losses(corpus / "chaos") == losses(corpus / "calm")
    assert checkpoint_arrays(corpus / "chaos", 60) == checkpoint_arrays(corpus / "calm", 60)


#: Between processes gloo sums in an order of its own. So a run of two that goes on as two is the undisturbed run of two
#: bit for bit, while steps of one process differ from those of two by rounding, and what follows them too.
TOGETHER = {"mesh": "fsdp=2,tensor=2,context=2", "save_every": 4}


def together(corpus: Path, folder: Path, steps: int, *, devices: int = 4, mesh: str = TOGETHER["mesh"]) -> None:
    """Two processes of so many devices each resume to so many steps."""
    where = f"127.0.0.1:{free_port()}"
    how = TOGETHER | {"mesh": mesh}
    words = command(corpus, folder, steps=steps, devices=devices, coordinator=where, processes=2, **how)
    first, second = [
        finish(process) for process in [start([*words, "--process", str(process)], worker=True) for process in range(2)]
    ]
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert "step" in first.out
    assert second.out == first.err == second.err == ""


@pytest.mark.parametrize(
    ("devices", "mesh"), [(2, "fsdp=2,tensor=2"), pytest.param(4, TOGETHER["mesh"], marks=pytest.mark.slow)]
)
def test_two_processes_train_as_one(corpus: Path, devices: int, mesh: str) -> None:
    """Bit for bit where sums have the same order, to 1e-6 where not."""
    alone, two = (corpus / f"{name}{devices}" for name in ("alone", "two"))
    assert run(command(corpus, alone, steps=8, devices=2 * devices, **(TOGETHER | {"mesh": mesh}))).status == 0
    together(corpus, two, 8, devices=devices, mesh=mesh)
    undisturbed = losses(two)
    assert undisturbed == pytest.approx(losses(alone), abs=1e-6, rel=0)
    records = [json.loads(line) for line in (two / "metrics.jsonl").read_text().splitlines()]
    for record in (record for record in records if "loss" in record):
        assert record["slowest_process"] in (0, 1) and 0 <= record["median_host_s"] <= record["slowest_host_s"]
    # As if both had been killed before step 8 was saved: steps 5 to 8 are done again.
    shutil.rmtree(two / "checkpoints" / "8")
    together(corpus, two, 8, devices=devices, mesh=mesh)
    assert [session["step"] for session in json.loads((two / "run.json").read_text())["sessions"]] == [0, 4]
    assert losses(two) == undisturbed


@pytest.mark.slow
def test_a_run_goes_from_two_processes_to_one_and_back(corpus: Path) -> None:
    together(corpus, corpus / "straight", 8)
    together(corpus, corpus / "both", 3)
    assert run(command(corpus, corpus / "both", steps=6, devices=8, **TOGETHER)).status == 0
    together(corpus, corpus / "both", 8)
    resumed, straight = losses(corpus / "both"), losses(corpus / "straight")
    assert [resumed[step] for step in (1, 2, 3)] == [straight[step] for step in (1, 2, 3)]
    assert resumed == pytest.approx(straight, abs=1e-6, rel=0)


@pytest.mark.slow
def test_padding_changes_no_loss(corpus: Path) -> None:
    """5 sequences of 30 tokens on one device, and on meshes that divide neither."""
    sizes = {"batch_seqs": 5, "seq": 30, "eval_every": 4, "save_every": 4}
    alone, padded = corpus / "unpadded", corpus / "padded"
    assert run(command(corpus, alone, steps=8, mesh="data=1", **sizes)).status == 0
    for steps, mesh, devices in ((4, "fsdp=2,context=2,tensor=2", 8), (8, "data=3,tensor=2", 6)):
        done = run(command(corpus, padded, steps=steps, devices=devices, mesh=mesh, **sizes))
        assert done.status == 0, done.err
    assert losses(padded) == pytest.approx(losses(alone), abs=1e-5, rel=0)
    assert evaluations(padded) == pytest.approx(evaluations(alone), abs=1e-5, rel=0)


def evaluations(run: Path) -> dict[int, float]:
    """Step -> loss of the documents held out."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {record["step"]: record["eval_loss"] for record in records if "eval_loss" in record}


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_lost_process_ends_the_other_with_one_line(corpus: Path, victim: int) -> None:
    folder = corpus / f"lost{victim}"
    where = f"127.0.0.1:{free_port()}"
    words = command(corpus, folder, steps=100_000, devices=2, coordinator=where, processes=2)
    processes = [start([*words, "--process", str(process)]) for process in range(2)]
    wait_for_line(processes[0], "step 1/")
    processes[victim].send_signal(signal.SIGKILL)
    done = finish(processes[1 - victim])
    processes[victim].communicate()
    assert done.status == 1
    assert done.line.startswith("rooftop: the run has lost one of its processes")
    assert done.line.endswith(f"rooftop train --resume {folder}")


def test_a_signal_to_one_process_stops_both(corpus: Path) -> None:
    folder = corpus / "agreed"
    where = f"127.0.0.1:{free_port()}"
    words = command(corpus, folder, steps=100_000, devices=2, coordinator=where, processes=2)
    processes = [start([*words, "--process", str(process)]) for process in range(2)]
    wait_for_line(processes[0], "step 1/")
    processes[1].send_signal(signal.SIGTERM)
    first, second = map(finish, processes)
    assert (first.status, second.status) == (0, 0), first.err + second.err
    assert "stopped by another process, saved at step" in first.out


def test_a_full_disk_keeps_the_last_good_checkpoint(corpus: Path, whole: Path) -> None:
    folder = corpus / "full"
    assert run(command(corpus, folder, steps=5)).status == 0
    # No file above 40 kB can be written: records are shorter, arrays are not.
    words = ["bash", "-c", 'ulimit -f 40; exec "$@"', "-", *command(corpus, folder, steps=12, save_every=3)]
    done = run(words)
    assert done.status == 2
    # The save of step 6 fails in the background; that of step 9 waits for room.
    assert done.line.startswith("rooftop: checkpoint of step 9: got 'File too large'")
    assert "step 5 is the newest that is whole" in done.line
    assert done.line.endswith(f", or --save-also DIR, a second one; to go on: rooftop train --resume {folder}")
    assert "checkpoint of step 9: File too large; trying again in 4 s" in done.out
    assert run(command(corpus, folder, steps=12)).status == 0
    assert losses(folder) == losses(whole)


def test_a_loss_that_is_no_number_is_traced_to_a_scope(corpus: Path) -> None:
    folder = corpus / "nan"
    done = run(command(corpus, folder, steps=30, lr=1e30, clip=0, save_every=1))
    assert done.status == 1
    match = re.search(r"the first (NaN|infinity|NaN or infinity) is made in (\S+) \(", done.line)
    assert match is not None, done.line
    assert is_scope(match[2])
    assert re.match(r"rooftop: training stopped at step \d+: (the loss|a gradient) is not a finite number", done.line)
    assert "the newest checkpoint is of step" in done.line


def test_a_run_is_not_continued_with_other_data_or_another_program(corpus: Path, whole: Path) -> None:
    """Settings that depend on the devices may differ, as if the run had begun on others."""
    about = json.loads((whole / "run.json").read_text())
    about["job"]["program"] |= {"loss_chunks": 2, "microbatches": 4, "schedule": "zero_bubble"}
    others = {"attention": "reference", "attention_block": 7, "context_attention": "all_gather", "remat": "none"}
    about["job"]["program"]["computation"] |= others
    (whole / "run.json").write_text(json.dumps(about))
    done = run(command(corpus, whole, steps=13, lr=2e-2))
    assert (done.status, done.line) == (
        2,
        f"rooftop: program.optimizer.learning_rate of the run {whole}: got 0.02; accepted: 0.01, as it began; "
        "or another folder for a new run",
    )
    some = corpus / "corpus" / "0*.txt"
    done = run(command(corpus, whole, steps=13, data=some))
    assert done.status == 2
    assert done.line.startswith(f"rooftop: data of the run {whole}: got ")


def test_a_trace_is_written(corpus: Path) -> None:
    folder = corpus / "traced"
    assert run(command(corpus, folder, steps=5, profile="steps=3..4")).status == 0
    assert list((folder / "profile").rglob("*.xplane.pb"))


def test_no_step_at_all_exports_what_it_read(corpus: Path) -> None:
    """Weights written by one run are read by another, and come out as they were."""
    first, second = corpus / "published", corpus / "again"
    assert run(command(corpus, corpus / "source", steps=1, export=first)).status == 0
    words = command(corpus, corpus / "copy", steps=0, model=None, vocab=None, init=first, export=second)
    done = run(words)
    assert done.status == 0, done.err
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_samples_are_drawn_and_drawn_alike(corpus: Path, whole: Path) -> None:
    words = command(corpus, whole, steps=12, samples=3, sample_tokens=6, prompt="ab", json=True)
    drawn = run(words), run(words)
    texts = [json.loads(done.out)["samples"] for done in drawn]
    assert texts[0] == texts[1]
    assert len(texts[0]) == 3 and all(text.startswith("ab") for text in texts[0])


@pytest.fixture(scope="module")
def plan(corpus: Path) -> Path:
    """A plan for sixteen TPUs, of a model that fits here."""
    file = corpus / "plan.json"
    words = [str(corpus / "config.json"), "--on", "v5e:4x4", "--batch-seqs", "32", "--seq", "32"]
    words += ["--mesh", "fsdp=8,tensor=2", "-o", str(file)]
    assert run([*ROOFTOP, "plan", "train", *words]).status == 0
    return file


def planned(corpus: Path, plan: Path, run_: str, **options: object) -> list[str]:
    words = command(corpus, corpus / run_, model=None, batch_seqs=None, seq=None, **options)
    return [*words[:4], str(plan), *words[4:]]


def test_a_plan_for_other_devices_says_how_it_maps(corpus: Path, plan: Path) -> None:
    done = run(planned(corpus, plan, "mapped", steps=2, devices=8))
    assert (done.status, done.line) == (
        2,
        "rooftop: plan slice: got 'v5e:4x4, and here are 8 x cpu'; accepted: --shrink to run it with mesh "
        "fsdp=4,tensor=2, 16 sequences of 32; or --as-is to keep mesh fsdp=8,tensor=2, 32 sequences of 32, "
        "--devices 16",
    )


def test_a_plan_runs_on_local_devices(corpus: Path, plan: Path) -> None:
    done = run(planned(corpus, plan, "local", steps=2, devices=8, shrink=True, matmul_dtype="int8", json=True))
    assert done.status == 0, done.err
    summary = json.loads(done.out)
    assert {axis: size for axis, size in summary["mesh"].items() if size > 1} == {"fsdp": 4, "tensor": 2}
    program = json.loads((corpus / "local" / "run.json").read_text())["job"]["program"]
    assert (program["batch"], program["compute_dtype"]) == (16, "bf16")
    assert program["computation"]["matmul"] == "int8"
    assert json.loads((corpus / "local" / "plan.json").read_text()) == json.loads(plan.read_text())
    # The run has its plan with it.
    plan.rename(corpus / "moved.json")
    try:
        words = [*ROOFTOP, "train", "--resume", str(corpus / "local"), "--steps", "3"]
        assert run(words).status == 0
    finally:
        (corpus / "moved.json").rename(plan)


def test_a_broken_plan_is_named_before_missing_options(corpus: Path) -> None:
    """And before JAX is imported, which takes seconds."""
    broken = corpus / "broken.json"
    broken.write_text('{"kind": "plan"')
    words = ["train", str(broken), "--devices", "2"]
    check = "import sys\ntry:\n    main(sys.argv[1:])\nfinally:\n    assert 'jax' not in sys.modules"
    done = run([sys.executable, "-c", f"from rooftop.cli.main import main\n{check}", *words])
    accepted = "a plan.json written by rooftop plan (not JSON: Expecting ',' delimiter: line 1 column 16 (char 15))"
    assert (done.status, done.line) == (2, f"rooftop: plan: got '{broken}'; accepted: {accepted}")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"run": None}, "run: got nothing; accepted: --run DIR, a folder to keep the run in"),
        ({"steps": None}, "steps: got nothing; accepted: --steps N, a whole number of steps"),
        ({"data": None}, "data: got nothing; accepted: --data PATH: a file, a folder or a glob"),
        (
            {"model": None},
            "model: got nothing; accepted: PLAN.json, --model (a preset, a config.json or llama:4M) or --init",
        ),
        (
            {"mesh": "fsdp=2"},
            "mesh: got 'fsdp=2'; accepted: at most the 1 x cpu here; --devices 2 emulates them",
        ),
        ({"decay": "cosin"}, "decay: got 'cosin'; accepted: did you mean cosine? one of constant, cosine, linear"),
        (
            {"model": "gpt3-175b", "seq": 4096},
            "seq: got 4096; accepted: at most 2048: the model has learned no more positions",
        ),
        ({"profile": "10"}, "profile: got '10'; accepted: steps=A..B with A up to B, counted from 1: steps=10..13"),
        ({"lr": -1}, "lr: got '-1'; accepted: a number from 0"),
        ({"export": Path("/")}, "export folder: got '/'; accepted: a path where nothing is yet"),
        ({"as_is": True, "shrink": True}, "as-is: got '--as-is and --shrink'; accepted: one of the two"),
        ({"as_is": True}, "as-is or shrink: got 'no plan'; accepted: a PLAN.json of rooftop plan train"),
        ({"hold_out": 2}, "hold-out: got 2.0; accepted: a share of the documents from 0 to less than 1"),
        (
            {"devices": 8, "mesh": "fsdp=3"},
            "mesh: got 'fsdp=3: 3 devices'; accepted: axes whose sizes multiply to the 8 devices of --devices",
        ),
        (
            {"devices": 2, "mesh": "fsdp=3", "coordinator": "127.0.0.1:1", "processes": 2, "process": 0},
            "mesh: got 'fsdp=3: 3 devices'; accepted: axes whose sizes multiply to the 2 x 2 devices of --devices",
        ),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_bad_input_is_one_line(corpus: Path, options: dict[str, object], line: str) -> None:
    settings = {"steps": 2, "run": corpus / "bad"} | options
    folder = settings.pop("run")
    done = run(command(corpus, folder, **settings))
    assert (done.status, done.line) == (2, f"rooftop: {line}")


def test_rotated_positions_reach_beyond_the_longest_sequence_of_the_model(corpus: Path) -> None:
    """The plan of such a run says in its first line that the model was made for 64 tokens."""
    done = run(command(corpus, corpus / "longer", steps=1, seq=96))
    assert done.status == 0, done.err


def test_a_run_has_one_process_group_at_a_time(corpus: Path) -> None:
    folder = corpus / "claimed"
    process = start(command(corpus, folder, steps=100_000))
    wait_for_line(process, "")
    done = run(command(corpus, folder, steps=3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert done.line == f"rooftop: run: got '{folder}'; accepted: a folder that no other process trains in now"


def test_what_is_not_installed_is_named(corpus: Path) -> None:
    hidden = "import sys\nsys.modules['tokenizers'] = None\nfrom rooftop.cli.main import main\nmain(sys.argv[1:])"
    done = run([sys.executable, "-c", hidden, *command(corpus, corpus / "bare", steps=2)[3:]])
    accepted = "a Python that has it: pip install 'rooftop[train]'"
    assert (done.status, done.line) == (2, f"rooftop: tokenizers: got 'not installed'; accepted: {accepted}")
